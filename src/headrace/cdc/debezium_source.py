"""A topic with Debezium's envelope as a source: its records become the changes of a table. Position
and order are the topic's.

The envelope is JSON in a STRING or BINARY column `value`, with the connector's schema around it
({"schema": …, "payload": …}) or without; a null is a tombstone, which says nothing new. A record
that cannot be taken for a change goes to the dead letters of its topic, in the same transaction as
the position behind it; with `errors="stop"` it ends the capture.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa

from headrace.cdc.base import (
    UNCHANGED,
    Aside,
    Changes,
    ChunkRequest,
    Item,
    Part,
    TableShape,
    Truncated,
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
    UPDATE,
    UPDATE_BEFORE,
)
from headrace.errors import BadSchema, ConfigurationError, InputError
from headrace.log import open_log
from headrace.log.dead_letters import DeadLetter, rows_to_texts
from headrace.log.values import TopicInfo
from headrace.types.schema import parse_schema, to_ddl
from headrace.types.values import Misfit, column

# Values as Debezium writes them in its JSON envelope, by the type that they are to have.


_UNAVAILABLE = "__debezium_unavailable_value"
UNAVAILABLE = {_UNAVAILABLE, base64.b64encode(_UNAVAILABLE.encode()).decode()}
"""What stands for a large value that an update did not touch."""


def decoded(value: Any, kind: pa.DataType, *, precise: bool = True) -> Any:
    """A value as Debezium writes it, by the type that it is to have: numbers count days,
    milliseconds or microseconds since 1970, bytes are base64.
    """
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
    """Microseconds are told from milliseconds and nanoseconds by their size: a time between 1973
    and 5138 has 12 to 14 digits in milliseconds.
    """
    if isinstance(value, str):
        moment = datetime.fromisoformat(value)
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    scale_us = 1000 if abs(value) < 10**14 else 1
    whole = value * scale_us if abs(value) < 10**17 else value // 1000
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=whole)


def _decimal(value: Any, scale: int, *, precise: bool) -> Decimal:
    """As Debezium's `decimal.handling.mode` has it: precise is base64 of a big-endian number
    without its point; otherwise text, or a number.
    """
    if isinstance(value, str) and precise and not {".", "-"} & set(value):
        return Decimal(int.from_bytes(base64.b64decode(value), "big", signed=True)).scaleb(-scale)
    return Decimal(str(value))


ROWS_A_PART = 20_000
LOOK_EVERY_S = 0.05
VALUE = "value"
DIVERT, STOP = "divert", "stop"
_OPERATIONS = {"c": INSERT, "r": INSERT, "u": UPDATE, "d": DELETE}


class Unusable(Exception):
    """A record that is no change of the table. The text says why."""


@dataclass(frozen=True)
class _Record:
    """The changes that one record tells of: what, the row, and the hidden columns."""

    offset: int
    changes: list[tuple[str, Mapping[str, Any], dict[str, Any]]]


class DebeziumSource:
    def __init__(
        self,
        topic: str,
        table: str,
        schema: str,
        key: tuple[str, ...],
        log: str,
        decimals: str,
        errors: str = DIVERT,
    ) -> None:
        self._precise, self._stops = decimals == "precise", errors == STOP
        self._log = open_log(log)
        self.topic, self.key = topic, key
        info = self._described(topic)
        if VALUE not in info.arrow_schema.names:
            raise ConfigurationError(
                f"The topic {topic!r} has no column {VALUE!r}.",
                fix="Debezium's records belong into a topic with a column value STRING.",
            )
        self._schema = parse_schema(schema)
        columns = tuple(
            (
                field.name,
                to_ddl(pa.schema([field.with_name("c").with_nullable(True)])).removeprefix("c "),
            )
            for field in self._schema
        )
        self.shape = TableShape(table, columns, key)
        self._columns = [column(field.with_nullable(True)) for field in self._schema]
        self._offsets: dict[int, int] = {}
        self._aside: dict[int, str] = {}
        """Offsets of records of the part under way that cannot be used, and why."""

    def _described(self, topic: str) -> TopicInfo:
        """On Kafka a topic that a connector made has no schema yet: its records are taken as they
        are.
        """
        try:
            return self._log.topic(topic)
        except BadSchema:
            return self._log.create_topic(topic, f"{VALUE} STRING", exist_ok=True)

    def start(self, position: str | None, *, afresh: bool = False) -> str:
        stored = json.loads(position) if position is not None and not afresh else {}
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
            f"{chunk.table!r} comes from the topic {self.topic!r}, and has no snapshot apart"
            " from it.",
            fix="start it over to read everything again.",
        )

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
        return [
            (partition, end)
            for partition, end in sorted(ends.items())
            if end > self._offsets.setdefault(partition, 0)
        ]

    # Records

    def _items(self, partition: int, stop: int) -> list[Item]:
        items: list[Item] = []
        records: list[_Record] = []
        self._aside = {}
        batches = list(self._log.read(self.topic, partition, self._offsets[partition], stop))
        for batch in batches:
            for value, offset in zip(
                batch.column(VALUE).to_pylist(),
                batch.column(OFFSET_COLUMN).to_pylist(),
                strict=True,
            ):
                if value is None:
                    continue
                try:
                    told = self._told(value, offset)
                except Unusable as error:
                    self._put_aside(offset, str(error))
                    continue
                if isinstance(told, Truncated):
                    items += [*self._changes(records), told]
                    records = []
                else:
                    records.append(told)
        items += self._changes(records)
        return [*items, *self._letters(partition, batches)]

    def _put_aside(self, offset: int, why: str) -> None:
        if self._stops:
            raise InputError(
                f"The record at offset {offset} of {self.topic!r} cannot be taken for a change of"
                f" {self.shape.name!r}: {why}.",
                fix=(
                    "mend the schema that was declared; or put such records aside, with"
                    " errors='divert'."
                ),
            )
        self._aside[offset] = why

    def _letters(self, partition: int, batches: list[pa.RecordBatch]) -> list[Aside]:
        letters = []
        for batch in batches:
            here = [
                number
                for number, offset in enumerate(batch.column(OFFSET_COLUMN).to_pylist())
                if offset in self._aside
            ]
            if here:
                picked = pa.Table.from_batches([batch]).take(here)
                texts = rows_to_texts(
                    picked.select(
                        [field.name for field in self._log.topic(self.topic).arrow_schema]
                    )
                ).to_pylist()
                offsets = picked[OFFSET_COLUMN].to_pylist()
                letters += [
                    DeadLetter(
                        f"capture of {self.shape.name}", self._aside[at], partition, at, row=text
                    )
                    for at, text in zip(offsets, texts, strict=True)
                ]
        return [Aside(self.topic, tuple(letters))] if letters else []

    def _told(self, value: str | bytes, offset: int) -> _Record | Truncated:
        try:
            record = json.loads(value)
            payload = record["payload"] if "payload" in record and "op" not in record else record
            hidden = _hidden(payload)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise Unusable(f"it is no envelope ({error})") from error
        if payload.get("op") == "t":
            return Truncated(self.shape.name, hidden)
        return _Record(
            offset, [self._with_marks(change, row, hidden) for change, row in self._rows(payload)]
        )

    def _rows(self, payload: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        change, before, after = (
            _OPERATIONS.get(str(payload.get("op"))),
            payload.get("before"),
            payload.get("after"),
        )
        if change is None:
            raise Unusable(f"its operation is {payload.get('op')!r}")
        row = before if change == DELETE else after
        if not isinstance(row, dict):
            raise Unusable(f"it has no row {'before' if change == DELETE else 'after'} it")
        if keyless := [name for name in self.key if row.get(name) is None]:
            raise Unusable(f"its row has no {keyless[0]!r}, which is in the key")
        if change != UPDATE or not isinstance(before, dict):
            return [(change, row)]
        if any(before[name] != row.get(name) for name in self.key if before.get(name) is not None):
            return [(DELETE, before), (INSERT, row)]
        return [
            (UPDATE_BEFORE, {**before, **{name: row[name] for name in self.key}}),
            (UPDATE, row),
        ]

    @staticmethod
    def _with_marks(
        change: str, row: dict[str, Any], hidden: dict[str, Any]
    ) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """A large value that an update did not touch is not there: it is marked as unchanged."""
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

    def _changes(self, records: list[_Record]) -> list[Changes]:
        """All at once; if a value does not fit, each half alone, until what does not fit stands
        alone.
        """
        if not records:
            return []
        try:
            return [self._batch(records)]
        except Unusable as error:
            if len(records) == 1:
                self._put_aside(records[0].offset, str(error))
                return []
        half = len(records) // 2
        return [*self._changes(records[:half]), *self._changes(records[half:])]

    def _batch(self, records: list[_Record]) -> Changes:
        told = [each for record in records for each in record.changes]
        arrays = [
            self._array(place, [row.get(field.name) for _, row, _ in told])
            for place, field in enumerate(self._schema)
        ]
        arrays += [
            pa.array([hidden.get(each.name) for _, _, hidden in told], each.type)
            for each in HIDDEN_FIELDS
        ]
        arrays.append(pa.array([change for change, _, _ in told], pa.string()))
        return Changes(
            self.shape.name, pa.RecordBatch.from_arrays(arrays, schema=self.shape.batch_schema)
        )

    def _array(self, place: int, values: list[Any]) -> pa.Array:
        field = self._schema.field(place)
        try:
            return self._columns[place].array(
                [decoded(value, field.type, precise=self._precise) for value in values]
            )
        except (Misfit, pa.ArrowException, ValueError, TypeError, ArithmeticError) as error:
            raise Unusable(f"its {field.name!r} is no {field.type} ({error})") from error

    def is_caught_up(self) -> bool:
        return not self._waiting()

    def confirm(self, position: str) -> None:
        """There is nobody to tell."""

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
    at_ms = _whole(source.get("ts_ms") or payload.get("ts_ms"), bits=50)
    return {
        POSITION: _whole(source.get("lsn") or source.get("pos")),
        TRANSACTION: _whole(source.get("txId")),
        ORDER: _whole(transaction.get("total_order"), bits=31),
        COMMITTED_AT: at_ms * 1000 if at_ms is not None else None,
    }


def _whole(value: Any, *, bits: int = 63) -> int | None:
    """Connectors differ in what they say of a change's place; what is no number says nothing
    here.
    """
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**bits
        else None
    )
