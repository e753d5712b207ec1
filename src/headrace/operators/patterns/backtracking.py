"""One start after the other, trying every way in order and turning back where one ends: for walks that were lost although they could have gone another way, and for all matches of a start.

It looks ahead as walks do, so it tries only what can still be complete in time. What it tries is bounded; a start that takes more is given up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from headrace.operators.buffers import Ints
from headrace.operators.patterns.automaton import ACCEPT
from headrace.operators.patterns.lookahead import Lookahead, Way
from headrace.operators.patterns.sorted_rows import NEVER
from headrace.operators.patterns.syntax import NEXT, STRICT
from headrace.operators.patterns.walking import LOST, MATCHED, WAITING, Entries, Holds

MOST_TRIES = 20_000
Path = list[tuple[int, int]]
"""Rows and their places."""


class TooManyTries(Exception):
    """A start that is given up."""


@dataclass
class Found:
    """What became of a start: its matches, and the row that made it certain."""

    status: int
    certain: int
    paths: list[Path] = field(default_factory=list)


class Backtracker:
    """Over one lookahead. `most`: how many matches of one start there may be."""

    def __init__(self, look: Lookahead, holds: Holds, *, most: int = 1000) -> None:
        self.look, self.holds, self.most = look, holds, most
        self.automaton, self.rows = look.automaton, look.rows

    def first(self, begin: int, limit: int) -> Found:
        """The match that comes first in the order in which ways are tried."""
        search = _Search(self, begin, limit)
        for path in search.paths():
            if path is None:
                return Found(WAITING, NEVER)
            return Found(MATCHED, max(search.certain, NEVER if self.look.unless is not None else path[-1][0]), [path])
        return Found(LOST, search.certain)

    def all(self, begin: int, limit: int) -> Found:
        """Every match. TooManyTries if there are too many."""
        search = _Search(self, begin, limit)
        found: dict[tuple[tuple[int, str], ...], Path] = {}
        for path in search.paths():
            if path is not None:
                found.setdefault(tuple((row, self.automaton.symbols[place]) for row, place in path), path)
                if len(found) > self.most:
                    raise TooManyTries
        return Found(MATCHED if found else LOST, search.certain, list(found.values()))


@dataclass
class _Search:
    """A search from one row. `certain`: the last row that ended a way so far."""

    by: Backtracker
    begin: int
    limit: int
    certain: int = 0
    tries: int = 0

    def __post_init__(self) -> None:
        self.certain = self.begin
        self.look, self.rows = self.by.look, self.by.rows

    def paths(self) -> Iterator[Path | None]:
        """Matches in order; None where a way waits for rows that are not there yet."""
        path: Path = []
        left: list[Iterator[tuple[int, int] | None]] = [self._beginnings()]
        while left:
            step = next(left[-1], ())
            if step == ():
                left.pop()
                if path:
                    path.pop()
            elif step is None:
                yield None
            elif step[1] == ACCEPT:  # type: ignore[misc]
                yield list(path)
            else:
                path.append(step)  # type: ignore[arg-type]
                left.append(self._on(path))

    def _beginnings(self) -> Iterator[tuple[int, int] | None]:
        for place in self.by.automaton.first:
            if self.look.complete[place][self.begin] <= self.limit and self._holds([], self.begin, place):
                yield self.begin, place
            self._ended(int(self.look.over[place][self.begin]))

    def _on(self, path: Path) -> Iterator[tuple[int, int] | None]:
        """The ways on from the last row of a path. Who comes back from one has found that it ended."""
        before = list(path)
        row, place = before[-1]
        for way in self.look.ways[place]:
            complete, over = (int(each[0]) for each in self.look.look(way, np.array([row])))
            if way.edge.to == ACCEPT:
                if self.look.unless is None or self.look.unless[row] > self.limit:
                    yield row, ACCEPT
            elif complete <= self.limit:
                yield from self._along(before, way, row)
            self._ended(over)

    def _along(self, path: Path, way: Way, row: int) -> Iterator[tuple[int, int] | None]:
        to, end = way.edge.to, int(self.rows.end[row])
        if way.mode == STRICT:
            if row + 1 >= end:
                yield None
            elif self.look.complete[to][row + 1] <= self.limit and self._holds(path, row + 1, to):
                yield row + 1, to
            return
        assert way.following is not None
        blocked = NEVER if way.blocked is None else int(way.blocked[row])
        target = int(way.following[row])
        while target < NEVER and target <= blocked:
            if self._holds(path, target, to):
                if self.look.complete[to][target] <= self.limit:
                    yield target, to
                if way.edge.link.mode == NEXT:
                    return
            target = int(way.following[target])
        if blocked == NEVER and self.limit >= end:
            yield None

    def _holds(self, path: Path, row: int, place: int) -> bool:
        self.tries += 1
        if self.tries > MOST_TRIES:
            raise TooManyTries
        symbol = self.by.automaton.symbols[place]
        if not self.rows.mask(symbol)[row]:
            return False
        if symbol not in self.look.doubtful:
            return True
        return bool(self.by.holds(symbol, entries_of([[*path, (row, place)]]), 1)[0])

    def _ended(self, over: int) -> None:
        self.certain = max(self.certain, over)


def entries_of(paths: list[Path]) -> Entries:
    """Paths as columns."""
    lengths = np.array([len(path) for path in paths], np.int64)
    both: Ints = np.array([step for path in paths for step in path], np.int64).reshape(-1, 2)
    return Entries(np.repeat(np.arange(len(paths)), lengths), both[:, 0], both[:, 1])


