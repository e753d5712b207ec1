"""A frame: one record batch as it lies in a segment, header and body.

The header is checked by its own CRC, the body by another one in the header. Offsets in a frame count from its segment's base, so that a
file staged by a transaction becomes a segment without being written again.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import pyarrow as pa

from headrace.errors import BadRows, NewerFormat
from headrace.log.api import HEADERS_COLUMN, HEADERS_TYPE, OFFSET_COLUMN, TIMESTAMP_COLUMN, TIMESTAMP_TYPE

MAGIC = b"HRF\xf7"
VERSION = 1
DATA, CONTROL = 0, 1
HAS_HEADERS, SPARSE, LZ4, ZSTD = 1, 2, 4, 8
_CODECS = {"lz4": LZ4, "zstd": ZSTD}
_HEADER = struct.Struct("<4sBBHIIIIIQqqQQIq")
HEADER_BYTES = _HEADER.size
_CRC_AT = 8
FRAME_BYTES_GOAL = 4 << 20
MOST_BODY_BYTES = 1 << 30
_SPARSE_FIELDS = (pa.field(OFFSET_COLUMN, pa.int64(), nullable=False), pa.field(TIMESTAMP_COLUMN, TIMESTAMP_TYPE, nullable=False))


@dataclass(slots=True)
class FrameHeader:
    """What a frame says of itself. `commit` and times are 0 in a file that was staged: its segment's header has them."""

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

    def header(self, relative: int, position: int, *, commit: int, first_us: int, last_us: int) -> bytes:
        fields = (
            self.body_crc, len(self.body), self.count, self.span or self.count, relative, first_us, last_us, commit,
            self.producer, self.epoch, self.sequence,
        )  # fmt: skip
        blank = _HEADER.pack(MAGIC, VERSION, self.kind, self.flags, 0, *fields)
        return _HEADER.pack(MAGIC, VERSION, self.kind, self.flags, zlib.crc32(blank, position & 0xFFFFFFFF), *fields)

    def buffers(self, relative: int, position: int, *, commit: int, first_us: int, last_us: int) -> list[bytes | memoryview]:
        """The bytes for a place in a file. A frame is bound to it: a copy elsewhere, in some row perhaps, is no frame."""
        padding = padded(len(self.body)) - len(self.body)
        header = self.header(relative, position, commit=commit, first_us=first_us, last_us=last_us)
        return [header, self.body, b"\0" * padding] if padding else [header, self.body]


def padded(length: int) -> int:
    """Frames start at multiples of 8, so that Arrow can use their bodies where they lie."""
    return (length + 7) & ~7


def producer_hash(topic: str, producer: str) -> int:
    return int.from_bytes(blake2b(f"{topic}\0{producer}".encode(), digest_size=8).digest(), "little")


def read_header(data: bytes | memoryview, at: int, position: int) -> FrameHeader | None:
    """The header at a place of `data`, which is at `position` in its file; None if there is no sound one."""
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
        raise NewerFormat(f"A batch was written in format {version}; this Headrace knows {VERSION}.", fix="upgrade Headrace.")
    return FrameHeader(kind, flags, *rest)


def unchecked_header(data: bytes | memoryview, at: int) -> FrameHeader | None:
    """The header at a place of `data`, wherever that lay when it was written: for who looks through bytes, and checks the body."""
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
    """Frames of bounded size for one partition's rows. The batch may end in `_headers`, and in `_offset` and `_timestamp` (compaction)."""
    if batch.num_rows == 1:  # the quick way for single rows
        yield encode_batch(batch, compression=compression)
        return
    rows = max(1, batch.num_rows * FRAME_BYTES_GOAL // max(1, batch.nbytes))
    for first in range(0, batch.num_rows, rows):
        yield encode_batch(batch.slice(first, rows) if rows < batch.num_rows else batch, compression=compression)


def encode_batch(batch: pa.RecordBatch, *, compression: str = "none") -> Frame:
    """One frame; a compacted one (with `_offset`) takes its relative offset and span from the caller."""
    names = batch.schema.names
    flags = (HAS_HEADERS if HEADERS_COLUMN in names else 0) | (SPARSE if OFFSET_COLUMN in names else 0)
    body = batch.serialize()
    if compression != "none":
        flags |= _CODECS[compression]
        body = pa.py_buffer(body.size.to_bytes(8, "little") + pa.compress(body, codec=compression, asbytes=True))
    if body.size > MOST_BODY_BYTES:
        raise BadRows(
            f"A row of {body.size} bytes is larger than the limit of {MOST_BODY_BYTES}.",
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
