"""The commit journal: the one place where something becomes true, and the order in which it did.

A journal is a stream of records in files named by the position (LSN) at which they start. A record
has a small JSON part (the operations that `state` applies) and a blob (the frames of small appends,
so that one sync makes them durable wherever they belong). Each record says how far the journal was
known to be durable when it was written: what is broken behind that point is a torn tail, before it
is rot.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from headrace.errors import CorruptJournal, NewerFormat
from headrace.log.file.disk import Buffer, Disk, DiskFile

logger = logging.getLogger("headrace.log")
FILE_MAGIC, RECORD_MAGIC = b"HRJL", b"HRR\xf3"
VERSION = 1
COMMIT, ROLL = 0, 1
_FILE = struct.Struct("<4sHHQI")
FILE_HEADER_BYTES = 64
_RECORD = struct.Struct("<4sHHIIIIQQ")
_CHUNK = 1 << 20
JOURNAL_SUFFIX = ".journal"


@dataclass(slots=True)
class Record:
    lsn: int
    end: int
    kind: int
    durable: int
    commit: int
    meta: dict[str, Any]
    blob: memoryview
    filling: memoryview  # up to the next multiple of 8; empty bytes, and not checked


@dataclass(slots=True)
class Damage:
    """Bytes that are no record. `after` is where the next sound one starts, or None; `proven` what
    later records say was durable.
    """

    lsn: int
    after: int | None
    proven: int
    file: str
    position: int


class MissingJournal(Exception):
    """There is no file that starts at `base`: it was not made yet, or is not needed any more."""

    def __init__(self, base: int) -> None:
        super().__init__(base)
        self.base = base


def encode_record(
    lsn: int,
    kind: int,
    commit: int,
    durable: int,
    meta: dict[str, Any],
    blob: Sequence[Buffer] = (),
) -> list[Buffer]:
    """A record's buffers, padded to a multiple of 8. It says where it belongs: a copy of it
    elsewhere, in some row perhaps, is no record.
    """
    text = json.dumps(meta, separators=(",", ":")).encode()
    blob_bytes, place = sum(map(len, blob)), lsn & 0xFFFFFFFF
    crc = zlib.crc32(
        text,
        zlib.crc32(
            _RECORD.pack(
                RECORD_MAGIC, VERSION, kind, len(text), blob_bytes, 0, place, durable, commit
            )
        ),
    )
    for buffer in blob:
        crc = zlib.crc32(buffer, crc)
    header = _RECORD.pack(
        RECORD_MAGIC, VERSION, kind, len(text), blob_bytes, crc, place, durable, commit
    )
    return [header, text, *blob, b"\0" * (-(len(text) + blob_bytes) % 8)]


def decode_record(data: memoryview, at: int, lsn: int) -> Record | None:
    """The record at a place in `data`, or None if it is not whole and sound there."""
    if len(data) - at < _RECORD.size:
        return None
    magic, version, kind, text_bytes, blob_bytes, crc, place, durable, commit = _RECORD.unpack_from(
        data, at
    )
    if magic != RECORD_MAGIC or place != lsn & 0xFFFFFFFF:
        return None
    text_at = at + _RECORD.size
    stop = text_at + text_bytes + blob_bytes
    if stop > len(data):
        return None
    blank = _RECORD.pack(magic, version, kind, text_bytes, blob_bytes, 0, place, durable, commit)
    if zlib.crc32(data[text_at:stop], zlib.crc32(blank)) != crc:
        return None
    if version > VERSION:
        raise NewerFormat(
            f"The journal was written in format {version}; this Headrace knows {VERSION}.",
            fix="upgrade Headrace.",
        )
    meta = json.loads(bytes(data[text_at : text_at + text_bytes]))
    end = lsn + (stop - at) + (-(stop - at - _RECORD.size) % 8)
    return Record(
        lsn,
        end,
        kind,
        durable,
        commit,
        meta,
        data[text_at + text_bytes : stop],
        data[stop : end - lsn + at],
    )


def _file_header(lsn: int) -> bytes:
    fields = FILE_MAGIC, VERSION, 0, lsn
    return _FILE.pack(*fields, zlib.crc32(_FILE.pack(*fields, 0))).ljust(FILE_HEADER_BYTES, b"\0")


def record_length(data: memoryview, at: int) -> int | None:
    """How long the record at a place claims to be, padding included; None if its header is not
    there.
    """
    if len(data) - at < _RECORD.size or bytes(data[at : at + 4]) != RECORD_MAGIC:
        return None
    _, _, _, text_bytes, blob_bytes, *_ = _RECORD.unpack_from(data, at)
    length: int = _RECORD.size + text_bytes + blob_bytes
    return length + (-(length - _RECORD.size) % 8)


def journal_name(lsn: int) -> str:
    return f"{lsn:020d}{JOURNAL_SUFFIX}"


class Journal:
    """The files of a journal. Knows nothing of what records mean."""

    def __init__(self, disk: Disk, directory: Path, *, write: bool) -> None:
        self.disk, self.directory, self.writable = disk, directory, write
        self._file: DiskFile | None = None
        self._base = -1

    def bases(self) -> list[int]:
        """Where the files start, oldest first."""
        return sorted(
            int(path.name[: -len(JOURNAL_SUFFIX)])
            for path in self.directory.glob(f"*{JOURNAL_SUFFIX}")
            if path.name[0] != "."
        )

    def create_file(self, lsn: int) -> None:
        """Begin a file at a position; harmless if it is there. One that has no records may have
        been left unfinished.
        """
        path = self.directory / journal_name(lsn)
        if not path.exists() or path.stat().st_size <= FILE_HEADER_BYTES:
            file = self.disk.open(path, create=True)
            file.write([_file_header(lsn)], 0)
            file.sync()
            file.close()
            self.disk.sync_directory(self.directory)

    def create_next(self, base: int) -> None:
        """Begin the file that the last record of the one before asks for.

        Who wrote that record may have been killed before it was synced, with commits before it;
        nobody will sync that file any more, and without it, nothing in the new one could be reached
        after power was lost.
        """
        bases = self.bases()
        if max(bases, default=-1) > base:
            raise CorruptJournal(
                f"The file {journal_name(base)} of the journal in {self.directory} is missing, and"
                " later ones are there.",
                fix="restore it from a backup.",
            )
        for before in [earlier for earlier in bases if earlier < base][-1:]:
            file = self.disk.open(self.directory / journal_name(before))
            file.sync()
            file.close()
        self.create_file(base)

    def file_at(self, base: int) -> DiskFile:
        """The open file that starts at a position."""
        if self._base == base and self._file is not None:
            return self._file
        try:
            file = self.disk.open(self.directory / journal_name(base), write=self.writable)
        except FileNotFoundError:
            raise MissingJournal(base) from None
        try:
            self._check_file_header(file, base)
        except BaseException:
            file.close()
            raise
        if self.writable:  # who made it may have been killed before its name was durable
            self.disk.sync_directory(self.directory)
        self._file, self._base = file, base  # the old one is closed when nobody syncs it any more
        return file

    @staticmethod
    def _check_file_header(file: DiskFile, base: int) -> None:
        """A damaged header is reported and does no harm, since every record knows its place;
        without records, the file was left unfinished.
        """
        data = file.read(FILE_HEADER_BYTES, 0)
        magic, version, flags, lsn, crc = _FILE.unpack(data[: _FILE.size].ljust(_FILE.size, b"\0"))
        if (
            magic == FILE_MAGIC
            and version > VERSION
            and crc == zlib.crc32(_FILE.pack(magic, version, flags, lsn, 0))
        ):
            raise NewerFormat(
                f"{file.path} has format {version}; this Headrace knows {VERSION}.",
                fix="upgrade Headrace.",
            )
        if data != _file_header(base):
            if file.size() <= FILE_HEADER_BYTES:
                raise MissingJournal(base)
            logger.error(
                "The header of %s is corrupt (byte 0 to %d); going on behind it.",
                file.path,
                FILE_HEADER_BYTES,
            )

    def header_is_sound(self, base: int) -> bool:
        return self.file_at(base).read(FILE_HEADER_BYTES, 0) == _file_header(base)

    def end_of(self, base: int) -> int:
        """The position behind the last byte of a file."""
        return base + self.file_at(base).size()

    def records(self, base: int, lsn: int, limit: int) -> Iterator[Record | Damage]:
        """What one file holds from `lsn` up to `limit`. Stops behind the file's last byte."""
        file = self.file_at(base)
        while lsn < limit:
            chunk = memoryview(file.read(min(_CHUNK, limit - lsn), lsn - base))
            used = 0
            while (record := decode_record(chunk, used, lsn + used)) is not None:
                yield record
                used = record.end - lsn
            if used:
                lsn += used
                continue
            length = record_length(chunk, 0) or 0
            whole = (
                memoryview(file.read(length, lsn - base))
                if len(chunk) < length <= limit - lsn
                else chunk
            )
            record = decode_record(whole, 0, lsn)
            if record is None:
                damage = self._damage(file, base, lsn, limit)
                yield damage
                if damage.after is None:
                    return
                lsn = damage.after
            else:
                yield record
                lsn = record.end

    @staticmethod
    def _damage(file: DiskFile, base: int, lsn: int, limit: int) -> Damage:
        """Look for the next sound record, and for what the later ones prove."""
        rest = memoryview(file.read(limit - lsn, lsn - base))
        haystack, after, proven = bytes(rest), None, 0
        at = haystack.find(RECORD_MAGIC, 8)
        while at >= 0:
            record = decode_record(rest, at, lsn + at) if at % 8 == 0 else None
            if record is not None:
                after = lsn + at if after is None else after
                proven = max(proven, record.durable)
            at = haystack.find(RECORD_MAGIC, at + 8 if record is None else record.end - lsn)
        return Damage(lsn, after, proven, str(file.path), lsn - base)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


# The durable marker: how far the journal is known to be on disk. Readers go up to it and no
# further.
#
# It is written behind each sync of the journal and never synced itself: an old value is only
# modest, never wrong. It also says in which life of the machine it was written; in another one,
# what was not synced may be gone, and the log must be recovered before use.


_MARK = struct.Struct("<4sHHIQ16sQ")
_MAGIC, _VERSION = b"HRDM", 1


@dataclass(frozen=True)
class Mark:
    lsn: int
    boot: bytes
    inode: int  # a copied directory is a new life too
    # whether it was written behind a sync; otherwise it proves nothing after power was lost
    synced: bool


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
            if (
                magic == _MAGIC
                and zlib.crc32(_MARK.pack(magic, version, synced, 0, lsn, boot, inode)) == crc
            ):
                if version > _VERSION:
                    raise NewerFormat(
                        f"{self.path} has format {version}; this Headrace knows {_VERSION}.",
                        fix="upgrade Headrace.",
                    )
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
                self._file.write(
                    [
                        _MARK.pack(
                            _MAGIC,
                            _VERSION,
                            synced,
                            zlib.crc32(blank),
                            lsn,
                            self._boot,
                            self._inode,
                        )
                    ],
                    0,
                )

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()
