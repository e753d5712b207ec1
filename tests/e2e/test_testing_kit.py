"""The kit that users test their pipelines with: time passes as they say, the runner dies where they say, and changes can be read tick by tick."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import headrace as hr
from headrace.testing.pipelines import DEATHS, Died, PipelineTest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def shop() -> hr.Pipeline:
    pipeline = hr.Pipeline("shop")
    orders = pipeline.topic("orders", schema="k BIGINT, at TIMESTAMP", event_time=hr.EventTime("at", idle="1 hour"))
    pipeline.view("totals", orders.group_by("k").aggregate(n=hr.agg.count()))
    pipeline.view("days", orders.window(hr.tumbling("1 day")).aggregate(n=hr.agg.count()))
    return pipeline


def test_time_passes_as_the_test_says(tmp_path: Path, spark: SparkSession) -> None:
    with PipelineTest(shop(), tmp_path, spark) as test:
        test.feed("orders", [{"k": 1, "at": datetime(2026, 1, 1, 12, tzinfo=UTC)}])
        test.settle()
        test.pass_time("59 minutes")
        assert test.cut() == 0, "its producer is not idle yet"
        test.restart()
        test.pass_time("2 minutes")
        test.settle()
        assert [row["n"] for row in test.view("days")] == [1]


def test_the_runner_dies_where_the_test_says_and_nothing_is_lost_or_doubled(tmp_path: Path, spark: SparkSession) -> None:
    with PipelineTest(shop(), tmp_path, spark) as test:
        for point in DEATHS:
            test.feed("orders", [{"k": 1, "at": datetime(2026, 1, 1, tzinfo=UTC)}])
            test.cut()
            with pytest.raises(Died, match=point):
                test.step(dies=point)
            test.restart()
        test.settle()
        assert test.view("totals") == [{"k": 1, "n": 3}]
        assert [(tick, [row["n"] for row in rows]) for tick, rows in test.changes("totals")] == [(1, [1]), (2, [1, 2]), (3, [2, 3])]
        with pytest.raises(ValueError, match="between commits"):
            test.step(dies="between comits")
