"""Deliveries into topics: repeats left out, rows decoded and stamped with the time they came, appended in one append a topic; what cannot be used becomes a dead letter.

Each gateway appends as a producer with its own name. So a second process with the same name takes over, and the first one is refused; and an append that is tried again is stored once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import InputError
from headrace.gateways.decoding import DecodedDeliveries, decoded
from headrace.gateways.deliveries import Delivery, Fate, Outcome
from headrace.gateways.repeats import ID_HEADER, Repeats
from headrace.log import dead
from headrace.log.api import CHANGE_TYPE, UPDATE, Log, Position, TopicInfo

RECEIVED = "received_at"
"""The column that gets the time at which a row came, if the topic has it."""


class Writer:
    """All topics of one gateway."""

    def __init__(self, log: Log, gateway: str, *, received: str = RECEIVED) -> None:
        self._log, self._gateway, self._received = log, gateway, received
        self._topics: dict[str, TopicWriter] = {}

    def write(self, deliveries: list[Delivery]) -> list[Outcome]:
        """Deliveries of one topic, and what becomes of each. After a RetryError the same deliveries can be written again: what was stored is not stored twice."""
        topic = deliveries[0].topic
        try:
            if topic not in self._topics:
                self._topics[topic] = TopicWriter(self._log, topic, self._gateway, self._received)
            outcomes = self._topics[topic].write(deliveries)
        except InputError as error:
            self._topics.pop(topic, None)
            if topic in self._log.topics():
                raise
            return [Outcome(Fate.refused, "unknown topic", error.message)] * len(deliveries)
        return [outcomes[id(each)] for each in deliveries]


class TopicWriter:
    """One topic. Opening it takes the producer over from an older process of the same gateway."""

    def __init__(self, log: Log, topic: str, gateway: str, received: str) -> None:
        self._log, self._topic, self._gateway, self._received = log, topic, gateway, received
        self._producer = log.producer(topic, f"gateway.{gateway}")
        self._repeats = Repeats(log, topic)
        self._learn()

    def _learn(self) -> None:
        self._info: TopicInfo = self._log.topic(self._topic)
        has_time = self._received in self._info.columns and pa.types.is_timestamp(self._info.arrow_schema.field(self._received).type)
        self._stamped = (self._received,) if has_time else ()
        self._given = pa.schema([each for each in self._info.arrow_schema if each.name not in self._stamped])
        if self._info.is_table:  # a change that says nothing of its kind is the newest row of its key
            position = self._given.get_field_index(CHANGE_TYPE)
            self._given = self._given.set(position, self._given.field(position).with_nullable(True))

    def write(self, deliveries: list[Delivery]) -> dict[int, Outcome]:
        fresh, outcomes = self._without_repeats(deliveries)
        rows = self._decoded(fresh)
        self._put_aside([each for each in fresh if id(each) in rows.refused], rows.refused)
        for each in fresh:
            if id(each) in rows.refused:
                outcomes[id(each)] = Outcome(Fate.refused, "does not fit", rows.refused[id(each)])
        if rows.fitting:
            position = self._append(rows)
            outcomes |= {id(each): Outcome(Fate.stored, position=str(position)) for each in rows.fitting}
        return outcomes

    def _without_repeats(self, deliveries: list[Delivery]) -> tuple[list[Delivery], dict[int, Outcome]]:
        named = [each for each in deliveries if each.id is not None]
        if not named:
            return deliveries, {}
        self._repeats.catch_up()
        seen: set[str] = set()
        repeated = set()
        for each in named:
            assert each.id is not None
            if each.id in self._repeats or each.id in seen:
                repeated.add(id(each))
            seen.add(each.id)
        fresh = [each for each in deliveries if id(each) not in repeated]
        return fresh, {each: Outcome(Fate.repeated) for each in repeated}

    def _decoded(self, deliveries: list[Delivery]) -> DecodedDeliveries:
        """Against the topic as we know it; before something is refused, as it is now."""
        rows = decoded(deliveries, self._given, ignored=self._stamped, topic=self._topic)
        if rows.refused and self._log.topic(self._topic).arrow_schema != self._info.arrow_schema:
            self._learn()
            rows = decoded(deliveries, self._given, ignored=self._stamped, topic=self._topic)
        return rows

    def _append(self, rows: DecodedDeliveries) -> Position:
        """One append. Its number is the next one as long as it has not succeeded, so the log knows it when it is tried again."""
        headers = _headers(rows) if any(each.id is not None for each in rows.fitting) else None
        position = self._producer.append(self._stored_form(rows), headers=headers)
        if headers is not None:
            self._repeats.appended(position)
            for each in rows.fitting:
                if each.id is not None:
                    self._repeats.add(each.id)
        return position

    def _stored_form(self, rows: DecodedDeliveries) -> pa.RecordBatch:
        """The topic's columns, in their order: with the time of receipt, and for tables the kind of change."""
        whole = pa.Table.from_batches(rows.batches).combine_chunks()
        columns = {name: _one(whole.column(name)) for name in whole.column_names}
        for name in self._stamped:
            moments = np.repeat(np.array([each.received_us for each in rows.fitting], np.int64), rows.counts)
            columns[name] = pa.array(moments).cast(self._info.arrow_schema.field(name).type)
        if self._info.is_table:
            columns[CHANGE_TYPE] = pc.fill_null(columns[CHANGE_TYPE], UPDATE)
        return pa.RecordBatch.from_arrays([columns[name] for name in self._info.columns], schema=self._info.arrow_schema)

    def _put_aside(self, refused: Sequence[Delivery], reasons: dict[int, str]) -> None:
        """Dead letters, for those that nobody else would hear of."""
        letters = [dead.DeadLetter(f"gateway {self._gateway}", reasons[id(each)], payload=each.payload) for each in refused if each.payload is not None]
        if letters:
            dead.divert(self._log, self._topic, letters)


def _one(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _headers(rows: DecodedDeliveries) -> list[dict[str, bytes | None] | None]:
    """A delivery's id stands at its first row."""
    headers: list[dict[str, bytes | None] | None] = []
    for each, count in zip(rows.fitting, rows.counts, strict=True):
        if count:
            headers += [{ID_HEADER: each.id.encode()} if each.id is not None else None, *[None] * (count - 1)]
    return headers
