"""The topics of a cluster and their descriptions: schema, key, kind, retention. Kafka has no place
for a schema, so descriptions are stored in the compacted topic `__headrace.topics`.

A topic that was created by another tool is listed too; it can be used once it has been given a
schema. Its settings are Kafka's: they are reported as the brokers have them, whoever set them, and
a change sets only what it names.

A topic that another tool deleted and created again has another id in Kafka. It keeps its schema,
but gets an id of its own, by which producers and pipelines notice.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, replace
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
COMPRESSIONS = {"none": "producer", "lz4": "lz4", "zstd": "zstd"}
_STORED_FIELDS = {
    field.name: field.default
    for field in fields(TopicInfo)
    if field.name not in {"name", "schema", "arrow_schema", "schema_history", "partitions", "id"}
}
_FIELDS_OF_VERSION_2 = ("strict", "format", "registry")
"""Fields that a program of version 1 does not know, and would read wrongly without. It does not
know the history of columns that have changed either.
"""
TOPICS_TOPIC = "__headrace.topics"
INTERNAL_PREFIX = "__headrace."
CACHE_SECONDS = 5.0

TopicDescription = tuple[TopicInfo, str]
"""A topic and its unique id."""


# Descriptions as stored, and settings as Kafka has them


def dump_description(info: TopicInfo, uid: str, kafka_id: str | None) -> bytes:
    """The stored description of a topic. `uid` distinguishes it from an earlier topic of the same
    name, and `kafka_id` is Kafka's own id of it.
    """
    history = {"schema_history": info.schema_history.dump()} if info.schema_history else {}
    needs_version_2 = bool(history) or any(
        getattr(info, name) != _STORED_FIELDS[name] for name in _FIELDS_OF_VERSION_2
    )
    stored = {
        "version": 2 if needs_version_2 else 1,
        "uid": uid,
        "kafka_id": kafka_id,
        "ddl": info.schema,
        **{name: getattr(info, name) for name in _STORED_FIELDS},
        **history,
    }
    return json.dumps(stored, ensure_ascii=False).encode()


def load_description(
    name: str, value: bytes, partitions: int, kafka_id: str | None
) -> tuple[TopicInfo, str]:
    """The inverse of `dump_description`. The number of partitions is not stored; the cluster knows
    it. If Kafka's id of the topic is not the one that was described, the topic gets another uid.
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
        rest = {
            field: stored[field] if default is MISSING else stored.get(field, default)
            for field, default in _STORED_FIELDS.items()
            if field != "key"
        }
        history = SchemaHistory.load(stored.get("schema_history"))
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptionError(
            f"What is stored about the topic {name!r} cannot be read: {error!r}.",
            fix="declare it again: create_topic(..., exist_ok=True).",
        ) from error
    described_id = stored.get("kafka_id")
    if described_id is not None and kafka_id not in {None, described_id}:
        uid = f"{uid}.{kafka_id}"
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
        "compression.type": COMPRESSIONS.get(info.compression, info.compression),
    }


def with_kafka_settings(info: TopicInfo, config: Mapping[str, str]) -> TopicInfo:
    """A topic with the settings that Kafka has, where they are not those of its description: the
    topic belongs to somebody else, or somebody has changed it.
    """
    described = kafka_config(info)

    def differs(*names: str) -> bool:
        return any(config.get(name, described[name]) != described[name] for name in names)

    changes: dict[str, Any] = {}
    if differs("cleanup.policy", "min.compaction.lag.ms", "retention.ms", "retention.bytes"):
        policy = {each.strip() for each in config["cleanup.policy"].split(",")}
        lag_us = int(config["min.compaction.lag.ms"]) * 1000
        is_compacted, deletes = "compact" in policy, "delete" in policy
        changes |= {
            "compact": is_compacted and (info.compact or not info.is_table),
            "history_us": None,
            "retention_us": _us(config["retention.ms"]) if deletes else None,
            "retention_bytes": _size(config["retention.bytes"]) if deletes else None,
        }
        if is_compacted and (lag_us or (info.is_table and not info.compact)):
            changes["history_us"] = lag_us
    if differs("delete.retention.ms"):
        changes["tombstone_us"] = int(config["delete.retention.ms"]) * 1000
    if differs("segment.bytes"):
        changes["segment_bytes"] = int(config["segment.bytes"])
    if differs("segment.ms"):
        changes["segment_us"] = int(config["segment.ms"]) * 1000
    if differs("compression.type"):
        names = {kafka: ours for ours, kafka in COMPRESSIONS.items()} | {"uncompressed": "none"}
        kind = config["compression.type"]
        changes["compression"] = names.get(kind, kind)
    return replace(info, **changes) if changes else info


def _us(ms: str) -> int | None:
    return None if int(ms) < 0 else int(ms) * 1000


def _size(count: str) -> int | None:
    return None if int(count) < 0 else int(count)


def _ms(us: int | None) -> str:
    return "-1" if us is None else str(us // 1000)


class TopicStore:
    """The topics of a cluster. Thread-safe."""

    def __init__(self, admin: ClusterAdmin, producer: Producer) -> None:
        self._admin, self._producer = admin, producer
        self._descriptions = CompactedPartition(admin, TOPICS_TOPIC, 0)
        self._guard = Lock()
        self._cache: dict[str, tuple[float, TopicDescription]] = {}
        self._counts: dict[str, tuple[float, int]] = {}
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

    def partition_count(self, name: str) -> int:
        """The number of partitions of a topic, also of one without a schema."""
        count = self._admin.partitions(name)
        if count is None:
            raise UnknownTopic(name, self.names())
        return count

    def cached_partition_count(self, name: str) -> int:
        """The number of partitions of a topic, at most a few seconds old."""
        known = self._counts.get(name)
        if known is None or time.monotonic() - known[0] >= CACHE_SECONDS:
            known = (time.monotonic(), self.partition_count(name))
            with self._guard:
                self._counts[name] = known
        return known[1]

    def _description(self, name: str) -> bytes | None:
        return self._descriptions.get(name.encode()) if self._has_descriptions() else None

    def _has_descriptions(self) -> bool:
        """Whether a topic was ever described on this cluster."""
        self._exists = self._exists or self._admin.partitions(TOPICS_TOPIC) is not None
        return self._exists

    def info(self, name: str) -> TopicInfo:
        """A topic with the settings that Kafka has now."""
        return self._described(name)[0]

    def _described(self, name: str) -> TopicDescription:
        kafka_id, settings = self._admin.topic_id_and_settings(name)
        info, uid = self._load(name, kafka_id)
        return with_kafka_settings(info, settings), uid

    def for_reading(self, name: str) -> TopicInfo:
        """A topic's schema and key as described now, without the requests for its id and settings,
        which may be out of date. For the path of every read.
        """
        return self._load(name, None)[0]

    def infos(self) -> dict[str, TopicInfo | None]:
        """Every topic with its description; None for a topic of others that has no schema, or whose
        description this version cannot read. Asks the cluster a few times, however many topics
        there are.
        """
        counts = self._admin.partition_counts()
        stored = self._descriptions.values() if self._has_descriptions() else {}
        names = self.names()
        described = [name for name in names if name.encode() in stored and name in counts]
        settings = self._admin.topic_settings(described)
        infos: dict[str, TopicInfo | None] = dict.fromkeys(names)
        for name in described:
            with suppress(CorruptionError, NewerFormat):
                info, _ = load_description(name, stored[name.encode()], counts[name], None)
                infos[name] = with_kafka_settings(info, settings.get(name, {}))
        return infos

    def describe(self, name: str) -> TopicDescription:
        """The newest description of a topic. Its settings may be out of date."""
        description = self._load(name, self._admin.topic_id(name))
        with self._guard:
            self._cache[name] = (time.monotonic(), description)
        return description

    def _load(self, name: str, kafka_id: str | None) -> TopicDescription:
        partitions = self._admin.partitions(name)
        stored = self._description(name)
        if partitions is None:
            raise UnknownTopic(name, self.names())
        if stored is None:
            raise BadSchema(
                f"The topic {name!r} was not created by Headrace and has no schema.",
                fix=(
                    f"give it one: create_topic({name!r}, schema='...', exist_ok=True), or headrace"
                    f" topic create {name} --schema '...' --if-missing."
                ),
            )
        return load_description(name, stored, partitions, kafka_id)

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
        if stored is None:
            if exist_ok:
                return self._store_description(replace(info, partitions=partitions))
            return check_existing_topic(info, info, exist_ok=False)
        kafka_id = self._admin.topic_id(info.name)
        existing, uid = load_description(info.name, stored, partitions, kafka_id)
        was_replaced = uid != load_description(info.name, stored, partitions, None)[1]
        if was_replaced and exist_ok:  # the description is of a topic that is gone
            return self._store_description(replace(info, partitions=partitions), uid)
        check_existing_topic(existing, info, exist_ok=exist_ok)
        return self.info(info.name)

    def _store_description(self, info: TopicInfo, uid: str | None = None) -> TopicInfo:
        kafka_id = self._admin.topic_id(info.name)
        self._store(info.name, dump_description(info, uid or uuid.uuid4().hex, kafka_id))
        return self.info(info.name)

    def _store(self, name: str, value: bytes | None) -> None:
        ensure_compacted_topic(self._admin, TOPICS_TOPIC, 1)
        send_records(
            self._producer, [Record(TOPICS_TOPIC, 0, name.encode(), value)], DeliveryReports()
        )
        with self._guard:
            self._cache.pop(name, None)
            self._counts.pop(name, None)

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
        """Alter a topic: check everything, then change Kafka's partitions and those of its settings
        that were named, then store the new description. With `dry_run` it is only checked.
        """
        info, uid = self._described(name)
        changed = altered_topic(
            info,
            change=change,
            partitions=partitions,
            allow_moving_keys=allow_moving_keys,
            settings=settings,
        )
        if dry_run:
            return changed
        before, after = kafka_config(info), kafka_config(changed)
        new_settings = {key: value for key, value in after.items() if value != before[key]}
        if new_settings:
            self._admin.configure_topic(name, new_settings)
        if changed.partitions > info.partitions:
            self._admin.add_partitions(name, changed.partitions)
        return self._store_description(changed, uid)

    def delete(self, name: str) -> None:
        self.partition_count(name)
        self._admin.delete(name)
        with self._guard:
            self._counts.pop(name, None)
        if self._description(name) is not None:
            self._store(name, None)
