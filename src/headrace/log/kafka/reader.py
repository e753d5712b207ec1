"""Plain reading on Kafka, without a group: rows between two positions, and control records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from threading import RLock

import pyarrow as pa
from confluent_kafka import Message

from headrace.durations import from_us
from headrace.errors import (
    ConfigurationError,
    InputError,
    OffsetOutOfRange,
    RetryError,
    TransactionFenced,
    UnknownColumn,
)
from headrace.log import dead_letters
from headrace.log.api import Batches, Log
from headrace.log.kafka.cluster import Place
from headrace.log.kafka.config import logger
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.fetcher import Fetcher, OffsetLost
from headrace.log.kafka.records import Misfit, control_payload, to_rows
from headrace.log.partitioning import check_partition
from headrace.log.values import ControlRecord, TopicInfo, readable_schema

# Records that do not fit their topic's schema, which only foreign producers can write: they go to
# dead letters, each once, and never stop the stream.


MAX_ATTEMPTS = 20
Seen = set[tuple[int | None, int | None]]


class DeadLetters:
    """Puts misfits into `<topic>.dead`. Several readers may meet the same record, so whoever
    diverts fences the others and looks first.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._guard = RLock()  # letters may have misfits among them too
        self._seen: dict[str, tuple[dict[int, int], Seen]] = {}
        self.counts: Counter[str] = Counter()
        """How many were met, by topic."""

    def divert(self, topic: str, misfits: Sequence[Misfit]) -> None:
        with self._guard:
            self.counts[topic] += len(misfits)
            logger.warning(
                "%d records of %s do not fit its schema, such as offset %d: %s",
                len(misfits),
                topic,
                misfits[0].offset,
                misfits[0].reason,
            )
            if all(
                (misfit.partition, misfit.offset) in self._known(topic)[1] for misfit in misfits
            ):
                return
            try:
                self._divert_once(topic, misfits)
            except (
                ConfigurationError
            ) as error:  # a reader without the right to write: the records stay where they are
                logger.error(
                    "They cannot be put into %s: %s", dead_letters.dead_topic_name(topic), error
                )

    def _divert_once(self, topic: str, misfits: Sequence[Misfit]) -> None:
        """1. fence whoever else diverts; 2. look what is there; 3. add the rest and commit; if
        fenced meanwhile, look again.
        """
        name = dead_letters.ensure_dead_topic(self._log, topic)
        for _ in range(MAX_ATTEMPTS):
            transaction = self._log.transaction(f"dead.{topic}")
            seen = self._read(topic, name)
            fresh = [misfit for misfit in misfits if (misfit.partition, misfit.offset) not in seen]
            if not fresh:
                transaction.abort()
                return
            transaction.append(
                name, dead_letters.dead_letters_to_rows(_letter(topic, misfit) for misfit in fresh)
            )
            try:
                transaction.commit()
            except TransactionFenced:
                continue
            return
        raise RetryError(f"Too many readers divert records of {topic!r} at once.", fix="try again.")

    def _known(self, topic: str) -> tuple[dict[int, int], Seen]:
        return self._seen.setdefault(topic, ({}, set()))

    def _read(self, topic: str, name: str) -> Seen:
        """Which records have a letter already."""
        positions, seen = self._known(topic)
        for partition, end in self._log.end_offsets(name).items():
            start = positions.get(partition)
            for batch in self._log.read(
                name, partition, start, end, columns=["place", "source_partition", "source_offset"]
            ):
                mine = batch.filter(pa.compute.equal(batch.column("place"), _place(topic)))
                seen.update(
                    zip(
                        mine.column("source_partition").to_pylist(),
                        mine.column("source_offset").to_pylist(),
                        strict=True,
                    )
                )
            positions[partition] = end
        return seen


def _place(topic: str) -> str:
    return f"topic {topic}"


def _letter(topic: str, misfit: Misfit) -> dead_letters.DeadLetter:
    return dead_letters.DeadLetter(
        place=_place(topic),
        reason=misfit.reason,
        partition=misfit.partition,
        offset=misfit.offset,
        payload=misfit.payload,
        key=misfit.key,
    )


class RowReader:
    """Records of one topic into rows, for one reader. `follows`: it takes over columns that are
    added to the topic while it reads.
    """

    def __init__(
        self,
        connection: Connection,
        letters: DeadLetters,
        info: TopicInfo,
        *,
        headers: bool,
        follows: bool,
    ) -> None:
        self._connection, self._letters, self.info = connection, letters, info
        self._headers, self._follows = headers, follows
        self._ignored: list[str] = []

    def rows(self, messages: Sequence[Message]) -> pa.RecordBatch:
        """Rows of records of one partition. What does not fit is diverted, unless it is the topic
        that has changed.
        """
        found = to_rows(self.info, messages, headers=self._headers, ignored=self._ignored)
        if found.misfits and self._learned_columns():
            found = to_rows(self.info, messages, headers=self._headers, ignored=self._ignored)
        if found.misfits:
            self._letters.divert(self.info.name, found.misfits)
        return found.batch

    def _learned_columns(self) -> bool:
        newest = self._connection.topics.info(self.info.name)
        added = [
            name
            for name in newest.columns
            if name not in self.info.columns and name not in self._ignored
        ]
        if not added:
            return False
        if self._follows:
            self.info = newest
        else:
            self._ignored += added
        return True


Range = tuple[int, int, int]
"""A partition, and the offsets from which and up to which it is read."""


def ranges(
    connection: Connection,
    info: TopicInfo,
    partition: int | None,
    start: int | None,
    stop: int | None,
) -> list[Range]:
    """What a read covers, as of now. A start outside of what there is, is refused; a stop beyond
    the end is the end.
    """
    if partition is not None:
        check_partition(info, partition)
    places: list[Place] = [
        (info.name, number)
        for number in (range(info.partitions) if partition is None else [partition])
    ]
    starts, ends = connection.broker.earliest(places), connection.broker.ends(places)
    found = []
    for place in places:
        first = starts[place] if start is None else start
        if start is not None and not starts[place] <= first <= ends[place]:
            raise OffsetOutOfRange(*place, first, starts[place], ends[place])
        found.append((place[1], first, ends[place] if stop is None else min(stop, ends[place])))
    return found


class KafkaBatches(Batches):
    """Rows of some ranges of a topic, partition by partition."""

    def __init__(
        self,
        connection: Connection,
        letters: DeadLetters,
        info: TopicInfo,
        ranges: Sequence[Range],
        *,
        columns: Sequence[str] | None,
        headers: bool,
        on_corrupt: str,
    ) -> None:
        if on_corrupt not in {"raise", "skip"}:
            raise InputError(f"on_corrupt is {on_corrupt!r}.", fix="use 'raise' or 'skip'.")
        self._connection, self._letters, self._info, self._ranges, self._headers = (
            connection,
            letters,
            info,
            ranges,
            headers,
        )
        full = readable_schema(info, headers=headers)
        self._names = list(full.names) if columns is None else list(columns)
        for name in self._names:
            if name not in full.names:
                raise UnknownColumn(name, full.names, where=f"The topic {info.name!r}")
        self.schema = pa.schema([full.field(name) for name in self._names])

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        reader = RowReader(
            self._connection, self._letters, self._info, headers=self._headers, follows=False
        )
        with self._connection.broker.fetchers.lease() as fetcher:
            for partition, start, stop in self._ranges:
                for batch in self._batches(fetcher, reader, partition, start, stop):
                    yield batch.select(self._names)

    def _batches(
        self, fetcher: Fetcher, reader: RowReader, partition: int, start: int, stop: int
    ) -> Iterator[pa.RecordBatch]:
        try:
            for messages in fetcher.records(self._info.name, partition, start, stop):
                batch = reader.rows(messages)
                if batch.num_rows:
                    yield batch
        except OffsetLost as lost:
            raise explained(self._connection, lost) from None


def explained(connection: Connection, lost: OffsetLost) -> OffsetOutOfRange:
    place = (lost.topic, lost.partition)
    return lost.explained(
        connection.broker.earliest([place])[place], connection.broker.ends([place])[place]
    )


def controls(connection: Connection, topic: str, span: Range) -> list[ControlRecord]:
    partition, start, stop = span
    found = []
    with connection.broker.fetchers.lease() as fetcher:
        try:
            for messages in fetcher.records(topic, partition, start, stop):
                for message in messages:
                    payload = control_payload(message.headers())
                    if payload is not None:
                        found.append(
                            ControlRecord(
                                partition,
                                message.offset() or 0,
                                from_us(message.timestamp()[1] * 1000),
                                payload,
                            )
                        )
        except OffsetLost as lost:
            raise explained(connection, lost) from None
    return found
