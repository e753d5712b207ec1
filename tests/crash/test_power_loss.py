"""Power is lost behind every change that a workload makes to its disk. The log must open, and be what it was."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from headrace.testing.crash import MODES
from tests.crash.power import Run, check_crash
from tests.crash.workloads import WORKLOADS, Workload, shrink

POINTS = 24
SEEDS = 4


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


def points(changes: int, count: int) -> list[int]:
    """Some places in a trace, spread evenly; the end is always one."""
    chance = Random(changes)
    return sorted({0, changes, *chance.sample(range(changes + 1), min(count, changes))})


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.__name__)
def test_nothing_acknowledged_is_lost_and_nothing_is_invented(workload: Workload, tmp_path: Path) -> None:
    run = Run(tmp_path / "healthy")
    workload(run)
    trace = run.finish()
    for number, after in enumerate(points(len(trace.changes), POINTS)):
        check_crash(run, trace, after, tmp_path / "crashed", mode=MODES[number % len(MODES)])
        check_crash(run, trace, after, tmp_path / "crashed", mode="mixed", seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.__name__)
def test_the_same_at_every_point(workload: Workload, mode: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "healthy")
    workload(run)
    trace = run.finish()
    for seed in range(1 if mode in {"kept", "dropped"} else SEEDS):
        for after in range(len(trace.changes) + 1):
            check_crash(run, trace, after, tmp_path / "crashed", mode=mode, seed=seed)
