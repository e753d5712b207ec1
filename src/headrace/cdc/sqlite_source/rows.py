"""SQLite's rows as Arrow batches. A column may hold any kind of value there, whatever it was declared as: what does not fit stands in `_marks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from headrace.cdc.marking import marks_column
from headrace.cdc.source import COMMITTED_AT, HIDDEN, MARKS, ORDER, POSITION, TRANSACTION, Changes
from headrace.cdc.sqlite_source.triggers import SqliteTable
from headrace.log.api import DELETE, INSERT, UPDATE, UPDATE_BEFORE

Values = Sequence[Any]
_FITS: dict[str, tuple[type, ...]] = {"BIGINT": (int,), "DOUBLE": (float, int), "STRING": (str,), "BINARY": (bytes,)}


def changes_of(table: SqliteTable, rows: list[tuple[Any, ...]], *, transaction: int) -> Changes:
    """From a shadow's rows (seq, op, the row before, the row after, time). A changed key is a delete and an insert."""
    width = len(table.columns)
    key = [table.columns.index(name) for name in table.key_columns]
    kept: list[tuple[str, Values, int, int]] = []
    for row in rows:
        seq, op, old, new, at = row[0], row[1], row[2 : 2 + width], row[2 + width : -1], row[-1]
        kept += [(change, values, seq, at) for change, values in _told(op, old, new, key)]
    return Changes(table.name, _batch(table, kept, transaction))


def _told(op: str, old: Values, new: Values, key: list[int]) -> list[tuple[str, Values]]:
    if op == "i":
        return [(INSERT, new)]
    if op == "d":
        return [(DELETE, old)]
    if any(old[place] != new[place] for place in key):
        return [(DELETE, old), (INSERT, new)]
    return [(UPDATE_BEFORE, old), (UPDATE, new)]


def chunk_rows(table: SqliteTable, rows: list[tuple[Any, ...]], position: int) -> pa.RecordBatch:
    columns, marks = _columns(table, rows)
    count = len(rows)
    hidden = {POSITION: pa.array([position] * count, pa.int64()), MARKS: marks}
    arrays = [*columns, *(hidden.get(each.name, pa.nulls(count, each.type)) for each in HIDDEN), pa.array([INSERT] * count, pa.string())]
    return pa.RecordBatch.from_arrays(arrays, schema=table.shape.batch_schema)


def _batch(table: SqliteTable, kept: list[tuple[str, Values, int, int]], transaction: int) -> pa.RecordBatch:
    columns, marks = _columns(table, [values for _, values, _, _ in kept])
    hidden = {
        POSITION: pa.array([seq for _, _, seq, _ in kept], pa.int64()),
        COMMITTED_AT: pa.array([at for _, _, _, at in kept], pa.int64()).cast(pa.timestamp("us", tz="UTC")),
        TRANSACTION: pa.array([transaction] * len(kept), pa.int64()),
        ORDER: pa.array([seq - kept[0][2] for _, _, seq, _ in kept], pa.int64()).cast(pa.int32()),
        MARKS: marks,
    }
    arrays = [*columns, *(hidden[each.name] for each in HIDDEN), pa.array([change for change, _, _, _ in kept], pa.string())]
    return pa.RecordBatch.from_arrays(arrays, schema=table.shape.batch_schema)


def _columns(table: SqliteTable, rows: Sequence[Values]) -> tuple[list[pa.Array], pa.Array]:
    marks: dict[int, dict[str, Any]] = {}
    arrays = []
    for place, ((name, kind), field) in enumerate(zip(table.shape.columns, table.shape.schema, strict=True)):
        values = [row[place] for row in rows]
        fits = _FITS[kind]
        if not all(value is None or isinstance(value, fits) for value in values):
            values = [_fitting(value, kind, number, name, marks) for number, value in enumerate(values)]
        arrays.append(pa.array(values, field.type))
    return arrays, marks_column(marks, len(rows))


def _fitting(value: Any, kind: str, row: int, name: str, marks: dict[int, dict[str, Any]]) -> Any:
    """A number in a text column is its text, as SQLite itself would compare it; anything else is marked."""
    if value is None or isinstance(value, _FITS[kind]):
        return value
    if kind == "STRING" and not isinstance(value, bytes):
        return str(value)
    marks.setdefault(row, {})[name] = {"hex": value.hex()} if isinstance(value, bytes) else {"text": str(value)}
    return None
