"""The newest row of each key, compared with a plain dict."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.operators.changelog import fold
from headrace.operators.latest_rows import LatestKernel
from headrace.testing.kernels import MemoryState

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.string()), ("w", pa.list_(pa.int64()))])
STORED = SCHEMA.append(pa.field("_change_type", pa.string()))
changes = st.sampled_from(["insert", "update_postimage", "update_preimage", "delete"])
row = st.tuples(
    st.integers(0, 4),
    st.none() | st.sampled_from(["x", "yy", ""]),
    st.none() | st.lists(st.integers(0, 2), max_size=2),
    changes,
)
history = st.lists(st.lists(row, max_size=8), min_size=1, max_size=6)


def table(ticks: list[tuple[int, list[Any]]]) -> pa.Table:
    rows = [(*each, tick) for tick, found in ticks for each in found]
    columns: list[Any] = list(zip(*rows, strict=True)) or [[], [], [], [], []]
    return pa.table(
        [
            pa.array(column, kind)
            for column, kind in zip(columns, [*STORED.types, pa.int64()], strict=True)
        ],
        names=[*STORED.names, "_tick"],
    )


def model(ticks: list[list[Any]]) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for key, v, w, change in (each for tick in ticks for each in tick):
        if change == "delete":
            found.pop(key, None)
        elif change != "update_preimage":
            found[key] = {"k": key, "v": v, "w": w}
    return found


@given(history, st.integers(1, 5))
def test_changes_fold_to_the_newest_rows_at_every_tick_however_ticks_are_put_into_calls(
    ticks: list[list[Any]], a_call: int
) -> None:
    numbered = list(enumerate(ticks, 1))
    whole = LatestKernel("s", SCHEMA, ["k"]).step(MemoryState(), table(numbered))
    state = MemoryState()
    calls = [numbered[first : first + a_call] for first in range(0, len(numbered), a_call)]
    parts = [LatestKernel("s", SCHEMA, ["k"]).step(state, table(each)) for each in calls]
    assert pa.concat_tables(parts).equals(whole)
    for number in range(1, len(ticks) + 1):
        emitted = whole.filter(pa.compute.less_equal(whole["_tick"], number))
        assert {key[0]: row for key, row in fold(emitted, ["k"]).items()} == model(ticks[:number])


def test_a_row_that_stays_as_it_was_is_no_change() -> None:
    state = MemoryState()
    kernel = LatestKernel("s", SCHEMA, ["k"])
    first = kernel.step(state, table([(1, [(1, "x", None, "insert")])]))
    again = kernel.step(state, table([(2, [(1, "x", None, "update_postimage")])]))
    assert (first.num_rows, again.num_rows) == (1, 0)


MARKED = pa.schema(
    [("k", pa.int64()), ("v", pa.string()), ("title", pa.string()), ("_marks", pa.string())]
)
UNCHANGED = '{"v": {"unchanged": true}}'


def marked(rows: list[tuple[int, str | None, str, str, int]]) -> pa.Table:
    listed = [
        {
            "k": k,
            "v": v,
            "title": title,
            "_marks": UNCHANGED if v == "?" else None,
            "_change_type": change,
            "_tick": tick,
        }
        for k, v, title, change, tick in rows
    ]
    schema = pa.schema([*MARKED, ("_change_type", pa.string()), ("_tick", pa.int64())])
    return pa.Table.from_pylist(
        [{**row, "v": None if row["v"] == "?" else row["v"]} for row in listed], schema=schema
    )


@pytest.mark.parametrize("a_call", [1, 2, 10])
def test_values_that_a_change_left_as_they_were_are_those_before(a_call: int) -> None:
    """In one call or in many; what was never seen stays marked; a null is a null."""
    rows = [
        (1, "long", "a", "insert", 1),
        (1, "?", "b", "update_postimage", 1),
        (2, "?", "x", "update_postimage", 1),
        (1, "?", "c", "update_postimage", 2),
        (3, None, "n", "insert", 2),
        (3, "?", "m", "update_postimage", 3),
        (1, "?", "c", "delete", 3),
        (1, "?", "again", "insert", 4),
        (2, "?", "y", "update_postimage", 4),
    ]
    state, kernel = MemoryState(), LatestKernel("s", MARKED, ["k"])
    emitted = pa.concat_tables(
        [
            kernel.step(state, marked([row for row in rows if first <= row[4] < first + a_call]))
            for first in range(1, 5, a_call)
        ]
    )
    newest = {
        row["k"]: (row["title"], row["v"], row["_marks"]) for row in fold(emitted, ["k"]).values()
    }
    assert newest == {
        1: ("again", None, UNCHANGED),
        2: ("y", None, UNCHANGED),
        3: ("m", None, None),
    }
    until_2 = fold(emitted.filter(pa.compute.less_equal(emitted["_tick"], 2)), ["k"])
    assert [
        (row["title"], row["v"], row["_marks"]) for row in until_2.values() if row["k"] == 1
    ] == [("c", "long", None)]
