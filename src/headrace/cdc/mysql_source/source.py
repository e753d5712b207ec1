"""The source `mysql`: puts transactions together from the events of the binlog.

Chunks of a snapshot are read without a lock, and inserted into the stream at a position of the
binlog. MariaDB says exactly where in the binlog a consistent read is. MySQL does not: there a chunk
is read when everything is visible that the stream has delivered (by its GTIDs), and inserted where
the binlog ends afterwards. Rows that changed in between, which the stream has too, are left out of
it. This is the algorithm of Netflix's DBLog.
"""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from typing import Any, Self

import pyarrow as pa

from headrace.cdc.base import (
    ChunkRequest,
    SchemaChange,
    SnapshotChunk,
    StreamItem,
    StreamPart,
    TableChanges,
    TableShape,
    Truncation,
    usable_names,
)
from headrace.cdc.mysql_source.binlog import (
    BinlogEvent,
    BinlogReader,
    binlog_position,
    check_readable,
)
from headrace.cdc.mysql_source.catalogue import (
    MysqlCatalogue,
    MysqlTable,
    RowChange,
    add_transaction,
    binlog_lost_error,
    change_batch,
    connect,
    connection_settings,
    driver_errors,
    format_mysql_gtids,
    row_changes,
    table_changes,
)
from headrace.columnar.columns import COMMITTED_AT, INSERT, ORDER, POSITION, TRANSACTION
from headrace.errors import ConfigurationError

# Chunks of a snapshot


@dataclass(frozen=True)
class MysqlChunk:
    """A chunk, and where it is inserted into the stream."""

    position: int
    """The position in the binlog."""
    table: MysqlTable
    """The table as it was when the chunk was read."""
    chunk: SnapshotChunk
    touched: list[pa.RecordBatch] | None = None
    """Changes in front of the position that the chunk may or may not contain; None if that is
    known.
    """

    def without_touched(self) -> SnapshotChunk:
        """Return the chunk without rows that the stream changed while it was read."""
        if not self.touched:
            return self.chunk
        key = list(self.table.shape.key)
        rows = pa.Table.from_batches([self.chunk.rows])
        numbered = rows.select(key).append_column("__n", pa.array(range(rows.num_rows), pa.int64()))
        untouched = numbered.join(
            pa.Table.from_batches(self.touched).select(key), key, join_type="left anti"
        )["__n"].sort()
        (batch,) = rows.take(untouched).combine_chunks().to_batches() or [
            self.chunk.rows.slice(0, 0)
        ]
        return replace(self.chunk, rows=batch)


class MysqlChunkReader:
    """Reads chunks over a connection of its own."""

    def __init__(self, connection: Any, database: str) -> None:
        self.connection = connection
        self.catalogue = MysqlCatalogue(connection, database)

    def read(
        self, request: ChunkRequest, consumed: int, gtids: Mapping[str, str]
    ) -> MysqlChunk | None:
        """Read a chunk; None if it does not yet see all that the stream has delivered (a commit
        becomes visible a moment after it is sent).

        Args:
            request: Which rows.
            consumed: The position up to which the stream has delivered.
            gtids: The transactions that the stream has delivered.
        """
        if self.catalogue.is_mariadb:
            return self._read_mariadb(request, consumed)
        return self._read_mysql(request, gtids)

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
        if (
            self.catalogue.query(
                "SELECT GTID_SUBSET(%s, @@global.gtid_executed)", format_mysql_gtids(gtids)
            )[0][0]
            != 1
        ):
            return None
        with driver_errors(), self.connection.cursor() as cursor:
            cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
            try:
                table = self.catalogue.table(request.table)
                rows = self._select(cursor, table, request)
            finally:
                cursor.execute("ROLLBACK")
        position = binlog_position(*self.catalogue.end())
        return MysqlChunk(position, table, self._chunk(table, rows, request, position), [])

    def _read_mariadb(self, request: ChunkRequest, consumed: int) -> MysqlChunk | None:
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
                table = self.catalogue.table(request.table)
                rows = self._select(cursor, table, request)
            finally:
                cursor.execute("ROLLBACK")
        return MysqlChunk(position, table, self._chunk(table, rows, request, position))

    @staticmethod
    def _select(cursor: Any, table: MysqlTable, request: ChunkRequest) -> list[tuple[Any, ...]]:
        key = ", ".join(_quoted(name) for name in table.key_columns)
        condition = (
            f"WHERE ({key}) > ({', '.join(['%s'] * len(table.key_columns))})"
            if request.after
            else ""
        )
        columns = ", ".join(map(_quoted, table.columns))
        query = (
            f"SELECT {columns} FROM {_quoted(table.shape.name)} {condition} ORDER BY {key} LIMIT"
            f" {request.rows}"
        )
        cursor.execute(query, [_from_json(value) for value in request.after or ()])
        return [tuple(row) for row in cursor.fetchall()]

    @staticmethod
    def _chunk(
        table: MysqlTable, rows: list[tuple[Any, ...]], request: ChunkRequest, position: int
    ) -> SnapshotChunk:
        columns = (
            [list(column) for column in zip(*rows, strict=True)]
            if rows
            else [[] for _ in table.columns]
        )
        positions = pa.array([position] * len(rows), pa.int64())
        chunk_rows = change_batch(table, columns, {POSITION: positions}, [INSERT] * len(rows))
        indices = [table.columns.index(name) for name in table.key_columns]
        after = [_to_json(rows[-1][index]) for index in indices] if rows else None
        return SnapshotChunk(table.shape.name, chunk_rows, after, is_last=len(rows) < request.rows)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _to_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return (
        value
        if isinstance(value, int | float | str)
        else {"text": value.isoformat(" ") if isinstance(value, datetime) else _text(value)}
    )


def _text(value: Any) -> str:
    return value.isoformat() if isinstance(value, date) else str(value)


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"]) if "hex" in value else value["text"]
    return value


MAX_PART_ROWS = 20_000
HEARTBEAT_S = 10.0
LONGEST_POLL_S = 0.5
REST_S = 0.05
"""How long to wait for the rest of a transaction, which the server sends without a pause."""
_STANDALONE = 1
_TRUNCATE = re.compile(
    r"^\s*(?:/\*.*?\*/\s*)?TRUNCATE\s+(?:TABLE\s+)?(?:`?[^`.\s]+`?\.)?`?([^`.\s;]+)`?",
    re.IGNORECASE | re.DOTALL,
)


class MysqlSource:
    """Streams the changes of a MariaDB or MySQL database. A position is JSON: a binlog file, a
    position in it, and the GTIDs up to there.
    """

    def __init__(self, url: str, name: str, tables: Sequence[str], connection: Any) -> None:
        self.url = url
        self.database = str(connection_settings(url)["database"])
        self.wanted = tuple(tables)
        self._server_id = 1_000_000_000 + zlib.crc32(name.encode()) % 1_000_000_000
        self._catalogue = MysqlCatalogue(connection, self.database)
        self._chunks: MysqlChunkReader | None = None
        self._binlog: BinlogReader | None = None
        self._tables: dict[str, MysqlTable] = {}
        self._file = ""
        self._pos = 4
        self._gtids: dict[str, str] = {}
        self._reached = 0
        """The position up to which events have come, whatever they contain."""
        self._rows: dict[str, list[RowChange]] = {}
        self._waiting = self._order = self._transaction = 0
        self._next_gtid: tuple[str, str] | None = None
        self._row_position = self._at_s = self._server = 0
        self._is_open = False
        self._items: list[StreamItem] = []
        self._request: ChunkRequest | None = None
        self._pending_chunk: MysqlChunk | None = None
        self._target: int | None = None
        self._beat_s = time.monotonic()

    @classmethod
    def open(cls, url: str, name: str, tables: Sequence[str]) -> Self:
        """Connect to the database."""
        return cls(url, name, tables, connect(url))

    # Beginning

    def start(self, position: str | None, *, start_over: bool = False) -> str:
        self._catalogue.check_server()
        self.tables()
        ((server,),) = self._catalogue.query("SELECT @@server_id")
        stored = json.loads(position) if position is not None and not start_over else self._now()
        self._file, self._pos, self._gtids = stored["file"], stored["pos"], stored["gtids"]
        if stored.get("server", server) == server and self._file not in self._catalogue.binlogs():
            raise binlog_lost_error(f"{self._file} was purged")
        self._server, self._reached = server, binlog_position(self._file, self._pos)
        is_mariadb = self._catalogue.is_mariadb
        gtid = (
            ",".join(self._gtids.values())
            if is_mariadb
            else format_mysql_gtids(self._gtids) or None
        )
        with driver_errors():
            self._binlog = BinlogReader(
                self.url,
                self._server_id,
                file=self._file,
                position=self._pos,
                gtid=gtid,
                is_mariadb=is_mariadb,
            )
            self._binlog.start()
        return self._position()

    def _now(self) -> dict[str, Any]:
        file, pos, gtids = self._catalogue.end_with_gtids()
        return {"file": file, "pos": pos, "gtids": gtids}

    def _position(self) -> str:
        return json.dumps(
            {"file": self._file, "pos": self._pos, "gtids": self._gtids, "server": self._server}
        )

    def tables(self) -> list[TableShape]:
        tables = self._catalogue.tables(self.wanted)
        for table in tables:
            self._tables.setdefault(table.shape.name, table)
        changed = [
            table.shape.name
            for table in tables
            if table.shape != self._tables[table.shape.name].shape
        ]
        if changed and self._request is None and self._pending_chunk is None:
            # Columns have changed, and no row since: an empty chunk finds the point in the stream.
            self._request = ChunkRequest(changed[0], None, 0)
        return [table.shape for table in self._tables.values()]

    def request(self, chunk: ChunkRequest) -> None:
        self._request = chunk

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
        self._try_chunk()
        transactions, begun_s = 0, time.monotonic()
        while True:
            self._insert_chunk()
            taken_s = time.monotonic() - begun_s
            is_full = self._waiting >= MAX_PART_ROWS or taken_s >= max(LONGEST_POLL_S, timeout_s)
            if is_full and (not self._is_open or self._waiting >= 2 * MAX_PART_ROWS):
                break
            is_busy = bool(self._waiting or self._items or transactions)
            assert self._binlog is not None
            event_at = self._binlog.take(
                REST_S if self._is_open else 0.0 if is_busy else max(timeout_s - taken_s, 0.0)
            )
            if event_at is None:
                break
            if self._is_commit(event_at):
                transactions += 1
                self._file = event_at.file
                self._pos = event_at.position
                self._is_open = False
                self._reached = binlog_position(event_at.file, event_at.position)
                if self._next_gtid is not None:
                    self._gtids[self._next_gtid[0]] = self._next_gtid[1]
                    self._next_gtid = None
        return self._part(transactions)

    def _part(self, transactions: int) -> StreamPart:
        items, self._items = self._items, []
        if self._is_open:
            items += self._flush()
            self._waiting = 0
            return StreamPart(items, None, is_idle=False) if items else StreamPart(is_idle=False)
        self._waiting = 0
        if items:
            return StreamPart(items, self._position(), transactions)
        if transactions and time.monotonic() - self._beat_s >= HEARTBEAT_S:
            self._beat_s = time.monotonic()
            return StreamPart((), self._position())
        return StreamPart()

    def _is_commit(self, event_at: BinlogEvent) -> bool:
        """Handle an event. Returns whether it ends a transaction."""
        event, kind = event_at.event, type(event_at.event).__name__
        if kind in {"WriteRowsEvent", "UpdateRowsEvent", "DeleteRowsEvent"}:
            self._is_open = True
            self._add_rows(event_at)
            return False
        if kind == "NotImplementedEvent":
            check_readable(event_at)
        if kind in {"MariadbGtidEvent", "GtidEvent"}:
            self._order, gtid = 0, str(event.gtid)
            tail = gtid.rsplit("-" if ":" not in gtid else ":", 1)[-1]
            self._transaction = int(tail) if tail.isdigit() else 0
            if ":" not in gtid:  # MariaDB's, whose event says whether it is a single statement
                self._is_open = not event.flags & _STANDALONE
                self._next_gtid = (gtid.split("-", maxsplit=1)[0], gtid)
            elif self._catalogue.has_gtids:
                source = gtid.rsplit(":", 1)[0]
                self._next_gtid = (
                    source,
                    add_transaction(self._gtids.get(source, ""), self._transaction),
                )
            return False
        self._reached = (
            max(self._reached, binlog_position(event_at.file, event_at.position))
            if not self._is_open
            else self._reached
        )
        if kind == "QueryEvent":
            return self._handle_query(event_at)
        return kind == "XidEvent"

    def _handle_query(self, event_at: BinlogEvent) -> bool:
        """Handle a statement: BEGIN opens a transaction, COMMIT ends it, anything else is a
        transaction of its own, such as DDL. Returns whether it ends one.
        """
        text = (
            event_at.event.query
            if isinstance(event_at.event.query, str)
            else event_at.event.query.decode("utf-8", "replace")
        )
        word = text.strip().upper()
        if (
            self._is_open or word == "BEGIN"
        ):  # inside there may be savepoints, and the CREATE of CREATE … SELECT
            self._is_open = True
            return word in {"COMMIT", "ROLLBACK"}
        if (
            (match := _TRUNCATE.match(text))
            and match[1] in self._tables
            and _schema(event_at.event) == self.database
        ):
            hidden = {
                POSITION: binlog_position(event_at.file, event_at.position),
                COMMITTED_AT: event_at.event.timestamp * 1_000_000,
                TRANSACTION: self._transaction,
                ORDER: 0,
            }
            self._items += [*self._flush(), Truncation(match[1], hidden)]
        return True

    def _add_rows(self, event_at: BinlogEvent) -> None:
        event = event_at.event
        if event.schema != self.database or event.table not in self._tables:
            return
        self._follow_columns(event)
        rows = row_changes(event, self._tables[event.table], self._order)
        self._order += len(event.rows)
        self._waiting += len(rows)
        self._rows.setdefault(event.table, []).extend(rows)
        self._row_position, self._at_s = (
            binlog_position(event_at.file, event_at.position),
            event.timestamp,
        )
        flushed = self._flush()
        self._items += flushed
        if (
            self._pending_chunk is not None
            and self._pending_chunk.touched is not None
            and self._pending_chunk.table.shape.name == event.table
        ):
            self._pending_chunk.touched.extend(item.rows for item in flushed)

    def _flush(self) -> list[TableChanges]:
        """Return the changes of the rows that were added since the last call."""
        rows, self._rows = self._rows, {}
        return [
            table_changes(
                self._tables[table],
                table_rows,
                position=self._row_position,
                at_s=self._at_s,
                transaction=self._transaction,
            )
            for table, table_rows in rows.items()
        ]

    def _follow_columns(self, event: Any) -> None:
        """Report new columns of a table. An event names its columns: if they differ from those
        known, the table was altered before it.
        """
        known = self._tables[event.table]
        names = tuple(column.name for column in event.columns)
        if names == known.columns:
            return
        current = self._catalogue.table(event.table)
        kinds = dict(
            zip(known.columns, (kind for _, kind in known.shape.columns), strict=True)
        ) | dict(zip(current.columns, (kind for _, kind in current.shape.columns), strict=True))
        shape = TableShape(
            event.table,
            tuple(
                (usable, kinds.get(name, "STRING"))
                for usable, name in zip(usable_names(names), names, strict=True)
            ),
            known.shape.key,
        )
        self._tables[event.table] = MysqlTable(names, shape, {**known.forms, **current.forms})
        self._items += [*self._flush(), SchemaChange(shape)]

    # Snapshots

    def _try_chunk(self) -> None:
        if self._request is None or self._pending_chunk is not None or self._is_open:
            return
        self._chunks = self._chunks or MysqlChunkReader(connect(self.url), self.database)
        self._pending_chunk = self._chunks.read(
            self._request, binlog_position(self._file, self._pos), self._gtids
        )
        if self._pending_chunk is not None:
            self._request = None

    def _insert_chunk(self) -> None:
        """Insert the pending chunk into the stream, between transactions, when the stream has come
        to its position. If the table's columns have changed meanwhile, it is replaced by an empty
        one, so that it is requested again.
        """
        pending = self._pending_chunk
        if pending is None or self._is_open or self._reached < pending.position:
            return
        self._pending_chunk = None
        name = pending.table.shape.name
        if pending.table.shape == self._tables[name].shape:
            self._items.append(pending.without_touched())
            return
        self._tables[name] = pending.table
        no_rows = pending.chunk.rows.slice(0, 0)
        self._items += [
            SchemaChange(pending.table.shape),
            replace(pending.chunk, rows=no_rows, after=None, is_last=False),
        ]

    # Confirming

    def is_caught_up(self) -> bool:
        if self._target is None:
            self._target = binlog_position(*self._catalogue.end())
        return self._reached >= self._target

    def confirm(self, position: str) -> None:
        """The server retains binlogs by their age, not for readers."""

    def status(self) -> dict[str, Any]:
        file, pos = self._catalogue.end()
        behind = binlog_position(file, pos) - binlog_position(self._file, self._pos)
        return {
            "binlog": f"{self._file}:{self._pos}",
            "behind_bytes": behind if file == self._file else pos,
        }

    def close(self) -> None:
        if self._binlog is not None:
            self._binlog.close()
        for connection in (
            self._catalogue.connection,
            self._chunks.connection if self._chunks else None,
        ):
            if connection is not None and connection.open:
                connection.close()

    def remove(self) -> list[str]:
        return []


def _schema(event: Any) -> str:
    return event.schema.decode() if isinstance(event.schema, bytes) else str(event.schema)
