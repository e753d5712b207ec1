"""Sliding windows made from kept rows: over tables, whose rows go again, and for aggregates whose states cannot be put together.

For each time t of a row, the rows of its group in (t - size, t]. A row is late if t lies before the time up to which windows are closed; so is a row that goes.
A window (t - size, t] is held as one that ends at t + 1 microsecond: it is told when no row at t or before is expected any more.
"""

from __future__ import annotations

import numpy as np

from headrace.operators.buffers import Ints, Mask
from headrace.operators.joins.matching import begins, bounds, search
from headrace.operators.kernel import UNSTARTED, Times
from headrace.operators.windows.base import WindowStep
from headrace.operators.windows.buffered import Buffered, Spans
from headrace.operators.windows.specs import Sliding


class SlidingRows(Buffered):
    """The rows of a group before each of its rows."""

    end_shown_us = -1

    def __init__(self, step: WindowStep) -> None:
        super().__init__(step)
        assert isinstance(step.window, Sliding)
        self.size_us = step.window.size_us

    def spans(self, keys: Ints, times: Times) -> Spans:
        last = np.flatnonzero(np.append(begins(keys, times)[1:], True)) if len(keys) else keys
        of, at = keys[last], times[last]
        where = bounds(keys, int(keys[-1]) + 1) if len(keys) else np.zeros(1, np.int64)
        first = search(times, where[of], last, at - self.size_us, right=True)
        return Spans(of, at - self.size_us, at + 1, first, last + 1)

    def open(self, keys: Ints, times: Times, limit: int) -> Mask:  # noqa: ARG002
        needed: Mask = times > max(limit - self.size_us, UNSTARTED)
        return needed

    def taken(self, keys: Ints, times: Times, comes: Mask, limit: int) -> Mask:  # noqa: ARG002
        return ~comes | (times >= limit)

    def can_go(self, times: Times, limit: int) -> Mask:
        return times >= limit

    def counts_as_window(self, ends: Times, limit: int) -> Mask:
        return ends > limit

    def reach(self, starts: Times, ends: Times) -> tuple[Times, Times]:
        return starts + 1, ends

    def timers(self, keys: Ints, times: Times, complete_us: int) -> tuple[Ints, Times, Times, Mask]:
        """One for the first window of a group that waits, and one for when its last row is not needed any more."""
        return group_timers(keys, times, self.size_us, complete_us if self.final else None)


def group_timers(keys: Ints, times: Times, size_us: int, complete_us: int | None) -> tuple[Ints, Times, Times, Mask]:
    """When groups with rows at these times, in order, must be looked at: group, start, end, and whether it waits for the complete clock."""
    last = np.flatnonzero(np.append(keys[1:] != keys[:-1], True)) if len(keys) else keys
    closing = keys[last], times[last] + size_us
    waiting = np.flatnonzero(times >= complete_us) if complete_us is not None else keys[:0]
    first = waiting[begins(keys[waiting])] if len(waiting) else waiting
    of, ends = np.concatenate([closing[0], keys[first]]), np.concatenate([closing[1], times[first] + 1])
    return of, np.zeros(len(of), np.int64), ends, np.arange(len(of)) >= len(last)
