"""The target `amqp`: each row is published to an exchange of RabbitMQ, at least once (`noted_target`), and counts as sent when the broker has confirmed it.

A message is the row as JSON; its `message_id` says which row it is, and its headers have the topic and the kind of change. What no queue would get is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from headrace.amqp_connection import connected, driver, shown
from headrace.errors import NotSupported, RetryError, TargetUnavailable
from headrace.sinks.applied import Applied
from headrace.sinks.declared import Sink
from headrace.sinks.noted_target import NotedTarget
from headrace.sinks.shape import Shape
from headrace.sinks.target import RowsRefused

_PERSISTENT = 2


class AmqpTarget(NotedTarget):
    def __init__(self, sink: Sink, shape: Shape) -> None:
        options = sink.options
        self._url, self._exchange = options["url"], options["exchange"]
        place = f"{shown(self._url)} {self._exchange} {options['routing_key']}"
        identity = sink.name or f"{sink.table or shape.topic}.amqp.{hashlib.sha256(place.encode()).hexdigest()[:12]}"
        super().__init__(sink, shape, identity, request_rows=1)
        self._routing_key = options["routing_key"] or self.table
        self._pika = driver()
        self._connection: Any = None
        self._channel: Any = None

    def close(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None and connection.is_open:
            try:
                connection.close()
            except self._pika.exceptions.AMQPError:
                return  # it has gone by itself

    def prepare(self) -> None:
        """The exchange must be there; what is sent to it is the broker's business."""
        self._ready()

    def _ready(self) -> Any:
        if self._channel is None or not self._channel.is_open:
            self.close()
            try:
                self._connection = connected(self._url)
                self._channel = self._connection.channel()
                self._channel.confirm_delivery()
                if self._exchange:
                    self._channel.exchange_declare(self._exchange, passive=True)
            except RetryError as error:
                raise TargetUnavailable(error.message, fix=error.fix) from error
            except self._pika.exceptions.AMQPError as error:
                self.close()
                raise TargetUnavailable(f"The exchange {self._exchange!r} cannot be used: {error}.", fix="see that it is there.") from error
        return self._channel

    def _post(self, rows: pa.Table) -> None:
        """One row: what is refused then stands alone."""
        ((identity, _, _, change, text),) = self._messages(rows)
        properties = self._pika.BasicProperties(
            message_id=identity, content_type="application/json", delivery_mode=_PERSISTENT, headers={"topic": self.shape.topic, "change": change}
        )
        try:
            self._ready().basic_publish(self._exchange, self._routing_key, text, properties, mandatory=True)
        except (self._pika.exceptions.UnroutableError, self._pika.exceptions.NackError) as error:
            said = f"the broker does not take it: {'no queue would get it' if isinstance(error, self._pika.exceptions.UnroutableError) else 'it said no'}"
            self._count_refused(said)
            raise RowsRefused(said) from error
        except (self._pika.exceptions.AMQPError, OSError) as error:
            self.close()
            raise TargetUnavailable(f"{shown(self._url)} breaks off: {str(error) or type(error).__name__}.", fix="see that RabbitMQ runs.") from error
        self._taken()

    def contents(self) -> tuple[Applied | None, Iterator[pa.Table]]:
        raise NotSupported("What was published cannot be read back, so there is nothing to compare with the log.", fix="compare at the consumer, by the messages' ids.")
