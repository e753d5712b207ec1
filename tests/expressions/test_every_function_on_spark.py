"""Every function of the catalogue against Spark: the type that was declared is Spark's, and a call
gives what Spark gives, or fails where Spark fails.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import headrace as hr
from headrace.expressions.functions import SPECIAL_NAMES
from headrace.expressions.signatures import signatures
from headrace.testing.pipelines import PipelineTest
from headrace.types.schema import to_ddl, to_spark_ddl
from tests.expressions.edge_case_rows import SCHEMA, comparable, edge_case_rows
from tests.expressions.function_calls import WITHOUT_A_COLUMN, called, calls
from tests.expressions.spark_oracle import parsed, wrong_types, wrong_values

pytestmark = pytest.mark.spark
ROWS = edge_case_rows()
AT_ONCE = 40
QUICK = 2
SYNTAX = frozenset({"case", "cast", "try_cast"})
"""What has a syntax of its own, and is compared with Spark in `test_expressions_on_spark`."""


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> Iterator[DataFrame]:
    """Kept in memory, so that Spark computes on rows and folds nothing away."""
    frame = spark.createDataFrame(ROWS, schema=f"{to_spark_ddl(SCHEMA)}, id BIGINT").persist()
    assert frame.count() == ROWS.num_rows
    yield frame
    frame.unpersist()


def batches() -> list[Any]:
    """All calls, well mixed; some batches in every run, the others in the full one."""
    mixed = random.Random(3).sample(calls(), len(calls()))
    found = [mixed[start : start + AT_ONCE] for start in range(0, len(mixed), AT_ONCE)]
    return [
        pytest.param(batch, id=f"batch {index}", marks=[pytest.mark.slow] if index >= QUICK else [])
        for index, batch in enumerate(found)
    ]


def test_every_function_is_called() -> None:
    allowed = {name for name in signatures() if any(f"{name}(" in text for text in calls())}
    missing = {*allowed, *SPECIAL_NAMES} - called() - SYNTAX - WITHOUT_A_COLUMN
    assert missing == set()


def test_spark_gives_every_call_the_type_that_was_declared(rows: DataFrame) -> None:
    assert wrong_types(rows, [parsed(text) for text in calls()]) == []


@pytest.mark.parametrize("texts", batches())
def test_every_call_gives_what_spark_gives(rows: DataFrame, texts: list[str]) -> None:
    assert wrong_values(rows, [parsed(text) for text in texts]) == []


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param(calls()[::25], id="some"),
        *(
            pytest.param(calls()[part::8], id=f"all, part {part}", marks=pytest.mark.slow)
            for part in range(8)
        ),
    ],
)
def test_a_step_of_a_pipeline_gives_what_spark_gives(
    spark: SparkSession, rows: DataFrame, tmp_path: Path, texts: list[str]
) -> None:
    """Where a call fails on a row, the step has null, and the run goes on."""
    named = {f"r{index}": text for index, text in enumerate(texts)}
    pipeline = hr.Pipeline("every_function")
    topic = pipeline.topic("edges", schema=f"{to_ddl(SCHEMA)}, id BIGINT", key="id")
    pipeline.write("results", topic.select("id", **named))
    with PipelineTest(pipeline, tmp_path, spark) as test:
        test.feed("edges", ROWS)
        test.settle()
        found = test.log.read("results").to_table().sort_by("id")
    failing = {name: parsed(text).failed or "false" for name, text in named.items()}
    wanted = (
        rows.orderBy("id")
        .selectExpr(
            "id",
            *(
                f"CASE WHEN NOT ({failing[name]}) THEN {text} END AS {name}"
                for name, text in named.items()
            ),
            *(f"{failing[name]} AS failed_{name}" for name in named),
        )
        .toArrow()
    )
    for name, text in named.items():
        failed = wanted.column(f"failed_{name}").to_pylist()
        pairs = zip(
            failed, comparable(found.column(name)), comparable(wanted.column(name)), strict=True
        )
        wrong = [
            (row, mine, sparks)
            for row, (is_failure, mine, sparks) in enumerate(pairs)
            if not is_failure and mine != sparks
        ]
        assert wrong == [], text
