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

    def transaction(self, *arguments: Any, **settings: Any) -> Any:
        return _Transaction(self, self._log.transaction(*arguments, **settings))

    def hurry(self) -> None:
        self.rows_a_second = float("inf")

    def pause(self, rows: int, since_s: float) -> None:
        """Return when so many rows have taken their time."""
        done_s = since_s + rows / self.rows_a_second
        while (left_s := min(done_s - time.monotonic(), 0.02)) > 0 and self.rows_a_second != float(
            "inf"
        ):
            time.sleep(left_s)


class _Producer:
    def __init__(self, log: PacedLog, producer: Any) -> None:
        self._log, self._producer = log, producer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def append(self, rows: Any, **settings: Any) -> Any:
        since_s = time.monotonic()
        position = self._producer.append(rows, **settings)
        self._log.pause(rows.num_rows, since_s)
        return position


class _Transaction:
    def __init__(self, log: PacedLog, transaction: Any) -> None:
        self._log, self._transaction, self._rows = log, transaction, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transaction, name)

    def append(self, topic: str, rows: Any, **settings: Any) -> None:
        self._transaction.append(topic, rows, **settings)
        self._rows += 0 if topic.startswith("__") else rows.num_rows

    def commit(self) -> Any:
        since_s = time.monotonic()
        result = self._transaction.commit()
        self._log.pause(self._rows, since_s)
        return result

    def next(self) -> Any:
        return _Transaction(self._log, self._transaction.next())


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
