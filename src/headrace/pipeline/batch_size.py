"""How many rows the next batch takes in, so that a batch takes about as long as it should: a batch that took too long makes the next one smaller, one that was quick makes it larger.

What is computed does not depend on it: an answer is defined tick by tick, whatever the batches. A batch has at least one tick, which has at most a million rows.
"""

from __future__ import annotations

MOST_ROWS, LEAST_ROWS = 4_000_000, 1_000
DEFAULT_TARGET_S = 30.0
_TOO_LONG, _QUICK = 1.25, 0.5


class BatchSize:
    """It begins at the most there may be: what every batch costs, however small, would make a first small one look slow."""

    def __init__(self, target_s: float = DEFAULT_TARGET_S) -> None:
        self.target_s, self.rows = target_s, MOST_ROWS

    def took(self, rows: int, seconds: float) -> None:
        if seconds > _TOO_LONG * self.target_s:
            self.rows = max(LEAST_ROWS, min(self.rows, int(rows * self.target_s / seconds)))
        elif seconds < _QUICK * self.target_s:
            self.rows = min(MOST_ROWS, 2 * self.rows)
