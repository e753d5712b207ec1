"""Exact sums of doubles as part of many keys' states: a few parts for each key, and a tail for the few keys that need more.

While they are worked on, a sum without room in its parts is a NaN followed by its place in a list; stored, by the length of its tail.
"""

from __future__ import annotations

import numpy as np

from headrace.operators.accumulators.accumulator import Columns, Tails, reduce_segments
from headrace.operators.accumulators.exact import ExactSum, exact, of_parts
from headrace.operators.accumulators.expansions import Doubles, Expansion, distilled
from headrace.operators.buffers import Ints, Mask


class ExactColumns:
    """Sums with room for some parts. Holds the sums that need more, for the time of one step."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self._spilled: list[ExactSum] = []

    def fields(self, name: str) -> tuple[tuple[str, str], ...]:
        return tuple((f"{name}{at}", "<f8") for at in range(self.parts))

    # Stored and worked on

    @staticmethod
    def tail_sizes(sums: Columns) -> Ints | None:
        spilled = np.isnan(sums[0])
        return np.where(spilled, sums[1], 0).astype(np.int64) if spilled.any() else None

    def opened(self, sums: Columns, tails: Tails | None) -> Expansion:
        if tails is not None:
            sums = tuple(part.copy() for part in sums)
            for at in np.flatnonzero(np.isnan(sums[0])).tolist():
                self._spill(sums, at, ExactSum.from_bytes(tails[at]))
        return sums

    def closed(self, sums: Expansion) -> tuple[Columns, Tails | None]:
        spilled = np.flatnonzero(np.isnan(sums[0])).tolist()
        tails: list[bytes] | None = None
        if spilled:
            sums, tails = tuple(part.copy() for part in sums), [b""] * len(sums[0])
            for at in spilled:
                tails[at] = self._spilled[int(sums[1][at])].to_bytes()
                sums[1][at] = len(tails[at])
        self._spilled = []
        return sums, tails

    # Work

    def of_values(self, values: Doubles, weights: Ints | None) -> Expansion:
        """Each value alone; with weight -1 it goes."""
        signed = values + 0.0 if weights is None else values * weights + 0.0
        sums = (signed, *(np.zeros(len(values)) for _ in range(self.parts - 1)))
        if not (finite := np.isfinite(values)).all():
            self._spill_values(sums, values, weights, ~finite)
        return sums

    def of_products(self, products: Doubles, rests: Doubles) -> Expansion:
        """Each product alone, with what rounding took off it."""
        return (products, rests, *(np.zeros(len(products)) for _ in range(self.parts - 2)))

    def put_exact(self, sums: Expansion, at: int, total: ExactSum) -> None:
        """Store one sum in its canonical form."""
        parts = total.parts(self.parts)
        if parts is None:
            self._spill(sums, at, total)
            return
        for part, value in zip(sums, parts, strict=True):
            part[at] = value

    def exact(self, sums: Expansion, at: int) -> ExactSum:
        return self._spilled[int(sums[1][at])] if np.isnan(sums[0][at]) else of_parts([float(part[at]) for part in sums])

    def add(self, left: Expansion, right: Expansion) -> Expansion:
        total, failed = distilled([part for pair in zip(left, right, strict=True) for part in pair], self.parts)
        for at in np.flatnonzero(failed).tolist():
            self.put_exact(total, at, self.exact(left, at) + self.exact(right, at))
        return total

    def reduced(self, sums: Expansion, segment_of: Ints) -> Expansion:
        """One sum a segment."""
        return reduce_segments(self.add, sums, segment_of)

    def rounded(self, sums: Expansion) -> Doubles:
        """The nearest double of each."""
        spilled = np.flatnonzero(np.isnan(sums[0]))
        if not len(spilled):
            return sums[0]
        values = sums[0].copy()
        values[spilled] = [self._spilled[place].rounded() for place in sums[1][spilled].astype(np.int64).tolist()]
        return values

    def _spill(self, sums: Expansion, at: int, total: ExactSum) -> None:
        sums[0][at], sums[1][at] = np.nan, len(self._spilled)
        for part in sums[2:]:
            part[at] = 0.0
        self._spilled.append(total)

    def _spill_values(self, sums: Expansion, values: Doubles, weights: Ints | None, which: Mask) -> None:
        """There are but six of them: coming or going, an infinity, its opposite, a NaN."""
        for value, mask in ((np.inf, values == np.inf), (-np.inf, values == -np.inf), (np.nan, np.isnan(values))):
            for weight in (1, -1):
                chosen = which & mask & (weight == (1 if weights is None else weights))
                if chosen.any():
                    sums[0][chosen], sums[1][chosen] = np.nan, len(self._spilled)
                    self._spilled.append(exact(value, weight))
