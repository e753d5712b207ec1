"""What windows over points amount to: from the points in order of group and time, and from what whole panes of them amount to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headrace.operators.buffers import Ints, runs
from headrace.operators.joins.matching import begins, first_from, merge_order
from headrace.operators.state_pool import Merging, Pool, States, pick, place
from headrace.operators.windows.panes import PANES, Heads, Points


def windows_at(
    points: Points, chosen: Ints, heads: Heads, others: Heads, size_us: int, pane_us: int, merging: Merging, pool: Pool
) -> States:  # fmt: skip
    """The states of the windows (t - size, t] that end at some of the points. `others` are the heads of panes of which no point is there."""
    found = _by_taking_away(points, chosen, others, size_us, merging, pool)
    return pane_windows(points, chosen, heads, size_us, pane_us, merging, pool) if found is None else found


def _by_taking_away(points: Points, chosen: Ints, others: Heads, size_us: int, merging: Merging, pool: Pool) -> States | None:
    """A running total over the points and the heads of the other panes, in order of group and time: a window is what it is at its end less what it was at its beginning."""
    keys, times, states, last = points.keys, points.times, points.states, chosen
    if len(others):
        keys, times, states = (
            np.concatenate(pair) for pair in ((keys, others.keys), (times, others.last), (states, others.states))
        )  # fmt: skip
        order = merge_order((points.keys, points.times), (others.keys, others.last))
        keys, times, states = keys[order], times[order], states[order]
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        last = place[chosen]
    first = first_from(keys, times, points.keys[chosen], points.times[chosen] - size_us + 1)
    return merging.over_ranges(pool.pick(states), first, last + 1)


def pane_windows(points: Points, chosen: Ints, heads: Heads, size_us: int, pane_us: int, merging: Merging, pool: Pool) -> States:
    """The same by merging alone.

    A window is what lies at its end, in the pane of t; at its beginning, in the pane of t - size; and the whole panes between, by their heads. The points of the
    panes at the two ends must all be there.
    """
    panes = points.times // pane_us
    pane: Ints = np.cumsum(begins(points.keys, panes)) - 1
    of, until = points.keys[chosen], points.times[chosen]
    windows = _within(points, pane, chosen, merging.prefixes, pool)
    begins_in = (until - size_us + 1) // pane_us
    oldest = first_from(points.keys, points.times, of, until - size_us + 1)
    also = np.flatnonzero((panes[oldest] == begins_in) & (pane[oldest] != pane[chosen]))
    place(windows, also, merging.merge(_within(points, pane, oldest[also], merging.suffixes, pool), pick(windows, also)))
    first, stop = (first_from(heads.keys, heads.panes, of, wanted) for wanted in (begins_in + 1, panes[chosen]))
    also = np.flatnonzero(first < stop)
    place(windows, also, merging.merge(_between(first[also], stop[also], heads, merging, pool), pick(windows, also)))
    return windows


def _within(points: Points, pane: Ints, chosen: Ints, scan: Callable[[States, Ints], States], pool: Pool) -> States:
    """What some points amount to with all before them in their pane, or all behind them. Only their panes are looked at."""
    mine = np.zeros(int(pane[-1]) + 1 if len(pane) else 0, np.bool_)
    mine[pane[chosen]] = True
    there = np.flatnonzero(mine[pane])
    return pick(scan(pool.pick(points.states[there]), pane[there]), np.searchsorted(there, chosen))


def _between(first: Ints, stop: Ints, heads: Heads, merging: Merging, pool: Pool) -> States:
    """What each range of heads amounts to. Ranges have up to so many heads as a block: one over the bound of two blocks is the end of one and the beginning of the other."""
    new = begins(first, stop)
    first, stop = first[new], stop[new]
    low, high = int(first.min(initial=0)), int(stop.max(initial=0))
    states, blocks = pool.pick(heads.states[low:high]), np.arange(high - low) // PANES
    first, last = first - low, stop - low - 1
    ends = pick(merging.suffixes(states, blocks), first)
    over = np.flatnonzero(blocks[first] != blocks[last])
    place(ends, over, merging.merge(pick(ends, over), pick(merging.prefixes(states, blocks), last[over])))
    inside = np.flatnonzero((blocks[first] == blocks[last]) & ((last + 1) % PANES != 0))
    lengths = (last - first + 1)[inside]
    members = pick(states, runs(first[inside], lengths))
    place(ends, inside, merging.reduced(members, np.repeat(np.arange(len(lengths)), lengths)))
    return pick(ends, np.cumsum(new) - 1)
