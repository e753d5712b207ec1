"""Chunks of a snapshot, read without a lock, and their places in the binlog.

MariaDB says exactly where in the binlog a consistent read stands, so a chunk's place is right behind it. MySQL does not. There a chunk is read when all that the stream has brought can be seen (by its
GTIDs), and placed where the binlog ends after it: rows that changed in between, which the stream has too, are left out of it. This is how Netflix's DBLog does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime
from typing import Any

import pyarrow as pa

from headrace.cdc.mysql_source.binlog import number
from headrace.cdc.mysql_source.catalogue import Catalogue, MysqlTable
from headrace.cdc.mysql_source.connecting import translated
from headrace.cdc.mysql_source.gtid_sets import mysql_text
from headrace.cdc.mysql_source.rows import batch
from headrace.cdc.source import POSITION, Chunk, ChunkRequest
from headrace.errors import ConfigurationError
from headrace.log.api import INSERT


@dataclass(frozen=True)
class FoundChunk:
    """A chunk, its place in the binlog, and the table as it was then. `touched` are changes that came before its place, where the chunk may be older or newer than they."""

    place: int
    table: MysqlTable
    chunk: Chunk
    touched: list[pa.RecordBatch] | None = None

    def untouched(self) -> Chunk:
        if not self.touched:
            return self.chunk
        key = list(self.table.shape.key)
        rows = pa.Table.from_batches([self.chunk.rows])
        numbered = rows.select(key).append_column("__n", pa.array(range(rows.num_rows), pa.int64()))
        kept = numbered.join(pa.Table.from_batches(self.touched).select(key), key, join_type="left anti")["__n"].sort()
        (batch,) = rows.take(kept).combine_chunks().to_batches() or [self.chunk.rows.slice(0, 0)]
        return replace(self.chunk, rows=batch)


class ChunkReader:
    def __init__(self, connection: Any, database: str) -> None:
        self.connection, self.catalogue = connection, Catalogue(connection, database)

    def read(self, request: ChunkRequest, consumed: int, gtids: Mapping[str, str]) -> FoundChunk | None:
        """Nothing, if it stands before what the stream has brought already (a commit shows a moment later than it is sent)."""
        return self._read_placed(request, consumed) if self.catalogue.is_mariadb else self._read_between(request, gtids)

    def _read_between(self, request: ChunkRequest, gtids: Mapping[str, str]) -> FoundChunk | None:
        """MySQL adds a transaction's GTID to those executed when it can be seen, and writes it into the binlog before."""
        if not self.catalogue.has_gtids:
            raise ConfigurationError(
                "A snapshot of MySQL needs GTIDs, to know what it sees, and the server's gtid_mode is not ON.",
                fix="SET GLOBAL enforce_gtid_consistency = ON; then gtid_mode = OFF_PERMISSIVE, ON_PERMISSIVE, ON, one after the other; or capture changes only, with snapshot=False.",
            )
        if self.catalogue.ask("SELECT GTID_SUBSET(%s, @@global.gtid_executed)", mysql_text(gtids))[0][0] != 1:
            return None
        with translated(), self.connection.cursor() as cursor:
            cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
            try:
                table = self.catalogue.table(request.table)
                rows = self._select(cursor, table, request)
            finally:
                cursor.execute("ROLLBACK")
        place = number(*self.catalogue.end())
        return FoundChunk(place, table, self._chunk(table, rows, request, place), [])

    def _read_placed(self, request: ChunkRequest, consumed: int) -> FoundChunk | None:
        with translated(), self.connection.cursor() as cursor:
            cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
            try:
                cursor.execute("SHOW STATUS LIKE 'binlog_snapshot_%%'")
                place = self._place(dict(cursor.fetchall()))
                if place < consumed:
                    return None
                table = self.catalogue.table(request.table)
                rows = self._select(cursor, table, request)
            finally:
                cursor.execute("ROLLBACK")
        return FoundChunk(place, table, self._chunk(table, rows, request, place))

    @staticmethod
    def _place(told: dict[str, str]) -> int:
        found = {name.lower(): value for name, value in told.items()}
        return number(found["binlog_snapshot_file"], int(found["binlog_snapshot_position"]))

    @staticmethod
    def _select(cursor: Any, table: MysqlTable, request: ChunkRequest) -> list[tuple[Any, ...]]:
        key = ", ".join(_quoted(name) for name in table.key_columns)
        behind = f"WHERE ({key}) > ({', '.join(['%s'] * len(table.key_columns))})" if request.after else ""
        columns = ", ".join(map(_quoted, table.columns))
        query = f"SELECT {columns} FROM {_quoted(table.shape.name)} {behind} ORDER BY {key} LIMIT {request.rows}"
        cursor.execute(query, [_from_json(value) for value in request.after or ()])
        return [tuple(row) for row in cursor.fetchall()]

    @staticmethod
    def _chunk(table: MysqlTable, rows: list[tuple[Any, ...]], request: ChunkRequest, place: int) -> Chunk:
        columns = [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in table.columns]
        found = batch(table, columns, {POSITION: pa.array([place] * len(rows), pa.int64())}, [INSERT] * len(rows))
        places = [table.columns.index(name) for name in table.key_columns]
        after = [_to_json(rows[-1][each]) for each in places] if rows else None
        return Chunk(table.shape.name, found, after, is_last=len(rows) < request.rows)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _to_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return value if isinstance(value, int | float | str) else {"text": value.isoformat(" ") if isinstance(value, datetime) else _text(value)}


def _text(value: Any) -> str:
    return value.isoformat() if isinstance(value, date) else str(value)


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"]) if "hex" in value else value["text"]
    return value
