"""People with carts: they put things in, take some out again, and buy, or try to. Each is a command, decided against what happened to the cart before."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from headrace.demo.catalogue import PRODUCTS
from headrace.events import CommandRefused, Handler, open_store
from headrace.events.rows import COLUMNS
from headrace.log import open_log
from headrace.log.api import Log

OPEN_CARTS, COMMANDS_A_STEP = 25, 6
STORE = "carts"


class Shoppers:
    """Events are kept in an embedded log. If the shop's own is one, in that; if it is a broker, beside it, and each event is passed on, once."""

    every_s = 0.5

    def __init__(self, log: Log, shop: ModuleType, rng: np.random.Generator, home: Path) -> None:
        self._rng, self._shop = rng, shop
        self._own = None if log.address.startswith("file:") else open_log(f"file:{home / 'carts-log'}")
        self._store = open_store(self._own or log, STORE)
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
        """An event's offset is its number: whatever happens in between, each is there once, and in order."""
        if self._passing_on is None or self._own is None:
            return
        rows = self._own.read(STORE, 0, self._passing_on.last_sequence + 1).to_table()
        for at, offset in enumerate(rows["_offset"].to_pylist()):
            self._passing_on.append(rows.slice(at, 1).select(COLUMNS), sequence=offset)
