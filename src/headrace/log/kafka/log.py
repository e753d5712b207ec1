"""The log on Kafka: the API of `headrace.log.api` over a cluster. Each part has a file of its own;
this is where they meet.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa

from headrace.durations import from_us, to_time_us
from headrace.errors import BadSchema, HeadraceError
from headrace.log.api import Batches, Consumer, Log, Producer, Queue, Transaction
from headrace.log.kafka import staging
from headrace.log.kafka.cluster import Place
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.consumer import KafkaConsumer
from headrace.log.kafka.errors import doing
from headrace.log.kafka.fetcher import Fetcher, OffsetLost
from headrace.log.kafka.groups import Groups, since
from headrace.log.kafka.producer import KafkaProducer
from headrace.log.kafka.queue import KafkaQueue
from headrace.log.kafka.reader import DeadLetters, KafkaBatches, Range, controls, ranges
from headrace.log.kafka.records import control_record, to_rows
from headrace.log.kafka.sender import Delivery, send
from headrace.log.kafka.transaction import KafkaTransaction
from headrace.log.partitioning import check_partition
from headrace.log.topic_config import check_name, declared_topic
from headrace.log.values import (
    AppendResult,
    ControlRecord,
    Duration,
    Finding,
    GroupInfo,
    Offsets,
    Partitioner,
    PartitionLag,
    Staged,
    TopicInfo,
    TopicStats,
)

# Looking after a log on Kafka: reading everything to see whether it can be read, and how much there
# is. The brokers do the rest.


UNKNOWN = -1


def verify(connection: Connection, topics: Sequence[str]) -> list[Finding]:
    """Every record that cannot be read: its checksum is wrong, or it does not fit the schema.
    Topics without a schema are left out.
    """
    findings: list[Finding] = []
    with Fetcher(connection.cluster, {"check.crcs": True}) as fetcher:
        for name in topics:
            try:
                info = connection.topics.info(name)
            except BadSchema:
                if len(topics) == 1:
                    raise
                continue
            for span in ranges(connection, info, None, None, None):
                findings += _verify_partition(fetcher, info, span)
    return findings


def _verify_partition(fetcher: Fetcher, info: TopicInfo, span: Range) -> Iterator[Finding]:
    partition, start, stop = span
    try:
        for messages in fetcher.records(info.name, partition, start, stop):
            for misfit in to_rows(info, messages).misfits:
                yield Finding(
                    "corrupt",
                    f"{info.name}[{partition}]",
                    UNKNOWN,
                    misfit.reason,
                    info.name,
                    partition,
                    misfit.offset,
                )
    except OffsetLost:
        return  # retention was faster: what is gone needs no checking
    except HeadraceError as error:
        yield Finding(
            "corrupt", f"{info.name}[{partition}]", UNKNOWN, error.message, info.name, partition
        )


def stats(connection: Connection, topics: Sequence[str]) -> list[TopicStats]:
    """Sizes. Kafka's client tells neither bytes nor segments (-1), and counts offsets, of which
    markers of transactions take some.
    """
    return [_topic_stats(connection, name) for name in topics]


def _topic_stats(connection: Connection, name: str) -> TopicStats:
    count = connection.broker.partitions(name) or connection.topics.info(name).partitions
    places = [(name, partition) for partition in range(count)]
    starts, ends = connection.broker.earliest(places), connection.broker.ends(places)
    rows = sum(ends[place] - starts[place] for place in places)
    earliest = {partition: starts[name, partition] for partition in range(count)}
    return TopicStats(
        name,
        count,
        rows,
        UNKNOWN,
        UNKNOWN,
        earliest,
        {partition: ends[name, partition] for partition in range(count)},
    )


class KafkaLog(Log):
    """Options are librdkafka's: `open_log("kafka://host:9093", **{"security.protocol": "SSL"})`.
    Safe for several threads.
    """

    def __init__(self, address: str, **options: Any) -> None:
        self.address = address
        self._connection = Connection(address, options)
        self._topics = self._connection.topics
        self._groups = Groups(self._connection)
        self._letters = DeadLetters(self)
        self._closed = False

    # Topics

    def create_topic(
        self,
        name: str,
        schema: str,
        *,
        key: str | Sequence[str] | None = None,
        partitions: int = 1,
        exist_ok: bool = False,
        **options: Any,
    ) -> TopicInfo:
        return self._topics.create(
            declared_topic(
                name, schema, key, partitions=partitions, is_table=False, options=options
            ),
            exist_ok=exist_ok,
        )

    def create_table(
        self,
        name: str,
        schema: str,
        *,
        key: str | Sequence[str],
        partitions: int = 1,
        exist_ok: bool = False,
        **options: Any,
    ) -> TopicInfo:
        return self._topics.create(
            declared_topic(
                name, schema, key, partitions=partitions, is_table=True, options=options
            ),
            exist_ok=exist_ok,
        )

    def alter_topic(
        self,
        name: str,
        *,
        add_columns: str | None = None,
        partitions: int | None = None,
        allow_moving_keys: bool = False,
        **settings: Any,
    ) -> TopicInfo:
        return self._topics.alter(
            name,
            columns=add_columns,
            partitions=partitions,
            allow_moving_keys=allow_moving_keys,
            settings=settings,
        )

    def delete_topic(self, name: str) -> None:
        self._topics.delete(name)

    def topics(self) -> list[str]:
        return self._topics.names()

    def topic(self, name: str) -> TopicInfo:
        return self._topics.info(name)

    # Writing

    def producer(
        self, topic: str, id: str | None = None, *, partitioner: Partitioner | None = None
    ) -> Producer:
        return KafkaProducer(self._connection, topic, id, partitioner)

    def transaction(self, id: str, *, timeout: Duration = "1 minute") -> Transaction:
        return KafkaTransaction(self._connection, id, timeout)

    def append_control(self, topic: str, partition: int, payload: bytes) -> AppendResult:
        check_partition(self.topic(topic), partition)
        delivery = Delivery()
        with doing(f"append to {topic!r}"):
            send(self._connection.plain, [control_record(topic, partition, payload)], delivery)
        return AppendResult(delivery.ranges())

    def stage(
        self,
        topic: str,
        batches: Iterable[pa.RecordBatch],
        *,
        partition: int | None = None,
        directory: str | None = None,
        group: str | None = None,
    ) -> Staged:
        info, _ = self._topics.recent(topic)
        return staging.stage(
            info,
            batches,
            directory,
            group,
            partition=partition,
            max_bytes=self._connection.max_bytes,
        )

    def discard_staged(self, staged: Staged) -> None:
        staging.discard(staged)

    def discard_group(self, group: str, *, directory: str | None = None) -> None:
        staging.discard_group(group, directory)

    # Reading

    def read(
        self,
        topic: str,
        partition: int | None = None,
        start: int | None = None,
        stop: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        headers: bool = False,
        on_corrupt: str = "raise",
    ) -> Batches:
        info = self.topic(topic)
        spans = ranges(self._connection, info, partition, start, stop)
        return KafkaBatches(
            self._connection,
            self._letters,
            info,
            spans,
            columns=columns,
            headers=headers,
            on_corrupt=on_corrupt,
        )

    def read_control(
        self, topic: str, partition: int, start: int | None = None, stop: int | None = None
    ) -> list[ControlRecord]:
        (span,) = ranges(self._connection, self.topic(topic), partition, start, stop)
        return controls(self._connection, topic, span)

    def start_offsets(self, topic: str) -> dict[int, int]:
        return _by_partition(self._connection.broker.earliest(self._places(topic)))

    def whole_from(self, topic: str) -> dict[int, int]:
        """The broker does not say what it compacted: what is younger than the history to keep is
        whole, all else may not be.
        """
        info, starts = self.topic(topic), self.start_offsets(topic)
        if not info.compact and info.history_us is None:
            return starts
        whole = (
            self.offsets_at(topic, from_us(time.time_ns() // 1000 - info.history_us))
            if info.history_us
            else self.end_offsets(topic)
        )
        return {partition: max(start, whole[partition]) for partition, start in starts.items()}

    def end_offsets(self, topic: str) -> dict[int, int]:
        return _by_partition(self._connection.broker.ends(self._places(topic)))

    def snapshot(self, topics: Iterable[str]) -> Offsets:
        """One question to the cluster, but not one moment: a transaction that is just being
        committed may be cut in two.
        """
        names = list(topics)
        ends = self._connection.broker.ends(
            [place for name in names for place in self._recent_places(name)]
        )
        return Offsets(
            {
                name: _by_partition({place: end for place, end in ends.items() if place[0] == name})
                for name in names
            }
        )

    def offsets_at(self, topic: str, time: datetime | str | float) -> dict[int, int]:
        places, time_us = self._recent_places(topic), to_time_us(time)
        return _by_partition(
            since(self._connection, places, time_us, self._connection.broker.ends(places))
        )

    def _places(self, topic: str) -> list[Place]:
        return [(topic, partition) for partition in range(self.topic(topic).partitions)]

    def _recent_places(self, topic: str) -> list[Place]:
        """For what a pipeline asks several times a second. Partitions added within the last seconds
        may be missing.
        """
        return [(topic, partition) for partition in range(self._topics.recent(topic)[0].partitions)]

    # Groups, queues, notes

    def consumer(
        self,
        topics: str | Sequence[str],
        group: str,
        *,
        start: str = "earliest",
        session_timeout: Duration = "10 seconds",
        max_rows: int = 100_000,
        on_lost: str = "raise",
        headers: bool = False,
    ) -> Consumer:
        names = (topics,) if isinstance(topics, str) else tuple(topics)
        return KafkaConsumer(
            self._connection,
            self._letters,
            names,
            group,
            start=start,
            session_timeout=session_timeout,
            max_rows=max_rows,
            on_lost=on_lost,
            headers=headers,
        )

    def queue(self, topic: str, group: str, *, delivery_limit: int = 5) -> Queue:
        return KafkaQueue(self._connection, self, self._letters, topic, group, delivery_limit)

    def groups(self) -> list[str]:
        return self._groups.names()

    def group(self, name: str) -> GroupInfo:
        return self._groups.info(name)

    def committed(self, group: str) -> Offsets:
        return self._groups.committed(group)

    def reset_group(
        self,
        group: str,
        topic: str,
        to: str | int | datetime,
        *,
        partitions: Sequence[int] | None = None,
    ) -> Offsets:
        check_name(group, what="group")
        return self._groups.reset(group, topic, to, partitions)

    def lag(self, group: str | None = None) -> list[PartitionLag]:
        return self._groups.lag(group)

    def note(self, name: str) -> str | None:
        return self._connection.notes.note(name)

    # Care

    def verify(self, topic: str | None = None) -> list[Finding]:
        return verify(self._connection, [topic] if topic is not None else self.topics())

    def stats(self, topic: str | None = None) -> list[TopicStats]:
        return stats(self._connection, [topic] if topic is not None else self.topics())

    def maintain(self, topic: str | None = None) -> dict[str, Any]:
        if topic is not None:
            self.topic(topic)
        return {
            "note": "Nothing to do: on Kafka the brokers apply retention and compaction themselves."
        }

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._connection.close()


def _by_partition(offsets: dict[Place, int]) -> dict[int, int]:
    return {partition: offset for (_, partition), offset in sorted(offsets.items())}
