"""Walks through the automaton, from many first rows at once: each goes on along the first way by
which a match can still be complete in time (`lookahead`), so few ever have to turn back.

A walk ends as a match; or it waits, for rows that are not there yet; or it is lost: a condition
that looks at earlier rows did not hold. A lost walk that could have gone another way is done again,
one by one, with turning back (`backtracking`).

`certain` of a walk is the row that made it so: the last of the match, or the one that ended a way
which would have been tried before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from headrace.columnar.buffers import Ints, Mask, runs
from headrace.columnar.lookup import search
from headrace.operators.patterns.automaton import ACCEPT, Automaton, Edge
from headrace.operators.patterns.parser import ANY, NEXT, STRICT
from headrace.operators.patterns.row_buffer import NEVER, SortedRows, suffix_max, suffix_min

# What can become of a row at a place of the automaton, for all rows at once: the earliest row with
# which a match could be complete, and the row at which every way on has ended.
#
# Both follow from the places behind, so they are computed from the last places to the first, each
# for all rows in a few passes. A match that needs rows which are not there yet may be complete with
# the next one (`rows.end`). Where a condition looks at earlier rows, it is taken to hold: what is
# told here is never too pessimistic about the first, nor too optimistic about the second. A walk
# (`walking`) needs no more than this to go the right way at once.


MAX_PASSES = 32


@dataclass(frozen=True)
class Way:
    """An edge, over these rows. `later`: for edges that may pass over rows that fit, the least
    completion and the last end from each row on.
    """

    edge: Edge
    mode: int
    following: Ints | None = None
    blocked: Ints | None = None
    soonest: Ints | None = None
    latest: Ints | None = None


class Lookahead:
    """`complete[place][row]`, `over[place][row]`: see above; NEVER and the row itself where the row
    does not fit. `doubtful`: symbols whose conditions look at earlier rows.
    """

    def __init__(
        self, automaton: Automaton, rows: SortedRows, doubtful: Collection[str] = ()
    ) -> None:
        self.automaton, self.rows, self.doubtful = automaton, rows, frozenset(doubtful)
        self.complete: list[Ints] = [np.zeros(0, np.int64)] * len(automaton)
        self.over: list[Ints] = [np.zeros(0, np.int64)] * len(automaton)
        self.exits: dict[
            int, Ints
            # of places that directly follow themselves: the rows up to each from which another way
            # leads on, counted
        ] = {}
        self.run_end: dict[int, Ints] = {}
        self.exact = not self.doubtful and not automaton.pattern.waits
        self.unless = self._unless()
        self.ways: list[tuple[Way, ...]] = [()] * len(automaton)
        for group in automaton.groups:
            self._group(group)

    def _unless(self) -> Ints | None:
        """For each row the next one that would break what must be absent at the end."""
        pattern = self.automaton.pattern
        if pattern.alone:
            following = self.rows.at + 1
            return np.where(following < self.rows.end, following, NEVER)
        return self.rows.following(pattern.absent) if pattern.absent else None

    def _group(self, group: tuple[int, ...]) -> None:
        if len(group) == 1 and self._alone(group[0]):
            return
        for (
            place
        ) in group:  # what is not known yet: it might be complete at once, and it might never end
            fits = self.rows.mask(self.automaton.symbols[place])
            self.complete[place] = np.where(fits, self.rows.at, NEVER)
            self.over[place] = np.where(fits, NEVER, self.rows.at)
        for _ in range(MAX_PASSES):
            before = [(self.complete[place], self.over[place]) for place in group]
            for place in reversed(group):
                self._place(place, self.automaton.edges[place])
            if all(
                (was[0] == self.complete[place]).all() and (was[1] == self.over[place]).all()
                for was, place in zip(before, group, strict=True)
            ):
                return
        self.exact = False

    def _alone(self, place: int) -> bool:
        """A place that at most follows itself. False if that must be found out step by step."""
        edges = self.automaton.edges[place]
        own = [edge for edge in edges if edge.to == place]
        if any(edge.link.absent for edge in own) or len(own) > 1:
            return False
        self._place(place, [edge for edge in edges if edge.to != place])
        if own:
            self._loop(place, own[0].link.mode)
        self.ways[place] = tuple(self.way(edge) for edge in edges)
        return True

    def _place(self, place: int, edges: Collection[Edge]) -> None:
        fits = self.rows.mask(self.automaton.symbols[place])
        complete, over = np.full(len(self.rows), NEVER), self.rows.at
        ways = tuple(self.way(edge) for edge in edges)
        for way in ways:
            its_watermark, its_over = self._everywhere(way)
            complete, over = np.minimum(complete, its_watermark), np.maximum(over, its_over)
        self.complete[place], self.over[place] = (
            np.where(fits, complete, NEVER),
            np.where(fits, over, self.rows.at),
        )
        self.ways[place] = ways

    def _loop(self, place: int, mode: int) -> None:
        """A place that also follows itself, given what the other ways from it are like."""
        rows, fits = self.rows, self.rows.mask(self.automaton.symbols[place])
        if mode != STRICT:
            soonest = np.minimum(suffix_min(self.complete[place], rows.begins), rows.end)
            self.complete[place], self.over[place] = (
                np.where(fits, soonest, NEVER),
                np.where(fits, NEVER, rows.at),
            )
            return
        begins = rows.begins | ~fits
        begins[1:] |= ~fits[:-1]
        last = np.ones(len(rows), np.bool_)
        last[:-1] = begins[1:]
        at_end = rows.is_last
        others = self.complete[place]
        self.exits[place] = np.append(0, np.cumsum(others < NEVER))
        self.run_end[place] = suffix_max(rows.at, begins)
        complete = suffix_min(np.where(at_end, np.minimum(others, rows.end), others), begins)
        over = suffix_max(
            np.where(last, np.maximum(self.over[place], rows.at + 1), self.over[place]), begins
        )
        self.complete[place], self.over[place] = (
            np.where(fits, complete, NEVER),
            np.where(fits, over, rows.at),
        )

    # Edges

    def way(self, edge: Edge) -> Way:
        """An edge with what is needed to look along it from any row."""
        if edge.to == ACCEPT or edge.link.mode == STRICT:
            return Way(edge, STRICT)
        symbol = self.automaton.symbols[edge.to]
        following = self.rows.following((symbol,))
        blocked = self.rows.following(edge.link.absent) if edge.link.absent else None
        if edge.link.mode == NEXT and symbol not in self.doubtful:
            return Way(edge, NEXT, following, blocked)
        begins = self.rows.begins
        if edge.link.absent:
            begins = begins.copy()
            begins[1:] |= self.rows.any_of(edge.link.absent)[:-1]
        soonest = np.append(suffix_min(self.complete[edge.to], begins), NEVER)
        latest = np.append(
            suffix_max(np.where(self.rows.mask(symbol), self.over[edge.to], -1), begins), -1
        )
        return Way(edge, ANY, following, blocked, soonest, latest)

    def look(self, way: Way, at: Ints) -> tuple[Ints, Ints]:
        """From these rows along an edge: the earliest completion, and when all ways there have
        ended.
        """
        if way.edge.to == ACCEPT:
            return at, at if self.unless is None else self.unless[at]
        if way.mode == STRICT:
            return self._directly(way.edge.to, at)
        if way.mode == NEXT:
            return self._next(way, at)
        return self._any(way, at)

    def _everywhere(self, way: Way) -> tuple[Ints, Ints]:
        """From all rows: where the next one is taken, what is known of it is what is known of the
        one behind.
        """
        if way.edge.to == ACCEPT or way.mode != STRICT:
            return self.look(way, self.rows.at)
        last = np.flatnonzero(self.rows.is_last)
        complete, over = (
            np.append(column[1:], NEVER)
            for column in (self.complete[way.edge.to], self.over[way.edge.to])
        )
        complete[last], over[last] = last + 1, last + 1
        return complete, over

    def _directly(self, to: int, at: Ints) -> tuple[Ints, Ints]:
        following, end = at + 1, self.rows.end[at]
        inside = following < end
        target = np.where(inside, following, at)
        fits = inside & self.rows.mask(self.automaton.symbols[to])[target]
        return np.where(inside, self.complete[to][target], end), np.where(
            fits, self.over[to][target], following
        )

    def _next(self, way: Way, at: Ints) -> tuple[Ints, Ints]:
        assert way.following is not None
        target = way.following[at]
        known = target < NEVER
        there = np.where(known, target, at)
        complete = np.where(known, self.complete[way.edge.to][there], self.rows.end[at])
        over = np.where(known, self.over[way.edge.to][there], NEVER)
        if way.blocked is None:
            return complete, over
        blocked = way.blocked[at]
        return np.where(blocked < target, NEVER, complete), np.where(
            blocked < target, blocked, over
        )

    def _any(self, way: Way, at: Ints) -> tuple[Ints, Ints]:
        assert way.soonest is not None
        assert way.latest is not None
        inside = at + 1 < self.rows.end[at]
        blocked = np.full(len(at), NEVER) if way.blocked is None else way.blocked[at]
        complete = np.where(inside, way.soonest[at + 1], NEVER)
        complete = np.where(blocked < NEVER, complete, np.minimum(complete, self.rows.end[at]))
        return complete, np.where(
            blocked < NEVER, np.maximum(np.where(inside, way.latest[at + 1], -1), blocked), NEVER
        )

    # Beginnings

    def beginning(self) -> tuple[Ints, Ints]:
        """For each row as the first of a match: the earliest completion, and when all is over."""
        complete, over = np.full(len(self.rows), NEVER), self.rows.at
        for place in self.automaton.first:
            complete, over = (
                np.minimum(complete, self.complete[place]),
                np.maximum(over, self.over[place]),
            )
        return complete, over


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
        return Entries(
            _one(owner), _one([part.row for part in parts]), _one([part.place for part in parts])
        )


def _one(arrays: list[Ints]) -> Ints:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


Holds = Callable[[str, Entries, int], Mask]
"""Whether the condition of a symbol holds for the last entry of each of so many owners, given those
before it.
"""


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
    _steps: list[tuple[Ints, Ints, Ints, Ints]] = field(
        default_factory=list
    )  # walks, places, first and last rows

    @staticmethod
    def over(begin: Ints, limit: Ints) -> Walks:
        count = len(begin)
        nowhere = np.full(count, ACCEPT)
        return Walks(
            begin,
            limit,
            begin.copy(),
            nowhere,
            begin.copy(),
            np.zeros(count, np.int64),
            np.zeros(count, np.bool_),
        )

    def took(self, which: Ints, place: int, first: Ints, last: Ints) -> None:
        self.place[which], self.row[which] = place, last
        self._steps.append((which, np.full(len(which), place), first, last))

    def entries(self, which: Ints) -> Entries:
        """The rows that some walks have taken so far; owners are places in `which`, which is in
        order.
        """
        if not self._steps:
            return Entries(*(np.zeros(0, np.int64) for _ in range(3)))
        walks, places, first, last = (
            np.concatenate(column) for column in zip(*self._steps, strict=True)
        )
        number = np.full(len(self.begin), -1)
        number[which] = np.arange(len(which))
        mine = np.flatnonzero(number[walks] >= 0)
        mine = mine[np.argsort(number[walks[mine]], kind="stable")]
        lengths = last[mine] - first[mine] + 1
        return Entries(
            np.repeat(number[walks[mine]], lengths),
            runs(first[mine], lengths),
            np.repeat(places[mine], lengths),
        )


class Walker:
    """Walks over one lookahead. `holds` decides conditions that look at earlier rows. `wary`: every
    walk says whether it could have gone another way.
    """

    def __init__(self, look: Lookahead, holds: Holds, *, wary: bool = False) -> None:
        self.look, self.holds = look, holds
        self._wary = wary or not look.exact
        self.automaton, self.rows = look.automaton, look.rows
        self._jumps = frozenset(place for place in look.exits if self._may_jump(place))

    def _may_jump(self, place: int) -> bool:
        """Whether a place takes all rows of a run that it can, one after the other, without looking
        back.
        """
        return (
            self.automaton.edges[place][0].to == place
            and self.automaton.symbols[place] not in self.look.doubtful
        )

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
        """How far walks had come that could have gone on: the first way of each that had not
        ended.
        """
        walks = Walks.over(begin, limit)
        for place in reversed(self.automaton.first):
            walks.place[self.look.over[place][begin] > limit] = place
        for place in set(walks.place.tolist()) - {ACCEPT}:
            which = np.flatnonzero(walks.place == place)
            walks.took(which, place, begin[which], begin[which])
        active = np.flatnonzero(walks.place != ACCEPT)
        while len(active):
            moved = [
                self._still(walks, active[walks.place[active] == place], place)
                for place in np.unique(walks.place[active]).tolist()
            ]
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
            which = (
                self._tried(walks, which, place, walks.begin[which])
                if symbol in self.look.doubtful
                else which
            )
            refused = ~placed
            refused[which] = False
            walks.certain[refused] = np.maximum(
                walks.certain[refused], self.look.over[place][walks.begin[refused]]
            )
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
        row, places = (
            np.concatenate([before.row, rows]),
            np.concatenate([before.place, np.full(len(rows), place)]),
        )
        return self.holds(
            self.automaton.symbols[place],
            Entries(owner[order], row[order], places[order]),
            len(which),
        )

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
        """Along a run of rows that the place takes, to the last from which a match can be complete
        in time.
        """
        here = walks.row[which]
        last = (
            search(
                self.look.complete[place],
                here + 1,
                self.look.run_end[place][here] + 1,
                walks.limit[which],
                right=True,
            )
            - 1
        )
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
        """The row that each takes: NEVER if it has to wait for one, -1 if the condition holds for
        none.
        """
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
        ends = np.zeros(
            len(left), np.bool_
        )  # where the next row that fits is one that leads nowhere
        if self.automaton.symbols[to] in self.look.doubtful:
            tried = np.flatnonzero(fine) if way.edge.link.mode == ANY else np.arange(len(left))
            holds = np.zeros(len(left), np.bool_)
            holds[tried] = (
                self._holds(walks, which[left[tried]], to, rows[tried]) if len(tried) else False
            )
            ends = holds & ~fine & (way.edge.link.mode == NEXT)
            fine &= holds
        self._note(walks, which[left[~fine]], self.look.over[to][rows[~fine]])
        if way.mode == STRICT:
            found[left[~fine]] = -1
            return left[:0]
        found[left[ends]] = -1
        return self._later(walks, which, way, found, left[~fine & ~ends])

    def _later(self, walks: Walks, which: Ints, way: Way, found: Ints, bad: Ints) -> Ints:
        """The rows behind those that will not do: NEVER where it has to be waited for, -1 where
        there is none.
        """
        assert way.following is not None
        following, here = way.following[found[bad]], walks.row[which[bad]]
        blocked = np.full(len(bad), NEVER) if way.blocked is None else way.blocked[here]
        waits = (
            (following == NEVER)
            & (blocked == NEVER)
            & (walks.limit[which[bad]] >= self.rows.end[here])
        )
        found[bad] = np.where(
            waits, NEVER, np.where((following < NEVER) & (following <= blocked), following, -1)
        )
        return bad[(found[bad] >= 0) & (found[bad] < NEVER)]
