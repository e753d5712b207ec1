"""The loop of change capture: parts come from the source, are written to the log in whole
transactions, and are confirmed to the source once they are durable.

The position in the source is a note of the log, stored in the same transaction as the rows. So
after a crash at any moment the next process goes on exactly behind the last change that is in the
log, and a process that was replaced is refused by its transaction's epoch. When something fails
that passes by itself (the database restarts, the disk is full), the *session* ends: what was not
committed is dropped, and after a pause the next session starts from the note.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from headrace.cdc.base import (
    NEVER,
    ONLY,
    WHEN_NEEDED,
    CaptureSource,
    CaptureSpec,
    ChunkRequest,
    PositionLost,
    SnapshotChunk,
    StreamPart,
    TableShape,
    TableStopped,
)
from headrace.cdc.selection import selection_of
from headrace.cdc.state import PAUSE, RESUME, SnapshotRequest, read_requests, request_name
from headrace.cdc.writer import CaptureWriter
from headrace.connector import (
    CATCH_UP_PATIENCE_S,
    STATUS_INTERVAL_S,
    ConnectorStatus,
    Interval,
    run_sessions,
)
from headrace.errors import nearest
from headrace.log.api import Log
from headrace.log.capture_reports import CaptureReporter

logger = logging.getLogger("headrace.cdc")
MAX_COMMIT_ROWS = 200_000
LONGEST_COMMIT_S = 0.5
"""How long changes are gathered for one commit while more keep coming."""
POLL_S = 0.2
REPORT_INTERVAL_S = 5.0
"""How often a running capture reports to the log."""
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
    stopped: dict[str, str] = field(default_factory=dict)
    """Tables that are not followed any more, and why."""
    is_paused: bool = False
    """Whether snapshots are paused."""
    lag_s: float = 0.0
    """How long ago the last change that was written was committed, while more wait; else 0."""
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
        self._selection = selection_of(capture)
        self._writer = CaptureWriter(
            log,
            capture.name,
            prefix=capture.prefix,
            partitions=capture.partitions,
            preimages=capture.preimages,
            outbox=capture.outbox,
            selection=self._selection,
            template=capture.topic,
            schema_topic=capture.schema_topic,
            transaction_topic=capture.transaction_topic,
        )
        self._requested_chunk: str | None = None
        """The table of which a chunk is requested."""
        self._gathering_since_s: float | None = None
        self._is_inside_transaction = False
        """Whether the source's last part ended inside a transaction."""
        self._tables_interval = Interval(TABLES_INTERVAL_S)
        self._status_interval = Interval(STATUS_INTERVAL_S)
        self._reporter = CaptureReporter(log, capture.name)
        self._report_interval = Interval(REPORT_INTERVAL_S)
        self._is_idle = True
        self._is_ending = False

    def run(self, *, stop: Event | None = None, until_caught_up: bool = False) -> None:
        """Capture until `stop` is set or, with `until_caught_up`, until everything is written that
        the database has now. A run that is to catch up gives up when the database has been away for
        a minute.
        """
        stopped = stop or Event()

        try:
            run_sessions(
                lambda: self._session(stopped, until_caught_up=until_caught_up),
                what=f"The capture {self.capture.name}",
                stopped=stopped,
                status=self.status,
                report=lambda: self._report(None),
                logger=logger,
                patience_s=CATCH_UP_PATIENCE_S if until_caught_up else math.inf,
            )
        finally:
            self._writer.close()

    def _session(self, stopped: Event, *, until_caught_up: bool) -> bool:
        """Capture from the position in the log on, until something fails. Returns whether the run
        is complete; if not, the next session begins at once.
        """
        state = self._writer.reload()
        self._requested_chunk = None
        self._gathering_since_s = None
        self._is_inside_transaction = False
        source = self.capture.open()
        try:
            if self.capture.snapshot_mode == ONLY and state.position and not state.pending:
                self._start_over = True  # the run before was complete, and left nothing to follow
            position = None if self._start_over else state.position
            try:
                state.position = source.start(position, start_over=self._start_over)
            except PositionLost as error:
                if self.capture.snapshot_mode != WHEN_NEEDED or self._start_over:
                    raise
                logger.warning("%s reads all tables again: %s", self.capture.name, error.message)
                self._start_over = True
                return False
            self._update_tables(source, is_first=True)
            self._tables_interval.restart()
            if self._start_over:
                for table in state.tables:
                    if table in self._writer.shapes:
                        self._writer.restart_snapshot(table)
            self._writer.commit()
            self._start_over = False
            source.confirm(state.position)
            while not stopped.is_set():
                is_committed = self._step(source)
                is_complete = state.is_paused or not state.pending
                if is_committed and is_complete and self.capture.snapshot_mode == ONLY:
                    self._report(source)
                    source.remove()  # nobody is to follow, so nothing is to be retained
                    return True
                if is_committed and until_caught_up and is_complete and source.is_caught_up():
                    break
            self._is_ending = True
            self._report(source)
            return True
        finally:
            source.close()

    def _step(self, source: CaptureSource) -> bool:
        """Handle one part. Returns whether everything that has come is committed."""
        writer = self._writer
        if not self._is_inside_transaction and self._tables_interval.is_due():
            self._update_tables(source)
        self._request_chunk(source)
        part = source.poll(0.0 if writer.waiting_rows else POLL_S)
        self._is_idle = part.is_idle
        if part.items or part.position is not None:
            if writer.is_open and not self._is_inside_transaction and _begins_snapshot(part):
                self._commit(source)  # offsets tell what precedes the snapshot
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
            if not isinstance(item, SnapshotChunk | TableStopped):
                continue
            if item.table == self._requested_chunk:
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
        shapes = {shape.name: shape for shape in source.tables()}
        if is_first:
            self._selection.check_tables([*shapes, *self._writer.state.tables])
        for shape in shapes.values():
            if is_first or self._writer.has_news(shape):
                self._writer.add(shape)
        if is_first:
            self._stop_missing(shapes, getattr(source, "unavailable", {}))
        self._handle_requests(shapes, getattr(source, "reads_conditions", False))
        if self.capture.snapshot_mode == NEVER:
            for table in self._writer.state.tables.values():
                table.snapshot = None

    def _stop_missing(
        self, shapes: Mapping[str, TableShape], unavailable: Mapping[str, str]
    ) -> None:
        """Stop tables that were captured before, and are not among those of the source.

        Args:
            shapes: The tables of the source.
            unavailable: Why others cannot be captured, where the source knows it.
        """
        for name, table in self._writer.state.tables.items():
            if name not in shapes and table.stopped is None and name != self.capture.outbox:
                reason = unavailable.get(
                    name,
                    "It was dropped or renamed, or is not among the tables to capture any more.",
                )
                self._writer.stop_table(name, reason, is_gone=True)

    def _handle_requests(self, shapes: Mapping[str, TableShape], reads_conditions: bool) -> None:
        state = self._writer.state
        requests = read_requests(
            self.log.note(request_name(self.capture.name)), after=state.handled
        )
        for request in requests:
            state.handled = request.number
            if request.action in {PAUSE, RESUME}:
                state.is_paused = request.action == PAUSE
            for table in request.tables:
                self._handle_request(table, request, shapes, reads_conditions)
        if requests:
            self._writer.touch()

    def _handle_request(
        self,
        name: str,
        request: SnapshotRequest,
        shapes: Mapping[str, TableShape],
        reads_conditions: bool,
    ) -> None:
        """Begin a snapshot that was requested. A name without a schema is in the default one."""
        state = self._writer.state
        matching = [table for table in state.tables if name in {table, table.partition(".")[2]}]
        if not matching:
            logger.warning(
                "A snapshot of %s was requested, which is not captured: %s",
                name,
                nearest(name, state.tables),
            )
            return
        table = matching[0]
        if state.tables[table].stopped:
            if table in shapes:
                self._writer.resume_table(shapes[table])
            else:
                logger.warning(
                    "A snapshot of %s was requested, which cannot be captured: %s",
                    table,
                    state.tables[table].stopped,
                )
        elif request.condition is None or self._writer.shapes[table].copies is not None:
            self._writer.restart_snapshot(table)
        elif reads_conditions:
            state.tables[table].request_rows(request.condition)
        else:
            logger.error(
                "The rows of %s where %s were requested, and captures of %s cannot read those"
                " alone. Request the whole table.",
                table,
                request.condition,
                self.capture.kind,
            )

    def _request_chunk(self, source: CaptureSource) -> None:
        """Request the next chunk of the first snapshot that is not complete."""
        state = self._writer.state
        pending = [table for table in state.pending if table in self._writer.shapes]
        if self._requested_chunk is not None or not pending or state.is_paused:
            return
        table = pending[0]
        snapshot = state.tables[table].snapshot
        assert snapshot is not None
        if not snapshot.about:
            snapshot.about = source.count(table)
        self._requested_chunk = table
        self._writer.await_chunk(table)
        request = ChunkRequest(
            table, snapshot.after, self.capture.chunk_rows, condition=snapshot.condition
        )
        source.request(request)

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
        status.stopped = writer.state.stopped
        status.is_paused = writer.state.is_paused
        newest_us = writer.newest_commit_us
        is_behind = newest_us is not None and not self._is_idle
        status.lag_s = max(0.0, time.time() - newest_us / 1e6) if newest_us and is_behind else 0.0
        if source is not None:
            status.source = source.status()
        if self._report_interval.is_due() or source is None or self._is_ending:
            self._reporter.report(self._figures(status))
        self._on_status(status)

    def _figures(self, status: CaptureStatus) -> dict[str, Any]:
        return {
            "kind": self.capture.kind,
            "position": status.position,
            "rows": status.rows,
            "changes": status.changes,
            "transactions": status.transactions,
            "dead_letters": status.dead_letters,
            "lag_seconds": status.lag_s,
            "behind_bytes": status.source.get("behind_bytes"),
            "retained_bytes": status.source.get("retained_bytes"),
            "snapshot_rows": sum(done for done, _ in status.snapshots.values()),
            "snapshot_about": sum(about for _, about in status.snapshots.values()),
            "is_paused": status.is_paused,
            "stopped": status.stopped,
            "failures": status.failures,
            "error": status.error,
        }


def _begins_snapshot(part: StreamPart) -> bool:
    """Return whether a part has the first chunk of a snapshot, which is a part of its own."""
    return any(isinstance(item, SnapshotChunk) and item.is_first for item in part.items)
