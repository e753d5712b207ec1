"""The kit that users test their pipelines with: time passes as they say, the runner dies where they
say, and changes can be read tick by tick. With Spark and without.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import headrace as hr
from headrace.errors import InputError, NotSupported
from headrace.testing.fault_points import ALL, IN_TASKS, ON_THE_DRIVER
from headrace.testing.kernels import KernelTest
from headrace.testing.pipelines import Died, PipelineTest, Undead

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.pipeline.stream import Stream

SOME_POINTS = ("before the commit", "between views and log", "after the commit")
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def orders_of(pipeline: hr.Pipeline) -> Stream:
    return pipeline.topic(
        "orders", schema="k BIGINT, at TIMESTAMP", event_time=hr.EventTime("at", idle="1 hour")
    )


def shop() -> hr.Pipeline:
    pipeline = hr.Pipeline("shop")
    orders = orders_of(pipeline)
    pipeline.view("totals", orders.where("k > 0").group_by("k").aggregate(n=hr.agg.count()))
    pipeline.view("days", orders.window(hr.tumbling("1 day")).aggregate(n=hr.agg.count()))
    pipeline.write("copy", orders)
    return pipeline


@pytest.mark.parametrize("name", ALL)
def test_every_fault_point_names_a_function_that_exists(name: str) -> None:
    assert callable(getattr(ALL[name].owner(), ALL[name].name))


def test_time_passes_as_the_test_says(tmp_path: Path) -> None:
    with PipelineTest(shop(), tmp_path) as test:
        test.feed("orders", [{"k": 1, "at": NOON}])
        test.settle()
        test.pass_time("59 minutes")
        assert test.cut() == 0, "its producer is not idle yet"
        test.restart()
        test.pass_time("2 minutes")
        assert test.cut() == 0, "it is, and there are twelve hours to go"
        test.pass_time("12 hours")
        test.settle()
        assert [row["n"] for row in test.view("days")] == [1]


def dies_and_goes_on(test: PipelineTest, points: tuple[str, ...]) -> None:
    for point in points:
        test.feed("orders", [{"k": 1, "at": NOON}])
        test.cut()
        with pytest.raises(Died, match=point):
            test.step(dies=point)
        test.restart()
    test.settle()
    assert test.view("totals") == [{"k": 1, "n": len(points)}]
    emitted = [(tick, [row["n"] for row in rows]) for tick, rows in test.changes("totals")]
    assert emitted == [(1, [1]), *((n, [n - 1, n]) for n in range(2, len(points) + 1))]
    assert len(test.rows("copy")) == len(points)


@pytest.mark.usefixtures("no_syncs")
def test_the_runner_dies_anywhere_and_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    with PipelineTest(shop(), tmp_path) as test:
        dies_and_goes_on(test, (*IN_TASKS, *ON_THE_DRIVER))


def test_a_fault_point_that_is_unknown_or_never_passed_is_reported(tmp_path: Path) -> None:
    with PipelineTest(shop(), tmp_path) as test:
        with pytest.raises(ValueError, match="between views and log"):
            test.step(dies="between views and logs")
        with pytest.raises(Undead, match="in the kernel"):
            test.step(dies="in the kernel")


def test_steps_that_need_spark_are_refused_without_it(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("shop")
    people = pipeline.table("people", schema="id BIGINT, age BIGINT", key="id")
    pipeline.view("grown", people.where("reverse(CAST(age AS STRING)) = '03'"))
    with PipelineTest(pipeline, tmp_path) as test:
        test.feed("people", [{"id": 1, "age": 30}])
        with pytest.raises(
            NotSupported, match=r"no Spark SQL in a test without Spark(.|\n)*hr\.spark"
        ):
            test.settle()


@pytest.mark.spark
def test_fault_points_on_spark_but_for_those_in_its_workers(
    tmp_path: Path, spark: SparkSession
) -> None:
    with PipelineTest(shop(), tmp_path, spark) as test:
        dies_and_goes_on(test, SOME_POINTS)
        with pytest.raises(ValueError, match="within a task"):
            test.step(dies="in the kernel")


# One step alone


def test_a_kernel_is_driven_tick_by_tick() -> None:
    totals = orders_of(hr.Pipeline("shop")).group_by("k").aggregate(n=hr.agg.count())
    test = KernelTest(totals)
    assert test.tick([{"k": 1, "at": NOON}, {"k": 1, "at": NOON}]) == [
        {"k": 1, "n": 2, "_change_type": "insert"}
    ]
    again = KernelTest(totals)
    again.state = test.state.copy()
    emitted = [
        {"k": 1, "n": 2, "_change_type": "update_preimage"},
        {"k": 1, "n": 3, "_change_type": "update_postimage"},
    ]
    assert again.tick([{"k": 1, "at": NOON}]) == test.tick([{"k": 1, "at": NOON}]) == emitted


def test_a_kernel_that_goes_by_time_waits_for_the_tests_clock() -> None:
    test = KernelTest(
        orders_of(hr.Pipeline("shop"))
        .window(hr.tumbling("1 minute"))
        .group_by("k")
        .aggregate(n=hr.agg.count())
    )
    assert test.tick([{"k": 1, "at": NOON}], watermark=NOON) == []
    assert test.waits_until_us == int(NOON.replace(minute=1).timestamp()) * 1_000_000
    (closed,) = test.tick([], watermark="2026-01-01T12:01:00Z")
    assert (closed["k"], closed["n"], closed["_change_type"]) == (1, 1, "insert")
    assert test.tick([{"k": 1, "at": NOON}]) == [], "it is too late"


def test_a_kernel_of_two_inputs_is_given_both() -> None:
    pipeline = hr.Pipeline("shop")
    people = pipeline.table("people", schema="k BIGINT, name STRING", key="k")
    test = KernelTest(orders_of(pipeline).join(people, on="k"))
    (row,) = test.tick([{"k": 1, "at": NOON}], [{"k": 1, "name": "Ada", "_change_type": "insert"}])
    assert (row["k"], row["name"]) == (1, "Ada")
    with pytest.raises(InputError, match="has 2 inputs, and 1 were given"):
        test.tick([])


def test_a_step_without_state_has_no_kernel() -> None:
    with pytest.raises(InputError, match=r"orders\.where keeps no state"):
        KernelTest(orders_of(hr.Pipeline("shop")).where("k > 0"))
