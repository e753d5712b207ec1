"""The commit journal: a log's single source of truth, and the order of its commits.

The journal is a stream of records in files that are named by the position (LSN) at which they
start:

    00000000000000000000.journal   header, COMMIT, COMMIT, …, ROLL
    00000000000000409600.journal   header, COMMIT, …

A record has a small JSON part, the operations that `state` applies, and a blob: the frames of small
appends, so that one sync of the journal makes them durable whichever segments they belong to. Each
record also says how far the journal was known to be durable when it was written. Damage behind that
position is a torn tail, which is cut; damage before it is corruption, which is reported.

The durable marker, at the end of this module, is the file that says how far readers may read. The
records are applied by `checkpoint.Replica` and written by `committer.Committer`.
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
from threading import RLock
from typing import Any

from headrace.errors import CorruptJournal, NewerFormat
from headrace.log.file.disk import Buffer, Disk, DiskFile

logger = logging.getLogger("headrace.log")

JOURNAL_VERSION = 2
"""Format 2 has operations that format 1 does not know, or with more fields than it knows; a record
without them is written as format 1.
"""
_NEWER_OPERATIONS = frozenset({"inherit", "evolve"})
_QUEUE_FIELDS = {"take": 8, "renew": 7, "return": 7}
"""Queue operation -> its fields in format 1, before leases went by the clock of a machine."""
JOURNAL_SUFFIX = ".journal"
FILE_MAGIC = b"HRJL"
FILE_HEADER_BYTES = 64
_FILE_HEADER = struct.Struct("<4sHHQI")  # magic, version, flags, LSN, CRC
RECORD_MAGIC = b"HRR\xf3"
COMMIT, ROLL = 0, 1
# magic, version, kind, text bytes, blob bytes, CRC, low half of the LSN, durable LSN, commit
_RECORD_HEADER = struct.Struct("<4sHHIIIIQQ")
_READ_BYTES = 1 << 20
_to_json = json.JSONEncoder(separators=(",", ":")).encode


# Records


@dataclass(slots=True)
class JournalRecord:
    """A sound record. `durable_lsn` is how far the journal was known to be durable when the record
    was written; `padding` is not covered by the checksum and should be zeros.
    """

    lsn: int
    end: int
    kind: int
    durable_lsn: int
    commit: int
    meta: dict[str, Any]
    blob: memoryview
    padding: memoryview


@dataclass(slots=True)
class JournalDamage:
    """Bytes that are not a record. `after` is where the next sound record starts, None if there is
    none; `durable_lsn` is how far later records prove the journal to have been durable.
    """

    lsn: int
    after: int | None
    durable_lsn: int
    file: str
    position: int


class MissingJournal(Exception):
    """There is no journal file that starts at `base`: not created yet, or already deleted."""

    def __init__(self, base: int) -> None:
        super().__init__(base)
        self.base = base


def encode_record(
    lsn: int,
    kind: int,
    commit: int,
    durable_lsn: int,
    meta: dict[str, Any],
    blob: Sequence[Buffer] = (),
) -> list[Buffer]:
    """A record's buffers, padded to a multiple of 8.

    The record contains its own LSN, so that a copy of its bytes elsewhere, in a row for example, is
    not taken for a record.
    """
    text = _to_json(meta).encode()
    blob_bytes = sum(map(len, blob))
    is_newer = any(map(_is_newer, meta.get("ops", ())))

    def header(crc: int) -> bytes:
        return _RECORD_HEADER.pack(
            RECORD_MAGIC,
            2 if is_newer else 1,
            kind,
            len(text),
            blob_bytes,
            crc,
            lsn & 0xFFFFFFFF,
            durable_lsn,
            commit,
        )

    crc = zlib.crc32(text, zlib.crc32(header(0)))
    for buffer in blob:
        crc = zlib.crc32(buffer, crc)
    return [header(crc), text, *blob, b"\0" * (-(len(text) + blob_bytes) % 8)]


def _is_newer(operation: Sequence[Any]) -> bool:
    name = operation[0]
    if name == "queue":
        return len(operation) > _QUEUE_FIELDS.get(operation[3], len(operation))
    return name in _NEWER_OPERATIONS


def decode_record(data: memoryview, at: int, lsn: int) -> JournalRecord | None:
    """The record at index `at` of `data`, which is at `lsn` in the journal; None if there is no
    complete and sound one.
    """
    if len(data) - at < _RECORD_HEADER.size:
        return None
    magic, version, kind, text_bytes, blob_bytes, crc, low_lsn, durable_lsn, commit = (
        _RECORD_HEADER.unpack_from(data, at)
    )
    if magic != RECORD_MAGIC or low_lsn != lsn & 0xFFFFFFFF:
        return None
    text_start = at + _RECORD_HEADER.size
    blob_start = text_start + text_bytes
    stop = blob_start + blob_bytes
    if stop > len(data):
        return None
    blank = _RECORD_HEADER.pack(
        magic, version, kind, text_bytes, blob_bytes, 0, low_lsn, durable_lsn, commit
    )
    if zlib.crc32(data[text_start:stop], zlib.crc32(blank)) != crc:
        return None
    if version > JOURNAL_VERSION:
        raise NewerFormat(
            f"The journal was written in format {version}; this Headrace knows {JOURNAL_VERSION}.",
            fix="upgrade Headrace.",
        )
    end = lsn + (stop - at) + (-(stop - text_start) % 8)
    return JournalRecord(
        lsn=lsn,
        end=end,
        kind=kind,
        durable_lsn=durable_lsn,
        commit=commit,
        meta=json.loads(bytes(data[text_start:blob_start])),
        blob=data[blob_start:stop],
        padding=data[stop : end - lsn + at],
    )


def record_length(data: memoryview) -> int | None:
    """The length that the record at the start of `data` claims, padding included; None if there is
    no record header.
    """
    if len(data) < _RECORD_HEADER.size or bytes(data[:4]) != RECORD_MAGIC:
        return None
    _, _, _, text_bytes, blob_bytes, *_ = _RECORD_HEADER.unpack_from(data)
    content_bytes: int = text_bytes + blob_bytes
    return _RECORD_HEADER.size + content_bytes + -content_bytes % 8


# Files


def journal_name(lsn: int) -> str:
    """The name of the journal file that starts at a position."""
    return f"{lsn:020d}{JOURNAL_SUFFIX}"


def _file_header(lsn: int) -> bytes:
    fields = FILE_MAGIC, 1, 0, lsn
    crc = zlib.crc32(_FILE_HEADER.pack(*fields, 0))
    return _FILE_HEADER.pack(*fields, crc).ljust(FILE_HEADER_BYTES, b"\0")


class Journal:
    """The files of a journal and their records. What records mean is defined by `State`."""

    def __init__(self, disk: Disk, directory: Path, *, write: bool) -> None:
        self.disk = disk
        self.directory = directory
        self.writable = write
        self._file: DiskFile | None = None
        self._base = -1

    def bases(self) -> list[int]:
        """The positions at which the journal's files start, in order."""
        return sorted(
            int(path.name[: -len(JOURNAL_SUFFIX)])
            for path in self.directory.glob(f"*{JOURNAL_SUFFIX}")
            if path.name[0] != "."
        )

    def create_file(self, lsn: int) -> None:
        """Create the file that starts at a position; harmless if it exists. A file without records
        is written again, since its creator may have been killed.
        """
        path = self.directory / journal_name(lsn)
        if not path.exists() or path.stat().st_size <= FILE_HEADER_BYTES:
            file = self.disk.open(path, create=True)
            file.write([_file_header(lsn)], 0)
            file.sync()
            file.close()
            self.disk.sync_directory(self.directory)

    def create_next(self, base: int) -> None:
        """Create the file that the ROLL record of the file before names.

        The file before is synced first: the writer of its last records may have been killed before
        it synced them, nobody else will sync that file any more, and after power loss nothing in
        the new file could be reached without them.
        """
        bases = self.bases()
        if max(bases, default=-1) > base:
            raise CorruptJournal(
                f"The file {journal_name(base)} of the journal in {self.directory} is missing, and"
                " later ones are there.",
                fix="restore it from a backup.",
            )
        earlier = [candidate for candidate in bases if candidate < base]
        if earlier:
            file = self.disk.open(self.directory / journal_name(earlier[-1]))
            file.sync()
            file.close()
        self.create_file(base)

    def file_at(self, base: int) -> DiskFile:
        """The open file that starts at a position. Raises MissingJournal."""
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
        if self.writable:  # its creator may have been killed before the name was durable
            self.disk.sync_directory(self.directory)
        # The file before is not closed here: another thread may be syncing it.
        self._file, self._base = file, base
        return file

    @staticmethod
    def _check_file_header(file: DiskFile, base: int) -> None:
        """Report a damaged header and go on, since every record knows its position. A file without
        records and without a sound header was never finished: MissingJournal.
        """
        data = file.read(FILE_HEADER_BYTES, 0)
        magic, version, flags, lsn, crc = _FILE_HEADER.unpack(
            data[: _FILE_HEADER.size].ljust(_FILE_HEADER.size, b"\0")
        )
        if (
            magic == FILE_MAGIC
            and version > JOURNAL_VERSION
            and crc == zlib.crc32(_FILE_HEADER.pack(magic, version, flags, lsn, 0))
        ):
            raise NewerFormat(
                f"{file.path} has format {version}; this Headrace knows {JOURNAL_VERSION}.",
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
        """The position behind the last byte of the file that starts at `base`."""
        return base + self.file_at(base).size()

    def records(self, base: int, lsn: int, limit: int) -> Iterator[JournalRecord | JournalDamage]:
        """The records, and the damage, of one file from `lsn` up to `limit` or the file's end."""
        file = self.file_at(base)
        while lsn < limit:
            chunk = memoryview(file.read(min(_READ_BYTES, limit - lsn), lsn - base))
            used = 0
            while (record := decode_record(chunk, used, lsn + used)) is not None:
                yield record
                used = record.end - lsn
            if used:
                lsn += used
                continue
            # The record at `lsn` is larger than a chunk, or damaged.
            length = record_length(chunk) or 0
            if len(chunk) < length <= limit - lsn:
                chunk = memoryview(file.read(length, lsn - base))
            record = decode_record(chunk, 0, lsn)
            if record is None:
                damage = self._scan_damage(file, base, lsn, limit)
                yield damage
                if damage.after is None:
                    return
                lsn = damage.after
            else:
                yield record
                lsn = record.end

    @staticmethod
    def _scan_damage(file: DiskFile, base: int, lsn: int, limit: int) -> JournalDamage:
        """Find the next sound record behind damage, and what the later ones prove durable."""
        rest = memoryview(file.read(limit - lsn, lsn - base))
        haystack = bytes(rest)
        after = None
        durable_lsn = 0
        at = haystack.find(RECORD_MAGIC, 8)
        while at >= 0:
            record = decode_record(rest, at, lsn + at) if at % 8 == 0 else None
            if record is not None:
                after = lsn + at if after is None else after
                durable_lsn = max(durable_lsn, record.durable_lsn)
            at = haystack.find(RECORD_MAGIC, at + 8 if record is None else record.end - lsn)
        return JournalDamage(
            lsn=lsn,
            after=after,
            durable_lsn=durable_lsn,
            file=str(file.path),
            position=lsn - base,
        )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


# The durable marker

_MARK = struct.Struct("<4sHHIQ16sQ")  # magic, version, synced, CRC, LSN, boot id, inode
_MARK_MAGIC = b"HRDM"
_MARK_VERSION = 1


@dataclass(frozen=True)
class DurableMark:
    """How far the journal is durable. `boot_id` and `inode` say in which run of the machine and to
    which file it was written; `synced` whether the journal was synced before, without which the
    mark proves nothing after power loss.
    """

    lsn: int
    boot_id: bytes
    inode: int
    synced: bool


class DurableMarker:
    """The file with the durable mark, up to which readers read the journal.

    The mark is written after each sync of the journal and is not synced itself: an old mark is too
    low, never wrong. A mark of another boot of the machine, or in a copied directory, is not
    current: bytes that were not synced may be gone, so the log must be recovered before use.
    """

    def __init__(self, file: DiskFile, *, boot_id: bytes, write: bool) -> None:
        self._file = file
        self._writable = write
        self._boot_id = boot_id
        self._guard = RLock()  # a file lock does not exclude threads of one process

    @classmethod
    def open(cls, disk: Disk, path: Path, *, write: bool) -> DurableMarker:
        """Open the file; with `write`, create it if it is missing."""
        if not write and not path.exists():  # there is no mark, and we may not write one
            path = Path(os.devnull)
        file = disk.open_lock(path) if write else disk.open(path, write=False)
        return cls(file, boot_id=disk.boot_id(), write=write)

    def read(self) -> DurableMark | None:
        """The mark, or None if there is no sound one."""
        self._follow_path()
        return self._read()

    def _follow_path(self) -> None:
        """If somebody has removed the file, open the one that took its place: others go by that."""
        if self._file.is_at_path():
            return
        with self._guard:
            path = self._file.path
            if self._file.is_at_path() or not (self._writable or path.exists()):
                return
            logger.error("%s was removed or replaced. Leave the files of a log alone.", path)
            disk = self._file.disk
            self._file = disk.open_lock(path) if self._writable else disk.open(path, write=False)

    def _read(self) -> DurableMark | None:
        for _ in range(20):  # a reader may see a write halfway
            data = self._file.read(_MARK.size, 0)
            if len(data) < _MARK.size:
                return None
            magic, version, synced, crc, lsn, boot_id, inode = _MARK.unpack(data)
            blank = _MARK.pack(magic, version, synced, 0, lsn, boot_id, inode)
            if magic == _MARK_MAGIC and zlib.crc32(blank) == crc:
                if version > _MARK_VERSION:
                    raise NewerFormat(
                        f"{self._file.path} has format {version}; this Headrace knows"
                        f" {_MARK_VERSION}.",
                        fix="upgrade Headrace.",
                    )
                return DurableMark(lsn=lsn, boot_id=boot_id, inode=inode, synced=bool(synced))
        return None

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def inode(self) -> int:
        """The number of the file: a copy has another one."""
        return self._file.identity()[1]

    def is_current(self, mark: DurableMark | None) -> bool:
        """Whether a mark was written since the machine started, to this very file."""
        return mark is not None and mark.boot_id == self._boot_id and mark.inode == self.inode

    def durable_lsn(self) -> int:
        """How far the journal is certainly on disk, even after power loss."""
        mark = self.read()
        return mark.lsn if mark is not None and (mark.synced or self.is_current(mark)) else 0

    def publish(self, lsn: int, *, synced: bool = True, replace: bool = False) -> None:
        """Move the mark forward. With `replace`, for recovery, also back."""
        self._follow_path()
        with self._guard, self._file.locked():
            mark = self._read()
            if replace or mark is None or mark.lsn < lsn:
                fields = (lsn, self._boot_id, self.inode)
                crc = zlib.crc32(_MARK.pack(_MARK_MAGIC, _MARK_VERSION, synced, 0, *fields))
                self._file.write([_MARK.pack(_MARK_MAGIC, _MARK_VERSION, synced, crc, *fields)], 0)

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()
