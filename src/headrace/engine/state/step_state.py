"""What a kernel sees of its state, and what of it changed: over the local store of its shard.

Keys come and go as columns. They are put into the store's order once (by key group; a kernel's keys
are sorted already), and what was there before and what is there now stay columns in that order: the
delta file and the undo are written from them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.atomic_file import write_atomically
from headrace.columnar.buffers import Ints, as_binary, bytes_list, same_width, take_bytes
from headrace.columnar.keys import key_groups
from headrace.engine.state.files import (
    GROUPS,
    StateFile,
    StateFiles,
    StateIds,
    folded,
    growth,
    weights,
)
from headrace.engine.state.local_store import FoldingSchedule, StoreTransaction
from headrace.operators.kernel import Groups

# What a kernel made of its state and would like to find again: a file beside the local store of its
# shard. It may be gone at any time, and is checked when it is read.
#
# | bytes | |
# |---|---|
# | 4 | `HRm` and the version |
# | 16 | digest of what follows |
# | | what the kernel wrote |
#
# Nothing depends on it, so nothing waits for the disk.


_MAGIC = b"HRm\x01"
_DIGEST = 16


def write_kernel_cache(path: Path, content: bytes) -> None:
    """A disk that is full is no reason to fail."""
    with suppress(OSError):
        write_atomically(path, _MAGIC + _digest(content) + content, durable=False)


def read_kernel_cache(path: Path) -> bytes | None:
    """None if there is none, or if it is not what was written."""
    with suppress(OSError):
        found = path.read_bytes()
        start = len(_MAGIC) + _DIGEST
        if found.startswith(_MAGIC) and found[len(_MAGIC) : start] == _digest(found[start:]):
            return found[start:]
    return None


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST).digest()


_LONGEST_KEY = 400


@dataclass(frozen=True)
class Placed:
    """Keys in the store's order, and where each of them came from."""

    order: Ints
    groups: Groups
    keys: pa.Array  # as files have them: BINARY, long ones cut and told apart by a digest
    stored: pa.Array  # as the local store has them: behind step and key group

    @cached_property
    def names(self) -> list[bytes]:
        names: list[bytes] = bytes_list(self.stored)  # type: ignore[assignment]  # none is null
        return names


@dataclass(frozen=True)
class Changed:
    """Keys with what they held before a batch and what they hold now; null where there is
    nothing.
    """

    groups: Groups
    keys: pa.Array
    stored: pa.Array
    before: pa.Array
    after: pa.Array

    def __len__(self) -> int:
        return len(self.groups)


class StepState:
    """The state of one step in one shard during one batch. `number` tells steps of a stage apart,
    from 1 on.
    """

    def __init__(self, store: StoreTransaction, number: int) -> None:
        self.store, self.number = store, number
        self._puts: list[Changed] = []
        self._distinct = True  # whether no put had a key twice
        self._got: tuple[object, Placed, pa.Array] | None = (
            None  # keys as asked for, in their places, and their values there
        )

    # What kernels call

    @property
    def owned_groups(self) -> Sequence[int]:
        return self.store.store.groups

    def read_cache(self) -> bytes | None:
        return read_kernel_cache(self._memo)

    def write_cache(self, content: bytes) -> None:
        write_kernel_cache(self._memo, content)

    @property
    def _memo(self) -> Path:
        return self.store.store.directory / f"{self.number}.memo"

    def get(self, keys: Sequence[bytes], groups: Groups | None = None) -> list[bytes | None]:
        return bytes_list(self._get(keys, pa.array(keys, pa.binary()), groups))

    def put(
        self, keys: Sequence[bytes], values: Sequence[bytes | None], groups: Groups | None = None
    ) -> None:
        self._distinct = self._distinct and len(set(keys)) == len(keys)
        self._put(keys, pa.array(keys, pa.binary()), pa.array(values, pa.binary()), groups)

    def get_array(self, keys: pa.Array, groups: Groups | None = None) -> pa.Array:
        return self._get(keys, keys, groups)

    def put_array(self, keys: pa.Array, values: pa.Array, groups: Groups | None = None) -> None:
        self._put(keys, keys, values, groups)

    def scan(self, low: bytes, high: bytes) -> tuple[list[bytes], list[bytes], Groups]:
        keys: list[bytes] = []
        values: list[bytes] = []
        counts = []
        for group in self.store.store.groups:
            some, its_values = self.store.between(bytes([self.number, group]), low, high)
            keys += some
            values += its_values
            counts.append(len(some))
        return keys, values, np.repeat(np.array(self.store.store.groups, np.uint8), counts)

    def first(self, low: bytes, high: bytes) -> bytes | None:
        firsts = (
            self.store.first_between(bytes([self.number, group]), low, high)
            for group in self.store.store.groups
        )
        return min((key for key in firsts if key is not None), default=None)

    def more(self, tag: bytes) -> int:
        """How many more keys that begin so there are than before the batch."""
        return sum(_more(put, tag) for put in self._puts)

    # How keys are placed

    def _get(self, asked: object, keys: pa.Array, groups: Groups | None) -> pa.Array:
        placed = self._placed(keys, groups)
        values = pa.array(self.store.get(placed.names), pa.binary())
        self._got = asked, placed, values
        back = np.empty(len(placed.order), np.int64)
        back[placed.order] = np.arange(len(back))
        return take_bytes(values, back)

    def _put(self, asked: object, keys: pa.Array, values: pa.Array, groups: Groups | None) -> None:
        if (
            self._got is not None and self._got[0] is asked
        ):  # a kernel puts what it has just got: no need to look again
            _, placed, before = self._got
        else:
            placed = self._placed(keys, groups)
            before = pa.array(self.store.get(placed.names), pa.binary())
        self._got = None
        after = take_bytes(values, placed.order)
        self._puts.append(Changed(placed.groups, placed.keys, placed.stored, before, after))
        self.store.put(placed.names, bytes_list(after))

    def _placed(self, keys: pa.Array, given: Groups | None) -> Placed:
        groups = key_groups(keys) if given is None else given
        order = np.argsort(groups, kind="stable")
        in_order, short = groups[order], _short(take_bytes(keys, order))
        return Placed(order, in_order, short, _behind_prefix(self.number, in_order, short))

    # What changed

    def changed(self) -> Changed | None:
        """Every key that was put, once: as it was before the first time, and as it is after the
        last.
        """
        if not self._puts:
            return None
        if len(self._puts) == 1 and self._distinct:
            return self._puts[0]
        stored = pa.concat_arrays([put.stored for put in self._puts])
        codes = stored.dictionary_encode().indices.to_numpy()
        _, first = np.unique(codes, return_index=True)
        _, from_the_end = np.unique(codes[::-1], return_index=True)
        last = len(codes) - 1 - from_the_end
        groups = np.concatenate([put.groups for put in self._puts])[last]
        order = np.argsort(groups, kind="stable")
        first, last = first[order], last[order]
        keys, before, after = (
            take_bytes(pa.concat_arrays([getattr(put, name) for put in self._puts]), which)
            for name, which in (("keys", last), ("before", first), ("after", last))
        )
        return Changed(groups[order], keys, take_bytes(stored, last), before, after)


def _more(put: Changed, tag: bytes) -> int:
    """Keys that came, less keys that went."""
    there, stays = (
        column.is_valid().to_numpy(zero_copy_only=False) for column in (put.before, put.after)
    )
    sign = stays.astype(np.int64) - there
    which = np.flatnonzero(sign)
    begin = pc.starts_with(put.keys.take(pa.array(which)), tag.decode("latin-1")).to_numpy(
        zero_copy_only=False
    )
    return int(sign[which][begin].sum())


def _short(keys: pa.Array) -> pa.Array:
    """The store takes no long keys; those are told apart by a digest."""
    longest = pc.max(pc.binary_length(keys)).as_py()
    if longest is None or longest <= _LONGEST_KEY:
        return keys
    cut = [
        (
            key
            if len(key) <= _LONGEST_KEY
            else key[: _LONGEST_KEY - 32] + blake2b(key, digest_size=32).digest()
        )
        for key in keys.to_pylist()
    ]
    return pa.array(cut, pa.binary())


def _behind_prefix(number: int, groups: Groups, keys: pa.Array) -> pa.Array:
    prefixes = np.empty((len(groups), 2), np.uint8)
    prefixes[:, 0], prefixes[:, 1] = number, groups
    plain = same_width(keys)
    if plain is None:
        return pc.binary_join_element_wise(
            as_binary(prefixes.view("V2").reshape(-1)), keys, pa.scalar(b"", pa.binary())
        )
    joined = np.hstack([prefixes, plain.view(np.uint8).reshape(len(plain), -1)])
    return as_binary(joined.view(f"V{joined.shape[1]}").reshape(-1))


# The end of a shard's batch: what the kernels changed becomes durable, and the local store knows
# what it holds and how to go back.


_LONGEST = 1 << 10  # longer than any key that the store takes


def write_states(
    txn: StoreTransaction,
    states: Mapping[str, StepState],
    files: Mapping[str, StateFiles],
    held: Mapping[str, StateIds],
) -> tuple[dict[str, StateIds], int]:
    """Returns the new ids of each step's states, which were `held` before, and how many keys
    changed.

    1. What changed goes into delta files. 2. Chains that have grown long are folded or merged. 3.
       What was there before is kept, to go back to.
    4. The store is stamped with the new ids.
    """
    fresh = {step: dict(held[step]) for step in states}
    undo = []
    for step, state in states.items():
        if (changed := state.changed()) is None:
            continue
        sizes = txn.sizes.setdefault(step, FoldingSchedule())
        _write_delta(files[step], changed, fresh[step], sizes)  # 1
        _fold(txn, state.number, files[step], fresh[step], sizes)  # 2
        _merge(files[step], fresh[step], sizes)
        undo.append((changed.stored, changed.before))
    kept = (
        txn.keep_undo(*(pa.concat_arrays(column) for column in zip(*undo, strict=True)))
        if undo
        else None
    )  # 3
    txn.stamp(fresh, list(states), before=held, undo=kept)  # 4
    return fresh, sum(len(keys) for keys, _ in undo)


def _write_delta(
    files: StateFiles, changed: Changed, ids: StateIds, sizes: FoldingSchedule
) -> None:
    touched = np.unique(changed.groups).tolist()
    name = files.write(
        changed.keys, changed.after, changed.groups, {group: ids.get(group) for group in touched}
    )
    of_rows = (
        weights(changed.keys, changed.after),
        growth(changed.keys, changed.before, changed.after),
    )
    written, more = (
        np.bincount(changed.groups, each, minlength=GROUPS).astype(np.int64) for each in of_rows
    )
    for group in touched:
        if group in ids:
            sizes.add(group, int(written[group]), more=int(more[group]))
        else:
            sizes.begin(group, int(written[group]))
            sizes.holds(group, int(more[group]))  # not what it deletes in vain
        ids[group] = name
    sizes.earn(int(written.sum()))


def _fold(
    txn: StoreTransaction, number: int, files: StateFiles, ids: StateIds, sizes: FoldingSchedule
) -> None:
    """All groups whose turn it is, as they are now, in one file."""
    chosen = sorted(sizes.to_fold())
    if not chosen:
        return
    contents = [_columns(*txn.scan(bytes([number, group]))) for group in chosen]
    name, sizes_now = _written(files, chosen, contents, dict.fromkeys(chosen))
    for group, size in zip(chosen, sizes_now, strict=True):
        ids[group] = name
        sizes.folded(group, size)


def _merge(files: StateFiles, ids: StateIds, sizes: FoldingSchedule) -> None:
    """The newest deltas of all groups, in one file that stands in their place."""
    chosen = sizes.to_merge()
    if not chosen:
        return
    cache: dict[str, StateFile] = {}
    chains = {
        group: list(files.chain(group, ids[group], most=count, cache=cache))
        for group, count in chosen.items()
    }
    contents = [folded(chain, group, with_deletions=True) for group, chain in chains.items()]
    name, sizes_now = _written(
        files,
        list(chosen),
        contents,
        {group: chain[-1].parents[group] for group, chain in chains.items()},
    )
    for group, size in zip(chosen, sizes_now, strict=True):
        ids[group] = name
        sizes.merged(group, size)


def _written(
    files: StateFiles,
    groups: Sequence[int],
    contents: Sequence[tuple[pa.Array, pa.Array]],
    parents: Mapping[int, str | None],
) -> tuple[str, list[int]]:
    """A file with the keys and values of some groups; returns its id, and the bytes of each group
    in it.
    """
    counts = [len(keys) for keys, _ in contents]
    keys, values = (pa.concat_arrays(column) for column in zip(*contents, strict=True))
    name = files.write(keys, values, np.repeat(np.array(groups, np.uint8), counts), parents)
    return name, [int(weights(*content).sum()) for content in contents]


def _columns(keys: Sequence[bytes], values: Sequence[bytes]) -> tuple[pa.Array, pa.Array]:
    """Keys, without step and group, and values."""
    return pc.binary_slice(pa.array(keys, pa.binary()), 2, _LONGEST), pa.array(values, pa.binary())
