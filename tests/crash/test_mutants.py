"""The log, broken on purpose. A harness that does not notice proves nothing: each mutant must be
caught, and the healthy log must pass the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import FencedError
from headrace.log.file import maintenance, reader, recovery
from headrace.log.file.committer import Committer
from headrace.log.file.consumer import FileConsumer
from headrace.log.file.disk import DiskFile
from headrace.log.file.journal import DurableMarker
from headrace.log.file.log import FileLog
from headrace.log.file.maintenance import MaintenanceThread
from headrace.log.file.producer import FileProducer
from headrace.log.file.recovery import _Redo
from headrace.log.file.transaction import FileTransaction
from tests.crash.power import Run, check_crash
from tests.crash.workloads import (
    SCHEMA,
    Workload,
    checkpoints,
    compaction,
    large_appends,
    segment_rolls,
    shrink,
    small_appends,
)
from tests.log.file.damage import flip_segments, make_original, rows_of, settle

Mutate = Callable[[pytest.MonkeyPatch], dict[str, Any]]


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


def first_failure(
    workload: Workload, tmp_path: Path, *, step: int = 1, **options: Any
) -> AssertionError | None:
    """Cut the power here and there; the first thing that is wrong afterwards."""
    run = Run(tmp_path / "healthy", **options)
    workload(run)
    trace = run.finish()
    for after in range(0, len(trace.changes) + 1, step):
        for mode in ("dropped", "mixed"):
            try:
                check_crash(run, trace, after, tmp_path / "crashed", mode=mode)
            except AssertionError as error:
                return error
    return None


# Mutants of the disk: syncs that are forgotten.


def no_journal_sync(_: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"ignores_sync": lambda path: path.suffix == ".journal"}


def no_row_sync(_: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"ignores_sync": lambda path: path.suffix == ".segment"}


def no_directory_sync(_: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"ignores_sync": lambda path: path.is_dir()}


def no_sync_of_replaced_files(_: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"ignores_sync": lambda path: path.name.startswith(".")}


# Mutants of the commit: the right steps in the wrong order.


def journal_before_rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    write_rows, sync = Committer._write_rows, Committer._sync

    def remember(self: Any, drafts: Any) -> None:
        self.late = drafts

    def sync_then_write(self: Any, journal: DiskFile) -> None:
        sync(self, journal)
        write_rows(self, self.late)

    monkeypatch.setattr(Committer, "_write_rows", remember)
    monkeypatch.setattr(Committer, "_sync", sync_then_write)
    return {}


def publish_before_sync(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    sync, on_commit = Committer._sync, MaintenanceThread.on_commit

    def remember(self: Any, journal: DiskFile) -> None:
        self.late = journal

    def sync_then_note(self: MaintenanceThread) -> None:
        sync(self.log.committer, self.log.committer.late)  # type: ignore[attr-defined]
        on_commit(self)

    monkeypatch.setattr(Committer, "_sync", remember)
    monkeypatch.setattr(MaintenanceThread, "on_commit", sync_then_note)
    return {}


def adopt_before_sync(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    write_journal = Committer._write_journal

    def adopt_then_write(self: Committer, drafts: Any, newest: Any) -> int:
        self._adopt([adoption for draft in drafts for adoption in draft.adoptions])
        return write_journal(self, drafts, newest)

    monkeypatch.setattr(Committer, "_write_journal", adopt_then_write)
    return {}


# Mutants of checkpoints and recovery: steps that are left out.


def checkpoint_without_sync(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(maintenance, "_sync_segment", lambda *_: None)
    return {}


def no_recovery(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(DurableMarker, "is_current", lambda self, mark: mark is not None)
    return {}


def no_redo(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(_Redo, "record", lambda self, record: None)
    return {}


def no_cleaning_up(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Segments begun by commits that did not happen stay."""
    monkeypatch.setattr(recovery._Redo, "_remove_strays", lambda self: None)
    monkeypatch.setattr("headrace.log.file.store.Store.remove_strays", lambda self, *_: None)
    return {}


MUTANTS: list[tuple[Mutate, Workload]] = [
    (no_journal_sync, small_appends),
    (no_row_sync, large_appends),
    (no_directory_sync, large_appends),
    (no_sync_of_replaced_files, compaction),
    (journal_before_rows, large_appends),
    (publish_before_sync, small_appends),
    (adopt_before_sync, large_appends),
    (checkpoint_without_sync, checkpoints),
    (no_recovery, small_appends),
    (no_redo, small_appends),
    (no_cleaning_up, segment_rolls),
]


@pytest.mark.parametrize(
    ("mutate", "workload"), MUTANTS, ids=[mutate.__name__ for mutate, _ in MUTANTS]
)
def test_a_power_loss_catches(
    mutate: Mutate, workload: Workload, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert first_failure(workload, tmp_path, **mutate(monkeypatch)) is not None


@pytest.mark.parametrize(
    "workload", [small_appends, large_appends, segment_rolls, checkpoints, compaction]
)
def test_a_power_loss_does_not_catch_the_healthy_log(workload: Workload, tmp_path: Path) -> None:
    assert first_failure(workload, tmp_path, step=17) is None


# Mutants of reading.


def test_flipped_bytes_catch_a_reader_that_checks_no_checksums(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original = make_original(tmp_path / "original")
    settled = settle(original, tmp_path / "settled")
    with FileLog.open(settled) as log:
        truth = rows_of(log)
    (tmp_path / "healthy").mkdir()
    flip_segments(settled, tmp_path / "healthy", truth, every=False)
    monkeypatch.setattr(reader, "body_is_sound", lambda header, body: True)
    (tmp_path / "mutant").mkdir()
    with pytest.raises((AssertionError, ValueError, OSError, pytest.fail.Exception)):
        flip_segments(settled, tmp_path / "mutant", truth, every=False)


# Mutants of fencing.


def old_producer(log: FileLog) -> None:
    """A zombie appends under a number that its successor has used for something else."""
    zombie = log.producer("a", id="till")
    zombie.append({"n": 0, "text": "both"})
    successor = log.producer("a", id="till")
    with pytest.raises(FencedError):
        zombie.append({"n": 66, "text": "zombie"})
    successor.append({"n": 1, "text": "successor"})
    assert numbers(log) == [0, 1]


def old_transaction(log: FileLog) -> None:
    zombie = log.transaction("job")
    zombie.append("a", {"n": 66, "text": "zombie"})
    with log.transaction("job") as successor:
        successor.append("a", {"n": 0, "text": "successor"})
    with pytest.raises(FencedError):
        zombie.commit()
    assert numbers(log) == [0]


def old_member(log: FileLog) -> None:
    """A member that was thought dead commits what another one has gone beyond."""
    log.producer("a").append([{"n": n, "text": ""} for n in range(4)])
    zombie = log.consumer("a", "readers", session_timeout="1 minute")
    assert isinstance(zombie, FileConsumer)
    zombie.poll("0 seconds", max_rows=2)
    zombie._heartbeat.stop()
    successor = log.consumer("a", "readers")
    successor.poll("0 seconds")
    successor.commit()
    with pytest.raises(FencedError):
        zombie.commit()
    with pytest.raises(FencedError), log.transaction("job") as tx:
        tx.append("a", {"n": 66, "text": "zombie"})
        tx.commit_offsets("readers", zombie.positions())
    assert log.committed("readers") == {"a": {0: 4}}
    assert numbers(log) == [0, 1, 2, 3]


def numbers(log: FileLog) -> list[int]:
    return [row["n"] for row in log.read("a").to_pylist()]


def no_producer_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileProducer, "_check_epoch", lambda _self, _draft: None)


def no_transaction_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    check = FileTransaction._check_current

    def unfenced(self: FileTransaction, draft: Any) -> None:
        self._epoch = draft.state.transactions[self.id]
        check(self, draft)

    monkeypatch.setattr(FileTransaction, "_check_current", unfenced)


def no_ownership(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.log.file.consumer.check_owner", lambda *_: None)
    monkeypatch.setattr("headrace.log.file.transaction.check_owner", lambda *_: None)


FENCES = [
    (old_producer, no_producer_epoch),
    (old_transaction, no_transaction_epoch),
    (old_member, no_ownership),
]


@pytest.mark.parametrize(
    ("zombie", "mutate"), FENCES, ids=[mutate.__name__ for _, mutate in FENCES]
)
def test_a_zombie_catches(
    zombie: Callable[[FileLog], None],
    mutate: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with FileLog.open(tmp_path / "healthy") as log:
        log.create_topic("a", SCHEMA)
        zombie(log)
    mutate(monkeypatch)
    with FileLog.open(tmp_path / "mutant") as log:
        log.create_topic("a", SCHEMA)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            zombie(log)
