"""Arrow columns as the values that SQLite stores, and back, exactly. The view store writes and
reads every row through here.

| Arrow (Spark)                    | SQLite                                                    | in
SQL                                        |
|----------------------------------|-----------------------------------------------------------|-----------------------------------------------|
| BOOLEAN, whole numbers           | INTEGER                                                   | as
they are; true is 1                        |
| FLOAT, DOUBLE                    | REAL; NaN as the text `NaN`, which SQLite would make null | NaN
sorts behind all numbers, as in Spark     |
| DECIMAL                          | TEXT with all digits of the scale                         |
sorts as text: compare CAST(x AS REAL)        |
| STRING, BINARY                   | TEXT, BLOB                                                | as
they are                                   |
| DATE, TIME, TIMESTAMP            | TEXT in ISO 8601, with microseconds, `Z` if it has a zone |
sort and compare as times                     |
| INTERVAL                         | INTEGER, microseconds                                     |
|
| ARRAY, MAP, STRUCT and the like  | TEXT, JSON as the log writes it                           |
json_extract, json_each                       |

A date or timestamp outside the years 0001 to 9999 has no ISO text that compares; it is stored as
its number of days or microseconds with a sign, such as `+253402300800000000`. A column of floats
has no affinity in SQLite, because REAL affinity turns -0.0 into 0.0.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import compact_offsets, elements, entries
from headrace.types.json_codec import json_text

# Dates, times and timestamps as text that sorts as they do, and back: for a view's columns and for
# what stands inside its nested ones.


_NUMBER = r"^[+-][0-9]+$"
_DAY_US = 24 * 3600 * 1_000_000
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896  # 0001-01-01 and 9999-12-31


def is_time_text(kind: pa.DataType) -> bool:
    """DATE, TIME and TIMESTAMP; an INTERVAL is a number."""
    return bool(pa.types.is_temporal(kind)) and not pa.types.is_duration(kind)


def time_text(array: pa.Array) -> pa.StringArray:
    """ISO 8601, as the log writes it in JSON; a signed number of days or microseconds for years
    that need more or fewer than four digits.
    """
    if pa.types.is_time(array.type):
        return _iso(array)
    numbers = array.cast(pa.int32() if pa.types.is_date(array.type) else pa.int64())
    first, last = _bounds(array.type)
    fits = pc.and_(pc.greater_equal(numbers, first), pc.less_equal(numbers, last))
    if pc.all(fits).as_py() is not False:
        return _iso(array)
    signed = pc.if_else(
        pc.less(numbers, 0),
        numbers.cast(pa.string()),
        pc.binary_join_element_wise("+", numbers.cast(pa.string()), ""),
    )
    return pc.if_else(fits, _iso(pc.if_else(fits, array, pa.scalar(None, array.type))), signed)


def time_array(texts: pa.StringArray, kind: pa.DataType) -> pa.Array:
    """The inverse of `time_text`."""
    if pa.types.is_time(
        kind
    ):  # Arrow reads no times of day, but it reads them with a date in front
        return (
            pc.binary_join_element_wise("1970-01-01T", texts, "")
            .cast(pa.timestamp("ns"))
            .cast(kind)
        )
    is_number = pc.match_substring_regex(texts, _NUMBER)
    if not pc.any(is_number).as_py():
        return texts.cast(kind)
    missing = pa.scalar(None, pa.string())
    digits = pc.utf8_ltrim(pc.if_else(is_number, texts, missing), characters="+")
    numbers = digits.cast(pa.int32() if pa.types.is_date(kind) else pa.int64()).cast(kind)
    return pc.coalesce(pc.if_else(is_number, missing, texts).cast(kind), numbers)


def _bounds(kind: pa.DataType) -> tuple[int, int]:
    if pa.types.is_date(kind):
        return _FIRST_DAY, _LAST_DAY
    return _FIRST_DAY * _DAY_US, (_LAST_DAY + 1) * _DAY_US - 1


def _iso(array: pa.Array) -> pa.StringArray:
    return pc.utf8_trim(json_text(array), characters='"')


# Arrays, maps and structs as JSON text, and the exact way back. Used by `view_types.py` for a
# view's nested columns.
#
# The text is the log's own (`log/json_text.py`), so SQLite's JSON functions can look inside. On the
# way back every number is read as text first and cast to its own type once, so that no digit is
# lost.


Leaf = Callable[[pa.Array, pa.DataType], pa.Array]


def nested_text(array: pa.Array) -> pa.StringArray:
    """The JSON of each value; null where the value is."""
    return json_text(
        _rebuilt(array, array.type, _time_as_text, exact=False)
        if _holds_times(array.type)
        else array
    )


def nested_array(texts: list[str | None], kind: pa.DataType) -> pa.Array:
    """The inverse of `nested_text`."""
    parsed = [
        (
            None
            if text is None
            else json.loads(text, object_pairs_hook=list, parse_int=str, parse_float=str)
        )
        for text in texts
    ]
    if _holds_pairs(kind):
        parsed = [_with_tuples(value, kind) for value in parsed]
    return _rebuilt(pa.array(parsed, _wire_type(kind)), kind, _from_wire, exact=True)


def _holds_times(kind: pa.DataType) -> bool:
    return any(is_time_text(child) or _holds_times(child) for child in _children(kind))


def _holds_pairs(kind: pa.DataType) -> bool:
    """Whether there is a map whose keys are not strings, which JSON writes as an array of pairs."""
    return (pa.types.is_map(kind) and not pa.types.is_string(kind.key_type)) or any(
        map(_holds_pairs, _children(kind))
    )


def _children(kind: pa.DataType) -> list[pa.DataType]:
    if pa.types.is_map(kind):
        return [kind.key_type, kind.item_type]
    return [kind.field(position).type for position in range(kind.num_fields)]


def _wire_type(kind: pa.DataType) -> pa.DataType:
    """What the parsed JSON of a type is read as: text at every leaf that is not a boolean."""
    if pa.types.is_map(kind):
        return pa.map_(_wire_type(kind.key_type), _wire_type(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(_wire_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(child.name, _wire_type(child.type)) for child in kind])
    return kind if pa.types.is_boolean(kind) else pa.string()


def _with_tuples(value: Any, kind: pa.DataType) -> Any:
    """A parsed value with the pairs of its maps as tuples, which is how Arrow knows them. Objects
    are lists of tuples already.
    """
    if value is None or not pa.types.is_nested(kind):
        return value
    if pa.types.is_map(kind):
        return [
            (_with_tuples(key, kind.key_type), _with_tuples(item, kind.item_type))
            for key, item in value
        ]
    if pa.types.is_list(kind):
        return [_with_tuples(item, kind.value_type) for item in value]
    return [(name, _with_tuples(item, kind.field(name).type)) for name, item in value]


def _rebuilt(array: pa.Array, kind: pa.DataType, leaf: Leaf, *, exact: bool) -> pa.Array:
    """The same shape with `leaf` applied at every end. `kind` is the column's own type; with
    `exact`, the result has it.
    """
    declared = kind if exact else None
    nulls = array.is_null() if array.null_count else None
    if pa.types.is_map(kind):
        keys, items = entries(array)
        parts = (
            _rebuilt(keys, kind.key_type, leaf, exact=exact),
            _rebuilt(items, kind.item_type, leaf, exact=exact),
        )
        return pa.MapArray.from_arrays(_offsets_with_nulls(array), *parts, type=declared)
    if pa.types.is_list(kind):
        values = _rebuilt(elements(array), kind.value_type, leaf, exact=exact)
        return pa.ListArray.from_arrays(compact_offsets(array), values, type=declared, mask=nulls)
    if not pa.types.is_struct(kind):
        return leaf(array, kind)
    if kind.num_fields == 0:
        return array
    parts = tuple(
        _rebuilt(part, child.type, leaf, exact=exact)
        for part, child in zip(array.flatten(), kind, strict=True)
    )
    fields = (
        list(kind)
        if exact
        else [pa.field(child.name, part.type) for child, part in zip(kind, parts, strict=True)]
    )
    return pa.StructArray.from_arrays(list(parts), fields=fields, mask=nulls)


def _offsets_with_nulls(array: pa.MapArray) -> pa.Int32Array:
    """A null offset is a null map to `MapArray.from_arrays`, which takes no mask in every version
    that is supported.
    """
    offsets = compact_offsets(array)
    if not array.null_count:
        return offsets
    starts_null = pa.array(np.append(array.is_null().to_numpy(zero_copy_only=False), [False]))
    return pc.if_else(starts_null, pa.scalar(None, pa.int32()), offsets)


def _time_as_text(array: pa.Array, kind: pa.DataType) -> pa.Array:
    return time_text(array) if is_time_text(kind) else array


def _from_wire(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    if is_time_text(kind):
        return time_array(texts, kind)
    if pa.types.is_binary(kind):
        return pa.array(
            [None if text is None else base64.b64decode(text) for text in texts.to_pylist()], kind
        )
    if pa.types.is_duration(kind):
        return texts.cast(pa.int64()).cast(kind)
    return texts.cast(kind)


_NAN = "NaN"


def affinity(kind: pa.DataType) -> str:
    """The type that a column is declared with: one that leaves every value as it was bound."""
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_duration(kind):
        return "INTEGER"
    if pa.types.is_binary(kind):
        return "BLOB"
    return "" if pa.types.is_floating(kind) else "TEXT"


def to_values(array: pa.Array) -> list[Any]:
    """What is bound for each element of a column."""
    for is_kind, convert in _TO_VALUES:
        if is_kind(array.type):
            return convert(array)
    values: list[Any] = array.to_pylist()
    return values


def from_values(values: list[Any], kind: pa.DataType) -> pa.Array:
    """The column of a type whose stored values these are."""
    for is_kind, convert in _FROM_VALUES:
        if is_kind(kind):
            return convert(values, kind)
    return pa.array(values, kind)


def _listed(convert: Callable[[pa.Array], pa.Array]) -> Callable[[pa.Array], list[Any]]:
    return lambda array: convert(array).to_pylist()


def _float_values(array: pa.Array) -> list[Any]:
    values: list[Any] = array.to_pylist()
    if pc.any(pc.is_nan(array)).as_py():
        return [_NAN if value != value else value for value in values]  # noqa: PLR0124 - only NaN is not itself
    return values


def _floats(values: list[Any], kind: pa.DataType) -> pa.Array:
    if _NAN in values:
        values = [float("nan") if value == _NAN else value for value in values]
    return pa.array(values, pa.float64(), from_pandas=False).cast(kind)


def _decimal_text(array: pa.Array) -> pa.StringArray:
    return pc.utf8_trim(json_text(array), characters='"')


def _through(stored: pa.DataType) -> Callable[[list[Any], pa.DataType], pa.Array]:
    return lambda values, kind: pa.array(values, stored).cast(kind)


_TO_VALUES: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], list[Any]]], ...] = (
    (pa.types.is_boolean, _listed(lambda array: array.cast(pa.int8()))),
    (pa.types.is_floating, _float_values),
    (pa.types.is_duration, _listed(lambda array: array.cast(pa.int64()))),
    (pa.types.is_decimal, _listed(_decimal_text)),
    (is_time_text, _listed(time_text)),
    (pa.types.is_nested, _listed(nested_text)),
)

_FROM_VALUES: tuple[
    tuple[Callable[[pa.DataType], bool], Callable[[list[Any], pa.DataType], pa.Array]], ...
] = (
    (pa.types.is_boolean, _through(pa.int8())),
    (pa.types.is_floating, _floats),
    (pa.types.is_duration, _through(pa.int64())),
    (pa.types.is_decimal, _through(pa.string())),
    (is_time_text, lambda values, kind: time_array(pa.array(values, pa.string()), kind)),
    (pa.types.is_nested, nested_array),
)
