"""Things that went wrong once, each named after what it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import CorruptBatch, DiskFull
from headrace.log.file.housekeeping import make_checkpoint
from headrace.log.file.journal import COMMIT, decode_record, encode_record
from headrace.log.file.log import FileLog
from headrace.testing.crash import RebootedDisk

SCHEMA = "n BIGINT, text STRING"


def test_verify_failed_on_a_topic_without_rows(tmp_path: Path) -> None:
    with FileLog(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA, partitions=2)
        assert log.verify() == []


def test_verify_did_not_miss_a_removed_first_segment(tmp_path: Path) -> None:
    with FileLog(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA, segment_bytes=1)
        for n in range(3):
            log.producer("a").append({"n": n, "text": ""})
        first = min((tmp_path / "log" / "topics").rglob("*.segment"))
        first.unlink()
        assert [(finding.kind, finding.offset) for finding in log.verify()] == [("missing", 0)]


def test_a_log_left_half_made_could_not_be_opened(tmp_path: Path) -> None:
    (tmp_path / "log" / "journal").mkdir(parents=True)
    (tmp_path / "log" / ".headrace.json.12.ab").write_text("{")
    with FileLog(tmp_path / "log") as log:
        assert log.topics() == []


def journals(root: Path) -> list[Path]:
    return sorted((root / "journal").glob("*.journal"))


def reopened(root: Path) -> FileLog:
    return FileLog(root, disk=RebootedDisk())


def test_a_journal_file_left_garbled_by_a_crash_was_taken_for_a_newer_format(tmp_path: Path) -> None:
    with FileLog(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA)
        make_checkpoint(log)
    _, new = journals(tmp_path / "log")
    for checkpoint in (tmp_path / "log" / "journal").glob("*.checkpoint"):
        checkpoint.unlink()
    new.write_bytes(b"HRJL\xff\xff" + b"x" * 58)
    (tmp_path / "log" / "journal" / "durable").unlink()
    with reopened(tmp_path / "log") as log:
        assert log.topics() == ["a"]
        log.producer("a").append({"n": 1, "text": "x"})
        assert log.verify() == []


def test_a_copy_of_a_journal_record_in_a_row_was_taken_for_a_record() -> None:
    record = memoryview(b"".join(encode_record(64, COMMIT, 1, 0, {"t": 0, "ops": []})))
    assert decode_record(record, 0, 64) is not None
    assert decode_record(record, 0, 128) is None


def fill(log: FileLog, topic: str, first: int, count: int, text_bytes: int = 1, partition: int | None = None) -> None:
    log.producer(topic).append([{"n": n, "text": "x" * text_bytes} for n in range(first, first + count)], partition=partition)


def numbers(log: FileLog, topic: str) -> list[int]:
    return [row["n"] for row in log.read(topic).to_pylist()]


def fail_next_commit(log: FileLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next commit writes its rows, and then there is no room for its journal record."""

    def no_room(*_: object) -> None:
        monkeypatch.undo()
        raise DiskFull("no room")

    monkeypatch.setattr(log.committer, "_write_journal", no_room)


def test_a_segment_begun_by_a_failed_commit_hid_rows_stored_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileLog(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA, segment_bytes=2000)
        fill(log, "a", 0, 2)
        fail_next_commit(log, monkeypatch)
        with pytest.raises(DiskFull):
            fill(log, "a", 66, 3, 1000)  # would begin another segment
        fill(log, "a", 2, 2)  # does not
        assert numbers(log, "a") == [0, 1, 2, 3]
    with FileLog(tmp_path / "log") as log:
        assert numbers(log, "a") == [0, 1, 2, 3]
        fill(log, "a", 4, 3, 1000)
        assert numbers(log, "a") == [0, 1, 2, 3, 4, 5, 6]
        assert log.verify() == []


def test_rows_of_a_failed_commit_were_read_when_a_staged_file_took_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileLog(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA)
        fail_next_commit(log, monkeypatch)
        with pytest.raises(DiskFull):
            fill(log, "a", 66, 3)
        monkeypatch.setattr("headrace.log.file.producer.MOST_BYTES_A_COMMIT", 100)
        monkeypatch.setattr("headrace.log.file.staging.MOST_COPIED_BYTES", 0)
        fill(log, "a", 0, 3)
        assert numbers(log, "a") == [0, 1, 2]
    with FileLog(tmp_path / "log") as log:
        assert numbers(log, "a") == [0, 1, 2]
        assert log.verify() == []


def test_a_transaction_that_filled_several_segments_was_refused(tmp_path: Path) -> None:
    with FileLog(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA, segment_bytes=1000)
        with log.transaction("job") as tx:
            for n in range(3):
                tx.append("a", {"n": n, "text": "x" * 900})
        assert numbers(log, "a") == [0, 1, 2]


def test_large_rows_for_two_segments_in_one_commit_were_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.log.file.committer.INLINE_BYTES", 0)
    with FileLog(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA, segment_bytes=1000)
        fill(log, "a", 0, 1, 900)
        with log.transaction("job") as tx:
            for n in range(1, 4):
                tx.append("a", {"n": n, "text": "x" * 900})
        assert numbers(log, "a") == [0, 1, 2, 3]


def test_large_rows_for_many_partitions_in_one_commit_were_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.log.file.committer.INLINE_BYTES", 0)
    monkeypatch.setattr("headrace.log.file.store._MOST_OPEN_SEGMENTS", 2)
    with FileLog(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA, partitions=5)
        fill(log, "a", 0, 10)
        assert sorted(numbers(log, "a")) == list(range(10))


def compacted(root: Path) -> FileLog:
    log = FileLog(root)
    log.create_topic("a", SCHEMA, key="n", compact=True, segment_bytes=1)
    for n in (0, 1, 0, 1, 2):
        fill(log, "a", n, 1)
    log.maintain()
    assert numbers(log, "a") == [0, 1, 2]
    return log


def test_rows_were_missed_where_compaction_had_removed_them_once_it_was_switched_off(tmp_path: Path) -> None:
    with compacted(tmp_path / "log") as log:
        log.alter_topic("a", compact=False)
        assert numbers(log, "a") == [0, 1, 2]
        assert log.verify() == []


@pytest.mark.parametrize("rows_compacted", [True, False])
def test_a_compacted_topics_segment_could_be_cut_short_unnoticed(rows_compacted: bool, tmp_path: Path) -> None:
    with compacted(tmp_path / "log") as log:
        *sealed, last = sorted((tmp_path / "log" / "topics").rglob("*.segment"))
        cut = sealed[0] if rows_compacted else last
        cut.write_bytes(cut.read_bytes()[:-8])
        assert [finding.kind for finding in log.verify()] != []
        log.cache.close()
        with pytest.raises(CorruptBatch):
            numbers(log, "a")
