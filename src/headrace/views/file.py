"""The SQLite database that holds a pipeline's views: its tables, how it is opened, and what its
errors mean. `store.py` writes it, `reader.py` and `lookup.py` read it.

    _ledger    one row: the epoch of the newest run that has written
    _views     one row per view: its schema and key, the tick it shows, and the tick after which
               its changes are retained
    _rows_N    the rows of view number N, in the columns c0, c1, …
    _changes   recent changes, as Arrow record batches of whole ticks
    _rebuilds  one row per view that is built again: its new rows grow in the hidden view `NAME~`,
               and replace the old ones when they have reached a tick

Look-ups of keys and ranges of keys are answered here; SQL is answered by `replica.py`, which has
all types of views. SQLite has fewer, so key columns are stored in a form whose order in SQLite is
the order of their values (`sqlite_codec.to_key_values`).

Format 2 brought that form and `generation`. A file of format 1 is converted when it is opened.
"""

from __future__ import annotations

import contextlib
import json
import secrets
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
from headrace.types.sqlite_codec import (
    affinity,
    from_key_values,
    from_values,
    key_affinity,
    null_key,
    to_key_values,
)
from headrace.types.values import Misfit, column_converter

VIEWS_FILE = "views.db"
FORMAT = 2
APPLICATION_ID = 0x48525657
BUSY_SECONDS = 30.0
_PAGE_BYTES = 8192  # measured: a tenth less time for upserts of random keys than with 4096
_CACHE_KIB = 64 << 10
_WAL_KEPT_BYTES = 64 << 20
_TRUNCATE_WAIT_S = 10.0
_CONVERTED_ROWS = 1 << 16

# SQLite stores the text of each statement.
_TABLES = (
    "\nCREATE TABLE _ledger (epoch INTEGER NOT NULL);\n"
    "CREATE TABLE _views (\n"
    "    number INTEGER PRIMARY KEY, name TEXT NOT NULL COLLATE NOCASE UNIQUE,"
    " schema BLOB NOT NULL, key TEXT NOT NULL, most_rows INTEGER,\n"
    "    tick INTEGER NOT NULL, null_keys INTEGER NOT NULL, kept_after INTEGER NOT NULL,"
    " kept_rows INTEGER NOT NULL, kept_bytes INTEGER NOT NULL, generation INTEGER NOT NULL);\n"
    "CREATE TABLE _changes (id INTEGER PRIMARY KEY, view INTEGER NOT NULL,"
    " last_tick INTEGER NOT NULL, rows INTEGER NOT NULL, data BLOB NOT NULL);\n"
    "CREATE INDEX _changes_by_view ON _changes (view, id);\n"
)
_REBUILDS = (
    "CREATE TABLE IF NOT EXISTS _rebuilds ("
    "view TEXT PRIMARY KEY COLLATE NOCASE, at_tick INTEGER NOT NULL)"
)
_HIDDEN = "~"  # no name that a user chooses has it
_VIEW_COLUMNS = (
    "number, name, schema, key, most_rows, tick, null_keys, kept_after, kept_rows, kept_bytes,"
    " generation"
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
    generation: int
    """A random number that a view gets when it is created or emptied: ticks of another generation
    say nothing about its rows.
    """

    @property
    def is_stream(self) -> bool:
        return not self.key


def read_views(db: sqlite3.Connection) -> list[ViewInfo]:
    """All views, by name; without the hidden ones in which others are built again."""
    rows = db.execute(f"SELECT {_VIEW_COLUMNS} FROM _views ORDER BY name")  # noqa: S608
    return [_view_info(row) for row in rows if not is_hidden(row[1])]


def read_view(db: sqlite3.Connection, name: str) -> ViewInfo:
    """The view of a name. UnknownView, which names the nearest, if there is none."""
    row = db.execute(
        f"SELECT {_VIEW_COLUMNS} FROM _views WHERE name = ? COLLATE BINARY",  # noqa: S608
        (name,),
    ).fetchone()
    if row is None:
        raise UnknownView(name, [info.name for info in read_views(db)])
    return _view_info(row)


def new_generation() -> int:
    return secrets.randbits(62)


def _view_info(row: tuple[Any, ...]) -> ViewInfo:
    (
        number,
        name,
        schema,
        key,
        max_rows,
        tick,
        null_keys,
        kept_after,
        kept_rows,
        kept_bytes,
        generation,
    ) = row
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
        generation=generation,
    )


def hidden_name(view: str) -> str:
    """The name of the hidden view in which a view is built again."""
    return f"{view}{_HIDDEN}"


def is_hidden(name: str) -> bool:
    """Whether this is the hidden view in which another one is built again."""
    return name.endswith(_HIDDEN)


def visible_name(name: str) -> str:
    """The name of a view, given its own or that of the hidden view in which it is built again."""
    return name.removesuffix(_HIDDEN)


def rebuild_tick(db: sqlite3.Connection, view: str) -> int | None:
    """The tick at which the new rows of a view replace the old ones; None if it is not built
    again.
    """
    if not db.execute("SELECT 1 FROM sqlite_schema WHERE name = '_rebuilds'").fetchone():
        return None  # a store that no run of this version has opened
    row = db.execute("SELECT at_tick FROM _rebuilds WHERE view = ?", (view,)).fetchone()
    return None if row is None else int(row[0])


def delete_rebuild(db: sqlite3.Connection, view: str) -> None:
    """Give up the new rows of a view, if it is being built again."""
    if rebuild_tick(db, view) is None:
        return
    hidden = read_view(db, hidden_name(view))
    delete_rows(db, hidden)
    db.execute("DELETE FROM _rebuilds WHERE view = ?", (view,))


def delete_rows(db: sqlite3.Connection, info: ViewInfo) -> None:
    """Remove the table of a view, its retained changes and its description."""
    db.execute(f"DROP TABLE {ViewTable(info).table}")
    db.execute("DELETE FROM _changes WHERE view = ?", (info.number,))
    db.execute("DELETE FROM _views WHERE number = ?", (info.number,))


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
            elif _read_pragma(db, "user_version") == 1:
                _convert_from_1(db)
            db.execute(_REBUILDS)
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
    _convert_older(path)
    with translate_errors(path):
        db = _connect_read_only(path)
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


def _connect_read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )


def _convert_older(path: Path) -> None:
    """Convert a file of an older format, which nobody has written since."""
    with translate_errors(path), contextlib.closing(_connect_read_only(path)) as db:
        _check_format(db, path)
        version = _read_pragma(db, "user_version")
    if not 0 < version < FORMAT:
        return
    try:
        open_for_writing(path).close()
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{path} has format {version}, and cannot be converted to format {FORMAT}:"
            f" {error.message}",
            fix="run the pipeline once, or open the views as a user who may write there.",
        ) from error


def _convert_from_1(db: sqlite3.Connection) -> None:
    """Convert a file of format 1, in the caller's transaction: give views a generation, drop the
    SQL views, and store key columns in a form that sorts as their values do.
    """
    db.execute("ALTER TABLE _views ADD COLUMN generation INTEGER NOT NULL DEFAULT 0")
    for info in read_views(db):
        db.execute(
            "UPDATE _views SET generation = ? WHERE number = ?", (new_generation(), info.number)
        )
        db.execute(f"DROP VIEW IF EXISTS {quote_identifier(info.name)}")
        table = ViewTable(info)
        changed = {
            position: info.schema.field(name)
            for position, name in enumerate(info.schema.names)
            if name in info.key
            and key_affinity(info.schema.field(name).type) != affinity(info.schema.field(name).type)
        }
        if not changed:
            continue
        db.execute(f"ALTER TABLE {table.table} RENAME TO _converted")
        db.execute(table.create())
        cursor = db.execute(f"SELECT {', '.join(table.columns)} FROM _converted")  # noqa: S608
        marks = ", ".join("?" * len(table.columns))
        while rows := cursor.fetchmany(_CONVERTED_ROWS):
            cells = [list(values) for values in zip(*rows, strict=True)]
            for position, field_ in changed.items():
                values = [None if value == b"" else value for value in cells[position]]
                cells[position] = table.key_values(from_values(values, field_.type))
            db.executemany(
                f"INSERT INTO {table.table} VALUES ({marks})",  # noqa: S608
                zip(*cells, strict=True),
            )
        cursor.close()
        db.execute("DROP TABLE _converted")
    db.execute(f"PRAGMA user_version = {FORMAT}")


def _check_format(db: sqlite3.Connection, path: Path) -> None:
    version = _read_pragma(db, "user_version")
    application = _read_pragma(db, "application_id")
    is_empty = version == 0 and db.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (0,)
    if is_empty:
        return
    if application != APPLICATION_ID:
        raise ConfigurationError(
            f"{path} is an SQLite database, but not a view store.",
            fix="name another state directory with --state DIR or state=….",
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
    value of a kind that the column never has (`sqlite_codec.null_key`).
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
            f"{name} {(key_affinity if field.name in self.info.key else affinity)(field.type)}"
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
            (stored,) = to_key_values(column_converter(field).array([value]))
        except (Misfit, pa.ArrowException, OverflowError, ValueError, TypeError) as error:
            raise InputError(
                f"{value!r} cannot be the key column {field.name!r} of the view {self.info.name!r}:"
                f" {error}."
            ) from None
        return stored

    # Rows

    def key_values(self, array: pa.Array) -> list[Any]:
        """The values of a key column as they are stored, with `null_key` in place of nulls."""
        values = to_key_values(array)
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
        if field.name not in self.info.key:
            return from_values(values, field.type)
        if self.info.null_keys:
            stands_for_null = null_key(field.type)
            values = [
                None if value == stands_for_null and type(value) is type(stands_for_null) else value
                for value in values
            ]
        return from_key_values(values, field.type)


# Dropping and scrubbing


def drop_view(path: Path, name: str) -> None:
    """Remove a view with its rows and retained changes, in one transaction. UnknownView if there is
    none. `headrace view drop` calls this for views that no pipeline declares any more.
    """
    with contextlib.closing(open_for_writing(path)) as db, translate_errors(path):
        db.execute("BEGIN IMMEDIATE")
        try:
            info = read_view(db, name)
            delete_rebuild(db, info.name)
            delete_rows(db, info)
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
            delete_rebuild(db, info.name)
            db.execute(f"DELETE FROM {ViewTable(info).table}")  # noqa: S608 - an internal name
            db.execute(
                "UPDATE _views SET tick = 0, kept_after = 0, kept_rows = 0, kept_bytes = 0,"
                " generation = ? WHERE number = ?",
                (new_generation(), info.number),
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
