"""Reads a view as of an earlier tick (`at_tick=`): the current rows, with the retained changes
since that tick undone.

The first change of a key after the tick says what the key was at the tick. Before an insert there
was no row; a delete, or the first half of an update, holds the old row.

    changes after tick 7                       rows now        rows at tick 7
    8  insert            k=3, n=1              k=1, n=5        k=1, n=4
    8  update_preimage   k=1, n=4              k=3, n=1        k=2, n=9
    8  update_postimage  k=1, n=5
    9  delete            k=2, n=9
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import CHANGE_TYPE, INSERT, UPDATE_POSTIMAGE
from headrace.errors import ChangesGone
from headrace.http.responses import Refused
from headrace.views.file import ViewInfo
from headrace.views.reader import Snapshot

Key = tuple[Any, ...]
Mask = npt.NDArray[np.bool_]
_INDEX = "_index"


class TickNotKept(ChangesGone):
    """A view cannot be read at a tick: its changes are no longer retained, or it has not come."""

    def __init__(self, view: str, requested: int, kept_after: int, tick: int) -> None:
        super().__init__(view, requested, kept_after, tick)
        self.message = (
            f"The view {view!r} can be read at the ticks {kept_after} to {tick}, not at"
            f" {requested}."
        )
        self.fix = "choose one of these ticks; a view goes back as far as its retained changes."


def view_at(
    snap: Snapshot,
    info: ViewInfo,
    tick: int,
    *,
    key: Key | None,
    start: Key,
    stop: Key,
    descending: bool,
    max_rows: int,
) -> pa.Table:
    """The row of a key, or the rows from `start` up to `stop`, as of a tick. TickNotKept if the
    changes since then are not retained.
    """
    if not info.kept_after <= tick <= info.tick:
        raise TickNotKept(info.name, tick, info.kept_after, info.tick)
    if info.is_stream:  # it only grows, so later rows are left out
        first = start[0] if start else None
        return snap.scan(info.name, start=first, stop=min([tick + 1, *stop]), reverse=descending)
    if key is not None:
        row = snap.get(info.name, key)
        current = pa.Table.from_pylist([] if row is None else [row], schema=info.schema)
    elif snap.count(info.name) > max_rows:
        raise Refused(
            400,
            f"The view {info.name!r} has more than {max_rows:,} rows, too many to be read at an"
            " earlier tick as a whole.",
            fix="read a single key with key=.",
        )
    else:
        current = snap.table(info.name)
    changes = [rows for _, rows in snap.changes_since(info.name, tick)]
    rows = _undo_changes(info, current, pa.concat_tables(changes)) if changes else current
    if key is not None:
        is_key = np.ones(rows.num_rows, np.bool_)
        for name, value in zip(info.key, key, strict=True):
            is_key &= _equal_mask(rows[name], value)
        return rows.filter(pa.array(is_key))
    in_range = np.ones(rows.num_rows, np.bool_)
    if start:
        in_range &= ~_before_mask(rows, info.key, start)
    if stop:
        in_range &= _before_mask(rows, info.key, stop)
    rows = rows.filter(pa.array(in_range))
    order = _key_order(rows, info.key)
    return rows.take(order[::-1] if descending else order)


def _key_order(rows: pa.Table, key: Sequence[str]) -> pa.Array:
    """The order of keys, as in the store: NaN after all numbers and null last, but first in a
    BINARY column.
    """
    columns: dict[str, pa.ChunkedArray] = {}
    for position, name in enumerate(key):
        is_after = rows[name].is_null()
        if pa.types.is_binary(rows[name].type):
            is_after = pc.invert(is_after)
        columns[f"is_after_{position}"] = is_after.cast(pa.int8())
        columns[f"value_{position}"] = rows[name]
    return pc.sort_indices(pa.table(columns), sort_keys=[(name, "ascending") for name in columns])


def _undo_changes(info: ViewInfo, current: pa.Table, changes: pa.Table) -> pa.Table:
    """Put the changes, in order, before the current rows: the first entry of each key then says
    what the key was.
    """
    names = info.schema.names
    entries = pa.concat_tables([changes.select(names), current.select(names)]).cast(info.schema)
    indexed = entries.select(list(info.key)).append_column(
        _INDEX, pa.array(np.arange(entries.num_rows))
    )
    grouped = indexed.group_by(list(info.key)).aggregate([(_INDEX, "min")])
    first_entries = grouped[f"{_INDEX}_min"].to_numpy()
    kinds = changes[CHANGE_TYPE]
    is_new = (
        pc.or_(pc.equal(kinds, INSERT), pc.equal(kinds, UPDATE_POSTIMAGE))
        .to_numpy()
        .astype(np.bool_)
    )
    existed = np.ones(entries.num_rows, np.bool_)
    existed[: len(is_new)] = ~is_new
    return entries.take(pa.array(np.sort(first_entries[existed[first_entries]])))


def _equal_mask(column: pa.ChunkedArray, value: Any) -> Mask:
    """True at each value of a key column that equals `value`: null equals null, NaN equals NaN."""
    if value is None:
        is_equal = column.is_null()
    elif _is_nan(value):
        is_equal = pc.fill_null(pc.is_nan(column), False)
    else:
        is_equal = pc.fill_null(pc.equal(column, pa.scalar(value, column.type)), False)
    return is_equal.to_numpy().astype(np.bool_)  # type: ignore[no-any-return]


def _before_mask(rows: pa.Table, names: Sequence[str], bound: Key) -> Mask:
    """True at rows whose key sorts before `bound`, which may be only the first columns of a key,
    in the order of `_key_order`.
    """
    is_before = np.zeros(rows.num_rows, np.bool_)
    is_equal_so_far = np.ones(rows.num_rows, np.bool_)
    for name, value in zip(names, bound, strict=False):
        column = rows[name]
        null_is_before = pa.types.is_binary(column.type)
        if value is None:
            is_smaller = pc.if_else(column.is_valid(), not null_is_before, False)
        elif _is_nan(value):
            is_smaller = pc.fill_null(pc.invert(pc.is_nan(column)), null_is_before)
        else:
            is_smaller = pc.fill_null(
                pc.less(column, pa.scalar(value, column.type)), null_is_before
            )
        is_before |= is_equal_so_far & is_smaller.to_numpy().astype(np.bool_)
        is_equal_so_far &= _equal_mask(column, value)
    return is_before


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
