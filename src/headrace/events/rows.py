"""Events as rows of their topic, and as the small texts that the index keeps. One row is one event.

The topic has one partition, so that a row's offset is its place in the global order. Anybody may read it, pipelines too; only the store writes it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from headrace.events.values import Draft, Recorded
from headrace.log.schema import parse_schema

SCHEMA = "entity STRING, version BIGINT, type STRING, type_version INT, id STRING, subject STRING, data STRING, state BINARY"
ARROW: pa.Schema = parse_schema(SCHEMA)
COLUMNS: list[str] = ARROW.names
_TYPES = [field.type for field in ARROW]
_ONE_NULL = [pa.nulls(1, kind) for kind in _TYPES]
_INT32, _INT64, _OFFSETS = struct.Struct("<i").pack, struct.Struct("<q").pack, struct.Struct("<ii").pack


class Entry(NamedTuple):
    """An event as the index has it: `text` is a JSON array of the rest of a `Recorded`."""

    entity: str
    version: int
    offset: int
    id: str | None
    text: str


def batch(rows: Sequence[tuple[str, int, Draft]]) -> pa.RecordBatch:
    """Rows of (entity, version, event)."""
    if len(rows) == 1:
        return _one(*rows[0])
    events = [event for _, _, event in rows]
    columns: list[list[Any]] = [[entity for entity, _, _ in rows], [version for _, version, _ in rows]]
    columns += [[event.type for event in events], [event.type_version for event in events]]
    columns += [[event.id for event in events], [event.subject for event in events], [event.data for event in events], [event.state for event in events]]
    return pa.RecordBatch.from_arrays([_array(values, kind) for values, kind in zip(columns, _TYPES, strict=True)], schema=ARROW)


def _one(entity: str, version: int, event: Draft) -> pa.RecordBatch:
    """The quick way for one event, as most commands have: its buffers are written by hand."""
    values = (entity, version, event.type, event.type_version, event.id, event.subject, event.data, event.state)
    return pa.RecordBatch.from_arrays([_ONE_NULL[at] if value is None else _one_array(value, _TYPES[at]) for at, value in enumerate(values)], schema=ARROW)


def _one_array(value: str | bytes | int, kind: pa.DataType) -> pa.Array:
    if isinstance(value, int):
        return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer((_INT32 if kind == pa.int32() else _INT64)(value))])
    content = value.encode() if isinstance(value, str) else value
    return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(_OFFSETS(0, len(content))), pa.py_buffer(content)])


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    return pa.array(values, kind) if any(value is not None for value in values) else pa.nulls(len(values), kind)


def entry(entity: str, version: int, event: Draft, offset: int, time_us: int) -> Entry:
    text = _text(offset, time_us, version, event.type, event.type_version, event.id, event.subject, event.data, event.state)
    return Entry(entity, version, offset, event.id, text)


def entries(stored: pa.RecordBatch, offsets: Iterable[int], times_us: Iterable[int]) -> Iterator[Entry]:
    """The same from rows that were read."""
    columns = (stored.column(name).to_pylist() if name in stored.schema.names else [None] * stored.num_rows for name in COLUMNS)
    for offset, time_us, entity, version, kind, kind_version, event_id, subject, data, state in zip(offsets, times_us, *columns, strict=True):
        yield Entry(entity, version, offset, event_id, _text(offset, time_us, version, kind, kind_version, event_id, subject, data, state))


def _text(
    offset: int, time_us: int, version: int, kind: str, kind_version: int, id: str | None, subject: str | None, data: str | None, state: bytes | None
) -> str:
    rest = "" if state is None else "," + json.dumps(state.decode("latin-1"))
    return f"[{offset},{time_us},{version},{json.dumps(kind)},{kind_version},{_quoted(id)},{_quoted(subject)},{data or '{}'}{rest}]"


def _quoted(text: str | None) -> str:
    return "null" if text is None else json.dumps(text)


def recorded(entity: str, texts: Sequence[str]) -> list[Recorded]:
    """All at once: one call of the parser for a thousand events takes a fifth of the time of a thousand calls."""
    return [Recorded(entity, *fields) for fields in json.loads(f"[{','.join(texts)}]")]


def recorded_rows(rows: pa.RecordBatch) -> list[Recorded]:
    """Events of many entities, from rows with `_offset` and `_timestamp`."""
    offsets, times = rows.column("_offset").to_pylist(), rows.column("_timestamp").cast(pa.int64()).to_pylist()
    found = list(entries(rows, offsets, times))
    parsed = json.loads(f"[{','.join(each.text for each in found)}]")
    return [Recorded(each.entity, *fields) for each, fields in zip(found, parsed, strict=True)]
