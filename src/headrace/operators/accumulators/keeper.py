"""Accumulators whose state has no fixed width: a value of an Arrow type for each key, stored behind the fields.

Those that keep many values for a key work on *bags*: all keys' values side by side, of which some keys' are taken out, changed and put back at a time.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.operators import row_codec
from headrace.operators.accumulators.accumulator import Accumulator, Advanced, Columns, LeftOut, Tails
from headrace.operators.buffers import Ints, Mask, runs
from headrace.operators.segments import Segments


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
        stored = row_codec.decode([] if tails is None else [tail for tail in tails if tail], self.state_type)
        return self.keep(there, stored, segments)

    @abstractmethod
    def keep(self, there: Mask, stored: pa.Array, segments: Segments) -> Advanced:
        """`there` says which keys have a state; `stored` are their states, in the order of the keys."""

    def kept(self, results: pa.Array, there: Mask, states: pa.Array, *, lost: Mask | None = None, left_out: tuple[LeftOut, ...] = ()) -> Advanced:
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
        """Give some keys other entries; `slots` says for each entry which of these keys it belongs to, in their order."""
        self._make_room(len(slots))
        lengths = np.bincount(slots, minlength=len(keys))
        self._starts[keys] = self._used + np.cumsum(lengths) - lengths
        self.lengths[keys] = lengths
        for mine, fresh in zip(self._columns, columns, strict=True):
            mine[self._used : self._used + len(slots)] = fresh
        self._used += len(slots)

    def _make_room(self, more: int) -> None:
        """What bags held before lies about until there is no room: then what is needed moves into twice that room."""
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
