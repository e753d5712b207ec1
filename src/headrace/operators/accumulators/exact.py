"""Exact sums of doubles one by one, with Python's integers: for the few that `expansions.py` has no room for, and for infinities and NaNs.

A sum is kept as an integer, in units of the square of the smallest double, so that sums of squares are whole too; with counts of what is not a number
beside it, so that everything can go again that came.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_UNIT = 1 << 2148
_COUNTS = struct.Struct("<qqq")


@dataclass(frozen=True)
class ExactSum:
    """`units` of 2 to the power of -2148, and how many infinities and NaNs came."""

    units: int = 0
    infinities: int = 0
    negative_infinities: int = 0
    nans: int = 0

    def __add__(self, other: ExactSum) -> ExactSum:
        return ExactSum(
            self.units + other.units,
            self.infinities + other.infinities,
            self.negative_infinities + other.negative_infinities,
            self.nans + other.nans,
        )

    @property
    def is_finite(self) -> bool:
        return not (self.infinities or self.negative_infinities or self.nans)

    def rounded(self) -> float:
        """The nearest double, as IEEE 754 adds: NaN, or opposite infinities, make NaN."""
        if self.is_finite:
            return to_double(self.units)
        if self.nans or (self.infinities and self.negative_infinities):
            return math.nan
        return math.inf if self.infinities else -math.inf

    def parts(self, most: int) -> list[float] | None:
        """The canonical parts, if they are doubles and not more than `most`."""
        if not self.is_finite:
            return None
        parts, rest = [], self.units
        for _ in range(most):
            part = to_double(rest)
            if math.isinf(part):
                return None
            parts.append(part)
            rest -= to_units(part)
        return None if rest else parts

    def to_bytes(self) -> bytes:
        size = self.units.bit_length() // 8 + 1
        return _COUNTS.pack(self.infinities, self.negative_infinities, self.nans) + self.units.to_bytes(size, "little", signed=True)

    @classmethod
    def from_bytes(cls, data: bytes) -> ExactSum:
        counts = _COUNTS.unpack_from(data)
        return cls(int.from_bytes(data[_COUNTS.size :], "little", signed=True), *counts)


def exact(value: float, weight: int = 1) -> ExactSum:
    """One value that comes, or with weight -1 goes."""
    if math.isnan(value):
        return ExactSum(nans=weight)
    if math.isinf(value):
        return ExactSum(infinities=weight) if value > 0 else ExactSum(negative_infinities=weight)
    return ExactSum(weight * to_units(value))


def of_parts(parts: Sequence[float]) -> ExactSum:
    return ExactSum(sum(map(to_units, parts)))


def to_units(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator * (_UNIT // denominator)


def to_double(units: int) -> float:
    """The nearest double; infinity if it is too large for one."""
    try:
        return units / _UNIT
    except OverflowError:
        return math.inf if units > 0 else -math.inf
