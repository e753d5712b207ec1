"""The loop of change capture: parts come from the source, go into the log in whole transactions,
and are confirmed upstream once they are durable here.

The position in the source is a note of the log, stored in the same transaction as the rows. So
after a crash at any moment the next process goes on exactly behind the last change that is in the
log; and a process that was replaced is refused by its transaction's epoch. What fails in passing
(the database restarts, the disk is full) ends a
*session*: what was not committed is forgotten, and after a while the next one starts from the note.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from headrace.cdc.base import CaptureSpec, Chunk, ChunkRequest, Part, Source
from headrace.cdc.writer import Writer, request_name
from headrace.errors import ConfigurationError, RetryError, nearest
from headrace.log.api import Log

logger = logging.getLogger("headrace.cdc")
MAX_ROWS_A_COMMIT = 200_000
LONGEST_GATHERING_S = 0.5
POLL_S = 0.2
LOOK_AROUND_S = 2.0
STATUS_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 30.0


@dataclass
class CaptureStatus:
    """How a capture is doing, for whoever watches."""

    capture: str
    rows: int = 0
    changes: int = 0
    transactions: int = 0
    aside: int = 0
    """Records that could not be used, and are dead letters now."""
    position: str | None = None
    snapshots: dict[str, tuple[int, int]] = field(default_factory=dict)
    """For each table under way: rows done, and about how many there are."""
    source: dict[str, Any] = field(default_factory=dict)
    failures: int = 0
    error: str | None = None


OnStatus = Callable[[CaptureStatus], None]


class Capturing:
    """One capture at work. With `start_over` it forgets its position and reads all tables again,
    for when the source has lost what follows it. `run` returns when it is stopped, or when it has
    caught up, if that is all that was asked for.
    """

    def __init__(
        self,
        capture: CaptureSpec,
        log: Log,
        *,
        start_over: bool = False,
        on_status: OnStatus | None = None,
    ) -> None:
        self.capture, self.log = capture, log
        self._start_over = start_over
        self.status = CaptureStatus(capture.name)
        self._on_status = on_status or (lambda _status: None)
        self._writer = Writer(
            log,
            capture.name,
            prefix=capture.prefix,
            partitions=capture.partitions,
            preimages=capture.preimages,
            outbox=capture.outbox,
        )
        self._asked_chunk: str | None = None
        self._gathering_since_s: float | None = None
        self._inside = False
        """Whether what is in the open transaction ends inside a transaction of the source."""
        self._looked_s = self._told_s = 0.0

    def run(self, *, stop: Event | None = None, until_caught_up: bool = False) -> None:
        stopped = stop or Event()
        try:
            while not stopped.is_set():
                try:
                    self._session(stopped, until_caught_up=until_caught_up)
                    return
                except RetryError as error:
                    self._failed(error, stopped)
        finally:
            self._writer.close()

    def _failed(self, error: RetryError, stopped: Event) -> None:
        self.status.failures += 1
        self.status.error = error.message
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.status.failures - 1, 10))
        logger.warning(
            "The capture %s stopped: %s\nTrying again in %.1f s.", self.capture.name, error, pause_s
        )
        self._tell(None)
        stopped.wait(pause_s)

    def _session(self, stopped: Event, *, until_caught_up: bool) -> None:
        """From the log's position on, until something fails."""
        state = self._writer.reload()
        self._asked_chunk, self._gathering_since_s, self._inside = None, None, False
        source = self.capture.open()
        try:
            state.position = source.start(
                None if self._start_over else state.position, afresh=self._start_over
            )
            self._look_around(source, first=True)
            if self._start_over:
                for table in state.tables:
                    self._writer.renew(table)
            self._writer.commit()
            self._start_over = False
            source.confirm(state.position)
            while not stopped.is_set():
                if (
                    self._step(source)
                    and until_caught_up
                    and not state.pending
                    and source.is_caught_up()
                ):
                    break
            self._tell(source)
        finally:
            source.close()

    def _step(self, source: Source) -> bool:
        """One part. Returns whether everything that was there is now committed."""
        self._look_around(source)
        self._ask_for_chunk(source)
        part = source.poll(0.0 if self._writer.waiting_rows else POLL_S)
        if part.items or part.position is not None:
            self._take(part)
            if not part.items and not self._writer.is_open:
                self._commit(source)  # a heartbeat: the position alone
        if self._is_due(part):
            self._commit(source)
        self._tell_now_and_then(source)
        return part.is_idle and not self._writer.is_open and self._asked_chunk is None

    def _take(self, part: Part) -> None:
        self._writer.write(part)
        if any(isinstance(item, Chunk) and item.table == self._asked_chunk for item in part.items):
            self._asked_chunk = None
        if self._gathering_since_s is None and self._writer.is_open:
            self._gathering_since_s = time.monotonic()
        self._inside = part.position is None

    def _is_due(self, part: Part) -> bool:
        if self._inside or not self._writer.is_open:
            return False
        since_s = self._gathering_since_s
        waited_long = since_s is not None and time.monotonic() - since_s > LONGEST_GATHERING_S
        return part.is_idle or waited_long or self._writer.waiting_rows >= MAX_ROWS_A_COMMIT

    def _commit(self, source: Source) -> None:
        """1. durable in the log, with the position; 2. only then confirmed upstream."""
        self._writer.commit()
        self._gathering_since_s = None
        position = self._writer.state.position
        assert position is not None
        source.confirm(position)
        self.status.failures, self.status.error = 0, None

    # Tables and their snapshots

    def _look_around(self, source: Source, *, first: bool = False) -> None:
        """New tables, and requests of other processes. Only between transactions, since what is
        found here is committed with the next one.
        """
        if self._inside:
            return
        now_s = time.monotonic()
        if not first and now_s - self._looked_s < LOOK_AROUND_S:
            return
        self._looked_s = now_s
        for shape in source.tables():
            if first or shape.name not in self._writer.shapes:
                self._writer.add(shape)
        self._take_request()
        if not self.capture.snapshot:
            for table in self._writer.state.tables.values():
                table.snapshot = None

    def _take_request(self) -> None:
        text, state = self.log.note(request_name(self.capture.name)), self._writer.state
        if text is None or text == state.handled:
            return
        state.handled = text
        for table in json.loads(text)["tables"]:
            if table in state.tables:
                self._writer.renew(table)
            else:
                logger.warning(
                    "A snapshot of %s was asked for, which is not captured: %s",
                    table,
                    nearest(table, state.tables),
                )

    def _ask_for_chunk(self, source: Source) -> None:
        pending = [name for name in self._writer.state.pending if name in self._writer.shapes]
        if self._asked_chunk is not None or not pending:
            return
        snapshot = self._writer.state.tables[pending[0]].snapshot
        assert snapshot is not None
        if not snapshot.about:
            snapshot.about = source.count(pending[0])
        self._asked_chunk = pending[0]
        source.request(ChunkRequest(pending[0], snapshot.after, self.capture.chunk_rows))

    # Telling

    def _tell_now_and_then(self, source: Source) -> None:
        if time.monotonic() - self._told_s >= STATUS_S:
            self._tell(source)

    def _tell(self, source: Source | None) -> None:
        self._told_s = time.monotonic()
        writer, status = self._writer, self.status
        status.rows, status.changes, status.transactions, status.aside = (
            writer.rows,
            writer.changes,
            writer.transactions,
            writer.aside,
        )
        status.position = writer.state.position
        status.snapshots = {
            name: (each.snapshot.rows, max(each.snapshot.about, each.snapshot.rows))
            for name, each in writer.state.tables.items()
            if each.snapshot
        }
        if source is not None:
            status.source = source.status()
        self._on_status(status)


def ask_for_snapshot(log: Log, capture: str, tables: list[str]) -> None:
    """Ask a capture, running or not, to read tables again."""
    if not tables:
        raise ConfigurationError("No table was named.", fix="name the tables to be read again.")
    with log.transaction(request_name(capture)) as transaction:
        transaction.set_note(
            request_name(capture), json.dumps({"tables": tables, "at": time.time_ns()})
        )
