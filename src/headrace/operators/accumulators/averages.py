"""Averages of whole numbers, decimals and intervals: the exact sum by the number of values, rounded once, as Spark rounds."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headrace.operators.accumulators import wide
from headrace.operators.accumulators.accumulator import Columns
from headrace.operators.accumulators.arrays import decimal_array, double_array, integer_array
from headrace.operators.accumulators.sums import DecimalSum, IntegerSum
from headrace.operators.accumulators.wide import Wide
from headrace.operators.buffers import Ints, Mask

_EXACT_IN_DOUBLE = 1 << 53


class IntegerAverage(IntegerSum):
    """Of integers: the nearest double."""

    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        count, total = columns[0], columns[1:]
        some = count != 0
        plain = wide.fits_one_word(total) & (np.abs(total[0].view(np.int64) >> 1) < _EXACT_IN_DOUBLE >> 1)
        average = total[0].view(np.int64) / np.where(some, count, 1)
        if len(large := np.flatnonzero(some & ~plain)):
            average[large] = [whole / number for whole, number in zip(wide.as_python(total, large), count[large].tolist(), strict=True)]
        return double_array(average, some), None


class IntervalAverage(IntegerSum):
    """Of intervals: the nearest microsecond, halves away from zero."""

    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        some = columns[0] != 0
        quotient = _quotients(columns[1:], np.where(some, columns[0], 1), 1)
        return integer_array(quotient[0].view(np.int64), some, self.type), None


class DecimalAverage(DecimalSum):
    """Of decimals: a decimal with up to four more digits behind the point, halves away from zero."""

    def __init__(self, column: str, type: pa.DataType, column_scale: int) -> None:
        super().__init__(column, type)
        self.factor = 10 ** (type.scale - column_scale)

    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        some = columns[0] != 0
        quotient = _quotients(columns[1:], np.where(some, columns[0], 1), self.factor)
        fits = wide.within(quotient, 10**self.type.precision - 1)
        return decimal_array(quotient, some & fits, self.type), some & ~fits


def _quotients(total: Wide, count: Ints, factor: int) -> Wide:
    """Total * factor / count in three words, halves away from zero. Large totals go through Python's integers."""
    room = (1 << 61) // factor
    values = total[0].view(np.int64)
    plain = wide.fits_one_word(total) & (values < room) & (values > -room) & (count < 1 << 61)
    magnitude = np.where(plain, np.abs(values), 0) * factor
    nearest = (2 * magnitude + count) // (2 * count)
    quotient = wide.of_integers(np.where(values < 0, -nearest, nearest), 3)
    if len(large := np.flatnonzero(~plain)):
        quotient = tuple(word.copy() for word in quotient)
        numbers = zip(wide.as_python(total, large), count[large].tolist(), strict=True)
        exact = wide.of_python([_nearest(whole * factor, number) for whole, number in numbers], 3)
        for word, value in zip(quotient, exact, strict=True):
            word[large] = value
    return quotient


def _nearest(whole: int, number: int) -> int:
    magnitude = (2 * abs(whole) + number) // (2 * number)
    return -magnitude if whole < 0 else magnitude
