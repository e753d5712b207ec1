"""The SQLite database that holds a pipeline's views: its tables, how it is opened, and what its
errors mean. Used by `views.py` and `view_reader.py`.

| table         | what
|
|---------------|-------------------------------------------------------------------------------------------------------------|
| `_ledger`     | one row: the epoch of the newest run that has written
|
| `_views`      | a row for each view: its schema and key, the tick it shows, and from which tick on
its changes are kept     |
| `_rows_N`     | the rows of view number N, in columns `c0`, `c1`, …
|
| `_changes`    | recent changes, as Arrow record batches of whole ticks
|
| the view NAME | `_rows_N` under the names that the user gave: what SQL sees, here and in any other
program that reads SQLite |
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from headrace.columnar.columns import TICK
from headrace.errors import (
    BugError,
    ConfigurationError,
    CorruptionError,
    DiskFull,
    HeadraceError,
    InputError,
    NewerFormat,
    RetryError,
    UnknownView,
)
from headrace.types.schema import quoted, schema_from_bytes
from headrace.types.values import Misfit, column
from headrace.views.types import affinity, from_values, to_values

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
_VIEW_COLUMNS = (
    "number, name, schema, key, most_rows, tick, null_keys, kept_after, kept_rows, kept_bytes"
)


@dataclass(frozen=True)
class ViewInfo:
    """A view as it is stored: what it is, and the tick it shows. Without a key it is a stream: the
    newest `max_rows` rows in the order they came.
    """

    number: int
    name: str
    schema: pa.Schema = field(compare=False)
    key: tuple[str, ...]
    max_rows: int | None
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
    row = db.execute(
        f"SELECT {_VIEW_COLUMNS} FROM _views WHERE name = ? COLLATE BINARY",  # noqa: S608
        (name,),
    ).fetchone()
    if row is None:
        raise UnknownView(name, [known for (known,) in db.execute("SELECT name FROM _views")])
    return _info(row)


def _info(row: tuple[int, str, bytes, str, int | None, int, int, int, int, int]) -> ViewInfo:
    number, name, schema, key, max_rows, tick, null_keys, *kept = row
    return ViewInfo(
        number,
        name,
        _schema(schema),
        tuple(json.loads(key)),
        max_rows,
        tick,
        bool(null_keys),
        *kept,
    )


@lru_cache(maxsize=256)
def _schema(stored: bytes) -> pa.Schema:
    return schema_from_bytes(stored)


# Opening


def open_for_writing(path: Path) -> sqlite3.Connection:
    """The database, made if it is not there. A commit that returned is on disk, also after power
    loss.
    """
    with translated(path):
        db = sqlite3.connect(
            path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
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
    """A connection that cannot write. Any number of them, in any process, while the writer goes
    on.
    """
    if not path.is_file():
        raise ConfigurationError(
            f"There are no views in {path.parent}: {path.name} is not there.",
            fix="name the pipeline's state directory, or run it first.",
        )
    with translated(path):
        address = f"{path.absolute().as_uri()}?mode=ro"
        db = sqlite3.connect(
            address, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
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
        raise ConfigurationError(
            f"{path} is a SQLite database, but not one of views.",
            fix="name another state directory, or move the file away.",
        )
    if version > FORMAT:
        raise NewerFormat(
            f"{path} has format {version}; this Headrace knows {FORMAT}.", fix="upgrade Headrace."
        )


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
        return RetryError(
            f"Another process has been writing to {path} for {BUSY_SECONDS:.0f} seconds.",
            fix="stop the other one, or try again.",
        )
    if name.startswith(_FULL):
        return DiskFull(
            f"There is no room for {path}; what it had is intact.", fix="make room and go on."
        )
    if name.startswith(_DAMAGED):
        fix = (
            "move it away with its -wal and -shm files, and restore a backup or build the views"
            " anew with `headrace replay`."
        )
        return CorruptionError(f"{path} is damaged: {error}.", fix=fix)
    if name.startswith(_CLOSED):
        return ConfigurationError(
            f"{path} cannot be used: {error}.",
            fix="check that its directory exists and that this user may write there.",
        )
    if name.startswith(_DISK):
        return RetryError(
            f"The disk failed under {path}: {error}.",
            fix="look after the disk; a commit that failed can be repeated safely.",
        )
    return BugError(f"SQLite refuses a statement on {path}: {error}.")


# The SQL of one view's rows: its table, the view that users' SQL sees, and the statements that read
# and write it, with keys in SQLite's terms.
#
# A key column may hold nulls, but SQLite's primary keys cannot. So a null key is stored as a value
# of a kind that the column never has: an empty blob, or in a column of blobs the number 0. Only
# when such a row has come does the view that SQL sees turn it back, since that keeps SQLite from
# using the key's index.


class ViewTable:
    """Where a view's rows are: names of columns, keys, statements."""

    def __init__(self, info: ViewInfo) -> None:
        self.info = info
        self.table = f"_rows_{info.number}"
        names = info.schema.names
        self.columns = [f"c{position}" for position in range(len(names))]
        self.key_columns = [self.columns[names.index(name)] for name in info.key]
        self.key_fields = [info.schema.field(name) for name in info.key]

    # Statements

    def create(self) -> str:
        declared = [
            f"{name} {affinity(field.type)}"
            for name, field in zip(self.columns, self.info.schema, strict=True)
        ]
        if self.info.is_stream:
            return (
                f"CREATE TABLE {self.table} (_row INTEGER PRIMARY KEY, {TICK} INTEGER NOT NULL,"
                f" {', '.join(declared)})"
            )
        return (
            f"CREATE TABLE {self.table} ({', '.join(declared)}, PRIMARY KEY"
            f" ({', '.join(self.key_columns)})) WITHOUT ROWID"
        )

    def create_view(self, *, null_keys: bool) -> str:
        """The rows under the user's names."""
        shown = [
            f"{self._shown(position, null_keys=null_keys)} AS {quoted(name)}"
            for position, name in enumerate(self.info.schema.names)
        ]
        ticks = [TICK] if self.info.is_stream else []
        return f"CREATE VIEW {quoted(self.info.name)} AS SELECT {', '.join([*ticks, *shown])} FROM {self.table}"  # noqa: S608

    def _shown(self, position: int, *, null_keys: bool) -> str:
        name = self.columns[position]
        if not null_keys or name not in self.key_columns:
            return name
        stands_for_null = null_key(self.info.schema.field(position).type)
        return f"nullif({name}, {'x' + repr('') if stands_for_null == b'' else stands_for_null})"

    @property
    def written(self) -> list[str]:
        return [TICK, *self.columns] if self.info.is_stream else self.columns

    def select(self, conditions: list[str], *, reverse: bool = False) -> str:
        """Rows in the order of their key, or of a stream: as they came. A stream's have their tick
        behind them.
        """
        order = ["_row"] if self.info.is_stream else self.key_columns
        direction = " DESC" if reverse else ""
        ticks = [TICK] if self.info.is_stream else []
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        by = ", ".join(f"{name}{direction}" for name in order)
        return f"SELECT {', '.join([*self.columns, *ticks])} FROM {self.table}{where} ORDER BY {by}"  # noqa: S608

    # Keys

    def stored_key(self, key: Any) -> list[Any]:
        """A whole key as it is stored."""
        return self.key_prefix(key, whole=True)

    def key_prefix(self, key: Any, *, whole: bool = False) -> list[Any]:
        """The first columns of a key, or all, as they are stored. A key is a value, a tuple of
        them, or a dict by column name.
        """
        values = self._key_values(key)
        if (
            not values
            or len(values) > len(self.info.key)
            or (whole and len(values) < len(self.info.key))
        ):
            wanted = ", ".join(self.info.key)
            raise InputError(
                f"{key!r} is not a key of the view {self.info.name!r}, whose key is ({wanted}).",
                fix="give a value for each of its columns.",
            )
        return [
            self._stored(value, field)
            for value, field in zip(values, self.key_fields, strict=False)
        ]

    def _key_values(self, key: Any) -> tuple[Any, ...]:
        if isinstance(key, Mapping):
            return (
                tuple(key[name] for name in self.info.key) if set(key) == set(self.info.key) else ()
            )
        return tuple(key) if isinstance(key, tuple | list) else (key,)

    def _stored(self, value: Any, field: pa.Field) -> Any:
        if value is None:
            return null_key(field.type)
        try:
            (stored,) = to_values(column(field).array([value]))
        except (Misfit, pa.ArrowException, OverflowError, ValueError, TypeError) as error:
            raise InputError(
                f"{value!r} cannot be the key column {field.name!r} of the view {self.info.name!r}:"
                f" {error}."
            ) from None
        return stored

    # Rows

    def key_values(self, array: pa.Array) -> list[Any]:
        """A key column as it is stored: without nulls."""
        values = to_values(array)
        if not array.null_count:
            return values
        stands_for_null = null_key(array.type)
        return [stands_for_null if value is None else value for value in values]

    @property
    def schema(self) -> pa.Schema:
        """Of rows as they are read: a stream's end with their tick."""
        return (
            self.info.schema.append(pa.field(TICK, pa.int64(), nullable=False))
            if self.info.is_stream
            else self.info.schema
        )

    def batch(self, rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
        """Rows as `select` gave them, with the view's own types."""
        cells = list(zip(*rows, strict=True)) if rows else [()] * len(self.schema)
        arrays = [
            self._array(list(values), field)
            for values, field in zip(cells, self.schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _array(self, values: list[Any], field: pa.Field) -> pa.Array:
        if self.info.null_keys and field.name in self.info.key:
            stands_for_null = null_key(field.type)
            values = [
                None if value == stands_for_null and type(value) is type(stands_for_null) else value
                for value in values
            ]
        return from_values(values, field.type)


def null_key(kind: pa.DataType) -> Any:
    """What stands for a null in a key column of a type; no value of the type is stored like it."""
    return 0 if pa.types.is_binary(kind) else b""


# A view taken out of its store, with its rows and kept changes. `headrace view drop` does it, when
# nothing keeps or serves the view any more.


def drop_view(path: Path, name: str) -> None:
    """All of it in one transaction. UnknownView if there is none."""
    with contextlib.closing(open_for_writing(path)) as db, translated(path):
        db.execute("BEGIN IMMEDIATE")
        try:
            info = read_view(db, name)
            db.execute(f"DROP VIEW {quoted(info.name)}")
            db.execute(f"DROP TABLE {ViewTable(info).table}")
            db.execute("DELETE FROM _changes WHERE view = ?", (info.number,))
            db.execute("DELETE FROM _views WHERE number = ?", (info.number,))
            db.execute("COMMIT")
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")


# All rows of a view store removed for good: no free page, no write-ahead log has them any more. Its
# views stay declared, and are built again by the next run of their pipeline.


_WAIT_S = 10.0


def scrub(path: Path) -> None:
    """The steps, each harmless when repeated: overwrite what is deleted, leave free pages out,
    empty the write-ahead log.
    """
    if not path.exists():
        return
    with contextlib.closing(open_for_writing(path)) as db, translated(path):
        db.execute("PRAGMA secure_delete = ON")
        db.execute("BEGIN IMMEDIATE")
        for info in read_views(db):
            db.execute(f"DELETE FROM {ViewTable(info).table}")  # noqa: S608 - a name of ours
            db.execute(
                "UPDATE _views SET tick = 0, kept_after = 0, kept_rows = 0, kept_bytes = 0 WHERE"
                " number = ?",
                (info.number,),
            )
        db.execute("DELETE FROM _changes")
        db.execute("COMMIT")
        db.execute("VACUUM")
        _empty_log(db, path)


def _empty_log(db: sqlite3.Connection, path: Path) -> None:
    """A reader in another process may be looking at an older moment, for a moment."""
    deadline = time.monotonic() + _WAIT_S
    while db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
        if time.monotonic() > deadline:
            raise RetryError(
                f"Somebody is still reading an older moment of {path}, so its write-ahead log"
                " cannot be emptied.",
                fix="stop who reads it, and run this again.",
            )
        time.sleep(0.05)
