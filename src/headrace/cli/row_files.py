"""Reads rows from files and standard input, for `headrace produce`: JSON lines and CSV as text rows
with their line numbers, Parquet as Arrow batches. Files of any size are read in chunks; only the
rows of one append are in memory.
"""

from __future__ import annotations

import csv
import json
import os
import select
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.errors import BadRows, InputError, nearest
from headrace.types.text import TextRow

OnRead = Callable[[int], None]
"""Called with the number of bytes (for Parquet: rows) that were read since the last call."""


PIPE_BYTES = 1 << 16


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
    ".parquet": Format.parquet,
    ".pq": Format.parquet,
}


def format_of(path: Path) -> Format:
    """The format that a file's suffix names."""
    file_format = SUFFIXES.get(path.suffix.lower())
    if file_format is None:
        raise InputError(
            f"The name of {path} does not show its format: {nearest(path.suffix, SUFFIXES)}",
            fix="give --format jsonl, csv or parquet.",
        )
    return file_format


def open_file(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError:
        siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        raise InputError(f"There is no file {path}: {nearest(path.name, siblings)}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None


def file_lines(stream: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """The lines of a file, in the form of `arriving_lines`: its sender never pauses."""
    return ((line, False) for line in stream)


def arriving_lines(descriptor: int) -> Iterator[tuple[bytes, bool]]:
    """Lines as they arrive through a pipe or a terminal, each with whether the sender pauses after
    it.
    """
    rest = b""
    while chunk := os.read(descriptor, PIPE_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        for position, line in enumerate(lines, 1):
            yield line, position == len(lines) and not select.select([descriptor], [], [], 0)[0]
    if rest:
        yield rest, True


def json_chunks(
    lines: Iterable[tuple[bytes, bool]],
    source: str,
    *,
    max_rows: int,
    decimals: bool,
    on_read: OnRead,
) -> Iterator[list[TextRow]]:
    """The rows of JSON lines, `max_rows` at a time, or fewer if the sender pauses."""
    parse = json.JSONDecoder(parse_float=Decimal if decimals else None).decode
    rows: list[TextRow] = []
    for number, (line, pauses) in enumerate(lines, 1):
        on_read(len(line))
        if text := line.strip():
            rows.append(TextRow(number, _json_row(parse, text, f"{source}, line {number}")))
        if rows and (pauses or len(rows) >= max_rows):
            yield rows
            rows = []
    if rows:
        yield rows


def _json_row(parse: Callable[[str], Any], text: bytes, position: str) -> dict[str, Any]:
    try:
        row = parse(text.decode())
    except json.JSONDecodeError as error:
        raise BadRows(
            f"{position} is not JSON: {error.msg} at character {error.pos + 1}.",
            fix="write one JSON object a line.",
        ) from None
    except UnicodeDecodeError as error:
        raise BadRows(
            f"{position} is not UTF-8 text: byte {error.start + 1} cannot be read."
        ) from None
    if not isinstance(row, dict):
        raise BadRows(
            f"{position} holds a {type(row).__name__}, not an object.",
            fix='write one JSON object a line, such as {"id": 1}.',
        )
    return row


def csv_chunks(
    stream: BinaryIO, source: str, *, max_rows: int, on_read: OnRead
) -> Iterator[list[TextRow]]:
    """The rows of a CSV file with a heading, `max_rows` at a time. An empty field is null."""
    reader = csv.reader(_csv_lines(stream, source, on_read), strict=True)
    rows: list[TextRow] = []
    try:
        names = next(reader, None)
        if names is None:
            return
        for position, name in enumerate(names):
            if name in names[:position]:
                raise BadRows(
                    f"{source}, line 1 names the column {name!r} twice.",
                    fix="the first line of a CSV file names its columns, each once.",
                )
        for fields in reader:
            if not fields:
                continue
            rows.append(
                TextRow(
                    reader.line_num, _csv_row(names, fields, f"{source}, line {reader.line_num}")
                )
            )
            if len(rows) >= max_rows:
                yield rows
                rows = []
    except csv.Error as error:
        raise BadRows(f"{source}, line {reader.line_num} is not CSV: {error}.") from None
    if rows:
        yield rows


def _csv_lines(stream: BinaryIO, source: str, on_read: OnRead) -> Iterator[str]:
    for number, line in enumerate(stream, 1):
        on_read(len(line))
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise BadRows(
                f"{source}, line {number} is not UTF-8 text: byte {error.start + 1} cannot be read."
            ) from None


def _csv_row(names: list[str], fields: list[str], position: str) -> dict[str, Any]:
    if len(fields) != len(names):
        raise BadRows(f"{position} has {len(fields)} fields, but the heading has {len(names)}.")
    return {name: field or None for name, field in zip(names, fields, strict=True)}


def parquet_batches(path: Path, *, max_rows: int, on_read: OnRead) -> Iterator[pa.RecordBatch]:
    """The batches of a Parquet file, with at most `max_rows` rows each."""
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=max_rows):
                on_read(batch.num_rows)
                yield batch
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet: {error}.") from None


def parquet_rows(path: Path) -> int:
    try:
        return int(pq.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet: {error}.") from None
