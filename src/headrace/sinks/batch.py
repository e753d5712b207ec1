"""Batches: rows of a topic in the form in which they are applied to a target.

`target_shape` derives the target's columns and key from the topic. `build_batch` turns rows as the
log has them into a `SinkBatch`; in merge mode only the last change of each key is left:

    rows in   offset  id  name    _change_type
              7       1   'ada'   insert
              8       2   'bob'   insert
              9       1   'Ada'   update_postimage
              10      2   'bob'   delete

    batch     upserts:  (id 1, name 'Ada')      upsert_offsets:  9
              deletes:  (id 2)                  delete_offsets:  10

In append mode every row is an upsert under its partition and offset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import (
    CHANGE_TYPE,
    DELETE,
    HIDDEN_FIELDS,
    MARKS,
    OFFSET_COLUMN,
    PARTITION_COLUMN,
    UPDATE_PREIMAGE,
)
from headrace.errors import InputError, UnknownColumn
from headrace.log.values import TopicInfo
from headrace.operators.changelog import fill_unchanged_values

MERGE, APPEND = "merge", "append"
OFFSET_COLUMNS = [PARTITION_COLUMN, OFFSET_COLUMN]
"""The columns that say where a row stands in its topic."""

Lookup = Callable[[pa.Table], pa.Table]
"""Takes keys and returns the rows that the target has for them."""

_HIDDEN_NAMES = {field.name for field in HIDDEN_FIELDS}


@dataclass(frozen=True)
class TargetShape:
    """The columns and the key of a target, and the topic that it is filled from."""

    topic: str
    topic_id: str
    schema: pa.Schema
    """The target's columns."""
    key: tuple[str, ...]
    """The columns that identify a row. In append mode these are its partition and offset."""
    mode: str
    """`MERGE`: one row a key, the newest. `APPEND`: every row of the topic once."""
    source: pa.Schema
    """The topic's own columns. When they change, the target is prepared again."""

    @property
    def is_merge(self) -> bool:
        return self.mode == MERGE

    @property
    def values(self) -> list[str]:
        """The columns that are not part of the key."""
        return [name for name in self.schema.names if name not in self.key]


def target_shape(
    info: TopicInfo,
    *,
    mode: str | None,
    key: tuple[str, ...],
    columns: tuple[str, ...] = (),
    keeps_marks: bool,
    keeps_all: bool = False,
) -> TargetShape:
    """Derive a target's columns and key from its topic.

    Args:
        info: The topic.
        mode: `MERGE` or `APPEND`. By default tables, and topics for which a key is given, are
            merged, and others are appended.
        key: The key to merge by, for a topic that is not a table.
        columns: The topic's columns that the target gets, by their names or former names; all if
            there are none.
        keeps_marks: Whether the hidden column `_marks` is kept in merge mode too.
        keeps_all: Whether all hidden columns are kept.
    """
    mode = mode or (MERGE if info.is_table or key else APPEND)
    hidden = _HIDDEN_NAMES - {MARKS} if mode == APPEND or keeps_marks else _HIDDEN_NAMES
    if keeps_all:
        hidden = set()
    wanted = {info.schema_history.present_name(name) for name in columns}
    for name in wanted:
        if name not in info.arrow_schema.names:
            raise UnknownColumn(name, info.arrow_schema.names, where=f"The topic {info.name!r}")
    fields = [
        pa.field(field.name, field.type)
        for field in info.arrow_schema
        if field.name != CHANGE_TYPE
        and not (info.is_table and field.name in hidden)
        and (not wanted or field.name in {*wanted, MARKS})
    ]
    if mode == APPEND:
        change_fields = [pa.field(CHANGE_TYPE, pa.string())] if info.is_table else []
        fields = [*fields, *change_fields, *_OFFSET_FIELDS]
        key = tuple(OFFSET_COLUMNS)
    else:
        names = [field.name for field in fields]
        if info.is_table and key and key != info.key:
            raise InputError(
                f"The table {info.name!r} has the key {', '.join(info.key)}, not {', '.join(key)}.",
                fix="leave out key=…: a table is merged by its own key.",
            )
        key = key or info.key
        if not key:
            raise InputError(
                f"The topic {info.name!r} has no key to merge by.",
                fix="give key=… (--key …), or use mode='append'.",
            )
        for name in key:
            if name not in names:
                raise UnknownColumn(name, names, where=f"The topic {info.name!r}")
    return TargetShape(
        topic=info.name,
        topic_id=info.id,
        schema=pa.schema(fields),
        key=key,
        mode=mode,
        source=info.arrow_schema,
    )


_OFFSET_FIELDS = [pa.field(PARTITION_COLUMN, pa.int32()), pa.field(OFFSET_COLUMN, pa.int64())]


@dataclass(frozen=True)
class SinkBatch:
    """Rows to apply in one commit of the target. No key is in both `upserts` and `deletes`, or
    twice in one of them.
    """

    upserts: pa.Table
    """Rows to insert or replace, with the target's columns."""
    deletes: pa.Table
    """Keys to delete."""
    upsert_offsets: pa.Table
    """Partition and offset of each upsert."""
    delete_offsets: pa.Table
    """Partition and offset of each delete."""
    keyless: pa.Table
    """Rows whose key is null, which cannot be merged, with their partitions and offsets."""
    start: Mapping[int, int]
    """By partition, the offset at which the batch begins."""
    stop: Mapping[int, int]
    """By partition, the offset that follows the batch's last."""
    new_partitions: frozenset[int] = frozenset()
    """Partitions that the target's checkpoint must not contain yet."""

    @property
    def rows(self) -> int:
        return int(self.upserts.num_rows + self.deletes.num_rows)


def build_batch(
    record_batches: Sequence[pa.RecordBatch],
    shape: TargetShape,
    start: Mapping[int, int],
    stop: Mapping[int, int],
    lookup: Lookup,
    *,
    new_partitions: frozenset[int] = frozenset(),
) -> SinkBatch:
    """Build a batch from rows as the log returns them.

    Args:
        record_batches: Rows of the topic, with their partitions and offsets.
        shape: The target's shape.
        start: By partition, the first offset.
        stop: By partition, the offset after the last.
        lookup: Returns rows that the target has, for changes that leave some columns unchanged.
        new_partitions: Partitions that the target has applied nothing of.
    """
    if record_batches:
        rows = pa.Table.from_batches(record_batches)
    else:
        rows = pa.schema([*shape.source, *_OFFSET_FIELDS]).empty_table()
    keyless = is_delete = None
    if shape.is_merge:
        rows, keyless = _split_keyless(rows, shape)
        rows = newest_changes(rows, shape, lookup)
        if CHANGE_TYPE in rows.column_names:
            is_delete = pc.equal(rows[CHANGE_TYPE], DELETE)
    upserts = rows if is_delete is None else rows.filter(pc.invert(is_delete))
    deletes = rows.slice(0, 0) if is_delete is None else rows.filter(is_delete)
    return SinkBatch(
        upserts=upserts.select(shape.schema.names).cast(shape.schema),
        deletes=deletes.select(list(shape.key)),
        upsert_offsets=upserts.select(OFFSET_COLUMNS),
        delete_offsets=deletes.select(OFFSET_COLUMNS),
        keyless=rows.slice(0, 0) if keyless is None else keyless,
        start=start,
        stop=stop,
        new_partitions=new_partitions,
    )


def newest_changes(rows: pa.Table, shape: TargetShape, lookup: Lookup) -> pa.Table:
    """Return the last change of each key, in the topic's order. Columns that a change left
    unchanged are filled in from earlier rows or from the target.

    A key stays in one partition, so the order of the rows is the order of its changes.
    """
    if CHANGE_TYPE in rows.column_names:
        rows = rows.filter(pc.not_equal(rows[CHANGE_TYPE], UPDATE_PREIMAGE))
    if MARKS in rows.column_names and rows[MARKS].null_count < rows.num_rows:
        rows = fill_unchanged_values(rows, list(shape.key), lookup)
    numbered = rows.select(list(shape.key)).append_column("__n", pa.array(np.arange(rows.num_rows)))
    last = numbered.group_by(list(shape.key)).aggregate([("__n", "max")])["__n_max"].to_numpy()
    return rows if len(last) == rows.num_rows else rows.take(pa.array(np.sort(last)))


def _split_keyless(rows: pa.Table, shape: TargetShape) -> tuple[pa.Table, pa.Table]:
    """Split rows into those that have a key and those in whose key a column is null."""
    if all(rows[name].null_count == 0 for name in shape.key):
        return rows, rows.slice(0, 0)
    is_keyless = pc.is_null(rows[shape.key[0]])
    for name in shape.key[1:]:
        is_keyless = pc.or_(is_keyless, pc.is_null(rows[name]))
    return rows.filter(pc.invert(is_keyless)), rows.filter(is_keyless)
