"""`hr.late`: what becomes of late rows.

A step's horizon is the watermark less the lateness that the step allows, and a row behind it is
late. `drop` and `divert` allow no lateness: they leave late rows out, or send them to a topic.
`correct` lowers the horizon, so that rows between it and the watermark correct results that were
emitted already. All of them count late rows, in `late_rows`.
"""

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
    """Late rows are dropped, and counted."""

    kind: ClassVar[str] = "drop"

    @property
    def lateness_us(self) -> int:
        """The allowed lateness: none."""
        return 0

    def __str__(self) -> str:
        return "drop()"


@dataclass(frozen=True)
class Correct:
    """Rows behind the watermark by up to `lateness` correct emitted results. Those behind the
    horizon are dropped, and counted.
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
        """The allowed lateness: none."""
        return 0

    def __str__(self) -> str:
        return f"divert({self.topic})"


LatePolicy = Drop | Correct | Divert


def drop() -> Drop:
    """Drop late rows, and count them. This is the default.

    Returns:
        A policy for `late=`.

    Example:
        ```python
        orders.window(hr.tumbling("1 minute"), late=hr.late.drop())
        ```

    """
    return Drop()


def correct(lateness: Duration) -> Correct:
    """Let late rows correct what has been emitted.

    A row that is late by up to `lateness` takes part in its windows, and the corrected results are
    emitted as updates. Windows are kept that much longer. Rows that are later still are dropped,
    and counted.

    Args:
        lateness: How late a row may be, as `"1 hour"` or a timedelta; at most 10 years.

    Returns:
        A policy for `late=`.

    Raises:
        PlanError: The lateness is not a duration, or is longer than 10 years.

    Example:
        ```python
        orders.window(hr.tumbling("1 minute"), late=hr.late.correct("1 hour"))
        ```

    """
    lateness_us = to_us(lateness, what="allowed lateness")
    if lateness_us > LONGEST_US:
        raise PlanError(
            f"The allowed lateness, {format_us(lateness_us)}, is longer than 10 years.",
            fix="allow at most 10 years.",
        )
    return Correct(lateness_us)


def divert(topic: str) -> Divert:
    """Send late rows to a topic, and count them.

    The rows arrive there as they were, with a `_reason` that says how late they are.

    Args:
        topic: The name of the topic.

    Returns:
        A policy for `late=`.

    Raises:
        PlanError: The name is empty.

    Example:
        ```python
        orders.window(hr.tumbling("1 minute"), late=hr.late.divert("late_orders"))
        ```

    """
    if not topic:
        raise PlanError(
            f"Late rows cannot be diverted to the topic {topic!r}.",
            fix='name a topic, as in hr.late.divert("late_orders").',
        )
    return Divert(topic)
