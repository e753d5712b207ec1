"""Rows in order of several columns, compared with numpy's lexsort."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.columnar.sort import row_order

numbers = st.integers(0, 3) | st.integers(-(2**63), 2**63 - 1) | st.integers(-(2**40), 2**40)
rows = st.integers(1, 4).flatmap(
    lambda count: st.lists(st.tuples(*[numbers] * count), min_size=1, max_size=40)
)


@given(rows, st.integers(0, 4), st.booleans())
def test_rows_come_in_the_order_of_all_columns_and_of_arrival(
    given_rows: list[tuple[int, ...]], likely: int, in_order: bool
) -> None:
    found = sorted(given_rows) if in_order else given_rows
    columns = [np.array(column, np.int64) for column in zip(*found, strict=True)]
    expected = np.lexsort(columns[::-1])
    order = row_order(columns, likely=min(likely, len(columns) - 1))
    assert (np.arange(len(found)) if order is None else order).tolist() == expected.tolist()
    if in_order and len(columns) == 1:
        assert order is None


def test_unsigned_words_and_small_types() -> None:
    codes = np.array([2**64 - 1, 0, 5, 2**63], np.uint64)
    assert np.array_equal(row_order([np.zeros(4, np.int32), codes]), [1, 2, 3, 0])  # type: ignore[arg-type]  # None would be no array
    assert row_order([np.zeros(0, np.int64), np.zeros(0, np.int32)]) is None


def test_many_rows_that_fit_no_word() -> None:
    chance = np.random.default_rng(3)
    columns = [
        chance.integers(0, 5, 5000),
        chance.integers(-(2**62), 2**62, 5000) // 2**61,
        chance.integers(0, 2**62, 5000),
        chance.integers(0, 2**62, 5000),
    ]
    assert np.array_equal(row_order(columns), np.lexsort(columns[::-1]))  # type: ignore[arg-type]  # None would be no array
