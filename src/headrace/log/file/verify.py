"""Checking everything a log has stored, byte by byte: the journal, its checkpoints, every segment and index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.errors import CorruptionError
from headrace.log.api import Finding
from headrace.log.file import checkpoint
from headrace.log.file.frame import HEADER_BYTES, body_is_sound
from headrace.log.file.journal import FILE_HEADER_BYTES, ROLL, Damage, Journal, MissingJournal, journal_name
from headrace.log.file.marker import Mark
from headrace.log.file.segment import INDEX_SUFFIX, FrameIndex, Segment, SegmentPlace, damaged_copy, read_frames, segments_in

if TYPE_CHECKING:
    from headrace.log.file.log import FileLog
    from headrace.log.file.state import TopicState


def verify_log(log: FileLog, topic: str | None) -> list[Finding]:
    """Every damage there is; an empty list is a sound log."""
    log.store.check_open()
    mark = log.store.marker.read()
    state = log.store.view()  # sets a damaged mark right
    topics = [state.topic(topic)] if topic is not None else list(state.topics.values())
    findings = [] if topic is not None else [*_marker(log, mark), *_journal(log), *_checkpoints(log)]
    for each in topics:
        for number in range(len(each.partitions)):
            findings += _partition(log, each, number)
    return findings


def _marker(log: FileLog, mark: Mark | None) -> Iterator[Finding]:
    if mark is None:
        yield Finding("corrupt", str(log.store.marker.path), 0, "how far the journal is durable cannot be read")


def _journal(log: FileLog) -> Iterator[Finding]:
    journal = Journal(log.store.disk, log.store.journal_directory, write=False)
    mark = log.store.marker.read()
    bases = journal.bases()
    for base, following in zip(bases, [*bases[1:], None], strict=False):
        try:
            yield from _journal_file(journal, base, mark.lsn if mark else 0, is_last=following is None)
        except MissingJournal:
            path = log.store.journal_directory / journal_name(base)
            if following is not None and path.exists():  # otherwise it was forgotten just now, or its maker was stopped before it was used
                yield Finding("missing", str(path), 0, "this part of the commit journal is gone")
    journal.close()


def _journal_file(journal: Journal, base: int, durable: int, *, is_last: bool) -> Iterator[Finding]:
    """One file of the journal: up to what is known to be durable, if it is the last one; otherwise it must end in the record that names the next."""
    file, first = journal.file_at(base), base + FILE_HEADER_BYTES
    if not journal.header_is_sound(base):
        yield Finding("corrupt", str(file.path), 0, "the header of this part of the commit journal is damaged")
    end, limit = first, journal.end_of(base)
    for item in journal.records(base, first, min(limit, max(durable, first)) if is_last else limit):
        if isinstance(item, Damage):
            yield Finding("corrupt", item.file, item.position, "the commit journal is damaged here")
            end = item.after or limit
            continue
        if any(item.filling) or item.end > limit:
            yield Finding(
                "corrupt", str(file.path), item.end - base - len(item.filling), "the filling behind a record is not empty; the record is sound"
            )
        end = item.end
        if item.kind == ROLL:
            return
    if not is_last or end < durable:
        yield Finding("missing", str(file.path), end - base, "the commit journal ends too early")


def _checkpoints(log: FileLog) -> Iterator[Finding]:
    directory = log.store.journal_directory
    for lsn in checkpoint.positions(directory):
        if checkpoint.load(directory, lsn) is None:
            path = directory / f"{lsn:020d}{checkpoint.SUFFIX}"
            if path.exists():  # not just forgotten
                yield Finding("corrupt", str(path), 0, "this checkpoint is damaged; the one before it will be used")


def _partition(log: FileLog, topic: TopicState, number: int) -> Iterator[Finding]:
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


def _segment(log: FileLog, topic: TopicState, number: int, place: SegmentPlace, stop: int) -> Iterator[Finding]:
    partition = topic.partitions[number]
    path = log.store.partition_directory(topic.directory, number) / place.name
    is_active = place.base == partition.segment and not place.commit
    try:
        segment = Segment(log.store.disk, path)
    except CorruptionError as error:
        yield Finding("corrupt", str(path), 0, error.message, topic.name, number, place.base)
        return
    except FileNotFoundError:  # retention was here first, or it will be missed as offsets that are in no segment
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
    """(kind, position, message, offset) of each damage in a segment that should have offsets up to `stop`."""
    expected = segment.place.base
    damaged = damaged_copy(segment.file)
    if damaged is not None:
        yield "corrupt", damaged, "one of the two copies of the segment's header is damaged", expected
    for position, frame, body in read_frames(segment.file, segment.header.size, end):
        if expected >= stop:
            return
        if frame is None:
            yield "corrupt", position, "there is no batch where one should be", expected
            continue
        first = segment.place.base + frame.relative
        if not body_is_sound(frame, body):
            yield "corrupt", position, f"the checksum of offsets {first} to {first + frame.span - 1} does not fit", first
        if any(segment.file.read(frame.frame_bytes - HEADER_BYTES - frame.body_bytes, position + HEADER_BYTES + frame.body_bytes)):
            yield "corrupt", position + HEADER_BYTES + frame.body_bytes, "the filling behind a batch is not empty; the batch is sound", first
        if first < expected or (first > expected and not segment.may_have_gaps):
            yield "missing", position, f"offsets {expected} to {first - 1} are not there", expected
        expected = first + frame.span
    if (expected < stop and not segment.may_have_gaps) or segment.is_cut:
        yield "missing", min(end, segment.file.size()), f"the file ends before offset {stop}", expected


def _index(segment: Segment, topic: str, number: int) -> Iterator[Finding]:
    path = segment.path.with_suffix(INDEX_SUFFIX)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    if FrameIndex.from_bytes(data, segment.header.id, segment.file.size()) is None:
        yield Finding("stale", str(path), 0, "this index does not fit its segment; it will be built again", topic, number, segment.place.base)
