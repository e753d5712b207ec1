"""What a sink's target holds: the columns and the key that follow from a topic and how it is followed."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from headrace.cdc.source import HIDDEN, MARKS
from headrace.errors import InputError, UnknownColumn
from headrace.log.api import CHANGE_TYPE, OFFSET_COLUMN, PARTITION_COLUMN, TopicInfo
from headrace.sinks.declared import APPEND, MERGE, Sink

_HIDDEN = {each.name for each in HIDDEN}


@dataclass(frozen=True)
class Shape:
    """`schema` are the target's columns, `key` those by which a row is known there. In append mode that is the row's place in the topic."""

    topic: str
    topic_id: str
    schema: pa.Schema
    key: tuple[str, ...]
    mode: str
    source: pa.Schema
    """The topic's own columns: when they are others, the target is prepared again."""

    @property
    def is_merge(self) -> bool:
        return self.mode == MERGE

    @property
    def values(self) -> list[str]:
        """The columns that are not part of the key."""
        return [name for name in self.schema.names if name not in self.key]


def shape_of(sink: Sink, info: TopicInfo) -> Shape:
    mode = sink.mode or (MERGE if info.is_table or sink.key else APPEND)
    hidden = _HIDDEN - {MARKS} if mode == APPEND or sink.keeps_marks else _HIDDEN
    fields = [pa.field(each.name, each.type) for each in info.arrow_schema if each.name != CHANGE_TYPE and not (info.is_table and each.name in hidden)]
    if mode == APPEND:
        places = [pa.field(PARTITION_COLUMN, pa.int32()), pa.field(OFFSET_COLUMN, pa.int64())]
        changes = [pa.field(CHANGE_TYPE, pa.string())] if info.is_table else []
        return Shape(info.name, info.id, pa.schema([*fields, *changes, *places]), (PARTITION_COLUMN, OFFSET_COLUMN), mode, info.arrow_schema)
    return Shape(info.name, info.id, pa.schema(fields), _key(sink, info, fields), mode, info.arrow_schema)


def _key(sink: Sink, info: TopicInfo, fields: list[pa.Field]) -> tuple[str, ...]:
    if info.is_table and sink.key and sink.key != info.key:
        raise InputError(
            f"The table {info.name!r} has the key {', '.join(info.key)}, not {', '.join(sink.key)}.",
            fix="leave out key=…: a table is merged by its own.",
        )
    key = sink.key or info.key
    if not key:
        raise InputError(f"The topic {info.name!r} has no key to merge by.", fix="give key=… (--key …), or use mode='append'.")
    names = [each.name for each in fields]
    for name in key:
        if name not in names:
            raise UnknownColumn(name, names, where=f"The topic {info.name!r}")
    return key
