"""The embedded log: the API of `headrace.log.api` over a directory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from headrace.durations import to_time_us
from headrace.errors import InputError, MemberFenced, UnknownGroup, UnknownTopic
from headrace.log.api import Batches, Consumer, Log, Producer, Queue, Transaction
from headrace.log.dead_letters import ensure_topic
from headrace.log.file import recovery, staging
from headrace.log.file.commit_draft import Draft, PreparedRows, StaleTopic
from headrace.log.file.compaction import whole_from
from headrace.log.file.consumer import (
    FileConsumer,
    coordinate,
    dead_members,
    heartbeat_age_s,
    parse_partition_key,
)
from headrace.log.file.disk import Disk
from headrace.log.file.handle import LogHandle
from headrace.log.file.maintenance import Housekeeper, keep_house, make_checkpoint, verify_log
from headrace.log.file.producer import FileProducer, prepare, prepare_control, rows_to_batch
from headrace.log.file.queue import FileQueue
from headrace.log.file.reader import FileBatches
from headrace.log.file.segment import control_frame, segments_in
from headrace.log.file.state import State, TopicState
from headrace.log.file.store import Store, now_us
from headrace.log.file.transaction import FileTransaction
from headrace.log.partitioning import Chooser, check_partition
from headrace.log.topic_config import altered, check_name, check_same, declared, place_word
from headrace.log.values import (
    AppendResult,
    Control,
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

_STAGED_FOR_US = 24 * 3600 * 1_000_000
_CHECKPOINT_AT_CLOSE_RECORDS, _CHECKPOINT_AT_CLOSE_BYTES = 200, 4 << 20


class FileLog(LogHandle, Log):
    """`durability` is "disk" (an acknowledged append survives power loss) or "os" (it survives the
    process, not the machine).
    """

    def __init__(
        self,
        path: str | Path,
        *,
        create: bool = True,
        durability: str = "disk",
        disk: Disk | None = None,
    ) -> None:
        if durability not in {"disk", "os"}:
            raise InputError(
                f"durability is {durability!r}.", fix="use 'disk' (the default) or 'os'."
            )
        root = Path(path).expanduser().absolute()
        self.address = f"file:{root}"  # good in other processes too, wherever they are
        super().__init__(
            Store(root, recovery, disk=disk or Disk(), create=create, durability=durability),
            after_commit=self._after_commit,
        )
        self.housekeeper = Housekeeper(self)
        self._closed = False

    def _after_commit(self) -> None:
        self.housekeeper.note_commit()

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
            declared(name, schema, key, partitions=partitions, is_table=False, options=options),
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
            declared(name, schema, key, partitions=partitions, is_table=True, options=options),
            exist_ok=exist_ok,
        )

    def _create(self, info: TopicInfo, *, exist_ok: bool) -> TopicInfo:
        def decide(draft: Draft) -> TopicInfo:
            known = draft.state.topics.get(info.name)
            if known is not None:
                return check_same(known.info, info, exist_ok=exist_ok)
            draft.do("topic", info.name, _settings(info))
            return draft.state.topics[info.name].info

        return self.committer.submit(decide)

    def alter_topic(
        self,
        name: str,
        *,
        add_columns: str | None = None,
        partitions: int | None = None,
        allow_moving_keys: bool = False,
        **settings: Any,
    ) -> TopicInfo:
        def decide(draft: Draft) -> TopicInfo:
            topic = draft.state.topic(name)
            changed = altered(
                topic.info,
                columns=add_columns,
                partitions=partitions,
                allow_moving_keys=allow_moving_keys,
                settings=settings,
            )
            if changed.schema != topic.info.schema:  # a segment has one schema
                for number in range(len(topic.partitions)):
                    draft.roll(topic, number)
            draft.do("topic", name, _settings(changed))
            return draft.state.topics[name].info

        return self.committer.submit(decide)

    def delete_topic(self, name: str) -> None:
        def decide(draft: Draft) -> None:
            draft.state.topic(name)
            draft.do("drop", name)

        self.committer.submit(decide)

    def topics(self) -> list[str]:
        return sorted(self.store.view().topics)

    def topic(self, name: str) -> TopicInfo:
        return self.topic_state(name).info

    # Writing

    def producer(
        self, topic: str, id: str | None = None, *, partitioner: Partitioner | None = None
    ) -> Producer:
        return FileProducer(self, topic, id, partitioner)

    def transaction(self, id: str, *, timeout: Duration = "1 minute") -> Transaction:
        return FileTransaction(self, id, timeout)

    def append_control(self, topic: str, partition: int, payload: bytes) -> AppendResult:
        while True:
            known = self.topic_state(topic)
            check_partition(known.info, partition)
            rows = prepare_control(known, partition, control_frame(payload))
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
        directory: str | None = None,  # noqa: ARG002
        group: str | None = None,
    ) -> Staged:
        """The rows are put aside in the log's own directory, from which they can be moved to their
        places.
        """
        known = self.topic_state(topic)
        writer = staging.StagingWriter(
            self.store, known, staging.staging_name(now_us() + _STAGED_FOR_US, group)
        )
        chooser = Chooser()
        try:
            for rows in batches:
                batch = rows_to_batch(rows, known, None)
                writer.write(
                    prepare(known, batch, chooser.partitions(known.info, batch, partition))
                )
            return writer.finish()
        except BaseException:
            writer.abandon()
            raise

    def discard_group(self, group: str, *, directory: str | None = None) -> None:  # noqa: ARG002 - staged rows are in the log's own directory
        with (
            self.store.locked()
        ):  # whoever takes the lock first completes adoptions that were committed
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
        with self.store.still_view() as state:  # all partitions as of one commit
            known = state.topic(topic)
            readers = [
                self.partition_reader(known, number)
                for number in (range(len(known.partitions)) if partition is None else [partition])
            ]
        ranges = []
        for reader in readers:
            first = reader.state.start if start is None else start
            if partition is not None or start is not None:
                reader.check_start(first)
            ranges.append(
                (reader, first, reader.state.end if stop is None else min(stop, reader.state.end))
            )
        return FileBatches(
            known.info, ranges, columns=columns, headers=headers, on_corrupt=on_corrupt
        )

    def read_control(
        self, topic: str, partition: int, start: int | None = None, stop: int | None = None
    ) -> list[Control]:
        reader = self.partition_reader(self.topic_state(topic), partition)
        first = reader.state.start if start is None else start
        return list(
            reader.controls(
                first, reader.state.end if stop is None else min(stop, reader.state.end)
            )
        )

    def start_offsets(self, topic: str) -> dict[int, int]:
        return {
            number: partition.start
            for number, partition in enumerate(self.topic_state(topic).partitions)
        }

    def whole_from(self, topic: str) -> dict[int, int]:
        known = self.topic_state(topic)
        return {number: whole_from(self, known, number) for number in range(len(known.partitions))}

    def end_offsets(self, topic: str) -> dict[int, int]:
        return {
            number: partition.end
            for number, partition in enumerate(self.topic_state(topic).partitions)
        }

    def snapshot(self, topics: Iterable[str]) -> Offsets:
        with self.store.still_view() as state:
            return Offsets(
                {
                    name: {n: p.end for n, p in enumerate(state.topic(name).partitions)}
                    for name in topics
                }
            )

    def offsets_at(self, topic: str, time: datetime | str | float) -> dict[int, int]:
        known, time_us = self.topic_state(topic), to_time_us(time)
        return {
            number: self.partition_reader(known, number).first_since(time_us)
            for number in range(len(known.partitions))
        }

    # Groups, queues, notes

    def consumer(
        self,
        topics: str | Sequence[str],
        group: str,
        *,
        start: str = "earliest",
        session_timeout: Duration = "10 seconds",
        max_rows: int = 100_000,
        on_lost: str = "raise",
        headers: bool = False,
    ) -> Consumer:
        self.store.lock_file()  # a log that cannot be written cannot keep offsets
        names = (topics,) if isinstance(topics, str) else tuple(topics)
        return FileConsumer(
            self,
            names,
            group,
            start=start,
            session_timeout=session_timeout,
            max_rows=max_rows,
            on_lost=on_lost,
            headers=headers,
        )

    def queue(self, topic: str, group: str, *, delivery_limit: int = 5) -> Queue:
        return FileQueue(
            self, topic, group, delivery_limit, dead_topic=partial(ensure_topic, self, topic)
        )

    def groups(self) -> list[str]:
        with self.store.still_view() as state:
            return _group_names(state)

    def group(self, name: str) -> GroupInfo:
        with self.store.still_view() as state:
            return self._group_info(state, name)

    def _group_info(self, state: State, name: str) -> GroupInfo:
        if name not in _group_names(state):
            raise UnknownGroup(name, _group_names(state))
        group = state.groups.get(name)
        if group is None:
            return GroupInfo(
                name,
                "queue",
                0,
                (),
                {topic: dict(floors) for topic, floors in self._queue_floors(state, name).items()},
            )
        owned: dict[str, list[tuple[str, int]]] = {member: [] for member in group.members}
        for key, member in sorted(group.owners.items()):
            owned[member].append(parse_partition_key(key))
        members = tuple(
            MemberInfo(
                member,
                tuple(owned[member]),
                about["host"],
                heartbeat_age_s(self.store.root, name, member),
            )
            for member, about in group.members.items()
        )
        return GroupInfo(
            name,
            "group",
            group.generation,
            members,
            {topic: dict(offsets) for topic, offsets in group.committed.items()},
        )

    @staticmethod
    def _queue_floors(state: State, group: str) -> dict[str, dict[int, int]]:
        floors: dict[str, dict[int, int]] = {}
        for key, queue in state.queues.items():
            owner, topic = key.split("\0")
            if owner == group:
                floors[topic] = {
                    number: partition.floor for number, partition in queue.partitions.items()
                }
        return floors

    def committed(self, group: str) -> Offsets:
        return Offsets(self.group(group).committed)

    def reset_group(
        self,
        group: str,
        topic: str,
        to: str | int | datetime,
        *,
        partitions: Sequence[int] | None = None,
    ) -> Offsets:
        check_name(group, what="group")
        known = self.topic_state(topic)
        targets = self._targets(known, place_word(to))
        numbers = range(len(known.partitions)) if partitions is None else partitions
        for number in numbers:
            self.partition_reader(known, number)  # checks the number
        wanted = {number: targets[number] for number in numbers}

        def decide(draft: Draft) -> None:
            self._check_nobody_reads(draft.state, group)
            coordinate(
                draft,
                group,
                None,
                {},
                draft.state.groups[group].members if group in draft.state.groups else (),
            )  # the dead may not commit again
            if f"{group}\0{topic}" in draft.state.queues:
                for number, offset in wanted.items():
                    draft.do("queue", group, topic, "reset", number, offset)
            else:
                draft.do(
                    "offsets",
                    group,
                    topic,
                    {str(number): offset for number, offset in wanted.items()},
                )

        self.committer.submit(decide)
        return Offsets({topic: wanted})

    def _targets(self, topic: TopicState, to: str | int | datetime) -> dict[int, int]:
        """Where a reset leads, partition by partition; never outside of what there is."""
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

    def _check_nobody_reads(self, state: State, name: str) -> None:
        group = state.groups.get(name)
        if group is None:
            return
        alive = set(group.members) - set(dead_members(self.store.root, name, group))
        if alive:
            raise MemberFenced(
                f"The group {name!r} is being read by {len(alive)} member(s):"
                f" {', '.join(sorted(alive))}.",
                fix="stop them, then reset it.",
            )

    def lag(self, group: str | None = None) -> list[PartitionLag]:
        with self.store.still_view() as state:
            if group is not None and group not in _group_names(state):
                raise UnknownGroup(group, _group_names(state))
            behind = list(self._behind(state, group))
        now = time.time()
        times: dict[tuple[str, int, int], float] = {}
        found = []
        for name, topic, number, committed, rows in behind:
            partition = topic.partitions[number]
            place = max(partition.start if committed is None else committed, partition.start)
            if rows and (topic.name, number, place) not in times:
                time_us = self.partition_reader(topic, number).time_of(place)
                times[topic.name, number, place] = now if time_us is None else time_us / 1e6
            seconds = max(0.0, now - times[topic.name, number, place]) if rows else 0.0
            found.append(
                PartitionLag(name, topic.name, number, committed, partition.end, rows, seconds)
            )
        return found

    @staticmethod
    def _behind(
        state: State, only: str | None
    ) -> Iterable[tuple[str, TopicState, int, int | None, int]]:
        """(group, topic, partition, committed, rows behind) of every group, also where it has not
        committed yet.
        """
        for name, group in sorted(state.groups.items()):
            wanted = {
                *group.committed,
                *(topic for about in group.members.values() for topic in about["topics"]),
            }
            for topic in sorted(wanted & set(state.topics)) if only in {None, name} else ():
                committed = group.committed.get(topic, {})
                for number, partition in enumerate(state.topics[topic].partitions):
                    offset = committed.get(number)
                    yield (
                        name,
                        state.topics[topic],
                        number,
                        offset,
                        partition.end
                        - max(partition.start if offset is None else offset, partition.start),
                    )
        for key, queue in sorted(state.queues.items()):
            name, topic = key.split("\0")
            for number, partition in (
                enumerate(state.topics[topic].partitions) if only in {None, name} else ()
            ):
                known = queue.partitions.get(number)
                waiting = known.waiting(partition.end) if known else partition.end - partition.start
                yield name, state.topics[topic], number, known.floor if known else None, waiting

    def note(self, name: str) -> str | None:
        return self.store.view().notes.get(name)

    # Care

    def verify(self, topic: str | None = None) -> list[Finding]:
        return verify_log(self, topic)

    def stats(self, topic: str | None = None) -> list[TopicStats]:
        state = self.store.view()
        names = [topic] if topic is not None else sorted(state.topics)
        return [self._topic_stats(state.topic(name)) for name in names]

    def _topic_stats(self, topic: TopicState) -> TopicStats:
        size = segments = 0
        for number in range(len(topic.partitions)):
            directory = self.store.partition_directory(topic.directory, number)
            for place in segments_in(
                directory,
                topic.partitions[number].segment,
                begun=topic.partitions[number].position > 0,
            ):
                segments += 1
                size += (directory / place.name).stat().st_size
        starts = {number: partition.start for number, partition in enumerate(topic.partitions)}
        ends = {number: partition.end for number, partition in enumerate(topic.partitions)}
        return TopicStats(
            topic.name,
            len(topic.partitions),
            sum(ends.values()) - sum(starts.values()),
            size,
            segments,
            starts,
            ends,
        )

    def maintain(self, topic: str | None = None) -> dict[str, Any]:
        if topic is not None and topic not in self.topics():
            raise UnknownTopic(topic, self.topics())
        return dict(
            keep_house(self, topic, with_checkpoint=True)
        )  # so that every sealed segment may be compacted

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.housekeeper.stop()
        if self._much_to_read_again():
            make_checkpoint(self, wait=False)
        self.cache.close()
        self.store.close()

    def _much_to_read_again(self) -> bool:
        """Whether the next one to open this log would have to read much of the journal."""
        records, size = (
            self.committer.records_since_checkpoint,
            self.committer.bytes_since_checkpoint,
        )
        return records > _CHECKPOINT_AT_CLOSE_RECORDS or size > _CHECKPOINT_AT_CLOSE_BYTES


def _group_names(state: State) -> list[str]:
    return sorted({*state.groups, *(key.split("\0")[0] for key in state.queues)})


def _append(draft: Draft, rows: PreparedRows) -> AppendResult:
    draft.check_fresh(rows)
    draft.append(rows)
    return draft.position()


def _settings(info: TopicInfo) -> dict[str, Any]:
    """A topic's settings as the journal stores them."""
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
    return {"ddl": info.schema, "key": list(info.key)} | {
        name: getattr(info, name) for name in names
    }
