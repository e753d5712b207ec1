"""Sums and averages of DOUBLE and FLOAT columns: the exact sum, rounded once. Neither batches nor shards nor the order of rows can be seen in it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headrace.operators.accumulators.accumulator import Columns, Monoid, Tails
from headrace.operators.accumulators.arrays import double_array, doubles
from headrace.operators.accumulators.counts import COUNT, count_valid
from headrace.operators.accumulators.exact_columns import ExactColumns
from headrace.operators.buffers import Ints, Mask
from headrace.operators.segments import Segments

PARTS = 3  # amounts of money, in their millions, need two


class DoubleSum(Monoid):
    """The sum; null without values. Infinities and NaN count as IEEE 754 has it, and go again when their rows go."""

    fields = (COUNT, *ExactColumns(PARTS).fields("s"))

    def __init__(self, column: str) -> None:
        self.column = column
        self._sums = ExactColumns(PARTS)

    def tail_sizes(self, columns: Columns) -> Ints | None:
        return self._sums.tail_sizes(columns[1:])

    def opened(self, columns: Columns, tails: Tails | None) -> Columns:
        return columns[0], *self._sums.opened(columns[1:], tails)

    def closed(self, columns: Columns) -> tuple[Columns, Tails | None]:
        sums, tails = self._sums.closed(columns[1:])
        return (columns[0], *sums), tails

    def lift(self, segments: Segments) -> Columns:
        array = segments.column(self.column)
        values = self._sums.of_values(doubles(array), segments.signs)
        return count_valid(array, segments), *self._sums.reduced(values, segments.segment_of)

    def merge(self, left: Columns, right: Columns) -> Columns:
        return left[0] + right[0], *self._sums.add(left[1:], right[1:])

    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        return double_array(self._sums.rounded(columns[1:]), columns[0] != 0), None


class DoubleAverage(DoubleSum):
    """The sum, rounded, by the number of values."""

    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        some = columns[0] != 0
        return double_array(self._sums.rounded(columns[1:]) / np.where(some, columns[0], 1), some), None
