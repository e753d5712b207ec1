"""`headrace view diff`, `switch` and `drop`: a version that `headrace replay` has built, compared with what is served, put in its place, and the old one taken away."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer

from headrace.cli.output import cell, counted, emit, say, table
from headrace.cli.settings import JsonOption
from headrace.cli.view import StateOption, state_directory
from headrace.errors import ConfigurationError
from headrace.sinks.view_diff import Difference, comparable, difference
from headrace.sinks.view_file import VIEWS_FILE, ViewInfo

EXIT_DIFFERENT = 5
NameArgument = Annotated[str, typer.Argument(metavar="VIEW", help="The view's name.")]


def diff(
    left: Annotated[str, typer.Argument(metavar="VIEW", help="A view.")],
    right: Annotated[str, typer.Argument(metavar="OTHER", help="Another, such as revenue.v2.")],
    at_tick: Annotated[int | None, typer.Option("--at-tick", min=0, help="Both as they were at this tick, if it is kept.")] = None,
    most: Annotated[int, typer.Option("--max", min=0, help="Show at most so many rows of each kind.")] = 20,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Compare two views, such as one and its new version. Exits with 5 if they differ.

    Example: headrace view diff revenue revenue.v2 --state shop.state
    """
    from headrace.serve.stores import Stores

    stores = Stores(state_directory(state))
    try:
        sides = [_read(stores, name, at_tick) for name in (left, right)]
    finally:
        stores.close()
    found = difference(*(rows for _, rows in sides), *(info for info, _ in sides))
    ticks = {"left_tick": sides[0][0].tick, "right_tick": sides[1][0].tick}
    if json:
        emit({**ticks, **_counted(found)})
    else:
        _show(left, right, sides[0][0], sides[1][0], found, most)
    if not found.is_none:
        raise typer.Exit(EXIT_DIFFERENT)


def _read(stores: Any, name: str, at_tick: int | None) -> tuple[ViewInfo, pa.Table]:
    """A view by its own name: that of the pipeline, or of a version. What is served under the name does not matter here."""
    from headrace.serve.history import view_at

    plain, _, version = name.rpartition(".")
    store = stores.store(version if plain and stores.has_version(version) else None)
    with store.reader.snapshot() as snap:
        info = snap.view(name)
        if at_tick is None:
            return info, comparable(info, snap.table(name))
        return info, comparable(info, view_at(snap, info, at_tick, key=None, start=(), stop=(), descending=False, most_rows=10_000_000))


def _counted(found: Difference) -> dict[str, Any]:
    return {
        "same": found.same,
        "different": found.changed_left.num_rows,
        "only_left": found.only_left.num_rows,
        "only_right": found.only_right.num_rows,
        "columns_only_left": list(found.columns_only_left),
        "columns_only_right": list(found.columns_only_right),
    }


def _show(left: str, right: str, left_info: ViewInfo, right_info: ViewInfo, found: Difference, most: int) -> None:
    say(f"{left} at tick {left_info.tick:,}, {right} at tick {right_info.tick:,}: {counted(found.same, 'row')} the same")
    for name, columns in ((left, found.columns_only_left), (right, found.columns_only_right)):
        if columns:
            say(f"Only {name} has the columns {', '.join(columns)}.")
    for what, rows in ((f"only in {left}", found.only_left), (f"only in {right}", found.only_right)):
        _show_rows(what, rows, most)
    _show_rows(f"different in {left}", found.changed_left, most)
    _show_rows(f"… and in {right}", found.changed_right, most)


def _show_rows(what: str, rows: pa.Table, most: int) -> None:
    if not rows.num_rows:
        return
    say(f"\n{counted(rows.num_rows, 'row')} {what}" + (f", of which {most} are shown" if rows.num_rows > most else ""))
    shown = rows.slice(0, most)
    if shown.num_rows:
        table(shown.schema.names, [[cell(value) for value in row.values()] for row in shown.to_pylist()])


def switch(
    view: NameArgument,
    version: Annotated[str | None, typer.Argument(metavar="[VERSION]", help="The version to serve, such as v2.")] = None,
    back: Annotated[bool, typer.Option("--back", help="Serve the pipeline's own view again.")] = False,
    state: StateOption = None,
) -> None:
    """Serve a version of a view under its plain name, from now on and to those who follow it.

    Example: headrace view switch revenue v2 --state shop.state
    """
    from headrace.serve.stores import switch as switch_served

    if (version is None) == (not back):
        raise typer.BadParameter("Say which version to serve, or --back.", param_hint="VERSION")
    switch_served(state_directory(state), view, version)
    say(f"{view} is now {f'{view}.{version}' if version else 'the view of the pipeline itself'}.")


def drop(view: NameArgument, state: StateOption = None) -> None:
    """Take a view out of its store, with its rows: one that nothing keeps and nobody is served.

    Example: headrace view drop revenue.v1 --state shop.state
    """
    from headrace.serve.stores import has_version, read_served, version_directory
    from headrace.sinks.view_dropping import drop_view

    directory = state_directory(state)
    plain, _, version = view.rpartition(".")
    of_version = version if plain and has_version(directory, version) else None
    home = version_directory(directory, of_version)
    if read_served(directory).get(plain) == of_version is not None:
        raise ConfigurationError(
            f"{view} is served as {plain}.", fix=f"switch {plain} to another first: `headrace view switch {plain} VERSION`, or --back."
        )
    _refuse_kept(home, view)
    drop_view(home / VIEWS_FILE, view)
    say(f"Dropped {view}.")


def _refuse_kept(home: Path, view: str) -> None:
    """A pipeline that runs would go on writing to it."""
    from headrace.pipeline.status import FILE, read_status

    if not (home / FILE).exists():
        return
    known = read_status(home)
    if known.is_running and any(view in query["outputs"] for query in known.queries.values()):
        raise ConfigurationError(f"The pipeline {known.pipeline!r} is running and keeps {view}.", fix="stop it, or take the view out of it, first.")
