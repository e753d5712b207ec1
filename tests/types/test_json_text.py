"""Arrow values as JSON text, as in keys and in Kafka records."""

import base64
import json
import math
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import BugError
from headrace.types.json_codec import array_text, json_text, json_text_or_null, object_text

TIMESTAMP = pa.timestamp("us", tz="UTC")
CASES: list[tuple[pa.DataType, Any, str]] = [
    (pa.int64(), -(2**63), "-9223372036854775808"),
    (pa.int8(), 7, "7"),
    (pa.bool_(), True, "true"),
    (pa.bool_(), False, "false"),
    (pa.float64(), 1.0, "1.0"),
    (pa.float64(), -0.0, "-0.0"),
    (pa.float64(), 0.1, "0.1"),
    (pa.float64(), 1e20, "1e+20"),
    (pa.float64(), 5e-324, "5e-324"),
    (pa.float64(), math.nan, '"NaN"'),
    (pa.float64(), math.inf, '"Infinity"'),
    (pa.float64(), -math.inf, '"-Infinity"'),
    (pa.float32(), 0.1, "0.1"),
    (pa.float32(), 16777216.0, "16777216.0"),
    (pa.string(), "plain", '"plain"'),
    (pa.string(), "", '""'),
    (pa.string(), "ünï😀\u2028", '"ünï😀\u2028"'),
    (pa.string(), 'say "hi"\\', '"say \\"hi\\"\\\\"'),
    (pa.string(), "a\nb\rc\td", '"a\\nb\\rc\\td"'),
    (pa.string(), "\x00\x01\x1f\x7f", '"\\u0000\\u0001\\u001f\x7f"'),
    (pa.binary(), b"\x00\xff\x10", '"AP8Q"'),
    (pa.binary(), b"", '""'),
    (pa.decimal128(10, 2), Decimal("1.50"), '"1.50"'),
    (pa.decimal128(20, 12), Decimal("0.0000000001"), '"0.000000000100"'),
    (pa.decimal128(20, 12), Decimal(0), '"0.000000000000"'),
    (pa.decimal128(38, 0), Decimal(1 - 10**38), '"-99999999999999999999999999999999999999"'),
    (
        pa.decimal128(38, 38),
        Decimal("-0.00000000000000000000000000000000000001"),
        '"-0.00000000000000000000000000000000000001"',
    ),
    (pa.date32(), date(2024, 2, 29), '"2024-02-29"'),
    (pa.date32(), date(1, 1, 1), '"0001-01-01"'),
    (TIMESTAMP, datetime(2024, 1, 1, 12, 0, 0, 5, UTC), '"2024-01-01T12:00:00.000005Z"'),
    (TIMESTAMP, datetime(1969, 12, 31, 23, 59, 59, 999999, UTC), '"1969-12-31T23:59:59.999999Z"'),
    (TIMESTAMP, datetime(1, 1, 1, tzinfo=UTC), '"0001-01-01T00:00:00.000000Z"'),
    (
        pa.timestamp("us"),
        datetime(9999, 12, 31, 23, 59, 59, 1),  # noqa: DTZ001
        '"9999-12-31T23:59:59.000001"',
    ),
    (pa.time64("ns"), time(1, 2, 3), '"01:02:03.000000"'),
    (pa.time64("ns"), time(1, 2, 3, 4000), '"01:02:03.004000"'),
    (pa.time64("ns"), 1_000, '"00:00:00.000001"'),
    (pa.time64("ns"), 1_001, '"00:00:00.000001001"'),
    (pa.duration("us"), timedelta(days=-1, microseconds=1), "-86399999999"),
    (pa.list_(pa.int64()), [1, None, 3], "[1,null,3]"),
    (pa.list_(pa.string()), [], "[]"),
    (pa.list_(pa.list_(pa.string())), [["a"], None, []], '[["a"],null,[]]'),
    (
        pa.struct([("a", pa.int64()), ('odd "name', pa.string())]),
        {"a": None, 'odd "name': "x"},
        '{"a":null,"odd \\"name":"x"}',
    ),
    (pa.struct([]), {}, "{}"),
    (pa.map_(pa.string(), pa.float64()), [("a", 1.0), ('"', None)], '{"a":1.0,"\\"":null}'),
    (pa.map_(pa.int32(), pa.string()), [(1, "x"), (2, None)], '[[1,"x"],[2,null]]'),
    (pa.map_(pa.string(), pa.int64()), [], "{}"),
]


@pytest.mark.parametrize(
    ("kind", "value", "text"), CASES, ids=[f"{kind}-{text[:20]!r}" for kind, _, text in CASES]
)
def test_each_type_has_its_text(kind: pa.DataType, value: Any, text: str) -> None:
    assert json_text(pa.array([value], kind)).to_pylist() == [text]
    json.loads(text)


@pytest.mark.parametrize("kind", sorted({kind for kind, _, _ in CASES}, key=str), ids=str)
def test_nulls_slices_and_empty_columns(kind: pa.DataType) -> None:
    values = [value for each, value, _ in CASES if each == kind]
    texts = [text for each, _, text in CASES if each == kind]
    array = pa.array([None, *values, None, *values], kind)
    assert json_text(array).to_pylist() == [None, *texts, None, *texts]
    assert json_text(array.slice(1, len(values))).to_pylist() == texts
    assert json_text(array.slice(len(values) + 1)).to_pylist() == [None, *texts]
    assert json_text_or_null(array.slice(0, 1)).to_pylist() == ["null"]
    assert json_text(pa.array([], kind)).to_pylist() == []
    assert json_text(pa.array([None, None], kind)).to_pylist() == [None, None]
    assert json_text(array).type == pa.string()


def test_the_text_of_a_value_does_not_depend_on_its_neighbours() -> None:
    for kind in {kind for kind, _, _ in CASES}:
        values = [value for each, value, _ in CASES if each == kind]
        together = json_text(pa.array(values, kind)).to_pylist()
        assert together == [json_text(pa.array([value], kind))[0].as_py() for value in values]


def test_columns_become_objects_and_arrays() -> None:
    columns = [pa.array([1, None]), pa.array(["x", "y"])]
    assert object_text(["a", "b c"], columns).to_pylist() == [
        '{"a":1,"b c":"x"}',
        '{"a":null,"b c":"y"}',
    ]
    assert array_text(columns).to_pylist() == ['[1,"x"]', '[null,"y"]']
    assert array_text(columns[:1]).to_pylist() == ["[1]", "[null]"]


def test_a_null_column_and_a_type_without_text() -> None:
    assert json_text(pa.nulls(2)).to_pylist() == [None, None]
    with pytest.raises(BugError, match="month_interval|interval"):
        json_text(pa.nulls(1, pa.month_day_nano_interval()))


def plain(value: Any) -> Any:
    """What JSON's own reader should give back for a value: the rules, written plainly."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, datetime):
        return value.replace(tzinfo=None).isoformat(timespec="microseconds") + (
            "Z" if value.tzinfo else ""
        )
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value


ints = st.integers(-(2**63), 2**63 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]))
scalars: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), ints),
    (pa.bool_(), st.booleans()),
    (pa.float64(), st.floats()),
    (pa.string(), texts),
    (pa.binary(), st.binary()),
    (pa.decimal128(38, 10), st.decimals(-(10**20), 10**20, places=10)),
    (pa.date32(), st.dates()),
    (TIMESTAMP, st.datetimes(timezones=st.just(UTC))),
    (pa.timestamp("us"), st.datetimes()),
]
Typed = tuple[pa.DataType, st.SearchStrategy[Any]]


def nested(inner: Typed) -> list[Typed]:
    kind, values = inner
    optional = st.none() | values
    return [
        (pa.list_(kind), st.lists(optional, max_size=4)),
        (
            pa.struct([("x", kind), ("y\n", pa.string())]),
            st.fixed_dictionaries({"x": optional, "y\n": st.none() | texts}),
        ),
        (pa.map_(pa.string(), kind), st.dictionaries(texts, optional, max_size=3)),
    ]


one_level = [made for scalar in scalars for made in nested(scalar)]
two_levels = [made for inner in one_level for made in nested(inner)]


@given(
    st.sampled_from(scalars + one_level + two_levels).flatmap(
        lambda typed: st.tuples(st.just(typed[0]), st.lists(st.none() | typed[1], max_size=6))
    )
)
def test_any_value_reads_back_with_the_rules_applied(case: tuple[pa.DataType, list[Any]]) -> None:
    kind, values = case
    got = [
        None if text is None else json.loads(text)
        for text in json_text(pa.array(values, kind)).to_pylist()
    ]
    assert got == [plain(value) for value in values]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_floats_read_back_the_same(values: list[float]) -> None:
    doubles = json.loads(array_text([pa.array([value]) for value in values])[0].as_py())
    assert [math.copysign(1, value) for value in doubles] == [
        math.copysign(1, value) for value in values
    ]
    assert doubles == values
    singles = json.loads(
        array_text([pa.array([value], pa.float32()) for value in values])[0].as_py()
    )
    assert [float(np.float32(value)) for value in singles] == values


def test_entries_beneath_a_null_map_or_list_do_not_count() -> None:
    offsets = pa.array([0, 2, 3, 4], pa.int32())
    mask = pa.array([False, True, False])
    maps = pa.MapArray.from_arrays(offsets, ["a", "b", "hidden", "c"], [1, 2, 3, 4], mask=mask)
    assert json_text(maps).to_pylist() == ['{"a":1,"b":2}', None, '{"c":4}']
    assert json_text(maps.slice(1)).to_pylist() == [None, '{"c":4}']
    lists = pa.ListArray.from_arrays(offsets, [1, 2, 3, 4], mask=mask)
    assert json_text(lists).to_pylist() == ["[1,2]", None, "[4]"]
    structs = pa.StructArray.from_arrays([pa.array([1, 2, 3])], names=["a"], mask=mask)
    assert json_text(structs).to_pylist() == ['{"a":1}', None, '{"a":3}']
    assert json_text(structs.slice(1)).to_pylist() == [None, '{"a":3}']
