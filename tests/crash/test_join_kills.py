"""Kill -9 of the driver and of Spark's Python workers while a pipeline with every kind of join
runs: the same rows, changes and ticks as without.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import repeat
from pathlib import Path
from random import Random
from typing import Any

import pytest

import headrace as hr
from headrace.testing.fault_points import IN_TASKS, ON_THE_DRIVER
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark
from headrace.views.reader import ViewReader
from tests.crash.engine_child import Plan
from tests.crash.engine_kills import DRIVER, WORKER, in_turn, run_through
from tests.e2e.joined import START, TOPICS, VIEWS, Feed, joined, shown

pytestmark = pytest.mark.spark
NAME = "joined"
TICKS_FROM_US = int((START + timedelta(hours=1)).timestamp()) * 1_000_000


class Prepared:
    """Rows in ticks, recorded, and nothing done yet; the same ones in every directory."""

    def __init__(self, root: Path, ticks: int) -> None:
        self.root, self.feed = root, Feed(Random(8))
        session: Any = PlainSpark()
        with PipelineTest(joined(NAME), root, session) as test:
            for number in range(ticks):
                self.feed.tick(test)
                test.runner.now_us = repeat(
                    TICKS_FROM_US + number * 60_000_000
                ).__next__  # a delete ends a version at its tick's time
                assert test.cut(forced=True) == 1

    @property
    def address(self) -> str:
        return f"file:{self.root / 'log'}"

    def undisturbed(self) -> dict[str, Any]:
        """Without Spark: that its rows are the same is part of what is to be shown."""
        session: Any = PlainSpark()
        with PipelineTest(joined(NAME), self.root, session) as test:
            while test.step(1):
                continue
            for view, rows in self.feed.expected().items():
                assert shown(test.view(view)) == rows, view
        return self.outcome()

    def outcome(self) -> dict[str, Any]:
        """Topics in their order, and views with all their changes."""
        hidden = {"_offset", "_timestamp"}
        with (
            hr.open_log(self.address) as log,
            ViewReader(self.root / "state" / "views.db") as reader,
        ):
            topics = {
                topic: [
                    {k: v for k, v in row.items() if k not in hidden}
                    for row in log.read(topic).to_pylist()
                ]
                for topic in TOPICS
            }
            changes = {
                view: [(tick, rows.to_pylist()) for tick, rows in reader.changes_since(view, 0)]
                for view in VIEWS
            }
            return {
                **topics,
                **changes,
                **{f"{view} in the end": reader.table(view).to_pylist() for view in VIEWS},
            }


def check_killed(tmp_path: Path, plans: Sequence[Plan], deaths: Sequence[int]) -> None:
    ticks = max(tick for plan in plans for tick in plan) + 1
    calm = Prepared(tmp_path / "calm", ticks).undisturbed()
    assert all(calm[output] for output in (*TOPICS, *VIEWS)), "every join has something to tell"
    for number, (plan, dead) in enumerate(zip(plans, deaths, strict=True)):
        killed = Prepared(tmp_path / f"killed{number}", ticks)
        run_through(killed.root, killed.address, NAME, plan, deaths=dead, kind="joined")
        for output, rows in killed.outcome().items():
            assert rows == calm[output], output


# minutes; faults without Spark are in test_join_properties.py, kills with Spark in
# test_engine_kills.py
@pytest.mark.slow
def test_joins_with_workers_and_a_driver_killed(tmp_path: Path) -> None:
    kills = [
        ("in the kernel", WORKER),
        ("between views and log", DRIVER),
        ("the store was committed", WORKER),
    ]
    check_killed(tmp_path, [in_turn(*kills)], deaths=[1])


@pytest.mark.slow
def test_joins_killed_at_every_point(tmp_path: Path) -> None:
    workers = in_turn(*((point, WORKER) for point in IN_TASKS))
    drivers_from_workers = in_turn(*((point, DRIVER) for point in IN_TASKS))
    drivers = in_turn(*((point, DRIVER) for point in ON_THE_DRIVER))
    check_killed(
        tmp_path,
        [workers, drivers_from_workers, drivers],
        deaths=[0, len(drivers_from_workers), len(drivers)],
    )
