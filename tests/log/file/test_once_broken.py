"""Things that went wrong once, each named after what it was."""

from __future__ import annotations

from pathlib import Path

from headrace.log.file.log import FileLog

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
