"""Retention by age and by size, segments rolled by size and age: old rows go, offsets stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace.errors import OffsetOutOfRange
from headrace.log.file import maintenance
from headrace.log.file.log import FileLog
from tests.waits import wait_until

DAY_US = 24 * 3600 * 1_000_000


class Clock:
    """The time of day, moved by hand."""

    def __init__(self) -> None:
        self.us = 1_800_000_000_000_000

    def __call__(self) -> int:
        return self.us


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("headrace.log.file.store.LogClock.now_us", lambda _clock: clock())
    return clock


@pytest.fixture
def log(tmp_path: Path) -> Iterator[FileLog]:
    with FileLog.open(tmp_path / "log") as log:
        yield log


def fill(log: FileLog, first: int, count: int) -> None:
    with log.producer("t") as producer:
        for number in range(first, first + count):
            producer.append({"a": number})


def rows(log: FileLog) -> list[int]:
    return [row["a"] for row in log.read("t").to_pylist()]


def test_rows_older_than_their_retention_go_and_offsets_stay(log: FileLog, clock: Clock) -> None:
    log.create_topic("t", "a BIGINT", retention="7 days", segment_age="1 day")
    for day in range(10):
        fill(log, 10 * day, 10)
        clock.us += DAY_US + 1
    done = log.maintain()
    assert done["segments_deleted"] > 0
    assert rows(log) == list(range(40, 100))
    assert log.start_offsets("t") == {0: 40}
    assert log.end_offsets("t") == {0: 100}
    with pytest.raises(OffsetOutOfRange, match="earliest kept is 40"):
        log.read("t", 0, 39)


def test_a_topic_that_nobody_writes_any_more_grows_old_too(log: FileLog, clock: Clock) -> None:
    log.create_topic("t", "a BIGINT", retention="7 days")
    fill(log, 0, 10)
    clock.us += 8 * DAY_US
    log.maintain()
    assert rows(log) == []
    assert log.end_offsets("t") == {0: 10}
    fill(log, 10, 1)
    assert rows(log) == [10]


def test_retention_by_bytes_keeps_the_newest(log: FileLog) -> None:
    log.create_topic("t", "a BIGINT", retention_bytes=3000, segment_bytes=1000)
    fill(log, 0, 100)
    log.maintain()
    kept = rows(log)
    assert kept == list(range(kept[0], 100))
    assert 0 < len(kept) < 50
    assert log.stats("t")[0].bytes <= 3000 + 1000


def test_without_retention_everything_stays(log: FileLog, clock: Clock) -> None:
    log.create_topic("t", "a BIGINT", segment_bytes=500)
    fill(log, 0, 20)
    clock.us += 1000 * DAY_US
    assert log.maintain()["segments_deleted"] == 0
    assert rows(log) == list(range(20))


def test_segments_are_rolled_by_size_and_by_age(log: FileLog, clock: Clock) -> None:
    log.create_topic("t", "a BIGINT", segment_bytes=2000, segment_age="1 hour")
    fill(log, 0, 40)
    by_size = log.stats("t")[0].segments
    assert by_size > 2
    clock.us += 2 * 3600 * 1_000_000
    fill(log, 40, 1)
    assert log.stats("t")[0].segments == by_size + 1
    assert rows(log) == list(range(41))


def test_a_reader_that_retention_overtakes_gets_an_error_and_can_go_on(log: FileLog) -> None:
    log.create_topic("t", "a BIGINT", retention_bytes=2000, segment_bytes=500)
    fill(log, 0, 3)
    with log.consumer("t", "slow", max_rows=1) as consumer:
        consumer.poll()
        fill(log, 3, 100)
        log.maintain()
        with pytest.raises(OffsetOutOfRange) as lost:
            consumer.poll()
        consumer.seek(0, lost.value.earliest)
        assert consumer.poll()[0]["a"][0].as_py() == lost.value.earliest
    with log.consumer("t", "easy", on_lost="earliest", max_rows=1) as consumer:
        assert consumer.poll()[0]["a"][0].as_py() == lost.value.earliest


def test_a_read_under_way_ends_with_a_clear_error_when_its_segment_is_removed(log: FileLog) -> None:
    log.create_topic("t", "a BIGINT", retention_bytes=1000, segment_bytes=500)
    fill(log, 0, 100)
    reading = log.read("t")
    log.maintain()
    with pytest.raises(OffsetOutOfRange):
        list(reading)


def test_old_checkpoints_and_journals_go(log: FileLog) -> None:
    log.create_topic("t", "a BIGINT")
    for turn in range(5):
        fill(log, turn, 1)
        maintenance.create_checkpoint(log)
    directory = log.store.journal_directory
    assert len(list(directory.glob("*.checkpoint"))) == 2
    assert len(list(directory.glob("*.journal"))) <= 3
    assert rows(log) == list(range(5))
    with hr.open_log(log.address) as other:
        assert [row["a"] for row in other.read("t").to_pylist()] == list(range(5))


def test_a_handle_that_missed_checkpoints_catches_up(log: FileLog) -> None:
    log.create_topic("t", "a BIGINT")
    with FileLog.open(log.store.root) as sleeper:
        fill(sleeper, 0, 1)
        for turn in range(1, 5):
            fill(log, turn, 1)
            maintenance.create_checkpoint(log)
        assert rows(sleeper) == list(range(5))
        fill(sleeper, 5, 1)
    assert rows(log) == list(range(6))


def test_the_files_of_a_deleted_topic_go(log: FileLog) -> None:
    log.create_topic("t", "a BIGINT")
    fill(log, 0, 1)
    log.delete_topic("t")
    log.maintain()
    assert not list((log.store.root / "topics").iterdir())
    log.create_topic("t", "b STRING")
    assert log.read("t").to_pylist() == []


def test_staging_files_of_dead_owners_are_swept(log: FileLog, clock: Clock) -> None:
    log.create_topic("t", "a BIGINT")
    staged = log.stage(
        "t", [pa.RecordBatch.from_pylist([{"a": 1}], schema=log.topic("t").arrow_schema)]
    )
    assert staged.rows == 1
    assert log.maintain()["staging_swept"] == 0
    clock.us += 2 * DAY_US
    assert log.maintain()["staging_swept"] == 1
    with pytest.raises(hr.errors.TransactionTimedOut), log.transaction("late") as tx:
        tx.adopt(staged)
    assert rows(log) == []


def test_every_commit_woke_maintenance_in_vain_while_a_backup_was_made(
    log: FileLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.create_topic("t", "a BIGINT")
    monkeypatch.setattr(maintenance, "CHECKPOINT_RECORDS", 1)
    monkeypatch.setattr(maintenance, "_PAUSE_S", 3600.0)
    runs, run_maintenance = [0], maintenance.run_maintenance

    def counted(*arguments: Any, **options: Any) -> dict[str, int]:
        runs[0] += 1
        return run_maintenance(*arguments, **options)

    monkeypatch.setattr(maintenance, "run_maintenance", counted)
    with maintenance.maintenance_lock(log, wait=True):  # as a backup does
        fill(log, 0, 1)
        wait_until(lambda: runs[0] > 0)
        fill(log, 1, 200)
    assert runs[0] == 1
