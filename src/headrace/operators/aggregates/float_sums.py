"""Sums, averages and standard deviations of DOUBLE and FLOAT columns: the exact sum, rounded once.

The result does not depend on batches, shards or the order of rows, and every value can be
retracted. An exact sum has two forms. Usually it is an *expansion*: a few doubles that do not
overlap, largest first, computed for many groups at once with numpy. Sums that need more doubles
than there is room for, and those with infinities or NaNs, are an `ExactSum`: a Python integer.
`ExactColumns` holds the sums of many groups and switches between the forms:

    1e16 + 1.0         expansion (1e16, 1.0): exact, rounds to 1e16
    ... then -1e16     expansion (1.0,): no digit was lost
    1e308 + 1e308      ExactSum: too large for a double
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.segments import Segments
from headrace.operators.aggregates.accumulator import (
    Columns,
    Monoid,
    Tails,
    double_array,
    doubles,
    reduce_segments,
)
from headrace.operators.aggregates.sums import COUNT, count_valid

# Exact sums as Python integers, in units of the square of the smallest double, so that sums of
# squares are integers too. Infinities and NaNs are counted, so that they can be retracted.

_UNIT = 1 << 2148
_COUNTS = struct.Struct("<qqq")


@dataclass(frozen=True)
class ExactSum:
    """An exact sum in `units` of 2 to the power of -2148, and the numbers of
    infinities and NaNs.
    """

    units: int = 0
    infinities: int = 0
    negative_infinities: int = 0
    nans: int = 0

    def __add__(self, other: ExactSum) -> ExactSum:
        return ExactSum(
            units=self.units + other.units,
            infinities=self.infinities + other.infinities,
            negative_infinities=self.negative_infinities + other.negative_infinities,
            nans=self.nans + other.nans,
        )

    @property
    def is_finite(self) -> bool:
        """Whether the sum has no infinities and no NaNs."""
        return not (self.infinities or self.negative_infinities or self.nans)

    def rounded(self) -> float:
        """The nearest double, as IEEE 754 adds: NaN, or opposite infinities, make NaN."""
        if self.is_finite:
            return to_double(self.units)
        if self.nans or (self.infinities and self.negative_infinities):
            return math.nan
        return math.inf if self.infinities else -math.inf

    def parts(self, max_parts: int) -> list[float] | None:
        """The canonical parts, if they are doubles and no more than `max_parts`."""
        if not self.is_finite:
            return None
        parts, rest = [], self.units
        for _ in range(max_parts):
            part = to_double(rest)
            if math.isinf(part):
                return None
            parts.append(part)
            rest -= to_units(part)
        return None if rest else parts

    def to_bytes(self) -> bytes:
        size = self.units.bit_length() // 8 + 1
        return _COUNTS.pack(
            self.infinities, self.negative_infinities, self.nans
        ) + self.units.to_bytes(size, "little", signed=True)

    @classmethod
    def from_bytes(cls, data: bytes) -> ExactSum:
        counts = _COUNTS.unpack_from(data)
        return cls(int.from_bytes(data[_COUNTS.size :], "little", signed=True), *counts)


def exact(value: float, weight: int = 1) -> ExactSum:
    """The exact sum of one value; with weight -1, of its retraction."""
    if math.isnan(value):
        return ExactSum(nans=weight)
    if math.isinf(value):
        return ExactSum(infinities=weight) if value > 0 else ExactSum(negative_infinities=weight)
    return ExactSum(weight * to_units(value))


def of_parts(parts: Sequence[float]) -> ExactSum:
    """The exact sum of an expansion."""
    return ExactSum(sum(map(to_units, parts)))


def to_units(value: float) -> int:
    """A finite double in units."""
    numerator, denominator = value.as_integer_ratio()
    return numerator * (_UNIT // denominator)


def to_double(units: int) -> float:
    """The nearest double; infinity if the sum is too large for one."""
    try:
        return units / _UNIT
    except OverflowError:
        return math.inf if units > 0 else -math.inf


# Expansions: the sum of a few doubles that do not overlap, the largest first, for many groups at
# once.
#
# The form is canonical: the first part is the exact sum rounded to the nearest double, the second
# the rounded remainder, and so on. It depends on the exact sum alone, not on the order or grouping
# of additions. The method is error-free addition: a + b = s + e, where s is the rounded sum and the
# rounding error e is itself a double. Sums that an expansion cannot hold are reported as failed.

Doubles = npt.NDArray[np.float64]
Expansion = tuple[Doubles, ...]
_BLOCK = 1 << 13  # numbers processed at a time: a dozen such arrays fit into a core's own cache
_PASSES = 12


def two_sum(a: Doubles, b: Doubles) -> tuple[Doubles, Doubles]:
    """The rounded sum, and the rounding error. Exact unless the sum is too large for a double."""
    s = a + b
    of_b = s - a
    return s, (a - (s - of_b)) + (b - of_b)


def two_product(a: Doubles, b: Doubles) -> tuple[Doubles, Doubles]:
    """The rounded product, and the rounding error. Exact for factors and products far from the
    limits of the range of doubles.
    """
    product = a * b
    a_high, a_low = _halves(a)
    b_high, b_low = _halves(b)
    return product, a_low * b_low - (
        ((product - a_high * b_high) - a_low * b_high) - a_high * b_low
    )


def _halves(a: Doubles) -> tuple[Doubles, Doubles]:
    """The number as the sum of two numbers of at most 26 bits each."""
    scaled = a * 134217729.0
    high = scaled - (scaled - a)
    return high, a - high


def distil(terms: Sequence[Doubles], parts: int) -> tuple[Expansion, Mask]:
    """The sum of all terms as canonical parts, and which sums failed: their parts are to be
    ignored.
    """
    count = len(terms[0])
    total = tuple(np.zeros(count) for _ in range(parts))
    failed = np.zeros(count, np.bool_)
    with np.errstate(all="ignore"):
        for start in range(0, count, _BLOCK):
            block = slice(start, start + _BLOCK)
            _distil_block(
                [term[block] for term in terms], [part[block] for part in total], failed[block]
            )
    return total, failed


def _distil_block(terms: list[Doubles], total: list[Doubles], failed: Mask) -> None:
    """Add the terms from the smallest to the largest, in passes, until a pass changes nothing. Most
    blocks need two passes.
    """
    terms = [term for term in terms if term.any()]
    which: slice | npt.NDArray[np.int64] = slice(None)
    for _ in range(_PASSES):
        if len(terms) < 2:
            break
        terms, settled = _pass(terms)
        if settled.all():
            break
        _put(total, failed, which, [term[settled] for term in terms], settled)
        rest = np.flatnonzero(~settled)
        which = rest if isinstance(which, slice) else which[rest]
        terms = [term[rest] for term in terms]
    else:
        failed[which] = True
        return
    _put(total, failed, which, terms, None)


def _pass(terms: list[Doubles]) -> tuple[list[Doubles], Mask]:
    """One pass, and which rows are settled: unchanged, or of two terms only, which one pass
    settles.
    """
    fresh = list(terms)
    settled = np.ones(len(terms[0]), np.bool_)
    for at in range(len(terms) - 2, -1, -1):
        high, low = two_sum(fresh[at], fresh[at + 1])
        settled &= high == terms[at]
        fresh[at], fresh[at + 1] = high, low
    if len(terms) == 2:
        settled[:] = True
    return fresh, settled


def _put(
    total: list[Doubles],
    failed: Mask,
    which: slice | npt.NDArray[np.int64],
    terms: list[Doubles],
    settled: Mask | None,
) -> None:
    """Store settled sums, or mark them as failed: too many parts, not finite, or a tie that further
    parts would break.
    """
    where = (
        which
        if settled is None
        else (np.flatnonzero(settled) if isinstance(which, slice) else which[settled])
    )
    bad = np.zeros(len(terms[0]) if terms else 0, np.bool_)
    for at, term in enumerate(terms):
        bad |= ~np.isfinite(term)
        if at < len(total):
            total[at][where] = term + 0.0  # no negative zeros
        else:
            bad |= term != 0
    for high, low, next_low in zip(terms, terms[1:], terms[2:], strict=False):
        bad |= (next_low != 0) & ((high + 2 * low) - high == 2 * low)
    if terms:
        failed[where] |= bad


# Exact sums in the states of many groups: a few parts for each, and a tail for the few that need
# more. A sum without room in its parts is a NaN, followed in memory by its index in a list, and in
# stored states by the length of its tail.


class ExactColumns:
    """The exact sums of many groups, with room for `parts` doubles each. Holds the sums that need
    more for the duration of a call.
    """

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self._spilled: list[ExactSum] = []

    def fields(self, name: str) -> tuple[tuple[str, str], ...]:
        """The state fields of the parts."""
        return tuple((f"{name}{at}", "<f8") for at in range(self.parts))

    # Stored form and working form

    @staticmethod
    def tail_sizes(sums: Columns) -> Ints | None:
        """The length of each stored sum's tail; None if none has one."""
        spilled = np.isnan(sums[0])
        return np.where(spilled, sums[1], 0).astype(np.int64) if spilled.any() else None

    def open_states(self, sums: Columns, tails: Tails | None) -> Expansion:
        """Stored sums in the form in which they are added."""
        if tails is not None:
            sums = tuple(part.copy() for part in sums)
            for at in np.flatnonzero(np.isnan(sums[0])).tolist():
                self._spill(sums, at, ExactSum.from_bytes(tails[at]))
        return sums

    def close_states(self, sums: Expansion) -> tuple[Columns, Tails | None]:
        """Sums in the form in which they are stored: parts, and tails for those that need them."""
        spilled = np.flatnonzero(np.isnan(sums[0])).tolist()
        tails: list[bytes] | None = None
        if spilled:
            sums, tails = tuple(part.copy() for part in sums), [b""] * len(sums[0])
            for at in spilled:
                tails[at] = self._spilled[int(sums[1][at])].to_bytes()
                sums[1][at] = len(tails[at])
        self._spilled = []
        return sums, tails

    # Arithmetic

    def of_values(self, values: Doubles, weights: Ints | None) -> Expansion:
        """The sum of each value alone; with weight -1, of its retraction."""
        signed = values + 0.0 if weights is None else values * weights + 0.0
        sums = (signed, *(np.zeros(len(values)) for _ in range(self.parts - 1)))
        if not (finite := np.isfinite(values)).all():
            self._spill_values(sums, values, weights, ~finite)
        return sums

    def of_products(self, products: Doubles, rests: Doubles) -> Expansion:
        """The sum of each product alone, with its rounding error."""
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
        """One sum as a Python integer."""
        return (
            self._spilled[int(sums[1][at])]
            if np.isnan(sums[0][at])
            else of_parts([float(part[at]) for part in sums])
        )

    def add(self, left: Expansion, right: Expansion) -> Expansion:
        """The sums of both sides, pair by pair."""
        total, failed = distil(
            [part for pair in zip(left, right, strict=True) for part in pair], self.parts
        )
        for at in np.flatnonzero(failed).tolist():
            self.put_exact(total, at, self.exact(left, at) + self.exact(right, at))
        return total

    def reduce(self, sums: Expansion, segment_of: Ints) -> Expansion:
        """One sum per segment."""
        return reduce_segments(self.add, sums, segment_of)

    def rounded(self, sums: Expansion) -> Doubles:
        """The nearest double of each sum."""
        spilled = np.flatnonzero(np.isnan(sums[0]))
        if not len(spilled):
            return sums[0]
        values = sums[0].copy()
        values[spilled] = [
            self._spilled[index].rounded() for index in sums[1][spilled].astype(np.int64).tolist()
        ]
        return values

    def _spill(self, sums: Expansion, at: int, total: ExactSum) -> None:
        sums[0][at], sums[1][at] = np.nan, len(self._spilled)
        for part in sums[2:]:
            part[at] = 0.0
        self._spilled.append(total)

    def _spill_values(
        self, sums: Expansion, values: Doubles, weights: Ints | None, which: Mask
    ) -> None:
        """Spill infinities and NaNs. There are six cases: +infinity, -infinity or NaN, added or
        retracted.
        """
        for value, mask in (
            (np.inf, values == np.inf),
            (-np.inf, values == -np.inf),
            (np.nan, np.isnan(values)),
        ):
            for weight in (1, -1):
                chosen = which & mask & (weight == (1 if weights is None else weights))
                if chosen.any():
                    sums[0][chosen], sums[1][chosen] = np.nan, len(self._spilled)
                    self._spilled.append(exact(value, weight))


PARTS = 3  # millions of amounts of money need two


class DoubleSum(Monoid):
    """The sum; null without values. Infinities and NaNs add as in IEEE 754, until they are
    retracted.
    """

    fields = (COUNT, *ExactColumns(PARTS).fields("s"))

    def __init__(self, column: str) -> None:
        self.column = column
        self._sums = ExactColumns(PARTS)

    def tail_sizes(self, columns: Columns) -> Ints | None:
        return self._sums.tail_sizes(columns[1:])

    def open_states(self, columns: Columns, tails: Tails | None) -> Columns:
        return columns[0], *self._sums.open_states(columns[1:], tails)

    def close_states(self, columns: Columns) -> tuple[Columns, Tails | None]:
        sums, tails = self._sums.close_states(columns[1:])
        return (columns[0], *sums), tails

    def lift(self, segments: Segments) -> Columns:
        array = segments.column(self.column)
        values = self._sums.of_values(doubles(array), segments.signs)
        return count_valid(array, segments), *self._sums.reduce(values, segments.segment_of)

    def merge(self, left: Columns, right: Columns) -> Columns:
        return left[0] + right[0], *self._sums.add(left[1:], right[1:])

    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        return double_array(self._sums.rounded(columns[1:]), columns[0] != 0), None


class DoubleAverage(DoubleSum):
    """The rounded sum, divided by the number of values."""

    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        some = columns[0] != 0
        return (
            double_array(self._sums.rounded(columns[1:]) / np.where(some, columns[0], 1), some),
            None,
        )


# The standard deviation, from the exact sums of the values and of their squares. Integers and
# decimals are converted to doubles, as Spark does. The sum of squares less the square of the sum
# cancels; it is computed with twice the digits of a double, and with Python's integers where that
# is not enough (as when all values are equal).


SUM_PARTS = 3
SQUARE_PARTS = 5
_SMALLEST, _LARGEST = 2.0**-450, 2.0**450  # between these, two_product of a square is exact
_MAX_CANCELLED = 2.0**-40


class StandardDeviation(Monoid):
    """The standard deviation. Of a sample, null for fewer than two values; of a population, null
    without values. NaN if a value is infinite or NaN.
    """

    fields = (COUNT, *ExactColumns(SUM_PARTS).fields("s"), *ExactColumns(SQUARE_PARTS).fields("q"))

    def __init__(self, column: str, *, population: bool = False) -> None:
        self.column, self.population = column, population
        self._sums, self._squares = ExactColumns(SUM_PARTS), ExactColumns(SQUARE_PARTS)

    def tail_sizes(self, columns: Columns) -> Ints | None:
        sizes = [
            each
            for each in (self._sums.tail_sizes(columns[1:4]), self._squares.tail_sizes(columns[4:]))
            if each is not None
        ]
        return sum(sizes[1:], sizes[0]) if sizes else None

    def open_states(self, columns: Columns, tails: Tails | None) -> Columns:
        if tails is None:
            return columns
        first = self._sums.tail_sizes(columns[1:4])
        cuts = [0] * len(tails) if first is None else first.tolist()
        of_sums = [tail[:at] for tail, at in zip(tails, cuts, strict=True)]
        of_squares = [tail[at:] for tail, at in zip(tails, cuts, strict=True)]
        return (
            columns[0],
            *self._sums.open_states(columns[1:4], of_sums),
            *self._squares.open_states(columns[4:], of_squares),
        )

    def close_states(self, columns: Columns) -> tuple[Columns, Tails | None]:
        sums, sum_tails = self._sums.close_states(columns[1:4])
        squares, square_tails = self._squares.close_states(columns[4:])
        tails = [each for each in (sum_tails, square_tails) if each is not None]
        return (columns[0], *sums, *squares), (
            list(map(b"".join, zip(*tails, strict=True))) if tails else None
        )

    def lift(self, segments: Segments) -> Columns:
        array = segments.column(self.column)
        values = doubles(array)
        sums = self._sums.reduce(self._sums.of_values(values, segments.signs), segments.segment_of)
        squares = self._squares.reduce(
            self._of_squares(values, segments.signs), segments.segment_of
        )
        return count_valid(array, segments), *sums, *squares

    def _of_squares(self, values: Doubles, weights: Ints | None) -> Expansion:
        size = np.abs(values)
        plain = ((size > _SMALLEST) & (size < _LARGEST)) | (values == 0)
        safe = np.where(plain, values, 0.0)
        product, rest = two_product(safe, safe if weights is None else safe * weights)
        squares = self._squares.of_products(product + 0.0, rest + 0.0)
        for at in np.flatnonzero(~plain).tolist():
            self._squares.put_exact(
                squares,
                at,
                _exact_square(float(values[at]), 1 if weights is None else int(weights[at])),
            )
        return squares

    def merge(self, left: Columns, right: Columns) -> Columns:
        return (
            left[0] + right[0],
            *self._sums.add(left[1:4], right[1:4]),
            *self._squares.add(left[4:], right[4:]),
        )

    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        count = columns[0]
        sums = columns[1:4]
        squares = columns[4:]
        fewer = 0 if self.population else 1
        enough = count > fewer
        number = np.where(enough, count, 2).astype(np.float64)
        with np.errstate(all="ignore"):
            excess, sure = _excess(number, sums, squares)
            spread = self._of_variance(excess / (number * (number - fewer)))
        for at in np.flatnonzero(enough & ~sure).tolist():
            total, squared = self._sums.exact(sums, at), self._squares.exact(squares, at)
            if total.is_finite and squared.is_finite:
                spread[at] = self._of_fraction(
                    *_exact_variance(int(count[at]), total, squared, fewer)
                )
            else:
                spread[at] = math.nan
        return double_array(spread, enough), None

    def _of_variance(self, variance: Doubles) -> Doubles:
        """The result, from variances that are exact enough."""
        root: Doubles = np.sqrt(variance)
        return root

    def _of_fraction(self, numerator: int, denominator: int) -> float:
        """The result, from an exact variance."""
        return _square_root(numerator, denominator)


class Variance(StandardDeviation):
    """The variance: the square of the standard deviation, with the same state."""

    def _of_variance(self, variance: Doubles) -> Doubles:
        return variance

    def _of_fraction(self, numerator: int, denominator: int) -> float:
        try:
            return max(numerator, 0) / denominator
        except OverflowError:
            return math.inf


def _exact_square(value: float, weight: int) -> ExactSum:
    if not math.isfinite(value):
        return exact(math.nan, weight)
    numerator, denominator = value.as_integer_ratio()
    return ExactSum(weight * numerator * numerator * (to_units(1.0) // (denominator * denominator)))


def _excess(number: Doubles, sums: Expansion, squares: Expansion) -> tuple[Doubles, Mask]:
    """The number times the sum of squares, less the square of the sum; and where few enough digits
    cancelled that it can be trusted.
    """
    scaled, rest = two_product(number, squares[0])
    rest += number * squares[1]
    square, square_rest = two_product(sums[0], sums[0])
    square_rest += 2 * sums[0] * sums[1]
    high, low = two_sum(scaled, -square)
    excess = high + (low + (rest - square_rest))
    safe = (
        (scaled < _LARGEST)
        & (scaled > _SMALLEST)
        & (square < _LARGEST)
        & ((square > _SMALLEST) | (square == 0))
    )
    return excess, safe & (excess > scaled * _MAX_CANCELLED)


def _exact_variance(count: int, total: ExactSum, squares: ExactSum, fewer: int) -> tuple[int, int]:
    """The variance as a fraction of integers. Sums are in units, so the square of a sum is in units
    squared.
    """
    unit = to_units(1.0)
    return (
        count * squares.units * unit - total.units * total.units,
        count * (count - fewer) * unit * unit,
    )


def _square_root(numerator: int, denominator: int) -> float:
    """The square root of a fraction, with more digits than a double has before it is rounded."""
    if numerator <= 0:
        return 0.0
    shift = max(0, 140 - numerator.bit_length() + denominator.bit_length())
    shift += shift % 2
    root = math.isqrt((numerator << shift) // denominator)
    try:
        return root / (1 << (shift // 2))
    except OverflowError:
        return math.inf
