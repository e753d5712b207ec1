"""Who is alive, and which lease is over, when clocks are wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace as hr
from headrace.errors import MemberFenced
from headrace.log.file import liveness
from headrace.log.file.consumer import FileConsumer
from headrace.log.file.disk import Disk
from headrace.log.file.liveness import Heartbeat, MemberObserver, heartbeat_path


@pytest.fixture
def log(tmp_path: Path) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as opened:
        opened.create_topic("t", "n BIGINT", partitions=2)
        yield opened


def on_another_machine(path: Path, text: str = "1") -> None:
    """A heartbeat as another machine writes it, whose clock says nothing here."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"clock": "elsewhere", "us": 7, "count": text}))


def test_a_member_with_a_wrong_wall_clock_drove_the_generation_up(
    log: hr.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each found the other one dead, and took its partitions."""
    real_time, real_time_ns = time.time, time.time_ns
    with (
        log.consumer("t", group="g", session_timeout="300 ms") as one,
        log.consumer("t", group="g", session_timeout="300 ms") as other,
    ):
        generations = []
        for step in range(40):
            ahead_s = 60 if step % 2 else -60
            monkeypatch.setattr(time, "time", lambda ahead_s=ahead_s: real_time() + ahead_s)
            monkeypatch.setattr(
                time, "time_ns", lambda ahead_s=ahead_s: real_time_ns() + ahead_s * 10**9
            )
            (one if step % 2 else other).poll(timeout="0 seconds")
            time.sleep(0.03)
            generations.append(log.group("g").generation)
        assert generations[-1] == generations[6], generations
        assert len(one.assignment()["t"]) == len(other.assignment()["t"]) == 1


def test_a_heartbeat_of_another_machine_is_dead_when_it_was_not_seen_to_change(
    tmp_path: Path,
) -> None:
    path = heartbeat_path(tmp_path, "g", "m")
    members = {"m": {"timeout_us": 200_000}}
    observer = MemberObserver(tmp_path)
    assert observer.dead("g", members) == ["m"], "there is no heartbeat at all"
    on_another_machine(path)
    os.utime(path, (0, 0))  # as old as can be, by the file system's clock
    for text in "234":
        assert observer.dead("g", members) == []
        time.sleep(0.15)
        on_another_machine(path, text)
    assert observer.dead("g", members) == []
    time.sleep(0.25)
    assert observer.dead("g", members) == ["m"]
    assert MemberObserver(tmp_path).dead("g", members) == [], "who comes new has to watch first"
    assert MemberObserver(tmp_path).await_dead("g", members) == ["m"]


def test_a_heartbeat_of_this_machine_is_as_old_as_it_says(tmp_path: Path) -> None:
    path = heartbeat_path(tmp_path, "g", "m")
    heartbeat = Heartbeat(Disk(), path, timeout_us=10_000_000, max_poll_interval_us=10_000_000)
    path.parent.mkdir()
    heartbeat.write()
    os.utime(path, (0, 0))
    observer = MemberObserver(tmp_path)
    members = {"m": {"timeout_us": 100_000}}
    assert observer.dead("g", members) == []
    time.sleep(0.15)
    assert MemberObserver(tmp_path).dead("g", members) == ["m"]
    assert 0.1 < observer.heartbeat_age_s("g", "m") < 5


def test_heartbeat_files_of_dead_members_stayed_for_ever(log: hr.Log, tmp_path: Path) -> None:
    script = (
        "import os, sys, headrace as hr\n"
        f"log = hr.open_log({log.address!r})\n"
        "consumer = log.consumer('t', group='g', session_timeout='200 ms')\n"
        "os._exit(1)\n"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    files = tmp_path / "log" / "groups"
    assert len(list(files.iterdir())) >= 1
    time.sleep(0.3)
    with log.consumer("t", group="g") as heir:
        assert heir.assignment() == {"t": (0, 1)}
        assert len(list(files.iterdir())) == 1
    assert list(files.iterdir()) == []


def test_a_group_whose_member_was_killed_can_be_reset_and_deleted(log: hr.Log) -> None:
    consumer = log.consumer("t", group="g", session_timeout="300 ms")
    assert isinstance(consumer, FileConsumer)
    for refused in (
        lambda: log.reset_group("g", "t", "latest"),
        lambda: log.delete_group("g"),
    ):
        with pytest.raises(MemberFenced, match="stop them"):
            refused()
    consumer._heartbeat._stop.set()
    consumer._heartbeat._thread.join()
    on_another_machine(consumer._heartbeat.path)  # it was killed there
    log.delete_group("g")
    assert log.groups() == []
    assert not consumer._heartbeat.path.exists()


def test_the_monotonic_clock_of_a_machine_is_the_same_in_all_its_processes() -> None:
    script = (
        "from headrace.log.file.liveness import machine_clock, monotonic_us\n"
        "print(machine_clock(), monotonic_us())"
    )
    before = liveness.monotonic_us()
    answer = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60
    ).stdout.split()
    assert answer[0] == liveness.machine_clock()
    assert before < int(answer[1]) < liveness.monotonic_us()


def test_a_dead_member_stayed_in_a_group_that_nobody_else_read(log: hr.Log, tmp_path: Path) -> None:
    script = (
        "import os, headrace as hr\n"
        f"hr.open_log({log.address!r}).consumer('t', group='g', session_timeout='200 ms')\n"
        "os._exit(1)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    time.sleep(0.3)
    assert len(log.group("g").members) == 1
    orphan = tmp_path / "log" / "groups" / "g~gone-1-2"
    orphan.write_text(json.dumps({"clock": liveness.machine_clock(), "us": 0, "count": 1}))
    log.maintain()
    assert log.group("g").members == ()
    assert list((tmp_path / "log" / "groups").iterdir()) == []
