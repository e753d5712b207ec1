"""An input that was deleted and created again is noticed, however many rows it has by then. One
whose columns change is the same: pipelines go on, with the columns that they declare.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import BadRows, InputReplaced, RetryError, TopicExists, UnknownColumn
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


# Columns that change


def sales() -> hr.Pipeline:
    pipeline = hr.Pipeline("sales")
    orders = pipeline.topic("orders", schema="k INT NOT NULL, shop STRING")
    shops = pipeline.table("shops", schema="shop STRING, city STRING", key="shop")
    joined = orders.join(shops, on="shop", how="left")
    pipeline.view("totals", joined.group_by("city").aggregate(n=hr.agg.sum("k")))
    pipeline.write("copy", orders.select("k", "shop"))
    return pipeline


def test_a_pipeline_that_declares_fewer_columns_than_the_topic_has_starts_and_runs(
    tmp_path: Path,
) -> None:
    with hr.open_log(f"file:{tmp_path}/log") as log:
        log.create_topic("orders", "id BIGINT NOT NULL, shop STRING, k INT NOT NULL, at DATE")
        log.create_table("shops", "city STRING, size INT, shop STRING", key="shop")
        with PipelineTest(sales(), tmp_path / "test", log=log) as test:
            test.feed("shops", {"shop": "a", "city": "Bonn", "size": 3})
            test.feed("orders", [{"id": n, "shop": "a", "k": n, "at": None} for n in range(5)])
            test.settle()
            assert test.view("totals") == [{"city": "Bonn", "n": 10}]
            assert log.topic("copy").schema == "k INT NOT NULL, shop STRING"


def test_a_pipeline_goes_on_while_columns_are_added_renamed_and_widened(tmp_path: Path) -> None:
    with PipelineTest(sales(), tmp_path) as test:
        test.feed("shops", {"shop": "a", "city": "Bonn"})
        test.feed("orders", [{"k": 1, "shop": "a"}])
        test.settle()
        test.log.alter_topic("orders", add_columns="note STRING")
        test.feed("orders", [{"k": 2, "shop": "a"}, {"k": 3, "shop": "a", "note": "x"}])
        test.settle()
        test.log.alter_topic(
            "orders", rename_columns={"shop": "shop_name"}, alter_columns="k BIGINT"
        )
        test.log.alter_topic("shops", rename_columns={"city": "town"}, add_columns="size INT")
        test.log.alter_topic("copy", add_columns="note STRING")
        test.feed("orders", [{"k": 4, "shop_name": "a"}])
        test.settle()
        assert test.view("totals") == [{"city": "Bonn", "n": 10}]
        test.restart()
        test.feed("shops", {"shop": "b", "town": "Rome", "size": 1})
        test.feed("orders", [{"k": 5, "shop": "b"}])
        test.settle()
        assert test.view("totals") == [{"city": "Bonn", "n": 10}, {"city": "Rome", "n": 5}]
        copied = test.log.read("copy", columns=["k", "note"]).to_pylist()
        assert copied == [{"k": k, "note": None} for k in range(1, 6)]


@pytest.mark.parametrize(("k", "reason"), [(1 << 40, "does not fit INT"), (None, "null")])
def test_a_pipeline_stops_at_a_value_that_its_declaration_cannot_hold(
    tmp_path: Path, k: int | None, reason: str
) -> None:
    with PipelineTest(sales(), tmp_path) as test:
        test.log.alter_topic("orders", alter_columns="k BIGINT")
        test.feed("orders", [{"k": 1, "shop": "a"}, {"k": k, "shop": "a"}])
        with pytest.raises(BadRows, match=rf"orders\[0\], offset 1(.|\n)*{reason}"):
            test.settle()


def test_a_pipeline_whose_column_was_dropped_stops_and_does_not_start(tmp_path: Path) -> None:
    with PipelineTest(sales(), tmp_path) as test:
        test.feed("orders", [{"k": 1, "shop": "a"}])
        test.log.alter_topic("orders", drop_columns="shop")
        with pytest.raises(UnknownColumn, match="shop"):
            test.settle()
        with pytest.raises(TopicExists, match="'shop' is not in the topic any more"):
            test.restart()
