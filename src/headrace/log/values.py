"""The small values a log speaks in: what goes in, what comes out, and the names of the columns it
adds. Part of `api`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from headrace.columnar.columns import HEADERS_COLUMN, HEADERS_TYPE, SYSTEM_FIELDS
from headrace.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

Rows: TypeAlias = (
    "Mapping[str, Any] | Iterable[Mapping[str, Any]] | pa.Table | pa.RecordBatch | pd.DataFrame"
)
"""What can be appended: dicts, an Arrow table or batch, a pandas frame."""

Headers = Sequence[Sequence[tuple[str, bytes | None]] | Mapping[str, bytes | None] | None]
"""One entry per row: that row's headers."""

Duration = str | timedelta
"""`"30 seconds"`, or a timedelta."""

Partitioner = Callable[[pa.RecordBatch, int], Any]
"""A user's choice of partition: (rows, number of partitions) -> one partition number per row."""
TOPIC_METADATA = b"headrace.topic"
"""Where the schema of a consumer's batch says which topic its rows are of."""


@dataclass(frozen=True)
class TopicInfo:
    """A topic as declared. `schema` is the DDL; `arrow_schema` has the stored columns (for a table,
    `_change_type` too).
    """

    name: str
    schema: str
    arrow_schema: pa.Schema = field(compare=False)
    key: tuple[str, ...] = ()
    partitions: int = 1
    is_table: bool = False
    retention_us: int | None = None
    retention_bytes: int | None = None
    compact: bool = False
    history_us: int | None = None
    tombstone_us: int = 24 * 3600 * 1_000_000
    segment_bytes: int = 64 << 20
    segment_us: int = 7 * 24 * 3600 * 1_000_000
    compression: str = "none"
    id: str = field(default="", compare=False)
    """Tells it from an earlier topic of the same name, which was deleted."""

    @property
    def columns(self) -> list[str]:
        return list(self.arrow_schema.names)


def readable_schema(info: TopicInfo, *, headers: bool) -> pa.Schema:
    """The columns a reader can ask for."""
    fields = [*info.arrow_schema, *SYSTEM_FIELDS]
    if headers:
        fields.append(pa.field(HEADERS_COLUMN, HEADERS_TYPE))
    return pa.schema(fields)


@dataclass(frozen=True)
class OffsetRange:
    """Offsets from `start` up to, not including, `stop`."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class AppendResult:
    """Where an append went: for each topic and partition the offsets it got. `commit` is its number
    in the log's global order.
    """

    offsets: Mapping[str, Mapping[int, OffsetRange]]
    commit: int | None = None
    duplicate: bool = False

    def partitions(self, topic: str | None = None) -> Mapping[int, OffsetRange]:
        if topic is None:
            (topic,) = self.offsets or ("",)
        return self.offsets.get(topic, {})

    def __str__(self) -> str:
        """`orders:0:18,orders:1:20`: where each partition ends behind it. A server that is given it
        waits until a view contains it.
        """
        return ",".join(
            f"{topic}:{partition}:{span.stop}"
            for topic, parts in self.offsets.items()
            for partition, span in parts.items()
        )


class Offsets(dict[str, dict[int, int]]):
    """Topic -> partition -> next offset. Taken from a consumer it also carries who it was, so that
    a commit can be fenced.
    """

    def __init__(
        self,
        offsets: Mapping[str, Mapping[int, int]] = {},
        *,
        member: str | None = None,
        handle: Any = None,
    ) -> None:
        super().__init__({topic: dict(parts) for topic, parts in offsets.items()})
        self.member = member
        self.handle = handle


@dataclass(frozen=True)
class Control:
    """A control batch: it takes one offset, and `read` skips it."""

    partition: int
    offset: int
    timestamp: datetime
    payload: bytes


@dataclass(frozen=True)
class PartitionLag:
    """How far a group is behind in one partition: in rows, and in seconds since its next row was
    appended.
    """

    group: str
    topic: str
    partition: int
    committed: int | None
    end: int
    rows: int
    seconds: float


@dataclass(frozen=True)
class MemberInfo:
    member: str
    partitions: tuple[tuple[str, int], ...]
    host: str = ""
    seconds_since_heartbeat: float = 0.0


@dataclass(frozen=True)
class GroupInfo:
    """A consumer group: who reads what (`kind` "group"), or a queue's group (`kind` "queue")."""

    name: str
    kind: str
    generation: int
    members: tuple[MemberInfo, ...]
    committed: Mapping[str, Mapping[int, int]]


@dataclass(frozen=True)
class Finding:
    """Something `verify` found: `kind` is "corrupt", "missing", or "stale" (a cache that will be
    built again).
    """

    kind: str
    file: str
    position: int
    message: str
    topic: str = ""
    partition: int = -1
    offset: int = -1


@dataclass(frozen=True)
class TopicStats:
    name: str
    partitions: int
    rows: int
    bytes: int
    segments: int
    earliest: Mapping[int, int]
    end: Mapping[int, int]


@dataclass(frozen=True)
class Staged:
    """Rows put aside by a task (of Spark, say), to be made part of a transaction by its driver.
    Small, picklable.
    """

    topic: str
    partitions: Mapping[int, tuple[str, int]]  # partition -> (file, rows)
    rows: int


# The numbers that a producer with an id gives its appends, so that a repeat is known. The same rule
# on every backend.


LARGEST = 1 << 62  # stored in 64 bits, with a sign; a producer must be able to count on from here


def check_sequence(sequence: Any, *, topic: str, id: str | None) -> None:
    """Refuse what cannot be the number of an append; None leaves the choice to the producer."""
    if sequence is None:
        return
    if id is None:
        raise InputError(
            "A sequence number needs a producer with an id.",
            fix=f"open it with log.producer({topic!r}, id='...').",
        )
    if not isinstance(sequence, int) or isinstance(sequence, bool) or not 0 <= sequence <= LARGEST:
        raise InputError(
            f"A sequence number is an int from 0 to {LARGEST}, not {sequence!r}.",
            fix="use producer.last_sequence + 1.",
        )


# What questions and answers are called in the log: the plan makes these topics, the server appends
# to one and follows the other.


ASK_ID, FOUND = "ask_id", "found"
_PREFIX, _ANSWERS = "ask.", ".answers"


def questions_topic(name: str) -> str:
    return f"{_PREFIX}{name}"


def answers_topic(name: str) -> str:
    return f"{_PREFIX}{name}{_ANSWERS}"


def names(topics: list[str]) -> list[str]:
    """The questions that can be asked, among all topics."""
    answers = {topic for topic in topics if topic.startswith(_PREFIX) and topic.endswith(_ANSWERS)}
    return sorted(
        topic[len(_PREFIX) : -len(_ANSWERS)]
        for topic in answers
        if topic[: -len(_ANSWERS)] in topics
    )
