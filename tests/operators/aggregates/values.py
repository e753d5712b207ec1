"""Values of every type that aggregates support, as Hypothesis strategies; and small tables."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
from hypothesis import strategies as st

from tests.operators.histories import doubles

MICROSECONDS = timedelta(days=10**6) // timedelta(microseconds=1)
EPOCH = datetime(1970, 1, 1, tzinfo=ZoneInfo("UTC"))
VALUES: dict[str, tuple[st.SearchStrategy[Any], pa.DataType]] = {
    "TINYINT": (st.integers(-128, 127), pa.int8()),
    "INT": (st.integers(-(1 << 31), (1 << 31) - 1), pa.int32()),
    "BIGINT": (
        st.integers(-(1 << 63), (1 << 63) - 1)
        | st.sampled_from([-(1 << 63), (1 << 63) - 1, 0, 1, -1]),
        pa.int64(),
    ),
    "DOUBLE": (doubles(), pa.float64()),
    "FLOAT": (st.floats(width=32), pa.float32()),
    "DECIMAL(10,2)": (
        st.integers(-(10**10) + 1, 10**10 - 1).map(lambda units: Decimal(units).scaleb(-2)),
        pa.decimal128(10, 2),
    ),
    "DECIMAL(38,0)": (st.integers(-(10**38) + 1, 10**38 - 1).map(Decimal), pa.decimal128(38, 0)),
    "INTERVAL": (
        st.integers(-MICROSECONDS, MICROSECONDS).map(lambda micros: timedelta(microseconds=micros)),
        pa.duration("us"),
    ),
    "STRING": (st.text(max_size=3), pa.string()),
    "BINARY": (st.binary(max_size=3), pa.binary()),
    "BOOLEAN": (st.booleans(), pa.bool_()),
    "DATE": (st.dates(date(1900, 1, 1), date(2100, 1, 1)), pa.date32()),
    "TIMESTAMP": (
        st.integers(-(10**15), 10**15).map(lambda micros: EPOCH + timedelta(microseconds=micros)),
        pa.timestamp("us", tz="UTC"),
    ),
}
NUMBERS = ("TINYINT", "INT", "BIGINT", "DOUBLE", "FLOAT", "DECIMAL(10,2)", "DECIMAL(38,0)")

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])


def rows(*values: tuple[Any, Any, int], **columns: Any) -> pa.Table:
    """Rows of SCHEMA, from triples of key, value and tick."""
    k, v, tick = zip(*values, strict=True)
    return pa.table(
        {
            "k": pa.array(k, pa.int64()),
            "v": pa.array(v, pa.int64()),
            "_tick": pa.array(tick, pa.int64()),
            **columns,
        }
    )
