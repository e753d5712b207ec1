"""Deliveries into topics: repeats left out, rows decoded and stamped with the time they came,
appended in one append a topic; what cannot be used becomes a dead letter.

Each gateway appends as a producer with its own name. So a second process with the same name takes
over, and the first one is refused; and an append that is tried again is stored once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import CHANGE_TYPE, HEADERS_COLUMN, UPDATE
from headrace.errors import BadRows, InputError
from headrace.gateways.inbox import Columns, Delivery, Fate, Lines, Outcome, Parsed, Plain
from headrace.log import dead_letters
from headrace.log.api import Log
from headrace.log.rows import to_batch
from headrace.log.values import AppendResult, TopicInfo
from headrace.types.json_codec import Decoded, decode, decode_exactly

# Deliveries as rows of their topic, all at once where they fit; those that do not are found, and
# say why.


@dataclass
class DecodedDeliveries:
    """Rows of the deliveries that fit, in their order, and how many each has; for the others the
    reason.
    """

    fitting: list[Delivery] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    batches: list[pa.RecordBatch] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    """By the identity of the delivery."""

    def add(self, deliveries: Sequence[Delivery], batch: pa.RecordBatch) -> None:
        self.fitting += deliveries
        self.counts += [_count(each) for each in deliveries]
        self.batches.append(batch)


def _count(delivery: Delivery) -> int:
    content = delivery.content
    return content.batch.num_rows if isinstance(content, Columns) else len(content.values)


def decoded(
    deliveries: Sequence[Delivery], schema: pa.Schema, *, ignored: Collection[str], topic: str
) -> DecodedDeliveries:
    """`schema` is what senders give; `ignored` are columns they may give although we know
    better.
    """
    result = DecodedDeliveries()
    for kind, run in groupby(deliveries, key=lambda each: type(each.content)):
        together = list(run)
        if kind in {Lines, Parsed}:
            _decode_json(together, schema, ignored, result)
        else:
            for each in together:
                _decode_plain(each, schema, topic, result)
    return result


def _decode_json(
    deliveries: list[Delivery],
    schema: pa.Schema,
    ignored: Collection[str],
    result: DecodedDeliveries,
) -> None:
    """Together; if some do not fit, each of these is refused as a whole, and the others are decoded
    again.
    """
    parts = _decode(deliveries, schema, ignored)
    if not parts.misfits:
        result.add(deliveries, parts.batch)
        return
    first, fitting = 0, []
    for each in deliveries:
        count = _count(each)
        reasons = [
            (index, why) for index, why in parts.misfits.items() if first <= index < first + count
        ]
        if reasons:
            result.refused[id(each)] = f"Row {reasons[0][0] - first}: {reasons[0][1]}"
        else:
            fitting.append(each)
        first += count
    if fitting:
        result.add(fitting, _decode(fitting, schema, ignored).batch)


def _decode(deliveries: Sequence[Delivery], schema: pa.Schema, ignored: Collection[str]) -> Decoded:
    values = [value for each in deliveries for value in cast("Lines | Parsed", each.content).values]
    if isinstance(deliveries[0].content, Lines):
        return decode(values, schema, ignored=ignored)
    return decode_exactly(values, schema, ignored=ignored, parser=_as_it_is)


def _as_it_is(value: Any) -> Any:
    return value


def _decode_plain(
    delivery: Delivery, schema: pa.Schema, topic: str, result: DecodedDeliveries
) -> None:
    content = cast("Plain | Columns", delivery.content)
    try:
        rows = (
            _aligned(content.batch, schema)
            if isinstance(content, Columns)
            else [{name: row.get(name) for name in schema.names} for row in content.values]
        )
        result.add([delivery], to_batch(rows, schema, topic=topic))
    except BadRows as error:
        result.refused[id(delivery)] = error.message


def _aligned(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns that the topic has; what the batch lacks is null."""
    arrays = [
        (
            batch.column(each.name)
            if each.name in batch.schema.names
            else pa.nulls(batch.num_rows, each.type)
        )
        for each in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, names=schema.names)


# Which message ids a topic has already: they stand in a header of the rows themselves, so an id and
# its rows are stored together or not at all.
#
# The newest ids are kept in memory. After a restart they are read from the topic's end; what others
# append meanwhile is read before each append.


ID_HEADER = "message-id"
MAX_IDS = 100_000
"""A repeat that comes after so many other messages is not recognised any more."""


class Repeats:
    def __init__(self, log: Log, topic: str, most: int = MAX_IDS) -> None:
        self._log, self._topic, self._most = log, topic, most
        self._known: OrderedDict[str, None] = OrderedDict()
        self._reached: dict[int, int] | None = None

    def __contains__(self, id: str) -> bool:
        return id in self._known

    def catch_up(self) -> None:
        """Read what has come to the topic since the last time; the first time, its newest rows."""
        ends = self._log.end_offsets(self._topic)
        if self._reached is None:
            starts = self._log.start_offsets(self._topic)
            self._reached = {
                partition: max(starts.get(partition, 0), end - self._most)
                for partition, end in ends.items()
            }
        for partition, end in ends.items():
            start = self._reached.get(partition, 0)
            if start < end:
                self._read(partition, start, end)
            self._reached[partition] = end

    def _read(self, partition: int, start: int, end: int) -> None:
        for batch in self._log.read(
            self._topic, partition, start, end, columns=[HEADERS_COLUMN], headers=True
        ):
            entries = batch.column(0).flatten()
            ids = entries.filter(pc.equal(entries.field(0), ID_HEADER)).field(1).to_pylist()
            for each in ids:
                self.add((each or b"").decode(errors="replace"))

    def add(self, id: str) -> None:
        self._known[id] = None
        self._known.move_to_end(id)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def appended(self, position: AppendResult) -> None:
        """Our own append: not to be read again, if nobody else's came between."""
        assert self._reached is not None
        for partition, span in position.partitions(self._topic).items():
            if self._reached.get(partition, 0) == span.start:
                self._reached[partition] = span.stop


RECEIVED = "received_at"
"""The column that gets the time at which a row came, if the topic has it."""


class Writer:
    """All topics of one gateway."""

    def __init__(self, log: Log, gateway: str, *, received: str = RECEIVED) -> None:
        self._log, self._gateway, self._received = log, gateway, received
        self._topics: dict[str, TopicWriter] = {}

    def write(self, deliveries: list[Delivery]) -> list[Outcome]:
        """Deliveries of one topic, and what becomes of each. After a RetryError the same deliveries
        can be written again: what was stored is not stored twice.
        """
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
        has_time = self._received in self._info.columns and pa.types.is_timestamp(
            self._info.arrow_schema.field(self._received).type
        )
        self._stamped = (self._received,) if has_time else ()
        self._given = pa.schema(
            [each for each in self._info.arrow_schema if each.name not in self._stamped]
        )
        if (
            self._info.is_table
        ):  # a change that says nothing of its kind is the newest row of its key
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
            outcomes |= {
                id(each): Outcome(Fate.stored, position=str(position)) for each in rows.fitting
            }
        return outcomes

    def _without_repeats(
        self, deliveries: list[Delivery]
    ) -> tuple[list[Delivery], dict[int, Outcome]]:
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

    def _append(self, rows: DecodedDeliveries) -> AppendResult:
        """One append. Its number is the next one as long as it has not succeeded, so the log knows
        it when it is tried again.
        """
        headers = _headers(rows) if any(each.id is not None for each in rows.fitting) else None
        position = self._producer.append(self._stored_form(rows), headers=headers)
        if headers is not None:
            self._repeats.appended(position)
            for each in rows.fitting:
                if each.id is not None:
                    self._repeats.add(each.id)
        return position

    def _stored_form(self, rows: DecodedDeliveries) -> pa.RecordBatch:
        """The topic's columns, in their order: with the time of receipt, and for tables the kind of
        change.
        """
        whole = pa.Table.from_batches(rows.batches).combine_chunks()
        columns = {name: _one(whole.column(name)) for name in whole.column_names}
        for name in self._stamped:
            moments = np.repeat(
                np.array([each.received_us for each in rows.fitting], np.int64), rows.counts
            )
            columns[name] = pa.array(moments).cast(self._info.arrow_schema.field(name).type)
        if self._info.is_table:
            columns[CHANGE_TYPE] = pc.fill_null(columns[CHANGE_TYPE], UPDATE)
        return pa.RecordBatch.from_arrays(
            [columns[name] for name in self._info.columns], schema=self._info.arrow_schema
        )

    def _put_aside(self, refused: Sequence[Delivery], reasons: dict[int, str]) -> None:
        """Dead letters, for those that nobody else would hear of."""
        letters = [
            dead_letters.DeadLetter(
                f"gateway {self._gateway}", reasons[id(each)], payload=each.payload
            )
            for each in refused
            if each.payload is not None
        ]
        if letters:
            dead_letters.divert(self._log, self._topic, letters)


def _one(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _headers(rows: DecodedDeliveries) -> list[dict[str, bytes | None] | None]:
    """A delivery's id stands at its first row."""
    headers: list[dict[str, bytes | None] | None] = []
    for each, count in zip(rows.fitting, rows.counts, strict=True):
        if count:
            headers += [
                {ID_HEADER: each.id.encode()} if each.id is not None else None,
                *[None] * (count - 1),
            ]
    return headers
