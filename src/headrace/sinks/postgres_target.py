"""The target `postgres`: a table of a Postgres database. A batch is copied into a staging table and
merged from there by one statement, in one transaction with the ledger row.

The ledger is the table `_headrace_sinks`. Who commits holds an advisory lock for the table, so two
processes that write to it take turns, and the older one then finds that it is not the newest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
from headrace.types.json_codec import json_text
from headrace.types.schema import quoted
from headrace.views.types import is_time_text, nested_array, nested_text, time_text

# Arrow columns as the text that Postgres's COPY reads, the types they are declared with, and the
# way back.
#
# | Arrow (Spark)                   | Postgres                                     |
# |---------------------------------|----------------------------------------------|
# | BOOLEAN, FLOAT, DOUBLE          | boolean, real, double precision              |
# | TINYINT, SMALLINT, INT, BIGINT  | smallint, smallint, integer, bigint          |
# | DECIMAL(p, s)                   | numeric(p, s)                                |
# | STRING, BINARY                  | text, bytea                                  |
# | DATE, TIMESTAMP, TIMESTAMP_NTZ  | date, timestamptz, timestamp                 |
# | TIME                            | time                                         |
# | INTERVAL                        | bigint, microseconds                         |
# | ARRAY, MAP, STRUCT and the like | json, as the log writes it                   |


_PLAIN = {
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


def type_in_postgres(kind: pa.DataType) -> str:
    if kind in _PLAIN:
        return _PLAIN[kind]
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
    """For COPY … (FORMAT csv): nulls are empty, texts are quoted."""
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
    return array if kind in _PLAIN else json_text(array)


def from_postgres(values: list[Any], kind: pa.DataType) -> pa.Array:
    """The column of a type, from what the driver gives (nested ones as text)."""
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

LEDGER = "_headrace_sinks"
CONNECT_S = 10
_STAGE, _KEYS = "pg_temp.headrace_rows", "pg_temp.headrace_keys"
_BAD_ADDRESS = (
    "authentication failed",
    "does not exist",
    "no pg_hba.conf entry",
    "could not translate host name",
    "invalid",
    "no password supplied",
)
_WRONG = (
    "42P01",
    "42703",
    "42501",
    "42804",
    "42P10",
    "3F000",
)  # table, column, privilege, type, key, schema


def _list(names: Sequence[str], prefix: str = "") -> str:
    return ", ".join(prefix + quoted(name) for name in names)


@contextmanager
def translated() -> Iterator[None]:
    """What the driver says, split by what can be done about it."""
    try:
        yield
    except psycopg.Error as error:
        text = str(error).strip()
        if error.sqlstate in _WRONG:
            raise TargetMismatch(
                f"Postgres: {text}",
                fix=(
                    "make the table as the topic needs it, or grant what is missing; then start"
                    " again."
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
    def __init__(self, sink: SinkSpec, shape: Shape) -> None:
        super().__init__(sink, shape)
        self._name = (
            ".".join(map(quoted, sink.table.split("."))) if sink.table else quoted(shape.topic)
        )
        self._is_first_fill = False
        self._db = _connected(sink.options["url"])

    def close(self) -> None:
        self._db.close()

    # What is there

    def prepare(self) -> None:
        with translated(), self._db.transaction():
            self._lock()
            self._make_ledger()
            known = self._columns()
            if known is None:
                self._create()
            else:
                for each in self.shape.schema:
                    if each.name not in known:
                        self._add(each, known)
                self._check_key()
            columns = _list(self.shape.schema.names)
            self._db.execute(
                f"CREATE TEMP TABLE headrace_rows ON COMMIT DELETE ROWS AS SELECT {columns} FROM"
                f" {self._name} WITH NO DATA"
            )
            self._db.execute(
                "CREATE TEMP TABLE headrace_keys ON COMMIT DELETE ROWS AS SELECT"
                f" {_list(self.shape.key)} FROM {self._name} WITH NO DATA"
            )

    def _make_ledger(self) -> None:
        """Only if it is missing: a role that may not make tables can write to one."""
        self._db.execute(
            "SELECT pg_advisory_xact_lock(4871)"
        )  # one for all targets, so that two do not make it at once
        if self._db.execute("SELECT to_regclass(%s) IS NULL", (LEDGER,)).fetchone() == (True,):
            self._change(f"CREATE TABLE {LEDGER} (target text PRIMARY KEY, applied text NOT NULL)")

    def _columns(self) -> list[str] | None:
        """None if there is no table."""
        found = self._db.execute("SELECT to_regclass(%s)::oid", (self._name,)).fetchone()
        if found is None or found[0] is None:
            return None
        return [
            row[0]
            for row in self._db.execute(
                "SELECT attname FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND NOT"
                " attisdropped",
                found,
            )
        ]

    def _create(self) -> None:
        columns = ", ".join(
            f"{quoted(each.name)} {type_in_postgres(each.type)}" for each in self.shape.schema
        )
        statement = f"CREATE TABLE {self._name} ({columns}, PRIMARY KEY ({_list(self.shape.key)}))"
        if not self.sink.create:
            raise TargetMismatch(
                f"There is no table {self.table!r} in the database.",
                fix=f"create=True (leave out --no-create), or: {statement}",
            )
        self._change(statement)
        self._db.execute(
            f"DELETE FROM {LEDGER} WHERE target = %s", (self._name,)
        )  # one that was dropped is filled from the beginning

    def _add(self, column: pa.Field, known: list[str]) -> None:
        statement = (
            f"ALTER TABLE {self._name} ADD COLUMN {quoted(column.name)}"
            f" {type_in_postgres(column.type)}"
        )
        if not self.sink.create:
            raise TargetMismatch(
                f"The table {self.table!r} has no column {column.name!r}:"
                f" {nearest(column.name, known)}",
                fix=f"create=True (leave out --no-create), or: {statement}",
            )
        self._change(statement)

    def _change(self, statement: str) -> None:
        try:
            self._db.execute(statement)
        except psycopg.errors.InsufficientPrivilege as error:
            raise TargetMismatch(
                f"Postgres: {error.diag.message_primary}.",
                fix=(
                    f"as a user who may: {statement}; and GRANT SELECT, INSERT, UPDATE, DELETE on"
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
                f" {', '.join(self.shape.key)}, by which it is to be merged.",
                fix=f"ALTER TABLE {self._name} ADD PRIMARY KEY ({_list(self.shape.key)})",
            )

    def begin(self, owner: int, *, resume: bool = False, start_over: bool = False) -> Applied:
        mine = super().begin(owner, resume=resume, start_over=start_over)
        self._is_first_fill = not mine.positions
        return mine

    # A commit

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with translated(), self._db.transaction():
            self._lock()
            yield

    def _lock(self) -> None:
        self._db.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 4871))", (self._name,))

    def read_applied(self) -> Applied | None:
        row = self._db.execute(
            f"SELECT applied FROM {LEDGER} WHERE target = %s", (self._name,)
        ).fetchone()
        return None if row is None else Applied.from_json(row[0])

    def write_applied(self, applied: Applied) -> None:
        statement = (
            f"INSERT INTO {LEDGER} VALUES (%s, %s) ON CONFLICT (target) DO UPDATE SET applied ="
            " excluded.applied"
        )
        self._db.execute(statement, (self._name, applied.to_json()))

    def clear(self) -> None:
        self._db.execute(f"DELETE FROM {self._name}")

    def merge(self, batch: Batch) -> list[Refusal]:
        refused: list[Refusal] = []
        in_pieces(batch.deletes, batch.delete_places, self._delete, refused)
        in_pieces(batch.upserts, batch.upsert_places, self._upsert, refused)
        return refused

    def _delete(self, keys: pa.Table) -> None:
        same = " AND ".join(
            f"target.{quoted(name)} = gone.{quoted(name)}" for name in self.shape.key
        )
        with self._piece():
            self._copy(_KEYS, keys)
            self._db.execute(
                f"DELETE FROM {self._name} AS target USING {_KEYS} AS gone WHERE {same}"
            )
            self._db.execute(f"TRUNCATE {_KEYS}")

    def _upsert(self, rows: pa.Table) -> None:
        if not (self._is_first_fill and self._copied(rows)):
            self._merged(rows)

    def _copied(self, rows: pa.Table) -> bool:
        """Straight into the table, which is twice as fast, as long as a target that is filled for
        the first time has none of the keys. The first that it has ends that.
        """
        try:
            with self._piece():
                self._copy(self._name, rows)
        except RowsRefused:
            self._is_first_fill = False
        return self._is_first_fill

    def _merged(self, rows: pa.Table) -> None:
        columns = _list(self.shape.schema.names)
        news = ", ".join(f"{quoted(name)} = excluded.{quoted(name)}" for name in self.shape.values)
        on_conflict = (
            f"ON CONFLICT ({_list(self.shape.key)}) DO"
            f" {f'UPDATE SET {news}' if news else 'NOTHING'}"
        )
        with self._piece():
            self._copy(_STAGE, rows)
            self._db.execute(
                f"INSERT INTO {self._name} ({columns}) SELECT {columns} FROM {_STAGE} {on_conflict}"
            )
            self._db.execute(f"TRUNCATE {_STAGE}")

    @contextmanager
    def _piece(self) -> Iterator[None]:
        """A savepoint: what is refused is undone."""
        try:
            with self._db.transaction():
                yield
        except (psycopg.IntegrityError, psycopg.DataError, psycopg.errors.RaiseException) as error:
            raise RowsRefused(str(error.diag.message_primary or error)) from error

    def _copy(self, table: str, rows: pa.Table) -> None:
        with (
            self._db.cursor() as cursor,
            cursor.copy(
                f"COPY {table} ({_list(rows.column_names)}) FROM STDIN (FORMAT csv)"
            ) as copy,
        ):
            copy.write(to_csv(rows))

    # Reading back

    def contents(self) -> tuple[Applied | None, Iterator[pa.Table]]:
        with translated():
            self._db.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            return self.read_applied(), self._pieces()

    def _pieces(self) -> Iterator[pa.Table]:
        """Through a cursor of the server's, which has one snapshot."""
        with translated():
            with self._db.cursor(name="headrace_rows") as cursor:
                cursor.execute(f"SELECT {self._selected()} FROM {self._name} AS target")
                while rows := cursor.fetchmany(PIECE_ROWS):
                    yield self._table(rows)
            self._db.execute("COMMIT")

    def lookup(self, keys: pa.Table) -> pa.Table:
        same = " AND ".join(
            f"target.{quoted(name)} = wanted.{quoted(name)}" for name in self.shape.key
        )
        with translated(), self._db.transaction():
            self._copy(_KEYS, keys.select(list(self.shape.key)))
            return self._table(
                self._db.execute(
                    f"SELECT {self._selected()} FROM {self._name} AS target JOIN {_KEYS} AS wanted"
                    f" ON {same}"
                ).fetchall()
            )

    def _selected(self) -> str:
        return ", ".join(
            f"target.{quoted(each.name)}{'::text' if pa.types.is_nested(each.type) else ''}"
            for each in self.shape.schema
        )

    def _table(self, rows: list[tuple[Any, ...]]) -> pa.Table:
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(self.shape.schema)
        arrays = [
            from_postgres(list(values), each.type)
            for values, each in zip(columns, self.shape.schema, strict=True)
        ]
        return pa.table(arrays, schema=self.shape.schema)


def _connected(url: str) -> psycopg.Connection[Any]:
    try:
        return psycopg.connect(
            url, autocommit=True, connect_timeout=CONNECT_S, application_name="headrace sync"
        )
    except psycopg.Error as error:
        text = str(error).strip()
        if any(word in text for word in _BAD_ADDRESS):
            raise ConfigurationError(
                f"Postgres does not let us in: {text}",
                fix=(
                    "check the URL, the database and the role; a password can stand in PGPASSWORD"
                    " or in ~/.pgpass."
                ),
            ) from error
        raise TargetUnavailable(
            f"Postgres cannot be reached: {text}", fix="start the server, or correct the URL."
        ) from error
