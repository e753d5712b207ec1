"""Sliding windows over streams, for aggregates whose states can be put together, in time proportional to the rows.

The rows of a group at one time are a point, with a state; points are kept in panes (`panes`), and windows are computed from the panes at their two ends and from what the
panes between amount to (`ranges`). Groups whose rows come in the order of their times, tick after tick, are worked on in one go, and need few of their panes. The others
are worked on tick by tick, with all their points: a row that comes late changes windows that were told.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from headrace.operators.buffers import Ints, Mask
from headrace.operators.joins.matching import begins, numbered, sorting
from headrace.operators.kernel import UNSTARTED, Clocks, Groups, KeyedState, Times
from headrace.operators.keys import encode_keys, key_groups
from headrace.operators.segments import Segments
from headrace.operators.state_pool import Merging, Pool, States, together
from headrace.operators.windows.base import Windowed, WindowStep
from headrace.operators.windows.buffered import Grouped, closing, distinct_windows, put_timers
from headrace.operators.windows.entries import Windows
from headrace.operators.windows.history import History, Sets, any_within
from headrace.operators.windows.late import places_of
from headrace.operators.windows.panes import NEVER, PANES, Heads, PaneStore, Points
from headrace.operators.windows.ranges import windows_at
from headrace.operators.windows.specs import Sliding
from headrace.operators.windows.telling import over_lifetimes

_NO_KEYS = pa.nulls(0, pa.binary())
_NONE = np.zeros(0, np.int64)
_NO_HEADS = Heads(_NONE, _NONE, _NONE, _NONE, _NONE)


@dataclass
class Work:
    """A call at work: the groups' heads as they were, all states by number, and what windows were, with each version's state."""

    heads: Heads
    pool: Pool
    clock: Clocks
    history: History = field(default_factory=History)
    windows: list[States] = field(default_factory=list)


class SlidingStates(Windowed):
    """What the rows of a group before each of its rows amount to."""

    end_shown_us = -1

    def __init__(self, step: WindowStep) -> None:
        super().__init__(step)
        assert isinstance(step.window, Sliding)
        self.size_us = step.window.size_us
        self.pane_us = max(self.size_us // PANES, 1)
        self._merging = Merging(self.aggregation)

    def advance(self, state: KeyedState, rows: pa.Table, clock: Clocks) -> pa.Table:
        """1. Make points. 2. Read the heads of all groups that something happens to, and the panes that are needed. 3. Compute windows. 4. Tell. 5. Store."""
        rows, times = self._in_time(rows, clock)
        keys, ranks = numbered([encode_keys(rows, self.by), self.completed(state, clock).by, closing(self, state, clock)])
        if not len(keys):
            return self.nothing()
        grouped = Grouped(keys, key_groups(keys), _NO_KEYS)
        store = PaneStore(self.step_name, grouped.by, grouped.groups, self.aggregation.layout.dtype)
        work = Work(*store.read_heads(state, self._merging), clock)
        fresh = self._points(rows, ranks[0], times, work.pool, clock)
        in_order = self._in_order(work.heads, fresh, len(grouped.by))
        needed = ~in_order[work.heads.keys] | self._needed(work.heads, fresh, len(grouped.by), clock)
        known = store.read_points(state, work.heads.take(needed), self._merging, work.pool)
        points, heads = self._in_one_go(known.take(in_order[known.keys]), fresh.take(in_order[fresh.keys]), work.heads.take(~needed), work)
        more, others = self._tick_by_tick(known.take(~in_order[known.keys]), fresh.take(~in_order[fresh.keys]), work)
        table = self._result(grouped, work)
        self._put(state, store, grouped, work, points.merged_with(more), heads.and_also(others))
        return table

    # Rows into points

    def _in_time(self, rows: pa.Table, clock: Clocks) -> tuple[pa.Table, Times]:
        """The rows that are not late, and their times."""
        times, places = self.times(rows), places_of(rows, clock)
        limits = self.bounds(clock.closed_before)[places]
        late = times < limits
        if not late.any():
            return rows, times
        self.counts["late"] += self.late.add(rows, late, clock.times_us[places], limits - times)
        return rows.filter(pa.array(~late)), times[~late]

    def _points(self, rows: pa.Table, keys: Ints, times: Times, pool: Pool, clock: Clocks) -> Points:
        places = places_of(rows, clock)
        order = sorting(keys, times, places)
        points = Points(keys[order], times[order], places[order], _NONE)
        first = np.flatnonzero(begins(points.keys, points.times, points.places))
        states = pool.add(self._merging.lifted(Segments(rows, order, first, np.zeros(len(first), np.int64), np.arange(len(first)), _NO_KEYS)))
        if len(first) < len(order):
            points = Points(points.keys[first], points.times[first], points.places[first], _NONE)
        return replace(points, states=states)

    # Which groups and panes

    @staticmethod
    def _in_order(heads: Heads, fresh: Points, groups: int) -> Mask:
        """Which groups' points come in the order of their times."""
        last = np.full(groups, UNSTARTED)
        last[heads.keys] = heads.last  # of a group's panes, the last one's stays
        by_tick = fresh.take(sorting(fresh.keys, fresh.places, fresh.times))
        new = begins(by_tick.keys)
        before = np.append(UNSTARTED, by_tick.times[:-1]) if len(fresh) else fresh.times
        before = np.where(new, last[by_tick.keys], before)
        in_order = np.ones(groups, np.bool_)
        in_order[by_tick.keys[by_tick.times <= before]] = False
        return in_order

    def _needed(self, heads: Heads, fresh: Points, groups: int, clock: Clocks) -> Mask:
        """The panes that groups in order need: to which points come, that have points to be told, and in which the windows that are computed begin."""
        first, last = np.full(groups, NEVER), np.full(groups, UNSTARTED)
        new = np.flatnonzero(begins(fresh.keys))
        first[fresh.keys[new]] = fresh.times[new]
        last[fresh.keys[np.append(new[1:], len(fresh))[: len(new)] - 1]] = fresh.times[np.append(new[1:], len(fresh))[: len(new)] - 1]
        needed: Mask = heads.panes == (first // self.pane_us)[heads.keys]
        lowest, highest = first.copy(), last
        if self.final:
            complete = int(clock.complete[-1])
            needed |= heads.waits < complete
            np.minimum.at(lowest, heads.keys, heads.waits)
            np.maximum.at(highest, heads.keys, heads.last)
            highest = np.minimum(highest, complete - 1) if complete > UNSTARTED else np.full(groups, UNSTARTED)
        some = lowest <= highest
        low = np.where(some, lowest - self.size_us + 1, 0) // self.pane_us
        high = np.where(some, highest - self.size_us + 1, 0) // self.pane_us
        begins_in: Mask = some[heads.keys] & (heads.panes >= low[heads.keys]) & (heads.panes <= high[heads.keys])
        needed |= begins_in
        return needed

    # Windows

    def _in_one_go(self, known: Points, fresh: Points, others: Heads, work: Work) -> tuple[Points, Heads]:
        """Groups in order: the points of the panes that changed, and all their panes. `others` are the panes that were not read."""
        points = known.merged_with(fresh)
        panes = points.times // self.pane_us
        mine = Heads.of(points, panes, self._told_until(work.clock), self._merging, work.pool)
        heads = others.and_also(mine)
        wanted = points.places >= 0
        if self.final:
            wanted = (wanted | (points.times >= work.clock.complete_at_start)) & (points.times < work.clock.complete[-1])
        self._add(points, np.flatnonzero(wanted), points.places, heads, others, work)
        pane = np.cumsum(begins(points.keys, panes)) - 1
        changed = np.bincount(pane[points.places >= 0], minlength=len(mine)) > 0
        return points.take(changed[pane]), heads

    def _tick_by_tick(self, known: Points, fresh: Points, work: Work) -> tuple[Points, Heads]:
        """Groups out of order: all their points, and all their panes."""
        limits = self.bounds(work.clock.closed_before)
        alive, history = known.in_order(), work.history
        closed = int(self.bounds(np.array([work.clock.closed_at_start]))[0])
        self._add(alive, np.flatnonzero(alive.times >= closed), alive.places, self._heads(alive, work), _NO_HEADS, work)
        for tick in np.unique(fresh.places).tolist():
            comes = fresh.take(fresh.places == tick)
            touched = np.isin(alive.keys, comes.keys)
            mine, rest = self._merged(alive.take(touched).and_also(comes), work.pool), alive.take(~touched)
            history.forget(np.isin(history.current.keys, comes.keys) & (history.current.ends <= limits[tick]))
            current = history.current
            history.end(any_within(comes.keys, comes.times, current.keys, current.starts + 1, current.ends), tick)
            changed = any_within(comes.keys, comes.times, mine.keys, mine.times - self.size_us + 1, mine.times + 1)
            chosen = np.flatnonzero(changed & (mine.times >= limits[tick]))
            self._add(mine, chosen, np.full(len(mine), tick), self._heads(mine, work), _NO_HEADS, work)
            alive = rest.and_also(mine)
        alive = alive.in_order()
        return alive, self._heads(alive, work)

    def _merged(self, points: Points, pool: Pool) -> Points:
        """Points of one time as one, in order."""
        points = points.in_order()
        new = begins(points.keys, points.times)
        if new.all():
            return points
        merged = pool.add(self._merging.reduced(pool.pick(points.states), np.cumsum(new)))
        return Points(points.keys[new], points.times[new], points.places[new], merged)

    def _heads(self, points: Points, work: Work) -> Heads:
        return Heads.of(points, points.times // self.pane_us, self._told_until(work.clock), self._merging, work.pool)

    def _told_until(self, clock: Clocks) -> int | None:
        return int(clock.complete[-1]) if self.final else None

    def _add(self, points: Points, chosen: Ints, born: Ints, heads: Heads, others: Heads, work: Work) -> None:
        """The windows that end at some of these points, as versions born with some ticks."""
        if len(chosen):
            states = windows_at(points, chosen, heads, others, self.size_us, self.pane_us, self._merging, work.pool)
            work.windows.append(states)
            ends = points.times[chosen]
            work.history.add_each(Sets(points.keys[chosen], ends - self.size_us, ends + 1, _NONE, _NONE), born[chosen])

    # What is told and stored

    def _result(self, grouped: Grouped, work: Work) -> pa.Table:
        if not work.windows:
            return self.nothing()
        sets, history = work.history.all(), work.history
        shows = self._merging.results(together(work.windows))
        windows, window = distinct_windows(grouped, sets.keys, sets.starts, sets.ends)
        shown = over_lifetimes(window, history.born, history.died, self.told_from(sets.ends, work.clock), len(work.clock))
        table, changes = self.told(windows, shown, shows, work.clock)
        shows.count_lost(self.aggregation, changes.versions[changes.comes])
        return table

    def _put(self, state: KeyedState, store: PaneStore, grouped: Grouped, work: Work, points: Points, heads: Heads) -> None:
        """Panes of which no window needs a point any more go."""
        (limit,) = self.bounds(work.clock.closed[-1:]).tolist()
        needed = heads.last > max(limit - self.size_us, UNSTARTED)
        heads, gone = heads.take(needed), heads.take(~needed)
        panes = points.times // self.pane_us
        if len(gone):
            new = begins(points.keys, panes)
            there = ~gone.have(points.keys[new], panes[new])[np.cumsum(new) - 1]
            points, panes = points.take(there), panes[there]
            gone = work.heads.take(gone.have(work.heads.keys, work.heads.panes))
        stored = self._merging.stored(work.pool.pick(np.concatenate([heads.states, points.states])))
        store.write(state, heads, gone, points, panes, (stored.slice(0, len(heads)), stored.slice(len(heads))))
        put_timers(state, self._timers(grouped, work.heads), self._timers(grouped, heads))

    def _timers(self, grouped: Grouped, heads: Heads) -> tuple[pa.Array, Groups]:
        """One for the first window of a group that waits, and one for when its last point is not needed any more."""
        waits, last = np.full(len(grouped.by), NEVER), np.full(len(grouped.by), UNSTARTED)
        np.minimum.at(waits, heads.keys, heads.waits)
        np.maximum.at(last, heads.keys, heads.last)
        waiting, there = np.flatnonzero(waits != NEVER), np.flatnonzero(last != UNSTARTED)
        of, ends = np.concatenate([waiting, there]), np.concatenate([waits[waiting] + 1, last[there] + self.size_us])
        windows = Windows(grouped.by.take(pa.array(of)), np.zeros(len(of), np.int64), ends, grouped.groups[of])
        return windows.names(np.arange(len(of)) < len(waiting)).cast(pa.binary()), windows.groups
