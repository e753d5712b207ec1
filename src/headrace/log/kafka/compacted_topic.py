"""The newest value of every key of a compacted topic, kept in memory. The internal topics are read
so: descriptions of topics (`topics`) and notes (`notes`).

A partition is read on demand, from where the last read ended up to everything written by then.
"""

from __future__ import annotations

from threading import Lock

from confluent_kafka import KafkaError, KafkaException

from headrace.errors import RetryError
from headrace.log.kafka.cluster import ClusterAdmin
from headrace.log.kafka.errors import error_code, translate_errors
from headrace.log.kafka.fetcher import Fetcher

PENDING_SECONDS = 90.0
BRIEF_SECONDS = 0.25
"""How long transactions of others usually take to end."""
SETTINGS = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.1",
    "segment.ms": str(24 * 3600 * 1000),
    "compression.type": "producer",
}


class CompactedPartition:
    """One partition as a dictionary that catches up on demand. Thread-safe."""

    def __init__(self, admin: ClusterAdmin, topic: str, partition: int) -> None:
        self._admin, self._partition = admin, (topic, partition)
        self._guard = Lock()
        self._position = -1
        self._values: dict[bytes, bytes] = {}

    def values(self) -> dict[bytes, bytes]:
        """All committed values. Waits for transactions that were writing to the partition when it
        was called, because one of them may have committed already.
        """
        self._catch_up()
        with self._guard:
            return dict(self._values)

    def get(self, key: bytes) -> bytes | None:
        """The committed value of a key. Waits for open transactions as `values` does, but not long
        for those that did not write this key: one of a process that died stays open until it times
        out.
        """
        self._catch_up(key)
        with self._guard:
            return self._values.get(key)

    def get_before(self, key: bytes, end: int) -> bytes | None:
        """The value of a key as of an offset before which every transaction is decided. Does not
        wait for transactions after it.
        """
        self._read_to(end)
        with self._guard:
            return self._values.get(key)

    def _catch_up(self, key: bytes | None = None) -> None:
        """Read everything written so far; for one key, everything that may have its value. The wait
        is outside the lock: one of the transactions may belong to another thread of this process,
        which is about to read a value itself.
        """
        target = {self._partition: self._admin.high_watermarks([self._partition])[self._partition]}
        end = target[self._partition]
        if end > self._position and not self._admin.await_ends(target, BRIEF_SECONDS):
            committed = self._admin.end_offsets([self._partition])[self._partition]
            if key is not None and not self._is_written(key, committed, end):
                end = committed
            elif not self._admin.await_ends(target, PENDING_SECONDS):
                raise RetryError(
                    f"A transaction that writes to {self._partition[0]} has been open for"
                    f" {PENDING_SECONDS:.0f} seconds.",
                    fix="wait until it ends or times out, and try again.",
                )
        self._read_to(end)

    def _is_written(self, key: bytes, start: int, stop: int) -> bool:
        """Whether a range has a record of a key, of a transaction of whatever outcome."""
        with Fetcher.open(self._admin.cluster, {"isolation.level": "read_uncommitted"}) as fetcher:
            return any(
                message.key() == key
                for messages in fetcher.records(*self._partition, start, stop)
                for message in messages
            )

    def _read_to(self, end: int) -> None:
        with self._guard:
            if end <= self._position:
                return
            if self._position < 0:
                self._position = self._admin.start_offsets([self._partition])[self._partition]
            with self._admin.fetchers.lease() as fetcher:
                for messages in fetcher.records(*self._partition, self._position, end):
                    for message in messages:
                        key, value = message.key(), message.value()
                        if key is None:
                            continue
                        if value is None:
                            self._values.pop(key, None)
                        else:
                            self._values[key] = value
            self._position = end


def ensure_compacted_topic(admin: ClusterAdmin, topic: str, partitions: int) -> int:
    """Create a compacted topic if it does not exist. Returns its number of partitions."""
    count = admin.partitions(topic)
    if count is not None:
        return count
    with translate_errors(f"create the topic {topic!r}"):
        try:
            admin.create(topic, partitions, SETTINGS)
        except KafkaException as error:
            if error_code(error) != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
    return admin.partitions(topic) or partitions
