"""The sessions of a group that are not closed, as an entry of their own: so that a row finds those that it touches without a scan.

| entry | name | bytes |
|---|---|---|
| index | `i`, the group's key | version 1; start and end of each session, little-endian, in order |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import NewerFormat
from headrace.operators.buffers import Ints, Mask, offsets_of, runs
from headrace.operators.joins.matching import sorting
from headrace.operators.kernel import Groups, KeyedState, Times

_VERSION = 1
_NAME = pa.scalar(b"i", pa.binary())
_NOTHING = pa.scalar(b"", pa.binary())
_SESSION_BYTES = 16


@dataclass(frozen=True)
class Ranges:
    """Sessions: the group of each as its number, and its bounds."""

    keys: Ints
    starts: Times
    ends: Times

    def __len__(self) -> int:
        return len(self.keys)

    def only(self, which: Mask) -> Ranges:
        return Ranges(self.keys[which], self.starts[which], self.ends[which])

    def take(self, which: Ints) -> Ranges:
        return Ranges(self.keys[which], self.starts[which], self.ends[which])

    def and_also(self, other: Ranges) -> Ranges:
        pairs = ((self.keys, other.keys), (self.starts, other.starts), (self.ends, other.ends))
        return Ranges(*(np.concatenate(pair) for pair in pairs))


class SessionIndex:
    """The index of some groups, during one step."""

    def __init__(self, step: str, state: KeyedState, by: pa.Array, groups: Groups) -> None:
        self._step_name, self._state, self._groups = step, state, groups
        self._names = pc.binary_join_element_wise(_NAME, by.cast(pa.binary()), _NOTHING)
        self._values = state.get_array(self._names, groups)
        self.sessions = self._read()

    def _read(self) -> Ranges:
        values = self._values.drop_null()
        if not len(values):
            return Ranges(*(np.zeros(0, np.int64) for _ in range(3)))
        data, offsets = np.frombuffer(values.buffers()[2], np.uint8), offsets_of(values)
        if int(data[offsets[:-1]].max()) > _VERSION:
            raise NewerFormat(f"The state of step {self._step_name!r} was written by a newer Headrace.", fix="upgrade Headrace.")
        lengths = np.diff(offsets) - 1
        pairs = data[runs(offsets[:-1] + 1, lengths)].view("<i8").reshape(-1, 2)
        there = np.flatnonzero(self._values.is_valid().to_numpy(zero_copy_only=False))
        return Ranges(np.repeat(there, lengths // _SESSION_BYTES), pairs[:, 0].copy(), pairs[:, 1].copy())

    def write(self, sessions: Ranges) -> None:
        """What the groups have now; those that have as before are left alone."""
        order = sorting(sessions.keys, sessions.starts)
        pairs = np.stack([sessions.starts[order], sessions.ends[order]], axis=1).astype("<i8")
        counts = np.bincount(sessions.keys, minlength=len(self._names))
        sizes = np.where(counts > 0, 1 + counts * _SESSION_BYTES, 0)
        offsets = np.append(0, np.cumsum(sizes))
        data = np.full(int(offsets[-1]), _VERSION, np.uint8)
        data[runs(offsets[:-1][counts > 0] + 1, counts[counts > 0] * _SESSION_BYTES)] = pairs.view(np.uint8).reshape(-1)
        fresh = pa.BinaryArray.from_buffers(pa.binary(), len(sizes), [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)])
        fresh = pc.if_else(pa.array(counts > 0), fresh, pa.scalar(None, pa.binary()))
        changed = pc.not_equal(pc.fill_null(fresh, b""), pc.fill_null(self._values, b""))
        which = changed.to_numpy(zero_copy_only=False)
        self._state.put_array(self._names.filter(changed), fresh.filter(changed), self._groups[which])
