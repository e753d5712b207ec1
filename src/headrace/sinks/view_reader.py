"""Reading views, from any process, while the pipeline runs. Everything read in one snapshot shows the same tick.

    with ViewReader(state / "views.db") as reader:
        reader.get("balances", 7)
        with reader.snapshot() as snap:
            assert snap.tick("accounts") == snap.tick("balances")

A snapshot holds on to the past: SQLite cannot shorten its log of changes behind it. Keep it for as long as a read takes, not longer.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from headrace.durations import to_us
from headrace.errors import InputError
from headrace.log.api import Duration
from headrace.operators.kernel import TICK
from headrace.sinks.view_changes import changes_since
from headrace.sinks.view_file import ViewInfo, open_for_reading, read_view, read_views, translated
from headrace.sinks.view_sql import MOST_SQL_ROWS, run_query
from headrace.sinks.view_table import ViewTable

_ROWS_A_BATCH = 1 << 16
_IDLE_CONNECTIONS = 4


class Snapshot:
    """All views as of one commit. Given by `ViewReader.snapshot`, and good until its `with` ends."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self._db, self._path = db, path

    def views(self) -> list[ViewInfo]:
        """Every view, by name."""
        with translated(self._path):
            return read_views(self._db)

    def view(self, name: str) -> ViewInfo:
        """What a view is. UnknownView, with the nearest name, if there is none."""
        with translated(self._path):
            return read_view(self._db, name)

    def tick(self, view: str) -> int:
        """The tick that a view shows."""
        return self.view(view).tick

    def count(self, view: str) -> int:
        """How many rows it has."""
        table = ViewTable(self.view(view))
        with translated(self._path):
            return int(self._db.execute(f"SELECT count(*) FROM {table.table}").fetchone()[0])  # noqa: S608

    def get(self, view: str, key: Any) -> dict[str, Any] | None:
        """The row of a key: a value, a tuple of them, or a dict by column. None if there is none."""
        table = ViewTable(self.view(view))
        if table.info.is_stream:
            raise InputError(
                f"The view {view!r} is a stream: its rows have no key.", fix="read it with scan, or make a table of it with to_table(key)."
            )
        conditions = [f"{name} = ?" for name in table.key_columns]
        rows = list(self._batches(table, conditions, table.stored_key(key)))
        return rows[0].to_pylist()[0] if rows else None

    def scan(self, view: str, *, start: Any = None, stop: Any = None, limit: int | None = None, reverse: bool = False) -> pa.Table:
        """Rows from key `start` up to, not including, `stop`, in the key's order. A part of a key, its first columns, stands for all that begin with it.

        Of a stream, `start` and `stop` are ticks, and rows come in the order in which they were added. NaN and then null come last; in a BINARY column null comes first.
        """
        table = ViewTable(self.view(view))
        conditions, values = [], []
        for bound, comparison in ((start, ">="), (stop, "<")):
            if bound is not None:
                columns, stored = ([TICK], [bound]) if table.info.is_stream else (table.key_columns, table.key_prefix(bound))
                conditions.append(f"({', '.join(columns[: len(stored)])}) {comparison} ({', '.join('?' * len(stored))})")
                values += stored
        return pa.Table.from_batches(self._batches(table, conditions, values, limit=limit, reverse=reverse), schema=table.schema)

    def table(self, view: str) -> pa.Table:
        """The whole view with the types it was declared with. A stream's rows end with their `_tick`."""
        return self.scan(view)

    def batches(self, view: str) -> Iterator[pa.RecordBatch]:
        """The whole view, some thousand rows at a time."""
        return self._batches(ViewTable(self.view(view)), [], [])

    def changes_since(self, view: str, tick: int) -> Iterator[tuple[int, pa.Table]]:
        """For each later tick that changed the view, the tick and its changes, with `_change_type`. ChangesGone if they are no longer kept."""
        with translated(self._path):
            return changes_since(self._db, read_view(self._db, view), tick)

    def sql(self, query: str, parameters: Sequence[Any] = (), *, timeout: Duration = "10 seconds", most_rows: int = MOST_SQL_ROWS) -> pa.Table:
        """The result of a SELECT over the views, in SQLite's SQL and with SQLite's types: see `view_types.py`. BadQuery if it may not or cannot run."""
        with translated(self._path):
            return run_query(self._db, query, parameters, timeout_us=to_us(timeout, what="timeout"), most_rows=most_rows)

    def _batches(
        self, table: ViewTable, conditions: list[str], values: list[Any], *, limit: int | None = None, reverse: bool = False
    ) -> Iterator[pa.RecordBatch]:
        with translated(self._path):
            statement = f"{table.select(conditions, reverse=reverse)} LIMIT ?"
            cursor = self._db.execute(statement, [*values, -1 if limit is None else limit])
            while rows := cursor.fetchmany(_ROWS_A_BATCH):
                yield table.batch(rows)


class ViewReader:
    """Reads the views in a file. Its methods are those of a snapshot, each in one of its own. Threads may share it."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._idle: list[sqlite3.Connection] = []
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """All views as they are now, for as long as the `with` lasts."""
        db = self._connection()
        try:
            with translated(self.path):
                db.execute("BEGIN")
                db.execute("SELECT epoch FROM _ledger").fetchone()  # the first read is what fixes the moment
            yield Snapshot(db, self.path)
        finally:
            self._give_back(db)

    def views(self) -> list[ViewInfo]:
        with self.snapshot() as snap:
            return snap.views()

    def tick(self, view: str) -> int:
        with self.snapshot() as snap:
            return snap.tick(view)

    def get(self, view: str, key: Any) -> dict[str, Any] | None:
        with self.snapshot() as snap:
            return snap.get(view, key)

    def scan(self, view: str, *, start: Any = None, stop: Any = None, limit: int | None = None, reverse: bool = False) -> pa.Table:
        with self.snapshot() as snap:
            return snap.scan(view, start=start, stop=stop, limit=limit, reverse=reverse)

    def table(self, view: str) -> pa.Table:
        with self.snapshot() as snap:
            return snap.table(view)

    def changes_since(self, view: str, tick: int) -> Iterator[tuple[int, pa.Table]]:
        with self.snapshot() as snap:
            return snap.changes_since(view, tick)

    def sql(self, query: str, parameters: Sequence[Any] = (), *, timeout: Duration = "10 seconds", most_rows: int = MOST_SQL_ROWS) -> pa.Table:
        with self.snapshot() as snap:
            return snap.sql(query, parameters, timeout=timeout, most_rows=most_rows)

    def _connection(self) -> sqlite3.Connection:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return open_for_reading(self.path)

    def _give_back(self, db: sqlite3.Connection) -> None:
        if db.in_transaction:
            db.execute("ROLLBACK")
        with self._lock:
            if len(self._idle) < _IDLE_CONNECTIONS:
                self._idle.append(db)
                return
        db.close()
