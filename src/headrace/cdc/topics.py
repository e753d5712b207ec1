"""The topics of captured tables: created when a table is first seen, and widened when it gets
columns.

A topic's columns are never renamed, retyped or removed, since its readers rely on them. A column
that is dropped in the database is null from then on, a renamed one is a new column, and one whose
type changes continues under a name with the type appended (`amount__bigint`).

`fold` and `live_keys` read a topic back: the rows, or the keys, that the table has now.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from headrace.cdc.base import TableShape
from headrace.columnar.columns import (
    CHANGE_TYPE,
    DELETE,
    HIDDEN_DDL,
    HIDDEN_FIELDS,
    MARKS,
    OFFSET_COLUMN,
    PARTITION_COLUMN,
    UPDATE_PREIMAGE,
)
from headrace.errors import ConfigurationError
from headrace.log.api import Log
from headrace.log.values import TopicInfo
from headrace.operators.changelog import fill_unchanged_values
from headrace.types.schema import to_ddl

_UNUSABLE = re.compile(r"[^A-Za-z0-9._-]")
_HIDDEN_NAMES = {each.name for each in HIDDEN_FIELDS}


def topic_name(table: str, prefix: str) -> str:
    """Return the name of a table's topic: `public.orders` is `orders`, other schemas are part of
    the name.
    """
    return prefix + _UNUSABLE.sub("_", table.removeprefix("public."))


@dataclass(frozen=True)
class TopicMapping:
    """Which column of the table fills each column of its topic."""

    topic: str
    schema: pa.Schema
    sources: tuple[str | None, ...]
    """For each of the topic's columns the table's; None if the table does not have it any more."""
    key: tuple[str, ...]

    def to_topic_rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        count = batch.num_rows
        arrays = [
            pa.nulls(count, field.type) if name is None else batch.column(name)
            for field, name in zip(self.schema, self.sources, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def prepare(log: Log, shape: TableShape, topic: str, *, partitions: int) -> TopicMapping:
    """Create the topic of a table, or add the columns that it lacks. Returns how the table's
    columns are mapped to it.
    """
    if topic not in log.topics():
        log.create_table(
            topic,
            f"{shape.ddl}, {HIDDEN_DDL}",
            key=shape.key,
            partitions=partitions,
            exist_ok=True,
        )
    info = log.topic(topic)
    _check_fits(info, shape)
    names, missing = _topic_columns(info, shape)
    if missing:
        info = log.alter_topic(topic, add_columns=to_ddl(pa.schema(missing)))
    sources = {target: name for name, target in names.items()}
    mapped = [
        name if name in _HIDDEN_NAMES or name == CHANGE_TYPE else sources.get(name)
        for name in info.arrow_schema.names
    ]
    return TopicMapping(topic, info.arrow_schema, tuple(mapped), info.key)


def _check_fits(info: TopicInfo, shape: TableShape) -> None:
    if not info.is_table or not set(info.arrow_schema.names) >= _HIDDEN_NAMES:
        raise ConfigurationError(
            f"The topic {info.name!r} exists, and was not created for a captured table.",
            fix=(
                f"capture {shape.name} with another prefix, as in prefix='captured.', so that it"
                " gets a topic of its own."
            ),
        )
    if info.key != shape.key:
        raise ConfigurationError(
            f"{shape.name} has the key ({', '.join(shape.key)}), and its topic {info.name!r} has"
            f" ({', '.join(info.key)}): a topic's key cannot change.",
            fix=(
                "capture it under a new name and prefix, which begins with a new snapshot; the old"
                " topic stays as it is."
            ),
        )
    retyped = [
        field.name
        for field in shape.schema
        if field.name in info.key and field.type != info.arrow_schema.field(field.name).type
    ]
    if retyped:
        raise ConfigurationError(
            f"The type of the key column {retyped[0]!r} of {shape.name} changed, and a topic's key"
            " cannot.",
            fix=(
                "capture it under a new name and prefix, which begins with a new snapshot; the old"
                " topic stays as it is."
            ),
        )


def _topic_columns(info: TopicInfo, shape: TableShape) -> tuple[dict[str, str], list[pa.Field]]:
    """Return the topic's column for each column of the table, and those that the topic lacks."""
    existing = {field.name: field.type for field in info.arrow_schema}
    lower = {name.lower() for name in existing}
    names: dict[str, str] = {}
    missing: list[pa.Field] = []
    for field, (_, ddl) in zip(shape.schema, shape.columns, strict=True):
        target = field.name
        if existing.get(target, field.type) != field.type or (
            target not in existing and target.lower() in lower
        ):
            target = f"{field.name}__{_type_suffix(ddl)}"
        names[field.name] = target
        if target not in existing:
            missing.append(pa.field(target, field.type))
    return names, missing


def _type_suffix(ddl: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", ddl.lower()).strip("_")


# Folding a topic

_FOLD_ROWS = 500_000


def live_keys(
    log: Log,
    topic: str,
    *,
    before: Mapping[int, int] | None = None,
    written: Sequence[pa.RecordBatch] = (),
) -> pa.Table:
    """Return the keys whose newest change is not a delete.

    Args:
        log: The log.
        topic: A captured table's topic.
        before: If given, only keys whose newest change is in front of these offsets.
        written: Changes (key and `_change_type`) that follow what is in the topic, in a transaction
            that is not committed yet.
    """
    key = list(log.topic(topic).key)
    columns = [*key, CHANGE_TYPE, PARTITION_COLUMN, OFFSET_COLUMN]
    # The last change of each key. It is folded while it is read, to bound memory. A key
    # stays in one partition, so its offsets are the order of its changes.
    batches = log.read(topic, columns=columns)
    folded: pa.Table | None = None
    waiting: list[pa.RecordBatch] = [
        pa.RecordBatch.from_pylist([], schema=batches.schema).select(columns)
    ]
    rows = 0
    for batch in batches:
        waiting.append(batch.select(columns))
        rows += batch.num_rows
        if rows >= _FOLD_ROWS:
            folded, waiting, rows = _fold_newest(folded, waiting, key), [], 0
    newest = _fold_newest(folded, waiting, key) if waiting or folded is None else folded
    if written:
        newest = _fold_written(newest, written, key)
    alive = pc.not_equal(newest[CHANGE_TYPE], DELETE)
    if before is not None:
        alive = pc.and_(alive, _is_before(newest, before))
    return newest.filter(alive).select(key)


def _fold_newest(
    folded: pa.Table | None, waiting: list[pa.RecordBatch], key: list[str]
) -> pa.Table:
    parts = ([folded] if folded is not None else []) + (
        [pa.Table.from_batches(waiting)] if waiting else []
    )
    rows = pa.concat_tables(parts)
    rows = rows.filter(pc.not_equal(rows[CHANGE_TYPE], UPDATE_PREIMAGE)).combine_chunks()
    numbered = rows.append_column("__n", pa.array(range(rows.num_rows), pa.int64()))
    last = numbered.group_by(key).aggregate([("__n", "max")])["__n_max"]
    return rows.take(last)


def _fold_written(newest: pa.Table, written: Sequence[pa.RecordBatch], key: list[str]) -> pa.Table:
    rows = pa.concat_tables([pa.Table.from_batches([batch]) for batch in written]).select(
        [*key, CHANGE_TYPE]
    )
    rows = rows.set_column(len(key), CHANGE_TYPE, rows[CHANGE_TYPE].cast(pa.string()))
    count = rows.num_rows
    for name, kind in ((PARTITION_COLUMN, pa.int32()), (OFFSET_COLUMN, pa.int64())):
        rows = rows.append_column(
            pa.field(name, kind, nullable=False),
            pa.array([2**31 - 1 if kind == pa.int32() else 2**62] * count, kind),
        )
    rows = rows.cast(newest.schema)
    return _fold_newest(newest, rows.to_batches(), key)


def _is_before(rows: pa.Table, before: Mapping[int, int]) -> pa.Array:
    partitions = pa.array(list(before), pa.int32())
    ends = pa.array([*before.values(), -1], pa.int64())
    index = pc.fill_null(pc.index_in(rows[PARTITION_COLUMN], partitions), len(before))
    return pc.less(rows[OFFSET_COLUMN], pc.take(ends, index))


def fold(log: Log, topic: str, *, hidden: bool = False) -> pa.Table:
    """Return the rows that a captured table has now, according to its topic.

    Args:
        log: The log.
        topic: A captured table's topic.
        hidden: Whether the hidden columns are returned too.

    Returns:
        The rows, in no particular order. Values that a change left unchanged are filled in.

    Example:
        >>> hr.cdc.fold(log, "orders").to_pylist()  # doctest: +SKIP
        [{'id': 1, 'state': 'paid'}]
    """
    info = log.topic(topic)
    rows = log.read(topic).to_table()
    rows = rows.filter(pc.not_equal(rows[CHANGE_TYPE], UPDATE_PREIMAGE))
    columns = [
        name
        for name in info.arrow_schema.names
        if name != CHANGE_TYPE and (hidden or name not in _HIDDEN_NAMES)
    ]
    if MARKS in rows.column_names and rows[MARKS].null_count < rows.num_rows:
        rows = fill_unchanged_values(rows, list(info.key), lambda _keys: rows.slice(0, 0))
    if not rows.num_rows:
        return rows.select(columns)
    rows = _fold_newest(None, rows.combine_chunks().to_batches(), list(info.key))
    return rows.filter(pc.not_equal(rows[CHANGE_TYPE], DELETE)).select(columns)
