"""Sessions against a naive computation, from buffered rows and from states, however ticks are
grouped.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InputError
from headrace.operators.aggregates import functions as agg
from headrace.operators.windows import state as window_state
from headrace.operators.windows.buffered_window import BufferedSessions
from headrace.operators.windows.kernel import WindowSettings
from headrace.operators.windows.late_policy import Correct, Divert, Drop, LatePolicy
from headrace.operators.windows.session_window import SessionWindows
from headrace.operators.windows.specs import Session
from headrace.testing.kernels import MemoryState
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
from tests.operators.windows.oracle import Row, SessionOracle, moment, us
from tests.short_forms import examples

LATE: list[LatePolicy] = [Drop(), Correct(0), Correct(12), Divert("late")]
MERGEABLE = (
    ("n", agg.count()),
    ("total", agg.sum("v")),
    ("low", agg.min("v")),
    ("mean", agg.avg("v")),
)
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
        "window": Session(8),
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
    gap=st.sampled_from([1, 5, 12]),
    late=st.sampled_from(LATE),
    by=st.sampled_from([("k",), (), ("k", "device")]),
    where=cuts(),
    shards=shard_counts(),
)
@settings(max_examples=examples(50))
def test_results_from_buffered_rows_equal_the_oracle(
    emit: str,
    feed: Feed,
    gap: int,
    late: LatePolicy,
    by: tuple[str, ...],
    where: list[int],
    shards: list[int],
) -> None:
    step = step_of(feed, window=Session(gap), late=late, by=by, emit=emit)
    oracle = SessionOracle(step)
    wanted = expected(oracle, feed)
    output = feed_to(BufferedSessions, step, feed, where, shards)
    check_same(output.emitted, wanted, shards)
    assert late_by_minute(output.late_counts) == Counter(
        (each["_tick"] * 20 // 60, each["device"]) for each in oracle.late
    )


@pytest.mark.parametrize("emit", ["final", "changes"])
@given(
    feed=streams(),
    gap=st.sampled_from([1, 5, 12]),
    late=st.sampled_from(LATE),
    by=st.sampled_from([("k",), (), ("k", "device")]),
    where=cuts(),
    shards=shard_counts(),
)
@settings(max_examples=examples(50))
def test_results_from_states_equal_the_oracle(
    emit: str,
    feed: Feed,
    gap: int,
    late: LatePolicy,
    by: tuple[str, ...],
    where: list[int],
    shards: list[int],
) -> None:
    step = step_of(feed, window=Session(gap), late=late, by=by, emit=emit, aggregates=MERGEABLE)
    oracle = SessionOracle(step)
    wanted = expected(oracle, feed)
    output = feed_to(SessionWindows, step, feed, where, shards)
    check_same(output.emitted, wanted, shards)
    assert late_by_minute(output.late_counts) == Counter(
        (each["_tick"] * 20 // 60, each["device"]) for each in oracle.late
    )


@given(
    feed=streams(),
    gap=st.sampled_from([1, 5, 12]),
    late=st.sampled_from([Drop(), Correct(12)]),
    emit=st.sampled_from(["final", "changes"]),
    by=st.sampled_from([("k",), ()]),
    where=cuts(),
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=3),
)
@settings(max_examples=examples(60))
def test_combined_rows_give_what_rows_give(
    feed: Feed,
    gap: int,
    late: LatePolicy,
    emit: str,
    by: tuple[str, ...],
    where: list[int],
    sizes: list[int],
) -> None:
    step = step_of(feed, window=Session(gap), late=late, by=by, emit=emit, aggregates=MERGEABLE)
    plain, combined = (
        feed_to(SessionWindows, step, feed, where),
        feed_to(SessionWindows, step, feed, where, combine=sizes),
    )
    check_same(combined.emitted, plain.emitted, [1])
    assert combined.state == plain.state
    assert late_by_minute(combined.late_counts) == late_by_minute(plain.late_counts)


@given(
    feed=streams() | tables(),
    late=st.sampled_from(LATE),
    emit=st.sampled_from(["final", "changes"]),
    where=cuts(),
)
@settings(max_examples=examples(40))
def test_calls_leave_the_same_state_and_watermarks_that_pass_everything_leave_none(
    feed: Feed, late: LatePolicy, emit: str, where: list[int]
) -> None:
    for build in (BufferedSessions,) if feed.is_table else (BufferedSessions, SessionWindows):
        step = step_of(feed, late=late, emit=emit, aggregates=MERGEABLE)
        assert feed_to(build, step, feed, where).state == feed_to(build, step, feed).state
        ended = Feed(
            [*feed.ticks, []], [*feed.watermark, 10_000], [*feed.horizon, 10_000], feed.is_table
        )
        output = feed_to(build, step, ended, where)
        assert output.state == {}
        assert output.due[-1] is None


KINDS = pytest.mark.parametrize("build", [BufferedSessions, SessionWindows])


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
def test_rows_a_gap_apart_are_in_two_sessions_and_rows_less_apart_in_one(build: Any) -> None:
    feed = Feed([[row(0), row(8), row(15)]], [100], [100])
    assert emitted(feed_to(build, step_of(feed, aggregates=MERGEABLE), feed).emitted) == [
        (0, "insert", 0, 8, 1),
        (0, "insert", 8, 23, 2),
    ]


@KINDS
def test_a_session_that_ends_exactly_at_the_watermark_is_emitted(build: Any) -> None:
    feed = Feed([[row(2)], [], []], [0, 9, 10], [0, 9, 10])
    output = feed_to(build, step_of(feed, aggregates=MERGEABLE), feed, [1, 2])
    assert emitted(output.emitted) == [(2, "insert", 2, 10, 1)]
    assert output.due == [10, 10, None]
    assert output.state == {}


@KINDS
def test_a_late_row_that_bridges_two_sessions_retracts_both(build: Any) -> None:
    feed = Feed([[row(0)], [row(13)], [], [row(7)]], [0, 8, 21, 21], [0, 8, 21, 21])
    output = feed_to(build, step_of(feed, late=Correct(20), aggregates=MERGEABLE), feed, [1, 2, 3])
    assert emitted(output.emitted) == [
        (1, "insert", 0, 8, 1),
        (2, "insert", 13, 21, 1),
        (3, "delete", 0, 8, 1),
        (3, "insert", 0, 21, 3),
        (3, "delete", 13, 21, 1),
    ]


@KINDS
def test_a_session_that_grows_past_the_watermark_is_retracted_until_it_is_complete_again(
    build: Any,
) -> None:
    feed = Feed([[row(0)], [row(5)], []], [8, 8, 13], [0, 0, 0])
    assert emitted(feed_to(build, step_of(feed, aggregates=MERGEABLE), feed, [1, 2]).emitted) == [
        (0, "insert", 0, 8, 1),
        (1, "delete", 0, 8, 1),
        (2, "insert", 0, 13, 2),
    ]


@KINDS
@pytest.mark.parametrize(("lateness", "late"), [(5, 1), (6, 0)])
def test_a_row_whose_session_ends_exactly_at_the_lateness_bound_is_too_late(
    build: Any, lateness: int, late: int
) -> None:
    feed = Feed([[row(50)], [row(2)]], [15, 15], [15, 15])
    output = feed_to(build, step_of(feed, late=Correct(lateness), aggregates=MERGEABLE), feed)
    assert sum(each["rows"] for each in output.late_counts) == late
    assert len(output.emitted) == 1 - late


@KINDS
def test_rows_of_a_tick_that_follow_each_other_are_late_together_or_not_at_all(build: Any) -> None:
    feed = Feed([[row(50)], [row(0), row(7), row(-9)]], [14, 14], [14, 14])
    output = feed_to(build, step_of(feed, aggregates=MERGEABLE), feed)
    assert emitted(output.emitted) == []
    assert [each["rows"] for each in output.late_counts] == [1]
    assert output.due == [15]


@KINDS
def test_long_keys_are_found_again(build: Any) -> None:
    schema = STREAM.set(0, pa.field("k", pa.string()))
    step = WindowSettings(
        "w", schema, "t", Session(8), ("k",), (("n", agg.count()),), late=Correct(50)
    )
    keys = ["ä" * 300, "b" * 382, "c" * 2000, "d"]
    feed = Feed([[row(1, k=key) for key in keys], [], [row(2, k=keys[0])]], [0, 9, 9], [0, 9, 9])  # type: ignore[arg-type]
    kernel, state, found = build(step), ShorteningState(), []
    for tick in range(3):
        rows = pa.Table.from_pylist(
            [{**each, "_tick": tick} for each in feed.ticks[tick]],
            pa.schema([*schema, ("_tick", pa.int64())]),
        )
        found += kernel.step_timed(state, [rows], [feed.watermarks(tick, tick + 1)]).to_pylist()
    assert [each["k"] for each in found if each["_tick"] == 1] == sorted(keys, key=str.encode)
    assert [(each["k"][:1], each["_change_type"]) for each in found if each["_tick"] == 2] == [
        ("ä", "delete")
    ]


# Over a table


def changes(*rows: tuple[str, Row]) -> list[Row]:
    return [{**row, "_change_type": change} for change, row in rows]


def test_a_row_that_goes_cuts_its_session_in_two() -> None:
    first, middle, last = ({"id": number, **row(time)} for number, time in enumerate([0, 7, 14]))
    feed = Feed(
        [
            changes(*(("insert", each) for each in (first, middle, last))),
            changes(("delete", middle)),
        ],
        [22, 22],
        [0, 0],
        is_table=True,
    )
    assert emitted(feed_to(BufferedSessions, step_of(feed), feed, [1]).emitted) == [
        (0, "insert", 0, 22, 3),
        (1, "insert", 0, 8, 1),
        (1, "delete", 0, 22, 3),
        (1, "insert", 14, 22, 1),
    ]


def test_a_row_that_is_left_out_of_an_aggregate_goes_to_dead_letters_once() -> None:
    feed = Feed([[row(0, 1.0)], [row(1, 2.0)], [row(2, 3.0)]], [0, 0, 0], [0, 0, 0])
    step = step_of(feed, aggregates=(("some", agg.collect("v", max_values=1)),))
    kernel, state, found = BufferedSessions(step), MemoryState(), []
    for tick in range(3):
        kernel.step_timed(state, [feed.table(tick, tick + 1)], [feed.watermarks(tick, tick + 1)])
        found += kernel.dead_letters.take().to_pylist()
    assert [(each["v"], each["device"], each["_tick"]) for each in found] == [
        (2.0, "a", 1),
        (3.0, "a", 2),
    ]


def test_more_rows_than_can_be_kept_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_state, "MAX_ROWS", 2)
    feed = Feed([[row(0), row(1), row(2)]], [0], [0])
    with pytest.raises(InputError, match="keeps up to 2 rows a group"):
        feed_to(BufferedSessions, step_of(feed), feed)
