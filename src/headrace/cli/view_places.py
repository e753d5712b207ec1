"""Where the views that a command names are: in the pipeline's own store, or in that of a version, named in full or served in place of the pipeline's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from headrace.errors import BadQuery, UnknownView
from headrace.serve.stores import Place, Store, Stores, versions
from headrace.sinks.view_file import VIEWS_FILE, ViewInfo
from headrace.sinks.view_sql import mentions

STATE_VARIABLE = "HEADRACE_STATE"
StateOption = Annotated[
    Path | None,
    typer.Option("--state", metavar="DIR", help=f"The pipeline's state directory. Default: the only *.state here.  [env var: {STATE_VARIABLE}]"),
]


def state_directory(state: Path | None) -> Path:
    """The state directory that was named, or that the environment names, or the only one here."""
    if chosen := state or os.environ.get(STATE_VARIABLE):
        return Path(chosen)
    here = sorted(Path().glob(f"*.state/{VIEWS_FILE}"))
    if len(here) == 1:
        return here[0].parent
    found = f"Here are {', '.join(path.parent.name for path in here)}." if here else "There is none here."
    raise typer.BadParameter(
        f"Which pipeline? Say --state DIR, the directory it keeps its state in, or set {STATE_VARIABLE}. {found}", param_hint="--state"
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
    """A view by its own name, that of the pipeline or of a version; what is served under the name does not matter."""
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
    """The one store that a query reads, by the names in its text; `otherwise`, if it names no version's view."""
    served = stores.served()
    if switched := next((view for view in served if mentions(query, view)), None):
        raise BadQuery(
            f"The view {switched!r} is served from its version {served[switched]!r}, and a query names what it reads in full.",
            fix=f'name it "{switched}.{served[switched]}", in double quotes.',
        )
    found = [stores.store(version) for version in versions(stores.state)]
    found = [store for store in found if any(mentions(query, info.name) for info in store.reader.views())]
    if len(found) > 1 or (found and any(mentions(query, info.name) for info in stores.store().reader.views())):
        raise BadQuery(
            "The query names views of several versions; each version has a store of its own.",
            fix="ask each by itself, or compare two views with `headrace view diff`.",
        )
    return found[0] if found else otherwise
