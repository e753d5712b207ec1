"""A table's topic, folded: which rows, or which keys, it says are there now. Tests, truncation and renewed snapshots use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from headrace.cdc.source import HIDDEN, MARKS
from headrace.log.api import CHANGE_TYPE, DELETE, OFFSET_COLUMN, PARTITION_COLUMN, UPDATE_BEFORE, Batches, Log
from headrace.operators.unchanged import with_unchanged

_FOLD_ROWS = 500_000
_HIDDEN_NAMES = {each.name for each in HIDDEN}


def live_keys(log: Log, topic: str, *, before: Mapping[int, int] | None = None, written: Sequence[pa.RecordBatch] = ()) -> pa.Table:
    """Keys whose newest change is no delete; with `before`, only those whose newest change stands before these offsets.

    `written` are changes (key and `_change_type`) that follow what is in the topic, in a transaction that is not committed yet.
    """
    key = list(log.topic(topic).key)
    columns = [*key, CHANGE_TYPE, PARTITION_COLUMN, OFFSET_COLUMN]
    newest = _newest(log.read(topic, columns=columns), key, columns)
    if written:
        newest = _with_written(newest, written, key)
    alive = pc.not_equal(newest[CHANGE_TYPE], DELETE)
    if before is not None:
        alive = pc.and_(alive, _stands_before(newest, before))
    return newest.filter(alive).select(key)


def _newest(batches: Batches, key: list[str], columns: list[str]) -> pa.Table:
    """The last change of each key. A key stays in one partition, so that its offsets tell the order; folded as it is read, to bound memory."""
    folded: pa.Table | None = None
    waiting: list[pa.RecordBatch] = [pa.RecordBatch.from_pylist([], schema=batches.schema).select(columns)]
    rows = 0
    for batch in batches:
        waiting.append(batch.select(columns))
        rows += batch.num_rows
        if rows >= _FOLD_ROWS:
            folded, waiting, rows = _folded(folded, waiting, key), [], 0
    return _folded(folded, waiting, key) if waiting or folded is None else folded


def _folded(folded: pa.Table | None, waiting: list[pa.RecordBatch], key: list[str]) -> pa.Table:
    parts = ([folded] if folded is not None else []) + ([pa.Table.from_batches(waiting)] if waiting else [])
    rows = pa.concat_tables(parts)
    rows = rows.filter(pc.not_equal(rows[CHANGE_TYPE], UPDATE_BEFORE)).combine_chunks()
    numbered = rows.append_column("__n", pa.array(range(rows.num_rows), pa.int64()))
    last = numbered.group_by(key).aggregate([("__n", "max")])["__n_max"]
    return rows.take(last)


def _with_written(newest: pa.Table, written: Sequence[pa.RecordBatch], key: list[str]) -> pa.Table:
    rows = pa.concat_tables([pa.Table.from_batches([each]) for each in written]).select([*key, CHANGE_TYPE])
    rows = rows.set_column(len(key), CHANGE_TYPE, rows[CHANGE_TYPE].cast(pa.string()))
    count = rows.num_rows
    for name, kind in ((PARTITION_COLUMN, pa.int32()), (OFFSET_COLUMN, pa.int64())):
        rows = rows.append_column(pa.field(name, kind, nullable=False), pa.array([2**31 - 1 if kind == pa.int32() else 2**62] * count, kind))
    rows = rows.cast(newest.schema)
    return _folded(newest, rows.to_batches(), key)


def _stands_before(rows: pa.Table, before: Mapping[int, int]) -> pa.Array:
    partitions = pa.array(list(before), pa.int32())
    ends = pa.array([*before.values(), -1], pa.int64())
    place = pc.fill_null(pc.index_in(rows[PARTITION_COLUMN], partitions), len(before))
    return pc.less(rows[OFFSET_COLUMN], pc.take(ends, place))


def fold(log: Log, topic: str, *, hidden: bool = False) -> pa.Table:
    """The rows that a captured table has, by its topic, in no particular order. A value that was marked as unchanged is the one before."""
    info = log.topic(topic)
    rows = log.read(topic).to_table()
    rows = rows.filter(pc.not_equal(rows[CHANGE_TYPE], UPDATE_BEFORE))
    columns = [name for name in info.arrow_schema.names if name != CHANGE_TYPE and (hidden or name not in _HIDDEN_NAMES)]
    if MARKS in rows.column_names and rows[MARKS].null_count < rows.num_rows:
        rows = with_unchanged(rows, list(info.key), lambda _keys: rows.slice(0, 0))
    if not rows.num_rows:
        return rows.select(columns)
    rows = _folded(None, rows.combine_chunks().to_batches(), list(info.key))
    return rows.filter(pc.not_equal(rows[CHANGE_TYPE], DELETE)).select(columns)
