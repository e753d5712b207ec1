"""Power is lost behind every change that a workload makes to its disk. The log must open, and be
what it was.
"""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from headrace.log.file.log import FileLog
from headrace.log.file.maintenance import create_checkpoint
from headrace.testing.power_loss import MODES, ProcessKilled, RebootedDisk
from tests.crash.power import Run, check_crash, crashed
from tests.crash.workloads import (
    SCHEMA,
    WORKLOADS,
    Workload,
    checkpoints,
    compaction,
    everything,
    large_appends,
    rows,
    shrink,
    small_appends,
)
from tests.short_forms import examples

POINTS = examples(24)
SEEDS = 4


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


def points(changes: int, count: int) -> list[int]:
    """Some places in a trace, spread evenly; the end is always one."""
    chance = Random(changes)
    return sorted({0, changes, *chance.sample(range(changes + 1), min(count, changes))})


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.__name__)
def test_nothing_acknowledged_is_lost_and_nothing_is_invented(
    workload: Workload, tmp_path: Path
) -> None:
    run = Run(tmp_path / "healthy")
    workload(run)
    trace = run.finish()
    for number, after in enumerate(points(len(trace.changes), POINTS)):
        check_crash(run, trace, after, tmp_path / "crashed", mode=MODES[number % len(MODES)])
        check_crash(run, trace, after, tmp_path / "crashed", mode="mixed", seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.__name__)
def test_power_loss_at_every_point(workload: Workload, mode: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "healthy")
    workload(run)
    trace = run.finish()
    for seed in range(1 if mode in {"kept", "dropped"} else SEEDS):
        for after in range(len(trace.changes) + 1):
            check_crash(run, trace, after, tmp_path / "crashed", mode=mode, seed=seed)


def killed_and_restarted(directory: Path, after: int) -> Run:
    """A process that was killed behind so many changes, and another one that went on."""
    run = Run(directory)
    run.disk.kill_after = len(run.disk.trace.changes) + after
    with suppress(ProcessKilled):
        everything(run)
    run.after_kill()
    everything(run)
    return run


def check_kill(tmp_path: Path, kill: int, count: int) -> None:
    run = killed_and_restarted(tmp_path / f"killed-{kill}", kill)
    trace = run.finish()
    for number, after in enumerate(points(len(trace.changes), count)):
        check_crash(
            run, trace, after, tmp_path / "crashed", mode=MODES[number % len(MODES)], seed=kill
        )


def test_a_process_is_killed_and_then_power_is_lost(tmp_path: Path) -> None:
    for kill in random.sample(range(330), examples(8)):
        check_kill(tmp_path, kill, examples(10))


@pytest.mark.slow
def test_a_process_is_killed_anywhere_and_then_power_is_lost(tmp_path: Path) -> None:
    for kill in range(0, 330, 2):
        check_kill(tmp_path, kill, 15)


def check_unsynced_names(tmp_path: Path, workload: Workload, step: int) -> None:
    """Kill a process right before it syncs a directory; let another one go on; cut the power when
    it is done.
    """
    healthy = Run(tmp_path / "healthy")
    workload(healthy)
    unsynced = [
        index
        for index, change in enumerate(healthy.finish().changes)
        if change.kind == "sync-directory"
    ]
    for kill in unsynced[::step]:
        run = Run(tmp_path / f"killed-{kill}", kill_after=kill)
        with suppress(ProcessKilled):
            workload(run)
        run.after_kill()
        if not run.log.topics():
            run.log.create_topic("a", SCHEMA, partitions=2)
        run.log.producer("a").append(rows(0, 10, 600))
        run.look()
        trace = run.finish()
        check_crash(run, trace, len(trace.changes), tmp_path / "crashed", mode="dropped", seed=kill)


def test_names_left_unsynced_by_a_killed_process_are_not_lost(tmp_path: Path) -> None:
    check_unsynced_names(tmp_path, large_appends, step=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "workload", [checkpoints, everything, compaction], ids=lambda workload: workload.__name__
)
def test_no_name_left_unsynced_by_a_killed_process_is_lost(
    workload: Workload, tmp_path: Path
) -> None:
    check_unsynced_names(tmp_path, workload, step=1)


@pytest.mark.parametrize("durability", ["disk", "os"])
def test_the_end_of_a_journal_file_that_a_killed_process_left_unsynced_is_not_lost(
    durability: str, tmp_path: Path
) -> None:
    """Its next process goes on in the file that this end names; with "os", commits that nobody has
    synced lie before it.
    """
    for kill in range(12):
        run = Run(tmp_path / f"killed-{kill}", durability=durability)
        small_appends(run)
        run.disk.kill_after = len(run.disk.trace.changes) + kill
        with pytest.raises(ProcessKilled):
            create_checkpoint(run.log)
        run.durability = "disk"
        run.after_kill()
        run.log.producer("a").append(rows(500, 2))
        trace = run.finish()
        check_crash(run, trace, len(trace.changes), tmp_path / "crashed", mode="dropped", seed=kill)


def check_generations(tmp_path: Path, seed: int, generations: int, count: int) -> None:
    """Power is lost again and again, also while the log recovers from the time before."""
    chance = Random(seed)
    run = Run(tmp_path / f"{seed}-0")
    everything(run)
    for generation in range(1, generations + 1):
        trace = run.finish()
        for number, after in enumerate(
            points(min(len(trace.changes), 60), count)
        ):  # recovery is at the beginning
            check_crash(
                run, trace, after, tmp_path / "crashed", mode=MODES[number % len(MODES)], seed=seed
            )
        after, mode = chance.randint(0, len(trace.changes)), chance.choice(MODES)
        trace.cut_power(after, tmp_path / f"{seed}-{generation}", mode=mode, chance=chance)
        run = Run(
            tmp_path / f"{seed}-{generation}",
            before=run,
            acknowledged=max(trace.marks_before(after), default=0),
        )
        everything(run)


def test_power_is_lost_many_times_in_a_row(tmp_path: Path) -> None:
    for seed in range(examples(3)):
        check_generations(tmp_path, seed, generations=3, count=examples(6))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 112))
def test_power_is_lost_many_times_at_many_points(seed: int, tmp_path: Path) -> None:
    check_generations(tmp_path, seed, generations=6, count=40)


@pytest.mark.parametrize(
    "workload", [small_appends, large_appends, everything], ids=lambda workload: workload.__name__
)
def test_with_durability_os_rows_may_be_lost_but_the_log_is_not(
    workload: Workload, tmp_path: Path
) -> None:
    """It opens, invents nothing, and can be written."""
    run = Run(tmp_path / "healthy", durability="os")
    workload(run)
    trace = run.finish()
    known = {
        (directory, partition, offset, row["n"])
        for (directory, partition, offset), row in run.rows.items()
    }
    for number, after in enumerate(points(len(trace.changes), POINTS)):
        with (
            crashed(trace, after, tmp_path / "crashed", mode=MODES[number % len(MODES)]) as root,
            FileLog.open(root, disk=RebootedDisk()) as log,
        ):
            for topic in log.store.view().topics.values():
                found = log.read(topic.name, on_corrupt="skip").to_pylist()
                assert {
                    (topic.directory, row["_partition"], row["_offset"], row["n"]) for row in found
                } <= known
                log.producer(topic.name).append(dict.fromkeys(topic.info.columns) | {"n": 999})
                assert [
                    row["n"] for row in log.read(topic.name, on_corrupt="skip").to_pylist()
                ].count(999) == 1
