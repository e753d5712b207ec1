"""Python values and Arrow columns into columns of a schema, strictly: nothing is coerced that would
lose or reinterpret a value. `headrace.log.rows` uses it for everything that is appended.

- `ColumnConverter` converts Python values (dicts, pandas object columns). Its fast path only looks
  at the set of Python types that occur; values are converted one by one for nested types, for
  subclasses (numpy scalars, pandas timestamps), and to find the value that does not fit.
- `fit_column` converts Arrow columns (tables, pandas frames). Arrow's own casts are too lenient (a
  bool becomes 1, a text is parsed), so the permitted casts are listed here.
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
import pyarrow.compute as pc

from headrace.columnar.buffers import compact_offsets, list_elements, map_entries
from headrace.errors import BugError
from headrace.types.ddl import TYPE_KEY
from headrace.types.schema import is_spatial, is_variant

_MAX_FLOAT = float(np.finfo(np.float32).max)
Convert = Callable[[Any], Any]


class Misfit(Exception):
    """A value that does not fit a column; the message says why, without row and column."""


def failure_text(error: BaseException) -> str:
    """What was wrong with a value or with the code that made it: the reason of a Misfit; of another
    error its class too.
    """
    return str(error) if isinstance(error, Misfit) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class ColumnConverter:
    """Converts the Python values of one column to Arrow. Values whose type is in `exact` need no
    conversion; `convert` checks and converts one value.
    """

    name: str
    field: pa.Field
    exact: frozenset[type]
    convert: Convert

    def array(self, values: list[Any]) -> pa.Array:
        """The Arrow column. Raises Misfit or one of Arrow's errors if a value does not fit;
        `find_misfit` then says which.
        """
        if not self.exact.issuperset(map(type, values)):
            values = [self.convert(value) for value in values]
        return pa.array(values, self.field.type, from_pandas=False)

    def find_misfit(self, values: Sequence[Any]) -> tuple[int, str]:
        """The first value that does not fit, and why."""
        for row, value in enumerate(values):
            try:
                pa.array([self.convert(value)], self.field.type, from_pandas=False)
            except (Misfit, pa.ArrowException, OverflowError, ValueError, TypeError) as error:
                return row, str(error)
        return 0, "the column as a whole is too large for one append"


def column_converter(field: pa.Field) -> ColumnConverter:
    """The converter of a field."""
    exact = _exact_types(field)
    return ColumnConverter(
        field.name, field, exact | {type(None)} if field.nullable else exact, value_converter(field)
    )


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
    """The n of CHAR(n) and VARCHAR(n); None for other types."""
    name = (field.metadata or {}).get(TYPE_KEY, b"").decode()
    return int(name[:-1].partition("(")[2]) if name.startswith(("CHAR(", "VARCHAR(")) else None


def time_precision(field: pa.Field) -> int | None:
    """The n of TIME(n), the digits of a second; None for other types."""
    name = (field.metadata or {}).get(TYPE_KEY, b"").decode()
    return int(name[:-1].partition("(")[2]) if name.startswith("TIME(") else None


def value_converter(field: pa.Field) -> Convert:
    """A function that returns what Arrow stores for one value, or raises Misfit."""
    make_converter = next((make for is_kind, make in _CONVERTERS if is_kind(field.type)), None)
    if make_converter is None:
        raise BugError(f"There is no Python value for {field.type}.")
    convert_present, nullable = make_converter(field), field.nullable

    def convert(value: Any) -> Any:
        if value is None:
            if not nullable:
                raise Misfit("it is null, but the column is NOT NULL")
            return None
        return convert_present(value.item() if isinstance(value, np.generic) else value)

    return convert


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
    """Digits of a float beyond the type's are rounded, as its name says; an int keeps all of them,
    and nothing becomes infinite.
    """

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
        whole, _, fraction = (
            f"{number:f}".lstrip("-").partition(".") if number.is_finite() else ("", "", "")
        )
        if (
            not whole
            or len(whole.lstrip("0")) > precision - scale
            or len(fraction.rstrip("0")) > scale
        ):
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
    element = value_converter(kind.value_field)

    def convert(value: Any) -> Any:
        if not isinstance(value, list | tuple | np.ndarray):
            raise _refuse(value, "a list")
        return [
            _convert_part(f"[{position}]", element, item) for position, item in enumerate(value)
        ]

    return convert


def _map_converter(kind: pa.MapType) -> Convert:
    key, item = value_converter(kind.key_field), value_converter(kind.item_field)

    def convert(value: Any) -> Any:
        pairs = list(value.items()) if isinstance(value, Mapping) else value
        if not isinstance(pairs, list | tuple) or not all(
            isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
        ):
            raise _refuse(value, "a dict or a list of pairs")
        return [
            (_convert_part(" key", key, name), _convert_part(f"[{name!r}]", item, content))
            for name, content in pairs
        ]

    return convert


def _struct_converter(kind: pa.StructType) -> Convert:
    parts = {child.name: value_converter(child) for child in kind}
    unpack = _unpack_variant if is_variant(kind) else _unpack_spatial if is_spatial(kind) else None

    def convert(value: Any) -> Any:
        if not isinstance(value, Mapping):
            value = unpack(value) if unpack else _as_dict(value)
        if value.keys() != parts.keys():
            missing, extra = parts.keys() - value.keys(), value.keys() - parts.keys()
            raise Misfit(
                f"it misses the field {min(missing)!r}"
                if missing
                else f"it has the unknown field {min(map(str, extra))!r}"
            )
        return {name: _convert_part(f".{name}", part, value[name]) for name, part in parts.items()}

    return convert


def _as_dict(value: Any) -> Mapping[str, Any]:
    """The fields of Spark's Row, which is a tuple with names."""
    if isinstance(value, tuple) and hasattr(value, "asDict"):
        named: Mapping[str, Any] = value.asDict()
        return named
    raise _refuse(value, "a dict")


def _unpack_variant(value: Any) -> Mapping[str, Any]:
    """The fields of Spark's VariantVal, without importing it."""
    try:
        return {"value": bytes(value.value), "metadata": bytes(value.metadata)}
    except (AttributeError, TypeError):
        raise _refuse(value, "a VariantVal or a dict of value and metadata") from None


def _unpack_spatial(value: Any) -> Mapping[str, Any]:
    """The fields of Spark's Geometry and Geography, without importing them."""
    try:
        return {"srid": value.getSrid(), "wkb": bytes(value.getBytes())}
    except (AttributeError, TypeError):
        raise _refuse(value, "a Geometry, a Geography or a dict of srid and wkb") from None


def _convert_part(path: str, convert: Convert, value: Any) -> Any:
    """Convert a part of a value. The path of the part is added to the reason if it does not fit."""
    try:
        return convert(value)
    except Misfit as error:
        raise Misfit(f"in {path.strip()}: {error}") from None


_CONVERTERS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Field], Convert]], ...] = (
    (pa.types.is_boolean, lambda _: _bool),
    (pa.types.is_integer, lambda field: _integer_converter(field.type)),
    (pa.types.is_float64, lambda _: _float_converter("DOUBLE", 53, math.inf)),
    (pa.types.is_float32, lambda _: _float_converter("FLOAT", 24, _MAX_FLOAT)),
    (pa.types.is_string, lambda field: _text_converter(length_limit(field))),
    (pa.types.is_binary, lambda _: _bytes),
    (pa.types.is_decimal, lambda field: _decimal_converter(field.type)),
    (pa.types.is_date32, lambda _: _date),
    (
        pa.types.is_timestamp,
        lambda field: _local_timestamp if field.type.tz is None else _timestamp,
    ),
    (pa.types.is_time64, lambda field: _time_converter(time_precision(field))),
    (pa.types.is_duration, lambda _: _duration),
    (pa.types.is_map, lambda field: _map_converter(field.type)),
    (pa.types.is_list, lambda field: _list_converter(field.type)),
    (pa.types.is_struct, lambda field: _struct_converter(field.type)),
)


# Arrow columns

types = pa.types
_MS_PER_DAY = 24 * 3600 * 1000


def fit_column(array: pa.Array, field: pa.Field) -> pa.Array:
    """`array` as a column of `field`. Raises Misfit or one of Arrow's errors; `find_misfit` then
    finds the row.
    """
    fitted = array if array.type.equals(field.type) else cast_losslessly(array, field)
    check_column(fitted, field)
    return fitted


def find_misfit(
    array: pa.Array,
    field: pa.Field,
    error: Exception,
    fits: Callable[[pa.Array, pa.Field], object] = fit_column,
) -> tuple[int, str]:
    """The first row that does not fit, and why, found by bisection, because checking every row on
    its own would take long. `error` is the error of the whole column.
    """
    reason, low, high = str(error), 0, len(array)
    while low < high:
        middle = (low + high) // 2
        try:
            fits(array.slice(low, middle + 1 - low), field)
            low = middle + 1
        except (Misfit, pa.ArrowException) as narrower:
            reason, high = str(narrower), middle
    return min(low, max(len(array) - 1, 0)), reason


# Constraints beyond the Arrow type


def needs_check(field: pa.Field) -> bool:
    """Whether a column of exactly this type can still violate the schema: a null where NOT NULL is
    declared, a text that is too long, a time that is too fine.
    """
    kind = field.type
    if not field.nullable or length_limit(field) is not None or time_precision(field) is not None:
        return True
    if types.is_map(kind):
        return True  # its keys must not be null
    return bool(types.is_nested(kind)) and any(
        needs_check(kind.field(position)) for position in range(kind.num_fields)
    )


def check_column(array: pa.Array, field: pa.Field) -> None:
    """Misfit if there are nulls in NOT NULL columns, texts longer than declared, or times finer
    than declared, at any depth.
    """
    if not field.nullable and array.null_count:
        raise Misfit("it is null, but the column is NOT NULL")
    if (limit := length_limit(field)) is not None and (
        pc.max(pc.utf8_length(array)).as_py() or 0
    ) > limit:
        raise Misfit(f"it has more than the {limit} characters declared")
    if (precision := time_precision(field)) is not None:
        _check_time(array, precision)
    for child, part in _children(array, field.type):
        try:
            check_column(child, part)
        except Misfit as error:
            raise Misfit(f"in {part.name!r}: {error}") from None


def _children(array: pa.Array, kind: pa.DataType) -> list[tuple[pa.Array, pa.Field]]:
    """The parts of a nested column that can violate the schema, without the parts of nulls."""
    if types.is_map(kind):
        parts = list(zip(map_entries(array), (kind.key_field, kind.item_field), strict=True))
    elif types.is_list(kind):
        parts = [(list_elements(array), kind.value_field)]
    elif types.is_struct(kind):
        present = array.drop_null() if array.null_count else array
        parts = list(zip(present.flatten(), kind, strict=True))
    else:
        return []
    return [(child, part) for child, part in parts if needs_check(part)]


def _check_time(array: pa.Array, precision: int) -> None:
    """Misfit if a time has more digits of a second than declared: Spark would silently truncate
    it.
    """
    nanoseconds = array.drop_null().cast(pa.int64()).to_numpy()
    if np.any(nanoseconds % 10 ** (9 - precision)):
        raise Misfit(f"it is finer than the {precision} digits of a second declared")


# Casts that lose nothing


def cast_losslessly(array: pa.Array, field: pa.Field) -> pa.Array:
    """`array` with the type of `field`, every value unchanged, or Misfit."""
    source, target = array.type, field.type
    if source.equals(target) and not types.is_nested(target):
        return array
    if types.is_null(source):
        return pa.nulls(len(array), target)
    if types.is_dictionary(source):
        return cast_losslessly(array.dictionary_decode(), field)
    if types.is_run_end_encoded(source):
        return cast_losslessly(pc.run_end_decode(array), field)
    if types.is_nested(target):
        return _cast_nested(array, field)
    for is_target, step in _CASTS:
        if is_target(target) and (fitted := step(array, target)) is not None:
            return fitted
    raise _mismatch(source, target)


def _mismatch(source: pa.DataType, target: pa.DataType) -> Misfit:
    return Misfit(
        f"the rows have it as Arrow's {source}, the topic as {target}, and that is not cast without"
        " loss or guessing"
    )


Cast = Callable[[pa.Array, pa.DataType], pa.Array | None]


def _from(*sources: Callable[[pa.DataType], bool]) -> Cast:
    """A safe cast, in which Arrow checks for overflow and lost digits, from some types only."""

    def step(array: pa.Array, target: pa.DataType) -> pa.Array | None:
        return array.cast(target) if any(is_source(array.type) for is_source in sources) else None

    return step


def _to_float32(array: pa.Array, target: pa.DataType) -> pa.Array | None:
    if not types.is_float64(array.type):
        return _from(types.is_integer, types.is_floating)(array, target)
    fitted = array.cast(target)
    same = pc.or_(pc.equal(fitted.cast(array.type), array), pc.is_nan(array))
    if pc.all(same).as_py() is False:
        raise Misfit(
            "it has more digits than a FLOAT holds; round it to 32 bits first, or declare DOUBLE"
        )
    return fitted


def _to_decimal(array: pa.Array, target: pa.DataType) -> pa.Array | None:
    if types.is_integer(array.type):
        array = array.cast(pa.decimal128(20, 0))
    return array.cast(target) if types.is_decimal(array.type) else None


def _to_date(array: pa.Array, target: pa.DataType) -> pa.Array | None:
    if not types.is_date64(array.type):
        return None
    if np.any(array.drop_null().cast(pa.int64()).to_numpy() % _MS_PER_DAY):
        raise Misfit("it is not a whole day")
    return array.cast(target)


def _to_timestamp(array: pa.Array, target: pa.DataType) -> pa.Array | None:
    if not types.is_timestamp(array.type):
        return None
    if target.tz is None and array.type.tz is not None:
        raise Misfit("it has a time zone, and a TIMESTAMP_NTZ has none")
    return array.cast(target)  # a time without a zone is read as UTC


_CASTS: tuple[tuple[Callable[[pa.DataType], bool], Cast], ...] = (
    (types.is_integer, _from(types.is_integer)),
    (types.is_float64, _from(types.is_integer, types.is_floating)),
    (types.is_float32, _to_float32),
    (types.is_decimal, _to_decimal),
    (types.is_string, _from(types.is_large_string, types.is_string_view)),
    (
        types.is_binary,
        _from(types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary),
    ),
    (types.is_date32, _to_date),
    (types.is_timestamp, _to_timestamp),
    (types.is_time64, _from(types.is_time)),
    (types.is_duration, _from(types.is_duration)),
)


def _cast_nested(array: pa.Array, field: pa.Field) -> pa.Array:
    source, target = array.type, field.type
    if types.is_struct(target) and types.is_struct(source):
        present = [child.name for child in array.type]
        wanted = [child.name for child in target]
        if sorted(present) != sorted(wanted):
            raise Misfit(f"it has the fields {', '.join(present)}, not {', '.join(wanted)}")
        parts = array.flatten()
        children = [cast_losslessly(parts[present.index(child.name)], child) for child in target]
        return pa.StructArray.from_arrays(children, fields=list(target), mask=_mask(array))
    if types.is_map(target) and types.is_map(source):
        keys, items = map_entries(array)
        parts = cast_losslessly(keys, target.key_field), cast_losslessly(items, target.item_field)
        return pa.MapArray.from_arrays(
            compact_offsets(array), *parts, type=target, mask=_mask(array)
        )
    if types.is_list(target) and not types.is_map(source) and _is_list(source):
        return pa.ListArray.from_arrays(
            compact_offsets(array),
            cast_losslessly(list_elements(array), target.value_field),
            type=target,
            mask=_mask(array),
        )
    raise _mismatch(source, target)


def _is_list(kind: pa.DataType) -> bool:
    return any(
        is_kind(kind)
        for is_kind in (
            types.is_list,
            types.is_large_list,
            types.is_fixed_size_list,
            types.is_list_view,
        )
    )


def _mask(array: pa.Array) -> pa.BooleanArray | None:
    return array.is_null() if array.null_count else None


def plain_copy(value: Any) -> Any:
    """A Python value whose lists and dictionaries are others than the original's."""
    if isinstance(value, list):
        return [plain_copy(element) for element in value]
    if isinstance(value, dict):
        return {key: plain_copy(element) for key, element in value.items()}
    return value
