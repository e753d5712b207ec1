"""Nexmark's queries in SQL compile to the plans of the Python functions."""

import re
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

import headrace as hr
from benchmarks.nexmark.events import SCHEMAS, side_input
from benchmarks.nexmark.queries import DELAY, QUERIES
from benchmarks.nexmark.statements import STATEMENTS


def declared(name: str, directory: Path) -> hr.Pipeline:
    """The pipeline of a query in SQL, inputs included."""
    if QUERIES[name].is_by_arrival:
        times = "processing_time = 'processed_at'"
    else:
        times = f"event_time = 'dateTime', delay = '{DELAY}', idle = '1 day'"
    statements = [
        f"CREATE TOPIC {topic} ({schema}) WITH ({times}, partitions = 2)"
        for topic, schema in SCHEMAS.items()
    ]
    if name == "q13":
        parquet.write_table(side_input(), directory / "side_input.parquet")
        statements.append(
            "CREATE TABLE side_input (key BIGINT PRIMARY KEY, value STRING)"
            " WITH (file = 'side_input.parquet')"
        )
    pipeline = hr.Pipeline("nexmark")
    pipeline.directory = directory
    rows = pipeline.sql(";\n".join([*statements, STATEMENTS[name]]))
    pipeline.write("nexmark.answer", rows, partitions=2)
    return pipeline


def spaced(value: Any) -> Any:
    """A plan in plain values in which spaces of expressions and directories do not count."""
    if isinstance(value, dict):
        return {key: spaced(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [spaced(each) for each in value]
    if not isinstance(value, str):
        return value
    return re.sub(r"\S*/side_input", "side_input", " ".join(value.split()))


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_compiles_to_the_plan_of_its_function(name: str, tmp_path: Path) -> None:
    expected = QUERIES[name].pipeline().plan()
    compiled = declared(name, tmp_path).plan()
    assert spaced(compiled.describe()) == spaced(expected.describe())
    assert spaced(str(compiled)) == spaced(str(expected))
