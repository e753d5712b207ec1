"""What capture puts into a user's SQLite database, and takes out again.

For each captured table a *shadow* with the old and the new values of each change, and three triggers that fill it. One table gives all changes their order. Everything is named `_headrace_…`:

    _headrace_order        seq, table, time: the order of all changes
    _headrace_shape        which columns a shadow stands for
    _headrace_reader       how far each capture has read, so that no change is removed that another still needs
    _headrace_<table>      seq, op, o0, o1, … (the row before), n0, n1, … (the row after)

Values are kept as they are, not as text, so nothing is lost.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.cdc.source import Skipped, TableShape, usable_names
from headrace.errors import ConfigurationError, nearest
from headrace.sql_names import quoted

ORDER_TABLE, SHAPE_TABLE, READER_TABLE, OURS = "_headrace_order", "_headrace_shape", "_headrace_reader", "_headrace_"
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
    rows = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY name")
    return [name for (name,) in rows if not name.startswith(OURS)]


def look_at(connection: sqlite3.Connection, table: str) -> SqliteTable:
    rows = connection.execute(f"SELECT name, type, pk, hidden FROM pragma_table_xinfo({quoted(table)})").fetchall()
    columns = [(name, kind, pk) for name, kind, pk, hidden in rows if hidden != 1]
    names = usable_names([name for name, _, _ in columns])
    key = [name for _, name in sorted((pk, name) for (_, _, pk), name in zip(columns, names, strict=True) if pk)]
    if not key:
        raise ConfigurationError(
            f"The table {table!r} has no primary key, so its rows cannot be told apart.",
            fix="give it one (make a new table with PRIMARY KEY and copy the rows), or leave it out of tables=[…].",
        )
    shape = TableShape(table, tuple((name, ddl_type(kind)) for name, (_, kind, _) in zip(names, columns, strict=True)), tuple(key))
    return SqliteTable(table, tuple(name for name, _, _ in columns), shape)


def known_tables(connection: sqlite3.Connection) -> dict[str, SqliteTable]:
    """The tables that are captured, with the columns that their shadows have."""
    if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = ?", (SHAPE_TABLE,)).fetchone():
        return {}
    return {name: _known(name, text) for name, text in connection.execute(f"SELECT name, columns FROM {SHAPE_TABLE}")}


def _known(name: str, text: str) -> SqliteTable:
    own, columns, key = json.loads(text)
    return SqliteTable(name, tuple(own), TableShape(name, tuple((column, kind) for column, kind in columns), tuple(key)))


def chosen_tables(connection: sqlite3.Connection, wanted: Sequence[str], skipped: Skipped) -> list[SqliteTable]:
    there = user_tables(connection)
    for name in wanted:
        if name not in there:
            raise ConfigurationError(f"There is no table {name!r} in the database: {nearest(name, there)}", fix="name tables that are there.")
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
    """Bring a table's shadow and triggers to its columns, in a write transaction. Returns what happened to a table that was captured before: `reshaped`, or `missed`."""
    connection.execute(f"CREATE TABLE IF NOT EXISTS {ORDER_TABLE} (seq INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, at INTEGER NOT NULL)")
    connection.execute(f"CREATE TABLE IF NOT EXISTS {SHAPE_TABLE} (name TEXT PRIMARY KEY, columns TEXT NOT NULL)")
    known = connection.execute(f"SELECT columns FROM {SHAPE_TABLE} WHERE name = ?", (table.name,)).fetchone()
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
    connection.execute(f"CREATE TABLE {shadow} (seq INTEGER PRIMARY KEY, op TEXT NOT NULL, {columns})")
    nothing = ", ".join(["NULL"] * len(table.columns))
    old, new = (", ".join(f"{row}.{quoted(name)}" for name in table.columns) for row in ("OLD", "NEW"))
    for event, op, values in (("INSERT", "i", f"{nothing}, {new}"), ("UPDATE", "u", f"{old}, {new}"), ("DELETE", "d", f"{old}, {nothing}")):
        literal = "'" + table.name.replace("'", "''") + "'"
        connection.execute(
            f"CREATE TRIGGER {quoted(f'{OURS}{table.name}_{event.lower()}')} AFTER {event} ON {quoted(table.name)} BEGIN "
            f"INSERT INTO {ORDER_TABLE} (name, at) VALUES ({literal}, {_AT}); "
            f"INSERT INTO {shadow} VALUES (last_insert_rowid(), '{op}', {values}); END"
        )


def enrol(connection: sqlite3.Connection, reader: str, position: int) -> None:
    connection.execute(f"CREATE TABLE IF NOT EXISTS {READER_TABLE} (name TEXT PRIMARY KEY, confirmed INTEGER NOT NULL)")
    connection.execute(f"INSERT OR REPLACE INTO {READER_TABLE} VALUES (?, ?)", (reader, position))


def is_enrolled(connection: sqlite3.Connection, reader: str) -> bool:
    if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = ?", (READER_TABLE,)).fetchone():
        return False
    return connection.execute(f"SELECT 1 FROM {READER_TABLE} WHERE name = ?", (reader,)).fetchone() is not None


def prune(connection: sqlite3.Connection, reader: str, confirmed: int) -> None:
    """Remove what every reader has."""
    connection.execute(f"UPDATE {READER_TABLE} SET confirmed = ? WHERE name = ?", (confirmed, reader))
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
    query = "SELECT name FROM sqlite_schema WHERE type = 'trigger' AND tbl_name = ? AND name LIKE '\\_headrace\\_%' ESCAPE '\\'"
    return [name for (name,) in connection.execute(query, (table,))]


def _uninstall(connection: sqlite3.Connection, table: str) -> None:
    for trigger in _triggers(connection, table):
        connection.execute(f"DROP TRIGGER {quoted(trigger)}")
    connection.execute(f"DROP TABLE IF EXISTS {quoted(OURS + table)}")
    connection.execute(f"DELETE FROM {SHAPE_TABLE} WHERE name = ?", (table,))


def installed(connection: sqlite3.Connection) -> list[str]:
    """Everything of ours in the database."""
    query = "SELECT type || ' ' || name FROM sqlite_schema WHERE type IN ('table', 'trigger') AND name LIKE '\\_headrace\\_%' ESCAPE '\\' ORDER BY 1 DESC"
    return [name for (name,) in connection.execute(query)]


def remove_all(connection: sqlite3.Connection) -> list[str]:
    """Drop everything of ours; the triggers first."""
    found = installed(connection)
    for each in found:
        kind, name = each.split(" ", 1)
        connection.execute(f"DROP {kind} {quoted(name)}")
    return found
