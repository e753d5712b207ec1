"""Aggregates with `where=` count the rows for which a condition is true, as SQL's FILTER does: over
streams, changing tables and windows, against DuckDB.
"""

from __future__ import annotations

import warnings
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pyarrow as pa
import pytest

import headrace as hr
from headrace.errors import BadExpression, UnfitColumn, UnknownColumn
from headrace.testing.pipelines import PipelineTest

pytestmark = pytest.mark.usefixtures("no_syncs")
START = datetime(2026, 1, 1, tzinfo=UTC)
SCHEMA = "id BIGINT, team STRING, points BIGINT, kind STRING, happened TIMESTAMP"
WHERE = "kind = 'a' OR points > 6"

EXACT = {
    "n": (hr.agg.count(where=WHERE), "count(*)"),
    "known": (hr.agg.count("points", where=WHERE), "count(points)"),
    "large": (hr.agg.count_if("points > 3", where=WHERE), "count(CASE WHEN points > 3 THEN 1 END)"),
    "total": (hr.agg.sum("points * 2", where=WHERE), "sum(points * 2)"),
    "mean": (hr.agg.avg("points", where=WHERE), "avg(points)"),
    "low": (hr.agg.min("points", where=WHERE), "min(points)"),
    "high": (hr.agg.max("points", where=WHERE), "max(points)"),
    "middle": (hr.agg.median("points", where=WHERE), "median(points)"),
    "spread": (hr.agg.variance("points", where=WHERE), "var_samp(points)"),
    "kinds": (hr.agg.count_distinct("points", "kind", where=WHERE), "count(DISTINCT pair)"),
    "values": (hr.agg.collect_set("points", where=WHERE), "list(DISTINCT points)"),
    "opened": (hr.agg.first("points", where=WHERE), "first(points ORDER BY happened, arrived)"),
    "latest": (hr.agg.last("points", where=WHERE), "last(points ORDER BY happened, arrived)"),
    "best": (hr.agg.max_by("kind", by="id", where=WHERE), "last(kind ORDER BY id, arrived)"),
}
"""An aggregate over all rows that meet the condition, and the same in DuckDB's SQL."""
BY_ARRIVAL = {
    "began": (hr.agg.first("points", by="_arrival", where=WHERE), "first(points ORDER BY arrived)"),
    "newest": (hr.agg.last("points", by="_arrival", where=WHERE), "last(points ORDER BY arrived)"),
    "said": (
        hr.agg.last("points", by="_arrival", ignore_nulls=True, where=WHERE),
        "last(points ORDER BY arrived) FILTER (points IS NOT NULL AND {where})",
    ),
}


def scores(pipeline: hr.Pipeline) -> hr.Stream:
    time = hr.EventTime("happened", delay="1 day")
    return pipeline.topic("scores", schema=SCHEMA, event_time=time)


def league() -> hr.Pipeline:
    pipeline = hr.Pipeline("league")
    rows = scores(pipeline)
    exact: dict[str, Any] = {name: spec for name, (spec, _) in EXACT.items()}
    arrival: dict[str, Any] = {name: spec for name, (spec, _) in BY_ARRIVAL.items()}
    pipeline.view("stream", rows.group_by("team").aggregate(**exact, **arrival))
    pipeline.view("table", rows.to_table("id").group_by("team").aggregate(**exact))
    windows = rows.window(hr.tumbling("10 seconds"), emit="changes").group_by("team")
    pipeline.view("windows", windows.aggregate(**exact))
    return pipeline


def random_rows(random: Random, count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": random.randrange(12),
            "team": random.choice(["red", "blue", "green"]),
            "points": random.choice([None, *range(10)]),
            "kind": random.choice(["a", "b", None]),
            "happened": START + timedelta(seconds=random.randrange(30)),
        }
        for _ in range(count)
    ]


def expected(rows: list[dict[str, Any]], view: str) -> list[tuple[Any, ...]]:
    aggregates = {**EXACT, **(BY_ARRIVAL if view == "stream" else {})}
    columns = ", ".join(
        sql.format(where=WHERE) if "FILTER" in sql else f"{sql} FILTER ({WHERE})"
        for _, sql in aggregates.values()
    )
    newest = """(SELECT * FROM numbered QUALIFY
        row_number() OVER (PARTITION BY id ORDER BY happened DESC, arrived DESC) = 1)"""
    window = ", epoch_us(happened) // 10000000 AS opens" if view == "windows" else ""
    arrow = pa.Table.from_pylist(rows)
    with duckdb.connect() as connection:
        connection.register("scores", arrow)
        connection.execute(
            """CREATE TABLE numbered AS SELECT *, row_number() OVER () AS arrived, CASE WHEN
            points IS NOT NULL AND kind IS NOT NULL THEN {"p": points, "k": kind} END AS pair
            FROM scores"""
        )
        source = newest if view == "table" else "numbered"
        return connection.execute(
            f"SELECT team, {columns}{window} FROM {source} GROUP BY team"
            + (", opens" if window else "")
        ).fetchall()


def comparable(row: tuple[Any, ...]) -> tuple[str, ...]:
    values = []
    for value in row:
        if isinstance(value, datetime):
            values.append(str(int(value.timestamp()) // 10))
        elif isinstance(value, float):
            values.append(f"{value:.9f}")
        elif isinstance(value, list) or value is None:
            values.append(str(sorted(each for each in value or [] if each is not None)))
        else:
            values.append(str(value))
    return tuple(values)


@pytest.mark.parametrize("seed", range(3))
def test_conditions_of_aggregates_are_those_of_sql(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    fed: list[dict[str, Any]] = []
    with PipelineTest(league(), tmp_path) as test:
        for number in range(5):
            rows = random_rows(random, random.randrange(1, 15))
            test.feed("scores", rows)
            fed += rows
            test.settle()
            if number == 2:
                test.restart(shards=3)
            for view in ("stream", "table", "windows"):
                aggregates = {**EXACT, **(BY_ARRIVAL if view == "stream" else {})}
                names = ["team", *aggregates, *(["window_start"] if view == "windows" else [])]
                ours = [tuple(row[name] for name in names) for row in test.view(view)]
                theirs = expected(fed, view)
                assert sorted(map(comparable, ours)) == sorted(map(comparable, theirs)), view


def test_a_condition_is_checked_where_it_was_written() -> None:
    rows = scores(hr.Pipeline("league")).group_by("team")
    with pytest.raises(UnknownColumn, match="where= of 'n'.*'pionts'"):
        rows.aggregate(n=hr.agg.count(where="pionts > 3"))
    with pytest.raises(UnfitColumn, match="not BOOLEAN"):
        rows.aggregate(n=hr.agg.sum("points", where="points"))
    with pytest.raises(BadExpression):
        rows.aggregate(n=hr.agg.count(where="points > "))


def test_a_comment_in_a_condition_ends_with_it() -> None:
    rows = scores(hr.Pipeline("league")).group_by("team")
    table = rows.aggregate(n=hr.agg.sum("points -- all", where="points > 3 -- large"))
    assert table.schema.names == ["team", "n"]


def test_counting_a_condition_warns_that_all_rows_count() -> None:
    rows = scores(hr.Pipeline("league")).group_by("team")
    with pytest.warns(
        UserWarning, match=r"counts every row .* hr\.agg\.count\(where='points > 3'\)"
    ):
        rows.aggregate(n=hr.agg.count("points > 3"))


def test_counting_a_column_with_a_condition_warned_of_an_expression_that_nobody_wrote() -> None:
    rows = scores(hr.Pipeline("league")).with_columns(won="points > 3").group_by("team")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows.aggregate(n=hr.agg.count("won", where="points > 1"), m=hr.agg.count("won"))
