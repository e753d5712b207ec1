"""The source `mysql`: puts transactions together from the events of the binlog.

Rows become changes. What changes rows without rows in the binlog (DDL, statements, cascades of
foreign keys, incomplete images; see `statement`) makes a table *missed*: it is read again, in a
snapshot while the stream goes on, as soon as no other snapshot of it is running.

    binlog         BEGIN; rows of orders; COMMIT; ALTER TABLE orders DROP PARTITION p2025
    out            TableChanges("orders", …), SchemaChange("orders", missed=True)

The rows of a transaction that XA PREPARE wrote are not emitted, only where it begins in the binlog
is remembered, in the position. XA COMMIT reads them from there, XA ROLLBACK forgets them.
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from headrace.cdc.base import (
    ChunkRequest,
    SchemaChange,
    StreamItem,
    StreamPart,
    TableShape,
    Truncation,
)
from headrace.cdc.mysql_source.binlog import (
    ANONYMOUS_GTID,
    DELETE_ROWS,
    EXECUTE_LOAD_QUERY,
    FORMAT,
    GTID,
    INCIDENT,
    MARIADB_GTID,
    QUERY,
    ROWS,
    TABLE_MAP,
    WRITE_ROWS,
    XA_PREPARE,
    XID,
    BinlogEvent,
    BinlogReader,
    binlog_position,
    read_gtid,
    read_prepared,
    read_query,
)
from headrace.cdc.mysql_source.catalogue import (
    Cascades,
    MysqlCatalogue,
    MysqlTable,
    add_transaction,
    binlog_lost_error,
    connect,
    driver_errors,
)
from headrace.cdc.mysql_source.chunk import MysqlChunk, MysqlChunkReader
from headrace.cdc.mysql_source.column_type import Charsets
from headrace.cdc.mysql_source.row_buffer import RowBuffer, RowLayout, make_layout
from headrace.cdc.mysql_source.row_event import (
    ABSENT,
    read_rows,
    read_table,
    table_name,
    table_number,
)
from headrace.cdc.mysql_source.statement import Effect, TableName, parse
from headrace.columnar.columns import COMMITTED_AT, ORDER, POSITION, TRANSACTION
from headrace.errors import ConfigurationError, RetryError
from headrace.mysql import connection_settings

logger = logging.getLogger("headrace.cdc")
MAX_PART_ROWS = 20_000
MAX_PART_BYTES = 32 << 20
HEARTBEAT_S = 10.0
LONGEST_POLL_S = 0.5
REST_S = 0.05
"""How long to wait for the rest of a transaction, which the server sends without a pause."""
MAX_LAYOUTS = 10_000
"""How many descriptions of tables are remembered before all are forgotten."""
REMEMBERED_COMMITS_S = 30.0
"""How long commits of XA transactions are compared with those that a chunk does not see yet."""
REPLAY_SILENCE_S = 60.0
_REPLAY_SERVER_IDS = 1_000_000_000


@dataclass
class _Replay:
    """The rows of an XA transaction, which are read from the binlog when it is committed."""

    reader: BinlogReader
    gtid: str | None
    """The GTID under which it was prepared; if there is none, it is the first transaction."""
    commit: BinlogEvent
    is_found: bool = False
    heard_s: float = field(default_factory=time.monotonic)


class MysqlSource:
    """Streams the changes of a MariaDB or MySQL database. A position is JSON: a binlog file, a
    position in it, the GTIDs up to there, the XA transactions that are prepared there, and the
    tables of which changes were missed.
    """

    def __init__(
        self, url: str, name: str, tables: Sequence[str], connection: Any, *, snapshot: bool = True
    ) -> None:
        self.url = url
        self.database = str(connection_settings(url)["database"])
        self.wanted = tuple(tables)
        self.snapshot = snapshot
        self._server_id = 1_000_000_000 + zlib.crc32(name.encode()) % 1_000_000_000
        self._catalogue = MysqlCatalogue(connection, self.database)
        self._charsets = Charsets(self._catalogue.query)
        self._chunks: MysqlChunkReader | None = None
        self._binlog: BinlogReader | None = None
        self._is_resuming = False

        self._tables: dict[str, MysqlTable] = {}
        self._gone: set[str] = set()
        """Tables that were captured, and cannot be any more."""
        self._maps: dict[int, tuple[TableName, bytes, BinlogEvent]] = {}
        """By the number that rows name, which table they are of and how it is described."""
        self._layouts: dict[bytes, RowLayout] = {}
        """By description."""
        self._current: dict[str, RowLayout] = {}
        """By table, the layout that its shape is of."""
        self._cascades = Cascades(self._catalogue)

        self._file = ""
        self._pos = 4
        self._gtids: dict[str, str] = {}
        self._reached = 0
        """The position up to which events have come, whatever they contain."""
        self._prepared: dict[str, dict[str, Any] | None] = {}
        """By XA transaction, where it begins in the binlog; None if it changes no captured
        table.
        """
        self._committed_xa: dict[str, float] = {}
        """XA transactions of which the commit was delivered, and when."""
        self._missed: dict[str, str] = {}
        """Tables that must be read again, and why."""
        self._reading: set[str] = set()
        """Tables of which a snapshot is running."""

        self._rows: dict[str, RowBuffer] = {}
        self._waiting = self._waiting_bytes = 0
        """Rows of the part that is being made, and the size of their events."""
        self._order = self._transaction = self._server = 0
        self._next_gtid: tuple[str, str] | None = None
        self._gtid: str | None = None
        self._is_open = False
        self._is_xa = False
        """Whether the open transaction is one that XA PREPARE or a one-phase commit will end."""
        self._touched: set[str] = set()
        """Captured tables that the open transaction has rows of, or that it changes unseen."""
        self._replay: _Replay | None = None
        self._items: list[StreamItem] = []
        self._request: ChunkRequest | None = None
        self._pending_chunk: MysqlChunk | None = None
        self._target: int | None = None
        self._beat_s = time.monotonic()

    @classmethod
    def open(cls, url: str, name: str, tables: Sequence[str], *, snapshot: bool = True) -> Self:
        """Connect to the database."""
        return cls(url, name, tables, connect(url), snapshot=snapshot)

    # Beginning

    def start(self, position: str | None, *, start_over: bool = False) -> str:
        self._catalogue.check_server()
        self._is_resuming = position is not None and not start_over
        if not self._is_resuming:
            self._catalogue.check_exist(self.wanted)
        ((server,),) = self._catalogue.query("SELECT @@server_id")
        stored = self._now() if position is None or start_over else json.loads(position)
        self._file, self._pos, self._gtids = stored["file"], stored["pos"], stored["gtids"]
        self._prepared = stored.get("prepared", {})
        self._gone = set(stored.get("gone", ()))
        self.tables()
        for name, why in stored.get("missed", {}).items():
            self._miss([name], why)
        is_same_server = stored.get("server", int(server)) == int(server)
        if is_same_server and self._file not in self._catalogue.binlogs():
            raise binlog_lost_error(f"{self._file} was purged")
        self._server, self._reached = int(server), binlog_position(self._file, self._pos)
        self._binlog = self._reader(self._start_position(), self._server_id)
        return self._position()

    def _now(self) -> dict[str, Any]:
        file, pos, gtids = self._catalogue.end_with_gtids()
        return {"file": file, "pos": pos, "gtids": gtids}

    def _reader(self, start: Mapping[str, Any], server_id: int) -> BinlogReader:
        """Begin to read the binlog from a position."""
        gtids = start["gtids"]
        reader = BinlogReader(
            self.url,
            server_id,
            file=start["file"],
            position=start["pos"],
            gtids=gtids if gtids or self._catalogue.is_mariadb else None,
            is_mariadb=self._catalogue.is_mariadb,
        )
        with driver_errors():
            reader.start()
        return reader

    def _start_position(self) -> dict[str, Any]:
        return {"file": self._file, "pos": self._pos, "gtids": dict(self._gtids)}

    def _position(self) -> str:
        return json.dumps({
            **self._start_position(),
            "server": self._server,
            **({"prepared": self._prepared} if self._prepared else {}),
            **({"missed": self._missed} if self._missed else {}),
            **({"gone": sorted(self._gone)} if self._gone else {}),
        })  # fmt: skip

    def tables(self) -> list[TableShape]:
        is_first = self._binlog is None and not self._is_resuming
        existing, tables = self._catalogue.tables(
            self.wanted, are_required=is_first and bool(self.wanted)
        )
        for name in list(self._tables):
            if name not in existing:
                self._stop(name, "it was dropped or renamed.")
        changed = []
        for table in tables:
            name = table.shape.name
            known = self._tables.setdefault(name, table)
            if name in self._gone:
                self._gone.discard(name)
                self._miss([name], "it was not captured for a while")
            if table.shape != known.shape:
                changed.append(name)
        if changed and self._request is None and self._pending_chunk is None:
            # Columns have changed, and no row since: an empty chunk finds the point in the stream.
            self._request = ChunkRequest(changed[0], None, 0)
        return [table.shape for table in self._tables.values()]

    def request(self, chunk: ChunkRequest) -> None:
        self._request = chunk
        self._reading.add(chunk.table)

    def count(self, table: str) -> int:
        query = (
            "SELECT coalesce(table_rows, 0) FROM information_schema.tables WHERE table_schema = %s"
            " AND table_name = %s"
        )
        rows = self._catalogue.query(query, self.database, table)
        return int(rows[0][0]) if rows else 0

    # The stream

    def poll(self, timeout_s: float) -> StreamPart:
        """Return the changes of events up to a bound, and on to the end of the transaction that it
        falls into, unless that is large.
        """
        self._request_missed()
        self._try_chunk()
        transactions, begun_s = 0, time.monotonic()
        while True:
            self._insert_chunk()
            taken_s = time.monotonic() - begun_s
            is_large = self._waiting >= MAX_PART_ROWS or self._waiting_bytes >= MAX_PART_BYTES
            is_due = is_large or taken_s >= max(LONGEST_POLL_S, timeout_s)
            is_overdue = (
                self._waiting >= 2 * MAX_PART_ROWS or self._waiting_bytes >= 2 * MAX_PART_BYTES
            )
            if is_due and (not self._is_open or is_overdue):
                break
            is_busy = bool(self._waiting or self._items or transactions)
            event = self._take(
                REST_S if self._is_open else 0.0 if is_busy else max(timeout_s - taken_s, 0.0)
            )
            if event is None:
                break
            end = self._handle(event)
            if end is not None:
                transactions += 1
                self._end_transaction(end)
        return self._part(transactions)

    def _take(self, timeout_s: float) -> BinlogEvent | None:
        if self._replay is None:
            assert self._binlog is not None
            return self._binlog.take(timeout_s)
        replay = self._replay
        event = replay.reader.take(timeout_s)
        if event is not None:
            replay.heard_s = time.monotonic()
        elif time.monotonic() - replay.heard_s > REPLAY_SILENCE_S:
            raise RetryError(
                f"The transaction that {replay.commit.file}:{replay.commit.position} commits (XA"
                " COMMIT) does not come from the binlog again.",
                fix="see that the server runs; the capture tries again by itself.",
            )
        return event

    def _end_transaction(self, event: BinlogEvent) -> None:
        self._file = event.file
        self._pos = event.position
        self._is_open = self._is_xa = False
        self._touched.clear()
        self._reached = binlog_position(event.file, event.position)
        if self._next_gtid is not None:
            self._gtids[self._next_gtid[0]] = self._next_gtid[1]
            self._next_gtid = None

    def _part(self, transactions: int) -> StreamPart:
        self._flush()
        items, self._items = self._items, []
        self._waiting = self._waiting_bytes = 0
        if self._is_open:
            return StreamPart(items, None, is_idle=False) if items else StreamPart(is_idle=False)
        if items:
            return StreamPart(items, self._position(), transactions)
        if transactions and time.monotonic() - self._beat_s >= HEARTBEAT_S:
            self._beat_s = time.monotonic()
            return StreamPart((), self._position())
        return StreamPart()

    def _handle(self, event: BinlogEvent) -> BinlogEvent | None:
        """Handle an event. Returns the event at whose position a transaction ends, if one does."""
        if self._replay is not None:
            return self._handle_replayed(self._replay, event)
        kind = event.kind
        if kind == TABLE_MAP:
            self._map(event)
            return None
        if kind in ROWS:
            self._is_open = True
            self._add_rows(event, event)
            return None
        if kind in {MARIADB_GTID, GTID}:
            self._begin(event)
            return None
        if kind == ANONYMOUS_GTID:
            self._order = self._transaction = 0
            self._gtid = None
            return None
        if kind == FORMAT:
            self._maps.clear()
        if not self._is_open:
            self._reached = max(self._reached, binlog_position(event.file, event.position))
        if kind in {QUERY, EXECUTE_LOAD_QUERY}:
            return self._handle_query(event)
        if kind == XA_PREPARE:
            return self._handle_prepared(event)
        if kind == INCIDENT:
            self._miss(self._tables, "the server lost events of its binlog (INCIDENT)")
            return None if self._is_open else event
        return event if kind == XID else None

    def _map(self, event: BinlogEvent) -> None:
        """Remember the description of a table, which rows name by a number."""
        self._maps[table_number(event)] = (table_name(event), event.body[6:], event)

    def _begin(self, event: BinlogEvent) -> None:
        """Begin a transaction that has a GTID."""
        assert self._binlog is not None
        gtid = read_gtid(event, self._binlog.server)
        self._order, self._transaction, self._gtid = 0, gtid.number, gtid.text
        if event.kind == MARIADB_GTID:
            self._is_open = not gtid.is_standalone
            self._is_xa = gtid.is_prepared
            self._next_gtid = (gtid.source, gtid.text)
        elif self._catalogue.has_gtids:
            ranges = add_transaction(self._gtids.get(gtid.source, ""), gtid.number)
            self._next_gtid = (gtid.source, ranges)

    # Statements

    def _handle_query(self, event: BinlogEvent) -> BinlogEvent | None:
        """Handle a statement. COMMIT ends a transaction; outside of one, anything else is a
        transaction of its own, such as DDL. Returns the event if it ends one.
        """
        query = read_query(event)
        statement = parse(query)
        effect = statement.effect
        if effect == Effect.BEGIN:
            self._is_open = True
            self._is_xa = self._is_xa or query.text[:2].upper() == "XA"
            return None
        if effect == Effect.COMMIT:
            return event
        if effect in {Effect.XA_COMMIT, Effect.XA_ROLLBACK}:
            return self._end_prepared(event, statement.transaction, effect)
        if effect in {Effect.ROLLBACK, Effect.ROLLBACK_TO_SAVEPOINT}:
            # It is in the binlog because a table without transactions was changed too.
            if self._is_xa:
                self._touched.update(self._tables)
            else:
                self._miss(set(self._touched), f"changes were undone: {query.text}")
            return event if effect == Effect.ROLLBACK or not self._is_open else None
        if effect != Effect.NONE:
            if self._is_xa:
                self._touched.update(self._tables)  # it is applied when it is committed
            else:
                self._apply(event, effect, statement.tables, query.text)
        is_alone = effect == Effect.NONE and not self._is_open
        if is_alone or effect in {Effect.REWRITE, Effect.DROP, Effect.UNKNOWN}:
            self._cascades.forget()  # it may have added a foreign key
        return None if self._is_open else event

    def _apply(
        self, event: BinlogEvent, effect: Effect, tables: Sequence[TableName], text: str
    ) -> None:
        """Apply what a statement does to captured tables."""
        shown = text if len(text) <= 200 else f"{text[:200]}…"
        if effect == Effect.UNKNOWN:
            self._miss(self._tables, f"of a statement that is not understood: {shown}")
        elif effect == Effect.DROP_DATABASE:
            if tables[0][0].casefold() == self.database.casefold():
                self._miss(list(self._tables), shown)
        elif effect == Effect.TRUNCATE:
            (_, name), *_ = tables
            if tables[0][0] == self.database and name in self._tables:
                self._truncate(event, name)
            else:
                self._miss(self._captured(tables), shown)
        else:
            affected = self._captured(tables)
            if effect == Effect.WRITE:
                affected |= self._captured(self._cascades.children(tables, lambda _key: True))
                if self._catalogue.has_hidden_writers(tables):
                    affected = set(self._tables)
            self._miss(affected, shown)

    def _captured(self, tables: Iterable[TableName]) -> set[str]:
        """Return which tables are captured. Upper and lower case are the same, as on servers with
        `lower_case_table_names`.
        """
        named = {
            name.casefold()
            for schema, name in tables
            if schema.casefold() == self.database.casefold()
        }
        return {name for name in self._tables if name.casefold() in named}

    def _truncate(self, event: BinlogEvent, name: str) -> None:
        hidden = {
            POSITION: binlog_position(event.file, event.position),
            COMMITTED_AT: event.at_s * 1_000_000,
            TRANSACTION: self._transaction,
            ORDER: 0,
        }
        self._flush(name)
        self._items.append(Truncation(name, hidden))
        self._spoil_chunk([name])

    # Tables that must be read again

    def _miss(self, names: Iterable[str], why: str) -> None:
        """Note that tables may have changed without rows in the binlog."""
        for name in names:
            if name not in self._tables:
                continue
            if not self.snapshot:
                raise ConfigurationError(
                    f"Rows of {name} may have changed without rows in the binlog: {why}. This"
                    " capture takes no snapshots, so it cannot know them.",
                    fix="run it with snapshot=True, which reads that table again.",
                )
            if name not in self._missed:
                logger.warning(
                    "Rows of %s may have changed without rows in the binlog: %s. The table is read"
                    " again.",
                    name,
                    why,
                )
            self._missed[name] = why
            self._touched.add(name)
        self._spoil_chunk(names)

    def _spoil_chunk(self, names: Iterable[str]) -> None:
        """Have the pending chunk read again, if it may be of before a change of one of the
        tables.
        """
        pending = self._pending_chunk
        if pending is not None and not pending.sees_position_exactly:
            pending.is_stale = pending.is_stale or pending.table.shape.name in names

    def _request_missed(self) -> None:
        """Have missed tables read again, if no snapshot of them is running: it would begin from the
        start at every such change, and never end. It begins with a part, since the rows of the one
        before are then in the log, where the snapshot finds those that are not there any more.
        """
        if self._is_open:
            return
        for name in list(self._missed):
            if name not in self._reading:
                del self._missed[name]
                self._flush(name)
                self._items.append(SchemaChange(self._tables[name].shape, missed=True))

    def _stop(self, name: str, why: str) -> None:
        """Follow a table no more, since it was dropped or cannot be captured any more. The others
        go on. When it can be captured again, it is read again.
        """
        logger.error("The table %s is not captured any more: %s", name, why)
        self._flush(name)
        del self._tables[name]
        self._current.pop(name, None)
        self._gone.add(name)
        self._missed.pop(name, None)
        self._reading.discard(name)

    # Rows

    def _add_rows(self, event: BinlogEvent, commit: BinlogEvent) -> None:
        """Add the rows of an event. `commit` is where and when they are committed."""
        known = self._maps.get(table_number(event))
        if known is None:
            raise RetryError(
                f"The binlog has rows at {event.file}:{event.position} of a table that it did not"
                " describe before.",
                fix="nothing: the capture tries again.",
            )
        table, description, map_event = known
        is_parent = self._cascades.has_parent(table)
        schema, name = table
        is_captured = schema == self.database and name in self._tables
        if not is_captured and not is_parent:
            return
        if self._is_xa and self._replay is None:
            self._touched.add(name)
            return
        if is_parent and event.kind not in WRITE_ROWS:
            self._follow_cascades(event, table, map_event)
        if is_captured:
            self._add_captured(event, name, description, map_event, commit)

    def _follow_cascades(
        self, event: BinlogEvent, table: TableName, map_event: BinlogEvent
    ) -> None:
        """Note the tables that foreign keys change together with rows of a parent."""
        shown = ".".join(table)
        if event.kind in DELETE_ROWS:
            children = self._cascades.children([table], lambda key: key.on_delete)
            self._miss(
                self._captured(children), f"rows of {shown} were deleted, and foreign keys cascade"
            )
            return
        logged = read_table(map_event, self._charsets, is_mariadb=self._catalogue.is_mariadb)
        images = read_rows(event, logged).images
        changed = {
            column.name
            for index, column in enumerate(logged.columns)
            for before, after in zip(images[::2], images[1::2], strict=True)
            if before[index] != after[index] and after[index] is not ABSENT
        }
        children = self._cascades.children(
            [table], lambda key: key.on_update and bool(key.columns & changed)
        )
        self._miss(self._captured(children), f"a key of {shown} changed, and foreign keys cascade")

    def _add_captured(
        self,
        event: BinlogEvent,
        name: str,
        description: bytes,
        map_event: BinlogEvent,
        commit: BinlogEvent,
    ) -> None:
        try:
            layout = self._layout(name, description, map_event)
        except ConfigurationError as error:
            self._stop(name, str(error))
            return
        self._touched.add(name)
        rows = read_rows(event, layout.logged)
        if not rows.is_complete:
            self._miss(
                [name], "a session has a binlog_row_image other than FULL, so values are missing"
            )
            return
        buffered = self._rows.setdefault(name, RowBuffer())
        self._order = buffered.add(event.kind, rows.images, layout, self._order)
        position = binlog_position(commit.file, commit.position)
        self._waiting += buffered.finish(position, commit.at_s, self._transaction)
        self._waiting_bytes += len(event.body)

    def _layout(self, name: str, description: bytes, map_event: BinlogEvent) -> RowLayout:
        """Return how rows of a description become the table's. If that is not the table that is
        known, it was altered before them.

        Raises:
            ConfigurationError: The table cannot be followed any more.
        """
        layout = self._layouts.get(description)
        if layout is not None and self._current.get(name) is layout:
            return layout
        logged = read_table(map_event, self._charsets, is_mariadb=self._catalogue.is_mariadb)
        known = self._tables[name]
        hints = [known]
        if {column.name for column in logged.columns} != set(known.names):
            with suppress(ConfigurationError):  # it is dropped, or has lost its key
                hints.append(self._catalogue.table(name))
        table, layout = make_layout(name, logged, hints)
        if table.shape != known.shape:
            self._flush(name)
            self._items.append(SchemaChange(table.shape))
        self._tables[name] = table
        if len(self._layouts) >= MAX_LAYOUTS:
            self._layouts.clear()
        self._layouts[description] = self._current[name] = layout
        return layout

    def _flush(self, only: str | None = None) -> None:
        """Move rows that were added to the items: those of one table, or of all."""
        for name in [only] if only is not None else list(self._rows):
            rows = self._rows.pop(name, None)
            if rows is None or not rows.kinds:
                continue
            changes = rows.to_changes(self._tables[name])
            self._items.append(changes)
            pending = self._pending_chunk
            if pending is not None and pending.table.shape.name == name:
                is_unsure = not pending.sees_position_exactly or self._replay is not None
                if is_unsure and not pending.is_stale:
                    pending.touched.append(changes.rows)

    # XA transactions

    def _handle_prepared(self, event: BinlogEvent) -> BinlogEvent | None:
        """Handle the end of an XA transaction's rows: it is prepared, or committed at once."""
        prepared = read_prepared(event)
        start = {**self._start_position(), "gtid": self._gtid} if self._touched else None
        if not prepared.is_one_phase:
            self._prepared[prepared.transaction] = start
            return event
        if start is None:
            return event
        self._begin_replay(start, event)
        return None

    def _end_prepared(
        self, event: BinlogEvent, transaction: str, effect: Effect
    ) -> BinlogEvent | None:
        """Handle XA COMMIT or XA ROLLBACK of a transaction that was prepared before."""
        is_known = transaction in self._prepared
        start = self._prepared.pop(transaction, None)
        if effect == Effect.XA_ROLLBACK:
            return event
        self._committed_xa[transaction] = time.monotonic()
        if not is_known:
            self._miss(
                self._tables, "a transaction was committed (XA COMMIT) that was prepared before"
            )
            return event
        if start is None:
            return event
        self._begin_replay(start, event)
        return None

    def _begin_replay(self, start: Mapping[str, Any], commit: BinlogEvent) -> None:
        self._flush()
        reader = self._reader(start, self._server_id + _REPLAY_SERVER_IDS)
        self._replay = _Replay(reader, start["gtid"], commit)
        self._replay.is_found = start["gtid"] is None
        self._is_open = True
        self._order = 0

    def _handle_replayed(self, replay: _Replay, event: BinlogEvent) -> BinlogEvent | None:
        """Handle an event of a transaction that is read again. Returns its commit at its end."""
        kind = event.kind
        if kind == TABLE_MAP:
            self._map(event)
        elif kind in {MARIADB_GTID, GTID}:
            replay.is_found = read_gtid(event, replay.reader.server).text == replay.gtid
        elif not replay.is_found:
            return None
        elif kind in ROWS:
            self._add_rows(event, replay.commit)
        elif kind in {QUERY, EXECUTE_LOAD_QUERY}:
            query = read_query(event)
            statement = parse(query)
            if statement.effect in {Effect.WRITE, Effect.UNKNOWN}:
                self._apply(event, statement.effect, statement.tables, query.text)
        elif kind == XA_PREPARE:
            self._flush()
            replay.reader.close()
            self._replay = None
            return replay.commit
        return None

    # Snapshots

    def _try_chunk(self) -> None:
        if self._request is None or self._pending_chunk is not None or self._is_open:
            return
        if self._request.table not in self._tables:
            return
        oldest_s = time.monotonic() - REMEMBERED_COMMITS_S
        self._committed_xa = {
            name: at_s for name, at_s in self._committed_xa.items() if at_s > oldest_s
        }
        self._chunks = self._chunks or MysqlChunkReader(connect(self.url), self.database)
        self._pending_chunk = self._chunks.read(
            self._request,
            consumed=binlog_position(self._file, self._pos),
            gtids=self._gtids,
            committed=self._committed_xa,
        )
        if self._pending_chunk is not None:
            self._request = None

    def _insert_chunk(self) -> None:
        """Insert the pending chunk into the stream, between transactions, when the stream has come
        to its position. If the table has changed meanwhile, it is replaced by an empty one, so that
        it is requested again.
        """
        pending = self._pending_chunk
        if pending is None or self._is_open or self._reached < pending.position:
            return
        name = pending.table.shape.name
        if name not in self._tables:
            self._pending_chunk = None
            return
        self._flush(name)
        self._pending_chunk = None
        has_same_shape = pending.table.shape == self._tables[name].shape
        if has_same_shape and not pending.is_stale:
            chunk = pending.without_touched()
            self._items.append(chunk)
            if chunk.is_last:
                self._reading.discard(name)
            return
        if not has_same_shape:
            self._tables[name] = pending.table
            self._current.pop(name, None)
            self._items.append(SchemaChange(pending.table.shape))
        self._items.append(pending.without_rows())

    # Confirming

    def is_caught_up(self) -> bool:
        if self._target is None:
            self._target = binlog_position(*self._catalogue.end())
        is_complete = not set(self._missed) - self._reading and self._replay is None
        return is_complete and self._reached >= self._target

    def confirm(self, position: str) -> None:
        """The server retains binlogs by their age, not for readers."""

    def status(self) -> dict[str, Any]:
        file, pos = self._catalogue.end()
        behind = binlog_position(file, pos) - binlog_position(self._file, self._pos)
        return {
            "binlog": f"{self._file}:{self._pos}",
            "behind_bytes": behind if file == self._file else pos,
            **({"prepared_transactions": len(self._prepared)} if self._prepared else {}),
        }

    def close(self) -> None:
        for reader in (self._binlog, self._replay.reader if self._replay else None):
            if reader is not None:
                reader.close()
        for connection in (
            self._catalogue.connection,
            self._chunks.connection if self._chunks else None,
        ):
            if connection is not None and connection.open:
                connection.close()

    def remove(self) -> list[str]:
        return []
