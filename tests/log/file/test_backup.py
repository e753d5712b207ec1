"""Backups of a log that is in use, and copies of one that were made while it was."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from headrace.errors import CorruptionError, InputError, TornCopy
from headrace.log.file import backup as backup_module
from headrace.log.file.disk import Disk, DiskFile
from headrace.log.file.log import FileLog
from headrace.log.file.maintenance import create_checkpoint
from headrace.testing.power_loss import RebootedDisk, RecordingDisk
from tests.short_forms import examples

SCHEMA = "n BIGINT, text STRING"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[FileLog]:
    with FileLog.open(tmp_path / "log") as opened:
        for name in ("a", "b"):
            opened.create_topic(name, SCHEMA, partitions=2, segment_bytes=20_000)
        yield opened


def transfer(log: FileLog, number: int, text_bytes: int = 100) -> None:
    """One transaction with a row for each of two topics."""
    with log.transaction("job") as tx:
        for topic in ("a", "b"):
            tx.append(topic, [{"n": number, "text": "x" * text_bytes}])
        tx.commit_offsets("readers", {"a": {0: 0}})
        tx.set_note("last", str(number))


@contextmanager
def being_written(log: FileLog) -> Iterator[list[int]]:
    """Transactions in a thread, large and small ones. Yields how many there are so far."""
    stop, count, errors = Event(), [0], list[BaseException]()

    def write() -> None:
        try:
            while not stop.is_set():
                transfer(log, count[0], 20_000 if count[0] % 20 == 0 else 100)
                count[0] += 1
                if count[0] % 200 == 0:
                    create_checkpoint(log)
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=write)
    thread.start()
    try:
        while count[0] < 50:
            stop.wait(0.01)
        yield count
    finally:
        stop.set()
        thread.join()
    assert errors == []


def numbers(log: FileLog, topic: str) -> list[int]:
    return sorted(row["n"] for row in log.read(topic).to_pylist())


def check_whole(root: Path, disk: Disk | None = None) -> int:
    """All transactions up to one, and nothing of those behind it."""
    with FileLog.open(root, create=False, disk=disk) as restored:
        last = int(restored.note("last") or -1)
        assert numbers(restored, "a") == numbers(restored, "b") == list(range(last + 1))
        assert restored.verify() == []
        transfer(restored, last + 1)
        assert numbers(restored, "b")[-1] == last + 1
    return last


def test_a_backup_of_a_log_that_is_being_written_has_whole_transactions(
    log: FileLog, tmp_path: Path
) -> None:
    with being_written(log) as count:
        before = count[0]
        result = log.backup(tmp_path / "backup")
        after = count[0]
    assert result.copied_bytes > 10_000
    assert before - 1 <= check_whole(tmp_path / "backup") <= after


def test_a_second_backup_copies_what_is_new_and_follows_what_was_removed(
    log: FileLog, tmp_path: Path
) -> None:
    log.create_table("t", "k BIGINT, v STRING", key="k", segment_bytes=2000, history="0 seconds")
    for number in range(100):
        transfer(log, number)
        log.producer("t").upsert([{"k": number % 3, "v": "x" * 100}])
    first = log.backup(tmp_path / "backup")
    assert log.backup(tmp_path / "backup").copied_bytes == 0
    for number in range(100, 105):
        transfer(log, number)
    second = log.backup(tmp_path / "backup")
    assert 0 < second.copied_bytes < first.copied_bytes / 10
    log.maintain()
    log.delete_topic("b")
    log.create_topic("b", SCHEMA)
    log.backup(tmp_path / "backup")
    copied, original = tmp_path / "backup" / "topics", tmp_path / "log" / "topics"
    names = {path.relative_to(original) for path in original.rglob("*.segment")}
    assert {path.relative_to(copied) for path in copied.rglob("*.segment")} <= names
    with FileLog.open(tmp_path / "backup") as restored:
        assert restored.read("t").to_pylist() == log.read("t").to_pylist()
        assert numbers(restored, "a") == list(range(105))
        assert numbers(restored, "b") == []
        assert restored.verify() == []


def test_many_backups_into_one_directory_while_it_is_written(log: FileLog, tmp_path: Path) -> None:
    with being_written(log):
        for number in range(6):
            log.backup(tmp_path / "backup")
            shutil.copytree(tmp_path / "backup", tmp_path / f"restored{number}")
    lasts = [check_whole(tmp_path / f"restored{number}") for number in range(6)]
    assert lasts == sorted(lasts)


def test_a_backup_that_is_stopped_leaves_the_one_before(
    log: FileLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        transfer(log, number)
    log.backup(tmp_path / "backup")
    for number in range(30, 60):
        transfer(log, number)
    with monkeypatch.context() as patch:

        def die(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(backup_module._Target, "commit", die)
        with pytest.raises(KeyboardInterrupt):
            log.backup(tmp_path / "backup")
    shutil.copytree(tmp_path / "backup", tmp_path / "restored")
    assert check_whole(tmp_path / "restored") == 29
    log.backup(tmp_path / "backup")
    assert check_whole(tmp_path / "backup") == 59


def test_a_directory_with_something_else_in_it_is_refused(log: FileLog, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="no backup"):
        log.backup(other)
    with pytest.raises(InputError, match="own directory"):
        log.backup(tmp_path / "log" / "backup")
    log.backup(tmp_path / "backup")
    with FileLog.open(tmp_path / "backup") as restored:
        transfer(restored, 0)
    with pytest.raises(InputError, match="written to since"):
        log.backup(tmp_path / "backup")


def live_copy(log: FileLog, root: Path, *, first: str) -> None:
    """Copy a log's directory, one part of it a while before the other."""
    parts = sorted(("journal", "topics"), key=lambda name: name != first)
    source = log.store.root
    root.mkdir()
    shutil.copy(source / "headrace.json", root)
    shutil.copytree(source / parts[0], root / parts[0])
    for number in range(60, 120):
        transfer(log, number, 20_000 if number % 7 == 0 else 100)
    if parts[1] == "journal":
        create_checkpoint(log)
        create_checkpoint(log)
    shutil.copytree(source / parts[1], root / parts[1])
    shutil.copy(source / "journal" / "durable", root / "journal" / "durable")


@pytest.mark.parametrize("first", ["journal", "topics"])
def test_a_copy_of_a_live_log_does_not_open_with_torn_transactions(
    log: FileLog, tmp_path: Path, first: str
) -> None:
    for number in range(60):
        transfer(log, number)
    live_copy(log, tmp_path / "copy", first=first)
    for _ in range(2):
        with pytest.raises(TornCopy, match="missing") as refused:
            FileLog.open(tmp_path / "copy")
        assert "headrace log backup" in str(refused.value)
    with FileLog.open(tmp_path / "copy", accept_torn_copy=True) as accepted:
        rows: Any = accepted.read("a", on_corrupt="skip").to_pylist()
        assert len(rows) >= 60
    with FileLog.open(tmp_path / "copy") as opened:
        assert Counter(row["n"] for row in opened.read("a", on_corrupt="skip").to_pylist())


def test_a_copy_of_a_log_at_rest_opens_as_it_is(log: FileLog, tmp_path: Path) -> None:
    for number in range(60):
        transfer(log, number, 20_000 if number % 7 == 0 else 100)
    log.close()
    shutil.copytree(tmp_path / "log", tmp_path / "copy")
    assert check_whole(tmp_path / "copy") == 59


def compacted_backup(log: FileLog, tmp_path: Path) -> Path:
    """A backup of a table, which is compacted afterwards."""
    log.create_table("t", "k BIGINT, v STRING", key="k", segment_bytes=2000, history="0 seconds")
    for number in range(60):
        log.producer("t").upsert([{"k": number % 3, "v": "x" * 100}])
    log.backup(tmp_path / "backup")
    log.maintain()
    return tmp_path / "backup"


def test_a_backup_that_is_stopped_while_it_copies_rewritten_segments_destroyed_the_one_before(
    log: FileLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = compacted_backup(log, tmp_path)
    with FileLog.open(tmp_path / "log") as other:
        assert len(other.read("t").to_pylist()) < 60
    with monkeypatch.context() as patch:

        def die(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(DiskFile, "copy_from", die)
        with pytest.raises(KeyboardInterrupt):
            log.backup(rows)
    shutil.copytree(rows, tmp_path / "restored")
    with FileLog.open(tmp_path / "restored") as restored:
        assert len(restored.read("t").to_pylist()) == 60
        assert restored.verify() == []
    log.backup(rows)
    with FileLog.open(rows) as restored:
        assert restored.read("t").to_pylist() == log.read("t").to_pylist()
        assert restored.verify() == []


def segments_of(log: FileLog, topic: str) -> list[Path]:
    return sorted((log.store.root / "topics").glob(f"{topic}~*/0/*.segment"))


@pytest.mark.parametrize("damage", ["missing", "short", "newest"])
def test_damage_of_the_log_was_copied_over_a_good_backup(
    log: FileLog, tmp_path: Path, damage: str
) -> None:
    for number in range(40):
        log.producer("a").append([{"n": number, "text": "x" * 2000}], partition=0)
    log.backup(tmp_path / "backup")
    victim = segments_of(log, "a")[-1 if damage == "newest" else 1]
    if damage == "short":
        victim.write_bytes(victim.read_bytes()[:-3000])
    else:
        victim.unlink()
    log.cache.forget(log.topic_state("a").directory, 0)
    with pytest.raises(CorruptionError):
        log.backup(tmp_path / "backup")
    with FileLog.open(tmp_path / "backup") as restored:
        assert numbers(restored, "a") == list(range(40))


def test_a_backup_of_another_log_into_the_same_directory_erased_the_first(
    log: FileLog, tmp_path: Path
) -> None:
    transfer(log, 0)
    log.backup(tmp_path / "backup")
    with (
        FileLog.open(tmp_path / "other") as other,
        pytest.raises(InputError, match="of another log"),
    ):
        other.backup(tmp_path / "backup")
    assert check_whole(tmp_path / "backup") == 0


def test_a_backup_that_was_cut_within_a_batch_goes_on(log: FileLog, tmp_path: Path) -> None:
    for number in range(20):
        transfer(log, number)
    log.backup(tmp_path / "backup")
    copied = max((tmp_path / "backup").rglob("*.segment"), key=lambda path: path.stat().st_size)
    copied.write_bytes(copied.read_bytes()[:-77])
    log.backup(tmp_path / "backup")
    assert check_whole(tmp_path / "backup") == 19


def test_a_torn_copy_that_cannot_be_written_showed_half_transactions(
    log: FileLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(60):
        transfer(log, number)
    live_copy(log, tmp_path / "copy", first="journal")
    monkeypatch.setattr("headrace.log.file.store.os.access", lambda *_: False)
    with pytest.raises(TornCopy):
        FileLog.open(tmp_path / "copy")


def test_two_backups_into_one_directory_at_once_both_succeed(log: FileLog, tmp_path: Path) -> None:
    """From two handles, as from two processes: the second one waits, and copies what is new."""
    errors = list[BaseException]()

    def back_up() -> None:
        try:
            with FileLog.open(tmp_path / "log") as other:
                other.backup(tmp_path / "backup")
        except BaseException as error:
            errors.append(error)

    with being_written(log):
        threads = [Thread(target=back_up) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert check_whole(tmp_path / "backup") >= 49


@pytest.mark.parametrize("writable", [True, False], ids=["writable", "read-only"])
def test_a_backup_that_was_copied_while_the_next_one_was_made_opened_without_a_word(
    log: FileLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    for number in range(30):
        transfer(log, number)
    log.backup(tmp_path / "backup")
    (tmp_path / "copy").mkdir()
    shutil.copytree(tmp_path / "backup" / "topics", tmp_path / "copy" / "topics")
    transfer(log, 30)
    log.backup(tmp_path / "backup")
    for name in ("headrace.json", "backup.json"):
        shutil.copy(tmp_path / "backup" / name, tmp_path / "copy")
    shutil.copytree(tmp_path / "backup" / "journal", tmp_path / "copy" / "journal")
    monkeypatch.setattr("headrace.log.file.store.os.access", lambda *_: writable)
    for _ in range(2):
        with pytest.raises(TornCopy, match="not whole"):
            FileLog.open(tmp_path / "copy")
    with FileLog.open(tmp_path / "backup", create=False) as restored:
        assert numbers(restored, "a") == numbers(restored, "b") == list(range(31))


def test_backups_of_two_logs_into_one_directory_at_once_were_mixed(
    log: FileLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer(log, 0)
    copy_partition = backup_module._copy_partition
    refused: list[str] = []

    def copy_while_another_begins(*arguments: Any) -> None:
        monkeypatch.setattr(backup_module, "_copy_partition", copy_partition)
        with FileLog.open(tmp_path / "other") as other:
            other.create_topic("c", SCHEMA)
            with pytest.raises(InputError) as error:
                other.backup(tmp_path / "backup")
            refused.append(str(error.value))
        copy_partition(*arguments)

    monkeypatch.setattr(backup_module, "_copy_partition", copy_while_another_begins)
    log.backup(tmp_path / "backup")
    assert "is being made just now" in refused[0]
    assert check_whole(tmp_path / "backup") == 0


def back_up_twice(root: Path) -> tuple[RecordingDisk, int]:
    """Two backups of a log that is compacted between them. Returns the disk, and after how many
    changes the first backup was complete.
    """
    disk = RecordingDisk(root)
    with FileLog.open(root / "log", disk=disk) as log:
        for name in ("a", "b"):
            log.create_topic(name, SCHEMA, segment_bytes=4_000)
        log.create_table("t", "k BIGINT, v STRING", key="k", segment_bytes=2000, history="0 s")
        for number in range(40):
            transfer(log, number)
            log.producer("t").upsert([{"k": number % 3, "v": "x" * 100}])
        log.backup(root / "backup")
        complete = len(disk.trace.changes)
        for number in range(40, 60):
            transfer(log, number)
        log.maintain()
        log.backup(root / "backup")
        disk.freeze()
    return disk, complete


@pytest.mark.parametrize("mode", ["dropped", "torn", "mixed"])
def test_a_backup_survives_a_loss_of_power_while_the_next_one_is_made(
    tmp_path: Path, mode: str
) -> None:
    disk, complete = back_up_twice(tmp_path / "healthy")
    trace, chance = disk.trace, random.Random(mode)
    changes = range(complete, len(trace.changes) + 1)
    backup_changes = [
        index for index in changes if index and trace.changes[index - 1].path.startswith("backup")
    ]
    lasts = set()
    for index in chance.sample(backup_changes, min(examples(40), len(backup_changes))):
        root = tmp_path / "crashed"
        trace.cut_power(index, root, mode=mode, chance=chance)
        lasts.add(check_whole(root / "backup", RebootedDisk()))
        with FileLog.open(root / "backup", disk=RebootedDisk()) as restored:
            assert {row["k"] for row in restored.read("t").to_pylist()} == {0, 1, 2}
        shutil.rmtree(root)
    assert lasts <= {39, 59}


def newest(log: FileLog) -> dict[int, int]:
    """The newest number of each key of the topic "t"."""
    return {row["k"]: row["n"] for row in log.read("t").to_pylist()}


def copy_across_a_compaction(log: FileLog, root: Path, *, other_keys: bool) -> None:
    """Copy the journal; append newer rows of the same keys, and compact; then copy the segments.
    With other keys between them, segments have no room to be merged.
    """
    log.create_topic(
        "t", "k BIGINT, n BIGINT, text STRING", key="k", compact=True, segment_bytes=20_000
    )
    producer, source = log.producer("t", id="job"), log.store.root

    def append(start: int, stop: int) -> None:
        for number in range(start, stop):
            key = 1000 + number if other_keys and number % 5 else number % 5
            producer.append({"k": key, "n": number, "text": "x" * 1000}, sequence=number)

    append(0, 50)
    root.mkdir()
    shutil.copy(source / "headrace.json", root)
    shutil.copytree(source / "journal", root / "journal")
    append(50, 100)
    log.maintain()
    log.maintain()
    shutil.copytree(source / "topics", root / "topics")


@pytest.mark.parametrize("other_keys", [False, True], ids=["merged", "superseded"])
def test_a_copy_that_was_compacted_behind_its_journal_had_lost_keys_without_a_word(
    log: FileLog, tmp_path: Path, other_keys: bool
) -> None:
    copy_across_a_compaction(log, tmp_path / "copy", other_keys=other_keys)
    for _ in range(2):
        with pytest.raises(TornCopy, match="compaction has removed older"):
            FileLog.open(tmp_path / "copy")


@pytest.mark.parametrize("other_keys", [False, True], ids=["merged", "superseded"])
def test_rows_behind_the_journal_of_a_copy_were_in_the_way_of_new_ones(
    log: FileLog, tmp_path: Path, other_keys: bool
) -> None:
    copy_across_a_compaction(log, tmp_path / "copy", other_keys=other_keys)
    with FileLog.open(tmp_path / "copy", accept_torn_copy=True) as accepted:
        assert newest(accepted) == newest(log)
        producer = accepted.producer("t", id="job")
        assert producer.last_sequence == 99
        producer.append({"k": 5, "n": 100, "text": "new"}, sequence=100)
    (tmp_path / "copy" / "journal" / "durable").unlink()  # recovery, as after a loss of power
    with FileLog.open(tmp_path / "copy") as opened:
        assert newest(opened) == newest(log) | {5: 100}
        assert opened.verify() == []
