"""Rows left out when too many wait: by priority or by chance, decided in the tick; every row is
counted, in or out; a replay, other batches and another runner leave out the same.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import PlanError, UnknownColumn
from headrace.runtime.state_inspector import last_entry
from headrace.serve.server import start
from headrace.testing.pipelines import Died, PipelineTest
from headrace.testing.plain_spark import PlainSpark

pytestmark = pytest.mark.usefixtures("no_syncs")


def clicks(shed: Any = None) -> hr.Pipeline:
    pipeline = hr.Pipeline("shop")
    rows = pipeline.topic("clicks", schema="n BIGINT, level INT", key="n", partitions=2, shed=shed)
    pipeline.write("taken", rows.key_by("n"))
    pipeline.view("counted", rows.group_by("level").aggregate(n=hr.agg.count()))
    return pipeline


def rows(first: int, stop: int) -> list[dict[str, int]]:
    return [{"n": n, "level": n % 4} for n in range(first, stop)]


def overloaded(test: PipelineTest) -> None:
    """A hundred rows are done, then a thousand wait: of these, more than 300 are behind."""
    test.feed("clicks", rows(0, 100))
    test.settle()
    for first in range(100, 1_100, 100):
        test.feed("clicks", rows(first, first + 100))
        test.cut()


def taken(test: PipelineTest) -> list[int]:
    return sorted(row[1] for row in test.rows("taken"))


def left_out(test: PipelineTest) -> int:
    return last_entry(test.log, "shop").counts.get("clicks.shed", 0)


def test_rows_are_left_out_only_when_too_many_wait_and_are_counted(tmp_path: Path) -> None:
    with PipelineTest(clicks(hr.shed(behind=300, keep=0.25)), tmp_path) as test:
        overloaded(test)
        test.settle()
        found = taken(test)
        assert found[:400] == list(range(400)), "as many as may wait are all there"
        assert 100 < len(found) - 400 < 250, "about a quarter of the rest"
        assert len(found) + left_out(test) == 1_100, "every row is one or the other"
        assert sum(row["n"] for row in test.view("counted")) == len(found), (
            "everyone who reads them leaves out the same"
        )
        test.feed("clicks", rows(2_000, 2_100))
        test.settle()
        assert taken(test)[-100:] == list(range(2_000, 2_100)), "nothing waits any more"


def test_rows_of_high_priority_are_never_shed(tmp_path: Path) -> None:
    with PipelineTest(
        clicks(hr.shed(behind=300, priority="level", min_priority=3)), tmp_path
    ) as test:
        overloaded(test)
        test.settle()
        assert taken(test) == [n for n in range(1_100) if n < 400 or n % 4 == 3]


def test_a_replay_leaves_out_the_same_and_so_does_whoever_takes_over(tmp_path: Path) -> None:
    shed = hr.shed(behind=300, keep=0.25)
    with PipelineTest(clicks(shed), tmp_path / "one") as test:
        overloaded(test)
        with pytest.raises(Died):
            test.step(3, dies="before the commit")
        test.restart(shards=3, lose_local_store=True)
        while test.step(2):
            continue
        found, lost = taken(test), left_out(test)
        assert lost > 400
        with test.replay("v2") as again:
            again.settle()
            assert sorted(row[1] for row in again.rows("taken.v2")) == found
    with PipelineTest(clicks(shed), tmp_path / "other") as test:
        overloaded(test)
        test.settle()
        assert (taken(test), left_out(test)) == (found, lost)


def test_views_say_what_they_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.runtime.run._start_spark", lambda _options: PlainSpark())
    shop = clicks(hr.shed(behind=300))
    shop.view("visitors", shop.topic("visits", schema="n BIGINT").to_table("n"))
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_topic("clicks", "n BIGINT, level INT", key="n", partitions=2)
        with log.producer("clicks") as producer:
            producer.append(rows(0, 1_000))
        shop.run(log=log.address, state=tmp_path / "state", until_caught_up=True)
        with start(tmp_path / "state", log, port=0) as server:
            views = json.loads(
                urllib.request.urlopen(f"{server.address}/views", timeout=30).read()
            )["views"]
    assert [(view["name"], view.get("left_out")) for view in views] == [
        ("counted", {"clicks": 1_000}),
        ("visitors", None),
    ]


def test_invalid_settings_are_refused() -> None:
    for bad, why in (
        ({"behind": 0}, "behind"),
        ({"behind": 5, "keep": 1.0}, "keep"),
        ({"behind": 5, "priority": "level"}, "both"),
    ):
        with pytest.raises(PlanError, match=why):
            hr.shed(**bad)
    with pytest.raises(UnknownColumn, match="level"):
        clicks(hr.shed(behind=5, priority="levle", min_priority=1))
    with pytest.raises(PlanError, match="min_priority="):
        clicks(hr.shed(behind=5, priority="level", min_priority="high"))
    with pytest.raises(PlanError, match=r"hr\.shed"):
        clicks(5)
