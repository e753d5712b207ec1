"""A log on a real broker, and a Kafka client that knows nothing of Headrace."""

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, Message, Producer, TopicPartition

import headrace as hr
from tests.servers.kafka_broker import KafkaBroker


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
