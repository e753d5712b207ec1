"""Sliding windows against a naive computation, from buffered rows and from states, however ticks
are grouped into calls.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.operators.aggregates import functions as agg
from headrace.operators.windows.buffered_window import BufferedSessions, BufferedSlidingWindows
from headrace.operators.windows.factory import keeps_rows, window_kernel
from headrace.operators.windows.fixed_window import FixedWindows
from headrace.operators.windows.kernel import WindowSettings
from headrace.operators.windows.late_policy import Correct, Divert, Drop, LatePolicy
from headrace.operators.windows.session_window import SessionWindows
from headrace.operators.windows.sliding_window import SlidingWindows
from headrace.operators.windows.specs import Hopping, Session, Sliding, Tumbling
from tests.operators.windows.feeding import (
    Feed,
    check_same,
    cuts,
    expected,
    feed_to,
    late_by_minute,
    shard_counts,
    streams,
    tables,
)
from tests.operators.windows.oracle import Row, SlidingOracle, moment, us
from tests.short_forms import examples

LATE: list[LatePolicy] = [Drop(), Correct(0), Correct(12), Divert("late")]
MERGEABLE = (
    ("n", agg.count()),
    ("total", agg.sum("v")),
    ("low", agg.min("v")),
    ("mean", agg.avg("v")),
)
TAKEN_AWAY = (
    ("n", agg.count()),
    ("some", agg.count("v")),
    ("total", agg.sum("k")),
    ("mean", agg.avg("k")),
)  # windows are had by taking away
AGGREGATES = (
    *MERGEABLE,
    ("all", agg.collect("v")),
    ("first", agg.first("device")),
    ("last", agg.last("v")),
    ("median", agg.median("v")),
    ("devices", agg.collect_set("device")),
    ("pairs", agg.count_distinct("device", "v")),
    ("best", agg.max_by("v", by="k")),
)


def step_of(feed: Feed, **settings: Any) -> WindowSettings:
    given = {
        "window": Sliding(8),
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
    size=st.sampled_from([1, 5, 20, 33, 50]),
    late=st.sampled_from(LATE),
    by=st.sampled_from([("k",), (), ("k", "device")]),
    where=cuts(),
    shards=shard_counts(),
)
@settings(max_examples=examples(50))
def test_results_from_buffered_rows_equal_the_oracle(
    emit: str,
    feed: Feed,
    size: int,
    late: LatePolicy,
    by: tuple[str, ...],
    where: list[int],
    shards: list[int],
) -> None:
    step = step_of(feed, window=Sliding(size), late=late, by=by, emit=emit)
    oracle = SlidingOracle(step)
    wanted = expected(oracle, feed)
    output = feed_to(BufferedSlidingWindows, step, feed, where, shards)
    check_same(output.emitted, wanted, shards)
    assert late_by_minute(output.late_counts) == Counter(
        (each["_tick"] * 20 // 60, each["device"]) for each in oracle.late
    )


@pytest.mark.parametrize("emit", ["final", "changes"])
@given(
    feed=streams(),
    size=st.sampled_from([1, 5, 20, 33, 50]),
    late=st.sampled_from(LATE),
    by=st.sampled_from([("k",), (), ("k", "device")]),
    where=cuts(),
    shards=shard_counts(),
    ordered=st.booleans(),
    aggregates=st.sampled_from([MERGEABLE, TAKEN_AWAY]),
)
@settings(max_examples=examples(80))
def test_results_from_states_equal_the_oracle(
    emit: str,
    feed: Feed,
    size: int,
    late: LatePolicy,
    by: tuple[str, ...],
    where: list[int],
    shards: list[int],
    ordered: bool,
    aggregates: Any,
) -> None:
    feed = in_order_of_time(feed) if ordered else feed
    step = step_of(feed, window=Sliding(size), late=late, by=by, emit=emit, aggregates=aggregates)
    oracle = SlidingOracle(step)
    wanted = expected(oracle, feed)
    output = feed_to(SlidingWindows, step, feed, where, shards)
    check_same(output.emitted, wanted, shards)
    assert late_by_minute(output.late_counts) == Counter(
        (each["_tick"] * 20 // 60, each["device"]) for each in oracle.late
    )


def in_order_of_time(feed: Feed) -> Feed:
    """Sort the rows by time, in as many ticks as before."""
    rows = iter(sorted((row for tick in feed.ticks for row in tick), key=lambda row: row["t"]))
    return Feed([[next(rows) for _ in tick] for tick in feed.ticks], feed.watermark, feed.horizon)


@given(
    feed=streams() | tables(),
    late=st.sampled_from(LATE),
    emit=st.sampled_from(["final", "changes"]),
    where=cuts(),
    size=st.sampled_from([8, 40]),
)
@settings(max_examples=examples(40))
def test_watermarks_that_pass_everything_leave_no_state(
    feed: Feed, late: LatePolicy, emit: str, where: list[int], size: int
) -> None:
    ended = Feed(
        [*feed.ticks, []], [*feed.watermark, 10_000], [*feed.horizon, 10_000], feed.is_table
    )
    for build in (
        (BufferedSlidingWindows,) if feed.is_table else (BufferedSlidingWindows, SlidingWindows)
    ):
        output = feed_to(
            build,
            step_of(feed, window=Sliding(size), late=late, emit=emit, aggregates=MERGEABLE),
            ended,
            where,
        )
        assert output.state == {}
        assert output.due[-1] is None


KINDS = pytest.mark.parametrize("build", [BufferedSlidingWindows, SlidingWindows])


def emitted(output: list[Row]) -> list[tuple[Any, ...]]:
    return [
        (
            each["_tick"],
            each["_change_type"],
            us(each["window_start"]),
            us(each["window_end"]),
            each["n"],
        )
        for each in output
    ]


@KINDS
def test_a_window_has_its_end_and_not_its_start(build: Any) -> None:
    feed = Feed([[row(0), row(8), row(15), row(15)]], [16], [0])
    assert emitted(feed_to(build, step_of(feed, aggregates=MERGEABLE), feed).emitted) == [
        (0, "insert", -8, 0, 1),
        (0, "insert", 0, 8, 1),
        (0, "insert", 7, 15, 3),
    ]


@KINDS
def test_a_window_is_emitted_when_no_row_at_its_end_is_expected_any_more(build: Any) -> None:
    feed = Feed([[row(5)], [], []], [4, 5, 6], [0, 0, 0])
    output = feed_to(build, step_of(feed, aggregates=MERGEABLE), feed, [1, 2])
    assert emitted(output.emitted) == [(2, "insert", -3, 5, 1)]
    assert output.due == [6, 6, None]


@KINDS
def test_a_late_row_corrects_the_windows_behind_it(build: Any) -> None:
    feed = Feed([[row(2), row(9), row(11)], [row(3)]], [20, 20], [0, 0])
    assert emitted(feed_to(build, step_of(feed, aggregates=MERGEABLE), feed, [1]).emitted) == [
        (0, "insert", -6, 2, 1),
        (0, "insert", 1, 9, 2),
        (0, "insert", 3, 11, 2),
        (1, "insert", -5, 3, 2),
        (1, "update_preimage", 1, 9, 2),
        (1, "update_postimage", 1, 9, 3),
    ]


@KINDS
@pytest.mark.parametrize(("lateness", "late"), [(5, 0), (4, 1)])
def test_a_row_exactly_at_the_lateness_bound_is_taken(build: Any, lateness: int, late: int) -> None:
    feed = Feed([[row(50)], [row(10)]], [15, 15], [15, 15])
    output = feed_to(build, step_of(feed, late=Correct(lateness), aggregates=MERGEABLE), feed)
    assert sum(each["rows"] for each in output.late_counts) == late
    assert len(output.emitted) == 1 - late


@KINDS
def test_rows_before_the_lateness_bound_still_count_in_windows_behind_it(build: Any) -> None:
    feed = Feed([[row(10)], [], [row(16)]], [0, 15, 20], [0, 15, 20])
    assert [
        each["n"]
        for each in feed_to(build, step_of(feed, aggregates=MERGEABLE), feed, [1, 2]).emitted
    ] == [1, 2]


@pytest.mark.parametrize(
    ("window", "aggregates", "is_table", "kind"),
    [
        (Tumbling(10), AGGREGATES, True, FixedWindows),
        (Hopping(10, 5), AGGREGATES, False, FixedWindows),
        (Session(10), MERGEABLE, False, SessionWindows),
        (Session(10), MERGEABLE, True, BufferedSessions),
        (Session(10), AGGREGATES, False, BufferedSessions),
        (Sliding(10), MERGEABLE, False, SlidingWindows),
        (Sliding(10), MERGEABLE, True, BufferedSlidingWindows),
        (
            Sliding(10),
            (("n", agg.count()), ("about", agg.approx_distinct("v"))),
            False,
            BufferedSlidingWindows,
        ),
    ],
)
def test_rows_are_kept_only_where_they_must_be(
    window: Any, aggregates: Any, is_table: bool, kind: type
) -> None:
    step = step_of(Feed([], [], [], is_table), window=window, aggregates=aggregates)
    assert type(window_kernel(step)) is kind
    assert keeps_rows(step) == (kind in {BufferedSessions, BufferedSlidingWindows})
