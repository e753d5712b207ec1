"""The disk is full after so many bytes, wherever that is. What was stored is intact, and the log
works again when there is room.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.errors import DiskFull
from headrace.log.file.log import FileLog
from headrace.testing.power_loss import FullDisk

SCHEMA = "n BIGINT, text STRING"
ROOM = 60_000  # what the workload needs, and a little more
Step = Callable[[FileLog], list[int]]


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.log.file.committer.INLINE_BYTES", 2_000)
    monkeypatch.setattr("headrace.log.file.producer.MAX_COMMIT_BYTES", 8_000)
    monkeypatch.setattr("headrace.log.file.transaction.MAX_BYTES_IN_MEMORY", 4_000)
    monkeypatch.setattr("headrace.log.file.staging.MAX_COPIED_BYTES", 4_000)


def append(first: int, count: int, text_bytes: int, *, id: str | None = None) -> Step:
    numbers = list(range(first, first + count))

    def step(log: FileLog) -> list[int]:
        log.producer("a", id=id).append([{"n": n, "text": "x" * text_bytes} for n in numbers])
        return numbers

    return step


def transaction(first: int, count: int, text_bytes: int) -> Step:
    numbers = list(range(first, first + count))

    def step(log: FileLog) -> list[int]:
        with log.transaction("job") as tx:
            for n in numbers:
                tx.append("a", {"n": n, "text": "x" * text_bytes})
            tx.set_note("last", str(first))
        return numbers

    return step


def maintain(log: FileLog) -> list[int]:
    log.maintain()
    return []


STEPS: tuple[Step, ...] = (
    append(0, 2, 10),
    append(10, 5, 600),
    transaction(20, 3, 10),
    append(30, 1, 20, id="till"),
    maintain,
    append(40, 12, 800),
    transaction(60, 9, 700),
    append(80, 2, 10),
    maintain,
    append(90, 1, 5, id="till"),
)


def numbers_of(log: FileLog) -> list[int]:
    return [row["n"] for row in log.read("a").to_pylist()]


def check(root: Path, room_bytes: int, name_bytes: int) -> int:
    """Returns how many steps failed."""
    with FileLog.open(root) as log:
        log.create_topic("a", SCHEMA, segment_bytes=3_000)
    disk = FullDisk(room_bytes, name_bytes=name_bytes)
    log = FileLog.open(root, disk=disk)
    stored: list[int] = []
    failed = 0
    for step in STEPS:
        try:
            stored += step(log)
        except DiskFull:
            failed += 1
        assert numbers_of(log) == stored
    disk.room_bytes = 1 << 30
    for step in STEPS:
        stored += step(log)
    assert numbers_of(log) == stored
    log.close()
    with FileLog.open(root) as log:
        assert numbers_of(log) == stored
        assert [finding for finding in log.verify() if finding.kind != "stale"] == []
    return failed


def test_there_is_room_for_the_whole_workload(tmp_path: Path) -> None:
    assert check(tmp_path / "log", ROOM, name_bytes=100) == 0


def test_a_full_disk_fails_cleanly_and_works_again_when_there_is_room(tmp_path: Path) -> None:
    for room_bytes in range(0, ROOM, 1_777):
        check(tmp_path / f"{room_bytes}", room_bytes, name_bytes=100)


@pytest.mark.slow
@pytest.mark.parametrize("name_bytes", [0, 1_000])
def test_a_full_disk_fails_cleanly_wherever_it_is_full(name_bytes: int, tmp_path: Path) -> None:
    for room_bytes in range(0, ROOM, 97):
        check(tmp_path / f"{room_bytes}", room_bytes, name_bytes)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of one mebibyte."""
    mount_point = tmp_path / "tiny"
    mount_point.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount_point)],
        capture_output=True,
        check=False,
        timeout=10,
    )
    if done.returncode:
        pytest.skip("a file system cannot be mounted here")
    yield mount_point
    subprocess.run(["umount", "--lazy", str(mount_point)], check=True, timeout=10)


def test_a_real_full_disk(tiny_disk: Path) -> None:
    log = FileLog.open(tiny_disk / "log")
    log.create_topic("a", SCHEMA)
    stored: list[int] = []
    with pytest.raises(DiskFull, match="make room"):
        for n in range(1000):
            stored += append(n, 1, 10_000)(log)
    assert len(stored) > 20
    assert numbers_of(log) == stored
    subprocess.run(["mount", "-o", "remount,size=4m", str(tiny_disk)], check=True, timeout=10)
    stored += append(5000, 3, 10_000)(log)
    assert numbers_of(log) == stored
    assert log.verify() == []
    log.close()
