"""The matcher: finds the matches of one pattern in sorted rows of many keys at once, and says which
are certain, since when, and which rows are still needed.

Example: the pattern `a b`, within 10 s, rows of one key, and the horizon at 30 s.

    rows     0: a at 1 s    1: b at 4 s    2: a at 25 s
    match    rows 0 and 1, certain at 4 s, the time of the row that completed it
    row 2    undecided: a b may follow until 35 s, so the row is still needed

A row's fate as the first of a match is certain from a time on: that of the row that completed or
ended it, or its deadline. Nothing depends on which rows arrived in which batch: what is certain
before a batch was emitted then, what is certain at its end is emitted now.

Three parts: where the next match may begin (skip strategies), backtracking, and the matcher itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from headrace.columnar.buffers import Ints, Mask, expand_ranges
from headrace.columnar.lookup import search_within
from headrace.operators.kernel import Times
from headrace.operators.patterns.automaton import ACCEPT, Automaton
from headrace.operators.patterns.parser import (
    DEFAULT_SKIP_STRATEGY,
    MAX_MATCHES,
    MAX_ROWS,
    NO_SKIP,
    PAST_LAST,
    SKIP_TILL_NEXT,
    STRICT,
    TO_FIRST,
    SkipStrategy,
)
from headrace.operators.patterns.row_buffer import NEVER, SortedRows
from headrace.operators.patterns.walker import (
    FAILED,
    MATCHED,
    WAITING,
    CheckCondition,
    Lookahead,
    MatchRows,
    RowTransition,
    Walker,
)

FOREVER = np.iinfo(np.int64).max
"""A time that never comes."""
MIN_STARTS_FOR_QUEUE = 64
"""From so many starts of a key on it pays to look at them a few at a time."""
MIN_QUEUE_STEP, MAX_QUEUE_STEP = 8, 1 << 20
"""How many starts of a key are looked at together, at first and at most."""
MAX_TRIES = 20_000
"""The rows that backtracking tries for one start before it gives up."""


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

    def members(self, name: str) -> tuple[str, ...]:
        """The symbols that a name stands for."""
        return dict(self.subsets).get(name, (name,))


@dataclass(frozen=True)
class Matches:
    """Matches in order of key and start: their rows, the first row, and the time since which each
    is certain.
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


# Backtracking


Path = list[tuple[int, int]]
"""Rows and the states that took them."""


class TooManyTries(Exception):
    """The search from a start is abandoned."""


@dataclass
class SearchResult:
    """The outcome of a start: its status, the row that made it certain, and its matches."""

    status: int
    decided_by: int
    paths: list[Path] = field(default_factory=list)


class Backtracker:
    """Tries every transition in order from one start, and turns back where one ends: for runs that
    failed although they had a choice, and for all matches of a start.

    It looks ahead as the walker does, so it tries only what can still be complete in time. A start
    that takes too many tries or has more than `max_matches` is abandoned.
    """

    def __init__(
        self, lookahead: Lookahead, check: CheckCondition, *, max_matches: int = MAX_MATCHES
    ) -> None:
        self.lookahead, self.check, self.max_matches = lookahead, check, max_matches
        self.automaton, self.rows = lookahead.automaton, lookahead.rows

    def find_first(self, start: int, limit: int) -> SearchResult:
        """The preferred match: the first in the order in which transitions are tried."""
        search = _Search(self, start, limit)
        for path in search.paths():
            if path is None:
                return SearchResult(WAITING, NEVER)
            waits = self.lookahead.next_violation is not None
            decided_by = max(search.decided_by, NEVER if waits else path[-1][0])
            return SearchResult(MATCHED, decided_by, [path])
        return SearchResult(FAILED, search.decided_by)

    def find_all(self, start: int, limit: int) -> SearchResult:
        """Every match."""
        search = _Search(self, start, limit)
        symbols = self.automaton.symbols
        matches: dict[tuple[tuple[int, str], ...], Path] = {}
        for path in search.paths():
            if path is not None:
                matches.setdefault(tuple((row, symbols[state]) for row, state in path), path)
                if len(matches) > self.max_matches:
                    raise TooManyTries
        status = MATCHED if matches else FAILED
        return SearchResult(status, search.decided_by, list(matches.values()))


@dataclass
class _Search:
    """A search from one row. `decided_by` is the last row so far that ended a transition."""

    backtracker: Backtracker
    start: int
    limit: int
    decided_by: int = 0
    tries: int = 0

    def __post_init__(self) -> None:
        self.decided_by = self.start
        self.lookahead, self.rows = self.backtracker.lookahead, self.backtracker.rows

    def paths(self) -> Iterator[Path | None]:
        """Matches in order; None where a transition waits for rows that have not arrived."""
        path: Path = []
        pending: list[Iterator[tuple[int, int] | None]] = [self._first_steps()]
        while pending:
            try:
                step = next(pending[-1])
            except StopIteration:
                pending.pop()
                if path:
                    path.pop()
                continue
            if step is None:
                yield None
            elif step[1] == ACCEPT:
                yield list(path)
            else:
                path.append(step)
                pending.append(self._next_steps(path))

    def _first_steps(self) -> Iterator[tuple[int, int] | None]:
        for state in self.backtracker.automaton.start_states:
            is_viable = self.lookahead.completion[state][self.start] <= self.limit
            if is_viable and self._holds([], self.start, state):
                yield self.start, state
            self._note_end(int(self.lookahead.exhausted[state][self.start]))

    def _next_steps(self, path: Path) -> Iterator[tuple[int, int] | None]:
        """The steps from the last row of a path. When the search comes back from one, that way has
        ended.
        """
        before = list(path)
        row, state = before[-1]
        violation = self.lookahead.next_violation
        for row_transition in self.lookahead.transitions[state]:
            completion, exhausted = self.lookahead.look(row_transition, np.array([row]))
            if row_transition.target == ACCEPT:
                if violation is None or violation[row] > self.limit:
                    yield row, ACCEPT
            elif int(completion[0]) <= self.limit:
                yield from self._follow(before, row_transition, row)
            self._note_end(int(exhausted[0]))

    def _follow(
        self, path: Path, row_transition: RowTransition, row: int
    ) -> Iterator[tuple[int, int] | None]:
        target, end = row_transition.target, int(self.rows.end[row])
        completion = self.lookahead.completion[target]
        if row_transition.mode == STRICT:
            if row + 1 >= end:
                yield None
            elif completion[row + 1] <= self.limit and self._holds(path, row + 1, target):
                yield row + 1, target
            return
        assert row_transition.next_fit is not None
        next_absent = row_transition.next_absent
        ended_at = NEVER if next_absent is None else int(next_absent[row])
        candidate = int(row_transition.next_fit[row])
        while candidate < NEVER and candidate <= ended_at:
            if self._holds(path, candidate, target):
                if completion[candidate] <= self.limit:
                    yield candidate, target
                if row_transition.transition.contiguity.mode == SKIP_TILL_NEXT:
                    return
            candidate = int(row_transition.next_fit[candidate])
        if ended_at == NEVER and self.limit >= end:
            yield None

    def _holds(self, path: Path, row: int, state: int) -> bool:
        self.tries += 1
        if self.tries > MAX_TRIES:
            raise TooManyTries
        symbol = self.backtracker.automaton.symbols[state]
        if not self.rows.mask(symbol)[row]:
            return False
        if symbol not in self.lookahead.match_dependent:
            return True
        match_rows = match_rows_of([[*path, (row, state)]])
        return bool(self.backtracker.check(symbol, match_rows, 1)[0])

    def _note_end(self, row: int) -> None:
        self.decided_by = max(self.decided_by, row)


def match_rows_of(paths: list[Path]) -> MatchRows:
    """Paths as columns."""
    lengths = np.array([len(path) for path in paths], np.int64)
    steps: Ints = np.array([step for path in paths for step in path], np.int64).reshape(-1, 2)
    return MatchRows(np.repeat(np.arange(len(paths)), lengths), steps[:, 0], steps[:, 1])


# The matcher


@dataclass(frozen=True)
class MatchOutcome:
    """What the matcher finds: the matches; for each row since when its fate as a start is certain
    (FOREVER: not yet); the starts whose time ran out; and those that were abandoned.
    """

    matches: Matches
    decided_us: Times
    timed_out: Ints
    abandoned: Ints


class Matcher:
    """Matches one pattern over some rows. Rows at `now_us` and later have not arrived; `may_begin`
    says which rows may begin a match.
    """

    def __init__(
        self,
        rules: MatchRules,
        rows: SortedRows,
        now_us: int,
        check: CheckCondition,
        may_begin: Mask,
    ) -> None:
        self.rules, self.rows, self.now_us = rules, rows, now_us
        self.check, self.may_begin = check, may_begin
        self.lookahead = Lookahead(rules.automaton, rows, rules.match_dependent)
        within = rules.within_us
        self.deadline = (
            np.full(len(rows), FOREVER)
            if within is None
            else np.where(rows.times > FOREVER - within, FOREVER, rows.times + within)
        )
        self.row_limit = rows.positions + rules.max_rows  # the first row that is too many
        self._abandoned: list[int] = []

    def run(self) -> MatchOutcome:
        """Find everything."""
        completion, exhausted = self.lookahead.look_from_start()
        exhausted = np.where(self.may_begin, exhausted, self.rows.positions)
        decided_by, at_deadline = self._decisions(self.rows.positions, exhausted)
        matches, match_decided_by = self._find_matches(completion)
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
        else:
            visited = self.may_begin
            decided_us = self._times(decided_by, at_deadline, self.rows.positions)
            match_decided_us = self._times(match_decided_by, match_at_deadline, matches.start)
        without_match = visited & ~is_match_start
        is_too_long = without_match & (decided_by == self.row_limit)
        return MatchOutcome(
            matches=Matches(matches.rows, matches.start, match_decided_us),
            decided_us=np.where(visited, decided_us, -FOREVER),
            timed_out=np.flatnonzero(without_match & at_deadline),
            abandoned=np.union1d(np.flatnonzero(is_too_long), np.array(self._abandoned, np.int64)),
        )

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
        runs = Walker(self.lookahead, self.check, tracks_choices=finds_all).walk(start, limit)
        repeated = runs.had_choice if finds_all else runs.had_choice & (runs.status == FAILED)
        matched = np.flatnonzero((runs.status == MATCHED) & ~repeated)
        rows, starts = [runs.rows_of(matched)], [start[matched]]
        decided_by = [
            self._last_rows(rows[0], len(matched)) if finds_all else runs.decided_by[matched]
        ]
        waiting = [start[(runs.status == WAITING) & ~repeated]]
        backtracker = Backtracker(self.lookahead, self.check, max_matches=self.rules.max_matches)
        find = backtracker.find_all if finds_all else backtracker.find_first
        for index in np.flatnonzero(repeated).tolist():
            try:
                result = find(int(start[index]), int(limit[index]))
            except TooManyTries:
                self._abandoned.append(int(start[index]))
                continue
            count = len(result.paths)
            rows.append(match_rows_of(result.paths))
            starts.append(np.full(count, start[index]))
            decided_by.append(
                self._last_rows(rows[-1], count) if finds_all else np.full(count, result.decided_by)
            )
            if result.status == WAITING:
                waiting.append(start[index : index + 1])
        matches, match_decided_by = _merge_matches(rows, starts, decided_by)
        return matches, match_decided_by, np.sort(np.concatenate(waiting))

    def _last_rows(self, match_rows: MatchRows, count: int) -> Ints:
        """The last row of each match; NEVER if something must be absent until the deadline."""
        if self.lookahead.next_violation is not None:
            return np.full(count, NEVER)
        return last_rows(match_rows, count)


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
