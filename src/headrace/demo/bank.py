"""Payments by card, at two banks; and every few seconds somebody tries out a stolen card with small payments before a big one."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa

from headrace.demo.devices import LATER_US, SECOND_US
from headrace.demo.sending import Sender, times
from headrace.log.api import Log

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
        amounts = np.where(self._rng.random(count) < SMALL, 1.5, np.round(self._rng.uniform(5, 400, count), 2))
        at_us = self._rng.integers(self._until_us, max(now_us, self._until_us + 1), size=count)
        return pd.DataFrame({"card": self._rng.integers(CARDS, size=count), "amount": amounts, "at_us": at_us})

    def _stolen(self, now_us: int) -> pd.DataFrame:
        tries = int(self._rng.integers(3, 6))
        amounts = [*self._rng.choice([0.5, 1.0, 1.5], tries), 900.0]
        return pd.DataFrame({"card": self._rng.integers(CARDS), "amount": amounts, "at_us": now_us + np.arange(tries + 1) * SECOND_US // 5})

    @staticmethod
    def _of_each_bank(at_us: int) -> pd.DataFrame:
        return pd.DataFrame({"card": [0, 1], "amount": [20.0, 20.0], "at_us": [at_us, at_us]})

    def _send(self, now_us: int) -> None:
        is_there = self._waiting["at_us"] <= now_us
        rows = self._waiting[is_there].sort_values("at_us", kind="stable")
        self._waiting = self._waiting[~is_there].reset_index(drop=True)
        card = rows["card"].to_numpy()
        self.sender.append(pa.table({
            "payment_id": self._payment + np.arange(len(rows)), "card": [f"card-{number:03}" for number in card.tolist()], "amount": rows["amount"].to_numpy(),
            "bank": pa.array(BANKS[card % 2], pa.string()), "paid_at": times(rows["at_us"].to_numpy()),
        }))  # fmt: skip
        self._payment += len(rows)
