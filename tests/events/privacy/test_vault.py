"""Personal fields: sealed everywhere, readable with the right keys, gone for good when a subject's
key is deleted; wrong and missing master keys.
"""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

import headrace as hr
from headrace.errors import BadEvent, BadMasterKey, ConfigurationError, NewerFormat, UnknownSubject
from headrace.events import (
    Codec,
    EventStore,
    Handler,
    Vault,
    open_store,
    open_vault,
    personal,
)
from headrace.events.privacy import erasure_records
from tests.events.customers import CUSTOMERS, KEY, Customer, Registered


@pytest.fixture
def vault(store: EventStore) -> Iterator[Vault]:
    with open_vault(store, master_key=KEY) as opened:
        yield opened


def files_with(root: Path, value: bytes) -> list[str]:
    return [
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and value in path.read_bytes()
    ]


def test_personal_fields_are_sealed_everywhere_and_null_when_the_key_is_gone(
    tmp_path: Path, store: EventStore, vault: Vault
) -> None:
    handler = Handler(store, CUSTOMERS, vault=vault)
    answer = handler.handle("c-7", Registered(7, "ada@example.com", "gold"))
    handler.handle("c-8", Registered(8, "ben@example.com"))
    store.by_entity.flush()
    assert (answer.state.email or "").startswith("sealed:1:")
    assert vault.reveal(answer.state) == Customer("ada@example.com", "gold")
    assert [event.subject for event in store.read()] == ["7", "8"]
    assert files_with(tmp_path, b"ada@example.com") == []
    vault.forget("7")
    for state in (handler.state("c-7"), Handler(store, CUSTOMERS, vault=vault).state("c-7")):
        assert vault.reveal(state) == Customer(None, "gold")
    assert vault.reveal(handler.state("c-8")).email == "ben@example.com"
    assert vault.reveal([event.data for event in store.load("c-7")]) == [
        {"customer": 7, "email": None, "plan": "gold"}
    ]
    assert vault.subjects() == ["8"]


def test_a_deleted_key_is_not_in_the_file_any_more_and_gone_in_other_processes(
    store: EventStore, vault: Vault
) -> None:
    with open_vault(store, master_key=KEY) as other:
        sealed = vault.seal("7", "secret")
        assert other.unseal(sealed) == "secret"
        (wrapped,) = vault._db.execute("SELECT wrapped FROM keys WHERE subject = '7'").fetchone()
        vault.forget("7")
        assert other.unseal(sealed) is None
        assert files_with(vault.path.parent, wrapped) == []
        assert vault.unseal(vault.seal("7", "back again")) == "back again"
        assert vault.unseal(sealed) is None


def test_forgetting_is_logged_without_a_name_and_resumes(store: EventStore, vault: Vault) -> None:
    vault.seal("ada", 1)
    erasure_records.add_record(store, "shred", "ada", "begun")
    vault._db.execute("DELETE FROM keys WHERE subject = 'ada'")  # killed here
    assert erasure_records.is_unfinished(store, "shred", "ada")
    vault.forget("ada")
    rows = store.log.read("bank.forgotten").to_pylist()
    assert [(row["what"], row["step"]) for row in rows] == [("shred", "begun"), ("shred", "done")]
    assert not any("ada" in str(row) for row in rows)
    with pytest.raises(UnknownSubject, match="'ada'"):
        vault.forget("ada")


def test_a_sealed_value_that_was_changed_or_is_no_sealed_value(vault: Vault) -> None:
    sealed = vault.seal("7", "x")
    assert vault.unseal(sealed[:-6] + "AAAA==") is None
    assert vault.unseal("sealed:1:odd") is None
    assert (vault.unseal("plain"), vault.unseal(5)) == ("plain", 5)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "no master key"),
        ({"HEADRACE_MASTER_KEY": "short"}, "base64|bytes"),
        ({"HEADRACE_MASTER_KEY": "AAAA"}, "3 bytes"),
        ({"HEADRACE_MASTER_KEY_FILE": "nowhere"}, "cannot be read"),
    ],
)
def test_a_missing_or_malformed_master_key(
    store: EventStore, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    for name in ("HEADRACE_MASTER_KEY", "HEADRACE_MASTER_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadMasterKey, match=message):
        open_vault(store)


def test_the_wrong_master_key_is_noticed_and_the_right_one_may_come_from_a_file(
    store: EventStore, vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = vault.seal("7", "x")
    with pytest.raises(BadMasterKey, match="not the one"):
        open_vault(store, master_key=bytes(32))
    (tmp_path / "key").write_text(base64.b64encode(KEY).decode() + "\n")
    monkeypatch.delenv("HEADRACE_MASTER_KEY", raising=False)
    monkeypatch.setenv("HEADRACE_MASTER_KEY_FILE", str(tmp_path / "key"))
    with open_vault(store) as again:
        assert again.unseal(sealed) == "x"


def test_a_newer_vault_is_left_alone(store: EventStore, vault: Vault) -> None:
    vault._db.execute("UPDATE about SET value = 3 WHERE name = 'format'")
    with pytest.raises(NewerFormat):
        open_vault(store, master_key=KEY)


def test_personal_fields_need_a_vault_a_subject_and_text(store: EventStore, vault: Vault) -> None:
    @dataclass(frozen=True)
    class Nobody:
        name: str = personal()

    @dataclass(frozen=True)
    class Numbered:
        event_subject: ClassVar[str] = "who"
        who: str
        age: int = personal()

    with pytest.raises(BadMasterKey, match="no vault"):
        Codec([Registered])
    with pytest.raises(ConfigurationError, match="does not say whose"):
        Codec([Nobody], vault=vault)
    with pytest.raises(ConfigurationError, match="'age'.*is no text"):
        Codec([Numbered], vault=vault)
    with pytest.raises(BadEvent, match="whom it is about"):
        Codec([Registered], vault=vault).to_event(Registered(None, "x"))  # type: ignore[arg-type]


def test_stores_have_vaults_of_their_own(log: hr.Log, store: EventStore, vault: Vault) -> None:
    sealed = vault.seal("7", "x")
    with open_store(log, "other") as other, open_vault(other, master_key=bytes(32)) as theirs:
        assert theirs.unseal(sealed) is None
