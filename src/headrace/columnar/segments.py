"""Rows in order of key, tick and arrival, cut into segments: the rows of one key in one tick. Every
keyed kernel works on these, whole columns at a time.

A key's history within a call is a row of *versions*: what it was before, and what it is after each
of its segments. A kernel may add keys of which no row came, to see what they amount to: they have
no segment, and one version.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.columns import CHANGE_TYPE, TICK
from headrace.columnar.keys import whole
from headrace.columnar.sort import Codes, codes_of, stable_sort
from headrace.errors import BugError

_NO_KEYS = pa.nulls(0, pa.binary())


@dataclass(frozen=True)
class Segments:
    """`order` lists the rows by key, tick and arrival; the rest describes them in that order."""

    rows: pa.Table
    order: Ints
    starts: Ints  # the first row of each segment
    ticks: Ints  # the tick of each segment
    firsts: Ints  # the first segment of each key
    keys: pa.Array  # the distinct keys, in order
    exists: Mask | None = None  # whether a key has rows, by version; known once rows are counted
    _ordered: dict[str, pa.Array] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def key_of(self) -> Ints:
        """The key that each segment belongs to, as its number."""
        return np.repeat(np.arange(len(self.firsts)), np.diff(self.firsts, append=len(self)))

    @cached_property
    def segment_of(self) -> Ints:
        """The segment that each row belongs to."""
        return np.repeat(np.arange(len(self)), self.sizes)

    @cached_property
    def sizes(self) -> Ints:
        """The number of rows in each segment."""
        return np.diff(self.starts, append=len(self.order))

    @cached_property
    def signs(self) -> Ints | None:
        """1 for a row that comes, -1 for a row that goes; None if all come."""
        if CHANGE_TYPE not in self.rows.schema.names:
            return None
        goes = pc.is_in(
            whole(self.rows.column(CHANGE_TYPE)), pa.array(["delete", "update_preimage"])
        )
        return np.where(goes.to_numpy(zero_copy_only=False)[self.order], -1, 1)

    def column(self, name: str) -> pa.Array:
        """A column in this order. Several aggregates may read the same one."""
        if name not in self._ordered:
            self._ordered[name] = whole(self.rows.column(name)).take(pa.array(self.order))
        return self._ordered[name]

    # Versions

    @property
    def versions(self) -> int:
        return len(self.firsts) + len(self)

    @cached_property
    def before_all(self) -> Ints:
        """The version of each key before its first segment."""
        return self.firsts + np.arange(len(self.firsts))

    @cached_property
    def after(self) -> Ints:
        """The version after each segment; the one before it is one less."""
        return np.arange(len(self)) + self.key_of + 1

    def rounds(self) -> Iterator[Ints]:
        """Segments that can be worked on together: the first of every key, then the second of those
        that have one, …
        """
        turn = np.arange(len(self)) - self.firsts[self.key_of]
        by_turn = np.argsort(turn, kind="stable")
        yield from np.split(by_turn, np.flatnonzero(np.diff(turn[by_turn])) + 1)

    @cached_property
    def one_tick(self) -> bool:
        return len(self) == 0 or bool(self.ticks.min() == self.ticks.max())

    @cached_property
    def one_round(self) -> bool:
        """Whether every key has one segment, as when there is but one tick."""
        return len(self) == len(self.firsts) and bool((np.diff(self.firsts) == 1).all())


def cut(rows: pa.Table, keys: pa.Array) -> Segments:
    """The segments of rows that come in the pipeline's order; `keys` are the rows' key bytes."""
    segments, _ = cut_codes(rows, codes_of(keys))
    return replace(
        segments, keys=keys.take(pa.array(segments.order[segments.starts[segments.firsts]]))
    )


def cut_codes(rows: pa.Table, codes: Codes, entries: Ints | None = None) -> tuple[Segments, Codes]:
    """The segments by numbers instead of keys, and the distinct numbers in their order. `entries`
    are the rows that the numbers belong to, if not one to each row: a row may be left out, or be in
    several keys.
    """
    ticks = whole(rows.column(TICK)).to_numpy()
    if len(ticks) and (np.diff(ticks) < 0).any():
        raise BugError("Rows came to a kernel out of the order of their ticks.")
    position, ordered = stable_sort(codes)
    order = position if entries is None else entries[position]
    ticks = ticks[order]
    new_key = np.ones(len(order), np.bool_)
    new_key[1:] = ordered[1:] != ordered[:-1]
    new_segment = new_key.copy()
    new_segment[1:] |= ticks[1:] != ticks[:-1]
    starts = np.flatnonzero(new_segment)
    firsts = np.flatnonzero(new_key[starts])
    return (
        Segments(rows, order, starts, ticks[starts], firsts, _NO_KEYS),
        codes[position[starts[firsts]]],
    )


def with_keys(segments: Segments, known: Codes, codes: Codes) -> Segments:
    """The same with more keys, of which no row came: all have the `codes`, in order, of which the
    segments' own are the `known`.
    """
    return replace(
        segments, firsts=np.append(segments.firsts, len(segments))[np.searchsorted(known, codes)]
    )


def by_key(keys: pa.Array) -> tuple[Ints, Mask]:
    """The rows in order of key, and of arrival within a key; and for each of them whether a new key
    begins there.
    """
    return by_code(codes_of(keys))


def by_code(codes: Codes) -> tuple[Ints, Mask]:
    """The same by numbers that stand for keys."""
    order, ordered = stable_sort(codes)
    new_key = np.ones(len(codes), np.bool_)
    new_key[1:] = ordered[1:] != ordered[:-1]
    return order, new_key
