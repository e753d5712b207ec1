"""States of aggregates that can be put together exactly, many of them side by side: lifted from
rows, read from a store, merged, and in the end shown and stored.

For kernels whose groups come together and are made of others: sessions, sliding windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.segments import Segments
from headrace.operators.aggregates.accumulator import Columns, Monoid, reduce_segments
from headrace.operators.aggregates.aggregation import Aggregation
from headrace.operators.aggregates.sums import CountRows
from headrace.operators.changelog import differs

States = list[Columns]
"""For each accumulator, the number of rows first, its part of many states."""


class Merging:
    """What can be done with states of one step's aggregates. Between reading and storing states are
    in an opened form: store all that are to stay at once, at last.
    """

    def __init__(self, aggregation: Aggregation) -> None:
        self._aggregation = aggregation
        self._monoids: list[Monoid] = [
            CountRows(),
            *(each for each in aggregation.layout.accumulators if isinstance(each, Monoid)),
        ]

    def lifted(self, segments: Segments) -> States:
        """The state of each segment's rows."""
        return [each.lift(segments) for each in self._monoids]

    def opened(self, values: pa.Array) -> States:
        """States as they were stored; null is that of no rows."""
        rows, parts = self._aggregation.layout.unpacked_array(values)
        return [
            (rows,),
            *(each.opened(*part) for each, part in zip(self._monoids[1:], parts, strict=True)),
        ]

    def merge(self, left: States, right: States) -> States:
        """Pair by pair."""
        return [
            each.merge(one, other)
            for each, one, other in zip(self._monoids, left, right, strict=True)
        ]

    def reduced(self, states: States, sets: Ints) -> States:
        """One state for each set, of neighbours with the same number."""
        first = np.flatnonzero(np.append(True, sets[1:] != sets[:-1])) if len(sets) else sets
        if (
            found := self.over_ranges(states, first, np.append(first[1:], len(sets))[: len(first)])
        ) is not None:
            return found
        return [
            reduce_segments(each.merge, columns, sets)
            for each, columns in zip(self._monoids, states, strict=True)
        ]

    def over_ranges(self, states: States, first: Ints, stop: Ints) -> States | None:
        """What ranges of neighbours amount to, if that can be had by taking away for all
        aggregates; None if not.
        """
        found: States = []
        for each, columns in zip(self._monoids, states, strict=True):
            if (sums := each.over_ranges(columns, first, stop)) is None:
                return None
            found.append(sums)
        return found

    def prefixes(self, states: States, sets: Ints) -> States:
        """For each state the merger of it and all before it in its set; sets lie one behind the
        other. Takes two merges a state.
        """
        begins = np.ones(len(sets), np.bool_)
        begins[1:] = sets[1:] != sets[:-1]
        if begins.all():
            return states
        position = np.arange(len(sets))
        within = position - np.maximum.accumulate(np.where(begins, position, 0))
        left = np.flatnonzero(within % 2 == 0)
        paired = np.append(within % 2 == 1, False)[left + 1]
        pairs = pick(states, left)
        place(pairs, paired, self.merge(pick(pairs, paired), pick(states, left[paired] + 1)))
        pairs = self.prefixes(pairs, sets[left])
        done = [tuple(np.empty_like(column) for column in columns) for columns in states]
        place(done, left[paired] + 1, pick(pairs, paired))
        first = within[left] == 0
        place(done, left[first], pick(states, left[first]))
        others = np.flatnonzero(~first)
        place(done, left[others], self.merge(pick(pairs, others - 1), pick(states, left[others])))
        return done

    def suffixes(self, states: States, sets: Ints) -> States:
        """For each state the merger of it and all behind it in its set."""
        return _turned(self.prefixes(_turned(states), sets[::-1]))

    def results(self, states: States) -> Shows:
        """What states amount to."""
        counted = (pa.array(states[0][0], pa.int64()), None)
        of_others = iter(
            [
                each.result(columns)
                for each, columns in zip(self._monoids[1:], states[1:], strict=True)
            ]
        )
        shows = [
            counted if type(each) is CountRows else next(of_others)
            for each in self._aggregation.accumulators
        ]
        return Shows([array for array, _ in shows], [lost for _, lost in shows])

    def stored(self, states: States) -> pa.Array:
        """States as they are stored."""
        parts = [
            each.closed(columns)
            for each, columns in zip(self._monoids[1:], states[1:], strict=True)
        ]
        return self._aggregation.layout.packed_array(states[0][0], parts)


@dataclass(frozen=True)
class Shows:
    """A result of each state, for each aggregate; and for which states it could not be told."""

    arrays: list[pa.Array]
    lost: list[Mask | None]

    def differs(self, before: Ints, after: Ints) -> Mask:
        """Which of these pairs of states have different results."""
        unlike = np.zeros(len(before), np.bool_)
        left, right = pa.array(before), pa.array(after)
        for each in self.arrays:
            unlike |= differs(each.take(left), each.take(right))
        return unlike

    def results(self, which: Ints) -> list[pa.Array]:
        return [each.take(pa.array(which)) for each in self.arrays]

    def count_lost(self, aggregation: Aggregation, shown: Ints) -> None:
        for (name, _), lost in zip(aggregation.aggregates, self.lost, strict=True):
            if lost is not None and (count := int(np.count_nonzero(lost[shown]))):
                aggregation.lost[name] = aggregation.lost.get(name, 0) + count


class Pool:
    """States by number, more and more of them."""

    def __init__(self, first: States) -> None:
        self._columns = first
        self._count = len(first[0][0])

    def __len__(self) -> int:
        return self._count

    def pick(self, which: Ints) -> States:
        return pick(self._columns, which)

    def add(self, states: States) -> Ints:
        """More states; gives their numbers."""
        fresh = self._count + np.arange(len(states[0][0]))
        self._count += len(fresh)
        if not len(fresh):
            return fresh
        if self._count > len(self._columns[0][0]):
            self._columns = [
                tuple(_grown(column, 2 * self._count) for column in columns)
                for columns in self._columns
            ]
        place(self._columns, fresh, states)
        return fresh


def _grown(
    column: np.ndarray[tuple[int, ...], np.dtype[np.generic]], room: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    larger = np.empty((room, *column.shape[1:]), column.dtype)
    larger[: len(column)] = column
    return larger


def together(parts: Sequence[States]) -> States:
    """States one behind the other."""
    if len(parts) == 1:
        return parts[0]
    return [
        tuple(map(np.concatenate, zip(*columns, strict=True)))
        for columns in zip(*parts, strict=True)
    ]


def pick(states: States, which: Ints | Mask) -> States:
    return [tuple(column[which] for column in columns) for columns in states]


def place(states: States, where: Ints | Mask, values: States) -> None:
    for mine, theirs in zip(states, values, strict=True):
        for column, value in zip(mine, theirs, strict=True):
            column[where] = value


def _turned(states: States) -> States:
    return [tuple(column[::-1] for column in columns) for columns in states]
