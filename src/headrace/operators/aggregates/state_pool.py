"""Pools of mergeable aggregate states, for sessions and sliding windows.

States are lifted from rows or read from the store, merged with each other, and at the end turned
into results and stored. A `StatePool` gives each state of a call a number, a `StateMerger` merges
states:

    pool: 0 -> (rows 2, sum 5), 1 -> (rows 1, sum 3), 2 -> (rows 4, sum 9)
    reduce(take([0, 1, 2]), sets=[0, 0, 1]) -> (rows 3, sum 8), (rows 4, sum 9)
    prefixes(take([0, 1, 2]), sets=[0, 0, 0]) -> sums 5, 8, 17
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.segments import Segments
from headrace.operators.aggregates.accumulator import Columns, Monoid, reduce_segments
from headrace.operators.aggregates.aggregation import AggregateSet
from headrace.operators.aggregates.sums import CountRows
from headrace.operators.changelog import differs

States = list[Columns]
"""Many states: for each accumulator its columns, the row count first."""


class StateMerger:
    """Merges the states of one step's aggregates.

    Between `open_states` and `close_states`, states are in an open form that belongs to this call:
    close all that are to be stored at once, at the end.
    """

    def __init__(self, aggregation: AggregateSet) -> None:
        self._aggregation = aggregation
        self._monoids: list[Monoid] = [
            CountRows(),
            *(each for each in aggregation.layout.accumulators if isinstance(each, Monoid)),
        ]

    def lift(self, segments: Segments) -> States:
        """The state of each segment's rows."""
        return [each.lift(segments) for each in self._monoids]

    def open_states(self, values: pa.Array) -> States:
        """Stored states in open form; null stands for no rows."""
        rows, parts = self._aggregation.layout.unpack_array(values)
        return [
            (rows,),
            *(each.open_states(*part) for each, part in zip(self._monoids[1:], parts, strict=True)),
        ]

    def merge(self, left: States, right: States) -> States:
        """Both sides' states merged, pair by pair."""
        return [
            monoid.merge(left_columns, right_columns)
            for monoid, left_columns, right_columns in zip(self._monoids, left, right, strict=True)
        ]

    def reduce(self, states: States, sets: Ints) -> States:
        """One state per set of adjacent states with the same number."""
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
        """The merged states of the ranges [first, stop), by subtraction; None if an aggregate
        cannot subtract.
        """
        found: States = []
        for each, columns in zip(self._monoids, states, strict=True):
            if (sums := each.over_ranges(columns, first, stop)) is None:
                return None
            found.append(sums)
        return found

    def prefixes(self, states: States, sets: Ints) -> States:
        """For each state, the merge of it and all before it in its set. Sets are adjacent. Takes
        two merges per state.
        """
        begins = np.ones(len(sets), np.bool_)
        begins[1:] = sets[1:] != sets[:-1]
        if begins.all():
            return states
        position = np.arange(len(sets))
        within = position - np.maximum.accumulate(np.where(begins, position, 0))
        left = np.flatnonzero(within % 2 == 0)
        paired = np.append(within % 2 == 1, False)[left + 1]
        pairs = take_states(states, left)
        put_states(
            pairs,
            paired,
            self.merge(take_states(pairs, paired), take_states(states, left[paired] + 1)),
        )
        pairs = self.prefixes(pairs, sets[left])
        done = [tuple(np.empty_like(column) for column in columns) for columns in states]
        put_states(done, left[paired] + 1, take_states(pairs, paired))
        first = within[left] == 0
        put_states(done, left[first], take_states(states, left[first]))
        others = np.flatnonzero(~first)
        put_states(
            done,
            left[others],
            self.merge(take_states(pairs, others - 1), take_states(states, left[others])),
        )
        return done

    def suffixes(self, states: States, sets: Ints) -> States:
        """For each state, the merge of it and all after it in its set. Sets are adjacent."""
        return _reversed(self.prefixes(_reversed(states), sets[::-1]))

    def results(self, states: States) -> StateResults:
        """The results of states."""
        counted = (pa.array(states[0][0], pa.int64()), None)
        of_others = iter(
            [
                each.result(columns)
                for each, columns in zip(self._monoids[1:], states[1:], strict=True)
            ]
        )
        outcomes = [
            counted if type(each) is CountRows else next(of_others)
            for each in self._aggregation.accumulators
        ]
        return StateResults([array for array, _ in outcomes], [unknown for _, unknown in outcomes])

    def close_states(self, states: States) -> pa.Array:
        """States as they are stored."""
        parts = [
            each.close_states(columns)
            for each, columns in zip(self._monoids[1:], states[1:], strict=True)
        ]
        return self._aggregation.layout.pack_array(states[0][0], parts)


@dataclass(frozen=True)
class StateResults:
    """The results of states, one column per aggregate, and for which states they are unknown."""

    arrays: list[pa.Array]
    unknown: list[Mask | None]

    def differs(self, before: Ints, after: Ints) -> Mask:
        """Which pairs of states have different results."""
        unlike = np.zeros(len(before), np.bool_)
        left, right = pa.array(before), pa.array(after)
        for each in self.arrays:
            unlike |= differs(each.take(left), each.take(right))
        return unlike

    def results(self, which: Ints) -> list[pa.Array]:
        """The results of some states, one column per aggregate."""
        return [each.take(pa.array(which)) for each in self.arrays]

    def count_unknown(self, aggregation: AggregateSet, shown: Ints) -> None:
        """Count the unknown results among the emitted versions."""
        for (name, _), unknown in zip(aggregation.aggregates, self.unknown, strict=True):
            if unknown is not None and (count := int(np.count_nonzero(unknown[shown]))):
                aggregation.unknown_results[name] = aggregation.unknown_results.get(name, 0) + count


class StatePool:
    """States by number. States are added during a call, never removed."""

    def __init__(self, first: States) -> None:
        self._columns = first
        self._count = len(first[0][0])

    def __len__(self) -> int:
        return self._count

    def take(self, which: Ints) -> States:
        """The states with these numbers."""
        return take_states(self._columns, which)

    def add(self, states: States) -> Ints:
        """Add states; returns their numbers."""
        fresh = self._count + np.arange(len(states[0][0]))
        self._count += len(fresh)
        if not len(fresh):
            return fresh
        if self._count > len(self._columns[0][0]):
            self._columns = [
                tuple(_grown(column, 2 * self._count) for column in columns)
                for columns in self._columns
            ]
        put_states(self._columns, fresh, states)
        return fresh


def _grown(
    column: np.ndarray[tuple[int, ...], np.dtype[np.generic]], room: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    larger = np.empty((room, *column.shape[1:]), column.dtype)
    larger[: len(column)] = column
    return larger


def concat_states(parts: Sequence[States]) -> States:
    """States one after the other."""
    if len(parts) == 1:
        return parts[0]
    return [
        tuple(map(np.concatenate, zip(*columns, strict=True)))
        for columns in zip(*parts, strict=True)
    ]


def take_states(states: States, which: Ints | Mask) -> States:
    """The states at some positions, or those that a mask selects."""
    return [tuple(column[which] for column in columns) for columns in states]


def put_states(states: States, where: Ints | Mask, values: States) -> None:
    """Overwrite the states at some positions."""
    for mine, theirs in zip(states, values, strict=True):
        for column, value in zip(mine, theirs, strict=True):
            column[where] = value


def _reversed(states: States) -> States:
    return [tuple(column[::-1] for column in columns) for columns in states]
