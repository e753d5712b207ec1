"""Process managers: money is neither lost nor doubled through kills; deadlines are reached once."""

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import FencedError, ProcessFailed
from headrace.events import (
    DeadlineReached,
    Decider,
    EventStore,
    Handler,
    Process,
    ProcessManager,
    Reaction,
    open_store,
)
from tests.events.transfers import ACCOUNTS, TRANSFERS, Balance, Closed, Given, Requested

NAMES = ["ada", "ben", "cho", "dee", "eve"]


def open_accounts(store: EventStore, amount: int = 100) -> Handler[Balance]:
    accounts = Handler(store, ACCOUNTS)
    for name in NAMES:
        accounts.handle(name, Given(f"opening-{name}", amount))
    accounts.handle("eve", Closed())
    return accounts


def request(accounts: Handler[Balance], number: int, source: str, target: str, amount: int) -> None:
    event = Requested(f"t-{number}", source, target, amount)
    accounts.handle(f"request-{number}", event, id=f"request-{number}")


def total(accounts: Handler[Balance]) -> int:
    return sum(accounts.state(name).amount for name in NAMES)


def test_a_transfer_and_one_that_is_refused_and_one_that_is_returned(store: EventStore) -> None:
    accounts = open_accounts(store)
    request(accounts, 1, "ada", "ben", 30)
    request(accounts, 2, "ada", "ben", 500)
    request(accounts, 3, "ben", "eve", 50)
    manager = ProcessManager(store, TRANSFERS, accounts)
    manager.settle()
    assert [accounts.state(name).amount for name in NAMES] == [70, 130, 100, 100, 100]
    assert (manager.instances(), manager.deadlines()) == ({}, [])
    (taken,) = [event for event in store.load("ada") if event.type == "Taken"]
    assert taken.causation_id == "transfer/t-1/6.0"
    assert taken.correlation_id == "request-1"
    # Another one goes on where it was, with nothing to do.
    again = ProcessManager(store, TRANSFERS, accounts)
    assert not again.step()
    with pytest.raises(FencedError):
        request(accounts, 4, "ada", "ben", 1)
        manager.step()
    again.settle()
    assert accounts.state("ada").amount == 69


def test_money_is_neither_lost_nor_doubled_through_kills(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    chance = random.Random(7)
    with hr.open_log(f"file:{directory}", durability="os") as log, open_store(log, "bank") as store:
        accounts = open_accounts(store)
        for number in range(150):
            source, target = chance.sample(NAMES, 2)
            request(accounts, number, source, target, chance.randint(1, 60))
        kills = steps = 0
        while kills < 8:
            child = subprocess.Popen(
                [sys.executable, "-m", "tests.events.transfers", str(directory)],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert child.stdout is not None
            assert child.stdout.readline().startswith("began")
            wanted = chance.randint(1, 3)
            for _ in range(wanted):
                child.stdout.readline()  # it has done something
                steps += 1
            time.sleep(chance.random() * 0.03)
            child.send_signal(signal.SIGKILL)
            child.wait()
            child.stdout.close()
            kills += 1
            for number in range(150 + 25 * kills, 175 + 25 * kills):
                source, target = chance.sample(NAMES, 2)
                request(accounts, number, source, target, chance.randint(1, 60))
        assert steps >= 8
        manager = ProcessManager(store, TRANSFERS, accounts)
        manager.settle()
        assert manager.instances() == {}
        assert total(accounts) == 500
        moved = Counter(
            (event.type, event.data["transfer"])
            for event in store.read()
            if event.type in {"Taken", "Given"} and event.data["transfer"].startswith("t-")
        )
        assert set(moved.values()) == {1}
        taken = {name for kind, name in moved if kind == "Taken"}
        assert taken == {name for kind, name in moved if kind == "Given"}
        assert len(taken) > 50


@dataclass(frozen=True)
class Ordered:
    order: str
    at: datetime | None = None


@dataclass(frozen=True)
class Paid:
    order: str


def react_to_orders(state: tuple[str, ...], happened: Any) -> Reaction[tuple[str, ...]]:
    name = happened.name if isinstance(happened, DeadlineReached) else type(happened).__name__
    deadlines: dict[str, datetime | timedelta | None] = {}
    if isinstance(happened, Ordered):
        deadlines = {"unpaid": happened.at or timedelta(milliseconds=300)}
    if isinstance(happened, Paid):
        deadlines = {"unpaid": None}
    return Reaction((*state, name), deadlines=deadlines)


ORDERS = Process[tuple[str, ...]](
    name="orders",
    initial=(),
    key=lambda event: event.order,
    react=react_to_orders,
    events=(Ordered, Paid),
    commands=(),
    state=tuple[str, ...],
)
SHOP = Decider[int](
    "shop", 0, lambda command, _s: [command], lambda s, _e: s, events=(Ordered, Paid)
)


def test_a_deadline_is_reached_once_in_the_order_of_recorded_time(store: EventStore) -> None:
    shop = Handler(store, SHOP)
    soon = timedelta(milliseconds=300)
    shop.handle("order-1", Ordered("1"))
    shop.handle("order-2", Ordered("2"))
    shop.handle("order-2", Paid("2"))
    time.sleep(soon.total_seconds() + 0.05)
    shop.handle("order-1", Paid("1"))  # too late, though nobody has looked at it before
    manager = ProcessManager(store, ORDERS, shop)
    manager.settle()
    assert manager.instances() == {
        "1": ("Ordered", "unpaid", "Paid"),
        "2": ("Ordered", "Paid"),
    }
    # A restart does not reach it again; an idle process reaches those that come.
    manager = ProcessManager(store, ORDERS, shop)
    shop.handle("order-3", Ordered("3"))
    manager.settle()
    assert [(key, name) for _, key, name in manager.deadlines()] == [("3", "unpaid")]
    manager = ProcessManager(store, ORDERS, shop)
    time.sleep(soon.total_seconds() + 0.05)
    manager.settle()
    manager = ProcessManager(store, ORDERS, shop)
    manager.settle()
    assert manager.instances()["3"] == ("Ordered", "unpaid")
    assert manager.instances()["1"] == ("Ordered", "unpaid", "Paid")


def test_a_deadline_in_the_past_is_reached_at_once(store: EventStore) -> None:
    shop = Handler(store, SHOP)
    shop.handle("order-1", Ordered("1", datetime(2020, 1, 1, tzinfo=UTC)))
    manager = ProcessManager(store, ORDERS, shop)
    manager.settle()
    assert manager.instances() == {"1": ("Ordered", "unpaid")}


def test_a_process_that_fails_stores_nothing_and_goes_on_when_it_is_corrected(
    store: EventStore,
) -> None:
    shop = Handler(store, SHOP)
    shop.handle("order-1", Ordered("1"))

    def broken(_state: tuple[str, ...], _happened: Any) -> Reaction[tuple[str, ...]]:
        raise KeyError("oh")

    with pytest.raises(ProcessFailed, match="failed at Ordered of the instance '1'"):
        ProcessManager(store, replace(ORDERS, react=broken), shop).step()
    manager = ProcessManager(store, ORDERS, shop)
    manager.step()
    assert manager.instances() == {"1": ("Ordered",)}
