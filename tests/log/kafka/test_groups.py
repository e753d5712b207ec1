"""Members of groups on Kafka when transactions of others are in the way."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from headrace.log.api import Log
from tests.servers.kafka_broker import KafkaBroker

pytestmark = pytest.mark.kafka


def test_a_member_that_was_killed_in_its_commit_made_its_heir_fail(
    log: Log, kafka_broker: KafkaBroker, name: Callable[[str], str]
) -> None:
    """Its offsets are pending until its transaction is aborted. Meanwhile the partition waits, and
    the others are read.
    """
    topic = log.create_topic(name("t"), "n BIGINT", partitions=2).name
    with log.producer(topic) as producer:
        for n in range(4):
            producer.append({"n": n}, partition=n % 2)
    bootstrap = {"bootstrap.servers": kafka_broker.address.removeprefix("kafka://")}
    outsider = Consumer({**bootstrap, "group.id": name("g")})
    killed = Producer({**bootstrap, "transactional.id": name("killed")})
    killed.init_transactions(20)
    killed.begin_transaction()
    killed.send_offsets_to_transaction(
        [TopicPartition(topic, 0, 2)], outsider.consumer_group_metadata(), 20
    )
    begun = time.monotonic()
    with log.consumer(topic, group=name("g")) as heir:
        assert time.monotonic() - begun < 10
        found: list[int] = []
        deadline = time.monotonic() + 20
        while len(found) < 2 and time.monotonic() < deadline:
            found += [n for batch in heir.poll() for n in batch["n"].to_pylist()]
        assert sorted(found) == [1, 3]
        assert heir.assignment() == {topic: (1,)}
        heir.commit()
        killed.abort_transaction(20)
        while len(found) < 4 and time.monotonic() < deadline:
            found += [n for batch in heir.poll() for n in batch["n"].to_pylist()]
        assert sorted(found) == [0, 1, 2, 3]
        assert heir.assignment() == {topic: (0, 1)}
    outsider.close()


@pytest.mark.parametrize("on_lost", ["raise", "earliest"])
def test_an_offset_that_was_lost_before_a_partition_moved_took_its_next_member_back(
    log: Log, name: Callable[[str], str], on_lost: str
) -> None:
    """The client may report the lost offset of an assignment after the next one has begun."""
    topic = log.create_topic(name("t"), "n BIGINT").name
    with log.producer(topic) as producer:
        for n in range(20):
            producer.append({"n": n})
    log.reset_group(name("g"), topic, 2)
    log.trim_topic(topic, 10)
    with log.consumer(topic, group=name("g"), on_lost=on_lost) as consumer:
        internals: Any = consumer
        deadline = time.monotonic() + 20
        while not internals._pending and time.monotonic() < deadline:
            internals._poll_client(0.05)
        (late,) = internals._pending
        assert late.error() is not None
        consumer.seek(0, 15)
        internals._pending.append(late)
        found: list[int] = []
        while len(found) < 5 and time.monotonic() < deadline:
            found += [n for batch in consumer.poll() for n in batch["n"].to_pylist()]
        assert consumer.poll("500 milliseconds") == []
        assert found == [15, 16, 17, 18, 19]
