"""The source for MariaDB and MySQL: transactions are put together from the binlog's events, and
handed out whole.
"""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from typing import Any

import pyarrow as pa

from headrace.cdc.base import (
    Changes,
    Chunk,
    ChunkRequest,
    Item,
    Part,
    Reshaped,
    TableShape,
    Truncated,
    usable_names,
)
from headrace.cdc.mysql_source.binlog import BinlogReader, Placed, check_readable, number
from headrace.cdc.mysql_source.catalogue import (
    Catalogue,
    MysqlTable,
    Row,
    batch,
    changes,
    connect,
    lost_binlog,
    mysql_text,
    settings_of,
    told,
    translated,
    with_transaction,
)
from headrace.columnar.columns import COMMITTED_AT, INSERT, ORDER, POSITION, TRANSACTION
from headrace.errors import ConfigurationError

# Chunks of a snapshot, read without a lock, and their places in the binlog.
#
# MariaDB says exactly where in the binlog a consistent read stands, so a chunk's place is right
# behind it. MySQL does not. There a chunk is read when all that the stream has brought can be seen
# (by its GTIDs), and placed where the binlog ends after it: rows that changed in between, which the
# stream has too, are left out of it. This is how Netflix's DBLog does it.


@dataclass(frozen=True)
class FoundChunk:
    """A chunk, its place in the binlog, and the table as it was then. `touched` are changes that
    came before its place, where the chunk may be older or newer than they.
    """

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
        kept = numbered.join(
            pa.Table.from_batches(self.touched).select(key), key, join_type="left anti"
        )["__n"].sort()
        (batch,) = rows.take(kept).combine_chunks().to_batches() or [self.chunk.rows.slice(0, 0)]
        return replace(self.chunk, rows=batch)


class ChunkReader:
    def __init__(self, connection: Any, database: str) -> None:
        self.connection, self.catalogue = connection, Catalogue(connection, database)

    def read(
        self, request: ChunkRequest, consumed: int, gtids: Mapping[str, str]
    ) -> FoundChunk | None:
        """Nothing, if it stands before what the stream has brought already (a commit shows a moment
        later than it is sent).
        """
        return (
            self._read_placed(request, consumed)
            if self.catalogue.is_mariadb
            else self._read_between(request, gtids)
        )

    def _read_between(self, request: ChunkRequest, gtids: Mapping[str, str]) -> FoundChunk | None:
        """MySQL adds a transaction's GTID to those executed when it can be seen, and writes it into
        the binlog before.
        """
        if not self.catalogue.has_gtids:
            raise ConfigurationError(
                "A snapshot of MySQL needs GTIDs, to know what it sees, and the server's gtid_mode"
                " is not ON.",
                fix=(
                    "SET GLOBAL enforce_gtid_consistency = ON; then gtid_mode = OFF_PERMISSIVE,"
                    " ON_PERMISSIVE, ON, one after the other; or capture changes only, with"
                    " snapshot=False."
                ),
            )
        if (
            self.catalogue.ask("SELECT GTID_SUBSET(%s, @@global.gtid_executed)", mysql_text(gtids))[
                0
            ][0]
            != 1
        ):
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
        behind = (
            f"WHERE ({key}) > ({', '.join(['%s'] * len(table.key_columns))})"
            if request.after
            else ""
        )
        columns = ", ".join(map(_quoted, table.columns))
        query = (
            f"SELECT {columns} FROM {_quoted(table.shape.name)} {behind} ORDER BY {key} LIMIT"
            f" {request.rows}"
        )
        cursor.execute(query, [_from_json(value) for value in request.after or ()])
        return [tuple(row) for row in cursor.fetchall()]

    @staticmethod
    def _chunk(
        table: MysqlTable, rows: list[tuple[Any, ...]], request: ChunkRequest, place: int
    ) -> Chunk:
        columns = (
            [list(column) for column in zip(*rows, strict=True)]
            if rows
            else [[] for _ in table.columns]
        )
        found = batch(
            table,
            columns,
            {POSITION: pa.array([place] * len(rows), pa.int64())},
            [INSERT] * len(rows),
        )
        places = [table.columns.index(name) for name in table.key_columns]
        after = [_to_json(rows[-1][each]) for each in places] if rows else None
        return Chunk(table.shape.name, found, after, is_last=len(rows) < request.rows)


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


MAX_ROWS_A_PART = 20_000
HEARTBEAT_S = 10.0
LONGEST_POLL_S = 0.5
REST_S = 0.05
"""How long the rest of a transaction is waited for: the server sends it in one go."""
_STANDALONE = 1
_TRUNCATE = re.compile(
    r"^\s*(?:/\*.*?\*/\s*)?TRUNCATE\s+(?:TABLE\s+)?(?:`?[^`.\s]+`?\.)?`?([^`.\s;]+)`?",
    re.IGNORECASE | re.DOTALL,
)


class MysqlSource:
    def __init__(self, url: str, name: str, tables: Sequence[str]) -> None:
        self.url, self.database, self.wanted = url, str(settings_of(url)["database"]), tuple(tables)
        self._server_id = 1_000_000_000 + zlib.crc32(name.encode()) % 1_000_000_000
        self._catalogue = Catalogue(connect(url), self.database)
        self._chunks: ChunkReader | None = None
        self._binlog: BinlogReader | None = None
        self._tables: dict[str, MysqlTable] = {}
        self._file, self._pos, self._gtids = "", 4, dict[str, str]()
        self._reached = 0
        """How far events have come, whatever they were about."""
        self._rows: dict[str, list[Row]] = {}
        self._waiting = self._order = self._transaction = 0
        self._next_gtid: tuple[str, str] | None = None
        self._place = self._at_s = self._server = 0
        self._is_open = False
        self._items: list[Item] = []
        self._request: ChunkRequest | None = None
        self._held: FoundChunk | None = None
        self._target: int | None = None
        self._beat_s = time.monotonic()

    # Beginning

    def start(self, position: str | None, *, afresh: bool = False) -> str:
        self._catalogue.check_server()
        self.tables()
        ((server,),) = self._catalogue.ask("SELECT @@server_id")
        stored = json.loads(position) if position is not None and not afresh else self._now()
        self._file, self._pos, self._gtids = stored["file"], stored["pos"], stored["gtids"]
        if stored.get("server", server) == server and self._file not in self._catalogue.binlogs():
            raise lost_binlog(f"{self._file} was purged")
        self._server, self._reached = server, number(self._file, self._pos)
        is_mariadb = self._catalogue.is_mariadb
        gtid = ",".join(self._gtids.values()) if is_mariadb else mysql_text(self._gtids) or None
        with translated():
            self._binlog = BinlogReader(
                self.url,
                self._server_id,
                file=self._file,
                position=self._pos,
                gtid=gtid,
                is_mariadb=is_mariadb,
            )
        return self._position()

    def _now(self) -> dict[str, Any]:
        file, pos, gtids = self._catalogue.end_with_gtids()
        return {"file": file, "pos": pos, "gtids": gtids}

    def _position(self) -> str:
        return json.dumps(
            {"file": self._file, "pos": self._pos, "gtids": self._gtids, "server": self._server}
        )

    def tables(self) -> list[TableShape]:
        found = self._catalogue.tables(self.wanted)
        for table in found:
            self._tables.setdefault(table.shape.name, table)
        changed = [
            table.shape.name
            for table in found
            if table.shape != self._tables[table.shape.name].shape
        ]
        if changed and self._request is None and self._held is None:
            self._request = ChunkRequest(
                changed[0], None, 0
            )  # columns changed and no row has since: find its place in the stream
        return [table.shape for table in self._tables.values()]

    def request(self, chunk: ChunkRequest) -> None:
        self._request = chunk

    def count(self, table: str) -> int:
        query = (
            "SELECT coalesce(table_rows, 0) FROM information_schema.tables WHERE table_schema = %s"
            " AND table_name = %s"
        )
        rows = self._catalogue.ask(query, self.database, table)
        return int(rows[0][0]) if rows else 0

    # The stream

    def poll(self, timeout_s: float) -> Part:
        """Events up to a bound, and on to the end of the transaction that it falls into, unless
        that is a large one.
        """
        self._try_chunk()
        transactions, begun_s = 0, time.monotonic()
        while True:
            self._place_chunk()
            taken_s = time.monotonic() - begun_s
            is_full = self._waiting >= MAX_ROWS_A_PART or taken_s >= max(LONGEST_POLL_S, timeout_s)
            if is_full and (not self._is_open or self._waiting >= 2 * MAX_ROWS_A_PART):
                break
            is_busy = bool(self._waiting or self._items or transactions)
            assert self._binlog is not None
            placed = self._binlog.take(
                REST_S if self._is_open else 0.0 if is_busy else max(timeout_s - taken_s, 0.0)
            )
            if placed is None:
                break
            if self._is_commit(placed):
                transactions += 1
                self._end(placed)
        return self._part(transactions)

    def _part(self, transactions: int) -> Part:
        items, self._items = self._items, []
        if self._is_open:
            items += self._flushed()
            self._waiting = 0
            return Part(items, None, is_idle=False) if items else Part(is_idle=False)
        self._waiting = 0
        if items:
            return Part(items, self._position(), transactions)
        if transactions and time.monotonic() - self._beat_s >= HEARTBEAT_S:
            self._beat_s = time.monotonic()
            return Part((), self._position())
        return Part()

    def _is_commit(self, placed: Placed) -> bool:
        """Take an event in. Returns whether it ends a transaction."""
        event, kind = placed.event, type(placed.event).__name__
        if kind in {"WriteRowsEvent", "UpdateRowsEvent", "DeleteRowsEvent"}:
            self._is_open = True
            self._take_rows(placed)
            return False
        if kind == "NotImplementedEvent":
            check_readable(placed)
        if kind in {"MariadbGtidEvent", "GtidEvent"}:
            self._begin(event)
            return False
        self._reached = (
            max(self._reached, number(placed.file, placed.position))
            if not self._is_open
            else self._reached
        )
        if kind == "QueryEvent":
            return self._take_query(placed)
        return kind == "XidEvent"

    def _begin(self, event: Any) -> None:
        self._order, gtid = 0, str(event.gtid)
        tail = gtid.rsplit("-" if ":" not in gtid else ":", 1)[-1]
        self._transaction = int(tail) if tail.isdigit() else 0
        if ":" not in gtid:  # MariaDB's, which also says whether it is a statement of its own
            self._is_open = not event.flags & _STANDALONE
            self._next_gtid = (gtid.split("-", maxsplit=1)[0], gtid)
        elif self._catalogue.has_gtids:
            source = gtid.rsplit(":", 1)[0]
            self._next_gtid = (
                source,
                with_transaction(self._gtids.get(source, ""), self._transaction),
            )

    def _take_query(self, placed: Placed) -> bool:
        """BEGIN opens; COMMIT ends; anything else is a statement of its own, such as DDL."""
        text = (
            placed.event.query
            if isinstance(placed.event.query, str)
            else placed.event.query.decode("utf-8", "replace")
        )
        word = text.strip().upper()
        if (
            self._is_open or word == "BEGIN"
        ):  # inside there are savepoints too, and the table that CREATE … SELECT makes
            self._is_open = True
            return word in {"COMMIT", "ROLLBACK"}
        if (
            (match := _TRUNCATE.match(text))
            and match[1] in self._tables
            and _schema(placed.event) == self.database
        ):
            hidden = {
                POSITION: number(placed.file, placed.position),
                COMMITTED_AT: placed.event.timestamp * 1_000_000,
                TRANSACTION: self._transaction,
                ORDER: 0,
            }
            self._items += [*self._flushed(), Truncated(match[1], hidden)]
        return True

    def _take_rows(self, placed: Placed) -> None:
        event = placed.event
        if event.schema != self.database or event.table not in self._tables:
            return
        self._follow(event)
        rows = told(event, self._tables[event.table], self._order)
        self._order += len(event.rows)
        self._waiting += len(rows)
        self._rows.setdefault(event.table, []).extend(rows)
        self._place, self._at_s = number(placed.file, placed.position), event.timestamp
        flushed = self._flushed()
        self._items += flushed
        if (
            self._held is not None
            and self._held.touched is not None
            and self._held.table.shape.name == event.table
        ):
            self._held.touched.extend(item.rows for item in flushed)

    def _flushed(self) -> list[Changes]:
        """The rows that are taken in and not handed out."""
        rows, self._rows = self._rows, {}
        return [
            changes(
                self._tables[table],
                found,
                position=self._place,
                at_s=self._at_s,
                transaction=self._transaction,
            )
            for table, found in rows.items()
        ]

    def _follow(self, event: Any) -> None:
        """An event names its columns: if they are others than those known, the table was altered
        before it.
        """
        known = self._tables[event.table]
        names = tuple(column.name for column in event.columns)
        if names == known.columns:
            return
        now = self._catalogue.table(event.table)
        kinds = dict(
            zip(known.columns, (kind for _, kind in known.shape.columns), strict=True)
        ) | dict(zip(now.columns, (kind for _, kind in now.shape.columns), strict=True))
        shape = TableShape(
            event.table,
            tuple(
                (usable, kinds.get(name, "STRING"))
                for usable, name in zip(usable_names(names), names, strict=True)
            ),
            known.shape.key,
        )
        self._tables[event.table] = MysqlTable(names, shape, {**known.forms, **now.forms})
        self._items += [*self._flushed(), Reshaped(shape)]

    def _end(self, placed: Placed) -> None:
        self._file, self._pos, self._is_open = placed.file, placed.position, False
        self._reached = number(placed.file, placed.position)
        if self._next_gtid is not None:
            self._gtids[self._next_gtid[0]] = self._next_gtid[1]
            self._next_gtid = None

    # Snapshots

    def _try_chunk(self) -> None:
        if self._request is None or self._held is not None or self._is_open:
            return
        self._chunks = self._chunks or ChunkReader(connect(self.url), self.database)
        self._held = self._chunks.read(self._request, number(self._file, self._pos), self._gtids)
        if self._held is not None:
            self._request = None

    def _place_chunk(self) -> None:
        """Between transactions, when the stream has come to the chunk's place."""
        found = self._held
        if found is None or self._is_open or self._reached < found.place:
            return
        self._held = None
        name = found.table.shape.name
        if found.table.shape == self._tables[name].shape:
            self._items.append(found.untouched())
            return
        self._tables[name] = found.table
        self._items += [
            Reshaped(found.table.shape),
            replace(found.chunk, rows=found.chunk.rows.slice(0, 0), after=None, is_last=False),
        ]

    # The other direction

    def is_caught_up(self) -> bool:
        if self._target is None:
            self._target = number(*self._catalogue.end())
        return self._reached >= self._target

    def confirm(self, position: str) -> None:
        """A binlog is kept by time, not for its readers: there is nobody to tell."""

    def status(self) -> dict[str, Any]:
        file, pos = self._catalogue.end()
        behind = number(file, pos) - number(self._file, self._pos)
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
