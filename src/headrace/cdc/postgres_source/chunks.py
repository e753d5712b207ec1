"""Chunks of a snapshot: rows in the order of the key, by COPY, and what their transaction saw. No table is locked.

A chunk belongs into the stream right before the first transaction that it does not see. So it is held until that one comes; and that one comes soon, because
behind every chunk a message of our own is committed. The rows are then neither older nor newer than the changes around them, and nothing has to be compared.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from headrace.cdc.marking import Marks, marks_column
from headrace.cdc.postgres_source.catalogue import Catalogue, quoted_table
from headrace.cdc.postgres_source.pgoutput import OUR_PREFIX
from headrace.cdc.postgres_source.relations import Relation
from headrace.cdc.postgres_source.row_groups import finished_columns
from headrace.cdc.source import HIDDEN, MARKS, POSITION, Chunk, ChunkRequest
from headrace.log.api import INSERT
from headrace.sql_names import quoted

_PLACE = "_headrace_place"


@dataclass(frozen=True)
class Seen:
    """What a transaction sees: everything before `least`, nothing from `next` on, and of what lies between all but those under way."""

    least: int
    next: int
    under_way: frozenset[int]

    @staticmethod
    def parse(text: str) -> Seen:
        least, after, listed = text.split(":")
        return Seen(int(least), int(after), frozenset(int(each) for each in listed.split(",") if each))

    def sees(self, xid: int) -> bool:
        """The stream has the lower 32 bits of a transaction's number."""
        full = (self.next & ~0xFFFFFFFF) | xid
        if full > self.next + (1 << 31):
            full -= 1 << 32
        elif full < self.next - (1 << 31):
            full += 1 << 32
        return full < self.least or (full < self.next and full not in self.under_way)


@dataclass(frozen=True)
class FoundChunk:
    """A chunk, and the table as it was when it was read."""

    relation: Relation
    chunk: Chunk


class ChunkReader:
    """Reads chunks over a connection of its own."""

    def __init__(self, connection: Any) -> None:
        self.connection, self.catalogue = connection, Catalogue(connection)

    def read(self, request: ChunkRequest, consumed: Iterable[int]) -> tuple[Seen, FoundChunk] | None:
        """A chunk and what it sees; nothing, if it does not yet see all that the stream has brought (a commit shows a moment later than it is sent)."""
        with self.connection.cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                cursor.execute("SELECT pg_current_snapshot()::text, pg_current_wal_lsn() - '0/0'::pg_lsn")
                text, position = cursor.fetchone()
                seen = Seen.parse(text)
                if not all(map(seen.sees, consumed)):
                    return None
                (relation,) = self.catalogue.relations([request.table])
                chunk = self._copy(cursor, request, relation, int(position))
            finally:
                cursor.execute("ROLLBACK")
            cursor.execute("SELECT pg_logical_emit_message(true, %s, 'watermark')", (OUR_PREFIX,))
        return seen, FoundChunk(relation, chunk)

    def _copy(self, cursor: Any, request: ChunkRequest, relation: Relation, position: int) -> Chunk:
        columns = self.catalogue.column_names(relation.name)[: relation.width]
        key = [columns[place] for place in relation.key]
        order = ", ".join(quoted(name) for name, _ in key) or "ctid"
        selected = ", ".join(quoted(name) for name, _ in columns) + ("" if key else f", ctid AS {_PLACE}")
        behind = ""
        if request.after:
            values = cursor.mogrify(", ".join(f"%s::{kind}" for _, kind in key) or "%s::tid", list(request.after)).decode()
            behind = f"WHERE ({order}) > ({values})"
        query = f"COPY (SELECT {selected} FROM {quoted_table(relation.name)} {behind} ORDER BY {order} LIMIT {request.rows}) TO STDOUT (FORMAT csv)"
        data = io.BytesIO()
        cursor.copy_expert(query, data)
        names = [f"c{place}" for place in range(relation.width)] + ([] if key else [_PLACE])
        table = _parsed(data, names)
        texts = [_whole(table.column(name)) for name in names]
        last = [texts[place] for place in relation.key] if key else texts[-1:]
        after = [each[-1].as_py() for each in last] if table.num_rows else None
        rows = chunk_batch(relation, texts[: relation.width], position)
        return Chunk(relation.name, rows, after, is_last=table.num_rows < request.rows)


def _parsed(data: io.BytesIO, names: list[str]) -> pa.Table:
    """CSV as Postgres writes it: nothing between commas is null, a pair of quotes is an empty text."""
    if not data.tell():
        return pa.table({name: pa.array([], pa.string()) for name in names})
    data.seek(0)
    return pyarrow.csv.read_csv(
        data,
        read_options=pyarrow.csv.ReadOptions(column_names=names, block_size=8 << 20),
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
        ),
    )


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def chunk_batch(relation: Relation, texts: list[pa.Array], position: int) -> pa.RecordBatch:
    marks: Marks = {}
    columns = finished_columns(relation, texts, marks)
    count = len(columns[0])
    hidden = {POSITION: pa.array(np.full(count, position)), MARKS: marks_column(marks, count)}
    arrays = [*columns, *(hidden.get(each.name, pa.nulls(count, each.type)) for each in HIDDEN), pa.repeat(pa.scalar(INSERT), count)]
    return pa.RecordBatch.from_arrays(arrays, schema=relation.shape.batch_schema)
