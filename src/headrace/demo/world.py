"""The simulated world around the shop: everyone in it, from opening to closing. `headrace demo` lets it live in threads; tests go through it step by step, in a time of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Protocol

import numpy as np

from headrace.demo.bank import Bank
from headrace.demo.devices import Devices
from headrace.demo.offices import Magazine, Office, Treasury
from headrace.demo.sending import Sender
from headrace.demo.shoppers import Shoppers
from headrace.demo.warehouse import Warehouse
from headrace.log.api import Log

ORDERS_A_SECOND = 500.0
TOPICS = {"orders", "searches", "clicks", "payments", "tax_rates", "articles", "subscriptions", "customers", "products"}
DATABASE = "shop.db"
WAIT_S = 0.05


class Actor(Protocol):
    """Does something every `every_s` seconds, until the shop closes."""

    every_s: float

    def step(self, now_us: int) -> None: ...

    def close(self, now_us: int) -> None: ...


@dataclass(frozen=True)
class Sent:
    """What the world knows that it did."""

    orders: int
    repeats: int
    changes: int
    commands: int
    refused: int


class World:
    """Opens when the topics are there; `step` lets everyone act once, `works` are the same as threads."""

    def __init__(self, log: Log, shop: ModuleType, home: Path, now_us: int, *, seed: int = 0, orders_a_second: float = ORDERS_A_SECOND) -> None:
        rng = [np.random.default_rng([seed, number]) for number in range(6)]
        self.treasury = Treasury(log, rng[0], now_us)
        self.devices = Devices(log, rng[1], now_us, orders_a_second)
        self.bank = Bank(log, rng[2], now_us)
        self.office = Office(home / DATABASE, rng[3])
        self.magazine = Magazine(log, rng[4])
        self.shoppers = Shoppers(log, shop, rng[5], home)
        self.warehouse = Warehouse(log, self.devices.orders.sender)
        self.actors: dict[str, Actor] = {
            "treasury": self.treasury, "devices": self.devices, "bank": self.bank, "office": self.office, "magazine": self.magazine, "shoppers": self.shoppers,
            "warehouse": self.warehouse,
        }  # fmt: skip

    def works(self) -> dict[str, Callable[[Event], None]]:
        """Everyone, each for a thread of its own."""
        return {f"demo {name}": partial(_live, actor) for name, actor in self.actors.items()}

    def step(self, now_us: int) -> None:
        for actor in self.actors.values():
            actor.step(now_us)

    def close(self, now_us: int) -> None:
        """When nobody acts any more: everyone sends what is left, and then those go whose rows others wait for."""
        for actor in self.actors.values():
            actor.close(now_us)
        self.devices.say_goodbye(now_us)
        self.bank.say_goodbye(now_us)

    @property
    def sent(self) -> Sent:
        senders: list[Sender] = [outbox.sender for outbox in (self.devices.orders, self.devices.searches, self.devices.clicks)]
        return Sent(senders[0].rows, sum(each.repeats for each in senders), self.office.changes, self.shoppers.accepted, self.shoppers.refused)


def _live(actor: Actor, done: Event) -> None:
    while not done.wait(actor.every_s):
        actor.step(clock_us())


def clock_us() -> int:
    return time.time_ns() // 1000


def await_topics(log: Log, stop: Event) -> bool:
    """The pipeline makes its topics, and the capture those of the database, with what is in it. Whether they are there now."""
    while not stop.is_set():
        if set(log.topics()) >= TOPICS and all(sum(log.end_offsets(topic).values()) for topic in ("customers", "products")):
            return True
        stop.wait(WAIT_S)
    return False
