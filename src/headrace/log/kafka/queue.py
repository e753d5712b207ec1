"""Queues on Kafka: share groups (KIP-932), with what they lack built on top or refused by name.

- A negative acknowledgement with a delay keeps the message leased here and releases it when the
  delay is over. A delay longer than the message's visibility is refused.
- Messages that were delivered too often become dead letters here, before Kafka's own delivery limit
  drops them silently.
- Visibility is a setting of the share group: the last one requested applies to all its receivers,
  within the bounds that the brokers set.
- Refused: renewing a lease (the client cannot request it), and receipts of another process (a lease
  belongs to the client that fetched the message).
- Kafka delivers whole batches as they were written. Messages beyond those requested wait here for
  the next `receive`; their visibility counts from the fetch.

A share consumer cannot fetch while it holds unacknowledged messages. So a queue has several
`ShareClient`s, one for each `receive` whose messages are not all settled.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from threading import RLock
from typing import Any

from confluent_kafka import (
    AcknowledgeType,
    IllegalStateException,
    KafkaError,
    ShareConsumer,
)
from confluent_kafka import Message as FetchedMessage

from headrace.columnar.columns import (
    HEADERS_COLUMN,
    OFFSET_COLUMN,
    PARTITION_COLUMN,
    TIMESTAMP_COLUMN,
)
from headrace.durations import format_us, to_us
from headrace.errors import ConfigurationError, InputError, LeaseLost, NotSupported, RetryError
from headrace.log import dead_letters
from headrace.log.api import Log, Message, Queue
from headrace.log.kafka.cluster import ClusterAdmin
from headrace.log.kafka.config import ClusterConfig
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.errors import translate_errors
from headrace.log.kafka.reader import MisfitDiverter, RowReader
from headrace.log.rows import to_batch
from headrace.log.values import Duration, PeekedMessage, QueueStats
from headrace.names import check_name

# Settings of the share group

LOCK_DURATION_SETTING = "share.record.lock.duration.ms"
DELIVERY_LIMIT_SETTING = "share.delivery.count.limit"
FIXED_SETTINGS = {"share.auto.offset.reset": "earliest", "share.isolation.level": "read_committed"}
BROKER_DEFAULT_MAX_DELIVERIES = 10
APPLY_SECONDS = 10.0


class ShareGroup:
    """The settings of one share group, as one queue needs them. Kafka stores them per group; they
    are set when the queue first receives.
    """

    def __init__(self, admin: ClusterAdmin, group: str, delivery_limit: int) -> None:
        self._admin, self._group, self._limit = admin, group, delivery_limit
        self._visibility_ms: int | None = None

    def set_visibility(self, visibility_us: int) -> None:
        visibility_ms = visibility_us // 1000
        if visibility_ms == self._visibility_ms:
            return
        if self._visibility_ms is None:
            self._set_delivery_limit()
        self._set_lock_duration(visibility_ms)
        self._visibility_ms = visibility_ms

    def _set_delivery_limit(self) -> None:
        """Set Kafka's own limit above the queue's: at its limit Kafka drops a message silently,
        while the queue makes it a dead letter.
        """
        kafka_limit = max(self._limit + 1, BROKER_DEFAULT_MAX_DELIVERIES)
        try:
            self._admin.configure_group(
                self._group, FIXED_SETTINGS | {DELIVERY_LIMIT_SETTING: str(kafka_limit)}
            )
        except ConfigurationError as error:
            raise NotSupported(
                f"A delivery limit of {self._limit} needs"
                f" {DELIVERY_LIMIT_SETTING}={self._limit + 1} on Kafka, which the brokers refuse:"
                f" {error.message}",
                fix=(
                    "lower delivery_limit, or raise group.share.max.delivery.count.limit on the"
                    " brokers."
                ),
            ) from error

    def _set_lock_duration(self, visibility_ms: int) -> None:
        """Set the visibility and wait until the brokers apply it: a message that is fetched before
        would have the old visibility.
        """
        try:
            self._admin.configure_group(self._group, {LOCK_DURATION_SETTING: str(visibility_ms)})
        except ConfigurationError as error:
            raise NotSupported(
                f"A visibility of {format_us(visibility_ms * 1000)} is outside of what the brokers"
                f" allow: {error.message}",
                fix=(
                    "choose another one, or change group.share.min.record.lock.duration.ms and"
                    " group.share.max.record.lock.duration.ms on the brokers."
                ),
            ) from error
        deadline = time.monotonic() + APPLY_SECONDS
        while self._admin.group_settings(self._group).get(LOCK_DURATION_SETTING) != str(
            visibility_ms
        ):
            if time.monotonic() > deadline:
                raise RetryError(
                    f"The brokers have not applied a setting of group {self._group!r} within"
                    f" {APPLY_SECONDS:.0f} seconds.",
                    fix="try again.",
                )
            time.sleep(0.02)


# Share clients

RecordId = tuple[int, int]
"""The partition and offset of a message."""

SETTLE_SECONDS = 15.0
LEASE_OVER = {
    KafkaError.INVALID_RECORD_STATE,
    KafkaError.SHARE_SESSION_NOT_FOUND,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.FENCED_STATE_EPOCH,
}


@dataclass
class Lease:
    """A message that a share client holds.

    Attributes:
        until: the local time (`time.monotonic`) at which the lease ends.
        deliveries: how often the message has been delivered, this time included.
        release_at: the time at which to release it, after a `nack` with a delay.

    """

    until: float
    deliveries: int
    release_at: float | None = None


class ShareClient:
    """A member of a share group, with the leases of one fetch until all of them are settled. Not
    thread-safe.
    """

    def __init__(self, consumer: ShareConsumer, topic: str, size: int) -> None:
        self.topic, self.size = topic, size
        self.leases: dict[RecordId, Lease] = {}
        self.is_new = True
        self._consumer = consumer

    @classmethod
    def open(cls, cluster: ClusterConfig, topic: str, group: str, size: int) -> ShareClient:
        """Join the share group."""
        with translate_errors(f"open the queue {topic!r} for group {group!r}"):
            consumer = ShareConsumer(cluster.share_member(group, size))
            consumer.subscribe([topic])
        return cls(consumer, topic, size)

    def fetch(self, seconds: float, visibility_seconds: float) -> list[FetchedMessage]:
        """The messages that arrive in time. They may be more than `size`, because Kafka delivers
        whole batches as they were written.
        """
        begun = time.monotonic()
        with translate_errors(f"receive from {self.topic!r}"):
            messages = [each for each in self._consumer.poll(seconds) if each.error() is None]
        if messages:
            # Counted from before the fetch if it was short: the local lease may end before Kafka's,
            # never after it.
            until = max(begun, time.monotonic() - 1.0) + visibility_seconds
            self.leases = {
                (each.partition() or 0, each.offset() or 0): Lease(
                    until, each.delivery_count() or 1
                )
                for each in messages
            }
        return messages

    def settle(self, record_ids: Iterable[RecordId], how: AcknowledgeType) -> None:
        """Acknowledge messages: accept, release or reject them. LeaseLost if the lease of one of
        them is over.
        """
        held = [record_id for record_id in record_ids if record_id in self.leases]
        try:
            for partition, offset in held:
                self._consumer.acknowledge_offset(self.topic, partition, offset, how)
        except IllegalStateException:
            raise lease_lost(self.topic, held) from None
        finally:
            for record_id in held:
                self.leases.pop(record_id, None)
        with translate_errors(f"settle messages of {self.topic!r}"):
            results = self._consumer.commit_sync(SETTLE_SECONDS)
            for error in results.values():
                if error is not None:
                    inner = error.args[0] if error.args else None
                    if isinstance(inner, KafkaError) and inner.code() in LEASE_OVER:
                        raise lease_lost(self.topic, held) from None
                    raise error

    def release_due(self, now: float) -> None:
        """Release messages whose lease is over, so that this client can fetch again, and those
        whose `nack` delay has passed.
        """
        expired = [each for each, lease in self.leases.items() if lease.until <= now]
        due = [
            each
            for each, lease in self.leases.items()
            if lease.until > now and lease.release_at is not None and lease.release_at <= now
        ]
        for record_ids in (expired, due):
            if record_ids:
                try:
                    self.settle(record_ids, AcknowledgeType.RELEASE)
                except LeaseLost:
                    continue

    def next_release(self) -> float | None:
        times = (lease.release_at for lease in self.leases.values() if lease.release_at is not None)
        return min(times, default=None)

    def close(self) -> None:
        """Leave the group. Kafka releases the messages that are still held."""
        with translate_errors(f"close the queue {self.topic!r}"):
            self._consumer.close()


def lease_lost(topic: str, record_ids: Sequence[RecordId]) -> LeaseLost:
    partition, offset = record_ids[0] if record_ids else (-1, -1)
    return LeaseLost(
        f"The message at {topic}[{partition}] offset {offset} is no longer leased under this"
        " receipt.",
        fix=(
            "it was settled already, or its visibility ended and it was delivered again; receive"
            " with a longer visibility."
        ),
    )


# The queue

MAX_CLIENTS = 16
MIN_POLL_SECONDS = 0.1
MAX_POLL_SECONDS = 0.25
JOIN_SECONDS = 1.0


@dataclass
class KafkaMessage(Message):
    """A message of a queue on Kafka."""

    queue: KafkaQueue = field(repr=False)
    topic: str
    partition: int
    offset: int
    timestamp: datetime
    deliveries: int
    row: dict[str, Any]
    headers: list[tuple[str, bytes | None]]
    receipt: str

    def ack(self) -> None:
        self.queue.ack([self.receipt])

    def nack(self, delay: Duration = "0 seconds") -> None:
        self.queue.nack([self.receipt], delay)

    def renew(self, visibility: Duration = "30 seconds") -> None:  # noqa: ARG002  (the name is the interface's)
        raise _renewal_not_supported(self.topic)


def _renewal_not_supported(topic: str) -> NotSupported:
    return NotSupported(
        f"A message of {topic!r} cannot be renewed: Kafka's Python client has no way to prolong a"
        " share group's lock.",
        fix="receive with a visibility that is long enough for the work.",
    )


class KafkaQueue(Queue):
    """A queue on a share group. Thread-safe; one thread fetches at a time."""

    def __init__(
        self,
        connection: Connection,
        log: Log,
        diverter: MisfitDiverter,
        topic: str,
        group: str,
        delivery_limit: int,
    ) -> None:
        if delivery_limit < 1:
            raise InputError(f"delivery_limit is {delivery_limit}.", fix="use 1 or more.")
        self._connection, self._log = connection, log
        self.topic, self.group = topic, check_name(group, what="group")
        self.delivery_limit = delivery_limit
        self._rows = RowReader(
            connection,
            diverter,
            connection.topics.info(topic),
            with_headers=True,
            follows_schema=True,
        )
        self._settings = ShareGroup(connection.admin, group, delivery_limit)
        self._receiver = os.urandom(6).hex()
        self._guard = RLock()
        self._clients: list[ShareClient] = []
        self._fetched: deque[KafkaMessage] = deque()

    # Receiving

    def receive(
        self,
        max_messages: int = 1,
        *,
        visibility: Duration = "30 seconds",
        wait: Duration = "0 seconds",
    ) -> Sequence[KafkaMessage]:
        visibility_us = to_us(visibility, what="visibility")
        deadline = time.monotonic() + to_us(wait, what="wait") / 1e6
        with self._guard:
            self._settings.set_visibility(visibility_us)
        while True:
            # The lock is taken anew for each short wait, so that other threads can settle messages.
            with self._guard:
                poll_until = self._fetch_more(max_messages, deadline, visibility_us / 1e6)
                deadline = max(deadline, poll_until)
                messages = self._take_fetched(max_messages)
            if messages or time.monotonic() >= deadline:
                return messages

    def _fetch_more(self, max_messages: int, deadline: float, visibility_seconds: float) -> float:
        """Fetch messages unless some are waiting already. Returns the time until which to try at
        least: a new client needs a moment to join the group.
        """
        now = time.monotonic()
        for client in self._clients:
            client.release_due(now)
        if self._fetched:
            return deadline
        client = self._free_client(max_messages)
        poll_until = time.monotonic() + JOIN_SECONDS if client.is_new else deadline
        client.is_new = False
        self._fetch(client, self._poll_seconds(max(deadline, poll_until)), visibility_seconds)
        return poll_until

    def _poll_seconds(self, deadline: float) -> float:
        """How long to wait for messages in one poll: at most until the next delayed release."""
        now = time.monotonic()
        releases = (client.next_release() for client in self._clients)
        until_release = [release - now for release in releases if release is not None]
        return max(min([deadline - now, MAX_POLL_SECONDS, *until_release]), MIN_POLL_SECONDS)

    def _take_fetched(self, max_messages: int) -> list[KafkaMessage]:
        """Messages that were fetched earlier and whose lease has not ended."""
        messages: list[KafkaMessage] = []
        while self._fetched and len(messages) < max_messages:
            message = self._fetched.popleft()
            if self._client_of((message.partition, message.offset)) is not None:
                messages.append(message)
        return messages

    def _free_client(self, size: int) -> ShareClient:
        """A client without leases that fetches `size` messages; a new one if there is none."""
        for client in [client for client in self._clients if not client.leases]:
            if client.size == size:
                return client
            self._clients.remove(client)
            client.close()
        if len(self._clients) >= MAX_CLIENTS:
            raise RetryError(
                f"{MAX_CLIENTS} receives from {self.topic!r} have unsettled messages.",
                fix="acknowledge or release what was received before receiving more.",
            )
        self._clients.append(
            ShareClient.open(self._connection.cluster, self.topic, self.group, size)
        )
        return self._clients[-1]

    def _client_of(self, record_id: RecordId) -> ShareClient | None:
        return next((client for client in self._clients if record_id in client.leases), None)

    def _fetch(self, client: ShareClient, seconds: float, visibility_seconds: float) -> None:
        """Fetch once. Control records and misfits, which are dead letters by then, are accepted;
        messages beyond the delivery limit become dead letters; the rest waits to be received.
        """
        arrived = client.fetch(seconds, visibility_seconds)
        by_partition: dict[int, list[FetchedMessage]] = {}
        for fetched in arrived:
            by_partition.setdefault(fetched.partition() or 0, []).append(fetched)
        deliveries = (
            {record_id: lease.deliveries for record_id, lease in client.leases.items()}
            if arrived
            else {}
        )
        messages = [
            self._message(row, deliveries)
            for records in by_partition.values()
            for row in self._rows.rows(records).to_pylist()
        ]
        rows = {(message.partition, message.offset) for message in messages}
        if no_rows := [record_id for record_id in deliveries if record_id not in rows]:
            client.settle(no_rows, AcknowledgeType.ACCEPT)
        if poison := [each for each in messages if each.deliveries > self.delivery_limit]:
            self._divert(client, poison)
        self._fetched.extend(each for each in messages if each.deliveries <= self.delivery_limit)

    def _message(self, row: dict[str, Any], deliveries: dict[RecordId, int]) -> KafkaMessage:
        partition, offset = row.pop(PARTITION_COLUMN), row.pop(OFFSET_COLUMN)
        timestamp = row.pop(TIMESTAMP_COLUMN)
        headers = [(entry["key"], entry["value"]) for entry in row.pop(HEADERS_COLUMN) or []]
        count = deliveries[partition, offset]
        return KafkaMessage(
            queue=self,
            topic=self.topic,
            partition=partition,
            offset=offset,
            timestamp=timestamp,
            deliveries=count,
            row=row,
            headers=headers,
            receipt=f"{partition}:{offset}:{count}:{self._receiver}",
        )

    def _divert(self, client: ShareClient, poison: Sequence[KafkaMessage]) -> None:
        """Write dead letters, then reject the messages: a crash between the two leaves a duplicate
        dead letter, but never loses one.
        """
        info = self._rows.info
        rows = [each.row for each in poison]
        texts = dead_letters.rows_to_json(
            to_batch(rows, info.arrow_schema, topic=self.topic, history=info.schema_history)
        )
        poisoned = [
            dead_letters.DeadLetter(
                place=f"queue {self.group}",
                reason=f"delivered {self.delivery_limit} times without being acknowledged",
                partition=message.partition,
                offset=message.offset,
                row=text,
            )
            for message, text in zip(poison, texts, strict=True)
        ]
        dead_letters.divert(self._log, self.topic, poisoned)
        client.settle([(each.partition, each.offset) for each in poison], AcknowledgeType.REJECT)

    # Settling

    def ack(self, receipts: Iterable[str]) -> None:
        with self._guard:
            for client, record_ids in self._leased(receipts):
                client.settle(record_ids, AcknowledgeType.ACCEPT)

    def nack(self, receipts: Iterable[str], delay: Duration = "0 seconds") -> None:
        seconds = to_us(delay, what="delay") / 1e6
        with self._guard:
            for client, record_ids in self._leased(receipts):
                if not seconds:
                    client.settle(record_ids, AcknowledgeType.RELEASE)
                    continue
                release_at = time.monotonic() + seconds
                if any(release_at > client.leases[record_id].until for record_id in record_ids):
                    raise NotSupported(
                        f"A message of {self.topic!r} cannot be given back with a delay of"
                        f" {seconds:g} seconds: its visibility ends before, and Kafka then delivers"
                        " it again.",
                        fix="use a shorter delay, or receive with a longer visibility.",
                    )
                for record_id in record_ids:
                    client.leases[record_id].release_at = release_at

    def renew(self, receipts: Iterable[str], visibility: Duration = "30 seconds") -> None:  # noqa: ARG002  (the names are the interface's)
        raise _renewal_not_supported(self.topic)

    def peek(self, max_messages: int = 10) -> Sequence[PeekedMessage]:  # noqa: ARG002
        raise self._not_shown("looked at", "read the topic with log.read(...)")

    def stats(self) -> Sequence[QueueStats]:
        raise self._not_shown(
            "counted", "use Kafka's own tool: kafka-share-groups.sh --describe --group NAME"
        )

    def purge(self) -> int:
        raise self._not_shown(
            "purged",
            "use Kafka's own tool: kafka-share-groups.sh --reset-offsets --to-latest --group NAME",
        )

    def _not_shown(self, what: str, fix: str) -> NotSupported:
        return NotSupported(
            f"The messages of group {self.group!r} in {self.topic!r} cannot be {what}: Kafka's"
            " Python client does not show share groups.",
            fix=f"{fix}.",
        )

    def _leased(self, receipts: Iterable[str]) -> list[tuple[ShareClient, list[RecordId]]]:
        """The messages of some receipts by the client that holds them. All receipts are checked
        before any message is settled.
        """
        now = time.monotonic()
        by_client: dict[int, tuple[ShareClient, list[RecordId]]] = {}
        for receipt in receipts:
            record_id, deliveries = self._parse_receipt(receipt)
            client = self._client_of(record_id)
            lease = client.leases[record_id] if client is not None else None
            if (
                client is None
                or lease is None
                or lease.deliveries != deliveries
                or lease.until <= now
                or lease.release_at is not None
            ):
                raise lease_lost(self.topic, [record_id])
            by_client.setdefault(id(client), (client, []))[1].append(record_id)
        return list(by_client.values())

    def _parse_receipt(self, receipt: str) -> tuple[RecordId, int]:
        """The message that a receipt is for, and its delivery count."""
        try:
            partition, offset, count, receiver = receipt.split(":")
            parsed = (int(partition), int(offset)), int(count)
        except ValueError:
            raise InputError(f"{receipt!r} is not a receipt.", fix="use message.receipt.") from None
        if receiver != self._receiver:
            raise NotSupported(
                "This receipt was given to another receiver. On Kafka a message can be settled only"
                " by the queue object that received it.",
                fix=(
                    "settle messages where they were received; they are delivered again when their"
                    " visibility ends."
                ),
            )
        return parsed

    def close(self) -> None:
        """Close all clients. Messages that were received and not settled are released at once."""
        with self._guard:
            self._fetched.clear()
            clients, self._clients = self._clients, []
            for client in clients:
                client.close()
