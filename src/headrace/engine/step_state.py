"""What a kernel sees of its state, and what of it changed: over the local store of its shard."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import pyarrow as pa

from headrace.engine.local_store import StoreTransaction
from headrace.engine.state_files import StateFiles, StateIds
from headrace.operators.kernel import Groups
from headrace.operators.keys import key_groups

_LONGEST_KEY = 400
_FOLD_BYTES = 64 << 10
_MOST_FOLDS_A_BATCH = 8
_MOST_FILES = 500


class StepState:
    """The state of one step in one shard during one batch. `number` tells steps of a stage apart, from 1 on."""

    def __init__(self, store: StoreTransaction, number: int) -> None:
        self.store, self.number = store, number
        self._before: dict[bytes, bytes | None] = {}
        self._after: dict[bytes, bytes | None] = {}
        self._got: tuple[Sequence[bytes], list[bytes], list[bytes | None]] | None = None  # keys as asked for and as stored, and their values

    def get(self, keys: Sequence[bytes], groups: Groups | None = None) -> list[bytes | None]:
        stored = self._stored(keys, groups)
        values = self.store.get(stored)
        self._got = keys, stored, values
        return values

    def put(self, keys: Sequence[bytes], values: Sequence[bytes | None], groups: Groups | None = None) -> None:
        if self._got is not None and self._got[0] is keys:  # a kernel puts what it has just got: no need to look again
            _, stored, before = self._got
        else:
            stored = self._stored(keys, groups)
            before = self.store.get(stored)
        self._got = None
        known = dict(zip(stored, before, strict=True))
        self._before = {**known, **self._before} if self._before else known
        self._after.update(zip(stored, values, strict=True))
        self.store.put(stored, values)

    def scan(self, low: bytes, high: bytes) -> tuple[list[bytes], list[bytes], Groups]:
        found = [(group, key, value) for group in self.store.store.groups for key, value in self.store.between(bytes([self.number, group]), low, high)]
        groups = np.fromiter((group for group, _, _ in found), np.uint8, len(found))
        return [key for _, key, _ in found], [value for _, _, value in found], groups

    def first(self, low: bytes, high: bytes) -> bytes | None:
        firsts = (next(self.store.between(bytes([self.number, group]), low, high), None) for group in self.store.store.groups)
        return min((found[0] for found in firsts if found is not None), default=None)

    def _stored(self, keys: Sequence[bytes], given: Groups | None = None) -> list[bytes]:
        """Keys as the store has them: step, key group, key. The store takes no long ones; those are told apart by a digest."""
        groups = (key_groups(pa.array(keys, pa.binary())) if given is None else given).tolist()
        prefixes = [bytes([self.number, group]) for group in range(256)]
        return [
            prefixes[group] + (key if len(key) <= _LONGEST_KEY else key[: _LONGEST_KEY - 32] + blake2b(key, digest_size=32).digest())
            for group, key in zip(groups, keys, strict=True)
        ]

    @property
    def undo(self) -> dict[bytes, bytes | None]:
        return self._before

    def write(self, files: StateFiles, ids: StateIds, groups: Sequence[int], sizes: dict[str, list[int]]) -> StateIds:
        """Store what changed as a delta, fold the groups whose deltas outgrew their snapshots; returns the new ids."""
        if not self._after:
            return dict(ids)
        keys = list(self._after)
        touched = np.frombuffer(b"".join([key[1:2] for key in keys]), np.uint8)
        present = {int(group) for group in np.unique(touched)}
        stored_keys = pa.array([key[2:] for key in keys], pa.binary())
        values = pa.array(list(self._after.values()), pa.binary())
        name, size = files.write(stored_keys, values, touched, {group: ids.get(group) for group in present})
        fresh = {**ids, **dict.fromkeys(present, name)}
        share = size // len(present)
        for group in present:
            delta, snapshot, count = sizes.get(str(group), [0, 0, 0])
            sizes[str(group)] = [delta + share, snapshot, count + 1]
        return {**fresh, **self._fold(files, groups, sizes)}

    def _fold(self, files: StateFiles, groups: Sequence[int], sizes: dict[str, list[int]]) -> StateIds:
        """A snapshot for the groups that need one most; few at a time, so that cost follows the change."""
        due = [(delta, group) for group in groups if (delta := _due(sizes.get(str(group), [0, 0, 0])))]
        folded: StateIds = {}
        for _, group in sorted(due, reverse=True)[:_MOST_FOLDS_A_BATCH]:
            content = list(self.store.scan(bytes([self.number, group])))
            keys = pa.array([key[2:] for key, _ in content], pa.binary())
            values = pa.array([value for _, value in content], pa.binary())
            folded[group], size = files.write(keys, values, np.full(len(content), group, np.uint8), {group: None})
            sizes[str(group)] = [0, size, 0]
        return folded


def _due(sizes: list[int]) -> int:
    """How many bytes of deltas a fold would save; 0 if it is not due."""
    delta, snapshot, count = sizes
    return delta if delta > max(snapshot, _FOLD_BYTES) or count > _MOST_FILES else 0
