"""What windows were made of during a call, for kernels whose windows depend on the rows: versions of windows, each from the tick that made it until the one that changed it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.operators.buffers import Ints, Mask
from headrace.operators.joins.matching import first_from, sorting
from headrace.operators.kernel import Times
from headrace.operators.windows.telling import FOR_EVER


@dataclass(frozen=True)
class Sets:
    """Windows with what is in them: the group of each as its number, its bounds, and how many of the `entries` are its, one window's behind the other's."""

    keys: Ints
    starts: Times
    ends: Times
    lengths: Ints
    entries: Ints

    def __len__(self) -> int:
        return len(self.keys)


class History:
    """Versions of windows, by number in the order of their making."""

    def __init__(self) -> None:
        self._sets: list[Sets] = []
        self._born: list[Ints] = []
        self._died: list[tuple[Ints, int]] = []
        self._count = 0
        self.current = Current(*(np.zeros(0, np.int64) for _ in range(4)))

    def add(self, sets: Sets, born: int) -> None:
        self.add_each(sets, np.full(len(sets), born))

    def add_each(self, sets: Sets, born: Ints) -> None:
        numbers = self._count + np.arange(len(sets))
        self._count += len(sets)
        self._sets.append(sets)
        self._born.append(born)
        old = self.current
        self.current = Current(
            *(np.concatenate(pair) for pair in ((old.numbers, numbers), (old.keys, sets.keys), (old.starts, sets.starts), (old.ends, sets.ends)))
        )

    def end(self, which: Mask, place: int) -> None:
        """Some of the current versions end with a tick."""
        self._died.append((self.current.numbers[which], place))
        self.current = self.current.only(~which)

    def forget(self, which: Mask) -> None:
        """Some of the current versions are closed: they stay as they are, and are known no more."""
        self.current = self.current.only(~which)

    def all(self) -> Sets:
        return Sets(*(np.concatenate([getattr(each, name) for each in self._sets]) for name in ("keys", "starts", "ends", "lengths", "entries")))

    @property
    def born(self) -> Ints:
        return np.concatenate(self._born)

    @property
    def died(self) -> Ints:
        died = np.full(self._count, FOR_EVER)
        for numbers, place in self._died:
            died[numbers] = place
        return died


@dataclass(frozen=True)
class Current:
    """The versions that hold now."""

    numbers: Ints
    keys: Ints
    starts: Times
    ends: Times

    def only(self, which: Mask) -> Current:
        return Current(self.numbers[which], self.keys[which], self.starts[which], self.ends[which])


def any_within(keys: Ints, times: Times, of: Ints, lows: Times, highs: Times) -> Mask:
    """Whether a group has some of these times in [low, high), for each of some groups and ranges."""
    order = sorting(keys, times)
    keys, times = keys[order], times[order]
    found = first_from(keys, times, of, lows)
    inside: Mask = found < len(keys)
    there = found[inside]
    inside[inside] = (keys[there] == of[inside]) & (times[there] < highs[inside])
    return inside


def chains(keys: Ints, starts: Times, ends: Times) -> Ints:
    """For ranges in order of group and start: a number for each, the same for those that overlap or are joined by others that do. Ranges are half open."""
    if not len(keys):
        return keys
    new = np.ones(len(keys), np.bool_)
    new[1:] = keys[1:] != keys[:-1]
    latest = ends if (new[1:] | (ends[1:] >= ends[:-1])).all() else _latest(keys, ends)
    new[1:] |= starts[1:] >= latest[:-1]
    return np.cumsum(new) - 1


def _latest(keys: Ints, ends: Times) -> Times:
    """The latest end so far within the group: by the ends' places in their order, those of a later group above all others."""
    ranks = np.empty(len(ends), np.int64)
    by_end = np.argsort(ends, kind="stable")
    ranks[by_end] = np.arange(len(ends))
    so_far = np.maximum.accumulate(keys * len(ends) + ranks)
    latest: Times = ends[by_end[so_far % len(ends)]]
    return latest
