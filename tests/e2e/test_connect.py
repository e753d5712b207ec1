"""A pipeline through Spark Connect: nothing in it needs the JVM at hand. In a process of its own,
since this one has a session of the other kind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import headrace as hr
from headrace.testing.pipelines import PipelineTest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
SECONDS = 900


def shop() -> hr.Pipeline:
    """Everything a job can be made of: rows in Spark SQL that fail and are diverted or counted,
    stages, tables, views and derived topics.
    """
    pipeline = hr.Pipeline("shop")
    orders = pipeline.topic("orders", schema="k STRING, a BIGINT, b BIGINT", partitions=2)
    ratios = orders.with_columns(ratio="a / b", errors="divert", name="ratio")
    table = ratios.group_by("k").aggregate(n=hr.agg.count(), s=hr.agg.sum("ratio"))
    pipeline.write("large", table.where("s > 2"))
    pipeline.view("ratios", table)
    pipeline.view(
        "nulls",
        orders.with_columns(ratio="a / b", name="lenient")
        .group_by("k")
        .aggregate(s=hr.agg.sum("ratio")),
    )
    people = pipeline.table("people", schema="id BIGINT, age INT", key="id")
    pipeline.view("adults", people.where("age >= 18"))
    return pipeline


def run(spark: SparkSession, root: Path) -> dict[str, Any]:
    with PipelineTest(shop(), root, spark) as test:
        test.feed(
            "orders",
            [{"k": k, "a": 6, "b": b} for k, b in [("x", 2), ("x", 0), ("y", 3), (None, 1)]],
        )
        test.feed("people", [{"id": 1, "age": 17}, {"id": 2, "age": 70}])
        test.settle()
        result = test.runner.last_result
        assert result is not None
        test.feed("orders", [{"k": "y", "a": 6, "b": 6}])
        test.feed("people", [{"id": 1, "age": 18}, {"id": 2, "age": 7}])
        test.settle()
        return {
            "ratios": {row["k"]: [row["n"], row["s"]] for row in test.view("ratios")},
            "nulls": {row["k"]: row["s"] for row in test.view("nulls")},
            "adults": [row["id"] for row in test.view("adults")],
            "large": sorted([*row[1:]] for row in test.rows("large")),
            "failed": [result.counts["ratio.diverted"], result.counts["lenient.errors"]],
            "without a key": sum(
                count
                for name, count in result.counts.items()
                if name.endswith(".aggregate.diverted")
            ),
        }


def main(root: str) -> None:
    spark = hr.spark("connect", remote="local[2]", config={"spark.sql.shuffle.partitions": 2})
    answer = run(spark, Path(root)) | {"session": type(spark).__module__}
    print(json.dumps(answer))
    spark.stop()


def test_a_pipeline_runs_through_spark_connect(tmp_path: Path) -> None:
    if find_spec("grpc") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("CI needs the packages of the extra `connect`.")
        pytest.skip("no Spark Connect: pip install 'headrace[connect]'")
    done = subprocess.run(
        [sys.executable, "-c", f"from tests.e2e.test_connect import main; main({str(tmp_path)!r})"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        cwd=Path(__file__).parents[2],
        env={
            name: value
            for name, value in os.environ.items()
            if not name.startswith("SPARK_") or name.endswith("_OPTS")
        },
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer.pop("session").startswith("pyspark.sql.connect.")
    assert answer == {
        "ratios": {"x": [1, 3.0], "y": [2, 3.0], "null": [1, 6.0]},
        "nulls": {"x": 3.0, "y": 3.0, "null": 6.0},
        "adults": [1],
        "large": [["x", 1, 3.0, "insert"], ["y", 2, 3.0, "insert"]],
        "failed": [1, 1],
        "without a key": 0,
    }
