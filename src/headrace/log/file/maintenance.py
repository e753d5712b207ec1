"""Keeping house: checkpoints, retention, and sweeping what nobody needs. In the background of any
writer, and by command.

One process at a time does it. It takes the log's lock for moments only; files go after the journal
has said that they may.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

from headrace.errors import CorruptionError, HeadraceError
from headrace.log.file import checkpoint, staging
from headrace.log.file.commit_draft import Draft
from headrace.log.file.compaction import compact_partition, compactable, is_compacted
from headrace.log.file.journal import (
    FILE_HEADER_BYTES,
    ROLL,
    Damage,
    Journal,
    Mark,
    MissingJournal,
    encode_record,
    journal_name,
)
from headrace.log.file.segment import (
    HEADER_BYTES,
    INDEX_SUFFIX,
    FrameIndex,
    Segment,
    SegmentPlace,
    body_is_sound,
    damaged_copy,
    read_frames,
    segments_in,
)
from headrace.log.file.store import now_us
from headrace.log.values import Finding

if TYPE_CHECKING:
    from headrace.log.file.handle import LogHandle
    from headrace.log.file.state import TopicState


logger = logging.getLogger("headrace.log")
CHECKPOINT_RECORDS = 5_000
CHECKPOINT_BYTES = 64 << 20
_EVERY_S = 30.0
_COMPACT_AGAIN_S = 6 * 3600.0
_UNFINISHED_FOR_S = 3600.0


class Housekeeper:
    """Runs in a thread of a process that writes."""

    def __init__(self, log: LogHandle) -> None:
        self.log = log
        self._wake, self._stopped = Event(), Event()
        self._thread: Thread | None = None
        self._compacted: dict[
            tuple[str, int], tuple[int, float]
        ] = {}  # partition -> (the last segment compacted, when)
        self._every_s = _EVERY_S * (0.8 + os.getpid() % 100 / 250)  # not all processes at once

    def note_commit(self) -> None:
        """Called behind each commit: begin to run, and hurry if a checkpoint is due."""
        if self._thread is None:
            self._thread = Thread(target=self._run, daemon=True, name="headrace housekeeping")
            self._thread.start()
        if checkpoint_due(self.log):
            self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait(self._every_s)
            self._wake.clear()
            if self._stopped.is_set():
                return
            try:
                keep_house(self.log, due=self._compaction_due)
            except (
                HeadraceError,
                OSError,
            ) as error:  # the next turn, or the next writer, will do it
                logger.warning("Housekeeping in %s failed: %s", self.log.store.root, error)

    def _compaction_due(self, topic: TopicState, number: int) -> bool:
        """Compaction reads all of a partition, so it waits until a third of it is new; but not for
        ever, as tombstones grow old.
        """
        sizes = {
            place.base: _size(self.log, topic, number, place)
            for place in compactable(self.log, topic, number)
        }
        covered, when = self._compacted.get((topic.directory, number), (-1, -math.inf))
        new = sum(size for base, size in sizes.items() if base > covered)
        if not sizes or (
            3 * new < sum(sizes.values()) and time.monotonic() - when < _COMPACT_AGAIN_S
        ):
            return False
        self._compacted[topic.directory, number] = (max(sizes), time.monotonic())
        return True

    def stop(self) -> None:
        self._stopped.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=30)


def checkpoint_due(log: LogHandle) -> bool:
    return (
        log.committer.records_since_checkpoint >= CHECKPOINT_RECORDS
        or log.committer.bytes_since_checkpoint >= CHECKPOINT_BYTES
    )


@contextmanager
def alone(log: LogHandle, *, wait: bool) -> Iterator[bool]:
    """One housekeeper at a time, in all processes; yields False if there is another one and `wait`
    is false.
    """
    log.store.lock_file()  # refuses a log that cannot be written
    lock = log.store.disk.open(log.store.root / "journal" / "housekeeping", create=True)
    try:
        with lock.locked(wait=wait) as mine:
            yield mine
    finally:
        lock.close()


def keep_house(
    log: LogHandle,
    topic: str | None = None,
    *,
    due: Callable[[TopicState, int], bool] | None = None,
    with_checkpoint: bool = False,
) -> dict[str, int]:
    """Do what there is to do, for one topic or all. Returns what was removed.

    In the background, `due` says which partitions are worth compacting, and another process that is
    at it already is enough. By command all are compacted, after that other process if need be.
    """
    done = {"segments_deleted": 0, "segments_compacted": 0, "rows_removed": 0, "staging_swept": 0}
    with alone(log, wait=due is None) as mine:
        if mine:
            if with_checkpoint or checkpoint_due(log):
                _make_checkpoint(log)
            for name in [topic] if topic is not None else list(log.store.view().topics):
                _keep_topic(log, name, done, due or (lambda _topic, _number: True))
            with log.store.locked():
                done["staging_swept"] = staging.sweep(log.store, now_us())
            _sweep_unfinished(log, log.store.journal_directory)
            _remove_deleted_topics(log)
    return done


def make_checkpoint(log: LogHandle, *, wait: bool = True) -> None:
    """Make one, after whoever is keeping house now; without `wait`, leave it to them."""
    with alone(log, wait=wait) as mine:
        if mine:
            _make_checkpoint(log)


def _make_checkpoint(log: LogHandle) -> None:
    """The steps, with nobody else making one: step 4 says of all files changed before step 1 that
    they are synced.

    1. under the lock: end the journal's file, begin the next one, and take the state as of there
    2. sync every segment that was written since the last checkpoint
    3. store the checkpoint, whole or not at all
    4. say in the journal that this is done
    5. forget older checkpoints, and journal files that only they needed
    """
    store = log.store
    with store.locked() as newest:  # 1
        file = newest.journal.file_at(newest.base)
        file.write(
            encode_record(newest.lsn, ROLL, 0, store.marker.proven(), {}), newest.lsn - newest.base
        )
        log.committer.sync(file)
        newest.base += file.size()
        newest.lsn = newest.base + FILE_HEADER_BYTES
        newest.journal.create_file(newest.base)
        store.marker.publish(newest.lsn)
        newest.state.rolled()
        newest.records_since_checkpoint = 0
        lsn, base, state = newest.lsn, newest.base, newest.state.dump()
        touched = set(newest.state.dirty_before)
    for directory, partition, name in touched:  # 2
        _sync_segment(log, directory, partition, name)
    checkpoint.save(store.disk, store.journal_directory, lsn, base, state)  # 3
    log.committer.submit(lambda draft: draft.do("checkpointed"))  # 4
    checkpoint.forget_old(store.disk, store.journal_directory, newest.journal.bases())  # 5


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


def _keep_topic(
    log: LogHandle, name: str, done: dict[str, int], due: Callable[[TopicState, int], bool]
) -> None:
    topic = log.store.view().topics.get(name)
    if topic is None:
        return
    for number in range(len(topic.partitions)):
        _sweep_unfinished(log, log.store.partition_directory(topic.directory, number))
        done["segments_deleted"] += retain(log, topic, number)
        if is_compacted(topic) and due(topic, number):
            compacted, rows = compact_partition(log, topic, number)
            done["segments_compacted"] += compacted
            done["rows_removed"] += rows


def _sweep_unfinished(log: LogHandle, directory: Path) -> None:
    """Files that a process was about to put in another one's place when it was killed."""
    limit = time.time() - _UNFINISHED_FOR_S
    for path in directory.glob(".*"):
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < limit:
                log.store.disk.unlink(path)


def retain(log: LogHandle, topic: TopicState, number: int) -> int:
    """Remove segments that are too old or too many. The journal says so first; a crash in between
    leaves files for the next sweep.
    """
    _end_old_segment(log, topic, number)
    partition = topic.partitions[number]
    places = segments_in(
        log.store.partition_directory(topic.directory, number),
        partition.segment,
        begun=partition.position > 0,
    )
    start = _new_start(log, topic, number, places)

    def decide(draft: Draft) -> int:
        current = draft.state.topic(topic.name)
        if start > current.partitions[number].start:
            draft.do("start", topic.name, number, start)
        return current.partitions[number].start

    true_start = (
        log.committer.submit(decide)
        if start > topic.partitions[number].start
        else topic.partitions[number].start
    )
    return _remove_before(log, topic, number, places, true_start)


def _end_old_segment(log: LogHandle, topic: TopicState, number: int) -> None:
    """A segment that nobody writes any more must still grow too old some day."""
    info, partition = topic.info, topic.partitions[number]
    age_us = now_us() - partition.opened_us
    lifetime_us = min(
        info.segment_us, info.retention_us if info.retention_us is not None else info.segment_us
    )
    if partition.position and partition.end > partition.segment and age_us > lifetime_us:

        def decide(draft: Draft) -> None:
            current = draft.state.topic(topic.name)
            if current.partitions[number].segment == partition.segment:
                draft.roll(current, number)

        log.committer.submit(decide)


def _new_start(log: LogHandle, topic: TopicState, number: int, places: list[SegmentPlace]) -> int:
    """The first offset to be kept, by age and by size. The segment being written always stays."""
    info = topic.info
    partition = log.store.view().topic(topic.name).partitions[number]
    sealed = [place for place in places if place.base < partition.segment]
    bases = [place.base for place in places if place.base <= partition.segment] + [
        partition.segment
    ]
    start = partition.start
    if info.retention_us is not None:
        limit = log.partition_reader(log.store.view().topic(topic.name), number).first_since(
            now_us() - info.retention_us
        )
        start = max(
            [
                start,
                *(after for place, after in zip(sealed, bases[1:], strict=False) if after <= limit),
            ]
        )
    if info.retention_bytes is not None:
        sizes = [_size(log, topic, number, place) for place in places]
        total = sum(sizes)
        for place, after, size in zip(sealed, bases[1:], sizes, strict=False):
            if total <= info.retention_bytes:
                break
            total -= size
            start = max(start, after) if place.base >= 0 else start
    return start


def _size(log: LogHandle, topic: TopicState, number: int, place: SegmentPlace) -> int:
    try:
        return (log.store.partition_directory(topic.directory, number) / place.name).stat().st_size
    except FileNotFoundError:
        return 0


def _remove_before(
    log: LogHandle, topic: TopicState, number: int, places: list[SegmentPlace], start: int
) -> int:
    """Unlink segments all of whose offsets are below the start."""
    directory = log.store.partition_directory(topic.directory, number)
    removed = 0
    for index, place in enumerate(places):
        after = (
            places[index + 1].base if index + 1 < len(places) else topic.partitions[number].segment
        )
        if after <= start and place.base < after:
            path = directory / place.name
            log.store.disk.unlink(path.with_suffix(INDEX_SUFFIX))
            log.store.disk.unlink(path)
            removed += 1
    if removed:
        log.cache.forget(topic.directory, number)
    return removed


def _remove_deleted_topics(log: LogHandle) -> None:
    """Directories of topics that were deleted, durably. Under the lock, so that none is being
    made.
    """
    with log.store.locked() as newest:
        topics = [*newest.state.topics.values(), *log.store.view().topics.values()]
        known = {topic.directory for topic in topics}
        found = [path for path in (log.store.root / "topics").glob("*~*") if path.name not in known]
    for path in found:
        log.store.disk.remove_tree(path)


# Checking everything a log has stored, byte by byte: the journal, its checkpoints, every segment
# and index.


def verify_log(log: LogHandle, topic: str | None) -> list[Finding]:
    """Every damage there is; an empty list is a sound log."""
    log.store.check_open()
    mark = log.store.marker.read()
    state = log.store.view()  # sets a damaged mark right
    topics = [state.topic(topic)] if topic is not None else list(state.topics.values())
    findings = (
        [] if topic is not None else [*_marker(log, mark), *_journal(log), *_checkpoints(log)]
    )
    for each in topics:
        for number in range(len(each.partitions)):
            findings += _partition(log, each, number)
    return findings


def _marker(log: LogHandle, mark: Mark | None) -> Iterator[Finding]:
    if mark is None:
        yield Finding(
            "corrupt",
            str(log.store.marker.path),
            0,
            "how far the journal is durable cannot be read",
        )


def _journal(log: LogHandle) -> Iterator[Finding]:
    journal = Journal(log.store.disk, log.store.journal_directory, write=False)
    mark = log.store.marker.read()
    bases = journal.bases()
    for base, following in zip(bases, [*bases[1:], None], strict=False):
        try:
            yield from _journal_file(
                journal, base, mark.lsn if mark else 0, is_last=following is None
            )
        except MissingJournal:
            path = log.store.journal_directory / journal_name(base)
            if (
                following is not None and path.exists()
            ):  # otherwise it was forgotten just now, or its maker was stopped before it was used
                yield Finding("missing", str(path), 0, "this part of the commit journal is gone")
    journal.close()


def _journal_file(journal: Journal, base: int, durable: int, *, is_last: bool) -> Iterator[Finding]:
    """One file of the journal: up to what is known to be durable, if it is the last one; otherwise
    it must end in the record that names the next.
    """
    file, first = journal.file_at(base), base + FILE_HEADER_BYTES
    if not journal.header_is_sound(base):
        yield Finding(
            "corrupt", str(file.path), 0, "the header of this part of the commit journal is damaged"
        )
    end, limit = first, journal.end_of(base)
    for item in journal.records(base, first, min(limit, max(durable, first)) if is_last else limit):
        if isinstance(item, Damage):
            yield Finding("corrupt", item.file, item.position, "the commit journal is damaged here")
            end = item.after or limit
            continue
        if any(item.filling) or item.end > limit:
            yield Finding(
                "corrupt",
                str(file.path),
                item.end - base - len(item.filling),
                "the filling behind a record is not empty; the record is sound",
            )
        end = item.end
        if item.kind == ROLL:
            return
    if not is_last or end < durable:
        yield Finding("missing", str(file.path), end - base, "the commit journal ends too early")


def _checkpoints(log: LogHandle) -> Iterator[Finding]:
    directory = log.store.journal_directory
    for lsn in checkpoint.positions(directory):
        if checkpoint.load(directory, lsn) is None:
            path = directory / f"{lsn:020d}{checkpoint.CHECKPOINT_SUFFIX}"
            if path.exists():  # not just forgotten
                yield Finding(
                    "corrupt",
                    str(path),
                    0,
                    "this checkpoint is damaged; the one before it will be used",
                )


def _partition(log: LogHandle, topic: TopicState, number: int) -> Iterator[Finding]:
    partition = topic.partitions[number]
    directory = log.store.partition_directory(topic.directory, number)
    places = segments_in(directory, partition.segment, begun=partition.position > 0)
    first = places[0].base if places else partition.end
    if partition.start < first:
        message = f"offsets {partition.start} to {first - 1} are in no segment"
        yield Finding("missing", str(directory), 0, message, topic.name, number, partition.start)
    for place, after in zip(places, [*places[1:], None], strict=False):
        stop = after.base if after else partition.end
        if stop > partition.start:
            yield from _segment(log, topic, number, place, stop)


def _segment(
    log: LogHandle, topic: TopicState, number: int, place: SegmentPlace, stop: int
) -> Iterator[Finding]:
    partition = topic.partitions[number]
    path = log.store.partition_directory(topic.directory, number) / place.name
    is_active = place.base == partition.segment and not place.commit
    try:
        segment = Segment(log.store.disk, path)
    except CorruptionError as error:
        yield Finding("corrupt", str(path), 0, error.message, topic.name, number, place.base)
        return
    except (
        FileNotFoundError
    ):  # retention was here first, or it will be missed as offsets that are in no segment
        return
    try:
        end = partition.position if is_active else segment.file.size()
        for kind, position, message, offset in _frames(segment, end, stop):
            yield Finding(kind, str(path), position, message, topic.name, number, offset)
        if not is_active:
            yield from _index(segment, topic.name, number)
    finally:
        segment.close()


def _frames(segment: Segment, end: int, stop: int) -> Iterator[tuple[str, int, str, int]]:
    """(kind, position, message, offset) of each damage in a segment that should have offsets up to
    `stop`.
    """
    expected = segment.place.base
    damaged = damaged_copy(segment.file)
    if damaged is not None:
        yield (
            "corrupt",
            damaged,
            "one of the two copies of the segment's header is damaged",
            expected,
        )
    for position, frame, body in read_frames(segment.file, segment.header.size, end):
        if expected >= stop:
            return
        if frame is None:
            yield "corrupt", position, "there is no batch where one should be", expected
            continue
        first = segment.place.base + frame.relative
        if not body_is_sound(frame, body):
            yield (
                "corrupt",
                position,
                f"the checksum of offsets {first} to {first + frame.span - 1} does not fit",
                first,
            )
        if any(
            segment.file.read(
                frame.frame_bytes - HEADER_BYTES - frame.body_bytes,
                position + HEADER_BYTES + frame.body_bytes,
            )
        ):
            yield (
                "corrupt",
                position + HEADER_BYTES + frame.body_bytes,
                "the filling behind a batch is not empty; the batch is sound",
                first,
            )
        if first < expected or (first > expected and not segment.may_have_gaps):
            yield "missing", position, f"offsets {expected} to {first - 1} are not there", expected
        expected = first + frame.span
    if (expected < stop and not segment.may_have_gaps) or segment.is_cut:
        yield (
            "missing",
            min(end, segment.file.size()),
            f"the file ends before offset {stop}",
            expected,
        )


def _index(segment: Segment, topic: str, number: int) -> Iterator[Finding]:
    path = segment.path.with_suffix(INDEX_SUFFIX)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    if FrameIndex.from_bytes(data, segment.header.id, segment.file.size()) is None:
        yield Finding(
            "stale",
            str(path),
            0,
            "this index does not fit its segment; it will be built again",
            topic,
            number,
            segment.place.base,
        )
