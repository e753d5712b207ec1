"""Disks for tests of the embedded log: one that was rebooted, one that is slow, and one that is full. See `crash` for one that loses its power."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from headrace.log.file.disk import Buffer, Disk, DiskFile, explained


class _UnsyncedFile(DiskFile):
    def sync(self) -> None:
        """Nothing: nobody will cut this disk's power."""


class RebootedDisk(Disk):
    """The disk after a restart: another boot, so that the log recovers. Does not sync, for speed."""

    file_type = _UnsyncedFile

    def __init__(self) -> None:
        self._boot = os.urandom(16)

    def boot(self) -> bytes:
        return self._boot

    def sync_directory(self, path: Path) -> None:
        """Nothing, as above."""


class _SlowFile(DiskFile):
    disk: SlowDisk

    def sync(self) -> None:
        with self.disk.busy():
            super().sync()


class _Busy:
    """The device: it does one sync at a time, each as long as it takes."""

    def __init__(self, sync_s: float) -> None:
        self.sync_s, self._device, self._started = sync_s, Lock(), 0.0

    def __enter__(self) -> None:
        self._device.acquire()
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        time.sleep(max(0.0, self._started + self.sync_s - time.perf_counter()))
        self._device.release()


class SlowDisk(Disk):
    """A disk whose every sync takes `sync_s` seconds, one at a time."""

    file_type = _SlowFile

    def __init__(self, sync_s: float = 0.002) -> None:
        self._device = _Busy(sync_s)

    def busy(self) -> _Busy:
        return self._device

    def sync_directory(self, path: Path) -> None:
        with self.busy():
            super().sync_directory(path)


class _FullFile(DiskFile):
    disk: FullDisk

    def write(self, buffers: Sequence[Buffer], position: int) -> int:
        data = b"".join(buffers)
        fits = self.disk.take(position + len(data) - self.size(), len(data))
        super().write([data[:fits]], position)
        if fits < len(data):
            raise explained(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), self.path)
        return position + len(data)

    def truncate(self, size: int) -> None:
        before = self.size()
        super().truncate(size)
        self.disk.room_bytes += max(0, before - size)


class FullDisk(Disk):
    """A disk with room for so many more bytes, then none: a write that does not fit is done in part, as on a real one."""

    file_type = _FullFile

    def __init__(self, room_bytes: int, *, name_bytes: int = 0) -> None:
        self.room_bytes, self.name_bytes = room_bytes, name_bytes

    def take(self, growth: int, most: int) -> int:
        """Use up room for a write of `most` bytes that lets a file grow; returns how many of them fit."""
        missing = max(0, growth - self.room_bytes)
        self.room_bytes -= max(0, growth) - missing
        return max(0, most - missing)

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> DiskFile:
        if create and not path.exists():
            self._take_name(path)
        return super().open(path, create=create, write=write)

    def make_one_directory(self, path: Path) -> None:
        self._take_name(path)
        super().make_one_directory(path)

    def _take_name(self, path: Path) -> None:
        if self.take(self.name_bytes, self.name_bytes) < self.name_bytes:
            raise explained(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), path)
