"""The source for Postgres: a replication connection that is read in large gulps, a second
connection for everything else.
"""

from __future__ import annotations

import io
import select
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from headrace.cdc.base import (
    Chunk,
    ChunkRequest,
    Item,
    Marks,
    Part,
    Reshaped,
    TableShape,
    marks_column,
)
from headrace.cdc.postgres_source.catalogue import (
    Catalogue,
    check_server,
    connect,
    database_name,
    drop_slot,
    ensure_slot,
    lsn,
    publish,
    quoted_table,
    slot_status,
    translated,
)
from headrace.cdc.postgres_source.pgoutput import (
    BEGIN,
    COMMIT,
    OUR_PREFIX,
    Decoder,
    finished_columns,
)
from headrace.cdc.postgres_source.relations import Relation, RelationMessage
from headrace.columnar.columns import HIDDEN_FIELDS, INSERT, MARKS, POSITION
from headrace.errors import ConfigurationError
from headrace.types.schema import quoted

# Chunks of a snapshot: rows in the order of the key, by COPY, and what their transaction saw. No
# table is locked.
#
# A chunk belongs into the stream right before the first transaction that it does not see. So it is
# held until that one comes; and that one comes soon, because behind every chunk a message of our
# own is committed. The rows are then neither older nor newer than the changes around them, and
# nothing has to be compared.


_PLACE = "_headrace_place"


@dataclass(frozen=True)
class Seen:
    """What a transaction sees: everything before `least`, nothing from `next` on, and of what lies
    between all but those under way.
    """

    least: int
    next: int
    under_way: frozenset[int]

    @staticmethod
    def parse(text: str) -> Seen:
        least, after, listed = text.split(":")
        return Seen(
            int(least), int(after), frozenset(int(each) for each in listed.split(",") if each)
        )

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

    def read(
        self, request: ChunkRequest, consumed: Iterable[int]
    ) -> tuple[Seen, FoundChunk] | None:
        """A chunk and what it sees; nothing, if it does not yet see all that the stream has brought
        (a commit shows a moment later than it is sent).
        """
        with self.connection.cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                cursor.execute(
                    "SELECT pg_current_snapshot()::text, pg_current_wal_lsn() - '0/0'::pg_lsn"
                )
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
        selected = ", ".join(quoted(name) for name, _ in columns) + (
            "" if key else f", ctid AS {_PLACE}"
        )
        behind = ""
        if request.after:
            values = cursor.mogrify(
                ", ".join(f"%s::{kind}" for _, kind in key) or "%s::tid", list(request.after)
            ).decode()
            behind = f"WHERE ({order}) > ({values})"
        query = (
            f"COPY (SELECT {selected} FROM {quoted_table(relation.name)} {behind} ORDER BY {order}"
            f" LIMIT {request.rows}) TO STDOUT (FORMAT csv)"
        )
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
    """CSV as Postgres writes it: nothing between commas is null, a pair of quotes is an empty
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


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return (
        column.chunk(0)
        if column.num_chunks == 1
        else pa.concat_arrays(column.chunks)
        if column.num_chunks
        else pa.array([], column.type)
    )


def chunk_batch(relation: Relation, texts: list[pa.Array], position: int) -> pa.RecordBatch:
    marks: Marks = {}
    columns = finished_columns(relation, texts, marks)
    count = len(columns[0])
    hidden = {POSITION: pa.array(np.full(count, position)), MARKS: marks_column(marks, count)}
    arrays = [
        *columns,
        *(hidden.get(each.name, pa.nulls(count, each.type)) for each in HIDDEN_FIELDS),
        pa.repeat(pa.scalar(INSERT), count),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=relation.shape.batch_schema)


MAX_MESSAGES, MAX_BYTES = 60_000, 16 << 20
GULP = 512
# to take apart, while the server goes on: waiting for more would only wake us, and the server, for
# each of them
ENOUGH_MESSAGES = 600
GATHER_S, WAKE_S = 0.005, 0.001
HEARTBEAT_S = 10.0
FEEDBACK_S = 1.0
XIDS_KEPT = 1_000


class PostgresSource:
    def __init__(self, url: str, name: str, tables: Sequence[str], *, prefix: str = "") -> None:
        self.url, self.name, self.wanted = url, database_name(name), tuple(tables)
        self._catalogue = Catalogue(connect(url))
        self._chunks: ChunkReader | None = None
        self._relations: dict[str, Relation] = {}
        self._decoder = Decoder(self._resolved, prefix)
        self._replication: Any = None
        self._cursor: Any = None
        self._tail: list[bytes] = []
        self._request: ChunkRequest | None = None
        self._held: tuple[Seen, FoundChunk] | None = None
        self._consumed: deque[int] = deque(maxlen=XIDS_KEPT)
        self._position = 0
        self._missed: set[str] = set()
        self._target: int | None = None
        self._beat_s = self._fed_s = time.monotonic()
        self._slot: dict[str, Any] = {}
        self._slot_s = 0.0

    # Beginning

    def start(self, position: str | None, *, afresh: bool = False) -> str:
        """The slot is there before any snapshot: what happens during it is in the stream."""
        with translated():
            check_server(self._catalogue)
            self.tables()
            if position is None or afresh:
                self._missed.clear()  # everything is read anyway
            self._position = ensure_slot(
                self._catalogue, self.name, int(position) if position else None, afresh=afresh
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
        with translated():
            relations = self._catalogue.relations(self.wanted)
            added = publish(self._catalogue, self.name, [each.name for each in relations])
        fresh = [each for each in relations if each.name not in self._relations]
        self._missed |= set(added)
        for each in fresh:
            self._relations[each.name] = each
            self._decoder.known_shapes[each.name] = each.shape
        changed = [
            each.name for each in relations if each.shape != self._decoder.known_shapes[each.name]
        ]
        if changed and self._request is None and self._held is None:
            self._request = ChunkRequest(
                changed[0], None, 0
            )  # columns changed and no row has since: find its place in the stream
        return [each.shape for each in self._relations.values()]

    def _resolved(self, message: RelationMessage) -> Relation | None:
        """A relation of the stream, with the key that the table had when we first saw it."""
        known = self._relations.get(message.name)
        if known is None:
            return None
        own = [name for name, _ in known.shape.columns]
        names = [name for name, _, _ in message.columns]
        key = [own[place] for place in known.key]
        if gone := [name for name in key if name not in names]:
            raise ConfigurationError(
                f"The key column {gone[0]!r} of {message.name} was renamed or dropped, and a"
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
        with translated():
            return self._catalogue.estimate(table)

    # The stream

    def request(self, chunk: ChunkRequest) -> None:
        self._request = chunk

    def poll(self, timeout_s: float) -> Part:
        with translated():
            self._try_chunk()
            payloads, is_drained = self._read(timeout_s)
            if not payloads:
                return self._quiet()
            return self._part(payloads, is_drained)

    def _read(self, timeout_s: float) -> tuple[list[bytes], bool]:
        """All that is there, up to a bound, gathered for some milliseconds: taking it apart costs
        less for many than for few.

        What lies behind the last commit waits for the rest of its transaction, unless nothing else
        came.
        """
        payloads, self._tail = self._tail, []
        size, read, add = 0, self._cursor.read_message, payloads.append
        deadline_s, gathered_s = time.monotonic() + timeout_s, 0.0
        while len(payloads) < MAX_MESSAGES and size < MAX_BYTES:
            before = len(payloads)
            for _ in range(GULP):
                message = read()
                if message is None:
                    break
                add(message.payload)
            size += sum(map(len, payloads[before:]))
            if len(payloads) - before == GULP:
                continue
            now_s = time.monotonic()
            gathered_s = gathered_s or (now_s if payloads else 0.0)
            if len(payloads) >= ENOUGH_MESSAGES:
                break
            if (payloads and now_s - gathered_s >= GATHER_S) or (
                not payloads and now_s >= deadline_s
            ):
                return self._cut(payloads), True
            select.select([self._replication], [], [], WAKE_S if payloads else deadline_s - now_s)
        return self._cut(payloads), False

    def _cut(self, payloads: list[bytes]) -> list[bytes]:
        for at in range(len(payloads) - 1, -1, -1):
            if payloads[at][0] == COMMIT:
                self._tail = payloads[at + 1 :]
                return payloads[: at + 1]
        return payloads

    def _part(self, payloads: list[bytes], is_drained: bool) -> Part:
        items: list[Item] = []
        at = self._place_of_chunk(payloads)
        if at is not None:
            assert self._held is not None
            items += [*self._decoder.decode(payloads[:at]), *self._taken(self._held[1])]
            self._held, payloads = None, payloads[at:]
        items += self._decoder.decode(payloads)
        self._consumed.extend(
            [
                int.from_bytes(each[17:21], "big")
                for each in payloads[-3 * XIDS_KEPT :]
                if each[0] == BEGIN
            ]
        )
        if payloads and payloads[-1][0] == COMMIT:
            self._position = int.from_bytes(payloads[-1][10:18], "big")
            items += self._news()
            return Part(
                items,
                str(self._position),
                self._decoder.commits,
                is_idle=is_drained and not self._tail,
            )
        return Part(items, None, is_idle=False)

    def _news(self) -> list[Item]:
        """Tables that were not in the publication, and are now: those that are captured already may
        have lacked changes. One that is new is read anyway.
        """
        missed, self._missed = self._missed, set()
        return [Reshaped(self._relations[name].shape, missed=True) for name in sorted(missed)]

    def _quiet(self) -> Part:
        """Nothing came: the server's position moves on all the same, and is worth keeping now and
        then, so that it need not keep WAL for us.
        """
        now_s = time.monotonic()
        end = self._cursor.wal_end or 0
        if self._missed and self._decoder.open is None:
            return Part(self._news(), str(self._position))
        if self._decoder.open is None and not self._tail and now_s - self._beat_s >= HEARTBEAT_S:
            self._beat_s = now_s
            if end > self._position and self._held is None:
                self._position = end
                return Part((), str(end))
        if now_s - self._fed_s >= FEEDBACK_S:
            self._fed_s = now_s
            self._cursor.send_feedback()
        return Part()

    # Snapshots

    def _try_chunk(self) -> None:
        if self._request is None or self._held is not None:
            return
        self._chunks = self._chunks or ChunkReader(connect(self.url))
        self._held = self._chunks.read(self._request, self._consumed)
        if self._held is not None:
            self._request = None

    def _taken(self, found: FoundChunk) -> list[Item]:
        """A table that has other columns by now is told of, and asked again."""
        name = found.relation.name
        if found.relation.shape == self._decoder.known_shapes[name]:
            return [found.chunk]
        self._relations[name] = found.relation
        self._decoder.known_shapes[name] = found.relation.shape
        return [
            Reshaped(found.relation.shape),
            replace(found.chunk, rows=found.chunk.rows.slice(0, 0), after=None, is_last=False),
        ]

    def _place_of_chunk(self, payloads: list[bytes]) -> int | None:
        """Before the first transaction that the chunk does not see."""
        if self._held is None:
            return None
        sees = self._held[0].sees
        for at, payload in enumerate(payloads):
            if payload[0] == BEGIN and not sees(int.from_bytes(payload[17:21], "big")):
                return at
        return None

    def is_caught_up(self) -> bool:
        """A message of our own, behind all that is there, makes the stream come past it soon."""
        if self._target is None:
            with translated():
                ((end,),) = self._catalogue.ask(
                    "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
                )
                self._catalogue.ask("SELECT pg_logical_emit_message(true, %s, 'end')", OUR_PREFIX)
            self._target = int(end)
        return self._position >= self._target

    # The other direction

    def confirm(self, position: str) -> None:
        """Only now may the server forget."""
        if self._cursor is not None:
            place = int(position)
            with translated():
                self._cursor.send_feedback(
                    write_lsn=place, flush_lsn=place, apply_lsn=place, force=True
                )

    def status(self) -> dict[str, Any]:
        if time.monotonic() - self._slot_s >= 1.0:
            self._slot_s = time.monotonic()
            with translated():
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
        with translated():
            if self._catalogue.ask(
                "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", self.name
            ):
                drop_slot(self._catalogue, self.name)
                removed.append(f"replication slot {self.name}")
            if self._catalogue.ask("SELECT 1 FROM pg_publication WHERE pubname = %s", self.name):
                with self._catalogue.connection.cursor() as cursor:
                    cursor.execute(f'DROP PUBLICATION "{self.name}"')
                removed.append(f"publication {self.name}")
        return removed
