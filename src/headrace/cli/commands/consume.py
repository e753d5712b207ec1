"""`headrace consume`: rows of a topic on standard output, as a table, as lines, or as JSON; alone
or as a member of a group.
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

from headrace.cli.options import JsonOption, LogOption, opened, place
from headrace.cli.output import cell, table
from headrace.columnar.columns import OFFSET_COLUMN, PARTITION_COLUMN, TIMESTAMP_COLUMN
from headrace.errors import HeadraceError
from headrace.log.api import Consumer, Log
from headrace.log.topic_config import place_word
from headrace.types.json_codec import object_text

PLACE_COLUMNS = [PARTITION_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN]
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
            metavar="PLACE",
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
    most: Annotated[
        int | None, typer.Option("--max", min=1, help="Stop after this many rows.")
    ] = None,
    partition: Annotated[int | None, typer.Option(min=0, help="Read this partition only.")] = None,
    headers: Annotated[bool, typer.Option("--headers", help="Show the rows' headers too.")] = False,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Print a topic's rows up to its end, or with --follow as they come.

    With --group, the group's position counts, --from (earliest or latest) only where it has none,
    and what was printed is committed.

    Example: headrace consume orders --from 2026-01-31T12:00:00Z --json --log file:data
    """
    show = show_json if json else show_lines if follow else show_table
    start = place_word(start)
    with opened(context, log) as opened_log:
        if group is None:
            batches = _read(
                opened_log,
                topic,
                partition,
                place(start or "earliest", option="--from"),
                headers=headers,
                follow=follow,
            )
            _print(batches, show, most)
        else:
            _refuse_place(start, partition)
            opened_log.topic(topic)
            with opened_log.consumer(
                topic, group, start=start or "earliest", headers=headers
            ) as consumer:
                _consume(opened_log, consumer, show, most, follow=follow)


def _refuse_place(start: str | None, partition: int | None) -> None:
    if start not in {None, "earliest", "latest"}:
        raise typer.BadParameter(
            "A group goes on where it stopped: move it with `headrace group reset`, then read.",
            param_hint="--from",
        )
    if partition is not None:
        raise typer.BadParameter(
            "A group shares out the partitions itself; read one without --group.",
            param_hint="--partition",
        )


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
    """The rows from a place to the end as it is now; with `follow`, for ever."""
    positions = _places(log, topic, partition, start)
    while True:
        ends = log.end_offsets(topic)
        for number, position in positions.items():
            if position < ends[number]:
                yield from log.read(topic, number, position, ends[number], headers=headers)
                positions[number] = ends[number]
        if not follow:
            return
        time.sleep(POLL_SECONDS)


def _places(
    log: Log, topic: str, partition: int | None, start: str | int | datetime
) -> dict[int, int]:
    earliest, ends = log.start_offsets(topic), log.end_offsets(topic)
    if partition is not None and partition not in ends:
        raise typer.BadParameter(
            f"{topic} has the partitions 0 to {len(ends) - 1}.", param_hint="--partition"
        )
    if start == "earliest":
        places = earliest
    elif start == "latest":
        places = ends
    elif isinstance(start, int):
        places = dict.fromkeys(ends, start)
    else:
        places = log.offsets_at(topic, start)
    return {number: places[number] for number in sorted(ends) if partition in {None, number}}


def _in_tables(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Small batches, such as those of several partitions, put together, so that they share a
    heading.
    """
    held: list[pa.RecordBatch] = []
    try:
        for batch in batches:
            held.append(batch)
            if sum(each.num_rows for each in held) >= TABLE_ROWS:
                yield from _joined(held)
                held = []
    except HeadraceError:
        yield from _joined(held)  # what could be read is shown before the error
        raise
    yield from _joined(held)


def _joined(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    joined: list[pa.RecordBatch] = (
        pa.Table.from_batches(batches).combine_chunks().to_batches() if batches else []
    )
    return joined


def _print(batches: Iterator[pa.RecordBatch], show: Show, most: int | None) -> None:
    left = most
    for batch in _in_tables(batches) if show is show_table else batches:
        show(batch if left is None else batch.slice(0, left))
        sys.stdout.flush()
        left = None if left is None else left - batch.num_rows
        if left is not None and left <= 0:
            return


# As a member of a group


def _consume(log: Log, consumer: Consumer, show: Show, most: int | None, *, follow: bool) -> None:
    """Print, flush, commit: in this order, so that a row is committed only when it was printed."""
    (topic,) = consumer.topics
    ends = log.end_offsets(topic)
    left = most
    give_up = time.monotonic() + JOIN_SECONDS
    while left is None or left > 0:
        batches = consumer.poll(timeout=f"{POLL_SECONDS} seconds", max_rows=left)
        shown = _show_some(batches, show, left)
        sys.stdout.flush()
        if shown < sum(batch.num_rows for batch in batches):
            consumer.commit({topic: _reached(batches, shown)})
        elif batches:
            consumer.commit()
        left = None if left is None else left - shown
        if not follow and _at_end(consumer, ends, give_up):
            return


def _show_some(batches: list[pa.RecordBatch], show: Show, most: int | None) -> int:
    """Show at most so many rows; returns how many."""
    shown = 0
    for batch in _joined(batches) if show is show_table else batches:
        part = batch if most is None else batch.slice(0, most - shown)
        if part.num_rows:
            show(part)
        shown += part.num_rows
    return shown


def _reached(batches: list[pa.RecordBatch], shown: int) -> dict[int, int]:
    """The positions behind the first `shown` rows."""
    rows = pa.Table.from_batches(batches).select([PARTITION_COLUMN, OFFSET_COLUMN]).slice(0, shown)
    newest = rows.group_by(PARTITION_COLUMN).aggregate([(OFFSET_COLUMN, "max")])
    return {
        number: offset + 1
        for number, offset in zip(*(column.to_pylist() for column in newest.columns), strict=True)
    }


def _at_end(consumer: Consumer, ends: dict[int, int], give_up: float) -> bool:
    """Whether this member has read its partitions up to where they ended when it began."""
    (topic,) = consumer.topics
    positions = consumer.positions().get(topic, {})
    if not positions:  # not assigned any yet, or others have them all
        return time.monotonic() > give_up
    return all(position >= ends.get(number, 0) for number, position in positions.items())


# Output


def show_json(batch: pa.RecordBatch) -> None:
    """One JSON object a row, made column by column."""
    lines = object_text(list(batch.schema.names), batch.columns)
    if batch.num_rows:
        sys.stdout.write("\n".join(lines.to_pylist()) + "\n")


def show_table(batch: pa.RecordBatch) -> None:
    names = _place_first(batch)
    for first in range(0, batch.num_rows, TABLE_ROWS):
        rows = _to_the_second(batch.slice(first, TABLE_ROWS)).to_pylist()
        table(
            [name.removeprefix("_") if name in PLACE_COLUMNS else name for name in names],
            [[row[name] for name in names] for row in rows],
        )


def _to_the_second(batch: pa.RecordBatch) -> pa.RecordBatch:
    """When a row came, short enough for a table; `--json` and `--follow` have the microseconds."""
    position = batch.schema.get_field_index(TIMESTAMP_COLUMN)
    return batch.set_column(
        position, TIMESTAMP_COLUMN, pc.floor_temporal(batch.column(position), unit="second")
    )


def show_lines(batch: pa.RecordBatch) -> None:
    """One line a row: where it is, when it came, and its values."""
    names = [name for name in batch.schema.names if name not in PLACE_COLUMNS]
    for row in batch.to_pylist():
        values = "  ".join(f"{name}={cell(row[name])}" for name in names)
        print(
            f"{row[PARTITION_COLUMN]}/{row[OFFSET_COLUMN]}  {cell(row[TIMESTAMP_COLUMN])}  {values}"
        )


def _place_first(batch: pa.RecordBatch) -> list[str]:
    return [*PLACE_COLUMNS, *(name for name in batch.schema.names if name not in PLACE_COLUMNS)]
