"""Producers on Kafka. A producer with an id is idempotent: it stores its rows together with their
sequence number in one Kafka transaction, and a newer producer of the same id fences it.

A producer without an id sends rows for one partition directly; rows for several partitions go in a
transaction, so that readers see all of them or none.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from threading import RLock
from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka import KafkaException
from confluent_kafka import Producer as Client

from headrace.errors import BadRows, InputError, ProducerFenced, RetryError
from headrace.log.api import Producer
from headrace.log.kafka.config import SEND_TIMEOUT_MS
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.errors import FENCED, cause, error_code, translate_error
from headrace.log.kafka.notes import ProducerProgress
from headrace.log.kafka.records import to_records
from headrace.log.kafka.sender import (
    DeliveryReports,
    Record,
    abort_transaction,
    commit_transaction,
    group_by_partition,
    open_transactional,
    send_in_transaction,
    send_records,
    translate_fencing,
)
from headrace.log.kafka.topics import TopicDescription
from headrace.log.partitioning import PartitionAssigner
from headrace.log.rows import check_changes, to_batch, tombstones, upserts, with_headers
from headrace.log.sequences import out_of_order
from headrace.log.values import (
    AppendResult,
    Headers,
    OffsetRange,
    Partitioner,
    Rows,
    TopicInfo,
    check_sequence,
)
from headrace.names import check_name

# Batches to append: the same checks for producers, transactions and staged rows


def append_batch(rows: Rows, info: TopicInfo, headers: Headers | None) -> pa.RecordBatch:
    """The batch that `append` stores. On a table's topic each row must have a change type."""
    batch = to_batch(rows, info.arrow_schema, topic=info.name, history=info.schema_history)
    if info.is_table:
        check_changes(batch, topic=info.name)
    return with_headers(batch, headers)


def upsert_batch(rows: Rows, info: TopicInfo, headers: Headers | None) -> pa.RecordBatch:
    """The batch that `upsert` stores. InputError if the topic is not a table."""
    _check_table(info, "upsert")
    batch = upserts(rows, info.arrow_schema, topic=info.name, history=info.schema_history)
    return with_headers(batch, headers)


def delete_batch(keys: Any, info: TopicInfo) -> pa.RecordBatch:
    """The tombstones that `delete` stores. InputError if the topic is not a table."""
    _check_table(info, "delete")
    return tombstones(keys, info.arrow_schema, info.key, topic=info.name)


def _check_table(info: TopicInfo, what: str) -> None:
    if not info.is_table:
        raise InputError(
            f"{what} needs a table, and {info.name!r} is a plain topic.",
            fix="use append, or create it with create_table.",
        )


def materialize(rows: Rows) -> Rows:
    """Rows that can be iterated twice: an iterator is read into a list."""
    if isinstance(rows, pa.Table | pa.RecordBatch | dict | list) or hasattr(rows, "columns"):
        return rows
    return rows if isinstance(rows, str | bytes) or not hasattr(rows, "__iter__") else list(rows)


APPEND_TIMEOUT_MS = SEND_TIMEOUT_MS
"""The transaction timeout of an append. It also bounds how long a producer that dies in the middle
of an append holds back readers of its partitions.
"""

AppendedRanges = dict[str, dict[int, OffsetRange]]
_FIX_FENCED = "stop this one; if it should go on, open it again and look at last_sequence."
_FIX_UNKNOWN = (
    "look into the topic before trying again; a producer with an id can simply repeat the same"
    " number."
)


class KafkaProducer(Producer):
    """A producer of one topic. Thread-safe; appends of several threads are serialised."""

    def __init__(
        self,
        connection: Connection,
        topic: TopicDescription,
        id: str | None,
        partitioner: Partitioner | None,
    ) -> None:
        self._connection = connection
        self._info, self._uid = topic
        self.topic = self._info.name
        self.id = id
        self._assigner = PartitionAssigner(partitioner)
        self._guard = RLock()
        self._progress = ProducerProgress()
        self._client: Client | None = None
        self._closed = False
        self.epoch = 0

    @classmethod
    def open(
        cls, connection: Connection, topic: str, id: str | None, partitioner: Partitioner | None
    ) -> KafkaProducer:
        """Open a producer. One with an id fences older producers of the id, and continues after
        their last sequence number.
        """
        producer = cls(connection, connection.topics.describe(topic), id, partitioner)
        if id is not None:
            check_name(id, what="producer id")
            producer._take_over()
        return producer

    @property
    def last_sequence(self) -> int:
        return self._progress.last

    # Appends

    def append(
        self,
        rows: Rows,
        *,
        sequence: int | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
    ) -> AppendResult:
        repeatable = materialize(rows)
        return self._store(
            lambda info: append_batch(repeatable, info, headers), sequence, partition
        )

    def upsert(
        self, rows: Rows, *, sequence: int | None = None, headers: Headers | None = None
    ) -> AppendResult:
        repeatable = materialize(rows)
        return self._store(lambda info: upsert_batch(repeatable, info, headers), sequence, None)

    def delete(self, keys: Any, *, sequence: int | None = None) -> AppendResult:
        return self._store(lambda info: delete_batch(keys, info), sequence, None)

    def close(self) -> None:
        with self._guard:
            self._closed = True
            self._client = None

    def _store(
        self,
        make: Callable[[TopicInfo], pa.RecordBatch],
        sequence: int | None,
        partition: int | None,
    ) -> AppendResult:
        with self._guard:
            if self._closed:
                raise InputError(
                    f"This producer of {self.topic!r} was closed.",
                    fix="open another one with log.producer(...).",
                )
            check_sequence(sequence, topic=self.topic, id=self.id)
            records = self._records(make, partition)
            if self.id is not None:
                if not records:  # nothing leaves no number behind
                    return AppendResult({self.topic: {}})
                sequence = self._progress.last + 1 if sequence is None else sequence
                if sequence > self._progress.last:
                    ranges = self._send_in_transaction(records, self._progress, sequence)
                    return AppendResult({self.topic: ranges.get(self.topic, {})})
                # A repeat stores nothing that Kafka could refuse, so ids and epochs are compared.
                self._check_same_topic()
                if self._connection.notes.progress(self._uid, self.id).epoch != self.epoch:
                    raise self._fenced_error()
                if not self._progress.stored.status(sequence):
                    raise out_of_order(self.topic, self.id, sequence, self._progress.last)
                stored = self._progress.ranges_of(sequence)
                return AppendResult({self.topic: stored}, duplicate=True)
            if len({record.partition for record in records}) > 1:
                return AppendResult(self._send_in_transaction(records, None))
            delivery = DeliveryReports()
            try:
                send_records(self._connection.producer, records, delivery)
            except KafkaException as error:
                raise RetryError(
                    f"Whether an append to {self.topic!r} was stored is not known:"
                    f" {cause(error).str()}.",
                    fix=_FIX_UNKNOWN,
                ) from error
            return AppendResult(delivery.ranges())

    def _records(
        self, make: Callable[[TopicInfo], pa.RecordBatch], partition: int | None
    ) -> list[Record]:
        """The records of rows, which are checked against the cached description of the topic, and
        before they are refused against its newest one.
        """
        self._info, self._uid = self._connection.topics.cached(self.topic)
        try:
            batch = make(self._info)
        except BadRows:
            self._info, self._uid = self._connection.topics.describe(self.topic)
            batch = make(self._info)
        numbers: Any = self._assigner.assign(self._info, batch, partition)
        return to_records(self._info, batch, np.asarray(numbers), self._connection.max_bytes)

    # Idempotent appends

    def _take_over(self) -> None:
        """Become the only producer of this id:

        1. open a client, which fences older producers of the id
        2. read their progress, with the last sequence number they stored
        3. store the progress with the next epoch, by which older producers know that they are
           fenced
        """
        client = self._open_client()  # 1
        progress = self._connection.notes.progress(self._uid, self.id or "")  # 2
        self._progress = replace(progress, epoch=progress.epoch + 1)
        self.epoch = self._progress.epoch
        self._client = client
        self._send_in_transaction([], self._progress)  # 3

    def _check_same_topic(self) -> None:
        """Refuse to go on in a topic that was deleted and created again: its progress is not this
        producer's.
        """
        uid = self._uid
        self._info, self._uid = self._connection.topics.describe(self.topic)
        if self._uid != uid:
            raise ProducerFenced(
                f"The topic {self.topic!r} was deleted and created again.", fix=_FIX_FENCED
            )

    def _fenced_error(self) -> ProducerFenced:
        return ProducerFenced(
            f"The producer {self.id!r} of {self.topic!r} was opened again elsewhere.",
            fix=_FIX_FENCED,
        )

    def _send_in_transaction(
        self, records: list[Record], progress: ProducerProgress | None, sequence: int | None = None
    ) -> AppendedRanges:
        """Store records in one Kafka transaction:

        1. begin
        2. send the rows
        3. send the progress with the sequence number and the offsets of the rows
        4. commit
        5. wait until readers see the rows
        """
        client = self._client or self._open_client()
        delivery = DeliveryReports()
        with translate_fencing(
            ProducerFenced, self._fenced_error().message, _FIX_FENCED, f"append to {self.topic!r}"
        ):
            try:
                client.begin_transaction()  # 1
                send_in_transaction(client, group_by_partition(records), delivery)  # 2
                ranges = delivery.ranges()
                if progress is not None:
                    if sequence is not None:
                        progress = progress.with_append(sequence, ranges.get(self.topic, {}))
                    notes = self._connection.notes
                    record = notes.progress_record(self._uid, self.id or "", progress)
                    send_records(client, [record], delivery)  # 3
            except KafkaException as error:
                raise abort_transaction(client, error) from error
            self._commit(client, progress)  # 4
        self._progress = progress or self._progress
        self._connection.await_visible(ranges)  # 5
        return ranges

    def _commit(self, client: Client, progress: ProducerProgress | None) -> None:
        try:
            commit_transaction(client, SEND_TIMEOUT_MS / 1000)
        except KafkaException as error:
            if error_code(error) in FENCED:
                raise
            if cause(error).txn_requires_abort():
                raise abort_transaction(client, error) from error
            self._settle_unknown_commit(error, progress)

    def _settle_unknown_commit(
        self, error: KafkaException, progress: ProducerProgress | None
    ) -> None:
        """Find out whether a commit with an unknown outcome was stored: opening a new client of the
        same id forces Kafka to decide, and the stored progress shows what it decided.
        """
        self._client = None
        if progress is None:
            raise RetryError(
                f"Whether an append to {self.topic!r} was stored is not known:"
                f" {cause(error).str()}.",
                fix=_FIX_UNKNOWN,
            ) from error
        self._client = self._open_client()
        if self._connection.notes.progress(self._uid, self.id or "") != progress:
            raise translate_error(error, f"append to {self.topic!r}; nothing was stored") from error

    def _open_client(self) -> Client:
        self._connection.notes.prepare()
        name = (
            f"headrace.producer.{self.topic}.{self.id}"
            if self.id is not None
            else f"headrace.append.{uuid.uuid4().hex}"
        )
        self._client = open_transactional(self._connection.cluster, name, APPEND_TIMEOUT_MS)
        return self._client
