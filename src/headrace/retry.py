"""Retries: one back-off with jitter and one circuit breaker, used wherever something is tried
again.

A loop that retries keeps a `Backoff` and counts its failures in a row:

    backoff, failures = Backoff(first_s=0.2, longest_s=30.0), 0
    while not stopped.is_set():
        try:
            work()
            failures = 0
        except RetryError:
            failures += 1
            stopped.wait(backoff.pause_s(failures))

A sender whose receiver may be away for hours uses a `CircuitBreaker` instead: after several
failures in a row it tries nothing at all for a while, then once.

Which errors are worth retrying is said in `headrace.errors`: `RetryError` and its subclasses.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

_MAX_DOUBLINGS = 30
LONGEST_RETRY_AFTER_S = 3600.0


@dataclass(frozen=True)
class Backoff:
    """Exponential back-off: the pause doubles with each failure in a row, from `first_s` up to
    `longest_s`.

    `jitter` is the share of a pause that is random, so that many clients of one server do not all
    come back at the same moment: with 0.5 a pause of at most 8 s lasts between 4 s and 8 s, with 0
    exactly 8 s.
    """

    first_s: float
    longest_s: float
    jitter: float = 0.5

    def pause_s(self, failures: int, *, min_s: float = 0.0) -> float:
        """Return how long to wait after the given number of failures in a row (1 or more).

        The pause is not shorter than `min_s`, which is what the other side asked for (as in HTTP's
        `Retry-After`), even if that is longer than `longest_s`.
        """
        longest_s = min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, _MAX_DOUBLINGS))
        shortest_s = longest_s * (1.0 - self.jitter)
        pause_s = random.uniform(shortest_s, longest_s)  # noqa: S311 - it protects no secret
        return max(pause_s, min_s)


class CircuitBreaker:
    """Decides when a receiver that fails may be tried again.

    Closed (fewer than `failures_to_open` failures in a row): attempts follow each other after
    short, growing pauses. Open: no attempt for `OPEN_BACKOFF`'s pause, then a single one, which
    either closes the circuit or opens it for longer.
    """

    FAILURES_TO_OPEN = 5
    CLOSED_BACKOFF = Backoff(first_s=0.5, longest_s=8.0)
    OPEN_BACKOFF = Backoff(first_s=30.0, longest_s=600.0)

    def __init__(
        self,
        clock_s: Callable[[], float] = time.monotonic,
        *,
        failures_to_open: int = FAILURES_TO_OPEN,
    ) -> None:
        self.failures = 0
        self.failures_to_open = failures_to_open
        self._clock_s = clock_s
        self._next_attempt_s = 0.0

    @property
    def is_open(self) -> bool:
        return self.failures >= self.failures_to_open

    def wait_s(self) -> float:
        """Return how long to wait before the next attempt."""
        return max(0.0, self._next_attempt_s - self._clock_s())

    def record_success(self) -> None:
        """Close the circuit."""
        self.failures = 0
        self._next_attempt_s = 0.0

    def record_failure(self, min_s: float = 0.0) -> None:
        """Count a failure; the next attempt is not sooner than `min_s`, if the receiver asked for
        that.
        """
        self.failures += 1
        if self.is_open:
            failures_while_open = self.failures - self.failures_to_open + 1
            pause_s = self.OPEN_BACKOFF.pause_s(failures_while_open, min_s=min_s)
        else:
            pause_s = self.CLOSED_BACKOFF.pause_s(self.failures, min_s=min_s)
        self._next_attempt_s = self._clock_s() + pause_s


def retry_after_s(retry_after: str | None) -> float:
    """Return how long a `Retry-After` header asks us to wait, at most an hour. It is a number of
    seconds or a date.
    """
    if retry_after is None:
        return 0.0
    try:
        wait_s = (
            float(retry_after)
            if retry_after.strip().isdigit()
            else parsedate_to_datetime(retry_after).timestamp() - time.time()
        )
    except (ValueError, TypeError):
        return 0.0
    return min(max(wait_s, 0.0), LONGEST_RETRY_AFTER_S)
