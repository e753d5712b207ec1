"""The target `amqp`: each row is published to an exchange of RabbitMQ, at least once (`noted_target`), and counts as sent when the broker has confirmed it.

A message is the row as JSON; its `message_id` says which row it is, and its headers have the topic and the kind of change. What no queue would get is refused; what a full queue turns back is sent again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pyarrow as pa

from headrace.amqp_connection import shown
from headrace.errors import NotSupported
from headrace.sinks.amqp_publishing import Message, Publisher
from headrace.sinks.applied import Applied
from headrace.sinks.declared import Sink
from headrace.sinks.noted_target import NotedTarget
from headrace.sinks.shape import Shape
from headrace.sinks.target import Refusal

MOST_IN_FLIGHT = 500
"""Messages that are published before their confirmations are waited for; the publisher bounds their bytes too."""


class AmqpTarget(NotedTarget):
    def __init__(self, sink: Sink, shape: Shape) -> None:
        options = sink.options
        url, exchange = options["url"], options["exchange"]
        place = f"{shown(url)} {exchange} {options['routing_key']}"
        identity = sink.name or f"{sink.table or shape.topic}.amqp.{hashlib.sha256(place.encode()).hexdigest()[:12]}"
        super().__init__(sink, shape, identity, request_rows=MOST_IN_FLIGHT)
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
        """All of them; each that the broker does not take is refused for itself, since the others are there."""
        messages = self._messages(rows)
        found = [Message(identity, text, {"topic": self.shape.topic, "change": change}) for identity, _, _, change, text in messages]
        refused = self._publisher.publish(self._routing_key, found)
        for identity, partition, offset, _, _ in messages:
            if (why := refused.get(identity)) is None:
                self._taken()
                continue
            said = f"the broker does not take it: {why}"
            self._turned_back.append(Refusal(partition, offset, said))
            self._count_refused(said)

    def contents(self) -> tuple[Applied | None, Iterator[pa.Table]]:
        raise NotSupported("What was published cannot be read back, so there is nothing to compare with the log.", fix="compare at the consumer, by the messages' ids.")
