"""A pipeline that was edited goes on with the state of every step that was not: steps find it by
name, whatever stands around them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import headrace as hr
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("no_syncs")
Rows = list[dict[str, Any]]
FED: list[Rows] = [
    [{"k": k % 5, "v": k} for k in range(first, first + 7)] for first in (0, 7, 14, 21)
]


def edited(test: PipelineTest, pipeline: hr.Pipeline, rows: Rows) -> None:
    """Restart with another pipeline of the same name, and feed it."""
    test.pipeline = pipeline
    test.restart()
    test.feed("orders", rows)
    test.settle()


def states(test: PipelineTest, step: str) -> dict[int, str]:
    """The ids of a step's state as the ledger has them."""
    return {
        group: name
        for query in test.runner.queries
        for group, name in query.entry.states.get(step, {}).items()
    }


def sums(fed: list[Rows]) -> dict[int, tuple[int, int]]:
    table: dict[int, tuple[int, int]] = {}
    for row in (row for rows in fed for row in rows):
        n, s = table.get(row["k"], (0, 0))
        table[row["k"]] = (n + 1, s + row["v"])
    return table


def shown(test: PipelineTest, view: str = "totals") -> dict[int, tuple[int, int]]:
    return {row["k"]: (row["n"], row["s"]) for row in test.view(view)}


def counts(test: PipelineTest) -> dict[int, int]:
    return {row["n"]: row["keys"] for row in test.view("sizes")}


def shop(*, totals_shown: bool, twice: bool = False) -> hr.Pipeline:
    """Whether the totals have consumers of their own decides how they go on to the next stage:
    packed, or through Spark.
    """
    pipeline = hr.Pipeline("shop")
    orders = pipeline.topic("orders", schema="k BIGINT, v BIGINT", partitions=2)
    totals = orders.group_by("k").aggregate(n=hr.agg.count(), s=hr.agg.sum("v"), name="totals")
    if totals_shown:
        pipeline.view("totals", totals)
    pipeline.view("sizes", totals.group_by("n").aggregate(keys=hr.agg.count(), name="sizes"))
    if twice:
        pipeline.view(
            "largest", totals.group_by("n").aggregate(largest=hr.agg.max("s"), name="largest")
        )
    return pipeline


def test_consumers_that_come_and_go_change_how_steps_are_fused_and_not_their_state(
    tmp_path: Path,
) -> None:
    spark: Any = PlainSpark()
    with PipelineTest(shop(totals_shown=False), tmp_path, spark) as test:
        test.feed("orders", FED[0])
        test.settle()
        before = {step: states(test, step) for step in ("totals", "sizes")}
        assert all(before.values())
        test.pipeline = shop(totals_shown=True)
        test.restart()
        assert {step: states(test, step) for step in before} == before
        edited(test, shop(totals_shown=True), FED[1])
        assert shown(test) == sums(FED[:2])
        assert counts(test) == Counter(n for n, _ in sums(FED[:2]).values())
        edited(test, shop(totals_shown=True, twice=True), FED[2])
        assert counts(test) == Counter(n for n, _ in sums(FED[:3]).values())
        assert shown(test) == sums(FED[:3])
        edited(test, shop(totals_shown=False, twice=True), FED[3])
        assert counts(test) == Counter(n for n, _ in sums(FED).values())
        largest = {row["n"]: row["largest"] for row in test.view("largest")}
        assert largest == {
            n: max(s for count, s in sums(FED).values() if count == n)
            for n, _ in sums(FED).values()
        }


def people(*, shown_too: bool) -> hr.Pipeline:
    """A table and an aggregate by its key: one stage for both, unless somebody else wants the
    table.
    """
    pipeline = hr.Pipeline("shop")
    table = pipeline.table("orders", schema="k BIGINT, v BIGINT", key="k")
    pipeline.view("by_key", table.group_by("k").aggregate(s=hr.agg.sum("v"), name="by_key"))
    if shown_too:
        pipeline.view("people", table)
    return pipeline


def test_steps_of_one_key_that_shared_a_stage_keep_their_state_apart(tmp_path: Path) -> None:
    spark: Any = PlainSpark()
    with PipelineTest(people(shown_too=False), tmp_path, spark) as test:
        test.feed("orders", [{"k": k, "v": k} for k in range(20)])
        test.settle()
        for number, shown_too in enumerate([True, False, True], 1):
            edited(
                test,
                people(shown_too=shown_too),
                [{"k": k, "v": k + 100 * number} for k in range(number, 20)],
            )
            newest = {k: k + 100 * min(k, number) for k in range(20)}
            assert {row["k"]: row["s"] for row in test.view("by_key")} == newest
            if shown_too:
                assert {row["k"]: row["v"] for row in test.view("people")} == newest


@pytest.mark.spark
def test_steps_added_and_columns_renamed_upstream_and_downstream_leave_the_others_their_state(
    tmp_path: Path, spark: SparkSession
) -> None:
    def best(number: int) -> hr.Pipeline:
        pipeline = hr.Pipeline("shop")
        orders = pipeline.topic("orders", schema="k BIGINT, v BIGINT", partitions=2)
        upstream = orders.with_columns(double="2 * v", name="doubled") if number >= 1 else orders
        totals = upstream.group_by("k").aggregate(
            n=hr.agg.count(), s=hr.agg.sum("v"), name="totals"
        )
        if number >= 2:
            pipeline.view(
                "renamed",
                totals.select("k", "n AS many", "s AS total")
                .where("many >= 0")
                .select("k", "many AS n", "total AS s"),
            )
        pipeline.view("totals", totals)
        return pipeline

    with PipelineTest(best(0), tmp_path, spark) as test:
        test.feed("orders", FED[0])
        test.settle()
        for number in (1, 2, 1):
            before = states(test, "totals")
            test.pipeline = best(number)
            test.restart()
            assert states(test, "totals") == before
            test.feed("orders", FED[number])
            test.settle()
            assert number < 2 or shown(test, "renamed") == shown(test)
        assert shown(test) == sums([FED[0], FED[1], FED[2], FED[1]])
