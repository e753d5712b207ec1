"""Walks through the automaton, from many first rows at once: each goes on along the first way by which a match can still be complete in time (`lookahead`), so few ever have to turn back.

A walk ends as a match; or it waits, for rows that are not there yet; or it is lost: a condition that looks at earlier rows did not hold. A lost walk that could have gone
another way is done again, one by one, with turning back (`backtracking`).

`certain` of a walk is the row that made it so: the last of the match, or the one that ended a way which would have been tried before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from headrace.operators.buffers import Ints, Mask, runs
from headrace.operators.joins.matching import search
from headrace.operators.patterns.automaton import ACCEPT
from headrace.operators.patterns.lookahead import Lookahead, Way
from headrace.operators.patterns.sorted_rows import NEVER
from headrace.operators.patterns.syntax import ANY, NEXT, STRICT

MATCHED, WAITING, LOST = 1, 2, 3


@dataclass(frozen=True)
class Entries:
    """Rows of matches, in order of match and row: whose each is, which row, and at which place."""

    owner: Ints
    row: Ints
    place: Ints

    def of(self, which: Mask) -> Entries:
        """Those of some owners, who are numbered anew."""
        number = np.cumsum(which) - 1
        mine = which[self.owner]
        return Entries(number[self.owner[mine]], self.row[mine], self.place[mine])

    @staticmethod
    def joined(parts: list[Entries], counts: list[int]) -> Entries:
        """Several, one behind the other; `counts`: how many owners each has."""
        shifts = np.cumsum([0, *counts[:-1]])
        owner = [part.owner + shift for part, shift in zip(parts, shifts, strict=True)]
        return Entries(_one(owner), _one([part.row for part in parts]), _one([part.place for part in parts]))


def _one(arrays: list[Ints]) -> Ints:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


Holds = Callable[[str, Entries, int], Mask]
"""Whether the condition of a symbol holds for the last entry of each of so many owners, given those before it."""


@dataclass
class Walks:
    """Walks from rows, each with the last row that it may reach."""

    begin: Ints
    limit: Ints
    row: Ints
    place: Ints
    certain: Ints
    status: Ints
    chose: Mask
    _steps: list[tuple[Ints, Ints, Ints, Ints]] = field(default_factory=list)  # walks, places, first and last rows

    @staticmethod
    def over(begin: Ints, limit: Ints) -> Walks:
        count = len(begin)
        nowhere = np.full(count, ACCEPT)
        return Walks(begin, limit, begin.copy(), nowhere, begin.copy(), np.zeros(count, np.int64), np.zeros(count, np.bool_))

    def took(self, which: Ints, place: int, first: Ints, last: Ints) -> None:
        self.place[which], self.row[which] = place, last
        self._steps.append((which, np.full(len(which), place), first, last))

    def entries(self, which: Ints) -> Entries:
        """The rows that some walks have taken so far; owners are places in `which`, which is in order."""
        if not self._steps:
            return Entries(*(np.zeros(0, np.int64) for _ in range(3)))
        walks, places, first, last = (np.concatenate(column) for column in zip(*self._steps, strict=True))
        number = np.full(len(self.begin), -1)
        number[which] = np.arange(len(which))
        mine = np.flatnonzero(number[walks] >= 0)
        mine = mine[np.argsort(number[walks[mine]], kind="stable")]
        lengths = last[mine] - first[mine] + 1
        return Entries(np.repeat(number[walks[mine]], lengths), runs(first[mine], lengths), np.repeat(places[mine], lengths))


class Walker:
    """Walks over one lookahead. `holds` decides conditions that look at earlier rows. `wary`: every walk says whether it could have gone another way."""

    def __init__(self, look: Lookahead, holds: Holds, *, wary: bool = False) -> None:
        self.look, self.holds = look, holds
        self._wary = wary or not look.exact
        self.automaton, self.rows = look.automaton, look.rows
        self._jumps = frozenset(place for place in look.exits if self._may_jump(place))

    def _may_jump(self, place: int) -> bool:
        """Whether a place takes all rows of a run that it can, one after the other, without looking back."""
        return self.automaton.edges[place][0].to == place and self.automaton.symbols[place] not in self.look.doubtful

    def walk(self, begin: Ints, limit: Ints) -> Walks:
        """From these rows, which can begin a match, up to these."""
        walks = Walks.over(begin, limit)
        self._begin(walks)
        active = np.flatnonzero(walks.status == 0)
        while len(active):
            for place in np.unique(walks.place[active]).tolist():
                self._on(walks, active[walks.place[active] == place], place)
            active = active[walks.status[active] == 0]
        return walks

    def partly(self, begin: Ints, limit: Ints) -> Entries:
        """How far walks had come that could have gone on: the first way of each that had not ended."""
        walks = Walks.over(begin, limit)
        for place in reversed(self.automaton.first):
            walks.place[self.look.over[place][begin] > limit] = place
        for place in set(walks.place.tolist()) - {ACCEPT}:
            which = np.flatnonzero(walks.place == place)
            walks.took(which, place, begin[which], begin[which])
        active = np.flatnonzero(walks.place != ACCEPT)
        while len(active):
            moved = [self._still(walks, active[walks.place[active] == place], place) for place in np.unique(walks.place[active]).tolist()]
            active = np.unique(np.concatenate(moved))
        return walks.entries(np.arange(len(begin)))

    def _still(self, walks: Walks, which: Ints, place: int) -> Ints:
        """One step along the first ways that have not ended; the walks that took a row."""
        free, here = np.ones(len(which), np.bool_), walks.row[which]
        moved = []
        for way in self.look.ways[place]:
            if way.edge.to == ACCEPT:
                continue
            alive = np.flatnonzero(free & (self.look.look(way, here)[1] > walks.limit[which]))
            free[alive] = False
            target = here[alive] + 1 if way.following is None else way.following[here[alive]]
            goes = target <= walks.limit[which[alive]]
            goes[goes] = self.look.over[way.edge.to][target[goes]] > walks.limit[which[alive[goes]]]
            alive, target = alive[goes], target[goes]
            if self.automaton.symbols[way.edge.to] in self.look.doubtful and len(alive):
                holds = self._holds(walks, which[alive], way.edge.to, target)
                alive, target = alive[holds], target[holds]
            walks.took(which[alive], way.edge.to, target, target)
            moved.append(which[alive])
        return np.concatenate(moved) if moved else which[:0]

    def _begin(self, walks: Walks) -> None:
        left = np.arange(len(walks.begin))
        chosen: list[tuple[Ints, int]] = []
        placed = np.zeros(len(left), np.bool_)
        for place in self.automaton.first:
            symbol = self.automaton.symbols[place]
            viable = self.look.complete[place][walks.begin] <= walks.limit
            walks.chose |= placed & viable
            which = np.flatnonzero(viable & ~placed)
            which = self._tried(walks, which, place, walks.begin[which]) if symbol in self.look.doubtful else which
            refused = ~placed
            refused[which] = False
            walks.certain[refused] = np.maximum(walks.certain[refused], self.look.over[place][walks.begin[refused]])
            placed[which] = True
            chosen.append((which, place))
        for which, place in chosen:
            walks.took(which, place, walks.begin[which], walks.begin[which])
        walks.status[~placed] = LOST

    def _tried(self, walks: Walks, which: Ints, place: int, rows: Ints) -> Ints:
        """Those of some walks for which the condition of a place holds on a row."""
        if not len(which):
            return which
        return which[self._holds(walks, which, place, rows)]

    def _holds(self, walks: Walks, which: Ints, place: int, rows: Ints) -> Mask:
        before = walks.entries(which)
        owner = np.concatenate([before.owner, np.arange(len(which))])
        order = np.argsort(owner, kind="stable")
        row, places = np.concatenate([before.row, rows]), np.concatenate([before.place, np.full(len(rows), place)])
        return self.holds(self.automaton.symbols[place], Entries(owner[order], row[order], places[order]), len(which))

    def _on(self, walks: Walks, which: Ints, place: int) -> None:
        """One step of the walks that stand at a place."""
        if place in self._jumps:
            self._jump(walks, which, place)
        free, here = np.ones(len(which), np.bool_), walks.row[which]
        for way in self.look.ways[place]:
            if not self._wary and not free.any():
                break
            complete, over = self.look.look(way, here)
            viable = complete <= walks.limit[which]
            if way.edge.to == ACCEPT and self.look.unless is not None:
                viable &= self.look.unless[here] > walks.limit[which]
            walks.chose[which[~free & viable]] = True
            tried = np.flatnonzero(free & viable)
            gone = tried[self._go(walks, which[tried], way)]
            refused = free.copy()
            refused[gone] = False
            self._note(walks, which[refused], over[refused])
            free[gone] = False
        walks.status[which[free]] = LOST

    @staticmethod
    def _note(walks: Walks, which: Ints, over: Ints) -> None:
        walks.certain[which] = np.maximum(walks.certain[which], over)

    def _jump(self, walks: Walks, which: Ints, place: int) -> None:
        """Along a run of rows that the place takes, to the last from which a match can be complete in time."""
        here = walks.row[which]
        last = search(self.look.complete[place], here + 1, self.look.run_end[place][here] + 1, walks.limit[which], right=True) - 1
        moves = last > here
        exits = self.look.exits[place]
        walks.chose[which[moves]] |= exits[last[moves]] > exits[here[moves]]
        walks.took(which[moves], place, here[moves] + 1, last[moves])

    def _go(self, walks: Walks, which: Ints, way: Way) -> Mask:
        """Take walks along an edge; which of them could go."""
        if not len(which):
            return np.zeros(0, np.bool_)
        if way.edge.to == ACCEPT:
            self._accept(walks, which)
            return np.ones(len(which), np.bool_)
        targets = self._targets(walks, which, way)
        waiting = targets == NEVER
        walks.status[which[waiting]] = WAITING
        walks.certain[which[waiting]] = NEVER
        go = (targets < NEVER) & (targets >= 0)
        walks.took(which[go], way.edge.to, targets[go], targets[go])
        return targets >= 0

    def _accept(self, walks: Walks, which: Ints) -> None:
        walks.status[which] = MATCHED
        ends = walks.row[which] if self.look.unless is None else NEVER
        walks.certain[which] = np.maximum(walks.certain[which], ends)

    def _targets(self, walks: Walks, which: Ints, way: Way) -> Ints:
        """The row that each takes: NEVER if it has to wait for one, -1 if the condition holds for none."""
        at, end = walks.row[which], self.rows.end[walks.row[which]]
        if way.mode == STRICT:
            first = np.where(at + 1 < end, at + 1, NEVER)
        else:
            assert way.following is not None
            first = way.following[at]
            walks.chose[which] |= way.soonest is not None
        found = first.copy()
        left = np.flatnonzero(first < NEVER)
        while len(left):
            left = self._checked(walks, which, way, found, left)
        return found

    def _checked(self, walks: Walks, which: Ints, way: Way, found: Ints, left: Ints) -> Ints:
        """Put the next row in the place of one that will not do; those whose row is new."""
        to, rows = way.edge.to, found[left]
        fine = self.look.complete[to][rows] <= walks.limit[which[left]]
        ends = np.zeros(len(left), np.bool_)  # where the next row that fits is one that leads nowhere
        if self.automaton.symbols[to] in self.look.doubtful:
            tried = np.flatnonzero(fine) if way.edge.link.mode == ANY else np.arange(len(left))
            holds = np.zeros(len(left), np.bool_)
            holds[tried] = self._holds(walks, which[left[tried]], to, rows[tried]) if len(tried) else False
            ends = holds & ~fine & (way.edge.link.mode == NEXT)
            fine &= holds
        self._note(walks, which[left[~fine]], self.look.over[to][rows[~fine]])
        if way.mode == STRICT:
            found[left[~fine]] = -1
            return left[:0]
        found[left[ends]] = -1
        return self._later(walks, which, way, found, left[~fine & ~ends])

    def _later(self, walks: Walks, which: Ints, way: Way, found: Ints, bad: Ints) -> Ints:
        """The rows behind those that will not do: NEVER where it has to be waited for, -1 where there is none."""
        assert way.following is not None
        following, here = way.following[found[bad]], walks.row[which[bad]]
        blocked = np.full(len(bad), NEVER) if way.blocked is None else way.blocked[here]
        waits = (following == NEVER) & (blocked == NEVER) & (walks.limit[which[bad]] >= self.rows.end[here])
        found[bad] = np.where(waits, NEVER, np.where((following < NEVER) & (following <= blocked), following, -1))
        return bad[(found[bad] >= 0) & (found[bad] < NEVER)]
