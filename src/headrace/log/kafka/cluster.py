"""What one log shares with the cluster: one admin client, open readers, what topics there are, and
how far each partition goes.
"""

# mypy: disable-error-code="attr-defined, no-untyped-call"
# (confluent_kafka.admin does not say which of its names are public, nor the types of its offset specifications.)

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
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

from headrace.errors import ConfigurationError, LogUnavailable, RetryError
from headrace.log.kafka.config import Cluster
from headrace.log.kafka.errors import (
    HOPELESS,
    LEADER_MOVES,
    NO_TOPIC,
    cause,
    code,
    doing,
    translated,
)
from headrace.log.kafka.fetcher import Fetchers

ANSWER_SECONDS = 15.0
SETTLE_SECONDS = 15.0
POLL_SECONDS = 0.005
HOPELESS_SECONDS = 2.0

Place = tuple[str, int]
"""A topic and one of its partitions."""


class Broker:
    """The admin side of a cluster. Safe for several threads."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.fetchers = Fetchers(cluster)
        self._complaints: list[KafkaError] = []
        try:
            self.admin = AdminClient(cluster.admin() | {"error_cb": self._complaints.append})
        except KafkaException as error:
            raise ConfigurationError(
                f"The options of the Kafka log are not right: {cause(error).str()}.",
                fix="correct or remove the option.",
            ) from None

    def check_reachable(self) -> None:
        """Wait a while for a broker to answer; less long when all that are known have been
        tried.
        """
        begun = time.monotonic()
        while True:
            try:
                self.admin.list_topics("__consumer_offsets", timeout=1.0)
            except KafkaException as error:
                self.admin.poll(0)
                waited = time.monotonic() - begun
                if waited > ANSWER_SECONDS or (
                    waited > HOPELESS_SECONDS
                    and any(each.code() in HOPELESS for each in self._complaints)
                ):
                    raise self._unreachable(error) from None
            else:
                return

    def _unreachable(self, error: KafkaException) -> LogUnavailable:
        why = next(
            (
                each.str()
                for each in self._complaints
                if each.code() != KafkaError._ALL_BROKERS_DOWN  # noqa: SLF001
            ),
            cause(error).str(),
        )
        return LogUnavailable(
            f"No Kafka broker answers at {self.cluster.bootstrap}: {why}",
            fix="check the address, that the broker runs, and the security options.",
        )

    # Topics

    def partition_counts(self) -> dict[str, int]:
        """Every topic of the cluster, with its number of partitions."""
        with doing("list the topics"):
            topics = self.admin.list_topics(timeout=ANSWER_SECONDS).topics
        return {
            name: len(topic.partitions) for name, topic in topics.items() if topic.error is None
        }

    def partitions(self, topic: str) -> int | None:
        """A topic's number of partitions, once all have a leader; None if there is no such
        topic.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            with doing(f"look up the topic {topic!r}"):
                found = self.admin.list_topics(topic, timeout=ANSWER_SECONDS).topics[topic]
            if found.error is not None and found.error.code() in NO_TOPIC:
                return None
            if found.error is None and all(
                partition.leader >= 0 for partition in found.partitions.values()
            ):
                return len(found.partitions)
            if time.monotonic() > deadline:
                raise RetryError(
                    f"The topic {topic!r} has a partition without a leader.",
                    fix="check that all brokers are up.",
                )
            time.sleep(0.05)

    def create(self, topic: str, partitions: int, config: Mapping[str, str]) -> None:
        """Create a topic and wait until it can be used. Raises KafkaException
        (TOPIC_ALREADY_EXISTS) if it is there.
        """
        wanted = NewTopic(
            topic, num_partitions=partitions, replication_factor=-1, config=dict(config)
        )
        self.admin.create_topics([wanted], operation_timeout=ANSWER_SECONDS)[topic].result()
        self._await_count(topic, partitions)

    def add_partitions(self, topic: str, partitions: int) -> None:
        with doing(f"add partitions to the topic {topic!r}"):
            self.admin.create_partitions(
                [NewPartitions(topic, partitions)], operation_timeout=ANSWER_SECONDS
            )[topic].result()
        self._await_count(topic, partitions)

    def delete(self, topic: str) -> None:
        with doing(f"delete the topic {topic!r}"):
            self.admin.delete_topics([topic], operation_timeout=ANSWER_SECONDS)[topic].result()
        self._await_count(topic, None)

    def _await_count(self, topic: str, partitions: int | None) -> None:
        deadline = time.monotonic() + SETTLE_SECONDS
        while self.partitions(topic) != partitions:
            if time.monotonic() > deadline:
                raise RetryError(
                    f"The cluster has not caught up with a change of the topic {topic!r}.",
                    fix="try again in a moment.",
                )
            time.sleep(0.02)

    # Settings

    def configure_topic(self, topic: str, config: Mapping[str, str]) -> None:
        self._configure(ResourceType.TOPIC, topic, config)

    def configure_group(self, group: str, config: Mapping[str, str]) -> None:
        self._configure(ResourceType.GROUP, group, config)

    def _configure(self, kind: ResourceType, name: str, config: Mapping[str, str]) -> None:
        """Change settings, leaving the others as they are."""
        entries = [
            ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
            for key, value in config.items()
        ]
        resource = ConfigResource(kind, name, incremental_configs=entries)
        with doing(f"change the settings of {name!r}"):
            for future in self.admin.incremental_alter_configs([resource]).values():
                future.result()

    def group_settings(self, group: str) -> dict[str, str]:
        with doing(f"read the settings of {group!r}"):
            (future,) = self.admin.describe_configs(
                [ConfigResource(ResourceType.GROUP, group)]
            ).values()
            return {key: entry.value for key, entry in future.result().items()}

    # Offsets

    def earliest(self, places: Iterable[Place]) -> dict[Place, int]:
        return self._offsets({place: OffsetSpec.earliest() for place in places})

    def ends(self, places: Iterable[Place]) -> dict[Place, int]:
        """Where committed rows end: behind the last row before any open transaction."""
        return self._offsets({place: OffsetSpec.latest() for place in places})

    def high_watermarks(self, places: Iterable[Place]) -> dict[Place, int]:
        """Where everything written ends, open transactions included."""
        return self._offsets(
            {place: OffsetSpec.latest() for place in places}, IsolationLevel.READ_UNCOMMITTED
        )

    def since(self, places: Iterable[Place], time_ms: int) -> dict[Place, int]:
        """The first offset at or after a time; -1 if there is none."""
        return self._offsets({place: OffsetSpec.for_timestamp(time_ms) for place in places})

    def _offsets(
        self, wanted: Mapping[Place, Any], isolation: IsolationLevel = IsolationLevel.READ_COMMITTED
    ) -> dict[Place, int]:
        if not wanted:
            return {}
        request = {TopicPartition(*place): spec for place, spec in wanted.items()}
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            answers = self.admin.list_offsets(
                request, isolation_level=isolation, request_timeout=ANSWER_SECONDS
            )
            try:
                return {
                    (place.topic, place.partition): future.result().offset
                    for place, future in answers.items()
                }
            except (
                KafkaException
            ) as error:  # a leader that has just been chosen may not know it yet
                if code(error) not in LEADER_MOVES or time.monotonic() > deadline:
                    raise translated(error, "look up offsets") from error
                time.sleep(0.05)

    def await_ends(self, targets: Mapping[Place, int], seconds: float) -> bool:
        """Wait until committed rows reach these offsets; False if another open transaction keeps
        them back for longer.
        """
        deadline = time.monotonic() + seconds
        waiting = dict(targets)
        while waiting:
            ends = self.ends(waiting)
            waiting = {place: target for place, target in waiting.items() if ends[place] < target}
            if waiting and time.monotonic() > deadline:
                return False
            if waiting:
                time.sleep(POLL_SECONDS)
        return True
