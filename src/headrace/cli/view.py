"""`headrace view`: list a pipeline's views, and show one: whole, by key, as it changes, or through SQL. `view_versions` compares and switches versions."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import pyarrow as pa
import typer

from headrace.cli import view_versions
from headrace.cli.consume import show_json
from headrace.cli.output import cell, counted, emit, say, table
from headrace.cli.settings import JsonOption, seconds_of
from headrace.cli.typed_text import from_csv
from headrace.cli.view_places import StateOption, opened_stores, queried_store, served_place
from headrace.log.api import CHANGE_TYPE
from headrace.log.row_values import Misfit
from headrace.log.schema import to_ddl
from headrace.operators.kernel import TICK
from headrace.serve.stores import Place, Stores
from headrace.sinks.view_file import ViewInfo
from headrace.sinks.view_reader import Snapshot
from headrace.sinks.view_sql import check_names

TABLE_ROWS = 1_000
POLL_SECONDS = 0.2
_MARKS = {"insert": "+", "update_preimage": "-", "update_postimage": "+", "delete": "-"}

app = typer.Typer(help="Views: list, show, compare and switch versions.", no_args_is_help=True)


@app.command("list")
def list_views(state: StateOption = None, json: JsonOption = False) -> None:
    """List the views, with what each is served from and the tick it shows: the pipeline's, and those of versions made by `headrace replay`.

    Example: headrace view list --state shop.state
    """
    with opened_stores(state) as stores:
        views = [(place, *_described(place)) for place, _ in stores.views()]
    if json:
        for place, info, rows in views:
            told = {"name": place.name, "version": place.version, "key": list(info.key), "rows": rows, "tick": info.tick}
            emit({**told, "schema": to_ddl(info.schema)})
        return
    shown = [
        (place.name, _source(place), ", ".join(info.key) or "- (stream)", rows, info.tick, ", ".join(info.schema.names)) for place, info, rows in views
    ]
    table(["view", "served from", "key", "rows", "tick", "columns"], shown, empty="No views yet.")


def _described(place: Place) -> tuple[ViewInfo, int]:
    with place.store.reader.snapshot() as snap:
        return snap.view(place.stored), snap.count(place.stored)


def _source(place: Place) -> str:
    return "the pipeline" if place.version is None else f"version {place.version}"


@app.command()
def show(
    name: Annotated[str | None, typer.Argument(help="The view. With --sql it can be left out.")] = None,
    key: Annotated[list[str] | None, typer.Option("--key", help="Only the row of this key; once for each column of the key, in order.")] = None,
    sql: Annotated[str | None, typer.Option("--sql", metavar="QUERY", help="A SELECT over the views, in SQLite's SQL.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with the changes, until Ctrl-C.")] = False,
    most: Annotated[int | None, typer.Option("--max", min=1, help=f"Stop after this many rows. A table shows {TABLE_ROWS:,} unless told.")] = None,
    timeout: Annotated[str, typer.Option(help="How long a query may take.")] = "10 seconds",
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Show a view: its rows, one row, its changes as they come, or the result of a query. Exits with 1 if a key has no row.

    Example: headrace view show regions --key north --state shop.state
    """
    _refuse_mixtures(name, key, sql, follow=follow)
    with opened_stores(state) as stores:
        if sql is not None:
            _query(stores, name, sql, timeout, most, json=json)
        elif follow:
            _follow(stores, str(name), most, json=json)
        elif key:
            _one(served_place(stores, str(name)), key, json=json)
        else:
            _all(served_place(stores, str(name)), most, json=json)


def _refuse_mixtures(name: str | None, key: list[str] | None, sql: str | None, *, follow: bool) -> None:
    if name is None and sql is None:
        raise typer.BadParameter("Which view? `headrace view list` names them; or ask with --sql.", param_hint="NAME")
    if (key is not None) + (sql is not None) + follow > 1:
        raise typer.BadParameter("Choose one of --key, --sql and --follow.", param_hint="--key / --sql / --follow")


# Rows


def _all(place: Place, most: int | None, *, json: bool) -> None:
    with place.store.reader.snapshot() as snap:
        view = snap.view(place.stored)
        if json and most is None:
            for batch in snap.batches(place.stored):
                show_json(_with_tick(batch, view))
            return
        rows = _newest(snap, view, most or TABLE_ROWS)
        if json:
            _json_lines(_with_tick(each, view) for each in rows.to_batches())
            return
        count = snap.count(place.stored)
    say(f"{_title(place)} at tick {view.tick:,}: {counted(count, 'row')}")
    _print_table(rows)
    if count > rows.num_rows:
        say(f"{count - rows.num_rows:,} {'older' if view.is_stream else 'more'} not shown; --max shows more.")


def _title(place: Place) -> str:
    """With the version's view that is served under this name, if one is."""
    return place.name if place.name == place.stored else f"{place.name}, served from {place.stored},"


def _newest(snap: Snapshot, view: ViewInfo, most: int) -> pa.Table:
    """The first rows by key; of a stream the last ones."""
    if not view.is_stream:
        return snap.scan(view.name, limit=most)
    backwards = snap.scan(view.name, limit=most, reverse=True)
    return backwards.take(list(range(backwards.num_rows - 1, -1, -1)))


def _one(place: Place, key: list[str], *, json: bool) -> None:
    with place.store.reader.snapshot() as snap:
        view = snap.view(place.stored)
        row = snap.get(place.stored, _typed_key(view, key))
    if row is None:
        typer.echo(f"{_title(place)} has no row for {', '.join(key)} at tick {view.tick:,}.", err=True)
        raise typer.Exit(1)
    if json:
        emit({TICK: view.tick, **row})
        return
    say(f"{_title(place)} at tick {view.tick:,}")
    table(["column", "value"], [(column, cell(value)) for column, value in row.items()])


def _typed_key(view: ViewInfo, key: list[str]) -> tuple[Any, ...]:
    """Text as the key's types; what does not fit is left for the reader to refuse."""
    fields = [view.schema.field(name) for name in view.key]
    if view.key and len(key) != len(fields):
        raise typer.BadParameter(f"The key of {view.name} is ({', '.join(view.key)}): give --key for each.", param_hint="--key")
    values = []
    for text, field in zip(key, fields, strict=False):
        convert = from_csv(field.type)
        try:
            values.append(text if convert is None else convert(text))
        except Misfit as error:
            raise typer.BadParameter(f"The key column {field.name!r}: {error}.", param_hint="--key") from None
    return tuple(values)


def _query(stores: Stores, name: str | None, query: str, timeout: str, most: int | None, *, json: bool) -> None:
    seconds_of(timeout, option="--timeout")
    store = queried_store(stores, query, stores.store() if name is None else served_place(stores, name).store)
    rows = store.reader.sql(query, timeout=timeout)
    rows = rows if most is None else rows.slice(0, most)
    if json:
        check_names(rows.schema.names)
        _json_lines(rows.to_batches())
    else:
        _print_table(rows.slice(0, most or TABLE_ROWS))
        if rows.num_rows > (most or TABLE_ROWS):
            say(f"{rows.num_rows - TABLE_ROWS:,} more not shown; --max shows more.")


# Changes


def _follow(stores: Stores, name: str, most: int | None, *, json: bool) -> None:
    """The rows as they are, as inserts; then every change. A switch to another version begins anew, and is said on standard error.

    A reader too slow for what is kept ends with ChangesGone, which says what to do.
    """
    left, shown = most, _change_lines if not json else _change_json
    place, tick = None, 0
    while left is None or left > 0:
        now = served_place(stores, name)
        if place is not None and now != place:
            typer.echo(f"{name} is now served from {now.stored}; all its rows follow.", err=True)
        with now.store.reader.snapshot() as snap:
            reached = snap.tick(now.stored)
            if now != place:
                left = _show_all(shown, snap, now.stored, left)
            changes = snap.changes_since(now.stored, tick if now == place else reached)
        for number, rows in changes:
            left = _show_some(shown, number, rows, left)
        place, tick = now, reached
        time.sleep(POLL_SECONDS)


def _show_all(shown: Callable[[int, pa.Table], None], snap: Snapshot, name: str, left: int | None) -> int | None:
    for batch in snap.batches(name):
        rows = pa.Table.from_batches([batch]).append_column(CHANGE_TYPE, pa.repeat("insert", batch.num_rows))
        left = _show_some(shown, snap.tick(name), rows, left)
    return left


def _show_some(shown: Callable[[int, pa.Table], None], tick: int, rows: pa.Table, left: int | None) -> int | None:
    """Show at most so many rows; returns how many may still come."""
    part = rows if left is None else rows.slice(0, left)
    if part.num_rows:
        shown(tick, part)
        sys.stdout.flush()
    return None if left is None else left - part.num_rows


def _change_json(tick: int, rows: pa.Table) -> None:
    ticks = rows[TICK] if TICK in rows.schema.names else pa.repeat(tick, rows.num_rows).cast(pa.int64())
    columns = [name for name in rows.schema.names if name not in {TICK, CHANGE_TYPE}]
    arranged = pa.Table.from_arrays([ticks, rows[CHANGE_TYPE], *(rows[name] for name in columns)], names=[TICK, CHANGE_TYPE, *columns])
    _json_lines(arranged.to_batches())


def _change_lines(tick: int, rows: pa.Table) -> None:
    """One line a change: its tick, + or -, and the row."""
    for row in rows.to_pylist():
        mark, of = _MARKS[row.pop(CHANGE_TYPE)], row.pop(TICK, tick)
        print(f"{of}  {mark}  " + "  ".join(f"{name}={cell(value)}" for name, value in row.items()))


# Output


def _with_tick(batch: pa.RecordBatch, view: ViewInfo) -> pa.RecordBatch:
    """A row that has no tick of its own is as of the view's."""
    if view.is_stream:
        return batch
    ticks = pa.repeat(view.tick, batch.num_rows).cast(pa.int64())
    return pa.RecordBatch.from_arrays([ticks, *batch.columns], names=[TICK, *batch.schema.names])


def _json_lines(batches: Iterable[pa.RecordBatch]) -> None:
    for batch in batches:
        show_json(batch)


def _print_table(rows: pa.Table) -> None:
    names = rows.schema.names
    table(
        [name.removeprefix("_") if name == TICK else name for name in names], list(zip(*(column.to_pylist() for column in rows.columns), strict=True))
    )


app.command("diff")(view_versions.diff)
app.command("switch")(view_versions.switch)
app.command("drop")(view_versions.drop)
