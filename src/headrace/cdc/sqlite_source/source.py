"""The source for SQLite. What is committed is read in one read transaction, so it is always a whole number of the user's transactions; a chunk of a snapshot is read in the same one,
and so stands exactly behind the changes that it already contains.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.cdc.source import Chunk, ChunkRequest, Item, Part, Reshaped, Skipped, TableShape
from headrace.cdc.sqlite_source.rows import changes_of, chunk_rows
from headrace.cdc.sqlite_source.triggers import (
    ORDER_TABLE,
    OURS,
    SqliteTable,
    chosen_tables,
    dismiss,
    enrol,
    install,
    installed,
    is_enrolled,
    known_tables,
    prune,
)
from headrace.errors import ConfigurationError, RetryError
from headrace.sql_names import quoted

BUSY_S = 10.0
LOOK_EVERY_S = 0.02
MOST_CHANGES_A_PART = 50_000
PRUNE_EVERY_S = 10.0


class SqliteSource:
    def __init__(self, path: str, name: str, tables: Sequence[str]) -> None:
        self.path, self.name, self.wanted = path, name, tuple(tables)
        if not Path(path).is_file():
            raise ConfigurationError(f"There is no SQLite database at {path!r}.", fix="give the path of an existing database.")
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
        """Changes that wait under the columns of earlier are read as such, before the triggers are brought to those of now."""
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
        (newest,) = self._connection.execute(f"SELECT coalesce(max(seq), 0) FROM {ORDER_TABLE}").fetchone()
        return int(newest)

    def _check_whole(self, position: int) -> None:
        """Whether all that follows a position is there."""
        row = self._connection.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (ORDER_TABLE,)).fetchone() if is_enrolled(self._connection, self.name) else None
        if row is None and position == 0 and is_enrolled(self._connection, self.name):
            return
        if row is None or position > row[0]:
            raise ConfigurationError(
                f"The capture {self.name!r} has read {self.path} up to change {position}, and the database does not know of that: it was replaced by an "
                "older copy, or the triggers were removed in between. Changes made meanwhile may be missing.",
                fix="run it once with --start-over, which reads all tables again and goes on from there.",
            )

    def _install(self) -> list[Item]:
        """Bring the triggers to the tables, in one write transaction. Returns what was still to be read under the old columns, and which tables have new ones.

        Should the process die before that is in the log: the log's state knows the columns too, and the table is read again.
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
        return [*items, *(Reshaped(table.shape, missed=done[table.name] == "missed") for table in tables if done[table.name])]

    def _replaced_by_others(self) -> list[Item]:
        """Another capture of this database may have followed new columns before us, and what waited for us under the old ones is gone: the table is read again."""
        current = known_tables(self._connection)
        replaced = [name for name, table in self._tables.items() if name in current and current[name] != table]
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
        stop = min(self._read_to + MOST_CHANGES_A_PART, self._reading_to)
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
                f"SELECT s.*, o.at FROM {quoted(OURS + table.name)} s JOIN {ORDER_TABLE} o ON o.seq = s.seq "
                "WHERE s.seq > ? AND s.seq <= ? ORDER BY s.seq"
            )
            if rows := self._connection.execute(query, (after, stop)).fetchall():
                yield changes_of(table, rows, transaction=self._reading_to or stop)

    def _take_chunk(self) -> list[Chunk]:
        request, self._request = self._request, None
        if request is None or request.table not in self._tables:
            return []
        table = self._tables[request.table]
        key = ", ".join(map(quoted, table.key_columns))
        behind = f"WHERE ({key}) > ({', '.join('?' * len(table.key_columns))})" if request.after else ""
        columns = ", ".join(map(quoted, table.columns))
        query = f"SELECT {columns} FROM {quoted(table.name)} {behind} ORDER BY {key} LIMIT {request.rows}"
        rows = self._connection.execute(query, [_from_json(value) for value in request.after or ()]).fetchall()
        places = [table.columns.index(name) for name in table.key_columns]
        after = [_to_json(rows[-1][place]) for place in places] if rows else None
        return [Chunk(table.name, chunk_rows(table, rows, self._read_to), after, is_last=len(rows) < request.rows)]

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
            (kept,) = self._connection.execute(f"SELECT count(*) FROM {ORDER_TABLE} WHERE seq > ?", (self._confirmed,)).fetchone()
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
    """SQLite's errors as ours: a busy or full database may be well later, a file that is no database will not."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "readonly" in str(error) or "unable to open" in str(error):
            raise ConfigurationError(f"The database {path!r} cannot be written: {error}.", fix="triggers are needed in it: allow this user to write to it.") from error
        raise RetryError(f"The database {path!r} cannot be read now: {error}.", fix="it is tried again.") from error
    except sqlite3.DatabaseError as error:
        raise ConfigurationError(f"{path!r} is no sound SQLite database: {error}.", fix="check the path, and the file with PRAGMA integrity_check.") from error
