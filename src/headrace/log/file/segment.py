"""A segment: a file of frames of one partition, with a header that says whose it is and what its
columns are.

Its index (where each frame starts, and when it was appended) is a cache: built by whoever needs it
first, kept beside a sealed segment, thrown away and built again whenever it does not fit.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any

import pyarrow as pa

from headrace.columnar.columns import (
    HEADERS_COLUMN,
    HEADERS_TYPE,
    OFFSET_COLUMN,
    TIMESTAMP_COLUMN,
    TIMESTAMP_TYPE,
)
from headrace.errors import BadRows, CorruptionError, DiskFull, NewerFormat
from headrace.log.file.disk import Disk, DiskFile

# A frame: one record batch as it lies in a segment, header and body.
#
# The header is checked by its own CRC, the body by another one in the header. Offsets in a frame
# count from its segment's base, so that a file staged by a transaction becomes a segment without
# being written again.


MAGIC = b"HRF\xf7"
VERSION = 1
DATA, CONTROL = 0, 1
HAS_HEADERS, SPARSE, LZ4, ZSTD = 1, 2, 4, 8
_CODECS = {"lz4": LZ4, "zstd": ZSTD}
_HEADER = struct.Struct("<4sBBHIIIIIQqqQQIq")
HEADER_BYTES = _HEADER.size
_CRC_AT = 8
FRAME_BYTES_GOAL = 4 << 20
MAX_BODY_BYTES = 1 << 30
_SPARSE_FIELDS = (
    pa.field(OFFSET_COLUMN, pa.int64(), nullable=False),
    pa.field(TIMESTAMP_COLUMN, TIMESTAMP_TYPE, nullable=False),
)


@dataclass(slots=True)
class FrameHeader:
    """What a frame says of itself. `commit` and times are 0 in a file that was staged: its
    segment's header has them.
    """

    kind: int
    flags: int
    body_crc: int
    body_bytes: int
    count: int
    span: int  # offsets from the first to behind the last, more than count in a compacted frame
    relative: int
    first_us: int
    last_us: int
    commit: int
    producer: int
    epoch: int
    sequence: int

    @property
    def frame_bytes(self) -> int:
        return HEADER_BYTES + padded(self.body_bytes)


@dataclass(slots=True)
class Frame:
    """A frame that does not know its place yet."""

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
        return HEADER_BYTES + padded(len(self.body))

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
        blank = _HEADER.pack(MAGIC, VERSION, self.kind, self.flags, 0, *fields)
        return _HEADER.pack(
            MAGIC, VERSION, self.kind, self.flags, zlib.crc32(blank, position & 0xFFFFFFFF), *fields
        )

    def buffers(
        self, relative: int, position: int, *, commit: int, first_us: int, last_us: int
    ) -> list[bytes | memoryview]:
        """The bytes for a place in a file. A frame is bound to it: a copy elsewhere, in some row
        perhaps, is no frame.
        """
        padding = padded(len(self.body)) - len(self.body)
        header = self.header(relative, position, commit=commit, first_us=first_us, last_us=last_us)
        return [header, self.body, b"\0" * padding] if padding else [header, self.body]


def padded(length: int) -> int:
    """Frames start at multiples of 8, so that Arrow can use their bodies where they lie."""
    return (length + 7) & ~7


def producer_hash(topic: str, producer: str) -> int:
    return int.from_bytes(
        blake2b(f"{topic}\0{producer}".encode(), digest_size=8).digest(), "little"
    )


def read_header(data: bytes | memoryview, at: int, position: int) -> FrameHeader | None:
    """The header at a place of `data`, which is at `position` in its file; None if there is no
    sound one.
    """
    if len(data) - at < HEADER_BYTES:
        return None
    magic, version, kind, flags, crc, *rest = _HEADER.unpack_from(data, at)
    if magic != MAGIC:
        return None
    blank = bytearray(data[at : at + HEADER_BYTES])
    blank[_CRC_AT : _CRC_AT + 4] = b"\0\0\0\0"
    if zlib.crc32(blank, position & 0xFFFFFFFF) != crc:
        return None
    if version > VERSION:
        raise NewerFormat(
            f"A batch was written in format {version}; this Headrace knows {VERSION}.",
            fix="upgrade Headrace.",
        )
    return FrameHeader(kind, flags, *rest)


def unchecked_header(data: bytes | memoryview, at: int) -> FrameHeader | None:
    """The header at a place of `data`, wherever that lay when it was written: for who looks through
    bytes, and checks the body.
    """
    if len(data) - at < HEADER_BYTES:
        return None
    magic, version, kind, flags, _, *rest = _HEADER.unpack_from(data, at)
    return FrameHeader(kind, flags, *rest) if magic == MAGIC and version <= VERSION else None


def body_is_sound(header: FrameHeader, body: bytes | memoryview) -> bool:
    return len(body) == header.body_bytes and zlib.crc32(body) == header.body_crc


def body_schema(schema: pa.Schema, flags: int) -> pa.Schema:
    """The columns of a frame's body: the segment's, and those that only some frames have."""
    if flags & HAS_HEADERS:
        schema = schema.append(pa.field(HEADERS_COLUMN, HEADERS_TYPE))
    if flags & SPARSE:
        for column in _SPARSE_FIELDS:
            schema = schema.append(column)
    return schema


def encode_rows(batch: pa.RecordBatch, *, compression: str = "none") -> Iterator[Frame]:
    """Frames of bounded size for one partition's rows. The batch may end in `_headers`, and in
    `_offset` and `_timestamp` (compaction).
    """
    if batch.num_rows == 1:  # the quick way for single rows
        yield encode_batch(batch, compression=compression)
        return
    rows = max(1, batch.num_rows * FRAME_BYTES_GOAL // max(1, batch.nbytes))
    for first in range(0, batch.num_rows, rows):
        yield encode_batch(
            batch.slice(first, rows) if rows < batch.num_rows else batch, compression=compression
        )


def encode_batch(batch: pa.RecordBatch, *, compression: str = "none") -> Frame:
    """One frame; a compacted one (with `_offset`) takes its relative offset and span from the
    caller.
    """
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
    return Frame(DATA, flags, batch.num_rows, view, zlib.crc32(view))


def control_frame(payload: bytes) -> Frame:
    return Frame(CONTROL, 0, 1, payload, zlib.crc32(payload))


def decode_batch(header: FrameHeader, body: memoryview, schema: pa.Schema) -> pa.RecordBatch:
    """The rows of a body whose CRC was checked, without copying where it is not compressed."""
    buffer: pa.Buffer = pa.py_buffer(body)
    for codec, flag in _CODECS.items():
        if header.flags & flag:
            size = int.from_bytes(body[:8], "little")
            buffer = pa.decompress(buffer.slice(8), decompressed_size=size, codec=codec)
    return pa.ipc.read_record_batch(buffer, body_schema(schema, header.flags))


logger = logging.getLogger("headrace.log")
SEGMENT_MAGIC, INDEX_MAGIC = b"HRSG", b"HRIX"
COMPACTED, EXCISED = 1, 2
SEGMENT_SUFFIX, INDEX_SUFFIX = ".segment", ".index"
_FIXED = struct.Struct("<4sHHIIIIQ")
_HEADER_CRC_AT = 12
_INDEX_FIXED = struct.Struct("<4sHHI16sQQ")
_HEADER_WINDOW = 64 << 10
_READ_CHUNK = 4 << 20
_USUAL_HEADER_BYTES, _MAX_HEADER_BYTES = 4 << 10, 16 << 20


@dataclass(frozen=True)
class SegmentHeader:
    """Whose rows a file has. Where they stand in the partition is said by the file's name, which a
    staged file gets last.

    It is stored twice, since every row behind it needs its columns; and with the topic's settings,
    should the journal lose them.
    """

    topic: str
    partition: int
    id: str
    schema: pa.Schema
    settings: dict[str, Any]
    flags: int = 0
    end: int = 0  # of a file that was written as a whole; 0 if it grew
    size: int = 0  # of both copies

    def encode(self, rows_bytes: int | None = None) -> bytes:
        """Both copies; with `rows_bytes` they say where the file ends."""
        meta = json.dumps({"topic": self.topic, "id": self.id, "settings": self.settings}).encode()
        columns: bytes = self.schema.serialize().to_pybytes()
        size = -(-(_FIXED.size + len(meta) + len(columns)) // 64) * 64
        tail = (meta + columns).ljust(size - _FIXED.size, b"\0")
        fields = self.partition, len(meta), 2 * size + rows_bytes if rows_bytes is not None else 0
        blank = _FIXED.pack(SEGMENT_MAGIC, VERSION, self.flags, size, 0, *fields) + tail
        return 2 * (
            _FIXED.pack(SEGMENT_MAGIC, VERSION, self.flags, size, zlib.crc32(blank), *fields) + tail
        )


def new_header(
    topic: str, partition: int, schema: pa.Schema, settings: dict[str, Any], *, flags: int = 0
) -> SegmentHeader:
    return SegmentHeader(topic, partition, os.urandom(8).hex(), schema, settings, flags)


def read_segment_header(file: DiskFile) -> SegmentHeader:
    """The header, from whichever copy is sound. CorruptionError if neither is what was written."""
    header = _read_copy(file, file.read(_USUAL_HEADER_BYTES, 0), 0)
    if header is None:
        data = file.read(_HEADER_WINDOW, 0)
        places = (at for at in range(64, len(data), 64) if data[at : at + 4] == SEGMENT_MAGIC)
        header = next(filter(None, (_read_copy(file, data, at) for at in places)), None)
        if header is None:
            raise CorruptionError(
                f"{file.path} does not begin as a segment does (byte 0).",
                fix="restore the file from a backup; `headrace log verify` lists all damage.",
            )
        logger.error("The header of %s is corrupt (byte 0); going on with its copy.", file.path)
    return header


def _read_copy(file: DiskFile, data: bytes, at: int) -> SegmentHeader | None:
    """The copy of a header at a place, if it is sound. The first one is at 0, so the other one says
    by its place how long they are.
    """
    if len(data) - at < _FIXED.size or data[at : at + 4] != SEGMENT_MAGIC:
        return None
    _, version, flags, size, crc, partition, meta_bytes, end = _FIXED.unpack_from(data, at)
    copy = bytearray(
        data[at : at + size]
        if at + size <= len(data)
        else file.read(min(size, _MAX_HEADER_BYTES), at)
    )
    copy[_HEADER_CRC_AT : _HEADER_CRC_AT + 4] = b"\0\0\0\0"
    if len(copy) != size or zlib.crc32(copy) != crc or at not in {0, size}:
        return None
    if version > VERSION:
        raise NewerFormat(
            f"{file.path} has format {version}; this Headrace knows {VERSION}.",
            fix="upgrade Headrace.",
        )
    meta_end = _FIXED.size + meta_bytes
    meta = json.loads(copy[_FIXED.size : meta_end])
    schema = pa.ipc.read_schema(pa.py_buffer(bytes(copy[meta_end:])))
    return SegmentHeader(
        meta["topic"], partition, meta["id"], schema, meta["settings"], flags, end, 2 * size
    )


def damaged_copy(file: DiskFile) -> int | None:
    """Where a copy of a segment's header is that does not fit the other one; None if both are
    sound.
    """
    half = read_segment_header(file).size // 2
    first, second = file.read(half, 0), file.read(half, half)
    if first == second:
        return None
    return half if _read_copy(file, first, 0) else 0


def segment_name(base: int, commit: int = 0, time_us: int = 0) -> str:
    """A segment's file name. One that was staged as a whole also says in which commit and when;
    otherwise each frame does.
    """
    return (
        f"{base:020d}.{commit}.{time_us}{SEGMENT_SUFFIX}"
        if commit
        else f"{base:020d}{SEGMENT_SUFFIX}"
    )


@dataclass(frozen=True)
class SegmentPlace:
    """What a segment's file name says."""

    name: str
    base: int
    commit: int = 0
    time_us: int = 0

    @classmethod
    def parse(cls, name: str) -> SegmentPlace:
        base, *staged = name[: -len(SEGMENT_SUFFIX)].split(".")
        return cls(name, int(base), *map(int, staged))


def segment_names(directory: Path, active: int, *, begun: bool) -> list[str]:
    """The file names of a partition's segments, in order: they begin with the base in 20 digits.

    `active` is the segment that is being written, or will be (not `begun`). Whatever begins behind
    it is of a commit that is not known yet, or that failed.
    """
    limit, last = f"{active:020d}", segment_name(active)
    return [name for name in _all_names(directory) if name[:20] < limit or (begun and name == last)]


def stray_names(directory: Path, first: int, stop: int | None = None) -> list[str]:
    """Segments that begin at an offset from `first` on, up to `stop`: left by failed commits, if no
    commit speaks of them.
    """
    names = [
        name
        for name in _all_names(directory)
        if int(name[:20]) >= first and (stop is None or int(name[:20]) < stop)
    ]
    return [
        name for name in names if name == segment_name(int(name[:20]))
    ]  # a staged file is moved here behind its commit, so it is none


def _all_names(directory: Path) -> list[str]:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(name for name in names if name.endswith(SEGMENT_SUFFIX) and name[0] != ".")


def segments_in(directory: Path, active: int, *, begun: bool) -> list[SegmentPlace]:
    """A partition's segments in order, from its directory."""
    return [SegmentPlace.parse(name) for name in segment_names(directory, active, begun=begun)]


def scan_headers(
    file: DiskFile, start: int, end: int
) -> Iterator[tuple[int, FrameHeader | None, int]]:
    """(position, header, next position) of each frame without reading bodies; None for bytes that
    are no frame, up to the next one.
    """
    end = min(end, file.size())
    position, window, window_at = start, b"", start
    while position < end:
        if position + HEADER_BYTES > window_at + len(window):
            window, window_at = file.read(min(_HEADER_WINDOW, end - position), position), position
        header = read_header(window, position - window_at, position)
        after = position + header.frame_bytes if header else end
        if header is None or after > end:
            header, after = None, find_frame(file, position + 8, end)
        yield position, header, after
        position = after


def find_frame(file: DiskFile, start: int, end: int) -> int:
    """The place of the next sound header at or behind `start`; `end` if there is none."""
    position = start
    while position < end:
        chunk = file.read(min(_READ_CHUNK, end - position), position)
        at = chunk.find(MAGIC)
        while at >= 0:
            place = position + at
            if place % 8 == 0 and read_header(file.read(HEADER_BYTES, place), 0, place):
                return place
            at = chunk.find(MAGIC, at + 1)
        if position + len(chunk) >= end:
            break
        position += max(1, len(chunk) - len(MAGIC))
    return end


def read_frames(
    file: DiskFile, start: int, end: int
) -> Iterator[tuple[int, FrameHeader | None, memoryview]]:
    """(position, header, body) of each frame, read in large pieces; header None and empty body for
    bytes that are no frame.
    """
    end = min(end, file.size())
    position = start
    while position < end:
        chunk = memoryview(file.read(min(_READ_CHUNK, end - position), position))
        used = 0
        while used < len(chunk):
            header = read_header(chunk, used, position + used)
            if header is None or position + used + header.frame_bytes > end:
                if (
                    header is None
                    and len(chunk) - used < HEADER_BYTES
                    and position + len(chunk) < end
                    and used
                ):
                    break  # the header goes on in the next piece
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
            body = used + HEADER_BYTES
            yield position + used, header, chunk[body : body + header.body_bytes]
            used += header.frame_bytes
        position += used


class FrameIndex:
    """Where the frames of a segment start: relative offset, position and append time of each, in
    order.
    """

    def __init__(self) -> None:
        self.relatives, self.positions, self.times = array("q"), array("q"), array("q")
        self.end = 0  # up to which position of the file this index knows

    def extend(self, file: DiskFile, end: int, *, default_us: int) -> None:
        """Add the frames between what is known and `end`."""
        for position, header, _ in scan_headers(file, self.end, end):
            if header is not None:
                self.relatives.append(header.relative)
                self.positions.append(position)
                self.times.append(header.first_us or default_us)
        self.end = max(self.end, end)

    def position_of(self, relative: int, first: int) -> int:
        """Where to start reading for an offset; `first` if it is before all frames."""
        at = bisect_right(self.relatives, relative) - 1
        return self.positions[at] if at >= 0 else first

    def time_of(self, relative: int) -> int | None:
        """When the row at an offset (or, if it is gone, the next one) was appended."""
        at = max(0, bisect_right(self.relatives, relative) - 1)
        return self.times[at] if at < len(self.times) else None

    def first_since(self, time_us: int) -> int | None:
        """The relative offset of the first frame appended at or after a time."""
        at = bisect_left(self.times, time_us)
        return self.relatives[at] if at < len(self.times) else None

    def to_bytes(self, segment_id: str) -> bytes:
        body = b"".join(column.tobytes() for column in (self.relatives, self.positions, self.times))
        blank = (
            _INDEX_FIXED.pack(
                INDEX_MAGIC, VERSION, 0, 0, segment_id.encode(), self.end, len(self.relatives)
            )
            + body
        )
        crc = zlib.crc32(blank)
        return (
            _INDEX_FIXED.pack(
                INDEX_MAGIC, VERSION, 0, crc, segment_id.encode(), self.end, len(self.relatives)
            )
            + body
        )

    @classmethod
    def from_bytes(cls, data: bytes, segment_id: str, end: int) -> FrameIndex | None:
        """The stored index, or None if it is damaged, of another version, or of another file."""
        if len(data) < _INDEX_FIXED.size:
            return None
        magic, version, flags, crc, name, stored_end, count = _INDEX_FIXED.unpack_from(data)
        body = memoryview(data)[_INDEX_FIXED.size :]
        blank = _INDEX_FIXED.pack(magic, version, flags, 0, name, stored_end, count) + body
        if (
            magic != INDEX_MAGIC
            or version != VERSION
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


class Segment:
    """A segment opened for reading."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self.disk, self.path, self.place = disk, path, SegmentPlace.parse(path.name)
        self.file = disk.open(path, write=False)
        try:
            self.header = read_segment_header(self.file)
        except BaseException:
            self.file.close()
            raise
        self._index: FrameIndex | None = None
        self._guard = Lock()

    @property
    def may_have_gaps(self) -> bool:
        """Whether offsets can be missing for a good reason: compaction, or that somebody was to be
        forgotten.
        """
        return bool(self.header.flags & (COMPACTED | EXCISED))

    @property
    def is_replaced(self) -> bool:
        """Whether another file has this one's name by now: rows were excised, or compacted away.
        One that is gone stays readable for whoever has it open.
        """
        try:
            return os.stat(self.path).st_ino != os.fstat(self.file.descriptor).st_ino
        except FileNotFoundError:
            return False

    @property
    def is_cut(self) -> bool:
        """Whether a file that was written as a whole is no longer whole."""
        return self.file.size() < self.header.end

    def index(self, end: int, *, sealed: bool) -> FrameIndex:
        """The index up to `end`. A sealed segment's is kept on disk for the next one who needs
        it.
        """
        with self._guard:
            return self._index_up_to(end, sealed=sealed)

    def _index_up_to(self, end: int, *, sealed: bool) -> FrameIndex:
        if self._index is None or self._index.end > end:
            self._index = (self._stored_index(end) if sealed else None) or self._empty_index()
        if self._index.end < end:
            self._index.extend(self.file, end, default_us=self.place.time_us)
            if sealed:
                self._store_index()
        return self._index

    def _empty_index(self) -> FrameIndex:
        index = FrameIndex()
        index.end = self.header.size
        return index

    def _index_path(self) -> Path:
        return self.path.with_suffix(INDEX_SUFFIX)

    def _stored_index(self, end: int) -> FrameIndex | None:
        try:
            data = self._index_path().read_bytes()
        except OSError:
            return None
        return FrameIndex.from_bytes(data, self.header.id, end)

    def _store_index(self) -> None:
        """Best effort and not synced: a lost or torn index is noticed and built again."""
        try:
            # Otherwise compaction has put another file in our place.
            if os.stat(self.path).st_ino == os.fstat(self.file.descriptor).st_ino:
                assert self._index is not None
                self.disk.replace_file(
                    self._index_path(),
                    [self._index.to_bytes(self.header.id)],
                    durable=False,
                )
        except (OSError, DiskFull):
            return

    def frames(
        self, relative: int, end: int, *, sealed: bool
    ) -> Iterator[tuple[int, FrameHeader | None, memoryview]]:
        """Frames from the one that has an offset, up to byte `end`."""
        return read_frames(
            self.file, self.index(end, sealed=sealed).position_of(relative, self.header.size), end
        )

    def close(self) -> None:
        self.file.close()
