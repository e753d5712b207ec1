"""Maintenance: checkpoints, retention, compaction, cleaning up, and verification of a log.

`MaintenanceThread` runs it in the background of every process that writes; `run_maintenance` is one
run, also on request (`Log.maintain`). One process at a time does it. The log's lock is held for
moments only, and files are removed after the journal says that they may be. `verify_log` checks
every stored byte.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from itertools import pairwise, takewhile
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from headrace.errors import CorruptionError, HeadraceError
from headrace.log.file import staging
from headrace.log.file.checkpoint import (
    checkpoint_lsns,
    checkpoint_name,
    delete_old_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from headrace.log.file.commit_draft import CommitDraft
from headrace.log.file.compaction import (
    compact_partition,
    compactable_segments,
    is_compacted,
    remove_segment,
)
from headrace.log.file.consumer import remove_dead_members
from headrace.log.file.journal import (
    FILE_HEADER_BYTES,
    ROLL,
    Journal,
    JournalDamage,
    MissingJournal,
    encode_record,
    journal_name,
)
from headrace.log.file.segment import (
    FRAME_HEADER_BYTES,
    INDEX_SUFFIX,
    FrameIndex,
    Segment,
    SegmentInfo,
    body_is_sound,
    find_damaged_header,
    list_segments,
    read_frames,
)
from headrace.log.file.store import MAX_CLOCK_ERROR_US
from headrace.log.values import Finding

if TYPE_CHECKING:
    from headrace.log.file.handle import LogHandle
    from headrace.log.file.state import TopicState


logger = logging.getLogger("headrace.log")
CHECKPOINT_RECORDS = 5_000
CHECKPOINT_BYTES = 64 << 20
_INTERVAL_S = 30.0
_PAUSE_S = 0.2
_MAX_COMPACTION_INTERVAL_S = 6 * 3600.0
_UNFINISHED_LIFETIME_S = 3600.0


class MaintenanceThread:
    """Runs maintenance in the background of a process that writes, from its first commit on."""

    def __init__(self, log: LogHandle) -> None:
        self.log = log
        self._wake = Event()
        self._stopped = Event()
        self._thread: Thread | None = None
        # (topic's directory, partition) -> (base of the last segment compacted, when)
        self._compacted: dict[tuple[str, int], tuple[int, float]] = {}
        # Processes that start together should not all run at once.
        self._interval_s = _INTERVAL_S * (0.8 + os.getpid() % 100 / 250)

    def on_commit(self) -> None:
        """Called after each commit: start the thread, and wake it if a checkpoint is due."""
        if self._thread is None:
            self._thread = Thread(target=self._run, daemon=True, name="headrace maintenance")
            self._thread.start()
        if is_checkpoint_due(self.log):
            self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            if self._stopped.is_set():
                return
            try:
                run_maintenance(self.log, is_due=self._is_compaction_due)
            except (HeadraceError, OSError) as error:  # the next run, or the next writer, does it
                logger.warning("Maintenance of %s failed: %s", self.log.store.root, error)
            # Every commit asks for a checkpoint that is due, also while a backup holds it up.
            self._stopped.wait(_PAUSE_S)

    def _is_compaction_due(self, topic: TopicState, number: int) -> bool:
        """Whether a third of a partition is new since its last compaction, which reads all of it.
        After some hours it is due anyway, since tombstones expire.
        """
        sizes = {
            info.base: _segment_size(self.log, topic, number, info)
            for info in compactable_segments(self.log, topic, number)
        }
        covered, when = self._compacted.get((topic.directory, number), (-1, -math.inf))
        new_bytes = sum(size for base, size in sizes.items() if base > covered)
        is_recent = time.monotonic() - when < _MAX_COMPACTION_INTERVAL_S
        if not sizes or (3 * new_bytes < sum(sizes.values()) and is_recent):
            return False
        self._compacted[topic.directory, number] = (max(sizes), time.monotonic())
        return True

    def stop(self) -> None:
        self._stopped.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=30)


@contextmanager
def maintenance_lock(log: LogHandle, *, wait: bool) -> Iterator[bool]:
    """Exclude maintenance in all other processes. Yields False if another process is at it and
    `wait` is false.
    """
    log.store.lock_file()  # refuses a read-only log
    lock = log.store.disk.open_lock(log.store.journal_directory / "housekeeping")
    try:
        with lock.locked(wait=wait, timeout_s=math.inf) as is_ours:
            yield is_ours
    finally:
        lock.close()


def run_maintenance(
    log: LogHandle,
    topic: str | None = None,
    *,
    is_due: Callable[[TopicState, int], bool] | None = None,
    with_checkpoint: bool = False,
) -> dict[str, int]:
    """Do everything that is due, for one topic or for all.

    Args:
        log: The log.
        topic: One topic; None for all.
        is_due: Whether a partition is worth compacting, for background runs, which give way to
            another process that is at it. None compacts every partition and waits for the other
            process.
        with_checkpoint: Make a checkpoint even if none is due.

    Returns:
        How much was removed.
    """
    done = {"segments_deleted": 0, "segments_compacted": 0, "rows_removed": 0, "staging_swept": 0}
    with maintenance_lock(log, wait=is_due is None) as is_ours:
        if not is_ours:
            return done
        if with_checkpoint or is_checkpoint_due(log):
            write_checkpoint(log)
        for name in [topic] if topic is not None else list(log.store.view().topics):
            state = log.store.view().topics.get(name)
            if state is None:  # it was deleted meanwhile
                continue
            for number in range(len(state.partitions)):
                partition = log.store.partition_directory(state.directory, number)
                _remove_unfinished_files(log, partition)
                done["segments_deleted"] += apply_retention(log, state, number)
                if is_compacted(state) and (is_due is None or is_due(state, number)):
                    segments, rows = compact_partition(log, state, number)
                    done["segments_compacted"] += segments
                    done["rows_removed"] += rows
        with log.store.locked():
            done["staging_swept"] = staging.remove_expired(log.store, log.store.clock.now_us())
        _remove_unfinished_files(log, log.store.journal_directory)
        _remove_deleted_topics(log)
        remove_dead_members(log)
    return done


def _remove_unfinished_files(log: LogHandle, directory: Path) -> None:
    """Remove files that a killed process was about to rename over others."""
    limit_s = time.time() - _UNFINISHED_LIFETIME_S
    for path in directory.glob(".*"):
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < limit_s:
                log.store.disk.unlink(path)


def _remove_deleted_topics(log: LogHandle) -> None:
    """Remove the directories of topics whose deletion is durable. They are listed under the lock,
    so that no topic is being created.
    """
    with log.store.locked() as newest:
        topics = [*newest.state.topics.values(), *log.store.view().topics.values()]
        in_use = {topic.directory for topic in topics}
        paths = (log.store.root / "topics").glob("*~*")
        deleted = [path for path in paths if path.name not in in_use]
    for path in deleted:
        log.store.disk.remove_tree(path)


# Checkpoints


def is_checkpoint_due(log: LogHandle) -> bool:
    return (
        log.committer.records_since_checkpoint >= CHECKPOINT_RECORDS
        or log.committer.bytes_since_checkpoint >= CHECKPOINT_BYTES
    )


def create_checkpoint(log: LogHandle, *, wait: bool = True) -> None:
    """Make a checkpoint, after the process that does maintenance now; without `wait`, leave it to
    that process.
    """
    with maintenance_lock(log, wait=wait) as is_ours:
        if is_ours:
            write_checkpoint(log)


def write_checkpoint(log: LogHandle) -> tuple[int, int, dict[str, Any]]:
    """Make a checkpoint, under the maintenance lock:

    1. under the log's lock: end the journal's file, begin the next one, and copy the state
    2. sync every segment that was written since the last checkpoint
    3. store the checkpoint, whole or not at all
    4. record in the journal that all files written before step 1 are synced
    5. delete older checkpoints, and journal files that only they needed

    The maintenance lock keeps a second checkpoint from running step 4 for files of step 1 that
    this one has not synced yet.

    Returns:
        The position of the journal that the checkpoint is of, the start of the file with that
        position, and the state.
    """
    store = log.store
    with store.locked() as newest:  # 1
        file = newest.journal.file_at(newest.base)
        roll = encode_record(newest.lsn, ROLL, 0, store.marker.durable_lsn(), {})
        file.write(roll, newest.lsn - newest.base)
        log.committer.sync(file)
        newest.base += file.size()
        newest.lsn = newest.base + FILE_HEADER_BYTES
        newest.journal.create_file(newest.base)
        store.marker.publish(newest.lsn)
        newest.state.on_journal_roll()
        newest.records_since_checkpoint = 0
        lsn = newest.lsn
        base = newest.base
        state = newest.state.dump()
        written = set(newest.state.dirty_before)
    for directory, partition, name in written:  # 2
        _sync_segment(log, directory, partition, name)
    save_checkpoint(store.disk, store.journal_directory, lsn, base, state)  # 3
    log.committer.submit(lambda draft: draft.do("checkpointed"))  # 4
    delete_old_checkpoints(store.disk, store.journal_directory, newest.journal.bases())  # 5
    return lsn, base, state


def _sync_segment(log: LogHandle, directory: str, partition: int, name: str) -> None:
    path = log.store.partition_directory(directory, partition) / name
    try:
        file = log.store.disk.open(path)
    except FileNotFoundError:  # removed meanwhile
        return
    try:
        log.committer.sync(file)
    finally:
        file.close()
    log.store.disk.sync_directory(path.parent)


# Retention


def apply_retention(log: LogHandle, topic: TopicState, number: int) -> int:
    """Remove segments of a partition that are too old or exceed its size. Returns how many.

    The journal moves the partition's start first; after a crash in between, the next run removes
    the files.
    """
    _roll_old_segment(log, topic, number)
    partition = topic.partitions[number]
    segments = list_segments(
        log.store.partition_directory(topic.directory, number),
        partition.segment,
        begun=partition.position > 0,
    )
    start = _retained_start(log, topic, number, segments)

    def decide(draft: CommitDraft) -> int:
        current = draft.state.topic(topic.name)
        if start > current.partitions[number].start:
            draft.do("start", topic.name, number, start)
        return current.partitions[number].start

    committed_start = topic.partitions[number].start
    if start > committed_start:
        committed_start = log.committer.submit(decide)
    return _remove_segments_before(log, topic, number, segments, committed_start)


def trim_topic(log: LogHandle, name: str, offsets: Mapping[int, int]) -> dict[int, int]:
    """Remove the rows of a topic before an offset of each partition. Returns the new starts.

    The journal moves the starts in one commit. Segments without rows are then removed; the rows of
    a segment that has others too stay on the disk as long as it does, and nobody can read them.
    """

    def decide(draft: CommitDraft) -> dict[int, int]:
        topic = draft.state.topic(name)
        for number, offset in offsets.items():
            partition = topic.partitions[number]
            start = min(max(offset, partition.start), partition.end)
            if start > partition.start:
                draft.do("start", name, number, start)
            if partition.position and start == partition.end > partition.segment:
                draft.roll(topic, number)  # the open segment has no rows any more
        return {number: partition.start for number, partition in enumerate(topic.partitions)}

    starts = log.committer.submit(decide)
    with maintenance_lock(log, wait=False) as is_ours:  # otherwise the next maintenance does it
        topic = log.store.view().topic(name)
        for number in offsets if is_ours else ():
            partition = topic.partitions[number]
            segments = list_segments(
                log.store.partition_directory(topic.directory, number),
                partition.segment,
                begun=partition.position > 0,
            )
            _remove_segments_before(log, topic, number, segments, partition.start)
    return starts


def _roll_old_segment(log: LogHandle, topic: TopicState, number: int) -> None:
    """Seal an open segment that is too old, so that retention also reaches the rows of a topic that
    nobody writes any more.
    """
    info, partition = topic.info, topic.partitions[number]
    age_us = log.store.clock.now_us() - partition.opened_us
    lifetime_us = info.segment_us
    if info.retention_us is not None:
        lifetime_us = min(lifetime_us, info.retention_us)
    is_too_old = age_us > lifetime_us or age_us < -MAX_CLOCK_ERROR_US  # from a clock ahead of ours
    if partition.position and partition.end > partition.segment and is_too_old:

        def decide(draft: CommitDraft) -> None:
            current = draft.state.topic(topic.name)
            if current.partitions[number].segment == partition.segment:
                draft.roll(current, number)

        log.committer.submit(decide)


def _retained_start(
    log: LogHandle, topic: TopicState, number: int, segments: list[SegmentInfo]
) -> int:
    """The first offset that retention by age and by size leaves. The open segment always stays."""
    current = log.store.view().topic(topic.name)
    partition = current.partitions[number]
    bases = [info.base for info in segments if info.base <= partition.segment]
    # Each sealed segment with the offset at which the next one begins.
    sealed = [
        (info, stop)
        for info, stop in zip(segments, [*bases[1:], partition.segment], strict=False)
        if info.base < partition.segment
    ]
    start = partition.start
    if topic.info.retention_us is not None:
        oldest_us = log.store.clock.now_us() - topic.info.retention_us
        if log.store.view().went_back:
            latest_us = log.store.clock.now_us() + MAX_CLOCK_ERROR_US
            old = takewhile(
                lambda item: not _has_times(log, topic, number, item[0], oldest_us, latest_us),
                sealed,
            )
            start = max([start, *(stop for _, stop in old)])
        else:
            first_young = log.partition_reader(current, number).first_since(oldest_us)
            start = max([start, *(stop for _, stop in sealed if stop <= first_young)])
    if topic.info.retention_bytes is not None:
        total = sum(_segment_size(log, topic, number, info) for info in segments)
        for info, stop in sealed:  # at least as much as was asked for stays, as on Kafka
            total -= _segment_size(log, topic, number, info)
            if total < topic.info.retention_bytes:
                break
            start = max(start, stop)
    return start


def _has_times(
    log: LogHandle, topic: TopicState, number: int, info: SegmentInfo, first_us: int, last_us: int
) -> bool:
    """Whether a segment has rows that were appended between two times. Times do not rise if a clock
    was set back, and may lie ahead of now.
    """
    try:
        segment = log.cache.segment(topic.directory, number, info.name)
    except FileNotFoundError:
        return False
    times = segment.index(segment.file.size(), sealed=True).times
    return any(first_us <= time_us <= last_us for time_us in times)


def _segment_size(log: LogHandle, topic: TopicState, number: int, info: SegmentInfo) -> int:
    directory = log.store.partition_directory(topic.directory, number)
    try:
        return (directory / info.name).stat().st_size
    except FileNotFoundError:
        return 0


def _remove_segments_before(
    log: LogHandle, topic: TopicState, number: int, segments: list[SegmentInfo], start: int
) -> int:
    """Unlink the segments all of whose offsets are below `start`. Returns how many."""
    directory = log.store.partition_directory(topic.directory, number)
    stops = [*(info.base for info in segments[1:]), topic.partitions[number].segment]
    removed = 0
    for info, stop in zip(segments, stops, strict=False):
        if info.base < stop <= start:
            remove_segment(log, directory / info.name)
            removed += 1
    if removed:
        log.cache.forget(topic.directory, number)
    return removed


# Verification


def verify_log(log: LogHandle, topic: str | None) -> list[Finding]:
    """All damage in a log, or in one topic; an empty list if everything is sound."""
    log.store.check_open()
    mark = log.store.marker.read()  # before `view` replaces a damaged one
    state = log.store.view()
    findings: list[Finding] = []
    if topic is None:
        if mark is None:
            findings.append(
                Finding(
                    kind="corrupt",
                    file=str(log.store.marker.path),
                    position=0,
                    message="how far the journal is durable cannot be read",
                )
            )
        findings += _verify_journal(log)
        directory = log.store.journal_directory
        for lsn in checkpoint_lsns(directory):
            path = directory / checkpoint_name(lsn)
            if load_checkpoint(directory, lsn) is None and path.exists():  # not deleted just now
                findings.append(
                    Finding(
                        kind="corrupt",
                        file=str(path),
                        position=0,
                        message="this checkpoint is damaged; the one before it will be used",
                    )
                )
    topics = [state.topic(topic)] if topic is not None else list(state.topics.values())
    for topic_state in topics:
        for number in range(len(topic_state.partitions)):
            findings += _verify_partition(log, topic_state, number)
    return findings


def _verify_journal(log: LogHandle) -> Iterator[Finding]:
    journal = Journal(log.store.disk, log.store.journal_directory, write=False)
    mark = log.store.marker.read()
    durable_lsn = mark.lsn if mark else 0
    bases = _needed_journal_files(log.store.journal_directory, journal.bases())
    for base in bases:
        is_last = base == bases[-1]
        try:
            yield from _verify_journal_file(journal, base, durable_lsn, is_last=is_last)
        except MissingJournal:
            path = log.store.journal_directory / journal_name(base)
            # Unless it was deleted just now, or its creator was stopped before it was used.
            if not is_last and path.exists():
                yield Finding(
                    kind="missing",
                    file=str(path),
                    position=0,
                    message="this part of the commit journal is gone",
                )
    journal.close()


def _needed_journal_files(directory: Path, bases: list[int]) -> list[int]:
    """The journal files that some checkpoint needs: older ones may be left of what was stopped."""
    contents = [load_checkpoint(directory, lsn) for lsn in checkpoint_lsns(directory)]
    first = min((content["base"] for content in contents if content is not None), default=0)
    return [base for base in bases if base >= first]


def _verify_journal_file(
    journal: Journal, base: int, durable_lsn: int, *, is_last: bool
) -> Iterator[Finding]:
    """Verify one file of the journal: the last one as far as it is known to be durable, an earlier
    one up to the ROLL record that names the next.
    """
    file = journal.file_at(base)
    first = base + FILE_HEADER_BYTES
    if not journal.header_is_sound(base):
        yield Finding(
            kind="corrupt",
            file=str(file.path),
            position=0,
            message="the header of this part of the commit journal is damaged",
        )
    end, file_end = first, journal.end_of(base)
    limit = min(file_end, max(durable_lsn, first)) if is_last else file_end
    for item in journal.records(base, first, limit):
        if isinstance(item, JournalDamage):
            yield Finding(
                kind="corrupt",
                file=item.file,
                position=item.position,
                message="the commit journal is damaged here",
            )
            end = item.after or file_end
            continue
        if any(item.padding) or item.end > file_end:
            yield Finding(
                kind="corrupt",
                file=str(file.path),
                position=item.end - base - len(item.padding),
                message="the padding behind a record is not empty; the record is sound",
            )
        end = item.end
        if item.kind == ROLL:
            return
    if not is_last or end < durable_lsn:
        yield Finding(
            kind="missing",
            file=str(file.path),
            position=end - base,
            message="the commit journal ends too early",
        )


def _verify_partition(log: LogHandle, topic: TopicState, number: int) -> Iterator[Finding]:
    partition = topic.partitions[number]
    directory = log.store.partition_directory(topic.directory, number)
    segments = list_segments(directory, partition.segment, begun=partition.position > 0)
    first = segments[0].base if segments else partition.end
    if partition.start < first:
        yield Finding(
            kind="missing",
            file=str(directory),
            position=0,
            message=f"offsets {partition.start} to {first - 1} are in no segment",
            topic=topic.name,
            partition=number,
            offset=partition.start,
        )
    for info, following in pairwise([*_without_leftovers(log, directory, segments), None]):
        stop = following.base if following else partition.end
        if info is not None and stop > partition.start:
            yield from _verify_segment(log, topic, number, info, stop)


def _without_leftovers(
    log: LogHandle, directory: Path, segments: list[SegmentInfo]
) -> Iterator[SegmentInfo]:
    """The segments but for those whose rows are in a compacted one before: whoever wrote that was
    stopped before it could remove them.
    """
    stop = 0
    for info in segments:
        if info.base < stop:
            continue
        with (
            suppress(CorruptionError, FileNotFoundError),
            closing(Segment(log.store.disk, directory / info.name)) as segment,
        ):
            stop = segment.header.stop or 0
        yield info


def _verify_segment(
    log: LogHandle, topic: TopicState, number: int, info: SegmentInfo, stop: int
) -> Iterator[Finding]:
    """Verify a segment that should have offsets up to `stop`, and its index."""
    partition = topic.partitions[number]
    path = log.store.partition_directory(topic.directory, number) / info.name
    is_open = info.base == partition.segment and not info.commit

    def finding(kind: str, position: int, message: str, offset: int) -> Finding:
        return Finding(
            kind=kind,
            file=str(path),
            position=position,
            message=message,
            topic=topic.name,
            partition=number,
            offset=offset,
        )

    try:
        segment = Segment(log.store.disk, path)
    except CorruptionError as error:
        yield finding("corrupt", 0, error.message, info.base)
        return
    except FileNotFoundError:
        # Retention was here first; otherwise the offsets are reported as being in no segment.
        return
    try:
        end = partition.position if is_open else segment.file.size()
        for kind, position, message, offset in _verify_frames(segment, end, stop):
            yield finding(kind, position, message, offset)
        if not is_open and not _index_fits(segment):
            yield Finding(
                kind="stale",
                file=str(path.with_suffix(INDEX_SUFFIX)),
                position=0,
                message="this index does not fit its segment; it will be built again",
                topic=topic.name,
                partition=number,
                offset=info.base,
            )
    finally:
        segment.close()


def _index_fits(segment: Segment) -> bool:
    """Whether a sealed segment's stored index, if there is one, fits it."""
    try:
        data = segment.path.with_suffix(INDEX_SUFFIX).read_bytes()
    except FileNotFoundError:
        return True
    return FrameIndex.from_bytes(data, segment.header.id, segment.file.size()) is not None


def _verify_frames(segment: Segment, end: int, stop: int) -> Iterator[tuple[str, int, str, int]]:
    """(kind, position, message, offset) of each damage in a segment that should have offsets up to
    `stop`.
    """
    expected = segment.info.base
    damaged_header = find_damaged_header(segment.file)
    if damaged_header is not None:
        message = "one of the two copies of the segment's header is damaged"
        yield "corrupt", damaged_header, message, expected
    for position, frame, body in read_frames(segment.file, segment.header.size, end):
        if expected >= stop:
            return
        if frame is None:
            yield "corrupt", position, "there is no batch where one should be", expected
            continue
        first = segment.info.base + frame.relative
        if not body_is_sound(frame, body):
            message = f"the checksum of offsets {first} to {first + frame.span - 1} does not fit"
            yield "corrupt", position, message, first
        padding_at = position + FRAME_HEADER_BYTES + frame.body_bytes
        if any(segment.file.read(position + frame.frame_bytes - padding_at, padding_at)):
            message = "the padding behind a batch is not empty; the batch is sound"
            yield "corrupt", padding_at, message, first
        if first < expected or (first > expected and not segment.may_have_gaps):
            yield "missing", position, f"offsets {expected} to {first - 1} are not there", expected
        expected = first + frame.span
    segment_end = segment.header.stop
    if segment_end is not None and segment_end < stop and not segment.is_truncated:
        message = f"offsets {segment_end} to {stop - 1} are in no segment"
        yield "missing", segment.file.size(), message, segment_end
    if (expected < stop and not segment.may_have_gaps) or segment.is_truncated:
        position = min(end, segment.file.size())
        yield "missing", position, f"the file ends before offset {stop}", expected
