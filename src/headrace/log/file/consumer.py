"""The embedded log's consumer: a member of a group that reads its partitions in turn."""

from __future__ import annotations

import operator
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.columnar.columns import OFFSET_COLUMN
from headrace.durations import to_us
from headrace.errors import (
    BadPartition,
    CorruptBatch,
    HeadraceError,
    InputError,
    MemberFenced,
    OffsetOutOfRange,
)
from headrace.log.api import Consumer
from headrace.log.file.commit_draft import Draft
from headrace.log.file.reader import FileBatches
from headrace.log.file.state import GroupState, State
from headrace.log.topic_config import check_name
from headrace.log.values import TOPIC_METADATA, Duration, Offsets

if TYPE_CHECKING:
    from headrace.log.file.handle import LogHandle
    from headrace.log.file.state import TopicState


# Who reads what in a consumer group: pure decisions over the group's state, made under the log's
# lock.
#
# A partition has an owner and a target. It moves from one live member to another in two steps: the
# owner lets go of it when it next polls (so what it delivered has been committed by then), and the
# target takes it when it is free.


def partition_key(topic: str, partition: int) -> str:
    return f"{topic}/{partition}"


def parse_partition_key(key: str) -> tuple[str, int]:
    topic, partition = key.rsplit("/", 1)
    return topic, int(partition)


def share_out(
    members: Mapping[str, Mapping[str, Any]], counts: Mapping[str, int], before: Mapping[str, str]
) -> dict[str, str]:
    """Partition -> member: each topic's partitions evenly among those who want it, moving as few as
    possible.
    """
    target: dict[str, str] = {}
    for index, (topic, count) in enumerate(sorted(counts.items())):
        wanting = sorted(name for name, about in members.items() if topic in about["topics"])
        if wanting:
            target |= _share_topic(topic, count, wanting, before, turn=index)
    return target


def _share_topic(
    topic: str, count: int, wanting: list[str], before: Mapping[str, str], *, turn: int
) -> dict[str, str]:
    keys = [partition_key(topic, number) for number in range(count)]
    held = {name: [key for key in keys if before.get(key) == name] for name in wanting}
    least, extra = divmod(count, len(wanting))
    # Who holds most already keeps one more; ties go round from topic to topic.
    order = sorted(
        wanting, key=lambda name: (-len(held[name]), (wanting.index(name) + turn) % len(wanting))
    )
    quota = {name: least + (position < extra) for position, name in enumerate(order)}
    target = {key: name for name in wanting for key in held[name][: quota[name]]}
    free = [key for key in keys if key not in target]
    for name in order:
        room = quota[name] - min(len(held[name]), quota[name])
        for key in free[:room]:
            target[key] = name
        free = free[room:]
    return target


def coordinate(
    draft: Draft, group: str, member: str | None, about: Mapping[str, Any], dead: Iterable[str]
) -> tuple[int, set[str]]:
    """One step of a member: be in the group, leave out the dead, let go of what is another's, take
    what is free.

    Returns the generation and what the member owns now. With `member` None only the dead are
    removed.
    """
    known = draft.state.groups.get(group) or GroupState()
    gone = set(dead)
    members = {name: entry for name, entry in known.members.items() if name not in gone}
    if member is not None:
        members[member] = dict(about)
    wanted = {topic for entry in members.values() for topic in entry["topics"]}
    counts = {
        topic: len(draft.state.topics[topic].partitions)
        for topic in wanted
        if topic in draft.state.topics
    }
    target = share_out(members, counts, known.target)
    owners = {
        key: name
        for key, name in known.owners.items()
        if name in members and key in target and (name != member or target[key] == member)
    }
    owners |= {key: name for key, name in target.items() if name == member and key not in owners}
    generation = known.generation
    if (members, owners, target) != (known.members, known.owners, known.target):
        generation += 1
        draft.do("group", group, generation, members, owners, target)
    return generation, {key for key, name in owners.items() if name == member}


def leave(draft: Draft, group: str, member: str) -> None:
    """Go in good order: what was owned is free at once."""
    known = draft.state.groups.get(group)
    if known is not None and member in known.members:
        coordinate(draft, group, None, {}, [member])


def plain_positions(positions: Mapping[str, Mapping[int, int]]) -> Offsets:
    """As the journal can store them: what a user computed may be numpy's numbers."""
    try:
        plain = {
            topic: {
                operator.index(partition): operator.index(offset)
                for partition, offset in offsets.items()
            }
            for topic, offsets in positions.items()
        }
    except (TypeError, AttributeError):
        raise InputError(
            f"{positions!r} are not positions.",
            fix="use {topic: {partition: next offset}}, or consumer.positions().",
        ) from None
    return Offsets(plain, member=positions.member if isinstance(positions, Offsets) else None)


def check_places(state: State, positions: Mapping[str, Mapping[int, int]]) -> None:
    """A group can have read what there is, and no more. What retention removed since it may have
    read, too.
    """
    for topic, offsets in positions.items():
        partitions = state.topic(topic).partitions
        for partition, offset in offsets.items():
            if not 0 <= partition < len(partitions):
                raise BadPartition(
                    f"The topic {topic!r} has no partition {partition}.",
                    fix=f"name one from 0 to {len(partitions) - 1}.",
                )
            if offset < 0:
                raise InputError(
                    f"The offset {offset} of {topic}[{partition}] is negative.",
                    fix="an offset is 0 or more.",
                )
            if offset > partitions[partition].end:
                raise OffsetOutOfRange(
                    topic, partition, offset, partitions[partition].start, partitions[partition].end
                )


def check_owner(
    state: State, group: str, positions: Mapping[str, Mapping[int, int]], member: str | None
) -> None:
    """Only its owner may commit for a partition; positions without a member are an outsider's, who
    is trusted when nobody reads.
    """
    for topic, offsets in positions.items():
        state.topic(topic)
        for partition in offsets:
            owner = (
                state.groups[group].owners.get(partition_key(topic, partition))
                if group in state.groups
                else None
            )
            if owner != member and (member is not None or owner is not None):
                raise MemberFenced(
                    f"This member no longer owns {topic}[{partition}] in group {group!r}"
                    + (f": {owner!r} does." if owner else "."),
                    fix=(
                        "poll again: rows since the last commit will be delivered to the new owner."
                    ),
                )


_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.001, 0.01
_LONGEST_WITHOUT_POLL_S = 300.0
_MAX_BYTES_A_POLL = 64 << 20  # of a partition; one batch may go beyond it


class Heartbeat:
    """Says that a member is alive, by touching a file; for as long as its owner polls at all."""

    def __init__(self, path: Path, timeout_us: int) -> None:
        self.path = path
        self.polled = time.monotonic()
        self._stop = Event()
        path.parent.mkdir(exist_ok=True)
        path.touch()
        self._thread = Thread(
            target=self._beat,
            args=(timeout_us / 3_000_000,),
            daemon=True,
            name=f"heartbeat {path.name}",
        )
        self._thread.start()

    def _beat(self, every_s: float) -> None:
        while not self._stop.wait(every_s):
            if time.monotonic() - self.polled < _LONGEST_WITHOUT_POLL_S:
                try:
                    os.utime(self.path)
                except FileNotFoundError:
                    self.path.touch()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        self.path.unlink(missing_ok=True)


def heartbeat_path(root: Path, group: str, member: str) -> Path:
    return root / "groups" / f"{group}~{member}"


def heartbeat_age_s(root: Path, group: str, member: str) -> float:
    try:
        return max(0.0, time.time() - heartbeat_path(root, group, member).stat().st_mtime)
    except FileNotFoundError:
        return float("inf")


def dead_members(root: Path, name: str, group: GroupState) -> list[str]:
    """Members that have not been heard of for longer than they promised."""
    return [
        member
        for member, about in group.members.items()
        if heartbeat_age_s(root, name, member) > about["timeout_us"] / 1e6
    ]


def _topic_of(key: str) -> str:
    return parse_partition_key(key)[0]


class FileConsumer(Consumer):
    def __init__(
        self,
        log: LogHandle,
        topics: tuple[str, ...],
        group: str,
        *,
        start: str,
        session_timeout: Duration,
        max_rows: int,
        on_lost: str,
        headers: bool,
    ) -> None:
        if start not in {"earliest", "latest"} or on_lost not in {"raise", "earliest", "latest"}:
            raise InputError(
                f"start={start!r}, on_lost={on_lost!r}.",
                fix="start is 'earliest' or 'latest'; on_lost is 'raise', 'earliest' or 'latest'.",
            )
        self.log, self.topics, self.group = log, topics, check_name(group, what="group")
        self._start, self._max_rows, self._on_lost, self._headers = (
            start,
            max_rows,
            on_lost,
            headers,
        )
        for topic in topics:
            log.topic_state(topic)
        timeout_us = to_us(session_timeout, what="session_timeout")
        self.member = f"{socket.gethostname()[:40]}-{os.getpid()}-{os.urandom(4).hex()}"
        self._about = {
            "topics": sorted(topics),
            "timeout_us": timeout_us,
            "host": socket.gethostname(),
        }
        self._check_every_s = timeout_us / 3e6
        self._heartbeat = Heartbeat(heartbeat_path(log.store.root, group, self.member), timeout_us)
        self._generation = -1
        self._shapes: dict[str, tuple[str, int]] = {}
        self._checked = 0.0
        self._positions: dict[str, int] = {}  # partition's key -> next offset
        self._turn = 0
        self._closed = False
        self._coordinate()

    # Membership

    def _coordinate(self) -> None:
        state = self.log.store.view()
        known = state.groups.get(self.group)
        dead = (
            [
                member
                for member in dead_members(self.log.store.root, self.group, known)
                if member != self.member
            ]
            if known
            else []
        )
        self._generation, owned, held = self.log.committer.submit(
            lambda draft: self._step(draft, dead)
        )
        self._checked = time.monotonic()
        shapes, before = self._topic_shapes(state), self._shapes
        self._shapes = shapes
        kept = {
            key
            for key in owned & held
            if shapes.get(_topic_of(key), ("", 0))[0] == before.get(_topic_of(key), ("", 0))[0]
        }
        self._positions = {key: offset for key, offset in self._positions.items() if key in kept}
        for key in owned - set(self._positions):
            self._positions[key] = self._first_position(key)

    def _step(self, draft: Draft, dead: list[str]) -> tuple[int, set[str], set[str]]:
        """The generation, what this member owns now, and what it owned all the while: of what it
        lost, others may have gone on with the rows.
        """
        known = draft.state.groups.get(self.group)
        held = (
            {key for key, name in known.owners.items() if name == self.member} if known else set()
        )
        return *coordinate(draft, self.group, self.member, self._about, dead), held

    def _topic_shapes(self, state: State) -> dict[str, tuple[str, int]]:
        """A topic that was deleted and created again has another directory."""
        found = {topic: state.topics[topic] for topic in self.topics if topic in state.topics}
        return {name: (topic.directory, len(topic.partitions)) for name, topic in found.items()}

    def _first_position(self, key: str) -> int:
        topic, number = parse_partition_key(key)
        state = self.log.store.view()
        group = state.groups.get(self.group)
        committed = group.committed.get(topic, {}).get(number) if group else None
        if committed is not None:
            return committed
        partition = state.topic(topic).partitions[number]
        return partition.start if self._start == "earliest" else partition.end

    def _keep_up(self) -> State:
        """Notice that the group or its topics changed, or that a member died."""
        state = self.log.store.view()
        group = state.groups.get(self.group)
        changed = (
            group is None
            or group.generation != self._generation
            or self._topic_shapes(state) != self._shapes
        )
        if (
            not changed
            and group is not None
            and time.monotonic() - self._checked > self._check_every_s
        ):
            self._checked = time.monotonic()
            changed = any(
                member != self.member
                for member in dead_members(self.log.store.root, self.group, group)
            )
        if changed:
            self._coordinate()
            state = self.log.store.view()
        return state

    # Reading

    def poll(
        self, timeout: Duration = "1 second", max_rows: int | None = None
    ) -> list[pa.RecordBatch]:
        self._check_open()
        deadline = time.monotonic() + to_us(timeout, what="timeout") / 1e6
        nap = _SHORTEST_NAP_S
        while True:
            self._heartbeat.polled = time.monotonic()
            batches = self._read(self._keep_up(), max_rows or self._max_rows)
            if batches or time.monotonic() >= deadline:
                return batches
            time.sleep(min(nap, max(0.0, deadline - time.monotonic())))
            nap = min(2 * nap, _LONGEST_NAP_S)

    def _read(self, state: State, room: int) -> list[pa.RecordBatch]:
        """What is there, a partition at a time, each in its turn first."""
        keys = sorted(self._positions)
        self._turn += 1
        batches: list[pa.RecordBatch] = []
        reached: dict[str, int] = {}
        for index in range(len(keys)):
            if room <= 0:
                break
            key = keys[(index + self._turn) % len(keys)]
            try:
                taken, reached[key] = self._read_partition(state, key, room)
            except HeadraceError:
                # they are delivered; the error comes again when it is this partition's turn to be
                # first
                if batches:
                    break
                raise
            room -= sum(batch.num_rows for batch in taken)
            batches += taken
        self._positions |= reached  # last: what is not returned has not been delivered
        return batches

    def _read_partition(
        self, state: State, key: str, room: int
    ) -> tuple[list[pa.RecordBatch], int]:
        """Rows, and the offset behind them. Before damaged rows it stops, so that the sound ones in
        front of them are delivered.
        """
        topic, number = parse_partition_key(key)
        known = state.topics.get(topic)
        if known is None:
            return [], self._positions[key]
        start, end = (
            self._found(key, known.partitions[number].start, known.partitions[number].end),
            known.partitions[number].end,
        )
        if start >= end:
            return [], start
        try:
            return self._read_range(known, number, start, min(end, start + room))
        except CorruptBatch as damage:
            if damage.first <= start:
                raise
            return self._read_range(known, number, start, damage.first)

    def _read_range(
        self, topic: TopicState, number: int, start: int, stop: int
    ) -> tuple[list[pa.RecordBatch], int]:
        rows = FileBatches(
            topic.info,
            [(self.log.partition_reader(topic, number), start, stop)],
            headers=self._headers,
        )
        batches: list[pa.RecordBatch] = []
        size = 0
        for batch in rows:
            batches.append(batch.replace_schema_metadata({TOPIC_METADATA: topic.name.encode()}))
            size += batch.nbytes
            if size >= _MAX_BYTES_A_POLL:
                return batches, batch[OFFSET_COLUMN][-1].as_py() + 1
        return batches, stop

    def _found(self, key: str, start: int, end: int) -> int:
        """The position to go on from, when retention may have overtaken it."""
        position = self._positions[key]
        if start <= position:
            return position
        topic, number = parse_partition_key(key)
        if self._on_lost == "raise":
            raise OffsetOutOfRange(topic, number, position, start, end)
        self._positions[key] = start if self._on_lost == "earliest" else end
        return self._positions[key]

    def _check_open(self) -> None:
        if self._closed:
            raise InputError(
                "This consumer was closed.", fix="open another one with log.consumer(...)."
            )

    # Positions

    def positions(self) -> Offsets:
        offsets: dict[str, dict[int, int]] = {}
        for key, offset in sorted(self._positions.items()):
            topic, number = parse_partition_key(key)
            offsets.setdefault(topic, {})[number] = offset
        return Offsets(offsets, member=self.member)

    def commit(self, positions: Mapping[str, Mapping[int, int]] | None = None) -> None:
        self._check_open()
        wanted = self.positions() if positions is None else plain_positions(positions)

        def decide(draft: Draft) -> None:
            check_places(draft.state, wanted)
            check_owner(draft.state, self.group, wanted, self.member)
            for topic, offsets in wanted.items():
                draft.do(
                    "offsets",
                    self.group,
                    topic,
                    {str(partition): offset for partition, offset in offsets.items()},
                )

        if any(wanted.values()):
            self.log.committer.submit(decide)

    def seek(self, partition: int, offset: int, *, topic: str | None = None) -> None:
        topic = topic or self.topics[0]
        key = partition_key(topic, partition)
        if key not in self._positions:
            raise BadPartition(
                f"This member does not own {topic}[{partition}].",
                fix=f"it owns {sorted(self._positions)}.",
            )
        self.log.partition_reader(self.log.topic_state(topic), partition).check_start(offset)
        self._positions[key] = offset

    def assignment(self) -> Mapping[str, tuple[int, ...]]:
        return {topic: tuple(offsets) for topic, offsets in self.positions().items()}

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._heartbeat.stop()
            self.log.committer.submit(lambda draft: leave(draft, self.group, self.member))
