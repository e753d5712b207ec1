"""The embedded log's consumer groups: who owns which partition, and the members that read.

Membership is decided under the log's lock, as pure functions over the group's state (`coordinate`).
A partition has an owner and a target. It moves between two live members in two steps: the owner
gives it up at its next poll, after its `on_revoked` callback, and the target takes it once it is
free. If the owner had delivered rows that are not committed, it is fenced (`member_fence`).
Whether members are alive is decided in `liveness`.

Messages with leases, instead of partitions with owners, are in `queue`.
"""

from __future__ import annotations

import operator
import os
import socket
import time
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from functools import partial
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
from headrace.log.api import Consumer, RebalanceCallback
from headrace.log.file.commit_draft import CommitDraft
from headrace.log.file.liveness import (
    Heartbeat,
    MemberObserver,
    heartbeat_path,
    remove_heartbeats,
)
from headrace.log.file.reader import FileBatches
from headrace.log.file.state import GroupState, State
from headrace.log.member_fence import FIX_FENCED, MemberFence
from headrace.log.values import TOPIC_METADATA, Duration, Offsets
from headrace.names import check_name

if TYPE_CHECKING:
    from headrace.log.file.handle import LogHandle
    from headrace.log.file.state import TopicState


_MIN_SLEEP_S = 0.001
_MAX_SLEEP_S = 0.01
_ORPHAN_LIFETIME_US = 600 * 1_000_000


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
    """The target owner of each partition.

    Every member gets as many partitions as the others, over all topics together; then each topic is
    spread as evenly as that allows; and few partitions move. Ten topics of one partition over three
    members:

        before   {}                   a: 4 topics   b: 3   c: 3
        then     c leaves             a: 5 topics   b: 5        3 partitions have moved

    The assignment is improved step by step, and each step makes it more even. So an assignment that
    cannot be improved stays as it is, whoever computes it.

    Args:
        members: Member -> its entry, with the `topics` it subscribes to.
        counts: Topic -> number of partitions.
        before: Partition's key -> its target owner so far.
    """
    sharing = _Sharing(members, counts)
    for topic, count in sorted(counts.items()):
        for number in range(count):
            key = partition_key(topic, number)
            if before.get(key) in sharing.subscribers[topic]:
                sharing.give(key, topic, before[key])
    for topic, count in sorted(counts.items()):
        for number in range(count):
            key = partition_key(topic, number)
            if key not in sharing.owners and sharing.subscribers[topic]:
                sharing.give(key, topic, sharing.poorest(topic))
    while sharing.level_totals() or sharing.level_topics():
        pass
    return sharing.owners


class _Sharing:
    """An assignment of partitions to members while it is being computed."""

    def __init__(self, members: Mapping[str, Mapping[str, Any]], counts: Mapping[str, int]) -> None:
        self.subscribers = {
            topic: sorted(name for name, entry in members.items() if topic in entry["topics"])
            for topic in counts
        }
        self.owners: dict[str, str] = {}
        self.totals = dict.fromkeys(sorted(members), 0)
        self._keys: dict[tuple[str, str], list[str]] = {
            (name, topic): [] for topic, names in self.subscribers.items() for name in names
        }

    def give(self, key: str, topic: str, member: str) -> None:
        """Give a partition to a member, and take it from the one that has it."""
        owner = self.owners.get(key)
        if owner is not None:
            self.totals[owner] -= 1
            self._keys[owner, topic].remove(key)
        self.owners[key] = member
        self.totals[member] += 1
        self._keys[member, topic].append(key)

    def _count(self, member: str, topic: str) -> int:
        return len(self._keys.get((member, topic), ()))

    def _give_last(self, topic: str, owner: str, member: str) -> None:
        self.give(self._keys[owner, topic][-1], topic, member)

    def poorest(self, topic: str) -> str:
        """The subscriber of a topic with the fewest partitions."""
        return min(
            self.subscribers[topic],
            key=lambda name: (self.totals[name], self._count(name, topic), name),
        )

    def level_totals(self) -> bool:
        """Move a partition from a member to one that has at least two fewer, if need be through
        others that have topics in common with both. Returns whether there were such members.
        """
        for richest in sorted(self.totals, key=lambda name: (-self.totals[name], name)):
            path = self._path_from(richest)
            if path:
                for owner, member, topic in path:
                    self._give_last(topic, owner, member)
                return True
        return False

    def _path_from(self, richest: str) -> list[tuple[str, str, str]]:
        """The moves (owner, member, topic) that lead from a member to the nearest one with at least
        two partitions fewer; empty if there is none.
        """
        if self.totals[richest] - min(self.totals.values()) < 2:
            return []
        reached: dict[str, list[tuple[str, str, str]]] = {richest: []}
        border = [richest]
        while border:
            steps: list[tuple[str, str]] = []
            for owner in border:
                topics = [topic for topic in self.subscribers if self._count(owner, topic)]
                # The topics of which the owner has most, compared with what it is due, come first.
                topics.sort(key=lambda topic, owner=owner: (self._due(topic, owner), topic))  # type: ignore[misc]
                for topic in topics:
                    others = self.subscribers[topic]
                    for name in sorted(others, key=lambda name: (self.totals[name], name)):
                        if name not in reached:
                            reached[name] = [*reached[owner], (owner, name, topic)]
                            steps.append((owner, name))
            nearest = [name for _, name in steps if self.totals[richest] - self.totals[name] >= 2]
            if nearest:
                return reached[min(nearest, key=lambda name: (self.totals[name], name))]
            border = [name for _, name in steps]
        return []

    def _due(self, topic: str, member: str) -> float:
        """How many partitions of a topic a member lacks; negative if it has more than its share."""
        keys = sum(self._count(name, topic) for name in self.subscribers[topic])
        return keys / len(self.subscribers[topic]) - self._count(member, topic)

    def level_topics(self) -> bool:
        """Make each topic more even, without making the totals less so. Returns whether one was."""
        has_changed = False
        for topic, names in sorted(self.subscribers.items()):
            while names and self._level_topic(topic, names):
                has_changed = True
        return has_changed

    def _level_topic(self, topic: str, names: list[str]) -> bool:
        most = max(names, key=lambda name: (self._count(name, topic), name))
        least = min(names, key=lambda name: (self._count(name, topic), name))
        if self._count(most, topic) - self._count(least, topic) < 2:
            return False
        if self.totals[most] > self.totals[least]:
            self._give_last(topic, most, least)
            return True
        # In exchange, a partition of a topic of which the other one has more.
        exchanged = [
            other
            for other, others in sorted(self.subscribers.items())
            if most in others and self._count(least, other) > self._count(most, other)
        ]
        if not exchanged:
            return False
        back = min(exchanged, key=lambda other: (self._due(other, least), other))
        self._give_last(topic, most, least)
        self._give_last(back, least, most)
        return True


def coordinate(
    draft: CommitDraft,
    group: str,
    member: str | None,
    about: Mapping[str, Any],
    dead: Iterable[str],
    release: Container[str] | None = None,
) -> tuple[int, set[str]]:
    """One step of a member: join the group, remove dead members, give up partitions that are
    another member's by now, and take those that are free.

    Args:
        draft: The commit's draft.
        group: The group.
        member: The member that takes the step; None only removes dead members.
        about: The member's entry: its topics, session timeout and host.
        dead: The members to remove.
        release: The keys of the partitions that the member is ready to give up; None for all.

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
        if name in members
        and key in target
        and (
            name != member or target[key] == member or (release is not None and key not in release)
        )
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


def remove_dead_members(log: LogHandle) -> None:
    """Remove members that died when nobody else of their group was left to notice, and heartbeat
    files that belong to no member.
    """
    with log.store.frozen_view() as state:
        groups = {name: dict(group.members) for name, group in state.groups.items()}
    for group, members in groups.items():
        dead = log.members.dead(group, members)
        if dead:
            log.committer.submit(partial(_remove_members, group=group, dead=dead))
            remove_heartbeats(log.store.root, group, dead)
    for path in (log.store.root / "groups").glob("*~*"):
        group, _, member = path.name.partition("~")
        is_member = member in groups.get(group, {})
        if not is_member and log.members.silent_us(group, member) > _ORPHAN_LIFETIME_US:
            remove_heartbeats(log.store.root, group, [member])


def _remove_members(draft: CommitDraft, group: str, dead: list[str]) -> None:
    if group in draft.state.groups:
        coordinate(draft, group, None, {}, dead)


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
    if not isinstance(positions, Offsets):
        return Offsets(plain)
    return Offsets(plain, member=positions.member, handle=positions.handle, epoch=positions.epoch)


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
                    fix=FIX_FENCED,
                )


def store_offsets(
    draft: CommitDraft, group: str, positions: Mapping[str, Mapping[int, int]]
) -> None:
    """Add the operations that store a group's committed offsets to a draft."""
    for topic, offsets in positions.items():
        stored = {str(partition): offset for partition, offset in offsets.items()}
        draft.do("offsets", group, topic, stored)


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
        max_poll_interval: Duration,
        max_rows: int,
        max_bytes: int,
        on_lost: str,
        on_assigned: RebalanceCallback | None,
        on_revoked: RebalanceCallback | None,
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
        self._max_bytes = max_bytes
        self._on_lost = on_lost
        self._headers = headers
        timeout_us = to_us(session_timeout, what="session_timeout")
        self.member = f"{socket.gethostname()[:30]}-{os.getpid()}-{os.urandom(4).hex()}"
        self._about = {
            "topics": sorted(topics),
            "timeout_us": timeout_us,
            "host": socket.gethostname(),
        }
        self._check_interval_s = timeout_us / 3e6
        self._heartbeat = Heartbeat(
            log.store.disk,
            heartbeat_path(log.store.root, group, self.member),
            timeout_us,
            to_us(max_poll_interval, what="max_poll_interval"),
        )
        self._observer = MemberObserver(log.store.root)
        self._generation = -1
        self._topic_versions: dict[str, tuple[str, int]] = {}
        self._last_check_s = 0.0
        self._positions: dict[str, int] = {}  # partition's key -> next offset
        self._fence = MemberFence(group)
        self._rotation = 0
        self._callbacks = {"on_assigned": on_assigned, "on_revoked": on_revoked}
        self._announcements: list[tuple[str, set[str]]] = []
        self._is_in_callback = False
        self._closed = False

    # Membership

    def join(self) -> None:
        """Become a member of the group. Raises UnknownTopic."""
        for topic in self.topics:
            self.log.topic_state(topic)
        self._heartbeat.start()
        try:
            self._coordinate()
        except BaseException:
            with suppress(HeadraceError):
                self.close(revoke=False)
            raise

    def _coordinate(self) -> None:
        """Take a step in the group:

        1. announce the partitions that are to move, so that what was read of them can be committed
        2. in one commit: give them up, remove dead members and take what is free
        3. fence this member if it lost partitions with rows that are not committed
        4. begin the partitions that are new to us, and announce what was lost and what is new
        """
        state = self.log.store.view()
        dead = self._other_dead_members(state)
        release = self._partitions_to_release(state)
        self._announce("on_revoked", release)  # 1

        def decide(draft: CommitDraft) -> tuple[int, set[str], set[str], dict[str, int]]:
            group = draft.state.groups.get(self.group) or GroupState()
            owned_before = {key for key, name in group.owners.items() if name == self.member}
            committed = {
                key: group.committed.get(topic, {}).get(number, -1)
                for key in owned_before
                for topic, number in [parse_partition_key(key)]
            }
            generation, owned = coordinate(
                draft, self.group, self.member, self._about, dead, release
            )
            return generation, owned, owned_before, committed

        self._heartbeat.write()  # others may have removed the file of a member that was silent
        self._generation, owned, owned_before, committed = self.log.committer.submit(decide)  # 2
        # Unless one has come back meanwhile.
        remove_heartbeats(self.log.store.root, self.group, self._observer.dead(self.group, dead))
        self._last_check_s = time.monotonic()
        versions, versions_before = self._read_topic_versions(state), self._topic_versions
        self._topic_versions = versions

        def is_same_topic(key: str) -> bool:
            topic, _ = parse_partition_key(key)
            return versions.get(topic, ("", 0))[0] == versions_before.get(topic, ("", 0))[0]

        # A position stays valid only if we owned the partition throughout: otherwise another member
        # may have gone on with its rows.
        kept = {
            key: offset
            for key, offset in self._positions.items()
            if key in owned and key in owned_before and is_same_topic(key)
        }
        gone = set(self._positions) - set(kept)
        for key in owned_before & set(self._positions):
            # Another process may have committed on our behalf; nobody else could.
            if committed[key] == self._positions[key]:
                self._fence.commit(_by_topic({key: committed[key]}))
        self._fence.forget(parse_partition_key(key) for key in gone if not is_same_topic(key))
        self._fence.lose(parse_partition_key(key) for key in gone)  # 3
        self._positions = kept
        new = owned - set(kept)
        for key in new:  # 4
            self._positions[key] = self._first_position(key)
            self._fence.assign(parse_partition_key(key), self._positions[key])
        self._announcements += [("on_revoked", gone - release), ("on_assigned", new)]
        self._make_announcements()

    def _partitions_to_release(self, state: State) -> set[str]:
        """The partitions that we own and another member is to have."""
        group = state.groups.get(self.group) or GroupState()
        return {
            key
            for key in self._positions
            if group.owners.get(key) == self.member
            and group.target.get(key, self.member) != self.member
        }

    def _make_announcements(self) -> None:
        """Call the callbacks that are due. If one fails, the others follow at the next poll."""
        while self._announcements:
            self._announce(*self._announcements.pop(0))

    def _announce(self, callback_name: str, keys: set[str]) -> None:
        callback = self._callbacks[callback_name]
        if callback is None or not keys or self._is_in_callback:
            return
        self._is_in_callback = True
        try:
            callback(
                self,
                {
                    topic: tuple(offsets)
                    for topic, offsets in _by_topic(dict.fromkeys(keys, 0)).items()
                },
            )
        finally:
            self._is_in_callback = False

    def _other_dead_members(self, state: State) -> dict[str, dict[str, Any]]:
        """The dead members with their entries."""
        members = (state.groups.get(self.group) or GroupState()).members
        others = {name: about for name, about in members.items() if name != self.member}
        return {name: others[name] for name in self._observer.dead(self.group, others)}

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
        self._make_announcements()
        state = self.log.store.view()
        group = state.groups.get(self.group)
        has_changed = (
            group is None
            or group.generation != self._generation
            or self._read_topic_versions(state) != self._topic_versions
            or bool(self._partitions_to_release(state))
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
        if self._is_in_callback:
            raise InputError(
                "A consumer cannot poll in its own callback.",
                fix="commit or seek there, and poll when the callback has returned.",
            )
        for (topic, number), offset in self._fence.rewind().items():
            if partition_key(topic, number) in self._positions:
                self._positions[partition_key(topic, number)] = offset
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
        delivered: set[str] = set()
        max_bytes = self._max_bytes
        for index in range(len(keys)):
            if max_rows <= 0 or max_bytes <= 0:
                break
            key = keys[(index + self._rotation) % len(keys)]
            try:
                new_batches, reached[key] = self._read_partition(state, key, max_rows, max_bytes)
            except HeadraceError:
                # Deliver what was read; the error comes again when this partition is first.
                if batches:
                    break
                raise
            max_rows -= sum(batch.num_rows for batch in new_batches)
            max_bytes -= sum(batch.nbytes for batch in new_batches)
            batches += new_batches
            if new_batches:
                delivered.add(key)
        self._positions |= reached  # last: what is not returned was not delivered
        for key in delivered:
            self._fence.deliver(parse_partition_key(key), reached[key])
        return batches

    def _read_partition(
        self, state: State, key: str, max_rows: int, max_bytes: int
    ) -> tuple[list[pa.RecordBatch], int]:
        """A partition's next rows, and the offset behind them. Sound rows in front of damaged ones
        are delivered first. The last batch may go beyond `max_bytes`.
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
            return self._read_range(
                topic, number, position, min(end, position + max_rows), max_bytes
            )
        except CorruptBatch as damage:
            if damage.first <= position:
                raise
            return self._read_range(topic, number, position, damage.first, max_bytes)

    def _read_range(
        self, topic: TopicState, number: int, start: int, stop: int, max_bytes: int
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
            if size >= max_bytes:
                return batches, batch[OFFSET_COLUMN][-1].as_py() + 1
        return batches, stop

    def _check_open(self) -> None:
        if self._closed:
            raise InputError(
                "This consumer was closed.", fix="open another one with log.consumer(...)."
            )

    # Positions

    def positions(self) -> Offsets:
        self._fence.check()
        return self._owned_positions()

    def _owned_positions(self) -> Offsets:
        return Offsets(
            _by_topic(self._positions), member=self.member, handle=self, epoch=self._fence.epoch
        )

    def check_positions(self, positions: Mapping[str, Mapping[int, int]]) -> None:
        """Raise MemberFenced if this member cannot commit these positions of its own any more."""
        self._fence.check(positions)

    def settle_positions(self, positions: Mapping[str, Mapping[int, int]]) -> None:
        """A transaction has committed positions of this member."""
        self._fence.commit(positions)

    def refuse_positions(self) -> None:
        """A transaction could not commit positions of this member: MemberFenced was raised."""
        self._fence.report()

    def commit(self, positions: Mapping[str, Mapping[int, int]] | None = None) -> None:
        self._check_open()
        offsets = self._owned_positions() if positions is None else plain_offsets(positions)
        self._fence.check(offsets)

        def decide(draft: CommitDraft) -> None:
            check_offsets(draft.state, offsets)
            check_owner(draft.state, self.group, offsets, self.member)
            store_offsets(draft, self.group, offsets)

        if any(offsets.values()):
            try:
                self.log.committer.submit(decide)
            except MemberFenced:
                self._fence.report()
                raise
            self._fence.commit(offsets)

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
        self._fence.seek((topic, partition), offset)

    def assignment(self) -> Mapping[str, tuple[int, ...]]:
        return {topic: tuple(offsets) for topic, offsets in _by_topic(self._positions).items()}

    def close(self, *, revoke: bool = True) -> None:
        if self._closed:
            return
        try:
            if revoke:
                self._announce("on_revoked", set(self._positions))
        finally:
            self._closed = True
            self._heartbeat.stop()
            self.log.committer.submit(lambda draft: leave_group(draft, self.group, self.member))


def _by_topic(positions: Mapping[str, int]) -> dict[str, dict[int, int]]:
    """Positions by partition's key as topic -> partition -> offset, in order."""
    offsets: dict[str, dict[int, int]] = {}
    for (topic, number), offset in sorted(
        (parse_partition_key(key), offset) for key, offset in positions.items()
    ):
        offsets.setdefault(topic, {})[number] = offset
    return offsets
