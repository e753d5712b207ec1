"""How far a run is behind, for the person who waits for it: a line on standard error every few seconds while there are known ticks to do."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.cli.output import counted, say, seconds_text

if TYPE_CHECKING:
    from headrace.pipeline.status import Status

EVERY_S = 5.0


@dataclass
class Progress:
    """Hears of every batch, and now and then in between. `line` and `summary` say the same in words."""

    every_s: float = EVERY_S
    opening: str = ""
    rows: int = 0
    last: Status | None = None
    _started_s: float = field(default_factory=time.monotonic)
    _said_s: float = field(default_factory=time.monotonic)
    _said_rows: int = 0

    def __call__(self, status: Status) -> None:
        if self.last is None and self.opening:  # whatever can be refused has not been
            say(self.opening)
        if status.batches > (self.last.batches if self.last is not None else 0):
            self.rows += status.batch_rows
        self.last = status
        now_s = time.monotonic()
        if status.tick < status.newest_tick and now_s - self._said_s >= self.every_s:
            print(self.line(status, now_s - self._said_s), file=sys.stderr, flush=True)
            self._said_s, self._said_rows = now_s, self.rows

    def line(self, status: Status, seconds: float) -> str:
        rate = (self.rows - self._said_rows) / max(seconds, 1e-9)
        left = f"about {seconds_text(status.rows_behind / rate)} left" if rate >= 1 else "time left not known"
        return f"tick {status.tick:,} of {status.newest_tick:,}, {counted(status.rows_behind, 'row')} behind, {rate:,.0f} rows/s, {left}"

    def summary(self) -> str:
        """When everything has been taken in."""
        if self.last is None or not self.last.batches:
            return "There was nothing to take in."
        seconds = time.monotonic() - self._started_s
        return f"Caught up at tick {self.last.tick:,}: {counted(self.rows, 'row')} in {seconds_text(seconds)} ({self.rows / max(seconds, 1e-9):,.0f} rows/s)."
