"""A sum in which values count less the older they are: half for every half-life. As of the newest row's event time.

Rounding depends on the order in which values are put together, and that order is fixed: within a tick neighbours pair by pair, then tick by tick. So it does not depend on how
ticks were put into batches. But it is no monoid as the exact sums are: rows may not be combined before the shuffle.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headrace.operators.accumulators.accumulator import Columns, Monoid, reduce_segments
from headrace.operators.accumulators.arrays import double_array, doubles, valid_mask
from headrace.operators.accumulators.counts import COUNT
from headrace.operators.buffers import Mask
from headrace.operators.kernel import Times
from headrace.operators.segments import Segments
from headrace.operators.times import microseconds


class DecayedSum(Monoid):
    """`at` is the time as of which `sum` is."""

    fields = (COUNT, ("at", "<i8"), ("sum", "<f8"))
    combinable = False

    def __init__(self, column: str, time: str, *, half_life_us: int) -> None:
        self.column, self.time, self.half_life_us = column, time, half_life_us

    def lift(self, segments: Segments) -> Columns:
        array, times = segments.column(self.column), microseconds(segments.column(self.time).fill_null(0))
        valid = [mask for mask in (valid_mask(array), valid_mask(segments.column(self.time))) if mask is not None]
        counts = np.logical_and.reduce(valid) if valid else np.ones(len(array), np.bool_)
        one = counts.astype(np.int64)
        values = np.where(counts, doubles(array), 0.0)
        return reduce_segments(self.merge, (one, np.where(counts, times, 0), values), segments.segment_of)

    def merge(self, left: Columns, right: Columns) -> Columns:
        newest = np.where(left[0] == 0, right[1], np.where(right[0] == 0, left[1], np.maximum(left[1], right[1])))
        total = left[2] * self._weight(newest - left[1], left[0]) + right[2] * self._weight(newest - right[1], right[0])
        return left[0] + right[0], newest, total

    def _weight(self, age_us: Times, rows: Times) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """What is left of a value of this age. No rows are none, whatever their age."""
        return np.where(rows == 0, 0.0, np.exp2(-np.where(rows == 0, 0, age_us) / self.half_life_us))

    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        return double_array(columns[2], columns[0] != 0), None
