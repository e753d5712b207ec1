"""Kill -9 of the driver and of Spark's Python workers while a pipeline that searches runs: the same
matches, lists and dead letters as without.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.testing.fault_points import IN_TASKS, ON_THE_DRIVER
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark
from tests.crash.engine_child import Plan
from tests.crash.engine_kills import DRIVER, WORKER, in_turn, run_through
from tests.e2e.searched import check, feed_tick, history, outputs, searched

pytestmark = pytest.mark.spark
NAME = "searched"


def prepared(root: Path, ticks: int) -> str:
    """Rows in ticks, recorded, and nothing done yet; the same ones in every directory. The log's
    address.
    """
    session: Any = PlainSpark()
    with PipelineTest(searched(NAME), root, session) as test:
        for number, given in enumerate(history(9, ticks)):
            feed_tick(test, number, given)
    return f"file:{root / 'log'}"


def outcome(root: Path, ticks: int) -> dict[str, Any]:
    """What came out, also against every query with every document. What is not done yet is done
    without Spark: that its rows are the same is part of what is to be shown.
    """
    session: Any = PlainSpark()
    with PipelineTest(searched(NAME), root, session) as test:
        while test.step(1):
            continue
        check(test, history(9, ticks))
        return outputs(test)


def check_killed(tmp_path: Path, plans: Sequence[Plan], deaths: Sequence[int]) -> None:
    ticks = max(tick for plan in plans for tick in plan) + 1
    prepared(tmp_path / "calm", ticks)
    calm = outcome(tmp_path / "calm", ticks)
    assert all(calm.values()), "every output has something to tell"
    for number, (plan, dead) in enumerate(zip(plans, deaths, strict=True)):
        root = tmp_path / f"killed{number}"
        run_through(root, prepared(root, ticks), NAME, plan, deaths=dead, kind=NAME)
        assert outcome(root, ticks) == calm


@pytest.mark.slow
def test_search_with_a_worker_and_the_driver_killed(tmp_path: Path) -> None:
    check_killed(
        tmp_path,
        [in_turn(("in the kernel", WORKER), ("between views and log", DRIVER))],
        deaths=[1],
    )


@pytest.mark.slow  # minutes
def test_search_killed_at_every_point(tmp_path: Path) -> None:
    workers, drivers_from_workers = (
        in_turn(*((point, whom) for point in IN_TASKS)) for whom in (WORKER, DRIVER)
    )
    drivers = in_turn(*((point, DRIVER) for point in ON_THE_DRIVER))
    check_killed(
        tmp_path,
        [workers, drivers_from_workers, drivers],
        deaths=[0, len(drivers_from_workers), len(drivers)],
    )
