"""Plain reading on Kafka, without a group: rows between two positions, and control records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from headrace.durations import from_us
from headrace.errors import InputError, OffsetOutOfRange, UnknownColumn
from headrace.log.api import Batches, Control, TopicInfo
from headrace.log.kafka.cluster import Place
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.fetching import Fetcher, OffsetLost
from headrace.log.kafka.misfits import DeadLetters, RowReader
from headrace.log.kafka.records import control_payload
from headrace.log.partitioning import check_partition
from headrace.log.values import readable_schema

Range = tuple[int, int, int]
"""A partition, and the offsets from which and up to which it is read."""


def ranges(connection: Connection, info: TopicInfo, partition: int | None, start: int | None, stop: int | None) -> list[Range]:
    """What a read covers, as of now. A start outside of what there is, is refused; a stop beyond the end is the end."""
    if partition is not None:
        check_partition(info, partition)
    places: list[Place] = [(info.name, number) for number in (range(info.partitions) if partition is None else [partition])]
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
        self._connection, self._letters, self._info, self._ranges, self._headers = connection, letters, info, ranges, headers
        full = readable_schema(info, headers=headers)
        self._names = list(full.names) if columns is None else list(columns)
        for name in self._names:
            if name not in full.names:
                raise UnknownColumn(name, full.names, where=f"The topic {info.name!r}")
        self.schema = pa.schema([full.field(name) for name in self._names])

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        reader = RowReader(self._connection, self._letters, self._info, headers=self._headers, follows=False)
        with self._connection.broker.fetchers.lease() as fetcher:
            for partition, start, stop in self._ranges:
                for batch in self._batches(fetcher, reader, partition, start, stop):
                    yield batch.select(self._names)

    def _batches(self, fetcher: Fetcher, reader: RowReader, partition: int, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        try:
            for messages in fetcher.records(self._info.name, partition, start, stop):
                batch = reader.rows(messages)
                if batch.num_rows:
                    yield batch
        except OffsetLost as lost:
            raise explained(self._connection, lost) from None


def explained(connection: Connection, lost: OffsetLost) -> OffsetOutOfRange:
    place = (lost.topic, lost.partition)
    return lost.explained(connection.broker.earliest([place])[place], connection.broker.ends([place])[place])


def controls(connection: Connection, topic: str, span: Range) -> list[Control]:
    partition, start, stop = span
    found = []
    with connection.broker.fetchers.lease() as fetcher:
        try:
            for messages in fetcher.records(topic, partition, start, stop):
                for message in messages:
                    payload = control_payload(message.headers())
                    if payload is not None:
                        found.append(Control(partition, message.offset() or 0, from_us(message.timestamp()[1] * 1000), payload))
        except OffsetLost as lost:
            raise explained(connection, lost) from None
    return found
