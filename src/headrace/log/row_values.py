"""Python values into one Arrow column, strictly: nothing is coerced that would lose or reinterpret anything.

`rows.py` uses it for dicts and for pandas' object columns. Each column gets a `Column` once per schema. Its quick path looks only at the set of Python
types that occur; the value-by-value path runs for nested types, for subclasses (numpy scalars, pandas timestamps), and to find a culprit.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.errors import BugError
from headrace.log.ddl import TYPE_KEY
from headrace.log.schema import is_spatial, is_variant

_MAX_FLOAT = float(np.finfo(np.float32).max)
Convert = Callable[[Any], Any]


class Misfit(Exception):
    """A value that does not fit; its text says why, without the place."""


@dataclass(frozen=True)
class Column:
    """How the values of one column become Arrow: `exact` are Python types that need no second look, `convert` looks at one value."""

    name: str
    field: pa.Field
    exact: frozenset[type]
    convert: Convert

    def array(self, values: list[Any]) -> pa.Array:
        """The Arrow column. Raises Misfit or one of Arrow's errors if any value does not fit; `culprit` then says which."""
        if not self.exact.issuperset(map(type, values)):
            values = [self.convert(value) for value in values]
        return pa.array(values, self.field.type, from_pandas=False)

    def culprit(self, values: Sequence[Any]) -> tuple[int, str]:
        """The first value that does not fit, and why."""
        for row, value in enumerate(values):
            try:
                pa.array([self.convert(value)], self.field.type, from_pandas=False)
            except (Misfit, pa.ArrowException, OverflowError, ValueError, TypeError) as error:
                return row, str(error)
        return 0, "the column as a whole is too large for one append"


def column(field: pa.Field) -> Column:
    """The converter of a field."""
    exact = _exact_types(field)
    return Column(field.name, field, exact | {type(None)} if field.nullable else exact, converter(field))


def _exact_types(field: pa.Field) -> frozenset[type]:
    """Python types whose every value either fits or is refused by Arrow itself."""
    kind = field.type
    if length_limit(field) is not None:
        return frozenset()
    for is_kind, exact in _EXACT:
        if is_kind(kind):
            return exact
    return frozenset()


_EXACT: tuple[tuple[Callable[[pa.DataType], bool], frozenset[type]], ...] = (
    (pa.types.is_boolean, frozenset({bool})),
    (pa.types.is_integer, frozenset({int})),
    (pa.types.is_float64, frozenset({float, int})),
    (pa.types.is_string, frozenset({str})),
    (pa.types.is_binary, frozenset({bytes})),
    (pa.types.is_date32, frozenset({date})),
    (lambda kind: bool(pa.types.is_timestamp(kind)) and kind.tz is not None, frozenset({datetime})),
    (pa.types.is_duration, frozenset({timedelta})),
    (pa.types.is_decimal, frozenset({decimal.Decimal})),
)


def length_limit(field: pa.Field) -> int | None:
    """The n of CHAR(n) and VARCHAR(n)."""
    name = (field.metadata or {}).get(TYPE_KEY, b"").decode()
    return int(name[:-1].partition("(")[2]) if name.startswith(("CHAR(", "VARCHAR(")) else None


def time_precision(field: pa.Field) -> int | None:
    """The n of TIME(n): digits of a second."""
    name = (field.metadata or {}).get(TYPE_KEY, b"").decode()
    return int(name[:-1].partition("(")[2]) if name.startswith("TIME(") else None


def converter(field: pa.Field) -> Convert:
    """A function that gives what Arrow should store for one value, or raises Misfit."""
    convert = _converter(field)
    nullable = field.nullable

    def checked(value: Any) -> Any:
        if value is None:
            if not nullable:
                raise Misfit("it is null, but the column is NOT NULL")
            return None
        return convert(value.item() if isinstance(value, np.generic) else value)

    return checked


def _converter(field: pa.Field) -> Convert:
    for is_kind, make in _CONVERTERS:
        if is_kind(field.type):
            return make(field)
    raise BugError(f"No Python value stands for {field.type}.")


def _refuse(value: Any, wanted: str) -> Misfit:
    return Misfit(f"{_shown(repr(value))} is a {type(value).__name__}, not {wanted}")


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _bool(value: Any) -> Any:
    if not isinstance(value, bool):
        raise _refuse(value, "a bool")
    return value


def _integer_converter(kind: pa.DataType) -> Convert:
    bits = kind.bit_width
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    name = {8: "TINYINT", 16: "SMALLINT", 32: "INT", 64: "BIGINT"}[bits]

    def convert(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _refuse(value, "an int")
        if not low <= value <= high:
            raise Misfit(f"{_shown(value)} is beyond the range of {name}")
        return int(value)

    return convert


def _float_converter(name: str, digits: int, largest: float) -> Convert:
    """Digits of a float beyond the type's are rounded, as its name says; an int keeps all of them, and nothing becomes infinite."""

    def convert(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _refuse(value, "a float")
        if isinstance(value, int) and abs(value) > 2**digits:
            raise Misfit(f"{_shown(value)} has more digits than a {name} holds exactly")
        if math.isfinite(value) and abs(value) > largest:
            raise Misfit(f"{value!r} is beyond the range of {name}")
        return float(value)

    return convert


def _text_converter(limit: int | None) -> Convert:
    def text(value: Any) -> Any:
        if not isinstance(value, str):
            raise _refuse(value, "a str")
        if limit is not None and len(value) > limit:
            raise Misfit(f"it has {len(value)} characters, more than the {limit} declared")
        return str.__str__(value)  # not str(): an Enum of texts would give its own name

    return text


def _bytes(value: Any) -> Any:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise _refuse(value, "bytes")
    return bytes(value)


def _decimal_converter(kind: pa.Decimal128Type) -> Convert:
    precision, scale = kind.precision, kind.scale

    def convert(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, decimal.Decimal | int):
            raise _refuse(value, "a Decimal or an int")
        number = decimal.Decimal(value)
        whole, _, fraction = f"{number:f}".lstrip("-").partition(".") if number.is_finite() else ("", "", "")
        if not whole or len(whole.lstrip("0")) > precision - scale or len(fraction.rstrip("0")) > scale:
            raise Misfit(f"{_shown(number)} does not fit DECIMAL({precision},{scale})")
        return number

    return convert


def _date(value: Any) -> Any:
    if isinstance(value, datetime) or not isinstance(value, date):
        raise _refuse(value, "a date")
    return value


def _timestamp(value: Any) -> Any:
    if not isinstance(value, datetime):
        raise _refuse(value, "a datetime")
    if value != value:  # noqa: PLR0124 - pandas' NaT is a datetime that is not itself
        raise Misfit("it is NaT, not a datetime; use None for a missing one")
    if getattr(value, "nanosecond", 0):
        raise Misfit(f"{value} has nanoseconds, and a TIMESTAMP holds microseconds")
    return value


def _local_timestamp(value: Any) -> Any:
    if _timestamp(value).tzinfo is not None:
        raise Misfit(f"{value} has a time zone, and a TIMESTAMP_NTZ has none")
    return value


def _time_converter(precision: int | None) -> Convert:
    step_us = 10 ** max(6 - (6 if precision is None else precision), 0)

    def convert(value: Any) -> Any:
        if not isinstance(value, time):
            raise _refuse(value, "a time")
        if value.tzinfo is not None:
            raise Misfit(f"{value} has a time zone, and a TIME has none")
        if value.microsecond % step_us:
            raise Misfit(f"{value} is finer than the {precision} digits of a second declared")
        return value

    return convert


def _duration(value: Any) -> Any:
    if not isinstance(value, timedelta):
        raise _refuse(value, "a timedelta")
    if getattr(value, "nanoseconds", 0):
        raise Misfit(f"{value} has nanoseconds, and an INTERVAL holds microseconds")
    return value


def _list_converter(kind: pa.ListType) -> Convert:
    element = converter(kind.value_field)

    def convert(value: Any) -> Any:
        if not isinstance(value, list | tuple | np.ndarray):
            raise _refuse(value, "a list")
        return [_within(f"[{position}]", element, item) for position, item in enumerate(value)]

    return convert


def _map_converter(kind: pa.MapType) -> Convert:
    key, item = converter(kind.key_field), converter(kind.item_field)

    def convert(value: Any) -> Any:
        pairs = list(value.items()) if isinstance(value, Mapping) else value
        if not isinstance(pairs, list | tuple) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
            raise _refuse(value, "a dict or a list of pairs")
        return [(_within(" key", key, name), _within(f"[{name!r}]", item, content)) for name, content in pairs]

    return convert


def _struct_converter(kind: pa.StructType) -> Convert:
    parts = {child.name: converter(child) for child in kind}
    unpack = _unpack_variant if is_variant(kind) else _unpack_spatial if is_spatial(kind) else None

    def convert(value: Any) -> Any:
        if not isinstance(value, Mapping):
            value = unpack(value) if unpack else _as_dict(value)
        if value.keys() != parts.keys():
            missing, extra = parts.keys() - value.keys(), value.keys() - parts.keys()
            raise Misfit(f"it misses the field {min(missing)!r}" if missing else f"it has the unknown field {min(map(str, extra))!r}")
        return {name: _within(f".{name}", part, value[name]) for name, part in parts.items()}

    return convert


def _as_dict(value: Any) -> Mapping[str, Any]:
    """Spark's Row is a tuple that can say its names."""
    if isinstance(value, tuple) and hasattr(value, "asDict"):
        named: Mapping[str, Any] = value.asDict()
        return named
    raise _refuse(value, "a dict")


def _unpack_variant(value: Any) -> Mapping[str, Any]:
    """Spark's VariantVal, without importing it."""
    try:
        return {"value": bytes(value.value), "metadata": bytes(value.metadata)}
    except (AttributeError, TypeError):
        raise _refuse(value, "a VariantVal or a dict of value and metadata") from None


def _unpack_spatial(value: Any) -> Mapping[str, Any]:
    """Spark's Geometry and Geography, without importing them."""
    try:
        return {"srid": value.getSrid(), "wkb": bytes(value.getBytes())}
    except (AttributeError, TypeError):
        raise _refuse(value, "a Geometry, a Geography or a dict of srid and wkb") from None


def _within(place: str, convert: Convert, value: Any) -> Any:
    """Convert a part of a value; the place is added to the reason if it does not fit."""
    try:
        return convert(value)
    except Misfit as error:
        raise Misfit(f"in {place.strip()}: {error}") from None


_CONVERTERS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Field], Convert]], ...] = (
    (pa.types.is_boolean, lambda _: _bool),
    (pa.types.is_integer, lambda field: _integer_converter(field.type)),
    (pa.types.is_float64, lambda _: _float_converter("DOUBLE", 53, math.inf)),
    (pa.types.is_float32, lambda _: _float_converter("FLOAT", 24, _MAX_FLOAT)),
    (pa.types.is_string, lambda field: _text_converter(length_limit(field))),
    (pa.types.is_binary, lambda _: _bytes),
    (pa.types.is_decimal, lambda field: _decimal_converter(field.type)),
    (pa.types.is_date32, lambda _: _date),
    (pa.types.is_timestamp, lambda field: _local_timestamp if field.type.tz is None else _timestamp),
    (pa.types.is_time64, lambda field: _time_converter(time_precision(field))),
    (pa.types.is_duration, lambda _: _duration),
    (pa.types.is_map, lambda field: _map_converter(field.type)),
    (pa.types.is_list, lambda field: _list_converter(field.type)),
    (pa.types.is_struct, lambda field: _struct_converter(field.type)),
)
