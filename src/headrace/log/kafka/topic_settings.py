"""A topic's settings in their three forms: what a user asks for, what is stored beside the topic, and what Kafka calls it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import pyarrow as pa

from headrace.durations import to_us
from headrace.errors import CorruptionError, InputError, NewerFormat, nearest
from headrace.log.api import TopicInfo
from headrace.log.names import check_name
from headrace.log.schema import check_key, parse_schema, table_schema, to_ddl

VERSION = 1
COMPRESSIONS = {"none": "producer", "lz4": "lz4", "zstd": "zstd", "gzip": "gzip", "snappy": "snappy"}
_STORED = [each.name for each in fields(TopicInfo) if each.name not in {"name", "schema", "arrow_schema", "partitions"}]
# The option of create_topic and alter_topic, and the field of TopicInfo that holds it.
_DURATIONS = {"retention": "retention_us", "history": "history_us", "tombstones": "tombstone_us", "segment_age": "segment_us"}
_PLAIN = {"retention_bytes", "compact", "segment_bytes", "compression"}


def declared(name: str, schema: str, key: str | Sequence[str] | None, *, partitions: int, is_table: bool, options: Mapping[str, Any]) -> TopicInfo:
    """The topic that a user asks for."""
    check_name(name, what="topic")
    columns = parse_schema(schema)
    names = check_key(columns, key, where=f"The topic {name!r}")
    if partitions < 1:
        raise InputError(f"The topic {name!r} cannot have {partitions} partitions.", fix="give it one or more.")
    if options.get("compact") and not names:
        raise InputError(f"The topic {name!r} has no key, and compaction keeps the newest row of each key.", fix="name its key, or leave out compact.")
    return TopicInfo(
        name=name,
        schema=to_ddl(columns),
        arrow_schema=_stored_schema(columns, names, is_table),
        key=names,
        partitions=partitions,
        is_table=is_table,
        **setting_fields(options),
    )


def _stored_schema(columns: pa.Schema, key: tuple[str, ...], is_table: bool) -> pa.Schema:
    return table_schema(columns, key) if is_table else columns


def setting_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as fields of TopicInfo: durations in microseconds."""
    known = {}
    for option, value in options.items():
        if option in _DURATIONS:
            known[_DURATIONS[option]] = None if value is None else to_us(value, what=option)
        elif option in _PLAIN:
            known[option] = value
        else:
            raise InputError(f"A topic has no setting {option!r}: {nearest(option, [*_DURATIONS, *_PLAIN])}")
    if known.get("compression", "none") not in COMPRESSIONS:
        raise InputError(f"The compression {known['compression']!r} is not known: {nearest(str(known['compression']), COMPRESSIONS)}")
    return known


def dump(info: TopicInfo, uid: str) -> bytes:
    """What is stored about a topic. `uid` tells it from an earlier topic of the same name."""
    stored = {"version": VERSION, "uid": uid, "ddl": info.schema, **{name: getattr(info, name) for name in _STORED}}
    return json.dumps(stored, ensure_ascii=False).encode()


def load(name: str, value: bytes, partitions: int) -> tuple[TopicInfo, str]:
    """The inverse of `dump`; the number of partitions is the cluster's to say."""
    try:
        stored = json.loads(value)
        version, uid = stored["version"], stored["uid"]
        if version > VERSION:
            raise NewerFormat(
                f"The topic {name!r} was described by a newer Headrace (format {version}, this one reads {VERSION}).", fix="upgrade headrace."
            )
        columns, key = parse_schema(stored["ddl"]), tuple(stored["key"])
        rest = {field: stored[field] for field in _STORED if field != "key"}
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptionError(
            f"What is stored about the topic {name!r} cannot be read: {error!r}.", fix="declare it again: create_topic(..., exist_ok=True)."
        ) from error
    schema = _stored_schema(columns, key, rest["is_table"])
    return TopicInfo(name=name, schema=stored["ddl"], arrow_schema=schema, key=key, partitions=partitions, **rest), uid


def kafka_config(info: TopicInfo) -> dict[str, str]:
    """The same in Kafka's words. Rows are stamped when they are appended, as the embedded log does."""
    compact = info.compact or info.history_us is not None
    bounded = info.retention_us is not None or info.retention_bytes is not None
    return {
        "message.timestamp.type": "LogAppendTime",
        "cleanup.policy": ("compact,delete" if bounded else "compact") if compact else "delete",
        "retention.ms": _ms(info.retention_us),
        "retention.bytes": str(-1 if info.retention_bytes is None else info.retention_bytes),
        "delete.retention.ms": _ms(info.tombstone_us),
        "min.compaction.lag.ms": _ms(info.history_us or 0),
        "segment.bytes": str(info.segment_bytes),
        "segment.ms": str(max(info.segment_us // 1000, 1)),
        "compression.type": COMPRESSIONS[info.compression],
    }


def _ms(us: int | None) -> str:
    return "-1" if us is None else str(us // 1000)
