"""Reading views, from any process, while the pipeline runs. Everything read in one snapshot shows
the same tick.

    with ViewReader(state / "views.db") as reader:
        reader.get("balances", 7)
        with reader.snapshot() as snap:
            assert snap.tick("accounts") == snap.tick("balances")

A snapshot holds on to the past: SQLite cannot shorten its log of changes behind it. Keep it for as
long as a read takes, not longer.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import TICK
from headrace.durations import to_us
from headrace.errors import InputError
from headrace.log.values import Duration
from headrace.types.json_codec import array_text
from headrace.views.changes import changes_since
from headrace.views.file import (
    ViewInfo,
    ViewTable,
    open_for_reading,
    read_view,
    read_views,
    translated,
)
from headrace.views.sql import MAX_SQL_ROWS, run_query

_ROWS_A_BATCH = 1 << 16
_IDLE_CONNECTIONS = 4


class Snapshot:
    """All views as of one commit. Given by `ViewReader.snapshot`, and good until its `with`
    ends.
    """

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
        """The row of a key: a value, a tuple of them, or a dict by column. None if there is
        none.
        """
        table = ViewTable(self.view(view))
        if table.info.is_stream:
            raise InputError(
                f"The view {view!r} is a stream: its rows have no key.",
                fix="read it with scan, or make a table of it with to_table(key).",
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
        """Rows from key `start` up to, not including, `stop`, in the key's order. A part of a key,
        its first columns, stands for all that begin with it.

        Of a stream, `start` and `stop` are ticks, and rows come in the order in which they were
        added. NaN and then null come last; in a BINARY column null comes first.
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
        """The whole view with the types it was declared with. A stream's rows end with their
        `_tick`.
        """
        return self.scan(view)

    def batches(self, view: str) -> Iterator[pa.RecordBatch]:
        """The whole view, some thousand rows at a time."""
        return self._batches(ViewTable(self.view(view)), [], [])

    def changes_since(self, view: str, tick: int) -> Iterator[tuple[int, pa.Table]]:
        """For each later tick that changed the view, the tick and its changes, with `_change_type`.
        ChangesGone if they are no longer kept.
        """
        with translated(self._path):
            return changes_since(self._db, read_view(self._db, view), tick)

    def sql(
        self,
        query: str,
        parameters: Sequence[Any] = (),
        *,
        timeout: Duration = "10 seconds",
        max_rows: int = MAX_SQL_ROWS,
    ) -> pa.Table:
        """The result of a SELECT over the views, in SQLite's SQL and with SQLite's types: see
        `view_types.py`. BadQuery if it may not or cannot run.
        """
        with translated(self._path):
            return run_query(
                self._db,
                query,
                parameters,
                timeout_us=to_us(timeout, what="timeout"),
                max_rows=max_rows,
            )

    def _batches(
        self,
        table: ViewTable,
        conditions: list[str],
        values: list[Any],
        *,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        with translated(self._path):
            statement = f"{table.select(conditions, reverse=reverse)} LIMIT ?"
            cursor = self._db.execute(statement, [*values, -1 if limit is None else limit])
            while rows := cursor.fetchmany(_ROWS_A_BATCH):
                yield table.batch(rows)


class ViewReader:
    """Reads the views in a file. Its methods are those of a snapshot, each in one of its own.
    Threads may share it.
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
        """All views as they are now, for as long as the `with` lasts."""
        db = self._connection()
        try:
            with translated(self.path):
                db.execute("BEGIN")
                db.execute(
                    "SELECT epoch FROM _ledger"
                ).fetchone()  # the first read is what fixes the moment
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
        with self.snapshot() as snap:
            return snap.sql(query, parameters, timeout=timeout, max_rows=max_rows)

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


# Two views compared: by key, rows that one lacks and rows that differ; without a key, rows that one
# has more often. `headrace view diff` shows it.


Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Difference:
    """Rows of the common columns that only one side has, and those that differ, in the same order
    on both sides.
    """

    columns_only_left: tuple[str, ...]
    columns_only_right: tuple[str, ...]
    only_left: pa.Table
    only_right: pa.Table
    changed_left: pa.Table
    changed_right: pa.Table
    same: int

    @property
    def is_none(self) -> bool:
        tables = (self.only_left, self.only_right, self.changed_left)
        return not (
            self.columns_only_left
            or self.columns_only_right
            or any(table.num_rows for table in tables)
        )


def difference(
    left: pa.Table, right: pa.Table, left_info: ViewInfo, right_info: ViewInfo
) -> Difference:
    """What is different, in the columns that both have. InputError if they cannot be laid beside
    each other.
    """
    if left_info.key != right_info.key:
        keys = [
            f"({', '.join(info.key)})" if info.key else "none" for info in (left_info, right_info)
        ]
        raise InputError(
            f"{left_info.name!r} has the key {keys[0]}, {right_info.name!r} the key {keys[1]}.",
            fix="compare views with the same key, or ask with SQL.",
        )
    common = [name for name in left_info.schema.names if name in right_info.schema.names]
    only = [
        tuple(name for name in info.schema.names if name not in common)
        for info in (left_info, right_info)
    ]
    left, right = (table.select(common) for table in (left, right))
    texts = [_texts(table, common) for table in (left, right)]
    if not left_info.key:
        return Difference(
            only[0],
            only[1],
            *_beyond(left, right, *texts),
            left.slice(0, 0),
            right.slice(0, 0),
            _shared(*texts),
        )
    keys_left, keys_right = (_texts(table, left_info.key) for table in (left, right))
    at = pc.index_in(keys_left, value_set=keys_right)
    is_common = at.is_valid().to_numpy(zero_copy_only=False)
    pairs = np.flatnonzero(is_common), at.drop_null().to_numpy()
    unlike = pc.not_equal(
        texts[0].take(pa.array(pairs[0])), texts[1].take(pa.array(pairs[1]))
    ).to_numpy(zero_copy_only=False)
    lonely = np.ones(right.num_rows, np.bool_)
    lonely[pairs[1]] = False
    changed_left, changed_right = (
        table.take(pa.array(rows[unlike])) for table, rows in zip((left, right), pairs, strict=True)
    )
    return Difference(
        only[0],
        only[1],
        left.filter(pa.array(~is_common)),
        right.filter(pa.array(lonely)),
        changed_left,
        changed_right,
        int((~unlike).sum()),
    )


def _texts(table: pa.Table, names: Sequence[str]) -> pa.Array:
    """A row's values as one text: nulls and NaN are like themselves."""
    if not table.num_rows:
        return pa.array([], pa.string())
    (whole,) = table.select(list(names)).combine_chunks().to_batches()
    return array_text(whole.columns)


def _counts(texts: pa.Array) -> dict[str, int]:
    return {each["values"]: each["counts"] for each in pc.value_counts(texts).to_pylist()}


def _beyond(
    left: pa.Table, right: pa.Table, left_texts: pa.Array, right_texts: pa.Array
) -> tuple[pa.Table, pa.Table]:
    """Rows that a side has more often than the other: as many of them as it has more."""
    return left.filter(_more(left_texts, right_texts)), right.filter(_more(right_texts, left_texts))


def _more(mine: pa.Array, others: pa.Array) -> pa.Array:
    left = _counts(others)
    more = []
    for text in mine.to_pylist():
        left[text] = left.get(text, 0) - 1
        more.append(left[text] < 0)
    return pa.array(more, pa.bool_())


def _shared(left: pa.Array, right: pa.Array) -> int:
    others = _counts(right)
    return sum(min(count, others.get(text, 0)) for text, count in _counts(left).items())


def comparable(info: ViewInfo, table: pa.Table) -> pa.Table:
    """Without a stream's ticks, which a version may have cut otherwise."""
    return table.drop_columns([TICK]) if info.is_stream else table
