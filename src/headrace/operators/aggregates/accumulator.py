"""What an accumulator is: one aggregate's part of every key's state, worked on for all keys at
once.

Most are *monoids*: a segment's rows become a small state (`lift`), states are put together
(`merge`), and the order does not matter, because merging is exact. That one property makes the
answer independent of batches, shards and of combining before the shuffle.
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
from headrace.columnar.buffers import Ints, Mask, fixed_width, runs
from headrace.columnar.segments import Segments
from headrace.columnar.wide_integer import Wide

Columns = tuple[npt.NDArray[Any], ...]
"""Part of the state of many keys: one array for each field."""

Tails = Sequence[bytes]
"""What does not fit into fields, for each key."""


@dataclass(frozen=True)
class LeftOut:
    """Rows (positions in the segments' order) that an aggregate could not take in, and why."""

    rows: Ints
    reason: str


@dataclass(frozen=True)
class Advanced:
    """What became of all keys: a result for each version of each key, and the newest state of each
    key.
    """

    results: pa.Array
    columns: Columns
    tails: Tails | None = None
    lost: Mask | None = None  # versions whose result is null because it could not be told
    left_out: tuple[LeftOut, ...] = ()


class Accumulator(ABC):
    """`fields` have a fixed width for every key; `tail_sizes` says how many more bytes a key has
    behind them.
    """

    fields: ClassVar[tuple[tuple[str, str], ...]] = ()
    combinable: bool = False

    def tail_sizes(self, columns: Columns) -> Ints | None:  # noqa: ARG002
        """None if no key has more than its fields."""
        return None

    @abstractmethod
    def advance(self, columns: Columns, tails: Tails | None, segments: Segments) -> Advanced:
        """From the states of all keys (zeros for a new one) through all segments."""


class Monoid(Accumulator):
    """Lift, merge, result. A state of zeros must be that of no rows."""

    combinable = True

    @abstractmethod
    def lift(self, segments: Segments) -> Columns:
        """The state of each segment's rows alone."""

    @abstractmethod
    def merge(self, left: Columns, right: Columns) -> Columns:
        """The state of both sides' rows together, pair by pair. Exact: it does not matter in which
        order states are merged.
        """

    @abstractmethod
    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        """What each state amounts to, and for which it could not be told."""

    def over_ranges(self, columns: Columns, first: Ints, stop: Ints) -> Columns | None:  # noqa: ARG002
        """What the states from each `first` up to but not including each `stop` amount to, for
        those that can be had by taking away: one running total instead of many merges. None if that
        is not so, or would not be exact.
        """
        return None

    def opened(self, columns: Columns, tails: Tails | None) -> Columns:  # noqa: ARG002
        """States as they are worked on, from what was stored."""
        return columns

    def closed(self, columns: Columns) -> tuple[Columns, Tails | None]:
        """States as they are stored."""
        return columns, None

    def advance(self, columns: Columns, tails: Tails | None, segments: Segments) -> Advanced:
        newest, versions = self._through(self.opened(columns, tails), self.lift(segments), segments)
        return self._advanced(newest, versions)

    def advance_by(
        self,
        columns: Columns,
        tails: Tails | None,
        partials: tuple[Columns, Tails | None],
        segments: Segments,
    ) -> Advanced:
        """The same from rows that are states themselves, made by a kernel's `combine`."""
        opened = self.opened(columns, tails)
        lifted = self._reduced(self.opened(*partials), segments)
        return self._advanced(*self._through(opened, lifted, segments))

    def _advanced(self, newest: Columns, versions: Columns) -> Advanced:
        results, lost = self.result(versions)
        columns, tails = self.closed(newest)
        return Advanced(results, columns, tails, lost)

    def _through(
        self, states: Columns, lifted: Columns, segments: Segments
    ) -> tuple[Columns, Columns]:
        """The newest states, and those of all versions."""
        versions = tuple(
            np.empty((segments.versions, *column.shape[1:]), column.dtype) for column in states
        )
        _place(versions, segments.before_all, states)
        if segments.one_round:
            states = self.merge(states, lifted)
            _place(versions, segments.after, states)
            return states, versions
        for turn in segments.rounds():
            merged = self.merge(_pick(versions, segments.after[turn] - 1), _pick(lifted, turn))
            _place(versions, segments.after[turn], merged)
        last = np.append(segments.before_all[1:], segments.versions) - 1
        return _pick(versions, last), versions

    def _reduced(self, states: Columns, segments: Segments) -> Columns:
        """One state a segment, from one a row (in the segments' order): neighbours are merged until
        each segment has one.
        """
        return reduce_segments(self.merge, _pick(states, segments.order), segments.segment_of)


def range_sums(values: Ints, first: Ints, stop: Ints) -> Ints:
    """The sums of ranges. What runs over on the way comes back, as long as the sums themselves
    fit.
    """
    running = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=running[1:])
    sums: Ints = running[stop] - running[first]
    return sums


def reduce_segments(
    merge: Callable[[Columns, Columns], Columns], states: Columns, segment_of: Ints
) -> Columns:
    """Merge neighbours of the same segment, pair by pair, until each has one state. Takes as many
    passes as the longest has bits.
    """
    while len(segment_of) and (segment_of[1:] == segment_of[:-1]).any():
        begins = np.ones(len(segment_of), np.bool_)
        begins[1:] = segment_of[1:] != segment_of[:-1]
        position = np.arange(len(segment_of))
        even = (position - np.maximum.accumulate(np.where(begins, position, 0))) % 2 == 0
        left = np.flatnonzero(even)
        paired = np.append(~even, False)[left + 1]
        merged = _pick(states, left)
        _place(merged, paired, merge(_pick(merged, paired), _pick(states, left[paired] + 1)))
        states, segment_of = merged, segment_of[left]
    return states


def _pick(columns: Columns, which: Ints | Mask) -> Columns:
    return tuple(column[which] for column in columns)


def _place(columns: Columns, where: Ints | Mask, values: Columns) -> None:
    for column, value in zip(columns, values, strict=True):
        column[where] = value


# Between Arrow's columns and the plain arrays that accumulators compute with. Nulls come as zeros;
# masks say which they are.


Doubles = npt.NDArray[np.float64]


def valid_mask(array: pa.Array) -> Mask | None:
    """Which values are not null; None if all are."""
    return array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None


def integers(array: pa.Array) -> Ints:
    """Integers, dates, times and intervals as 64-bit integers."""
    width = array.type.bit_width // 8
    letter = "u" if pa.types.is_unsigned_integer(array.type) else "i"
    values = fixed_width(array, f"<{letter}{width}")
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
    words = fixed_width(array, "<u8").reshape(-1, 2)
    valid = valid_mask(array)
    if valid is not None:
        words = np.where(valid[:, None], words, np.uint64(0))
    return words[:, 0].copy(), words[:, 1].copy()


def integer_array(values: Ints, some: Mask, type: pa.DataType) -> pa.Array:
    """Integers, or a type that Arrow keeps as integers; null where there is none."""
    plain = pa.array(values, pa.int64(), mask=None if some.all() else ~some)
    return plain if type == pa.int64() else plain.cast(type)


def double_array(values: Doubles, some: Mask) -> pa.Array:
    return pa.array(values, pa.float64(), mask=None if some.all() else ~some)


def decimal_array(wide: Wide, some: Mask, type: pa.DataType) -> pa.Array:
    data = np.where(some[:, None], np.stack(wide[:2], axis=1), np.uint64(0))
    bitmap = None if some.all() else pa.py_buffer(np.packbits(some, bitorder="little"))
    return pa.Array.from_buffers(
        type, len(some), [bitmap, pa.py_buffer(np.ascontiguousarray(data))]
    )


# Accumulators whose state has no fixed width: a value of an Arrow type for each key, stored behind
# the fields.
#
# Those that keep many values for a key work on *bags*: all keys' values side by side, of which some
# keys' are taken out, changed and put back at a time.


class Full(Exception):
    """A key would have more values than it may keep, and that is to stop the query."""

    def __init__(self, key: int, most: int) -> None:
        super().__init__(key, most)
        self.key, self.most = key, most


class Keeper(Accumulator):
    """Keeps a value of `state_type` for each key that has one."""

    fields = (("size", "<u4"),)
    state_type: pa.DataType

    def tail_sizes(self, columns: Columns) -> Ints | None:
        sizes: Ints = columns[0].astype(np.int64)
        return sizes if sizes.any() else None

    def advance(self, columns: Columns, tails: Tails | None, segments: Segments) -> Advanced:
        there = columns[0] != 0
        stored = row_codec.decode(
            [] if tails is None else [tail for tail in tails if tail], self.state_type
        )
        return self.keep(there, stored, segments)

    @abstractmethod
    def keep(self, there: Mask, stored: pa.Array, segments: Segments) -> Advanced:
        """`there` says which keys have a state; `stored` are their states, in the order of the
        keys.
        """

    def kept(
        self,
        results: pa.Array,
        there: Mask,
        states: pa.Array,
        *,
        lost: Mask | None = None,
        left_out: tuple[LeftOut, ...] = (),
    ) -> Advanced:
        """The outcome: `states` of the keys for which `there` is true."""
        tails = np.full(len(there), b"", dtype=object)
        tails[there] = row_codec.encode(states)
        sizes = np.fromiter(map(len, tails), np.uint32, len(tails))
        return Advanced(results, (sizes,), tails.tolist(), lost, left_out)


class Bags:
    """For each key a bag of entries, each entry a number in every one of `width` columns."""

    def __init__(self, lengths: Ints, *columns: npt.NDArray[Any]) -> None:
        self.lengths = lengths.copy()
        self._starts = np.cumsum(lengths) - lengths
        self._columns = [np.array(column, np.int64) for column in columns]
        self._used = int(lengths.sum())

    def of(self, keys: Ints) -> tuple[Ints, ...]:
        """The entries of some keys: which of these keys each belongs to, and its columns."""
        lengths = self.lengths[keys]
        at = runs(self._starts[keys], lengths)
        return np.repeat(np.arange(len(keys)), lengths), *(column[at] for column in self._columns)

    def replace(self, keys: Ints, slots: Ints, *columns: Ints) -> None:
        """Give some keys other entries; `slots` says for each entry which of these keys it belongs
        to, in their order.
        """
        self._make_room(len(slots))
        lengths = np.bincount(slots, minlength=len(keys))
        self._starts[keys] = self._used + np.cumsum(lengths) - lengths
        self.lengths[keys] = lengths
        for mine, fresh in zip(self._columns, columns, strict=True):
            mine[self._used : self._used + len(slots)] = fresh
        self._used += len(slots)

    def _make_room(self, more: int) -> None:
        """What bags held before lies about until there is no room: then what is needed moves into
        twice that room.
        """
        if self._used + more <= len(self._columns[0]):
            return
        at = runs(self._starts, self.lengths)
        self._used = len(at)
        self._starts = np.cumsum(self.lengths) - self.lengths
        room = 2 * (self._used + more)
        for number, column in enumerate(self._columns):
            self._columns[number] = np.empty(room, np.int64)
            self._columns[number][: self._used] = column[at]


def first_of_each(slots: Ints) -> Ints:
    """For each entry the position of the first entry of the same slot; slots are in order."""
    begins = np.ones(len(slots), np.bool_)
    begins[1:] = slots[1:] != slots[:-1]
    return np.maximum.accumulate(np.where(begins, np.arange(len(slots)), 0))


def place_in_slot(slots: Ints) -> Ints:
    """0, 1, 2, … within each slot; slots are in order."""
    return np.arange(len(slots)) - first_of_each(slots)


def lists(lengths: Ints, values: pa.Array) -> pa.Array:
    """Values as lists of these lengths."""
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values)


# Values as numbers in the same order, and back: unsigned ones for types of up to 64 bits, places
# among the values at hand for all others.
#
# NaN is the largest of all, and -0.0 comes before 0.0.


Codes = npt.NDArray[np.uint64]
_TOP = np.uint64(1 << 63)


def has_order_in_64_bits(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_boolean(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_temporal(kind)
    )


def to_ordered(array: pa.Array) -> Codes:
    """The code of each value; of a null, any."""
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
    """The value of each code; null where there is none."""
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


def places(array: pa.Array) -> tuple[Ints, pa.Array]:
    """For each value (none null) its place among the distinct ones, and those in their order."""
    if has_order_in_64_bits(array.type):
        codes, found = np.unique(to_ordered(array), return_inverse=True)
        return found.astype(np.int64), from_ordered(
            codes, np.ones(len(codes), np.bool_), array.type
        )
    encoded = array.dictionary_encode()
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return place[encoded.indices.to_numpy()], encoded.dictionary.take(pa.array(order))
