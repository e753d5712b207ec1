"""Why has this window not been published? Open windows and who holds the clock, in `explain`, in
the status, on the command line and as metrics.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import headrace as hr
from headrace.cli import app
from headrace.runtime.explain import explain, explanation_text
from headrace.serve.metrics import render_metrics
from headrace.serve.stores import ViewStores
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark

pytestmark = pytest.mark.usefixtures("no_syncs")
START = datetime(2026, 3, 1, 12, tzinfo=UTC)
PLAIN: Any = PlainSpark()


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def us(seconds: float) -> int:
    return round(at(seconds).timestamp() * 1e6)


def order(k: str, device: str, seconds: float) -> dict[str, Any]:
    return {"k": k, "device": device, "at": at(seconds)}


def held_back(root: Path) -> PipelineTest:
    """Minutes and moving counts, which the device y holds back at 40 seconds."""
    shop = hr.Pipeline("shop")
    times = hr.EventTime("at", delay="5 seconds", producer="device", idle="10 minutes")
    orders = shop.topic("orders", schema="k STRING, device STRING, at TIMESTAMP", event_time=times)
    shop.view(
        "minutes",
        orders.window(hr.tumbling("1 minute"), late=hr.late.correct("1 hour"))
        .group_by("k")
        .aggregate(n=hr.agg.count()),
    )
    shop.view(
        "moving",
        orders.window(hr.sliding("20 seconds"), late=hr.late.correct("1 hour"))
        .group_by("k")
        .aggregate(n=hr.agg.count()),
    )
    test = PipelineTest(shop, root, PLAIN)
    for rows in (
        [order("a", "x", 0), order("a", "y", 40), order("b", "x", 10)],
        [order("b", "x", 70), order("a", "x", 50), order("a", "x", 130)],
    ):
        test.feed("orders", rows)
        test.settle()
    test.runner.write_status()
    return test


@pytest.mark.parametrize(
    ("producer", "name", "text"),
    [("device", "(null)", "the producer (null)"), (None, "partition 0", "partition 0")],
)
def test_producers_without_a_name_are_explained_too(
    tmp_path: Path, producer: str | None, name: str, text: str
) -> None:
    shop = hr.Pipeline("shop")
    orders = shop.topic(
        "orders",
        schema="device STRING, at TIMESTAMP",
        event_time=hr.EventTime("at", producer=producer, idle="10 minutes"),
    )
    shop.view("minutes", orders.window(hr.tumbling("1 minute")).aggregate(n=hr.agg.count()))
    with PipelineTest(shop, tmp_path, PLAIN) as test:
        test.feed("orders", [{"device": None, "at": at(10)}])
        test.settle()
        why = explain(test.pipeline.plan(), test.log, test.state, "minutes.window")
        assert [each.producer for each in why.held_by] == [name]
        assert f"orders waits for {text}: its newest row" in explanation_text(why)[-1]


def test_sliding_windows_are_explained_by_group(tmp_path: Path) -> None:
    with held_back(tmp_path) as test:
        why = explain(test.pipeline.plan(), test.log, test.state, "moving.window")
        assert [
            (each.start_us, each.end_us, each.groups) for each in why.windows if each.waiting
        ] == [(us(20), us(40), 1), (us(50), us(70), 1)]
        assert [(each.end_us, each.groups) for each in why.windows if not each.waiting] == [
            (us(70), 1),
            (us(130), 1),
        ]
        assert [(each.producer, each.needed_us) for each in why.held_by] == [("y", us(45) + 1)], (
            "a row may still come at 40 seconds, until the clock is past it"
        )
        lines = explanation_text(why)
        assert (
            "Windows of 2 groups wait to be published, the first one ends at 2026-03-01 12:00:40"
            in lines[1]
        )
        assert "The rows of 2 groups are kept" in lines[2]
        of_b = explain(test.pipeline.plan(), test.log, test.state, "moving.window", at(70))
        assert [each.end_us for each in of_b.windows if each.waiting] == [us(70)], (
            "the end is in it"
        )
        before_it = explain(test.pipeline.plan(), test.log, test.state, "moving.window", at(50))
        assert not [each for each in before_it.windows if each.waiting], "and its start is not"


def test_open_windows_and_who_holds_the_clock_are_metrics(tmp_path: Path) -> None:
    with held_back(tmp_path) as test:
        lines = render_metrics(ViewStores(test.state), 0).splitlines()
    for line in (
        'headrace_open_windows{pipeline="shop",step="minutes.window",state="waiting"} 4',
        'headrace_open_windows{pipeline="shop",step="moving.window",state="waiting"} 2',
        'headrace_open_windows{pipeline="shop",step="moving.window",state="kept"} 2',
        (
            'headrace_waits_for_timestamp_seconds{pipeline="shop",step="minutes.window"}'
            f" {us(60) / 1e6!r}"
        ),
        'headrace_producers{pipeline="shop",input="orders"} 2',
        (
            'headrace_producer_timestamp_seconds{pipeline="shop",input="orders",producer="y"}'
            f" {us(40) / 1e6!r}"
        ),
        "# TYPE headrace_open_windows gauge",
    ):
        assert line in lines
    assert any(
        line.startswith(
            'headrace_producer_silent_seconds{pipeline="shop",input="orders",producer="y"}'
        )
        for line in lines
    )
    assert not any("rows_counted" in line and "windows_" in line for line in lines)


def test_the_status_shows_them(tmp_path: Path) -> None:
    with held_back(tmp_path) as test:
        shown = CliRunner().invoke(app, ["status", str(test.state)], env={"COLUMNS": "200"}).output
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    minutes, moving = rows["minutes.window"], rows["moving.window"]
    assert minutes[1:3] == ["4", "0"]
    assert moving[1:3] == ["2", "2"]
    assert "2026-03-01T12:01:00Z" in " ".join(minutes)
    assert "y (at 2026-03-01T12:00:40Z" in shown


def test_emitted_windows_are_retained_for_corrections_and_then_dropped(tmp_path: Path) -> None:
    with held_back(tmp_path) as test:
        test.feed("orders", [order("a", "y", 140), order("a", "x", 140)])
        test.settle()
        counts = test.runner.leading.entry.counts
        assert (
            counts["minutes.window.windows_waiting"],
            counts["minutes.window.windows_kept"],
        ) == (1, 3)
        test.feed("orders", [order("z", device, 86400) for device in "xy"])
        test.settle()
        counts = test.runner.leading.entry.counts
        assert (
            counts["minutes.window.windows_waiting"],
            counts["minutes.window.windows_kept"],
        ) == (1, 0)
