"""A shard's state close at hand: an ordered key-value store on local disk. A cache, never the truth.

It is stamped with the state ids it holds. Given the ids that the ledger has, it is there already (the usual case); or one batch ahead after a
failed attempt, and goes back by the undo it kept; or behind, and is given the files in between; or foreign, and is filled again from the files. LMDB has no checksums and a
truncated map is a bus error, so its file's length is checked before anything is read from it, and a store from before a power loss is thrown away.
"""

from __future__ import annotations

import json
import shutil
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress, islice
from operator import not_
from pathlib import Path
from typing import Any

import lmdb
import pyarrow as pa
import pyarrow.compute as pc

from headrace.engine import store_handles
from headrace.engine.chain_sizes import ChainSizes
from headrace.engine.named_files import new_id
from headrace.engine.state_files import StateFile, StateFiles, StateIds, folded, growth
from headrace.log.file.disk import Disk
from headrace.operators.buffers import bytes_list
from headrace.operators.keys import whole

VERSION = 3
_FIRST = 16
_AT_ONCE = 1000
_STAMP = b"\x00stamp"
_UNDO = ".undo"
Groups = Sequence[int]


class LocalStore:
    """The store of one shard of one stage. Steps are told apart by the first byte of a key, key groups by the second."""

    def __init__(self, directory: Path, groups: Groups) -> None:
        self.directory, self.groups = directory, groups
        self._check()
        try:
            self._env = store_handles.opened(directory)
        except lmdb.Error:  # not a store at all, or damaged
            shutil.rmtree(directory, ignore_errors=True)
            self._env = store_handles.opened(directory)

    def _check(self) -> None:
        """Throw away what cannot be trusted: another machine life, or a file that is shorter than it was."""
        if not self.directory.exists():
            return
        try:
            known = json.loads((self.directory / "about.json").read_text())
            size = (self.directory / store_handles.DATA).stat().st_size
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
        about = {"version": VERSION, "boot": Disk().boot().hex(), "size": (self.directory / store_handles.DATA).stat().st_size}
        (self.directory / "about.json").write_text(json.dumps(about))

    def database(self, txn: Any) -> Any:
        return self._env.open_db(None, txn)

    def close(self) -> None:
        """The next one to open it in this process has it at once."""
        store_handles.give_back(self.directory, self._env)


class StoreTransaction:
    """One write transaction of the local store."""

    def __init__(self, txn: Any, store: LocalStore) -> None:
        self.txn, self.store = txn, store
        self._kept_undo: str | None = None
        self.sizes: dict[str, ChainSizes] = {}  # of the files that lead to each step's state
        self._sizes_before: dict[str, Any] = {}

    def bring_to(self, wanted: Mapping[str, StateIds], steps: Sequence[str], files: Mapping[str, StateFiles]) -> str:
        """Make the store hold exactly the wanted states. Returns how: "there", "undone", "caught up" or "rebuilt"."""
        stamp = self._stamp()
        if stamp is not None and stamp["groups"] == list(self.store.groups) and stamp["steps"] == list(steps):
            how = self._brought(stamp, wanted, steps, files)
        else:
            self.txn.drop(self.store.database(self.txn), delete=False)
            self._filled({}, wanted, steps, files)
            how = "rebuilt"
        self._sizes_before = self._sizes_as_json()
        if how != "there":
            self.stamp(wanted, steps, before=None, undo=None)
        return how

    def _brought(self, stamp: dict[str, Any], wanted: Mapping[str, StateIds], steps: Sequence[str], files: Mapping[str, StateFiles]) -> str:
        target = _as_json(wanted)
        undone = stamp["before"] == target != stamp["ids"] and self._undo(stamp["undo"])
        sizes = stamp["sizes_before" if undone else "sizes"]
        self.sizes = {step: ChainSizes.from_json(sizes.get(step)) for step in steps}
        if undone:
            return "undone"
        if stamp["ids"] == target:
            return "there"
        return "caught up" if self._filled(stamp["ids"], wanted, steps, files) else "rebuilt"

    def _filled(self, ids: dict[str, Any], wanted: Mapping[str, StateIds], steps: Sequence[str], files: Mapping[str, StateFiles]) -> bool:
        """From the files, on top of what is there. Returns whether that could stay."""
        stayed = True
        for number, step in enumerate(steps, 1):
            held = {int(group): name for group, name in ids.get(step, {}).items()}
            stayed &= self._catch_up(number, step, held, wanted.get(step, {}), files[step])
        return stayed

    def _catch_up(self, number: int, step: str, held: StateIds, wanted: StateIds, files: StateFiles) -> bool:
        """Each group by the files behind the one it has; where that is not among them, from the beginning. Returns whether there was no such group."""
        sizes = self.sizes.setdefault(step, ChainSizes())
        cache: dict[str, StateFile] = {}
        stayed = True
        for group in self.store.groups:
            has, wants = held.get(group), wanted.get(group)
            if has == wants:
                continue
            chain = list(files.chain(group, wants, until=has, cache=cache))
            prefix = bytes([number, group])
            if not chain or chain[-1].parents.get(group) != has:
                self.clear(prefix)
                sizes.forget(group)
                stayed = False
            live_bytes = sizes.live_bytes(group)
            live_bytes += self._apply(prefix, *folded(chain, group, with_deletions=has is not None))
            for file in reversed(chain):
                add = sizes.begin if file.parents.get(group) is None else sizes.add
                add(group, file.weight(group))
            sizes.holds(group, live_bytes)
        return stayed

    def _apply(self, prefix: bytes, keys: pa.Array, values: pa.Array) -> int:
        """Returns how many bytes more there are then."""
        names: list[bytes] = bytes_list(pc.binary_join_element_wise(pa.scalar(prefix, pa.binary()), keys, pa.scalar(b"", pa.binary())))  # type: ignore[assignment]
        before = pa.array(self.get(names), pa.binary())
        self.put(names, bytes_list(values))
        return int(growth(keys, before, values).sum())

    def _stamp(self) -> dict[str, Any] | None:
        raw = self.txn.get(_STAMP)
        return None if raw is None else json.loads(raw)

    def stamp(self, ids: Mapping[str, StateIds], steps: Sequence[str], *, before: Mapping[str, StateIds] | None, undo: str | None) -> None:
        """Say what the store holds, and what it held before."""
        content = {
            "ids": _as_json(ids), "steps": list(steps), "groups": list(self.store.groups),
            "before": None if before is None else _as_json(before), "undo": undo,
            "sizes": self._sizes_as_json(), "sizes_before": self._sizes_before,
        }  # fmt: skip
        self.txn.put(_STAMP, json.dumps(content).encode())

    def _sizes_as_json(self) -> dict[str, Any]:
        return {step: sizes.to_json() for step, sizes in self.sizes.items()}

    def _undo(self, name: str | None) -> bool:
        """Put back what the last batch changed; False if what it needs is not there."""
        if name is None:
            return False
        try:
            table = pa.ipc.open_file(pa.BufferReader((self.store.directory / name).read_bytes())).read_all()
        except (OSError, pa.ArrowException):
            return False
        names: list[bytes] = bytes_list(whole(table["key"]))  # type: ignore[assignment]  # none is null
        self.put(names, bytes_list(whole(table["value"])))
        return True

    def keep_undo(self, keys: pa.Array, values: pa.Array) -> str:
        """Remember what keys held before this batch, in a file that need not be durable. It has a name of its own: until this commit the store refers to the last one."""
        name = self._kept_undo = f"{new_id()}{_UNDO}"
        table = pa.table({"key": keys, "value": values})
        with pa.ipc.new_file(str(self.store.directory / name), table.schema) as writer:
            writer.write_table(table)
        return name

    def forget_older_undo(self) -> None:
        """After the commit: files that the store no longer refers to, or never did."""
        if self._kept_undo is not None:
            for path in self.store.directory.glob(f"*{_UNDO}"):
                if path.name != self._kept_undo:
                    path.unlink(missing_ok=True)

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Quickest in the store's order."""
        return list(map(self.txn.get, keys))

    def put(self, keys: Sequence[bytes], values: Sequence[bytes | None]) -> None:
        """Quickest in the store's order. None deletes."""
        if None not in values:
            self.txn.cursor().putmulti(zip(keys, values, strict=True))
            return
        stays = [value is not None for value in values]
        self.txn.cursor().putmulti(zip(compress(keys, stays), compress(values, stays), strict=True))
        deque(map(self.txn.delete, compress(keys, map(not_, stays))), maxlen=0)  # no loop of Python's for each key

    def clear(self, prefix: bytes) -> None:
        for key in self.scan(prefix)[0]:
            self.txn.delete(key)

    def scan(self, prefix: bytes) -> tuple[list[bytes], list[bytes]]:
        """Every key that begins with a prefix, in order, and their values."""
        return self._until(prefix, _behind(prefix))

    def between(self, prefix: bytes, low: bytes, high: bytes) -> tuple[list[bytes], list[bytes]]:
        """Keys under a prefix, from `low` up to but not including `high`, without the prefix; and their values."""
        keys, values = self._until(prefix + low, min(prefix + high, _behind(prefix)))
        return [key[len(prefix) :] for key in keys], values

    def first_between(self, prefix: bytes, low: bytes, high: bytes) -> bytes | None:
        cursor = self.txn.cursor()
        found: bytes = cursor.key() if cursor.set_range(prefix + low) else prefix + high
        return found[len(prefix) :] if found < min(prefix + high, _behind(prefix)) else None

    def _until(self, low: bytes, end: bytes) -> tuple[list[bytes], list[bytes]]:
        """Taken some at a time, more and more: only of the last ones it must be found out where they end, and few are read in vain."""
        cursor = self.txn.cursor()
        keys: list[bytes] = []
        values: list[bytes] = []
        pairs = cursor.iternext() if cursor.set_range(low) else iter(())
        count = _FIRST
        while (not keys or keys[-1] < end) and (some := list(islice(pairs, count))):
            some_keys, some_values = zip(*some, strict=True)
            keys += some_keys
            values += some_values
            count = min(2 * count, _AT_ONCE)
        last = bisect_left(keys, end)
        return keys[:last], values[:last]


def _behind(prefix: bytes) -> bytes:
    """The first key that is larger than all that begin with the prefix; its last byte is no 255."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _as_json(ids: Mapping[str, StateIds]) -> dict[str, dict[str, str]]:
    """With text keys, as it comes back from JSON."""
    return {step: {str(group): name for group, name in sorted(groups.items())} for step, groups in ids.items() if groups}
