"""Points in the state: records of any width are read as they were written, also where entries of
both versions are mixed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InputError, NewerFormat
from headrace.operators.windows import state as window_state
from headrace.operators.windows.pane_store import RecordStore
from headrace.testing.kernels import MemoryState

FIELDS = np.dtype([("version", "u1"), ("size", "<u4")])
WIDTH = FIELDS.itemsize
Row = tuple[int, int, bytes]
states = st.binary(min_size=WIDTH, max_size=WIDTH) | st.binary(max_size=9)
entries = st.dictionaries(
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-9, 9), states), max_size=4),
)


def names(of: list[int]) -> pa.Array:
    return pa.array([b"n%d" % each for each in of], pa.binary())


def write(store: RecordStore, state: MemoryState, given: dict[int, list[Row]]) -> None:
    rows = [row for each in given.values() for row in each]
    columns = [[row[at] for row in rows] for at in range(3)]
    table = pa.Table.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, store.schema, strict=True)],
        schema=store.schema,
    )
    store.write(
        state,
        names(list(given)),
        np.zeros(len(given), np.uint8),
        np.array([len(each) for each in given.values()], np.int64),
        table,
    )


@given(written=st.lists(entries, min_size=1, max_size=4))
def test_entries_come_back_as_they_were_written(written: list[dict[int, list[Row]]]) -> None:
    store, state, wanted = RecordStore("s", ["more"], FIELDS), MemoryState(), dict[int, list[Row]]()
    for each in written:
        write(store, state, each)
        wanted |= each
    counts, table = store.read(state, names(list(range(6))), np.zeros(6, np.uint8))
    assert counts.tolist() == [len(wanted.get(number, [])) for number in range(6)]
    found: list[dict[str, Any]] = table.to_pylist()
    assert [tuple(row.values()) for row in found] == [
        row for number in range(6) for row in wanted.get(number, [])
    ]
    assert table.schema == store.schema


def test_rows_take_only_the_bytes_in_which_they_differ() -> None:
    store, state = RecordStore("s", ["more"], FIELDS), MemoryState()
    write(
        store,
        state,
        {0: [(2**50, 2, b"\x01\x05\x00\x00\x00"), (2**50 + 300, 2, b"\x01\x09\x00\x00\x00")]},
    )
    (value,) = state.get([b"n0"])
    assert value is not None
    times_and_sizes = b"\x00\x00" + b"\x00" + b"\x2c\x01" + b"\x04"
    assert value[0] == 2
    assert value[1 + 4 * 9 :] == times_and_sizes


def test_a_newer_form_and_too_many_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store, state = RecordStore("s", ["more"], FIELDS), MemoryState()
    state.put([b"n0"], [b"\x03whatever"], np.zeros(1, np.uint8))
    with pytest.raises(NewerFormat):
        store.read(state, names([0]), np.zeros(1, np.uint8))
    monkeypatch.setattr(window_state, "MAX_ROWS", 1)
    with pytest.raises(InputError, match="up to 1 rows a group"):
        write(store, state, {0: [(1, 2, b"abcde"), (3, 4, b"fghij")]})
