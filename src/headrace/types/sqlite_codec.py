"""Converts Arrow columns to the values that SQLite stores, and back without loss. The view store
writes and reads every row through this module.

    Arrow (Spark)           SQLite
    BOOLEAN, whole numbers  INTEGER; true is 1
    FLOAT, DOUBLE           REAL; NaN as the text `NaN`, because SQLite would store null; it sorts
                            after all numbers, as in Spark
    DECIMAL                 TEXT with all digits of the scale
    STRING, BINARY          TEXT, BLOB
    DATE, TIME, TIMESTAMP   TEXT in ISO 8601 with microseconds, and `Z` if the type has a zone
    INTERVAL                INTEGER, microseconds
    ARRAY, MAP, STRUCT, …   TEXT, JSON as the log writes it

In a key, values are stored so that SQLite sorts them as numbers and times:

    DECIMAL, to 18 digits   INTEGER, without its point: 9.50 is 950
    DECIMAL, to 38 digits   BLOB of 16 bytes, big-endian, sign bit flipped
    DATE, TIMESTAMP         INTEGER, days or microseconds
    a null                  a value of a kind that the column never has; it sorts after all values,
                            in a BINARY column before them

A date or timestamp outside the years 0001 to 9999 has no ISO text that compares as a time; it is
stored as its signed number of days or microseconds, such as `+253402300800000000`. A column of
floats has no affinity in SQLite, because REAL affinity turns -0.0 into 0.0.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import (
    compact_offsets,
    fixed_width_values,
    list_elements,
    map_entries,
)
from headrace.columnar.keys import ordered_bytes
from headrace.types.json_codec import json_text

# Dates, times and timestamps


_NUMBER = r"^[+-][0-9]+$"
_DAY_US = 24 * 3600 * 1_000_000
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896  # 0001-01-01 and 9999-12-31


def is_time_text(kind: pa.DataType) -> bool:
    """Whether a type is stored as ISO text: DATE, TIME or TIMESTAMP. An INTERVAL is a number."""
    return bool(pa.types.is_temporal(kind)) and not pa.types.is_duration(kind)


def time_text(array: pa.Array) -> pa.StringArray:
    """Dates or times as text that sorts as they do: ISO 8601, as the log writes it in JSON, or a
    signed number of days or microseconds for years without exactly four digits.
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
    if pa.types.is_time(kind):  # Arrow parses a time of day only with a date in front
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


# Arrays, maps and structs
#
# The JSON is that of the log (`types/json_codec.py`), so SQLite's JSON functions can look inside.
# On the way back every number is read as text and cast to its own type once, so that no digit is
# lost.


LeafFunction = Callable[[pa.Array, pa.DataType], pa.Array]


def nested_text(array: pa.Array) -> pa.StringArray:
    """The JSON text of each value, or null for a null."""
    return json_text(
        _map_leaves(array, array.type, _time_as_text, exact=False)
        if _contains_times(array.type)
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
    if _contains_pair_maps(kind):
        parsed = [_pairs_to_tuples(value, kind) for value in parsed]
    return _map_leaves(pa.array(parsed, _wire_type(kind)), kind, _parse_leaf, exact=True)


def _contains_times(kind: pa.DataType) -> bool:
    return any(is_time_text(child) or _contains_times(child) for child in _children(kind))


def _contains_pair_maps(kind: pa.DataType) -> bool:
    """Whether a type contains a map whose keys are not strings, which JSON writes as pairs."""
    return (pa.types.is_map(kind) and not pa.types.is_string(kind.key_type)) or any(
        map(_contains_pair_maps, _children(kind))
    )


def _children(kind: pa.DataType) -> list[pa.DataType]:
    if pa.types.is_map(kind):
        return [kind.key_type, kind.item_type]
    return [kind.field(position).type for position in range(kind.num_fields)]


def _wire_type(kind: pa.DataType) -> pa.DataType:
    """The type as which parsed JSON is read: text at every leaf that is not a boolean."""
    if pa.types.is_map(kind):
        return pa.map_(_wire_type(kind.key_type), _wire_type(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(_wire_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(child.name, _wire_type(child.type)) for child in kind])
    return kind if pa.types.is_boolean(kind) else pa.string()


def _pairs_to_tuples(value: Any, kind: pa.DataType) -> Any:
    """A parsed value with the pairs of its maps as tuples, as Arrow expects them. Objects are lists
    of tuples already.
    """
    if value is None or not pa.types.is_nested(kind):
        return value
    if pa.types.is_map(kind):
        return [
            (_pairs_to_tuples(key, kind.key_type), _pairs_to_tuples(item, kind.item_type))
            for key, item in value
        ]
    if pa.types.is_list(kind):
        return [_pairs_to_tuples(item, kind.value_type) for item in value]
    return [(name, _pairs_to_tuples(item, kind.field(name).type)) for name, item in value]


def _map_leaves(array: pa.Array, kind: pa.DataType, leaf: LeafFunction, *, exact: bool) -> pa.Array:
    """Apply `leaf` to every leaf of a nested array. `kind` is the column's type; with `exact` the
    result has that type too.
    """
    declared = kind if exact else None
    nulls = array.is_null() if array.null_count else None
    if pa.types.is_map(kind):
        keys, items = map_entries(array)
        parts = (
            _map_leaves(keys, kind.key_type, leaf, exact=exact),
            _map_leaves(items, kind.item_type, leaf, exact=exact),
        )
        return pa.MapArray.from_arrays(_offsets_with_nulls(array), *parts, type=declared)
    if pa.types.is_list(kind):
        values = _map_leaves(list_elements(array), kind.value_type, leaf, exact=exact)
        return pa.ListArray.from_arrays(compact_offsets(array), values, type=declared, mask=nulls)
    if not pa.types.is_struct(kind):
        return leaf(array, kind)
    if kind.num_fields == 0:
        return array
    parts = tuple(
        _map_leaves(part, child.type, leaf, exact=exact)
        for part, child in zip(array.flatten(), kind, strict=True)
    )
    fields = (
        list(kind)
        if exact
        else [pa.field(child.name, part.type) for child, part in zip(kind, parts, strict=True)]
    )
    return pa.StructArray.from_arrays(list(parts), fields=fields, mask=nulls)


def _offsets_with_nulls(array: pa.MapArray) -> pa.Int32Array:
    """Offsets with a null for each null map: some supported versions of `MapArray.from_arrays` take
    no mask.
    """
    offsets = compact_offsets(array)
    if not array.null_count:
        return offsets
    starts_null = pa.array(np.append(array.is_null().to_numpy(zero_copy_only=False), [False]))
    return pc.if_else(starts_null, pa.scalar(None, pa.int32()), offsets)


def _time_as_text(array: pa.Array, kind: pa.DataType) -> pa.Array:
    return time_text(array) if is_time_text(kind) else array


def _parse_leaf(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    if is_time_text(kind):
        return time_array(texts, kind)
    if pa.types.is_binary(kind):
        return pa.array(
            [None if text is None else base64.b64decode(text) for text in texts.to_pylist()], kind
        )
    if pa.types.is_duration(kind):
        return texts.cast(pa.int64()).cast(kind)
    return texts.cast(kind)


# Columns


_NAN = "NaN"


def affinity(kind: pa.DataType) -> str:
    """The SQLite type of a column: one that stores every value as it was bound."""
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_duration(kind):
        return "INTEGER"
    if pa.types.is_binary(kind):
        return "BLOB"
    return "" if pa.types.is_floating(kind) else "TEXT"


def to_values(array: pa.Array) -> list[Any]:
    """The SQLite value of each element of a column."""
    for is_kind, convert in _TO_VALUES:
        if is_kind(array.type):
            return convert(array)
    values: list[Any] = array.to_pylist()
    return values


def from_values(values: list[Any], kind: pa.DataType) -> pa.Array:
    """The column of a type, made of its SQLite values: the inverse of `to_values`."""
    for is_kind, convert in _FROM_VALUES:
        if is_kind(kind):
            return convert(values, kind)
    return pa.array(values, kind)


def _to_list(convert: Callable[[pa.Array], pa.Array]) -> Callable[[pa.Array], list[Any]]:
    return lambda array: convert(array).to_pylist()


def _float_values(array: pa.Array) -> list[Any]:
    values: list[Any] = array.to_pylist()
    if pc.any(pc.is_nan(array)).as_py():
        return [_NAN if value != value else value for value in values]  # noqa: PLR0124 - only NaN is not itself
    return values


def _floats_from_values(values: list[Any], kind: pa.DataType) -> pa.Array:
    if _NAN in values:
        values = [float("nan") if value == _NAN else value for value in values]
    return pa.array(values, pa.float64(), from_pandas=False).cast(kind)


def _decimal_text(array: pa.Array) -> pa.StringArray:
    return pc.utf8_trim(json_text(array), characters='"')


def _cast_from(stored: pa.DataType) -> Callable[[list[Any], pa.DataType], pa.Array]:
    return lambda values, kind: pa.array(values, stored).cast(kind)


_TO_VALUES: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], list[Any]]], ...] = (
    (pa.types.is_boolean, _to_list(lambda array: array.cast(pa.int8()))),
    (pa.types.is_floating, _float_values),
    (pa.types.is_duration, _to_list(lambda array: array.cast(pa.int64()))),
    (pa.types.is_decimal, _to_list(_decimal_text)),
    (is_time_text, _to_list(time_text)),
    (pa.types.is_nested, _to_list(nested_text)),
)

_FROM_VALUES: tuple[
    tuple[Callable[[pa.DataType], bool], Callable[[list[Any], pa.DataType], pa.Array]], ...
] = (
    (pa.types.is_boolean, _cast_from(pa.int8())),
    (pa.types.is_floating, _floats_from_values),
    (pa.types.is_duration, _cast_from(pa.int64())),
    (pa.types.is_decimal, _cast_from(pa.string())),
    (is_time_text, lambda values, kind: time_array(pa.array(values, pa.string()), kind)),
    (pa.types.is_nested, nested_array),
)


# Keys


_INTEGER_DIGITS = 18
_DECIMAL_BYTES = 16
_NULL_DECIMAL = b"\xff"


def key_affinity(kind: pa.DataType) -> str:
    """The SQLite type of a key column: one in which stored values sort as the column's do."""
    if _is_integer_key(kind):
        return "INTEGER"
    return "BLOB" if pa.types.is_decimal(kind) else affinity(kind)


def to_key_values(array: pa.Array) -> list[Any]:
    """The SQLite value of each element of a key column. SQLite sorts them as the column's values
    sort; a null is None.
    """
    kind = array.type
    if pa.types.is_decimal(kind):
        present = array.drop_null()
        if kind.precision <= _INTEGER_DIGITS:
            words = fixed_width_values(present, "<i8").reshape(-1, 2)[:, 0].tolist()
        else:
            encoded = ordered_bytes(present)
            words = [row.tobytes() for row in encoded]
        return _with_nulls(words, array)
    if _is_integer_key(kind):
        values: list[Any] = array.cast(_integer_type(kind)).to_pylist()
        return values
    return to_values(array)


def from_key_values(values: list[Any], kind: pa.DataType) -> pa.Array:
    """The column of a type, made of the SQLite values of a key: the inverse of `to_key_values`."""
    if pa.types.is_decimal(kind):
        words = np.zeros((len(values), 2), "<i8")
        if kind.precision <= _INTEGER_DIGITS:
            words[:, 0] = [0 if value is None else value for value in values]
            words[:, 1] = words[:, 0] >> 63
        elif values:
            zero = bytes(_DECIMAL_BYTES)
            big = np.frombuffer(
                b"".join(zero if value is None else value for value in values), ">u8"
            ).reshape(-1, 2)
            words[:, 0] = big[:, 1].astype("<u8").view("<i8")
            words[:, 1] = (big[:, 0] ^ np.uint64(1 << 63)).astype("<u8").view("<i8")
        is_valid = pa.array([value is not None for value in values], pa.bool_())
        decimals = pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(words.tobytes())])
        return pc.if_else(is_valid, decimals, pa.scalar(None, kind))
    if _is_integer_key(kind):
        return pa.array(values, _integer_type(kind)).cast(kind)
    return from_values(values, kind)


def null_key(kind: pa.DataType) -> Any:
    """The stand-in for a null in a key column of a type. No value of the type is stored like it."""
    if pa.types.is_decimal(kind) and kind.precision > _INTEGER_DIGITS:
        return _NULL_DECIMAL
    return 0 if pa.types.is_binary(kind) else b""


def _is_integer_key(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_date(kind)
        or pa.types.is_timestamp(kind)
        or (pa.types.is_decimal(kind) and kind.precision <= _INTEGER_DIGITS)
    )


def _integer_type(kind: pa.DataType) -> pa.DataType:
    return pa.int32() if pa.types.is_date(kind) else pa.int64()


def _with_nulls(present: list[Any], array: pa.Array) -> list[Any]:
    if not array.null_count:
        return present
    values = iter(present)
    return [next(values) if is_valid else None for is_valid in array.is_valid().to_pylist()]
