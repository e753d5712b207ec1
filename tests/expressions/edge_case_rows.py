"""Rows on which expressions go wrong: least and greatest values, zeros, NaN, infinities, texts that
are no numbers, times at the ends of time, nulls.
"""

import random
from decimal import Decimal
from typing import Any

import pyarrow as pa

from headrace.types.schema import parse_schema

DDL = (
    "a INT, b BIGINT, t TINYINT, h SMALLINT, d DOUBLE, f FLOAT, m DECIMAL(10,2), w DECIMAL(38,10),"
    " s STRING, n STRING, ts TIMESTAMP, ntz TIMESTAMP_NTZ, dt DATE, arr ARRAY<INT>, names"
    " ARRAY<STRING>, mp MAP<STRING, INT>, st STRUCT<x: INT, y: STRING>, flag BOOLEAN, bin BINARY,"
    " iv INTERVAL DAY TO SECOND"
)
SCHEMA = parse_schema(DDL)
ROWS = 60
_LAST = 2**63 - 1
_VALUES: dict[str, list[Any]] = {
    "a": [0, 1, -1, 7, 2**31 - 1, -(2**31), 13, None],
    "b": [0, 1, -1, 5, _LAST, -(2**63), 10**12, None],
    "t": [0, 1, -1, 127, -128, None],
    "h": [0, -1, 32767, -32768, None, 300],
    "d": [
        0.0,
        -0.0,
        1.5,
        -2.5,
        float("nan"),
        float("inf"),
        -float("inf"),
        1e308,
        1e-300,
        3e9,
        None,
    ],
    "f": [0.0, 1.5, -3.25, float("nan"), float("inf"), 3e38, None],
    "m": [
        Decimal("0.00"),
        Decimal("1.50"),
        Decimal("-99999999.99"),
        Decimal("99999999.99"),
        Decimal("0.01"),
        None,
    ],
    "w": [
        Decimal(0),
        Decimal("9" * 28 + "." + "9" * 10),
        Decimal("-1.5"),
        Decimal("3.0000000001"),
        Decimal(12345678901234567890),
        None,
    ],
    "s": [
        "",
        "abc",
        " 12 ",
        "12",
        "1e5",
        "2026-02-30",
        "2026-01-31",
        "2026-01-31 12:30:00",
        "true",
        "9" * 20,
        "ünï∆😀",
        "a,b,c",
        "%zz",
        "it's\\n",
        None,
    ],
    "n": ["1", "x", "-5", "", None, "3.7", "http://host.example/p?q=1", "2147483648"],
    "ts": [0, 1, -1, 10**15, 1767225599999999, 2**62, -(2**62), _LAST, 1 - 2**63, None],
    "ntz": [0, 10**15, -(10**15), None, 2**62],
    "dt": [0, 20000, -1, -719162, 2932896, 2**31 - 1, -(2**31), None],
    "arr": [[], [1], [1, 2, None], [5, 4, 3, 2, 1], None, [2**31 - 1]],
    "names": [[], ["a"], ["b", None, "a"], None],
    "mp": [[], [("a", 1)], [("a", None), ("b", 2)], None],
    "st": [{"x": 1, "y": "q"}, {"x": None, "y": None}, None, {"x": 2**31 - 1, "y": "z"}],
    "flag": [True, False, None],
    "bin": [b"", b"\x00\xff", b"abc", None],
    "iv": [0, 10**6, -86400 * 10**6, _LAST, 1 - 2**63, None],
}
_STORED_AS = {"ts": pa.int64(), "ntz": pa.int64(), "iv": pa.int64(), "dt": pa.int32()}


def edge_case_rows(seed: int = 1) -> pa.Table:
    """The values of each column, shuffled against each other, and a column `id` with the row's
    number.
    """
    shuffled = random.Random(seed)
    columns = []
    for field in SCHEMA:
        values = (_VALUES[field.name] * (ROWS // len(_VALUES[field.name]) + 1))[:ROWS]
        shuffled.shuffle(values)
        columns.append(pa.array(values, _STORED_AS.get(field.name, field.type)).cast(field.type))
    return pa.table(columns, schema=SCHEMA).append_column("id", pa.array(range(ROWS)))


def has_nulls(rows: pa.Table, columns: tuple[str, ...], row: int) -> bool:
    return any(not rows.column(name)[row].is_valid for name in columns)


def comparable(column: pa.ChunkedArray) -> list[Any]:
    """Values as Python compares them: times as numbers, since Python's end with the year 9999, and
    floating numbers as texts, so that NaN is NaN.
    """
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        return list(column.cast(pa.int64()).to_pylist())
    if pa.types.is_date(kind):
        return list(column.cast(pa.int32()).to_pylist())
    values = column.to_pylist()
    return [repr(value + 0.0) if isinstance(value, float) else value for value in values]
