"""`headrace view diff`, `switch` and `drop`: compares a version that `headrace replay` built with
what is served, serves it instead, and drops views that are no longer needed. `view.py` lists and
shows.
"""

from __future__ import annotations

import json as text_json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer

from headrace.cli.options import JsonOption, YesOption, confirm
from headrace.cli.output import count_text, echo, format_cell, print_json, print_table
from headrace.cli.view_stores import (
    StateOption,
    locate_stored,
    open_stores,
    state_directory,
)
from headrace.errors import ConfigurationError
from headrace.serve.stores import ViewStores, read_served
from headrace.serve.stores import switch as switch_served
from headrace.types.json_codec import object_text
from headrace.views.diff import ViewDifference, diff_views, without_ticks
from headrace.views.file import ViewInfo, drop_view

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
                f"switch {plain_name} to another first: `headrace view switch {plain_name}"
                " VERSION`, or"
                " --back."
            ),
        )


def _find_declaring_pipeline(home: Path, view: str) -> str | None:
    """The pipeline, or version of it, that declared the view in its last run. ConfigurationError if
    it is running, because it would continue to write to the view.
    """
    from headrace.run_status import FILE, read_status

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
