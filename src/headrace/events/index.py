"""The index by entity: every event again, but those of an entity beside each other, so that loading one costs its own events only.

It is an LMDB store beside the log's topics, written some thousand events at a time, durably, and only with what is durable in the log: it says how far it reaches, and
`tail` has the rest. All of it can be made again from the topic: another version, a file that is damaged or cut short, or one that does not fit the topic is thrown away.
Snapshots are kept here too, since they are as dispensable. Processes share it; one process opens it once (`opened`), as LMDB demands.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lmdb

from headrace.events.rows import Entry

VERSION = 1
_MAP_BYTES = 1 << 40
_DATABASES = 4
_NUMBER = 8
_opened: dict[tuple[int, Path], tuple[Index, int]] = {}
_guard = threading.Lock()


class Index:
    """One store's index, of one topic and one generation (an excision begins another)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            self._open()
        except lmdb.Error:
            shutil.rmtree(directory, ignore_errors=True)
            self._open()

    def _open(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._env = lmdb.open(str(self.directory), map_size=_MAP_BYTES, max_dbs=_DATABASES, max_readers=1024)
        try:
            self._check_length()
            self._env.reader_check()
            self._events, self._ids, self._snapshots, self._about = (self._env.open_db(name) for name in (b"events", b"ids", b"snapshots", b"about"))
            self._check_version()
        except BaseException:
            self._env.close()
            raise

    def _check_length(self) -> None:
        """Reading behind the end of a file that was cut short would end the process."""
        if (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"] > (self.directory / "data.mdb").stat().st_size:
            raise lmdb.CorruptedError(f"{self.directory} was cut short")

    def _check_version(self) -> None:
        with self._env.begin(write=True) as txn:
            if (txn.get(b"version", db=self._about) or b"%d" % VERSION) != b"%d" % VERSION:
                raise lmdb.VersionMismatchError(f"{self.directory} has another version")
            txn.put(b"version", b"%d" % VERSION, db=self._about)

    def position(self) -> int:
        """Everything before this offset is in it."""
        with self._env.begin() as txn:
            return self._position(txn)

    def _position(self, txn: Any) -> int:
        return int(txn.get(b"position", db=self._about) or 0)

    def reading(self) -> Reading:
        """One moment of it, to be closed. Whoever asks has seen to it that the index stays open (`retain`)."""
        return Reading(self, self._env.begin())

    def put(self, entries: Iterable[Entry], position: int, snapshots: Iterable[tuple[str, str, bytes]] = ()) -> int:
        """Add events up to a position, unless another process was quicker. Returns how far it reaches now."""
        with self._env.begin(write=True) as txn:
            before, last = self._position(txn), None
            for entry in entries:
                if entry.offset >= before:
                    last = entry
                    txn.put(_key(entry.entity, entry.version), entry.text.encode(), db=self._events)
                    if entry.id is not None:
                        txn.put(_id_key(entry.id), b"%d %d %s" % (entry.version, entry.offset, entry.entity.encode()), db=self._ids)
            for entity, name, snapshot in snapshots:
                txn.put(_key(entity, 0) + name.encode(), snapshot, db=self._snapshots)
            if last is not None:
                txn.put(b"last", json.dumps([last.entity, last.version, last.offset]).encode(), db=self._about)
            if position > before:
                txn.put(b"position", b"%d" % position, db=self._about)
            return max(position, before)

    def last(self) -> tuple[str, int, int] | None:
        """(entity, version, offset) of the newest event in it: to be held against the topic."""
        with self._env.begin() as txn:
            found = txn.get(b"last", db=self._about)
        return None if found is None else tuple(json.loads(found))

    def close(self) -> None:
        self._env.close()


class Reading:
    """A read transaction: what the index holds at one moment."""

    def __init__(self, index: Index, txn: Any) -> None:
        self._index, self._txn = index, txn
        self.position = index._position(txn)  # noqa: SLF001 - one class in two

    def close(self) -> None:
        """Let go of the moment; the index stays open."""
        self._txn.abort()

    def newest(self, entity: str) -> int | None:
        """The newest version of an entity, if it has any."""
        cursor = self._txn.cursor(db=self._index._events)  # noqa: SLF001
        prefix = entity.encode() + b"\0"
        found = cursor.prev() if cursor.set_range(prefix + b"\xff" * _NUMBER) else cursor.last()
        key = cursor.key()
        return int.from_bytes(key[-_NUMBER:], "big") if found and key[:-_NUMBER] == prefix else None

    def texts(self, entity: str, after: int, upto: int | None) -> list[str]:
        """An entity's events behind one version, up to another."""
        cursor = self._txn.cursor(db=self._index._events)  # noqa: SLF001
        stop = _key(entity, upto) if upto is not None else entity.encode() + b"\0" + b"\xff" * _NUMBER
        found: list[str] = []
        if cursor.set_range(_key(entity, after + 1)):
            for key, value in cursor.iternext():
                if key > stop:
                    break
                found.append(value.decode())
        return found

    def place_of(self, id: str) -> tuple[str, int, int] | None:
        """(entity, version, offset) of an event id."""
        found = self._txn.get(_id_key(id), db=self._index._ids)  # noqa: SLF001
        if found is None:
            return None
        version, offset, entity = found.split(b" ", 2)
        return entity.decode(), int(version), int(offset)

    def snapshot(self, entity: str, name: str) -> bytes | None:
        found: bytes | None = self._txn.get(_key(entity, 0) + name.encode(), db=self._index._snapshots)  # noqa: SLF001
        return found

    def entities(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Each entity with its newest version, in order of name."""
        cursor = self._txn.cursor(db=self._index._events)  # noqa: SLF001
        found = cursor.set_range(prefix.encode()) if prefix else cursor.first()
        while found and cursor.key().startswith(prefix.encode()):
            name = cursor.key()[: -_NUMBER - 1].decode()
            yield name, self.newest(name) or 0
            found = cursor.set_range(name.encode() + b"\0" + b"\xff" * _NUMBER)


def _key(entity: str, version: int) -> bytes:
    return entity.encode() + b"\0" + version.to_bytes(_NUMBER, "big")


def _id_key(id: str) -> bytes:
    return id.encode()


def opened(directory: Path) -> Index:
    """The index in a directory; the same for all who ask in this process."""
    key = os.getpid(), directory
    with _guard:
        index, users = _opened.get(key, (None, 0))
        if index is None:
            index = Index(directory)
        _opened[key] = index, users + 1
        return index


def retain(index: Index) -> Index:
    """Nobody closes it until it is released: what LMDB has mapped must not go away under a reader."""
    key = os.getpid(), index.directory
    with _guard:
        known, users = _opened.get(key, (None, 0))
        if known is index:  # one that was thrown away is never closed
            _opened[key] = index, users + 1
    return index


def released(index: Index) -> None:
    """Done with it: the last one closes it."""
    key = os.getpid(), index.directory
    with _guard:
        known, users = _opened.get(key, (None, 0))
        if known is not index:
            return
        if users <= 1:
            del _opened[key]
            index.close()
        else:
            _opened[key] = index, users - 1


def thrown_away(index: Index) -> None:
    """It does not fit its topic: whoever opens it next makes it anew. Others in this process who still have it go on with what they see."""
    with _guard:
        _, users = _opened.pop((os.getpid(), index.directory))
        if users <= 1:
            index.close()
        shutil.rmtree(index.directory, ignore_errors=True)
