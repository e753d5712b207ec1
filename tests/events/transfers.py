"""Transfers of money as a process over two accounts, and a program that runs it until it is killed.
Run by test_process.
"""

import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import headrace as hr
from headrace.events import (
    CommandRefused,
    DeadlineReached,
    Decider,
    Handler,
    Process,
    ProcessManager,
    Reaction,
    RefusedCommand,
    Send,
    open_store,
)


@dataclass(frozen=True)
class Requested:
    transfer: str
    source: str
    target: str
    amount: int


@dataclass(frozen=True)
class Taken:
    transfer: str
    amount: int


@dataclass(frozen=True)
class Given:
    transfer: str
    amount: int


@dataclass(frozen=True)
class Take:
    transfer: str
    amount: int


@dataclass(frozen=True)
class Give:
    transfer: str
    amount: int


@dataclass(frozen=True)
class Balance:
    amount: int = 0
    is_closed: bool = False


@dataclass(frozen=True)
class Closed:
    pass


def decide(command: Any, balance: Balance) -> list[Any]:
    if isinstance(command, Take):
        if balance.amount < command.amount:
            raise CommandRefused("not enough")
        return [Taken(command.transfer, command.amount)]
    if isinstance(command, Give):
        if balance.is_closed:
            raise CommandRefused("closed")
        return [Given(command.transfer, command.amount)]
    return [command]


def evolve(balance: Balance, event: Any) -> Balance:
    if isinstance(event, Closed):
        return replace(balance, is_closed=True)
    if isinstance(event, Requested):
        return balance
    change = event.amount if isinstance(event, Given) else -event.amount
    return replace(balance, amount=balance.amount + change)


ACCOUNTS = Decider("account", Balance(), decide, evolve, events=(Requested, Taken, Given, Closed))


@dataclass(frozen=True)
class Transfer:
    phase: str = "new"
    request: Requested | None = None


def react(transfer: Transfer, happened: Any) -> Reaction[Transfer] | None:
    if isinstance(happened, Requested):
        return Reaction(
            Transfer("taking", happened),
            send=[Send(happened.source, Take(happened.transfer, happened.amount))],
            deadlines={"late": timedelta(hours=1)},
        )
    request = transfer.request
    if request is None:
        return None
    if isinstance(happened, Taken) and transfer.phase == "taking":
        give = Send(request.target, Give(request.transfer, request.amount))
        return Reaction(replace(transfer, phase="giving"), send=[give])
    if isinstance(happened, Given):
        return Reaction(transfer, is_ended=True)
    if isinstance(happened, RefusedCommand):
        if transfer.phase == "taking":
            return Reaction(transfer, is_ended=True)
        back = Send(request.source, Give(request.transfer, request.amount))
        return Reaction(replace(transfer, phase="returning"), send=[back])
    if isinstance(happened, DeadlineReached):
        return Reaction(replace(transfer, phase="late"), is_ended=True)
    return None


TRANSFERS = Process(
    name="transfer",
    initial=Transfer(),
    key=lambda event: event.transfer,
    react=react,
    events=(Requested, Taken, Given),
    commands=(Take, Give),
)


def main(directory: str) -> None:
    with hr.open_log(f"file:{directory}") as log, open_store(log, "bank") as store:
        manager = ProcessManager(store, TRANSFERS, Handler(store, ACCOUNTS))
        print("began", manager._subscription.committed, flush=True)
        while True:
            if manager.step():
                print(manager._subscription.committed, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
