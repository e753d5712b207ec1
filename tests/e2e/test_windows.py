"""Windows through the engine: emitted when complete, corrected, diverted, chained; whatever the
batches, shards and restarts.
"""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import headrace as hr
from headrace.runtime.explain import explain, explanation_text
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
START = datetime(2026, 3, 1, 12, tzinfo=UTC)
SCHEMA = "region STRING, amount BIGINT, device STRING, at TIMESTAMP"


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def us(seconds: float) -> int:
    return round(at(seconds).timestamp() * 1e6)


def order(region: str, amount: int, device: str, seconds: float) -> dict[str, Any]:
    return {"region": region, "amount": amount, "device": device, "at": at(seconds)}


def chained() -> hr.Pipeline:
    """Minutes to hours to days; late rows correct the minutes."""
    shop = hr.Pipeline("shop")
    times = hr.EventTime("at", delay="5 seconds", producer="device", idle="10 minutes")
    orders = shop.topic("orders", schema=SCHEMA, key="region", event_time=times, partitions=2)
    minutes = (
        orders.window(hr.tumbling("1 minute"), late=hr.late.correct("1 day"))
        .group_by("region")
        .aggregate(n=hr.agg.count(), s=hr.agg.sum("amount"))
    )
    hours = (
        minutes.window(hr.tumbling("1 hour"), late=hr.late.correct("1 day"))
        .group_by("region")
        .aggregate(n=hr.agg.sum("n"), s=hr.agg.sum("s"))
    )
    days = hours.window(
        hr.tumbling("1 day"), late=hr.late.correct("1 day"), emit="changes"
    ).aggregate(n=hr.agg.sum("n"), s=hr.agg.sum("s"))
    shop.view("minutes", minutes)
    shop.write("hours", hours, partitions=2)
    shop.view("days", days)
    return shop


def disordered(seed: int, ticks: int = 6) -> list[list[dict[str, Any]]]:
    rng = random.Random(seed)
    return [
        [
            order(
                rng.choice("ab"),
                rng.randrange(100),
                rng.choice(("x", "y")),
                tick * 1200 + rng.randrange(-3600, 1200),
            )
            for _ in range(25)
        ]
        for tick in range(ticks)
    ]


def test_chained_windows_with_corrections_equal_the_batch_answer(
    tmp_path: Path, spark: SparkSession
) -> None:
    fed = disordered(4)
    answers = []
    plain: Any = PlainSpark()
    for number, (session, max_ticks, shards) in enumerate([(spark, 100, 2), (plain, 1, 3)]):
        with PipelineTest(chained(), tmp_path / str(number), session, shards=shards) as test:
            for rows in fed:
                test.feed("orders", rows)
                test.cut()
            test.step(max_ticks)
            test.restart(shards=shards, lose_local_store=number == 1)
            while test.step(max_ticks):
                continue
            test.feed("orders", [order("a", 0, device, 3 * 86400) for device in ("x", "y")])
            test.settle(max_ticks)
            everything = [row for rows in fed for row in rows]
            days = {row["window_start"].date(): (row["n"], row["s"]) for row in test.view("days")}
            expected: dict[Any, tuple[int, int]] = {}
            for row in everything:
                n, s = expected.get(row["at"].date(), (0, 0))
                expected[row["at"].date()] = (n + 1, s + row["amount"])
            assert days == expected
            answers.append(
                (
                    sorted(test.rows("hours"), key=lambda row: row[0]),
                    sorted(map(str, test.view("minutes"))),
                )
            )
    assert answers[0] == answers[1], "the same rows, in the same order"


def test_a_window_is_emitted_when_the_slowest_producer_has_passed_it(
    tmp_path: Path, spark: SparkSession
) -> None:
    shop = hr.Pipeline("shop")
    times = hr.EventTime("at", delay="5 seconds", producer="device", idle="10 minutes")
    orders = shop.topic("orders", schema=SCHEMA, event_time=times)
    shop.view(
        "minutes",
        orders.window(hr.tumbling("1 minute"), late=hr.late.divert("late_orders")).aggregate(
            n=hr.agg.count()
        ),
    )
    with PipelineTest(shop, tmp_path, spark) as test:
        test.feed("orders", [order("a", 1, "x", 10), order("a", 1, "y", 20)])
        test.settle()
        test.feed("orders", [order("a", 1, "x", 200)])
        test.settle()
        assert test.view("minutes") == [], "y may still send rows of the first minute"
        why = explain(shop.plan(), test.log, tmp_path / "state", "minutes.window", at(30))
        assert [(each.producer, each.newest_us, each.needed_us) for each in why.held_by] == [
            ("y", us(20), us(65))
        ]
        assert [
            (each.start_us, each.end_us, each.waiting, each.groups) for each in why.windows
        ] == [(us(0), us(60), True, 1)]
        assert "waits for the producer y" in "\n".join(explanation_text(why))
        test.feed("orders", [order("a", 1, "y", 65)])
        test.settle()
        assert [(row["window_start"], row["n"]) for row in test.view("minutes")] == [(at(0), 2)], (
            "65 seconds less the delay is the end of the first minute"
        )
        test.feed("orders", [order("a", 7, "y", 30)])
        test.settle()
        assert [(row["window_start"], row["n"]) for row in test.view("minutes")] == [(at(0), 2)]
        assert [row["amount"] for row in test.log.read("late_orders").to_pylist()] == [7]
        late = test.log.read("__late.shop").to_pylist()
        assert [(row["step"], row["producer"], row["rows"]) for row in late] == [
            ("minutes.window", "y", 1)
        ]
        assert test.runner.leading.entry.counts["minutes.window.late"] == 1


def test_time_moves_on_when_no_row_comes_and_only_when_something_waits(
    tmp_path: Path, spark: SparkSession
) -> None:
    shop = hr.Pipeline("shop")
    orders = shop.topic("orders", schema=SCHEMA, event_time=hr.EventTime("at", idle="0 seconds"))
    shop.view("minutes", orders.window(hr.tumbling("1 minute")).aggregate(n=hr.agg.count()))
    with PipelineTest(shop, tmp_path, spark) as test:
        assert test.cut() == 0
        test.feed("orders", [order("a", 1, "x", 10)])
        test.settle()
        assert test.view("minutes") == []
        assert test.cut() == 0, "its only producer is idle, and the window is not over"
        test.pass_time("50 seconds")
        assert test.cut() == 1, "time has gone on with the ticks"
        test.settle()
        assert [row["n"] for row in test.view("minutes")] == [1]
        assert test.cut() == 0, "nothing waits for time any more"


def test_windows_over_the_time_of_processing(tmp_path: Path, spark: SparkSession) -> None:
    shop = hr.Pipeline("shop")
    orders = shop.topic(
        "orders", schema="region STRING, amount BIGINT", event_time=hr.processing_time()
    )
    shop.view(
        "seconds",
        orders.window(hr.tumbling("1 second")).group_by("region").aggregate(n=hr.agg.count()),
    )
    shop.write("stamped", orders)
    with PipelineTest(shop, tmp_path, spark) as test:
        test.feed("orders", [{"region": "a", "amount": n} for n in range(5)])
        test.settle()
        stamped = {row["processed_at"] for row in test.log.read("stamped").to_pylist()}
        assert len(stamped) == 1, "rows of one tick have one time"
        time.sleep(1.1)
        test.settle()
        assert [(row["region"], row["n"]) for row in test.view("seconds")] == [("a", 5)]
        assert (
            test.view("seconds")[0]["window_start"]
            <= stamped.pop()
            < test.view("seconds")[0]["window_end"]
        )


def test_sessions_and_sliding_windows_whatever_the_batches(
    tmp_path: Path, spark: SparkSession
) -> None:
    def visits() -> hr.Pipeline:
        shop = hr.Pipeline("shop")
        times = hr.EventTime("at", delay="5 seconds", producer="device", idle="10 minutes")
        orders = shop.topic("orders", schema=SCHEMA, key="region", event_time=times, partitions=2)
        shop.write(
            "visits",
            orders.window(hr.session("5 minutes"), late=hr.late.correct("1 day"))
            .group_by("region")
            .aggregate(n=hr.agg.count()),
        )
        shop.write(
            "moving",
            orders.window(hr.sliding("10 minutes"), late=hr.late.correct("1 day"))
            .group_by("region")
            .aggregate(s=hr.agg.sum("amount")),
        )
        return shop

    fed = disordered(7, ticks=4)
    answers = []
    plain: Any = PlainSpark()
    for number, (session, max_ticks, shards) in enumerate([(spark, 100, 2), (plain, 1, 3)]):
        with PipelineTest(visits(), tmp_path / str(number), session, shards=shards) as test:
            for rows in [
                *fed,
                [order(region, 0, device, 9 * 86400) for region in "ab" for device in "xy"],
            ]:
                test.feed("orders", rows)
                test.cut()
            while test.step(max_ticks):
                continue
            answers.append((test.rows("visits"), test.rows("moving")))
            sessions = [row for row in visible(test, "visits") if row["window_end"] < at(86400 * 8)]
            moving = {
                (row["region"], row["window_end"]): row["s"] for row in visible(test, "moving")
            }
    assert answers[0] == answers[1]
    everything = [row for rows in fed for row in rows]
    assert sum(row["n"] for row in sessions) == len(everything)
    for row in everything:
        near = [
            r["amount"]
            for r in everything
            if r["region"] == row["region"]
            and timedelta(0) <= row["at"] - r["at"] < timedelta(minutes=10)
        ]
        assert moving[row["region"], row["at"]] == sum(near)


def visible(test: PipelineTest, topic: str) -> list[dict[str, Any]]:
    """What a table's topic amounts to."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in test.log.read(topic).to_pylist():
        key = (row["region"], row["window_start"], row["window_end"])
        if row["_change_type"] in {"delete", "update_preimage"}:
            del found[key]
        else:
            found[key] = row
    return list(found.values())
