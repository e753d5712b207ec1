"""Dead letters: each is emitted once, in bounded time and space, and what is left
is a table as any other.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import headrace as hr
from headrace.engine.shard import ShardFunction
from headrace.log.dead_letters import read_dead_letters
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("no_syncs")
QUOTIENT = "try_divide(100, `v`)"


def _works(batch: pa.RecordBatch) -> pa.Array:
    return pc.or_kleene(pc.is_null(batch.column("v")), pc.not_equal(batch.column("v"), 0))


def spark_with_quotients() -> Any:
    """`100 / v` fails where v is 0."""
    return PlainSpark(
        sql={
            f"NOT coalesce(((`v` IS NOT NULL AND {QUOTIENT} IS NULL)), false)": _works,
            QUOTIENT: lambda batch: pc.divide(100.0, batch.column("v").cast(pa.float64())),
            "(`x` > 10)": lambda batch: pc.greater(batch.column("x"), 10),
        }
    )


def quotients(*, where: bool) -> hr.Pipeline:
    pipeline = hr.Pipeline("shop")
    table = pipeline.table("items", schema="id BIGINT, v BIGINT", key="id").with_columns(
        x="100 / v", errors="divert", name="quotient"
    )
    if where:
        table = table.union(
            pipeline.table("others", schema="id BIGINT, v BIGINT, x DOUBLE", key="id"), name="both"
        ).where("x > 10", name="large")
    pipeline.view("view", table)
    pipeline.write("topic", table)
    return pipeline


@pytest.mark.parametrize("where", [False, True])
def test_a_row_of_a_table_that_can_no_longer_be_computed_goes_and_comes_again(
    where: bool, tmp_path: Path
) -> None:
    check_quotients(tmp_path, spark_with_quotients(), where=where)


@pytest.mark.spark
def test_dead_letters_through_spark(tmp_path: Path, spark: SparkSession) -> None:
    check_quotients(tmp_path, spark, where=True)


def check_quotients(root: Path, spark: SparkSession, *, where: bool) -> None:
    with PipelineTest(quotients(where=where), root, spark) as test:
        seen = []
        for value in (5, 0, 0, 4, 2):
            test.feed("items", [{"id": 1, "v": value}])
            test.settle()
            seen.append([row["x"] for row in test.view("view")])
            assert list(test.folded("topic", "id").values()) == test.view("view")
        assert seen == [[20.0], [], [], [25.0], [50.0]]
        assert [dead_letter["row"] for dead_letter in read_dead_letters(test.log, "quotient")] == [
            '{"id":1,"v":0,"_change_type":"update_postimage"}'
        ], "it is emitted once"
        assert test.runner.leading.entry.counts["quotient.diverted"] == 1


def test_a_stage_before_a_step_that_diverts_runs_once_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: Counter[tuple[str, int]] = Counter()
    real = ShardFunction._run

    def counted(self: ShardFunction, shard: int, inputs: dict[int, pa.Table]) -> Any:
        runs[self.stage.name, shard] += 1
        return real(self, shard, inputs)

    monkeypatch.setattr(ShardFunction, "_run", counted)
    pipeline = hr.Pipeline("shop")
    items = pipeline.topic("items", schema="k BIGINT, w BIGINT", partitions=1)
    sums = items.group_by("k").aggregate(v=hr.agg.sum("w"), name="sums")
    pipeline.view("view", sums.with_columns(x="100 / v", errors="divert", name="quotient"))
    with PipelineTest(pipeline, tmp_path, spark_with_quotients()) as test:
        # The first batch with a row that fails is computed again; Spark computes the next ones.
        for first in (0, 30):
            runs.clear()
            test.feed("items", [{"k": first + key, "w": key % 3} for key in range(30)])
            test.settle()
        assert runs == {("sums", 0): 1, ("sums", 1): 1}
        assert len(test.view("view")) == 40
        assert len(read_dead_letters(test.log, "quotient")) == 20


def test_a_row_without_a_key_is_dead_lettered_on_insert_and_not_on_delete(tmp_path: Path) -> None:
    """A table's topic has a primary key, which is never null."""
    spark: Any = PlainSpark()
    pipeline = hr.Pipeline("shop")
    items = pipeline.table("items", schema="id BIGINT, g STRING", key="id")
    pipeline.write("counts", items.group_by("g").aggregate(n=hr.agg.count(), name="counted"))
    with PipelineTest(pipeline, tmp_path, spark) as test:
        for group in (None, "a", None):
            test.feed("items", [{"id": 2, "g": group}])
            test.settle()
        found = read_dead_letters(test.log, "counts.topic")
        assert [dead_letter["tick"] for dead_letter in found] == [1, 3]
        test.feed("items", [{"id": 2, "g": None, "_change_type": "delete"}])
        test.settle()
        assert len(read_dead_letters(test.log, "counts.topic")) == 2
        assert test.runner.leading.entry.counts["counts.topic.diverted"] == 2


def test_dead_letters_are_written_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("headrace.columnar.buffers", "headrace.engine.shuffle"):
        monkeypatch.setattr(f"{module}.MAX_BATCH_BYTES", 10_000)
    spark: Any = PlainSpark()
    pipeline = hr.Pipeline("shop")
    items = pipeline.topic("items", schema="k BIGINT, v BIGINT, text STRING", partitions=1)
    pipeline.view("newest", items.to_table("k", name="keyed"))
    with PipelineTest(pipeline, tmp_path, spark) as test:
        keys = pa.array([None if number % 2 else 1 for number in range(2_000)], pa.int64())
        test.feed(
            "items",
            pa.table(
                {"k": keys, "v": pa.array(range(2_000)), "text": pa.array(["x" * 100] * 2_000)}
            ),
        )
        test.settle()
        assert [(row["k"], row["v"]) for row in test.view("newest")] == [(1, 1_998)]
        found = read_dead_letters(test.log, "keyed")
        assert [dead_letter["source_offset"] for dead_letter in found] == list(range(1, 2_000, 2))
        assert {dead_letter["reason"] for dead_letter in found} == {"its key is null"}
        assert f'"v":{found[7]["source_offset"]},' in found[7]["row"]
