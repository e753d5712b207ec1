"""Rows that have been in a table for a while, against the obvious computation tick by tick."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from headrace.columnar.columns import CHANGE_TYPE
from headrace.operators.hold import HoldKernel
from headrace.operators.kernel import Watermarks
from headrace.testing.kernels import MemoryState

Row = dict[str, Any]
SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])
ROWS = pa.schema([*SCHEMA, (CHANGE_TYPE, pa.string()), ("_tick", pa.int64())])
FOR_US = 10


def changes_of(before: dict[Any, int], after: dict[Any, int], tick: int) -> list[Row]:
    """The changes between two tables, in order of key."""
    rows = []
    for key in sorted({*before, *after}, key=lambda key: (key is not None, key)):
        was, now = before.get(key), after.get(key)
        kinds = (
            [("insert", now)]
            if was is None
            else [("delete", was)]
            if now is None
            else [("update_preimage", was), ("update_postimage", now)]
            if was != now
            else []
        )
        rows += [{"k": key, "v": value, CHANGE_TYPE: kind, "_tick": tick} for kind, value in kinds]
    return rows


def obvious(tables: list[dict[Any, int]], times: list[int]) -> list[Row]:
    """A key is shown while it has been in every table of the last `FOR_US`."""
    since: dict[Any, int] = {}
    shown: dict[Any, int] = {}
    rows = []
    for tick, (table, time) in enumerate(zip(tables, times, strict=True)):
        since = {key: since.get(key, time) for key in table}
        now = {key: value for key, value in table.items() if time >= since[key] + FOR_US}
        rows += changes_of(shown, now, tick)
        shown = now
    return rows


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[dict[Any, int]], list[int]]:
    ticks = draw(st.integers(1, 9))
    keys = st.sampled_from(["a", "b", "a key that is long " * 30, None])
    tables = st.dictionaries(keys, st.integers(0, 2), max_size=3)
    steps = draw(st.lists(st.sampled_from([0, 1, 4, 10, 15]), min_size=ticks, max_size=ticks))
    return draw(st.lists(tables, min_size=ticks, max_size=ticks)), np.cumsum(steps).tolist()


@given(histories(), st.data())
def test_rows_that_last_are_emitted_whatever_the_batches(
    history: tuple[list[dict[Any, int]], list[int]], data: st.DataObject
) -> None:
    tables, times = history
    ticks = len(tables)
    changes = [
        changes_of(before, after, tick)
        for tick, (before, after) in enumerate(pairwise([{}, *tables]))
    ]
    cuts = sorted({0, ticks, *data.draw(st.lists(st.integers(0, ticks), max_size=3))})
    state, found = MemoryState(), []
    for first, stop in pairwise(cuts):
        numbers = np.arange(first, stop)
        none = np.zeros(stop - first, np.int64)
        rows = pa.Table.from_pylist(
            [row for of_tick in changes[first:stop] for row in of_tick], ROWS
        )
        kernel = HoldKernel("hold", SCHEMA, ["k"], for_us=FOR_US)
        state = state.copy()
        emitted = kernel.step_timed(
            state, [rows], [Watermarks(numbers, np.array(times[first:stop]), none, none)]
        )
        emitted.validate(full=True)
        found += emitted.to_pylist()
        shown_until = obvious(tables[:stop], times[:stop])
        pending = _pending(tables[:stop], times[:stop])
        assert kernel.due(state) == min((at + FOR_US for at in pending.values()), default=None)
        assert len(state.values) == len(tables[stop - 1]) + len(pending)
        assert len(found) == len(shown_until)
    assert sorted(map(repr, found)) == sorted(map(repr, obvious(tables, times)))
    assert [row["_tick"] for row in found] == sorted(row["_tick"] for row in found)


def _pending(tables: list[dict[Any, int]], times: list[int]) -> dict[Any, int]:
    """The keys that are not emitted yet, and since when they have been there."""
    since: dict[Any, int] = {}
    for table, time in zip(tables, times, strict=True):
        since = {key: since.get(key, time) for key in table}
    return {key: at for key, at in since.items() if times[-1] < at + FOR_US}
