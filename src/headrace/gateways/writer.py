"""Writes submissions to topics: leaves out repeats, decodes rows, stamps them with the time of
receipt, and appends them. What cannot be used becomes a dead letter.

Each gateway appends as a producer of its own name. So a second process with the same name takes
over and the first one is fenced, and an append that is tried again is stored once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Self, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import CHANGE_TYPE, HEADERS_COLUMN, UPDATE_POSTIMAGE
from headrace.errors import BadRows, InputError
from headrace.gateways.inbox import (
    ArrowRows,
    Fate,
    JsonLines,
    JsonRows,
    PlainRows,
    Submission,
    SubmissionResult,
)
from headrace.log import dead_letters
from headrace.log.api import Log, Producer
from headrace.log.rows import to_batch
from headrace.log.values import AppendResult, TopicInfo
from headrace.types.json_codec import Decoded, decode_rows, decode_rows_exactly
from headrace.types.schema_history import NO_HISTORY, SchemaHistory

# Decoding


@dataclass
class DecodedSubmissions:
    """The rows of submissions that fit their topic, and why the others do not."""

    fitting: list[Submission] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """How many rows each fitting submission has."""
    batches: list[pa.RecordBatch] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    """The reasons, by `id()` of the submission."""

    def add(self, submissions: Sequence[Submission], batch: pa.RecordBatch) -> None:
        self.fitting += submissions
        self.counts += [_count(submission) for submission in submissions]
        self.batches.append(batch)


def _count(submission: Submission) -> int:
    content = submission.content
    return content.batch.num_rows if isinstance(content, ArrowRows) else len(content.values)


def decode_submissions(
    submissions: Sequence[Submission],
    schema: pa.Schema,
    *,
    ignored: Collection[str],
    topic: str,
    history: SchemaHistory = NO_HISTORY,
) -> DecodedSubmissions:
    """Decode submissions of one topic.

    Args:
        submissions: The submissions.
        schema: The columns that senders give.
        ignored: Columns that senders may give and that are not used.
        topic: The topic's name, for errors.
        history: What has become of the topic's columns: JSON may have their former names.
    """
    result = DecodedSubmissions()
    for kind, run in groupby(submissions, key=lambda submission: type(submission.content)):
        together = list(run)
        if kind in {JsonLines, JsonRows}:
            _decode_json(together, schema, ignored, history, result)
        else:
            for submission in together:
                content = cast("PlainRows | ArrowRows", submission.content)
                try:
                    rows = (
                        _aligned(content.batch, schema)
                        if isinstance(content, ArrowRows)
                        else [
                            {name: row.get(name) for name in schema.names} for row in content.values
                        ]
                    )
                    result.add([submission], to_batch(rows, schema, topic=topic))
                except BadRows as error:
                    result.refused[id(submission)] = error.message
    return result


def _decode_json(
    submissions: list[Submission],
    schema: pa.Schema,
    ignored: Collection[str],
    history: SchemaHistory,
    result: DecodedSubmissions,
) -> None:
    """Decode submissions together. If some do not fit, each of these is refused as a whole, and the
    others are decoded again.
    """
    parts = _decode(submissions, schema, ignored, history)
    if not parts.misfits:
        result.add(submissions, parts.batch)
        return
    first = 0
    fitting = []
    for submission in submissions:
        stop = first + _count(submission)
        misfits = [index for index in parts.misfits if first <= index < stop]
        if misfits:
            reason = parts.misfits[misfits[0]]
            result.refused[id(submission)] = f"Row {misfits[0] - first}: {reason}"
        else:
            fitting.append(submission)
        first = stop
    if fitting:
        result.add(fitting, _decode(fitting, schema, ignored, history).batch)


def _decode(
    submissions: Sequence[Submission],
    schema: pa.Schema,
    ignored: Collection[str],
    history: SchemaHistory,
) -> Decoded:
    values: list[Any] = []
    for submission in submissions:
        values += cast("JsonLines | JsonRows", submission.content).values
    if isinstance(submissions[0].content, JsonLines):
        return decode_rows(values, schema, ignored=ignored, history=history)
    return decode_rows_exactly(
        values, schema, ignored=ignored, history=history, parser=lambda value: value
    )


def _aligned(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the columns of a schema; those that the batch lacks are null."""
    arrays = [
        (
            batch.column(column.name)
            if column.name in batch.schema.names
            else pa.nulls(batch.num_rows, column.type)
        )
        for column in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, names=schema.names)


# Repeats

ID_HEADER = "message-id"
MAX_IDS = 100_000
"""How many ids are remembered. A repeat that comes after so many other messages is stored again."""


class DuplicateFilter:
    """Remembers the newest message ids of a topic.

    An id is in a header of the rows themselves, so that both are stored together or not at all.
    After a restart ids are read from the topic's end; what others append is read before each
    append.
    """

    def __init__(self, log: Log, topic: str, max_ids: int = MAX_IDS) -> None:
        self._log = log
        self._topic = topic
        self._max_ids = max_ids
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._next_offsets: dict[int, int] | None = None

    def __contains__(self, id: str) -> bool:
        return id in self._ids

    def catch_up(self) -> None:
        """Read the ids of rows that were appended since the last call; at first, of the newest
        rows.
        """
        ends = self._log.end_offsets(self._topic)
        if self._next_offsets is None:
            starts = self._log.start_offsets(self._topic)
            self._next_offsets = {
                partition: max(starts.get(partition, 0), stop - self._max_ids)
                for partition, stop in ends.items()
            }
        for partition, stop in ends.items():
            start = self._next_offsets.get(partition, 0)
            if start < stop:
                self._read(partition, start, stop)
            self._next_offsets[partition] = stop

    def _read(self, partition: int, start: int, stop: int) -> None:
        for batch in self._log.read(
            self._topic, partition, start, stop, columns=[HEADERS_COLUMN], headers=True
        ):
            entries = batch.column(0).flatten()
            ids = entries.filter(pc.equal(entries.field(0), ID_HEADER)).field(1).to_pylist()
            for message_id in ids:
                self.add((message_id or b"").decode(errors="replace"))

    def add(self, id: str) -> None:
        self._ids[id] = None
        self._ids.move_to_end(id)
        while len(self._ids) > self._max_ids:
            self._ids.popitem(last=False)

    def skip(self, position: AppendResult) -> None:
        """Do not read an append of this gateway, unless others appended in between."""
        assert self._next_offsets is not None
        for partition, span in position.partitions(self._topic).items():
            if self._next_offsets.get(partition, 0) == span.start:
                self._next_offsets[partition] = span.stop


# Appending

RECEIVED = "received_at"
"""The column that gets the time at which a row was received, if the topic has it."""


class GatewayWriter:
    """Writes to all topics of one gateway."""

    def __init__(self, log: Log, gateway: str, *, received: str = RECEIVED) -> None:
        self._log = log
        self._gateway = gateway
        self._received = received
        self._topics: dict[str, GatewayTopicWriter] = {}

    def write(self, submissions: list[Submission]) -> list[SubmissionResult]:
        """Write submissions of one topic, and return what became of each. After a RetryError the
        same submissions can be written again; they are stored once.
        """
        topic = submissions[0].topic
        try:
            if topic not in self._topics:
                self._topics[topic] = GatewayTopicWriter.open(
                    self._log, topic, self._gateway, self._received
                )
            results = self._topics[topic].write(submissions)
        except InputError as error:
            self._topics.pop(topic, None)
            if topic in self._log.topics():
                raise
            return [SubmissionResult(Fate.refused, "unknown topic", error.message)] * len(
                submissions
            )
        return [results[id(submission)] for submission in submissions]


class GatewayTopicWriter:
    """Writes to one topic. Opening it fences an older process of the same gateway."""

    def __init__(
        self, log: Log, topic: str, gateway: str, received: str, producer: Producer
    ) -> None:
        self._log = log
        self._topic = topic
        self._gateway = gateway
        self._received = received
        self._producer = producer
        self._duplicates = DuplicateFilter(log, topic)

    @classmethod
    def open(cls, log: Log, topic: str, gateway: str, received: str) -> Self:
        """Open the topic's producer, which fences an older process of the gateway, and read the
        topic's columns.
        """
        writer = cls(log, topic, gateway, received, log.producer(topic, f"gateway.{gateway}"))
        writer._read_schema()
        return writer

    def _read_schema(self) -> None:
        self._info: TopicInfo = self._log.topic(self._topic)
        has_time = self._received in self._info.columns and pa.types.is_timestamp(
            self._info.arrow_schema.field(self._received).type
        )
        self._stamped = (self._received,) if has_time else ()
        schema = self._info.arrow_schema
        self._given = pa.schema([field for field in schema if field.name not in self._stamped])
        if self._info.is_table:  # a row without a change type is an upsert
            index = self._given.get_field_index(CHANGE_TYPE)
            self._given = self._given.set(index, self._given.field(index).with_nullable(True))

    def write(self, submissions: list[Submission]) -> dict[int, SubmissionResult]:
        """Return what became of each submission, by its `id()`."""
        new, results = self._split_repeats(submissions)
        rows = self._decode(new)
        refused = [submission for submission in new if id(submission) in rows.refused]
        self._divert(refused, rows.refused)
        for submission in refused:
            reason = rows.refused[id(submission)]
            results[id(submission)] = SubmissionResult(Fate.refused, "does not fit", reason)
        if rows.fitting:
            try:
                position = self._append(rows)
            except BadRows:
                if not self._schema_has_changed():
                    raise
                self._read_schema()
                return results | self.write(rows.fitting)
            stored = SubmissionResult(Fate.stored, position=str(position))
            results |= {id(submission): stored for submission in rows.fitting}
        return results

    def _split_repeats(
        self, submissions: list[Submission]
    ) -> tuple[list[Submission], dict[int, SubmissionResult]]:
        """Return the submissions that are new, and the results of those that are not."""
        if all(submission.id is None for submission in submissions):
            return submissions, {}
        self._duplicates.catch_up()
        new = []
        results: dict[int, SubmissionResult] = {}
        seen: set[str] = set()
        for submission in submissions:
            if submission.id is None:
                new.append(submission)
                continue
            if submission.id in self._duplicates or submission.id in seen:
                results[id(submission)] = SubmissionResult(Fate.repeated)
            else:
                new.append(submission)
            seen.add(submission.id)
        return new, results

    def _decode(self, submissions: list[Submission]) -> DecodedSubmissions:
        """Decode rows for the known columns of the topic. If some do not fit, it is checked whether
        the topic has other columns by now.
        """
        rows = self._decode_known(submissions)
        if rows.refused and self._schema_has_changed():
            self._read_schema()
            rows = self._decode_known(submissions)
        return rows

    def _decode_known(self, submissions: list[Submission]) -> DecodedSubmissions:
        return decode_submissions(
            submissions,
            self._given,
            ignored=self._stamped,
            topic=self._topic,
            # A dropped column is an unknown one here: what is sent in it must not be lost silently.
            history=replace(self._info.schema_history, dropped=()),
        )

    def _schema_has_changed(self) -> bool:
        return self._log.topic(self._topic).schema != self._info.schema

    def _append(self, rows: DecodedSubmissions) -> AppendResult:
        """Append rows. The producer's sequence number stays the same until the append succeeds, so
        that the log recognises one that is tried again.
        """
        ids = [submission.id for submission in rows.fitting if submission.id is not None]
        headers = _headers(rows) if ids else None
        position = self._producer.append(self._to_batch(rows), headers=headers)
        if ids:
            self._duplicates.skip(position)
            for message_id in ids:
                self._duplicates.add(message_id)
        return position

    def _to_batch(self, rows: DecodedSubmissions) -> pa.RecordBatch:
        """Return the topic's columns, in their order, with the time of receipt and, for tables, the
        change type.
        """
        table = pa.Table.from_batches(rows.batches).combine_chunks()
        columns = {name: _single_array(table.column(name)) for name in table.column_names}
        for name in self._stamped:
            received_us = [submission.received_us for submission in rows.fitting]
            times = pa.array(np.repeat(np.array(received_us, np.int64), rows.counts))
            columns[name] = times.cast(self._info.arrow_schema.field(name).type)
        if self._info.is_table:
            columns[CHANGE_TYPE] = pc.fill_null(columns[CHANGE_TYPE], UPDATE_POSTIMAGE)
        return pa.RecordBatch.from_arrays(
            [columns[name] for name in self._info.columns], schema=self._info.arrow_schema
        )

    def _divert(self, refused: Sequence[Submission], reasons: dict[int, str]) -> None:
        """Write refused submissions whose senders get no answer to the dead letters."""
        letters = [
            dead_letters.DeadLetter(
                f"gateway {self._gateway}", reasons[id(submission)], payload=submission.payload
            )
            for submission in refused
            if submission.payload is not None
        ]
        if letters:
            dead_letters.divert(self._log, self._topic, letters)


def _single_array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _headers(rows: DecodedSubmissions) -> list[dict[str, bytes | None] | None]:
    """Return the headers of rows: the id of a submission is in the header of its first row."""
    headers: list[dict[str, bytes | None] | None] = []
    for submission, count in zip(rows.fitting, rows.counts, strict=True):
        if count:
            has_id = submission.id is not None
            headers.append({ID_HEADER: str(submission.id).encode()} if has_id else None)
            headers += [None] * (count - 1)
    return headers
