"""Compaction: only the newest row of each key stays. The rules are Kafka's: the open segment is
left alone, tombstones stay for a while, offsets never change.

    before      offset 0 a=1   1 b=1   2 a=2   3 delete b   4 a=3
    after       offset                         3 delete b   4 a=3
    a day on    offset                                      4 a=3

Sealed segments are rewritten into a new file that takes the name of the first of them, as many as
fit into one segment; then the others are removed. Readers have the one or the other: until it is
removed, a segment only has rows that the new file has too, or that a newer row supersedes. The new
file's header says where it ends, so a segment that is missing behind it is noticed.

Only segments that no journal record since the last checkpoint refers to are rewritten: recovery
would write into the others. `excise` rewrites segments one by one, to remove personal data
(`headrace.events.privacy`). Background runs are in `maintenance`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import (
    CHANGE_TYPE,
    DELETE,
    HEADERS_COLUMN,
    OFFSET_COLUMN,
    TIMESTAMP_COLUMN,
    TIMESTAMP_TYPE,
)
from headrace.errors import CorruptionError
from headrace.log.file.disk import Buffer
from headrace.log.file.segment import (
    COMPACTED,
    CONTROL,
    EXCISED,
    INDEX_SUFFIX,
    SPARSE,
    Frame,
    FrameHeader,
    Segment,
    SegmentInfo,
    body_is_sound,
    decode_batch,
    encode_batch,
    is_gap,
    list_segments,
    new_segment_header,
    read_frames,
)
from headrace.log.partitioning import key_bytes

if TYPE_CHECKING:
    from headrace.log.file.handle import LogHandle
    from headrace.log.file.state import TopicState


def is_compacted(topic: TopicState) -> bool:
    """Whether a topic's settings ask for compaction."""
    return topic.info.compact or topic.info.history_us is not None


def whole_from(log: LogHandle, topic: TopicState, number: int) -> int:
    """The offset behind the newest segment that was ever compacted; the partition's start if none
    was.
    """
    partition = topic.partitions[number]
    directory = log.store.partition_directory(topic.directory, number)
    stop = partition.segment  # the open segment is never compacted
    for info in reversed(list_segments(directory, partition.segment, begun=False)):
        # The file is opened anew: an open one may have been replaced since.
        try:
            segment = Segment(log.store.disk, directory / info.name)
        except FileNotFoundError:  # retention has removed it
            return max(stop, partition.start)
        flags = segment.header.flags
        segment.close()
        if flags & COMPACTED:
            return max(stop, partition.start)
        stop = info.base
    return partition.start


def compact_partition(log: LogHandle, topic: TopicState, number: int) -> tuple[int, int]:
    """Compact a partition. Returns how many segments were rewritten, and how many rows removed."""
    segments = _open_segments(log, topic, number, compactable_segments(log, topic, number))
    if not segments:
        return 0, 0
    try:
        newest = _newest_offsets(segments, topic)
        now_us = log.store.clock.now_us()

        def keep(batch: pa.RecordBatch) -> pa.BooleanArray:
            return _is_current(batch, topic, newest, now_us)

        superseded_to = (pc.max(newest["offset_max"]).as_py() or 0) + 1
        rewrite = _Rewrite(log, topic, number, COMPACTED, superseded_to)
        for segment in segments:
            rewrite.add(segment, keep)
        rewrite.finish()
    except CorruptionError:
        return 0, 0  # leave damaged files as they are: a reader or `log verify` reports them
    finally:
        for segment in segments:
            segment.close()
    if rewrite.segments:
        log.cache.forget(topic.directory, number)
    return rewrite.segments, rewrite.rows


def excise(
    log: LogHandle,
    topic: TopicState,
    number: int,
    keep: Callable[[pa.RecordBatch], pa.BooleanArray],
    *,
    flag: int = EXCISED,
) -> int:
    """Remove the rows of a partition's sealed segments for which `keep` says false. Offsets do not
    change. Returns how many rows were removed. With the flag COMPACTED, the partition is whole only
    from there on (`whole_from`).

    Segments that recovery might write into are left alone: the caller makes a checkpoint first.
    """
    rewrite = _Rewrite(log, topic, number, flag)
    segments = _open_segments(log, topic, number, _sealed_segments(log, topic, number))
    try:
        for segment in segments:
            rewrite.add(segment, keep)
            rewrite.finish()
    finally:
        for segment in segments:
            segment.close()
    log.cache.forget(topic.directory, number)
    return rewrite.rows


# Which segments


def compactable_segments(log: LogHandle, topic: TopicState, number: int) -> list[SegmentInfo]:
    """The sealed segments, from the oldest on, that are older than the history to keep and that
    recovery will not write into.
    """
    segments = _sealed_segments(log, topic, number)
    if topic.info.history_us is None:
        return segments
    limit_us = log.store.clock.now_us() - topic.info.history_us

    def is_old(info: SegmentInfo) -> bool:
        segment = log.cache.segment(topic.directory, number, info.name)
        times = segment.index(segment.file.size(), sealed=True).times
        return not times or times[-1] < limit_us

    return list(takewhile(is_old, segments))


def _sealed_segments(log: LogHandle, topic: TopicState, number: int) -> list[SegmentInfo]:
    """The sealed segments, from the oldest on, up to the first that recovery might write into."""
    with log.store.locked() as newest:
        state = newest.state
        written = {
            name
            for directory, partition, name in state.dirty | state.dirty_before
            if (directory, partition) == (topic.directory, number)
        }
        active = state.topic(topic.name).partitions[number].segment
    path = log.store.partition_directory(topic.directory, number)
    segments = list_segments(path, active, begun=False)
    return list(takewhile(lambda info: info.name not in written, segments))


def _open_segments(
    log: LogHandle, topic: TopicState, number: int, infos: list[SegmentInfo]
) -> list[Segment]:
    """Segments, opened. One whose rows are in the segment before it is removed: compaction was
    killed before it could.
    """
    directory = log.store.partition_directory(topic.directory, number)
    segments: list[Segment] = []
    for info in infos:
        if segments and info.base < (segments[-1].header.stop or 0):
            remove_segment(log, directory / info.name)
        else:
            segments.append(Segment(log.store.disk, directory / info.name))
    return segments


def remove_segment(log: LogHandle, path: Path) -> None:
    """Unlink a segment's file, after its index."""
    log.store.disk.unlink(path.with_suffix(INDEX_SUFFIX))
    log.store.disk.unlink(path)


# Which rows


def _newest_offsets(segments: list[Segment], topic: TopicState) -> pa.Table:
    """The newest offset of each key, as columns `key` and `offset_max`. The table is reduced to one
    row per key after each segment, which bounds its size.
    """
    newest = pa.table({"key": pa.array([], pa.binary()), "offset_max": pa.array([], pa.int64())})
    for segment in segments:
        tables = [newest]
        for header, body in _sound_frames(segment):
            if header.kind != CONTROL:
                batch = _rows_with_offsets(segment, header, body)
                keys = key_bytes(batch, topic.info.key)
                tables.append(pa.table({"key": keys, "offset_max": batch.column(OFFSET_COLUMN)}))
        grouped = pa.concat_tables(tables).group_by("key").aggregate([("offset_max", "max")])
        newest = grouped.select(["key", "offset_max_max"]).rename_columns(["key", "offset_max"])
    return newest.combine_chunks()


def _is_current(
    batch: pa.RecordBatch, topic: TopicState, newest: pa.Table, now_us: int
) -> pa.BooleanArray:
    """Whether each row is the newest of its key and not an expired tombstone. A row without a key
    is always kept.
    """
    keys = key_bytes(batch, topic.info.key)
    indices = pc.index_in(keys, value_set=newest["key"].combine_chunks())
    newest_offsets = newest["offset_max"].combine_chunks().take(indices)
    keep = pc.or_(pc.equal(batch.column(OFFSET_COLUMN), newest_offsets), pc.is_null(keys))
    if topic.info.is_table:
        limit_us = pa.scalar(now_us - topic.info.tombstone_us, pa.int64())
        is_expired = pc.and_(
            pc.equal(batch.column(CHANGE_TYPE), DELETE),
            pc.less(batch.column(TIMESTAMP_COLUMN), limit_us.cast(TIMESTAMP_TYPE)),
        )
        keep = pc.and_(keep, pc.invert(is_expired))
    return keep


# Rewriting segments


@dataclass(slots=True)
class _RewrittenFrame:
    frame: Frame
    first: int
    time_us: int
    commit: int


class _Rewrite:
    """Rewrites segments of a partition, given one after the other, into as few files as will do.

    Attributes:
        segments: How many segments were rewritten or removed so far.
        rows: How many rows were removed.
        superseded_to: Rows before this offset may be newer ones of the keys of removed rows.
    """

    def __init__(
        self, log: LogHandle, topic: TopicState, number: int, flag: int, superseded_to: int = 0
    ) -> None:
        self.log, self.topic, self.number, self.flag = log, topic, number, flag
        self._superseded_to = superseded_to
        self.segments = self.rows = 0
        self._group: list[Segment] = []
        self._frames: list[_RewrittenFrame] = []
        self._removed = 0
        self._stop = 0

    def add(self, segment: Segment, keep: Callable[[pa.RecordBatch], pa.BooleanArray]) -> None:
        """Add a segment to the file that is to be written, without the rows for which `keep` says
        false; or write the file, and begin the next one with it.
        """
        frames, removed, stop = self._filter(segment, keep)
        size = sum(item.frame.frame_bytes for item in (*self._frames, *frames))
        if self._group and (
            size > self.topic.info.segment_bytes
            or segment.info.base != self._stop  # one is missing in between
            or not segment.header.schema.equals(self._group[0].header.schema)
        ):
            self.finish()
        self._group.append(segment)
        self._frames += frames
        self._removed += removed
        self._stop = stop

    def finish(self) -> None:
        """Write the file with what was added since the last one. A segment that is alone and has
        lost nothing stays as it is.
        """
        if len(self._group) > 1 or self._removed:
            self._write()
            self.segments += len(self._group)
            self.rows += self._removed
        self._group, self._frames, self._removed = [], [], 0

    def _filter(
        self, segment: Segment, keep: Callable[[pa.RecordBatch], pa.BooleanArray]
    ) -> tuple[list[_RewrittenFrame], int, int]:
        """A segment's frames with the rows to keep, how many rows were removed, and the offset
        behind the segment.
        """
        rewritten: list[_RewrittenFrame] = []
        removed = 0
        stop = segment.info.base
        for header, body in _sound_frames(segment):
            first = segment.info.base + header.relative
            stop = first + header.span
            time_us = header.first_us or segment.info.time_us
            if is_gap(header):
                continue  # a rewritten segment may have gaps
            if header.kind == CONTROL:
                control = Frame(kind=CONTROL, flags=0, count=1, body=body, body_crc=header.body_crc)
                rewritten.append(
                    _RewrittenFrame(
                        frame=control, first=first, time_us=time_us, commit=header.commit
                    )
                )
                continue
            batch = _rows_with_offsets(segment, header, body)
            kept = batch.filter(keep(batch))
            removed += batch.num_rows - kept.num_rows
            if kept.num_rows:
                offsets = kept.column(OFFSET_COLUMN)
                first, last = offsets[0].as_py(), offsets[-1].as_py()
                # These come last, in the order of `segment.body_schema`.
                last_columns = [
                    name
                    for name in (HEADERS_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN)
                    if name in kept.schema.names
                ]
                columns = [name for name in kept.schema.names if name not in last_columns]
                frame = encode_batch(
                    kept.select(columns + last_columns), compression=self.topic.info.compression
                )
                frame.span = last - first + 1
                frame.producer = header.producer
                frame.epoch = header.epoch
                frame.sequence = header.sequence
                commit = header.commit or segment.info.commit
                rewritten.append(
                    _RewrittenFrame(frame=frame, first=first, time_us=time_us, commit=commit)
                )
        return rewritten, removed, self._stop_of(segment, stop)

    def _stop_of(self, segment: Segment, behind_frames: int) -> int:
        """The offset behind a segment: behind its last frame, unless rows may be missing there."""
        if not segment.may_have_gaps:
            return behind_frames
        if segment.header.stop is not None:
            return segment.header.stop
        # Rewritten by a version that did not record it: up to the next segment.
        partition = self.topic.partitions[self.number]
        directory = segment.path.parent
        bases = [
            info.base
            for info in list_segments(directory, partition.segment, begun=partition.position > 0)
        ]
        return min((base for base in bases if base > segment.info.base), default=partition.end)

    def _write(self) -> None:
        """Write and sync a new file, rename it over the first segment, and remove the others: a
        crash leaves rows in one file or in both, which is the same for readers.
        """
        first, *others = self._group
        flags, superseded_to = self.flag, self._superseded_to
        for segment in self._group:
            flags |= segment.header.flags
            superseded_to = max(superseded_to, segment.header.superseded_to or 0)
        header = new_segment_header(
            self.topic.name,
            self.number,
            first.header.schema,
            self.topic.settings,
            flags=flags,
            stop=self._stop,
            superseded_to=superseded_to or None,
        ).encode(sum(item.frame.frame_bytes for item in self._frames))
        buffers: list[Buffer] = [header]
        position = len(header)
        for item in self._frames:
            buffers += item.frame.buffers(
                item.first - first.info.base,
                position,
                commit=item.commit,
                first_us=item.time_us,
                last_us=item.time_us,
            )
            position += item.frame.frame_bytes
        self.log.store.disk.replace_file(first.path, buffers)
        self.log.store.disk.unlink(first.path.with_suffix(INDEX_SUFFIX))
        for segment in others:
            remove_segment(self.log, segment.path)


def _sound_frames(segment: Segment) -> Iterator[tuple[FrameHeader, memoryview]]:
    """The frames of a segment. Raises CorruptionError for a damaged one."""
    for position, header, body in read_frames(
        segment.file, segment.header.size, segment.file.size()
    ):
        if header is None or not body_is_sound(header, body):
            raise CorruptionError(f"{segment.path} is damaged at byte {position}.")
        yield header, body


def _rows_with_offsets(segment: Segment, header: FrameHeader, body: memoryview) -> pa.RecordBatch:
    """A frame's rows with the columns `_offset` and `_timestamp`."""
    batch = decode_batch(header, body, segment.header.schema)
    if header.flags & SPARSE:
        return batch
    first = segment.info.base + header.relative
    time_us = header.first_us or segment.info.time_us
    offsets = pa.array(np.arange(first, first + batch.num_rows, dtype=np.int64))
    times = pa.array(np.full(batch.num_rows, time_us, np.int64)).cast(TIMESTAMP_TYPE)
    return batch.append_column(OFFSET_COLUMN, offsets).append_column(TIMESTAMP_COLUMN, times)
