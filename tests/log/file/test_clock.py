"""Clocks that are wrong: of one process, and of the machine."""

from __future__ import annotations

import logging
import random
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.log.file.log import FileLog
from headrace.log.file.maintenance import create_checkpoint
from headrace.log.file.state import MAX_CLOCK_STEPS, State
from tests.log.file.other_processes import started

HOUR_US = 3600 * 1_000_000
SCHEMA = "n BIGINT"


def append_an_hour_ahead(root: Path, ahead_s: int) -> None:
    """A process whose clock is wrong."""
    true_time_ns = time.time_ns
    time.time_ns = lambda: true_time_ns() + ahead_s * 1_000_000_000
    with FileLog.open(root) as log:
        log.producer("a").append([{"n": 1}])


def times_us(log: FileLog) -> list[int]:
    return [int(row["_timestamp"].timestamp() * 1e6) for row in log.read("a").to_pylist()]


@pytest.mark.parametrize("ahead_s", [3600, -3600])
def test_one_append_from_a_wrong_clock_does_not_move_append_times(
    tmp_path: Path, ahead_s: int
) -> None:
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA)
        log.producer("a").append([{"n": 0}])
        other = started(append_an_hour_ahead, tmp_path / "log", ahead_s)
        other.join()
        log.producer("a").append([{"n": 2}])
        times = times_us(log)
        assert times == sorted(times)
        assert abs(times[-1] - time.time_ns() // 1000) < 60_000_000
        assert times[-1] - times[0] < 60_000_000


@pytest.mark.parametrize("step_s", [3600, -3600])
def test_a_clock_that_is_set_between_two_appends_does_not_move_append_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    """The second append comes long before the next look at the machine's clock is due."""
    true_time_ns = time.time_ns
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA)
        log.producer("a").append([{"n": 0}])
        monkeypatch.setattr(time, "time_ns", lambda: true_time_ns() + step_s * 1_000_000_000)
        log.producer("a").append([{"n": 1}])
        monkeypatch.undo()
        log.producer("a").append([{"n": 2}])
        times = times_us(log)
        assert times == sorted(times)
        assert times[-1] - times[0] < 60_000_000


def test_a_clock_that_is_set_back_does_not_freeze_append_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_us = time.time_ns() // 1000
    ahead = [HOUR_US]
    monkeypatch.setattr("headrace.log.file.store.LogClock.now_us", lambda _clock: now_us + ahead[0])
    with FileLog.open(tmp_path / "log") as log, caplog.at_level(logging.ERROR):
        log.create_topic("a", SCHEMA, segment_bytes=1)
        for number in range(4):
            log.producer("a").append([{"n": number}])
        ahead[0] = 0
        for number in range(4, 8):
            ahead[0] += 1_000_000
            log.producer("a").append([{"n": number}])
        assert "was set back" in caplog.text
        times = times_us(log)
        assert times[3] == now_us + HOUR_US
        assert times[4:] == [now_us + second * 1_000_000 for second in (1, 2, 3, 4)]
        assert [row["n"] for row in log.read("a").to_pylist()] == list(range(8))
        create_checkpoint(log)
    with FileLog.open(tmp_path / "log") as log:
        # All rows of a time or later are at its offset or behind it.
        assert log.offsets_at("a", (now_us + HOUR_US) / 1e6) == {0: 0}
        assert log.offsets_at("a", now_us / 1e6 + 3) == {0: 0}
        assert log.offsets_at("a", (now_us + 2 * HOUR_US) / 1e6) == {0: 8}
        log.producer("a").append([{"n": 8}])
        assert log.verify() == []


def test_a_clock_that_steps_back_a_little_keeps_append_times_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(2_000_000_000, 0, -1_000_000))
    monkeypatch.setattr("headrace.log.file.store.LogClock.now_us", lambda _clock: next(clock))
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA)
        for number in range(3):
            log.producer("a").append([{"n": number}])
        assert len(set(times_us(log))) == 1


def test_rows_of_a_clock_that_was_ahead_froze_retention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_us = [time.time_ns() // 1000 + 365 * 24 * HOUR_US]
    monkeypatch.setattr("headrace.log.file.store.LogClock.now_us", lambda _clock: now_us[0])
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA, retention="1 hour")
        log.producer("a").append([{"n": 0}])
        now_us[0] -= 365 * 24 * HOUR_US
        log.producer("a").append([{"n": 1}])
        now_us[0] += 4 * 24 * HOUR_US
        log.maintain()
        log.maintain()
        assert log.read("a").to_pylist() == []
        log.producer("a").append([{"n": 2}])
        log.maintain()
        assert [row["n"] for row in log.read("a").to_pylist()] == [2]


def test_looking_up_a_time_read_every_index_for_ever_after_a_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_us = [time.time_ns() // 1000]
    monkeypatch.setattr("headrace.log.file.store.LogClock.now_us", lambda _clock: now_us[0])
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA, segment_bytes=1)
        producer = log.producer("a")
        times = list[int]()
        for number in range(200):
            now_us[0] += 60_000_000
            if number == 100:
                now_us[0] -= HOUR_US
            producer.append([{"n": number}])
            times.append(now_us[0])
        create_checkpoint(log)
    with FileLog.open(tmp_path / "log") as log:
        opened = list[str]()
        segment = log.cache.segment

        def counted(*names: Any) -> Any:
            opened.append(names[-1])
            return segment(*names)

        monkeypatch.setattr(log.cache, "segment", counted)
        for at in (10, 190):  # before the hour that was there twice, and after it
            opened.clear()
            assert log.offsets_at("a", times[at] / 1e6) == {0: at}
            assert len(opened) < 20
        opened.clear()
        assert log.offsets_at("a", times[95] / 1e6) == {0: 95}
        assert len(opened) < 100


@pytest.mark.parametrize("seed", range(6))
def test_the_first_offset_since_a_time_is_right_whatever_clocks_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    now_us = [time.time_ns() // 1000]
    monkeypatch.setattr("headrace.log.file.store.LogClock.now_us", lambda _clock: now_us[0])
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA, partitions=2, segment_bytes=rng.choice([1, 600]))
        log.create_topic("b", SCHEMA)
        for number in range(60):
            now_us[0] += rng.choice([1, 1, 1, 1, -1, 9]) * rng.randrange(20, 100) * 1_000_000
            topic = rng.choice(["a", "a", "a", "b"])
            partition = rng.randrange(2) if topic == "a" else 0
            log.producer(topic).append([{"n": number}], partition=partition)
            if number == 30:
                create_checkpoint(log)
    with FileLog.open(tmp_path / "log") as log:
        for topic, partitions in (("a", 2), ("b", 1)):
            rows = log.read(topic).to_pylist()
            for partition in range(partitions):
                here = [row for row in rows if row["_partition"] == partition]
                times = [int(row["_timestamp"].timestamp() * 1e6) for row in here]
                wanted = [at + more for at in times for more in (-500_000, 0, 500_000)]
                for at_us in wanted:
                    first = next((n for n, t in enumerate(times) if t >= at_us), len(times))
                    assert log.offsets_at(topic, at_us / 1e6)[partition] == first


def test_steps_of_clocks_take_little_room() -> None:
    state, rng = State(), random.Random(1)
    for commit in range(5_000):
        state.apply(commit, rng.randrange(1 << 40) if commit % 10 else commit << 40, [])
    assert len(state.clock_steps) <= MAX_CLOCK_STEPS
    flat = [time_us for step in state.clock_steps for time_us in step]
    assert flat == sorted(flat)
    assert State.load(state.dump()).clock_steps == state.clock_steps
