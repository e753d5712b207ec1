"""Reading topics: `spark.read.format("headrace")` reads up to the ends of the topic when the query
is planned, `spark.readStream.format("headrace")` goes on, batch after batch.

A stream's batch takes everything that is committed, and so never a part of a transaction of the
embedded log; with `maxRowsPerBatch` it takes an even share of every partition instead. With the
trigger `availableNow` the stream ends where the topic ended when the query started.

Spark stores offsets in its checkpoint as JSON: partition -> next offset. The end of a stream's
first batch also records where that batch began (`from`): if Spark repeats the batch after a crash,
"latest" or a time would mean other offsets, and rows would be lost or duplicated.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from headrace.columnar.columns import HEADERS_COLUMN
from headrace.errors import BadDuration, BadPartition, ConfigurationError, InputError
from headrace.log.api import Log
from headrace.log.spark.columns import arrow_schema, relabel
from headrace.log.spark.options import ReadOptions, shared_log

logger = logging.getLogger("headrace.spark")
Offsets = dict[int, int]
_FROM = "from"
_FORMATS = (
    "use earliest, latest, a time such as 2026-01-31T12:00:00Z or '1 hour ago', or JSON: {\"0\": 5,"
    ' "1": "latest"}; partitions that JSON does not name are read whole.'
)


# Offsets as Spark stores them


def offsets_to_json(offsets: Offsets, *, began_at: Offsets | None = None) -> dict[str, Any]:
    stored: dict[str, Any] = {
        str(partition): offset for partition, offset in sorted(offsets.items())
    }
    return stored if began_at is None else stored | {_FROM: offsets_to_json(began_at)}


def offsets_from_json(stored: Mapping[str, Any]) -> Offsets:
    return {int(partition): offset for partition, offset in stored.items() if partition != _FROM}


def batch_start(start: Mapping[str, Any], end: Mapping[str, Any]) -> Offsets:
    """The first offsets of the batch from `start` to `end`. The end of a stream's first batch
    records them.
    """
    return offsets_from_json(end.get(_FROM, start))


# Offsets as users write them


def resolve_offsets(log: Log, topic: str, text: str, *, option: str) -> Offsets:
    """The offsets that the option `startingOffsets` or `endingOffsets` means now."""
    if text.lower() == "earliest":
        return log.start_offsets(topic)
    if text.lower() == "latest":
        return end_offsets(log, topic)
    if text.startswith("{"):
        return _parse_offsets(log, topic, text, option=option)
    try:
        return log.offsets_at(topic, text)
    except BadDuration:
        raise ConfigurationError(
            f"The option {option!r} is {text!r}, which is no position.", fix=_FORMATS
        ) from None


def end_offsets(log: Log, topic: str) -> Offsets:
    """The ends of all partitions at one point in time; on the embedded log, never in the middle of
    a transaction.
    """
    return dict(log.snapshot([topic])[topic])


def _parse_offsets(log: Log, topic: str, text: str, *, option: str) -> Offsets:
    """The offsets of JSON such as {"0": 5, "1": "latest"}."""
    earliest, ends = log.start_offsets(topic), end_offsets(log, topic)
    offsets = dict(earliest if option == "startingOffsets" else ends)
    try:
        parsed = {int(partition): offset for partition, offset in json.loads(text).items()}
    except ValueError:
        raise ConfigurationError(
            f"The option {option!r} is {text!r}, which is not JSON of partitions and offsets.",
            fix=_FORMATS,
        ) from None
    for partition, wanted in parsed.items():
        if partition not in ends:
            raise BadPartition(
                f"The option {option!r} names partition {partition}, which {topic!r} does not"
                " have.",
                fix=f"name 0 to {len(ends) - 1}.",
            )
        offset = {"earliest": earliest[partition], "latest": ends[partition]}.get(wanted, wanted)
        if type(offset) is not int or not earliest[partition] <= offset <= ends[partition]:
            raise ConfigurationError(
                f"The option {option!r} sets {topic}[{partition}] to {wanted!r}; there is"
                f" {earliest[partition]} to {ends[partition]}.",
                fix=_FORMATS,
            )
        offsets[partition] = offset
    return offsets


# Batches of a stream


def available_start(
    log: Log, topic: str, begin: Offsets, ends: Offsets, *, on_lost: str
) -> Offsets:
    """The offsets at which reading can begin: `begin`, or the earliest ones if retention has
    removed what comes before. A partition that was added since is read from its beginning.
    """
    earliest = log.start_offsets(topic)
    begin = {partition: begin.get(partition, 0) for partition in ends}
    for partition, offset in begin.items():
        if offset > ends[partition]:
            raise InputError(
                f"The checkpoint is at offset {offset} of {topic}[{partition}], but that ends at"
                f" {ends[partition]}: it is another topic than before.",
                fix="start the query with a new checkpoint, or restore the topic.",
            )
        if offset < earliest[partition] and on_lost == "fail":
            raise InputError(
                f"Offsets {offset} to {earliest[partition] - 1} of {topic}[{partition}] were"
                " removed by retention before this query read them.",
                fix=(
                    "set the option onLost to 'earliest' to go on with what is kept, and give the"
                    " topic a longer retention."
                ),
            )
        if offset < earliest[partition]:
            logger.warning(
                "Offsets %d to %d of %s[%d] were removed before they were read.",
                offset,
                earliest[partition] - 1,
                topic,
                partition,
            )
    return {partition: max(offset, earliest[partition]) for partition, offset in begin.items()}


def limit_ends(begin: Offsets, ends: Offsets, limit: int) -> Offsets:
    """The ends of a batch of at most `limit` offsets, divided evenly: what one partition does not
    need, the others get.

    Offsets are counted, which on Kafka and in compacted topics are more than rows. The limit may
    split a transaction, which a batch without a limit never does on the embedded log.
    """
    waiting = {partition: ends[partition] - begin[partition] for partition in ends}
    limited: Offsets = {}
    for done, partition in enumerate(sorted(waiting, key=lambda each: (waiting[each], each))):
        count = min(waiting[partition], limit // (len(waiting) - done))
        limited[partition] = begin[partition] + count
        limit -= count
    return limited


def split_ranges(
    begin: Offsets, ends: Offsets, split_rows: int | None
) -> Iterator[tuple[int, int, int]]:
    """The partition, start and stop of each task: one task per partition, or several of at most
    `split_rows` offsets each.
    """
    for partition in sorted(ends):
        start, stop = begin.get(partition, 0), ends[partition]
        step = split_rows or max(stop - start, 1)
        yield from (
            (partition, first, min(first + step, stop)) for first in range(start, stop, step)
        )


# Tasks


@dataclass
class OffsetSlice(InputPartition):
    """Offsets of one partition of the topic, from `start` up to and excluding `stop`."""

    partition: int
    start: int
    stop: int


def slices(begin: Offsets, ends: Offsets, options: ReadOptions) -> list[OffsetSlice]:
    return [OffsetSlice(*each) for each in split_ranges(begin, ends, options.split_rows)]


def read_slice(
    options: ReadOptions, schema: StructType, offsets: InputPartition
) -> Iterator[pa.RecordBatch]:
    """The rows of a slice, in the Arrow batches of the log. If a read has no slices, Spark calls it
    once with a partition of its own, which has no rows.
    """
    if not isinstance(offsets, OffsetSlice):
        return
    log, start = shared_log(options.address), offsets.start
    if options.on_lost == "earliest":
        start = max(start, log.start_offsets(options.topic)[offsets.partition])
    if start >= offsets.stop:
        return
    batches = log.read(
        options.topic,
        offsets.partition,
        start,
        offsets.stop,
        columns=schema.names,
        headers=HEADERS_COLUMN in schema.names,
        on_corrupt=options.on_corrupt,
    )
    spark_types = arrow_schema(schema)
    for batch in batches:
        yield relabel(batch, spark_types)


class TopicReader(DataSourceReader):
    """Reads the rows that a topic has when the query is planned."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options, self.schema = options, schema

    def partitions(self) -> list[OffsetSlice]:
        log, topic = shared_log(self.options.address), self.options.topic
        begin = resolve_offsets(log, topic, self.options.starting, option="startingOffsets")
        ends = resolve_offsets(log, topic, self.options.ending, option="endingOffsets")
        for partition in sorted(begin):
            if begin[partition] > ends[partition]:
                raise ConfigurationError(
                    f"The read of {topic}[{partition}] would begin at {begin[partition]} and end at"
                    f" {ends[partition]}.",
                    fix="let startingOffsets come before endingOffsets.",
                )
        return slices(begin, ends, self.options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_slice(self.options, self.schema, partition)


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a topic as it grows. It lives in a process next to Spark's driver while the query runs;
    Spark copies it to the tasks for `read`.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options, self.schema = options, schema
        self._first: dict[str, Any] | None = None
        self._target: Offsets | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The first offsets of the stream. Spark calls this several times, and the meaning of
        "latest" must not change in between.
        """
        if self._first is None:
            self._first = offsets_to_json(
                resolve_offsets(
                    self._log(), self.options.topic, self.options.starting, option="startingOffsets"
                )
            )
        return self._first

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return (
            ReadAllAvailable()
            if self.options.max_rows is None
            else ReadMaxRows(self.options.max_rows)
        )

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = end_offsets(self._log(), self.options.topic)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the next batch; `start` itself if there is nothing new, which ends a query
        with the trigger `availableNow`.
        """
        ends = self._target or end_offsets(self._log(), self.options.topic)
        begin = available_start(
            self._log(),
            self.options.topic,
            offsets_from_json(start),
            ends,
            on_lost=self.options.on_lost,
        )
        if isinstance(limit, ReadMaxRows):
            ends = limit_ends(begin, ends, limit.max_rows)
        if start == self._first:
            return offsets_to_json(ends, began_at=offsets_from_json(start))
        return start if ends == offsets_from_json(start) else offsets_to_json(ends)

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return offsets_to_json(end_offsets(self._log(), self.options.topic))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[OffsetSlice]:
        ends = offsets_from_json(end)
        begin = available_start(
            self._log(),
            self.options.topic,
            batch_start(start, end),
            ends,
            on_lost=self.options.on_lost,
        )
        return slices(begin, ends, self.options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_slice(self.options, self.schema, partition)

    def _log(self) -> Log:
        return shared_log(self.options.address)
