"""The topics of a cluster and their descriptions: schema, key, kind, retention. Kafka has no place
for a schema, so descriptions are stored in the compacted topic `__headrace.topics`.

A topic that was created by another tool is listed too; it can be used once it has been given a
schema.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import fields, replace
from threading import Lock
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from headrace.errors import BadSchema, CorruptionError, NewerFormat, UnknownTopic
from headrace.log.kafka.cluster import ClusterAdmin
from headrace.log.kafka.compacted_topic import CompactedPartition, ensure_compacted_topic
from headrace.log.kafka.errors import error_code, translate_error
from headrace.log.kafka.sender import DeliveryReports, Record, send_records
from headrace.log.topic_config import altered_topic, check_existing_topic, stored_schema
from headrace.log.values import TopicInfo
from headrace.types.schema import parse_schema
from headrace.types.schema_history import ColumnChange, SchemaHistory

VERSION = 2
"""Format 2, written only then, has the history of columns that have changed."""
COMPRESSIONS = {"none": "producer", "lz4": "lz4", "zstd": "zstd"}
_STORED_FIELDS = [
    field.name
    for field in fields(TopicInfo)
    if field.name not in {"name", "schema", "arrow_schema", "schema_history", "partitions", "id"}
]
TOPICS_TOPIC = "__headrace.topics"
INTERNAL_PREFIX = "__headrace."
CACHE_SECONDS = 5.0

TopicDescription = tuple[TopicInfo, str]
"""A topic and its unique id."""


# Descriptions as stored, and settings as Kafka has them


def dump_description(info: TopicInfo, uid: str) -> bytes:
    """The stored description of a topic. `uid` distinguishes it from an earlier topic of the same
    name.
    """
    history = {"schema_history": info.schema_history.dump()} if info.schema_history else {}
    stored = {
        "version": VERSION if history else VERSION - 1,
        "uid": uid,
        "ddl": info.schema,
        **{name: getattr(info, name) for name in _STORED_FIELDS},
        **history,
    }
    return json.dumps(stored, ensure_ascii=False).encode()


def load_description(name: str, value: bytes, partitions: int) -> tuple[TopicInfo, str]:
    """The inverse of `dump_description`. The number of partitions is not stored; the cluster knows
    it.
    """
    try:
        stored = json.loads(value)
        version, uid = stored["version"], stored["uid"]
        if version > VERSION:
            raise NewerFormat(
                f"The topic {name!r} was described by a newer Headrace (format {version}, this one"
                f" reads {VERSION}).",
                fix="upgrade headrace.",
            )
        columns, key = parse_schema(stored["ddl"]), tuple(stored["key"])
        rest = {field: stored[field] for field in _STORED_FIELDS if field != "key"}
        history = SchemaHistory.load(stored.get("schema_history"))
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptionError(
            f"What is stored about the topic {name!r} cannot be read: {error!r}.",
            fix="declare it again: create_topic(..., exist_ok=True).",
        ) from error
    schema = stored_schema(columns, key, is_table=rest["is_table"])
    return (
        TopicInfo(
            name=name,
            schema=stored["ddl"],
            arrow_schema=schema,
            key=key,
            partitions=partitions,
            id=uid,
            schema_history=history,
            **rest,
        ),
        uid,
    )


def kafka_config(info: TopicInfo) -> dict[str, str]:
    """Kafka's settings for a topic. Records get the time at which they are appended, as in the
    embedded log; `retention_bytes` applies to each partition.
    """
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


class TopicStore:
    """The topics of a cluster. Thread-safe."""

    def __init__(self, admin: ClusterAdmin, producer: Producer) -> None:
        self._admin, self._producer = admin, producer
        self._descriptions = CompactedPartition(admin, TOPICS_TOPIC, 0)
        self._guard = Lock()
        self._cache: dict[str, tuple[float, TopicDescription]] = {}
        self._exists = False

    # Lookup

    def names(self) -> list[str]:
        """All topics but the internal ones of Kafka and of this log."""
        described = self._descriptions.values() if self._has_descriptions() else {}
        return sorted(
            name
            for name in self._admin.partition_counts()
            if not name.startswith(INTERNAL_PREFIX)
            and (not name.startswith("__") or name.encode() in described)
        )

    def _description(self, name: str) -> bytes | None:
        return self._descriptions.get(name.encode()) if self._has_descriptions() else None

    def _has_descriptions(self) -> bool:
        """Whether a topic was ever described on this cluster."""
        self._exists = self._exists or self._admin.partitions(TOPICS_TOPIC) is not None
        return self._exists

    def info(self, name: str) -> TopicInfo:
        return self.describe(name)[0]

    def describe(self, name: str) -> TopicDescription:
        """The newest description of a topic."""
        partitions = self._admin.partitions(name)
        stored = self._description(name)
        if partitions is None:
            raise UnknownTopic(name, self.names())
        if stored is None:
            raise BadSchema(
                f"The topic {name!r} was not created by Headrace and has no schema.",
                fix=f"give it one: create_topic({name!r}, schema='...', exist_ok=True).",
            )
        description = load_description(name, stored, partitions)
        with self._guard:
            self._cache[name] = (time.monotonic(), description)
        return description

    def cached(self, name: str) -> TopicDescription:
        """The description of a topic, at most a few seconds old. For the path of every append."""
        entry = self._cache.get(name)
        if entry is not None and time.monotonic() - entry[0] < CACHE_SECONDS:
            return entry[1]
        return self.describe(name)

    # Changes

    def create(self, info: TopicInfo, *, exist_ok: bool) -> TopicInfo:
        """Create a topic: first in Kafka, which decides between two creators, then its description.
        A crash between the two leaves a topic without a schema.
        """
        try:
            self._admin.create(info.name, info.partitions, kafka_config(info))
        except KafkaException as error:
            if error_code(error) != KafkaError.TOPIC_ALREADY_EXISTS:
                raise translate_error(error, f"create the topic {info.name!r}") from error
            return self._existing(info, exist_ok=exist_ok)
        return self._store_description(info)

    def _existing(self, info: TopicInfo, *, exist_ok: bool) -> TopicInfo:
        """A topic that exists already. If it has no schema and `exist_ok` is set, it is given
        one.
        """
        stored = self._description(info.name)
        partitions = self._admin.partitions(info.name) or info.partitions
        if stored is None and exist_ok:
            return self._store_description(replace(info, partitions=partitions))
        existing = info if stored is None else load_description(info.name, stored, partitions)[0]
        return check_existing_topic(existing, info, exist_ok=exist_ok)

    def _store_description(self, info: TopicInfo, uid: str | None = None) -> TopicInfo:
        self._store(info.name, dump_description(info, uid or uuid.uuid4().hex))
        return self.info(info.name)

    def _store(self, name: str, value: bytes | None) -> None:
        ensure_compacted_topic(self._admin, TOPICS_TOPIC, 1)
        send_records(
            self._producer, [Record(TOPICS_TOPIC, 0, name.encode(), value)], DeliveryReports()
        )
        with self._guard:
            self._cache.pop(name, None)

    def alter(
        self,
        name: str,
        *,
        change: ColumnChange,
        partitions: int | None,
        allow_moving_keys: bool,
        dry_run: bool,
        settings: dict[str, Any],
    ) -> TopicInfo:
        """Alter a topic: check everything, then change Kafka's settings and partitions, then store
        the new description. With `dry_run` it is only checked.
        """
        info, uid = self.describe(name)
        changed = altered_topic(
            info,
            change=change,
            partitions=partitions,
            allow_moving_keys=allow_moving_keys,
            settings=settings,
        )
        if dry_run:
            return changed
        if settings:
            self._admin.configure_topic(name, kafka_config(changed))
        if changed.partitions > info.partitions:
            self._admin.add_partitions(name, changed.partitions)
        return self._store_description(changed, uid)

    def delete(self, name: str) -> None:
        if self._admin.partitions(name) is None:
            raise UnknownTopic(name, self.names())
        self._admin.delete(name)
        if self._description(name) is not None:
            self._store(name, None)
