"""The target `amqp`: each row is published to an exchange of RabbitMQ, at least once
(`noted_target`), and counts as sent when the broker has confirmed it.

A message is the row as JSON; its `message_id` says which row it is, and its headers have the topic
and the kind of change. What no queue would get is refused; what a full queue turns back is sent
again.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from headrace.amqp import TIMEOUT_S, driver, failures, parameters_of, shown, unreachable
from headrace.errors import NotSupported, RetryError, TargetUnavailable
from headrace.sinks.at_least_once import NotedTarget
from headrace.sinks.base import Applied, Refusal, Shape, SinkSpec

# Publishes to RabbitMQ with confirms, many messages at a time: they are sent one after the other,
# and then all confirmations are waited for. The target `amqp` uses it.
#
# pika's blocking connection waits for the confirmation of each message before the next; here its
# other connection is driven, by callbacks, in the caller's thread: `_until` runs its loop until
# something is so.


CONFIRM_S = 60.0
"""How long the confirmations of one call are waited for."""
MAX_BYTES_IN_FLIGHT = 8 << 20
"""Bodies that are published before their confirmations are waited for."""
PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6)
"""Before each further attempt with what the broker turned back: a queue that is full says no until
somebody has read from it.
"""
UNROUTABLE = "no queue would get it"


@dataclass(frozen=True)
class Message:
    id: str
    body: bytes
    headers: dict[str, str]


class Publisher:
    """One connection to one exchange. It belongs to one thread, and is opened when it is first
    needed, and again after it has broken off.
    """

    def __init__(self, url: str, exchange: str) -> None:
        self._url, self._exchange, self._pika = url, exchange, driver()
        self._breaks = failures()
        self._connection: Any = None
        self._confirmed: set[str] = set()
        """What the broker has taken of a call that failed: if it is made again, that is not sent
        again.
        """
        self._forget()

    def _forget(self) -> None:
        self._channel: Any = None
        self._failure: Exception | None = None
        self._is_closing = False
        self._tags = 0
        self._waiting: dict[int, str] = {}
        """Messages that are not confirmed yet, by the number that the broker knows them by: their
        ids.
        """
        self._refused: dict[str, str] = {}
        self._turned_back: set[str] = set()

    # The connection

    def open(self) -> None:
        """Be connected, with a channel that confirms. TargetUnavailable if the broker is away or
        the exchange is not there; ConfigurationError if it does not want us.
        """
        if self._connection is not None:
            self._look_around()
            if self._channel is not None and self._failure is None:
                return
        self.close()
        self._forget()
        self._connection = self._pika.SelectConnection(
            parameters_of(self._url),
            on_open_callback=self._on_open,
            on_open_error_callback=self._on_closed,
            on_close_callback=self._on_closed,
        )
        try:
            self._until(lambda: self._channel is not None, TIMEOUT_S)
        except self._pika.exceptions.ChannelClosed as error:
            self.close()
            raise TargetUnavailable(
                f"The exchange {self._exchange!r} cannot be used: {error}.",
                fix="see that it is there.",
            ) from error
        except self._breaks as error:
            self.close()
            said = unreachable(self._url, error)
            raise (
                TargetUnavailable(said.message, fix=said.fix)
                if isinstance(said, RetryError)
                else said
            ) from None

    def close(self) -> None:
        connection = self._connection
        if connection is None:
            return
        if connection.is_open:
            self._failure, self._is_closing = None, True
            with contextlib.suppress(*self._breaks):
                connection.close()
                self._until(lambda: bool(connection.is_closed), TIMEOUT_S)
        self._look_around()  # the socket is closed by what the loop was asked to do last
        self._connection = None
        connection.ioloop.close()

    def _look_around(self) -> None:
        """Hear what came while nobody listened: an idle connection may have been closed."""
        self._connection.ioloop.call_later(0, self._connection.ioloop.stop)
        self._connection.ioloop.start()

    def _until(self, is_so: Callable[[], bool], longest_s: float) -> None:
        loop = self._connection.ioloop
        timer = loop.call_later(
            longest_s, lambda: self._fail(TimeoutError(f"nothing came for {longest_s:g} seconds"))
        )
        try:
            while not is_so() and self._failure is None:
                loop.start()
        finally:
            loop.remove_timeout(timer)
        if self._failure is not None and not is_so():
            raise self._failure

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._connection.ioloop.stop()

    def _on_open(self, connection: Any) -> None:
        connection.channel(on_open_callback=self._on_channel)

    def _on_closed(self, connection: Any, error: Any) -> None:
        self._failure, self._channel = (
            (error if isinstance(error, Exception) else ConnectionError(str(error))),
            None,
        )
        connection.ioloop.stop()

    def _on_channel(self, channel: Any) -> None:
        channel.add_on_close_callback(
            lambda _channel, error: None if self._is_closing else self._fail(error)
        )
        channel.add_on_return_callback(self._on_returned)
        channel.confirm_delivery(
            self._on_confirmed, callback=lambda _frame: self._check_exchange(channel)
        )

    def _check_exchange(self, channel: Any) -> None:
        if self._exchange:
            channel.exchange_declare(
                self._exchange, passive=True, callback=lambda _frame: self._on_ready(channel)
            )
        else:
            self._on_ready(channel)

    def _on_ready(self, channel: Any) -> None:
        self._channel = channel
        channel.connection.ioloop.stop()

    # Messages

    def publish(self, routing_key: str, messages: Sequence[Message]) -> dict[str, str]:
        """All of them, confirmed; returns what no queue would get, by id, and why.
        TargetUnavailable if it breaks off, or goes on to turn messages back.
        """
        self.open()
        self._refused = {}
        try:
            left = self._publish_all(
                routing_key, [each for each in messages if each.id not in self._confirmed]
            )
            for pause_s in PAUSES_S:
                if not left:
                    break
                self._pause(pause_s)
                left = self._publish_all(routing_key, left)
        except self._breaks as error:
            self.close()
            raise TargetUnavailable(
                f"{shown(self._url)} breaks off: {str(error) or type(error).__name__}.",
                fix="see that RabbitMQ runs.",
            ) from error
        if left:
            raise TargetUnavailable(
                f"{shown(self._url)} turns back {len(left):,} of {len(messages):,} messages: a"
                " queue is full, it seems.",
                fix="see that its consumers keep up.",
            )
        self._confirmed.clear()
        return self._refused

    def _publish_all(self, routing_key: str, messages: Sequence[Message]) -> list[Message]:
        """Returns what was turned back."""
        self._turned_back, in_flight = set(), 0
        for message in messages:
            if in_flight + len(message.body) > MAX_BYTES_IN_FLIGHT:
                self._until(lambda: not self._waiting, CONFIRM_S)
                in_flight = 0
            self._publish(routing_key, message)
            in_flight += len(message.body)
        self._until(lambda: not self._waiting, CONFIRM_S)
        return [message for message in messages if message.id in self._turned_back]

    def _pause(self, pause_s: float) -> None:
        """The connection is looked after meanwhile."""
        loop = self._connection.ioloop
        loop.call_later(pause_s, loop.stop)
        loop.start()
        if self._failure is not None:
            raise self._failure

    def _publish(self, routing_key: str, message: Message) -> None:
        properties = self._pika.BasicProperties(
            message_id=message.id,
            content_type="application/json",
            delivery_mode=self._pika.DeliveryMode.Persistent,
            headers=message.headers,
        )
        self._channel.basic_publish(
            self._exchange, routing_key, message.body, properties, mandatory=True
        )
        self._tags += 1
        self._waiting[self._tags] = message.id

    def _on_returned(self, _channel: Any, _method: Any, properties: Any, _body: bytes) -> None:
        """No queue would get it. The confirmation comes after this."""
        self._refused[properties.message_id] = UNROUTABLE

    def _on_confirmed(self, frame: Any) -> None:
        """Of one message, or of all up to it."""
        last = frame.method.delivery_tag
        tags = [tag for tag in self._waiting if tag <= last] if frame.method.multiple else [last]
        for tag in tags:
            identity = self._waiting.pop(tag)
            if isinstance(frame.method, self._pika.spec.Basic.Nack):
                self._turned_back.add(identity)
            elif identity not in self._refused:
                self._confirmed.add(identity)
        if not self._waiting:
            self._connection.ioloop.stop()


MAX_IN_FLIGHT = 500
"""Messages that are published before their confirmations are waited for; the publisher bounds their
bytes too.
"""


class AmqpTarget(NotedTarget):
    def __init__(self, sink: SinkSpec, shape: Shape) -> None:
        options = sink.options
        url, exchange = options["url"], options["exchange"]
        place = f"{shown(url)} {exchange} {options['routing_key']}"
        identity = (
            sink.name
            or f"{sink.table or shape.topic}.amqp.{hashlib.sha256(place.encode()).hexdigest()[:12]}"
        )
        super().__init__(sink, shape, identity, request_rows=MAX_IN_FLIGHT)
        self._routing_key = options["routing_key"] or self.table
        self._publisher = Publisher(url, exchange)
        self._turned_back: list[Refusal] = []

    def close(self) -> None:
        self._publisher.close()

    def prepare(self) -> None:
        """The exchange must be there; what is sent to it is the broker's business."""
        self._publisher.open()

    def _send(self, rows: pa.Table, refused: list[Refusal]) -> None:
        self._turned_back = []
        super()._send(rows, refused)
        refused += self._turned_back

    def _post(self, rows: pa.Table) -> None:
        """All of them; each that the broker does not take is refused for itself, since the others
        are there.
        """
        messages = self._messages(rows)
        found = [
            Message(identity, text, {"topic": self.shape.topic, "change": change})
            for identity, _, _, change, text in messages
        ]
        refused = self._publisher.publish(self._routing_key, found)
        for identity, partition, offset, _, _ in messages:
            if (why := refused.get(identity)) is None:
                self._taken()
                continue
            said = f"the broker does not take it: {why}"
            self._turned_back.append(Refusal(partition, offset, said))
            self._count_refused(said)

    def contents(self) -> tuple[Applied | None, Iterator[pa.Table]]:
        raise NotSupported(
            "What was published cannot be read back, so there is nothing to compare with the log.",
            fix="compare at the consumer, by the messages' ids.",
        )
