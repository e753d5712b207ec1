"""Versions that are there at the same time, and times at which a key has no rows: what a join of tables is made of."""

from __future__ import annotations

import numpy as np

from headrace.operators.buffers import Ints
from headrace.operators.joins.matching import begins, bounds, pairs, search, sorting
from headrace.operators.joins.table_side import ALWAYS, FOREVER, Versions


def overlaps(left: Versions, right: Versions, count: int) -> tuple[Ints, Ints]:
    """All pairs of versions of one of `count` keys that are there together for a while, except those that were before the call and are after it.

    Of a pair either the right one comes when the left one is there, or the left one when the right one is there, or both were there before.
    """
    found = [_starting_in(left, right, count), _starting_in(right, left, count, strictly=True)[::-1], *_were_there(left, right, count)]
    return np.concatenate([each[0] for each in found]), np.concatenate([each[1] for each in found])


def _starting_in(these: Versions, others: Versions, count: int, *, strictly: bool = False) -> tuple[Ints, Ints]:
    """Pairs in which the other comes in the call, and this one is there then; `strictly`: was there before."""
    fresh = np.flatnonzero(others.start != ALWAYS)
    fresh = fresh[sorting(others.keys[fresh], others.start[fresh])]
    begin = bounds(others.keys[fresh], count)
    low = search(others.start[fresh], begin[these.keys], begin[these.keys + 1], these.start, right=strictly)
    high = search(others.start[fresh], low, begin[these.keys + 1], these.end, right=False)
    this, at = pairs(low, high)
    return this, fresh[at]


def _were_there(left: Versions, right: Versions, count: int) -> list[tuple[Ints, Ints]]:
    """Pairs that were there before the call, of which one goes in it."""
    goes, stays = (np.flatnonzero((left.start == ALWAYS) & ((left.end == FOREVER) == lasts)) for lasts in (False, True))
    there = np.flatnonzero(right.start == ALWAYS)
    return [_all_of_a_key(left, goes, right, there, count), _all_of_a_key(left, stays, right, there[right.end[there] != FOREVER], count)]


def _all_of_a_key(left: Versions, lefts: Ints, right: Versions, rights: Ints, count: int) -> tuple[Ints, Ints]:
    begin = bounds(right.keys[rights], count)
    which, at = pairs(begin[left.keys[lefts]], begin[left.keys[lefts] + 1])
    return lefts[which], rights[at]


def absences(versions: Versions, rows_before: Ints) -> Versions:
    """When each key has no rows, as versions of no row at all. `rows_before`: how many each key had before the call."""
    comes, goes = versions.start != ALWAYS, versions.end != FOREVER
    keys = np.concatenate([np.arange(len(rows_before)), versions.keys[comes], versions.keys[goes]])
    ticks = np.concatenate([np.full(len(rows_before), ALWAYS), versions.start[comes], versions.end[goes]])
    change = np.concatenate([rows_before, np.ones(int(comes.sum()), np.int64), np.full(int(goes.sum()), -1)])
    order = sorting(keys, ticks)
    keys, ticks, change = keys[order], ticks[order], change[order]
    at = np.flatnonzero(begins(keys, ticks))
    if not len(at):
        return Versions(*(np.zeros(0, np.int64) for _ in range(6)))
    keys, ticks, net = keys[at], ticks[at], np.add.reduceat(change, at)
    kept = (net != 0) | (ticks == ALWAYS)
    keys, ticks, net = keys[kept], ticks[kept], net[kept]
    first = begins(keys)
    total = np.cumsum(net)
    rows = total - np.append(0, total)[np.maximum.accumulate(np.where(first, np.arange(len(first)), 0))]
    end = np.append(ticks[1:], FOREVER)
    end[np.append(first[1:], True)] = FOREVER
    nothing = np.full(len(keys), -1)
    return Versions(keys, nothing, ticks, end, nothing, nothing).take(rows == 0)
