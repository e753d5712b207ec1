"""The admin client of a Kafka cluster: topics and their settings, offsets of partitions, and what
the cluster knows about groups. `groups` computes lag and resets from it.
"""

# mypy: disable-error-code="attr-defined, no-untyped-call"
# (confluent_kafka.admin declares neither its public names nor the types of its offset
# specifications.)

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)
from confluent_kafka.admin._group import ConsumerGroupDescription

from headrace.errors import ConfigurationError, LogUnavailable, MemberFenced, RetryError
from headrace.log.kafka.config import ClusterConfig
from headrace.log.kafka.errors import (
    LEADER_MOVES,
    LOST_MEMBERSHIP,
    NO_GROUP,
    NO_TOPIC,
    NOT_READABLE,
    PERMANENT,
    cause,
    error_code,
    translate_error,
    translate_errors,
)
from headrace.log.kafka.fetcher import FetcherPool

RESPONSE_SECONDS = 15.0
SETTLE_SECONDS = 15.0
POLL_SECONDS = 0.005
PERMANENT_ERROR_SECONDS = 2.0

PartitionId = tuple[str, int]
"""A topic and the number of one of its partitions."""
GroupOffsets = dict[str, dict[int, int]]
"""The committed offsets of a group, by topic and partition."""


class ClusterAdmin:
    """Requests to a cluster's brokers, and the pool of fetchers. Thread-safe."""

    def __init__(self, cluster: ClusterConfig, client: AdminClient) -> None:
        self.cluster = cluster
        self.fetchers = FetcherPool(cluster)
        self._client = client

    @classmethod
    def connect(cls, cluster: ClusterConfig) -> ClusterAdmin:
        """Wait until a broker responds. LogUnavailable after some seconds, sooner if the client
        reports an error that will not go away by itself.
        """
        reported_errors: list[KafkaError] = []
        try:
            client = AdminClient(cluster.admin() | {"error_cb": reported_errors.append})
        except KafkaException as error:
            raise ConfigurationError(
                f"The options of the Kafka log are not valid: {cause(error).str()}.",
                fix="correct or remove the option.",
            ) from None
        begun = time.monotonic()
        while True:
            try:
                client.list_topics("__consumer_offsets", timeout=1.0)
            except KafkaException as error:
                client.poll(0)
                waited = time.monotonic() - begun
                is_permanent = any(each.code() in PERMANENT for each in reported_errors)
                if waited > RESPONSE_SECONDS or (waited > PERMANENT_ERROR_SECONDS and is_permanent):
                    specific = (
                        each.str()
                        for each in reported_errors
                        if each.code() != KafkaError._ALL_BROKERS_DOWN  # noqa: SLF001
                    )
                    raise LogUnavailable(
                        f"No Kafka broker answers at {cluster.bootstrap}:"
                        f" {next(specific, cause(error).str())}",
                        fix="check the address, that the broker runs, and the security options.",
                    ) from None
            else:
                return cls(cluster, client)

    # Topics

    def partition_counts(self) -> dict[str, int]:
        """The number of partitions of every topic of the cluster."""
        with translate_errors("list the topics"):
            topics = self._client.list_topics(timeout=RESPONSE_SECONDS).topics
        return {
            name: len(topic.partitions) for name, topic in topics.items() if topic.error is None
        }

    def partitions(self, topic: str) -> int | None:
        """A topic's number of partitions, once all of them have a leader; None if there is no such
        topic.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            with translate_errors(f"look up the topic {topic!r}"):
                metadata = self._client.list_topics(topic, timeout=RESPONSE_SECONDS).topics[topic]
            if metadata.error is not None and metadata.error.code() in NO_TOPIC:
                return None
            if metadata.error is None and all(
                partition.leader >= 0 for partition in metadata.partitions.values()
            ):
                return len(metadata.partitions)
            if time.monotonic() > deadline:
                raise RetryError(
                    f"The topic {topic!r} has a partition without a leader.",
                    fix="check that all brokers are up.",
                )
            time.sleep(0.05)

    def topic_id_and_settings(self, topic: str) -> tuple[str | None, dict[str, str]]:
        """The id of a topic and its settings, requested at once; see `topic_id` and
        `topic_settings`.
        """
        request = self._request_topic(topic)
        settings = self.topic_settings([topic]).get(topic, {})
        return self._await_topic_id(topic, request), settings

    def topic_id(self, topic: str) -> str | None:
        """The id that Kafka gave a topic when it was created; None if there is no such topic."""
        return self._await_topic_id(topic, self._request_topic(topic))

    def _request_topic(self, topic: str) -> Future[Any]:
        request: Future[Any] = self._client.describe_topics(
            TopicCollection([topic]), request_timeout=RESPONSE_SECONDS
        )[topic]
        return request

    def _await_topic_id(self, topic: str, request: Future[Any]) -> str | None:
        try:
            description = request.result()
        except KafkaException as error:
            if error_code(error) in NO_TOPIC:
                return None
            raise translate_error(error, f"describe the topic {topic!r}") from error
        return str(description.topic_id)

    def create(self, topic: str, partitions: int, config: Mapping[str, str]) -> None:
        """Create a topic and wait until it can be used. Raises KafkaException
        (TOPIC_ALREADY_EXISTS) if it exists.
        """
        new_topic = NewTopic(
            topic, num_partitions=partitions, replication_factor=-1, config=dict(config)
        )
        self._client.create_topics([new_topic], operation_timeout=RESPONSE_SECONDS)[topic].result()
        self._await_count(topic, partitions)

    def add_partitions(self, topic: str, partitions: int) -> None:
        with translate_errors(f"add partitions to the topic {topic!r}"):
            self._client.create_partitions(
                [NewPartitions(topic, partitions)], operation_timeout=RESPONSE_SECONDS
            )[topic].result()
        self._await_count(topic, partitions)

    def delete(self, topic: str) -> None:
        with translate_errors(f"delete the topic {topic!r}"):
            self._client.delete_topics([topic], operation_timeout=RESPONSE_SECONDS)[topic].result()
        self._await_count(topic, None)

    def _await_count(self, topic: str, partitions: int | None) -> None:
        deadline = time.monotonic() + SETTLE_SECONDS
        while self.partitions(topic) != partitions:
            if time.monotonic() > deadline:
                raise RetryError(
                    f"The brokers have not yet applied a change of the topic {topic!r}.",
                    fix="try again in a moment.",
                )
            time.sleep(0.02)

    # Settings

    def configure_topic(self, topic: str, config: Mapping[str, str]) -> None:
        self._configure(ResourceType.TOPIC, topic, config)

    def topic_settings(self, topics: Iterable[str]) -> dict[str, dict[str, str]]:
        """The settings of topics, as the brokers have them. Topics whose settings this user may not
        see are left out.
        """
        resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
        settings: dict[str, dict[str, str]] = {}
        if not resources:
            return settings
        with translate_errors("read the settings of topics"):
            requests = self._client.describe_configs(resources, request_timeout=RESPONSE_SECONDS)
            for resource, request in requests.items():
                try:
                    entries = request.result()
                except KafkaException as error:
                    if error_code(error) in NOT_READABLE:
                        continue
                    raise
                settings[resource.name] = {name: entry.value for name, entry in entries.items()}
        return settings

    def configure_group(self, group: str, config: Mapping[str, str]) -> None:
        self._configure(ResourceType.GROUP, group, config)

    def _configure(self, kind: ResourceType, name: str, config: Mapping[str, str]) -> None:
        """Change some settings and leave the others as they are."""
        entries = [
            ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
            for key, value in config.items()
        ]
        resource = ConfigResource(kind, name, incremental_configs=entries)
        with translate_errors(f"change the settings of {name!r}"):
            for future in self._client.incremental_alter_configs([resource]).values():
                future.result()

    def group_settings(self, group: str) -> dict[str, str]:
        with translate_errors(f"read the settings of {group!r}"):
            (future,) = self._client.describe_configs(
                [ConfigResource(ResourceType.GROUP, group)]
            ).values()
            return {key: entry.value for key, entry in future.result().items()}

    # Offsets of partitions

    def start_offsets(self, partitions: Iterable[PartitionId]) -> dict[PartitionId, int]:
        return self._list_offsets({partition: OffsetSpec.earliest() for partition in partitions})

    def end_offsets(self, partitions: Iterable[PartitionId]) -> dict[PartitionId, int]:
        """The end of the committed records (Kafka's last stable offset): the offset after the last
        record before any open transaction.
        """
        return self._list_offsets({partition: OffsetSpec.latest() for partition in partitions})

    def high_watermarks(self, partitions: Iterable[PartitionId]) -> dict[PartitionId, int]:
        """The end of all records, those of open transactions included."""
        return self._list_offsets(
            {partition: OffsetSpec.latest() for partition in partitions},
            IsolationLevel.READ_UNCOMMITTED,
        )

    def offsets_for_time(
        self, partitions: Iterable[PartitionId], time_ms: int
    ) -> dict[PartitionId, int]:
        """The first offset at or after a time; -1 if there is none."""
        return self._list_offsets(
            {partition: OffsetSpec.for_timestamp(time_ms) for partition in partitions}
        )

    def _list_offsets(
        self,
        specs: Mapping[PartitionId, Any],
        isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
    ) -> dict[PartitionId, int]:
        if not specs:
            return {}
        request = {TopicPartition(*partition): spec for partition, spec in specs.items()}
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            responses = self._client.list_offsets(
                request, isolation_level=isolation, request_timeout=RESPONSE_SECONDS
            )
            try:
                return {
                    (partition.topic, partition.partition): future.result().offset
                    for partition, future in responses.items()
                }
            except KafkaException as error:
                # A newly elected leader may not know yet that it is one.
                if error_code(error) not in LEADER_MOVES or time.monotonic() > deadline:
                    raise translate_error(error, "look up offsets") from error
                time.sleep(0.05)

    def known_offsets(
        self, partitions: Iterable[PartitionId]
    ) -> tuple[dict[PartitionId, int], dict[PartitionId, int]]:
        """The start and end offsets of partitions, requested at once. A partition without a leader,
        or of a topic that was deleted meanwhile, is left out: others are not held up by it.
        """
        listed = [TopicPartition(*partition) for partition in partitions]
        offsets: tuple[dict[PartitionId, int], dict[PartitionId, int]] = ({}, {})
        if not listed:
            return offsets
        with translate_errors("look up offsets"):
            requests = [
                self._client.list_offsets(
                    dict.fromkeys(listed, spec),
                    isolation_level=IsolationLevel.READ_COMMITTED,
                    request_timeout=RESPONSE_SECONDS,
                )
                for spec in (OffsetSpec.earliest(), OffsetSpec.latest())
            ]
        for found, responses in zip(offsets, requests, strict=True):
            for partition, future in responses.items():
                try:
                    found[partition.topic, partition.partition] = future.result().offset
                except KafkaException:
                    continue
        return offsets

    def delete_records(self, topic: str, offsets: Mapping[int, int]) -> None:
        """Delete the records of a topic before an offset of each partition."""
        partitions = [
            TopicPartition(topic, partition, offset) for partition, offset in offsets.items()
        ]
        with translate_errors(f"delete records of {topic!r}"):
            for future in self._client.delete_records(
                partitions, request_timeout=RESPONSE_SECONDS
            ).values():
                future.result()

    def await_ends(self, targets: Mapping[PartitionId, int], seconds: float) -> bool:
        """Wait until the committed records reach these offsets. False if another open transaction
        holds them back for longer.
        """
        deadline = time.monotonic() + seconds
        waiting = dict(targets)
        while waiting:
            ends = self.end_offsets(waiting)
            waiting = {
                partition: target
                for partition, target in waiting.items()
                if ends[partition] < target
            }
            if waiting and time.monotonic() > deadline:
                return False
            if waiting:
                time.sleep(POLL_SECONDS)
        return True

    # Groups

    def consumer_groups(self) -> list[str]:
        with translate_errors("list the groups"):
            listed = self._client.list_consumer_groups(request_timeout=RESPONSE_SECONDS).result()
        return sorted(listing.group_id for listing in listed.valid or [])

    def share_groups(self) -> list[str]:
        """The share groups, which queues use. The client lists them only by its deprecated call,
        without their type: they are the groups that are not consumer groups.
        """
        with translate_errors("list the groups"), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            groups = {str(group.id) for group in self._client.list_groups(timeout=RESPONSE_SECONDS)}
        return sorted(groups - set(self.consumer_groups()))

    def describe_group(self, group: str) -> ConsumerGroupDescription | None:
        try:
            description: ConsumerGroupDescription = self._client.describe_consumer_groups(
                [group], request_timeout=RESPONSE_SECONDS
            )[group].result()
        except KafkaException as error:
            if error_code(error) in NO_GROUP:
                return None
            raise translate_error(error, f"describe the group {group!r}") from error
        return description

    def group_owners(self, group: str) -> list[tuple[str, int, str]]:
        """The topic, partition and member id of everything that members of a group are assigned."""
        description = self.describe_group(group)
        return [
            (assigned.topic, assigned.partition, member.member_id)
            for member in (description.members if description else [])
            for assigned in member.assignment.topic_partitions
        ]

    def committed_offsets(self, groups: Iterable[str]) -> dict[str, GroupOffsets]:
        """The committed offsets of each group, requested at once. Waits for transactions that are
        just committing offsets.
        """
        requests = {group: self._request_committed(group, None) for group in groups}
        offsets: dict[str, GroupOffsets] = {}
        for group, request in requests.items():
            offsets[group] = {}
            for committed in self._await_stable(group, None, request):
                if committed.offset >= 0:
                    topic = offsets[group].setdefault(committed.topic, {})
                    topic[committed.partition] = committed.offset
        return offsets

    def stable_offsets(
        self, group: str, partitions: Iterable[PartitionId]
    ) -> dict[PartitionId, int]:
        """The committed offsets of those partitions for which no transaction is committing offsets
        now; -1 where there is none.
        """
        ids = list(partitions)
        request = self._request_committed(group, [TopicPartition(*each) for each in ids])
        try:
            committed: list[TopicPartition] = request.result().topic_partitions
        except KafkaException as error:
            if error_code(error) in NO_GROUP:
                return dict.fromkeys(ids, -1)
            raise translate_error(error, f"read the offsets of group {group!r}") from error
        for each in committed:
            if each.error is not None and not is_pending(each):
                raise translate_error(
                    KafkaException(each.error), f"read the offsets of group {group!r}"
                )
        return {
            (each.topic, each.partition): max(each.offset, -1)
            for each in committed
            if not is_pending(each)
        }

    def await_committed(self, group: str, positions: Mapping[str, Mapping[int, int]]) -> None:
        """Wait until offsets that a transaction committed can be read. While they are pending, only
        a request that names the partitions shows them.
        """
        partitions = [
            TopicPartition(topic, partition)
            for topic, offsets in positions.items()
            for partition in offsets
        ]
        if partitions:
            self._await_stable(group, partitions, self._request_committed(group, partitions))

    def _request_committed(
        self, group: str, partitions: list[TopicPartition] | None
    ) -> Future[Any]:
        request: Future[Any] = self._client.list_consumer_group_offsets(
            [ConsumerGroupTopicPartitions(group, partitions)],
            require_stable=True,
            request_timeout=RESPONSE_SECONDS,
        )[group]
        return request

    def _await_stable(
        self, group: str, partitions: list[TopicPartition] | None, request: Future[Any]
    ) -> list[TopicPartition]:
        """The committed offsets, once none of them is pending."""
        deadline = time.monotonic() + RESPONSE_SECONDS
        while True:
            try:
                committed: list[TopicPartition] = request.result().topic_partitions
            except KafkaException as error:
                if error_code(error) in NO_GROUP:
                    return []
                raise translate_error(error, f"read the offsets of group {group!r}") from error
            if not any(map(is_pending, committed)) or time.monotonic() > deadline:
                return committed
            time.sleep(POLL_SECONDS)
            request = self._request_committed(group, partitions)

    def delete_group(self, group: str) -> None:
        """Delete a consumer group and its committed offsets. Kafka refuses it while the group has
        members.
        """
        with translate_errors(f"delete the group {group!r}"):
            try:
                self._client.delete_consumer_groups([group], request_timeout=RESPONSE_SECONDS)[
                    group
                ].result()
            except KafkaException as error:
                if error_code(error) == KafkaError.NON_EMPTY_GROUP:
                    raise MemberFenced(
                        f"The group {group!r} has active consumers, so it cannot be deleted.",
                        fix="stop its consumers, then delete it.",
                    ) from None
                raise

    def alter_offsets(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Set the committed offsets of a group. Kafka refuses it while the group has members."""
        in_use = MemberFenced(
            f"The group {group!r} has active consumers, so its offsets cannot be reset.",
            fix="stop its consumers, then reset it.",
        )
        request = ConsumerGroupTopicPartitions(
            group,
            [TopicPartition(topic, partition, offset) for partition, offset in offsets.items()],
        )
        with translate_errors(f"reset the group {group!r}"):
            try:
                response = self._client.alter_consumer_group_offsets(
                    [request], request_timeout=RESPONSE_SECONDS
                )[group].result()
            except KafkaException as error:
                if error_code(error) in LOST_MEMBERSHIP:
                    raise in_use from None
                raise
            for result in response.topic_partitions:
                if result.error is not None:
                    if result.error.code() in LOST_MEMBERSHIP:
                        raise in_use
                    raise KafkaException(result.error)


def is_pending(committed: TopicPartition) -> bool:
    """Whether a transaction that is being committed is about to change this committed offset."""
    return (
        committed.error is not None and committed.error.code() == KafkaError.UNSTABLE_OFFSET_COMMIT
    )
