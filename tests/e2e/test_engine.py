"""The engine on Spark: the same rows whatever the batches, shards, restarts and failures; and no
more than once.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import headrace as hr
from headrace.engine.ledger import RunnerFenced
from headrace.log.dead_letters import read_dead_letters
from headrace.testing.fault_points import inject_faults
from headrace.testing.pipelines import PipelineTest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def totals() -> hr.Pipeline:
    pipeline = hr.Pipeline("shop")
    orders = pipeline.topic("orders", schema="k BIGINT, v BIGINT", key="k", partitions=2)
    table = orders.group_by("k").aggregate(n=hr.agg.count(), s=hr.agg.sum("v"))
    pipeline.write("totals", table, partitions=2)
    pipeline.view("by_key", table)
    return pipeline


def ticks_of_rows(ticks: int = 8, rows: int = 40) -> list[list[dict[str, int]]]:
    rng = random.Random(3)
    return [
        [{"k": rng.randrange(12), "v": rng.randrange(100)} for _ in range(rng.randrange(rows))]
        for _ in range(ticks)
    ]


def expected(fed: list[list[dict[str, int]]]) -> dict[int, dict[str, int]]:
    table: dict[int, dict[str, int]] = {}
    for row in (row for tick in fed for row in tick):
        known = table.setdefault(row["k"], {"k": row["k"], "n": 0, "s": 0})
        known["n"] += 1
        known["s"] += row["v"]
    return table


def feed_ticks(test: PipelineTest, fed: list[list[dict[str, int]]]) -> None:
    for rows in fed:
        if rows:
            test.feed("orders", rows)
        test.cut(forced=True)


def by_key(test: PipelineTest) -> dict[int, dict[str, Any]]:
    return {row["k"]: row for row in test.view("by_key")}


def test_rows_do_not_depend_on_batches_shards_or_restarts(
    tmp_path: Path, spark: SparkSession
) -> None:
    fed = ticks_of_rows()
    answers = []
    for number, (max_ticks, shards) in enumerate([(100, 2), (1, 2), (3, 1)]):
        with PipelineTest(totals(), tmp_path / str(number), spark, shards=shards) as test:
            feed_ticks(test, fed)
            test.step(max_ticks)
            test.restart(shards=3 if number == 2 else shards, lose_local_store=number == 1)
            while test.step(max_ticks):
                continue
            assert test.folded("totals", "k") == expected(fed) == by_key(test)
            answers.append(sorted(test.rows("totals"), key=lambda row: row[0]))
    assert answers[0] == answers[1] == answers[2]


def test_a_batch_that_fails_anywhere_is_done_again_once(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = ticks_of_rows(4)
    broken: Counter[str] = Counter()

    def strike(point: str) -> None:
        if not broken[point]:
            broken[point] += 1
            raise OSError("died here")

    inject_faults(["before the commit", "between views and log"], strike, monkeypatch.setattr)
    with PipelineTest(totals(), tmp_path, spark) as test:
        for rows in fed:
            test.feed("orders", rows)
            test.cut(forced=True)
            for _ in range(3):
                try:
                    if not test.step(1):
                        break
                except OSError:
                    continue
        assert broken == {"before the commit": 1, "between views and log": 1}
        assert test.folded("totals", "k") == expected(fed) == by_key(test)


def test_the_older_of_two_runners_is_fenced(tmp_path: Path, spark: SparkSession) -> None:
    with PipelineTest(totals(), tmp_path, spark) as test:
        test.feed("orders", [{"k": 1, "v": 1}])
        test.cut()
        older = test.runner
        test.restart()
        with pytest.raises(RunnerFenced, match="newer one goes on"):
            older.cut(forced=True)
        test.settle()
        assert by_key(test) == {1: {"k": 1, "n": 1, "s": 1}}


def test_state_and_jobs_leave_nothing_behind(tmp_path: Path, spark: SparkSession) -> None:
    with PipelineTest(totals(), tmp_path, spark) as test:
        feed_ticks(test, ticks_of_rows(2))
        test.settle()
        assert not list((tmp_path / "state" / "jobs").glob("*"))
        assert not list((tmp_path / "log" / "staging").glob("*"))


def test_two_views_of_one_pipeline_never_contradict_each_other(
    tmp_path: Path, spark: SparkSession
) -> None:
    """Money moves between accounts; the total over the balances is the same at every tick."""
    pipeline = hr.Pipeline("bank")
    moves = pipeline.topic(
        "moves", schema="account BIGINT, amount BIGINT", key="account", partitions=2
    )
    balances = moves.group_by("account").aggregate(balance=hr.agg.sum("amount"))
    pipeline.view("balances", balances)
    pipeline.view(
        "by_sign",
        moves.where("amount <> 0")
        .select("amount > 0 AS gain", "amount")
        .group_by("gain")
        .aggregate(total=hr.agg.sum("amount")),
    )
    rng = random.Random(5)
    with PipelineTest(pipeline, tmp_path, spark) as test:
        for _ in range(3):
            for _ in range(10):
                amount = rng.randrange(1, 100)
                test.feed(
                    "moves",
                    [
                        {"account": rng.randrange(9), "amount": amount},
                        {"account": rng.randrange(9), "amount": -amount},
                    ],
                )
            test.settle()
            assert sum(row["balance"] for row in test.view("balances")) == 0
            gains = {row["gain"]: row["total"] for row in test.view("by_sign")}
            assert gains[True] == -gains[False] > 0


def test_row_local_steps_run_before_and_behind_stages(tmp_path: Path, spark: SparkSession) -> None:
    pipeline = hr.Pipeline("steps")
    orders = pipeline.topic("orders", schema="k STRING, v DOUBLE", key="k")
    by_half = (
        orders.where("v > 0")
        .with_columns(half="v / 2")
        .group_by("k")
        .aggregate(s=hr.agg.sum("half"))
    )
    pipeline.view("large", by_half.where("s >= 10"))
    with PipelineTest(pipeline, tmp_path, spark) as test:
        test.feed("orders", [{"k": "a", "v": 10.0}, {"k": "b", "v": 50.0}, {"k": "a", "v": -100.0}])
        test.settle()
        assert test.view("large") == [{"k": "b", "s": 25.0}]
        test.feed("orders", [{"k": "a", "v": 20.0}])
        test.settle()
        assert sorted(row["k"] for row in test.view("large")) == ["a", "b"]


def test_a_lost_local_store_is_rebuilt_from_files(tmp_path: Path, spark: SparkSession) -> None:
    fed = ticks_of_rows(3)
    with PipelineTest(totals(), tmp_path, spark) as test:
        feed_ticks(test, fed[:2])
        test.settle()
        shutil.rmtree(tmp_path / "state" / "local")
        feed_ticks(test, fed[2:])
        test.settle()
        assert test.runner.last_result is not None
        assert set(test.runner.last_result.how) == {"rebuilt"}
        assert by_key(test) == expected(fed)


def test_rows_that_cannot_be_used_are_diverted_and_counted(
    tmp_path: Path, spark: SparkSession
) -> None:
    """Rows in = rows used + diverted, exactly."""
    pipeline = hr.Pipeline("care")
    orders = pipeline.topic("orders", schema="k STRING, a BIGINT, b BIGINT")
    ratios = (
        orders.with_columns(ratio="a / b", errors="divert", name="ratio")
        .group_by("k")
        .aggregate(n=hr.agg.count(), s=hr.agg.sum("ratio"))
    )
    pipeline.view("ratios", ratios)
    pipeline.view(
        "nulls",
        orders.with_columns(ratio="a / b", name="lenient")
        .group_by("k")
        .aggregate(n=hr.agg.count(), s=hr.agg.sum("ratio")),
    )
    rows = [
        {"k": k, "a": 6, "b": b}
        for k, b in [("x", 2), ("x", 0), ("y", 3), (None, 1), ("y", None), (None, 0)]
    ]
    with PipelineTest(pipeline, tmp_path, spark) as test:
        test.feed("orders", rows)
        test.settle()
        assert {row["k"]: (row["n"], row["s"]) for row in test.view("ratios")} == {
            "x": (1, 3.0),
            "y": (2, 2.0),
            None: (1, 6.0),
        }
        assert {row["k"]: (row["n"], row["s"]) for row in test.view("nulls")} == {
            "x": (2, 3.0),
            "y": (2, 2.0),
            None: (2, 6.0),
        }
        assert test.runner.last_result is not None
        counts = test.runner.last_result.counts
        assert (counts["ratio.diverted"], counts["lenient.errors"]) == (2, 2)
        assert counts["ratios.aggregate.rows_in"] + counts["ratio.diverted"] == len(rows)
        dead_letters = read_dead_letters(test.log, "ratio")
        assert sorted(dead_letter["source_offset"] for dead_letter in dead_letters) == [1, 5]
        assert all("failed" in dead_letter["reason"] for dead_letter in dead_letters)


def test_an_edited_view_is_rebuilt_whether_or_not_the_state_of_its_steps_fits(
    tmp_path: Path, spark: SparkSession
) -> None:
    def shop(aggregate: str, condition: str) -> hr.Pipeline:
        pipeline = hr.Pipeline("shop")
        orders = pipeline.topic("orders", schema="k BIGINT, v BIGINT", key="k")
        pipeline.view(
            "best",
            orders.where(condition).group_by("k").aggregate(s=getattr(hr.agg, aggregate)("v")),
        )
        return pipeline

    with PipelineTest(shop("sum", "v > 0"), tmp_path, spark) as test:
        test.feed("orders", [{"k": 1, "v": 5}])
        test.settle()
        test.pipeline = shop("sum", "v > 1")
        test.restart()
        test.feed("orders", [{"k": 1, "v": 1}, {"k": 1, "v": 2}])
        test.settle()
        assert test.view("best") == [{"k": 1, "s": 7}]
        test.pipeline = shop("max", "v > 1")
        test.restart()
        test.settle()
        assert test.view("best") == [{"k": 1, "s": 5}]


def test_tables_are_correct_under_updates_and_deletes(tmp_path: Path, spark: SparkSession) -> None:
    """An upsert says what is; what was is remembered, so that filters and aggregates can take it
    back.
    """
    pipeline = hr.Pipeline("people")
    people = pipeline.table(
        "people", schema="id BIGINT, city STRING, age INT", key="id", partitions=2
    )
    pipeline.view("adults", people.where("age >= 18"))
    pipeline.view(
        "cities", people.group_by("city").aggregate(n=hr.agg.count(), oldest=hr.agg.max("age"))
    )
    newest = pipeline.topic("clicks", schema="id BIGINT, page STRING").to_table("id")
    pipeline.view("last_page", newest)
    with PipelineTest(pipeline, tmp_path, spark) as test:
        test.feed(
            "people",
            [
                {"id": 1, "city": "Oslo", "age": 40},
                {"id": 2, "city": "Oslo", "age": 17},
                {"id": 3, "city": "Rome", "age": 70},
            ],
        )
        test.feed(
            "clicks", [{"id": 1, "page": "a"}, {"id": 1, "page": "b"}, {"id": 2, "page": "a"}]
        )
        test.settle()
        assert sorted(row["id"] for row in test.view("adults")) == [1, 3]
        test.feed(
            "people", [{"id": 1, "city": "Rome", "age": 40}, {"id": 2, "city": "Oslo", "age": 18}]
        )
        with test.log.producer("people") as producer:
            producer.delete([3])
        test.feed("clicks", [{"id": 2, "page": "c"}])
        test.settle()
        assert sorted(row["id"] for row in test.view("adults")) == [1, 2]
        assert {row["city"]: (row["n"], row["oldest"]) for row in test.view("cities")} == {
            "Oslo": (1, 18),
            "Rome": (1, 40),
        }
        assert {row["id"]: row["page"] for row in test.view("last_page")} == {1: "b", 2: "c"}
        test.feed("people", [{"id": 1, "city": "Rome", "age": 10}])
        test.settle()
        assert [row["id"] for row in test.view("adults")] == [2]


def test_rows_that_an_aggregate_has_no_room_for_become_dead_letters(
    tmp_path: Path, spark: SparkSession
) -> None:
    pipeline = hr.Pipeline("bounded")
    orders = pipeline.topic("orders", schema="k STRING, v BIGINT")
    pipeline.view(
        "seen",
        orders.group_by("k").aggregate(n=hr.agg.count(), all=hr.agg.collect("v", max_values=2)),
    )
    with PipelineTest(pipeline, tmp_path, spark) as test:
        test.feed("orders", [{"k": "a", "v": v} for v in (1, 2, 3)])
        test.settle()
        assert test.view("seen") == [{"k": "a", "n": 3, "all": [1, 2]}]
        (dead_letter,) = read_dead_letters(test.log, "seen.aggregate")
        assert '"v":3' in dead_letter["row"]
        assert dead_letter["reason"].startswith("all: ")
