"""Reads rows out of files and standard input: JSON lines and CSV as text rows with their line
numbers, Parquet as Arrow batches.

`produce` uses it. Files of any size are read in pieces; nothing is held but the rows of one append.
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

Progress = Callable[[int], None]
"""Told how many bytes (of Parquet: rows) were read since the last time."""


PIPE_BYTES = 1 << 16


class Format(StrEnum):
    """How the rows of a file are written."""

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
    """What a file's name says about its format."""
    found = SUFFIXES.get(path.suffix.lower())
    if found is None:
        raise InputError(
            f"{path} does not say by its name how it is written: {nearest(path.suffix, SUFFIXES)}",
            fix="say --format jsonl, csv or parquet.",
        )
    return found


def opened_file(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError:
        beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        raise InputError(f"There is no file {path}: {nearest(path.name, beside)}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None


def file_lines(stream: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """The lines of a file, none of which has to be waited for."""
    return ((line, False) for line in stream)


def arriving_lines(descriptor: int) -> Iterator[tuple[bytes, bool]]:
    """Lines as they come through a pipe or a terminal, each with whether the sender pauses behind
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
    lines: Iterable[tuple[bytes, bool]], source: str, *, most: int, decimals: bool, told: Progress
) -> Iterator[list[TextRow]]:
    """JSON lines, `most` at a time, and fewer where the sender pauses."""
    parse = json.JSONDecoder(parse_float=Decimal if decimals else None).decode
    rows: list[TextRow] = []
    for number, (line, pauses) in enumerate(lines, 1):
        told(len(line))
        if text := line.strip():
            rows.append(TextRow(number, _json_row(parse, text, f"{source}, line {number}")))
        if rows and (pauses or len(rows) >= most):
            yield rows
            rows = []
    if rows:
        yield rows


def _json_row(parse: Callable[[str], Any], text: bytes, place: str) -> dict[str, Any]:
    try:
        row = parse(text.decode())
    except json.JSONDecodeError as error:
        raise BadRows(
            f"{place} is not JSON: {error.msg} at character {error.pos + 1}.",
            fix="write one JSON object a line.",
        ) from None
    except UnicodeDecodeError as error:
        raise BadRows(
            f"{place} is not UTF-8 text: byte {error.start + 1} cannot be read."
        ) from None
    if not isinstance(row, dict):
        raise BadRows(
            f"{place} holds a {type(row).__name__}, not an object.",
            fix='write one JSON object a line, such as {"id": 1}.',
        )
    return row


def csv_chunks(
    stream: BinaryIO, source: str, *, most: int, told: Progress
) -> Iterator[list[TextRow]]:
    """CSV with a heading, `most` rows at a time. An empty field is null."""
    reader = csv.reader(_csv_lines(stream, source, told), strict=True)
    rows: list[TextRow] = []
    try:
        names = next(reader, None)
        if names is None:
            return
        _check_heading(names, source)
        for fields in reader:
            if not fields:
                continue
            rows.append(
                TextRow(
                    reader.line_num, _csv_row(names, fields, f"{source}, line {reader.line_num}")
                )
            )
            if len(rows) >= most:
                yield rows
                rows = []
    except csv.Error as error:
        raise BadRows(f"{source}, line {reader.line_num} is not CSV: {error}.") from None
    if rows:
        yield rows


def _csv_lines(stream: BinaryIO, source: str, told: Progress) -> Iterator[str]:
    for number, line in enumerate(stream, 1):
        told(len(line))
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise BadRows(
                f"{source}, line {number} is not UTF-8 text: byte {error.start + 1} cannot be read."
            ) from None


def _check_heading(names: list[str], source: str) -> None:
    for position, name in enumerate(names):
        if name in names[:position]:
            raise BadRows(
                f"{source}, line 1 names the column {name!r} twice.",
                fix="the first line of a CSV file names its columns, each once.",
            )


def _csv_row(names: list[str], fields: list[str], place: str) -> dict[str, Any]:
    if len(fields) != len(names):
        raise BadRows(f"{place} has {len(fields)} fields, but the heading has {len(names)}.")
    return {name: field or None for name, field in zip(names, fields, strict=True)}


def parquet_batches(path: Path, *, most: int, told: Progress) -> Iterator[pa.RecordBatch]:
    """The batches of a Parquet file, at most `most` rows each."""
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=most):
                told(batch.num_rows)
                yield batch
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet: {error}.") from None


def parquet_rows(path: Path) -> int:
    try:
        return int(pq.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet: {error}.") from None
