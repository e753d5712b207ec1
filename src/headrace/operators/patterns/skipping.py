"""Where the next match may begin: of all beginnings that match, those that are left when each is skipped to by the one before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.operators.buffers import Ints, Mask
from headrace.operators.patterns.sorted_rows import SortedRows
from headrace.operators.patterns.specs import PAST_LAST, TO_FIRST
from headrace.operators.patterns.walking import Entries

if TYPE_CHECKING:
    from headrace.operators.patterns.matching import Rules


def visited_starts(rules: Rules, rows: SortedRows, may_begin: Mask, entries: Entries, begin: Ints) -> tuple[Mask, Mask]:
    """Which matches stay, and which rows are looked at as a beginning at all. `begin` has no row twice, and is in order."""
    targets = np.maximum(_targets(rules, entries, begin), begin + 1)
    chosen = _chain(rows, begin, targets)
    skipped = np.zeros(len(rows) + 1, np.int64)
    np.add.at(skipped, begin[chosen] + 1, 1)
    np.add.at(skipped, np.minimum(targets[chosen], rows.end[begin[chosen]]), -1)
    return chosen, may_begin & (np.cumsum(skipped[:-1]) == 0)


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
