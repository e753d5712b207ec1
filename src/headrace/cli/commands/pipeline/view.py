"""`headrace view`: lists a pipeline's views and shows one (whole, by key, as it changes, or through
SQL). `view_versions.py` compares, switches and drops versions.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import pyarrow as pa
import typer

from headrace.cli.commands.log.consume import show_json
from headrace.cli.commands.pipeline.view_versions import diff, drop, switch
from headrace.cli.options import JsonOption, parse_seconds
from headrace.cli.output import count_text, echo, format_cell, print_json, print_table
from headrace.cli.view_stores import StateOption, find_queried_store, locate_served, open_stores
from headrace.columnar.columns import CHANGE_TYPE, TICK
from headrace.serve.requests import key_value_text
from headrace.serve.stores import ViewLocation, ViewStores
from headrace.types.schema import to_ddl
from headrace.types.text import csv_converter
from headrace.types.values import Misfit
from headrace.views.file import ViewInfo
from headrace.views.reader import Snapshot
from headrace.views.sql import check_names

TABLE_ROWS = 1_000
POLL_SECONDS = 0.2
_MARKS = {"insert": "+", "update_preimage": "-", "update_postimage": "+", "delete": "-"}

app = typer.Typer(help="Views: list, show, compare and switch versions.", no_args_is_help=True)


@app.command("list")
def list_views(state: StateOption = None, json: JsonOption = False) -> None:
    """List the views of the pipeline and of versions built by `headrace replay`, with where each is
    served from and the tick it shows.

    Example: headrace view list --state shop.state
    """
    with open_stores(state) as stores:
        views = [(location, *_view_size(location)) for location, _ in stores.views()]
    if json:
        for location, info, rows in views:
            described = {
                "name": location.name,
                "version": location.version,
                "key": list(info.key),
                "rows": rows,
                "tick": info.tick,
            }
            print_json({**described, "schema": to_ddl(info.schema)})
        return
    show_changes = [
        (
            location.name,
            "the pipeline" if location.version is None else f"version {location.version}",
            ", ".join(info.key) or "- (stream)",
            rows,
            info.tick,
            ", ".join(info.schema.names),
        )
        for location, info, rows in views
    ]
    print_table(
        ["view", "served from", "key", "rows", "tick", "columns"],
        show_changes,
        empty="No views yet.",
    )


def _view_size(location: ViewLocation) -> tuple[ViewInfo, int]:
    with location.store.reader.snapshot() as snap:
        return snap.view(location.stored_name), snap.count(location.stored_name)


@app.command()
def show(
    name: Annotated[
        str | None, typer.Argument(help="The view. With --sql it can be left out.")
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            "--key",
            help="Only the row of this key (\\\\N is null); once for each column, in order.",
        ),
    ] = None,
    sql: Annotated[
        str | None,
        typer.Option("--sql", metavar="QUERY", help="A SELECT over the views, in DuckDB's SQL."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Then print changes, until Ctrl-C.")
    ] = False,
    max_rows: Annotated[
        int | None,
        typer.Option(
            "--max",
            min=1,
            help=f"Stop after this many rows. Default for tables: {TABLE_ROWS:,}.",
        ),
    ] = None,
    timeout: Annotated[str, typer.Option(help="How long a query may take.")] = "10 seconds",
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Show a view: its rows, one row, its changes as they happen, or the result of a query. Exits
    with 1 if a key has no row.

    Example: headrace view show regions --key north --state shop.state
    """
    if name is None and sql is None:
        raise typer.BadParameter(
            "Which view? See `headrace view list`, or query with --sql.", param_hint="NAME"
        )
    if (key is not None) + (sql is not None) + follow > 1:
        raise typer.BadParameter(
            "Choose one of --key, --sql and --follow.", param_hint="--key / --sql / --follow"
        )
    with open_stores(state) as stores:
        if sql is not None:
            _show_query(stores, name, sql, timeout, max_rows, json=json)
        elif follow:
            _follow_changes(stores, str(name), max_rows, json=json)
        elif key:
            _show_row(locate_served(stores, str(name)), key, json=json)
        else:
            _show_rows(locate_served(stores, str(name)), max_rows, json=json)


# Rows


def _show_rows(location: ViewLocation, max_rows: int | None, *, json: bool) -> None:
    with location.store.reader.snapshot() as snap:
        view = snap.view(location.stored_name)
        if json and max_rows is None:
            for batch in snap.batches(location.stored_name):
                show_json(_prepend_tick(batch, view))
            return
        rows = _first_rows(snap, view, max_rows or TABLE_ROWS)
        if json:
            _print_json_lines(_prepend_tick(each, view) for each in rows.to_batches())
            return
        count = snap.count(location.stored_name)
    echo(f"{_title_text(location)} at tick {view.tick:,}: {count_text(count, 'row')}")
    _print_rows(rows)
    if count > rows.num_rows:
        echo(
            f"{count - rows.num_rows:,} {'older' if view.is_stream else 'more'} not shown; --max"
            " shows more."
        )


def _title_text(location: ViewLocation) -> str:
    """The name of a view, with the version's view that is served under it if there is one."""
    return (
        location.name
        if location.name == location.stored_name
        else f"{location.name}, served from {location.stored_name},"
    )


def _first_rows(snap: Snapshot, view: ViewInfo, max_rows: int) -> pa.Table:
    """The first rows in key order; of a stream, the newest rows."""
    if not view.is_stream:
        return snap.scan(view.name, limit=max_rows)
    backwards = snap.scan(view.name, limit=max_rows, reverse=True)
    return backwards.take(list(range(backwards.num_rows - 1, -1, -1)))


def _show_row(location: ViewLocation, key: list[str], *, json: bool) -> None:
    with location.store.reader.snapshot() as snap:
        view = snap.view(location.stored_name)
        row = snap.get(location.stored_name, _parse_key(view, key))
    if row is None:
        typer.echo(
            f"{_title_text(location)} has no row for {', '.join(key)} at tick {view.tick:,}.",
            err=True,
        )
        raise typer.Exit(1)
    if json:
        print_json({TICK: view.tick, **row})
        return
    echo(f"{_title_text(location)} at tick {view.tick:,}")
    print_table(
        ["column", "value"], [(column, format_cell(value)) for column, value in row.items()]
    )


def _parse_key(view: ViewInfo, key: list[str]) -> tuple[Any, ...]:
    """The values of a key, converted to the types of its columns where there is a converter; null
    is written as in requests. The reader refuses values that do not fit.
    """
    fields = [view.schema.field(name) for name in view.key]
    if view.key and len(key) != len(fields):
        raise typer.BadParameter(
            f"The key of {view.name} is ({', '.join(view.key)}): give --key for each.",
            param_hint="--key",
        )
    values = []
    for text, field in zip(key, fields, strict=False):
        value, convert = key_value_text(text), csv_converter(field.type)
        try:
            values.append(value if value is None or convert is None else convert(value))
        except Misfit as error:
            raise typer.BadParameter(
                f"The key column {field.name!r}: {error}.", param_hint="--key"
            ) from None
    return tuple(values)


def _show_query(
    stores: ViewStores,
    name: str | None,
    query: str,
    timeout: str,
    max_rows: int | None,
    *,
    json: bool,
) -> None:
    parse_seconds(timeout, option="--timeout")
    store = find_queried_store(
        stores, query, stores.store() if name is None else locate_served(stores, name).store
    )
    rows = store.reader.sql(query, timeout=timeout)
    rows = rows if max_rows is None else rows.slice(0, max_rows)
    if json:
        check_names(rows.schema.names)
        _print_json_lines(rows.to_batches())
    else:
        _print_rows(rows.slice(0, max_rows or TABLE_ROWS))
        if rows.num_rows > (max_rows or TABLE_ROWS):
            echo(f"{rows.num_rows - TABLE_ROWS:,} more not shown; --max shows more.")


# Changes


def _follow_changes(stores: ViewStores, name: str, max_rows: int | None, *, json: bool) -> None:
    """Print the current rows as inserts, then every change. After a switch to another version, all
    rows are printed again, with a note on standard error. ChangesGone if printing is too slow for
    the retained changes.
    """
    left, show_changes = max_rows, _print_change_lines if not json else _print_change_json
    location, tick = None, 0
    while left is None or left > 0:
        now = locate_served(stores, name)
        if location is not None and now != location:
            typer.echo(
                f"{name} is now served from {now.stored_name}; all its rows follow.", err=True
            )
        with now.store.reader.snapshot() as snap:
            reached = snap.tick(now.stored_name)
            if now != location:
                left = _show_snapshot(show_changes, snap, now.stored_name, left)
            changes = snap.changes_since(now.stored_name, tick if now == location else reached)
        for number, rows in changes:
            left = _show_limited(show_changes, number, rows, left)
        location, tick = now, reached
        time.sleep(POLL_SECONDS)


def _show_snapshot(
    show_changes: Callable[[int, pa.Table], None], snap: Snapshot, name: str, left: int | None
) -> int | None:
    for batch in snap.batches(name):
        rows = pa.Table.from_batches([batch]).append_column(
            CHANGE_TYPE, pa.repeat("insert", batch.num_rows)
        )
        left = _show_limited(show_changes, snap.tick(name), rows, left)
    return left


def _show_limited(
    show_changes: Callable[[int, pa.Table], None], tick: int, rows: pa.Table, left: int | None
) -> int | None:
    """Show at most `left` rows; returns how many may still be shown."""
    part = rows if left is None else rows.slice(0, left)
    if part.num_rows:
        show_changes(tick, part)
        sys.stdout.flush()
    return None if left is None else left - part.num_rows


def _print_change_json(tick: int, rows: pa.Table) -> None:
    ticks = (
        rows[TICK] if TICK in rows.schema.names else pa.repeat(tick, rows.num_rows).cast(pa.int64())
    )
    columns = [name for name in rows.schema.names if name not in {TICK, CHANGE_TYPE}]
    arranged = pa.Table.from_arrays(
        [ticks, rows[CHANGE_TYPE], *(rows[name] for name in columns)],
        names=[TICK, CHANGE_TYPE, *columns],
    )
    _print_json_lines(arranged.to_batches())


def _print_change_lines(tick: int, rows: pa.Table) -> None:
    """Print one line a change: its tick, + or -, and the row."""
    for row in rows.to_pylist():
        mark, of = _MARKS[row.pop(CHANGE_TYPE)], row.pop(TICK, tick)
        print(
            f"{of}  {mark}  "
            + "  ".join(f"{name}={format_cell(value)}" for name, value in row.items())
        )


# Output


def _prepend_tick(batch: pa.RecordBatch, view: ViewInfo) -> pa.RecordBatch:
    """Rows with the view's tick in front, unless they have ticks of their own."""
    if view.is_stream:
        return batch
    ticks = pa.repeat(view.tick, batch.num_rows).cast(pa.int64())
    return pa.RecordBatch.from_arrays([ticks, *batch.columns], names=[TICK, *batch.schema.names])


def _print_json_lines(batches: Iterable[pa.RecordBatch]) -> None:
    for batch in batches:
        show_json(batch)


def _print_rows(rows: pa.Table) -> None:
    names = rows.schema.names
    print_table(
        [name.removeprefix("_") if name == TICK else name for name in names],
        list(zip(*(column.to_pylist() for column in rows.columns), strict=True)),
    )


app.command("diff")(diff)
app.command("switch")(switch)
app.command("drop")(drop)
