"""Transactions on Kafka. Their rows are buffered until the commit, because an open Kafka
transaction holds back the readers of its partitions.

A large transaction is the exception: beyond `MAX_BUFFERED_BYTES` its rows are sent before the
commit, and readers of those partitions wait for its end.

Kafka knows only which client of a transactional id is the newest. A client can fail and be replaced
while its owner stays, so the owner of an id is recorded beside the outcome of its last transaction
(`Notes.transaction`). Whoever replaces a client looks there first.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

from headrace.durations import format_us, to_us
from headrace.errors import (
    BadRows,
    HeadraceError,
    InputError,
    MemberFenced,
    NoteConflict,
    NotSupported,
    RetryError,
    TransactionFenced,
    TransactionTimedOut,
)
from headrace.log.api import Transaction
from headrace.log.kafka.cluster import RESPONSE_SECONDS
from headrace.log.kafka.config import logger
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.errors import FENCED, LOST_MEMBERSHIP, cause, error_code, translate_error
from headrace.log.kafka.notes import NOTES_TOPIC
from headrace.log.kafka.producer import append_batch, delete_batch, materialize, upsert_batch
from headrace.log.kafka.records import control_record, to_records
from headrace.log.kafka.sender import (
    DeliveryReports,
    Record,
    abort_transaction,
    commit_transaction,
    group_by_partition,
    open_transactional,
    send_in_transaction,
    send_records,
)
from headrace.log.kafka.staging import check_staged, discard, staged_blocks
from headrace.log.partitioning import PartitionAssigner, check_partition
from headrace.log.values import AppendResult, Duration, Headers, Offsets, Rows, Staged, TopicInfo
from headrace.names import check_name

MAX_BUFFERED_BYTES = 64 << 20
MIN_TIMEOUT_MS = 1_000  # the least that librdkafka accepts
_MAX_CLAIMS = 5
_ANY_VALUE = object()


class GroupHandle(Protocol):
    """A consumer's identity in its group, by which the group's coordinator can fence it."""

    def metadata(self, positions: Mapping[str, Mapping[int, int]]) -> Any: ...

    def check_positions(self, positions: Mapping[str, Mapping[int, int]]) -> None: ...

    def settle_positions(self, positions: Mapping[str, Mapping[int, int]]) -> None: ...

    def refuse_positions(self) -> None: ...


def _handle(positions: Mapping[str, Mapping[int, int]]) -> GroupHandle | None:
    """The consumer that positions come from."""
    return positions.handle if isinstance(positions, Offsets) else None


@dataclass
class _Contents:
    """What the transaction will commit, in order."""

    rows: list[list[Record] | Staged] = field(default_factory=list)
    buffered_bytes: int = 0
    offsets: list[tuple[str, Mapping[str, Mapping[int, int]]]] = field(default_factory=list)
    notes: list[tuple[str, str | None, Any]] = field(default_factory=list)
    adopted: list[Staged] = field(default_factory=list)


def _open_client(connection: Connection, id: str, timeout_us: int) -> Producer:
    return open_transactional(
        connection.cluster,
        f"headrace.transaction.{id}",
        max(timeout_us // 1000, MIN_TIMEOUT_MS),
    )


class KafkaTransaction(Transaction):
    """A transaction, fenced by its transactional id: opening one fences every older one of the same
    id.
    """

    def __init__(
        self, connection: Connection, id: str, owner: str, timeout_us: int, client: Producer
    ) -> None:
        self._connection = connection
        self.id = id
        self._owner = owner
        self._timeout_us = timeout_us
        self._client = client
        self._is_client_usable = True
        self._fenced_error: HeadraceError | None = None
        self._deadline = time.monotonic() + self._timeout_us / 1e6
        self._assigner = PartitionAssigner()
        self._contents = _Contents()
        self._delivery = DeliveryReports()
        self._has_begun = False
        self._is_open = True

    @classmethod
    def begin(cls, connection: Connection, id: str, timeout: Duration) -> KafkaTransaction:
        """Begin the first transaction of a new owner of the id, which fences older owners.

        An older owner that replaces its client at the same moment takes the id away once more,
        sees the new owner's record and gives up: hence several attempts.
        """
        check_name(id, what="transaction id")
        timeout_us = to_us(timeout, what="timeout")
        connection.notes.prepare()
        owner = uuid.uuid4().hex
        for _ in range(_MAX_CLAIMS):
            client = _open_client(connection, id, timeout_us)
            try:
                client.begin_transaction()
                record = connection.notes.transaction_record(id, owner, token=None)
                send_records(client, [record], DeliveryReports())
                commit_transaction(client, timeout_us / 1e6)
            except KafkaException as error:
                if error_code(abort_transaction(client, error)) not in FENCED:
                    raise translate_error(error, f"begin the transaction {id!r}") from error
            else:
                return cls(connection, id, owner, timeout_us, client)
        raise RetryError(
            f"Others open transactions of the id {id!r} all the time.",
            fix="give each owner an id of its own.",
        )

    def next(self) -> KafkaTransaction:
        """The next transaction of this id, on the same client: opening a client costs as much as
        many transactions, and Kafka refuses a client that was fenced. A client that failed is
        replaced, unless the id has a newer owner.
        """
        self.abort()
        if self._fenced_error is not None:
            raise self._fenced_error
        if not self._is_client_usable:
            self._replace_client()
        return KafkaTransaction(
            self._connection, self.id, self._owner, self._timeout_us, self._client
        )

    def _replace_client(self) -> None:
        """Open another client of this id. Raises TransactionFenced if the id has a newer owner.

        The owner is checked twice. Opening a client fences that of a newer owner, so it is not done
        if one is known; and one may have come in between. That one finds out that it still is the
        owner, and replaces its client.
        """
        self._check_owner()
        self._client = _open_client(self._connection, self.id, self._timeout_us)
        self._check_owner()
        self._is_client_usable = True

    def _check_owner(self) -> None:
        owner, _ = self._connection.notes.transaction(self.id)
        if owner != self._owner:
            self._fenced_error = TransactionFenced(
                f"The transaction id {self.id!r} has a newer owner: this one stores nothing more.",
                fix="stop this owner, or use another id.",
            )
            raise self._fenced_error

    # Contents

    def append(
        self,
        topic: str,
        rows: Rows,
        *,
        headers: Headers | None = None,
        partition: int | None = None,
    ) -> None:
        repeatable = materialize(rows)
        self._buffer_rows(topic, lambda info: append_batch(repeatable, info, headers), partition)

    def upsert(self, topic: str, rows: Rows) -> None:
        repeatable = materialize(rows)
        self._buffer_rows(topic, lambda info: upsert_batch(repeatable, info, None), None)

    def delete(self, topic: str, keys: Any) -> None:
        self._buffer_rows(topic, lambda info: delete_batch(keys, info), None)

    def append_control(self, topic: str, partition: int, payload: bytes) -> None:
        check_partition(self._info(topic), partition)
        self._buffer([control_record(topic, partition, payload)])

    def skip_offsets(self, topic: str, partition: int, count: int) -> None:  # noqa: ARG002 - never
        raise NotSupported(
            f"Kafka gives every record of {topic} the next offset.", fix="use an embedded log."
        )

    def adopt(self, staged: Staged) -> None:
        """Add staged rows to the transaction. They stay in their files until the commit."""
        self._info(staged.topic)
        check_staged(staged)
        self._contents.rows.append(staged)
        self._contents.adopted.append(staged)

    def commit_offsets(self, group: str, positions: Mapping[str, Mapping[int, int]]) -> None:
        self._check_open()
        check_name(group, what="group")
        for topic in positions:
            self._connection.topics.cached(topic)
        if (consumer := _handle(positions)) is not None:
            consumer.check_positions(positions)
        self._contents.offsets.append((group, positions))

    def set_note(self, name: str, value: str | None, **expect: str | None) -> None:
        self._check_open()
        if unknown := set(expect) - {"expect"}:
            raise InputError(f"set_note does not know {sorted(unknown)}.", fix="use expect=...")
        self._contents.notes.append((name, value, expect.get("expect", _ANY_VALUE)))

    def _info(self, topic: str) -> TopicInfo:
        self._check_open()
        return self._connection.topics.cached(topic)[0]

    def _buffer_rows(
        self, topic: str, make: Callable[[TopicInfo], pa.RecordBatch], partition: int | None
    ) -> None:
        """Check rows against the cached description of the topic, and before refusing them against
        its newest one; then buffer them.
        """
        info = self._info(topic)
        try:
            batch = make(info)
        except BadRows:
            info = self._connection.topics.info(topic)
            batch = make(info)
        partitions = self._assigner.assign(info, batch, partition)
        self._buffer(to_records(info, batch, partitions, self._connection.max_bytes))

    def _buffer(self, records: list[Record]) -> None:
        contents = self._contents
        if contents.rows and isinstance(contents.rows[-1], list):
            contents.rows[-1] += records
        else:
            contents.rows.append(records)
        contents.buffered_bytes += sum(len(record.value or b"") for record in records)
        if contents.buffered_bytes > MAX_BUFFERED_BYTES:
            with self._abort_on_error():
                self._send_buffered()

    def _check_open(self) -> None:
        if not self._is_open:
            raise InputError(
                f"The transaction {self.id!r} has ended.",
                fix="begin another one with log.transaction(...).",
            )
        if time.monotonic() > self._deadline:
            self.abort()
            raise self._timed_out()

    def _timed_out(self) -> TransactionTimedOut:
        return TransactionTimedOut(
            f"The transaction {self.id!r} was open for longer than {format_us(self._timeout_us)};"
            " nothing of it is stored.",
            fix="do less in one transaction, or give it a longer timeout.",
        )

    # Commit and abort

    def commit(self) -> AppendResult:
        """Commit everything or nothing:

        1. send the rows that are still buffered
        2. send the group offsets
        3. send the notes; those that expect a value wait for their turn and check it
        4. send a token, by which an unknown outcome is settled later
        5. commit the Kafka transaction
        6. wait until rows and offsets are visible, and discard the staged files
        """
        self._check_open()
        token = uuid.uuid4().hex
        with self._abort_on_error():
            self._send_buffered()  # 1
            for group, positions in self._contents.offsets:  # 2
                handle = _handle(positions)
                metadata = (
                    handle.metadata(positions)
                    if handle is not None
                    else self._connection.outside_group_metadata(group, positions)
                )
                offsets = [
                    TopicPartition(topic, partition, offset)
                    for topic, parts in positions.items()
                    for partition, offset in parts.items()
                ]
                if offsets:
                    self._client.send_offsets_to_transaction(offsets, metadata, RESPONSE_SECONDS)
            if self._contents.notes:
                self._send_notes()  # 3
            outcome = self._connection.notes.transaction_record(self.id, self._owner, token)
            send_records(self._client, [outcome], DeliveryReports())  # 4
        self._is_open = False
        try:
            commit_transaction(self._client, max(self._deadline - time.monotonic(), 1.0))  # 5
        except KafkaException as error:
            self._after_failed_commit(error, token)
        ranges = self._delivery.ranges()
        self._connection.await_visible(ranges)  # 6
        for group, positions in self._contents.offsets:
            if (consumer := _handle(positions)) is not None:
                consumer.settle_positions(positions)
            self._connection.admin.await_committed(group, positions)
        for staged in self._contents.adopted:
            discard(staged)
        return AppendResult(
            {topic: partitions for topic, partitions in ranges.items() if topic != NOTES_TOPIC}
        )

    def abort(self) -> None:
        self._abort(None)

    def _abort(self, reason: KafkaException | None) -> KafkaException | None:
        """Abort the transaction. Returns the error that best explains why, if there is one."""
        if not self._is_open:
            return reason
        self._is_open = False
        self._contents.rows = []
        self._is_client_usable = reason is None
        if self._has_begun:
            error = abort_transaction(
                self._client, reason or KafkaException(KafkaError(KafkaError.NO_ERROR))
            )
            reason = error if reason is not None else None
        return reason

    @contextmanager
    def _abort_on_error(self) -> Iterator[None]:
        """Abort the transaction if the body fails, and translate Kafka's errors."""
        try:
            yield
        except KafkaException as error:
            raise self._to_error(self._abort(error) or error) from error
        except HeadraceError:
            self.abort()
            raise

    def _to_error(self, error: KafkaException) -> HeadraceError:
        """The error to raise for an error of Kafka. Kafka fences a transaction that timed out, and
        one whose id an older owner tried to use, just like one with a newer owner.
        """
        if error_code(error) in FENCED and time.monotonic() > self._deadline:
            return self._timed_out()
        if error_code(error) in FENCED:
            try:
                self._check_owner()
            except TransactionFenced as fenced:
                return fenced
            except HeadraceError as unknown:
                logger.info("The owner of %r cannot be read: %s", self.id, unknown)
            return RetryError(
                f"Another client used the transaction id {self.id!r}; nothing of this transaction"
                " is stored.",
                fix="repeat it in the next transaction: tx.next().",
            )
        if error_code(error) in LOST_MEMBERSHIP:
            for _, positions in self._contents.offsets:
                if (consumer := _handle(positions)) is not None:
                    consumer.refuse_positions()
            return MemberFenced(
                "The consumer whose positions were to be committed is no longer a member of its"
                " group; nothing of the transaction is stored.",
                fix=(
                    "poll again: rows since the last commit are delivered to whoever owns the"
                    " partition now."
                ),
            )
        return translate_error(error, f"commit the transaction {self.id!r}")

    def _send_buffered(self) -> None:
        if not self._has_begun:
            self._client.begin_transaction()
            self._has_begun = True
        rows = self._contents.rows
        self._contents.rows = []
        self._contents.buffered_bytes = 0
        for part in rows:
            blocks = staged_blocks(part) if isinstance(part, Staged) else group_by_partition(part)
            send_in_transaction(self._client, blocks, self._delivery)

    def _send_notes(self) -> None:
        """Send the notes. Those that expect a value wait for their turn and compare (see
        `Notes.await_turn`); NoteConflict if one has another value.
        """
        notes, delivery = self._connection.notes, DeliveryReports()
        send_records(
            self._client,
            [notes.note_record(name, value) for name, value, _ in self._contents.notes],
            delivery,
        )
        conditional = [
            (name, expected)
            for name, _, expected in self._contents.notes
            if expected is not _ANY_VALUE
        ]
        if not conditional:
            return
        first = delivery.ranges()[NOTES_TOPIC][0].start
        notes.await_turn(first)
        for name, expected in conditional:
            current = notes.committed_before(name, first)
            if current != expected:
                raise NoteConflict(name, expected, current)

    def _after_failed_commit(self, error: KafkaException, token: str) -> None:
        """Settle a commit that failed. If its outcome is unknown, a new client of the same id
        forces Kafka to decide it, and the stored token then shows whether it was committed. A newer
        owner has decided it too, but stores its own tokens: then it stays unknown.
        """
        self._is_client_usable = False
        if cause(error).txn_requires_abort():
            error = abort_transaction(self._client, error)
        if error_code(error) in FENCED or cause(error).txn_requires_abort():
            raise self._to_error(error) from error
        try:
            self._replace_client()
            committed = self._connection.notes.transaction(self.id) == (self._owner, token)
        except HeadraceError:
            raise RetryError(
                f"The outcome of the transaction {self.id!r} is unknown: {cause(error).str()}.",
                fix="check whether its rows or notes are stored before repeating it.",
            ) from error
        if not committed:
            raise self._to_error(error) from error
