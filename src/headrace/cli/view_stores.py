"""Finds the view stores that a command reads: the state directory, the location of a view by name,
and the store of a query. `headrace view` and `headrace serve` use it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from headrace.errors import BadQuery, UnknownView
from headrace.serve.stores import ServedStore, ViewLocation, ViewStores, versions
from headrace.views.file import VIEWS_FILE, ViewInfo
from headrace.views.sql import mentions

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
