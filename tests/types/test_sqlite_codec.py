"""Every type of a schema goes through SQLite's values and comes back bit for bit, and what is
stored compares as it should.
"""

import math
import sqlite3
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.types.schema import parse_schema
from headrace.types.sqlite_codec import affinity, from_values, to_values
from tests.short_forms import examples

NOON = datetime(2026, 1, 31, 12, 30, 0, 250_000, tzinfo=UTC)
CASES: list[tuple[str, list[Any]]] = [
    ("BOOLEAN", [True, False, None]),
    ("TINYINT", [-128, 127, None]),
    ("SMALLINT", [-(2**15), 2**15 - 1]),
    ("INT", [-(2**31), 2**31 - 1]),
    ("BIGINT", [-(2**63), 2**63 - 1, 0, None]),
    ("FLOAT", [0.1, 1e-45, math.inf, -math.inf, math.nan, -0.0, None]),
    ("DOUBLE", [0.1, 5e-324, 1e308, 3.0, math.inf, -math.inf, math.nan, -0.0, 0.0, None]),
    ("DECIMAL(38, 0)", [Decimal(10**38 - 1), Decimal(-(10**38) + 1), None]),
    ("DECIMAL(12, 2)", [Decimal("12.50"), Decimal("-0.01"), Decimal("0.00")]),
    ("DECIMAL(38, 30)", [Decimal("0.000000000000000000000000000001"), Decimal("1e7")]),
    ("STRING", ["", "NaN", "a\0b", "€ 🙂", "'; DROP TABLE x", None]),
    ("VARCHAR(5)", ["abc"]),
    ("BINARY", [b"", b"\0\xff", b"NaN", None]),
    ("DATE", [date(1, 1, 1), date(2026, 1, 31), date(9999, 12, 31), None]),
    ("TIME(9)", [time(0), time(23, 59, 59, 999_999), None]),
    (
        "TIMESTAMP",
        [
            datetime(1, 1, 1, tzinfo=UTC),
            NOON,
            datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
            None,
        ],
    ),
    (
        "TIMESTAMP_NTZ",
        [datetime(1969, 12, 31, 23, 59, 59, 1), datetime(2026, 1, 1)],  # noqa: DTZ001
    ),
    ("INTERVAL DAY TO SECOND", [timedelta(days=-3, microseconds=7), timedelta(0), None]),
    ("ARRAY<BIGINT>", [[1, None, -(2**63)], [], None]),
    ("ARRAY<DOUBLE>", [[math.nan, math.inf, -0.0, 0.1], None]),
    ("ARRAY<FLOAT>", [[0.1, 16777216.0]]),
    ("ARRAY<ARRAY<DECIMAL(30, 10)>>", [[[Decimal("1.5")], None, []]]),
    ("ARRAY<BINARY>", [[b"\0\xff", None]]),
    ("ARRAY<TIME(9)>", [[time(1, 2, 3)]]),
    ("MAP<STRING, BIGINT>", [[("a", 1), ("b", None)], [], None]),
    ("MAP<BIGINT, STRING>", [[(1, "x"), (2, None)], []]),
    ("MAP<DATE, BOOLEAN>", [[(date(2026, 1, 1), True)], None]),
    ("MAP<STRUCT<x: BIGINT>, ARRAY<STRING>>", [[({"x": 1}, ["y"])], None]),
    (
        "STRUCT<a: BIGINT, b: STRUCT<c: TIMESTAMP, d: INTERVAL DAY TO SECOND>>",
        [{"a": 1, "b": {"c": NOON, "d": timedelta(seconds=1)}}, None],
    ),
    ("STRUCT<a: BIGINT, b: STRUCT<c: TIMESTAMP>>", [{"a": None, "b": None}]),
    (
        "STRUCT<tags: MAP<STRING, ARRAY<STRUCT<n: INT NOT NULL>>>>",
        [{"tags": [("x", [{"n": 1}, None])]}],
    ),
    ("VARIANT", [{"value": b"\x0c\x01", "metadata": b"\x01\0\0"}, None]),
    ("GEOMETRY(4326)", [{"srid": 4326, "wkb": b"\x01\x01"}]),
]


def stored(array: pa.Array) -> list[Any]:
    """What SQLite gives back for a column: bound, written and read in a table as a view's is
    declared.
    """
    db = sqlite3.connect(":memory:")
    db.execute(f"CREATE TABLE t (n INTEGER PRIMARY KEY, x {affinity(array.type)})")
    db.executemany("INSERT INTO t (x) VALUES (?)", [(value,) for value in to_values(array)])
    values = [value for (value,) in db.execute("SELECT x FROM t ORDER BY n")]
    db.close()
    return values


def same(left: pa.Array, right: pa.Array) -> bool:
    """Whether two arrays have one type and equal bytes: unlike Arrow's equality, NaN is NaN and 0.0
    is not
    -0.0.
    """
    return left.type.equals(right.type, check_metadata=True) and repr(left.to_pylist()) == repr(
        right.to_pylist()
    )


@pytest.mark.parametrize(("ddl", "values"), CASES, ids=[ddl for ddl, _ in CASES])
def test_every_type_comes_back(ddl: str, values: list[Any]) -> None:
    kind = parse_schema(f"x {ddl}").field(0).type
    array = pa.array(values, kind, from_pandas=False)
    back = from_values(stored(array), kind)
    back.validate(full=True)
    assert same(back, array)
    for part in (
        array.slice(1),
        array.slice(0, 1),
        pa.array([None, *values], kind).slice(1),
        pa.array([], kind),
    ):
        assert same(from_values(stored(part), kind), part)


def test_nanoseconds_of_a_time_are_kept() -> None:
    array = pa.array([1, 10**9 + 1_000, 86_399_999_999_999], pa.time64("ns"))
    assert from_values(stored(array), array.type).equals(array)
    assert to_values(array)[:2] == ["00:00:00.000000001", "00:00:01.000001"]


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (pa.date32(), [2_932_897, -719_163, 2**31 - 1, -(2**31), 0]),
        (
            pa.timestamp("us", tz="UTC"),
            [253_402_300_800_000_000, -62_135_596_800_000_001, 2**63 - 1, -(2**63), 0],
        ),
        (pa.timestamp("us"), [253_402_300_800_000_000, -(2**63), 0]),
    ],
    ids=str,
)
def test_times_outside_the_years_of_iso_text_are_kept(
    kind: pa.DataType, numbers: list[int]
) -> None:
    bits = pa.int32() if kind == pa.date32() else pa.int64()
    array = pa.array([*numbers, None], bits).cast(kind)
    assert from_values(stored(array), kind).cast(bits).equals(array.cast(bits))
    lists = pa.ListArray.from_arrays([0, len(array)], array)
    assert from_values(stored(lists), lists.type).values.cast(bits).equals(array.cast(bits))
    structs = pa.StructArray.from_arrays([array], ["x"])
    assert from_values(stored(structs), structs.type).field(0).cast(bits).equals(array.cast(bits))
    keys = array.drop_null()
    maps = pa.MapArray.from_arrays([0, len(keys)], keys, keys)
    back = from_values(stored(maps), maps.type)
    assert back.keys.cast(bits).equals(keys.cast(bits))
    assert back.items.cast(bits).equals(keys.cast(bits))


def test_stored_values_are_readable_in_sqlite() -> None:
    assert to_values(pa.array([NOON])) == ["2026-01-31T12:30:00.250000Z"]
    assert to_values(pa.array([date(2026, 1, 31)])) == ["2026-01-31"]
    assert to_values(pa.array([Decimal("12.50")], pa.decimal128(38, 2))) == ["12.50"]
    assert to_values(pa.array([[1, 2]])) == ["[1,2]"]
    assert to_values(pa.array([{"at": NOON, "x": 1.5}])) == [
        '{"at":"2026-01-31T12:30:00.250000Z","x":1.5}'
    ]
    assert to_values(pa.array([True, None])) == [1, None]


instants = st.datetimes(
    datetime(1, 1, 1),  # noqa: DTZ001
    datetime(9999, 12, 31, 23, 59, 59, 999_999),  # noqa: DTZ001
    timezones=st.just(UTC),
)


@given(st.lists(instants))
def test_timestamps_sort_as_their_text_does(moments: list[datetime]) -> None:
    texts = to_values(pa.array(moments, pa.timestamp("us", tz="UTC")))
    assert sorted(texts) == to_values(pa.array(sorted(moments), pa.timestamp("us", tz="UTC")))


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.bool_(), st.booleans()),
    (pa.float64(), st.floats()),
    (pa.float32(), st.floats(width=32)),
    (pa.string(), texts),
    (pa.binary(), st.binary(max_size=8)),
    (pa.decimal128(38, 10), st.decimals(-(10**27), 10**27, places=10)),
    (pa.date32(), st.dates()),
    (pa.timestamp("us", tz="UTC"), instants),
]


def nested(
    kind: pa.DataType, values: st.SearchStrategy[Any]
) -> st.SearchStrategy[tuple[pa.DataType, st.SearchStrategy[Any]]]:
    optional = st.none() | values
    return st.sampled_from(
        [
            (kind, values),
            (pa.list_(kind), st.lists(optional, max_size=3)),
            (
                pa.struct([("x", kind), ('y"\n', pa.string())]),
                st.fixed_dictionaries({"x": optional, 'y"\n': st.none() | texts}),
            ),
            (pa.map_(pa.string(), kind), st.lists(st.tuples(texts, optional), max_size=3)),
            (
                pa.map_(kind, pa.int64()),
                st.lists(st.tuples(values, st.none() | st.integers(0, 9)), max_size=3),
            ),
        ]
    )


typed = (
    st.sampled_from(SCALARS)
    .flatmap(lambda scalar: nested(*scalar))
    .flatmap(lambda each: nested(*each))
)
columns = typed.flatmap(
    lambda each: st.tuples(st.just(each[0]), st.lists(st.none() | each[1], max_size=4))
)


@settings(max_examples=examples(200), deadline=None)
@given(columns)
def test_any_column_comes_back(column: tuple[pa.DataType, list[Any]]) -> None:
    kind, values = column
    array = pa.array(values, kind, from_pandas=False)
    back = from_values(stored(array), kind)
    back.validate(full=True)
    assert same(back, array)
