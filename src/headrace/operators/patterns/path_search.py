"""The search for matches row by row, with all partial matches of a beginning at once: for patterns
whose conditions look back at the match, and wherever the look-ahead of `walker.py` is not enough.

Example: `a b+`, where `b` is `v > a.v`, and one beginning. A *thread* is a path and one of the
transitions from its last row; threads stand in the order in which their matches are preferred.

    row       v    threads behind it
    0         5    [a] → b
    1         7    [a b] → b, [a b] → done: a match, if nothing before it leads to one
    2         9    [a b b] → b, [a b b] → done
    3         1    [a b b] → done: `→ b` has ended, the match of rows 0 to 2 is certain

What becomes of a beginning follows from its rows in their order, and from nothing else: a beginning
is certain at the same row, and takes the same work, whatever arrived together. Two threads that
lead to one state in the same way, and have the same memory (`path_memory.py`), have the same
future; the second one is dropped, so that only conditions that tell paths apart can make many of
them. A beginning whose threads become too many is given up at that row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from headrace.columnar.buffers import Ints, Mask, expand_ranges
from headrace.operators.patterns.automaton import ACCEPT, Transition
from headrace.operators.patterns.parser import (
    MAX_MATCHES,
    SKIP_TILL_NEXT,
    STRICT,
    STRICT_CONTIGUITY,
)
from headrace.operators.patterns.path_memory import Columns, PathMemory
from headrace.operators.patterns.row_buffer import NEVER
from headrace.operators.patterns.walker import FAILED, MATCHED, WAITING, Lookahead, MatchRows

GIVEN_UP = 4
"""The status of a start whose threads became too many; see also `walker.py`."""
FREE_THREADS = 16
"""The number of threads that a start may have at any time without it counting as work."""
MAX_THREADS = 1_000
"""The threads beyond the free ones with which a start is given up."""
MAX_ROWS_OF_THREADS = 20
"""For how many rows a start may have so many threads; with fewer threads, for more rows. So a start
costs some milliseconds at most, and so does each row of a key.
"""
MAX_STEPS_AT_ONCE = 4_000_000
"""Rows, summed over the starts, that are searched together, at about 24 bytes each."""


@dataclass
class FoundPaths:
    """The outcome of a search. By start: its status; the row that made it certain, NEVER if none
    has; and the path of its preferred thread while it is open. By match: its start, and the row
    that made it certain.
    """

    start: Ints
    status: Ints
    decided_by: Ints
    match_rows: MatchRows
    match_start: Ints
    match_decided_by: Ints
    open_rows: MatchRows
    """The paths of open starts; owners are indices in `start`."""

    @staticmethod
    def concat(parts: list[FoundPaths]) -> FoundPaths:
        if len(parts) == 1:
            return parts[0]
        return FoundPaths(
            start=np.concatenate([part.start for part in parts]),
            status=np.concatenate([part.status for part in parts]),
            decided_by=np.concatenate([part.decided_by for part in parts]),
            match_rows=MatchRows.concat(
                [part.match_rows for part in parts], [len(part.match_start) for part in parts]
            ),
            match_start=np.concatenate([part.match_start for part in parts]),
            match_decided_by=np.concatenate([part.match_decided_by for part in parts]),
            open_rows=MatchRows.concat(
                [part.open_rows for part in parts], [len(part.start) for part in parts]
            ),
        )


class PathSearch:
    """Searches from many rows at once. `finds_all` finds every match of a start instead of its
    preferred one.
    """

    def __init__(
        self,
        lookahead: Lookahead,
        memory: PathMemory,
        *,
        finds_all: bool = False,
        max_matches: int = MAX_MATCHES,
        max_threads: int = MAX_THREADS,
    ) -> None:
        self.automaton, self.rows = lookahead.automaton, lookahead.rows
        self.memory, self.match_dependent = memory, lookahead.match_dependent
        self.next_violation = lookahead.next_violation
        self.finds_all, self.max_matches, self.max_threads = finds_all, max_matches, max_threads
        # The transitions of all states one behind the other, and last those to the start states.
        starts = tuple(
            Transition(state, STRICT_CONTIGUITY) for state in self.automaton.start_states
        )
        by_state = (*self.automaton.transitions, starts)
        self.transitions = [transition for each in by_state for transition in each]
        self.counts = np.array([len(each) for each in by_state])
        self.firsts = np.cumsum(self.counts) - self.counts
        self.target = np.array([transition.target for transition in self.transitions])
        self.mode = np.array([transition.contiguity.mode for transition in self.transitions])
        self.is_accept = self.target == ACCEPT
        self.looks_back = np.array(
            [
                target != ACCEPT and self.automaton.symbols[target] in self.match_dependent
                for target in self.target.tolist()
            ]
        )
        # Transitions to the same state, from any, have the same future.
        futures = {transition: number for number, transition in enumerate(self.transitions)}
        self.future = np.array([futures[transition] for transition in self.transitions])
        self.columns_read = [self._columns_read(each.target) for each in self.transitions]

    def _columns_read(self, state: int) -> Ints:
        """What the future of a thread that leads to a state depends on."""
        pending, seen = [state], {ACCEPT}
        while pending:
            if (each := pending.pop()) not in seen:
                seen.add(each)
                pending += [transition.target for transition in self.automaton.transitions[each]]
        symbols = {self.automaton.symbols[each] for each in seen if each != ACCEPT}
        return self.memory.columns_read(symbols & self.match_dependent)

    def run(self, start: Ints, limit: Ints, is_over: Mask) -> FoundPaths:
        """Search from some rows, each up to its limit: its last row in time, or any row behind
        those of its key if later ones may be in time. `is_over` are the starts whose time is up at
        their limit.
        """
        last = np.minimum(limit, self.rows.end[start] - 1)
        part = np.cumsum(last - start + 1) // MAX_STEPS_AT_ONCE
        cuts = (np.flatnonzero(np.diff(part)) + 1).tolist()
        return FoundPaths.concat(
            [
                _Threads(self, start[first:stop], limit[first:stop], is_over[first:stop]).run()
                for first, stop in pairwise([0, *cuts, len(start)])
            ]
        )


@dataclass
class _Threads:
    """The threads of some starts, in order of start and preference: the start, path and transition
    of each. The paths that threads stand on have a number, a row in `columns`, which is what they
    remember, and a node in the trees of paths.
    """

    search: PathSearch
    start: Ints
    limit: Ints
    is_over: Mask
    _parents: list[Ints] = field(default_factory=list)
    _rows: list[Ints] = field(default_factory=list)
    _states: list[Ints] = field(default_factory=list)
    _node_count: int = 0
    _matches: list[tuple[Ints, Ints, Ints]] = field(default_factory=list)

    def __post_init__(self) -> None:
        count, search = len(self.start), self.search
        self.rows = search.rows
        self.status = np.zeros(count, np.int64)
        self.decided_by = np.full(count, NEVER)
        self.open_node = np.full(count, -1)
        self.work = np.zeros(count, np.int64)
        self.match_count = np.zeros(count, np.int64)
        self.here = self.start - 1
        roots = np.arange(search.firsts[-1], search.firsts[-1] + search.counts[-1])
        self.owner = np.repeat(np.arange(count), len(roots))
        self.transition = np.tile(roots, count)
        self.path = np.zeros(len(self.owner), np.int64)
        self.columns: Columns = search.memory.begin()
        self.nodes = np.full(1, -1)

    def run(self) -> FoundPaths:
        while len(self.owner):
            self._go_to_next_rows()
            if len(self.owner):
                self._take_rows()
                self._accept()
                self._drop_equal_futures()
                self._give_up()
        match_owner, match_node, match_decided_by = (
            np.concatenate([match[column] for match in self._matches])
            if self._matches
            else np.zeros(0, np.int64)
            for column in range(3)
        )
        order = np.argsort(match_owner, kind="stable")
        match_owner, match_node = match_owner[order], match_node[order]
        match_rows = self._rows_of(match_node)
        is_open = np.flatnonzero(self.open_node >= 0)
        open_rows = self._rows_of(self.open_node[is_open])
        found = FoundPaths(
            start=self.start,
            status=self.status,
            decided_by=self.decided_by,
            match_rows=match_rows,
            match_start=self.start[match_owner],
            match_decided_by=match_decided_by[order],
            open_rows=MatchRows(is_open[open_rows.owner], open_rows.row, open_rows.state),
        )
        return _without_repeats(found, self.search) if self.search.finds_all else found

    # Steps

    def _go_to_next_rows(self) -> None:
        """Let each start go to the next row that matters to any of its threads. Starts that have no
        such row end here.
        """
        search, here = self.search, self.here[self.owner]
        following = np.where(search.mode[self.transition] == STRICT, here + 1, NEVER)
        following[search.is_accept[self.transition]] = NEVER
        if search.next_violation is not None:
            pending = np.flatnonzero(search.is_accept[self.transition])
            following[pending] = search.next_violation[here[pending]]
        for number, which in self._by_transition():
            contiguity = search.transitions[number].contiguity
            if search.is_accept[number] or contiguity.mode == STRICT:
                continue
            symbol = search.automaton.symbols[search.target[number]]
            symbols = (symbol, *contiguity.absent_symbols)
            following[which] = self.rows.next_fit(symbols)[here[which]]
        first = self._first_threads()
        owners = self.owner[first]
        row = np.minimum.reduceat(following, first)
        ends = (row > self.limit[owners]) | (row >= self.rows.end[self.start[owners]])
        self._end(owners[ends])
        going = ~ends
        self.here[owners[going]] = row[going]
        if ends.any():
            self._keep(self.status[self.owner] == 0)

    def _take_rows(self) -> None:
        """Let threads take the row where their start is: a thread that does is replaced by those of
        the longer path, in order; behind them it stays itself, if it may skip the row.
        """
        search, row = self.search, self.here[self.owner]
        takes = np.zeros(len(row), np.bool_)
        stays = search.mode[self.transition] != STRICT
        ends = np.zeros(len(row), np.bool_)
        for number, which in self._by_transition():
            if search.is_accept[number]:
                stays[which] = True
                if search.next_violation is not None:
                    ends[which] = self._is_violation(row[which])
                continue
            symbol = search.automaton.symbols[search.target[number]]
            takes[which] = self.rows.mask(symbol)[row[which]]
            absent = search.transitions[number].contiguity.absent_symbols
            if absent:
                ends[which] = self.rows.any_mask(absent)[row[which]]
        taking = np.flatnonzero(takes)
        states = search.target[self.transition[taking]]
        columns = search.memory.extend(self.columns, self.path[taking], row[taking], states)
        holds = self._check(columns, self.transition[taking], row[taking], states)
        if not holds.all():
            takes[taking[~holds]] = False
            taking, states = taking[holds], states[holds]
            columns = [column[holds] for column in columns]
        stays &= ~ends & ~(takes & (search.mode[self.transition] == SKIP_TILL_NEXT))
        self._replace(taking, states, row[taking], columns, stays)

    def _check(self, columns: Columns, transition: Ints, row: Ints, states: Ints) -> Mask:
        search = self.search
        holds = np.ones(len(row), np.bool_)
        looking = np.flatnonzero(search.looks_back[transition])
        for symbol in sorted(
            {search.automaton.symbols[state] for state in states[looking].tolist()}
        ):
            is_its = np.array([each == symbol for each in search.automaton.symbols])
            which = looking[is_its[states[looking]]]
            holds[which] = search.memory.holds(
                symbol, [column[which] for column in columns], row[which], states[which]
            )
        return holds

    def _replace(
        self, taking: Ints, states: Ints, row: Ints, columns: Columns, stays: Mask
    ) -> None:
        """The threads of paths that were continued, and those that stay."""
        search = self.search
        new_counts = np.zeros(len(self.owner), np.int64)
        new_counts[taking] = search.counts[states]
        total = new_counts + stays
        offsets = np.cumsum(total) - total
        count = int(total.sum())
        owner, path = np.repeat(self.owner, total), np.zeros(count, np.int64)
        transition = np.zeros(count, np.int64)
        is_new = expand_ranges(offsets[taking], new_counts[taking])
        transition[is_new] = expand_ranges(search.firsts[states], search.counts[states])
        path[is_new] = np.repeat(np.arange(len(taking)), search.counts[states]) + len(self.nodes)
        stayed = np.flatnonzero(stays)
        at = offsets[stayed] + new_counts[stayed]
        transition[at], path[at] = self.transition[stayed], self.path[stayed]
        self._parents.append(self.nodes[self.path[taking]])
        self._rows.append(row)
        self._states.append(states)
        nodes = np.append(self.nodes, np.arange(len(taking)) + self._node_count)
        self._node_count += len(taking)
        # Only the paths that threads stand on are remembered.
        is_used = np.zeros(len(nodes), np.bool_)
        is_used[path] = True
        used = np.flatnonzero(is_used)
        self.nodes = nodes[used]
        self.columns = [
            np.concatenate([old, new])[used] for old, new in zip(self.columns, columns, strict=True)
        ]
        ranks = np.cumsum(is_used) - 1
        before = self.owner
        self.owner, self.transition, self.path = owner, transition, ranks[path]
        self._fail_without_threads(before)

    def _accept(self) -> None:
        """End the starts whose preferred thread is done, and drop threads that are less preferred
        than one that is done. Where something must be absent until the time is up, nothing is done
        before.
        """
        search = self.search
        is_done = search.is_accept[self.transition]
        if search.next_violation is not None or not is_done.any():
            return
        before = self.owner
        if search.finds_all:
            done = np.flatnonzero(is_done)
            owners = self.owner[done]
            self._matches.append((owners, self.nodes[self.path[done]], self.here[owners]))
            np.add.at(self.match_count, owners, 1)
            self._keep(~is_done)
        else:
            done_before = np.cumsum(is_done) - is_done
            first = self._first_threads()
            lengths = np.diff(first, append=len(is_done))
            is_behind = done_before > np.repeat(done_before[first], lengths)
            is_certain = is_done[first]
            owners = self.owner[first[is_certain]]
            self._matches.append(
                (owners, self.nodes[self.path[first[is_certain]]], self.here[owners])
            )
            self.status[owners], self.decided_by[owners] = MATCHED, self.here[owners]
            self._keep(~is_behind & (self.status[self.owner] == 0))
        self._fail_without_threads(before)

    def _drop_equal_futures(self) -> None:
        """Of the threads of a start with equal transitions and memory keep the preferred one."""
        if self.search.finds_all or not len(self.owner):
            return
        counts = np.bincount(self.owner, minlength=len(self.start))
        which = np.flatnonzero(counts[self.owner] > FREE_THREADS)
        if not len(which):
            return
        transition, path = self.transition[which], self.path[which]
        keys: list[Ints] = []
        for number, column in enumerate(self.columns):
            values = column[path]
            if values.dtype == object:
                values = np.unique(values, return_inverse=True)[1]
            is_read = np.array([number in read for read in self.search.columns_read])
            as_integers = np.ascontiguousarray(values).view(np.int64)
            keys.append(np.where(is_read[transition], as_integers, 0))
        keys += [self.search.future[transition], self.owner[which]]
        order = np.lexsort(keys)
        is_repeated = np.zeros(len(which), np.bool_)
        if len(which) > 1:
            is_equal = np.ones(len(which) - 1, np.bool_)
            for key in keys:
                is_equal &= key[order[1:]] == key[order[:-1]]
            is_repeated[order[1:]] = is_equal
        kept = np.ones(len(self.owner), np.bool_)
        kept[which[is_repeated]] = False
        self._keep(kept)

    def _give_up(self) -> None:
        """Give up the starts that took too much work, or have too many matches."""
        counts = np.bincount(self.owner, minlength=len(self.start))
        beyond = np.maximum(counts - FREE_THREADS, 0)
        self.work += beyond
        is_too_much = (beyond > self.search.max_threads) | (
            self.work > self.search.max_threads * MAX_ROWS_OF_THREADS
        )
        is_too_much &= self.status == 0
        if self.search.finds_all:
            is_too_much |= (self.match_count > self.search.max_matches) & (self.status != GIVEN_UP)
        if is_too_much.any():
            self.status[is_too_much] = GIVEN_UP
            self.decided_by[is_too_much] = self.here[is_too_much]
            self._keep(self.status[self.owner] == 0)

    # Ends

    def _end(self, owners: Ints) -> None:
        """End starts that have no further row: they wait for rows that have not arrived, or their
        time is up, or they have as many rows as they may.
        """
        if not len(owners):
            return
        search = self.search
        waits = self.limit[owners] >= self.rows.end[self.start[owners]]
        self.status[owners] = np.where(waits, WAITING, FAILED)
        is_done = search.is_accept[self.transition]
        ending = np.zeros(len(self.start), np.bool_)
        ending[owners] = True
        open_threads = np.flatnonzero(~is_done & ending[self.owner])[::-1]
        self.open_node[self.owner[open_threads]] = self.nodes[self.path[open_threads]]
        may_match = ending.copy()
        may_match[owners[waits]] = False
        if search.next_violation is not None:
            may_match &= self.is_over
        done = np.flatnonzero(is_done & may_match[self.owner])
        if not search.finds_all:
            done = done[np.append(True, self.owner[done][1:] != self.owner[done][:-1])[: len(done)]]
        matched = self.owner[done]
        self.status[matched] = MATCHED
        never = np.full(len(done), NEVER)
        self._matches.append((matched, self.nodes[self.path[done]], never))
        np.add.at(self.match_count, matched, 1)

    def _fail_without_threads(self, before: Ints) -> None:
        """End the starts that had threads, and have none left."""
        has_threads = np.zeros(len(self.start), np.bool_)
        has_threads[self.owner] = True
        had_threads = np.zeros(len(self.start), np.bool_)
        had_threads[before] = True
        ended = np.flatnonzero(had_threads & ~has_threads & (self.status == 0))
        self.status[ended] = np.where(self.match_count[ended] > 0, MATCHED, FAILED)
        self.decided_by[ended] = self.here[ended]

    # Threads

    def _keep(self, kept: Mask) -> None:
        self.owner, self.transition = self.owner[kept], self.transition[kept]
        self.path = self.path[kept]

    def _first_threads(self) -> Ints:
        """The first thread of each start."""
        is_first = np.ones(len(self.owner), np.bool_)
        is_first[1:] = self.owner[1:] != self.owner[:-1]
        return np.flatnonzero(is_first)

    def _by_transition(self) -> list[tuple[int, Ints]]:
        """The threads of each transition."""
        present = np.flatnonzero(np.bincount(self.transition)).tolist()
        return [(number, np.flatnonzero(self.transition == number)) for number in present]

    def _is_violation(self, row: Ints) -> Mask:
        pattern = self.search.automaton.pattern
        if pattern.no_row_follows:
            return np.ones(len(row), np.bool_)
        return self.rows.any_mask(pattern.absent_symbols)[row]

    def _rows_of(self, nodes: Ints) -> MatchRows:
        """The rows of the paths that end in some nodes; owners are their indices."""
        if not len(nodes) or not self._node_count:
            nothing = np.zeros(0, np.int64)
            return MatchRows(nothing, nothing, nothing)
        parents, rows, states = map(np.concatenate, (self._parents, self._rows, self._states))
        owners, taken = [], []
        owner, node = np.arange(len(nodes)), nodes
        while len(node):
            owners.append(owner)
            taken.append(node)
            node = parents[node]
            owner, node = owner[node >= 0], node[node >= 0]
        owner, node = np.concatenate(owners[::-1]), np.concatenate(taken[::-1])
        order = np.argsort(owner, kind="stable")
        return MatchRows(owner[order], rows[node[order]], states[node[order]])


def _without_repeats(found: FoundPaths, search: PathSearch) -> FoundPaths:
    """Every match once: several ways through the automaton may take the same rows as the same
    symbols. A start has at most `max_matches`, the first that were complete.
    """
    symbol_numbers = {symbol: number for number, symbol in enumerate(search.automaton.symbols)}
    numbers = np.array([symbol_numbers[symbol] for symbol in search.automaton.symbols])
    count = len(found.match_start)
    bounds = np.searchsorted(found.match_rows.owner, np.arange(count + 1)).tolist()
    steps = np.stack([found.match_rows.row, numbers[found.match_rows.state]], axis=1)
    seen: dict[int, set[bytes]] = {}
    is_kept = np.zeros(count, np.bool_)
    for match, start in enumerate(found.match_start.tolist()):
        paths = seen.setdefault(start, set())
        path = steps[bounds[match] : bounds[match + 1]].tobytes()
        if path not in paths and len(paths) < search.max_matches:
            paths.add(path)
            is_kept[match] = True
    return FoundPaths(
        start=found.start,
        status=found.status,
        decided_by=found.decided_by,
        match_rows=found.match_rows.of_owners(is_kept),
        match_start=found.match_start[is_kept],
        match_decided_by=found.match_decided_by[is_kept],
        open_rows=found.open_rows,
    )
