"""`headrace consume`: prints the rows of a topic as a table, lines or JSON, alone or as a member of
a consumer group.
"""

from __future__ import annotations

import re
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import lru_cache
from typing import Annotated

import pyarrow as pa
import pyarrow.compute as pc
import typer

from headrace.cli.options import JsonOption, LogOption, open_chosen_log, parse_offset
from headrace.cli.output import count_text, format_cell, print_table
from headrace.columnar.columns import OFFSET_COLUMN, PARTITION_COLUMN, TIMESTAMP_COLUMN
from headrace.durations import to_time_us
from headrace.errors import BadExpression, HeadraceError, OffsetOutOfRange, UnknownColumn
from headrace.log.api import Consumer, Log
from headrace.log.topic_config import resolve_offset_alias
from headrace.log.values import readable_schema
from headrace.types.json_codec import object_text
from headrace.types.sqlite_codec import affinity, to_values

POSITION_COLUMNS = [PARTITION_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN]
TABLE_ROWS = 1_000
POLL_SECONDS = 0.2
JOIN_SECONDS = 15.0

Show = Callable[[pa.RecordBatch], None]
Keep = Callable[[pa.RecordBatch], pa.RecordBatch]


def consume(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(help="The topic to read.")],
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="OFFSET",
            help=(
                'earliest (the default), latest, an offset, or a time (ISO 8601, or "1 hour ago").'
            ),
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(help="Read as a member of this group, and commit what was printed."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for more rows until Ctrl-C.")
    ] = False,
    max_rows: Annotated[
        int | None, typer.Option("--max", min=1, help="Stop after this many rows.")
    ] = None,
    last: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="The last N rows; with --follow, and what follows."),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="OFFSET", help="Stop before this offset or append time, in the form of --from."
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="CONDITION",
            help='Only the rows for which this is true, in Spark SQL: "amount > 100".',
        ),
    ] = None,
    partition: Annotated[int | None, typer.Option(min=0, help="Read this partition only.")] = None,
    headers: Annotated[bool, typer.Option("--headers", help="Show the rows' headers too.")] = False,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Print a topic's rows up to its end, or with --follow as they arrive.

    With --group, reading starts at the group's offsets, and at --from (earliest or latest) only in
    partitions where it has none; the offsets of printed rows are committed. Rows that --where
    leaves out count as printed.

    Example: headrace consume orders --from 2026-01-31T12:00:00Z --json --log file:data
    """
    show = show_json if json else show_lines if follow else show_table
    start = resolve_offset_alias(start)
    if last is not None and start is not None:
        raise typer.BadParameter("The last rows have no other start: leave out --from.")
    if until is not None and follow:
        raise typer.BadParameter("Rows that follow have no end: leave out --until or --follow.")
    with open_chosen_log(context, log) as opened_log:
        info = opened_log.topic(topic)
        keep = _condition(where, readable_schema(info, headers=headers))
        if group is None:
            read = _TopicRead(opened_log, topic, partition, headers=headers)
            if start is not None:
                read.start_at(parse_offset(start, option="--from"), follow=follow)
            if until is not None:
                read.stop_at(parse_offset(until, option="--until"))
            batches = read.rows(last=last, follow=follow)
            printed = _print(map(keep, batches), show, max_rows)
            if not printed and start not in {None, "earliest", "latest"} and where is None:
                print(f"{topic} has no rows there: {read.range_text()}.", file=sys.stderr)
            read.warn()
        else:
            for option, value in (("--last", last), ("--until", until)):
                if value is not None:
                    raise typer.BadParameter(
                        "A group reads on from where it stopped.", param_hint=option
                    )
            if start not in {None, "earliest", "latest"}:
                raise typer.BadParameter(
                    "A group continues where it stopped: move it with `headrace group reset`, then"
                    " read.",
                    param_hint="--from",
                )
            if partition is not None:
                raise typer.BadParameter(
                    "A group assigns its partitions itself; read a single partition without"
                    " --group.",
                    param_hint="--partition",
                )
            with opened_log.consumer(
                topic, group, start=start or "earliest", headers=headers
            ) as consumer:
                _consume(opened_log, consumer, show, keep, max_rows, follow=follow)


# Without a group


class _TopicRead:
    """Rows of a topic's partitions between two offsets, read without a group."""

    def __init__(self, log: Log, topic: str, partition: int | None, *, headers: bool) -> None:
        self._log, self._topic, self._headers = log, topic, headers
        earliest, self._ends = log.start_offsets(topic), log.end_offsets(topic)
        if partition is not None and partition not in self._ends:
            raise typer.BadParameter(
                f"{topic} has the partitions 0 to {len(self._ends) - 1}.", param_hint="--partition"
            )
        self._numbers = [number for number in sorted(earliest) if partition in {None, number}]
        self._earliest = {number: earliest[number] for number in self._numbers}
        self._positions = dict(self._earliest)
        self._stops: dict[int, int] | None = None
        self._misfits = 0
        self._unknown: Counter[str] = Counter()

    def start_at(self, start: str | int | datetime, *, follow: bool) -> None:
        """Begin at an offset or time. An offset that does not exist yet in any partition is
        refused; or, if rows are waited for, it is said what for.
        """
        self._positions = self._offsets(start)
        behind = [
            number for number in self._numbers if self._positions[number] > self._ends[number]
        ]
        if isinstance(start, int) and behind == self._numbers:
            if follow:
                print(
                    f"Waiting for offset {start} of {self._topic}: {self.range_text()}.",
                    file=sys.stderr,
                )
                return
            number = behind[0]
            raise OffsetOutOfRange(
                self._topic, number, start, self._earliest[number], self._ends[number]
            )

    def stop_at(self, until: str | int | datetime) -> None:
        self._stops = self._offsets(until)

    def _offsets(self, position: str | int | datetime) -> dict[int, int]:
        if position == "earliest":
            return dict(self._earliest)
        if position == "latest":
            return {number: self._ends[number] for number in self._numbers}
        if isinstance(position, int):
            return dict.fromkeys(self._numbers, position)
        found = self._log.offsets_at(self._topic, position)
        return {number: found[number] for number in self._numbers}

    def rows(self, *, last: int | None, follow: bool) -> Iterator[pa.RecordBatch]:
        """The rows up to the current end of the topic; with `follow`, without end."""
        if last is not None:
            yield from self._last_rows(last)
        while True:
            for number, position in self._positions.items():
                stop = self._stop(number)
                if position < stop:
                    yield from self._read(number, position, stop)
                    self._positions[number] = stop
            if not follow:
                return
            time.sleep(POLL_SECONDS)
            self._ends = self._log.end_offsets(self._topic)

    def _stop(self, number: int) -> int:
        end = self._ends.get(number, 0)
        return end if self._stops is None else min(end, self._stops[number])

    def _last_rows(self, count: int) -> Iterator[pa.RecordBatch]:
        """The last rows of all partitions, in the order in which they were appended."""
        newest: list[pa.Table] = []
        for number in self._numbers:
            stop = self._stop(number)
            start, rows = stop, pa.table({})
            span = count
            # Offsets have gaps: look further back until there are enough rows.
            misfits, unknown = self._misfits, self._unknown.copy()
            while rows.num_rows < count and start > self._earliest[number]:
                start = max(self._earliest[number], stop - span)
                self._misfits, self._unknown = misfits, unknown.copy()  # it is read once more
                batches = list(self._read(number, start, stop))
                rows = pa.Table.from_batches(batches) if batches else pa.table({})
                span *= 4
            if rows.num_rows:
                newest.append(rows.slice(max(0, rows.num_rows - count)))
            self._positions[number] = stop
        if newest:
            rows = pa.concat_tables(newest).sort_by(
                [
                    (name, "ascending")
                    for name in (TIMESTAMP_COLUMN, PARTITION_COLUMN, OFFSET_COLUMN)
                ]
            )
            yield from rows.slice(max(0, rows.num_rows - count)).combine_chunks().to_batches()

    def _read(self, number: int, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        batches = self._log.read(self._topic, number, start, stop, headers=self._headers)
        yield from batches
        self._misfits += batches.misfits
        self._unknown.update(batches.unknown_fields)

    def range_text(self) -> str:
        """The offsets that exist, in words."""
        return ", ".join(
            f"partition {number} has the offsets {self._earliest[number]} to {self._ends[number]}"
            for number in self._numbers
        )

    def warn(self) -> None:
        """Say on standard error which records of other programs were not printed as they are."""
        if self._misfits:
            print(
                f"{count_text(self._misfits, 'record')} of {self._topic} do not fit its schema:"
                f" `headrace log verify {self._topic}` lists them.",
                file=sys.stderr,
            )
        if self._unknown:
            names = ", ".join(f"{name} ({count:,})" for name, count in self._unknown.most_common(5))
            print(
                f"Fields that {self._topic} does not have were ignored: {names}.", file=sys.stderr
            )


def _condition(where: str | None, schema: pa.Schema) -> Keep:
    return (lambda rows: rows) if where is None else _Condition(where, schema)


class _Condition:
    """Keeps the rows for which a condition is true. SQLite computes it; a DECIMAL is a number, and
    times are compared as times with whatever text names one.
    """

    def __init__(self, where: str, schema: pa.Schema) -> None:
        self._where, self._names = where, schema.names
        self._db = sqlite3.connect(":memory:")
        self._db.create_collation("times", _compare_times)
        columns = ", ".join(f"{_quoted(field.name)} {_column_type(field.type)}" for field in schema)
        self._db.execute(f"CREATE TABLE rows (_headrace_row INTEGER PRIMARY KEY, {columns})")
        marks = ", ".join("?" * (len(schema) + 1))
        # The condition is the user's own, and this database has nothing but the rows.
        self._insert = f"INSERT INTO rows VALUES ({marks})"  # noqa: S608
        self._select = f"SELECT _headrace_row FROM rows WHERE ({where}\n)"  # noqa: S608
        self._matching()  # an error is found before anything is read

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        if not rows.num_rows:
            return rows
        columns = [
            column.cast(pa.float64()).to_pylist() if _is_decimal(column.type) else to_values(column)
            for column in (rows.column(name) for name in self._names)
        ]
        self._db.execute("DELETE FROM rows")
        self._db.executemany(self._insert, zip(range(rows.num_rows), *columns, strict=True))
        return rows.take(pa.array(self._matching(), pa.int64()))

    def _matching(self) -> list[int]:
        try:
            return sorted(number for (number,) in self._db.execute(self._select))
        except sqlite3.Error as error:
            missing = re.fullmatch(r"no such column: (.+)", str(error))
            if missing:
                raise UnknownColumn(missing[1], self._names, where="The topic") from None
            raise BadExpression(
                f"--where {self._where!r} cannot be used: {error}.",
                fix="write a condition in SQLite's SQL: \"amount > 100 AND name LIKE 'a%'\".",
            ) from None


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _column_type(kind: pa.DataType) -> str:
    if pa.types.is_timestamp(kind):
        return f"{affinity(kind)} COLLATE times"
    return "" if _is_decimal(kind) else affinity(kind)


def _compare_times(text: str, other: str) -> int:
    """Order two texts as the times that they are; as texts where one of them is none."""
    time_us, other_us = _time_us(text), _time_us(other)
    if time_us is None or other_us is None:
        return (text > other) - (text < other)
    return (time_us > other_us) - (time_us < other_us)


@lru_cache(maxsize=10_000)
def _time_us(text: str) -> int | None:
    if text.isdigit():  # the beginning of a time, such as a year
        return None
    try:
        return to_time_us(text)
    except HeadraceError:
        return None


def _is_decimal(kind: pa.DataType) -> bool:
    return bool(pa.types.is_decimal(kind))


def _table_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Small batches, such as those of several partitions, concatenated so that they share one
    table.
    """
    buffered: list[pa.RecordBatch] = []
    try:
        for batch in batches:
            buffered.append(batch)
            if sum(each.num_rows for each in buffered) >= TABLE_ROWS:
                yield from _concatenate(buffered)
                buffered = []
    except HeadraceError:
        yield from _concatenate(buffered)  # rows that were read are printed before the error
        raise
    yield from _concatenate(buffered)


def _concatenate(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    if not batches:
        return []
    whole: list[pa.RecordBatch] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return whole


def _print(batches: Iterator[pa.RecordBatch], show: Show, max_rows: int | None) -> int:
    """Print rows; returns how many."""
    printed = 0
    for batch in _table_batches(batches) if show is show_table else batches:
        part = batch if max_rows is None else batch.slice(0, max_rows - printed)
        if part.num_rows:
            show(part)
        sys.stdout.flush()
        printed += part.num_rows
        if max_rows is not None and printed >= max_rows:
            break
    return printed


# As a member of a group


def _consume(
    log: Log, consumer: Consumer, show: Show, keep: Keep, max_rows: int | None, *, follow: bool
) -> None:
    """Print, flush and commit, in this order: an offset is committed only after its row was
    printed.
    """
    (topic,) = consumer.topics
    ends = log.end_offsets(topic)
    left = max_rows
    join_deadline = time.monotonic() + JOIN_SECONDS
    while left is None or left > 0:
        batches = consumer.poll(timeout=f"{POLL_SECONDS} seconds", max_rows=left)
        shown = _show_some(batches, show, keep, left)
        sys.stdout.flush()
        if shown < sum(batch.num_rows for batch in batches):
            consumer.commit({topic: _offsets_after(batches, shown)})
        elif batches:
            consumer.commit()
        left = None if left is None else left - shown
        if not follow and _is_at_end(consumer, ends, join_deadline):
            return


def _show_some(batches: list[pa.RecordBatch], show: Show, keep: Keep, max_rows: int | None) -> int:
    """Show at most `max_rows` rows, those left out by the condition included; returns how many."""
    shown = 0
    for batch in _concatenate(batches) if show is show_table else batches:
        part = batch if max_rows is None else batch.slice(0, max_rows - shown)
        kept = keep(part)
        if kept.num_rows:
            show(kept)
        shown += part.num_rows
    return shown


def _offsets_after(batches: list[pa.RecordBatch], shown: int) -> dict[int, int]:
    """The offsets after the first `shown` rows."""
    rows = pa.Table.from_batches(batches).select([PARTITION_COLUMN, OFFSET_COLUMN]).slice(0, shown)
    newest = rows.group_by(PARTITION_COLUMN).aggregate([(OFFSET_COLUMN, "max")])
    return {
        number: offset + 1
        for number, offset in zip(*(column.to_pylist() for column in newest.columns), strict=True)
    }


def _is_at_end(consumer: Consumer, ends: dict[int, int], join_deadline: float) -> bool:
    """Whether this member has read its partitions up to the ends that they had at the start."""
    (topic,) = consumer.topics
    positions = consumer.positions().get(topic, {})
    if not positions:  # none is assigned yet, or other members have all
        return time.monotonic() > join_deadline
    return all(position >= ends.get(number, 0) for number, position in positions.items())


# Output


def show_json(batch: pa.RecordBatch) -> None:
    """Print one JSON object a row."""
    lines = object_text(list(batch.schema.names), batch.columns)
    if batch.num_rows:
        sys.stdout.write("\n".join(lines.to_pylist()) + "\n")


def show_table(batch: pa.RecordBatch) -> None:
    names = [
        *POSITION_COLUMNS,
        *(name for name in batch.schema.names if name not in POSITION_COLUMNS),
    ]
    for first in range(0, batch.num_rows, TABLE_ROWS):
        rows = _floor_timestamps(batch.slice(first, TABLE_ROWS)).to_pylist()
        print_table(
            [name.removeprefix("_") if name in POSITION_COLUMNS else name for name in names],
            [[row[name] for name in names] for row in rows],
        )


def _floor_timestamps(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with `_timestamp` in whole seconds, short enough for a table. `--json` and
    `--follow` print microseconds.
    """
    position = batch.schema.get_field_index(TIMESTAMP_COLUMN)
    return batch.set_column(
        position, TIMESTAMP_COLUMN, pc.floor_temporal(batch.column(position), unit="second")
    )


def show_lines(batch: pa.RecordBatch) -> None:
    """Print one line a row: partition and offset, timestamp, and values."""
    names = [name for name in batch.schema.names if name not in POSITION_COLUMNS]
    for row in batch.to_pylist():
        values = "  ".join(f"{name}={format_cell(row[name])}" for name in names)
        print(
            f"{row[PARTITION_COLUMN]}/{row[OFFSET_COLUMN]}  {format_cell(row[TIMESTAMP_COLUMN])} "
            f" {values}"
        )
