"""Columns of bytes: what is quick for values of one length gives the same as Arrow's own."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.columnar.buffers import as_binary, bytes_list, same_width, take_bytes
from headrace.errors import ConfigurationError

columns = (
    st.lists(st.none() | st.binary(max_size=4))
    | st.lists(st.binary(min_size=3, max_size=3))
    | st.lists(st.binary(max_size=1))
    | st.lists(st.sampled_from([b"\0\0", b"a\0", b"\0a"]))
)


@given(columns, st.data())
def test_some_values_are_taken_and_listed_as_arrow_does(
    values: list[bytes | None], data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(values)))
    column = pa.array(values, pa.binary()).slice(first)
    assert bytes_list(column) == values[first:]
    positions = np.array(
        data.draw(st.lists(st.integers(0, len(column) - 1)) if len(column) else st.just([])),
        np.int64,
    )
    assert take_bytes(column, positions).equals(column.take(pa.array(positions)))
    plain = same_width(column)
    lengths = {0 if value is None else len(value) for value in values[first:]}
    assert (plain is not None) == (len(lengths) == 1 and lengths != {0})
    if plain is not None:
        assert as_binary(plain).equals(column)


@given(st.lists(st.binary(min_size=5, max_size=5)), st.integers(0, 3))
def test_fixed_size_columns_too(values: list[bytes], first: int) -> None:
    column = pa.array(values, pa.binary(5)).slice(first)
    assert bytes_list(column) == values[first:]
    back = np.arange(len(column))[::-1].copy()
    assert take_bytes(column, back).to_pylist() == values[first:][::-1]
    assert take_bytes(column, back).type == pa.binary()


def test_more_bytes_than_a_column_can_have_are_refused() -> None:
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, "V1024"), (1 << 21,), (0,))
    with pytest.raises(ConfigurationError, match="2048 MiB of one step's state"):
        as_binary(huge)
