"""The standard deviation, from the exact sums of values and of their squares: no value is kept, and any can go again.

Integers and decimals are taken as doubles, as Spark does. The squares' sum less the sum's square cancels; it is computed with twice a
double's digits, and with Python's integers where even that is too few (as when all values are the same).
"""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa

from headrace.operators.accumulators.accumulator import Columns, Monoid, Tails
from headrace.operators.accumulators.arrays import double_array, doubles
from headrace.operators.accumulators.counts import COUNT, count_valid
from headrace.operators.accumulators.exact import ExactSum, exact, to_units
from headrace.operators.accumulators.exact_columns import ExactColumns
from headrace.operators.accumulators.expansions import Doubles, Expansion, two_product, two_sum
from headrace.operators.buffers import Ints, Mask
from headrace.operators.segments import Segments

SUM_PARTS = 3
SQUARE_PARTS = 5
_SMALLEST, _LARGEST = 2.0**-450, 2.0**450  # between these a square and its rest are exact
_MOST_CANCELLED = 2.0**-40


class StandardDeviation(Monoid):
    """Of a sample: null for fewer than two values. Of a population: null without values. NaN if a value is not a number."""

    fields = (COUNT, *ExactColumns(SUM_PARTS).fields("s"), *ExactColumns(SQUARE_PARTS).fields("q"))

    def __init__(self, column: str, *, population: bool = False) -> None:
        self.column, self.population = column, population
        self._sums, self._squares = ExactColumns(SUM_PARTS), ExactColumns(SQUARE_PARTS)

    def tail_sizes(self, columns: Columns) -> Ints | None:
        sizes = [each for each in (self._sums.tail_sizes(columns[1:4]), self._squares.tail_sizes(columns[4:])) if each is not None]
        return sum(sizes[1:], sizes[0]) if sizes else None

    def opened(self, columns: Columns, tails: Tails | None) -> Columns:
        if tails is None:
            return columns
        first = self._sums.tail_sizes(columns[1:4])
        cuts = [0] * len(tails) if first is None else first.tolist()
        of_sums = [tail[:at] for tail, at in zip(tails, cuts, strict=True)]
        of_squares = [tail[at:] for tail, at in zip(tails, cuts, strict=True)]
        return columns[0], *self._sums.opened(columns[1:4], of_sums), *self._squares.opened(columns[4:], of_squares)

    def closed(self, columns: Columns) -> tuple[Columns, Tails | None]:
        sums, sum_tails = self._sums.closed(columns[1:4])
        squares, square_tails = self._squares.closed(columns[4:])
        tails = [each for each in (sum_tails, square_tails) if each is not None]
        return (columns[0], *sums, *squares), list(map(b"".join, zip(*tails, strict=True))) if tails else None

    def lift(self, segments: Segments) -> Columns:
        array = segments.column(self.column)
        values = doubles(array)
        sums = self._sums.reduced(self._sums.of_values(values, segments.signs), segments.segment_of)
        squares = self._squares.reduced(self._of_squares(values, segments.signs), segments.segment_of)
        return count_valid(array, segments), *sums, *squares

    def _of_squares(self, values: Doubles, weights: Ints | None) -> Expansion:
        size = np.abs(values)
        plain = ((size > _SMALLEST) & (size < _LARGEST)) | (values == 0)
        safe = np.where(plain, values, 0.0)
        product, rest = two_product(safe, safe if weights is None else safe * weights)
        squares = self._squares.of_products(product + 0.0, rest + 0.0)
        for at in np.flatnonzero(~plain).tolist():
            self._squares.put_exact(squares, at, _exact_square(float(values[at]), 1 if weights is None else int(weights[at])))
        return squares

    def merge(self, left: Columns, right: Columns) -> Columns:
        return left[0] + right[0], *self._sums.add(left[1:4], right[1:4]), *self._squares.add(left[4:], right[4:])

    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        count, sums, squares = columns[0], columns[1:4], columns[4:]
        fewer = 0 if self.population else 1
        enough = count > fewer
        number = np.where(enough, count, 2).astype(np.float64)
        with np.errstate(all="ignore"):
            excess, sure = _excess(number, sums, squares)
            deviation = np.sqrt(excess / (number * (number - fewer)))
        for at in np.flatnonzero(enough & ~sure).tolist():
            deviation[at] = _exactly(int(count[at]), self._sums.exact(sums, at), self._squares.exact(squares, at), fewer)
        return double_array(deviation, enough), None


def _exact_square(value: float, weight: int) -> ExactSum:
    if not math.isfinite(value):
        return exact(math.nan, weight)
    numerator, denominator = value.as_integer_ratio()
    return ExactSum(weight * numerator * numerator * (to_units(1.0) // (denominator * denominator)))


def _excess(number: Doubles, sums: Expansion, squares: Expansion) -> tuple[Doubles, Mask]:
    """Number times the squares' sum, less the sum's square; and where so few digits cancelled that it can be trusted."""
    scaled, rest = two_product(number, squares[0])
    rest += number * squares[1]
    square, square_rest = two_product(sums[0], sums[0])
    square_rest += 2 * sums[0] * sums[1]
    high, low = two_sum(scaled, -square)
    excess = high + (low + (rest - square_rest))
    safe = (scaled < _LARGEST) & (scaled > _SMALLEST) & (square < _LARGEST) & ((square > _SMALLEST) | (square == 0))
    return excess, safe & (excess > scaled * _MOST_CANCELLED)


def _exactly(count: int, total: ExactSum, squares: ExactSum, fewer: int) -> float:
    """With integers. Sums and squares come in units, and the square of a sum in units of units."""
    if not (total.is_finite and squares.is_finite):
        return math.nan
    unit = to_units(1.0)
    return _square_root(count * squares.units * unit - total.units * total.units, count * (count - fewer) * unit * unit)


def _square_root(numerator: int, denominator: int) -> float:
    """The root of a fraction, with more digits than a double has before it is rounded."""
    if numerator <= 0:
        return 0.0
    shift = max(0, 140 - numerator.bit_length() + denominator.bit_length())
    shift += shift % 2
    root = math.isqrt((numerator << shift) // denominator)
    try:
        return root / (1 << (shift // 2))
    except OverflowError:
        return math.inf
