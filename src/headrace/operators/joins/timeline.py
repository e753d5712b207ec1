"""The versions of a table by the time from which they are valid: which row of a key was valid at a
time, as far as is known in a tick. The versioned joins (`versioned.py`) and the history of a table
(`HistoryKernel`, below) are made of it.

Example: prices (key `item`, event time `since`), the versions of "tea" and what is known when.

    tick 1   insert (tea, 3 €, since 10:00)    valid 10:00 to …
    tick 2   update (tea, 4 €, since 12:00)    valid 10:00 to 12:00: 3 €;  12:00 to …: 4 €
    tick 3   update (tea, 5 €, since 11:00)    a version for the past: 10:00 to 11:00: 3 €;
                                               11:00 to 12:00: 5 €;  12:00 to …: 4 €
    tick 4   delete (tea) at 13:00             12:00 to 13:00: 4 €;  then nothing

    version_at("tea", 11:30, tick 2) is 3 €;  version_at("tea", 11:30, tick 3) is 5 €

A version comes with an insert or an update, and is valid from its event time until the next one's.
A delete ends validity at the time of its tick, or, if that is later, at the time from which the row
that it names was to be valid. A delete that names no row, as in a topic, ends the latest version
that is known by then. A version that comes later for the same time replaces the earlier one.

Versions are kept for `history` behind the watermark, and the newest one before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.columns import CHANGE_FIELD, CHANGE_TYPE, DELETE, TICK_FIELD, UPDATE_PREIMAGE
from headrace.columnar.keys import as_array
from headrace.columnar.lookup import (
    expand_pairs,
    group_start_mask,
    key_bounds,
    key_extents,
    mask_at,
    rank_keys,
    search_within,
    sort_order,
    upper_bound,
)
from headrace.errors import InputError
from headrace.operators.joins.row_store import (
    HIGHEST,
    LOWEST,
    KeyedRowStore,
    RowStoreWriter,
    StoredRows,
)
from headrace.operators.joins.sides import Side, SideRows, join_keys, merge_changes, ticks_of
from headrace.operators.joins.timers import due_keys, timer_entries, unloaded_timer_bound
from headrace.operators.kernel import UNSTARTED, KeyedState, Times, Watermarks

DELETED = np.uint8(1)
"""Flag of a stored version that says that the row is deleted."""
DROP_TIMER = 1
"""The kind of timer at which versions of a key can be dropped."""


def check_versioned(step: str, table: Side) -> None:
    """Raise `InputError` if the table has no event time, or is not joined on its whole key."""
    if table.time is None:
        raise InputError(
            f"Step {step!r} needs the versions of a table that has no event time.",
            fix="declare the table with event_time=hr.EventTime(...).",
        )
    if set(table.on) != set(table.key):
        raise InputError(
            f"Step {step!r} joins versions on {', '.join(map(repr, table.on))}, and the table's key"
            f" is {', '.join(map(repr, table.key))}.",
            fix="join on the table's whole key.",
        )


def history_start(watermarks: list[Times], history_us: int) -> Times:
    """The time from which on versions are kept, per tick: `history_us` behind the earliest of the
    watermarks.
    """
    earliest = np.minimum.reduce(watermarks)
    start: Times = np.where(earliest < UNSTARTED + history_us, UNSTARTED, earliest - history_us)
    return start


class Timeline:
    """The versions of the keys of a batch, in order of key, time and arrival.

    Per version: `keys` (the index of its key), `valid_from`, `tick_index` (of the tick in which it
    arrived, -1 for a stored one), `is_delete`, `row` (its index among the rows of the table), and
    `dropped_at` (the index of the tick at whose end it is dropped because of a deletion).
    """

    def __init__(
        self,
        side: Side,
        fields: pa.Schema,
        changes: pa.Table,
        keys: Ints,
        watermarks: Watermarks,
        *,
        drops_deletions: bool = True,
    ) -> None:
        """Take the changes of a batch.

        Args:
            side: the table's columns.
            fields: the columns that are stored.
            changes: the changes of the table.
            keys: the key index of each change.
            watermarks: the watermarks of the table, and the times of its ticks.
            drops_deletions: whether a deletion is dropped, too, so that nothing is left of the key.
        """
        self.drops_deletions = drops_deletions
        self.fresh, self.fields = changes, fields
        kinds = as_array(changes.column(CHANGE_TYPE))
        which = np.flatnonzero(pc.not_equal(kinds, UPDATE_PREIMAGE).to_numpy(zero_copy_only=False))
        is_delete = pc.equal(kinds, DELETE).to_numpy(zero_copy_only=False)[which]
        tick_index = watermarks.tick_indices(ticks_of(changes)[which])
        tick_times = watermarks.times_us[tick_index] if len(watermarks) else tick_index
        assert side.time is not None
        stamps = as_array(changes.column(side.time)).take(pa.array(which))
        stamps_us = stamps.cast(pa.timestamp("us", stamps.type.tz)).cast(pa.int64())
        times = stamps_us.fill_null(LOWEST).to_numpy()
        has_time = times != LOWEST
        self._names_no_row = is_delete & ~has_time
        self.fresh_valid_from = np.where(
            is_delete, np.maximum(times, tick_times), np.where(has_time, times, tick_times)
        )
        self.fresh_keys = keys[which]
        self.fresh_tick_index = tick_index
        self._fresh_is_delete = is_delete
        self._fresh_row = which

    def load(
        self,
        row_store: KeyedRowStore,
        requested: tuple[Ints, Ints],
        is_due: Mask,
        history: tuple[Times, Times],
    ) -> None:
        """Load the versions that are valid in the requested times, the neighbours of those that
        arrived, and of keys whose timers are due those that can be dropped.

        Args:
            row_store: the stored versions, in section 0.
            requested: by key, the first and the last time whose versions are looked up.
            is_due: by key, whether its timer is due.
            history: the start of the history before each tick, and at its end.
        """
        history_before, history_from = history
        low, high = key_extents(
            len(row_store),
            self.fresh_keys,
            np.where(self._fresh_is_delete, LOWEST, self.fresh_valid_from),
            np.where(self._names_no_row, HIGHEST, self.fresh_valid_from),
        )
        low = np.where(is_due, LOWEST, np.minimum(low, requested[0]))
        high = np.maximum(high, requested[1])
        high = np.where(is_due, np.maximum(high, history_from[-1]), high)
        stored = row_store.load(0, low, high, beyond=True)
        self.row_store, self.is_due, self.history_from = row_store, is_due, history_from
        self._date_deletions(stored, history_before)
        # Of several versions for one time in a tick the last one counts.
        order = sort_order(self.fresh_keys, self.fresh_valid_from, self.fresh_tick_index)
        is_last = np.append(
            group_start_mask(
                self.fresh_keys[order], self.fresh_valid_from[order], self.fresh_tick_index[order]
            )[1:],
            True,
        )[: len(order)]
        order = order[is_last]
        self.fresh_keys = self.fresh_keys[order]
        self.fresh_valid_from = self.fresh_valid_from[order]
        self.fresh_tick_index = self.fresh_tick_index[order]
        self._fresh_is_delete = self._fresh_is_delete[order]
        self._fresh_row = self._fresh_row[order]
        # Stored and new versions, in order.
        self.rows = SideRows(self.fields, stored.rows, self.fresh)
        keys = np.concatenate([stored.keys, self.fresh_keys])
        valid_from = np.concatenate([stored.sort_keys, self.fresh_valid_from])
        tick_index = np.concatenate([np.full(len(stored), -1), self.fresh_tick_index])
        flags = np.concatenate([stored.flags & DELETED, self._fresh_is_delete.astype(np.uint8)])
        row = np.concatenate([np.arange(len(stored)), len(stored) + self._fresh_row])
        order = sort_order(keys, valid_from, tick_index)
        self._set(
            keys[order],
            valid_from[order],
            tick_index[order],
            flags[order].astype(np.bool_),
            row[order],
        )

    def _date_deletions(self, stored: StoredRows, history_before: Times) -> None:
        """Set the time of deletes that name no row: they end the latest version that arrived before
        them, even if it is to be valid only later.

        Versions that were dropped by then do not matter: they lie before the start of the history.
        """
        which = np.flatnonzero(self._names_no_row)
        if not len(which):
            return
        latest = np.full(len(self.row_store), LOWEST)
        np.maximum.at(latest, stored.keys, stored.sort_keys)
        keys, arrived = self.fresh_keys[which], np.flatnonzero(~self._fresh_is_delete)
        # By key, in order of arrival.
        arrived = arrived[np.argsort(self.fresh_keys[arrived], kind="stable")]
        begin = key_bounds(self.fresh_keys[arrived], len(self.row_store))
        first, end = begin[keys], begin[keys + 1]
        delete, earlier = expand_pairs(
            first, search_within(arrived, first, end, which, right=False)
        )
        valid_from = np.maximum.reduce(
            [
                self.fresh_valid_from[which],
                history_before[self.fresh_tick_index[which]],
                latest[keys],
            ]
        )
        np.maximum.at(valid_from, delete, self.fresh_valid_from[arrived[earlier]])
        self.fresh_valid_from[which] = valid_from

    def _set(
        self, keys: Ints, valid_from: Ints, tick_index: Ints, is_delete: Mask, row: Ints
    ) -> None:
        self.keys = keys
        self.valid_from = valid_from
        self.tick_index = tick_index
        self.is_delete = is_delete
        self.row = row
        self.key_bounds = key_bounds(keys, len(self.row_store))
        # The index of the tick at whose end each version is dropped because of a deletion. When a
        # deletion lies before the start of the history, it and everything before it are dropped.
        # That matters if a version arrives later that is valid from even earlier.
        dropped_at = np.full(len(self), HIGHEST)
        deletions = np.flatnonzero(self.is_delete & self.drops_deletions)
        passed = np.searchsorted(self.history_from, self.valid_from[deletions])
        passed = np.maximum(passed, self.tick_index[deletions])
        is_passed = passed < len(self.history_from)
        deletions, passed = deletions[is_passed], passed[is_passed]
        deletion, earlier = expand_pairs(self.key_bounds[self.keys[deletions]], deletions + 1)
        has_arrived = self.tick_index[earlier] <= passed[deletion]
        np.minimum.at(dropped_at, earlier[has_arrived], passed[deletion[has_arrived]])
        self.dropped_at = dropped_at

    def remove(self, versions: Ints) -> None:
        """Remove versions as if they had never arrived."""
        stays = ~mask_at(len(self), versions)
        self._set(
            self.keys[stays],
            self.valid_from[stays],
            self.tick_index[stays],
            self.is_delete[stays],
            self.row[stays],
        )

    def __len__(self) -> int:
        return len(self.keys)

    # Look-ups; each result is the index of a version, -1 for none

    def version_at(self, keys: Ints, times: Ints, tick_index: Ints) -> Ints:
        """The version of each key that is valid at a time, as far as is known in a tick."""
        last = upper_bound(self.keys, self.valid_from, keys, times, self.key_bounds) - 1
        return self._nearest(last, keys, tick_index, step=-1)

    def previous(self, versions: Ints, tick_index: Ints) -> Ints:
        """The version before each, as far as is known in a tick."""
        return self._nearest(
            self.first_of_time[versions] - 1, self.keys[versions], tick_index, step=-1
        )

    def next(self, versions: Ints, tick_index: Ints) -> Ints:
        """The version that ends the validity of each, as far as is known in a tick."""
        starts = np.append(np.unique(self.first_of_time), len(self))
        behind = starts[np.searchsorted(starts, versions, side="right")]
        return self._nearest(behind, self.keys[versions], tick_index, step=1)

    @property
    def first_of_time(self) -> Ints:
        """The first version with the same key and time as each."""
        starts = group_start_mask(self.keys, self.valid_from)
        first: Ints = np.maximum.accumulate(np.where(starts, np.arange(len(self)), 0))
        return first

    def _nearest(self, index: Ints, keys: Ints, tick_index: Ints, *, step: int) -> Ints:
        """The first version from an index on, step by step within its key, that has arrived by a
        tick and is not dropped by then.
        """
        arrived_at = np.append(self.tick_index, HIGHEST)
        dropped_at = np.append(self.dropped_at, HIGHEST)
        first, end = self.key_bounds[keys], self.key_bounds[keys + 1]
        searching = np.arange(len(index))
        while len(searching):
            version, tick = index[searching], tick_index[searching]
            is_inside = (version >= first[searching]) & (version < end[searching])
            is_unknown = (arrived_at[version] > tick) | (dropped_at[version] < tick)
            searching = searching[is_inside & is_unknown]
            index[searching] += step
        return np.where((index >= first) & (index < end), index, -1)

    def store(self, writer: RowStoreWriter, history_us: int) -> None:
        """Store the versions that are valid since the start of the history: the newest one before
        it and all behind it. Set the timers for when more can be dropped.
        """
        is_newest = np.append(group_start_mask(self.keys, self.valid_from)[1:], True)[: len(self)]
        every_key, tick_count = np.arange(len(self.row_store)), len(self.history_from)
        base = self.version_at(
            every_key,
            np.full(len(every_key), self.history_from[-1]),
            np.full(len(every_key), tick_count - 1),
        )
        is_recent = np.arange(len(self)) >= base[self.keys]
        stays = is_newest & (self.dropped_at >= tick_count) & is_recent
        which = np.flatnonzero(stays)
        # A version can be dropped when the next one is before the start of the history; a deletion
        # when it is so itself.
        is_first = group_start_mask(self.keys[which])
        is_second = ~is_first & np.append(True, is_first)[:-1]
        is_droppable = is_first & self.is_delete[which] & self.drops_deletions
        timed = np.concatenate([which[is_second], which[is_droppable]])
        register = self.row_store.registers[DROP_TIMER]
        register[:] = unloaded_timer_bound(self.row_store, 0, DROP_TIMER, self.is_due, history_us)
        np.minimum.at(register, self.keys[timed], self.valid_from[timed] + history_us)
        is_touched = (self.tick_index >= 0) | ~stays
        if is_touched.any():
            rows = StoredRows(
                keys=self.keys[which],
                sort_keys=self.valid_from[which],
                flags=np.where(self.is_delete, DELETED, np.uint8(0))[which],
                rows=self.rows.bytes(self.row[which]),
            )
            writer.replace(0, rows, self.keys[is_touched], self.valid_from[is_touched])


class HistoryKernel:
    """The history of a table: every version of its rows with its validity, as a table keyed by the
    row's key and the time from which the version is valid.

    The result has the table's columns, of which `table.time` is the start of a version's validity,
    and `valid_to`, its end; null as long as it is valid.

        insert (tea, 3 €, since 10:00)    emits insert (tea, 3 €, 10:00, null)
        update (tea, 4 €, since 12:00)    emits update (tea, 3 €, 10:00, null -> 12:00)
                                          and insert (tea, 4 €, 12:00, null)
        update (tea, 5 €, since 11:00)    emits update (tea, 3 €, 10:00, 12:00 -> 11:00)
                                          and insert (tea, 5 €, 11:00, 12:00)

    Versions are kept for `history_us` behind the watermark, and the newest one before that, even if
    it is a deletion. A version from before that, where a newer one from before that is known, is
    late: it is left out and counted (`counts["late_versions"]`). Versions that were dropped from
    the state are not retracted.
    """

    hold_us = 0  # changes are emitted in their own tick: no watermark is held back

    def __init__(
        self, step: str, table: Side, *, history_us: int, valid_to: str = "valid_to"
    ) -> None:
        table.check(f"The input of step {step!r}")
        check_versioned(step, table)
        assert table.time is not None
        self.step_name, self.table = step, table
        self.history_us, self.valid_to = history_us, valid_to
        self.key = (*table.key, table.time)
        self.counts: dict[str, int] = {}

    @cached_property
    def output(self) -> pa.Schema:
        valid_to = pa.field(self.valid_to, self.table.schema.field(self.table.time).type)
        return pa.schema([*self.table.schema, valid_to, CHANGE_FIELD])

    def due(self, state: KeyedState) -> int | None:  # noqa: ARG002
        """None: no row waits for a watermark."""
        return None

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """1. Load the neighbours of the versions that arrived. 2. Leave out late versions. 3.
        Store. 4. Emit the versions whose content or end changed.
        """
        (changes,), (table,) = inputs, watermarks
        if not len(table):
            return self.output.append(TICK_FIELD).empty_table()
        # 1. Load.
        keys, _ = join_keys(changes, self.table.on)
        due = due_keys(state, DROP_TIMER, int(table.watermark[-1])).cast(keys.type)
        ranked = rank_keys([keys, due])
        row_store = KeyedRowStore(self.step_name, state, ranked.keys, sections=1, registers=2)
        timeline = Timeline(
            self.table,
            self.table.schema,
            changes,
            ranked.ranks[0],
            table,
            drops_deletions=False,
        )
        nothing = np.zeros(0, np.int64)
        history_before = history_start([table.watermark_before], self.history_us)
        timeline.load(
            row_store,
            requested=key_extents(len(row_store), nothing, nothing, nothing),
            is_due=mask_at(len(row_store), ranked.ranks[1]),
            history=(history_before, history_start([table.watermark], self.history_us)),
        )
        # 2. A version is late if a newer one was known before the start of the history.
        fresh = np.flatnonzero(timeline.tick_index >= 0)
        tick_index = timeline.tick_index[fresh]
        newest = timeline.version_at(
            timeline.keys[fresh], history_before[tick_index], tick_index - 1
        )
        newest_from = np.append(timeline.valid_from, 0)[newest]
        is_late = (newest >= 0) & (newest_from > timeline.valid_from[fresh])
        timeline.remove(fresh[is_late])
        self.counts = {"late_versions": int(np.count_nonzero(is_late))}
        # 3. Store.
        writer = RowStoreWriter(row_store)
        timeline.store(writer, self.history_us)
        writer.save([timer_entries(row_store, DROP_TIMER)])
        return self._emit(timeline, table)

    def _emit(self, timeline: Timeline, watermarks: Watermarks) -> pa.Table:
        """The changes in order of tick, key and time."""
        first, tick_index, version, next_version = self._states(timeline)
        is_start = group_start_mask(first)
        is_row = (version >= 0) & ~np.append(timeline.is_delete, True)[version]
        removed = np.flatnonzero(~is_start & np.append(False, is_row)[:-1])
        added = np.flatnonzero(is_row & (tick_index >= 0))
        which, shown = np.concatenate([removed, added]), np.concatenate([removed - 1, added])
        is_insertion = np.arange(len(which)) >= len(removed)
        order = sort_order(tick_index[which], first[which], is_insertion.astype(np.int64))
        which, shown, is_insertion = which[order], shown[order], is_insertion[order]
        arrays = timeline.rows.columns(self.table.schema, timeline.row[version[shown]])
        valid_to = pa.array(
            np.append(timeline.valid_from, 0)[next_version[shown]], mask=next_version[shown] < 0
        )
        columns = [
            *(arrays[name] for name in self.table.schema.names),
            valid_to.cast(self.output.field(self.valid_to).type),
        ]
        is_second = ~group_start_mask(tick_index[which], first[which])
        kinds, is_emitted = merge_changes(columns, is_second, is_insertion)
        ticks = pa.array(watermarks.ticks[tick_index[which]], pa.int64())
        result = pa.Table.from_arrays(
            [*columns, kinds, ticks], schema=self.output.append(TICK_FIELD)
        )
        return result if is_emitted.all() else result.filter(pa.array(is_emitted))

    @staticmethod
    def _states(timeline: Timeline) -> tuple[Ints, Ints, Ints, Ints]:
        """The states of the result's rows that change: before the first tick that touches a row
        (-1), and at the end of each such tick.

        A version that arrives touches the row of its own time, and the row of the version before
        it, which it ends.

        Returns:
            The first version of the row's time, the index of the tick, the version that stands for
            the row, and the one that ends it; -1 for none.
        """
        fresh = np.flatnonzero(timeline.tick_index >= 0)
        previous = timeline.previous(fresh, timeline.tick_index[fresh])
        has_previous = previous >= 0
        touched = np.concatenate([fresh, previous[has_previous]])
        tick_index = timeline.tick_index[np.concatenate([fresh, fresh[has_previous]])]
        first = timeline.first_of_time[touched]
        first = np.concatenate([first, first])
        tick_index = np.concatenate([tick_index, np.full(len(tick_index), -1)])
        order = sort_order(first, tick_index)
        order = order[group_start_mask(first[order], tick_index[order])]
        first, tick_index = first[order], tick_index[order]
        version = timeline.version_at(timeline.keys[first], timeline.valid_from[first], tick_index)
        is_of_time = np.append(timeline.first_of_time, HIGHEST)[version] == first
        version = np.where(is_of_time, version, -1)
        next_version = np.where(version >= 0, timeline.next(first, tick_index), -1)
        return first, tick_index, version, next_version
