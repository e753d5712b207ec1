"""The target `sqlite`: a table of an SQLite database.

One SQL transaction contains the rows of a batch and the checkpoint, which is a row of the table
`_headrace_sinks`. `BEGIN IMMEDIATE` locks the database, so that two processes take turns, and the
older one then finds that it is not the owner any more.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import pyarrow as pa

from headrace.errors import ConfigurationError, TargetMismatch, TargetUnavailable, nearest
from headrace.sinks.base import (
    READ_ROWS,
    Refusal,
    RowsRefused,
    SinkSpec,
    Target,
    bisect_refused,
    convert_readable,
    refuse_unreadable,
)
from headrace.sinks.batch import SinkBatch, TargetShape
from headrace.sinks.checkpoint import SinkCheckpoint
from headrace.types.schema import quote_identifier
from headrace.types.sqlite_codec import affinity, from_values, to_values

CHECKPOINT_TABLE = "_headrace_sinks"
BUSY_S = 30.0
_REFUSALS = (sqlite3.IntegrityError, sqlite3.DataError, OverflowError)


def _identifiers(names: Sequence[str]) -> str:
    return ", ".join(map(quote_identifier, names))


@contextmanager
def _driver_errors() -> Iterator[None]:
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
                "check the path. If the file is damaged, move it away and keep it; a new file is"
                " filled with what the topic has."
            ),
        ) from error


class SqliteTarget(Target):
    def __init__(self, sink: SinkSpec, shape: TargetShape, db: sqlite3.Connection) -> None:
        super().__init__(sink, shape)
        self._db = db

    @classmethod
    def open(cls, sink: SinkSpec, shape: TargetShape) -> Self:
        """Connect to the database; the file is created if it is missing."""
        with _driver_errors():
            db = sqlite3.connect(
                sink.options["path"], timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
        return cls(sink, shape, db)

    def close(self) -> None:
        self._db.close()

    # The table

    def prepare(self) -> None:
        with _driver_errors(), self._transaction():
            self._db.execute(
                f"CREATE TABLE IF NOT EXISTS {CHECKPOINT_TABLE} (target TEXT PRIMARY KEY, applied"
                " TEXT NOT"
                " NULL)"
            )
            existing = self._column_names()
            if not existing:
                self._create()
                return
            for field in self.shape.schema:
                if field.name not in existing:
                    self._add_column(field, existing)
            if not self._has_unique_key():
                raise TargetMismatch(
                    f"The table {self.table!r} has no primary key or unique index on"
                    f" {', '.join(self.shape.key)}, by which it would be merged.",
                    fix=(
                        f"CREATE UNIQUE INDEX {quote_identifier(f'{self.table}_key')} ON"
                        f" {quote_identifier(self.table)}"
                        f" ({_identifiers(self.shape.key)})"
                    ),
                )

    def _column_names(self) -> list[str]:
        return [
            row[0]
            for row in self._db.execute("SELECT name FROM pragma_table_info(?)", (self.table,))
        ]

    def _create(self) -> None:
        columns = ", ".join(
            f"{quote_identifier(field.name)} {affinity(field.type)}" for field in self.shape.schema
        )
        key = _identifiers(self.shape.key)
        statement = f"CREATE TABLE {quote_identifier(self.table)} ({columns}, PRIMARY KEY ({key}))"
        if not self.sink.create:
            raise TargetMismatch(
                f"There is no table {self.table!r} in {self.sink.options['path']}.",
                fix=f"create=True (leave out --no-create), or: {statement}",
            )
        self._db.execute(statement)
        self._db.execute(
            f"DELETE FROM {CHECKPOINT_TABLE} WHERE target = ?", (self.table,)
        )  # a table that was dropped is filled from the beginning

    def _add_column(self, column: pa.Field, existing: list[str]) -> None:
        statement = (
            f"ALTER TABLE {quote_identifier(self.table)} ADD COLUMN {quote_identifier(column.name)}"
            f" {affinity(column.type)}"
        )
        if not self.sink.create:
            raise TargetMismatch(
                f"The table {self.table!r} has no column {column.name!r}:"
                f" {nearest(column.name, existing)}",
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
            'SELECT name FROM pragma_index_list(?) WHERE "unique" AND NOT partial',
            (self.table,),
        ).fetchall()
        unique_keys = [
            {row[0] for row in self._db.execute("SELECT name FROM pragma_index_info(?)", index)}
            for index in indexes
        ]
        return set(self.shape.key) in [primary, *unique_keys]

    # A commit

    @contextmanager
    def atomic(self) -> Iterator[None]:
        with _driver_errors(), self._transaction():
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

    def read_checkpoint(self) -> SinkCheckpoint | None:
        row = self._db.execute(
            f"SELECT applied FROM {CHECKPOINT_TABLE} WHERE target = ?", (self.table,)
        ).fetchone()
        return None if row is None else SinkCheckpoint.from_json(row[0])

    def write_checkpoint(self, checkpoint: SinkCheckpoint) -> None:
        self._db.execute(
            f"INSERT OR REPLACE INTO {CHECKPOINT_TABLE} VALUES (?, ?)",
            (self.table, checkpoint.to_json()),
        )

    def merge(self, batch: SinkBatch) -> list[Refusal]:
        refused: list[Refusal] = []
        bisect_refused(batch.deletes, batch.delete_offsets, self._delete, refused)
        bisect_refused(batch.upserts, batch.upsert_offsets, self._upsert, refused)
        return refused

    def clear(self) -> None:
        self._db.execute(f"DELETE FROM {quote_identifier(self.table)}")

    def _delete(self, keys: pa.Table) -> None:
        self._execute_all(
            f"DELETE FROM {quote_identifier(self.table)} WHERE ({_identifiers(self.shape.key)}) ="
            f" ({', '.join('?' * len(self.shape.key))})",
            keys,
        )

    def _upsert(self, rows: pa.Table) -> None:
        names = self.shape.schema.names
        assignments = ", ".join(
            f"{quote_identifier(name)} = excluded.{quote_identifier(name)}"
            for name in self.shape.values
        )
        on_conflict = (
            f"ON CONFLICT ({_identifiers(self.shape.key)}) DO"
            f" {f'UPDATE SET {assignments}' if assignments else 'NOTHING'}"
        )
        self._execute_all(
            f"INSERT INTO {quote_identifier(self.table)} ({_identifiers(names)}) VALUES"
            f" ({', '.join('?' * len(names))}) {on_conflict}",
            rows,
        )

    def _execute_all(self, statement: str, rows: pa.Table) -> None:
        """Execute a statement for each row, in a savepoint: rows that are refused are undone."""
        self._db.execute("SAVEPOINT piece")
        try:
            self._db.executemany(statement, _values(rows))
        except _REFUSALS as error:
            self._db.execute("ROLLBACK TO piece")
            raise RowsRefused(str(error)) from error
        self._db.execute("RELEASE piece")

    # Reading back

    def contents(self) -> tuple[SinkCheckpoint | None, Iterator[pa.Table]]:
        with _driver_errors():
            self._db.execute("BEGIN")
            return self.read_checkpoint(), self._read_chunks()

    def _read_chunks(self) -> Iterator[pa.Table]:
        try:
            with _driver_errors():
                cursor = self._db.execute(
                    f"SELECT {_identifiers(self.shape.schema.names)} FROM"
                    f" {quote_identifier(self.table)}"
                )
                while rows := cursor.fetchmany(READ_ROWS):
                    yield convert_readable(rows, self._table, self.unreadable.add)
        finally:
            self._db.execute("COMMIT")

    def lookup(self, keys: pa.Table) -> pa.Table:
        query = (
            f"SELECT {_identifiers(self.shape.schema.names)} FROM {quote_identifier(self.table)}"
            " WHERE"
            f" ({_identifiers(self.shape.key)}) = ({', '.join('?' * len(self.shape.key))})"
        )
        with _driver_errors():
            rows = [
                row
                for values in _values(keys.select(list(self.shape.key)))
                for row in self._db.execute(query, values)
            ]
        return convert_readable(rows, self._table, refuse_unreadable)

    def _table(self, rows: Sequence[tuple[Any, ...]]) -> pa.Table:
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(self.shape.schema)
        return pa.table(
            [
                from_values(list(values), field.type)
                for values, field in zip(columns, self.shape.schema, strict=True)
            ],
            schema=self.shape.schema,
        )


def _values(rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    columns = [to_values(column.combine_chunks()) for column in rows.columns]
    return zip(*columns, strict=True)
