"""Between those who receive and the log: a bounded queue, one thread that appends what is in it,
and the policy for when it is full.

Deliveries that wait together are appended together, so that many small ones share one sync. Whoever
handed one in hears, from the thread that appends, what became of it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from threading import Condition, Event, Lock, Thread
from typing import Any, TypeAlias

import pyarrow as pa

from headrace.durations import to_us
from headrace.errors import HeadraceError, InputError, RetryError, nearest
from headrace.log.values import Duration

# What a gateway does when the log is slower than whoever sends: chosen by name, and bounded in rows
# and in bytes.
#
# - `block`: the sender waits. HTTP answers later, RabbitMQ keeps what is not acknowledged, a PUSH
# socket stops; of UDP the system's own buffer fills, and what does not fit there is counted.
# socket stops; of UDP the system's own buffer fills, and what does not fit there is counted. -
# `buffer`: what comes is kept in memory, up to a bound; beyond it the sender is refused (HTTP: 503,
# come back).
# `buffer`: what comes is kept in memory, up to a bound; beyond it the sender is refused (HTTP: 503,
# come back). - `drop newest`, `drop oldest`: nobody waits; beyond the bound what comes, or what has
# waited longest, is dropped and counted.


BLOCK, BUFFER, DROP_NEWEST, DROP_OLDEST = "block", "buffer", "drop newest", "drop oldest"
NAMES = (BLOCK, BUFFER, DROP_NEWEST, DROP_OLDEST)
_SHORT = {"drop": DROP_NEWEST, "drop-newest": DROP_NEWEST, "drop-oldest": DROP_OLDEST}
DEFAULT_ROWS, DEFAULT_BYTES = 100_000, 64 << 20


@dataclass(frozen=True)
class Policy:
    """At most `rows` rows and `bytes` bytes wait for the log. One delivery alone may be larger: it
    is let in when nothing else waits.
    """

    name: str = BLOCK
    rows: int = DEFAULT_ROWS
    bytes: int = DEFAULT_BYTES
    patience_s: float = 30.0
    """How long a sender that can be answered waits, before it is told to come back."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.bytes < 1:
            raise InputError("A gateway's bounds must be at least 1 row and 1 byte.")
        if self.patience_s <= 0:
            raise InputError("A gateway's patience must be longer than nothing.")


def policy_of(
    name: str,
    *,
    max_rows: int = DEFAULT_ROWS,
    max_bytes: int = DEFAULT_BYTES,
    patience: Duration = "30 seconds",
) -> Policy:
    chosen = _SHORT.get(name, name)
    if chosen not in NAMES:
        raise InputError(
            f"There is no policy {name!r}: {nearest(name, NAMES)}",
            fix=f"choose one of {', '.join(NAMES)}.",
        )
    return Policy(chosen, max_rows, max_bytes, to_us(patience, what="patience") / 1e6)


# What a gateway hands to the log: deliveries, each of which is stored, refused or dropped as a
# whole, and what became of it.


@dataclass(frozen=True)
class Lines:
    """Rows as JSON objects, one a value."""

    values: list[bytes]


@dataclass(frozen=True)
class Parsed:
    """Rows of one JSON array, as a parser gave them."""

    values: list[Any]


@dataclass(frozen=True)
class Plain:
    """Rows by column name, as Python has them: a body as it came, with what is known of it. What
    the topic has no column for is left out.
    """

    values: list[Mapping[str, Any]]


@dataclass(frozen=True)
class Columns:
    """Rows that are Arrow data already. A delivery of StatsD's stands for more values than it has
    rows.
    """

    batch: pa.RecordBatch


Content: TypeAlias = Lines | Parsed | Plain | Columns


class Fate(StrEnum):
    """Every row that came has one of these, or still waits."""

    stored = "stored"
    repeated = "repeated"
    """It is in the topic already, under the same id."""
    dropped = "dropped"
    refused = "refused"


@dataclass(frozen=True)
class Outcome:
    """What became of a delivery. `reason` is a few words that are counted; `message` says it to
    whoever sent it.
    """

    fate: Fate
    reason: str = ""
    message: str = ""
    position: str = ""
    passing: bool = False
    """Whether the same delivery may be taken later."""


def _nobody(_outcome: Outcome) -> None:
    pass


@dataclass
class Delivery:
    """One request, one message, or the values of some packets. `rows` are those it takes room
    for.
    """

    topic: str
    content: Content
    rows: int
    size: int
    received_us: int
    id: str | None = None
    payload: bytes | None = None
    """What came, for a dead letter if it cannot be used; None where the sender is told instead."""
    stands_for: int | None = None
    """How many it counts as, if not its rows: values of metrics that were put together."""
    done: Callable[[Outcome], None] = field(default=_nobody, repr=False)

    @property
    def counted(self) -> int:
        return self.rows if self.stands_for is None else self.stands_for


# How a gateway is doing: every row that came is counted once, as stored, repeated, dropped or
# refused, or waits.


@dataclass
class GatewayStatus:
    """`received` is the sum of `stored`, `repeated`, `dropped`, `refused` and `waiting_rows`, at
    any moment.
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
    """What only this kind of gateway knows, such as packets that the system had no room for."""
    failures: int = 0
    error: str | None = None

    @property
    def rows(self) -> int:
        return self.stored


class Counts:
    """The same, while many threads count."""

    def __init__(self, gateway: str, kind: str) -> None:
        self.gateway, self.kind = gateway, kind
        self.details: dict[str, int] = {}
        self.failures, self.error = 0, None
        self._lock = Lock()
        self._received = self._waiting_bytes = 0
        self._fates = dict.fromkeys(Fate, 0)
        self._reasons: Counter[str] = Counter()

    failures: int
    error: str | None

    def came(self, rows: int) -> None:
        with self._lock:
            self._received += rows

    def settled(self, rows: int, outcome: Outcome) -> None:
        with self._lock:
            self._fates[outcome.fate] += rows
            if outcome.reason:
                self._reasons[outcome.reason] += rows

    def turned_away(self, rows: int, reason: str, fate: Fate = Fate.refused) -> None:
        """Rows that came and went, without a delivery."""
        with self._lock:
            self._received += rows
            self._fates[fate] += rows
            self._reasons[reason] += rows

    def failed(self, error: str) -> None:
        with self._lock:
            self.failures, self.error = self.failures + 1, error

    def works(self) -> None:
        self.failures, self.error = 0, None

    def status(self, waiting_bytes: int = 0) -> GatewayStatus:
        with self._lock:
            fates = {fate.value: count for fate, count in self._fates.items()}
            waiting = self._received - sum(fates.values())
            return GatewayStatus(
                self.gateway,
                self.kind,
                received=self._received,
                **fates,
                waiting_rows=waiting,
                waiting_bytes=waiting_bytes,
                reasons=dict(self._reasons),
                details=dict(self.details),
                failures=self.failures,
                error=self.error,
            )


logger = logging.getLogger("headrace.gateways")
MAX_ROWS_AN_APPEND, MAX_BYTES_AN_APPEND = 100_000, 4 << 20
MAX_FAILURES = 12
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
STOP_S = 30.0
FULL = "no room"
"""The reason of what was dropped or refused because the log was slower."""

Write = Callable[[list[Delivery]], list[Outcome]]


class Admission(Enum):
    """What the policy says to something that comes."""

    taken = auto()
    wait = auto()
    refused = auto()
    dropped = auto()


class Inbox:
    """`admit` asks for room, `put` hands a delivery in that has room; `submit` does both, and waits
    where the policy blocks. `write` appends deliveries of one topic, and says what became of each.

    `patient` gateways have nobody to tell when the log fails in passing: they try again. After a
    minute of failures in a row the error stands in `failure`, and `ended` is set.
    """

    def __init__(
        self,
        policy: Policy,
        counts: Counts,
        write: Write,
        *,
        patient: bool,
        on_room: Callable[[], None] | None = None,
    ) -> None:
        self.policy, self.counts = policy, counts
        self.failure: BaseException | None = None
        self.ended = Event()
        self._write, self._patient, self._on_room = write, patient, on_room
        self._changed = Condition()
        self._queue: deque[Delivery] = deque()
        self._rows = self._bytes = 0
        self._closing = False
        self._thread = Thread(target=self._run, name=f"gateway {counts.gateway}", daemon=True)
        self._thread.start()

    @property
    def waiting_rows(self) -> int:
        """Rows that have room here, with those being appended unless the policy drops what is
        oldest. Senders that still wait for room are not in it.
        """
        return self._rows

    @property
    def waiting_bytes(self) -> int:
        return self._bytes

    # Coming in

    def admit(self, rows: int, size: int) -> Admission:
        """Take room for rows and bytes, or say what the policy says. What is larger than all the
        room there is gets in when nothing else waits.
        """
        evicted: list[Delivery] = []
        with self._changed:
            if self.policy.name == DROP_OLDEST:
                while self._queue and not self._fits(rows, size):
                    evicted.append(self._popped())
            fits = self._fits(rows, size)
            if fits:
                self._rows, self._bytes = self._rows + rows, self._bytes + size
        for each in evicted:
            self._settle(
                each,
                Outcome(
                    Fate.dropped,
                    FULL,
                    "It was dropped: the log is slower than those who send, and newer rows came.",
                    passing=True,
                ),
            )
        if fits:
            return Admission.taken
        return {BLOCK: Admission.wait, BUFFER: Admission.refused}.get(
            self.policy.name, Admission.dropped
        )

    def _fits(self, rows: int, size: int) -> bool:
        return self._has_room(self._rows, rows, self.policy.rows) and self._has_room(
            self._bytes, size, self.policy.bytes
        )

    @staticmethod
    def _has_room(waiting: int, more: int, most: int) -> bool:
        return not waiting or waiting + more <= most

    def _popped(self) -> Delivery:
        oldest = self._queue.popleft()
        self._rows, self._bytes = self._rows - oldest.rows, self._bytes - oldest.size
        return oldest

    def put(self, delivery: Delivery) -> None:
        with self._changed:
            self._queue.append(delivery)
            self._changed.notify_all()

    def give_back(self, rows: int, size: int) -> None:
        """Room that is not needed any more."""
        with self._changed:
            self._rows, self._bytes = self._rows - rows, self._bytes - size
            self._changed.notify_all()
        if self._on_room is not None:
            self._on_room()

    def submit(self, delivery: Delivery, stopped: Event) -> bool:
        """For a thread that receives. Whatever happens, the delivery is counted, and `done` is
        called. Returns whether it is on its way.
        """
        if delivery.stands_for is None:  # else its parts were counted as they came
            self.counts.came(delivery.rows)
        while (answer := self.admit(delivery.rows, delivery.size)) is Admission.wait:
            if stopped.is_set() or self.ended.is_set():
                self._settle(
                    delivery,
                    Outcome(Fate.refused, "stopping", "The gateway is stopping.", passing=True),
                )
                return False
            with self._changed:
                self._changed.wait(0.1)
        if answer is Admission.taken:
            self.put(delivery)
            return True
        self.turn_away(delivery, answer)
        return False

    def turn_away(self, delivery: Delivery, answer: Admission) -> None:
        fate = Fate.dropped if answer is Admission.dropped else Fate.refused
        self._settle(
            delivery, Outcome(fate, FULL, "The log is slower than those who send.", passing=True)
        )

    def _settle(self, delivery: Delivery, outcome: Outcome) -> None:
        self.counts.settled(delivery.counted, outcome)
        delivery.done(outcome)

    # Going out

    def _run(self) -> None:
        try:
            while taken := self._taken():
                for topic in dict.fromkeys(each.topic for each in taken):
                    self._append([each for each in taken if each.topic == topic])
        except BaseException as error:
            self.failure = error
            self._refuse_all(error)
        finally:
            self.ended.set()

    def _taken(self) -> list[Delivery]:
        """What waits, as much as one append should have; nothing when the inbox is closed and
        empty. Its room is given back when it is done with.
        """
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait()
            taken: list[Delivery] = []
            rows = size = 0
            while self._queue and (
                not taken
                or (
                    rows + self._queue[0].rows <= MAX_ROWS_AN_APPEND
                    and size + self._queue[0].size <= MAX_BYTES_AN_APPEND
                )
            ):
                taken.append(self._queue.popleft())
                rows, size = rows + taken[-1].rows, size + taken[-1].size
            if self._frees_early:
                self._rows, self._bytes = self._rows - rows, self._bytes - size
            return taken

    @property
    def _frees_early(self) -> bool:
        """What is being appended cannot be dropped any more. If it kept its room, what comes next
        would have to go, though it is newer.
        """
        return self.policy.name == DROP_OLDEST

    def _append(self, taken: list[Delivery]) -> None:
        try:
            outcomes = self._written(taken)
        except HeadraceError as error:
            self._finish(taken, [_failed(error)] * len(taken))
            raise
        self._finish(taken, outcomes)

    def _written(self, taken: list[Delivery]) -> list[Outcome]:
        """What failed in passing is tried again where nobody could be told; the log takes a
        repeated append for the one it was.
        """
        while True:
            try:
                outcomes = self._write(taken)
            except RetryError as error:
                self.counts.failed(error.message)
                logger.warning("The gateway %s cannot append: %s", self.counts.gateway, error)
                if self.counts.failures >= MAX_FAILURES:
                    raise
                if not self._patient:
                    return [_failed(error)] * len(taken)
                time.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self.counts.failures - 1)))
            else:
                self.counts.works()
                return outcomes

    def _finish(self, taken: list[Delivery], outcomes: list[Outcome]) -> None:
        for delivery, outcome in zip(taken, outcomes, strict=True):
            self._settle(delivery, outcome)
        if not self._frees_early:
            self.give_back(sum(each.rows for each in taken), sum(each.size for each in taken))

    def _refuse_all(self, error: BaseException) -> None:
        with self._changed:
            left, self._closing = list(self._queue), True
            self._queue.clear()
            if self._frees_early:
                self._rows = self._bytes = 0
        self._finish(left, [_failed(error)] * len(left))

    def close(self) -> None:
        """Append what waits, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(STOP_S)

    def check(self) -> None:
        """Raise what ended it, if anything did."""
        if self.failure is not None:
            raise self.failure


def _failed(error: BaseException) -> Outcome:
    return Outcome(
        Fate.refused,
        "the log failed",
        error.message if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}",
        passing=True,
    )
