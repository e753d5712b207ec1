"""Frames and segments: how rows are stored on disk.

A frame is one Arrow record batch with a header. A segment is a file of frames of one partition; its
own header names the topic and the columns. A partition is a sequence of segments, each named by the
offset of its first row; the last one is open and grows, the others are sealed:

    topics/orders~3/0/00000000000000000000.segment    header, frame, frame, …
    topics/orders~3/0/00000000000000000000.index      position and time of each frame (a cache)
    topics/orders~3/0/00000000000000008192.segment    header, frame, …

A segment's index is built by whoever needs it first and stored for sealed segments. An index that
is missing or does not fit its segment is built again.

`committer` and `staging` write segments, `reader` reads them, `compaction` rewrites them.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.columnar.columns import (
    HEADERS_COLUMN,
    HEADERS_TYPE,
    OFFSET_COLUMN,
    TIMESTAMP_COLUMN,
    TIMESTAMP_TYPE,
)
from headrace.errors import BadRows, CorruptionError, HeadraceError, NewerFormat, RetryError
from headrace.log.file.disk import Disk, DiskFile
from headrace.types.schema_history import NO_HISTORY, SchemaHistory
from headrace.types.values import Misfit, cast_losslessly

logger = logging.getLogger("headrace.log")

# Frames

FRAME_MAGIC = b"HRF\xf7"
FRAME_VERSION = 1
DATA, CONTROL = 0, 1
"""Kinds of frames: rows, or a control record."""
HAS_HEADERS, SPARSE, LZ4, ZSTD = 1, 2, 4, 8
"""Flags of a frame. A SPARSE frame was compacted: it stores the offset and time of each row."""
_CODECS = {"lz4": LZ4, "zstd": ZSTD}
_FRAME_HEADER = struct.Struct("<4sBBHIIIIIQqqQQIq")
FRAME_HEADER_BYTES = _FRAME_HEADER.size
_FRAME_CRC_AT = 8
TARGET_FRAME_BYTES = 4 << 20
MAX_BODY_BYTES = 1 << 30
MAX_SPAN = (1 << 32) - 1
_SPARSE_FIELDS = (
    pa.field(OFFSET_COLUMN, pa.int64(), nullable=False),
    pa.field(TIMESTAMP_COLUMN, TIMESTAMP_TYPE, nullable=False),
)


@dataclass(slots=True)
class FrameHeader:
    """A frame's header. `commit` and the times are 0 in a segment that was staged: the segment's
    file name has them.
    """

    kind: int
    flags: int
    body_crc: int
    body_bytes: int
    count: int
    span: int  # the number of offsets covered; more than `count` in a compacted frame
    relative: int  # the first offset, counted from the segment's base
    first_us: int
    last_us: int
    commit: int
    producer: int
    epoch: int
    sequence: int

    @property
    def frame_bytes(self) -> int:
        return FRAME_HEADER_BYTES + _padded_length(self.body_bytes)


@dataclass(slots=True)
class Frame:
    """An encoded frame whose offset and position in a file are not decided yet.

    Offsets in a frame count from its segment's base, so that a staged file becomes a segment
    without being written again. The header is checked by its own CRC, the body by another one in
    the header.
    """

    kind: int
    flags: int
    count: int
    body: bytes | memoryview
    body_crc: int
    span: int = 0
    producer: int = 0
    epoch: int = 0
    sequence: int = -1

    @property
    def frame_bytes(self) -> int:
        return FRAME_HEADER_BYTES + _padded_length(len(self.body))

    def header(
        self, relative: int, position: int, *, commit: int, first_us: int, last_us: int
    ) -> bytes:
        fields = (
            self.body_crc,
            len(self.body),
            self.count,
            self.span or self.count,
            relative,
            first_us,
            last_us,
            commit,
            self.producer,
            self.epoch,
            self.sequence,
        )
        blank = _FRAME_HEADER.pack(FRAME_MAGIC, FRAME_VERSION, self.kind, self.flags, 0, *fields)
        return _FRAME_HEADER.pack(
            FRAME_MAGIC,
            FRAME_VERSION,
            self.kind,
            self.flags,
            zlib.crc32(blank, position & 0xFFFFFFFF),
            *fields,
        )

    def buffers(
        self, relative: int, position: int, *, commit: int, first_us: int, last_us: int
    ) -> list[bytes | memoryview]:
        """The frame's bytes for a position in a file. The header's CRC includes the position, so
        that a copy of the bytes elsewhere, in a row for example, is not taken for a frame.
        """
        padding = _padded_length(len(self.body)) - len(self.body)
        header = self.header(relative, position, commit=commit, first_us=first_us, last_us=last_us)
        return [header, self.body, b"\0" * padding] if padding else [header, self.body]


def _padded_length(length: int) -> int:
    """A length rounded up to a multiple of 8: aligned bodies are used by Arrow without copying."""
    return (length + 7) & ~7


def producer_hash(topic: str, producer: str) -> int:
    """The 64-bit hash by which a frame's header names its producer."""
    return int.from_bytes(
        blake2b(f"{topic}\0{producer}".encode(), digest_size=8).digest(), "little"
    )


def read_frame_header(data: bytes | memoryview, at: int, position: int) -> FrameHeader | None:
    """The frame header at index `at` of `data`, which is at `position` in its file; None if there
    is no sound one.
    """
    if len(data) - at < FRAME_HEADER_BYTES:
        return None
    magic, version, kind, flags, crc, *rest = _FRAME_HEADER.unpack_from(data, at)
    if magic != FRAME_MAGIC:
        return None
    blank = bytearray(data[at : at + FRAME_HEADER_BYTES])
    blank[_FRAME_CRC_AT : _FRAME_CRC_AT + 4] = b"\0\0\0\0"
    if zlib.crc32(blank, position & 0xFFFFFFFF) != crc:
        return None
    if version > FRAME_VERSION:
        raise NewerFormat(
            f"A batch was written in format {version}; this Headrace knows {FRAME_VERSION}.",
            fix="upgrade Headrace.",
        )
    return FrameHeader(kind, flags, *rest)


def unchecked_frame_header(data: bytes | memoryview, at: int) -> FrameHeader | None:
    """The frame header at index `at` of `data`, without the check that binds it to a position. The
    caller must check the body.
    """
    if len(data) - at < FRAME_HEADER_BYTES:
        return None
    magic, version, kind, flags, _, *rest = _FRAME_HEADER.unpack_from(data, at)
    if magic != FRAME_MAGIC or version > FRAME_VERSION:
        return None
    return FrameHeader(kind, flags, *rest)


def body_is_sound(header: FrameHeader, body: bytes | memoryview) -> bool:
    """Whether a body has the length and the checksum that its header names."""
    return len(body) == header.body_bytes and zlib.crc32(body) == header.body_crc


def body_schema(schema: pa.Schema, flags: int) -> pa.Schema:
    """The columns of a frame's body: the segment's, and those that its flags add."""
    if flags & HAS_HEADERS:
        schema = schema.append(pa.field(HEADERS_COLUMN, HEADERS_TYPE))
    if flags & SPARSE:
        for column in _SPARSE_FIELDS:
            schema = schema.append(column)
    return schema


def encode_rows(batch: pa.RecordBatch, *, compression: str = "none") -> Iterator[Frame]:
    """Encode one partition's rows into frames of bounded size. The batch's last columns may be
    `_headers`, and `_offset` and `_timestamp` (compaction).
    """
    if batch.num_rows == 1:  # the size of a single row need not be computed
        yield encode_batch(batch, compression=compression)
        return
    rows = max(1, batch.num_rows * TARGET_FRAME_BYTES // max(1, batch.nbytes))
    for first in range(0, batch.num_rows, rows):
        yield encode_batch(
            batch.slice(first, rows) if rows < batch.num_rows else batch, compression=compression
        )


def encode_batch(batch: pa.RecordBatch, *, compression: str = "none") -> Frame:
    """Encode rows into one frame. The caller sets the span of a compacted one (with `_offset`)."""
    names = batch.schema.names
    flags = (HAS_HEADERS if HEADERS_COLUMN in names else 0) | (
        SPARSE if OFFSET_COLUMN in names else 0
    )
    body = batch.serialize()
    if compression != "none":
        flags |= _CODECS[compression]
        body = pa.py_buffer(
            body.size.to_bytes(8, "little") + pa.compress(body, codec=compression, asbytes=True)
        )
    if body.size > MAX_BODY_BYTES:
        raise BadRows(
            f"A row of {body.size} bytes is larger than the limit of {MAX_BODY_BYTES}.",
            fix="store the large value elsewhere and append its address.",
        )
    view = memoryview(body)
    return Frame(kind=DATA, flags=flags, count=batch.num_rows, body=view, body_crc=zlib.crc32(view))


def control_frame(payload: bytes) -> Frame:
    """Encode a control record."""
    return Frame(kind=CONTROL, flags=0, count=1, body=payload, body_crc=zlib.crc32(payload))


def gap_frames(count: int) -> Iterator[Frame]:
    """Encode offsets that nothing is stored at, as control records without a body."""
    while count > 0:
        span = min(count, MAX_SPAN)
        yield Frame(kind=CONTROL, flags=0, count=1, span=span, body=b"", body_crc=zlib.crc32(b""))
        count -= span


def is_gap(header: FrameHeader) -> bool:
    """Return whether a frame only takes offsets."""
    return header.kind == CONTROL and not header.body_bytes


def decode_batch(header: FrameHeader, body: memoryview, schema: pa.Schema) -> pa.RecordBatch:
    """The rows of a body whose CRC was checked, not copied unless they are compressed."""
    return _decode_body(body, header.flags, schema)


def decode_frame(frame: Frame, schema: pa.Schema) -> pa.RecordBatch:
    """The rows of a frame that was encoded by this process."""
    return _decode_body(memoryview(frame.body), frame.flags, schema)


def _decode_body(body: memoryview, flags: int, schema: pa.Schema) -> pa.RecordBatch:
    buffer: pa.Buffer = pa.py_buffer(body)
    for codec, flag in _CODECS.items():
        if flags & flag:
            size = int.from_bytes(body[:8], "little")
            if size > MAX_BODY_BYTES:
                raise CorruptionError(
                    f"A batch claims to have {size} bytes.",
                    fix="see what `headrace log verify` says.",
                )
            buffer = pa.decompress(buffer.slice(8), decompressed_size=size, codec=codec)
    return pa.ipc.read_record_batch(buffer, body_schema(schema, flags))


def stored_column(
    batch: pa.RecordBatch,
    field: pa.Field,
    name: str,
    history: SchemaHistory,
    written: SchemaHistory = NO_HISTORY,
) -> pa.Array:
    """A column of stored rows, as a topic's schema has it now: under whichever name it was stored,
    with its present type, and null if it was added later.

    Args:
        batch: The rows as they are stored.
        field: The column's type.
        name: The column's name, as of `history`.
        history: What has become of the topic's columns as the reader knows it.
        written: The same as the segment knows it, which may be newer.

    Raises:
        RetryError: The reader's schema is older than the rows, which cannot be read with it.
    """
    index = batch.schema.get_field_index(name)
    if index < 0 and not (history is NO_HISTORY is written):
        names = [*history.former_names(name), written.present_name(name)]
        index = next((at for at in map(batch.schema.get_field_index, names) if at >= 0), -1)
    if index < 0:
        if written is not NO_HISTORY and written.is_dropped(name):
            raise RetryError(
                f"The column {name!r} was dropped while it was being read.",
                fix="read again, without it.",
            )
        return pa.nulls(batch.num_rows, field.type)
    column = batch.column(index)
    if column.type.equals(field.type):
        return column
    try:
        return cast_losslessly(column, field)
    except (Misfit, pa.ArrowInvalid) as error:
        raise RetryError(
            f"The type of the column {name!r} was changed while it was being read: {error}.",
            fix="read again, with the topic's present type.",
        ) from None


# Segment headers

SEGMENT_MAGIC = b"HRSG"
SEGMENT_VERSION = 1
SEGMENT_SUFFIX = ".segment"
COMPACTED, EXCISED = 1, 2
"""Flags of a segment: compaction, or the excision of personal data, has rewritten it."""
_SEGMENT_HEADER = struct.Struct("<4sHHIIIIQ")  # magic, version, flags, size, CRC, partition, …
_SEGMENT_CRC_AT = 12
_USUAL_HEADER_BYTES = 4 << 10
_MAX_HEADER_BYTES = 16 << 20
_SCAN_BYTES = 64 << 10
_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class SegmentHeader:
    """A segment's header: topic, partition, columns and settings.

    The offset of the first row is in the file's name, which a staged file gets last. The header is
    stored twice, since no row can be read without its columns. It has the topic's settings, so
    that the topic can be restored if the journal is damaged.
    """

    topic: str
    partition: int
    id: str
    schema: pa.Schema
    settings: dict[str, Any]
    flags: int = 0
    end: int = 0  # the file's size, if it was written at once; 0 if it grew
    size: int = 0  # the size of both copies
    stop: int | None = None  # the offset behind a rewritten segment; None if its frames show it
    superseded_to: int | None = None  # newer rows before this offset supersede what it lacks

    @cached_property
    def schema_history(self) -> SchemaHistory:
        """What had become of the topic's columns when the segment was written."""
        stored = self.settings.get("schema_history")
        return NO_HISTORY if stored is None else SchemaHistory.load(stored)

    def encode(self, rows_bytes: int | None = None) -> bytes:
        """Both copies of the header; with `rows_bytes` they say where the file ends."""
        about: dict[str, Any] = {
            "topic": self.topic,
            "id": self.id,
            "settings": self.settings,
        }
        if self.stop is not None:
            about["stop"] = self.stop
        if self.superseded_to is not None:
            about["superseded_to"] = self.superseded_to
        meta = json.dumps(about).encode()
        columns: bytes = self.schema.serialize().to_pybytes()
        size = -(-(_SEGMENT_HEADER.size + len(meta) + len(columns)) // 64) * 64
        tail = (meta + columns).ljust(size - _SEGMENT_HEADER.size, b"\0")
        end = 2 * size + rows_bytes if rows_bytes is not None else 0

        def header(crc: int) -> bytes:
            return _SEGMENT_HEADER.pack(
                SEGMENT_MAGIC,
                SEGMENT_VERSION,
                self.flags,
                size,
                crc,
                self.partition,
                len(meta),
                end,
            )

        return 2 * (header(zlib.crc32(header(0) + tail)) + tail)


def new_segment_header(
    topic: str,
    partition: int,
    schema: pa.Schema,
    settings: dict[str, Any],
    *,
    flags: int = 0,
    stop: int | None = None,
    superseded_to: int | None = None,
) -> SegmentHeader:
    """A header with a random id, by which an index names its segment."""
    return SegmentHeader(
        topic=topic,
        partition=partition,
        id=os.urandom(8).hex(),
        schema=schema,
        settings=settings,
        flags=flags,
        stop=stop,
        superseded_to=superseded_to,
    )


def read_segment_header(file: DiskFile) -> SegmentHeader:
    """A segment's header, from whichever copy is sound. Raises CorruptionError if neither is."""
    header = _read_header_copy(file, file.read(_USUAL_HEADER_BYTES, 0), 0)
    if header is None:
        data = file.read(_SCAN_BYTES, 0)
        starts = (at for at in range(64, len(data), 64) if data[at : at + 4] == SEGMENT_MAGIC)
        header = next(filter(None, (_read_header_copy(file, data, at) for at in starts)), None)
        if header is None:
            raise CorruptionError(
                f"{file.path} does not begin as a segment does (byte 0).",
                fix="restore the file from a backup; `headrace log verify` lists all damage.",
            )
        logger.error("The header of %s is corrupt (byte 0); going on with its copy.", file.path)
    return header


def _read_header_copy(file: DiskFile, data: bytes, at: int) -> SegmentHeader | None:
    """The copy of a header at a position, if it is sound. The first copy is at 0, the second one
    directly behind it.
    """
    if len(data) - at < _SEGMENT_HEADER.size or data[at : at + 4] != SEGMENT_MAGIC:
        return None
    _, version, flags, size, crc, partition, meta_bytes, end = _SEGMENT_HEADER.unpack_from(data, at)
    copy = bytearray(
        data[at : at + size]
        if at + size <= len(data)
        else file.read(min(size, _MAX_HEADER_BYTES), at)
    )
    copy[_SEGMENT_CRC_AT : _SEGMENT_CRC_AT + 4] = b"\0\0\0\0"
    if len(copy) != size or zlib.crc32(copy) != crc or at not in {0, size}:
        return None
    if version > SEGMENT_VERSION:
        raise NewerFormat(
            f"{file.path} has format {version}; this Headrace knows {SEGMENT_VERSION}.",
            fix="upgrade Headrace.",
        )
    meta_end = _SEGMENT_HEADER.size + meta_bytes
    meta = json.loads(copy[_SEGMENT_HEADER.size : meta_end])
    return SegmentHeader(
        topic=meta["topic"],
        partition=partition,
        id=meta["id"],
        schema=pa.ipc.read_schema(pa.py_buffer(bytes(copy[meta_end:]))),
        settings=meta["settings"],
        flags=flags,
        end=end,
        size=2 * size,
        stop=meta.get("stop"),
        superseded_to=meta.get("superseded_to"),
    )


def find_damaged_header(file: DiskFile) -> int | None:
    """The position of the damaged copy of a segment's header; None if both copies are sound."""
    half = read_segment_header(file).size // 2
    first, second = file.read(half, 0), file.read(half, half)
    if first == second:
        return None
    return half if _read_header_copy(file, first, 0) else 0


# Segment files of a partition


def segment_name(base: int, commit: int = 0, time_us: int = 0) -> str:
    """A segment's file name. That of a staged file also has its commit and append time, which the
    frames of other segments have.
    """
    return (
        f"{base:020d}.{commit}.{time_us}{SEGMENT_SUFFIX}"
        if commit
        else f"{base:020d}{SEGMENT_SUFFIX}"
    )


@dataclass(frozen=True)
class SegmentInfo:
    """A segment's file name and what it says: the base offset and, of a staged file, the commit
    and the append time.
    """

    name: str
    base: int
    commit: int = 0
    time_us: int = 0

    @classmethod
    def parse(cls, name: str) -> SegmentInfo:
        base, *staged = name[: -len(SEGMENT_SUFFIX)].split(".")
        return cls(name, int(base), *map(int, staged))


def list_segment_names(directory: Path, active: int, *, begun: bool) -> list[str]:
    """The file names of a partition's segments, in order of their offsets.

    `active` is the base of the open segment, whose file exists if it has `begun`. Files behind it
    belong to commits that failed or that the caller's state does not include.
    """
    limit, last = f"{active:020d}", segment_name(active)
    return [name for name in _all_names(directory) if name[:20] < limit or (begun and name == last)]


def list_stray_names(directory: Path, first: int, stop: int | None = None) -> list[str]:
    """Segments whose base is in a range of offsets, without staged files: a staged file is moved
    here only after its commit, so it cannot be the remains of a failed one.
    """
    names = []
    for name in _all_names(directory):
        base = int(name[:20])
        is_in_range = base >= first and (stop is None or base < stop)
        if is_in_range and name == segment_name(base):
            names.append(name)
    return names


def _all_names(directory: Path) -> list[str]:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(name for name in names if name.endswith(SEGMENT_SUFFIX) and name[0] != ".")


def list_segments(directory: Path, active: int, *, begun: bool) -> list[SegmentInfo]:
    """A partition's segments in order of their offsets; see `list_segment_names`."""
    return [SegmentInfo.parse(name) for name in list_segment_names(directory, active, begun=begun)]


# Frames of a file


def scan_headers(
    file: DiskFile, start: int, end: int
) -> Iterator[tuple[int, FrameHeader | None, int]]:
    """(position, header, next position) of each frame, without reading bodies. The header is None
    for bytes that are not a frame.
    """
    end = min(end, file.size())
    position, window, window_at = start, b"", start
    while position < end:
        if position + FRAME_HEADER_BYTES > window_at + len(window):
            window, window_at = file.read(min(_SCAN_BYTES, end - position), position), position
        header = read_frame_header(window, position - window_at, position)
        after = position + header.frame_bytes if header else end
        if header is None or after > end:
            header, after = None, find_frame(file, position + 8, end)
        yield position, header, after
        position = after


def find_frame(file: DiskFile, start: int, end: int) -> int:
    """The position of the next sound frame header at or behind `start`; `end` if there is none."""
    position = start
    while position < end:
        chunk = file.read(min(_READ_BYTES, end - position), position)
        at = chunk.find(FRAME_MAGIC)
        while at >= 0:
            candidate = position + at
            if candidate % 8 == 0:
                data = file.read(FRAME_HEADER_BYTES, candidate)
                if read_frame_header(data, 0, candidate):
                    return candidate
            at = chunk.find(FRAME_MAGIC, at + 1)
        if position + len(chunk) >= end:
            break
        position += max(1, len(chunk) - len(FRAME_MAGIC))
    return end


def read_frames(
    file: DiskFile, start: int, end: int
) -> Iterator[tuple[int, FrameHeader | None, memoryview]]:
    """(position, header, body) of each frame, read in large chunks. The header is None and the body
    empty for bytes that are not a frame.
    """
    end = min(end, file.size())
    position = start
    while position < end:
        chunk = memoryview(file.read(min(_READ_BYTES, end - position), position))
        used = 0
        while used < len(chunk):
            header = read_frame_header(chunk, used, position + used)
            if header is None or position + used + header.frame_bytes > end:
                if (
                    header is None
                    and len(chunk) - used < FRAME_HEADER_BYTES
                    and position + len(chunk) < end
                    and used
                ):
                    break  # the header continues in the next chunk
                after = find_frame(file, position + used + 8, end)
                yield position + used, None, memoryview(b"")
                used = after - position
                continue
            if used + header.frame_bytes > len(chunk):
                if used == 0:
                    chunk = memoryview(file.read(header.frame_bytes, position))
                    if len(chunk) < header.frame_bytes:
                        yield position, None, memoryview(b"")
                        used = end - position
                        continue
                else:
                    break
            body = used + FRAME_HEADER_BYTES
            yield position + used, header, chunk[body : body + header.body_bytes]
            used += header.frame_bytes
        position += used


# Indexes

INDEX_MAGIC = b"HRIX"
INDEX_VERSION = 1
INDEX_SUFFIX = ".index"
_INDEX_HEADER = struct.Struct("<4sHHI16sQQ")  # magic, version, flags, CRC, segment id, end, count


class FrameIndex:
    """The relative offset, position and append time of each frame of a segment, in order."""

    def __init__(self) -> None:
        self.relatives = array("q")
        self.positions = array("q")
        self.times = array("q")
        self.end = 0  # the position in the file up to which frames are indexed

    def extend(self, file: DiskFile, end: int, *, default_us: int) -> None:
        """Index the frames up to position `end`. `default_us` is the append time of frames that
        have none.
        """
        for position, header, _ in scan_headers(file, self.end, end):
            if header is not None:
                self.relatives.append(header.relative)
                self.positions.append(position)
                self.times.append(header.first_us or default_us)
        self.end = max(self.end, end)

    def position_of(self, relative: int, first: int) -> int:
        """The position of the frame with a relative offset; `first` if it is before all frames."""
        at = bisect_right(self.relatives, relative) - 1
        return self.positions[at] if at >= 0 else first

    def time_of(self, relative: int) -> int | None:
        """The append time of the frame that has a relative offset; None without frames."""
        at = max(0, bisect_right(self.relatives, relative) - 1)
        return self.times[at] if at < len(self.times) else None

    def first_since(self, time_us: int) -> int | None:
        """The relative offset of the first frame appended at or after a time, or None. Times rise,
        unless a clock was set back.
        """
        at = int(np.searchsorted(np.maximum.accumulate(np.array(self.times)), time_us))
        return self.relatives[at] if at < len(self.times) else None

    def to_bytes(self, segment_id: str) -> bytes:
        body = b"".join(column.tobytes() for column in (self.relatives, self.positions, self.times))
        fields = (segment_id.encode(), self.end, len(self.relatives))
        crc = zlib.crc32(_INDEX_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, 0, 0, *fields) + body)
        return _INDEX_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, 0, crc, *fields) + body

    @classmethod
    def from_bytes(cls, data: bytes, segment_id: str, end: int) -> FrameIndex | None:
        """The stored index, or None if it is damaged, of another version, or of another segment."""
        if len(data) < _INDEX_HEADER.size:
            return None
        magic, version, flags, crc, name, stored_end, count = _INDEX_HEADER.unpack_from(data)
        body = memoryview(data)[_INDEX_HEADER.size :]
        blank = _INDEX_HEADER.pack(magic, version, flags, 0, name, stored_end, count) + body
        if (
            magic != INDEX_MAGIC
            or version != INDEX_VERSION
            or name != segment_id.encode()
            or stored_end != end
            or len(body) != 24 * count
        ):
            return None
        if zlib.crc32(blank) != crc:
            return None
        index = cls()
        index.end = stored_end
        for number, column in enumerate((index.relatives, index.positions, index.times)):
            column.frombytes(body[8 * count * number : 8 * count * (number + 1)])
        return index


# Segments


class Segment:
    """A segment opened for reading."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self.disk = disk
        self.path = path
        self.info = SegmentInfo.parse(path.name)
        self.file = disk.open(path, write=False)
        try:
            self.header = read_segment_header(self.file)
        except BaseException:
            self.file.close()
            raise
        self._index: FrameIndex | None = None
        self._counted: tuple[int, int] | None = None
        self._guard = Lock()

    @property
    def may_have_gaps(self) -> bool:
        """Whether offsets may be missing because compaction or excision removed rows."""
        return bool(self.header.flags & (COMPACTED | EXCISED))

    @property
    def is_replaced(self) -> bool:
        """Whether compaction or excision has put another file under this segment's name.

        A removed file does not count: it stays readable for whoever has it open.
        """
        try:
            return os.stat(self.path).st_ino != os.fstat(self.file.descriptor).st_ino
        except FileNotFoundError:
            return False

    @property
    def is_truncated(self) -> bool:
        """Whether a file that was written at once has become shorter."""
        return self.file.size() < self.header.end

    def index(self, end: int, *, sealed: bool) -> FrameIndex:
        """The index up to position `end`. That of a sealed segment is loaded from, and stored in,
        the index file.
        """
        with self._guard:
            index = self._index
            if index is None or index.end > end:
                index = self._load_index(end) if sealed else None
            if index is None:
                index = FrameIndex()
                index.end = self.header.size
            if index.end < end:
                index.extend(self.file, end, default_us=self.info.time_us)
                if sealed:
                    self._store_index(index)
            self._index = index
            return index

    def _load_index(self, end: int) -> FrameIndex | None:
        try:
            data = self.path.with_suffix(INDEX_SUFFIX).read_bytes()
        except OSError:
            return None
        return FrameIndex.from_bytes(data, self.header.id, end)

    def _store_index(self, index: FrameIndex) -> None:
        """Store the index: best effort and not synced, since a lost or torn one is built again."""
        try:
            # Unless compaction has put another file under this name.
            if os.stat(self.path).st_ino == os.fstat(self.file.descriptor).st_ino:
                self.disk.replace_file(
                    self.path.with_suffix(INDEX_SUFFIX),
                    [index.to_bytes(self.header.id)],
                    durable=False,
                )
        except (OSError, HeadraceError):
            return

    def count_rows(self, end: int, before: int | None = None) -> int:
        """The number of rows up to position `end`: control records and what compaction removed do
        not count. With `before`, those with lower relative offsets alone. What was counted is
        remembered, so that an open segment is not counted from its beginning every time.
        """
        if before is not None:
            rows = 0
            for _, header, _ in scan_headers(self.file, self.header.size, end):
                if header is None or header.kind != DATA:
                    continue
                if header.relative >= before:
                    break
                rows += min(header.count, before - header.relative)
            return rows
        with self._guard:
            position, rows = self._counted or (self.header.size, 0)
            if position > end:
                position, rows = self.header.size, 0
            for _, header, _ in scan_headers(self.file, position, end):
                rows += header.count if header is not None and header.kind == DATA else 0
            self._counted = (end, rows)
            return rows

    def frames(
        self, relative: int, end: int, *, sealed: bool
    ) -> Iterator[tuple[int, FrameHeader | None, memoryview]]:
        """The frames from the one that has a relative offset, up to position `end`; see
        `read_frames`.
        """
        start = self.index(end, sealed=sealed).position_of(relative, self.header.size)
        return read_frames(self.file, start, end)

    def close(self) -> None:
        self.file.close()
