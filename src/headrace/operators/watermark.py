"""Clocks: how far event time has come in each input, tick by tick.

Read tasks tell the newest event time of each producer in each tick (`event_times`). From that and
from the clocks' state as of the tick before, everyone who needs the clocks computes the same ones:
the shards, to know which windows are complete; the driver, to write the clocks' new state and to
show them. A producer that is silent for longer than `idle` of tick time is forgotten; when all are,
time follows the ticks. An input without a first row has no time yet.
"""

from __future__ import annotations

from dataclasses import dataclass

NO_PRODUCER = "\x00null"
"""Who sent the rows whose producer is null: a name that nobody has."""


@dataclass(frozen=True)
class WatermarkSpec:
    """How the clock of one input goes. Without a column it follows the ticks."""

    name: str
    column: str | None = None
    producer: str | None = None
    delay_us: int = 0
    idle_us: int = 60_000_000
    max_ahead_us: int = 86_400_000_000

    @property
    def follows_ticks(self) -> bool:
        return self.column is None

    def label(self, producer: str) -> str:
        """What people call a producer: without a column that names them, partitions are."""
        return (
            f"partition {producer}"
            if self.producer is None
            else "(null)"
            if producer == NO_PRODUCER
            else producer
        )


@dataclass(frozen=True)
class WatermarkPath:
    """From an input's clock to a step's: how far the steps between hold time back, and how much
    lateness they allow.
    """

    name: str
    complete_back_us: int = 0
    closed_back_us: int = 0
