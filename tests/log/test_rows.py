"""Rows of every kind into batches of exactly the schema, and every way in which they can fail to
fit.
"""

import enum
import time as clock
from collections import OrderedDict, UserDict
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from types import MappingProxyType
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.types import Geometry, VariantVal

from headrace.errors import BadRows
from headrace.log.rows import to_batch
from headrace.types.schema import parse_schema

ORDERS = parse_schema(
    "order_id BIGINT, customer_id BIGINT NOT NULL, amount DOUBLE, placed_at TIMESTAMP, note STRING"
)
ROW = {
    "order_id": 1,
    "customer_id": 7,
    "amount": 2.5,
    "placed_at": datetime(2026, 1, 1, tzinfo=UTC),
    "note": "x",
}
NOON = datetime(2026, 7, 1, 12, tzinfo=UTC)


def value(ddl: str, given: Any) -> Any:
    """What is stored in a column of a type for one Python value."""
    batch = to_batch({"x": given}, parse_schema(f"x {ddl}"), topic="t")
    batch.validate(full=True)
    return batch.column(0)[0].as_py()


def refusal(given: Any, schema: pa.Schema | str, topic: str = "orders") -> str:
    with pytest.raises(BadRows) as caught:
        to_batch(given, parse_schema(schema) if isinstance(schema, str) else schema, topic=topic)
    assert caught.value.fix
    assert caught.value.__cause__ is None
    return caught.value.message


# Shapes


@pytest.mark.parametrize(
    "make",
    [
        lambda row: row,
        lambda row: [row],
        lambda row: (row,),
        lambda row: (each for each in [row]),
        lambda row: [OrderedDict(reversed(row.items()))],
        MappingProxyType,
        lambda row: [UserDict(row)],
        lambda row: pa.Table.from_pylist([row]),
        lambda row: pa.RecordBatch.from_pylist([row]),
        lambda row: pa.Table.from_pylist([row]).select(list(reversed(row))),
        lambda row: pa.Table.from_pylist([row]).to_pandas(),
        lambda row: pa.Table.from_pylist([row], ORDERS).to_batches()[0],
    ],
)
def test_every_shape_gives_the_same_batch(make: Callable[[dict[str, Any]], Any]) -> None:
    batch = to_batch(make(dict(ROW)), ORDERS, topic="orders")
    batch.validate(full=True)
    assert batch.schema.equals(ORDERS, check_metadata=True)
    assert batch.to_pylist() == [ROW]


@pytest.mark.parametrize(
    "empty",
    [
        [],
        (),
        iter([]),
        ORDERS.empty_table(),
        ORDERS.empty_table().to_pandas(),
        pa.record_batch([[]] * 5, names=ORDERS.names),
    ],
)
def test_no_rows_are_an_empty_batch(empty: Any) -> None:
    batch = to_batch(empty, ORDERS, topic="orders")
    assert batch.num_rows == 0
    assert batch.schema.equals(ORDERS, check_metadata=True)


@pytest.mark.parametrize(
    "shape",
    ["text", b"bytes", 5, None, [5], ["ab"], [[1, 2]], [(1, 7, 2.5, None, "x")], [ROW, None]],
)
def test_a_value_that_is_no_row_is_refused(shape: Any) -> None:
    assert "orders" in refusal(shape, ORDERS)


def test_a_batch_that_fits_is_not_copied() -> None:
    batch = to_batch([ROW] * 3, ORDERS, topic="orders")
    assert to_batch(batch, ORDERS, topic="orders") is batch


def test_several_chunks_become_one_batch() -> None:
    table = pa.concat_tables(
        [pa.Table.from_pylist([{**ROW, "order_id": number}]) for number in range(5)]
    )
    assert to_batch(table, ORDERS, topic="orders").column("order_id").to_pylist() == list(range(5))
    assert to_batch(table.slice(2, 2), ORDERS, topic="orders").column("order_id").to_pylist() == [
        2,
        3,
    ]


# Columns


@pytest.mark.parametrize(
    "make",
    [
        lambda row: [ROW, row],
        lambda row: pa.Table.from_pylist([row]),
        lambda row: pa.Table.from_pylist([row]).to_pandas(),
    ],
)
def test_columns_must_be_those_of_the_schema(make: Callable[[dict[str, Any]], Any]) -> None:
    missing = refusal(make({name: given for name, given in ROW.items() if name != "note"}), ORDERS)
    assert "orders: the column 'note' is missing" in missing
    extra = refusal(make({**ROW, "amout": 1}), ORDERS)
    assert "no column 'amout': did you mean 'amount'?" in extra
    renamed = refusal(
        make({("nota" if name == "note" else name): given for name, given in ROW.items()}), ORDERS
    )
    assert "no column 'nota': did you mean 'note'?" in renamed


def test_the_row_with_the_wrong_columns_is_named() -> None:
    assert refusal([ROW, ROW, {**ROW, "color": 1}], ORDERS).startswith(
        "Row 2 for orders: the topic has no column 'color'"
    )
    assert refusal([ROW, {"order_id": 1}, ROW], ORDERS).startswith(
        "Row 1 for orders: the column 'customer_id' is missing"
    )


def test_a_column_may_not_be_there_twice() -> None:
    table = pa.table([[1], [2]], names=["a", "a"])
    assert "'a' is there twice" in refusal(table, "a BIGINT")
    assert "'a' is there twice" in refusal(table.to_pandas(), "a BIGINT")


# Values


class Colour(str, enum.Enum):  # noqa: UP042 - its str() is not its value
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


BERLIN = ZoneInfo("Europe/Berlin")
ACCEPTED: list[tuple[str, Any, Any]] = [
    ("BOOLEAN", True, True),
    ("BOOLEAN", np.bool_(False), False),
    ("TINYINT", -128, -128),
    ("BIGINT", 2**63 - 1, 2**63 - 1),
    ("BIGINT", np.int32(5), 5),
    ("BIGINT", Level.HIGH, 3),
    ("DOUBLE", 3, 3.0),
    ("DOUBLE", np.float32(0.5), 0.5),
    ("DOUBLE", float("inf"), float("inf")),
    ("FLOAT", 0.5, 0.5),
    ("FLOAT", 0.1, float(np.float32(0.1))),
    ("FLOAT", 3, 3.0),
    ("FLOAT", float("-inf"), float("-inf")),
    ("STRING", "ü\x00", "ü\x00"),
    ("STRING", Colour.RED, "red"),
    ("STRING", np.str_("n"), "n"),
    ("VARCHAR(3)", "üüü", "üüü"),
    ("CHAR(3)", "a", "a"),
    ("BINARY", b"\xff", b"\xff"),
    ("BINARY", bytearray(b"a"), b"a"),
    ("BINARY", memoryview(b"b"), b"b"),
    ("DECIMAL(5,2)", Decimal("999.99"), Decimal("999.99")),
    ("DECIMAL(5,2)", Decimal("1.500"), Decimal("1.50")),
    ("DECIMAL(5,2)", 7, Decimal("7.00")),
    ("DECIMAL(38,0)", Decimal(10**38 - 1), Decimal(10**38 - 1)),
    ("DATE", date(1, 1, 1), date(1, 1, 1)),
    ("TIMESTAMP", NOON, NOON),
    ("TIMESTAMP", NOON.replace(tzinfo=None), NOON),
    ("TIMESTAMP", NOON.astimezone(timezone(timedelta(hours=-7))), NOON),
    ("TIMESTAMP", datetime(2026, 7, 1, 14, tzinfo=BERLIN), NOON),
    (
        "TIMESTAMP",
        datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=BERLIN),
        datetime(2026, 10, 25, 1, 30, tzinfo=UTC),
    ),
    (
        "TIMESTAMP",
        datetime(1, 1, 1, microsecond=1, tzinfo=UTC),
        datetime(1, 1, 1, microsecond=1, tzinfo=UTC),
    ),
    ("TIMESTAMP_NTZ", NOON.replace(tzinfo=None), NOON.replace(tzinfo=None)),
    ("TIME", time(23, 59, 59, 999999), time(23, 59, 59, 999999)),
    ("TIME(3)", time(1, 2, 3, 4000), time(1, 2, 3, 4000)),
    (
        "INTERVAL DAY TO SECOND",
        timedelta(days=-3, microseconds=1),
        timedelta(days=-3, microseconds=1),
    ),
    ("ARRAY<INT>", [1, None], [1, None]),
    ("ARRAY<INT>", (1, 2), [1, 2]),
    ("ARRAY<INT>", np.array([1, 2]), [1, 2]),
    ("ARRAY<ARRAY<STRING>>", [["a"], None, []], [["a"], None, []]),
    ("MAP<STRING, INT>", {"a": 1, "b": None}, [("a", 1), ("b", None)]),
    ("MAP<INT, STRING>", [(1, "x"), (1, "y")], [(1, "x"), (1, "y")]),
    ("STRUCT<a: INT, b: STRING NOT NULL>", {"b": "x", "a": None}, {"a": None, "b": "x"}),
    ("STRUCT<a: INT, b: STRING>", Row(b="x", a=1), {"a": 1, "b": "x"}),
    (
        "STRUCT<t: TIMESTAMP, d: DOUBLE>",
        {"t": NOON.replace(tzinfo=None), "d": 1},
        {"t": NOON, "d": 1.0},
    ),
    (
        "VARIANT",
        VariantVal(b"\x0c\x01", b"\x01\x00\x00"),
        {"value": b"\x0c\x01", "metadata": b"\x01\x00\x00"},
    ),
    (
        "VARIANT",
        {"value": b"\x0c\x01", "metadata": b"\x01\x00\x00"},
        {"value": b"\x0c\x01", "metadata": b"\x01\x00\x00"},
    ),
    ("ARRAY<VARIANT>", [VariantVal(b"a", b"b"), None], [{"value": b"a", "metadata": b"b"}, None]),
    ("GEOMETRY(4326)", Geometry.fromWKB(b"\x01", 4326), {"srid": 4326, "wkb": b"\x01"}),
]


@pytest.mark.parametrize(
    ("ddl", "given", "stored"),
    ACCEPTED,
    ids=[f"{ddl}-{given!r}".partition(" at 0x")[0] for ddl, given, _ in ACCEPTED],
)
def test_values_that_fit(ddl: str, given: Any, stored: Any) -> None:
    assert value(ddl, given) == stored
    assert value(ddl, None) is None


def test_nan_in_a_dict_is_a_value() -> None:
    assert np.isnan(value("DOUBLE", float("nan")))
    assert np.isnan(value("STRUCT<a: DOUBLE>", {"a": float("nan")})["a"])
    assert np.isnan(
        to_batch([{"x": 1}, {"x": float("nan")}], parse_schema("x DOUBLE NOT NULL"), topic="t")
        .column(0)[1]
        .as_py()
    )


REFUSED: list[tuple[str, Any, str]] = [
    ("BOOLEAN", 1, "1 is a int, not a bool"),
    ("BIGINT", "1", "'1' is a str, not an int"),
    ("BIGINT", 1.5, "1.5 is a float, not an int"),
    ("BIGINT", 1.0, "1.0 is a float, not an int"),
    ("BIGINT", True, "True is a bool, not an int"),
    ("BIGINT", np.float64(1), "not an int"),
    ("BIGINT", Decimal(1), "not an int"),
    ("BIGINT", NOON, "not an int"),
    ("BIGINT", 2**63, "9223372036854775808 is beyond the range of BIGINT"),
    ("INT", 2**31, "2147483648 is beyond the range of INT"),
    ("SMALLINT", -(2**15) - 1, "beyond the range of SMALLINT"),
    ("TINYINT", 128, "128 is beyond the range of TINYINT"),
    ("TINYINT", 10**40, "beyond the range of TINYINT"),
    ("DOUBLE", "1.5", "not a float"),
    ("DOUBLE", True, "not a float"),
    ("DOUBLE", Decimal("1.5"), "not a float"),
    ("DOUBLE", 2**53 + 1, "9007199254740993 has more digits than a DOUBLE"),
    ("DOUBLE", 10**400, "10000000"),
    ("FLOAT", 1e300, "beyond the range of FLOAT"),
    ("FLOAT", 2**24 + 1, "more digits than a FLOAT"),
    ("FLOAT", 10**400, "more digits than a FLOAT"),
    ("FLOAT", True, "not a float"),
    ("STRING", 1, "not a str"),
    ("STRING", b"x", "not a str"),
    ("STRING", "\ud800", "surrogates"),
    ("VARCHAR(3)", "abcd", "4 characters, more than the 3 declared"),
    ("CHAR(1)", "ab", "more than the 1 declared"),
    ("BINARY", "x", "not bytes"),
    ("BINARY", [1, 2], "not bytes"),
    ("DECIMAL(5,2)", Decimal("1.234"), "1.234 does not fit DECIMAL(5,2)"),
    ("DECIMAL(5,2)", Decimal(1000), "1000 does not fit DECIMAL(5,2)"),
    ("DECIMAL(5,2)", 1000, "1000 does not fit DECIMAL(5,2)"),
    ("DECIMAL(5,2)", 1.5, "not a Decimal or an int"),
    ("DECIMAL(5,2)", Decimal("NaN"), "NaN does not fit"),
    ("DECIMAL(5,2)", "1.5", "not a Decimal"),
    ("DATE", NOON, "not a date"),
    ("DATE", "2026-01-01", "not a date"),
    ("DATE", 5, "not a date"),
    ("TIMESTAMP", "2026-01-01T00:00:00Z", "not a datetime"),
    ("TIMESTAMP", 5, "not a datetime"),
    ("TIMESTAMP", date(2026, 1, 1), "not a datetime"),
    ("TIMESTAMP_NTZ", NOON, "has a time zone, and a TIMESTAMP_NTZ has none"),
    ("TIME", NOON, "not a time"),
    ("TIME", time(1, tzinfo=UTC), "has a time zone"),
    ("TIME(3)", time(1, 2, 3, 4), "finer than the 3 digits"),
    ("TIME(0)", time(1, 2, 3, 400000), "finer than the 0 digits"),
    ("INTERVAL DAY", 5, "not a timedelta"),
    ("ARRAY<INT>", 5, "not a list"),
    ("ARRAY<INT>", "ab", "not a list"),
    ("ARRAY<INT>", {"a": 1}, "not a list"),
    ("ARRAY<INT>", [1, "2"], "in [1]: '2' is a str"),
    ("ARRAY<INT>", [1, True], "in [1]: True is a bool"),
    ("MAP<STRING, INT>", {1: 1}, "in key: 1 is a int"),
    ("MAP<STRING, INT>", {"a": 1.0}, "in ['a']: 1.0 is a float"),
    ("MAP<STRING, INT>", [("a", 1), (None, 2)], "in key: it is null"),
    ("MAP<STRING, INT>", [1, 2], "not a dict or a list of pairs"),
    ("STRUCT<a: INT, b: STRING>", {"a": 1}, "misses the field 'b'"),
    ("STRUCT<a: INT, b: STRING>", {"a": 1, "b": "x", "c": 1}, "unknown field 'c'"),
    ("STRUCT<a: INT, b: STRING>", (1, "x"), "not a dict"),
    ("STRUCT<a: INT NOT NULL>", {"a": None}, "in .a: it is null"),
    (
        "STRUCT<a: STRUCT<b: ARRAY<TINYINT>>>",
        {"a": {"b": [1, 300]}},
        "in .a: in .b: in [1]: 300 is beyond the range of TINYINT",
    ),
    ("VARIANT", {"value": b"x"}, "misses the field 'metadata'"),
    ("VARIANT", {"value": b"x", "metadata": None}, "in .metadata: it is null"),
    ("VARIANT", "{}", "not a VariantVal"),
]


@pytest.mark.parametrize(
    ("ddl", "given", "reason"), REFUSED, ids=[f"{ddl}-{given!r:.40}" for ddl, given, _ in REFUSED]
)
def test_values_that_do_not_fit_are_refused_with_row_and_column(
    ddl: str, given: Any, reason: str
) -> None:
    message = refusal([{"x": None}, {"x": None}, {"x": given}, {"x": given}], f"x {ddl}")
    assert message.startswith("Row 2 for orders, column 'x': ")
    assert reason in message


@pytest.mark.parametrize(
    "ddl", ["BIGINT", "STRING", "TIMESTAMP", "ARRAY<INT>", "VARIANT", "VARCHAR(3)", "DECIMAL(5,2)"]
)
def test_null_where_none_may_be(ddl: str) -> None:
    assert (
        refusal({"x": None}, f"x {ddl} NOT NULL")
        == "Row 0 for orders, column 'x': it is null, but the column is NOT NULL."
    )


def test_a_mixture_of_types_in_one_column() -> None:
    assert "Row 2 for orders, column 'x': 3.0 is a float" in refusal(
        [{"x": 1}, {"x": 2}, {"x": 3.0}], "x BIGINT"
    )
    assert to_batch([{"x": 1}, {"x": 2.5}], parse_schema("x DOUBLE"), topic="t").column(
        0
    ).to_pylist() == [1.0, 2.5]
    moments = [NOON, NOON.replace(tzinfo=None), NOON.astimezone(BERLIN)]
    assert (
        to_batch([{"x": each} for each in moments], parse_schema("x TIMESTAMP"), topic="t")
        .column(0)
        .to_pylist()
        == [NOON] * 3
    )


# Cost


def microseconds_per_call(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(7):
        start = clock.perf_counter()
        for _ in range(300):
            call()
        best = min(best, (clock.perf_counter() - start) / 300)
    return best * 1e6


def test_one_dict_costs_little_and_a_fitting_batch_next_to_nothing() -> None:
    batch = to_batch(ROW, ORDERS, topic="orders")
    assert microseconds_per_call(lambda: to_batch(ROW, ORDERS, topic="orders")) < 60, (
        "13 on an idle core; the promise is 30"
    )
    assert microseconds_per_call(lambda: to_batch(batch, ORDERS, topic="orders")) < 20, (
        "3 on an idle core; the promise is 10"
    )
