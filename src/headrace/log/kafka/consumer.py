"""A member of a consumer group on Kafka. Kafka assigns partitions and fences members by generation;
the consumer tracks its own positions and commits them explicitly.

Rebalancing is cooperative: a member goes on reading the partitions that it keeps. It learns of
partitions that it lost by Kafka's callbacks, which run while it polls. If it had delivered rows of
them that are not committed, it is fenced (`member_fence`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
from confluent_kafka import Consumer as Client
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from headrace.durations import to_us
from headrace.errors import BadPartition, HeadraceError, InputError, MemberFenced, OffsetOutOfRange
from headrace.log.api import Consumer, RebalanceCallback
from headrace.log.kafka.cluster import PartitionId
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.errors import (
    LOST_MEMBERSHIP,
    error_code,
    translate_error,
    translate_errors,
)
from headrace.log.kafka.fetcher import OffsetLost, raise_for_error
from headrace.log.kafka.reader import MisfitDiverter, RowReader, out_of_range_error
from headrace.log.member_fence import FIX_FENCED, MemberFence
from headrace.log.values import TOPIC_METADATA, Duration, Offsets
from headrace.names import check_name

SETTLE_SECONDS = 10.0
START_SECONDS = 2.0
START_RETRY_SECONDS = 0.1
CONSUME_MESSAGES = 1000  # at once, so that a poll ends near its bound in bytes


class KafkaConsumer(Consumer):
    """A member of a consumer group. For one thread at a time, like Kafka's own consumer."""

    def __init__(
        self,
        connection: Connection,
        diverter: MisfitDiverter,
        topics: tuple[str, ...],
        group: str,
        *,
        start: str,
        session_timeout: Duration,
        max_poll_interval: Duration,
        max_rows: int,
        max_bytes: int,
        on_lost: str,
        on_assigned: RebalanceCallback | None,
        on_revoked: RebalanceCallback | None,
        headers: bool,
    ) -> None:
        if start not in {"earliest", "latest"} or on_lost not in {"raise", "earliest", "latest"}:
            raise InputError(
                f"start={start!r}, on_lost={on_lost!r}.",
                fix="start is 'earliest' or 'latest'; on_lost is 'raise', 'earliest' or 'latest'.",
            )
        self._connection, self._diverter = connection, diverter
        self.topics = topics
        self.group = check_name(group, what="group")
        self._start, self._max_rows, self._on_lost = start, max_rows, on_lost
        self._headers = headers
        self._max_bytes = max_bytes
        self._on_assigned, self._on_revoked = on_assigned, on_revoked
        self._callback_error: BaseException | None = None
        self._is_in_callback = self._is_closing = False
        self._fence = MemberFence(group)
        self._readers: dict[str, RowReader] = {}
        self._positions: dict[PartitionId, int] = {}
        self._pending: list[Message] = []
        self._unstarted: set[PartitionId] = set()
        self._next_start = 0.0
        self._is_assigned = self._closed = False
        self._poll_interval_ms = to_us(max_poll_interval, what="max_poll_interval") // 1000
        # Kafka refuses a longer session than the interval between polls.
        self._session_ms = min(
            to_us(session_timeout, what="session_timeout") // 1000, self._poll_interval_ms
        )

    # Membership

    def join(self) -> None:
        """Become a member of the group, and wait for the first assignment, so that rows appended
        from now on are read with `start="latest"` too.
        """
        for name in self.topics:
            self._readers[name] = RowReader(
                self._connection,
                self._diverter,
                self._connection.topics.info(name),
                with_headers=self._headers,
                follows_schema=True,
            )
        with translate_errors(f"join the group {self.group!r}"):
            self._client = Client(
                self._connection.cluster.group_member(
                    self.group, self._session_ms, self._poll_interval_ms
                )
            )
            self._client.subscribe(
                list(self.topics),
                on_assign=self._on_assign,
                on_revoke=self._on_revoke,
                on_lost=self._on_loss,
            )
        deadline = time.monotonic() + self._session_ms / 1000 + SETTLE_SECONDS
        try:
            while not self._is_assigned and time.monotonic() < deadline:
                self._poll_client(0.05)
            deadline = min(deadline, time.monotonic() + START_SECONDS)
            while self._unstarted and time.monotonic() < deadline:
                self._poll_client(0.05)
        except BaseException:
            self.close(revoke=False)
            raise

    def _poll_client(self, seconds: float) -> None:
        """Let Kafka run its callbacks. A message that arrives is kept for the next `poll`; an error
        of the whole group is raised, and so is one of a user's callback.
        """
        message = self._client.poll(seconds)
        error = message.error() if message is not None else None
        is_of_group = error is not None and message is not None and message.topic() is None
        if message is not None and not is_of_group:
            self._pending.append(message)
        self._raise_callback_error()
        # After a pause between polls that was too long, the client joins again by itself.
        if (
            error is not None
            and is_of_group
            and error.code() != KafkaError._MAX_POLL_EXCEEDED  # noqa: SLF001
            and not error.retriable()
        ):
            raise translate_error(KafkaException(error), f"read with the group {self.group!r}")
        self._start_partitions()

    def _call_back(
        self, callback: RebalanceCallback | None, partitions: Iterable[PartitionId]
    ) -> None:
        """Call a user's callback. Its error is raised by the poll in which it was called, when the
        client has done its part of the rebalance.
        """
        by_topic: dict[str, list[int]] = {}
        for topic, number in partitions:
            by_topic.setdefault(topic, []).append(number)
        if callback is None or not by_topic:
            return
        self._is_in_callback = True
        try:
            callback(self, {topic: tuple(sorted(by_topic[topic])) for topic in sorted(by_topic)})
        except BaseException as error:
            self._callback_error = self._callback_error or error
        finally:
            self._is_in_callback = False

    def _raise_callback_error(self) -> None:
        error, self._callback_error = self._callback_error, None
        if error is not None:
            raise error

    def _on_assign(self, client: Client, partitions: list[TopicPartition]) -> None:
        """Take assigned partitions, and start those whose offsets are known.

        Offsets that a transaction is committing, perhaps one of a member that was killed, are not
        known before its end. Such a partition is paused, at an offset that needs no lookup: the
        client would apply the answer to a lookup even after it was told where to start.
        """
        self._is_assigned = True
        if not partitions or self._is_closing:
            return
        ids = [(each.topic, each.partition) for each in partitions]
        offsets: dict[PartitionId, int] = {}
        with suppress(HeadraceError):  # it is raised when the next attempt fails
            offsets = self._first_offsets(ids)
        client.incremental_assign([TopicPartition(*each, offsets.get(each, 0)) for each in ids])
        self._unstarted |= set(ids) - set(offsets)
        if self._unstarted:
            client.pause([TopicPartition(*each) for each in self._unstarted])
        self._begin(offsets)

    def _first_offsets(self, partitions: Iterable[PartitionId]) -> dict[PartitionId, int]:
        """Where to start: at the committed offset, or where `start` says. Partitions for which a
        transaction is committing offsets are left out.
        """
        admin = self._connection.admin
        offsets = admin.stable_offsets(self.group, partitions)
        uncommitted = [partition for partition, offset in offsets.items() if offset < 0]
        return offsets | (
            admin.start_offsets(uncommitted)
            if self._start == "earliest"
            else admin.end_offsets(uncommitted)
        )

    def _begin(self, offsets: Mapping[PartitionId, int]) -> None:
        for partition, offset in offsets.items():
            self._positions[partition] = offset
            self._fence.assign(partition, offset)
        self._call_back(self._on_assigned, offsets)

    def _start_partitions(self) -> None:
        """Start assigned partitions whose offsets were not known so far."""
        if not self._unstarted or time.monotonic() < self._next_start:
            return
        self._next_start = time.monotonic() + START_RETRY_SECONDS
        offsets = self._first_offsets(self._unstarted)
        for partition, offset in offsets.items():
            self._move(partition, offset)
            self._client.resume([TopicPartition(*partition)])
            self._unstarted.discard(partition)
        self._begin(offsets)
        self._raise_callback_error()

    def _on_revoke(self, _client: Client, partitions: list[TopicPartition]) -> None:
        """Partitions are about to move: what was read of them can still be committed."""
        self._call_back(self._on_revoked, self._started(partitions))
        self._drop(partitions)

    def _on_loss(self, _client: Client, partitions: list[TopicPartition]) -> None:
        """Partitions have been taken away: nothing of them can be committed any more."""
        lost = self._started(partitions)
        self._drop(partitions)
        self._call_back(self._on_revoked, lost)

    def _started(self, partitions: Iterable[TopicPartition]) -> list[PartitionId]:
        """Those of some partitions that have been started, and so announced."""
        ids = [(each.topic, each.partition) for each in partitions]
        return [partition for partition in ids if partition in self._positions]

    def _drop(self, partitions: Iterable[TopicPartition]) -> None:
        revoked = {(each.topic, each.partition) for each in partitions}
        if not self._is_closing:  # a closed consumer cannot commit in any case
            self._fence.lose(revoked)
        self._positions = {
            partition: offset
            for partition, offset in self._positions.items()
            if partition not in revoked
        }
        self._pending = [each for each in self._pending if _partition_of(each) not in revoked]
        self._unstarted -= revoked

    # Reading

    def poll(
        self, timeout: Duration = "1 second", max_rows: int | None = None
    ) -> list[pa.RecordBatch]:
        self._check_open()
        if self._is_in_callback:
            raise InputError(
                "A consumer cannot poll in its own callback.",
                fix="commit or seek there, and poll when the callback has returned.",
            )
        for partition, offset in self._fence.rewind().items():
            if partition in self._positions:
                self._move(partition, offset)
        deadline = time.monotonic() + to_us(timeout, what="timeout") / 1e6
        while True:
            seconds = max(deadline - time.monotonic(), 0.0)
            batches = self._batches(self._messages(seconds, max_rows or self._max_rows))
            if batches or time.monotonic() >= deadline:
                return batches

    def _messages(self, seconds: float, limit: int) -> list[Message]:
        """At least one message if one arrives in time, and more if they are available at once, up
        to the message that reaches the bound in bytes.
        """
        with translate_errors(f"read with the group {self.group!r}"):
            if not self._pending:
                self._poll_client(seconds)
            size = sum(map(_size_of, self._pending))
            while len(self._pending) < limit and size < self._max_bytes:
                wanted = min(limit - len(self._pending), CONSUME_MESSAGES)
                arrived = self._client.consume(wanted, 0)
                self._pending += arrived
                self._raise_callback_error()
                self._start_partitions()
                size += sum(map(_size_of, arrived))
                if len(arrived) < wanted:
                    break
        count = size = 0
        for message in self._pending[:limit]:
            count += 1
            size += _size_of(message)
            if size >= self._max_bytes:
                break
        messages, self._pending = self._pending[:count], self._pending[count:]
        return messages

    def _batches(self, messages: Sequence[Message]) -> list[pa.RecordBatch]:
        """Decode records into batches, then handle events (ends of partitions and errors).

        The order matters: an end reported after some records moves the position beyond them. An
        error is kept for the next poll if this one has rows.
        """
        by_partition: dict[PartitionId, list[Message]] = {}
        events: list[Message] = []
        for message in messages:
            if message.error() is None:
                by_partition.setdefault(_partition_of(message), []).append(message)
            else:
                events.append(message)
        batches = [
            self._rows(partition, records)
            for partition, records in sorted(by_partition.items())
            if partition in self._positions
        ]
        batches = [batch for batch in batches if batch.num_rows]
        for index, event in enumerate(events):
            if batches and not _is_end(event):
                self._pending = events[index:] + self._pending
                break
            self._handle_event(event)
        return batches

    def _rows(self, partition: PartitionId, records: list[Message]) -> pa.RecordBatch:
        position = self._positions[partition]
        # After a seek, older records may still arrive.
        current = [record for record in records if (record.offset() or 0) >= position]
        if current:
            self._positions[partition] = (current[-1].offset() or 0) + 1
            self._fence.deliver(partition, self._positions[partition])
        batch = self._readers[partition[0]].rows(current)
        return batch.replace_schema_metadata({TOPIC_METADATA: partition[0].encode()})

    def _handle_event(self, message: Message) -> None:
        """Handle the end of a partition, or an offset that the broker does not have."""
        error, partition = message.error(), _partition_of(message)
        assert error is not None
        if partition not in self._positions:
            return
        if _is_end(message):
            self._positions[partition] = max(self._positions[partition], message.offset() or 0)
            return
        try:
            raise_for_error(message, error, self._positions[partition])
        except OffsetLost as lost:
            out_of_range = out_of_range_error(self._connection, lost)
            if out_of_range is None:  # lost was an offset of an earlier assignment
                self._move(partition, self._positions[partition])
                return
            if self._on_lost == "raise":
                raise out_of_range from None
            self._move(
                partition,
                out_of_range.earliest if self._on_lost == "earliest" else out_of_range.end,
            )

    def _check_open(self) -> None:
        if self._closed:
            raise InputError(
                "This consumer was closed.", fix="open another one with log.consumer(...)."
            )

    # Positions

    def positions(self) -> Offsets:
        self._fence.check()
        return self._owned_positions()

    def _owned_positions(self) -> Offsets:
        offsets: dict[str, dict[int, int]] = {}
        for (topic, partition), offset in sorted(self._positions.items()):
            offsets.setdefault(topic, {})[partition] = offset
        return Offsets(
            offsets,
            member=None if self._closed else self._client.memberid(),
            handle=self,
            epoch=self._fence.epoch,
        )

    def check_positions(self, positions: Mapping[str, Mapping[int, int]]) -> None:
        """Raise MemberFenced if this member cannot commit these positions of its own any more."""
        self._fence.check(positions)

    def settle_positions(self, positions: Mapping[str, Mapping[int, int]]) -> None:
        """A transaction has committed positions of this member."""
        self._fence.commit(positions)

    def refuse_positions(self) -> None:
        """A transaction could not commit positions of this member: MemberFenced was raised."""
        self._fence.report()

    def metadata(self, positions: Mapping[str, Mapping[int, int]]) -> Any:
        """The group metadata with which a transaction commits positions of this consumer: the
        group's coordinator checks the member's generation.
        """
        self._check_open()
        self._fence.check(positions)
        self._check_owned(positions)
        return self._client.consumer_group_metadata()

    def commit(self, positions: Mapping[str, Mapping[int, int]] | None = None) -> None:
        self._check_open()
        to_commit = self._owned_positions() if positions is None else positions
        self._fence.check(to_commit)
        offsets = [
            TopicPartition(topic, partition, offset)
            for topic, partitions in to_commit.items()
            for partition, offset in partitions.items()
        ]
        deadline = time.monotonic() + SETTLE_SECONDS
        while offsets:
            self._check_owned(to_commit)
            try:
                self._client.commit(offsets=offsets, asynchronous=False)
            except KafkaException as error:
                self._after_failed_commit(error, deadline)
            else:
                self._fence.commit(to_commit)
                return

    def _after_failed_commit(self, error: KafkaException, deadline: float) -> None:
        """During a rebalance, let it go on: afterwards this member either still owns the partition
        or has lost it. Any other error is raised.
        """
        if error_code(error) in LOST_MEMBERSHIP:
            self._drop([TopicPartition(*partition) for partition in self._positions])
            self._fence.report()
            raise MemberFenced(
                f"This consumer is no longer a member of group {self.group!r}.", fix=FIX_FENCED
            ) from None
        is_over = time.monotonic() > deadline or self._is_in_callback
        if error_code(error) != KafkaError.REBALANCE_IN_PROGRESS or is_over:
            raise translate_error(error, f"commit positions of group {self.group!r}") from error
        self._poll_client(0.05)

    def _check_owned(self, positions: Mapping[str, Mapping[int, int]]) -> None:
        for topic, offsets in positions.items():
            for partition in offsets:
                if (topic, partition) not in self._positions:
                    self._fence.report()
                    raise MemberFenced(
                        f"This member no longer owns {topic}[{partition}] in group {self.group!r}.",
                        fix=FIX_FENCED,
                    )

    def seek(self, partition: int, offset: int, *, topic: str | None = None) -> None:
        self._check_open()
        owned = (topic or self.topics[0], partition)
        if owned not in self._positions:
            raise BadPartition(
                f"This member does not own {owned[0]}[{partition}].",
                fix=f"it owns {sorted(self._positions)}.",
            )
        start = self._connection.admin.start_offsets([owned])[owned]
        end = self._connection.admin.end_offsets([owned])[owned]
        if not start <= offset <= end:
            raise OffsetOutOfRange(*owned, offset, start, end)
        self._move(owned, offset)
        self._fence.seek(owned, offset)

    def _move(self, partition: PartitionId, offset: int) -> None:
        """Go on at another offset. The partition is assigned anew, because the client cannot seek
        in a partition whose offset was lost.
        """
        with translate_errors(f"move to offset {offset} of {partition[0]}[{partition[1]}]"):
            self._client.incremental_unassign([TopicPartition(*partition)])
            self._client.incremental_assign([TopicPartition(*partition, offset)])
        self._positions[partition] = offset
        self._pending = [each for each in self._pending if _partition_of(each) != partition]

    def assignment(self) -> Mapping[str, tuple[int, ...]]:
        return {topic: tuple(offsets) for topic, offsets in self._owned_positions().items()}

    def close(self, *, revoke: bool = True) -> None:
        if self._closed:
            return
        if not revoke:
            self._on_revoked = None
        self._is_closing = True
        try:
            self._client.close()  # calls on_revoked, which may commit
        finally:
            self._closed = True
            self._positions, self._pending = {}, []
        self._raise_callback_error()


def _is_end(message: Message) -> bool:
    error = message.error()
    return error is not None and error.code() == KafkaError._PARTITION_EOF  # noqa: SLF001


def _partition_of(message: Message) -> PartitionId:
    return message.topic() or "", message.partition() or 0


def _size_of(message: Message) -> int:
    return 0 if message.error() is not None else len(message)
