"""Rows of a topic as Kafka's records, and records as rows: keys, JSON values, headers, tombstones,
control records.

A record is plain to anyone: the value is the row as JSON, a table's deletion is a null value. What
only we need rides in headers whose names begin with `headrace.`: the change type where it is not
the usual one, and the payload of a control record.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Message

from headrace.columnar.columns import (
    CHANGE_TYPE,
    CHANGE_TYPES,
    DELETE,
    HEADERS_COLUMN,
    HEADERS_TYPE,
    TIMESTAMP_TYPE,
    UPDATE,
)
from headrace.errors import BadRows
from headrace.log.kafka.sender import Record, RecordHeaders
from headrace.log.partitioning import key_bytes
from headrace.log.values import TopicInfo, readable_schema
from headrace.types.json_codec import (
    Decoded,
    JsonMismatch,
    decode_rows,
    decode_rows_exactly,
    encode_column,
    parse_json,
)
from headrace.types.schema import declared_schema

# A table's key read back from a record's key bytes: all that a tombstone has. The inverse of
# `headrace.log.partitioning.key_bytes`.


def key_columns(keys: Sequence[bytes | None], info: TopicInfo) -> Decoded:
    """The key's columns: text as it is, another scalar as JSON, several columns as a JSON array. A
    missing key is read as the empty one.
    """
    names = info.key
    schema = pa.schema([info.arrow_schema.field(name) for name in names])
    given = [key or b"" for key in keys]
    if len(names) > 1:
        return decode_rows_exactly(given, schema, parser=lambda key: _named_parts(key, names))
    kind = schema.types[0]
    if pa.types.is_binary(kind):
        return Decoded(pa.RecordBatch.from_arrays([pa.array(given, kind)], schema=schema))
    parser = _text if pa.types.is_string(kind) else parse_json
    return decode_rows_exactly(given, schema, parser=lambda key: {names[0]: parser(key)})


def _text(key: bytes) -> Any:
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise JsonMismatch("its key is not UTF-8") from None


def _named_parts(key: bytes, names: tuple[str, ...]) -> Any:
    parts = parse_json(key)
    if not isinstance(parts, list) or len(parts) != len(names):
        raise JsonMismatch(f"its key is not a JSON array of {', '.join(names)}")
    return dict(zip(names, parts, strict=True))


# Records of others that are taken as they are: those of a topic that was declared with nothing but
# a STRING or BINARY column `value`. Debezium's topics are read so.


WHOLE = "value"
_OURS = b'{"value":'
"""How our own records of such a topic begin."""


def takes_anything(info: TopicInfo) -> bool:
    """A topic that has nothing but a text, or bytes, called `value` takes the records of others as
    they are: connectors', say.
    """
    return (
        not info.is_table
        and info.arrow_schema.names == [WHOLE]
        and (
            pa.types.is_string(kind := info.arrow_schema.field(0).type) or pa.types.is_binary(kind)
        )
    )


def decode_anything(info: TopicInfo, values: Sequence[bytes | None]) -> Decoded:
    """Our own records are JSON with that one name; whatever else came is the value itself, or
    null.
    """
    ours = [
        row for row, value in enumerate(values) if value is not None and value.startswith(_OURS)
    ]
    decoded = decode_rows([values[row] or b"" for row in ours], info.arrow_schema)
    kept = ours if decoded.kept is None else [ours[row] for row in decoded.kept]
    found: list[Any] = list(values)
    for row, value in zip(kept, decoded.batch.column(0).to_pylist(), strict=True):
        found[row] = value
    kind = info.arrow_schema.field(0).type
    misfits = (
        {}
        if pa.types.is_binary(kind)
        else {
            row: "it is no UTF-8"
            for row, value in enumerate(found)
            if isinstance(value, bytes) and not _is_text(value)
        }
    )
    usable = [row for row in range(len(found)) if row not in misfits]
    column = pa.array(
        [
            (
                found[row].decode()
                if isinstance(found[row], bytes) and not pa.types.is_binary(kind)
                else found[row]
            )
            for row in usable
        ],
        kind,
    )
    return Decoded(
        pa.RecordBatch.from_arrays([column], schema=info.arrow_schema),
        usable if misfits else None,
        misfits,
    )


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


RESERVED = "headrace."
CHANGE_HEADER = "headrace.change"
CONTROL_HEADER = "headrace.control"
RECORD_OVERHEAD_BYTES = 512


# Rows to records

KEY, VALUE, CHANGE, HEADERS = "key", "value", "change", "headers"
_NAMED_CHANGES = tuple(change for change in CHANGE_TYPES if change not in {UPDATE, DELETE})


def to_records(
    info: TopicInfo, batch: pa.RecordBatch, partitions: npt.NDArray[np.int32], max_bytes: int
) -> list[Record]:
    """One record a row, in the rows' order."""
    keys, values, headers = record_parts(to_columns(info, batch, max_bytes))
    return list(
        map(Record, itertools.repeat(info.name), partitions.tolist(), keys, values, headers)
    )


def to_columns(info: TopicInfo, batch: pa.RecordBatch, max_bytes: int) -> pa.RecordBatch:
    """One record a row, in columns: key, value, which change a header names, a user's own headers;
    the last two only where there are any.

    A deletion has no value; an upsert needs no word; only the other kinds of changes are named.
    Refuses what Kafka would refuse later, so that nothing of an append is stored.
    """
    rows = batch.select(declared_schema(info.arrow_schema).names)
    keys = key_bytes(rows, info.key) if info.key else pa.nulls(batch.num_rows, pa.binary())
    columns = {KEY: keys, VALUE: encode_column(rows)}
    if info.is_table:
        changes = batch.column(CHANGE_TYPE)
        columns[VALUE] = pc.if_else(
            pc.equal(changes, DELETE), pa.scalar(None, pa.binary()), columns[VALUE]
        )
        columns[CHANGE] = pc.index_in(changes, pa.array(_NAMED_CHANGES))
    if HEADERS_COLUMN in batch.schema.names:
        columns[HEADERS] = batch.column(HEADERS_COLUMN)
    found = pa.RecordBatch.from_pydict(columns)
    _check(info, found, max_bytes)
    return found


def record_parts(
    columns: pa.RecordBatch,
) -> tuple[list[bytes | None], list[bytes | None], Iterable[RecordHeaders | None]]:
    """Keys, values and headers, as Kafka's client wants them."""
    headers: Iterable[RecordHeaders | None] = itertools.repeat(None, columns.num_rows)
    if HEADERS in columns.schema.names:
        headers = [
            [(pair["key"], pair["value"]) for pair in pairs] if pairs else None
            for pairs in columns.column(HEADERS).to_pylist()
        ]
    if CHANGE in columns.schema.names and columns.column(CHANGE).null_count < columns.num_rows:
        headers = [
            [*(own or ()), _CHANGE_HEADERS[change]] if change is not None else own
            for own, change in _with_changes(headers, columns)
        ]
    return columns.column(KEY).to_pylist(), columns.column(VALUE).to_pylist(), headers


def _with_changes(
    headers: Iterable[RecordHeaders | None], columns: pa.RecordBatch
) -> Iterable[tuple[RecordHeaders | None, int | None]]:
    return zip(headers, columns.column(CHANGE).to_pylist(), strict=True)


def _check(info: TopicInfo, columns: pa.RecordBatch, max_bytes: int) -> None:
    if info.compact and columns.column(KEY).null_count:
        row = pc.index(pc.is_null(columns.column(KEY)), True).as_py()
        raise BadRows(
            f"Row {row} for {info.name} has no key, and the topic is compacted by key.",
            fix="give every row a key.",
        )
    sizes = pc.add(
        *(
            pc.binary_length(columns.column(name)).fill_null(0).cast(pa.int64())
            for name in (KEY, VALUE)
        )
    )
    if HEADERS in columns.schema.names:
        headers = columns.column(HEADERS).to_pylist()
        sizes = pc.add(
            sizes,
            pa.array(
                [_headers_size(info, row, pairs) for row, pairs in enumerate(headers)], pa.int64()
            ),
        )
    if columns.num_rows and pc.max(sizes).as_py() + RECORD_OVERHEAD_BYTES > max_bytes:
        row = pc.index(pc.greater(sizes, max_bytes - RECORD_OVERHEAD_BYTES), True).as_py()
        raise BadRows(
            f"Row {row} for {info.name} takes {sizes[row].as_py() + RECORD_OVERHEAD_BYTES:,} bytes"
            f" as JSON, more than the {max_bytes:,} that a record may have.",
            fix=(
                "store large values elsewhere and append where they are, or raise message.max.bytes"
                " here and max.message.bytes of the topic."
            ),
        )


def _headers_size(info: TopicInfo, row: int, pairs: list[dict[str, Any]] | None) -> int:
    for pair in pairs or ():
        if pair["key"].startswith(RESERVED):
            raise BadRows(
                f"Row {row} for {info.name} has a header {pair['key']!r}; names that begin with"
                f" {RESERVED!r} are reserved.",
                fix="rename it.",
            )
    return sum(len(pair["key"]) + len(pair["value"] or b"") for pair in pairs or ())


_CHANGE_HEADERS: list[tuple[str, str | bytes | None]] = [
    (CHANGE_HEADER, change.encode()) for change in _NAMED_CHANGES
]


def control_record(topic: str, partition: int, payload: bytes) -> Record:
    """A record that `read` skips. It has a key of its own, as a compacted topic takes none
    without.
    """
    return Record(
        topic,
        partition,
        b"headrace.control:" + os.urandom(8).hex().encode(),
        None,
        [(CONTROL_HEADER, payload)],
    )


# Records to rows


@dataclass(frozen=True)
class Misfit:
    """A record that does not fit the topic's schema."""

    partition: int
    offset: int
    key: bytes | None
    payload: bytes | None
    reason: str


@dataclass(frozen=True)
class Rows:
    """The rows of some records of one partition, and the records that are none."""

    batch: pa.RecordBatch
    misfits: list[Misfit] = field(default_factory=list)


def control_payload(headers: Any) -> bytes | None:
    """The payload of a control record; None if it is none."""
    return next((value or b"" for name, value in headers or () if name == CONTROL_HEADER), None)


def to_rows(
    info: TopicInfo,
    messages: Sequence[Message],
    *,
    headers: bool = False,
    ignored: Sequence[str] = (),
) -> Rows:
    """Records of one partition as rows with the system's columns, without control records."""
    given = [message.headers() for message in messages]
    if any(given):
        rows = [row for row, pairs in enumerate(given) if control_payload(pairs) is None]
        messages, given = [messages[row] for row in rows], [given[row] for row in rows]
    decoded = (
        _decode_table(info, messages, given, ignored)
        if info.is_table
        else _decode_values(info, messages, ignored)
    )
    misfits = [_misfit(messages[row], reason) for row, reason in decoded.misfits.items()]
    if decoded.kept is not None:
        messages, given = (
            [messages[row] for row in decoded.kept],
            [given[row] for row in decoded.kept],
        )
    columns = [*decoded.batch.columns, *_system_columns(messages)]
    if headers:
        columns.append(pa.array([_shown_headers(pairs) for pairs in given], HEADERS_TYPE))
    return Rows(
        pa.RecordBatch.from_arrays(columns, schema=readable_schema(info, headers=headers)), misfits
    )


def _misfit(message: Message, reason: str) -> Misfit:
    return Misfit(
        message.partition() or 0, message.offset() or 0, message.key(), message.value(), reason
    )


def _shown_headers(pairs: Any) -> list[tuple[str, bytes | None]] | None:
    shown = [(name, value) for name, value in pairs or () if not name.startswith(RESERVED)]
    return shown or None


def _system_columns(messages: Sequence[Message]) -> list[pa.Array]:
    """Of records of one partition."""
    partitions = np.full(len(messages), messages[0].partition() if messages else 0, np.int32)
    offsets = np.array([message.offset() for message in messages], np.int64)
    times_ms = np.array([message.timestamp()[1] for message in messages], np.int64)
    return [pa.array(partitions), pa.array(offsets), pa.array(times_ms * 1000).cast(TIMESTAMP_TYPE)]


def _decode_values(info: TopicInfo, messages: Sequence[Message], ignored: Sequence[str]) -> Decoded:
    values = [message.value() for message in messages]
    if takes_anything(info):
        return decode_anything(info, values)
    if None not in values:
        return decode_rows(
            [value for value in values if value is not None], info.arrow_schema, ignored=ignored
        )
    return _decode_some(
        values,
        [row for row, value in enumerate(values) if value is not None],
        info.arrow_schema,
        ignored,
    )


def _decode_some(
    values: Sequence[bytes | None], rows: list[int], schema: pa.Schema, ignored: Sequence[str]
) -> Decoded:
    """Some of the values; the others, which are null, are misfits."""
    decoded = decode_rows([values[row] or b"" for row in rows], schema, ignored=ignored)
    misfits = {
        row: "it has no value, and the topic is no table"
        for row, value in enumerate(values)
        if value is None
    }
    misfits |= {rows[row]: reason for row, reason in decoded.misfits.items()}
    kept = rows if decoded.kept is None else [rows[row] for row in decoded.kept]
    return Decoded(decoded.batch, kept, dict(sorted(misfits.items())))


def _decode_table(
    info: TopicInfo, messages: Sequence[Message], given: Sequence[Any], ignored: Sequence[str]
) -> Decoded:
    """Changes: those with a value as rows, tombstones from their keys, put back into order."""
    values = [message.value() for message in messages]
    alive = [row for row, value in enumerate(values) if value is not None]
    dead = [row for row, value in enumerate(values) if value is None]
    rows = decode_rows(
        [values[row] or b"" for row in alive], declared_schema(info.arrow_schema), ignored=ignored
    )
    keys = key_columns([messages[row].key() for row in dead], info)
    misfits = {alive[row]: reason for row, reason in rows.misfits.items()} | {
        dead[row]: reason for row, reason in keys.misfits.items()
    }
    kept_alive = alive if rows.kept is None else [alive[row] for row in rows.kept]
    kept_dead = dead if keys.kept is None else [dead[row] for row in keys.kept]
    batch = _merged(
        info,
        rows.batch,
        [_change(given[row]) for row in kept_alive],
        keys.batch,
        kept_alive + kept_dead,
    )
    return Decoded(
        batch, sorted(kept_alive + kept_dead) if misfits else None, dict(sorted(misfits.items()))
    )


def _change(headers: Any) -> str:
    """The kind of a change that has a value: an upsert, unless a header says otherwise."""
    named = next((value for name, value in headers or () if name == CHANGE_HEADER), b"") or b""
    change = named.decode("utf-8", "replace")
    return change if change in CHANGE_TYPES and change != DELETE else UPDATE


def _merged(
    info: TopicInfo,
    rows: pa.RecordBatch,
    changes: list[str],
    keys: pa.RecordBatch,
    order: list[int],
) -> pa.RecordBatch:
    schema = info.arrow_schema
    alive = pa.RecordBatch.from_arrays(
        [*rows.columns, pa.array(changes, pa.string())], schema=schema
    )
    if not keys.num_rows:
        return alive
    count = keys.num_rows
    arrays = [
        keys.column(each.name) if each.name in info.key else pa.nulls(count, each.type)
        for each in schema
    ]
    arrays[schema.get_field_index(CHANGE_TYPE)] = pa.repeat(pa.scalar(DELETE, pa.string()), count)
    both = pa.concat_batches([alive, pa.RecordBatch.from_arrays(arrays, schema=schema)])
    return both.take(pa.array(np.argsort(np.array(order, np.int64))))
