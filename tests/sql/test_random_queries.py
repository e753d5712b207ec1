"""Random queries over random changes: at every tick a view has the rows that DuckDB answers over
the rows so far.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pytest

import headrace as hr
from headrace.testing.pipelines import PipelineTest
from tests.sql.query_generator import DUCKDB, STATEMENTS, Generator, duckdb_text

QUERIES_IN_A_PIPELINE = 10
TICKS = 3
WIDTHS = ("one", "mixed")
KEYS = {"t": "id", "u": "k"}


def comparable(value: Any) -> Any:
    """A value as both have it: numbers to 9 digits, times without zone."""
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, datetime):
        return value.replace(tzinfo=None)
    if isinstance(value, float | int | Decimal):
        return float(f"{float(value):.9g}")
    return value


def counted(rows: list[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    return Counter(
        tuple(sorted((name.lower(), repr(comparable(value))) for name, value in row.items()))
        for row in rows
    )


def check(seed: int, root: Path) -> None:
    """Run some queries of a seed in one pipeline, and compare them at every tick."""
    generator = Generator(Random(seed))
    queries = {f"v{number}": generator.query() for number in range(QUERIES_IN_A_PIPELINE)}
    views = ";\n".join(f"CREATE VIEW {name} AS {query}" for name, query in queries.items())
    pipeline = hr.Pipeline("random")
    pipeline.sql(f"{STATEMENTS};\n{views}")
    with (
        duckdb.connect() as database,
        PipelineTest(pipeline, root, shards=1 + seed % 2, width=WIDTHS[seed % 2]) as test,
    ):
        database.execute(DUCKDB)
        for tick in range(TICKS):
            rows, statements = generator.changes()
            for topic, given in rows.items():
                if topic == "e" and given:
                    with test.log.producer("e") as producer:
                        producer.append(
                            [{**row, "happened": time_of(row["happened"])} for row in given]
                        )
                for row in given if topic != "e" else []:
                    change(test, topic, row)
            for statement, values in statements:
                database.execute(statement, values)
            test.settle()
            for name, query in queries.items():
                expected = database.execute(duckdb_text(query)).to_arrow_table().to_pylist()
                found = test.view(name)
                assert counted(found) == counted(expected), f"seed {seed}, tick {tick}: {query}"


def time_of(text: str) -> datetime:
    return datetime.fromisoformat(text)


def change(test: PipelineTest, topic: str, row: dict[str, Any]) -> None:
    """Append one change of a table."""
    plain = {name: value for name, value in row.items() if name != "_change_type"}
    with test.log.producer(topic) as producer:
        if row["_change_type"] == "delete":
            producer.delete([{KEYS[topic]: row[KEYS[topic]]}])
        else:
            producer.upsert([plain])


@pytest.mark.parametrize("seed", range(10))
def test_views_have_the_rows_of_duckdb_at_every_tick(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 210))
def test_two_thousand_queries_have_the_rows_of_duckdb(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)
