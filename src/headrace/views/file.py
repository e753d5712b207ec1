"""The SQLite database that holds a pipeline's views: its tables, how it is opened, and what its
errors mean. `store.py` writes it, `reader.py` and `lookup.py` read it.

    _ledger    one row: the epoch of the newest run that has written
    _views     one row per view: its schema and key, the tick it shows, and the tick after which
               its changes are retained
    _rows_N    the rows of view number N, in the columns c0, c1, …
    _changes   recent changes, as Arrow record batches of whole ticks
    VIEW       an SQL view over _rows_N with the user's names: what queries see, here and in any
               other program that reads SQLite
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

from headrace.columnar.columns import TICK, TICK_FIELD
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
from headrace.types.schema import quote_identifier, schema_from_bytes
from headrace.types.sqlite_codec import affinity, from_values, to_values
from headrace.types.values import Misfit, column_converter

VIEWS_FILE = "views.db"
FORMAT = 1
APPLICATION_ID = 0x48525657
BUSY_SECONDS = 30.0
_PAGE_BYTES = 8192  # measured: a tenth less time for upserts of random keys than with 4096
_CACHE_KIB = 64 << 10
_WAL_KEPT_BYTES = 64 << 20
_TRUNCATE_WAIT_S = 10.0

# SQLite stores the text of each statement.
_TABLES = (
    "\nCREATE TABLE _ledger (epoch INTEGER NOT NULL);\n"
    "CREATE TABLE _views (\n"
    "    number INTEGER PRIMARY KEY, name TEXT NOT NULL COLLATE NOCASE UNIQUE,"
    " schema BLOB NOT NULL, key TEXT NOT NULL, most_rows INTEGER,\n"
    "    tick INTEGER NOT NULL, null_keys INTEGER NOT NULL, kept_after INTEGER NOT NULL,"
    " kept_rows INTEGER NOT NULL, kept_bytes INTEGER NOT NULL);\n"
    "CREATE TABLE _changes (id INTEGER PRIMARY KEY, view INTEGER NOT NULL,"
    " last_tick INTEGER NOT NULL, rows INTEGER NOT NULL, data BLOB NOT NULL);\n"
    "CREATE INDEX _changes_by_view ON _changes (view, id);\n"
)
_VIEW_COLUMNS = (
    "number, name, schema, key, most_rows, tick, null_keys, kept_after, kept_rows, kept_bytes"
)


@dataclass(frozen=True)
class ViewInfo:
    """A view as the database describes it. A view without a key is a stream: its newest `max_rows`
    rows in the order in which they were appended.
    """

    number: int
    name: str
    schema: pa.Schema = field(compare=False)
    key: tuple[str, ...]
    max_rows: int | None
    tick: int
    null_keys: bool
    """Whether a key column has ever held a null, which SQLite stores as a stand-in value."""
    kept_after: int
    """The changes of every later tick are retained: `kept_rows` changes in `kept_bytes` bytes."""
    kept_rows: int
    kept_bytes: int

    @property
    def is_stream(self) -> bool:
        return not self.key


def read_views(db: sqlite3.Connection) -> list[ViewInfo]:
    """All views, by name."""
    rows = db.execute(f"SELECT {_VIEW_COLUMNS} FROM _views ORDER BY name")  # noqa: S608
    return [_view_info(row) for row in rows]


def read_view(db: sqlite3.Connection, name: str) -> ViewInfo:
    """The view of a name. UnknownView, which names the nearest, if there is none."""
    row = db.execute(
        f"SELECT {_VIEW_COLUMNS} FROM _views WHERE name = ? COLLATE BINARY",  # noqa: S608
        (name,),
    ).fetchone()
    if row is None:
        raise UnknownView(name, [view for (view,) in db.execute("SELECT name FROM _views")])
    return _view_info(row)


def _view_info(row: tuple[int, str, bytes, str, int | None, int, int, int, int, int]) -> ViewInfo:
    number, name, schema, key, max_rows, tick, null_keys, kept_after, kept_rows, kept_bytes = row
    return ViewInfo(
        number=number,
        name=name,
        schema=_schema(schema),
        key=tuple(json.loads(key)),
        max_rows=max_rows,
        tick=tick,
        null_keys=bool(null_keys),
        kept_after=kept_after,
        kept_rows=kept_rows,
        kept_bytes=kept_bytes,
    )


@lru_cache(maxsize=256)
def _schema(stored: bytes) -> pa.Schema:
    return schema_from_bytes(stored)


# Opening


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open the database, and create it if it does not exist. A commit that returned survives a
    power loss.
    """
    with translate_errors(path):
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
            db.execute("BEGIN IMMEDIATE")
            if _read_pragma(db, "user_version") == 0:  # no other process has created the tables
                for statement in _TABLES.split(";"):
                    db.execute(statement)
                db.execute("INSERT INTO _ledger VALUES (-1)")
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {FORMAT}")
            db.execute("COMMIT")
        except BaseException:
            db.close()
            raise
    return db


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open a read-only connection. Any number of processes may hold one while the writer runs."""
    if not path.is_file():
        raise ConfigurationError(
            f"There are no views in {path.parent}: {path.name} does not exist.",
            fix="name the pipeline's state directory, or run the pipeline first.",
        )
    with translate_errors(path):
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
    if _read_pragma(db, "user_version") == 0:
        db.close()
        raise ConfigurationError(f"{path} holds no views yet.", fix="run the pipeline first.")
    return db


def _check_format(db: sqlite3.Connection, path: Path) -> None:
    version = _read_pragma(db, "user_version")
    application = _read_pragma(db, "application_id")
    is_empty = version == 0 and db.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (0,)
    if is_empty:
        return
    if application != APPLICATION_ID:
        raise ConfigurationError(
            f"{path} is an SQLite database, but not a view store.",
            fix="name another state directory, or move the file away.",
        )
    if version > FORMAT:
        raise NewerFormat(
            f"{path} has format {version}; this version of Headrace reads up to {FORMAT}.",
            fix="upgrade Headrace.",
        )


def _read_pragma(db: sqlite3.Connection, pragma: str) -> int:
    return int(db.execute(f"PRAGMA {pragma}").fetchone()[0])


# Errors


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Raise SQLite's errors as Headrace errors that name the file and what to do."""
    try:
        yield
    except sqlite3.Error as error:
        raise _translate_error(error, path) from error


_BUSY = ("SQLITE_BUSY", "SQLITE_LOCKED")
_FULL = ("SQLITE_FULL",)
_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB")
_CLOSED = ("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM")
_DISK = ("SQLITE_IOERR",)


def is_storage_error(error: Exception) -> bool:
    """Whether an error comes from the file or the disk, not from the statement."""
    return _error_name(error).startswith((*_BUSY, *_FULL, *_DAMAGED, *_CLOSED, *_DISK))


def _error_name(error: Exception) -> str:
    return getattr(error, "sqlite_errorname", "")


def _translate_error(error: sqlite3.Error, path: Path) -> HeadraceError:
    name = _error_name(error)
    if name.startswith(_BUSY):
        return RetryError(
            f"Another process has been writing to {path} for {BUSY_SECONDS:.0f} seconds.",
            fix="stop the other process, or try again.",
        )
    if name.startswith(_FULL):
        return DiskFull(
            f"The disk is full: {path} cannot grow. What it holds is intact.",
            fix="free some space, then start again.",
        )
    if name.startswith(_DAMAGED):
        fix = (
            "move it away with its -wal and -shm files, then restore a backup or rebuild the views"
            " with `headrace replay`."
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
            fix="check the disk; a commit that failed can be repeated safely.",
        )
    return BugError(f"SQLite refuses a statement on {path}: {error}.")


# The table of one view


class ViewTable:
    """The table with a view's rows: its columns, its keys as SQLite stores them, and its
    statements.

    A key column may hold nulls, but an SQLite primary key cannot. So a null key is stored as a
    value of a kind that the column never has: an empty blob, or in a column of blobs the number 0
    (`null_key`). The SQL view turns it back into null only once such a row has been written,
    because the conversion keeps SQLite from using the key's index.
    """

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
        """The statement that creates the SQL view: the rows under the user's names."""
        columns = []
        for column, declared in zip(self.columns, self.info.schema, strict=True):
            expression = column
            if null_keys and column in self.key_columns:
                stand_in = null_key(declared.type)
                expression = f"nullif({column}, {'x' + repr('') if stand_in == b'' else stand_in})"
            columns.append(f"{expression} AS {quote_identifier(declared.name)}")
        ticks = [TICK] if self.info.is_stream else []
        return (
            f"CREATE VIEW {quote_identifier(self.info.name)} AS"  # noqa: S608
            f" SELECT {', '.join([*ticks, *columns])} FROM {self.table}"
        )

    @property
    def inserted_columns(self) -> list[str]:
        return [TICK, *self.columns] if self.info.is_stream else self.columns

    def select(self, conditions: list[str], *, reverse: bool = False) -> str:
        """The statement that reads rows in key order; of a stream, in the order of appending, with
        the tick as the last column.
        """
        order = ["_row"] if self.info.is_stream else self.key_columns
        direction = " DESC" if reverse else ""
        ticks = [TICK] if self.info.is_stream else []
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        by = ", ".join(f"{name}{direction}" for name in order)
        return f"SELECT {', '.join([*self.columns, *ticks])} FROM {self.table}{where} ORDER BY {by}"  # noqa: S608

    # Keys

    def stored_key(self, key: Any) -> list[Any]:
        """A complete key as it is stored. See `key_prefix`."""
        return self.key_prefix(key, whole=True)

    def key_prefix(self, key: Any, *, whole: bool = False) -> list[Any]:
        """The first columns of a key, or with `whole` all of them, as they are stored.

        Args:
            key: One value, a tuple of values, or a dict by column name.
            whole: Whether every column of the key is required.

        Raises:
            InputError: The key has the wrong number of values, or one of another type.

        """
        names = self.info.key
        if isinstance(key, Mapping):
            values = tuple(key[name] for name in names) if set(key) == set(names) else ()
        else:
            values = tuple(key) if isinstance(key, tuple | list) else (key,)
        if not values or len(values) > len(names) or (whole and len(values) < len(names)):
            raise InputError(
                f"{key!r} is not a key of the view {self.info.name!r}, whose key is"
                f" ({', '.join(names)}).",
                fix="give a value for each of its columns.",
            )
        return [
            self._stored_value(value, field)
            for value, field in zip(values, self.key_fields, strict=False)
        ]

    def _stored_value(self, value: Any, field: pa.Field) -> Any:
        if value is None:
            return null_key(field.type)
        try:
            (stored,) = to_values(column_converter(field).array([value]))
        except (Misfit, pa.ArrowException, OverflowError, ValueError, TypeError) as error:
            raise InputError(
                f"{value!r} cannot be the key column {field.name!r} of the view {self.info.name!r}:"
                f" {error}."
            ) from None
        return stored

    # Rows

    def key_values(self, array: pa.Array) -> list[Any]:
        """The values of a key column as they are stored, with `null_key` in place of nulls."""
        values = to_values(array)
        if not array.null_count:
            return values
        stands_for_null = null_key(array.type)
        return [stands_for_null if value is None else value for value in values]

    @property
    def schema(self) -> pa.Schema:
        """The schema of the rows that `select` reads."""
        return self.info.schema.append(TICK_FIELD) if self.info.is_stream else self.info.schema

    def batch(self, rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
        """Rows that `select` read, converted to the view's types."""
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
    """The stand-in for a null in a key column of a type. No value of the type is stored like it."""
    return 0 if pa.types.is_binary(kind) else b""


# Dropping and scrubbing


def drop_view(path: Path, name: str) -> None:
    """Remove a view with its rows and retained changes, in one transaction. UnknownView if there is
    none. `headrace view drop` calls this for views that no pipeline declares any more.
    """
    with contextlib.closing(open_for_writing(path)) as db, translate_errors(path):
        db.execute("BEGIN IMMEDIATE")
        try:
            info = read_view(db, name)
            db.execute(f"DROP VIEW {quote_identifier(info.name)}")
            db.execute(f"DROP TABLE {ViewTable(info).table}")
            db.execute("DELETE FROM _changes WHERE view = ?", (info.number,))
            db.execute("DELETE FROM _views WHERE number = ?", (info.number,))
            db.execute("COMMIT")
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")


def scrub(path: Path) -> None:
    """Erase all rows of a view store physically: no free page and no write-ahead log holds them
    afterwards. The views stay declared, and the pipeline's next run rebuilds them.

    The steps, each harmless when repeated: overwrite deleted rows, rewrite the file without free
    pages, truncate the write-ahead log.
    """
    if not path.exists():
        return
    with contextlib.closing(open_for_writing(path)) as db, translate_errors(path):
        db.execute("PRAGMA secure_delete = ON")
        db.execute("BEGIN IMMEDIATE")
        for info in read_views(db):
            db.execute(f"DELETE FROM {ViewTable(info).table}")  # noqa: S608 - an internal name
            db.execute(
                "UPDATE _views SET tick = 0, kept_after = 0, kept_rows = 0, kept_bytes = 0 WHERE"
                " number = ?",
                (info.number,),
            )
        db.execute("DELETE FROM _changes")
        db.execute("COMMIT")
        db.execute("VACUUM")
        deadline = time.monotonic() + _TRUNCATE_WAIT_S
        while db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            if time.monotonic() > deadline:
                raise RetryError(
                    f"Another process still reads an older snapshot of {path}, so its write-ahead"
                    " log cannot be truncated.",
                    fix="stop the process that reads it, and run this again.",
                )
            time.sleep(0.05)
