"""The notes of producers and transactions share partitions: one that died with a transaction open
holds up nobody else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import headrace as hr
from headrace.log.kafka.connection import VISIBLE_SECONDS, Connection
from headrace.log.kafka.notes import NOTES_TOPIC, PARTITIONS
from headrace.log.kafka.sender import (
    DeliveryReports,
    Record,
    open_transactional,
    send_records,
)

pytestmark = pytest.mark.kafka

TIMEOUT_MS = 300_000
OTHERS = [(NOTES_TOPIC, number) for number in range(1, PARTITIONS)]


@pytest.fixture
def connection(log: hr.Log) -> Connection:
    internals: Any = log
    found: Connection = internals._connection
    return found


@pytest.fixture
def dead(connection: Connection, name: Callable[[str], str]) -> Iterator[Any]:
    """A client that died between its note and its commit, in each partition of notes."""
    connection.notes.prepare()
    client = open_transactional(connection.cluster, name("dead"), TIMEOUT_MS)
    client.begin_transaction()
    records = [Record(*partition, b"dead", b"{}") for partition in OTHERS]
    send_records(client, records, DeliveryReports())
    yield client
    client.abort_transaction(20)


def is_open(connection: Connection) -> bool:
    """Whether the dead client's transaction still holds back the readers of all its partitions."""
    ends = connection.admin.high_watermarks(OTHERS)
    return all(connection.admin.end_offsets([each])[each] < ends[each] for each in OTHERS)


@pytest.mark.usefixtures("dead")
def test_a_producer_that_died_within_an_append_held_up_the_opening_of_others(
    log: hr.Log, connection: Connection, name: Callable[[str], str]
) -> None:
    topic = log.create_topic(name("t"), "n BIGINT").name
    with log.producer(topic, id=name("loader")) as producer:
        assert producer.last_sequence == -1
        producer.append([{"n": 0}])
    with log.transaction(name("till")) as tx:
        tx.append(topic, [{"n": 1}])
        tx.set_note(name("note"), "1")
    assert [row["n"] for row in log.read(topic).to_pylist()] == [0, 1]
    assert is_open(connection)


@pytest.mark.usefixtures("dead")
def test_a_producer_that_died_within_an_append_held_up_the_appends_of_others(
    log: hr.Log, name: Callable[[str], str]
) -> None:
    topic = log.create_topic(name("t"), "n BIGINT").name
    with log.producer(topic, id=name("loader")) as producer:
        started_s = time.monotonic()
        for number in range(4):
            producer.append([{"n": number}])
        assert time.monotonic() - started_s < 4 * VISIBLE_SECONDS


def test_a_note_that_may_still_be_committed_is_waited_for(
    log: hr.Log, connection: Connection, dead: Any, name: Callable[[str], str]
) -> None:
    """The one who asks for it may not take the value before for the newest one."""
    key = b"dead"
    partition = connection.notes._partitions[1]
    assert partition._is_written(key, *bounds(connection))
    assert not partition._is_written(name("other").encode(), *bounds(connection))
    dead.commit_transaction(20)
    assert partition.get(key) == b"{}"
    dead.begin_transaction()


def bounds(connection: Connection) -> tuple[int, int]:
    """What nobody can read yet of the first of the partitions."""
    first = OTHERS[0]
    return (
        connection.admin.end_offsets([first])[first],
        connection.admin.high_watermarks([first])[first],
    )
