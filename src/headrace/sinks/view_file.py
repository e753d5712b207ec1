"""The SQLite database that holds a pipeline's views: its tables, how it is opened, and what its errors mean. Used by `views.py` and `view_reader.py`.

| table         | what                                                                                                        |
|---------------|-------------------------------------------------------------------------------------------------------------|
| `_ledger`     | one row: the epoch of the newest run that has written                                                       |
| `_views`      | a row for each view: its schema and key, the tick it shows, and from which tick on its changes are kept     |
| `_rows_N`     | the rows of view number N, in columns `c0`, `c1`, …                                                         |
| `_changes`    | recent changes, as Arrow record batches of whole ticks                                                      |
| the view NAME | `_rows_N` under the names that the user gave: what SQL sees, here and in any other program that reads SQLite |
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import pyarrow as pa

from headrace.errors import BugError, ConfigurationError, CorruptionError, DiskFull, HeadraceError, NewerFormat, RetryError, UnknownView
from headrace.log.schema import schema_from_bytes

VIEWS_FILE = "views.db"
FORMAT = 1
APPLICATION_ID = 0x48525657
BUSY_SECONDS = 30.0
_PAGE_BYTES = 8192  # measured: a tenth less time for upserts of random keys than with 4096
_CACHE_KIB = 64 << 10
_WAL_KEPT_BYTES = 64 << 20

_TABLES = """
CREATE TABLE _ledger (epoch INTEGER NOT NULL);
CREATE TABLE _views (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL COLLATE NOCASE UNIQUE, schema BLOB NOT NULL, key TEXT NOT NULL, most_rows INTEGER,
    tick INTEGER NOT NULL, null_keys INTEGER NOT NULL, kept_after INTEGER NOT NULL, kept_rows INTEGER NOT NULL, kept_bytes INTEGER NOT NULL);
CREATE TABLE _changes (id INTEGER PRIMARY KEY, view INTEGER NOT NULL, last_tick INTEGER NOT NULL, rows INTEGER NOT NULL, data BLOB NOT NULL);
CREATE INDEX _changes_by_view ON _changes (view, id);
"""
_VIEW_COLUMNS = "number, name, schema, key, most_rows, tick, null_keys, kept_after, kept_rows, kept_bytes"


@dataclass(frozen=True)
class ViewInfo:
    """A view as it is stored: what it is, and the tick it shows. Without a key it is a stream: the newest `most_rows` rows in the order they came."""

    number: int
    name: str
    schema: pa.Schema = field(compare=False)
    key: tuple[str, ...]
    most_rows: int | None
    tick: int
    null_keys: bool
    """Whether a null has ever stood in a key column; SQLite stores something else in its place."""
    kept_after: int
    """Changes of every later tick are kept; how many and how large they are say the next two."""
    kept_rows: int
    kept_bytes: int

    @property
    def is_stream(self) -> bool:
        return not self.key


def read_views(db: sqlite3.Connection) -> list[ViewInfo]:
    """All views, by name."""
    return [_info(row) for row in db.execute(f"SELECT {_VIEW_COLUMNS} FROM _views ORDER BY name")]  # noqa: S608


def read_view(db: sqlite3.Connection, name: str) -> ViewInfo:
    """One view, or UnknownView with the nearest name."""
    row = db.execute(f"SELECT {_VIEW_COLUMNS} FROM _views WHERE name = ? COLLATE BINARY", (name,)).fetchone()  # noqa: S608
    if row is None:
        raise UnknownView(name, [known for (known,) in db.execute("SELECT name FROM _views")])
    return _info(row)


def _info(row: tuple[int, str, bytes, str, int | None, int, int, int, int, int]) -> ViewInfo:
    number, name, schema, key, most_rows, tick, null_keys, *kept = row
    return ViewInfo(number, name, _schema(schema), tuple(json.loads(key)), most_rows, tick, bool(null_keys), *kept)


@lru_cache(maxsize=256)
def _schema(stored: bytes) -> pa.Schema:
    return schema_from_bytes(stored)


# Opening


def open_for_writing(path: Path) -> sqlite3.Connection:
    """The database, made if it is not there. A commit that returned is on disk, also after power loss."""
    with translated(path):
        db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            _check_format(db, path)
            db.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA secure_delete = OFF")
            db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            db.execute(f"PRAGMA journal_size_limit = {_WAL_KEPT_BYTES}")
            _create_tables(db)
        except BaseException:
            db.close()
            raise
    return db


def _create_tables(db: sqlite3.Connection) -> None:
    """Under the write lock, and only if nobody else was quicker."""
    db.execute("BEGIN IMMEDIATE")
    if _number(db, "user_version") == 0:
        for statement in _TABLES.split(";"):
            db.execute(statement)
        db.execute("INSERT INTO _ledger VALUES (-1)")
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {FORMAT}")
    db.execute("COMMIT")


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A connection that cannot write. Any number of them, in any process, while the writer goes on."""
    if not path.is_file():
        raise ConfigurationError(
            f"There are no views in {path.parent}: {path.name} is not there.", fix="name the pipeline's state directory, or run it first."
        )
    with translated(path):
        address = f"{path.absolute().as_uri()}?mode=ro"
        db = sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            _check_format(db, path)
            db.execute("PRAGMA query_only = ON")
            db.execute("PRAGMA trusted_schema = OFF")
        except BaseException:
            db.close()
            raise
    if _number(db, "user_version") == 0:
        db.close()
        raise ConfigurationError(f"{path} holds no views yet.", fix="run the pipeline first.")
    return db


def _check_format(db: sqlite3.Connection, path: Path) -> None:
    version, application = _number(db, "user_version"), _number(db, "application_id")
    is_empty = version == 0 and db.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (0,)
    if is_empty:
        return
    if application != APPLICATION_ID:
        raise ConfigurationError(f"{path} is a SQLite database, but not one of views.", fix="name another state directory, or move the file away.")
    if version > FORMAT:
        raise NewerFormat(f"{path} has format {version}; this Headrace knows {FORMAT}.", fix="upgrade Headrace.")


def _number(db: sqlite3.Connection, pragma: str) -> int:
    return int(db.execute(f"PRAGMA {pragma}").fetchone()[0])


# Errors


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """SQLite's errors as ours."""
    try:
        yield
    except sqlite3.Error as error:
        raise _translation(error, path) from error


_BUSY = ("SQLITE_BUSY", "SQLITE_LOCKED")
_FULL = ("SQLITE_FULL",)
_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB")
_CLOSED = ("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM")
_DISK = ("SQLITE_IOERR",)


def is_about_storage(error: Exception) -> bool:
    """Whether an error is the file's or the disk's, and not that of what was asked."""
    return _name(error).startswith((*_BUSY, *_FULL, *_DAMAGED, *_CLOSED, *_DISK))


def _name(error: Exception) -> str:
    return getattr(error, "sqlite_errorname", "")


def _translation(error: sqlite3.Error, path: Path) -> HeadraceError:
    name = _name(error)
    if name.startswith(_BUSY):
        return RetryError(f"Another process has been writing to {path} for {BUSY_SECONDS:.0f} seconds.", fix="stop the other one, or try again.")
    if name.startswith(_FULL):
        return DiskFull(f"There is no room for {path}; what it had is intact.", fix="make room and go on.")
    if name.startswith(_DAMAGED):
        fix = "move it away with its -wal and -shm files, and restore a backup or build the views anew with `headrace replay`."
        return CorruptionError(f"{path} is damaged: {error}.", fix=fix)
    if name.startswith(_CLOSED):
        return ConfigurationError(f"{path} cannot be used: {error}.", fix="check that its directory exists and that this user may write there.")
    if name.startswith(_DISK):
        return RetryError(f"The disk failed under {path}: {error}.", fix="look after the disk; a commit that failed can be repeated safely.")
    return BugError(f"SQLite refuses a statement on {path}: {error}.")
