"""Finds the matches of one pattern in rows that are in order, of many keys at once; says which are certain, since when, and which rows are still needed.

A row's fate as the first of a match is certain from a time on: that of the row that completed or ended it, or its deadline. Nothing depends on which rows came in which call: what is
certain before a call was told then, what is certain at its end is told now.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.operators.buffers import Ints, Mask
from headrace.operators.joins.matching import search
from headrace.operators.kernel import Times
from headrace.operators.patterns.automaton import Automaton
from headrace.operators.patterns.backtracking import Backtracker, Found, TooManyTries, entries_of
from headrace.operators.patterns.lookahead import Lookahead
from headrace.operators.patterns.skipping import Turns, chosen_starts, longest_turn, visited_starts
from headrace.operators.patterns.sorted_rows import NEVER, SortedRows
from headrace.operators.patterns.specs import MOST_MATCHES, MOST_ROWS, NO_SKIP, SKIP_PAST_LAST, AfterMatch
from headrace.operators.patterns.walking import LOST, MATCHED, WAITING, Entries, Holds, Walker

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
    most_rows: int = MOST_ROWS
    most_matches: int = MOST_MATCHES

    def members(self, name: str) -> tuple[str, ...]:
        """The symbols that a name stands for."""
        return dict(self.subsets).get(name, (name,))


@dataclass(frozen=True)
class Matches:
    """Matches in order of key and beginning: their rows, and the time since which each is certain."""

    entries: Entries
    begin: Ints
    certain_us: Times

    def __len__(self) -> int:
        return len(self.begin)

    def take(self, which: Mask) -> Matches:
        return Matches(self.entries.of(which), self.begin[which], self.certain_us[which])


@dataclass(frozen=True)
class Outcome:
    """Of rows: the matches; for each row as a beginning since when its fate is certain (FOREVER: not yet); beginnings whose time ran out; and how many were given up as too long."""

    matches: Matches
    certain_us: Times
    timed_out: Ints
    given_up: Ints


class Matcher:
    """One pattern over some rows, whose time is known up to `now_us`: rows of that time and later are not there yet. `open`: which rows may begin a match."""

    def __init__(self, rules: Rules, rows: SortedRows, now_us: int, holds: Holds, may_begin: Mask) -> None:
        self.rules, self.rows, self.now_us, self.may_begin = rules, rows, now_us, may_begin
        self.look = Lookahead(rules.automaton, rows, rules.doubtful)
        self.holds = holds
        within = rules.within_us
        self.deadline = np.full(len(rows), FOREVER) if within is None else np.where(rows.times > FOREVER - within, FOREVER, rows.times + within)
        self.cut = rows.at + rules.most_rows
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
            chosen, visited = visited_starts(self.rules, self.rows, self.may_begin, matches.entries, matches.begin)
            matches = matches.take(chosen)
            certain_us = self._in_turn(np.where(visited, decided_by, -1), at_deadline & visited)
            matches = Matches(matches.entries, matches.begin, certain_us[matches.begin])
        else:
            visited = self.may_begin
            certain_us = self._times(decided_by, at_deadline, self.rows.at)
            matches = Matches(matches.entries, matches.begin, self._times(own, late, matches.begin))
        certain_us = np.where(visited, certain_us, -FOREVER)
        in_vain = visited & ~begin_at
        return Outcome(matches, certain_us, np.flatnonzero(in_vain & at_deadline), self._given_up(in_vain & (decided_by == self.cut)))

    def _given_up(self, too_long: Mask) -> Ints:
        return np.union1d(np.flatnonzero(too_long), np.array(self._gave_up, np.int64))

    # When it is certain

    def _decided(self, begin: Ints, over: Ints) -> tuple[Ints, Mask]:
        """The row that decides over each beginning, -1 if its deadline does; a beginning that goes on for too many rows is decided by the first that is too much."""
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
        rows = np.maximum.accumulate(decided_by) if len(decided_by) else decided_by  # rows of a key lie behind those of the keys before it
        times = np.where(rows >= self.rows.start, self.rows.times[rows], -FOREVER)
        if not at_deadline.any():
            return times
        starts = np.maximum.accumulate(np.where(at_deadline, self.rows.at, -1))
        later: Times = np.maximum(times, np.where(starts >= self.rows.start, self.deadline[starts], -FOREVER))
        return later

    # What matches

    def _found(self, complete: Ints) -> tuple[Matches, Ints]:
        """Beginnings that match, at least those that are not skipped, and the row that makes each certain."""
        begin, limit = self._candidates(complete)
        if self.rules.after.in_turn and longest_turn(self.rows.keys[begin]) > WORTHWHILE:
            return self._found_in_turn(begin, limit)
        return self._walked(begin, limit)[:2]

    def _found_in_turn(self, begin: Ints, limit: Ints) -> tuple[Matches, Ints]:
        """Where a key has many beginnings, one match may skip all others, and each of these would be about as long: they are left out."""
        turns = Turns(begin, self.rows.keys[begin])
        found: list[tuple[Matches, Ints]] = []
        while len(which := turns.take()):
            matches, certain, waiting = self._walked(begin[which], limit[which])
            chosen, targets = chosen_starts(self.rules, self.rows, matches.entries, matches.begin)
            turns.go_on(matches.begin[chosen], targets[chosen], waiting)
            found.append((matches, certain))
        return self._sorted([matches.entries for matches, _ in found], [matches.begin for matches, _ in found], [certain for _, certain in found])

    def _walked(self, begin: Ints, limit: Ints) -> tuple[Matches, Ints, Ints]:
        """Those of some beginnings that match, the row that makes each certain, and the beginnings that wait for rows which are not there yet."""
        everything = self.rules.after.kind == NO_SKIP
        walks = Walker(self.look, self.holds, wary=everything).walk(begin, limit)
        again = walks.chose if everything else walks.chose & (walks.status == LOST)
        matched = np.flatnonzero((walks.status == MATCHED) & ~again)
        parts, begins, certain = [walks.entries(matched)], [begin[matched]], [walks.certain[matched]]
        if everything:
            certain = [self._ends(parts[0], len(matched))]
        waiting = [begin[(walks.status == WAITING) & ~again]]
        for at in np.flatnonzero(again).tolist():
            found = self._tried(int(begin[at]), int(limit[at]), everything=everything)
            parts.append(entries_of(found.paths))
            begins.append(np.full(len(found.paths), begin[at]))
            certain.append(self._ends(parts[-1], len(found.paths)) if everything else np.full(len(found.paths), found.certain))
            waiting += [begin[at : at + 1]] if found.status == WAITING else []
        return *self._sorted(parts, begins, certain), np.sort(np.concatenate(waiting))

    def _candidates(self, complete: Ints) -> tuple[Ints, Ints]:
        """Rows that can begin a match with rows that are there, and the last row that each may reach: behind all, if later ones may belong to it."""
        rows = self.rows
        there = self.may_begin & (complete < rows.end)
        begin = np.flatnonzero(there)
        begin = begin[(rows.times[complete[begin]] <= self.deadline[begin]) & (complete[begin] < self.cut[begin])]
        end, deadline = rows.end[begin], self.deadline[begin]
        last = self.last_in_time(begin)
        last = np.where((last == end - 1) & (deadline >= self.now_us), end, last)
        if self.look.unless is not None:
            fine = (last < end) & (last < self.cut[begin])
            return begin[fine], last[fine]
        return begin, np.minimum(last, self.cut[begin] - 1)

    def last_in_time(self, begin: Ints) -> Ints:
        """The last row before each one's deadline."""
        return search(self.rows.times, begin, self.rows.end[begin], self.deadline[begin], right=True) - 1

    def _tried(self, begin: int, limit: int, *, everything: bool) -> Found:
        backtracker = Backtracker(self.look, self.holds, most=self.rules.most_matches)
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
    def _sorted(parts: list[Entries], begins: list[Ints], certain: list[Ints]) -> tuple[Matches, Ints]:
        entries = Entries.joined(parts, [len(each) for each in begins])
        begin, certain_row = np.concatenate(begins), np.concatenate(certain)
        if len(parts) > 1:
            order = np.argsort(begin, kind="stable")
            place = np.empty(len(order), np.int64)
            place[order] = np.arange(len(order))
            by_owner = np.argsort(place[entries.owner], kind="stable")
            entries = Entries(place[entries.owner][by_owner], entries.row[by_owner], entries.place[by_owner])
            begin, certain_row = begin[order], certain_row[order]
        return Matches(entries, begin, np.zeros(len(begin), np.int64)), certain_row


def last_rows(entries: Entries, count: int) -> Ints:
    """The last row of each owner."""
    ends = np.searchsorted(entries.owner, np.arange(count), side="right") - 1
    return entries.row[ends]
