"""What an accumulator is: one aggregate's part of the state of every group.

An accumulator advances all groups at once. Most accumulators are *monoids*: a segment's rows become
a small state (`lift`), and states are merged (`merge`). Merging is exact, so the order of merges
does not matter, and the result does not depend on batches, shards, or partial aggregation before
the shuffle. `sum(v)`, over one group with two segments (ticks):

    stored state      segments             lifted       versions         results
    (rows 2, sum 5)   tick 7: v=1, v=2     (2, 3)       before: (2, 5)   5
                      tick 8: v=4          (1, 4)       after 7: (4, 8)  8
                                                        after 8: (5, 12) 12

A *version* of a group is its state before the call and after each of its segments. Accumulators
that cannot merge (`collect`, `count_distinct`, aggregates over tables) keep a value of an Arrow
type per group: `StoredValueAccumulator`. `factory` chooses the accumulator for an aggregate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar import row_codec
from headrace.columnar.buffers import Ints, Mask, expand_ranges, fixed_width_values
from headrace.columnar.segments import Segments
from headrace.columnar.wide_integer import Wide

Columns = tuple[npt.NDArray[Any], ...]
"""The fixed-width part of many groups' states: one array for each field."""

Tails = Sequence[bytes]
"""The part of each group's state that has no fixed width."""


@dataclass(frozen=True)
class RejectedRows:
    """Rows that an aggregate could not accept (positions in the segments' order), and why."""

    rows: Ints
    reason: str


@dataclass(frozen=True)
class AccumulatorOutcome:
    """The outcome of advancing all groups: a result for each version, and the newest state of each
    group.
    """

    results: pa.Array
    columns: Columns
    tails: Tails | None = None
    unknown: Mask | None = None  # versions whose result is null because it is unknown
    rejected: tuple[RejectedRows, ...] = ()
    left_out: int = 0  # how many more rows than before are left out of results, which are unknown


class Accumulator(ABC):
    """One aggregate's part of every group's state.

    `fields` have a fixed width for every group; `tail_sizes` says how many bytes follow them.
    """

    fields: ClassVar[tuple[tuple[str, str], ...]] = ()
    combinable: bool = False

    def tail_sizes(self, columns: Columns) -> Ints | None:  # noqa: ARG002
        """The bytes of each group beyond its fields; None if no group has any."""
        return None

    @abstractmethod
    def advance(
        self, columns: Columns, tails: Tails | None, segments: Segments
    ) -> AccumulatorOutcome:
        """Advance the states of all groups (zeros for a new one) through all segments."""


class Monoid(Accumulator):
    """An accumulator with `lift`, `merge` and `result`. A state of zeros must stand for no rows."""

    combinable = True

    @abstractmethod
    def lift(self, segments: Segments) -> Columns:
        """The state of each segment's rows alone."""

    @abstractmethod
    def merge(self, left: Columns, right: Columns) -> Columns:
        """The state of both sides' rows together, pair by pair. Exact: merges may happen in any
        order.
        """

    @abstractmethod
    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        """The result of each state, and for which states it is unknown."""

    def over_ranges(self, columns: Columns, first: Ints, stop: Ints) -> Columns | None:  # noqa: ARG002
        """The merged states of the ranges [first, stop), by subtraction from one running total.

        None for accumulators that cannot subtract, or where the result would not be exact.
        """
        return None

    def open_states(self, columns: Columns, tails: Tails | None) -> Columns:  # noqa: ARG002
        """Stored states in the form in which they are merged."""
        return columns

    def close_states(self, columns: Columns) -> tuple[Columns, Tails | None]:
        """Merged states in the form in which they are stored."""
        return columns, None

    def advance(
        self, columns: Columns, tails: Tails | None, segments: Segments
    ) -> AccumulatorOutcome:
        newest, versions = self._advance_versions(
            self.open_states(columns, tails), self.lift(segments), segments
        )
        return self._outcome(newest, versions)

    def advance_by_partials(
        self,
        columns: Columns,
        tails: Tails | None,
        partials: tuple[Columns, Tails | None],
        segments: Segments,
    ) -> AccumulatorOutcome:
        """Advance the states by rows that are states themselves, from partial aggregation."""
        open_states = self.open_states(columns, tails)
        lifted = self._reduce(self.open_states(*partials), segments)
        return self._outcome(*self._advance_versions(open_states, lifted, segments))

    def _outcome(self, newest: Columns, versions: Columns) -> AccumulatorOutcome:
        results, unknown = self.result(versions)
        columns, tails = self.close_states(newest)
        return AccumulatorOutcome(results=results, columns=columns, tails=tails, unknown=unknown)

    def _advance_versions(
        self, states: Columns, lifted: Columns, segments: Segments
    ) -> tuple[Columns, Columns]:
        """The newest states, and those of all versions."""
        versions = tuple(
            np.empty((segments.versions, *column.shape[1:]), column.dtype) for column in states
        )
        _put(versions, segments.initial_versions, states)
        if segments.has_one_round:
            states = self.merge(states, lifted)
            _put(versions, segments.after, states)
            return states, versions
        for turn in segments.rounds():
            merged = self.merge(_take(versions, segments.after[turn] - 1), _take(lifted, turn))
            _put(versions, segments.after[turn], merged)
        last = np.append(segments.initial_versions[1:], segments.versions) - 1
        return _take(versions, last), versions

    def _reduce(self, states: Columns, segments: Segments) -> Columns:
        """One state per segment, from one per row."""
        return reduce_segments(self.merge, _take(states, segments.order), segments.segment_of)


def range_sums(values: Ints, first: Ints, stop: Ints) -> Ints:
    """The sums of ranges. Overflow of the running total cancels out if the sums themselves fit."""
    running = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=running[1:])
    sums: Ints = running[stop] - running[first]
    return sums


def reduce_segments(
    merge: Callable[[Columns, Columns], Columns], states: Columns, segment_of: Ints
) -> Columns:
    """Merge neighbours of the same segment, pair by pair, until each segment has one state.

    The number of passes is the logarithm of the longest segment.
    """
    while len(segment_of) and (segment_of[1:] == segment_of[:-1]).any():
        begins = np.ones(len(segment_of), np.bool_)
        begins[1:] = segment_of[1:] != segment_of[:-1]
        position = np.arange(len(segment_of))
        even = (position - np.maximum.accumulate(np.where(begins, position, 0))) % 2 == 0
        left = np.flatnonzero(even)
        paired = np.append(~even, False)[left + 1]
        merged = _take(states, left)
        _put(merged, paired, merge(_take(merged, paired), _take(states, left[paired] + 1)))
        states, segment_of = merged, segment_of[left]
    return states


def _take(columns: Columns, which: Ints | Mask) -> Columns:
    return tuple(column[which] for column in columns)


def _put(columns: Columns, where: Ints | Mask, values: Columns) -> None:
    for column, value in zip(columns, values, strict=True):
        column[where] = value


# Arrow columns as numpy arrays and back. Nulls become zeros; masks say where they are.


Doubles = npt.NDArray[np.float64]


def valid_mask(array: pa.Array) -> Mask | None:
    """Which values are not null; None if all are valid."""
    return array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None


def integers(array: pa.Array) -> Ints:
    """Integers, dates, times and intervals as 64-bit integers."""
    width = array.type.bit_width // 8
    letter = "u" if pa.types.is_unsigned_integer(array.type) else "i"
    values = fixed_width_values(array, f"<{letter}{width}")
    valid = valid_mask(array)
    return (
        values.astype(np.int64, copy=False)
        if valid is None
        else np.where(valid, values, 0).astype(np.int64, copy=False)
    )


def doubles(array: pa.Array) -> Doubles:
    """Numbers as doubles. Decimals and large integers are rounded to the nearest."""
    if not pa.types.is_float64(array.type):
        array = array.cast(pa.float64(), safe=False)
    values: Doubles = array.fill_null(0.0).to_numpy(zero_copy_only=False)
    return values


def decimal_words(array: pa.Array) -> Wide:
    """The low and high words of decimals."""
    words = fixed_width_values(array, "<u8").reshape(-1, 2)
    valid = valid_mask(array)
    if valid is not None:
        words = np.where(valid[:, None], words, np.uint64(0))
    return words[:, 0].copy(), words[:, 1].copy()


def integer_array(values: Ints, some: Mask, type: pa.DataType) -> pa.Array:
    """Integers, or values of a type that Arrow stores as integers; null where `some` is false."""
    plain = pa.array(values, pa.int64(), mask=None if some.all() else ~some)
    return plain if type == pa.int64() else plain.cast(type)


def double_array(values: Doubles, some: Mask) -> pa.Array:
    """Doubles; null where `some` is false."""
    return pa.array(values, pa.float64(), mask=None if some.all() else ~some)


def decimal_array(wide: Wide, some: Mask, type: pa.DataType) -> pa.Array:
    """Decimals from their low and high words; null where `some` is false."""
    data = np.where(some[:, None], np.stack(wide[:2], axis=1), np.uint64(0))
    bitmap = None if some.all() else pa.py_buffer(np.packbits(some, bitorder="little"))
    return pa.Array.from_buffers(
        type, len(some), [bitmap, pa.py_buffer(np.ascontiguousarray(data))]
    )


# Accumulators whose state has no fixed width


class TooManyValues(Exception):
    """A group would exceed its limit of values, and the aggregate is to stop the query."""

    def __init__(self, key: int, max_values: int) -> None:
        super().__init__(key, max_values)
        self.key, self.max_values = key, max_values


class StoredValueAccumulator(Accumulator):
    """An accumulator that stores a value of `state_type` for each group that has one."""

    fields = (("size", "<u4"),)
    state_type: pa.DataType

    def tail_sizes(self, columns: Columns) -> Ints | None:
        sizes: Ints = columns[0].astype(np.int64)
        return sizes if sizes.any() else None

    def advance(
        self, columns: Columns, tails: Tails | None, segments: Segments
    ) -> AccumulatorOutcome:
        there = columns[0] != 0
        stored = row_codec.decode(
            [] if tails is None else [tail for tail in tails if tail], self.state_type
        )
        return self.advance_values(there, stored, segments)

    @abstractmethod
    def advance_values(
        self, there: Mask, stored: pa.Array, segments: Segments
    ) -> AccumulatorOutcome:
        """Advance the stored values through all segments.

        `there` says which groups have a value; `stored` are those values, in order of group.
        """

    def pack_values(
        self,
        results: pa.Array,
        there: Mask,
        states: pa.Array,
        *,
        unknown: Mask | None = None,
        rejected: tuple[RejectedRows, ...] = (),
        left_out: int = 0,
    ) -> AccumulatorOutcome:
        """The outcome, with `states` as the new values of the groups for which `there` is true."""
        tails = np.full(len(there), b"", dtype=object)
        tails[there] = row_codec.encode(states)
        sizes = np.fromiter(map(len, tails), np.uint32, len(tails))
        return AccumulatorOutcome(
            results=results,
            columns=(sizes,),
            tails=tails.tolist(),
            unknown=unknown,
            rejected=rejected,
            left_out=left_out,
        )


class Bags:
    """A bag of entries for each group, each entry an integer in every column.

    The entries of all groups lie in shared arrays; those of some groups are taken out, changed and
    put back at a time.
    """

    def __init__(self, lengths: Ints, *columns: npt.NDArray[Any]) -> None:
        self.lengths = lengths.copy()
        self._starts = np.cumsum(lengths) - lengths
        self._columns = [np.array(column, np.int64) for column in columns]
        self._used = int(lengths.sum())

    def of(self, keys: Ints) -> tuple[Ints, ...]:
        """The entries of some groups: the index into `keys` of each entry's group, and
        its columns.
        """
        lengths = self.lengths[keys]
        at = expand_ranges(self._starts[keys], lengths)
        return np.repeat(np.arange(len(keys)), lengths), *(column[at] for column in self._columns)

    def replace(self, keys: Ints, slots: Ints, *columns: Ints) -> None:
        """Replace the entries of some groups; `slots` are the indices into `keys` of each entry's
        group, in order.
        """
        self._make_room(len(slots))
        lengths = np.bincount(slots, minlength=len(keys))
        self._starts[keys] = self._used + np.cumsum(lengths) - lengths
        self.lengths[keys] = lengths
        for mine, fresh in zip(self._columns, columns, strict=True):
            mine[self._used : self._used + len(slots)] = fresh
        self._used += len(slots)

    def _make_room(self, more: int) -> None:
        """Make room for more entries. Replaced entries stay behind as garbage until the arrays are
        full; then live entries move to arrays of twice their size.
        """
        if self._used + more <= len(self._columns[0]):
            return
        at = expand_ranges(self._starts, self.lengths)
        self._used = len(at)
        self._starts = np.cumsum(self.lengths) - self.lengths
        room = 2 * (self._used + more)
        for number, column in enumerate(self._columns):
            self._columns[number] = np.empty(room, np.int64)
            self._columns[number][: self._used] = column[at]


def first_of_each(slots: Ints) -> Ints:
    """For each entry, the position of the first entry of its slot; slots are in order."""
    begins = np.ones(len(slots), np.bool_)
    begins[1:] = slots[1:] != slots[:-1]
    return np.maximum.accumulate(np.where(begins, np.arange(len(slots)), 0))


def index_in_slot(slots: Ints) -> Ints:
    """0, 1, 2, … within each slot; slots are in order."""
    return np.arange(len(slots)) - first_of_each(slots)


def lists(lengths: Ints, values: pa.Array) -> pa.Array:
    """The values as lists of the given lengths."""
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values)


# Values as integers in the same order, and back: 64-bit codes for types of up to 64 bits, ranks for
# all others. NaN is the largest of all, and -0.0 comes before 0.0.


Codes = npt.NDArray[np.uint64]
_TOP = np.uint64(1 << 63)


def has_order_in_64_bits(kind: pa.DataType) -> bool:
    """Whether values of the type can be mapped to 64-bit integers in the same order."""
    return bool(
        pa.types.is_boolean(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_temporal(kind)
    )


def to_ordered(array: pa.Array) -> Codes:
    """The code of each value; arbitrary for nulls."""
    kind = array.type
    if pa.types.is_boolean(kind):
        truths: Codes = array.fill_null(False).to_numpy(zero_copy_only=False).astype(np.uint64)
        return truths
    if not pa.types.is_floating(kind):
        return integers(array).view(np.uint64) ^ _TOP
    values = array.fill_null(0).to_numpy(zero_copy_only=False).astype(np.float64)
    values[np.isnan(values)] = np.nan
    bits: Codes = values.view(np.uint64)
    return np.where(bits & _TOP, ~bits, bits | _TOP)


def from_ordered(codes: Codes, some: Mask, kind: pa.DataType) -> pa.Array:
    """The value of each code; null where `some` is false."""
    mask = None if some.all() else ~some
    if pa.types.is_boolean(kind):
        return pa.array(codes != 0, kind, mask=mask)
    if pa.types.is_floating(kind):
        bits = np.where(codes & _TOP, codes ^ _TOP, ~codes)
        with np.errstate(over="ignore", invalid="ignore"):
            return pa.array(bits.view(np.float64).astype(kind.to_pandas_dtype()), kind, mask=mask)
    values = (codes ^ _TOP).view(np.int64).copy()
    values[~some] = 0
    plain = pa.array(values.astype(f"i{kind.bit_width // 8}"), mask=mask)
    return plain if plain.type == kind else plain.view(kind)


def rank_values(array: pa.Array) -> tuple[Ints, pa.Array]:
    """The rank of each value (none null) among the distinct ones, and these in order."""
    if has_order_in_64_bits(array.type):
        codes, found = np.unique(to_ordered(array), return_inverse=True)
        return found.astype(np.int64), from_ordered(
            codes, np.ones(len(codes), np.bool_), array.type
        )
    encoded = array.dictionary_encode()
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank[encoded.indices.to_numpy()], encoded.dictionary.take(pa.array(order))
