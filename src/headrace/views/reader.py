"""Reads views, in any process, while the pipeline runs. Everything read in one snapshot comes from
one commit.

    with ViewReader(state / "views.db") as reader:
        reader.get("balances", 7)
        with reader.snapshot() as snap:
            assert snap.tick("accounts") == snap.tick("balances")

SQLite cannot shorten its write-ahead log behind an open snapshot, so keep it open only for as long
as a read takes. The server's faster look-ups of single rows are in `lookup.py`.
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

from headrace.columnar.columns import TICK
from headrace.errors import InputError
from headrace.log.values import Duration
from headrace.views.changes import changes_since
from headrace.views.file import (
    ViewInfo,
    ViewTable,
    hidden_name,
    open_for_reading,
    read_view,
    read_views,
    rebuild_tick,
    translate_errors,
)
from headrace.views.sql import MAX_SQL_ROWS, run_query, sql_limits

_BATCH_ROWS = 1 << 16
_IDLE_CONNECTIONS = 4


class Snapshot:
    """All views as of one commit. `ViewReader.snapshot` opens it; it is valid until its `with`
    ends.
    """

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self._db = db
        self._path = path

    def views(self) -> list[ViewInfo]:
        """All views, sorted by name."""
        with translate_errors(self._path):
            return read_views(self._db)

    def view(self, name: str) -> ViewInfo:
        """The description of a view. UnknownView, which names the nearest, if there is none."""
        with translate_errors(self._path):
            return read_view(self._db, name)

    def tick(self, view: str) -> int:
        """The tick that a view shows."""
        return self.view(view).tick

    def written_tick(self, view: str) -> int:
        """The last tick that was written to a view. Of one that is built again it is that of the
        new rows, which the view does not show yet.
        """
        with translate_errors(self._path):
            is_rebuilt = rebuild_tick(self._db, view) is not None
            return read_view(self._db, hidden_name(view) if is_rebuilt else view).tick

    def count(self, view: str) -> int:
        """The number of rows of a view."""
        table = ViewTable(self.view(view))
        with translate_errors(self._path):
            return int(self._db.execute(f"SELECT count(*) FROM {table.table}").fetchone()[0])  # noqa: S608

    def get(self, view: str, key: Any) -> dict[str, Any] | None:
        """The row of a key.

        Args:
            view: The view's name; it must have a key.
            key: One value, a tuple of values, or a dict by column name.

        Returns:
            The row as a dict, or None if there is none.

        Raises:
            UnknownView: There is no such view.
            InputError: The view is a stream, or the key does not fit its columns.

        Example:
            ``reader.get("balances", 7)``

        """
        table = ViewTable(self.view(view))
        if table.info.is_stream:
            raise InputError(
                f"The view {view!r} is a stream: its rows have no key.",
                fix="read it with scan, or turn the stream into a table with to_table(key).",
            )
        conditions = [f"{name} = ?" for name in table.key_columns]
        rows = list(self._batches(table, conditions, table.stored_key(key)))
        return rows[0].to_pylist()[0] if rows else None

    def scan(
        self,
        view: str,
        *,
        start: Any = None,
        stop: Any = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> pa.Table:
        """Rows in a range of keys, in key order.

        NaN sorts after all numbers and null last; in a BINARY column null sorts first.

        Args:
            view: The view's name.
            start: The first key. The first columns of a key stand for all keys that begin with
                them. For a stream, a tick.
            stop: The key, or for a stream the tick, before which to stop.
            limit: The largest number of rows to return.
            reverse: Whether to return the rows in descending order.

        Returns:
            The rows with the types of the view. A stream's rows are in the order in which they were
            appended, with `_tick` as their last column.

        Raises:
            UnknownView: There is no such view.
            InputError: `start` or `stop` does not fit the view's key.

        Example:
            ``reader.scan("orders", start=("de", 100), limit=10)``
        """
        table = ViewTable(self.view(view))
        conditions, values = [], []
        for bound, comparison in ((start, ">="), (stop, "<")):
            if bound is not None:
                columns, stored = (
                    ([TICK], [bound])
                    if table.info.is_stream
                    else (table.key_columns, table.key_prefix(bound))
                )
                conditions.append(
                    f"({', '.join(columns[: len(stored)])}) {comparison}"
                    f" ({', '.join('?' * len(stored))})"
                )
                values += stored
        return pa.Table.from_batches(
            self._batches(table, conditions, values, limit=limit, reverse=reverse),
            schema=table.schema,
        )

    def table(self, view: str) -> pa.Table:
        """All rows of a view, as `scan` returns them."""
        return self.scan(view)

    def batches(self, view: str) -> Iterator[pa.RecordBatch]:
        """All rows of a view, some ten thousand at a time."""
        return self._batches(ViewTable(self.view(view)), [], [])

    def changes_since(self, view: str, tick: int) -> Iterator[tuple[int, pa.Table]]:
        """The changes of a view after a tick.

        Args:
            view: The view's name.
            tick: The last tick whose changes are known to the caller.

        Returns:
            For each later tick that changed the view, the tick and its changes with `_change_type`.

        Raises:
            UnknownView: There is no such view.
            ChangesGone: Some of the changes are no longer retained.

        Example:
            ``for tick, changes in snapshot.changes_since("balances", 41): …``

        """
        with translate_errors(self._path):
            return changes_since(self._db, read_view(self._db, view), tick)

    def sql(
        self,
        query: str,
        parameters: Sequence[Any] = (),
        *,
        timeout: Duration = "10 seconds",
        max_rows: int = MAX_SQL_ROWS,
    ) -> pa.Table:
        """The result of a SELECT over the views as of this snapshot, in DuckDB's dialect.

        Args:
            query: One SELECT.
            parameters: The values of its `?` placeholders.
            timeout: How long the query may run.
            max_rows: The largest result.

        Returns:
            The rows, with the types of the views and of DuckDB's functions.

        Raises:
            BadQuery: The query is not allowed, cannot run, or takes too long, too much memory or
                too many rows.
            UnknownView: It reads a view that does not exist.
            ChangesGone: More was committed since the snapshot than the store retains.

        Example:
            ``snapshot.sql("SELECT sum(n) AS n FROM counts WHERE k > ?", [10])``

        """
        ticks = {view.name: view.tick for view in self.views()}
        return run_query(
            self._path,
            query,
            parameters,
            limits=sql_limits(timeout, max_rows),
            ticks=ticks,
        ).rows

    def _batches(
        self,
        table: ViewTable,
        conditions: list[str],
        values: list[Any],
        *,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        with translate_errors(self._path):
            statement = f"{table.select(conditions, reverse=reverse)} LIMIT ?"
            cursor = self._db.execute(statement, [*values, -1 if limit is None else limit])
            while rows := cursor.fetchmany(_BATCH_ROWS):
                yield table.batch(rows)


class ViewReader:
    """Reads the views of a file. Each method opens a snapshot of its own and calls the snapshot's
    method of that name. Threads may share a reader.
    """

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Open a snapshot of all views, for as long as the `with` lasts."""
        db = self._connection()
        try:
            with translate_errors(self.path):
                db.execute("BEGIN")
                db.execute("SELECT epoch FROM _ledger").fetchone()  # the first read pins the commit
            yield Snapshot(db, self.path)
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")
            with self._lock:
                is_kept = len(self._idle) < _IDLE_CONNECTIONS
                if is_kept:
                    self._idle.append(db)
            if not is_kept:
                db.close()

    def views(self) -> list[ViewInfo]:
        with self.snapshot() as snap:
            return snap.views()

    def tick(self, view: str) -> int:
        with self.snapshot() as snap:
            return snap.tick(view)

    def written_tick(self, view: str) -> int:
        with self.snapshot() as snap:
            return snap.written_tick(view)

    def get(self, view: str, key: Any) -> dict[str, Any] | None:
        with self.snapshot() as snap:
            return snap.get(view, key)

    def scan(
        self,
        view: str,
        *,
        start: Any = None,
        stop: Any = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> pa.Table:
        with self.snapshot() as snap:
            return snap.scan(view, start=start, stop=stop, limit=limit, reverse=reverse)

    def table(self, view: str) -> pa.Table:
        with self.snapshot() as snap:
            return snap.table(view)

    def changes_since(self, view: str, tick: int) -> Iterator[tuple[int, pa.Table]]:
        with self.snapshot() as snap:
            return snap.changes_since(view, tick)

    def sql(
        self,
        query: str,
        parameters: Sequence[Any] = (),
        *,
        timeout: Duration = "10 seconds",
        max_rows: int = MAX_SQL_ROWS,
    ) -> pa.Table:
        """The result of a SELECT over the views as of the newest commit. See `Snapshot.sql`."""
        return run_query(self.path, query, parameters, limits=sql_limits(timeout, max_rows)).rows

    def _connection(self) -> sqlite3.Connection:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return open_for_reading(self.path)
