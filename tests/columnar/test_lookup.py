"""`sort_order` agrees with Python's sort, whether the columns fit into one word or not, and whether
the rows are sorted already or not.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.columnar.lookup import sort_order

NUMBERS = st.integers(-3, 3) | st.sampled_from([-(2**62), 2**62, 2**40])


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=30), st.booleans())
def test_rows_are_sorted_and_equal_ones_stay_in_their_order(
    rows: list[tuple[int, int, int]], in_order: bool
) -> None:
    rows = sorted(rows) if in_order else rows
    columns = [np.array([row[at] for row in rows], np.int64) for at in range(3)]
    assert sort_order(*columns).tolist() == sorted(range(len(rows)), key=lambda at: rows[at])


@given(st.lists(st.tuples(st.integers(0, 2), st.binary(min_size=2, max_size=2)), max_size=20))
def test_bytes_are_sorted_too(rows: list[tuple[int, bytes]]) -> None:
    numbers, texts = (
        np.array([row[0] for row in rows], np.int64),
        np.array([row[1] for row in rows], "S2"),
    )
    shown = [(number, text) for number, text in zip(numbers.tolist(), texts.tolist(), strict=True)]
    assert sort_order(numbers, texts).tolist() == sorted(range(len(rows)), key=lambda at: shown[at])
