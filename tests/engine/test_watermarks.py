"""Watermarks against the obvious computation: whatever the batches, idleness, returning producers,
and inputs that have not begun.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine import watermarks as watermarks_module
from headrace.engine.watermarks import (
    PARTS,
    WatermarkState,
    batch_watermarks,
    read_watermarks,
    write_watermarks,
)
from headrace.errors import CorruptionError, TooManyProducers
from headrace.operators.kernel import UNSTARTED
from headrace.operators.watermark_spec import NO_PRODUCER, WatermarkPath, WatermarkSpec
from tests.engine.watermark_model import SPEC, Row, obvious


def parts_of(ticks: list[list[Row]], first: int, last: int) -> pa.Table:
    found = [(tick + 1, *row) for tick in range(first, last) for row in ticks[tick]]
    return (
        pa.Table.from_arrays(
            [
                pa.array(list(column), field.type)
                for column, field in zip(zip(*found, strict=True), PARTS, strict=True)
            ],
            schema=PARTS,
        )
        if found
        else PARTS.empty_table()
    )


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[list[Row]], list[int]]:
    row = st.tuples(st.sampled_from("abc"), st.integers(0, 100))
    ticks = draw(st.lists(st.lists(row, max_size=4), min_size=1, max_size=8))
    steps = draw(st.lists(st.integers(0, 30), min_size=len(ticks), max_size=len(ticks)))
    return ticks, np.cumsum(steps).tolist()


@given(histories(), st.data())
def test_any_split_into_batches_gives_the_obvious_watermarks(
    history: tuple[list[list[Row]], list[int]], data: st.DataObject
) -> None:
    ticks, times = history
    cuts = sorted({0, len(ticks), *data.draw(st.lists(st.integers(0, len(ticks)), max_size=3))})
    state, found = WatermarkState(), []
    for first, last in pairwise(cuts):
        numbers = list(range(first + 1, last + 1))
        watermarks, state = batch_watermarks(
            [SPEC], state, {"orders": parts_of(ticks, first, last)}, numbers, times[first:last]
        )
        found += watermarks.inputs["orders"].tolist()
        assert watermarks.before["orders"] == (found[first - 1] if first else UNSTARTED)
    assert found == obvious(ticks, times)


def test_the_clock_waits_for_the_slowest_producer_until_it_is_idle() -> None:
    ticks: list[list[Row]] = [[("a", 50), ("b", 10)], [("a", 60)], [("a", 70)], []]
    watermarks, state = batch_watermarks(
        [SPEC],
        WatermarkState(),
        {"orders": parts_of(ticks, 0, 3)},
        [1, 2, 3, 4],
        [100, 110, 121, 142],
    )
    assert watermarks.inputs["orders"].tolist() == [
        7,
        7,
        67,
        139,
    ], "held by b; then by a; then nobody is left, and time follows the ticks"
    assert state.inputs["orders"].producers.to_pylist() == []


def test_who_holds_the_clock_back_is_known() -> None:
    _, state = batch_watermarks(
        [SPEC],
        WatermarkState(),
        {"orders": parts_of([[("a", 50), ("b", 10), ("c", 30)]], 0, 1)},
        [1],
        [100],
    )
    assert state.inputs["orders"].slowest_producers(2) == [("b", 10, 100), ("c", 30, 100)]


def test_producers_have_names_that_can_be_shown() -> None:
    assert [SPEC.label(each) for each in ("b", NO_PRODUCER)] == ["b", "(null)"]
    assert WatermarkSpec("orders", "at").label("0") == "partition 0"


def test_an_input_without_event_time_follows_the_ticks() -> None:
    watermarks, _ = batch_watermarks(
        [WatermarkSpec("plain")], WatermarkState(time_us=90), {}, [5, 6], [100, 110]
    )
    assert watermarks.inputs["plain"].tolist() == [100, 110]
    assert watermarks.before["plain"] == 90


def test_steps_are_as_far_as_their_slowest_input_less_what_is_held_back() -> None:
    ticks: list[list[Row]] = [[("a", 50)], [("a", 60)]]
    watermarks, _ = batch_watermarks(
        [SPEC, WatermarkSpec("plain")],
        WatermarkState(time_us=20),
        {"orders": parts_of(ticks, 0, 2)},
        [1, 2],
        [40, 70],
    )
    both = watermarks.of([WatermarkPath("orders"), WatermarkPath("plain", 10, 15)])
    assert (both.watermark.tolist(), both.horizon.tolist()) == ([30, 57], [25, 55])
    assert (both.watermark_at_start, both.horizon_at_start) == (
        UNSTARTED,
        UNSTARTED,
    ), "one of them had not begun"
    assert both.watermark_before.tolist() == [UNSTARTED, 30]


def test_too_many_producers_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watermarks_module, "MAX_PRODUCERS", 3)
    rows = [(f"p{n}", 1) for n in range(4)]
    with pytest.raises(TooManyProducers, match="orders.*4 live producers"):
        batch_watermarks([SPEC], WatermarkState(), {"orders": parts_of([rows], 0, 1)}, [1], [5])


def test_clocks_are_the_same_when_read_back(tmp_path: Path) -> None:
    _, state = batch_watermarks(
        [SPEC], WatermarkState(), {"orders": parts_of([[("a", 50), ("b", 10)]], 0, 1)}, [1], [100]
    )
    name = write_watermarks(tmp_path, state)
    back = read_watermarks(tmp_path, name).inputs["orders"]
    kept = state.inputs["orders"]
    assert (
        back.watermark_us,
        back.producers.to_pylist(),
        back.newest_us.tolist(),
        back.active_us.tolist(),
        back.begun,
    ) == (
        kept.watermark_us,
        kept.producers.to_pylist(),
        kept.newest_us.tolist(),
        kept.active_us.tolist(),
        kept.begun,
    )
    (tmp_path / f"{name}.clocks").write_bytes(b"rubbish")
    read_watermarks.cache_clear()
    with pytest.raises(CorruptionError, match="cannot be read"):
        read_watermarks(tmp_path, name)
