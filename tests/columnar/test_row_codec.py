"""Values of any type to bytes and back."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.columnar.row_codec import decode, decode_array, encode, encode_array
from tests.short_forms import examples

ENTRY = pa.struct(
    [("id", pa.int32()), ("tags", pa.list_(pa.string())), ("price", pa.decimal128(9, 2))]
)
entries = st.fixed_dictionaries(
    {
        "id": st.none() | st.integers(-(1 << 31), (1 << 31) - 1),
        "tags": st.none() | st.lists(st.none() | st.text(max_size=3), max_size=3),
        "price": (
            st.none()
            | st.integers(-(10**9) + 1, 10**9 - 1).map(lambda units: Decimal(units).scaleb(-2))
        ),
    }
)
CASES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.integers(-(1 << 63), (1 << 63) - 1)),
    (pa.bool_(), st.booleans()),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.string(), st.text(max_size=5)),
    (pa.binary(), st.binary(max_size=5)),
    (pa.timestamp("us", tz="UTC"), st.integers(-(10**15), 10**15)),
    (pa.list_(pa.int16()), st.lists(st.none() | st.integers(-5, 5), max_size=4)),
    (
        pa.list_(pa.list_(pa.string())),
        st.lists(st.none() | st.lists(st.none() | st.text(max_size=3), max_size=3), max_size=3),
    ),
    (ENTRY, entries),
    (pa.list_(ENTRY), st.lists(st.none() | entries, max_size=3)),
    (
        pa.map_(pa.string(), pa.int64()),
        st.dictionaries(st.text(max_size=3), st.none() | st.integers(-9, 9), max_size=3).map(
            lambda each: list(each.items())
        ),
    ),
]


@pytest.mark.parametrize(
    ("kind", "values"), CASES, ids=lambda each: str(each) if isinstance(each, pa.DataType) else ""
)
@given(data=st.data())
@settings(max_examples=examples(40), deadline=None)
def test_rows_round_trip(
    kind: pa.DataType, values: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    array = pa.array(data.draw(st.lists(values, max_size=6)), kind)
    encoded = encode(array)
    again = decode(encoded, kind)
    again.validate(full=True)
    assert again.type == kind
    assert again.to_pylist() == array.to_pylist()
    assert encode(array.slice(1)) == encoded[1:], "a value's bytes do not depend on its neighbours"
    assert decode_array(encode_array(array).slice(1), kind).to_pylist() == array.to_pylist()[1:]


def test_the_first_parts_of_a_struct_are_read_alone() -> None:
    rows = pa.array(
        [{"a": 1, "b": "x", "c": None}, {"a": None, "b": "", "c": 2.0}],
        pa.struct([("a", pa.int8()), ("b", pa.string()), ("c", pa.float64())]),
    )
    first = decode_array(encode_array(rows), pa.struct(list(rows.type)[:2]))
    assert first.to_pylist() == [{"a": 1, "b": "x"}, {"a": None, "b": ""}]


def test_the_bytes_are_those_that_stored_states_have() -> None:
    assert encode(
        pa.array(
            [{"n": 258, "s": "ab"}, {"n": None, "s": None}],
            pa.struct([("n", pa.int16()), ("s", pa.string())]),
        )
    ) == [
        b"\x01\x02\x01\x01\x02\0\0\0ab",
        b"\0\0\0\0\0\0\0\0",
    ]
    assert encode(pa.array([["a", None, "bc"]], pa.list_(pa.string()))) == [
        b"\x03\0\0\0\x01\0\x01\x01\0\0\0\0\0\0\0\x02\0\0\0abc"
    ]
