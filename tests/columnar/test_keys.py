"""Key bytes: equal for equal keys, different for different ones, in the order of values, whatever
else is in the batch.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.columnar.keys import (
    KEY_GROUPS,
    as_array,
    canonicalize,
    decode_keys,
    encode_keys,
    key_groups,
    key_list,
)
from headrace.columnar.murmur2 import murmur2
from headrace.errors import InputError, UnknownColumn
from tests.short_forms import examples

TYPES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.integers(-(1 << 63), (1 << 63) - 1)),
    (pa.int32(), st.integers(-(1 << 31), (1 << 31) - 1)),
    (pa.int8(), st.integers(-128, 127)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.float32(), st.floats(allow_nan=False, width=32)),
    (pa.bool_(), st.booleans()),
    (
        pa.decimal128(38, 3),
        st.integers(-(10**38) + 1, 10**38 - 1).map(lambda units: Decimal(f"{units}e-3")),
    ),
    (pa.string(), st.text(max_size=4)),
    (pa.binary(), st.binary(max_size=4)),
    (pa.date32(), st.dates()),
    (pa.timestamp("us"), st.datetimes()),
]


def encoded(values: list[Any], kind: pa.DataType) -> list[bytes]:
    return key_list(encode_keys(pa.table({"k": pa.array(values, kind)}), ["k"]))


@pytest.mark.parametrize(
    ("kind", "values"), TYPES, ids=lambda each: str(each) if isinstance(each, pa.DataType) else ""
)
@given(data=st.data())
@settings(max_examples=examples(30), deadline=None)
def test_one_column_keeps_the_order_of_values(
    kind: pa.DataType, values: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    drawn = data.draw(st.lists(values, min_size=1, max_size=10))
    by_bytes = sorted(zip(encoded(drawn, kind), drawn, strict=True), key=lambda pair: pair[0])
    in_order = sorted(drawn, key=lambda value: value.encode() if isinstance(value, str) else value)
    assert [value for _, value in by_bytes] == in_order
    assert len(set(encoded(drawn, kind))) == len(set(drawn))


@given(
    st.lists(
        st.tuples(st.none() | st.integers(-3, 3), st.none() | st.text("ab\x00\x01", max_size=3)),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=examples(60), deadline=None)
def test_several_columns_never_run_into_each_other(
    pairs: list[tuple[int | None, str | None]],
) -> None:
    table = pa.table(
        {
            "a": pa.array([a for a, _ in pairs], pa.int64()),
            "b": pa.array([b for _, b in pairs], pa.string()),
        }
    )
    keys = key_list(encode_keys(table, ["a", "b"]))
    assert len(set(keys)) == len(set(pairs))
    assert len(set(zip(keys, pairs, strict=True))) == len(set(pairs))


@pytest.mark.parametrize("columns", [["n"], ["s"], ["n", "i"], ["n", "s"], ["f"]])
def test_a_key_does_not_depend_on_its_neighbours(columns: list[str]) -> None:
    rows = [
        {"n": n, "s": s, "i": i, "f": f}
        for n, s, i, f in [
            (1, "a", 5, 0.5),
            (None, None, None, None),
            (-7, "", 0, -0.0),
            (2, "bc", -1, math.nan),
        ]
    ]
    schema = pa.schema(
        [("n", pa.int64()), ("s", pa.string()), ("i", pa.int32()), ("f", pa.float64())]
    )
    together = key_list(encode_keys(pa.Table.from_pylist(rows, schema), columns))
    alone = [key_list(encode_keys(pa.Table.from_pylist([row], schema), columns))[0] for row in rows]
    sliced = pa.concat_tables(
        [pa.Table.from_pylist(rows, schema).slice(1), pa.Table.from_pylist(rows[:1], schema)]
    )
    assert together == alone
    assert key_list(encode_keys(sliced, columns)) == [*alone[1:], alone[0]]


def test_the_bytes_are_those_that_stored_states_have() -> None:
    assert encoded([5, -1], pa.int64()) == [
        b"\x80\x00\x00\x00\x00\x00\x00\x05",
        b"\x7f\xff\xff\xff\xff\xff\xff\xff",
    ]
    assert encoded(["", "ä", None], pa.string()) == [b"\x01", b"\x01\xc3\xa4", b""]
    both = pa.table({"a": pa.array([1, None], pa.int16()), "b": pa.array(["x", None])})
    assert key_list(encode_keys(both, ["a", "b"])) == [
        b"\0\0\0\x02\x80\x01\0\0\0\x01x",
        b"\xff\xff\xff\xff\xff\xff\xff\xff",
    ]
    assert key_list(encode_keys(both, [])) == [b"\0", b"\0"]


def test_zeros_and_nans_are_one_key_each() -> None:
    odd_nan = np.array([0x7FF8000000000001], np.uint64).view(np.float64)[0]
    array = pa.array([0.0, -0.0, math.nan, -math.nan, odd_nan])
    keys = encoded(array.to_pylist(), pa.float64())
    assert len(set(keys)) == 2
    assert canonicalize(array).view(pa.int64()).to_pylist() == [0, 0, *[0x7FF8000000000000] * 3]


def test_key_groups_are_murmur2_of_the_bytes() -> None:
    for values, kind in (
        (list(range(1000)), pa.int64()),
        ([f"user {n}" for n in range(1000)], pa.string()),
    ):
        keys = encode_keys(pa.table({"k": pa.array(values, kind)}), ["k"])
        groups = key_groups(keys)
        assert groups.tolist() == [murmur2(key) % KEY_GROUPS for key in key_list(keys)]
        assert groups.tolist() == key_groups(pa.array(key_list(keys), pa.binary())).tolist()
        assert len(set(groups.tolist())) == KEY_GROUPS


def test_types_that_cannot_be_keys_are_refused() -> None:
    table = pa.table({"amount": [1], "tags": [["a"]]})
    with pytest.raises(UnknownColumn, match="did you mean 'amount'"):
        encode_keys(table, ["amuont"])
    with pytest.raises(InputError, match="cannot be part of a key"):
        encode_keys(table, ["tags"])


@pytest.mark.parametrize(
    ("kind", "values"), TYPES, ids=lambda each: str(each) if isinstance(each, pa.DataType) else ""
)
@given(data=st.data())
@settings(max_examples=examples(20), deadline=None)
def test_values_can_be_read_back_from_a_key(
    kind: pa.DataType, values: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    drawn = data.draw(
        st.lists(
            st.tuples(st.none() | values, st.none() | st.text(max_size=2), st.integers(-5, 5)),
            min_size=1,
            max_size=6,
        )
    )
    schema = pa.schema([("a", kind), ("b", pa.string()), ("c", pa.int16())])
    table = pa.Table.from_pylist([dict(zip("abc", row, strict=True)) for row in drawn], schema)
    for names in (["a"], ["b"], ["c"], ["a", "c"], ["a", "b", "c"], []):
        keys = encode_keys(table, names)
        fields = [schema.field(name) for name in names]
        for which in (
            keys,
            keys.slice(1),
            keys.take(pa.array(list(range(len(keys)))[::-1])).slice(0, 2),
        ):
            decoded = decode_keys(which, fields)
            assert [array.type for array in decoded] == [field.type for field in fields]
            assert not names or encode_keys(pa.table(decoded, names), names).cast(
                pa.binary()
            ) == which.cast(pa.binary())
        assert [canonicalize(as_array(table[name])) for name in names] == decode_keys(keys, fields)
