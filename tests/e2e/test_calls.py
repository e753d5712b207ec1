"""A run with recorded calls on Spark ends when all rows have their answers."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headrace as hr
from headrace.log import open_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

START = datetime(2026, 1, 1, tzinfo=UTC)


def test_a_run_catches_up_with_its_calls(spark: SparkSession, tmp_path: Path) -> None:
    asked: list[str] = []

    async def double(row: dict[str, Any], ctx: hr.RequestContext) -> dict[str, Any]:
        asked.append(ctx.idempotency_key)
        await asyncio.sleep(0.2)
        return {"double": 2 * row["n"]}

    async def again(row: dict[str, Any], ctx: hr.RequestContext) -> dict[str, Any]:
        asked.append(ctx.idempotency_key)
        return {"quadruple": 2 * row["double"]}

    address = f"file:{tmp_path / 'log'}"
    pipeline = hr.Pipeline("calling", log=address)
    rows = pipeline.topic("numbers", schema="n BIGINT, at TIMESTAMP", event_time="at")
    doubled = rows.call(double, "double BIGINT", version="1")
    both = doubled.call(again, "quadruple BIGINT", version="1")
    pipeline.write("answered", both)
    windows = both.window(hr.tumbling("1 minute")).aggregate(total=hr.agg.sum("quadruple"))
    pipeline.view("windows", windows)
    with open_log(address) as log:
        log.create_topic("numbers", "n BIGINT, at TIMESTAMP")
        with log.producer("numbers") as producer:
            producer.append([{"n": n, "at": START + timedelta(seconds=n)} for n in range(100)])
        statuses: list[dict[str, str]] = []
        pipeline.run(
            state=tmp_path / "state",
            until_caught_up=True,
            final=True,
            on_status=lambda status: statuses.append(status.calls),
        )
        answers = {row["n"]: row["quadruple"] for row in log.read("answered").to_pylist()}
        assert answers == {n: 4 * n for n in range(100)}
        assert len(asked) == len(set(asked)) == 200
        assert statuses[-1]["double"].startswith("100 answered, 0 open")
