"""Sums of whole numbers, decimals and intervals: exact, in words wide enough that nothing is lost on the way.

A sum that does not fit its type is null, as Spark's `try_sum` has it, and counted; it is a number again when rows that go make it fit.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headrace.operators.accumulators import wide
from headrace.operators.accumulators.accumulator import Columns, Monoid, range_sums
from headrace.operators.accumulators.arrays import decimal_array, decimal_words, integer_array, integers
from headrace.operators.accumulators.counts import COUNT, count_valid
from headrace.operators.buffers import Ints, Mask
from headrace.operators.segments import Segments


class IntegerSum(Monoid):
    """The sum of a column of integers or intervals, in 128 bits."""

    fields = (COUNT, ("w0", "<u8"), ("w1", "<u8"))

    def __init__(self, column: str, type: pa.DataType) -> None:
        self.column, self.type = column, type

    def lift(self, segments: Segments) -> Columns:
        array = segments.column(self.column)
        return count_valid(array, segments), *wide.segment_sums(integers(array), segments.signs, segments.starts, 2)

    def merge(self, left: Columns, right: Columns) -> Columns:
        return left[0] + right[0], *wide.add(left[1:], right[1:])

    def over_ranges(self, columns: Columns, first: Ints, stop: Ints) -> Columns | None:
        """Where no sum of them can need more than one word."""
        values = columns[1].view(np.int64)
        most = max(-int(values.min(initial=0)), int(values.max(initial=0)))
        if most * len(values) >= 1 << 63 or not wide.fits_one_word(columns[1:]).all():
            return None
        return range_sums(columns[0], first, stop), *wide.of_integers(range_sums(values, first, stop), 2)

    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        some, total = columns[0] != 0, columns[1:]
        fits = wide.fits_one_word(total)
        return integer_array(total[0].view(np.int64), some & fits, self.type), some & ~fits


class DecimalSum(Monoid):
    """The sum of a column of decimals, in 192 bits."""

    fields = (COUNT, ("w0", "<u8"), ("w1", "<u8"), ("w2", "<u8"))

    def __init__(self, column: str, type: pa.DataType) -> None:
        self.column, self.type = column, type

    def lift(self, segments: Segments) -> Columns:
        array = segments.column(self.column)
        low, high = decimal_words(array)
        if wide.fits_one_word((low, high)).all():
            total = wide.segment_sums(low.view(np.int64), segments.signs, segments.starts, 3)
        else:
            limbs = [*wide.limbs_of(low, signed=False), *wide.limbs_of(high, signed=True)]
            total = wide.limb_sums(limbs, segments.signs, segments.starts, 3)
        return count_valid(array, segments), *total

    def merge(self, left: Columns, right: Columns) -> Columns:
        return left[0] + right[0], *wide.add(left[1:], right[1:])

    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        some, total = columns[0] != 0, columns[1:]
        fits = wide.within(total, 10**self.type.precision - 1)
        return decimal_array(total, some & fits, self.type), some & ~fits
