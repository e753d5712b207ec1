"""`headrace consume`: prints the rows of a topic as a table, lines or JSON, alone or as a member of
a consumer group.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Annotated

import pyarrow as pa
import pyarrow.compute as pc
import typer

from headrace.cli.options import JsonOption, LogOption, open_chosen_log, parse_offset
from headrace.cli.output import format_cell, print_table
from headrace.columnar.columns import OFFSET_COLUMN, PARTITION_COLUMN, TIMESTAMP_COLUMN
from headrace.errors import HeadraceError
from headrace.log.api import Consumer, Log
from headrace.log.topic_config import resolve_offset_alias
from headrace.types.json_codec import object_text

POSITION_COLUMNS = [PARTITION_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN]
TABLE_ROWS = 1_000
POLL_SECONDS = 0.2
JOIN_SECONDS = 15.0

Show = Callable[[pa.RecordBatch], None]


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
    partition: Annotated[int | None, typer.Option(min=0, help="Read this partition only.")] = None,
    headers: Annotated[bool, typer.Option("--headers", help="Show the rows' headers too.")] = False,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Print a topic's rows up to its end, or with --follow as they arrive.

    With --group, reading starts at the group's offsets, and at --from (earliest or latest) only in
    partitions where it has none; the offsets of printed rows are committed.

    Example: headrace consume orders --from 2026-01-31T12:00:00Z --json --log file:data
    """
    show = show_json if json else show_lines if follow else show_table
    start = resolve_offset_alias(start)
    with open_chosen_log(context, log) as opened_log:
        if group is None:
            batches = _read(
                opened_log,
                topic,
                partition,
                parse_offset(start or "earliest", option="--from"),
                headers=headers,
                follow=follow,
            )
            _print(batches, show, max_rows)
        else:
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
            opened_log.topic(topic)
            with opened_log.consumer(
                topic, group, start=start or "earliest", headers=headers
            ) as consumer:
                _consume(opened_log, consumer, show, max_rows, follow=follow)


# Without a group


def _read(
    log: Log,
    topic: str,
    partition: int | None,
    start: str | int | datetime,
    *,
    headers: bool,
    follow: bool,
) -> Iterator[pa.RecordBatch]:
    """The rows from an offset to the current end of the topic; with `follow`, without end."""
    positions = _start_offsets(log, topic, partition, start)
    while True:
        ends = log.end_offsets(topic)
        for number, position in positions.items():
            if position < ends[number]:
                yield from log.read(topic, number, position, ends[number], headers=headers)
                positions[number] = ends[number]
        if not follow:
            return
        time.sleep(POLL_SECONDS)


def _start_offsets(
    log: Log, topic: str, partition: int | None, start: str | int | datetime
) -> dict[int, int]:
    earliest, ends = log.start_offsets(topic), log.end_offsets(topic)
    if partition is not None and partition not in ends:
        raise typer.BadParameter(
            f"{topic} has the partitions 0 to {len(ends) - 1}.", param_hint="--partition"
        )
    if start == "earliest":
        offsets = earliest
    elif start == "latest":
        offsets = ends
    elif isinstance(start, int):
        offsets = dict.fromkeys(ends, start)
    else:
        offsets = log.offsets_at(topic, start)
    return {number: offsets[number] for number in sorted(ends) if partition in {None, number}}


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


def _print(batches: Iterator[pa.RecordBatch], show: Show, max_rows: int | None) -> None:
    left = max_rows
    for batch in _table_batches(batches) if show is show_table else batches:
        show(batch if left is None else batch.slice(0, left))
        sys.stdout.flush()
        left = None if left is None else left - batch.num_rows
        if left is not None and left <= 0:
            return


# As a member of a group


def _consume(
    log: Log, consumer: Consumer, show: Show, max_rows: int | None, *, follow: bool
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
        shown = _show_some(batches, show, left)
        sys.stdout.flush()
        if shown < sum(batch.num_rows for batch in batches):
            consumer.commit({topic: _offsets_after(batches, shown)})
        elif batches:
            consumer.commit()
        left = None if left is None else left - shown
        if not follow and _is_at_end(consumer, ends, join_deadline):
            return


def _show_some(batches: list[pa.RecordBatch], show: Show, max_rows: int | None) -> int:
    """Show at most `most` rows; returns how many were shown."""
    shown = 0
    for batch in _concatenate(batches) if show is show_table else batches:
        part = batch if max_rows is None else batch.slice(0, max_rows - shown)
        if part.num_rows:
            show(part)
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
