"""`headrace view diff`, `switch` and `drop`: a version that `headrace replay` has built, compared with what is served, put in its place, and the old one taken away."""

from __future__ import annotations

import json as text_json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer

from headrace.cli.output import cell, counted, emit, say, table
from headrace.cli.settings import JsonOption, YesOption, confirm
from headrace.cli.view_places import StateOption, opened_stores, own_place, state_directory
from headrace.errors import ConfigurationError
from headrace.log.json_text import object_text
from headrace.serve.stores import Stores, read_served
from headrace.serve.stores import switch as switch_served
from headrace.sinks.view_diff import Difference, comparable, difference
from headrace.sinks.view_dropping import drop_view
from headrace.sinks.view_file import ViewInfo

EXIT_DIFFERENT = 5
NameArgument = Annotated[str, typer.Argument(metavar="VIEW", help="The view's name.")]


def diff(
    left: Annotated[str, typer.Argument(metavar="VIEW", help="A view.")],
    right: Annotated[str, typer.Argument(metavar="OTHER", help="Another, such as regions.v2.")],
    at_tick: Annotated[int | None, typer.Option("--at-tick", min=0, help="Both as they were at this tick, if it is kept.")] = None,
    most: Annotated[int, typer.Option("--max", min=0, help="Show at most so many rows of each kind.")] = 20,
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
    from headrace.serve.history import view_at

    store, _ = own_place(stores, name)
    with store.reader.snapshot() as snap:
        info = snap.view(name)
        if at_tick is None:
            return info, comparable(info, snap.table(name))
        rows = view_at(snap, info, at_tick, key=None, start=(), stop=(), descending=False, most_rows=10_000_000)
        return replace(info, tick=at_tick), comparable(info, rows)


def _told(found: Difference, most: int) -> dict[str, Any]:
    """What is different, for programs: how many rows of each kind, and the first of them."""
    changed = zip(*(_objects(rows, most) for rows in (found.changed_left, found.changed_right)), strict=True)
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
    return [text_json.loads(text) for batch in batches for text in object_text(batch.schema.names, batch.columns).to_pylist()]


def _show(left: str, right: str, left_info: ViewInfo, right_info: ViewInfo, found: Difference, most: int) -> None:
    say(f"{left} at tick {left_info.tick:,}, {right} at tick {right_info.tick:,}: {counted(found.same, 'row')} the same")
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
    if sides := [[name, *row] for pair in pairs for name, row in zip((left, right), pair, strict=True)]:
        table(["in", *found.changed_left.schema.names], sides)
    if left_info.tick != right_info.tick and not found.is_none:
        say(f"\nThey show different ticks. Compare both at one: --at-tick {min(left_info.tick, right_info.tick)}.")


def _heading(text: str, rows: int, most: int) -> None:
    if rows:
        say(f"\n{text}" + (f", of which {most} {'is' if most == 1 else 'are'} shown" if rows > most else ""))


def _cells(rows: pa.Table, most: int) -> list[list[str]]:
    return [[cell(value) for value in row.values()] for row in rows.slice(0, most).to_pylist()]


def switch(
    view: NameArgument,
    version: Annotated[str | None, typer.Argument(metavar="[VERSION]", help="The version to serve, such as v2 or regions.v2.")] = None,
    back: Annotated[bool, typer.Option("--back", "--none", help="Serve the pipeline's own view again, and no version.")] = False,
    state: StateOption = None,
) -> None:
    """Serve a version of a view under its plain name, from now on and to those who follow it.

    Example: headrace view switch regions v2 --state shop.state
    """
    if (version is None) == (not back):
        raise typer.BadParameter("Say which version to serve, or --back.", param_hint="VERSION")
    directory = state_directory(state)
    version = None if version is None else version.removeprefix(f"{view}.")  # as `diff` and `list` call it
    before = read_served(directory).get(view)
    switch_served(directory, view, version)
    say(f"{view} is {'already' if before == version else 'now'} {f'{view}.{version}' if version else 'the view of the pipeline itself'}.")


def drop(view: NameArgument, yes: YesOption = False, state: StateOption = None, json: JsonOption = False) -> None:
    """Take a view out of its store, with its rows: one that nothing keeps and nobody is served. Asks first on a terminal; elsewhere it wants --yes.

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
            f"{view} is served as {plain}.", fix=f"switch {plain} to another first: `headrace view switch {plain} VERSION`, or --back."
        )


def _keeper(home: Path, view: str) -> str | None:
    """The pipeline, or version of it, that kept the view when it last ran. Refuses if it is running: it would go on writing to it."""
    from headrace.pipeline.status import FILE, read_status

    if not (home / FILE).exists():
        return None
    known = read_status(home)
    if not any(view in query["outputs"] for query in known.queries.values()):
        return None
    if known.is_running:
        raise ConfigurationError(f"The pipeline {known.pipeline!r} is running and keeps {view}.", fix="stop it, or take the view out of it, first.")
    return known.pipeline


def _comes_back(keeper: str | None) -> str:
    return "" if keeper is None else f" The next run of {keeper} builds it again, as long as it declares it."
