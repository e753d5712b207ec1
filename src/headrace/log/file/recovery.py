"""Recovery: after power was lost, make the files agree with the journal again.

The journal is the truth. Its torn tail is cut; each small append since the last checkpoint is
written again from the journal's copy; staged files that had become segments are moved again; what
lies behind the true end of a segment is cut off. All of it can be repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import CorruptionError
from headrace.log.file.checkpoint import LostCommits, Replica, restoring_operation, topic_settings
from headrace.log.file.commit_draft import Adoption
from headrace.log.file.disk import DiskFile
from headrace.log.file.journal import COMMIT, Journal, MissingJournal, Record, encode_record
from headrace.log.file.segment import (
    COMPACTED,
    EXCISED,
    SEGMENT_SUFFIX,
    SegmentPlace,
    body_is_sound,
    read_frames,
    read_segment_header,
    segment_name,
    segments_in,
)
from headrace.log.file.state import PartitionState

if TYPE_CHECKING:
    from headrace.log.file.state import Operation, TopicState
    from headrace.log.file.store import Store


# Checkpoints: the state as of a position of the journal, so that opening a log does not read its
# whole past.
#
# The two newest are kept, with the journal since the older one: a damaged checkpoint costs time,
# not data.


def reconcile(store: Store, replica: Replica) -> None:
    """Before anything is written behind damage: find topics and rows of lost commits, and say in
    the journal that they are there.
    """
    operations = list(_lost_topics(store, replica))
    replica.state.apply(replica.state.commit, replica.state.time_us, operations)
    for topic in replica.state.topics.values():
        for number, partition in enumerate(topic.partitions):
            operations += _lost_rows(store, topic, number, partition, replica.lost)
    replica.damage.clear()
    if operations:
        logger.error(
            "%d segments or topics were found behind the journal's damage and kept.",
            len(operations),
        )
        append_record(store, replica, operations)


def _lost_topics(store: Store, replica: Replica) -> Iterator[Operation]:
    for directory in sorted((store.root / "topics").glob("*~*")):
        name, _, created = directory.name.rpartition("~")
        if name not in replica.state.topics and int(created) in replica.lost:
            settings = topic_settings(store.disk, directory)
            if settings is not None:
                yield restoring_operation(name, settings, directory)


def _lost_rows(
    store: Store, topic: TopicState, number: int, partition: PartitionState, lost: LostCommits
) -> Iterator[Operation]:
    segment, position, end = partition.segment, partition.position, partition.end
    if position:
        span, size = _sound_rows(
            store,
            store.segment_path(topic.directory, number, segment),
            position,
            end - segment,
            lost,
        )
        if span:
            yield ["append", topic.name, number, end, span, segment, position, size - position, 0]
            end += span
    while True:
        place = _segment_at(store.partition_directory(topic.directory, number), end)
        if place is None or (place.commit and place.commit not in lost):
            return
        path = store.partition_directory(topic.directory, number) / place.name
        span, size = _sound_rows(store, path, 0, 0, None if place.commit else lost)
        if not span:
            return
        if place.commit:
            yield ["adopt", topic.name, number, end, span, "", place.name]
        else:
            yield ["append", topic.name, number, end, span, end, 0, size, 0]
        end += span


def _segment_at(directory: Path, base: int) -> SegmentPlace | None:
    """The segment that begins at an offset; one that was staged as a whole is there only because
    its commit was durable.
    """
    names = sorted(path.name for path in directory.glob(f"{base:020d}.*{SEGMENT_SUFFIX}"))
    plain = directory / segment_name(base)
    return (
        SegmentPlace.parse(names[0] if names else plain.name) if names or plain.exists() else None
    )


def _sound_rows(
    store: Store, path: Path, start: int, relative: int, lost: LostCommits | None
) -> tuple[int, int]:
    """How many offsets of whole, sound frames of lost commits (of any, if None) lie from a place
    on, and where they end. Synced.
    """
    try:
        file: DiskFile = store.disk.open(path)
    except FileNotFoundError:
        return 0, start
    try:
        end = start or read_segment_header(file).size
        expected = relative
        for position, header, body in read_frames(file, end, file.size()):
            if (
                header is None
                or header.relative != expected
                or (lost is not None and header.commit not in lost)
                or not body_is_sound(header, body)
            ):
                break
            expected += header.span
            end = position + header.frame_bytes
        file.sync()
        return expected - relative, end
    except CorruptionError:
        return 0, start
    finally:
        file.close()


def append_record(store: Store, replica: Replica, operations: list[Operation]) -> None:
    """Write and sync one record outside the committer, under the log's lock."""
    state = replica.state
    commit = state.commit + 1
    record = encode_record(
        replica.lsn, COMMIT, commit, store.marker.proven(), {"t": state.time_us, "ops": operations}
    )
    journal = replica.journal.file_at(replica.base)
    end = journal.write(record, replica.lsn - replica.base)
    journal.sync()
    state.apply(commit, state.time_us, operations)
    replica.lsn = replica.base + end


logger = logging.getLogger("headrace.log")


def recover(store: Store) -> None:
    """The steps, under the log's lock:

    1. start from the newest sound checkpoint
    2. read the journal on, doing again what each record says
    3. cut the journal's torn tail
    4. cut each touched segment at its true end, and sync it
    5. sync the journal, then publish its end
    """
    replica = Replica(
        Journal(store.disk, store.journal_directory, write=True), store.journal_directory
    )  # 1
    redo = _Redo(store, replica)
    torn = _replay(store, replica, redo)  # 2
    if torn is not None:  # 3
        logger.warning(
            "The journal of %s ended in a torn record; cut at position %d. Nothing acknowledged was"
            " lost.",
            store.root,
            torn,
        )
        replica.journal.file_at(replica.base).truncate(torn - replica.base)
    _clean_fillings(replica)
    redo.finish()  # 4
    if replica.damage:
        reconcile(store, replica)
    replica.journal.file_at(replica.base).sync()  # 5
    store.disk.sync_directory(store.journal_directory)
    store.marker.publish(replica.lsn, anew=True)


def _replay(store: Store, replica: Replica, redo: _Redo) -> int | None:
    while True:
        try:
            return replica.advance(proven=store.marker.proven(), each=redo.record)
        except MissingJournal as missing:  # its maker was stopped before it was durable
            replica.journal.create_next(missing.base)


def _clean_fillings(replica: Replica) -> None:
    """A record can be whole when the filling behind it is torn."""
    for base, lsn, size in replica.unclean:
        file = replica.journal.file_at(base)
        file.write([bytes(size)], lsn - base)
        file.sync()


class _Redo:
    """Does again what records say, and remembers where each touched segment truly ends."""

    def __init__(self, store: Store, replica: Replica) -> None:
        self.store, self.replica = store, replica
        self.ends: dict[tuple[str, int, int], int] = {}
        self.adopted: set[Path] = set()
        self._now: dict[
            tuple[str, int], PartitionState
        ] = {}  # as of the operation being done again; the state is as of the record before
        self._strays: set[tuple[str, int, int, int]] = set()

    def record(self, record: Record) -> None:
        at = 0
        for operation in record.meta["ops"]:
            if operation[0] == "append":
                at = self._append(operation, record, at)
            elif operation[0] == "adopt":
                self._adopt(operation)
            elif operation[0] == "roll":
                self._roll(operation)
        self._now.clear()

    def _partition(self, name: str, directory: str, number: int) -> PartitionState:
        return (
            self._now.get((directory, number)) or self.replica.state.topics[name].partitions[number]
        )

    def _roll(self, operation: Operation) -> None:
        _, name, number = operation
        directory = self._directory(name)
        if directory is not None:
            before = self._partition(name, directory, number)
            if before.position:
                self.ends.setdefault((directory, number, before.segment), before.position)
                self._strays.add((directory, number, before.segment + 1, before.end))
            self._now[directory, number] = before._replace(segment=before.end, position=0)

    def _append(self, operation: Operation, record: Record, at: int) -> int:
        _, name, partition, offset, span, segment, position, size, inline = operation
        directory = self._directory(name)
        if directory is not None:
            self.ends[directory, partition, segment] = position + size
            self._now[directory, partition] = PartitionState(
                0, offset + span, segment, position + size
            )
            file = self._open(directory, partition, segment, create=True) if inline else None
            if file is not None:
                if not _is_compacted(file):
                    file.write([record.blob[at : at + size]], position)
                file.close()
        return at + size if inline else at

    def _adopt(self, operation: Operation) -> None:
        _, name, partition, offset, span, staged, file = operation
        directory = self._directory(name)
        if directory is not None:
            self.store.adopt(Adoption(directory, partition, staged, file))
            self._now[directory, partition] = PartitionState(0, offset + span, offset + span)
            self._strays.add((directory, partition, offset, offset + span))
            path = self.store.partition_directory(directory, partition)
            if path.is_dir():
                self.adopted.add(path)

    def _directory(self, name: str) -> str | None:
        """A topic that was deleted later may be gone already; its rows then matter to nobody."""
        topic = self.replica.state.topics.get(name)
        return topic.directory if topic else None

    def _open(
        self, directory: str, partition: int, segment: int, *, create: bool
    ) -> DiskFile | None:
        path = self.store.segment_path(directory, partition, segment)
        if not create and not path.exists():
            return None
        self.store.disk.make_directory(path.parent)
        return self.store.disk.open(path, create=True)

    def finish(self) -> None:
        if (
            not self.replica.damage
        ):  # otherwise, what seems too much may be what the damaged record spoke of
            self._remove_strays()
        for (directory, partition, segment), end in self.ends.items():
            file = self._open(directory, partition, segment, create=False)
            if file is not None:
                if file.size() > end and not self.replica.damage and not _is_compacted(file):
                    file.truncate(end)
                file.sync()
                file.close()
                self.store.disk.sync_directory(self.store.partition_directory(directory, partition))
        for path in self.adopted:
            self.store.disk.sync_directory(path)

    def _remove_strays(self) -> None:
        """Segments begun by commits that did not happen, between those that did and behind the last
        one; and those that retention had removed.
        """
        for directory, partition, first, stop in self._strays:
            self.store.remove_strays(directory, partition, first, stop)
        for topic in self.replica.state.topics.values():
            for number, state in enumerate(topic.partitions):
                self.store.remove_strays(
                    topic.directory, number, state.segment + (state.position > 0)
                )
                places = segments_in(
                    self.store.partition_directory(topic.directory, number),
                    state.segment,
                    begun=state.position > 0,
                )
                for place, after in pairwise(places):
                    if after.base <= state.start:
                        self.store.disk.unlink(
                            self.store.partition_directory(topic.directory, number) / place.name
                        )


def _is_compacted(file: DiskFile) -> bool:
    """A segment that was compacted, or had rows excised, is older than any checkpoint it could have
    been written after: what it should hold, it holds.
    """
    try:
        return bool(read_segment_header(file).flags & (COMPACTED | EXCISED))
    except CorruptionError:
        return False
