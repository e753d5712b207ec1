"""Arrow tables and pandas frames into batches of the schema: what is cast, what is refused, and
which row is named.
"""

import time as clock
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import BadRows
from headrace.log.rows import to_batch
from headrace.types.schema import parse_schema

NOON = datetime(2026, 7, 1, 12, tzinfo=UTC)
LOCAL = NOON.replace(tzinfo=None)


def stored(ddl: str, array: Any) -> list[Any]:
    schema = parse_schema(f"x {ddl}")
    batch = to_batch(pa.table({"x": array}), schema, topic="t")
    batch.validate(full=True)
    assert batch.schema.equals(schema, check_metadata=True)
    values: list[Any] = batch.column(0).to_pylist()
    return values


def refusal(ddl: str, given: Any) -> str:
    rows = given if isinstance(given, pd.DataFrame | pa.RecordBatch) else pa.table({"x": given})
    with pytest.raises(BadRows) as caught:
        to_batch(rows, parse_schema(f"x {ddl}"), topic="t")
    assert caught.value.fix
    return caught.value.message


CASTS: list[tuple[str, pa.DataType, list[Any], list[Any]]] = [
    ("BIGINT", pa.int8(), [1, None], [1, None]),
    ("BIGINT", pa.uint64(), [2**63 - 1], [2**63 - 1]),
    ("TINYINT", pa.int64(), [-128, 127], [-128, 127]),
    ("DOUBLE", pa.int64(), [2**53], [2.0**53]),
    ("DOUBLE", pa.float32(), [0.5, None], [0.5, None]),
    ("FLOAT", pa.float64(), [0.5, None, float("inf")], [0.5, None, float("inf")]),
    ("FLOAT", pa.int32(), [16777216], [16777216.0]),
    ("DECIMAL(10,2)", pa.decimal128(5, 1), [Decimal("1.5")], [Decimal("1.50")]),
    ("DECIMAL(5,1)", pa.decimal128(10, 3), [Decimal("1.500")], [Decimal("1.5")]),
    ("DECIMAL(5,2)", pa.decimal256(60, 2), [Decimal("1.50")], [Decimal("1.50")]),
    ("DECIMAL(5,2)", pa.int64(), [999, None], [Decimal("999.00"), None]),
    ("STRING", pa.large_string(), ["a", None], ["a", None]),
    ("STRING", pa.string_view(), ["a"], ["a"]),
    ("BINARY", pa.large_binary(), [b"a"], [b"a"]),
    ("BINARY", pa.binary(2), [b"ab"], [b"ab"]),
    ("DATE", pa.date64(), [date(2026, 1, 1)], [date(2026, 1, 1)]),
    ("TIMESTAMP", pa.timestamp("ns", tz="Europe/Berlin"), [NOON], [NOON]),
    ("TIMESTAMP", pa.timestamp("s"), [LOCAL], [NOON]),
    ("TIMESTAMP_NTZ", pa.timestamp("ms"), [LOCAL], [LOCAL]),
    ("TIME", pa.time32("s"), [time(1, 2, 3)], [time(1, 2, 3)]),
    ("INTERVAL DAY TO SECOND", pa.duration("ms"), [timedelta(seconds=1)], [timedelta(seconds=1)]),
    ("STRING", pa.null(), [None, None], [None, None]),
    ("ARRAY<STRING>", pa.null(), [None], [None]),
    ("ARRAY<INT>", pa.large_list(pa.int64()), [[1, None], None, []], [[1, None], None, []]),
    ("ARRAY<BIGINT>", pa.list_(pa.int32(), 2), [[1, 2], None], [[1, 2], None]),
    (
        "ARRAY<STRING>",
        pa.list_(pa.dictionary(pa.int8(), pa.string())),
        [["a", "b"], ["a"]],
        [["a", "b"], ["a"]],
    ),
    (
        "STRUCT<a: INT, b: STRING NOT NULL>",
        pa.struct([("b", pa.large_string()), ("a", pa.int64())]),
        [{"b": "x", "a": 1}, None],
        [{"a": 1, "b": "x"}, None],
    ),
    (
        "MAP<STRING, INT>",
        pa.map_(pa.large_string(), pa.int64()),
        [[("a", 1)], None, []],
        [[("a", 1)], None, []],
    ),
    (
        "ARRAY<STRUCT<m: MAP<INT, FLOAT>>>",
        pa.list_(pa.struct([("m", pa.map_(pa.int64(), pa.float32()))])),
        [[{"m": [(1, 0.5)]}]],
        [[{"m": [(1, 0.5)]}]],
    ),
    (
        "VARIANT",
        pa.struct([("metadata", pa.binary()), ("value", pa.binary())]),
        [{"value": b"v", "metadata": b"m"}],
        [{"value": b"v", "metadata": b"m"}],
    ),
]


@pytest.mark.parametrize(
    ("ddl", "kind", "values", "expected"), CASTS, ids=[f"{kind}-{ddl}" for ddl, kind, _, _ in CASTS]
)
def test_values_that_fit_are_cast(
    ddl: str, kind: pa.DataType, values: list[Any], expected: list[Any]
) -> None:
    array = pa.array(values, kind)
    assert stored(ddl, array) == expected
    assert stored(ddl, pa.chunked_array([array, array])) == expected * 2
    assert stored(ddl, pa.concat_arrays([array, array]).slice(len(array))) == expected, "a slice"
    assert stored(ddl, pa.array([], kind)) == []


def test_encoded_columns_are_decoded() -> None:
    assert stored("STRING", pa.array(["a", "b", "a", None]).dictionary_encode()) == [
        "a",
        "b",
        "a",
        None,
    ]
    assert stored("BIGINT", pa.RunEndEncodedArray.from_arrays([2, 3], [7, 8])) == [7, 7, 8]


REFUSED: list[tuple[str, pa.DataType, list[Any], str]] = [
    ("BIGINT", pa.string(), ["1"], "Arrow's string, the topic as int64"),
    ("BIGINT", pa.bool_(), [True], "Arrow's bool"),
    ("BIGINT", pa.float64(), [1.0], "Arrow's double"),
    ("BIGINT", pa.uint64(), [2**63], "9223372036854775808"),
    ("INT", pa.int64(), [2**31], "2147483648"),
    ("BIGINT", pa.timestamp("us"), [LOCAL], "Arrow's timestamp"),
    ("BOOLEAN", pa.int8(), [1], "Arrow's int8"),
    ("DOUBLE", pa.int64(), [2**53 + 1], "9007199254740993"),
    ("DOUBLE", pa.string(), ["1"], "Arrow's string"),
    ("FLOAT", pa.float64(), [0.1], "more digits than a FLOAT"),
    ("FLOAT", pa.float64(), [1e300], "more digits than a FLOAT"),
    ("DECIMAL(5,2)", pa.decimal128(5, 3), [Decimal("1.234")], "data loss"),
    ("DECIMAL(5,2)", pa.decimal128(10, 2), [Decimal("1000.00")], "precision"),
    ("DECIMAL(5,2)", pa.int64(), [1000], "precision"),
    ("DECIMAL(5,2)", pa.float64(), [1.5], "Arrow's double"),
    ("STRING", pa.int64(), [1], "Arrow's int64"),
    ("STRING", pa.binary(), [b"a"], "Arrow's binary"),
    ("BINARY", pa.string(), ["a"], "Arrow's string"),
    ("VARCHAR(2)", pa.string(), ["abc"], "more than the 2 characters"),
    ("VARCHAR(2)", pa.large_string(), ["üüü"], "more than the 2 characters"),
    (
        "ARRAY<CHAR(1)>",
        pa.list_(pa.string()),
        [["a", "bc"]],
        "in 'element': it has more than the 1 characters",
    ),
    ("DATE", pa.timestamp("us"), [LOCAL], "Arrow's timestamp"),
    ("DATE", pa.int32(), [5], "Arrow's int32"),
    ("TIMESTAMP", pa.timestamp("ns"), [1], "lose data"),
    ("TIMESTAMP", pa.string(), ["2026-01-01"], "Arrow's string"),
    ("TIMESTAMP", pa.date32(), [date(2026, 1, 1)], "Arrow's date32"),
    ("TIMESTAMP", pa.int64(), [5], "Arrow's int64"),
    ("TIMESTAMP_NTZ", pa.timestamp("us", tz="UTC"), [NOON], "has a time zone"),
    ("TIME(3)", pa.time64("us"), [time(1, 2, 3, 4)], "finer than the 3 digits"),
    ("TIME", pa.time64("ns"), [1], "finer than the 6 digits"),
    ("INTERVAL DAY", pa.duration("ns"), [1], "lose data"),
    ("INTERVAL DAY", pa.int64(), [1], "Arrow's int64"),
    ("ARRAY<INT>", pa.list_(pa.string()), [["1"]], "Arrow's string"),
    ("ARRAY<INT>", pa.map_(pa.string(), pa.int32()), [[("a", 1)]], "Arrow's map"),
    ("ARRAY<INT>", pa.int32(), [1], "Arrow's int32"),
    (
        "STRUCT<a: INT>",
        pa.struct([("a", pa.int32()), ("b", pa.int32())]),
        [{"a": 1, "b": 2}],
        "fields a, b, not a",
    ),
    ("STRUCT<a: INT, b: INT>", pa.struct([("a", pa.int32())]), [{"a": 1}], "fields a, not a, b"),
    (
        "STRUCT<a: INT NOT NULL>",
        pa.struct([("a", pa.int32())]),
        [{"a": None}],
        "in 'a': it is null",
    ),
    (
        "MAP<STRING, STRUCT<a: INT NOT NULL>>",
        pa.map_(pa.string(), pa.struct([("a", pa.int32())])),
        [[("k", {"a": None})]],
        "'value': in 'a': it is null",
    ),
    (
        "VARIANT",
        pa.struct([("value", pa.binary()), ("metadata", pa.binary())]),
        [{"value": b"v", "metadata": None}],
        "'metadata': it is null",
    ),
    ("VARIANT", pa.string(), ["{}"], "Arrow's string"),
]


@pytest.mark.parametrize(
    ("ddl", "kind", "bad", "reason"),
    REFUSED,
    ids=[f"{kind}-{ddl}-{bad[0]!r}" for ddl, kind, bad, _ in REFUSED],
)
def test_values_that_do_not_fit_are_refused_with_their_row(
    ddl: str, kind: pa.DataType, bad: list[Any], reason: str
) -> None:
    values = [None, *bad, None, *bad]
    message = refusal(ddl, pa.array(values, kind))
    assert reason in message
    by_type = "and that is not cast" in message or "fields" in message
    assert message.startswith(
        f"Row {0 if by_type or 'time zone' in message else 1} for t, column 'x': "
    )


def test_a_wrong_type_is_refused_without_any_row() -> None:
    assert "Arrow's string, the topic as int64" in refusal("BIGINT", pa.array([], pa.string()))


@pytest.mark.parametrize("bad", [0, 1, 63, 64, 999])
def test_the_row_is_found_among_many(bad: int) -> None:
    values: list[Any] = [number if number != bad else 2**40 for number in range(1000)]
    assert refusal("INT", pa.array(values, pa.int64())).startswith(f"Row {bad} for")
    table = pa.table({"x": pa.chunked_array([values[:300], values[300:]])})
    with pytest.raises(BadRows, match=f"Row {bad} for t, column 'x'"):
        to_batch(table, parse_schema("x INT"), topic="t")


def test_finding_the_row_is_quick() -> None:
    values = np.zeros(1_000_000, np.int64)
    values[777_777] = 2**40
    start = clock.perf_counter()
    message = refusal("INT", pa.array(values))
    assert message.startswith("Row 777777 for")
    assert clock.perf_counter() - start < 2


def test_nulls_where_none_may_be() -> None:
    schema = parse_schema("x BIGINT NOT NULL")
    exact = pa.RecordBatch.from_arrays([pa.array([1, 2, None])], schema=schema)
    assert refusal("BIGINT NOT NULL", exact).startswith(
        "Row 2 for t, column 'x': it is null, but the column is NOT NULL"
    )
    assert refusal("BIGINT NOT NULL", pa.array([1, None], pa.int8())).startswith("Row 1 ")
    assert refusal("STRING NOT NULL", pa.nulls(1)).startswith("Row 0 ")
    assert to_batch(pa.table({"x": [1, 2]}), schema, topic="t").schema.equals(schema)


def test_a_batch_of_the_right_type_is_still_looked_into() -> None:
    schema = parse_schema("x STRUCT<a: INT NOT NULL>, y VARCHAR(2)")
    struct = pa.StructArray.from_arrays(
        [pa.array([1, None], pa.int32())],
        fields=list(schema.field("x").type),
        mask=pa.array([False, False]),
    )
    hidden = pa.StructArray.from_arrays(
        [pa.array([1, None], pa.int32())],
        fields=list(schema.field("x").type),
        mask=pa.array([False, True]),
    )
    with pytest.raises(BadRows, match="Row 1 for t, column 'x': in 'a': it is null"):
        to_batch(
            pa.RecordBatch.from_arrays([struct, pa.array(["a", "b"])], schema=schema),
            schema,
            topic="t",
        )
    fits = pa.RecordBatch.from_arrays([hidden, pa.array(["a", None])], schema=schema)
    assert to_batch(fits, schema, topic="t") is fits
    with pytest.raises(BadRows, match="Row 1 for t, column 'y'"):
        to_batch(
            pa.RecordBatch.from_arrays([hidden, pa.array(["a", "bcd"])], schema=schema),
            schema,
            topic="t",
        )


def test_the_schema_comes_out_with_its_metadata() -> None:
    schema = parse_schema("x VARCHAR(9) COMMENT 'c'")
    batch = to_batch(pa.record_batch({"x": ["a"]}), schema, topic="t")
    assert batch.schema.equals(schema, check_metadata=True)


def test_a_length_of_another_schema_does_not_count() -> None:
    """Schemas that differ only in metadata are equal to Arrow; their lengths are not the same to
    us.
    """
    long, short = parse_schema("x VARCHAR(9)"), parse_schema("x VARCHAR(2)")
    assert to_batch({"x": "abc"}, long, topic="t").num_rows == 1
    with pytest.raises(BadRows, match="more than the 2 declared"):
        to_batch({"x": "abc"}, short, topic="t")
    with pytest.raises(BadRows, match="more than the 2 characters"):
        to_batch(to_batch({"x": "abc"}, long, topic="t"), short, topic="t")


# pandas


def from_frame(ddl: str, values: Any, **options: Any) -> list[Any]:
    batch = to_batch(
        pd.DataFrame({"x": pd.Series(values, **options)}), parse_schema(f"x {ddl}"), topic="t"
    )
    batch.validate(full=True)
    listed: list[Any] = batch.column(0).to_pylist()
    return listed


@pytest.mark.parametrize(
    ("ddl", "values", "options", "expected"),
    [
        ("BIGINT", [1, 2], {}, [1, 2]),
        ("BIGINT", [1, None], {}, [1, None]),
        ("BIGINT", [1.0, 2.0], {}, [1, 2]),
        ("INT", [1, None], {"dtype": "Int64"}, [1, None]),
        ("BIGINT", [1, None], {"dtype": object}, [1, None]),
        ("DOUBLE", [1.5, None], {}, [1.5, None]),
        ("DOUBLE", [1, 2], {}, [1.0, 2.0]),
        ("FLOAT", [0.1], {"dtype": "float32"}, [float(np.float32(0.1))]),
        ("BOOLEAN", [True, None], {"dtype": "boolean"}, [True, None]),
        ("STRING", ["a", None, float("nan"), pd.NA], {}, ["a", None, None, None]),
        ("STRING", ["a", None], {"dtype": "string"}, ["a", None]),
        ("STRING", ["a", None, "a"], {"dtype": "category"}, ["a", None, "a"]),
        ("STRING", ["a", None], {"dtype": pd.ArrowDtype(pa.string())}, ["a", None]),
        ("BINARY", [b"a", None], {}, [b"a", None]),
        ("DATE", [date(2026, 1, 1), None], {}, [date(2026, 1, 1), None]),
        ("TIMESTAMP", [NOON, None], {}, [NOON, None]),
        ("TIMESTAMP", [LOCAL, pd.NaT], {}, [NOON, None]),
        ("TIMESTAMP", [pd.Timestamp(NOON), None], {"dtype": object}, [NOON, None]),
        ("TIMESTAMP_NTZ", [LOCAL], {}, [LOCAL]),
        ("INTERVAL DAY TO SECOND", [timedelta(seconds=1), None], {}, [timedelta(seconds=1), None]),
        ("DECIMAL(5,2)", [Decimal("1.5"), None], {}, [Decimal("1.50"), None]),
        ("ARRAY<INT>", [[1, 2], None, np.array([3])], {}, [[1, 2], None, [3]]),
        ("STRUCT<a: INT>", [{"a": 1}, None], {}, [{"a": 1}, None]),
        ("MAP<STRING, INT>", [{"a": 1}], {}, [[("a", 1)]]),
    ],
)
def test_frames_that_fit(
    ddl: str, values: list[Any], options: dict[str, Any], expected: list[Any]
) -> None:
    assert from_frame(ddl, values, **options) == expected


@pytest.mark.parametrize(
    ("ddl", "values", "options", "reason"),
    [
        ("BIGINT", [1.0, 1.5], {}, "Row 1 for t, column 'x': it has a fraction"),
        ("BIGINT", [1, "2"], {}, "Row 1 for t, column 'x': '2' is a str"),
        ("BIGINT", [True, False], {}, "Arrow's bool"),
        ("INT", [1, 2**40], {}, "Row 1 for t, column 'x'"),
        ("BIGINT NOT NULL", [1, None], {}, "Row 1 for t, column 'x': it is null"),
        ("DOUBLE NOT NULL", [1.5, None], {}, "Row 1 for t, column 'x': it is null"),
        ("STRING NOT NULL", ["a", None], {}, "Row 1 for t, column 'x': it is null"),
        ("STRING", ["a", 1], {}, "Row 1 for t, column 'x': 1 is a int, not a str"),
        ("STRING", [1, 2], {}, "Arrow's int64"),
        ("FLOAT", [0.5, 0.1], {}, "Row 1 for t, column 'x': it has more digits"),
        ("TIMESTAMP", [pd.Timestamp("2026-01-01 00:00:00.000000001")], {}, "lose data"),
        (
            "TIMESTAMP",
            [pd.Timestamp("2026-01-01 00:00:00.000000001")],
            {"dtype": object},
            "nanoseconds",
        ),
        ("TIMESTAMP_NTZ", [NOON], {}, "has a time zone"),
        ("INTERVAL DAY", [pd.Timedelta(1, "ns")], {"dtype": object}, "nanoseconds"),
        ("DOUBLE", [1j], {}, "complex128 has no counterpart"),
    ],
)
def test_frames_that_do_not_fit(
    ddl: str, values: list[Any], options: dict[str, Any], reason: str
) -> None:
    assert reason in refusal(ddl, pd.DataFrame({"x": pd.Series(values, **options)}))


def test_the_index_of_a_frame_is_not_a_column() -> None:
    frame = pd.DataFrame({"x": [1, 2], "y": [3, 4]}, index=[9, 8])
    assert to_batch(frame, parse_schema("y BIGINT, x BIGINT"), topic="t").to_pylist() == [
        {"y": 3, "x": 1},
        {"y": 4, "x": 2},
    ]
    with pytest.raises(BadRows, match="the column 'x' is missing"):
        to_batch(frame.set_index("x"), parse_schema("y BIGINT, x BIGINT"), topic="t")


def test_pandas_missing_values_in_dicts_are_no_times() -> None:
    with pytest.raises(BadRows, match="NaT"):
        to_batch({"x": pd.NaT}, parse_schema("x TIMESTAMP"), topic="t")


# Every way to the same rows

KINDS: dict[str, st.SearchStrategy[Any]] = {
    "BIGINT": st.integers(-(2**63), 2**63 - 1),
    "SMALLINT": st.integers(-(2**15), 2**15 - 1),
    "DOUBLE": st.floats(allow_nan=False),
    "BOOLEAN": st.booleans(),
    "STRING": st.text(st.characters(exclude_categories=["Cs"])),
    "BINARY": st.binary(),
    "DECIMAL(20,3)": st.decimals(-(10**16), 10**16, places=3),
    "DATE": st.dates(),
    "TIMESTAMP": st.datetimes(timezones=st.just(UTC)),
    "TIMESTAMP_NTZ": st.datetimes(),
    "TIME": st.times(),
    "INTERVAL DAY TO SECOND": st.timedeltas(
        min_value=timedelta(days=-10000), max_value=timedelta(days=10000)
    ),
    "ARRAY<BIGINT>": st.lists(st.none() | st.integers(-5, 5), max_size=3),
    "STRUCT<a: STRING, b: ARRAY<DATE>>": st.fixed_dictionaries(
        {"a": st.none() | st.text("ab"), "b": st.none() | st.lists(st.dates(), max_size=2)}
    ),
}


@given(
    st.lists(
        st.fixed_dictionaries(
            {f"c{position}": st.none() | values for position, values in enumerate(KINDS.values())}
        ),
        max_size=5,
    )
)
def test_dicts_tables_and_batches_give_the_same(rows: list[dict[str, Any]]) -> None:
    schema = parse_schema(", ".join(f"c{position} {ddl}" for position, ddl in enumerate(KINDS)))
    batch = to_batch(rows, schema, topic="t")
    assert batch.to_pylist() == rows
    table = pa.Table.from_batches([batch, batch.slice(1)] if rows else [batch])
    assert to_batch(table, schema, topic="t").to_pylist() == rows + rows[1:]
    widened = table.set_column(1, "c1", table["c1"].cast(pa.int64())).set_column(
        4, "c4", table["c4"].cast(pa.large_string())
    )
    assert to_batch(widened, schema, topic="t").to_pylist() == rows + rows[1:]
    assert [to_batch(row, schema, topic="t").to_pylist()[0] for row in rows] == rows
