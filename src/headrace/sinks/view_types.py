"""Arrow columns as the values that SQLite stores, and back, exactly. The view store writes and reads every row through here.

| Arrow (Spark)                    | SQLite                                                    | in SQL                                        |
|----------------------------------|-----------------------------------------------------------|-----------------------------------------------|
| BOOLEAN, whole numbers           | INTEGER                                                   | as they are; true is 1                        |
| FLOAT, DOUBLE                    | REAL; NaN as the text `NaN`, which SQLite would make null | NaN sorts behind all numbers, as in Spark     |
| DECIMAL                          | TEXT with all digits of the scale                         | sorts as text: compare CAST(x AS REAL)        |
| STRING, BINARY                   | TEXT, BLOB                                                | as they are                                   |
| DATE, TIME, TIMESTAMP            | TEXT in ISO 8601, with microseconds, `Z` if it has a zone | sort and compare as times                     |
| INTERVAL                         | INTEGER, microseconds                                     |                                               |
| ARRAY, MAP, STRUCT and the like  | TEXT, JSON as the log writes it                           | json_extract, json_each                       |

A date or timestamp outside the years 0001 to 9999 has no ISO text that compares; it is stored as its number of days or microseconds with a sign, such as
`+253402300800000000`. A column of floats has no affinity in SQLite, because REAL affinity turns -0.0 into 0.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.log.json_text import json_text
from headrace.sinks.view_nested import nested_array, nested_text
from headrace.sinks.view_times import is_time_text, time_array, time_text

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

_FROM_VALUES: tuple[tuple[Callable[[pa.DataType], bool], Callable[[list[Any], pa.DataType], pa.Array]], ...] = (
    (pa.types.is_boolean, _through(pa.int8())),
    (pa.types.is_floating, _floats),
    (pa.types.is_duration, _through(pa.int64())),
    (pa.types.is_decimal, _through(pa.string())),
    (is_time_text, lambda values, kind: time_array(pa.array(values, pa.string()), kind)),
    (pa.types.is_nested, nested_array),
)
