"""The local store of a shard: an ordered key-value store (LMDB) on local disk, as a cache of the
shard's state files. It is never the truth.

The store is stamped with the state ids that it holds. `StoreTransaction.bring_to` makes it hold the
ids of the ledger, by the cheapest way:

- "there": it holds them already, the usual case
- "undone": it is one batch ahead after a failed attempt, and reverts by the undo file of that batch
- "caught up": it is behind, and applies the state files in between
- "rebuilt": it is foreign, or was lost, and is filled from the state files

LMDB has no checksums, and reading a truncated map is a bus error. So the length of its file is
checked before anything is read, and a store from before a reboot is discarded.
"""

from __future__ import annotations

import json
import os
import shutil
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress, islice
from operator import not_
from pathlib import Path
from typing import Any, Self

import lmdb
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import bytes_list
from headrace.columnar.keys import as_array
from headrace.engine.state.files import (
    StateFile,
    StateFiles,
    StateIds,
    fold,
    from_ranges,
    new_id,
    row_growth_bytes,
    to_ranges,
)
from headrace.engine.state.folding_schedule import FoldingSchedule
from headrace.log.file.disk import Disk

# LMDB environments that a worker process keeps open between batches
#
# Mapping a large store anew costs a page fault for every page that a batch touches: more than a
# third of the time of a batch of 10,000 random keys among 5 million. An environment is reused only
# if its file is still the same, is long enough and begins as a store does: reading from a map whose
# file was truncated or overwritten ends the process.


DATA = "data.mdb"
_MAP_BYTES = 1 << 36
_MAX_IDLE = 64
_MAGIC = (0xBEEFC0DE).to_bytes(4, "little")
_MAGIC_OFFSET, _META_PAGES = 16, 2  # each meta page has the magic number behind its header
# Directory -> (environment, inode of its file, page size)
_idle: OrderedDict[Path, tuple[Any, int, int]] = OrderedDict()


def open_environment(directory: Path) -> Any:
    """The LMDB environment in a directory: an idle one, or a new one. Raises `lmdb.Error` if the
    file is not a store, or is damaged.
    """
    env, inode, page_bytes = _idle.pop(directory, (None, 0, 0))
    if env is not None:
        if _is_same_store(directory / DATA, inode, page_bytes) and not _is_short(env, directory):
            return env
        env.close()
    directory.mkdir(parents=True, exist_ok=True)
    env = lmdb.open(str(directory), map_size=_MAP_BYTES, sync=False, metasync=False, max_readers=16)
    if _is_short(env, directory):
        env.close()
        raise lmdb.CorruptedError(f"{directory} was cut short")
    return env


def release_environment(directory: Path, env: Any) -> None:
    """Keep an environment for the next `open_environment`; close the least recently used ones."""
    try:
        _idle[directory] = env, (directory / DATA).stat().st_ino, env.stat()["psize"]
    except OSError:  # the store was discarded meanwhile
        env.close()
    while len(_idle) > _MAX_IDLE:
        _, (oldest, *_) = _idle.popitem(last=False)
        oldest.close()


def _is_same_store(path: Path, inode: int, page_bytes: int) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(_META_PAGES * page_bytes)
            is_same_file = os.fstat(file.fileno()).st_ino == inode
    except OSError:
        return False
    return is_same_file and all(
        head[page * page_bytes + _MAGIC_OFFSET :][:4] == _MAGIC for page in range(_META_PAGES)
    )


def _is_short(env: Any, directory: Path) -> bool:
    """Whether the file is shorter than LMDB believes."""
    needed = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    return bool(needed > (directory / DATA).stat().st_size)


# The store


VERSION = 4
_FIRST_READ = 16
_MAX_READ = 1000
_STAMP = b"\x00stamp"
_SIZES, _SIZES_BEFORE = b"\x00sizes", b"\x00before"  # and the number of the step
_UNDO = ".undo"
Groups = Sequence[int]


class LocalStore:
    """The store of one shard of one stage, or of a whole job. The first byte of a key is the number
    of the step, the second the key group. `open` opens it, `close` releases it.
    """

    def __init__(self, directory: Path, groups: Groups, env: Any) -> None:
        self.directory = directory
        self.groups = groups
        self._env = env

    @classmethod
    def open(cls, directory: Path, groups: Groups) -> Self:
        """Open the store in a directory. A store that cannot be trusted, because the machine was
        rebooted or the file is shorter than it was, is discarded first.
        """
        if directory.exists():
            try:
                about = json.loads((directory / "about.json").read_text())
                is_sound = (
                    about["boot"] == Disk().boot_id().hex()
                    and (directory / DATA).stat().st_size >= about["size"]
                    and about["version"] == VERSION
                )
            except (OSError, ValueError, KeyError):
                is_sound = False
            if not is_sound:
                shutil.rmtree(directory, ignore_errors=True)
        try:
            env = open_environment(directory)
        except lmdb.Error:  # not a store at all, or damaged
            shutil.rmtree(directory, ignore_errors=True)
            env = open_environment(directory)
        return cls(directory, groups, env)

    @contextmanager
    def transaction(self) -> Iterator[StoreTransaction]:
        """One write transaction. If the body fails, nothing of it stays. A store that turns out to
        be damaged is discarded, so that the next attempt rebuilds it.
        """
        try:
            with self._env.begin(write=True) as txn:
                transaction = StoreTransaction(txn, self)
                yield transaction
        except lmdb.Error:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        self._write_about()
        transaction.remove_older_undo()

    def _write_about(self) -> None:
        about = {
            "version": VERSION,
            "boot": Disk().boot_id().hex(),
            "size": (self.directory / DATA).stat().st_size,
        }
        (self.directory / "about.json").write_text(json.dumps(about))

    def database(self, txn: Any) -> Any:
        return self._env.open_db(None, txn)

    def close(self) -> None:
        """Release the environment; the next `open` in this process reuses it."""
        release_environment(self.directory, self._env)


class StoreTransaction:
    """One write transaction of a local store."""

    def __init__(self, txn: Any, store: LocalStore) -> None:
        self.txn = txn
        self.store = store
        self.schedules: dict[str, FoldingSchedule] = {}  # by step
        self._undo_file: str | None = None
        self._schedules_before: dict[str, bytes] = {}

    # Bringing the store to a state

    def bring_to(
        self, wanted: Mapping[str, StateIds], steps: Sequence[str], files: Mapping[str, StateFiles]
    ) -> str:
        """Make the store hold exactly the wanted states. Returns how: "there", "undone", "caught
        up" or "rebuilt".
        """
        raw_stamp = self.txn.get(_STAMP)
        stamp = None if raw_stamp is None else json.loads(raw_stamp)
        if (
            stamp is None
            or stamp["groups"] != list(self.store.groups)
            or stamp["steps"] != list(steps)
        ):
            self.txn.drop(self.store.database(self.txn), delete=False)
            self._apply_files({}, wanted, steps, files)
            how = "rebuilt"
        else:
            target = _ids_to_json(wanted)
            undone = stamp["before"] == target != stamp["ids"] and self._undo(stamp["undo"])
            for number, step in enumerate(steps, 1):
                key = _SIZES_BEFORE if undone and step in stamp["resized"] else _SIZES
                stored = self.txn.get(key + bytes([number]))
                self.schedules[step] = FoldingSchedule.from_bytes(stored)
            if undone:
                how = "undone"
            elif stamp["ids"] == target:
                how = "there"
            elif self._apply_files(stamp["ids"], wanted, steps, files):
                how = "caught up"
            else:
                how = "rebuilt"
        self._schedules_before = {
            step: schedule.to_bytes() for step, schedule in self.schedules.items()
        }
        if how != "there":
            self.stamp(wanted, steps, before=None, undo=None)
        return how

    def _apply_files(
        self,
        stamped: dict[str, Any],
        wanted: Mapping[str, StateIds],
        steps: Sequence[str],
        files: Mapping[str, StateFiles],
    ) -> bool:
        """Bring every key group to its wanted id by the files in between. A group whose present id
        is not in the wanted chain is cleared and filled from the start. Returns whether no group
        had to be cleared.
        """
        all_caught_up = True
        for number, step in enumerate(steps, 1):
            schedule = self.schedules.setdefault(step, FoldingSchedule())
            present = from_ranges(stamped.get(step, []))
            step_wanted = wanted.get(step, {})
            cache: dict[str, StateFile] = {}
            for group in self.store.groups:
                old, new = present.get(group), step_wanted.get(group)
                if old == new:
                    continue
                chain = list(files[step].chain(group, new, until=old, cache=cache))
                prefix = bytes([number, group])
                if not chain or chain[-1].parents.get(group) != old:
                    self.clear(prefix)
                    schedule.drop_chain(group)
                    all_caught_up = False
                live_bytes = schedule.live_bytes(group)
                live_bytes += self._apply(
                    prefix, *fold(chain, group, with_deletions=old is not None)
                )
                for file in reversed(chain):
                    if file.parents.get(group) is None:
                        schedule.start_chain(group, file.group_bytes(group))
                    else:
                        schedule.add_delta(group, file.group_bytes(group))
                schedule.set_live_bytes(group, live_bytes)
        return all_caught_up

    def _apply(self, prefix: bytes, keys: pa.Array, values: pa.Array) -> int:
        """Put keys and values under a prefix. Returns by how many bytes the state has grown."""
        names = bytes_list(
            pc.binary_join_element_wise(
                pa.scalar(prefix, pa.binary()), keys, pa.scalar(b"", pa.binary())
            )
        )
        before = pa.array(self.get(names), pa.binary())  # type: ignore[arg-type]  # no key is null
        self.put(names, bytes_list(values))  # type: ignore[arg-type]
        return int(row_growth_bytes(keys, before, values).sum())

    def stamp(
        self,
        ids: Mapping[str, StateIds],
        steps: Sequence[str],
        *,
        before: Mapping[str, StateIds] | None,
        undo: str | None,
    ) -> None:
        """Store which ids the store holds, and which it held before the undo file."""
        resized = []
        for number, step in enumerate(steps, 1):
            schedule, sizes_before = self.schedules.get(step), self._schedules_before.get(step)
            if schedule is None or (sizes := schedule.to_bytes()) == sizes_before:
                if before is None and sizes_before is not None:
                    self.txn.put(_SIZES + bytes([number]), sizes_before)
                continue
            resized.append(step)
            self.txn.put(_SIZES + bytes([number]), sizes)
            self.txn.put(_SIZES_BEFORE + bytes([number]), sizes_before or b"")
        content = {
            "ids": _ids_to_json(ids),
            "steps": list(steps),
            "groups": list(self.store.groups),
            "before": None if before is None else _ids_to_json(before),
            "undo": undo,
            "resized": resized,
        }
        self.txn.put(_STAMP, json.dumps(content).encode())

    # Undo

    def keep_undo(self, keys: pa.Array, values: pa.Array) -> str:
        """Write the values that keys had before this batch to an undo file, which need not be
        durable. Returns its name. The file of the batch before stays until this transaction is
        committed: the store refers to it.
        """
        name = self._undo_file = f"{new_id()}{_UNDO}"
        table = pa.table({"key": keys, "value": values})
        with pa.ipc.new_file(str(self.store.directory / name), table.schema) as writer:
            writer.write_table(table)
        return name

    def remove_older_undo(self) -> None:
        """After the commit, remove undo files that the store no longer refers to."""
        if self._undo_file is not None:
            for path in self.store.directory.glob(f"*{_UNDO}"):
                if path.name != self._undo_file:
                    path.unlink(missing_ok=True)

    def _undo(self, name: str | None) -> bool:
        """Revert the last batch. Returns False if its undo file is missing or damaged."""
        if name is None:
            return False
        try:
            content = (self.store.directory / name).read_bytes()
            table = pa.ipc.open_file(pa.BufferReader(content)).read_all()
        except (OSError, pa.ArrowException):
            return False
        names: list[bytes] = bytes_list(as_array(table["key"]))  # type: ignore[assignment]  # none is null
        self.put(names, bytes_list(as_array(table["value"])))
        return True

    # Keys and values

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Values of keys; fastest in the store's order."""
        return list(map(self.txn.get, keys))

    def put(self, keys: Sequence[bytes], values: Sequence[bytes | None]) -> None:
        """Put values of keys; None deletes. Fastest in the store's order."""
        if None not in values:
            self.txn.cursor().putmulti(zip(keys, values, strict=True))
            return
        is_put = [value is not None for value in values]
        puts = zip(compress(keys, is_put), compress(values, is_put), strict=True)
        self.txn.cursor().putmulti(puts)
        # A deque of length 0 consumes the iterator without a Python loop over the keys.
        deque(map(self.txn.delete, compress(keys, map(not_, is_put))), maxlen=0)

    def clear(self, prefix: bytes) -> None:
        for key in self.scan(prefix)[0]:
            self.txn.delete(key)

    def scan(self, prefix: bytes) -> tuple[list[bytes], list[bytes]]:
        """Every key that begins with a prefix, in order, and the values."""
        return self._scan_range(prefix, _prefix_end(prefix))

    def between(self, prefix: bytes, low: bytes, high: bytes) -> tuple[list[bytes], list[bytes]]:
        """The keys under a prefix from `low` up to but without `high`, with the prefix removed; and
        the values.
        """
        keys, values = self._scan_range(prefix + low, min(prefix + high, _prefix_end(prefix)))
        return [key[len(prefix) :] for key in keys], values

    def first_between(self, prefix: bytes, low: bytes, high: bytes) -> bytes | None:
        """The smallest key that `between` would return."""
        cursor = self.txn.cursor()
        key: bytes = cursor.key() if cursor.set_range(prefix + low) else prefix + high
        return key[len(prefix) :] if key < min(prefix + high, _prefix_end(prefix)) else None

    def _scan_range(self, low: bytes, end: bytes) -> tuple[list[bytes], list[bytes]]:
        """Read in chunks that grow, so that few keys beyond the end are read in vain."""
        cursor = self.txn.cursor()
        keys: list[bytes] = []
        values: list[bytes] = []
        pairs = cursor.iternext() if cursor.set_range(low) else iter(())
        count = _FIRST_READ
        while (not keys or keys[-1] < end) and (chunk := list(islice(pairs, count))):
            chunk_keys, chunk_values = zip(*chunk, strict=True)
            keys += chunk_keys
            values += chunk_values
            count = min(2 * count, _MAX_READ)
        last = bisect_left(keys, end)
        return keys[:last], values[:last]


def _prefix_end(prefix: bytes) -> bytes:
    """The smallest key above all keys with the prefix. The last byte of a prefix is never 255."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _ids_to_json(ids: Mapping[str, StateIds]) -> dict[str, list[list[Any]]]:
    """State ids as JSON returns them."""
    return {
        step: [list(id_range) for id_range in to_ranges(groups)]
        for step, groups in ids.items()
        if groups
    }
