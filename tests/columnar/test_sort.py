"""Key codes: ordered as the bytes of the keys, and equal only for equal keys."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.columnar.keys import encode_keys
from headrace.columnar.sort import key_codes

numbers = st.integers(0, 3) | st.integers(-(2**63), 2**63 - 1) | st.integers(-1000, 1000)


def check(keys: pa.Array) -> None:
    codes, plain = key_codes(keys), keys.to_pylist()
    assert [plain[at] for at in np.argsort(codes, kind="stable")] == sorted(plain)
    assert (
        len(set(zip(plain, codes.tolist(), strict=True)))
        == len(set(plain))
        == len(set(codes.tolist()))
    )


@given(
    st.integers(1, 4).flatmap(lambda count: st.lists(st.tuples(*[numbers] * count), max_size=30))
)
def test_keys_of_several_numbers(rows: list[tuple[int, ...]]) -> None:
    columns = list(zip(*rows, strict=True))
    check(
        encode_keys(
            pa.table({f"c{at}": pa.array(column, pa.int64()) for at, column in enumerate(columns)}),
            [f"c{at}" for at in range(len(columns))],
        )
    )


@pytest.mark.parametrize("width", [1, 7, 8, 9, 16, 17, 40])
@given(data=st.data())
def test_keys_of_any_width(width: int, data: st.DataObject) -> None:
    byte = st.sampled_from([0, 1, 255])
    values = data.draw(
        st.lists(
            st.lists(byte, min_size=width, max_size=width).map(bytes)
            | st.binary(min_size=width, max_size=width),
            max_size=20,
        )
    )
    check(pa.array([b"\0" * width, *values], pa.binary(width)).slice(1))


@given(st.lists(st.binary(max_size=5)))
def test_keys_of_varying_length(values: list[bytes]) -> None:
    check(pa.array(values, pa.binary()))
