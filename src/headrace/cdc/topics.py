"""The topics of captured tables: created when a table is first seen, and widened when it gets
columns.

A topic's columns are never renamed, retyped or removed, since its readers rely on them. A column
that is dropped in the database is null from then on, a renamed one is a new column, and one whose
type changes continues under a name with the type appended (`amount__bigint`).

`fold` and `live_keys` read a topic back: the rows, or the keys, that the table has now.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from headrace.cdc.base import TableChanges, TableShape, TopicRows
from headrace.columnar.columns import (
    CHANGE_TYPE,
    COMMITTED_AT,
    DELETE,
    HIDDEN_DDL,
    HIDDEN_FIELDS,
    MARKS,
    OFFSET_COLUMN,
    ORDER,
    PARTITION_COLUMN,
    POSITION,
    TIMESTAMP_TYPE,
    TRANSACTION,
    UPDATE_PREIMAGE,
)
from headrace.errors import ConfigurationError, InputError
from headrace.log.api import Log
from headrace.log.values import TopicInfo
from headrace.operators.changelog import fill_unchanged_values
from headrace.types.schema import to_ddl

_UNUSABLE = re.compile(r"[^A-Za-z0-9._-]")
_HIDDEN_NAMES = {each.name for each in HIDDEN_FIELDS}


def topic_name(table: str, prefix: str, template: str | None = None) -> str:
    """Return the name of a table's topic: `public.orders` is `orders`, other schemas are part of
    the name. A template such as `{schema}_{table}` says otherwise.

    Raises:
        InputError: The template has other fields.
    """
    if template is None:
        return prefix + _UNUSABLE.sub("_", table.removeprefix("public."))
    schema, _, name = table.rpartition(".")
    try:
        topic = template.format(schema=schema, table=name)
    except (KeyError, IndexError, ValueError):
        raise InputError(
            f"The template {template!r} of topics' names cannot be filled in.",
            fix="use {schema} and {table}, as in topic='{schema}_{table}'.",
        ) from None
    return prefix + _UNUSABLE.sub("_", topic)


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
    newest = _newest_changes(log, topic, [])
    if written:
        newest = _fold_written(newest, written, key)
    alive = pc.not_equal(newest[CHANGE_TYPE], DELETE)
    if before is not None:
        alive = pc.and_(alive, _is_before(newest, before))
    return newest.filter(alive).select(key)


def live_rows(log: Log, topic: str, *, values: Sequence[str]) -> pa.Table:
    """Return the keys whose newest change is not a delete, with some values of that change."""
    newest = _newest_changes(log, topic, values)
    alive = pc.not_equal(newest[CHANGE_TYPE], DELETE)
    return newest.filter(alive).select([*log.topic(topic).key, *values])


def _newest_changes(log: Log, topic: str, values: Sequence[str]) -> pa.Table:
    """Return the last change of each key. It is folded while it is read, to bound memory. A key
    stays in one partition, so its offsets are the order of its changes.
    """
    key = list(log.topic(topic).key)
    columns = [*key, *values, CHANGE_TYPE, PARTITION_COLUMN, OFFSET_COLUMN]
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
    return _fold_newest(folded, waiting, key) if waiting or folded is None else folded


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


# Topics about a capture: changes of tables' columns, and transactions. Their rows are written in
# the same transactions of the log as the changes they are about:
#
#     schema_topic        table         topic  columns                          before
#                         public.items  items  [["id", "BIGINT"], ["n", "INT"]] [["id", "BIGINT"]]
#
#     transaction_topic   transaction  position  committed_at  changes  tables
#                         745          98…       12:00:00      3        {"public.items": 3}

SCHEMA_DDL = "`table` STRING, topic STRING, columns STRING, before STRING"
TRANSACTION_DDL = (
    "transaction BIGINT, position BIGINT, committed_at TIMESTAMP, changes BIGINT, tables STRING"
)
_SCHEMA_FIELDS = pa.schema(
    [(name, pa.string()) for name in ("table", "topic", "columns", "before")]
)
_TRANSACTION_FIELDS = pa.schema(
    [
        ("transaction", pa.int64()),
        ("position", pa.int64()),
        ("committed_at", TIMESTAMP_TYPE),
        ("changes", pa.int64()),
        ("tables", pa.string()),
    ]
)


class MetadataTopics:
    """Collects what the topics about one capture get. Without their names there are none."""

    def __init__(self, schema_topic: str | None, transaction_topic: str | None) -> None:
        self._schema_topic = schema_topic
        self._transaction_topic = transaction_topic
        self._counts: list[tuple[str, pa.Table]] = []
        """By table, the changes of transactions that have not ended."""

    def clear(self) -> None:
        self._counts.clear()

    def schema_change(
        self, shape: TableShape, topic: str, before: Sequence[Sequence[str]]
    ) -> list[TopicRows]:
        """Return the row about a table whose columns have changed, or that is new."""
        if self._schema_topic is None:
            return []
        row = {
            "table": shape.name,
            "topic": topic,
            "columns": json.dumps(shape.columns),
            "before": json.dumps(before) if before else None,
        }
        rows = pa.RecordBatch.from_pylist([row], schema=_SCHEMA_FIELDS)
        return [TopicRows(self._schema_topic, SCHEMA_DDL, "table", rows)]

    def add_changes(self, changes: TableChanges) -> None:
        """Count changes by transaction."""
        if self._transaction_topic is None:
            return
        keys = [TRANSACTION, POSITION, COMMITTED_AT]
        rows = pa.Table.from_batches([changes.rows]).select([*keys, ORDER])
        counts = rows.group_by(keys).aggregate([(ORDER, "count_distinct")])
        self._counts.append((changes.table, counts))

    def ended_transactions(self) -> list[TopicRows]:
        """Return a row for each transaction that was counted; all of them have ended."""
        if self._transaction_topic is None or not self._counts:
            return []
        transactions: dict[tuple[object, ...], dict[str, int]] = {}
        for table, counts in self._counts:
            for row in counts.to_pylist():
                key = (row[TRANSACTION], row[POSITION], row[COMMITTED_AT])
                tables = transactions.setdefault(key, {})
                tables[table] = tables.get(table, 0) + row[f"{ORDER}_count_distinct"]
        self._counts.clear()
        rows = [
            {
                "transaction": transaction,
                "position": position,
                "committed_at": committed_at,
                "changes": sum(tables.values()),
                "tables": json.dumps(tables),
            }
            for (transaction, position, committed_at), tables in sorted(
                transactions.items(), key=lambda entry: str(entry[0][1]).zfill(20)
            )
        ]
        batch = pa.RecordBatch.from_pylist(rows, schema=_TRANSACTION_FIELDS)
        return [TopicRows(self._transaction_topic, TRANSACTION_DDL, "transaction", batch)]
