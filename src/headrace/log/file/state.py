"""What is true of a log: a deterministic state machine over the journal's records.

Every process has replicas of it, kept up by reading the journal. Nothing here does I/O or looks at
a clock, so the same journal gives the same state everywhere. An operation is a JSON list whose
first element names the method that applies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from headrace.errors import UnknownTopic
from headrace.log.file.segment import segment_name
from headrace.log.values import TopicInfo
from headrace.types.schema import parse_schema, table_schema

# What a queue's group knows of each message: done, leased, waiting, or never given out. Pure state,
# applied from the journal.
#
# Everything below `floor` is done. Above it, `done` holds what was acknowledged out of order,
# `given` what was handed out at least once, and from `next` on nothing was ever handed out.


MAX_GIVEN = 10_000
"""Messages of one partition that may be handed out and not yet done."""
MAX_AHEAD = 100_000
"""How far a partition may be handed out ahead of its oldest message that is not done. Both bound a
queue's memory.
"""


@dataclass(slots=True)
class Lease:
    deliveries: int
    visible_us: int  # from when on it may be given to someone (again)
    receiver: str


@dataclass(slots=True)
class PartitionQueue:
    floor: int = 0
    next: int = 0
    done: set[int] = field(default_factory=set)
    given: dict[int, Lease] = field(default_factory=dict)

    def finish(self, offsets: Iterable[int]) -> None:
        for offset in offsets:
            self.given.pop(offset, None)
            if offset >= self.floor:
                self.done.add(offset)
        while self.floor in self.done:
            self.done.discard(self.floor)
            self.floor += 1
        self.next = max(self.next, self.floor)

    def available(self, end: int, now_us: int, most: int) -> list[int]:
        """Offsets that can be handed out now, oldest first."""
        again = sorted(
            offset for offset, lease in self.given.items() if lease.visible_us <= now_us
        )[:most]
        room = min(
            most - len(again),
            MAX_GIVEN - len(self.given),
            self.floor + MAX_AHEAD - self.next,
            end - self.next,
        )
        return again + list(range(self.next, self.next + max(0, room)))

    def waiting(self, end: int) -> int:
        """Messages that are not done: the queue's lag."""
        return max(0, end - self.floor - len(self.done))


class QueueState:
    """The partitions of one topic as one group's queue sees them."""

    def __init__(self) -> None:
        self.partitions: dict[int, PartitionQueue] = {}

    def partition(self, number: int) -> PartitionQueue:
        return self.partitions.setdefault(number, PartitionQueue())

    def apply(self, operation: str, partition: int, *arguments: Any) -> None:
        getattr(self, f"_{operation}")(self.partition(partition), *arguments)

    @staticmethod
    def _begin(queue: PartitionQueue, floor: int) -> None:
        queue.floor = max(queue.floor, floor)
        queue.next = max(queue.next, floor)
        queue.done = {offset for offset in queue.done if offset >= floor}
        queue.given = {offset: lease for offset, lease in queue.given.items() if offset >= floor}

    @staticmethod
    def _reset(queue: PartitionQueue, floor: int) -> None:
        queue.floor = queue.next = floor
        queue.done, queue.given = set(), {}

    @staticmethod
    def _take(queue: PartitionQueue, offsets: list[int], visible_us: int, receiver: str) -> None:
        for offset in offsets:
            known = queue.given.get(offset)
            queue.given[offset] = Lease(known.deliveries + 1 if known else 1, visible_us, receiver)
            queue.next = max(queue.next, offset + 1)

    @staticmethod
    def _renew(queue: PartitionQueue, offsets: list[int], visible_us: int) -> None:
        for offset in offsets:
            if offset in queue.given:  # always, unless the journal lost who took it
                queue.given[offset].visible_us = visible_us

    @staticmethod
    def _return(queue: PartitionQueue, offsets: list[int], visible_us: int) -> None:
        for offset in offsets:
            if offset in queue.given:
                queue.given[offset].visible_us, queue.given[offset].receiver = visible_us, ""

    @staticmethod
    def _done(queue: PartitionQueue, offsets: list[int]) -> None:
        queue.finish(offsets)

    def dump(self) -> dict[str, Any]:
        return {
            str(number): [
                q.floor,
                q.next,
                sorted(q.done),
                [[o, g.deliveries, g.visible_us, g.receiver] for o, g in q.given.items()],
            ]
            for number, q in self.partitions.items()
        }

    @classmethod
    def load(cls, dump: dict[str, Any]) -> QueueState:
        state = cls()
        for number, (floor, following, done, given) in dump.items():
            leases = {
                offset: Lease(deliveries, visible_us, receiver)
                for offset, deliveries, visible_us, receiver in given
            }
            state.partitions[int(number)] = PartitionQueue(floor, following, set(done), leases)
        return state


Operation = list[Any]
RECENT_SEQUENCES = 8
PRODUCER_KEPT_US = 30 * 24 * 3600 * 1_000_000


class PartitionState(NamedTuple):
    """Offsets from `start` to `end`; the segment being written begins at offset `segment` and has
    `position` bytes (0: no file yet).

    Never changed, only replaced: a reader in another thread sees the one or the other.
    """

    start: int = 0
    end: int = 0
    segment: int = 0
    position: int = 0
    opened_us: int = 0


@dataclass(slots=True)
class TopicState:
    """A topic: its settings as stored, its directory's name, its partitions."""

    name: str
    settings: dict[str, Any]
    directory: str
    partitions: list[PartitionState]
    info: TopicInfo

    def dump(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "directory": self.directory,
            "partitions": list(self.partitions),
        }


@dataclass(slots=True)
class ProducerState:
    """The last numbers stored for a producer, with where they went."""

    epoch: int = 0
    last: int = -1
    seen_us: int = 0
    recent: list[tuple[int, int, dict[str, list[int]]]] = field(
        default_factory=list
    )  # (sequence, commit, partition -> [start, stop])


@dataclass(slots=True)
class GroupState:
    """A consumer group: who is in it, who has which partition ("topic/partition"), and what was
    committed.
    """

    generation: int = 0
    members: dict[str, dict[str, Any]] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    target: dict[str, str] = field(default_factory=dict)
    committed: dict[str, dict[int, int]] = field(default_factory=dict)

    def dump(self) -> list[Any]:
        committed = {topic: dict(offsets) for topic, offsets in self.committed.items()}
        return [
            self.generation,
            dict(self.members),
            dict(self.owners),
            dict(self.target),
            committed,
        ]


def topic_info(name: str, settings: dict[str, Any], directory: str) -> TopicInfo:
    """A topic's settings as the API shows them."""
    key = tuple(settings["key"])
    schema: pa.Schema = parse_schema(settings["ddl"])
    stored = table_schema(schema, key) if settings["is_table"] else schema
    plain = {name: value for name, value in settings.items() if name not in {"ddl", "key"}}
    return TopicInfo(
        name=name, schema=settings["ddl"], arrow_schema=stored, key=key, id=directory, **plain
    )


class State:
    """The whole of a log's truth, apart from the rows themselves."""

    def __init__(self) -> None:
        self.commit = 0
        self.time_us = 0
        self.topics: dict[str, TopicState] = {}
        self.producers: dict[str, ProducerState] = {}
        self.transactions: dict[str, int] = {}
        self.groups: dict[str, GroupState] = {}
        self.queues: dict[str, QueueState] = {}
        self.notes: dict[str, str] = {}
        # Files that were changed, as (topic's directory, partition, file): since the journal's last
        # roll, and before it but not yet synced.
        self.dirty: set[tuple[str, int, str]] = set()
        self.dirty_before: set[tuple[str, int, str]] = set()

    def topic(self, name: str) -> TopicState:
        try:
            return self.topics[name]
        except KeyError:
            raise UnknownTopic(name, self.topics) from None

    def has_partition(self, name: str, number: int) -> bool:
        return name in self.topics and number < len(self.topics[name].partitions)

    def _restore(
        self, name: str, settings: dict[str, Any], directory: str, starts: list[int]
    ) -> None:
        """Define a topic again that the journal has lost. What is known of its partitions stays."""
        known = self.topics[name].partitions if name in self.topics else []
        partitions = [
            *known,
            *(PartitionState(start, start, start) for start in starts[len(known) :]),
        ]
        self.topics[name] = TopicState(
            name, settings, directory, partitions, topic_info(name, settings, directory)
        )

    def apply(self, commit: int, time_us: int, operations: Iterable[Operation]) -> None:
        self.commit, self.time_us = commit, time_us
        for name, *arguments in operations:
            _APPLY[name](self, *arguments)

    # Topics and rows

    def _topic(self, name: str, settings: dict[str, Any]) -> None:
        known = self.topics.get(name)
        directory = known.directory if known else f"{name}~{self.commit}"
        partitions = known.partitions if known else []
        partitions += [PartitionState() for _ in range(settings["partitions"] - len(partitions))]
        columns_changed = known is not None and known.settings["ddl"] != settings["ddl"]
        self.topics[name] = TopicState(
            name, settings, directory, partitions, topic_info(name, settings, directory)
        )
        if columns_changed:  # a segment has one schema
            for number in range(len(partitions)):
                self._roll(name, number)

    def _drop(self, name: str) -> None:
        self.topics.pop(name, None)
        self.producers = {
            key: value for key, value in self.producers.items() if not key.startswith(f"{name}\0")
        }
        self.queues = {
            key: value for key, value in self.queues.items() if not key.endswith(f"\0{name}")
        }
        for group in self.groups.values():
            group.committed.pop(name, None)

    def _append(
        self,
        name: str,
        number: int,
        offset: int,
        span: int,
        segment: int,
        position: int,
        size: int,
        _inline: int,
    ) -> None:
        topic = self.topics[name]
        before = topic.partitions[number]
        opened_us = before.opened_us if position else self.time_us
        topic.partitions[number] = PartitionState(
            before.start, offset + span, segment, position + size, opened_us
        )
        self.dirty.add((topic.directory, number, segment_name(segment)))

    def _adopt(
        self, name: str, number: int, offset: int, span: int, _staged: str, file: str
    ) -> None:
        topic = self.topics[name]
        end = offset + span
        topic.partitions[number] = topic.partitions[number]._replace(
            end=end, segment=end, position=0
        )
        self.dirty.add((topic.directory, number, file))

    def _roll(self, name: str, number: int) -> None:
        partitions = self.topics[name].partitions
        if partitions[number].position:
            partitions[number] = partitions[number]._replace(
                segment=partitions[number].end, position=0
            )

    def _start(self, name: str, number: int, offset: int) -> None:
        partitions = self.topics[name].partitions
        partitions[number] = partitions[number]._replace(start=offset)

    # Producers, transactions, notes

    def _epoch(self, kind: str, name: str, epoch: int) -> None:
        if kind == "producer":
            producer = self.producers.setdefault(name, ProducerState())
            producer.epoch, producer.seen_us = epoch, self.time_us
        else:
            self.transactions[name] = epoch

    def _sequence(self, name: str, sequence: int, places: dict[str, list[int]]) -> None:
        producer = self.producers.setdefault(name, ProducerState())
        producer.last, producer.seen_us = sequence, self.time_us
        producer.recent = [
            *producer.recent[1 - RECENT_SEQUENCES :],
            (sequence, self.commit, places),
        ]

    def _note(self, name: str, value: str | None) -> None:
        if value is None:
            self.notes.pop(name, None)
        else:
            self.notes[name] = value

    # Groups and queues

    def _offsets(self, group: str, topic: str, offsets: dict[str, int]) -> None:
        committed = self.groups.setdefault(group, GroupState()).committed.setdefault(topic, {})
        committed.update({int(partition): offset for partition, offset in offsets.items()})

    def _group(
        self,
        name: str,
        generation: int,
        members: dict[str, Any],
        owners: dict[str, str],
        target: dict[str, str],
    ) -> None:
        group = self.groups.setdefault(name, GroupState())
        group.generation, group.members, group.owners, group.target = (
            generation,
            members,
            owners,
            target,
        )

    def _forget_group(self, name: str) -> None:
        self.groups.pop(name, None)
        self.queues = {
            key: value for key, value in self.queues.items() if not key.startswith(f"{name}\0")
        }

    def _queue(self, group: str, topic: str, operation: str, *arguments: Any) -> None:
        queue = self.queues.setdefault(f"{group}\0{topic}", QueueState())
        queue.apply(operation, *arguments)

    # Checkpoints

    def rolled(self) -> None:
        """The journal goes on in a new file, and a checkpoint is about to be made."""
        self.dirty_before |= self.dirty
        self.dirty = set()

    def _checkpointed(self) -> None:
        self.dirty_before = set()
        oldest = self.time_us - PRODUCER_KEPT_US
        self.producers = {
            key: value for key, value in self.producers.items() if value.seen_us >= oldest
        }

    def dump(self) -> dict[str, Any]:
        """The state as JSON; `State.load` gives it back. It stays as it is when the state moves on:
        a checkpoint is written while others commit.
        """
        return {
            "commit": self.commit,
            "time_us": self.time_us,
            "topics": {name: topic.dump() for name, topic in self.topics.items()},
            "producers": {
                k: [p.epoch, p.last, p.seen_us, p.recent] for k, p in self.producers.items()
            },
            "transactions": dict(self.transactions),
            "groups": {key: group.dump() for key, group in self.groups.items()},
            "queues": {key: queue.dump() for key, queue in self.queues.items()},
            "notes": dict(self.notes),
        }

    @classmethod
    def load(cls, dump: dict[str, Any]) -> State:
        state = cls()
        state.commit, state.time_us = dump["commit"], dump["time_us"]
        for name, stored in dump["topics"].items():
            partitions = [PartitionState(*numbers) for numbers in stored["partitions"]]
            settings = stored["settings"]
            state.topics[name] = TopicState(
                name,
                settings,
                stored["directory"],
                partitions,
                topic_info(name, settings, stored["directory"]),
            )
        for key, (epoch, last, seen_us, recent) in dump["producers"].items():
            state.producers[key] = ProducerState(
                epoch, last, seen_us, [(s, c, places) for s, c, places in recent]
            )
        state.transactions, state.notes = dump["transactions"], dump["notes"]
        for key, (generation, members, owners, target, committed) in dump["groups"].items():
            numbered = {
                topic: {int(p): offset for p, offset in offsets.items()}
                for topic, offsets in committed.items()
            }
            state.groups[key] = GroupState(generation, members, owners, target, numbered)
        state.queues = {key: QueueState.load(stored) for key, stored in dump["queues"].items()}
        return state


_APPLY: dict[str, Callable[..., None]] = {
    name[1:]: getattr(State, name)
    for name in (
        "_topic",
        "_restore",
        "_drop",
        "_append",
        "_adopt",
        "_roll",
        "_start",
        "_epoch",
        "_sequence",
        "_note",
        "_offsets",
        "_group",
        "_forget_group",
        "_queue",
        "_checkpointed",
    )
}
