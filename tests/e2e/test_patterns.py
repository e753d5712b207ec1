"""Patterns through the engine: the same matches whatever the batches, shards, restarts and kills;
time-outs, late rows, several patterns, and what a key waits for.

The jobs run in this process.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import headrace as hr
from headrace.runtime.explain import partial_matches, partial_matches_text
from headrace.runtime.explain import partial_matches_plain as plain
from headrace.runtime.state_inspector import last_entry
from headrace.testing.pipelines import Died, PipelineTest
from tests.e2e.patterned import (
    OUTPUTS,
    SCHEMA,
    START,
    Row,
    disordered,
    feed_tick,
    outputs,
    patterned,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("no_syncs")


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def payment(card: int, amount: float, seconds: float, kind: str = "a") -> Row:
    return {"card": card, "amount": amount, "kind": kind, "paid_at": at(seconds)}


def settled(
    test: PipelineTest, ticks: list[list[Row]], after_each: Any = None, max_ticks: int = 1_000_000
) -> None:
    for number, rows in enumerate(ticks):
        feed_tick(test, number, rows)
        if after_each is not None:
            after_each(test)
    test.settle(max_ticks)
    test.pass_time("1 hour")
    test.settle(max_ticks)


def test_matches_do_not_depend_on_batches_shards_and_restarts(tmp_path: Path) -> None:
    ticks = disordered(3)
    with PipelineTest(patterned("bank"), tmp_path / "whole", shards=2) as test:
        settled(test, ticks)
        expected = outputs(test)
    assert all(expected[name] for name in OUTPUTS), "each output has something to tell"

    def step_and_restart(test: PipelineTest, shards: list[int] = [3, 1, 2]) -> None:  # noqa: B006
        while test.step(1):
            continue
        test.restart(shards=shards[len(test.rows("steps")) % 3], lose_local_store=True)

    with PipelineTest(patterned("bank"), tmp_path / "pieces", shards=1) as test:
        settled(test, ticks, step_and_restart, 1)
        assert outputs(test) == expected


@pytest.mark.spark
def test_matches_on_spark_equal_those_without(tmp_path: Path, spark: SparkSession) -> None:
    ticks = disordered(3)
    with PipelineTest(patterned("bank"), tmp_path / "plain", shards=2) as test:
        settled(test, ticks)
        expected = outputs(test)
    with PipelineTest(patterned("bank"), tmp_path / "spark", spark, shards=2) as test:
        settled(test, ticks)
        assert outputs(test) == expected
        test.restart(shards=3, lose_local_store=True)
        assert outputs(test) == expected


@pytest.mark.parametrize(
    "point", ["in the kernel", "files were written", "before the commit", "after the commit"]
)
def test_a_kill_loses_and_doubles_nothing(tmp_path: Path, point: str) -> None:
    ticks = disordered(4)
    with PipelineTest(patterned("bank"), tmp_path / "whole") as test:
        settled(test, ticks)
        expected = outputs(test)

    def die_once(test: PipelineTest) -> None:
        with pytest.raises(Died):
            test.step(dies=point)
        test.restart()

    with PipelineTest(patterned("bank"), tmp_path / "killed") as test:
        settled(test, ticks, die_once)
        assert outputs(test) == expected


def test_absence_is_emitted_by_the_watermark_alone(tmp_path: Path) -> None:
    with PipelineTest(patterned("bank"), tmp_path) as test:
        test.feed("payments", [payment(1, 5.0, 0, "a")])
        test.settle()
        assert test.rows("silent") == []
        test.pass_time("15 minutes")
        test.settle()
        assert [row[1:] for row in test.rows("silent")] == [(1, at(0), at(20))]


def test_a_condition_that_fails_is_false_and_counted(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("bank")
    payments = pipeline.topic(
        "payments", schema=SCHEMA, key="card", event_time=hr.EventTime("paid_at")
    )
    pipeline.write(
        "out",
        payments.match(
            "a b",
            define={"b": "100 / (amount - a.amount) > 10"},
            measures={"n": "count(*)"},
            within="1 minute",
        ),
    )
    with PipelineTest(pipeline, tmp_path) as test:
        test.feed(
            "payments",
            [
                payment(1, 5.0, 0),
                payment(1, 5.0, 1),
                payment(1, 6.0, 2),
                payment(1, None, 3),  # type: ignore[arg-type]
                payment(1, 9.0, 500),
            ],
        )
        test.settle()
        assert [row[2] for row in test.rows("out")] == [2]
        assert last_entry(test.log, "bank").counts["out.match.errors"] == 1


def test_final_is_said_of_a_call_and_running_is_how_it_is_anyway(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("bank")
    payments = pipeline.topic(
        "payments", schema=SCHEMA, key="card", event_time=hr.EventTime("paid_at")
    )
    measures = {
        "left": "final sum(amount) - sum(amount)",
        "part": "RUNNING sum(amount) / FINAL sum(amount)",
        "then": "last(up.amount)",
        "which": "classifier(up)",
    }
    asked = hr.pattern(
        "a up+", define={"up": "amount > prev(amount)"}, measures=measures, within="1 minute"
    )
    pipeline.write("out", payments.match({"rising": asked}, rows="all"))
    with PipelineTest(pipeline, tmp_path) as test:
        test.feed(
            "payments",
            [
                payment(1, 1.0, 0),
                payment(1, 4.0, 1),
                payment(1, 5.0, 2),
                payment(1, 0.0, 3),
                payment(1, 0.0, 500),
            ],
        )
        test.settle()
        assert [row[8:12] for row in test.rows("out")] == [
            (9.0, 0.1, None, None),
            (5.0, 0.5, 4.0, "up"),
            (0.0, 1.0, 5.0, "up"),
        ]


def test_times_are_seconds_where_they_are_cast_to_numbers(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("bank")
    payments = pipeline.topic(
        "payments", schema=SCHEMA, key="card", event_time=hr.EventTime("paid_at")
    )
    soon = {"b": "CAST(paid_at AS BIGINT) - CAST(a.paid_at AS BIGINT) <= 5"}
    pipeline.write(
        "out",
        payments.match(
            "a b", define=soon, measures={"last": "CAST(paid_at AS DOUBLE)"}, within="1 minute"
        ),
    )
    with PipelineTest(pipeline, tmp_path) as test:
        test.feed(
            "payments",
            [payment(1, 1.0, 0), payment(1, 4.0, 10), payment(1, 5.0, 14.5), payment(1, 0.0, 500)],
        )
        test.settle()
        assert [row[2] for row in test.rows("out")] == [START.timestamp() + 14.5]


def test_measures_of_what_is_no_number_or_too_large_are_as_in_spark(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("bank")
    events = pipeline.topic(
        "events", schema="v DOUBLE, n BIGINT, at TIMESTAMP", event_time=hr.EventTime("at")
    )
    measures = {
        "least": "min(v)",
        "isnan": "max(v) = CAST('NaN' AS DOUBLE)",
        "n": "sum(n)",
        "mean": "avg(v)",
    }
    pipeline.write("out", events.match("a{3}", measures=measures, within="1 hour"))
    values = [(5.0, 2**62), (float("nan"), 2**62), (9.0, 1), (None, 1), (4.0, None), (6.0, 2)]
    with PipelineTest(pipeline, tmp_path) as test:
        test.feed(
            "events",
            [{"v": v, "n": n, "at": at(second)} for second, (v, n) in enumerate(values)]
            + [{"v": 1.0, "n": 1, "at": at(9000)}],
        )
        test.settle()
        first, second = test.rows("out")
        assert first[1:4] == (
            5.0,
            True,
            None,
        ), "NaN is the greatest of numbers, and what is too large is null"
        assert second[1:5] == (4.0, False, 3, 5.0), "nulls do not count"


def test_several_patterns_in_one_pass(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("bank")
    payments = pipeline.topic(
        "payments", schema=SCHEMA, key="card", event_time=hr.EventTime("paid_at")
    )
    rules = {
        "up": hr.pattern(
            "one more",
            define={"more": "amount > one.amount"},
            measures={"total": "sum(amount)"},
            within="1 minute",
        ),
        "skips": hr.pattern(
            "x -> y",
            define={"x": "kind = 'a'", "y": "kind = 'b'"},
            measures={"total": "last(y.amount)"},
            within="1 minute",
        ),
        "never": hr.pattern("z{3}", define={"z": "amount > 100000"}, within="1 minute"),
    }
    pipeline.write("alerts", payments.match(rules))
    with PipelineTest(pipeline, tmp_path) as test:
        test.feed(
            "payments",
            [
                payment(1, 5.0, 0, "a"),
                payment(1, 6.0, 1, "c"),
                payment(1, 2.0, 2, "b"),
                payment(1, 1.0, 500),
            ],
        )
        test.settle()
        assert sorted(row[1:4] for row in test.rows("alerts")) == [
            (1, "skips", 2.0),
            (1, "up", 11.0),
        ]


def test_partial_matches_of_a_key_can_be_inspected(tmp_path: Path) -> None:
    with PipelineTest(patterned("bank"), tmp_path) as test:
        test.feed(
            "payments",
            [payment(1, 5.0, 0), payment(1, 4.0, 10), payment(1, 3.0, 20), payment(2, 5.0, 60)],
        )
        test.settle()
        found = partial_matches(
            test.pipeline.plan(), test.log, test.state, "fraud.match", {"card": "1"}
        )
        assert [len(each.rows) for each in found.partial] == [2, 1]
        assert found.partial[0].waits_for == ["small"]
        assert found.partial[0].rows[0] == {
            "classifier": "small",
            "time_us": round(START.timestamp() * 1e6),
            "card": 1,
            "amount": 5.0,
            "paid_at": at(0),
        }
        assert (
            "has small small since 2026-03-01 12:00:00.000+00:00, waits for small until 2026-03-01"
            " 12:10:00.000+00:00." in partial_matches_text(found)
        )
        assert plain(found)["waiting_rows"] == 1, "the third is not certain to be the next"


def test_all_rows_may_be_one_sequence_and_types_stay_what_they_are(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("bank")
    events = pipeline.topic(
        "events",
        schema="a STRING, v DECIMAL(10,2), n INT, at TIMESTAMP_NTZ",
        event_time=hr.EventTime("at"),
    )
    measures = {
        "total": "sum(v)",
        "mean": "avg(v)",
        "took": "last(at) - first(at)",
        "who": "first(a)",
    }
    pipeline.write(
        "pairs",
        events.match(
            "x y", define={"y": "v > x.v AND n = x.n + 1"}, measures=measures, within="1 hour"
        ),
    )
    begin = START.replace(tzinfo=None)
    with PipelineTest(pipeline, tmp_path) as test:
        rows = [
            ("q", Decimal("1.50"), 1, 0),
            ("r", Decimal("2.50"), 2, 1),
            ("q", None, 3, 2),
            ("z", None, 1, 9000),
        ]
        test.feed(
            "events",
            [
                {"a": a, "v": v, "n": n, "at": begin + timedelta(seconds=second)}
                for a, v, n, second in rows
            ],
        )
        test.settle()
        assert test.rows("pairs") == [
            (0, Decimal("4.00"), 2.0, timedelta(seconds=1), "q", begin + timedelta(seconds=1))
        ]


def test_matches_of_corrected_windows_wait_for_corrections_and_have_a_time(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("bank")
    payments = pipeline.topic(
        "payments", schema=SCHEMA, key="card", event_time=hr.EventTime("paid_at", delay="1 second")
    )
    minutes = (
        payments.window(hr.tumbling("1 minute"), late=hr.late.correct("5 minutes"))
        .group_by("card")
        .aggregate(total=hr.agg.sum("amount"))
    )
    rising = (
        minutes.changes()
        .key_by("card")
        .match(
            "x y",
            define={"y": "total > x.total"},
            measures={"total": "last(total)"},
            within="1 hour",
        )
    )
    pipeline.write("rising", rising)
    pipeline.view(
        "hours", rising.window(hr.tumbling("1 hour")).group_by("card").aggregate(n=hr.agg.count())
    )
    with PipelineTest(pipeline, tmp_path) as test:
        for minute in range(8):
            test.feed("payments", [payment(1, float(minute), minute * 60)])
            test.settle()
        assert test.rows("rising") == [], "a correction could still come"
        test.feed("payments", [payment(1, 8.0, 480)])
        test.settle()
        assert [row[2] for row in test.rows("rising")] == [1.0]
        test.pass_time("3 hours")
        test.settle()
        assert [row[2] for row in test.rows("rising")] == [1.0, 3.0, 5.0, 7.0]
        assert [row["n"] for row in test.view("hours")] == [4]


def test_a_match_in_the_making_is_bounded(tmp_path: Path) -> None:
    def declared(when_full: str) -> hr.Pipeline:
        pipeline = hr.Pipeline("bank")
        payments = pipeline.topic(
            "payments", schema=SCHEMA, key="card", event_time=hr.EventTime("paid_at")
        )
        pipeline.write(
            "out",
            payments.match(
                "a+ b",
                define={"a": "amount < 10", "b": "amount > 10"},
                measures={"n": "count(*)"},
                max_rows=3,
                when_full=when_full,
            ),
        )
        return pipeline

    rows = [payment(1, 5.0, number) for number in range(5)] + [
        payment(1, 50.0, 5),
        payment(1, 1.0, 500),
    ]
    with PipelineTest(declared("drop"), tmp_path / "drop") as test:
        test.feed("payments", rows)
        test.settle()
        assert [row[2] for row in test.rows("out")] == [3], "the last three rows"
        assert last_entry(test.log, "bank").counts["out.match.given_up"] == 3
    with (
        PipelineTest(declared("stop"), tmp_path / "stop") as test,
        pytest.raises(Exception, match="goes on for more rows"),
    ):
        test.feed("payments", rows)
        test.settle()


def small_payments(rows: str, after: str) -> hr.Pipeline:
    pipeline = hr.Pipeline("bank")
    pipeline.topic("payments", schema=SCHEMA, key="card", event_time=hr.EventTime("paid_at"))
    query = f"""SELECT card, match_number, amount, classifier, n FROM payments MATCH_RECOGNIZE (
        PARTITION BY card ORDER BY paid_at MEASURES count(small.*) AS n {rows}
        AFTER MATCH {after} PATTERN (small* large?)
        DEFINE small AS amount < 10, large AS amount > sum(small.amount))"""
    pipeline.write("found", pipeline.sql(query))
    return pipeline


@pytest.mark.parametrize("omitted", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_patterns_that_may_match_nothing_were_refused(
    tmp_path: Path, omitted: bool, shards: int
) -> None:
    """`large` fits no row without a small one before it, since its sum is null then."""
    clause = f"ALL ROWS PER MATCH {'OMIT' if omitted else 'SHOW'} EMPTY MATCHES"
    pipeline = small_payments(clause, "SKIP PAST LAST ROW")
    amounts = [50, 1, 2, 30, 60, 3, 70]
    with PipelineTest(pipeline, tmp_path, shards=shards) as test:
        for number, amount in enumerate(amounts):
            test.feed("payments", [payment(7, amount, number)])
            test.settle(1)
        test.settle(final=True)
        found = [row[2:6] for row in test.rows("found")]
    everything = [
        (1, 50.0, None, 0),
        (2, 1.0, "small", 1),
        (2, 2.0, "small", 2),
        (2, 30.0, "large", 2),
        (3, 60.0, None, 0),
        (4, 3.0, "small", 1),
        (4, 70.0, "large", 1),
    ]
    assert found == [row for row in everything if not omitted or row[2] is not None]
