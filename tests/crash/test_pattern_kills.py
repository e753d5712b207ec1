"""Kill -9 of the driver and of Spark's Python workers while a pipeline with patterns and rules
runs: the same matches, time-outs, late rows and dead letters as without.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.testing.fault_points import IN_TASKS, ON_THE_DRIVER
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark
from headrace.views.reader import ViewReader
from tests.crash.engine_child import Plan
from tests.crash.engine_kills import DRIVER, WORKER, in_turn, run_through
from tests.e2e.patterned import OUTPUTS, START, disordered, feed_tick, patterned

pytestmark = pytest.mark.spark
NAME = "patterned"
NOT_PASSED = {"before the kernel"}  # it is that of running aggregates
TICKS_FROM_US = int((START + timedelta(hours=1)).timestamp()) * 1_000_000


class Prepared:
    """Rows in ticks, recorded, and nothing done yet; the same ones in every directory."""

    def __init__(self, root: Path, ticks: int) -> None:
        self.root = root
        session: Any = PlainSpark()
        with PipelineTest(patterned(NAME), root, session) as test:
            for number, rows in enumerate(disordered(7, ticks, rows=60, cards=9)):
                test.runner.now_us = repeat(TICKS_FROM_US + number * 60_000_000).__next__
                feed_tick(test, number, rows)
            last = [
                {"card": card, "amount": 50.0, "kind": "d", "paid_at": START + timedelta(hours=1)}
                for card in range(9)
            ]
            feed_tick(test, ticks, last)  # by which the time of what is still open runs out

    @property
    def address(self) -> str:
        return f"file:{self.root / 'log'}"

    def undisturbed(self) -> dict[str, Any]:
        """Without Spark: that its rows are the same is part of what is to be shown."""
        session: Any = PlainSpark()
        with PipelineTest(patterned(NAME), self.root, session) as test:
            while test.step(1):
                continue
        return self.outcome()

    def outcome(self) -> dict[str, Any]:
        """Topics in their order; dead letters without the time at which they were written."""
        with (
            hr.open_log(self.address) as log,
            ViewReader(self.root / "state" / "views.db") as reader,
        ):
            view = {"frauds": reader.table("frauds").to_pylist()}
            emitted = {
                name: [
                    {
                        key: value
                        for key, value in row.items()
                        if key not in {"_offset", "_timestamp"}
                    }
                    for row in log.read(name).to_pylist()
                ]
                for name in OUTPUTS
            }
            return {
                **emitted,
                **view,
                "refused": [
                    (row["tick"], row["row"], row["reason"])
                    for row in log.read("alerts.match.dead").to_pylist()
                ],
            }


def check_killed(tmp_path: Path, plans: Sequence[Plan], deaths: Sequence[int]) -> None:
    ticks = max(tick for plan in plans for tick in plan) + 1
    calm = Prepared(tmp_path / "calm", ticks).undisturbed()
    assert all(calm.values()), "every output has something to tell"
    for number, (plan, dead) in enumerate(zip(plans, deaths, strict=True)):
        killed = Prepared(tmp_path / f"killed{number}", ticks)
        run_through(killed.root, killed.address, NAME, plan, deaths=dead, kind=NAME)
        for output, rows in killed.outcome().items():
            assert rows == calm[output], output


# minutes; faults without Spark are in e2e/test_patterns.py and e2e/test_rules.py, kills with Spark
# in test_engine_kills.py
@pytest.mark.slow
def test_patterns_with_workers_and_a_driver_killed(tmp_path: Path) -> None:
    kills = [
        ("in the kernel", WORKER),
        ("between views and log", DRIVER),
        ("the store was committed", WORKER),
        ("files were written", WORKER),
    ]
    check_killed(tmp_path, [in_turn(*kills)], deaths=[1])


@pytest.mark.slow
def test_patterns_killed_at_every_point(tmp_path: Path) -> None:
    tasks = [point for point in IN_TASKS if point not in NOT_PASSED]
    workers, drivers_from_workers = (
        in_turn(*((point, whom) for point in tasks)) for whom in (WORKER, DRIVER)
    )
    drivers = in_turn(*((point, DRIVER) for point in ON_THE_DRIVER))
    check_killed(
        tmp_path,
        [workers, drivers_from_workers, drivers],
        deaths=[0, len(drivers_from_workers), len(drivers)],
    )
