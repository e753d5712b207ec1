"""Sessions made from kept rows: over tables, where a row that goes may cut a session in two, and for aggregates whose states cannot be put together.

Over a table, rows that come and go within one tick are not seen. A row that comes is late if the session that it would be in has nothing but rows that come, and ends
at or before the time up to which windows are closed; a row that goes is late if its session is closed, or never took it in.
"""

from __future__ import annotations

import numpy as np

from headrace.operators.buffers import Ints, Mask
from headrace.operators.kernel import Times
from headrace.operators.windows.base import WindowStep
from headrace.operators.windows.buffered import Buffered, Spans
from headrace.operators.windows.history import chains
from headrace.operators.windows.specs import Session


class SessionRows(Buffered):
    """Rows that follow each other in less than the gap."""

    def __init__(self, step: WindowStep) -> None:
        super().__init__(step)
        assert isinstance(step.window, Session)
        self.gap_us = step.window.gap_us

    def spans(self, keys: Ints, times: Times) -> Spans:
        chain = chains(keys, times, times + self.gap_us)
        first = np.flatnonzero(np.diff(chain, prepend=-1))
        stop = np.append(first[1:], len(chain))[: len(first)]
        return Spans(keys[first], times[first], times[stop - 1] + self.gap_us, first, stop)

    def open(self, keys: Ints, times: Times, limit: int) -> Mask:
        spans = self.spans(keys, times)
        return np.repeat(spans.ends > limit, spans.stop - spans.first)

    def taken(self, keys: Ints, times: Times, comes: Mask, limit: int) -> Mask:
        if not len(keys):
            return comes
        spans = self.spans(keys, times)
        live = np.logical_or.reduceat(~comes, spans.first) | (spans.ends > limit)
        return np.repeat(live, spans.stop - spans.first)

    def can_go(self, times: Times, limit: int) -> Mask:  # noqa: ARG002
        return np.ones(len(times), np.bool_)

    def reach(self, starts: Times, ends: Times) -> tuple[Times, Times]:
        return starts - self.gap_us + 1, ends

    def timers(self, keys: Ints, times: Times, complete_us: int) -> tuple[Ints, Times, Times, Mask]:
        """One for each session."""
        spans = self.spans(keys, times)
        waits = spans.ends > complete_us if self.final else np.zeros(len(spans.keys), np.bool_)
        return spans.keys, spans.starts, spans.ends, waits
