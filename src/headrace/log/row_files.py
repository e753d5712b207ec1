"""Reads rows from files and standard input, for `headrace produce`: JSON (one object a line, or an
array of objects) and CSV as text rows with their line numbers, Parquet as Arrow batches. Files that
end in `.gz` or `.zst` are decompressed while they are read.

Files of any size are read in chunks, which are bounded in rows and in bytes. Each chunk says how
far the file has been read: `ReadPosition` has the bytes, the lines and a digest of them, by which a
file is recognised that was stored in part. `headrace.cli.file_progress` stores it.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
import re
import select
import zlib
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.errors import BadRows, InputError, nearest
from headrace.types.text import TextRow

OnRead = Callable[[int], None]
"""Called with the number of bytes (for Parquet: rows) that were read since the last call."""
Blocks = Iterator[tuple[bytes, bool]]
"""Bytes of a file as they come, each block with whether the sender pauses after it."""

BLOCK_BYTES = 1 << 16
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CHUNK_BYTES = 32 << 20
"""The most bytes of text in one chunk of rows, unless a single row is larger."""


class Format(StrEnum):
    """The format of a file of rows."""

    jsonl = "jsonl"
    csv = "csv"
    parquet = "parquet"


SUFFIXES = {
    ".jsonl": Format.jsonl,
    ".ndjson": Format.jsonl,
    ".json": Format.jsonl,
    ".csv": Format.csv,
    ".tsv": Format.csv,
    ".parquet": Format.parquet,
    ".pq": Format.parquet,
}
COMPRESSED_SUFFIXES = (".gz", ".zst")
DELIMITERS = (",", ";", "\t", "|")


# Files


def plain_name(path: Path) -> str:
    """A file's name without the suffix of its compression."""
    return path.stem if path.suffix.lower() in COMPRESSED_SUFFIXES else path.name


def format_of(path: Path) -> Format:
    """The format that a file's suffix names."""
    suffix = Path(plain_name(path)).suffix
    file_format = SUFFIXES.get(suffix.lower())
    if file_format is None:
        raise InputError(
            f"The name of {path} does not show its format: {nearest(suffix, SUFFIXES)}",
            fix="give --format jsonl, csv or parquet.",
        )
    return file_format


def open_file(path: Path) -> BinaryIO:
    """A file's bytes, decompressed if its name ends in `.gz` or `.zst`."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        raise InputError(f"There is no file {path}: {nearest(path.name, siblings)}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None
    match path.suffix.lower():
        case ".gz":
            file.close()
            return cast(BinaryIO, gzip.open(path))
        case ".zst":
            return cast(BinaryIO, pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd"))
    return file


def file_blocks(stream: BinaryIO, source: str) -> Blocks:
    """The bytes of a file. Its sender never pauses."""
    try:
        while block := stream.read(BLOCK_BYTES):
            yield block, False
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{source} cannot be read to its end: {error}.",
            fix="check that the file is whole, then run the command again.",
        ) from None


def arriving_blocks(descriptor: int) -> Blocks:
    """Bytes as they arrive through a pipe or a terminal, each block with whether the sender pauses
    after it.
    """
    while block := os.read(descriptor, BLOCK_BYTES):
        yield block, not select.select([descriptor], [], [], 0)[0]


def lines_of(blocks: Blocks) -> Iterator[tuple[bytes, bool]]:
    """Lines with their ends, each with whether the sender pauses after it."""
    parts: list[bytes] = []  # of a line whose end has not been read
    for block, pauses in blocks:
        first, *others = block.split(b"\n")
        parts.append(first)
        if not others:
            continue
        lines = [b"".join(parts), *others]
        parts = [lines.pop()]
        for number, line in enumerate(lines, 1):
            yield line + b"\n", pauses and number == len(lines)
    if rest := b"".join(parts):
        yield rest, True


# Chunks of rows


@dataclass(frozen=True)
class ReadPosition:
    """How far a file has been read, and the SHA-256 of what has been read."""

    bytes: int
    lines: int
    digest: str


class ReadMeter:
    """Measures what is read of a file: its bytes, its lines and their SHA-256."""

    def __init__(self) -> None:
        self.bytes = self.lines = 0
        self._hash = hashlib.sha256()

    def add(self, data: bytes) -> None:
        self.bytes += len(data)
        self.lines += data.count(b"\n")
        self._hash.update(data)

    def position(self) -> ReadPosition:
        return ReadPosition(self.bytes, self.lines, self._hash.hexdigest())


@dataclass(frozen=True)
class RowChunk:
    """Some rows of a file, the records among them that are not rows, and the position behind."""

    rows: list[TextRow]
    bad: list[tuple[int, BadRows]]
    """The line of each record that cannot be a row, and why."""
    end: ReadPosition


@dataclass(frozen=True)
class ChunkSize:
    """How many rows and bytes a chunk may have. With `is_eager`, a chunk ends where the sender
    pauses.
    """

    max_rows: int
    is_eager: bool = False
    max_bytes: int = CHUNK_BYTES


class _ChunkBuilder:
    """Collects the rows of one chunk after the other."""

    def __init__(self, meter: ReadMeter, size: ChunkSize, on_read: OnRead) -> None:
        self.meter = meter
        self._size, self._on_read = size, on_read
        self._start_bytes = meter.bytes
        self.rows: list[TextRow] = []
        self.bad: list[tuple[int, BadRows]] = []

    def is_full(self, *, pauses: bool = False) -> bool:
        count = len(self.rows) + len(self.bad)
        return count > 0 and (
            count >= self._size.max_rows
            or self.meter.bytes - self._start_bytes >= self._size.max_bytes
            or (pauses and self._size.is_eager)
        )

    def take(self) -> Iterator[RowChunk]:
        """The chunk so far, if there is anything in it."""
        self._on_read(self.meter.bytes - self._start_bytes)
        self._start_bytes = self.meter.bytes
        if self.rows or self.bad:
            yield RowChunk(self.rows, self.bad, self.meter.position())
            self.rows, self.bad = [], []


def skip_to(stream: BinaryIO, meter: ReadMeter, end: int) -> None:
    """Read on to a byte, or to the end of the file if it is shorter."""
    while meter.bytes < end and (block := stream.read(min(end - meter.bytes, 1 << 20))):
        meter.add(block)


# JSON


def json_chunks(
    blocks: Blocks,
    source: str,
    *,
    meter: ReadMeter,
    size: ChunkSize,
    decimals: bool,
    on_read: OnRead,
    is_array: bool | None = None,
) -> Iterator[RowChunk]:
    """The rows of JSON: one object a line or, if the text begins with a bracket, an array of
    objects. `is_array` says which it is if reading starts in the middle.
    """
    decoder = json.JSONDecoder(parse_float=Decimal if decimals else None)
    begun: list[tuple[bytes, bool]] = []
    if is_array is None:
        for block in blocks:
            begun.append(block)
            if text := block[0].removeprefix(BYTE_ORDER_MARK).lstrip():
                is_array = text.startswith(b"[") and not _is_line_of_list(text)
                break
    blocks = chain(begun, blocks)
    builder = _ChunkBuilder(meter, size, on_read)
    if is_array:
        return _array_chunks(blocks, source, decoder, builder)
    return _line_chunks(blocks, source, decoder, builder)


def _is_line_of_list(text: bytes) -> bool:
    """Whether text begins with a line such as `[1]`: a mistake in JSON lines, not an array."""
    return re.match(rb"\[\s*[^\s\]{]", text) is not None


def _line_chunks(
    blocks: Blocks, source: str, decoder: json.JSONDecoder, builder: _ChunkBuilder
) -> Iterator[RowChunk]:
    meter = builder.meter
    for line, pauses in lines_of(blocks):
        number = meter.lines + 1
        text = (line if meter.bytes else line.removeprefix(BYTE_ORDER_MARK)).strip()
        meter.add(line)
        if text:
            try:
                row = _json_row(decoder, text, f"{source}, line {number}")
                builder.rows.append(TextRow(number, row))
            except BadRows as error:
                builder.bad.append((number, error))
        if builder.is_full(pauses=pauses):
            yield from builder.take()
    yield from builder.take()


def _json_row(decoder: json.JSONDecoder, text: bytes, position: str) -> dict[str, Any]:
    try:
        row = decoder.decode(text.decode())
    except json.JSONDecodeError as error:
        raise BadRows(
            f"{position} is not JSON: {error.msg} at character {error.pos + 1}.",
            fix="write one JSON object a line, or one array of objects.",
        ) from None
    except UnicodeDecodeError as error:
        raise BadRows(
            f"{position} is not UTF-8 text: byte {error.start + 1} cannot be read."
        ) from None
    if not isinstance(row, dict):
        raise _no_object(row, position)
    return row


def _no_object(value: Any, position: str) -> BadRows:
    return BadRows(
        f"{position} holds a {type(value).__name__}, not an object.",
        fix='write JSON objects, such as {"id": 1}.',
    )


_SEPARATORS = re.compile(r"[\s,]*")


class _ArrayText:
    """The text of an array that has been read and not yet used: `at` is behind the last element."""

    def __init__(self, meter: ReadMeter) -> None:
        self._meter = meter
        self._utf8 = getincrementaldecoder("utf-8")()
        self._measured = 0
        self.text = ""
        self.at = 0
        self.line = meter.lines + 1

    def feed(self, block: bytes, source: str) -> None:
        try:
            self.text += self._utf8.decode(block)
        except UnicodeDecodeError as error:
            raise BadRows(
                f"{source}, line {self.line} or later is not UTF-8 text: {error.reason}."
            ) from None

    def advance(self, end: int) -> None:
        self.line += self.text.count("\n", self.at, end)
        self.at = end

    def measure(self) -> None:
        self._meter.add(self.text[self._measured : self.at].encode())
        self._measured = self.at

    def drop_used(self) -> None:
        self.measure()
        self.text = self.text[self.at :]
        self.at = self._measured = 0


def _array_chunks(
    blocks: Blocks, source: str, decoder: json.JSONDecoder, builder: _ChunkBuilder
) -> Iterator[RowChunk]:
    """The elements of an array of objects. Only one element and one block are in memory."""
    array, start = _ArrayText(builder.meter), builder.meter.bytes
    is_begun, has_ended = start > 0, False
    wanted = 0  # characters to wait for before an element that was cut off is tried again
    for block, pauses in chain(blocks, [(b"", True)]):
        array.feed(block, source)
        if block and len(array.text) < wanted:
            continue
        wanted = 0
        if not is_begun:
            array.advance(array.text.index("[") + 1)
            is_begun = True
        while True:
            match = _SEPARATORS.match(array.text, array.at)
            array.advance(match.end() if match else array.at)
            if array.at == len(array.text):
                break
            if has_ended:
                raise BadRows(
                    f"{source}, line {array.line}: there is more behind the end of the array.",
                    fix="write one array, or one object a line.",
                )
            if array.text[array.at] == "]":
                has_ended = True
                array.advance(array.at + 1)
                continue
            try:
                value, end = decoder.raw_decode(array.text, array.at)
            except json.JSONDecodeError as error:
                if array.text[array.at] != "{":
                    raise _bad_element(source, array.line, error) from None
                wanted = 2 * (len(array.text) - array.at)
                break
            number = array.line
            array.advance(end)
            if isinstance(value, dict):
                builder.rows.append(TextRow(number, value))
            else:
                builder.bad.append((number, _no_object(value, f"{source}, line {number}")))
            if builder.is_full(pauses=pauses):
                array.measure()
                yield from builder.take()
        array.drop_used()
    if not has_ended and (array.text or builder.meter.bytes > start or not start):
        try:
            decoder.raw_decode(array.text)
            raise BadRows(f"{source}, line {array.line}: the array has no end.")
        except json.JSONDecodeError as error:
            raise _bad_element(source, array.line, error) from None
    yield from builder.take()


def _bad_element(source: str, line: int, error: json.JSONDecodeError) -> BadRows:
    return BadRows(
        f"{source}, line {line}: this element of the array is not JSON: {error.msg}.",
        fix="correct it.",
    )


# CSV


def csv_chunks(
    stream: BinaryIO,
    source: str,
    *,
    meter: ReadMeter,
    size: ChunkSize,
    delimiter: str | None,
    columns: Sequence[str],
    start: int,
    on_read: OnRead,
) -> Iterator[RowChunk]:
    """The rows of a CSV file with a heading, from the byte `start` on. An empty field is null.
    Without a delimiter, it is the one with which the heading names columns of the topic.
    """
    csv.field_size_limit(CHUNK_BYTES)
    lines = _CsvLines(lines_of(file_blocks(stream, source)), meter)
    first = next(lines, None)
    if first is None:
        return
    delimiter = delimiter or _delimiter_of(first, columns)
    heading = csv.reader(chain([first], lines), strict=True, delimiter=delimiter)
    try:
        names = next(heading)
    except csv.Error as error:
        raise BadRows(f"{source}, line 1 is not CSV: {error}.") from None
    for position, name in enumerate(names):
        if name in names[:position]:
            raise BadRows(
                f"{source}, line 1 names the column {name!r} twice.",
                fix="the first line of a CSV file names its columns, each once.",
            )
    lines.skip_to(start)
    builder = _ChunkBuilder(meter, size, on_read)
    reader = csv.reader(lines, strict=True, delimiter=delimiter)
    lines_before, number = meter.lines, meter.lines
    while True:
        fields: list[str] = []
        message, first_line = "", number + 1
        try:
            fields = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            message = f"is not CSV: {error}."
        number = lines_before + reader.line_num
        if lines.bad_byte is not None:
            message = f"is not UTF-8 text: byte {lines.bad_byte + 1} cannot be read."
            lines.bad_byte = None
        elif fields and len(fields) != len(names):
            message = f"has {len(fields)} fields, but the heading has {len(names)}."
        if message and number > first_line:  # it may have swallowed good rows: it cannot be skipped
            raise BadRows(
                f"{source}, line {number} {message} The row begins at line {first_line}.",
                fix="look for a quote that is not closed.",
            )
        if message:
            misfit = BadRows(f"{source}, line {number} {message}", fix="correct the line.")
            builder.bad.append((number, misfit))
        elif fields:
            row = {name: field or None for name, field in zip(names, fields, strict=True)}
            builder.rows.append(TextRow(number, row))
        if builder.is_full():
            yield from builder.take()
    yield from builder.take()


class _CsvLines:
    """Lines as text, measured when the CSV reader asks for them: after a record, the meter is at
    the record's end.
    """

    def __init__(self, lines: Iterator[tuple[bytes, bool]], meter: ReadMeter) -> None:
        self._lines, self._meter = lines, meter
        self.bad_byte: int | None = None
        """The first byte of the last record that is not UTF-8."""

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        line, _ = next(self._lines)
        encoding = "utf-8" if self._meter.bytes else "utf-8-sig"
        self._meter.add(line)
        try:
            return line.decode(encoding)
        except UnicodeDecodeError as error:
            self.bad_byte = error.start
            return line.decode(encoding, "replace")

    def skip_to(self, end: int) -> None:
        while self._meter.bytes < end:
            line, _ = next(self._lines)
            self._meter.add(line)


def _delimiter_of(heading: str, columns: Sequence[str]) -> str:
    """The delimiter with which a heading names the most columns of the topic."""

    def known(delimiter: str) -> int:
        try:
            names = next(csv.reader([heading], delimiter=delimiter), [])
        except csv.Error:
            return 0
        return len(set(names) & set(columns))

    return max(DELIMITERS, key=known)  # the comma, if none is better


# Parquet


def parquet_batches(
    path: Path, *, start: int, max_rows: int, on_read: OnRead
) -> Iterator[pa.RecordBatch]:
    """The batches of a Parquet file from the row `start` on, with at most `max_rows` rows each."""
    position = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=max_rows):
                on_read(batch.num_rows)
                skipped = min(max(start - position, 0), batch.num_rows)
                position += batch.num_rows
                if skipped < batch.num_rows:
                    yield batch.slice(skipped)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet: {error}.") from None


def parquet_rows(path: Path) -> int:
    try:
        return int(pq.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet: {error}.") from None
