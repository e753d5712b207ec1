"""Bodies of HTTP requests: which formats and encodings there are, and the rows in them.

    Content-Type        rows                              Content-Encoding    bytes
    application/json    an object, or an array of them    gzip, zstd          decompressed
    application/x-ndjson one object a line
    text/csv            a heading, then one row a line, typed by the topic's columns

A body is bounded twice by the same number: as it comes, and decompressed, while it is decompressed.
"""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from starlette.datastructures import Headers
from starlette.types import Receive

from headrace.errors import BadRows
from headrace.gateways.inbox import Content, CsvRows, JsonLines, JsonRows, PlainRows
from headrace.http.connections import GuardedConnection
from headrace.http.responses import Refused
from headrace.log.row_files import ChunkSize, ReadMeter, csv_chunks
from headrace.types.json_codec import JsonMismatch, parse_json

LINES, JSON, CSV, TSV, RAW = "lines", "json", "csv", "tsv", "raw"
_TYPES = {
    "application/json": JSON,
    "application/x-ndjson": LINES,
    "application/ndjson": LINES,
    "application/jsonl": LINES,
    "application/x-jsonlines": LINES,
    "application/json-lines": LINES,
    "text/csv": CSV,
    "application/csv": CSV,
    "text/tab-separated-values": TSV,
}
IDENTITY, GZIP, ZSTD = "identity", "gzip", "zstd"
_ENCODINGS = {"": IDENTITY, IDENTITY: IDENTITY, GZIP: GZIP, "x-gzip": GZIP, ZSTD: ZSTD}
_CHARSETS = {"utf-8", "utf8", "us-ascii", "ascii"}
_SECRET_HEADERS = {"authorization", "proxy-authorization", "cookie"}
_DECOMPRESSED_AT_ONCE = 1 << 18
_COMPRESSED_AT_ONCE = 1 << 12
_MAX_MEMBERS = 1_000
_GZIP_WINDOW = 16 + zlib.MAX_WBITS


class ClientDisconnected(Exception):
    """The sender closed the connection before its body was complete, or was disconnected."""


# Heads


@dataclass(frozen=True)
class BodyFormat:
    """What a request's headers say of its body."""

    kind: str
    """`LINES`, `JSON`, `CSV`, `TSV` or `RAW`."""
    encoding: str = IDENTITY

    @classmethod
    def of(cls, headers: Headers) -> BodyFormat:
        """Return the format of a body that is parsed.

        Raises:
            Refused: 415, it is none of those that are supported.
        """
        encoding = _ENCODINGS.get(headers.get("content-encoding", "").strip().lower())
        if encoding is None:
            raise Refused(
                415,
                f"The content encoding {headers['content-encoding'][:40]!r} is not supported.",
                fix="send the body as it is, or with gzip or zstd.",
            )
        name, _, parameters = headers.get("content-type", "").partition(";")
        name = name.strip().lower()
        kind = JSON if name.endswith("+json") else _TYPES.get(name)
        if kind is None:
            raise Refused(
                415,
                f"The content type {name[:80]!r} is not supported.",
                fix="send application/json, application/x-ndjson for JSON lines, or text/csv.",
            )
        if kind in {CSV, TSV}:
            _check_csv(parameters)
        return cls(kind, encoding)


def _check_csv(parameters: str) -> None:
    for parameter in parameters.lower().split(";"):
        name, _, value = (part.strip().strip('"') for part in parameter.partition("="))
        if name == "charset" and value not in _CHARSETS:
            raise Refused(415, f"CSV in {value[:40]!r} is not supported.", fix="send it in UTF-8.")
        if name == "header" and value == "absent":
            raise Refused(
                415,
                "CSV without a heading is not supported.",
                fix="send the columns' names in the first line.",
            )


def check_length(headers: Headers, max_bytes: int) -> None:
    """Refuse a body whose announced length is too large. Nothing is reserved for it."""
    text = headers.get("content-length")
    if text is not None:
        is_length = text.isascii() and text.isdigit() and len(text) < 19
        if not is_length or int(text) > max_bytes:
            raise too_large(max_bytes)


def too_large(max_bytes: int) -> Refused:
    return Refused(413, f"The body has more than {max_bytes:,} bytes.", fix="send it in parts.")


@dataclass(frozen=True)
class RequestMetadata:
    """Columns of a raw body that come from its request."""

    content_type: str | None
    headers: dict[str, str]
    query: str

    @classmethod
    def of(cls, headers: Headers, query: bytes) -> RequestMetadata:
        public = {name: value for name, value in headers.items() if name not in _SECRET_HEADERS}
        return cls(headers.get("content-type"), public, query.decode("latin-1"))


# Bytes


async def read_body(
    receive: Receive, connection: GuardedConnection | None, max_bytes: int, patience_s: float
) -> bytes:
    """Receive a body. Its bytes are counted as held by the connection as they come, and there may
    be none for so many others.

    Raises:
        Refused: 413, it is too large; 503, there is no room for it.
        ClientDisconnected: The rest will not come.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise too_large(max_bytes)
        is_last = not message.get("more_body", False)
        if connection is not None:
            await hold(connection, len(part), patience_s, is_last=is_last)
        parts.append(part)
        if is_last:
            return b"".join(parts)


async def hold(
    connection: GuardedConnection, size: int, patience_s: float, *, is_last: bool
) -> None:
    """Count bytes that the application keeps for a request. Raises Refused if there is no room."""
    if not await connection.hold(size, patience_s, is_last=is_last):
        raise Refused(
            503,
            "There are too many bytes of other requests: there is no room.",
            fix="come back in a moment.",
        )


def decompress(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return the decompressed bytes of a body. At most `max_bytes` and a little more are ever
    decompressed.

    Raises:
        Refused: 413, there are more; 400, they are not of this encoding, or cut off.
    """
    if encoding == IDENTITY:
        return body
    try:
        parts = _gunzip(body, max_bytes) if encoding == GZIP else _unzstd(body, max_bytes)
    except (zlib.error, pa.ArrowException, OSError) as error:
        raise _not_compressed(encoding, str(error)) from None
    return b"".join(parts)


def _gunzip(body: bytes, max_bytes: int) -> list[bytes]:
    """Decompress members, which may follow one another. The body is read a little at a time, since
    zlib copies what it has not used; and small members cost more than their bytes.
    """
    parts: list[bytes] = []
    size = members = 0
    member: Any = None
    max_members = max(_MAX_MEMBERS, max_bytes >> 14)
    for start in range(0, len(body), _COMPRESSED_AT_ONCE):
        rest = body[start : start + _COMPRESSED_AT_ONCE]
        while rest:
            if member is None:
                member = zlib.decompressobj(_GZIP_WINDOW)
                members += 1
                if members > max_members:
                    raise _not_compressed(GZIP, f"it has more than {max_members:,} members")
            part = member.decompress(rest, _DECOMPRESSED_AT_ONCE)
            size += len(part)
            if size > max_bytes:
                raise _bomb(max_bytes)
            parts.append(part)
            rest = member.unconsumed_tail
            if member.eof:
                rest = member.unused_data
                member = None
    while member is not None and not member.eof:  # what zlib still holds
        part = member.decompress(b"", _DECOMPRESSED_AT_ONCE)
        size += len(part)
        if size > max_bytes:
            raise _bomb(max_bytes)
        if not part and not member.eof:
            raise _not_compressed(GZIP, "it is cut off")
        parts.append(part)
    return parts


def _unzstd(body: bytes, max_bytes: int) -> list[bytes]:
    parts: list[bytes] = []
    size = 0
    with pa.CompressedInputStream(pa.BufferReader(body), ZSTD) as stream:
        while part := stream.read(_DECOMPRESSED_AT_ONCE):
            size += len(part)
            if size > max_bytes:
                raise _bomb(max_bytes)
            parts.append(part)
    return parts


def _bomb(max_bytes: int) -> Refused:
    return Refused(
        413, f"The decompressed body has more than {max_bytes:,} bytes.", fix="send it in parts."
    )


def _not_compressed(encoding: str, reason: str) -> Refused:
    return Refused(
        400,
        f"The body cannot be decompressed as {encoding}: {reason}.",
        fix="compress all of it, and name the encoding in Content-Encoding.",
    )


def digest(format: BodyFormat, body: bytes) -> bytes:
    """Return by what a repeat of a body is recognised: its kind and its decompressed bytes."""
    return hashlib.blake2b(body, digest_size=16, person=format.kind.encode()).digest()


# Rows


def body_content(
    kind: str, body: bytes, *, metadata: Mapping[str, Any], columns: Sequence[str]
) -> Content:
    """Return the rows of a body.

    Args:
        kind: The format's kind.
        body: The decompressed bytes.
        metadata: Further columns of a raw body.
        columns: The topic's columns, by which the delimiter of CSV is found.

    Raises:
        Refused: 400, it cannot be read.
    """
    if kind == RAW:
        return PlainRows([{"body": body, **metadata}])
    if kind in {CSV, TSV}:
        return _csv_rows(body, "\t" if kind == TSV else None, columns)
    if kind == LINES:
        return JsonLines([line for line in body.split(b"\n") if line and not line.isspace()])
    if body.lstrip()[:1] != b"[":
        return JsonLines([body.strip()])
    try:
        parsed = parse_json(body)
    except JsonMismatch as error:
        raise Refused(
            400, f"The body cannot be read: {error}.", fix="send an object, or an array of objects."
        ) from None
    return JsonRows(parsed)


def _csv_rows(body: bytes, delimiter: str | None, columns: Sequence[str]) -> CsvRows:
    try:
        chunks = list(
            csv_chunks(
                io.BytesIO(body),
                "The body",
                meter=ReadMeter(),
                size=ChunkSize(max_rows=1 << 62, max_bytes=1 << 62),
                delimiter=delimiter,
                columns=columns,
                start=0,
                on_read=lambda _size: None,
            )
        )
        for chunk in chunks:
            for _, error in chunk.bad:
                raise error
    except BadRows as error:
        raise Refused(400, error.message, fix=error.fix) from None
    return CsvRows([row for chunk in chunks for row in chunk.rows])
