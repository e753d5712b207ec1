"""Outputs that come, go and are lost: each is built from the first recorded tick, and nobody else
notices. And what derived topics carry.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import headrace as hr
from headrace.engine.ticks import read_control_ticks
from headrace.testing.pipelines import PipelineTest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def shop(*outputs: str) -> hr.Pipeline:
    pipeline = hr.Pipeline("shop")
    orders = pipeline.topic("orders", schema="k BIGINT, v BIGINT", key="k", partitions=2)
    totals = orders.group_by("k").aggregate(s=hr.agg.sum("v"), name="totals")
    if "by_key" in outputs:
        pipeline.view("by_key", totals)
    if "totals" in outputs:
        pipeline.write("totals", totals, partitions=2)
    if "evens" in outputs:
        pipeline.view("evens", orders.group_by(even="v % 2 = 0").aggregate(n=hr.agg.count()))
    return pipeline


def rows(test: PipelineTest, view: str) -> list[tuple[object, ...]]:
    return sorted(tuple(row.values()) for row in test.view(view))


def test_an_output_added_later_is_built_from_the_first_tick_in_a_query_of_its_own(
    tmp_path: Path, spark: SparkSession
) -> None:
    with PipelineTest(shop("by_key"), tmp_path, spark) as test:
        for number in range(4):
            test.feed("orders", [{"k": number % 2, "v": number}])
            test.settle()
        test.pipeline = shop("by_key", "totals", "evens")
        test.restart()
        assert [(query.name, query.tick) for query in test.runner.queries] == [
            ("main", 4),
            ("added-2", 0),
        ]
        test.step(2)
        test.restart()
        assert [(query.name, query.tick) for query in test.runner.queries] == [
            ("main", 4),
            ("added-2", 2),
        ]
        test.feed("orders", [{"k": 7, "v": 7}])
        test.cut()
        test.step(1)
        assert rows(test, "by_key") == [
            (0, 2),
            (1, 4),
            (7, 7),
        ], "what was there before does not wait"
        test.settle()
        assert [(query.name, query.tick) for query in test.runner.queries] == [("main", 5)], (
            "caught up, it is one query again"
        )
        test.restart(lose_local_store=True)
        test.feed("orders", [{"k": 1, "v": 10}])
        test.settle()
        assert rows(test, "by_key") == [(0, 2), (1, 14), (7, 7)]
        assert rows(test, "evens") == [(False, 3), (True, 3)]
        assert {key: row["s"] for key, row in test.folded("totals", "k").items()} == {
            0: 2,
            1: 14,
            7: 7,
        }


def test_views_that_were_lost_are_built_again(tmp_path: Path, spark: SparkSession) -> None:
    with PipelineTest(shop("by_key", "totals"), tmp_path, spark) as test:
        test.feed("orders", [{"k": 1, "v": 1}])
        test.settle()
        test.runner.close()
        for path in (tmp_path / "state").glob("views.db*"):
            path.unlink()
        test.restart()
        test.settle()
        assert rows(test, "by_key") == [(1, 1)]
        assert len(test.rows("totals")) == 1


def test_outputs_may_go_and_a_topic_with_rows_is_not_filled_twice(
    tmp_path: Path, spark: SparkSession
) -> None:
    with PipelineTest(shop("by_key", "totals"), tmp_path, spark) as test:
        test.feed("orders", [{"k": 1, "v": 1}])
        test.settle()
        test.pipeline = shop("by_key")
        test.restart()
        test.feed("orders", [{"k": 1, "v": 1}])
        test.settle()
        assert rows(test, "by_key") == [(1, 2)]
        test.pipeline = shop("by_key", "totals")
        with pytest.raises(hr.errors.PlanChanged, match="write to another topic"):
            test.restart()
        test.pipeline = shop("evens")
        test.restart()
        test.settle()
        assert rows(test, "evens") == [(False, 2)], (
            "nothing of the old outputs is left, and the new one is complete"
        )


def test_a_derived_topic_says_where_each_tick_ends_whatever_the_batches(
    tmp_path: Path, spark: SparkSession
) -> None:
    found = []
    for max_ticks in (1, 10):
        with PipelineTest(shop("totals"), tmp_path / str(max_ticks), spark) as test:
            for number in range(3):
                test.feed("orders", [{"k": key, "v": 1} for key in range(number, 6)])
                test.cut()
            while test.step(max_ticks):
                continue
            ends = {}
            for partition in range(2):
                values = test.log.read("totals", partition).to_table()
                ticks = {
                    each.tick: each.end
                    for each in read_control_ticks(test.log, "totals", partition)
                }
                counts = [
                    sum(1 for at in values["_offset"].to_pylist() if at < end)
                    for _, end in sorted(ticks.items())
                ]
                ends[partition] = (sorted(ticks), counts)
            found.append(ends)
    assert found[0] == found[1]
    assert sum(counts[-1] for _, counts in found[0].values()) == 6 + 2 * 5 + 2 * 4, (
        "inserts, and pairs of images"
    )
    shutil.rmtree(tmp_path, ignore_errors=True)
