"""A topic of numbers and texts: how regression tests fill, read, reopen and break it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import DiskFull
from headrace.log.file.log import FileLog
from headrace.testing.power_loss import RebootedDisk

SCHEMA = "n BIGINT, text STRING"


def journals(root: Path) -> list[Path]:
    return sorted((root / "journal").glob("*.journal"))


def reopened(root: Path) -> FileLog:
    return FileLog.open(root, disk=RebootedDisk())


def fill(
    log: FileLog,
    topic: str,
    first: int,
    count: int,
    text_bytes: int = 1,
    partition: int | None = None,
) -> None:
    log.producer(topic).append(
        [{"n": n, "text": "x" * text_bytes} for n in range(first, first + count)],
        partition=partition,
    )


def numbers(log: FileLog, topic: str) -> list[int]:
    return [row["n"] for row in log.read(topic).to_pylist()]


def fail_next_commit(log: FileLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next commit writes its rows, and then there is no room for its journal record."""

    def no_room(*_: object) -> None:
        monkeypatch.undo()
        raise DiskFull("no room")

    monkeypatch.setattr(log.committer, "_write_journal", no_room)
