"""A log on a real broker, and a Kafka client that knows nothing of Headrace."""

# mypy: disable-error-code="attr-defined"
# (confluent_kafka.admin does not declare its public names.)

import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

import headrace as hr
from tests.servers.kafka_broker import KafkaBroker
from tests.waits import wait_until


@pytest.fixture
def log(kafka_broker: KafkaBroker) -> Iterator[hr.Log]:
    with hr.open_log(kafka_broker.address) as opened:
        yield opened


@pytest.fixture
def other(kafka_broker: KafkaBroker) -> Iterator[hr.Log]:
    with hr.open_log(kafka_broker.address) as opened:
        yield opened


@pytest.fixture
def name() -> Callable[[str], str]:
    suffix = uuid.uuid4().hex[:8]
    return lambda stem: f"{stem}-{suffix}"


class ForeignClient:
    """Writes and reads plain Kafka records."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self._admin = AdminClient({"bootstrap.servers": bootstrap})

    def write(
        self,
        topic: str,
        *values: bytes | None,
        key: bytes | None = None,
        partition: int = -1,
        **config: Any,
    ) -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap, **config})
        for value in values:
            producer.produce(topic, value, key, partition)
        assert producer.flush(20) == 0

    def create(self, topic: str, partitions: int, config: dict[str, str] | None = None) -> None:
        new_topic = NewTopic(topic, partitions, 1, config=config or {})
        deadline = time.monotonic() + 20
        while True:  # a topic that was just deleted may still be there for a moment
            try:
                self._admin.create_topics([new_topic])[topic].result(timeout=20)
            except KafkaException:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                break
        # The broker answers before its own metadata has the topic.
        wait_until(
            lambda: (
                len(self._admin.list_topics(topic, timeout=20).topics[topic].partitions)
                == partitions
            )
        )

    def delete(self, topic: str) -> None:
        self._admin.delete_topics([topic])[topic].result(timeout=20)

    def configure(self, topic: str, config: dict[str, str]) -> None:
        entries = [
            ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
            for key, value in config.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
        for future in self._admin.incremental_alter_configs([resource]).values():
            future.result(timeout=20)

    def commit(self, group: str, topic: str, partition: int, offset: int) -> None:
        consumer = Consumer({"bootstrap.servers": self.bootstrap, "group.id": group})
        consumer.commit(offsets=[TopicPartition(topic, partition, offset)], asynchronous=False)
        consumer.close()

    def settings(self, topic: str, names: Iterable[str]) -> dict[str, str]:
        resource = ConfigResource(ResourceType.TOPIC, topic)
        (future,) = self._admin.describe_configs([resource]).values()
        found = future.result(timeout=20)
        return {name: found[name].value for name in names}

    def read(self, topic: str, count: int, partition: int = 0) -> list[Message]:
        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": "foreign",
                "isolation.level": "read_committed",
            }
        )
        consumer.assign([TopicPartition(topic, partition, 0)])
        messages = consumer.consume(count, 20)
        consumer.close()
        assert len(messages) == count
        return messages


@pytest.fixture
def foreign_client(kafka_broker: KafkaBroker) -> ForeignClient:
    return ForeignClient(kafka_broker.bootstrap)
