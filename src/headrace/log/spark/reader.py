"""Reading a topic as it is now: `spark.read.format("headrace")`. The ends are taken once, when the
query is planned.
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

# Where a read begins and ends, and how much one batch takes. Offsets go to Spark's checkpoint as
# JSON: partition -> next offset.
#
# The end of a stream's first batch also says where that batch began (`from`): "latest" or a time
# would mean something else if Spark had to repeat the batch after a crash, and rows would be lost
# or doubled.


logger = logging.getLogger("headrace.spark")
Offsets = dict[int, int]
_FROM = "from"
_FORMS = (
    "use earliest, latest, a time such as 2026-01-31T12:00:00Z or '1 hour ago', or JSON: {\"0\": 5,"
    ' "1": "latest"}; partitions that JSON does not name are read whole.'
)


# As Spark keeps them


def offsets_to_json(offsets: Offsets, *, began_at: Offsets | None = None) -> dict[str, Any]:
    named: dict[str, Any] = {
        str(partition): offset for partition, offset in sorted(offsets.items())
    }
    return named if began_at is None else named | {_FROM: offsets_to_json(began_at)}


def offsets_from_json(stored: Mapping[str, Any]) -> Offsets:
    return {int(partition): offset for partition, offset in stored.items() if partition != _FROM}


def batch_start(start: Mapping[str, Any], end: Mapping[str, Any]) -> Offsets:
    """Where the batch from `start` to `end` begins: the first one remembers it."""
    return offsets_from_json(end.get(_FROM, start))


# As users say them


def resolve_offsets(log: Log, topic: str, text: str, *, option: str) -> Offsets:
    """Offsets for what `startingOffsets` or `endingOffsets` says, as of now."""
    if text.lower() == "earliest":
        return log.start_offsets(topic)
    if text.lower() == "latest":
        return end_offsets(log, topic)
    if text.startswith("{"):
        return _named(log, topic, text, option=option)
    try:
        return log.offsets_at(topic, text)
    except BadDuration:
        raise ConfigurationError(
            f"The option {option!r} is {text!r}, which is no position.", fix=_FORMS
        ) from None


def end_offsets(log: Log, topic: str) -> Offsets:
    """The ends of all partitions at one moment; on the embedded log, never in the middle of a
    transaction.
    """
    return dict(log.snapshot([topic])[topic])


def _named(log: Log, topic: str, text: str, *, option: str) -> Offsets:
    earliest, ends = log.start_offsets(topic), end_offsets(log, topic)
    offsets = dict(earliest if option == "startingOffsets" else ends)
    try:
        given = {int(partition): offset for partition, offset in json.loads(text).items()}
    except ValueError:
        raise ConfigurationError(
            f"The option {option!r} is {text!r}, which is not JSON of partitions and offsets.",
            fix=_FORMS,
        ) from None
    for partition, wanted in given.items():
        if partition not in ends:
            raise BadPartition(
                f"The option {option!r} names partition {partition}, which {topic!r} does not"
                " have.",
                fix=f"name 0 to {len(ends) - 1}.",
            )
        offset = {"earliest": earliest[partition], "latest": ends[partition]}.get(wanted, wanted)
        if type(offset) is not int or not earliest[partition] <= offset <= ends[partition]:
            raise ConfigurationError(
                f"The option {option!r} wants {topic}[{partition}] at {wanted!r}; there is"
                f" {earliest[partition]} to {ends[partition]}.",
                fix=_FORMS,
            )
        offsets[partition] = offset
    return offsets


# As they move on


def available_start(
    log: Log, topic: str, begin: Offsets, ends: Offsets, *, on_lost: str
) -> Offsets:
    """Where reading can begin now: `begin`, unless retention has overtaken it. A partition that was
    added since is read whole.
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


def limit_ends(begin: Offsets, ends: Offsets, most: int) -> Offsets:
    """Ends for a batch of at most so many offsets, shared out evenly: what one partition does not
    need, the others get.

    It counts offsets, which on Kafka and in compacted topics are more than rows. And it may cut a
    transaction in two, which a batch without a limit never does on the embedded log.
    """
    waiting = {partition: ends[partition] - begin[partition] for partition in ends}
    cuts: Offsets = {}
    for done, partition in enumerate(sorted(waiting, key=lambda each: (waiting[each], each))):
        taken = min(waiting[partition], most // (len(waiting) - done))
        cuts[partition] = begin[partition] + taken
        most -= taken
    return cuts


def split_ranges(
    begin: Offsets, ends: Offsets, split_rows: int | None
) -> Iterator[tuple[int, int, int]]:
    """(partition, start, stop) for each task: one a partition, or several of at most `split_rows`
    offsets.
    """
    for partition in sorted(ends):
        start, stop = begin.get(partition, 0), ends[partition]
        step = split_rows or max(stop - start, 1)
        yield from (
            (partition, first, min(first + step, stop)) for first in range(start, stop, step)
        )


# Ranges of offsets: what one task of a reading query gets, and how it reads them. Used by the batch
# reader and by the stream reader.


@dataclass
class OffsetSlice(InputPartition):
    """Offsets of one partition of the topic, from `start` up to, not including, `stop`."""

    partition: int
    start: int
    stop: int


def slices(begin: Offsets, ends: Offsets, options: ReadOptions) -> list[OffsetSlice]:
    return [OffsetSlice(*piece) for piece in split_ranges(begin, ends, options.split_rows)]


def read_slice(
    options: ReadOptions, schema: StructType, piece: InputPartition
) -> Iterator[pa.RecordBatch]:
    """The rows of a slice, in Arrow batches as they lie in the log. Spark asks once with no slice
    at all when there is none.
    """
    if not isinstance(piece, OffsetSlice):
        return
    log, wanted, start = shared_log(options.address), arrow_schema(schema), piece.start
    if options.on_lost == "earliest":
        start = max(start, log.start_offsets(options.topic)[piece.partition])
    if start >= piece.stop:
        return
    batches = log.read(
        options.topic,
        piece.partition,
        start,
        piece.stop,
        columns=schema.names,
        headers=HEADERS_COLUMN in schema.names,
        on_corrupt=options.on_corrupt,
    )
    for batch in batches:
        yield relabel(batch, wanted)


class TopicReader(DataSourceReader):
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


# Reading a topic as it grows: `spark.readStream.format("headrace")`. Spark asks how far a batch may
# go, then for the tasks that read it.
#
# A batch takes everything committed by then, and so never half of a transaction of the embedded
# log; with `maxRowsPerBatch` it takes an even share of every partition instead. With the trigger
# `availableNow` it ends where the topic ended when the query started.


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in one process beside Spark's driver while the query runs, and is copied to the tasks
    for `read`.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options, self.schema = options, schema
        self._first: dict[str, Any] | None = None
        self._target: Offsets | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Asked several times; what "latest" means must not change in between."""
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
        """Up to where the next batch goes. `start` itself, if there is nothing new: that is how
        `availableNow` ends.
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
