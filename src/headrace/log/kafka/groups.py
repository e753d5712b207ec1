"""Groups seen from outside: which there are, where they stand, how far they are behind, and moving
them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from threading import Lock
from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition

from headrace.durations import to_time_us
from headrace.errors import UnknownGroup
from headrace.log.kafka.cluster import Place
from headrace.log.kafka.connection import (
    Connection,
    alter_offsets,
    committed_offsets,
    consumer_groups,
    describe,
    group_owners,
    share_groups,
)
from headrace.log.kafka.errors import doing
from headrace.log.partitioning import check_partition
from headrace.log.topic_config import resolve_offset_alias
from headrace.log.values import GroupInfo, MemberInfo, Offsets, PartitionLag

MAX_TIMES_KEPT = 100_000
LOOK_SECONDS = 5.0

Next = tuple[int, float] | None
"""The next record at or after an offset: its own offset, and when it was appended. None if only
markers follow.
"""


class Groups:
    """Safe for several threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._broker = connection, connection.broker
        self._times = RecordTimes(connection)

    def names(self) -> list[str]:
        return sorted({*consumer_groups(self._broker), *share_groups(self._broker)})

    def info(self, name: str) -> GroupInfo:
        if name in consumer_groups(self._broker):
            return GroupInfo(
                name,
                "group",
                -1,
                self._members(name),
                committed_offsets(self._broker, [name])[name],
            )
        if name in share_groups(self._broker):
            return GroupInfo(name, "queue", -1, (), {})
        raise UnknownGroup(name, self.names())

    def _members(self, name: str) -> tuple[MemberInfo, ...]:
        described = describe(self._broker, name)
        return tuple(
            MemberInfo(
                member.member_id,
                tuple(
                    (place.topic, place.partition) for place in member.assignment.topic_partitions
                ),
                member.host.lstrip("/"),
            )
            for member in (described.members if described else [])
        )

    def committed(self, name: str) -> Offsets:
        offsets = committed_offsets(self._broker, [name])[name]
        if not offsets and name not in self.names():
            raise UnknownGroup(name, self.names())
        return Offsets(offsets)

    # Moving

    def reset(
        self, group: str, topic: str, to: str | int | datetime, partitions: Sequence[int] | None
    ) -> Offsets:
        info = self._connection.topics.info(topic)
        chosen = range(info.partitions) if partitions is None else partitions
        for partition in chosen:
            check_partition(info, partition)
        places = [(topic, partition) for partition in chosen]
        offsets = {
            partition: offset
            for (_, partition), offset in self._targets(places, resolve_offset_alias(to)).items()
        }
        alter_offsets(self._broker, group, topic, offsets)
        return Offsets({topic: offsets})

    def _targets(self, places: Sequence[Place], to: str | int | datetime) -> dict[Place, int]:
        """Where a reset leads; never outside of what there is."""
        starts, ends = self._broker.earliest(places), self._broker.ends(places)
        if to == "earliest":
            return starts
        if to == "latest":
            return ends
        if isinstance(to, int) and not isinstance(to, bool):
            return {place: min(max(to, starts[place]), ends[place]) for place in places}
        return since(self._connection, places, to_time_us(to), ends)

    # Lag

    def lag(self, group: str | None) -> list[PartitionLag]:
        names = consumer_groups(self._broker) if group is None else [group]
        committed = committed_offsets(self._broker, names)
        if group is not None and not committed[group] and group not in self.names():
            raise UnknownGroup(group, self.names())
        counts = self._broker.partition_counts()
        wanted = {
            name: self._topics_of(name, offsets) & set(counts)
            for name, offsets in committed.items()
        }
        places = [
            (topic, partition)
            for topic in sorted(set().union(*wanted.values()))
            for partition in range(counts[topic])
        ]
        starts, ends = self._broker.earliest(places), self._broker.ends(places)
        standing = [
            (name, place, committed[name].get(place[0], {}).get(place[1]))
            for name in names
            for place in places
            if place[0] in wanted[name]
        ]
        following = self._times.following(
            {
                (place, _from(offset, starts[place]))
                for _, place, offset in standing
                if _from(offset, starts[place]) < ends[place]
            }
        )
        now = time.time()
        return [
            self._partition_lag(name, place, offset, starts[place], ends[place], following, now)
            for name, place, offset in standing
        ]

    def _topics_of(self, group: str, committed: Mapping[str, Any]) -> set[str]:
        """What a group reads: what it committed for, or, before its first commit, what its members
        have.
        """
        return set(committed) or {topic for topic, _, _ in group_owners(self._broker, group)}

    def _partition_lag(
        self,
        group: str,
        place: Place,
        offset: int | None,
        start: int,
        end: int,
        following: Mapping[tuple[Place, int], Next],
        now: float,
    ) -> PartitionLag:
        """Rows are counted by offsets, so markers of transactions between the next row and the end
        count too.
        """
        upcoming = following.get((place, _from(offset, start)))
        rows, seconds = (
            (0, 0.0) if upcoming is None else (end - upcoming[0], max(0.0, now - upcoming[1]))
        )
        return PartitionLag(group, *place, committed=offset, end=end, rows=rows, seconds=seconds)


def _from(offset: int | None, start: int) -> int:
    return start if offset is None else max(offset, start)


def since(
    connection: Connection, places: Sequence[Place], time_us: int, ends: Mapping[Place, int]
) -> dict[Place, int]:
    """The first offset at or after a time, the end if there is none. Kafka's clock has
    milliseconds.
    """
    found = connection.broker.since(places, -(-time_us // 1000))
    return {
        place: min(offset, ends[place]) if offset >= 0 else ends[place]
        for place, offset in found.items()
    }


class RecordTimes:
    """When the record at or after an offset was appended. That never changes, so it is looked up
    once: a lag that is watched costs little.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._guard = Lock()
        self._known: OrderedDict[tuple[Place, int], tuple[int, float]] = OrderedDict()

    def following(self, wanted: Iterable[tuple[Place, int]]) -> dict[tuple[Place, int], Next]:
        with self._guard:
            found: dict[tuple[Place, int], Next] = {
                spot: self._known[spot] for spot in wanted if spot in self._known
            }
            missing = [spot for spot in wanted if spot not in found]
            for spot, record in self._look_up(missing).items():
                found[spot] = record
                if record is not None:
                    self._known[spot] = record
            while len(self._known) > MAX_TIMES_KEPT:
                self._known.popitem(last=False)
        return found

    def _look_up(self, spots: Sequence[tuple[Place, int]]) -> dict[tuple[Place, int], Next]:
        """One record from each spot; as many partitions at once as there are, one spot of each at a
        time.
        """
        found: dict[tuple[Place, int], Next] = {}
        if not spots:
            return found
        with doing("look at records"):
            consumer = Consumer(
                self._connection.cluster.reader() | {"fetch.message.max.bytes": 4096}
            )
        try:
            waiting = list(spots)
            while waiting:
                turn = dict(reversed([(place, offset) for place, offset in waiting]))
                found |= _first_records(consumer, turn)
                waiting = [spot for spot in waiting if spot not in found]
        finally:
            consumer.close()
        return found


def _first_records(consumer: Consumer, turn: Mapping[Place, int]) -> dict[tuple[Place, int], Next]:
    """The first record of each partition from its offset on. What does not answer in time counts as
    nothing.
    """
    consumer.assign([TopicPartition(*place, offset) for place, offset in turn.items()])
    found: dict[tuple[Place, int], Next] = {}
    deadline = time.monotonic() + LOOK_SECONDS
    while len(found) < len(turn) and time.monotonic() < deadline:
        message = consumer.poll(0.5)
        if message is None:
            continue
        place = (message.topic() or "", message.partition() or 0)
        spot = (place, turn[place]) if place in turn else None
        if spot is None or spot in found:
            continue
        error = message.error()
        if error is None:
            found[spot] = (message.offset() or 0, message.timestamp()[1] / 1000)
        elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001
            found[spot] = None
    consumer.unassign()
    return {(place, offset): found.get((place, offset)) for place, offset in turn.items()}
