"""What to tell of rows that a table of windows showed before a tick, and shows after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headrace.operators.buffers import Ints, Mask
from headrace.operators.changelog import Changes
from headrace.operators.joins.matching import sorting

NOTHING = -1
FOR_EVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Shown:
    """For each window that something may be told of, in a tick: the version of its results that was shown before and the one shown after, or NOTHING."""

    places: Ints  # of the tick
    windows: Ints
    was: Ints
    now: Ints

    @staticmethod
    def of(places: Ints, windows: Ints, was: Ints, now: Ints) -> Shown:
        """Without those that are not shown at all, and in the order of tick and window."""
        shown = np.flatnonzero((was != NOTHING) | (now != NOTHING))
        order = shown[sorting(places[shown], windows[shown])]
        return Shown(places[order], windows[order], was[order], now[order])


def over_lifetimes(windows: Ints, born: Ints, died: Ints, told_from: Ints, ticks: int) -> Shown:
    """From versions of windows, each of which holds from one tick of a call until another takes its place: born at -1 it was there before, died at FOR_EVER it stays.

    A version is shown from its birth on, but not before its window is told.
    """
    begins = np.maximum(born, told_from)
    lives = begins < np.minimum(died, ticks)
    comes, goes = np.flatnonzero(lives & (begins >= 0)), np.flatnonzero(lives & (died < ticks))
    if not len(goes) and (np.diff(windows) > 0).all():  # each window has one version: it comes, or is there already
        return Shown.of(begins[comes], windows[comes], np.full(len(comes), NOTHING), comes)
    places, of = np.concatenate([begins[comes], died[goes]]), np.concatenate([windows[comes], windows[goes]])
    nothing = np.full(len(places), NOTHING)
    now, was = nothing.copy(), nothing
    now[: len(comes)], was[len(comes) :] = comes, goes
    order = sorting(places, of)
    places, of, now, was = places[order], of[order], now[order], was[order]
    new = np.ones(len(order), np.bool_)
    new[1:] = (places[1:] != places[:-1]) | (of[1:] != of[:-1])
    starts = np.flatnonzero(new)
    if not len(starts):
        return Shown(places, of, was, now)
    return Shown(places[starts], of[starts], np.maximum.reduceat(was, starts), np.maximum.reduceat(now, starts))


def tell(shown: Shown, differs: Callable[[Ints, Ints], Mask]) -> Changes:
    """The changes, in order; their `segments` are positions in what is shown."""
    was, now = shown.was != NOTHING, shown.now != NOTHING
    updated = was & now
    both = np.flatnonzero(updated)
    updated[both] = differs(shown.was[both], shown.now[both])
    count = np.where(updated, 2, (was != now).astype(np.int64))
    which = np.repeat(np.arange(len(count)), count)
    second = np.zeros(len(which), np.int64)
    second[1:] = which[1:] == which[:-1]
    kinds = np.where(updated[which], 1 + second, np.where(now[which], 0, 3))
    versions = np.where((kinds == 0) | (kinds == 2), shown.now[which], shown.was[which])
    return Changes(kinds, which, versions)
