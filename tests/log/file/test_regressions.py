"""Things that went wrong once, each named after what it was."""

from __future__ import annotations

import os
import time
from pathlib import Path
from threading import Event, Thread

import pyarrow as pa
import pytest

from headrace.errors import CorruptBatch
from headrace.log.file import maintenance
from headrace.log.file.disk import Disk
from headrace.log.file.journal import COMMIT, ROLL, decode_record, encode_record
from headrace.log.file.log import FileLog
from headrace.log.file.maintenance import create_checkpoint, run_maintenance
from tests.log.file.small_log import SCHEMA, fill, journals, numbers, reopened


def test_verify_failed_on_a_topic_without_rows(tmp_path: Path) -> None:
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA, partitions=2)
        assert log.verify() == []


def test_verify_did_not_miss_a_removed_first_segment(tmp_path: Path) -> None:
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA, segment_bytes=1)
        for n in range(3):
            log.producer("a").append({"n": n, "text": ""})
        first = min((tmp_path / "log" / "topics").rglob("*.segment"))
        first.unlink()
        assert [(finding.kind, finding.offset) for finding in log.verify()] == [("missing", 0)]


def test_a_log_left_half_made_could_not_be_opened(tmp_path: Path) -> None:
    (tmp_path / "log" / "journal").mkdir(parents=True)
    (tmp_path / "log" / ".headrace.json.12.ab").write_text("{")
    with FileLog.open(tmp_path / "log") as log:
        assert log.topics() == []


def test_a_journal_file_left_garbled_by_a_crash_was_taken_for_a_newer_format(
    tmp_path: Path,
) -> None:
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA)
        create_checkpoint(log)
    _, new = journals(tmp_path / "log")
    for checkpoint in (tmp_path / "log" / "journal").glob("*.checkpoint"):
        checkpoint.unlink()
    new.write_bytes(b"HRJL\xff\xff" + b"x" * 58)
    (tmp_path / "log" / "journal" / "durable").unlink()
    with reopened(tmp_path / "log") as log:
        assert log.topics() == ["a"]
        log.producer("a").append({"n": 1, "text": "x"})
        assert log.verify() == []


def test_rows_were_ignored_when_the_journal_file_before_theirs_had_lost_its_end(
    tmp_path: Path,
) -> None:
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA)
        create_checkpoint(log)
        log.producer("a").append({"n": 1, "text": "x"})
    old, _ = journals(tmp_path / "log")
    for lost in [
        *(tmp_path / "log" / "journal").glob("*.checkpoint"),
        tmp_path / "log" / "journal" / "durable",
    ]:
        lost.unlink()
    end = old.stat().st_size - len(b"".join(encode_record(0, ROLL, 0, 0, {})))
    os.truncate(old, end)
    with reopened(tmp_path / "log") as log:
        assert numbers(log, "a") == [1]
        assert [(finding.kind, finding.file, finding.position) for finding in log.verify()] == [
            ("missing", str(old), end)
        ]
        log.producer("a").append({"n": 2, "text": "x"})
    with reopened(tmp_path / "log") as log:
        assert numbers(log, "a") == [1, 2]


def test_a_copy_of_a_journal_record_in_a_row_was_taken_for_a_record() -> None:
    record = memoryview(b"".join(encode_record(64, COMMIT, 1, 0, {"t": 0, "ops": []})))
    assert decode_record(record, 0, 64) is not None
    assert decode_record(record, 0, 128) is None


def compacted(root: Path) -> FileLog:
    log = FileLog.open(root)
    log.create_topic("a", SCHEMA, key="n", compact=True, segment_bytes=1)
    for n in (0, 1, 0, 1, 2):
        fill(log, "a", n, 1)
    log.maintain()
    assert numbers(log, "a") == [0, 1, 2]
    return log


def test_rows_were_missed_where_compaction_had_removed_them_once_it_was_switched_off(
    tmp_path: Path,
) -> None:
    with compacted(tmp_path / "log") as log:
        log.alter_topic("a", compact=False)
        assert numbers(log, "a") == [0, 1, 2]
        assert log.verify() == []


@pytest.mark.parametrize("rows_compacted", [True, False])
def test_a_compacted_topics_segment_could_be_cut_short_unnoticed(
    rows_compacted: bool, tmp_path: Path
) -> None:
    with compacted(tmp_path / "log") as log:
        *sealed, last = sorted((tmp_path / "log" / "topics").rglob("*.segment"))
        cut = sealed[0] if rows_compacted else last
        cut.write_bytes(cut.read_bytes()[:-8])
        assert [finding.kind for finding in log.verify()] != []
        log.cache.close()
        with pytest.raises(CorruptBatch):
            numbers(log, "a")


def test_two_checkpoints_at_once_forgot_to_sync_what_was_written_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncing, go_on = Event(), Event()

    def slow_sync(*_: object) -> None:
        syncing.set()
        go_on.wait(20)

    with FileLog.open(tmp_path / "log") as first, FileLog.open(tmp_path / "log") as second:
        first.create_topic("a", SCHEMA)
        fill(first, "a", 0, 1)
        monkeypatch.setattr(maintenance, "_sync_segment", slow_sync)
        threads = [Thread(target=create_checkpoint, args=(log,)) for log in (first, second)]
        threads[0].start()
        assert syncing.wait(20)
        threads[1].start()
        time.sleep(0.1)
        assert len(journals(tmp_path / "log")) == 2  # the second one has not begun
        go_on.set()
        for thread in threads:
            thread.join()
        assert len(journals(tmp_path / "log")) > 1


def test_a_topics_rows_were_removed_before_its_deletion_was_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileLog.open(tmp_path / "log") as first, FileLog.open(tmp_path / "log") as second:
        first.create_topic("a", SCHEMA)
        fill(first, "a", 0, 3)
        with (
            monkeypatch.context() as patch
        ):  # the record of the deletion is written and not yet synced
            patch.setattr(first.committer, "_sync", lambda _: None)
            patch.setattr(first.store.marker, "publish", lambda *_, **__: None)
            first.delete_topic("a")
            maintenance._remove_deleted_topics(second)
        assert list((tmp_path / "log" / "topics").rglob("*.segment"))
        second.create_topic("b", SCHEMA)  # makes the deletion durable
        maintenance._remove_deleted_topics(second)
        assert not list((tmp_path / "log" / "topics").rglob("*.segment"))


def test_segments_that_retention_had_removed_came_back_broken_after_a_crash(tmp_path: Path) -> None:
    log = FileLog.open(tmp_path / "log")
    log.create_topic("a", SCHEMA, segment_bytes=2500, retention="1 hour", retention_bytes=3000)
    fill(log, "a", 0, 1)
    create_checkpoint(log)
    for n in range(1, 12):
        fill(log, "a", n, 1, 300)
    run_maintenance(log)
    left = numbers(log, "a")
    assert left[0] > 1
    segments = sorted((tmp_path / "log" / "topics").rglob("*.segment"))
    log.maintenance_thread.stop()
    with reopened(tmp_path / "log") as log:
        assert numbers(log, "a") == left
        assert log.offsets_at("a", "2000-01-01 00:00:00") == {0: left[0]}
        assert sorted((tmp_path / "log" / "topics").rglob("*.segment")) == segments
        log.maintain()


def test_files_that_a_killed_process_left_unfinished_stayed_for_ever(tmp_path: Path) -> None:
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA)
        fill(log, "a", 0, 1)
        segment = next((tmp_path / "log" / "topics").rglob("*.segment"))
        old, new = segment.with_name(".0.segment.1.ab"), segment.with_name(".0.segment.2.cd")
        for path in (old, new):
            path.write_bytes(b"half")
        os.utime(old, (0, 0))
        log.maintain()
        assert (old.exists(), new.exists()) == (False, True)


def test_two_tasks_with_one_staging_directory_staged_into_one_file(tmp_path: Path) -> None:
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA)
        parts = [
            pa.RecordBatch.from_pylist([{"n": n, "text": "x"}], schema=log.topic("a").arrow_schema)
            for n in range(2)
        ]
        staged = [log.stage("a", [part], directory=str(tmp_path / "elsewhere")) for part in parts]
        with log.transaction("job") as tx:
            for part in staged:
                tx.adopt(part)
        assert numbers(log, "a") == [0, 1]


def test_a_copy_of_a_batch_in_a_row_was_read_as_a_batch_when_the_one_around_it_was_damaged(
    tmp_path: Path,
) -> None:
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", "data BINARY")
        producer = log.producer("a")
        producer.append({"data": b"secret"})
        segment = next((tmp_path / "log" / "topics").rglob("*.segment"))
        copy = segment.read_bytes()
        for shift in range(8):  # one of these is aligned as batches are
            producer.append({"data": b"." * shift + copy})
        data = bytearray(segment.read_bytes())
        found_at = len(copy)
        while (found_at := data.find(b"HRF\xf7", found_at)) >= 0:
            # the header of every batch behind the first, and of every copy
            data[found_at + 20] ^= 1
            found_at += 1
        segment.write_bytes(data)
        for at in range(len(copy), len(data), 8):  # put the copies right again
            if data[at : at + 4] == b"HRF\xf7":
                fixed = bytearray(data)
                fixed[at + 20] ^= 1
                segment.write_bytes(fixed)
                log.cache.close()
                found = [row["data"] for row in log.read("a", on_corrupt="skip").to_pylist()]
                assert found[0] == b"secret"
                assert found.count(b"secret") == 1


def _expired(log: FileLog) -> Path:
    """A staging directory whose deadline has passed, with a file."""
    directory = log.store.root / "staging" / "00000000000000001.abcdef"
    directory.mkdir(parents=True)
    (directory / "rows.segment").write_bytes(b"rows")
    return directory


def test_maintenance_failed_when_an_owner_removed_its_staged_rows_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileLog.open(tmp_path / "log") as log:
        directory = _expired(log)
        real = Disk.unlink

        def unlink_as_the_owner_does(disk: Disk, path: Path) -> None:
            real(disk, path)
            if path.parent == directory:
                directory.rmdir()

        monkeypatch.setattr(Disk, "unlink", unlink_as_the_owner_does)
        assert log.maintain()["staging_swept"] == 1
        assert not directory.exists()


def test_maintenance_failed_when_a_late_owner_staged_more_rows_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileLog.open(tmp_path / "log") as log:
        directory = _expired(log)
        real = Disk.unlink

        def unlink_while_the_owner_writes(disk: Disk, path: Path) -> None:
            real(disk, path)
            if path.parent == directory:
                (directory / "more.segment").write_bytes(b"rows")

        with monkeypatch.context() as patch:
            patch.setattr(Disk, "unlink", unlink_while_the_owner_writes)
            assert log.maintain()["staging_swept"] == 0
        assert directory.exists()
        assert log.maintain()["staging_swept"] == 1
        assert not directory.exists()
