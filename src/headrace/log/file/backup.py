"""Backups of a log that is in use, and copies that were made while it was.

A backup is a log's directory as of one commit: the segments up to where they ended then, and a
checkpoint of the state. Restoring it is opening it.

    backup.json                that this is a backup, of which log, as of which commit
    headrace.json, topics/     as in any log
    journal/N.checkpoint       the state, with a journal file that has no records yet

Rows never change once they are committed, so the second backup into a directory copies only what
was appended since, and files that compaction has written anew. Maintenance waits while a backup is
made, so that no file disappears; writers do not.

A plain copy of the directory of a log that is being written has parts of different moments.
`check_copy` finds that out when the copy is opened.
"""

from __future__ import annotations

import json
import mmap as mmap_module
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from mmap import ALLOCATIONGRANULARITY, MAP_SHARED, PROT_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from headrace.errors import CorruptionError, InputError, TornCopy
from headrace.log.file.checkpoint import checkpoint_lsns, checkpoint_name, load_checkpoint
from headrace.log.file.disk import Disk, DiskFile
from headrace.log.file.journal import (
    FILE_HEADER_BYTES,
    JOURNAL_SUFFIX,
    Journal,
    journal_name,
)
from headrace.log.file.maintenance import maintenance_lock, write_checkpoint
from headrace.log.file.segment import (
    FRAME_HEADER_BYTES,
    SEGMENT_SUFFIX,
    Segment,
    SegmentInfo,
    body_is_sound,
    list_segments,
    read_frame_header,
    read_segment_header,
    scan_headers,
)
from headrace.log.file.state import PartitionState, State, TopicState
from headrace.log.values import BackupResult

if TYPE_CHECKING:
    from headrace.log.file.checkpoint import Replica
    from headrace.log.file.handle import LogHandle
    from headrace.log.file.store import Store

VERSION = 1
_NICENESS = 15
_MAP_FLAGS = MAP_SHARED | getattr(mmap_module, "MAP_POPULATE", 0)


def back_up(log: LogHandle, destination: Path) -> BackupResult:
    """Back up a log, which may be in use, into a directory:

    1. make a checkpoint: a state whose rows are all in synced segments
    2. copy what the directory does not have yet, and check every batch that was copied
    3. replace the directory's journal by one that has the checkpoint: now it is the new backup
    4. put rewritten segments in the place of those before, and remove what the new state does not
       refer to

    Whoever is stopped before step 3 leaves the backup before.

    Raises:
        InputError: The directory has something else in it, or was written to since it was made.
        CorruptionError: The log is damaged. The backup before is as it was.
    """
    started_s = time.monotonic()
    with (
        maintenance_lock(log, wait=True),
        _Target(log.store.disk, destination) as target,
        target.locked(log.store.root),
    ):
        target.check(log.store.root)
        lsn, base, dumped = write_checkpoint(log)  # 1
        state = State.load(dumped)
        for topic in state.topics.values():  # 2
            for number in range(len(topic.partitions)):
                _copy_partition(log, target, topic, number)
        content = (log.store.journal_directory / checkpoint_name(lsn)).read_bytes()
        target.commit(lsn, base, content, state.commit, log.store.root)  # 3
        target.remove_others()  # 4
    return BackupResult(
        commit=state.commit,
        files=target.files,
        copied_bytes=target.copied_bytes,
        total_bytes=sum(path.stat().st_size for path in destination.rglob("*") if path.is_file()),
        seconds=time.monotonic() - started_s,
    )


def _copy_partition(log: LogHandle, target: _Target, topic: TopicState, number: int) -> None:
    partition = topic.partitions[number]
    source = log.store.partition_directory(topic.directory, number)
    destination = target.root / "topics" / topic.directory / str(number)
    target.disk.make_directory(destination)
    infos = list_segments(source, partition.segment, begun=partition.position > 0)
    stops = [*(info.base for info in infos[1:]), partition.end]
    wanted = [
        info
        for info, stop in zip(infos, stops, strict=False)  # no segment, no stop
        if stop > partition.start or info.base == partition.segment
    ]
    for first, stop in _missing_offsets(log.store, topic, number, _stop_by_index):
        # A backup must not replace what is whole by what is not.
        raise CorruptionError(
            f"Offsets {first} to {stop - 1} of {topic.name}[{number}] are in no segment.",
            fix="see what `headrace log verify` says, and restore them from an older backup.",
        )
    for info in wanted:
        size = (source / info.name).stat().st_size
        if _is_open(info, partition):
            size = partition.position
        target.copy(source / info.name, destination / info.name, size)
    target.disk.sync_directory(destination)


class _Target:
    """The directory of a backup."""

    def __init__(self, disk: Disk, root: Path) -> None:
        self.disk, self.root = disk, root
        self.files = self.copied_bytes = 0
        self._known: set[Path] = set()
        self._rewritten: dict[Path, Path] = {}  # a new file -> the segment whose place it takes
        self._copier = ThreadPoolExecutor(1, "headrace backup", _give_way)
        self._checker = ThreadPoolExecutor(1, "headrace backup check", _give_way)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._copier.shutdown()
        self._checker.shutdown()

    @contextmanager
    def locked(self, source: Path) -> Iterator[None]:
        """Create the directory, and exclude backups of other logs into it. Raises InputError."""
        if (
            self.root.resolve() == source.resolve()
            or source.resolve() in self.root.resolve().parents
        ):
            raise InputError(
                f"{self.root} is in the log's own directory.", fix="name a directory elsewhere."
            )
        self.disk.make_directory(self.root)
        with self.disk.locked_directory(self.root) as is_ours:
            if not is_ours:
                raise InputError(
                    f"A backup of another log into {self.root} is being made just now.",
                    fix="name another directory: each log has a backup of its own.",
                )
            yield

    def check(self, source: Path) -> None:
        """Raise InputError unless the directory is empty, or a backup that nobody has written to
        since.
        """
        names = set(os.listdir(self.root))
        if not names:
            return
        about = self._about()
        if about is None:
            if names <= {"topics", "journal"}:
                return  # a first backup that was stopped
            raise InputError(
                f"{self.root} has other things in it, and no backup.",
                fix="name an empty or new directory.",
            )
        if about["of"] != str(source.resolve()):
            raise InputError(
                f"{self.root} has a backup of another log, {about['of']}.",
                fix="name another directory.",
            )
        sizes = {
            path.name: path.stat().st_size
            for path in (self.root / "journal").glob(f"*{JOURNAL_SUFFIX}")
        }
        ours = journal_name(about["base"])
        is_newer_begun = any(name > ours for name in sizes)  # by a backup that was stopped
        if sizes.get(ours) != FILE_HEADER_BYTES and not is_newer_begun:
            raise InputError(
                f"The backup in {self.root} has been written to since it was made.",
                fix="it is a log of its own now: name another directory.",
            )

    def _about(self) -> dict[str, Any] | None:
        try:
            about: dict[str, Any] = json.loads((self.root / "backup.json").read_bytes())
        except FileNotFoundError:
            return None
        if about["version"] > VERSION:
            raise InputError(
                f"The backup in {self.root} was made by a newer Headrace.", fix="upgrade Headrace."
            )
        return about

    def copy(self, source: Path, path: Path, size: int) -> None:
        """Copy a segment up to a size. If the backup before has the beginning of it, the rest is
        added, which the backup before does not see. If it has another segment of that name, that
        one stays until the new backup is complete.
        """
        self._known.add(path)
        with closing(self.disk.open(source, write=False)) as original:
            file = self.disk.open(path, create=True)
            have = file.size()
            if not _is_begun_copy(original, file, have):
                file.close()
                new = path.with_name(f".{path.name}.new")
                self.disk.unlink(new)
                self._rewritten[new] = path
                file, have = self.disk.open(new, create=True), 0
            try:
                if have > size:
                    raise CorruptionError(
                        f"{source} is shorter than its backup.",
                        fix="see what `headrace log verify` says of the log.",
                    )
                if have < size:
                    start = _end_of_frames(file, have)
                    self._copier.submit(self._copy_range, original, file, start, size).result()
                    file.sync()
                    self.files += 1
                    self.copied_bytes += size - start
            finally:
                file.close()

    def _copy_range(self, original: DiskFile, file: DiskFile, start: int, size: int) -> None:
        """Copy the batches of a segment, and check each in the copy, one piece in another thread
        while the next one is copied. Raises CorruptionError.
        """
        end, checked = start, start or read_segment_header(original).size
        check: Future[int] | None = None
        try:
            for end in file.copy_from(original, start, size):
                checked = check.result() if check is not None else checked
                check = self._checker.submit(_check_batches, file, checked, end)
        finally:
            checked = check.result() if check is not None else checked
        if checked < size:
            raise CorruptionError(
                f"{file.path} is damaged at byte {checked}: so is what it was copied from."
                if end == size
                else f"{file.path.name} is shorter than it should be.",
                fix="see what `headrace log verify` says of the log.",
            )

    def commit(self, lsn: int, base: int, checkpoint: bytes, commit: int, source: Path) -> None:
        """Make what was copied the backup. The checkpoint decides, so it comes first: without its
        journal file it says that nothing was written since, whereas a new journal file beside an
        older checkpoint says that the records in between were lost.
        """
        journal = self.root / "journal"
        self.disk.make_directory(journal)
        self.disk.replace_file(journal / checkpoint_name(lsn), [checkpoint])
        finish_backup(self.disk, self.root)
        for name in ("durable", "lock", "housekeeping"):  # of somebody who has looked into it
            self.disk.unlink(journal / name)
        self.disk.sync_directory(journal)
        about = {
            "version": VERSION,
            "what": "Headrace backup",
            "of": str(source.resolve()),
            "commit": commit,
            "lsn": lsn,
            "base": base,
        }
        self.disk.replace_file(self.root / "backup.json", [json.dumps(about).encode() + b"\n"])
        self.disk.replace_file(
            self.root / "headrace.json", [(source / "headrace.json").read_bytes()]
        )

    def remove_others(self) -> None:
        """Put rewritten segments in their places, and remove topics and segments that the backup
        does not refer to.
        """
        topics = self.root / "topics"
        for new, path in self._rewritten.items():
            self.disk.rename(new, path)
            self.disk.sync_directory(path.parent)
        for path in sorted(topics.glob(f"*/*/*{SEGMENT_SUFFIX}")):  # as compaction removes them
            if path not in self._known:
                self.disk.unlink(path)
        for path in topics.glob("*/*/.*.new"):
            self.disk.unlink(path)
        for directory in topics.glob("*~*"):
            if not any(directory.rglob(f"*{SEGMENT_SUFFIX}")):
                self.disk.remove_tree(directory)


def _give_way() -> None:
    """Let other threads of the machine go first: those that append. Linux gives each thread a
    priority of its own; elsewhere, this would be the whole process's.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _is_begun_copy(original: DiskFile, file: DiskFile, have: int) -> bool:
    """Whether a file begins as another one does. Segments have a random id in their header, and
    only grow until they are rewritten with another one.
    """
    if not have:
        return True
    length = min(have, 4096)
    return original.read(length, 0) == file.read(length, 0)


def _check_batches(file: DiskFile, start: int, end: int) -> int:
    """Check the whole batches between two positions. Returns the position behind the last that is
    sound. They are mapped: to read them would cost as much as their checksums.
    """
    header = read_frame_header(file.read(FRAME_HEADER_BYTES, start), 0, start)
    if header is None or start + header.frame_bytes > end:
        return start
    offset = start - start % ALLOCATIONGRANULARITY
    position = start
    with (
        mmap(file.descriptor, end - offset, _MAP_FLAGS, PROT_READ, offset=offset) as mapped,
        memoryview(mapped) as content,
    ):
        while header is not None and position + header.frame_bytes <= end:
            at = position - offset
            with content[at + FRAME_HEADER_BYTES : at + header.frame_bytes] as body:
                if not body_is_sound(header, body):
                    break
            position += header.frame_bytes
            header = read_frame_header(content, position - offset, position)
    return position


def _end_of_frames(file: DiskFile, size: int) -> int:
    """The end of the last whole batch of a begun copy; 0 if it has none."""
    try:
        end = read_segment_header(file).size
    except CorruptionError:
        return 0
    for _, frame, after in scan_headers(file, end, size):
        if frame is None:
            break
        end = after
    return end if end <= size else 0


def finish_backup(disk: Disk, root: Path) -> None:
    """Make the newest checkpoint of a directory that is a backup its only one, with a journal file
    that has no records. Called by recovery too, since a backup may be stopped before it does so.
    Does nothing where that file is there, or where somebody has written.
    """
    directory = root / "journal"
    lsns = checkpoint_lsns(directory)
    newest = load_checkpoint(directory, lsns[0]) if lsns else None
    journals = list(directory.glob(f"*{JOURNAL_SUFFIX}"))
    if (
        newest is None
        or (directory / journal_name(newest["base"])).exists()
        or any(path.stat().st_size > FILE_HEADER_BYTES for path in journals)
    ):
        return
    for lsn in lsns[1:]:
        disk.unlink(directory / checkpoint_name(lsn))
    for path in journals:
        disk.unlink(path)
    disk.sync_directory(directory)
    Journal(disk, directory, write=True).create_file(newest["base"])


# Copies


def check_copy(store: Store, replica: Replica) -> None:
    """Raise TornCopy if a directory that is a copy lacks commits, or rows of commits: it was made
    while the log was being written. Called by recovery, which has redone what the journal has.

    Rows of commits that the journal does not have may be there for one topic and not for another,
    so they are not salvaged as in a log that was damaged where it is.
    """
    missing = []
    if replica.damage:
        missing.append(f"commits from number {replica.lost_commits.first} on")
    for topic in replica.state.topics.values():
        for number, partition in enumerate(topic.partitions):
            missing += [
                f"offsets {first} to {stop - 1} of {topic.name}[{number}]"
                for first, stop in _missing_offsets(store, topic, number, _stop_by_headers)
            ]
            stop = compacted_to(store, topic, number)
            if stop > partition.end:
                missing.append(
                    f"commits of {topic.name}[{number}] up to offset {stop - 1}, for whose rows"
                    " compaction has removed older ones,"
                )
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" * (len(missing) > 5))
        if store.marker.read() is None:
            raise TornCopy(
                f"{store.root} is a backup that is not whole, or a copy of one that was made while"
                f" the next backup was: {shown} are missing.",
                fix=(
                    "back up again, or copy the backup while nobody writes it. If there is nothing"
                    " but this one, `headrace log repair` opens it without them."
                ),
            )
        raise TornCopy(
            f"{store.root} is a copy that was made while the log was being written: {shown} are"
            " missing, so transactions may be torn.",
            fix=(
                "make a backup with `headrace log backup DIRECTORY`, or copy it while nobody"
                " writes. If there is nothing but this copy, `headrace log repair` opens it"
                " without them."
            ),
        )


def is_ahead(store: Store, state: State) -> bool:
    """Whether segments of a copy are of a later time than its journal: compaction has removed rows
    from them in favour of rows of commits that the journal does not have.
    """
    return any(
        compacted_to(store, topic, number) > partition.end
        for topic in state.topics.values()
        for number, partition in enumerate(topic.partitions)
    )


def compacted_to(store: Store, topic: TopicState, number: int) -> int:
    """The offset up to which compaction has looked at rows of a partition; 0 if it never has."""
    partition = topic.partitions[number]
    path = store.partition_directory(topic.directory, number)
    stop = 0
    for info in list_segments(path, partition.segment, begun=partition.position > 0):
        with suppress(CorruptionError), closing(Segment(store.disk, path / info.name)) as segment:
            header = segment.header
            stop = max(stop, header.stop or 0, header.superseded_to or 0)
    return stop


# The offsets that segments have

StopOf = Callable[[Segment, int, bool], int]
"""(segment, position, whether it is sealed) -> the offset behind its last batch up to there."""


def _missing_offsets(
    store: Store, topic: TopicState, number: int, stop_of: StopOf
) -> Iterator[tuple[int, int]]:
    """Ranges of offsets of a partition that its segments should have, and do not."""
    partition = topic.partitions[number]
    path = store.partition_directory(topic.directory, number)
    expected = partition.start
    infos = list_segments(path, partition.segment, begun=partition.position > 0)
    for info, following in zip(infos, [*infos[1:], None], strict=False):
        if info.base > expected:
            yield expected, info.base
        stop: int | None = info.base
        is_open = _is_open(info, partition)
        with suppress(CorruptionError), closing(Segment(store.disk, path / info.name)) as segment:
            size = segment.file.size()
            end = partition.position if is_open else size
            if segment.may_have_gaps and not segment.is_truncated:
                stop = segment.header.stop
            elif end <= size and not segment.is_truncated:
                stop = stop_of(segment, end, not is_open)
        if stop is None:  # rows were removed from it, and nobody recorded where it ended
            stop = following.base if following else partition.end
        expected = max(expected, stop)
    if expected < partition.end:
        yield expected, partition.end


def _is_open(info: SegmentInfo, partition: PartitionState) -> bool:
    return info.base == partition.segment and not info.commit


def _stop_by_headers(segment: Segment, end: int, _sealed: bool) -> int:
    """By the headers of all batches: behind the first damage nothing counts."""
    stop = segment.info.base
    for _, frame, _ in scan_headers(segment.file, segment.header.size, end):
        if frame is None:
            break
        stop = segment.info.base + frame.relative + frame.span
    return stop


def _stop_by_index(segment: Segment, end: int, sealed: bool) -> int:
    """By the last batch that the index has, which is quick."""
    positions = segment.index(end, sealed=sealed).positions
    at = positions[-1] if positions else 0
    frame = read_frame_header(segment.file.read(FRAME_HEADER_BYTES, at), 0, at)
    return segment.info.base + (frame.relative + frame.span if frame else 0)
