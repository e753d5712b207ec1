"""The newest part of the journal is damaged or gone, on a machine that has not restarted since:
what the segments know is brought back, for readers too, and what is lost is said.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from headrace.log.file.log import FileLog
from headrace.log.file.maintenance import create_checkpoint
from headrace.testing.power_loss import RebootedDisk

SCHEMA = "n BIGINT"
KNOWN, NEW = 3, 6
"""Appends before the last checkpoint, and in all."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two producers: one is known to the checkpoint, one began after it."""
    root = tmp_path / "log"
    with FileLog.open(root) as log:
        log.create_topic("a", SCHEMA, partitions=2)
        loader = log.producer("a", id="loader")
        for number in range(KNOWN):
            loader.append([{"n": number}], sequence=number)
        create_checkpoint(log)
        late = log.producer("a", id="late")
        for number in range(KNOWN, NEW):
            loader.append([{"n": number}], sequence=number)
            late.append([{"n": 100 + number}], sequence=number)
        with log.transaction("job") as tx:
            tx.commit_offsets("readers", {"a": {0: 2}})
    return root


def newest_journal(root: Path) -> Path:
    return max((root / "journal").glob("*.journal"))


def garble_from(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    for at in range(position, len(content), 7):
        content[at] ^= 0x55
    path.write_bytes(bytes(content))


def numbers(log: FileLog) -> list[int]:
    return sorted(row["n"] for row in log.read("a").to_pylist())


EXPECTED = [*range(NEW), *(100 + number for number in range(KNOWN, NEW))]


def check_producers(log: FileLog) -> None:
    """A repeat is a repeat, and the next append is new."""
    for name in ("loader", "late"):
        producer = log.producer("a", id=name)
        assert producer.last_sequence == NEW - 1
        assert producer.append([{"n": -1}], sequence=NEW - 1).duplicate
        assert producer.append([{"n": -1}], sequence=KNOWN).duplicate
        assert not producer.append([{"n": 1000}], sequence=NEW).duplicate
    assert numbers(log) == [*EXPECTED, 1000, 1000]


def test_a_repeat_is_not_stored_twice_after_damage_at_the_journals_tail(root: Path) -> None:
    garble_from(newest_journal(root), 100)
    with FileLog.open(root) as log:
        check_producers(log)
    with FileLog.open(root) as log:
        assert numbers(log) == [*EXPECTED, 1000, 1000]
        assert log.producer("a", id="late").last_sequence == NEW


def test_readers_do_not_silently_get_fewer_rows_until_somebody_writes(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    garble_from(newest_journal(root), 100)
    with caplog.at_level(logging.ERROR), FileLog.open(root) as log:
        assert numbers(log) == EXPECTED
    assert "Commits from number" in caplog.text
    assert "rows may be delivered again" in caplog.text


def test_nor_do_readers_who_may_not_write(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = newest_journal(root)
    garble_from(path, 100)
    before = path.read_bytes()
    monkeypatch.setattr("headrace.log.file.store.os.access", lambda *_: False)
    with FileLog.open(root) as log:
        assert numbers(log) == EXPECTED
    assert path.read_bytes() == before


@pytest.mark.parametrize("with_reboot", [False, True])
def test_a_missing_newest_journal_file_does_not_make_everything_unreadable(
    root: Path, with_reboot: bool
) -> None:
    newest_journal(root).unlink()
    with FileLog.open(root, disk=RebootedDisk() if with_reboot else None) as log:
        assert numbers(log) == EXPECTED
        check_producers(log)
    with FileLog.open(root) as log:
        assert numbers(log) == [*EXPECTED, 1000, 1000]


def test_nor_for_readers_who_may_not_write(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest_journal(root).unlink()
    monkeypatch.setattr("headrace.log.file.store.os.access", lambda *_: False)
    with FileLog.open(root) as log:
        assert numbers(log) == EXPECTED


def test_a_log_that_is_open_goes_on_when_its_newest_journal_file_is_damaged(root: Path) -> None:
    with FileLog.open(root) as log, FileLog.open(root) as other:
        assert numbers(log) == numbers(other) == EXPECTED
        garble_from(newest_journal(root), 100)
        log.producer("a").append([{"n": 7000}], partition=0)
        assert numbers(other) == [*EXPECTED, 7000]
    with FileLog.open(root) as log:
        assert numbers(log) == [*EXPECTED, 7000]
        check = log.producer("a", id="loader")
        assert check.append([{"n": -1}], sequence=NEW - 1).duplicate


def test_a_salvaged_large_append_made_the_log_unusable_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It became a segment by being moved, which must not be tried again."""
    monkeypatch.setattr("headrace.log.file.producer.MAX_COMMIT_BYTES", 1000)
    monkeypatch.setattr("headrace.log.file.staging.MAX_COPIED_BYTES", 1000)
    root = tmp_path / "log"
    with FileLog.open(root) as log:
        log.create_topic("a", SCHEMA)
        create_checkpoint(log)
        log.producer("a").append([{"n": number} for number in range(5000)])
    garble_from(newest_journal(root), 100)
    with FileLog.open(root) as log:
        assert numbers(log) == list(range(5000))
    for disk in (None, RebootedDisk()):
        with FileLog.open(root, disk=disk) as log:
            log.producer("a").append([{"n": 5000}])
            assert numbers(log)[:5001] == list(range(5001))


def test_a_stored_number_was_refused_after_damage_in_the_middle_of_the_journal(
    tmp_path: Path,
) -> None:
    root = tmp_path / "log"
    with FileLog.open(root) as log:
        log.create_topic("a", SCHEMA)
        producer = log.producer("a", id="loader")
        for number in range(10):
            producer.append([{"n": number}], sequence=number)
            if number == 5:
                middle = newest_journal(root).stat().st_size - 20
    path = newest_journal(root)
    content = bytearray(path.read_bytes())
    content[middle] ^= 0xFF
    path.write_bytes(bytes(content))
    for disk in (None, RebootedDisk()):
        with FileLog.open(root, disk=disk) as log:
            producer = log.producer("a", id="loader")
            assert all(producer.append([{"n": -1}], sequence=n).duplicate for n in range(10))
            assert numbers(log) == list(range(10))
