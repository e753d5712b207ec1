"""States of aggregates that can be put together exactly, many of them side by side: lifted from rows, read from a store, merged, and in the end shown and stored.

For kernels whose groups come together and are made of others: sessions, sliding windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headrace.operators.accumulators.accumulator import Columns, Monoid, reduce_segments
from headrace.operators.accumulators.counts import CountRows
from headrace.operators.aggregation import Aggregation
from headrace.operators.buffers import Ints, Mask
from headrace.operators.changelog import differs
from headrace.operators.segments import Segments

States = list[Columns]
"""For each accumulator, the number of rows first, its part of many states."""


class Merging:
    """What can be done with states of one step's aggregates. Between reading and storing states are in an opened form: store all that are to stay at once, at last."""

    def __init__(self, aggregation: Aggregation) -> None:
        self._aggregation = aggregation
        self._monoids: list[Monoid] = [CountRows(), *(each for each in aggregation.layout.accumulators if isinstance(each, Monoid))]

    def lifted(self, segments: Segments) -> States:
        """The state of each segment's rows."""
        return [each.lift(segments) for each in self._monoids]

    def opened(self, values: pa.Array) -> States:
        """States as they were stored; null is that of no rows."""
        rows, parts = self._aggregation.layout.unpacked_array(values)
        return [(rows,), *(each.opened(*part) for each, part in zip(self._monoids[1:], parts, strict=True))]

    def merge(self, left: States, right: States) -> States:
        """Pair by pair."""
        return [each.merge(one, other) for each, one, other in zip(self._monoids, left, right, strict=True)]

    def reduced(self, states: States, sets: Ints) -> States:
        """One state for each set, of neighbours with the same number."""
        return [reduce_segments(each.merge, columns, sets) for each, columns in zip(self._monoids, states, strict=True)]

    def results(self, states: States) -> Shows:
        """What states amount to."""
        counted = (pa.array(states[0][0], pa.int64()), None)
        of_others = iter([each.result(columns) for each, columns in zip(self._monoids[1:], states[1:], strict=True)])
        shows = [counted if type(each) is CountRows else next(of_others) for each in self._aggregation.accumulators]
        return Shows([array for array, _ in shows], [lost for _, lost in shows])

    def stored(self, states: States) -> pa.Array:
        """States as they are stored."""
        parts = [each.closed(columns) for each, columns in zip(self._monoids[1:], states[1:], strict=True)]
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
        return [tuple(column[which] for column in columns) for columns in self._columns]

    def add(self, states: States) -> Ints:
        """More states; gives their numbers."""
        fresh = self._count + np.arange(len(states[0][0]))
        self._count += len(fresh)
        if self._count > len(self._columns[0][0]):
            self._columns = [tuple(_grown(column, 2 * self._count) for column in columns) for columns in self._columns]
        for mine, theirs in zip(self._columns, states, strict=True):
            for column, values in zip(mine, theirs, strict=True):
                column[fresh] = values
        return fresh


def _grown(column: np.ndarray[tuple[int, ...], np.dtype[np.generic]], room: int) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    larger = np.empty((room, *column.shape[1:]), column.dtype)
    larger[: len(column)] = column
    return larger


def concatenated(parts: Sequence[States]) -> States:
    return [tuple(np.concatenate(columns) for columns in zip(*each, strict=True)) for each in zip(*parts, strict=True)]
