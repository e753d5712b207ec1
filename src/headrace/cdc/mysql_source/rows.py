"""Row events of one transaction, or rows of a chunk, as batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from headrace.cdc.marking import Marks, marks_column
from headrace.cdc.mysql_source.catalogue import MysqlTable
from headrace.cdc.mysql_source.values import AS_BYTES, arrays_of
from headrace.cdc.source import COMMITTED_AT, HIDDEN, MARKS, ORDER, POSITION, TRANSACTION, Changes
from headrace.log.api import DELETE, INSERT, UPDATE, UPDATE_BEFORE


@dataclass(frozen=True)
class Row:
    """One change: what it is, the row's values by column, and its place in its transaction."""

    change: str
    values: Mapping[str, Any]
    order: int


def told(event: Any, table: MysqlTable, order: int) -> list[Row]:
    """An event's rows as changes. A changed key is a delete and an insert."""
    rows: list[Row] = []
    key = table.key_columns
    for number, row in enumerate(event.rows):
        place = order + number
        if "values" in row:
            kind = INSERT if type(event).__name__.startswith("Write") else DELETE
            rows.append(Row(kind, row["values"], place))
            continue
        before, after = row["before_values"], row["after_values"]
        moved = any(before.get(name) != after.get(name) for name in key)
        rows += [Row(DELETE if moved else UPDATE_BEFORE, before, place), Row(INSERT if moved else UPDATE, after, place)]
    return rows


def changes(table: MysqlTable, rows: Sequence[Row], *, position: int, at_s: int, transaction: int) -> Changes:
    count = len(rows)
    hidden = {
        POSITION: pa.array([position] * count, pa.int64()),
        COMMITTED_AT: pa.array([at_s * 1_000_000] * count, pa.int64()).cast(pa.timestamp("us", tz="UTC")),
        TRANSACTION: pa.array([transaction] * count, pa.int64()),
        ORDER: pa.array([row.order for row in rows], pa.int32()),
    }
    columns = [_of_binlog([row.values.get(name) for row in rows], table.forms.get(field)) for name, (field, _) in zip(table.columns, table.shape.columns, strict=True)]
    return Changes(table.shape.name, batch(table, columns, hidden, [row.change for row in rows]))


def _of_binlog(values: list[Any], form: str | None) -> list[Any]:
    """Bytes that happen to be text come as text."""
    return [value.encode() if isinstance(value, str) else value for value in values] if form in AS_BYTES else values


def batch(table: MysqlTable, columns: Sequence[Sequence[Any]], hidden: Mapping[str, pa.Array], kinds: list[str]) -> pa.RecordBatch:
    marks: Marks = {}
    arrays = arrays_of(columns, table.shape.schema, marks, table.forms)
    count = len(kinds)
    known = {**hidden, MARKS: marks_column(marks, count)}
    arrays += [known.get(each.name, pa.nulls(count, each.type)) for each in HIDDEN]
    return pa.RecordBatch.from_arrays([*arrays, pa.array(kinds, pa.string())], schema=table.shape.batch_schema)
