"""`hr.late`: what becomes of rows that arrive behind the watermark: dropped, correcting the window they belong to, or diverted."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

from headrace.durations import format_us, to_us
from headrace.errors import PlanError

Duration = str | timedelta
DAY_US = 86_400_000_000
LONGEST_US = 3_660 * DAY_US


@dataclass(frozen=True)
class Drop:
    """Late rows are left out, and counted."""

    kind: ClassVar[str] = "drop"

    @property
    def lateness_us(self) -> int:
        return 0

    def __str__(self) -> str:
        return "drop()"


@dataclass(frozen=True)
class Correct:
    """Rows late by up to `lateness` correct what was published; later ones are left out, and
    counted.
    """

    kind: ClassVar[str] = "correct"
    lateness_us: int

    def __str__(self) -> str:
        return f"correct({format_us(self.lateness_us)})"


@dataclass(frozen=True)
class Divert:
    """Late rows go to a topic, and are counted."""

    kind: ClassVar[str] = "divert"
    topic: str

    @property
    def lateness_us(self) -> int:
        return 0

    def __str__(self) -> str:
        return f"divert({self.topic})"


LatePolicy = Drop | Correct | Divert


def drop() -> Drop:
    """Leave late rows out, and count them."""
    return Drop()


def correct(lateness: Duration) -> Correct:
    """Let rows that are late by up to `lateness` correct what was published."""
    lateness_us = to_us(lateness, what="allowed lateness")
    if lateness_us > LONGEST_US:
        raise PlanError(
            f"An allowed lateness of {format_us(lateness_us)} would keep every window for ever.",
            fix="allow at most 10 years.",
        )
    return Correct(lateness_us)


def divert(topic: str) -> Divert:
    """Send late rows to a topic, and count them."""
    if not topic:
        raise PlanError(
            f"Late rows cannot be diverted to {topic!r}.",
            fix='name a topic, as in hr.divert("late_orders").',
        )
    return Divert(topic)
