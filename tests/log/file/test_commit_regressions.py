"""Commits that went wrong once, each test named after what it was."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from random import Random
from threading import Thread
from types import ModuleType
from typing import Any

import pytest

from headrace.errors import DiskFull, InputError, RetryError
from headrace.log.file.disk import DiskFile
from headrace.log.file.log import FileLog
from headrace.testing.power_loss import FullDisk, RebootedDisk, RecordingDisk
from tests.log.file.small_log import SCHEMA, fail_next_commit, fill, numbers


def test_a_segment_begun_by_a_failed_commit_hid_rows_stored_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA, segment_bytes=2000)
        fill(log, "a", 0, 2)
        fail_next_commit(log, monkeypatch)
        with pytest.raises(DiskFull):
            fill(log, "a", 66, 3, 1000)  # would begin another segment
        fill(log, "a", 2, 2)  # does not
        assert numbers(log, "a") == [0, 1, 2, 3]
    with FileLog.open(tmp_path / "log") as log:
        assert numbers(log, "a") == [0, 1, 2, 3]
        fill(log, "a", 4, 3, 1000)
        assert numbers(log, "a") == [0, 1, 2, 3, 4, 5, 6]
        assert log.verify() == []


def test_rows_of_a_failed_commit_were_read_when_a_staged_file_took_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA)
        fail_next_commit(log, monkeypatch)
        with pytest.raises(DiskFull):
            fill(log, "a", 66, 3)
        monkeypatch.setattr("headrace.log.file.producer.MAX_COMMIT_BYTES", 100)
        monkeypatch.setattr("headrace.log.file.staging.MAX_COPIED_BYTES", 0)
        fill(log, "a", 0, 3)
        assert numbers(log, "a") == [0, 1, 2]
    with FileLog.open(tmp_path / "log") as log:
        assert numbers(log, "a") == [0, 1, 2]
        assert log.verify() == []


def test_a_transaction_that_filled_several_segments_was_refused(tmp_path: Path) -> None:
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA, segment_bytes=1000)
        with log.transaction("job") as tx:
            for n in range(3):
                tx.append("a", {"n": n, "text": "x" * 900})
        assert numbers(log, "a") == [0, 1, 2]


def test_large_rows_for_two_segments_in_one_commit_were_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.log.file.committer.INLINE_BYTES", 0)
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA, segment_bytes=1000)
        fill(log, "a", 0, 1, 900)
        with log.transaction("job") as tx:
            for n in range(1, 4):
                tx.append("a", {"n": n, "text": "x" * 900})
        assert numbers(log, "a") == [0, 1, 2, 3]


def test_large_rows_for_many_partitions_in_one_commit_were_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.log.file.committer.INLINE_BYTES", 0)
    monkeypatch.setattr("headrace.log.file.store._MAX_OPEN_SEGMENTS", 2)
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA, partitions=5)
        fill(log, "a", 0, 10)
        assert sorted(numbers(log, "a")) == list(range(10))


def test_a_repeat_of_a_staged_append_could_not_be_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.log.file.producer.MAX_COMMIT_BYTES", 100)
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA)
        till = log.producer("a", id="till")
        first, *_ = [till.append({"n": n, "text": "x"}, sequence=n) for n in range(10)]
        again = till.append({"n": 0, "text": "x"}, sequence=0)
        assert again.duplicate
        assert again.partitions() == first.partitions()


def test_staged_rows_were_removed_when_it_was_not_known_whether_they_were_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.log.file.producer.MAX_COMMIT_BYTES", 100)
    monkeypatch.setattr("headrace.log.file.staging.MAX_COPIED_BYTES", 0)
    log = FileLog.open(tmp_path / "log")
    log.create_topic("a", SCHEMA)

    def broken(_: object) -> None:
        raise OSError("the disk is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(
            DiskFile, "sync", lambda file: broken(file) if file.path.suffix == ".journal" else None
        )
        with pytest.raises(RetryError, match="not known"):
            fill(log, "a", 0, 3)
    with pytest.raises(RetryError, match="open the log again"):
        fill(log, "a", 3, 1)
    log.close()
    with FileLog.open(tmp_path / "log") as log:
        fill(log, "a", 3, 1)
        assert numbers(log, "a") == [0, 1, 2, 3]
        assert log.verify() == []


def test_a_staged_file_that_could_not_be_moved_was_missing_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.log.file.producer.MAX_COMMIT_BYTES", 100)
    monkeypatch.setattr("headrace.log.file.staging.MAX_COPIED_BYTES", 0)
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA)

        def no_room(*_: object) -> None:
            monkeypatch.undo()
            raise OSError("no room for another name")

        monkeypatch.setattr(log.store.disk, "rename", no_room)
        with pytest.raises(RetryError, match="not known"):
            fill(log, "a", 0, 3)
        fill(log, "a", 3, 1)
        assert numbers(log, "a") == [0, 1, 2, 3]


def test_a_transaction_whose_commit_failed_could_not_be_given_up_or_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.log.file.transaction.MAX_BYTES_IN_MEMORY", 100)
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA)
        for ending in ("abort", "commit"):
            tx = log.transaction("job")
            tx.append("a", {"n": 1, "text": "x" * 200})
            with monkeypatch.context() as patch:
                fail_next_commit(log, patch)
                with pytest.raises(DiskFull):
                    tx.commit()
            getattr(tx, ending)()
        assert numbers(log, "a") == [1]


def test_rows_of_a_transaction_were_doubled_when_there_was_no_room_for_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.log.file.transaction.MAX_BYTES_IN_MEMORY", 500)
    disk = FullDisk(1 << 20)
    with FileLog.open(tmp_path / "log", disk=disk) as log:
        log.create_topic("a", SCHEMA)
        tx = log.transaction("job")
        tx.append("a", {"n": 1, "text": "x"})
        disk.room_bytes = 1500
        with pytest.raises(DiskFull):
            tx.append("a", {"n": 2, "text": "x" * 1000})
        disk.room_bytes = 1 << 20
        with pytest.raises(InputError, match="ended"):
            tx.append("a", {"n": 2, "text": "x" * 1000})
        assert numbers(log, "a") == []


def test_a_failed_append_came_back_when_power_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = RecordingDisk(tmp_path / "before")
    log = FileLog.open(tmp_path / "before" / "log", disk=disk)
    log.create_topic("a", SCHEMA)
    write = log.committer._write_journal

    def fails_late(*arguments: Any) -> None:
        write(*arguments)
        raise DiskFull("no room")

    monkeypatch.setattr(log.committer, "_write_journal", fails_late)
    with pytest.raises(DiskFull):
        fill(log, "a", 66, 1)
    trace = disk.freeze()
    log.close()
    for seed in range(10):
        trace.cut_power(
            len(trace.changes), tmp_path / f"after{seed}", mode="mixed", chance=Random(seed)
        )
        with FileLog.open(tmp_path / f"after{seed}" / "log", disk=RebootedDisk()) as log:
            assert numbers(log, "a") == []


def test_ctrl_c_left_the_lead_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA)

        def interrupted() -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(log.committer, "_await_group", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fill(log, "a", 66, 1)
        thread = Thread(target=fill, args=(log, "a", 0, 1), daemon=True)
        thread.start()
        thread.join(timeout=10)
        assert numbers(log, "a") == [0]


def test_ctrl_c_during_a_sync_made_the_log_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA)

        def interrupted(_: DiskFile) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(DiskFile, "sync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fill(log, "a", 0, 1)
        fill(log, "a", 1, 1)
        assert numbers(log, "a") == [0, 1]


def test_a_topic_another_process_was_about_to_make_durable_was_said_to_exist_and_then_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileLog.open(tmp_path / "log") as first, FileLog.open(tmp_path / "log") as second:
        with (
            monkeypatch.context() as patch
        ):  # the first one wrote its record and has not come to syncing it
            patch.setattr(first.committer, "_sync", lambda _: time.sleep(0))
            patch.setattr(first.store.marker, "publish", lambda *_, **__: None)
            first.create_topic("a", SCHEMA)
        assert second.topics() == []
        second.create_topic("a", SCHEMA, exist_ok=True)
        assert second.topics() == ["a"]


def test_an_append_failed_while_another_thread_was_importing_pandas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA)
        monkeypatch.setitem(
            sys.modules, "pandas", ModuleType("pandas")
        )  # what it is until it has run
        fill(log, "a", 0, 1)
        monkeypatch.undo()
        assert numbers(log, "a") == [0]
