"""The part of `headrace demo` about time: one till holds back the clock, and with it a minute; then a late row corrects the minute, and in the same tick the hour made of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.output import say
from headrace.log.api import Log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.cli.demo import Checks
    from headrace.pipeline.pipeline import Pipeline
    from headrace.pipeline.runner import Runner

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
SALES = "till STRING, amount DOUBLE, at TIMESTAMP"


def minutes_and_hours() -> Pipeline:
    import headrace as hr

    shop = hr.Pipeline("demo-time")
    sales = shop.topic("sales", schema=SALES, event_time=hr.EventTime("at", delay="10 seconds", producer="till", idle="1 hour"))
    minutes = sales.window(hr.tumbling("1 minute"), late=hr.correct("1 day")).aggregate(revenue=hr.agg.sum("amount"))
    shop.view("minutes", minutes)
    shop.view("hours", minutes.window(hr.tumbling("1 hour"), late=hr.correct("1 day"), emit="changes").aggregate(revenue=hr.agg.sum("revenue")))
    return shop


def show_time(log: Log, spark: SparkSession, state: Path, checks: Checks) -> None:
    """Three batches: held back, released, corrected."""
    from headrace.pipeline.explain import explain, told
    from headrace.pipeline.runner import Runner

    say("5. Event time: minutes of sales, and hours made of the minutes")
    plan = minutes_and_hours().plan()
    runner = Runner(plan, log, spark, state)
    try:
        _take_in(runner, [("a", 20, 5.0), ("b", 5, 1.0), ("a", 75, 3.0), ("a", 10, 2.0)])
        why = told(explain(plan, log, state, "minutes.window"))
        say(f"  till a is at 12:01:15, till b at 12:00:05: {why[-1].partition(': ')[0]}, and the minute 12:00 with it")
        checks.equal("minutes published while till b is behind", len(_rows(runner, "minutes")), 0)
        _take_in(runner, [("b", 72, 1.0)])
        say("  till b goes on, and the minute is published")
        checks.equal("revenue of the minute 12:00", _rows(runner, "minutes")[0]["revenue"], 8.0)
        before = runner.tick
        _take_in(runner, [("b", 30, 100.0)])
        say("  a row of 12:00:30 over 100.00 comes late; in one tick:")
        corrected = [(name, row) for name in ("minutes", "hours") for row in _changes(runner, name, before)]
        for name, row in corrected:
            say(f"    {name:8} {row['_change_type']:17} {row['window_start']:%H:%M}  {row['revenue']:8.2f}")
        checks.true("the minute and the hour were both corrected", [row["revenue"] for _, row in corrected] == [8.0, 108.0, 8.0, 108.0])
    finally:
        runner.close()


def _take_in(runner: Runner, sales: list[tuple[str, int, float]]) -> None:
    with runner.log.producer("sales") as producer:
        producer.append([{"till": till, "amount": amount, "at": NOON + timedelta(seconds=seconds)} for till, seconds, amount in sales])
    runner.run(until_caught_up=True)


def _rows(runner: Runner, view: str) -> list[dict[str, Any]]:
    assert runner.views is not None
    rows: list[dict[str, Any]] = runner.views.reader.table(view).to_pylist()
    return rows


def _changes(runner: Runner, view: str, since: int) -> list[dict[str, Any]]:
    assert runner.views is not None
    return [row for _, changes in runner.views.reader.changes_since(view, since) for row in changes.to_pylist()]
