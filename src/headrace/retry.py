"""A circuit breaker: after several failures in a row nothing is tried for a while, then once; that
decides whether it closes again or stays open for longer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

FAILURES_TO_OPEN = 5
FIRST_OPEN_S, LONGEST_OPEN_S = 30.0, 600.0
FIRST_PAUSE_S = 0.5


class Breaker:
    """Closed: tries follow each other with growing pauses. Open: none, until it is half open, which
    allows one.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self.failures = 0
        self._next_s = 0.0

    @property
    def is_open(self) -> bool:
        return self.failures >= FAILURES_TO_OPEN

    def wait_s(self) -> float:
        """How long nothing may be tried."""
        return max(0.0, self._next_s - self._clock_s())

    def succeeded(self) -> None:
        self.failures, self._next_s = 0, 0.0

    def failed(self, min_s: float = 0.0) -> None:
        """Not sooner than the other side asks for; and never quite the same, so that many do not
        come back together.
        """
        self.failures += 1
        if self.is_open:
            longest_s = min(
                LONGEST_OPEN_S, FIRST_OPEN_S * 2.0 ** min(self.failures - FAILURES_TO_OPEN, 10)
            )
        else:
            longest_s = FIRST_PAUSE_S * 2.0 ** (self.failures - 1)
        self._next_s = self._clock_s() + max(random.uniform(longest_s / 2, longest_s), min_s)  # noqa: S311 - nothing is kept secret by it
