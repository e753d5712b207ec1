"""The target `sqlite`: a table of an SQLite database. One SQL transaction has the rows and the
ledger row.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from headrace.errors import ConfigurationError, TargetMismatch, TargetUnavailable, nearest
from headrace.sinks.base import (
    PIECE_ROWS,
    Applied,
    Batch,
    Refusal,
    RowsRefused,
    Shape,
    SinkSpec,
    Target,
    in_pieces,
)
from headrace.types.schema import quoted
from headrace.views.types import affinity, from_values, to_values

LEDGER = "_headrace_sinks"
BUSY_S = 30.0
_REFUSALS = (sqlite3.IntegrityError, sqlite3.DataError, OverflowError)


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(quoted, names))


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise TargetUnavailable(
            f"SQLite: {error}.",
            fix=(
                "see that the file can be written, that there is room, and that nobody keeps it"
                " locked."
            ),
        ) from error
    except sqlite3.DatabaseError as error:
        raise ConfigurationError(
            f"SQLite: {error}.",
            fix=(
                "check the path; if the file is damaged, remove it, and it is made and filled"
                " again."
            ),
        ) from error


class SqliteTarget(Target):
    def __init__(self, sink: SinkSpec, shape: Shape) -> None:
        super().__init__(sink, shape)
        with _translated():
            self._db = sqlite3.connect(
                sink.options["path"], timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )

    def close(self) -> None:
        self._db.close()

    # What is there

    def prepare(self) -> None:
        with _translated(), self._transaction():
            self._db.execute(
                f"CREATE TABLE IF NOT EXISTS {LEDGER} (target TEXT PRIMARY KEY, applied TEXT NOT"
                " NULL)"
            )
            known = self._columns()
            if not known:
                self._create()
                return
            for each in self.shape.schema:
                if each.name not in known:
                    self._add(each, known)
            if not self._has_unique_key():
                raise TargetMismatch(
                    f"The table {self.table!r} has no primary key or unique index on"
                    f" {', '.join(self.shape.key)}, by which it is to be merged.",
                    fix=(
                        f"CREATE UNIQUE INDEX {quoted(f'{self.table}_key')} ON {quoted(self.table)}"
                        f" ({_list(self.shape.key)})"
                    ),
                )

    def _columns(self) -> list[str]:
        return [
            row[0]
            for row in self._db.execute("SELECT name FROM pragma_table_info(?)", (self.table,))
        ]

    def _create(self) -> None:
        columns = ", ".join(
            f"{quoted(each.name)} {affinity(each.type)}" for each in self.shape.schema
        )
        statement = (
            f"CREATE TABLE {quoted(self.table)} ({columns}, PRIMARY KEY ({_list(self.shape.key)}))"
        )
        if not self.sink.create:
            raise TargetMismatch(
                f"There is no table {self.table!r} in {self.sink.options['path']}.",
                fix=f"create=True (leave out --no-create), or: {statement}",
            )
        self._db.execute(statement)
        self._db.execute(
            f"DELETE FROM {LEDGER} WHERE target = ?", (self.table,)
        )  # one that was dropped is filled from the beginning

    def _add(self, column: pa.Field, known: list[str]) -> None:
        statement = (
            f"ALTER TABLE {quoted(self.table)} ADD COLUMN {quoted(column.name)}"
            f" {affinity(column.type)}"
        )
        if not self.sink.create:
            raise TargetMismatch(
                f"The table {self.table!r} has no column {column.name!r}:"
                f" {nearest(column.name, known)}",
                fix=f"create=True (leave out --no-create), or: {statement}",
            )
        self._db.execute(statement)

    def _has_unique_key(self) -> bool:
        primary = {
            row[0]
            for row in self._db.execute(
                "SELECT name FROM pragma_table_info(?) WHERE pk > 0", (self.table,)
            )
        }
        indexes = self._db.execute(
            'SELECT name FROM pragma_index_list(?) WHERE "unique" AND NOT partial', (self.table,)
        ).fetchall()
        sets = [
            {row[0] for row in self._db.execute("SELECT name FROM pragma_index_info(?)", index)}
            for index in indexes
        ]
        return set(self.shape.key) in [primary, *sets]

    # A commit

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with _translated(), self._transaction():
            yield

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def read_applied(self) -> Applied | None:
        row = self._db.execute(
            f"SELECT applied FROM {LEDGER} WHERE target = ?", (self.table,)
        ).fetchone()
        return None if row is None else Applied.from_json(row[0])

    def write_applied(self, applied: Applied) -> None:
        self._db.execute(
            f"INSERT OR REPLACE INTO {LEDGER} VALUES (?, ?)", (self.table, applied.to_json())
        )

    def merge(self, batch: Batch) -> list[Refusal]:
        refused: list[Refusal] = []
        in_pieces(batch.deletes, batch.delete_places, self._delete, refused)
        in_pieces(batch.upserts, batch.upsert_places, self._upsert, refused)
        return refused

    def clear(self) -> None:
        self._db.execute(f"DELETE FROM {quoted(self.table)}")

    def _delete(self, keys: pa.Table) -> None:
        self._each(
            f"DELETE FROM {quoted(self.table)} WHERE ({_list(self.shape.key)}) ="
            f" ({', '.join('?' * len(self.shape.key))})",
            keys,
        )

    def _upsert(self, rows: pa.Table) -> None:
        names = self.shape.schema.names
        news = ", ".join(f"{quoted(name)} = excluded.{quoted(name)}" for name in self.shape.values)
        on_conflict = (
            f"ON CONFLICT ({_list(self.shape.key)}) DO"
            f" {f'UPDATE SET {news}' if news else 'NOTHING'}"
        )
        self._each(
            f"INSERT INTO {quoted(self.table)} ({_list(names)}) VALUES"
            f" ({', '.join('?' * len(names))}) {on_conflict}",
            rows,
        )

    def _each(self, statement: str, rows: pa.Table) -> None:
        self._db.execute("SAVEPOINT piece")
        try:
            self._db.executemany(statement, _values(rows))
        except _REFUSALS as error:
            self._db.execute("ROLLBACK TO piece")
            raise RowsRefused(str(error)) from error
        self._db.execute("RELEASE piece")

    # Reading back

    def contents(self) -> tuple[Applied | None, Iterator[pa.Table]]:
        with _translated():
            self._db.execute("BEGIN")
            return self.read_applied(), self._pieces()

    def _pieces(self) -> Iterator[pa.Table]:
        try:
            with _translated():
                cursor = self._db.execute(
                    f"SELECT {_list(self.shape.schema.names)} FROM {quoted(self.table)}"
                )
                while rows := cursor.fetchmany(PIECE_ROWS):
                    yield self._table(rows)
        finally:
            self._db.execute("COMMIT")

    def lookup(self, keys: pa.Table) -> pa.Table:
        query = (
            f"SELECT {_list(self.shape.schema.names)} FROM {quoted(self.table)} WHERE"
            f" ({_list(self.shape.key)}) = ({', '.join('?' * len(self.shape.key))})"
        )
        with _translated():
            found = [
                row
                for values in _values(keys.select(list(self.shape.key)))
                for row in self._db.execute(query, values)
            ]
        return self._table(found)

    def _table(self, rows: list[tuple[Any, ...]]) -> pa.Table:
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(self.shape.schema)
        return pa.table(
            [
                from_values(list(values), each.type)
                for values, each in zip(columns, self.shape.schema, strict=True)
            ],
            schema=self.shape.schema,
        )


def _values(rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    columns = [to_values(column.combine_chunks()) for column in rows.columns]
    return zip(*columns, strict=True)
