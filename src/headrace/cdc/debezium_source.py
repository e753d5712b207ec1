"""The source `debezium`: records of a topic in Debezium's format become changes of a table.

The position is the topic's offsets. The envelope is JSON in a STRING or BINARY column `value`, with
the connector's schema around it ({"schema": …, "payload": …}) or without. A null is a tombstone,
which is skipped. A record that is not a change of the table becomes a dead letter of its topic, in
the same transaction as the position behind it; with `errors="stop"` it ends the capture.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Self

import pyarrow as pa

from headrace.cdc.base import (
    UNCHANGED,
    ChunkRequest,
    DeadRecords,
    StreamItem,
    StreamPart,
    TableChanges,
    TableShape,
    Truncation,
)
from headrace.columnar.columns import (
    COMMITTED_AT,
    DELETE,
    HIDDEN_FIELDS,
    INSERT,
    MARKS,
    OFFSET_COLUMN,
    ORDER,
    POSITION,
    TRANSACTION,
    UPDATE_POSTIMAGE,
    UPDATE_PREIMAGE,
)
from headrace.error_policy import DIVERT, STOP
from headrace.errors import BadSchema, ConfigurationError, InputError
from headrace.log import open_log
from headrace.log.api import Log
from headrace.log.dead_letters import DeadLetter, rows_to_json_column
from headrace.types.schema import parse_schema, to_ddl
from headrace.types.values import Misfit, column_converter

# Values

_UNAVAILABLE = "__debezium_unavailable_value"
UNAVAILABLE = {_UNAVAILABLE, base64.b64encode(_UNAVAILABLE.encode()).decode()}
"""Stands for a large value that an update left unchanged."""


def decode_value(value: Any, kind: pa.DataType, *, precise: bool = True) -> Any:
    """Decode a value of Debezium's JSON for a column of the given type. Numbers count days,
    milliseconds or microseconds since 1970; bytes are base64.
    """
    if value is None:
        return None
    if pa.types.is_date(kind) and isinstance(value, int):
        return date(1970, 1, 1) + timedelta(days=value)
    if pa.types.is_timestamp(kind):
        moment = _to_datetime(value)
        return moment if kind.tz else moment.replace(tzinfo=None)
    if pa.types.is_decimal(kind):
        return _to_decimal(value, kind.scale, precise=precise)
    if pa.types.is_binary(kind):
        return base64.b64decode(value)
    if pa.types.is_string(kind) and not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return value


def _to_datetime(value: Any) -> datetime:
    """Decode a time. Milliseconds, microseconds and nanoseconds are distinguished by their size: a
    time between 1973 and 5138 has 12 to 14 digits in milliseconds.
    """
    if isinstance(value, str):
        moment = datetime.fromisoformat(value)
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    scale_us = 1000 if abs(value) < 10**14 else 1
    whole = value * scale_us if abs(value) < 10**17 else value // 1000
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=whole)


def _to_decimal(value: Any, scale: int, *, precise: bool) -> Decimal:
    """Decode a number by the connector's `decimal.handling.mode`: "precise" is base64 of the
    unscaled value, big-endian; the others are text or a JSON number.
    """
    if isinstance(value, str) and precise and not {".", "-"} & set(value):
        return Decimal(int.from_bytes(base64.b64decode(value), "big", signed=True)).scaleb(-scale)
    return Decimal(str(value))


PART_ROWS = 20_000
POLL_INTERVAL_S = 0.05
VALUE = "value"
_OPERATIONS = {"c": INSERT, "r": INSERT, "u": UPDATE_POSTIMAGE, "d": DELETE}


class UnusableRecord(Exception):
    """A record that is not a change of the table. The text says why."""


@dataclass(frozen=True)
class _RecordChanges:
    """The changes of one record: the change type, the row, and the hidden columns."""

    offset: int
    changes: list[tuple[str, Mapping[str, Any], dict[str, Any]]]


class DebeziumSource:
    def __init__(
        self,
        topic: str,
        table: str,
        schema: str,
        key: tuple[str, ...],
        log: Log,
        decimals: str,
        errors: str = DIVERT,
    ) -> None:
        self._has_precise_decimals = decimals == "precise"
        self._stops_on_error = errors == STOP
        self._log = log
        self.topic = topic
        self.key = key
        self._schema = parse_schema(schema)
        columns = tuple(
            (
                field.name,
                to_ddl(pa.schema([field.with_name("c").with_nullable(True)])).removeprefix("c "),
            )
            for field in self._schema
        )
        self.shape = TableShape(table, columns, key)
        self._columns = [column_converter(field.with_nullable(True)) for field in self._schema]
        self._offsets: dict[int, int] = {}
        self._unusable: dict[int, str] = {}
        """By offset, why a record of the current part cannot be used."""

    @classmethod
    def open(cls, *, topic: str, log: str, **options: Any) -> Self:
        """Open the log at an address, and check the topic. On Kafka, a topic that a connector
        created has no schema yet: it gets one with the column `value`.
        """
        opened = open_log(log)
        try:
            info = opened.topic(topic)
        except BadSchema:
            info = opened.create_topic(topic, f"{VALUE} STRING", exist_ok=True)
        if VALUE not in info.arrow_schema.names:
            raise ConfigurationError(
                f"The topic {topic!r} has no column {VALUE!r}.",
                fix="Debezium's records belong into a topic with a column value STRING.",
            )
        return cls(topic=topic, log=opened, **options)

    def start(self, position: str | None, *, start_over: bool = False) -> str:
        stored = json.loads(position) if position is not None and not start_over else {}
        self._offsets = {
            int(partition): offset for partition, offset in stored.items()
        } or self._log.start_offsets(self.topic)
        return self._position()

    def _position(self) -> str:
        return json.dumps(self._offsets)

    def tables(self) -> list[TableShape]:
        return [self.shape]

    def request(self, chunk: ChunkRequest) -> None:
        raise ConfigurationError(
            f"{chunk.table!r} comes from the topic {self.topic!r}, and has no separate snapshot.",
            fix="run it with --start-over to read the whole topic again.",
        )

    def count(self, table: str) -> int:
        assert table == self.shape.name
        return 0

    def poll(self, timeout_s: float) -> StreamPart:
        deadline_s = time.monotonic() + timeout_s
        while not (waiting := self._waiting()):
            if time.monotonic() >= deadline_s:
                return StreamPart()
            time.sleep(POLL_INTERVAL_S)
        partition, end = waiting[0]
        stop = min(end, self._offsets[partition] + PART_ROWS)
        items = self._items(partition, stop)
        self._offsets[partition] = stop
        return StreamPart(items, self._position(), transactions=1, is_idle=not self._waiting())

    def _waiting(self) -> list[tuple[int, int]]:
        ends = self._log.end_offsets(self.topic)
        return [
            (partition, end)
            for partition, end in sorted(ends.items())
            if end > self._offsets.setdefault(partition, 0)
        ]

    # Records

    def _items(self, partition: int, stop: int) -> list[StreamItem]:
        items: list[StreamItem] = []
        records: list[_RecordChanges] = []
        self._unusable = {}
        read = self._log.read(self.topic, partition, self._offsets[partition], stop)
        batches = list(read.with_dead_letters())
        for batch in batches:
            for value, offset in zip(
                batch.column(VALUE).to_pylist(),
                batch.column(OFFSET_COLUMN).to_pylist(),
                strict=True,
            ):
                if value is None:
                    continue
                try:
                    parsed = self._parse_record(value, offset)
                except UnusableRecord as error:
                    self._add_dead_letter(offset, str(error))
                    continue
                if isinstance(parsed, Truncation):
                    items += [*self._changes(records), parsed]
                    records = []
                else:
                    records.append(parsed)
        items += self._changes(records)
        return [*items, *self._dead_records(partition, batches)]

    def _add_dead_letter(self, offset: int, reason: str) -> None:
        if self._stops_on_error:
            raise InputError(
                f"The record at offset {offset} of {self.topic!r} is not a change of"
                f" {self.shape.name!r}: {reason}.",
                fix=(
                    "correct the declared schema; or make such records dead letters, with"
                    " errors='divert'."
                ),
            )
        self._unusable[offset] = reason

    def _dead_records(self, partition: int, batches: list[pa.RecordBatch]) -> list[DeadRecords]:
        names = self._log.topic(self.topic).arrow_schema.names
        dead_letters: list[DeadLetter] = []
        for batch in batches:
            indices = [
                index
                for index, offset in enumerate(batch.column(OFFSET_COLUMN).to_pylist())
                if offset in self._unusable
            ]
            if indices:
                rows = pa.Table.from_batches([batch]).take(indices)
                texts = rows_to_json_column(rows.select(names)).to_pylist()
                for offset, text in zip(rows[OFFSET_COLUMN].to_pylist(), texts, strict=True):
                    source = f"capture of {self.shape.name}"
                    reason = self._unusable[offset]
                    dead_letters.append(DeadLetter(source, reason, partition, offset, row=text))
        return [DeadRecords(self.topic, tuple(dead_letters))] if dead_letters else []

    def _parse_record(self, value: str | bytes, offset: int) -> _RecordChanges | Truncation:
        try:
            record = json.loads(value)
            payload = record["payload"] if "payload" in record and "op" not in record else record
            hidden = _hidden(payload)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise UnusableRecord(f"it is not an envelope ({error})") from error
        if payload.get("op") == "t":
            return Truncation(self.shape.name, hidden)
        return _RecordChanges(
            offset,
            [self._with_marks(change, row, hidden) for change, row in self._row_changes(payload)],
        )

    def _row_changes(self, payload: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        change = _OPERATIONS.get(str(payload.get("op")))
        before = payload.get("before")
        after = payload.get("after")
        if change is None:
            raise UnusableRecord(f"its operation is {payload.get('op')!r}")
        row = before if change == DELETE else after
        if not isinstance(row, dict):
            raise UnusableRecord(f"it has no row {'before' if change == DELETE else 'after'} it")
        if keyless := [name for name in self.key if row.get(name) is None]:
            raise UnusableRecord(f"its row has no {keyless[0]!r}, which is in the key")
        if change != UPDATE_POSTIMAGE or not isinstance(before, dict):
            return [(change, row)]
        if any(before[name] != row.get(name) for name in self.key if before.get(name) is not None):
            return [(DELETE, before), (INSERT, row)]
        return [
            (UPDATE_PREIMAGE, {**before, **{name: row[name] for name in self.key}}),
            (UPDATE_POSTIMAGE, row),
        ]

    @staticmethod
    def _with_marks(
        change: str, row: dict[str, Any], hidden: dict[str, Any]
    ) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """Mark large values that are missing because an update left them unchanged."""
        missing = [
            name for name, value in row.items() if isinstance(value, str) and value in UNAVAILABLE
        ]
        if not missing:
            return change, row, hidden
        return (
            change,
            {**row, **dict.fromkeys(missing)},
            {**hidden, MARKS: json.dumps(dict.fromkeys(missing, UNCHANGED), ensure_ascii=False)},
        )

    # Columns

    def _changes(self, records: list[_RecordChanges]) -> list[TableChanges]:
        """Convert all records at once; if a value does not fit, each half, and so on, until the
        record that does not fit stands alone.
        """
        if not records:
            return []
        try:
            return [self._batch(records)]
        except UnusableRecord as error:
            if len(records) == 1:
                self._add_dead_letter(records[0].offset, str(error))
                return []
        half = len(records) // 2
        return [*self._changes(records[:half]), *self._changes(records[half:])]

    def _batch(self, records: list[_RecordChanges]) -> TableChanges:
        changes = [change for record in records for change in record.changes]
        arrays = [
            self._array(index, [row.get(field.name) for _, row, _ in changes])
            for index, field in enumerate(self._schema)
        ]
        arrays += [
            pa.array([hidden.get(field.name) for _, _, hidden in changes], field.type)
            for field in HIDDEN_FIELDS
        ]
        arrays.append(pa.array([change for change, _, _ in changes], pa.string()))
        return TableChanges(
            self.shape.name, pa.RecordBatch.from_arrays(arrays, schema=self.shape.batch_schema)
        )

    def _array(self, index: int, values: list[Any]) -> pa.Array:
        field = self._schema.field(index)
        try:
            return self._columns[index].array(
                [
                    decode_value(value, field.type, precise=self._has_precise_decimals)
                    for value in values
                ]
            )
        except (Misfit, pa.ArrowException, ValueError, TypeError, ArithmeticError) as error:
            raise UnusableRecord(f"its {field.name!r} is not a {field.type} ({error})") from error

    def is_caught_up(self) -> bool:
        return not self._waiting()

    def confirm(self, position: str) -> None:
        """The topic is retained anyway."""

    def status(self) -> dict[str, Any]:
        return {
            "records_behind": sum(
                end - self._offsets.get(partition, 0)
                for partition, end in self._log.end_offsets(self.topic).items()
            )
        }

    def close(self) -> None:
        self._log.close()

    def remove(self) -> list[str]:
        return []


def _hidden(payload: dict[str, Any]) -> dict[str, Any]:
    source, transaction = payload.get("source") or {}, payload.get("transaction") or {}
    at_ms = _to_int(source.get("ts_ms") or payload.get("ts_ms"), bits=50)
    return {
        POSITION: _to_int(source.get("lsn") or source.get("pos")),
        TRANSACTION: _to_int(source.get("txId")),
        ORDER: _to_int(transaction.get("total_order"), bits=31),
        COMMITTED_AT: at_ms * 1000 if at_ms is not None else None,
    }


def _to_int(value: Any, *, bits: int = 63) -> int | None:
    """Return a number of the envelope; None if it is not an integer of that size, since connectors
    differ in what they write.
    """
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**bits
        else None
    )
