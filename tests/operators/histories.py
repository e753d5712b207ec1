"""Histories for kernels: rows of streams and changes of tables, in ticks, and ways to feed them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from headrace.operators.kernel import Kernel
from headrace.testing.kernels import MemoryState

Row = dict[str, Any]
Ticks = list[list[Row]]


@dataclass(frozen=True)
class History:
    """Rows tick by tick. A table's rows have an `id`, which is its key."""

    schema: pa.Schema
    ticks: Ticks
    is_table: bool

    def table(self, first: int, stop: int) -> pa.Table:
        """The rows of some ticks, as a kernel gets them."""
        rows = [
            {**row, "_tick": number} for number in range(first, stop) for row in self.ticks[number]
        ]
        extra = [
            pa.field("_tick", pa.int64()),
            *([pa.field("_change_type", pa.string())] if self.is_table else []),
        ]
        return pa.Table.from_pylist(rows, pa.schema([*self.schema, *extra]))


def run(
    kernel: Kernel, history: History, cuts: Sequence[int] = ()
) -> tuple[list[Row], MemoryState]:
    """Feed a history, cut before some ticks into several calls; the result's rows and the final
    state.
    """
    state, emitted = MemoryState(), []
    bounds = [0, *sorted({cut for cut in cuts if cut < len(history.ticks)}), len(history.ticks)]
    for first, stop in pairwise(bounds):
        emitted += kernel.step(state, history.table(first, stop)).to_pylist()
    return emitted, state


def text(rows: Sequence[Row]) -> list[str]:
    """Rows to compare, in which NaN is NaN and 0.0 is not -0.0."""
    return [repr(dict(sorted(row.items()))) for row in rows]


def keys() -> st.SearchStrategy[Any]:
    return st.integers(0, 4) | st.none()


def streams(
    values: st.SearchStrategy[Any],
    kind: pa.DataType,
    *,
    key: tuple[st.SearchStrategy[Any], pa.DataType] | None = None,
) -> st.SearchStrategy[History]:
    key_values, key_type = key or (keys(), pa.int64())
    schema = pa.schema([("k", key_type), ("v", kind)])
    row = st.fixed_dictionaries({"k": key_values, "v": st.none() | values})
    return st.lists(st.lists(row, max_size=8), max_size=6).map(
        lambda ticks: History(schema, ticks, is_table=False)
    )


@st.composite
def tables(draw: st.DrawFn, values: st.SearchStrategy[Any], kind: pa.DataType) -> History:
    """Changes of a table with the key `id`, of which a group has several rows: each put or deleted
    some times in a tick.
    """
    schema = pa.schema([("id", pa.int64()), ("k", pa.int64()), ("v", kind)])
    rows: dict[int, Row] = {}
    ticks: Ticks = []
    for _ in range(draw(st.integers(0, 6))):
        ticks.append(changes := [])
        for _ in range(draw(st.integers(0, 7))):
            number = draw(st.integers(0, 6))
            fresh = (
                None
                if draw(st.integers(0, 3)) == 0
                else {"id": number, "k": draw(keys()), "v": draw(st.none() | values)}
            )
            changes += changed(rows.get(number), fresh)
            rows[number] = fresh  # type: ignore[assignment]
    return History(schema, ticks, is_table=True)


def changed(was: Row | None, now: Row | None) -> list[Row]:
    if was is None or now is None:
        return (
            [{**now, "_change_type": "insert"}]
            if now
            else [{**was, "_change_type": "delete"}]
            if was
            else []
        )
    return [{**was, "_change_type": "update_preimage"}, {**now, "_change_type": "update_postimage"}]


def doubles() -> st.SearchStrategy[float]:
    """All of them, and many that cancel, tie or overflow."""
    odd = [
        0.1,
        -0.1,
        1.0,
        1e16,
        -1e16,
        1e-300,
        5e-324,
        -5e-324,
        1.7e308,
        -1.7e308,
        2.0**53,
        2.0**-53,
        1 + 2.0**-52,
        -0.0,
        0.0,
    ]
    return (
        st.sampled_from([*odd, math.inf, -math.inf, math.nan]) | st.floats(-1e6, 1e6) | st.floats()
    )


def cuts() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, 5), max_size=4)
