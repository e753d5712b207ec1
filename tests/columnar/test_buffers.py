"""Columns of bytes, read without a copy exactly as Arrow reads them, and tables that are split into
batches without losing a row.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.columnar.buffers import (
    MAX_BATCH_BYTES,
    as_binary,
    bytes_list,
    equal_length_values,
    split_table,
    take_bytes,
)
from headrace.errors import ConfigurationError
from headrace.log.dead_letters import rows_to_json_column

columns = (
    st.lists(st.none() | st.binary(max_size=4))
    | st.lists(st.binary(min_size=3, max_size=3))
    | st.lists(st.binary(max_size=1))
    | st.lists(st.sampled_from([b"\0\0", b"a\0", b"\0a"]))
)


@given(columns, st.data())
def test_take_and_to_list_equal_arrow(values: list[bytes | None], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(values)))
    column = pa.array(values, pa.binary()).slice(first)
    assert bytes_list(column) == values[first:]
    positions = np.array(
        data.draw(st.lists(st.integers(0, len(column) - 1)) if len(column) else st.just([])),
        np.int64,
    )
    assert take_bytes(column, positions).equals(column.take(pa.array(positions)))
    plain = equal_length_values(column)
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


def lazy_text(rows: int, bytes_a_row: int) -> pa.Array:
    """A column of zero bytes whose memory is allocated only when it is read."""
    offsets = (np.arange(rows + 1) * bytes_a_row).astype(np.int32)
    return pa.StringArray.from_buffers(
        rows, pa.py_buffer(offsets), pa.py_buffer(np.zeros(rows * bytes_a_row, np.uint8))
    )


def test_a_column_that_does_not_fit_into_one_batch_comes_in_several() -> None:
    text = lazy_text(1_100, 1_000_000)
    rows = pa.table({"text": pa.chunked_array([text, text]), "n": pa.array(range(2_200))})
    split = list(split_table(rows.slice(0, 2_200)))
    assert [number for batch in split for number in batch.column("n").to_pylist()] == list(
        range(2_200)
    )
    assert max(batch.nbytes for batch in split) <= MAX_BATCH_BYTES


@pytest.mark.parametrize("max_bytes", [1, 100, 10_000])
def test_rows_of_any_size_keep_their_order(max_bytes: int) -> None:
    batches = [
        pa.record_batch({"n": [first, first + 1, first + 2], "text": ["x" * first, "", None]})
        for first in range(0, 60, 3)
    ]
    split = list(split_table(pa.Table.from_batches(batches), max_bytes))
    assert pa.Table.from_batches(split).equals(pa.Table.from_batches(batches).combine_chunks())
    assert all(batch.nbytes <= max_bytes or batch.num_rows == 1 for batch in split)
    assert max_bytes < 10_000 or len(split) == 1, "as few as the bound allows"


def test_an_empty_table_has_no_batches() -> None:
    assert list(split_table(pa.table({"n": pa.array([], pa.int64())}))) == []


def test_every_row_has_its_text_however_many_batches_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.columnar.buffers.MAX_BATCH_BYTES", 100)
    rows = pa.table({"n": pa.array(range(500))})
    assert rows_to_json_column(rows).to_pylist() == [f'{{"n":{number}}}' for number in range(500)]
    assert rows_to_json_column(rows).num_chunks > 10
