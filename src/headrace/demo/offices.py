"""Who else works in the simulated shop: the office changes its database, the treasury announces tax rates, the magazine publishes articles for readers who change their minds."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa

from headrace.demo.catalogue import CITIES, CUSTOMERS, PRODUCTS, QUERIES, RATES, READERS, WORDS
from headrace.demo.devices import SECOND_US
from headrace.demo.sending import Sender, times
from headrace.log.api import Log

ANNOUNCED_S, RATE_EVERY_S = 20, 6.0
A_DAY_US = 86_400 * SECOND_US
ARTICLES_A_STEP, CHANGES_OF_MIND = 2, 0.15


def make_database(path: Path) -> None:
    """Customers and products, as a shop has them."""
    places = list(CITIES.items())
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE customers (customer_id INTEGER PRIMARY KEY, customer TEXT, city TEXT, country TEXT)")
        database.execute("CREATE TABLE products (product_id INTEGER PRIMARY KEY, product TEXT, price REAL)")
        people = [(number, f"customer-{number:03}", *places[number % len(places)]) for number in range(CUSTOMERS)]
        database.executemany("INSERT INTO customers VALUES (?, ?, ?, ?)", people)
        database.executemany("INSERT INTO products VALUES (?, ?, ?)", [(number, *product) for number, product in enumerate(PRODUCTS)])


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
            database.execute("UPDATE customers SET city = ?, country = ? WHERE customer_id = ?", (*place, int(self._rng.integers(CUSTOMERS))))
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
        self._announce({country: round(float(self._rng.uniform(0.1, 0.3)), 3)}, now_us + ANNOUNCED_S * SECOND_US)

    def close(self, now_us: int) -> None:  # noqa: ARG002
        self.sender.close()

    def _announce(self, rates: dict[str, float], valid_us: int) -> None:
        self.sender.upsert(pa.table({"country": list(rates), "rate": list(rates.values()), "valid_from": times([valid_us] * len(rates))}))


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
            self.subscriptions.upsert(pa.table({"reader": [str(self._rng.choice(READERS))], "query": [str(self._rng.choice(QUERIES))]}))
        titles, bodies = ([" ".join(self._rng.choice(WORDS, size)) for _ in range(ARTICLES_A_STEP)] for size in (3, 12))
        self.articles.append(pa.table({"article_id": self._article + np.arange(ARTICLES_A_STEP), "title": titles, "body": bodies}))
        self._article += ARTICLES_A_STEP

    def close(self, now_us: int) -> None:  # noqa: ARG002
        self.articles.close()
        self.subscriptions.close()
