"""Sessions over streams, for aggregates whose states can be merged.

A session is a state; where a row bridges two sessions, their states are merged. Within a tick, the
rows of a group that follow each other by less than the gap form an *island*; an island and the
sessions that it overlaps become one session. An island that overlaps none is late if it ends at or
before the step's horizon. `count()` by `k` with a gap of 10 s, times in seconds:

    rows in              watermark  state after                      rows out
    tick 1: k=a at 0     at 0       w a [0,10) -> 1; i a: [0,10)
    tick 2: k=a at 15    at 2       w a [0,10) -> 1, [15,25) -> 1
    tick 3: k=a at 7     at 3       w a [0,25) -> 3; i a: [0,25)
    tick 4: (no rows)    at 26                                       tick 4: insert a [0,25) 3

The state of a session is an entry like any window's (see `state`). Each group also has an index of
its open sessions, so that a row finds those that it overlaps without a scan:

    name      `i`, the group's key
    value     version 1; the start and end of each session, 8 bytes each, little-endian, in order

Over tables, and for aggregates whose states cannot be merged, see `buffered_window`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask, expand_ranges, offsets_of
from headrace.columnar.columns import TICK
from headrace.columnar.keys import as_array, encode_keys, key_groups
from headrace.columnar.lookup import (
    group_start_mask,
    key_bounds,
    number_keys,
    search_within,
    sort_order,
)
from headrace.columnar.segments import Segments
from headrace.errors import NewerFormat
from headrace.operators.aggregates.partial_aggregation import (
    PARTIAL,
    PRODUCERS,
    combine_panes,
    combine_rest,
    is_worth_combining,
)
from headrace.operators.aggregates.state_pool import StateMerger, StatePool, States
from headrace.operators.kernel import Groups, KeyedState, Times, Watermarks, microseconds
from headrace.operators.windows.kernel import WindowKernel, WindowSettings, shown_over_lifetimes
from headrace.operators.windows.late_rows import row_tick_indices
from headrace.operators.windows.specs import Session
from headrace.operators.windows.state import (
    GroupKeys,
    WindowHistory,
    Windows,
    WindowVersions,
    chains,
    distinct_windows,
    with_long_keys,
)

_VERSION = 1
_NAME = pa.scalar(b"i", pa.binary())
_NOTHING = pa.scalar(b"", pa.binary())
_SESSION_BYTES = 16


@dataclass(frozen=True)
class SessionRanges:
    """Sessions or islands: the number of each one's group, and its bounds."""

    keys: Ints
    starts: Times
    ends: Times

    def __len__(self) -> int:
        return len(self.keys)

    def filter(self, which: Mask) -> SessionRanges:
        return SessionRanges(self.keys[which], self.starts[which], self.ends[which])

    def take(self, which: Ints) -> SessionRanges:
        return SessionRanges(self.keys[which], self.starts[which], self.ends[which])

    def concat(self, other: SessionRanges) -> SessionRanges:
        pairs = ((self.keys, other.keys), (self.starts, other.starts), (self.ends, other.ends))
        return SessionRanges(*(np.concatenate(pair) for pair in pairs))


class SessionIndex:
    """The open sessions of some groups, during one call."""

    def __init__(self, step: str, state: KeyedState, by: pa.Array, groups: Groups) -> None:
        self._step_name = step
        self._state = state
        self._groups = groups
        self._names = pc.binary_join_element_wise(_NAME, by.cast(pa.binary()), _NOTHING)
        self._values = state.get_array(self._names, groups)
        self.sessions = self._read()

    def _read(self) -> SessionRanges:
        values = self._values.drop_null()
        if not len(values):
            return SessionRanges(*(np.zeros(0, np.int64) for _ in range(3)))
        data, offsets = np.frombuffer(values.buffers()[2], np.uint8), offsets_of(values)
        if int(data[offsets[:-1]].max()) > _VERSION:
            raise NewerFormat(
                f"The state of step {self._step_name!r} was written by a newer Headrace.",
                fix="upgrade Headrace.",
            )
        lengths = np.diff(offsets) - 1
        pairs = data[expand_ranges(offsets[:-1] + 1, lengths)].view("<i8").reshape(-1, 2)
        there = np.flatnonzero(self._values.is_valid().to_numpy(zero_copy_only=False))
        return SessionRanges(
            np.repeat(there, lengths // _SESSION_BYTES), pairs[:, 0].copy(), pairs[:, 1].copy()
        )

    def write(self, sessions: SessionRanges) -> None:
        """Store the sessions that the groups have now; the entries of unchanged groups are not
        touched.
        """
        order = sort_order(sessions.keys, sessions.starts)
        pairs = np.stack([sessions.starts[order], sessions.ends[order]], axis=1).astype("<i8")
        counts = np.bincount(sessions.keys, minlength=len(self._names))
        sizes = np.where(counts > 0, 1 + counts * _SESSION_BYTES, 0)
        offsets = np.append(0, np.cumsum(sizes))
        data = np.full(int(offsets[-1]), _VERSION, np.uint8)
        data[expand_ranges(offsets[:-1][counts > 0] + 1, counts[counts > 0] * _SESSION_BYTES)] = (
            pairs.view(np.uint8).reshape(-1)
        )
        fresh = pa.BinaryArray.from_buffers(
            pa.binary(),
            len(sizes),
            [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)],
        )
        fresh = pc.if_else(pa.array(counts > 0), fresh, pa.scalar(None, pa.binary()))
        changed = pc.not_equal(pc.fill_null(fresh, b""), pc.fill_null(self._values, b""))
        which = changed.to_numpy(zero_copy_only=False)
        self._state.put_array(
            self._names.filter(changed), fresh.filter(changed), self._groups[which]
        )


UNTIL = "_until"
"""The column of combined rows with the time of the last row that they stand for."""
_NO_KEYS = pa.nulls(0, pa.binary())
_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Islands:
    """Rows of a group and tick that follow each other by less than the gap."""

    ranges: SessionRanges
    tick_index: Ints
    of_row: Ints
    """The island of each row."""
    states: States
    """The aggregate state of each island's rows."""


@dataclass(frozen=True)
class SessionChains:
    """Sessions and islands in order of group and start, cut into chains of overlapping ones."""

    order: Ints
    """The order of sessions, numbered first, and islands, numbered after them."""
    chain: Ints
    """The chain of each session or island, in that order."""
    is_new: Mask
    """Which of them are islands, in that order."""
    ranges: SessionRanges
    """The extent of each chain."""
    has_old: Mask
    """Which chains have a session."""
    has_new: Mask
    """Which chains have an island."""
    known: int
    """The number of sessions."""

    @staticmethod
    def of(sessions: SessionRanges, islands: SessionRanges) -> SessionChains:
        """The chains of some sessions and islands."""
        both = sessions.concat(islands)
        order = sort_order(both.keys, both.starts)
        chain = chains(both.keys[order], both.starts[order], both.ends[order])
        first = np.flatnonzero(np.diff(chain, prepend=-1))
        is_new = order >= len(sessions)
        ranges = SessionRanges(
            both.keys[order[first]],
            both.starts[order[first]],
            np.maximum.reduceat(both.ends[order], first),
        )
        return SessionChains(
            order=order,
            chain=chain,
            is_new=is_new,
            ranges=ranges,
            has_old=np.logical_or.reduceat(~is_new, first),
            has_new=np.logical_or.reduceat(is_new, first),
            known=len(sessions),
        )

    def sessions(self, which: Mask) -> Ints:
        """The sessions in some chains."""
        return self.order[which[self.chain] & ~self.is_new]

    def islands(self, which: Mask) -> Ints:
        """The islands in some chains."""
        return self.order[which[self.chain] & self.is_new] - self.known


class SessionWindows(WindowKernel):
    """Sessions: rows that follow each other by less than the gap."""

    def __init__(self, settings: WindowSettings) -> None:
        super().__init__(settings)
        assert isinstance(settings.window, Session)
        self.gap_us = settings.window.gap_us
        self._merger = StateMerger(self.aggregation)

    def advance(self, state: KeyedState, rows: pa.Table, watermarks: Watermarks) -> pa.Table:
        """Process the rows of some ticks.

        1. Form islands.
        2. Read the sessions that they overlap, and those that the watermarks complete.
        3. Merge islands and sessions tick by tick.
        4. Emit what changed.
        5. Store the sessions and the index.
        """
        if PARTIAL in rows.schema.names:
            rows = combine_rest(rows, self.combine, [PRODUCERS, UNTIL])
        keys, ranks = number_keys(
            [
                encode_keys(rows, self.by),
                self.scan_completed(state, watermarks).group_keys,
                self.scan_expired(state, watermarks),
            ]
        )
        if not len(keys):
            return self.empty_output()
        grouped = GroupKeys(keys, key_groups(keys), _NO_KEYS)
        index = SessionIndex(self.step_name, state, grouped.group_keys, grouped.groups)
        islands = self._islands(rows, ranks[0], watermarks)
        is_read = overlaps(index.sessions, islands.ranges)
        if self.emits_final:
            is_read |= (index.sessions.ends > watermarks.watermark_at_start) & (
                index.sessions.ends <= watermarks.watermark[-1]
            )
        before, not_read = index.sessions.filter(is_read), index.sessions.filter(~is_read)
        names = self._windows(grouped, before).names(
            self._waits(before, watermarks.watermark_at_start)
        )
        pool = StatePool(
            self._merger.open_states(state.get_array(names, grouped.groups[before.keys]))
        )
        history, states = self._merge_ticks(rows, islands, before, pool, watermarks)
        emitted = self._emit(grouped, history, pool.take(states), watermarks)
        self._store_sessions(
            state,
            grouped,
            (names, before),
            not_read,
            history,
            pool.take(states[history.current.numbers]),
            watermarks,
        )
        sessions = not_read.concat(_current_sessions(history))
        horizon = self.step_horizon(watermarks.horizon[-1:])[0]
        index.write(sessions.filter(sessions.ends > horizon))
        return emitted

    def _waits(self, sessions: SessionRanges, watermark_us: int) -> Mask:
        """Which sessions wait to be emitted, at a watermark."""
        if not self.emits_final:
            return np.zeros(len(sessions), np.bool_)
        return sessions.ends > watermark_us

    # Rows into islands

    def _islands(self, rows: pa.Table, keys: Ints, watermarks: Watermarks) -> Islands:
        starts, tick_index = self.times(rows), row_tick_indices(rows, watermarks)
        lasts = starts
        if UNTIL in rows.schema.names:
            lasts = microseconds(rows.column(UNTIL)) + self.settings.time_shift_us
        ends = lasts + self.gap_us
        order = sort_order(tick_index, keys, starts)
        chain = chains(
            (tick_index * (int(keys.max(initial=0)) + 1) + keys)[order], starts[order], ends[order]
        )
        of_row = np.empty(len(order), np.int64)
        of_row[order] = chain
        first = np.flatnonzero(np.diff(chain, prepend=-1))
        until = np.maximum.reduceat(ends[order], first) if len(first) else _NONE
        ranges = SessionRanges(keys[order[first]], starts[order[first]], until)
        return Islands(
            ranges=ranges,
            tick_index=tick_index[order[first]],
            of_row=of_row,
            states=self._island_states(rows, order, first, chain),
        )

    def _island_states(self, rows: pa.Table, order: Ints, first: Ints, chain: Ints) -> States:
        """The state of each island, from its rows or from the states of combined rows."""
        if PARTIAL not in rows.schema.names:
            return self._merger.lift(
                Segments(
                    rows=rows,
                    order=order,
                    starts=first,
                    ticks=np.zeros(len(first), np.int64),
                    firsts=np.arange(len(first)),
                    keys=_NO_KEYS,
                )
            )
        states = StatePool(self._merger.open_states(as_array(rows.column(PARTIAL)))).take(order)
        return self._merger.reduce(states, chain)

    # Tick by tick

    def _merge_ticks(
        self,
        rows: pa.Table,
        islands: Islands,
        before: SessionRanges,
        pool: StatePool,
        watermarks: Watermarks,
    ) -> tuple[WindowHistory, Ints]:
        """All versions of sessions during the call, and the number of each version's state in the
        pool.
        """
        horizons = self.step_horizon(watermarks.horizon_before)
        of_islands = pool.add(islands.states)
        history, states = WindowHistory(), [np.arange(len(before))]
        history.add(_versions(before), -1)
        late = np.zeros(len(of_islands), np.bool_)
        bounds = np.searchsorted(islands.tick_index, np.arange(len(watermarks) + 1))
        for tick in np.unique(islands.tick_index).tolist():
            mine = np.arange(bounds[tick], bounds[tick + 1])
            known = np.concatenate(states)
            states.append(
                self._merge_tick(
                    history,
                    known,
                    islands.ranges,
                    (mine, of_islands),
                    late,
                    pool,
                    tick,
                    int(horizons[tick]),
                )
            )
        if late.any():
            tick_index, times = row_tick_indices(rows, watermarks), self.times(rows)
            self.counts["late"] += self.late_rows.add(
                rows,
                late[islands.of_row],
                watermarks.times_us[tick_index],
                horizons[tick_index] - times,
            )
        return history, np.concatenate(states)

    def _merge_tick(
        self,
        history: WindowHistory,
        known: Ints,
        ranges: SessionRanges,
        islands: tuple[Ints, Ints],
        late: Mask,
        pool: StatePool,
        tick: int,
        horizon: int,
    ) -> Ints:
        """Merge a tick's islands with the sessions that they overlap; returns the numbers of the
        new states.

        Args:
            history: The versions of sessions so far.
            known: The number of each version's state.
            ranges: All islands of the call.
            islands: The islands of this tick, and the numbers of all islands' states.
            late: Set to true for the islands that are late.
            pool: The states.
            tick: The index of the tick.
            horizon: The step's horizon before the tick.
        """
        mine, of_islands = islands
        touched = np.zeros(
            int(max(ranges.keys.max(initial=0), history.current.keys.max(initial=0))) + 1, np.bool_
        )
        touched[ranges.keys[mine]] = True
        history.forget(touched[history.current.keys] & (history.current.ends <= horizon))
        old = history.current
        current = np.flatnonzero(touched[old.keys])
        chained = SessionChains.of(_current_sessions(history).take(current), ranges.take(mine))
        accepted = chained.has_old | (chained.ranges.ends > horizon)
        late[mine[chained.islands(~accepted)]] = True
        changed = chained.has_new & accepted
        ended = np.zeros(len(old.numbers), np.bool_)
        ended[current[chained.sessions(changed)]] = True
        history.end(ended, tick)
        history.add(_versions(chained.ranges.filter(changed)), tick)
        numbers = np.concatenate([known[old.numbers[current]], of_islands[mine]])
        members = changed[chained.chain]
        return pool.add(
            self._merger.reduce(pool.take(numbers[chained.order[members]]), chained.chain[members])
        )

    # Emitting and storing

    @staticmethod
    def _windows(grouped: GroupKeys, sessions: SessionRanges) -> Windows:
        return Windows(
            group_keys=grouped.group_keys.take(pa.array(sessions.keys)),
            starts=sessions.starts,
            ends=sessions.ends,
            groups=grouped.groups[sessions.keys],
        )

    def _emit(
        self, grouped: GroupKeys, history: WindowHistory, states: States, watermarks: Watermarks
    ) -> pa.Table:
        versions = history.all()
        if not len(versions):
            return self.empty_output()
        results = self._merger.results(states)
        windows, window = distinct_windows(grouped, versions.keys, versions.starts, versions.ends)
        shown = shown_over_lifetimes(
            window,
            history.born,
            history.died,
            self.emitted_from(versions.ends, watermarks),
            len(watermarks),
        )
        emitted, changes = self.emit_rows(windows, shown, results, watermarks)
        results.count_unknown(self.aggregation, changes.versions[changes.additions])
        return emitted

    def _store_sessions(
        self,
        state: KeyedState,
        grouped: GroupKeys,
        before: tuple[pa.Array, SessionRanges],
        others: SessionRanges,
        history: WindowHistory,
        states: States,
        watermarks: Watermarks,
    ) -> None:
        """Store the sessions that were read as they are now, and delete expired ones,
        read or not.
        """
        (horizon,) = self.step_horizon(watermarks.horizon[-1:]).tolist()
        now = _current_sessions(history)
        is_open = now.ends > horizon
        windows, values = self._windows(grouped, now), self._merger.close_states(states)
        names = windows.names(self._waits(now, int(watermarks.watermark[-1])))
        kept = names.filter(pa.array(is_open))
        state.put_array(
            kept, with_long_keys(kept, values.filter(pa.array(is_open))), windows.groups[is_open]
        )
        expired = others.filter(others.ends <= horizon)
        expired_names = self._windows(grouped, expired).names(np.zeros(len(expired), np.bool_))
        for old_names, sessions in (before, (expired_names, expired)):
            is_kept = pc.is_in(old_names.cast(pa.binary()), kept.cast(pa.binary()))
            gone = pc.invert(is_kept).to_numpy(zero_copy_only=False)
            state.put_array(
                old_names.filter(pa.array(gone)),
                pa.nulls(int(gone.sum()), pa.binary()),
                grouped.groups[sessions.keys[gone]],
            )

    # Partial aggregation before the shuffle

    @property
    def combinable(self) -> bool:
        """Whether rows may be combined: unless late rows must be kept whole."""
        return not self.late_rows.divert

    def is_worth_combining(self, rows: pa.Table) -> bool:
        """Whether `combine` would leave far fewer rows if each group had one island. The answer
        affects speed only.
        """
        return self.combinable and is_worth_combining(rows, self.by)

    def combine(self, rows: pa.Table) -> pa.Table:
        """Combine the rows of each group, tick and island into one, which the step
        accepts instead.
        """
        times, ticks = self.times(rows), as_array(rows.column(TICK)).to_numpy()
        (groups,) = number_keys([encode_keys(rows, self.by)])[1]
        order = sort_order(ticks, groups, times)
        rows, times = rows.take(pa.array(order)), times[order]
        new = group_start_mask(ticks[order], groups[order])
        new[1:] |= times[1:] >= times[:-1] + self.gap_us
        first, island = np.flatnonzero(new), np.cumsum(new) - 1
        last = np.append(first[1:], len(times))[: len(first)] - 1
        at = rows.schema.get_field_index(self.settings.time)
        column = as_array(rows.column(at))
        rows = rows.set_column(at, rows.schema.field(at), column.take(pa.array(first[island])))
        rows = rows.append_column(UNTIL, column.take(pa.array(last[island])))
        return combine_panes(
            rows,
            self.by,
            [self.settings.time, UNTIL],
            island,
            self.late_rows.producers(rows),
            self.aggregation.partials,
        )


def _versions(sessions: SessionRanges) -> WindowVersions:
    return WindowVersions(
        keys=sessions.keys, starts=sessions.starts, ends=sessions.ends, lengths=_NONE, entries=_NONE
    )


def _current_sessions(history: WindowHistory) -> SessionRanges:
    return SessionRanges(history.current.keys, history.current.starts, history.current.ends)


def overlaps(sessions: SessionRanges, islands: SessionRanges) -> Mask:
    """Which sessions overlap an island of their group."""
    order = sort_order(islands.keys, islands.starts)
    keys = islands.keys[order]
    starts = islands.starts[order]
    ends = islands.ends[order]
    chain = chains(keys, starts, ends)
    first = np.flatnonzero(np.diff(chain, prepend=-1))
    if not len(first):
        return np.zeros(len(sessions), np.bool_)
    where = key_bounds(keys[first], int(max(keys[-1], sessions.keys.max(initial=0))) + 1)
    until = np.maximum.reduceat(ends, first)
    candidate = search_within(
        until, where[sessions.keys], where[sessions.keys + 1], sessions.starts, right=True
    )
    inside: Mask = candidate < where[sessions.keys + 1]
    inside[inside] = starts[first][candidate[inside]] < sessions.ends[inside]
    return inside
