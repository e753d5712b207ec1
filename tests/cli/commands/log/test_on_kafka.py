"""Commands on a real Kafka broker: only the address differs."""

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from typer.testing import CliRunner

import headrace as hr
from headrace.cli import app
from tests.servers.kafka_broker import KafkaBroker

pytestmark = pytest.mark.kafka


def test_produce_consume_and_lag(kafka_broker: KafkaBroker) -> None:
    topic, group = f"orders-{uuid.uuid4().hex[:8]}", f"billing-{uuid.uuid4().hex[:8]}"

    def run(*arguments: object, stdin: str = "") -> list[dict[str, Any]]:
        done = CliRunner().invoke(
            app, [*map(str, arguments), "--log", kafka_broker.address, "--json"], input=stdin
        )
        assert done.exit_code == 0, done.stdout + done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    run(
        "topic",
        "create",
        topic,
        "--schema",
        "id BIGINT, at TIMESTAMP, price DECIMAL(9,2)",
        "--key",
        "id",
        "--partitions",
        2,
    )
    rows = [{"id": n, "at": "2026-01-31T12:00:00.000000Z", "price": f"{n}.50"} for n in range(20)]
    run("produce", topic, stdin="".join(json.dumps(row) + "\n" for row in rows))
    read = run("consume", topic)
    assert (
        sorted(({name: line[name] for name in rows[0]} for line in read), key=lambda row: row["id"])
        == rows
    )
    first = run("consume", topic, "--group", group, "--max", 5)
    assert len(first) == 5
    behind = sum(line["rows"] for line in run("lag", group))
    assert (
        15 <= behind <= 15 + 2
    )  # Kafka's transaction markers take an offset each, and lag counts offsets
    rest = run("consume", topic, "--group", group)
    assert sorted(line["id"] for line in [*first, *rest]) == list(range(20))
    assert sum(line["rows"] for line in run("lag", group)) == 0


def test_a_file_is_stored_once(kafka_broker: KafkaBroker, tmp_path: Path) -> None:
    topic = f"orders-{uuid.uuid4().hex[:8]}"
    file = tmp_path / "orders.jsonl"
    lines = [json.dumps({"id": n}) + "\n" for n in range(250)]
    with hr.open_log(kafka_broker.address) as log:
        log.create_topic(topic, "id BIGINT", partitions=2)
        command = ["produce", topic, str(file), "--batch-rows", "100"]

        def run() -> Any:
            return CliRunner().invoke(app, [*command, "--log", kafka_broker.address])

        file.write_text("".join([*lines[:220], "oops\n", *lines[221:]]))
        assert run().exit_code == 1
        assert len(log.read(topic).to_pylist()) == 200
        file.write_text("".join(lines))
        for _ in range(2):
            assert run().exit_code == 0
            assert sorted(row["id"] for row in log.read(topic).to_pylist()) == list(range(250))


def test_what_kafka_does_not_know_was_shown_as_minus_one(kafka_broker: KafkaBroker) -> None:
    topic, group = f"theirs-{uuid.uuid4().hex[:8]}", f"g-{uuid.uuid4().hex[:8]}"
    address = kafka_broker.address

    def run(*arguments: str) -> str:
        return CliRunner().invoke(app, [*arguments, "--log", address], terminal_width=200).stdout

    with hr.open_log(address) as log:
        log.create_topic(topic, "n BIGINT")
        log.producer(topic).append([{"n": 1}])
        log.reset_group(group, topic, "earliest")
        producer = Producer({"bootstrap.servers": address.removeprefix("kafka://")})
        producer.produce(topic, b"oops")
        assert producer.flush(20) == 0
    verified = run("log", "verify", topic)
    assert ["corrupt", topic, "0", "1", f"{topic}[0]", "-", "it", "is"] == next(
        line.split()[:8] for line in verified.splitlines() if "corrupt" in line
    )
    assert run("group", "show", group).splitlines()[0] == f"group {group}"
