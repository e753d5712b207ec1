"""Directories that cannot be used, and files of a newer format: refused, with what is wrong and
what to do.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from headrace.errors import LogUnavailable, NewerFormat
from headrace.log.file.log import FileLog
from headrace.log.file.maintenance import create_checkpoint
from headrace.testing.power_loss import RebootedDisk

SCHEMA = "n BIGINT, text STRING"


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """A directory that everybody can read; those of pytest are closed to others."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def root(public_directory: Path) -> Path:
    with FileLog.open(public_directory / "log", mode=0o644) as log:
        log.create_topic("a", SCHEMA)
        log.producer("a").append([{"n": n, "text": "x"} for n in range(3)])
        create_checkpoint(log)
        create_checkpoint(log)
    return public_directory / "log"


@pytest.mark.parametrize("is_young", [False, True])
def test_a_log_that_had_lost_its_headrace_json_was_called_no_log(
    root: Path, tmp_path: Path, is_young: bool
) -> None:
    if is_young:
        root = tmp_path / "young"
        with FileLog.open(root) as log, log.transaction("t") as transaction:
            transaction.set_note("name", "value")
    about = root / "headrace.json"
    content = about.read_bytes()
    about.unlink()
    for create in (False, True):
        with pytest.raises(LogUnavailable, match=r"has lost its file headrace\.json"):
            FileLog.open(root, create=create)
    about.write_bytes(content)
    with FileLog.open(root) as log:
        assert log.note("name") == ("value" if is_young else None)
        assert log.topics() == ([] if is_young else ["a"])


def with_crc(data: bytearray, crc_at: int, stop: int, *, seed: int = 0) -> bytes:
    """Put in the CRC of the first `stop` bytes."""
    data[crc_at : crc_at + 4] = bytes(4)
    data[crc_at : crc_at + 4] = zlib.crc32(data[:stop], seed).to_bytes(4, "little")
    return bytes(data)


def newer_about(root: Path) -> None:
    (root / "headrace.json").write_text('{"format": 2}')


def newer_segment(root: Path) -> None:
    (path,) = root.rglob("*.segment")
    data = bytearray(path.read_bytes())
    data[4:6] = (2).to_bytes(2, "little")
    path.write_bytes(with_crc(data, 12, struct.unpack_from("<I", data, 8)[0]))


def newer_frame(root: Path) -> None:
    (path,) = root.rglob("*.segment")
    data = path.read_bytes()
    start = data.index(b"HRF\xf7")
    frame = bytearray(data[start:])
    frame[4] = 2
    path.write_bytes(data[:start] + with_crc(frame, 8, 80, seed=start))


def newer_journal(root: Path) -> None:
    path = max(root.rglob("*.journal"))
    data = bytearray(path.read_bytes())
    data[4:6] = (99).to_bytes(2, "little")
    path.write_bytes(with_crc(data, 16, 20))


def newer_record(root: Path) -> None:
    path = max(root.rglob("*.journal"))
    data = path.read_bytes()
    record = bytearray(data[64:])
    record[4:6] = (99).to_bytes(2, "little")
    text_bytes, blob_bytes = struct.unpack_from("<II", record, 8)
    path.write_bytes(data[:64] + with_crc(record, 16, 40 + text_bytes + blob_bytes))


def newer_checkpoint(root: Path) -> None:
    path = max(root.rglob("*.checkpoint"))
    text = json.dumps(json.loads(path.read_bytes().split(b"\n", 1)[1]) | {"version": 99}).encode()
    path.write_bytes(b"%08x\n" % zlib.crc32(text) + text)


def newer_marker(root: Path) -> None:
    path = root / "journal" / "durable"
    data = bytearray(path.read_bytes())
    data[4:6] = (2).to_bytes(2, "little")
    path.write_bytes(with_crc(data, 8, len(data)))


@pytest.mark.parametrize(
    "change",
    [
        newer_about,
        newer_segment,
        newer_frame,
        newer_journal,
        newer_record,
        newer_checkpoint,
        newer_marker,
    ],
)
def test_a_newer_format_is_refused(change: Callable[[Path], None], root: Path) -> None:
    change(root)
    before = {
        path: path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name not in {"durable", "housekeeping"}
    }
    with pytest.raises(NewerFormat, match=r"format (2|99); this Headrace knows [123]") as caught:
        FileLog.open(root, disk=RebootedDisk()).read("a").to_table()
    assert caught.value.fix == "upgrade Headrace."
    assert before == {path: path.read_bytes() for path in before}, (
        "a file of a newer format was changed"
    )


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("not a log")
    with pytest.raises(LogUnavailable, match="is a file; a log is a directory"):
        FileLog.open(tmp_path / "log")
    assert (tmp_path / "log").read_text() == "not a log"


def test_a_directory_with_other_things_in_it(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(LogUnavailable, match="other things in it"):
        FileLog.open(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_directory_in_one_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(LogUnavailable, match="does not exist") as caught:
        FileLog.open(tmp_path / "missing" / "log")
    assert "mkdir -p" in caught.value.fix


def test_a_log_that_is_missing_and_shall_not_be_made(tmp_path: Path) -> None:
    with pytest.raises(LogUnavailable, match="There is no log"):
        FileLog.open(tmp_path / "log", create=False)
    assert not (tmp_path / "log").exists()


def as_nobody(script: str, *arguments: str) -> str:
    """Run a script as a user without rights. Root's own process may do anything, so the real thing
    needs another one.
    """
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    preamble = """
        import os, sys
        from headrace.errors import HeadraceError
        from headrace.log.file.log import FileLog
        os.setgroups([]), os.setgid(65534), os.setuid(65534)
        def attempt(what, action):
            try:
                print(what, action())
            except HeadraceError as error:
                print(what, type(error).__name__, bool(error.fix))
        """
    code = textwrap.dedent(preamble) + textwrap.dedent(script)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


READ_ROWS = """
    log = FileLog.open(sys.argv[1])
    print("rows", [row["n"] for row in log.read("a").to_pylist()])
"""
READ_ONLY = f"""{READ_ROWS}
    print("verify", log.verify())
    attempt("append", lambda: log.producer("a").append({{"n": 9, "text": "x"}}))
    attempt("register", lambda: log.producer("a", id="till"))
    attempt("create", lambda: log.create_topic("b", "n BIGINT"))
    attempt("transaction", lambda: log.transaction("job"))
    attempt("consumer", lambda: log.consumer("a", "readers"))
    attempt("receive", lambda: log.queue("a", "workers").receive(1))
    attempt("maintain", lambda: log.maintain())
    log.close()
"""


def test_a_read_only_directory_can_be_read(root: Path) -> None:
    printed = as_nobody(READ_ONLY, str(root)).splitlines()
    refused = [
        f"{what} ReadOnlyLog True"
        for what in (
            "append",
            "register",
            "create",
            "transaction",
            "consumer",
            "receive",
            "maintain",
        )
    ]
    assert printed == ["rows [0, 1, 2]", "verify []", *refused]


@pytest.mark.parametrize("marker", ["damaged", "missing"])
def test_a_read_only_directory_whose_marker_cannot_be_used_can_be_read(
    marker: str, root: Path
) -> None:
    path = root / "journal" / "durable"
    if marker == "missing":
        path.unlink()
    else:
        path.write_bytes(b"x" * 44)
    printed = as_nobody(READ_ROWS, str(root))
    assert printed == "rows [0, 1, 2]\n"


def test_a_directory_that_can_be_written_with_files_that_cannot(root: Path) -> None:
    for directory in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        directory.chmod(0o777)
    printed = as_nobody(READ_ONLY, str(root)).splitlines()
    assert printed[:2] == ["rows [0, 1, 2]", "verify []"]
    assert printed[2] == "append ReadOnlyLog True"


def test_a_log_cannot_be_made_in_a_read_only_directory(public_directory: Path) -> None:
    printed = as_nobody(
        'attempt("make", lambda: FileLog.open(sys.argv[1]))', str(public_directory / "log")
    )
    assert printed == "make LogUnavailable True\n"


def test_a_directory_that_cannot_be_read(root: Path) -> None:
    root.chmod(0o700)
    printed = as_nobody('attempt("open", lambda: FileLog.open(sys.argv[1]))', str(root))
    assert printed == "open LogUnavailable True\n"


def test_sealed_and_damaged_segments_of_a_read_only_directory_can_be_read(
    public_directory: Path,
) -> None:
    """Neither an index nor a copy of the damaged bytes can be kept there."""
    root = public_directory / "log"
    with FileLog.open(root, mode=0o644) as log:
        log.create_topic("a", SCHEMA, segment_bytes=1)
        for n in range(4):
            log.producer("a").append([{"n": n, "text": "x"}])
    second = sorted(root.rglob("*.segment"))[1]
    second.write_bytes(second.read_bytes()[:-20] + bytes(20))
    script = """
        log = FileLog.open(sys.argv[1])
        print("rows", [row["n"] for row in log.read("a", on_corrupt="skip").to_pylist()])
        attempt("damage", lambda: log.read("a").to_table())
    """
    assert as_nobody(script, str(root)).splitlines() == [
        "rows [0, 2, 3]",
        "damage CorruptBatch True",
    ]
