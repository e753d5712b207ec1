"""Topics shared with clients that know nothing of Headrace: what they read, and what happens to
what they write.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

import headrace as hr
from headrace import errors
from headrace.log import dead_letters as dead
from headrace.log.api import Log
from tests.log.kafka.conftest import ForeignClient

pytestmark = pytest.mark.kafka
MakeName = Callable[[str], str]


def test_a_foreign_client_reads_plain_json(
    log: Log, foreign_client: ForeignClient, name: MakeName
) -> None:
    topic = log.create_topic(name("orders"), "id BIGINT, at TIMESTAMP, note STRING", key="id").name
    with log.producer(topic) as producer:
        producer.append(
            {"id": 7, "at": datetime(2026, 1, 31, 12, tzinfo=UTC), "note": None},
            headers=[{"trace": b"1"}],
        )
    (message,) = foreign_client.read(topic, 1)
    assert json.loads(message.value() or b"") == {
        "id": 7,
        "at": "2026-01-31T12:00:00.000000Z",
        "note": None,
    }
    assert (message.key(), message.headers()) == (b"7", [("trace", b"1")])


def test_a_foreign_client_reads_a_tables_deletion_as_a_tombstone(
    log: Log, foreign_client: ForeignClient, name: MakeName
) -> None:
    table = log.create_table(name("customers"), "id BIGINT, name STRING", key="id").name
    with log.producer(table) as producer:
        producer.upsert({"id": 1, "name": "Ada"})
        producer.delete(1)
    written, deleted = foreign_client.read(table, 2)
    assert (written.key(), written.value(), written.headers()) == (
        b"1",
        b'{"id":1,"name":"Ada"}',
        None,
    )
    assert (deleted.key(), deleted.value(), deleted.headers()) == (b"1", None, None)


def test_rows_of_a_foreign_client_are_read(
    log: Log, foreign_client: ForeignClient, name: MakeName
) -> None:
    table = log.create_table(name("customers"), "id BIGINT, name STRING", key="id").name
    foreign_client.write(table, b'{"id":1,"name":"Ada"}', None, key=b"1")
    rows = log.read(table, columns=["id", "name", "_change_type"]).to_pylist()
    assert rows == [
        {"id": 1, "name": "Ada", "_change_type": "update_postimage"},
        {"id": 1, "name": None, "_change_type": "delete"},
    ]


def test_kafkas_own_murmur2_agrees(log: Log, foreign_client: ForeignClient, name: MakeName) -> None:
    topic = log.create_topic(name("keyed"), "k STRING, who STRING", key="k", partitions=5).name
    keys = [f"customer {n} ä" for n in range(40)]
    with log.producer(topic) as producer:
        producer.append([{"k": key, "who": "us"} for key in keys])
    for key in keys:
        foreign_client.write(
            topic,
            json.dumps({"k": key, "who": "them"}).encode(),
            key=key.encode(),
            partitioner="murmur2_random",
        )
    partitions = {(row["k"], row["who"]): row["_partition"] for row in log.read(topic).to_pylist()}
    assert [partitions[key, "us"] for key in keys] == [partitions[key, "them"] for key in keys]


def test_a_foreign_topic_is_listed_and_can_be_given_a_schema(
    log: Log, foreign_client: ForeignClient, name: MakeName
) -> None:
    from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

    topic = name("theirs")
    admin = AdminClient({"bootstrap.servers": foreign_client.bootstrap})
    admin.create_topics([NewTopic(topic, 2, 1)])[topic].result(timeout=20)
    foreign_client.write(topic, b'{"n":1}')
    assert topic in log.topics()
    with pytest.raises(errors.BadSchema, match="exist_ok=True"):
        log.read(topic)
    with pytest.raises(errors.TopicExists):
        log.create_topic(topic, "n BIGINT")
    assert log.create_topic(topic, "n BIGINT", exist_ok=True).partitions == 2
    assert log.read(topic, columns=["n"]).to_pylist() == [{"n": 1}]


def test_internal_topics_are_not_shown(log: Log, name: MakeName) -> None:
    log.create_topic(name("t"), "n BIGINT")
    with log.transaction(name("job")) as tx:
        tx.set_note(name("n"), "1")
    internal = ("__headrace.", "__consumer_offsets", "__transaction_state", "__share_group_state")
    assert not [topic for topic in log.topics() if topic.startswith(internal)]


# Records that do not fit


def test_misfits_become_dead_letters_once_and_stop_no_reader(
    log: Log, other: Log, foreign_client: ForeignClient, name: MakeName
) -> None:
    topic = log.create_topic(name("events"), "n BIGINT NOT NULL").name
    foreign_client.write(topic, b'{"n":1}', b"garbage", b'{"n":"two"}', None, b'{"n":3}', key=b"k")
    for _ in range(2):
        assert [row["n"] for row in log.read(topic).to_pylist()] == [1, 3]
    with other.consumer(topic, group=name("g")) as consumer:
        rows = [row for _ in range(3) for batch in consumer.poll() for row in batch.to_pylist()]
        assert [(row["n"], row["_offset"]) for row in rows] == [(1, 0), (3, 4)]
        consumer.commit()
    dead_letters = dead.read_dead_letters(log, topic)
    assert [
        (dead_letter["source_offset"], dead_letter["payload"], dead_letter["key"])
        for dead_letter in dead_letters
    ] == [
        (1, b"garbage", b"k"),
        (2, b'{"n":"two"}', b"k"),
        (3, None, b"k"),
    ]
    assert "not JSON" in dead_letters[0]["reason"]
    assert "column 'n'" in dead_letters[1]["reason"]
    assert [finding.offset for finding in log.verify(topic)] == [1, 2, 3]
    (counted,) = [each for each in dead.dead_topics(log) if each.of == topic]
    assert counted.rows >= 3


def test_many_readers_divert_a_record_once(
    kafka_broker: object, log: Log, foreign_client: ForeignClient, name: MakeName
) -> None:
    topic = log.create_topic(name("events"), "n BIGINT").name
    foreign_client.write(topic, b'{"n":1}', b"garbage", b"more", b'{"n":2}')

    def read(_: int) -> list[int]:
        with hr.open_log(log.address) as mine:
            return [row["n"] for row in mine.read(topic).to_pylist()]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(read, range(4))) == [[1, 2]] * 4
    assert [dead_letter["payload"] for dead_letter in dead.read_dead_letters(log, topic)] == [
        b"garbage",
        b"more",
    ]


def test_a_dead_letter_can_be_replayed_after_a_fix(
    log: Log, foreign_client: ForeignClient, name: MakeName
) -> None:
    topic = log.create_topic(name("events"), "n BIGINT").name
    foreign_client.write(topic, b'{"n":1,"extra":5}')
    assert log.read(topic).to_pylist() == []
    log.alter_topic(topic, add_columns="extra BIGINT")
    assert dead.replay(log, topic).replayed == 1
    assert dead.replay(log, topic).replayed == 0
    assert {"n": 1, "extra": 5} in log.read(topic, columns=["n", "extra"]).to_pylist()


def test_a_queues_misfits_are_diverted_and_settled(
    log: Log, foreign_client: ForeignClient, name: MakeName
) -> None:
    topic = log.create_topic(name("jobs"), "n BIGINT").name
    foreign_client.write(topic, b"garbage", b'{"n":1}')
    with log.queue(topic, group=name("q")) as queue:
        received = next(filter(None, (queue.receive(5, wait="1 second") for _ in range(20))))
        assert [message.row for message in received] == [{"n": 1}]
        received[0].ack()
    assert [dead_letter["payload"] for dead_letter in dead.read_dead_letters(log, topic)] == [
        b"garbage"
    ]
