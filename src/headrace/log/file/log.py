"""The embedded log: `headrace.log.api.Log` over a directory.

`FileLog` is a `LogHandle` with the public interface on top. Producers, transactions, consumers and
queues are in modules of their own; topics, reads, groups and lag are here. Everything that changes
the log is a request to the `Committer`, decided against the newest state under the log's lock.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from headrace.durations import to_time_us
from headrace.errors import InputError, MemberFenced, NotSupported, UnknownGroup, UnknownTopic
from headrace.log.api import (
    Batches,
    Consumer,
    Log,
    Producer,
    Queue,
    RebalanceCallback,
    Transaction,
)
from headrace.log.dead_letters import ensure_dead_topic
from headrace.log.file import recovery, staging
from headrace.log.file.backup import back_up
from headrace.log.file.commit_draft import CommitDraft, PreparedRows, StaleTopic
from headrace.log.file.compaction import whole_from
from headrace.log.file.consumer import (
    FileConsumer,
    coordinate,
    parse_partition_key,
)
from headrace.log.file.disk import PRIVATE, Disk
from headrace.log.file.handle import STAGING_LIFETIME_US, LogHandle
from headrace.log.file.liveness import remove_heartbeats
from headrace.log.file.maintenance import (
    MaintenanceThread,
    create_checkpoint,
    run_maintenance,
    trim_topic,
    verify_log,
)
from headrace.log.file.producer import FileProducer, prepare, prepare_control, rows_to_batch
from headrace.log.file.queue import FileQueue
from headrace.log.file.reader import FileBatches
from headrace.log.file.segment import control_frame, list_segments
from headrace.log.file.state import State, TopicState
from headrace.log.file.store import Store
from headrace.log.file.transaction import FileTransaction
from headrace.log.partitioning import PartitionAssigner, check_partition
from headrace.log.topic_config import (
    altered_topic,
    check_existing_topic,
    declared_topic,
    resolve_reset,
    shifted_offsets,
    trim_offsets,
)
from headrace.log.values import (
    AppendResult,
    BackupResult,
    ControlRecord,
    Duration,
    Finding,
    GroupInfo,
    MemberInfo,
    Offsets,
    Partitioner,
    PartitionLag,
    Staged,
    TopicInfo,
    TopicStats,
)
from headrace.names import check_name
from headrace.types.schema_history import ColumnChange

# A checkpoint is made at close if the next one to open the log would read more journal than this.
_CHECKPOINT_AT_CLOSE_RECORDS = 200
_CHECKPOINT_AT_CLOSE_BYTES = 4 << 20


class FileLog(LogHandle, Log):
    """The embedded log in a directory."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.address = f"file:{store.root}"  # absolute, so that other processes can use it
        self.maintenance_thread = MaintenanceThread(self)
        self.committer.after_commit = self.maintenance_thread.on_commit
        self._closed = False

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        create: bool = True,
        durability: str = "disk",
        mode: int = PRIVATE,
        accept_torn_copy: bool = False,
        disk: Disk | None = None,
    ) -> FileLog:
        """Open the log in a directory.

        Args:
            path: The directory.
            create: Create a new log if there is none.
            durability: "disk" (an acknowledged append survives power loss) or "os" (it survives the
                process, not the machine).
            mode: The permissions of the files of a new log: by default its owner's alone; 0o660
                shares it with the directory's group.
            accept_torn_copy: Open a directory that was copied while it was being written, without
                what is missing in it.
            disk: The file layer; tests inject faults with it.
        """
        if durability not in {"disk", "os"}:
            raise InputError(
                f"durability is {durability!r}.", fix="use 'disk' (the default) or 'os'."
            )
        return cls(
            Store.open(
                Path(path).expanduser().absolute(),
                recovery,
                disk=disk or Disk(),
                create=create,
                durability=durability,
                mode=mode,
                accepts_torn_copy=accept_torn_copy,
            )
        )

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
        return self._create(
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
        return self._create(
            declared_topic(
                name, schema, key, partitions=partitions, is_table=True, options=options
            ),
            exist_ok=exist_ok,
        )

    def _create(self, info: TopicInfo, *, exist_ok: bool) -> TopicInfo:
        def decide(draft: CommitDraft) -> TopicInfo:
            existing = draft.state.topics.get(info.name)
            if existing is not None:
                return check_existing_topic(existing.info, info, exist_ok=exist_ok)
            draft.do("topic", info.name, _settings(info))
            return draft.state.topics[info.name].info

        return self.committer.submit(decide)

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
        change = ColumnChange.of(
            add=add_columns, alter=alter_columns, drop=drop_columns, rename=rename_columns
        )

        def altered_info(info: TopicInfo) -> TopicInfo:
            return altered_topic(
                info,
                change=change,
                partitions=partitions,
                allow_moving_keys=allow_moving_keys,
                settings=settings,
            )

        def decide(draft: CommitDraft) -> TopicInfo:
            topic = draft.state.topic(name)
            altered = altered_info(topic.info)
            if altered.schema != topic.info.schema:  # a segment has one schema
                for number in range(len(topic.partitions)):
                    draft.roll(topic, number)
            draft.do("evolve" if altered.schema_history else "topic", name, _settings(altered))
            return draft.state.topics[name].info

        return altered_info(self.topic(name)) if dry_run else self.committer.submit(decide)

    def delete_topic(self, name: str) -> None:
        def decide(draft: CommitDraft) -> None:
            draft.state.topic(name)
            draft.do("drop", name)

        self.committer.submit(decide)

    def trim_topic(
        self,
        name: str,
        before: str | int | datetime,
        *,
        partitions: Sequence[int] | None = None,
    ) -> dict[int, int]:
        return trim_topic(self, name, trim_offsets(self, name, before, partitions))

    def topics(self) -> list[str]:
        return sorted(self.store.view().topics)

    def topic(self, name: str) -> TopicInfo:
        return self.topic_state(name).info

    # Writing

    def producer(
        self, topic: str, id: str | None = None, *, partitioner: Partitioner | None = None
    ) -> Producer:
        return FileProducer.open(self, topic, id, partitioner)

    def transaction(self, id: str, *, timeout: Duration = "1 minute") -> Transaction:
        return FileTransaction.begin(self, id, timeout)

    def append_control(self, topic: str, partition: int, payload: bytes) -> AppendResult:
        while True:
            state = self.topic_state(topic)
            check_partition(state.info, partition)
            rows = prepare_control(state, partition, control_frame(payload))
            try:
                return self.committer.submit(partial(_append, rows=rows), size=rows.size)
            except StaleTopic:
                continue

    def stage(
        self,
        topic: str,
        batches: Iterable[pa.RecordBatch],
        *,
        partition: int | None = None,
        directory: str | None = None,  # noqa: ARG002 - staged rows are in the log's own directory
        group: str | None = None,
    ) -> Staged:
        state = self.topic_state(topic)
        deadline_us = self.store.clock.now_us() + STAGING_LIFETIME_US
        writer = staging.StagingWriter(self.store, state, staging.staging_name(deadline_us, group))
        assigner = PartitionAssigner()
        try:
            for rows in batches:
                batch = rows_to_batch(rows, state, None)
                writer.write(prepare(state, batch, assigner.assign(state.info, batch, partition)))
            return writer.finish()
        except BaseException:
            writer.abandon()
            raise

    def discard_group(
        self,
        group: str,
        *,
        directory: str | None = None,  # noqa: ARG002 - staged rows are in the log's own directory
    ) -> None:
        with self.store.locked():  # taking the lock completes adoptions that were committed
            staging.discard_group(self.store, group)

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
        with self.store.frozen_view() as state:  # all partitions as of one commit
            topic_state = state.topic(topic)
            numbers = range(len(topic_state.partitions)) if partition is None else [partition]
            readers = [self.partition_reader(topic_state, number) for number in numbers]
        ranges = []
        for reader in readers:
            first = reader.state.start if start is None else start
            if partition is not None or start is not None:
                reader.check_start(first)
            end = reader.state.end if stop is None else min(stop, reader.state.end)
            ranges.append((reader, first, end))
        return FileBatches(
            topic_state.info, ranges, columns=columns, headers=headers, on_corrupt=on_corrupt
        )

    def read_control(
        self, topic: str, partition: int, start: int | None = None, stop: int | None = None
    ) -> list[ControlRecord]:
        reader = self.partition_reader(self.topic_state(topic), partition)
        first = reader.state.start if start is None else start
        end = reader.state.end if stop is None else min(stop, reader.state.end)
        return list(reader.controls(first, end))

    def start_offsets(self, topic: str) -> dict[int, int]:
        partitions = self.topic_state(topic).partitions
        return {number: partition.start for number, partition in enumerate(partitions)}

    def whole_from(self, topic: str) -> dict[int, int]:
        state = self.topic_state(topic)
        return {number: whole_from(self, state, number) for number in range(len(state.partitions))}

    def end_offsets(self, topic: str) -> dict[int, int]:
        partitions = self.topic_state(topic).partitions
        return {number: partition.end for number, partition in enumerate(partitions)}

    def snapshot(self, topics: Iterable[str]) -> Offsets:
        with self.store.frozen_view() as state:
            ends = {
                name: {number: part.end for number, part in enumerate(state.topic(name).partitions)}
                for name in topics
            }
        return Offsets(ends)

    def offsets_at(self, topic: str, time: datetime | str | float) -> dict[int, int]:
        state, time_us = self.topic_state(topic), to_time_us(time)
        return {
            number: self.partition_reader(state, number).first_since(time_us)
            for number in range(len(state.partitions))
        }

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
        self.store.lock_file()  # refuses a read-only log: it cannot store offsets
        consumer = FileConsumer(
            self,
            (topics,) if isinstance(topics, str) else tuple(topics),
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
        return FileQueue(
            self, topic, group, delivery_limit, dead_topic=partial(ensure_dead_topic, self, topic)
        )

    def groups(self) -> list[str]:
        with self.store.frozen_view() as state:
            return _group_names(state)

    def group(self, name: str) -> GroupInfo:
        with self.store.frozen_view() as state:
            if name not in _group_names(state):
                raise UnknownGroup(name, _group_names(state))
            group = state.groups.get(name)
            if group is None:
                return GroupInfo(
                    name=name,
                    kind="queue",
                    generation=0,
                    members=(),
                    committed={  # the oldest message of each partition that is not done
                        key.split("\0")[1]: {
                            number: part.floor for number, part in queue.partitions.items()
                        }
                        for key, queue in state.queues.items()
                        if key.split("\0")[0] == name
                    },
                )
            owned: dict[str, list[tuple[str, int]]] = {member: [] for member in group.members}
            for key, member in sorted(group.owners.items()):
                owned[member].append(parse_partition_key(key))
            members = tuple(
                MemberInfo(
                    member=member,
                    partitions=tuple(owned[member]),
                    host=about["host"],
                    seconds_since_heartbeat=self.members.heartbeat_age_s(name, member),
                )
                for member, about in group.members.items()
            )
            return GroupInfo(
                name=name,
                kind="group",
                generation=group.generation,
                members=members,
                committed={topic: dict(offsets) for topic, offsets in group.committed.items()},
            )

    def committed(self, group: str) -> Offsets:
        return Offsets(self.group(group).committed)

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
        to = resolve_reset(to, shift)
        topic_state = self.topic_state(topic)
        numbers = range(len(topic_state.partitions)) if partitions is None else partitions
        for number in numbers:
            self.partition_reader(topic_state, number)  # checks the number
        if to is None:
            assert shift is not None
            committed = dict(self.group(group).committed.get(topic, {}))
            wanted = shifted_offsets(
                group,
                topic,
                {number: committed.get(number) for number in numbers},
                shift,
                {
                    number: (partition.start, partition.end)
                    for number, partition in enumerate(topic_state.partitions)
                },
            )
        else:
            targets = self._reset_targets(topic_state, to)
            wanted = {number: targets[number] for number in numbers}
        if dry_run:
            return Offsets({topic: wanted})
        dead = self._dead_members(group)

        def decide(draft: CommitDraft) -> None:
            # Dead members leave the group, so that they cannot commit later.
            coordinate(draft, group, None, {}, self._check_all_dead(draft.state, group, dead))
            if f"{group}\0{topic}" in draft.state.queues:
                for number, offset in wanted.items():
                    draft.do("queue", group, topic, "reset", number, offset)
            else:
                offsets = {str(number): offset for number, offset in wanted.items()}
                draft.do("offsets", group, topic, offsets)

        self.committer.submit(decide)
        remove_heartbeats(self.store.root, group, dead)
        return Offsets({topic: wanted})

    def delete_group(self, name: str) -> None:
        dead = self._dead_members(name)

        def decide(draft: CommitDraft) -> None:
            if name not in _group_names(draft.state):
                raise UnknownGroup(name, _group_names(draft.state))
            self._check_all_dead(draft.state, name, dead)
            draft.do("forget_group", name)

        self.committer.submit(decide)
        remove_heartbeats(self.store.root, name, dead)

    def _dead_members(self, group: str) -> list[str]:
        """The dead members of a group; may wait until it is certain that they are."""
        known = self.store.view().groups.get(group)
        return [] if known is None else self.members.await_dead(group, dict(known.members))

    @staticmethod
    def _check_all_dead(state: State, group: str, dead: Sequence[str]) -> list[str]:
        """The members of a group. MemberFenced if one of them is not among the dead."""
        known = state.groups.get(group)
        members = [] if known is None else sorted(known.members)
        alive = [member for member in members if member not in dead]
        if alive:
            raise MemberFenced(
                f"The group {group!r} is being read by {len(alive)} member(s): {', '.join(alive)}.",
                fix="stop them, then try again.",
            )
        return members

    def _reset_targets(self, topic: TopicState, to: str | int | datetime) -> dict[int, int]:
        """The offset that a reset leads to in each partition, within what the partition has."""
        if to == "earliest":
            return {number: partition.start for number, partition in enumerate(topic.partitions)}
        if to == "latest":
            return {number: partition.end for number, partition in enumerate(topic.partitions)}
        if isinstance(to, int) and not isinstance(to, bool):
            return {
                number: min(max(to, partition.start), partition.end)
                for number, partition in enumerate(topic.partitions)
            }
        return self.offsets_at(topic.name, to)

    def lag(self, group: str | None = None) -> list[PartitionLag]:
        with self.store.frozen_view() as state:
            if group is not None and group not in _group_names(state):
                raise UnknownGroup(group, _group_names(state))
            progress = list(_group_progress(state, group))
        now = time.time()
        append_times: dict[tuple[str, int, int], float] = {}  # shared by groups at one offset
        lags = []
        for name, topic, number, committed, rows in progress:
            partition = topic.partitions[number]
            seconds = 0.0
            if rows:
                offset = partition.start if committed is None else max(committed, partition.start)
                location = (topic.name, number, offset)
                if location not in append_times:
                    time_us = self.partition_reader(topic, number).time_of(offset)
                    append_times[location] = now if time_us is None else time_us / 1e6
                seconds = max(0.0, now - append_times[location])
            lags.append(
                PartitionLag(
                    group=name,
                    topic=topic.name,
                    partition=number,
                    committed=committed,
                    end=partition.end,
                    rows=rows,
                    seconds=seconds,
                )
            )
        return lags

    def note(self, name: str) -> str | None:
        return self.store.view().notes.get(name)

    def notes(self, prefix: str) -> dict[str, str]:
        notes = dict(self.store.view().notes)  # other threads may add some
        return {name: text for name, text in notes.items() if name.startswith(prefix)}

    # Maintenance

    def verify(self, topic: str | None = None) -> list[Finding]:
        return verify_log(self, topic)

    def stats(self, topic: str | None = None, *, count_rows: bool = True) -> list[TopicStats]:
        state = self.store.view()
        names = [topic] if topic is not None else sorted(state.topics)
        stats = []
        for name in names:
            partitions = state.topic(name).partitions
            size = segments = 0
            for number, partition in enumerate(partitions):
                directory = self.store.partition_directory(state.topic(name).directory, number)
                for segment in list_segments(
                    directory, partition.segment, begun=partition.position > 0
                ):
                    segments += 1
                    size += (directory / segment.name).stat().st_size
            starts = {number: partition.start for number, partition in enumerate(partitions)}
            ends = {number: partition.end for number, partition in enumerate(partitions)}
            stats.append(
                TopicStats(
                    name=name,
                    partitions=len(partitions),
                    rows=sum(
                        self.partition_reader(state.topic(name), number).count_rows()
                        if count_rows
                        else ends[number] - starts[number]
                        for number in starts
                    ),
                    bytes=size,
                    segments=segments,
                    earliest=starts,
                    end=ends,
                )
            )
        return stats

    def backup(self, directory: str | Path) -> BackupResult:
        return back_up(self, Path(directory).expanduser().absolute())

    def maintain(self, topic: str | None = None) -> dict[str, Any]:
        if topic is not None and topic not in self.topics():
            raise UnknownTopic(topic, self.topics())
        # The checkpoint comes first, so that every sealed segment may be compacted.
        return dict(run_maintenance(self, topic, with_checkpoint=True))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.maintenance_thread.stop()
        if (
            self.committer.records_since_checkpoint > _CHECKPOINT_AT_CLOSE_RECORDS
            or self.committer.bytes_since_checkpoint > _CHECKPOINT_AT_CLOSE_BYTES
        ):
            create_checkpoint(self, wait=False)
        self.cache.close()
        self.store.close()


def _group_names(state: State) -> list[str]:
    return sorted({*state.groups, *(key.split("\0")[0] for key in state.queues)})


def _group_progress(
    state: State, only: str | None
) -> Iterator[tuple[str, TopicState, int, int | None, int]]:
    """(group, topic, partition, committed offset, rows behind) of one group or, for None, of all.

    Includes partitions of subscribed topics in which a group has not committed yet.
    """
    for name, group in sorted(state.groups.items()):
        if only not in {None, name}:
            continue
        subscribed = {topic for about in group.members.values() for topic in about["topics"]}
        for topic_name in sorted((subscribed | set(group.committed)) & set(state.topics)):
            topic = state.topics[topic_name]
            committed = group.committed.get(topic_name, {})
            for number, partition in enumerate(topic.partitions):
                offset = committed.get(number)
                position = partition.start if offset is None else max(offset, partition.start)
                yield name, topic, number, offset, partition.end - position
    for key, queue in sorted(state.queues.items()):
        name, topic_name = key.split("\0")
        if only not in {None, name}:
            continue
        topic = state.topics[topic_name]
        for number, partition in enumerate(topic.partitions):
            part = queue.partitions.get(number)
            if part is None:
                yield name, topic, number, None, partition.end - partition.start
            else:
                yield name, topic, number, part.floor, part.waiting(partition.end)


def _append(draft: CommitDraft, rows: PreparedRows) -> AppendResult:
    draft.check_fresh(rows)
    draft.append(rows)
    return draft.result()


def _settings(info: TopicInfo) -> dict[str, Any]:
    """A topic's settings as the journal stores them."""
    if info.format != "json":
        raise NotSupported(
            f"The topic {info.name!r} has the format {info.format!r}: a registry is for topics on"
            " Kafka, and the embedded log stores columns.",
            fix="leave out format and registry.",
        )
    names = (
        "partitions",
        "is_table",
        "retention_us",
        "retention_bytes",
        "compact",
        "history_us",
        "tombstone_us",
        "segment_bytes",
        "segment_us",
        "compression",
    )
    history = {"schema_history": info.schema_history.dump()} if info.schema_history else {}
    return {
        "ddl": info.schema,
        "key": list(info.key),
        **{name: getattr(info, name) for name in names},
        **history,
    }
