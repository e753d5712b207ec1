"""The values that go into and come out of a log, on every backend: results, offsets, and what is
known of topics, groups and damage.

The interface that uses them is `headrace.log.api`. At the end: the rule for producers' sequence
numbers, and the names of the topics behind `ask`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from headrace.columnar.columns import HEADERS_COLUMN, HEADERS_TYPE, SYSTEM_FIELDS
from headrace.errors import InputError, UnknownColumn
from headrace.types.schema_history import NO_HISTORY, SchemaHistory

if TYPE_CHECKING:
    import pandas as pd

Rows: TypeAlias = (
    "Mapping[str, Any] | Iterable[Mapping[str, Any]] | pa.Table | pa.RecordBatch | pd.DataFrame"
)
"""Rows to append: a dict, an iterable of dicts, an Arrow table or batch, or a pandas frame."""

Headers = Sequence[Sequence[tuple[str, bytes | None]] | Mapping[str, bytes | None] | None]
"""Headers to append: one entry per row, as pairs or a mapping of name to bytes; None for none."""

Duration = str | timedelta
"""A length of time: text such as `"30 seconds"`, or a timedelta."""

Partitioner = Callable[[pa.RecordBatch, int], Any]
"""A user's partitioner: called with rows and the number of partitions, it returns one partition
number per row.
"""

TOPIC_METADATA = b"headrace.topic"
"""The key of the schema metadata in which a consumer's batch names its topic."""


@dataclass(frozen=True)
class TopicInfo:
    """A topic's schema, key and settings, as `Log.topic` returns them.

    Example:
        ```python
        info = log.topic("orders")
        info.schema  # "id BIGINT, amount DOUBLE"
        ```
    """

    name: str
    """The topic's name."""
    schema: str
    """The declared columns as DDL."""
    arrow_schema: pa.Schema = field(compare=False)
    """The stored columns; for a table they include `_change_type`."""
    key: tuple[str, ...] = ()
    """The key's columns; empty without a key."""
    partitions: int = 1
    """The number of partitions."""
    is_table: bool = False
    """Whether the rows are changes of a table."""
    retention_us: int | None = None
    """How long rows stay, in microseconds; None for ever."""
    retention_bytes: int | None = None
    """How many bytes of a partition stay; None for all."""
    compact: bool = False
    """Whether only the newest row of each key stays."""
    history_us: int | None = None
    """How long superseded values of a table stay, in microseconds; None for ever."""
    tombstone_us: int = 24 * 3600 * 1_000_000
    """How long compaction keeps deletions, in microseconds."""
    segment_bytes: int = 64 << 20
    """The size at which a new segment file begins."""
    segment_us: int = 7 * 24 * 3600 * 1_000_000
    """The age at which a new segment file begins, in microseconds."""
    compression: str = "none"
    """One of "none", "lz4" and "zstd"."""
    strict: bool = False
    """Whether a record of another program with a field that the schema does not have becomes a dead
    letter. Otherwise the field is ignored. Matters on Kafka alone.
    """
    format: str = "json"
    """How the values of records are written, on Kafka alone: "json", or by the schemas of a
    registry: "avro", "protobuf" or "json-schema".
    """
    registry: str = ""
    """The address of the schema registry, unless the format is "json"."""
    schema_history: SchemaHistory = NO_HISTORY
    """What has become of the columns since the topic was created."""
    id: str = field(default="", compare=False)
    """Distinguishes the topic from an earlier, deleted one of the same name."""

    @property
    def columns(self) -> list[str]:
        """The names of the stored columns."""
        return list(self.arrow_schema.names)


@dataclass(frozen=True)
class OffsetRange:
    """Offsets from `start` up to, not including, `stop`."""

    start: int
    """The first offset."""
    stop: int
    """The offset behind the last one."""

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class AppendResult:
    """The offsets that an append or a transaction got.

    `str(result)` is a compact form such as `orders:0:18,orders:1:20` (topic, partition, end). A
    view server that is given it waits until its view contains the append.

    Example:
        ```python
        result = producer.append(rows)
        result.partitions()[0]  # OffsetRange(start=0, stop=18)
        ```
    """

    offsets: Mapping[str, Mapping[int, OffsetRange]]
    """Topic -> partition -> the offsets of the rows."""
    commit: int | None = None
    """The commit's number in the log's global order; None on Kafka."""
    duplicate: bool = False
    """Whether the sequence number was stored before; the offsets are those of the first time."""

    def partitions(self, topic: str | None = None) -> Mapping[int, OffsetRange]:
        """The offsets in one topic.

        Args:
            topic: The topic; None if there is only one.

        Returns:
            Partition -> the offsets of the rows.

        Raises:
            ValueError: The result has several topics, and none is named.

        Example:
            ```python
            tx.commit().partitions("invoices")
            ```
        """
        if topic is None:
            (topic,) = self.offsets or ("",)
        return self.offsets.get(topic, {})

    def __str__(self) -> str:
        return ",".join(
            f"{topic}:{partition}:{offsets.stop}"
            for topic, partitions in self.offsets.items()
            for partition, offsets in partitions.items()
        )


class Offsets(dict[str, dict[int, int]]):
    """Topic -> partition -> next offset.

    Offsets taken from a consumer also carry the member they came from, so that committing them is
    refused once the member has lost the partition.

    Args:
        offsets: Topic -> partition -> next offset.
        member: The group member the offsets come from; None for offsets computed elsewhere.
        handle: The consumer the offsets come from, if it is in this process.
        epoch: Tells positions from before a rebalance that fenced the member from later ones.

    Example:
        ```python
        consumer.commit(Offsets({"orders": {0: 120}}))
        ```
    """

    def __init__(
        self,
        offsets: Mapping[str, Mapping[int, int]] = {},
        *,
        member: str | None = None,
        handle: Any = None,
        epoch: int | None = None,
    ) -> None:
        super().__init__({topic: dict(partitions) for topic, partitions in offsets.items()})
        self.member = member
        self.handle = handle
        self.epoch = epoch

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process gets the offsets and the member, without the consumer."""
        return _load_offsets, (dict(self), self.member)


def _load_offsets(offsets: dict[str, dict[int, int]], member: str | None) -> Offsets:
    return Offsets(offsets, member=member)


@dataclass(frozen=True)
class ControlRecord:
    """A control record: it takes one offset, and `Log.read` skips it."""

    partition: int
    """The record's partition."""
    offset: int
    """The record's offset."""
    timestamp: datetime
    """When the record was appended."""
    payload: bytes
    """The record's content."""


@dataclass(frozen=True)
class PartitionLag:
    """How far a group is behind in one partition."""

    group: str
    """The group."""
    topic: str
    """The topic."""
    partition: int
    """The partition."""
    committed: int | None
    """The group's committed offset; None if it has committed none."""
    end: int
    """The partition's end offset."""
    rows: int
    """The number of rows not yet read."""
    seconds: float
    """The age of the next row to read; 0 if there is none."""


@dataclass(frozen=True)
class MemberInfo:
    """A live member of a consumer group."""

    member: str
    """The member's id."""
    partitions: tuple[tuple[str, int], ...]
    """The (topic, partition) pairs that the member owns."""
    host: str = ""
    """The host the member runs on."""
    seconds_since_heartbeat: float = 0.0
    """Seconds since the member's last sign of life."""


@dataclass(frozen=True)
class GroupInfo:
    """A consumer group or a queue's group, as `Log.group` returns it."""

    name: str
    """The group's name."""
    kind: str
    """Either "group" (a consumer group) or "queue" (a queue's group)."""
    generation: int
    """Increases with every rebalance; 0 for a queue."""
    members: tuple[MemberInfo, ...]
    """The members; empty for a queue."""
    committed: Mapping[str, Mapping[int, int]]
    """Topic -> partition -> next offset. For a queue: the oldest message that is not done."""


@dataclass(frozen=True)
class PeekedMessage:
    """A message of a queue that was looked at and not leased."""

    topic: str
    """The topic the message is in."""
    partition: int
    """The message's partition."""
    offset: int
    """The message's offset in its partition."""
    timestamp: datetime
    """When the message was appended."""
    deliveries: int
    """How many times the message has been delivered."""
    status: str
    """One of "ready", "leased" (delivered, not settled) and "delayed" (returned with a delay)."""
    row: dict[str, Any]
    """The message's columns."""
    headers: list[tuple[str, bytes | None]]
    """The message's headers."""


@dataclass(frozen=True)
class QueueStats:
    """How many messages of one partition a queue's group has before it."""

    topic: str
    """The topic."""
    group: str
    """The group."""
    partition: int
    """The partition."""
    ready: int
    """Messages that the next receiver gets."""
    leased: int
    """Messages that were delivered, are not settled, and whose visibility has not ended."""
    delayed: int
    """Messages that were returned with a delay that has not passed."""
    oldest: int | None
    """The offset of the oldest message that is not done; None if all are."""


@dataclass(frozen=True)
class BackupResult:
    """What a backup has done. `commit` is the commit as of which it is, `files` and `copied_bytes`
    what was copied this time, `total_bytes` the size of the whole.
    """

    commit: int
    files: int
    copied_bytes: int
    total_bytes: int
    seconds: float


@dataclass(frozen=True)
class Finding:
    """One piece of damage that `Log.verify` found."""

    kind: str
    """One of "corrupt", "missing" and "stale" (a cache that will be built again)."""
    file: str
    """The damaged file."""
    position: int
    """The byte in the file."""
    message: str
    """What is wrong."""
    topic: str = ""
    """The topic, if it is known."""
    partition: int = -1
    """The partition, if it is known."""
    offset: int = -1
    """The first damaged offset, if it is known."""


@dataclass(frozen=True)
class TopicStats:
    """The size of a topic, as `Log.stats` returns it."""

    name: str
    """The topic's name."""
    partitions: int
    """The number of partitions."""
    rows: int
    """The number of rows. On Kafka, whose brokers do not count them: of offsets between earliest
    and end, which may be more; -1 if a partition cannot be reached.
    """
    bytes: int
    """The size of the stored segments; -1 on Kafka."""
    segments: int
    """The number of segment files; -1 on Kafka."""
    earliest: Mapping[int, int]
    """Partition -> earliest offset."""
    end: Mapping[int, int]
    """Partition -> end offset."""


@dataclass(frozen=True)
class Staged:
    """Internal: rows that a task (of Spark, say) has staged for a transaction of its driver to
    adopt. Small and picklable.
    """

    topic: str
    """The topic the rows are for."""
    partitions: Mapping[int, tuple[str, int]]
    """Partition -> (file, rows)."""
    rows: int
    """The number of rows."""


def readable_schema(info: TopicInfo, *, headers: bool) -> pa.Schema:
    """Internal: all columns that a reader of a topic can select."""
    fields = [*info.arrow_schema, *SYSTEM_FIELDS]
    if headers:
        fields.append(pa.field(HEADERS_COLUMN, HEADERS_TYPE))
    return pa.schema(fields)


def selected_columns(
    info: TopicInfo, columns: Sequence[str] | None, *, headers: bool
) -> tuple[pa.Schema, list[str]]:
    """Internal: the schema of a read, and the present names of its columns. A column may be
    selected by a former name, and is called by it then: readers go on after it was renamed.
    """
    readable = readable_schema(info, headers=headers)
    names = list(readable.names) if columns is None else list(columns)
    history = info.schema_history
    present = names if history is NO_HISTORY else [history.present_name(name) for name in names]
    for name in present:
        if name not in readable.names:
            raise UnknownColumn(name, readable.names, where=f"The topic {info.name!r}")
    fields = [readable.field(now).with_name(name) for name, now in zip(names, present, strict=True)]
    return pa.schema(fields), present


# Sequence numbers of idempotent producers

MAX_SEQUENCE = 1 << 62
"""Internal: the largest sequence number. It is stored in 64 bits with a sign, and a producer must
be able to count on from it.
"""


def check_sequence(sequence: Any, *, topic: str, id: str | None) -> None:
    """Internal: refuse what cannot be a sequence number. None leaves the choice to the producer."""
    if sequence is None:
        return
    if id is None:
        raise InputError(
            "A sequence number needs a producer with an id.",
            fix=f"open it with log.producer({topic!r}, id='...').",
        )
    is_int = isinstance(sequence, int) and not isinstance(sequence, bool)
    if not is_int or not 0 <= sequence <= MAX_SEQUENCE:
        raise InputError(
            f"A sequence number is an int from 0 to {MAX_SEQUENCE}, not {sequence!r}.",
            fix="use producer.last_sequence + 1.",
        )


# Topics behind `ask`: the plan creates them, the server appends questions and follows answers

ASK_ID = "ask_id"
"""Internal: the column with a question's id."""
FOUND = "found"
"""Internal: the column that says whether a question's row exists."""
_QUESTIONS_PREFIX = "ask."
_ANSWERS_SUFFIX = ".answers"


def questions_topic(name: str) -> str:
    """Internal: the topic of a named question's requests."""
    return f"{_QUESTIONS_PREFIX}{name}"


def answers_topic(name: str) -> str:
    """Internal: the topic of a named question's responses."""
    return f"{_QUESTIONS_PREFIX}{name}{_ANSWERS_SUFFIX}"


CALL_ID = "_call"
"""The column of recorded answers with the idempotency key of the call; null in a row that only
moves event time.
"""
CALL_CODE = "_code"
"""The column with the fingerprint or version of the function that was called."""
ANSWERED_AT = "_answered_at"
"""The column with the time at which the service answered. A row that was answered from the cache
has the time of the call.
"""
COMPLETE_TO = "_complete_to"
"""The column with the event time up to which every row has its answer recorded."""
_CALLS_PREFIX = "__calls."
_REQUESTS_SUFFIX = ".requests"


def calls_topic(pipeline: str, call: str) -> str:
    """Internal: the topic with the recorded answers of a call."""
    return f"{_CALLS_PREFIX}{pipeline}.{call}"


def requests_topic(pipeline: str, call: str) -> str:
    """Internal: the topic with the rows that wait for an answer of a call."""
    return f"{calls_topic(pipeline, call)}{_REQUESTS_SUFFIX}"


def question_names(topics: list[str]) -> list[str]:
    """Internal: the questions that can be asked, among all topics of a log."""
    answers = {
        topic
        for topic in topics
        if topic.startswith(_QUESTIONS_PREFIX) and topic.endswith(_ANSWERS_SUFFIX)
    }
    return sorted(
        topic[len(_QUESTIONS_PREFIX) : -len(_ANSWERS_SUFFIX)]
        for topic in answers
        if topic[: -len(_ANSWERS_SUFFIX)] in topics
    )
