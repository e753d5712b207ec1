"""Rows in order of key and time, as the matcher sees them: which key each belongs to, when it was, and which symbols it fits. All by position, whole columns at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from headrace.operators.buffers import Ints, Mask
from headrace.operators.kernel import Times

NEVER = 1 << 32
"""A position behind all rows: it does not happen."""


@dataclass(frozen=True)
class SortedRows:
    """`keys`: numbers, in order. `fits`: for each symbol the rows that fit it, as far as a row alone tells; None if all do."""

    keys: Ints
    times: Times
    fits: Mapping[str, Mask | None]
    _found: dict[frozenset[str], Ints] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def begins(self) -> Mask:
        """Where a key begins."""
        new = np.ones(len(self), np.bool_)
        new[1:] = self.keys[1:] != self.keys[:-1]
        return new

    @cached_property
    def start(self) -> Ints:
        """For each row the first of its key."""
        starts = np.flatnonzero(self.begins)
        return np.repeat(starts, np.diff(starts, append=len(self)))

    @cached_property
    def end(self) -> Ints:
        """For each row the position behind the last of its key: where rows that are not there yet will be."""
        starts = np.append(np.flatnonzero(self.begins), len(self))
        return np.repeat(starts[1:], np.diff(starts))

    @cached_property
    def is_last(self) -> Mask:
        """Where a key ends."""
        return np.append(self.begins[1:], True) if len(self) else self.begins

    @cached_property
    def at(self) -> Ints:
        """The positions themselves."""
        return np.arange(len(self))

    @cached_property
    def everywhere(self) -> Mask:
        return np.ones(len(self), np.bool_)

    def mask(self, symbol: str) -> Mask:
        found = self.fits[symbol]
        return self.everywhere if found is None else found

    def any_of(self, symbols: Sequence[str]) -> Mask:
        found = np.zeros(len(self), np.bool_)
        for name in symbols:
            found |= self.mask(name)
        return found

    def following(self, symbols: Sequence[str]) -> Ints:
        """For each row the next one of its key that fits any of these; NEVER if there is none."""
        key = frozenset(symbols)
        if key not in self._found:
            self._found[key] = self._following(self.any_of(symbols))
        return self._found[key]

    def _following(self, mask: Mask) -> Ints:
        at = np.where(mask, self.at, NEVER)
        nearest = np.append(np.minimum.accumulate(at[::-1])[::-1], NEVER)[1:]
        return np.where(nearest < self.end, nearest, NEVER)


def suffix_min(values: Ints, begins: Mask) -> Ints:
    """For each the least from it to the end of its segment; segments begin where `begins` says."""
    segment = np.cumsum(begins) << 33
    lowest: Ints = np.minimum.accumulate((values + segment)[::-1])[::-1] - segment
    return lowest


def suffix_max(values: Ints, begins: Mask) -> Ints:
    """The same for the greatest."""
    return -suffix_min(-values, begins)
