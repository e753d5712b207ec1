"""The join of two streams within a time bound: a left row at time t matches the right rows with the
same join key from t - before to t + after.

Example: `how="left"`, before 5 s, after 0 s; both inputs have the key "a".

    tick 1   left row L1 at 10 s              state: left section of "a": L1, unmatched;
                                                     timer at 10 s for the right watermark
    tick 2   right row R1 at 8 s              emits (L1, R1), tick 2; L1 is flagged as matched
                                              state: left L1 (matched), right R1
    tick 3   left row L2 at 30 s              state: left L1, L2; right R1
    tick 4   right watermark passes 30 s      emits (L2, null), tick 4, and drops L2
    tick 5   right horizon passes 10 s        drops L1: no right row can match it any more
             left horizon passes 13 s         drops R1 (both at the next of 16 times per 5 s)

A pair is emitted in the tick in which the later of its rows arrives. An outer join also emits each
row that matched nothing, once: at the end of the tick in which the watermark of the other side
passes the last time that could match it. A row that arrives for it later does not match it any
more. A row is dropped once the horizon of the other side has passed all times that it could match.
A row behind the horizon of its own side is late, and is only counted. A row whose join key has a
null matches nothing.

The event time of a result is that of its left row, or of its right row where there is no left one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.columns import TICK_FIELD
from headrace.columnar.lookup import (
    expand_pairs,
    key_bounds,
    key_extents,
    mask_at,
    rank_keys,
    search_within,
    sort_order,
)
from headrace.errors import InputError
from headrace.operators.joins.row_store import (
    LOWEST,
    KeyedRowStore,
    RowStoreWriter,
    StateEntries,
    StoredRows,
)
from headrace.operators.joins.sides import (
    JoinColumns,
    ResultColumn,
    Side,
    SideRows,
    join_keys,
    ticks_of,
)
from headrace.operators.joins.timers import (
    due_keys,
    due_listed_keys,
    earliest_timer,
    timer_entries,
    timer_list_entries,
    unloaded_timer_bound,
)
from headrace.operators.kernel import KeyedState, Watermarks

MATCHED = np.uint8(1)
"""Flag of a stored row that has matched a row."""
_DROP_TIMES = 16
"""Rows are dropped at this many times within the width of the join's window: keys that share a time
share a timer list.

So a stored row outlives its use by up to 1/16 of the width, while one that arrives and is passed in
the same batch is never stored. Which rows of no more use are stored at a tick depends on the
batches. No result does: what such a row could match is late.
"""


@dataclass(frozen=True)
class MatchRange:
    """A row at time t matches rows of the other side from t - before_us to t + after_us."""

    before_us: int
    after_us: int


class Arrivals:
    """The rows of one side that arrive in a batch and are not late.

    Kinds of timers: `2 * number` for rows that are emitted unmatched, `2 * number + 1` for rows
    that are dropped.
    """

    deleted_lists: StateEntries
    """The entries that delete the timer lists that were due."""

    def __init__(
        self,
        number: int,
        side: Side,
        rows: pa.Table,
        own: Watermarks,
        other: Watermarks,
        *,
        keeps_unmatched: bool,
    ) -> None:
        """Leave out the late rows.

        Args:
            number: 0 for the left side, 1 for the right.
            side: the input's columns.
            rows: the rows that arrived.
            own: the watermarks of this side.
            other: the watermarks of the side that these rows wait for.
            keeps_unmatched: whether the result has rows of this side that match nothing.
        """
        self.number, self.other, self.keeps_unmatched = number, other, keeps_unmatched
        tick_index, times = own.tick_indices(ticks_of(rows)), side.times(rows)
        is_late = times < own.horizon_before[tick_index]
        self.late = int(np.count_nonzero(is_late))
        keys, has_null = join_keys(rows, side.on)
        used = ~is_late if keeps_unmatched else ~is_late & ~has_null
        if not used.all():
            rows, keys = rows.filter(pa.array(used)), keys.filter(pa.array(used))
            tick_index, times, has_null = tick_index[used], times[used], has_null[used]
        self.rows = rows
        self.keys = keys
        self.tick_index = tick_index
        self.times = times
        self.has_null = has_null

    def due_keys(self, state: KeyedState) -> pa.Array:
        """The keys with rows to emit unmatched or to drop."""
        drop_keys, self.deleted_lists = due_listed_keys(
            state, 2 * self.number + 1, int(self.other.horizon[-1])
        )
        if not self.keeps_unmatched:
            return drop_keys
        unmatched_keys = due_keys(state, 2 * self.number, int(self.other.watermark[-1]))
        return pa.concat_arrays([unmatched_keys, drop_keys])


class BufferedSide:
    """All rows of one side that a batch looks at, stored and new, in order of key and time; of
    equal times the stored ones first, then in order of arrival.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        keys: Ints,
        is_due: Mask,
        match_range: MatchRange,
        stored_fields: pa.Schema,
        row_store: KeyedRowStore,
        probed: tuple[Ints, Ints],
    ) -> None:
        """Load the stored rows.

        Args:
            arrivals: the new rows.
            keys: the key index of each new row.
            is_due: by key, whether one of its timers is due.
            match_range: the times of the other side that match a row of this side.
            stored_fields: the columns that are stored.
            row_store: the stored rows of both sides.
            probed: by key, the first and the last time that new rows of the other side match.
        """
        self.arrivals, self.match_range = arrivals, match_range
        self.row_store, self.is_due = row_store, is_due
        arrived = key_extents(len(row_store), keys, arrivals.times, arrivals.times)
        low, high = np.minimum(arrived[0], probed[0]), np.maximum(arrived[1], probed[1])
        passed = max(int(arrivals.other.watermark[-1]) - match_range.after_us, LOWEST)
        stored = row_store.load(
            arrivals.number,
            np.where(is_due, LOWEST, low),
            np.where(is_due, np.maximum(high, passed), high),
        )
        self.rows = SideRows(stored_fields, stored.rows, arrivals.rows)
        all_keys = np.concatenate([stored.keys, keys])
        all_times = np.concatenate([stored.sort_keys, arrivals.times])
        all_flags = np.concatenate([stored.flags & MATCHED, np.zeros(len(keys), np.uint8)])
        self.row = sort_order(all_keys, all_times)
        self.keys, self.times = all_keys[self.row], all_times[self.row]
        self.is_new = self.row >= len(stored)
        self.was_matched = all_flags[self.row].astype(np.bool_)
        # The index of the tick in which each row arrived; -1 for stored rows.
        self.tick_index = np.concatenate([np.full(len(stored), -1), arrivals.tick_index])[self.row]
        # Rows whose join key has a null.
        self.never_matches = np.concatenate([np.zeros(len(stored), np.bool_), arrivals.has_null])[
            self.row
        ]
        self.key_bounds = key_bounds(self.keys, len(row_store))

    def __len__(self) -> int:
        return len(self.row)

    def unmatched_tick_index(self) -> Ints:
        """The index of the tick at whose end each row is emitted if it has not matched by then; the
        number of ticks if that is after this batch.
        """
        passed = np.searchsorted(
            self.arrivals.other.watermark, self.times + self.match_range.after_us, side="right"
        )
        return np.where(self.never_matches, self.tick_index, np.maximum(passed, self.tick_index))

    def store(self, writer: RowStoreWriter, is_matched: Mask, is_emitted: Mask) -> None:
        """Store the rows that may still match a row. Drop those that were emitted unmatched, and
        those that the horizon of the other side has passed.
        """
        horizon = int(self.arrivals.other.horizon[-1])
        stays = (
            ~is_emitted & ~self.never_matches & (self.times + self.match_range.after_us >= horizon)
        )
        is_touched = np.where(self.is_new, stays, ~stays | (is_matched != self.was_matched))
        which = np.flatnonzero(stays)
        number = self.arrivals.number
        width_us = self.match_range.before_us + self.match_range.after_us
        drop_step_us = max(1, width_us // _DROP_TIMES)
        if self.arrivals.keeps_unmatched:
            self._set_timers(2 * number, which[~is_matched[which]])
            self._set_timers(2 * number + 1, which[is_matched[which]], step_us=drop_step_us)
        else:
            self._set_timers(2 * number + 1, which, step_us=drop_step_us)
        if is_touched.any():
            rows = StoredRows(
                keys=self.keys[which],
                sort_keys=self.times[which],
                flags=np.where(is_matched, MATCHED, np.uint8(0))[which],
                rows=self.rows.bytes(self.row[which]),
            )
            writer.replace(number, rows, self.keys[is_touched], self.times[is_touched])

    def _set_timers(self, kind: int, waiting: Ints, *, step_us: int = 1) -> None:
        """Set the timers of a kind to the first row of each key that waits for it, rounded up to a
        multiple of `step_us`.
        """
        register = self.row_store.registers[kind]
        delay_us = self.match_range.after_us + 1
        register[:] = unloaded_timer_bound(
            self.row_store, self.arrivals.number, kind, self.is_due, delay_us
        )
        times = self.times[waiting] + delay_us
        rounded = times if step_us == 1 else -(-times // step_us) * step_us
        np.minimum.at(register, self.keys[waiting], rounded)


class StreamStreamJoin:
    """The kernel of a join of two streams.

    `before_us` and `after_us` say how far a right row may lie before and after its left row; a
    negative one puts the bound on the other side of the left row. After each step `counts` has the
    number of late rows: `late_left`, `late_right`.
    """

    def __init__(
        self,
        step: str,
        left: Side,
        right: Side,
        columns: Sequence[ResultColumn],
        *,
        before_us: int,
        after_us: int,
        how: str = "inner",
    ) -> None:
        if before_us + after_us < 0:
            raise InputError(
                f"Step {step!r} joins rows from {-before_us} to {after_us} µs apart, and no two"
                " are.",
                fix="let before= and after= leave some time between them.",
            )
        if left.time is None or right.time is None:
            raise InputError(
                f"Step {step!r} joins streams, and one of them has no event time.",
                fix="declare its topic with event_time=hr.EventTime(...).",
            )
        self.step_name, self.how = step, how
        self.left, self.right = left, right
        self._columns = JoinColumns(step, left, right, columns, how)
        self._ranges = MatchRange(before_us, after_us), MatchRange(after_us, before_us)
        self.counts: dict[str, int] = {}

    @cached_property
    def output(self) -> pa.Schema:
        return self._columns.schema

    @property
    def hold_us(self) -> int:
        """How far the time of a result can lie behind the earlier watermark of the inputs: the
        watermarks of the result are held back so far.
        """
        left_us = self._ranges[0].after_us
        right_us = self._ranges[1].after_us if self._columns.keeps_right else 0
        return max(0, left_us, right_us)

    def due(self, state: KeyedState) -> int | None:
        """The time at which the next unmatched row may be emitted. Rows that can only be dropped do
        not count: they wait for the next tick.
        """
        times = [earliest_timer(state, kind) for kind in (0, 2)]
        return min((time for time in times if time is not None), default=None)

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """1. Leave out late rows. 2. Load the rows that they can match, and those whose timers are
        due. 3. Find the pairs. 4. Find the unmatched rows to emit. 5. Store. 6. Emit.
        """
        if not len(watermarks[0]):
            return self.output.append(TICK_FIELD).empty_table()
        # 1. Leave out late rows.
        keeps = self._columns.keeps_left, self._columns.keeps_right
        arrivals = [
            Arrivals(
                number,
                (self.left, self.right)[number],
                inputs[number],
                own=watermarks[number],
                other=watermarks[1 - number],
                keeps_unmatched=keeps[number],
            )
            for number in range(2)
        ]
        self.counts = {"late_left": arrivals[0].late, "late_right": arrivals[1].late}
        # 2. Load. Keys of a fixed size are quicker to compare; those of the left input are, unless
        # one of them has a null.
        keys = [side.keys for side in arrivals]
        due = [side.due_keys(state).cast(keys[0].type) for side in arrivals]
        ranked = rank_keys([*keys, *due])
        row_store = KeyedRowStore(self.step_name, state, ranked.keys, sections=2, registers=4)
        fields = self._columns.left_fields, self._columns.right_fields
        # The times of the other side that the new rows of each side match, by key.
        probed = [
            key_extents(
                len(row_store),
                ranked.ranks[number],
                arrivals[number].times - self._ranges[number].before_us,
                arrivals[number].times + self._ranges[number].after_us,
            )
            for number in range(2)
        ]
        left, right = (
            BufferedSide(
                arrivals[number],
                keys=ranked.ranks[number],
                is_due=mask_at(len(row_store), ranked.ranks[2 + number]),
                match_range=self._ranges[number],
                stored_fields=fields[number],
                row_store=row_store,
                probed=probed[1 - number],
            )
            for number in range(2)
        )
        # 3. and 4. Pairs, and unmatched rows.
        pairs = self._find_pairs(left, right)
        pair_tick_index = np.maximum(left.tick_index[pairs[0]], right.tick_index[pairs[1]])
        is_match, unmatched_at = _resolve_pairs((left, right), pairs, pair_tick_index, keeps)
        lefts, rights = pairs[0][is_match], pairs[1][is_match]
        pair_tick_index = pair_tick_index[is_match]
        # 5. Store.
        writer = RowStoreWriter(row_store)
        tick_count = len(watermarks[0])
        for side, matched, unmatched in zip(
            (left, right), (lefts, rights), unmatched_at, strict=True
        ):
            is_matched = side.was_matched.copy()
            is_matched[matched] = True
            side.store(writer, is_matched, unmatched < tick_count)
        last_tick = int(watermarks[0].ticks[-1])
        writer.save(
            [
                arrivals[0].deleted_lists,
                arrivals[1].deleted_lists,
                *(timer_list_entries(row_store, kind, last_tick) for kind in (1, 3)),
                *(timer_entries(row_store, kind) for kind in (0, 2)),
            ]
        )
        # 6. Emit in order of tick, key, left row and right row; an unmatched right row follows the
        # left rows of its key.
        left_alone, right_alone = (np.flatnonzero(each < tick_count) for each in unmatched_at)
        behind_left = 2 * left.key_bounds[right.keys[right_alone] + 1] - 1
        rank = np.concatenate([2 * lefts, 2 * left_alone, behind_left])
        tick_index = np.concatenate(
            [pair_tick_index, unmatched_at[0][left_alone], unmatched_at[1][right_alone]]
        )
        lefts = np.concatenate([lefts, left_alone, np.full(len(right_alone), -1)])
        rights = np.concatenate([rights, np.full(len(left_alone), -1), right_alone])
        order = sort_order(tick_index, rank, rights)
        columns = self._columns.arrays(
            left.rows,
            np.append(left.row, -1)[lefts[order]],
            right.rows,
            np.append(right.row, -1)[rights[order]],
        )
        ticks = pa.array(watermarks[0].ticks[tick_index[order]], pa.int64())
        return pa.Table.from_arrays([*columns, ticks], schema=self.output.append(TICK_FIELD))

    def _find_pairs(self, left: BufferedSide, right: BufferedSide) -> tuple[Ints, Ints]:
        """Rows within the bounds of each other of which at least one is new: new left rows with all
        right rows, stored left rows with new right rows.
        """
        can_match = ~right.never_matches
        pairs = [
            self._pairs_within(
                left,
                np.flatnonzero(left.is_new & ~left.never_matches),
                right,
                np.flatnonzero(can_match),
            )
        ]
        if not left.is_new.all():
            pairs.append(
                self._pairs_within(
                    left,
                    np.flatnonzero(~left.is_new),
                    right,
                    np.flatnonzero(right.is_new & can_match),
                )
            )
        return (
            np.concatenate([lefts for lefts, _ in pairs]),
            np.concatenate([rights for _, rights in pairs]),
        )

    def _pairs_within(
        self, left: BufferedSide, lefts: Ints, right: BufferedSide, rights: Ints
    ) -> tuple[Ints, Ints]:
        """All pairs of some left and some right rows within the bounds of each other."""
        times, keys = left.times[lefts], left.keys[lefts]
        right_times = right.times[rights]
        begin = np.searchsorted(rights, right.key_bounds)
        first, end = begin[keys], begin[keys + 1]
        earliest, latest = times - self._ranges[0].before_us, times + self._ranges[0].after_us
        low = search_within(right_times, first, end, earliest, right=False)
        high = search_within(right_times, low, end, latest, right=True)
        left_index, right_index = expand_pairs(low, high)
        return lefts[left_index], rights[right_index]


def _resolve_pairs(
    sides: tuple[BufferedSide, BufferedSide],
    pairs: tuple[Ints, Ints],
    pair_tick_index: Ints,
    keeps: tuple[bool, bool],
) -> tuple[Mask, tuple[Ints, Ints]]:
    """Decide which pairs match, and when rows are emitted unmatched.

    A row that was emitted unmatched matches nothing any more, so pairs that would come after that
    are decided tick by tick. There are such pairs only where rows arrive behind the watermark and
    not behind the horizon.

    Returns:
        Which pairs match; and for each row of either side the index of the tick at whose end it is
        emitted unmatched, the number of ticks if it is not.
    """
    tick_count = len(sides[0].arrivals.other)
    emit_at = [
        side.unmatched_tick_index() if keep else np.full(len(side), tick_count)
        for side, keep in zip(sides, keeps, strict=True)
    ]
    first_match_at = [np.where(side.was_matched, -1, tick_count) for side in sides]

    def note_matches(which: Ints) -> None:
        for number in range(2):
            np.minimum.at(first_match_at[number], pairs[number][which], pair_tick_index[which])

    is_match = (pair_tick_index <= emit_at[0][pairs[0]]) & (pair_tick_index <= emit_at[1][pairs[1]])
    note_matches(np.flatnonzero(is_match))
    undecided = np.flatnonzero(~is_match)
    for tick_index in np.unique(pair_tick_index[undecided]):
        of_tick = undecided[pair_tick_index[undecided] == tick_index]
        can_match = np.ones(len(of_tick), np.bool_)
        for number in range(2):
            rows = pairs[number][of_tick]
            has_matched = first_match_at[number][rows] <= emit_at[number][rows]
            can_match &= has_matched | (tick_index <= emit_at[number][rows])
        is_match[of_tick[can_match]] = True
        note_matches(of_tick[can_match])
    left_at, right_at = (
        np.where(first_match_at[number] <= emit_at[number], tick_count, emit_at[number])
        for number in range(2)
    )
    return is_match, (left_at, right_at)
