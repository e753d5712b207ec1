"""A topic with Debezium's envelope as a source: its records become the changes of a table. Position and order are the topic's.

The envelope is JSON in a STRING or BINARY column `value`, with the connector's schema around it ({"schema": …, "payload": …}) or without; a null is a tombstone, which says nothing new.
A record that cannot be read stops the capture, with its offset and the reason: skipping it could leave the table wrong for ever.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa

from headrace.cdc.source import COMMITTED_AT, HIDDEN, ORDER, POSITION, TRANSACTION, Changes, ChunkRequest, Item, Part, TableShape, Truncated
from headrace.errors import BadRows, ConfigurationError, InputError
from headrace.log import open_log
from headrace.log.api import DELETE, INSERT, OFFSET_COLUMN, UPDATE, UPDATE_BEFORE
from headrace.log.row_values import Misfit, column
from headrace.log.schema import parse_schema, to_ddl

ROWS_A_PART = 20_000
LOOK_EVERY_S = 0.05
VALUE = "value"
_OPERATIONS = {"c": INSERT, "r": INSERT, "u": UPDATE, "d": DELETE}
_Told = list[tuple[str, Mapping[str, Any], dict[str, Any]]]


class DebeziumSource:
    def __init__(self, topic: str, table: str, schema: str, key: tuple[str, ...], log: str, decimals: str) -> None:
        self._precise = decimals == "precise"
        self._log = open_log(log)
        self.topic, self.key = topic, key
        info = self._log.topic(topic)
        if VALUE not in info.arrow_schema.names:
            raise ConfigurationError(f"The topic {topic!r} has no column {VALUE!r}.", fix="Debezium's records belong into a topic with a column value STRING.")
        self._schema = parse_schema(schema)
        columns = tuple((field.name, to_ddl(pa.schema([field.with_name("c").with_nullable(True)])).removeprefix("c ")) for field in self._schema)
        self.shape = TableShape(table, columns, key)
        self._columns = [column(field.with_nullable(True)) for field in self._schema]
        self._offsets: dict[int, int] = {}
        self._order = 0

    def start(self, position: str | None, *, afresh: bool = False) -> str:
        stored = json.loads(position) if position is not None and not afresh else {}
        self._offsets = {int(partition): offset for partition, offset in stored.items()} or self._log.start_offsets(self.topic)
        return self._position()

    def _position(self) -> str:
        return json.dumps(self._offsets)

    def tables(self) -> list[TableShape]:
        return [self.shape]

    def request(self, chunk: ChunkRequest) -> None:
        raise ConfigurationError(f"{chunk.table!r} comes from the topic {self.topic!r}, and has no snapshot apart from it.", fix="start it over to read everything again.")

    def count(self, table: str) -> int:
        assert table == self.shape.name
        return 0

    def poll(self, timeout_s: float) -> Part:
        deadline_s = time.monotonic() + timeout_s
        while not (waiting := self._waiting()):
            if time.monotonic() >= deadline_s:
                return Part()
            time.sleep(LOOK_EVERY_S)
        partition, end = waiting[0]
        stop = min(end, self._offsets[partition] + ROWS_A_PART)
        items = self._items(partition, stop)
        self._offsets[partition] = stop
        return Part(items, self._position(), transactions=1, is_idle=not self._waiting())

    def _waiting(self) -> list[tuple[int, int]]:
        ends = self._log.end_offsets(self.topic)
        return [(partition, end) for partition, end in sorted(ends.items()) if end > self._offsets.setdefault(partition, 0)]

    def _items(self, partition: int, stop: int) -> list[Item]:
        items: list[Item] = []
        told: _Told = []
        for batch in self._log.read(self.topic, partition, self._offsets[partition], stop, columns=[VALUE, OFFSET_COLUMN]):
            for value, offset in zip(batch.column(VALUE).to_pylist(), batch.column(OFFSET_COLUMN).to_pylist(), strict=True):
                if value is None:
                    continue
                payload, hidden = self._read(value, offset)
                if payload.get("op") == "t":
                    items += [*self._changes(told), Truncated(self.shape.name, hidden)]
                    told = []
                else:
                    told += [(change, row, hidden) for change, row in self._told(payload, offset)]
        return [*items, *self._changes(told)]

    def _read(self, value: str | bytes, offset: int) -> tuple[dict[str, Any], dict[str, Any]]:
        try:
            record = json.loads(value)
            payload = record["payload"] if "payload" in record and "op" not in record else record
            source = payload.get("source") or {}
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise self._unreadable(offset, f"it is no envelope ({error})") from error
        at_ms = source.get("ts_ms") or payload.get("ts_ms")
        place = source.get("lsn") or source.get("pos")
        self._order += 1
        hidden = {POSITION: place, TRANSACTION: source.get("txId"), ORDER: None, COMMITTED_AT: at_ms * 1000 if at_ms is not None else None}
        return payload, hidden

    def _unreadable(self, offset: int, why: str) -> InputError:
        return InputError(
            f"The record at offset {offset} of {self.topic!r} cannot be taken for a change of {self.shape.name!r}: {why}.",
            fix="mend the schema that was declared; or start over behind the record, if it does not belong there.",
        )

    def _told(self, payload: dict[str, Any], offset: int) -> list[tuple[str, dict[str, Any]]]:
        change, before, after = _OPERATIONS.get(str(payload.get("op"))), payload.get("before"), payload.get("after")
        if change is None:
            raise self._unreadable(offset, f"its operation is {payload.get('op')!r}")
        row = before if change == DELETE else after
        if not isinstance(row, dict):
            raise self._unreadable(offset, f"it has no row {'before' if change == DELETE else 'after'} it")
        if change != UPDATE or not isinstance(before, dict):
            return [(change, row)]
        if any(before.get(name) != row.get(name) for name in self.key if name in before):
            return [(DELETE, before), (INSERT, row)]
        return [(UPDATE_BEFORE, before), (UPDATE, row)]

    def _changes(self, told: _Told) -> list[Changes]:
        if not told:
            return []
        arrays = [self._array(place, [row.get(field.name) for _, row, _ in told]) for place, field in enumerate(self._schema)]
        arrays += [pa.array([hidden.get(each.name) for _, _, hidden in told], each.type) for each in HIDDEN]
        arrays.append(pa.array([change for change, _, _ in told], pa.string()))
        return [Changes(self.shape.name, pa.RecordBatch.from_arrays(arrays, schema=self.shape.batch_schema))]

    def _array(self, place: int, values: list[Any]) -> pa.Array:
        field = self._schema.field(place)
        try:
            return self._columns[place].array([decoded(value, field.type, precise=self._precise) for value in values])
        except (Misfit, pa.ArrowException, ValueError, TypeError, ArithmeticError) as error:
            raise BadRows(
                f"A value of {field.name!r} in {self.topic!r} is no {field.type}: {error}", fix="declare the column with another type; STRING takes anything."
            ) from error

    def is_caught_up(self) -> bool:
        return not self._waiting()

    def confirm(self, position: str) -> None:
        """There is nobody to tell."""

    def status(self) -> dict[str, Any]:
        return {"records_behind": sum(end - self._offsets.get(partition, 0) for partition, end in self._log.end_offsets(self.topic).items())}

    def close(self) -> None:
        self._log.close()

    def remove(self) -> list[str]:
        return []


def decoded(value: Any, kind: pa.DataType, *, precise: bool = True) -> Any:
    """A value as Debezium writes it, by the type that it is to have: numbers count days, milliseconds or microseconds since 1970, bytes are base64."""
    if value is None:
        return None
    if pa.types.is_date(kind) and isinstance(value, int):
        return date(1970, 1, 1) + timedelta(days=value)
    if pa.types.is_timestamp(kind):
        moment = _moment(value)
        return moment if kind.tz else moment.replace(tzinfo=None)
    if pa.types.is_decimal(kind):
        return _decimal(value, kind.scale, precise=precise)
    if pa.types.is_binary(kind):
        return base64.b64decode(value)
    if pa.types.is_string(kind) and not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return value


def _moment(value: Any) -> datetime:
    """Microseconds are told from milliseconds and nanoseconds by their size: a time between 1973 and 5138 has 12 to 14 digits in milliseconds."""
    if isinstance(value, str):
        moment = datetime.fromisoformat(value)
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    scale_us = 1000 if abs(value) < 10**14 else 1
    whole = value * scale_us if abs(value) < 10**17 else value // 1000
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=whole)


def _decimal(value: Any, scale: int, *, precise: bool) -> Decimal:
    """As Debezium's `decimal.handling.mode` has it: precise is base64 of a big-endian number without its point; otherwise text, or a number."""
    if isinstance(value, str) and precise and not {".", "-"} & set(value):
        return Decimal(int.from_bytes(base64.b64decode(value), "big", signed=True)).scaleb(-scale)
    return Decimal(str(value))
