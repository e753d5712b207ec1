"""Chunks of a snapshot: rows of a table in the order of its key, and where they belong into the
stream.

They are read without a lock. MariaDB says exactly where in the binlog a consistent read is. MySQL
does not: there a chunk is read when everything is visible that the stream has delivered (by its
GTIDs), and inserted where the binlog ends afterwards. Rows that changed in between, which the
stream has too, are left out of it. This is the algorithm of Netflix's DBLog.

    stream         … 5 inserted … | chunk 1–100 … 7 deleted …
                                  ^ the position at which the chunk was read
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from headrace.cdc.base import ChunkRequest, Marks, SnapshotChunk, marks_column
from headrace.cdc.mysql_source.binlog import binlog_position
from headrace.cdc.mysql_source.catalogue import (
    MysqlCatalogue,
    MysqlTable,
    driver_errors,
    drivers,
    format_mysql_gtids,
)
from headrace.cdc.mysql_source.column_type import quoted, selected_values, to_array
from headrace.columnar.columns import HIDDEN_FIELDS, INSERT, MARKS, POSITION
from headrace.errors import ConfigurationError

_CHANGED_MEANWHILE = {1054, 1146, 1412}
"""The table was altered or dropped after the chunk's transaction had begun."""


@dataclass
class MysqlChunk:
    """A chunk, and where it is inserted into the stream."""

    position: int
    """The position in the binlog."""
    table: MysqlTable
    """The table as it was when the chunk was read."""
    chunk: SnapshotChunk
    sees_position_exactly: bool
    """Whether the chunk contains exactly the changes in front of the position."""
    touched: list[pa.RecordBatch] = field(default_factory=list)
    """Changes in front of the position that the chunk may or may not contain."""
    is_stale: bool = False
    """Whether the table was rewritten while the chunk was read, so that it must be read again."""

    def without_touched(self) -> SnapshotChunk:
        """Return the chunk without rows that the stream changed while it was read."""
        if not self.touched:
            return self.chunk
        key = list(self.table.shape.key)
        rows = pa.Table.from_batches([self.chunk.rows])
        numbered = rows.select(key).append_column("__n", pa.array(range(rows.num_rows), pa.int64()))
        untouched = numbered.join(
            pa.Table.from_batches([batch.select(key) for batch in self.touched]),
            key,
            join_type="left anti",
        )["__n"].sort()
        (batch,) = rows.take(untouched).combine_chunks().to_batches() or [
            self.chunk.rows.slice(0, 0)
        ]
        return replace(self.chunk, rows=batch)

    def without_rows(self) -> SnapshotChunk:
        """Return an empty chunk, after which the same rows are requested again."""
        return replace(self.chunk, rows=self.chunk.rows.slice(0, 0), after=None, is_last=False)


class MysqlChunkReader:
    """Reads chunks over a connection of its own."""

    def __init__(self, connection: Any, database: str) -> None:
        self.connection = connection
        self.catalogue = MysqlCatalogue(connection, database)

    def read(
        self,
        request: ChunkRequest,
        *,
        consumed: int,
        gtids: Mapping[str, str],
        committed: Collection[str],
    ) -> MysqlChunk | None:
        """Read a chunk; None if it does not yet see all that the stream has delivered (a commit
        becomes visible a moment after it is sent), or if the table is being altered.

        Args:
            request: Which rows.
            consumed: The position up to which the stream has delivered.
            gtids: The transactions that the stream has delivered.
            committed: The XA transactions whose commit the stream has delivered lately.
        """
        pymysql, _ = drivers()
        try:
            if self.catalogue.is_mariadb:
                return self._read_mariadb(request, consumed, committed)
            return self._read_mysql(request, gtids)
        except (ConfigurationError, pymysql.err.Error) as error:
            cause = error.__cause__ if isinstance(error, ConfigurationError) else error
            if cause is not None and cause.args and cause.args[0] in _CHANGED_MEANWHILE:
                return None
            raise

    def _read_mysql(self, request: ChunkRequest, gtids: Mapping[str, str]) -> MysqlChunk | None:
        """Read a chunk of MySQL, which adds a transaction's GTID to those executed when the
        transaction becomes visible, and writes it to the binlog before.
        """
        if not self.catalogue.has_gtids:
            raise ConfigurationError(
                "A snapshot of MySQL needs GTIDs, to know what it sees, but the server's gtid_mode"
                " is not ON.",
                fix=(
                    "SET GLOBAL enforce_gtid_consistency = ON; then gtid_mode = OFF_PERMISSIVE,"
                    " ON_PERMISSIVE, ON, one after the other; or capture changes only, with"
                    " snapshot=False."
                ),
            )
        delivered = format_mysql_gtids(gtids)
        ((is_visible,),) = self.catalogue.query(
            "SELECT GTID_SUBSET(%s, @@global.gtid_executed)", delivered
        )
        if int(is_visible) != 1:
            return None
        with driver_errors(), self.connection.cursor() as cursor:
            cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
            try:
                table, rows = self._select(cursor, request)
            finally:
                cursor.execute("ROLLBACK")
        position = binlog_position(*self.catalogue.end())
        return self._chunk(table, rows, request, position, is_exact=False)

    def _read_mariadb(
        self, request: ChunkRequest, consumed: int, committed: Collection[str]
    ) -> MysqlChunk | None:
        if committed:
            prepared = {
                f"{raw[: int(gtrid)].hex()},{raw[int(gtrid) :].hex()},{int(form)}"
                for form, gtrid, _, data in self.catalogue.query("XA RECOVER")
                for raw in [data if isinstance(data, bytes) else str(data).encode()]
            }
            if prepared & set(committed):
                return None
        with driver_errors(), self.connection.cursor() as cursor:
            cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
            try:
                cursor.execute("SHOW STATUS LIKE 'binlog_snapshot_%%'")
                variables = {name.lower(): value for name, value in cursor.fetchall()}
                position = binlog_position(
                    variables["binlog_snapshot_file"], int(variables["binlog_snapshot_position"])
                )
                if position < consumed:
                    return None
                table, rows = self._select(cursor, request)
            finally:
                cursor.execute("ROLLBACK")
        return self._chunk(table, rows, request, position, is_exact=True)

    def _select(
        self, cursor: Any, request: ChunkRequest
    ) -> tuple[MysqlTable, list[tuple[Any, ...]]]:
        """Return the table, and rows of it: the columns, then the key as `after` of a chunk."""
        table = self.catalogue.table(request.table)
        key = table.key_columns
        condition, parameters = _behind(table, request.after) if request.after else ("1", [])
        selected = [column.selected for column in table.columns]
        selected += [column.selected_key for column in key]
        cursor.execute(
            f"SELECT {', '.join(selected)} FROM {quoted(request.table)} WHERE {condition}"
            f" ORDER BY {', '.join(column.quoted for column in key)} LIMIT {request.rows}",
            parameters,
        )
        return table, [tuple(row) for row in cursor.fetchall()]

    @staticmethod
    def _chunk(
        table: MysqlTable,
        rows: list[tuple[Any, ...]],
        request: ChunkRequest,
        position: int,
        *,
        is_exact: bool,
    ) -> MysqlChunk:
        count = len(table.columns)
        columns = list(zip(*rows, strict=True))[:count] if rows else [()] * count
        values = [
            selected_values(column_values, column)
            for column_values, column in zip(columns, table.columns, strict=True)
        ]
        positions = pa.array([position] * len(rows), pa.int64())
        batch = change_batch(table, values, {POSITION: positions}, [INSERT] * len(rows))
        after = (
            [
                column.key_value(raw)
                for column, raw in zip(table.key_columns, rows[-1][count:], strict=True)
            ]
            if rows
            else None
        )
        is_last = len(rows) < request.rows
        chunk = SnapshotChunk(table.shape.name, batch, after, is_last=is_last)
        return MysqlChunk(position, table, chunk, is_exact)


def _behind(table: MysqlTable, after: Sequence[Any]) -> tuple[str, list[Any]]:
    """Return the condition for rows behind a key: `a > 1 OR (a = 1 AND b > 2)`, in a form in which
    the server can use the key's index.
    """
    compared = [
        (column.selected_key, *column.key_parameter(stored))
        for column, stored in zip(table.key_columns, after, strict=True)
    ]
    choices, parameters = [], []
    for length in range(1, len(compared) + 1):
        terms = []
        for index, (expression, place, value) in enumerate(compared[:length]):
            terms.append(f"{expression} {'>' if index + 1 == length else '='} {place}")
            parameters.append(value)
        choices.append(f"({' AND '.join(terms)})")
    expression, place, value = compared[0]
    return f"{expression} >= {place} AND ({' OR '.join(choices)})", [value, *parameters]


def change_batch(
    table: MysqlTable,
    columns: Sequence[Sequence[Any]],
    hidden: Mapping[str, pa.Array],
    kinds: Sequence[str],
) -> pa.RecordBatch:
    """Return rows as a batch with the table's columns, the hidden ones and the change types. Values
    are in the common form (`column_type`).
    """
    marks: Marks = {}
    arrays = [
        to_array(values, column, name, marks)
        for values, column, (name, _) in zip(
            columns, table.columns, table.shape.columns, strict=True
        )
    ]
    count = len(kinds)
    hidden = {**hidden, MARKS: marks_column(marks, count)}
    arrays += [hidden.get(field.name, pa.nulls(count, field.type)) for field in HIDDEN_FIELDS]
    return pa.RecordBatch.from_arrays(
        [*arrays, pa.array(kinds, pa.string())], schema=table.shape.batch_schema
    )
