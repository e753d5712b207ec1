"""The source `mqtt`, against a real broker: the suite that every source passes, columns, refusals
and bounds.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import ConfigurationError, InputError
from headrace.log.dead_letters import read_dead_letters
from headrace.sources import Source
from headrace.testing.source_contract import ROWS, SourceContract, numbered
from tests.cdc.conftest import started
from tests.servers.mqtt_broker import MqttBroker
from tests.waits import wait_until

pytest.importorskip("paho.mqtt")

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def broker() -> Iterator[MqttBroker]:
    server = MqttBroker()
    started(server)
    yield server
    server.stop()


class Sensors:
    """Publishes, and returns when the broker has the messages."""

    def __init__(self, port: int, subject: str) -> None:
        from paho.mqtt import client as mqtt

        version = mqtt.CallbackAPIVersion.VERSION2  # type: ignore[attr-defined]
        self.client = mqtt.Client(version)
        self.client.connect("127.0.0.1", port)
        self.client.loop_start()
        self.subject = subject

    def publish(self, payload: str) -> None:
        wait_until(self.client.is_connected)
        self.client.publish(self.subject, payload, qos=1).wait_for_publish(30)

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            self.publish(json.dumps(row))

    def add_bad(self) -> None:
        self.publish('{"id": "x", "name": "bad"}')

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


class TestMqtt(SourceContract):
    is_exactly_once = False
    keeps_order = False  # what was not acknowledged comes again, behind others

    @pytest.fixture
    def source(self, broker: MqttBroker, tmp_path: Path) -> Source:
        return hr.sources.mqtt(
            f"mqtt://127.0.0.1:{broker.port}/{tmp_path.name}/+",
            topic="rows",
            name=tmp_path.name,
            schema=ROWS,
        )

    @pytest.fixture
    def outside(self, source: Source, broker: MqttBroker, tmp_path: Path) -> Iterator[Sensors]:
        # A broker keeps messages only for those who have subscribed once.
        with hr.open_log(f"file:{tmp_path / 'another log'}") as log:
            source.run(log=log.address, until_caught_up=True)
        sensors = Sensors(broker.port, f"{tmp_path.name}/one")
        yield sensors
        sensors.close()

    def test_a_broker_that_restarts_is_connected_to_again(
        self, source: Source, outside: Sensors, broker: MqttBroker, log: hr.Log
    ) -> None:
        outside.add(numbered(0, 3))
        self.read(source, log)
        broker.stop_process()
        broker.start_process()
        self.read(source, log)  # subscribes again, at a broker that keeps nothing
        outside.add(numbered(3, 6))
        self.read(source, log)
        self.assert_stored(source, log, 6)


def test_a_url_without_a_topic_is_refused() -> None:
    with pytest.raises(InputError, match="no topic"):
        hr.sources.mqtt("mqtt://host", topic="rows")
    with pytest.raises(InputError, match="no broker"):
        hr.sources.from_url("mqtt:sensors", topic="rows")


def test_a_wildcard_is_part_of_the_topic() -> None:
    source = hr.sources.from_url("mqtt://host:1884/sensors/#", topic="rows")
    assert isinstance(source, Source)
    assert (source.options["subjects"], source.name) == ("sensors/#", "mqtt.host.sensors")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        yield log


def subscribed(source: Source, log: hr.Log) -> None:
    """Run a source once, so that the broker keeps messages for it."""
    source.run(log=log.address, until_caught_up=True)


def test_a_column_gets_the_topic_of_each_message(
    broker: MqttBroker, log: hr.Log, tmp_path: Path
) -> None:
    """Which sensor a value is of stands nowhere else."""
    source = hr.sources.mqtt(
        f"mqtt://127.0.0.1:{broker.port}/{tmp_path.name}/#",
        topic="readings",
        schema="sensor STRING, celsius DOUBLE, `at` TIMESTAMP",
        subject_column="sensor",
    )
    subscribed(source, log)
    for sensor, payload in (
        ("a", '{"celsius": 21.5, "at": "2026-03-01T12:00:00Z"}'),
        ("b/c", '{"celsius": 3}'),
        ("d", "[1]"),
        ("d", "no json"),
        ("d", '{"celsius": "warm"}'),
    ):
        sensors = Sensors(broker.port, f"{tmp_path.name}/{sensor}")
        sensors.publish(payload)
        sensors.close()
    source.run(log=log.address, until_caught_up=True)
    rows = log.read("readings").to_pylist()
    assert {(row["sensor"], row["celsius"]) for row in rows} == {
        (f"{tmp_path.name}/a", 21.5),
        (f"{tmp_path.name}/b/c", 3.0),
    }
    reasons = " ".join(letter["reason"] for letter in read_dead_letters(log, "readings"))
    assert len(read_dead_letters(log, "readings")) == 3
    assert f"{tmp_path.name}/d: it is no JSON object" in reasons


def test_a_message_that_is_no_json_is_a_value(
    broker: MqttBroker, log: hr.Log, tmp_path: Path
) -> None:
    source = hr.sources.mqtt(
        f"mqtt://127.0.0.1:{broker.port}/{tmp_path.name}/+",
        topic="readings",
        schema="sensor STRING, reading STRING",
        subject_column="sensor",
        value_column="reading",
    )
    subscribed(source, log)
    sensors = Sensors(broker.port, f"{tmp_path.name}/a")
    for value in ("21.5", "", "ON"):
        sensors.publish(value)
    sensors.client.publish(sensors.subject, b"\xff", qos=1).wait_for_publish(30)
    sensors.close()
    source.run(log=log.address, until_caught_up=True)
    assert [row["reading"] for row in log.read("readings").to_pylist()] == ["21.5", "", "ON"]
    assert [letter["payload"] for letter in read_dead_letters(log, "readings")] == [b"\xff"]


def test_a_wrong_password_ends_the_source(log: hr.Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for a broker that does not answer, and tried again for ever."""
    monkeypatch.setenv("MQTT_PASSWORD", "wrong")
    server = MqttBroker(users="ada:right")
    started(server)
    source = hr.sources.mqtt(
        f"mqtt://ada@127.0.0.1:{server.port}/a",
        topic="rows",
        schema=ROWS,
        password="env:MQTT_PASSWORD",
    )
    try:
        with pytest.raises(ConfigurationError, match="check user and password"):
            source.run(log=log.address, until_caught_up=True)
        monkeypatch.setenv("MQTT_PASSWORD", "right")
        source.run(log=log.address, until_caught_up=True)
    finally:
        server.stop()


def test_messages_that_wait_are_bounded(
    broker: MqttBroker, log: hr.Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of quality 0 come as fast as they are sent, however slow the log is."""
    from headrace.sources import mqtt_source

    monkeypatch.setattr(mqtt_source, "MAX_WAITING_ROWS", 5)
    source = hr.sources.mqtt(
        f"mqtt://127.0.0.1:{broker.port}/{tmp_path.name}/one", topic="rows", schema=ROWS
    )
    info = source.prepare_topic(log)
    with mqtt_source.MqttSource(source, info) as reader:
        reader.start(None)
        sensors = Sensors(broker.port, f"{tmp_path.name}/one")
        wait_until(sensors.client.is_connected)
        for row in numbered(0, 40):
            sensors.client.publish(sensors.subject, json.dumps(row), qos=0).wait_for_publish(30)
        sensors.close()
        sizes: list[int] = []
        while sum(sizes) < 40:
            rows = reader.read(5.0)
            assert rows is not None
            sizes.append(len(rows.rows))
    assert max(sizes) <= 6
