"""The target `postgres`: a table of a Postgres database.

A batch is copied into a staging table and merged from there by one statement, in one transaction
with the checkpoint, which is a row of the table `_headrace_sinks`. A commit holds an advisory lock
for the table, so that two processes take turns, and the older one then finds that it is not the
owner any more.

Types of columns:

    Spark                            Postgres
    BOOLEAN, FLOAT, DOUBLE           boolean, real, double precision
    TINYINT, SMALLINT, INT, BIGINT   smallint, smallint, integer, bigint
    DECIMAL(p, s)                    numeric(p, s)
    STRING, BINARY                   text, bytea
    DATE, TIMESTAMP, TIMESTAMP_NTZ   date, timestamptz, timestamp
    TIME                             time
    INTERVAL                         bigint, microseconds
    ARRAY, MAP, STRUCT, VARIANT      json, as the log writes it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import pyarrow as pa
import pyarrow.csv

from headrace.errors import (
    ConfigurationError,
    MissingExtra,
    TargetMismatch,
    TargetUnavailable,
    nearest,
)
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
from headrace.types.json_codec import json_text
from headrace.types.schema import quote_identifier
from headrace.types.sqlite_codec import is_time_text, nested_array, nested_text, time_text

# Values

_PLAIN_TYPES = {
    pa.bool_(): "boolean",
    pa.int8(): "smallint",
    pa.int16(): "smallint",
    pa.int32(): "integer",
    pa.int64(): "bigint",
    pa.float32(): "real",
    pa.float64(): "double precision",
    pa.string(): "text",
    pa.binary(): "bytea",
    pa.date32(): "date",
}


def postgres_type(kind: pa.DataType) -> str:
    """Return the type of a column in Postgres."""
    if kind in _PLAIN_TYPES:
        return _PLAIN_TYPES[kind]
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision}, {kind.scale})"
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz is None else "timestamptz"
    if pa.types.is_time(kind):
        return "time"
    if pa.types.is_duration(kind):
        return "bigint"
    return "json" if pa.types.is_nested(kind) else "text"


def to_csv(rows: pa.Table) -> memoryview:
    """Return rows as COPY … (FORMAT csv) reads them: nulls are empty, texts are quoted."""
    texts = pa.table(
        [_text(column.combine_chunks()) for column in rows.columns], names=rows.column_names
    )
    buffer = pa.BufferOutputStream()
    pa.csv.write_csv(texts, buffer, pa.csv.WriteOptions(include_header=False))
    return memoryview(buffer.getvalue())


def _text(array: pa.Array) -> pa.Array:
    kind = array.type
    if pa.types.is_binary(kind):
        return pa.array(
            [None if value is None else "\\x" + value.hex() for value in array.to_pylist()],
            pa.string(),
        )
    if is_time_text(kind):
        return time_text(array)
    if pa.types.is_decimal(kind):
        return array.cast(pa.string())
    if pa.types.is_duration(kind):
        return array.cast(pa.int64())
    if pa.types.is_nested(kind):
        return nested_text(array)
    return array if kind in _PLAIN_TYPES else json_text(array)


def from_postgres(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return a column from the values that the driver returns; nested ones are text."""
    if pa.types.is_nested(kind):
        return nested_array(values, kind)
    if pa.types.is_duration(kind):
        return pa.array(values, pa.int64()).cast(kind)
    if pa.types.is_floating(kind):
        return pa.array(values, pa.float64(), from_pandas=False).cast(kind)
    return pa.array(values, kind)


try:
    import psycopg
except ImportError as error:
    raise MissingExtra("psycopg", "postgres") from error

CHECKPOINT_TABLE = "_headrace_sinks"
CONNECT_S = 10
_STAGED_ROWS, _STAGED_KEYS = "pg_temp.headrace_rows", "pg_temp.headrace_keys"
_CONNECTION_REFUSALS = (
    "authentication failed",
    "does not exist",
    "no pg_hba.conf entry",
    "could not translate host name",
    "invalid",
    "no password supplied",
)
_MISMATCH_STATES = (
    "42P01",
    "42703",
    "42501",
    "42804",
    "42P10",
    "3F000",
)  # table, column, privilege, type, key, schema


def _identifiers(names: Sequence[str], prefix: str = "") -> str:
    return ", ".join(prefix + quote_identifier(name) for name in names)


@contextmanager
def driver_errors() -> Iterator[None]:
    """Translate the driver's errors by what can be done about them."""
    try:
        yield
    except psycopg.Error as error:
        text = str(error).strip()
        if error.sqlstate in _MISMATCH_STATES:
            raise TargetMismatch(
                f"Postgres: {text}",
                fix=(
                    "make the table as the topic needs it, or grant the missing privilege; then"
                    " start"
                    " the sink again."
                ),
            ) from error
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            raise TargetUnavailable(
                f"Postgres: {text}", fix="see that the server runs, can be reached and has room."
            ) from error
        raise ConfigurationError(
            f"Postgres: {text}", fix="see what the server's log says about it."
        ) from error


class PostgresTarget(Target):
    def __init__(self, sink: SinkSpec, shape: TargetShape, db: Any) -> None:
        super().__init__(sink, shape)
        self._name = (
            ".".join(map(quote_identifier, sink.table.split(".")))
            if sink.table
            else quote_identifier(shape.topic)
        )
        self._is_first_fill = False
        self._db = db

    @classmethod
    def open(cls, sink: SinkSpec, shape: TargetShape) -> Self:
        """Connect to the database."""
        return cls(sink, shape, _connect(sink.options["url"]))

    def close(self) -> None:
        self._db.close()

    # The table

    def prepare(self) -> None:
        with driver_errors(), self._db.transaction():
            self._lock()
            # Create the table if it is missing. The check comes first, so that a role that may not
            # create tables can use an existing one.
            self._db.execute(
                "SELECT pg_advisory_xact_lock(4871)"
            )  # one lock for all targets, so that two do not create it at once
            if self._db.execute(
                "SELECT to_regclass(%s) IS NULL", (CHECKPOINT_TABLE,)
            ).fetchone() == (True,):
                self._execute_ddl(
                    f"CREATE TABLE {CHECKPOINT_TABLE} (target text PRIMARY KEY, applied text NOT"
                    " NULL)"
                )
            existing = self._column_names()
            if existing is None:
                self._create()
            else:
                for field in self.shape.schema:
                    if field.name not in existing:
                        self._add_column(field, existing)
                self._check_key()
            columns = _identifiers(self.shape.schema.names)
            self._db.execute(
                f"CREATE TEMP TABLE headrace_rows ON COMMIT DELETE ROWS AS SELECT {columns} FROM"
                f" {self._name} WITH NO DATA"
            )
            self._db.execute(
                "CREATE TEMP TABLE headrace_keys ON COMMIT DELETE ROWS AS SELECT"
                f" {_identifiers(self.shape.key)} FROM {self._name} WITH NO DATA"
            )

    def _column_names(self) -> list[str] | None:
        """Return the table's columns; None if there is no table."""
        table_oid = self._db.execute("SELECT to_regclass(%s)::oid", (self._name,)).fetchone()
        if table_oid is None or table_oid[0] is None:
            return None
        return [
            row[0]
            for row in self._db.execute(
                "SELECT attname FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND NOT"
                " attisdropped",
                table_oid,
            )
        ]

    def _create(self) -> None:
        columns = ", ".join(
            f"{quote_identifier(field.name)} {postgres_type(field.type)}"
            for field in self.shape.schema
        )
        statement = (
            f"CREATE TABLE {self._name} ({columns}, PRIMARY KEY ({_identifiers(self.shape.key)}))"
        )
        if not self.sink.create:
            raise TargetMismatch(
                f"There is no table {self.table!r} in the database.",
                fix=f"create=True (leave out --no-create), or: {statement}",
            )
        self._execute_ddl(statement)
        self._db.execute(
            f"DELETE FROM {CHECKPOINT_TABLE} WHERE target = %s", (self._name,)
        )  # a table that was dropped is filled from the beginning

    def _add_column(self, column: pa.Field, existing: list[str]) -> None:
        statement = (
            f"ALTER TABLE {self._name} ADD COLUMN {quote_identifier(column.name)}"
            f" {postgres_type(column.type)}"
        )
        if not self.sink.create:
            raise TargetMismatch(
                f"The table {self.table!r} has no column {column.name!r}:"
                f" {nearest(column.name, existing)}",
                fix=f"create=True (leave out --no-create), or: {statement}",
            )
        self._execute_ddl(statement)

    def _execute_ddl(self, statement: str) -> None:
        try:
            self._db.execute(statement)
        except psycopg.errors.InsufficientPrivilege as error:
            raise TargetMismatch(
                f"Postgres: {error.diag.message_primary}.",
                fix=(
                    f"as a role that may, run: {statement}; and GRANT SELECT, INSERT, UPDATE,"
                    " DELETE on"
                    " it to this one."
                ),
            ) from error

    def _check_key(self) -> None:
        query = (
            "SELECT array_agg(attname::text) FROM pg_index JOIN pg_attribute ON attrelid = indrelid"
            " AND attnum = ANY (indkey) WHERE indrelid = %s::regclass AND indisunique AND"
            " indimmediate AND indpred IS NULL AND indexprs IS NULL GROUP BY indexrelid"
        )
        if set(self.shape.key) not in [
            set(row[0]) for row in self._db.execute(query, (self._name,))
        ]:
            raise TargetMismatch(
                f"The table {self.table!r} has no primary key or unique index on"
                f" {', '.join(self.shape.key)}, by which it would be merged.",
                fix=f"ALTER TABLE {self._name} ADD PRIMARY KEY ({_identifiers(self.shape.key)})",
            )

    def begin(
        self, owner: int, *, resume: bool = False, start_over: bool = False
    ) -> SinkCheckpoint:
        checkpoint = super().begin(owner, resume=resume, start_over=start_over)
        self._is_first_fill = not checkpoint.positions
        return checkpoint

    # A commit

    @contextmanager
    def atomic(self) -> Iterator[None]:
        with driver_errors(), self._db.transaction():
            self._lock()
            yield

    def _lock(self) -> None:
        self._db.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 4871))", (self._name,))

    def read_checkpoint(self) -> SinkCheckpoint | None:
        row = self._db.execute(
            f"SELECT applied FROM {CHECKPOINT_TABLE} WHERE target = %s", (self._name,)
        ).fetchone()
        return None if row is None else SinkCheckpoint.from_json(row[0])

    def write_checkpoint(self, checkpoint: SinkCheckpoint) -> None:
        statement = (
            f"INSERT INTO {CHECKPOINT_TABLE} VALUES (%s, %s) ON CONFLICT (target) DO UPDATE SET"
            " applied ="
            " excluded.applied"
        )
        self._db.execute(statement, (self._name, checkpoint.to_json()))

    def clear(self) -> None:
        self._db.execute(f"DELETE FROM {self._name}")

    def merge(self, batch: SinkBatch) -> list[Refusal]:
        refused: list[Refusal] = []
        bisect_refused(batch.deletes, batch.delete_offsets, self._delete, refused)
        bisect_refused(batch.upserts, batch.upsert_offsets, self._upsert, refused)
        return refused

    def _delete(self, keys: pa.Table) -> None:
        same = " AND ".join(
            f"target.{quote_identifier(name)} = gone.{quote_identifier(name)}"
            for name in self.shape.key
        )
        with self._savepoint():
            self._copy(_STAGED_KEYS, keys)
            self._db.execute(
                f"DELETE FROM {self._name} AS target USING {_STAGED_KEYS} AS gone WHERE {same}"
            )
            self._db.execute(f"TRUNCATE {_STAGED_KEYS}")

    def _upsert(self, rows: pa.Table) -> None:
        if not (self._is_first_fill and self._copy_into_table(rows)):
            self._merge_from_staging(rows)

    def _copy_into_table(self, rows: pa.Table) -> bool:
        """Copy rows straight into the table, which is twice as fast as merging. That works while a
        target is filled for the first time, until the first key that it has already.
        """
        try:
            with self._savepoint():
                self._copy(self._name, rows)
        except RowsRefused:
            self._is_first_fill = False
        return self._is_first_fill

    def _merge_from_staging(self, rows: pa.Table) -> None:
        columns = _identifiers(self.shape.schema.names)
        assignments = ", ".join(
            f"{quote_identifier(name)} = excluded.{quote_identifier(name)}"
            for name in self.shape.values
        )
        on_conflict = (
            f"ON CONFLICT ({_identifiers(self.shape.key)}) DO"
            f" {f'UPDATE SET {assignments}' if assignments else 'NOTHING'}"
        )
        with self._savepoint():
            self._copy(_STAGED_ROWS, rows)
            self._db.execute(
                f"INSERT INTO {self._name} ({columns}) SELECT {columns} FROM {_STAGED_ROWS}"
                f" {on_conflict}"
            )
            self._db.execute(f"TRUNCATE {_STAGED_ROWS}")

    @contextmanager
    def _savepoint(self) -> Iterator[None]:
        """Return a context whose changes are undone if the rows are refused."""
        try:
            with self._db.transaction():
                yield
        except (psycopg.IntegrityError, psycopg.DataError, psycopg.errors.RaiseException) as error:
            raise RowsRefused(str(error.diag.message_primary or error)) from error

    def _copy(self, table: str, rows: pa.Table) -> None:
        with (
            self._db.cursor() as cursor,
            cursor.copy(
                f"COPY {table} ({_identifiers(rows.column_names)}) FROM STDIN (FORMAT csv)"
            ) as copy,
        ):
            copy.write(to_csv(rows))

    # Reading back

    def contents(self) -> tuple[SinkCheckpoint | None, Iterator[pa.Table]]:
        with driver_errors():
            self._db.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            return self.read_checkpoint(), self._read_chunks()

    def _read_chunks(self) -> Iterator[pa.Table]:
        """Yield all rows through a server-side cursor, which has one snapshot."""
        with driver_errors():
            with self._db.cursor(name="headrace_rows") as cursor:
                cursor.execute(f"SELECT {self._select_list()} FROM {self._name} AS target")
                while rows := cursor.fetchmany(READ_ROWS):
                    yield convert_readable(rows, self._table, self.unreadable.add)
            self._db.execute("COMMIT")

    def lookup(self, keys: pa.Table) -> pa.Table:
        same = " AND ".join(
            f"target.{quote_identifier(name)} = wanted.{quote_identifier(name)}"
            for name in self.shape.key
        )
        with driver_errors(), self._db.transaction():
            self._copy(_STAGED_KEYS, keys.select(list(self.shape.key)))
            rows = self._db.execute(
                f"SELECT {self._select_list()} FROM {self._name} AS target JOIN {_STAGED_KEYS}"
                f" AS wanted ON {same}"
            ).fetchall()
            return convert_readable(rows, self._table, refuse_unreadable)

    def _select_list(self) -> str:
        names = []
        for field in self.shape.schema:
            cast = "::text" if pa.types.is_nested(field.type) else ""
            names.append(f"target.{quote_identifier(field.name)}{cast}")
        return ", ".join(names)

    def _table(self, rows: Sequence[tuple[Any, ...]]) -> pa.Table:
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(self.shape.schema)
        arrays = [
            from_postgres(list(values), field.type)
            for values, field in zip(columns, self.shape.schema, strict=True)
        ]
        return pa.table(arrays, schema=self.shape.schema)


def _connect(url: str) -> psycopg.Connection[Any]:
    try:
        return psycopg.connect(
            url, autocommit=True, connect_timeout=CONNECT_S, application_name="headrace sync"
        )
    except psycopg.Error as error:
        text = str(error).strip()
        if any(word in text for word in _CONNECTION_REFUSALS):
            raise ConfigurationError(
                f"Postgres refuses the connection: {text}",
                fix=(
                    "check the URL, the database and the role; a password can be in PGPASSWORD or"
                    " in"
                    " ~/.pgpass."
                ),
            ) from error
        raise TargetUnavailable(
            f"Postgres cannot be reached: {text}", fix="start the server, or correct the URL."
        ) from error
