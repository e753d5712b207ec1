"""`headrace events`."""

import base64
from pathlib import Path

import pytest

import headrace as hr
from headrace.events import Event, open_store, open_vault
from tests.cli.conftest import Run

BANK = f"{Path(__file__).parents[2] / 'examples' / '14_bank_account.py'}:ACCOUNTS"


@pytest.fixture
def bank(log: hr.Log) -> hr.Log:
    with open_store(log, "bank") as store:
        store.append("ada", [Event("Opened", {"owner": "Ada"}, subject="7"), Event("Deposited", {"amount": 5})])
        store.append("ada", Event("Withdrawn", {"amount": 2}))
    return log


def test_history(run: Run, bank: hr.Log) -> None:
    assert [(line["version"], line["type"], line["data"]) for line in run("events", "history", "ada", "--json").lines] == [
        (1, "Opened", {"owner": "Ada"}), (2, "Deposited", {"amount": 5}), (3, "Withdrawn", {"amount": 2}),
    ]  # fmt: skip
    assert "Deposited" in run("events", "history", "ada").out
    assert "'bob' has no events" in run("events", "history", "bob", code=1).err


def test_state_now_and_then(run: Run, bank: hr.Log) -> None:
    (now,) = run("events", "state", "ada", "--decider", BANK, "--json").lines
    assert now == {"entity": "ada", "version": 3, "state": {"owner": "Ada", "balance": 3}}
    (then,) = run("events", "state", "ada", "--decider", BANK, "--version", 2, "--json").lines
    assert then["state"]["balance"] == 5
    (before,) = run("events", "state", "ada", "--decider", BANK, "--at", "1 hour ago", "--json").lines
    assert (before["version"], before["state"]["owner"]) == (0, None)
    assert "balance=3" in run("events", "state", "ada", "--decider", BANK).out


@pytest.mark.parametrize("rules", ["nowhere.py:X", BANK.replace("ACCOUNTS", "ACCOUNT"), "x"])
def test_a_decider_that_is_not_there(run: Run, bank: hr.Log, rules: str) -> None:
    assert "decider" in run("events", "state", "ada", "--decider", rules, code=1).err


def test_digest(run: Run, bank: hr.Log) -> None:
    plain = run("events", "digest", "--ranges", 2, "--json").lines
    assert [(line["entities"], line["events"]) for line in plain if line["entities"]] == [(1, 3)]
    with_state = run("events", "digest", "--ranges", 2, "--decider", BANK, "--json").lines
    assert plain != with_state == run("events", "digest", "--ranges", 2, "--decider", BANK, "--json").lines
    assert "digest" in run("events", "digest").out


def test_excise(run: Run, bank: hr.Log) -> None:
    assert "Gone: 1 event. No file has the values" in run("events", "excise", "--subject", "7", "--value", '"Ada"', "--store", "bank").out
    assert [line["version"] for line in run("events", "history", "ada", "--json").lines] == [2, 3]
    assert "nothing of the subject '7'" in run("events", "excise", "--subject", "7", code=1).err


def test_forget(run: Run, bank: hr.Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_MASTER_KEY", base64.b64encode(bytes(32)).decode())
    with open_store(bank, "bank") as store, open_vault(store) as vault:
        sealed = vault.seal("7", "x")
        run("events", "forget", "--subject", "7")
        assert vault.unseal(sealed) is None


def test_the_store_is_named_or_the_only_one(run: Run, log: hr.Log) -> None:
    assert "no event store in this log" in run("events", "digest", code=1).err
    for name in ("one", "two"):
        open_store(log, name).close()
    assert "several event stores: one, two" in run("events", "digest", code=1).err
    assert "did you mean 'two'" in run("events", "digest", "--store", "twoo", code=1).err
