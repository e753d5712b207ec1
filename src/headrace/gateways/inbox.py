"""Between those who receive and the log: a bounded queue, one thread that appends what is in it, and the policy for when it is full.

Deliveries that wait together are appended together, so that many small ones share one sync. Whoever handed one in hears, from the thread that appends, what became of it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from threading import Condition, Event, Thread

from headrace.errors import HeadraceError, RetryError
from headrace.gateways.counting import Counts
from headrace.gateways.deliveries import Delivery, Fate, Outcome
from headrace.gateways.policies import BLOCK, BUFFER, DROP_OLDEST, Policy

logger = logging.getLogger("headrace.gateways")
MOST_ROWS_AN_APPEND, MOST_BYTES_AN_APPEND = 100_000, 4 << 20
MOST_FAILURES = 12
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
    """`admit` asks for room, `put` hands a delivery in that has room; `submit` does both, and waits where the policy blocks. `write` appends deliveries of one topic, and says what became of each.

    `patient` gateways have nobody to tell when the log fails in passing: they try again. After a minute of failures in a row the error stands in `failure`, and `ended` is set.
    """

    def __init__(self, policy: Policy, counts: Counts, write: Write, *, patient: bool, on_room: Callable[[], None] | None = None) -> None:
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
        """Rows that have room here, with those being appended unless the policy drops what is oldest. Senders that still wait for room are not in it."""
        return self._rows

    @property
    def waiting_bytes(self) -> int:
        return self._bytes

    # Coming in

    def admit(self, rows: int, size: int) -> Admission:
        """Take room for rows and bytes, or say what the policy says. What is larger than all the room there is gets in when nothing else waits."""
        evicted: list[Delivery] = []
        with self._changed:
            if self.policy.name == DROP_OLDEST:
                while self._queue and not self._fits(rows, size):
                    evicted.append(self._popped())
            fits = self._fits(rows, size)
            if fits:
                self._rows, self._bytes = self._rows + rows, self._bytes + size
        for each in evicted:
            self._settle(each, Outcome(Fate.dropped, FULL, "It was dropped: the log is slower than those who send, and newer rows came.", passing=True))
        if fits:
            return Admission.taken
        return {BLOCK: Admission.wait, BUFFER: Admission.refused}.get(self.policy.name, Admission.dropped)

    def _fits(self, rows: int, size: int) -> bool:
        return self._has_room(self._rows, rows, self.policy.rows) and self._has_room(self._bytes, size, self.policy.bytes)

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
        """For a thread that receives. Whatever happens, the delivery is counted, and `done` is called. Returns whether it is on its way."""
        if delivery.stands_for is None:  # else its parts were counted as they came
            self.counts.came(delivery.rows)
        while (answer := self.admit(delivery.rows, delivery.size)) is Admission.wait:
            if stopped.is_set() or self.ended.is_set():
                self._settle(delivery, Outcome(Fate.refused, "stopping", "The gateway is stopping.", passing=True))
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
        self._settle(delivery, Outcome(fate, FULL, "The log is slower than those who send.", passing=True))

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
        """What waits, as much as one append should have; nothing when the inbox is closed and empty. Its room is given back when it is done with."""
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait()
            taken: list[Delivery] = []
            rows = size = 0
            while self._queue and (not taken or (rows + self._queue[0].rows <= MOST_ROWS_AN_APPEND and size + self._queue[0].size <= MOST_BYTES_AN_APPEND)):
                taken.append(self._queue.popleft())
                rows, size = rows + taken[-1].rows, size + taken[-1].size
            if self._frees_early:
                self._rows, self._bytes = self._rows - rows, self._bytes - size
            return taken

    @property
    def _frees_early(self) -> bool:
        """What is being appended cannot be dropped any more. If it kept its room, what comes next would have to go, though it is newer."""
        return self.policy.name == DROP_OLDEST

    def _append(self, taken: list[Delivery]) -> None:
        try:
            outcomes = self._written(taken)
        except HeadraceError as error:
            self._finish(taken, [_failed(error)] * len(taken))
            raise
        self._finish(taken, outcomes)

    def _written(self, taken: list[Delivery]) -> list[Outcome]:
        """What failed in passing is tried again where nobody could be told; the log takes a repeated append for the one it was."""
        while True:
            try:
                outcomes = self._write(taken)
            except RetryError as error:
                self.counts.failed(error.message)
                logger.warning("The gateway %s cannot append: %s", self.counts.gateway, error)
                if self.counts.failures >= MOST_FAILURES:
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
    return Outcome(Fate.refused, "the log failed", error.message if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}", passing=True)
