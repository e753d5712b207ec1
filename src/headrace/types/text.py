"""Rows from JSON and CSV text as Arrow batches of a topic's schema: ISO times become timestamps,
base64 becomes bytes, and so on. `headrace produce` uses it.

Text only becomes Python values here; whether they fit the schema is checked by
`headrace.types.values`. An error names the line and the column.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import ROUND_FLOOR, Decimal, InvalidOperation
from typing import Any

import pyarrow as pa

from headrace.columnar.columns import (
    CHANGE_TYPE,
    CHANGE_TYPES,
    DELETE,
    HEADERS_COLUMN,
    HEADERS_TYPE,
    OFFSET_COLUMN,
    PARTITION_COLUMN,
    TIMESTAMP_COLUMN,
)
from headrace.errors import BadRows, nearest
from headrace.types.schema import declared_schema
from headrace.types.schema_history import NO_HISTORY, SchemaHistory
from headrace.types.values import ColumnConverter, Misfit, column_converter

Convert = Callable[[Any], Any]
SYSTEM_COLUMNS = {PARTITION_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN, HEADERS_COLUMN}
"""Columns that are not of the topic, so that the output of `consume --json` can be produced again.
All but the headers are ignored.
"""
EPOCH_UNITS = {
    "s": Decimal(1_000_000),
    "ms": Decimal(1_000),
    "us": Decimal(1),
    "ns": Decimal("0.001"),
}
"""The units in which a number can count the time since 1970, in microseconds."""

_BOOLEANS = {"true": True, "false": False}


@dataclass(frozen=True)
class TextRow:
    """One row as it was read, and the line it was read from."""

    line: int
    values: dict[str, Any]


class TextRowParser:
    """Converts text rows to Arrow batches of one topic. Errors name the topic, and the source of
    the text. `epoch` is the unit of numbers in columns of timestamps; without it they do not fit.
    """

    def __init__(
        self,
        schema: pa.Schema,
        key: Sequence[str],
        *,
        is_table: bool,
        topic: str,
        source: str,
        epoch: str | None = None,
        history: SchemaHistory = NO_HISTORY,
    ) -> None:
        self.key = key
        self.is_table = is_table
        self.topic = topic
        self.source = source
        self.history = history
        self._rows = _Columns(declared_schema(schema) if is_table else schema, epoch)
        self._changes = _Columns(schema, epoch)
        self._headers = _Columns(pa.schema([pa.field(HEADERS_COLUMN, HEADERS_TYPE)]), epoch)
        self._names = set(self._rows.names)
        self.has_decimals = any("decimal" in str(field.type) for field in schema)

    def batch(self, rows: Sequence[TextRow], *, csv: bool) -> pa.RecordBatch:
        """The rows as one Arrow batch. On a table it has `_change_type` if any of the rows does."""
        changes = self.is_table and any(CHANGE_TYPE in row.values for row in rows)
        if self.history:
            rows = [self._with_present_names(row) for row in rows]
        for row in rows:
            self._check_names(row)
        columns = self._changes if changes else self._rows
        default = {CHANGE_TYPE: "update_postimage"} if changes else {}
        arrays = [self._array(typed, rows, default, csv=csv) for typed in columns.of(csv=csv)]
        return pa.RecordBatch.from_arrays(arrays, schema=columns.schema)

    def headers(self, rows: Sequence[TextRow]) -> list[list[tuple[str, bytes | None]]] | None:
        """The headers of each row; None if no row has any."""
        if not any(row.values.get(HEADERS_COLUMN) for row in rows):
            return None
        (typed,) = self._headers.of(csv=False)
        entries = self._array(typed, rows, {}, csv=False).to_pylist()
        return [[(pair["key"], pair["value"]) for pair in entry or ()] for entry in entries]

    def _array(
        self, typed: _TypedColumn, rows: Sequence[TextRow], default: dict[str, Any], *, csv: bool
    ) -> pa.Array:
        name = typed.column.field.name
        values = [row.values.get(name, default.get(name)) for row in rows]
        try:
            return typed.array(values)
        except (Misfit, pa.ArrowException, OverflowError, ValueError, TypeError):
            position, why = typed.find_misfit(values)
            fix = "correct the line, or the topic's schema."
            if csv and values[position] is None:
                fix = "an empty field is null: give a value."
            elif pa.types.is_timestamp(typed.column.field.type) and _is_number(values[position]):
                fix = "name the unit of numbers in columns of times with --epoch s, ms, us or ns."
            raise BadRows(
                f"{self.source}, line {rows[position].line}, column {name!r}: {why}.", fix=fix
            ) from None

    def _with_present_names(self, row: TextRow) -> TextRow:
        """A row of an older producer with the present names of its columns, without dropped ones
        that are null.
        """
        present = self.history.present_name
        values = {
            name if name in self._names else present(name): value
            for name, value in row.values.items()
            if value is not None or not self.history.is_dropped(name)
        }
        return TextRow(row.line, values)

    def _check_names(self, row: TextRow) -> None:
        names = row.values.keys()
        if names == self._names:
            return
        where = f"{self.source}, line {row.line}"
        change = row.values.get(CHANGE_TYPE) if self.is_table else None
        if change is not None and change not in CHANGE_TYPES:
            raise BadRows(
                f"{where}: {change!r} is not a change type: {nearest(str(change), CHANGE_TYPES)}"
            )
        known = self._names | SYSTEM_COLUMNS | ({CHANGE_TYPE} if self.is_table else set())
        if extra := sorted(names - known):
            raise BadRows(
                f"{where}: {self.topic} has no column {extra[0]!r}:"
                f" {nearest(extra[0], self._names)}",
                fix="remove or rename it.",
            )
        required = self._names - set(self.history.added)
        needed = set(self.key) if change == DELETE else required
        if missing := sorted(needed - names):
            raise BadRows(
                f"{where}: the column {missing[0]!r} is missing.",
                fix="give it a value, or null if it has none.",
            )


class _Columns:
    """The typed columns of a schema, for JSON and for CSV."""

    def __init__(self, schema: pa.Schema, epoch: str | None) -> None:
        self.schema = schema
        self.names = list(schema.names)
        self._json = [
            _TypedColumn(column_converter(field), json_converter(field.type, epoch=epoch))
            for field in schema
        ]
        self._csv = [
            _TypedColumn(column_converter(field), csv_converter(field.type, epoch=epoch))
            for field in schema
        ]

    def of(self, *, csv: bool) -> list[_TypedColumn]:
        return self._csv if csv else self._json


@dataclass(frozen=True)
class _TypedColumn:
    column: ColumnConverter
    from_text: Convert | None

    def array(self, values: list[Any]) -> pa.Array:
        if self.from_text is None or self.column.exact.issuperset(map(type, values)):
            return self.column.array(values)
        return self.column.array(
            [None if value is None else self.from_text(value) for value in values]
        )

    def find_misfit(self, values: list[Any]) -> tuple[int, str]:
        """The first value that does not fit, and why."""
        for position, value in enumerate(values):
            try:
                self.array([value])
            except (Misfit, pa.ArrowException, OverflowError, ValueError, TypeError) as error:
                return position, str(error).rstrip(".")
        return 0, "the rows are too large for one append"


def csv_converter(kind: pa.DataType, *, epoch: str | None = None) -> Convert | None:
    """A function that converts a CSV field to a Python value; None if none is needed. Fields of
    nested columns hold JSON.
    """
    if not pa.types.is_nested(kind):
        return json_converter(kind, epoch=epoch)
    inner = json_converter(kind, epoch=epoch) or (lambda value: value)

    def convert(text: str) -> Any:
        try:
            return inner(json.loads(text, parse_float=Decimal))
        except json.JSONDecodeError as error:
            raise Misfit(
                f"{text[:80]!r} is not JSON ({error.msg}), which stands for a nested value"
            ) from None

    return convert


def json_converter(kind: pa.DataType, *, epoch: str | None = None) -> Convert | None:
    """A function that converts a JSON value to a Python value of a type; None if none is needed.
    `epoch` is the unit of numbers that stand for timestamps.
    """
    if pa.types.is_struct(kind):
        return _struct(kind, epoch)
    if pa.types.is_map(kind):
        return _map(kind, epoch)
    if pa.types.is_list(kind):
        return _list(json_converter(kind.value_type, epoch=epoch))
    if epoch is not None and pa.types.is_timestamp(kind):
        return _epoch_converter(kind, epoch)
    for is_kind, convert in _FROM_TEXT:
        if is_kind(kind):
            return convert
    return None


def _list(inner: Convert | None) -> Convert | None:
    if inner is None:
        return None
    return lambda value: (
        [_or_none(inner, each) for each in value] if isinstance(value, list) else value
    )


def _struct(kind: pa.StructType, epoch: str | None) -> Convert:
    parts = {child.name: json_converter(child.type, epoch=epoch) for child in kind}

    def convert(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: _or_none(parts.get(name), each) for name, each in value.items()}

    return convert


def _map(kind: pa.MapType, epoch: str | None) -> Convert:
    """A converter of maps: an object, whose keys are text, or an array of pairs."""
    key = json_converter(kind.key_type, epoch=epoch)
    item = json_converter(kind.item_type, epoch=epoch)

    def convert(value: Any) -> Any:
        pairs = list(value.items()) if isinstance(value, dict) else value
        if not isinstance(pairs, list) or not all(
            isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
        ):
            return value
        return [(_or_none(key, name), _or_none(item, content)) for name, content in pairs]

    return convert


def _or_none(convert: Convert | None, value: Any) -> Any:
    return value if value is None or convert is None else convert(value)


def _parsed(parse: Callable[[str], Any], wanted: str) -> Convert:
    """A converter that parses text. A value that is not text is left unchanged, to be checked
    later.
    """

    def convert(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return parse(value)
        except (ValueError, KeyError, InvalidOperation, binascii.Error):
            raise Misfit(f"{value[:80]!r} is not {wanted}") from None

    return convert


def _float(value: Any) -> Any:
    """A number from text or Decimal: JSON numbers are read as Decimal if the topic has decimals."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise Misfit(f"{value[:80]!r} is not a number") from None
    return float(value) if isinstance(value, Decimal) else value


def _timestamp(text: str) -> datetime:
    fraction = text.partition(".")[2].rstrip("Zz").partition("+")[0].partition("-")[0]
    if fraction[6:].strip("0"):
        raise ValueError(text)
    return datetime.fromisoformat(text)


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        try:
            return Decimal(value).is_finite()
        except InvalidOperation:
            return False
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _epoch_converter(kind: pa.DataType, unit: str) -> Convert:
    """A converter of times since 1970, in a unit, to timestamps; text that is not a number is in
    ISO 8601. Nanoseconds are cut to microseconds, which is what a timestamp holds.
    """
    from_iso = _parsed(_timestamp, "a time such as 2026-01-31T12:00:00.000000Z or a number")
    epoch = datetime(1970, 1, 1, tzinfo=None if kind.tz is None else UTC)

    def convert(value: Any) -> Any:
        if not _is_number(value):
            return from_iso(value)
        micros = Decimal(str(value)) * EPOCH_UNITS[unit]
        if unit != "ns" and micros != micros.to_integral_value():
            raise Misfit(f"{value} {unit} is finer than a microsecond")
        try:
            return epoch + timedelta(microseconds=int(micros.to_integral_value(ROUND_FLOOR)))
        except OverflowError:
            raise Misfit(f"{value} {unit} since 1970 is not in the years 1 to 9999") from None

    return convert


def _duration(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str):
        return value
    try:
        return timedelta(microseconds=int(value))
    except ValueError:
        raise Misfit(f"{str(value)[:80]!r} is not a number of microseconds") from None


_FROM_TEXT: tuple[tuple[Callable[[pa.DataType], bool], Convert], ...] = (
    (pa.types.is_boolean, _parsed(lambda text: _BOOLEANS[text.lower()], "true or false")),
    (pa.types.is_integer, _parsed(int, "a whole number")),
    (pa.types.is_floating, _float),
    (pa.types.is_decimal, _parsed(Decimal, "a decimal number")),
    (pa.types.is_binary, _parsed(lambda text: base64.b64decode(text, validate=True), "base64")),
    (pa.types.is_date, _parsed(date.fromisoformat, "a date such as 2026-01-31")),
    (pa.types.is_time, _parsed(time.fromisoformat, "a time such as 12:30:00")),
    (pa.types.is_timestamp, _parsed(_timestamp, "a time such as 2026-01-31T12:00:00.000000Z")),
    (pa.types.is_duration, _duration),
)
