"""What may be left out of an input when too much of it waits, as plain values: `pipeline/shedding` makes them, `engine/shedding` goes by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shed:
    """What is left out of an input once more than `behind` rows of it wait: all but a share `keep`, never those whose `priority` is at least `least`."""

    behind: int
    keep: float = 0.0
    priority: str | None = None
    least: Any = None

    def __str__(self) -> str:
        above = "" if self.priority is None else f", and all with {self.priority} >= {self.least!r}"
        return f"shed(behind={self.behind:,}, keep={self.keep:g}{above})"
