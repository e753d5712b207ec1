"""The joins of a stream with the versions of a table: each row matches the version that was valid
at the row's own time, whatever arrives when. `VersionedJoin` waits and emits a stream;
`CorrectedJoin` emits at once, and corrects.

Example: orders joined with the price at their time (key `item`, event time `since`).

    tick 1   prices: (tea, 3 €, since 10:00)       state of "tea": version 10:00
    tick 2   orders: (1, tea, at 11:30)

             VersionedJoin: the watermark of prices is 11:00: order 1 waits in the state
    tick 3   prices: (tea, 5 €, since 11:00)       state: versions 10:00, 11:00; order 1
    tick 4   watermark of prices passes 11:30      emits (1, tea, 5 €), tick 4, and drops order 1

             CorrectedJoin:
    tick 2                                         emits insert (1, tea, 3 €); state: order 1
    tick 3   prices: (tea, 5 €, since 11:00)       emits update (1, tea, 3 €) -> (1, tea, 5 €)

In both, versions are kept for `history` behind the earlier watermark of the two inputs, and the
newest one before that (see `timeline.py`). Rows older than that are left out and counted
(`counts["too_old"]`). A row whose join key has a null matches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.columns import CHANGE_FIELD, TICK_FIELD
from headrace.columnar.lookup import (
    KeyRanks,
    expand_pairs,
    group_start_mask,
    key_bounds,
    key_extents,
    mask_at,
    rank_keys,
    search_within,
    sort_order,
)
from headrace.errors import InputError
from headrace.operators.joins.row_store import (
    HIGHEST,
    LOWEST,
    KeyedRowStore,
    RowStoreWriter,
    StoredRows,
)
from headrace.operators.joins.sides import (
    JoinColumns,
    ResultColumn,
    Side,
    SideRows,
    join_keys,
    merge_changes,
    ticks_of,
)
from headrace.operators.joins.timeline import (
    DROP_TIMER,
    Timeline,
    check_versioned,
    history_start,
)
from headrace.operators.joins.timers import (
    due_keys,
    earliest_timer,
    timer_entries,
    unloaded_timer_bound,
)
from headrace.operators.kernel import KeyedState, Times, Watermarks, microseconds

_VERSIONS, _ROWS = 0, 1
"""The sections of the row store."""
_ROW_TIMER = 0
"""The kind of timer at which waiting rows are emitted, or rows that can be corrected are
dropped.
"""


def _checked_columns(
    step: str, stream: Side, table: Side, columns: Sequence[ResultColumn], how: str
) -> JoinColumns:
    """The columns of a versioned join, once its inputs are checked."""
    if how not in {"inner", "left"}:
        raise InputError(
            f"Step {step!r} joins a stream with versions how={how!r}.",
            fix='choose how="inner" or how="left".',
        )
    join_columns = JoinColumns(step, stream, table, columns, how)
    check_versioned(step, table)
    if stream.time is None:
        raise InputError(
            f"Step {step!r} joins a stream without a time with versions.",
            fix="say at which time a row looks: table.as_of(column).",
        )
    return join_columns


@dataclass(frozen=True)
class _JoinBatch:
    """What both joins find out about a batch before they load rows."""

    row_store: KeyedRowStore
    ranked: KeyRanks
    """The keys of: rows, versions, rows whose timers are due, versions that are to be dropped."""
    history_before: Times
    """By tick, the start of the history before it."""
    history_from: Times
    """By tick, the start of the history after it."""
    times: Times
    tick_index: Ints
    has_null: Mask
    used: Ints
    """The rows that are neither too old nor without a key in an inner join, in order of key."""
    too_old: int


def _open_batch(
    join: VersionedJoin | CorrectedJoin,
    state: KeyedState,
    inputs: Sequence[pa.Table],
    watermarks: Sequence[Watermarks],
    *,
    due_us: int,
) -> _JoinBatch:
    """Find the keys of a batch, the start of the history, and the rows that are used. Timers of
    rows are due at `due_us`, those of versions at the earlier watermark.
    """
    rows, changes = inputs
    own, table = watermarks
    keys, has_null = join_keys(rows, join.stream.on)
    changed_keys, _ = join_keys(changes, join.table.on)
    earlier_watermark = int(min(own.watermark[-1], table.watermark[-1]))
    row_keys = due_keys(state, _ROW_TIMER, due_us).cast(keys.type)
    drop_keys = due_keys(state, DROP_TIMER, earlier_watermark).cast(keys.type)
    ranked = rank_keys([keys, changed_keys, row_keys, drop_keys])
    history_before = history_start([own.watermark_before, table.watermark_before], join.history_us)
    times = microseconds(rows.column(join.stream.time))
    tick_index = own.tick_indices(ticks_of(rows))
    is_old = times < history_before[tick_index]
    is_unused = is_old | (has_null & (join.how == "inner"))
    order = ranked.orders[0]
    return _JoinBatch(
        row_store=KeyedRowStore(join.step_name, state, ranked.keys, sections=2, registers=2),
        ranked=ranked,
        history_before=history_before,
        history_from=history_start([own.watermark, table.watermark], join.history_us),
        times=times,
        tick_index=tick_index,
        has_null=has_null,
        used=order[~is_unused[order]] if is_unused.any() else order,
        too_old=int(np.count_nonzero(is_old)),
    )


class VersionedJoin:
    """The join that waits for the table's watermark, and emits a stream.

    A row waits until the watermark of the table has passed its time, and is emitted at the end of
    that tick with the version that is known then. A version that arrives behind the watermark is
    counted (`counts["late_versions"]`): it changes nothing that was emitted, and holds for all rows
    that are emitted from then on.

    `stream.time` is the time at which a row looks, `table.time` the time from which a version is
    valid. The table is joined on its key.
    """

    hold_us = 0  # waiting rows are not before the watermark of the table

    def __init__(
        self,
        step: str,
        stream: Side,
        table: Side,
        columns: Sequence[ResultColumn],
        *,
        history_us: int,
        how: str = "inner",
    ) -> None:
        self.step_name, self.how, self.history_us = step, how, history_us
        self.stream, self.table = stream, table
        self._columns = _checked_columns(step, stream, table, columns, how)
        self.counts: dict[str, int] = {}

    @cached_property
    def output(self) -> pa.Schema:
        return self._columns.schema

    def due(self, state: KeyedState) -> int | None:
        """The watermark of the table at which the first waiting row can be emitted."""
        return earliest_timer(state, _ROW_TIMER)

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """1. Find the keys: of rows, of versions, and of timers that are due. 2. Load. 3. Store the
        rows that wait, and the versions that rows may look for. 4. Emit.
        """
        rows, changes = inputs
        own, table = watermarks
        if not len(own):
            return self.output.append(TICK_FIELD).empty_table()
        # 1. Find the keys.
        batch = _open_batch(self, state, inputs, watermarks, due_us=int(table.watermark[-1]))
        row_store, ranked = batch.row_store, batch.ranked
        # 2. Load.
        waiting = _WaitingRows(
            rows,
            which=batch.used,
            keys=ranked.ranks[0],
            times=batch.times,
            tick_index=batch.tick_index,
            has_null=batch.has_null,
            table=table,
        )
        waiting.load(row_store, mask_at(len(row_store), ranked.ranks[2]), self._columns.left_fields)
        timeline = Timeline(self.table, self._columns.right_fields, changes, ranked.ranks[1], table)
        timeline.load(
            row_store,
            requested=waiting.requested_times(),
            is_due=mask_at(len(row_store), ranked.ranks[3]),
            history=(batch.history_before, batch.history_from),
        )
        is_late = timeline.fresh_valid_from < table.watermark_before[timeline.fresh_tick_index]
        self.counts = {
            "late_versions": int(np.count_nonzero(is_late)),
            "too_old": batch.too_old,
        }
        # 3. Store.
        writer = RowStoreWriter(row_store)
        waiting.store(writer)
        timeline.store(writer, self.history_us)
        writer.save([timer_entries(row_store, kind) for kind in (_ROW_TIMER, DROP_TIMER)])
        # 4. Emit in order of tick, key, time and arrival.
        which = np.flatnonzero(waiting.emit_at < len(own))
        version = timeline.version_at(
            waiting.keys[which], waiting.times[which], waiting.emit_at[which]
        )
        is_row = (version >= 0) & ~np.append(timeline.is_delete, True)[version]
        version = np.where(is_row, version, -1)
        if self.how == "inner":
            which, version = which[is_row], version[is_row]
        order = sort_order(waiting.emit_at[which])
        which, version = which[order], version[order]
        columns = self._columns.arrays(
            waiting.rows, waiting.row[which], timeline.rows, np.append(timeline.row, -1)[version]
        )
        ticks = pa.array(own.ticks[waiting.emit_at[which]], pa.int64())
        return pa.Table.from_arrays([*columns, ticks], schema=self.output.append(TICK_FIELD))


class _WaitingRows:
    """The rows of a batch that wait for the table's watermark or are emitted, stored and new, in
    order of key, time and arrival. `emit_at` is the index of the tick at whose end a row is
    emitted; the number of ticks if it waits on.
    """

    def __init__(
        self,
        rows: pa.Table,
        *,
        which: Ints,
        keys: Ints,
        times: Times,
        tick_index: Ints,
        has_null: Mask,
        table: Watermarks,
    ) -> None:
        """Take the rows that are used (`which`, in order of key); the other columns are by row."""
        self._table, self._fresh, self._which = table, rows, which
        self._keys, self._times, self._has_null = keys[which], times[which], has_null[which]
        self._tick_index = tick_index[which]

    def load(self, row_store: KeyedRowStore, is_due: Mask, fields: pa.Schema) -> None:
        """Load the waiting rows of keys whose timers are due, and the neighbours of new ones."""
        self._row_store, self._is_due = row_store, is_due
        emit_at = np.searchsorted(self._table.watermark, self._times, side="right")
        emit_at = np.maximum(emit_at, self._tick_index)
        waits = (emit_at >= len(self._table)) & ~self._has_null
        low, high = key_extents(
            len(row_store), self._keys[waits], self._times[waits], self._times[waits]
        )
        watermark = int(self._table.watermark[-1])
        stored = row_store.load(
            _ROWS,
            np.where(is_due, LOWEST, low),
            np.where(is_due, np.maximum(high, watermark), high),
        )
        self.rows = SideRows(fields, stored.rows, self._fresh)
        keys = np.concatenate([stored.keys, self._keys])
        times = np.concatenate([stored.sort_keys, self._times])
        emit_at = np.concatenate(
            [
                np.searchsorted(self._table.watermark, stored.sort_keys, side="right"),
                np.where(self._has_null, self._tick_index, emit_at),
            ]
        )
        row = np.concatenate([np.arange(len(stored)), len(stored) + self._which])
        order = sort_order(keys, times)
        self.keys, self.times = keys[order], times[order]
        self.emit_at, self.row = emit_at[order], row[order]
        self._is_new = self.row >= len(stored)

    def requested_times(self) -> tuple[Ints, Ints]:
        """By key, the first and the last time that emitted rows look for; the first is above the
        last if there are none.
        """
        is_emitted = self.emit_at < len(self._table)
        times = self.times[is_emitted]
        return key_extents(len(self._row_store), self.keys[is_emitted], times, times)

    def store(self, writer: RowStoreWriter) -> None:
        """Store the rows that wait on, and set their timers to just after their times."""
        waits = self.emit_at >= len(self._table)
        which = np.flatnonzero(waits)
        register = self._row_store.registers[_ROW_TIMER]
        register[:] = unloaded_timer_bound(
            self._row_store, _ROWS, _ROW_TIMER, self._is_due, delay_us=1
        )
        np.minimum.at(register, self.keys[which], self.times[which] + 1)
        is_touched = np.where(self._is_new, waits, ~waits)
        if is_touched.any():
            rows = StoredRows(
                keys=self.keys[which],
                sort_keys=self.times[which],
                flags=np.zeros(len(which), np.uint8),
                rows=self.rows.bytes(self.row[which]),
            )
            writer.replace(_ROWS, rows, self.keys[is_touched], self.times[is_touched])


class CorrectedJoin:
    """The join that emits at once, and corrects: when a version arrives that was valid at the time
    of a row that was emitted already, the result is retracted and emitted anew.

    The result is a table, keyed by the key of the stream's rows (`key`). That key should be unique
    in the stream; `NewestKernel` makes it so where it is not. Rows are kept for `history_us` behind
    the earlier watermark of the inputs, and are not corrected after that. `counts["late_versions"]`
    counts the versions from before the start of the history.
    """

    hold_us = 0  # rows are emitted in their own tick: no watermark is held back

    def __init__(
        self,
        step: str,
        stream: Side,
        table: Side,
        columns: Sequence[ResultColumn],
        *,
        history_us: int,
        how: str = "inner",
    ) -> None:
        self.step_name, self.how, self.history_us = step, how, history_us
        self.stream, self.table = stream, table
        self._columns = _checked_columns(step, stream, table, columns, how)
        names = {
            column: name
            for source, column, name in self._columns.columns
            if source in {"left", "key"}
        }
        missing = [column for column in stream.key if column not in names]
        if not stream.key or missing:
            lacks = repr(missing[0]) if stream.key else "what identifies a row"
            raise InputError(
                f"The result of step {step!r} is a table, and lacks {lacks}.",
                fix="keep the columns that identify a row.",
            )
        self.key = tuple(names[column] for column in stream.key)
        self.counts: dict[str, int] = {}

    @property
    def lateness_us(self) -> int:
        """How far a correction can lie behind the watermarks."""
        return self.history_us

    @cached_property
    def output(self) -> pa.Schema:
        return self._columns.schema.append(CHANGE_FIELD)

    def due(self, state: KeyedState) -> int | None:  # noqa: ARG002
        """None: no row waits for a watermark."""
        return None

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """1. Find the keys. 2. Load versions, and the rows that new versions are valid for. 3.
        Store what may be corrected. 4. Emit and correct.
        """
        rows, changes = inputs
        own, table = watermarks
        if not len(own):
            return self.output.append(TICK_FIELD).empty_table()
        # 1. Find the keys.
        due_us = int(min(own.watermark[-1], table.watermark[-1]))
        batch = _open_batch(self, state, inputs, watermarks, due_us=due_us)
        row_store, ranked = batch.row_store, batch.ranked
        # 2. Load.
        correctable = _CorrectableRows(
            rows,
            which=batch.used,
            keys=ranked.ranks[0],
            times=batch.times,
            tick_index=batch.tick_index,
            has_null=batch.has_null,
        )
        timeline = Timeline(self.table, self._columns.right_fields, changes, ranked.ranks[1], table)
        timeline.load(
            row_store,
            requested=correctable.times_by_key(len(row_store)),
            is_due=mask_at(len(row_store), ranked.ranks[3]),
            history=(batch.history_before, batch.history_from),
        )
        correctable.load(
            row_store,
            is_due=mask_at(len(row_store), ranked.ranks[2]),
            history_from=batch.history_from,
            timeline=timeline,
            fields=self._columns.left_fields,
        )
        is_late = timeline.fresh_valid_from < batch.history_before[timeline.fresh_tick_index]
        self.counts = {
            "late_versions": int(np.count_nonzero(is_late)),
            "too_old": batch.too_old,
        }
        # 3. Store.
        writer = RowStoreWriter(row_store)
        correctable.store(writer, int(batch.history_from[-1]), self.history_us)
        timeline.store(writer, self.history_us)
        writer.save([timer_entries(row_store, kind) for kind in (_ROW_TIMER, DROP_TIMER)])
        return self._emit(correctable, timeline, batch.history_before, own)

    def _emit(
        self,
        correctable: _CorrectableRows,
        timeline: Timeline,
        history_before: Times,
        watermarks: Watermarks,
    ) -> pa.Table:
        """The successive results of each row, each of which replaces the one before; in order of
        tick, key, time and arrival.
        """
        row, tick_index, version = correctable.results(timeline, history_before)
        version = np.where(np.append(timeline.is_delete, True)[version], -1, version)
        is_first = group_start_mask(row)
        is_row = (version >= 0) | (self.how == "left")
        removed = np.flatnonzero(~is_first & np.append(False, is_row)[:-1])
        added = np.flatnonzero(is_row & (tick_index >= 0))
        which = np.concatenate([removed, added])
        shown = np.concatenate([version[removed - 1], version[added]])
        is_insertion = np.arange(len(which)) >= len(removed)
        order = sort_order(tick_index[which], row[which], is_insertion.astype(np.int64))
        which, shown, is_insertion = which[order], shown[order], is_insertion[order]
        columns = self._columns.arrays(
            correctable.rows,
            correctable.row[row[which]],
            timeline.rows,
            np.append(timeline.row, -1)[shown],
        )
        is_second = ~group_start_mask(tick_index[which], row[which])
        kinds, is_emitted = merge_changes(columns, is_second, is_insertion)
        ticks = pa.array(watermarks.ticks[tick_index[which]], pa.int64())
        result = pa.Table.from_arrays(
            [*columns, kinds, ticks], schema=self.output.append(TICK_FIELD)
        )
        return result if is_emitted.all() else result.filter(pa.array(is_emitted))


class _CorrectableRows:
    """The rows of the stream in a batch, stored and new, in order of key, time and arrival.
    `tick_index` is that of the tick in which a row arrived, -1 for a stored one.
    """

    def __init__(
        self,
        rows: pa.Table,
        *,
        which: Ints,
        keys: Ints,
        times: Times,
        tick_index: Ints,
        has_null: Mask,
    ) -> None:
        """Take the rows that are used (`which`, in order of key); the other columns are by row."""
        self._fresh, self._which = rows, which
        self._keys, self._times = keys[which], times[which]
        self._tick_index, self._has_null = tick_index[which], has_null[which]

    def times_by_key(self, count: int) -> tuple[Ints, Ints]:
        """The first and the last time of each key's new rows."""
        return key_extents(count, self._keys, self._times, self._times)

    def load(
        self,
        row_store: KeyedRowStore,
        *,
        is_due: Mask,
        history_from: Times,
        timeline: Timeline,
        fields: pa.Schema,
    ) -> None:
        """Load the rows that new versions are valid for, those that can be dropped, and the
        neighbours of new ones.
        """
        fresh = np.flatnonzero(timeline.tick_index >= 0)
        next_version = timeline.next(fresh, timeline.tick_index[fresh])
        valid_to = np.append(timeline.valid_from, HIGHEST)[next_version]
        corrected = key_extents(
            len(row_store), timeline.keys[fresh], timeline.valid_from[fresh], valid_to
        )
        arrived = self.times_by_key(len(row_store))
        low, high = np.minimum(corrected[0], arrived[0]), np.maximum(corrected[1], arrived[1])
        self._row_store, self._is_due = row_store, is_due
        stored = row_store.load(
            _ROWS,
            np.where(is_due, LOWEST, low),
            np.where(is_due, np.maximum(high, history_from[-1]), high),
        )
        self.rows = SideRows(fields, stored.rows, self._fresh)
        keys = np.concatenate([stored.keys, self._keys])
        times = np.concatenate([stored.sort_keys, self._times])
        tick_index = np.concatenate([np.full(len(stored), -1), self._tick_index])
        has_null = np.concatenate([np.zeros(len(stored), np.bool_), self._has_null])
        row = np.concatenate([np.arange(len(stored)), len(stored) + self._which])
        order = sort_order(keys, times)
        self.keys, self.times = keys[order], times[order]
        self.tick_index, self.has_null = tick_index[order], has_null[order]
        self.row = row[order]

    def results(self, timeline: Timeline, history_before: Times) -> tuple[Ints, Ints, Ints]:
        """The results of the rows that are new or corrected, in order of row and tick.

        Returns:
            The row, the index of the tick, and the version that the row matches from then on. A
            stored row that is corrected comes first with the version that it matched before (-1).
        """
        corrected, version = self._corrections(timeline, history_before)
        new = np.flatnonzero(self.tick_index >= 0)
        stored = np.unique(corrected[self.tick_index[corrected] < 0])
        rows = np.concatenate([new, stored])
        first_version = timeline.version_at(
            self.keys[rows], self.times[rows], self.tick_index[rows]
        )
        row = np.concatenate([rows, corrected])
        tick_index = np.concatenate([self.tick_index[rows], timeline.tick_index[version]])
        order = sort_order(row, tick_index)
        return row[order], tick_index[order], np.concatenate([first_version, version])[order]

    def _corrections(self, timeline: Timeline, history_before: Times) -> tuple[Ints, Ints]:
        """Pairs of a row and a version that arrives after it and is valid at the row's time."""
        fresh = np.flatnonzero(timeline.tick_index >= 0)
        tick_index = timeline.tick_index[fresh]
        valid_to = np.append(timeline.valid_from, HIGHEST)[timeline.next(fresh, tick_index)]
        begin = key_bounds(self.keys, len(self._row_store))
        first, end = begin[timeline.keys[fresh]], begin[timeline.keys[fresh] + 1]
        low = search_within(self.times, first, end, timeline.valid_from[fresh], right=False)
        high = search_within(self.times, low, end, valid_to, right=False)
        version, row = expand_pairs(low, high)
        was_emitted = self.tick_index[row] < tick_index[version]
        is_recent = self.times[row] >= history_before[tick_index[version]]
        is_corrected = was_emitted & is_recent
        return row[is_corrected], fresh[version[is_corrected]]

    def store(self, writer: RowStoreWriter, history_from: int, history_us: int) -> None:
        """Store the rows that may be corrected."""
        stays = ~self.has_null & (self.times >= history_from)
        which = np.flatnonzero(stays)
        delay_us = history_us + 1
        register = self._row_store.registers[_ROW_TIMER]
        register[:] = unloaded_timer_bound(
            self._row_store, _ROWS, _ROW_TIMER, self._is_due, delay_us
        )
        np.minimum.at(register, self.keys[which], self.times[which] + delay_us)
        is_touched = np.where(self.tick_index >= 0, stays, ~stays)
        if is_touched.any():
            rows = StoredRows(
                keys=self.keys[which],
                sort_keys=self.times[which],
                flags=np.zeros(len(which), np.uint8),
                rows=self.rows.bytes(self.row[which]),
            )
            writer.replace(_ROWS, rows, self.keys[is_touched], self.times[is_touched])
