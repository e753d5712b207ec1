"""MariaDB's types and values as ours. The binlog and a SELECT give some of them in different forms; here both become the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address, IPv6Address
from json import dumps
from typing import Any
from uuid import UUID

import pyarrow as pa

from headrace.cdc.marking import Marks

_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")
_SIGNED = {"tinyint": "TINYINT", "smallint": "SMALLINT", "mediumint": "INT", "int": "INT", "bigint": "BIGINT"}
_UNSIGNED = {"tinyint": "SMALLINT", "smallint": "INT", "mediumint": "INT", "int": "BIGINT", "bigint": "DECIMAL(20,0)"}
_PLAIN = {"float": "FLOAT", "double": "DOUBLE", "date": "DATE", "datetime": "TIMESTAMP_NTZ", "timestamp": "TIMESTAMP", "year": "INT", "bit": "BIGINT"}
_BINARY = {
    "binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob", "vector", "geometry", "point", "linestring", "polygon", "multipoint", "multilinestring",
    "multipolygon", "geometrycollection", "geomcollection",
}  # fmt: skip
"""Shapes are in the server's own form: the SRID in four bytes, then WKB."""


def ddl_type(data_type: str, column_type: str) -> str:
    """From `information_schema.columns`. TIME can be negative and longer than a day: it stays text, and so do sets, enums and whatever is not known."""
    if data_type in _SIGNED:
        return (_UNSIGNED if "unsigned" in column_type else _SIGNED)[data_type]
    if match := _DECIMAL.match(column_type):
        return f"DECIMAL({match[1]},{match[2]})" if int(match[1]) <= 38 else "STRING"
    return "BINARY" if data_type in _BINARY else _PLAIN.get(data_type, "STRING")


def arrays_of(columns: Sequence[Sequence[Any]], schema: pa.Schema, marks: Marks, forms: Mapping[str, str]) -> list[pa.Array]:
    return [_array(values, field, marks, forms.get(field.name)) for values, field in zip(columns, schema, strict=True)]


def _array(values: Sequence[Any], field: pa.Field, marks: Marks, form: str | None) -> pa.Array:
    convert = FORMS[form] if form is not None else _converter(field.type)
    plain = list(values) if convert is None else [None if value is None else convert(value) for value in values]
    try:
        return pa.array(plain, field.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return _one_by_one(plain, field, marks)


def _one_by_one(values: list[Any], field: pa.Field, marks: Marks) -> pa.Array:
    """Such as a date of zeros, which is no date: marked, with its text."""
    fitting: list[Any] = []
    for row, value in enumerate(values):
        try:
            pa.array([value], field.type)
            fitting.append(value)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            marks.setdefault(row, {})[field.name] = {"text": str(value)}
            fitting.append(None)
    return pa.array(fitting, field.type)


def _converter(kind: pa.DataType) -> Callable[[Any], Any] | None:
    if pa.types.is_string(kind):
        return as_text
    if pa.types.is_binary(kind):
        return lambda value: value.encode("latin-1") if isinstance(value, str) else value
    if pa.types.is_timestamp(kind) and kind.tz:
        return lambda value: value.replace(tzinfo=UTC) if isinstance(value, datetime) else value
    if pa.types.is_integer(kind):
        return _as_int
    return None


def as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, set | frozenset):
        return ",".join(sorted(map(str, value)))
    return _as_time(value) if isinstance(value, timedelta) else str(value)


def json_text(value: Any) -> str:
    """A SELECT gives text; MySQL's binlog has JSON taken apart, with its strings as bytes. Written as the server writes it."""
    return value if isinstance(value, str) else dumps(_plain_json(value), ensure_ascii=False)


def _plain_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {as_text(name): _plain_json(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain_json(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float) else as_text(value)


def _uuid_text(value: Any) -> str:
    """Sixteen bytes in the binlog, which leaves out zeros at the end; and so are addresses."""
    return str(UUID(bytes=value.ljust(16, b"\0"))) if isinstance(value, bytes) else str(value)


def _inet6_text(value: Any) -> str:
    if not isinstance(value, bytes):
        return str(value)
    address = IPv6Address(value.ljust(16, b"\0"))
    return f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped else str(address)


def _inet4_text(value: Any) -> str:
    return str(IPv4Address(value.ljust(4, b"\0"))) if isinstance(value, bytes) else str(value)


FORMS: dict[str, Callable[[Any], str]] = {"json": json_text, "uuid": _uuid_text, "inet6": _inet6_text, "inet4": _inet4_text}
"""By the server's types, as `information_schema` calls them."""
AS_BYTES = {"uuid", "inet6", "inet4"}
"""Those that the binlog has as bytes."""


def _as_time(value: timedelta) -> str:
    sign, whole = ("-", -value) if value < timedelta(0) else ("", value)
    seconds, micros = divmod(whole // timedelta(microseconds=1), 1_000_000)
    fraction = f".{micros:06d}" if micros else ""
    return f"{sign}{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{fraction}"


def _as_int(value: Any) -> Any:
    """A BIT is bytes in a SELECT and a text of zeros and ones in the binlog."""
    if isinstance(value, bytes):
        return int.from_bytes(value, "big")
    return int(value, 2) if isinstance(value, str) else value
