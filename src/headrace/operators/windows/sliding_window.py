"""Sliding windows over streams, for aggregates whose states can be merged.

The cost is linear in the rows. For each row at t the result covers the rows of its group in (t -
size, t]. The rows of a group at one time are a *point* with one state. Points are stored in
*panes*, a sixteenth of a window long, and each group has a *head* with the merged state of every
pane. A window is merged from the points of the panes at its two ends and the heads of the panes
between. `count()` by `k`, size 16 s, panes of 1 s:

    rows in              watermark  state after                         rows out
    tick 1: k=a at 0     at 1       q a 0: {0: 1}; h a: 0 -> 1          insert a (-16,0] 1
    tick 2: k=a at 9     at 10      q a 9: {9: 1}; h a: 0 -> 1, 9 -> 1  insert a (-7,9] 2
    tick 3: k=a at 18    at 30      q a 18: {18: 1}; h a: 18 -> 1       insert a (2,18] 2

Groups whose rows arrive in order of time, tick after tick, are processed in one go and read few of
their panes. The others are processed tick by tick with all their points, since a row out of order
changes windows that have been emitted. Panes and heads are stored by `pane_store`, and groups have
timers as in `buffered_window`, which also serves tables and aggregates whose states cannot be
merged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import (
    Ints,
    Mask,
    expand_ranges,
)
from headrace.columnar.keys import encode_keys, key_groups
from headrace.columnar.lookup import (
    group_start_mask,
    lower_bound,
    merge_order,
    number_keys,
    sort_order,
)
from headrace.columnar.segments import Segments
from headrace.operators.aggregates.state_pool import (
    StateMerger,
    StatePool,
    States,
    concat_states,
    put_states,
    take_states,
)
from headrace.operators.kernel import UNSTARTED, Groups, KeyedState, Times, Watermarks
from headrace.operators.windows.kernel import WindowKernel, WindowSettings, shown_over_lifetimes
from headrace.operators.windows.late_rows import row_tick_indices
from headrace.operators.windows.pane_store import NEVER, PANES, Heads, PaneStore, Points
from headrace.operators.windows.specs import Sliding
from headrace.operators.windows.state import (
    GroupKeys,
    WindowHistory,
    Windows,
    WindowVersions,
    any_within,
    distinct_windows,
    put_timers,
)

# The states of windows, from points in order of group and time and from the heads of whole panes


def windows_at(
    points: Points,
    chosen: Ints,
    heads: Heads,
    others: Heads,
    size_us: int,
    pane_us: int,
    merger: StateMerger,
    pool: StatePool,
) -> States:
    """The states of the windows (t - size, t] that end at some of the points.

    `others` are the heads of the panes whose points were not read.
    """
    subtracted = _windows_by_subtraction(points, chosen, others, size_us, merger, pool)
    return (
        windows_by_merging(points, chosen, heads, size_us, pane_us, merger, pool)
        if subtracted is None
        else subtracted
    )


def _windows_by_subtraction(
    points: Points, chosen: Ints, others: Heads, size_us: int, merger: StateMerger, pool: StatePool
) -> States | None:
    """The states of windows from a running total over the points and the heads of the other panes:
    the total at the window's end less that at its start. None if an aggregate cannot subtract.
    """
    keys = points.keys
    times = points.times
    states = points.states
    last = chosen
    if len(others):
        keys, times, states = (
            np.concatenate(pair)
            for pair in ((keys, others.keys), (times, others.last), (states, others.states))
        )
        order = merge_order((points.keys, points.times), (others.keys, others.last))
        keys = keys[order]
        times = times[order]
        states = states[order]
        position = np.empty(len(order), np.int64)
        position[order] = np.arange(len(order))
        last = position[chosen]
    first = lower_bound(keys, times, points.keys[chosen], points.times[chosen] - size_us + 1)
    return merger.over_ranges(pool.take(states), first, last + 1)


def windows_by_merging(
    points: Points,
    chosen: Ints,
    heads: Heads,
    size_us: int,
    pane_us: int,
    merger: StateMerger,
    pool: StatePool,
) -> States:
    """The states of windows by merging alone.

    A window consists of the points in the pane of t, those in the pane of t - size, and the panes
    between, by their heads. All points of the panes at the two ends must be present.
    """
    panes = points.times // pane_us
    pane: Ints = np.cumsum(group_start_mask(points.keys, panes)) - 1
    of, until = points.keys[chosen], points.times[chosen]
    windows = _scan_panes(points, pane, chosen, merger.prefixes, pool)
    begins_in = (until - size_us + 1) // pane_us
    oldest = lower_bound(points.keys, points.times, of, until - size_us + 1)
    also = np.flatnonzero((panes[oldest] == begins_in) & (pane[oldest] != pane[chosen]))
    put_states(
        windows,
        also,
        merger.merge(
            _scan_panes(points, pane, oldest[also], merger.suffixes, pool),
            take_states(windows, also),
        ),
    )
    first, stop = (
        lower_bound(heads.keys, heads.panes, of, wanted)
        for wanted in (begins_in + 1, panes[chosen])
    )
    also = np.flatnonzero(first < stop)
    put_states(
        windows,
        also,
        merger.merge(
            _merge_heads(first[also], stop[also], heads, merger, pool), take_states(windows, also)
        ),
    )
    return windows


def _scan_panes(
    points: Points,
    pane: Ints,
    chosen: Ints,
    scan: Callable[[States, Ints], States],
    pool: StatePool,
) -> States:
    """For each chosen point, the merge of it and all points before it (or after it) in its pane.
    Only the panes of the chosen points are scanned.
    """
    mine = np.zeros(int(pane[-1]) + 1 if len(pane) else 0, np.bool_)
    mine[pane[chosen]] = True
    there = np.flatnonzero(mine[pane])
    return take_states(
        scan(pool.take(points.states[there]), pane[there]), np.searchsorted(there, chosen)
    )


def _merge_heads(
    first: Ints, stop: Ints, heads: Heads, merger: StateMerger, pool: StatePool
) -> States:
    """The merged states of ranges of heads.

    Ranges are no longer than a block: one that crosses the bound of two blocks is a suffix of one
    and a prefix of the other.
    """
    new = group_start_mask(first, stop)
    first, stop = first[new], stop[new]
    low, high = int(first.min(initial=0)), int(stop.max(initial=0))
    states, blocks = pool.take(heads.states[low:high]), np.arange(high - low) // PANES
    first, last = first - low, stop - low - 1
    ends = take_states(merger.suffixes(states, blocks), first)
    over = np.flatnonzero(blocks[first] != blocks[last])
    put_states(
        ends,
        over,
        merger.merge(
            take_states(ends, over), take_states(merger.prefixes(states, blocks), last[over])
        ),
    )
    inside = np.flatnonzero((blocks[first] == blocks[last]) & ((last + 1) % PANES != 0))
    lengths = (last - first + 1)[inside]
    members = take_states(states, expand_ranges(first[inside], lengths))
    put_states(ends, inside, merger.reduce(members, np.repeat(np.arange(len(lengths)), lengths)))
    return take_states(ends, np.cumsum(new) - 1)


_NO_KEYS = pa.nulls(0, pa.binary())
_NONE = np.zeros(0, np.int64)
_NO_HEADS = Heads(keys=_NONE, panes=_NONE, last=_NONE, waits=_NONE, states=_NONE)


@dataclass
class SlidingBatch:
    """The working set of a call: the heads of the groups as stored, all states by number, the
    versions of windows, and their states.
    """

    heads: Heads
    pool: StatePool
    watermarks: Watermarks
    history: WindowHistory = field(default_factory=WindowHistory)
    windows: list[States] = field(default_factory=list)


class SlidingWindows(WindowKernel):
    """Sliding windows: for each row, the rows of its group up to `size` before it."""

    shown_end_shift_us = -1

    def __init__(self, settings: WindowSettings) -> None:
        super().__init__(settings)
        assert isinstance(settings.window, Sliding)
        self.size_us = settings.window.size_us
        self.pane_us = max(self.size_us // PANES, 1)
        self._merger = StateMerger(self.aggregation)

    def advance(self, state: KeyedState, rows: pa.Table, watermarks: Watermarks) -> pa.Table:
        """Process the rows of some ticks.

        1. Drop late rows and turn the others into points.
        2. Read the heads of all groups concerned, and the panes that are needed.
        3. Compute windows: in one go for groups in order, tick by tick for the others.
        4. Emit what changed.
        5. Store panes and timers.
        """
        rows, times = self._drop_late(rows, watermarks)
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
        store = PaneStore(
            self.step_name, grouped.group_keys, grouped.groups, self.aggregation.layout.dtype
        )
        batch = SlidingBatch(*store.read_heads(state, self._merger), watermarks)
        fresh = self._points(rows, ranks[0], times, batch.pool, watermarks)
        in_order = self._in_order(batch.heads, fresh, len(grouped.group_keys))
        needed = ~in_order[batch.heads.keys] | self._needed(
            batch.heads, fresh, len(grouped.group_keys), watermarks
        )
        known = store.read_points(state, batch.heads.take(needed), self._merger, batch.pool)
        points, heads = self._windows_in_order(
            known.take(in_order[known.keys]),
            fresh.take(in_order[fresh.keys]),
            batch.heads.take(~needed),
            batch,
        )
        more, others = self._windows_out_of_order(
            known.take(~in_order[known.keys]), fresh.take(~in_order[fresh.keys]), batch
        )
        table = self._emit(grouped, batch)
        self._store_panes(
            state, store, grouped, batch, points.merge_sorted(more), heads.concat(others)
        )
        return table

    # Rows into points

    def _drop_late(self, rows: pa.Table, watermarks: Watermarks) -> tuple[pa.Table, Times]:
        """The rows that are not late, and their times."""
        times, tick_index = self.times(rows), row_tick_indices(rows, watermarks)
        horizons = self.step_horizon(watermarks.horizon_before)[tick_index]
        late = times < horizons
        if not late.any():
            return rows, times
        self.counts["late"] += self.late_rows.add(
            rows, late, watermarks.times_us[tick_index], horizons - times
        )
        return rows.filter(pa.array(~late)), times[~late]

    def _points(
        self, rows: pa.Table, keys: Ints, times: Times, pool: StatePool, watermarks: Watermarks
    ) -> Points:
        """The points of the rows: one per group, time and tick."""
        tick_index = row_tick_indices(rows, watermarks)
        order = sort_order(keys, times, tick_index)
        points = Points(
            keys=keys[order], times=times[order], tick_index=tick_index[order], states=_NONE
        )
        first = np.flatnonzero(group_start_mask(points.keys, points.times, points.tick_index))
        states = pool.add(
            self._merger.lift(
                Segments(
                    rows=rows,
                    order=order,
                    starts=first,
                    ticks=np.zeros(len(first), np.int64),
                    firsts=np.arange(len(first)),
                    keys=_NO_KEYS,
                )
            )
        )
        if len(first) < len(order):
            points = Points(
                keys=points.keys[first],
                times=points.times[first],
                tick_index=points.tick_index[first],
                states=_NONE,
            )
        return replace(points, states=states)

    # Which groups and panes

    @staticmethod
    def _in_order(heads: Heads, fresh: Points, groups: int) -> Mask:
        """Which groups receive their points in order of time."""
        last = np.full(groups, UNSTARTED)
        last[heads.keys] = heads.last  # of a group's panes, the last assignment wins
        by_tick = fresh.take(sort_order(fresh.keys, fresh.tick_index, fresh.times))
        new = group_start_mask(by_tick.keys)
        before = np.append(UNSTARTED, by_tick.times[:-1]) if len(fresh) else fresh.times
        before = np.where(new, last[by_tick.keys], before)
        in_order = np.ones(groups, np.bool_)
        in_order[by_tick.keys[by_tick.times <= before]] = False
        return in_order

    def _needed(self, heads: Heads, fresh: Points, groups: int, watermarks: Watermarks) -> Mask:
        """The panes that groups in order need: those that receive points, those with points to be
        emitted, and those in which the computed windows begin.
        """
        first, last = np.full(groups, NEVER), np.full(groups, UNSTARTED)
        new = np.flatnonzero(group_start_mask(fresh.keys))
        first[fresh.keys[new]] = fresh.times[new]
        last[fresh.keys[np.append(new[1:], len(fresh))[: len(new)] - 1]] = fresh.times[
            np.append(new[1:], len(fresh))[: len(new)] - 1
        ]
        needed: Mask = heads.panes == (first // self.pane_us)[heads.keys]
        lowest, highest = first.copy(), last
        if self.emits_final:
            watermark = int(watermarks.watermark[-1])
            needed |= heads.waits < watermark
            np.minimum.at(lowest, heads.keys, heads.waits)
            np.maximum.at(highest, heads.keys, heads.last)
            highest = (
                np.minimum(highest, watermark - 1)
                if watermark > UNSTARTED
                else np.full(groups, UNSTARTED)
            )
        some = lowest <= highest
        low = np.where(some, lowest - self.size_us + 1, 0) // self.pane_us
        high = np.where(some, highest - self.size_us + 1, 0) // self.pane_us
        begins_in: Mask = (
            some[heads.keys] & (heads.panes >= low[heads.keys]) & (heads.panes <= high[heads.keys])
        )
        needed |= begins_in
        return needed

    # Windows

    def _windows_in_order(
        self, known: Points, fresh: Points, others: Heads, batch: SlidingBatch
    ) -> tuple[Points, Heads]:
        """Process the groups in order. Returns the points of the panes that changed, and all heads.

        `others` are the heads of the panes that were not read.
        """
        points = known.merge_sorted(fresh)
        panes = points.times // self.pane_us
        mine = Heads.of(
            points, panes, self._emitted_until(batch.watermarks), self._merger, batch.pool
        )
        heads = others.concat(mine)
        wanted = points.tick_index >= 0
        if self.emits_final:
            wanted = (wanted | (points.times >= batch.watermarks.watermark_at_start)) & (
                points.times < batch.watermarks.watermark[-1]
            )
        self._add(points, np.flatnonzero(wanted), points.tick_index, heads, others, batch)
        pane = np.cumsum(group_start_mask(points.keys, panes)) - 1
        changed = np.bincount(pane[points.tick_index >= 0], minlength=len(mine)) > 0
        return points.take(changed[pane]), heads

    def _windows_out_of_order(
        self, known: Points, fresh: Points, batch: SlidingBatch
    ) -> tuple[Points, Heads]:
        """Process the groups out of order, tick by tick. Returns all their points and all heads."""
        horizons = self.step_horizon(batch.watermarks.horizon_before)
        alive, history = known.in_order(), batch.history
        first_horizon = int(self.step_horizon(np.array([batch.watermarks.horizon_at_start]))[0])
        self._add(
            alive,
            np.flatnonzero(alive.times >= first_horizon),
            alive.tick_index,
            self._heads(alive, batch),
            _NO_HEADS,
            batch,
        )
        for tick in np.unique(fresh.tick_index).tolist():
            added = fresh.take(fresh.tick_index == tick)
            touched = np.isin(alive.keys, added.keys)
            mine = self._merge_points(alive.take(touched).concat(added), batch.pool)
            rest = alive.take(~touched)
            history.forget(
                np.isin(history.current.keys, added.keys) & (history.current.ends <= horizons[tick])
            )
            current = history.current
            history.end(
                any_within(added.keys, added.times, current.keys, current.starts + 1, current.ends),
                tick,
            )
            changed = any_within(
                added.keys, added.times, mine.keys, mine.times - self.size_us + 1, mine.times + 1
            )
            chosen = np.flatnonzero(changed & (mine.times >= horizons[tick]))
            self._add(
                mine, chosen, np.full(len(mine), tick), self._heads(mine, batch), _NO_HEADS, batch
            )
            alive = rest.concat(mine)
        alive = alive.in_order()
        return alive, self._heads(alive, batch)

    def _merge_points(self, points: Points, pool: StatePool) -> Points:
        """The points in order, with those of one time merged."""
        points = points.in_order()
        new = group_start_mask(points.keys, points.times)
        if new.all():
            return points
        merged = pool.add(self._merger.reduce(pool.take(points.states), np.cumsum(new)))
        return Points(
            keys=points.keys[new],
            times=points.times[new],
            tick_index=points.tick_index[new],
            states=merged,
        )

    def _heads(self, points: Points, batch: SlidingBatch) -> Heads:
        return Heads.of(
            points,
            points.times // self.pane_us,
            self._emitted_until(batch.watermarks),
            self._merger,
            batch.pool,
        )

    def _emitted_until(self, watermarks: Watermarks) -> int | None:
        return int(watermarks.watermark[-1]) if self.emits_final else None

    def _add(
        self,
        points: Points,
        chosen: Ints,
        born: Ints,
        heads: Heads,
        others: Heads,
        batch: SlidingBatch,
    ) -> None:
        """Add the windows that end at some of these points, as versions born with the
        given ticks.
        """
        if len(chosen):
            states = windows_at(
                points, chosen, heads, others, self.size_us, self.pane_us, self._merger, batch.pool
            )
            batch.windows.append(states)
            ends = points.times[chosen]
            batch.history.add_each(
                WindowVersions(
                    keys=points.keys[chosen],
                    starts=ends - self.size_us,
                    ends=ends + 1,
                    lengths=_NONE,
                    entries=_NONE,
                ),
                born[chosen],
            )

    # Emitting and storing

    def _emit(self, grouped: GroupKeys, batch: SlidingBatch) -> pa.Table:
        if not batch.windows:
            return self.empty_output()
        versions, history = batch.history.all(), batch.history
        results = self._merger.results(concat_states(batch.windows))
        windows, window = distinct_windows(grouped, versions.keys, versions.starts, versions.ends)
        shown = shown_over_lifetimes(
            window,
            history.born,
            history.died,
            self.emitted_from(versions.ends, batch.watermarks),
            len(batch.watermarks),
        )
        table, changes = self.emit_rows(windows, shown, results, batch.watermarks)
        results.count_unknown(self.aggregation, changes.versions[changes.additions])
        return table

    def _store_panes(
        self,
        state: KeyedState,
        store: PaneStore,
        grouped: GroupKeys,
        batch: SlidingBatch,
        points: Points,
        heads: Heads,
    ) -> None:
        """Store the panes and timers; panes that no open window needs are deleted."""
        (horizon,) = self.step_horizon(batch.watermarks.horizon[-1:]).tolist()
        needed = heads.last > max(horizon - self.size_us, UNSTARTED)
        heads, gone = heads.take(needed), heads.take(~needed)
        panes = points.times // self.pane_us
        if len(gone):
            new = group_start_mask(points.keys, panes)
            there = ~gone.have(points.keys[new], panes[new])[np.cumsum(new) - 1]
            points, panes = points.take(there), panes[there]
            gone = batch.heads.take(gone.have(batch.heads.keys, batch.heads.panes))
        stored = self._merger.close_states(
            batch.pool.take(np.concatenate([heads.states, points.states]))
        )
        store.write(
            state,
            heads,
            gone,
            points,
            panes,
            (stored.slice(0, len(heads)), stored.slice(len(heads))),
        )
        put_timers(state, self._timers(grouped, batch.heads), self._timers(grouped, heads))

    def _timers(self, grouped: GroupKeys, heads: Heads) -> tuple[pa.Array, Groups]:
        """The timers of groups: one for the first window that waits to be emitted, and one for when
        the last point is no longer needed.
        """
        waits, last = (
            np.full(len(grouped.group_keys), NEVER),
            np.full(len(grouped.group_keys), UNSTARTED),
        )
        np.minimum.at(waits, heads.keys, heads.waits)
        np.maximum.at(last, heads.keys, heads.last)
        waiting, there = np.flatnonzero(waits != NEVER), np.flatnonzero(last != UNSTARTED)
        of = np.concatenate([waiting, there])
        ends = np.concatenate([waits[waiting] + 1, last[there] + self.size_us])
        windows = Windows(
            group_keys=grouped.group_keys.take(pa.array(of)),
            starts=np.zeros(len(of), np.int64),
            ends=ends,
            groups=grouped.groups[of],
        )
        return windows.names(np.arange(len(of)) < len(waiting)).cast(pa.binary()), windows.groups
