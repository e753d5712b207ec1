"""What the cluster knows about groups: who is in them, what they committed. Questions and answers only; `groups.py` makes sense of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException, TopicPartition
from confluent_kafka.admin._group import ConsumerGroupDescription

from headrace.errors import MemberFenced
from headrace.log.kafka.cluster import ANSWER_SECONDS, Broker
from headrace.log.kafka.failures import LOST_MEMBERSHIP, NO_GROUP, code, doing

Offsets = dict[str, dict[int, int]]


def consumer_groups(broker: Broker) -> list[str]:
    with doing("list the groups"):
        listed = broker.admin.list_consumer_groups(request_timeout=ANSWER_SECONDS).result()
    return sorted(listing.group_id for listing in listed.valid or [])


def share_groups(broker: Broker) -> list[str]:
    """Groups of queues. The client lists them by the old call only, as groups it has no other word for."""
    with doing("list the groups"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        everything = {str(group.id) for group in broker.admin.list_groups(timeout=ANSWER_SECONDS)}
    return sorted(everything - set(consumer_groups(broker)))


def describe(broker: Broker, group: str) -> ConsumerGroupDescription | None:
    try:
        described: ConsumerGroupDescription = broker.admin.describe_consumer_groups([group], request_timeout=ANSWER_SECONDS)[group].result()
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
    return [(place.topic, place.partition, member.member_id) for member in members for place in member.assignment.topic_partitions]


def committed_offsets(broker: Broker, groups: Iterable[str]) -> dict[str, Offsets]:
    """What each group committed, asked for at once. Offsets of a transaction that is just being committed are waited for."""
    asked = {
        group: broker.admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)], require_stable=True, request_timeout=ANSWER_SECONDS)[
            group
        ]
        for group in groups
    }
    return {group: _offsets(group, future) for group, future in asked.items()}


def _offsets(group: str, future: object) -> Offsets:
    try:
        answer = future.result()  # type: ignore[attr-defined]
    except KafkaException as error:
        if code(error) in NO_GROUP:
            return {}
        with doing(f"read the offsets of group {group!r}"):
            raise
    offsets: Offsets = {}
    for place in answer.topic_partitions:
        if place.offset >= 0:
            offsets.setdefault(place.topic, {})[place.partition] = place.offset
    return offsets


def alter_offsets(broker: Broker, group: str, topic: str, offsets: Mapping[int, int]) -> None:
    """Set what a group committed. Refused while it has members."""
    places = [TopicPartition(topic, partition, offset) for partition, offset in offsets.items()]
    in_use = MemberFenced(f"The group {group!r} is being read with, so it cannot be moved.", fix="stop its consumers, then reset it.")
    with doing(f"reset the group {group!r}"):
        try:
            answer = broker.admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, places)], request_timeout=ANSWER_SECONDS)[
                group
            ].result()
        except KafkaException as error:
            if code(error) in LOST_MEMBERSHIP:
                raise in_use from None
            raise
        for place in answer.topic_partitions:
            if place.error is not None:
                if place.error.code() in LOST_MEMBERSHIP:
                    raise in_use
                raise KafkaException(place.error)
