"""Rotation of a vault's master key: readers go on, it is resumed; then the old key is worthless."""

import json
import sqlite3
from pathlib import Path

import pytest

from headrace.errors import BadMasterKey
from headrace.events import EventStore, open_vault
from headrace.events.privacy.vault import Redaction, remove_key

OLD, NEW, OTHER = bytes(32), bytes(range(32)), b"x" * 32


class Killed(Exception):
    pass


def test_readers_with_either_key_go_on_and_then_only_the_new_one_opens(store: EventStore) -> None:
    old = open_vault(store, master_key=OLD)
    sealed = {str(n): old.seal(str(n), f"secret {n}") for n in range(1200)}

    def killed(_count: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        old.rotate(NEW, step=killed)
    new = open_vault(store, master_key=NEW)  # in the middle of it
    # Both add keys, and both read everything.
    sealed["by old"] = old.seal("by old", "secret by old")
    sealed["by new"] = new.seal("by new", "secret by new")
    for vault in (old, new, open_vault(store, master_key=OLD), open_vault(store, master_key=NEW)):
        assert all(vault.unseal(text) == f"secret {name}" for name, text in sealed.items())
    root = store.log.store.root
    for key in (OLD, NEW):
        body = json.dumps(list(sealed.values())).encode()
        assert json.loads(Redaction(root, key).redact(body)) == [f"secret {n}" for n in sealed]
    with pytest.raises(BadMasterKey, match="another master key is not finished"):
        old.rotate(OTHER)
    assert old.rotate(NEW) == 1202
    new.forget("3")
    remove_key(store, "4")
    assert (new.unseal(sealed["3"]), old.unseal(sealed["4"])) == (None, None)
    sealed["late"] = old.seal("late", "secret late")  # not rewrapped yet
    assert new.finish_rotation() == 1201
    del sealed["3"], sealed["4"]
    fresh = open_vault(store, master_key=NEW)
    for vault in (new, fresh):
        assert all(vault.unseal(text) == f"secret {name}" for name, text in sealed.items())
    with pytest.raises(BadMasterKey, match="was rotated"):
        old.unseal(sealed["7"])
    with pytest.raises(BadMasterKey):
        open_vault(store, master_key=OLD)
    with pytest.raises(BadMasterKey, match="No rotation"):
        new.finish_rotation()
    with sqlite3.connect(new.path) as db:
        assert sorted(name for (name,) in db.execute("SELECT name FROM about")) == [
            "format",
            "proof",
        ]


def test_what_the_old_key_wrapped_is_not_in_the_file_any_more(store: EventStore) -> None:
    old = open_vault(store, master_key=OLD)
    old.seal("ada", "secret")
    with sqlite3.connect(old.path) as db:
        ((wrapped,),) = db.execute("SELECT wrapped FROM keys").fetchall()
    old.rotate(NEW)
    new = open_vault(store, master_key=NEW)
    new.finish_rotation()
    for path in Path(new.path).parent.glob("keys.sqlite*"):
        assert wrapped not in path.read_bytes()


def test_a_rotation_from_another_key_is_refused(store: EventStore) -> None:
    old = open_vault(store, master_key=OLD)
    with pytest.raises(BadMasterKey, match="is the present one"):
        old.rotate(OLD)
    old.rotate(NEW)
    with pytest.raises(BadMasterKey, match="this is another"):
        open_vault(store, master_key=NEW).rotate(OTHER)
