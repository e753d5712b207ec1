"""A decider that adds numbers, for the tests of events."""

from dataclasses import dataclass, replace

from headrace.errors import CommandRefused
from headrace.events import Decider


@dataclass(frozen=True)
class Added:
    amount: int


@dataclass(frozen=True)
class Total:
    sum: int = 0
    count: int = 0


def decide(command: int, total: Total) -> list[Added]:
    if command < 0:
        raise CommandRefused("less than nothing")
    if command == 13:
        raise ZeroDivisionError("bad luck")
    return [Added(command)] * (command % 3)


def evolve(total: Total, event: Added) -> Total:
    return replace(total, sum=total.sum + event.amount, count=total.count + 1)


TOTALS = Decider("total", Total(), decide, evolve, events=(Added,), snapshot_every=4)
