"""Rows of a topic as Kafka records, and records as rows: keys, JSON values, headers, tombstones and
control records.

Any Kafka client can read the records: the value is the row as JSON, and a deletion from a table is
a tombstone. What only Headrace needs is in headers whose names begin with `headrace.`: the change
type where it is not the usual one, and the payload of a control record.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
    UPDATE_POSTIMAGE,
)
from headrace.errors import BadRows
from headrace.log.kafka.sender import Record, RecordHeaders
from headrace.log.partitioning import key_bytes
from headrace.log.values import TopicInfo, readable_schema
from headrace.types.json_codec import (
    Decoded,
    JsonMismatch,
    UnknownFields,
    decode_rows,
    decode_rows_exactly,
    encode_column,
    parse_json,
)
from headrace.types.schema import declared_schema

if TYPE_CHECKING:
    from headrace.log.kafka.registry import RegistryCodec

# Keys of tombstones


def decode_key_columns(keys: Sequence[bytes | None], info: TopicInfo) -> Decoded:
    """The key columns of a table from record keys, the inverse of `partitioning.key_bytes`: a text
    is unchanged, another scalar is JSON, several columns are a JSON array. A missing key is read as
    the empty one.
    """
    names = info.key
    schema = pa.schema([info.arrow_schema.field(name) for name in names])
    present = [key or b"" for key in keys]
    if len(names) > 1:
        return decode_rows_exactly(present, schema, parser=lambda key: _key_object(key, names))
    kind = schema.types[0]
    if pa.types.is_binary(kind):
        return Decoded(pa.RecordBatch.from_arrays([pa.array(present, kind)], schema=schema))
    parser = _text_key if pa.types.is_string(kind) else parse_json
    return decode_rows_exactly(present, schema, parser=lambda key: {names[0]: parser(key)})


def _text_key(key: bytes) -> Any:
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise JsonMismatch("its key is not UTF-8") from None


def _key_object(key: bytes, names: tuple[str, ...]) -> Any:
    values = parse_json(key)
    if not isinstance(values, list) or len(values) != len(names):
        raise JsonMismatch(f"its key is not a JSON array of {', '.join(names)}")
    return dict(zip(names, values, strict=True))


# Raw topics: records of other producers, such as Debezium, that are read unparsed

RAW_COLUMN = "value"
_OWN_PREFIX = b'{"value":'
"""The first bytes of Headrace's own records of a raw topic."""


def is_raw_topic(info: TopicInfo) -> bool:
    """Whether a topic takes records of any form: its only column is a STRING or BINARY called
    `value`.
    """
    if info.is_table or info.arrow_schema.names != [RAW_COLUMN] or info.format != "json":
        return False
    kind = info.arrow_schema.field(0).type
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def decode_raw_values(info: TopicInfo, values: Sequence[bytes | None]) -> Decoded:
    """The rows of records of a raw topic. Headrace's own records are JSON objects with the one name
    `value`; any other record is the value itself, or null.
    """
    own = [
        row
        for row, value in enumerate(values)
        if value is not None and value.startswith(_OWN_PREFIX)
    ]
    decoded = decode_rows([values[row] or b"" for row in own], info.arrow_schema)
    fitting = own if decoded.rows is None else [own[row] for row in decoded.rows]
    contents: list[Any] = list(values)
    for row, value in zip(fitting, decoded.batch.column(0).to_pylist(), strict=True):
        contents[row] = value
    kind = info.arrow_schema.field(0).type
    misfits: dict[int, str] = {}
    if pa.types.is_string(kind):
        for row, value in enumerate(contents):
            if isinstance(value, bytes):
                try:
                    contents[row] = value.decode()
                except UnicodeDecodeError:
                    misfits[row] = "it is no UTF-8"
    rows = [row for row in range(len(contents)) if row not in misfits]
    column = pa.array([contents[row] for row in rows], kind)
    return Decoded(
        pa.RecordBatch.from_arrays([column], schema=info.arrow_schema),
        rows if misfits else None,
        misfits,
    )


# Rows to records

RESERVED_PREFIX = "headrace."
CHANGE_HEADER = "headrace.change"
CONTROL_HEADER = "headrace.control"
RECORD_OVERHEAD_BYTES = 512
KEY, VALUE, CHANGE, HEADERS = "key", "value", "change", "headers"
_NAMED_CHANGES = tuple(
    change for change in CHANGE_TYPES if change not in {UPDATE_POSTIMAGE, DELETE}
)
_CHANGE_HEADERS: list[tuple[str, str | bytes | None]] = [
    (CHANGE_HEADER, change.encode()) for change in _NAMED_CHANGES
]


def to_records(
    info: TopicInfo, batch: pa.RecordBatch, partitions: npt.NDArray[np.int32], max_bytes: int
) -> list[Record]:
    """One record per row, in the order of the rows."""
    keys, values, headers = record_parts(record_columns(info, batch, max_bytes))
    return list(
        map(Record, itertools.repeat(info.name), partitions.tolist(), keys, values, headers)
    )


def record_columns(info: TopicInfo, batch: pa.RecordBatch, max_bytes: int) -> pa.RecordBatch:
    """The records of rows as columns: key, value, the change type that a header names, and the
    user's headers; the last two only if there are any.

    A deletion has a null value and an upsert needs no header; only the other change types are
    named. Rows that Kafka would refuse later are refused here, so that nothing of the append is
    stored.
    """
    rows = batch.select(declared_schema(info.arrow_schema).names)
    keys = key_bytes(rows, info.key) if info.key else pa.nulls(batch.num_rows, pa.binary())
    values = encode_column(rows) if info.format == "json" else _registry_codec(info).encode(rows)
    columns = {KEY: keys, VALUE: values}
    if info.is_table:
        changes = batch.column(CHANGE_TYPE)
        columns[VALUE] = pc.if_else(
            pc.equal(changes, DELETE), pa.scalar(None, pa.binary()), columns[VALUE]
        )
        columns[CHANGE] = pc.index_in(changes, pa.array(_NAMED_CHANGES))
    if HEADERS_COLUMN in batch.schema.names:
        columns[HEADERS] = batch.column(HEADERS_COLUMN)
    records = pa.RecordBatch.from_pydict(columns)
    _check_records(info, records, max_bytes)
    return records


def record_parts(
    columns: pa.RecordBatch,
) -> tuple[list[bytes | None], list[bytes | None], Iterable[RecordHeaders | None]]:
    """Keys, values and headers of records, as Kafka's client takes them."""
    headers: Iterable[RecordHeaders | None] = itertools.repeat(None, columns.num_rows)
    if HEADERS in columns.schema.names:
        headers = [
            [(pair["key"], pair["value"]) for pair in pairs] if pairs else None
            for pairs in columns.column(HEADERS).to_pylist()
        ]
    if CHANGE in columns.schema.names and columns.column(CHANGE).null_count < columns.num_rows:
        changes = columns.column(CHANGE).to_pylist()
        headers = [
            [*(own or ()), _CHANGE_HEADERS[change]] if change is not None else own
            for own, change in zip(headers, changes, strict=True)
        ]
    return columns.column(KEY).to_pylist(), columns.column(VALUE).to_pylist(), headers


def _check_records(info: TopicInfo, columns: pa.RecordBatch, max_bytes: int) -> None:
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
        if pair["key"].startswith(RESERVED_PREFIX):
            raise BadRows(
                f"Row {row} for {info.name} has a header {pair['key']!r}; names that begin with"
                f" {RESERVED_PREFIX!r} are reserved.",
                fix="rename it.",
            )
    return sum(len(pair["key"]) + len(pair["value"] or b"") for pair in pairs or ())


def control_record(topic: str, partition: int, payload: bytes) -> Record:
    """A control record, which `read` skips. It has a unique key, because a compacted topic requires
    keys.
    """
    return Record(
        topic=topic,
        partition=partition,
        key=b"headrace.control:" + os.urandom(8).hex().encode(),
        value=None,
        headers=[(CONTROL_HEADER, payload)],
    )


# Records to rows


@dataclass(frozen=True)
class MisfitRecord:
    """A record that does not fit the topic's schema."""

    partition: int
    offset: int
    key: bytes | None
    payload: bytes | None
    reason: str


@dataclass(frozen=True)
class DecodedRecords:
    """The rows of some records of one partition, and the records that do not fit the schema."""

    batch: pa.RecordBatch
    misfits: list[MisfitRecord] = field(default_factory=list)
    unknown_fields: UnknownFields = field(default_factory=Counter)
    """Fields that the schema does not have and that were ignored, with the number of records."""


def control_payload(headers: Any) -> bytes | None:
    """The payload of a control record; None if the headers are not those of a control record."""
    return next((value or b"" for name, value in headers or () if name == CONTROL_HEADER), None)


def to_rows(
    info: TopicInfo,
    messages: Sequence[Message],
    *,
    headers: bool = False,
    ignored: Sequence[str] = (),
) -> DecodedRecords:
    """Records of one partition as rows with the system columns, without control records. `ignored`
    are columns that a record may have although the schema does not. Other unknown fields are
    counted, and make misfits of the records of a strict topic.
    """
    unknown: UnknownFields = Counter()
    all_headers = [message.headers() for message in messages]
    if any(all_headers):
        rows = [row for row, pairs in enumerate(all_headers) if control_payload(pairs) is None]
        messages = [messages[row] for row in rows]
        all_headers = [all_headers[row] for row in rows]
    counted = None if info.strict else unknown
    decoded = (
        _decode_table(info, messages, all_headers, ignored, counted)
        if info.is_table
        else _decode_values(info, messages, ignored, counted)
    )
    misfits = [
        MisfitRecord(
            partition=messages[row].partition() or 0,
            offset=messages[row].offset() or 0,
            key=messages[row].key(),
            payload=messages[row].value(),
            reason=reason,
        )
        for row, reason in decoded.misfits.items()
    ]
    if decoded.rows is not None:
        messages = [messages[row] for row in decoded.rows]
        all_headers = [all_headers[row] for row in decoded.rows]
    # All records are of one partition.
    partitions = np.full(len(messages), messages[0].partition() if messages else 0, np.int32)
    offsets = np.array([message.offset() for message in messages], np.int64)
    times_ms = np.array([message.timestamp()[1] for message in messages], np.int64)
    columns = [
        *decoded.batch.columns,
        pa.array(partitions),
        pa.array(offsets),
        pa.array(times_ms * 1000).cast(TIMESTAMP_TYPE),
    ]
    if headers:
        columns.append(pa.array([_user_headers(pairs) for pairs in all_headers], HEADERS_TYPE))
    batch = pa.RecordBatch.from_arrays(columns, schema=readable_schema(info, headers=headers))
    return DecodedRecords(batch, misfits, unknown)


def _user_headers(pairs: Any) -> list[tuple[str, bytes | None]] | None:
    own = [(name, value) for name, value in pairs or () if not name.startswith(RESERVED_PREFIX)]
    return own or None


def _decode_present(
    info: TopicInfo,
    values: Sequence[bytes],
    ignored: Sequence[str],
    unknown: UnknownFields | None,
) -> Decoded:
    """The declared columns of values, in the topic's format."""
    if info.format == "json":
        columns = declared_schema(info.arrow_schema)
        return decode_rows(
            values, columns, ignored=ignored, history=info.schema_history, unknown=unknown
        )
    return _registry_codec(info).decode(values, ignored=ignored, unknown=unknown)


def _registry_codec(info: TopicInfo) -> RegistryCodec:
    from headrace.log.kafka.registry import codec_of  # an extra, and slow to import

    return codec_of(info)


def _decode_values(
    info: TopicInfo,
    messages: Sequence[Message],
    ignored: Sequence[str],
    unknown: UnknownFields | None,
) -> Decoded:
    values = [message.value() for message in messages]
    if is_raw_topic(info):
        return decode_raw_values(info, values)
    present = [row for row, value in enumerate(values) if value is not None]
    decoded = _decode_present(info, [values[row] or b"" for row in present], ignored, unknown)
    if len(present) == len(values):
        return decoded
    misfits = {
        row: "it has no value, and the topic is no table"
        for row, value in enumerate(values)
        if value is None
    }
    misfits |= {present[row]: reason for row, reason in decoded.misfits.items()}
    rows = present if decoded.rows is None else [present[row] for row in decoded.rows]
    return Decoded(decoded.batch, rows, dict(sorted(misfits.items())))


def _decode_table(
    info: TopicInfo,
    messages: Sequence[Message],
    headers: Sequence[Any],
    ignored: Sequence[str],
    unknown: UnknownFields | None,
) -> Decoded:
    """The changes of a table: rows from values, tombstones from keys, merged in their order."""
    values = [message.value() for message in messages]
    with_value = [row for row, value in enumerate(values) if value is not None]
    tombstones = [row for row, value in enumerate(values) if value is None]
    decoded = _decode_present(info, [values[row] or b"" for row in with_value], ignored, unknown)
    keys = decode_key_columns([messages[row].key() for row in tombstones], info)
    misfits = {with_value[row]: reason for row, reason in decoded.misfits.items()} | {
        tombstones[row]: reason for row, reason in keys.misfits.items()
    }
    if decoded.rows is not None:
        with_value = [with_value[row] for row in decoded.rows]
    if keys.rows is not None:
        tombstones = [tombstones[row] for row in keys.rows]
    order = with_value + tombstones
    changes = [_change_type(headers[row]) for row in with_value]
    batch = _merge(info, decoded.batch, changes, keys.batch, order)
    return Decoded(batch, sorted(order) if misfits else None, dict(sorted(misfits.items())))


def _change_type(headers: Any) -> str:
    """The change type of a record with a value: an upsert, unless a header says otherwise."""
    named = next((value for name, value in headers or () if name == CHANGE_HEADER), b"") or b""
    change = named.decode("utf-8", "replace")
    return change if change in CHANGE_TYPES and change != DELETE else UPDATE_POSTIMAGE


def _merge(
    info: TopicInfo,
    rows: pa.RecordBatch,
    changes: list[str],
    keys: pa.RecordBatch,
    order: list[int],
) -> pa.RecordBatch:
    """Rows and tombstones in one batch, in their original order."""
    schema = info.arrow_schema
    upserts = pa.RecordBatch.from_arrays(
        [*rows.columns, pa.array(changes, pa.string())], schema=schema
    )
    if not keys.num_rows:
        return upserts
    count = keys.num_rows
    arrays = [
        keys.column(column.name) if column.name in info.key else pa.nulls(count, column.type)
        for column in schema
    ]
    arrays[schema.get_field_index(CHANGE_TYPE)] = pa.repeat(pa.scalar(DELETE, pa.string()), count)
    both = pa.concat_batches([upserts, pa.RecordBatch.from_arrays(arrays, schema=schema)])
    return both.take(pa.array(np.argsort(np.array(order, np.int64))))
