"""The embedded log, with a disk that is as slow as the test wants: an append of n rows takes at
least as long as n rows do at the pace.
"""

from __future__ import annotations

import time
from typing import Any

import headrace as hr


class PacedLog:
    """Everything but appends is the log's own. `hurry` lifts the brake."""

    def __init__(self, log: hr.Log, rows_a_second: float) -> None:
        self._log, self.rows_a_second = log, rows_a_second

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def producer(self, *arguments: Any, **settings: Any) -> Any:
        return _Producer(self, self._log.producer(*arguments, **settings))

    def hurry(self) -> None:
        self.rows_a_second = float("inf")


class _Producer:
    def __init__(self, log: PacedLog, producer: Any) -> None:
        self._log, self._producer = log, producer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def append(self, rows: Any, **settings: Any) -> Any:
        done_s = time.monotonic() + rows.num_rows / self._log.rows_a_second
        position = self._producer.append(rows, **settings)
        while (
            left_s := min(done_s - time.monotonic(), 0.02)
        ) > 0 and self._log.rows_a_second != float("inf"):
            time.sleep(left_s)
        return position


def measured_pace(log: Any, topic: str, rows: Any, appends: int = 5) -> float:
    """Rows a second that a topic takes, by the fastest of some appends: a busy machine makes one
    slow now and then.
    """
    producer, times_s = log.producer(topic), []
    for _ in range(appends):
        started_s = time.perf_counter()
        producer.append(rows)
        times_s.append(time.perf_counter() - started_s)
    return float(rows.num_rows / min(times_s))
