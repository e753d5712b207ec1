"""Sessions over streams, for aggregates whose states can be put together: a session is a state, and
where a row bridges two, their states become one.

Within a tick, rows of a group that follow each other in less than the gap are an island; islands
and the sessions that they touch become one session. An island that touches none is late if it ends
at or before the time up to which windows are closed. A session's state is an entry as any window's
(`entries`), and each group has an index of its sessions (`session_index`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask, offsets_of, runs
from headrace.columnar.columns import TICK
from headrace.columnar.keys import encode_keys, key_groups, whole
from headrace.columnar.lookup import begins, bounds, numbered, search, sorting
from headrace.columnar.segments import Segments
from headrace.errors import NewerFormat
from headrace.operators.aggregates.aggregation import PARTIAL, all_combined, pays
from headrace.operators.aggregates.state_pool import Merging, Pool, States
from headrace.operators.kernel import Groups, KeyedState, Times, Watermarks, microseconds
from headrace.operators.windows.buffered_window import Grouped, closing, distinct_windows
from headrace.operators.windows.kernel import Windowed, WindowStep, over_lifetimes
from headrace.operators.windows.late_rows import PRODUCERS, combine, places_of
from headrace.operators.windows.specs import Session
from headrace.operators.windows.state import History, Sets, Windows, chains, with_long_keys

# The sessions of a group that are not closed, as an entry of their own: so that a row finds those
# that it touches without a scan.
#
# | entry | name | bytes | |---|---|---| | index | `i`, the group's key | version 1; start and end
# of each session, little-endian, in order |


_VERSION = 1
_NAME = pa.scalar(b"i", pa.binary())
_NOTHING = pa.scalar(b"", pa.binary())
_SESSION_BYTES = 16


@dataclass(frozen=True)
class Ranges:
    """Sessions: the group of each as its number, and its bounds."""

    keys: Ints
    starts: Times
    ends: Times

    def __len__(self) -> int:
        return len(self.keys)

    def only(self, which: Mask) -> Ranges:
        return Ranges(self.keys[which], self.starts[which], self.ends[which])

    def take(self, which: Ints) -> Ranges:
        return Ranges(self.keys[which], self.starts[which], self.ends[which])

    def and_also(self, other: Ranges) -> Ranges:
        pairs = ((self.keys, other.keys), (self.starts, other.starts), (self.ends, other.ends))
        return Ranges(*(np.concatenate(pair) for pair in pairs))


class SessionIndex:
    """The index of some groups, during one step."""

    def __init__(self, step: str, state: KeyedState, by: pa.Array, groups: Groups) -> None:
        self._step_name, self._state, self._groups = step, state, groups
        self._names = pc.binary_join_element_wise(_NAME, by.cast(pa.binary()), _NOTHING)
        self._values = state.get_array(self._names, groups)
        self.sessions = self._read()

    def _read(self) -> Ranges:
        values = self._values.drop_null()
        if not len(values):
            return Ranges(*(np.zeros(0, np.int64) for _ in range(3)))
        data, offsets = np.frombuffer(values.buffers()[2], np.uint8), offsets_of(values)
        if int(data[offsets[:-1]].max()) > _VERSION:
            raise NewerFormat(
                f"The state of step {self._step_name!r} was written by a newer Headrace.",
                fix="upgrade Headrace.",
            )
        lengths = np.diff(offsets) - 1
        pairs = data[runs(offsets[:-1] + 1, lengths)].view("<i8").reshape(-1, 2)
        there = np.flatnonzero(self._values.is_valid().to_numpy(zero_copy_only=False))
        return Ranges(
            np.repeat(there, lengths // _SESSION_BYTES), pairs[:, 0].copy(), pairs[:, 1].copy()
        )

    def write(self, sessions: Ranges) -> None:
        """What the groups have now; those that have as before are left alone."""
        order = sorting(sessions.keys, sessions.starts)
        pairs = np.stack([sessions.starts[order], sessions.ends[order]], axis=1).astype("<i8")
        counts = np.bincount(sessions.keys, minlength=len(self._names))
        sizes = np.where(counts > 0, 1 + counts * _SESSION_BYTES, 0)
        offsets = np.append(0, np.cumsum(sizes))
        data = np.full(int(offsets[-1]), _VERSION, np.uint8)
        data[runs(offsets[:-1][counts > 0] + 1, counts[counts > 0] * _SESSION_BYTES)] = pairs.view(
            np.uint8
        ).reshape(-1)
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
"""In rows that were combined: the time of the last row that they stand for."""
_NO_KEYS = pa.nulls(0, pa.binary())
_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Islands:
    """Rows of a group and tick that follow each other in less than the gap: the bounds of each and
    its tick's place; each row's island; the state of each one's rows.
    """

    ranges: Ranges
    places: Ints
    of_row: Ints
    states: States


@dataclass(frozen=True)
class Chained:
    """Sessions and islands that overlap, in chains: the ranges of both in order of group and start,
    the chain of each, and what each chain amounts to.
    """

    order: Ints  # sessions first, then islands
    chain: Ints
    is_new: Mask  # whether it is an island
    ranges: Ranges
    has_old: Mask
    has_new: Mask
    known: int

    @staticmethod
    def of(sessions: Ranges, islands: Ranges) -> Chained:
        both = sessions.and_also(islands)
        order = sorting(both.keys, both.starts)
        chain = chains(both.keys[order], both.starts[order], both.ends[order])
        first = np.flatnonzero(np.diff(chain, prepend=-1))
        is_new = order >= len(sessions)
        ranges = Ranges(
            both.keys[order[first]],
            both.starts[order[first]],
            np.maximum.reduceat(both.ends[order], first),
        )
        return Chained(
            order,
            chain,
            is_new,
            ranges,
            np.logical_or.reduceat(~is_new, first),
            np.logical_or.reduceat(is_new, first),
            len(sessions),
        )

    def sessions(self, which: Mask) -> Ints:
        """The sessions in some chains."""
        return self.order[which[self.chain] & ~self.is_new]

    def islands(self, which: Mask) -> Ints:
        """The islands in some chains."""
        return self.order[which[self.chain] & self.is_new] - self.known


class Sessions(Windowed):
    """Rows that follow each other in less than the gap."""

    def __init__(self, step: WindowStep) -> None:
        super().__init__(step)
        assert isinstance(step.window, Session)
        self.gap_us = step.window.gap_us
        self._merging = Merging(self.aggregation)

    def advance(self, state: KeyedState, rows: pa.Table, clock: Watermarks) -> pa.Table:
        """1. Make islands. 2. Read the sessions that they touch, and those that the clocks
        complete. 3. Go through the ticks. 4. Store. 5. Tell.
        """
        rows = (
            all_combined(rows, self.combine, [PRODUCERS, UNTIL])
            if PARTIAL in rows.schema.names
            else rows
        )
        keys, ranks = numbered(
            [
                encode_keys(rows, self.by),
                self.completed(state, clock).by,
                closing(self, state, clock),
            ]
        )
        if not len(keys):
            return self.nothing()
        grouped = Grouped(keys, key_groups(keys), _NO_KEYS)
        index = SessionIndex(self.step_name, state, grouped.by, grouped.groups)
        islands = self._islands(rows, ranks[0], clock)
        read = self._read(index.sessions, islands.ranges, clock)
        before = index.sessions.only(read)
        names = self._windows(grouped, before).names(self._waits(before, clock.watermark_at_start))
        pool = Pool(self._merging.opened(state.get_array(names, grouped.groups[before.keys])))
        history, states = self._through(rows, islands, before, pool, clock)
        table = self._result(grouped, history, pool.pick(states), clock)
        self._put(
            state,
            grouped,
            (names, before),
            index.sessions.only(~read),
            history,
            pool.pick(states[history.current.numbers]),
            clock,
        )
        index.write(self._open(index.sessions.only(~read).and_also(_current(history)), clock))
        return table

    def _read(self, sessions: Ranges, islands: Ranges, clock: Watermarks) -> Mask:
        """Which stored sessions something happens to: islands touch them, or the clocks complete
        them.
        """
        read = overlaps(sessions, islands)
        if self.final:
            read |= (sessions.ends > clock.watermark_at_start) & (
                sessions.ends <= clock.complete[-1]
            )
        return read

    def _waits(self, sessions: Ranges, watermark_us: int) -> Mask:
        return sessions.ends > watermark_us if self.final else np.zeros(len(sessions), np.bool_)

    def _open(self, sessions: Ranges, clock: Watermarks) -> Ranges:
        return sessions.only(sessions.ends > self.bounds(clock.closed[-1:])[0])

    # Rows into islands

    def _islands(self, rows: pa.Table, keys: Ints, clock: Watermarks) -> Islands:
        starts, places = self.times(rows), places_of(rows, clock)
        ends = self._lasts(rows, starts) + self.gap_us
        order = sorting(places, keys, starts)
        chain = chains(
            (places * (int(keys.max(initial=0)) + 1) + keys)[order], starts[order], ends[order]
        )
        of_row = np.empty(len(order), np.int64)
        of_row[order] = chain
        first = np.flatnonzero(np.diff(chain, prepend=-1))
        until = np.maximum.reduceat(ends[order], first) if len(first) else _NONE
        ranges = Ranges(keys[order[first]], starts[order[first]], until)
        return Islands(
            ranges, places[order[first]], of_row, self._lifted(rows, order, first, chain)
        )

    def _lasts(self, rows: pa.Table, starts: Times) -> Times:
        return (
            microseconds(rows.column(UNTIL)) + self.settings.time_shift_us
            if UNTIL in rows.schema.names
            else starts
        )

    def _lifted(self, rows: pa.Table, order: Ints, first: Ints, chain: Ints) -> States:
        if PARTIAL not in rows.schema.names:
            return self._merging.lifted(
                Segments(
                    rows,
                    order,
                    first,
                    np.zeros(len(first), np.int64),
                    np.arange(len(first)),
                    _NO_KEYS,
                )
            )
        states = Pool(self._merging.opened(whole(rows.column(PARTIAL)))).pick(order)
        return self._merging.reduced(states, chain)

    # Tick by tick

    def _through(
        self, rows: pa.Table, islands: Islands, before: Ranges, pool: Pool, clock: Watermarks
    ) -> tuple[History, Ints]:
        """What sessions were at every tick, and for each of these versions the number of its
        state.
        """
        limits = self.bounds(clock.horizon_before)
        of_islands = pool.add(islands.states)
        history, states = History(), [np.arange(len(before))]
        history.add(_versions(before), -1)
        late = np.zeros(len(of_islands), np.bool_)
        bounds = np.searchsorted(islands.places, np.arange(len(clock) + 1))
        for place in np.unique(islands.places).tolist():
            mine = np.arange(bounds[place], bounds[place + 1])
            known = np.concatenate(states)
            states.append(
                self._tick(
                    history,
                    known,
                    islands.ranges,
                    (mine, of_islands),
                    late,
                    pool,
                    place,
                    int(limits[place]),
                )
            )
        if late.any():
            places, times = places_of(rows, clock), self.times(rows)
            self.counts["late"] += self.late.add(
                rows, late[islands.of_row], clock.times_us[places], limits[places] - times
            )
        return history, np.concatenate(states)

    def _tick(
        self,
        history: History,
        known: Ints,
        ranges: Ranges,
        islands: tuple[Ints, Ints],
        late: Mask,
        pool: Pool,
        place: int,
        limit: int,
    ) -> Ints:
        """Sessions that a tick's islands touch become one with them; gives the numbers of the new
        versions' states.
        """
        mine, of_islands = islands
        touched = np.zeros(
            int(max(ranges.keys.max(initial=0), history.current.keys.max(initial=0))) + 1, np.bool_
        )
        touched[ranges.keys[mine]] = True
        history.forget(touched[history.current.keys] & (history.current.ends <= limit))
        old = history.current
        current = np.flatnonzero(touched[old.keys])
        chained = Chained.of(_current(history).take(current), ranges.take(mine))
        taken = chained.has_old | (chained.ranges.ends > limit)
        late[mine[chained.islands(~taken)]] = True
        changed = chained.has_new & taken
        ended = np.zeros(len(old.numbers), np.bool_)
        ended[current[chained.sessions(changed)]] = True
        history.end(ended, place)
        history.add(_versions(chained.ranges.only(changed)), place)
        numbers = np.concatenate([known[old.numbers[current]], of_islands[mine]])
        members = changed[chained.chain]
        return pool.add(
            self._merging.reduced(
                pool.pick(numbers[chained.order[members]]), chained.chain[members]
            )
        )

    # What is stored and told

    @staticmethod
    def _windows(grouped: Grouped, sessions: Ranges) -> Windows:
        return Windows(
            grouped.by.take(pa.array(sessions.keys)),
            sessions.starts,
            sessions.ends,
            grouped.groups[sessions.keys],
        )

    def _result(
        self, grouped: Grouped, history: History, states: States, clock: Watermarks
    ) -> pa.Table:
        sets = history.all()
        if not len(sets):
            return self.nothing()
        shows = self._merging.results(states)
        windows, window = distinct_windows(grouped, sets.keys, sets.starts, sets.ends)
        shown = over_lifetimes(
            window, history.born, history.died, self.told_from(sets.ends, clock), len(clock)
        )
        table, changes = self.told(windows, shown, shows, clock)
        shows.count_lost(self.aggregation, changes.versions[changes.comes])
        return table

    def _put(
        self,
        state: KeyedState,
        grouped: Grouped,
        before: tuple[pa.Array, Ranges],
        others: Ranges,
        history: History,
        states: States,
        clock: Watermarks,
    ) -> None:
        """The sessions that were read, as they are now, under their new names; what is closed goes,
        also of the sessions that were not read.
        """
        (limit,) = self.bounds(clock.closed[-1:]).tolist()
        now = _current(history)
        there = now.ends > limit
        windows, values = self._windows(grouped, now), self._merging.stored(states)
        names = windows.names(self._waits(now, int(clock.complete[-1])))
        kept = names.filter(pa.array(there))
        state.put_array(
            kept, with_long_keys(kept, values.filter(pa.array(there))), windows.groups[there]
        )
        closed = others.only(others.ends <= limit)
        for old, of in (
            before,
            (self._windows(grouped, closed).names(np.zeros(len(closed), np.bool_)), closed),
        ):
            gone = pc.invert(pc.is_in(old.cast(pa.binary()), kept.cast(pa.binary()))).to_numpy(
                zero_copy_only=False
            )
            state.put_array(
                old.filter(pa.array(gone)),
                pa.nulls(int(gone.sum()), pa.binary()),
                grouped.groups[of.keys[gone]],
            )

    # Combining before the shuffle

    @property
    def combinable(self) -> bool:
        """Unless some rows are needed whole."""
        return not self.late.divert

    def worth_combining(self, rows: pa.Table) -> bool:
        """Whether `combine` would make these rows far fewer, if groups had but one island each. It
        decides about speed alone.
        """
        return self.combinable and pays(rows, self.by)

    def combine(self, rows: pa.Table) -> pa.Table:
        """Rows as fewer rows, one for each group, tick and island, that the step takes in their
        stead. See `combining`.
        """
        times, ticks = self.times(rows), whole(rows.column(TICK)).to_numpy()
        (groups,) = numbered([encode_keys(rows, self.by)])[1]
        order = sorting(ticks, groups, times)
        rows, times = rows.take(pa.array(order)), times[order]
        new = begins(ticks[order], groups[order])
        new[1:] |= times[1:] >= times[:-1] + self.gap_us
        first, island = np.flatnonzero(new), np.cumsum(new) - 1
        last = np.append(first[1:], len(times))[: len(first)] - 1
        at = rows.schema.get_field_index(self.settings.time)
        column = whole(rows.column(at))
        rows = rows.set_column(at, rows.schema.field(at), column.take(pa.array(first[island])))
        rows = rows.append_column(UNTIL, column.take(pa.array(last[island])))
        return combine(
            self.aggregation, rows, [self.settings.time, UNTIL], island, self.late.producers(rows)
        )


def _versions(sessions: Ranges) -> Sets:
    return Sets(sessions.keys, sessions.starts, sessions.ends, _NONE, _NONE)


def _current(history: History) -> Ranges:
    return Ranges(history.current.keys, history.current.starts, history.current.ends)


def overlaps(sessions: Ranges, islands: Ranges) -> Mask:
    """Which sessions have something in common with some island of their group."""
    order = sorting(islands.keys, islands.starts)
    keys, starts, ends = islands.keys[order], islands.starts[order], islands.ends[order]
    chain = chains(keys, starts, ends)
    first = np.flatnonzero(np.diff(chain, prepend=-1))
    if not len(first):
        return np.zeros(len(sessions), np.bool_)
    where = bounds(keys[first], int(max(keys[-1], sessions.keys.max(initial=0))) + 1)
    until = np.maximum.reduceat(ends, first)
    found = search(
        until, where[sessions.keys], where[sessions.keys + 1], sessions.starts, right=True
    )
    inside: Mask = found < where[sessions.keys + 1]
    inside[inside] = starts[first][found[inside]] < sessions.ends[inside]
    return inside
