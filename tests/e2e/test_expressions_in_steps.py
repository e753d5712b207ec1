"""Expressions where columns stand: groups, keys of joins, `* EXCEPT`; aggregates of all rows; and
the last of rows that repeat. Against DuckDB.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pyarrow as pa
import pytest

import headrace as hr
from headrace.errors import BadExpression, PlanError, UnknownColumn
from headrace.testing.kernels import KernelTest
from headrace.testing.pipelines import PipelineTest

pytestmark = pytest.mark.usefixtures("no_syncs")
START = datetime(2026, 1, 1, 12, tzinfo=UTC)
SCHEMA = "id BIGINT, region STRING, code STRING, amount BIGINT, placed TIMESTAMP"


def orders(pipeline: hr.Pipeline) -> hr.Stream:
    time = hr.EventTime("placed", delay="1 day")
    return pipeline.topic("orders", schema=SCHEMA, event_time=time)


def shop() -> hr.Pipeline:
    pipeline = hr.Pipeline("shop")
    rows = orders(pipeline)
    regions = pipeline.table("regions", schema="region_code STRING, name STRING", key="region_code")
    by_letter = rows.group_by("substring(code, 1, 1) AS letter", "region", odd="amount % 2")
    pipeline.view("letters", by_letter.aggregate(n=hr.agg.count(), total=hr.agg.sum("amount")))
    totals = rows.aggregate(n=hr.agg.count(), total=hr.agg.sum("amount"), low=hr.agg.min("amount"))
    pipeline.view("totals", totals)
    pipeline.view("regions_known", regions.aggregate(n=hr.agg.count()))
    named = rows.join(
        regions, left_on="upper(region)", right_on="substring(region_code, 1, 1)", how="left"
    )
    pipeline.write("named", named.select("* EXCEPT (code, `placed`)"))
    latest = rows.to_table("id")
    both = latest.join(regions, left_on="upper(region)", right_on="upper(region_code)", how="full")
    pipeline.view("both", both)
    pipeline.write("last", rows.dedupe(on=["region", "code"], within="10 seconds", keep="last"))
    hourly = rows.window(hr.tumbling("1 minute")).group_by("upper(region) AS r")
    pipeline.view("hourly", hourly.aggregate(n=hr.agg.count()))
    return pipeline


REGIONS = [{"region_code": code, "name": code * 2} for code in ("A", "B", "D")]
QUERIES = {
    "letters": """SELECT substring(code, 1, 1) AS letter, region, amount % 2 AS odd, count(*) AS n,
        sum(amount)::BIGINT AS total FROM orders GROUP BY ALL""",
    "totals": """SELECT true AS everything, count(*) AS n, sum(amount)::BIGINT AS total,
        min(amount) AS low FROM orders""",
    "regions_known": "SELECT true AS everything, count(*) AS n FROM regions",
    "named": """SELECT id, region, amount, region_code, name FROM orders LEFT JOIN regions
        ON upper(region) = substring(region_code, 1, 1)""",
    "both": """SELECT o.*, r.* FROM (SELECT * EXCLUDE (arrived) FROM orders) o FULL JOIN regions r
        ON upper(region) = upper(region_code)""",
    "last": """SELECT * EXCLUDE (arrived, next) FROM (SELECT *, lead(placed) OVER (
        PARTITION BY region, code ORDER BY placed, arrived) AS next FROM orders)
        WHERE next IS NULL OR next > placed + INTERVAL 10 SECOND""",
    "hourly": """SELECT upper(region) AS r, date_trunc('minute', placed) AS window_start,
        date_trunc('minute', placed) + INTERVAL 1 MINUTE AS window_end, count(*) AS n
        FROM orders GROUP BY ALL""",
}


def test_expressions_give_what_the_queries_give(tmp_path: Path) -> None:
    random, fed = Random(4), list[dict[str, Any]]()
    with PipelineTest(shop(), tmp_path) as test, duckdb.connect() as database:
        database.execute("SET TimeZone = 'UTC'")
        test.feed("regions", REGIONS)
        test.settle()
        for number in range(4):
            rows = [
                {
                    "id": len(fed) + index,
                    "region": random.choice(["a", "b", "c", None]),
                    "code": random.choice(["x1", "x2", "y", None]),
                    "amount": random.randrange(10),
                    "placed": START + timedelta(seconds=random.randrange(100)),
                }
                for index in range(12)
            ]
            test.feed("orders", rows)
            fed += rows
            test.settle(final=number == 3)
            if number == 1:
                test.restart(shards=3)
        numbered = [{**row, "arrived": number} for number, row in enumerate(fed)]
        database.register("orders", pa.Table.from_pylist(numbered))
        database.register("regions", pa.Table.from_pylist(REGIONS))
        for output, query in QUERIES.items():
            expected = database.sql(query).to_arrow_table().to_pylist()
            names = list(expected[0])
            if output in {"named", "last"}:
                found = test.log.read(output).to_table().select(names).to_pylist()
            else:
                found = test.view(output)
            assert set(found[0]) == set(names), output
            assert text(found, names) == text(expected, names), output


def text(rows: list[dict[str, Any]], names: list[str]) -> list[str]:
    def plain(value: Any) -> Any:
        return value.astimezone(UTC) if isinstance(value, datetime) else value

    return sorted(repr([plain(row[name]) for name in names]) for row in rows)


def test_the_last_of_rows_that_repeat_is_emitted_when_none_follows() -> None:
    rows = orders(hr.Pipeline("shop"))
    last = rows.dedupe(on="code", within="10 seconds", keep="last")
    assert last.schema == rows.schema
    step = last.step.input.input  # behind it: the condition, and the columns
    test = KernelTest(hr.Stream(rows.pipeline, step))
    assert test.waits_until_us is None


def test_expressions_that_do_not_fit_are_refused() -> None:
    pipeline = hr.Pipeline("shop")
    rows = orders(pipeline)
    regions = pipeline.table("regions", schema="region STRING, rate BIGINT", key="region")
    with pytest.raises(BadExpression, match=r"has the expression 'upper\(region\)'.*no name"):
        rows.group_by("upper(region)")
    with pytest.raises(UnknownColumn, match="'regin'"):
        rows.group_by("upper(regin) AS r")
    with pytest.raises(UnknownColumn, match="'regin'"):
        rows.group_by("regin")
    with pytest.raises(UnknownColumn, match="'cod'"):
        rows.select("* EXCEPT (cod)")
    with pytest.raises(PlanError, match="primary key"):
        regions.select("* EXCEPT (region)")
    with pytest.raises(PlanError, match="which is BIGINT"):
        rows.join(regions, left_on="upper(region)", right_on="rate", suffix="_known")
    with pytest.raises(PlanError, match="keeps 'newest'"):
        rows.dedupe(on="code", within="1 hour", keep="newest")
    with pytest.raises(PlanError, match="has none"):
        pipeline.topic("t", schema="k BIGINT").dedupe(on="k", within="1 hour", keep="last")
    assert rows.select("* except(Code, placed)", "upper(code) AS code").schema.names == [
        "id",
        "region",
        "amount",
        "code",
    ]
    assert rows.group_by("`region`", "date(placed) AS day").by == ("region", "day")
