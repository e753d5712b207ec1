"""The source `mqtt`: messages of an MQTT broker.

The source has a session of its own at the broker (`clean_session` off, under the name of the
source): the broker keeps what is not acknowledged, also while nobody reads. A message is
acknowledged when its row is durable in the log. One whose acknowledgement was lost comes again, and
is stored again: at least once.

Messages wait in a buffer of bounded size. When it is full, the connection is not read until there
is room; the broker then keeps messages of quality 1 and 2, and drops those of quality 0.
"""

from __future__ import annotations

import queue
import ssl
import time
from collections import deque
from contextlib import suppress
from threading import Event
from typing import Any
from urllib.parse import unquote, urlsplit

from headrace.errors import ConfigurationError, MissingExtra, RetryError
from headrace.log.dead_letters import DeadLetter
from headrace.log.values import TopicInfo
from headrace.secrets import secret
from headrace.sources.base import RowSource, Source, SourceRows
from headrace.types.json_codec import JsonMismatch, parse_json

try:
    from paho.mqtt import client as mqtt
except ImportError as error:
    raise MissingExtra("paho-mqtt", "mqtt") from error

CONNECT_S = 10.0
QUIET_S = 0.5
"""How long no message has come when everything counts as read: a broker does not say so."""
MAX_ROWS = 5_000
MAX_WAITING_ROWS = 10_000
MAX_WAITING_BYTES = 64 << 20
DEFAULT_PORTS = {"mqtt": 1883, "mqtts": 8883}
_REFUSALS = ("not authorized", "bad user name", "bad username", "identifier", "protocol", "banned")
"""Words in a broker's answer to a connection that somebody must act upon."""


class MqttSource(RowSource):
    def __init__(self, source: Source, topic: TopicInfo) -> None:
        super().__init__(source, topic)
        self._url = urlsplit(source.options["url"])
        self._subject: str | None = source.options["subject_column"]
        self._value: str | None = source.options["value_column"]
        self._received: queue.SimpleQueue[mqtt.MQTTMessage] = queue.SimpleQueue()
        self._taken_bytes = self._received_bytes = 0
        self._answers: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        """What the broker answers to the connection and the subscription; "" if it accepts."""
        self._unacknowledged: deque[tuple[int, mqtt.MQTTMessage]] = deque()
        self._closed = Event()
        self._room = Event()
        self._count = 0
        self._quiet_since_s = time.monotonic()
        self._client = mqtt.Client(
            mqtt.CallbackAPIVersion.VERSION2,  # type: ignore[attr-defined]
            f"headrace.{source.name}",  # the broker keeps messages under this name
            clean_session=False,
            manual_ack=True,
            reconnect_on_failure=False,  # the loop of sources begins another session
        )
        self._client.on_message = lambda _client, _data, message: self._keep(message)
        self._client.on_connect = lambda _c, _d, _flags, code, _p: self._connected(code)
        self._client.on_subscribe = lambda _c, _d, _id, codes, _p: self._answers.put(
            ("subscribe", str(codes[0]) if codes[0].is_failure else "")
        )

    def _connected(self, code: Any) -> None:
        self._answers.put(("connect", str(code) if code.is_failure else ""))
        if not code.is_failure:
            self._client.subscribe(self.source.options["subjects"], qos=1)

    def _keep(self, message: mqtt.MQTTMessage) -> None:
        """Called in the thread that reads the connection: it waits here while there is no room."""
        while not self._closed.is_set() and (
            self._received.qsize() >= MAX_WAITING_ROWS
            or self._received_bytes - self._taken_bytes >= MAX_WAITING_BYTES
        ):
            self._room.clear()
            self._room.wait(1.0)
        self._received_bytes += len(message.payload)
        self._received.put(message)

    def start(self, position: int | None) -> None:
        self._count = position or 0
        host = self._url.hostname or "localhost"
        if self._url.username:
            password = self.source.options["password"] or unquote(self._url.password or "")
            self._client.username_pw_set(
                unquote(self._url.username), secret("password", password) or None
            )
        if self._url.scheme == "mqtts":
            self._client.tls_set(ca_certs=self.source.options["ca"])
        try:
            self._client.connect(host, self._url.port or DEFAULT_PORTS[self._url.scheme])
            self._client.loop_start()
            for step in ("connect", "subscribe"):
                answered, refusal = self._answers.get(timeout=CONNECT_S)
                if refusal:
                    self._raise_refusal(answered, refusal)
                assert answered == step
        except ssl.SSLCertVerificationError as error:
            raise ConfigurationError(
                f"The certificate of {host} is not trusted: {error.verify_message}.",
                fix="give the authority that signed it, with ca='PATH'.",
            ) from error
        except queue.Empty:
            raise RetryError(f"The MQTT broker {host} does not answer.") from None
        except OSError as error:
            raise RetryError(f"The MQTT broker {host} cannot be reached: {error}.") from error
        self._quiet_since_s = time.monotonic()

    def _raise_refusal(self, step: str, refusal: str) -> None:
        text = f"The MQTT broker {self._url.hostname} refuses: {refusal}."
        if step == "subscribe" or any(word in refusal.lower() for word in _REFUSALS):
            raise ConfigurationError(
                text,
                fix="check user and password, and whether this user may read the broker's topic.",
            )
        raise RetryError(text)

    def read(self, timeout_s: float) -> SourceRows | None:
        if not self._client.is_connected():
            raise RetryError("The connection to the MQTT broker broke.")
        messages: list[mqtt.MQTTMessage] = []
        with suppress(queue.Empty):
            while len(messages) < MAX_ROWS:
                message = self._received.get(timeout=0.0 if messages else timeout_s)
                self._taken_bytes += len(message.payload)
                self._count += 1
                self._unacknowledged.append((self._count, message))
                messages.append(message)
        self._room.set()
        if not messages:
            return None
        self._quiet_since_s = time.monotonic()
        where = str(self.source.options["subjects"])
        if self._subject is None and self._value is None:
            payloads = [bytes(message.payload) for message in messages]
            return SourceRows(payloads, position=self._count, where=where)
        rows: list[dict[str, Any]] = []
        letters: list[DeadLetter] = []
        for message in messages:
            try:
                rows.append(self._row(message))
            except (JsonMismatch, UnicodeDecodeError) as error:
                place, reason = f"source {self.source.name}", f"{message.topic}: {error}"
                letters.append(DeadLetter(place, reason, payload=bytes(message.payload)))
        return SourceRows(
            rows, position=self._count, are_json=True, where=where, dead_letters=letters
        )

    def _row(self, message: mqtt.MQTTMessage) -> dict[str, Any]:
        payload = bytes(message.payload)
        row = {self._value: payload.decode()} if self._value is not None else parse_json(payload)
        if not isinstance(row, dict):
            raise JsonMismatch("it is no JSON object")
        return row if self._subject is None else {**row, self._subject: message.topic}

    def is_caught_up(self) -> bool:
        return time.monotonic() - self._quiet_since_s > QUIET_S

    def confirm(self, position: int) -> None:
        while self._unacknowledged and self._unacknowledged[0][0] <= position:
            message = self._unacknowledged.popleft()[1]
            self._client.ack(message.mid, message.qos)

    def close(self) -> None:
        self._closed.set()
        self._room.set()
        self._client.disconnect()
        self._client.loop_stop()
