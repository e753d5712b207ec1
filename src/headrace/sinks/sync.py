"""The loop of a sink: reads on in the topic, and applies one batch after the other to the target.

The target alone knows where to resume: its checkpoint is part of each commit. When something fails
that passes by itself (the target restarts, its disk is full), the *session* ends; after a pause the
next one asks the target for its checkpoint. So it does not matter whether a commit that reported a
failure took effect. Other errors end the loop.

Rows that the target refuses become dead letters (`SinkDeadLetters`). Which sinks have rows of a
topic is noted in the log (`record_follower`), for those who must erase something.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.columnar.columns import OFFSET_COLUMN, PARTITION_COLUMN, TIMESTAMP_COLUMN
from headrace.connector import (
    CATCH_UP_PATIENCE_S,
    STATUS_INTERVAL_S,
    ConnectorStatus,
    Interval,
    run_sessions,
)
from headrace.errors import BadRows, ReadOnlyLog
from headrace.log.api import Log, Transaction
from headrace.log.dead_letters import (
    DeadLetter,
    dead_letters_to_rows,
    ensure_dead_topic,
    rows_to_json_column,
)
from headrace.sinks.base import Refusal, SinkSpec, Target
from headrace.sinks.batch import build_batch
from headrace.sinks.checkpoint import new_owner
from headrace.sinks.topic_follower import TopicFollower, TopicSlice

if TYPE_CHECKING:
    from headrace.log.file.log import FileLog

logger = logging.getLogger("headrace.sinks")
POLL_S = 0.1


@dataclass
class SyncStatus(ConnectorStatus):
    """How a sink is doing."""

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
    """By partition, the next offset to apply."""


OnStatus = Callable[[SyncStatus], None]


class SinkLoop:
    """Runs one sink. With `start_over` the target is emptied first."""

    def __init__(
        self,
        sink: SinkSpec,
        log: Log,
        topic: str,
        *,
        start_over: bool = False,
        on_status: OnStatus | None = None,
    ) -> None:
        self.sink = sink
        self.log = log
        self.topic = topic
        self.status = SyncStatus(sink.name_for(topic), topic)
        self._dead_letters = SinkDeadLetters(log, self.status.sink)
        self._owner = new_owner()
        self._has_begun = False
        self._began_at: Mapping[int, int] = {}
        """The offsets at which the current session began."""
        self._start_over = start_over
        self._on_status = on_status or (lambda _status: None)
        self._status_interval = Interval(STATUS_INTERVAL_S)

    def run(self, *, stop: Event | None = None, until_caught_up: bool = False) -> None:
        """Follow the topic until `stop` is set or, with `until_caught_up`, until all rows are
        applied that the topic had at the beginning.

        A target that is away is tried again: for as long as it takes, or with `until_caught_up` for
        a minute, after which its error is raised.
        """
        record_follower(self.log, self.topic, self.sink)
        stopped = stop or Event()
        goal = self.log.end_offsets(self.topic) if until_caught_up else None
        run_sessions(
            lambda: self._session(stopped, goal),
            what=f"The sink {self.status.sink}",
            stopped=stopped,
            status=self.status,
            report=self._report,
            logger=logger,
            patience_s=CATCH_UP_PATIENCE_S if until_caught_up else math.inf,
        )
        self._report()

    def _session(self, stopped: Event, goal: dict[int, int] | None) -> bool:
        """Apply batches from the target's checkpoint on. Returns False if the topic's columns have
        changed, so that the target must be prepared for them.
        """
        info = self.log.topic(self.topic)
        with self.sink.open(self.sink.shape_for(info), self.log) as target:
            target.stopped = stopped
            target.prepare()
            checkpoint = target.begin(
                self._owner, resume=self._has_begun, start_over=self._start_over
            )
            if self._has_begun and checkpoint.positions != self._began_at:
                # A session that applied something before it failed was no failure in a row: what
                # fails now and then must not be tried less and less often.
                self.status.record_success()
            self._began_at = checkpoint.positions
            self._has_begun = True
            self._start_over = False
            follower = TopicFollower(self.log, self.topic, checkpoint)
            self.status.positions = follower.positions
            while not stopped.is_set():
                topic_slice = follower.next(self.sink.batch_rows)
                if topic_slice is not None:
                    if self.log.topic(self.topic).arrow_schema != info.arrow_schema:
                        return False
                    self._apply(target, topic_slice)
                    follower.advance(topic_slice)
                self.status.behind = topic_slice.behind if topic_slice is not None else 0
                self.status.record_success()
                if self._status_interval.is_due():
                    self._report()
                if goal is not None and all(
                    follower.positions.get(partition, 0) >= end for partition, end in goal.items()
                ):
                    break
                if topic_slice is None:
                    stopped.wait(POLL_S)
                elif goal is None and not topic_slice.behind:
                    self._wait(stopped, self.sink.commit_interval_s)
        return True

    def _wait(self, stopped: Event, seconds: float) -> None:
        """Wait for some time, or until the sink is to stop, and go on to report."""
        end_s = time.monotonic() + seconds
        while (rest_s := end_s - time.monotonic()) > 0 and not stopped.is_set():
            stopped.wait(min(rest_s, STATUS_INTERVAL_S))
            self._report()

    def _apply(self, target: Target, topic_slice: TopicSlice) -> None:
        batch = build_batch(
            topic_slice.rows,
            target.shape,
            topic_slice.start,
            topic_slice.stop,
            target.lookup,
            new_partitions=topic_slice.new_partitions,
        )
        refused: list[Refusal] = []

        def write_dead_letters(refusals: Sequence[Refusal]) -> None:
            self._dead_letters.write(refusals, topic_slice.rows, topic_slice.start)
            refused.extend(refusals)

        if target.apply(batch, write_dead_letters):
            status = self.status
            status.rows += sum(rows.num_rows for rows in topic_slice.rows)
            status.upserts += batch.upserts.num_rows
            status.deletes += batch.deletes.num_rows
            status.commits += 1
            status.refused += len(refused)

    def _report(self) -> None:
        self._on_status(self.status)


# Dead letters


class SinkDeadLetters:
    """Writes rows that the target refuses to the topic `<sink>.dead`, each once.

    They are written before the target commits. A note, written in the same transaction, has those
    of the current batch: if the target's commit fails and the batch is applied again, they are not
    written again.
    """

    def __init__(self, log: Log, sink: str) -> None:
        self.log = log
        self.sink = sink
        self._note = f"sync.{sink}.letters"
        self._last_transaction: Transaction | None = None

    def write(
        self,
        refusals: Sequence[Refusal],
        rows: Sequence[pa.RecordBatch],
        start: Mapping[int, int],
    ) -> None:
        """Write the refused rows of a batch.

        Args:
            refusals: Which rows, and why.
            rows: The batch's rows.
            start: The offsets at which the batch begins, which identify it.
        """
        batch_id = json.dumps(sorted(start.items()))
        note = json.loads(self.log.note(self._note) or "{}")
        written: set[tuple[int, int]] = set()
        if note.get("start") == batch_id:
            written = {(partition, offset) for partition, offset in note.get("told", ())}
        unwritten = [row for row in refusals if (row.partition, row.offset) not in written]
        if not unwritten:
            return
        texts = _refused_texts(unwritten, rows)
        dead_letters = [
            DeadLetter(
                f"sink {self.sink}",
                refusal.reason,
                refusal.partition,
                refusal.offset,
                row=texts.get((refusal.partition, refusal.offset)),
            )
            for refusal in unwritten
        ]
        written |= {(refusal.partition, refusal.offset) for refusal in unwritten}
        topic = ensure_dead_topic(self.log, self.sink)
        if self._last_transaction is None:
            self._last_transaction = self.log.transaction(f"sync.{self.sink}")
        else:
            self._last_transaction = self._last_transaction.next()
        with self._last_transaction as transaction:
            transaction.append(topic, dead_letters_to_rows(dead_letters))
            note_text = json.dumps({"start": batch_id, "told": sorted(written)})
            transaction.set_note(self._note, note_text)


def _refused_texts(
    refusals: Sequence[Refusal], rows: Sequence[pa.RecordBatch]
) -> dict[tuple[int, int], str]:
    """Return the refused rows as JSON, by partition and offset. There are few of them."""
    wanted = {(refusal.partition, refusal.offset) for refusal in refusals}
    texts: dict[tuple[int, int], str] = {}
    for batch in rows:
        partitions = batch.column(PARTITION_COLUMN).to_pylist()
        offsets = batch.column(OFFSET_COLUMN).to_pylist()
        indices = {
            location: index
            for index, location in enumerate(zip(partitions, offsets, strict=True))
            if location in wanted
        }
        if indices:
            refused = (
                pa.Table.from_batches([batch])
                .take(list(indices.values()))
                .drop_columns([PARTITION_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN])
            )
            texts.update(zip(indices, _row_texts(refused), strict=True))
    return texts


def _row_texts(rows: pa.Table) -> list[str]:
    """Return rows as JSON; as Python shows them if JSON cannot, as with a date after the year
    9999.
    """
    try:
        texts: list[str] = rows_to_json_column(rows).to_pylist()
    except BadRows:
        schema = pa.schema([pa.field(field.name, _as_number(field.type)) for field in rows.schema])
        return [str(row) for row in rows.cast(schema).to_pylist()]
    return texts


def _as_number(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_date(kind):
        return pa.int32()
    return pa.int64() if pa.types.is_timestamp(kind) else kind


# Which sinks have rows of a topic

_FOLLOWER_PREFIX = "followed/"


def record_follower(log: Log, topic: str, sink: SinkSpec) -> None:
    """Note in the log that a sink follows a topic, once for each sink.

    Not on Kafka: single records cannot be erased there, so nobody would read the note.
    """
    name = f"{_FOLLOWER_PREFIX}{topic}/{sink.name_for(topic)}"
    target = f"{sink.kind} {sink.table or topic}"
    if log.address.startswith("kafka:") or log.note(name) == target:
        return
    with suppress(ReadOnlyLog), log.transaction(f"followed.{sink.name_for(topic)}") as transaction:
        transaction.set_note(name, target)


def describe_followers(log: FileLog, topic: str) -> list[str]:
    """Return a description of every sink that ever followed a topic."""
    prefix = f"{_FOLLOWER_PREFIX}{topic}/"
    targets = {
        name.removeprefix(prefix): target
        for name, target in log.store.view().notes.items()
        if name.startswith(prefix)
    }
    return [
        f"the sink {name!r} ({target}), which follows the topic {topic!r}"
        for name, target in sorted(targets.items())
    ]
