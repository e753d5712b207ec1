"""What can be kept of a stream, whose rows only come: the first and the last value, the smallest
and the largest of any type, and the values in their order.

Nothing goes, so a key's whole history within a call is worked out in one pass, without taking its
ticks one after the other.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask, offsets_of, runs
from headrace.columnar.segments import Segments
from headrace.operators.aggregates.accumulator import (
    Advanced,
    Columns,
    Full,
    Keeper,
    LeftOut,
    Monoid,
    from_ordered,
    lists,
    place_in_slot,
    places,
    to_ordered,
    valid_mask,
)


class OneValue(Keeper):
    """Keeps one value of each key. Subclasses choose, among the candidates of each version, the one
    that stands from then on.
    """

    def __init__(self, column: str, type: pa.DataType) -> None:
        self.column, self.type = column, type
        self.state_type = pa.struct([pa.field("value", type)])

    def keep(self, there: Mask, stored: pa.Array, segments: Segments) -> Advanced:
        values = pa.concat_arrays([stored.field(0), segments.column(self.column)])
        candidates = np.full(segments.versions, -1)
        candidates[segments.before_all[there]] = np.arange(len(stored))
        candidates[segments.after] = self.candidates(values, len(stored), segments)
        chosen = self.chosen(values, candidates, segments)
        results = values.take(pa.array(chosen, mask=chosen < 0))
        newest = chosen[np.append(segments.before_all[1:], segments.versions) - 1]
        states = pa.StructArray.from_arrays(
            [values.take(pa.array(newest[newest >= 0]))], fields=list(self.state_type)
        )
        return self.kept(results, newest >= 0, states)

    def candidates(self, values: pa.Array, first_row: int, segments: Segments) -> Ints:
        """Of each segment the position of the one value that counts, -1 if none does; its rows
        begin at `first_row`.
        """
        raise NotImplementedError

    def chosen(self, values: pa.Array, candidates: Ints, segments: Segments) -> Ints:
        """For each version the position of the value that stands, -1 for none."""
        raise NotImplementedError


def key_starts(segments: Segments) -> Ints:
    """For each version, the first version of its key."""
    return np.repeat(segments.before_all, np.diff(segments.before_all, append=segments.versions))


class First(OneValue):
    """The first value; without nulls if they are ignored."""

    def __init__(self, column: str, type: pa.DataType, *, ignore_nulls: bool) -> None:
        super().__init__(column, type)
        self.ignore_nulls = ignore_nulls

    def candidates(self, values: pa.Array, first_row: int, segments: Segments) -> Ints:
        if not self.ignore_nulls:
            return first_row + segments.starts
        rows = np.arange(first_row, len(values))
        counts = values.is_valid().to_numpy(zero_copy_only=False)[first_row:]
        best = np.minimum.reduceat(np.where(counts, rows, len(values)), segments.starts)
        return np.where(best < len(values), best, -1)

    def chosen(self, values: pa.Array, candidates: Ints, segments: Segments) -> Ints:  # noqa: ARG002
        versions = np.arange(len(candidates))
        earliest = np.minimum.reduceat(
            np.where(candidates >= 0, versions, len(versions)), segments.before_all
        )
        of_key = np.repeat(earliest, np.diff(segments.before_all, append=segments.versions))
        return np.where(versions >= of_key, candidates[np.minimum(of_key, len(versions) - 1)], -1)


class Last(First):
    """The last value; without nulls if they are ignored."""

    def candidates(self, values: pa.Array, first_row: int, segments: Segments) -> Ints:
        if not self.ignore_nulls:
            return first_row + segments.starts + segments.sizes - 1
        rows = np.arange(first_row, len(values))
        counts = values.is_valid().to_numpy(zero_copy_only=False)[first_row:]
        return np.maximum.reduceat(np.where(counts, rows, -1), segments.starts)

    def chosen(self, values: pa.Array, candidates: Ints, segments: Segments) -> Ints:  # noqa: ARG002
        latest = np.maximum.accumulate(np.where(candidates >= 0, np.arange(len(candidates)), -1))
        return np.where(latest >= key_starts(segments), candidates[latest], -1)


class RankedExtreme(OneValue):
    """The smallest or the largest value, of types too wide for `extremes.py`: STRING, BINARY,
    DECIMAL.
    """

    def __init__(self, column: str, type: pa.DataType, *, largest: bool) -> None:
        super().__init__(column, type)
        self.largest = largest

    def candidates(self, values: pa.Array, first_row: int, segments: Segments) -> Ints:
        ranks = self._ranks(values)[first_row:]
        best = np.minimum.reduceat(ranks, segments.starts)
        of_rank = np.full(len(values) + 1, -1)
        valid = ranks < len(values)
        of_rank[ranks[valid][::-1]] = np.flatnonzero(valid)[::-1] + first_row
        return of_rank[best]

    def chosen(self, values: pa.Array, candidates: Ints, segments: Segments) -> Ints:
        """The best so far. Each key's ranks are moved below those of the key before, so that one
        pass serves all keys.
        """
        ranks = np.append(self._ranks(values), len(values))[candidates]
        below = np.repeat(
            np.arange(len(segments.firsts)), np.diff(segments.before_all, append=segments.versions)
        ) * (len(values) + 1)
        best = np.minimum.accumulate(ranks - below)
        found = np.maximum.accumulate(np.where(ranks - below == best, np.arange(len(ranks)), -1))
        return candidates[found]

    def _ranks(self, values: pa.Array) -> Ints:
        """Each value's place in the order, the best first; of a null, behind all."""
        valid = values.is_valid().to_numpy(zero_copy_only=False)
        ranks = np.full(len(values), len(values))
        codes, distinct = places(values.drop_null())
        ranks[valid] = len(distinct) - 1 - codes if self.largest else codes
        return ranks


class Collect(Keeper):
    """All values that are not null, in their order; what comes when there are `most` is left out.
    Each version of a key's list begins like the last.
    """

    def __init__(self, column: str, type: pa.DataType, *, most: int, stop: bool) -> None:
        self.column, self.type, self.most, self.stop = column, type, most, stop
        self.state_type = pa.struct([pa.field("values", pa.list_(type))])

    def keep(self, there: Mask, stored: pa.Array, segments: Segments) -> Advanced:
        column = segments.column(self.column)
        rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        had = np.zeros(len(there), np.int64)
        had[there] = np.diff(offsets_of(stored.field(0)))
        key = segments.key_of[segments.segment_of[rows]]
        inside = place_in_slot(key) + had[key] < self.most
        if self.stop and not inside.all():
            raise Full(int(key[~inside][0]), self.most)
        left_out = (
            ()
            if inside.all()
            else (
                LeftOut(
                    rows[~inside], f"the group has {self.most} values of {self.column!r} already"
                ),
            )
        )
        lengths, values = self._lists(had, stored, column, key[inside], rows[inside])
        results = self._versions(had, lengths, values, segments.segment_of[rows[inside]], segments)
        states = pa.StructArray.from_arrays(
            [lists(lengths[lengths > 0], values)], fields=list(self.state_type)
        )
        return self.kept(results, lengths > 0, states, left_out=left_out)

    def _lists(
        self, had: Ints, stored: pa.Array, column: pa.Array, key: Ints, rows: Ints
    ) -> tuple[Ints, pa.Array]:
        """The newest list of each key: old values, then new ones."""
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
        more = np.zeros(segments.versions, np.int64)
        more[segments.after] = np.bincount(segment, minlength=len(segments))
        more[segments.before_all] = had
        total = np.cumsum(more)
        first = total[segments.before_all] - had
        per_key = np.diff(segments.before_all, append=segments.versions)
        length = total - np.repeat(first, per_key)
        start = np.repeat(np.cumsum(lengths) - lengths, per_key)
        return lists(length, values.take(pa.array(runs(start, length))))


# The smallest and the largest value of a stream, for types of up to 64 bits: values as numbers in
# the same order, of which the largest is kept.
#
# Others, and tables, whose rows can go again, are in `multiset.py`.


class Extreme(Monoid):
    """`code` is a value's place in the order of its type, turned round for the smallest; 0 and
    `some` = 0 where there is none.
    """

    fields = (("some", "u1"), ("code", "<u8"))

    def __init__(self, column: str, type: pa.DataType, *, largest: bool) -> None:
        self.column, self.type, self.largest = column, type, largest

    def lift(self, segments: Segments) -> Columns:
        array = segments.column(self.column)
        codes, valid = self._turned(to_ordered(array)), valid_mask(array)
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
        return from_ordered(self._turned(columns[1]), some, self.type), None

    def _turned(
        self, codes: np.ndarray[tuple[int], np.dtype[np.uint64]]
    ) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return codes if self.largest else ~codes
