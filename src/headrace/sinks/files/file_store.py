"""Places for files: what a table of Parquet files needs of a directory or an object store.

Files are immutable, and no name is used twice. `publish` is the one operation that decides
anything: it creates a file completely or not at all, and only if its name is free. A directory does
that with a hard link, an object store with a conditional request (`If-None-Match`). Neither needs
to rename, to lock, or to replace a file.

Names are relative to the place, with slashes: `dt=2026-03-01/000000000007-3f2a9c0d1b4e.parquet`.
"""

from __future__ import annotations

import os
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.atomic_file import sync_directory
from headrace.errors import TargetMismatch, TargetUnavailable
from headrace.log.api import Closeable

COMPRESSION = "zstd"
_TEMPORARY = ".tmp"


class FileStore(Closeable):
    """A place for files.

    Attributes:
        url: What it is called in messages.
    """

    url: str

    @abstractmethod
    def errors(self) -> AbstractContextManager[None]:
        """Return a context in which errors of the place become `TargetUnavailable` or
        `TargetMismatch`. A file that is missing stays a `FileNotFoundError` until it leaves the
        context.
        """

    @abstractmethod
    def prepare(self, *, create: bool) -> None:
        """Make sure that the place is there.

        Raises:
            TargetMismatch: It is not, and may not be created.
        """

    def check_publishing(self, folder: str) -> None:
        """Make sure that `publish` refuses a name that is taken.

        Raises:
            TargetMismatch: It would replace the file.
        """

    @abstractmethod
    def names(self, folder: str = "", *, suffix: str) -> list[str]:
        """Return the names of the files in a folder and in those below it. Folders whose names
        begin with an underscore are left out, unless such a folder is the given one.
        """

    @abstractmethod
    def write_rows(self, name: str, rows: pa.Table) -> int:
        """Write a Parquet file, and return its bytes. It is durable after `sync`."""

    @abstractmethod
    def sync(self) -> None:
        """Make all files durable that were written since the last time."""

    @abstractmethod
    def read(self, name: str) -> pa.Buffer:
        """Return a file's content."""

    @abstractmethod
    def read_rows(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows of a Parquet file, or some of its columns."""

    @abstractmethod
    def open_rows(self, name: str) -> pq.ParquetFile:
        """Open a Parquet file, so that it can be read even if it is deleted meanwhile."""

    @abstractmethod
    def publish(self, name: str, content: bytes) -> bool:
        """Create a small file completely and durably. Returns False if another one has its name."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Delete files. Those that are not there are no error."""


class LocalFileStore(FileStore):
    """A directory of this machine."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = str(directory)
        self._unsynced: set[Path] = set()
        """Directories with names that may not be on disk yet."""

    def close(self) -> None:
        """Nothing is kept open."""

    @contextmanager
    def errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TargetUnavailable(
                f"The files cannot be written or read: {error}.",
                fix="see that the disk is mounted and has room.",
            ) from error

    def prepare(self, *, create: bool) -> None:
        if not self.directory.is_dir() and not create:
            raise TargetMismatch(
                f"There is no directory {self.directory}.",
                fix="create=True (leave out --no-create), or make it.",
            )
        if create:
            self.directory.mkdir(parents=True, exist_ok=True)

    def names(self, folder: str = "", *, suffix: str) -> list[str]:
        names: list[str] = []
        root = self.directory / folder
        for path, folders, files in os.walk(root):
            folders[:] = [name for name in folders if not name.startswith("_")]
            parent = Path(path).relative_to(self.directory)
            names += [(parent / name).as_posix() for name in files if name.endswith(suffix)]
        return sorted(names)

    def write_rows(self, name: str, rows: pa.Table) -> int:
        path = self._made_path(name)
        pq.write_table(rows, path, compression=COMPRESSION)
        with path.open("rb") as file:
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size

    def _made_path(self, name: str) -> Path:
        """Return a file's path, whose directory is there and will be synced."""
        path = self.directory / name
        missing = path.parent
        while not missing.is_dir():
            self._unsynced.add(missing.parent)
            missing = missing.parent
        path.parent.mkdir(parents=True, exist_ok=True)
        self._unsynced.add(path.parent)
        return path

    def sync(self) -> None:
        for directory in sorted(self._unsynced):
            sync_directory(directory)
        self._unsynced.clear()

    def read(self, name: str) -> pa.Buffer:
        return pa.py_buffer((self.directory / name).read_bytes())

    def read_rows(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        return pq.read_table(
            self.directory / name,
            columns=None if columns is None else list(columns),
            partitioning=None,
        )

    def open_rows(self, name: str) -> pq.ParquetFile:
        return pq.ParquetFile(self.directory / name)

    def publish(self, name: str, content: bytes) -> bool:
        path = self._made_path(name)
        temporary = path.with_name(f"{uuid.uuid4().hex}{_TEMPORARY}")
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        self.sync()
        return True

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            (self.directory / name).unlink(missing_ok=True)
