"""Judges a history of a log: which of its promises were broken, by which operations.

The kinds of anomaly are those that Jepsen's workload for Kafka looks for, and some of what this log
promises beyond Kafka. An example, with one partition and operations from top to bottom:

    writer    send a       ok, at offset 0
    mover     send b       fail
    reader    poll         0: a, 1: b          aborted read: b was never committed
    writer    send c       ok, at offset 1     inconsistent offsets: 1 is b and c
    reader    poll         3: d                poll skip, if a row 2 is known
    (end)     audit        0: a                lost write: c

The order of a partition is put together from everything that anybody was told about it: the offsets
of acknowledged rows and of rows that were read. Nothing is assumed about rows that nobody saw and
nobody was promised, so gaps of aborted transactions and of transaction markers are no anomaly.

The checker is pure. `check` takes a history and the rules of its topics and groups, and returns
anomalies; a sound history has none.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, pairwise

from tests.history.history import Assign, History, Operation, Outcome, Partition, Poll, Send


class Kind(StrEnum):
    """What can be wrong with a history."""

    ABORTED_READ = "aborted read"
    """A row of an operation that failed was read (G1a)."""
    PRECOMMITTED_READ = "pre-committed read"
    """A row was read before its writer asked for the commit."""
    PHANTOM = "phantom"
    """A row was read that nobody sent."""
    INCONSISTENT_OFFSETS = "inconsistent offsets"
    """One offset of a partition has had several rows."""
    DUPLICATE = "duplicate"
    """One row has several offsets."""
    LOST_WRITE = "lost write"
    """A committed row is not in the log: readers went past it, or it is gone at the end."""
    UNSEEN = "unseen"
    """A group, or everybody, never got a committed row."""
    POLL_SKIP = "poll skip"
    """A consumer went on behind a row that it should have been given."""
    INTERNAL_POLL_SKIP = "internal poll skip"
    """… within one transaction or poll."""
    NONMONOTONIC_POLL = "non-monotonic poll"
    """A consumer went back without having been told to."""
    INTERNAL_NONMONOTONIC_POLL = "internal non-monotonic poll"
    """… within one transaction or poll."""
    NONMONOTONIC_SEND = "non-monotonic send"
    """A process's later append is in front of its earlier one."""
    INTERNAL_NONMONOTONIC_SEND = "internal non-monotonic send"
    """… within one transaction or append."""
    WRITE_CYCLE = "write cycle"
    """Transactions are in front of each other in different partitions (G0)."""
    READ_CYCLE = "read cycle"
    """Transactions that read each other's rows, directly or through others (G1c)."""
    FRACTURED_READ = "fractured read"
    """A part of a transaction was visible and another part was not."""
    STALE_READ = "stale read"
    """What had been acknowledged before was not visible."""
    ZOMBIE_WRITE = "zombie write"
    """A producer or a transaction committed after a newer owner of its id had been let in."""
    EARLY_REMOVAL = "early removal"
    """Retention removed rows that the topic's settings keep."""
    DUPLICATE_EFFECT = "duplicate effect"
    """A row was processed twice in transactions with the group's offsets."""
    LOST_EFFECT = "lost effect"
    """A row was passed over in transactions with the group's offsets."""


@dataclass(frozen=True)
class TopicRules:
    """What may vanish from a topic.

    Attributes:
        is_compacted: A row may vanish when there is a newer one of its key.
        newest_kept: Retention keeps at least so many of a partition's newest offsets; None: it
            removes nothing.
    """

    is_compacted: bool = False
    newest_kept: int | None = None


@dataclass(frozen=True)
class Rules:
    """What the log and its users promised.

    Attributes:
        topics: The rules of topics that may lose rows.
        groups: Consumer group -> topics whose every row its members must have polled at the end.
        effects: Topic -> the topic from whose every row exactly one of its rows is made.
        orders_writes: Whether a transaction's rows are at one point of a global order. On Kafka
            concurrent transactions interleave.
        has_snapshots: Whether an audit's ends are of one moment.
        shows_acknowledged: Whether a row is visible as soon as it is acknowledged. On Kafka the
            open transaction of a dead process holds back readers until it times out.
    """

    topics: Mapping[str, TopicRules] = field(default_factory=dict)
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    effects: Mapping[str, str] = field(default_factory=dict)
    orders_writes: bool = True
    has_snapshots: bool = True
    shows_acknowledged: bool = True


@dataclass(frozen=True)
class Anomaly:
    kind: Kind
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def check(history: History, rules: Rules | None = None) -> list[Anomaly]:
    """All anomalies of a history; none for a sound one."""
    known = _Knowledge(history, rules or Rules())
    return [
        *_bad_reads(known),
        *_bad_offsets(known),
        *_lost_writes(known),
        *_unseen_by_groups(known),
        *_bad_polls(known),
        *_bad_sends(known),
        *_cycles(known),
        *_bad_audits(known),
        *_zombie_writes(known),
        *_bad_effects(known),
    ]


def summary(anomalies: Iterable[Anomaly], limit: int = 5) -> str:
    """The anomalies by kind, a few of each."""
    by_kind: dict[Kind, list[Anomaly]] = defaultdict(list)
    for anomaly in anomalies:
        by_kind[anomaly.kind].append(anomaly)
    return "\n".join(
        f"{kind} ({len(found)}):\n" + "\n".join(f"    {anomaly.text}" for anomaly in found[:limit])
        for kind, found in by_kind.items()
    )


# What a history shows

Value = tuple[str, str]
"""A topic and a value in it."""
Place = tuple[int, int]
"""A partition's number and an offset."""


@dataclass(frozen=True, slots=True)
class _Read:
    operation: Operation
    poll: Poll


class _Knowledge:
    """What all answers together say about the log."""

    def __init__(self, history: History, rules: Rules) -> None:
        self.rules = rules
        self.operations = history.operations
        self.audits = [
            operation
            for operation in history.operations
            if operation.kind == "audit" and operation.outcome is Outcome.OK
        ]
        self.final = next((audit for audit in self.audits if audit.is_final), None)
        self.writers: dict[Value, list[Operation]] = defaultdict(list)
        self.sends: dict[Value, Send] = {}
        self.values: dict[Partition, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        self.places: dict[Value, list[Place]] = defaultdict(list)
        self.first_read: dict[Value, _Read] = {}
        self.seen_by_group: dict[str, set[Value]] = defaultdict(set)
        self.final_places: set[tuple[str, int, int]] = set()
        for operation in self.operations:
            self._add_sends(operation)
            self._add_polls(operation)
        self.offsets = {partition: sorted(rows) for partition, rows in self.values.items()}
        self.removed_below = self._removed_below()
        self.newest_of_key = self._newest_of_keys()

    def _add_sends(self, operation: Operation) -> None:
        for send in operation.sends:
            value = send.topic, send.value
            self.writers[value].append(operation)
            self.sends[value] = send
            if send.offset is not None and operation.outcome is Outcome.OK:
                self._add_place(value, send.partition, send.offset)

    def _add_polls(self, operation: Operation) -> None:
        for poll in operation.polls:
            for offset, text in poll.rows:
                value = poll.topic, text
                self._add_place(value, poll.partition, offset)
                earlier = self.first_read.get(value)
                if earlier is None or poll.time_ns < earlier.poll.time_ns:
                    self.first_read[value] = _Read(operation, poll)
                if operation.group:
                    self.seen_by_group[operation.group].add(value)
                if operation.is_final:
                    self.final_places.add((poll.topic, poll.partition, offset))

    def _add_place(self, value: Value, partition: int, offset: int) -> None:
        topic, text = value
        values = self.values[topic, partition][offset]
        if text not in values:
            values.append(text)
        if (partition, offset) not in self.places[value]:
            self.places[value].append((partition, offset))

    def _removed_below(self) -> dict[Partition, int]:
        """Below which offset retention has removed rows by the end."""
        removed: dict[Partition, int] = defaultdict(int)
        for audit in self.audits:
            for partition, start in audit.starts.items():
                removed[partition] = max(removed[partition], start)
        return removed

    def _newest_of_keys(self) -> dict[tuple[str, int, str], int]:
        newest: dict[tuple[str, int, str], int] = {}
        for (topic, partition), rows in self.values.items():
            for offset, values in rows.items():
                for text in values:
                    send = self.sends.get((topic, text))
                    if send is not None:
                        key = topic, partition, send.key
                        newest[key] = max(newest.get(key, -1), offset)
        return newest

    def topic_rules(self, topic: str) -> TopicRules:
        return self.rules.topics.get(topic, TopicRules())

    def may_vanish(self, topic: str, partition: int, offset: int) -> bool:
        """Whether retention or compaction may have removed a row."""
        rules = self.topic_rules(topic)
        if rules.newest_kept is not None and offset < self.removed_below[topic, partition]:
            return True
        if not rules.is_compacted:
            return False
        for text in self.values[topic, partition].get(offset, ()):
            send = self.sends.get((topic, text))
            if send is not None and offset < self.newest_of_key[topic, partition, send.key]:
                return True
        return False

    def is_committed(self, operation: Operation) -> bool:
        """Whether an operation certainly happened: it says so, or somebody read one of its rows."""
        if operation.kind not in {"send", "transaction"} or operation.outcome is Outcome.FAIL:
            return False
        return operation.outcome is Outcome.OK or any(
            (send.topic, send.value) in self.first_read
            and self.writers[send.topic, send.value] == [operation]
            for send in operation.sends
        )

    def offset_of(self, send: Send) -> int | None:
        """Where a row is, if that is known and unambiguous."""
        if send.offset is not None:
            return send.offset
        places = self.places.get((send.topic, send.value), ())
        return places[0][1] if len(places) == 1 else None

    def rows_between(self, partition: Partition, start: int, stop: int) -> list[int]:
        """The offsets of known rows, from `start` up to `stop`, that cannot have vanished."""
        offsets = self.offsets.get(partition, [])
        between = offsets[bisect_left(offsets, start) : bisect_left(offsets, stop)]
        return [offset for offset in between if not self.may_vanish(*partition, offset)]


def _named(partition: Partition, offset: int | None = None) -> str:
    topic, number = partition
    return f"{topic}[{number}]" + ("" if offset is None else f" at {offset}")


# Rows that should not be where they are


def _bad_reads(known: _Knowledge) -> Iterator[Anomaly]:
    for (topic, text), read in known.first_read.items():
        writers = known.writers.get((topic, text), [])
        where = f"{text!r} of {topic}, read by {read.operation}"
        if not writers:
            yield Anomaly(Kind.PHANTOM, f"{where}, was sent by nobody")
        elif all(writer.outcome is Outcome.FAIL for writer in writers):
            yield Anomaly(Kind.ABORTED_READ, f"{where}, was never committed by {writers[0]}")
        elif read.operation in writers or all(
            writer.committing_ns is None or writer.committing_ns > read.poll.time_ns
            for writer in writers
        ):
            yield Anomaly(Kind.PRECOMMITTED_READ, f"{where}, was not committed yet by {writers[0]}")


def _bad_offsets(known: _Knowledge) -> Iterator[Anomaly]:
    for partition, rows in known.values.items():
        for offset, values in rows.items():
            if len(values) > 1:
                yield Anomaly(
                    Kind.INCONSISTENT_OFFSETS, f"{_named(partition, offset)} is each of {values}"
                )
    for (topic, text), places in known.places.items():
        if len(places) > 1:
            yield Anomaly(Kind.DUPLICATE, f"{text!r} of {topic} is at each of {sorted(places)}")


# Rows that are missing


def _lost_writes(known: _Knowledge) -> Iterator[Anomaly]:
    for operation in known.operations:
        if not known.is_committed(operation):
            continue
        for send in operation.sends:
            partition = send.topic, send.partition
            offset = known.offset_of(send)
            text = f"{send.value!r} of {_named(partition, offset)}, sent by {operation},"
            if offset is None:
                rules = known.topic_rules(send.topic)
                may_vanish = rules.is_compacted or rules.newest_kept is not None
            else:
                may_vanish = known.may_vanish(*partition, offset)
            if may_vanish:
                continue
            if (send.topic, send.value) not in known.first_read:
                if known.final is not None or _was_passed(known, partition, offset):
                    yield Anomaly(Kind.LOST_WRITE, f"{text} was never read by anybody")
                elif any(other.polls for other in known.operations):
                    yield Anomaly(Kind.UNSEEN, f"{text} was not read by anybody")
    yield from _gone_at_the_end(known)


def _was_passed(known: _Knowledge, partition: Partition, offset: int | None) -> bool:
    """Whether somebody read a later row."""
    if offset is None:
        return False
    offsets = known.offsets.get(partition, [])
    return any(
        (partition[0], text) in known.first_read
        for later in offsets[bisect_right(offsets, offset) :]
        for text in known.values[partition][later]
    )


def _gone_at_the_end(known: _Knowledge) -> Iterator[Anomaly]:
    if known.final is None:
        return
    for (topic, partition), end in known.final.ends.items():
        last = max(known.offsets.get((topic, partition), [-1]))
        for offset in known.rows_between((topic, partition), 0, max(end, last + 1)):
            if (topic, partition, offset) not in known.final_places:
                values = known.values[topic, partition][offset]
                yield Anomaly(
                    Kind.LOST_WRITE,
                    f"{_named((topic, partition), offset)} was {values} and is gone at the end",
                )


def _unseen_by_groups(known: _Knowledge) -> Iterator[Anomaly]:
    for group, topics in known.rules.groups.items():
        seen = known.seen_by_group[group]
        for (topic, partition), rows in known.values.items():
            if topic not in topics:
                continue
            for offset, values in rows.items():
                missing = [text for text in values if (topic, text) not in seen]
                if missing and not known.may_vanish(topic, partition, offset):
                    yield Anomaly(
                        Kind.UNSEEN,
                        f"{missing} of {_named((topic, partition), offset)} was never polled by the"
                        f" group {group!r}",
                    )


# The order of polls and of sends


def _bad_polls(known: _Knowledge) -> Iterator[Anomaly]:
    """Follow each consumer through its partitions. An assignment says where it goes on."""
    expected: dict[tuple[str, str, Partition], tuple[int, Operation | None]] = {}
    for operation in known.operations:
        if not operation.group:
            continue
        for action in operation.actions:
            if isinstance(action, Send):
                continue
            partition = action.topic, action.partition
            member = operation.process, operation.member, partition
            if isinstance(action, Assign):
                expected[member] = action.position, None
                continue
            for offset, _ in action.rows:
                if member in expected:
                    position, last = expected[member]
                    yield from _judge_poll(known, operation, last, partition, position, offset)
                expected[member] = offset + 1, operation


def _judge_poll(
    known: _Knowledge,
    operation: Operation,
    last: Operation | None,
    partition: Partition,
    position: int,
    offset: int,
) -> Iterator[Anomaly]:
    is_internal = last is operation
    if offset < position:
        yield Anomaly(
            Kind.INTERNAL_NONMONOTONIC_POLL if is_internal else Kind.NONMONOTONIC_POLL,
            f"{operation} got {_named(partition, offset)} after it had reached {position}"
            + ("" if last is None else f" in {last}"),
        )
    elif skipped := known.rows_between(partition, position, offset):
        yield Anomaly(
            Kind.INTERNAL_POLL_SKIP if is_internal else Kind.POLL_SKIP,
            f"{operation} went from {_named(partition, position)} to {offset}, past"
            f" {[known.values[partition][each] for each in skipped[:3]]}",
        )


def _bad_sends(known: _Knowledge) -> Iterator[Anomaly]:
    newest: dict[tuple[str, Partition], tuple[int, Operation]] = {}
    for operation in known.operations:
        if operation.is_repeat or not known.is_committed(operation):
            continue
        for send in operation.sends:
            offset = known.offset_of(send)
            if offset is None:
                continue
            sender = operation.process, (send.topic, send.partition)
            if sender in newest and offset <= newest[sender][0]:
                last_offset, last = newest[sender]
                kind = (
                    Kind.INTERNAL_NONMONOTONIC_SEND if last is operation else Kind.NONMONOTONIC_SEND
                )
                yield Anomaly(
                    kind,
                    f"{operation} sent {send.value!r} to {_named(sender[1], offset)}, after {last}"
                    f" had reached {last_offset}",
                )
            newest[sender] = offset, operation


# Cycles

Graph = dict[int, set[int]]


def _cycles(known: _Knowledge) -> Iterator[Anomaly]:
    """Cycles of transactions that wrote in front of each other, or read each other's rows."""
    committed = [operation for operation in known.operations if known.is_committed(operation)]
    number_of = {id(operation): number for number, operation in enumerate(committed)}

    def writer(topic: str, values: Sequence[str]) -> int | None:
        """The operation that wrote a row; None if it is ambiguous."""
        writers = known.writers.get((topic, values[0]), []) if len(values) == 1 else []
        return number_of.get(id(writers[0])) if len(writers) == 1 else None

    writes: Graph = defaultdict(set)
    if known.rules.orders_writes:
        for (topic, partition), offsets in known.offsets.items():
            rows = known.values[topic, partition]
            for before, after in pairwise(writer(topic, rows[offset]) for offset in offsets):
                if before is not None and after is not None and before != after:
                    writes[before].add(after)
    dependencies: Graph = defaultdict(set)
    for number, targets in writes.items():
        dependencies[number] |= targets
    for number, operation in enumerate(committed):
        for poll in operation.polls:
            for _, text in poll.rows:
                source = writer(poll.topic, [text])
                if source is not None and source != number:
                    dependencies[source].add(number)

    write_cycles = [set(cycle) for cycle in _components(writes)]
    for cycle in write_cycles:
        yield Anomaly(Kind.WRITE_CYCLE, _told(committed, cycle))
    for cycle in _components(dependencies):
        if not any(cycle <= inner for inner in write_cycles):
            yield Anomaly(Kind.READ_CYCLE, _told(committed, cycle))


def _told(committed: Sequence[Operation], cycle: Iterable[int]) -> str:
    operations = [str(committed[number]) for number in sorted(cycle)]
    return f"{len(operations)} operations come in front of each other: {', '.join(operations[:6])}"


def _components(graph: Graph) -> list[set[int]]:
    """The strongly connected components of more than one node (Tarjan's algorithm, with a stack of
    its own, since a history is longer than Python's).
    """
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    on_stack: set[int] = set()
    stack: list[int] = []
    components: list[set[int]] = []
    for root in list(graph):
        if root in index:
            continue
        work = [(root, iter(graph.get(root, ())))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, targets = work[-1]
            for target in targets:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    on_stack.add(target)
                    work.append((target, iter(graph.get(target, ()))))
                    break
                if target in on_stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[node])
                if low[node] == index[node]:
                    component = set()
                    while node not in component:
                        member = stack.pop()
                        on_stack.discard(member)
                        component.add(member)
                    if len(component) > 1:
                        components.append(component)
    return components


# Audits: what was visible at a moment


def _bad_audits(known: _Knowledge) -> Iterator[Anomaly]:
    yield from _early_removals(known)
    if known.rules.shows_acknowledged:
        yield from _stale_audits(known)
    if known.rules.has_snapshots:
        yield from _fractures(known)


def _early_removals(known: _Knowledge) -> Iterator[Anomaly]:
    for audit in known.audits:
        for partition, start in audit.starts.items():
            kept = known.topic_rules(partition[0]).newest_kept
            end = audit.ends.get(partition, 0)
            allowed = 0 if kept is None else max(0, end - kept)
            if start > allowed:
                yield Anomaly(
                    Kind.EARLY_REMOVAL,
                    f"{audit} found {_named(partition)} from {start} to {end}; it should have begun"
                    f" at {allowed} or before",
                )


def _stale_audits(known: _Knowledge) -> Iterator[Anomaly]:
    """An audit sees every row that was acknowledged before it began."""
    acknowledged: dict[Partition, list[tuple[int, int]]] = defaultdict(list)
    for operation in known.operations:
        if operation.outcome is Outcome.OK and operation.completed_ns is not None:
            for send in operation.sends:
                if send.offset is not None:
                    acknowledged[send.topic, send.partition].append(
                        (operation.completed_ns, send.offset)
                    )
    times: dict[Partition, list[int]] = {}
    newest: dict[Partition, list[int]] = {}
    for partition, pairs in acknowledged.items():
        pairs.sort()
        times[partition] = [time_ns for time_ns, _ in pairs]
        newest[partition] = list(accumulate((offset for _, offset in pairs), max))
    for audit in known.audits:
        for partition, end in audit.ends.items():
            before = bisect_left(times.get(partition, []), audit.invoked_ns)
            if before and newest[partition][before - 1] >= end:
                yield Anomaly(
                    Kind.STALE_READ,
                    f"{audit} found {_named(partition)} to end at {end}, although"
                    f" {newest[partition][before - 1]} had been acknowledged",
                )


def _fractures(known: _Knowledge) -> Iterator[Anomaly]:
    """All rows of a transaction are visible from the same audit on. Retention does not matter: it
    is about where a partition ends.
    """
    by_auditor: dict[str, list[Operation]] = defaultdict(list)
    for audit in known.audits:
        by_auditor[audit.process].append(audit)
    for audits in by_auditor.values():
        ends: dict[Partition, list[int]] = {}
        for partition in audits[-1].ends:
            ends[partition] = list(
                accumulate((audit.ends.get(partition, 0) for audit in audits), max)
            )
        for operation in known.operations:
            if len(operation.sends) < 2 or not known.is_committed(operation):
                continue
            first_seen = {
                bisect_right(ends[send.topic, send.partition], offset): send
                for send in operation.sends
                if (offset := known.offset_of(send)) is not None
                and (send.topic, send.partition) in ends
            }
            if len(first_seen) > 1:
                early, late = first_seen[min(first_seen)], first_seen[max(first_seen)]
                yield Anomaly(
                    Kind.FRACTURED_READ,
                    f"{audits[min(first_seen)]} saw {early.value!r} of {operation}, and not"
                    f" {late.value!r}",
                )


# Fencing and exactly once


def _zombie_writes(known: _Knowledge) -> Iterator[Anomaly]:
    opens: dict[str, list[Operation]] = defaultdict(list)
    for operation in known.operations:
        if operation.kind == "open" and operation.id and operation.outcome is Outcome.OK:
            opens[operation.id].append(operation)
    for operation in known.operations:
        if operation.id not in opens or not known.is_committed(operation):
            continue
        own = [each for each in opens[operation.id] if each.process == operation.process]
        own = [each for each in own if each.invoked_ns < operation.invoked_ns]
        if not own or own[-1].completed_ns is None or operation.committing_ns is None:
            continue
        for newer in opens[operation.id]:
            if (
                newer.process != operation.process
                and newer.completed_ns is not None
                and newer.invoked_ns > own[-1].completed_ns
                and newer.completed_ns < operation.committing_ns
            ):
                yield Anomaly(
                    Kind.ZOMBIE_WRITE,
                    f"{operation} committed as {operation.id!r} after {newer.process} had opened"
                    " that id",
                )
                break


def _bad_effects(known: _Knowledge) -> Iterator[Anomaly]:
    for topic, source_topic in known.rules.effects.items():
        made: dict[str, set[str]] = defaultdict(set)
        for (each, text), places in known.places.items():
            send = known.sends.get((each, text))
            if each == topic and send is not None and places:
                made[send.source].add(text)
        for source, texts in made.items():
            if len(texts) > 1:
                yield Anomaly(
                    Kind.DUPLICATE_EFFECT,
                    f"{source!r} of {source_topic} was processed into each of {sorted(texts)}",
                )
        if known.final is None:
            continue
        for each, partition, offset in sorted(known.final_places):
            if each != source_topic:
                continue
            for text in known.values[each, partition][offset]:
                if text not in made:
                    yield Anomaly(
                        Kind.LOST_EFFECT,
                        f"{text!r} of {_named((each, partition), offset)} was never processed",
                    )
