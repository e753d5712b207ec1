"""Searches every byte of directories for values, which proves that they are erased. Free pages,
journals and older versions are searched like all other bytes.

A value is searched for in all its spellings (`spellings`), in the names of files too. What is
compressed is decompressed first: batches of the log, wherever they are, Parquet and gzip. SQLite
may split a value over two pages: rows are read with SQL, and the ends of free and superseded pages
are matched with the beginnings of others. A file that is compressed in another way is reported,
since it cannot be searched.
"""

from __future__ import annotations

import gzip
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from headrace.errors import HeadraceError
from headrace.events.privacy.spellings import Spellings
from headrace.log.file.disk import Disk
from headrace.log.file.journal import JOURNAL_SUFFIX as JOURNAL
from headrace.log.file.segment import (
    FRAME_HEADER_BYTES,
    FRAME_MAGIC,
    LZ4,
    SEGMENT_SUFFIX,
    ZSTD,
    FrameHeader,
    body_is_sound,
    read_frames,
    read_segment_header,
    unchecked_frame_header,
)

# Pages of SQLite: a long text is in a chain of pages. Each page begins with the number of the next
# one (4 bytes), and is filled to its end. So a value that is split begins at the end of one page
# and continues after the first four bytes of another. Which page follows which is not checked,
# since chains of free pages are broken.

_HEADER_BYTES, _WAL_HEADER_BYTES, _WAL_FRAME_BYTES = 100, 32, 24
_NEXT_BYTES = 4
_LARGEST_PAGE = 65536


def is_cut_over_pages(path: Path, patterns: Sequence[bytes]) -> bool:
    """Return whether a value may be split over two pages: one page ends with its beginning, and
    another continues with the rest; at least two bytes on each side.
    """
    ends: set[tuple[int, int]] = set()
    starts: set[tuple[int, int]] = set()
    cuts = [
        (number, cut)
        for number, pattern in enumerate(patterns)
        for cut in range(2, len(pattern) - 1)
    ]
    for page in _pages(path):
        ends.update((number, cut) for number, cut in cuts if page.endswith(patterns[number][:cut]))
        starts.update(
            (number, cut)
            for number, cut in cuts
            if page.startswith(patterns[number][cut:], _NEXT_BYTES)
        )
    return bool(ends & starts)


def _pages(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        head = file.read(_HEADER_BYTES)
        if path.name.endswith("-wal"):
            size, between = int.from_bytes(head[8:12], "big"), _WAL_FRAME_BYTES
            file.seek(_WAL_HEADER_BYTES)
        else:
            size, between = int.from_bytes(head[16:18], "big"), 0
            file.seek(0)
        size = _LARGEST_PAGE if size == 1 else size
        while (
            512 <= size <= _LARGEST_PAGE
            and len(page := file.read(between + size)) == between + size
        ):
            yield page[between:]


_CHUNK = 4 << 20
_ROWS_AT_ONCE = 1_000
_SQLITE = b"SQLite format 3\0"
_PARQUET = b"PAR1"
_PACKED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
}
_CODECS = {LZ4: "lz4", ZSTD: "zstd"}


@dataclass(frozen=True)
class ScanHit:
    """A file that has one of the values, or that could not be searched."""

    file: Path
    reason: str


def scan(roots: Iterable[Path], values: Iterable[str]) -> list[ScanHit]:
    """Return the files in some directories that have any of the values, or cannot be searched."""
    spellings = Spellings(list(values))
    found = []
    for path in sorted(
        {
            path
            for root in roots
            for path in ([root] if root.is_file() else root.rglob("*"))
            if path.is_file() and not path.is_symlink()
        }
    ):
        try:
            reason = (
                "has a value in its name"
                if spellings.are_in_text(path.name)
                else _scan_file(path, spellings)
            )
        except FileNotFoundError:  # it was removed meanwhile
            continue
        except OSError as error:
            reason = f"cannot be read: {error}"
        if reason:
            found.append(ScanHit(path, reason))
    return found


def _scan_file(path: Path, spellings: Spellings) -> str | None:
    if _in_bytes(path, spellings):
        return "has a value"
    with path.open("rb") as file:
        head = file.read(16)
    if path.suffix == SEGMENT_SUFFIX:
        return _in_segment(path, spellings)
    if path.suffix == JOURNAL or "quarantine" in path.parts:
        return _in_loose_frames(path.read_bytes(), spellings)
    if path.name.endswith("-wal"):
        return (
            "has a value, cut over two pages"
            if is_cut_over_pages(path, spellings.literals)
            else None
        )
    if head.startswith(_SQLITE):
        return _in_sqlite(path, spellings)
    if head.startswith(_PARQUET):
        return _in_parquet(path, spellings)
    kind = next((name for magic, name in _PACKED.items() if head.startswith(magic)), None)
    if kind == "gzip":
        return _in_gzip(path, spellings)
    return f"is packed ({kind}) and cannot be looked into" if kind else None


def _in_bytes(path: Path, spellings: Spellings) -> bool:
    with path.open("rb") as file:
        return _in_stream(file.read, spellings)


def _in_stream(read: Callable[[int], bytes], spellings: Spellings) -> bool:
    overlap = spellings.overlap
    before = b""
    while chunk := read(_CHUNK):
        if spellings.are_in(before + chunk):
            return True
        before = (before + chunk)[-overlap:] if overlap else b""
    return False


def _in_segment(path: Path, spellings: Spellings) -> str | None:
    """Search the compressed batches of a segment."""
    file = Disk().open(path, write=False)
    try:
        header = read_segment_header(file)
        for position, frame, body in read_frames(file, header.size, file.size()):
            if frame is None or not body_is_sound(frame, body):
                return f"is damaged at byte {position}, and cannot be looked into there"
            if _in_frame(frame, body, spellings):
                return "has a value in a compressed batch"
    except HeadraceError as error:
        return f"cannot be looked into: {error.message}"
    finally:
        file.close()
    return None


def _in_frame(frame: FrameHeader, body: bytes | memoryview, spellings: Spellings) -> bool:
    codec = next((name for flag, name in _CODECS.items() if frame.flags & flag), None)
    if codec is None:
        return False
    size = int.from_bytes(body[:8], "little")
    return spellings.are_in(
        pa.decompress(
            pa.py_buffer(body).slice(8), decompressed_size=size, codec=codec, asbytes=True
        )
    )


def _in_loose_frames(content: bytes, spellings: Spellings) -> str | None:
    """Search batches anywhere in a file: the journal contains those of small appends. A damaged one
    cannot be decompressed by anybody.
    """
    at = content.find(FRAME_MAGIC)
    while at >= 0:
        frame = unchecked_frame_header(content, at)
        body = (
            memoryview(content)[
                at + FRAME_HEADER_BYTES : at + FRAME_HEADER_BYTES + frame.body_bytes
            ]
            if frame is not None
            else memoryview(b"")
        )
        if frame is not None and body_is_sound(frame, body) and _in_frame(frame, body, spellings):
            return f"has a value in a compressed batch at byte {at}"
        at = content.find(FRAME_MAGIC, at + 1)
    return None


def _in_sqlite(path: Path, spellings: Spellings) -> str | None:
    """Search the rows of a database, since a long value may be split over pages."""
    if is_cut_over_pages(path, spellings.literals):
        return "has a value, cut over two pages"
    try:
        with sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10
        ) as database:
            tables = [
                name
                for (name,) in database.execute(
                    "SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE 'CREATE"
                    " VIRTUAL%'"
                )
            ]
            for table in tables:
                quoted = '"' + table.replace('"', '""') + '"'
                columns = [row[1] for row in database.execute(f"PRAGMA table_info({quoted})")]
                rows = database.execute(f"SELECT * FROM {quoted}")  # noqa: S608 - quoted
                while some := rows.fetchmany(_ROWS_AT_ONCE):
                    texts = [
                        value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
                        for row in some
                        for value in row
                        if isinstance(value, str | bytes)
                    ]
                    if spellings.are_in_any(texts):
                        return f"has a value in the table {table!r} ({', '.join(columns)})"
    except sqlite3.Error as error:
        return f"cannot be looked into: {error}"
    finally:
        if "database" in locals():
            database.close()
    return None


def _in_parquet(path: Path, spellings: Spellings) -> str | None:
    import pyarrow.parquet as pq

    try:
        for batch in pq.ParquetFile(path).iter_batches():
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            if spellings.are_in(sink.getvalue().to_pybytes()):
                return "has a value in a compressed column"
    except (pa.ArrowException, OSError) as error:
        return f"cannot be looked into: {error}"
    return None


def _in_gzip(path: Path, spellings: Spellings) -> str | None:
    try:
        with gzip.open(path) as file:
            return "has a value, compressed" if _in_stream(file.read, spellings) else None
    except (OSError, EOFError, zlib.error) as error:
        return f"cannot be looked into: {error}"
