"""Reading on Kafka without a group: rows between two offsets, and control records. Also the records
that do not fit their topic's schema, which only foreign producers can write. They never stop a
reader. Plain reads count them and write nothing; for groups, queues and pipelines, which would not
come back to them, they become dead letters, each exactly once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from threading import Lock, RLock
from typing import Protocol

import pyarrow as pa
from confluent_kafka import Message

from headrace.durations import from_us
from headrace.errors import (
    ConfigurationError,
    InputError,
    OffsetOutOfRange,
    RetryError,
    TransactionFenced,
)
from headrace.log import dead_letters
from headrace.log.api import Batches, Log
from headrace.log.kafka.cluster import PartitionId
from headrace.log.kafka.config import logger
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.fetcher import Fetcher, OffsetLost
from headrace.log.kafka.records import DecodedRecords, MisfitRecord, control_payload, to_rows
from headrace.log.partitioning import check_partition
from headrace.log.values import ControlRecord, TopicInfo, selected_columns
from headrace.retry import Backoff
from headrace.types.schema_history import SchemaHistory

MAX_ATTEMPTS = 20
MAX_UNKNOWN_FIELDS = 1_000
"""Of how many unknown fields a reader counts the records."""
_DIVERT_BACKOFF = Backoff(first_s=0.02, longest_s=1.0)
DivertedRecords = set[tuple[int | None, int | None]]
"""The partitions and offsets of records that have a dead letter."""
ReadRange = tuple[int, int, int]
"""A partition, and the offsets from which and up to which it is read."""


# Records that do not fit the schema


class MisfitHandler(Protocol):
    """What is done with records that do not fit their topic's schema."""

    def divert(self, topic: str, misfits: Sequence[MisfitRecord]) -> None: ...


class MisfitCounter:
    """Counts records that do not fit their topic's schema, and logs the first ones of a topic."""

    def __init__(self) -> None:
        self._guard = Lock()
        self.counts: Counter[str] = Counter()
        """The number of misfits that were read, by topic."""

    def divert(self, topic: str, misfits: Sequence[MisfitRecord]) -> None:
        with self._guard:
            is_first = not self.counts[topic]
            self.counts[topic] += len(misfits)
        if is_first:
            log_misfits(topic, misfits)


def log_misfits(topic: str, misfits: Sequence[MisfitRecord]) -> None:
    logger.warning(
        "%d records of %s do not fit its schema, such as offset %d: %s",
        len(misfits),
        topic,
        misfits[0].offset,
        misfits[0].reason,
    )


class MisfitDiverter:
    """Writes records that do not fit their topic's schema to `<topic>.dead`. Several readers may
    meet the same record, so each one fences the others and checks which dead letters exist first.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._guard = RLock()  # reentrant: reading dead letters may find misfits too
        self._diverted: dict[str, tuple[dict[int, int], DivertedRecords]] = {}
        self.counts: Counter[str] = Counter()
        """The number of misfits that were read, by topic."""

    def divert(self, topic: str, misfits: Sequence[MisfitRecord]) -> None:
        with self._guard:
            self.counts[topic] += len(misfits)
            log_misfits(topic, misfits)
            _, diverted = self._state(topic)
            if all((misfit.partition, misfit.offset) in diverted for misfit in misfits):
                return
            try:
                self._divert_once(topic, misfits)
            except ConfigurationError as error:
                # A reader without the right to write: the records stay in the topic.
                dead_topic = dead_letters.dead_topic_name(topic)
                logger.error("They cannot be written to %s: %s", dead_topic, error)

    def _divert_once(self, topic: str, misfits: Sequence[MisfitRecord]) -> None:
        """Write a dead letter for each misfit that has none. Readers that divert at the same time
        abort each other's transactions; whoever is aborted looks again at what is missing.
        """
        name = dead_letters.ensure_dead_topic(self._log, topic)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                self._append_missing(topic, name, misfits)
            except (TransactionFenced, RetryError) as error:
                logger.info("Diverting records of %s is tried again: %s", topic, error)
                time.sleep(_DIVERT_BACKOFF.pause_s(attempt))
            else:
                return
        raise RetryError(f"Too many readers divert records of {topic!r} at once.", fix="try again.")

    def _append_missing(self, topic: str, name: str, misfits: Sequence[MisfitRecord]) -> None:
        """1. open a transaction, which fences every other reader that diverts
        2. read which dead letters exist
        3. append the missing ones and commit
        """
        transaction = self._log.transaction(f"dead.{topic}")  # 1
        diverted = self._read_diverted(topic, name)  # 2
        missing = [each for each in misfits if (each.partition, each.offset) not in diverted]
        if not missing:
            transaction.abort()
            return
        rows = dead_letters.dead_letters_to_rows(
            dead_letters.DeadLetter(
                place=f"topic {topic}",
                reason=misfit.reason,
                partition=misfit.partition,
                offset=misfit.offset,
                payload=misfit.payload,
                key=misfit.key,
            )
            for misfit in missing
        )
        transaction.append(name, rows)  # 3
        transaction.commit()

    def _state(self, topic: str) -> tuple[dict[int, int], DivertedRecords]:
        return self._diverted.setdefault(topic, ({}, set()))

    def _read_diverted(self, topic: str, name: str) -> DivertedRecords:
        """Read the dead letters that were added since the last call."""
        positions, diverted = self._state(topic)
        for partition, end in self._log.end_offsets(name).items():
            start = positions.get(partition)
            for batch in self._log.read(
                name, partition, start, end, columns=["place", "source_partition", "source_offset"]
            ):
                own = batch.filter(pa.compute.equal(batch.column("place"), f"topic {topic}"))
                diverted.update(
                    zip(
                        own.column("source_partition").to_pylist(),
                        own.column("source_offset").to_pylist(),
                        strict=True,
                    )
                )
            positions[partition] = end
        return diverted


class RowReader:
    """Decodes records of one topic into rows, for one reader. With `follows_schema` the reader
    takes over changes of the topic's columns while it reads; otherwise it ignores new columns, and
    finds renamed ones.
    """

    def __init__(
        self,
        connection: Connection,
        diverter: MisfitHandler,
        info: TopicInfo,
        *,
        with_headers: bool,
        follows_schema: bool,
    ) -> None:
        self._connection, self._diverter, self.info = connection, diverter, info
        self._with_headers, self._follows_schema = with_headers, follows_schema
        self._ignored_columns: list[str] = []
        self._newest_schema = info.schema
        self.misfits = 0
        """How many records did not fit the schema."""
        self.unknown_fields: Counter[str] = Counter()
        """Fields that the schema does not have, with the number of records that had them."""

    def rows(self, messages: Sequence[Message]) -> pa.RecordBatch:
        """The rows of records of one partition. Records that do not fit are diverted, and unknown
        fields counted, unless they may fit the topic's newest schema.

        Raises:
            RetryError: The topic's columns have changed, and this reader does not follow.
        """
        decoded = self._decode(messages)
        if self._may_be_outdated(decoded) and self._learn_columns():
            decoded = self._decode(messages)
        if decoded.misfits and self._newest_schema != self.info.schema:
            raise RetryError(
                f"The columns of {self.info.name!r} were changed while it was being read:"
                f" {decoded.misfits[0].reason}.",
                fix="read again, with the topic's present columns.",
            )
        if decoded.misfits:
            self.misfits += len(decoded.misfits)
            self._diverter.divert(self.info.name, decoded.misfits)
        if decoded.unknown_fields:
            self._count_unknown(decoded.unknown_fields)
        return decoded.batch

    def _may_be_outdated(self, decoded: DecodedRecords) -> bool:
        """Whether columns may have been added to the topic. A field that is known to be none of its
        columns is compared with a description that may be some seconds old.
        """
        is_full = len(self.unknown_fields) >= MAX_UNKNOWN_FIELDS
        new_fields = decoded.unknown_fields.keys() - self.unknown_fields.keys()
        if decoded.misfits or (new_fields and not is_full):
            return True
        if not decoded.unknown_fields:
            return False
        columns = self._connection.topics.cached(self.info.name)[0].columns
        return not decoded.unknown_fields.keys().isdisjoint(columns)

    def _count_unknown(self, fields: Mapping[str, int]) -> None:
        for name, count in fields.items():
            if name in self.unknown_fields:
                self.unknown_fields[name] += count
            elif len(self.unknown_fields) < MAX_UNKNOWN_FIELDS:
                self.unknown_fields[name] = count
                logger.warning(
                    "Records of %s have a field %r that its schema does not have; it is ignored.",
                    self.info.name,
                    name,
                )

    def _decode(self, messages: Sequence[Message]) -> DecodedRecords:
        return to_rows(
            self.info, messages, headers=self._with_headers, ignored=self._ignored_columns
        )

    def _learn_columns(self) -> bool:
        """Whether the topic's columns have changed since they were last looked up."""
        newest = self._connection.topics.for_reading(self.info.name)
        if newest.schema == self._newest_schema:
            return False
        self._newest_schema = newest.schema
        if self._follows_schema:
            self.info = newest
            return True
        self._ignored_columns = [name for name in newest.columns if name not in self.info.columns]
        self.info = replace(
            self.info, schema_history=_newer_names(self.info, newest.schema_history)
        )
        return True


def _newer_names(info: TopicInfo, newest: SchemaHistory) -> SchemaHistory:
    """The history of a topic's columns for a reader with an older schema: names that they were
    given since count as former ones.
    """
    renamed = list(info.schema_history.renamed)
    for name in info.columns:
        present = newest.present_name(name)
        names = [*newest.former_names(present), present]
        renamed += [
            (other, name) for other in names if other != name and (other, name) not in renamed
        ]
    return replace(info.schema_history, renamed=tuple(renamed))


# Bounded reads


def read_ranges(
    connection: Connection,
    info: TopicInfo,
    partition: int | None,
    start: int | None,
    stop: int | None,
) -> list[ReadRange]:
    """The offsets that a read covers, as of now. A start outside of the existing offsets is
    refused; a stop beyond the end means the end.
    """
    if partition is not None:
        check_partition(info, partition)
    partitions: list[PartitionId] = [
        (info.name, number)
        for number in (range(info.partitions) if partition is None else [partition])
    ]
    starts = connection.admin.start_offsets(partitions)
    ends = connection.admin.end_offsets(partitions)
    ranges = []
    for each in partitions:
        first = starts[each] if start is None else start
        if start is not None and not starts[each] <= first <= ends[each]:
            raise OffsetOutOfRange(*each, first, starts[each], ends[each])
        ranges.append((each[1], first, ends[each] if stop is None else min(stop, ends[each])))
    return ranges


class KafkaBatches(Batches):
    """The rows of some ranges of a topic, partition by partition."""

    def __init__(
        self,
        connection: Connection,
        misfits: MisfitHandler,
        info: TopicInfo,
        ranges: Sequence[ReadRange],
        *,
        columns: Sequence[str] | None,
        headers: bool,
        on_corrupt: str,
        dead_letters: MisfitDiverter,
    ) -> None:
        if on_corrupt not in {"raise", "skip"}:
            raise InputError(f"on_corrupt is {on_corrupt!r}.", fix="use 'raise' or 'skip'.")
        self._connection, self._misfit_handler, self._info = connection, misfits, info
        self._dead_letters = dead_letters
        self._ranges, self._headers = ranges, headers
        self.schema, self._names = selected_columns(info, columns, headers=headers)

    def with_dead_letters(self) -> KafkaBatches:
        diverting = copy(self)
        diverting._misfit_handler = self._dead_letters  # noqa: SLF001 - a copy of this object
        return diverting

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        reader = RowReader(
            self._connection,
            self._misfit_handler,
            self._info,
            with_headers=self._headers,
            follows_schema=False,
        )
        self.misfits, self.unknown_fields = 0, reader.unknown_fields
        with self._connection.admin.fetchers.lease() as fetcher:
            for partition, start, stop in self._ranges:
                for messages in _records(
                    self._connection, fetcher, self._info.name, (partition, start, stop)
                ):
                    batch = reader.rows(messages)
                    self.misfits = reader.misfits
                    if batch.num_rows:
                        columns = [batch.column(name) for name in self._names]
                        yield pa.RecordBatch.from_arrays(columns, schema=self.schema)


def _records(
    connection: Connection, fetcher: Fetcher, topic: str, read_range: ReadRange
) -> Iterator[list[Message]]:
    """The records of a range. OffsetOutOfRange if retention has removed some of them."""
    partition, start, stop = read_range
    for _ in range(MAX_ATTEMPTS):
        try:
            for messages in fetcher.records(topic, partition, start, stop):
                yield messages
                start = (messages[-1].offset() or 0) + 1
        except OffsetLost as lost:
            out_of_range = out_of_range_error(connection, lost)
            if out_of_range is not None:
                raise out_of_range from None
        else:
            return
    raise RetryError(
        f"Kafka lists offset {start} of {topic}[{partition}], and does not find it.",
        fix="check the brokers, and try again.",
    )


def out_of_range_error(connection: Connection, lost: OffsetLost) -> OffsetOutOfRange | None:
    """The error for an offset that the broker does not have; None if it has it after all. Errors of
    a client outlive its assignments: what is lost may be an offset of an earlier one.
    """
    partition = (lost.topic, lost.partition)
    earliest = connection.admin.start_offsets([partition])[partition]
    end = connection.admin.end_offsets([partition])[partition]
    return None if earliest <= lost.offset <= end else lost.with_bounds(earliest, end)


def read_controls(connection: Connection, topic: str, read_range: ReadRange) -> list[ControlRecord]:
    """The control records of a range of one partition."""
    controls = []
    with connection.admin.fetchers.lease() as fetcher:
        for messages in _records(connection, fetcher, topic, read_range):
            for message in messages:
                payload = control_payload(message.headers())
                if payload is not None:
                    time_us = message.timestamp()[1] * 1000
                    controls.append(
                        ControlRecord(
                            partition=read_range[0],
                            offset=message.offset() or 0,
                            timestamp=from_us(time_us),
                            payload=payload,
                        )
                    )
    return controls
