"""One client of a share group, and the messages it holds. A queue has several of these, since such a client cannot fetch while it holds anything unsettled."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from confluent_kafka import AcknowledgeType, IllegalStateException, KafkaError, KafkaException, Message, ShareConsumer

from headrace.errors import LeaseLost
from headrace.log.kafka.config import Cluster
from headrace.log.kafka.failures import doing

Spot = tuple[int, int]
"""A partition and an offset."""

SETTLE_SECONDS = 15.0
LEASE_OVER = {KafkaError.INVALID_RECORD_STATE, KafkaError.SHARE_SESSION_NOT_FOUND, KafkaError.UNKNOWN_MEMBER_ID, KafkaError.FENCED_STATE_EPOCH}


@dataclass
class Lease:
    """Until when a message is ours (by our clock), its how-manieth delivery it is, and when to give it back, if that has been asked for."""

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

    def fetch(self, seconds: float, visibility_seconds: float) -> list[Message]:
        """What comes in time. Kafka hands out whole batches as they were written, so it may be more than was asked for."""
        asked = time.monotonic()
        with doing(f"receive from {self.topic!r}"):
            arrived = [message for message in self._client.poll(seconds) if message.error() is None]
        if arrived:
            # Counted from before the fetch if it was quick: our clock may run out early, never late.
            until = max(asked, time.monotonic() - 1.0) + visibility_seconds
            self.leases = {spot_of(message): Lease(until, message.delivery_count() or 1) for message in arrived}
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
        due = [spot for spot, lease in self.leases.items() if lease.give_back_at is not None and lease.give_back_at <= now]
        if due:
            self._settle_quietly(due)

    def _settle_quietly(self, spots: Sequence[Spot]) -> None:
        try:
            self.settle(spots, AcknowledgeType.RELEASE)
        except LeaseLost:
            return

    def next_give_back(self) -> float | None:
        return min((lease.give_back_at for lease in self.leases.values() if lease.give_back_at is not None), default=None)

    def close(self) -> None:
        """What is still held goes back at once."""
        with doing(f"close the queue {self.topic!r}"):
            self._client.close()


def spot_of(message: Message) -> Spot:
    return message.partition() or 0, message.offset() or 0


def lost(topic: str, spots: Sequence[Spot]) -> LeaseLost:
    partition, offset = spots[0] if spots else (-1, -1)
    return LeaseLost(
        f"The message at {topic}[{partition}] offset {offset} is no longer leased under this receipt.",
        fix="it was settled already, or its visibility ran out and it was given to someone else; ask for more visibility.",
    )


def _raise_for(error: KafkaException, topic: str, spots: Sequence[Spot]) -> None:
    inner = error.args[0] if error.args else None
    if isinstance(inner, KafkaError) and inner.code() in LEASE_OVER:
        raise lost(topic, spots) from None
    with doing(f"settle messages of {topic!r}"):
        raise error
