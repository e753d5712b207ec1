"""An input that was deleted and created again is noticed, however many rows it has by then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import InputReplaced, RetryError
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark


def shop() -> hr.Pipeline:
    pipeline = hr.Pipeline("shop")
    orders = pipeline.topic("orders", schema="k BIGINT")
    pipeline.view("totals", orders.group_by("k").aggregate(n=hr.agg.count()))
    return pipeline


def begun(root: Path) -> PipelineTest:
    spark: Any = PlainSpark()
    test = PipelineTest(shop(), root, spark)
    test.feed("orders", [{"k": 0}] * 5)
    test.settle()
    return test


@pytest.mark.parametrize("rows", [0, 3, 9])
def test_a_start_is_refused_once_an_input_was_made_again(tmp_path: Path, rows: int) -> None:
    with begun(tmp_path) as test:
        test.log.delete_topic("orders")
        test.log.create_topic("orders", "k BIGINT")
        if rows:
            test.feed("orders", [{"k": 1}] * rows)
        with pytest.raises(InputReplaced, match=r"'orders' was deleted(.|\n)*--retick"):
            test.restart()
        with pytest.raises(InputReplaced, match="orders"):
            test.replay("v2")
        with test.replay("v3", retick=True) as version:
            version.settle()
            assert version.view("totals.v3") == ([{"k": 1, "n": rows}] if rows else [])


@pytest.mark.parametrize(("rows", "error"), [(3, RetryError), (9, InputReplaced)])
def test_a_run_under_way_takes_nothing_of_another_topic_in(
    tmp_path: Path, rows: int, error: type[Exception]
) -> None:
    with begun(tmp_path) as test:
        test.log.delete_topic("orders")
        test.log.create_topic("orders", "k BIGINT")
        test.feed("orders", [{"k": 1}] * rows)
        with pytest.raises(error, match="created again"):
            test.cut()
        assert test.view("totals") == [{"k": 0, "n": 5}]


def test_a_changed_topic_is_still_the_same(tmp_path: Path) -> None:
    with begun(tmp_path) as test:
        test.log.alter_topic("orders", partitions=3, retention="1 day")
        test.restart()
        test.feed("orders", [{"k": 0}] * 5)
        test.settle()
        assert test.view("totals") == [{"k": 0, "n": 10}]
