"""Power is lost while several threads commit at once, and another one makes checkpoints."""

from __future__ import annotations

from pathlib import Path
from random import Random
from threading import Barrier, Thread

import pytest

from headrace.log.file.log import FileLog
from headrace.log.file.maintenance import create_checkpoint
from headrace.testing.power_loss import MODES, RebootedDisk, RecordingDisk, Trace
from tests.crash.power import assert_sound, crashed
from tests.crash.workloads import SCHEMA, shrink

THREADS, APPENDS = 4, 12


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


def text(n: int) -> str:
    """Some rows are carried by the journal, some are synced on their own, some are staged."""
    return "x" * (10, 900, 9000)[n % 3]


def write(log: FileLog, disk: RecordingDisk, who: int, start: Barrier) -> None:
    with log.producer("a", id=f"writer-{who}") as producer:
        start.wait()
        for n in range(APPENDS):
            producer.append([{"n": 100 * who + n, "text": text(n)}] * 2, partition=who % 2)
            disk.mark((who, n))


def keep(log: FileLog, start: Barrier) -> None:
    start.wait()
    for _ in range(4):
        create_checkpoint(log)


def record(directory: Path) -> Trace:
    disk = RecordingDisk(directory)
    log = FileLog.open(directory / "log", disk=disk)
    log.create_topic("a", SCHEMA, partitions=2, segment_bytes=30_000)
    start = Barrier(THREADS + 1)
    threads = [Thread(target=write, args=(log, disk, who, start)) for who in range(THREADS)]
    threads.append(Thread(target=keep, args=(log, start)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace = disk.freeze()
    log.close()
    return trace


def check(trace: Trace, after: int, into: Path, mode: str) -> None:
    acknowledged = dict.fromkeys(range(THREADS), -1) | dict(trace.marks_before(after))
    with (
        crashed(trace, after, into, mode=mode) as root,
        FileLog.open(root, disk=RebootedDisk()) as log,
    ):
        rows = log.read("a").to_pylist() if log.topics() else []
        for who in range(THREADS):
            mine = [row for row in rows if row["n"] // 100 == who]
            last = len(mine) // 2 - 1
            assert [row["n"] % 100 for row in mine] == [
                n for n in range(last + 1) for _ in range(2)
            ], "doubled, out of order, or half an append"
            assert all(row["text"] == text(row["n"] % 100) for row in mine)
            assert last >= acknowledged[who], (
                f"append {acknowledged[who]} of {who} was acknowledged; {last} is the last one left"
            )
            if log.topics():
                assert log.producer("a", id=f"writer-{who}").last_sequence == last
        assert_sound(log)


def check_everywhere(tmp_path: Path, step: int) -> None:
    trace = record(tmp_path / "healthy")
    chance = Random(step)
    for after in range(0, len(trace.changes) + 1, step):
        check(trace, after, tmp_path / "crashed", chance.choice(MODES))


def test_nothing_acknowledged_to_any_thread_is_lost(tmp_path: Path) -> None:
    check_everywhere(tmp_path, step=11)


@pytest.mark.slow
@pytest.mark.parametrize("_attempt", range(5))
def test_nothing_acknowledged_to_any_thread_is_lost_anywhere(_attempt: int, tmp_path: Path) -> None:
    check_everywhere(tmp_path, step=1)
