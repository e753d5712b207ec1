"""The matcher: finds the matches of one pattern in sorted rows of many keys at once, and says which
are certain, since when, and which rows are still needed.

Example: the pattern `a b`, within 10 s, rows of one key, and the horizon at 30 s.

    rows     0: a at 1 s    1: b at 4 s    2: a at 25 s
    match    rows 0 and 1, certain at 4 s, the time of the row that completed it
    row 2    undecided: a b may follow until 35 s, so the row is still needed

A row's fate as the first of a match is certain from a time on: that of the row that completed or
ended it, or its deadline. Nothing depends on which rows arrived in which batch: what is certain
before a batch was emitted then, what is certain at its end is emitted now.

Two parts: where the next match may begin (skip strategies), and the matcher itself. What a start
matches is found by `walker.py`, and by `path_search.py` where that is not enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from headrace.columnar.buffers import Ints, Mask, expand_ranges
from headrace.columnar.lookup import search_within
from headrace.operators.kernel import Times
from headrace.operators.patterns.automaton import ACCEPT, Automaton
from headrace.operators.patterns.parser import (
    DEFAULT_SKIP_STRATEGY,
    MAX_MATCHES,
    MAX_ROWS,
    NEXT_ROW,
    NO_SKIP,
    PAST_LAST,
    TO_FIRST,
    SkipStrategy,
)
from headrace.operators.patterns.path_memory import PathMemory
from headrace.operators.patterns.path_search import (
    GIVEN_UP,
    MAX_THREADS,
    FoundPaths,
    PathSearch,
)
from headrace.operators.patterns.row_buffer import NEVER, SortedRows
from headrace.operators.patterns.walker import (
    FAILED,
    MATCHED,
    WAITING,
    CheckCondition,
    Lookahead,
    MatchRows,
    Walker,
)

FOREVER = np.iinfo(np.int64).max
"""A time that never comes."""
MIN_STARTS_FOR_QUEUE = 64
"""From so many starts of a key on it pays to look at them a few at a time."""
MIN_QUEUE_STEP, MAX_QUEUE_STEP = 8, 1 << 20
"""How many starts of a key are looked at together, at first and at most."""


@dataclass(frozen=True)
class MatchRules:
    """What the matcher needs to know of a pattern. `match_dependent` are the symbols whose
    conditions look at earlier rows of the match, `subsets` names for several symbols.
    """

    automaton: Automaton
    match_dependent: frozenset[str] = frozenset()
    within_us: int | None = None
    skip_strategy: SkipStrategy = DEFAULT_SKIP_STRATEGY
    subsets: tuple[tuple[str, tuple[str, ...]], ...] = ()
    max_rows: int = MAX_ROWS
    max_matches: int = MAX_MATCHES
    max_threads: int = MAX_THREADS

    def members(self, name: str) -> tuple[str, ...]:
        """The symbols that a name stands for."""
        return dict(self.subsets).get(name, (name,))

    @cached_property
    def looks_back_midway(self) -> bool:
        """Whether a row whose condition looks back can be followed by another row of the match:
        then the rows alone do not tell how long a start stays open.
        """
        return any(
            symbol in self.match_dependent
            and any(transition.target != ACCEPT for transition in transitions)
            for symbol, transitions in zip(
                self.automaton.symbols, self.automaton.transitions, strict=True
            )
        )


@dataclass(frozen=True)
class Matches:
    """Matches in order of key and start: their rows, the row at which each begins, and the time
    since which it is certain. An empty match begins at a row that is none of its own.
    """

    rows: MatchRows
    start: Ints
    decided_us: Times

    def __len__(self) -> int:
        return len(self.start)

    def take(self, is_wanted: Mask) -> Matches:
        return Matches(
            self.rows.of_owners(is_wanted), self.start[is_wanted], self.decided_us[is_wanted]
        )


# Skip strategies: of all starts that match, those that remain when each match skips some


def visited_starts(
    rules: MatchRules, rows: SortedRows, may_begin: Mask, match_rows: MatchRows, start: Ints
) -> tuple[Mask, Mask]:
    """Which matches remain, and which rows are looked at as a start at all. `start` is in order,
    and has no row twice.
    """
    remains, targets = remaining_matches(rules, rows, match_rows, start)
    skip_depth = np.zeros(len(rows) + 1, np.int64)
    np.add.at(skip_depth, start[remains] + 1, 1)
    np.add.at(skip_depth, np.minimum(targets[remains], rows.end[start[remains]]), -1)
    return remains, may_begin & (np.cumsum(skip_depth[:-1]) == 0)


def remaining_matches(
    rules: MatchRules, rows: SortedRows, match_rows: MatchRows, start: Ints
) -> tuple[Mask, Ints]:
    """Which matches remain, and the row at which the search goes on after each."""
    targets = np.maximum(_skip_targets(rules, match_rows, start), start + 1)
    return _reachable(rows, start, targets), targets


def _skip_targets(rules: MatchRules, match_rows: MatchRows, start: Ints) -> Ints:
    """The row at which the search goes on after each match. Where a match has no row of the symbol
    of the skip strategy, that is the row after its first.
    """
    strategy = rules.skip_strategy
    if strategy.kind == PAST_LAST or strategy.symbol is None:
        return last_rows(match_rows, len(start)) + 1
    members = rules.members(strategy.symbol)
    is_member = np.array([symbol in members for symbol in rules.automaton.symbols])
    index = np.flatnonzero(is_member[match_rows.state])
    if strategy.kind == TO_FIRST:
        index = index[::-1]  # of several assignments to an owner the last one counts
    targets = start + 1
    targets[match_rows.owner[index]] = match_rows.row[index]
    return targets


def _reachable(rows: SortedRows, start: Ints, targets: Ints) -> Mask:
    """Which matches are reached from the first of each key, going from each to the first at or
    after its target.
    """
    count = len(start)
    following = np.searchsorted(start, np.minimum(targets, rows.end[start]))
    following = np.append(following, count)
    key = np.append(rows.keys[start], -1)
    following = np.where(key[following] == key, following, count)
    is_reached = np.zeros(count + 1, np.bool_)
    if count:
        is_reached[:-1] = np.append(True, key[1:-1] != key[:-2])
    # Pointer doubling: each pass doubles the number of matches that are skipped over at once.
    while (following[:-1] < count).any():
        is_reached[following[is_reached]] = True
        is_reached[count] = False
        following = following[following]
    return is_reached[:-1]


def last_rows(match_rows: MatchRows, count: int) -> Ints:
    """The last row of each owner."""
    ends = np.searchsorted(match_rows.owner, np.arange(count), side="right") - 1
    return match_rows.row[ends]


class StartQueue:
    """Starts that are looked at a few of each key at a time: more where matches are short, fewer
    where each skips them all; none behind one that waits for rows that have not arrived.
    """

    def __init__(self, start: Ints, keys: Ints) -> None:
        """Queue starts, which are in order and have no row twice, and the key of each."""
        self._start = start
        first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        self._next, self._stop = first, np.append(first[1:], len(start))
        self._step = np.full(len(first), MIN_QUEUE_STEP)

    def take(self) -> Ints:
        """The indices of the next starts."""
        counts = np.minimum(self._step, self._stop - self._next)
        indices = expand_ranges(self._next, counts)
        self._next = self._next + counts
        return indices

    def skip(self, start: Ints, targets: Ints, waiting: Ints) -> None:
        """Go on behind the matches that remain of the starts that were taken, given by their start
        and skip target; `waiting` are the starts that wait.
        """
        before = np.searchsorted(start, waiting) - 1
        visited = waiting[(before < 0) | (np.append(targets, 0)[before] <= waiting)]
        last = np.full(len(self._next), -1)
        np.maximum.at(last, self._key(start), targets)
        behind = np.minimum(np.searchsorted(self._start, last), self._stop)
        self._step = np.where(
            behind > self._next,
            np.maximum(self._step // 2, 1),
            np.minimum(self._step * 2, MAX_QUEUE_STEP),
        )
        self._next = np.maximum(self._next, behind)
        self._next[self._key(visited)] = self._stop[self._key(visited)]

    def _key(self, rows: Ints) -> Ints:
        return np.searchsorted(self._stop, np.searchsorted(self._start, rows), side="right")


# The matcher


@dataclass(frozen=True)
class MatchOutcome:
    """What the matcher finds: the matches; for each row since when its fate as a start is certain
    (FOREVER: not yet); the starts whose time ran out; and those that were abandoned. `open_paths`
    are those of the starts that are open or timed out, by the search; None if there was none.
    """

    matches: Matches
    decided_us: Times
    timed_out: Ints
    abandoned: Ints
    open_paths: FoundPaths | None = None


class Matcher:
    """Matches one pattern over some rows. Rows at `now_us` and later have not arrived; `may_begin`
    says which rows may begin a match. With `in_order` no match is certain before all starts before
    it are.
    """

    def __init__(
        self,
        rules: MatchRules,
        rows: SortedRows,
        now_us: int,
        check: CheckCondition,
        memory: PathMemory,
        may_begin: Mask,
        *,
        in_order: bool = False,
    ) -> None:
        self.rules, self.rows, self.now_us = rules, rows, now_us
        self.check, self.memory, self.may_begin = check, memory, may_begin
        self.in_order = in_order
        self.lookahead = Lookahead(rules.automaton, rows, rules.match_dependent)
        within = rules.within_us
        self.deadline = (
            np.full(len(rows), FOREVER)
            if within is None
            else np.where(rows.times > FOREVER - within, FOREVER, rows.times + within)
        )
        self.row_limit = rows.positions + rules.max_rows  # the first row that is too many
        # Whether all starts are searched, because the look-ahead does not know how long they stay
        # open.
        self.searches_all = rules.looks_back_midway or not self.lookahead.has_settled
        self._abandoned: list[Ints] = []
        self._searched: list[FoundPaths] = []

    def run(self) -> MatchOutcome:
        """Find everything."""
        completion, exhausted = self.lookahead.look_from_start()
        exhausted = np.where(self.may_begin, exhausted, self.rows.positions)
        decided_by, at_deadline = self._decisions(self.rows.positions, exhausted)
        matches, match_decided_by = self._find_matches(completion)
        if self.searches_all:
            for found in self._searched:
                known = np.ones(len(found.start), np.bool_)
                if not self.rules.looks_back_midway:
                    # Rows alone tell how long a start stays open, also one that is given up.
                    known = found.status != GIVEN_UP
                start = found.start[known]
                decided_by[start], at_deadline[start] = self._decisions(
                    start, found.decided_by[known]
                )
        match_decided_by, match_at_deadline = self._decisions(matches.start, match_decided_by)
        if self.rules.skip_strategy.kind != NO_SKIP:
            decided_by[matches.start] = match_decided_by
            at_deadline[matches.start] = match_at_deadline
        is_match_start = np.zeros(len(self.rows), np.bool_)
        is_match_start[matches.start] = True
        if self.rules.skip_strategy.is_sequential:
            remains, visited = visited_starts(
                self.rules, self.rows, self.may_begin, matches.rows, matches.start
            )
            matches = matches.take(remains)
            decided_us = self._sequential_times(
                np.where(visited, decided_by, -1), at_deadline & visited
            )
            match_decided_us = decided_us[matches.start]
        elif self.in_order and self.rules.skip_strategy.kind == NEXT_ROW:
            visited = self.may_begin
            decided_us = self._sequential_times(
                np.where(visited, decided_by, -1), at_deadline & visited
            )
            match_decided_us = decided_us[matches.start]
        else:
            visited = self.may_begin
            decided_us = self._times(decided_by, at_deadline, self.rows.positions)
            match_decided_us = self._times(match_decided_by, match_at_deadline, matches.start)
        without_match = visited & ~is_match_start
        is_too_long = without_match & (decided_by == self.row_limit)
        abandoned = np.unique(np.concatenate([np.flatnonzero(is_too_long), *self._abandoned]))
        matches = Matches(matches.rows, matches.start, match_decided_us)
        if self.rules.automaton.may_be_empty and self.rules.skip_strategy.kind != NO_SKIP:
            is_empty = without_match.copy()
            is_empty[abandoned] = False
            matches = _with_empty_matches(matches, np.flatnonzero(is_empty), decided_us)
            without_match[:] = False
        return MatchOutcome(
            matches=matches,
            decided_us=np.where(visited, decided_us, -FOREVER),
            timed_out=np.flatnonzero(without_match & at_deadline),
            abandoned=abandoned,
            open_paths=FoundPaths.concat(self._searched) if self._searched else None,
        )

    def partial_matches(self, outcome: MatchOutcome, start: Ints, limit: Ints) -> MatchRows:
        """How far starts that are open, or whose time ran out, came up to their limits."""
        if not self.searches_all:
            return Walker(self.lookahead, self.check).partial_matches(start, limit)
        found = outcome.open_paths
        if found is None or not len(start):
            nothing = np.zeros(0, np.int64)
            return MatchRows(nothing, nothing, nothing)
        owner_of = np.full(len(self.rows), -1)
        owner_of[start] = np.arange(len(start))
        owner = owner_of[found.start][found.open_rows.owner]
        mine = np.flatnonzero(owner >= 0)
        mine = mine[np.argsort(owner[mine], kind="stable")]
        rows = found.open_rows
        return MatchRows(owner[mine], rows.row[mine], rows.state[mine])

    # When a start is decided

    def _decisions(self, start: Ints, exhausted: Ints) -> tuple[Ints, Mask]:
        """The row that decides about each start (-1 if its deadline does), and which are decided by
        their deadline. A start that goes on for too many rows is decided by the first that is too
        many.
        """
        row_limit, end = self.row_limit[start], self.rows.end[start]
        exhausted = np.minimum(exhausted, np.where(row_limit < end, row_limit, NEVER))
        has_arrived = exhausted < end
        row = np.where(has_arrived, exhausted, start)
        in_time = has_arrived & (self.rows.times[row] <= self.deadline[start])
        return np.where(in_time, exhausted, -1), ~in_time

    def _times(self, decided_by: Ints, at_deadline: Mask, start: Ints) -> Times:
        return np.where(at_deadline, self.deadline[start], self.rows.times[decided_by])

    def _sequential_times(self, decided_by: Ints, at_deadline: Mask) -> Times:
        """When each start is decided, if it is not decided before those before it are."""
        # Rows of a key lie behind those of the keys before it.
        latest = np.maximum.accumulate(decided_by) if len(decided_by) else decided_by
        times = np.where(latest >= self.rows.start, self.rows.times[latest], -FOREVER)
        if not at_deadline.any():
            return times
        starts = np.maximum.accumulate(np.where(at_deadline, self.rows.positions, -1))
        deadlines = np.where(starts >= self.rows.start, self.deadline[starts], -FOREVER)
        latest_times: Times = np.maximum(times, deadlines)
        return latest_times

    # What matches

    def _find_matches(self, completion: Ints) -> tuple[Matches, Ints]:
        """The starts that match, at least those that are not skipped, and the row that makes each
        certain.
        """
        start, limit = self._candidate_starts(completion)
        keys = self.rows.keys[start]
        # The largest number of equal keys; they are in order.
        first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])) if len(keys) else keys
        is_long = int(np.diff(first, append=len(keys)).max(initial=0)) > MIN_STARTS_FOR_QUEUE
        if not (self.rules.skip_strategy.is_sequential and is_long):
            return self._match_starts(start, limit)[:2]
        # Where a key has many starts, one match may skip all others, each of which would be about
        # as long: they are left out.
        queue = StartQueue(start, keys)
        parts: list[tuple[Matches, Ints]] = []
        while len(which := queue.take()):
            matches, decided_by, waiting = self._match_starts(start[which], limit[which])
            remains, targets = remaining_matches(self.rules, self.rows, matches.rows, matches.start)
            queue.skip(matches.start[remains], targets[remains], waiting)
            parts.append((matches, decided_by))
        return _merge_matches(
            [matches.rows for matches, _ in parts],
            [matches.start for matches, _ in parts],
            [decided_by for _, decided_by in parts],
        )

    def _candidate_starts(self, completion: Ints) -> tuple[Ints, Ints]:
        """The rows that can begin a match with rows that have arrived, and the last row that each
        may reach: behind all rows of the key, if later ones may belong to it.
        """
        rows = self.rows
        if self.searches_all:
            symbols = {
                self.rules.automaton.symbols[state] for state in self.rules.automaton.start_states
            }
            start = np.flatnonzero(self.may_begin & rows.any_mask(sorted(symbols)))
            last = self.last_in_time(start)
            is_open = (last == rows.end[start] - 1) & (self.deadline[start] >= self.now_us)
            last = np.where(is_open, rows.end[start], last)
            return start, np.minimum(last, self.row_limit[start] - 1)
        start = np.flatnonzero(self.may_begin & (completion < rows.end))
        in_time = rows.times[completion[start]] <= self.deadline[start]
        start = start[in_time & (completion[start] < self.row_limit[start])]
        end, deadline = rows.end[start], self.deadline[start]
        last = self.last_in_time(start)
        last = np.where((last == end - 1) & (deadline >= self.now_us), end, last)
        if self.lookahead.next_violation is not None:
            is_over = (last < end) & (last < self.row_limit[start])
            return start[is_over], last[is_over]
        return start, np.minimum(last, self.row_limit[start] - 1)

    def last_in_time(self, start: Ints) -> Ints:
        """The last row before the deadline of each start."""
        end, deadline = self.rows.end[start], self.deadline[start]
        return search_within(self.rows.times, start, end, deadline, right=True) - 1

    def _match_starts(self, start: Ints, limit: Ints) -> tuple[Matches, Ints, Ints]:
        """Match from some starts: the matches, the row that makes each certain, and the starts that
        wait for rows that have not arrived.
        """
        finds_all = self.rules.skip_strategy.kind == NO_SKIP
        if self.searches_all:
            found = self._search(start, limit)
            self._searched.append(found)
            return _found_matches(found)
        runs = Walker(self.lookahead, self.check, tracks_choices=finds_all).walk(start, limit)
        repeated = runs.had_choice if finds_all else runs.had_choice & (runs.status == FAILED)
        matched = np.flatnonzero((runs.status == MATCHED) & ~repeated)
        rows, starts = [runs.rows_of(matched)], [start[matched]]
        decided_by = [
            self._last_rows(rows[0], len(matched)) if finds_all else runs.decided_by[matched]
        ]
        waiting = [start[(runs.status == WAITING) & ~repeated]]
        if repeated.any():
            found = self._search(start[repeated], limit[repeated])
            matches, match_decided_by, open_starts = _found_matches(found)
            rows.append(matches.rows)
            starts.append(matches.start)
            decided_by.append(match_decided_by)
            waiting.append(open_starts)
        matches, match_decided_by = _merge_matches(rows, starts, decided_by)
        return matches, match_decided_by, np.sort(np.concatenate(waiting))

    def _search(self, start: Ints, limit: Ints) -> FoundPaths:
        search = PathSearch(
            self.lookahead,
            self.memory,
            finds_all=self.rules.skip_strategy.kind == NO_SKIP,
            max_matches=self.rules.max_matches,
            max_threads=self.rules.max_threads,
        )
        # A start that reaches its limit because it has as many rows as it may is not in time.
        found = search.run(start, limit, self.last_in_time(start) < self.row_limit[start])
        self._abandoned.append(start[found.status == GIVEN_UP])
        return found

    def _last_rows(self, match_rows: MatchRows, count: int) -> Ints:
        """The last row of each match; NEVER if something must be absent until the deadline."""
        if self.lookahead.next_violation is not None:
            return np.full(count, NEVER)
        return last_rows(match_rows, count)


def _found_matches(found: FoundPaths) -> tuple[Matches, Ints, Ints]:
    """The matches of a search, the row that makes each certain, and the starts that wait."""
    nothing = np.zeros(len(found.match_start), np.int64)
    matches = Matches(found.match_rows, found.match_start, nothing)
    return matches, found.match_decided_by, found.start[found.status == WAITING]


def _with_empty_matches(matches: Matches, start: Ints, decided_us: Times) -> Matches:
    """The matches, and those without rows of some more starts, in order of their starts."""
    nothing = np.zeros(0, np.int64)
    merged, _ = _merge_matches(
        [matches.rows, MatchRows(nothing, nothing, nothing)],
        [matches.start, start],
        [matches.start, start],
    )
    return Matches(merged.rows, merged.start, decided_us[merged.start])


def _merge_matches(
    parts: list[MatchRows], starts: list[Ints], decided_by: list[Ints]
) -> tuple[Matches, Ints]:
    """Parts of matches in order of their starts, and the row that makes each certain. The times are
    set by the caller.
    """
    rows = MatchRows.concat(parts, [len(start) for start in starts])
    start, decided_by_row = np.concatenate(starts), np.concatenate(decided_by)
    if len(parts) > 1:
        order = np.argsort(start, kind="stable")
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        owner = rank[rows.owner]
        by_owner = np.argsort(owner, kind="stable")
        rows = MatchRows(owner[by_owner], rows.row[by_owner], rows.state[by_owner])
        start, decided_by_row = start[order], decided_by_row[order]
    return Matches(rows, start, np.zeros(len(start), np.int64)), decided_by_row
