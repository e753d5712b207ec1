"""The smallest and the largest value of a stream, for types of up to 64 bits: values as numbers in the same order, of which the largest is kept.

Others, and tables, whose rows can go again, are in `multiset.py`.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headrace.operators.accumulators.accumulator import Columns, Monoid
from headrace.operators.accumulators.arrays import valid_mask
from headrace.operators.accumulators.ordered import from_ordered, to_ordered
from headrace.operators.buffers import Mask
from headrace.operators.segments import Segments


class Extreme(Monoid):
    """`code` is a value's place in the order of its type, turned round for the smallest; 0 and `some` = 0 where there is none."""

    fields = (("some", "u1"), ("code", "<u8"))

    def __init__(self, column: str, type: pa.DataType, *, largest: bool) -> None:
        self.column, self.type, self.largest = column, type, largest

    def lift(self, segments: Segments) -> Columns:
        array = segments.column(self.column)
        codes, valid = self._turned(to_ordered(array)), valid_mask(array)
        if valid is None:
            return np.ones(len(segments), np.uint8), np.maximum.reduceat(codes, segments.starts)
        codes[~valid] = 0
        return np.maximum.reduceat(valid.astype(np.uint8), segments.starts), np.maximum.reduceat(codes, segments.starts)

    def merge(self, left: Columns, right: Columns) -> Columns:
        return np.maximum(left[0], right[0]), np.maximum(left[1], right[1])

    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        some = columns[0] != 0
        return from_ordered(self._turned(columns[1]), some, self.type), None

    def _turned(self, codes: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return codes if self.largest else ~codes
