"""The newest value of every key of a compacted topic of our own: where topics are described (`topics.py`) and notes are kept (`notes.py`).

Each partition is read when it is asked for, from where the last look ended, up to everything that was written by then.
"""

from __future__ import annotations

from threading import Lock

from confluent_kafka import KafkaError, KafkaException

from headrace.errors import RetryError
from headrace.log.kafka.cluster import Broker
from headrace.log.kafka.failures import code, doing

PENDING_SECONDS = 90.0
SETTINGS = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.1", "segment.ms": str(24 * 3600 * 1000), "compression.type": "producer"}


class CompactedPartition:
    """One partition, as a dictionary that catches up on demand."""

    def __init__(self, broker: Broker, topic: str, partition: int) -> None:
        self._broker, self._place = broker, (topic, partition)
        self._guard = Lock()
        self._position = -1
        self._values: dict[bytes, bytes] = {}

    def values(self) -> dict[bytes, bytes]:
        """All that is committed. Waits for transactions that were writing here when it was called: one of them may have committed already."""
        self._await_pending()
        with self._guard:
            return dict(self._values)

    def get(self, key: bytes) -> bytes | None:
        """As `values`, for one key."""
        self._await_pending()
        with self._guard:
            return self._values.get(key)

    def get_before(self, key: bytes, end: int) -> bytes | None:
        """The value of a key as of an offset up to which everything is decided. Does not wait for transactions behind it."""
        self._read_to(end)
        with self._guard:
            return self._values.get(key)

    def _await_pending(self) -> None:
        """Outside the lock: one of the transactions waited for may be ours, in another thread, about to look at a value itself."""
        end = self._broker.high_watermarks([self._place])[self._place]
        if end > self._position and not self._broker.await_ends({self._place: end}, PENDING_SECONDS):
            raise RetryError(
                f"A transaction that writes to {self._place[0]} has been open for {PENDING_SECONDS:.0f} seconds.",
                fix="wait until it ends or times out, and try again.",
            )
        self._read_to(end)

    def _read_to(self, end: int) -> None:
        with self._guard:
            if end > self._position:
                self._apply_all(end)

    def _apply_all(self, end: int) -> None:
        if self._position < 0:
            self._position = self._broker.earliest([self._place])[self._place]
        with self._broker.fetchers.lease() as fetcher:
            for messages in fetcher.records(*self._place, self._position, end):
                for message in messages:
                    self._apply(message.key(), message.value())
        self._position = end

    def _apply(self, key: bytes | None, value: bytes | None) -> None:
        if key is None:
            return
        if value is None:
            self._values.pop(key, None)
        else:
            self._values[key] = value


def ensure_topic(broker: Broker, topic: str, partitions: int) -> int:
    """Create a compacted topic if it is not there; its number of partitions."""
    count = broker.partitions(topic)
    if count is not None:
        return count
    with doing(f"create the topic {topic!r}"):
        try:
            broker.create(topic, partitions, SETTINGS)
        except KafkaException as error:
            if code(error) != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
    return broker.partitions(topic) or partitions
