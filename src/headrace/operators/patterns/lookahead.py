"""What can become of a row at a place of the automaton, for all rows at once: the earliest row with which a match could be complete, and the row at which every way on has ended.

Both follow from the places behind, so they are computed from the last places to the first, each for all rows in a few passes. A match that needs rows which are not there yet may
be complete with the next one (`rows.end`). Where a condition looks at earlier rows, it is taken to hold: what is told here is never too pessimistic about the first, nor too
optimistic about the second. A walk (`walking`) needs no more than this to go the right way at once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from headrace.operators.buffers import Ints
from headrace.operators.patterns.automaton import ACCEPT, Automaton, Edge
from headrace.operators.patterns.sorted_rows import NEVER, SortedRows, suffix_max, suffix_min
from headrace.operators.patterns.syntax import ANY, NEXT, STRICT

MOST_PASSES = 32


@dataclass(frozen=True)
class Way:
    """An edge, over these rows. `later`: for edges that may pass over rows that fit, the least completion and the last end from each row on."""

    edge: Edge
    mode: int
    following: Ints | None = None
    blocked: Ints | None = None
    soonest: Ints | None = None
    latest: Ints | None = None


class Lookahead:
    """`complete[place][row]`, `over[place][row]`: see above; NEVER and the row itself where the row does not fit. `doubtful`: symbols whose conditions look at earlier rows."""

    def __init__(self, automaton: Automaton, rows: SortedRows, doubtful: Collection[str] = ()) -> None:
        self.automaton, self.rows, self.doubtful = automaton, rows, frozenset(doubtful)
        self.complete: list[Ints] = [np.zeros(0, np.int64)] * len(automaton)
        self.over: list[Ints] = [np.zeros(0, np.int64)] * len(automaton)
        self.exits: dict[int, Ints] = {}  # of places that directly follow themselves: the rows up to each from which another way leads on, counted
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
        for place in group:  # what is not known yet: it might be complete at once, and it might never end
            fits = self.rows.mask(self.automaton.symbols[place])
            self.complete[place] = np.where(fits, self.rows.at, NEVER)
            self.over[place] = np.where(fits, NEVER, self.rows.at)
        for _ in range(MOST_PASSES):
            before = [(self.complete[place], self.over[place]) for place in group]
            for place in reversed(group):
                self._place(place, self.automaton.edges[place])
            if all((was[0] == self.complete[place]).all() and (was[1] == self.over[place]).all() for was, place in zip(before, group, strict=True)):
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
            its_complete, its_over = self._everywhere(way)
            complete, over = np.minimum(complete, its_complete), np.maximum(over, its_over)
        self.complete[place], self.over[place] = np.where(fits, complete, NEVER), np.where(fits, over, self.rows.at)
        self.ways[place] = ways

    def _loop(self, place: int, mode: int) -> None:
        """A place that also follows itself, given what the other ways from it are like."""
        rows, fits = self.rows, self.rows.mask(self.automaton.symbols[place])
        if mode != STRICT:
            soonest = np.minimum(suffix_min(self.complete[place], rows.begins), rows.end)
            self.complete[place], self.over[place] = np.where(fits, soonest, NEVER), np.where(fits, NEVER, rows.at)
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
        over = suffix_max(np.where(last, np.maximum(self.over[place], rows.at + 1), self.over[place]), begins)
        self.complete[place], self.over[place] = np.where(fits, complete, NEVER), np.where(fits, over, rows.at)

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
        latest = np.append(suffix_max(np.where(self.rows.mask(symbol), self.over[edge.to], -1), begins), -1)
        return Way(edge, ANY, following, blocked, soonest, latest)

    def look(self, way: Way, at: Ints) -> tuple[Ints, Ints]:
        """From these rows along an edge: the earliest completion, and when all ways there have ended."""
        if way.edge.to == ACCEPT:
            return at, at if self.unless is None else self.unless[at]
        if way.mode == STRICT:
            return self._directly(way.edge.to, at)
        if way.mode == NEXT:
            return self._next(way, at)
        return self._any(way, at)

    def _everywhere(self, way: Way) -> tuple[Ints, Ints]:
        """From all rows: where the next one is taken, what is known of it is what is known of the one behind."""
        if way.edge.to == ACCEPT or way.mode != STRICT:
            return self.look(way, self.rows.at)
        last = np.flatnonzero(self.rows.is_last)
        complete, over = (np.append(column[1:], NEVER) for column in (self.complete[way.edge.to], self.over[way.edge.to]))
        complete[last], over[last] = last + 1, last + 1
        return complete, over

    def _directly(self, to: int, at: Ints) -> tuple[Ints, Ints]:
        following, end = at + 1, self.rows.end[at]
        inside = following < end
        target = np.where(inside, following, at)
        fits = inside & self.rows.mask(self.automaton.symbols[to])[target]
        return np.where(inside, self.complete[to][target], end), np.where(fits, self.over[to][target], following)

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
        return np.where(blocked < target, NEVER, complete), np.where(blocked < target, blocked, over)

    def _any(self, way: Way, at: Ints) -> tuple[Ints, Ints]:
        assert way.soonest is not None
        assert way.latest is not None
        inside = at + 1 < self.rows.end[at]
        blocked = np.full(len(at), NEVER) if way.blocked is None else way.blocked[at]
        complete = np.where(inside, way.soonest[at + 1], NEVER)
        complete = np.where(blocked < NEVER, complete, np.minimum(complete, self.rows.end[at]))
        return complete, np.where(blocked < NEVER, np.maximum(np.where(inside, way.latest[at + 1], -1), blocked), NEVER)

    # Beginnings

    def beginning(self) -> tuple[Ints, Ints]:
        """For each row as the first of a match: the earliest completion, and when all is over."""
        complete, over = np.full(len(self.rows), NEVER), self.rows.at
        for place in self.automaton.first:
            complete, over = np.minimum(complete, self.complete[place]), np.maximum(over, self.over[place])
        return complete, over

