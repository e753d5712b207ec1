"""Topics shared with clients that know nothing of Headrace: what they read, and what happens to
what they write.
"""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

import headrace as hr
from headrace import errors
from headrace.cli import app
from headrace.log import dead_letters as dead
from headrace.log.api import Log
from headrace.log.kafka.topics import CACHE_SECONDS
from headrace.serve.dashboard import Dashboard
from tests.log.kafka.conftest import ForeignClient
from tests.waits import wait_until

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
    topic = name("theirs")
    foreign_client.create(topic, 2)
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


# Topics of others


def test_listing_failed_on_a_cluster_with_a_topic_of_others(
    log: Log, foreign_client: ForeignClient, name: MakeName
) -> None:
    own, theirs = log.create_topic(name("ours"), "n BIGINT").name, name("theirs")
    foreign_client.create(theirs, 3)
    foreign_client.write(theirs, b"anything", b"at all", partition=1)
    infos = log.topic_infos()
    assert (infos[own], infos[theirs]) == (log.topic(own), None)
    stats = {each.name: each for each in log.stats()}
    assert (stats[theirs].partitions, stats[theirs].rows, stats[theirs].end[1]) == (3, 2, 2)
    assert log.end_offsets(theirs) == {0: 0, 1: 2, 2: 0}
    assert log.snapshot([own, theirs]) == {own: {0: 0}, theirs: {0: 0, 1: 2, 2: 0}}
    assert dead.dead_topics(log) is not None

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, [*arguments, "--log", log.address])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert f"{theirs} " in run("topic", "list")
    assert "no schema" in run("topic", "list")
    listed = [json.loads(line) for line in run("topic", "list", "--json").splitlines()]
    (line,) = [each for each in listed if each["name"] == theirs]
    assert (line["schema"], line["partitions"], line["offsets"]) == (None, 3, 2)
    assert f"{theirs} " in run("log", "stats")


def test_the_dashboard_and_lag_failed_on_a_cluster_with_a_topic_of_others(
    log: Log, foreign_client: ForeignClient, name: MakeName, tmp_path: Path
) -> None:
    theirs, group = name("theirs"), name("their-group")
    foreign_client.create(theirs, 2)
    foreign_client.write(theirs, b"a", b"b", partition=1)
    foreign_client.commit(group, theirs, partition=1, offset=1)
    log.create_topic(name("ours"), "n BIGINT")
    measurements = Dashboard(tmp_path, log).measurements()
    (shown,) = [each for each in measurements["topics"] if each["name"] == theirs]
    assert (shown["end"], shown["partitions"], shown["rows"]) == (2, 2, 2)
    (behind,) = [lag for lag in log.lag(group) if lag.partition == 1]
    assert (behind.topic, behind.rows) == (theirs, 1)


def test_a_change_of_an_adopted_topic_reset_its_other_settings(
    log: Log, foreign_client: ForeignClient, name: MakeName
) -> None:
    topic = name("theirs")
    settings = {
        "cleanup.policy": "compact",
        "min.compaction.lag.ms": "60000",
        "segment.bytes": "2097152",
        "compression.type": "gzip",
        "message.timestamp.type": "CreateTime",
        "delete.retention.ms": "123000",
    }
    foreign_client.create(topic, 1, settings)
    adopted = log.create_topic(topic, "k STRING, n BIGINT", key="k", exist_ok=True)
    assert (adopted.compact, adopted.history_us, adopted.retention_us, adopted.compression) == (
        True,
        60_000_000,
        None,
        "gzip",
    )
    assert (adopted.segment_bytes, adopted.tombstone_us) == (2_097_152, 123_000_000)
    altered = log.alter_topic(topic, segment_bytes=4_194_304)
    assert altered.segment_bytes == 4_194_304
    assert foreign_client.settings(topic, settings) == settings | {"segment.bytes": "4194304"}
    log.alter_topic(topic, add_columns="note STRING")
    assert foreign_client.settings(topic, settings) == settings | {"segment.bytes": "4194304"}


def test_a_compacted_topic_of_others_without_a_key_could_not_be_altered(
    log: Log, foreign_client: ForeignClient, name: MakeName
) -> None:
    topic = name("theirs")
    foreign_client.create(topic, 1, {"cleanup.policy": "compact"})
    log.create_topic(topic, "n BIGINT", exist_ok=True)
    assert log.alter_topic(topic, add_columns="note STRING").schema == "n BIGINT, note STRING"
    assert log.alter_topic(topic, tombstones="2 hours").compact
    settings = foreign_client.settings(topic, ["cleanup.policy", "delete.retention.ms"])
    assert settings == {"cleanup.policy": "compact", "delete.retention.ms": "7200000"}
    plain = log.create_topic(name("plain"), "n BIGINT").name
    with pytest.raises(errors.InputError, match="no key"):
        log.alter_topic(plain, compact=True)


def test_settings_that_others_changed_are_reported(
    log: Log, foreign_client: ForeignClient, name: MakeName
) -> None:
    topic = log.create_topic(name("ours"), "n BIGINT", retention="1500 milliseconds").name
    assert log.topic(topic).retention_us == 1_500_000
    foreign_client.configure(topic, {"retention.ms": "7200000", "retention.bytes": "1000000"})
    wait_until(lambda: log.topic(topic).retention_bytes == 1_000_000)
    assert log.topic(topic).retention_us == 7_200_000_000
    assert log.topic_infos()[topic] == log.topic(topic)
    assert log.alter_topic(topic, retention=None).retention_us is None
    assert foreign_client.settings(topic, ["retention.bytes"]) == {"retention.bytes": "1000000"}


def test_a_repeat_was_a_duplicate_in_a_topic_that_others_had_made_again(
    log: Log, other: Log, foreign_client: ForeignClient, name: MakeName
) -> None:
    topic = log.create_topic(name("replaced"), "n BIGINT").name
    before = log.topic(topic).id
    with log.producer(topic, id="loader") as producer:
        assert not producer.append({"n": 1}, sequence=0).duplicate
        assert producer.append({"n": 1}, sequence=0).duplicate
        foreign_client.delete(topic)
        foreign_client.create(topic, 1)
        with pytest.raises(errors.FencedError):
            producer.append({"n": 1}, sequence=0)
    assert other.topic(topic).id != before
    with other.producer(topic, id="loader") as producer:
        assert not producer.append({"n": 1}, sequence=0).duplicate
    assert [row["n"] for row in other.read(topic).to_pylist()] == [1]
    again = log.create_topic(topic, "n BIGINT, other STRING", exist_ok=True)
    assert again.schema == "n BIGINT, other STRING"
    assert again.id == log.topic(topic).id != before


# Records that do not fit


def test_reading_left_a_topic_of_dead_letters(
    log: Log, foreign_client: ForeignClient, name: MakeName
) -> None:
    topic = log.create_topic(name("events"), "n BIGINT").name
    foreign_client.write(topic, b'{"n":1}', b"garbage", b'{"n":2}')
    rows = log.read(topic)
    assert [row["n"] for row in rows.to_pylist()] == [1, 2]
    assert (rows.misfits, dict(rows.unknown_fields)) == (1, {})
    done = CliRunner().invoke(app, ["consume", topic, "--json", "--log", log.address])
    assert len(done.stdout.splitlines()) == 2
    assert f"1 record of {topic} do not fit" in done.stderr
    assert f"{topic}.dead" not in log.topics()


def test_the_last_rows_counted_misfits_as_often_as_they_looked_for_rows(
    log: Log, foreign_client: ForeignClient, name: MakeName
) -> None:
    topic = log.create_topic(name("events"), "n BIGINT").name
    foreign_client.write(topic, *(b'{"n":1,"new":1}' for _ in range(9)), b"garbage", b"garbage")
    done = CliRunner().invoke(
        app, ["consume", topic, "--last", "2", "--json", "--log", log.address]
    )
    assert len(done.stdout.splitlines()) == 2
    assert f"2 records of {topic} do not fit" in done.stderr
    assert "ignored: new (6)." in done.stderr


def test_a_new_field_upstream_emptied_the_topic(
    log: Log, other: Log, foreign_client: ForeignClient, name: MakeName
) -> None:
    topic = log.create_topic(name("events"), "n BIGINT, s STRUCT<x: INT>").name
    foreign_client.write(topic, b'{"n":1,"s":{"x":1}}')
    foreign_client.write(topic, b'{"n":2,"new":true}', b'{"n":3,"s":{"x":1,"y":2},"new":1}')
    for opened in (log, other):
        rows = opened.read(topic)
        assert [row["n"] for row in rows.to_pylist()] == [1, 2, 3]
        assert (rows.misfits, dict(rows.unknown_fields)) == (0, {"new": 2, "s.y": 1})
    log.alter_topic(topic, strict=True)
    rows = other.read(topic)
    assert [row["n"] for row in rows.to_pylist()] == [1]
    assert rows.misfits == 2


def test_a_consumer_follows_columns_that_were_unknown_fields_before(
    log: Log, other: Log, foreign_client: ForeignClient, name: MakeName
) -> None:
    topic = log.create_topic(name("events"), "n BIGINT").name
    foreign_client.write(topic, b'{"n":1,"later":"a"}')
    with log.consumer(topic, group=name("g")) as consumer:
        assert [batch.schema.names[:2] for batch in consumer.poll("5 seconds")] == [
            ["n", "_partition"]
        ]
        other.alter_topic(topic, add_columns="later STRING")
        time.sleep(CACHE_SECONDS)
        foreign_client.write(topic, b'{"n":2,"later":"b"}')
        rows = [row for batch in consumer.poll("5 seconds") for row in batch.to_pylist()]
        assert [row["later"] for row in rows] == ["b"]


def test_misfits_become_dead_letters_once_and_stop_no_reader(
    log: Log, other: Log, foreign_client: ForeignClient, name: MakeName
) -> None:
    topic = log.create_topic(name("events"), "n BIGINT NOT NULL").name
    foreign_client.write(topic, b'{"n":1}', b"garbage", b'{"n":"two"}', None, b'{"n":3}', key=b"k")
    for _ in range(2):
        rows = log.read(topic).with_dead_letters()
        assert [row["n"] for row in rows.to_pylist()] == [1, 3]
    with other.consumer(topic, group=name("g")) as consumer:
        found = [row for _ in range(3) for batch in consumer.poll() for row in batch.to_pylist()]
        assert [(row["n"], row["_offset"]) for row in found] == [(1, 0), (3, 4)]
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
            return [row["n"] for row in mine.read(topic).with_dead_letters().to_pylist()]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(read, range(4))) == [[1, 2]] * 4
    assert [dead_letter["payload"] for dead_letter in dead.read_dead_letters(log, topic)] == [
        b"garbage",
        b"more",
    ]


def test_a_dead_letter_can_be_replayed_after_a_fix(
    log: Log, foreign_client: ForeignClient, name: MakeName
) -> None:
    topic = log.create_topic(name("events"), "n BIGINT", strict=True).name
    foreign_client.write(topic, b'{"n":1,"extra":5}')
    assert log.read(topic).with_dead_letters().to_pylist() == []
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
