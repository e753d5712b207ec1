"""Atomic files: a file's new content is there completely or not at all.

State files, reports of tasks, statuses and rendered plans are written this way. The embedded log
has its own disk layer (`headrace.log.file.disk`), whose writes tests can interrupt at any point.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


def write_atomically(path: Path, content: bytes | pa.Buffer, *, durable: bool) -> None:
    """Replace a file's content: write it under a temporary name, then rename that.

    Readers see the old content or the new. The temporary name begins with a dot and is random, so
    several processes may write the same file; it is removed if writing fails.

    Args:
        path: The file. Its directory must exist.
        content: All bytes of the file.
        durable: Whether file and directory are synced to disk before this returns, so that the new
            content survives a power loss. Without it a power loss may leave the file empty.

    Raises:
        OSError: The file cannot be written; the old content is still there.

    """
    temporary = path.with_name(f".{path.name}-{os.urandom(4).hex()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make names that were created, renamed or removed in a directory survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
