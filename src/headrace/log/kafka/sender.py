"""Sending records to the brokers and collecting the offsets they were stored at; and opening,
committing and aborting Kafka transactions. Producers, transactions and the internal topics use it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from headrace.errors import FencedError
from headrace.log.kafka.cluster import RESPONSE_SECONDS
from headrace.log.kafka.config import SEND_TIMEOUT_MS, TRANSACTION_TIMEOUT_MS, ClusterConfig, logger
from headrace.log.kafka.errors import FENCED, cause, error_code, translate_error, translate_errors
from headrace.log.values import OffsetRange

RecordHeaders = list[tuple[str, str | bytes | None]]
FLUSH_SECONDS = SEND_TIMEOUT_MS / 1000 + 5
_POLL_EVERY_RECORDS = 1_000


class Record(NamedTuple):
    """One record for one partition. A value of None is a tombstone."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: RecordHeaders | None = None


class DeliveryReports:
    """Collects delivery reports: the offsets at which records were stored, or the first error.
    Reports may arrive in any thread that polls the producer.
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
        """For each topic and partition the range from the first to the last stored offset. Records
        of other producers may be in between.
        """
        ranges: dict[str, dict[int, OffsetRange]] = {}
        for (topic, partition), (first, last) in sorted(self._spans.items()):
            ranges.setdefault(topic or "", {})[partition or 0] = OffsetRange(first, last + 1)
        return ranges


def send_records(producer: Producer, records: Iterable[Record], delivery: DeliveryReports) -> None:
    """Send records and wait until all are acknowledged. Raises KafkaException if any was not."""
    for number, (topic, partition, key, value, headers) in enumerate(records):
        delivery.sent += 1
        _produce(producer, topic, partition, key, value, headers, delivery)
        if number % _POLL_EVERY_RECORDS == 0:
            producer.poll(0)
    _await_reports(producer, delivery)


class RecordBlock(NamedTuple):
    """Records of one partition, in columns."""

    topic: str
    partition: int
    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    headers: Iterable[RecordHeaders | None]


def group_by_partition(records: Iterable[Record]) -> list[RecordBlock]:
    """One block of records for each partition, in the order of the records."""
    columns: dict[
        tuple[str, int], tuple[list[bytes | None], list[bytes | None], list[RecordHeaders | None]]
    ] = {}
    for topic, partition, key, value, headers in records:
        keys, values, all_headers = columns.setdefault((topic, partition), ([], [], []))
        keys.append(key)
        values.append(value)
        all_headers.append(headers)
    return [RecordBlock(topic, partition, *lists) for (topic, partition), lists in columns.items()]


def send_in_transaction(
    producer: Producer, blocks: Iterable[RecordBlock], delivery: DeliveryReports
) -> None:
    """Send records in a transaction and wait until all are acknowledged. Raises KafkaException if
    any was not.

    Only the first and the last record of a block get a delivery report, since a report costs four
    times as much as sending. That suffices: a partition's records are stored in order, and a
    transaction with a record that was not stored cannot be committed.
    """
    for block in blocks:
        reported = {0, len(block.values) - 1}
        delivery.sent += len(reported)
        for number, (key, value, headers) in enumerate(
            zip(block.keys, block.values, block.headers, strict=True)
        ):
            report = delivery if number in reported else None
            _produce(producer, block.topic, block.partition, key, value, headers, report)
            if number % _POLL_EVERY_RECORDS == 0:
                producer.poll(0)
    _await_reports(producer, delivery)


def _await_reports(producer: Producer, delivery: DeliveryReports) -> None:
    deadline = time.monotonic() + FLUSH_SECONDS
    while not delivery.is_complete and time.monotonic() < deadline:
        # Not flush(): after a fatal error it goes on calling back, which crashes Python.
        producer.poll(0.1)
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
    delivery: DeliveryReports | None,
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
        except BufferError:  # the buffer is full: wait for acknowledgements
            producer.poll(0.1)
        else:
            return


# Kafka transactions


def open_transactional(
    cluster: ClusterConfig, transactional_id: str, timeout_ms: int = TRANSACTION_TIMEOUT_MS
) -> Producer:
    """Open a transactional producer. This fences every older producer of the transactional id and
    aborts the transaction that it left open.

    The producer is dropped, never closed: `close()` would try to abort, and warns where a fenced
    client cannot.
    """
    with translate_errors("open a transactional producer"):
        producer = Producer(cluster.transactional(transactional_id, timeout_ms))
        # Connect first: init_transactions would wait half a second for a connection.
        producer.list_topics("__headrace.topics", timeout=RESPONSE_SECONDS)
        producer.init_transactions(RESPONSE_SECONDS)
    return producer


@contextmanager
def translate_fencing(
    error_class: type[FencedError], message: str, fix: str, what: str
) -> Iterator[None]:
    """Raise `error_class` where Kafka reports that a newer producer has fenced this one, and
    translate any other error of Kafka.
    """
    try:
        yield
    except KafkaException as error:
        if error_code(error) in FENCED:
            raise error_class(message, fix=fix) from None
        raise translate_error(error, what) from error


def abort_transaction(producer: Producer, reason: KafkaException) -> KafkaException:
    """Abort a transaction because of an error, and return the error to raise: `reason`, unless the
    abort shows that the producer was fenced, which explains it.

    If aborting fails, the coordinator aborts when the transaction times out or its id is used
    again.
    """
    try:
        producer.abort_transaction(RESPONSE_SECONDS)
    except KafkaException as error:
        logger.info("A transaction could not be aborted: %s", error)
        return error if error_code(error) in FENCED else reason
    return reason


def commit_transaction(producer: Producer, seconds: float) -> None:
    """Commit a transaction, repeating the request while Kafka's error is retriable. Raises
    KafkaException.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            producer.commit_transaction(max(deadline - time.monotonic(), 0.1))
        except KafkaException as error:
            if not cause(error).retriable() or time.monotonic() >= deadline:
                raise
        else:
            return
