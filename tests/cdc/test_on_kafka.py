"""Captures on Kafka: rows, position and progress of a snapshot in one Kafka transaction; a newer
process takes over.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.cdc.capture import CaptureLoop
from headrace.errors import TransactionFenced
from headrace.log.dead_letters import read_dead_letters
from tests.cdc.captures import caught_up, check_two_that_start_at_once, do, folded, table
from tests.servers.kafka_broker import KafkaBroker


@pytest.mark.kafka
def test_a_capture_into_kafka(tmp_path: Path, kafka_broker: KafkaBroker) -> None:
    path, address = tmp_path / "kafkashop.db", kafka_broker.address
    do(
        path,
        "CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT)",
        *(f"INSERT INTO items VALUES ({n}, 'item {n}')" for n in range(50)),
    )
    capture = hr.cdc.sqlite(path, prefix="cdc-on-kafka.", chunk_rows=20, name="cdc-on-kafka")
    topic = "cdc-on-kafka.items"
    with caught_up(capture, address) as log:
        assert folded(log, topic) == table(path)
        older = CaptureLoop(capture, log)
        do(
            path,
            "UPDATE items SET name = 'new' WHERE id = 3",
            "DELETE FROM items WHERE id = 4",
            "UPDATE items SET id = 500 WHERE id = 5",
        )
        capture.run(log=address, until_caught_up=True)
        assert folded(log, topic) == table(path)
        do(path, "DELETE FROM items WHERE id = 6")
        with pytest.raises(TransactionFenced):
            older.run(until_caught_up=True)
        capture.run(log=address, until_caught_up=True)
        assert folded(log, topic) == table(path)
        changes = [row["id"] for row in log.read(topic).to_pylist()][50:]
        assert changes == [3, 4, 5, 500, 6]


@pytest.mark.kafka
def test_the_topic_of_a_real_connector(kafka_broker: KafkaBroker) -> None:
    """Debezium knows nothing of our schemas: records are envelopes, keyed by JSON, with tombstones
    behind deletes.
    """
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

    topic = "dbserver1.inventory.customers"
    servers: dict[str, Any] = {"bootstrap.servers": kafka_broker.address.removeprefix("kafka://")}
    admin = AdminClient(servers)
    for made in admin.create_topics([NewTopic(topic, 1, 1)]).values():
        made.result(30)
    rows = {1: {"id": 1, "name": "Ada"}, 2: {"id": 2, "name": "Bo"}}
    envelopes = [
        {"op": "r", "before": None, "after": rows[1]},
        {"op": "c", "before": None, "after": rows[2]},
        {"op": "d", "before": rows[1], "after": None},
    ]
    producer = Producer(servers)
    for number, payload in enumerate(envelopes):
        value = {
            "schema": {"type": "struct"},
            "payload": {**payload, "source": {"lsn": number, "txId": 1}, "ts_ms": 1},
        }
        producer.produce(topic, json.dumps(value), key=json.dumps({"payload": {"id": 1}}))
    producer.produce(topic, None, key=json.dumps({"payload": {"id": 1}}))
    producer.produce(topic, "no envelope")
    assert producer.flush(30) == 0
    capture = hr.cdc.debezium(
        topic,
        schema="id BIGINT, name STRING",
        key="id",
        log=kafka_broker.address,
        table="debezium-customers",
    )
    with caught_up(capture, kafka_broker.address) as log:
        assert [
            (row["id"], row["name"]) for row in hr.cdc.fold(log, "debezium-customers").to_pylist()
        ] == [(2, "Bo")]
        assert [
            (dead_letter["source_offset"], "no envelope" in dead_letter["row"])
            for dead_letter in read_dead_letters(log, topic)
        ] == [(4, True)]


@pytest.mark.kafka
def test_two_captures_that_start_at_once_share_no_topic(kafka_broker: KafkaBroker) -> None:
    with hr.open_log(kafka_broker.address) as log:
        check_two_that_start_at_once(log, "cdc-owners.")
