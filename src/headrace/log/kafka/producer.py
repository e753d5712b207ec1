"""The producer on Kafka. With an id its rows and its number are stored in one Kafka transaction,
and a newer producer of the same id fences it.

Without an id, rows for one partition go out as they are; rows for several go in a transaction, so
that all of them are seen or none.
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
from headrace.log.kafka.errors import FENCED, cause, code, translated
from headrace.log.kafka.notes import Ledger
from headrace.log.kafka.records import to_records
from headrace.log.kafka.sender import (
    Delivery,
    Record,
    blocks,
    commit,
    fenced_as,
    open_transactional,
    roll_back,
    send,
    send_in_transaction,
)
from headrace.log.partitioning import PartitionAssigner
from headrace.log.rows import check_changes, to_batch, tombstones, upserts, with_headers
from headrace.log.topic_config import check_name
from headrace.log.values import (
    AppendResult,
    Headers,
    OffsetRange,
    Partitioner,
    Rows,
    TopicInfo,
    check_sequence,
)

# What users append, made into batches that fit a topic: the same checks for producers, transactions
# and staged rows.


def appended(rows: Rows, info: TopicInfo, headers: Headers | None) -> pa.RecordBatch:
    """Rows as they are; on a table's topic each says what kind of change it is."""
    batch = to_batch(rows, info.arrow_schema, topic=info.name)
    if info.is_table:
        check_changes(batch, topic=info.name)
    return with_headers(batch, headers)


def upserted(rows: Rows, info: TopicInfo, headers: Headers | None) -> pa.RecordBatch:
    _check_table(info, "upsert")
    return with_headers(upserts(rows, info.arrow_schema, topic=info.name), headers)


def deleted(keys: Any, info: TopicInfo) -> pa.RecordBatch:
    _check_table(info, "delete")
    return tombstones(keys, info.arrow_schema, info.key, topic=info.name)


def _check_table(info: TopicInfo, what: str) -> None:
    if not info.is_table:
        raise InputError(
            f"{what} needs a table, and {info.name!r} is a plain topic.",
            fix="use append, or create it with create_table.",
        )


def repeatable(rows: Rows) -> Rows:
    """Rows that can be looked at twice: an iterator is taken whole."""
    if isinstance(rows, pa.Table | pa.RecordBatch | dict | list) or hasattr(rows, "columns"):
        return rows
    return rows if isinstance(rows, str | bytes) or not hasattr(rows, "__iter__") else list(rows)


TRANSACTION_MS = SEND_TIMEOUT_MS
"""An append takes no longer; so a producer that died in the middle of one holds up readers of its
partitions no longer either.
"""

Offsets = dict[str, dict[int, OffsetRange]]


class KafkaProducer(Producer):
    """Safe for several threads; their appends follow one another."""

    def __init__(
        self, connection: Connection, topic: str, id: str | None, partitioner: Partitioner | None
    ) -> None:
        self._connection, self.topic, self.id = connection, topic, id
        self._info, self._uid = connection.topics.described(topic)
        self._assigner = PartitionAssigner(partitioner)
        self._guard = RLock()
        self._ledger = Ledger()
        self._client: Client | None = None
        self._closed = False
        self.epoch = 0
        if id is not None:
            check_name(id, what="producer id")
            self._take_over()

    @property
    def last_sequence(self) -> int:
        return self._ledger.last

    # What is stored

    def append(
        self,
        rows: Rows,
        *,
        sequence: int | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
    ) -> AppendResult:
        kept = repeatable(rows)
        return self._store(lambda info: appended(kept, info, headers), sequence, partition)

    def upsert(
        self, rows: Rows, *, sequence: int | None = None, headers: Headers | None = None
    ) -> AppendResult:
        kept = repeatable(rows)
        return self._store(lambda info: upserted(kept, info, headers), sequence, None)

    def delete(self, keys: Any, *, sequence: int | None = None) -> AppendResult:
        return self._store(lambda info: deleted(keys, info), sequence, None)

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
            self._check_usable(sequence)
            records = self._records(make, partition)
            if self.id is not None:
                return self._store_numbered(
                    records, self._ledger.last + 1 if sequence is None else sequence
                )
            if len({record.partition for record in records}) > 1:
                return AppendResult(self._in_transaction(records, None))
            return AppendResult(self._send_plainly(records))

    def _check_usable(self, sequence: int | None) -> None:
        if self._closed:
            raise InputError(
                f"This producer of {self.topic!r} was closed.",
                fix="open another one with log.producer(...).",
            )
        check_sequence(sequence, topic=self.topic, id=self.id)

    def _records(
        self, make: Callable[[TopicInfo], pa.RecordBatch], partition: int | None
    ) -> list[Record]:
        """Rows are checked against the topic as it was lately; before they are refused, as it is
        now.
        """
        self._info, self._uid = self._connection.topics.recent(self.topic)
        try:
            batch = make(self._info)
        except BadRows:
            self._info, self._uid = self._connection.topics.described(self.topic)
            batch = make(self._info)
        numbers: Any = self._assigner.assign(self._info, batch, partition)
        return to_records(self._info, batch, np.asarray(numbers), self._connection.max_bytes)

    def _send_plainly(self, records: list[Record]) -> Offsets:
        delivery = Delivery()
        try:
            send(self._connection.plain, records, delivery)
        except KafkaException as error:
            raise RetryError(
                f"Whether an append to {self.topic!r} was stored is not known:"
                f" {cause(error).str()}.",
                fix=(
                    "look into the topic before trying again; a producer with an id can simply"
                    " repeat the same number."
                ),
            ) from error
        return delivery.ranges()

    # Numbered appends

    def _take_over(self) -> None:
        """1. fence older producers of this id; 2. read what they stored last; 3. store our epoch,
        which makes us the newest for everyone to see.
        """
        client = self._open_client()
        known = self._connection.notes.ledger(self._uid, self.id or "")
        self._ledger = replace(known, epoch=known.epoch + 1)
        self.epoch = self._ledger.epoch
        self._client = client
        self._in_transaction([], self._ledger)

    def _store_numbered(self, records: list[Record], sequence: int) -> AppendResult:
        if sequence <= self._ledger.last:
            self._check_not_fenced()
            return AppendResult({self.topic: self._ledger.place_of(sequence)}, duplicate=True)
        offsets = self._in_transaction(records, self._ledger, sequence)
        return AppendResult({self.topic: offsets.get(self.topic, {})})

    def _check_not_fenced(self) -> None:
        """A repeat stores nothing that Kafka could refuse, so the ledger is asked who is the
        newest.
        """
        newest = self._connection.notes.ledger(self._uid, self.id or "").epoch
        if newest != self.epoch:
            raise self._fenced()

    def _fenced(self) -> ProducerFenced:
        return ProducerFenced(
            f"The producer {self.id!r} of {self.topic!r} was opened again elsewhere.",
            fix=_FIX_FENCED,
        )

    def _in_transaction(
        self, records: list[Record], ledger: Ledger | None, sequence: int | None = None
    ) -> Offsets:
        """1. begin; 2. rows; 3. the number, with where the rows went; 4. commit; 5. wait until
        readers see it.
        """
        client = self._client or self._open_client()
        delivery = Delivery()
        with fenced_as(
            ProducerFenced, self._fenced().message, _FIX_FENCED, f"append to {self.topic!r}"
        ):
            try:
                client.begin_transaction()
                send_in_transaction(client, blocks(records), delivery)
                offsets = delivery.ranges()
                if ledger is not None:
                    ledger = (
                        ledger
                        if sequence is None
                        else ledger.with_append(sequence, offsets.get(self.topic, {}))
                    )
                    send(
                        client,
                        [self._connection.notes.ledger_record(self._uid, self.id or "", ledger)],
                        delivery,
                    )
            except KafkaException as error:
                raise roll_back(client, error) from error
            self._commit(client, ledger)
        self._ledger = ledger or self._ledger
        self._connection.await_visible(delivery.ranges())
        return offsets

    def _commit(self, client: Client, ledger: Ledger | None) -> None:
        try:
            commit(client, SEND_TIMEOUT_MS / 1000)
        except KafkaException as error:
            if code(error) in FENCED:
                raise
            if cause(error).txn_requires_abort():
                raise roll_back(client, error) from error
            self._find_out(error, ledger)

    def _find_out(self, error: KafkaException, ledger: Ledger | None) -> None:
        """A commit whose outcome is unknown: a new client of the same id settles it one way or the
        other, and the ledger says which.
        """
        self._client = None
        if ledger is None:
            raise RetryError(
                f"Whether an append to {self.topic!r} was stored is not known:"
                f" {cause(error).str()}.",
                fix=(
                    "look into the topic before trying again; a producer with an id can simply"
                    " repeat the same number."
                ),
            ) from error
        self._client = self._open_client()
        if self._connection.notes.ledger(self._uid, self.id or "") != ledger:
            raise translated(error, f"append to {self.topic!r}; nothing was stored") from error

    def _open_client(self) -> Client:
        self._connection.notes.prepare()
        name = (
            f"headrace.producer.{self.topic}.{self.id}"
            if self.id is not None
            else f"headrace.append.{uuid.uuid4().hex}"
        )
        self._client = open_transactional(self._connection.cluster, name, TRANSACTION_MS)
        return self._client


_FIX_FENCED = "stop this one; if it should go on, open it again and look at last_sequence."
