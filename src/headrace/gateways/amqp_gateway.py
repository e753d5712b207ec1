"""The AMQP gateway: a queue of RabbitMQ, from which messages come as many at a time as `prefetch`
allows, and are acknowledged when their rows are durable here.

What was not acknowledged when the connection, this process or the broker ends is delivered again. A
message that has a `message_id` and is in the topic already is acknowledged and left out.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import deque
from typing import Any

from headrace.amqp import connected, driver
from headrace.errors import RetryError
from headrace.gateways.base import GatewaySpec, ThreadReceiving, content_of, now_us, rows_of
from headrace.gateways.inbox import Delivery, Fate, Outcome
from headrace.log.api import Log

logger = logging.getLogger("headrace.gateways")
WAIT_S = 0.02
REFUSED_PAUSE_S = 0.2
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 30.0


class AmqpReceiving(ThreadReceiving):
    def __init__(self, gateway: GatewaySpec, log: Log) -> None:
        super().__init__(gateway, log)
        self._url, self._queue = gateway.options["url"], gateway.options["queue"]
        self._done: deque[tuple[Any, int, Outcome]] = deque()
        """Bounded by `prefetch`, as is the next: the broker sends no more before these are
        acknowledged.
        """
        self._refused: deque[tuple[Any, int, float]] = deque()
        """What goes back into the queue, and when."""
        self._messages = self._redelivered = self._sessions = 0
        self._pika = driver()

    def begin(self) -> None:
        """The first connection is made here, where whoever starts the gateway sees what is
        wrong.
        """
        self._first: Any = self._opened()
        self.address = f"queue {self._queue}"
        super().begin()

    def details(self) -> dict[str, int]:
        return {
            "messages": self._messages,
            "redelivered": self._redelivered,
            "connections": self._sessions,
        }

    def _opened(self) -> Any:
        """A connection with a channel that consumes."""
        connection = connected(self._url)
        try:
            channel = connection.channel()
            channel.queue_declare(
                self._queue, durable=True, passive=not self.gateway.options["declare"]
            )
            channel.basic_qos(prefetch_count=self.gateway.options["prefetch"])
            channel.basic_consume(self._queue, self._take)
        except self._pika.exceptions.AMQPError as error:
            connection.close()
            raise RetryError(
                f"The queue {self._queue!r} cannot be read: {error}.",
                fix="see that it is there and durable; declare=True makes it.",
            ) from None
        self._sessions += 1
        return connection

    def receive(self) -> None:
        failures, connection = 0, self._first
        while not self.stopped.is_set():
            try:
                connection = connection or self._opened()
                while not self.stopped.is_set() and not self.inbox.ended.is_set():
                    connection.process_data_events(WAIT_S)
                    self._answer()
                    failures = 0
                break
            except (self._pika.exceptions.AMQPError, RetryError, OSError) as error:
                connection, failures = None, failures + 1
                self.counts.failed(f"RabbitMQ: {error or type(error).__name__}")
                longest_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10))
                logger.warning("The gateway %s lost its connection: %s", self.gateway.name, error)
                self.stopped.wait(random.uniform(longest_s / 2, longest_s))  # noqa: S311 - nothing is kept secret by it
        self._leave(connection)

    def _take(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        self._messages += 1
        self._redelivered += bool(method.redelivered)
        known = {
            "message_id": properties.message_id,
            "routing_key": method.routing_key,
            "exchange": method.exchange,
            "content_type": properties.content_type,
            "headers": {
                str(name): str(value) for name, value in (properties.headers or {}).items()
            },
        }
        content = content_of(body, self.gateway.options["format"], known)
        delivery = Delivery(
            self.gateway.topics[0],
            content,
            rows_of(content),
            len(body),
            now_us(),
            properties.message_id or None,
            body,
        )
        delivery.done = lambda outcome: self._done.append((channel, method.delivery_tag, outcome))
        self.inbox.submit(delivery, self.stopped)

    def _answer(self) -> None:
        """Tell the broker what became of messages; not if their channel has gone, since it delivers
        them again.
        """
        for _ in range(len(self._done)):
            channel, tag, outcome = self._done.popleft()
            if outcome.fate is Fate.refused and outcome.passing:
                self._refused.append((channel, tag, time.monotonic() + REFUSED_PAUSE_S))
            elif channel.is_open:
                channel.basic_ack(tag)
        self._send_back(time.monotonic())

    def _send_back(self, now_s: float) -> None:
        """What was refused for now goes back into the queue after a pause: the broker delivers it
        again at once, and both would do nothing else.
        """
        while self._refused and self._refused[0][2] <= now_s:
            channel, tag, _ = self._refused.popleft()
            if channel.is_open:
                channel.basic_nack(tag, requeue=True)

    def _leave(self, connection: Any) -> None:
        """What waits is appended first, and acknowledged; then the connection is closed."""
        if connection is None:
            return
        self.inbox.close()
        try:
            self._answer()
            self._send_back(math.inf)
            connection.close()
        except (self._pika.exceptions.AMQPError, OSError) as error:
            logger.warning(
                "The gateway %s could not close its connection: %s", self.gateway.name, error
            )
