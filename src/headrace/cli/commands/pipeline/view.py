"""`headrace view`: lists a pipeline's views and shows one (whole, by key, as it changes, or through
SQL); compares, switches and drops the versions that `headrace replay` builds.
"""

from __future__ import annotations

import json as text_json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer

from headrace.cli.commands.log.consume import show_json
from headrace.cli.options import JsonOption, YesOption, confirm, parse_seconds
from headrace.cli.output import count_text, echo, format_cell, print_json, print_table
from headrace.columnar.columns import CHANGE_TYPE, TICK
from headrace.errors import BadQuery, ConfigurationError, UnknownView
from headrace.serve.stores import ServedStore, ViewLocation, ViewStores, read_served, versions
from headrace.serve.stores import switch as switch_served
from headrace.types.json_codec import object_text
from headrace.types.schema import to_ddl
from headrace.types.text import csv_converter
from headrace.types.values import Misfit
from headrace.views.diff import ViewDifference, diff_views, without_ticks
from headrace.views.file import VIEWS_FILE, ViewInfo, drop_view
from headrace.views.reader import Snapshot
from headrace.views.sql import check_names, mentions

# The stores


STATE_VARIABLE = "HEADRACE_STATE"
StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="DIR",
        help=(
            "The pipeline's state directory. Default: the only *.state here.  [env var:"
            f" {STATE_VARIABLE}]"
        ),
    ),
]


def state_directory(state: Path | None) -> Path:
    """The state directory of an option, of the environment, or the only one in this directory."""
    if chosen := state or os.environ.get(STATE_VARIABLE):
        return Path(chosen)
    here = sorted(Path().glob(f"*.state/{VIEWS_FILE}"))
    if len(here) == 1:
        return here[0].parent
    hint = (
        f"Here are {', '.join(path.parent.name for path in here)}."
        if here
        else "There is none here."
    )
    raise typer.BadParameter(
        f"Which pipeline? Give --state DIR, its state directory, or set {STATE_VARIABLE}. {hint}",
        param_hint="--state",
    )


@contextmanager
def open_stores(state: Path | None) -> Iterator[ViewStores]:
    """The stores of the chosen state directory: the pipeline's and those of its versions."""
    stores = ViewStores(state_directory(state))
    try:
        yield stores
    finally:
        stores.close()


def locate_served(stores: ViewStores, name: str) -> ViewLocation:
    """The location that serves a view. UnknownView, which names the nearest, if there is none."""
    location = stores.locate(name)
    if all(info.name != location.stored_name for info in location.store.reader.views()):
        raise UnknownView(name, [each.name for each, _ in stores.views()])
    return location


def locate_stored(stores: ViewStores, name: str) -> tuple[ServedStore, ViewInfo]:
    """A view by its stored name, in the pipeline's store or in that of a version, regardless of
    what is served under that name.
    """
    names: list[str] = []
    for version in (None, *versions(stores.state)):
        store = stores.store(version)
        for info in store.reader.views():
            if info.name == name:
                return store, info
            names.append(info.name)
    raise UnknownView(name, names)


def find_queried_store(stores: ViewStores, query: str, otherwise: ServedStore) -> ServedStore:
    """The one store that a query reads, by the names in its text; `otherwise` if it names no view
    of a version.
    """
    served = stores.served_versions()
    if switched := next((view for view in served if mentions(query, view)), None):
        raise BadQuery(
            f"The view {switched!r} is served from its version {served[switched]!r}, and a query"
            " must name it in full.",
            fix=f'name it "{switched}.{served[switched]}", in double quotes.',
        )
    candidates = [stores.store(version) for version in versions(stores.state)]
    queried = [
        store
        for store in candidates
        if any(mentions(query, info.name) for info in store.reader.views())
    ]
    if len(queried) > 1 or (
        queried and any(mentions(query, info.name) for info in stores.store().reader.views())
    ):
        raise BadQuery(
            "The query names views of several versions; each version has a store of its own.",
            fix="query each by itself, or compare two views with `headrace view diff`.",
        )
    return queried[0] if queried else otherwise


# Versions: diff, switch, drop


EXIT_DIFFERENT = 5
NameArgument = Annotated[str, typer.Argument(metavar="VIEW", help="The view's name.")]


def diff(
    left: Annotated[str, typer.Argument(metavar="VIEW", help="A view.")],
    right: Annotated[str, typer.Argument(metavar="OTHER", help="Another, such as regions.v2.")],
    at_tick: Annotated[
        int | None,
        typer.Option("--at-tick", min=0, help="Compare both as of this tick, if still retained."),
    ] = None,
    max_rows: Annotated[
        int, typer.Option("--max", min=0, help="Show at most this many rows of each kind.")
    ] = 20,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Compare two views, such as one and its new version. Exits with 5 if they differ.

    Example: headrace view diff regions regions.v2 --state shop.state
    """
    with open_stores(state) as stores:
        sides = [_read_view(stores, name, at_tick) for name in (left, right)]
    difference = diff_views(*(rows for _, rows in sides), *(info for info, _ in sides))
    ticks = {"left_tick": sides[0][0].tick, "right_tick": sides[1][0].tick}
    if json:
        print_json({**ticks, **_difference_json(difference, max_rows)})
    else:
        _print_difference(left, right, sides[0][0], sides[1][0], difference, max_rows)
    if not difference.is_empty:
        raise typer.Exit(EXIT_DIFFERENT)


def _read_view(stores: ViewStores, name: str, at_tick: int | None) -> tuple[ViewInfo, pa.Table]:
    from headrace.serve.time_travel import view_at

    store, _ = locate_stored(stores, name)
    with store.reader.snapshot() as snap:
        info = snap.view(name)
        if at_tick is None:
            return info, without_ticks(info, snap.table(name))
        rows = view_at(
            snap, info, at_tick, key=None, start=(), stop=(), descending=False, max_rows=10_000_000
        )
        return replace(info, tick=at_tick), without_ticks(info, rows)


def _difference_json(difference: ViewDifference, max_rows: int) -> dict[str, Any]:
    """The difference as JSON: the number of rows of each kind, and the first of them."""
    changed = zip(
        *(
            _row_objects(rows, max_rows)
            for rows in (difference.changed_left, difference.changed_right)
        ),
        strict=True,
    )
    return {
        "same": difference.same_rows,
        "different": difference.changed_left.num_rows,
        "only_left": difference.only_left.num_rows,
        "only_right": difference.only_right.num_rows,
        "columns_only_left": list(difference.columns_only_left),
        "columns_only_right": list(difference.columns_only_right),
        "different_rows": [{"left": left, "right": right} for left, right in changed],
        "only_left_rows": _row_objects(difference.only_left, max_rows),
        "only_right_rows": _row_objects(difference.only_right, max_rows),
    }


def _row_objects(rows: pa.Table, max_rows: int) -> list[Any]:
    """At most `max_rows` rows, each as `headrace view show --json` prints it."""
    batches = rows.slice(0, max_rows).combine_chunks().to_batches()
    return [
        text_json.loads(text)
        for batch in batches
        for text in object_text(batch.schema.names, batch.columns).to_pylist()
    ]


def _print_difference(
    left: str,
    right: str,
    left_info: ViewInfo,
    right_info: ViewInfo,
    difference: ViewDifference,
    max_rows: int,
) -> None:
    echo(
        f"{left} at tick {left_info.tick:,}, {right} at tick {right_info.tick:,}:"
        f" {count_text(difference.same_rows, 'row')} the same"
    )
    for name, columns in (
        (left, difference.columns_only_left),
        (right, difference.columns_only_right),
    ):
        if columns:
            echo(f"Only {name} has the columns {', '.join(columns)}.")
    for name, rows in ((left, difference.only_left), (right, difference.only_right)):
        _print_heading(
            f"{count_text(rows.num_rows, 'row')} only in {name}", rows.num_rows, max_rows
        )
        if show_changes := _format_rows(rows, max_rows):
            print_table(rows.schema.names, show_changes)
    changed = difference.changed_left.num_rows
    _print_heading(f"{count_text(changed, 'key')} with different rows", changed, max_rows)
    pairs = zip(
        _format_rows(difference.changed_left, max_rows),
        _format_rows(difference.changed_right, max_rows),
        strict=True,
    )
    if sides := [
        [name, *row] for pair in pairs for name, row in zip((left, right), pair, strict=True)
    ]:
        print_table(["in", *difference.changed_left.schema.names], sides)
    if left_info.tick != right_info.tick and not difference.is_empty:
        echo(
            "\nThey show different ticks. Compare both at one: --at-tick"
            f" {min(left_info.tick, right_info.tick)}."
        )


def _print_heading(text: str, rows: int, max_rows: int) -> None:
    if rows:
        echo(
            f"\n{text}"
            + (
                f", of which {max_rows} {'is' if max_rows == 1 else 'are'} shown"
                if rows > max_rows
                else ""
            )
        )


def _format_rows(rows: pa.Table, max_rows: int) -> list[list[str]]:
    return [
        [format_cell(value) for value in row.values()]
        for row in rows.slice(0, max_rows).to_pylist()
    ]


def switch(
    view: NameArgument,
    version: Annotated[
        str | None,
        typer.Argument(metavar="[VERSION]", help="The version to serve, such as v2 or regions.v2."),
    ] = None,
    back: Annotated[
        bool,
        typer.Option(
            "--back", "--none", help="Serve the pipeline's own view again instead of a version."
        ),
    ] = False,
    state: StateOption = None,
) -> None:
    """Serve a version of a view under its plain name from now on, also to current subscribers.

    Example: headrace view switch regions v2 --state shop.state
    """
    if (version is None) == (not back):
        raise typer.BadParameter("Name the version to serve, or give --back.", param_hint="VERSION")
    directory = state_directory(state)
    version = (
        None if version is None else version.removeprefix(f"{view}.")
    )  # as `diff` and `list` call it
    before = read_served(directory).get(view)
    switch_served(directory, view, version)
    echo(
        f"{view} is {'already' if before == version else 'now'}"
        f" {f'{view}.{version}' if version else 'the view of the pipeline itself'}."
    )


def drop(
    view: NameArgument, yes: YesOption = False, state: StateOption = None, json: JsonOption = False
) -> None:
    """Drop a view with its rows. It must not be served, and its pipeline must not run. Asks for
    confirmation on a terminal; elsewhere --yes is required.

    Example: headrace view drop regions.v1 --yes --state shop.state
    """
    with open_stores(state) as stores:
        store, _ = locate_stored(stores, view)
        _refuse_if_served(stores, view, store.version)
        pipeline = _find_declaring_pipeline(store.directory, view)
        if not yes:
            confirm(
                f"Drop the view {view} and all its rows?{_rebuild_note(pipeline)}", to="drop it"
            )
            _find_declaring_pipeline(store.directory, view)  # it may have been started meanwhile
    drop_view(store.path, view)
    if json:
        print_json({"dropped": view, "built_again_by": pipeline})
    else:
        echo(f"Dropped {view}.{_rebuild_note(pipeline)}")


def _refuse_if_served(stores: ViewStores, view: str, version: str | None) -> None:
    plain_name = view.removesuffix(f".{version}")
    if version is not None and stores.served_versions().get(plain_name) == version:
        raise ConfigurationError(
            f"{view} is served as {plain_name}.",
            fix=(
                f"switch {plain_name} to another first: `headrace view switch {plain_name} VERSION`, or"
                " --back."
            ),
        )


def _find_declaring_pipeline(home: Path, view: str) -> str | None:
    """The pipeline, or version of it, that declared the view in its last run. ConfigurationError if
    it is running, because it would continue to write to the view.
    """
    from headrace.runtime.status import FILE, read_status

    if not (home / FILE).exists():
        return None
    status = read_status(home)
    if not any(view in query["outputs"] for query in status.queries.values()):
        return None
    if status.is_running:
        raise ConfigurationError(
            f"The pipeline {status.pipeline!r} is running and writes {view}.",
            fix="stop it, or remove the view from it, first.",
        )
    return status.pipeline


def _rebuild_note(pipeline: str | None) -> str:
    return (
        ""
        if pipeline is None
        else f" The next run of {pipeline} rebuilds it, as long as it declares it."
    )


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
            _source_text(location),
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


def _source_text(location: ViewLocation) -> str:
    return "the pipeline" if location.version is None else f"version {location.version}"


@app.command()
def show(
    name: Annotated[
        str | None, typer.Argument(help="The view. With --sql it can be left out.")
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            "--key", help="Only the row of this key; once for each column of the key, in order."
        ),
    ] = None,
    sql: Annotated[
        str | None,
        typer.Option("--sql", metavar="QUERY", help="A SELECT over the views, in SQLite's SQL."),
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
    _check_show_options(name, key, sql, follow=follow)
    with open_stores(state) as stores:
        if sql is not None:
            _show_query(stores, name, sql, timeout, max_rows, json=json)
        elif follow:
            _follow_changes(stores, str(name), max_rows, json=json)
        elif key:
            _show_row(locate_served(stores, str(name)), key, json=json)
        else:
            _show_rows(locate_served(stores, str(name)), max_rows, json=json)


def _check_show_options(
    name: str | None, key: list[str] | None, sql: str | None, *, follow: bool
) -> None:
    if name is None and sql is None:
        raise typer.BadParameter(
            "Which view? See `headrace view list`, or query with --sql.", param_hint="NAME"
        )
    if (key is not None) + (sql is not None) + follow > 1:
        raise typer.BadParameter(
            "Choose one of --key, --sql and --follow.", param_hint="--key / --sql / --follow"
        )


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
    """The values of a key, converted to the types of its columns where there is a converter. The
    reader refuses values that do not fit.
    """
    fields = [view.schema.field(name) for name in view.key]
    if view.key and len(key) != len(fields):
        raise typer.BadParameter(
            f"The key of {view.name} is ({', '.join(view.key)}): give --key for each.",
            param_hint="--key",
        )
    values = []
    for text, field in zip(key, fields, strict=False):
        convert = csv_converter(field.type)
        try:
            values.append(text if convert is None else convert(text))
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
