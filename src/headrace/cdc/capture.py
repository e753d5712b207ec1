"""The loop of change capture: parts come from the source, are written to the log in whole
transactions, and are confirmed to the source once they are durable.

The position in the source is a note of the log, stored in the same transaction as the rows. So
after a crash at any moment the next process goes on exactly behind the last change that is in the
log, and a process that was replaced is refused by its transaction's epoch. When something fails
that passes by itself (the database restarts, the disk is full), the *session* ends: what was not
committed is dropped, and after a pause the next session starts from the note.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from headrace.cdc.base import CaptureSource, CaptureSpec, ChunkRequest, SnapshotChunk, StreamPart
from headrace.cdc.writer import CaptureWriter, request_name
from headrace.connector import STATUS_INTERVAL_S, ConnectorStatus, Interval, run_sessions
from headrace.errors import ConfigurationError, nearest
from headrace.log.api import Log

logger = logging.getLogger("headrace.cdc")
MAX_COMMIT_ROWS = 200_000
LONGEST_COMMIT_S = 0.5
"""How long changes are gathered for one commit while more keep coming."""
POLL_S = 0.2
TABLES_INTERVAL_S = 2.0
"""How often the source is asked for new tables, and the log for requested snapshots."""


@dataclass
class CaptureStatus(ConnectorStatus):
    """How a capture is doing."""

    capture: str
    rows: int = 0
    """Rows that were written, snapshots included."""
    changes: int = 0
    transactions: int = 0
    dead_letters: int = 0
    """Records that could not be used."""
    position: str | None = None
    snapshots: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By table whose snapshot is running: rows read so far, and about how many there are."""
    source: dict[str, Any] = field(default_factory=dict)
    """What the source says about itself."""


OnStatus = Callable[[CaptureStatus], None]


class CaptureLoop:
    """Runs one capture. With `start_over` the position is dropped and all tables are read again,
    for when the source no longer has what follows the position.
    """

    def __init__(
        self,
        capture: CaptureSpec,
        log: Log,
        *,
        start_over: bool = False,
        on_status: OnStatus | None = None,
    ) -> None:
        self.capture = capture
        self.log = log
        self.status = CaptureStatus(capture.name)
        self._start_over = start_over
        self._on_status = on_status or (lambda _status: None)
        self._writer = CaptureWriter(
            log,
            capture.name,
            prefix=capture.prefix,
            partitions=capture.partitions,
            preimages=capture.preimages,
            outbox=capture.outbox,
        )
        self._requested_chunk: str | None = None
        """The table of which a chunk is requested."""
        self._gathering_since_s: float | None = None
        self._is_inside_transaction = False
        """Whether the source's last part ended inside a transaction."""
        self._tables_interval = Interval(TABLES_INTERVAL_S)
        self._status_interval = Interval(STATUS_INTERVAL_S)

    def run(self, *, stop: Event | None = None, until_caught_up: bool = False) -> None:
        """Capture until `stop` is set or, with `until_caught_up`, until everything is written that
        the database has now.
        """
        stopped = stop or Event()

        def session() -> bool:
            self._session(stopped, until_caught_up=until_caught_up)
            return True

        try:
            run_sessions(
                session,
                what=f"The capture {self.capture.name}",
                stopped=stopped,
                status=self.status,
                report=lambda: self._report(None),
                logger=logger,
            )
        finally:
            self._writer.close()

    def _session(self, stopped: Event, *, until_caught_up: bool) -> None:
        """Capture from the position in the log on, until something fails."""
        state = self._writer.reload()
        self._requested_chunk = None
        self._gathering_since_s = None
        self._is_inside_transaction = False
        source = self.capture.open()
        try:
            position = None if self._start_over else state.position
            state.position = source.start(position, start_over=self._start_over)
            self._update_tables(source, is_first=True)
            self._tables_interval.restart()
            if self._start_over:
                for table in state.tables:
                    self._writer.restart_snapshot(table)
            self._writer.commit()
            self._start_over = False
            source.confirm(state.position)
            while not stopped.is_set():
                is_committed = self._step(source)
                if is_committed and until_caught_up and not state.pending and source.is_caught_up():
                    break
            self._report(source)
        finally:
            source.close()

    def _step(self, source: CaptureSource) -> bool:
        """Handle one part. Returns whether everything that has come is committed."""
        writer = self._writer
        if not self._is_inside_transaction and self._tables_interval.is_due():
            self._update_tables(source)
        self._request_chunk(source)
        part = source.poll(0.0 if writer.waiting_rows else POLL_S)
        if part.items or part.position is not None:
            self._write(part)
            if not part.items and not writer.is_open:
                self._commit(source)  # a heartbeat: the position alone
        if writer.is_open and not self._is_inside_transaction:
            since_s = self._gathering_since_s
            is_late = since_s is not None and time.monotonic() - since_s > LONGEST_COMMIT_S
            if part.is_idle or is_late or writer.waiting_rows >= MAX_COMMIT_ROWS:
                self._commit(source)
        if self._status_interval.is_due():
            self._report(source)
        return part.is_idle and not writer.is_open and self._requested_chunk is None

    def _write(self, part: StreamPart) -> None:
        self._writer.write(part)
        for item in part.items:
            if isinstance(item, SnapshotChunk) and item.table == self._requested_chunk:
                self._requested_chunk = None
        if self._gathering_since_s is None and self._writer.is_open:
            self._gathering_since_s = time.monotonic()
        self._is_inside_transaction = part.position is None

    def _commit(self, source: CaptureSource) -> None:
        """Commit what was written.

        1. Rows and position become durable in the log, together.
        2. Only then the position is confirmed to the source, which may drop what precedes it.
        """
        self._writer.commit()  # 1
        self._gathering_since_s = None
        position = self._writer.state.position
        assert position is not None
        source.confirm(position)  # 2
        self.status.record_success()

    # Tables and their snapshots

    def _update_tables(self, source: CaptureSource, *, is_first: bool = False) -> None:
        """Find new tables, and snapshots that other processes have requested. Called between
        transactions only, since what is found is committed with the next one.
        """
        for shape in source.tables():
            if is_first or shape.name not in self._writer.shapes:
                self._writer.add(shape)
        self._handle_snapshot_request()
        if not self.capture.snapshot:
            for table in self._writer.state.tables.values():
                table.snapshot = None

    def _handle_snapshot_request(self) -> None:
        state = self._writer.state
        text = self.log.note(request_name(self.capture.name))
        if text is None or text == state.handled:
            return
        state.handled = text
        for table in json.loads(text)["tables"]:
            if table in state.tables:
                self._writer.restart_snapshot(table)
            else:
                logger.warning(
                    "A snapshot of %s was requested, which is not captured: %s",
                    table,
                    nearest(table, state.tables),
                )

    def _request_chunk(self, source: CaptureSource) -> None:
        """Request the next chunk of the first snapshot that is not complete."""
        state = self._writer.state
        pending = [table for table in state.pending if table in self._writer.shapes]
        if self._requested_chunk is not None or not pending:
            return
        table = pending[0]
        snapshot = state.tables[table].snapshot
        assert snapshot is not None
        if not snapshot.about:
            snapshot.about = source.count(table)
        self._requested_chunk = table
        source.request(ChunkRequest(table, snapshot.after, self.capture.chunk_rows))

    def _report(self, source: CaptureSource | None) -> None:
        writer, status = self._writer, self.status
        status.rows = writer.rows
        status.changes = writer.changes
        status.transactions = writer.transactions
        status.dead_letters = writer.dead_letters
        status.position = writer.state.position
        status.snapshots = {
            name: (table.snapshot.rows, max(table.snapshot.about, table.snapshot.rows))
            for name, table in writer.state.tables.items()
            if table.snapshot
        }
        if source is not None:
            status.source = source.status()
        self._on_status(status)


def request_snapshot(log: Log, capture: str, tables: list[str]) -> None:
    """Request that a capture, whether it is running or not, reads tables again.

    Args:
        log: The log that the capture writes to.
        capture: Its name.
        tables: The tables to read.

    Raises:
        ConfigurationError: No table is named.
    """
    if not tables:
        raise ConfigurationError("No table was named.", fix="name the tables to read again.")
    note = json.dumps({"tables": tables, "at": time.time_ns()})
    with log.transaction(request_name(capture)) as transaction:
        transaction.set_note(request_name(capture), note)
