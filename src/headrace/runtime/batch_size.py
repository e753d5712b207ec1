"""How much a batch takes in, and how wide it runs. Results depend on neither: they are defined tick
by tick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.engine.ticks import Tick
from headrace.errors import ConfigurationError

# Rows


DEFAULT_TARGET_S = 30.0
MAX_ROWS, MIN_ROWS = 4_000_000, 1_000
_TOO_LONG, _QUICK = 1.25, 0.5


class BatchSize:
    """The number of rows for the next batch, so that a batch takes about `target_s`.

    A batch that took too long makes the next one smaller, a quick one makes it larger. A batch has
    at least one tick.

    It starts at the maximum: the fixed cost of a batch would make a first small one look slow.
    """

    def __init__(self, target_s: float = DEFAULT_TARGET_S) -> None:
        self.target_s = target_s
        self.rows = MAX_ROWS

    def adapt(self, rows: int, seconds: float) -> None:
        """Adapt to a batch of so many rows that took so long."""
        if seconds > _TOO_LONG * self.target_s:
            self.rows = max(MIN_ROWS, min(self.rows, int(rows * self.target_s / seconds)))
        elif seconds < _QUICK * self.target_s:
            self.rows = min(MAX_ROWS, 2 * self.rows)


def limit_rows(before: Tick, ticks: Sequence[Tick], max_rows: int) -> Sequence[Tick]:
    """The first ticks that together have at most `max_rows` rows; at least one tick."""
    for count, tick in enumerate(ticks):
        rows = sum(
            end - before.end(topic, p)
            for topic, parts in tick.ends.items()
            for p, end in parts.items()
        )
        if rows > max_rows and count:
            return ticks[:count]
    return ticks


# Width


Width = Literal["one", "wide"]
_OTHER: dict[Width, Width] = {"one": "wide", "wide": "one"}
MAX_ROWS_IN_ONE_TASK = 500_000
MAX_BYTES_IN_ONE_TASK = 128 << 20
_USUAL_ROW_BYTES = 200.0
_SWITCH_RATIO = 0.8
_FEW_ROWS = 5_000
_MEMORY = 0.7
_WARM_UP_BATCHES = 3


@dataclass
class CostModel:
    """What a batch costs: so much for any batch, and so much for each of its rows."""

    fixed_s: float
    row_s: float
    batches: int = 0

    @property
    def is_learned(self) -> bool:
        return self.batches > _WARM_UP_BATCHES

    def seconds(self, rows: int) -> float:
        return self.fixed_s + rows * self.row_s

    def learn(self, rows: int, seconds: float) -> None:
        """Learn from a batch: from a small one the fixed cost, from a large one that of a row. The
        first ones load modules and warm Spark up, which says nothing about the next.
        """
        self.batches += 1
        if not self.is_learned:
            return
        weight = 1 - _MEMORY if self.batches > _WARM_UP_BATCHES + 1 else 1.0
        if rows <= _FEW_ROWS:
            fixed_s = max(0.0, seconds - rows * self.row_s)
            self.fixed_s += weight * (fixed_s - self.fixed_s)
        else:
            row_s = max(0.0, seconds - self.fixed_s) / rows
            self.row_s += weight * (row_s - self.row_s)


def _first_guess(width: Width, shuffles: int) -> CostModel:
    """The cost of a batch before anything is known about this pipeline and this machine."""
    if width == "one":
        return CostModel(fixed_s=0.1 + 0.015 * shuffles, row_s=2e-6)
    return CostModel(fixed_s=0.2 + 0.1 * shuffles, row_s=1e-6)


class BatchWidth:
    """How wide the next batch runs: "one" task, or "wide" over many.

    It is chosen by what each way would cost, as learned from the batches before. A change must pay:
    the other way must be clearly cheaper, so that batches of about equal size do not alternate.
    `pinned` is what the user has chosen; "auto" leaves it open.
    """

    def __init__(self, pinned: str = "auto") -> None:
        self.pinned: Width | None = None
        self.last: Width = "wide"
        self.reason = ""
        """Why the last batch was as wide as it was."""
        self.row_bytes: float | None = None
        """About how many bytes a row of the last batch had; None before the first."""
        self.shuffles = 1
        self._avoids_one = False
        self._costs = {width: _first_guess(width, 1) for width in _OTHER}
        self.pin(pinned)

    def expect(self, shuffles: int) -> None:
        """Expect jobs with so many shuffles."""
        self.shuffles = shuffles
        self._costs = {width: _first_guess(width, shuffles) for width in _OTHER}

    def _cost_s(self, width: Width, rows: int) -> float:
        """What a batch would cost. As long as a width was not tried, it is taken to be as much
        slower than guessed as the other one was, for any batch and for each row.
        """
        cost, other = self._costs[width], self._costs[_OTHER[width]]
        if cost.is_learned or not other.is_learned:
            return cost.seconds(rows)
        guess = _first_guess(_OTHER[width], self.shuffles)
        fixed_s = cost.fixed_s * other.fixed_s / guess.fixed_s
        return fixed_s + rows * cost.row_s * other.row_s / guess.row_s

    def pin(self, width: str) -> None:
        """Choose the width of all further batches; "auto" leaves it open again."""
        pinned: dict[str, Width | None] = {"auto": None, "one": "one", "wide": "wide"}
        if width not in pinned:
            raise ConfigurationError(
                f"The width of a batch is {width!r}.", fix=f"use one of {', '.join(pinned)}."
            )
        self.pinned = pinned[width]

    def avoid(self, width: Width) -> None:
        """A batch failed: if it ran in one task, the next attempt runs wide, which needs less
        memory.
        """
        self._avoids_one = width == "one"

    def choose(self, rows: int, *, sql_steps: Sequence[str] = ()) -> Width:
        """The width for a batch of so many rows. Spark SQL cannot run within one task."""
        if sql_steps:
            self.reason = f"Spark SQL computes {', '.join(sql_steps)}"
            return "wide"
        if self._avoids_one and self.pinned != "one":
            self._avoids_one = False
            self.reason = "the last attempt, in one task, failed"
            return "wide"
        if self.pinned is not None:
            self.reason = "the run was started so"
            return self.pinned
        size = rows * (self.row_bytes or _USUAL_ROW_BYTES)
        if rows > MAX_ROWS_IN_ONE_TASK or size > MAX_BYTES_IN_ONE_TASK:
            self.reason = f"{rows:,} rows are too many for one task"
            return "wide"
        other = _OTHER[self.last]
        cost_s = {width: self._cost_s(width, rows) for width in _OTHER}
        chosen = other if cost_s[other] < _SWITCH_RATIO * cost_s[self.last] else self.last
        self.reason = (
            f"{rows:,} rows take about {cost_s['one']:.2f} s in one task,"
            f" {cost_s['wide']:.2f} s over many"
        )
        return chosen

    def learn(self, width: Width, rows: int, seconds: float) -> None:
        """Learn from a batch that took so long."""
        is_first = self.last != width  # which brings local stores up to date
        self.last = width
        if not is_first:
            self._costs[width].learn(rows, seconds)
