"""Compaction: of the rows of one key only the newest stays. By Kafka's rules: the head is left
alone, tombstones stay for a while, offsets never change.

A sealed segment is written anew beside the old one and then takes its name, so that readers have
the one or the other. Only segments that no journal record since the last checkpoint speaks of are
touched: recovery would write into them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    SegmentPlace,
    body_is_sound,
    decode_batch,
    encode_batch,
    new_header,
    read_frames,
    segments_in,
)
from headrace.log.file.store import now_us
from headrace.log.partitioning import key_bytes

if TYPE_CHECKING:
    from headrace.log.file.handle import LogHandle
    from headrace.log.file.state import TopicState


def is_compacted(topic: TopicState) -> bool:
    return topic.info.compact or topic.info.history_us is not None


def whole_from(log: LogHandle, topic: TopicState, number: int) -> int:
    """The offset behind the newest segment that was ever compacted; if none was, the partition's
    start.
    """
    partition = topic.partitions[number]
    directory = log.store.partition_directory(topic.directory, number)
    end = partition.segment  # the one being written is never compacted
    for place in reversed(segments_in(directory, partition.segment, begun=False)):
        if _was_compacted(log, directory / place.name):
            return max(end, partition.start)
        end = place.base
    return partition.start


def _was_compacted(log: LogHandle, path: Path) -> bool:
    """By the file as it is now: an open one may have been replaced since. One that is gone counts
    too.
    """
    try:
        segment = Segment(log.store.disk, path)
    except FileNotFoundError:
        return True
    try:
        return bool(segment.header.flags & COMPACTED)
    finally:
        segment.close()


def compact_partition(log: LogHandle, topic: TopicState, number: int) -> tuple[int, int]:
    """Returns how many segments were written anew, and how many rows went."""
    places = compactable(log, topic, number)
    if not places:
        return 0, 0
    segments = [
        Segment(log.store.disk, log.store.partition_directory(topic.directory, number) / place.name)
        for place in places
    ]
    try:
        newest = _newest_offsets(segments, topic)
        removed = [
            _rewrite(
                log, topic, number, segment, lambda batch: _kept(batch, topic, newest), COMPACTED
            )
            for segment in segments
        ]
    except CorruptionError:
        return 0, 0  # leave damaged files as they are: a reader or `log verify` will name them
    finally:
        for segment in segments:
            segment.close()
    if any(removed):
        log.cache.forget(topic.directory, number)
    return sum(count > 0 for count in removed), sum(removed)


def compactable(log: LogHandle, topic: TopicState, number: int) -> list[SegmentPlace]:
    """Sealed segments, from the oldest on, that are old enough and that recovery will not write
    into.
    """
    limit_us = now_us() - (topic.info.history_us or 0)
    return list(
        takewhile(
            lambda place: _is_older(log, topic, number, place, limit_us), sealed(log, topic, number)
        )
    )


def sealed(log: LogHandle, topic: TopicState, number: int) -> list[SegmentPlace]:
    """Sealed segments, from the oldest on, up to the first that recovery might write into."""
    with log.store.locked() as newest:
        state = newest.state
        touched = {
            name
            for directory, part, name in state.dirty | state.dirty_before
            if (directory, part) == (topic.directory, number)
        }
        active = state.topic(topic.name).partitions[number].segment
    places = segments_in(
        log.store.partition_directory(topic.directory, number), active, begun=False
    )
    return list(takewhile(lambda place: place.name not in touched, places))


def _is_older(
    log: LogHandle, topic: TopicState, number: int, place: SegmentPlace, limit_us: int
) -> bool:
    if topic.info.history_us is None:
        return True
    segment = log.cache.segment(topic.directory, number, place.name)
    times = segment.index(segment.file.size(), sealed=True).times
    return not times or times[-1] < limit_us


def _frames(segment: Segment) -> Iterator[tuple[FrameHeader, memoryview]]:
    for position, header, body in read_frames(
        segment.file, segment.header.size, segment.file.size()
    ):
        if header is None or not body_is_sound(header, body):
            raise CorruptionError(f"{segment.path} is damaged at byte {position}.")
        yield header, body


def _with_places(segment: Segment, header: FrameHeader, body: memoryview) -> pa.RecordBatch:
    """A frame's rows with their offsets and times as columns."""
    batch = decode_batch(header, body, segment.header.schema)
    if header.flags & SPARSE:
        return batch
    first = segment.place.base + header.relative
    time_us = header.first_us or segment.place.time_us
    offsets = pa.array(np.arange(first, first + batch.num_rows, dtype=np.int64))
    times = pa.array(np.full(batch.num_rows, time_us, np.int64)).cast(TIMESTAMP_TYPE)
    return batch.append_column(OFFSET_COLUMN, offsets).append_column(TIMESTAMP_COLUMN, times)


def _newest_offsets(segments: list[Segment], topic: TopicState) -> pa.Table:
    """For each key its newest offset; kept to one row a key as it goes."""
    newest = pa.table({"key": pa.array([], pa.binary()), "offset_max": pa.array([], pa.int64())})
    for segment in segments:
        found = [newest]
        for header, body in _frames(segment):
            if header.kind != CONTROL:
                batch = _with_places(segment, header, body)
                found.append(
                    pa.table(
                        {
                            "key": key_bytes(batch, topic.info.key),
                            "offset_max": batch.column(OFFSET_COLUMN),
                        }
                    )
                )
        grouped = pa.concat_tables(found).group_by("key").aggregate([("offset_max", "max")])
        newest = grouped.select(["key", "offset_max_max"]).rename_columns(["key", "offset_max"])
    return newest.combine_chunks()


def excise(
    log: LogHandle,
    topic: TopicState,
    number: int,
    kept: Callable[[pa.RecordBatch], pa.BooleanArray],
) -> int:
    """Remove rows for good from a partition's sealed segments: those that `kept` says false of.
    Offsets stay. Returns how many went.

    Segments that recovery might write into are left alone: the caller makes a checkpoint first.
    """
    directory, removed = log.store.partition_directory(topic.directory, number), 0
    for place in sealed(log, topic, number):
        segment = Segment(log.store.disk, directory / place.name)
        try:
            removed += _rewrite(log, topic, number, segment, kept, EXCISED)
        finally:
            segment.close()
    log.cache.forget(topic.directory, number)
    return removed


def _rewrite(
    log: LogHandle,
    topic: TopicState,
    number: int,
    segment: Segment,
    kept_of: Callable[[pa.RecordBatch], pa.BooleanArray],
    flag: int,
) -> int:
    """Write a segment's surviving rows into a new file that takes its place. Returns how many rows
    went; 0 leaves the file alone.
    """
    frames: list[tuple[Frame, int, int, int]] = []  # (frame, relative offset, time, commit)
    removed = 0
    for header, body in _frames(segment):
        if header.kind == CONTROL:
            frames.append(
                (
                    Frame(CONTROL, 0, 1, body, header.body_crc),
                    header.relative,
                    header.first_us or segment.place.time_us,
                    header.commit,
                )
            )
            continue
        batch = _with_places(segment, header, body)
        kept = batch.filter(kept_of(batch))
        removed += batch.num_rows - kept.num_rows
        if kept.num_rows:
            frames.append(_sparse_frame(kept, segment, header, topic))
    if removed:
        _replace(log, segment, topic, number, frames, flag)
    return removed


def _kept(batch: pa.RecordBatch, topic: TopicState, newest: pa.Table) -> pa.BooleanArray:
    """The newest row of each key, unless it is a tombstone that has been there long enough. A row
    without a key replaces none.
    """
    keys = key_bytes(batch, topic.info.key)
    at = pc.index_in(keys, value_set=newest["key"].combine_chunks())
    latest = newest["offset_max"].combine_chunks().take(at)
    keep = pc.or_(pc.equal(batch.column(OFFSET_COLUMN), latest), pc.is_null(keys))
    if topic.info.is_table:
        limit = pa.scalar(now_us() - topic.info.tombstone_us, pa.int64()).cast(TIMESTAMP_TYPE)
        expired = pc.and_(
            pc.equal(batch.column(CHANGE_TYPE), DELETE),
            pc.less(batch.column(TIMESTAMP_COLUMN), limit),
        )
        keep = pc.and_(keep, pc.invert(expired))
    return keep


def _sparse_frame(
    kept: pa.RecordBatch, segment: Segment, header: FrameHeader, topic: TopicState
) -> tuple[Frame, int, int, int]:
    offsets = kept.column(OFFSET_COLUMN)
    first, last = offsets[0].as_py(), offsets[-1].as_py()
    frame = encode_batch(_ordered(kept), compression=topic.info.compression)
    frame.span = last - first + 1
    frame.producer, frame.epoch, frame.sequence = header.producer, header.epoch, header.sequence
    return (
        frame,
        first - segment.place.base,
        header.first_us or segment.place.time_us,
        header.commit or segment.place.commit,
    )


def _ordered(batch: pa.RecordBatch) -> pa.RecordBatch:
    """`_headers` before `_offset` and `_timestamp`, as `frame.body_schema` has it."""
    tail = [
        name
        for name in (HEADERS_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN)
        if name in batch.schema.names
    ]
    return batch.select([name for name in batch.schema.names if name not in tail] + tail)


def _replace(
    log: LogHandle,
    segment: Segment,
    topic: TopicState,
    number: int,
    frames: list[tuple[Frame, int, int, int]],
    flag: int,
) -> None:
    """Write, sync, then rename over the old file: a crash leaves one or the other."""
    disk = log.store.disk
    rows_bytes = sum(frame.frame_bytes for frame, *_ in frames)
    header = new_header(
        topic.name, number, segment.header.schema, topic.settings, flags=segment.header.flags | flag
    ).encode(rows_bytes)
    buffers: list[Buffer] = [header]
    at = len(header)
    for frame, relative, time_us, commit in frames:
        buffers += frame.buffers(relative, at, commit=commit, first_us=time_us, last_us=time_us)
        at += frame.frame_bytes
    disk.replace_file(segment.path, buffers)
    disk.unlink(segment.path.with_suffix(INDEX_SUFFIX))
