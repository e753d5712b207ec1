"""Replaying on Spark: the same ticks give the same rows, byte for byte, next to the old ones; a
changed pipeline gives its own.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace.testing.pipelines import PipelineTest
from headrace.views.reader import ViewReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


TIMES = hr.EventTime("at", delay="5 seconds", producer="k")
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def shop(aggregate: str = "sum") -> hr.Pipeline:
    """A stream, a table, row-local steps that divert, a stage for each of several keys, a window
    that waits for its producers, a view and topics.
    """
    pipeline = hr.Pipeline("shop")
    orders = pipeline.topic(
        "orders",
        schema="k BIGINT, v BIGINT, d BIGINT, at TIMESTAMP",
        key="k",
        partitions=2,
        event_time=TIMES,
    )
    people = pipeline.table("people", schema="k BIGINT, city STRING", key="k")
    parts = orders.with_columns(part="v / d", errors="divert", name="part")
    by_key = parts.group_by("k").aggregate(n=hr.agg.count(), s=getattr(hr.agg, aggregate)("part"))
    pipeline.write("totals", by_key, partitions=2)
    pipeline.view("by_key", by_key)
    pipeline.write(
        "minutes",
        orders.window(hr.tumbling("1 minute"), late=hr.late.divert("late"))
        .group_by("k")
        .aggregate(n=hr.agg.count()),
    )
    pipeline.write("cities", people.group_by("city").aggregate(n=hr.agg.count()))
    return pipeline


def feed(test: PipelineTest, ticks: int, seed: int = 1) -> None:
    rng = random.Random(seed)
    for tick in range(ticks):
        times = [
            NOON + timedelta(seconds=40 * tick + rng.randrange(-90, 30))
            for _ in range(rng.randrange(5, 20))
        ]
        times += [NOON - timedelta(hours=1)] * (tick == 5)  # too late by then
        test.feed(
            "orders",
            [
                {"k": rng.randrange(6), "v": rng.randrange(50), "d": rng.randrange(4), "at": at}
                for at in times
            ],
        )
        if rng.random() < 0.7:
            test.feed(
                "people", [{"k": rng.randrange(5), "city": rng.choice(["Oslo", "Rome", "Bonn"])}]
            )
        test.cut(forced=True)


def changes(test: PipelineTest, view: str) -> list[tuple[int, pa.Table]]:
    """All changes of a view, tick by tick."""
    with ViewReader(test.state / "views.db") as reader, reader.snapshot() as snapshot:
        return list(snapshot.changes_since(view, 0))


def run(test: PipelineTest, max_ticks: int = 1_000) -> None:
    while test.step(max_ticks):
        continue


def dead(test: PipelineTest, step: str) -> list[tuple[Any, ...]]:
    rows = test.log.read(f"{step}.dead").to_pylist()
    return sorted((row["row"], row["tick"], row["reason"], row["source_offset"]) for row in rows)


def test_an_unchanged_pipeline_gives_the_same_rows_at_every_tick(
    tmp_path: Path, spark: SparkSession
) -> None:
    with PipelineTest(shop(), tmp_path, spark) as test:
        feed(test, 7)
        run(test, 3)
        with test.replay("v2", shards=3) as again:
            run(again, 2)
            again.restart(lose_local_store=True)
            run(again)
            assert again.rows("totals.v2") == test.rows("totals")
            assert again.rows("cities.v2") == test.rows("cities")
            assert again.rows("minutes.v2") == test.rows("minutes") != []
            assert sorted(again.rows("late.v2")) == sorted(test.rows("late")) != []
            assert [tick for tick, _ in changes(again, "by_key.v2")] == [
                tick for tick, _ in changes(test, "by_key")
            ]
            assert all(
                ours.equals(theirs)
                for (_, ours), (_, theirs) in zip(
                    changes(again, "by_key.v2"), changes(test, "by_key"), strict=True
                )
            )
            assert again.view("by_key.v2") == test.view("by_key") != []
            assert dead(again, "part.v2") == dead(test, "part") != []
            assert again.runner.tick == test.runner.tick == 7
            before = test.rows("totals"), dead(test, "part")
            feed(again, 2, seed=2)  # the version goes on with ticks of its own
            run(again)
            assert (test.rows("totals"), dead(test, "part")) == before
            assert test.step() is False
            test.settle()
            assert again.view("by_key.v2") == test.view("by_key")
            assert (again.runner.tick, test.runner.tick) == (9, 8)


def test_a_changed_pipeline_is_built_beside_the_old_one(
    tmp_path: Path, spark: SparkSession
) -> None:
    with PipelineTest(shop(), tmp_path, spark) as test:
        feed(test, 4)
        run(test)
        old = test.rows("totals")
        with test.replay("largest", pipeline=shop("max")) as changed:
            run(changed)
            best = {row["k"]: row["s"] for row in changed.view("by_key.largest")}
        assert test.rows("totals") == old
        assert set(best) == {row["k"] for row in test.view("by_key")}
        assert best != {row["k"]: row["s"] for row in test.view("by_key")}


def test_a_replay_from_a_later_tick_begins_with_nothing(
    tmp_path: Path, spark: SparkSession
) -> None:
    pipeline = hr.Pipeline("count")
    table = (
        pipeline.topic("orders", schema="k BIGINT", key="k")
        .group_by("k")
        .aggregate(n=hr.agg.count())
    )
    pipeline.view("by_key", table)
    pipeline.write("counts", table)
    with PipelineTest(pipeline, tmp_path, spark) as test:
        for _ in range(5):
            test.feed("orders", [{"k": 1}])
            test.cut()
        run(test)
        with test.replay("late", since=4) as late:
            run(late)
            assert late.view("by_key.late") == [{"k": 1, "n": 2}]
            late.restart()
            late.feed("orders", [{"k": 1}])
            late.settle()
            assert late.view("by_key.late") == [{"k": 1, "n": 3}]
            assert late.folded("counts.late", "k") == {1: {"k": 1, "n": 3}}
        with test.replay("fresh", retick=True) as fresh:
            fresh.settle()
            assert fresh.runner.tick == 1
            assert fresh.view("by_key.fresh") == [{"k": 1, "n": 6}]
