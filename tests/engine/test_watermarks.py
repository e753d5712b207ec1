"""Watermarks against the obvious computation: whatever the batches, idleness, returning producers,
and inputs that have not begun.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine import watermarks as watermarks_module
from headrace.engine.event_times import PARTS
from headrace.engine.state import files
from headrace.engine.watermarks import (
    TimeSource,
    WatermarkState,
    batch_watermarks,
    read_watermarks,
    write_watermarks,
)
from headrace.errors import CorruptionError, TooManyProducers
from headrace.operators.kernel import ENDED, UNSTARTED
from headrace.operators.watermark_spec import NO_PRODUCER, WatermarkPath, WatermarkSpec
from tests.engine.watermark_model import SPEC, Row, obvious, obvious_meeting

NEVER_AHEAD = 1_000


def parts_of(ticks: list[list[Row]], first: int, last: int) -> pa.Table:
    found = [
        (tick + 1, producer, at, at, NEVER_AHEAD, -1, number, False)
        for tick in range(first, last)
        for number, (producer, at) in enumerate(ticks[tick])
    ]
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


PAYMENTS = WatermarkSpec("payments", "at", "device", delay_us=1, idle_us=35)
MEETING = [[WatermarkPath("orders")], [WatermarkPath("payments")]]


@st.composite
def meeting_histories(draw: st.DrawFn) -> tuple[dict[str, list[list[Row]]], list[int]]:
    """Two inputs, of which one may stay empty or be silent for long."""
    row = st.tuples(st.sampled_from("ab"), st.integers(0, 100))
    ticks = draw(st.integers(1, 9))
    rows = st.lists(
        st.sampled_from([0, 2]).flatmap(lambda most: st.lists(row, max_size=most)),
        min_size=ticks,
        max_size=ticks,
    )
    inputs = {name: draw(rows) for name in ("orders", "payments")}
    for name in inputs:
        if draw(st.integers(0, 4)) == 0:
            inputs[name] = [[] for _ in range(ticks)]
    steps = draw(st.lists(st.integers(0, 30), min_size=ticks, max_size=ticks))
    return inputs, np.cumsum(steps).tolist()


@given(meeting_histories(), st.data())
def test_any_split_gives_the_obvious_watermarks_where_inputs_meet(
    tmp_path_factory: pytest.TempPathFactory,
    history: tuple[dict[str, list[list[Row]]], list[int]],
    data: st.DataObject,
) -> None:
    inputs, times = history
    specs = {"orders": SPEC, "payments": PAYMENTS}
    cuts = sorted({0, len(times), *data.draw(st.lists(st.integers(0, len(times)), max_size=3))})
    state = WatermarkState()
    found: dict[str, list[int]] = {"orders": [], "payments": []}
    directory = tmp_path_factory.mktemp("clocks")
    for first, last in pairwise(cuts):
        parts = {name: parts_of(rows, first, last) for name, rows in inputs.items()}
        watermarks, after = batch_watermarks(
            list(specs.values()), state, parts, range(first + 1, last + 1), times[first:last]
        )
        for name, given_to in zip(found, watermarks.of_ports(MEETING), strict=True):
            at_start = found[name][first - 1] if first else UNSTARTED
            assert given_to.watermark_at_start == at_start
            found[name] += given_to.watermark.tolist()
        stored = write_watermarks(directory, replace(after, merged=watermarks.merged([MEETING])))
        state = replace(read_watermarks(directory, stored), time_us=after.time_us)
    assert found == obvious_meeting(inputs, specs, times)


def test_an_idle_watermark_jumped_to_the_wall_clock() -> None:
    """A backfill of old rows, a pause of five times `idle`, and more rows of the backfill."""
    ticks: list[list[Row]] = [[("a", at) for at in range(5)], [], [("a", 200)]]
    watermarks, _ = batch_watermarks(
        [SPEC],
        WatermarkState(),
        {"orders": parts_of(ticks, 0, 3)},
        [1, 2, 3],
        [1_000_000, 1_000_100, 1_000_101],
    )
    assert watermarks.inputs["orders"].tolist() == [1, 4 + 80 - 3, 197]


def test_an_empty_input_held_back_the_other_one_for_ever() -> None:
    ticks: list[list[Row]] = [[("a", 50)], [("a", 60)], [("a", 70)]]
    watermarks, _ = batch_watermarks(
        [SPEC, PAYMENTS],
        WatermarkState(),
        {"orders": parts_of(ticks, 0, 3)},
        [1, 2, 3],
        [100, 120, 136],
    )
    orders, payments = watermarks.of_ports(MEETING)
    assert orders.watermark.tolist() == [47, 57, 67]
    assert payments.watermark.tolist() == [UNSTARTED, UNSTARTED, 67]
    both = watermarks.of([path for paths in MEETING for path in paths])
    assert both.watermark.tolist() == [UNSTARTED, UNSTARTED, 67]


def test_a_topic_without_event_time_does_not_carry_an_idle_one_to_the_wall_clock() -> None:
    watermarks, _ = batch_watermarks(
        [SPEC, WatermarkSpec("plain")],
        WatermarkState(),
        {"orders": parts_of([[("a", 50)], []], 0, 2)},
        [1, 2],
        [100, 130],
    )
    orders, plain = watermarks.of_ports([[WatermarkPath("orders")], [WatermarkPath("plain")]])
    assert (orders.watermark.tolist(), plain.watermark.tolist()) == ([47, 57], [100, 130])


def test_event_time_ends_for_every_input_and_stays_ended() -> None:
    specs = [SPEC, PAYMENTS, WatermarkSpec("plain")]
    parts = {"orders": parts_of([[("a", 50)], [], []], 0, 3)}
    watermarks, state = batch_watermarks(
        specs, WatermarkState(), parts, [1, 2, 3], [100, 110, 120], 2
    )
    assert watermarks.inputs["orders"].tolist() == [47, ENDED, ENDED]
    assert watermarks.inputs["payments"].tolist() == [UNSTARTED, ENDED, ENDED]
    assert watermarks.inputs["plain"].tolist() == [100, ENDED, ENDED]
    assert watermarks.of_ports(MEETING)[1].watermark.tolist() == [UNSTARTED, ENDED, ENDED]
    later, _ = batch_watermarks(specs, state, {}, [4], [130])
    assert set(later.before.values()) == {ENDED}
    assert later.of_ports(MEETING)[0].watermark_at_start == ENDED


def test_the_row_that_moved_the_watermark_is_known() -> None:
    parts = pa.table(
        [
            [1, 1, 2, 2],
            ["a", "b", "a", "b"],
            [50, 40, 70, 60],
            [50, 40, 70, 900],
            [55, 45, 60, 60],
            [0, 1, 0, 1],
            [7, 3, 8, 4],
            [False, False, False, True],
        ],
        schema=PARTS,
    )
    _, state = batch_watermarks([SPEC], WatermarkState(), {"orders": parts}, [1, 2], [100, 110])
    orders = state.inputs["orders"]
    assert orders.moved_by == TimeSource("b", 40, 45, 1, 3)
    assert orders.furthest == TimeSource("b", 900, 60, 1, 4)


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
        68,
    ], "held by b; then by a; then nobody has been left for 1, and time goes on from the newest"
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
        back.sources.tolist(),
        back.begun,
        back.newest_ever_us,
        back.heard_us,
        back.since_us,
        back.moved_by,
    ) == (
        kept.watermark_us,
        kept.producers.to_pylist(),
        kept.newest_us.tolist(),
        kept.active_us.tolist(),
        kept.sources.tolist(),
        kept.begun,
        50,
        100,
        100,
        kept.moved_by,
    )
    (tmp_path / f"{name}.clocks").write_bytes(b"rubbish")
    read_watermarks.cache_clear()
    with pytest.raises(CorruptionError, match="cannot be read"):
        read_watermarks(tmp_path, name)


def test_watermarks_of_the_first_format_go_on(tmp_path: Path) -> None:
    """One input has live producers; the other was idle, and its watermark followed the ticks."""
    times = [("newest_us", pa.int64()), ("active_us", pa.int64())]
    schema = pa.schema([("input", pa.string()), ("producer", pa.string()), *times])
    table = pa.table([["orders"], ["a"], [50], [100]], schema=schema)
    inputs = {
        "orders": {"complete_us": 47, "begun": True},
        "payments": {"complete_us": 99, "begun": True},
    }
    name = files.store(tmp_path, ".clocks", table, {"version": 1, "inputs": inputs})
    state = replace(read_watermarks(tmp_path, name), time_us=100)
    watermarks, _ = batch_watermarks([SPEC, PAYMENTS], state, {}, [5, 6], [110, 130])
    assert watermarks.inputs["orders"].tolist() == [47, 50 + 10 - 3]
    assert watermarks.inputs["payments"].tolist() == [109, 129]
    assert write_watermarks(tmp_path, state)
