"""Clocks that are wrong: of one process, and of the machine."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from headrace.log.file.log import FileLog
from headrace.log.file.maintenance import create_checkpoint
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
