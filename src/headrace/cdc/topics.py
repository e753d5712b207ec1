"""The topics of captured tables: made when a table is first seen, widened when it gets columns, and the fitting of a source's rows to them.

A topic's columns are never renamed, retyped or taken away, since its readers hold on to them. A column that is dropped is null from then on; a renamed one is a new column; one whose
type changes goes on under a name with the type behind it (`amount__bigint`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pyarrow as pa

from headrace.cdc.source import HIDDEN, HIDDEN_DDL, TableShape
from headrace.errors import ConfigurationError
from headrace.log.api import CHANGE_TYPE, Log, TopicInfo
from headrace.log.schema import to_ddl

_UNUSABLE = re.compile(r"[^A-Za-z0-9._-]")
_HIDDEN_NAMES = {each.name for each in HIDDEN}


def topic_name(table: str, prefix: str) -> str:
    """`public.orders` is `orders`, other schemas stay in the name."""
    return prefix + _UNUSABLE.sub("_", table.removeprefix("public."))


@dataclass(frozen=True)
class Fitting:
    """How a table's rows become its topic's: for each of the topic's columns the one of the source, or nothing."""

    topic: str
    schema: pa.Schema
    sources: tuple[str | None, ...]
    key: tuple[str, ...]

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        count = batch.num_rows
        arrays = [pa.nulls(count, field.type) if name is None else batch.column(name) for field, name in zip(self.schema, self.sources, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def prepare(log: Log, shape: TableShape, topic: str, *, partitions: int) -> Fitting:
    """Make the topic, or bring it to a table's columns."""
    if topic not in log.topics():
        log.create_table(topic, f"{shape.ddl}, {HIDDEN_DDL}", primary_key=shape.key, partitions=partitions, exist_ok=True)
    info = log.topic(topic)
    _check(info, shape)
    names, missing = _targets(info, shape)
    if missing:
        info = log.alter_topic(topic, add_columns=to_ddl(pa.schema(missing)))
    sources = {target: name for name, target in names.items()}
    kept = [name if name in _HIDDEN_NAMES or name == CHANGE_TYPE else sources.get(name) for name in info.arrow_schema.names]
    return Fitting(topic, info.arrow_schema, tuple(kept), info.key)


def _check(info: TopicInfo, shape: TableShape) -> None:
    if not info.is_table or not set(info.arrow_schema.names) >= _HIDDEN_NAMES:
        raise ConfigurationError(
            f"The topic {info.name!r} is there already, and was not made for a captured table.",
            fix=f"capture {shape.name} with another prefix, as in prefix='captured.', or delete the topic.",
        )
    if info.key != shape.key:
        raise ConfigurationError(
            f"{shape.name} has the key ({', '.join(shape.key)}), and its topic {info.name!r} has ({', '.join(info.key)}): a topic's key cannot change.",
            fix="capture it under a new prefix and name, which begins with a new snapshot; the old topic stays as it is.",
        )
    wrong = [field.name for field in shape.schema if field.name in info.key and field.type != info.arrow_schema.field(field.name).type]
    if wrong:
        raise ConfigurationError(
            f"The type of the key column {wrong[0]!r} of {shape.name} changed, and a topic's key cannot.",
            fix="capture it under a new prefix and name, which begins with a new snapshot; the old topic stays as it is.",
        )


def _targets(info: TopicInfo, shape: TableShape) -> tuple[dict[str, str], list[pa.Field]]:
    """The topic's column for each of the source's, and those that the topic does not have yet."""
    known = {field.name: field.type for field in info.arrow_schema}
    lower = {name.lower() for name in known}
    names: dict[str, str] = {}
    missing: list[pa.Field] = []
    for field, (_, ddl) in zip(shape.schema, shape.columns, strict=True):
        target = field.name
        if known.get(target, field.type) != field.type or (target not in known and target.lower() in lower):
            target = f"{field.name}__{_word(ddl)}"
        names[field.name] = target
        if target not in known:
            missing.append(pa.field(target, field.type))
    return names, missing


def _word(ddl: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", ddl.lower()).strip("_")
