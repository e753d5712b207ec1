"""What a queue's group knows of each message: done, leased, waiting, or never given out. Pure state, applied from the journal.

Everything below `floor` is done. Above it, `done` holds what was acknowledged out of order, `given` what was handed out at least once, and
from `next` on nothing was ever handed out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MOST_GIVEN = 10_000
"""Messages of one partition that may be handed out and not yet done."""
MOST_AHEAD = 100_000
"""How far a partition may be handed out ahead of its oldest message that is not done. Both bound a queue's memory."""


@dataclass(slots=True)
class Lease:
    deliveries: int
    visible_us: int  # from when on it may be given to someone (again)
    receiver: str


@dataclass(slots=True)
class PartitionQueue:
    floor: int = 0
    next: int = 0
    done: set[int] = field(default_factory=set)
    given: dict[int, Lease] = field(default_factory=dict)

    def finish(self, offsets: Iterable[int]) -> None:
        for offset in offsets:
            self.given.pop(offset, None)
            if offset >= self.floor:
                self.done.add(offset)
        while self.floor in self.done:
            self.done.discard(self.floor)
            self.floor += 1
        self.next = max(self.next, self.floor)

    def available(self, end: int, now_us: int, most: int) -> list[int]:
        """Offsets that can be handed out now, oldest first."""
        again = sorted(offset for offset, lease in self.given.items() if lease.visible_us <= now_us)[:most]
        room = min(most - len(again), MOST_GIVEN - len(self.given), self.floor + MOST_AHEAD - self.next, end - self.next)
        return again + list(range(self.next, self.next + max(0, room)))

    def waiting(self, end: int) -> int:
        """Messages that are not done: the queue's lag."""
        return max(0, end - self.floor - len(self.done))


class QueueState:
    """The partitions of one topic as one group's queue sees them."""

    def __init__(self) -> None:
        self.partitions: dict[int, PartitionQueue] = {}

    def partition(self, number: int) -> PartitionQueue:
        return self.partitions.setdefault(number, PartitionQueue())

    def apply(self, operation: str, partition: int, *arguments: Any) -> None:
        getattr(self, f"_{operation}")(self.partition(partition), *arguments)

    @staticmethod
    def _begin(queue: PartitionQueue, floor: int) -> None:
        queue.floor = max(queue.floor, floor)
        queue.next = max(queue.next, floor)
        queue.done = {offset for offset in queue.done if offset >= floor}
        queue.given = {offset: lease for offset, lease in queue.given.items() if offset >= floor}

    @staticmethod
    def _reset(queue: PartitionQueue, floor: int) -> None:
        queue.floor = queue.next = floor
        queue.done, queue.given = set(), {}

    @staticmethod
    def _take(queue: PartitionQueue, offsets: list[int], visible_us: int, receiver: str) -> None:
        for offset in offsets:
            known = queue.given.get(offset)
            queue.given[offset] = Lease(known.deliveries + 1 if known else 1, visible_us, receiver)
            queue.next = max(queue.next, offset + 1)

    @staticmethod
    def _renew(queue: PartitionQueue, offsets: list[int], visible_us: int) -> None:
        for offset in offsets:
            if offset in queue.given:  # always, unless the journal lost who took it
                queue.given[offset].visible_us = visible_us

    @staticmethod
    def _return(queue: PartitionQueue, offsets: list[int], visible_us: int) -> None:
        for offset in offsets:
            if offset in queue.given:
                queue.given[offset].visible_us, queue.given[offset].receiver = visible_us, ""

    @staticmethod
    def _done(queue: PartitionQueue, offsets: list[int]) -> None:
        queue.finish(offsets)

    def dump(self) -> dict[str, Any]:
        return {
            str(number): [q.floor, q.next, sorted(q.done), [[o, g.deliveries, g.visible_us, g.receiver] for o, g in q.given.items()]]
            for number, q in self.partitions.items()
        }

    @classmethod
    def load(cls, dump: dict[str, Any]) -> QueueState:
        state = cls()
        for number, (floor, following, done, given) in dump.items():
            leases = {offset: Lease(deliveries, visible_us, receiver) for offset, deliveries, visible_us, receiver in given}
            state.partitions[int(number)] = PartitionQueue(floor, following, set(done), leases)
        return state
