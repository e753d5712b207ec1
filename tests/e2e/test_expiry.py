"""Keys with a ttl and views that keep rows for a time, in whole pipelines: through restarts, with
any number of shards and any size of batches.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.run_status import read_status
from headrace.runtime.state_inspector import state_sizes
from headrace.testing.pipelines import Died, PipelineTest
from headrace.testing.plain_spark import PlainSpark

pytestmark = pytest.mark.usefixtures("no_syncs")
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
SPARK: Any = PlainSpark()


def sessions() -> hr.Pipeline:
    pipeline = hr.Pipeline("shop")
    clicks = pipeline.topic("clicks", schema="k BIGINT, page STRING", key="k", partitions=2)
    newest = clicks.to_table("k", ttl="1 hour")
    pipeline.view("newest", newest)
    pipeline.view("counts", clicks.group_by("k").aggregate(n=hr.agg.count(), ttl="1 hour"))
    pipeline.view("pages", newest.group_by("page").aggregate(n=hr.agg.count()))
    pipeline.write("changes", newest)
    return pipeline


class Hand:
    """A clock that the test sets."""

    def __init__(self, test: PipelineTest) -> None:
        self.test, self.now_us = test, int(NOON.timestamp() * 1e6)
        self.hold()

    def hold(self) -> None:
        self.test.runner.now_us = lambda: self.now_us

    def advance(self, minutes: float) -> None:
        self.now_us += int(minutes * 60_000_000)


def by_key(test: PipelineTest, view: str, key: str = "k") -> dict[Any, Any]:
    return {row[key]: next(v for n, v in row.items() if n != key) for row in test.view(view)}


def test_a_key_that_expires_leaves_everything_that_is_computed_from_it(tmp_path: Path) -> None:
    with PipelineTest(sessions(), tmp_path, SPARK) as test:
        clock = Hand(test)
        test.feed("clicks", [{"k": 1, "page": "a"}, {"k": 2, "page": "a"}])
        test.settle()
        clock.advance(40)
        test.feed("clicks", [{"k": 2, "page": "b"}])
        test.settle()
        clock.advance(20)
        test.settle()  # a tick without a row: it is due
        assert by_key(test, "newest") == {2: "b"}
        assert by_key(test, "counts") == {2: 2}
        assert by_key(test, "pages", "page") == {"b": 1}
        clock.advance(40)
        test.settle()
        assert test.view("newest") == test.view("counts") == test.view("pages") == []
        test.feed("clicks", [{"k": 2, "page": "c"}])
        test.settle()
        assert by_key(test, "counts") == {2: 1}, "it begins anew"
        assert {k: row["page"] for k, row in test.folded("changes", "k").items()} == {2: "c"}
        states = test.runner.leading.entry.counts
        assert states["counts.aggregate.expired"] == 2


@pytest.mark.parametrize("seed", range(3))
def test_expiry_does_not_depend_on_batches_shards_and_kills(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    fed = [
        (
            chance.choice([0.5, 10, 30, 70]),
            [{"k": chance.randrange(6), "page": chance.choice("ab")} for _ in range(3)]
            if chance.random() < 0.7
            else [],
        )
        for _ in range(10)
    ]
    results = []
    for lives in (False, True):
        with PipelineTest(sessions(), tmp_path / f"{lives}", SPARK) as test:
            clock = Hand(test)
            for minutes, rows in fed:
                clock.advance(minutes)
                if rows:
                    test.feed("clicks", rows)
                test.cut(forced=True)
                if not lives:
                    test.step()
                elif chance.random() < 0.3:
                    point = chance.choice(["between views and log", "files were written"])
                    with pytest.raises(Died):
                        test.step(dies=point)
                    shards = chance.randint(1, 4)
                    test.restart(shards=shards, lose_local_store=chance.random() < 0.5)
                    clock.hold()
            clock.hold()
            while test.step(3 if lives else 1):
                continue
            views = ("newest", "counts", "pages")
            results.append(
                [sorted(map(str, test.view(view))) for view in views]
                + [
                    [(tick, sorted(map(str, rows))) for tick, rows in test.changes(view)]
                    for view in views
                ]
                + [sorted(map(str, test.rows("changes")))]
            )
    assert results[0] == results[1]


def windows(keep: str | None) -> hr.Pipeline:
    pipeline = hr.Pipeline("shop")
    clicks = pipeline.topic(
        "clicks", schema="k BIGINT, at TIMESTAMP", event_time=hr.EventTime("at")
    )
    minutes = clicks.window(hr.tumbling("1 minute")).group_by("k").aggregate(n=hr.agg.count())
    pipeline.view("recent", minutes, keep=keep)
    pipeline.view("all", minutes)
    return pipeline


def click(test: PipelineTest, minute: int) -> None:
    test.feed("clicks", [{"k": 1, "at": NOON + timedelta(minutes=minute)}])
    test.settle()


def test_a_view_keeps_windows_for_a_time_and_others_keep_them_all(tmp_path: Path) -> None:
    with PipelineTest(windows("10 minutes"), tmp_path, SPARK) as test:
        for minute in range(30):
            click(test, minute)
            if minute == 15:
                test.restart(shards=3, lose_local_store=True)
        assert [row["window_start"].minute for row in test.view("recent")] == [*range(19, 29)]
        assert len(test.view("all")) == 29
        last = [rows for _, rows in test.changes("recent")][-1]
        assert {(row["_change_type"], row["window_start"].minute) for row in last} == {
            ("insert", 28),
            ("delete", 18),
        }


@pytest.mark.parametrize("max_ticks", [1, 100])
def test_the_end_of_input_left_nothing_of_a_view_that_keeps_rows_for_a_time(
    tmp_path: Path, max_ticks: int
) -> None:
    """What is old is decided by the watermark before the end, however ticks are batched."""
    with PipelineTest(windows("10 minutes"), tmp_path, SPARK) as test:
        for minute in (0, 1, 15, 20, 24):
            test.feed("clicks", [{"k": None, "at": NOON + timedelta(minutes=minute)}])
            test.cut()
        test.runner.end_event_time()
        while test.step(max_ticks):
            continue
        assert [row["window_start"].minute for row in test.view("recent")] == [15, 20, 24]
        assert len(test.view("all")) == 5
        assert test.runner.leading.entry.due_us == {}
        test.restart(shards=3, lose_local_store=True)
        click(test, 30)
        assert not test.cut()
        assert [row["window_start"].minute for row in test.view("recent")] == [15, 20, 24]


def test_another_time_to_keep_builds_the_view_again(tmp_path: Path) -> None:
    with PipelineTest(windows("10 minutes"), tmp_path, SPARK) as test:
        for minute in range(20):
            click(test, minute)
        for keep, rows in (("15 minutes", 15), (None, 20), ("5 minutes", 5)):
            test.pipeline = windows(keep)
            test.restart()
            test.settle()
            click(test, 20)
            assert len(test.view("recent")) == rows


def test_a_view_keeps_rows_without_a_time_by_their_newest_change(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("shop")
    people = pipeline.table("people", schema="k BIGINT, name STRING", key="k")
    pipeline.view("recent", people, keep="1 day")
    pipeline.view("all", people)
    with PipelineTest(pipeline, tmp_path, SPARK) as test:
        clock = Hand(test)
        test.feed("people", [{"k": 1, "name": "Ada"}, {"k": 2, "name": "Ben"}])
        test.settle()
        clock.advance(1000)
        test.feed("people", [{"k": 2, "name": "Bea"}])
        test.settle()
        clock.advance(440)
        test.settle()
        assert by_key(test, "recent") == {2: "Bea"}
        assert by_key(test, "all") == {1: "Ada", 2: "Bea"}
        clock.advance(10)
        test.feed("people", [{"k": 1, "name": "Ann"}])
        test.settle()
        assert by_key(test, "recent") == {1: "Ann", 2: "Bea"}


def test_the_status_has_the_size_of_each_steps_state(tmp_path: Path) -> None:
    def visits(*, windowed: bool) -> hr.Pipeline:
        pipeline = hr.Pipeline("shop")
        clicks = pipeline.topic(
            "clicks", schema="k BIGINT, at TIMESTAMP", event_time=hr.EventTime("at")
        )
        if windowed:
            minutes = clicks.window(hr.tumbling("1 minute")).group_by("k")
            best = minutes.aggregate(n=hr.agg.count(), name="minutes")
            pipeline.view("best", best.top(3, by="n", per="window_end", name="best"))
        pipeline.view("counts", clicks.group_by("k").aggregate(n=hr.agg.count(), name="counts"))
        return pipeline

    with PipelineTest(visits(windowed=True), tmp_path, SPARK) as test:
        sizes = []
        for minute in range(30):
            rows = [{"k": k, "at": NOON + timedelta(minutes=minute)} for k in range(4)]
            test.feed("clicks", rows)
            test.settle()
            if minute % 12 == 10:
                test.restart(shards=1 + minute % 3, lose_local_store=True)
            sizes.append(test.runner.status().steps)
        assert all(size["counts"] == sizes[0]["counts"] for size in sizes)
        assert sizes[0]["counts"]["keys"] == 4
        assert sizes[-1]["best"] == sizes[10]["best"], "what is behind windows goes with them"
        assert sizes[-1]["minutes"]["keys"] <= sizes[10]["minutes"]["keys"]
        assert "counts.state_keys" not in test.runner.status().counts
        test.runner.write_status()
        stored = read_status(test.state).steps
        assert stored == sizes[-1]
        listed = {info.step: info.keys for info in state_sizes(test.log, "shop", test.state)}
        assert {step: size["keys"] for step, size in stored.items()} == listed


def test_the_state_of_steps_that_share_files_could_not_be_listed(tmp_path: Path) -> None:
    with PipelineTest(sessions(), tmp_path, SPARK, width="one") as test:
        test.feed("clicks", [{"k": 1, "page": "a"}])
        test.settle()
        listed = {info.step: info.files for info in state_sizes(test.log, "shop", test.state)}
        assert len(listed) == 3
        assert set(listed.values()) == {1}
