"""The target `amqp`: each row is published to an exchange of RabbitMQ, at least once
(`at_least_once`), and counts as sent when the broker has confirmed it.

A message is the row as JSON. Its `message_id` identifies the row, and its headers have the topic
and the kind of change. A message that no queue would get is refused; one that a full queue rejects
is published again.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from headrace.amqp import (
    TIMEOUT_S,
    connection_errors,
    connection_failure,
    connection_parameters,
    driver,
    shown_address,
)
from headrace.errors import NotSupported, RetryError, TargetUnavailable
from headrace.retry import Backoff
from headrace.sinks.at_least_once import AtLeastOnceTarget
from headrace.sinks.base import Refusal, SinkSpec
from headrace.sinks.batch import TargetShape
from headrace.sinks.checkpoint import SinkCheckpoint

CONFIRM_S = 60.0
"""How long to wait for the confirmations of one call."""
MAX_BYTES_IN_FLIGHT = 8 << 20
"""Bodies that are published before their confirmations are waited for."""
MAX_IN_FLIGHT = 500
"""Messages that are published before their confirmations are waited for."""
MAX_ATTEMPTS = 6
"""How often a message that the broker rejects is published: a full queue rejects messages until a
consumer has taken some.
"""
REJECTED_BACKOFF = Backoff(first_s=0.1, longest_s=1.6, jitter=0.0)
UNROUTABLE = "no queue would get it"


@dataclass(frozen=True)
class AmqpMessage:
    id: str
    body: bytes
    headers: dict[str, str]


class AmqpPublisher:
    """Publishes to one exchange with publisher confirms, many messages at a time.

    pika's blocking connection waits for the confirmation of each message before it publishes the
    next. This class drives pika's asynchronous connection in the caller's thread instead:
    `_run_until` runs its event loop until a condition holds. The connection is opened when it is
    first needed, and again after it was lost.
    """

    def __init__(self, url: str, exchange: str) -> None:
        self._url, self._exchange, self._pika = url, exchange, driver()
        self._connection_errors = connection_errors()
        self._connection: Any = None
        self._confirmed: set[str] = set()
        """Ids that the broker confirmed in a call that then failed. They are skipped when the call
        is repeated.
        """
        self._reset()

    def _reset(self) -> None:
        self._channel: Any = None
        self._failure: Exception | None = None
        self._is_closing = False
        self._tags = 0
        self._unconfirmed: dict[int, str] = {}
        """The ids of messages that are not confirmed yet, by delivery tag."""
        self._refused: dict[str, str] = {}
        self._rejected: set[str] = set()

    # The connection

    def open(self) -> None:
        """Connect, unless there is a connection that works.

        Raises:
            TargetUnavailable: The broker is away, or the exchange does not exist.
            ConfigurationError: The broker refuses the user.
        """
        if self._connection is not None:
            self._process_events()
            if self._channel is not None and self._failure is None:
                return
        self.close()
        self._reset()
        self._connection = self._pika.SelectConnection(
            connection_parameters(self._url),
            on_open_callback=self._on_open,
            on_open_error_callback=self._on_closed,
            on_close_callback=self._on_closed,
        )
        try:
            self._run_until(lambda: self._channel is not None, TIMEOUT_S)
        except self._pika.exceptions.ChannelClosed as error:
            self.close()
            raise TargetUnavailable(
                f"The exchange {self._exchange!r} cannot be used: {error}.",
                fix="see that it is there.",
            ) from error
        except self._connection_errors as error:
            self.close()
            failure = connection_failure(self._url, error)
            if isinstance(failure, RetryError):
                raise TargetUnavailable(failure.message, fix=failure.fix) from None
            raise failure from None

    def close(self) -> None:
        connection = self._connection
        if connection is None:
            return
        if connection.is_open:
            self._failure, self._is_closing = None, True
            with contextlib.suppress(*self._connection_errors):
                connection.close()
                self._run_until(lambda: bool(connection.is_closed), TIMEOUT_S)
        self._process_events()  # the socket is closed by the last callback of the loop
        self._connection = None
        connection.ioloop.close()

    def _process_events(self) -> None:
        """Handle what has arrived: the broker may have closed an idle connection."""
        self._connection.ioloop.call_later(0, self._connection.ioloop.stop)
        self._connection.ioloop.start()

    def _run_until(self, condition: Callable[[], bool], longest_s: float) -> None:
        """Run the event loop until a condition holds. Raises what ended the connection, or
        TimeoutError.
        """
        loop = self._connection.ioloop
        timer = loop.call_later(
            longest_s, lambda: self._fail(TimeoutError(f"nothing came for {longest_s:g} seconds"))
        )
        try:
            while not condition() and self._failure is None:
                loop.start()
        finally:
            loop.remove_timeout(timer)
        if self._failure is not None and not condition():
            raise self._failure

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._connection.ioloop.stop()

    def _on_open(self, connection: Any) -> None:
        connection.channel(on_open_callback=self._on_channel)

    def _on_closed(self, connection: Any, error: Any) -> None:
        self._failure = error if isinstance(error, Exception) else ConnectionError(str(error))
        self._channel = None
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

    def publish(self, routing_key: str, messages: Sequence[AmqpMessage]) -> dict[str, str]:
        """Publish messages and wait until the broker has confirmed them.

        Returns:
            The ids of messages that no queue would get, each with the reason.

        Raises:
            TargetUnavailable: The connection is lost, or the broker goes on rejecting messages.
        """
        self.open()
        self._refused = {}
        try:
            left = [message for message in messages if message.id not in self._confirmed]
            left = self._publish_all(routing_key, left)
            for attempt in range(1, MAX_ATTEMPTS):
                if not left:
                    break
                # Wait, while the connection's heartbeats go on.
                pause_s = REJECTED_BACKOFF.pause_s(attempt)
                loop = self._connection.ioloop
                loop.call_later(pause_s, loop.stop)
                loop.start()
                if self._failure is not None:
                    raise self._failure
                left = self._publish_all(routing_key, left)
        except self._connection_errors as error:
            self.close()
            raise TargetUnavailable(
                f"{shown_address(self._url)}: the connection is lost:"
                f" {str(error) or type(error).__name__}.",
                fix="see that RabbitMQ runs.",
            ) from error
        if left:
            raise TargetUnavailable(
                f"{shown_address(self._url)} rejects {len(left):,} of {len(messages):,} messages: a"
                " queue seems to be full.",
                fix="see that its consumers keep up.",
            )
        self._confirmed.clear()
        return self._refused

    def _publish_all(self, routing_key: str, messages: Sequence[AmqpMessage]) -> list[AmqpMessage]:
        """Publish messages. Returns those that the broker rejects."""
        self._rejected = set()
        in_flight = 0
        for message in messages:
            if in_flight + len(message.body) > MAX_BYTES_IN_FLIGHT:
                self._run_until(lambda: not self._unconfirmed, CONFIRM_S)
                in_flight = 0
            self._publish(routing_key, message)
            in_flight += len(message.body)
        self._run_until(lambda: not self._unconfirmed, CONFIRM_S)
        return [message for message in messages if message.id in self._rejected]

    def _publish(self, routing_key: str, message: AmqpMessage) -> None:
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
        self._unconfirmed[self._tags] = message.id

    def _on_returned(self, _channel: Any, _method: Any, properties: Any, _body: bytes) -> None:
        """The broker returns a message that no queue would get, and confirms it afterwards."""
        self._refused[properties.message_id] = UNROUTABLE

    def _on_confirmed(self, frame: Any) -> None:
        """The broker has taken or rejected one message, or all up to it."""
        tags = [frame.method.delivery_tag]
        if frame.method.multiple:
            tags = [tag for tag in self._unconfirmed if tag <= frame.method.delivery_tag]
        for tag in tags:
            message_id = self._unconfirmed.pop(tag)
            if isinstance(frame.method, self._pika.spec.Basic.Nack):
                self._rejected.add(message_id)
            elif message_id not in self._refused:
                self._confirmed.add(message_id)
        if not self._unconfirmed:
            self._connection.ioloop.stop()


class AmqpTarget(AtLeastOnceTarget):
    def __init__(self, sink: SinkSpec, shape: TargetShape) -> None:
        options = sink.options
        url, exchange = options["url"], options["exchange"]
        location = f"{shown_address(url)} {exchange} {options['routing_key']}"
        digest = hashlib.sha256(location.encode()).hexdigest()[:12]
        identity = sink.name or f"{sink.table or shape.topic}.amqp.{digest}"
        super().__init__(sink, shape, identity, request_rows=MAX_IN_FLIGHT)
        self._routing_key = options["routing_key"] or self.table
        self._publisher = AmqpPublisher(url, exchange)
        self._unroutable: list[Refusal] = []

    def close(self) -> None:
        self._publisher.close()

    def prepare(self) -> None:
        """Check that the exchange exists. Queues and bindings are up to the broker."""
        self._publisher.open()

    def _send(self, rows: pa.Table, refused: list[Refusal]) -> None:
        self._unroutable = []
        super()._send(rows, refused)
        refused += self._unroutable

    def _post(self, rows: pa.Table) -> None:
        """Publish rows. Those that the broker does not take are refused one by one, since the
        others are published.
        """
        outgoing = self._outgoing(rows)
        messages = [
            AmqpMessage(row.id, row.json, {"topic": self.shape.topic, "change": row.change})
            for row in outgoing
        ]
        refused = self._publisher.publish(self._routing_key, messages)
        for row in outgoing:
            if row.id not in refused:
                self._record_taken()
                continue
            reason = f"the broker does not take it: {refused[row.id]}"
            self._unroutable.append(Refusal(row.partition, row.offset, reason))
            self._record_refused(reason)

    def contents(self) -> tuple[SinkCheckpoint | None, Iterator[pa.Table]]:
        raise NotSupported(
            "Published messages cannot be read back, so they cannot be compared with the log.",
            fix="compare at the consumer, by the messages' ids.",
        )
