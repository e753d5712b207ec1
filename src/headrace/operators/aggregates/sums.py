"""Counts, exact sums and averages of integers, decimals and intervals, and decayed sums.

Sums are kept in 128 or 192 bits, so that nothing overflows on the way. A sum that does not fit its
result type is null, as with Spark's `try_sum`, and counted as unknown; it is a number again when
retractions make it fit. Floating-point numbers are in `float_sums`.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headrace.columnar import wide_integer
from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.segments import Segments
from headrace.columnar.wide_integer import Wide
from headrace.operators.aggregates.accumulator import (
    Columns,
    Monoid,
    decimal_array,
    decimal_words,
    double_array,
    doubles,
    integer_array,
    integers,
    range_sums,
    reduce_segments,
    valid_mask,
)
from headrace.operators.kernel import Times, microseconds

COUNT = ("n", "<i8")
"""The field with the number of values."""


class CountRows(Monoid):
    """The number of rows of a group. Every state has it, since a group without rows does not exist;
    `hr.agg.count()` shows it.
    """

    fields = (COUNT,)

    def lift(self, segments: Segments) -> Columns:
        return (
            (
                segments.sizes
                if segments.signs is None
                else np.add.reduceat(segments.signs, segments.starts)
            ),
        )

    def merge(self, left: Columns, right: Columns) -> Columns:
        return (left[0] + right[0],)

    def over_ranges(self, columns: Columns, first: Ints, stop: Ints) -> Columns | None:
        return (range_sums(columns[0], first, stop),)

    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        return pa.array(columns[0], pa.int64()), None


class CountValues(CountRows):
    """The number of values of a column that are not null."""

    def __init__(self, column: str) -> None:
        self.column = column

    def lift(self, segments: Segments) -> Columns:
        return (count_valid(segments.column(self.column), segments),)


class CountTrue(CountRows):
    """The number of rows for which a BOOLEAN column is true."""

    def __init__(self, column: str) -> None:
        self.column = column

    def lift(self, segments: Segments) -> Columns:
        is_true = segments.column(self.column).fill_null(False).to_numpy(zero_copy_only=False)
        signs = segments.signs
        ones = is_true.astype(np.int64) if signs is None else np.where(is_true, signs, 0)
        return (np.add.reduceat(ones, segments.starts),)


def count_valid(array: pa.Array, segments: Segments) -> Ints:
    """The number of values of each segment that are not null, less those that are retracted."""
    valid, signs = valid_mask(array), segments.signs
    if valid is None:
        return segments.sizes if signs is None else np.add.reduceat(signs, segments.starts)
    ones = valid.astype(np.int64) if signs is None else np.where(valid, signs, 0)
    return np.add.reduceat(ones, segments.starts)


class IntegerSum(Monoid):
    """The sum of a column of integers or intervals, in 128 bits."""

    fields = (COUNT, ("w0", "<u8"), ("w1", "<u8"))

    def __init__(self, column: str, type: pa.DataType) -> None:
        self.column, self.type = column, type

    def lift(self, segments: Segments) -> Columns:
        array = segments.column(self.column)
        return count_valid(array, segments), *wide_integer.segment_sums(
            integers(array), segments.signs, segments.starts, 2
        )

    def merge(self, left: Columns, right: Columns) -> Columns:
        return left[0] + right[0], *wide_integer.add(left[1:], right[1:])

    def over_ranges(self, columns: Columns, first: Ints, stop: Ints) -> Columns | None:
        """The sums of ranges, if no running total can exceed one word."""
        values = columns[1].view(np.int64)
        largest = max(-int(values.min(initial=0)), int(values.max(initial=0)))
        if largest * len(values) >= 1 << 63 or not wide_integer.fits_one_word(columns[1:]).all():
            return None
        return range_sums(columns[0], first, stop), *wide_integer.from_integers(
            range_sums(values, first, stop), 2
        )

    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        some, total = columns[0] != 0, columns[1:]
        fits = wide_integer.fits_one_word(total)
        return integer_array(total[0].view(np.int64), some & fits, self.type), some & ~fits


class DecimalSum(Monoid):
    """The sum of a column of decimals, in 192 bits."""

    fields = (COUNT, ("w0", "<u8"), ("w1", "<u8"), ("w2", "<u8"))

    def __init__(self, column: str, type: pa.DataType) -> None:
        self.column, self.type = column, type

    def lift(self, segments: Segments) -> Columns:
        array = segments.column(self.column)
        low, high = decimal_words(array)
        if wide_integer.fits_one_word((low, high)).all():
            total = wide_integer.segment_sums(
                low.view(np.int64), segments.signs, segments.starts, 3
            )
        else:
            limbs = [
                *wide_integer.split_limbs(low, signed=False),
                *wide_integer.split_limbs(high, signed=True),
            ]
            total = wide_integer.limb_sums(limbs, segments.signs, segments.starts, 3)
        return count_valid(array, segments), *total

    def merge(self, left: Columns, right: Columns) -> Columns:
        return left[0] + right[0], *wide_integer.add(left[1:], right[1:])

    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        some, total = columns[0] != 0, columns[1:]
        fits = wide_integer.within(total, 10**self.type.precision - 1)
        return decimal_array(total, some & fits, self.type), some & ~fits


# Averages: the exact sum divided by the number of values, rounded once, as Spark rounds


_EXACT_IN_DOUBLE = 1 << 53


class IntegerAverage(IntegerSum):
    """The average of integers: the nearest double."""

    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        count, total = columns[0], columns[1:]
        some = count != 0
        plain = wide_integer.fits_one_word(total) & (
            np.abs(total[0].view(np.int64) >> 1) < _EXACT_IN_DOUBLE >> 1
        )
        average = total[0].view(np.int64) / np.where(some, count, 1)
        if len(large := np.flatnonzero(some & ~plain)):
            average[large] = [
                whole / number
                for whole, number in zip(
                    wide_integer.to_python(total, large), count[large].tolist(), strict=True
                )
            ]
        return double_array(average, some), None


class IntervalAverage(IntegerSum):
    """The average of intervals: the nearest microsecond, halves away from zero."""

    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        some = columns[0] != 0
        quotient = _quotients(columns[1:], np.where(some, columns[0], 1), 1)
        return integer_array(quotient[0].view(np.int64), some, self.type), None


class DecimalAverage(DecimalSum):
    """The average of decimals: a decimal with up to four more fractional digits, halves away from
    zero.
    """

    def __init__(self, column: str, type: pa.DataType, column_scale: int) -> None:
        super().__init__(column, type)
        self.factor = 10 ** (type.scale - column_scale)

    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        some = columns[0] != 0
        quotient = _quotients(columns[1:], np.where(some, columns[0], 1), self.factor)
        fits = wide_integer.within(quotient, 10**self.type.precision - 1)
        return decimal_array(quotient, some & fits, self.type), some & ~fits


def _quotients(total: Wide, count: Ints, factor: int) -> Wide:
    """Total * factor / count in three words, halves away from zero.

    Large totals are divided with Python's integers.
    """
    room = (1 << 61) // factor
    values = total[0].view(np.int64)
    plain = (
        wide_integer.fits_one_word(total) & (values < room) & (values > -room) & (count < 1 << 61)
    )
    magnitude = np.where(plain, np.abs(values), 0) * factor
    nearest = (2 * magnitude + count) // (2 * count)
    quotient = wide_integer.from_integers(np.where(values < 0, -nearest, nearest), 3)
    if len(large := np.flatnonzero(~plain)):
        quotient = tuple(word.copy() for word in quotient)
        numbers = zip(wide_integer.to_python(total, large), count[large].tolist(), strict=True)
        exact = wide_integer.from_python(
            [_nearest(whole * factor, number) for whole, number in numbers], 3
        )
        for word, value in zip(quotient, exact, strict=True):
            word[large] = value
    return quotient


def _nearest(whole: int, number: int) -> int:
    """Whole / number, rounded to the nearest integer, halves away from zero."""
    magnitude = (2 * abs(whole) + number) // (2 * number)
    return -magnitude if whole < 0 else magnitude


# Decayed sums. Rounding depends on the order in which values are merged, and that order is fixed:
# neighbours pair by pair within a tick, then tick by tick. The result therefore does not depend on
# how ticks are grouped into batches, but rows may not be combined before the shuffle.


class DecayedSum(Monoid):
    """A sum in which values count half for every half-life of their age; `at` is the time of its
    value.
    """

    fields = (COUNT, ("at", "<i8"), ("sum", "<f8"))
    combinable = False

    def __init__(self, column: str, time: str, *, half_life_us: int) -> None:
        self.column = column
        self.time = time
        self.half_life_us = half_life_us

    def lift(self, segments: Segments) -> Columns:
        array = segments.column(self.column)
        times = microseconds(segments.column(self.time).fill_null(0))
        valid = [
            mask
            for mask in (valid_mask(array), valid_mask(segments.column(self.time)))
            if mask is not None
        ]
        counts = np.logical_and.reduce(valid) if valid else np.ones(len(array), np.bool_)
        one = counts.astype(np.int64)
        values = np.where(counts, doubles(array), 0.0)
        return reduce_segments(
            self.merge, (one, np.where(counts, times, 0), values), segments.segment_of
        )

    def merge(self, left: Columns, right: Columns) -> Columns:
        newest = np.where(
            left[0] == 0, right[1], np.where(right[0] == 0, left[1], np.maximum(left[1], right[1]))
        )
        total = left[2] * self._weight(newest - left[1], left[0]) + right[2] * self._weight(
            newest - right[1], right[0]
        )
        return left[0] + right[0], newest, total

    def _weight(self, age_us: Times, rows: Times) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """The weight of a value of this age; zero for a state without rows."""
        return np.where(
            rows == 0, 0.0, np.exp2(-np.where(rows == 0, 0, age_us) / self.half_life_us)
        )

    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        return double_array(columns[2], columns[0] != 0), None
