"""The binlog, read by a thread into a bounded queue: the server sends when there is something, and
reading must not wait for writing.
"""

from __future__ import annotations

import logging
import queue
import socket
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

from headrace.cdc.mysql_source.catalogue import drivers, ours, settings_of
from headrace.errors import ConfigurationError, HeadraceError, RetryError

MAX_EVENTS_WAITING = 5_000
HEARTBEAT_S = 5.0
_WITH_ROWS = {39, 40, 42, *range(165, 172)}
"""PARTIAL_UPDATE_ROWS, TRANSACTION_PAYLOAD and GTID_TAGGED of MySQL, and MariaDB's compressed
events.
"""


@dataclass(frozen=True)
class Placed:
    """An event, and where the binlog stands behind it."""

    event: Any
    file: str
    position: int


def number(file: str, position: int) -> int:
    """A place in the binlogs as a number that grows."""
    return int(file.rsplit(".", 1)[-1]) << 32 | position


def check_readable(placed: Placed) -> None:
    """Most events that the package does not know say nothing of rows; these do, and must not be
    passed over.
    """
    if placed.event.event_type in _WITH_ROWS:
        raise ConfigurationError(
            f"The binlog has changes behind {placed.file}:{placed.position} in a form that cannot"
            " be read: compressed, parts of JSON values, or with tagged GTIDs.",
            fix=(
                "SET GLOBAL binlog_transaction_compression = OFF and binlog_row_value_options = ''"
                " (MariaDB: log_bin_compress = OFF); then run it once with --start-over, which"
                " reads all tables again."
            ),
        )


class BinlogReader:
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
        self._stopped, self._has_opened = Event(), False
        self._events: queue.Queue[Placed | HeadraceError] = queue.Queue(MAX_EVENTS_WAITING)
        place = (
            {"auto_position": gtid, "is_mariadb": is_mariadb}
            if gtid is not None
            else {"log_file": file, "log_pos": position}
        )
        self._stream = replication.BinLogStreamReader(
            connection_settings={**settings_of(url), "connect_timeout": 10},
            server_id=server_id,
            blocking=True,
            resume_stream=True,
            slave_heartbeat=HEARTBEAT_S,
            pymysql_wrapper=self._connect,
            enable_logging=False,
            filter_non_implemented_events=False,
            **place,
        )
        logging.getLogger("pymysqlreplication").setLevel(
            logging.ERROR
        )  # it warns when a stream ends, which we tell of ourselves
        self._thread = Thread(target=self._run, daemon=True, name="binlog")
        self._thread.start()

    def _connect(self, **settings: Any) -> Any:
        """The package would connect again by itself when the server goes away, and so at the wrong
        place: we begin anew from the log's position instead.
        """
        pymysql, _ = drivers()
        is_stream = "cursorclass" not in settings
        if is_stream and self._has_opened:
            raise RetryError(
                "The server closed the stream of its binlog.", fix="it is tried again."
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
                            "The server ended the stream of its binlog.", fix="it is tried again."
                        )
                    )
                    return
                # Rows are decoded when they are first asked for, by the table's number, and a
                # server that was restarted gives a number to another table: so ask now.
                _ = getattr(event, "rows", None)
                self._put(Placed(event, self._stream.log_file, self._stream.log_pos))
        except HeadraceError as error:
            self._put(error)
        except Exception as error:
            self._put(ours(error))

    def _put(self, what: Placed | HeadraceError) -> None:
        while not self._stopped.is_set():
            with suppress(queue.Full):
                self._events.put(what, timeout=0.5)
                return

    def take(self, timeout_s: float) -> Placed | None:
        """The next event; nothing, if none comes in time."""
        try:
            found = (
                self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait()
            )
        except queue.Empty:
            return None
        if isinstance(found, HeadraceError):
            raise found
        return found

    def close(self) -> None:
        """The server is told too: otherwise it would keep the binlog for a reader that is gone,
        until it notices.
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
