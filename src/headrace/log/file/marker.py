"""The durable marker: how far the journal is known to be on disk. Readers go up to it and no further.

It is written behind each sync of the journal and never synced itself: an old value is only modest, never wrong. It also says in which life of
the machine it was written; in another one, what was not synced may be gone, and the log must be recovered before use.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from headrace.errors import NewerFormat
from headrace.log.file.disk import Disk, DiskFile

_MARK = struct.Struct("<4sHHIQ16sQ")
_MAGIC, _VERSION = b"HRDM", 1


@dataclass(frozen=True)
class Mark:
    lsn: int
    boot: bytes
    inode: int  # a copied directory is a new life too
    synced: bool  # whether it was written behind a sync; otherwise it proves nothing after power was lost


class DurableMarker:
    def __init__(self, disk: Disk, path: Path, *, write: bool) -> None:
        if not write and not path.exists():  # nothing is marked, and nobody here can do it
            path = Path(os.devnull)
        self._file: DiskFile = disk.open(path, create=write, write=write)
        self.path, self._inode, self._boot = path, path.stat().st_ino, disk.boot()
        self._guard = Lock()  # a file's lock does not keep threads apart

    def read(self) -> Mark | None:
        """The mark, or None if there is none that is whole."""
        for _ in range(20):  # a reader may catch a writer in the middle
            data = self._file.read(_MARK.size, 0)
            if len(data) < _MARK.size:
                return None
            magic, version, synced, crc, lsn, boot, inode = _MARK.unpack(data)
            if magic == _MAGIC and zlib.crc32(_MARK.pack(magic, version, synced, 0, lsn, boot, inode)) == crc:
                if version > _VERSION:
                    raise NewerFormat(f"{self.path} has format {version}; this Headrace knows {_VERSION}.", fix="upgrade Headrace.")
                return Mark(lsn, boot, inode, bool(synced))
        return None

    def is_current(self, mark: Mark | None) -> bool:
        """Whether a mark was written in this life of the machine, to this very file."""
        return mark is not None and mark.boot == self._boot and mark.inode == self._inode

    def proven(self) -> int:
        """Up to where the journal was certainly on disk, in whatever life that was."""
        mark = self.read()
        return mark.lsn if mark is not None and (mark.synced or self.is_current(mark)) else 0

    def publish(self, lsn: int, *, synced: bool = True, anew: bool = False) -> None:
        """Move the mark forward; never back, unless a recovery sets it anew."""
        with self._guard, self._file.locked():
            mark = self.read()
            if anew or mark is None or mark.lsn < lsn:
                blank = _MARK.pack(_MAGIC, _VERSION, synced, 0, lsn, self._boot, self._inode)
                self._file.write([_MARK.pack(_MAGIC, _VERSION, synced, zlib.crc32(blank), lsn, self._boot, self._inode)], 0)

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()
