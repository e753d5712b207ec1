"""The loop of a sink: read on in the topic, apply a batch and its place in one commit of the target, again and again.

Where to go on is known by the target alone. What fails in passing (the target restarts, the disk is full) ends a *session*; after a while the next one asks the target
where it is. So it does not matter whether a commit that failed has happened. What fails for good ends the loop.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Event

from headrace.errors import RetryError, TargetUnavailable
from headrace.log.api import Log
from headrace.sinks import followers
from headrace.sinks.batch import batch_of
from headrace.sinks.declared import Sink
from headrace.sinks.following import Following, Piece
from headrace.sinks.letters import Letters
from headrace.sinks.shape import shape_of
from headrace.sinks.target import Refusal, Target, new_owner

logger = logging.getLogger("headrace.sinks")
POLL_S = 0.1
STATUS_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 30.0


@dataclass
class SyncStatus:
    """How a sink is doing, for whoever watches."""

    sink: str
    topic: str
    rows: int = 0
    """Rows of the topic that were applied."""
    upserts: int = 0
    deletes: int = 0
    commits: int = 0
    refused: int = 0
    behind: int = 0
    """Offsets of the topic that are not applied yet."""
    positions: dict[int, int] = field(default_factory=dict)
    failures: int = 0
    error: str | None = None


OnStatus = Callable[[SyncStatus], None]


class Syncing:
    """One sink at work. `run` returns when it is stopped, or when it has caught up with where the topic was when it began, if that is all that was asked for."""

    def __init__(self, sink: Sink, log: Log, topic: str, *, start_over: bool = False, on_status: OnStatus | None = None) -> None:
        self.sink, self.log, self.topic = sink, log, topic
        self.status = SyncStatus(sink.name_for(topic), topic)
        self._letters = Letters(log, self.status.sink)
        self._owner, self._has_begun, self._start_over = new_owner(), False, start_over
        self._on_status = on_status or (lambda _status: None)
        self._told_s = 0.0

    def run(self, *, stop: Event | None = None, until_caught_up: bool = False) -> None:
        followers.remember(self.log, self.topic, self.sink)
        stopped = stop or Event()
        goal = self.log.end_offsets(self.topic) if until_caught_up else None
        while not stopped.is_set():
            try:
                if self._session(stopped, goal):
                    break
            except RetryError as error:
                if not stopped.is_set():
                    self._failed(error, stopped)
        self._tell()

    def _failed(self, error: RetryError, stopped: Event) -> None:
        self.status.failures += 1
        self.status.error = error.message
        pause_s = _pause_s(self.status.failures, error)
        logger.warning("The sink %s stopped: %s\nTrying again in %.1f s.", self.status.sink, error, pause_s)
        self._tell()
        stopped.wait(pause_s)

    def _session(self, stopped: Event, goal: dict[int, int] | None) -> bool:
        """From the target's place on. Returns False if the topic's columns have changed, and the target must be prepared for them."""
        info = self.log.topic(self.topic)
        with self.sink.open(shape_of(self.sink, info), self.log) as target:
            target.stopped = stopped
            target.prepare()
            applied = target.begin(self._owner, resume=self._has_begun, start_over=self._start_over)
            self._has_begun, self._start_over = True, False
            following = Following(self.log, self.topic, applied)
            self.status.positions = following.positions
            while not stopped.is_set():
                piece = following.next(self.sink.batch_rows)
                if piece is not None and self.log.topic(self.topic).arrow_schema != info.arrow_schema:
                    return False
                if piece is not None:
                    self._apply(target, piece)
                    following.advance(piece)
                self._succeeded(piece)
                if goal is not None and all(following.positions.get(partition, 0) >= end for partition, end in goal.items()):
                    break
                if piece is None:
                    stopped.wait(POLL_S)
        return True

    def _apply(self, target: Target, piece: Piece) -> None:
        batch = batch_of(piece.rows, target.shape, piece.start, piece.stop, target.lookup, fresh=piece.fresh)
        refused: list[Refusal] = []

        def tell(each: Sequence[Refusal]) -> None:
            self._letters.write(each, piece.rows, piece.start)
            refused.extend(each)

        if target.apply(batch, tell):
            status = self.status
            status.rows += sum(each.num_rows for each in piece.rows)
            status.upserts, status.deletes = status.upserts + batch.upserts.num_rows, status.deletes + batch.deletes.num_rows
            status.commits, status.refused = status.commits + 1, status.refused + len(refused)

    def _succeeded(self, piece: Piece | None) -> None:
        self.status.behind = piece.behind if piece is not None else 0
        self.status.failures, self.status.error = 0, None
        if time.monotonic() - self._told_s >= STATUS_S:
            self._tell()

    def _tell(self) -> None:
        self._told_s = time.monotonic()
        self._on_status(self.status)


def _pause_s(failures: int, error: RetryError) -> float:
    """Longer each time, and never quite the same, so that many sinks of one target do not come back together; not shorter than the target asks for."""
    longest_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10))
    pause_s = random.uniform(longest_s / 2, longest_s)  # noqa: S311 - nothing is kept secret by it
    return max(pause_s, error.wait_s if isinstance(error, TargetUnavailable) else 0.0)
