"""Groups seen from outside: listing them, their committed offsets and lag, resetting and deleting
them.

The consumer groups are Kafka's own; queues are share groups, whose offsets Kafka does not show.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from threading import Lock

from confluent_kafka import Consumer, KafkaError, TopicPartition

from headrace.durations import to_time_us
from headrace.errors import NotSupported, UnknownGroup
from headrace.log.kafka.cluster import PartitionId
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.errors import translate_errors
from headrace.log.partitioning import check_partition
from headrace.log.topic_config import resolve_reset, shifted_offsets
from headrace.log.values import GroupInfo, MemberInfo, Offsets, PartitionLag

MAX_CACHED_TIMES = 100_000
LOOKUP_SECONDS = 5.0

StartOffset = tuple[PartitionId, int]
"""A partition and the offset from which its next record is looked up."""
NextRecord = tuple[int, float] | None
"""The offset of the next record at or after a start offset, and the time it was appended at. None
if only transaction markers follow.
"""


class GroupAdmin:
    """The groups of a cluster. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._admin = connection, connection.admin
        self._times = RecordTimeCache(connection)

    def names(self) -> list[str]:
        return sorted({*self._admin.consumer_groups(), *self._admin.share_groups()})

    def info(self, name: str) -> GroupInfo:
        if name in self._admin.consumer_groups():
            description = self._admin.describe_group(name)
            members = tuple(
                MemberInfo(
                    member.member_id,
                    tuple(
                        (each.topic, each.partition) for each in member.assignment.topic_partitions
                    ),
                    member.host.lstrip("/"),
                )
                for member in (description.members if description else [])
            )
            return GroupInfo(
                name=name,
                kind="group",
                generation=-1,
                members=members,
                committed=self._admin.committed_offsets([name])[name],
            )
        if name in self._admin.share_groups():
            return GroupInfo(name=name, kind="queue", generation=-1, members=(), committed={})
        raise UnknownGroup(name, self.names())

    def committed(self, name: str) -> Offsets:
        offsets = self._admin.committed_offsets([name])[name]
        if not offsets and name not in self.names():
            raise UnknownGroup(name, self.names())
        return Offsets(offsets)

    # Reset

    def reset(
        self,
        group: str,
        topic: str,
        to: str | int | datetime | None,
        *,
        shift: int | None,
        partitions: Sequence[int] | None,
        dry_run: bool,
    ) -> Offsets:
        to = resolve_reset(to, shift)
        info = self._connection.topics.info(topic)
        chosen = range(info.partitions) if partitions is None else partitions
        for partition in chosen:
            check_partition(info, partition)
        ids = [(topic, partition) for partition in chosen]
        if to is None:
            assert shift is not None
            committed = self.committed(group).get(topic, {})
            starts, ends = self._admin.start_offsets(ids), self._admin.end_offsets(ids)
            offsets = shifted_offsets(
                group,
                topic,
                {partition: committed.get(partition) for partition in chosen},
                shift,
                {each[1]: (starts[each], ends[each]) for each in ids},
            )
        else:
            offsets = {each[1]: offset for each, offset in self._targets(ids, to).items()}
        if not dry_run:
            self._admin.alter_offsets(group, topic, offsets)
        return Offsets({topic: offsets})

    def delete(self, name: str) -> None:
        if name in self._admin.consumer_groups():
            self._admin.delete_group(name)
        elif name in self._admin.share_groups():
            raise NotSupported(
                f"The group {name!r} is a queue's, and Kafka's Python client cannot delete share"
                " groups.",
                fix="use Kafka's own tool: kafka-share-groups.sh --delete --group NAME.",
            )
        else:
            raise UnknownGroup(name, self.names())

    def _targets(
        self, partitions: Sequence[PartitionId], to: str | int | datetime
    ) -> dict[PartitionId, int]:
        """The offsets that a reset sets, within the existing offsets of each partition."""
        starts = self._admin.start_offsets(partitions)
        ends = self._admin.end_offsets(partitions)
        if to == "earliest":
            return starts
        if to == "latest":
            return ends
        if isinstance(to, int) and not isinstance(to, bool):
            return {each: min(max(to, starts[each]), ends[each]) for each in partitions}
        return offsets_since(self._connection, partitions, to_time_us(to), ends)

    # Lag

    def lag(self, group: str | None) -> list[PartitionLag]:
        """The lag of one group or of all groups, for each partition of each topic they read.

        Rows are counted by offsets, so transaction markers between the next row and the end count.
        """
        names = self._admin.consumer_groups() if group is None else [group]
        committed = self._admin.committed_offsets(names)
        if group is not None and not committed[group] and group not in self.names():
            raise UnknownGroup(group, self.names())
        counts = self._admin.partition_counts()
        # A group reads the topics it committed offsets of, or, before its first commit, those its
        # members are assigned.
        topics = {
            name: set(counts)
            & (set(offsets) or {topic for topic, _, _ in self._admin.group_owners(name)})
            for name, offsets in committed.items()
        }
        partitions = [
            (topic, partition)
            for topic in sorted(set().union(*topics.values()))
            for partition in range(counts[topic])
        ]
        starts = self._admin.start_offsets(partitions)
        ends = self._admin.end_offsets(partitions)
        positions = [
            (name, each, committed[name].get(each[0], {}).get(each[1]))
            for name in names
            for each in partitions
            if each[0] in topics[name]
        ]
        behind = {
            (partition, _next_offset(offset, starts[partition]))
            for _, partition, offset in positions
            if _next_offset(offset, starts[partition]) < ends[partition]
        }
        next_records = self._times.next_records(behind)
        now = time.time()
        lags = []
        for name, partition, offset in positions:
            start_offset = (partition, _next_offset(offset, starts[partition]))
            next_record = next_records.get(start_offset)
            rows, seconds = 0, 0.0
            if next_record is not None:
                rows = ends[partition] - next_record[0]
                seconds = max(0.0, now - next_record[1])
            lags.append(
                PartitionLag(
                    name,
                    *partition,
                    committed=offset,
                    end=ends[partition],
                    rows=rows,
                    seconds=seconds,
                )
            )
        return lags


def _next_offset(committed: int | None, start: int) -> int:
    return start if committed is None else max(committed, start)


def offsets_since(
    connection: Connection,
    partitions: Sequence[PartitionId],
    time_us: int,
    ends: Mapping[PartitionId, int],
) -> dict[PartitionId, int]:
    """The first offset at or after a time, or the end if there is none. Kafka's timestamps have
    milliseconds, so the time is rounded up.
    """
    offsets = connection.admin.offsets_for_time(partitions, -(-time_us // 1000))
    return {
        partition: min(offset, ends[partition]) if offset >= 0 else ends[partition]
        for partition, offset in offsets.items()
    }


class RecordTimeCache:
    """The append times of the records at or after some offsets. They never change, so each is
    looked up once, and monitoring lag stays cheap.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._guard = Lock()
        self._cached: OrderedDict[StartOffset, tuple[int, float]] = OrderedDict()

    def next_records(self, start_offsets: Iterable[StartOffset]) -> dict[StartOffset, NextRecord]:
        with self._guard:
            records: dict[StartOffset, NextRecord] = {
                each: self._cached[each] for each in start_offsets if each in self._cached
            }
            missing = [each for each in start_offsets if each not in records]
            for start_offset, record in self._look_up(missing).items():
                records[start_offset] = record
                if record is not None:
                    self._cached[start_offset] = record
            while len(self._cached) > MAX_CACHED_TIMES:
                self._cached.popitem(last=False)
        return records

    def _look_up(self, start_offsets: Sequence[StartOffset]) -> dict[StartOffset, NextRecord]:
        """Read one record at each start offset: all partitions at once, one offset of each at a
        time.
        """
        records: dict[StartOffset, NextRecord] = {}
        if not start_offsets:
            return records
        with translate_errors("look up records"):
            consumer = Consumer(
                self._connection.cluster.reader() | {"fetch.message.max.bytes": 4096}
            )
        try:
            waiting = list(start_offsets)
            while waiting:
                first_of_each = dict(reversed(waiting))
                records |= _first_records(consumer, first_of_each)
                waiting = [each for each in waiting if each not in records]
        finally:
            consumer.close()
        return records


def _first_records(
    consumer: Consumer, offsets: Mapping[PartitionId, int]
) -> dict[StartOffset, NextRecord]:
    """The first record of each partition at or after its offset; None for a partition that does not
    respond in time.
    """
    consumer.assign([TopicPartition(*partition, offset) for partition, offset in offsets.items()])
    records: dict[PartitionId, NextRecord] = {}
    deadline = time.monotonic() + LOOKUP_SECONDS
    while len(records) < len(offsets) and time.monotonic() < deadline:
        message = consumer.poll(0.5)
        if message is None:
            continue
        partition = (message.topic() or "", message.partition() or 0)
        if partition not in offsets or partition in records:
            continue
        error = message.error()
        if error is None:
            records[partition] = (message.offset() or 0, message.timestamp()[1] / 1000)
        elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001
            records[partition] = None
    consumer.unassign()
    return {each: records.get(each[0]) for each in offsets.items()}
