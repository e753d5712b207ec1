"""`KafkaLog`: the interface of `headrace.log.api` on a Kafka cluster. Producers, consumers, queues
and transactions are in modules of their own; `verify` and `stats` are here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from headrace.durations import from_us, to_time_us
from headrace.errors import BadSchema, HeadraceError, NotSupported, RetryError, UnknownTopic
from headrace.log.api import (
    Batches,
    Consumer,
    Log,
    Producer,
    Queue,
    RebalanceCallback,
    Transaction,
)
from headrace.log.kafka import staging
from headrace.log.kafka.cluster import PartitionId
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.consumer import KafkaConsumer
from headrace.log.kafka.errors import translate_errors
from headrace.log.kafka.fetcher import Fetcher, OffsetLost
from headrace.log.kafka.groups import GroupAdmin, offsets_since
from headrace.log.kafka.producer import KafkaProducer
from headrace.log.kafka.queue import KafkaQueue
from headrace.log.kafka.reader import (
    KafkaBatches,
    MisfitCounter,
    MisfitDiverter,
    ReadRange,
    read_controls,
    read_ranges,
)
from headrace.log.kafka.records import control_record, to_rows
from headrace.log.kafka.sender import DeliveryReports, send_records
from headrace.log.kafka.transaction import KafkaTransaction
from headrace.log.partitioning import check_partition
from headrace.log.topic_config import declared_topic, trim_offsets
from headrace.log.values import (
    AppendResult,
    BackupResult,
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
from headrace.names import check_name
from headrace.types.schema_history import ColumnChange

UNKNOWN = -1


class KafkaLog(Log):
    """A log on a Kafka cluster. Options are librdkafka's:
    `open_log("kafka://host:9093", **{"security.protocol": "SSL"})`. Thread-safe.
    """

    def __init__(self, address: str, connection: Connection) -> None:
        self.address = address
        self._connection = connection
        self._topics = connection.topics
        self._groups = GroupAdmin(connection)
        self._diverter = MisfitDiverter(self)
        self._misfit_counter = MisfitCounter()
        self._closed = False

    @classmethod
    def open(cls, address: str, **options: Any) -> KafkaLog:
        """Connect to the cluster at `kafka://host:port`. LogUnavailable if no broker responds."""
        return cls(address, Connection.connect(address, options))

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
        alter_columns: str | None = None,
        drop_columns: str | Sequence[str] | None = None,
        rename_columns: Mapping[str, str] | None = None,
        partitions: int | None = None,
        allow_moving_keys: bool = False,
        dry_run: bool = False,
        **settings: Any,
    ) -> TopicInfo:
        return self._topics.alter(
            name,
            change=ColumnChange.of(
                add=add_columns, alter=alter_columns, drop=drop_columns, rename=rename_columns
            ),
            partitions=partitions,
            allow_moving_keys=allow_moving_keys,
            dry_run=dry_run,
            settings=settings,
        )

    def delete_topic(self, name: str) -> None:
        self._topics.delete(name)

    def topics(self) -> list[str]:
        return self._topics.names()

    def topic(self, name: str) -> TopicInfo:
        return self._topics.info(name)

    def topic_infos(self) -> dict[str, TopicInfo | None]:
        return self._topics.infos()

    def trim_topic(
        self,
        name: str,
        before: str | int | datetime,
        *,
        partitions: Sequence[int] | None = None,
    ) -> dict[int, int]:
        starts = self.start_offsets(name)
        offsets = {
            partition: offset
            for partition, offset in trim_offsets(self, name, before, partitions).items()
            if offset > starts[partition]
        }
        self._connection.admin.delete_records(name, offsets)
        return self.start_offsets(name)

    # Writing

    def producer(
        self, topic: str, id: str | None = None, *, partitioner: Partitioner | None = None
    ) -> Producer:
        return KafkaProducer.open(self._connection, topic, id, partitioner)

    def transaction(self, id: str, *, timeout: Duration = "1 minute") -> Transaction:
        return KafkaTransaction.begin(self._connection, id, timeout)

    def append_control(self, topic: str, partition: int, payload: bytes) -> AppendResult:
        check_partition(self.topic(topic), partition)
        delivery = DeliveryReports()
        with translate_errors(f"append to {topic!r}"):
            send_records(
                self._connection.producer, [control_record(topic, partition, payload)], delivery
            )
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
        info, _ = self._topics.cached(topic)
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
        info = self._topics.for_reading(topic)
        return KafkaBatches(
            self._connection,
            self._misfit_counter,
            info,
            read_ranges(self._connection, info, partition, start, stop),
            columns=columns,
            headers=headers,
            on_corrupt=on_corrupt,
            dead_letters=self._diverter,
        )

    def read_control(
        self, topic: str, partition: int, start: int | None = None, stop: int | None = None
    ) -> list[ControlRecord]:
        info = self._topics.for_reading(topic)
        (read_range,) = read_ranges(self._connection, info, partition, start, stop)
        return read_controls(self._connection, topic, read_range)

    def start_offsets(self, topic: str) -> dict[int, int]:
        return _by_partition(self._connection.admin.start_offsets(self._partitions(topic)))

    def whole_from(self, topic: str) -> dict[int, int]:
        """Kafka does not report what it has compacted: records younger than the topic's history are
        complete, older ones may be compacted.
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
        return _by_partition(self._connection.admin.end_offsets(self._partitions(topic)))

    def snapshot(self, topics: Iterable[str]) -> Offsets:
        """One request to the cluster, but not one point in time: the snapshot may split a
        transaction that is just being committed.
        """
        names = list(topics)
        ends = self._connection.admin.end_offsets(
            [each for name in names for each in self._cached_partitions(name)]
        )
        return Offsets(
            {
                name: _by_partition(
                    {
                        topic_partition: end
                        for topic_partition, end in ends.items()
                        if topic_partition[0] == name
                    }
                )
                for name in names
            }
        )

    def offsets_at(self, topic: str, time: datetime | str | float) -> dict[int, int]:
        partitions, time_us = self._cached_partitions(topic), to_time_us(time)
        return _by_partition(
            offsets_since(
                self._connection,
                partitions,
                time_us,
                self._connection.admin.end_offsets(partitions),
            )
        )

    def _partitions(self, topic: str) -> list[PartitionId]:
        return [(topic, partition) for partition in range(self._topics.partition_count(topic))]

    def _cached_partitions(self, topic: str) -> list[PartitionId]:
        """The partitions of a topic by their cached number, for requests that a pipeline makes
        several times a second. Partitions added within the last seconds may be missing.
        """
        count = self._topics.cached_partition_count(topic)
        return [(topic, partition) for partition in range(count)]

    # Groups, queues, notes

    def consumer(
        self,
        topics: str | Sequence[str],
        group: str,
        *,
        start: str = "earliest",
        session_timeout: Duration = "10 seconds",
        max_poll_interval: Duration = "5 minutes",
        max_rows: int = 100_000,
        max_bytes: int = 64 << 20,
        on_lost: str = "raise",
        on_assigned: RebalanceCallback | None = None,
        on_revoked: RebalanceCallback | None = None,
        headers: bool = False,
    ) -> Consumer:
        names = (topics,) if isinstance(topics, str) else tuple(topics)
        consumer = KafkaConsumer(
            self._connection,
            self._diverter,
            names,
            group,
            start=start,
            session_timeout=session_timeout,
            max_poll_interval=max_poll_interval,
            max_rows=max_rows,
            max_bytes=max_bytes,
            on_lost=on_lost,
            on_assigned=on_assigned,
            on_revoked=on_revoked,
            headers=headers,
        )
        consumer.join()
        return consumer

    def queue(self, topic: str, group: str, *, delivery_limit: int = 5) -> Queue:
        return KafkaQueue(self._connection, self, self._diverter, topic, group, delivery_limit)

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
        to: str | int | datetime | None = None,
        *,
        shift: int | None = None,
        partitions: Sequence[int] | None = None,
        dry_run: bool = False,
    ) -> Offsets:
        check_name(group, what="group")
        return self._groups.reset(
            group, topic, to, shift=shift, partitions=partitions, dry_run=dry_run
        )

    def delete_group(self, name: str) -> None:
        self._groups.delete(name)

    def lag(self, group: str | None = None) -> list[PartitionLag]:
        return self._groups.lag(group)

    def note(self, name: str) -> str | None:
        return self._connection.notes.note(name)

    def notes(self, prefix: str) -> dict[str, str]:
        return self._connection.notes.notes(prefix)

    # Maintenance

    def verify(self, topic: str | None = None) -> list[Finding]:
        return verify(self._connection, [topic] if topic is not None else self.topics())

    def stats(
        self,
        topic: str | None = None,
        *,
        count_rows: bool = True,  # noqa: ARG002 - Kafka's brokers count offsets alone
    ) -> list[TopicStats]:
        counts = self._connection.admin.partition_counts()
        if topic is not None and topic not in counts:
            raise UnknownTopic(topic, self.topics())
        names = [topic] if topic is not None else self.topics()
        return all_stats(self._connection, {name: counts[name] for name in names if name in counts})

    def backup(self, directory: str | Path) -> BackupResult:  # noqa: ARG002
        raise NotSupported(
            "A cluster is not backed up into a directory.",
            fix="replicate its topics to another cluster, as with MirrorMaker.",
        )

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


# Verification and statistics


def verify(connection: Connection, topics: Sequence[str]) -> list[Finding]:
    """A finding for every record that cannot be read: its checksum is wrong, or it does not fit the
    schema. Topics without a schema are skipped, unless it is the only topic.
    """
    findings: list[Finding] = []
    with Fetcher.open(connection.cluster, {"check.crcs": True}) as fetcher:
        for name in topics:
            try:
                info = connection.topics.info(name)
            except BadSchema:
                if len(topics) == 1:
                    raise
                continue
            for read_range in read_ranges(connection, info, None, None, None):
                findings += _verify_partition(fetcher, info, read_range)
    return findings


def _verify_partition(
    fetcher: Fetcher, info: TopicInfo, read_range: ReadRange
) -> Iterator[Finding]:
    partition, start, stop = read_range
    where = f"{info.name}[{partition}]"
    try:
        for messages in fetcher.records(info.name, partition, start, stop):
            for misfit in to_rows(info, messages).misfits:
                yield Finding(
                    kind="corrupt",
                    file=where,
                    position=UNKNOWN,
                    message=misfit.reason,
                    topic=info.name,
                    partition=partition,
                    offset=misfit.offset,
                )
    except OffsetLost:
        return  # removed by retention meanwhile: there is nothing to verify
    except RetryError:
        raise  # of the cluster or of a schema registry: it says nothing about the records
    except HeadraceError as error:
        yield Finding(
            kind="corrupt",
            file=where,
            position=UNKNOWN,
            message=error.message,
            topic=info.name,
            partition=partition,
        )


def all_stats(connection: Connection, counts: Mapping[str, int]) -> list[TopicStats]:
    """The size of topics with these numbers of partitions, with two requests for all. Kafka's
    client reports neither bytes nor segments (-1). Rows are counted by offsets, of which
    transaction markers take some.
    """
    starts, ends = connection.admin.known_offsets(
        (name, partition) for name, count in counts.items() for partition in range(count)
    )
    stats = []
    for name, count in counts.items():
        numbers = range(count)
        earliest = {n: starts[name, n] for n in numbers if (name, n) in starts}
        end = {n: ends[name, n] for n in numbers if (name, n) in ends}
        is_known = len(earliest) == len(end) == count
        stats.append(
            TopicStats(
                name=name,
                partitions=count,
                rows=sum(end.values()) - sum(earliest.values()) if is_known else UNKNOWN,
                bytes=UNKNOWN,
                segments=UNKNOWN,
                earliest=earliest,
                end=end,
            )
        )
    return stats


def _by_partition(offsets: dict[PartitionId, int]) -> dict[int, int]:
    return {partition: offset for (_, partition), offset in sorted(offsets.items())}
