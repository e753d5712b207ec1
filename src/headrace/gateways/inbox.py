"""The inbox of a gateway: a bounded queue between the threads that receive and the log, one thread
that appends what is in it, and the policy for when it is full.

Submissions that wait together are appended together, so that many small ones share one sync. The
thread that appends calls `done` of each submission with what became of it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from itertools import chain
from threading import Condition, Event, Lock, Thread
from typing import Any, Self, TypeAlias

import pyarrow as pa

from headrace.connector import ConnectorStatus
from headrace.durations import to_us
from headrace.errors import HeadraceError, InputError, RetryError, nearest
from headrace.log.values import Duration
from headrace.retry import Backoff
from headrace.types.text import TextRow

logger = logging.getLogger("headrace.gateways")
MAX_APPEND_ROWS, MAX_APPEND_BYTES = 100_000, 4 << 20
MAX_FAILURES = 12
"""Failed appends in a row, about a minute of them, after which the gateway ends."""
BACKOFF = Backoff(first_s=0.1, longest_s=10.0, jitter=0.0)
STOP_S = 30.0
FULL = "no room"
"""The reason of rows that are dropped or refused because the log is slower than the senders."""


# Overload

BLOCK, BUFFER, DROP_NEWEST, DROP_OLDEST = "block", "buffer", "drop newest", "drop oldest"
POLICIES = (BLOCK, BUFFER, DROP_NEWEST, DROP_OLDEST)
_SHORT_NAMES = {"drop": DROP_NEWEST, "drop-newest": DROP_NEWEST, "drop-oldest": DROP_OLDEST}
DEFAULT_ROWS, DEFAULT_BYTES = 100_000, 64 << 20


@dataclass(frozen=True)
class OverloadPolicy:
    """What a gateway does when the log is slower than the senders, and from when on.

    - "block": the sender waits. HTTP answers later, RabbitMQ retains what is not acknowledged, a
      PUSH socket stops. With UDP the system's own buffer fills; packets that it drops are counted.
    - "buffer": rows are buffered up to the bounds; then the sender is refused (HTTP: 503).
    - "drop newest", "drop oldest": nobody waits. Beyond the bounds what comes, or what has waited
      longest, is dropped and counted.

    `rows` and `bytes` bound what waits for the log. A single submission may be larger: it is
    accepted when nothing else waits.
    """

    name: str = BLOCK
    rows: int = DEFAULT_ROWS
    bytes: int = DEFAULT_BYTES
    patience_s: float = 30.0
    """How long a sender that gets an answer waits, before it is asked to come back."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.bytes < 1:
            raise InputError("A gateway's bounds must be at least 1 row and 1 byte.")
        if self.patience_s <= 0:
            raise InputError("A gateway's patience must be longer than 0.")


def overload_policy(
    name: str,
    *,
    max_rows: int = DEFAULT_ROWS,
    max_bytes: int = DEFAULT_BYTES,
    patience: Duration = "30 seconds",
) -> OverloadPolicy:
    """Return the policy of that name, with bounds."""
    full_name = _SHORT_NAMES.get(name, name)
    if full_name not in POLICIES:
        raise InputError(
            f"There is no policy {name!r}: {nearest(name, POLICIES)}",
            fix=f"choose one of {', '.join(POLICIES)}.",
        )
    return OverloadPolicy(
        name=full_name,
        rows=max_rows,
        bytes=max_bytes,
        patience_s=to_us(patience, what="patience") / 1e6,
    )


# Submissions


@dataclass(frozen=True)
class JsonLines:
    """Rows as JSON objects, one a value."""

    values: list[bytes]


@dataclass(frozen=True)
class JsonRows:
    """Rows of one JSON array, parsed."""

    values: list[Any]


@dataclass(frozen=True)
class PlainRows:
    """Rows by column name, as Python values: a raw body with its metadata. Columns that the topic
    does not have are left out.
    """

    values: list[Mapping[str, Any]]


@dataclass(frozen=True)
class CsvRows:
    """Rows of CSV as text, by the columns of its heading."""

    values: list[TextRow]


@dataclass(frozen=True)
class ArrowRows:
    """Rows that are Arrow data."""

    batch: pa.RecordBatch


Content: TypeAlias = JsonLines | JsonRows | PlainRows | CsvRows | ArrowRows


class Fate(StrEnum):
    """What becomes of a row that was received. Every row has one of these, or still waits."""

    stored = "stored"
    repeated = "repeated"
    """The topic has it already, under the same id."""
    dropped = "dropped"
    refused = "refused"


@dataclass(frozen=True)
class SubmissionResult:
    """What became of a submission."""

    fate: Fate
    reason: str = ""
    """A few words that are counted in the status."""
    message: str = ""
    """The explanation for the sender."""
    position: str = ""
    """Where the rows were appended."""
    is_temporary: bool = False
    """Whether the same submission may succeed later."""


def _ignore(_result: SubmissionResult) -> None:
    pass


@dataclass
class Submission:
    """One request, one message, or the values of some packets: stored, refused or dropped as a
    whole.
    """

    topic: str
    content: Content
    rows: int
    """How many rows it takes up in the inbox."""
    size: int
    """How many bytes it takes up in the inbox."""
    received_us: int
    id: str | None = None
    """By which a repeat is recognised."""
    digest: bytes | None = None
    """Of what was sent, if the same id with something else is a conflict."""
    payload: bytes | None = None
    """What was received, for a dead letter if it cannot be used; None if the sender gets an
    answer.
    """
    stands_for: int | None = None
    """How many values it is counted as, if that is not its rows: metrics are aggregated."""
    done: Callable[[SubmissionResult], None] = field(default=_ignore, repr=False)

    @property
    def counted(self) -> int:
        return self.rows if self.stands_for is None else self.stands_for


# Status


@dataclass
class GatewayStatus(ConnectorStatus):
    """How a gateway is doing. At any moment `received` is the sum of `stored`, `repeated`,
    `dropped`, `refused` and `waiting_rows`.
    """

    gateway: str
    kind: str
    received: int = 0
    stored: int = 0
    repeated: int = 0
    dropped: int = 0
    refused: int = 0
    waiting_rows: int = 0
    waiting_bytes: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """Why rows were refused or dropped."""
    details: dict[str, int] = field(default_factory=dict)
    """Figures that only this kind of gateway has, such as packets that the system dropped."""

    @property
    def rows(self) -> int:
        return self.stored


class GatewayCounters:
    """Counts what becomes of received rows, for many threads."""

    def __init__(self, gateway: str, kind: str) -> None:
        self.gateway = gateway
        self.kind = kind
        self.details: dict[str, int] = {}
        self.failures = 0
        self.error: str | None = None
        self._lock = Lock()
        self._received = 0
        self._fates = dict.fromkeys(Fate, 0)
        self._reasons: Counter[str] = Counter()

    def record_received(self, rows: int) -> None:
        with self._lock:
            self._received += rows

    def record_settled(self, rows: int, result: SubmissionResult) -> None:
        """Count rows that were received before, by what became of them."""
        with self._lock:
            self._fates[result.fate] += rows
            if result.reason:
                self._reasons[result.reason] += rows

    def record_rejected(self, rows: int, reason: str, fate: Fate = Fate.refused) -> None:
        """Count rows that were received and rejected before there was a submission."""
        with self._lock:
            self._received += rows
            self._fates[fate] += rows
            self._reasons[reason] += rows

    def record_failure(self, error: str) -> None:
        with self._lock:
            self.failures += 1
            self.error = error

    def record_success(self) -> None:
        with self._lock:
            self.failures = 0
            self.error = None

    def status(self, waiting_bytes: int = 0) -> GatewayStatus:
        with self._lock:
            fates = {fate.value: count for fate, count in self._fates.items()}
            return GatewayStatus(
                gateway=self.gateway,
                kind=self.kind,
                received=self._received,
                **fates,
                waiting_rows=self._received - sum(fates.values()),
                waiting_bytes=waiting_bytes,
                reasons=dict(self._reasons),
                details=dict(self.details),
                failures=self.failures,
                error=self.error,
            )


# The queue


class UnfitRows(Exception):
    """Submissions cannot be appended together, because some do not fit the topic; nothing of them
    was stored. One that is alone is refused instead.
    """


Write = Callable[[list[Submission]], list[SubmissionResult]]


class Admission(Enum):
    """Whether there is room for a submission, and if not, what the policy demands."""

    accepted = auto()
    wait = auto()
    refused = auto()
    dropped = auto()


class Inbox:
    """A bounded queue with a thread that appends.

    `admit` reserves room, and `put` enqueues a submission that has room; `submit` does both, and
    waits where the policy blocks.

    Args:
        policy: The bounds, and what happens beyond them.
        counters: Counts what becomes of rows.
        write: Appends submissions of one topic, and returns what became of each, or raises
            UnfitRows.
        retries_appends: Whether an append that fails for a moment is tried again here, because the
            sender gets no answer. After a minute of failures in a row the inbox ends: the error is
            in `failure`, and `ended` is set.
        on_room: Called when there is room again.
    """

    def __init__(
        self,
        policy: OverloadPolicy,
        counters: GatewayCounters,
        write: Write,
        *,
        retries_appends: bool,
        on_room: Callable[[], None] | None = None,
    ) -> None:
        self.policy = policy
        self.counters = counters
        self.failure: BaseException | None = None
        self.ended = Event()
        self._write = write
        self._retries_appends = retries_appends
        self._on_room = on_room
        self._changed = Condition()
        self._queue: deque[Submission] = deque()
        self._groups: deque[list[Submission]] = deque()
        """Submissions that left the queue, in groups that are appended together: those of one topic
        with ids, and those without.
        """
        self._rows = 0
        self._bytes = 0
        self._is_closing = False
        # A submission that is being appended cannot be dropped any more. If it kept its room, newer
        # ones would have to be dropped instead of older ones.
        self._frees_before_append = policy.name == DROP_OLDEST
        self._thread = Thread(target=self._run, name=f"gateway {counters.gateway}", daemon=True)

    def start(self) -> Self:
        """Start the thread that appends."""
        self._thread.start()
        return self

    @property
    def waiting_rows(self) -> int:
        """Rows that have room in the inbox. With every policy but "drop oldest", these include the
        rows being appended. Senders that wait for room do not count.
        """
        return self._rows

    @property
    def waiting_bytes(self) -> int:
        return self._bytes

    # Receiving

    def admit(self, rows: int, size: int) -> Admission:
        """Reserve room for rows and bytes, or return what the policy demands. A submission that is
        larger than the bounds is accepted when nothing else waits.
        """
        evicted: list[Submission] = []
        with self._changed:
            if self.policy.name == DROP_OLDEST:
                while self._queue and not self._fits(rows, size):
                    oldest = self._queue.popleft()
                    self._rows -= oldest.rows
                    self._bytes -= oldest.size
                    evicted.append(oldest)
            fits = self._fits(rows, size)
            if fits:
                self._rows += rows
                self._bytes += size
        for submission in evicted:
            message = "It was dropped: the log is slower than the senders, and newer rows came."
            result = SubmissionResult(Fate.dropped, FULL, message, is_temporary=True)
            self._settle(submission, result)
        if fits:
            return Admission.accepted
        if self.policy.name == BLOCK:
            return Admission.wait
        return Admission.refused if self.policy.name == BUFFER else Admission.dropped

    def _fits(self, rows: int, size: int) -> bool:
        has_rows = not self._rows or self._rows + rows <= self.policy.rows
        has_bytes = not self._bytes or self._bytes + size <= self.policy.bytes
        return has_rows and has_bytes

    def put(self, submission: Submission) -> None:
        """Enqueue a submission that has room."""
        with self._changed:
            self._queue.append(submission)
            self._changed.notify_all()

    def release(self, rows: int, size: int) -> None:
        """Free room that is not needed any more."""
        with self._changed:
            self._rows -= rows
            self._bytes -= size
            self._changed.notify_all()
        if self._on_room is not None:
            self._on_room()

    def submit(self, submission: Submission, stopped: Event) -> bool:
        """Reserve room and enqueue, for a thread that receives. Whatever happens, the submission is
        counted and its `done` is called. Returns whether it was enqueued.
        """
        if submission.stands_for is None:  # else its values were counted when they came
            self.counters.record_received(submission.rows)
        while (admission := self.admit(submission.rows, submission.size)) is Admission.wait:
            if stopped.is_set() or self.ended.is_set():
                message = "The gateway is stopping."
                result = SubmissionResult(Fate.refused, "stopping", message, is_temporary=True)
                self._settle(submission, result)
                return False
            with self._changed:
                self._changed.wait(0.1)
        if admission is Admission.accepted:
            self.put(submission)
            return True
        self.reject(submission, admission)
        return False

    def reject(self, submission: Submission, admission: Admission) -> None:
        """Settle a submission for which there is no room."""
        fate = Fate.dropped if admission is Admission.dropped else Fate.refused
        message = "The log is slower than the senders."
        self._settle(submission, SubmissionResult(fate, FULL, message, is_temporary=True))

    def _settle(self, submission: Submission, result: SubmissionResult) -> None:
        self.counters.record_settled(submission.counted, result)
        submission.done(result)

    # Appending

    def _run(self) -> None:
        try:
            while submissions := self._dequeue():
                groups: dict[tuple[str, bool], list[Submission]] = {}
                for submission in submissions:
                    key = submission.topic, submission.id is not None
                    groups.setdefault(key, []).append(submission)
                self._groups.extend(groups.values())
                while self._groups:
                    self._append(self._groups.popleft())
        except BaseException as error:
            self.failure = error
            self._refuse_all(error)
        finally:
            self.ended.set()

    def _dequeue(self) -> list[Submission]:
        """Wait for submissions, and return as many as one append should have; none if the inbox is
        closed and empty.
        """
        with self._changed:
            while not self._queue and not self._is_closing:
                self._changed.wait()
            submissions: list[Submission] = []
            rows = size = 0
            while self._queue:
                oldest = self._queue[0]
                is_full = (
                    rows + oldest.rows > MAX_APPEND_ROWS or size + oldest.size > MAX_APPEND_BYTES
                )
                if submissions and is_full:
                    break
                submissions.append(self._queue.popleft())
                rows += oldest.rows
                size += oldest.size
            if self._frees_before_append:
                self._rows -= rows
                self._bytes -= size
            return submissions

    def _append(self, submissions: list[Submission]) -> None:
        """Append submissions of one topic. An append that fails for a moment is tried again if the
        senders get no answer; the log recognises a repeated append.
        """
        results: list[SubmissionResult] | None = None
        while results is None:
            try:
                results = self._write(submissions)
                self.counters.record_success()
            except UnfitRows:
                middle = len(submissions) // 2
                self._groups.extendleft([submissions[middle:], submissions[:middle]])
                return
            except RetryError as error:
                self.counters.record_failure(error.message)
                logger.warning("The gateway %s cannot append: %s", self.counters.gateway, error)
                if self.counters.failures >= MAX_FAILURES:
                    self._finish(submissions, [_log_failure(error)] * len(submissions))
                    raise
                if self._retries_appends:
                    time.sleep(BACKOFF.pause_s(self.counters.failures))
                else:
                    results = [_log_failure(error)] * len(submissions)
            except BaseException as error:
                self._finish(submissions, [_log_failure(error)] * len(submissions))
                raise
        self._finish(submissions, results)

    def _finish(self, submissions: list[Submission], results: list[SubmissionResult]) -> None:
        for submission, result in zip(submissions, results, strict=True):
            self._settle(submission, result)
        if not self._frees_before_append:
            self.release(
                sum(submission.rows for submission in submissions),
                sum(submission.size for submission in submissions),
            )

    def _refuse_all(self, error: BaseException) -> None:
        with self._changed:
            submissions = [*chain.from_iterable(self._groups), *self._queue]
            self._groups.clear()
            self._queue.clear()
            self._is_closing = True
            if self._frees_before_append:
                self._rows = self._bytes = 0
        self._finish(submissions, [_log_failure(error)] * len(submissions))

    def close(self) -> None:
        """Append what waits, and end."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(STOP_S)

    def check(self) -> None:
        """Raise what ended the inbox, if anything did."""
        if self.failure is not None:
            raise self.failure


def _log_failure(error: BaseException) -> SubmissionResult:
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, HeadraceError):
        message = error.message
    return SubmissionResult(Fate.refused, "the log failed", message, is_temporary=True)
