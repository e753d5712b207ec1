"""`hr.cdc.<kind>(…)`: one function a kind of database. Packages of a database are imported when a capture is run, not when it is declared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headrace.cdc.declared import Capture
from headrace.cdc.source import Source
from headrace.errors import InputError, nearest


def sqlite(path: str | Path, *, tables: Sequence[str] = (), name: str | None = None, **settings: Any) -> Capture:
    """Tables of a SQLite database (all of them, if none are named), captured by triggers that are put into it.

    Further settings, here and for every kind: `log` (the log's address), `prefix` (of the topics' names), `partitions` (of a topic), `preimages` (also what an update
    replaced), `snapshot` (whether to begin with what is there), `chunk_rows` (rows a piece of the snapshot).
    """
    return _capture("sqlite", name or Path(path).stem, _open_sqlite, tables, settings, path=str(path))


def _open_sqlite(capture: Capture) -> Source:
    from headrace.cdc.sqlite_source.source import SqliteSource

    return SqliteSource(capture.options["path"], capture.name, capture.tables)


def postgres(url: str, *, tables: Sequence[str] = (), name: str | None = None, **settings: Any) -> Capture:
    """Tables of a Postgres database (all of them, if none are named; `schema.*` is a pattern), captured by logical replication. Needs the extra `postgres`."""
    return _capture("postgres", name or _database_of(url), _open_postgres, tables, settings, url=url)


def _open_postgres(capture: Capture) -> Source:
    from headrace.cdc.postgres_source.source import PostgresSource

    return PostgresSource(capture.options["url"], capture.name, capture.tables, prefix=capture.prefix)


def _database_of(url: str) -> str:
    return urlsplit(url).path.strip("/") or "database"


_SETTINGS = ("log", "prefix", "partitions", "preimages", "snapshot", "chunk_rows")


def _capture(kind: str, name: str, opener: Any, tables: Sequence[str], settings: dict[str, Any], **options: Any) -> Capture:
    for setting in settings:
        if setting not in _SETTINGS:
            raise InputError(f"hr.cdc.{kind} has no setting {setting!r}: {nearest(setting, _SETTINGS)}")
    if isinstance(tables, str):
        raise InputError(f"tables must be a list, not {tables!r}.", fix=f"write tables=[{tables!r}].")
    return Capture(name=name, kind=kind, opener=opener, tables=tuple(tables), options=options, **settings)


def from_url(url: str, *, tables: Sequence[str] = (), name: str | None = None, **settings: Any) -> Capture:
    """The capture that a URL stands for: `sqlite:shop.db`."""
    kind = urlsplit(url).scheme
    if kind == "sqlite":
        return sqlite(url.removeprefix("sqlite:").removeprefix("//"), tables=tables, name=name, **settings)
    if kind in {"postgres", "postgresql"}:
        return postgres(url, tables=tables, name=name, **settings)
    raise InputError(f"{url!r} is no database that can be captured: {nearest(kind, ['sqlite', 'postgres'])}", fix="give sqlite:PATH or postgres://USER@HOST/DATABASE.")
