"""Aggregates that keep values of a table, whose rows can be retracted.

`min` and `max` keep a multiset: distinct values with how many rows have each.
`max(v)` with at most two values per group, over one group:

    changes in                        state after                        result
    tick 1: insert v=3, v=5, v=5      {5: 2, 3: 1}                       5
    tick 2: insert v=4                {5: 2, 4: 1}, 1 forgotten below 4  5
    tick 3: delete v=5, v=5           {4: 1}, 1 forgotten                4
    tick 4: delete v=4                {}, 1 forgotten                    null (unknown)

`first`, `last` and `collect` keep rows in the order in which they entered their group. A row is
identified by the table's key: an update keeps its position, and so does a row that is removed and
added again within a tick; a row that is added in a later tick is new.

What happens above the limit of values per group:

- `min`, `max`, `first` and `last` forget the values farthest from the answer and only count them.
  Once all kept values are retracted and forgotten ones remain, the answer is null, and counted as
  unknown, until it is known again.
- `collect` rejects a value above the limit; its row goes to dead letters. So does `CountDistinct`,
  which continues state of `count_distinct` that an earlier Headrace began; `value_bags` has its
  successor.
- With `when_full="stop"` the query stops instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask, expand_ranges, offsets_of
from headrace.columnar.keys import canonicalize, encode_keys
from headrace.columnar.segments import Segments
from headrace.errors import BugError
from headrace.operators.aggregates.accumulator import (
    AccumulatorOutcome,
    Bags,
    RejectedRows,
    StoredValueAccumulator,
    TooManyValues,
    index_in_slot,
    lists,
    rank_values,
)


@dataclass(frozen=True)
class Events:
    """What each segment does to each value, in order of segment and value.

    `net` is the change in the number of rows; `arrival` is the first row that adds the value.
    """

    codes: Ints
    net: Ints
    arrival: Ints
    starts: Ints
    counts: Ints

    def of(self, turn: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """The events of some segments: slot, code, net, arrival."""
        at = expand_ranges(self.starts[turn], self.counts[turn])
        return (
            np.repeat(np.arange(len(turn)), self.counts[turn]),
            self.codes[at],
            self.net[at],
            self.arrival[at],
        )


def events_of(codes: Ints, rows: Ints, segments: Segments) -> Events:
    """The events of rows with the given codes (`rows` are positions in the segments' order)."""
    segment = segments.segment_of[rows]
    weights = np.ones(len(rows), np.int64) if segments.signs is None else segments.signs[rows]
    order = np.lexsort((rows, codes, segment))
    segment = segment[order]
    codes = codes[order]
    weights = weights[order]
    rows = rows[order]
    new = np.ones(len(rows), np.bool_)
    new[1:] = (segment[1:] != segment[:-1]) | (codes[1:] != codes[:-1])
    starts = np.flatnonzero(new)
    net = np.add.reduceat(weights, starts) if len(starts) else np.zeros(0, np.int64)
    arrival = (
        np.minimum.reduceat(np.where(weights > 0, rows, np.iinfo(np.int64).max), starts)
        if len(starts)
        else net
    )
    counts = np.bincount(segment[starts], minlength=len(segments))
    return Events(
        codes=codes[starts],
        net=net,
        arrival=arrival,
        starts=np.cumsum(counts) - counts,
        counts=counts,
    )


class Multiset(StoredValueAccumulator):
    """The base of `min`, `max` and `count_distinct`: a bag of (rank of a value,
    count) per group.
    """

    def __init__(
        self, column: str, type: pa.DataType, *, max_values: int, stop_when_full: bool
    ) -> None:
        self.column = column
        self.type = type
        self.max_values = max_values
        self.stop_when_full = stop_when_full

    def _column(self, segments: Segments) -> pa.Array:
        return segments.column(self.column)

    def _read(self, column: pa.Array) -> pa.Array:
        return column

    def _code_values(
        self, stored: list[pa.Array], segments: Segments
    ) -> tuple[list[Ints], Ints, Ints, pa.Array]:
        """The ranks of stored values and of the rows that have a value; which rows those are; and
        the distinct values in order.
        """
        column = self._read(self._column(segments))
        rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        everything = pa.concat_arrays(
            [*(each.cast(self.type) for each in stored), column.drop_null()]
        )
        codes, values = rank_values(everything)
        cuts = np.cumsum([len(each) for each in stored])
        *of_stored, of_rows = np.split(codes, cuts)
        return of_stored, of_rows, rows, values


def merge_events(
    old: tuple[Ints, ...], new: tuple[Ints, ...]
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Stored entries (slot, code, count) and events (slot, code, net, arrival), merged in order of
    slot and code: slot, code, count before, net change, arrival.
    """
    slots, codes = np.concatenate([old[0], new[0]]), np.concatenate([old[1], new[1]])
    before = np.concatenate([old[2], np.zeros(len(new[0]), np.int64)])
    net = np.concatenate([np.zeros(len(old[0]), np.int64), new[2]])
    arrival = np.concatenate([np.full(len(old[0]), np.iinfo(np.int64).max), new[3]])
    order = np.lexsort((codes, slots))
    slots, codes, before, net, arrival = (
        each[order] for each in (slots, codes, before, net, arrival)
    )
    if not len(slots):
        return slots, codes, before, net, arrival
    new_entry = np.ones(len(slots), np.bool_)
    new_entry[1:] = (slots[1:] != slots[:-1]) | (codes[1:] != codes[:-1])
    at = np.flatnonzero(new_entry)
    return (
        slots[at],
        codes[at],
        np.add.reduceat(before, at),
        np.add.reduceat(net, at),
        np.minimum.reduceat(arrival, at),
    )


class TableExtreme(Multiset):
    """The smallest or largest value of a table's rows. Code 0 is the best value."""

    def __init__(
        self,
        column: str,
        type: pa.DataType,
        *,
        largest: bool,
        max_values: int,
        stop_when_full: bool,
    ) -> None:
        super().__init__(column, type, max_values=max_values, stop_when_full=stop_when_full)
        self.largest = largest
        self.state_type = pa.struct(
            [
                pa.field("forgotten", pa.int64()),
                pa.field("fence", type),
                pa.field("values", pa.list_(type)),
                pa.field("counts", pa.list_(pa.int64())),
            ]
        )

    def advance_values(
        self, there: Mask, stored: pa.Array, segments: Segments
    ) -> AccumulatorOutcome:
        fences = stored.field(1)
        (of_fences, of_stored), of_rows, rows, values = self._code_values(
            [fences.drop_null(), stored.field(2).flatten()], segments
        )
        if self.largest:
            of_fences, of_stored, of_rows = (
                len(values) - 1 - codes for codes in (of_fences, of_stored, of_rows)
            )
            values = values.take(pa.array(np.arange(len(values))[::-1]))
        lengths, forgotten, fence = (np.zeros(len(there), np.int64) for _ in range(3))
        lengths[there] = np.diff(offsets_of(stored.field(2)))
        forgotten[there] = stored.field(0).to_numpy()
        fence[np.flatnonzero(there)[fences.is_valid().to_numpy(zero_copy_only=False)]] = of_fences
        bags = Bags(lengths, of_stored, stored.field(3).flatten().to_numpy())
        # The best code of each version, -1 if there is none; and for which versions it is unknown.
        events = events_of(of_rows, rows, segments)
        best = np.full(segments.versions, -1)
        unknown = np.zeros(segments.versions, np.bool_)
        everything = np.arange(len(segments.firsts))
        best[segments.initial_versions], unknown[segments.initial_versions] = self._answer(
            bags, everything, forgotten
        )
        for turn in segments.rounds():
            keys = segments.key_of[turn]
            self._apply_round(bags, keys, forgotten, fence, events.of(turn))
            best[segments.after[turn]], unknown[segments.after[turn]] = self._answer(
                bags, keys, forgotten
            )
        results = values.take(pa.array(best, mask=best < 0))
        return self._pack_outcome(results, unknown, bags, forgotten, fence, values)

    @staticmethod
    def _answer(bags: Bags, keys: Ints, forgotten: Ints) -> tuple[Ints, Mask]:
        """The best code of each group, -1 if there is none; and for which groups it is unknown."""
        slots, codes, _ = bags.of(keys)
        best = np.full(len(keys), -1)
        first = np.flatnonzero(index_in_slot(slots) == 0)
        best[slots[first]] = codes[first]
        return best, (best < 0) & (forgotten[keys] > 0)

    def _apply_round(
        self,
        bags: Bags,
        keys: Ints,
        forgotten: Ints,
        fence: Ints,
        events: tuple[Ints, Ints, Ints, Ints],
    ) -> None:
        """Apply one segment of each of some groups."""
        slot, code, net, _ = events
        beyond = (forgotten[keys][slot] > 0) & (code > fence[keys][slot])
        forgotten[keys] += np.bincount(slot[beyond], net[beyond], minlength=len(keys)).astype(
            np.int64
        )
        slots, codes, before, net, _ = merge_events(
            bags.of(keys), tuple(each[~beyond] for each in events)
        )
        counts = before + net
        if (counts < 0).any() or (forgotten[keys] < 0).any():
            raise BugError(
                f"A value of the column {self.column!r} is retracted that was never added."
            )
        slots, codes, counts = (each[counts > 0] for each in (slots, codes, counts))
        inside = index_in_slot(slots) < self.max_values
        if not inside.all():
            self._forget(keys, forgotten, fence, slots, codes, counts, inside)
        bags.replace(keys, slots[inside], codes[inside], counts[inside])

    def _forget(
        self,
        keys: Ints,
        forgotten: Ints,
        fence: Ints,
        slots: Ints,
        codes: Ints,
        counts: Ints,
        inside: Mask,
    ) -> None:
        """Keep the best values and count the rest; the fence is the last value that is kept."""
        if self.stop_when_full:
            raise TooManyValues(int(keys[slots[~inside][0]]), self.max_values)
        forgotten[keys] += np.bincount(slots[~inside], counts[~inside], minlength=len(keys)).astype(
            np.int64
        )
        last = np.flatnonzero(
            inside & np.append(~inside[1:], True) & np.append(slots[1:] == slots[:-1], False)
        )
        fence[keys[slots[last]]] = codes[last]

    def _pack_outcome(
        self,
        results: pa.Array,
        unknown: Mask,
        bags: Bags,
        forgotten: Ints,
        fence: Ints,
        values: pa.Array,
    ) -> AccumulatorOutcome:
        there = (bags.lengths > 0) | (forgotten > 0)
        which = np.flatnonzero(there)
        _, codes, counts = bags.of(which)
        fenced = forgotten[which] > 0
        fences = (
            values.take(pa.array(np.where(fenced, fence[which], 0), mask=~fenced))
            if len(values)
            else pa.nulls(len(which), self.type)
        )
        parts = [
            pa.array(forgotten[which]),
            fences,
            lists(bags.lengths[which], values.take(pa.array(codes))),
            lists(bags.lengths[which], pa.array(counts)),
        ]
        states = pa.StructArray.from_arrays(parts, fields=list(self.state_type))
        return self.pack_values(results, there, states, unknown=unknown if unknown.any() else None)


class CountDistinct(Multiset):
    """The number of distinct values among those that are not above the limit, as an earlier
    Headrace counted. Over a stream, counts per value are not needed.
    """

    def __init__(
        self,
        column: str,
        type: pa.DataType,
        *,
        over_table: bool,
        max_values: int,
        stop_when_full: bool,
    ) -> None:
        super().__init__(column, type, max_values=max_values, stop_when_full=stop_when_full)
        self.over_table = over_table
        counts = [pa.field("counts", pa.list_(pa.int64()))] if over_table else []
        self.state_type = pa.struct([pa.field("values", pa.list_(type)), *counts])

    def _read(self, column: pa.Array) -> pa.Array:
        """The values as keys have them: with one zero and one NaN."""
        return canonicalize(column)

    def advance_values(
        self, there: Mask, stored: pa.Array, segments: Segments
    ) -> AccumulatorOutcome:
        (of_stored,), of_rows, rows, values = self._code_values(
            [stored.field(0).flatten()], segments
        )
        lengths = np.zeros(len(there), np.int64)
        lengths[there] = np.diff(offsets_of(stored.field(0)))
        counts = (
            stored.field(1).flatten().to_numpy()
            if self.over_table
            else np.ones(len(of_stored), np.int64)
        )
        bags = Bags(lengths, of_stored, counts)
        events = events_of(of_rows, rows, segments)
        result = np.empty(segments.versions, np.int64)
        result[segments.initial_versions] = bags.lengths
        refused: list[tuple[Ints, Ints]] = []
        for turn in segments.rounds():
            keys = segments.key_of[turn]
            refused.append(self._apply_round(bags, keys, turn, events))
            result[segments.after[turn]] = bags.lengths[keys]
        rejected = self._rejected_rows(refused, of_rows, rows, segments)
        return self._pack_outcome(pa.array(result), bags, values, rejected)

    def _apply_round(self, bags: Bags, keys: Ints, turn: Ints, events: Events) -> tuple[Ints, Ints]:
        """Apply one segment of each of some groups; returns the (segment, code) pairs that were
        rejected.
        """
        slots, codes, before, net, arrival = merge_events(bags.of(keys), events.of(turn))
        # A retracted value that is absent was rejected when it was added.
        counts = before + net if self.over_table else (before + net > 0).astype(np.int64)
        there = counts > 0
        slots, codes, before, counts, arrival = (
            each[there] for each in (slots, codes, before, counts, arrival)
        )
        refused = self._rejection_mask(slots, before, arrival)
        if refused.any() and self.stop_when_full:
            raise TooManyValues(int(keys[slots[refused][0]]), self.max_values)
        bags.replace(keys, slots[~refused], codes[~refused], counts[~refused])
        return turn[slots[refused]], codes[refused]

    def _rejection_mask(self, slots: Ints, before: Ints, arrival: Ints) -> Mask:
        """Which values are rejected: those that were present stay, and of the others the first to
        arrive are accepted.
        """
        refused = np.zeros(len(slots), np.bool_)
        if not (index_in_slot(slots) >= self.max_values).any():
            return refused
        order = np.lexsort((arrival, before == 0, slots))
        refused[order] = index_in_slot(slots[order]) >= self.max_values
        refused &= before == 0
        return refused

    def _rejected_rows(
        self, refused: list[tuple[Ints, Ints]], of_rows: Ints, rows: Ints, segments: Segments
    ) -> tuple[RejectedRows, ...]:
        """The rows that brought refused values."""
        segment, code = (
            (np.concatenate(each) for each in zip(*refused, strict=True))
            if refused
            else (np.zeros(0, np.int64),) * 2
        )
        if not len(segment):
            return ()
        base = int(of_rows.max()) + 1
        mine = np.isin(segments.segment_of[rows] * base + of_rows, segment * base + code)
        if segments.signs is not None:
            mine &= segments.signs[rows] > 0
        return (
            RejectedRows(
                rows[mine],
                f"the group has {self.max_values} different values of {self.column!r} already",
            ),
        )

    def _pack_outcome(
        self, results: pa.Array, bags: Bags, values: pa.Array, rejected: tuple[RejectedRows, ...]
    ) -> AccumulatorOutcome:
        there = bags.lengths > 0
        which = np.flatnonzero(there)
        _, codes, counts = bags.of(which)
        parts = [lists(bags.lengths[which], values.take(pa.array(codes)))]
        parts += [lists(bags.lengths[which], pa.array(counts))] if self.over_table else []
        return self.pack_values(
            results,
            there,
            pa.StructArray.from_arrays(parts, fields=list(self.state_type)),
            rejected=rejected,
        )


# Rows in order: first, last and collect


@dataclass(frozen=True)
class OrderedRowsPass:
    """The working set of a call: bags of (row id, position of its value), the numbers of forgotten
    rows, and the new rows.
    """

    bags: Bags
    forgotten: Ints
    values: pa.Array
    ids: pa.Array  # by code
    id_of_row: Ints
    first_row: int  # where rows begin in `values`
    segments: Segments


class OrderedRows(StoredValueAccumulator):
    """The base of `first`, `last` and `collect`: the rows of each group, in order."""

    counts_forgotten = True

    def __init__(
        self,
        column: str,
        type: pa.DataType,
        row_key: Sequence[str],
        *,
        max_values: int,
        stop_when_full: bool,
    ) -> None:
        self.column = column
        self.type = type
        self.row_key = tuple(row_key)
        self.max_values = max_values
        self.stop_when_full = stop_when_full
        self.state_type = pa.struct(
            [
                pa.field("forgotten", pa.int64()),
                pa.field("ids", pa.list_(pa.binary())),
                pa.field("values", pa.list_(type)),
            ]
        )

    # Reading and storing

    def _read_rows(self, there: Mask, stored: pa.Array, segments: Segments) -> OrderedRowsPass:
        lengths, forgotten = np.zeros(len(there), np.int64), np.zeros(len(there), np.int64)
        lengths[there] = np.diff(offsets_of(stored.field(1)))
        forgotten[there] = stored.field(0).to_numpy()
        known = stored.field(1).flatten()
        of_rows = (
            encode_keys(segments.rows, self.row_key)
            .cast(pa.binary())
            .take(pa.array(segments.order))
        )
        ids = pa.concat_arrays([known, of_rows]).dictionary_encode()
        codes = ids.indices.to_numpy().astype(np.int64)
        values = pa.concat_arrays([stored.field(2).flatten(), segments.column(self.column)])
        bags = Bags(lengths, codes[: len(known)], np.arange(len(known)))
        return OrderedRowsPass(
            bags=bags,
            forgotten=forgotten,
            values=values,
            ids=ids.dictionary,
            id_of_row=codes[len(known) :],
            first_row=len(known),
            segments=segments,
        )

    def _pack_outcome(
        self,
        work: OrderedRowsPass,
        results: pa.Array,
        unknown: Mask | None,
        rejected: tuple[RejectedRows, ...],
    ) -> AccumulatorOutcome:
        there = (work.bags.lengths > 0) | (work.forgotten > 0)
        which = np.flatnonzero(there)
        _, codes, at = work.bags.of(which)
        lengths = work.bags.lengths[which]
        parts = [
            pa.array(work.forgotten[which]),
            lists(lengths, work.ids.take(pa.array(codes))),
            lists(lengths, work.values.take(pa.array(at))),
        ]
        return self.pack_values(
            results,
            there,
            pa.StructArray.from_arrays(parts, fields=list(self.state_type)),
            unknown=unknown,
            rejected=rejected,
        )

    # Advancing

    def _apply_round(self, work: OrderedRowsPass, turn: Ints) -> Ints:
        """Apply one segment of each of some groups; returns the rows that were rejected."""
        keys = work.segments.key_of[turn]
        slots, ids, at, order, fate = self._fates(work, turn, keys)
        stays, is_added = fate == _STAYS, fate == _ADDED
        work.forgotten[keys] -= np.bincount(slots[fate == _FORGOTTEN_REMOVED], minlength=len(keys))
        if self.counts_forgotten and (work.forgotten[keys] < 0).any():
            raise BugError(f"A row is retracted that was never added, by the key {self.row_key}.")
        refused = at[fate == _FORGOTTEN_STAYS] - work.first_row
        in_place = np.lexsort((order, is_added, slots))
        in_place = in_place[(stays | is_added)[in_place]]
        slots = slots[in_place]
        ids = ids[in_place]
        at = at[in_place]
        is_added = is_added[in_place]
        kept, forgotten = self._within_bounds(slots, is_added, work.forgotten[keys])
        if self.stop_when_full and not kept.all():
            raise TooManyValues(int(keys[slots[~kept][0]]), self.max_values)
        work.forgotten[keys] = forgotten
        work.bags.replace(keys, slots[kept], ids[kept], at[kept])
        return np.concatenate([refused, at[~kept] - work.first_row])

    def _fates(
        self, work: OrderedRowsPass, turn: Ints, keys: Ints
    ) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """What becomes of each row of these groups, stored or new: slot, id, position of its value,
        order, fate.
        """
        slots, ids, at = work.bags.of(keys)
        segments = work.segments
        rows = expand_ranges(segments.starts[turn], segments.sizes[turn])
        assert segments.signs is not None
        slots = np.concatenate([slots, np.repeat(np.arange(len(turn)), segments.sizes[turn])])
        ids = np.concatenate([ids, work.id_of_row[rows]])
        at = np.concatenate([at, work.first_row + rows])
        was = np.arange(len(slots)) < len(slots) - len(rows)
        is_added = np.concatenate(
            [np.ones(len(slots) - len(rows), np.bool_), segments.signs[rows] > 0]
        )
        order = np.lexsort((np.arange(len(slots)), ids, slots))
        new = np.ones(len(order), np.bool_)
        new[1:] = (slots[order][1:] != slots[order][:-1]) | (ids[order][1:] != ids[order][:-1])
        first = order[np.flatnonzero(new)]
        last = order[np.append(np.flatnonzero(new)[1:], len(order)) - 1] if len(order) else order
        known, unknown = was[first], ~was[first] & ~is_added[first]
        fate = np.select(
            [known & is_added[last], unknown & is_added[last], unknown, ~known & is_added[last]],
            [_STAYS, _FORGOTTEN_STAYS, _FORGOTTEN_REMOVED, _ADDED],
            _REMOVED,
        )
        return slots[last], ids[last], at[last], np.where(known, first, last), fate

    def _within_bounds(self, slots: Ints, is_added: Mask, forgotten: Ints) -> tuple[Mask, Ints]:
        """Which rows (in order of group and position) are kept, and how many of each group are
        forgotten then.
        """
        raise NotImplementedError


_REMOVED, _STAYS, _ADDED, _FORGOTTEN_STAYS, _FORGOTTEN_REMOVED = range(5)


class TableFirst(OrderedRows):
    """The value of the first row, or of the first with a value that is not null."""

    def __init__(
        self,
        column: str,
        type: pa.DataType,
        row_key: Sequence[str],
        *,
        ignore_nulls: bool,
        max_values: int,
        stop_when_full: bool,
    ) -> None:
        super().__init__(
            column, type, row_key, max_values=max_values, stop_when_full=stop_when_full
        )
        self.ignore_nulls = ignore_nulls

    def advance_values(
        self, there: Mask, stored: pa.Array, segments: Segments
    ) -> AccumulatorOutcome:
        work = self._read_rows(there, stored, segments)
        counts = work.values.is_valid().to_numpy(zero_copy_only=False) | (not self.ignore_nulls)
        chosen, unknown = np.full(segments.versions, -1), np.zeros(segments.versions, np.bool_)
        chosen[segments.initial_versions], unknown[segments.initial_versions] = self._answer(
            work, np.arange(len(there)), counts
        )
        for turn in segments.rounds():
            self._apply_round(work, turn)
            chosen[segments.after[turn]], unknown[segments.after[turn]] = self._answer(
                work, segments.key_of[turn], counts
            )
        results = work.values.take(pa.array(chosen, mask=chosen < 0))
        return self._pack_outcome(work, results, unknown if unknown.any() else None, ())

    def _answer(self, work: OrderedRowsPass, keys: Ints, counts: Mask) -> tuple[Ints, Mask]:
        """For each group the position of its value, -1 for none; and whether it is unknown."""
        slots, _, at = work.bags.of(keys)
        slots, at = slots[counts[at]], at[counts[at]]
        answer = np.full(len(keys), -1)
        best = self._best(slots)
        answer[slots[best]] = at[best]
        return answer, (answer < 0) & (work.forgotten[keys] > 0)

    def _best(self, slots: Ints) -> Ints:
        return np.flatnonzero(index_in_slot(slots) == 0)

    def _within_bounds(self, slots: Ints, is_added: Mask, forgotten: Ints) -> tuple[Mask, Ints]:
        """Keep the earliest rows. Once rows are forgotten, a new row comes after them, and is
        forgotten too.
        """
        kept = (index_in_slot(slots) < self.max_values) & ~(is_added & (forgotten[slots] > 0))
        return kept, forgotten + np.bincount(slots[~kept], minlength=len(forgotten))


class TableLast(TableFirst):
    """The value of the last row, or of the last with a value that is not null."""

    def _best(self, slots: Ints) -> Ints:
        return np.flatnonzero(np.append(slots[1:] != slots[:-1], True)) if len(slots) else slots

    def _within_bounds(self, slots: Ints, is_added: Mask, forgotten: Ints) -> tuple[Mask, Ints]:  # noqa: ARG002
        """Keep the latest rows."""
        from_the_end = np.bincount(slots, minlength=len(forgotten))[slots] - index_in_slot(slots)
        kept = from_the_end <= self.max_values
        return kept, forgotten + np.bincount(slots[~kept], minlength=len(forgotten))


class TableCollect(OrderedRows):
    """All values that are not null."""

    counts_forgotten = False

    def advance_values(
        self, there: Mask, stored: pa.Array, segments: Segments
    ) -> AccumulatorOutcome:
        work = self._read_rows(there, stored, segments)
        valid = work.values.is_valid().to_numpy(zero_copy_only=False)
        rounds = [(segments.initial_versions, *self._lists(work, np.arange(len(there)), valid))]
        refused = []
        for turn in segments.rounds():
            refused.append(self._apply_round(work, turn))
            rounds.append((segments.after[turn], *self._lists(work, segments.key_of[turn], valid)))
        rejected = np.sort(np.concatenate(refused)) if refused else np.zeros(0, np.int64)
        reason = f"the group has {self.max_values} values of {self.column!r} already"
        return self._pack_outcome(
            work,
            _lists_by_version(rounds, work.values, segments.versions),
            None,
            (RejectedRows(rejected, reason),) if len(rejected) else (),
        )

    @staticmethod
    def _lists(work: OrderedRowsPass, keys: Ints, valid: Mask) -> tuple[Ints, Ints]:
        """The number of values of each group, and their positions."""
        slots, _, at = work.bags.of(keys)
        return np.bincount(slots[valid[at]], minlength=len(keys)), at[valid[at]]

    def _within_bounds(self, slots: Ints, is_added: Mask, forgotten: Ints) -> tuple[Mask, Ints]:  # noqa: ARG002
        """Keep the earliest rows. Rejected rows are not remembered: their retraction finds nothing
        to remove.
        """
        return index_in_slot(slots) < self.max_values, np.zeros(len(forgotten), np.int64)


def _lists_by_version(
    rounds: list[tuple[Ints, Ints, Ints]], values: pa.Array, versions: int
) -> pa.Array:
    """Lists that were computed in rounds, in the order of their versions."""
    version, lengths, at = (np.concatenate(each) for each in zip(*rounds, strict=True))
    starts = np.cumsum(lengths) - lengths
    order = np.empty(versions, np.int64)
    order[version] = np.arange(versions)
    return lists(
        lengths[order], values.take(pa.array(at[expand_ranges(starts[order], lengths[order])]))
    )
