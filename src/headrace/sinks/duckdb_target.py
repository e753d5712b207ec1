"""The target `duckdb`: a table of a DuckDB database file.

One transaction contains the rows of a batch and the checkpoint, which is a row of the table
`_headrace_sinks`. DuckDB lets one process open a file for writing, and nobody else meanwhile; so
the file is open only while a batch is applied, and others can read it in between.

DuckDB has no savepoints: when it refuses a batch, the rows that are to blame are found in
transactions that are rolled back, and the batch is applied without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from headrace.errors import (
    ConfigurationError,
    TargetMismatch,
    TargetRefuses,
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
)
from headrace.sinks.batch import SinkBatch, TargetShape
from headrace.sinks.checkpoint import SinkCheckpoint
from headrace.types.schema import quote_identifier

CHECKPOINT_TABLE = "_headrace_sinks"
_ROWS = "_headrace_rows"
_REFUSALS = (
    duckdb.ConstraintException,
    duckdb.ConversionException,
    duckdb.OutOfRangeException,
    duckdb.InvalidInputException,
)


@contextmanager
def _driver_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (duckdb.IOException, duckdb.TransactionException, duckdb.OutOfMemoryException) as error:
        if "not a valid DuckDB database" in str(error):
            raise ConfigurationError(
                f"{path} is not a DuckDB database: {error}.",
                fix="check the path. If the file is damaged, move it away and keep it.",
            ) from error
        raise TargetUnavailable(
            f"DuckDB: {error}.",
            fix=(
                "see that the file can be written, that there is room, and that no other program"
                " keeps it open."
            ),
        ) from error
    except duckdb.Error as error:
        raise ConfigurationError(
            f"DuckDB: {error}.", fix="see what the table and its constraints expect."
        ) from error


class DuckdbTarget(Target):
    def __init__(self, sink: SinkSpec, shape: TargetShape) -> None:
        super().__init__(sink, shape)
        self.path = Path(sink.options["path"])
        self._schema = pa.schema(
            [pa.field(field.name, _stored_type(field.type)) for field in shape.schema]
        )
        self._db: Any = None
        """Open inside a commit, and while rows are read."""

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    @contextmanager
    def _transaction(self, *, read_only: bool = False) -> Iterator[None]:
        """Open the file, and make one transaction."""
        with _driver_errors(self.path):
            self._connect(read_only=read_only)
            try:
                self._db.execute("BEGIN")
                yield
                self._db.execute("COMMIT")
            finally:
                self.close()  # what is not committed is rolled back

    def _connect(self, *, read_only: bool) -> None:
        if read_only and not self.path.exists():
            raise TargetMismatch(
                f"There is no file {self.path}.",
                fix="create=True (leave out --no-create), or correct the path.",
            )
        try:
            self._db = duckdb.connect(self.path, read_only=read_only)
        except duckdb.ConnectionException:  # this process has it open in the other way
            self._db = duckdb.connect(self.path, read_only=not read_only)
        self._db.execute("SET TimeZone = 'UTC'")

    # The table

    def prepare(self) -> None:
        with self._transaction(read_only=not self.sink.create):
            existing = self._column_types()
            if self.sink.create:
                self._db.execute(
                    f"CREATE TABLE IF NOT EXISTS {CHECKPOINT_TABLE}"
                    " (target VARCHAR PRIMARY KEY, applied VARCHAR NOT NULL)"
                )
            if not existing:
                self._create()
                return
            expected = self._expected_types()
            for name, kind in expected.items():
                if name not in existing:
                    self._add_column(name, kind, existing)
                elif existing[name] != kind:
                    raise TargetMismatch(
                        f"The column {name!r} of the table {self.table!r} has the type"
                        f" {existing[name]}; the topic's is {kind}.",
                        fix=(
                            f"ALTER TABLE {quote_identifier(self.table)} ALTER"
                            f" {quote_identifier(name)} TYPE {kind}; or choose another table with"
                            " table=… (--table …)."
                        ),
                    )

    def _column_types(self) -> dict[str, str]:
        try:
            rows = self._db.execute(
                "SELECT name, type FROM pragma_table_info(?)", [quote_identifier(self.table)]
            ).fetchall()
        except duckdb.CatalogException:
            return {}
        return dict(rows)

    def _expected_types(self) -> dict[str, str]:
        with self._registered(self._schema.empty_table()):
            described = self._db.execute(f"DESCRIBE SELECT * FROM {_ROWS}").fetchall()
        return {row[0]: row[1] for row in described}

    def _create(self) -> None:
        columns = ", ".join(
            f"{quote_identifier(name)} {kind}" for name, kind in self._expected_types().items()
        )
        statement = f"CREATE TABLE {quote_identifier(self.table)} ({columns})"
        if not self.sink.create:
            raise TargetMismatch(
                f"There is no table {self.table!r} in {self.path}.",
                fix=f"create=True (leave out --no-create), or: {statement}",
            )
        self._db.execute(statement)
        # A table that was dropped is filled from the beginning.
        self._db.execute(f"DELETE FROM {CHECKPOINT_TABLE} WHERE target = ?", [self.table])

    def _add_column(self, name: str, kind: str, existing: dict[str, str]) -> None:
        statement = (
            f"ALTER TABLE {quote_identifier(self.table)} ADD COLUMN {quote_identifier(name)} {kind}"
        )
        if not self.sink.create:
            raise TargetMismatch(
                f"The table {self.table!r} has no column {name!r}: {nearest(name, existing)}",
                fix=f"create=True (leave out --no-create), or: {statement}",
            )
        self._db.execute(statement)

    # A commit

    @contextmanager
    def atomic(self) -> Iterator[None]:
        with self._transaction():
            yield

    def read_checkpoint(self) -> SinkCheckpoint | None:
        try:
            row = self._db.execute(
                f"SELECT applied FROM {CHECKPOINT_TABLE} WHERE target = ?", [self.table]
            ).fetchone()
        except duckdb.CatalogException:  # a table that no sink has written to
            return None
        return None if row is None else SinkCheckpoint.from_json(row[0])

    def write_checkpoint(self, checkpoint: SinkCheckpoint) -> None:
        self._db.execute(
            f"INSERT OR REPLACE INTO {CHECKPOINT_TABLE} VALUES (?, ?)",
            [self.table, checkpoint.to_json()],
        )

    def clear(self) -> None:
        self._db.execute(f"DELETE FROM {quote_identifier(self.table)}")

    def merge(self, batch: SinkBatch) -> list[Refusal]:
        before = self.read_checkpoint()
        try:
            self._write(batch.deletes, batch.upserts)
        except _REFUSALS as error:
            return self._merge_accepted(batch, before, str(error))
        return []

    def _merge_accepted(
        self, batch: SinkBatch, before: SinkCheckpoint | None, reason: str
    ) -> list[Refusal]:
        """Apply a batch without the rows that are refused, in a new transaction."""
        refused: list[Refusal] = []

        def attempt(deletes: pa.Table, upserts: pa.Table) -> None:
            self._restart()
            try:
                self._write(deletes, upserts)
            except _REFUSALS as error:
                raise RowsRefused(str(error)) from error

        none = batch.upserts.slice(0, 0)
        bisect_refused(
            batch.deletes, batch.delete_offsets, lambda rows: attempt(rows, none), refused
        )
        deletes = _accepted(batch.deletes, batch.delete_offsets, refused)
        bisect_refused(
            batch.upserts, batch.upsert_offsets, lambda rows: attempt(deletes, rows), refused
        )
        upserts = _accepted(batch.upserts, batch.upsert_offsets, refused)
        self._restart()
        if self.read_checkpoint() != before:
            raise TargetUnavailable(
                "Another process has written to the table meanwhile.",
                fix="nothing: its checkpoint is read again.",
            )
        try:
            self._write(deletes, upserts)
        except _REFUSALS as error:
            raise TargetRefuses(
                f"DuckDB refuses rows together that it takes one by one: {reason}",
                fix="drop the table's further unique indexes. Nothing of this batch was applied.",
            ) from error
        return refused

    def _restart(self) -> None:
        """Roll back, and begin another transaction."""
        with suppress(duckdb.TransactionException):  # an error may have rolled it back
            self._db.execute("ROLLBACK")
        self._db.execute("BEGIN")

    def _write(self, deletes: pa.Table, upserts: pa.Table) -> None:
        table = quote_identifier(self.table)
        same = " AND ".join(
            f"target.{quote_identifier(name)} = source.{quote_identifier(name)}"
            for name in self.shape.key
        )
        if deletes.num_rows:
            with self._registered(self._stored(deletes)):
                self._db.execute(
                    f"DELETE FROM {table} AS target USING {_ROWS} AS source WHERE {same}"
                )
        if not upserts.num_rows:
            return
        names = [quote_identifier(name) for name in self.shape.schema.names]
        insert = f"({', '.join(names)}) VALUES ({', '.join(f'source.{name}' for name in names)})"
        updates = ", ".join(
            f"{quote_identifier(name)} = source.{quote_identifier(name)}"
            for name in self.shape.values
        )
        update = f"WHEN MATCHED THEN UPDATE SET {updates}" if updates else ""
        with self._registered(self._stored(upserts)):
            if self.shape.is_merge:
                self._db.execute(
                    f"MERGE INTO {table} AS target USING {_ROWS} AS source ON {same}"
                    f" {update} WHEN NOT MATCHED THEN INSERT {insert}"
                )
            else:
                self._db.execute(
                    f"INSERT INTO {table} ({', '.join(names)}) SELECT {', '.join(names)}"
                    f" FROM {_ROWS}"
                )

    def _stored(self, rows: pa.Table) -> pa.Table:
        fields = [self._schema.field(name) for name in rows.column_names]
        return rows.cast(pa.schema(fields))

    @contextmanager
    def _registered(self, rows: pa.Table) -> Iterator[None]:
        """Make rows a table of the connection, under the name `_ROWS`."""
        self._db.register(_ROWS, rows)
        try:
            yield
        finally:
            with suppress(duckdb.Error):  # after an error that ends the transaction
                self._db.unregister(_ROWS)

    # Reading back

    def contents(self) -> tuple[SinkCheckpoint | None, Iterator[pa.Table]]:
        with _driver_errors(self.path):
            self._connect(read_only=True)
            self._db.execute("BEGIN")
            return self.read_checkpoint(), self._read_chunks()

    def _read_chunks(self) -> Iterator[pa.Table]:
        try:
            with _driver_errors(self.path):
                reader = self._select("", READ_ROWS)
                for batch in reader:
                    yield self._restored(pa.Table.from_batches([batch]))
        finally:
            self.close()

    def lookup(self, keys: pa.Table) -> pa.Table:
        with self._transaction(), self._registered(self._stored(keys)):
            key: Sequence[str] = [quote_identifier(name) for name in self.shape.key]
            joined = f"SEMI JOIN {_ROWS} USING ({', '.join(key)})"
            return self._restored(self._select(joined, READ_ROWS).read_all())

    def _select(self, clause: str, batch_rows: int) -> pa.RecordBatchReader:
        names = ", ".join(map(quote_identifier, self.shape.schema.names))
        query = f"SELECT {names} FROM {quote_identifier(self.table)} {clause}"
        return self._db.execute(query).to_arrow_reader(batch_rows)

    def _restored(self, rows: pa.Table) -> pa.Table:
        return rows.cast(self.shape.schema)


def _accepted(rows: pa.Table, offsets: pa.Table, refused: Sequence[Refusal]) -> pa.Table:
    """Return the rows that are not among the refused ones."""
    named = {(row.partition, row.offset) for row in refused}
    locations = zip(*(column.to_pylist() for column in offsets.columns), strict=True)
    return rows.filter(pa.array([location not in named for location in locations], pa.bool_()))


def _stored_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column in DuckDB. Its INTERVAL has months and days, which would not come
    back as they were: durations are stored as microseconds.
    """
    return pa.int64() if pa.types.is_duration(kind) else kind
