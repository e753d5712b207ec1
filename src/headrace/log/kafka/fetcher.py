"""Reading a partition from one offset to another. `read`, `verify` and the compacted topics are
built on it.

A read stops at an offset, not after a number of records, because transaction markers take offsets
and are never delivered. It ends with the first record at or after the stop, or when the client
reports the end of the partition there.
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
from headrace.log.kafka.config import ClusterConfig, Settings
from headrace.log.kafka.errors import translate_errors

BATCH_RECORDS = 10_000
MAX_IDLE_FETCHERS = 4
MAX_CACHED_TOPICS = 10_000
SILENCE_SECONDS = 30.0


class Fetcher:
    """A consumer without a group, for one bounded read after another."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._topics_with_leaders: set[str] = set()

    @classmethod
    def open(cls, cluster: ClusterConfig, extra: Settings | None = None) -> Fetcher:
        with translate_errors("open a reader"):
            return cls(Consumer(cluster.reader() | (extra or {})))

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
        """The records from offset `start` up to `stop`, in lists of bounded length. `stop` must not
        be beyond the last committed offset, or for a fetcher that reads uncommitted records beyond
        the end.
        """
        if start >= stop:
            return
        self._find_leaders(topic)
        self._consumer.assign([TopicPartition(topic, partition, start)])
        try:
            position, last_arrival = start, time.monotonic()
            while position < stop:
                messages = self._poll()
                if messages:
                    last_arrival = time.monotonic()
                elif time.monotonic() - last_arrival > SILENCE_SECONDS:
                    raise RetryError(
                        f"Kafka has sent nothing from {topic}[{partition}] at offset {position} for"
                        f" {SILENCE_SECONDS:.0f} seconds.",
                        fix="check the brokers, and try again.",
                    )
                position, records = self._records_before(
                    messages, position, stop, (topic, partition)
                )
                if records:
                    yield records
        finally:
            self._consumer.unassign()

    def _find_leaders(self, topic: str) -> None:
        """Request the leaders of a topic that is new to this client. Unrequested, a client that has
        read before needs a second to find them; a new client does not.
        """
        if self._topics_with_leaders and topic not in self._topics_with_leaders:
            with translate_errors(f"look up the topic {topic!r}"):
                self._consumer.list_topics(topic, timeout=SILENCE_SECONDS)
        if len(self._topics_with_leaders) >= MAX_CACHED_TOPICS:
            self._topics_with_leaders.clear()
        self._topics_with_leaders.add(topic)

    def _poll(self) -> list[Message]:
        first = self._consumer.poll(1.0)
        if first is None:
            return []
        return [first, *self._consumer.consume(BATCH_RECORDS - 1, 0)]

    def _records_before(
        self, messages: list[Message], position: int, stop: int, own: tuple[str, int]
    ) -> tuple[int, list[Message]]:
        """The offset after the messages, and those of them that are records before `stop`. Usually
        all of them are, which is checked first. Errors outlive the assignment that they are of:
        those of other partitions are ignored.
        """
        last = messages[-1].offset() if messages else None
        if last is not None and last < stop and all(each.error() is None for each in messages):
            return last + 1, messages
        records = []
        for message in messages:
            error, offset = message.error(), message.offset()
            assert offset is not None
            if error is None:
                if offset < stop:
                    records.append(message)
                position = offset + 1
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001
                position = max(position, offset)
            elif message.topic() is None or (message.topic(), message.partition()) == own:
                raise_for_error(message, error, position)
        return position, records


class FetcherPool:
    """Keeps fetchers open between reads, since opening one costs more than a short read.
    Thread-safe.
    """

    def __init__(self, cluster: ClusterConfig) -> None:
        self._cluster = cluster
        self._guard = Lock()
        self._idle: list[Fetcher] = []
        self._closed = False

    @contextmanager
    def lease(self) -> Iterator[Fetcher]:
        """A fetcher for one read. If the read fails or is not finished, the fetcher is closed."""
        with self._guard:
            fetcher = self._idle.pop() if self._idle else None
        fetcher = fetcher or Fetcher.open(self._cluster)
        try:
            yield fetcher
        except BaseException:
            fetcher.close()
            raise
        with self._guard:
            if not self._closed and len(self._idle) < MAX_IDLE_FETCHERS:
                self._idle.append(fetcher)
                return
        fetcher.close()

    def close(self) -> None:
        with self._guard:
            self._closed = True
            idle, self._idle = self._idle, []
        for fetcher in idle:
            fetcher.close()


def raise_for_error(message: Message, error: KafkaError, position: int) -> None:
    """Raise for a message that is an error instead of a record; retriable errors are ignored."""
    topic, partition = message.topic() or "", message.partition()
    if (
        error.code() in {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}  # noqa: SLF001
        and partition is not None
    ):
        raise OffsetLost(topic, partition, position)
    if not error.retriable():
        with translate_errors(f"read {topic}"):
            raise KafkaException(error)


class OffsetLost(Exception):
    """An offset that the broker no longer has, or does not have yet. Whoever knows the bounds turns
    it into OffsetOutOfRange.
    """

    def __init__(self, topic: str, partition: int, offset: int) -> None:
        super().__init__(f"{topic}[{partition}]@{offset}")
        self.topic, self.partition, self.offset = topic, partition, offset

    def with_bounds(self, earliest: int, end: int) -> OffsetOutOfRange:
        return OffsetOutOfRange(self.topic, self.partition, self.offset, earliest, end)
