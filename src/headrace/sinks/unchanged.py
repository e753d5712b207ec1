"""Values that a database did not send because a change left them as they were (Postgres's large values), filled in from the row before.

Few rows have them, so those are gone through one by one, and no others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.cdc.source import MARKS
from headrace.log.api import CHANGE_TYPE, DELETE
from headrace.sinks.shape import Shape


def with_unchanged(rows: pa.Table, shape: Shape, lookup: Callable[[pa.Table], pa.Table]) -> pa.Table:
    """Changes in their order, whole: what is marked as unchanged is as before in these rows, or else in the target."""
    marked = pc.fill_null(pc.match_substring(rows[MARKS], '"unchanged"'), False)
    if not pc.any(marked).as_py():
        return rows
    key = list(shape.key)
    touched = pa.TableGroupBy(rows.filter(marked).select(key), key).aggregate([])
    here = _among(rows, touched, key)
    known = {_place(row, key): row for row in lookup(touched).to_pylist()}
    changed = _filled(rows.filter(here), known, key)
    numbers = pa.array(range(rows.num_rows))
    order = pa.concat_arrays([numbers.filter(pc.invert(here)), numbers.filter(here)])
    return pa.concat_tables([rows.filter(pc.invert(here)), changed]).take(pc.sort_indices(order))


def _among(rows: pa.Table, keys: pa.Table, key: list[str]) -> pa.Array:
    """Which rows have one of the keys."""
    numbered = rows.select(key).append_column("__n", pa.array(range(rows.num_rows), pa.int64()))
    found = numbered.join(keys, key, join_type="left semi")["__n"]
    return pc.is_in(numbered["__n"], value_set=found.combine_chunks()).combine_chunks()


def _filled(rows: pa.Table, known: dict[tuple[Any, ...], dict[str, Any]], key: list[str]) -> pa.Table:
    listed: list[dict[str, Any]] = rows.to_pylist()
    for row in listed:
        place = _place(row, key)
        for name, mark in (json.loads(row[MARKS]) if row[MARKS] else {}).items():
            if "unchanged" in mark and place in known and name in known[place]:
                row[name] = known[place][name]
        if row[CHANGE_TYPE] == DELETE:
            known.pop(place, None)
        else:
            known[place] = row
    return pa.Table.from_pylist(listed, schema=rows.schema)


def _place(row: dict[str, Any], key: list[str]) -> tuple[Any, ...]:
    return tuple(row[name] for name in key)
