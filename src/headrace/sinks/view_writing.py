"""A commit's changes, applied to the rows of one view. Used by `views.py` inside its transaction.

What a key's row becomes is decided by its last change, so each key is written at most once a commit, in the order of the keys: neighbours in SQLite's
tree are written together (measured: twice as fast as in random order). Many rows go into one statement, because a statement costs more than a row.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.log.api import CHANGE_TYPE, DELETE, UPDATE_BEFORE
from headrace.operators.kernel import TICK
from headrace.sinks.view_table import ViewTable
from headrace.sinks.view_types import to_values

_CELLS_A_STATEMENT = 512
_ROWS_A_SLICE = 1 << 16


def apply_changes(db: sqlite3.Connection, view: ViewTable, changes: pa.Table) -> None:
    """Bring a table's rows to where the last changes leave them."""
    final = _last_of_each_key(changes.filter(pc.not_equal(changes[CHANGE_TYPE], UPDATE_BEFORE)), view.info.key)
    goes = pc.equal(final[CHANGE_TYPE], DELETE)
    _delete(db, view, final.filter(goes))
    for batch in final.filter(pc.invert(goes)).select(view.info.schema.names).to_batches(max_chunksize=_ROWS_A_SLICE):
        cells = [
            view.key_values(array) if name in view.info.key else to_values(array)
            for name, array in zip(batch.schema.names, batch.columns, strict=True)
        ]
        _insert(db, "INSERT OR REPLACE", view, cells)


def append_rows(db: sqlite3.Connection, view: ViewTable, rows: pa.Table) -> None:
    """Add a stream's rows behind those that are there, and let go of the oldest beyond the bound."""
    most = view.info.most_rows or 0
    kept = rows.slice(max(0, rows.num_rows - most))
    for batch in kept.select([TICK, *view.info.schema.names]).to_batches(max_chunksize=_ROWS_A_SLICE):
        _insert(db, "INSERT", view, [to_values(array) for array in batch.columns])
    db.execute(f"DELETE FROM {view.table} WHERE _row <= (SELECT max(_row) FROM {view.table}) - ?", (most,))  # noqa: S608


def _last_of_each_key(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """The last row of each key, in the order of the keys."""
    if rows.num_rows == 0:
        return rows
    rows = rows.take(pc.sort_indices(rows.select(list(key)), sort_keys=[(name, "ascending") for name in key]))  # stable: the last one stays the last
    ends = np.ones(rows.num_rows, np.bool_)
    ends[:-1] = np.logical_or.reduce([_differs_from_next(rows[name].combine_chunks()) for name in key])
    return rows if ends.all() else rows.filter(pa.array(ends))


def _differs_from_next(column: pa.Array) -> npt.NDArray[np.bool_]:
    """As SQLite compares what is stored: null is like null, NaN like NaN, -0.0 like 0.0."""
    left, right = column.slice(0, len(column) - 1), column.slice(1)
    alike = pc.fill_null(pc.equal(left, right), False)
    if column.null_count:
        alike = pc.or_(alike, pc.and_(left.is_null(), right.is_null()))
    if pa.types.is_floating(column.type):
        alike = pc.or_(alike, pc.fill_null(pc.and_(pc.is_nan(left), pc.is_nan(right)), False))
    return ~alike.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _delete(db: sqlite3.Connection, view: ViewTable, rows: pa.Table) -> None:
    statement = f"DELETE FROM {view.table} WHERE {' AND '.join(f'{name} = ?' for name in view.key_columns)}"  # noqa: S608
    for batch in rows.select(list(view.info.key)).to_batches(max_chunksize=_ROWS_A_SLICE):
        db.executemany(statement, zip(*(view.key_values(array) for array in batch.columns), strict=True))


def _insert(db: sqlite3.Connection, verb: str, view: ViewTable, cells: list[list[Any]]) -> None:
    width, count = len(cells), len(cells[0])
    together = max(1, _CELLS_A_STATEMENT // width)
    flat: list[Any] = [None] * (width * count)
    for position, column in enumerate(cells):
        flat[position::width] = column
    whole = count - count % together
    db.executemany(_statement(verb, view, together), _cut(flat, 0, whole * width, together * width))
    db.executemany(_statement(verb, view, 1), _cut(flat, whole * width, count * width, width))


def _statement(verb: str, view: ViewTable, rows: int) -> str:
    one = f"({', '.join('?' * len(view.written))})"
    return f"{verb} INTO {view.table} ({', '.join(view.written)}) VALUES {', '.join([one] * rows)}"


def _cut(flat: list[Any], start: int, stop: int, step: int) -> Iterator[list[Any]]:
    return (flat[first : first + step] for first in range(start, stop, step))


def has_null_keys(changes: pa.Table, key: Iterable[str]) -> bool:
    return any(changes[name].null_count for name in key)
