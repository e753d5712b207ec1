"""Values that a database did not send because a change left them as they were (Postgres's large values), filled in from the row before. Captured tables' topics mark them, in the column `_marks`;
sinks, folding and the kernel of a pipeline's captured table fill them in, and a mark goes when its value is there.

A row whose key has changed comes as a delete and an insert with the same `_transaction` and `_order`: there the row before is the one that goes. Few rows are concerned, so
those are gone through one by one, and no others.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.operators.changelog import DELETE
from headrace.operators.kernel import CHANGE_TYPE

MARKS, TRANSACTION, ORDER = "_marks", "_transaction", "_order"

Row = dict[str, Any]
Key = tuple[Any, ...]
Pair = tuple[int, int]


def marked_unchanged(rows: pa.Table) -> pa.ChunkedArray:
    """Which rows have a mark of that kind."""
    return pc.fill_null(pc.match_substring(rows[MARKS], '"unchanged"'), False)


def with_unchanged(rows: pa.Table, key: list[str], lookup: Callable[[pa.Table], pa.Table]) -> pa.Table:
    """Changes in their order, whole: what is marked as unchanged is as before in these rows, or else in what `lookup` has for some keys."""
    marked = marked_unchanged(rows)
    if not pc.any(marked).as_py():
        return rows
    touched = _touched(rows, rows.filter(marked), key)
    here = _among(rows, touched, key)
    known = {_key(row, key): row for row in lookup(touched).to_pylist()}
    changed = pa.Table.from_pylist(_Filling(rows.filter(here).to_pylist(), known, key).filled(), schema=rows.schema)
    numbers = pa.array(range(rows.num_rows))
    order = pa.concat_arrays([numbers.filter(pc.invert(here)), numbers.filter(here)])
    return pa.concat_tables([rows.filter(pc.invert(here)), changed]).take(pc.sort_indices(order))


def _touched(rows: pa.Table, marked: pa.Table, key: list[str]) -> pa.Table:
    """The keys of marked rows, and those that they had before."""
    keys = marked.select(key)
    if ORDER in rows.column_names and TRANSACTION in rows.column_names:
        gone = rows.filter(pc.equal(rows[CHANGE_TYPE], DELETE)).select([*key, TRANSACTION, ORDER])
        keys = pa.concat_tables(
            [keys, gone.join(marked.select([TRANSACTION, ORDER]), [TRANSACTION, ORDER], join_type="left semi").select(key).cast(keys.schema)]
        )
    return pa.TableGroupBy(keys, key).aggregate([])


def _among(rows: pa.Table, keys: pa.Table, key: list[str]) -> pa.Array:
    """Which rows have one of the keys."""
    numbered = rows.select(key).append_column("__n", pa.array(range(rows.num_rows), pa.int64()))
    found = numbered.join(keys, key, join_type="left semi")["__n"]
    return pc.is_in(numbered["__n"], value_set=found.combine_chunks()).combine_chunks()


class _Filling:
    """Changes of some keys, each key's in order. A row that takes over from another key waits until that one is gone: it may stand in another partition."""

    def __init__(self, rows: list[Row], known: dict[Key, Row], key: list[str]) -> None:
        self._rows, self._known, self._names = rows, known, key
        self._waiting: dict[Key, deque[Row]] = {}
        for row in rows:
            self._waiting.setdefault(_key(row, key), deque()).append(row)
        self._deletes = {pair for row in rows if row[CHANGE_TYPE] == DELETE and (pair := _pair(row)) is not None}
        self._gone: dict[Pair, Row] = {}

    def filled(self) -> list[Row]:
        while any(self._waiting.values()):
            moved = sum(self._advance(queue) for queue in self._waiting.values())
            if not moved:  # keys that took each other's places: whatever is known must do
                self._take(next(queue for queue in self._waiting.values() if queue).popleft())
        return self._rows

    def _advance(self, queue: deque[Row]) -> int:
        moved = 0
        while queue and not self._must_wait(queue[0]):
            self._take(queue.popleft())
            moved += 1
        return moved

    def _must_wait(self, row: Row) -> bool:
        pair = _pair(row)
        return row[CHANGE_TYPE] != DELETE and pair in self._deletes and pair not in self._gone and any(_unchanged(row))

    def _take(self, row: Row) -> None:
        place, pair = _key(row, self._names), _pair(row)
        if row[CHANGE_TYPE] == DELETE:
            before = self._known.pop(place, None)
            if pair is not None:
                self._gone[pair] = before or {}
            return
        before = self._gone.get(pair) if pair in self._gone else self._known.get(place)
        _fill(row, before or {})
        self._known[place] = row


def _fill(row: Row, before: Row) -> None:
    """What the row before does not know either stays marked."""
    marks = _marks(row)
    unknown = {*_unchanged(before)}
    for name in _unchanged(row):
        if name in before and name not in unknown:
            row[name] = before[name]
            marks.pop(name)
    row[MARKS] = json.dumps(marks, ensure_ascii=False) if marks else None


def _marks(row: Row) -> dict[str, Any]:
    return json.loads(row[MARKS]) if row.get(MARKS) else {}


def _unchanged(row: Row) -> Iterator[str]:
    return (name for name, mark in _marks(row).items() if "unchanged" in mark)


def _pair(row: Row) -> Pair | None:
    transaction, order = row.get(TRANSACTION), row.get(ORDER)
    return None if transaction is None or order is None else (transaction, order)


def _key(row: Row, names: list[str]) -> Key:
    return tuple(row[name] for name in names)
