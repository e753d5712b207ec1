"""The embedded log's consumer groups: who owns which partition, and the members that read.

Membership is decided under the log's lock, as pure functions over the group's state (`coordinate`).
A partition has an owner and a target. It moves between two live members in two steps: the owner
gives it up at its next poll, when what it delivered has been committed, and the target takes it
once it is free. A member shows that it is alive by touching its heartbeat file.

Messages with leases, instead of partitions with owners, are in `queue`.
"""

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
from headrace.log.file.commit_draft import CommitDraft
from headrace.log.file.reader import FileBatches
from headrace.log.file.state import GroupState, State
from headrace.log.values import TOPIC_METADATA, Duration, Offsets
from headrace.names import check_name

if TYPE_CHECKING:
    from headrace.log.file.handle import LogHandle
    from headrace.log.file.state import TopicState


_MIN_SLEEP_S = 0.001
_MAX_SLEEP_S = 0.01
_MAX_POLL_INTERVAL_S = 300.0
_MAX_POLL_BYTES = 64 << 20  # per partition; the last batch may go beyond it


# Assignment


def partition_key(topic: str, partition: int) -> str:
    """The name of a partition in a group's state: "topic/partition"."""
    return f"{topic}/{partition}"


def parse_partition_key(key: str) -> tuple[str, int]:
    """(topic, partition) of a partition's name in a group's state."""
    topic, partition = key.rsplit("/", 1)
    return topic, int(partition)


def assign_partitions(
    members: Mapping[str, Mapping[str, Any]], counts: Mapping[str, int], before: Mapping[str, str]
) -> dict[str, str]:
    """The target owner of each partition: each topic's partitions are shared evenly among the
    members that subscribe to it, and as few as possible move.

    Args:
        members: Member -> its entry, with the `topics` it subscribes to.
        counts: Topic -> number of partitions.
        before: Partition's key -> its target owner so far.
    """
    target: dict[str, str] = {}
    for index, (topic, count) in enumerate(sorted(counts.items())):
        subscribers = sorted(name for name, entry in members.items() if topic in entry["topics"])
        if subscribers:
            target |= _assign_topic(topic, count, subscribers, before, rotation=index)
    return target


def _assign_topic(
    topic: str, count: int, subscribers: list[str], before: Mapping[str, str], *, rotation: int
) -> dict[str, str]:
    keys = [partition_key(topic, number) for number in range(count)]
    owned = {name: [key for key in keys if before.get(key) == name] for name in subscribers}
    share, remainder = divmod(count, len(subscribers))
    # The members with most partitions get one of the remainder; ties rotate from topic to topic.
    order = sorted(
        subscribers,
        key=lambda name: (
            -len(owned[name]),
            (subscribers.index(name) + rotation) % len(subscribers),
        ),
    )
    quota = {name: share + (index < remainder) for index, name in enumerate(order)}
    target = {key: name for name in subscribers for key in owned[name][: quota[name]]}
    free = [key for key in keys if key not in target]
    for name in order:
        missing = quota[name] - min(len(owned[name]), quota[name])
        for key in free[:missing]:
            target[key] = name
        free = free[missing:]
    return target


def coordinate(
    draft: CommitDraft,
    group: str,
    member: str | None,
    about: Mapping[str, Any],
    dead: Iterable[str],
) -> tuple[int, set[str]]:
    """One step of a member: join the group, remove dead members, give up partitions that are
    another member's by now, and take those that are free.

    Args:
        draft: The commit's draft.
        group: The group.
        member: The member that takes the step; None only removes dead members.
        about: The member's entry: its topics, session timeout and host.
        dead: The members to remove.

    Returns:
        The group's generation, and the keys of the partitions that the member owns now.
    """
    known = draft.state.groups.get(group) or GroupState()
    removed = set(dead)
    members = {name: entry for name, entry in known.members.items() if name not in removed}
    if member is not None:
        members[member] = dict(about)
    subscribed = {topic for entry in members.values() for topic in entry["topics"]}
    counts = {
        topic: len(draft.state.topics[topic].partitions)
        for topic in subscribed
        if topic in draft.state.topics
    }
    target = assign_partitions(members, counts, known.target)
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


def leave_group(draft: CommitDraft, group: str, member: str) -> None:
    """Remove a member that closes; its partitions are free at once."""
    known = draft.state.groups.get(group)
    if known is not None and member in known.members:
        coordinate(draft, group, None, {}, [member])


# Offsets


def plain_offsets(positions: Mapping[str, Mapping[int, int]]) -> Offsets:
    """Offsets that the journal can store: users may compute them with numpy's integers."""
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


def check_offsets(state: State, positions: Mapping[str, Mapping[int, int]]) -> None:
    """Refuse to commit offsets of partitions that do not exist or beyond their end. An offset that
    retention has removed since is allowed.
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
    """Refuse to commit offsets of partitions that the member does not own. Without a member, only
    partitions that nobody owns can be committed.
    """
    for topic, offsets in positions.items():
        state.topic(topic)
        for partition in offsets:
            owner = None
            if group in state.groups:
                owner = state.groups[group].owners.get(partition_key(topic, partition))
            if owner != member and (member is not None or owner is not None):
                raise MemberFenced(
                    f"This member no longer owns {topic}[{partition}] in group {group!r}"
                    + (f": {owner!r} does." if owner else "."),
                    fix=(
                        "poll again: rows since the last commit will be delivered to the new owner."
                    ),
                )


def store_offsets(
    draft: CommitDraft, group: str, positions: Mapping[str, Mapping[int, int]]
) -> None:
    """Add the operations that store a group's committed offsets to a draft."""
    for topic, offsets in positions.items():
        stored = {str(partition): offset for partition, offset in offsets.items()}
        draft.do("offsets", group, topic, stored)


# Heartbeats


class Heartbeat:
    """Shows that a member is alive by touching a file, as long as the member polls at all."""

    def __init__(self, path: Path, timeout_us: int) -> None:
        self.path = path
        self.last_poll_s = time.monotonic()
        self._stop = Event()
        self._thread = Thread(
            target=self._beat,
            args=(timeout_us / 3_000_000,),
            daemon=True,
            name=f"heartbeat {path.name}",
        )

    def start(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        self.path.touch()
        self._thread.start()

    def _beat(self, interval_s: float) -> None:
        while not self._stop.wait(interval_s):
            if time.monotonic() - self.last_poll_s < _MAX_POLL_INTERVAL_S:
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
    """Seconds since a member's last heartbeat; infinite if there is none."""
    try:
        return max(0.0, time.time() - heartbeat_path(root, group, member).stat().st_mtime)
    except FileNotFoundError:
        return float("inf")


def dead_members(root: Path, name: str, group: GroupState) -> list[str]:
    """The members whose last heartbeat is older than their session timeout."""
    return [
        member
        for member, about in group.members.items()
        if heartbeat_age_s(root, name, member) > about["timeout_us"] / 1e6
    ]


# The consumer


class FileConsumer(Consumer):
    """A member of a group on the embedded log. It reads its partitions in turn."""

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
        self.log = log
        self.topics = topics
        self.group = check_name(group, what="group")
        self._start = start
        self._max_rows = max_rows
        self._on_lost = on_lost
        self._headers = headers
        timeout_us = to_us(session_timeout, what="session_timeout")
        self.member = f"{socket.gethostname()[:40]}-{os.getpid()}-{os.urandom(4).hex()}"
        self._about = {
            "topics": sorted(topics),
            "timeout_us": timeout_us,
            "host": socket.gethostname(),
        }
        self._check_interval_s = timeout_us / 3e6
        self._heartbeat = Heartbeat(heartbeat_path(log.store.root, group, self.member), timeout_us)
        self._generation = -1
        self._topic_versions: dict[str, tuple[str, int]] = {}
        self._last_check_s = 0.0
        self._positions: dict[str, int] = {}  # partition's key -> next offset
        self._rotation = 0
        self._closed = False

    # Membership

    def join(self) -> None:
        """Become a member of the group. Raises UnknownTopic."""
        for topic in self.topics:
            self.log.topic_state(topic)
        self._heartbeat.start()
        self._coordinate()

    def _coordinate(self) -> None:
        """Take a step in the group, and set the positions of partitions that are new to us."""
        state = self.log.store.view()
        dead = self._other_dead_members(state)

        def decide(draft: CommitDraft) -> tuple[int, set[str], set[str]]:
            group = draft.state.groups.get(self.group)
            owners = group.owners if group else {}
            owned_before = {key for key, name in owners.items() if name == self.member}
            generation, owned = coordinate(draft, self.group, self.member, self._about, dead)
            return generation, owned, owned_before

        self._generation, owned, owned_before = self.log.committer.submit(decide)
        self._last_check_s = time.monotonic()
        versions, versions_before = self._read_topic_versions(state), self._topic_versions
        self._topic_versions = versions

        def is_same_topic(key: str) -> bool:
            topic, _ = parse_partition_key(key)
            return versions.get(topic, ("", 0))[0] == versions_before.get(topic, ("", 0))[0]

        # A position stays valid only if we owned the partition throughout: otherwise another member
        # may have gone on with its rows.
        self._positions = {
            key: offset
            for key, offset in self._positions.items()
            if key in owned and key in owned_before and is_same_topic(key)
        }
        for key in owned - set(self._positions):
            self._positions[key] = self._first_position(key)

    def _other_dead_members(self, state: State) -> list[str]:
        group = state.groups.get(self.group)
        if group is None:
            return []
        dead = dead_members(self.log.store.root, self.group, group)
        return [member for member in dead if member != self.member]

    def _read_topic_versions(self, state: State) -> dict[str, tuple[str, int]]:
        """The directory and the number of partitions of each subscribed topic. A topic that was
        deleted and created again has another directory.
        """
        topics = [state.topics[name] for name in self.topics if name in state.topics]
        return {topic.name: (topic.directory, len(topic.partitions)) for topic in topics}

    def _first_position(self, key: str) -> int:
        """Where to begin in a partition: at the group's committed offset, or as `start` says."""
        topic, number = parse_partition_key(key)
        state = self.log.store.view()
        group = state.groups.get(self.group)
        committed = group.committed.get(topic, {}).get(number) if group else None
        if committed is not None:
            return committed
        partition = state.topic(topic).partitions[number]
        return partition.start if self._start == "earliest" else partition.end

    def _refresh(self) -> State:
        """Take a step in the group if it or its topics changed, or if a member died. Returns the
        state to read from.
        """
        state = self.log.store.view()
        group = state.groups.get(self.group)
        has_changed = (
            group is None
            or group.generation != self._generation
            or self._read_topic_versions(state) != self._topic_versions
        )
        if not has_changed and time.monotonic() - self._last_check_s > self._check_interval_s:
            self._last_check_s = time.monotonic()
            has_changed = bool(self._other_dead_members(state))
        if has_changed:
            self._coordinate()
            state = self.log.store.view()
        return state

    # Reading

    def poll(
        self, timeout: Duration = "1 second", max_rows: int | None = None
    ) -> list[pa.RecordBatch]:
        self._check_open()
        deadline_s = time.monotonic() + to_us(timeout, what="timeout") / 1e6
        sleep_s = _MIN_SLEEP_S
        while True:
            self._heartbeat.last_poll_s = time.monotonic()
            batches = self._read(self._refresh(), max_rows or self._max_rows)
            if batches or time.monotonic() >= deadline_s:
                return batches
            time.sleep(min(sleep_s, max(0.0, deadline_s - time.monotonic())))
            sleep_s = min(2 * sleep_s, _MAX_SLEEP_S)

    def _read(self, state: State, max_rows: int) -> list[pa.RecordBatch]:
        """The next rows of all partitions. Another partition comes first each time."""
        keys = sorted(self._positions)
        self._rotation += 1
        batches: list[pa.RecordBatch] = []
        reached: dict[str, int] = {}
        for index in range(len(keys)):
            if max_rows <= 0:
                break
            key = keys[(index + self._rotation) % len(keys)]
            try:
                new_batches, reached[key] = self._read_partition(state, key, max_rows)
            except HeadraceError:
                # Deliver what was read; the error comes again when this partition is first.
                if batches:
                    break
                raise
            max_rows -= sum(batch.num_rows for batch in new_batches)
            batches += new_batches
        self._positions |= reached  # last: what is not returned was not delivered
        return batches

    def _read_partition(
        self, state: State, key: str, max_rows: int
    ) -> tuple[list[pa.RecordBatch], int]:
        """A partition's next rows, and the offset behind them. Sound rows in front of damaged ones
        are delivered first.
        """
        topic_name, number = parse_partition_key(key)
        topic = state.topics.get(topic_name)
        position = self._positions[key]
        if topic is None:
            return [], position
        start, end = topic.partitions[number].start, topic.partitions[number].end
        if position < start:  # retention has overtaken this member
            if self._on_lost == "raise":
                raise OffsetOutOfRange(topic_name, number, position, start, end)
            position = self._positions[key] = start if self._on_lost == "earliest" else end
        if position >= end:
            return [], position
        try:
            return self._read_range(topic, number, position, min(end, position + max_rows))
        except CorruptBatch as damage:
            if damage.first <= position:
                raise
            return self._read_range(topic, number, position, damage.first)

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
            if size >= _MAX_POLL_BYTES:
                return batches, batch[OFFSET_COLUMN][-1].as_py() + 1
        return batches, stop

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
        offsets = self.positions() if positions is None else plain_offsets(positions)

        def decide(draft: CommitDraft) -> None:
            check_offsets(draft.state, offsets)
            check_owner(draft.state, self.group, offsets, self.member)
            store_offsets(draft, self.group, offsets)

        if any(offsets.values()):
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
            self.log.committer.submit(lambda draft: leave_group(draft, self.group, self.member))
