"""The AMQP gateway: reads a queue of RabbitMQ. Messages are acknowledged when their rows are
durable.

A message that was not acknowledged when the connection, this process or the broker ends is
delivered again. One whose `message_id` is in the topic already is acknowledged and left out.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from typing import Any

from headrace.amqp import connect, driver
from headrace.connector import BACKOFF
from headrace.errors import RetryError
from headrace.gateways.base import (
    GatewaySpec,
    ThreadedGatewayServer,
    now_us,
    parse_content,
    row_count,
)
from headrace.gateways.inbox import Fate, Submission, SubmissionResult
from headrace.log.api import Log

logger = logging.getLogger("headrace.gateways")
POLL_S = 0.02
REFUSED_PAUSE_S = 0.2
"""How long a refused message waits before it goes back into the queue. RabbitMQ delivers it again
at once, and without a pause both sides would do nothing else.
"""


class AmqpGatewayServer(ThreadedGatewayServer):
    """Consumes one queue."""

    has_ids = True

    def __init__(self, gateway: GatewaySpec, log: Log) -> None:
        super().__init__(gateway, log)
        self._url = gateway.options["url"]
        self._queue = gateway.options["queue"]
        self._done: deque[tuple[Any, int, SubmissionResult]] = deque()
        """Channel, delivery tag and result of messages to acknowledge. It is bounded by `prefetch`,
        as is `_refused`: the broker sends no more before these are acknowledged.
        """
        self._refused: deque[tuple[Any, int, float]] = deque()
        """Channel, delivery tag and time of messages that go back into the queue."""
        self._messages = self._redelivered = self._connections = 0
        self._pika = driver()

    def start(self) -> None:
        """Connect here, so that whoever starts the gateway sees what is wrong."""
        self._first_connection: Any = self._consume()
        self.address = f"queue {self._queue}"
        super().start()

    def details(self) -> dict[str, int]:
        return {
            "messages": self._messages,
            "redelivered": self._redelivered,
            "connections": self._connections,
        }

    def _consume(self) -> Any:
        """Return a connection with a channel that consumes the queue."""
        connection = connect(self._url)
        try:
            channel = connection.channel()
            channel.queue_declare(
                self._queue, durable=True, passive=not self.gateway.options["declare"]
            )
            channel.basic_qos(prefetch_count=self.gateway.options["prefetch"])
            channel.basic_consume(self._queue, self._on_message)
        except self._pika.exceptions.AMQPError as error:
            connection.close()
            raise RetryError(
                f"The queue {self._queue!r} cannot be read: {error}.",
                fix="see that it exists and is durable; declare=True creates it.",
            ) from None
        self._connections += 1
        return connection

    def receive(self) -> None:
        failures = 0
        connection = self._first_connection
        while not self.stopped.is_set():
            try:
                connection = connection or self._consume()
                while not self.stopped.is_set() and not self.inbox.ended.is_set():
                    connection.process_data_events(POLL_S)
                    self._acknowledge()
                    failures = 0
                break
            except (self._pika.exceptions.AMQPError, RetryError, OSError) as error:
                connection = None
                failures += 1
                self.counters.record_failure(f"RabbitMQ: {error or type(error).__name__}")
                logger.warning("The gateway %s lost its connection: %s", self.gateway.name, error)
                self.stopped.wait(BACKOFF.pause_s(failures))
        self._close_connection(connection)

    def _on_message(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        self._messages += 1
        self._redelivered += bool(method.redelivered)
        message_id = _text(properties.message_id)
        metadata = {
            "message_id": message_id,
            "routing_key": _text(method.routing_key),
            "exchange": _text(method.exchange),
            "content_type": _text(properties.content_type),
            "headers": {
                _text(name): _text(value) for name, value in (properties.headers or {}).items()
            },
        }
        content = parse_content(body, self.gateway.options["format"], metadata)
        submission = Submission(
            topic=self.gateway.topics[0],
            content=content,
            rows=row_count(content),
            size=len(body),
            received_us=now_us(),
            id=message_id or None,
            payload=body,
            done=lambda result: self._done.append((channel, method.delivery_tag, result)),
        )
        self.inbox.submit(submission, self.stopped)

    def _acknowledge(self) -> None:
        """Tell the broker what became of messages, unless their channel is closed: then it delivers
        them again.
        """
        for _ in range(len(self._done)):
            channel, tag, result = self._done.popleft()
            if result.fate is Fate.refused and result.is_temporary:
                self._refused.append((channel, tag, time.monotonic() + REFUSED_PAUSE_S))
            elif channel.is_open:
                channel.basic_ack(tag)
        self._requeue(time.monotonic())

    def _requeue(self, now_s: float) -> None:
        """Put refused messages whose pause is over back into the queue."""
        while self._refused and self._refused[0][2] <= now_s:
            channel, tag, _ = self._refused.popleft()
            if channel.is_open:
                channel.basic_nack(tag, requeue=True)

    def _close_connection(self, connection: Any) -> None:
        """Append and acknowledge what waits, then close the connection."""
        if connection is None:
            return
        self.inbox.close()
        try:
            self._acknowledge()
            self._requeue(math.inf)
            connection.close()
        except (self._pika.exceptions.AMQPError, OSError) as error:
            logger.warning(
                "The gateway %s could not close its connection: %s", self.gateway.name, error
            )


def _text(value: Any) -> str | None:
    """Return a property or a header as text. Pika gives one that is not UTF-8 as bytes."""
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return None if value is None else str(value)
