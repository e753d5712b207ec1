"""The simulated world around the shop: everyone in it, from opening to closing. `headrace demo`
lets it live in threads; tests go through it step by step, in a time of their own.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa

from headrace.events import CommandRefused, Handler, open_store
from headrace.events.event import fit_copy
from headrace.log import open_log
from headrace.log.api import Log, Transaction

# A producer as a careful program has it: it numbers its appends, and now and then sends one again,
# as if the answer had been lost.


REPEAT_EVERY = 7


class Sender:
    """Appends to one topic; knows how many rows it has sent, and how many appends it has
    repeated.
    """

    def __init__(self, log: Log, topic: str) -> None:
        self._producer = log.producer(topic, id=f"demo-{topic}")
        self._sequence = self._producer.last_sequence
        self.rows, self.repeats = 0, 0

    def append(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        self._sequence += 1
        self._producer.append(rows, sequence=self._sequence)
        self.rows += rows.num_rows
        if (
            self._sequence % REPEAT_EVERY == 0
            and self._producer.append(rows, sequence=self._sequence).duplicate
        ):
            self.repeats += 1

    def upsert(self, rows: pa.Table) -> None:
        self._producer.upsert(rows)
        self.rows += rows.num_rows

    def close(self) -> None:
        self._producer.close()


def times(microseconds: object) -> pa.Array:
    """As columns of type TIMESTAMP are stored."""
    return pa.array(microseconds, pa.int64()).cast(pa.timestamp("us", tz="UTC"))


# What the simulated shop is made of: its products, cities, search words, stored searches, and the
# words of its articles.


PRODUCTS = [
    ("rope", 19.0),
    ("lamp", 34.5),
    ("boots", 129.0),
    ("tent", 249.0),
    ("stove", 59.9),
    ("map", 12.5),
    ("compass", 27.0),
    ("kettle", 31.0),
    ("gloves", 24.0),
    ("axe", 48.0),
    ("canoe", 799.0),
    ("sled", 89.0),
    ("hammock", 64.0),
    ("whistle", 6.5),
    ("flask", 22.0),
    ("scarf", 18.0),
    ("saddle", 310.0),
    ("net", 15.0),
    ("oar", 44.0),
    ("blanket", 39.0),
]
CITIES = {
    "Oslo": "no",
    "Bergen": "no",
    "Rome": "it",
    "Milan": "it",
    "Paris": "fr",
    "Lyon": "fr",
    "Lisbon": "pt",
    "Porto": "pt",
}
RATES = {"no": 0.25, "it": 0.22, "fr": 0.2, "pt": 0.23}
CUSTOMERS = 500

# Stored searches: words with AND, OR and NOT, so that a few lines of plain Python can say who must
# hear of what.
QUERIES = [
    "storm AND tide",
    "snow OR ice",
    "lake AND NOT winter",
    "rope",
    "river AND canoe",
    "forest OR meadow",
    "night AND lamp AND NOT city",
    "summit",
    "harbour AND fog",
    "winter AND NOT snow",
    "tide OR harbour",
    "meadow AND river",
]
READERS = [f"reader-{number}" for number in range(len(QUERIES))]
WORDS = [
    "storm",
    "tide",
    "snow",
    "ice",
    "lake",
    "winter",
    "rope",
    "river",
    "canoe",
    "forest",
    "meadow",
    "night",
    "lamp",
    "city",
    "summit",
    "harbour",
    "fog",
    "morning",
    "valley",
    "bridge",
    "wind",
    "stone",
    "path",
    "shore",
    "cabin",
    "fire",
    "star",
    "rain",
    "cloud",
    "field",
]


# People with carts: they put things in, take some out again, and buy, or try to. Each is a command,
# decided against what happened to the cart before.


OPEN_CARTS, COMMANDS_A_STEP = 25, 6
STORE = "carts"


class Shoppers:
    """Events are kept in an embedded log. If the shop's own is one, in that; if it is a broker,
    beside it, and each event is passed on, once.
    """

    every_s = 0.5

    def __init__(self, log: Log, shop: ModuleType, rng: np.random.Generator, home: Path) -> None:
        self._rng, self._shop = rng, shop
        self._own = (
            None if log.address.startswith("file:") else open_log(f"file:{home / 'carts-log'}")
        )
        self._store = open_store(self._own or log, STORE)
        self._log = log
        self._passing_on = None if self._own is None else log.producer(STORE, id="demo-carts")
        self._handler: Handler[Any] = Handler(self._store, shop.CARTS)
        self._carts = [f"cart-{number}" for number in range(OPEN_CARTS)]
        self._opened = OPEN_CARTS
        self.accepted, self.refused = 0, 0

    def step(self, now_us: int) -> None:  # noqa: ARG002
        for _ in range(COMMANDS_A_STEP):
            self._act(int(self._rng.integers(OPEN_CARTS)))
        self._pass_on()

    def close(self, now_us: int) -> None:  # noqa: ARG002
        self._pass_on()
        self._store.close()
        if self._passing_on is not None and self._own is not None:
            self._passing_on.close()
            self._own.close()

    def _act(self, at: int) -> None:
        item = PRODUCTS[self._rng.integers(len(PRODUCTS))][0]
        held = self._handler.state(self._carts[at]).items
        chance = self._rng.random()
        if chance < 0.55:
            command: Any = self._shop.Put(item)
        elif chance < 0.8:
            command = self._shop.TakeOut(str(self._rng.choice(held)) if held else item)
        else:
            command = self._shop.Buy()
        try:
            self._handler.handle(self._carts[at], command)
        except CommandRefused:
            self.refused += 1
            return
        self.accepted += 1
        if isinstance(command, self._shop.Buy):
            self._carts[at], self._opened = f"cart-{self._opened}", self._opened + 1

    def _pass_on(self) -> None:
        """An event's offset is its number: whatever happens in between, each is there once, and in
        order.
        """
        if self._passing_on is None or self._own is None:
            return
        rows = self._own.read(STORE, 0, self._passing_on.last_sequence + 1).to_table()
        if not rows.num_rows:
            return
        copied = fit_copy(rows, self._log, STORE)
        for at, offset in enumerate(rows["_offset"].to_pylist()):
            self._passing_on.append(copied.slice(at, 1), sequence=offset)


# The warehouse: a consumer group that packs a parcel for each order. The parcels and how far it has
# read are one transaction, so that an order has one parcel, whatever happens.


GROUP, PARCELS = "warehouse", "parcels"
PATIENCE_S = 60.0


class Warehouse:
    every_s = 0.5

    def __init__(self, log: Log, orders: Sender) -> None:
        self._log, self._orders = log, orders
        self._packed = 0
        log.create_topic(
            PARCELS, "order_id BIGINT, product_id BIGINT", key="order_id", exist_ok=True
        )
        self._consumer = log.consumer("orders", group=GROUP)
        self._last: Transaction | None = None

    def step(self, now_us: int) -> None:  # noqa: ARG002
        batches = self._consumer.poll(timeout="200 milliseconds")
        if not batches:
            return
        self._last = (
            self._log.transaction("demo-warehouse") if self._last is None else self._last.next()
        )
        with self._last as tx:
            for batch in batches:
                tx.append(
                    PARCELS, pa.table({name: batch[name] for name in ("order_id", "product_id")})
                )
            tx.commit_offsets(GROUP, self._consumer.positions())
        self._packed += sum(batch.num_rows for batch in batches)

    def close(self, now_us: int) -> None:
        """To the end; the devices have sent everything before."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self._packed < self._orders.rows and time.monotonic() < deadline_s:
            self.step(now_us)
        self._consumer.close()


# Simulated devices: people order, search and click on them. Every device's clock is wrong, by
# seconds or by years, and now and then one has no connection and sends what it has some seconds
# later.
#
# The pipeline does not get the time at which something truly happened, less than a second before
# it is sent: it has to find it out from three wrong times.


DEVICES = 40
SECOND_US = 1_000_000
CLOCKS_OFF_US = np.array([0, 3, -7, 90, -3_600, 86_400, -10 * 365 * 86_400]) * SECOND_US
AWAY_EVERY_S, AWAY_S = 3.0, (8.0, 14.0)
CLICKED, LONGEST_CLICK_S = 0.4, 4.0
LATER_US = 60 * SECOND_US

Frame = pd.DataFrame


class Outbox:
    """One topic's rows that have happened, or are about to, and have not been sent yet: `who` (the
    device's number), `at_us` (when, truly), and the row's own columns.
    """

    def __init__(self, log: Log, topic: str, fleet: Fleet) -> None:
        self.sender, self._fleet = Sender(log, topic), fleet
        self._waiting: Frame | None = None

    def add(self, rows: Frame) -> None:
        self._waiting = (
            rows if self._waiting is None else pd.concat([self._waiting, rows], ignore_index=True)
        )

    def send(self, now_us: int) -> None:
        """What has been received by now."""
        if self._waiting is None or not len(self._waiting):
            return
        rows = self._waiting
        sent_us = np.maximum(rows["at_us"].to_numpy(), self._fleet.back_us[rows["who"]])
        received_us = sent_us + self._fleet.travel_us[rows["who"]]
        is_there = received_us <= now_us
        self._waiting = rows[~is_there].reset_index(drop=True)
        arrivals = rows[is_there].assign(
            sent_us=sent_us[is_there], received_us=received_us[is_there]
        )
        self.sender.append(
            self._as_received(arrivals.sort_values(["received_us", "at_us"], kind="stable"))
        )

    def _as_received(self, rows: Frame) -> pa.Table:
        """By the device's own clock, but for when it was received."""
        who = rows["who"].to_numpy()
        off_us = self._fleet.clock_off_us[who]
        own = {
            name: pa.array(rows[name].to_numpy())
            for name in rows.columns
            if name not in {"who", "at_us", "sent_us", "received_us"}
        }
        return pa.table(
            {
                **own,
                "device": pa.array(self._fleet.names[who]),
                "happened": times(rows["at_us"].to_numpy() + off_us),
                "sent": times(rows["sent_us"].to_numpy() + off_us),
                "received": times(rows["received_us"].to_numpy()),
            }
        )


class Fleet:
    """The devices: how far each one's clock is off, how long its rows travel, and when it is back
    if it has no connection.
    """

    def __init__(self, rng: np.random.Generator, now_us: int) -> None:
        self._rng, self._next_us = rng, now_us + SECOND_US
        self.names = np.array([f"device-{number:02}" for number in range(DEVICES)], dtype=object)
        self.clock_off_us = rng.choice(CLOCKS_OFF_US, DEVICES)
        self.travel_us = rng.integers(20_000, 120_000, DEVICES)
        self.back_us = np.zeros(DEVICES, np.int64)

    def lose_connections(self, now_us: int) -> None:
        if now_us >= self._next_us:
            self._next_us = now_us + int(AWAY_EVERY_S * SECOND_US)
            self.back_us[self._rng.integers(DEVICES)] = now_us + int(
                self._rng.uniform(*AWAY_S) * SECOND_US
            )

    def come_back(self, now_us: int) -> None:
        self.back_us = np.minimum(self.back_us, now_us - self.travel_us)


class Devices:
    """Orders, searches and clicks, so many orders a second; of searches half as many."""

    every_s = 0.5

    def __init__(
        self, log: Log, rng: np.random.Generator, now_us: int, orders_a_second: float
    ) -> None:
        self._rng, self._pace, self._until_us = rng, orders_a_second, now_us
        self._fleet = Fleet(rng, now_us)
        self.orders, self.searches, self.clicks = (
            Outbox(log, topic, self._fleet) for topic in ("orders", "searches", "clicks")
        )
        self._order, self._search = 0, 0
        self._send_heartbeats(now_us - SECOND_US)
        self.step(now_us)

    def step(self, now_us: int) -> None:
        self._fleet.lose_connections(now_us)
        seconds = (now_us - self._until_us) / SECOND_US
        self._add_orders(self._rng.poisson(self._pace * seconds), now_us)
        self._add_searches(self._rng.poisson(self._pace / 2 * seconds), now_us)
        self._until_us = now_us
        for outbox in (self.orders, self.searches, self.clicks):
            outbox.send(now_us)

    def close(self, now_us: int) -> None:
        """All devices are back, and send what they have."""
        self.step(now_us)
        self._fleet.come_back(now_us)
        for outbox in (self.orders, self.searches, self.clicks):
            outbox.send(now_us + LATER_US)

    def say_goodbye(self, now_us: int) -> None:
        """From every device a row of a minute later: now everyone knows that nothing from before
        can come any more, and what waits for that is emitted.
        """
        self._send_heartbeats(now_us + LATER_US)
        for outbox in (self.orders, self.searches, self.clicks):
            outbox.send(now_us + 2 * LATER_US)
            outbox.sender.close()

    def _moments(
        self, count: int, now_us: int
    ) -> tuple[
        np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.int64]]
    ]:
        """Who, and when: so that it is received between the last step and now, where nothing is in
        the way.
        """
        who = self._rng.integers(DEVICES, size=count)
        return (
            who,
            self._rng.integers(self._until_us, max(now_us, self._until_us + 1), size=count)
            - self._fleet.travel_us[who],
        )

    def _add_orders(self, count: int, now_us: int) -> None:
        who, at_us = self._moments(count, now_us)
        product = np.minimum(self._rng.geometric(0.15, count) - 1, len(PRODUCTS) - 1)
        price = np.array([price for _, price in PRODUCTS])[product]
        rows = {
            "order_id": self._order + np.arange(count),
            "customer_id": self._rng.integers(CUSTOMERS, size=count),
            "product_id": product,
        }
        self.orders.add(
            Frame(
                {
                    "who": who,
                    "at_us": at_us,
                    **rows,
                    "amount": price * self._rng.integers(1, 4, size=count),
                }
            )
        )
        self._order += count

    def _add_searches(self, count: int, now_us: int) -> None:
        who, at_us = self._moments(count, now_us)
        product = np.minimum(self._rng.geometric(0.1, count) - 1, len(PRODUCTS) - 1)
        number = self._search + np.arange(count)
        self._search += count
        self._add(who, at_us, number, product)
        clicked = self._rng.random(count) < CLICKED
        after_us = self._rng.integers(SECOND_US // 3, int(LONGEST_CLICK_S * SECOND_US), size=count)
        self.clicks.add(
            Frame(
                {"who": who, "at_us": at_us + after_us, "search_id": number, "product_id": product}
            )[clicked]
        )

    def _send_heartbeats(self, at_us: int) -> None:
        """Every device searches and clicks once: its clock is known from the first moment on, and
        to the last.
        """
        who, number = np.arange(DEVICES), self._search + np.arange(DEVICES)
        self._search += DEVICES
        product = who % len(PRODUCTS)
        self._add(who, np.full(DEVICES, at_us), number, product)
        self.clicks.add(
            Frame(
                {
                    "who": who,
                    "at_us": np.full(DEVICES, at_us + 1),
                    "search_id": number,
                    "product_id": product,
                }
            )
        )

    def _add(
        self,
        who: object,
        at_us: object,
        number: object,
        product: np.ndarray[tuple[int], np.dtype[np.int64]],
    ) -> None:
        words = np.array([name for name, _ in PRODUCTS], dtype=object)[product]
        self.searches.add(Frame({"who": who, "at_us": at_us, "search_id": number, "words": words}))


# Payments by card, at two banks; and every few seconds somebody tries out a stolen card with small
# payments before a big one.


CARDS, BANKS = 400, np.array(["north", "south"], dtype=object)
PAYMENTS_A_SECOND, FRAUD_EVERY_S, SMALL = 60.0, 4.0, 0.02


class Bank:
    """Payments in order of time, none of which is late."""

    every_s = 0.5

    def __init__(self, log: Log, rng: np.random.Generator, now_us: int) -> None:
        self._rng, self._until_us, self._next_us = rng, now_us, now_us
        self.sender = Sender(log, "payments")
        self._waiting = self._of_each_bank(now_us)
        self._payment = 0

    def step(self, now_us: int) -> None:
        self._add(self._usual(now_us))
        if now_us >= self._next_us:
            self._next_us = now_us + int(FRAUD_EVERY_S * SECOND_US)
            self._add(self._stolen(now_us))
        self._until_us = now_us
        self._send(now_us)

    def close(self, now_us: int) -> None:
        self.step(now_us)
        self._send(now_us + LATER_US)

    def say_goodbye(self, now_us: int) -> None:
        """A payment of a minute later at each bank, as the devices do."""
        self._add(self._of_each_bank(now_us + LATER_US))
        self._send(now_us + 2 * LATER_US)
        self.sender.close()

    def _add(self, rows: pd.DataFrame) -> None:
        self._waiting = pd.concat([self._waiting, rows], ignore_index=True)

    def _usual(self, now_us: int) -> pd.DataFrame:
        count = self._rng.poisson(PAYMENTS_A_SECOND * (now_us - self._until_us) / SECOND_US)
        amounts = np.where(
            self._rng.random(count) < SMALL, 1.5, np.round(self._rng.uniform(5, 400, count), 2)
        )
        at_us = self._rng.integers(self._until_us, max(now_us, self._until_us + 1), size=count)
        return pd.DataFrame(
            {"card": self._rng.integers(CARDS, size=count), "amount": amounts, "at_us": at_us}
        )

    def _stolen(self, now_us: int) -> pd.DataFrame:
        tries = int(self._rng.integers(3, 6))
        amounts = [*self._rng.choice([0.5, 1.0, 1.5], tries), 900.0]
        return pd.DataFrame(
            {
                "card": self._rng.integers(CARDS),
                "amount": amounts,
                "at_us": now_us + np.arange(tries + 1) * SECOND_US // 5,
            }
        )

    @staticmethod
    def _of_each_bank(at_us: int) -> pd.DataFrame:
        return pd.DataFrame({"card": [0, 1], "amount": [20.0, 20.0], "at_us": [at_us, at_us]})

    def _send(self, now_us: int) -> None:
        is_there = self._waiting["at_us"] <= now_us
        rows = self._waiting[is_there].sort_values("at_us", kind="stable")
        self._waiting = self._waiting[~is_there].reset_index(drop=True)
        card = rows["card"].to_numpy()
        self.sender.append(
            pa.table(
                {
                    "payment_id": self._payment + np.arange(len(rows)),
                    "card": [f"card-{number:03}" for number in card.tolist()],
                    "amount": rows["amount"].to_numpy(),
                    "bank": pa.array(BANKS[card % 2], pa.string()),
                    "paid_at": times(rows["at_us"].to_numpy()),
                }
            )
        )
        self._payment += len(rows)


# Who else works in the simulated shop: the office changes its database, the treasury announces tax
# rates, the magazine publishes articles for readers who change their minds.


ANNOUNCED_S, RATE_EVERY_S = 20, 6.0
A_DAY_US = 86_400 * SECOND_US
ARTICLES_A_STEP, CHANGES_OF_MIND = 2, 0.15


def make_database(path: Path) -> None:
    """Customers and products, as a shop has them."""
    places = list(CITIES.items())
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(
            "CREATE TABLE customers (customer_id INTEGER PRIMARY KEY, customer TEXT, city TEXT,"
            " country TEXT)"
        )
        database.execute(
            "CREATE TABLE products (product_id INTEGER PRIMARY KEY, product TEXT, price REAL)"
        )
        people = [
            (number, f"customer-{number:03}", *places[number % len(places)])
            for number in range(CUSTOMERS)
        ]
        database.executemany("INSERT INTO customers VALUES (?, ?, ?, ?)", people)
        database.executemany(
            "INSERT INTO products VALUES (?, ?, ?)",
            [(number, *product) for number, product in enumerate(PRODUCTS)],
        )


class Office:
    """Customers move, prices change: a transaction each time."""

    every_s = 0.5

    def __init__(self, path: Path, rng: np.random.Generator) -> None:
        self._path, self._rng = path, rng
        self.changes = 0

    def step(self, now_us: int) -> None:  # noqa: ARG002
        place = list(CITIES.items())[self._rng.integers(len(CITIES))]
        product = int(self._rng.integers(len(PRODUCTS)))
        price = round(PRODUCTS[product][1] * float(self._rng.uniform(0.9, 1.1)), 2)
        with closing(sqlite3.connect(self._path, timeout=30)) as database, database:
            database.execute(
                "UPDATE customers SET city = ?, country = ? WHERE customer_id = ?",
                (*place, int(self._rng.integers(CUSTOMERS))),
            )
            database.execute("UPDATE products SET price = ? WHERE product_id = ?", (price, product))
        self.changes += 2

    def close(self, now_us: int) -> None:
        """It has nothing to say any more."""


class Treasury:
    """Announces each country's tax rate some time before it is valid."""

    every_s = RATE_EVERY_S

    def __init__(self, log: Log, rng: np.random.Generator, now_us: int) -> None:
        self._rng, self.sender = rng, Sender(log, "tax_rates")
        self._announce(RATES, now_us - A_DAY_US)

    def step(self, now_us: int) -> None:
        country = list(RATES)[self._rng.integers(len(RATES))]
        self._announce(
            {country: round(float(self._rng.uniform(0.1, 0.3)), 3)},
            now_us + ANNOUNCED_S * SECOND_US,
        )

    def close(self, now_us: int) -> None:  # noqa: ARG002
        self.sender.close()

    def _announce(self, rates: dict[str, float], valid_us: int) -> None:
        self.sender.upsert(
            pa.table(
                {
                    "country": list(rates),
                    "rate": list(rates.values()),
                    "valid_from": times([valid_us] * len(rates)),
                }
            )
        )


class Magazine:
    """Articles of chance words, and readers who now and then store another search."""

    every_s = 0.5

    def __init__(self, log: Log, rng: np.random.Generator) -> None:
        self._rng = rng
        self.articles, self.subscriptions = Sender(log, "articles"), Sender(log, "subscriptions")
        self.subscriptions.upsert(pa.table({"reader": READERS, "query": QUERIES}))
        self._article = 0

    def step(self, now_us: int) -> None:  # noqa: ARG002
        if self._rng.random() < CHANGES_OF_MIND:
            self.subscriptions.upsert(
                pa.table(
                    {
                        "reader": [str(self._rng.choice(READERS))],
                        "query": [str(self._rng.choice(QUERIES))],
                    }
                )
            )
        titles, bodies = (
            [" ".join(self._rng.choice(WORDS, size)) for _ in range(ARTICLES_A_STEP)]
            for size in (3, 12)
        )
        self.articles.append(
            pa.table(
                {
                    "article_id": self._article + np.arange(ARTICLES_A_STEP),
                    "title": titles,
                    "body": bodies,
                }
            )
        )
        self._article += ARTICLES_A_STEP

    def close(self, now_us: int) -> None:  # noqa: ARG002
        self.articles.close()
        self.subscriptions.close()


ORDERS_A_SECOND = 500.0
TOPICS = {
    "orders",
    "searches",
    "clicks",
    "payments",
    "tax_rates",
    "articles",
    "subscriptions",
    "customers",
    "products",
}
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
    """Opens when the topics are there; `step` lets everyone act once, `works` are the same as
    threads.
    """

    def __init__(
        self,
        log: Log,
        shop: ModuleType,
        home: Path,
        now_us: int,
        *,
        seed: int = 0,
        orders_a_second: float = ORDERS_A_SECOND,
    ) -> None:
        rng = [np.random.default_rng([seed, number]) for number in range(6)]
        self.treasury = Treasury(log, rng[0], now_us)
        self.devices = Devices(log, rng[1], now_us, orders_a_second)
        self.bank = Bank(log, rng[2], now_us)
        self.office = Office(home / DATABASE, rng[3])
        self.magazine = Magazine(log, rng[4])
        self.shoppers = Shoppers(log, shop, rng[5], home)
        self.warehouse = Warehouse(log, self.devices.orders.sender)
        self.actors: dict[str, Actor] = {
            "treasury": self.treasury,
            "devices": self.devices,
            "bank": self.bank,
            "office": self.office,
            "magazine": self.magazine,
            "shoppers": self.shoppers,
            "warehouse": self.warehouse,
        }

    def works(self) -> dict[str, Callable[[Event], None]]:
        """Everyone, each for a thread of its own."""
        return {f"demo {name}": partial(_live, actor) for name, actor in self.actors.items()}

    def step(self, now_us: int) -> None:
        for actor in self.actors.values():
            actor.step(now_us)

    def close(self, now_us: int) -> None:
        """When nobody acts any more: everyone sends what is left, and then those go whose rows
        others wait for.
        """
        for actor in self.actors.values():
            actor.close(now_us)
        self.devices.say_goodbye(now_us)
        self.bank.say_goodbye(now_us)

    @property
    def sent(self) -> Sent:
        senders: list[Sender] = [
            outbox.sender
            for outbox in (self.devices.orders, self.devices.searches, self.devices.clicks)
        ]
        return Sent(
            senders[0].rows,
            sum(each.repeats for each in senders),
            self.office.changes,
            self.shoppers.accepted,
            self.shoppers.refused,
        )


def _live(actor: Actor, done: Event) -> None:
    while not done.wait(actor.every_s):
        actor.step(clock_us())


def clock_us() -> int:
    return time.time_ns() // 1000


def await_topics(log: Log, stop: Event) -> bool:
    """The pipeline makes its topics, and the capture those of the database, with what is in it.
    Whether they are there now.
    """
    while not stop.is_set():
        if set(log.topics()) >= TOPICS and all(
            sum(log.end_offsets(topic).values()) for topic in ("customers", "products")
        ):
            return True
        stop.wait(WAIT_S)
    return False
