"""Finds the store from which a view is served: the pipeline's own, or that of a version which
`headrace view switch` has chosen instead.

    shop.state/views.db                  the views of the pipeline
    shop.state/versions/v2/views.db      the views of its version v2: revenue.v2, …
    shop.state/served.json               which version serves a plain name

`served.json` is replaced as a whole, so a switch is atomic. Subscribers of the view then receive a
new snapshot.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from dataclasses import dataclass, field
from pathlib import Path

from headrace.atomic_file import write_atomically
from headrace.errors import (
    ConfigurationError,
    CorruptionError,
    NewerFormat,
    UnknownVersion,
    UnknownView,
)
from headrace.names import check_name
from headrace.views.file import VIEWS_FILE, ViewInfo, open_for_reading, translate_errors
from headrace.views.lookup import Lookup
from headrace.views.reader import ViewReader

SERVED_FILE = "served.json"
FORMAT = 1
_VERSIONS = "versions"


class ServedStore:
    """One view store on disk. A file that later replaces it is another store: `identity` is the
    device and inode.
    """

    def __init__(self, path: Path, version: str | None, identity: tuple[int, int]) -> None:
        self.path = path
        self.version = version
        self.identity = identity
        self._path_text = str(path)
        self.reader = ViewReader(path)
        self._lookups: dict[str, Lookup] = {}
        self._version_connection: sqlite3.Connection | None = None
        self._lock = threading.Lock()

    @property
    def directory(self) -> Path:
        return self.path.parent

    def is_on_disk(self) -> bool:
        """Whether the path still leads to this file."""
        try:
            stat = os.stat(self._path_text)  # noqa: PTH116 - faster, and runs at every request
        except FileNotFoundError:
            return False
        return (stat.st_dev, stat.st_ino) == self.identity

    def open_lookup(self, view: str) -> Lookup:
        """The look-up of single rows of a view, refreshed to the newest commit. Only the event
        loop's thread may use it.
        """
        lookup = self._lookups.get(view)
        if lookup is None or not lookup.refresh():  # the view was dropped, and maybe recreated
            self.forget_lookup(view)
            with self.reader.snapshot() as snap:
                info = snap.view(view)
            lookup = self._lookups[view] = Lookup.open(self.path, info)
            lookup.refresh()
        return lookup

    def forget_lookup(self, view: str) -> None:
        if lookup := self._lookups.pop(view, None):
            lookup.close()

    def data_version(self) -> int:
        """SQLite's number that changes with every commit of another connection; much cheaper than
        reading the views.
        """
        with self._lock, translate_errors(self.path):
            if self._version_connection is None:
                self._version_connection = open_for_reading(self.path)
            return int(self._version_connection.execute("PRAGMA data_version").fetchone()[0])

    def close(self) -> None:
        self.reader.close()
        for view in list(self._lookups):
            self.forget_lookup(view)
        with self._lock:
            if self._version_connection is not None:
                self._version_connection.close()
                self._version_connection = None


@dataclass(frozen=True)
class ViewLocation:
    """Where a view that was requested as `name` is stored, and its name there."""

    name: str
    stored_name: str
    version: str | None
    identity: tuple[int, int]
    store: ServedStore = field(compare=False, repr=False)

    def event_id(self, tick: int) -> str:
        """The id of a tick's event; with the version in front if a version is served instead of
        the pipeline's own view.
        """
        return (
            str(tick)
            if self.version is None or self.name == self.stored_name
            else f"{self.version}:{tick}"
        )


class ViewStores:
    """The view stores of a state directory, opened when they are first used. Threads may share
    this object.
    """

    def __init__(self, state: Path) -> None:
        self.state = Path(state)
        self._stores: dict[str | None, ServedStore] = {}
        self._paths: dict[str | None, str] = {}
        self._served_path = str(self.state / SERVED_FILE)
        self._served: tuple[tuple[int, int], dict[str, str]] | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            for store in self._stores.values():
                store.close()
            self._stores.clear()

    def store(self, version: str | None = None) -> ServedStore:
        """The store of the pipeline, or of a version; UnknownVersion if there is none."""
        path = self._paths.get(version)
        if path is None:
            path = self._paths[version] = str(version_directory(self.state, version) / VIEWS_FILE)
        try:
            stat = os.stat(path)  # noqa: PTH116 - faster, and runs at every request
        except (FileNotFoundError, NotADirectoryError):
            if version is not None:
                raise UnknownVersion(version, versions(self.state)) from None
            raise ConfigurationError(
                f"There are no views in {Path(path).parent}.",
                fix="run the pipeline first, or name its state directory.",
            ) from None
        identity = (stat.st_dev, stat.st_ino)
        with self._lock:
            store = self._stores.get(version)
            if store is None or store.identity != identity:
                if store is not None:
                    store.close()
                store = self._stores[version] = ServedStore(Path(path), version, identity)
            return store

    def locate(self, name: str) -> ViewLocation:
        """The location from which a view is served. The view of a version can be named in full, as
        in `revenue.v2`. UnknownView if there is none.
        """
        version = self.served_versions().get(name)
        if version is not None:
            return _location(name, f"{name}.{version}", self.store(version))
        plain_name, _, suffix = name.rpartition(".")
        if plain_name and has_version(self.state, suffix):
            store = self.store(suffix)
            if name in {info.name for info in store.reader.views()}:
                return _location(name, name, store)
        return _location(name, name, self.store())

    def views(self) -> list[tuple[ViewLocation, ViewInfo]]:
        """All views, sorted by name: those of the pipeline, each from the location that serves it,
        and those of versions under their full names.
        """
        views = [
            (_location(info.name, info.name, self.store()), info)
            for info in self.store().reader.views()
            if info.name not in self.served_versions()
        ]
        for version in versions(self.state):
            store = self.store(version)
            for info in store.reader.views():
                views.append((_location(info.name, info.name, store), info))
                plain_name = info.name.removesuffix(f".{version}")
                if self.served_versions().get(plain_name) == version:
                    views.append((_location(plain_name, info.name, store), info))
        return sorted(views, key=lambda each: each[0].name)

    def unknown_view(self, name: str) -> UnknownView:
        """The error for a view that does not exist, which names the nearest one that does."""
        return UnknownView(name, [location.name for location, _ in self.views()])

    def served_versions(self) -> dict[str, str]:
        """The version that serves a view, by the view's plain name. Other views are served from
        the pipeline's own store.
        """
        stamp, cached = self.served_stamp(), self._served
        if stamp is None:
            return {}
        if cached is None or cached[0] != stamp:
            cached = self._served = (stamp, read_served(self.state))
        return cached[1]

    def served_stamp(self) -> tuple[int, int] | None:
        """A value that changes whenever a view is switched to another version."""
        try:
            stat = os.stat(self._served_path)  # noqa: PTH116 - faster, and runs at every request
        except FileNotFoundError:
            return None
        return stat.st_ino, stat.st_mtime_ns


def _location(name: str, stored_name: str, store: ServedStore) -> ViewLocation:
    return ViewLocation(
        name=name,
        stored_name=stored_name,
        version=store.version,
        identity=store.identity,
        store=store,
    )


def version_directory(state: Path, version: str | None) -> Path:
    return state if version is None else state / _VERSIONS / check_name(version, what="version")


def has_version(state: Path, version: str) -> bool:
    return (state / _VERSIONS / version / VIEWS_FILE).is_file()


def versions(state: Path) -> list[str]:
    """The versions that have views."""
    return sorted(path.parent.name for path in state.glob(f"{_VERSIONS}/*/{VIEWS_FILE}"))


# Switching versions


def read_served(state: Path) -> dict[str, str]:
    """The content of `served.json`: versions by plain name."""
    path = state / SERVED_FILE
    try:
        content = json.loads(path.read_text())
        version, views = content["format"], content["views"]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        raise CorruptionError(
            f"{path} is damaged.",
            fix=(
                "rename it, which keeps what is in it, and switch the views again with"
                " `headrace view switch`."
            ),
        ) from None
    if version > FORMAT:
        raise NewerFormat(
            f"{path} has format {version}; this version of Headrace reads up to {FORMAT}.",
            fix="upgrade Headrace.",
        )
    return dict(views)


def switch(state: Path, view: str, version: str | None) -> None:
    """Serve a view from a version from now on, or without a version from the pipeline's own store
    again. The switch is atomic. UnknownView or UnknownVersion if there is nothing to switch to.
    """
    if version is None:
        with ViewReader(state / VIEWS_FILE) as reader:
            names = [info.name for info in reader.views()]
        if view not in names and view not in read_served(state):
            raise UnknownView(view, names)
        if view not in names:
            raise ConfigurationError(
                f"There is no view {view!r} of the pipeline itself to switch back to: it was"
                " dropped.",
                fix="run the pipeline: if it declares the view, it rebuilds it. Then switch back.",
            )
    else:
        path = version_directory(state, version) / VIEWS_FILE
        if not path.is_file():
            raise UnknownVersion(version, versions(state))
        with ViewReader(path) as reader:
            names = [info.name for info in reader.views()]
        if f"{view}.{version}" not in names:
            raise UnknownView(f"{view}.{version}", names)
    served = read_served(state)
    served.pop(view, None)
    if version is not None:
        served[view] = version
    content = json.dumps({"format": FORMAT, "views": served}).encode()
    write_atomically(state / SERVED_FILE, content, durable=True)
