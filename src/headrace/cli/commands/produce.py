"""`headrace produce`: rows from JSON lines, CSV, Parquet or standard input into a topic."""

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

from headrace.cli.options import JsonOption, LogOption, opened
from headrace.cli.output import console, counted, emit, say
from headrace.cli.row_files import (
    Format,
    arriving_lines,
    csv_chunks,
    file_lines,
    format_of,
    json_chunks,
    opened_file,
    parquet_batches,
    parquet_rows,
)
from headrace.columnar.columns import CHANGE_TYPE
from headrace.errors import BadRows, InputError
from headrace.log.api import Producer
from headrace.log.values import AppendResult, TopicInfo
from headrace.types.text import RowTyper

STDIN = Path("-")
Placed = tuple[str, pa.RecordBatch]
"""Rows, and where they are from if they do not know themselves."""


@dataclass
class Tally:
    """What was stored so far."""

    rows: int = 0
    appends: int = 0
    duplicates: int = 0
    partitions: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, rows: int, position: AppendResult, topic: str) -> None:
        self.appends += 1
        if position.duplicate:
            self.duplicates += 1
            return
        self.rows += rows
        for partition, offsets in position.partitions(topic).items():
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
        typer.Option(help="How the rows are written; by the file's name, jsonl on standard input."),
    ] = None,
    batch_rows: Annotated[
        int, typer.Option(min=1, help="Rows an append; each append is stored whole or not at all.")
    ] = 10_000,
    id: Annotated[
        str | None,
        typer.Option(help="Make it idempotent: the producer's id. Appends are numbered."),
    ] = None,
    sequence: Annotated[
        int | None,
        typer.Option(
            min=0,
            help=(
                "The number of the first append. Run it again with the same: what is stored is"
                " skipped."
            ),
        ),
    ] = None,
    partition: Annotated[
        int | None, typer.Option(min=0, help="Append to this partition, whatever the key says.")
    ] = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Append rows. On a table they are upserts, unless a row says otherwise in _change_type
    (insert, update_postimage, delete).

    JSON and CSV are read by the topic's schema: times in ISO 8601, decimals as numbers or strings,
    binary in base64, an empty CSV field as null. The columns _partition, _offset and _timestamp are
    ignored, so that what `consume --json` prints can be produced again.

    Example: headrace produce orders orders.csv --log file:data
    """
    if sequence is not None and id is None:
        raise typer.BadParameter(
            "Numbers are kept for each id: say --id too.", param_hint="--sequence"
        )
    paths = files or [STDIN]
    with opened(context, log) as opened_log:
        info = opened_log.topic(topic)
        with opened_log.producer(topic, id) as producer, _progress() as progress:
            append = _appender(producer, info, sequence, partition)
            tally = Tally()
            for path in paths:
                _produce_file(
                    path,
                    format,
                    info,
                    append,
                    tally,
                    _Reading(batch_rows, hurry=sequence is None, progress=progress),
                )
    _report(topic, tally, id, json=json)


@dataclass(frozen=True)
class _Reading:
    """How a file is read. `hurry`: rows from a pipe need not wait for a full batch (numbered
    appends must be cut alike each time).
    """

    batch_rows: int
    hurry: bool
    progress: Progress | None

    def watched(self, label: str, total: int | None) -> Callable[[int], None]:
        """What to tell how far reading is; silent when nobody watches."""
        if self.progress is None:
            return lambda _: None
        progress, task = self.progress, self.progress.add_task(label, total=total)
        return lambda amount: progress.update(task, advance=amount)


def _appender(
    producer: Producer, info: TopicInfo, sequence: int | None, partition: int | None
) -> Callable[[pa.RecordBatch], AppendResult]:
    """How a batch is stored: numbered if the producer has an id, as an upsert on a table."""
    if partition is not None and info.is_table:
        raise typer.BadParameter(
            "A table's rows go where their key belongs.", param_hint="--partition"
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
            position = producer.upsert(batch, sequence=number)
        else:
            position = producer.append(batch, sequence=number, partition=partition)
        number = None if number is None else number + 1
        return position

    return append


def _produce_file(
    path: Path,
    format: Format | None,
    info: TopicInfo,
    append: Callable[[pa.RecordBatch], AppendResult],
    tally: Tally,
    reading: _Reading,
) -> None:
    before, place = tally.rows, ""
    try:
        for place, batch in _batches(path, format, info, reading):  # noqa: B007 (an error below names the place)
            tally.add(batch.num_rows, append(batch), info.name)
    except BadRows as error:
        stored = tally.rows - before
        outcome = (
            f"The {stored:,} rows of earlier appends were stored."
            if stored
            else "Nothing was stored."
        )
        raise BadRows(f"{place}{error.message} {outcome}", fix=error.fix) from None


def _batches(
    path: Path, format: Format | None, info: TopicInfo, reading: _Reading
) -> Iterator[Placed]:
    chosen = format or (Format.jsonl if path == STDIN else format_of(path))
    if chosen is Format.parquet:
        return _parquet(path, reading)
    return _text(path, chosen, info, reading)


def _text(path: Path, format: Format, info: TopicInfo, reading: _Reading) -> Iterator[Placed]:
    source = "standard input" if path == STDIN else str(path)
    typer_of_rows = RowTyper(info, source)
    stream = sys.stdin.buffer if path == STDIN else opened_file(path)
    told = reading.watched(
        source if path == STDIN else path.name, None if path == STDIN else path.stat().st_size
    )
    with stream:
        if format is Format.csv:
            chunks = csv_chunks(stream, source, most=reading.batch_rows, told=told)
        else:
            lines = _lines(stream, waits=path == STDIN and reading.hurry)
            chunks = json_chunks(
                lines,
                source,
                most=reading.batch_rows,
                decimals=typer_of_rows.has_decimals,
                told=told,
            )
        for rows in chunks:
            yield "", typer_of_rows.batch(rows, csv=format is Format.csv)


def _lines(stream: BinaryIO, *, waits: bool) -> Iterable[tuple[bytes, bool]]:
    if waits:
        try:
            return arriving_lines(stream.fileno())
        except io.UnsupportedOperation:  # standard input that is not a file
            pass
    return file_lines(stream)


def _parquet(path: Path, reading: _Reading) -> Iterator[Placed]:
    if path == STDIN:
        raise InputError(
            "Parquet cannot be read from standard input: its index is at the end.",
            fix="name the file.",
        )
    opened_file(path).close()
    told = reading.watched(path.name, parquet_rows(path))
    first = 1
    for batch in parquet_batches(path, most=reading.batch_rows, told=told):
        yield f"{path}, rows from {first:,} (row 0) on: ", batch
        first += batch.num_rows


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A bar for each file when a person watches."""
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


def _report(topic: str, tally: Tally, id: str | None, *, json: bool) -> None:
    if json:
        partitions: dict[str, Any] = {
            str(number): {"start": start, "stop": stop}
            for number, (start, stop) in sorted(tally.partitions.items())
        }
        position = ",".join(
            f"{topic}:{number}:{stop}" for number, (_, stop) in sorted(tally.partitions.items())
        )  # what `?at_least=` takes
        counts = {"rows": tally.rows, "appends": tally.appends, "duplicates": tally.duplicates}
        emit({"topic": topic, "id": id, **counts, "partitions": partitions, "position": position})
        return
    again = (
        f"; {tally.duplicates:,} of {tally.appends:,} appends were stored before and skipped"
        if tally.duplicates
        else ""
    )
    say(f"Stored {counted(tally.rows, 'row')} in {topic}{again}.")
