"""`headrace produce`: appends rows from JSON lines, CSV, Parquet or standard input to a topic."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import pyarrow as pa
import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from headrace.cli.options import JsonOption, LogOption, open_chosen_log
from headrace.cli.output import console, count_text, echo, print_json
from headrace.cli.row_files import (
    Format,
    arriving_lines,
    csv_chunks,
    file_lines,
    format_of,
    json_chunks,
    open_file,
    parquet_batches,
    parquet_rows,
)
from headrace.columnar.columns import CHANGE_TYPE
from headrace.errors import BadRows, InputError
from headrace.log.api import Producer
from headrace.log.values import AppendResult, TopicInfo
from headrace.types.text import TextRowParser

STDIN = Path("-")
LocatedBatch = tuple[str, pa.RecordBatch]
"""Rows, and their location for errors; empty if the rows know their lines themselves."""


@dataclass
class ProduceResult:
    """The rows that were stored so far."""

    rows: int = 0
    appends: int = 0
    duplicates: int = 0
    partitions: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, rows: int, appended: AppendResult, topic: str) -> None:
        self.appends += 1
        if appended.duplicate:
            self.duplicates += 1
            return
        self.rows += rows
        for partition, offsets in appended.partitions(topic).items():
            start, _ = self.partitions.get(partition, (offsets.start, 0))
            self.partitions[partition] = start, offsets.stop


def produce(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(help="The topic to append to.")],
    files: Annotated[
        list[Path] | None, typer.Argument(help="Files to read; none, or -, is standard input.")
    ] = None,
    format: Annotated[
        Format | None,
        typer.Option(help="The format. Default: by the file's name, and jsonl for standard input."),
    ] = None,
    batch_rows: Annotated[
        int, typer.Option(min=1, help="Rows per append; each append is stored whole or not at all.")
    ] = 10_000,
    id: Annotated[
        str | None,
        typer.Option(help="The id of an idempotent producer, which numbers its appends."),
    ] = None,
    sequence: Annotated[
        int | None,
        typer.Option(
            min=0,
            help=(
                "The number of the first append. If the command is run again with the same number,"
                " appends that are stored already are skipped."
            ),
        ),
    ] = None,
    partition: Annotated[
        int | None, typer.Option(min=0, help="Append to this partition, regardless of the key.")
    ] = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Append rows. In a table they are upserts, unless _change_type of a row is insert,
    update_postimage or delete.

    JSON and CSV are read by the topic's schema: times in ISO 8601, decimals as numbers or strings,
    binary in base64, an empty CSV field as null. The columns _partition, _offset and _timestamp are
    ignored, so that what `consume --json` prints can be produced again.

    Example: headrace produce orders orders.csv --log file:data
    """
    if sequence is not None and id is None:
        raise typer.BadParameter(
            "Appends are numbered per producer: give --id too.", param_hint="--sequence"
        )
    paths = files or [STDIN]
    with open_chosen_log(context, log) as opened_log:
        info = opened_log.topic(topic)
        with opened_log.producer(topic, id) as producer, _progress() as progress:
            append = _appender(producer, info, sequence, partition)
            result = ProduceResult()
            for path in paths:
                _produce_file(
                    path,
                    format,
                    info,
                    append,
                    result,
                    _ReadOptions(batch_rows, is_eager=sequence is None, progress=progress),
                )
    _report(topic, result, id, json=json)


@dataclass(frozen=True)
class _ReadOptions:
    """How a file is read. With `is_eager`, rows from a pipe do not wait for a full batch; numbered
    appends do, because they must have the same rows each time.
    """

    batch_rows: int
    is_eager: bool
    progress: Progress | None

    def progress_callback(self, label: str, total: int | None) -> Callable[[int], None]:
        """A function that advances the progress bar of a file, if there is a terminal."""
        if self.progress is None:
            return lambda _: None
        progress, task = self.progress, self.progress.add_task(label, total=total)
        return lambda amount: progress.update(task, advance=amount)


def _appender(
    producer: Producer, info: TopicInfo, sequence: int | None, partition: int | None
) -> Callable[[pa.RecordBatch], AppendResult]:
    """A function that stores a batch: numbered if the producer has an id, as upserts in a table."""
    if partition is not None and info.is_table:
        raise typer.BadParameter(
            "The key of a table's row decides its partition.", param_hint="--partition"
        )
    number = (
        None
        if producer.id is None
        else producer.last_sequence + 1
        if sequence is None
        else sequence
    )

    def append(batch: pa.RecordBatch) -> AppendResult:
        nonlocal number
        if info.is_table and CHANGE_TYPE not in batch.schema.names:
            appended = producer.upsert(batch, sequence=number)
        else:
            appended = producer.append(batch, sequence=number, partition=partition)
        number = None if number is None else number + 1
        return appended

    return append


def _produce_file(
    path: Path,
    format: Format | None,
    info: TopicInfo,
    append: Callable[[pa.RecordBatch], AppendResult],
    result: ProduceResult,
    reading: _ReadOptions,
) -> None:
    rows_before, location = result.rows, ""
    try:
        for location, batch in _batches(path, format, info, reading):  # noqa: B007 - errors name it
            result.add(batch.num_rows, append(batch), info.name)
    except BadRows as error:
        stored = result.rows - rows_before
        outcome = (
            f"The {stored:,} rows of earlier appends were stored."
            if stored
            else "Nothing was stored."
        )
        raise BadRows(f"{location}{error.message} {outcome}", fix=error.fix) from None


def _batches(
    path: Path, format: Format | None, info: TopicInfo, reading: _ReadOptions
) -> Iterator[LocatedBatch]:
    chosen = format or (Format.jsonl if path == STDIN else format_of(path))
    if chosen is Format.parquet:
        return _parquet(path, reading)
    return _text(path, chosen, info, reading)


def _text(
    path: Path, format: Format, info: TopicInfo, reading: _ReadOptions
) -> Iterator[LocatedBatch]:
    source = "standard input" if path == STDIN else str(path)
    parser = TextRowParser(
        info.arrow_schema,
        info.key,
        is_table=info.is_table,
        topic=info.name,
        source=source,
        history=info.schema_history,
    )
    stream = sys.stdin.buffer if path == STDIN else open_file(path)
    on_read = reading.progress_callback(
        source if path == STDIN else path.name, None if path == STDIN else path.stat().st_size
    )
    with stream:
        if format is Format.csv:
            chunks = csv_chunks(stream, source, max_rows=reading.batch_rows, on_read=on_read)
        else:
            lines = _lines(stream, waits=path == STDIN and reading.is_eager)
            chunks = json_chunks(
                lines,
                source,
                max_rows=reading.batch_rows,
                decimals=parser.has_decimals,
                on_read=on_read,
            )
        for rows in chunks:
            yield "", parser.batch(rows, csv=format is Format.csv)


def _lines(stream: BinaryIO, *, waits: bool) -> Iterable[tuple[bytes, bool]]:
    if waits:
        try:
            return arriving_lines(stream.fileno())
        except io.UnsupportedOperation:  # standard input that is not a file
            pass
    return file_lines(stream)


def _parquet(path: Path, reading: _ReadOptions) -> Iterator[LocatedBatch]:
    if path == STDIN:
        raise InputError(
            "Parquet cannot be read from standard input: its index is at the end.",
            fix="name the file.",
        )
    open_file(path).close()
    on_read = reading.progress_callback(path.name, parquet_rows(path))
    first = 1
    for batch in parquet_batches(path, max_rows=reading.batch_rows, on_read=on_read):
        yield f"{path}, rows from {first:,} (row 0) on: ", batch
        first += batch.num_rows


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A progress bar for each file, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    parts = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*parts, console=console(stderr=True), transient=True) as progress:
        yield progress


def _report(topic: str, result: ProduceResult, id: str | None, *, json: bool) -> None:
    if json:
        partitions: dict[str, Any] = {
            str(number): {"start": start, "stop": stop}
            for number, (start, stop) in sorted(result.partitions.items())
        }
        offsets = ",".join(
            f"{topic}:{number}:{stop}" for number, (_, stop) in sorted(result.partitions.items())
        )  # for `?at_least=`
        counts = {"rows": result.rows, "appends": result.appends, "duplicates": result.duplicates}
        print_json(
            {"topic": topic, "id": id, **counts, "partitions": partitions, "position": offsets}
        )
        return
    skipped = (
        f"; {result.duplicates:,} of {result.appends:,} appends were stored before and skipped"
        if result.duplicates
        else ""
    )
    echo(f"Stored {count_text(result.rows, 'row')} in {topic}{skipped}.")
