"""Simulated devices: people order, search and click on them. Every device's clock is wrong, by seconds or by years, and now and then one has no connection and sends what it
has some seconds later.

When something truly happened, less than a second before it is sent, nobody in the pipeline is told: it has to find out from three wrong times.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa

from headrace.demo.catalogue import CUSTOMERS, PRODUCTS
from headrace.demo.sending import Sender, times
from headrace.log.api import Log

DEVICES = 40
SECOND_US = 1_000_000
CLOCKS_OFF_US = np.array([0, 3, -7, 90, -3_600, 86_400, -10 * 365 * 86_400]) * SECOND_US
AWAY_EVERY_S, AWAY_S = 3.0, (8.0, 14.0)
CLICKED, LONGEST_CLICK_S = 0.4, 4.0
LATER_US = 60 * SECOND_US

Frame = pd.DataFrame


class Outbox:
    """One topic's rows that have happened, or are about to, and have not been sent yet: `who` (the device's number), `at_us` (when, truly), and the row's own columns."""

    def __init__(self, log: Log, topic: str, fleet: Fleet) -> None:
        self.sender, self._fleet = Sender(log, topic), fleet
        self._waiting: Frame | None = None

    def add(self, rows: Frame) -> None:
        self._waiting = rows if self._waiting is None else pd.concat([self._waiting, rows], ignore_index=True)

    def send(self, now_us: int) -> None:
        """What has been received by now."""
        if self._waiting is None or not len(self._waiting):
            return
        rows = self._waiting
        sent_us = np.maximum(rows["at_us"].to_numpy(), self._fleet.back_us[rows["who"]])
        received_us = sent_us + self._fleet.travel_us[rows["who"]]
        is_there = received_us <= now_us
        self._waiting = rows[~is_there].reset_index(drop=True)
        told = rows[is_there].assign(sent_us=sent_us[is_there], received_us=received_us[is_there])
        self.sender.append(self._as_told(told.sort_values(["received_us", "at_us"], kind="stable")))

    def _as_told(self, rows: Frame) -> pa.Table:
        """By the device's own clock, but for when it was received."""
        who = rows["who"].to_numpy()
        off_us = self._fleet.clock_off_us[who]
        own = {name: pa.array(rows[name].to_numpy()) for name in rows.columns if name not in {"who", "at_us", "sent_us", "received_us"}}
        return pa.table({
            **own, "device": pa.array(self._fleet.names[who]), "happened": times(rows["at_us"].to_numpy() + off_us),
            "sent": times(rows["sent_us"].to_numpy() + off_us), "received": times(rows["received_us"].to_numpy()),
        })  # fmt: skip


class Fleet:
    """The devices: how far each one's clock is off, how long its rows travel, and when it is back if it has no connection."""

    def __init__(self, rng: np.random.Generator, now_us: int) -> None:
        self._rng, self._next_us = rng, now_us + SECOND_US
        self.names = np.array([f"device-{number:02}" for number in range(DEVICES)], dtype=object)
        self.clock_off_us = rng.choice(CLOCKS_OFF_US, DEVICES)
        self.travel_us = rng.integers(20_000, 120_000, DEVICES)
        self.back_us = np.zeros(DEVICES, np.int64)

    def lose_connections(self, now_us: int) -> None:
        if now_us >= self._next_us:
            self._next_us = now_us + int(AWAY_EVERY_S * SECOND_US)
            self.back_us[self._rng.integers(DEVICES)] = now_us + int(self._rng.uniform(*AWAY_S) * SECOND_US)

    def come_back(self, now_us: int) -> None:
        self.back_us = np.minimum(self.back_us, now_us - self.travel_us)


class Devices:
    """Orders, searches and clicks, so many orders a second; of searches half as many."""

    every_s = 0.5

    def __init__(self, log: Log, rng: np.random.Generator, now_us: int, orders_a_second: float) -> None:
        self._rng, self._pace, self._until_us = rng, orders_a_second, now_us
        self._fleet = Fleet(rng, now_us)
        self.orders, self.searches, self.clicks = (Outbox(log, topic, self._fleet) for topic in ("orders", "searches", "clicks"))
        self._order, self._search = 0, 0
        self._greet(now_us - SECOND_US)
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
        """From every device a row of a minute later: now everyone knows that nothing from before can come any more, and what waits for that is told."""
        self._greet(now_us + LATER_US)
        for outbox in (self.orders, self.searches, self.clicks):
            outbox.send(now_us + 2 * LATER_US)
            outbox.sender.close()

    def _moments(self, count: int, now_us: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """Who, and when: so that it is received between the last step and now, where nothing is in the way."""
        who = self._rng.integers(DEVICES, size=count)
        return who, self._rng.integers(self._until_us, max(now_us, self._until_us + 1), size=count) - self._fleet.travel_us[who]

    def _add_orders(self, count: int, now_us: int) -> None:
        who, at_us = self._moments(count, now_us)
        product = np.minimum(self._rng.geometric(0.15, count) - 1, len(PRODUCTS) - 1)
        price = np.array([price for _, price in PRODUCTS])[product]
        rows = {"order_id": self._order + np.arange(count), "customer_id": self._rng.integers(CUSTOMERS, size=count), "product_id": product}
        self.orders.add(Frame({"who": who, "at_us": at_us, **rows, "amount": price * self._rng.integers(1, 4, size=count)}))
        self._order += count

    def _add_searches(self, count: int, now_us: int) -> None:
        who, at_us = self._moments(count, now_us)
        product = np.minimum(self._rng.geometric(0.1, count) - 1, len(PRODUCTS) - 1)
        number = self._search + np.arange(count)
        self._search += count
        self._add(who, at_us, number, product)
        clicked = self._rng.random(count) < CLICKED
        after_us = self._rng.integers(SECOND_US // 3, int(LONGEST_CLICK_S * SECOND_US), size=count)
        self.clicks.add(Frame({"who": who, "at_us": at_us + after_us, "search_id": number, "product_id": product})[clicked])

    def _greet(self, at_us: int) -> None:
        """Every device searches and clicks once: its clock is known from the first moment on, and to the last."""
        who, number = np.arange(DEVICES), self._search + np.arange(DEVICES)
        self._search += DEVICES
        product = who % len(PRODUCTS)
        self._add(who, np.full(DEVICES, at_us), number, product)
        self.clicks.add(Frame({"who": who, "at_us": np.full(DEVICES, at_us + 1), "search_id": number, "product_id": product}))

    def _add(self, who: object, at_us: object, number: object, product: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        words = np.array([name for name, _ in PRODUCTS], dtype=object)[product]
        self.searches.add(Frame({"who": who, "at_us": at_us, "search_id": number, "words": words}))
