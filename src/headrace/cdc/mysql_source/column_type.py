"""The types of columns: their types in topics, how a snapshot selects them, and how values become
Arrow arrays.

A SELECT and the binlog give the same value in different forms. Both are brought to one: numbers,
bytes, and for everything else the text that the server shows. `to_array` then converts a column at
once, so a row is the same whether a snapshot or the stream brought it.

    column         in the binlog             in a SELECT     in the topic
    BINARY(3)      61                        61 00 00        61 00 00
    YEAR           00                        '0000'          0
    SET('a','b')   03                        'a,b'           'a,b'
    FLOAT          cd cc 8c 3f               1.10000002384   1.1 (FLOAT)
    DATE           00 00 00                  '0000-00-00'    null, and the text in _marks
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, lru_cache
from ipaddress import IPv4Address, IPv6Address
from json import dumps
from typing import Any
from uuid import UUID

import pyarrow as pa

from headrace.cdc.base import Marks
from headrace.errors import ConfigurationError
from headrace.types.schema import parse_schema

_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")
_SIGNED = {
    "tinyint": "TINYINT",
    "smallint": "SMALLINT",
    "mediumint": "INT",
    "int": "INT",
    "bigint": "BIGINT",
}
_UNSIGNED = {
    "tinyint": "SMALLINT",
    "smallint": "INT",
    "mediumint": "INT",
    "int": "BIGINT",
    "bigint": "DECIMAL(20,0)",
}
_PLAIN = {
    "float": "FLOAT",
    "double": "DOUBLE",
    "date": "DATE",
    "datetime": "TIMESTAMP_NTZ",
    "timestamp": "TIMESTAMP",
    "year": "INT",
    "bit": "BIGINT",
}
_BINARY = {
    "binary",
    "varbinary",
    "tinyblob",
    "blob",
    "mediumblob",
    "longblob",
    "vector",
    "geometry",
    "point",
    "linestring",
    "polygon",
    "multipoint",
    "multilinestring",
    "multipolygon",
    "geometrycollection",
    "geomcollection",
}
"""Geometries are in the server's own format: the SRID in four bytes, then WKB."""
_TEXT_FORMS = {"time", "enum", "set", "json"}
ADDRESSES = {"uuid": 16, "inet6": 16, "inet4": 4}
"""Types that are binary strings of that size in the binlog, which does not name them."""


@dataclass(frozen=True)
class MysqlColumn:
    """A column of a table."""

    name: str
    """As the server has it."""
    ddl: str
    """The type in the topic."""
    form: str
    """How values are written: `integer`, `bit`, `year`, `float`, `double`, `decimal`, `text`,
    `bytes`, `date`, `datetime`, `timestamp`, `time`, `enum`, `set`, `json`, or one of `ADDRESSES`.
    """

    @cached_property
    def arrow_type(self) -> pa.DataType:
        return parse_schema(f"`value` {self.ddl}").field(0).type

    # A snapshot selects

    @property
    def quoted(self) -> str:
        return quoted(self.name)

    @property
    def selected(self) -> str:
        """The expression that selects its values. The text of a FLOAT has six digits; as a DOUBLE
        it has all of them.
        """
        return f"{self.quoted} * 1e0" if self.form == "float" else self.quoted

    @property
    def selected_key(self) -> str:
        """The expression that selects its values as `after` of a chunk. ENUM and SET are in the
        order of their numbers, but compared with a text they are texts.
        """
        is_numbered = self.form in {"enum", "set", "year", "bit"}
        return f"{self.quoted} + 0" if is_numbered else self.selected

    def key_value(self, raw: Any) -> Any:
        """Return a value of `selected_key` in a form that JSON can hold."""
        if isinstance(raw, bytes):
            return {"hex": raw.hex()}
        if self.form in {"integer", "enum", "set", "year", "bit"}:
            return int(Decimal(raw))
        if self.form in {"float", "double"}:
            return float(raw)
        return {"decimal": str(raw)} if self.form == "decimal" else str(raw)

    def key_parameter(self, stored: Any) -> tuple[str, Any]:
        """Return the expression that `selected_key` is compared with, and its parameter, for what
        `key_value` returned.
        """
        if isinstance(stored, dict):
            (kind, text), *_ = stored.items()
            if kind == "hex":
                return "%s", bytes.fromhex(text)
            stored = Decimal(text) if self.form == "decimal" else text
        if self.form == "time":
            return "CAST(%s AS TIME(6))", stored
        if self.form in ADDRESSES:
            return f"CAST(%s AS {self.form.upper()})", stored
        return "%s", stored


def quoted(name: str) -> str:
    """Quote a name for a statement with parameters, in which % is special too."""
    return "`" + name.replace("`", "``").replace("%", "%%") + "`"


def catalogue_column(name: str, data_type: str, column_type: str) -> MysqlColumn:
    """Return a column by its types in `information_schema.columns`. TIME can be negative and longer
    than a day, so it stays text, as do sets, enums and unknown types.
    """
    if data_type in _SIGNED:
        is_unsigned = "unsigned" in column_type
        return MysqlColumn(name, (_UNSIGNED if is_unsigned else _SIGNED)[data_type], "integer")
    if match := _DECIMAL.match(column_type):
        return MysqlColumn(name, decimal_ddl(int(match[1]), int(match[2])), "decimal")
    if data_type in _BINARY:
        return MysqlColumn(name, "BINARY", "bytes")
    if data_type in _PLAIN:
        return MysqlColumn(name, _PLAIN[data_type], data_type)
    if data_type in _TEXT_FORMS or data_type in ADDRESSES:
        return MysqlColumn(name, "STRING", data_type)
    return MysqlColumn(name, "STRING", "text")


def integer_column(name: str, data_type: str, *, is_unsigned: bool) -> MysqlColumn:
    """Return a column of an integer type."""
    return MysqlColumn(name, (_UNSIGNED if is_unsigned else _SIGNED)[data_type], "integer")


def decimal_ddl(precision: int, scale: int) -> str:
    """Return the type of a DECIMAL in a topic: text, if it has more digits than DECIMAL can."""
    return f"DECIMAL({precision},{scale})" if precision <= 38 else "STRING"


# Values as text


def time_text(hours: int, minutes: int, seconds: int, micros: int, *, is_negative: bool) -> str:
    """Return a TIME as text, with six digits of a second or none.

    Example:
        >>> time_text(30, 0, 1, 500_000, is_negative=True)
        '-30:00:01.500000'
    """
    fraction = f".{micros:06d}" if micros else ""
    sign = "-" if is_negative else ""
    return f"{sign}{hours:02d}:{minutes:02d}:{seconds:02d}{fraction}"


def _selected_time(text: str) -> str:
    whole, _, fraction = text.partition(".")
    return f"{whole}.{fraction.ljust(6, '0')}" if fraction.strip("0") else whole


def _selected_decimal(text: str) -> str:
    """Return a DECIMAL without the zeros that ZEROFILL puts in front."""
    sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text)
    digits = digits.lstrip("0")
    return sign + (digits if digits and not digits.startswith(".") else f"0{digits}")


def json_text(value: Any) -> str:
    """Return a JSON value as text, as the server writes it. A SELECT returns text; MySQL's binlog
    has the parsed value, with its strings as bytes.
    """
    return value if isinstance(value, str) else dumps(_plain_json(value), ensure_ascii=False)


def _plain_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {_as_text(name): _plain_json(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_plain_json(element) for element in value]
    return value if value is None or isinstance(value, bool | int | float) else _as_text(value)


def _as_text(value: Any) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def _inet6_text(raw: bytes) -> str:
    address = IPv6Address(raw)
    return f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped else str(address)


_SELECTED: dict[str, Callable[[Any], Any]] = {
    "bit": lambda raw: int.from_bytes(raw, "big"),
    "time": _selected_time,
    "decimal": _selected_decimal,
    "text": lambda raw: _as_text(raw) if isinstance(raw, bytes) else raw,
}
_LOGGED: dict[str, Callable[[Any], Any]] = {
    "uuid": lambda raw: str(UUID(bytes=raw)),
    "inet6": _inet6_text,
    "inet4": lambda raw: str(IPv4Address(raw)),
}


def selected_values(values: Sequence[Any], column: MysqlColumn) -> Sequence[Any]:
    """Return values of a SELECT in the common form. They come as text, or as bytes."""
    return _converted(values, _SELECTED.get(column.form))


def logged_values(values: Sequence[Any], column: MysqlColumn) -> Sequence[Any]:
    """Return values of the binlog in the common form."""
    return _converted(values, _LOGGED.get(column.form))


def _converted(values: Sequence[Any], convert: Callable[[Any], Any] | None) -> Sequence[Any]:
    if convert is None:
        return values
    return [None if value is None else convert(value) for value in values]


# Arrow


def to_array(values: Sequence[Any], column: MysqlColumn, field: str, marks: Marks) -> pa.Array:
    """Return values in the common form as an array. Those that the type cannot hold, such as a date
    of zeros, are null and marked.
    """
    try:
        return _cast(values, column.arrow_type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return _one_by_one(values, column.arrow_type, field, marks)


def _cast(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return pa.array(values, kind)
    if not any(isinstance(value, str) for value in values):
        if pa.types.is_decimal(kind):  # BIGINT UNSIGNED
            return pa.array(values, pa.uint64()).cast(kind)
        return pa.array(values, kind)
    texts = pa.array(values, pa.string())
    if pa.types.is_timestamp(kind):
        return texts.cast(pa.timestamp("us")).cast(pa.int64()).cast(kind)
    if pa.types.is_float32(kind):
        return texts.cast(pa.float64()).cast(kind)
    return texts.cast(kind)


def _one_by_one(values: Sequence[Any], kind: pa.DataType, field: str, marks: Marks) -> pa.Array:
    fitting: list[Any] = []
    for row, value in enumerate(values):
        try:
            fitting.append(_cast([value], kind)[0])
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            marks.setdefault(row, {})[field] = {"text": str(value)}
            fitting.append(None)
    return pa.array([None if scalar is None else scalar.as_py() for scalar in fitting], kind)


# Text in the server's character sets

_UNICODE = {
    "utf8": "utf-8",
    "utf8mb3": "utf-8",
    "utf8mb4": "utf-8",
    "ucs2": "utf-16-be",
    "utf16": "utf-16-be",
    "utf16le": "utf-16-le",
    "utf32": "utf-32-be",
}
_BINARY_ID = 63


class Charsets:
    """Decodes texts of the binlog, which are in the character sets of their columns. Python's own
    codecs differ from the server's in some characters; so a table of each set of one byte is taken
    from the server, and texts in the older sets of several bytes are converted by it.
    """

    def __init__(self, query: Callable[..., list[tuple[Any, ...]]]) -> None:
        self._query = query
        self._decoders: dict[int, Callable[[bytes], str]] = {}

    @cached_property
    def _names(self) -> dict[int, str]:
        """Names of character sets by the numbers of their collations."""
        columns = self._query(
            "SELECT column_name FROM information_schema.columns WHERE table_schema ="
            " 'information_schema' AND table_name = 'COLLATION_CHARACTER_SET_APPLICABILITY'"
        )
        tables = ["collations"]
        if any(str(name).lower() == "id" for (name,) in columns):
            tables.append("collation_character_set_applicability")
        names: dict[int, str] = {}
        for table in tables:
            rows = self._query(
                f"SELECT id, character_set_name FROM information_schema.{table}"
                " WHERE id IS NOT NULL AND character_set_name IS NOT NULL"
            )
            names |= {int(number): str(name) for number, name in rows}
        return names

    def decoder(self, collation: int) -> Callable[[bytes], str]:
        """Return the decoder of texts in the character set of a collation.

        Raises:
            ConfigurationError: The server has no such collation now.
        """
        if collation not in self._decoders:
            self._decoders[collation] = self._decoder(collation)
        return self._decoders[collation]

    def _decoder(self, collation: int) -> Callable[[bytes], str]:
        if collation == _BINARY_ID:
            return lambda raw: raw.decode("utf-8", "backslashreplace")
        name = self._names.get(collation)
        if name is None:
            raise ConfigurationError(
                f"The binlog has texts in the collation {collation}, which the server does not"
                " know.",
                fix="install that collation on the server, as it was where the rows were written.",
            )
        if name in _UNICODE:
            codec = _UNICODE[name]
            return lambda raw: raw.decode(codec, "backslashreplace")
        ((length,),) = self._query(
            "SELECT maxlen FROM information_schema.character_sets WHERE character_set_name = %s",
            name,
        )
        return self._one_byte(name) if int(length) == 1 else self._several_bytes(name)

    def _one_byte(self, name: str) -> Callable[[bytes], str]:
        every = bytes(range(256)).hex()
        ((table,),) = self._query(f"SELECT CONVERT(_{name} x'{every}' USING utf8mb4)")
        if len(table) != 256:
            return self._several_bytes(name)
        return lambda raw: codecs.charmap_decode(raw, "strict", table)[0]

    def _several_bytes(self, name: str) -> Callable[[bytes], str]:
        @lru_cache(maxsize=10_000)
        def converted(raw: bytes) -> str:
            ((text,),) = self._query(f"SELECT CONVERT(_{name} x'{raw.hex()}' USING utf8mb4)")
            return str(text)

        return lambda raw: raw.decode() if raw.isascii() else converted(raw)
