"""The log's lock: whose it is, for how long one waits for it, and what happens to whoever removes
its file.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import LockTimeout, RetryError
from headrace.log.file.disk import Disk
from headrace.log.file.log import FileLog
from tests.log.file.other_processes import SCHEMA, append_from_threads, started
from tests.waits import wait_until


def test_removing_the_lock_while_writers_run_corrupts_nothing(tmp_path: Path) -> None:
    root = tmp_path / "log"
    with FileLog.open(root) as log:
        log.create_topic("a", SCHEMA, partitions=2)
    writers = [started(append_from_threads, root, 10 * n, 2, 400) for n in range(3)]
    removed = 0
    while any(writer.is_alive() for writer in writers):
        for name in ("lock", "durable", "housekeeping"):
            path = root / "journal" / name
            if path.exists():
                path.unlink()
                removed += 1
        time.sleep(0.05)
    for writer in writers:
        writer.join()
    assert removed > 6
    with FileLog.open(root) as log:
        assert [finding for finding in log.verify() if finding.kind != "stale"] == []
        for number in range(2):
            rows = log.read("a", number).to_pylist()
            assert [row["_offset"] for row in rows] == list(range(len(rows)))
            for who in {row["who"] for row in rows}:
                numbers = [row["n"] for row in rows if row["who"] == who]
                assert numbers == list(range(len(numbers)))
                # A writer whose lock was taken away in the middle of a commit was told so.
        stored = log.read("a").to_table().num_rows
        assert stored > 100
        log.producer("a").append({"who": 99, "n": 0}, partition=0)


def test_a_reader_goes_on_when_the_durable_mark_was_removed(tmp_path: Path) -> None:
    root = tmp_path / "log"
    with FileLog.open(root) as log, FileLog.open(root) as other:
        log.create_topic("a", SCHEMA)
        producer = log.producer("a")
        producer.append({"who": 1, "n": 1})
        assert len(other.read("a").to_pylist()) == 1
        (root / "journal" / "durable").unlink()
        with FileLog.open(root) as newcomer:
            producer.append({"who": 1, "n": 2})
            assert len(newcomer.read("a").to_pylist()) == 2
            assert len(other.read("a").to_pylist()) == 2


def hold_lock(root: Path, held: Path) -> None:
    lock = Disk().open(root / "journal" / "lock")
    with lock.locked():
        held.touch()
        time.sleep(600)


def test_whoever_waits_for_a_lock_says_for_whom_and_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headrace.log.file.disk.LOCK_WARNING_S", 0.2)
    monkeypatch.setattr("headrace.log.file.disk.MAX_LOCK_WAIT_S", 0.6)
    root = tmp_path / "log"
    with FileLog.open(root) as log:
        log.create_topic("a", SCHEMA)
        holder = started(hold_lock, root, tmp_path / "held")
        wait_until((tmp_path / "held").exists)
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(LockTimeout, match=f"by process {holder.pid}") as refused,
        ):
            log.producer("a").append({"who": 1, "n": 1})
        assert "nothing was stored" in str(refused.value)
        assert f"Waiting for process {holder.pid}" in caplog.text
        assert holder.pid is not None
        os.kill(holder.pid, signal.SIGKILL)
        holder.join()
        log.producer("a").append({"who": 1, "n": 1})


def fork_and_be_killed(root: Path, child_file: Path) -> None:
    """The child of a fork outlives its parent, which is killed while it holds the lock."""
    log = FileLog.open(root)
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    child_file.write_text(str(child))
    with log.store.locked():
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_parents_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    root, child_file = tmp_path / "log", tmp_path / "child"
    with FileLog.open(root) as log:
        log.create_topic("a", SCHEMA)
        parent = started(fork_and_be_killed, root, child_file)
        parent.join()
        child = int(child_file.read_text())
        try:
            os.kill(child, 0)  # it is alive
            started_s = time.monotonic()
            log.producer("a").append({"who": 1, "n": 1})
            assert time.monotonic() - started_s < 5
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_lock_removed_before_the_rows_were_written_overwrote_anothers_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "log"
    with FileLog.open(root) as log:
        log.create_topic("a", SCHEMA)
        decide = log.committer._decide

        def robbed(*arguments: Any) -> Any:
            drafts = decide(*arguments)
            monkeypatch.undo()
            (root / "journal" / "lock").unlink()
            with FileLog.open(root) as newcomer:
                newcomer.producer("a").append({"who": 2, "n": 2})
            return drafts

        monkeypatch.setattr(log.committer, "_decide", robbed)
        with pytest.raises(RetryError, match="nothing was"):
            log.producer("a").append({"who": 1, "n": 1})
        assert [row["who"] for row in log.read("a").to_pylist()] == [2]
        log.producer("a").append({"who": 1, "n": 1})
        assert [row["who"] for row in log.read("a").to_pylist()] == [2, 1]


def test_a_commit_that_was_durable_was_said_to_be_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark's file is locked by a process that was stopped."""
    monkeypatch.setattr("headrace.log.file.disk.MAX_LOCK_WAIT_S", 0.2)
    root = tmp_path / "log"
    with FileLog.open(root) as log:
        log.create_topic("a", SCHEMA)
        lock = Disk().open(root / "journal" / "durable")
        with lock.locked(), pytest.raises(RetryError, match="is not known"):
            log.producer("a").append({"who": 1, "n": 1})
        lock.close()
