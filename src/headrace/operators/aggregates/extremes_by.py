"""Aggregates that choose a row by another column: `min_by` and `max_by`, and `first` and `last` by
event time. `last(v)` by `t`, over one group of a stream:

    rows in                         state after    result
    tick 1: (t=5, v=a), (t=7, v=b)  t=7, v=b       b
    tick 2: (t=6, v=c)              t=7, v=b       b
    tick 3: (t=7, v=d)              t=7, v=d       d: of equal times, the last to arrive counts

Rows of which `by` is null do not count. Over a table, whose rows can be retracted, a group keeps
its rows, up to a limit: beyond it the rows farthest from the answer are forgotten and only counted.
The *fence* is the `by` of the farthest row that was kept then: as long as rows are forgotten, a row
that is not better than the fence is forgotten, too, since a forgotten one may be better. Once all
kept rows are retracted and forgotten ones remain, the answer is null, and counted as unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask, expand_ranges, offsets_of
from headrace.columnar.keys import encode_keys
from headrace.columnar.segments import Segments
from headrace.errors import BugError
from headrace.operators.aggregates.accumulator import (
    AccumulatorOutcome,
    Bags,
    StoredValueAccumulator,
    TooManyValues,
    index_in_slot,
    lists,
    rank_values,
)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which row is chosen: the one with the largest or the smallest `by`, and of several such rows
    the latest or the earliest to arrive.
    """

    column: str
    type: pa.DataType
    by: str
    by_type: pa.DataType | None
    largest: bool
    latest: bool
    ignore_nulls: bool

    def counts(self, values: pa.Array, by: pa.Array) -> Mask:
        """Which rows count at all."""
        counts: Mask = by.is_valid().to_numpy(zero_copy_only=False)
        if self.ignore_nulls:
            counts &= values.is_valid().to_numpy(zero_copy_only=False)
        return counts

    def ranks(self, by: pa.Array) -> Ints:
        """The rank of each `by`, the best one having the largest; -1 for null."""
        valid = by.is_valid().to_numpy(zero_copy_only=False)
        codes, distinct = rank_values(by.drop_null() if by.null_count else by)
        ranks = np.full(len(by), -1)
        ranks[valid] = codes if self.largest else len(distinct) - 1 - codes
        return ranks


class ExtremeBy(StoredValueAccumulator):
    """The value of the chosen row of a stream."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.state_type = pa.struct(
            [pa.field("value", choice.type), pa.field("by", choice.by_type)]
        )

    def advance_values(
        self, there: Mask, stored: pa.Array, segments: Segments
    ) -> AccumulatorOutcome:
        choice = self.choice
        values = pa.concat_arrays([stored.field(0), segments.column(choice.column)])
        by = pa.concat_arrays([stored.field(1), segments.column(choice.by)])
        # The rows that count in ascending order, the best one last. Stored ones came before all.
        ranks = choice.ranks(by)
        arrival = np.arange(len(values))
        order = np.lexsort((arrival if choice.latest else -arrival, ranks))
        order = order[choice.counts(values, by)[order]]
        score = np.full(len(values), -1)
        score[order] = np.arange(len(order))
        # The best row of each version: the running maximum in its group. The scores of each group
        # are shifted above those of the group before, so that one maximum serves all groups.
        best = np.full(segments.versions, -1)
        best[segments.initial_versions[there]] = score[: len(stored)]
        if len(segments):
            best[segments.after] = np.maximum.reduceat(score[len(stored) :], segments.starts)
        above = np.repeat(
            np.arange(len(segments.firsts)),
            np.diff(segments.initial_versions, append=segments.versions),
        ) * (len(order) + 1)
        best = np.maximum.accumulate(best + above) - above if len(best) else best
        chosen = np.append(order, -1)[best]
        newest = chosen[np.append(segments.initial_versions[1:], segments.versions) - 1]
        kept = pa.array(newest[newest >= 0])
        states = pa.StructArray.from_arrays(
            [values.take(kept), by.take(kept)], fields=list(self.state_type)
        )
        results = values.take(pa.array(chosen, mask=chosen < 0))
        return self.pack_values(results, newest >= 0, states)


@dataclass
class _TablePass:
    """The working set of a call: bags of (row id, index of its value) in order of arrival, the
    numbers of forgotten rows and their fences, and the rows.
    """

    bags: Bags
    forgotten: Ints
    fence: Ints
    ranks: Ints
    """By index, the rank of `by`."""
    id_of_row: Ints
    counts_row: Mask
    first_row: int
    """The index of the first new row."""
    segments: Segments


class TableExtremeBy(StoredValueAccumulator):
    """The value of the chosen row of a table. A row is identified by the table's key; it keeps its
    position among rows with equal `by` as long as its own `by` does not change.
    """

    def __init__(
        self, choice: Choice, row_key: Sequence[str], *, max_values: int, stop_when_full: bool
    ) -> None:
        self.choice = choice
        self.row_key = tuple(row_key)
        self.max_values = max_values
        self.stop_when_full = stop_when_full
        self.state_type = pa.struct(
            [
                pa.field("forgotten", pa.int64()),
                pa.field("fence", choice.by_type),
                pa.field("ids", pa.list_(pa.binary())),
                pa.field("by", pa.list_(choice.by_type)),
                pa.field("values", pa.list_(choice.type)),
            ]
        )

    def advance_values(
        self, there: Mask, stored: pa.Array, segments: Segments
    ) -> AccumulatorOutcome:
        choice = self.choice
        lengths, forgotten, fence = (np.zeros(len(there), np.int64) for _ in range(3))
        lengths[there] = np.diff(offsets_of(stored.field(2)))
        forgotten[there] = stored.field(0).to_numpy()
        known = stored.field(2).flatten()
        of_rows = encode_keys(segments.rows, self.row_key).cast(pa.binary())
        ids = pa.concat_arrays([known, of_rows.take(pa.array(segments.order))]).dictionary_encode()
        codes = ids.indices.to_numpy().astype(np.int64)
        fences = stored.field(1)
        is_fenced = fences.is_valid().to_numpy(zero_copy_only=False)
        values = pa.concat_arrays([stored.field(4).flatten(), segments.column(choice.column)])
        by = pa.concat_arrays(
            [stored.field(3).flatten(), segments.column(choice.by), fences.drop_null()]
        )
        ranks = choice.ranks(by)
        fence[np.flatnonzero(there)[is_fenced]] = ranks[len(values) :]
        work = _TablePass(
            bags=Bags(lengths, codes[: len(known)], np.arange(len(known))),
            forgotten=forgotten,
            fence=fence,
            ranks=ranks,
            id_of_row=codes[len(known) :],
            counts_row=choice.counts(values, by.slice(0, len(values)))[len(known) :],
            first_row=len(known),
            segments=segments,
        )
        chosen = np.full(segments.versions, -1)
        unknown = np.zeros(segments.versions, np.bool_)
        first = segments.initial_versions
        chosen[first], unknown[first] = self._answer(work, np.arange(len(there)))
        for turn in segments.rounds():
            self._apply_round(work, turn)
            after = segments.after[turn]
            chosen[after], unknown[after] = self._answer(work, segments.key_of[turn])
        results = values.take(pa.array(chosen, mask=chosen < 0))
        # Store.
        there = (work.bags.lengths > 0) | (forgotten > 0)
        which = np.flatnonzero(there)
        _, row_ids, at = work.bags.of(which)
        lengths = work.bags.lengths[which]
        parts = [
            pa.array(forgotten[which]),
            self._fences(by, ranks, fence[which], forgotten[which] > 0),
            lists(lengths, ids.dictionary.take(pa.array(row_ids))),
            lists(lengths, by.take(pa.array(at))),
            lists(lengths, values.take(pa.array(at))),
        ]
        states = pa.StructArray.from_arrays(parts, fields=list(self.state_type))
        return self.pack_values(results, there, states, unknown=unknown if unknown.any() else None)

    def _fences(self, by: pa.Array, ranks: Ints, fence: Ints, is_fenced: Mask) -> pa.Array:
        """The `by` of each fence; null for groups without forgotten rows."""
        if not is_fenced.any():
            return pa.nulls(len(fence), self.choice.by_type)
        index_of = np.zeros(int(ranks.max()) + 1, np.int64)
        index_of[ranks[ranks >= 0]] = np.flatnonzero(ranks >= 0)
        return by.take(pa.array(index_of[np.where(is_fenced, fence, 0)], mask=~is_fenced))

    def _best_first(self, work: _TablePass, slots: Ints, at: Ints) -> Ints:
        """The order of entries, which are in order of arrival, by slot and with the best first."""
        arrival = np.arange(len(slots))
        return np.lexsort((-arrival if self.choice.latest else arrival, -work.ranks[at], slots))

    def _answer(self, work: _TablePass, keys: Ints) -> tuple[Ints, Mask]:
        """For each group the index of its value, -1 for none; and whether it is unknown."""
        slots, _, at = work.bags.of(keys)
        order = self._best_first(work, slots, at)
        best = order[index_in_slot(slots[order]) == 0]
        answer = np.full(len(keys), -1)
        answer[slots[best]] = at[best]
        return answer, (answer < 0) & (work.forgotten[keys] > 0)

    def _apply_round(self, work: _TablePass, turn: Ints) -> None:
        """Apply one segment of each of some groups."""
        segments = work.segments
        keys = segments.key_of[turn]
        slots, ids, at = work.bags.of(keys)
        rows = expand_ranges(segments.starts[turn], segments.sizes[turn])
        of_rows = np.repeat(np.arange(len(turn)), segments.sizes[turn])
        of_rows, rows = of_rows[work.counts_row[rows]], rows[work.counts_row[rows]]
        assert segments.signs is not None
        was = np.arange(len(slots) + len(rows)) < len(slots)
        is_added = np.concatenate([np.ones(len(slots), np.bool_), segments.signs[rows] > 0])
        slots = np.concatenate([slots, of_rows])
        ids = np.concatenate([ids, work.id_of_row[rows]])
        at = np.concatenate([at, work.first_row + rows])
        # What becomes of each row, stored or new.
        order = np.lexsort((np.arange(len(slots)), ids, slots))
        new = np.ones(len(order), np.bool_)
        new[1:] = (slots[order][1:] != slots[order][:-1]) | (ids[order][1:] != ids[order][:-1])
        first = order[new]
        last = order[np.append(new[1:], True)] if len(order) else order
        is_removed_forgotten = ~was[first] & ~is_added[first]
        work.forgotten[keys] -= np.bincount(slots[first[is_removed_forgotten]], minlength=len(keys))
        if (work.forgotten[keys] < 0).any():
            raise BugError(f"A row is retracted that was never added, by the key {self.row_key}.")
        stays = is_added[last]
        first, last = first[stays], last[stays]
        in_place = was[first] & (work.ranks[at[first]] == work.ranks[at[last]])
        slots, ids, at, arrival = (
            slots[last], ids[last], at[last], np.where(in_place, first, last)
        )  # fmt: skip
        # Rows that are not better than what is forgotten
        fence, is_fenced = work.fence[keys][slots], work.forgotten[keys][slots] > 0
        ranks = work.ranks[at]
        is_behind = (ranks < fence) if self.choice.latest else (ranks <= fence)
        forgets = ~in_place & is_fenced & is_behind
        # The rows above the limit
        order = np.lexsort((arrival, slots))
        order = order[~forgets[order]]
        best = order[self._best_first(work, slots[order], at[order])]
        is_inside = index_in_slot(slots[best]) < self.max_values
        forgets[best[~is_inside]] = True
        if forgets.any():
            if self.stop_when_full:
                raise TooManyValues(int(keys[slots[forgets][0]]), self.max_values)
            work.forgotten[keys] += np.bincount(slots[forgets], minlength=len(keys))
            # The last row that is kept of each group whose limit was passed is its new fence.
            is_cut = np.append(is_inside[:-1] & ~is_inside[1:], False)
            is_cut &= np.append(slots[best][:-1] == slots[best][1:], False)
            work.fence[keys[slots[best[is_cut]]]] = work.ranks[at[best[is_cut]]]
            order = order[~forgets[order]]
        work.bags.replace(keys, slots[order], ids[order], at[order])
