"""How the watermark of an input advances, as a plan holds it.

Each read task reports the newest event time of every producer in every tick. From these reports and
the stored state of the tick before, the shards (to emit windows) and the driver (to store and show
watermarks) compute the same watermarks. A producer that is silent for longer than `idle_us` of tick
time no longer holds the watermark back; when all are silent, the watermark moves on with tick time
from the newest event time. An input without a first row has no watermark yet.
`engine/watermarks.py` carries this out; kernels see the result as `operators.kernel.Watermarks`.
"""

from __future__ import annotations

from dataclasses import dataclass

NO_PRODUCER = "\x00null"
"""The producer of rows whose producer column is null; no real producer has this name."""


@dataclass(frozen=True)
class WatermarkSpec:
    """How the watermark of one input advances. Without a time column it follows the ticks."""

    name: str
    column: str | None = None
    producer: str | None = None
    delay_us: int = 0
    idle_us: int = 60_000_000
    max_ahead_us: int = 0
    """How far ahead of its append time a row may move the watermark."""
    is_one_producer: bool = False
    """Whether all partitions together are one producer."""

    @property
    def follows_ticks(self) -> bool:
        """Whether the input has no event time, so that its watermark is the time of its ticks."""
        return self.column is None

    def label(self, producer: str) -> str:
        """A producer's name for people; without a producer column, partitions are the producers."""
        return (
            self.name
            if self.is_one_producer
            else f"partition {producer}"
            if self.producer is None
            else "(null)"
            if producer == NO_PRODUCER
            else producer
        )


@dataclass(frozen=True)
class WatermarkPath:
    """The way from an input's watermark to that of a step downstream.

    `watermark_lag_us` is how far the steps between delay the watermark; `horizon_lag_us` is how
    much lateness they allow.
    """

    name: str
    watermark_lag_us: int = 0
    horizon_lag_us: int = 0
