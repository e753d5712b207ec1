"""A decider whose states have a class for each phase, and a process that reads one of them. Run by
test_snapshots.
"""

import sys
from dataclasses import dataclass
from decimal import Decimal

import headrace as hr
from headrace.events import Decider, Handler, open_store


@dataclass(frozen=True)
class Paid:
    amount: Decimal


@dataclass(frozen=True)
class Empty:
    pass


@dataclass(frozen=True)
class Open:
    balance: Decimal


@dataclass(frozen=True)
class Full:
    balance: Decimal


def evolve(state: Empty | Open | Full, event: Paid) -> Empty | Open | Full:
    before = Decimal(0) if isinstance(state, Empty) else state.balance
    balance = before + event.amount
    return Full(balance) if balance >= 1000 else Open(balance)


def decide(amount: Decimal, state: Empty | Open | Full) -> list[Paid]:
    return [Paid(amount)]


PHASES = Decider[Empty | Open | Full]("phases", Empty(), decide, evolve, events=(Paid,))


def main(directory: str) -> None:
    with hr.open_log(f"file:{directory}") as log, open_store(log, "bank") as store:
        handler = Handler(store, PHASES)
        print(handler.handle("a", Decimal("0.50")).state, handler.snapshot_failures)


if __name__ == "__main__":
    main(sys.argv[1])
