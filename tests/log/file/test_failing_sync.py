"""A sync fails once. A second attempt would falsely succeed: so nothing more is
written, by anyone who has the log open here.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from headrace.errors import HeadraceError, RetryError
from headrace.log.file.disk import Disk, DiskFile
from headrace.log.file.log import FileLog
from headrace.log.file.maintenance import create_checkpoint


class _OnceFailing(DiskFile):
    def sync(self) -> None:
        assert isinstance(self.disk, FailingDisk)
        self.disk.strike(self.path)
        super().sync()


class FailingDisk(Disk):
    """The next sync of a file whose name ends so fails; those after it seem to be well."""

    file_type = _OnceFailing
    fails = ""

    def strike(self, path: Path) -> None:
        if self.fails and path.name.endswith(self.fails):
            self.fails = ""
            raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("by", ["append", "checkpoint"])
@pytest.mark.parametrize("name", [".journal", ".segment"])
def test_nothing_is_written_after_a_sync_that_failed(tmp_path: Path, by: str, name: str) -> None:
    disk = FailingDisk()
    with FileLog.open(tmp_path / "log", disk=disk) as log:
        log.create_topic("a", "n BIGINT")
        log.producer("a").append({"n": 1})
        disk.fails = name
        with pytest.raises(HeadraceError):
            (
                log.producer("a").append({"n": 2} if name == ".journal" else [{"n": 2}] * 200_000)
                if by == "append"
                else create_checkpoint(log)
            )
        assert not disk.fails, "the sync was tried"
        for again in (lambda: log.producer("a").append({"n": 3}), lambda: create_checkpoint(log)):
            with pytest.raises(RetryError, match="cannot be written any more by this process"):
                again()
    with FileLog.open(tmp_path / "log") as log:
        assert log.read("a").to_pylist()[0]["n"] == 1
        log.producer("a").append({"n": 4})
