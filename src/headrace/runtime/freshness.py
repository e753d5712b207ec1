"""Freshness: how long it takes from the append of a row until views show it.

It is measured all the time, from the ticks alone. The rows of a tick were appended after the runner
had last looked for new ones and before the tick was cut, evenly as far as is known; all of them
become visible with the commit of the tick's batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from headrace.engine.ticks import Tick, rows_between

MAX_SAMPLES = 1_000
_POINTS = np.array([0.1, 0.3, 0.5, 0.7, 0.9])
"""Where in the interval of a tick its rows are taken to have been appended."""


@dataclass(frozen=True)
class _Sample:
    """Rows of one tick: the time from append to visible of the youngest and of the oldest."""

    youngest_us: int
    oldest_us: int
    rows: int


class Freshness:
    """The times from append to visible of the rows of the last ticks."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=MAX_SAMPLES)

    def record(
        self, before: Tick, ticks: Sequence[Tick], since_us: Mapping[int, int], visible_us: int
    ) -> None:
        """The ticks after `before` became visible at `visible_us`. `since_us` has, for ticks of
        this run, when the runner had last looked for rows before it cut them. The rows of other
        ticks are a backlog: they waited for a run, not for a batch.
        """
        for previous, tick in pairwise([before, *ticks]):
            rows = rows_between(previous.ends, tick.ends)
            if rows and tick.number in since_us:
                first_us = max(previous.time_us, since_us[tick.number])
                self._samples.append(
                    _Sample(
                        youngest_us=max(0, visible_us - tick.time_us),
                        oldest_us=max(0, visible_us - min(first_us, tick.time_us)),
                        rows=rows,
                    )
                )

    def quantiles_s(self, *quantiles: float) -> list[float] | None:
        """The times below which such shares of the rows became visible; None before the first."""
        if not self._samples:
            return None
        samples = list(self._samples)
        youngest, oldest, rows = (
            np.array([getattr(sample, name) for sample in samples], np.float64)
            for name in ("youngest_us", "oldest_us", "rows")
        )
        times_us = (youngest[:, None] + (oldest - youngest)[:, None] * _POINTS).ravel()
        weights = np.repeat(rows, len(_POINTS))
        order = np.argsort(times_us)
        shares = np.cumsum(weights[order]) / weights.sum()
        last = len(order) - 1
        return [
            float(times_us[order[min(int(np.searchsorted(shares, q)), last)]]) / 1e6
            for q in quantiles
        ]
