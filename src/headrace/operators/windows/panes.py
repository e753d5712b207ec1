"""The points of sliding windows in the state, in panes: a sixteenth of a window each. A group has a head, which knows of each pane what all of its points amount to; so a
window is computed from the panes at its two ends and from the heads of those between.

| entry | name | bytes |
|---|---|---|
| head | `h`, the group's key | as `records` has them, one for each pane: number, time of its last point, time of its first point that was not told yet, state |
| pane | `q`, number (big-endian in order), the group's key | as `records` has them, one for each point: time, state |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.operators.buffers import Ints, Mask
from headrace.operators.joins.matching import begins, merge_order, sorting
from headrace.operators.kernel import Groups, KeyedState, Times
from headrace.operators.keys import whole
from headrace.operators.state_pool import Merging, Pool
from headrace.operators.windows.history import any_within
from headrace.operators.windows.kept_rows import TIME
from headrace.operators.windows.records import STATE, RecordStore

PANES = 16
NEVER = np.iinfo(np.int64).max
_LAST, _WAITS = "last", "waits"
_HEAD, _PANE = pa.scalar(b"h", pa.binary()), b"q"
_NOTHING = pa.scalar(b"", pa.binary())
_SIGN = np.uint64(1 << 63)


@dataclass(frozen=True)
class Points:
    """Points of groups: the number of each one's group, its time, the place of the tick that it came with (-1: stored), and the number of its state."""

    keys: Ints
    times: Times
    places: Ints
    states: Ints

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, which: Ints | Mask) -> Points:
        return Points(self.keys[which], self.times[which], self.places[which], self.states[which])

    def and_also(self, other: Points) -> Points:
        pairs = ((self.keys, other.keys), (self.times, other.times), (self.places, other.places), (self.states, other.states))
        return Points(*(np.concatenate(pair) for pair in pairs))

    def merged_with(self, other: Points) -> Points:
        """Both, in order; each is."""
        return self.and_also(other).take(merge_order((self.keys, self.times, self.places), (other.keys, other.times, other.places)))

    def in_order(self) -> Points:
        """By group, time and place."""
        return self.take(sorting(self.keys, self.times, self.places))


@dataclass(frozen=True)
class Heads:
    """Panes of groups, in order of group and number: the time of each one's last point and of its first that waits, and the number of its state."""

    keys: Ints
    panes: Ints
    last: Times
    waits: Times
    states: Ints

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, which: Ints | Mask) -> Heads:
        return Heads(self.keys[which], self.panes[which], self.last[which], self.waits[which], self.states[which])

    def have(self, keys: Ints, panes: Ints) -> Mask:
        """Which of these panes of groups are among them."""
        return any_within(self.keys, self.panes, keys, panes, panes + 1)

    def and_also(self, other: Heads) -> Heads:
        names = ("keys", "panes", "last", "waits", "states")
        both = Heads(*(np.concatenate([getattr(self, name), getattr(other, name)]) for name in names))
        return both.take(sorting(both.keys, both.panes))

    @staticmethod
    def of(points: Points, panes: Ints, told_until: int | None, merging: Merging, pool: Pool) -> Heads:
        """What points, in order of group and time, amount to in each pane. Those from `told_until` on wait; None: none does."""
        new = begins(points.keys, panes)
        first = np.flatnonzero(new)
        states = pool.add(merging.reduced(pool.pick(points.states), np.cumsum(new)))
        last = points.times[np.append(first[1:], len(points))[: len(first)] - 1]
        waits = np.full(len(points), NEVER) if told_until is None else np.where(points.times >= told_until, points.times, NEVER)
        return Heads(points.keys[first], panes[first], last, np.minimum.reduceat(waits, first) if len(first) else last, states)


class PaneStore:
    """Reads and writes the heads and panes of some groups, during one step."""

    def __init__(self, step: str, by: pa.Array, groups: Groups, states: np.dtype[Any]) -> None:
        self._by, self._groups = by.cast(pa.binary()), groups
        self._heads = RecordStore(step, [_LAST, _WAITS], states)
        self._panes = RecordStore(step, [], states)

    def read_heads(self, state: KeyedState, merging: Merging) -> tuple[Heads, Pool]:
        counts, rows = self._heads.read(state, self._head_names(), self._groups)
        pool = Pool(merging.opened(whole(rows.column(STATE))))
        panes, last, waits = (whole(rows.column(name)).to_numpy() for name in (TIME, _LAST, _WAITS))
        return Heads(np.repeat(np.arange(len(counts)), counts), panes, last, waits, np.arange(len(panes))), pool

    def read_points(self, state: KeyedState, heads: Heads, merging: Merging, pool: Pool) -> Points:
        """The points of some panes."""
        counts, rows = self._panes.read(state, self._pane_names(heads.keys, heads.panes), self._groups[heads.keys])
        states = pool.add(merging.opened(whole(rows.column(STATE))))
        keys = np.repeat(heads.keys, counts)
        return Points(keys, whole(rows.column(TIME)).to_numpy(), np.full(len(keys), -1), states)

    def write(self, state: KeyedState, heads: Heads, gone: Heads, points: Points, panes: Ints, stored: tuple[pa.Array, pa.Array]) -> None:
        """All panes of the groups; those of them whose points changed, in order of group and time; those that are gone. `stored` are the states of heads and points."""
        rows = pa.table({TIME: pa.array(heads.panes), _LAST: pa.array(heads.last), _WAITS: pa.array(heads.waits), STATE: stored[0]})
        self._heads.write(state, self._head_names(), self._groups, np.bincount(heads.keys, minlength=len(self._by)), rows)
        first = np.flatnonzero(begins(points.keys, panes))
        keys, counts = points.keys[first], np.diff(first, append=len(points))
        rows = pa.table({TIME: pa.array(points.times), STATE: stored[1]})
        self._panes.write(state, self._pane_names(keys, panes[first]), self._groups[keys], counts, rows)
        state.put_array(self._pane_names(gone.keys, gone.panes), pa.nulls(len(gone), pa.binary()), self._groups[gone.keys])

    def _head_names(self) -> pa.Array:
        return pc.binary_join_element_wise(_HEAD, self._by, _NOTHING)

    def _pane_names(self, keys: Ints, panes: Ints) -> pa.Array:
        heads = np.empty((len(keys), 9), np.uint8)
        heads[:, 0] = _PANE[0]
        heads[:, 1:] = (panes.view(np.uint64) ^ _SIGN).astype(">u8").view(np.uint8).reshape(-1, 8)
        numbers = pa.FixedSizeBinaryArray.from_buffers(pa.binary(9), len(keys), [None, pa.py_buffer(heads)]).cast(pa.binary())
        return pc.binary_join_element_wise(numbers, self._by.take(pa.array(keys)), _NOTHING)
