"""What to tell of rows that a table of windows showed before a tick, and shows after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headrace.operators.buffers import Ints, Mask
from headrace.operators.changelog import Changes

NOTHING = -1


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
        order = shown[np.lexsort((windows[shown], places[shown]))]
        return Shown(places[order], windows[order], was[order], now[order])


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
