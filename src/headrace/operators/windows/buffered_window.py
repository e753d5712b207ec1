"""Sessions and sliding windows that are computed from buffered rows.

They serve inputs that are tables, whose rows can be retracted, and aggregates whose states cannot
be merged. Every window that a tick changes is computed again from its rows, so the cost is
proportional to the rows in those windows; `session_window` and `sliding_window` are the fast way
for the rest. `last(v)` by `k` with sessions of gap 10 s, over a table; times in seconds:

    changes in                watermark  state after              rows out
    tick 1: insert v=x at 0   at 0       r a: x at 0, y at 7
            insert v=y at 7              w a [0,17)
    tick 2: delete v=x        at 1       r a: y at 7; w a [7,17)
    tick 3: (no changes)      at 20      r a: (expired)           tick 3: insert a [7,17) y

Rows are buffered (`state.RowStore`) as long as an open window may need them. Each group also has
timers: entries named like windows, which say when the group must be processed although no row came.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask, expand_ranges
from headrace.columnar.columns import CHANGE_TYPE, TICK
from headrace.columnar.keys import as_array, encode_keys, key_groups
from headrace.columnar.lookup import (
    group_start_mask,
    key_bounds,
    number_keys,
    search_within,
)
from headrace.columnar.segments import Segments
from headrace.operators.aggregates.aggregation import AggregateOutcome, AggregateSet
from headrace.operators.kernel import UNSTARTED, Groups, KeyedState, Times, Watermarks
from headrace.operators.windows.kernel import WindowKernel, WindowSettings, shown_over_lifetimes
from headrace.operators.windows.late_rows import row_tick_indices
from headrace.operators.windows.specs import Session, Sliding
from headrace.operators.windows.state import (
    ID,
    TIME,
    BufferedRows,
    GroupKeys,
    RowStore,
    WindowHistory,
    Windows,
    WindowVersions,
    any_within,
    chains,
    distinct_windows,
    put_timers,
)

_NO_KEYS = pa.nulls(0, pa.binary())


@dataclass(frozen=True)
class Spans:
    """Windows over rows that are in order of group and time: each one's group, its bounds, and the
    positions of its first row and of the one after its last.
    """

    keys: Ints
    starts: Times
    ends: Times
    first: Ints
    stop: Ints

    def filter(self, which: Mask) -> Spans:
        return Spans(
            keys=self.keys[which],
            starts=self.starts[which],
            ends=self.ends[which],
            first=self.first[which],
            stop=self.stop[which],
        )


class BufferedWindows(WindowKernel):
    """The base of sessions and sliding windows over buffered rows."""

    def __init__(self, settings: WindowSettings) -> None:
        super().__init__(settings)
        read = dict.fromkeys(name for _, spec in settings.timed_aggregates for name in spec.reads)
        self._store = RowStore(
            settings.name,
            [settings.schema.field(name) for name in read],
            with_id=settings.over_table,
        )

    def build_aggregation(self, settings: WindowSettings) -> AggregateSet:
        """The aggregates of the step. Retracted rows are removed from the buffer, so aggregates see
        none.
        """
        return AggregateSet(
            settings.name,
            settings.schema,
            settings.by,
            settings.timed_aggregates,
            divert=settings.divert_errors,
        )

    # What sessions and sliding windows differ in

    @abstractmethod
    def spans(self, keys: Ints, times: Times) -> Spans:
        """The windows of rows that are in order of group and time."""

    @abstractmethod
    def is_needed(self, keys: Ints, times: Times, horizon: int) -> Mask:
        """Which rows an open window still needs, at the given horizon. Rows are in order of group
        and time.
        """

    @abstractmethod
    def accepted(self, keys: Ints, times: Times, is_new: Mask, horizon: int) -> Mask:
        """Which rows are kept: all buffered ones, and those new ones that are not late. Rows are in
        order of group and time.
        """

    @abstractmethod
    def is_retractable(self, times: Times, horizon: int) -> Mask:
        """Which buffered rows may still be retracted."""

    def counts_as_window(self, ends: Times, horizon: int) -> Mask:  # noqa: ARG002
        """Which of the windows that rows form are still windows at the given horizon."""
        return np.ones(len(ends), np.bool_)

    @abstractmethod
    def reach(self, starts: Times, ends: Times) -> tuple[Times, Times]:
        """The range of times in which a row changes each window."""

    @abstractmethod
    def timers(
        self, keys: Ints, times: Times, watermark_us: int
    ) -> tuple[Ints, Times, Times, Mask]:
        """When groups with these rows, in order, must be processed: group, start, end, and whether
        the timer waits for the watermark (otherwise for the horizon).
        """

    # The step

    def advance(self, state: KeyedState, rows: pa.Table, watermarks: Watermarks) -> pa.Table:
        """Process the rows of some ticks.

        1. Read the buffered rows of all groups concerned.
        2. Go through the ticks, tracking versions of windows.
        3. Store rows and timers.
        4. Compute every version, and emit what changed.
        """
        of_rows = encode_keys(rows, self.by)
        keys, ranks = number_keys(
            [
                of_rows,
                self.scan_completed(state, watermarks).group_keys,
                self.scan_expired(state, watermarks),
            ]
        )
        grouped = GroupKeys(keys, key_groups(keys), RowStore.names(keys))
        counts, stored = self._store.read(state, grouped.names, grouped.groups)
        buffered = self._buffered_rows(rows, ranks[0], counts, stored, watermarks)
        if not len(grouped.group_keys):
            return self.empty_output()
        before = buffered.in_order(np.arange(buffered.stored))
        history, after = self._process_ticks(buffered, before, rows, watermarks)
        self._store_rows(state, grouped, buffered, (before, after), watermarks)
        return self._emit(rows, grouped, buffered, history, watermarks)

    def _buffered_rows(
        self, rows: pa.Table, keys: Ints, counts: Ints, stored: pa.Table, watermarks: Watermarks
    ) -> BufferedRows:
        fresh = rows.select(
            [field.name for field in self._store.fields if field.name in rows.schema.names]
        )
        fresh = fresh.append_column(TIME, pa.array(self.times(rows)))
        is_addition = np.ones(stored.num_rows + rows.num_rows, np.bool_)
        if self.settings.over_table:
            fresh = fresh.append_column(
                ID, encode_keys(rows, self.settings.row_key).cast(pa.binary())
            )
            is_removal = pc.is_in(
                as_array(rows.column(CHANGE_TYPE)), pa.array(["delete", "update_preimage"])
            )
            is_addition[stored.num_rows :] = ~is_removal.to_numpy(zero_copy_only=False)
        everything = pa.concat_tables(
            [stored, fresh.select(stored.schema.names).cast(stored.schema)]
        ).combine_chunks()
        keys = np.concatenate([np.repeat(np.arange(len(counts)), counts), keys])
        tick_index = np.concatenate(
            [np.full(stored.num_rows, -1), row_tick_indices(rows, watermarks)]
        )
        times = as_array(everything.column(TIME)).to_numpy()
        same = self._row_numbers(keys, everything) if self.settings.over_table else None
        ticks = pa.array(np.zeros(everything.num_rows, np.int64))
        return BufferedRows(
            rows=everything.append_column(TICK, ticks),
            stored=stored.num_rows,
            keys=keys,
            times=times,
            tick_index=tick_index,
            ranks=np.arange(len(keys)),
            is_addition=is_addition,
            same=same,
        )

    @staticmethod
    def _row_numbers(keys: Ints, rows: pa.Table) -> Ints:
        ids = as_array(rows.column(ID)).dictionary_encode().indices.to_numpy().astype(np.int64)
        _, same = np.unique(keys * (int(ids.max(initial=0)) + 1) + ids, return_inverse=True)
        return same

    # Tick by tick

    def _process_ticks(
        self, buffered: BufferedRows, before: Ints, rows: pa.Table, watermarks: Watermarks
    ) -> tuple[WindowHistory, Ints]:
        """All versions of windows during the call, and the rows to keep at the end, in order of
        group and time.
        """
        horizons = self.step_horizon(watermarks.horizon_before)
        history, late = WindowHistory(), np.zeros(len(buffered.keys), np.bool_)
        known = self.spans(buffered.keys[before], buffered.times[before])
        first_horizon = int(self.step_horizon(np.array([watermarks.horizon_at_start]))[0])
        history.add(
            self._window_versions(
                buffered, before, known.filter(self.counts_as_window(known.ends, first_horizon))
            ),
            -1,
        )
        alive = np.zeros(len(buffered.keys), np.bool_)
        alive[before] = True
        for tick, fresh in _by_tick(buffered):
            touched = np.zeros(int(buffered.keys.max()) + 1, np.bool_)
            touched[buffered.keys[fresh]] = True
            mine = buffered.in_order(np.flatnonzero(alive & touched[buffered.keys]))
            alive[mine] = False
            now = self._process_tick(
                buffered, history, touched, (mine, fresh), late, tick, int(horizons[tick])
            )
            alive[now] = True
        tick_index = buffered.tick_index[buffered.stored :]
        self.counts["late"] += self.late_rows.add(
            rows,
            late[buffered.stored :],
            watermarks.times_us[tick_index],
            horizons[tick_index] - buffered.times[buffered.stored :],
        )
        after = buffered.in_order(np.flatnonzero(alive))
        (horizon,) = self.step_horizon(watermarks.horizon[-1:]).tolist()
        return history, after[self.is_needed(buffered.keys[after], buffered.times[after], horizon)]

    def _process_tick(
        self,
        buffered: BufferedRows,
        history: WindowHistory,
        touched: Mask,
        rows: tuple[Ints, Ints],
        late: Mask,
        tick: int,
        horizon: int,
    ) -> Ints:
        """The rows of the touched groups after a tick, in order.

        Args:
            buffered: The rows of the call.
            history: The versions of windows so far.
            touched: Which groups the tick touches.
            rows: The rows of those groups, in order, and the rows of the tick.
            late: Set to true for the rows that are late.
            tick: The index of the tick.
            horizon: The step's horizon before the tick.
        """
        mine, fresh = rows
        mine = mine[self.is_needed(buffered.keys[mine], buffered.times[mine], horizon)]
        current = history.current
        history.forget(touched[current.keys] & (current.ends <= horizon))
        removed, added = self._net_changes(buffered, mine, fresh, late, horizon)
        members = buffered.in_order(np.concatenate([mine[~np.isin(mine, removed)], added]))
        new = np.isin(members, added)
        accepted = self.accepted(buffered.keys[members], buffered.times[members], new, horizon)
        late[members[~accepted]] = True
        changed = np.concatenate([removed, members[new & accepted]])
        members = members[accepted]
        self._replace_versions(buffered, history, touched, members, changed, tick, horizon)
        return members

    def _net_changes(
        self, buffered: BufferedRows, mine: Ints, fresh: Ints, late: Mask, horizon: int
    ) -> tuple[Ints, Ints]:
        """The buffered rows that the tick removes, and the rows that it adds.

        A row that is added and removed within the tick has no effect. A retraction of a row that is
        absent, or that may no longer be retracted, is late.
        """
        if buffered.same is None:
            return np.zeros(0, np.int64), fresh
        there = np.full(int(buffered.same.max()) + 1, -1)
        by_rank = mine[np.argsort(buffered.ranks[mine], kind="stable")]
        there[buffered.same[by_rank]] = by_rank
        order = fresh[np.argsort(buffered.same[fresh], kind="stable")]
        new = np.ones(len(order), np.bool_)
        new[1:] = buffered.same[order][1:] != buffered.same[order][:-1]
        first, last = order[new], order[np.append(np.flatnonzero(new)[1:], len(order)) - 1]
        old = there[buffered.same[first]]
        is_removed = ~buffered.is_addition[first] & (old >= 0)
        is_removed[is_removed] = self.is_retractable(buffered.times[old[is_removed]], horizon)
        late[first[~buffered.is_addition[first] & ~is_removed]] = True
        is_added = buffered.is_addition[last]
        buffered.ranks[last[is_added & is_removed]] = buffered.ranks[old[is_added & is_removed]]
        return old[is_removed], last[is_added]

    def _replace_versions(
        self,
        buffered: BufferedRows,
        history: WindowHistory,
        touched: Mask,
        members: Ints,
        changed: Ints,
        tick: int,
        horizon: int,
    ) -> None:
        """End the versions of windows that the tick changes, and add the new ones."""
        keys, times = buffered.keys[changed], buffered.times[changed]
        current = history.current
        history.end(
            touched[current.keys]
            & any_within(keys, times, current.keys, *self.reach(current.starts, current.ends)),
            tick,
        )
        spans = self.spans(buffered.keys[members], buffered.times[members])
        spans = spans.filter(
            any_within(keys, times, spans.keys, *self.reach(spans.starts, spans.ends))
            & self.counts_as_window(spans.ends, horizon)
        )
        history.add(self._window_versions(buffered, members, spans), tick)

    @staticmethod
    def _window_versions(buffered: BufferedRows, in_order: Ints, spans: Spans) -> WindowVersions:
        lengths = spans.stop - spans.first
        entries = in_order[expand_ranges(spans.first, lengths)]
        return WindowVersions(
            keys=spans.keys,
            starts=spans.starts,
            ends=spans.ends,
            lengths=lengths,
            entries=buffered.ranked(np.repeat(np.arange(len(lengths)), lengths), entries),
        )

    # Storing and emitting

    def _store_rows(
        self,
        state: KeyedState,
        grouped: GroupKeys,
        buffered: BufferedRows,
        rows: tuple[Ints, Ints],
        watermarks: Watermarks,
    ) -> None:
        before, after = rows
        in_rank = buffered.ranked(buffered.keys[after], after)
        counts = np.bincount(buffered.keys[after], minlength=len(grouped.group_keys))
        self._store.write(
            state, grouped.names, grouped.groups, counts, buffered.rows.take(pa.array(in_rank))
        )
        old, new = (
            self._timers(grouped, buffered, *each)
            for each in (
                (before, watermarks.watermark_at_start),
                (after, int(watermarks.watermark[-1])),
            )
        )
        put_timers(state, old, new)

    def _timers(
        self, grouped: GroupKeys, buffered: BufferedRows, rows: Ints, watermark_us: int
    ) -> tuple[pa.Array, Groups]:
        of, starts, ends, waits = self.timers(
            buffered.keys[rows], buffered.times[rows], watermark_us
        )
        windows = Windows(
            group_keys=grouped.group_keys.take(pa.array(of)),
            starts=starts,
            ends=ends,
            groups=grouped.groups[of],
        )
        return windows.names(waits).cast(pa.binary()), windows.groups

    def _emit(
        self,
        rows: pa.Table,
        grouped: GroupKeys,
        buffered: BufferedRows,
        history: WindowHistory,
        watermarks: Watermarks,
    ) -> pa.Table:
        versions, born = history.all(), history.born
        if not len(versions):
            return self.empty_output()
        segments = Segments(
            rows=buffered.rows,
            order=versions.entries,
            starts=np.cumsum(versions.lengths) - versions.lengths,
            ticks=np.zeros(len(versions), np.int64),
            firsts=np.arange(len(versions)),
            keys=_NO_KEYS,
        )
        stored, parts = self.aggregation.layout.unpack_array(pa.nulls(len(versions), pa.binary()))
        outcome = self.aggregation.advance(segments, stored, parts)
        windows, window = distinct_windows(grouped, versions.keys, versions.starts, versions.ends)
        shown = shown_over_lifetimes(
            window,
            born,
            history.died,
            self.emitted_from(versions.ends, watermarks),
            len(watermarks),
        )
        table, changes = self.emit_rows(
            windows, shown, VersionResults(outcome, segments.after), watermarks
        )
        self.aggregation.count_unknown(outcome, segments.after[changes.versions[changes.additions]])
        # Send the rows that an aggregate rejects to dead letters in the tick that brings them; a
        # later version of the window rejects them again, without effect.
        for (name, _), each in zip(self.aggregation.aggregates, outcome.advanced, strict=True):
            for rejected in each.rejected:
                row = segments.order[rejected.rows]
                fresh = (row >= buffered.stored) & (
                    buffered.tick_index[row] == born[segments.segment_of[rejected.rows]]
                )
                if fresh.any():
                    self.dead_letters.add(rows, row[fresh] - buffered.stored, name, rejected.reason)
        return table


@dataclass(frozen=True)
class VersionResults:
    """The results of an outcome, by the numbers of windows' versions."""

    outcome: AggregateOutcome
    after: Ints

    def differs(self, before: Ints, after: Ints) -> Mask:
        return self.outcome.differs(self.after[before], self.after[after])

    def results(self, versions: Ints) -> list[pa.Array]:
        return self.outcome.results(self.after[versions])


def _by_tick(buffered: BufferedRows) -> Iterator[tuple[int, Ints]]:
    """The ticks that have rows, and the rows of each."""
    tick_index = buffered.tick_index[buffered.stored :]
    starts = np.flatnonzero(group_start_mask(tick_index))
    for start, stop in pairwise([*starts.tolist(), len(tick_index)]):
        yield int(tick_index[start]), buffered.stored + np.arange(start, stop)


class BufferedSessions(BufferedWindows):
    """Sessions over buffered rows. A retraction may cut a session in two.

    A new row is late if its session would consist of new rows only and end at or before the
    horizon. A retraction is late if its session is expired or never had the row.
    """

    def __init__(self, settings: WindowSettings) -> None:
        super().__init__(settings)
        assert isinstance(settings.window, Session)
        self.gap_us = settings.window.gap_us

    def spans(self, keys: Ints, times: Times) -> Spans:
        chain = chains(keys, times, times + self.gap_us)
        first = np.flatnonzero(np.diff(chain, prepend=-1))
        stop = np.append(first[1:], len(chain))[: len(first)]
        return Spans(
            keys=keys[first],
            starts=times[first],
            ends=times[stop - 1] + self.gap_us,
            first=first,
            stop=stop,
        )

    def is_needed(self, keys: Ints, times: Times, horizon: int) -> Mask:
        spans = self.spans(keys, times)
        return np.repeat(spans.ends > horizon, spans.stop - spans.first)

    def accepted(self, keys: Ints, times: Times, is_new: Mask, horizon: int) -> Mask:
        if not len(keys):
            return is_new
        spans = self.spans(keys, times)
        live = np.logical_or.reduceat(~is_new, spans.first) | (spans.ends > horizon)
        return np.repeat(live, spans.stop - spans.first)

    def is_retractable(self, times: Times, horizon: int) -> Mask:  # noqa: ARG002
        return np.ones(len(times), np.bool_)

    def reach(self, starts: Times, ends: Times) -> tuple[Times, Times]:
        return starts - self.gap_us + 1, ends

    def timers(
        self, keys: Ints, times: Times, watermark_us: int
    ) -> tuple[Ints, Times, Times, Mask]:
        """One timer for each session."""
        spans = self.spans(keys, times)
        waits = (
            spans.ends > watermark_us if self.emits_final else np.zeros(len(spans.keys), np.bool_)
        )
        return spans.keys, spans.starts, spans.ends, waits


class BufferedSlidingWindows(BufferedWindows):
    """Sliding windows over buffered rows: for each time t of a row, the rows of its group in (t -
    size, t].

    A row or retraction is late if t lies before the horizon. The window is stored as one that ends
    at t + 1 microsecond: it is emitted once no row at t or before is expected.
    """

    shown_end_shift_us = -1

    def __init__(self, settings: WindowSettings) -> None:
        super().__init__(settings)
        assert isinstance(settings.window, Sliding)
        self.size_us = settings.window.size_us

    def spans(self, keys: Ints, times: Times) -> Spans:
        last = (
            np.flatnonzero(np.append(group_start_mask(keys, times)[1:], True))
            if len(keys)
            else keys
        )
        of, at = keys[last], times[last]
        where = key_bounds(keys, int(keys[-1]) + 1) if len(keys) else np.zeros(1, np.int64)
        first = search_within(times, where[of], last, at - self.size_us, right=True)
        return Spans(keys=of, starts=at - self.size_us, ends=at + 1, first=first, stop=last + 1)

    def is_needed(self, keys: Ints, times: Times, horizon: int) -> Mask:  # noqa: ARG002
        needed: Mask = times > max(horizon - self.size_us, UNSTARTED)
        return needed

    def accepted(self, keys: Ints, times: Times, is_new: Mask, horizon: int) -> Mask:  # noqa: ARG002
        return ~is_new | (times >= horizon)

    def is_retractable(self, times: Times, horizon: int) -> Mask:
        return times >= horizon

    def counts_as_window(self, ends: Times, horizon: int) -> Mask:
        return ends > horizon

    def reach(self, starts: Times, ends: Times) -> tuple[Times, Times]:
        return starts + 1, ends

    def timers(
        self, keys: Ints, times: Times, watermark_us: int
    ) -> tuple[Ints, Times, Times, Mask]:
        """One timer for the first window of a group that waits to be emitted, and one for when its
        last row is no longer needed.
        """
        last = np.flatnonzero(np.append(keys[1:] != keys[:-1], True)) if len(keys) else keys
        waiting = np.flatnonzero(times >= watermark_us) if self.emits_final else keys[:0]
        first = waiting[group_start_mask(keys[waiting])] if len(waiting) else waiting
        of = np.concatenate([keys[last], keys[first]])
        ends = np.concatenate([times[last] + self.size_us, times[first] + 1])
        return of, np.zeros(len(of), np.int64), ends, np.arange(len(of)) >= len(last)
