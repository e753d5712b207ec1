"""Aggregates that keep values of a stream: `first`, `last`, `min`, `max` and `collect`.

A stream has no retractions, so all versions of a group within a call are computed in one pass,
without going tick by tick. `last(v)`, over one group:

    stored value    segments               versions          results
    x               tick 7: v=y, v=z       before, after 7   x, z
                    tick 8: v=w            after 8           w

`min` and `max` of types of up to 64 bits are monoids (`Extreme`). The same aggregates over tables,
whose rows can be retracted, are in `retractable`.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask, expand_ranges, offsets_of
from headrace.columnar.segments import Segments
from headrace.operators.aggregates.accumulator import (
    AccumulatorOutcome,
    Columns,
    Monoid,
    RejectedRows,
    StoredValueAccumulator,
    TooManyValues,
    from_ordered,
    index_in_slot,
    lists,
    rank_values,
    to_ordered,
    valid_mask,
)


class OneValue(StoredValueAccumulator):
    """Keeps one value per group. Subclasses choose which of a segment's values is a candidate, and
    which candidate each version keeps.
    """

    def __init__(self, column: str, type: pa.DataType) -> None:
        self.column, self.type = column, type
        self.state_type = pa.struct([pa.field("value", type)])

    def advance_values(
        self, there: Mask, stored: pa.Array, segments: Segments
    ) -> AccumulatorOutcome:
        values = pa.concat_arrays([stored.field(0), segments.column(self.column)])
        candidates = np.full(segments.versions, -1)
        candidates[segments.initial_versions[there]] = np.arange(len(stored))
        candidates[segments.after] = self.find_candidates(values, len(stored), segments)
        chosen = self.choose(values, candidates, segments)
        results = values.take(pa.array(chosen, mask=chosen < 0))
        newest = chosen[np.append(segments.initial_versions[1:], segments.versions) - 1]
        states = pa.StructArray.from_arrays(
            [values.take(pa.array(newest[newest >= 0]))], fields=list(self.state_type)
        )
        return self.pack_values(results, newest >= 0, states)

    def find_candidates(self, values: pa.Array, first_row: int, segments: Segments) -> Ints:
        """The position of the candidate of each segment, -1 if it has none. Positions of the
        segments' rows begin at `first_row`.
        """
        raise NotImplementedError

    def choose(self, values: pa.Array, candidates: Ints, segments: Segments) -> Ints:
        """The position of the value that each version keeps, -1 for none."""
        raise NotImplementedError


def key_starts(segments: Segments) -> Ints:
    """For each version, the first version of its group."""
    return np.repeat(
        segments.initial_versions, np.diff(segments.initial_versions, append=segments.versions)
    )


class First(OneValue):
    """The first value, or the first that is not null."""

    def __init__(self, column: str, type: pa.DataType, *, ignore_nulls: bool) -> None:
        super().__init__(column, type)
        self.ignore_nulls = ignore_nulls

    def find_candidates(self, values: pa.Array, first_row: int, segments: Segments) -> Ints:
        if not self.ignore_nulls:
            return first_row + segments.starts
        rows = np.arange(first_row, len(values))
        counts = values.is_valid().to_numpy(zero_copy_only=False)[first_row:]
        best = np.minimum.reduceat(np.where(counts, rows, len(values)), segments.starts)
        return np.where(best < len(values), best, -1)

    def choose(self, values: pa.Array, candidates: Ints, segments: Segments) -> Ints:  # noqa: ARG002
        versions = np.arange(len(candidates))
        earliest = np.minimum.reduceat(
            np.where(candidates >= 0, versions, len(versions)), segments.initial_versions
        )
        of_key = np.repeat(earliest, np.diff(segments.initial_versions, append=segments.versions))
        return np.where(versions >= of_key, candidates[np.minimum(of_key, len(versions) - 1)], -1)


class Last(First):
    """The last value, or the last that is not null."""

    def find_candidates(self, values: pa.Array, first_row: int, segments: Segments) -> Ints:
        if not self.ignore_nulls:
            return first_row + segments.starts + segments.sizes - 1
        rows = np.arange(first_row, len(values))
        counts = values.is_valid().to_numpy(zero_copy_only=False)[first_row:]
        return np.maximum.reduceat(np.where(counts, rows, -1), segments.starts)

    def choose(self, values: pa.Array, candidates: Ints, segments: Segments) -> Ints:  # noqa: ARG002
        latest = np.maximum.accumulate(np.where(candidates >= 0, np.arange(len(candidates)), -1))
        return np.where(latest >= key_starts(segments), candidates[latest], -1)


class RankedExtreme(OneValue):
    """The smallest or largest value, of types that do not fit 64 bits: STRING, BINARY, DECIMAL."""

    def __init__(self, column: str, type: pa.DataType, *, largest: bool) -> None:
        super().__init__(column, type)
        self.largest = largest

    def find_candidates(self, values: pa.Array, first_row: int, segments: Segments) -> Ints:
        ranks = self._ranks(values)[first_row:]
        best = np.minimum.reduceat(ranks, segments.starts)
        of_rank = np.full(len(values) + 1, -1)
        valid = ranks < len(values)
        of_rank[ranks[valid][::-1]] = np.flatnonzero(valid)[::-1] + first_row
        return of_rank[best]

    def choose(self, values: pa.Array, candidates: Ints, segments: Segments) -> Ints:
        """The best value so far. The ranks of each group are shifted below those of the group
        before, so that one running minimum serves all groups.
        """
        ranks = np.append(self._ranks(values), len(values))[candidates]
        below = np.repeat(
            np.arange(len(segments.firsts)),
            np.diff(segments.initial_versions, append=segments.versions),
        ) * (len(values) + 1)
        best = np.minimum.accumulate(ranks - below)
        best_version = np.maximum.accumulate(
            np.where(ranks - below == best, np.arange(len(ranks)), -1)
        )
        return candidates[best_version]

    def _ranks(self, values: pa.Array) -> Ints:
        """The rank of each value, the best first; nulls come last."""
        valid = values.is_valid().to_numpy(zero_copy_only=False)
        ranks = np.full(len(values), len(values))
        codes, distinct = rank_values(values.drop_null())
        ranks[valid] = len(distinct) - 1 - codes if self.largest else codes
        return ranks


class Collect(StoredValueAccumulator):
    """All values that are not null, in order; values above the limit are rejected. Each version of
    a list begins with the one before.
    """

    def __init__(
        self, column: str, type: pa.DataType, *, max_values: int, stop_when_full: bool
    ) -> None:
        self.column = column
        self.type = type
        self.max_values = max_values
        self.stop_when_full = stop_when_full
        self.state_type = pa.struct([pa.field("values", pa.list_(type))])

    def advance_values(
        self, there: Mask, stored: pa.Array, segments: Segments
    ) -> AccumulatorOutcome:
        column = segments.column(self.column)
        rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        had = np.zeros(len(there), np.int64)
        had[there] = np.diff(offsets_of(stored.field(0)))
        key = segments.key_of[segments.segment_of[rows]]
        inside = index_in_slot(key) + had[key] < self.max_values
        if self.stop_when_full and not inside.all():
            raise TooManyValues(int(key[~inside][0]), self.max_values)
        rejected = (
            ()
            if inside.all()
            else (
                RejectedRows(
                    rows[~inside],
                    f"the group has {self.max_values} values of {self.column!r} already",
                ),
            )
        )
        lengths, values = self._lists(had, stored, column, key[inside], rows[inside])
        results = self._versions(had, lengths, values, segments.segment_of[rows[inside]], segments)
        states = pa.StructArray.from_arrays(
            [lists(lengths[lengths > 0], values)], fields=list(self.state_type)
        )
        return self.pack_values(results, lengths > 0, states, rejected=rejected)

    def _lists(
        self, had: Ints, stored: pa.Array, column: pa.Array, key: Ints, rows: Ints
    ) -> tuple[Ints, pa.Array]:
        """The newest list of each group: stored values, then new ones."""
        old = stored.field(0).flatten()
        of_key = np.concatenate([np.repeat(np.arange(len(had)), had), key])
        at = np.concatenate([np.arange(len(old)), len(old) + rows])
        order = np.argsort(of_key, kind="stable")
        return had + np.bincount(key, minlength=len(had)), pa.concat_arrays([old, column]).take(
            pa.array(at[order])
        )

    @staticmethod
    def _versions(
        had: Ints, lengths: Ints, values: pa.Array, segment: Ints, segments: Segments
    ) -> pa.Array:
        """The list of each version: the prefix of the newest list with the values up to then."""
        more = np.zeros(segments.versions, np.int64)
        more[segments.after] = np.bincount(segment, minlength=len(segments))
        more[segments.initial_versions] = had
        total = np.cumsum(more)
        first = total[segments.initial_versions] - had
        per_key = np.diff(segments.initial_versions, append=segments.versions)
        length = total - np.repeat(first, per_key)
        start = np.repeat(np.cumsum(lengths) - lengths, per_key)
        return lists(length, values.take(pa.array(expand_ranges(start, length))))


class Extreme(Monoid):
    """The smallest or largest value, of types of up to 64 bits.

    `code` is an integer that sorts as the value does, inverted for `min`, so that the largest code
    is kept. Without values, `some` and `code` are 0.
    """

    fields = (("some", "u1"), ("code", "<u8"))

    def __init__(self, column: str, type: pa.DataType, *, largest: bool) -> None:
        self.column = column
        self.type = type
        self.largest = largest

    def lift(self, segments: Segments) -> Columns:
        array = segments.column(self.column)
        codes, valid = self._flip(to_ordered(array)), valid_mask(array)
        if valid is None:
            return np.ones(len(segments), np.uint8), np.maximum.reduceat(codes, segments.starts)
        codes[~valid] = 0
        return np.maximum.reduceat(valid.astype(np.uint8), segments.starts), np.maximum.reduceat(
            codes, segments.starts
        )

    def merge(self, left: Columns, right: Columns) -> Columns:
        return np.maximum(left[0], right[0]), np.maximum(left[1], right[1])

    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        some = columns[0] != 0
        return from_ordered(self._flip(columns[1]), some, self.type), None

    def _flip(
        self, codes: np.ndarray[tuple[int], np.dtype[np.uint64]]
    ) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """The codes, inverted for `min`; inverting twice gives the codes back."""
        return codes if self.largest else ~codes
