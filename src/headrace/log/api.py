"""What a log can do, whichever backend keeps it: the interface of `hr.open_log`. The values it
speaks in are in `values`.

`file/` and `kafka/` implement it and pass one contract suite (tests/contract). Nothing here does
any I/O.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from threading import Event, Thread, current_thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from headrace.durations import to_us
from headrace.errors import InputError
from headrace.log.values import (
    AppendResult,
    Control,
    Duration,
    Finding,
    GroupInfo,
    Headers,
    Offsets,
    Partitioner,
    PartitionLag,
    Rows,
    Staged,
    TopicInfo,
    TopicStats,
)

if TYPE_CHECKING:
    import pandas as pd


# Watching lag: a hook that is called when a group falls too far behind, and again when it has
# caught up. For every backend.


logger = logging.getLogger("headrace.log")


@dataclass(frozen=True)
class LagAlert:
    """A partition that passed the threshold (`firing`) or came back below it."""

    firing: bool
    lag: PartitionLag


class LagWatch:
    """Compares lag with a threshold at intervals, in a thread of its own. Each start and end of an
    excess is told once.

    It outlives what fails, a hook that raises or a log that does not answer: that is logged, and it
    looks again.
    """

    def __init__(
        self,
        log: Log,
        on_alert: Callable[[LagAlert], None],
        *,
        rows: int | None,
        seconds: float | None,
        group: str | None,
        every_s: float,
    ) -> None:
        if rows is None and seconds is None:
            raise InputError(
                "A lag alert needs a threshold.", fix="pass rows=…, seconds=…, or both."
            )
        self._log, self._on_alert, self._rows, self._seconds, self._group = (
            log,
            on_alert,
            rows,
            seconds,
            group,
        )
        self._firing: dict[tuple[str, str, int], PartitionLag] = {}
        self._trouble = ""
        if group is not None:
            log.lag(group)  # an unknown group is an error here, where somebody sees it
        self._stop = Event()
        self._thread = Thread(target=self._run, args=(every_s,), daemon=True, name="lag watch")
        self._thread.start()

    def _run(self, every_s: float) -> None:
        while True:
            try:
                self.check()
                self._trouble = ""
            except Exception as error:
                self._report(error)
            if self._stop.wait(every_s):
                return

    def check(self) -> None:
        """Look once, now. A partition that is gone is behind no more."""
        now = {(lag.group, lag.topic, lag.partition): lag for lag in self._log.lag(self._group)}
        before, self._firing = (
            self._firing,
            {key: lag for key, lag in now.items() if self.exceeds(lag)},
        )
        alerts = [LagAlert(True, lag) for key, lag in self._firing.items() if key not in before]
        alerts += [
            LagAlert(False, now.get(key, lag))
            for key, lag in before.items()
            if key not in self._firing
        ]
        for alert in alerts:
            try:
                self._on_alert(alert)
            except Exception:
                logger.exception("The hook for lag failed on %s", alert)

    def _report(self, error: Exception) -> None:
        """Once, not at every look."""
        if str(error) != self._trouble:
            self._trouble = str(error)
            logger.warning("Lag cannot be watched now: %s", error)

    def exceeds(self, lag: PartitionLag) -> bool:
        too_many = self._rows is not None and lag.rows > self._rows
        too_old = self._seconds is not None and lag.seconds > self._seconds
        return too_many or too_old

    def stop(self) -> None:
        self._stop.set()
        if current_thread() is not self._thread:  # a hook may stop its watch
            self._thread.join(timeout=5)


class Batches(ABC, Iterable[pa.RecordBatch]):
    """A lazy read: iterate over its Arrow batches, or take it whole with `to_table()`."""

    schema: pa.Schema

    @abstractmethod
    def __iter__(self) -> Iterator[pa.RecordBatch]: ...

    def to_table(self) -> pa.Table:
        return pa.Table.from_batches(list(self), schema=self.schema)

    def to_pandas(self) -> pd.DataFrame:
        frame: pd.DataFrame = self.to_table().to_pandas()
        return frame

    def to_pylist(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.to_table().to_pylist()
        return rows


class Closing(ABC):
    """Something to close, usable in `with`."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Producer(Closing):
    """Appends to one topic. With an id it is idempotent: its appends are numbered, and a repeated
    number is not stored again.
    """

    topic: str
    id: str | None
    epoch: int

    @property
    @abstractmethod
    def last_sequence(self) -> int:
        """The last number stored for this id in this topic; -1 if none."""

    @abstractmethod
    def append(
        self,
        rows: Rows,
        *,
        sequence: int | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
    ) -> AppendResult:
        """Store rows, atomically over partitions. Returns when they are durable."""

    @abstractmethod
    def upsert(
        self, rows: Rows, *, sequence: int | None = None, headers: Headers | None = None
    ) -> AppendResult:
        """On a table's topic: rows that are now the newest for their keys."""

    @abstractmethod
    def delete(self, keys: Any, *, sequence: int | None = None) -> AppendResult:
        """On a table's topic: tombstones. Keys are values (one key column), tuples, or rows with
        the key's columns.
        """


class Transaction(Closing):
    """Appends to many topics, group offsets and notes, visible at once or never. Leaving `with`
    commits; an exception aborts.
    """

    id: str

    @abstractmethod
    def append(
        self,
        topic: str,
        rows: Rows,
        *,
        headers: Headers | None = None,
        partition: int | None = None,
    ) -> None: ...

    @abstractmethod
    def upsert(self, topic: str, rows: Rows) -> None: ...

    @abstractmethod
    def delete(self, topic: str, keys: Any) -> None: ...

    @abstractmethod
    def append_control(self, topic: str, partition: int, payload: bytes) -> None: ...

    @abstractmethod
    def adopt(self, staged: Staged) -> None:
        """Make rows that a task staged part of this transaction."""

    @abstractmethod
    def commit_offsets(self, group: str, positions: Mapping[str, Mapping[int, int]]) -> None: ...

    @abstractmethod
    def set_note(self, name: str, value: str | None, **expect: str | None) -> None:
        """Store a small value with the transaction. With `expect=`, the commit fails with
        NoteConflict if it has another value by then.
        """

    @abstractmethod
    def commit(self) -> AppendResult: ...

    @abstractmethod
    def abort(self) -> None: ...

    @abstractmethod
    def next(self) -> Transaction:
        """Another transaction of the same owner, when this one has ended; it is aborted if it has
        not.

        `log.transaction(id)` takes over from whoever had the id; this takes over from nobody: an
        owner that was replaced stays refused.
        """

    def close(self) -> None:
        self.abort()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()


class Consumer(Closing):
    """One member of a group. Partitions are shared out among members; what is delivered stays the
    group's until committed.
    """

    group: str
    topics: tuple[str, ...]

    @abstractmethod
    def poll(
        self, timeout: Duration = "1 second", max_rows: int | None = None
    ) -> list[pa.RecordBatch]:
        """The next rows of this member's partitions, one batch per topic and partition at a time;
        empty when none came in time.
        """

    @abstractmethod
    def positions(self) -> Offsets:
        """The next offset of each partition this member owns."""

    @abstractmethod
    def commit(self, positions: Mapping[str, Mapping[int, int]] | None = None) -> None:
        """Remember positions (of everything delivered, if none are given) for the group.
        MemberFenced if a partition was lost.
        """

    @abstractmethod
    def seek(self, partition: int, offset: int, *, topic: str | None = None) -> None: ...

    @abstractmethod
    def assignment(self) -> Mapping[str, tuple[int, ...]]: ...


class Message(ABC):
    """One message from a queue, leased until its visibility runs out."""

    topic: str
    partition: int
    offset: int
    timestamp: datetime
    deliveries: int
    row: dict[str, Any]
    headers: list[tuple[str, bytes | None]]
    receipt: str

    @abstractmethod
    def ack(self) -> None: ...

    @abstractmethod
    def nack(self, delay: Duration = "0 seconds") -> None: ...

    @abstractmethod
    def renew(self, visibility: Duration = "30 seconds") -> None: ...


class Queue(Closing):
    """A topic used as a queue: messages are taken, acknowledged or given back one by one; order is
    given up.
    """

    topic: str
    group: str
    delivery_limit: int

    @abstractmethod
    def receive(
        self,
        max_messages: int = 1,
        *,
        visibility: Duration = "30 seconds",
        wait: Duration = "0 seconds",
    ) -> Sequence[Message]: ...

    @abstractmethod
    def ack(self, receipts: Iterable[str]) -> None:
        """Acknowledge by receipt, for scripts."""

    @abstractmethod
    def nack(self, receipts: Iterable[str], delay: Duration = "0 seconds") -> None: ...


class Log(Closing):
    """A durable, partitioned log: topics, producers, transactions, groups and queues."""

    address: str

    # Topics

    @abstractmethod
    def create_topic(
        self,
        name: str,
        schema: str,
        *,
        key: str | Sequence[str] | None = None,
        partitions: int = 1,
        retention: Duration | None = None,
        retention_bytes: int | None = None,
        compact: bool = False,
        tombstones: Duration = "1 day",
        segment_bytes: int = 64 << 20,
        segment_age: Duration = "7 days",
        compression: str = "none",
        exist_ok: bool = False,
    ) -> TopicInfo: ...

    @abstractmethod
    def create_table(
        self,
        name: str,
        schema: str,
        *,
        key: str | Sequence[str],
        history: Duration | None = None,
        partitions: int = 1,
        tombstones: Duration = "1 day",
        segment_bytes: int = 64 << 20,
        segment_age: Duration = "7 days",
        compression: str = "none",
        exist_ok: bool = False,
    ) -> TopicInfo: ...

    @abstractmethod
    def alter_topic(
        self,
        name: str,
        *,
        add_columns: str | None = None,
        partitions: int | None = None,
        allow_moving_keys: bool = False,
        **settings: Any,
    ) -> TopicInfo:
        """Add nullable columns, add partitions (a keyed topic only with allow_moving_keys=True), or
        change retention and the like.
        """

    @abstractmethod
    def delete_topic(self, name: str) -> None: ...

    @abstractmethod
    def topics(self) -> list[str]: ...

    @abstractmethod
    def topic(self, name: str) -> TopicInfo: ...

    # Writing

    @abstractmethod
    def producer(
        self, topic: str, id: str | None = None, *, partitioner: Partitioner | None = None
    ) -> Producer: ...

    @abstractmethod
    def transaction(self, id: str, *, timeout: Duration = "1 minute") -> Transaction: ...

    @abstractmethod
    def append_control(self, topic: str, partition: int, payload: bytes) -> AppendResult: ...

    @abstractmethod
    def stage(
        self,
        topic: str,
        batches: Iterable[pa.RecordBatch],
        *,
        partition: int | None = None,
        directory: str | None = None,
        group: str | None = None,
    ) -> Staged:
        """Put rows aside, durably but invisibly, for a transaction of another process to adopt. If
        the rows fail on the way, nothing is left.

        `directory` is where, if the log has no place for them itself (Kafka has none); it must be
        seen by both processes. `group` is a name for what belongs together, such as the tasks of
        one job: `discard_group` removes it all, also what a killed process left.
        """

    @abstractmethod
    def discard_staged(self, staged: Staged) -> None:
        """Remove rows that were put aside and that no transaction will adopt."""

    @abstractmethod
    def discard_group(self, group: str, *, directory: str | None = None) -> None:
        """Remove whatever was put aside under a group's name and not adopted. Safe also when a
        commit failed and may yet have happened.
        """

    # Reading

    @abstractmethod
    def read(
        self,
        topic: str,
        partition: int | None = None,
        start: int | None = None,
        stop: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        headers: bool = False,
        on_corrupt: str = "raise",
    ) -> Batches:
        """Committed rows: the topic's columns and `_partition`, `_offset` and `_timestamp`, or just
        the ones named. All partitions if none is named.
        """

    @abstractmethod
    def read_control(
        self, topic: str, partition: int, start: int | None = None, stop: int | None = None
    ) -> list[Control]: ...

    @abstractmethod
    def start_offsets(self, topic: str) -> dict[int, int]: ...

    @abstractmethod
    def whole_from(self, topic: str) -> dict[int, int]:
        """For each partition the offset from which on every row is still there: behind what
        retention removed, and what compaction may have thinned out.
        """

    @abstractmethod
    def end_offsets(self, topic: str) -> dict[int, int]: ...

    @abstractmethod
    def snapshot(self, topics: Iterable[str]) -> Offsets:
        """The ends of several topics at one moment; on the embedded log it never cuts a transaction
        in two.
        """

    @abstractmethod
    def offsets_at(self, topic: str, time: datetime | str | float) -> dict[int, int]:
        """For each partition the first offset appended at or after a time (the end, if there is
        none).
        """

    # Groups, queues, notes

    @abstractmethod
    def consumer(
        self,
        topics: str | Sequence[str],
        group: str,
        *,
        start: str = "earliest",
        session_timeout: Duration = "10 seconds",
        max_rows: int = 100_000,
        on_lost: str = "raise",
        headers: bool = False,
    ) -> Consumer: ...

    @abstractmethod
    def queue(self, topic: str, group: str, *, delivery_limit: int = 5) -> Queue: ...

    @abstractmethod
    def groups(self) -> list[str]: ...

    @abstractmethod
    def group(self, name: str) -> GroupInfo: ...

    @abstractmethod
    def committed(self, group: str) -> Offsets: ...

    @abstractmethod
    def reset_group(
        self,
        group: str,
        topic: str,
        to: str | int | datetime,
        *,
        partitions: Sequence[int] | None = None,
    ) -> Offsets:
        """Move a group that nobody reads with: to "earliest", "latest", an offset, or a time.
        Returns the new positions.
        """

    @abstractmethod
    def lag(self, group: str | None = None) -> list[PartitionLag]: ...

    def watch_lag(
        self,
        on_alert: Callable[[LagAlert], None],
        *,
        rows: int | None = None,
        seconds: float | None = None,
        group: str | None = None,
        every: Duration = "5 seconds",
    ) -> LagWatch:
        """Call a function when a group falls further behind than a threshold, and again when it has
        caught up. `stop()` ends it.
        """
        return LagWatch(
            self,
            on_alert,
            rows=rows,
            seconds=seconds,
            group=group,
            every_s=to_us(every, what="every") / 1e6,
        )

    @abstractmethod
    def note(self, name: str) -> str | None:
        """A small value stored by a transaction's `set_note`."""

    # Care

    @abstractmethod
    def verify(self, topic: str | None = None) -> list[Finding]: ...

    @abstractmethod
    def stats(self, topic: str | None = None) -> list[TopicStats]: ...

    @abstractmethod
    def maintain(self, topic: str | None = None) -> dict[str, Any]:
        """Apply retention and compaction now. Returns what was removed."""
