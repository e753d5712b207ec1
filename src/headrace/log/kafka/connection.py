"""What everything that one `KafkaLog` opens has in common: the admin client, the topics, the notes,
and one producer for appends that need no transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from confluent_kafka import Consumer, Producer

from headrace.errors import MemberFenced
from headrace.log.kafka.cluster import ClusterAdmin
from headrace.log.kafka.config import DEFAULT_MAX_BYTES, parse_address
from headrace.log.kafka.errors import translate_errors
from headrace.log.kafka.notes import Notes
from headrace.log.kafka.sender import FLUSH_SECONDS
from headrace.log.kafka.topics import TopicStore

VISIBLE_SECONDS = 5.0


class Connection:
    """The clients that a log shares between threads."""

    def __init__(self, admin: ClusterAdmin, producer: Producer) -> None:
        self.cluster = admin.cluster
        self.admin = admin
        self.producer = producer
        self.topics = TopicStore(admin, producer)
        self.notes = Notes(admin)
        self.max_bytes = int(self.cluster.options.get("message.max.bytes", DEFAULT_MAX_BYTES))

    @classmethod
    def connect(cls, address: str, options: Mapping[str, Any]) -> Connection:
        """Connect to a cluster. LogUnavailable if no broker responds."""
        admin = ClusterAdmin.connect(parse_address(address, options))
        with translate_errors("open a producer"):
            producer = Producer(admin.cluster.producer())
        return cls(admin, producer)

    def close(self) -> None:
        self.admin.fetchers.close()
        self.producer.flush(FLUSH_SECONDS)
        self.producer.close()

    def outside_group_metadata(self, group: str, positions: Mapping[str, Mapping[int, int]]) -> Any:
        """The group metadata for a transaction that commits offsets of a group without being a
        member. MemberFenced if a member is assigned one of the partitions.
        """
        for topic, partition, member in self.admin.group_owners(group):
            if partition in positions.get(topic, {}):
                raise MemberFenced(
                    f"{topic}[{partition}] is read by the member {member!r} of group {group!r}.",
                    fix="commit the positions() of that consumer.",
                )
        consumer = Consumer(self.cluster.reader() | {"group.id": group})
        try:
            return consumer.consumer_group_metadata()
        finally:
            consumer.close()

    def await_visible(self, ranges: Mapping[str, Mapping[int, Any]]) -> None:
        """Wait until committed rows can be read: Kafka responds to a commit before its transaction
        markers are written.

        The wait is bounded, because another open transaction may hold readers back for a while. The
        rows are committed nevertheless.
        """
        targets = {
            (topic, partition): offsets.stop
            for topic, partitions in ranges.items()
            for partition, offsets in partitions.items()
        }
        self.admin.await_ends(targets, VISIBLE_SECONDS)
