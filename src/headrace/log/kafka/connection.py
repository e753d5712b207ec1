"""What everything that one `KafkaLog` opens has in common: the cluster, its topics and notes, and
one producer for plain appends.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin._group import ConsumerGroupDescription

from headrace.errors import MemberFenced
from headrace.log.kafka.cluster import ANSWER_SECONDS, Broker
from headrace.log.kafka.config import DEFAULT_MAX_BYTES, parse_address
from headrace.log.kafka.errors import LOST_MEMBERSHIP, NO_GROUP, code, doing, translated
from headrace.log.kafka.notes import Notes
from headrace.log.kafka.sender import FLUSH_SECONDS
from headrace.log.kafka.topics import TopicStore

# What the cluster knows about groups: who is in them, what they committed. Questions and answers
# only; `groups.py` makes sense of them.


Offsets = dict[str, dict[int, int]]


def consumer_groups(broker: Broker) -> list[str]:
    with doing("list the groups"):
        listed = broker.admin.list_consumer_groups(request_timeout=ANSWER_SECONDS).result()
    return sorted(listing.group_id for listing in listed.valid or [])


def share_groups(broker: Broker) -> list[str]:
    """Groups of queues. The client lists them by the old call only, as groups it has no other word
    for.
    """
    with doing("list the groups"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        everything = {str(group.id) for group in broker.admin.list_groups(timeout=ANSWER_SECONDS)}
    return sorted(everything - set(consumer_groups(broker)))


def describe(broker: Broker, group: str) -> ConsumerGroupDescription | None:
    try:
        described: ConsumerGroupDescription = broker.admin.describe_consumer_groups(
            [group], request_timeout=ANSWER_SECONDS
        )[group].result()
    except KafkaException as error:
        if code(error) in NO_GROUP:
            return None
        with doing(f"describe the group {group!r}"):
            raise
    return described


def group_owners(broker: Broker, group: str) -> list[tuple[str, int, str]]:
    """Topic, partition and member of everything that is being read in a group."""
    described = describe(broker, group)
    members = described.members if described else []
    return [
        (place.topic, place.partition, member.member_id)
        for member in members
        for place in member.assignment.topic_partitions
    ]


def committed_offsets(broker: Broker, groups: Iterable[str]) -> dict[str, Offsets]:
    """What each group committed, asked for at once. Offsets of a transaction that is just being
    committed are waited for.
    """
    asked = {group: _ask(broker, group, None) for group in groups}
    return {
        group: _by_topic(_answer(broker, group, None, future)) for group, future in asked.items()
    }


def await_committed(broker: Broker, group: str, positions: Mapping[str, Mapping[int, int]]) -> None:
    """Wait until offsets that a transaction committed can be read. While they are pending, they are
    known only to who asks for them by name.
    """
    places = [
        TopicPartition(topic, partition)
        for topic, offsets in positions.items()
        for partition in offsets
    ]
    if places:
        _answer(broker, group, places, _ask(broker, group, places))


def _ask(broker: Broker, group: str, places: list[TopicPartition] | None) -> Future[Any]:
    request = [ConsumerGroupTopicPartitions(group, places)]
    asked: Future[Any] = broker.admin.list_consumer_group_offsets(
        request, require_stable=True, request_timeout=ANSWER_SECONDS
    )[group]
    return asked


def _answer(
    broker: Broker, group: str, places: list[TopicPartition] | None, asked: Future[Any]
) -> list[TopicPartition]:
    """The answer, once nothing is pending any more."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            found: list[TopicPartition] = asked.result().topic_partitions
        except KafkaException as error:
            if code(error) in NO_GROUP:
                return []
            raise translated(error, f"read the offsets of group {group!r}") from error
        if not any(is_pending(place) for place in found) or time.monotonic() > deadline:
            return found
        time.sleep(0.005)
        asked = _ask(broker, group, places)


def is_pending(place: TopicPartition) -> bool:
    """Whether a transaction that is being committed is about to change an offset."""
    return place.error is not None and place.error.code() == KafkaError.UNSTABLE_OFFSET_COMMIT


def _by_topic(places: Iterable[TopicPartition]) -> Offsets:
    offsets: Offsets = {}
    for place in places:
        if place.offset >= 0:
            offsets.setdefault(place.topic, {})[place.partition] = place.offset
    return offsets


def alter_offsets(broker: Broker, group: str, topic: str, offsets: Mapping[int, int]) -> None:
    """Set what a group committed. Refused while it has members."""
    places = [TopicPartition(topic, partition, offset) for partition, offset in offsets.items()]
    in_use = MemberFenced(
        f"The group {group!r} is being read with, so it cannot be moved.",
        fix="stop its consumers, then reset it.",
    )
    with doing(f"reset the group {group!r}"):
        try:
            answer = broker.admin.alter_consumer_group_offsets(
                [ConsumerGroupTopicPartitions(group, places)], request_timeout=ANSWER_SECONDS
            )[group].result()
        except KafkaException as error:
            if code(error) in LOST_MEMBERSHIP:
                raise in_use from None
            raise
        for place in answer.topic_partitions:
            if place.error is not None:
                if place.error.code() in LOST_MEMBERSHIP:
                    raise in_use
                raise KafkaException(place.error)


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
        """What Kafka wants to know of a group whose offsets are committed by somebody who is not a
        member; trusted when nobody reads.
        """
        for topic, partition, member in group_owners(self.broker, group):
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
        """Wait until committed rows can be read: Kafka answers a commit before its markers are
        written.

        Bounded: another transaction that is open may keep readers from seeing ours for a while. It
        is committed nevertheless.
        """
        targets = {
            (topic, partition): span.stop
            for topic, spans in ranges.items()
            for partition, span in spans.items()
        }
        self.broker.await_ends(targets, VISIBLE_SECONDS)
