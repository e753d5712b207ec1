"""The buffered rows of a pattern: in the state, and sorted as the matcher sees them.

A key buffers the rows that are not certain to be in order yet, and the rows from the first on whose
fate as the start of a match is open. The entries in the state:

    rows      `r`, the key                as `windows/state.py` stores rows: time, timer, the
                                          conditions that the row alone meets, and the columns that
                                          the patterns need
    timer     `w`, time, zeros, the key   as `windows/state.py` stores windows
    counters  `k`, the key                version 1, then the number of matches of each pattern:
                                          never deleted; only where matches are numbered or begin
                                          with the first row of a key

The timer of a key is stored with its first row, -1 if it has none. Behind the bits of a row's
conditions there is a bit for each pattern, which says whether the row may still begin a match of
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask, expand_ranges
from headrace.columnar.keys import as_array
from headrace.columnar.lookup import sort_order
from headrace.errors import NewerFormat
from headrace.operators.kernel import Groups, KeyedState, Times
from headrace.operators.windows.state import RowStore, Windows, with_long_keys

TIMER = "\0mark"
BITS = "\0bits"
NO_TIMER = -1
WORD_BITS = 63
_COUNTERS = pa.scalar(b"k", pa.binary())
_EMPTY = pa.scalar(b"", pa.binary())
_TIMER_VALUE = pa.scalar(b"\x01", pa.binary())
_VERSION = 1
MatchCounts = npt.NDArray[np.int64]
"""A row for each key, a column for each pattern."""


# Conditions of rows as bits


def word_count(bits: int) -> int:
    """The number of words that hold so many bits."""
    return -(-bits // WORD_BITS)


def bit_fields(bits: int) -> list[pa.Field]:
    """The columns that hold so many bits of a row."""
    return [pa.field(f"{BITS}{word}", pa.int64()) for word in range(word_count(bits))]


def pack_bits(masks: Sequence[Mask], true_bits: int, count: int) -> list[pa.Array]:
    """Masks of so many rows as words, followed by so many bits that are true."""
    total = len(masks) + true_bits
    words = []
    for first in range(0, total, WORD_BITS):
        bits = range(max(first, len(masks)), min(first + WORD_BITS, total))
        words.append(np.full(count, sum(1 << bit % WORD_BITS for bit in bits)))
    for bit, mask in enumerate(masks):
        words[bit // WORD_BITS] |= mask.astype(np.int64) << (bit % WORD_BITS)
    return [pa.array(word) for word in words]


class RowBits:
    """Bits of rows, packed in words. A mask is made when it is used, since there can be thousands
    of bits.
    """

    def __init__(self, words: list[Ints]) -> None:
        self.words = words

    def get(self, bit: int, rows: Ints | None = None) -> Mask:
        """A bit of all rows, or of some."""
        word = self.words[bit // WORD_BITS]
        mask: Mask = ((word if rows is None else word[rows]) & (1 << bit % WORD_BITS)) != 0
        return mask

    def clear(self, bit: int, rows: Ints) -> None:
        """Set a bit of some rows to false."""
        self.words[bit // WORD_BITS][rows] &= ~(1 << bit % WORD_BITS)


# Entries in the state


def store_rows(
    store: RowStore,
    state: KeyedState,
    batch: BufferedBatch,
    rows: pa.Table,
    counts: Ints,
    timers: Times,
) -> None:
    """Store the rows of the keys of a batch, `counts` of each, and move their timers."""
    has_entry = np.flatnonzero((batch.stored_counts > 0) | (counts > 0))
    is_every_key = len(has_entry) == len(counts)
    store.write(
        state,
        batch.names if is_every_key else batch.names.take(pa.array(has_entry)),
        batch.groups if is_every_key else batch.groups[has_entry],
        counts if is_every_key else counts[has_entry],
        rows,
    )
    is_moved = batch.timers != timers
    deleted = np.flatnonzero(is_moved & (batch.timers != NO_TIMER))
    added = np.flatnonzero(is_moved & (timers != NO_TIMER))
    deleted_names = _timer_names(batch, batch.timers, deleted)
    state.put_array(deleted_names, pa.nulls(len(deleted), pa.binary()), batch.groups[deleted])
    added_names = _timer_names(batch, timers, added)
    values = with_long_keys(added_names, pa.repeat(_TIMER_VALUE, len(added)))
    state.put_array(added_names, values, batch.groups[added])


def _timer_names(batch: BufferedBatch, timers: Times, which: Ints) -> pa.Array:
    windows = Windows(
        batch.by.take(pa.array(which)),
        np.zeros(len(which), np.int64),
        timers[which],
        batch.groups[which],
    )
    return windows.names(np.ones(len(which), np.bool_)).cast(pa.binary())


def timers_of(column: Ints, counts: Ints) -> Times:
    """The timer of each key, from the column of its rows."""
    timers = np.full(len(counts), NO_TIMER)
    has_rows = counts > 0
    timers[has_rows] = column[(np.cumsum(counts) - counts)[has_rows]]
    return timers


def timer_column(timers: Times, counts: Ints) -> Ints:
    """The timers of keys as a column of their rows: with the first row of each."""
    column = np.full(int(counts.sum()), NO_TIMER)
    has_rows = counts > 0
    column[(np.cumsum(counts) - counts)[has_rows]] = timers[has_rows]
    return column


class MatchCounters:
    """The number of matches that each key has had of each pattern; a key without an entry has had
    no row.
    """

    def __init__(self, step: str, patterns: int) -> None:
        self.step_name = step
        self._dtype = np.dtype([("version", "u1"), ("matches", "<i8", (patterns,))])

    @staticmethod
    def _names(by: pa.Array) -> pa.Array:
        return pc.binary_join_element_wise(_COUNTERS, by.cast(pa.binary()), _EMPTY)

    def read(self, state: KeyedState, by: pa.Array, groups: Groups) -> tuple[Mask, MatchCounts]:
        """Which keys have had a row, and their numbers of matches."""
        values = state.get_array(self._names(by), groups)
        has_entry = values.is_valid().to_numpy(zero_copy_only=False)
        entries = np.zeros(len(by), self._dtype)
        entries[has_entry] = np.frombuffer(b"".join(values.drop_null().to_pylist()), self._dtype)
        if int(entries["version"].max(initial=0)) > _VERSION:
            raise NewerFormat(
                f"The state of step {self.step_name!r} was written by a newer Headrace.",
                fix="upgrade Headrace.",
            )
        counts: MatchCounts = entries["matches"].copy()
        return has_entry, counts

    def write(
        self, state: KeyedState, by: pa.Array, groups: Groups, counts: MatchCounts, which: Mask
    ) -> None:
        """Store the counters of some keys."""
        keys = np.flatnonzero(which)
        entries = np.zeros(len(keys), self._dtype)
        entries["version"], entries["matches"] = _VERSION, counts[keys]
        values = pa.array([entry.tobytes() for entry in entries], pa.binary())
        state.put_array(self._names(by.take(pa.array(keys))), values, groups[keys])


# Sorted rows, as the matcher sees them


NEVER = 1 << 32
"""A position behind all rows: it does not happen."""


@dataclass(frozen=True)
class SortedRows:
    """Rows in order of key and time: the key index and the time of each, and for each symbol the
    rows that fit it, as far as the row alone decides; None if all do.
    """

    keys: Ints
    times: Times
    fits: Mapping[str, Mask | None]
    _next_fit: dict[frozenset[str], Ints] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def positions(self) -> Ints:
        """The position of each row."""
        return np.arange(len(self))

    @cached_property
    def is_first(self) -> Mask:
        """The first row of each key."""
        mask = np.ones(len(self), np.bool_)
        mask[1:] = self.keys[1:] != self.keys[:-1]
        return mask

    @cached_property
    def is_last(self) -> Mask:
        """The last row of each key."""
        return np.append(self.is_first[1:], True) if len(self) else self.is_first

    @cached_property
    def start(self) -> Ints:
        """For each row the position of the first row of its key."""
        starts = np.flatnonzero(self.is_first)
        return np.repeat(starts, np.diff(starts, append=len(self)))

    @cached_property
    def end(self) -> Ints:
        """For each row the position behind the last row of its key, which stands for rows that have
        not arrived.
        """
        starts = np.append(np.flatnonzero(self.is_first), len(self))
        return np.repeat(starts[1:], np.diff(starts))

    @cached_property
    def _all_rows(self) -> Mask:
        return np.ones(len(self), np.bool_)

    def mask(self, symbol: str) -> Mask:
        """The rows that fit a symbol."""
        fits = self.fits[symbol]
        return self._all_rows if fits is None else fits

    def any_mask(self, symbols: Sequence[str]) -> Mask:
        """The rows that fit any of some symbols."""
        mask = np.zeros(len(self), np.bool_)
        for symbol in symbols:
            mask |= self.mask(symbol)
        return mask

    def next_fit(self, symbols: Sequence[str]) -> Ints:
        """For each row the next one of its key that fits any of some symbols; NEVER if there is
        none.
        """
        cache_key = frozenset(symbols)
        if cache_key not in self._next_fit:
            fitting = np.where(self.any_mask(symbols), self.positions, NEVER)
            nearest = np.append(np.minimum.accumulate(fitting[::-1])[::-1], NEVER)[1:]
            self._next_fit[cache_key] = np.where(nearest < self.end, nearest, NEVER)
        return self._next_fit[cache_key]


def suffix_min(values: Ints, starts: Mask) -> Ints:
    """For each value the least from it to the end of its segment; segments begin at `starts`."""
    segment = np.cumsum(starts) << 33
    lowest: Ints = np.minimum.accumulate((values + segment)[::-1])[::-1] - segment
    return lowest


def suffix_max(values: Ints, starts: Mask) -> Ints:
    """For each value the greatest from it to the end of its segment; segments begin at `starts`."""
    return -suffix_min(-values, starts)


@dataclass(frozen=True)
class BufferedBatch:
    """The rows of a batch, stored and new, in order of key and time. By key: `by` (its bytes),
    `groups`, `names`, `stored_counts` and `timers`. By row: `order` (its index in `rows`), `keys`,
    `times` and `bits`.
    """

    by: pa.Array
    groups: Groups
    names: pa.Array
    rows: pa.Table
    order: Ints
    keys: Ints
    times: Times
    bits: RowBits
    stored_counts: Ints
    timers: Times
    certain: Ints  # positions of the rows that the horizon has passed


def merge_by_key(stored_counts: Ints, keys: Ints, order: Ints) -> tuple[Ints, Ints]:
    """Merge stored rows, in order of key, with new ones, whose keys and order by key are given.

    Returns:
        The order of all rows by key, the new ones of a key behind its stored ones; and their keys.
    """
    new_counts = np.bincount(keys, minlength=len(stored_counts))
    stored = int(stored_counts.sum())
    ends = np.cumsum(stored_counts + new_counts)
    merged = np.empty(stored + len(keys), np.int64)
    stored_starts = ends - new_counts - stored_counts
    merged[expand_ranges(stored_starts, stored_counts)] = np.arange(stored)
    merged[expand_ranges(ends - new_counts, new_counts)] = stored + order
    return merged, np.repeat(np.arange(len(stored_counts)), stored_counts + new_counts)


def sort_by_time(
    order: Ints, keys: Ints, times: Times, ties: Sequence[Ints] = ()
) -> tuple[Ints, Times]:
    """Sort rows that are in order of key and arrival by key and time, and rows of one time by
    `ties`; in place. The rows of most keys are sorted already.
    """
    sorted_times = times[order]
    is_behind, is_same = sorted_times[1:] < sorted_times[:-1], sorted_times[1:] == sorted_times[:-1]
    for tie in ties:
        difference = np.diff(tie[order])
        is_behind |= is_same & (difference < 0)
        is_same &= difference == 0
    is_behind &= keys[1:] == keys[:-1]
    if is_behind.any():
        is_unsorted = np.zeros(int(keys[-1]) + 1, np.bool_)
        is_unsorted[keys[np.flatnonzero(is_behind)]] = True
        which = np.flatnonzero(is_unsorted[keys])
        ranks = (tie[order[which]] for tie in ties)
        resorted = which[sort_order(keys[which], sorted_times[which], *ranks)]
        order[which] = order[resorted]
        sorted_times[which] = sorted_times[resorted]
    return order, sorted_times


def tie_ranks(values: pa.Array, *, descends: bool) -> Ints:
    """The rank of each value, as Spark orders them: nulls first, and last where it descends."""
    ranks = as_array(pc.rank(values, sort_keys="ascending", tiebreaker="dense"))
    is_valid = values.is_valid().to_numpy(zero_copy_only=False)
    numbers: Ints = np.where(is_valid, ranks.to_numpy().astype(np.int64), 0)
    return -numbers if descends else numbers
