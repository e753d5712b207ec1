"""Events before and after they are stored, what an append expects and returns; and events as rows
of their topic and as entries of the index.

The topic has one partition, so that a row's offset is its position in the global order. Anybody may
read it, pipelines too; only the store writes it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from headrace.durations import from_us
from headrace.errors import BadEvent
from headrace.log.values import AppendResult
from headrace.types.schema import parse_schema

if TYPE_CHECKING:
    from headrace.log.api import Log

NEW = 0
"""Expect that the entity has no events yet."""
ANY = -1
"""Expect nothing: append behind whatever there is."""
EXISTS = -2
"""Expect that the entity has events, whatever its version is."""
MAX_NAME_BYTES = 400
MAX_EVENTS_AN_APPEND = 100_000
_written = json.JSONEncoder(allow_nan=False, separators=(",", ":"), ensure_ascii=False).encode


@dataclass(frozen=True)
class Event:
    """Something that happened, to be appended.

    Attributes:
        type: The kind of event.
        data: JSON: a dict with strings as keys.
        id: Makes a repeated append harmless.
        subject: The person whom it is about: `excise` removes it, and its personal fields are
            encrypted with the subject's key.
        type_version: The version of the form of `data`.
        correlation_id: What all events of one piece of work have in common, such as a request.
        causation_id: The id of the command or event that led to this one.
        metadata: JSON about the event that is not part of it, such as who asked for it.

    """

    type: str
    data: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None
    subject: str | None = None
    type_version: int = 1
    correlation_id: str | None = None
    causation_id: str | None = None
    metadata: Mapping[str, Any] | None = None


class RecordedEvent(NamedTuple):
    """An event as it is stored: of an entity, with a version from 1 on, at an offset that is its
    position in the global order.
    """

    entity: str
    offset: int
    time_us: int
    version: int
    type: str
    type_version: int
    id: str | None
    subject: str | None
    data: dict[str, Any]
    state: str | None = None  # the bytes of another library's event, as Latin-1
    correlation_id: str | None = None
    causation_id: str | None = None
    metadata: dict[str, Any] | None = None

    @property
    def category(self) -> str:
        """The kind of its entity: what is before the first hyphen of its name."""
        return self.entity.partition("-")[0]

    @property
    def time(self) -> datetime:
        return from_us(self.time_us)


@dataclass(frozen=True)
class Change:
    """Events for one entity in an append over several, with the version it must have."""

    entity: str
    events: Sequence[Event]
    expected: int = ANY


@dataclass(frozen=True)
class EventAppendResult:
    """Where events were stored. `str(position)` can be given to a served view as `at_least`, which
    then shows them.
    """

    position: AppendResult
    versions: Mapping[str, int]
    offsets: range
    duplicate: bool = False


class Draft(NamedTuple):
    """An event that was checked, with its data as text."""

    type: str
    type_version: int
    id: str | None
    subject: str | None
    data: str | None
    state: bytes | None = None
    correlation_id: str | None = None
    causation_id: str | None = None
    metadata: str | None = None

    @property
    def has_metadata(self) -> bool:
        return (self.correlation_id, self.causation_id, self.metadata) != (None, None, None)


def check_entity(entity: Any) -> str:
    if (
        not isinstance(entity, str)
        or not entity
        or not entity.isprintable()
        or len(entity.encode("utf-8", "replace")) > MAX_NAME_BYTES
    ):
        raise BadEvent(
            f"{entity!r} cannot name an entity.",
            fix=(
                f"use a text of 1 to {MAX_NAME_BYTES} bytes, such as 'account-17', without control"
                " characters."
            ),
        )
    return entity


def check_expected(expected: Any, entity: str) -> int:
    if not isinstance(expected, int) or isinstance(expected, bool) or expected < EXISTS:
        raise BadEvent(
            f"The expected version of {entity!r} is {expected!r}.",
            fix="give the version that you loaded, events.NEW, events.EXISTS or events.ANY.",
        )
    return expected


def draft(event: Any, entity: str) -> Draft:
    """Check an event. Raises BadEvent if it cannot be stored."""
    if not isinstance(event, Event):
        raise BadEvent(
            f"A {type(event).__name__} was given as an event of {entity!r}.",
            fix="give events.Event('Opened', {...}), or let a decider's codec make it.",
        )
    for what, value in (
        ("type", event.type),
        ("id", event.id),
        ("subject", event.subject),
        ("correlation_id", event.correlation_id),
        ("causation_id", event.causation_id),
    ):
        optional = what != "type" and value is None
        if not optional and (
            not isinstance(value, str)
            or not value
            or not value.isprintable()
            or len(value.encode("utf-8", "replace")) > MAX_NAME_BYTES
        ):
            raise BadEvent(
                f"The {what} of an event of {entity!r} is {value!r}.",
                fix=f"use a text of 1 to {MAX_NAME_BYTES} bytes without control characters.",
            )
    number: object = event.type_version
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number < 1 << 31:
        raise BadEvent(
            f"The type_version of {event.type!r} is {event.type_version!r}.", fix="count from 1."
        )
    return Draft(
        type=event.type,
        type_version=event.type_version,
        id=event.id,
        subject=event.subject,
        data=_text(event, entity, "data", event.data),
        correlation_id=event.correlation_id,
        causation_id=event.causation_id,
        metadata=(
            None if event.metadata is None else _text(event, entity, "metadata", event.metadata)
        ),
    )


def _text(event: Event, entity: str, what: str, content: Mapping[str, Any]) -> str:
    try:
        text = _written(content)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadEvent(
            f"The {what} of the event {event.type!r} of {entity!r} cannot be written as JSON:"
            f" {error}.",
            fix="use texts, numbers, booleans, None, lists and dicts; or a dataclass with a codec.",
        ) from error
    if not text.startswith("{"):
        raise BadEvent(
            f"The {what} of the event {event.type!r} of {entity!r} is a {type(content).__name__}.",
            fix="give a dict.",
        )
    return text


# Rows and index entries

FIRST_SCHEMA = (
    "entity STRING, version BIGINT, type STRING, type_version INT, id STRING, subject STRING, data"
    " STRING, state BINARY"
)
"""The columns of stores that have no metadata yet; they get them with the first event that has."""
METADATA_SCHEMA = "correlation_id STRING, causation_id STRING, metadata STRING"
SCHEMA = f"{FIRST_SCHEMA}, {METADATA_SCHEMA}"
FIRST_ARROW: pa.Schema = parse_schema(FIRST_SCHEMA)
ARROW: pa.Schema = parse_schema(SCHEMA)
COLUMNS: list[str] = ARROW.names
_TYPES = [field.type for field in ARROW]


def is_event_schema(schema: pa.Schema) -> bool:
    """Whether a topic has the columns of an event store."""
    return bool(schema.equals(ARROW) or schema.equals(FIRST_ARROW))


def fit_copy(rows: pa.Table, target: Log, topic: str) -> pa.Table:
    """Return a store's rows with the columns of the topic that they are copied to. Either may have
    no columns for metadata; the topic gets them when rows have values in them.
    """
    names = target.topic(topic).arrow_schema.names
    if any(
        name in rows.column_names and rows[name].null_count < rows.num_rows
        for name in ARROW.names[len(FIRST_ARROW) :]
        if name not in names
    ):
        target.alter_topic(topic, add_columns=METADATA_SCHEMA)
        names = ARROW.names
    for field_ in ARROW:
        if field_.name in names and field_.name not in rows.column_names:
            rows = rows.append_column(field_, pa.nulls(rows.num_rows, field_.type))
    return rows.select([name for name in COLUMNS if name in names])


_ONE_NULL = [pa.nulls(1, kind) for kind in _TYPES]
_INT32, _INT64, _OFFSETS = (
    struct.Struct("<i").pack,
    struct.Struct("<q").pack,
    struct.Struct("<ii").pack,
)


_ID_AT = COLUMNS.index("id") - COLUMNS.index("type")


class Entry(NamedTuple):
    """An event in the index. `text` is a JSON array of the other fields of a `RecordedEvent`."""

    entity: str
    version: int
    offset: int
    id: str | None
    text: str


def batch(rows: Sequence[tuple[str, int, Draft]], schema: pa.Schema = ARROW) -> pa.RecordBatch:
    """Return rows of (entity, version, event) as a batch, with the columns of a store's schema."""
    if len(rows) == 1:
        return _one(*rows[0], schema)
    events = [event for _, _, event in rows]
    columns: list[list[Any]] = [
        [entity for entity, _, _ in rows],
        [version for _, version, _ in rows],
    ]
    columns += [[event.type for event in events], [event.type_version for event in events]]
    columns += [
        [event.id for event in events],
        [event.subject for event in events],
        [event.data for event in events],
        [event.state for event in events],
        [event.correlation_id for event in events],
        [event.causation_id for event in events],
        [event.metadata for event in events],
    ]
    arrays = [_array(values, kind) for values, kind in zip(columns, _TYPES, strict=True)]
    return pa.RecordBatch.from_arrays(arrays[: len(schema)], schema=schema)


def _one(entity: str, version: int, event: Draft, schema: pa.Schema) -> pa.RecordBatch:
    """Return one row as a batch. Most commands have one event, so its buffers are written directly,
    which is faster.
    """
    values = (
        entity,
        version,
        event.type,
        event.type_version,
        event.id,
        event.subject,
        event.data,
        event.state,
        event.correlation_id,
        event.causation_id,
        event.metadata,
    )
    return pa.RecordBatch.from_arrays(
        [
            _ONE_NULL[at] if value is None else _one_array(value, _TYPES[at])
            for at, value in enumerate(values[: len(schema)])
        ],
        schema=schema,
    )


def _one_array(value: str | bytes | int, kind: pa.DataType) -> pa.Array:
    if isinstance(value, int):
        return pa.Array.from_buffers(
            kind, 1, [None, pa.py_buffer((_INT32 if kind == pa.int32() else _INT64)(value))]
        )
    content = value.encode() if isinstance(value, str) else value
    return pa.Array.from_buffers(
        kind, 1, [None, pa.py_buffer(_OFFSETS(0, len(content))), pa.py_buffer(content)]
    )


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    return (
        pa.array(values, kind)
        if any(value is not None for value in values)
        else pa.nulls(len(values), kind)
    )


def entry(entity: str, version: int, event: Draft, offset: int, time_us: int) -> Entry:
    text = _row_text(
        offset,
        time_us,
        version,
        event.type,
        event.type_version,
        event.id,
        event.subject,
        event.data,
        event.state,
        event.correlation_id,
        event.causation_id,
        event.metadata,
    )
    return Entry(entity, version, offset, event.id, text)


def entries(
    stored: pa.RecordBatch, offsets: Iterable[int], times_us: Iterable[int]
) -> Iterator[Entry]:
    """Yield the index entries of rows that were read."""
    columns = (
        stored.column(name).to_pylist() if name in stored.schema.names else [None] * stored.num_rows
        for name in COLUMNS
    )
    for offset, time_us, entity, version, *fields in zip(offsets, times_us, *columns, strict=True):
        event_id = fields[_ID_AT]
        yield Entry(entity, version, offset, event_id, _row_text(offset, time_us, version, *fields))


def _row_text(
    offset: int,
    time_us: int,
    version: int,
    kind: str,
    kind_version: int,
    id: str | None,
    subject: str | None,
    data: str | None,
    state: bytes | None,
    correlation_id: str | None,
    causation_id: str | None,
    metadata: str | None,
) -> str:
    rest = "" if state is None else "," + json.dumps(state.decode("latin-1"))
    if correlation_id or causation_id or metadata:
        rest = (
            f"{rest or ',null'},{_quoted(correlation_id)},{_quoted(causation_id)},"
            f"{metadata or 'null'}"
        )
    return (
        f"[{offset},{time_us},{version},{json.dumps(kind)},{kind_version},{_quoted(id)},"
        f"{_quoted(subject)},{data or '{}'}{rest}]"
    )


def _quoted(text: str | None) -> str:
    return "null" if text is None else json.dumps(text)


def parse_events(entity: str, texts: Sequence[str]) -> list[RecordedEvent]:
    """Parse the texts of an entity's events, with one call of the parser: for a thousand events
    that takes a fifth of the time of a thousand calls.
    """
    return [RecordedEvent(entity, *fields) for fields in json.loads(f"[{','.join(texts)}]")]


def events_from_rows(rows: pa.RecordBatch) -> list[RecordedEvent]:
    """Return the events of rows with `_offset` and `_timestamp`, of any entities."""
    offsets = rows.column("_offset").to_pylist()
    times_us = rows.column("_timestamp").cast(pa.int64()).to_pylist()
    row_entries = list(entries(rows, offsets, times_us))
    parsed = json.loads(f"[{','.join(entry.text for entry in row_entries)}]")
    return [
        RecordedEvent(entry.entity, *fields)
        for entry, fields in zip(row_entries, parsed, strict=True)
    ]
