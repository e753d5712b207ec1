"""The example of a source from outside the package, against a real broker: it passes the suite that
every source passes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import ConfigurationError
from headrace.sources import Source
from headrace.testing.source_contract import ROWS, SourceContract, numbered
from tests.cdc.conftest import started
from tests.servers.mqtt_broker import MqttBroker
from tests.waits import wait_until

pytest.importorskip("paho.mqtt")

from plugins.headrace_mqtt import headrace_mqtt

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
        return headrace_mqtt.source(
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
    with pytest.raises(ConfigurationError, match="no topic"):
        headrace_mqtt.source("mqtt://host", topic="rows")


def test_a_wildcard_is_part_of_the_topic() -> None:
    source = headrace_mqtt.source("mqtt://host:1884/sensors/#", topic="rows")
    assert source.options["subjects"] == "sensors/#"
