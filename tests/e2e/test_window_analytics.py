"""What a metrics person asks of windows, through a pipeline: each window beside an earlier one. The jobs run in this process, but for those that say otherwise."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import headrace as hr
from headrace.errors import BadDuration, PlanError
from headrace.testing.pipelines import PipelineTest
from tests.engine.plain_spark import PlainSpark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("no_syncs")
START = datetime(2026, 3, 1, 12, tzinfo=UTC)
DAY = 86_400
PLAIN: Any = PlainSpark()


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def sale(seconds: float, amount: float = 1.0, region: str = "north") -> dict[str, Any]:
    return {"region": region, "amount": amount, "at": at(seconds)}


def sales(shop: hr.Pipeline) -> hr.Stream:
    times = hr.EventTime("at", idle="1000 days")
    return shop.topic("sales", schema="region STRING, amount DOUBLE, at TIMESTAMP", key="region", event_time=times)


def fed(shop: hr.Pipeline, root: Path, ticks: list[list[dict[str, Any]]], spark: Any = None, *, most_ticks: int = 100, shards: int = 2) -> PipelineTest:
    test = PipelineTest(shop, root, spark or PLAIN, shards=shards)
    for rows in ticks:
        test.feed("sales", rows)
        test.cut(forced=True)
    while test.step(most_ticks):
        continue
    return test


# Compared


def weeks(window: Any = None, *, emit: str = "final") -> hr.Pipeline:
    shop = hr.Pipeline("shop")
    windows = sales(shop).window(window or hr.tumbling("1 hour"), late=hr.correct("1 day"), emit=emit).group_by("region")
    compared = windows.aggregate(n=hr.agg.count(), s=hr.agg.sum("amount")).compare("7 days")
    shop.view("weeks", compared)
    shop.write("weeks_told", compared, partitions=2)
    return shop


def test_each_window_stands_beside_the_one_a_week_earlier(tmp_path: Path) -> None:
    ticks = [
        [sale(0, 1), sale(10, 2), sale(0, 5, "south")],
        [sale(7 * DAY, 4), sale(7 * DAY, 1, "west")],
        [sale(14 * DAY, 1, "north"), sale(14 * DAY, 1, "west")],
        [sale(30 * DAY)],
    ]
    answers = []
    for most_ticks, shards in ((100, 2), (1, 3)):
        with fed(weeks(), tmp_path / str(shards), ticks, most_ticks=most_ticks, shards=shards) as test:
            found = {(row["region"], row["window_start"]): (row["n"], row["s"], row["previous_n"], row["previous_s"]) for row in test.view("weeks")}
            answers.append(test.rows("weeks_told"))
    assert found == {
        ("north", at(0)): (2, 3.0, None, None),
        ("south", at(0)): (1, 5.0, None, None),
        ("north", at(7 * DAY)): (1, 4.0, 2, 3.0),
        ("west", at(7 * DAY)): (1, 1.0, None, None),
        ("north", at(14 * DAY)): (1, 1.0, 1, 4.0),
        ("west", at(14 * DAY)): (1, 1.0, 1, 1.0),
    }
    assert answers[0] == answers[1], "whatever the batches and shards"


def test_a_correction_of_the_earlier_window_corrects_the_one_beside_it(tmp_path: Path) -> None:
    shop = hr.Pipeline("shop")
    days = sales(shop).window(hr.tumbling("1 hour"), late=hr.correct("10 days"), emit="changes").aggregate(n=hr.agg.count())
    shop.view("days", days.compare("1 day"))
    with fed(shop, tmp_path, [[sale(0)], [sale(DAY)], [sale(5)]]) as test:
        last = [{name: row[name] for name in ("window_start", "n", "previous_n", "_change_type")} for row in test.changes("days")[-1][1]]
    assert last == [
        {"window_start": at(0), "n": 1, "previous_n": None, "_change_type": "update_preimage"},
        {"window_start": at(0), "n": 2, "previous_n": None, "_change_type": "update_postimage"},
        {"window_start": at(DAY), "n": 1, "previous_n": 1, "_change_type": "update_preimage"},
        {"window_start": at(DAY), "n": 1, "previous_n": 2, "_change_type": "update_postimage"},
    ]


def test_days_are_compared_by_the_clock_of_their_zone(tmp_path: Path) -> None:
    shop = hr.Pipeline("shop")
    days = sales(shop).window(hr.tumbling("1 day", timezone="Europe/Berlin"), late=hr.correct("1 day")).group_by("region").aggregate(n=hr.agg.count())
    shop.view("days", days.compare("7 days"))
    spring = {"region": "north", "amount": 1.0}
    rows = [{**spring, "at": datetime(2026, 3, day, 12, tzinfo=UTC)} for day in (28, 28, 31)] + [{**spring, "at": datetime(2026, 4, 4, 12, tzinfo=UTC)}]
    with fed(shop, tmp_path, [rows, [{**spring, "at": datetime(2026, 4, 9, tzinfo=UTC)}]]) as test:
        found = {row["window_start"]: (row["n"], row["previous_n"]) for row in test.view("days")}
    assert found[datetime(2026, 4, 3, 22, tzinfo=UTC)] == (1, 2), "midnight in Berlin is an hour earlier since the clock was put forward"


@pytest.mark.spark
def test_compared_windows_on_spark_behind_a_condition_and_after_a_restart(tmp_path: Path, spark: SparkSession) -> None:
    shop = hr.Pipeline("shop")
    hours = sales(shop).window(hr.tumbling("1 hour")).group_by("region").aggregate(s=hr.agg.sum("amount"))
    shop.view("growth", hours.where("s > 1").compare("1 day").compare("2 days", prefix="before_").with_columns(growth="s - previous_s"))
    with fed(shop, tmp_path, [[sale(0, 1), sale(0, 5, "south")], [sale(DAY, 7), sale(DAY, 8, "south")]], spark) as test:
        test.restart(shards=3)
        test.feed("sales", [sale(2 * DAY, 9), sale(2 * DAY, 11, "south")])
        test.feed("sales", [sale(5 * DAY, region=region) for region in ("north", "south")])
        test.settle()
        found = {(row["region"], row["window_start"]): (row["s"], row["previous_s"], row["before_s"], row["growth"]) for row in test.view("growth")}
    assert found == {
        ("south", at(0)): (5.0, None, None, None),
        ("north", at(DAY)): (7.0, None, None, None),
        ("south", at(DAY)): (8.0, 5.0, None, 3.0),
        ("north", at(2 * DAY)): (9.0, 7.0, None, 2.0),
        ("south", at(2 * DAY)): (11.0, 8.0, 5.0, 3.0),
    }


def test_what_cannot_be_compared_is_refused() -> None:
    shop = hr.Pipeline("shop")
    rows = sales(shop)
    hours = rows.window(hr.tumbling("1 hour")).group_by("region").aggregate(n=hr.agg.count(), previous_n=hr.agg.sum("amount"))
    with pytest.raises(PlanError, match="'previous_n'"):
        hours.compare("1 day")
    assert hours.compare("1 day", prefix="earlier_").schema.names[-2:] == ["earlier_n", "earlier_previous_n"]
    for period, why in (("90 minutes", "one begins every 1 hour"), ("0 days", "is zero"), ("9999 days", "longer than 10 years")):
        with pytest.raises(PlanError, match=why):
            hours.compare(period)
    with pytest.raises(BadDuration):
        hours.compare("a week")
    with pytest.raises(PlanError, match="no prefix"):
        hours.compare("1 day", prefix="")
    with pytest.raises(PlanError, match="no table of windows"):
        rows.group_by("region").aggregate(n=hr.agg.count()).compare("1 day")
    with pytest.raises(PlanError, match="no table of windows"):
        hours.select("region", "window_end", "n", begins="window_start").compare("1 day")
    for window in (hr.session("5 minutes"), hr.sliding("5 minutes")):
        with pytest.raises(PlanError, match="no two begin and end"):
            rows.window(window).aggregate(n=hr.agg.count()).compare("1 day")
