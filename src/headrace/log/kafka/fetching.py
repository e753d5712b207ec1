"""Reading a partition from one offset to another: what `read`, the compacted topics of our own and `verify` are made of.

A read stops at a position, not at a count: markers of transactions take offsets and are never delivered. So does it end with the first record at or behind
the stop, or when the client reports that it has come to the end there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from headrace.errors import OffsetOutOfRange, RetryError
from headrace.log.kafka.config import Cluster, Settings
from headrace.log.kafka.failures import doing

BATCH_RECORDS = 10_000
SILENCE_SECONDS = 30.0


class Fetcher:
    """A consumer without a group, for one bounded read after the other."""

    def __init__(self, cluster: Cluster, extra: Settings | None = None) -> None:
        with doing("open a reader"):
            self._consumer = Consumer(cluster.reader() | (extra or {}))

    def close(self) -> None:
        self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def records(self, topic: str, partition: int, start: int, stop: int) -> Iterator[list[Message]]:
        """The records from `start` up to `stop`, in lists of bounded length. `stop` must not be beyond the end of what is committed."""
        if start >= stop:
            return
        self._consumer.assign([TopicPartition(topic, partition, start)])
        try:
            position, heard = start, time.monotonic()
            while position < stop:
                arrived = self._arrived()
                if arrived:
                    heard = time.monotonic()
                elif time.monotonic() - heard > SILENCE_SECONDS:
                    raise RetryError(f"Kafka sends nothing from {topic}[{partition}] at offset {position}.", fix="check the brokers, and try again.")
                position, rows = self._sorted_out(arrived, position, stop)
                if rows:
                    yield rows
        finally:
            self._consumer.unassign()

    def _arrived(self) -> list[Message]:
        first = self._consumer.poll(1.0)
        if first is None:
            return []
        return [first, *self._consumer.consume(BATCH_RECORDS - 1, 0)]

    def _sorted_out(self, arrived: list[Message], position: int, stop: int) -> tuple[int, list[Message]]:
        """The position after these, and those of them that are records before the stop."""
        rows = []
        for message in arrived:
            error, offset = message.error(), message.offset()
            assert offset is not None
            if error is None:
                if offset < stop:
                    rows.append(message)
                position = offset + 1
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001
                position = max(position, offset)
            else:
                raise_for(message, error, position)
        return position, rows


def raise_for(message: Message, error: KafkaError, position: int) -> None:
    """An error in the place of a record."""
    topic, partition = message.topic() or "", message.partition()
    if error.code() in {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE} and partition is not None:  # noqa: SLF001
        raise OffsetLost(topic, partition, position)
    if not error.retriable():
        with doing(f"read {topic}"):
            raise KafkaException(error)


class OffsetLost(Exception):
    """An offset that the broker no longer has, or does not have yet. Turned into OffsetOutOfRange by whoever knows the bounds."""

    def __init__(self, topic: str, partition: int, offset: int) -> None:
        super().__init__(f"{topic}[{partition}]@{offset}")
        self.topic, self.partition, self.offset = topic, partition, offset

    def explained(self, earliest: int, end: int) -> OffsetOutOfRange:
        return OffsetOutOfRange(self.topic, self.partition, self.offset, earliest, end)
