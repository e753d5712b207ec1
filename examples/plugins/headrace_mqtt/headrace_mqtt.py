"""A source of rows that Headrace does not have: topics of an MQTT broker.

After `pip install ./examples/plugins/headrace_mqtt`, the command line knows its URLs:

    headrace capture "mqtt://localhost/sensors/#" --topic readings --log file:data

Each message is a JSON object. It is acknowledged when its row is durable, and the broker keeps what
is not acknowledged, also while nobody reads: no message is lost. MQTT has no positions, so a
message whose acknowledgement was lost comes again, and is stored again: at least once.
"""

import queue
import time
from collections import deque
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from paho.mqtt import client as mqtt

from headrace.errors import ConfigurationError, RetryError
from headrace.log.values import TopicInfo
from headrace.secrets import secret
from headrace.sources import RowSource, Source, SourceRows

CONNECT_S, QUIET_S, MAX_ROWS = 10.0, 0.5, 5_000


def source(url: str, *, topic: str, name: str | None = None, **settings: Any) -> Source:
    """Declare the source of `mqtt://user@host/sensors/+`; `password` is env:NAME or file:PATH."""
    subjects = url.partition("://")[2].partition("/")[2]  # a # is a wildcard here, no fragment
    if not subjects:
        raise ConfigurationError(f"{url} names no topic.", fix="write mqtt://HOST/TOPIC.")
    options = {"url": url, "subjects": subjects, "password": settings.pop("password", "")}
    name = name or f"mqtt.{urlsplit(url).hostname}"
    given = {"kind": "mqtt", "name": name, "topic": topic, "options": options, **settings}
    return Source(reader=MqttSource, **given)


class MqttSource(RowSource):
    def __init__(self, source: Source, topic: TopicInfo) -> None:
        super().__init__(source, topic)
        self._received: queue.SimpleQueue[mqtt.MQTTMessage] = queue.SimpleQueue()
        self._subscribed: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._unacknowledged: deque[tuple[int, mqtt.MQTTMessage]] = deque()
        self._client = mqtt.Client(
            mqtt.CallbackAPIVersion.VERSION2,  # type: ignore[attr-defined]
            f"headrace.{source.name}",  # the broker keeps messages under this name
            clean_session=False,
            manual_ack=True,
        )
        self._client.on_message = lambda _client, _data, message: self._received.put(message)
        self._client.on_subscribe = lambda _c, _d, _id, codes, _p: self._subscribed.put(codes)
        self._client.on_connect = lambda client, _d, _flags, code, _p: (
            code.is_failure or client.subscribe(source.options["subjects"], qos=1)
        )

    def start(self, position: int | None) -> None:
        self._count = position or 0
        url = urlsplit(self.source.options["url"])
        if url.username:
            password = secret("password", self.source.options["password"])
            self._client.username_pw_set(url.username, password or None)
        try:
            self._client.connect(url.hostname or "localhost", url.port or 1883)
            self._client.loop_start()
            (code,) = self._subscribed.get(timeout=CONNECT_S)
        except (OSError, queue.Empty) as error:
            raise RetryError(f"{url.hostname} does not answer: {error}.") from error
        if code.is_failure:
            raise ConfigurationError(f"The broker refuses: {code}.", fix="check topic and user.")
        self._quiet_since_s = time.monotonic()

    def read(self, timeout_s: float) -> SourceRows | None:
        if not self._client.is_connected():
            raise RetryError("The connection to the broker broke.")
        rows: list[bytes] = []
        with suppress(queue.Empty):
            while len(rows) < MAX_ROWS:
                message = self._received.get(timeout=0.0 if rows else timeout_s)
                self._count += 1
                self._unacknowledged.append((self._count, message))
                rows.append(bytes(message.payload))
        if not rows:
            return None
        self._quiet_since_s = time.monotonic()
        return SourceRows(rows, position=self._count)

    def is_caught_up(self) -> bool:
        return time.monotonic() - self._quiet_since_s > QUIET_S

    def confirm(self, position: int) -> None:
        while self._unacknowledged and self._unacknowledged[0][0] <= position:
            message = self._unacknowledged.popleft()[1]
            self._client.ack(message.mid, message.qos)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()
