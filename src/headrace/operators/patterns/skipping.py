"""Where the next match may begin: of all beginnings that match, those that are left when each is skipped to by the one before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.operators.buffers import Ints, Mask, runs
from headrace.operators.patterns.sorted_rows import SortedRows
from headrace.operators.patterns.specs import PAST_LAST, TO_FIRST
from headrace.operators.patterns.walking import Entries

if TYPE_CHECKING:
    from headrace.operators.patterns.matching import Rules

FEW, MANY = 8, 1 << 20
"""How many beginnings of a key are looked at together, at first and at most."""


def visited_starts(rules: Rules, rows: SortedRows, may_begin: Mask, entries: Entries, begin: Ints) -> tuple[Mask, Mask]:
    """Which matches stay, and which rows are looked at as a beginning at all. `begin` has no row twice, and is in order."""
    chosen, targets = chosen_starts(rules, rows, entries, begin)
    skipped = np.zeros(len(rows) + 1, np.int64)
    np.add.at(skipped, begin[chosen] + 1, 1)
    np.add.at(skipped, np.minimum(targets[chosen], rows.end[begin[chosen]]), -1)
    return chosen, may_begin & (np.cumsum(skipped[:-1]) == 0)


def chosen_starts(rules: Rules, rows: SortedRows, entries: Entries, begin: Ints) -> tuple[Mask, Ints]:
    """Which matches stay, and the row at which the search goes on behind each."""
    targets = np.maximum(_targets(rules, entries, begin), begin + 1)
    return _chain(rows, begin, targets), targets


def longest_turn(keys: Ints) -> int:
    """How many beginnings one key has at most; `keys` are in order."""
    first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])) if len(keys) else keys
    return int(np.diff(first, append=len(keys)).max(initial=0))


class Turns:
    """Beginnings that are looked at a few of each key at a time: more where matches are short, fewer where each skips them all; none behind one that waits for rows which are not there yet."""

    def __init__(self, begin: Ints, keys: Ints) -> None:
        """`begin` has no row twice, and is in order; `keys`: of each."""
        self._begin = begin
        first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        self._next, self._stop, self._most = first, np.append(first[1:], len(begin)), np.full(len(first), FEW)

    def take(self) -> Ints:
        """The next ones, by their places among all."""
        counts = np.minimum(self._most, self._stop - self._next)
        found = runs(self._next, counts)
        self._next = self._next + counts
        return found

    def go_on(self, begin: Ints, targets: Ints, waiting: Ints) -> None:
        """Behind the matches that stay of those that were taken. `waiting`: those that wait."""
        before = np.searchsorted(begin, waiting) - 1
        seen = waiting[(before < 0) | (np.append(targets, 0)[before] <= waiting)]
        last = np.full(len(self._next), -1)
        np.maximum.at(last, self._key(begin), targets)
        behind = np.minimum(np.searchsorted(self._begin, last), self._stop)
        self._most = np.where(behind > self._next, np.maximum(self._most // 2, 1), np.minimum(self._most * 2, MANY))
        self._next = np.maximum(self._next, behind)
        self._next[self._key(seen)] = self._stop[self._key(seen)]

    def _key(self, rows: Ints) -> Ints:
        return np.searchsorted(self._stop, np.searchsorted(self._begin, rows), side="right")


def _targets(rules: Rules, entries: Entries, begin: Ints) -> Ints:
    """The row at which the search goes on behind each match. Where a match has no row of the symbol, that is the row behind its first."""
    count = len(begin)
    last = np.searchsorted(entries.owner, np.arange(count), side="right") - 1
    if rules.after.kind == PAST_LAST or rules.after.symbol is None:
        return entries.row[last] + 1
    members = rules.members(rules.after.symbol)
    fits = np.array([symbol in members for symbol in rules.automaton.symbols])[entries.place]
    mine = np.flatnonzero(fits)
    owners = entries.owner[mine]
    found = begin + 1
    if rules.after.kind == TO_FIRST:
        mine, owners = mine[::-1], owners[::-1]  # the last that is written stays
    found[owners] = entries.row[mine]
    return found


def _chain(rows: SortedRows, begin: Ints, targets: Ints) -> Mask:
    """Which matches are reached from the first of each key, going from each to the first at or behind its target."""
    count = len(begin)
    following = np.searchsorted(begin, np.minimum(targets, rows.end[begin]))
    following = np.append(following, count)
    key = np.append(rows.keys[begin], -1)
    same = key[following] == key
    following = np.where(same, following, count)
    reached = np.zeros(count + 1, np.bool_)
    if count:
        reached[:-1] = np.append(True, key[1:-1] != key[:-2])
    while (following[:-1] < count).any():
        reached[following[reached]] = True
        reached[count] = False
        following = following[following]
    return reached[:-1]
