"""`headrace view`: list a pipeline's views, and show one: whole, by key, as it changes, or through
SQL. `view_versions` compares and switches versions.
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

from headrace.cli.commands.consume import show_json
from headrace.cli.options import JsonOption, YesOption, confirm, seconds_of
from headrace.cli.output import cell, counted, emit, say, table
from headrace.columnar.columns import CHANGE_TYPE, TICK
from headrace.errors import BadQuery, ConfigurationError, UnknownView
from headrace.serve.stores import Place, Store, Stores, read_served, versions
from headrace.serve.stores import switch as switch_served
from headrace.types.json_codec import object_text
from headrace.types.schema import to_ddl
from headrace.types.text import from_csv
from headrace.types.values import Misfit
from headrace.views.file import VIEWS_FILE, ViewInfo, drop_view
from headrace.views.reader import Difference, Snapshot, comparable, difference
from headrace.views.sql import check_names, mentions

# Where the views that a command names are: in the pipeline's own store, or in that of a version,
# named in full or served in place of the pipeline's.


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
    """The state directory that was named, or that the environment names, or the only one here."""
    if chosen := state or os.environ.get(STATE_VARIABLE):
        return Path(chosen)
    here = sorted(Path().glob(f"*.state/{VIEWS_FILE}"))
    if len(here) == 1:
        return here[0].parent
    found = (
        f"Here are {', '.join(path.parent.name for path in here)}."
        if here
        else "There is none here."
    )
    raise typer.BadParameter(
        "Which pipeline? Say --state DIR, the directory it keeps its state in, or set"
        f" {STATE_VARIABLE}. {found}",
        param_hint="--state",
    )


@contextmanager
def opened_stores(state: Path | None) -> Iterator[Stores]:
    """The stores of the chosen state directory: the pipeline's and those of its versions."""
    stores = Stores(state_directory(state))
    try:
        yield stores
    finally:
        stores.close()


# By name


def served_place(stores: Stores, name: str) -> Place:
    """Where a view is served from. UnknownView, with the nearest of all names, if there is none."""
    place = stores.place(name)
    if all(info.name != place.stored for info in place.store.reader.views()):
        raise UnknownView(name, [each.name for each, _ in stores.views()])
    return place


def own_place(stores: Stores, name: str) -> tuple[Store, ViewInfo]:
    """A view by its own name, that of the pipeline or of a version; what is served under the name
    does not matter.
    """
    known: list[str] = []
    for version in (None, *versions(stores.state)):
        store = stores.store(version)
        for info in store.reader.views():
            if info.name == name:
                return store, info
            known.append(info.name)
    raise UnknownView(name, known)


# By query


def queried_store(stores: Stores, query: str, otherwise: Store) -> Store:
    """The one store that a query reads, by the names in its text; `otherwise`, if it names no
    version's view.
    """
    served = stores.served()
    if switched := next((view for view in served if mentions(query, view)), None):
        raise BadQuery(
            f"The view {switched!r} is served from its version {served[switched]!r}, and a query"
            " names what it reads in full.",
            fix=f'name it "{switched}.{served[switched]}", in double quotes.',
        )
    found = [stores.store(version) for version in versions(stores.state)]
    found = [
        store for store in found if any(mentions(query, info.name) for info in store.reader.views())
    ]
    if len(found) > 1 or (
        found and any(mentions(query, info.name) for info in stores.store().reader.views())
    ):
        raise BadQuery(
            "The query names views of several versions; each version has a store of its own.",
            fix="ask each by itself, or compare two views with `headrace view diff`.",
        )
    return found[0] if found else otherwise


# `headrace view diff`, `switch` and `drop`: a version that `headrace replay` has built, compared
# with what is served, put in its place, and the old one taken away.


EXIT_DIFFERENT = 5
NameArgument = Annotated[str, typer.Argument(metavar="VIEW", help="The view's name.")]


def diff(
    left: Annotated[str, typer.Argument(metavar="VIEW", help="A view.")],
    right: Annotated[str, typer.Argument(metavar="OTHER", help="Another, such as regions.v2.")],
    at_tick: Annotated[
        int | None,
        typer.Option("--at-tick", min=0, help="Both as they were at this tick, if it is kept."),
    ] = None,
    most: Annotated[
        int, typer.Option("--max", min=0, help="Show at most so many rows of each kind.")
    ] = 20,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Compare two views, such as one and its new version. Exits with 5 if they differ.

    Example: headrace view diff regions regions.v2 --state shop.state
    """
    with opened_stores(state) as stores:
        sides = [_read(stores, name, at_tick) for name in (left, right)]
    found = difference(*(rows for _, rows in sides), *(info for info, _ in sides))
    ticks = {"left_tick": sides[0][0].tick, "right_tick": sides[1][0].tick}
    if json:
        emit({**ticks, **_told(found, most)})
    else:
        _show(left, right, sides[0][0], sides[1][0], found, most)
    if not found.is_none:
        raise typer.Exit(EXIT_DIFFERENT)


def _read(stores: Stores, name: str, at_tick: int | None) -> tuple[ViewInfo, pa.Table]:
    from headrace.serve.views import view_at

    store, _ = own_place(stores, name)
    with store.reader.snapshot() as snap:
        info = snap.view(name)
        if at_tick is None:
            return info, comparable(info, snap.table(name))
        rows = view_at(
            snap, info, at_tick, key=None, start=(), stop=(), descending=False, max_rows=10_000_000
        )
        return replace(info, tick=at_tick), comparable(info, rows)


def _told(found: Difference, most: int) -> dict[str, Any]:
    """What is different, for programs: how many rows of each kind, and the first of them."""
    changed = zip(
        *(_objects(rows, most) for rows in (found.changed_left, found.changed_right)), strict=True
    )
    return {
        "same": found.same,
        "different": found.changed_left.num_rows,
        "only_left": found.only_left.num_rows,
        "only_right": found.only_right.num_rows,
        "columns_only_left": list(found.columns_only_left),
        "columns_only_right": list(found.columns_only_right),
        "different_rows": [{"left": left, "right": right} for left, right in changed],
        "only_left_rows": _objects(found.only_left, most),
        "only_right_rows": _objects(found.only_right, most),
    }


def _objects(rows: pa.Table, most: int) -> list[Any]:
    """At most so many rows, each as `headrace view show --json` writes it."""
    batches = rows.slice(0, most).combine_chunks().to_batches()
    return [
        text_json.loads(text)
        for batch in batches
        for text in object_text(batch.schema.names, batch.columns).to_pylist()
    ]


def _show(
    left: str, right: str, left_info: ViewInfo, right_info: ViewInfo, found: Difference, most: int
) -> None:
    say(
        f"{left} at tick {left_info.tick:,}, {right} at tick {right_info.tick:,}:"
        f" {counted(found.same, 'row')} the same"
    )
    for name, columns in ((left, found.columns_only_left), (right, found.columns_only_right)):
        if columns:
            say(f"Only {name} has the columns {', '.join(columns)}.")
    for name, rows in ((left, found.only_left), (right, found.only_right)):
        _heading(f"{counted(rows.num_rows, 'row')} only in {name}", rows.num_rows, most)
        if shown := _cells(rows, most):
            table(rows.schema.names, shown)
    changed = found.changed_left.num_rows
    _heading(f"{counted(changed, 'key')} with different rows", changed, most)
    pairs = zip(_cells(found.changed_left, most), _cells(found.changed_right, most), strict=True)
    if sides := [
        [name, *row] for pair in pairs for name, row in zip((left, right), pair, strict=True)
    ]:
        table(["in", *found.changed_left.schema.names], sides)
    if left_info.tick != right_info.tick and not found.is_none:
        say(
            "\nThey show different ticks. Compare both at one: --at-tick"
            f" {min(left_info.tick, right_info.tick)}."
        )


def _heading(text: str, rows: int, most: int) -> None:
    if rows:
        say(
            f"\n{text}"
            + (f", of which {most} {'is' if most == 1 else 'are'} shown" if rows > most else "")
        )


def _cells(rows: pa.Table, most: int) -> list[list[str]]:
    return [[cell(value) for value in row.values()] for row in rows.slice(0, most).to_pylist()]


def switch(
    view: NameArgument,
    version: Annotated[
        str | None,
        typer.Argument(metavar="[VERSION]", help="The version to serve, such as v2 or regions.v2."),
    ] = None,
    back: Annotated[
        bool,
        typer.Option(
            "--back", "--none", help="Serve the pipeline's own view again, and no version."
        ),
    ] = False,
    state: StateOption = None,
) -> None:
    """Serve a version of a view under its plain name, from now on and to those who follow it.

    Example: headrace view switch regions v2 --state shop.state
    """
    if (version is None) == (not back):
        raise typer.BadParameter("Say which version to serve, or --back.", param_hint="VERSION")
    directory = state_directory(state)
    version = (
        None if version is None else version.removeprefix(f"{view}.")
    )  # as `diff` and `list` call it
    before = read_served(directory).get(view)
    switch_served(directory, view, version)
    say(
        f"{view} is {'already' if before == version else 'now'}"
        f" {f'{view}.{version}' if version else 'the view of the pipeline itself'}."
    )


def drop(
    view: NameArgument, yes: YesOption = False, state: StateOption = None, json: JsonOption = False
) -> None:
    """Take a view out of its store, with its rows: one that nothing keeps and nobody is served.
    Asks first on a terminal; elsewhere it wants --yes.

    Example: headrace view drop regions.v1 --yes --state shop.state
    """
    with opened_stores(state) as stores:
        store, _ = own_place(stores, view)
        _refuse_served(stores, view, store.version)
        keeper = _keeper(store.directory, view)
        if not yes:
            confirm(f"Drop the view {view} and all its rows?{_comes_back(keeper)}", to="drop it")
            _keeper(store.directory, view)  # it may have been started meanwhile
    drop_view(store.path, view)
    if json:
        emit({"dropped": view, "built_again_by": keeper})
    else:
        say(f"Dropped {view}.{_comes_back(keeper)}")


def _refuse_served(stores: Stores, view: str, version: str | None) -> None:
    plain = view.removesuffix(f".{version}")
    if version is not None and stores.served().get(plain) == version:
        raise ConfigurationError(
            f"{view} is served as {plain}.",
            fix=(
                f"switch {plain} to another first: `headrace view switch {plain} VERSION`, or"
                " --back."
            ),
        )


def _keeper(home: Path, view: str) -> str | None:
    """The pipeline, or version of it, that kept the view when it last ran. Refuses if it is
    running: it would go on writing to it.
    """
    from headrace.runtime.status import FILE, read_status

    if not (home / FILE).exists():
        return None
    known = read_status(home)
    if not any(view in query["outputs"] for query in known.queries.values()):
        return None
    if known.is_running:
        raise ConfigurationError(
            f"The pipeline {known.pipeline!r} is running and keeps {view}.",
            fix="stop it, or take the view out of it, first.",
        )
    return known.pipeline


def _comes_back(keeper: str | None) -> str:
    return (
        ""
        if keeper is None
        else f" The next run of {keeper} builds it again, as long as it declares it."
    )


TABLE_ROWS = 1_000
POLL_SECONDS = 0.2
_MARKS = {"insert": "+", "update_preimage": "-", "update_postimage": "+", "delete": "-"}

app = typer.Typer(help="Views: list, show, compare and switch versions.", no_args_is_help=True)


@app.command("list")
def list_views(state: StateOption = None, json: JsonOption = False) -> None:
    """List the views, with what each is served from and the tick it shows: the pipeline's, and
    those of versions made by `headrace replay`.

    Example: headrace view list --state shop.state
    """
    with opened_stores(state) as stores:
        views = [(place, *_described(place)) for place, _ in stores.views()]
    if json:
        for place, info, rows in views:
            told = {
                "name": place.name,
                "version": place.version,
                "key": list(info.key),
                "rows": rows,
                "tick": info.tick,
            }
            emit({**told, "schema": to_ddl(info.schema)})
        return
    shown = [
        (
            place.name,
            _source(place),
            ", ".join(info.key) or "- (stream)",
            rows,
            info.tick,
            ", ".join(info.schema.names),
        )
        for place, info, rows in views
    ]
    table(["view", "served from", "key", "rows", "tick", "columns"], shown, empty="No views yet.")


def _described(place: Place) -> tuple[ViewInfo, int]:
    with place.store.reader.snapshot() as snap:
        return snap.view(place.stored), snap.count(place.stored)


def _source(place: Place) -> str:
    return "the pipeline" if place.version is None else f"version {place.version}"


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
        bool, typer.Option("--follow", "-f", help="Go on with the changes, until Ctrl-C.")
    ] = False,
    most: Annotated[
        int | None,
        typer.Option(
            "--max",
            min=1,
            help=f"Stop after this many rows. A table shows {TABLE_ROWS:,} unless told.",
        ),
    ] = None,
    timeout: Annotated[str, typer.Option(help="How long a query may take.")] = "10 seconds",
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Show a view: its rows, one row, its changes as they come, or the result of a query. Exits
    with 1 if a key has no row.

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


def _refuse_mixtures(
    name: str | None, key: list[str] | None, sql: str | None, *, follow: bool
) -> None:
    if name is None and sql is None:
        raise typer.BadParameter(
            "Which view? `headrace view list` names them; or ask with --sql.", param_hint="NAME"
        )
    if (key is not None) + (sql is not None) + follow > 1:
        raise typer.BadParameter(
            "Choose one of --key, --sql and --follow.", param_hint="--key / --sql / --follow"
        )


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
        say(
            f"{count - rows.num_rows:,} {'older' if view.is_stream else 'more'} not shown; --max"
            " shows more."
        )


def _title(place: Place) -> str:
    """With the version's view that is served under this name, if one is."""
    return (
        place.name if place.name == place.stored else f"{place.name}, served from {place.stored},"
    )


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
        typer.echo(
            f"{_title(place)} has no row for {', '.join(key)} at tick {view.tick:,}.", err=True
        )
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
        raise typer.BadParameter(
            f"The key of {view.name} is ({', '.join(view.key)}): give --key for each.",
            param_hint="--key",
        )
    values = []
    for text, field in zip(key, fields, strict=False):
        convert = from_csv(field.type)
        try:
            values.append(text if convert is None else convert(text))
        except Misfit as error:
            raise typer.BadParameter(
                f"The key column {field.name!r}: {error}.", param_hint="--key"
            ) from None
    return tuple(values)


def _query(
    stores: Stores, name: str | None, query: str, timeout: str, most: int | None, *, json: bool
) -> None:
    seconds_of(timeout, option="--timeout")
    store = queried_store(
        stores, query, stores.store() if name is None else served_place(stores, name).store
    )
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
    """The rows as they are, as inserts; then every change. A switch to another version begins anew,
    and is said on standard error.

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


def _show_all(
    shown: Callable[[int, pa.Table], None], snap: Snapshot, name: str, left: int | None
) -> int | None:
    for batch in snap.batches(name):
        rows = pa.Table.from_batches([batch]).append_column(
            CHANGE_TYPE, pa.repeat("insert", batch.num_rows)
        )
        left = _show_some(shown, snap.tick(name), rows, left)
    return left


def _show_some(
    shown: Callable[[int, pa.Table], None], tick: int, rows: pa.Table, left: int | None
) -> int | None:
    """Show at most so many rows; returns how many may still come."""
    part = rows if left is None else rows.slice(0, left)
    if part.num_rows:
        shown(tick, part)
        sys.stdout.flush()
    return None if left is None else left - part.num_rows


def _change_json(tick: int, rows: pa.Table) -> None:
    ticks = (
        rows[TICK] if TICK in rows.schema.names else pa.repeat(tick, rows.num_rows).cast(pa.int64())
    )
    columns = [name for name in rows.schema.names if name not in {TICK, CHANGE_TYPE}]
    arranged = pa.Table.from_arrays(
        [ticks, rows[CHANGE_TYPE], *(rows[name] for name in columns)],
        names=[TICK, CHANGE_TYPE, *columns],
    )
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
        [name.removeprefix("_") if name == TICK else name for name in names],
        list(zip(*(column.to_pylist() for column in rows.columns), strict=True)),
    )


app.command("diff")(diff)
app.command("switch")(switch)
app.command("drop")(drop)
