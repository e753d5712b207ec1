"""Counts: of rows, and of values that are not null."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headrace.operators.accumulators.accumulator import Columns, Monoid, range_sums
from headrace.operators.accumulators.arrays import valid_mask
from headrace.operators.buffers import Ints, Mask
from headrace.operators.segments import Segments

COUNT = ("n", "<i8")


class CountRows(Monoid):
    """How many rows a group has. Every kernel keeps it: a group without rows is none. `hr.agg.count()` shows it."""

    fields = (COUNT,)

    def lift(self, segments: Segments) -> Columns:
        return (segments.sizes if segments.signs is None else np.add.reduceat(segments.signs, segments.starts),)

    def merge(self, left: Columns, right: Columns) -> Columns:
        return (left[0] + right[0],)

    def over_ranges(self, columns: Columns, first: Ints, stop: Ints) -> Columns | None:
        return (range_sums(columns[0], first, stop),)

    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        return pa.array(columns[0], pa.int64()), None


class CountValues(CountRows):
    """How many values of a column are not null."""

    def __init__(self, column: str) -> None:
        self.column = column

    def lift(self, segments: Segments) -> Columns:
        return (count_valid(segments.column(self.column), segments),)


def count_valid(array: pa.Array, segments: Segments) -> Ints:
    """The values of each segment that are not null: those that come less those that go."""
    valid, signs = valid_mask(array), segments.signs
    if valid is None:
        return segments.sizes if signs is None else np.add.reduceat(signs, segments.starts)
    ones = valid.astype(np.int64) if signs is None else np.where(valid, signs, 0)
    return np.add.reduceat(ones, segments.starts)
