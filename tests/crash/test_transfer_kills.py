"""The transfers test under kill -9: the driver, its JVM and its workers die at every point of a
batch, batches change their width, and whoever looks meanwhile finds as much money as there was.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.testing.fault_points import IN_TASKS, ON_THE_DRIVER
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark
from headrace.views.reader import ViewReader
from tests.crash.engine_child import Plan
from tests.crash.engine_kills import DRIVER, JVM, WORKER, run_through
from tests.e2e.bank import bank, check_every_tick, check_moment, opening, transfer

pytestmark = pytest.mark.spark
NAME = "bank"


def prepare(root: Path, ticks: int) -> None:
    """The opening balances are in the views; the transfers are in ticks that nobody has run."""
    session: Any = PlainSpark()
    rng = random.Random(7)
    with PipelineTest(bank(NAME), root, session) as test:
        test.feed("moves", opening())
        test.settle()
        for _ in range(ticks):
            test.feed("moves", [row for _ in range(50) for row in transfer(rng)])
            assert test.cut() == 1


def after_the_opening(*kills: tuple[str, str]) -> Plan:
    """A plan of one kill per tick, beginning with the tick after the opening balances'."""
    return dict(enumerate(kills, 2))


def check_kills(root: Path, plan: Plan, *, deaths: int) -> None:
    root.mkdir()
    ticks = len(plan) + 1
    prepare(root, ticks)
    views, seen = root / "state" / "views.db", set[int]()
    with ThreadPoolExecutor(1) as thread, ViewReader(views) as reader:
        run = thread.submit(
            run_through, root, f"file:{root / 'log'}", NAME, plan, deaths=deaths, kind=NAME
        )
        while not run.done():
            with reader.snapshot() as snapshot:
                seen.add(check_moment(snapshot))
        printed = run.result()
    jvm_deaths = sum(whom == JVM for _, whom in plan.values())
    assert deaths or printed.count("Spark has ended. Starting it again.") == jvm_deaths
    assert len(seen) > ticks // 2
    check_every_tick(views)


def test_money_is_never_lost_while_workers_jvms_and_drivers_are_killed(tmp_path: Path) -> None:
    plan = after_the_opening(
        ("in the kernel", WORKER), ("files were written", JVM), ("between views and log", DRIVER)
    )
    check_kills(tmp_path / "bank", plan, deaths=1)


@pytest.mark.slow
def test_money_is_never_lost_with_kills_at_every_point(tmp_path: Path) -> None:
    of_topics = {"a topic's rows were staged", "in the log's commit"}  # of which it writes none
    points = [point for point in (*IN_TASKS, *ON_THE_DRIVER) if point not in of_topics]
    check_kills(tmp_path / "jvms", after_the_opening(*((point, JVM) for point in points)), deaths=0)
    drivers = after_the_opening(*((point, DRIVER) for point in points))
    check_kills(tmp_path / "drivers", drivers, deaths=len(drivers))
