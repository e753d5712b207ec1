"""Reads the two events of the binlog that rows consist of: TABLE_MAP describes a table's columns as
they were when the rows were written, and the events that follow it hold rows in that form.

    TABLE_MAP      shop.orders: id INT, state VARCHAR(20) in latin1, at DATETIME(3)
    WRITE_ROWS     01 00 00 00  04 70 61 69 64  99 b9 78 c0 00 13 88
    out            [1, "paid", "2026-02-28 12:00:00.500"]

Numbers become int and float, binary values bytes, and everything else becomes the text that a
SELECT shows, so that `column_type` makes the same Arrow values of both.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from headrace.cdc.mysql_source.binlog import ROWS_VERSION_2, UPDATE_ROWS, BinlogEvent
from headrace.cdc.mysql_source.column_type import (
    ADDRESSES,
    Charsets,
    MysqlColumn,
    decimal_ddl,
    integer_column,
    json_text,
    time_text,
)
from headrace.errors import ConfigurationError

TINY, SHORT, LONG, FLOAT, DOUBLE, TIMESTAMP, LONGLONG, INT24 = 1, 2, 3, 4, 5, 7, 8, 9
DATE, TIME, DATETIME, YEAR, NEWDATE, VARCHAR, BIT = 10, 11, 12, 13, 14, 15, 16
TIMESTAMP2, DATETIME2, TIME2 = 17, 18, 19
BLOB_COMPRESSED, VARCHAR_COMPRESSED = 140, 141
VECTOR, BOOL, JSON, NEWDECIMAL, ENUM, SET = 242, 244, 245, 246, 247, 248
BLOB, VAR_STRING, STRING, GEOMETRY = 252, 253, 254, 255
_INTEGERS = {TINY: "b", SHORT: "h", LONG: "i", LONGLONG: "q"}
_NUMERIC = {*_INTEGERS, INT24, FLOAT, DOUBLE, NEWDECIMAL, YEAR}
_CHARACTER = {STRING, VAR_STRING, VARCHAR, BLOB}
_MARIADB_CHARACTER = {*_CHARACTER, VARCHAR_COMPRESSED, BLOB_COMPRESSED, GEOMETRY}
_ONE_BYTE_OF_METADATA = {
    *(FLOAT, DOUBLE, BLOB, GEOMETRY, JSON, VECTOR),
    *(TIMESTAMP2, DATETIME2, TIME2, BLOB_COMPRESSED),
}
_TWO_BYTES_OF_METADATA = {VARCHAR, BIT, NEWDECIMAL, VAR_STRING, STRING, VARCHAR_COMPRESSED}
BINARY_COLLATION = 63


class _Absent:
    """A value that an event does not have, because its image of the row is not complete."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


@dataclass(frozen=True)
class LoggedColumn:
    """A column as the binlog describes it."""

    name: str
    kind: int
    metadata: int
    is_unsigned: bool = False
    collation: int = BINARY_COLLATION
    members: tuple[bytes, ...] = ()
    """The values of an ENUM or SET."""

    @property
    def is_binary(self) -> bool:
        return self.collation == BINARY_COLLATION


# TABLE_MAP


def _length(data: bytes, at: int) -> tuple[int, int]:
    """Read a length-encoded integer; return it and the offset behind it."""
    first = data[at]
    if first < 251:
        return first, at + 1
    size = {252: 2, 253: 3, 254: 8}[first]
    return int.from_bytes(data[at + 1 : at + 1 + size], "little"), at + 1 + size


def _lengths(data: bytes) -> list[int]:
    numbers, at = [], 0
    while at < len(data):
        number, at = _length(data, at)
        numbers.append(number)
    return numbers


def _texts(data: bytes, at: int = 0, count: int | None = None) -> tuple[list[bytes], int]:
    texts: list[bytes] = []
    while at < len(data) if count is None else len(texts) < count:
        size, at = _length(data, at)
        texts.append(data[at : at + size])
        at += size
    return texts, at


def _members(data: bytes) -> list[tuple[bytes, ...]]:
    members, at = [], 0
    while at < len(data):
        count, at = _length(data, at)
        texts, at = _texts(data, at, count)
        members.append(tuple(texts))
    return members


def _kinds_and_metadata(kinds: bytes, metadata: bytes) -> list[tuple[int, int]]:
    """Return each column's type and its metadata. CHAR, ENUM and SET share a type, and the real one
    is in the metadata, together with bits of the length.
    """
    columns, at = [], 0
    for kind in kinds:
        size = 1 if kind in _ONE_BYTE_OF_METADATA else 2 if kind in _TWO_BYTES_OF_METADATA else 0
        raw = metadata[at : at + size]
        at += size
        if kind != STRING:
            columns.append((kind, int.from_bytes(raw, "little")))
        elif raw[0] & 0x30 == 0x30:
            columns.append((raw[0], raw[1]))
        else:
            columns.append((raw[0] | 0x30, raw[1] | (raw[0] & 0x30 ^ 0x30) << 4))
    return columns


def _collations(metadata: dict[int, bytes], codes: tuple[int, int], columns: int) -> list[int]:
    """Return the collation of each text column, which is either listed for all, or for those that
    differ from a default.
    """
    default, listed = codes
    if listed in metadata:
        numbers = _lengths(metadata[listed])
    elif default in metadata:
        first, *pairs = _lengths(metadata[default])
        others = dict(zip(pairs[::2], pairs[1::2], strict=True))
        numbers = [others.get(index, first) for index in range(columns)]
    else:
        numbers = [BINARY_COLLATION] * columns  # all of them are geometries
    if len(numbers) != columns:
        raise ConfigurationError(
            f"The binlog describes the collations of {len(numbers)} columns of {columns}.",
            fix="SET GLOBAL binlog_row_metadata = 'FULL'; then run it once with --start-over.",
        )
    return numbers


@dataclass(frozen=True, eq=False)
class LoggedTable:
    """A table as the binlog describes it, and the decoders of its values."""

    schema: str
    name: str
    columns: tuple[LoggedColumn, ...]
    key: tuple[str, ...]
    decoders: tuple[Callable[[bytes, int], tuple[Any, int]], ...]


def table_number(event: BinlogEvent) -> int:
    """Return the number by which rows name the TABLE_MAP that describes them."""
    return int.from_bytes(event.body[:6], "little")


def table_name(event: BinlogEvent) -> tuple[str, str]:
    """Return the schema and the name of the table that a TABLE_MAP event describes."""
    body = event.body
    schema_end = 9 + body[8]
    start = schema_end + 2
    name = body[start : start + body[schema_end + 1]]
    return body[9:schema_end].decode(), name.decode()


def read_table(event: BinlogEvent, charsets: Charsets, *, is_mariadb: bool) -> LoggedTable:
    """Return what a TABLE_MAP event describes.

    Raises:
        ConfigurationError: A column has a type that cannot be decoded, or the names of columns are
            missing.
    """
    body = event.body
    schema, name = table_name(event)
    count, at = _length(body, 12 + body[8] + body[9 + body[8] + 1])
    kinds = body[at : at + count]
    size, at = _length(body, at + count)
    columns = _kinds_and_metadata(kinds, body[at : at + size])
    at += size + (count + 7) // 8
    metadata: dict[int, bytes] = {}
    while at < len(body):
        code = body[at]
        size, at = _length(body, at + 1)
        metadata[code] = body[at : at + size]
        at += size
    names = [text.decode() for text in _texts(metadata.get(4, b""))[0]]
    if len(names) != count:
        raise ConfigurationError(
            f"The binlog does not name the columns of {schema}.{name} at {event.file}:"
            f"{event.position}.",
            fix="SET GLOBAL binlog_row_metadata = 'FULL'; then run it once with --start-over.",
        )
    described = _describe(names, columns, metadata, is_mariadb=is_mariadb)
    key = _lengths(metadata.get(8, b"")) or _lengths(metadata.get(9, b""))[::2]
    return LoggedTable(
        schema,
        name,
        described,
        tuple(names[index] for index in key),
        tuple(_decoder(column, charsets, f"{schema}.{name}") for column in described),
    )


def _describe(
    names: Sequence[str],
    columns: Sequence[tuple[int, int]],
    metadata: dict[int, bytes],
    *,
    is_mariadb: bool,
) -> tuple[LoggedColumn, ...]:
    """Return the columns, with what the metadata says of those that it is about."""
    kinds = [kind for kind, _ in columns]
    numeric = [index for index, kind in enumerate(kinds) if kind in _NUMERIC]
    signs = metadata.get(1, b"")
    unsigned = {
        index
        for at, index in enumerate(numeric)
        if at // 8 < len(signs) and signs[at // 8] & 0x80 >> at % 8
    }
    character = _MARIADB_CHARACTER if is_mariadb else _CHARACTER
    texts = [index for index, kind in enumerate(kinds) if kind in character]
    choices = [index for index, kind in enumerate(kinds) if kind in {ENUM, SET}]
    collations = dict(zip(texts, _collations(metadata, (2, 3), len(texts)), strict=True))
    collations |= dict(zip(choices, _collations(metadata, (10, 11), len(choices)), strict=True))
    members: dict[int, tuple[bytes, ...]] = {}
    for code, kind in ((5, SET), (6, ENUM)):
        indices = [index for index in choices if kinds[index] == kind]
        members |= dict(zip(indices, _members(metadata.get(code, b"")), strict=True))
    return tuple(
        LoggedColumn(
            names[index],
            kind,
            number,
            index in unsigned,
            collations.get(index, BINARY_COLLATION),
            members.get(index, ()),
        )
        for index, (kind, number) in enumerate(columns)
    )


# Rows


@dataclass(frozen=True)
class LoggedRows:
    """The rows of an event. An update has two images of each: before it, and after it."""

    images: list[list[Any]]
    is_complete: bool
    """Whether every image has a value for every column."""


def read_rows(event: BinlogEvent, table: LoggedTable) -> LoggedRows:
    """Return the rows of an event."""
    body, kind = event.body, event.kind
    at = 8
    if kind in ROWS_VERSION_2:
        at += int.from_bytes(body[8:10], "little")
    count, at = _length(body, at)
    size = (count + 7) // 8
    bitmaps = [body[at : at + size]]
    at += size
    if kind in UPDATE_ROWS:
        bitmaps.append(body[at : at + size])
        at += size
    present = [
        [index for index in range(count) if bitmap[index // 8] >> index % 8 & 1]
        for bitmap in bitmaps
    ]
    images: list[list[Any]] = []
    end = len(body)
    while at < end:
        for indices in present:
            row, at = _image(body, at, table, indices)
            images.append(row)
    return LoggedRows(images, all(len(indices) == count for indices in present))


def _image(
    body: bytes, at: int, table: LoggedTable, present: Sequence[int]
) -> tuple[list[Any], int]:
    size = (len(present) + 7) // 8
    nulls = int.from_bytes(body[at : at + size], "little")
    at += size
    row: list[Any] = [ABSENT] * len(table.columns)
    decoders = table.decoders
    for index in present:
        if nulls & 1:
            row[index] = None
        else:
            row[index], at = decoders[index](body, at)
        nulls >>= 1
    return row, at


# Values: a decoder takes the event's bytes and an offset, and returns a value and the offset behind
# it.

Decoder = Callable[[bytes, int], tuple[Any, int]]


def _decoder(column: LoggedColumn, charsets: Charsets, table: str) -> Decoder:
    kind, metadata = column.kind, column.metadata
    if kind in _INTEGERS:
        return _packed(_INTEGERS[kind], is_unsigned=column.is_unsigned)
    simple: dict[int, Callable[[], Decoder]] = {
        INT24: lambda: _integer_of_3_bytes(is_unsigned=column.is_unsigned),
        FLOAT: lambda: _packed("f"),
        DOUBLE: lambda: _packed("d"),
        NEWDECIMAL: lambda: _decimal(metadata & 0xFF, metadata >> 8),
        YEAR: lambda: _year,
        BIT: lambda: _bits((metadata >> 8) + bool(metadata & 0xFF)),
        DATE: lambda: _date,
        NEWDATE: lambda: _date,
        DATETIME: lambda: _old_datetime,
        TIMESTAMP: lambda: _old_timestamp,
        TIME: lambda: _old_time,
        DATETIME2: lambda: _datetime(metadata),
        TIMESTAMP2: lambda: _timestamp(metadata),
        TIME2: lambda: _time(metadata),
        GEOMETRY: lambda: _prefixed(metadata),
        VECTOR: lambda: _prefixed(metadata),
        JSON: lambda: _json(metadata),
    }
    if kind in simple:
        return simple[kind]()
    if kind in {ENUM, SET}:
        decode = charsets.decoder(column.collation)
        members = [decode(member) for member in column.members]
        return _enum(members, metadata) if kind == ENUM else _set(members, metadata)
    if kind in {VARCHAR, VAR_STRING, STRING, BLOB, VARCHAR_COMPRESSED, BLOB_COMPRESSED}:
        is_blob = kind in {BLOB, BLOB_COMPRESSED}
        read = _prefixed(metadata if is_blob else 2 if metadata > 255 else 1)
        if kind in {VARCHAR_COMPRESSED, BLOB_COMPRESSED}:
            read = _converted(read, uncompress)
        if not column.is_binary:
            return _converted(read, charsets.decoder(column.collation))
        return _converted(read, lambda raw: raw.ljust(metadata, b"\0")) if kind == STRING else read
    raise ConfigurationError(
        f"The column {column.name!r} of {table} has a type that cannot be decoded ({kind}).",
        fix="change its type, or leave the table out of tables=[…].",
    )


def _packed(code: str, *, is_unsigned: bool = False) -> Decoder:
    packed = struct.Struct("<" + (code.upper() if is_unsigned else code))
    unpack, size = packed.unpack_from, packed.size
    return lambda body, at: (unpack(body, at)[0], at + size)


def _integer_of_3_bytes(*, is_unsigned: bool) -> Decoder:
    return lambda body, at: (
        int.from_bytes(body[at : at + 3], "little", signed=not is_unsigned),
        at + 3,
    )


def _bits(size: int) -> Decoder:
    return lambda body, at: (int.from_bytes(body[at : at + size], "big"), at + size)


def _year(body: bytes, at: int) -> tuple[int, int]:
    return body[at] + 1900 if body[at] else 0, at + 1


_BYTES_OF_DIGITS = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)


def _decimal(precision: int, scale: int) -> Decoder:
    """Return a decoder of DECIMAL: groups of nine digits in four bytes each, those at both ends in
    fewer; the first bit is inverted, and all others too if the number is negative.
    """
    whole_groups, whole_rest = divmod(precision - scale, 9)
    fraction_groups, fraction_rest = divmod(scale, 9)
    sizes = [
        *([(_BYTES_OF_DIGITS[whole_rest], whole_rest)] if whole_rest else []),
        *[(4, 9)] * (whole_groups + fraction_groups),
        *([(_BYTES_OF_DIGITS[fraction_rest], fraction_rest)] if fraction_rest else []),
    ]
    size = sum(count for count, _ in sizes)
    whole_digits = precision - scale
    sign, every = 1 << size * 8 - 1, (1 << size * 8) - 1

    def decode(body: bytes, at: int) -> tuple[str, int]:
        number = int.from_bytes(body[at : at + size], "big") ^ sign
        is_negative = bool(number & sign)
        raw = (number ^ every if is_negative else number).to_bytes(size, "big")
        digits, start = [], 0
        for count, width in sizes:
            digits.append(f"{int.from_bytes(raw[start : start + count], 'big'):0{width}d}")
            start += count
        text = "".join(digits)
        whole = text[:whole_digits].lstrip("0") or "0"
        shown = f"{whole}.{text[whole_digits:]}" if scale else whole
        return ("-" + shown if is_negative else shown), at + size

    return decode


def _date(body: bytes, at: int) -> tuple[str, int]:
    number = int.from_bytes(body[at : at + 3], "little")
    return f"{number >> 9:04d}-{number >> 5 & 15:02d}-{number & 31:02d}", at + 3


_FRACTION_SCALES = (0, 10_000, 10_000, 100, 100, 1, 1)


def _fraction(micros: int, digits: int) -> str:
    return f".{micros:06d}"[: digits + 1] if digits else ""


def _datetime(digits: int) -> Decoder:
    extra, scale = (digits + 1) // 2, _FRACTION_SCALES[digits]

    def decode(body: bytes, at: int) -> tuple[str, int]:
        packed = int.from_bytes(body[at : at + 5], "big") - 0x8000000000
        at += 5
        days, time = packed >> 17, packed & 0x1FFFF
        year, month = divmod(days >> 5, 13)
        micros = int.from_bytes(body[at : at + extra], "big") * scale
        text = (
            f"{year:04d}-{month:02d}-{days & 31:02d}"
            f" {time >> 12:02d}:{time >> 6 & 63:02d}:{time & 63:02d}{_fraction(micros, digits)}"
        )
        return text, at + extra

    return decode


_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - the text has no zone, as in a SELECT


def _timestamp_text(seconds: int, micros: int, digits: int) -> str:
    if not seconds and not micros:
        return f"0000-00-00 00:00:00{_fraction(0, digits)}"
    return f"{_EPOCH + timedelta(seconds=seconds)}{_fraction(micros, digits)}"


def _timestamp(digits: int) -> Decoder:
    extra, scale = (digits + 1) // 2, _FRACTION_SCALES[digits]

    def decode(body: bytes, at: int) -> tuple[str, int]:
        seconds = int.from_bytes(body[at : at + 4], "big")
        at += 4
        micros = int.from_bytes(body[at : at + extra], "big") * scale
        return _timestamp_text(seconds, micros, digits), at + extra

    return decode


def _time(digits: int) -> Decoder:
    extra, scale = (digits + 1) // 2, _FRACTION_SCALES[digits]
    zero, bits = 0x800000 << extra * 8, extra * 8

    def decode(body: bytes, at: int) -> tuple[str, int]:
        packed = int.from_bytes(body[at : at + 3 + extra], "big") - zero
        whole = abs(packed) >> bits
        micros = (abs(packed) & (1 << bits) - 1) * scale
        text = time_text(
            whole >> 12 & 0x3FF, whole >> 6 & 63, whole & 63, micros, is_negative=packed < 0
        )
        return text, at + 3 + extra

    return decode


# Tables that were created by servers of before 5.6, or by MariaDB with mysql56_temporal_format off


def _old_datetime(body: bytes, at: int) -> tuple[str, int]:
    day, time = divmod(int.from_bytes(body[at : at + 8], "little"), 1_000_000)
    date = f"{day // 10000:04d}-{day // 100 % 100:02d}-{day % 100:02d}"
    return f"{date} {time // 10000:02d}:{time // 100 % 100:02d}:{time % 100:02d}", at + 8


def _old_timestamp(body: bytes, at: int) -> tuple[str, int]:
    return _timestamp_text(int.from_bytes(body[at : at + 4], "little"), 0, 0), at + 4


def _old_time(body: bytes, at: int) -> tuple[str, int]:
    packed = int.from_bytes(body[at : at + 3], "little", signed=True)
    whole = abs(packed)
    return time_text(
        whole // 10000, whole // 100 % 100, whole % 100, 0, is_negative=packed < 0
    ), at + 3


def _enum(members: Sequence[str], size: int) -> Decoder:
    """Return a decoder of ENUM. Number 0 is what an invalid value became: an empty text."""
    texts = ["", *members]
    return lambda body, at: (texts[int.from_bytes(body[at : at + size], "little")], at + size)


def _set(members: Sequence[str], size: int) -> Decoder:
    def decode(body: bytes, at: int) -> tuple[str, int]:
        bits = int.from_bytes(body[at : at + size], "little")
        chosen = [member for index, member in enumerate(members) if bits >> index & 1]
        return ",".join(chosen), at + size

    return decode


def _prefixed(prefix: int) -> Decoder:
    """Return a decoder of bytes after their length."""

    def decode(body: bytes, at: int) -> tuple[bytes, int]:
        start = at + prefix
        end = start + int.from_bytes(body[at:start], "little")
        return body[start:end], end

    return decode


def _converted(read: Decoder, convert: Callable[[bytes], Any]) -> Decoder:
    def decode(body: bytes, at: int) -> tuple[Any, int]:
        raw, at = read(body, at)
        return convert(raw), at

    return decode


def uncompress(raw: bytes) -> bytes:
    r"""Return the value of a COMPRESSED column of MariaDB: a byte that says how it is stored, then
    the length and the value compressed by zlib, or the value as it is.

    Example:
        >>> uncompress(b"\x00short")
        b'short'
    """
    if not raw or not raw[0] & 0xF0:
        return raw[1:]
    start = 1 + (raw[0] & 7)
    return zlib.decompress(raw[start:], -zlib.MAX_WBITS if raw[0] & 8 else zlib.MAX_WBITS)


def _json(prefix: int) -> Decoder:
    from pymysqlreplication.json_binary import parse_json

    def decode(body: bytes, at: int) -> tuple[str | None, int]:
        start = at + prefix
        end = start + int.from_bytes(body[at:start], "little")
        raw = body[start:end]
        parsed = parse_json(raw[0], raw[1:]) if raw else None
        return (None if parsed is None else json_text(parsed)), end

    return decode


# Columns

_INTEGER_TYPES = {
    TINY: "tinyint",
    SHORT: "smallint",
    INT24: "mediumint",
    LONG: "int",
    LONGLONG: "bigint",
}
_SIMPLE_COLUMNS = {
    FLOAT: ("FLOAT", "float"),
    DOUBLE: ("DOUBLE", "double"),
    YEAR: ("INT", "year"),
    BIT: ("BIGINT", "bit"),
    DATE: ("DATE", "date"),
    NEWDATE: ("DATE", "date"),
    DATETIME: ("TIMESTAMP_NTZ", "datetime"),
    DATETIME2: ("TIMESTAMP_NTZ", "datetime"),
    TIMESTAMP: ("TIMESTAMP", "timestamp"),
    TIMESTAMP2: ("TIMESTAMP", "timestamp"),
    TIME: ("STRING", "time"),
    TIME2: ("STRING", "time"),
    JSON: ("STRING", "json"),
    ENUM: ("STRING", "enum"),
    SET: ("STRING", "set"),
    GEOMETRY: ("BINARY", "bytes"),
    VECTOR: ("BINARY", "bytes"),
}


def topic_column(column: LoggedColumn, known_form: str | None) -> MysqlColumn:
    """Return a column as it is in the topic. `known_form` is how the catalogue says that its values
    are written: the binlog does not tell a UUID or an address from a BINARY of that size.
    """
    name = column.name
    if column.kind in _INTEGER_TYPES:
        return integer_column(name, _INTEGER_TYPES[column.kind], is_unsigned=column.is_unsigned)
    if column.kind == NEWDECIMAL:
        ddl = decimal_ddl(column.metadata & 0xFF, column.metadata >> 8)
        return MysqlColumn(name, ddl, "decimal")
    if column.kind in _SIMPLE_COLUMNS:
        return MysqlColumn(name, *_SIMPLE_COLUMNS[column.kind])
    if known_form is not None and ADDRESSES.get(known_form) == column.metadata:
        return MysqlColumn(name, "STRING", known_form)
    return (
        MysqlColumn(name, "BINARY", "bytes")
        if column.is_binary
        else MysqlColumn(name, "STRING", "text")
    )
