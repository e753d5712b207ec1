"""The source `postgres`: reads the replication stream in large batches over one connection, and
does everything else over another one.

Chunks of a snapshot are read by COPY, in the order of the key; no table is locked. A chunk belongs
into the stream right before the first transaction that its own snapshot does not see. So it is held
back until that transaction comes; and it comes soon, because a message of our own is committed
after every chunk. The rows are then neither older nor newer than the changes around them, and
nothing has to be compared.
"""

from __future__ import annotations

import logging
import select
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

from headrace.cdc.base import (
    ChunkRequest,
    SchemaChange,
    SnapshotChunk,
    StreamItem,
    StreamPart,
    TableShape,
    TableStopped,
)
from headrace.cdc.postgres_source.catalogue import (
    PostgresCatalogue,
    check_server,
    connect,
    driver_errors,
    drop_slot,
    ensure_publication,
    ensure_slot,
    slot_name,
    slot_status,
)
from headrace.cdc.postgres_source.chunks import (
    PostgresChunk,
    PostgresChunkReader,
    TransactionSnapshot,
    chunk_batch,
)
from headrace.cdc.postgres_source.deferred_keys import DeferredKeyTables
from headrace.cdc.postgres_source.pgoutput import (
    BEGIN,
    COMMIT,
    OUR_PREFIX,
    Decoder,
)
from headrace.cdc.postgres_source.position import (
    PostgresPosition,
    check_same_history,
    format_lsn,
    server_end,
)
from headrace.cdc.postgres_source.relations import PostgresRelation, RelationMessage
from headrace.errors import ConfigurationError
from headrace.types.schema import quote_identifier

logger = logging.getLogger("headrace.cdc")
_GONE = {"42P01", "42703"}
"""SQLSTATEs of tables and columns that do not exist."""
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
    """Streams the changes of a Postgres database. See `position` for what a position is."""

    reads_conditions: ClassVar[bool] = True
    """Whether a chunk may have a condition."""

    def __init__(
        self,
        url: str,
        name: str,
        tables: Sequence[str],
        connection: Any,
        *,
        prefix: str,
        publication: str | None = None,
        slot: str | None = None,
    ) -> None:
        self.url = url
        self.publication = publication or slot_name(name)
        self.slot = slot or slot_name(name)
        self.has_own_publication = publication is None
        self.has_own_slot = slot is None
        self.wanted = tuple(tables)
        self._catalogue = PostgresCatalogue(connection, publication)
        self._chunks: PostgresChunkReader | None = None
        self._relations: dict[str, PostgresRelation] = {}
        self._decoder = Decoder(self._resolve, prefix)
        self._replication: Any = None
        self._cursor: Any = None
        self._tail: list[bytes] = []
        """Messages behind the last commit that was decoded."""
        self._request: ChunkRequest | None = None
        self._pending_chunk: tuple[TransactionSnapshot, PostgresChunk] | None = None
        self._is_at_chunk = False
        """Whether the stream is where the chunk belongs, or the rest of its table."""
        self._consumed: deque[int] = deque(maxlen=MAX_REMEMBERED_XIDS)
        """The ids of the last transactions that were delivered."""
        self._position = 0
        self._server = PostgresPosition(0)
        """Who the server is; its LSN has no meaning."""
        self._is_first_start = False
        self._reported: set[str] = set()
        """Tables that were reported as stopped, and are so still."""
        self.unavailable: dict[str, str] = {}
        """Why tables that were named, or captured before, cannot be captured."""
        self._stopping: dict[str, tuple[int, TableStopped]] = {}
        """By table that cannot be followed any more, the WAL's end when that was noticed."""
        self._deferred = DeferredKeyTables(self._deferrable_key)
        self._missed: set[str] = set()
        """Tables that were added to the publication: changes before that were missed."""
        self._target: int | None = None
        self._heartbeat_s = self._feedback_s = time.monotonic()
        self._slot: dict[str, Any] = {}
        self._slot_s = 0.0

    @classmethod
    def open(
        cls,
        url: str,
        name: str,
        tables: Sequence[str],
        *,
        prefix: str = "",
        publication: str | None = None,
        slot: str | None = None,
    ) -> Self:
        """Connect to the database. A publication and a slot of somebody else are used as they
        are.
        """
        return cls(
            url, name, tables, connect(url), prefix=prefix, publication=publication, slot=slot
        )

    # Beginning

    def start(self, position: str | None, *, start_over: bool = False) -> str:
        """Begin to stream. The slot exists before any snapshot, so that what happens during the
        snapshot is in the stream.
        """
        stored = PostgresPosition.parse(position) if position and not start_over else None
        with driver_errors():
            check_server(self._catalogue)
            self._replication = connect(self.url, replication=True)
            self._cursor = self._replication.cursor()
            self._server = server_end(self._cursor)
            if stored is not None:
                check_same_history(self._cursor, stored, self._server)
            self._is_first_start = stored is None
            self.tables()
            self._is_first_start = False
            if stored is None:
                self._missed.clear()  # all tables are read anyway
            self._position = ensure_slot(
                self._catalogue,
                self.slot,
                stored.lsn if stored is not None else None,
                start_over=start_over,
                is_ours=self.has_own_slot,
            )
            options = {
                "proto_version": "1",
                "publication_names": quote_identifier(self.publication),
                "messages": "true",
            }
            self._cursor.start_replication(
                self.slot,
                decode=False,
                start_lsn=format_lsn(self._position),
                options=options,
                status_interval=10,
            )
        return self._position_text()

    def _position_text(self) -> str:
        return str(self._server.at(self._position))

    def tables(self) -> list[TableShape]:
        """Return the tables to capture, with where their rows are. A table that was dropped or
        cannot be captured any more is stopped once the stream has come to where that was noticed.
        """
        with driver_errors():
            found = self._catalogue.relations(self.wanted)
            self._check_first_start({**found.problems, **found.missing})
            names = [relation.name for relation in found.relations]
            added: list[str] = []
            refused: dict[str, ConfigurationError] = {}
            if self.has_own_publication:
                added, refused = ensure_publication(self._catalogue, self.publication, names)
            self._check_first_start(refused)
            problems = {**found.problems, **self._serious(refused)}
            unavailable = problems.keys() | refused.keys()
            self.unavailable = {name: str(error) for name, error in problems.items()}
            relations = [each for each in found.relations if each.name not in unavailable]
            storage = self._catalogue.storage(self.publication, [each.id for each in relations])
            self._stop_unavailable({each.name for each in relations}, problems, found.missing)
        self._missed |= set(added)
        shapes = self._decoder.known_shapes
        for relation in relations:
            if relation.name not in self._relations:
                self._reported.discard(relation.name)
                self._relations[relation.name] = relation
                shapes[relation.name] = relation.shape
                self._decoder.describe_again(relation.name)
            known = self._relations[relation.name]
            self._relations[relation.name] = replace(
                known, has_deferrable_key=relation.has_deferrable_key
            )
        changed = [
            relation.name for relation in relations if relation.shape != shapes[relation.name]
        ]
        if changed and self._request is None and self._pending_chunk is None:
            # Columns have changed, and no row since: an empty chunk finds the point in the stream.
            self._request = ChunkRequest(changed[0], None, 0)
        return [
            replace(relation.shape, storage=storage.get(name))
            for name, relation in self._relations.items()
            if name not in self._stopping
        ]

    def _check_first_start(self, errors: Mapping[str, ConfigurationError]) -> None:
        """At the first start, what was asked for and cannot be had is an error."""
        if self._is_first_start and errors:
            raise next(iter(errors.values()))

    def _serious(self, errors: Mapping[str, ConfigurationError]) -> dict[str, ConfigurationError]:
        """Return the errors of tables that are captured or were named; warn of the others."""
        serious = {}
        for name, error in errors.items():
            is_named = {name, name.removeprefix("public.")} & {*self.wanted}
            if is_named or name in self._relations:
                serious[name] = error
            else:
                self._catalogue.skipped.warn(name, error)
        return serious

    def _stop_unavailable(
        self,
        available: set[str],
        problems: Mapping[str, ConfigurationError],
        missing: Mapping[str, ConfigurationError],
    ) -> None:
        """Stop tables that were dropped, or that cannot be captured any more."""
        stopped = {name: TableStopped(name, str(error)) for name, error in problems.items()}
        for name in {*missing, *self._relations} - available - problems.keys():
            reason = str(missing.get(name, f"The table {name} was dropped or renamed."))
            stopped[name] = TableStopped(name, reason, is_gone=True)
        new = stopped.keys() - self._stopping.keys() - self._reported
        if not new:
            return
        ((end,),) = self._catalogue.query("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
        self._catalogue.query("SELECT pg_logical_emit_message(true, %s, 'stop')", OUR_PREFIX)
        for name in new:
            self._stopping[name] = (int(end), stopped[name])

    def _stopped_tables(self) -> list[StreamItem]:
        """Return the tables that end at the current position of the stream."""
        ended = [name for name, (end, _) in self._stopping.items() if self._position >= end]
        return [self._stop(self._stopping.pop(name)[1]) for name in ended]

    def _stop(self, stopped: TableStopped) -> TableStopped:
        """Forget a table that is stopped."""
        self._reported.add(stopped.table)
        self._relations.pop(stopped.table, None)
        if self._request is not None and self._request.table == stopped.table:
            self._request = None
        return stopped

    def _deferrable_key(self, table: str) -> tuple[str, ...] | None:
        relation = self._relations.get(table)
        if relation is None or not relation.has_deferrable_key:
            return None
        return relation.shape.key

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
        if unsent := [name for name in key or names if name not in message.identity]:
            raise ConfigurationError(
                f"The replica identity of {message.name} was changed: of a deleted row, the server"
                f" does not send {unsent[0]!r} any more, which identifies it.",
                fix=(
                    f"ALTER TABLE {message.name} REPLICA IDENTITY"
                    f" {'DEFAULT' if key else 'FULL'}; then request a snapshot of it."
                ),
            )
        relation = message.to_relation(
            self._catalogue.type_name, key, has_deferrable_key=known.has_deferrable_key
        )
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
            if self._pending_chunk is not None and self._is_at_chunk:
                return self._chunk_part()
            self._is_at_chunk = False
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
        """Return what was read as a part. It ends where a chunk that is held back belongs, and the
        rest is read again: a part of its own makes that a point between two commits of the log.
        """
        index = self._chunk_index(payloads)
        if index is not None:
            self._is_at_chunk = True
            self._tail = payloads[index:] + self._tail
            payloads = payloads[:index]
            if not payloads:
                return self._chunk_part()
        decoded = self._decoder.decode(payloads)
        for item in decoded:
            if isinstance(item, TableStopped) and item.table not in self._reported:
                self._stop(item)
        open_transaction = self._decoder.open
        items = self._deferred.items(decoded, open_transaction.xid if open_transaction else None)
        self._consumed.extend(
            int.from_bytes(payload[17:21], "big")
            for payload in payloads[-3 * MAX_REMEMBERED_XIDS :]
            if payload[0] == BEGIN
        )
        if payloads[-1][0] == COMMIT:
            self._position = int.from_bytes(payloads[-1][10:18], "big")
            items += [*self._missed_tables(), *self._stopped_tables()]
            is_idle = is_drained and not self._tail
            return StreamPart(items, self._position_text(), self._decoder.commits, is_idle=is_idle)
        return StreamPart(items, None, is_idle=False)

    def _chunk_part(self) -> StreamPart:
        """Return the chunk that belongs where the stream is now. While a table without a key is
        read, the stream stays there.
        """
        assert self._pending_chunk is not None
        read = self._pending_chunk[1]
        self._pending_chunk = None
        self._is_at_chunk = self._chunks is not None and self._chunks.whole is not None
        if read.chunk.is_first:
            self._decoder.toast.forget(read.relation.id)
        self._cursor.send_feedback()
        return StreamPart(self._chunk_items(read), self._position_text(), is_idle=False)

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
            return StreamPart(self._missed_tables(), self._position_text())
        if self._decoder.found and self._decoder.open is None:
            return StreamPart(self._decoder.decode(()), self._position_text())
        if (
            self._decoder.open is None
            and not self._tail
            and now_s - self._heartbeat_s >= HEARTBEAT_S
        ):
            self._heartbeat_s = now_s
            if end > self._position and self._pending_chunk is None:
                self._position = end
                return StreamPart((), self._position_text())
        if now_s - self._feedback_s >= FEEDBACK_S:
            self._feedback_s = now_s
            self._cursor.send_feedback()
        return StreamPart()

    # Snapshots

    def _try_chunk(self) -> None:
        """Read the requested chunk. A message of our own follows it, so that a transaction comes
        soon that it does not see.
        """
        if self._pending_chunk is not None:
            return
        if self._request is None:
            if self._is_at_chunk and self._chunks is not None:
                self._chunks.abandon()  # nobody wants the rest of the table now
            return
        self._chunks = self._chunks or PostgresChunkReader(
            connect(self.url), None if self.has_own_publication else self.publication
        )
        whole = self._chunks.whole
        goes_on = whole is not None and whole.relation.name == self._request.table
        try:
            with driver_errors():
                self._pending_chunk = self._chunks.read(self._request, self._consumed)
        except ConfigurationError as error:
            self._chunks.abandon()
            self._give_up_chunk(self._request, error)
            return
        if self._pending_chunk is None:
            return
        self._request = None
        if not goes_on:
            self._is_at_chunk = False
            self._catalogue.query(
                "SELECT pg_logical_emit_message(true, %s, 'watermark')", OUR_PREFIX
            )

    def _give_up_chunk(self, request: ChunkRequest, error: ConfigurationError) -> None:
        """Decide what becomes of a snapshot when a chunk cannot be read."""
        code = getattr(error.__cause__, "pgcode", None)
        if code is None:
            self._decoder.found.append(self._stop(TableStopped(request.table, str(error))))
        elif code in _GONE and request.condition is None:
            return  # the table was dropped or altered, which is noticed at once
        elif request.condition is not None and code != "42501":
            logger.error(
                "The rows of %s where %s cannot be read: %s",
                request.table,
                request.condition,
                error.message,
            )
            rows = chunk_batch(self._relations[request.table], None, self._position)
            self._decoder.found.append(SnapshotChunk(request.table, rows, None, is_last=True))
            self._request = None
        else:
            raise error

    def _chunk_items(self, read: PostgresChunk) -> list[StreamItem]:
        """Return a chunk as items of the stream. If the table's columns have changed meanwhile, the
        chunk is replaced by an empty one, so that it is requested again.
        """
        name = read.relation.name
        if name not in self._relations:
            return []
        if read.relation.shape == self._decoder.known_shapes[name]:
            is_probe = not read.chunk.is_last and not read.chunk.rows.num_rows
            return [] if is_probe else [read.chunk]
        self._relations[name] = read.relation
        self._decoder.known_shapes[name] = read.relation.shape
        if self._chunks is not None:
            self._chunks.abandon()
        empty = replace(
            read.chunk, rows=read.chunk.rows.slice(0, 0), after=None, is_last=False, is_first=False
        )
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
            end = PostgresPosition.parse(position).lsn
            with driver_errors():
                self._cursor.send_feedback(write_lsn=end, flush_lsn=end, apply_lsn=end, force=True)

    def status(self) -> dict[str, Any]:
        if time.monotonic() - self._slot_s >= 1.0:
            self._slot_s = time.monotonic()
            with driver_errors():
                self._slot = slot_status(self._catalogue, self.slot)
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
        """Remove the slot and the publication, unless they are somebody else's."""
        removed = []
        if self._replication is not None:
            self._replication.close()
        with driver_errors():
            if self.has_own_slot and self._catalogue.query(
                "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", self.slot
            ):
                drop_slot(self._catalogue, self.slot)
                removed.append(f"replication slot {self.slot}")
            if self.has_own_publication and self._catalogue.query(
                "SELECT 1 FROM pg_publication WHERE pubname = %s", self.publication
            ):
                with self._catalogue.connection.cursor() as cursor:
                    cursor.execute(f"DROP PUBLICATION {quote_identifier(self.publication)}")
                removed.append(f"publication {self.publication}")
        return removed
