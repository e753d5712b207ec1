"""Reads the binlog in a thread, into a bounded queue, so that reading does not wait for writing."""

from __future__ import annotations

import logging
import queue
import socket
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

from headrace.cdc.mysql_source.catalogue import connection_settings, drivers, to_headrace_error
from headrace.errors import ConfigurationError, HeadraceError, RetryError

MAX_EVENTS_WAITING = 5_000
HEARTBEAT_S = 5.0
_UNREADABLE_EVENTS = {39, 40, 42, *range(165, 172)}
"""Types of events that contain rows and that the driver cannot read: MySQL's PARTIAL_UPDATE_ROWS,
TRANSACTION_PAYLOAD and GTID_TAGGED, and MariaDB's compressed events.
"""


@dataclass(frozen=True)
class BinlogEvent:
    """An event of the binlog, with the position after it."""

    event: Any
    file: str
    position: int


def binlog_position(file: str, position: int) -> int:
    """Return a position in the binlogs as a single number that grows."""
    return int(file.rsplit(".", 1)[-1]) << 32 | position


def check_readable(event_at: BinlogEvent) -> None:
    """Raise ConfigurationError if an event contains rows and cannot be read. Most events that the
    driver does not know contain no rows, and can be skipped.
    """
    if event_at.event.event_type in _UNREADABLE_EVENTS:
        raise ConfigurationError(
            f"The binlog has changes after {event_at.file}:{event_at.position} in a form that"
            " cannot"
            " be read: compressed, parts of JSON values, or with tagged GTIDs.",
            fix=(
                "SET GLOBAL binlog_transaction_compression = OFF and binlog_row_value_options = ''"
                " (MariaDB: log_bin_compress = OFF); then run it once with --start-over, which"
                " reads all tables again."
            ),
        )


class BinlogReader:
    """Reads the events of the binlog from a position on."""

    def __init__(
        self,
        url: str,
        server_id: int,
        *,
        file: str | None,
        position: int | None,
        gtid: str | None,
        is_mariadb: bool,
    ) -> None:
        _, replication = drivers()
        self._stopped = Event()
        self._has_opened = False
        self._events: queue.Queue[BinlogEvent | HeadraceError] = queue.Queue(MAX_EVENTS_WAITING)
        start = (
            {"auto_position": gtid, "is_mariadb": is_mariadb}
            if gtid is not None
            else {"log_file": file, "log_pos": position}
        )
        self._stream = replication.BinLogStreamReader(
            connection_settings={**connection_settings(url), "connect_timeout": 10},
            server_id=server_id,
            blocking=True,
            resume_stream=True,
            slave_heartbeat=HEARTBEAT_S,
            pymysql_wrapper=self._connect,
            enable_logging=False,
            filter_non_implemented_events=False,
            **start,
        )
        # The driver warns when a stream ends, which is reported as an error anyway.
        logging.getLogger("pymysqlreplication").setLevel(logging.ERROR)
        self._thread = Thread(target=self._run, daemon=True, name="binlog")

    def start(self) -> None:
        """Begin to read, in a thread."""
        self._thread.start()

    def _connect(self, **settings: Any) -> Any:
        """Open a connection for the driver. It would connect again by itself when the server goes
        away, at a wrong position; instead, the session ends and resumes at the log's position.
        """
        pymysql, _ = drivers()
        is_stream = "cursorclass" not in settings
        if is_stream and self._has_opened:
            raise RetryError(
                "The server closed the stream of its binlog.",
                fix="nothing: the capture tries again.",
            )
        self._has_opened = self._has_opened or is_stream
        return pymysql.connect(**settings)

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                event = self._stream.fetchone()
                if event is None:
                    self._put(
                        RetryError(
                            "The server ended the stream of its binlog.",
                            fix="nothing: the capture tries again.",
                        )
                    )
                    return
                # Rows are decoded at the first access, by the table's number. A server that was
                # restarted may give the number to another table: so access them now.
                _ = getattr(event, "rows", None)
                self._put(BinlogEvent(event, self._stream.log_file, self._stream.log_pos))
        except HeadraceError as error:
            self._put(error)
        except Exception as error:
            self._put(to_headrace_error(error))

    def _put(self, item: BinlogEvent | HeadraceError) -> None:
        while not self._stopped.is_set():
            with suppress(queue.Full):
                self._events.put(item, timeout=0.5)
                return

    def take(self, timeout_s: float) -> BinlogEvent | None:
        """Return the next event; None if none comes in time."""
        try:
            item = (
                self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait()
            )
        except queue.Empty:
            return None
        if isinstance(item, HeadraceError):
            raise item
        return item

    def close(self) -> None:
        """Stop reading. The server's side of the connection is killed too; otherwise it would
        retain the binlog for this reader until it notices.
        """
        self._stopped.set()
        connection: Any = getattr(self._stream, "_stream_connection", None)
        with suppress(Exception):
            self._stream._ctl_connection.cursor().execute(f"KILL {connection.thread_id()}")  # noqa: SLF001
        with suppress(OSError, AttributeError):
            connection._sock.shutdown(socket.SHUT_RDWR)  # noqa: SLF001 - nothing else wakes a thread that waits for the server
        self._thread.join(5)
        with suppress(Exception):
            self._stream.close()
