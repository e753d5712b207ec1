"""What an accumulator is: one aggregate's part of every key's state, worked on for all keys at once.

Most are *monoids*: a segment's rows become a small state (`lift`), states are put together (`merge`), and the order does not matter, because
merging is exact. That one property makes the answer independent of batches, shards and of combining before the shuffle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.operators.buffers import Ints, Mask
from headrace.operators.segments import Segments

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
    """What became of all keys: a result for each version of each key, and the newest state of each key."""

    results: pa.Array
    columns: Columns
    tails: Tails | None = None
    lost: Mask | None = None  # versions whose result is null because it could not be told
    left_out: tuple[LeftOut, ...] = ()


class Accumulator(ABC):
    """`fields` have a fixed width for every key; `tail_sizes` says how many more bytes a key has behind them."""

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
        """The state of both sides' rows together, pair by pair. Exact: it does not matter in which order states are merged."""

    @abstractmethod
    def result(self, columns: Columns) -> tuple[pa.Array, Mask | None]:
        """What each state amounts to, and for which it could not be told."""

    def over_ranges(self, columns: Columns, first: Ints, stop: Ints) -> Columns | None:  # noqa: ARG002
        """What the states from each `first` up to but not including each `stop` amount to, for those that can be had by taking away: one running total instead of many
        merges. None if that is not so, or would not be exact.
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

    def advance_by(self, columns: Columns, tails: Tails | None, partials: tuple[Columns, Tails | None], segments: Segments) -> Advanced:
        """The same from rows that are states themselves, made by a kernel's `combine`."""
        opened = self.opened(columns, tails)
        lifted = self._reduced(self.opened(*partials), segments)
        return self._advanced(*self._through(opened, lifted, segments))

    def _advanced(self, newest: Columns, versions: Columns) -> Advanced:
        results, lost = self.result(versions)
        columns, tails = self.closed(newest)
        return Advanced(results, columns, tails, lost)

    def _through(self, states: Columns, lifted: Columns, segments: Segments) -> tuple[Columns, Columns]:
        """The newest states, and those of all versions."""
        versions = tuple(np.empty((segments.versions, *column.shape[1:]), column.dtype) for column in states)
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
        """One state a segment, from one a row (in the segments' order): neighbours are merged until each segment has one."""
        return reduce_segments(self.merge, _pick(states, segments.order), segments.segment_of)


def range_sums(values: Ints, first: Ints, stop: Ints) -> Ints:
    """The sums of ranges. What runs over on the way comes back, as long as the sums themselves fit."""
    running = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=running[1:])
    sums: Ints = running[stop] - running[first]
    return sums


def reduce_segments(merge: Callable[[Columns, Columns], Columns], states: Columns, segment_of: Ints) -> Columns:
    """Merge neighbours of the same segment, pair by pair, until each has one state. Takes as many passes as the longest has bits."""
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
