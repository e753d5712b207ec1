"""Which store a view is served from: the pipeline's own, or that of a version which `headrace view
switch` has put in its place.

    shop.state/views.db                  the views of the pipeline
    shop.state/versions/v2/views.db      the views of its version v2: revenue.v2, …
    shop.state/served.json               which version stands behind a plain name

The file is replaced as a whole, so a switch happens at once; whoever follows the view is told by a
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
from headrace.log.topic_config import check_name
from headrace.views.file import VIEWS_FILE, ViewInfo, open_for_reading, translate_errors
from headrace.views.lookup import Lookup
from headrace.views.reader import ViewReader

SERVED_FILE = "served.json"
FORMAT = 1
_VERSIONS = "versions"


class Store:
    """One view store, as it is on disk now. A file that was put in its place is another store."""

    def __init__(self, path: Path, version: str | None, identity: tuple[int, int]) -> None:
        self.path, self.version, self.identity = path, version, identity
        self._path_text = str(path)
        self.reader = ViewReader(path)
        self._lookups: dict[str, Lookup] = {}
        self._watching: sqlite3.Connection | None = None
        self._lock = threading.Lock()

    @property
    def directory(self) -> Path:
        return self.path.parent

    def is_on_disk(self) -> bool:
        """Whether it is still the file of its name."""
        try:
            found = os.stat(self._path_text)  # noqa: PTH116 - at every request
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == self.identity

    def opened_lookup(self, view: str) -> Lookup:
        """Reads single rows of a view, all at one moment, until its `end`; used by the thread of
        the event loop alone.
        """
        found = self._lookups.get(view)
        if found is None or not found.show_newest():  # the view was made anew meanwhile
            self.forget_lookup(view)
            with self.reader.snapshot() as snap:
                info = snap.view(view)
            found = self._lookups[view] = Lookup(self.path, info)
            found.show_newest()
        return found

    def forget_lookup(self, view: str) -> None:
        if found := self._lookups.pop(view, None):
            found.close()

    def commits(self) -> int:
        """A number that changes with every commit of others; much cheaper than reading."""
        with self._lock, translate_errors(self.path):
            if self._watching is None:
                self._watching = open_for_reading(self.path)
            return int(self._watching.execute("PRAGMA data_version").fetchone()[0])

    def close(self) -> None:
        self.reader.close()
        for view in list(self._lookups):
            self.forget_lookup(view)
        with self._lock:
            if self._watching is not None:
                self._watching.close()
                self._watching = None


@dataclass(frozen=True)
class Place:
    """A view that was asked for: where it is, and what it is called there."""

    name: str
    stored: str
    version: str | None
    identity: tuple[int, int]
    store: Store = field(compare=False, repr=False)

    def id(self, tick: int) -> str:
        """The id of a tick's event; with the version in front where one is served in place of the
        pipeline's own view.
        """
        return (
            str(tick)
            if self.version is None or self.name == self.stored
            else f"{self.version}:{tick}"
        )


class Stores:
    """The stores of a state directory. Threads may share it."""

    def __init__(self, state: Path) -> None:
        self.state = Path(state)
        self._stores: dict[str | None, Store] = {}
        self._paths: dict[str | None, str] = {}
        self._served_path = str(self.state / SERVED_FILE)
        self._served: tuple[tuple[int, int], dict[str, str]] | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            for store in self._stores.values():
                store.close()
            self._stores.clear()

    def store(self, version: str | None = None) -> Store:
        """The store of the pipeline, or of a version; UnknownVersion if there is none."""
        path = self._paths.get(version)
        if path is None:
            path = self._paths[version] = str(version_directory(self.state, version) / VIEWS_FILE)
        try:
            found = os.stat(path)  # noqa: PTH116 - at every request
        except (FileNotFoundError, NotADirectoryError):
            if version is not None:
                raise UnknownVersion(version, versions(self.state)) from None
            raise ConfigurationError(
                f"There are no views in {Path(path).parent}.",
                fix="run the pipeline first, or name its state directory.",
            ) from None
        identity = (found.st_dev, found.st_ino)
        with self._lock:
            known = self._stores.get(version)
            if known is None or known.identity != identity:
                if known is not None:
                    known.close()
                known = self._stores[version] = Store(Path(path), version, identity)
            return known

    def place(self, name: str) -> Place:
        """Where a view is served from. A version's view can be named in full, as in `revenue.v2`;
        UnknownView if there is none.
        """
        version = self.served().get(name)
        if version is not None:
            return _place(name, f"{name}.{version}", self.store(version))
        plain, _, named = name.rpartition(".")
        if plain and self.has_version(named):
            store = self.store(named)
            if name in {info.name for info in store.reader.views()}:
                return _place(name, name, store)
        return _place(name, name, self.store())

    def views(self) -> list[tuple[Place, ViewInfo]]:
        """All views: the pipeline's by name, each from where it is served, and those of versions
        under their full names.
        """
        found = [
            (_place(info.name, info.name, self.store()), info)
            for info in self.store().reader.views()
            if info.name not in self.served()
        ]
        for version in versions(self.state):
            store = self.store(version)
            for info in store.reader.views():
                found.append((_place(info.name, info.name, store), info))
                plain = info.name.removesuffix(f".{version}")
                if self.served().get(plain) == version:
                    found.append((_place(plain, info.name, store), info))
        return sorted(found, key=lambda each: each[0].name)

    def unknown(self, name: str) -> UnknownView:
        """That there is no view of a name, with the nearest of all that can be asked for."""
        return UnknownView(name, [place.name for place, _ in self.views()])

    def has_version(self, version: str) -> bool:
        return has_version(self.state, version)

    def served(self) -> dict[str, str]:
        """Plain names that stand for a version's view."""
        stamp, known = self.served_stamp(), self._served
        if stamp is None:
            return {}
        if known is None or known[0] != stamp:
            known = self._served = (stamp, read_served(self.state))
        return known[1]

    def served_stamp(self) -> tuple[int, int] | None:
        """Changes whenever another version is served."""
        try:
            found = os.stat(self._served_path)  # noqa: PTH116 - at every request
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns


def _place(name: str, stored: str, store: Store) -> Place:
    return Place(name, stored, store.version, store.identity, store)


def version_directory(state: Path, version: str | None) -> Path:
    return state if version is None else state / _VERSIONS / check_name(version, what="version")


def has_version(state: Path, version: str) -> bool:
    return (state / _VERSIONS / version / VIEWS_FILE).is_file()


def versions(state: Path) -> list[str]:
    """The versions that have views."""
    return sorted(path.parent.name for path in state.glob(f"{_VERSIONS}/*/{VIEWS_FILE}"))


# What stands behind a plain name


def read_served(state: Path) -> dict[str, str]:
    path = state / SERVED_FILE
    try:
        stored = json.loads(path.read_text())
        version, views = stored["format"], stored["views"]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        raise CorruptionError(
            f"{path} is damaged.",
            fix="delete it, and switch the views again with `headrace view switch`.",
        ) from None
    if version > FORMAT:
        raise NewerFormat(
            f"{path} has format {version}; this Headrace knows {FORMAT}.", fix="upgrade Headrace."
        )
    return dict(views)


def switch(state: Path, view: str, version: str | None) -> None:
    """Serve a version's view under the plain name from now on; without a version, the pipeline's
    own again. It is there at once or not at all.
    """
    if version is None:
        _check_own(state, view)
    else:
        _check_there(state, view, version)
    served = read_served(state)
    served.pop(view, None)
    if version is not None:
        served[view] = version
    content = json.dumps({"format": FORMAT, "views": served}).encode()
    write_atomically(state / SERVED_FILE, content, durable=True)


def _check_own(state: Path, view: str) -> None:
    with ViewReader(state / VIEWS_FILE) as reader:
        names = [info.name for info in reader.views()]
    if view in names:
        return
    if view not in read_served(state):
        raise UnknownView(view, names)
    raise ConfigurationError(
        f"There is no view {view!r} of the pipeline itself to go back to: it was dropped.",
        fix="run the pipeline: if it declares the view, that builds it again. Then switch back.",
    )


def _check_there(state: Path, view: str, version: str) -> None:
    path = version_directory(state, version) / VIEWS_FILE
    if not path.is_file():
        raise UnknownVersion(version, versions(state))
    with ViewReader(path) as reader:
        names = [info.name for info in reader.views()]
    if f"{view}.{version}" not in names:
        raise UnknownView(f"{view}.{version}", names)
