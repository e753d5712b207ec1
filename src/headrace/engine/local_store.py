"""A shard's state close at hand: an ordered key-value store on local disk. A cache, never the truth.

It is stamped with the state ids it holds. Given the ids that the ledger has, it is there already (the usual case); or one batch ahead after a
failed attempt, and goes back by the undo it kept; or behind or foreign, and is filled again from the files. LMDB has no checksums and a
truncated map is a bus error, so its file's length is checked before anything is read from it, and a store from before a power loss is thrown away.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pyarrow as pa

from headrace.engine.state_files import StateFiles, StateIds, new_id
from headrace.log.file.disk import Disk

VERSION = 1
_STAMP = b"\x00stamp"
_MAP_BYTES = 1 << 36
_UNDO = ".undo"
Groups = Sequence[int]


class LocalStore:
    """The store of one shard of one stage. Steps are told apart by the first byte of a key, key groups by the second."""

    def __init__(self, directory: Path, groups: Groups) -> None:
        self.directory, self.groups = directory, groups
        self._check()
        try:
            self._env = self._opened()
        except lmdb.Error:  # not a store at all, or damaged
            shutil.rmtree(directory, ignore_errors=True)
            self._env = self._opened()

    def _opened(self) -> Any:
        self.directory.mkdir(parents=True, exist_ok=True)
        env = lmdb.open(str(self.directory), map_size=_MAP_BYTES, sync=False, metasync=False, max_readers=16)
        pages = env.info()["last_pgno"] + 1
        if pages * env.stat()["psize"] > (self.directory / "data.mdb").stat().st_size:  # reading a page that is not there ends the process
            env.close()
            raise lmdb.CorruptedError(f"{self.directory} was cut short")
        return env

    def _check(self) -> None:
        """Throw away what cannot be trusted: another machine life, or a file that is shorter than it was."""
        if not self.directory.exists():
            return
        try:
            known = json.loads((self.directory / "about.json").read_text())
            size = (self.directory / "data.mdb").stat().st_size
            sound = known["boot"] == Disk().boot().hex() and size >= known["size"] and known["version"] == VERSION
        except (OSError, ValueError, KeyError):
            sound = False
        if not sound:
            shutil.rmtree(self.directory, ignore_errors=True)

    @contextmanager
    def transaction(self) -> Iterator[StoreTransaction]:
        """Check, step and put are one: nothing of a failed step stays. A store that turns out to be damaged is thrown away, so that another attempt fills it again."""
        try:
            with self._env.begin(write=True) as txn:
                made = StoreTransaction(txn, self)
                yield made
        except lmdb.Error:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        self._write_about()
        made.forget_older_undo()

    def _write_about(self) -> None:
        about = {"version": VERSION, "boot": Disk().boot().hex(), "size": (self.directory / "data.mdb").stat().st_size}
        (self.directory / "about.json").write_text(json.dumps(about))

    def database(self, txn: Any) -> Any:
        return self._env.open_db(None, txn)

    def close(self) -> None:
        self._env.close()


class StoreTransaction:
    """One write transaction of the local store."""

    def __init__(self, txn: Any, store: LocalStore) -> None:
        self.txn, self.store = txn, store
        self._kept_undo: str | None = None

    def bring_to(self, wanted: Mapping[str, StateIds], steps: Sequence[str], files: Mapping[str, StateFiles]) -> str:
        """Make the store hold exactly the wanted states. Returns how: "there", "undone", "caught up" or "rebuilt"."""
        stamp = self._stamp()
        target = _as_json(wanted)
        if stamp is not None and stamp["groups"] == list(self.store.groups) and stamp["steps"] == list(steps):
            if stamp["ids"] == target:
                return "there"
            if stamp["before"] == target and self._undo(stamp["undo"]):
                self.stamp(wanted, steps, before=None, undo=None)
                return "undone"
        self._rebuild(wanted, steps, files)
        self.stamp(wanted, steps, before=None, undo=None)
        return "rebuilt"

    def _stamp(self) -> dict[str, Any] | None:
        raw = self.txn.get(_STAMP)
        return None if raw is None else json.loads(raw)

    def stamp(self, ids: Mapping[str, StateIds], steps: Sequence[str], *, before: Mapping[str, StateIds] | None, undo: str | None) -> None:
        content = {
            "ids": _as_json(ids), "steps": list(steps), "groups": list(self.store.groups),
            "before": None if before is None else _as_json(before), "undo": undo,
        }  # fmt: skip
        self.txn.put(_STAMP, json.dumps(content).encode())

    def _undo(self, name: str | None) -> bool:
        """Put back what the last batch changed; False if what it needs is not there."""
        if name is None:
            return False
        try:
            table = pa.ipc.open_file(pa.BufferReader((self.store.directory / name).read_bytes())).read_all()
        except (OSError, pa.ArrowException):
            return False
        self.put(table["key"].to_pylist(), table["value"].to_pylist())
        return True

    def keep_undo(self, keys: Sequence[bytes], values: Sequence[bytes | None]) -> str:
        """Remember what keys held before this batch, in a file that need not be durable. It has a name of its own: until this commit the store refers to the last one."""
        name = self._kept_undo = f"{new_id()}{_UNDO}"
        table = pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})
        with pa.ipc.new_file(str(self.store.directory / name), table.schema) as writer:
            writer.write_table(table)
        return name

    def forget_older_undo(self) -> None:
        """After the commit: files that the store no longer refers to, or never did."""
        if self._kept_undo is not None:
            for path in self.store.directory.glob(f"*{_UNDO}"):
                if path.name != self._kept_undo:
                    path.unlink(missing_ok=True)

    def _rebuild(self, wanted: Mapping[str, StateIds], steps: Sequence[str], files: Mapping[str, StateFiles]) -> None:
        self.txn.drop(self.store.database(self.txn), delete=False)
        for number, step in enumerate(steps):
            ids = wanted.get(step, {})
            for group, content in files[step].load(self.store.groups, ids).items():
                prefix = bytes([number + 1, group])
                self.txn.cursor().putmulti([(prefix + key, value) for key, value in sorted(content.items())])

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        known = dict(self.txn.cursor().getmulti(keys))
        return [known.get(key) for key in keys]

    def put(self, keys: Sequence[bytes], values: Sequence[bytes | None]) -> None:
        self.txn.cursor().putmulti([(key, value) for key, value in zip(keys, values, strict=True) if value is not None])
        for key, value in zip(keys, values, strict=True):
            if value is None:
                self.txn.delete(key)

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Every key that begins with a prefix, in order."""
        cursor = self.txn.cursor()
        if cursor.set_range(prefix):
            for key, value in cursor:
                if not key.startswith(prefix):
                    return
                yield bytes(key), bytes(value)

    def between(self, prefix: bytes, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys under a prefix, from `low` up to but not including `high`, without the prefix. The store must not be written to meanwhile."""
        cursor, end = self.txn.cursor(), prefix + high
        if cursor.set_range(prefix + low):
            for key, value in cursor:
                if key >= end:
                    return
                yield bytes(key[len(prefix) :]), bytes(value)


def _as_json(ids: Mapping[str, StateIds]) -> dict[str, dict[str, str]]:
    """With text keys, as it comes back from JSON."""
    return {step: {str(group): name for group, name in sorted(groups.items())} for step, groups in ids.items() if groups}
