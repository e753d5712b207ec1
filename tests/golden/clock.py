"""A wall clock that stands still, for golden directories: what they hold must not grow old."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from unittest.mock import patch


class Clock:
    """A wall clock that moves only when it is advanced. Leases, producers and ticks go by it."""

    def __init__(self, at: datetime) -> None:
        self.now = at

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def time_ns(self) -> int:
        return (self.now - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 1000

    def time(self) -> float:
        return self.time_ns() / 1e9


@contextmanager
def clock_at(at: datetime) -> Iterator[Clock]:
    """Put a clock that starts at `at` in the place of the machine's."""
    clock = Clock(at)
    with (
        patch.object(time, "time", clock.time),
        patch.object(time, "time_ns", clock.time_ns),
        patch("headrace.log.file.store.LogClock._check"),  # which looks at the machine's
    ):
        yield clock
