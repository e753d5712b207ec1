"""A producer as a careful program has it: it numbers its appends, and now and then sends one again, as if the answer had been lost."""

from __future__ import annotations

import pyarrow as pa

from headrace.log.api import Log

REPEAT_EVERY = 7


class Sender:
    """Appends to one topic; knows how many rows it has sent, and how many appends it has repeated."""

    def __init__(self, log: Log, topic: str) -> None:
        self._producer = log.producer(topic, id=f"demo-{topic}")
        self._sequence = self._producer.last_sequence
        self.rows, self.repeats = 0, 0

    def append(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        self._sequence += 1
        self._producer.append(rows, sequence=self._sequence)
        self.rows += rows.num_rows
        if self._sequence % REPEAT_EVERY == 0 and self._producer.append(rows, sequence=self._sequence).duplicate:
            self.repeats += 1

    def upsert(self, rows: pa.Table) -> None:
        self._producer.upsert(rows)
        self.rows += rows.num_rows

    def close(self) -> None:
        self._producer.close()


def times(microseconds: object) -> pa.Array:
    """As columns of type TIMESTAMP are stored."""
    return pa.array(microseconds, pa.int64()).cast(pa.timestamp("us", tz="UTC"))
