"""Tumbling and hopping windows against a naive computation, however ticks are grouped
into calls.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.durations import format_us
from headrace.errors import InputError, PlanError, UnknownColumn
from headrace.operators.aggregates import functions as agg
from headrace.operators.aggregates.specs import AggregateSpec
from headrace.operators.kernel import UNSTARTED, TimedKernel
from headrace.operators.windows.fixed_window import FixedWindows
from headrace.operators.windows.kernel import WindowSettings
from headrace.operators.windows.late_policy import Correct, Divert, Drop, LatePolicy
from headrace.operators.windows.specs import Hopping, Tumbling, tumbling
from tests.operators.windows.feeding import (
    STREAM,
    Feed,
    ShorteningState,
    check_same,
    cuts,
    expected,
    feed_to,
    late_by_minute,
    shard_counts,
    streams,
    tables,
)
from tests.operators.windows.oracle import FixedOracle, Row, moment, us
from tests.short_forms import examples

WINDOWS = [Tumbling(10), Tumbling(7, 3), Hopping(10, 5), Hopping(10, 4, 1), Hopping(12, 3)]
LATE: list[LatePolicy] = [Drop(), Correct(0), Correct(12), Divert("late")]
AGGREGATES = (
    ("n", agg.count()),
    ("total", agg.sum("v")),
    ("low", agg.min("v")),
    ("all", agg.collect("v")),
    ("last", agg.last("v")),
    ("median", agg.median("v")),
    ("devices", agg.collect_set("device")),
    ("pairs", agg.count_distinct("device", "v")),
    ("best", agg.max_by("v", by="k")),
)


def step_of(feed: Feed, **settings: Any) -> WindowSettings:
    given = {
        "window": Tumbling(10),
        "by": ("k",),
        "aggregates": AGGREGATES,
        "producer": "device",
        **settings,
    }
    return WindowSettings(
        "w",
        feed.schema,
        "t",
        over_table=feed.is_table,
        row_key=("id",) if feed.is_table else (),
        **given,
    )


def row(time: int, v: float | None = 1.0, k: int | None = 0, device: str | None = "a") -> Row:
    return {"k": k, "v": v, "t": moment(time), "device": device}


@pytest.mark.parametrize("emit", ["final", "changes"])
@given(
    feed=streams() | tables(),
    window=st.sampled_from(WINDOWS),
    late=st.sampled_from(LATE),
    by=st.sampled_from([("k",), (), ("k", "device")]),
    where=cuts(),
    shards=shard_counts(),
)
@settings(max_examples=examples(50))
def test_results_equal_the_oracle(
    emit: str,
    feed: Feed,
    window: Any,
    late: LatePolicy,
    by: tuple[str, ...],
    where: list[int],
    shards: list[int],
) -> None:
    step = step_of(feed, window=window, late=late, by=by, emit=emit)
    oracle = FixedOracle(step)
    wanted = expected(oracle, feed)
    output = feed_to(FixedWindows, step, feed, where, shards)
    check_same(output.emitted, wanted, shards)
    assert late_by_minute(output.late_counts) == Counter(
        (each["_tick"] * 20 // 60, each["device"]) for each in oracle.late
    )
    assert output.corrected == oracle.corrected
    assert output.late == [] or isinstance(late, Divert)
    if isinstance(late, Divert):
        assert reasons(output.late) == sorted(
            f"{each['_tick']} {each['t']} too late by {format_us(each['behind_us'])}"
            for each in oracle.late
        )


def reasons(late: list[Row]) -> list[str]:
    return sorted(f"{each['_tick']} {each['t']} {each['_reason']}" for each in late)


@given(
    feed=streams() | tables(),
    window=st.sampled_from(WINDOWS),
    late=st.sampled_from(LATE),
    emit=st.sampled_from(["final", "changes"]),
    where=cuts(),
)
@settings(max_examples=examples(40))
def test_calls_leave_the_same_state_and_watermarks_that_pass_everything_leave_none(
    feed: Feed, window: Any, late: LatePolicy, emit: str, where: list[int]
) -> None:
    step = step_of(feed, window=window, late=late, emit=emit)
    assert feed_to(FixedWindows, step, feed, where).state == feed_to(FixedWindows, step, feed).state
    ended = Feed(
        [*feed.ticks, []], [*feed.watermark, 10_000], [*feed.horizon, 10_000], feed.is_table
    )
    output = feed_to(FixedWindows, step, ended, where)
    assert output.state == {}
    assert output.due[-1] is None


# Sketches and users' own aggregates are in windows that no row comes to any more, too


class Longest(agg.CustomAggregate):
    state_type = result_type = pa.float64()

    def add(self, states: pa.Array, groups: pa.Array, values: pa.Array) -> pa.Array:
        highest = states.to_pylist()
        for group, value in zip(groups.to_pylist(), values.to_pylist(), strict=True):
            highest[group] = max(
                (each for each in (highest[group], value) if each is not None), default=None
            )
        return pa.array(highest, pa.float64())

    def result(self, states: pa.Array) -> pa.Array:
        return states


@pytest.mark.parametrize(
    ("spec", "result"),
    [
        (agg.approx_distinct("v"), 2),
        (agg.quantiles("v", 1.0), 3.0),
        (
            agg.heavy_hitters("v", max_values=1),
            [{"value": 3.0, "count": 2, "at_least": 2, "at_most": 2}],
        ),
        (agg.custom(Longest(), "v"), 3.0),
        (agg.count_distinct("v"), 2),
        (agg.first("v"), 3.0),
        (agg.stddev("v", population=True), pytest.approx(0.9428, abs=1e-3)),
        (agg.avg("v"), pytest.approx(7 / 3)),
        (agg.max("device"), "b"),
        (agg.count("v"), 3),
    ],
    ids=str,
)
def test_every_aggregate_is_emitted_for_a_window_that_waited(
    spec: AggregateSpec, result: Any
) -> None:
    mine = [row(1, 3.0), row(2, 1.0, device="b"), row(3, 3.0)]
    feed = Feed([mine, [row(1, 9.0, k=1)], [row(15, 5.0, k=2)]], [0, 0, 12], [0, 0, 12])
    output = feed_to(FixedWindows, step_of(feed, aggregates=(("a", spec),)), feed, [1, 2])
    assert [each["a"] for each in output.emitted if each["k"] == 0] == [result]
    assert [each["k"] for each in output.emitted] == [0, 1]


# Edges


def test_a_window_that_ends_exactly_at_the_watermark_is_emitted() -> None:
    feed = Feed([[row(9)], [], [], []], [0, 9, 10, 11], [0, 9, 10, 11])
    output = feed_to(FixedWindows, step_of(feed), feed)
    assert [
        (each["_tick"], each["n"], each["window_start"], each["window_end"])
        for each in output.emitted
    ] == [(2, 1, moment(0), moment(10))]
    assert feed_to(FixedWindows, step_of(feed), Feed(feed.ticks[:2], [0, 9], [0, 9])).due == [10]


def test_a_row_completes_its_own_window_in_its_own_tick() -> None:
    feed = Feed([[row(3)], [row(4), row(12)]], [2, 10], [2, 10])
    emitted = feed_to(FixedWindows, step_of(feed), feed).emitted
    assert [(each["_tick"], each["n"]) for each in emitted] == [(1, 2)]


@pytest.mark.parametrize(
    ("lateness", "emitted"),
    [(5, ["insert", "update_preimage", "update_postimage"]), (4, ["insert"])],
)
def test_a_row_exactly_at_the_lateness_bound_is_too_late(lateness: int, emitted: list[str]) -> None:
    feed = Feed([[row(1)], [], [row(2)]], [0, 14, 14], [0, 14, 14])
    output = feed_to(FixedWindows, step_of(feed, late=Correct(lateness)), feed)
    assert [each["_change_type"] for each in output.emitted] == emitted
    assert [each["rows"] for each in output.late_counts] == ([] if len(emitted) == 3 else [1])
    assert [each["n"] for each in output.emitted] == [1, 1, 2][: len(emitted)]


def test_a_row_that_comes_with_the_watermark_that_closes_its_window_is_not_late() -> None:
    feed = Feed([[row(1)], [row(2)], [row(3)]], [0, 10, 10], [0, 10, 10])
    output = feed_to(FixedWindows, step_of(feed), feed)
    assert [(each["_tick"], each["n"]) for each in output.emitted] == [(1, 2)]
    assert [(each["producer"], each["rows"]) for each in output.late_counts] == [("a", 1)]


def test_a_hopping_row_is_in_the_windows_that_are_still_open() -> None:
    feed = Feed([[row(20)], [row(8)]], [12, 30], [12, 30])
    emitted = feed_to(FixedWindows, step_of(feed, window=Hopping(10, 5)), feed).emitted
    assert [(us(each["window_start"]), each["n"]) for each in emitted] == [(5, 1), (15, 1), (20, 1)]


def test_nothing_is_emitted_and_nothing_is_late_before_the_watermark_begins() -> None:
    feed = Feed([[row(1)], [row(-(10**15))]], [UNSTARTED] * 2, [UNSTARTED] * 2)
    output = feed_to(FixedWindows, step_of(feed, late=Correct(100)), feed)
    assert (output.emitted, output.late_counts) == ([], [])
    assert output.due == [us(moment(10 - 10**15))]


def test_lateness_is_counted_from_the_horizon_and_results_go_by_the_watermark() -> None:
    feed = Feed([[row(1)], [], [row(2)]], [0, 20, 20], [0, 9, 9])
    emitted = feed_to(FixedWindows, step_of(feed), feed).emitted
    assert [(each["_tick"], each["_change_type"], each["n"]) for each in emitted] == [
        (1, "insert", 1),
        (2, "update_preimage", 1),
        (2, "update_postimage", 2),
    ]


def test_a_row_of_a_table_that_goes_takes_its_window_with_it() -> None:
    mine = {"id": 1, **row(1)}
    feed = Feed(
        [[{**mine, "_change_type": "insert"}], [], [{**mine, "_change_type": "delete"}]],
        [0, 10, 10],
        [0, 0, 0],
        is_table=True,
    )
    output = feed_to(FixedWindows, step_of(feed), feed, [1, 2])
    assert [each["_change_type"] for each in output.emitted] == ["insert", "delete"]
    assert output.state == {}


def test_long_keys_are_found_again() -> None:
    schema = STREAM.set(0, pa.field("k", pa.string()))
    step = WindowSettings(
        "w", schema, "t", Tumbling(10), ("k",), (("n", agg.count()),), late=Correct(50)
    )
    keys = ["ä" * 300, "b" * 382, "b" * 383, "c" * 2000, "d"]
    feed = Feed(
        [[row(1, k=key) for key in keys], [], [row(2, k=keys[0])]],  # type: ignore[arg-type]
        [0, 10, 10],
        [0, 10, 10],
    )
    kernel, state, emitted = FixedWindows(step), ShorteningState(), []
    for tick in range(3):
        rows = pa.Table.from_pylist(
            [{**each, "_tick": tick} for each in feed.ticks[tick]],
            pa.schema([*schema, ("_tick", pa.int64())]),
        )
        emitted += kernel.step_timed(state, [rows], [feed.watermarks(tick, tick + 1)]).to_pylist()
    assert [(each["k"], each["n"]) for each in emitted if each["_tick"] == 1] == [
        (key, 1) for key in sorted(keys, key=str.encode)
    ]
    assert [(each["k"], each["n"]) for each in emitted if each["_tick"] == 2] == [
        (keys[0], 1),
        (keys[0], 2),
    ]


def test_a_day_of_25_hours() -> None:
    hour = 3_600_000_000
    begin = us(moment(1_792_879_200_000_000))  # 2026-10-24 22:00 UTC, midnight in Berlin
    rows = [row(begin + at * hour + offset) for at, offset in [(0, 0), (24, 0), (25, -1), (25, 0)]]
    feed = Feed([rows, []], [begin, begin + 25 * hour], [begin, begin])
    emitted = feed_to(
        FixedWindows, step_of(feed, window=tumbling("1 day", timezone="Europe/Berlin")), feed
    ).emitted
    assert [(each["n"], us(each["window_start"]), us(each["window_end"])) for each in emitted] == [
        (3, begin, begin + 25 * hour)
    ]


# What cannot be


def test_is_a_timed_kernel() -> None:
    assert isinstance(FixedWindows(step_of(Feed([], [], []))), TimedKernel)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"emit": "final!"}, PlanError, "did you mean 'final'"),
        ({"time": "at"}, UnknownColumn, "has no column 'at'"),
        ({"by": ("kk",)}, UnknownColumn, "did you mean 'k'"),
        ({"aggregates": (("window_end", agg.count()),)}, InputError, "named 'window_end'"),
        ({"aggregates": (("k", agg.count()),)}, InputError, "two results named 'k'"),
    ],
)
def test_invalid_settings_are_refused(settings: Row, error: type[Exception], words: str) -> None:
    given: Row = {
        "name": "w",
        "schema": STREAM,
        "time": "t",
        "window": Tumbling(10),
        "by": ("k",),
        "aggregates": AGGREGATES,
        **settings,
    }
    with pytest.raises(error, match=words):
        FixedWindows(WindowSettings(**given))
