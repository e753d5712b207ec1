"""Reading a partition from one offset to another: what `read`, the compacted topics of our own and
`verify` are made of.

A read stops at a position, not at a count: markers of transactions take offsets and are never
delivered. So does it end with the first record at or behind the stop, or when the client reports
that it has come to the end there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from types import TracebackType
from typing import Self

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from headrace.errors import OffsetOutOfRange, RetryError
from headrace.log.kafka.config import Cluster, Settings
from headrace.log.kafka.errors import doing

BATCH_RECORDS = 10_000
MAX_IDLE = 4
MAX_KNOWN = 10_000
SILENCE_SECONDS = 30.0


class Fetcher:
    """A consumer without a group, for one bounded read after the other."""

    def __init__(self, cluster: Cluster, extra: Settings | None = None) -> None:
        with doing("open a reader"):
            self._consumer = Consumer(cluster.reader() | (extra or {}))
        self._known: set[str] = set()

    def close(self) -> None:
        self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def records(self, topic: str, partition: int, start: int, stop: int) -> Iterator[list[Message]]:
        """The records from `start` up to `stop`, in lists of bounded length. `stop` must not be
        beyond the end of what is committed.
        """
        if start >= stop:
            return
        self._meet(topic)
        self._consumer.assign([TopicPartition(topic, partition, start)])
        try:
            position, heard = start, time.monotonic()
            while position < stop:
                arrived = self._arrived()
                if arrived:
                    heard = time.monotonic()
                elif time.monotonic() - heard > SILENCE_SECONDS:
                    raise RetryError(
                        f"Kafka sends nothing from {topic}[{partition}] at offset {position}.",
                        fix="check the brokers, and try again.",
                    )
                position, rows = self._sorted_out(arrived, position, stop)
                if rows:
                    yield rows
        finally:
            self._consumer.unassign()

    def _meet(self, topic: str) -> None:
        """A client that reads already takes a second to find the leaders of a topic that is new to
        it, unless it is asked for them; a fresh one does not.
        """
        if self._known and topic not in self._known:
            with doing(f"look up the topic {topic!r}"):
                self._consumer.list_topics(topic, timeout=SILENCE_SECONDS)
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known.add(topic)

    def _arrived(self) -> list[Message]:
        first = self._consumer.poll(1.0)
        if first is None:
            return []
        return [first, *self._consumer.consume(BATCH_RECORDS - 1, 0)]

    def _sorted_out(
        self, arrived: list[Message], position: int, stop: int
    ) -> tuple[int, list[Message]]:
        """The position after these, and those of them that are records before the stop. Usually all
        are, which is seen at once.
        """
        last = arrived[-1].offset() if arrived else None
        if last is not None and last < stop and all(message.error() is None for message in arrived):
            return last + 1, arrived
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


class Fetchers:
    """Readers kept open between reads, since opening one costs more than many a read. Safe for
    several threads.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._guard = Lock()
        self._idle: list[Fetcher] = []
        self._closed = False

    @contextmanager
    def lease(self) -> Iterator[Fetcher]:
        """A reader for this one read. One whose read was not finished is not used again."""
        with self._guard:
            fetcher = self._idle.pop() if self._idle else None
        fetcher = fetcher or Fetcher(self._cluster)
        try:
            yield fetcher
        except BaseException:
            fetcher.close()
            raise
        self._give_back(fetcher)

    def _give_back(self, fetcher: Fetcher) -> None:
        with self._guard:
            if not self._closed and len(self._idle) < MAX_IDLE:
                self._idle.append(fetcher)
                return
        fetcher.close()

    def close(self) -> None:
        with self._guard:
            self._closed = True
            idle, self._idle = self._idle, []
        for fetcher in idle:
            fetcher.close()


def raise_for(message: Message, error: KafkaError, position: int) -> None:
    """An error in the place of a record."""
    topic, partition = message.topic() or "", message.partition()
    if (
        error.code() in {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}  # noqa: SLF001
        and partition is not None
    ):
        raise OffsetLost(topic, partition, position)
    if not error.retriable():
        with doing(f"read {topic}"):
            raise KafkaException(error)


class OffsetLost(Exception):
    """An offset that the broker no longer has, or does not have yet. Turned into OffsetOutOfRange
    by whoever knows the bounds.
    """

    def __init__(self, topic: str, partition: int, offset: int) -> None:
        super().__init__(f"{topic}[{partition}]@{offset}")
        self.topic, self.partition, self.offset = topic, partition, offset

    def explained(self, earliest: int, end: int) -> OffsetOutOfRange:
        return OffsetOutOfRange(self.topic, self.partition, self.offset, earliest, end)
