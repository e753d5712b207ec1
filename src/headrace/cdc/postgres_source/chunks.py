"""Chunks of a snapshot, over a connection of their own: read by COPY in the order of the key, with
the transactions that each of them sees. No table is locked.
"""

from __future__ import annotations

import io
import mmap
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from headrace.cdc.base import ChunkRequest, Marks, SnapshotChunk, marks_column
from headrace.cdc.postgres_source.catalogue import PostgresCatalogue, quoted_table
from headrace.cdc.postgres_source.pgoutput import shape_columns
from headrace.cdc.postgres_source.relations import PostgresRelation
from headrace.columnar.columns import HIDDEN_FIELDS, INSERT, MARKS, POSITION
from headrace.types.schema import quote_identifier

MAX_CHUNK_BYTES = 128 << 20
BLOCK_BYTES = 8 << 20
"""What one thread parses at a time."""
_ROW_LOCATION = "_headrace_place"


@dataclass(frozen=True)
class TransactionSnapshot:
    """Which transactions a transaction sees (`pg_current_snapshot`): all before `xmin`, none from
    `xmax` on, and of those in between all that are not in progress.
    """

    xmin: int
    xmax: int
    in_progress: frozenset[int]

    @staticmethod
    def parse(text: str) -> TransactionSnapshot:
        xmin, xmax, in_progress = text.split(":")
        xids = frozenset(int(xid) for xid in in_progress.split(",") if xid)
        return TransactionSnapshot(int(xmin), int(xmax), xids)

    def sees(self, xid: int) -> bool:
        """Return whether a transaction is seen. The stream has the lower 32 bits of its id."""
        full = (self.xmax & ~0xFFFFFFFF) | xid
        if full > self.xmax + (1 << 31):
            full -= 1 << 32
        elif full < self.xmax - (1 << 31):
            full += 1 << 32
        return full < self.xmin or (full < self.xmax and full not in self.in_progress)


@dataclass(frozen=True)
class PostgresChunk:
    """A chunk, and the table as it was when it was read."""

    relation: PostgresRelation
    chunk: SnapshotChunk


@dataclass(frozen=True)
class WholeTable:
    """A table without a key that is read chunk by chunk in one transaction."""

    relation: PostgresRelation
    sees: TransactionSnapshot
    position: int


class PostgresChunkReader:
    """Reads chunks over a connection of its own."""

    def __init__(self, connection: Any, publication: str | None = None) -> None:
        self.connection = connection
        self.catalogue = PostgresCatalogue(connection, publication)
        self.whole: WholeTable | None = None
        """The table without a key that is being read."""
        self._max_rows: dict[str, int] = {}
        """By table with large rows, the most rows of a chunk."""

    def read(
        self, request: ChunkRequest, consumed: Iterable[int]
    ) -> tuple[TransactionSnapshot, PostgresChunk] | None:
        """Read a chunk. Returns it with the transactions that it sees; None if it does not yet see
        all that the stream has delivered (a commit becomes visible a moment after it is sent).

        Equal rows of a table without a key are counted, so no row may be read twice or not at all.
        Its chunks are read in one transaction, and belong to one point of the stream.
        """
        with self.connection.cursor() as cursor:
            if self.whole is not None and request.table == self.whole.relation.name:
                return self._read_on(cursor, request, self.whole)
            self.abandon()
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                cursor.execute(
                    "SELECT pg_current_snapshot()::text, pg_current_wal_lsn() - '0/0'::pg_lsn"
                )
                text, position = cursor.fetchone()
                seen = TransactionSnapshot.parse(text)
                if not all(map(seen.sees, consumed)):
                    return None
                relation = self.catalogue.relation(request.table)
                if relation is None:
                    return None  # it was dropped, which the source notices
                if not relation.key:
                    request = replace(request, after=None)
                chunk = self._copy(cursor, request, relation, int(position))
                if not relation.key and not chunk.is_last:
                    self.whole = WholeTable(relation, seen, int(position))
            finally:
                if self.whole is None:
                    cursor.execute("ROLLBACK")
        return seen, PostgresChunk(relation, chunk)

    def _read_on(
        self, cursor: Any, request: ChunkRequest, whole: WholeTable
    ) -> tuple[TransactionSnapshot, PostgresChunk]:
        chunk = self._copy(cursor, request, whole.relation, whole.position)
        if chunk.is_last:
            self.abandon()
        return whole.sees, PostgresChunk(whole.relation, chunk)

    def abandon(self) -> None:
        """End the transaction in which a table without a key is read."""
        if self.whole is not None:
            self.whole = None
            with self.connection.cursor() as cursor:
                cursor.execute("ROLLBACK")

    def _copy(
        self, cursor: Any, request: ChunkRequest, relation: PostgresRelation, position: int
    ) -> SnapshotChunk:
        columns = self.catalogue.column_names(relation.name)[: relation.width]
        key = [columns[index] for index in relation.key]
        order = ", ".join(quote_identifier(name) for name, _ in key) or "ctid"
        selected = ", ".join(quote_identifier(name) for name, _ in columns) + (
            "" if key else f", ctid AS {_ROW_LOCATION}"
        )
        row_filter = self.catalogue.row_filter(relation.name)
        conditions = [f"({text})" for text in (request.condition, row_filter) if text]
        if request.after:
            values = cursor.mogrify(
                ", ".join(f"%s::{kind}" for _, kind in key) or "%s::tid", list(request.after)
            ).decode()
            conditions.append(f"({order}) > ({values})")
        where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
        # Tables that inherit from it are captured by themselves; partitions belong to it.
        only = "" if self.catalogue.is_partitioned(relation.id) else "ONLY "
        table = f"{only}{quoted_table(relation.name)}"
        query = f"SELECT {selected} FROM {table} {where} ORDER BY {order}"
        data, limit = self._csv(cursor, query, relation.name, request.rows)
        names = [f"c{index}" for index in range(relation.width)]
        if not key:
            names.append(_ROW_LOCATION)
        parsed = _parse_csv(data, names).combine_chunks()
        texts = [_single_chunk(parsed.column(name)) for name in names]
        key_texts = [texts[index] for index in relation.key] if key else texts[-1:]
        data_rows = parsed.num_rows
        after = [text[-1].as_py() for text in key_texts] if data_rows else None
        rows = chunk_batch(relation, texts[: relation.width], position)
        return SnapshotChunk(
            relation.name,
            rows,
            after,
            is_last=data_rows < limit,
            is_first=request.after is None,
        )

    def _csv(self, cursor: Any, query: str, table: str, rows: int) -> tuple[pa.Buffer, int]:
        """Return the rows of a query as CSV, and the most rows that were asked for: fewer than
        `rows` if these are too large. A single row has no bound but Postgres' own, of a gigabyte.
        """
        while True:
            limit = min(rows, self._max_rows.get(table, rows))
            # The driver writes each row by itself. An anonymous map has a bound, and as it is
            # written to in C costs nothing.
            data = mmap.mmap(-1, MAX_CHUNK_BYTES) if limit > 1 else io.BytesIO()
            cursor.execute("SAVEPOINT chunk")
            try:
                cursor.copy_expert(f"COPY ({query} LIMIT {limit}) TO STDOUT (FORMAT csv)", data)
            except ValueError:
                cursor.execute("ROLLBACK TO SAVEPOINT chunk")
                self._max_rows[table] = max(1, limit // 8)
                continue
            size = data.tell()
            content = data if isinstance(data, mmap.mmap) else data.getbuffer()
            return pa.py_buffer(content).slice(0, size), limit


def _parse_csv(data: pa.Buffer, names: list[str]) -> pa.Table:
    """Parse CSV as Postgres writes it: nothing between commas is null, a pair of quotes is an empty
    text.
    """
    if not data.size:
        return pa.table({name: pa.array([], pa.string()) for name in names})
    try:
        return _parse_blocks(data, names, BLOCK_BYTES)
    except pa.ArrowInvalid:  # a row is larger than a block
        return _parse_blocks(data, names, data.size)


def _parse_blocks(data: pa.Buffer, names: list[str], block_bytes: int) -> pa.Table:
    return pyarrow.csv.read_csv(
        pa.BufferReader(data),
        read_options=pyarrow.csv.ReadOptions(column_names=names, block_size=block_bytes),
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )


def _single_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks else pa.array([], column.type)


def chunk_batch(
    relation: PostgresRelation, texts: list[pa.Array] | None, position: int
) -> pa.RecordBatch:
    """Return rows of a snapshot, given the texts of their columns; none without texts."""
    if texts is None:
        texts = [pa.array([], pa.string())] * relation.width
    marks: Marks = {}
    columns = shape_columns(relation, texts, marks)
    count = len(columns[0])
    hidden = {POSITION: pa.array(np.full(count, position)), MARKS: marks_column(marks, count)}
    arrays = [
        *columns,
        *(hidden.get(field.name, pa.nulls(count, field.type)) for field in HIDDEN_FIELDS),
        pa.repeat(pa.scalar(INSERT), count),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=relation.shape.batch_schema)
