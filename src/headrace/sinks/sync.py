"""The loop of a sink: read on in the topic, apply a batch and its place in one commit of the
target, again and again.

Where to go on is known by the target alone. What fails in passing (the target restarts, the disk is
full) ends a *session*; after a while the next one asks the target where it is. So it does not
matter whether a commit that failed has happened. What fails for good ends the loop.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.columnar.columns import (
    CHANGE_TYPE,
    DELETE,
    OFFSET_COLUMN,
    ORDER,
    PARTITION_COLUMN,
    TIMESTAMP_COLUMN,
    TRANSACTION,
)
from headrace.errors import BadRows, ReadOnlyLog, RetryError, TargetMismatch, TargetUnavailable
from headrace.log.api import Log, Transaction
from headrace.log.dead_letters import DeadLetter, ensure_topic, letters_to_rows, rows_to_texts
from headrace.sinks.base import Applied, Refusal, SinkSpec, Target, batch_of, new_owner, shape_of

if TYPE_CHECKING:
    from headrace.log.file.log import FileLog


# A topic, read on from the places that a target has reached, in pieces of a bounded size.


MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Piece:
    """Rows between two places of a topic. `fresh` are partitions of which the target knows nothing
    yet, `behind` is how many offsets there are after it.
    """

    rows: list[pa.RecordBatch]
    start: Mapping[int, int]
    stop: Mapping[int, int]
    fresh: frozenset[int]
    behind: int


class Following:
    """Where a target is in its topic, and what comes next.

    A piece ends where the log was at one moment, if that is not too far: so a transaction that is
    not larger than a batch is applied as a whole by a sink that keeps up.
    """

    def __init__(self, log: Log, topic: str, applied: Applied) -> None:
        self.log, self.topic = log, topic
        first = log.start_offsets(topic)
        _check_kept(log, topic, applied, first)
        self.positions = {
            partition: applied.positions.get(partition, start) for partition, start in first.items()
        }
        self._known = set(applied.positions)
        self._turn = 0

    def next(self, max_rows: int) -> Piece | None:
        """At most about so many rows; nothing, if there is nothing new."""
        ends = self.log.snapshot([self.topic])[self.topic]
        for partition in ends.keys() - self.positions.keys():  # the topic was given more partitions
            self.positions[partition] = 0
        start = {
            partition: self.positions[partition]
            for partition, end in ends.items()
            if end > self.positions[partition]
        }
        if not start:
            return None
        self._turn += 1  # each partition is the first one at times, so that none waits for ever
        turned = sorted(start, key=lambda partition: (partition - self._turn) % len(ends))
        rows, stop = self._read(
            {partition: start[partition] for partition in turned}, ends, max_rows
        )
        behind = sum(
            end - stop.get(partition, start.get(partition, end)) for partition, end in ends.items()
        )
        return Piece(
            rows,
            {partition: start[partition] for partition in stop},
            stop,
            frozenset(stop.keys() - self._known),
            behind,
        )

    def _read(
        self, start: Mapping[int, int], ends: Mapping[int, int], max_rows: int
    ) -> tuple[list[pa.RecordBatch], dict[int, int]]:
        rows: list[pa.RecordBatch] = []
        stop: dict[int, int] = {}
        left_rows, left_bytes = max_rows, MAX_BYTES
        for partition, first in start.items():
            if left_rows <= 0 or left_bytes <= 0:
                break
            stop[partition] = ends[partition]
            for batch in self.log.read(self.topic, partition, first, ends[partition]):
                kept = (
                    batch.slice(0, left_rows)
                    if left_rows > 0 and left_bytes > 0
                    else batch.slice(0, 0)
                )
                if kept.num_rows < batch.num_rows:
                    kept = batch.slice(0, kept.num_rows + belonging(rows, batch, kept.num_rows))
                rows.append(kept)
                left_rows, left_bytes = left_rows - kept.num_rows, left_bytes - kept.nbytes
                if kept.num_rows < batch.num_rows:
                    stop[partition] = batch.column(OFFSET_COLUMN)[kept.num_rows].as_py()
                    break
        return rows, stop

    def advance(self, piece: Piece) -> None:
        self.positions.update(piece.stop)
        self._known.update(piece.stop)


def belonging(before: list[pa.RecordBatch], batch: pa.RecordBatch, count: int) -> int:
    """1 if the row at which a piece would be cut has the same key change to tell of as the one
    before it: the old row goes, the new one comes, and both go together.
    """
    if not {ORDER, TRANSACTION, CHANGE_TYPE} <= set(batch.schema.names):
        return 0
    last = (
        batch.slice(count - 1, 1)
        if count
        else next(
            (each.slice(each.num_rows - 1, 1) for each in reversed(before) if each.num_rows), None
        )
    )
    if (
        last is None
        or last.column(PARTITION_COLUMN)[0] != batch.column(PARTITION_COLUMN)[count]
        or last.column(CHANGE_TYPE)[0].as_py() != DELETE
    ):
        return 0
    order = last.column(ORDER)[0]
    return int(
        order.is_valid
        and order == batch.column(ORDER)[count]
        and last.column(TRANSACTION)[0] == batch.column(TRANSACTION)[count]
    )


def _check_kept(log: Log, topic: str, applied: Applied, first: Mapping[int, int]) -> None:
    """What the target has not seen must still be there: rows, and the tombstones that compaction
    removes after a while.
    """
    fix = "--start-over empties the target, and fills it with what is there now."
    for partition, position in applied.positions.items():
        if position < first.get(partition, 0):
            raise TargetMismatch(
                f"The target is at offset {position} of {topic}[{partition}], and retention has"
                f" removed what follows: the earliest kept is {first[partition]}.",
                fix=fix,
            )
    info = log.topic(topic)
    away_us = time.time_ns() // 1000 - applied.at_us
    if (
        (info.compact or info.history_us is not None)
        and applied.positions
        and away_us > info.tombstone_us
    ):
        whole = log.whole_from(topic)
        if any(
            position < whole.get(partition, 0) for partition, position in applied.positions.items()
        ):
            raise TargetMismatch(
                f"The target has not followed {topic!r} for longer than its tombstones are kept: it"
                " may have missed deletes.",
                fix=fix,
            )


# The dead letters of a sink: rows that its target refuses, each once, in the topic `<sink>.dead`.


class Letters:
    """They are written before the target commits, and a note remembers those of the batch under
    way: if that commit fails, they are not written again.
    """

    def __init__(self, log: Log, sink: str) -> None:
        self.log, self.sink = log, sink
        self._note = f"sync.{sink}.letters"
        self._last: Transaction | None = None

    def write(
        self, refused: Sequence[Refusal], rows: Sequence[pa.RecordBatch], start: Mapping[int, int]
    ) -> None:
        place = json.dumps(sorted(start.items()))
        known = json.loads(self.log.note(self._note) or "{}")
        told = (
            {(partition, offset) for partition, offset in known.get("told", ())}
            if known.get("start") == place
            else set()
        )
        fresh = [each for each in refused if (each.partition, each.offset) not in told]
        if not fresh:
            return
        texts = _texts(fresh, rows)
        letters = [
            DeadLetter(
                f"sink {self.sink}",
                each.reason,
                each.partition,
                each.offset,
                row=texts.get((each.partition, each.offset)),
            )
            for each in fresh
        ]
        topic = ensure_topic(self.log, self.sink)
        told |= {(each.partition, each.offset) for each in fresh}
        with self._transaction() as tx:
            tx.append(topic, letters_to_rows(letters))
            tx.set_note(self._note, json.dumps({"start": place, "told": sorted(told)}))

    def _transaction(self) -> Transaction:
        self._last = (
            self._last.next()
            if self._last is not None
            else self.log.transaction(f"sync.{self.sink}")
        )
        return self._last


def _texts(
    refused: Sequence[Refusal], rows: Sequence[pa.RecordBatch]
) -> dict[tuple[int, int], str]:
    """The refused rows as JSON, by their places. There are few of them."""
    wanted = {(each.partition, each.offset) for each in refused}
    found: dict[tuple[int, int], str] = {}
    for batch in rows:
        places = list(
            zip(
                batch.column(PARTITION_COLUMN).to_pylist(),
                batch.column(OFFSET_COLUMN).to_pylist(),
                strict=True,
            )
        )
        here = [number for number, place in enumerate(places) if place in wanted]
        if here:
            picked = (
                pa.Table.from_batches([batch])
                .take(here)
                .drop_columns([PARTITION_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN])
            )
            found.update(
                {places[number]: text for number, text in zip(here, _as_texts(picked), strict=True)}
            )
    return found


def _as_texts(rows: pa.Table) -> list[str]:
    """What JSON cannot carry (a date beyond the year 9999) is left as Python shows it."""
    try:
        texts: list[str] = rows_to_texts(rows).to_pylist()
    except BadRows:
        return [
            str(rows.slice(number, 1).cast(_readable(rows.schema)).to_pylist()[0])
            for number in range(rows.num_rows)
        ]
    return texts


def _readable(schema: pa.Schema) -> pa.Schema:
    """Dates and times as numbers."""
    return pa.schema([pa.field(each.name, _number_of(each.type)) for each in schema])


def _number_of(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_date(kind):
        return pa.int32()
    return pa.int64() if pa.types.is_timestamp(kind) else kind


# Which other systems have rows of a topic: each sink leaves its name in the log when it begins to
# follow one. Whoever must forget something can then name them.


_PREFIX = "followed/"


def remember(log: Log, topic: str, sink: SinkSpec) -> None:
    """Once for each sink of a topic. What Kafka has cannot be forgotten, by nobody: nothing is left
    there.
    """
    name, what = f"{_PREFIX}{topic}/{sink.name_for(topic)}", f"{sink.kind} {sink.table or topic}"
    if log.address.startswith("kafka:") or log.note(name) == what:
        return
    with suppress(ReadOnlyLog), log.transaction(f"followed.{sink.name_for(topic)}") as tx:
        tx.set_note(name, what)


def of_topic(log: FileLog, topic: str) -> list[str]:
    """Every sink that ever followed a topic, in words."""
    known = {
        name.removeprefix(f"{_PREFIX}{topic}/"): what
        for name, what in log.store.view().notes.items()
        if name.startswith(f"{_PREFIX}{topic}/")
    }
    return [
        f"the sink {name!r} ({what}), which follows the topic {topic!r}"
        for name, what in sorted(known.items())
    ]


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
    """One sink at work. `run` returns when it is stopped, or when it has caught up with where the
    topic was when it began, if that is all that was asked for.
    """

    def __init__(
        self,
        sink: SinkSpec,
        log: Log,
        topic: str,
        *,
        start_over: bool = False,
        on_status: OnStatus | None = None,
    ) -> None:
        self.sink, self.log, self.topic = sink, log, topic
        self.status = SyncStatus(sink.name_for(topic), topic)
        self._letters = Letters(log, self.status.sink)
        self._owner, self._has_begun, self._start_over = new_owner(), False, start_over
        self._on_status = on_status or (lambda _status: None)
        self._told_s = 0.0

    def run(self, *, stop: Event | None = None, until_caught_up: bool = False) -> None:
        remember(self.log, self.topic, self.sink)
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
        logger.warning(
            "The sink %s stopped: %s\nTrying again in %.1f s.", self.status.sink, error, pause_s
        )
        self._tell()
        stopped.wait(pause_s)

    def _session(self, stopped: Event, goal: dict[int, int] | None) -> bool:
        """From the target's place on. Returns False if the topic's columns have changed, and the
        target must be prepared for them.
        """
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
                if (
                    piece is not None
                    and self.log.topic(self.topic).arrow_schema != info.arrow_schema
                ):
                    return False
                if piece is not None:
                    self._apply(target, piece)
                    following.advance(piece)
                self._succeeded(piece)
                if goal is not None and all(
                    following.positions.get(partition, 0) >= end for partition, end in goal.items()
                ):
                    break
                if piece is None:
                    stopped.wait(POLL_S)
        return True

    def _apply(self, target: Target, piece: Piece) -> None:
        batch = batch_of(
            piece.rows, target.shape, piece.start, piece.stop, target.lookup, fresh=piece.fresh
        )
        refused: list[Refusal] = []

        def tell(each: Sequence[Refusal]) -> None:
            self._letters.write(each, piece.rows, piece.start)
            refused.extend(each)

        if target.apply(batch, tell):
            status = self.status
            status.rows += sum(each.num_rows for each in piece.rows)
            status.upserts, status.deletes = (
                status.upserts + batch.upserts.num_rows,
                status.deletes + batch.deletes.num_rows,
            )
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
    """Longer each time, and never quite the same, so that many sinks of one target do not come back
    together; not shorter than the target asks for.
    """
    longest_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10))
    pause_s = random.uniform(longest_s / 2, longest_s)  # noqa: S311 - nothing is kept secret by it
    return max(pause_s, error.wait_s if isinstance(error, TargetUnavailable) else 0.0)
