"""Files that somebody else has made, and other users: names in the journal, sizes in batches,
permissions, errors of the system.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest

from headrace.errors import (
    BadName,
    CorruptionError,
    CorruptJournal,
    NewerFormat,
    ReadOnlyLog,
    RetryError,
)
from headrace.log.file.disk import Disk, to_disk_error
from headrace.log.file.journal import COMMIT, Journal, encode_record
from headrace.log.file.log import FileLog
from headrace.log.file.segment import LZ4, FrameHeader, decode_batch
from headrace.testing.power_loss import RebootedDisk

SCHEMA = "n BIGINT"


def add_record(root: Path, operation: list[object]) -> None:
    """Append a well-formed record to the journal."""
    journal = Journal(Disk(), root / "journal", write=True)
    base = max(journal.bases())
    file, lsn = journal.file_at(base), journal.end_of(base)
    meta = {"t": 1, "ops": [operation]}
    file.write(encode_record(lsn, COMMIT, 1000, 0, meta), lsn - base)
    journal.close()


@pytest.mark.parametrize(
    "operation",
    [
        ["adopt", "a", 0, 0, 1, "../../secret", "00000000000000000000.segment"],
        ["adopt", "a", 0, 0, 1, "/etc/passwd", "00000000000000000000.segment"],
        ["adopt", "a", 0, 0, 1, "", "../../../elsewhere.segment"],
        ["adopt", "a", "../../..", 0, 1, "", "00000000000000000000.segment"],
        ["append", "a", "../..", 0, 1, 0, 0, 8, 0],
        ["append", "../a", 0, 0, 1, 0, 0, 8, 0],
        ["restore", "a", {}, "../../outside~1", [0]],
        ["topic", "../../outside", {}],
    ],
)
@pytest.mark.parametrize("rebooted", [False, True])
def test_a_crafted_journal_moves_no_file_from_outside_the_log(
    tmp_path: Path, operation: list[object], rebooted: bool
) -> None:
    root = tmp_path / "log"
    with FileLog.open(root) as log:
        log.create_topic("a", SCHEMA)
    secret = tmp_path / "secret"
    secret.write_text("mine")
    before = sorted(path for path in tmp_path.rglob("*") if root not in path.parents)
    add_record(root, operation)
    with pytest.raises(CorruptJournal, match="The journal has"):
        FileLog.open(root, disk=RebootedDisk() if rebooted else None).producer("a").append(
            [{"n": 1}]
        )
    assert secret.read_text() == "mine"
    assert sorted(path for path in tmp_path.rglob("*") if root not in path.parents) == before


def test_an_operation_that_is_not_known_is_of_a_newer_version(tmp_path: Path) -> None:
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA)
    add_record(tmp_path / "log", ["teleport", "a"])
    with pytest.raises(NewerFormat, match="'teleport'"):
        FileLog.open(tmp_path / "log").producer("a").append([{"n": 1}])


LEASE = ["queue", "g", "a", "take", 0, [0], 1, "me", "clock", 2]


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        ([*LEASE, "more"], NewerFormat),
        (["queue", "g", "a", "teleport", 0], NewerFormat),
        (["start", "a", 0, 0, "more"], NewerFormat),
        (["checkpointed", 1], NewerFormat),
        (LEASE[:6], CorruptJournal),
        (["queue", "g", "a", "take"], CorruptJournal),
        (["note", "n"], CorruptJournal),
    ],
)
def test_an_operation_with_other_fields_was_a_raw_type_error(
    tmp_path: Path, operation: list[object], error: type[Exception]
) -> None:
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA)
    add_record(tmp_path / "log", operation)
    with pytest.raises(error, match="The journal has an operation"):
        FileLog.open(tmp_path / "log").producer("a").append([{"n": 1}])


@pytest.mark.parametrize(
    ("operation", "version"),
    [
        (LEASE, 2),
        (LEASE[:8], 1),
        (["queue", "g", "a", "return", 0, [0], 1, "clock", 2], 2),
        (["queue", "g", "a", "done", 0, [0]], 1),
        (["evolve", "a", {}], 2),
        (["note", "n", "v"], 1),
    ],
)
def test_operations_that_the_first_format_does_not_know_are_in_records_it_refuses(
    operation: list[object], version: int
) -> None:
    """A program of version 0.1 that follows the journal says that it needs an upgrade."""
    header = bytes(
        encode_record(0, COMMIT, 1, 0, {"t": 1, "ops": [["note", "a", "b"], operation]})[0]
    )
    assert int.from_bytes(header[4:6], "little") == version


def test_what_a_batch_claims_to_need_is_bounded() -> None:
    body = (1 << 60).to_bytes(8, "little") + b"x"
    header = FrameHeader(0, LZ4, 0, len(body), 1, 1, 0, 0, 0, 0, 0, 0, 0)
    with pytest.raises(CorruptionError, match="claims to have"):
        decode_batch(header, memoryview(body), pa.schema([("n", pa.int64())]))


def modes(root: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*") if path.is_file()}


def test_a_log_is_private_by_default_and_can_be_shared_with_a_group(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        for name, options, mode, directory in [
            ("private", {}, 0o600, 0o700),
            ("shared", {"mode": 0o660}, 0o660, 0o2770),
        ]:
            root = tmp_path / name
            with FileLog.open(root, **options) as log:  # type: ignore[arg-type]
                log.create_topic("a", SCHEMA)
            with FileLog.open(root) as log:  # who opens it later goes by what it says
                log.producer("a").append([{"n": 1}])
                log.maintain()
                assert modes(root) == {mode}
                assert stat.S_IMODE((root / "topics").stat().st_mode) == directory
    finally:
        os.umask(umask)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_root_writing_once_does_not_lock_the_owner_out() -> None:
    with TemporaryDirectory() as name:
        root = Path(name) / "log"
        with FileLog.open(root) as log:
            log.create_topic("a", SCHEMA)
        for path in (root, *root.rglob("*")):
            os.chown(path, 4321, 4321)
        with FileLog.open(root) as log:
            log.create_topic("b", SCHEMA)
            log.producer("b").append([{"n": 1}])
            log.maintain()
        assert {path.stat().st_uid for path in root.rglob("*")} == {4321}


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EACCES, ReadOnlyLog),
        (errno.EROFS, ReadOnlyLog),
        (errno.ENAMETOOLONG, BadName),
        (errno.EMFILE, RetryError),
        (errno.EIO, RetryError),
        (errno.ENOENT, FileNotFoundError),
    ],
)
def test_errors_of_the_system_become_ours(number: int, expected: type[Exception]) -> None:
    error = to_disk_error(OSError(number, os.strerror(number)), Path("data"))
    assert isinstance(error, expected)


def test_dead_letters_of_a_topic_with_the_longest_name_fit(tmp_path: Path) -> None:
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("x" * 200, SCHEMA)
        log.create_topic("x" * 200 + ".dead", SCHEMA)
        log.producer("x" * 200 + ".dead").append([{"n": 1}])
        with pytest.raises(BadName):
            log.create_topic("x" * 201, SCHEMA)
