"""A kernel's state as a dictionary: for tests of kernels, ours and users'. Remembers which keys changed, as a real host must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from headrace.operators.kernel import Groups
from headrace.operators.keys import GROUPS, key_groups


class MemoryState:
    """State in memory. `changed` has every key put since the last `take_changes`, with the value it now has (None: deleted)."""

    def __init__(self, values: Mapping[bytes, bytes] | None = None, at_hand: Sequence[int] = range(GROUPS)) -> None:
        self.at_hand = at_hand
        self.values: dict[bytes, bytes] = dict(values or {})
        self.groups: dict[bytes, int] = {}  # of keys that were put under a group of another's
        self.changed: dict[bytes, bytes | None] = {}
        self.memo: bytes | None = None

    def recall(self) -> bytes | None:
        return self.memo

    def remember(self, content: bytes) -> None:
        self.memo = content

    def get(self, keys: Sequence[bytes], groups: Groups | None = None) -> list[bytes | None]:  # noqa: ARG002
        return list(map(self.values.get, keys))

    def put(self, keys: Sequence[bytes], values: Sequence[bytes | None], groups: Groups | None = None) -> None:
        changes = dict(zip(keys, values, strict=True))
        if groups is not None:
            self.groups.update(zip(keys, groups.tolist(), strict=True))
        self.changed.update(changes)
        self.values.update(changes)  # type: ignore[arg-type]  # deletions are taken out below
        if None in values:
            for key in [key for key, value in changes.items() if value is None]:
                self.values.pop(key)

    def get_array(self, keys: pa.Array, groups: Groups | None = None) -> pa.Array:
        return pa.array(self.get(keys.to_pylist(), groups), pa.binary())

    def put_array(self, keys: pa.Array, values: pa.Array, groups: Groups | None = None) -> None:
        self.put(keys.to_pylist(), values.to_pylist(), groups)

    def scan(self, low: bytes, high: bytes) -> tuple[list[bytes], list[bytes], Groups]:
        found = sorted(key for key in self.values if low <= key < high)
        own = key_groups(pa.array(found, pa.binary())).tolist()
        groups = [self.groups.get(key, group) for key, group in zip(found, own, strict=True)]
        return found, [self.values[key] for key in found], np.array(groups, np.uint8)

    def first(self, low: bytes, high: bytes) -> bytes | None:
        return min((key for key in self.values if low <= key < high), default=None)

    def take_changes(self) -> dict[bytes, bytes | None]:
        """What changed since the last time, for a host that writes it down."""
        changes, self.changed = self.changed, {}
        return changes

    def copy(self) -> MemoryState:
        fresh = MemoryState(self.values, self.at_hand)
        fresh.groups, fresh.memo = dict(self.groups), self.memo
        return fresh
