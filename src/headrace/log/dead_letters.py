"""Dead letters: rows or bytes that could not be used, with where and why. Everywhere the same, on
every backend.

They stand in a topic `<name>.dead`, of the topic, step, sink or gateway that refused them; they can
be listed, and replayed after a fix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from headrace.columnar.buffers import pieces
from headrace.columnar.columns import OFFSET_COLUMN, PARTITION_COLUMN
from headrace.errors import HeadraceError, InputError
from headrace.log.api import Log
from headrace.log.values import TopicInfo
from headrace.types.json_codec import decode, encode, encoded, with_iso_years

SUFFIX = ".dead"
_SCHEMA = (
    "place STRING, reason STRING, `at` TIMESTAMP, source_partition INT, source_offset BIGINT, tick"
    " BIGINT, row STRING, payload BINARY, key BINARY"
)
ASIDE = pa.schema(
    [
        ("row", pa.string()),
        ("tick", pa.int64()),
        ("reason", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
    ]
)
"""Letters that wait in a file for their commit: what is known of each when it is put aside."""

_MAX_ROWS_A_READ = 100_000


@dataclass(frozen=True)
class DeadLetter:
    """`row` as JSON text (see `row_to_text`), or `payload` as the bytes that came."""

    place: str
    reason: str
    partition: int | None = None
    offset: int | None = None
    tick: int | None = None
    row: str | None = None
    payload: bytes | None = None
    key: bytes | None = None


@dataclass(frozen=True)
class DeadTopic:
    name: str
    of: str
    rows: int


@dataclass(frozen=True)
class ReplayResult:
    """How many letters went back into their topic, and why the others did not."""

    replayed: int
    failed: list[tuple[int, int, str]] = field(
        default_factory=list
    )  # (partition, offset in the dead topic, reason)


def dead_name(topic: str) -> str:
    return topic + SUFFIX


def ensure_topic(log: Log, topic: str) -> str:
    """The dead-letter topic of a topic, made if it is missing."""
    name = dead_name(topic)
    if name not in log.topics():
        log.create_topic(name, _SCHEMA, exist_ok=True)
    return name


def letters_to_rows(letters: Iterable[DeadLetter]) -> list[dict[str, Any]]:
    at = datetime.now(UTC)
    return [
        {
            "place": letter.place,
            "reason": letter.reason,
            "at": at,
            "source_partition": letter.partition,
            "source_offset": letter.offset,
            "tick": letter.tick,
            "row": letter.row,
            "payload": letter.payload,
            "key": letter.key,
        }
        for letter in letters
    ]


def aside_to_rows(place: str, letters: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of a dead-letter topic from letters as `ASIDE` has them."""
    count = letters.num_rows
    row, tick, reason, partition, offset = (letters.column(name) for name in ASIDE.names)
    at = pa.repeat(pa.scalar(datetime.now(UTC), pa.timestamp("us", "UTC")), count)
    nothing = pa.nulls(count, pa.binary())
    return pa.record_batch(
        {
            "place": pa.repeat(pa.scalar(place), count),
            "reason": reason,
            "at": at,
            "source_partition": partition,
            "source_offset": offset,
            "tick": tick,
            "row": row,
            "payload": nothing,
            "key": nothing,
        }
    )


def divert(
    log: Log, topic: str, letters: Sequence[DeadLetter] | Sequence[Mapping[str, Any]]
) -> None:
    """Put letters into the dead-letter topic of a topic."""
    if letters:
        entries = [
            letter if isinstance(letter, DeadLetter) else DeadLetter(**letter) for letter in letters
        ]
        with log.producer(ensure_topic(log, topic)) as producer:
            producer.append(letters_to_rows(entries))


def topics(log: Log) -> list[DeadTopic]:
    """Every dead-letter topic with how many letters it holds."""
    found = []
    for name in log.topics():
        if name.endswith(SUFFIX):
            start, end = log.start_offsets(name), log.end_offsets(name)
            found.append(DeadTopic(name, name[: -len(SUFFIX)], sum(end[p] - start[p] for p in end)))
    return found


def letters(
    log: Log, topic: str, start: int | None = None, limit: int | None = None
) -> list[dict[str, Any]]:
    """The letters of a topic (named with or without `.dead`), oldest first."""
    name = topic if topic.endswith(SUFFIX) else dead_name(topic)
    rows: list[dict[str, Any]] = []
    for batch in log.read(name, start=start):
        rows += batch.to_pylist()
        if limit is not None and len(rows) >= limit:
            return rows[:limit]
        if len(rows) > _MAX_ROWS_A_READ:
            raise InputError(
                f"{name} has more than {_MAX_ROWS_A_READ} letters.", fix="name a limit."
            )
    return rows


def replay(log: Log, topic: str, offsets: Iterable[int] | None = None) -> ReplayResult:
    """Append letters to their topic again, each once: a letter that was replayed before is left
    out.
    """
    name = topic if topic.endswith(SUFFIX) else dead_name(topic)
    of = name[: -len(SUFFIX)]
    info = log.topic(_to_replay_into(log, name, of))
    wanted = None if offsets is None else set(offsets)
    replayed, failed = 0, []
    for letter in (letter for batch in log.read(name) for letter in batch.to_pylist()):
        at = (letter[PARTITION_COLUMN], letter[OFFSET_COLUMN])
        if wanted is not None and at[1] not in wanted:
            continue
        try:
            replayed += _replay_one(log, info, letter, f"{at[0]}.{at[1]}")
        except HeadraceError as error:
            failed.append((*at, error.message))
    return ReplayResult(replayed, failed)


def _to_replay_into(log: Log, name: str, of: str) -> str:
    known = log.topics()
    if name in known and of not in known:
        raise InputError(
            f"The letters in {name!r} are not of a topic, so there is none to put them back into.",
            fix=(
                "a sink's: write the rows to its topic again, or `headrace sync … --start-over`; a"
                " step's: replay its inputs."
            ),
        )
    return of


def _replay_one(log: Log, info: TopicInfo, letter: Mapping[str, Any], identity: str) -> int:
    """A note, set in the same transaction, remembers that it was done."""
    note = f"replayed.{info.name}{SUFFIX}.{identity}"
    if log.note(note) is not None:
        return 0
    text = (
        letter["row"]
        if letter["row"] is not None
        else (letter["payload"] or b"").decode(errors="replace")
    )
    batch = row_from_text(text, info.arrow_schema, info.name)
    with log.transaction(f"replay.{info.name}") as tx:
        tx.append(info.name, batch)
        tx.set_note(note, "done", expect=None)
    return 1


def row_from_text(text: str, schema: pa.Schema, topic: str) -> pa.RecordBatch:
    """A row from its JSON text, by the topic's schema."""
    decoded = decode([text.encode()], schema)
    if decoded.misfits:
        raise InputError(
            f"The letter still does not fit {topic!r}: {decoded.misfits[0]}",
            fix="mend the topic or the row, and replay it again.",
        )
    return decoded.batch


def row_to_text(batch: pa.RecordBatch) -> list[str]:
    """Each row's JSON text, as `row_from_text` reads it."""
    return [value.decode() for value in encode(batch)]


def letter_texts(rows: pa.RecordBatch) -> pa.ChunkedArray:
    """The rows of letters as JSON texts. A time in a year that JSON does not know is null: a letter
    that could not be written would stop everything.
    """
    return rows_to_texts(
        pa.Table.from_arrays(
            [with_iso_years(column) for column in rows.columns], names=rows.schema.names
        )
    )


def rows_to_texts(rows: pa.Table) -> pa.ChunkedArray:
    """The same of many rows, as a column."""
    return pa.chunked_array(
        [encoded(batch).cast(pa.string()) for batch in pieces(rows)], pa.string()
    )
