"""A shard's state close at hand: an ordered key-value store on local disk. A cache, never the
truth.

It is stamped with the state ids it holds. Given the ids that the ledger has, it is there already
(the usual case); or one batch ahead after a failed attempt, and goes back by the undo it kept; or
behind, and is given the files in between; or foreign, and is filled again from the files. LMDB has
no checksums and a truncated map is a bus error, so its file's length is checked before anything is
read from it, and a store from before a power loss is thrown away.
"""

from __future__ import annotations

import json
import os
import shutil
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from itertools import compress, islice
from operator import not_
from pathlib import Path
from typing import Any

import lmdb
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import bytes_list
from headrace.columnar.keys import whole
from headrace.engine.state.files import StateFile, StateFiles, StateIds, folded, growth, new_id
from headrace.log.file.disk import Disk

# Local stores that a worker process keeps open between batches. Mapping a large store anew costs a
# page fault for every page that a batch touches: of a batch of 10,000 random keys among 5 million,
# more than a third of its time.
#
# A handle is used again only if its file is still the one that is there, as long as it must be, and
# begins as a store does: reading from a map whose file was cut short or written over ends the
# process.


DATA = "data.mdb"
_MAP_BYTES = 1 << 36
_MAX_IDLE = 16
_MAGIC = (0xBEEFC0DE).to_bytes(4, "little")
_MAGIC_AT, _PAGES = 16, 2  # each of the first two pages says what it is, behind its header
_idle: OrderedDict[Path, tuple[Any, int, int]] = (
    OrderedDict()
)  # with the file's inode and the size of its pages


def opened(directory: Path) -> Any:
    """The environment in a directory: one that was given back, or a new one. Raises `lmdb.Error` if
    what is there is no store, or is damaged.
    """
    env, inode, page_bytes = _idle.pop(directory, (None, 0, 0))
    if env is not None:
        if _begins_as_a_store(directory / DATA, inode, page_bytes) and not _is_short(
            env, directory
        ):
            return env
        env.close()
    directory.mkdir(parents=True, exist_ok=True)
    env = lmdb.open(str(directory), map_size=_MAP_BYTES, sync=False, metasync=False, max_readers=16)
    if _is_short(env, directory):
        env.close()
        raise lmdb.CorruptedError(f"{directory} was cut short")
    return env


def give_back(directory: Path, env: Any) -> None:
    """Done with it for now."""
    try:
        _idle[directory] = env, (directory / DATA).stat().st_ino, env.stat()["psize"]
    except OSError:  # it was thrown away meanwhile
        env.close()
    while len(_idle) > _MAX_IDLE:
        _, (oldest, *_) = _idle.popitem(last=False)
        oldest.close()


def _begins_as_a_store(path: Path, inode: int, page_bytes: int) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(_PAGES * page_bytes)
            same = os.fstat(file.fileno()).st_ino == inode
    except OSError:
        return False
    return same and all(
        head[page * page_bytes + _MAGIC_AT :][:4] == _MAGIC for page in range(_PAGES)
    )


def _is_short(env: Any, directory: Path) -> bool:
    return bool(
        (env.info()["last_pgno"] + 1) * env.stat()["psize"] > (directory / DATA).stat().st_size
    )


# How long the chains of files behind a step's key groups have grown, and what to do about it, so
# that filling a store from them stays quick.
#
# *Folding* writes a group's whole state as a snapshot, which begins a new chain. It is worth it
# where the files hold far more than what is there still, or where they are many. It is paid for by
# the deltas that were written, a few groups at a time, so that cost follows the change and never
# comes all at once. *Merging* makes one delta of many small ones: where changes are small and the
# state is large, folding alone would let chains grow too long.
#
# The local store keeps these sizes beside the state. They follow from the files, and are computed
# from them again when the store is filled.


_SMALL_BYTES = 64 << 10  # of deltas of one group: not worth folding
_FOLD_TIMES = 2.0  # so many times as much that is not there any more as is there is worth folding
# of one group: worth folding if they are so many times as large as what they follow, though all of
# it be there still
_MANY_FILES = 64
_LATE_TIMES = 6.0  # and so many times are too many
# bytes of snapshots for each byte of deltas: keeps what is not there any more at four times the
# state, where keys are updated
_PAID_A_BYTE = 0.25
_PAID_A_BYTE_LATE = 2.0  # enough also where all keys are new
_MERGE_FILES = 256
_MAX_MERGED_BYTES = 16 << 20


@dataclass
class Chain:
    """A group's first file (a snapshot, or the first delta, which is one too), the deltas behind
    it, what is there still of all that, and the deltas that no merge has seen.
    """

    first_bytes: int = 0
    delta_bytes: int = 0
    deltas: int = 0
    live_bytes: int = 0
    fresh_bytes: int = 0
    fresh: int = 0

    @property
    def excess(self) -> float:
        """How many times as large as what is there what is not there any more is, or, of many
        files, deltas beside what they follow; 0 if they are small.
        """
        if self.delta_bytes <= _SMALL_BYTES:
            return 0.0
        gone = (self.first_bytes + self.delta_bytes) / max(self.live_bytes, 1) - 1
        return (
            gone
            if self.deltas < _MANY_FILES
            else max(gone, self.delta_bytes / max(self.first_bytes, 1))
        )


@dataclass
class FoldingSchedule:
    """The chains of one step in one shard. `credit_bytes` is what deltas have paid for folding,
    kept while groups wait for it.
    """

    chains: dict[int, Chain] = field(default_factory=dict)
    credit_bytes: float = 0

    def begin(self, group: int, size: int) -> None:
        """A group's chain begins anew with a file that has all of it."""
        self.chains[group] = Chain(first_bytes=size, live_bytes=size)

    def add(self, group: int, size: int, *, more: int = 0) -> None:
        """A delta behind the others, with which there are so many bytes more (or fewer) than
        before.
        """
        chain = self.chains.setdefault(group, Chain())
        chain.delta_bytes += size
        chain.deltas += 1
        chain.live_bytes += more
        chain.fresh_bytes += size
        chain.fresh += 1

    def forget(self, group: int) -> None:
        self.chains.pop(group, None)

    def live_bytes(self, group: int) -> int:
        """What is there of a group."""
        return self.chains[group].live_bytes if group in self.chains else 0

    def holds(self, group: int, live_bytes: int) -> None:
        """What is there of a group, once all of its files are known."""
        self.chains.setdefault(group, Chain()).live_bytes = live_bytes

    # Folding

    def earn(self, written_bytes: int) -> None:
        """For deltas that were written."""
        worst = max((chain.excess for chain in self.chains.values()), default=0.0)
        paid = (
            0.0
            if worst < _FOLD_TIMES
            else _PAID_A_BYTE
            if worst < _LATE_TIMES
            else _PAID_A_BYTE_LATE
        )
        self.credit_bytes = self.credit_bytes + paid * written_bytes if paid else 0

    def to_fold(self) -> list[int]:
        """The groups that are worth folding and paid for, the worst first."""
        chosen, left = [], self.credit_bytes
        for group, chain in sorted(self.chains.items(), key=lambda each: -each[1].excess):
            if chain.excess < _FOLD_TIMES or chain.live_bytes > left:
                break
            left -= chain.live_bytes
            chosen.append(group)
        return chosen

    def folded(self, group: int, size: int) -> None:
        self.begin(group, size)
        self.credit_bytes -= size

    # Merging

    def to_merge(self) -> dict[int, int]:
        """For each group with several how many of its newest deltas to merge; none, unless some
        group has many and all are small.
        """
        many = any(chain.fresh >= _MERGE_FILES for chain in self.chains.values())
        if not many or sum(chain.fresh_bytes for chain in self.chains.values()) > _MAX_MERGED_BYTES:
            return {}
        return {
            group: chain.fresh for group, chain in sorted(self.chains.items()) if chain.fresh > 1
        }

    def merged(self, group: int, size: int) -> None:
        chain = self.chains[group]
        chain.delta_bytes += size - chain.fresh_bytes
        chain.deltas -= chain.fresh - 1
        chain.fresh_bytes = chain.fresh = 0

    # Beside the state

    def to_json(self) -> dict[str, Any]:
        chains = {str(group): list(astuple(chain)) for group, chain in self.chains.items()}
        return {"credit_bytes": self.credit_bytes, "chains": chains}

    @classmethod
    def from_json(cls, known: Mapping[str, Any] | None) -> FoldingSchedule:
        if known is None:
            return cls()
        return cls(
            {int(group): Chain(*numbers) for group, numbers in known["chains"].items()},
            known["credit_bytes"],
        )


VERSION = 3
_FIRST = 16
_AT_ONCE = 1000
_STAMP = b"\x00stamp"
_UNDO = ".undo"
Groups = Sequence[int]


class LocalStore:
    """The store of one shard of one stage. Steps are told apart by the first byte of a key, key
    groups by the second.
    """

    def __init__(self, directory: Path, groups: Groups) -> None:
        self.directory, self.groups = directory, groups
        self._check()
        try:
            self._env = opened(directory)
        except lmdb.Error:  # not a store at all, or damaged
            shutil.rmtree(directory, ignore_errors=True)
            self._env = opened(directory)

    def _check(self) -> None:
        """Throw away what cannot be trusted: another machine life, or a file that is shorter than
        it was.
        """
        if not self.directory.exists():
            return
        try:
            known = json.loads((self.directory / "about.json").read_text())
            size = (self.directory / DATA).stat().st_size
            sound = (
                known["boot"] == Disk().boot().hex()
                and size >= known["size"]
                and known["version"] == VERSION
            )
        except (OSError, ValueError, KeyError):
            sound = False
        if not sound:
            shutil.rmtree(self.directory, ignore_errors=True)

    @contextmanager
    def transaction(self) -> Iterator[StoreTransaction]:
        """Check, step and put are one: nothing of a failed step stays. A store that turns out to be
        damaged is thrown away, so that another attempt fills it again.
        """
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
        about = {
            "version": VERSION,
            "boot": Disk().boot().hex(),
            "size": (self.directory / DATA).stat().st_size,
        }
        (self.directory / "about.json").write_text(json.dumps(about))

    def database(self, txn: Any) -> Any:
        return self._env.open_db(None, txn)

    def close(self) -> None:
        """The next one to open it in this process has it at once."""
        give_back(self.directory, self._env)


class StoreTransaction:
    """One write transaction of the local store."""

    def __init__(self, txn: Any, store: LocalStore) -> None:
        self.txn, self.store = txn, store
        self._kept_undo: str | None = None
        self.sizes: dict[str, FoldingSchedule] = {}  # of the files that lead to each step's state
        self._sizes_before: dict[str, Any] = {}

    def bring_to(
        self, wanted: Mapping[str, StateIds], steps: Sequence[str], files: Mapping[str, StateFiles]
    ) -> str:
        """Make the store hold exactly the wanted states. Returns how: "there", "undone", "caught
        up" or "rebuilt".
        """
        stamp = self._stamp()
        if (
            stamp is not None
            and stamp["groups"] == list(self.store.groups)
            and stamp["steps"] == list(steps)
        ):
            how = self._brought(stamp, wanted, steps, files)
        else:
            self.txn.drop(self.store.database(self.txn), delete=False)
            self._filled({}, wanted, steps, files)
            how = "rebuilt"
        self._sizes_before = self._sizes_as_json()
        if how != "there":
            self.stamp(wanted, steps, before=None, undo=None)
        return how

    def _brought(
        self,
        stamp: dict[str, Any],
        wanted: Mapping[str, StateIds],
        steps: Sequence[str],
        files: Mapping[str, StateFiles],
    ) -> str:
        target = _as_json(wanted)
        undone = stamp["before"] == target != stamp["ids"] and self._undo(stamp["undo"])
        sizes = stamp["sizes_before" if undone else "sizes"]
        self.sizes = {step: FoldingSchedule.from_json(sizes.get(step)) for step in steps}
        if undone:
            return "undone"
        if stamp["ids"] == target:
            return "there"
        return "caught up" if self._filled(stamp["ids"], wanted, steps, files) else "rebuilt"

    def _filled(
        self,
        ids: dict[str, Any],
        wanted: Mapping[str, StateIds],
        steps: Sequence[str],
        files: Mapping[str, StateFiles],
    ) -> bool:
        """From the files, on top of what is there. Returns whether that could stay."""
        stayed = True
        for number, step in enumerate(steps, 1):
            held = {int(group): name for group, name in ids.get(step, {}).items()}
            stayed &= self._catch_up(number, step, held, wanted.get(step, {}), files[step])
        return stayed

    def _catch_up(
        self, number: int, step: str, held: StateIds, wanted: StateIds, files: StateFiles
    ) -> bool:
        """Each group by the files behind the one it has; where that is not among them, from the
        beginning. Returns whether there was no such group.
        """
        sizes = self.sizes.setdefault(step, FoldingSchedule())
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
        names: list[bytes] = bytes_list(
            pc.binary_join_element_wise(
                pa.scalar(prefix, pa.binary()), keys, pa.scalar(b"", pa.binary())
            )
        )  # type: ignore[assignment]
        before = pa.array(self.get(names), pa.binary())
        self.put(names, bytes_list(values))
        return int(growth(keys, before, values).sum())

    def _stamp(self) -> dict[str, Any] | None:
        raw = self.txn.get(_STAMP)
        return None if raw is None else json.loads(raw)

    def stamp(
        self,
        ids: Mapping[str, StateIds],
        steps: Sequence[str],
        *,
        before: Mapping[str, StateIds] | None,
        undo: str | None,
    ) -> None:
        """Say what the store holds, and what it held before."""
        content = {
            "ids": _as_json(ids),
            "steps": list(steps),
            "groups": list(self.store.groups),
            "before": None if before is None else _as_json(before),
            "undo": undo,
            "sizes": self._sizes_as_json(),
            "sizes_before": self._sizes_before,
        }
        self.txn.put(_STAMP, json.dumps(content).encode())

    def _sizes_as_json(self) -> dict[str, Any]:
        return {step: sizes.to_json() for step, sizes in self.sizes.items()}

    def _undo(self, name: str | None) -> bool:
        """Put back what the last batch changed; False if what it needs is not there."""
        if name is None:
            return False
        try:
            table = pa.ipc.open_file(
                pa.BufferReader((self.store.directory / name).read_bytes())
            ).read_all()
        except (OSError, pa.ArrowException):
            return False
        names: list[bytes] = bytes_list(whole(table["key"]))  # type: ignore[assignment]  # none is null
        self.put(names, bytes_list(whole(table["value"])))
        return True

    def keep_undo(self, keys: pa.Array, values: pa.Array) -> str:
        """Remember what keys held before this batch, in a file that need not be durable. It has a
        name of its own: until this commit the store refers to the last one.
        """
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
        deque(
            map(self.txn.delete, compress(keys, map(not_, stays))), maxlen=0
        )  # no loop of Python's for each key

    def clear(self, prefix: bytes) -> None:
        for key in self.scan(prefix)[0]:
            self.txn.delete(key)

    def scan(self, prefix: bytes) -> tuple[list[bytes], list[bytes]]:
        """Every key that begins with a prefix, in order, and their values."""
        return self._until(prefix, _behind(prefix))

    def between(self, prefix: bytes, low: bytes, high: bytes) -> tuple[list[bytes], list[bytes]]:
        """Keys under a prefix, from `low` up to but not including `high`, without the prefix; and
        their values.
        """
        keys, values = self._until(prefix + low, min(prefix + high, _behind(prefix)))
        return [key[len(prefix) :] for key in keys], values

    def first_between(self, prefix: bytes, low: bytes, high: bytes) -> bytes | None:
        cursor = self.txn.cursor()
        found: bytes = cursor.key() if cursor.set_range(prefix + low) else prefix + high
        return found[len(prefix) :] if found < min(prefix + high, _behind(prefix)) else None

    def _until(self, low: bytes, end: bytes) -> tuple[list[bytes], list[bytes]]:
        """Taken some at a time, more and more: only of the last ones it must be found out where
        they end, and few are read in vain.
        """
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
    return {
        step: {str(group): name for group, name in sorted(groups.items())}
        for step, groups in ids.items()
        if groups
    }
