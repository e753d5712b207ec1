"""Outer joins keep what SQL says of rows without a partner: columns of the missing side are null,
and WHERE is checked behind all joins.
"""

from pathlib import Path
from typing import Any

import duckdb
import pytest

import headrace as hr
from headrace.testing.pipelines import PipelineTest

INPUTS = """
    CREATE TABLE t (id BIGINT PRIMARY KEY, k INT, v DOUBLE);
    CREATE TABLE u (key INT PRIMARY KEY, w DOUBLE);
    CREATE TABLE s (k BIGINT PRIMARY KEY, w DOUBLE)
"""
ROWS: dict[str, list[tuple[Any, ...]]] = {
    "t": [(1, 1, 1.0), (2, 2, None), (3, None, 3.0), (4, 9, 4.0)],
    "u": [(1, 1.5), (2, 2.5), (5, None)],
    "s": [(1, 1.5), (2, 2.5), (5, None)],
}
QUERIES = [
    "SELECT id, t.k AS tk, u.key AS uk, w FROM t LEFT JOIN u ON t.k = u.key",
    "SELECT w, count(k) AS n, count(*) AS rows FROM t RIGHT JOIN u ON t.k = u.key GROUP BY w",
    "SELECT w, max(t.k) AS k FROM t FULL JOIN u ON t.k = u.key GROUP BY w",
    "SELECT id, t.k AS tk, s.k AS sk FROM t LEFT JOIN s ON t.k = s.k WHERE s.k IS NULL",
    "SELECT count(*) AS n, s.w FROM t FULL JOIN s ON t.k = s.k WHERE t.k IS NULL GROUP BY s.w",
    (
        "SELECT s.w, count(*) AS n FROM t JOIN u ON t.k = u.key RIGHT JOIN s ON u.key = s.k"
        " WHERE s.k > 1 GROUP BY s.w"
    ),
    "SELECT id, v FROM t LEFT SEMI JOIN u ON t.k = u.key AND w > 2",
    "SELECT id, v FROM t LEFT ANTI JOIN u ON t.k = u.key",
    (
        "SELECT id, r.w FROM t LEFT JOIN (SELECT *, ROW_NUMBER() OVER (ORDER BY w DESC) AS n FROM"
        " u) AS r ON t.k = r.key"
    ),
]


@pytest.mark.parametrize("query", QUERIES[:-1])
def test_an_outer_join_has_the_rows_of_duckdb(query: str, tmp_path: Path) -> None:
    pipeline = hr.Pipeline("joins")
    pipeline.sql(f"{INPUTS}; CREATE VIEW found AS {query}")
    with duckdb.connect() as database, PipelineTest(pipeline, tmp_path) as test:
        database.execute(INPUTS)
        for table, rows in ROWS.items():
            names = pipeline.declared_rows()[table].schema.names
            test.feed(table, [dict(zip(names, row, strict=True)) for row in rows])
            for row in rows:
                database.execute(
                    f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})",
                    row,
                )
        test.settle()
        text = query.replace("LEFT SEMI", "SEMI").replace("LEFT ANTI", "ANTI")
        expected = database.execute(text).to_arrow_table().to_pylist()
        found = test.view("found")
    assert sorted(map(repr, (sorted(row.items()) for row in found))) == sorted(
        map(repr, (sorted(row.items()) for row in expected))
    )


def test_a_row_number_is_not_kept_of_the_side_that_may_be_missing() -> None:
    pipeline = hr.Pipeline("joins")
    pipeline.sql(INPUTS)
    with pytest.raises(hr.errors.StreamOnly, match="OVER is for streams"):
        pipeline.sql(f"{QUERIES[-1]} WHERE r.n <= 1")
