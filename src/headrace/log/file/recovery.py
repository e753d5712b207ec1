"""Recovery: after power loss, make the files agree with the journal again.

The journal is the truth. `recover` cuts its torn tail, writes each small append since the last
checkpoint again from the journal's copy, moves staged files that had become segments again, and
cuts off what lies behind the end of a segment. `reconcile` handles a journal that is itself
corrupt: it finds topics and rows of lost commits in the segments. Both can be repeated.

The store calls both under the log's lock: `recover` when a directory is opened after a restart of
the machine, `reconcile` before anything is written behind damage.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import CorruptionError
from headrace.log.file.backup import check_copy, finish_backup, is_ahead
from headrace.log.file.checkpoint import LostCommits, Replica, restore_operation, topic_settings
from headrace.log.file.commit_draft import Adoption
from headrace.log.file.disk import DiskFile
from headrace.log.file.journal import (
    COMMIT,
    Journal,
    JournalRecord,
    MissingJournal,
    encode_record,
)
from headrace.log.file.segment import (
    COMPACTED,
    EXCISED,
    INDEX_SUFFIX,
    SEGMENT_SUFFIX,
    FrameHeader,
    Segment,
    SegmentInfo,
    body_is_sound,
    list_segments,
    producer_hash,
    read_frames,
    read_segment_header,
    segment_name,
)
from headrace.log.file.state import PartitionState, State, salvaged_name

if TYPE_CHECKING:
    from headrace.log.file.state import Operation, TopicState
    from headrace.log.file.store import Store


__all__ = ["append_record", "check_copy", "reconcile", "recover", "salvage"]

logger = logging.getLogger("headrace.log")


def recover(store: Store) -> None:
    """Repair a log's directory, under the log's lock:

    1. start from the newest sound checkpoint
    2. read the journal, and redo what each record says
    3. cut the journal's torn tail, and clean torn padding
    4. cut each segment that was written at its end, and sync it
    5. sync the journal, then publish its end
    """
    is_backup = (store.root / "backup.json").exists()
    if is_backup:
        finish_backup(store.disk, store.root)
    journal = Journal(store.disk, store.journal_directory, write=True)
    replica = Replica.open(journal, store.journal_directory)  # 1
    redo = _Redo(store, replica)
    while True:  # 2
        try:
            torn = replica.advance(durable_lsn=store.marker.durable_lsn(), on_record=redo.record)
            break
        except MissingJournal as missing:  # its creator was stopped before the file was durable
            journal.create_next(missing.base)
    if torn is not None:  # 3
        logger.warning(
            "The journal of %s ended in a torn record; cut at position %d. Nothing acknowledged was"
            " lost.",
            store.root,
            torn,
        )
        journal.file_at(replica.base).truncate(torn - replica.base)
    for base, lsn, size in replica.bad_padding:  # a sound record's padding can be torn
        file = journal.file_at(base)
        file.write([bytes(size)], lsn - base)
        file.sync()
    mark = store.marker.read()
    # A backup has no mark until it is opened, and nor has a copy of one.
    is_copy = is_backup if mark is None else mark.inode != store.marker.inode
    if is_copy and is_ahead(store, replica.state):
        replica.skip_rest()
    redo.finish()  # 4
    if is_copy and not store.accepts_torn_copy:
        check_copy(store, replica)
    if replica.damage:
        reconcile(store, replica)
    journal.file_at(replica.base).sync()  # 5
    store.disk.sync_directory(store.journal_directory)
    store.marker.publish(replica.lsn, replace=True)


class _Redo:
    """Applies journal records to the segment files again, and tracks where each written segment
    ends.
    """

    def __init__(self, store: Store, replica: Replica) -> None:
        self.store = store
        self.replica = replica
        self.ends: dict[tuple[str, int, int], int] = {}
        self.adopted: set[Path] = set()
        # Partitions as of the operation in hand; the replica's state is as of the record before.
        self._partitions: dict[tuple[str, int], PartitionState] = {}
        # (directory, partition, first, stop): offsets in which no other segment may begin
        self._stray_ranges: set[tuple[str, int, int, int]] = set()

    def record(self, record: JournalRecord) -> None:
        """Redo one record's operations."""
        blob_at = 0
        for operation in record.meta["ops"]:
            if operation[0] == "append":
                blob_at = self._append(operation, record, blob_at)
            elif operation[0] == "adopt":
                self._adopt(operation)
            elif operation[0] == "roll":
                self._roll(operation)
        self._partitions.clear()

    def _append(self, operation: Operation, record: JournalRecord, blob_at: int) -> int:
        _, name, partition, offset, span, segment, position, size, inline = operation
        directory = self._directory(name)
        if directory is not None:
            end = position + size
            self.ends[directory, partition, segment] = end
            self._partitions[directory, partition] = PartitionState(
                start=0, end=offset + span, segment=segment, position=end
            )
            if inline:
                file = self._open(directory, partition, segment)
                if not _is_rewritten(file):
                    file.write([record.blob[blob_at : blob_at + size]], position)
                file.close()
        return blob_at + size if inline else blob_at

    def _adopt(self, operation: Operation) -> None:
        _, name, partition, offset, span, file, segment = operation
        directory = self._directory(name)
        if directory is not None:
            end = offset + span
            self.store.adopt(
                Adoption(directory=directory, partition=partition, file=file, name=segment)
            )
            self._partitions[directory, partition] = PartitionState(start=0, end=end, segment=end)
            if SegmentInfo.parse(segment).commit:  # otherwise it is a rewritten one, not a stray
                self._stray_ranges.add((directory, partition, offset, end))
            path = self.store.partition_directory(directory, partition)
            if path.is_dir():
                self.adopted.add(path)

    def _roll(self, operation: Operation) -> None:
        _, name, number = operation
        directory = self._directory(name)
        if directory is not None:
            before = (
                self._partitions.get((directory, number))
                or self.replica.state.topics[name].partitions[number]
            )
            if before.position:
                self.ends.setdefault((directory, number, before.segment), before.position)
                self._stray_ranges.add((directory, number, before.segment + 1, before.end))
            self._partitions[directory, number] = before._replace(segment=before.end, position=0)

    def _directory(self, name: str) -> str | None:
        """A topic's directory; None for a topic that was deleted later, whose files may be gone."""
        topic = self.replica.state.topics.get(name)
        return topic.directory if topic else None

    def _open(self, directory: str, partition: int, segment: int) -> DiskFile:
        path = self.store.segment_path(directory, partition, segment)
        self.store.disk.make_directory(path.parent)
        return self.store.disk.open(path, create=True)

    def finish(self) -> None:
        """Cut and sync the segments that records have written, and remove those of failed commits.

        With a damaged journal nothing is cut or removed: it may be what a lost record described.
        """
        if not self.replica.damage:
            self._remove_strays()
        for (directory, partition, segment), end in self.ends.items():
            if self.store.segment_path(directory, partition, segment).exists():
                file = self._open(directory, partition, segment)
                if file.size() > end and not self.replica.damage and not _is_rewritten(file):
                    file.truncate(end)
                file.sync()
                file.close()
                self.store.disk.sync_directory(self.store.partition_directory(directory, partition))
        for path in self.adopted:
            self.store.disk.sync_directory(path)
        self._remove_merged()

    def _remove_merged(self) -> None:
        """Remove segments that records have written again although compaction had moved their rows
        into the segment before. That happens if the newest checkpoint is damaged.
        """
        for directory, partition, segment in self.ends:
            path = self.store.partition_directory(directory, partition)
            before = list_segments(path, segment, begun=False)
            if before and _stop_of(self.store, path / before[-1].name) > segment:
                self.store.disk.unlink(path / segment_name(segment))

    def _remove_strays(self) -> None:
        """Remove segments that failed commits began, between and behind those that did happen, and
        segments that retention had removed before the crash.
        """
        for directory, partition, first, stop in self._stray_ranges:
            self.store.remove_strays(directory, partition, first, stop)
        for topic in self.replica.state.topics.values():
            for number, state in enumerate(topic.partitions):
                has_begun = state.position > 0
                self.store.remove_strays(topic.directory, number, state.segment + has_begun)
                path = self.store.partition_directory(topic.directory, number)
                segments = list_segments(path, state.segment, begun=has_begun)
                for segment, following in pairwise(segments):
                    if following.base <= state.start:
                        self.store.disk.unlink(path / segment.name)
                _remove_leftovers(self.store, path, segments)


def _remove_leftovers(store: Store, directory: Path, segments: list[SegmentInfo]) -> None:
    """Remove the segments whose rows are in a compacted one before. Compaction removed them, but
    not durably; where some of them are back, the others seem to be missing.
    """
    stop = 0
    for info in segments:
        if info.base < stop:
            store.disk.unlink((directory / info.name).with_suffix(INDEX_SUFFIX))
            store.disk.unlink(directory / info.name)
            continue
        with (
            suppress(CorruptionError, FileNotFoundError),
            closing(Segment(store.disk, directory / info.name)) as segment,
        ):
            stop = 0 if segment.is_truncated else segment.header.stop or 0


def _stop_of(store: Store, path: Path) -> int:
    """The offset behind a rewritten segment; 0 if it was not, or cannot be read."""
    file = store.disk.open(path, write=False)
    try:
        return read_segment_header(file).stop or 0
    except CorruptionError:
        return 0
    finally:
        file.close()


def _is_rewritten(file: DiskFile) -> bool:
    """Whether compaction or excision has rewritten a segment. Such a segment is older than the
    checkpoint from which recovery starts: it has everything it should.
    """
    try:
        return bool(read_segment_header(file).flags & (COMPACTED | EXCISED))
    except CorruptionError:
        return False


# A corrupt journal


def reconcile(store: Store, replica: Replica) -> None:
    """Find what lost commits have left in the segments, and record it in the journal, before
    anything is written behind the damage.
    """
    operations = _find_lost(store, replica)
    if operations:
        append_record(store, replica, operations)


def salvage(store: Store, replica: Replica) -> None:
    """Find what lost commits have left in the segments, in a log that cannot be written."""
    operations = _find_lost(store, replica)
    replica.state.apply(replica.state.commit, replica.state.time_us, operations)


def _find_lost(store: Store, replica: Replica) -> list[Operation]:
    """The operations that bring back topics, rows and sequence numbers of lost commits. What only
    the journal had, such as the positions of groups, is lost.
    """
    operations: list[Operation] = []
    for directory in sorted((store.root / "topics").glob("*~*")):
        name, _, created_in = directory.name.rpartition("~")
        if name not in replica.state.topics and int(created_in) in replica.lost_commits:
            settings = topic_settings(store.disk, directory)
            if settings is not None:
                operations.append(restore_operation(name, settings, directory))
    replica.state.apply(replica.state.commit, replica.state.time_us, operations)
    sequences = _LostSequences(replica.state)
    for topic in replica.state.topics.values():
        for number, partition in enumerate(topic.partitions):
            operations += _lost_rows(
                store, topic, number, partition, replica.lost_commits, sequences
            )
    operations += sequences.operations()
    for damage in replica.damage:
        logger.error(
            "Commits from number %s on were lost with the journal's damage at byte %d of %s. Their"
            " rows were kept as far as the segments have them: %d changes. Positions of groups,"
            " notes and queues that they stored are those of before: rows may be delivered again.",
            replica.lost_commits.first,
            damage.position,
            damage.file,
            len(operations),
        )
    replica.damage.clear()
    return operations


class _LostSequences:
    """The sequence numbers of producers in the frames of lost commits. A frame names its producer
    by a hash; one that the state does not know is remembered by it (`state.salvaged_name`).
    """

    def __init__(self, state: State) -> None:
        self._names = {
            producer_hash(*key.split("\0", 1)): key for key in state.producers if "\0" in key
        }
        self._last = {key: producer.last for key, producer in state.producers.items()}
        self._found: dict[str, dict[int, dict[str, list[int]]]] = {}

    def add(self, topic: str, partition: int, header: FrameHeader, first: int) -> None:
        if not header.producer:
            return
        name = self._names.get(header.producer) or salvaged_name(topic, header.producer)
        if header.sequence > self._last.get(name, -1):
            ranges = self._found.setdefault(name, {}).setdefault(header.sequence, {})
            known = ranges.setdefault(str(partition), [first, first + header.span])
            known[1] = first + header.span

    def operations(self) -> Iterator[Operation]:
        for name, numbers in self._found.items():
            for number in sorted(numbers):
                yield ["sequence", name, number, numbers[number]]


def _lost_rows(
    store: Store,
    topic: TopicState,
    number: int,
    partition: PartitionState,
    lost: LostCommits,
    sequences: _LostSequences,
) -> Iterator[Operation]:
    """Operations that append the rows of lost commits to a partition: those at the end of its open
    segment, and those in segments behind it.
    """

    def measure(path: Path, start: int, base: int, of: LostCommits | None) -> tuple[int, int]:
        frames = list(_lost_frames(store, path, start, end - base, of))
        for _, header in frames:
            sequences.add(topic.name, number, header, base + header.relative)
        if not frames:
            return 0, start
        position, last = frames[-1]
        return last.relative + last.span - (end - base), position + last.frame_bytes

    def adopt_rewritten(info: SegmentInfo, end: int, stop: int) -> Operation:
        with closing(Segment(store.disk, directory / info.name)) as rewritten:
            for _, header, body in read_frames(
                rewritten.file, rewritten.header.size, rewritten.file.size()
            ):
                if header is not None and body_is_sound(header, body):
                    first = info.base + header.relative
                    if first + header.span > end:
                        sequences.add(topic.name, number, header, first)
        return ["adopt", topic.name, number, end, stop - end, "", info.name]

    directory = store.partition_directory(topic.directory, number)
    segment, position, end = partition.segment, partition.position, partition.end
    for info in list_segments(directory, segment, begun=position > 0):
        stop = _stop_of(store, directory / info.name)
        if stop > end:  # compaction has put them into one file with rows before them
            yield adopt_rewritten(info, end, stop)
            position, end = 0, stop
    if position:
        path = directory / segment_name(segment)
        span, size = measure(path, position, segment, lost)
        if span:
            yield ["append", topic.name, number, end, span, segment, position, size - position, 0]
            end += span
    while True:
        found = _segment_at(directory, end)
        if found is None or (found.commit and found.commit not in lost):
            return
        path = directory / found.name
        stop = _stop_of(store, path)
        if stop > end:
            yield adopt_rewritten(found, end, stop)
            end = stop
            continue
        span, size = measure(path, 0, end, None if found.commit else lost)
        if not span:
            return
        if found.commit:
            yield ["adopt", topic.name, number, end, span, "", found.name]
        else:
            yield ["append", topic.name, number, end, span, end, 0, size, 0]
        end += span


def _segment_at(directory: Path, base: int) -> SegmentInfo | None:
    """The segment that begins at an offset. One that was staged is preferred: it is there only
    because its commit was durable.
    """
    staged = sorted(path.name for path in directory.glob(f"{base:020d}.*{SEGMENT_SUFFIX}"))
    if staged:
        return SegmentInfo.parse(staged[0])
    name = segment_name(base)
    return SegmentInfo.parse(name) if (directory / name).exists() else None


def _lost_frames(
    store: Store, path: Path, start: int, relative: int, lost: LostCommits | None
) -> Iterator[tuple[int, FrameHeader]]:
    """The sound frames of lost commits (of any commit, for None) that follow a position, with their
    positions. The file is synced, if it can be written.
    """
    try:
        file: DiskFile = store.disk.open(path, write=store.writable)
    except FileNotFoundError:
        return
    try:
        expected = relative
        for position, header, body in read_frames(
            file, start or read_segment_header(file).size, file.size()
        ):
            if (
                header is None
                or header.relative != expected
                or (lost is not None and header.commit not in lost)
                or not body_is_sound(header, body)
            ):
                break
            expected += header.span
            yield position, header
        if store.writable:
            file.sync()
    except CorruptionError:
        return
    finally:
        file.close()


def append_record(store: Store, replica: Replica, operations: list[Operation]) -> None:
    """Write, sync and apply one record outside the committer, under the log's lock."""
    state = replica.state
    commit = state.commit + 1
    record = encode_record(
        replica.lsn,
        COMMIT,
        commit,
        store.marker.durable_lsn(),
        {"t": state.time_us, "ops": operations},
    )
    journal = replica.journal.file_at(replica.base)
    end = journal.write(record, replica.lsn - replica.base)
    journal.sync()
    state.apply(commit, state.time_us, operations)
    replica.lsn = replica.base + end
