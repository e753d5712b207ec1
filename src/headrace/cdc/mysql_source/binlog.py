"""Reads the binlog in a thread, into a bounded queue, so that reading does not wait for writing.

The thread takes events off the connection and parses their headers; what is in them is parsed by
whoever takes them from the queue (`row_event` for rows, `read_query` and `read_gtid` here).

    on the wire    0x00, then the header in 19 bytes, the body, and a CRC-32 if the file has them
    out            BinlogEvent(kind=WRITE_ROWS, at_s=1767225600, body=b"…", file="binlog.000007",
                               position=4711)
"""

from __future__ import annotations

import queue
import socket
import struct
import zlib
from collections.abc import Mapping
from contextlib import suppress
from threading import Condition, Event, Thread
from typing import Any, NamedTuple

from headrace.cdc.mysql_source.catalogue import drivers, to_headrace_error
from headrace.errors import ConfigurationError, HeadraceError, RetryError
from headrace.mysql import connection_settings

MAX_EVENTS_WAITING = 5_000
MAX_BYTES_WAITING = 32 << 20
HEARTBEAT_S = 5.0
SILENCE_S = 60.0
"""How long the server may send nothing, not even a heartbeat, before the session ends."""

QUERY, STOP, ROTATE, FORMAT, XID, TABLE_MAP = 2, 3, 4, 15, 16, 19
EXECUTE_LOAD_QUERY, INCIDENT, GTID, ANONYMOUS_GTID, XA_PREPARE = 18, 26, 33, 34, 38
MARIADB_GTID = 162
WRITE_ROWS = frozenset({23, 30})
UPDATE_ROWS = frozenset({24, 31})
DELETE_ROWS = frozenset({25, 32})
ROWS = WRITE_ROWS | UPDATE_ROWS | DELETE_ROWS
ROWS_VERSION_2 = frozenset({30, 31, 32})
_WITHOUT_CHANGES = frozenset({
    STOP, 5, 9, 11, 13, 14, 17, 27, 28, 29, 35, 36, 37, 41, 160, 161, 163, 164
})  # fmt: skip
"""Variables of statements, heartbeats, texts of statements, lists of GTIDs, and the like."""
_IGNORABLE = 0x80


class BinlogEvent(NamedTuple):
    """An event of the binlog, with the file that it is in and the position after it."""

    kind: int
    at_s: int
    """When the statement began, in seconds of Unix time."""
    body: bytes
    file: str
    position: int


def binlog_position(file: str, position: int) -> int:
    """Return a position in the binlogs as a single number that grows."""
    return int(file.rsplit(".", 1)[-1]) << 32 | position


def check_readable(kind: int, flags: int, place: str) -> None:
    """Raise ConfigurationError if an event has changes that cannot be read, or might have."""
    if kind in _WITHOUT_CHANGES or flags & _IGNORABLE:
        return
    raise ConfigurationError(
        f"The binlog has changes after {place} in a form that cannot be read: compressed, parts of"
        f" JSON values, or with tagged GTIDs (the event has the type {kind}).",
        fix=(
            "SET GLOBAL binlog_transaction_compression = OFF and binlog_row_value_options = ''"
            " (MariaDB: log_bin_compress = OFF); then run it once with --start-over, which"
            " reads all tables again."
        ),
    )


_PARSED = frozenset({
    QUERY, ROTATE, FORMAT, XID, TABLE_MAP, EXECUTE_LOAD_QUERY, INCIDENT, GTID, ANONYMOUS_GTID,
    XA_PREPARE, MARIADB_GTID, *ROWS,
})  # fmt: skip


# What is in an event


class LoggedQuery(NamedTuple):
    """A statement in the binlog."""

    text: str
    schema: str
    """The default database of the session."""
    has_ansi_quotes: bool
    """Whether "…" is a name, and no text."""
    has_backslash_escapes: bool


_ANSI_QUOTES, _NO_BACKSLASH_ESCAPES = 1 << 2, 1 << 20
_FLAGS_VARIABLE, _SQL_MODE_VARIABLE = 0, 1


def read_query(event: BinlogEvent) -> LoggedQuery:
    """Return the statement of a QUERY or EXECUTE_LOAD_QUERY event."""
    body = event.body
    schema_length, _, variables_length = struct.unpack_from("<BHH", body, 8)
    start = 13 if event.kind == QUERY else 26
    variables = body[start : start + variables_length]
    schema_end = start + variables_length + schema_length
    mode = 0
    offset = 5 if variables[:1] == bytes([_FLAGS_VARIABLE]) else 0
    if variables[offset : offset + 1] == bytes([_SQL_MODE_VARIABLE]):
        (mode,) = struct.unpack_from("<Q", variables, offset + 1)
    return LoggedQuery(
        body[schema_end + 1 :].decode("utf-8", "replace"),
        body[start + variables_length : schema_end].decode("utf-8", "replace"),
        bool(mode & _ANSI_QUOTES),
        not mode & _NO_BACKSLASH_ESCAPES,
    )


class LoggedGtid(NamedTuple):
    """The beginning of a transaction."""

    source: str
    """MariaDB's domain; MySQL's server, with the tag if there is one."""
    number: int
    text: str
    is_standalone: bool = False
    """Whether it is a single statement, without an end of its own (MariaDB says so)."""
    is_prepared: bool = False
    """Whether XA PREPARE ends it (MariaDB says so)."""


_STANDALONE, _PREPARED_XA = 1, 64


def read_gtid(event: BinlogEvent, server: int) -> LoggedGtid:
    """Return the GTID of a GTID or MARIADB_GTID event. `server` is the id of who wrote it."""
    if event.kind == MARIADB_GTID:
        number, domain, flags = struct.unpack_from("<QIB", event.body)
        text = f"{domain}-{server}-{number}"
        is_standalone, is_prepared = bool(flags & _STANDALONE), bool(flags & _PREPARED_XA)
        return LoggedGtid(str(domain), number, text, is_standalone, is_prepared)
    digits = event.body[1:17].hex()
    (number,) = struct.unpack_from("<q", event.body, 17)
    uuid = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    return LoggedGtid(uuid, number, f"{uuid}:{number}")


class LoggedPrepare(NamedTuple):
    """The end of an XA transaction's rows."""

    is_one_phase: bool
    """Whether it is committed with it."""
    transaction: str
    """Its name as XA COMMIT writes it: the two parts in hexadecimal digits, and the format."""


def read_prepared(event: BinlogEvent) -> LoggedPrepare:
    """Return what an XA_PREPARE event says."""
    is_one_phase, form, gtrid, _ = struct.unpack_from("<BIII", event.body)
    name = event.body[13:]
    return LoggedPrepare(bool(is_one_phase), f"{name[:gtrid].hex()},{name[gtrid:].hex()},{form}")


# Reading


class _BoundedQueue:
    """A queue that is bounded in events and in bytes. An event larger than the bound is let in
    alone.
    """

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[BinlogEvent, int] | HeadraceError] = queue.Queue()
        self._changed = Condition()
        self._count = self._bytes = 0

    def put(self, event: BinlogEvent, server: int, stopped: Event) -> None:
        size = len(event.body)
        with self._changed:
            while self._count and (
                self._count >= MAX_EVENTS_WAITING or self._bytes + size > MAX_BYTES_WAITING
            ):
                self._changed.wait(0.5)
                if stopped.is_set():
                    return
            self._count += 1
            self._bytes += size
        self._queue.put((event, server))

    def fail(self, error: HeadraceError) -> None:
        self._queue.put(error)

    def take(self, timeout_s: float) -> tuple[BinlogEvent, int] | None:
        try:
            item = self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, HeadraceError):
            raise item
        with self._changed:
            self._count -= 1
            self._bytes -= len(item[0].body)
            self._changed.notify()
        return item


class BinlogReader:
    """Reads the events of the binlog from a position on. Nothing is sent before `start`."""

    def __init__(
        self,
        url: str,
        server_id: int,
        *,
        file: str,
        position: int,
        gtids: Mapping[str, str] | None,
        is_mariadb: bool,
    ) -> None:
        self._settings = {
            **connection_settings(url),
            "connect_timeout": 10,
            "read_timeout": SILENCE_S,
        }
        self._url = url
        self._server_id = server_id
        self._file = file
        self._position = position
        self._gtids = gtids
        self._is_mariadb = is_mariadb
        self._stopped = Event()
        self._has_checksums = False
        self._events = _BoundedQueue()
        self._connection: Any = None
        self._control: Any = None
        """Another connection, which is gone too if the server was restarted: only then its numbers
        of connections are others.
        """
        self._thread = Thread(target=self._run, daemon=True, name="binlog")
        self.server = 0
        """The id of the server that wrote the event that was taken last."""

    def start(self) -> None:
        """Connect, and begin to read, in a thread."""
        pymysql, _ = drivers()
        self._connection = pymysql.connect(**self._settings)
        self._control = pymysql.connect(**self._settings)
        with self._connection.cursor() as cursor:
            cursor.execute(
                "SET @master_binlog_checksum = @@global.binlog_checksum,"
                " @source_binlog_checksum = @@global.binlog_checksum"
            )
            beat_ns = int(HEARTBEAT_S * 1_000_000_000)
            cursor.execute(
                f"SET @master_heartbeat_period = {beat_ns}, @source_heartbeat_period = {beat_ns}"
            )
            cursor.execute("SET @mariadb_slave_capability = 4")
            if self._is_mariadb and self._gtids is not None:
                cursor.execute("SET @slave_connect_state = %s", (",".join(self._gtids.values()),))
                cursor.execute("SET @slave_gtid_strict_mode = 1, @slave_gtid_ignore_duplicates = 0")
        command = self._dump_command()
        self._connection._write_bytes(struct.pack("<I", len(command)) + command)  # noqa: SLF001 - the driver has no command for it
        self._connection._next_seq_id = 1  # noqa: SLF001
        self._thread.start()

    def _dump_command(self) -> bytes:
        """Return the command with which the server begins to send its binlog: COM_BINLOG_DUMP, or
        MySQL's COM_BINLOG_DUMP_GTID.
        """
        if self._gtids is None:
            place = (self._position, self._file.encode())
        elif self._is_mariadb:
            place = (4, b"")
        else:
            _, replication = drivers()
            executed: bytes = replication.gtid.GtidSet(
                ",".join(f"{source}:{ranges}" for source, ranges in self._gtids.items())
            ).encoded()
            return (
                struct.pack("<BHIIQI", 0x1E, 0x04, self._server_id, 0, 4, len(executed)) + executed
            )
        return struct.pack("<BIHI", 0x12, place[0], 0, self._server_id) + place[1]

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                packet = self._connection._read_packet()  # noqa: SLF001
                data = packet.get_all_data()
                if data[:1] != b"\0":
                    self._events.fail(
                        RetryError(
                            "The server ended the stream of its binlog.",
                            fix="nothing: the capture tries again.",
                        )
                    )
                    return
                self._handle(data)
        except HeadraceError as error:
            self._events.fail(error)
        except Exception as error:
            self._events.fail(to_headrace_error(error))

    def _handle(self, data: bytes) -> None:
        """Parse an event's header, and put it into the queue if it matters."""
        at_s, kind, server, _, position, flags = struct.unpack_from("<IBIIIH", data, 1)
        end = len(data)
        if kind in {ROTATE, FORMAT}:
            # Each file has checksums or not. The rotation that names the first one precedes it.
            has_checksum = _crc(data, end - 4) == data[-4:]
            end -= 4 if has_checksum else 0
            self._has_checksums = has_checksum if kind == FORMAT else self._has_checksums
        elif self._has_checksums:
            end -= 4
            if _crc(data, end) != data[-4:]:
                raise RetryError(
                    f"An event of the binlog after {self._file}:{self._position} came with a wrong"
                    " checksum.",
                    fix=(
                        "nothing, if the network damaged it: the capture tries again. If it comes"
                        " back, the server's disk did: check the binlog with mysqlbinlog"
                        " --verify-binlog-checksum."
                    ),
                )
        if kind == ROTATE:
            (self._position,) = struct.unpack_from("<Q", data, 20)
            self._file = data[28:end].decode()
        elif position:
            self._position = position
        if kind not in _PARSED:
            check_readable(kind, flags, f"{self._file}:{self._position}")
        event = BinlogEvent(kind, at_s, data[20:end], self._file, self._position)
        self._events.put(event, server, self._stopped)

    def take(self, timeout_s: float) -> BinlogEvent | None:
        """Return the next event; None if none comes in time."""
        item = self._events.take(timeout_s)
        if item is None:
            return None
        event, self.server = item
        return event

    def close(self) -> None:
        """Stop reading. The server's side of the connection is killed too; otherwise it would
        retain the binlog for this reader until it notices.
        """
        self._stopped.set()
        connection, control = self._connection, self._control
        with suppress(Exception):
            control.cursor().execute(f"KILL {connection.thread_id()}")
        with suppress(OSError, AttributeError):
            connection._sock.shutdown(socket.SHUT_RDWR)  # noqa: SLF001 - nothing else wakes a thread that waits for the server
        if self._thread.is_alive():
            self._thread.join(5)
        for opened in (connection, control):
            if opened is not None:
                opened._force_close()  # noqa: SLF001 - the server need not be told


def _crc(data: bytes, end: int) -> bytes:
    return zlib.crc32(memoryview(data)[1:end]).to_bytes(4, "little")
