"""Rows sorted by key, tick and arrival, and cut into segments: a segment holds the rows of one key
in one tick. Every keyed kernel processes segments, a whole column at a time.

Rows in, in the pipeline's order, and the segments they give:

    tick  key          segment  key  tick  rows
     7     b              0      a    7    1
     7     a              1      a    8    3, 4
     7     b              2      b    7    0, 2
     8     a
     8     a

Within one call a key has *versions*: its value before the call, and its value after each of its
segments. Key `a` above has three versions, `b` has two. A kernel may add keys without rows, to read
their value: they have no segment, and one version.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.columns import CHANGE_TYPE, DELETE, TICK, UPDATE_PREIMAGE
from headrace.columnar.keys import as_array
from headrace.columnar.sort import Codes, key_codes, stable_sort
from headrace.errors import BugError

_NO_KEYS = pa.nulls(0, pa.binary())


@dataclass(frozen=True)
class Segments:
    """The segments of some rows.

    Attributes:
        rows: the rows, in the pipeline's order.
        order: the row indices, sorted by key, tick and arrival.
        starts: the index into `order` of the first row of each segment.
        ticks: the tick of each segment.
        firsts: the first segment of each key.
        keys: the distinct keys, in order.
        exists: for each version whether its key has rows; None until rows have been counted.

    """

    rows: pa.Table
    order: Ints
    starts: Ints
    ticks: Ints
    firsts: Ints
    keys: pa.Array
    exists: Mask | None = None
    _ordered: dict[str, pa.Array] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def key_of(self) -> Ints:
        """The index of the key of each segment."""
        return np.repeat(np.arange(len(self.firsts)), np.diff(self.firsts, append=len(self)))

    @cached_property
    def segment_of(self) -> Ints:
        """The segment of each row, in the order of `order`."""
        return np.repeat(np.arange(len(self)), self.sizes)

    @cached_property
    def sizes(self) -> Ints:
        """The number of rows in each segment."""
        return np.diff(self.starts, append=len(self.order))

    @cached_property
    def signs(self) -> Ints | None:
        """1 for a row that is added, -1 for a row that is retracted; None if there are no
        retractions.
        """
        if CHANGE_TYPE not in self.rows.schema.names:
            return None
        retracts = pc.is_in(
            as_array(self.rows.column(CHANGE_TYPE)), pa.array([DELETE, UPDATE_PREIMAGE])
        )
        return np.where(retracts.to_numpy(zero_copy_only=False)[self.order], -1, 1)

    def column(self, name: str) -> pa.Array:
        """A column of the rows in the order of `order`. Cached, as several aggregates may read
        it.
        """
        if name not in self._ordered:
            self._ordered[name] = as_array(self.rows.column(name)).take(pa.array(self.order))
        return self._ordered[name]

    # Versions

    @property
    def versions(self) -> int:
        return len(self.firsts) + len(self)

    @cached_property
    def initial_versions(self) -> Ints:
        """The version of each key before its first segment."""
        return self.firsts + np.arange(len(self.firsts))

    @cached_property
    def after(self) -> Ints:
        """The version after each segment; the version before it is one less."""
        return np.arange(len(self)) + self.key_of + 1

    def rounds(self) -> Iterator[Ints]:
        """Segments that can be processed together: the first one of every key, then the second one
        of every key that has two, and so on.
        """
        round_of = np.arange(len(self)) - self.firsts[self.key_of]
        by_round = np.argsort(round_of, kind="stable")
        yield from np.split(by_round, np.flatnonzero(np.diff(round_of[by_round])) + 1)

    @cached_property
    def has_one_tick(self) -> bool:
        return len(self) == 0 or bool(self.ticks.min() == self.ticks.max())

    @cached_property
    def has_one_round(self) -> bool:
        """Whether every key has exactly one segment, as is the case with a single tick."""
        return len(self) == len(self.firsts) and bool((np.diff(self.firsts) == 1).all())


def segment_rows(rows: pa.Table, keys: pa.Array) -> Segments:
    """The segments of rows, which are in the pipeline's order. `keys` are the rows' key bytes."""
    segments, _ = segment_codes(rows, key_codes(keys))
    return replace(
        segments, keys=keys.take(pa.array(segments.order[segments.starts[segments.firsts]]))
    )


def segment_codes(
    rows: pa.Table, codes: Codes, entries: Ints | None = None
) -> tuple[Segments, Codes]:
    """The segments of rows by integer codes instead of keys, and the distinct codes in order.

    `entries` are the row indices that the codes belong to, for rows that are left out or are in
    several keys; without it there is one code per row.
    """
    ticks = as_array(rows.column(TICK)).to_numpy()
    if len(ticks) and (np.diff(ticks) < 0).any():
        raise BugError("The rows of a kernel are not in the order of their ticks.")
    sorted_codes, ordered = stable_sort(codes)
    order = sorted_codes if entries is None else entries[sorted_codes]
    ticks = ticks[order]
    new_key = np.ones(len(order), np.bool_)
    new_key[1:] = ordered[1:] != ordered[:-1]
    new_segment = new_key.copy()
    new_segment[1:] |= ticks[1:] != ticks[:-1]
    starts = np.flatnonzero(new_segment)
    firsts = np.flatnonzero(new_key[starts])
    return (
        Segments(rows, order, starts, ticks[starts], firsts, _NO_KEYS),
        codes[sorted_codes[starts[firsts]]],
    )


def add_empty_keys(segments: Segments, own_codes: Codes, all_codes: Codes) -> Segments:
    """Segments with additional keys that have no rows. `all_codes` are the codes of all keys, in
    order; `own_codes` are those of the segments' own keys.
    """
    firsts = np.append(segments.firsts, len(segments))
    return replace(segments, firsts=firsts[np.searchsorted(own_codes, all_codes)])


def order_by_key(keys: pa.Array) -> tuple[Ints, Mask]:
    """The row indices sorted by key, in arrival order within a key; and for each of them whether it
    is the first of its key.
    """
    return order_by_code(key_codes(keys))


def order_by_code(codes: Codes) -> tuple[Ints, Mask]:
    """The row indices sorted by code, in arrival order within a code; and for each of them whether
    it is the first of its code.
    """
    order, ordered = stable_sort(codes)
    new_key = np.ones(len(codes), np.bool_)
    new_key[1:] = ordered[1:] != ordered[:-1]
    return order, new_key
