"""Things that went wrong once, each named after what it was."""

from __future__ import annotations

from pathlib import Path

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
    with reopened(tmp_path / "log") as log:
        assert log.topics() == ["a"]
        log.producer("a").append({"n": 1, "text": "x"})
        assert log.verify() == []


def test_a_copy_of_a_journal_record_in_a_row_was_taken_for_a_record() -> None:
    record = memoryview(b"".join(encode_record(64, COMMIT, 1, 0, {"t": 0, "ops": []})))
    assert decode_record(record, 0, 64) is not None
    assert decode_record(record, 0, 128) is None
