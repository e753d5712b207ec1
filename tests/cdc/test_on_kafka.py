"""The same on Kafka: rows, position and progress of a snapshot in one Kafka transaction; a newer process takes over."""

from pathlib import Path

import pytest

import headrace as hr
from headrace.cdc.capturing import Capturing
from headrace.errors import TransactionFenced
from headrace.testing.kafka_broker import KafkaBroker
from tests.cdc.test_sqlite import caught_up, do, folded, table


@pytest.mark.kafka
def test_a_capture_into_kafka(tmp_path: Path, kafka_broker: KafkaBroker) -> None:
    path, address = tmp_path / "kafkashop.db", kafka_broker.address
    do(path, "CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT)", *(f"INSERT INTO items VALUES ({n}, 'item {n}')" for n in range(50)))
    capture = hr.cdc.sqlite(path, prefix="cdc-on-kafka.", chunk_rows=20, name="cdc-on-kafka")
    topic = "cdc-on-kafka.items"
    with caught_up(capture, address) as log:
        assert folded(log, topic) == table(path)
        older = Capturing(capture, log)
        do(path, "UPDATE items SET name = 'new' WHERE id = 3", "DELETE FROM items WHERE id = 4", "UPDATE items SET id = 500 WHERE id = 5")
        capture.run(log=address, until_caught_up=True)
        assert folded(log, topic) == table(path)
        do(path, "DELETE FROM items WHERE id = 6")
        with pytest.raises(TransactionFenced):
            older.run(until_caught_up=True)
        capture.run(log=address, until_caught_up=True)
        assert folded(log, topic) == table(path)
        changes = [row["id"] for row in log.read(topic).to_pylist()][50:]
        assert changes == [3, 4, 5, 500, 6]
