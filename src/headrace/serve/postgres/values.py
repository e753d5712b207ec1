"""Values of views as Postgres's protocol writes them, and parameters as it reads them.

Every type of a view has a type of Postgres's, with its number (`oid`):

    BOOLEAN bool        STRING    text         LIST of a plain type   its array
    TINYINT int2        BINARY    bytea        STRUCT, MAP, others    json
    SMALLINT int2       DATE      date
    INT     int4        TIMESTAMP timestamptz
    BIGINT  int8        TIMESTAMP_NTZ timestamp
    FLOAT   float4      TIME      time
    DOUBLE  float8      DECIMAL   numeric      INTERVAL DAY TO SECOND interval

Each column has two forms, text and binary; clients choose. `encode_rows` makes the messages of all
rows of a batch at once, by Arrow: no row is touched in Python.
"""

from __future__ import annotations

import datetime as dt
import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.serve.postgres.messages import BINARY, TEXT, ColumnDescription
from headrace.types.json_codec import json_text, plain_decimal

BOOL, BYTEA, NAME, INT8, INT2, INT4, TEXT_OID = 16, 17, 19, 20, 21, 23, 25
OID, JSON, FLOAT4, FLOAT8, UNKNOWN = 26, 114, 700, 701, 705
BPCHAR, VARCHAR, DATE, TIME, TIMESTAMP, TIMESTAMPTZ = 1042, 1043, 1082, 1083, 1114, 1184
INTERVAL, NUMERIC, UUID, JSONB, REGCLASS = 1186, 1700, 2950, 3802, 2205
_ARRAYS = {
    BOOL: 1000,
    BYTEA: 1001,
    INT2: 1005,
    INT4: 1007,
    TEXT_OID: 1009,
    INT8: 1016,
    FLOAT4: 1021,
    FLOAT8: 1022,
    TIMESTAMP: 1115,
    DATE: 1182,
    TIME: 1183,
    TIMESTAMPTZ: 1185,
    INTERVAL: 1187,
    NUMERIC: 1231,
    JSON: 199,
    OID: 1028,
    NAME: 1003,
}
ARRAY_ELEMENTS = {array: element for element, array in _ARRAYS.items()} | {
    1015: VARCHAR,
    1014: BPCHAR,
}
_SIZES = {
    BOOL: 1,
    INT2: 2,
    INT4: 4,
    INT8: 8,
    FLOAT4: 4,
    FLOAT8: 8,
    DATE: 4,
    TIME: 8,
    TIMESTAMP: 8,
    TIMESTAMPTZ: 8,
    INTERVAL: 16,
    OID: 4,
}
_DAYS_TO_2000 = 10_957
_US_TO_2000 = _DAYS_TO_2000 * 86_400 * 1_000_000
_DAY_US = 86_400 * 1_000_000


class BadParameter(Exception):
    """A parameter's bytes are no value of its type."""


# Types


@dataclass(frozen=True)
class PostgresType:
    """A type of Postgres's, and its modifier: of numeric its digits."""

    oid: int
    modifier: int = -1

    @property
    def size(self) -> int:
        return _SIZES.get(self.oid, -1)


def postgres_type(kind: pa.DataType) -> PostgresType:
    """The type of Postgres's for a type of a view."""
    if pa.types.is_decimal(kind):
        return PostgresType(NUMERIC, ((kind.precision << 16) | (kind.scale & 0x7FF)) + 4)
    for is_kind, oid in _OIDS:
        if is_kind(kind):
            return PostgresType(oid)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        element = postgres_type(kind.value_type)
        if element.oid in _ARRAYS and element.oid != JSON and not _is_list(kind.value_type):
            return PostgresType(_ARRAYS[element.oid], element.modifier)
    return PostgresType(JSON)


_OIDS: tuple[tuple[Callable[[pa.DataType], bool], int], ...] = (
    (pa.types.is_boolean, BOOL),
    (pa.types.is_int8, INT2),
    (pa.types.is_int16, INT2),
    (pa.types.is_int32, INT4),
    (pa.types.is_int64, INT8),
    (pa.types.is_uint32, OID),
    (pa.types.is_float32, FLOAT4),
    (pa.types.is_float64, FLOAT8),
    (pa.types.is_string, TEXT_OID),
    (pa.types.is_null, TEXT_OID),
    (pa.types.is_binary, BYTEA),
    (pa.types.is_date32, DATE),
    (pa.types.is_time, TIME),
    (pa.types.is_duration, INTERVAL),
    (lambda kind: pa.types.is_timestamp(kind) and kind.tz is not None, TIMESTAMPTZ),
    (pa.types.is_timestamp, TIMESTAMP),
)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def describe(schema: pa.Schema, formats: Sequence[int] = ()) -> list[ColumnDescription]:
    """How the columns of a result are described to clients, with the format of each."""
    columns = []
    for field, chosen in zip(schema, column_formats(formats, len(schema)), strict=True):
        kind = postgres_type(field.type)
        columns.append(ColumnDescription(field.name, kind.oid, kind.size, kind.modifier, chosen))
    return columns


def column_formats(formats: Sequence[int], columns: int) -> list[int]:
    """The format of each column: none given means text, one is for all."""
    if not formats:
        return [TEXT] * columns
    if len(formats) == 1:
        return [formats[0]] * columns
    return list(formats)


# Rows


def encode_rows(rows: pa.RecordBatch, formats: Sequence[int], zone: str = "UTC") -> bytes:
    """The messages of some rows, one behind the other. See `row_messages`."""
    return joined_bytes(row_messages(rows, formats, zone))


def row_messages(
    rows: pa.RecordBatch | pa.Table, formats: Sequence[int], zone: str = "UTC"
) -> pa.BinaryArray:
    """The message of each row.

    Args:
        rows: The rows.
        formats: The format of each column.
        zone: The session's time zone, in which TIMESTAMP is written as text.
    """
    columns = [
        encode_binary(column) if chosen == BINARY else encode_text(column, zone)
        for column, chosen in zip(_arrays(rows), formats, strict=True)
    ]
    count = rows.num_rows
    sizes = np.full(count, 4 + 2 + 4 * len(columns), dtype=np.int64)
    parts: list[pa.Array] = []
    for column in columns:
        lengths = pc.binary_length(column)
        sizes += pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False)
        parts.append(_fixed(pc.fill_null(lengths, -1).to_numpy(zero_copy_only=False), ">i4"))
        parts.append(pc.fill_null(column, b""))
    heads = np.empty(count, dtype=[("letter", "S1"), ("size", ">i4"), ("columns", ">i2")])
    heads["letter"], heads["size"], heads["columns"] = b"D", sizes, len(columns)
    return pc.binary_join_element_wise(_from_numpy(heads, 7), *parts, b"")


def _arrays(rows: pa.RecordBatch | pa.Table) -> list[pa.Array]:
    if isinstance(rows, pa.RecordBatch):
        return list(rows.columns)
    return [column.combine_chunks() for column in rows.columns]


def copy_messages(rows: pa.RecordBatch | pa.Table, zone: str = "UTC") -> pa.BinaryArray:
    """The message of each row of COPY … TO STDOUT, in its text format."""
    texts = []
    for column in _arrays(rows):
        text = encode_text(column, zone).cast(pa.string())
        for plain, escape in (("\\", "\\\\"), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
            text = pc.replace_substring(text, plain, escape)
        texts.append(pc.fill_null(text, "\\N"))
    lines = pc.binary_join_element_wise(*texts, "\t") if texts else pa.array([""] * rows.num_rows)
    lines = pc.binary_join_element_wise(lines, "\n", "").cast(pa.binary())
    heads = np.empty(rows.num_rows, dtype=[("letter", "S1"), ("size", ">i4")])
    heads["letter"] = b"d"
    heads["size"] = pc.binary_length(lines).to_numpy(zero_copy_only=False) + 4
    return pc.binary_join_element_wise(_from_numpy(heads, 5), lines, b"")


def joined_bytes(joined: pa.BinaryArray) -> bytes:
    """The bytes of all values, one behind the other."""
    if not len(joined):
        return b""
    offsets = np.frombuffer(joined.buffers()[1], np.int32)[joined.offset :]
    return bytes(memoryview(joined.buffers()[2])[offsets[0] : offsets[len(joined)]])


def _from_numpy(values: np.ndarray[Any, Any], width: int) -> pa.Array:
    buffer = pa.py_buffer(np.ascontiguousarray(values).tobytes())
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(values), [None, buffer]).cast(
        pa.binary()
    )


def _fixed(values: np.ndarray[Any, Any], form: str) -> pa.Array:
    return _from_numpy(values.astype(form), np.dtype(form).itemsize)


def _with_nulls(encoded: pa.Array, column: pa.Array) -> pa.Array:
    if not column.null_count:
        return encoded
    return pc.if_else(column.is_valid(), encoded, pa.scalar(None, pa.binary()))


# Text


def encode_text(column: pa.Array, zone: str = "UTC") -> pa.BinaryArray:
    """A column in text form."""
    kind = column.type
    if pa.types.is_null(kind):
        return pa.nulls(len(column), pa.binary())
    if pa.types.is_boolean(kind):
        return pc.if_else(column, "t", "f").cast(pa.binary())
    if pa.types.is_binary(kind):
        return pa.array(
            [None if value is None else b"\\x" + value.hex().encode() for value in _list(column)],
            pa.binary(),
        )
    if _is_list(kind) and postgres_type(kind).oid != JSON:
        elements = encode_text(column.flatten(), zone).to_pylist()
        return _lists(column, elements, lambda values: _array_text(values, kind.value_type))
    return _plain_text(column, zone).cast(pa.binary())


def _plain_text(column: pa.Array, zone: str) -> pa.StringArray:
    kind = column.type
    if pa.types.is_string(kind):
        if pc.any(pc.match_substring(column, "\0")).as_py():
            return pc.replace_substring(column, "\0", "")  # no text of Postgres's has a zero byte
        return column
    if pa.types.is_integer(kind):
        return column.cast(pa.string())
    if pa.types.is_floating(kind):
        return _float_text(column)
    if pa.types.is_decimal(kind):
        return plain_decimal(column)
    if pa.types.is_date32(kind):
        return _with_era(column.cast(pa.string()))
    if pa.types.is_timestamp(kind):
        return _timestamp_text(column, zone)
    if pa.types.is_time(kind):
        return _fraction_trimmed(column.cast(pa.time64("us")).cast(pa.string()))
    if pa.types.is_duration(kind):
        return pa.array([_interval_text(value) for value in _microseconds(column)], pa.string())
    return json_text(column)


def _list(column: pa.Array) -> list[Any]:
    return list(column.to_pylist())


def _float_text(column: pa.Array) -> pa.StringArray:
    text = column.cast(pa.string())
    if pc.all(pc.is_finite(column)).as_py() is not False:
        return text
    for arrow_name, name in (
        ("nan", "NaN"),
        ("-nan", "NaN"),
        ("inf", "Infinity"),
        ("-inf", "-Infinity"),
    ):
        text = pc.if_else(pc.equal(text, arrow_name), name, text)
    return text


def _timestamp_text(column: pa.Array, zone: str) -> pa.StringArray:
    if column.type.tz is None:
        return _with_era(_fraction_trimmed(column.cast(pa.timestamp("us")).cast(pa.string())))
    instants = column.cast(pa.timestamp("us", tz="UTC"))
    if zone == "UTC":
        local = instants.cast(pa.timestamp("us"))
        return _with_era(_fraction_trimmed(local.cast(pa.string())), "+00")
    local = pc.local_timestamp(instants.cast(pa.timestamp("us", tz=zone)))
    offsets = pc.subtract(local.cast(pa.int64()), instants.cast(pa.int64()))
    names = pa.array([_offset_text(offset) for offset in _list(offsets)], pa.string())
    text = _fraction_trimmed(local.cast(pa.string()))
    return _with_era(pc.binary_join_element_wise(text, names, ""))


def _fraction_trimmed(text: pa.StringArray) -> pa.StringArray:
    """Times with six digits of a second, without the zeros at their end."""
    return pc.replace_substring_regex(pc.replace_substring_regex(text, r"0+$", ""), r"\.$", "")


def _offset_text(offset_us: int | None) -> str | None:
    if offset_us is None:
        return None
    seconds = abs(offset_us) // 1_000_000
    text = f"{'-' if offset_us < 0 else '+'}{seconds // 3600:02}"
    if seconds % 3600:
        text += f":{seconds % 3600 // 60:02}"
    return text + (f":{seconds % 60:02}" if seconds % 60 else "")


_BEFORE_YEAR_1 = re.compile(r"^(-?)(\d{4,})(-.*)$")


def _with_era(text: pa.StringArray, suffix: str = "") -> pa.StringArray:
    """Years before 1 as Postgres writes them: 0000 is `0001 BC`."""
    written = pc.binary_join_element_wise(text, suffix, "") if suffix else text
    early = pc.match_substring_regex(text, r"^(-|0000)")
    if not pc.any(early).as_py():
        return written
    return pa.array(
        [
            _era(value) if is_early else value
            for value, is_early in zip(_list(written), _list(early), strict=True)
        ],
        pa.string(),
    )


def _era(text: str) -> str:
    match = _BEFORE_YEAR_1.match(text)
    assert match is not None
    year = int(match[2]) + 1
    return f"{year:04}{match[3]} BC"


def _interval_text(microseconds: int | None) -> str | None:
    """As Postgres writes it: `1 day 02:00:00`, where each part has its own sign."""
    if microseconds is None:
        return None
    days = int(math.copysign(abs(microseconds) // _DAY_US, microseconds))
    rest = abs(microseconds) % _DAY_US
    seconds, fraction = divmod(rest, 1_000_000)
    parts = [] if not days else [f"{days} day{'' if days == 1 else 's'}"]
    if rest or not days:
        clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        clock += f".{fraction:06}".rstrip("0") if fraction else ""
        parts.append(("-" if microseconds < 0 and rest else "") + clock)
    return " ".join(parts)


def _microseconds(column: pa.Array) -> list[int | None]:
    return _list(column.cast(pa.duration("us")).cast(pa.int64()))


def _lists(
    column: pa.Array, elements: list[Any], join: Callable[[list[Any]], bytes]
) -> pa.BinaryArray:
    """One value per list, made of its elements."""
    lengths = _list(pc.list_value_length(column))
    encoded: list[bytes | None] = []
    at = 0
    for length in lengths:
        if length is None:
            encoded.append(None)
            continue
        encoded.append(join(elements[at : at + length]))
        at += length
    return pa.array(encoded, pa.binary())


_PLAIN_ELEMENT = re.compile(rb'[^\s{}",\\]+')


def _array_text(elements: list[bytes | None], kind: pa.DataType) -> bytes:
    is_text = pa.types.is_string(kind) or pa.types.is_binary(kind)
    parts = []
    for element in elements:
        if element is None:
            parts.append(b"NULL")
        elif _PLAIN_ELEMENT.fullmatch(element) and not (is_text and element.upper() == b"NULL"):
            parts.append(element)
        else:
            parts.append(b'"' + element.replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"')
    return b"{" + b",".join(parts) + b"}"


# Binary


def encode_binary(column: pa.Array) -> pa.BinaryArray:
    """A column in binary form."""
    kind = column.type
    oid = postgres_type(kind).oid
    form = _NUMBER_FORMS.get(oid)
    if form is not None:
        return _with_nulls(_fixed(_numbers(column, oid), form), column)
    if oid == NUMERIC:
        values = [None if value is None else numeric_binary(value) for value in _list(column)]
        return pa.array(values, pa.binary())
    if oid == INTERVAL:
        values = [
            None if value is None else struct.pack(">qii", value, 0, 0)
            for value in _microseconds(column)
        ]
        return pa.array(values, pa.binary())
    if oid == BYTEA:
        return column.cast(pa.binary())
    if oid in ARRAY_ELEMENTS:
        elements = encode_binary(column.flatten()).to_pylist()
        element_oid = ARRAY_ELEMENTS[oid]
        return _lists(column, elements, lambda values: _array_binary(values, element_oid))
    return encode_text(column)  # text and json are the same in both forms


_NUMBER_FORMS = {
    BOOL: ">i1",
    INT2: ">i2",
    INT4: ">i4",
    INT8: ">i8",
    OID: ">u4",
    FLOAT4: ">f4",
    FLOAT8: ">f8",
    DATE: ">i4",
    TIME: ">i8",
    TIMESTAMP: ">i8",
    TIMESTAMPTZ: ">i8",
}


def _numbers(column: pa.Array, oid: int) -> np.ndarray[Any, Any]:
    """The numbers of a column, as Postgres counts them: days and times from the year 2000."""
    if oid == BOOL:
        column = column.cast(pa.int8())
    elif oid == DATE:
        column = column.cast(pa.int32())
    elif oid == TIME:
        column = column.cast(pa.time64("us")).cast(pa.int64())
    elif oid in {TIMESTAMP, TIMESTAMPTZ}:
        column = column.cast(pa.timestamp("us", tz=column.type.tz)).cast(pa.int64())
    zero = 0.0 if oid in {FLOAT4, FLOAT8} else 0
    numbers = pc.fill_null(column, zero).to_numpy(zero_copy_only=False)
    if oid == DATE:
        return np.asarray(numbers - _DAYS_TO_2000)
    if oid in {TIMESTAMP, TIMESTAMPTZ}:
        return np.asarray(numbers - _US_TO_2000)
    return np.asarray(numbers)


def numeric_binary(value: Decimal) -> bytes:
    """A number as digits to the base of 10,000, and the power of the first one."""
    if value.is_nan():
        return struct.pack(">hhHh", 0, 0, 0xC000, 0)
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    scale = max(0, -exponent)
    text = "".join(map(str, digits)) + "0" * max(0, exponent)
    whole, fraction = (text[:-scale], text[-scale:].rjust(scale, "0")) if scale else (text, "")
    whole = whole.rjust(-(-len(whole) // 4) * 4, "0")
    fraction = fraction.ljust(-(-len(fraction) // 4) * 4, "0")
    groups = [int((whole + fraction)[at : at + 4]) for at in range(0, len(whole + fraction), 4)]
    weight = len(whole) // 4 - 1
    while groups and groups[0] == 0:
        groups.pop(0)
        weight -= 1
    while groups and groups[-1] == 0:
        groups.pop()
    if not groups:
        weight = 0
    head = struct.pack(">hhHh", len(groups), weight, 0x4000 if sign and groups else 0, scale)
    return head + struct.pack(f">{len(groups)}h", *groups)


def _array_binary(elements: list[bytes | None], oid: int) -> bytes:
    if not elements:
        return struct.pack(">iii", 0, 0, oid)
    has_nulls = any(element is None for element in elements)
    parts = [struct.pack(">iiiii", 1, int(has_nulls), oid, len(elements), 1)]
    for element in elements:
        if element is None:
            parts.append(b"\xff\xff\xff\xff")
        else:
            parts += (struct.pack(">i", len(element)), element)
    return b"".join(parts)


# Parameters


def decode_parameter(oid: int, form: int, data: bytes | None) -> Any:
    """The Python value of a parameter. BadParameter if its bytes are none of its type."""
    if data is None:
        return None
    try:
        if oid in ARRAY_ELEMENTS:
            return _decode_array(oid, form, data)
        return _decode_binary(oid, data) if form == BINARY else _decode_text(oid, data.decode())
    except (ValueError, InvalidOperation, struct.error, OverflowError, IndexError) as error:
        shown = data[:40] if form == BINARY else data[:40].decode(errors="replace")
        raise BadParameter(f"{shown!r}: {error}") from None


_TRUE = {"t", "true", "y", "yes", "on", "1"}
_FALSE = {"f", "false", "n", "no", "off", "0"}


def _decode_text(oid: int, text: str) -> Any:
    if oid == BOOL:
        lowered = text.strip().lower()
        if lowered not in _TRUE | _FALSE:
            raise ValueError("it is no boolean")
        return lowered in _TRUE
    if oid in {INT2, INT4, INT8, OID}:
        return int(text)
    if oid in {FLOAT4, FLOAT8}:
        return float(text)
    if oid == NUMERIC:
        return Decimal(text.strip())
    if oid == BYTEA:
        return bytes.fromhex(text[2:]) if text.startswith("\\x") else text.encode()
    if oid == DATE:
        return dt.date.fromisoformat(text.strip())
    if oid == TIME:
        return dt.time.fromisoformat(text.strip())
    if oid == TIMESTAMP:
        return dt.datetime.fromisoformat(text.strip()).replace(tzinfo=None)
    if oid == TIMESTAMPTZ:
        moment = dt.datetime.fromisoformat(text.strip())
        return moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)
    return text


def _decode_binary(oid: int, data: bytes) -> Any:
    form = {BOOL: ">?", INT2: ">h", INT4: ">i", INT8: ">q", OID: ">I", FLOAT4: ">f"}.get(oid)
    form = ">d" if oid == FLOAT8 else form
    if form is not None:
        return struct.unpack(form, data)[0]
    if oid == NUMERIC:
        return _decode_numeric(data)
    if oid == BYTEA:
        return data
    if oid == DATE:
        return dt.date(2000, 1, 1) + dt.timedelta(days=struct.unpack(">i", data)[0])
    if oid == TIME:
        midnight = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
        return (midnight + dt.timedelta(microseconds=struct.unpack(">q", data)[0])).time()
    if oid in {TIMESTAMP, TIMESTAMPTZ}:
        start = dt.datetime(2000, 1, 1, tzinfo=dt.UTC if oid == TIMESTAMPTZ else None)
        return start + dt.timedelta(microseconds=struct.unpack(">q", data)[0])
    if oid == INTERVAL:
        microseconds, days, months = struct.unpack(">qii", data)
        if months:
            raise ValueError("an interval of months has no fixed length")
        return dt.timedelta(days=days, microseconds=microseconds)
    if oid == JSONB:
        return data[1:].decode()
    if oid == UUID:
        text = data.hex()
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
    return data.decode()


def _decode_numeric(data: bytes) -> Decimal:
    count, weight, sign, scale = struct.unpack_from(">hhHh", data)
    if sign == 0xC000:
        return Decimal("NaN")
    number = Decimal(0)
    for digit in struct.unpack_from(f">{count}h", data, 8):
        number = number * 10_000 + digit
    number = number.scaleb(4 * (weight - count + 1))
    number = round(number, scale) if scale else number
    return -number if sign == 0x4000 else number


def _decode_array(oid: int, form: int, data: bytes) -> list[Any]:
    element_oid = ARRAY_ELEMENTS[oid]
    if form == TEXT:
        return [
            None if text is None else _decode_text(element_oid, text)
            for text in _array_elements(data.decode())
        ]
    dimensions, _, _ = struct.unpack_from(">iii", data)
    if not dimensions:
        return []
    if dimensions != 1:
        raise ValueError("it has more than one dimension")
    (count,) = struct.unpack_from(">i", data, 12)
    values: list[Any] = []
    at = 20
    for _ in range(count):
        (length,) = struct.unpack_from(">i", data, at)
        at += 4
        if length < 0:
            values.append(None)
            continue
        values.append(_decode_binary(element_oid, data[at : at + length]))
        at += length
    return values


_ELEMENT = re.compile(r'\s*(?:"((?:[^"\\]|\\.)*)"|([^",{}]*?))\s*([,}])', re.DOTALL)


def _array_elements(text: str) -> list[str | None]:
    stripped = text.strip()
    if not stripped.startswith("{") or not stripped.endswith("}"):
        raise ValueError("an array is written as {1,2}")
    if not stripped[1:-1].strip():
        return []
    elements: list[str | None] = []
    at = 1
    while at < len(stripped):
        match = _ELEMENT.match(stripped, at)
        if match is None:
            raise ValueError("an array is written as {1,2}")
        if match[1] is not None:
            elements.append(re.sub(r"\\(.)", r"\1", match[1], flags=re.DOTALL))
        else:
            elements.append(None if match[2].upper() == "NULL" else match[2])
        at = match.end()
    return elements


def is_zone(name: str) -> bool:
    """Whether a name is a time zone's."""
    try:
        ZoneInfo(name)
    except (ValueError, KeyError, OSError):
        return False
    return True
