"""Rows as JSON values and back, a whole batch at a time: what a topic's records hold on Kafka, readable by anyone.

Reading takes Arrow's JSON reader where it can. Whatever that refuses or might get wrong (NaN, maps, a record of a foreign producer that does not fit) goes
through `json_shape.py`, value by value, which is exact and says what is wrong with a record.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from headrace.errors import BadRows
from headrace.log.json_shape import Parser, parse, parse_exactly
from headrace.log.json_text import object_text
from headrace.log.json_wire import fits_iso_years, from_wire, has_every_required_value, is_quick, wire_type

MAX_QUICK_BYTES = 1 << 30  # one block of Arrow's JSON reader; its sizes are 32 bits wide


@dataclass(frozen=True)
class Decoded:
    """The rows that fit, where each stood among the values (None: all of them fit), and why the others did not."""

    batch: pa.RecordBatch
    kept: list[int] | None = None
    misfits: dict[int, str] = field(default_factory=dict)


def encode(batch: pa.RecordBatch) -> list[bytes]:
    """One JSON object a row."""
    values: list[bytes] = encoded(batch).to_pylist()
    return values


def encoded(batch: pa.RecordBatch) -> pa.BinaryArray:
    """The same as a column."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if not fits_iso_years(column):
            raise BadRows(
                f"Column {name!r} has a date or timestamp outside the years 0001 to 9999, which JSON on Kafka cannot carry.", fix="leave it null."
            )
    return object_text(batch.schema.names, batch.columns).cast(pa.binary())


def decode(values: Sequence[bytes], schema: pa.Schema, *, ignored: Collection[str] = ()) -> Decoded:
    """The rows of JSON values. Columns that a value lacks are null; `ignored` are names it may have although the schema does not."""
    quick = _decode_quickly(values, schema) if values and all(is_quick(column.type) for column in schema) else None
    if quick is not None:
        return Decoded(quick)
    return decode_exactly(values, schema, ignored=ignored)


def _decode_quickly(values: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch | None:
    """None if anything is unusual; what comes back is what the exact way would have given."""
    joined = b"\n".join(values)
    if len(joined) > MAX_QUICK_BYTES or not _look_like_objects(joined, len(values)):
        return None
    try:
        parsed = pj.read_json(pa.BufferReader(joined), read_options=_read_options(len(joined)), parse_options=_parse_options(schema))
        if parsed.num_rows != len(values):
            return None
        columns = [from_wire(_whole(parsed.column(column.name)), column.type) for column in schema]
    except (pa.ArrowException, UnicodeDecodeError):
        return None
    if not all(_is_plain(column, declared) for column, declared in zip(columns, schema, strict=True)):
        return None
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _look_like_objects(joined: bytes, count: int) -> bool:
    """One line of valid UTF-8 in braces each: Arrow's reader checks none of it, and crashes on a bare `null`."""
    if not joined.startswith(b"{") or not joined.endswith(b"}") or not joined.count(b"}\n{") == joined.count(b"\n") == count - 1:
        return False
    try:
        return joined.isascii() or bool(joined.decode())
    except UnicodeDecodeError:
        return False


def _read_options(size: int) -> pj.ReadOptions:
    return pj.ReadOptions(use_threads=False, block_size=size + 1)


def _parse_options(schema: pa.Schema) -> pj.ParseOptions:
    wire = pa.schema([pa.field(column.name, wire_type(column.type)) for column in schema])
    return pj.ParseOptions(explicit_schema=wire, newlines_in_values=False, unexpected_field_behavior="error")


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _is_plain(column: pa.Array, declared: pa.Field) -> bool:
    return has_every_required_value(column, declared) and _is_finite(column)


def _is_finite(column: pa.Array) -> bool:
    """Arrow's reader takes a bare NaN, which is no JSON, and makes numbers beyond a FLOAT infinite."""
    kind = column.type
    if pa.types.is_floating(kind):
        return pc.all(pc.is_finite(column)).as_py() is not False
    if pa.types.is_list(kind) or pa.types.is_struct(kind):
        children = [column.flatten()] if pa.types.is_list(kind) else column.flatten()
        return all(map(_is_finite, children))
    return True


def decode_exactly(values: Sequence[bytes], schema: pa.Schema, *, ignored: Collection[str] = (), parser: Parser = parse) -> Decoded:
    """The slow and exact way. `parser` gives a row's JSON object for a value, or raises Misshapen."""
    rows, misfits = parse_exactly(values, schema, ignored, parser)
    columns: list[pa.Array] = []
    while len(columns) < len(schema):
        column = schema.field(len(columns))
        cells = {index: row[column.name] for index, row in rows.items()}
        try:
            columns.append(_exact_column(list(cells.values()), column))
        except (pa.ArrowException, OverflowError, ValueError):
            for index, reason in _culprits(cells, column).items():
                misfits[index] = reason
                del rows[index]
            columns = []  # the columns before this one have rows that are gone now
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    return Decoded(batch, list(rows) if misfits else None, dict(sorted(misfits.items())))


def _exact_column(cells: list[object], column: pa.Field) -> pa.Array:
    array = from_wire(pa.array(cells, wire_type(column.type, exact=True)), column.type)
    if not has_every_required_value(array, column):
        raise pa.ArrowInvalid("null where the schema says NOT NULL")
    return array


def _culprits(cells: dict[int, object], column: pa.Field) -> dict[int, str]:
    reasons = {}
    for index, cell in cells.items():
        try:
            _exact_column([cell], column)
        except (pa.ArrowException, OverflowError, ValueError) as error:
            reasons[index] = f"column {column.name!r}: {error}"
    return reasons
