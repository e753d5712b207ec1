"""The transaction on Kafka. Its rows stay here until the commit, so that readers are held up by an
open transaction no longer than the commit takes.

The exception is a large one: beyond a bound its rows are sent before, and readers of those
partitions wait for its end.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
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
    RetryError,
    TransactionFenced,
    TransactionTimedOut,
)
from headrace.log.api import Transaction
from headrace.log.kafka.cluster import ANSWER_SECONDS
from headrace.log.kafka.connection import Connection, await_committed
from headrace.log.kafka.errors import FENCED, LOST_MEMBERSHIP, cause, code, translated
from headrace.log.kafka.notes import NOTES_TOPIC
from headrace.log.kafka.producer import appended, deleted, repeatable, upserted
from headrace.log.kafka.records import control_record, to_records
from headrace.log.kafka.sender import (
    Delivery,
    Record,
    blocks,
    commit,
    open_transactional,
    roll_back,
    send,
    send_in_transaction,
)
from headrace.log.kafka.staging import check_staged, discard, staged_blocks
from headrace.log.partitioning import PartitionAssigner, check_partition
from headrace.log.topic_config import check_name
from headrace.log.values import AppendResult, Duration, Headers, Offsets, Rows, Staged, TopicInfo

MAX_BYTES_HELD = 64 << 20
SHORTEST_TIMEOUT_MS = 1_000  # librdkafka's
_ANY = object()


class GroupHandle(Protocol):
    """Who a consumer is, so that its group's coordinator can refuse it."""

    def metadata(self, positions: Mapping[str, Mapping[int, int]]) -> Any: ...


@dataclass
class _Plan:
    """What the commit will do, in order."""

    rows: list[list[Record] | Staged] = field(default_factory=list)
    held_bytes: int = 0
    offsets: list[tuple[str, Mapping[str, Mapping[int, int]]]] = field(default_factory=list)
    notes: list[tuple[str, str | None, Any]] = field(default_factory=list)
    adopted: list[Staged] = field(default_factory=list)


class KafkaTransaction(Transaction):
    def __init__(
        self, connection: Connection, id: str, timeout: Duration, *, client: Producer | None = None
    ) -> None:
        self._connection, self.id = connection, check_name(id, what="transaction id")
        self._timeout, self._timeout_us = timeout, to_us(timeout, what="timeout")
        connection.notes.prepare()
        self._client = client or self._opened()
        self._is_sound = True  # whether the client can be used again
        self._replaced: HeadraceError | None = None
        self._deadline = time.monotonic() + self._timeout_us / 1e6
        self._assigner = PartitionAssigner()
        self._plan = _Plan()
        self._delivery = Delivery()
        self._begun = False
        self._open = True

    def _opened(self) -> Producer:
        return open_transactional(
            self._connection.cluster,
            f"headrace.transaction.{self.id}",
            max(self._timeout_us // 1000, SHORTEST_TIMEOUT_MS),
        )

    def next(self) -> KafkaTransaction:
        """With the same client, which Kafka refuses once another owner has come; opening one costs
        as much as many transactions. One that broke is replaced.
        """
        self.abort()
        if self._replaced is not None:
            raise self._replaced
        return KafkaTransaction(
            self._connection,
            self.id,
            self._timeout,
            client=self._client if self._is_sound else None,
        )

    # What is to be done

    def append(
        self,
        topic: str,
        rows: Rows,
        *,
        headers: Headers | None = None,
        partition: int | None = None,
    ) -> None:
        kept = repeatable(rows)
        self._keep(topic, lambda info: appended(kept, info, headers), partition)

    def upsert(self, topic: str, rows: Rows) -> None:
        kept = repeatable(rows)
        self._keep(topic, lambda info: upserted(kept, info, None), None)

    def delete(self, topic: str, keys: Any) -> None:
        self._keep(topic, lambda info: deleted(keys, info), None)

    def append_control(self, topic: str, partition: int, payload: bytes) -> None:
        check_partition(self._info(topic), partition)
        self._hold([control_record(topic, partition, payload)])

    def adopt(self, staged: Staged) -> None:
        """Its rows stay in their files until the commit."""
        self._info(staged.topic)
        check_staged(staged)
        self._plan.rows.append(staged)
        self._plan.adopted.append(staged)

    def commit_offsets(self, group: str, positions: Mapping[str, Mapping[int, int]]) -> None:
        self._check_open()
        check_name(group, what="group")
        for topic in positions:
            self._connection.topics.recent(topic)
        self._plan.offsets.append((group, positions))

    def set_note(self, name: str, value: str | None, **expect: str | None) -> None:
        self._check_open()
        if unknown := set(expect) - {"expect"}:
            raise InputError(f"set_note does not know {sorted(unknown)}.", fix="use expect=...")
        self._plan.notes.append((name, value, expect.get("expect", _ANY) if expect else _ANY))

    def _info(self, topic: str) -> TopicInfo:
        self._check_open()
        return self._connection.topics.recent(topic)[0]

    def _keep(
        self, topic: str, make: Callable[[TopicInfo], pa.RecordBatch], partition: int | None
    ) -> None:
        """Rows are checked against the topic as it was lately; before they are refused, as it is
        now.
        """
        info = self._info(topic)
        try:
            batch = make(info)
        except BadRows:
            info = self._connection.topics.info(topic)
            batch = make(info)
        self._hold_rows(info, batch, partition)

    def _hold_rows(self, info: TopicInfo, batch: pa.RecordBatch, partition: int | None) -> None:
        self._hold(
            to_records(
                info,
                batch,
                self._assigner.assign(info, batch, partition),
                self._connection.max_bytes,
            )
        )

    def _hold(self, records: list[Record]) -> None:
        if self._plan.rows and isinstance(self._plan.rows[-1], list):
            self._plan.rows[-1] += records
        else:
            self._plan.rows.append(records)
        self._plan.held_bytes += sum(len(record.value or b"") for record in records)
        if self._plan.held_bytes > MAX_BYTES_HELD:
            self._guarded(self._send_held)

    def _check_open(self) -> None:
        if not self._open:
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

    # The end

    def commit(self) -> AppendResult:
        """All or nothing: 1. rows; 2. group offsets; 3. a token that tells later whether it
        happened; 4. notes, in turn; 5. commit; 6. wait until it shows.
        """
        self._check_open()
        token = uuid.uuid4().hex
        self._guarded(lambda: self._send_everything(token))
        self._open = False
        try:
            commit(self._client, max(self._deadline - time.monotonic(), 1.0))
        except KafkaException as error:
            self._after_failed_commit(error, token)
        offsets = self._delivery.ranges()
        self._connection.await_visible(offsets)
        for group, positions in self._plan.offsets:
            await_committed(self._connection.broker, group, positions)
        for staged in self._plan.adopted:
            discard(staged)
        return AppendResult(
            {topic: spans for topic, spans in offsets.items() if topic != NOTES_TOPIC}
        )

    def abort(self) -> None:
        self._abort(None)

    def _abort(self, reason: KafkaException | None) -> KafkaException | None:
        """Leave nothing behind; returns the error that explains best why."""
        if not self._open:
            return reason
        self._open = False
        self._plan.rows = []
        self._is_sound = reason is None
        if self._begun:
            told = roll_back(
                self._client, reason or KafkaException(KafkaError(KafkaError.NO_ERROR))
            )
            reason = told if reason is not None else None
        return reason

    def _guarded(self, step: Any) -> None:
        """Run a step; if it fails, nothing of the transaction is left."""
        try:
            step()
        except KafkaException as error:
            raise self._explained(self._abort(error) or error) from error
        except HeadraceError:
            self.abort()
            raise

    def _explained(self, error: KafkaException) -> HeadraceError:
        """Kafka fences a transaction that timed out just as one with a newer owner; the clock tells
        them apart.
        """
        if code(error) in FENCED and time.monotonic() > self._deadline:
            return self._timed_out()
        if code(error) in FENCED:
            self._replaced = TransactionFenced(
                f"The transaction id {self.id!r} has a newer owner; nothing of this one is stored.",
                fix="stop this owner, or use another id.",
            )
            return self._replaced
        if code(error) in LOST_MEMBERSHIP:
            return MemberFenced(
                "The consumer whose positions were to be committed is no longer a member of its"
                " group; nothing of the transaction is stored.",
                fix=(
                    "poll again: rows since the last commit are delivered to whoever owns the"
                    " partition now."
                ),
            )
        return translated(error, f"commit the transaction {self.id!r}")

    def _send_held(self) -> None:
        if not self._begun:
            self._client.begin_transaction()
            self._begun = True
        rows, self._plan.rows, self._plan.held_bytes = self._plan.rows, [], 0
        for part in rows:
            send_in_transaction(
                self._client,
                staged_blocks(part) if isinstance(part, Staged) else blocks(part),
                self._delivery,
            )

    def _send_everything(self, token: str) -> None:
        self._send_held()
        for group, positions in self._plan.offsets:
            self._send_offsets(group, positions)
        send(self._client, [self._connection.notes.outcome_record(self.id, token)], Delivery())
        if self._plan.notes:
            self._send_notes()

    def _send_offsets(self, group: str, positions: Mapping[str, Mapping[int, int]]) -> None:
        handle: GroupHandle | None = positions.handle if isinstance(positions, Offsets) else None
        metadata = (
            handle.metadata(positions)
            if handle is not None
            else self._connection.outsider(group, positions)
        )
        offsets = [
            TopicPartition(topic, partition, offset)
            for topic, parts in positions.items()
            for partition, offset in parts.items()
        ]
        if offsets:
            self._client.send_offsets_to_transaction(offsets, metadata, ANSWER_SECONDS)

    def _send_notes(self) -> None:
        """Notes that expect a value wait for their turn, look, and go on or give up (see
        `Notes.await_turn`).
        """
        notes, delivery = self._connection.notes, Delivery()
        send(
            self._client,
            [notes.note_record(name, value) for name, value, _ in self._plan.notes],
            delivery,
        )
        expecting = [
            (name, expected) for name, _, expected in self._plan.notes if expected is not _ANY
        ]
        if not expecting:
            return
        first = delivery.ranges()[NOTES_TOPIC][0].start
        notes.await_turn(first)
        for name, expected in expecting:
            current = notes.committed_before(name, first)
            if current != expected:
                raise NoteConflict(name, expected, current)

    def _after_failed_commit(self, error: KafkaException, token: str) -> None:
        """A new owner of the id settles a commit whose outcome is unknown; the token then says what
        it was.
        """
        self._is_sound = False
        if cause(error).txn_requires_abort():
            error = roll_back(self._client, error)
        if code(error) in FENCED or cause(error).txn_requires_abort():
            raise self._explained(error) from error
        try:
            self._client, self._is_sound = self._opened(), True
            committed = self._connection.notes.outcome(self.id) == token
        except HeadraceError:
            raise RetryError(
                f"The outcome of the transaction {self.id!r} is unknown: {cause(error).str()}.",
                fix="look whether its rows or notes are there before doing it again.",
            ) from error
        if not committed:
            raise self._explained(error) from error
