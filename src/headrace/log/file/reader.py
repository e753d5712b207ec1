"""Reading rows: from offsets to segments to frames to Arrow batches, in bounded memory whatever a
topic's size.

`PartitionReader` yields the frames of one partition as of a state; `FileBatches` turns the frames
of one or more partitions into batches. Both are used by `FileLog.read`, consumers and queues.
Damaged bytes are copied into quarantine, then raised as CorruptBatch or skipped.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import pyarrow as pa

from headrace.columnar.columns import (
    OFFSET_COLUMN,
    PARTITION_COLUMN,
    TIMESTAMP_COLUMN,
    TIMESTAMP_TYPE,
)
from headrace.durations import from_us
from headrace.errors import (
    BadPartition,
    CorruptBatch,
    CorruptionError,
    HeadraceError,
    InputError,
    OffsetOutOfRange,
)
from headrace.log.api import Batches
from headrace.log.file.segment import (
    CONTROL,
    SPARSE,
    FrameHeader,
    FrameIndex,
    Segment,
    SegmentInfo,
    body_is_sound,
    decode_batch,
    is_gap,
    list_segment_names,
    segment_name,
    stored_column,
)
from headrace.log.file.state import PartitionState, TopicState
from headrace.log.file.store import Store
from headrace.log.values import ControlRecord, TopicInfo, selected_columns

logger = logging.getLogger("headrace.log")
_MAX_OPEN_SEGMENTS = 64
_COALESCED_BYTES = 1 << 20
"""Small frames are concatenated into batches of about this size."""
_MAX_QUARANTINED_BYTES = 64 << 20


@dataclass(slots=True)
class StoredFrame:
    """A sound frame, with the offset of its first row."""

    segment: Segment
    header: FrameHeader
    body: memoryview
    first: int

    @property
    def stop(self) -> int:
        return self.first + self.header.span

    @property
    def time_us(self) -> int:
        return self.header.first_us or self.segment.info.time_us


class _SegmentMerged(Exception):
    """Compaction has moved a segment's rows into the one before it since the segments were listed:
    look again.
    """


class SegmentCache:
    """Open segments, a bounded number of them, and lists of the segments of partitions.

    A file that was removed stays readable for whoever has it open. A file that was replaced is
    opened again when it is next requested.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._guard = Lock()
        self._open: OrderedDict[tuple[str, int, str], Segment] = OrderedDict()
        self._names: dict[tuple[str, int], tuple[tuple[int, bool], list[str]]] = {}

    def names(self, directory: str, partition: int, state: PartitionState) -> list[str]:
        """The file names of a partition's segments, in order of their offsets.

        They are listed again only when the open segment is another one: only then can there be new
        ones.
        """
        open_segment = (state.segment, state.position > 0)
        cached = self._names.get((directory, partition))
        if cached is None or cached[0] != open_segment:
            path = self.store.partition_directory(directory, partition)
            names = list_segment_names(path, state.segment, begun=state.position > 0)
            cached = self._names[directory, partition] = (open_segment, names)
        return cached[1]

    def segment(self, directory: str, partition: int, name: str) -> Segment:
        """An open segment. Raises FileNotFoundError and CorruptionError."""
        key = (directory, partition, name)
        with self._guard:
            segment = self._open.get(key)
            if segment is None or segment.is_replaced:
                path = self.store.partition_directory(directory, partition) / name
                segment = self._open[key] = Segment(self.store.disk, path)
            self._open.move_to_end(key)
            if len(self._open) > _MAX_OPEN_SEGMENTS:
                self._open.popitem(last=False)
        return segment

    def forget(self, directory: str, partition: int) -> None:
        """Drop everything about a partition: its segments were replaced or removed."""
        with self._guard:
            self._names.pop((directory, partition), None)
            for key in [key for key in self._open if key[:2] == (directory, partition)]:
                del self._open[key]

    def close(self) -> None:
        with self._guard:
            self._open.clear()
            self._names.clear()


class PartitionReader:
    """Reads one partition as of a state: offsets from `start` to `end` exist, except those that
    compaction removed.
    """

    def __init__(self, cache: SegmentCache, topic: TopicState, number: int) -> None:
        if not 0 <= number < len(topic.partitions):
            raise BadPartition(
                f"The topic {topic.name!r} has no partition {number}.",
                fix=f"name one from 0 to {len(topic.partitions) - 1}.",
            )
        self.cache = cache
        self.topic = topic
        self.number = number
        self.state = topic.partitions[number]
        self._open_is_merged = False

    def check_start(self, offset: int) -> None:
        """Raise OffsetOutOfRange for an offset from which this partition cannot be read."""
        if not self.state.start <= offset <= self.state.end:
            raise OffsetOutOfRange(
                self.topic.name, self.number, offset, self.state.start, self.state.end
            )

    # Frames

    def frames(self, start: int, stop: int, *, on_corrupt: str) -> Iterator[StoredFrame]:
        """The frames that have offsets from `start` to `stop`. Damage goes to quarantine and is
        then raised or, with `on_corrupt="skip"`, logged.
        """
        offset = start
        while offset < stop:
            info, segment_stop = self._find_segment(offset)
            if info is None:
                self._check_retained(offset)
                self._report_damage(
                    offset, segment_stop, "", 0, "its segment is missing", on_corrupt
                )
            else:
                try:
                    yield from self._segment_frames(
                        info, offset, min(stop, segment_stop), on_corrupt
                    )
                except _SegmentMerged:  # nothing of it was read yet
                    continue
            offset = max(segment_stop, offset + 1)

    def _segment_frames(
        self, info: SegmentInfo, start: int, stop: int, on_corrupt: str
    ) -> Iterator[StoredFrame]:
        path = self.cache.store.partition_directory(self.topic.directory, self.number) / info.name
        try:
            segment = self._open_segment(info)
        except CorruptionError as error:
            self._report_damage(start, stop, str(path), 0, error.message, on_corrupt)
            return
        limit, sealed = self._readable_bytes(segment)
        expected = start
        broken_at = -1
        reason = ""
        for position, header, body in segment.frames(start - info.base, limit, sealed=sealed):
            if header is None:
                broken_at, reason = position, "there is no batch where one should be"
                continue
            first = info.base + header.relative
            if first + header.span <= start:
                continue
            if first >= stop:
                break
            if first > expected and (broken_at >= 0 or not segment.may_have_gaps):
                self._report_damage(
                    expected,
                    first,
                    str(path),
                    max(broken_at, 0),
                    reason or "it is not there",
                    on_corrupt,
                )
            broken_at = -1
            if body_is_sound(header, body):
                yield StoredFrame(segment=segment, header=header, body=body, first=first)
            else:
                self._report_damage(
                    first,
                    first + header.span,
                    str(path),
                    position,
                    "its checksum does not fit",
                    on_corrupt,
                )
            expected = first + header.span
        segment_end = segment.header.stop
        if segment_end is not None and expected < segment_end <= stop:
            expected = segment_end if broken_at < 0 and not segment.is_truncated else expected
        may_end_early = (
            segment.may_have_gaps
            and not segment.is_truncated
            and (segment_end is None or segment_end >= stop)
        )
        if expected < stop and segment_end == expected:
            reason = "the segment behind this one is missing"
        if expected < stop and (broken_at >= 0 or not may_end_early):
            self._report_damage(
                expected,
                stop,
                str(path),
                max(broken_at, 0),
                reason or "the file is too short",
                on_corrupt,
            )

    def _report_damage(
        self, first: int, stop: int, file: str, position: int, reason: str, on_corrupt: str
    ) -> None:
        error = CorruptBatch(
            topic=self.topic.name,
            partition=self.number,
            first=first,
            stop=stop,
            file=file,
            position=position,
            why=reason,
        )
        quarantine(self.cache.store, error, reason)
        if on_corrupt == "raise":
            raise error
        logger.error("Skipped: %s", error.message)

    def controls(self, start: int, stop: int) -> Iterator[ControlRecord]:
        """The control records with offsets from `start` to `stop`."""
        for frame in self.frames(start, stop, on_corrupt="raise"):
            is_control = frame.header.kind == CONTROL and not is_gap(frame.header)
            if is_control and start <= frame.first < stop:
                yield ControlRecord(
                    partition=self.number,
                    offset=frame.first,
                    timestamp=from_us(frame.time_us),
                    payload=bytes(frame.body),
                )

    def count_rows(self) -> int:
        """The number of rows from the start to the end. What is damaged does not count."""
        while True:
            self.cache.forget(self.topic.directory, self.number)  # others may have merged segments
            try:
                return self._count_rows()
            except _SegmentMerged:
                continue

    def _count_rows(self) -> int:
        rows = covered = 0
        for name in self._segment_names():
            info = SegmentInfo.parse(name)
            if info.base < covered:  # its rows are in the segment before
                continue
            try:
                segment = self._open_segment(info)
            except (CorruptionError, OffsetOutOfRange):
                continue
            covered = segment.header.stop or 0
            limit, _ = self._readable_bytes(segment)
            rows += segment.count_rows(limit)
            if info.base < self.state.start:
                rows -= segment.count_rows(limit, self.state.start - info.base)
        return rows

    # Times

    def first_since(self, time_us: int) -> int:
        """The first offset appended at or after a time; the end, if there is none."""
        while True:
            try:
                return self._first_since(time_us)
            except _SegmentMerged:
                continue

    def _first_since(self, time_us: int) -> int:
        names = self._segment_names()
        first_retained = max(0, bisect_right(names, f"{self.state.start:020d}/") - 1)
        low, high = first_retained, bisect_right(names, f"{max(0, self.state.end - 1):020d}/")
        # Within a step of a clock, times do not rise from segment to segment: find where it began.
        steady_us = self.cache.store.view().steady_time_us(time_us)
        while low < high:  # find the first segment that begins at or after that time
            middle = (low + high) // 2
            info = SegmentInfo.parse(names[middle])
            begin_us = info.time_us or self._index(info).time_of(0)  # of its first row
            if begin_us is not None and begin_us < steady_us:
                low = middle + 1
            else:
                high = middle
        for name in names[max(first_retained, low - 1) :]:
            info = SegmentInfo.parse(name)
            relative = self._index(info).first_since(time_us)
            if relative is not None:
                return max(self.state.start, info.base + relative)
        return self.state.end

    def time_of(self, offset: int) -> int | None:
        """When the row at an offset was appended; None if there is none."""
        while True:
            info, _ = self._find_segment(offset)
            if info is None or offset >= self.state.end:
                return None
            try:
                return self._index(info).time_of(offset - info.base)
            except _SegmentMerged:
                continue

    # Segments

    def _segment_names(self) -> list[str]:
        return self.cache.names(self.topic.directory, self.number, self.state)

    def _find_segment(self, offset: int) -> tuple[SegmentInfo | None, int]:
        """The segment that has an offset, and the offset at which the next one begins."""
        is_open = self.state.position and offset >= self.state.segment
        if is_open and not self._open_is_merged:  # the open segment: no listing
            name = segment_name(self.state.segment)
            return SegmentInfo(name, self.state.segment), self.state.end
        names = self._segment_names()
        # A slash sorts behind the dot that follows the base in a file name.
        index = bisect_right(names, f"{offset:020d}/") - 1
        stop = self.state.end
        if index + 1 < len(names):
            stop = min(stop, SegmentInfo.parse(names[index + 1]).base)
        return SegmentInfo.parse(names[index]) if index >= 0 else None, stop

    def _open_segment(self, info: SegmentInfo) -> Segment:
        """Open a segment. Raises OffsetOutOfRange if retention has removed it meanwhile,
        _SegmentMerged if compaction has, and CorruptionError if it is missing.
        """
        try:
            return self.cache.segment(self.topic.directory, self.number, info.name)
        except FileNotFoundError:
            self.cache.forget(self.topic.directory, self.number)
            self._check_retained(info.base)
            # Since this reader began, its open segment may have been sealed and merged too.
            self._open_is_merged = self._open_is_merged or info.base == self.state.segment
            found, _ = self._find_segment(info.base)
            if found is not None and found.base < info.base:
                merged = self.cache.segment(self.topic.directory, self.number, found.name)
                if merged.header.stop is not None and merged.header.stop > info.base:
                    raise _SegmentMerged from None
            raise CorruptionError(
                f"The segment {info.name} of {self.topic.name}[{self.number}] is missing.",
                fix="restore it from a backup.",
            ) from None

    def _check_retained(self, offset: int) -> None:
        """Raise OffsetOutOfRange if retention has removed an offset since this reader began."""
        start = self.cache.store.view().topic(self.topic.name).partitions[self.number].start
        if start > offset:
            raise OffsetOutOfRange(
                self.topic.name, self.number, offset, start, self.state.end
            ) from None

    def _readable_bytes(self, segment: Segment) -> tuple[int, bool]:
        """The position up to which a segment may be read, and whether it is sealed."""
        is_open = segment.info.base == self.state.segment and not segment.info.commit
        if is_open and not segment.may_have_gaps:  # compacted: sealed since, and other bytes
            return self.state.position, False
        return segment.file.size(), True

    def _index(self, info: SegmentInfo) -> FrameIndex:
        segment = self._open_segment(info)
        limit, sealed = self._readable_bytes(segment)
        return segment.index(limit, sealed=sealed)


def quarantine(store: Store, damage: CorruptBatch, reason: str) -> None:
    """Store a description and a copy of damaged bytes, for a person to look at. Best effort: the
    disk may be read-only.
    """
    directory = store.root / "quarantine"
    name = f"{damage.topic}-{damage.partition}-{damage.first}"
    note = {
        "topic": damage.topic,
        "partition": damage.partition,
        "first": damage.first,
        "stop": damage.stop,
        "file": damage.file,
        "position": damage.position,
        "why": reason,
    }
    try:
        store.disk.make_directory(directory)
        if not (directory / f"{name}.json").exists():
            if damage.file:
                with open(damage.file, "rb") as source:
                    source.seek(damage.position)
                    content = source.read(_MAX_QUARANTINED_BYTES)
                (directory / f"{name}.bytes").write_bytes(content)
            (directory / f"{name}.json").write_text(json.dumps(note) + "\n")
    except (OSError, HeadraceError) as error:
        logger.warning("Could not put %s into quarantine: %s", name, error)


class FileBatches(Batches):
    """Rows of one or more partitions as Arrow batches: the topic's columns, then the system's."""

    def __init__(
        self,
        info: TopicInfo,
        ranges: Sequence[tuple[PartitionReader, int, int]],
        *,
        columns: Sequence[str] | None = None,
        headers: bool = False,
        on_corrupt: str = "raise",
    ) -> None:
        if on_corrupt not in {"raise", "skip"}:
            raise InputError(f"on_corrupt is {on_corrupt!r}.", fix="use 'raise' or 'skip'.")
        self.ranges = ranges
        self.on_corrupt = on_corrupt
        self.schema, self._names = selected_columns(info, columns, headers=headers)
        self._history = info.schema_history

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for reader, start, stop in self.ranges:
            small: list[pa.RecordBatch] = []  # batches to be concatenated
            small_bytes = 0
            for frame in reader.frames(start, stop, on_corrupt=self.on_corrupt):
                if frame.header.kind == CONTROL:
                    continue
                batch = self._decode(frame, reader.number, start, stop)
                if batch.num_rows:
                    small.append(batch)
                    small_bytes += frame.header.body_bytes
                if small_bytes >= _COALESCED_BYTES:
                    yield _concat(small)
                    small, small_bytes = [], 0
            if small:
                yield _concat(small)

    def _decode(self, frame: StoredFrame, partition: int, start: int, stop: int) -> pa.RecordBatch:
        """A frame's rows with offsets from `start` to `stop`, with the selected columns as the
        topic has them now.
        """
        stored = decode_batch(frame.header, frame.body, frame.segment.header.schema)
        count = stored.num_rows
        if frame.header.flags & SPARSE:
            offsets = stored.column(OFFSET_COLUMN)
            timestamps = stored.column(TIMESTAMP_COLUMN)
        else:
            offsets = pa.array(np.arange(frame.first, frame.first + count, dtype=np.int64))
            timestamps = pa.array(np.full(count, frame.time_us, np.int64)).cast(TIMESTAMP_TYPE)
        system = {
            PARTITION_COLUMN: pa.array(np.full(count, partition, np.int32)),
            OFFSET_COLUMN: offsets,
            TIMESTAMP_COLUMN: timestamps,
        }
        arrays = []
        written = frame.segment.header.schema_history
        for field, name in zip(self.schema, self._names, strict=True):
            if name in system:
                arrays.append(system[name])
            else:
                arrays.append(stored_column(stored, field, name, self._history, written))
        batch = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        if frame.first >= start and frame.stop <= stop:
            return batch
        low, high = np.searchsorted(offsets.to_numpy(zero_copy_only=False), [start, stop])
        return batch.slice(int(low), int(high - low))


def _concat(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
