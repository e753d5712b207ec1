"""Arrow columns as the text that Postgres's COPY reads, the types they are declared with, and the way back.

| Arrow (Spark)                   | Postgres                                     |
|---------------------------------|----------------------------------------------|
| BOOLEAN, FLOAT, DOUBLE          | boolean, real, double precision              |
| TINYINT, SMALLINT, INT, BIGINT  | smallint, smallint, integer, bigint          |
| DECIMAL(p, s)                   | numeric(p, s)                                |
| STRING, BINARY                  | text, bytea                                  |
| DATE, TIMESTAMP, TIMESTAMP_NTZ  | date, timestamptz, timestamp                 |
| TIME                            | time                                         |
| INTERVAL                        | bigint, microseconds                         |
| ARRAY, MAP, STRUCT and the like | json, as the log writes it                   |
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.csv

from headrace.log.json_text import json_text
from headrace.sinks.view_nested import nested_array, nested_text
from headrace.sinks.view_times import is_time_text, time_text

_PLAIN = {
    pa.bool_(): "boolean", pa.int8(): "smallint", pa.int16(): "smallint", pa.int32(): "integer", pa.int64(): "bigint", pa.float32(): "real",
    pa.float64(): "double precision", pa.string(): "text", pa.binary(): "bytea", pa.date32(): "date",
}  # fmt: skip


def type_in_postgres(kind: pa.DataType) -> str:
    if kind in _PLAIN:
        return _PLAIN[kind]
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision}, {kind.scale})"
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz is None else "timestamptz"
    if pa.types.is_time(kind):
        return "time"
    if pa.types.is_duration(kind):
        return "bigint"
    return "json" if pa.types.is_nested(kind) else "text"


def to_csv(rows: pa.Table) -> memoryview:
    """For COPY … (FORMAT csv): nulls are empty, texts are quoted."""
    texts = pa.table([_text(column.combine_chunks()) for column in rows.columns], names=rows.column_names)
    buffer = pa.BufferOutputStream()
    pa.csv.write_csv(texts, buffer, pa.csv.WriteOptions(include_header=False))
    return memoryview(buffer.getvalue())


def _text(array: pa.Array) -> pa.Array:
    kind = array.type
    if pa.types.is_binary(kind):
        return pa.array([None if value is None else "\\x" + value.hex() for value in array.to_pylist()], pa.string())
    if is_time_text(kind):
        return time_text(array)
    if pa.types.is_decimal(kind):
        return array.cast(pa.string())
    if pa.types.is_duration(kind):
        return array.cast(pa.int64())
    if pa.types.is_nested(kind):
        return nested_text(array)
    return array if kind in _PLAIN else json_text(array)


def from_postgres(values: list[Any], kind: pa.DataType) -> pa.Array:
    """The column of a type, from what the driver gives (nested ones as text)."""
    if pa.types.is_nested(kind):
        return nested_array(values, kind)
    if pa.types.is_duration(kind):
        return pa.array(values, pa.int64()).cast(kind)
    if pa.types.is_floating(kind):
        return pa.array(values, pa.float64(), from_pandas=False).cast(kind)
    return pa.array(values, kind)
