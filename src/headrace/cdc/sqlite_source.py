"""The source for SQLite. What is committed is read in one read transaction, so it is always a whole
number of the user's transactions; a chunk of a snapshot is read in the same one, and so stands
exactly behind the changes that it already contains.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from headrace.cdc.base import (
    Changes,
    Chunk,
    ChunkRequest,
    Item,
    Part,
    Reshaped,
    Skipped,
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
    UPDATE,
    UPDATE_BEFORE,
)
from headrace.errors import ConfigurationError, RetryError, nearest
from headrace.types.schema import quoted

# What capture puts into a user's SQLite database, and takes out again.
#
# For each captured table a *shadow* with the old and the new values of each change, and three
# triggers that fill it. One table gives all changes their order. Everything is named `_headrace_…`:
#
# _headrace_order        seq, table, time: the order of all changes _headrace_shape        which
# columns a shadow stands for _headrace_reader       how far each capture has read, so that no
# change is removed that another still needs _headrace_<table>      seq, op, o0, o1, … (the row
# before), n0, n1, … (the row after)
#
# Values are kept as they are, not as text, so nothing is lost.


ORDER_TABLE, SHAPE_TABLE, READER_TABLE, OURS = (
    "_headrace_order",
    "_headrace_shape",
    "_headrace_reader",
    "_headrace_",
)
_AT = "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)"


@dataclass(frozen=True)
class SqliteTable:
    """A table of the user's: its columns as SQLite has them, and as a shape."""

    name: str
    columns: tuple[str, ...]
    shape: TableShape

    @property
    def key_columns(self) -> tuple[str, ...]:
        """The key, in the user's own names."""
        return self.shape.key_in(self.columns)


def ddl_type(declared: str) -> str:
    """SQLite's rules of affinity, and where they say NUMERIC, what people mean by the name."""
    word = declared.upper()
    if "INT" in word or "BOOL" in word:
        return "BIGINT"
    if any(each in word for each in ("CHAR", "CLOB", "TEXT", "DATE", "TIME", "JSON", "UUID")):
        return "STRING"
    if "BLOB" in word:
        return "BINARY"
    if any(each in word for each in ("REAL", "FLOA", "DOUB", "NUM", "DEC")):
        return "DOUBLE"
    return "STRING"


def user_tables(connection: sqlite3.Connection) -> list[str]:
    rows = connection.execute(
        "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE"
        " '\\' ORDER BY name"
    )
    return [name for (name,) in rows if not name.startswith(OURS)]


def look_at(connection: sqlite3.Connection, table: str) -> SqliteTable:
    rows = connection.execute(
        f"SELECT name, type, pk, hidden FROM pragma_table_xinfo({quoted(table)})"
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
            f"The table {table!r} has no primary key, so its rows cannot be told apart.",
            fix=(
                "give it one (make a new table with PRIMARY KEY and copy the rows), or leave it out"
                " of tables=[…]."
            ),
        )
    shape = TableShape(
        table,
        tuple((name, ddl_type(kind)) for name, (_, kind, _) in zip(names, columns, strict=True)),
        tuple(key),
    )
    return SqliteTable(table, tuple(name for name, _, _ in columns), shape)


def known_tables(connection: sqlite3.Connection) -> dict[str, SqliteTable]:
    """The tables that are captured, with the columns that their shadows have."""
    if not connection.execute(
        "SELECT 1 FROM sqlite_schema WHERE name = ?", (SHAPE_TABLE,)
    ).fetchone():
        return {}
    return {
        name: _known(name, text)
        for name, text in connection.execute(f"SELECT name, columns FROM {SHAPE_TABLE}")
    }


def _known(name: str, text: str) -> SqliteTable:
    own, columns, key = json.loads(text)
    return SqliteTable(
        name,
        tuple(own),
        TableShape(name, tuple((column, kind) for column, kind in columns), tuple(key)),
    )


def chosen_tables(
    connection: sqlite3.Connection, wanted: Sequence[str], skipped: Skipped
) -> list[SqliteTable]:
    there = user_tables(connection)
    for name in wanted:
        if name not in there:
            raise ConfigurationError(
                f"There is no table {name!r} in the database: {nearest(name, there)}",
                fix="name tables that are there.",
            )
    found = []
    for name in wanted or there:
        try:
            found.append(look_at(connection, name))
        except ConfigurationError as error:
            if wanted:
                raise
            skipped(name, error)
    return found


def install(connection: sqlite3.Connection, table: SqliteTable) -> str | None:
    """Bring a table's shadow and triggers to its columns, in a write transaction. Returns what
    happened to a table that was captured before: `reshaped`, or `missed`.
    """
    connection.execute(
        f"CREATE TABLE IF NOT EXISTS {ORDER_TABLE} (seq INTEGER PRIMARY KEY AUTOINCREMENT, name"
        " TEXT NOT NULL, at INTEGER NOT NULL)"
    )
    connection.execute(
        f"CREATE TABLE IF NOT EXISTS {SHAPE_TABLE} (name TEXT PRIMARY KEY, columns TEXT NOT NULL)"
    )
    known = connection.execute(
        f"SELECT columns FROM {SHAPE_TABLE} WHERE name = ?", (table.name,)
    ).fetchone()
    now = json.dumps([table.columns, table.shape.columns, table.shape.key])
    is_whole = len(_triggers(connection, table.name)) == 3
    if known and known[0] == now and is_whole:
        return None
    _uninstall(connection, table.name)
    _create(connection, table)
    connection.execute(f"INSERT INTO {SHAPE_TABLE} VALUES (?, ?)", (table.name, now))
    if known is None:
        return None
    return "reshaped" if is_whole else "missed"


def _create(connection: sqlite3.Connection, table: SqliteTable) -> None:
    places = range(len(table.columns))
    shadow = quoted(OURS + table.name)
    columns = ", ".join([*(f"o{place}" for place in places), *(f"n{place}" for place in places)])
    connection.execute(
        f"CREATE TABLE {shadow} (seq INTEGER PRIMARY KEY, op TEXT NOT NULL, {columns})"
    )
    nothing = ", ".join(["NULL"] * len(table.columns))
    old, new = (
        ", ".join(f"{row}.{quoted(name)}" for name in table.columns) for row in ("OLD", "NEW")
    )
    for event, op, values in (
        ("INSERT", "i", f"{nothing}, {new}"),
        ("UPDATE", "u", f"{old}, {new}"),
        ("DELETE", "d", f"{old}, {nothing}"),
    ):
        literal = "'" + table.name.replace("'", "''") + "'"
        connection.execute(
            f"CREATE TRIGGER {quoted(f'{OURS}{table.name}_{event.lower()}')} AFTER {event} ON"
            f" {quoted(table.name)} BEGIN INSERT INTO {ORDER_TABLE} (name, at) VALUES ({literal},"
            f" {_AT}); INSERT INTO {shadow} VALUES (last_insert_rowid(), '{op}', {values}); END"
        )


def enrol(connection: sqlite3.Connection, reader: str, position: int) -> None:
    connection.execute(
        f"CREATE TABLE IF NOT EXISTS {READER_TABLE} (name TEXT PRIMARY KEY, confirmed INTEGER NOT"
        " NULL)"
    )
    connection.execute(f"INSERT OR REPLACE INTO {READER_TABLE} VALUES (?, ?)", (reader, position))


def is_enrolled(connection: sqlite3.Connection, reader: str) -> bool:
    if not connection.execute(
        "SELECT 1 FROM sqlite_schema WHERE name = ?", (READER_TABLE,)
    ).fetchone():
        return False
    return (
        connection.execute(f"SELECT 1 FROM {READER_TABLE} WHERE name = ?", (reader,)).fetchone()
        is not None
    )


def prune(connection: sqlite3.Connection, reader: str, confirmed: int) -> None:
    """Remove what every reader has."""
    connection.execute(
        f"UPDATE {READER_TABLE} SET confirmed = ? WHERE name = ?", (confirmed, reader)
    )
    (done,) = connection.execute(f"SELECT min(confirmed) FROM {READER_TABLE}").fetchone()
    for (name,) in connection.execute(f"SELECT name FROM {SHAPE_TABLE}").fetchall():
        connection.execute(f"DELETE FROM {quoted(OURS + name)} WHERE seq <= ?", (done,))
    connection.execute(f"DELETE FROM {ORDER_TABLE} WHERE seq <= ?", (done,))


def dismiss(connection: sqlite3.Connection, reader: str) -> list[str]:
    """A capture that reads no more: when it was the last one, everything goes."""
    if not is_enrolled(connection, reader):
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


def _uninstall(connection: sqlite3.Connection, table: str) -> None:
    for trigger in _triggers(connection, table):
        connection.execute(f"DROP TRIGGER {quoted(trigger)}")
    connection.execute(f"DROP TABLE IF EXISTS {quoted(OURS + table)}")
    connection.execute(f"DELETE FROM {SHAPE_TABLE} WHERE name = ?", (table,))


def installed(connection: sqlite3.Connection) -> list[str]:
    """Everything of ours in the database."""
    query = (
        "SELECT type || ' ' || name FROM sqlite_schema WHERE type IN ('table', 'trigger') AND name"
        " LIKE '\\_headrace\\_%' ESCAPE '\\' ORDER BY 1 DESC"
    )
    return [name for (name,) in connection.execute(query)]


def remove_all(connection: sqlite3.Connection) -> list[str]:
    """Drop everything of ours; the triggers first."""
    found = installed(connection)
    for each in found:
        kind, name = each.split(" ", 1)
        connection.execute(f"DROP {kind} {quoted(name)}")
    return found


# SQLite's rows as Arrow batches. A column may hold any kind of value there, whatever it was
# declared as: what does not fit stands in `_marks`.


Values = Sequence[Any]
_FITS: dict[str, tuple[type, ...]] = {
    "BIGINT": (int,),
    "DOUBLE": (float, int),
    "STRING": (str,),
    "BINARY": (bytes,),
}


def changes_of(table: SqliteTable, rows: list[tuple[Any, ...]], *, transaction: int) -> Changes:
    """From a shadow's rows (seq, op, the row before, the row after, time). A changed key is a
    delete and an insert.
    """
    width = len(table.columns)
    key = [table.columns.index(name) for name in table.key_columns]
    kept: list[tuple[str, Values, int, int]] = []
    for row in rows:
        seq, op, old, new, at = row[0], row[1], row[2 : 2 + width], row[2 + width : -1], row[-1]
        kept += [(change, values, seq, at) for change, values in _told(op, old, new, key)]
    return Changes(table.name, _batch(table, kept, transaction))


def _told(op: str, old: Values, new: Values, key: list[int]) -> list[tuple[str, Values]]:
    if op == "i":
        return [(INSERT, new)]
    if op == "d":
        return [(DELETE, old)]
    if any(old[place] != new[place] for place in key):
        return [(DELETE, old), (INSERT, new)]
    return [(UPDATE_BEFORE, old), (UPDATE, new)]


def chunk_rows(table: SqliteTable, rows: list[tuple[Any, ...]], position: int) -> pa.RecordBatch:
    columns, marks = _columns(table, rows)
    count = len(rows)
    hidden = {POSITION: pa.array([position] * count, pa.int64()), MARKS: marks}
    arrays = [
        *columns,
        *(hidden.get(each.name, pa.nulls(count, each.type)) for each in HIDDEN_FIELDS),
        pa.array([INSERT] * count, pa.string()),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=table.shape.batch_schema)


def _batch(
    table: SqliteTable, kept: list[tuple[str, Values, int, int]], transaction: int
) -> pa.RecordBatch:
    columns, marks = _columns(table, [values for _, values, _, _ in kept])
    hidden = {
        POSITION: pa.array([seq for _, _, seq, _ in kept], pa.int64()),
        COMMITTED_AT: (
            pa.array([at for _, _, _, at in kept], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
        ),
        TRANSACTION: pa.array([transaction] * len(kept), pa.int64()),
        ORDER: pa.array([seq - kept[0][2] for _, _, seq, _ in kept], pa.int64()).cast(pa.int32()),
        MARKS: marks,
    }
    arrays = [
        *columns,
        *(hidden[each.name] for each in HIDDEN_FIELDS),
        pa.array([change for change, _, _, _ in kept], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=table.shape.batch_schema)


def _columns(table: SqliteTable, rows: Sequence[Values]) -> tuple[list[pa.Array], pa.Array]:
    marks: dict[int, dict[str, Any]] = {}
    arrays = []
    for place, ((name, kind), field) in enumerate(
        zip(table.shape.columns, table.shape.schema, strict=True)
    ):
        values = [row[place] for row in rows]
        fits = _FITS[kind]
        if not all(value is None or isinstance(value, fits) for value in values):
            values = [
                _fitting(value, kind, number, name, marks) for number, value in enumerate(values)
            ]
        arrays.append(pa.array(values, field.type))
    return arrays, marks_column(marks, len(rows))


def _fitting(value: Any, kind: str, row: int, name: str, marks: dict[int, dict[str, Any]]) -> Any:
    """A number in a text column is its text, as SQLite itself would compare it; anything else is
    marked.
    """
    if value is None or isinstance(value, _FITS[kind]):
        return value
    if kind == "STRING" and not isinstance(value, bytes):
        return str(value)
    marks.setdefault(row, {})[name] = (
        {"hex": value.hex()} if isinstance(value, bytes) else {"text": str(value)}
    )
    return None


BUSY_S = 10.0
LOOK_EVERY_S = 0.02
MAX_CHANGES_A_PART = 50_000
PRUNE_EVERY_S = 10.0


class SqliteSource:
    def __init__(self, path: str, name: str, tables: Sequence[str]) -> None:
        self.path, self.name, self.wanted = path, name, tuple(tables)
        if not Path(path).is_file():
            raise ConfigurationError(
                f"There is no SQLite database at {path!r}.",
                fix="give the path of an existing database.",
            )
        with _translated(path):
            self._connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        self._tables: dict[str, SqliteTable] = {}
        self._skipped = Skipped()
        self._request: ChunkRequest | None = None
        self._read_to = self._confirmed = 0
        self._reading_to: int | None = None
        self._schema_version = self._data_version = -1
        self._pruned_s = 0.0

    # Beginning

    def start(self, position: str | None, *, afresh: bool = False) -> str:
        """Changes that wait under the columns of earlier are read as such, before the triggers are
        brought to those of now.
        """
        with _translated(self.path):
            if position is not None and not afresh:
                self._check_whole(int(position))
                self._tables = known_tables(self._connection)
            else:
                self._install()
                position = str(self._newest())
                with self._transaction("IMMEDIATE"):
                    enrol(self._connection, self.name, int(position))
        self._read_to = self._confirmed = int(position)
        return position

    def _newest(self) -> int:
        (newest,) = self._connection.execute(
            f"SELECT coalesce(max(seq), 0) FROM {ORDER_TABLE}"
        ).fetchone()
        return int(newest)

    def _check_whole(self, position: int) -> None:
        """Whether all that follows a position is there."""
        row = (
            self._connection.execute(
                "SELECT seq FROM sqlite_sequence WHERE name = ?", (ORDER_TABLE,)
            ).fetchone()
            if is_enrolled(self._connection, self.name)
            else None
        )
        if row is None and position == 0 and is_enrolled(self._connection, self.name):
            return
        if row is None or position > row[0]:
            raise ConfigurationError(
                f"The capture {self.name!r} has read {self.path} up to change {position}, and the"
                " database does not know of that: it was replaced by an older copy, or the"
                " triggers were removed in between. Changes made meanwhile may be missing.",
                fix=(
                    "run it once with --start-over, which reads all tables again and goes on from"
                    " there."
                ),
            )

    def _install(self) -> list[Item]:
        """Bring the triggers to the tables, in one write transaction. Returns what was still to be
        read under the old columns, and which tables have new ones.

        Should the process die before that is in the log: the log's state knows the columns too, and
        the table is read again.
        """
        with self._transaction("IMMEDIATE"):
            tables = chosen_tables(self._connection, self.wanted, self._skipped)
            items: list[Item] = []
            if self._tables:
                items += self._replaced_by_others()
                newest = self._newest()
                items += self._changes(self._read_to, newest)
                self._read_to = max(newest, self._read_to)
            done = {table.name: install(self._connection, table) for table in tables}
        (self._schema_version,) = self._connection.execute("PRAGMA schema_version").fetchone()
        self._tables = {table.name: table for table in tables}
        return [
            *items,
            *(
                Reshaped(table.shape, missed=done[table.name] == "missed")
                for table in tables
                if done[table.name]
            ),
        ]

    def _replaced_by_others(self) -> list[Item]:
        """Another capture of this database may have followed new columns before us, and what waited
        for us under the old ones is gone: the table is read again.
        """
        current = known_tables(self._connection)
        replaced = [
            name
            for name, table in self._tables.items()
            if name in current and current[name] != table
        ]
        self._tables |= {name: current[name] for name in replaced}
        return [Reshaped(current[name].shape, missed=True) for name in replaced]

    def tables(self) -> list[TableShape]:
        return [table.shape for table in self._tables.values()]

    def count(self, table: str) -> int:
        with _translated(self.path):
            (rows,) = self._connection.execute(f"SELECT count(*) FROM {quoted(table)}").fetchone()
        return int(rows)

    # The stream

    def request(self, chunk: ChunkRequest) -> None:
        self._request = chunk

    def poll(self, timeout_s: float) -> Part:
        """Look every few milliseconds whether another connection has committed."""
        deadline_s = time.monotonic() + timeout_s
        with _translated(self.path):
            while self._request is None and self._reading_to is None and not self._has_news():
                if time.monotonic() >= deadline_s:
                    return Part()
                time.sleep(min(LOOK_EVERY_S, timeout_s))
            return self._next_part()

    def _has_news(self) -> bool:
        (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        return bool(version != self._data_version)

    def _next_part(self) -> Part:
        items: list[Item] = []
        if self._reading_to is None:
            (self._data_version,) = self._connection.execute("PRAGMA data_version").fetchone()
            items += self._follow_columns()
            self._connection.execute("BEGIN")
            self._reading_to = max(self._newest(), self._read_to)
        stop = min(self._read_to + MAX_CHANGES_A_PART, self._reading_to)
        items += self._changes(self._read_to, stop)
        self._read_to = stop
        if stop < self._reading_to:  # the read transaction stays open: it shows the same moment
            return Part(items, None, is_idle=False)
        items += self._take_chunk()
        self._connection.execute("COMMIT")
        self._reading_to = None
        return Part(items, str(self._read_to), transactions=1 if items else 0)

    def _changes(self, after: int, stop: int) -> Iterator[Item]:
        for table in self._tables.values():
            query = (
                f"SELECT s.*, o.at FROM {quoted(OURS + table.name)} s JOIN {ORDER_TABLE} o ON o.seq"
                " = s.seq WHERE s.seq > ? AND s.seq <= ? ORDER BY s.seq"
            )
            if rows := self._connection.execute(query, (after, stop)).fetchall():
                yield changes_of(table, rows, transaction=self._reading_to or stop)

    def _take_chunk(self) -> list[Chunk]:
        request, self._request = self._request, None
        if request is None or request.table not in self._tables:
            return []
        table = self._tables[request.table]
        key = ", ".join(map(quoted, table.key_columns))
        behind = (
            f"WHERE ({key}) > ({', '.join('?' * len(table.key_columns))})" if request.after else ""
        )
        columns = ", ".join(map(quoted, table.columns))
        query = (
            f"SELECT {columns} FROM {quoted(table.name)} {behind} ORDER BY {key} LIMIT"
            f" {request.rows}"
        )
        rows = self._connection.execute(
            query, [_from_json(value) for value in request.after or ()]
        ).fetchall()
        places = [table.columns.index(name) for name in table.key_columns]
        after = [_to_json(rows[-1][place]) for place in places] if rows else None
        return [
            Chunk(
                table.name,
                chunk_rows(table, rows, self._read_to),
                after,
                is_last=len(rows) < request.rows,
            )
        ]

    def _follow_columns(self) -> list[Item]:
        """Somebody changed the schema: the triggers follow."""
        (version,) = self._connection.execute("PRAGMA schema_version").fetchone()
        return [] if version == self._schema_version else self._install()

    def is_caught_up(self) -> bool:
        with _translated(self.path):
            return not self._has_news()

    def confirm(self, position: str) -> None:
        """Remove what is durable in the log, now and then; if the database is busy, later."""
        self._confirmed = int(position)
        if time.monotonic() - self._pruned_s < PRUNE_EVERY_S or self._reading_to is not None:
            return
        self._pruned_s = time.monotonic()
        try:
            with self._transaction("IMMEDIATE"):
                prune(self._connection, self.name, self._confirmed)
        except sqlite3.OperationalError:
            return

    def status(self) -> dict[str, Any]:
        with _translated(self.path):
            (kept,) = self._connection.execute(
                f"SELECT count(*) FROM {ORDER_TABLE} WHERE seq > ?", (self._confirmed,)
            ).fetchone()
        return {"changes_waiting": kept}

    def installed(self) -> list[str]:
        """What is in the database for us."""
        with _translated(self.path):
            return installed(self._connection)

    def remove(self) -> list[str]:
        with _translated(self.path), self._transaction("IMMEDIATE"):
            return dismiss(self._connection, self.name)

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
def _translated(path: str) -> Iterator[None]:
    """SQLite's errors as ours: a busy or full database may be well later, a file that is no
    database will not.
    """
    try:
        yield
    except sqlite3.OperationalError as error:
        if "readonly" in str(error) or "unable to open" in str(error):
            raise ConfigurationError(
                f"The database {path!r} cannot be written: {error}.",
                fix="triggers are needed in it: allow this user to write to it.",
            ) from error
        raise RetryError(
            f"The database {path!r} cannot be read now: {error}.", fix="it is tried again."
        ) from error
    except sqlite3.DatabaseError as error:
        raise ConfigurationError(
            f"{path!r} is no sound SQLite database: {error}.",
            fix="check the path, and the file with PRAGMA integrity_check.",
        ) from error
