"""Integer columns packed into few bytes are unpacked as they were, whatever their numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.columnar.packed_array import PackedLayout, group_by_widths, row_dtype

KINDS = [np.dtype(kind) for kind in ("<i8", "u1", "<u4", "<u8", "<f8")]
LOW, HIGH = -(2**63), 2**63 - 1


def numbers(kind: np.dtype[Any], count: int) -> st.SearchStrategy[list[Any]]:
    if kind.kind == "f":
        return st.lists(st.floats(), min_size=count, max_size=count)
    low, high = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    close = (
        st.integers(low, high - 300).flatmap(
            lambda base: st.lists(st.integers(base, base + 300), min_size=count, max_size=count)
        )
        if high > 300
        else st.nothing()
    )
    return st.lists(st.integers(low, high), min_size=count, max_size=count) | close


@given(st.data(), st.integers(0, 5), st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
def test_columns_come_back(data: st.DataObject, count: int, kinds: list[np.dtype[Any]]) -> None:
    columns = [np.array(data.draw(numbers(kind, count)), kind) for kind in kinds]
    layout = PackedLayout.of(columns)
    rows = np.frombuffer(layout.pack(columns).tobytes(), row_dtype(layout.widths))
    (group,) = group_by_widths(np.frombuffer(layout.to_bytes(), np.uint8).reshape(1, -1))
    assert (group.widths, tuple(group.lowest[0].tolist())) == (layout.widths, layout.lowest)
    back = group.unpack(rows, np.array([count]), kinds)
    for column, same in zip(columns, back, strict=True):
        assert same.dtype == column.dtype
        assert same.tobytes() == column.tobytes()


@pytest.mark.parametrize(
    ("values", "width"),
    [
        ([7, 7], 1),
        ([0, 255], 1),
        ([-1, 255], 2),
        ([0, 2**16], 4),
        ([5, 5 + 2**32], 8),
        ([LOW, HIGH], 8),
        ([LOW, LOW + 1], 1),
    ],
)
def test_a_column_has_the_width_of_what_its_numbers_differ_by(
    values: list[int], width: int
) -> None:
    assert PackedLayout.of([np.array(values)]).widths == (width,)


def test_a_column_of_one_number_takes_no_bytes_behind_the_first() -> None:
    columns = [np.array([1, 2, 3]), np.array([9, 9, 9])]
    assert PackedLayout.of(columns).widths == (1, 0)
    assert PackedLayout.of(columns).pack(columns).tobytes() == bytes([0, 1, 2])


def test_entries_of_many_layouts_are_read_together_if_their_widths_are_the_same() -> None:
    written = [
        [np.array([base, base + 1]), np.array([base, base])] for base in (-5, 2**40, 2**63 - 2)
    ] + [[np.array([0, 300]), np.array([1, 1])]]
    layouts = [PackedLayout.of(columns) for columns in written]
    some, wide = group_by_widths(
        np.array([list(layout.to_bytes()) for layout in layouts], np.uint8)
    )
    assert (some.entries.tolist(), some.widths, wide.entries.tolist(), wide.widths) == (
        [0, 1, 2],
        (1, 0),
        [3],
        (2, 0),
    )
    rows = np.concatenate(
        [layout.pack(columns) for layout, columns in zip(layouts[:3], written[:3], strict=True)]
    )
    back = some.unpack(rows, np.array([2, 2, 2]), [np.dtype("<i8")] * 2)
    assert [column.tolist() for column in back] == [
        np.concatenate(columns).tolist() for columns in zip(*written[:3], strict=True)
    ]
