"""Queues on Kafka: share groups, with what they lack built on top or refused by name.

- A negative acknowledgement with a delay holds the message here and gives it back when the delay is
  over; longer than its visibility is refused.
- Messages delivered too often go to dead letters here, before Kafka's own limit drops them in
  silence.
- Visibility is a setting of the group: the last one asked for counts for all its receivers, within
  the bounds that the brokers set.
- Refused: renewing (the client cannot ask for it), and receipts of another process (a lease belongs
  to the client that fetched).
- Kafka hands out whole batches as they were written. What is more than was asked for waits here for
  the next `receive`; its delivery counts from the fetch.
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
    KafkaException,
    ShareConsumer,
)
from confluent_kafka import Message as Fetched

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
from headrace.log.kafka.cluster import Broker
from headrace.log.kafka.config import Cluster
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.errors import doing
from headrace.log.kafka.reader import DeadLetters, RowReader
from headrace.log.rows import to_batch
from headrace.log.topic_config import check_name
from headrace.log.values import Duration

# The settings of a share group that a queue's promises rest on. Kafka keeps them per group, so they
# are set when a queue first receives.


VISIBILITY = "share.record.lock.duration.ms"
LIMIT = "share.delivery.count.limit"
PROMISES = {"share.auto.offset.reset": "earliest", "share.isolation.level": "read_committed"}
USUAL_MAX_DELIVERIES = 10  # what brokers allow unless told otherwise
APPLY_SECONDS = 10.0


class ShareGroup:
    """One group's settings, as one queue wants them."""

    def __init__(self, broker: Broker, group: str, delivery_limit: int) -> None:
        self._broker, self._group, self._limit = broker, group, delivery_limit
        self._visibility_ms: int | None = None

    def set_visibility(self, visibility_us: int) -> None:
        visibility_ms = visibility_us // 1000
        if visibility_ms == self._visibility_ms:
            return
        if self._visibility_ms is None:
            self._set_promises()
        self._set_lock(visibility_ms)
        self._visibility_ms = visibility_ms

    def _set_promises(self) -> None:
        """Kafka's own limit lies above ours: it drops a message in silence where we put it into
        dead letters.
        """
        try:
            self._broker.configure_group(
                self._group, PROMISES | {LIMIT: str(max(self._limit + 1, USUAL_MAX_DELIVERIES))}
            )
        except ConfigurationError as error:
            raise NotSupported(
                f"A delivery limit of {self._limit} needs {LIMIT}={self._limit + 1} on Kafka, which"
                f" the brokers refuse: {error.message}",
                fix=(
                    "lower delivery_limit, or raise group.share.max.delivery.count.limit on the"
                    " brokers."
                ),
            ) from error

    def _set_lock(self, visibility_ms: int) -> None:
        try:
            self._broker.configure_group(self._group, {VISIBILITY: str(visibility_ms)})
        except ConfigurationError as error:
            raise NotSupported(
                f"A visibility of {format_us(visibility_ms * 1000)} is outside of what the brokers"
                f" allow: {error.message}",
                fix=(
                    "choose another one, or change group.share.min.record.lock.duration.ms and"
                    " group.share.max.record.lock.duration.ms on the brokers."
                ),
            ) from error
        self._await_applied(str(visibility_ms))

    def _await_applied(self, value: str) -> None:
        """Brokers learn of a setting a moment later; a message fetched before would have the old
        visibility.
        """
        deadline = time.monotonic() + APPLY_SECONDS
        while self._broker.group_settings(self._group).get(VISIBILITY) != value:
            if time.monotonic() > deadline:
                raise RetryError(
                    f"The brokers have not taken over a setting of group {self._group!r}.",
                    fix="try again.",
                )
            time.sleep(0.02)


# One client of a share group, and the messages it holds. A queue has several of these, since such a
# client cannot fetch while it holds anything unsettled.


Spot = tuple[int, int]
"""A partition and an offset."""

SETTLE_SECONDS = 15.0
LEASE_OVER = {
    KafkaError.INVALID_RECORD_STATE,
    KafkaError.SHARE_SESSION_NOT_FOUND,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.FENCED_STATE_EPOCH,
}


@dataclass
class Lease:
    """Until when a message is ours (by our clock), its how-manieth delivery it is, and when to give
    it back, if that has been asked for.
    """

    until: float
    deliveries: int
    give_back_at: float | None = None


class Hand:
    """Holds what one fetch brought until all of it is settled. Not for several threads at once."""

    def __init__(self, cluster: Cluster, topic: str, group: str, size: int) -> None:
        self.topic, self.size = topic, size
        self.leases: dict[Spot, Lease] = {}
        self.is_fresh = True
        with doing(f"open the queue {topic!r} for group {group!r}"):
            self._client = ShareConsumer(cluster.sharer(group, size))
            self._client.subscribe([topic])

    def fetch(self, seconds: float, visibility_seconds: float) -> list[Fetched]:
        """What comes in time. Kafka hands out whole batches as they were written, so it may be more
        than was asked for.
        """
        asked = time.monotonic()
        with doing(f"receive from {self.topic!r}"):
            arrived = [message for message in self._client.poll(seconds) if message.error() is None]
        if arrived:
            # Counted from before the fetch if it was quick: our clock may run out early, never
            # late.
            until = max(asked, time.monotonic() - 1.0) + visibility_seconds
            self.leases = {
                spot_of(message): Lease(until, message.delivery_count() or 1) for message in arrived
            }
        return arrived

    def settle(self, spots: Iterable[Spot], how: AcknowledgeType) -> None:
        """Tell Kafka what became of messages. LeaseLost if it had taken one of them back."""
        chosen = [spot for spot in spots if spot in self.leases]
        try:
            for partition, offset in chosen:
                self._client.acknowledge_offset(self.topic, partition, offset, how)
        except IllegalStateException:
            raise lost(self.topic, chosen) from None
        finally:
            for spot in chosen:
                self.leases.pop(spot, None)
        with doing(f"settle messages of {self.topic!r}"):
            results = self._client.commit_sync(SETTLE_SECONDS)
        for error in results.values():
            if error is not None:
                _raise_for(error, self.topic, chosen)

    def drop_expired(self, now: float) -> None:
        """Forget what Kafka has taken back, so that this hand can fetch again."""
        expired = [spot for spot, lease in self.leases.items() if lease.until <= now]
        if expired:
            self._settle_quietly(expired)

    def give_back_due(self, now: float) -> None:
        due = [
            spot
            for spot, lease in self.leases.items()
            if lease.give_back_at is not None and lease.give_back_at <= now
        ]
        if due:
            self._settle_quietly(due)

    def _settle_quietly(self, spots: Sequence[Spot]) -> None:
        try:
            self.settle(spots, AcknowledgeType.RELEASE)
        except LeaseLost:
            return

    def next_give_back(self) -> float | None:
        return min(
            (
                lease.give_back_at
                for lease in self.leases.values()
                if lease.give_back_at is not None
            ),
            default=None,
        )

    def close(self) -> None:
        """What is still held goes back at once."""
        with doing(f"close the queue {self.topic!r}"):
            self._client.close()


def spot_of(message: Fetched) -> Spot:
    return message.partition() or 0, message.offset() or 0


def lost(topic: str, spots: Sequence[Spot]) -> LeaseLost:
    partition, offset = spots[0] if spots else (-1, -1)
    return LeaseLost(
        f"The message at {topic}[{partition}] offset {offset} is no longer leased under this"
        " receipt.",
        fix=(
            "it was settled already, or its visibility ran out and it was given to someone else;"
            " ask for more visibility."
        ),
    )


def _raise_for(error: KafkaException, topic: str, spots: Sequence[Spot]) -> None:
    inner = error.args[0] if error.args else None
    if isinstance(inner, KafkaError) and inner.code() in LEASE_OVER:
        raise lost(topic, spots) from None
    with doing(f"settle messages of {topic!r}"):
        raise error


MAX_HANDS = 16
MIN_WAIT_SECONDS = 0.1
LONGEST_POLL_SECONDS = 0.25
JOIN_SECONDS = 1.0


@dataclass
class KafkaMessage(Message):
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
        raise NotSupported(
            f"A message of {self.topic!r} cannot be renewed: Kafka's Python client has no way to"
            " prolong a share group's lock.",
            fix="receive with a visibility that is long enough for the work.",
        )


class KafkaQueue(Queue):
    """Safe for several threads; one fetches at a time."""

    def __init__(
        self,
        connection: Connection,
        log: Log,
        letters: DeadLetters,
        topic: str,
        group: str,
        delivery_limit: int,
    ) -> None:
        if delivery_limit < 1:
            raise InputError(f"delivery_limit is {delivery_limit}.", fix="use 1 or more.")
        self._connection, self._log, self.topic, self.group = (
            connection,
            log,
            topic,
            check_name(group, what="group"),
        )
        self.delivery_limit = delivery_limit
        self._rows = RowReader(
            connection, letters, connection.topics.info(topic), headers=True, follows=True
        )
        self._settings = ShareGroup(connection.broker, group, delivery_limit)
        self._receiver = os.urandom(6).hex()
        self._guard = RLock()
        self._hands: list[Hand] = []
        self._waiting: deque[KafkaMessage] = deque()

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
            with (
                self._guard
            ):  # taken anew for each short wait, so that others can settle what they hold
                deadline = max(
                    deadline, self._try_to_fetch(max_messages, deadline, visibility_us / 1e6)
                )
                ready = self._take_waiting(max_messages)
            if ready or time.monotonic() >= deadline:
                return ready

    def _try_to_fetch(self, most: int, deadline: float, visibility_seconds: float) -> float:
        """Have messages waiting, if some come soon. Returns until when to try at least: a new hand
        needs a moment to join the group.
        """
        self._keep_house()
        if self._waiting:
            return deadline
        hand = self._free_hand(most)
        joins_until = time.monotonic() + JOIN_SECONDS if hand.is_fresh else deadline
        hand.is_fresh = False
        self._fetch(hand, self._patience(max(deadline, joins_until)), visibility_seconds)
        return joins_until

    def _patience(self, deadline: float) -> float:
        """How long to wait for messages in one go: not beyond the moment when one that was given
        back with a delay is due.
        """
        now = time.monotonic()
        due = [
            when - now
            for when in (hand.next_give_back() for hand in self._hands)
            if when is not None
        ]
        return max(min([deadline - now, LONGEST_POLL_SECONDS, *due]), MIN_WAIT_SECONDS)

    def _take_waiting(self, most: int) -> list[KafkaMessage]:
        """What was fetched before, as long as it is still ours."""
        taken: list[KafkaMessage] = []
        while self._waiting and len(taken) < most:
            message = self._waiting.popleft()
            if self._hand_of((message.partition, message.offset)) is not None:
                taken.append(message)
        return taken

    def _keep_house(self) -> None:
        now = time.monotonic()
        for hand in self._hands:
            hand.drop_expired(now)
            hand.give_back_due(now)

    def _free_hand(self, size: int) -> Hand:
        """One that holds nothing and fetches as many as are asked for."""
        for hand in [hand for hand in self._hands if not hand.leases]:
            if hand.size == size:
                return hand
            self._hands.remove(hand)
            hand.close()
        if len(self._hands) >= MAX_HANDS:
            raise RetryError(
                f"{MAX_HANDS} receives from {self.topic!r} have unsettled messages.",
                fix="acknowledge or give back what was received before receiving more.",
            )
        self._hands.append(Hand(self._connection.cluster, self.topic, self.group, size))
        return self._hands[-1]

    def _hand_of(self, spot: Spot) -> Hand | None:
        return next((hand for hand in self._hands if spot in hand.leases), None)

    def _fetch(self, hand: Hand, seconds: float, visibility_seconds: float) -> None:
        arrived = hand.fetch(seconds, visibility_seconds)
        by_partition: dict[int, list[Fetched]] = {}
        for message in arrived:
            by_partition.setdefault(message.partition() or 0, []).append(message)
        deliveries = (
            {spot: lease.deliveries for spot, lease in hand.leases.items()} if arrived else {}
        )
        messages = [
            self._message(row, deliveries)
            for part in by_partition.values()
            for row in self._rows.rows(part).to_pylist()
        ]
        rows = {(message.partition, message.offset) for message in messages}
        no_rows = [spot for spot in deliveries if spot not in rows]
        if no_rows:  # control records, and misfits, which are in the dead letters now
            hand.settle(no_rows, AcknowledgeType.ACCEPT)
        poison = [message for message in messages if message.deliveries > self.delivery_limit]
        if poison:
            self._bury(hand, poison)
        self._waiting.extend(
            message for message in messages if message.deliveries <= self.delivery_limit
        )

    def _message(self, row: dict[str, Any], deliveries: dict[Spot, int]) -> KafkaMessage:
        partition, offset, timestamp = (
            row.pop(PARTITION_COLUMN),
            row.pop(OFFSET_COLUMN),
            row.pop(TIMESTAMP_COLUMN),
        )
        headers = [(entry["key"], entry["value"]) for entry in row.pop(HEADERS_COLUMN) or []]
        count = deliveries[partition, offset]
        receipt = f"{partition}:{offset}:{count}:{self._receiver}"
        return KafkaMessage(
            self, self.topic, partition, offset, timestamp, count, row, headers, receipt
        )

    def _bury(self, hand: Hand, poison: Sequence[KafkaMessage]) -> None:
        """Dead letters first, then the rejection: after a crash between the two, the letter may be
        there twice, but never not at all.
        """
        place, reason = (
            f"queue {self.group}",
            f"delivered {self.delivery_limit} times without being acknowledged",
        )
        texts = dead_letters.rows_to_json(
            to_batch([each.row for each in poison], self._rows.info.arrow_schema, topic=self.topic)
        )
        letters = [
            dead_letters.DeadLetter(
                place=place, reason=reason, partition=each.partition, offset=each.offset, row=text
            )
            for each, text in zip(poison, texts, strict=True)
        ]
        dead_letters.divert(self._log, self.topic, letters)
        hand.settle([(each.partition, each.offset) for each in poison], AcknowledgeType.REJECT)

    # Settling

    def ack(self, receipts: Iterable[str]) -> None:
        with self._guard:
            for hand, spots in self._held(receipts):
                hand.settle(spots, AcknowledgeType.ACCEPT)

    def nack(self, receipts: Iterable[str], delay: Duration = "0 seconds") -> None:
        seconds = to_us(delay, what="delay") / 1e6
        with self._guard:
            for hand, spots in self._held(receipts):
                if seconds:
                    self._delay(hand, spots, seconds)
                else:
                    hand.settle(spots, AcknowledgeType.RELEASE)

    def _delay(self, hand: Hand, spots: Sequence[Spot], seconds: float) -> None:
        when = time.monotonic() + seconds
        for spot in spots:
            if when > hand.leases[spot].until:
                raise NotSupported(
                    f"A message of {self.topic!r} cannot be given back with a delay of {seconds:g}"
                    " seconds: Kafka takes it back before, when its visibility ends.",
                    fix="use a shorter delay, or receive with a longer visibility.",
                )
        for spot in spots:
            hand.leases[spot].give_back_at = when

    def _held(self, receipts: Iterable[str]) -> list[tuple[Hand, list[Spot]]]:
        """Receipts by the hand that holds the messages. All of them are checked before any is
        settled.
        """
        now = time.monotonic()
        held: dict[int, tuple[Hand, list[Spot]]] = {}
        for receipt in receipts:
            spot, deliveries = self._parsed(receipt)
            hand = self._hand_of(spot)
            lease = hand.leases[spot] if hand is not None else None
            if (
                hand is None
                or lease is None
                or lease.deliveries != deliveries
                or lease.until <= now
                or lease.give_back_at is not None
            ):
                raise lost(self.topic, [spot])
            held.setdefault(id(hand), (hand, []))[1].append(spot)
        return list(held.values())

    def _parsed(self, receipt: str) -> tuple[Spot, int]:
        """Which message a receipt is for, and which of its deliveries."""
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
                    "settle messages where they were received; they come back when their visibility"
                    " ends."
                ),
            )
        return parsed

    def close(self) -> None:
        """What was received and not settled goes back to the queue at once."""
        with self._guard:
            self._waiting.clear()
            hands, self._hands = self._hands, []
            for hand in hands:
                hand.close()
