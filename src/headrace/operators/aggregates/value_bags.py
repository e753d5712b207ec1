"""Aggregates of the distinct values of a group: `count_distinct`, `median` and `collect_set`.

A group keeps a bag: its distinct values, each with how many rows have it. `count_distinct(v)` with
at most two values per group, over one group of a table:

    changes in                state after                        result
    tick 1: insert v=3, v=5   {3: 1, 5: 1}                       2
    tick 2: insert v=4        {3: 1, 5: 1}, 1 row left out       null (unknown)
    tick 3: delete v=3        {5: 1}, 1 row left out             null (unknown)
    tick 4: delete v=4        {5: 1}                             1

Above the limit of values, the values that came last are left out, and their rows are counted. While
rows are left out, the result is unknown and no further value is kept: a row whose value is not kept
is one of those left out, so its retraction is recognized. Over a stream, the result stays unknown.
With `when_full="stop"` the query stops instead.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask, expand_ranges, offsets_of
from headrace.columnar.keys import canonicalize, encode_keys
from headrace.columnar.segments import Segments
from headrace.errors import BugError
from headrace.operators.aggregates.accumulator import (
    AccumulatorOutcome,
    Bags,
    TooManyValues,
    double_array,
    doubles,
    index_in_slot,
    lists,
)
from headrace.operators.aggregates.retractable import Events, Multiset, events_of, merge_events


class ValueBag(Multiset):
    """The base: the distinct values of each group and their numbers of rows, up to a limit."""

    def __init__(
        self, column: str, type: pa.DataType, *, max_values: int, stop_when_full: bool
    ) -> None:
        super().__init__(column, type, max_values=max_values, stop_when_full=stop_when_full)
        self.state_type = pa.struct(
            [
                pa.field("left_out", pa.int64()),
                pa.field("values", pa.list_(type)),
                pa.field("counts", pa.list_(pa.int64())),
            ]
        )

    def _read(self, column: pa.Array) -> pa.Array:
        """The values as keys have them: with one zero and one NaN."""
        return canonicalize(column)

    @abstractmethod
    def _answer(self, bags: Bags, keys: Ints) -> tuple[Ints, ...]:
        """What the results of some groups are made of: for each group a number, and then columns of
        as many entries as these numbers add up to.
        """

    @abstractmethod
    def _results(self, answers: tuple[Ints, ...], values: pa.Array, unknown: Mask) -> pa.Array:
        """The results from the answers of all versions; null where they are unknown."""

    def advance_values(
        self, there: Mask, stored: pa.Array, segments: Segments
    ) -> AccumulatorOutcome:
        (of_stored,), of_rows, rows, values = self._code_values(
            [stored.field(1).flatten()], segments
        )
        lengths, left_out = np.zeros(len(there), np.int64), np.zeros(len(there), np.int64)
        lengths[there] = np.diff(offsets_of(stored.field(1)))
        left_out[there] = stored.field(0).to_numpy()
        before = left_out.copy()
        bags = Bags(lengths, of_stored, stored.field(2).flatten().to_numpy())
        events = events_of(of_rows, rows, segments)
        unknown = np.zeros(segments.versions, np.bool_)
        unknown[segments.initial_versions] = left_out > 0
        answers = [self._answer(bags, np.arange(len(there)))]
        versions = [segments.initial_versions]
        for turn in segments.rounds():
            keys = segments.key_of[turn]
            self._apply_round(bags, keys, left_out, events, turn)
            unknown[segments.after[turn]] = left_out[keys] > 0
            answers.append(self._answer(bags, keys))
            versions.append(segments.after[turn])
        results = self._results(_in_order(np.concatenate(versions), answers), values, unknown)
        return self._pack_outcome(results, unknown, bags, left_out, before, values)

    def _apply_round(
        self, bags: Bags, keys: Ints, left_out: Ints, events: Events, turn: Ints
    ) -> None:
        """Apply one segment of each of some groups."""
        slots, codes, before, net, arrival = merge_events(bags.of(keys), events.of(turn))
        # A value that is not kept, in a group that leaves out rows: of one of those rows.
        is_out = (before == 0) & (left_out[keys][slots] > 0)
        # Of the new values of the other groups, those that came first are kept.
        counts = np.where(is_out, 0, before + net)
        is_new = ~is_out & (before == 0) & (counts > 0)
        kept = np.flatnonzero(counts > 0)
        order = kept[np.lexsort((arrival[kept], is_new[kept], slots[kept]))]
        is_over = np.zeros(len(slots), np.bool_)
        is_over[order] = index_in_slot(slots[order]) >= self.max_values
        is_over &= is_new
        if is_over.any() and self.stop_when_full:
            raise TooManyValues(int(keys[slots[is_over][0]]), self.max_values)
        moves_out = is_out | is_over
        left_out[keys] += np.bincount(slots[moves_out], net[moves_out], minlength=len(keys)).astype(
            np.int64
        )
        if (counts < 0).any() or (left_out[keys] < 0).any():
            raise BugError(
                f"A value of the column {self.column!r} is retracted that was never added."
            )
        stays = (counts > 0) & ~is_over
        bags.replace(keys, slots[stays], codes[stays], counts[stays])

    def _pack_outcome(
        self,
        results: pa.Array,
        unknown: Mask,
        bags: Bags,
        left_out: Ints,
        before: Ints,
        values: pa.Array,
    ) -> AccumulatorOutcome:
        there = (bags.lengths > 0) | (left_out > 0)
        which = np.flatnonzero(there)
        _, codes, counts = bags.of(which)
        parts = [
            pa.array(left_out[which]),
            lists(bags.lengths[which], values.take(pa.array(codes))),
            lists(bags.lengths[which], pa.array(counts)),
        ]
        return self.pack_values(
            results,
            there,
            pa.StructArray.from_arrays(parts, fields=list(self.state_type)),
            unknown=unknown if unknown.any() else None,
            left_out=int((left_out - before).sum()),
        )


def _in_order(versions: Ints, answers: Sequence[tuple[Ints, ...]]) -> tuple[Ints, ...]:
    """Answers that were computed in rounds, in the order of their versions."""
    numbers, *columns = (np.concatenate(each) for each in zip(*answers, strict=True))
    order = np.empty(len(versions), np.int64)
    order[versions] = np.arange(len(versions))
    if not columns:
        return (numbers[order],)
    at = expand_ranges((np.cumsum(numbers) - numbers)[order], numbers[order])
    return numbers[order], *(column[at] for column in columns)


class DistinctValues(ValueBag):
    """The number of distinct values; of several columns, of distinct combinations of values none of
    which is null. These are compared as the bytes of a key.
    """

    def __init__(
        self,
        column: str,
        type: pa.DataType,
        more: Sequence[str] = (),
        *,
        max_values: int,
        stop_when_full: bool,
    ) -> None:
        self.columns = (column, *more)
        super().__init__(
            column,
            pa.binary() if more else type,
            max_values=max_values,
            stop_when_full=stop_when_full,
        )

    def _column(self, segments: Segments) -> pa.Array:
        if len(self.columns) == 1:
            return super()._column(segments)
        arrays = [segments.column(name) for name in self.columns]
        keys = encode_keys(pa.table(arrays, names=self._names), self._names).cast(pa.binary())
        is_whole = np.logical_and.reduce(
            [array.is_valid().to_numpy(zero_copy_only=False) for array in arrays]
        )
        return pc.if_else(pa.array(is_whole), keys, pa.scalar(None, pa.binary()))

    @property
    def _names(self) -> list[str]:
        return [str(number) for number in range(len(self.columns))]

    def _answer(self, bags: Bags, keys: Ints) -> tuple[Ints, ...]:
        return (bags.lengths[keys],)

    def _results(self, answers: tuple[Ints, ...], values: pa.Array, unknown: Mask) -> pa.Array:  # noqa: ARG002
        return pa.array(answers[0], pa.int64(), mask=unknown)


class CollectSet(ValueBag):
    """The distinct values in ascending order."""

    def _answer(self, bags: Bags, keys: Ints) -> tuple[Ints, ...]:
        _, codes, _ = bags.of(keys)
        return bags.lengths[keys], codes

    def _results(self, answers: tuple[Ints, ...], values: pa.Array, unknown: Mask) -> pa.Array:
        numbers, codes = answers
        offsets = pa.array(np.append(0, np.cumsum(numbers)).astype(np.int32))
        sets = values.take(pa.array(codes))
        return pa.ListArray.from_arrays(
            offsets, sets, mask=pa.array(unknown) if unknown.any() else None
        )


class Median(ValueBag):
    """The value in the middle, or the mean of the two in the middle, as Spark computes it."""

    def _answer(self, bags: Bags, keys: Ints) -> tuple[Ints, ...]:
        slots, codes, counts = bags.of(keys)
        totals = np.bincount(slots, counts, minlength=len(keys)).astype(np.int64)
        exists = totals > 0
        running = np.cumsum(counts)
        first = (np.cumsum(totals) - totals)[exists]
        low, high = (
            codes[np.searchsorted(running, first + middle, side="right")]
            for middle in ((totals[exists] - 1) // 2, totals[exists] // 2)
        )
        return exists.astype(np.int64), low, high

    def _results(self, answers: tuple[Ints, ...], values: pa.Array, unknown: Mask) -> pa.Array:
        exists, low, high = answers
        numbers = doubles(values)
        with np.errstate(all="ignore"):
            middle = np.where(low == high, numbers[low], 0.5 * numbers[low] + 0.5 * numbers[high])
        medians: npt.NDArray[np.float64] = np.zeros(len(exists))
        medians[exists != 0] = middle
        return double_array(medians, (exists != 0) & ~unknown)
