"""The source `postgres`: reads the replication stream in large batches over one connection, and
does everything else over another one.

Chunks of a snapshot are read by COPY, in the order of the key; no table is locked. A chunk belongs
into the stream right before the first transaction that its own snapshot does not see. So it is held
back until that transaction comes; and it comes soon, because a message of our own is committed
after every chunk. The rows are then neither older nor newer than the changes around them, and
nothing has to be compared.
"""

from __future__ import annotations

import io
import select
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.csv

from headrace.cdc.base import (
    ChunkRequest,
    Marks,
    SchemaChange,
    SnapshotChunk,
    StreamItem,
    StreamPart,
    TableShape,
    marks_column,
)
from headrace.cdc.postgres_source.catalogue import (
    PostgresCatalogue,
    check_server,
    connect,
    driver_errors,
    drop_slot,
    ensure_publication,
    ensure_slot,
    lsn,
    quoted_table,
    slot_name,
    slot_status,
)
from headrace.cdc.postgres_source.pgoutput import (
    BEGIN,
    COMMIT,
    OUR_PREFIX,
    Decoder,
    shape_columns,
)
from headrace.cdc.postgres_source.relations import PostgresRelation, RelationMessage
from headrace.columnar.columns import HIDDEN_FIELDS, INSERT, MARKS, POSITION
from headrace.errors import ConfigurationError
from headrace.types.schema import quote_identifier

# Chunks of a snapshot

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


class PostgresChunkReader:
    """Reads chunks over a connection of its own."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.catalogue = PostgresCatalogue(connection)

    def read(
        self, request: ChunkRequest, consumed: Iterable[int]
    ) -> tuple[TransactionSnapshot, PostgresChunk] | None:
        """Read a chunk. Returns it with the transactions that it sees; None if it does not yet see
        all that the stream has delivered (a commit becomes visible a moment after it is sent).
        """
        with self.connection.cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                cursor.execute(
                    "SELECT pg_current_snapshot()::text, pg_current_wal_lsn() - '0/0'::pg_lsn"
                )
                text, position = cursor.fetchone()
                seen = TransactionSnapshot.parse(text)
                if not all(map(seen.sees, consumed)):
                    return None
                (relation,) = self.catalogue.relations([request.table])
                chunk = self._copy(cursor, request, relation, int(position))
            finally:
                cursor.execute("ROLLBACK")
            cursor.execute("SELECT pg_logical_emit_message(true, %s, 'watermark')", (OUR_PREFIX,))
        return seen, PostgresChunk(relation, chunk)

    def _copy(
        self, cursor: Any, request: ChunkRequest, relation: PostgresRelation, position: int
    ) -> SnapshotChunk:
        columns = self.catalogue.column_names(relation.name)[: relation.width]
        key = [columns[index] for index in relation.key]
        order = ", ".join(quote_identifier(name) for name, _ in key) or "ctid"
        selected = ", ".join(quote_identifier(name) for name, _ in columns) + (
            "" if key else f", ctid AS {_ROW_LOCATION}"
        )
        condition = ""
        if request.after:
            values = cursor.mogrify(
                ", ".join(f"%s::{kind}" for _, kind in key) or "%s::tid", list(request.after)
            ).decode()
            condition = f"WHERE ({order}) > ({values})"
        query = (
            f"COPY (SELECT {selected} FROM {quoted_table(relation.name)} {condition} ORDER BY"
            f" {order}"
            f" LIMIT {request.rows}) TO STDOUT (FORMAT csv)"
        )
        data = io.BytesIO()
        cursor.copy_expert(query, data)
        names = [f"c{index}" for index in range(relation.width)]
        if not key:
            names.append(_ROW_LOCATION)
        table = _parse_csv(data, names).combine_chunks()
        texts = [_single_chunk(table.column(name)) for name in names]
        key_texts = [texts[index] for index in relation.key] if key else texts[-1:]
        after = [text[-1].as_py() for text in key_texts] if table.num_rows else None
        rows = chunk_batch(relation, texts[: relation.width], position)
        return SnapshotChunk(relation.name, rows, after, is_last=table.num_rows < request.rows)


def _parse_csv(data: io.BytesIO, names: list[str]) -> pa.Table:
    """Parse CSV as Postgres writes it: nothing between commas is null, a pair of quotes is an empty
    text.
    """
    if not data.tell():
        return pa.table({name: pa.array([], pa.string()) for name in names})
    data.seek(0)
    return pyarrow.csv.read_csv(
        data,
        read_options=pyarrow.csv.ReadOptions(column_names=names, block_size=8 << 20),
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


def chunk_batch(relation: PostgresRelation, texts: list[pa.Array], position: int) -> pa.RecordBatch:
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


MAX_MESSAGES, MAX_BYTES = 60_000, 16 << 20
"""The most that one part is decoded from."""
READ_MESSAGES = 512
"""Messages that are read before the clock is checked."""
ENOUGH_MESSAGES = 600
"""From so many on a part is decoded at once, while the server goes on sending: waiting for more
would only wake both sides for each message.
"""
GATHER_S, WAKE_S = 0.005, 0.001
HEARTBEAT_S = 10.0
FEEDBACK_S = 1.0
MAX_REMEMBERED_XIDS = 1_000


class PostgresSource:
    """Streams the changes of a Postgres database. A position is an LSN, as a number."""

    def __init__(
        self, url: str, name: str, tables: Sequence[str], connection: Any, *, prefix: str
    ) -> None:
        self.url = url
        self.name = slot_name(name)
        self.wanted = tuple(tables)
        self._catalogue = PostgresCatalogue(connection)
        self._chunks: PostgresChunkReader | None = None
        self._relations: dict[str, PostgresRelation] = {}
        self._decoder = Decoder(self._resolve, prefix)
        self._replication: Any = None
        self._cursor: Any = None
        self._tail: list[bytes] = []
        """Messages behind the last commit that was decoded."""
        self._request: ChunkRequest | None = None
        self._pending_chunk: tuple[TransactionSnapshot, PostgresChunk] | None = None
        self._consumed: deque[int] = deque(maxlen=MAX_REMEMBERED_XIDS)
        """The ids of the last transactions that were delivered."""
        self._position = 0
        self._missed: set[str] = set()
        """Tables that were added to the publication: changes before that were missed."""
        self._target: int | None = None
        self._heartbeat_s = self._feedback_s = time.monotonic()
        self._slot: dict[str, Any] = {}
        self._slot_s = 0.0

    @classmethod
    def open(cls, url: str, name: str, tables: Sequence[str], *, prefix: str = "") -> Self:
        """Connect to the database."""
        return cls(url, name, tables, connect(url), prefix=prefix)

    # Beginning

    def start(self, position: str | None, *, start_over: bool = False) -> str:
        """Begin to stream. The slot exists before any snapshot, so that what happens during the
        snapshot is in the stream.
        """
        with driver_errors():
            check_server(self._catalogue)
            self.tables()
            if position is None or start_over:
                self._missed.clear()  # all tables are read anyway
            self._position = ensure_slot(
                self._catalogue,
                self.name,
                int(position) if position else None,
                start_over=start_over,
            )
            self._replication = connect(self.url, replication=True)
            self._cursor = self._replication.cursor()
            options = {"proto_version": "1", "publication_names": self.name, "messages": "true"}
            self._cursor.start_replication(
                self.name,
                decode=False,
                start_lsn=lsn(self._position),
                options=options,
                status_interval=10,
            )
        return str(self._position)

    def tables(self) -> list[TableShape]:
        with driver_errors():
            relations = self._catalogue.relations(self.wanted)
            added = ensure_publication(
                self._catalogue, self.name, [relation.name for relation in relations]
            )
        self._missed |= set(added)
        shapes = self._decoder.known_shapes
        for relation in relations:
            if relation.name not in self._relations:
                self._relations[relation.name] = relation
                shapes[relation.name] = relation.shape
        changed = [
            relation.name for relation in relations if relation.shape != shapes[relation.name]
        ]
        if changed and self._request is None and self._pending_chunk is None:
            # Columns have changed, and no row since: an empty chunk finds the point in the stream.
            self._request = ChunkRequest(changed[0], None, 0)
        return [relation.shape for relation in self._relations.values()]

    def _resolve(self, message: RelationMessage) -> PostgresRelation | None:
        """Return the relation that a message describes, with the key that the table had when it was
        first seen; None if the table is not captured.
        """
        known = self._relations.get(message.name)
        if known is None:
            return None
        known_names = [name for name, _ in known.shape.columns]
        names = [name for name, _, _ in message.columns]
        key = [known_names[index] for index in known.key]
        if missing := [name for name in key if name not in names]:
            raise ConfigurationError(
                f"The key column {missing[0]!r} of {message.name} was renamed or dropped, and a"
                " topic's key cannot change.",
                fix=(
                    "capture it under a new name and prefix, which begins with a new snapshot; the"
                    " old topic stays as it is."
                ),
            )
        relation = message.to_relation(self._catalogue.type_name, key)
        self._relations[message.name] = relation
        return relation

    def count(self, table: str) -> int:
        with driver_errors():
            return self._catalogue.estimate(table)

    # The stream

    def request(self, chunk: ChunkRequest) -> None:
        self._request = chunk

    def poll(self, timeout_s: float) -> StreamPart:
        with driver_errors():
            self._try_chunk()
            payloads, is_drained = self._read(timeout_s)
            if not payloads:
                return self._idle_part()
            return self._part(payloads, is_drained)

    def _read(self, timeout_s: float) -> tuple[list[bytes], bool]:
        """Read what has arrived, up to a bound, for some milliseconds: decoding many messages at
        once is cheaper. Returns the messages, and whether there are no more.

        Messages behind the last commit wait for the rest of their transaction, unless nothing else
        has come.
        """
        payloads, self._tail = self._tail, []
        size, read, add = 0, self._cursor.read_message, payloads.append
        deadline_s, gathered_s = time.monotonic() + timeout_s, 0.0
        while len(payloads) < MAX_MESSAGES and size < MAX_BYTES:
            before = len(payloads)
            for _ in range(READ_MESSAGES):
                message = read()
                if message is None:
                    break
                add(message.payload)
            size += sum(map(len, payloads[before:]))
            if len(payloads) - before == READ_MESSAGES:
                continue
            now_s = time.monotonic()
            gathered_s = gathered_s or (now_s if payloads else 0.0)
            if len(payloads) >= ENOUGH_MESSAGES:
                break
            if (payloads and now_s - gathered_s >= GATHER_S) or (
                not payloads and now_s >= deadline_s
            ):
                return self._split_at_commit(payloads), True
            select.select([self._replication], [], [], WAKE_S if payloads else deadline_s - now_s)
        return self._split_at_commit(payloads), False

    def _split_at_commit(self, payloads: list[bytes]) -> list[bytes]:
        for index in range(len(payloads) - 1, -1, -1):
            if payloads[index][0] == COMMIT:
                self._tail = payloads[index + 1 :]
                return payloads[: index + 1]
        return payloads

    def _part(self, payloads: list[bytes], is_drained: bool) -> StreamPart:
        items: list[StreamItem] = []
        index = self._chunk_index(payloads)
        if index is not None:
            assert self._pending_chunk is not None
            items += self._decoder.decode(payloads[:index])
            items += self._chunk_items(self._pending_chunk[1])
            self._pending_chunk = None
            payloads = payloads[index:]
        items += self._decoder.decode(payloads)
        self._consumed.extend(
            int.from_bytes(payload[17:21], "big")
            for payload in payloads[-3 * MAX_REMEMBERED_XIDS :]
            if payload[0] == BEGIN
        )
        if payloads and payloads[-1][0] == COMMIT:
            self._position = int.from_bytes(payloads[-1][10:18], "big")
            items += self._missed_tables()
            return StreamPart(
                items,
                str(self._position),
                self._decoder.commits,
                is_idle=is_drained and not self._tail,
            )
        return StreamPart(items, None, is_idle=False)

    def _missed_tables(self) -> list[StreamItem]:
        """Report tables that were added to the publication: of those that are captured already,
        changes may have been missed. New ones are read anyway.
        """
        missed, self._missed = self._missed, set()
        return [SchemaChange(self._relations[name].shape, missed=True) for name in sorted(missed)]

    def _idle_part(self) -> StreamPart:
        """Return the part for when nothing has come. The server's position moves on all the same,
        and is stored from time to time, so that the server need not retain WAL for the capture.
        """
        now_s = time.monotonic()
        end = self._cursor.wal_end or 0
        if self._missed and self._decoder.open is None:
            return StreamPart(self._missed_tables(), str(self._position))
        if (
            self._decoder.open is None
            and not self._tail
            and now_s - self._heartbeat_s >= HEARTBEAT_S
        ):
            self._heartbeat_s = now_s
            if end > self._position and self._pending_chunk is None:
                self._position = end
                return StreamPart((), str(end))
        if now_s - self._feedback_s >= FEEDBACK_S:
            self._feedback_s = now_s
            self._cursor.send_feedback()
        return StreamPart()

    # Snapshots

    def _try_chunk(self) -> None:
        if self._request is None or self._pending_chunk is not None:
            return
        self._chunks = self._chunks or PostgresChunkReader(connect(self.url))
        self._pending_chunk = self._chunks.read(self._request, self._consumed)
        if self._pending_chunk is not None:
            self._request = None

    def _chunk_items(self, read: PostgresChunk) -> list[StreamItem]:
        """Return a chunk as items of the stream. If the table's columns have changed meanwhile, the
        chunk is replaced by an empty one, so that it is requested again.
        """
        name = read.relation.name
        if read.relation.shape == self._decoder.known_shapes[name]:
            return [read.chunk]
        self._relations[name] = read.relation
        self._decoder.known_shapes[name] = read.relation.shape
        empty = replace(read.chunk, rows=read.chunk.rows.slice(0, 0), after=None, is_last=False)
        return [SchemaChange(read.relation.shape), empty]

    def _chunk_index(self, payloads: list[bytes]) -> int | None:
        """Return the index of the first transaction that the held-back chunk does not see."""
        if self._pending_chunk is None:
            return None
        sees = self._pending_chunk[0].sees
        for index, payload in enumerate(payloads):
            if payload[0] == BEGIN and not sees(int.from_bytes(payload[17:21], "big")):
                return index
        return None

    def is_caught_up(self) -> bool:
        """Return whether the stream has passed the end of the WAL as of the first call. A message
        of our own is written behind it, so that the stream gets there soon.
        """
        if self._target is None:
            with driver_errors():
                ((end,),) = self._catalogue.query(
                    "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
                )
                self._catalogue.query("SELECT pg_logical_emit_message(true, %s, 'end')", OUR_PREFIX)
            self._target = int(end)
        return self._position >= self._target

    # Confirming

    def confirm(self, position: str) -> None:
        """Tell the server that it may drop WAL up to a position."""
        if self._cursor is not None:
            end = int(position)
            with driver_errors():
                self._cursor.send_feedback(write_lsn=end, flush_lsn=end, apply_lsn=end, force=True)

    def status(self) -> dict[str, Any]:
        if time.monotonic() - self._slot_s >= 1.0:
            self._slot_s = time.monotonic()
            with driver_errors():
                self._slot = slot_status(self._catalogue, self.name)
        return self._slot

    def close(self) -> None:
        for connection in (
            self._replication,
            self._catalogue.connection,
            self._chunks.connection if self._chunks else None,
        ):
            if connection is not None:
                connection.close()

    def remove(self) -> list[str]:
        removed = []
        with driver_errors():
            if self._catalogue.query(
                "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", self.name
            ):
                drop_slot(self._catalogue, self.name)
                removed.append(f"replication slot {self.name}")
            if self._catalogue.query("SELECT 1 FROM pg_publication WHERE pubname = %s", self.name):
                with self._catalogue.connection.cursor() as cursor:
                    cursor.execute(f'DROP PUBLICATION "{self.name}"')
                removed.append(f"publication {self.name}")
        return removed
