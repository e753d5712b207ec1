"""Rows as JSON and back: exact in both directions, by Arrow's reader where possible, and with a
reason for every record that does not fit.
"""

import json
import math
import random
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import BadRows
from headrace.types import json_codec
from headrace.types.json_codec import decode_rows, decode_rows_exactly, encode_rows
from headrace.types.schema import parse_schema
from headrace.types.schema_history import SchemaHistory
from tests.short_forms import examples

MIXED = parse_schema(
    "b BOOLEAN, i TINYINT, l BIGINT, f FLOAT, d DOUBLE, s STRING, x BINARY, day DATE, at TIMESTAMP,"
    " wall TIMESTAMP_NTZ, span INTERVAL DAY TO SECOND, t TIME, money DECIMAL(12,3), list"
    " ARRAY<DATE>, part STRUCT<x: BINARY, y: ARRAY<DECIMAL(5,1)>>"
)
WITH_MAPS = pa.schema(
    [*MIXED, *parse_schema("m MAP<STRING, TIMESTAMP>, pairs MAP<INT, STRUCT<a: DOUBLE>>")]
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
moments = st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999999))  # noqa: DTZ001
finite = {"allow_nan": False, "allow_infinity": False}


def rows(floats: dict[str, bool]) -> st.SearchStrategy[dict[str, Any]]:
    def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.none() | values

    return st.fixed_dictionaries(
        {
            "b": maybe(st.booleans()),
            "i": maybe(st.integers(-128, 127)),
            "l": maybe(st.integers(-(2**63), 2**63 - 1)),
            "f": maybe(st.floats(width=32, **floats)),
            "d": maybe(st.floats(**floats)),  # type: ignore[arg-type]
            "s": maybe(texts),
            "x": maybe(st.binary(max_size=5)),
            "day": maybe(st.dates()),
            "at": maybe(moments.map(lambda moment: moment.replace(tzinfo=UTC))),
            "wall": maybe(moments),
            "span": maybe(st.timedeltas(timedelta(days=-(10**6)), timedelta(days=10**6))),
            "t": maybe(st.times()),
            "money": maybe(st.decimals(-(10**8), 10**8, places=3)),
            "list": maybe(st.lists(maybe(st.dates()), max_size=3)),
            "part": maybe(
                st.fixed_dictionaries(
                    {
                        "x": maybe(st.binary(max_size=2)),
                        "y": maybe(st.lists(maybe(st.decimals(-999, 999, places=1)), max_size=2)),
                    }
                )
            ),
            "m": maybe(
                st.dictionaries(
                    texts, maybe(moments.map(lambda moment: moment.replace(tzinfo=UTC))), max_size=2
                ).map(lambda m: list(m.items()))
            ),
            "pairs": maybe(
                st.dictionaries(
                    st.integers(-5, 5),
                    maybe(st.fixed_dictionaries({"a": maybe(st.floats(**floats))})),  # type: ignore[arg-type]
                    max_size=2,
                ).map(lambda m: list(m.items()))
            ),
        }
    )


def same(one: pa.RecordBatch, other: pa.RecordBatch) -> bool:
    """Equal, with NaN equal to itself."""
    return repr(one.to_pylist()) == repr(other.to_pylist()) and one.schema.equals(
        other.schema, check_metadata=True
    )


@settings(max_examples=examples(40))
@given(st.lists(rows(finite), min_size=1, max_size=5))
def test_plain_rows_are_decoded_by_arrow(sample: list[dict[str, Any]]) -> None:
    batch = pa.RecordBatch.from_pylist(sample, schema=MIXED)
    values = encode_rows(batch)
    assert [json.loads(value) for value in values]
    by_arrow = json_codec._decode_with_arrow(values, MIXED)
    assert by_arrow is not None
    assert same(by_arrow, batch)
    assert same(decode_rows_exactly(values, MIXED).batch, batch)


@settings(max_examples=examples(40))
@given(st.lists(rows({}), max_size=5))
def test_any_rows_come_back(sample: list[dict[str, Any]]) -> None:
    batch = pa.RecordBatch.from_pylist(sample, schema=WITH_MAPS)
    decoded = decode_rows(encode_rows(batch), WITH_MAPS)
    assert decoded.misfits == {}
    assert decoded.rows is None
    assert same(decoded.batch, batch)


def test_slices_come_back() -> None:
    batch = pa.RecordBatch.from_pylist(
        [{"list": [date(2024, 1, n + 1)], "m": [(str(n), None)]} for n in range(9)],
        schema=WITH_MAPS,
    )
    assert same(decode_rows(encode_rows(batch.slice(3, 4)), WITH_MAPS).batch, batch.slice(3, 4))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"null", "it is null, not an object"),
        (b"[1]", "it is an array"),
        (b'{"n":1}{"n":2}', "not JSON"),
        (b'{"n":1}\n{"n":2}', "not JSON"),
        (b"{}", "NOT NULL"),
        (b'{"n":null}', "NOT NULL"),
        (b'{"n":1,"zz":1}', "unknown column 'zz'"),
        (b'{"n":true}', "column 'n': it is a boolean"),
        (b'{"n":1.0}', "column 'n': it is a number, not a whole number"),
        (b'{"n":2147483648}', "out of range"),
        (b'{"n":1,"f":1e39}', "beyond"),
        (b'{"n":1,"d":NaN}', "no JSON number"),
        (b'{"n":1,"d":1e400}', "beyond"),
        (b'{"n":1,"d":"nan"}', "column 'd'"),
        (b'{"n":1,"s":5}', "not a string"),
        (b'{"n":1,"s":"\\ud800"}', "surrogate"),
        (b'{"n":1,"x":"***"}', "base64"),
        (b'{"n":1,"day":"2024-02-30"}', "column 'day'"),
        (b'{"n":1,"at":"2024-01-01T00:00:00"}', "column 'at'"),
        (b'{"n":1,"money":"1.2345"}', "column 'money'"),
        (b'{"n":1,"part":{"id":null}}', "NOT NULL"),
        (b'{"n":1,"part":{"id":1,"more":2}}', "unknown field 'more'"),
        (b'{"n":1,"m":{"a":"x"}}', "column 'm': ['a']"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_values_that_do_not_fit_are_named_and_their_neighbours_kept(
    value: bytes, reason: str
) -> None:
    schema = parse_schema(
        "n INT NOT NULL, f FLOAT, d DOUBLE, s STRING, x BINARY, day DATE, at TIMESTAMP, money"
        " DECIMAL(5,2), part STRUCT<id: INT NOT NULL>, m MAP<STRING, INT>"
    )
    for columns in (schema, pa.schema([column for column in schema if column.name != "m"])):
        if "m" not in columns.names and b'"m"' in value:
            continue
        decoded = decode_rows([b'{"n":7}', value, b'{"n":8}'], columns)
        assert list(decoded.misfits) == [1]
        assert reason in decoded.misfits[1]
        assert decoded.rows == [0, 2]
        assert decoded.batch.column("n").to_pylist() == [7, 8]


def test_json_of_other_writers_is_read_leniently() -> None:
    schema = parse_schema("n BIGINT, d DOUBLE, money DECIMAL(5,2), at TIMESTAMP, s STRING")
    values = [
        b' { "s" : "\\u00e4", "n" : 1 } ',
        b'{"d":1,"money":1.5}',
        b'{"at":"2024-01-01T02:00:00+02:00"}',
        b'{"n":1,"n":2}',
    ]
    decoded = decode_rows(values, schema)
    assert decoded.misfits == {}
    assert decoded.batch.column("n").to_pylist() == [1, None, None, 2]
    assert decoded.batch.column("d").to_pylist()[1] == 1.0
    assert decoded.batch.column("money").to_pylist()[1] == Decimal("1.50")
    assert decoded.batch.column("at").to_pylist()[2] == datetime(2024, 1, 1, tzinfo=UTC)


def test_columns_of_a_newer_schema_can_be_ignored() -> None:
    schema = parse_schema("n BIGINT")
    assert decode_rows([b'{"n":1,"later":2}'], schema, ignored=["later"]).batch.column(
        "n"
    ).to_pylist() == [1]


def test_years_that_iso_cannot_write_are_refused() -> None:
    schema = parse_schema("at ARRAY<TIMESTAMP>")
    batch = pa.RecordBatch.from_arrays(
        [pa.array([[2**62]], pa.list_(pa.int64())).cast(schema.types[0])], schema=schema
    )
    with pytest.raises(BadRows, match="'at'"):
        encode_rows(batch)


def test_a_float_is_parsed_to_its_own_precision_once() -> None:
    schema = parse_schema("f FLOAT")
    tricky = (  # just below the middle of two floats: by way of a double it would be rounded up
        b'{"f":1.00000017881393432617187499}'
    )
    for found in (decode_rows([tricky], schema).batch, decode_rows_exactly([tricky], schema).batch):
        assert found.column("f").to_pylist() == [1.0000001192092896]


def test_both_ways_agree_on_mangled_values() -> None:
    """What Arrow's reader takes must be what the exact way takes; and it must survive whatever
    comes.
    """
    schema = parse_schema(
        "a BIGINT, s STRING, d DOUBLE, l ARRAY<INT>, st STRUCT<x: INT, y: ARRAY<STRING>>, at"
        " TIMESTAMP, b BOOLEAN"
    )
    good = (
        b'{"a":1,"s":"x","d":1.5,"l":[1,null],"st":{"x":1,"y":["q"]},'
        b'"at":"2024-01-01T00:00:00Z","b":true}'
    )
    pieces = [
        b"{",
        b"}",
        b"[",
        b"]",
        b"null",
        b"1",
        b'"',
        b",",
        b":",
        b"true",
        b'"a"',
        b"\\",
        b"\n",
        b"-",
        b"e9",
        b"\x00",
        b"{}",
        b"NaN",
        b"\xff",
        b"/",
    ]
    chance = random.Random(7)
    taken = 0
    for _ in range(3_000):
        value = bytearray(good)
        for _ in range(chance.randint(0, 3)):
            at = chance.randint(0, len(value))
            value[at : at + chance.choice([0, 0, 1, 4])] = chance.choice(pieces)
        values = [good, bytes(value)]
        by_arrow, exact = (
            json_codec._decode_with_arrow(values, schema),
            decode_rows_exactly(values, schema),
        )
        if by_arrow is not None:
            taken += 1
            assert exact.misfits == {}
            assert same(by_arrow, exact.batch)
        by_arrow_counts: Counter[str] = Counter()
        exact_counts: Counter[str] = Counter()
        lenient = decode_rows(values, schema, unknown=by_arrow_counts)
        exact = decode_rows_exactly(values, schema, unknown=exact_counts)
        assert lenient.misfits == exact.misfits
        assert same(lenient.batch, exact.batch)
        assert +by_arrow_counts == +exact_counts
    assert taken > 500


def test_records_of_an_older_schema_have_its_names() -> None:
    schema = parse_schema("n BIGINT, b STRING NOT NULL, l ARRAY<BIGINT>, s STRUCT<x: INT>")
    history = SchemaHistory(
        renamed=(("a", "b"), ("aa", "b"), ("list", "l"), ("part", "s")),
        dropped=(("gone", "INT"), ("lost", "MAP<STRING, INT>")),
    )
    values = [
        b'{"n":1,"a":"x","list":[1],"part":{"x":1},"gone":5}',
        b'{"n":2,"aa":"y"}',
        b'{"n":3,"b":"z","l":[2],"s":null}',
    ]
    expected = [
        {"n": 1, "b": "x", "l": [1], "s": {"x": 1}},
        {"n": 2, "b": "y", "l": None, "s": None},
        {"n": 3, "b": "z", "l": [2], "s": None},
    ]
    by_arrow = json_codec._decode_with_arrow(values, schema, history=history)
    assert by_arrow is not None
    assert by_arrow.to_pylist() == expected
    assert decode_rows_exactly(values, schema, history=history).batch.to_pylist() == expected
    with_map = [b'{"n":1,"b":"x","lost":{"k":1}}']
    assert decode_rows(with_map, schema, history=history).batch.num_rows == 1
    unknown = decode_rows([b'{"n":1,"b":"x","other":1}'], schema, history=history)
    assert unknown.misfits == {0: "it has the unknown column 'other'"}


def test_not_a_number_is_a_string() -> None:
    batch = pa.RecordBatch.from_pylist(
        [{"d": math.nan}, {"d": -math.inf}], schema=parse_schema("d DOUBLE")
    )
    assert encode_rows(batch) == [b'{"d":"NaN"}', b'{"d":"-Infinity"}']


def test_unknown_fields_are_counted_and_ignored() -> None:
    schema = pa.schema(
        [("n", pa.int64()), ("s", pa.struct([("x", pa.int64())])), ("at", pa.timestamp("us"))]
    )
    plain = b'{"n":1,"s":{"x":2},"at":"2026-01-31T12:00:00"}'
    cases: list[tuple[list[bytes], dict[str, int]]] = [
        ([plain, plain], {}),
        (
            [plain, plain[:-1] + b',"new":7}', plain[:-1] + b',"new":8,"other":"a"}'],
            {"new": 2, "other": 1},
        ),
        ([plain[:-1] + b',"new":7}', plain[:-1] + b',"new":"text"}'], {"new": 2}),
        ([b'{"n":1,"s":{"x":2,"y":3},"at":"2026-01-31T12:00:00"}', plain], {"s.y": 1}),
        ([plain[:-1] + b',"new":{"deep":[1,{"a":2}]}}', plain], {"new": 1}),
    ]
    for values, expected in cases:
        unknown: Counter[str] = Counter()
        decoded = decode_rows(values, schema, unknown=unknown)
        assert (decoded.misfits, dict(unknown)) == ({}, expected)
        assert same(decoded.batch, decode_rows([plain] * len(values), schema).batch)
        exact: Counter[str] = Counter()
        assert same(decode_rows_exactly(values, schema, unknown=exact).batch, decoded.batch)
        assert exact == unknown
        if expected:
            assert decode_rows(values, schema).misfits


def test_records_with_fields_of_their_own_each_make_no_columns() -> None:
    schema = pa.schema([("n", pa.int64())])
    values = [f'{{"n":{n},"field {n}":1}}'.encode() for n in range(2_000)]
    unknown: Counter[str] = Counter()
    decoded = decode_rows(values, schema, unknown=unknown)
    assert decoded.batch.column(0).to_pylist() == list(range(2_000))
    assert len(unknown) == 2_000
