"""The join of two streams whose bounds are in the left rows: a left row matches the right rows with
the same join key from its own first time to its own last time.

Example: auctions (`opens` is the event time) and bids, until `closes`.

    tick 1   auction A opens 10:00, closes 10:30    state of A: the auction
    tick 2   bid 5 at 10:10                         emits (A, 5), tick 2; state of A: auction, bid
    tick 3   left horizon passes 10:10              drops the bid: no auction still to come may
                                                    begin that early
    tick 4   right horizon passes 10:30             drops the auction

A pair is emitted in the tick in which the later of its rows arrives. A left row is dropped once the
right horizon has passed its own last time, a right row once the left horizon has passed its time by
`before`: no left row matches right rows that are earlier than that. A row behind the horizon of its
own side is late, and is only counted. A left row without a first or last time matches nothing, and
neither does a row whose join key has a null.

The event time of a result is that of its right row. A join whose bounds are the same for all rows
is in `stream_stream`, with rows in chunks; here all rows of a key are read together.

State of a join key:

    rows     `r`, the key             both sides' rows as `windows/state.py` stores rows
    timers   `t`, side, time, key     version 1; the key: the horizon of the other side at which
                                      the first row of a side can be dropped
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.columns import TICK_FIELD
from headrace.columnar.keys import as_array, key_groups
from headrace.columnar.lookup import (
    expand_pairs,
    group_start_mask,
    key_bounds,
    rank_keys,
    search_within,
    sort_order,
)
from headrace.errors import InputError
from headrace.operators.joins.row_store import concat_bytes, entry_names
from headrace.operators.joins.sides import JoinColumns, ResultColumn, Side, join_keys, ticks_of
from headrace.operators.joins.timers import due_keys
from headrace.operators.kernel import (
    Groups,
    KeyedState,
    Times,
    Watermarks,
    microseconds,
)
from headrace.operators.windows.state import TIME, RowStore

_SIDE, _LAST = "_side", "_last"
_TIMERS = ("_left_timer", "_right_timer")
_NO_TIMER = -(1 << 62)
_FAR = 1 << 62
_TIMER_VALUE = pa.scalar(b"\x01", pa.large_binary())
_LEFT, _RIGHT = 0, 1


class IntervalJoin:
    """The kernel of an inner join whose bounds are columns of the left rows.

    Args:
        step: The step's name.
        left: The left input; `since` and `until` are TIMESTAMP columns of it.
        right: The right input.
        columns: The columns of the result.
        before_us: How far a right row may be before its left row, at most.
        after_us: How far a right row may be behind its left row, at most.
        since: The column with the first time that matches; the row's time less `before_us` if None.
        until: The column with the last time that matches.

    After each step `counts` has the number of late rows: `late_left`, `late_right`.
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
        since: str | None = None,
        until: str | None = None,
    ) -> None:
        if left.time is None or right.time is None:
            raise InputError(
                f"Step {step!r} joins streams, and one of them has no event time.",
                fix="declare its topic with event_time=hr.EventTime(...).",
            )
        self.step_name, self.left, self.right = step, left, right
        self.before_us, self.after_us = before_us, after_us
        self.since, self.until = since, until
        self._columns = JoinColumns(step, left, right, columns, "inner")
        fields = (self._columns.left_fields, self._columns.right_fields)
        self._fields = [
            [pa.field(f"{side}={field.name}", field.type) for field in schema]
            for side, schema in enumerate(fields)
        ]
        system = [
            pa.field(_SIDE, pa.bool_()),
            pa.field(_LAST, pa.int64()),
            *(pa.field(name, pa.int64()) for name in _TIMERS),
        ]
        self._store = RowStore(step, [*system, *self._fields[0], *self._fields[1]], with_id=False)
        self.counts: dict[str, int] = {}

    @cached_property
    def output(self) -> pa.Schema:
        return self._columns.schema

    @property
    def hold_us(self) -> int:
        """How far the time of a result can lie behind the earlier watermark of the inputs."""
        return max(0, self.before_us)

    def due(self, state: KeyedState) -> int | None:  # noqa: ARG002
        """None: rows that can only be dropped wait for the next tick."""
        return None

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """1. Leave out late rows. 2. Load all rows of keys with new rows or due timers. 3. Find the
        pairs. 4. Store the rows that may still match one. 5. Emit, in order of tick and key.
        """
        nothing = self.output.append(TICK_FIELD).empty_table()
        if not len(watermarks[0]):
            return nothing
        # 1. and 2. A side's rows are dropped by the horizon of the other side.
        arrivals = [self._arrivals(side, inputs[side], watermarks[side]) for side in (0, 1)]
        self.counts = {"late_left": arrivals[0].late, "late_right": arrivals[1].late}
        horizons = [int(watermarks[1 - side].horizon[-1]) for side in (0, 1)]
        due = [due_keys(state, side, horizons[side]) for side in (0, 1)]
        ranked = rank_keys([*(each.keys for each in arrivals), *due])
        if not len(ranked.keys):
            return nothing
        rows = self._load(state, ranked.keys, ranked.ranks[:2], arrivals)
        # 3. Pairs of which at least one row is new.
        lefts, rights = self._pairs(rows)
        # 4. Store.
        self._retain(state, ranked.keys, rows, horizons)
        # 5. Emit; of one key and tick in order of the left row's arrival, then of the right row's.
        tick_index = np.maximum(rows.tick_index[lefts], rows.tick_index[rights])
        order = sort_order(tick_index, rows.keys[lefts], lefts, rights)
        lefts, rights = lefts[order], rights[order]
        arrays = []
        for source, column, _ in self._columns.columns:
            side = _RIGHT if source == "right" else _LEFT
            index = pa.array(rights if side == _RIGHT else lefts)
            arrays.append(as_array(rows.table.column(f"{side}={column}")).take(index))
        ticks = pa.array(watermarks[0].ticks[tick_index[order]], pa.int64())
        return pa.Table.from_arrays([*arrays, ticks], schema=self.output.append(TICK_FIELD))

    def _arrivals(self, number: int, rows: pa.Table, own: Watermarks) -> _Arrivals:
        """The rows of a side that are not late and may match something."""
        side = (self.left, self.right)[number]
        tick_index, times = own.tick_indices(ticks_of(rows)), side.times(rows)
        is_late = times < own.horizon_before[tick_index]
        keys, is_unused = join_keys(rows, side.on)
        is_unused |= is_late
        first, last = times, times
        if number == _LEFT:
            first, last = times - self.before_us, times + self.after_us
            for name, is_first in ((self.since, True), (self.until, False)):
                if name is None:
                    continue
                bound = as_array(rows.column(name))
                is_unused |= bound.is_null().to_numpy(zero_copy_only=False)
                given = microseconds(bound.fill_null(pa.scalar(0, pa.int64()).cast(bound.type)))
                first = np.maximum(first, given) if is_first else first
                last = last if is_first else np.minimum(last, given)
            is_unused |= first > last
        used = ~is_unused
        return _Arrivals(
            rows.filter(pa.array(used)),
            keys.filter(pa.array(used)),
            first[used],
            last[used],
            tick_index[used],
            int(np.count_nonzero(is_late)),
        )

    def _load(
        self, state: KeyedState, keys: pa.Array, ranks: list[Ints], arrivals: list[_Arrivals]
    ) -> _KeyedRows:
        """The stored rows of the keys, and behind them the new ones of either side. Of a right row
        the first and the last time are its own.
        """
        groups, names = key_groups(keys), RowStore.names(keys)
        counts, stored = self._store.read(state, names, groups)
        tables = [stored.select([field.name for each in self._fields for field in each])]
        for side, each in enumerate(arrivals):
            arrays = {
                field.name: as_array(each.rows.column(field.name.split("=", 1)[1])).cast(field.type)
                for field in self._fields[side]
            }
            arrays |= {
                field.name: pa.nulls(each.rows.num_rows, field.type)
                for field in self._fields[1 - side]
            }
            tables.append(pa.table(arrays, schema=tables[0].schema))
        sides = [np.full(len(each.keys), side) for side, each in enumerate(arrivals)]
        is_right = as_array(stored.column(_SIDE)).to_numpy(zero_copy_only=False)
        return _KeyedRows(
            names=names,
            groups=groups,
            stored=stored,
            stored_counts=counts,
            table=pa.concat_tables(tables).combine_chunks(),
            keys=np.concatenate([np.repeat(np.arange(len(keys)), counts), *ranks]),
            sides=np.concatenate([is_right.astype(np.int64), *sides]),
            first=np.concatenate(
                [as_array(stored.column(TIME)).to_numpy(), *(each.first for each in arrivals)]
            ),
            last=np.concatenate(
                [as_array(stored.column(_LAST)).to_numpy(), *(each.last for each in arrivals)]
            ),
            tick_index=np.concatenate(
                [np.full(stored.num_rows, -1), *(each.tick_index for each in arrivals)]
            ),
        )

    @staticmethod
    def _pairs(rows: _KeyedRows) -> tuple[Ints, Ints]:
        """New left rows with all right rows, stored left rows with new right rows."""
        is_left, is_new = rows.sides == _LEFT, rows.tick_index >= 0
        pairs = []
        for lefts, rights in (
            (np.flatnonzero(is_left & is_new), np.flatnonzero(~is_left)),
            (np.flatnonzero(is_left & ~is_new), np.flatnonzero(~is_left & is_new)),
        ):
            rights = rights[sort_order(rows.keys[rights], rows.first[rights])]  # noqa: PLW2901
            times = rows.first[rights]
            bounds = key_bounds(rows.keys[rights], len(rows.names))
            begin, end = bounds[rows.keys[lefts]], bounds[rows.keys[lefts] + 1]
            low = search_within(times, begin, end, rows.first[lefts], right=False)
            high = search_within(times, low, end, rows.last[lefts], right=True)
            left_index, right_index = expand_pairs(low, high)
            pairs.append((lefts[left_index], rights[right_index]))
        return (
            np.concatenate([left for left, _ in pairs]),
            np.concatenate([right for _, right in pairs]),
        )

    def _retain(
        self, state: KeyedState, keys: pa.Array, rows: _KeyedRows, horizons: list[int]
    ) -> None:
        """Store the rows that the horizon of the other side has not passed, and move timers."""
        is_left = rows.sides == _LEFT
        # The time that the other side's horizon must pass for a row to be of no use.
        needed = np.where(is_left, rows.last, rows.first + self.before_us)
        stays = needed >= np.where(is_left, horizons[_LEFT], horizons[_RIGHT])
        which = np.flatnonzero(stays)
        which = which[sort_order(rows.keys[which], rows.sides[which])]
        counts = np.bincount(rows.keys[which], minlength=len(keys))
        starts = np.flatnonzero(group_start_mask(rows.keys[which]))
        columns = {
            TIME: pa.array(rows.first[which]),
            _SIDE: pa.array(rows.sides[which] == _RIGHT),
            _LAST: pa.array(rows.last[which]),
        }
        entries = []
        for side, name in enumerate(_TIMERS):
            timers = np.full(len(keys), _FAR)
            mine = which[rows.sides[which] == side]
            np.minimum.at(timers, rows.keys[mine], needed[mine] + 1)
            timers[timers == _FAR] = _NO_TIMER
            before = rows.timers(name)
            # A timer that is too early stays until it is due: moving it would cost more.
            is_early = (before != _NO_TIMER) & (before > horizons[side]) & (before < timers)
            timers = np.where((counts > 0) & is_early, before, timers)
            column = np.full(len(which), _NO_TIMER)
            column[starts] = timers[rows.keys[which[starts]]]
            columns[name] = pa.array(column)
            entries.append(_timer_entries(side, keys, rows.groups, before, timers))
        whole = rows.table.take(pa.array(which))
        columns |= {name: whole.column(name) for name in whole.schema.names}
        has_entry = np.flatnonzero((rows.stored_counts > 0) | (counts > 0))
        self._store.write(
            state,
            rows.names.take(pa.array(has_entry)),
            rows.groups[has_entry],
            counts[has_entry],
            pa.table(columns),
        )
        for names, values, groups in entries:
            state.put_array(names, values, groups)


class _Arrivals:
    """The new rows of a side: their keys, the first and the last time of each, and its tick."""

    def __init__(
        self, rows: pa.Table, keys: pa.Array, first: Times, last: Times, ticks: Ints, late: int
    ) -> None:
        self.rows, self.keys, self.first, self.last = rows, keys, first, last
        self.tick_index, self.late = ticks, late


class _KeyedRows:
    """All rows of the keys of a call, stored and new, of both sides."""

    def __init__(
        self,
        *,
        names: pa.Array,
        groups: Groups,
        stored: pa.Table,
        stored_counts: Ints,
        table: pa.Table,
        keys: Ints,
        sides: Ints,
        first: Times,
        last: Times,
        tick_index: Ints,
    ) -> None:
        self.names, self.groups, self.table = names, groups, table
        self.stored_counts, self._stored = stored_counts, stored
        self.keys, self.sides, self.first, self.last = keys, sides, first, last
        self.tick_index = tick_index

    def timers(self, name: str) -> Times:
        """The timer of each key, which is stored with its first row."""
        timers = np.full(len(self.stored_counts), _NO_TIMER)
        has_rows: Mask = self.stored_counts > 0
        starts = np.cumsum(self.stored_counts) - self.stored_counts
        timers[has_rows] = as_array(self._stored.column(name)).to_numpy()[starts[has_rows]]
        return timers


def _timer_entries(
    side: int, keys: pa.Array, groups: Groups, before: Times, after: Times
) -> tuple[pa.Array, pa.Array, Groups]:
    """The entries that move timers, as `timers` reads them."""
    deleted = np.flatnonzero((before != after) & (before != _NO_TIMER))
    added = np.flatnonzero((before != after) & (after != _NO_TIMER))
    which = np.concatenate([deleted, added])
    named = keys.take(pa.array(which)).cast(pa.large_binary())
    values = concat_bytes([_TIMER_VALUE, named.slice(len(deleted))])
    return (
        entry_names(b"t" + bytes([side]), np.concatenate([before[deleted], after[added]]), named),
        pa.concat_arrays([pa.nulls(len(deleted), pa.binary()), values.cast(pa.binary())]),
        groups[which],
    )
