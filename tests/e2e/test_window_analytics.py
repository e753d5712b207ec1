"""What a metrics person asks of windows, through a pipeline: each window compared with an earlier
one, rates, averages, decay, percentiles, the first n. The jobs run in this process, but for those
that say otherwise.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import headrace as hr
from headrace.errors import BadDuration, PlanError, UnfitColumn, UnknownColumn
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark

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
    return shop.topic(
        "sales", schema="region STRING, amount DOUBLE, at TIMESTAMP", key="region", event_time=times
    )


def fed(
    shop: hr.Pipeline,
    root: Path,
    ticks: list[list[dict[str, Any]]],
    spark: Any = None,
    *,
    max_ticks: int = 100,
    shards: int = 2,
) -> PipelineTest:
    test = PipelineTest(shop, root, spark or PLAIN, shards=shards)
    for rows in ticks:
        test.feed("sales", rows)
        test.cut(forced=True)
    while test.step(max_ticks):
        continue
    return test


# Compared


def weeks(window: Any = None, *, emit: str = "final") -> hr.Pipeline:
    shop = hr.Pipeline("shop")
    windows = (
        sales(shop)
        .window(window or hr.tumbling("1 hour"), late=hr.late.correct("1 day"), emit=emit)
        .group_by("region")
    )
    compared = windows.aggregate(n=hr.agg.count(), s=hr.agg.sum("amount")).compare("7 days")
    shop.view("weeks", compared)
    shop.write("weeks_changes", compared, partitions=2)
    return shop


def test_each_window_stands_beside_the_one_a_week_earlier(tmp_path: Path) -> None:
    ticks = [
        [sale(0, 1), sale(10, 2), sale(0, 5, "south")],
        [sale(7 * DAY, 4), sale(7 * DAY, 1, "west")],
        [sale(14 * DAY, 1, "north"), sale(14 * DAY, 1, "west")],
        [sale(30 * DAY)],
    ]
    answers = []
    for max_ticks, shards in ((100, 2), (1, 3)):
        with fed(
            weeks(), tmp_path / str(shards), ticks, max_ticks=max_ticks, shards=shards
        ) as test:
            found = {
                (row["region"], row["window_start"]): (
                    row["n"],
                    row["s"],
                    row["previous_n"],
                    row["previous_s"],
                )
                for row in test.view("weeks")
            }
            answers.append(test.rows("weeks_changes"))
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
    days = (
        sales(shop)
        .window(hr.tumbling("1 hour"), late=hr.late.correct("10 days"), emit="changes")
        .aggregate(n=hr.agg.count())
    )
    shop.view("days", days.compare("1 day"))
    with fed(shop, tmp_path, [[sale(0)], [sale(DAY)], [sale(5)]]) as test:
        last = [
            {name: row[name] for name in ("window_start", "n", "previous_n", "_change_type")}
            for row in test.changes("days")[-1][1]
        ]
    assert last == [
        {"window_start": at(0), "n": 1, "previous_n": None, "_change_type": "update_preimage"},
        {"window_start": at(0), "n": 2, "previous_n": None, "_change_type": "update_postimage"},
        {"window_start": at(DAY), "n": 1, "previous_n": 1, "_change_type": "update_preimage"},
        {"window_start": at(DAY), "n": 1, "previous_n": 2, "_change_type": "update_postimage"},
    ]


def test_days_are_compared_by_the_clock_of_their_zone(tmp_path: Path) -> None:
    shop = hr.Pipeline("shop")
    days = (
        sales(shop)
        .window(hr.tumbling("1 day", timezone="Europe/Berlin"), late=hr.late.correct("1 day"))
        .group_by("region")
        .aggregate(n=hr.agg.count())
    )
    shop.view("days", days.compare("7 days"))
    spring = {"region": "north", "amount": 1.0}
    rows = [{**spring, "at": datetime(2026, 3, day, 12, tzinfo=UTC)} for day in (28, 28, 31)] + [
        {**spring, "at": datetime(2026, 4, 4, 12, tzinfo=UTC)}
    ]
    with fed(shop, tmp_path, [rows, [{**spring, "at": datetime(2026, 4, 9, tzinfo=UTC)}]]) as test:
        found = {row["window_start"]: (row["n"], row["previous_n"]) for row in test.view("days")}
    assert found[datetime(2026, 4, 3, 22, tzinfo=UTC)] == (
        1,
        2,
    ), "midnight in Berlin is an hour earlier since the clock was put forward"


@pytest.mark.spark
def test_compared_windows_on_spark_behind_a_condition_and_after_a_restart(
    tmp_path: Path, spark: SparkSession
) -> None:
    shop = hr.Pipeline("shop")
    hours = (
        sales(shop)
        .window(hr.tumbling("1 hour"))
        .group_by("region")
        .aggregate(s=hr.agg.sum("amount"))
    )
    shop.view(
        "growth",
        hours.where("s > 1")
        .compare("1 day")
        .compare("2 days", prefix="before_")
        .with_columns(growth="s - previous_s"),
    )
    with fed(
        shop,
        tmp_path,
        [[sale(0, 1), sale(0, 5, "south")], [sale(DAY, 7), sale(DAY, 8, "south")]],
        spark,
    ) as test:
        test.restart(shards=3)
        test.feed("sales", [sale(2 * DAY, 9), sale(2 * DAY, 11, "south")])
        test.feed("sales", [sale(5 * DAY, region=region) for region in ("north", "south")])
        test.settle()
        found = {
            (row["region"], row["window_start"]): (
                row["s"],
                row["previous_s"],
                row["before_s"],
                row["growth"],
            )
            for row in test.view("growth")
        }
    assert found == {
        ("south", at(0)): (5.0, None, None, None),
        ("north", at(DAY)): (7.0, None, None, None),
        ("south", at(DAY)): (8.0, 5.0, None, 3.0),
        ("north", at(2 * DAY)): (9.0, 7.0, None, 2.0),
        ("south", at(2 * DAY)): (11.0, 8.0, 5.0, 3.0),
    }


def test_invalid_comparisons_are_refused() -> None:
    shop = hr.Pipeline("shop")
    rows = sales(shop)
    hours = (
        rows.window(hr.tumbling("1 hour"))
        .group_by("region")
        .aggregate(n=hr.agg.count(), previous_n=hr.agg.sum("amount"))
    )
    with pytest.raises(PlanError, match="'previous_n'"):
        hours.compare("1 day")
    assert hours.compare("1 day", prefix="earlier_").schema.names[-2:] == [
        "earlier_n",
        "earlier_previous_n",
    ]
    for period, why in (
        ("90 minutes", "one begins every 1 hour"),
        ("0 days", "is zero"),
        ("9999 days", "longer than 10 years"),
    ):
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


# Rates, moving averages, decay, percentiles, the first n


def test_rates_averages_percentiles_and_decay_of_a_window(tmp_path: Path) -> None:
    shop = hr.Pipeline("shop")
    minutes = sales(shop).window(hr.tumbling("1 minute")).group_by("region")
    shop.view(
        "minutes",
        minutes.aggregate(
            per_second=hr.agg.rate(),
            money=hr.agg.rate("amount", per="1 hour"),
            p=hr.agg.quantiles("amount", [0.0, 0.5, 1.0]),
            mean=hr.agg.avg("amount"),
            recent=hr.agg.decayed_sum("amount", half_life="10 seconds"),
        ),
    )
    rows = [sale(0, 8), sale(10, 4), sale(30, 1), sale(0, 5, "south")]
    with fed(shop, tmp_path, [rows, [sale(60)]]) as test:
        north, south = test.view("minutes")
    assert (north["per_second"], north["money"], north["mean"], north["recent"]) == pytest.approx(
        (3 / 60, 13 * 60, 13 / 3, 3.0)
    )
    assert north["p"] == [1.0, 4.0, 8.0]
    assert (south["per_second"], south["recent"]) == pytest.approx((1 / 60, 5.0))


def test_a_moving_average_is_an_average_over_a_sliding_window(tmp_path: Path) -> None:
    shop = hr.Pipeline("shop")
    shop.view(
        "moving",
        sales(shop)
        .window(hr.sliding("10 seconds"))
        .group_by("region")
        .aggregate(mean=hr.agg.avg("amount"), per_second=hr.agg.rate()),
    )
    with fed(
        shop, tmp_path, [[sale(0, 1), sale(4, 2), sale(8, 6), sale(12, 4)], [sale(100)]]
    ) as test:
        found = [(row["window_end"], row["mean"], row["per_second"]) for row in test.view("moving")]
    assert found == [
        (at(0), 1.0, 0.1),
        (at(4), 1.5, 0.2),
        (at(8), 3.0, 0.3),
        (at(12), 4.0, 0.3),
    ], "another row may come at the clock itself"


def test_the_first_of_each_window(tmp_path: Path) -> None:
    shop = hr.Pipeline("shop")
    minutes = (
        sales(shop)
        .window(hr.tumbling("1 minute"), late=hr.late.correct("1 hour"))
        .group_by("region")
        .aggregate(s=hr.agg.sum("amount"))
    )
    shop.view("best", minutes.top(2, by="s", per=["window_start", "window_end"]))
    ticks = [
        [sale(0, 1, "a"), sale(1, 2, "b"), sale(2, 3, "c")],
        [sale(60, 7, "c"), sale(61, 1, "a"), sale(130)],
        [sale(5, 5, "a")],
    ]
    with fed(shop, tmp_path, ticks) as test:
        found = {(row["window_start"], row["region"]): row["s"] for row in test.view("best")}
        emitted = [
            [(row["region"], row["_change_type"]) for row in rows]
            for _, rows in test.changes("best")
        ]
    assert found == {(at(0), "a"): 6.0, (at(0), "c"): 3.0, (at(60), "c"): 7.0, (at(60), "a"): 1.0}
    assert emitted[-1] == [("b", "delete"), ("a", "insert")] or emitted[-1] == [
        ("a", "insert"),
        ("b", "delete"),
    ], "a late row corrects who is first"


def test_decay_of_a_running_group_goes_by_the_event_time(tmp_path: Path) -> None:
    shop = hr.Pipeline("shop")
    shop.view(
        "recent",
        sales(shop)
        .group_by("region")
        .aggregate(recent=hr.agg.decayed_sum("amount", half_life="10 seconds")),
    )
    with fed(shop, tmp_path, [[sale(0, 8)], [sale(20, 1)], [sale(10, 4)]]) as test:
        assert [row["recent"] for row in test.view("recent")] == [8 / 4 + 4 / 2 + 1]


@pytest.mark.spark
def test_decay_of_an_expression_keeps_the_column_with_the_time(
    tmp_path: Path, spark: SparkSession
) -> None:
    shop = hr.Pipeline("shop")
    rows = shop.topic(
        "sales",
        schema="region STRING, amount DOUBLE, at TIMESTAMP, paid_at TIMESTAMP",
        event_time="at",
    )
    recent, paid = (
        hr.agg.decayed_sum("abs(amount)", half_life="10 seconds", time=time)
        for time in (None, "paid_at")
    )
    shop.view(
        "windows",
        rows.window(hr.tumbling("1 minute"), emit="changes").aggregate(recent=recent, paid=paid),
    )
    shop.view("running", rows.group_by("region").aggregate(recent=recent, paid=paid))
    with fed(
        shop,
        tmp_path,
        [[{**sale(0, -8), "paid_at": at(0)}, {**sale(10, 4), "paid_at": at(20)}]],
        spark,
    ) as test:
        for view in ("windows", "running"):
            assert [(row["recent"], row["paid"]) for row in test.view(view)] == [(8.0, 6.0)]


def test_steps_that_need_windows_or_event_time_are_refused_without() -> None:
    shop = hr.Pipeline("shop")
    rows = sales(shop)
    plain = shop.topic("plain", schema="k STRING, v DOUBLE")
    with pytest.raises(PlanError, match="length of a window, and there is none"):
        rows.group_by("region").aggregate(r=hr.agg.rate())
    with pytest.raises(PlanError, match="event time, and plain has none"):
        plain.group_by("k").aggregate(d=hr.agg.decayed_sum("v", half_life="1 hour"))
    with pytest.raises(UnknownColumn, match="did you mean 'at'"):
        rows.group_by("region").aggregate(
            d=hr.agg.decayed_sum("amount", half_life="1 hour", time="att")
        )
    with pytest.raises(UnfitColumn, match="'region', which is STRING"):
        rows.window(hr.tumbling("1 hour")).aggregate(
            d=hr.agg.decayed_sum("amount", half_life="1 hour", time="region")
        )


# A window's result is a table


def test_windows_are_joined_and_counted_again_and_follow_corrections(tmp_path: Path) -> None:
    shop = hr.Pipeline("shop")
    minutes = (
        sales(shop)
        .window(hr.tumbling("1 minute"), late=hr.late.correct("1 hour"))
        .group_by("region")
        .aggregate(s=hr.agg.sum("amount"))
    )
    targets = shop.table("targets", schema="region STRING, target DOUBLE", key="region")
    shop.view("beside_targets", minutes.join(targets, on="region", how="left"))
    shop.view(
        "best", minutes.group_by("region").aggregate(best=hr.agg.max("s"), windows=hr.agg.count())
    )
    shop.write("minutes_changes", minutes.changes())
    with PipelineTest(shop, tmp_path, PLAIN) as test:
        test.feed("targets", [{"region": "north", "target": 10.0}])
        for rows in ([sale(0, 3), sale(1, 1, "south")], [sale(61, 4), sale(130)], [sale(5, 9)]):
            test.feed("sales", rows)
            test.settle()
        joined = {
            (row["region"], row["window_start"]): (row["s"], row["target"])
            for row in test.view("beside_targets")
        }
        best = {row["region"]: (row["best"], row["windows"]) for row in test.view("best")}
        emitted = [
            row["change_type"]
            for row in test.log.read("minutes_changes").to_pylist()
            if row["region"] == "north"
        ]
    assert joined == {
        ("north", at(0)): (12.0, 10.0),
        ("south", at(0)): (1.0, None),
        ("north", at(60)): (4.0, 10.0),
    }
    assert best == {"north": (12.0, 2), "south": (1.0, 1)}
    assert emitted == ["insert", "insert", "update_preimage", "update_postimage"]


def test_columns_named_like_those_of_buffers_ended_the_run(tmp_path: Path) -> None:
    """Buffered rows have columns of their own, which must not meet the user's."""
    pipeline = hr.Pipeline("names")
    schema = "k STRING, _time BIGINT, _id BIGINT, _mark BIGINT, _bits BIGINT, at TIMESTAMP"
    rows = pipeline.topic("rows", schema=schema, key="k", event_time="at")
    changes = pipeline.table("changes", schema=schema, key="k", event_time="at")
    correct = hr.late.correct("1 hour")
    for name, source, window in (
        ("sessions", rows, hr.session("1 minute")),
        ("sliding", rows, hr.sliding("1 minute")),
        ("tumbling", changes, hr.tumbling("1 minute")),
        ("of_table", changes, hr.session("1 minute")),
    ):
        grouped = source.window(window, late=correct).group_by("k")
        pipeline.view(
            name,
            grouped.aggregate(all=hr.agg.collect("_time"), most=hr.agg.max_by("_mark", "_id")),
        )
    matches = rows.match(
        "a b",
        define={"b": "b._time > a._time AND b._mark > a._id"},
        measures={"sum": "a._time + b._mark + a._bits"},
        within="1 hour",
    )
    pipeline.write("matches", matches)
    pipeline.write("joined", rows.join(changes, on="k", suffix="_t"))
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    with PipelineTest(pipeline, tmp_path) as test:
        for number in range(4):
            at = noon + timedelta(seconds=10 * number)
            row = {"k": "a", "_time": number, "_id": number, "_mark": 10, "_bits": 5, "at": at}
            test.feed("changes", [row])
            test.feed("rows", [row])
            test.settle()
        test.settle(final=True)
        (session,) = test.view("sessions")
        assert (session["all"], session["most"]) == ([0, 1, 2, 3], 10)
        assert [0, 1, 2, 3] in [row["all"] for row in test.view("sliding")]
        assert [row["all"] for row in test.view("of_table")] == [[0]]
        assert [row["all"] for row in test.view("tumbling")] == [[0]]
        assert [row["sum"] for row in test.log.read("matches").to_pylist()] == [15, 17]
        joined = test.log.read("joined").to_pylist()
        assert [(row["_time"], row["_id_t"]) for row in joined] == [(n, n) for n in range(4)]
