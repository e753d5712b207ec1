"""A batch on its way to a target: of each key the last change, as Arrow tables, and the places of the topic it stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.cdc.source import MARKS
from headrace.log.api import CHANGE_TYPE, DELETE, OFFSET_COLUMN, PARTITION_COLUMN, UPDATE_BEFORE
from headrace.operators.unchanged import with_unchanged
from headrace.sinks.shape import Shape

Lookup = Callable[[pa.Table], pa.Table]
"""Keys -> the rows that the target has for them."""
_PLACES = [PARTITION_COLUMN, OFFSET_COLUMN]


@dataclass(frozen=True)
class Batch:
    """`upserts` has the target's columns, `deletes` its key's; no key is in both or twice. `upsert_places` and `delete_places` say where each stands in the topic.

    `start` and `stop` are offsets by partition: what the batch begins behind, and what is applied with it.
    """

    upserts: pa.Table
    deletes: pa.Table
    upsert_places: pa.Table
    delete_places: pa.Table
    keyless: pa.Table
    """Rows whose key is null, with their places: nothing can be merged by it."""
    start: Mapping[int, int]
    stop: Mapping[int, int]
    fresh: frozenset[int] = frozenset()
    """Partitions of which the target is to know nothing yet."""

    @property
    def rows(self) -> int:
        return int(self.upserts.num_rows + self.deletes.num_rows)


def batch_of(
    raw: Sequence[pa.RecordBatch],
    shape: Shape,
    start: Mapping[int, int],
    stop: Mapping[int, int],
    lookup: Lookup,
    *,
    fresh: frozenset[int] = frozenset(),
) -> Batch:
    """From rows as the log gives them."""
    rows = pa.Table.from_batches(raw) if raw else _nothing(shape)
    if not shape.is_merge:
        places = rows.select(_PLACES)
        nothing = rows.slice(0, 0)
        return Batch(plain(rows, shape), nothing.select(list(shape.key)), places, nothing.select(_PLACES), nothing, start, stop, fresh)
    rows, keyless = _by_having_key(rows, shape)
    rows = newest(rows, shape, lookup)
    gone = (
        pc.equal(rows[CHANGE_TYPE], DELETE) if CHANGE_TYPE in rows.column_names else pa.chunked_array([pa.array([False] * rows.num_rows, pa.bool_())])
    )
    alive, dead = rows.filter(pc.invert(gone)), rows.filter(gone)
    return Batch(plain(alive, shape), dead.select(list(shape.key)), alive.select(_PLACES), dead.select(_PLACES), keyless, start, stop, fresh)


def newest(rows: pa.Table, shape: Shape, lookup: Lookup) -> pa.Table:
    """The last change of each key, in the topic's order, whole: what a change left as it was is filled in. A key stays in one partition, so the order given is its own."""
    if CHANGE_TYPE in rows.column_names:
        rows = rows.filter(pc.not_equal(rows[CHANGE_TYPE], UPDATE_BEFORE))
    if MARKS in rows.column_names and rows[MARKS].null_count < rows.num_rows:
        rows = with_unchanged(rows, list(shape.key), lookup)
    numbered = rows.select(list(shape.key)).append_column("__n", pa.array(np.arange(rows.num_rows)))
    last = numbered.group_by(list(shape.key)).aggregate([("__n", "max")])["__n_max"].to_numpy()
    return rows if len(last) == rows.num_rows else rows.take(pa.array(np.sort(last)))


def plain(rows: pa.Table, shape: Shape) -> pa.Table:
    """The target's columns, of exactly its types."""
    return rows.select(shape.schema.names).cast(shape.schema)


def _by_having_key(rows: pa.Table, shape: Shape) -> tuple[pa.Table, pa.Table]:
    if all(rows[name].null_count == 0 for name in shape.key):
        return rows, rows.slice(0, 0)
    missing = pc.is_null(rows[shape.key[0]])
    for name in shape.key[1:]:
        missing = pc.or_(missing, pc.is_null(rows[name]))
    return rows.filter(pc.invert(missing)), rows.filter(missing)


def _nothing(shape: Shape) -> pa.Table:
    fields = [*shape.source, pa.field(PARTITION_COLUMN, pa.int32()), pa.field(OFFSET_COLUMN, pa.int64())]
    return pa.schema(fields).empty_table()
