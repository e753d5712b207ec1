"""Nexmark's queries in SQL compile to the plans of the Python functions."""

from typing import Any

import pytest

import headrace as hr
from benchmarks.nexmark.events import SCHEMAS, longest_auction_ms
from benchmarks.nexmark.queries import DELAY, QUERIES
from benchmarks.nexmark.statements import STATEMENTS

RATE = 10_000


def declared(name: str) -> hr.Pipeline:
    """The pipeline of a query in SQL, inputs included."""
    longest = f"{longest_auction_ms(RATE)} milliseconds"
    if QUERIES[name].is_by_arrival:
        times = "processing_time = 'processed_at'"
    else:
        times = f"event_time = 'dateTime', delay = '{DELAY}', idle = '1 day'"
    statements = [
        f"CREATE TOPIC {topic} ({schema}) WITH ({times}, partitions = 2)"
        for topic, schema in SCHEMAS.items()
    ]
    if name == "q13":
        statements.append("CREATE TABLE side_input (key BIGINT PRIMARY KEY, value STRING)")
    query = STATEMENTS[name].replace("{longest_auction}", longest)
    pipeline = hr.Pipeline("nexmark")
    rows = pipeline.sql(";\n".join([*statements, query]))
    pipeline.write("nexmark.answer", rows, partitions=2)
    return pipeline


def spaced(value: Any) -> Any:
    """A plan in plain values in which spaces and line ends of expressions do not count."""
    if isinstance(value, dict):
        return {key: spaced(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [spaced(each) for each in value]
    return " ".join(value.split()) if isinstance(value, str) else value


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_compiles_to_the_plan_of_its_function(name: str) -> None:
    expected = QUERIES[name].pipeline(RATE).plan()
    compiled = declared(name).plan()
    assert spaced(compiled.describe()) == spaced(expected.describe())
    assert spaced(str(compiled)) == spaced(str(expected))
