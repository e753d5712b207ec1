"""A topic's settings in the two forms that Kafka needs: what is stored beside the topic, and what Kafka calls it."""

from __future__ import annotations

import json
from dataclasses import fields

from headrace.errors import CorruptionError, NewerFormat
from headrace.log.api import TopicInfo
from headrace.log.schema import parse_schema
from headrace.log.settings import stored_schema

VERSION = 1
COMPRESSIONS = {"none": "producer", "lz4": "lz4", "zstd": "zstd"}
_STORED = [each.name for each in fields(TopicInfo) if each.name not in {"name", "schema", "arrow_schema", "partitions", "id"}]


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
    schema = stored_schema(columns, key, is_table=rest["is_table"])
    return TopicInfo(name=name, schema=stored["ddl"], arrow_schema=schema, key=key, partitions=partitions, id=uid, **rest), uid


def kafka_config(info: TopicInfo) -> dict[str, str]:
    """The same in Kafka's words. Rows are stamped when they are appended, as the embedded log does; `retention_bytes` is for each partition."""
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
