"""What everything that one `KafkaLog` opens has in common: the cluster, its topics and notes, and one producer for plain appends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from confluent_kafka import Consumer, Producer

from headrace.errors import MemberFenced
from headrace.log.kafka.cluster import Broker
from headrace.log.kafka.config import DEFAULT_MAX_BYTES, parse_address
from headrace.log.kafka.failures import doing
from headrace.log.kafka.group_admin import group_owners
from headrace.log.kafka.notes import Notes
from headrace.log.kafka.sending import FLUSH_SECONDS
from headrace.log.kafka.topics import TopicStore

VISIBLE_SECONDS = 5.0


class Connection:
    """Shared by threads."""

    def __init__(self, address: str, options: Mapping[str, Any]) -> None:
        self.cluster = parse_address(address, options)
        self.broker = Broker(self.cluster)
        self.broker.check_reachable()
        with doing("open a producer"):
            self.plain = Producer(self.cluster.producer())
        self.topics = TopicStore(self.broker, self.plain)
        self.notes = Notes(self.broker)
        self.max_bytes = int(self.cluster.options.get("message.max.bytes", DEFAULT_MAX_BYTES))

    def close(self) -> None:
        self.broker.fetchers.close()
        self.plain.flush(FLUSH_SECONDS)
        self.plain.close()

    def outsider(self, group: str, positions: Mapping[str, Mapping[int, int]]) -> Any:
        """What Kafka wants to know of a group whose offsets are committed by somebody who is not a member; trusted when nobody reads."""
        for topic, partition, member in group_owners(self.broker, group):
            if partition in positions.get(topic, {}):
                raise MemberFenced(
                    f"{topic}[{partition}] is read by the member {member!r} of group {group!r}.", fix="commit the positions() of that consumer."
                )
        consumer = Consumer(self.cluster.reader() | {"group.id": group})
        try:
            return consumer.consumer_group_metadata()
        finally:
            consumer.close()

    def await_visible(self, ranges: Mapping[str, Mapping[int, Any]]) -> None:
        """Wait until committed rows can be read: Kafka answers a commit before its markers are written.

        Bounded: another transaction that is open may keep readers from seeing ours for a while. It is committed nevertheless.
        """
        targets = {(topic, partition): span.stop for topic, spans in ranges.items() for partition, span in spans.items()}
        self.broker.await_ends(targets, VISIBLE_SECONDS)
