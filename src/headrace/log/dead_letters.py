"""Dead letters: rows or bytes that could not be used, with where and why.

The dead letters of a topic, step, sink or gateway NAME are rows of the topic `NAME.dead`, on every
backend. They can be listed and, after a fix, replayed:

    orders            {"id": 7, "amount": "many"}          refused by step `totals`
    totals.dead       place   reason           source_offset  row
                      totals  not a number     1041           {"id":7,"amount":"many"}

Who writes them: queues (a message that was delivered too often), Kafka's reader (foreign records),
`headrace.engine.dead_letters` (steps with `errors="divert"`), sinks, captures and gateways.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from headrace.columnar.buffers import split_table
from headrace.columnar.columns import OFFSET_COLUMN, PARTITION_COLUMN
from headrace.errors import HeadraceError, InputError
from headrace.log.api import Log
from headrace.log.values import TopicInfo, requests_topic
from headrace.types.json_codec import decode_rows, encode_column, encode_rows, with_iso_years

DEAD_SUFFIX = ".dead"
"""What the name of a dead-letter topic ends in."""
_SCHEMA = (
    "place STRING, reason STRING, `at` TIMESTAMP, source_partition INT, source_offset BIGINT, tick"
    " BIGINT, row STRING, payload BINARY, key BINARY"
)
PENDING_SCHEMA = pa.schema(
    [
        ("row", pa.string()),
        ("tick", pa.int64()),
        ("reason", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
    ]
)
"""Internal: the columns of a task's file of dead letters that wait for their commit."""

_MAX_ROWS_PER_READ = 100_000


@dataclass(frozen=True)
class DeadLetter:
    """A row or record that could not be used."""

    place: str
    """What refused it, such as `step totals` or `queue mailers`."""
    reason: str
    """Why it could not be used."""
    partition: int | None = None
    """The partition it came from."""
    offset: int | None = None
    """The offset it came from."""
    tick: int | None = None
    """The tick in which a step refused it."""
    row: str | None = None
    """The row as JSON text, if it could be decoded."""
    payload: bytes | None = None
    """The bytes as they came, if they could not be decoded."""
    key: bytes | None = None
    """The record's key as it came."""


@dataclass(frozen=True)
class DeadTopic:
    """A topic of dead letters."""

    name: str
    """The topic's name, which ends in `.dead`."""
    of: str
    """What the dead letters are of: a topic, step, sink or gateway."""
    rows: int
    """How many dead letters there are."""


@dataclass(frozen=True)
class ReplayResult:
    """What became of the dead letters of a replay."""

    replayed: int
    """How many were appended to their topic again."""
    failed: list[tuple[int, int, str]] = field(default_factory=list)
    """(partition, offset in the dead-letter topic, reason) of those that failed again."""


# Reading and replaying


def dead_topic_name(topic: str) -> str:
    """The name of a topic's dead-letter topic.

    Args:
        topic: A topic, step, sink or gateway.

    Returns:
        The name with `.dead` appended.

    Example:
        ```python
        dead_topic_name("orders")  # "orders.dead"
        ```
    """
    return topic + DEAD_SUFFIX


def dead_topics(log: Log) -> list[DeadTopic]:
    """List the dead-letter topics of a log.

    Args:
        log: An open log.

    Returns:
        Every dead-letter topic, with the number of its dead letters.

    Example:
        ```python
        for topic in dead_topics(log):
            print(topic.of, topic.rows)
        ```
    """
    dead = []
    for name, info in log.topic_infos().items():
        if name.endswith(DEAD_SUFFIX) and info is not None:
            start, end = log.start_offsets(name), log.end_offsets(name)
            rows = sum(end[partition] - start[partition] for partition in end)
            dead.append(DeadTopic(name=name, of=name[: -len(DEAD_SUFFIX)], rows=rows))
    return dead


def read_dead_letters(
    log: Log, topic: str, start: int | None = None, limit: int | None = None
) -> list[dict[str, Any]]:
    """Read the dead letters of a topic, oldest first.

    Args:
        log: An open log.
        topic: The topic, with or without `.dead`.
        start: The first offset in the dead-letter topic; None for the earliest.
        limit: The most dead letters to return.

    Returns:
        One dict per dead letter, with the fields of `DeadLetter` as columns.

    Raises:
        UnknownTopic: There are no dead letters of that topic.
        InputError: There are more than 100,000, and no limit is given.

    Example:
        ```python
        for letter in read_dead_letters(log, "orders", limit=10):
            print(letter["reason"], letter["row"])
        ```
    """
    name = topic if topic.endswith(DEAD_SUFFIX) else dead_topic_name(topic)
    rows: list[dict[str, Any]] = []
    for batch in log.read(name, start=start):
        rows += batch.to_pylist()
        if limit is not None and len(rows) >= limit:
            return rows[:limit]
        if len(rows) > _MAX_ROWS_PER_READ:
            raise InputError(
                f"{name} has more than {_MAX_ROWS_PER_READ} dead letters.", fix="pass limit=…."
            )
    return rows


def replay(log: Log, topic: str, offsets: Iterable[int] | None = None) -> ReplayResult:
    """Append dead letters to their topic again, each once: one replayed before is left out. Those
    of a recorded call are asked about again.

    Args:
        log: An open log.
        topic: The topic, with or without `.dead`.
        offsets: Offsets in the dead-letter topic; None for all.

    Returns:
        How many were appended, and which failed again.

    Raises:
        UnknownTopic: There are no dead letters of that topic.
        InputError: The dead letters are of a step or sink, so there is no topic to append to.

    Example:
        ```python
        result = replay(log, "orders")
        print(result.replayed, len(result.failed))
        ```
    """
    name = topic if topic.endswith(DEAD_SUFFIX) else dead_topic_name(topic)
    source = name[: -len(DEAD_SUFFIX)]
    topics = log.topics()
    if name in topics and source not in topics:
        source = _requests_of_call(log, name) or source
    if name in topics and source not in topics:
        raise InputError(
            f"The dead letters in {name!r} are not of a topic, so there is none to append them to.",
            fix=(
                "a sink's: write the rows to its topic again, or `headrace sync … --start-over`; a"
                " step's: replay its inputs."
            ),
        )
    info = log.topic(source)
    wanted = None if offsets is None else set(offsets)
    replayed, failed = 0, []
    for batch in log.read(name):
        for letter in batch.to_pylist():
            partition, offset = letter[PARTITION_COLUMN], letter[OFFSET_COLUMN]
            if wanted is not None and offset not in wanted:
                continue
            try:
                replayed += _replay_letter(log, info, letter, f"{name}.{partition}.{offset}")
            except HeadraceError as error:
                failed.append((partition, offset, error.message))
    return ReplayResult(replayed, failed)


def _requests_of_call(log: Log, name: str) -> str | None:
    """The topic of the rows that wait for an answer, if the dead letters are of a recorded call."""
    for batch in log.read(name, columns=["place"]):
        for place in batch.column("place").to_pylist():
            kind, _, call = str(place).partition(" ")
            pipeline, _, called = call.partition(".")
            if kind == "call":
                return requests_topic(pipeline, called)
    return None


def _replay_letter(log: Log, info: TopicInfo, letter: Mapping[str, Any], identity: str) -> int:
    """Append one dead letter; 0 if it was replayed before. A note of the same transaction marks it
    as replayed.
    """
    note = f"replayed.{identity}"
    if log.note(note) is not None:
        return 0
    if letter["row"] is not None:
        text = letter["row"]
    else:
        text = (letter["payload"] or b"").decode(errors="replace")
    batch = row_from_json(text, info)
    with log.transaction(f"replay.{info.name}") as tx:
        tx.append(info.name, batch)
        tx.set_note(note, "done", expect=None)
    return 1


# Writing


def ensure_dead_topic(log: Log, topic: str) -> str:
    """Internal: create the dead-letter topic of a topic if it is missing; return its name."""
    name = dead_topic_name(topic)
    if name not in log.topics():
        log.create_topic(name, _SCHEMA, exist_ok=True)
    return name


def divert(
    log: Log, topic: str, letters: Sequence[DeadLetter] | Sequence[Mapping[str, Any]]
) -> None:
    """Append dead letters to the dead-letter topic of a topic, which is created if it is missing.

    Args:
        log: An open log.
        topic: The topic, step, sink or gateway that refused them.
        letters: The dead letters, or mappings with the fields of `DeadLetter`.

    Raises:
        ReadOnlyLog: The log cannot be written.

    Example:
        ```python
        divert(log, "orders", [DeadLetter(place="import", reason="no id", row='{"id":null}')])
        ```
    """
    if letters:
        dead_letters = [
            letter if isinstance(letter, DeadLetter) else DeadLetter(**letter) for letter in letters
        ]
        with log.producer(ensure_dead_topic(log, topic)) as producer:
            producer.append(dead_letters_to_rows(dead_letters))


def dead_letters_to_rows(letters: Iterable[DeadLetter]) -> list[dict[str, Any]]:
    """Internal: dead letters as rows of a dead-letter topic."""
    now = datetime.now(UTC)
    return [
        {
            "place": letter.place,
            "reason": letter.reason,
            "at": now,
            "source_partition": letter.partition,
            "source_offset": letter.offset,
            "tick": letter.tick,
            "row": letter.row,
            "payload": letter.payload,
            "key": letter.key,
        }
        for letter in letters
    ]


def pending_to_rows(place: str, letters: pa.RecordBatch) -> pa.RecordBatch:
    """Internal: dead letters of `PENDING_SCHEMA` as rows of a dead-letter topic."""
    count = letters.num_rows
    now = pa.scalar(datetime.now(UTC), pa.timestamp("us", "UTC"))
    no_bytes = pa.nulls(count, pa.binary())
    return pa.record_batch(
        {
            "place": pa.repeat(pa.scalar(place), count),
            "reason": letters.column("reason"),
            "at": pa.repeat(now, count),
            "source_partition": letters.column("partition"),
            "source_offset": letters.column("offset"),
            "tick": letters.column("tick"),
            "row": letters.column("row"),
            "payload": no_bytes,
            "key": no_bytes,
        }
    )


# Rows as JSON text


def row_from_json(text: str, info: TopicInfo) -> pa.RecordBatch:
    """Internal: a row from its JSON text, by the topic's schema or an earlier one."""
    decoded = decode_rows([text.encode()], info.arrow_schema, history=info.schema_history)
    if decoded.misfits:
        raise InputError(
            f"The dead letter still does not fit {info.name!r}: {decoded.misfits[0]}",
            fix="correct the topic or the row, and replay it again.",
        )
    return decoded.batch


def rows_to_json(batch: pa.RecordBatch) -> list[str]:
    """Internal: the JSON text of each row, as `row_from_json` reads it."""
    return [value.decode() for value in encode_rows(batch)]


def rows_to_json_column(rows: pa.Table) -> pa.ChunkedArray:
    """Internal: the JSON text of each row of a table, as a column."""
    return pa.chunked_array(
        [encode_column(batch).cast(pa.string()) for batch in split_table(rows)], pa.string()
    )


def dead_letter_json(rows: pa.RecordBatch) -> pa.ChunkedArray:
    """Internal: the JSON text of each row of dead letters, as a column.

    A time in a year that JSON's dates cannot express becomes null: a dead letter that could not be
    written would stop the pipeline.
    """
    columns = [with_iso_years(column) for column in rows.columns]
    return rows_to_json_column(pa.Table.from_arrays(columns, names=rows.schema.names))
