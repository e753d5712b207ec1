"""Relations: tables as pgoutput describes them, their shapes, and the types of their columns.

Values come as the server's text, so nothing is lost on the way. A value that its column cannot hold
(NaN in a DECIMAL, an infinite date, a year before Christ) is null there, and its text is in
`_marks`. What has no counterpart in a topic stays text: arrays, ranges, intervals, json, money,
addresses, enums, and types of extensions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.cdc.base import Marks, TableShape, usable_names

ROW_COLUMN = "_row"
"""The key of a table without one: a digest of the whole row."""
COPIES_COLUMN = "_copies"
"""How many rows of a table without a key are equal."""
_ADDED = (ROW_COLUMN, COPIES_COLUMN)
TypeNamer = Callable[[int, int], str]
"""Takes a type's oid and modifier, and returns the type of a topic's column."""


@dataclass(frozen=True)
class PostgresRelation:
    """A table as the stream has it. `key` has the indices of the key's columns; it is empty for a
    table without a key, whose rows are identified by their digest.
    """

    id: int
    shape: TableShape
    key: tuple[int, ...]
    has_deferrable_key: bool = False
    """Whether two rows may have one key until their transaction ends."""

    @property
    def name(self) -> str:
        return self.shape.name

    @property
    def width(self) -> int:
        """How many columns the stream has."""
        return len(self.shape.columns) - (0 if self.key else len(_ADDED))


def table_shape(
    name: str, columns: list[str], kinds: list[str], key: list[str]
) -> tuple[TableShape, tuple[int, ...]]:
    """Return the shape of a table, and the indices of its key's columns. A table without a key gets
    two more columns, the row's digest and the number of equal rows.
    """
    if not key:
        usable = usable_names([*_ADDED, *columns])[len(_ADDED) :]
        typed = (
            *zip(usable, kinds, strict=True),
            (ROW_COLUMN, "STRING"),
            (COPIES_COLUMN, "BIGINT"),
        )
        return TableShape(name, typed, (ROW_COLUMN,), copies=COPIES_COLUMN), ()
    usable = usable_names(columns)
    indices = tuple(columns.index(column) for column in key)
    typed = tuple(zip(usable, kinds, strict=True))
    return TableShape(name, typed, tuple(usable[index] for index in indices)), indices


@dataclass(frozen=True)
class RelationMessage:
    """A relation message, with the types as oids and modifiers."""

    id: int
    name: str
    columns: tuple[tuple[str, int, int], ...]
    identity: tuple[str, ...] = ()
    """The columns that the server sends of a deleted row."""

    def to_relation(
        self, type_name: TypeNamer, key: list[str], *, has_deferrable_key: bool
    ) -> PostgresRelation:
        names = [name for name, _, _ in self.columns]
        shape, indices = table_shape(
            self.name,
            names,
            [type_name(kind, mod) for _, kind, mod in self.columns],
            [column for column in key if column in names],
        )
        return PostgresRelation(self.id, shape, indices, has_deferrable_key)


def parse_relation(payload: bytes) -> RelationMessage:
    (number,) = struct.unpack_from(">I", payload, 1)
    schema, at = _text(payload, 5)
    name, at = _text(payload, at)
    (count,) = struct.unpack_from(">H", payload, at + 1)
    at += 3
    columns, identity = [], []
    for _ in range(count):
        is_identity = payload[at] & 1
        column, at = _text(payload, at + 1)
        kind, mod = struct.unpack_from(">Ii", payload, at)
        at += 8
        columns.append((column, kind, mod))
        if is_identity:
            identity.append(column)
    return RelationMessage(number, f"{schema}.{name}", tuple(columns), tuple(identity))


def parse_truncate(payload: bytes) -> list[int]:
    (count,) = struct.unpack_from(">I", payload, 1)
    return list(struct.unpack_from(f">{count}I", payload, 6))


def parse_logical(payload: bytes) -> tuple[str, bytes]:
    """Return the prefix and the content of a logical message."""
    prefix, at = _text(payload, 10)
    (length,) = struct.unpack_from(">I", payload, at)
    return prefix, payload[at + 4 : at + 4 + length]


def _text(payload: bytes, at: int) -> tuple[str, int]:
    end = payload.index(0, at)
    return payload[at:end].decode(), end + 1


# Types and values

MAX_DIGITS = 38
_PLAIN = {
    "bool": "BOOLEAN",
    "int2": "SMALLINT",
    "int4": "INT",
    "int8": "BIGINT",
    "oid": "BIGINT",
    "float4": "FLOAT",
    "float8": "DOUBLE",
    "date": "DATE",
    "time": "TIME(6)",
    "timestamp": "TIMESTAMP_NTZ",
    "timestamptz": "TIMESTAMP",
    "bytea": "BINARY",
}


def ddl_type(name: str, typmod: int) -> str:
    """Return the type of a topic's column for a base type's name and modifier. A NUMERIC without a
    precision has any number of digits, and stays text.
    """
    if name == "numeric" and typmod >= 4:
        precision, scale = (typmod - 4) >> 16 & 0xFFFF, (typmod - 4) & 0x7FF
        scale = scale - 2048 if scale >= 1024 else scale
        if precision <= MAX_DIGITS and 0 <= scale <= precision:
            return f"DECIMAL({precision},{scale})"
    return _PLAIN.get(name, "STRING")


def typed_columns(
    texts: Sequence[pa.Array], fields: Sequence[pa.Field], marks: Marks
) -> list[pa.Array]:
    """Convert columns of text to their types. A value that does not fit is marked."""
    return [_typed_column(text, field, marks) for text, field in zip(texts, fields, strict=True)]


def _typed_column(text: pa.Array, field: pa.Field, marks: Marks) -> pa.Array:
    if text.type == field.type:
        return text
    convert = _converter(field.type)
    try:
        return convert(text)
    except (pa.ArrowInvalid, ValueError):
        return _typed_one_by_one(text, field, convert, marks)


def _typed_one_by_one(
    text: pa.Array, field: pa.Field, convert: Callable[[pa.Array], pa.Array], marks: Marks
) -> pa.Array:
    """Convert values one by one, to find those that do not fit. That is rare, and slow."""
    values: list[Any] = []
    for row, value in enumerate(text.to_pylist()):
        try:
            values.append(convert(pa.array([value], pa.string())))
        except (pa.ArrowInvalid, ValueError):
            marks.setdefault(row, {})[field.name] = {"text": value}
            values.append(pa.nulls(1, field.type))
    return pa.concat_arrays(values)


def _converter(kind: pa.DataType) -> Callable[[pa.Array], pa.Array]:
    if pa.types.is_boolean(kind):
        return lambda text: pc.equal(text, "t")
    if pa.types.is_binary(kind):
        return _from_hex
    if pa.types.is_time(kind):
        return _from_time
    return lambda text: text.cast(kind)


def _from_time(text: pa.Array) -> pa.Array:
    moments = (
        pc.binary_join_element_wise("1970-01-01", text, " ")
        .cast(pa.timestamp("us"))
        .cast(pa.int64())
    )
    return pc.multiply(moments, 1000).cast(pa.time64("ns"))


def _from_hex(text: pa.Array) -> pa.Array:
    """Convert all values at once: without their first two characters (a backslash and an x) they
    are one long text of hex digits.
    """
    digits = pc.utf8_slice_codeunits(pc.fill_null(text, "\\x"), 2, None)
    digits = pa.concat_arrays([digits])
    offsets = np.frombuffer(digits.buffers()[1], np.int32)[
        digits.offset : digits.offset + len(digits) + 1
    ]
    data = digits.buffers()[2]
    raw = (
        bytes.fromhex(data.to_pybytes()[offsets[0] : offsets[-1]].decode("ascii"))
        if data is not None and len(digits)
        else b""
    )
    halves = ((offsets - offsets[0]) // 2).astype(np.int32)
    values = pa.Array.from_buffers(
        pa.binary(), len(digits), [None, pa.py_buffer(halves), pa.py_buffer(raw)]
    )
    if text.null_count == 0:
        return values
    return pc.if_else(text.is_valid(), values, pa.scalar(None, pa.binary()))
