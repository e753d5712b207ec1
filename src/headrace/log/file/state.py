"""The state of a log: a deterministic state machine over the journal's records.

Every process has replicas of it, kept up to date by reading the journal (`checkpoint.Replica`).
Nothing here does I/O or reads a clock, so the same journal gives the same state everywhere.

An operation is a JSON list: the name of the `State` method that applies it, without its underscore,
and that method's arguments. Method names and signatures are therefore part of the file format:

    ["topic", "orders", {"ddl": "id BIGINT", "partitions": 1, …}]
    ["append", "orders", 0, 0, 2, 0, 0, 1984, 1]     2 rows from offset 0, in segment 0 at byte 0
    ["offsets", "billing", "orders", {"0": 2}]
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, NamedTuple

import pyarrow as pa

from headrace.errors import CorruptJournal, NewerFormat, UnknownTopic
from headrace.log.file.segment import segment_name
from headrace.log.sequences import StoredSequences
from headrace.log.values import TopicInfo
from headrace.types.schema import parse_schema, table_schema
from headrace.types.schema_history import NO_HISTORY, SchemaHistory

Operation = list[Any]
RECENT_SEQUENCES = 8
"""How many sequence numbers of a producer are stored with their offsets."""
PRODUCER_RETENTION_US = 30 * 24 * 3600 * 1_000_000
"""How long a producer that appends nothing, or a transaction id that is not used, is remembered."""

# Queues

MAX_LEASED = 10_000
"""Messages of one partition that may be delivered and not yet done. Bounds a queue's memory, with
that of `DoneOffsets`: between two ranges of it there is at least one such message.
"""


@dataclass(slots=True)
class MessageLease:
    """A message that was delivered and is not done. `receiver` is empty if it was returned.

    The lease is over at `deadline_us` by the monotonic clock `clock` (`liveness.machine_clock`).
    For those who do not have that clock, it is over when append time reaches `visible_us`.
    """

    deliveries: int
    visible_us: int
    receiver: str
    clock: str = ""
    deadline_us: int = 0


class DoneOffsets:
    """Offsets that are done, as ranges in order. One message that is held for a day costs one
    range, however many others are done meanwhile.

        add 1, add 2     [1, 3)
        add 4            [1, 3) [4, 5)
        add 3            [1, 5)
    """

    __slots__ = ("_starts", "_stops", "count")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.count = 0
        for start, stop in ranges:
            self.count += stop - start
            if self._stops and self._stops[-1] == start:
                self._stops[-1] = stop
            else:
                self._starts.append(start)
                self._stops.append(stop)

    def ranges(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._stops, strict=True))

    def __contains__(self, offset: int) -> bool:
        index = bisect_right(self._starts, offset) - 1
        return index >= 0 and offset < self._stops[index]

    def add(self, offset: int) -> None:
        if offset in self:
            return
        self.count += 1
        index = bisect_right(self._starts, offset)
        joins_before = index > 0 and self._stops[index - 1] == offset
        joins_after = index < len(self._starts) and self._starts[index] == offset + 1
        if joins_before and joins_after:
            self._stops[index - 1] = self._stops.pop(index)
            self._starts.pop(index)
        elif joins_before:
            self._stops[index - 1] = offset + 1
        elif joins_after:
            self._starts[index] = offset
        else:
            self._starts.insert(index, offset)
            self._stops.insert(index, offset + 1)

    def remove_below(self, floor: int) -> int:
        """Remove what is below a floor, and the range that begins at it. Returns where that range
        ends, or the floor: below it everything is done.
        """
        index = bisect_right(self._starts, floor)
        below = list(zip(self._starts[:index], self._stops[:index], strict=True))
        del self._starts[:index], self._stops[:index]
        self.count -= sum(stop - start for start, stop in below)
        return max(floor, below[-1][1]) if below else floor


@dataclass(slots=True)
class PartitionQueue:
    """The messages of one partition as a queue's group sees them.

    Everything below `floor` is done. Above it, `done` has what was acknowledged out of order and
    `leases` what was delivered and is not done. From `next` on nothing was ever delivered.
    """

    floor: int = 0
    next: int = 0
    done: DoneOffsets = field(default_factory=DoneOffsets)
    leases: dict[int, MessageLease] = field(default_factory=dict)

    def finish(self, offsets: Iterable[int]) -> None:
        for offset in offsets:
            self.leases.pop(offset, None)
            if offset >= self.floor:
                self.done.add(offset)
        self.floor = self.done.remove_below(self.floor)
        self.next = max(self.next, self.floor)

    def available(
        self, end: int, is_over: Callable[[int, MessageLease], bool], limit: int
    ) -> list[int]:
        """Offsets that can be delivered now: those whose lease is over, then new ones."""
        expired = sorted(offset for offset, lease in self.leases.items() if is_over(offset, lease))[
            :limit
        ]
        new = min(limit - len(expired), MAX_LEASED - len(self.leases), end - self.next)
        return expired + list(range(self.next, self.next + max(0, new)))

    def waiting(self, end: int) -> int:
        """How many messages are not done: the queue's lag."""
        return max(0, end - self.floor - self.done.count)

    def from_floor(self, floor: int) -> PartitionQueue:
        """A copy in which everything below a floor is done."""
        done = DoneOffsets(self.done.ranges())
        floor = done.remove_below(max(self.floor, floor))
        leases = {offset: lease for offset, lease in self.leases.items() if offset >= floor}
        return PartitionQueue(floor=floor, next=max(self.next, floor), done=done, leases=leases)

    def undone(self, end: int) -> Iterator[int]:
        """The offsets of all messages that are not done, in order."""
        yield from sorted(self.leases)
        yield from range(self.next, end)


class QueueState:
    """One topic as a queue's group sees it. The journal's queue operations are named after the
    methods that apply them.
    """

    def __init__(self) -> None:
        self.partitions: dict[int, PartitionQueue] = {}

    def partition(self, number: int) -> PartitionQueue:
        return self.partitions.setdefault(number, PartitionQueue())

    def apply(self, operation: str, partition: int, *arguments: Any) -> None:
        getattr(self, f"_{operation}")(self.partition(partition), *arguments)

    @staticmethod
    def _begin(queue: PartitionQueue, floor: int) -> None:
        queue.floor = queue.done.remove_below(max(queue.floor, floor))
        queue.next = max(queue.next, queue.floor)
        queue.leases = {offset: lease for offset, lease in queue.leases.items() if offset >= floor}

    @staticmethod
    def _reset(queue: PartitionQueue, floor: int) -> None:
        queue.floor = queue.next = floor
        queue.done, queue.leases = DoneOffsets(), {}

    @staticmethod
    def _take(
        queue: PartitionQueue,
        offsets: list[int],
        visible_us: int,
        receiver: str,
        clock: str = "",
        deadline_us: int = 0,
    ) -> None:
        for offset in offsets:
            lease = queue.leases.get(offset)
            deliveries = lease.deliveries + 1 if lease else 1
            queue.leases[offset] = MessageLease(
                deliveries=deliveries,
                visible_us=visible_us,
                receiver=receiver,
                clock=clock,
                deadline_us=deadline_us,
            )
            queue.next = max(queue.next, offset + 1)

    @staticmethod
    def _renew(
        queue: PartitionQueue,
        offsets: list[int],
        visible_us: int,
        clock: str = "",
        deadline_us: int = 0,
    ) -> None:
        for offset in offsets:
            lease = queue.leases.get(offset)
            if lease is not None:  # always, unless the journal is damaged
                lease.visible_us, lease.clock, lease.deadline_us = visible_us, clock, deadline_us

    @staticmethod
    def _return(
        queue: PartitionQueue,
        offsets: list[int],
        visible_us: int,
        clock: str = "",
        deadline_us: int = 0,
    ) -> None:
        for offset in offsets:
            lease = queue.leases.get(offset)
            if lease is not None:
                lease.visible_us, lease.clock, lease.deadline_us = visible_us, clock, deadline_us
                lease.receiver = ""

    @staticmethod
    def _done(queue: PartitionQueue, offsets: list[int]) -> None:
        queue.finish(offsets)

    def dump(self) -> dict[str, Any]:
        return {
            str(number): [
                queue.floor,
                queue.next,
                queue.done.ranges(),
                [
                    [
                        offset,
                        lease.deliveries,
                        lease.visible_us,
                        lease.receiver,
                        lease.clock,
                        lease.deadline_us,
                    ]
                    for offset, lease in queue.leases.items()
                ],
            ]
            for number, queue in self.partitions.items()
        }

    @classmethod
    def load(cls, dump: dict[str, Any]) -> QueueState:
        state = cls()
        for number, (floor, next_offset, done, leases) in dump.items():
            state.partitions[int(number)] = PartitionQueue(
                floor=floor,
                next=next_offset,
                done=DoneOffsets(  # single offsets before format 2 of checkpoints
                    (done_range, done_range + 1)
                    if isinstance(done_range, int)
                    else (done_range[0], done_range[1])
                    for done_range in done
                ),
                leases={offset: MessageLease(*lease) for offset, *lease in leases},
            )
        return state


# Topics, producers and groups


class PartitionState(NamedTuple):
    """A partition's offsets, from `start` to `end`. The open segment begins at offset `segment` and
    has `position` bytes (0: no file yet).

    A value is replaced, never changed, so that a reader in another thread sees a consistent one.
    """

    start: int = 0
    end: int = 0
    segment: int = 0
    position: int = 0
    opened_us: int = 0


@dataclass(slots=True)
class TopicState:
    """A topic: its settings as the journal stores them, its directory's name and its partitions."""

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
    """A producer with an id: its epoch, its last sequence number, those that it has stored, and the
    recent ones as (sequence, commit, partition -> [start, stop]).
    """

    epoch: int = 0
    last: int = -1
    seen_us: int = 0
    recent: list[tuple[int, int, dict[str, list[int]]]] = field(default_factory=list)
    stored: StoredSequences = field(default_factory=StoredSequences)


@dataclass(slots=True)
class GroupState:
    """A consumer group: its members, the current and the target owner of each partition
    ("topic/partition" -> member), and its committed offsets.
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


def salvaged_name(topic: str, producer: int) -> str:
    """The key in `State.producers` of a producer whose id was lost with the journal: by the hash
    that its frames have. An id has no `#`.
    """
    return f"{topic}\0#{producer:016x}"


def topic_info(name: str, settings: dict[str, Any], directory: str) -> TopicInfo:
    """A topic's stored settings as the interface's TopicInfo."""
    key = tuple(settings["key"])
    schema: pa.Schema = parse_schema(settings["ddl"])
    stored = settings.get("schema_history")
    columns = {"ddl", "key", "schema_history"}
    rest = {name: value for name, value in settings.items() if name not in columns}
    return TopicInfo(
        name=name,
        schema=settings["ddl"],
        arrow_schema=table_schema(schema, key) if settings["is_table"] else schema,
        key=key,
        id=directory,
        schema_history=NO_HISTORY if stored is None else SchemaHistory.load(stored),
        **rest,
    )


MAX_CLOCK_STEPS = 64
_MAX_TIME_US = (1 << 63) - 1


def _with_step(steps: list[tuple[int, int]], low: int, high: int) -> list[tuple[int, int]]:
    """Steps of clocks and one more. Those that touch are one; if there are too many, the two that
    are closest become one, which costs look-ups between them some time.

        [(10, 20), (40, 50)] and (15, 30): [(10, 30), (40, 50)]
    """
    joined: list[tuple[int, int]] = []
    for start, stop in sorted([*steps, (low, high)]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    if len(joined) > MAX_CLOCK_STEPS:
        at = min(range(len(joined) - 1), key=lambda at: joined[at + 1][0] - joined[at][1])
        joined[at : at + 2] = [(joined[at][0], joined[at + 1][1])]
    return joined


class State:
    """Everything a log knows, apart from the rows themselves."""

    def __init__(self) -> None:
        self.commit = 0
        self.time_us = 0
        self.has_lost_commits = False
        """Whether damage to the journal was skipped: what producers stored is not quite known."""
        self.clock_steps: list[tuple[int, int]] = []
        """Where a clock was set back: the times of a commit and of the one before, which was later.
        In order, without overlap. For any other time, the commits at or after it are those behind
        one place.
        """
        self.topics: dict[str, TopicState] = {}
        self.producers: dict[str, ProducerState] = {}
        self.transactions: dict[str, int] = {}  # id -> epoch
        self.transactions_seen_us: dict[str, int] = {}
        self.groups: dict[str, GroupState] = {}
        self.queues: dict[str, QueueState] = {}
        self.notes: dict[str, str] = {}
        # Segment files that were written, as (topic's directory, partition, file): since the
        # journal's last roll, and before it if no checkpoint has synced them yet.
        self.dirty: set[tuple[str, int, str]] = set()
        self.dirty_before: set[tuple[str, int, str]] = set()

    @property
    def went_back(self) -> bool:
        """Whether a commit was ever earlier than the one before: a clock was set back."""
        return bool(self.clock_steps)

    def steady_time_us(self, time_us: int) -> int:
        """The latest time that is not after a given one, and whose rows and all later ones lie
        behind one offset of each partition. It differs only within a step of a clock.
        """
        at = bisect_left(self.clock_steps, (time_us,)) - 1
        if at < 0:
            return time_us
        low, high = self.clock_steps[at]
        return low if time_us <= high else time_us

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
        """Define a topic whose definition the journal has lost; its known partitions stay."""
        partitions = list(self.topics[name].partitions) if name in self.topics else []
        partitions += [PartitionState(start, start, start) for start in starts[len(partitions) :]]
        self._define(name, settings, directory, partitions)

    def _define(
        self,
        name: str,
        settings: dict[str, Any],
        directory: str,
        partitions: list[PartitionState],
    ) -> None:
        self.topics[name] = TopicState(
            name=name,
            settings=settings,
            directory=directory,
            partitions=partitions,
            info=topic_info(name, settings, directory),
        )

    def apply(self, commit: int, time_us: int, operations: Iterable[Operation]) -> None:
        """Apply the operations of one commit."""
        if time_us < self.time_us:
            self.clock_steps = _with_step(self.clock_steps, time_us, self.time_us)
        self.commit, self.time_us = commit, time_us
        for name, *arguments in operations:
            _APPLY[name](self, *arguments)

    @staticmethod
    def check_names(operations: Iterable[Operation]) -> None:
        """Raise CorruptJournal if a name in operations is not one that we have written. They
        become parts of paths, so this comes before any file is touched.
        """
        for operation in operations:
            name = operation[0]
            if name not in _APPLY:
                raise _newer_operation(name)
            _check_fields(name, operation[1:])
            strange = [
                operation[index]
                for index, pattern in _PATHS.get(name, {}).items()
                if not isinstance(operation[index], str) or not pattern.fullmatch(operation[index])
            ]
            strange += [
                operation[index]
                for index in _NUMBERS.get(name, ())
                if type(operation[index]) is not int or operation[index] < 0
            ]
            if strange:
                raise CorruptJournal(
                    f"The journal has {strange[0]!r} in an operation {name!r}, as no log has it.",
                    fix="somebody has changed the journal: restore it from a backup.",
                )

    # Topics and rows

    def _topic(self, name: str, settings: dict[str, Any]) -> None:
        before = self.topics.get(name)
        directory = before.directory if before else f"{name}~{self.commit}"
        partitions = before.partitions if before else []
        partitions += [PartitionState() for _ in range(settings["partitions"] - len(partitions))]
        self._define(name, settings, directory, partitions)
        if before is not None and before.settings["ddl"] != settings["ddl"]:
            # A segment has one schema.
            for number in range(len(partitions)):
                self._roll(name, number)

    def _evolve(self, name: str, settings: dict[str, Any]) -> None:
        """Change a topic whose settings have a history of its columns. Programs that do not know
        this operation would take columns of older rows for others.
        """
        self._topic(name, settings)

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
        topic.partitions[number] = PartitionState(
            start=before.start,
            end=offset + span,
            segment=segment,
            position=position + size,
            opened_us=before.opened_us if position else self.time_us,
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
            producer = self._producer(name)
            producer.epoch, producer.seen_us = epoch, self.time_us
        else:
            self.transactions[name], self.transactions_seen_us[name] = epoch, self.time_us

    def forget_sequences(self) -> None:
        """Records of the journal were lost: whether a number was stored must be asked of the frames
        from now on.
        """
        self.has_lost_commits = True
        for producer in self.producers.values():
            producer.stored = StoredSequences(is_complete=False)

    def _producer(self, name: str) -> ProducerState:
        known = self.producers.get(name)
        if known is None:
            stored = StoredSequences(is_complete=not self.has_lost_commits)
            known = self.producers[name] = ProducerState(stored=stored)
        return known

    def _sequence(self, name: str, sequence: int, ranges: dict[str, list[int]]) -> None:
        producer = self._producer(name)
        producer.last, producer.seen_us = sequence, self.time_us
        producer.stored = producer.stored.with_number(sequence)
        producer.recent = [
            *producer.recent[1 - RECENT_SEQUENCES :],
            (sequence, self.commit, ranges),
        ]

    def _inherit(self, name: str, salvaged: str) -> None:
        """A producer whose id was lost is here again, with its sequence numbers."""
        producer = self.producers.pop(salvaged, ProducerState())
        producer.epoch = self.producers[name].epoch if name in self.producers else 0
        self.producers[name] = producer

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
        group.generation = generation
        group.members = members
        group.owners = owners
        group.target = target

    def _forget_group(self, name: str) -> None:
        self.groups.pop(name, None)
        self.queues = {
            key: value for key, value in self.queues.items() if not key.startswith(f"{name}\0")
        }

    def _queue(self, group: str, topic: str, operation: str, *arguments: Any) -> None:
        queue = self.queues.setdefault(f"{group}\0{topic}", QueueState())
        queue.apply(operation, *arguments)

    # Checkpoints

    def on_journal_roll(self) -> None:
        """The journal has begun a new file, and a checkpoint is about to be made."""
        self.dirty_before |= self.dirty
        self.dirty = set()

    def _checkpointed(self) -> None:
        """A checkpoint was made: all files written before it are synced."""
        self.dirty_before = set()
        oldest = self.time_us - PRODUCER_RETENTION_US
        self.producers = {
            key: value for key, value in self.producers.items() if value.seen_us >= oldest
        }
        self.transactions_seen_us = {
            name: seen_us
            for name, seen_us in self.transactions_seen_us.items()
            if seen_us >= oldest
        }
        self.transactions = {name: self.transactions[name] for name in self.transactions_seen_us}

    def dump(self) -> dict[str, Any]:
        """The state as JSON, for `State.load`. It shares nothing with the state that later commits
        change: a checkpoint is written while others commit.
        """
        return {
            "commit": self.commit,
            "time_us": self.time_us,
            "topics": {name: topic.dump() for name, topic in self.topics.items()},
            "producers": {
                key: [
                    producer.epoch,
                    producer.last,
                    producer.seen_us,
                    producer.recent,
                    producer.stored.dump(),
                ]
                for key, producer in self.producers.items()
            },
            "transactions": dict(self.transactions),
            "transactions_seen_us": dict(self.transactions_seen_us),
            "groups": {key: group.dump() for key, group in self.groups.items()},
            "queues": {key: queue.dump() for key, queue in self.queues.items()},
            "notes": dict(self.notes),
            "went_back": self.went_back,
            "clock_steps": list(self.clock_steps),
        }

    @classmethod
    def load(cls, dump: dict[str, Any]) -> State:
        state = cls()
        state.commit, state.time_us = dump["commit"], dump["time_us"]
        # Drafts of format 2 knew only whether a clock was ever set back.
        unknown = [(0, _MAX_TIME_US)] if dump.get("went_back", False) else []
        state.clock_steps = [(low, high) for low, high in dump.get("clock_steps", unknown)]
        for name, stored in dump["topics"].items():
            cls.check_names([["restore", name, {}, stored["directory"], []]])
            partitions = [PartitionState(*fields) for fields in stored["partitions"]]
            state._define(name, stored["settings"], stored["directory"], partitions)
        for key, (epoch, last, seen_us, recent, *stored) in dump["producers"].items():
            state.producers[key] = ProducerState(
                epoch=epoch,
                last=last,
                seen_us=seen_us,
                recent=[(sequence, commit, ranges) for sequence, commit, ranges in recent],
                stored=StoredSequences.load(stored[0])  # since format 2 of checkpoints
                if stored
                else StoredSequences.of(sequence for sequence, _, _ in recent),
            )
        state.transactions = dump["transactions"]
        state.transactions_seen_us = dump.get(  # since format 2 of checkpoints
            "transactions_seen_us", dict.fromkeys(state.transactions, state.time_us)
        )
        state.notes = dump["notes"]
        for key, (generation, members, owners, target, committed) in dump["groups"].items():
            state.groups[key] = GroupState(
                generation=generation,
                members=members,
                owners=owners,
                target=target,
                committed={
                    topic: {int(partition): offset for partition, offset in offsets.items()}
                    for topic, offsets in committed.items()
                },
            )
        state.queues = {key: QueueState.load(stored) for key, stored in dump["queues"].items()}
        return state


_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,205}")
_DIRECTORY = re.compile(r"[A-Za-z0-9._-]{1,205}~[0-9]+")
_STAGED = re.compile(r"|[0-9]{17,}\.[A-Za-z0-9._-]+/[A-Za-z0-9._-]+~[0-9]+\.[0-9]+\.segment")
_SEGMENT = re.compile(r"[0-9]{20}(\.[0-9]+\.[0-9]+)?\.segment")
_PATHS: dict[str, dict[int, re.Pattern[str]]] = {
    "topic": {1: _TOPIC},
    "evolve": {1: _TOPIC},
    "restore": {1: _TOPIC, 3: _DIRECTORY},
    "drop": {1: _TOPIC},
    "append": {1: _TOPIC},
    "adopt": {1: _TOPIC, 5: _STAGED, 6: _SEGMENT},
}
"""Operation -> where it has names that become parts of paths, and what those look like."""
_NUMBERS = {"append": range(2, 8), "adopt": range(2, 5), "roll": range(2, 3), "start": range(2, 4)}
"""Operation -> where it has numbers of partitions and offsets."""


def _newer_operation(name: str) -> NewerFormat:
    return NewerFormat(
        f"The journal has an operation {name!r}, which this Headrace does not know.",
        fix="upgrade Headrace.",
    )


def _check_fields(name: str, fields: list[Any]) -> None:
    """Raise NewerFormat if an operation has more fields than we know, and CorruptJournal if it has
    fewer than it needs.
    """
    least, most = _FIELDS[name]
    if name == "queue" and len(fields) >= least:  # group, topic, kind, partition, …
        kind = fields[2]
        if kind not in _QUEUE_FIELDS:
            raise _newer_operation(f"queue {kind}")
        name, fields, (least, most) = f"queue {kind}", fields[4:], _QUEUE_FIELDS[kind]
    if len(fields) > most:
        raise NewerFormat(
            f"The journal has an operation {name!r} with {len(fields)} fields; this Headrace knows"
            f" {most}.",
            fix="upgrade Headrace.",
        )
    if len(fields) < least:
        raise CorruptJournal(
            f"The journal has an operation {name!r} with {len(fields)} fields; it needs {least}.",
            fix="somebody has changed the journal: restore it from a backup.",
        )


def _fields_of(method: Callable[..., None]) -> tuple[int, int]:
    """How many fields an operation needs, and how many it may have: its method's parameters behind
    the first one.
    """
    parameters = list(signature(method).parameters.values())[1:]
    needed = [each for each in parameters if each.default is each.empty]
    is_open = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    return len(needed), 1_000 if is_open else len(parameters)


_APPLY: dict[str, Callable[..., None]] = {
    name[1:]: getattr(State, name)
    for name in (
        "_topic",
        "_evolve",
        "_restore",
        "_drop",
        "_append",
        "_adopt",
        "_roll",
        "_start",
        "_epoch",
        "_sequence",
        "_inherit",
        "_note",
        "_offsets",
        "_group",
        "_forget_group",
        "_queue",
        "_checkpointed",
    )
}
_FIELDS = {name: _fields_of(method) for name, method in _APPLY.items()}
_QUEUE_FIELDS = {
    name: _fields_of(getattr(QueueState, f"_{name}"))
    for name in ("begin", "reset", "take", "renew", "return", "done")
}
