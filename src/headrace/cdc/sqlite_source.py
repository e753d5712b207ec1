"""The source `sqlite`: an SQLite database, captured by triggers.

For each captured table there is a *shadow table* with the old and the new values of each change,
filled by three triggers. One more table gives all changes their order. All names begin with
`_headrace_`, and everything is removed by `Capture.remove`:

    _headrace_order      seq, table, time: the order of all changes
    _headrace_shape      which columns a shadow table stands for
    _headrace_reader     how far each capture has read, so that no change is removed too early
    _headrace_<table>    seq, op, o0, o1, … (the row before), n0, n1, … (the row after)

Changes are read in one read transaction, so a part always has whole transactions of the user's. A
chunk of a snapshot is read in the same one, and so comes exactly behind the changes that it
contains. Values are stored as they are, not as text, so nothing is lost.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from headrace.cdc.base import (
    ChunkRequest,
    SchemaChange,
    SkippedTables,
    SnapshotChunk,
    StreamItem,
    StreamPart,
    TableChanges,
    TableShape,
    marks_column,
    usable_names,
)
from headrace.columnar.columns import (
    COMMITTED_AT,
    DELETE,
    HIDDEN_FIELDS,
    INSERT,
    MARKS,
    ORDER,
    POSITION,
    TRANSACTION,
    UPDATE_POSTIMAGE,
    UPDATE_PREIMAGE,
)
from headrace.errors import ConfigurationError, RetryError, nearest
from headrace.types.schema import quote_identifier

# Shadow tables and triggers

PREFIX = "_headrace_"
ORDER_TABLE = "_headrace_order"
SHAPE_TABLE = "_headrace_shape"
READER_TABLE = "_headrace_reader"
_NOW_US = "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)"


@dataclass(frozen=True)
class SqliteTable:
    """A table: its columns under SQLite's names, and its shape."""

    name: str
    columns: tuple[str, ...]
    shape: TableShape

    @property
    def key_columns(self) -> tuple[str, ...]:
        """The key, under SQLite's names."""
        return self.shape.key_in(self.columns)


def ddl_type(declared: str) -> str:
    """Return the type of a topic's column by SQLite's rules of affinity. Where these say NUMERIC,
    the name decides.
    """
    word = declared.upper()
    if "INT" in word or "BOOL" in word:
        return "BIGINT"
    if any(part in word for part in ("CHAR", "CLOB", "TEXT", "DATE", "TIME", "JSON", "UUID")):
        return "STRING"
    if "BLOB" in word:
        return "BINARY"
    if any(part in word for part in ("REAL", "FLOA", "DOUB", "NUM", "DEC")):
        return "DOUBLE"
    return "STRING"


def user_tables(connection: sqlite3.Connection) -> list[str]:
    """Return the names of all tables but SQLite's and our own."""
    rows = connection.execute(
        "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE"
        " '\\' ORDER BY name"
    )
    return [name for (name,) in rows if not name.startswith(PREFIX)]


def read_table(connection: sqlite3.Connection, table: str) -> SqliteTable:
    """Return a table as it is now.

    Raises:
        ConfigurationError: It has no primary key.
    """
    rows = connection.execute(
        f"SELECT name, type, pk, hidden FROM pragma_table_xinfo({quote_identifier(table)})"
    ).fetchall()
    columns = [(name, kind, pk) for name, kind, pk, hidden in rows if hidden != 1]
    names = usable_names([name for name, _, _ in columns])
    key = [
        name
        for _, name in sorted(
            (pk, name) for (_, _, pk), name in zip(columns, names, strict=True) if pk
        )
    ]
    if not key:
        raise ConfigurationError(
            f"The table {table!r} has no primary key, so its rows cannot be identified.",
            fix=(
                "create a new table with a PRIMARY KEY and copy the rows to it, or leave it out of"
                " tables=[…]."
            ),
        )
    shape = TableShape(
        table,
        tuple((name, ddl_type(kind)) for name, (_, kind, _) in zip(names, columns, strict=True)),
        tuple(key),
    )
    return SqliteTable(table, tuple(name for name, _, _ in columns), shape)


def captured_tables(connection: sqlite3.Connection) -> dict[str, SqliteTable]:
    """Return the tables that are captured, with the columns that their shadow tables have."""
    if not connection.execute(
        "SELECT 1 FROM sqlite_schema WHERE name = ?", (SHAPE_TABLE,)
    ).fetchone():
        return {}
    return {
        name: _captured_table(name, text)
        for name, text in connection.execute(f"SELECT name, columns FROM {SHAPE_TABLE}")
    }


def _captured_table(name: str, text: str) -> SqliteTable:
    own, columns, key = json.loads(text)
    return SqliteTable(
        name,
        tuple(own),
        TableShape(name, tuple((column, kind) for column, kind in columns), tuple(key)),
    )


def choose_tables(
    connection: sqlite3.Connection, wanted: Sequence[str], skipped: SkippedTables
) -> list[SqliteTable]:
    """Return the wanted tables, or all if none is named. Of the latter, those without a key are
    skipped.
    """
    existing = user_tables(connection)
    for name in wanted:
        if name not in existing:
            raise ConfigurationError(
                f"There is no table {name!r} in the database: {nearest(name, existing)}",
                fix="name tables that exist.",
            )
    tables = []
    for name in wanted or existing:
        try:
            tables.append(read_table(connection, name))
        except ConfigurationError as error:
            if wanted:
                raise
            skipped.warn(name, error)
    return tables


def install(connection: sqlite3.Connection, table: SqliteTable) -> str | None:
    """Create a table's shadow table and triggers, or adapt them to its columns. Called in a write
    transaction.

    Returns:
        For a table that was captured before, "reshaped" if its columns have changed, or "missed" if
        triggers were removed in between; None otherwise.
    """
    connection.execute(
        f"CREATE TABLE IF NOT EXISTS {ORDER_TABLE} (seq INTEGER PRIMARY KEY AUTOINCREMENT, name"
        " TEXT NOT NULL, at INTEGER NOT NULL)"
    )
    connection.execute(
        f"CREATE TABLE IF NOT EXISTS {SHAPE_TABLE} (name TEXT PRIMARY KEY, columns TEXT NOT NULL)"
    )
    stored = connection.execute(
        f"SELECT columns FROM {SHAPE_TABLE} WHERE name = ?", (table.name,)
    ).fetchone()
    current = json.dumps([table.columns, table.shape.columns, table.shape.key])
    has_triggers = len(_triggers(connection, table.name)) == 3
    if stored and stored[0] == current and has_triggers:
        return None
    for trigger in _triggers(connection, table.name):
        connection.execute(f"DROP TRIGGER {quote_identifier(trigger)}")
    connection.execute(f"DROP TABLE IF EXISTS {quote_identifier(PREFIX + table.name)}")
    connection.execute(f"DELETE FROM {SHAPE_TABLE} WHERE name = ?", (table.name,))
    _create(connection, table)
    connection.execute(f"INSERT INTO {SHAPE_TABLE} VALUES (?, ?)", (table.name, current))
    if stored is None:
        return None
    return "reshaped" if has_triggers else "missed"


def _create(connection: sqlite3.Connection, table: SqliteTable) -> None:
    indices = range(len(table.columns))
    shadow = quote_identifier(PREFIX + table.name)
    columns = ", ".join([*(f"o{index}" for index in indices), *(f"n{index}" for index in indices)])
    connection.execute(
        f"CREATE TABLE {shadow} (seq INTEGER PRIMARY KEY, op TEXT NOT NULL, {columns})"
    )
    nulls = ", ".join(["NULL"] * len(table.columns))
    old, new = (
        ", ".join(f"{row}.{quote_identifier(name)}" for name in table.columns)
        for row in ("OLD", "NEW")
    )
    for event, op, values in (
        ("INSERT", "i", f"{nulls}, {new}"),
        ("UPDATE", "u", f"{old}, {new}"),
        ("DELETE", "d", f"{old}, {nulls}"),
    ):
        literal = "'" + table.name.replace("'", "''") + "'"
        connection.execute(
            f"CREATE TRIGGER {quote_identifier(f'{PREFIX}{table.name}_{event.lower()}')} AFTER"
            f" {event} ON"
            f" {quote_identifier(table.name)} BEGIN INSERT INTO {ORDER_TABLE} (name, at) VALUES"
            f" ({literal},"
            f" {_NOW_US}); INSERT INTO {shadow} VALUES (last_insert_rowid(), '{op}', {values}); END"
        )


def register_reader(connection: sqlite3.Connection, reader: str, position: int) -> None:
    """Note that a capture has read up to a position: what follows is retained for it."""
    connection.execute(
        f"CREATE TABLE IF NOT EXISTS {READER_TABLE} (name TEXT PRIMARY KEY, confirmed INTEGER NOT"
        " NULL)"
    )
    connection.execute(f"INSERT OR REPLACE INTO {READER_TABLE} VALUES (?, ?)", (reader, position))


def is_registered(connection: sqlite3.Connection, reader: str) -> bool:
    if not connection.execute(
        "SELECT 1 FROM sqlite_schema WHERE name = ?", (READER_TABLE,)
    ).fetchone():
        return False
    return (
        connection.execute(f"SELECT 1 FROM {READER_TABLE} WHERE name = ?", (reader,)).fetchone()
        is not None
    )


def prune(connection: sqlite3.Connection, reader: str, confirmed: int) -> None:
    """Note how far a reader has confirmed, and remove the changes that all readers have."""
    connection.execute(
        f"UPDATE {READER_TABLE} SET confirmed = ? WHERE name = ?", (confirmed, reader)
    )
    (done,) = connection.execute(f"SELECT min(confirmed) FROM {READER_TABLE}").fetchone()
    for (name,) in connection.execute(f"SELECT name FROM {SHAPE_TABLE}").fetchall():
        connection.execute(f"DELETE FROM {quote_identifier(PREFIX + name)} WHERE seq <= ?", (done,))
    connection.execute(f"DELETE FROM {ORDER_TABLE} WHERE seq <= ?", (done,))


def unregister_reader(connection: sqlite3.Connection, reader: str) -> list[str]:
    """Remove a reader; with the last one, everything that capture created. Returns what was
    removed.
    """
    if not is_registered(connection, reader):
        return []
    connection.execute(f"DELETE FROM {READER_TABLE} WHERE name = ?", (reader,))
    (others,) = connection.execute(f"SELECT count(*) FROM {READER_TABLE}").fetchone()
    return [f"reader {reader}"] if others else remove_all(connection)


def _triggers(connection: sqlite3.Connection, table: str) -> list[str]:
    query = (
        "SELECT name FROM sqlite_schema WHERE type = 'trigger' AND tbl_name = ? AND name LIKE"
        " '\\_headrace\\_%' ESCAPE '\\'"
    )
    return [name for (name,) in connection.execute(query, (table,))]


def installed_objects(connection: sqlite3.Connection) -> list[str]:
    """Return everything that capture created in the database."""
    query = (
        "SELECT type || ' ' || name FROM sqlite_schema WHERE type IN ('table', 'trigger') AND name"
        " LIKE '\\_headrace\\_%' ESCAPE '\\' ORDER BY 1 DESC"
    )
    return [name for (name,) in connection.execute(query)]


def remove_all(connection: sqlite3.Connection) -> list[str]:
    """Drop everything that capture created, the triggers first. Returns what it was."""
    objects = installed_objects(connection)
    for description in objects:
        kind, name = description.split(" ", 1)
        connection.execute(f"DROP {kind} {quote_identifier(name)}")
    return objects


# Rows as Arrow batches. A column of SQLite may hold any kind of value, whatever its declared type:
# what does not fit is noted in `_marks`.

Values = Sequence[Any]
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "BIGINT": (int,),
    "DOUBLE": (float, int),
    "STRING": (str,),
    "BINARY": (bytes,),
}


def table_changes(
    table: SqliteTable, rows: list[tuple[Any, ...]], *, transaction: int
) -> TableChanges:
    """Return the changes of a shadow table's rows (seq, op, the row before, the row after, time).
    An update that changes the key is a delete and an insert.
    """
    width = len(table.columns)
    key = [table.columns.index(name) for name in table.key_columns]
    changes: list[tuple[str, Values, int, int]] = []
    for row in rows:
        seq, op, old, new, at = row[0], row[1], row[2 : 2 + width], row[2 + width : -1], row[-1]
        changes += [(change, values, seq, at) for change, values in _row_changes(op, old, new, key)]
    return TableChanges(table.name, _batch(table, changes, transaction))


def _row_changes(op: str, old: Values, new: Values, key: list[int]) -> list[tuple[str, Values]]:
    if op == "i":
        return [(INSERT, new)]
    if op == "d":
        return [(DELETE, old)]
    if any(old[index] != new[index] for index in key):
        return [(DELETE, old), (INSERT, new)]
    return [(UPDATE_PREIMAGE, old), (UPDATE_POSTIMAGE, new)]


def chunk_rows(table: SqliteTable, rows: list[tuple[Any, ...]], position: int) -> pa.RecordBatch:
    columns, marks = _to_columns(table, rows)
    count = len(rows)
    hidden = {POSITION: pa.array([position] * count, pa.int64()), MARKS: marks}
    arrays = [
        *columns,
        *(hidden.get(field.name, pa.nulls(count, field.type)) for field in HIDDEN_FIELDS),
        pa.array([INSERT] * count, pa.string()),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=table.shape.batch_schema)


def _batch(
    table: SqliteTable, changes: list[tuple[str, Values, int, int]], transaction: int
) -> pa.RecordBatch:
    columns, marks = _to_columns(table, [values for _, values, _, _ in changes])
    hidden = {
        POSITION: pa.array([seq for _, _, seq, _ in changes], pa.int64()),
        COMMITTED_AT: (
            pa.array([at for _, _, _, at in changes], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
        ),
        TRANSACTION: pa.array([transaction] * len(changes), pa.int64()),
        ORDER: pa.array([seq - changes[0][2] for _, _, seq, _ in changes], pa.int64()).cast(
            pa.int32()
        ),
        MARKS: marks,
    }
    arrays = [
        *columns,
        *(hidden[field.name] for field in HIDDEN_FIELDS),
        pa.array([change for change, _, _, _ in changes], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=table.shape.batch_schema)


def _to_columns(table: SqliteTable, rows: Sequence[Values]) -> tuple[list[pa.Array], pa.Array]:
    marks: dict[int, dict[str, Any]] = {}
    arrays = []
    for index, ((name, kind), field) in enumerate(
        zip(table.shape.columns, table.shape.schema, strict=True)
    ):
        values = [row[index] for row in rows]
        fits = _PYTHON_TYPES[kind]
        if not all(value is None or isinstance(value, fits) for value in values):
            values = [
                _fit_value(value, kind, number, name, marks) for number, value in enumerate(values)
            ]
        arrays.append(pa.array(values, field.type))
    return arrays, marks_column(marks, len(rows))


def _fit_value(value: Any, kind: str, row: int, name: str, marks: dict[int, dict[str, Any]]) -> Any:
    """Return a value that fits its column. A number in a text column becomes its text, as SQLite
    itself compares it; anything else becomes null and is marked.
    """
    if value is None or isinstance(value, _PYTHON_TYPES[kind]):
        return value
    if kind == "STRING" and not isinstance(value, bytes):
        return str(value)
    marks.setdefault(row, {})[name] = (
        {"hex": value.hex()} if isinstance(value, bytes) else {"text": str(value)}
    )
    return None


BUSY_S = 10.0
POLL_INTERVAL_S = 0.02
MAX_PART_CHANGES = 50_000
PRUNE_INTERVAL_S = 10.0


class SqliteSource:
    """Streams the changes of an SQLite database. A position is the `seq` of the last change."""

    def __init__(
        self, path: str, name: str, tables: Sequence[str], connection: sqlite3.Connection
    ) -> None:
        self.path = path
        self.name = name
        self.wanted = tuple(tables)
        self._connection = connection
        self._tables: dict[str, SqliteTable] = {}
        self._skipped = SkippedTables()
        self._request: ChunkRequest | None = None
        self._read_to = self._confirmed = 0
        self._reading_to: int | None = None
        self._schema_version = self._data_version = -1
        self._pruned_s = 0.0

    @classmethod
    def open(cls, path: str, name: str, tables: Sequence[str]) -> Self:
        """Connect to the database, which must exist."""
        if not Path(path).is_file():
            raise ConfigurationError(
                f"There is no SQLite database at {path!r}.",
                fix="give the path of an existing database.",
            )
        with _driver_errors(path):
            connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        return cls(path, name, tables, connection)

    # Beginning

    def start(self, position: str | None, *, start_over: bool = False) -> str:
        """Begin to stream. Changes that were stored under earlier columns are read as such, before
        the triggers are adapted to the current ones.
        """
        with _driver_errors(self.path):
            if position is not None and not start_over:
                self._check_nothing_missed(int(position))
                self._tables = captured_tables(self._connection)
            else:
                self._install()
                position = str(self._newest_change())
                with self._transaction("IMMEDIATE"):
                    register_reader(self._connection, self.name, int(position))
        self._read_to = self._confirmed = int(position)
        return position

    def _newest_change(self) -> int:
        (newest,) = self._connection.execute(
            f"SELECT coalesce(max(seq), 0) FROM {ORDER_TABLE}"
        ).fetchone()
        return int(newest)

    def _check_nothing_missed(self, position: int) -> None:
        """Raise ConfigurationError unless all changes after a position are there."""
        row = (
            self._connection.execute(
                "SELECT seq FROM sqlite_sequence WHERE name = ?", (ORDER_TABLE,)
            ).fetchone()
            if is_registered(self._connection, self.name)
            else None
        )
        if row is None and position == 0 and is_registered(self._connection, self.name):
            return
        if row is None or position > row[0]:
            raise ConfigurationError(
                f"The capture {self.name!r} has read {self.path} up to change {position}, which the"
                " database does not know: it was replaced by an older copy, or the triggers were"
                " removed in between. Changes made meanwhile may be missing.",
                fix=(
                    "run it once with --start-over, which reads all tables again and goes on from"
                    " there."
                ),
            )

    def _install(self) -> list[StreamItem]:
        """Adapt the triggers to the tables, in one write transaction. Returns the changes that were
        still to be read under the old columns, and the tables that have new ones.

        If the process dies before that is in the log, the capture's state in the log has the old
        columns, and the table is read again.
        """
        with self._transaction("IMMEDIATE"):
            tables = choose_tables(self._connection, self.wanted, self._skipped)
            items: list[StreamItem] = []
            if self._tables:
                items += self._reinstalled_tables()
                newest = self._newest_change()
                items += self._changes(self._read_to, newest)
                self._read_to = max(newest, self._read_to)
            outcomes = {table.name: install(self._connection, table) for table in tables}
        (self._schema_version,) = self._connection.execute("PRAGMA schema_version").fetchone()
        self._tables = {table.name: table for table in tables}
        return [
            *items,
            *(
                SchemaChange(table.shape, missed=outcomes[table.name] == "missed")
                for table in tables
                if outcomes[table.name]
            ),
        ]

    def _reinstalled_tables(self) -> list[StreamItem]:
        """Return tables whose triggers another capture of this database has adapted. Changes that
        were stored for this capture under the old columns are gone, so the table is read again.
        """
        current = captured_tables(self._connection)
        replaced = [
            name
            for name, table in self._tables.items()
            if name in current and current[name] != table
        ]
        self._tables |= {name: current[name] for name in replaced}
        return [SchemaChange(current[name].shape, missed=True) for name in replaced]

    def tables(self) -> list[TableShape]:
        return [table.shape for table in self._tables.values()]

    def count(self, table: str) -> int:
        with _driver_errors(self.path):
            (rows,) = self._connection.execute(
                f"SELECT count(*) FROM {quote_identifier(table)}"
            ).fetchone()
        return int(rows)

    # The stream

    def request(self, chunk: ChunkRequest) -> None:
        self._request = chunk

    def poll(self, timeout_s: float) -> StreamPart:
        """Check every few milliseconds whether another connection has committed."""
        deadline_s = time.monotonic() + timeout_s
        with _driver_errors(self.path):
            while self._request is None and self._reading_to is None and not self._has_changes():
                if time.monotonic() >= deadline_s:
                    return StreamPart()
                time.sleep(min(POLL_INTERVAL_S, timeout_s))
            return self._next_part()

    def _has_changes(self) -> bool:
        (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        return bool(version != self._data_version)

    def _next_part(self) -> StreamPart:
        items: list[StreamItem] = []
        if self._reading_to is None:
            (self._data_version,) = self._connection.execute("PRAGMA data_version").fetchone()
            items += self._follow_columns()
            self._connection.execute("BEGIN")
            self._reading_to = max(self._newest_change(), self._read_to)
        stop = min(self._read_to + MAX_PART_CHANGES, self._reading_to)
        items += self._changes(self._read_to, stop)
        self._read_to = stop
        if stop < self._reading_to:  # the read transaction stays open, and with it the snapshot
            return StreamPart(items, None, is_idle=False)
        items += self._take_chunk()
        self._connection.execute("COMMIT")
        self._reading_to = None
        return StreamPart(items, str(self._read_to), transactions=1 if items else 0)

    def _changes(self, after: int, stop: int) -> Iterator[StreamItem]:
        for table in self._tables.values():
            query = (
                f"SELECT s.*, o.at FROM {quote_identifier(PREFIX + table.name)} s JOIN"
                f" {ORDER_TABLE} o ON o.seq"
                " = s.seq WHERE s.seq > ? AND s.seq <= ? ORDER BY s.seq"
            )
            if rows := self._connection.execute(query, (after, stop)).fetchall():
                yield table_changes(table, rows, transaction=self._reading_to or stop)

    def _take_chunk(self) -> list[SnapshotChunk]:
        request, self._request = self._request, None
        if request is None or request.table not in self._tables:
            return []
        table = self._tables[request.table]
        key = ", ".join(map(quote_identifier, table.key_columns))
        condition = (
            f"WHERE ({key}) > ({', '.join('?' * len(table.key_columns))})" if request.after else ""
        )
        columns = ", ".join(map(quote_identifier, table.columns))
        query = (
            f"SELECT {columns} FROM {quote_identifier(table.name)} {condition} ORDER BY {key} LIMIT"
            f" {request.rows}"
        )
        rows = self._connection.execute(
            query, [_from_json(value) for value in request.after or ()]
        ).fetchall()
        indices = [table.columns.index(name) for name in table.key_columns]
        after = [_to_json(rows[-1][index]) for index in indices] if rows else None
        return [
            SnapshotChunk(
                table.name,
                chunk_rows(table, rows, self._read_to),
                after,
                is_last=len(rows) < request.rows,
            )
        ]

    def _follow_columns(self) -> list[StreamItem]:
        """Adapt the triggers if the schema has changed."""
        (version,) = self._connection.execute("PRAGMA schema_version").fetchone()
        return [] if version == self._schema_version else self._install()

    def is_caught_up(self) -> bool:
        with _driver_errors(self.path):
            return not self._has_changes()

    def confirm(self, position: str) -> None:
        """Remove changes that are durable in the log, from time to time; later, if the database is
        busy.
        """
        self._confirmed = int(position)
        if time.monotonic() - self._pruned_s < PRUNE_INTERVAL_S or self._reading_to is not None:
            return
        self._pruned_s = time.monotonic()
        try:
            with self._transaction("IMMEDIATE"):
                prune(self._connection, self.name, self._confirmed)
        except sqlite3.OperationalError:
            return

    def status(self) -> dict[str, Any]:
        with _driver_errors(self.path):
            (changes,) = self._connection.execute(
                f"SELECT count(*) FROM {ORDER_TABLE} WHERE seq > ?", (self._confirmed,)
            ).fetchone()
        return {"changes_waiting": changes}

    def installed_objects(self) -> list[str]:
        """Return what capture created in the database."""
        with _driver_errors(self.path):
            return installed_objects(self._connection)

    def remove(self) -> list[str]:
        with _driver_errors(self.path), self._transaction("IMMEDIATE"):
            return unregister_reader(self._connection, self.name)

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _transaction(self, kind: str) -> Iterator[None]:
        self._connection.execute(f"BEGIN {kind}")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")


def _to_json(value: Any) -> Any:
    return {"hex": value.hex()} if isinstance(value, bytes) else value


def _from_json(value: Any) -> Any:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value


@contextmanager
def _driver_errors(path: str) -> Iterator[None]:
    """Translate SQLite's errors: a busy or full database passes by itself, a file that is not a
    database does not.
    """
    try:
        yield
    except sqlite3.OperationalError as error:
        if "readonly" in str(error) or "unable to open" in str(error):
            raise ConfigurationError(
                f"The database {path!r} cannot be written: {error}.",
                fix="allow this user to write to it: capture needs triggers in it.",
            ) from error
        raise RetryError(
            f"The database {path!r} cannot be read now: {error}.", fix="it is tried again."
        ) from error
    except sqlite3.DatabaseError as error:
        raise ConfigurationError(
            f"{path!r} is not an intact SQLite database: {error}.",
            fix="check the path, and the file with PRAGMA integrity_check.",
        ) from error
