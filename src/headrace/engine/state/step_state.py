"""The state of a step during a batch: what its kernel reads and writes (`StepState`), and how the
changes become durable at the end (`write_states`).

`StepState` implements the kernels' `KeyedState` over the local store of the shard. Keys and values
are columns. They are put into the store's order once (by key group; a kernel's keys are sorted
already), and stay columns in that order: the delta file and the undo file are written from them
without another conversion.

A kernel may also keep a cache (`read_cache`, `write_cache`): something that it has computed from
its state and would have to compute again in another process. It is a file next to the local store,
may be gone at any time, and is checked when it is read:

    bytes    content
    4        `HRm` and the version
    16       digest of what follows
    rest     what the kernel wrote
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
from headrace.columnar.buffers import Ints, as_binary, bytes_list, equal_length_values, take_bytes
from headrace.columnar.keys import KEY_GROUPS, key_groups
from headrace.engine.state.files import (
    StateFile,
    StateFiles,
    StateIds,
    StepChanges,
    fold,
    row_bytes,
    row_growth_bytes,
    write_shared,
)
from headrace.engine.state.folding_schedule import FoldingSchedule
from headrace.engine.state.local_store import StoreTransaction
from headrace.operators.kernel import Groups

# Kernel caches


_MAGIC = b"HRm\x01"
_DIGEST_BYTES = 16


def write_kernel_cache(path: Path, content: bytes) -> None:
    """Write a kernel's cache. Nothing depends on it: a full disk is ignored, and nothing is
    synced.
    """
    with suppress(OSError):
        write_atomically(path, _MAGIC + _digest(content) + content, durable=False)


def read_kernel_cache(path: Path) -> bytes | None:
    """The content of a kernel's cache; None if there is none, or if it is damaged."""
    with suppress(OSError):
        stored = path.read_bytes()
        start = len(_MAGIC) + _DIGEST_BYTES
        content = stored[start:]
        if stored.startswith(_MAGIC) and stored[len(_MAGIC) : start] == _digest(content):
            return content
    return None


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()


# State


_MAX_KEY_BYTES = 400
_PREFIX_BYTES = 2  # number of the step, key group
_MAX_NAME_BYTES = 1 << 10  # above any key that the store takes


@dataclass(frozen=True)
class SortedKeys:
    """Keys in the store's order."""

    order: Ints
    """The index of each key in the caller's order."""
    groups: Groups
    keys: pa.Array
    """The keys as state files have them: binary, long ones cut and distinguished by a digest."""
    stored: pa.Array
    """The keys as the local store has them: behind the number of the step and the key group."""

    @cached_property
    def names(self) -> list[bytes]:
        names: list[bytes] = bytes_list(self.stored)  # type: ignore[assignment]  # none is null
        return names


@dataclass(frozen=True)
class KeyChanges:
    """Keys with their values before a batch and now; null where there is no entry."""

    groups: Groups
    keys: pa.Array
    stored: pa.Array
    before: pa.Array
    after: pa.Array

    def __len__(self) -> int:
        return len(self.groups)

    @cached_property
    def grown_bytes(self) -> Ints:
        """By how many bytes the entry of each key has grown."""
        return row_growth_bytes(self.keys, self.before, self.after)

    @property
    def new_keys(self) -> int:
        """How many more keys there are than before."""
        return int(self.before.null_count - self.after.null_count)

    def growth(self, prefix: bytes) -> int:
        """How many more keys with the prefix there are than before."""
        had_entry, has_entry = (
            column.is_valid().to_numpy(zero_copy_only=False) for column in (self.before, self.after)
        )
        change = has_entry.astype(np.int64) - had_entry
        changed = np.flatnonzero(change)
        has_prefix = pc.starts_with(self.keys.take(pa.array(changed)), prefix.decode("latin-1"))
        return int(change[changed][has_prefix.to_numpy(zero_copy_only=False)].sum())


@dataclass(frozen=True)
class StateGrowth:
    """How the state of a step has changed in a task."""

    changed_keys: int
    new_keys: int
    """How many more keys it has than before; below zero if it has fewer."""
    new_bytes: int


class StepState:
    """The state of one step in one shard during one batch. `number` distinguishes the steps of a
    stage, from 1 on.
    """

    def __init__(self, store: StoreTransaction, number: int) -> None:
        self.store = store
        self.number = number
        self._puts: list[KeyChanges] = []
        self._is_distinct = True  # whether no put had a key twice
        # The last get: the caller's keys, the sorted keys, and their values in that order.
        self._last_get: tuple[object, SortedKeys, pa.Array] | None = None

    # What kernels call: see `KeyedState` and `CachingState`

    @property
    def owned_groups(self) -> Sequence[int]:
        return self.store.store.groups

    def read_cache(self) -> bytes | None:
        return read_kernel_cache(self._cache_path)

    def write_cache(self, content: bytes) -> None:
        write_kernel_cache(self._cache_path, content)

    @property
    def _cache_path(self) -> Path:
        return self.store.store.directory / f"{self.number}.memo"

    def get(self, keys: Sequence[bytes], groups: Groups | None = None) -> list[bytes | None]:
        return bytes_list(self._get(keys, pa.array(keys, pa.binary()), groups))

    def put(
        self, keys: Sequence[bytes], values: Sequence[bytes | None], groups: Groups | None = None
    ) -> None:
        self._is_distinct = self._is_distinct and len(set(keys)) == len(keys)
        self._put(keys, pa.array(keys, pa.binary()), pa.array(values, pa.binary()), groups)

    def get_array(self, keys: pa.Array, groups: Groups | None = None) -> pa.Array:
        return self._get(keys, keys, groups)

    def put_array(self, keys: pa.Array, values: pa.Array, groups: Groups | None = None) -> None:
        self._put(keys, keys, values, groups)

    def scan(self, low: bytes, high: bytes) -> tuple[list[bytes], list[bytes], Groups]:
        keys: list[bytes] = []
        values: list[bytes] = []
        counts = []
        for group in self.owned_groups:
            prefix = bytes([self.number, group])
            group_keys, group_values = self.store.between(prefix, low, high)
            keys += group_keys
            values += group_values
            counts.append(len(group_keys))
        return keys, values, np.repeat(np.array(self.owned_groups, np.uint8), counts)

    def first(self, low: bytes, high: bytes) -> bytes | None:
        firsts = (
            self.store.first_between(bytes([self.number, group]), low, high)
            for group in self.owned_groups
        )
        return min((key for key in firsts if key is not None), default=None)

    def _get(self, request: object, keys: pa.Array, groups: Groups | None) -> pa.Array:
        sorted_keys = self._sort(keys, groups)
        values = pa.array(self.store.get(sorted_keys.names), pa.binary())
        self._last_get = request, sorted_keys, values
        inverse = np.empty(len(sorted_keys.order), np.int64)
        inverse[sorted_keys.order] = np.arange(len(inverse))
        return take_bytes(values, inverse)

    def _put(
        self, request: object, keys: pa.Array, values: pa.Array, groups: Groups | None
    ) -> None:
        # A kernel usually puts the keys that it has just got: then the old values are known.
        if self._last_get is not None and self._last_get[0] is request:
            _, sorted_keys, before = self._last_get
        else:
            sorted_keys = self._sort(keys, groups)
            before = pa.array(self.store.get(sorted_keys.names), pa.binary())
        self._last_get = None
        after = take_bytes(values, sorted_keys.order)
        self._puts.append(
            KeyChanges(
                groups=sorted_keys.groups,
                keys=sorted_keys.keys,
                stored=sorted_keys.stored,
                before=before,
                after=after,
            )
        )
        self.store.put(sorted_keys.names, bytes_list(after))

    def _sort(self, keys: pa.Array, groups: Groups | None) -> SortedKeys:
        groups = key_groups(keys) if groups is None else groups
        order = np.argsort(groups, kind="stable")
        sorted_groups, short_keys = groups[order], _shorten(take_bytes(keys, order))
        return SortedKeys(
            order=order,
            groups=sorted_groups,
            keys=short_keys,
            stored=_with_prefix(self.number, sorted_groups, short_keys),
        )

    # What changed

    def key_growth(self, prefix: bytes) -> int:
        """How many more keys with a prefix there are than before the batch."""
        return sum(put.growth(prefix) for put in self._puts)

    def changes(self) -> KeyChanges | None:
        """Every key that was put, once: with its value before the first put and after the last."""
        if not self._puts:
            return None
        if len(self._puts) == 1 and self._is_distinct:
            return self._puts[0]
        stored = pa.concat_arrays([put.stored for put in self._puts])
        codes = stored.dictionary_encode().indices.to_numpy()
        _, first = np.unique(codes, return_index=True)
        _, from_the_end = np.unique(codes[::-1], return_index=True)
        last = len(codes) - 1 - from_the_end
        groups = np.concatenate([put.groups for put in self._puts])[last]
        order = np.argsort(groups, kind="stable")
        first, last = first[order], last[order]
        return KeyChanges(
            groups=groups[order],
            keys=take_bytes(pa.concat_arrays([put.keys for put in self._puts]), last),
            stored=take_bytes(stored, last),
            before=take_bytes(pa.concat_arrays([put.before for put in self._puts]), first),
            after=take_bytes(pa.concat_arrays([put.after for put in self._puts]), last),
        )


def _shorten(keys: pa.Array) -> pa.Array:
    """Keys that the local store accepts: the end of a long one is replaced by a digest."""
    longest = pc.max(pc.binary_length(keys)).as_py()
    if longest is None or longest <= _MAX_KEY_BYTES:
        return keys
    short = [
        (
            key
            if len(key) <= _MAX_KEY_BYTES
            else key[: _MAX_KEY_BYTES - 32] + blake2b(key, digest_size=32).digest()
        )
        for key in keys.to_pylist()
    ]
    return pa.array(short, pa.binary())


def _with_prefix(number: int, groups: Groups, keys: pa.Array) -> pa.Array:
    """Keys behind the number of the step and their key group."""
    prefixes = np.empty((len(groups), _PREFIX_BYTES), np.uint8)
    prefixes[:, 0] = number
    prefixes[:, 1] = groups
    values = equal_length_values(keys)
    if values is None:
        return pc.binary_join_element_wise(
            as_binary(prefixes.view("V2").reshape(-1)), keys, pa.scalar(b"", pa.binary())
        )
    names = np.hstack([prefixes, values.view(np.uint8).reshape(len(values), -1)])
    return as_binary(names.view(f"V{names.shape[1]}").reshape(-1))


# The end of a task


_MAX_SHARED_BYTES = 256 << 10
"""Only small changes of several steps go into one file: it stays until none of them needs it."""


def write_states(
    txn: StoreTransaction,
    states: Mapping[str, StepState],
    files: Mapping[str, StateFiles],
    ids: Mapping[str, StateIds],
) -> tuple[dict[str, StateIds], dict[str, StateGrowth]]:
    """Make the changes of a task durable. `ids` are the state ids of each step before the batch.
    Returns the new ids, and how the state of each step has changed. The steps:

    1. Write what changed to delta files; if it is little, to one file for all steps.
    2. Fold or merge chains of files that have grown long.
    3. Write the values before the batch to the undo file of the local store.
    4. Stamp the local store with the new ids.
    """
    new_ids = {step: dict(ids[step]) for step in states}
    changes = {
        step: changed for step, state in states.items() if (changed := state.changes()) is not None
    }
    sizes = {step: row_bytes(changed.keys, changed.after) for step, changed in changes.items()}
    parents = {
        step: {group: ids[step].get(group) for group in np.unique(changed.groups).tolist()}
        for step, changed in changes.items()
    }
    written = sum(int(size.sum()) for size in sizes.values())
    names = _write_deltas(files, changes, parents, written)  # 1
    for step, changed in changes.items():
        schedule = txn.schedules.setdefault(step, FoldingSchedule())
        _add_to_schedule(schedule, changed, parents[step], sizes[step])
        new_ids[step].update(dict.fromkeys(parents[step], names[step]))
        _fold(txn, states[step].number, files[step], new_ids[step], schedule)  # 2
        _merge(files[step], new_ids[step], schedule)
    undo = None
    if changes:  # 3
        undo = txn.keep_undo(
            pa.concat_arrays([changed.stored for changed in changes.values()]),
            pa.concat_arrays([changed.before for changed in changes.values()]),
        )
    txn.stamp(new_ids, list(states), before=ids, undo=undo)  # 4
    return new_ids, {
        step: StateGrowth(len(changed), changed.new_keys, int(changed.grown_bytes.sum()))
        for step, changed in changes.items()
    }


def _write_deltas(
    files: Mapping[str, StateFiles],
    changes: Mapping[str, KeyChanges],
    parents: Mapping[str, Mapping[int, str | None]],
    size: int,
) -> dict[str, str]:
    """Write the changes of all steps, `size` bytes together. Returns the id of each step's file."""
    if len(changes) > 1 and size <= _MAX_SHARED_BYTES:
        parts = [
            StepChanges(
                step=step,
                keys=changed.keys,
                values=changed.after,
                groups=changed.groups,
                parents=parents[step],
            )
            for step, changed in changes.items()
        ]
        steps_directory = files[next(iter(changes))].directory.parent
        return dict.fromkeys(changes, write_shared(steps_directory, parts))
    return {
        step: files[step].write(changed.keys, changed.after, changed.groups, parents[step])
        for step, changed in changes.items()
    }


def _add_to_schedule(
    schedule: FoldingSchedule,
    changes: KeyChanges,
    parents: Mapping[int, str | None],
    sizes: Ints,
) -> None:
    """Add the delta that was written for some key groups to their chains."""
    written, growth = (
        np.bincount(changes.groups, weights, minlength=KEY_GROUPS).astype(np.int64)
        for weights in (sizes, changes.grown_bytes)
    )
    schedule.add_deltas(
        np.array(list(parents), np.int64),
        written,
        growth,
        np.array([parent is None for parent in parents.values()], bool),
    )
    schedule.add_credit(int(written.sum()))


def _fold(
    txn: StoreTransaction, number: int, files: StateFiles, ids: StateIds, schedule: FoldingSchedule
) -> None:
    """Write the whole state of the groups that are due for folding to one snapshot file."""
    groups = sorted(schedule.groups_to_fold())
    if not groups:
        return
    contents = []
    for group in groups:
        names, values = txn.scan(bytes([number, group]))
        keys = pc.binary_slice(pa.array(names, pa.binary()), _PREFIX_BYTES, _MAX_NAME_BYTES)
        contents.append((keys, pa.array(values, pa.binary())))
    name, sizes = _write_groups(files, groups, contents, dict.fromkeys(groups))
    for group, size in zip(groups, sizes, strict=True):
        ids[group] = name
        schedule.record_fold(group, size)


def _merge(files: StateFiles, ids: StateIds, schedule: FoldingSchedule) -> None:
    """Write the newest deltas of the groups that are due for merging to one file in their stead."""
    deltas = schedule.groups_to_merge()
    if not deltas:
        return
    cache: dict[str, StateFile] = {}
    chains = {
        group: list(files.chain(group, ids[group], limit=count, cache=cache))
        for group, count in deltas.items()
    }
    contents = [fold(chain, group, with_deletions=True) for group, chain in chains.items()]
    parents = {group: chain[-1].parents[group] for group, chain in chains.items()}
    name, sizes = _write_groups(files, list(deltas), contents, parents)
    for group, size in zip(deltas, sizes, strict=True):
        ids[group] = name
        schedule.record_merge(group, size)


def _write_groups(
    files: StateFiles,
    groups: Sequence[int],
    contents: Sequence[tuple[pa.Array, pa.Array]],
    parents: Mapping[int, str | None],
) -> tuple[str, list[int]]:
    """Write a file with the keys and values of some groups. Returns its id, and the bytes of each
    group in it.
    """
    counts = [len(keys) for keys, _ in contents]
    keys, values = (pa.concat_arrays(column) for column in zip(*contents, strict=True))
    name = files.write(keys, values, np.repeat(np.array(groups, np.uint8), counts), parents)
    return name, [int(row_bytes(*content).sum()) for content in contents]
