"""The topics of a cluster, and what is known about them: schema, key, kind. Kafka knows nothing of
these, so they are kept in a compacted topic.

A topic that somebody else created is listed too; it can be used once it has been given a schema.
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
from headrace.log.kafka.cluster import Broker
from headrace.log.kafka.errors import code, translated
from headrace.log.kafka.notes import CompactedPartition, ensure_topic
from headrace.log.kafka.sender import Delivery, Record, send
from headrace.log.topic_config import altered_topic, check_existing_topic, stored_schema
from headrace.log.values import TopicInfo
from headrace.types.schema import parse_schema

# A topic's settings in the two forms that Kafka needs: what is stored beside the topic, and what
# Kafka calls it.


VERSION = 1
COMPRESSIONS = {"none": "producer", "lz4": "lz4", "zstd": "zstd"}
_STORED = [
    each.name
    for each in fields(TopicInfo)
    if each.name not in {"name", "schema", "arrow_schema", "partitions", "id"}
]


def dump(info: TopicInfo, uid: str) -> bytes:
    """What is stored about a topic. `uid` tells it from an earlier topic of the same name."""
    stored = {
        "version": VERSION,
        "uid": uid,
        "ddl": info.schema,
        **{name: getattr(info, name) for name in _STORED},
    }
    return json.dumps(stored, ensure_ascii=False).encode()


def load(name: str, value: bytes, partitions: int) -> tuple[TopicInfo, str]:
    """The inverse of `dump`; the number of partitions is the cluster's to say."""
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
        rest = {field: stored[field] for field in _STORED if field != "key"}
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
            **rest,
        ),
        uid,
    )


def kafka_config(info: TopicInfo) -> dict[str, str]:
    """The same in Kafka's words. Rows are stamped when they are appended, as the embedded log does;
    `retention_bytes` is for each partition.
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


TOPICS_TOPIC = "__headrace.topics"
OURS = "__headrace."
TRUSTED_SECONDS = 5.0

Described = tuple[TopicInfo, str]
"""A topic and its unique id."""


class TopicStore:
    """All topics. Safe for several threads."""

    def __init__(self, broker: Broker, producer: Producer) -> None:
        self._broker, self._producer = broker, producer
        self._stored = CompactedPartition(broker, TOPICS_TOPIC, 0)
        self._guard = Lock()
        self._recent: dict[str, tuple[float, Described]] = {}
        self._prepared = False

    # Looking

    def names(self) -> list[str]:
        """What a user created, and what others did; without the internals of Kafka and of this
        log.
        """
        described = self._descriptions()
        return sorted(
            name for name in self._broker.partition_counts() if self._is_shown(name, described)
        )

    def _is_shown(self, name: str, described: dict[bytes, bytes]) -> bool:
        return not name.startswith(OURS) and (
            not name.startswith("__") or name.encode() in described
        )

    def _descriptions(self) -> dict[bytes, bytes]:
        return self._stored.values() if self._is_prepared() else {}

    def _description(self, name: str) -> bytes | None:
        return self._stored.get(name.encode()) if self._is_prepared() else None

    def _is_prepared(self) -> bool:
        """Whether anybody has described a topic on this cluster yet."""
        self._prepared = self._prepared or self._broker.partitions(TOPICS_TOPIC) is not None
        return self._prepared

    def info(self, name: str) -> TopicInfo:
        return self.described(name)[0]

    def described(self, name: str) -> Described:
        """A topic as it is now."""
        partitions = self._broker.partitions(name)
        stored = self._description(name)
        if partitions is None:
            raise UnknownTopic(name, self.names())
        if stored is None:
            raise BadSchema(
                f"The topic {name!r} was not created by Headrace and has no schema.",
                fix=f"give it one: create_topic({name!r}, schema='...', exist_ok=True).",
            )
        found = load(name, stored, partitions)
        with self._guard:
            self._recent[name] = (time.monotonic(), found)
        return found

    def recent(self, name: str) -> Described:
        """A topic as it was a few seconds ago at most: for the way of every append."""
        known = self._recent.get(name)
        if known is not None and time.monotonic() - known[0] < TRUSTED_SECONDS:
            return known[1]
        return self.described(name)

    # Changing

    def create(self, info: TopicInfo, *, exist_ok: bool) -> TopicInfo:
        """1. create the topic in Kafka, which decides between two creators; 2. describe it. A crash
        between the two leaves a topic without a schema.
        """
        try:
            self._broker.create(info.name, info.partitions, kafka_config(info))
        except KafkaException as error:
            if code(error) != KafkaError.TOPIC_ALREADY_EXISTS:
                raise translated(error, f"create the topic {info.name!r}") from error
            return self._existing(info, exist_ok=exist_ok)
        return self._describe(info)

    def _existing(self, info: TopicInfo, *, exist_ok: bool) -> TopicInfo:
        """A topic that is there but has no schema is given one, if that was asked for."""
        known = self._description(info.name)
        partitions = self._broker.partitions(info.name) or info.partitions
        if known is None and exist_ok:
            return self._describe(replace(info, partitions=partitions))
        found = info if known is None else load(info.name, known, partitions)[0]
        return check_existing_topic(found, info, exist_ok=exist_ok)

    def _describe(self, info: TopicInfo, uid: str | None = None) -> TopicInfo:
        self._store(info.name, dump(info, uid or uuid.uuid4().hex))
        return self.info(info.name)

    def _store(self, name: str, value: bytes | None) -> None:
        ensure_topic(self._broker, TOPICS_TOPIC, 1)
        send(self._producer, [Record(TOPICS_TOPIC, 0, name.encode(), value)], Delivery())
        with self._guard:
            self._recent.pop(name, None)

    def alter(
        self,
        name: str,
        *,
        columns: str | None,
        partitions: int | None,
        allow_moving_keys: bool,
        settings: dict[str, Any],
    ) -> TopicInfo:
        """1. check everything; 2. change Kafka's settings and partitions; 3. store the new
        description.
        """
        info, uid = self.described(name)
        changed = altered_topic(
            info,
            columns=columns,
            partitions=partitions,
            allow_moving_keys=allow_moving_keys,
            settings=settings,
        )
        if settings:
            self._broker.configure_topic(name, kafka_config(changed))
        if changed.partitions > info.partitions:
            self._broker.add_partitions(name, changed.partitions)
        return self._describe(changed, uid)

    def delete(self, name: str) -> None:
        if self._broker.partitions(name) is None:
            raise UnknownTopic(name, self.names())
        self._broker.delete(name)
        if self._description(name) is not None:
            self._store(name, None)
