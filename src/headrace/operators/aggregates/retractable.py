"""Values with how often they are there: the smallest, the largest and the number of distinct values
where rows can go again.

A key keeps up to `most` distinct values.

- `min` and `max` forget those farthest from the answer, and only count them: what they answer is
  exact. If all that were kept have gone and
  forgotten ones remain, the answer cannot be told: it is null, and counted, until it can.
- `count_distinct` leaves a value out that would be one too many: its row goes to dead letters, and
  the count stands.

With `when_full="stop"` either stops the query instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask, offsets_of, runs
from headrace.columnar.keys import canonical, encode_keys
from headrace.columnar.segments import Segments
from headrace.errors import BugError
from headrace.operators.aggregates.accumulator import (
    Advanced,
    Bags,
    Full,
    Keeper,
    LeftOut,
    lists,
    place_in_slot,
    places,
)


@dataclass(frozen=True)
class Events:
    """What each segment does to each value: `net` rows more; `arrival` is the first row that brings
    it. In order of segment and value.
    """

    codes: Ints
    net: Ints
    arrival: Ints
    starts: Ints
    counts: Ints

    def of(self, turn: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Those of some segments: slot, code, net, arrival."""
        at = runs(self.starts[turn], self.counts[turn])
        return (
            np.repeat(np.arange(len(turn)), self.counts[turn]),
            self.codes[at],
            self.net[at],
            self.arrival[at],
        )


def events_of(codes: Ints, rows: Ints, segments: Segments) -> Events:
    """From the codes of some rows (positions in the segments' order)."""
    segment = segments.segment_of[rows]
    weights = np.ones(len(rows), np.int64) if segments.signs is None else segments.signs[rows]
    order = np.lexsort((rows, codes, segment))
    segment, codes, weights, rows = segment[order], codes[order], weights[order], rows[order]
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
    return Events(codes[starts], net, arrival, np.cumsum(counts) - counts, counts)


class Multiset(Keeper):
    """What `min`, `max` and `count_distinct` have in common: all values at hand as places in their
    order, and bags of (place, count).
    """

    def __init__(self, column: str, type: pa.DataType, *, most: int, stop: bool) -> None:
        self.column, self.type, self.most, self.stop = column, type, most, stop

    def _read(self, column: pa.Array) -> pa.Array:
        return column

    def _coded(
        self, stored: list[pa.Array], segments: Segments
    ) -> tuple[list[Ints], Ints, Ints, pa.Array]:
        """Codes of stored values and of the rows that have one; which rows those are; the values in
        their order.
        """
        column = self._read(segments.column(self.column))
        rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        everything = pa.concat_arrays(
            [*(each.cast(self.type) for each in stored), column.drop_null()]
        )
        codes, values = places(everything)
        cuts = np.cumsum([len(each) for each in stored])
        *of_stored, of_rows = np.split(codes, cuts)
        return of_stored, of_rows, rows, values


def merged(old: tuple[Ints, ...], new: tuple[Ints, ...]) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Old entries (slot, code, count) and events (slot, code, net, arrival) together, in order of
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
    """The smallest or the largest value of a table's rows. Codes run away from the answer: 0 is the
    best there is.
    """

    def __init__(
        self, column: str, type: pa.DataType, *, largest: bool, most: int, stop: bool
    ) -> None:
        super().__init__(column, type, most=most, stop=stop)
        self.largest = largest
        self.state_type = pa.struct(
            [
                pa.field("forgotten", pa.int64()),
                pa.field("fence", type),
                pa.field("values", pa.list_(type)),
                pa.field("counts", pa.list_(pa.int64())),
            ]
        )

    def keep(self, there: Mask, stored: pa.Array, segments: Segments) -> Advanced:
        fences = stored.field(1)
        (of_fences, of_stored), of_rows, rows, values = self._coded(
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
        best, lost = self._through(
            bags, forgotten, fence, events_of(of_rows, rows, segments), segments
        )
        results = values.take(pa.array(best, mask=best < 0))
        return self._stored(results, lost, bags, forgotten, fence, values)

    def _through(
        self, bags: Bags, forgotten: Ints, fence: Ints, events: Events, segments: Segments
    ) -> tuple[Ints, Mask]:
        """The best code of each version, -1 if there is none; and which cannot be told."""
        best = np.full(segments.versions, -1)
        lost = np.zeros(segments.versions, np.bool_)
        everything = np.arange(len(segments.firsts))
        best[segments.before_all], lost[segments.before_all] = self._answer(
            bags, everything, forgotten
        )
        for turn in segments.rounds():
            keys = segments.key_of[turn]
            self._round(bags, keys, forgotten, fence, events.of(turn))
            best[segments.after[turn]], lost[segments.after[turn]] = self._answer(
                bags, keys, forgotten
            )
        return best, lost

    @staticmethod
    def _answer(bags: Bags, keys: Ints, forgotten: Ints) -> tuple[Ints, Mask]:
        slots, codes, _ = bags.of(keys)
        best = np.full(len(keys), -1)
        first = np.flatnonzero(place_in_slot(slots) == 0)
        best[slots[first]] = codes[first]
        return best, (best < 0) & (forgotten[keys] > 0)

    def _round(
        self,
        bags: Bags,
        keys: Ints,
        forgotten: Ints,
        fence: Ints,
        events: tuple[Ints, Ints, Ints, Ints],
    ) -> None:
        slot, code, net, _ = events
        beyond = (forgotten[keys][slot] > 0) & (code > fence[keys][slot])
        forgotten[keys] += np.bincount(slot[beyond], net[beyond], minlength=len(keys)).astype(
            np.int64
        )
        slots, codes, before, net, _ = merged(
            bags.of(keys), tuple(each[~beyond] for each in events)
        )
        counts = before + net
        if (counts < 0).any() or (forgotten[keys] < 0).any():
            raise BugError(f"A value of the column {self.column!r} went that never came.")
        slots, codes, counts = (each[counts > 0] for each in (slots, codes, counts))
        inside = place_in_slot(slots) < self.most
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
        """Keep the best, count the rest; the fence is the last that is kept."""
        if self.stop:
            raise Full(int(keys[slots[~inside][0]]), self.most)
        forgotten[keys] += np.bincount(slots[~inside], counts[~inside], minlength=len(keys)).astype(
            np.int64
        )
        last = np.flatnonzero(
            inside & np.append(~inside[1:], True) & np.append(slots[1:] == slots[:-1], False)
        )
        fence[keys[slots[last]]] = codes[last]

    def _stored(
        self,
        results: pa.Array,
        lost: Mask,
        bags: Bags,
        forgotten: Ints,
        fence: Ints,
        values: pa.Array,
    ) -> Advanced:
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
        return self.kept(results, there, states, lost=lost if lost.any() else None)


class CountDistinct(Multiset):
    """How many different values there are. Over a stream, how often each is there need not be
    known.
    """

    def __init__(
        self, column: str, type: pa.DataType, *, over_table: bool, most: int, stop: bool
    ) -> None:
        super().__init__(column, type, most=most, stop=stop)
        self.over_table = over_table
        counts = [pa.field("counts", pa.list_(pa.int64()))] if over_table else []
        self.state_type = pa.struct([pa.field("values", pa.list_(type)), *counts])

    def _read(self, column: pa.Array) -> pa.Array:
        """As in a key: there is one zero and one NaN."""
        return canonical(column)

    def keep(self, there: Mask, stored: pa.Array, segments: Segments) -> Advanced:
        (of_stored,), of_rows, rows, values = self._coded([stored.field(0).flatten()], segments)
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
        result[segments.before_all] = bags.lengths
        refused: list[tuple[Ints, Ints]] = []
        for turn in segments.rounds():
            keys = segments.key_of[turn]
            refused.append(self._round(bags, keys, turn, events))
            result[segments.after[turn]] = bags.lengths[keys]
        left_out = self._left_out(refused, of_rows, rows, segments)
        return self._stored(pa.array(result), bags, values, left_out)

    def _round(self, bags: Bags, keys: Ints, turn: Ints, events: Events) -> tuple[Ints, Ints]:
        """Count, let in what there is room for; gives the (segment, code) pairs that were
        refused.
        """
        slots, codes, before, net, arrival = merged(bags.of(keys), events.of(turn))
        # A value that goes and is not there was left out when it came.
        counts = before + net if self.over_table else (before + net > 0).astype(np.int64)
        there = counts > 0
        slots, codes, before, counts, arrival = (
            each[there] for each in (slots, codes, before, counts, arrival)
        )
        refused = self._refused(slots, before, arrival)
        if refused.any() and self.stop:
            raise Full(int(keys[slots[refused][0]]), self.most)
        bags.replace(keys, slots[~refused], codes[~refused], counts[~refused])
        return turn[slots[refused]], codes[refused]

    def _refused(self, slots: Ints, before: Ints, arrival: Ints) -> Mask:
        """Those that were there stay; of the others, the first to come get in."""
        refused = np.zeros(len(slots), np.bool_)
        if not (place_in_slot(slots) >= self.most).any():
            return refused
        order = np.lexsort((arrival, before == 0, slots))
        refused[order] = place_in_slot(slots[order]) >= self.most
        refused &= before == 0
        return refused

    def _left_out(
        self, refused: list[tuple[Ints, Ints]], of_rows: Ints, rows: Ints, segments: Segments
    ) -> tuple[LeftOut, ...]:
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
            LeftOut(
                rows[mine], f"the group has {self.most} different values of {self.column!r} already"
            ),
        )

    def _stored(
        self, results: pa.Array, bags: Bags, values: pa.Array, left_out: tuple[LeftOut, ...]
    ) -> Advanced:
        there = bags.lengths > 0
        which = np.flatnonzero(there)
        _, codes, counts = bags.of(which)
        parts = [lists(bags.lengths[which], values.take(pa.array(codes)))]
        parts += [lists(bags.lengths[which], pa.array(counts))] if self.over_table else []
        return self.kept(
            results,
            there,
            pa.StructArray.from_arrays(parts, fields=list(self.state_type)),
            left_out=left_out,
        )


# Values of a table's rows in the order in which the rows came into their group: the first, the
# last, all of them.
#
# A row is known by the table's key. An update keeps its row's place; a row that goes and comes
# again within a tick keeps it too, one that comes in a later tick is new. A key keeps up to `most`
# rows:
#
# - `first` keeps the earliest and `last` the latest; the others are only counted. If all that were
# kept have gone and others remain, the answer cannot be told: it is null, and counted, until it
# can.
# - `collect` leaves out a row that would be one too many; it goes to dead letters.
#
# With `when_full="stop"` either stops the query instead.


@dataclass(frozen=True)
class Work:
    """What a step works on: bags of (row's id, position of its value), what was forgotten, and the
    rows' side.
    """

    bags: Bags
    forgotten: Ints
    values: pa.Array
    ids: pa.Array  # by code
    id_of_row: Ints
    first_row: int  # where rows begin in `values`
    segments: Segments


class Places(Keeper):
    """The rows of each key, in their places."""

    counts_forgotten = True

    def __init__(
        self, column: str, type: pa.DataType, row_key: Sequence[str], *, most: int, stop: bool
    ) -> None:
        self.column, self.type, self.row_key, self.most, self.stop = (
            column,
            type,
            tuple(row_key),
            most,
            stop,
        )
        self.state_type = pa.struct(
            [
                pa.field("forgotten", pa.int64()),
                pa.field("ids", pa.list_(pa.binary())),
                pa.field("values", pa.list_(type)),
            ]
        )

    # Opening and storing

    def _opened(self, there: Mask, stored: pa.Array, segments: Segments) -> Work:
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
        return Work(
            bags, forgotten, values, ids.dictionary, codes[len(known) :], len(known), segments
        )

    def _stored(
        self, work: Work, results: pa.Array, lost: Mask | None, left_out: tuple[LeftOut, ...]
    ) -> Advanced:
        there = (work.bags.lengths > 0) | (work.forgotten > 0)
        which = np.flatnonzero(there)
        _, codes, at = work.bags.of(which)
        lengths = work.bags.lengths[which]
        parts = [
            pa.array(work.forgotten[which]),
            lists(lengths, work.ids.take(pa.array(codes))),
            lists(lengths, work.values.take(pa.array(at))),
        ]
        return self.kept(
            results,
            there,
            pa.StructArray.from_arrays(parts, fields=list(self.state_type)),
            lost=lost,
            left_out=left_out,
        )

    # Going on

    def _round(self, work: Work, turn: Ints) -> Ints:
        """Take in a segment of each of some keys; gives the rows that were left out."""
        keys = work.segments.key_of[turn]
        slots, ids, at, order, fate = self._fates(work, turn, keys)
        stays, comes = fate == _STAYS, fate == _COMES
        work.forgotten[keys] -= np.bincount(slots[fate == _FORGOTTEN_GOES], minlength=len(keys))
        if self.counts_forgotten and (work.forgotten[keys] < 0).any():
            raise BugError(f"A row went that never came, by the key {self.row_key}.")
        refused = at[fate == _FORGOTTEN_STAYS] - work.first_row
        in_place = np.lexsort((order, comes, slots))
        in_place = in_place[(stays | comes)[in_place]]
        slots, ids, at, comes = slots[in_place], ids[in_place], at[in_place], comes[in_place]
        kept, forgotten = self._within_bounds(slots, comes, work.forgotten[keys])
        if self.stop and not kept.all():
            raise Full(int(keys[slots[~kept][0]]), self.most)
        work.forgotten[keys] = forgotten
        work.bags.replace(keys, slots[kept], ids[kept], at[kept])
        return np.concatenate([refused, at[~kept] - work.first_row])

    def _fates(self, work: Work, turn: Ints, keys: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """What becomes of each row of these keys, old or new: slot, id, position of its value,
        order, fate.
        """
        slots, ids, at = work.bags.of(keys)
        segments = work.segments
        rows = runs(segments.starts[turn], segments.sizes[turn])
        assert segments.signs is not None
        slots = np.concatenate([slots, np.repeat(np.arange(len(turn)), segments.sizes[turn])])
        ids, at = (
            np.concatenate([ids, work.id_of_row[rows]]),
            np.concatenate([at, work.first_row + rows]),
        )
        was = np.arange(len(slots)) < len(slots) - len(rows)
        comes = np.concatenate(
            [np.ones(len(slots) - len(rows), np.bool_), segments.signs[rows] > 0]
        )
        order = np.lexsort((np.arange(len(slots)), ids, slots))
        new = np.ones(len(order), np.bool_)
        new[1:] = (slots[order][1:] != slots[order][:-1]) | (ids[order][1:] != ids[order][:-1])
        first = order[np.flatnonzero(new)]
        last = order[np.append(np.flatnonzero(new)[1:], len(order)) - 1] if len(order) else order
        known, unknown = was[first], ~was[first] & ~comes[first]
        fate = np.select(
            [known & comes[last], unknown & comes[last], unknown, ~known & comes[last]],
            [_STAYS, _FORGOTTEN_STAYS, _FORGOTTEN_GOES, _COMES],
            _GOES,
        )
        return slots[last], ids[last], at[last], np.where(known, first, last), fate

    def _within_bounds(self, slots: Ints, comes: Mask, forgotten: Ints) -> tuple[Mask, Ints]:
        """Which rows (in order of key and place) are kept, and how many of each key are forgotten
        then.
        """
        raise NotImplementedError


_GOES, _STAYS, _COMES, _FORGOTTEN_STAYS, _FORGOTTEN_GOES = range(5)


class TableFirst(Places):
    """The value of the row that came first; of those with a value, if nulls are ignored."""

    def __init__(
        self,
        column: str,
        type: pa.DataType,
        row_key: Sequence[str],
        *,
        ignore_nulls: bool,
        most: int,
        stop: bool,
    ) -> None:
        super().__init__(column, type, row_key, most=most, stop=stop)
        self.ignore_nulls = ignore_nulls

    def keep(self, there: Mask, stored: pa.Array, segments: Segments) -> Advanced:
        work = self._opened(there, stored, segments)
        counts = work.values.is_valid().to_numpy(zero_copy_only=False) | (not self.ignore_nulls)
        chosen, lost = np.full(segments.versions, -1), np.zeros(segments.versions, np.bool_)
        chosen[segments.before_all], lost[segments.before_all] = self._answer(
            work, np.arange(len(there)), counts
        )
        for turn in segments.rounds():
            self._round(work, turn)
            chosen[segments.after[turn]], lost[segments.after[turn]] = self._answer(
                work, segments.key_of[turn], counts
            )
        results = work.values.take(pa.array(chosen, mask=chosen < 0))
        return self._stored(work, results, lost if lost.any() else None, ())

    def _answer(self, work: Work, keys: Ints, counts: Mask) -> tuple[Ints, Mask]:
        """For each key the position of its value, -1 for none; and whether it cannot be told."""
        slots, _, at = work.bags.of(keys)
        slots, at = slots[counts[at]], at[counts[at]]
        answer = np.full(len(keys), -1)
        best = self._best(slots)
        answer[slots[best]] = at[best]
        return answer, (answer < 0) & (work.forgotten[keys] > 0)

    def _best(self, slots: Ints) -> Ints:
        return np.flatnonzero(place_in_slot(slots) == 0)

    def _within_bounds(self, slots: Ints, comes: Mask, forgotten: Ints) -> tuple[Mask, Ints]:
        """What comes is behind what was forgotten, and so is forgotten too."""
        kept = (place_in_slot(slots) < self.most) & ~(comes & (forgotten[slots] > 0))
        return kept, forgotten + np.bincount(slots[~kept], minlength=len(forgotten))


class TableLast(TableFirst):
    """The value of the row that came last."""

    def _best(self, slots: Ints) -> Ints:
        return np.flatnonzero(np.append(slots[1:] != slots[:-1], True)) if len(slots) else slots

    def _within_bounds(self, slots: Ints, comes: Mask, forgotten: Ints) -> tuple[Mask, Ints]:  # noqa: ARG002
        from_the_end = np.bincount(slots, minlength=len(forgotten))[slots] - place_in_slot(slots)
        kept = from_the_end <= self.most
        return kept, forgotten + np.bincount(slots[~kept], minlength=len(forgotten))


class TableCollect(Places):
    """All values that are not null."""

    counts_forgotten = False

    def keep(self, there: Mask, stored: pa.Array, segments: Segments) -> Advanced:
        work = self._opened(there, stored, segments)
        valid = work.values.is_valid().to_numpy(zero_copy_only=False)
        told = [(segments.before_all, *self._lists(work, np.arange(len(there)), valid))]
        refused = []
        for turn in segments.rounds():
            refused.append(self._round(work, turn))
            told.append((segments.after[turn], *self._lists(work, segments.key_of[turn], valid)))
        left_out = np.sort(np.concatenate(refused)) if refused else np.zeros(0, np.int64)
        reason = f"the group has {self.most} values of {self.column!r} already"
        return self._stored(
            work,
            _in_order(told, work.values, segments.versions),
            None,
            (LeftOut(left_out, reason),) if len(left_out) else (),
        )

    @staticmethod
    def _lists(work: Work, keys: Ints, valid: Mask) -> tuple[Ints, Ints]:
        slots, _, at = work.bags.of(keys)
        return np.bincount(slots[valid[at]], minlength=len(keys)), at[valid[at]]

    def _within_bounds(self, slots: Ints, comes: Mask, forgotten: Ints) -> tuple[Mask, Ints]:  # noqa: ARG002
        """What is left out is not remembered: when it goes, it is not found, and that is that."""
        return place_in_slot(slots) < self.most, np.zeros(len(forgotten), np.int64)


def _in_order(told: list[tuple[Ints, Ints, Ints]], values: pa.Array, versions: int) -> pa.Array:
    """Lists told in rounds, in the order of their versions."""
    version, lengths, at = (np.concatenate(each) for each in zip(*told, strict=True))
    starts = np.cumsum(lengths) - lengths
    order = np.empty(versions, np.int64)
    order[version] = np.arange(versions)
    return lists(lengths[order], values.take(pa.array(at[runs(starts[order], lengths[order])])))
