"""`headrace produce`: appends rows from JSON, CSV, Parquet or standard input to a topic. Files are
read by `headrace.log.row_files`; `headrace.cli.file_progress` knows how far each was stored.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Protocol, TypeVar

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

from headrace.cli.file_progress import FileProgress, StoredPart, forget_stop
from headrace.cli.options import JsonOption, LogOption, open_chosen_log
from headrace.cli.output import console, count_text, echo, print_json
from headrace.columnar.columns import CHANGE_TYPE
from headrace.errors import BadRows, InputError
from headrace.log.api import Log, Producer
from headrace.log.row_files import (
    COMPRESSED_SUFFIXES,
    Blocks,
    ChunkSize,
    Format,
    OnRead,
    ReadMeter,
    ReadPosition,
    RowChunk,
    arriving_blocks,
    csv_chunks,
    file_blocks,
    format_of,
    json_chunks,
    open_file,
    parquet_batches,
    parquet_rows,
    skip_to,
)
from headrace.log.rows import check_changes, to_batch, upserts
from headrace.log.values import AppendResult, TopicInfo
from headrace.types.text import TextRow, TextRowParser

STDIN = Path("-")
RowHeaders = list[list[tuple[str, bytes | None]]]


class Epoch(StrEnum):
    """The unit of numbers that stand for times."""

    s = "s"
    ms = "ms"
    us = "us"
    ns = "ns"


@dataclass
class ProduceResult:
    """The rows that were stored so far."""

    rows: int = 0
    appends: int = 0
    duplicates: int = 0
    stored_before: int = 0
    """Rows of files that an earlier command stored."""
    skipped: int = 0
    """Bad rows that were skipped."""
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
        list[Path] | None,
        typer.Argument(
            help="Files to read, also .gz and .zst; none, or -, is standard input.",
        ),
    ] = None,
    format: Annotated[
        Format | None,
        typer.Option(help="The format. Default: by the file's name, and jsonl for standard input."),
    ] = None,
    delimiter: Annotated[
        str | None,
        typer.Option(
            metavar="CHARACTER",
            help="What separates the fields of CSV, or tab. Default: found in the heading.",
        ),
    ] = None,
    epoch: Annotated[
        Epoch | None,
        typer.Option(help="The unit of numbers in columns of times, since 1970 in UTC."),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=TEXT", help="A header for every row; can be repeated."),
    ] = None,
    skip_bad: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Skip up to N bad rows, and say which they are."),
    ] = 0,
    again: Annotated[
        bool, typer.Option("--again", help="Store rows of a file that are stored already, too.")
    ] = False,
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

    JSON is one object a line, or an array of objects. JSON and CSV are read by the topic's schema:
    times in ISO 8601 (or numbers, with --epoch), decimals as numbers or strings, binary in base64,
    an empty CSV field as null. The columns _partition, _offset and _timestamp are ignored and
    _headers become headers, so that what `consume --json` prints can be produced again.

    A file is stored once: what an earlier command has stored of it, from its beginning on, is
    skipped. So after an interruption or a bad row, correct the row and run the command again.

    Example: headrace produce orders orders.csv --log file:data
    """
    if sequence is not None and id is None:
        raise typer.BadParameter(
            "Appends are numbered per producer: give --id too.", param_hint="--sequence"
        )
    paths = files or [STDIN]
    with open_chosen_log(context, log) as opened_log, _progress() as progress:
        info = opened_log.topic(topic)
        if partition is not None and info.is_table:
            raise typer.BadParameter(
                "The key of a table's row decides its partition.", param_hint="--partition"
            )
        options = _Options(
            format=format,
            delimiter="\t" if delimiter in {"tab", "\\t"} else delimiter,
            epoch=epoch,
            headers=_headers(header or []),
            batch_rows=batch_rows,
            partition=partition,
            skip_bad=skip_bad,
            progress=progress,
        )
        result = ProduceResult()
        numbered = None if id is None else _NumberedAppends(opened_log, info, id, sequence)
        try:
            for path in paths:
                is_stream = path == STDIN or (path.exists() and not path.is_file())
                if again and not is_stream:
                    forget_stop(opened_log, info, path)
                if is_stream or numbered is not None or again:
                    destination: _Destination = numbered or _PlainAppends(opened_log, info, path)
                else:
                    destination = _FileAppends(opened_log, info, path, options.format_of(path))
                _Production(path, info, destination, options, result).run()
        except KeyboardInterrupt:
            print(f"Interrupted: {_summary(topic, result)}", file=sys.stderr)
            raise
    _report(topic, result, id, json=json)


@dataclass(frozen=True)
class _Options:
    """How files are read, and what is done with their rows."""

    format: Format | None
    delimiter: str | None
    epoch: str | None
    headers: list[tuple[str, bytes | None]]
    batch_rows: int
    partition: int | None
    skip_bad: int
    progress: Progress | None

    def __post_init__(self) -> None:
        if self.delimiter is not None and len(self.delimiter) != 1:
            raise typer.BadParameter("A delimiter is one character.", param_hint="--delimiter")

    def format_of(self, path: Path) -> Format:
        return self.format or (Format.jsonl if path == STDIN else format_of(path))

    def progress_callback(self, label: str, total: int | None) -> OnRead:
        """A function that advances the progress bar of a file, if there is a terminal."""
        if self.progress is None:
            return lambda _: None
        progress, task = self.progress, self.progress.add_task(label, total=total)
        return lambda amount: progress.update(task, advance=amount)


def _headers(options: list[str]) -> list[tuple[str, bytes | None]]:
    for option in options:
        if "=" not in option:
            raise typer.BadParameter(
                f"{option!r} has no value: write NAME=TEXT.", param_hint="--header"
            )
    return [(name, text.encode()) for name, _, text in (each.partition("=") for each in options)]


# Destinations: how appends are stored, and what a repetition of the command does


class _Destination(Protocol):
    """Where the rows of a file go. `part` is what of the file is stored already."""

    part: StoredPart
    is_repeatable: bool
    """Whether each append must have the same rows when the command is run again."""

    def append(
        self,
        batch: pa.RecordBatch,
        headers: RowHeaders | None,
        partition: int | None,
        part: StoredPart,
    ) -> AppendResult: ...

    def skip(self, part: StoredPart) -> None:
        """Go on to `part` without storing rows: all rows up to there were bad."""

    def stop(self, line: int | None) -> str:
        """Remember that the file stops at a bad row, and say what to do, if rows up to a line are
        stored.
        """

    def close(self) -> None: ...


class _FileAppends:
    """Appends that store with their rows how far the file has come."""

    is_repeatable = False

    def __init__(self, log: Log, info: TopicInfo, path: Path, file_format: Format) -> None:
        self._progress = FileProgress(log, info, path, file_format)
        self.part = self._progress.part

    def append(
        self,
        batch: pa.RecordBatch,
        headers: RowHeaders | None,
        partition: int | None,
        part: StoredPart,
    ) -> AppendResult:
        return self._progress.append(batch, headers, partition, part)

    def skip(self, part: StoredPart) -> None:
        self._progress.append(None, None, None, part)

    def stop(self, line: int | None) -> str:
        self._progress.stop()
        behind = "" if line is None else f" and goes on behind line {line:,}"
        return (
            "Correct the row, and leave what is before it as it is. Run the command again: it"
            f" skips what is stored{behind}."
        )

    def close(self) -> None:
        self._progress.close()


class _PlainAppends:
    """Appends of rows that nobody remembers: of standard input, or of a file that is stored once
    more.
    """

    is_repeatable = False

    def __init__(self, log: Log, info: TopicInfo, path: Path) -> None:
        self._info, self._path = info, path
        self._producer = log.producer(info.name)
        self.part = StoredPart()

    def append(
        self,
        batch: pa.RecordBatch,
        headers: RowHeaders | None,
        partition: int | None,
        part: StoredPart,
    ) -> AppendResult:
        self.part = part
        return _append(self._producer, self._info, batch, headers, partition, None)

    def skip(self, part: StoredPart) -> None:
        self.part = part

    def stop(self, line: int | None) -> str:
        where = "the rest" if line is None else f"only what is behind line {line:,}"
        return f"Produce {where}: everything else would be stored twice."

    def close(self) -> None:
        self._producer.close()


class _NumberedAppends:
    """Appends under the id that the user chose, numbered from `sequence` on."""

    is_repeatable = True

    def __init__(self, log: Log, info: TopicInfo, id: str, sequence: int | None) -> None:
        self._info = info
        self._producer = log.producer(info.name, id)
        self._first = self._producer.last_sequence + 1 if sequence is None else sequence
        self._next = self._first
        self.part = StoredPart()

    def append(
        self,
        batch: pa.RecordBatch,
        headers: RowHeaders | None,
        partition: int | None,
        part: StoredPart,  # noqa: ARG002 - numbers say how far it came
    ) -> AppendResult:
        appended = _append(self._producer, self._info, batch, headers, partition, self._next)
        self._next += 1
        return appended

    def skip(self, part: StoredPart) -> None:
        """Numbers count appends, and nothing was appended."""

    def stop(self, line: int | None) -> str:  # noqa: ARG002 - numbers say how far it came
        return (
            f"Run the command again with --id {self._producer.id} --sequence {self._first} and the"
            " same --batch-rows: appends that are stored are skipped."
        )

    def close(self) -> None:
        """The files of one command share the producer; it ends with the log."""


def _append(
    producer: Producer,
    info: TopicInfo,
    batch: pa.RecordBatch,
    headers: RowHeaders | None,
    partition: int | None,
    sequence: int | None,
) -> AppendResult:
    if info.is_table and CHANGE_TYPE not in batch.schema.names:
        return producer.upsert(batch, sequence=sequence, headers=headers)
    return producer.append(batch, sequence=sequence, headers=headers, partition=partition)


# Files


@dataclass(frozen=True)
class _Chunk:
    """Rows that fit the topic, in the form of a batch, and how far the file is read with them."""

    batch: pa.RecordBatch | None
    headers: RowHeaders | None
    end: ReadPosition
    records: int
    """By how many rows the stored part of the file grows; of Parquet the bad ones included."""


class _Production:
    """Stores the rows of one file."""

    def __init__(
        self,
        path: Path,
        info: TopicInfo,
        destination: _Destination,
        options: _Options,
        result: ProduceResult,
    ) -> None:
        self._path, self._info = path, info
        self._destination, self._options, self._result = destination, options, result
        self._format = options.format_of(path)
        self._source = "standard input" if path == STDIN else str(path)
        self._is_checking = False

    def run(self) -> None:
        """Store the file's rows chunk by chunk, from where an earlier command stopped."""
        destination, result = self._destination, self._result
        result.stored_before += destination.part.rows
        rows, line, is_skippable = destination.part.rows, None, True
        chunks = self._parquet() if self._format is Format.parquet else self._text()
        try:
            for chunk in chunks:
                part = StoredPart(chunk.end.bytes, chunk.end.digest, rows + chunk.records)
                if chunk.batch is None:
                    destination.skip(part)
                else:
                    is_skippable = False
                    appended = destination.append(
                        chunk.batch, chunk.headers, self._options.partition, part
                    )
                    result.add(chunk.batch.num_rows, appended, self._info.name)
                rows, line, is_skippable = part.rows, chunk.end.lines, True
        except BadRows as error:
            outcome, fixes = "Nothing was stored.", [error.fix]
            if rows:
                outcome = f"The {count_text(rows, 'row')} of earlier appends were stored."
                fixes.append(destination.stop(line))
            if is_skippable:
                fixes.append("--skip-bad N skips up to N such rows.")
            raise BadRows(f"{error.message} {outcome}", fix=" ".join(filter(None, fixes))) from None
        finally:
            destination.close()

    # Text

    def _text(self) -> Iterator[_Chunk]:
        is_csv = self._format is Format.csv
        parser = TextRowParser(
            self._info.arrow_schema,
            self._info.key,
            is_table=self._info.is_table,
            topic=self._info.name,
            source=self._source,
            epoch=self._options.epoch,
            history=self._info.schema_history,
        )
        for chunk in self._row_chunks(parser):
            rows, batch = self._fitting(
                chunk.rows, lambda rows: parser.batch(rows, csv=is_csv), chunk.bad
            )
            headers = self._row_headers(parser.headers(rows), len(rows))
            yield _Chunk(batch, headers, chunk.end, len(rows))

    def _row_chunks(self, parser: TextRowParser) -> Iterator[RowChunk]:
        path, options, is_stdin = self._path, self._options, self._path == STDIN
        stream = sys.stdin.buffer if is_stdin else open_file(path)
        is_measured = not is_stdin and path.suffix.lower() not in COMPRESSED_SUFFIXES
        on_read = options.progress_callback(
            self._source if is_stdin else path.name,
            path.stat().st_size if is_measured else None,
        )
        meter, start = ReadMeter(), self._destination.part.bytes
        size = ChunkSize(options.batch_rows, is_eager=not self._destination.is_repeatable)
        with stream:
            if self._format is Format.csv:
                yield from csv_chunks(
                    stream,
                    self._source,
                    meter=meter,
                    size=size,
                    delimiter=options.delimiter or ("\t" if ".tsv" in path.suffixes else None),
                    columns=self._info.columns,
                    start=start,
                    on_read=on_read,
                )
                return
            is_array = None
            if start:
                first = stream.read(1)
                while first.isspace():
                    meter.add(first)
                    first = stream.read(1)
                meter.add(first)
                is_array = first == b"["
                skip_to(stream, meter, start)
            yield from json_chunks(
                self._blocks(stream, waits=is_stdin and size.is_eager),
                self._source,
                meter=meter,
                size=size,
                decimals=parser.has_decimals,
                on_read=on_read,
                is_array=is_array,
            )

    def _blocks(self, stream: BinaryIO, *, waits: bool) -> Blocks:
        if waits:
            try:
                return arriving_blocks(stream.fileno())
            except io.UnsupportedOperation:  # standard input that is not a file
                pass
        return file_blocks(stream, self._source)

    # Parquet

    def _parquet(self) -> Iterator[_Chunk]:
        """The rows of a Parquet file. All of them are checked first: a file that is corrected is
        another file, so that a part of it could not be recognised.
        """
        path, start = self._path, self._destination.part.rows
        if path == STDIN:
            raise InputError(
                "Parquet cannot be read from standard input: its index is at the end.",
                fix="name the file.",
            )
        meter = ReadMeter()
        with open_file(path) as stream:
            skip_to(stream, meter, sys.maxsize)
        rows, skipped = parquet_rows(path), self._result.skipped
        self._is_checking = True
        for _ in self._parquet_chunks(start, meter.position(), lambda _: None):
            pass
        self._is_checking, self._result.skipped = False, skipped
        on_read = self._options.progress_callback(path.name, rows)
        yield from self._parquet_chunks(start, meter.position(), on_read)

    def _parquet_chunks(self, start: int, end: ReadPosition, on_read: OnRead) -> Iterator[_Chunk]:
        first = start
        for batch in parquet_batches(
            self._path, start=start, max_rows=self._options.batch_rows, on_read=on_read
        ):
            indices = list(range(batch.num_rows))
            try:
                fitting, rows = self._fitting(indices, partial(self._stored_rows, batch))
            except BadRows as error:
                message = f"{self._path}, rows from {first:,} (row 0) on: {error.message}"
                raise BadRows(message, fix=error.fix) from None
            yield _Chunk(rows, self._row_headers(None, len(fitting)), end, batch.num_rows)
            first += batch.num_rows

    def _stored_rows(self, batch: pa.RecordBatch, indices: Sequence[int]) -> pa.RecordBatch:
        """Some rows of a batch as the topic stores them. They are neighbours, or all that fit."""
        if len(indices) < batch.num_rows:
            batch = batch.take(pa.array(indices, pa.int64()))
        info = self._info
        if info.is_table and CHANGE_TYPE not in batch.schema.names:
            return upserts(batch, info.arrow_schema, topic=info.name)
        rows = to_batch(batch, info.arrow_schema, topic=info.name)
        if info.is_table:
            check_changes(rows, topic=info.name)
        return rows

    # Rows

    def _row_headers(self, headers: RowHeaders | None, count: int) -> RowHeaders | None:
        if not self._options.headers:
            return headers
        return [[*entry, *self._options.headers] for entry in headers or [[]] * count]

    def _fitting(
        self,
        rows: list[Row],
        build: Callable[[list[Row]], pa.RecordBatch],
        unreadable: Sequence[tuple[int, BadRows]] = (),
    ) -> tuple[list[Row], pa.RecordBatch | None]:
        """The rows that fit the topic, and the batch of them, if there are any. Raises the error of
        the first that does not fit, unless it may be skipped.
        """
        if rows and not unreadable:
            try:
                return rows, build(rows)
            except BadRows:
                pass  # find out which rows
        bad = _bad_rows(rows, build, self._options.skip_bad - self._result.skipped)
        lines = [row.line if isinstance(row, TextRow) else index for index, row in enumerate(rows)]
        errors = [*unreadable, *((lines[index], error) for index, error in bad.items())]
        for _, error in sorted(errors, key=lambda each: each[0]):
            if self._result.skipped >= self._options.skip_bad:
                if self._options.skip_bad:
                    error.add_note(
                        f"{count_text(self._result.skipped, 'bad row')} before it were skipped."
                    )
                raise error
            self._result.skipped += 1
            if not self._is_checking:
                print(f"Skipped: {error.message}", file=sys.stderr)
        fitting = [row for index, row in enumerate(rows) if index not in bad]
        return fitting, build(fitting) if fitting else None


Row = TypeVar("Row")


def _bad_rows(
    rows: list[Row], build: Callable[[list[Row]], Any], allowed: int
) -> dict[int, BadRows]:
    """The rows that cannot be built, by their index, with the reason. They are found by halving.
    One more than allowed is enough.
    """
    bad: dict[int, BadRows] = {}

    def find(start: int, stop: int) -> None:
        if start == stop or len(bad) > allowed:
            return
        try:
            build(rows[start:stop])
        except BadRows as error:
            if stop - start == 1 or allowed == 0:
                bad[start] = error
                return
            middle = (start + stop) // 2
            find(start, middle)
            find(middle, stop)

    find(0, len(rows))
    return bad


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
        counts = {
            "rows": result.rows,
            "appends": result.appends,
            "duplicates": result.duplicates,
            "stored_before": result.stored_before,
            "skipped": result.skipped,
        }
        print_json(
            {"topic": topic, "id": id, **counts, "partitions": partitions, "position": offsets}
        )
        return
    echo(_summary(topic, result))


def _summary(topic: str, result: ProduceResult) -> str:
    parts = [f"Stored {count_text(result.rows, 'row')} in {topic}"]
    if result.duplicates:
        parts.append(
            f"{result.duplicates:,} of {result.appends:,} appends were stored before and skipped"
        )
    if result.stored_before:
        parts.append(
            f"{count_text(result.stored_before, 'row')} of the files were stored before and skipped"
            " (--again stores them once more)"
        )
    if result.skipped:
        parts.append(f"{count_text(result.skipped, 'bad row')} skipped")
    return "; ".join(parts) + "."
