"""Event time when producers are silent, inputs are empty and clocks are wrong: no row of a backfill
is lost, nobody waits for ever, and one wrong clock makes nobody else late.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.testing.pipelines import PipelineTest

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
Row = dict[str, Any]
pytestmark = pytest.mark.usefixtures("no_syncs")


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def counted(**times: Any) -> hr.Pipeline:
    """Rows a minute and in all."""
    pipeline = hr.Pipeline("counted")
    orders = pipeline.topic(
        "orders", schema="id BIGINT, at TIMESTAMP", event_time=hr.EventTime("at", **times)
    )
    minutes = orders.window(hr.tumbling("1 minute")).aggregate(n=hr.agg.count(), name="minutes")
    pipeline.view("minutes", minutes)
    return pipeline


def rows_in_windows(test: PipelineTest) -> int:
    return sum(row["n"] for row in test.view("minutes"))


def count(test: PipelineTest, name: str) -> int:
    return test.runner.leading.entry.counts.get(name, 0)


def test_a_pause_in_a_backfill_made_the_rest_of_it_late(tmp_path: Path) -> None:
    with PipelineTest(counted(), tmp_path) as test:
        test.feed("orders", [{"id": n, "at": at(n)} for n in range(5)])
        test.settle()
        test.pass_time("1 minute 30 seconds")
        test.cut(forced=True)
        test.settle()
        test.feed("orders", [{"id": n, "at": at(40 + n)} for n in range(100)])
        test.settle()
        assert count(test, "minutes.late") == 0
        test.feed("orders", [{"id": 1_000, "at": at(1_000)}])
        test.settle()
        assert rows_in_windows(test) == 105


def test_an_idle_stream_emits_its_last_window_when_its_time_has_passed(tmp_path: Path) -> None:
    with PipelineTest(counted(), tmp_path) as test:
        test.feed("orders", [{"id": 1, "at": at(50)}])
        test.settle()
        test.pass_time("1 minute 5 seconds")  # idle for 5 seconds
        test.settle()
        assert test.view("minutes") == []
        test.pass_time("6 seconds")
        assert test.cut() == 1, "a tick is due although no row came"
        test.settle()
        assert rows_in_windows(test) == 1


def joined(how: str = "left", **times: Any) -> hr.Pipeline:
    pipeline = hr.Pipeline("joined")
    orders = pipeline.topic(
        "orders",
        schema="id BIGINT, at TIMESTAMP",
        key="id",
        event_time=hr.EventTime("at", **times),
    )
    payments = pipeline.topic(
        "payments",
        schema="id BIGINT, at TIMESTAMP",
        key="id",
        event_time=hr.EventTime("at", **times),
    )
    pairs = orders.join(payments, on="id", within="1 minute", how=how, suffix="_paid", name="pairs")
    pipeline.write("pairs", pairs)
    pipeline.view(
        "minutes",
        pairs.window(hr.tumbling("1 minute")).aggregate(n=hr.agg.count(), name="minutes"),
    )
    return pipeline


@pytest.mark.parametrize("width", ["one", "wide"])
def test_a_left_join_waited_for_ever_for_a_topic_without_rows(tmp_path: Path, width: str) -> None:
    with PipelineTest(joined(), tmp_path, width=width) as test:
        for n in range(4):
            test.feed("orders", [{"id": n, "at": at(100 * n)}])
            test.settle()
            test.pass_time("25 seconds")
        assert [row[1] for row in test.rows("pairs")] == [0, 1, 2], "all before 300 - 60 seconds"
        assert rows_in_windows(test) == 3


def test_rows_of_an_input_that_returns_are_late_for_what_was_emitted_without_it(
    tmp_path: Path,
) -> None:
    """And in every split into batches the same ones."""
    results = []
    for number, max_ticks in enumerate((1, 3, 100)):
        with PipelineTest(joined(), tmp_path / str(number), shards=number + 1) as test:
            for n in range(6):
                test.feed("orders", [{"id": n, "at": at(100 * n)}])
                test.cut()
                test.pass_time("25 seconds")
            test.feed("payments", [{"id": n, "at": at(100 * n + 1)} for n in range(6)])
            test.feed("orders", [{"id": 9, "at": at(2_000)}])
            test.cut()
            test.feed("payments", [{"id": 9, "at": at(2_001)}])
            test.cut()
            while test.step(max_ticks):
                continue
            results.append([(tuple(row)) for row in test.rows("pairs")])
            assert count(test, "pairs.late_right") == 5
    assert results[0] == results[1] == results[2]
    assert sorted(row[1] for row in results[0] if row[3] is not None) == [5, 9]


@pytest.fixture
def this_minute() -> datetime:
    """The beginning of a minute that is not about to end."""
    return datetime.fromtimestamp(time.time() // 60 * 60 - 60, UTC)


def test_one_wrong_clock_made_everybody_else_late(tmp_path: Path, this_minute: datetime) -> None:
    def row(n: int, second: float) -> Row:
        return {"id": n, "at": this_minute + timedelta(seconds=second)}

    with PipelineTest(counted(delay="5 minutes"), tmp_path) as test:
        test.feed("orders", [row(1, 0), row(2, 23 * 3600)])
        test.settle()
        test.feed("orders", [row(n, n / 2) for n in range(100)])
        test.settle()
        assert count(test, "minutes.late") == 0
        assert count(test, "orders.ahead") == 1
        assert count(test, "orders.diverted") == 0, "it is data"
        furthest = test.runner.watermark_state.inputs["orders"].furthest
        assert furthest is not None
        assert (furthest.partition, furthest.offset) == (0, 1)
        assert furthest.ahead_us > 22 * 3600 * 1_000_000


def test_a_row_may_move_the_watermark_ahead_if_that_is_allowed(
    tmp_path: Path, this_minute: datetime
) -> None:
    with PipelineTest(counted(max_ahead="1 day"), tmp_path) as test:
        test.feed("orders", [{"id": 1, "at": this_minute}])
        test.feed("orders", [{"id": 2, "at": this_minute + timedelta(hours=23)}])
        test.settle()
        test.feed("orders", [{"id": n, "at": this_minute} for n in range(100)])
        test.settle()
        assert count(test, "minutes.late") == 100
        source = test.runner.watermark_state.inputs["orders"].moved_by
        assert source is not None
        assert (source.producer, source.partition, source.offset) == ("0", 0, 1)


def test_how_far_a_row_moves_the_watermark_goes_by_its_append_time(tmp_path: Path) -> None:
    """Not by the tick, which may be cut hours later: a replay and a batch of another size agree."""
    with PipelineTest(counted(), tmp_path) as test:
        now = datetime.now(UTC)
        test.feed("orders", [{"id": 1, "at": now + timedelta(hours=5)}])
        test.pass_time("10 hours")
        test.settle()
        watermark_us = test.runner.watermark_state.inputs["orders"].watermark_us
        assert abs(watermark_us / 1e6 - now.timestamp()) < 60


def test_a_time_beyond_all_calendars_is_a_dead_letter(tmp_path: Path) -> None:
    with PipelineTest(counted(), tmp_path) as test:
        test.feed("orders", [{"id": 1, "at": datetime(9950, 1, 1, tzinfo=UTC)}])
        test.settle()
        assert count(test, "orders.diverted") == 1
