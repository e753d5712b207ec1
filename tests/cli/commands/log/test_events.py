"""`headrace events`."""

import base64
import os
import subprocess
import sys
from pathlib import Path

import pytest

import headrace as hr
from headrace.events import Event, open_store, open_vault
from tests.cli.conftest import Run

BANK = f"{Path(__file__).parents[4] / 'examples' / '14_bank_account.py'}:ACCOUNTS"


@pytest.fixture
def bank(log: hr.Log) -> hr.Log:
    with open_store(log, "bank") as store:
        store.append(
            "ada",
            [Event("Opened", {"owner": "Ada"}, subject="7"), Event("Deposited", {"amount": 5})],
        )
        store.append("ada", Event("Withdrawn", {"amount": 2}))
    return log


def test_history(run: Run, bank: hr.Log) -> None:
    assert [
        (line["version"], line["type"], line["data"])
        for line in run("events", "history", "ada", "--json").lines
    ] == [
        (1, "Opened", {"owner": "Ada"}),
        (2, "Deposited", {"amount": 5}),
        (3, "Withdrawn", {"amount": 2}),
    ]
    assert "Deposited" in run("events", "history", "ada").out
    assert "'bob' has no events" in run("events", "history", "bob", code=1).err


def test_state_now_and_then(run: Run, bank: hr.Log) -> None:
    (now,) = run("events", "state", "ada", "--decider", BANK, "--json").lines
    assert now == {"entity": "ada", "version": 3, "state": {"owner": "Ada", "balance": 3}}
    (then,) = run("events", "state", "ada", "--decider", BANK, "--version", 2, "--json").lines
    assert then["state"]["balance"] == 5
    (before,) = run(
        "events", "state", "ada", "--decider", BANK, "--at", "1 hour ago", "--json"
    ).lines
    assert (before["version"], before["state"]["owner"]) == (0, None)
    assert "balance=3" in run("events", "state", "ada", "--decider", BANK).out


@pytest.mark.parametrize("rules", ["nowhere.py:X", BANK.replace("ACCOUNTS", "ACCOUNT"), "x"])
def test_a_decider_that_is_not_there(run: Run, bank: hr.Log, rules: str) -> None:
    assert "decider" in run("events", "state", "ada", "--decider", rules, code=1).err


def test_digest(run: Run, bank: hr.Log) -> None:
    plain = run("events", "digest", "--ranges", 2, "--json").lines
    assert [(line["entities"], line["events"]) for line in plain if line["entities"]] == [(1, 3)]
    with_state = run("events", "digest", "--ranges", 2, "--decider", BANK, "--json").lines
    assert (
        plain
        != with_state
        == run("events", "digest", "--ranges", 2, "--decider", BANK, "--json").lines
    )
    assert "digest" in run("events", "digest").out


def test_excise(run: Run, bank: hr.Log) -> None:
    assert (
        "Removed 1 event. No file contains the values"
        in run("events", "excise", "--subject", "7", "--value", '"Ada"', "--store", "bank").out
    )
    assert [line["version"] for line in run("events", "history", "ada", "--json").lines] == [2, 3]
    assert "nothing of the subject '7'" in run("events", "excise", "--subject", "7", code=1).err


def test_truncate(run: Run, bank: hr.Log) -> None:
    options = ("events", "truncate", "ada", "--decider", BANK, "--before")
    assert "the state of 'ada' would be" in run(*options, 2, code=1).err
    assert len(run("events", "history", "ada", "--json").lines) == 3
    assert "Removed 0 events of ada." in run(*options, 1).out


def test_list(run: Run, bank: hr.Log) -> None:
    with open_store(bank, "bank") as store:
        store.append("bob", Event("Opened", {"owner": "Bob"}))
    assert run("events", "list", "--json").lines == [
        {"entity": "ada", "version": 3},
        {"entity": "bob", "version": 1},
    ]
    assert run("events", "list", "--prefix", "b", "--json").lines == [
        {"entity": "bob", "version": 1}
    ]
    assert "There are 2" in run("events", "list", "--max", 1).out
    assert "`headrace events list`" in run("events", "history", "bo", code=1).err


def test_events_that_the_code_does_not_know_are_named(run: Run, bank: hr.Log) -> None:
    with open_store(bank, "bank") as store:
        store.append("odd", Event("Transferred", {"amount": 1}))
        store.append("newer", Event("Deposited", {"amount": 1}, type_version=5))
    odd, newer = (
        run("events", "state", entity, "--decider", BANK, code=1).err for entity in ("odd", "newer")
    )
    assert odd.startswith(
        "Error: The event 1 of 'odd' is a 'Transferred', which no class stands for"
    )
    assert newer.startswith(
        "Error: The event 1 of 'newer' is a 'Deposited' of version 5; this code knows up to 1."
    )
    assert (
        "is at version 3, and was asked for as of 9"
        in run("events", "state", "ada", "--decider", BANK, "--version", 9, code=1).err
    )


PERSONAL = """
from dataclasses import dataclass
from typing import ClassVar
from headrace.events import Decider, personal

@dataclass(frozen=True)
class Moved:
    event_subject: ClassVar[str] = "customer"
    customer: str
    address: str | None = personal()

MOVES = Decider(
    "moves",
    "",
    lambda command, state: [command],
    lambda state, event: event.address,
    events=(Moved,),
)
"""


def test_personal_fields_are_shown_to_who_has_the_key(
    run: Run, log: hr.Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "moves.py").write_text(PERSONAL)
    rules = f"{tmp_path / 'moves.py'}:MOVES"
    key = bytes(32)
    with open_store(log, "moves") as store:
        with open_vault(store, master_key=key) as vault:
            store.append(
                "c-7",
                Event(
                    "Moved",
                    {"customer": "7", "address": vault.seal("7", "12 St James")},
                    subject="7",
                ),
            )
        assert "no master key" in run("events", "state", "c-7", "--decider", rules, code=1).err
        monkeypatch.setenv("HEADRACE_MASTER_KEY", base64.b64encode(key).decode())
        assert "12 St James" in run("events", "state", "c-7", "--decider", rules).out
        assert "12 St James" not in run("events", "history", "c-7").out
        assert run("events", "digest", "--decider", rules, "--json").lines
        run("events", "forget", "--subject", "7")
        (now,) = run("events", "state", "c-7", "--decider", rules, "--json").lines
        assert now == {"entity": "c-7", "version": 1, "state": None}


def test_forgetting_without_a_vault_creates_none(
    run: Run, bank: hr.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_MASTER_KEY", base64.b64encode(bytes(range(32))).decode())
    assert "has no vault" in run("events", "forget", "--subject", "7", code=1).err
    with open_store(bank, "bank") as store, open_vault(store, master_key=bytes(32)) as vault:
        assert vault.subjects() == []
    assert "is not the one that the keys" in run("events", "forget", "--subject", "7", code=1).err


SETS = """
from dataclasses import dataclass
from headrace.events import Decider

@dataclass(frozen=True)
class Tagged:
    tags: frozenset[str]

TAGS = Decider(
    "tags",
    frozenset(),
    lambda command, state: [Tagged(command)],
    lambda state, event: state | event.tags,
    events=(Tagged,),
    snapshot_every=2,
)
"""


def test_replicas_in_two_processes_print_the_same(log: hr.Log, tmp_path: Path) -> None:
    """Folded apart, in processes that order sets differently, from a log and from a copy with other
    offsets and times.
    """
    (tmp_path / "tags.py").write_text(SETS)
    events = [
        (
            f"e-{n % 7}",
            Event("Tagged", {"tags": sorted(f"tag-{k}" for k in range(n % 5, n % 11 + 2))}),
        )
        for n in range(60)
    ]
    with (
        hr.open_log(f"file:{tmp_path / 'replica'}") as other,
        open_store(log, "tags") as one,
        open_store(other, "tags") as two,
    ):
        for entity, event in events:
            one.append(entity, event)
        for entity, event in sorted(events, key=lambda each: each[0]):
            two.append(entity, event)

    def digests(address: str, seed: str) -> list[str]:
        command = [
            sys.executable,
            "-m",
            "headrace.cli",
            "events",
            "digest",
            "--ranges",
            "4",
            "--decider",
            f"{tmp_path / 'tags.py'}:TAGS",
            "--log",
            address,
            "--json",
        ]
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout.splitlines()

    ours, theirs = digests(log.address, "1"), digests(f"file:{tmp_path / 'replica'}", "2")
    assert ours == theirs
    assert len(ours) == 4


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
