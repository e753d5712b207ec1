"""Records on their way to the brokers: what is sent, and where it went. Producers, transactions and
our own topics send with this.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from headrace.errors import FencedError
from headrace.log.kafka.cluster import ANSWER_SECONDS
from headrace.log.kafka.config import SEND_TIMEOUT_MS, TRANSACTION_TIMEOUT_MS, Cluster, logger
from headrace.log.kafka.errors import FENCED, cause, code, doing, translated
from headrace.log.values import OffsetRange

RecordHeaders = list[tuple[str, str | bytes | None]]
FLUSH_SECONDS = SEND_TIMEOUT_MS / 1000 + 5
_SERVED_EVERY = 1_000


class Record(NamedTuple):
    """One record for one partition. A value of None is a tombstone."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: RecordHeaders | None = None


class Delivery:
    """Collects what became of records: the offsets they got, or the first error. Reports may come
    in any thread that polls the producer.
    """

    def __init__(self) -> None:
        self.error: KafkaError | None = None
        self.sent = 0
        self._reported = 0
        self._guard = Lock()
        self._spans: dict[tuple[str | None, int | None], list[int]] = {}

    @property
    def is_complete(self) -> bool:
        return self._reported >= self.sent

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        with self._guard:
            self._reported += 1
            if error is not None:
                self.error = self.error or error
                return
            offset = message.offset() or 0
            span = self._spans.setdefault((message.topic(), message.partition()), [offset, offset])
            span[1] = max(span[1], offset)

    def ranges(self) -> dict[str, dict[int, OffsetRange]]:
        """For each topic and partition, from the first offset to behind the last. Records of others
        may lie between.
        """
        ranges: dict[str, dict[int, OffsetRange]] = {}
        for (topic, partition), (first, last) in sorted(self._spans.items()):
            ranges.setdefault(topic or "", {})[partition or 0] = OffsetRange(first, last + 1)
        return ranges


def send(producer: Producer, records: Iterable[Record], delivery: Delivery) -> None:
    """Send records and wait until all are acknowledged. Raises KafkaException if any was not."""
    for number, (topic, partition, key, value, headers) in enumerate(records):
        delivery.sent += 1
        _produce(producer, topic, partition, key, value, headers, delivery)
        if number % _SERVED_EVERY == 0:
            producer.poll(0)
    _await_reports(producer, delivery)


class Block(NamedTuple):
    """Records of one partition, in columns."""

    topic: str
    partition: int
    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    headers: Iterable[RecordHeaders | None]


def blocks(records: Iterable[Record]) -> list[Block]:
    """The same records, partition by partition."""
    found: dict[
        tuple[str, int], tuple[list[bytes | None], list[bytes | None], list[RecordHeaders | None]]
    ] = {}
    for topic, partition, key, value, headers in records:
        block = found.get((topic, partition)) or found.setdefault((topic, partition), ([], [], []))
        block[0].append(key)
        block[1].append(value)
        block[2].append(headers)
    return [Block(topic, partition, *columns) for (topic, partition), columns in found.items()]


def send_in_transaction(producer: Producer, sent: Iterable[Block], delivery: Delivery) -> None:
    """Send records, and wait until they are acknowledged. Raises KafkaException if one was not.

    Only the first and the last of a block are reported, since a report costs four times as much as
    the sending itself. That is enough: a partition's records are stored in order, and a transaction
    with a record that was not stored cannot be committed.
    """
    for block in sent:
        _hand_over(producer, block, delivery)
    _await_reports(producer, delivery)


def _hand_over(producer: Producer, block: Block, delivery: Delivery) -> None:
    reported = {0, len(block.values) - 1}
    delivery.sent += len(reported)
    for number, (key, value, headers) in enumerate(
        zip(block.keys, block.values, block.headers, strict=True)
    ):
        _produce(
            producer,
            block.topic,
            block.partition,
            key,
            value,
            headers,
            delivery if number in reported else None,
        )
        if number % _SERVED_EVERY == 0:
            producer.poll(0)


def _await_reports(producer: Producer, delivery: Delivery) -> None:
    deadline = time.monotonic() + FLUSH_SECONDS
    while not delivery.is_complete and time.monotonic() < deadline:
        producer.poll(
            0.1
        )  # not flush(): it goes on calling back after a fatal error, which Python cannot bear
    if delivery.error is not None:
        raise KafkaException(delivery.error)
    if not delivery.is_complete:
        raise KafkaException(
            KafkaError(KafkaError._MSG_TIMED_OUT, "the brokers did not acknowledge in time")  # noqa: SLF001
        )


def _produce(
    producer: Producer,
    topic: str,
    partition: int,
    key: bytes | None,
    value: bytes | None,
    headers: RecordHeaders | None,
    delivery: Delivery | None,
) -> None:
    while True:
        try:
            if headers:
                producer.produce(
                    topic, value, key, partition, on_delivery=delivery, headers=headers
                )
            elif delivery is not None:
                producer.produce(topic, value, key, partition, on_delivery=delivery)
            else:
                producer.produce(topic, value, key, partition)
        except BufferError:  # the bounded buffer is full: wait for acknowledgements
            producer.poll(0.1)
        else:
            return


# Transactions of Kafka's


def open_transactional(
    cluster: Cluster, transactional_id: str, timeout_ms: int = TRANSACTION_TIMEOUT_MS
) -> Producer:
    """A transactional producer. Whoever used the id before is fenced from now on, and what it left
    open is rolled back.

    It is let go of, never closed: `close()` would try to roll back, and warns where a fenced client
    cannot.
    """
    with doing("open a transactional producer"):
        producer = Producer(cluster.transactional(transactional_id, timeout_ms))
        producer.list_topics(
            "__headrace.topics", timeout=ANSWER_SECONDS
        )  # with a connection at hand, the next step does not wait half a second for one
        producer.init_transactions(ANSWER_SECONDS)
    return producer


@contextmanager
def fenced_as(error_class: type[FencedError], message: str, fix: str, what: str) -> Iterator[None]:
    """Turn Kafka's word that a newer owner exists into one of ours, and any other of its errors
    too.
    """
    try:
        yield
    except KafkaException as error:
        if code(error) in FENCED:
            raise error_class(message, fix=fix) from None
        raise translated(error, what) from error


def roll_back(producer: Producer, reason: KafkaException) -> KafkaException:
    """Abort because of an error; returns the error to raise: that the client was fenced outweighs
    what followed from it.

    If aborting fails, the coordinator rolls back when the transaction's time is up or its id is
    used again.
    """
    try:
        producer.abort_transaction(ANSWER_SECONDS)
    except KafkaException as error:
        logger.info("A transaction could not be rolled back: %s", error)
        return error if code(error) in FENCED else reason
    return reason


def commit(producer: Producer, seconds: float) -> None:
    """Commit, asking again while Kafka says that it may work. Raises KafkaException."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            producer.commit_transaction(max(deadline - time.monotonic(), 0.1))
        except KafkaException as error:
            if not cause(error).retriable() or time.monotonic() >= deadline:
                raise
        else:
            return
