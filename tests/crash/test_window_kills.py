"""Kill -9 of a pipeline with windows, of its driver and its workers: the same windows, corrections,
late rows and counts as without, in the same order.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest

import headrace as hr
from headrace.log.api import Log
from headrace.testing.fault_points import IN_TASKS, ON_THE_DRIVER
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark
from headrace.views.reader import ViewReader
from tests.crash.engine_child import Plan, windows
from tests.crash.engine_kills import DRIVER, WORKER, in_order, in_turn, run_through

pytestmark = pytest.mark.spark
START = datetime(2026, 3, 1, 12, tzinfo=UTC)
SILENT = 2
NOT_PASSED = {"before the kernel"}  # it is that of running aggregates


def disordered(ticks: int, rows: int) -> list[list[dict[str, Any]]]:
    """Three minutes a tick; one row of twelve is late, some of those too late for the devices'
    visits. One device is silent for a tick, and holds the clock back.
    """
    chance, found = Random(5), list[list[dict[str, Any]]]()
    for tick in range(ticks):
        devices = "ab" if tick == SILENT else "abc"
        seconds = [
            180 * tick
            + chance.randrange(180)
            - (chance.randrange(60, 2400) if chance.random() < 1 / 12 else 0)
            for _ in range(rows)
        ]
        found.append(
            [
                {
                    "n": rows * tick + at,
                    "k": chance.randrange(50),
                    "device": devices[at % len(devices)],
                    "at": START + timedelta(seconds=second),
                }
                for at, second in enumerate(seconds)
            ]
        )
    last = [
        {"n": -1, "k": 0, "device": device, "at": START + timedelta(days=1)} for device in "abc"
    ]
    return [*found, last]


def prepared(root: Path, address: str, name: str, fed: list[list[dict[str, Any]]]) -> None:
    session: Any = PlainSpark()
    root.mkdir()
    with hr.open_log(address) as log, PipelineTest(windows(name), root, session, log=log) as test:
        for rows in fed:
            test.feed(f"{name}.rows", rows)
            assert test.cut() == 1


class Outcome:
    """All that came out."""

    def __init__(self, log: Log, name: str, state: Path) -> None:
        self.topics = {
            "minutes": in_order(log, f"{name}.minutes"),
            "late": sorted(row["n"] for row in log.read(f"{name}.late").to_pylist()),
        }
        self.late = sorted(
            (row["step"], row["producer"], row["rows"])
            for row in log.read(f"__late.{name}").to_pylist()
        )
        with ViewReader(state / "views.db") as reader:
            self.views = {view.name: reader.table(view.name).to_pylist() for view in reader.views()}
            self.changes = {
                view.name: [
                    (tick, rows.to_pylist()) for tick, rows in reader.changes_since(view.name, 0)
                ]
                for view in reader.views()
            }

    def check(self, fed: list[list[dict[str, Any]]]) -> None:
        """Against plain arithmetic: no row is lost or doubled."""
        emitted = sum(row["n"] for row in self.views["visits"])
        assert self.topics["late"], "or nothing is shown about late rows"
        assert emitted + len(self.topics["late"]) == sum(len(rows) for rows in fed[:-1]), (
            "the last visits are not over yet"
        )
        assert any(
            row["_change_type"] == "update_preimage"
            for _, rows in self.changes["minutes"]
            for row in rows
        ), "or nothing is shown about corrections"
        assert sum(row["n"] for row in self.views["hours"]) == sum(
            row["n"] for row in self.views["minutes"]
        )


def undisturbed(root: Path, address: str, name: str) -> Outcome:
    session: Any = PlainSpark()
    with hr.open_log(address) as log, PipelineTest(windows(name), root, session, log=log) as test:
        while test.step(1):
            continue
        return Outcome(log, name, root / "state")


def check_killed(tmp_path: Path, plans: list[Plan], deaths: list[int], rows: int) -> None:
    fed = disordered(max(tick for plan in plans for tick in plan), rows)
    root, name = tmp_path / "calm", "calm"
    prepared(root, f"file:{root / 'log'}", name, fed)
    calm = undisturbed(root, f"file:{root / 'log'}", name)
    calm.check(fed)
    for number, (plan, dead) in enumerate(zip(plans, deaths, strict=True)):
        name, root = f"killed-{uuid.uuid4().hex[:8]}", tmp_path / f"killed{number}"
        prepared(root, f"file:{root / 'log'}", name, fed)
        run_through(root, f"file:{root / 'log'}", name, plan, deaths=dead, kind="windows")
        with hr.open_log(f"file:{root / 'log'}") as log:
            killed = Outcome(log, name, root / "state")
        assert killed.topics == calm.topics
        assert killed.late == calm.late
        assert killed.views == calm.views
        assert killed.changes == calm.changes


# minutes; faults without Spark are in test_window_properties.py, kills with Spark in
# test_engine_kills.py
@pytest.mark.slow
def test_workers_and_the_driver_killed_in_the_middle_of_windows(tmp_path: Path) -> None:
    kills = [
        ("in the kernel", WORKER),
        ("files were written", WORKER),
        ("between views and log", DRIVER),
        ("a shard has reported", WORKER),
    ]
    check_killed(tmp_path, [in_turn(*kills)], [1], rows=200)


@pytest.mark.slow
def test_killed_at_every_point(tmp_path: Path) -> None:
    tasks = [point for point in IN_TASKS if point not in NOT_PASSED]
    workers, drivers_from_workers = (
        in_turn(*((point, whom) for point in tasks)) for whom in (WORKER, DRIVER)
    )
    drivers = in_turn(*((point, DRIVER) for point in ON_THE_DRIVER))
    check_killed(
        tmp_path,
        [workers, drivers_from_workers, drivers],
        [0, len(drivers_from_workers), len(drivers)],
        rows=5_000,
    )
