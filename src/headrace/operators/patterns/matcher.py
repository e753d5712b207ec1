"""Finds the matches of one pattern in rows that are in order, of many keys at once; says which are
certain, since when, and which rows are still needed.

A row's fate as the first of a match is certain from a time on: that of the row that completed or
ended it, or its deadline. Nothing depends on which rows came in which call: what is certain before
a call was told then, what is certain at its end is told now.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from headrace.columnar.buffers import Ints, Mask, runs
from headrace.columnar.lookup import search
from headrace.operators.kernel import Times
from headrace.operators.patterns.automaton import ACCEPT, Automaton
from headrace.operators.patterns.parser import (
    MAX_MATCHES,
    MAX_ROWS,
    NEXT,
    NO_SKIP,
    PAST_LAST,
    SKIP_PAST_LAST,
    STRICT,
    TO_FIRST,
    AfterMatch,
)
from headrace.operators.patterns.row_buffer import NEVER, SortedRows
from headrace.operators.patterns.walker import (
    LOST,
    MATCHED,
    WAITING,
    Entries,
    Holds,
    Lookahead,
    Walker,
    Way,
)

# Where the next match may begin: of all beginnings that match, those that are left when each is
# skipped to by the one before.


FEW, MANY = 8, 1 << 20
"""How many beginnings of a key are looked at together, at first and at most."""


def visited_starts(
    rules: Rules, rows: SortedRows, may_begin: Mask, entries: Entries, begin: Ints
) -> tuple[Mask, Mask]:
    """Which matches stay, and which rows are looked at as a beginning at all. `begin` has no row
    twice, and is in order.
    """
    chosen, targets = chosen_starts(rules, rows, entries, begin)
    skipped = np.zeros(len(rows) + 1, np.int64)
    np.add.at(skipped, begin[chosen] + 1, 1)
    np.add.at(skipped, np.minimum(targets[chosen], rows.end[begin[chosen]]), -1)
    return chosen, may_begin & (np.cumsum(skipped[:-1]) == 0)


def chosen_starts(
    rules: Rules, rows: SortedRows, entries: Entries, begin: Ints
) -> tuple[Mask, Ints]:
    """Which matches stay, and the row at which the search goes on behind each."""
    targets = np.maximum(_targets(rules, entries, begin), begin + 1)
    return _chain(rows, begin, targets), targets


def longest_turn(keys: Ints) -> int:
    """How many beginnings one key has at most; `keys` are in order."""
    first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])) if len(keys) else keys
    return int(np.diff(first, append=len(keys)).max(initial=0))


class Turns:
    """Beginnings that are looked at a few of each key at a time: more where matches are short,
    fewer where each skips them all; none behind one that waits for rows which are not there yet.
    """

    def __init__(self, begin: Ints, keys: Ints) -> None:
        """`begin` has no row twice, and is in order; `keys`: of each."""
        self._begin = begin
        first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        self._next, self._stop, self._most = (
            first,
            np.append(first[1:], len(begin)),
            np.full(len(first), FEW),
        )

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
        self._most = np.where(
            behind > self._next, np.maximum(self._most // 2, 1), np.minimum(self._most * 2, MANY)
        )
        self._next = np.maximum(self._next, behind)
        self._next[self._key(seen)] = self._stop[self._key(seen)]

    def _key(self, rows: Ints) -> Ints:
        return np.searchsorted(self._stop, np.searchsorted(self._begin, rows), side="right")


def _targets(rules: Rules, entries: Entries, begin: Ints) -> Ints:
    """The row at which the search goes on behind each match. Where a match has no row of the
    symbol, that is the row behind its first.
    """
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
    """Which matches are reached from the first of each key, going from each to the first at or
    behind its target.
    """
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


# One start after the other, trying every way in order and turning back where one ends: for walks
# that were lost although they could have gone another way, and for all matches of a start.
#
# It looks ahead as walks do, so it tries only what can still be complete in time. What it tries is
# bounded; a start that takes more is given up.


MAX_TRIES = 20_000
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
            return Found(
                MATCHED,
                max(search.certain, NEVER if self.look.unless is not None else path[-1][0]),
                [path],
            )
        return Found(LOST, search.certain)

    def all(self, begin: int, limit: int) -> Found:
        """Every match. TooManyTries if there are too many."""
        search = _Search(self, begin, limit)
        found: dict[tuple[tuple[int, str], ...], Path] = {}
        for path in search.paths():
            if path is not None:
                found.setdefault(
                    tuple((row, self.automaton.symbols[place]) for row, place in path), path
                )
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
            if self.look.complete[place][self.begin] <= self.limit and self._holds(
                [], self.begin, place
            ):
                yield self.begin, place
            self._ended(int(self.look.over[place][self.begin]))

    def _on(self, path: Path) -> Iterator[tuple[int, int] | None]:
        """The ways on from the last row of a path. Who comes back from one has found that it
        ended.
        """
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
        if self.tries > MAX_TRIES:
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


FOREVER = np.iinfo(np.int64).max
WORTHWHILE = 64
"""From so many beginnings of a key on it pays to look at them in turn."""


@dataclass(frozen=True)
class Rules:
    """What the matcher needs to know of a pattern. `subsets`: names for several symbols."""

    automaton: Automaton
    doubtful: frozenset[str] = frozenset()
    within_us: int | None = None
    after: AfterMatch = SKIP_PAST_LAST
    subsets: tuple[tuple[str, tuple[str, ...]], ...] = ()
    max_rows: int = MAX_ROWS
    max_matches: int = MAX_MATCHES

    def members(self, name: str) -> tuple[str, ...]:
        """The symbols that a name stands for."""
        return dict(self.subsets).get(name, (name,))


@dataclass(frozen=True)
class Matches:
    """Matches in order of key and beginning: their rows, and the time since which each is
    certain.
    """

    entries: Entries
    begin: Ints
    certain_us: Times

    def __len__(self) -> int:
        return len(self.begin)

    def take(self, which: Mask) -> Matches:
        return Matches(self.entries.of(which), self.begin[which], self.certain_us[which])


@dataclass(frozen=True)
class Outcome:
    """Of rows: the matches; for each row as a beginning since when its fate is certain (FOREVER:
    not yet); beginnings whose time ran out; and how many were given up as too long.
    """

    matches: Matches
    certain_us: Times
    timed_out: Ints
    given_up: Ints


class Matcher:
    """One pattern over some rows, whose time is known up to `now_us`: rows of that time and later
    are not there yet. `open`: which rows may begin a match.
    """

    def __init__(
        self, rules: Rules, rows: SortedRows, now_us: int, holds: Holds, may_begin: Mask
    ) -> None:
        self.rules, self.rows, self.now_us, self.may_begin = rules, rows, now_us, may_begin
        self.look = Lookahead(rules.automaton, rows, rules.doubtful)
        self.holds = holds
        within = rules.within_us
        self.deadline = (
            np.full(len(rows), FOREVER)
            if within is None
            else np.where(rows.times > FOREVER - within, FOREVER, rows.times + within)
        )
        self.cut = rows.at + rules.max_rows
        self._gave_up: list[int] = []

    def run(self) -> Outcome:
        """Find everything."""
        complete, over = self.look.beginning()
        over = np.where(self.may_begin, over, self.rows.at)
        decided_by, at_deadline = self._decided(self.rows.at, over)
        matches, certain = self._found(complete)
        own, late = self._decided(matches.begin, certain)
        if self.rules.after.kind != NO_SKIP:
            decided_by[matches.begin], at_deadline[matches.begin] = own, late
        begin_at = np.zeros(len(self.rows), np.bool_)
        begin_at[matches.begin] = True
        if self.rules.after.in_turn:
            chosen, visited = visited_starts(
                self.rules, self.rows, self.may_begin, matches.entries, matches.begin
            )
            matches = matches.take(chosen)
            certain_us = self._in_turn(np.where(visited, decided_by, -1), at_deadline & visited)
            matches = Matches(matches.entries, matches.begin, certain_us[matches.begin])
        else:
            visited = self.may_begin
            certain_us = self._times(decided_by, at_deadline, self.rows.at)
            matches = Matches(matches.entries, matches.begin, self._times(own, late, matches.begin))
        certain_us = np.where(visited, certain_us, -FOREVER)
        in_vain = visited & ~begin_at
        return Outcome(
            matches,
            certain_us,
            np.flatnonzero(in_vain & at_deadline),
            self._given_up(in_vain & (decided_by == self.cut)),
        )

    def _given_up(self, too_long: Mask) -> Ints:
        return np.union1d(np.flatnonzero(too_long), np.array(self._gave_up, np.int64))

    # When it is certain

    def _decided(self, begin: Ints, over: Ints) -> tuple[Ints, Mask]:
        """The row that decides over each beginning, -1 if its deadline does; a beginning that goes
        on for too many rows is decided by the first that is too much.
        """
        cut, end = self.cut[begin], self.rows.end[begin]
        over = np.minimum(over, np.where(cut < end, cut, NEVER))
        known = over < end
        there = np.where(known, over, begin)
        in_time = known & (self.rows.times[there] <= self.deadline[begin])
        return np.where(in_time, over, -1), ~in_time

    def _times(self, decided_by: Ints, at_deadline: Mask, begin: Ints) -> Times:
        return np.where(at_deadline, self.deadline[begin], self.rows.times[decided_by])

    def _in_turn(self, decided_by: Ints, at_deadline: Mask) -> Times:
        """What happens to a beginning is not certain before what happens to those before it is."""
        rows = (
            np.maximum.accumulate(decided_by) if len(decided_by) else decided_by
        )  # rows of a key lie behind those of the keys before it
        times = np.where(rows >= self.rows.start, self.rows.times[rows], -FOREVER)
        if not at_deadline.any():
            return times
        starts = np.maximum.accumulate(np.where(at_deadline, self.rows.at, -1))
        later: Times = np.maximum(
            times, np.where(starts >= self.rows.start, self.deadline[starts], -FOREVER)
        )
        return later

    # What matches

    def _found(self, complete: Ints) -> tuple[Matches, Ints]:
        """Beginnings that match, at least those that are not skipped, and the row that makes each
        certain.
        """
        begin, limit = self._candidates(complete)
        if self.rules.after.in_turn and longest_turn(self.rows.keys[begin]) > WORTHWHILE:
            return self._found_in_turn(begin, limit)
        return self._walked(begin, limit)[:2]

    def _found_in_turn(self, begin: Ints, limit: Ints) -> tuple[Matches, Ints]:
        """Where a key has many beginnings, one match may skip all others, and each of these would
        be about as long: they are left out.
        """
        turns = Turns(begin, self.rows.keys[begin])
        found: list[tuple[Matches, Ints]] = []
        while len(which := turns.take()):
            matches, certain, waiting = self._walked(begin[which], limit[which])
            chosen, targets = chosen_starts(self.rules, self.rows, matches.entries, matches.begin)
            turns.go_on(matches.begin[chosen], targets[chosen], waiting)
            found.append((matches, certain))
        return self._sorted(
            [matches.entries for matches, _ in found],
            [matches.begin for matches, _ in found],
            [certain for _, certain in found],
        )

    def _walked(self, begin: Ints, limit: Ints) -> tuple[Matches, Ints, Ints]:
        """Those of some beginnings that match, the row that makes each certain, and the beginnings
        that wait for rows which are not there yet.
        """
        everything = self.rules.after.kind == NO_SKIP
        walks = Walker(self.look, self.holds, wary=everything).walk(begin, limit)
        again = walks.chose if everything else walks.chose & (walks.status == LOST)
        matched = np.flatnonzero((walks.status == MATCHED) & ~again)
        parts, begins, certain = (
            [walks.entries(matched)],
            [begin[matched]],
            [walks.certain[matched]],
        )
        if everything:
            certain = [self._ends(parts[0], len(matched))]
        waiting = [begin[(walks.status == WAITING) & ~again]]
        for at in np.flatnonzero(again).tolist():
            found = self._tried(int(begin[at]), int(limit[at]), everything=everything)
            parts.append(entries_of(found.paths))
            begins.append(np.full(len(found.paths), begin[at]))
            certain.append(
                self._ends(parts[-1], len(found.paths))
                if everything
                else np.full(len(found.paths), found.certain)
            )
            waiting += [begin[at : at + 1]] if found.status == WAITING else []
        return *self._sorted(parts, begins, certain), np.sort(np.concatenate(waiting))

    def _candidates(self, complete: Ints) -> tuple[Ints, Ints]:
        """Rows that can begin a match with rows that are there, and the last row that each may
        reach: behind all, if later ones may belong to it.
        """
        rows = self.rows
        there = self.may_begin & (complete < rows.end)
        begin = np.flatnonzero(there)
        begin = begin[
            (rows.times[complete[begin]] <= self.deadline[begin])
            & (complete[begin] < self.cut[begin])
        ]
        end, deadline = rows.end[begin], self.deadline[begin]
        last = self.last_in_time(begin)
        last = np.where((last == end - 1) & (deadline >= self.now_us), end, last)
        if self.look.unless is not None:
            fine = (last < end) & (last < self.cut[begin])
            return begin[fine], last[fine]
        return begin, np.minimum(last, self.cut[begin] - 1)

    def last_in_time(self, begin: Ints) -> Ints:
        """The last row before each one's deadline."""
        return (
            search(self.rows.times, begin, self.rows.end[begin], self.deadline[begin], right=True)
            - 1
        )

    def _tried(self, begin: int, limit: int, *, everything: bool) -> Found:
        backtracker = Backtracker(self.look, self.holds, most=self.rules.max_matches)
        try:
            return backtracker.all(begin, limit) if everything else backtracker.first(begin, limit)
        except TooManyTries:
            self._gave_up.append(begin)
            return Found(LOST, NEVER)

    def _ends(self, entries: Entries, count: int) -> Ints:
        """The last row of each; their deadline, if something must be absent until then."""
        if self.look.unless is not None:
            return np.full(count, NEVER)
        return last_rows(entries, count)

    @staticmethod
    def _sorted(
        parts: list[Entries], begins: list[Ints], certain: list[Ints]
    ) -> tuple[Matches, Ints]:
        entries = Entries.joined(parts, [len(each) for each in begins])
        begin, certain_row = np.concatenate(begins), np.concatenate(certain)
        if len(parts) > 1:
            order = np.argsort(begin, kind="stable")
            place = np.empty(len(order), np.int64)
            place[order] = np.arange(len(order))
            by_owner = np.argsort(place[entries.owner], kind="stable")
            entries = Entries(
                place[entries.owner][by_owner], entries.row[by_owner], entries.place[by_owner]
            )
            begin, certain_row = begin[order], certain_row[order]
        return Matches(entries, begin, np.zeros(len(begin), np.int64)), certain_row


def last_rows(entries: Entries, count: int) -> Ints:
    """The last row of each owner."""
    ends = np.searchsorted(entries.owner, np.arange(count), side="right") - 1
    return entries.row[ends]
