"""The file layer: every change that the embedded log makes to a disk goes through this module.

Tests replace `Disk` to record each write, sync and rename and to replay a crash between any two of
them (`headrace.testing.power_loss`); benchmarks replace it to simulate a slow disk.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakSet

from headrace.errors import (
    BadName,
    DiskFull,
    HeadraceError,
    LockTimeout,
    ReadOnlyLog,
    RetryError,
)

logger = logging.getLogger("headrace.log")

Buffer = bytes | bytearray | memoryview
_MAX_BUFFERS_PER_WRITE = 512  # below every system's IOV_MAX
LOCK_WARNING_S = 5.0
"""After so long, whoever waits for a lock says for whom."""
MAX_LOCK_WAIT_S = 60.0
"""After so long, whoever waits for a lock gives up."""
_MAX_LOCK_PAUSE_S = 0.005
_COPY_BYTES = 512 << 10
"""Two such pieces of a copy may be on their way to the device: a commit's sync waits for them."""
_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
_START_WRITING, _FINISH_WRITING = 2, 1 | 2 | 4  # flags of sync_file_range
_NO_COPY_WITHIN_SYSTEM = {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class DiskFile:
    """An open file, read and written at explicit positions."""

    def __init__(self, disk: Disk, path: Path, descriptor: int) -> None:
        self.disk = disk
        self.path = path
        self.descriptor = descriptor
        self._name = str(path)
        self._identity: tuple[int, int] | None = None

    def read(self, length: int, position: int) -> bytes:
        """Read `length` bytes; fewer only at the end of the file."""
        data = os.pread(self.descriptor, length, position)
        while len(data) < length:
            more = os.pread(self.descriptor, length - len(data), position + len(data))
            if not more:
                break
            data += more
        return data

    def write(self, buffers: Sequence[Buffer], position: int) -> int:
        """Write all buffers, one behind the other. Returns the position behind them."""
        for first in range(0, len(buffers), _MAX_BUFFERS_PER_WRITE):
            some = buffers[first : first + _MAX_BUFFERS_PER_WRITE]
            total = sum(map(len, some))
            try:
                written = os.pwritev(self.descriptor, some, position)
                while written < total:  # a signal or a nearly full disk can cut a write short
                    rest = b"".join(some)[written:]
                    written += os.pwrite(self.descriptor, rest, position + written)
            except OSError as error:
                raise to_disk_error(error, self.path) from error
            position += total
        return position

    def copy_from(self, original: DiskFile, start: int, stop: int) -> Iterator[int]:
        """Copy a range of another open file to the same positions. Yields the position after each
        piece; the last is before `stop` if the other file is shorter.

        The bytes are copied within the system, and go to the device a piece at a time: if all of
        them waited for the next sync, every commit's sync would wait for all of them. What the
        caller does between two pieces is done while one is written.
        """
        position, previous = start, (start, 0)
        while position < stop:
            copied = self._copy_piece(original, position, min(_COPY_BYTES, stop - position))
            if not copied:
                break
            self._write_out(position, copied, _START_WRITING)
            yield position + copied
            self._write_out(*previous, _FINISH_WRITING)
            previous, position = (position, copied), position + copied

    def _copy_piece(self, original: DiskFile, position: int, length: int) -> int:
        try:
            copied = os.copy_file_range(
                original.descriptor, self.descriptor, length, position, position
            )
            if copied:
                return copied
        except OSError as error:
            if error.errno not in _NO_COPY_WITHIN_SYSTEM:
                raise to_disk_error(error, self.path) from error
        return self.write([original.read(length, position)], position) - position

    def _write_out(self, position: int, length: int, flags: int) -> None:
        """Write a range to the device, without making it durable. Where the system cannot do that,
        the next sync does it.
        """
        if length and _SYNC_FILE_RANGE is not None:
            offset, count = ctypes.c_int64(position), ctypes.c_int64(length)
            _SYNC_FILE_RANGE(self.descriptor, offset, count, ctypes.c_uint(flags))

    def sync(self) -> None:
        try:
            os.fsync(self.descriptor)
        except OSError as error:
            raise to_disk_error(error, self.path) from error

    def truncate(self, size: int) -> None:
        os.ftruncate(self.descriptor, size)

    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()

    @contextmanager
    def locked(self, *, wait: bool = True, timeout_s: float | None = None) -> Iterator[bool]:
        """Hold this file's lock against other processes and other open handles. Yields False if
        the lock is taken and `wait` is false. Raises LockTimeout if it is taken for longer than
        `timeout_s`, by default a minute.

        If somebody has removed the file, others lock the one that took its place: so does this.
        """
        timeout_s = MAX_LOCK_WAIT_S if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + (timeout_s if wait else 0)
        while True:
            if not self._take_lock(deadline_s):
                if wait:
                    raise LockTimeout(
                        f"{self.path} has been locked for {timeout_s:.0f} s by"
                        f" {lock_holder(self.descriptor)}; nothing was stored.",
                        fix=(
                            "see whether that process is stopped or stuck, let it go on or end it,"
                            " and try again."
                        ),
                    )
                yield False
                return
            if self.is_at_path():
                break
            self._open_again()
        try:
            yield True
        finally:
            if self.descriptor >= 0:
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def _take_lock(self, deadline_s: float) -> bool:
        """Take the lock, or return False at a time. Says whom it waits for."""
        pause_s, warn_at_s = 0.0001, time.monotonic() + LOCK_WARNING_S
        while True:
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                now_s = time.monotonic()
                if now_s >= deadline_s:
                    return False
                if now_s >= warn_at_s:
                    holder = lock_holder(self.descriptor)
                    logger.warning("Waiting for %s, which locks %s.", holder, self.path)
                    warn_at_s = now_s + 6 * LOCK_WARNING_S
                time.sleep(pause_s)
                pause_s = min(1.2 * pause_s, _MAX_LOCK_PAUSE_S)
            else:
                return True

    def is_at_path(self) -> bool:
        """Whether this is still the file at its path."""
        try:
            at_path = os.stat(self._name)
            return (at_path.st_dev, at_path.st_ino) == self.identity()
        except OSError:
            return False

    def identity(self) -> tuple[int, int]:
        """The device and the number of the file: no other file has them while this one is open."""
        if self._identity is None:
            ours = os.fstat(self.descriptor)
            self._identity = ours.st_dev, ours.st_ino
        return self._identity

    def _open_again(self) -> None:
        """Open the file that is at the path now, or create it."""
        logger.error(
            "%s was removed or replaced while it was in use. Leave the files of a log alone.",
            self.path,
        )
        opened = self.disk.open(self.path, create=True)
        os.close(self.descriptor)
        self.descriptor, opened.descriptor = opened.descriptor, -1
        self._identity = None


_lock_files: WeakSet[DiskFile] = WeakSet()
"""Files that are used as locks."""


def _separate_lock_files() -> None:
    """After a fork, in the child: open the files again, so that it does not share their locks with
    its parent. Otherwise it would keep a lock that the parent held when it was killed.
    """
    for file in list(_lock_files):
        if file.descriptor >= 0:
            try:
                opened = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                file.close()
                continue
            os.dup2(opened, file.descriptor, inheritable=False)
            os.close(opened)
            file._identity = None  # noqa: SLF001


os.register_at_fork(after_in_child=_separate_lock_files)


def lock_holder(descriptor: int) -> str:
    """The process that holds the lock of an open file, as far as the system shows it."""
    inode = os.fstat(descriptor).st_ino
    try:
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5].endswith(f":{inode}"):
                pid = int(fields[4])
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                return f"process {pid} ({command.decode(errors='replace')[:80].strip()})"
    except (OSError, ValueError, IndexError):
        pass
    return "another process"


PRIVATE, OPEN = 0o600, 0o644
"""The mode of the files of a log: its owner's alone; or, in logs that do not say, readable by
all.
"""


class Disk:
    """The real disk. Tests and benchmarks subclass it to record, slow down or break it.

    Attributes:
        mode: The mode of files that it creates. Directories get the right to search too.
        owner: The user and group to whom root gives what it creates; None for whoever creates it.
    """

    file_type = DiskFile
    mode = OPEN
    owner: tuple[int, int] | None = None

    def set_permissions(self, root: Path, mode: int) -> None:
        """Create files with a mode, for the owner of a directory."""
        self.mode = mode
        about = root.stat()
        if os.geteuid() == 0 and about.st_uid:
            self.owner = (about.st_uid, about.st_gid)

    @property
    def directory_mode(self) -> int:
        """The mode for directories. One that a group shares passes its group on."""
        shared = 0o2000 if self.mode & 0o060 else 0
        return self.mode | (self.mode & 0o444) >> 2 | shared

    def grant(self, path: Path, mode: int) -> None:
        """Give what was created its mode, whatever the umask is, and its owner."""
        os.chmod(path, mode)
        if self.owner is not None:
            os.chown(path, *self.owner)

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> DiskFile:
        flags = os.O_CLOEXEC | (os.O_RDWR if write else os.O_RDONLY)
        try:
            try:
                return self.file_type(self, path, os.open(path, flags))
            except FileNotFoundError:
                if not create:
                    raise
            file = self.file_type(self, path, os.open(path, flags | os.O_CREAT, self.mode))
            self.grant(path, self.mode)
        except OSError as error:
            raise to_disk_error(error, path) from error
        return file

    def open_lock(self, path: Path) -> DiskFile:
        """Open a file whose lock is to be taken; create it if it is missing. A process that this
        one forks does not have it.
        """
        file = self.open(path, create=True)
        _lock_files.add(file)
        return file

    def make_directory(self, path: Path) -> None:
        """Create a directory and its missing parents; sync each in its parent."""
        if path.is_dir():
            return
        self.make_directory(path.parent)
        try:
            self.make_one_directory(path)
            self.grant(path, self.directory_mode)
        except FileExistsError:
            return
        except OSError as error:
            raise to_disk_error(error, path) from error
        self.sync_directory(path.parent)

    def make_one_directory(self, path: Path) -> None:
        os.mkdir(path)

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def locked_directory(self, path: Path) -> Iterator[bool]:
        """Lock a directory against others who do the same. Yields False if one of them has it."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_directory(self, path: Path) -> bool:
        """Remove an empty directory, which another process may be removing too. Returns False if it
        is not empty: somebody has put a file into it meanwhile.
        """
        try:
            os.rmdir(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise
            return False
        return True

    def remove_tree(self, path: Path) -> None:
        """Remove a directory with everything in it. Another process may be removing it too."""
        for directory, names, files in os.walk(path, topdown=False):
            for name in files:
                self.unlink(Path(directory) / name)
            for name in names:
                with suppress(OSError):
                    self.remove_directory(Path(directory) / name)
        with suppress(OSError):
            self.remove_directory(path)

    def replace_file(self, path: Path, content: Sequence[Buffer], *, durable: bool = True) -> None:
        """Replace a file's content atomically: write a temporary file, then rename it. If the disk
        is full, nothing is left behind.
        """
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        try:
            file = self.open(temporary, create=True)
            try:
                file.write(content, 0)
                if durable:
                    file.sync()
            finally:
                file.close()
            self.rename(temporary, path)
        except (OSError, HeadraceError):
            self.unlink(temporary)
            raise
        if durable:
            self.sync_directory(path.parent)

    def boot_id(self) -> bytes:
        """16 bytes that change when the machine restarts, after which bytes that were written but
        not synced may be gone.
        """
        try:
            return bytes.fromhex(
                Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
            )
        except OSError:  # not Linux: assume a restart at each start of a process
            return os.getpid().to_bytes(16, "little")


def to_disk_error(error: OSError, path: Path) -> OSError | HeadraceError:
    """What to raise for an error of the system: one of ours, which says what to do. That something
    is not there, or is there already, stays as it is: callers go on from it.
    """
    if isinstance(error, FileNotFoundError | FileExistsError):
        return error
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return DiskFull(
            f"There is no room left on the disk for {path}; what was stored earlier is intact.",
            fix="make room, then append again.",
        )
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return ReadOnlyLog(
            f"{path} cannot be used: {error.strerror}.",
            fix=(
                "check its owner and permissions; a log that several users share is created with"
                " a mode, as in `headrace topic create … --mode 660`."
            ),
        )
    if error.errno == errno.ENAMETOOLONG:
        return BadName(f"The file name {path.name!r} is too long.", fix="use a shorter name.")
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return RetryError(
            f"{path} cannot be opened: {error.strerror}.",
            fix="close what is not needed, or allow more open files (`ulimit -n`).",
        )
    return RetryError(
        f"{path} cannot be used: {error.strerror}.", fix="check the disk, then try again."
    )
