"""Runs of an automaton from many first rows at once. Each run follows the first transition by which
a match can still be complete in time (`Lookahead`), so few ever have to turn back.

Example: the pattern `a b+ c`, over the rows of one key.

    row                  0    1    2    3    4
    fits                 a    b    b    c    b
    earliest completion  3    3    3    3    5 (= rows.end: a row that has not arrived)

    run from row 0:  row 0 in state a, rows 1 and 2 in state b, row 3 in state c, accepted

A run ends as a match; or it waits for rows that have not arrived; or it fails: a condition that
looks at earlier rows of the match did not hold. Where a failed run had a choice, its start is
searched row by row, with all choices at once (`path_search.py`).

`decided_by` of a run is the row that made its outcome certain: the last row of the match, or the
row that ended a transition that would have been preferred.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from headrace.columnar.buffers import Ints, Mask, expand_ranges
from headrace.columnar.lookup import search_within
from headrace.operators.patterns.automaton import ACCEPT, Automaton, Transition
from headrace.operators.patterns.parser import SKIP_TILL_ANY, SKIP_TILL_NEXT, STRICT
from headrace.operators.patterns.row_buffer import NEVER, SortedRows, suffix_max, suffix_min

MAX_PASSES = 32
"""Passes over a component of the automaton after which its look-ahead stays approximate."""


# Look-ahead


@dataclass(frozen=True)
class RowTransition:
    """A transition, with what is needed to follow it from any row.

    `next_fit` is the next row that fits the target, `next_absent` the next row that ends the
    transition. Where rows that fit may be skipped, `earliest_completion` and `latest_exhaustion`
    are the extremes over all rows from each on.
    """

    transition: Transition
    mode: int
    next_fit: Ints | None = None
    next_absent: Ints | None = None
    earliest_completion: Ints | None = None
    latest_exhaustion: Ints | None = None

    @property
    def target(self) -> int:
        return self.transition.target


class Lookahead:
    """What can become of each row in each state of the automaton, for all rows at once.

    `completion[state][row]` is the earliest row with which a match could be complete, `rows.end` if
    that row has not arrived, NEVER if the row does not fit. `exhausted[state][row]` is the row at
    which every transition on has ended, the row itself if it does not fit.

    Both follow from the states that a state leads to, so they are computed from the last states to
    the first, each for all rows in a few passes. A condition that looks at earlier rows of the
    match is taken to hold: `completion` is never too late, nor `exhausted` too early.

    `match_dependent` are the symbols with such conditions.
    """

    def __init__(
        self, automaton: Automaton, rows: SortedRows, match_dependent: Collection[str] = ()
    ) -> None:
        self.automaton, self.rows = automaton, rows
        self.match_dependent = frozenset(match_dependent)
        self.completion: list[Ints] = [np.zeros(0, np.int64)] * len(automaton)
        self.exhausted: list[Ints] = [np.zeros(0, np.int64)] * len(automaton)
        # Of states that directly follow themselves: the number of rows up to each from which
        # another transition leads on, and the last row of each run of rows that fit.
        self.exit_counts: dict[int, Ints] = {}
        self.run_ends: dict[int, Ints] = {}
        # Whether it is known of all states, and not only bounded.
        self.has_settled = True
        self.is_exact = not self.match_dependent and not automaton.pattern.waits_for_deadline
        self.next_violation = self._next_violation()
        self.transitions: list[tuple[RowTransition, ...]] = [()] * len(automaton)
        for component in automaton.components:
            self._compute_component(component)

    def _next_violation(self) -> Ints | None:
        """For each row the next one that violates what must be absent at the end; None if nothing
        must be.
        """
        pattern = self.automaton.pattern
        if pattern.no_row_follows:
            following = self.rows.positions + 1
            return np.where(following < self.rows.end, following, NEVER)
        return self.rows.next_fit(pattern.absent_symbols) if pattern.absent_symbols else None

    def _compute_component(self, component: tuple[int, ...]) -> None:
        if len(component) == 1 and self._compute_single(component[0]):
            return
        # What is not known yet might be complete at once, and might never end.
        for state in component:
            fits = self.rows.mask(self.automaton.symbols[state])
            self.completion[state] = np.where(fits, self.rows.positions, NEVER)
            self.exhausted[state] = np.where(fits, NEVER, self.rows.positions)
        for _ in range(MAX_PASSES):
            before = [(self.completion[state], self.exhausted[state]) for state in component]
            for state in reversed(component):
                self._compute_state(state, self.automaton.transitions[state])
            if all(
                (completion == self.completion[state]).all()
                and (exhausted == self.exhausted[state]).all()
                for (completion, exhausted), state in zip(before, component, strict=True)
            ):
                return
        self.is_exact = self.has_settled = False

    def _compute_single(self, state: int) -> bool:
        """Compute a state that at most follows itself. False if that takes several passes."""
        transitions = self.automaton.transitions[state]
        loops = [transition for transition in transitions if transition.target == state]
        if any(loop.contiguity.absent_symbols for loop in loops) or len(loops) > 1:
            return False
        self._compute_state(
            state, [transition for transition in transitions if transition.target != state]
        )
        if loops:
            self._compute_loop(state, loops[0].contiguity.mode)
        self.transitions[state] = tuple(self._row_transition(each) for each in transitions)
        return True

    def _compute_state(self, state: int, transitions: Collection[Transition]) -> None:
        fits = self.rows.mask(self.automaton.symbols[state])
        completion, exhausted = np.full(len(self.rows), NEVER), self.rows.positions
        row_transitions = tuple(self._row_transition(each) for each in transitions)
        for row_transition in row_transitions:
            its_completion, its_exhausted = self._look_from_all(row_transition)
            completion = np.minimum(completion, its_completion)
            exhausted = np.maximum(exhausted, its_exhausted)
        self.completion[state] = np.where(fits, completion, NEVER)
        self.exhausted[state] = np.where(fits, exhausted, self.rows.positions)
        self.transitions[state] = row_transitions

    def _compute_loop(self, state: int, mode: int) -> None:
        """Compute a state that also follows itself, given what its other transitions lead to."""
        rows, fits = self.rows, self.rows.mask(self.automaton.symbols[state])
        if mode != STRICT:
            earliest = suffix_min(self.completion[state], rows.is_first)
            earliest = np.minimum(earliest, rows.end)
            self.completion[state] = np.where(fits, earliest, NEVER)
            self.exhausted[state] = np.where(fits, NEVER, rows.positions)
            return
        run_starts = rows.is_first | ~fits
        run_starts[1:] |= ~fits[:-1]
        is_run_end = np.ones(len(rows), np.bool_)
        is_run_end[:-1] = run_starts[1:]
        completion, exhausted = self.completion[state], self.exhausted[state]
        self.exit_counts[state] = np.append(0, np.cumsum(completion < NEVER))
        self.run_ends[state] = suffix_max(rows.positions, run_starts)
        # The last row of a key may be followed by one that has not arrived.
        open_completion = np.where(rows.is_last, np.minimum(completion, rows.end), completion)
        run_exhausted = np.where(is_run_end, np.maximum(exhausted, rows.positions + 1), exhausted)
        self.completion[state] = np.where(fits, suffix_min(open_completion, run_starts), NEVER)
        self.exhausted[state] = np.where(
            fits, suffix_max(run_exhausted, run_starts), rows.positions
        )

    def _row_transition(self, transition: Transition) -> RowTransition:
        contiguity = transition.contiguity
        if transition.target == ACCEPT or contiguity.mode == STRICT:
            return RowTransition(transition, STRICT)
        symbol = self.automaton.symbols[transition.target]
        absent = contiguity.absent_symbols
        next_fit = self.rows.next_fit((symbol,))
        next_absent = self.rows.next_fit(absent) if absent else None
        if contiguity.mode == SKIP_TILL_NEXT and symbol not in self.match_dependent:
            return RowTransition(transition, SKIP_TILL_NEXT, next_fit, next_absent)
        starts = self.rows.is_first
        if absent:
            starts = starts.copy()
            starts[1:] |= self.rows.any_mask(absent)[:-1]
        fitting_exhausted = np.where(self.rows.mask(symbol), self.exhausted[transition.target], -1)
        return RowTransition(
            transition=transition,
            mode=SKIP_TILL_ANY,
            next_fit=next_fit,
            next_absent=next_absent,
            earliest_completion=np.append(
                suffix_min(self.completion[transition.target], starts), NEVER
            ),
            latest_exhaustion=np.append(suffix_max(fitting_exhausted, starts), -1),
        )

    def look(self, row_transition: RowTransition, positions: Ints) -> tuple[Ints, Ints]:
        """Look along a transition from some rows: the earliest completion, and the row at which
        every way there has ended.
        """
        target = row_transition.target
        if target == ACCEPT:
            violation = self.next_violation
            return positions, positions if violation is None else violation[positions]
        if row_transition.mode == STRICT:
            following, end = positions + 1, self.rows.end[positions]
            is_inside = following < end
            row = np.where(is_inside, following, positions)
            fits = is_inside & self.rows.mask(self.automaton.symbols[target])[row]
            return (
                np.where(is_inside, self.completion[target][row], end),
                np.where(fits, self.exhausted[target][row], following),
            )
        if row_transition.mode == SKIP_TILL_NEXT:
            assert row_transition.next_fit is not None
            next_fit = row_transition.next_fit[positions]
            has_arrived = next_fit < NEVER
            row = np.where(has_arrived, next_fit, positions)
            completion = np.where(
                has_arrived, self.completion[target][row], self.rows.end[positions]
            )
            exhausted = np.where(has_arrived, self.exhausted[target][row], NEVER)
            if row_transition.next_absent is None:
                return completion, exhausted
            next_absent = row_transition.next_absent[positions]
            is_ended = next_absent < next_fit
            return np.where(is_ended, NEVER, completion), np.where(is_ended, next_absent, exhausted)
        return self._look_till_any(row_transition, positions)

    def _look_from_all(self, row_transition: RowTransition) -> tuple[Ints, Ints]:
        """Look along a transition from all rows. A strict one takes what is known of the row
        behind.
        """
        target = row_transition.target
        if target == ACCEPT or row_transition.mode != STRICT:
            return self.look(row_transition, self.rows.positions)
        last = np.flatnonzero(self.rows.is_last)
        completion = np.append(self.completion[target][1:], NEVER)
        exhausted = np.append(self.exhausted[target][1:], NEVER)
        completion[last], exhausted[last] = last + 1, last + 1
        return completion, exhausted

    def _look_till_any(self, row_transition: RowTransition, positions: Ints) -> tuple[Ints, Ints]:
        assert row_transition.earliest_completion is not None
        assert row_transition.latest_exhaustion is not None
        end = self.rows.end[positions]
        is_inside = positions + 1 < end
        next_absent = (
            np.full(len(positions), NEVER)
            if row_transition.next_absent is None
            else row_transition.next_absent[positions]
        )
        is_ended = next_absent < NEVER
        completion = np.where(is_inside, row_transition.earliest_completion[positions + 1], NEVER)
        latest = np.where(is_inside, row_transition.latest_exhaustion[positions + 1], -1)
        return (
            np.where(is_ended, completion, np.minimum(completion, end)),
            np.where(is_ended, np.maximum(latest, next_absent), NEVER),
        )

    def look_from_start(self) -> tuple[Ints, Ints]:
        """For each row as the first of a match: the earliest completion, and the row at which all
        has ended.
        """
        completion, exhausted = np.full(len(self.rows), NEVER), self.rows.positions
        for state in self.automaton.start_states:
            completion = np.minimum(completion, self.completion[state])
            exhausted = np.maximum(exhausted, self.exhausted[state])
        return completion, exhausted


# Runs

MATCHED, WAITING, FAILED = 1, 2, 3
"""The status of a run that has ended."""


@dataclass(frozen=True)
class MatchRows:
    """Rows of matches, or of partial ones, in order of match and row: the number of the match, the
    row, and the state of the automaton that took it.
    """

    owner: Ints
    row: Ints
    state: Ints

    def of_owners(self, is_wanted: Mask) -> MatchRows:
        """The rows of some owners, who are numbered anew."""
        number = np.cumsum(is_wanted) - 1
        mine = is_wanted[self.owner]
        return MatchRows(number[self.owner[mine]], self.row[mine], self.state[mine])

    @staticmethod
    def concat(parts: list[MatchRows], owner_counts: list[int]) -> MatchRows:
        """Concatenate parts, given the number of owners of each."""
        if not parts:
            nothing = np.zeros(0, np.int64)
            return MatchRows(nothing, nothing, nothing)
        shifts = np.cumsum([0, *owner_counts[:-1]])
        return MatchRows(
            np.concatenate([part.owner + shift for part, shift in zip(parts, shifts, strict=True)]),
            np.concatenate([part.row for part in parts]),
            np.concatenate([part.state for part in parts]),
        )


CheckCondition = Callable[[str, MatchRows, int], Mask]
"""Whether the condition of a symbol holds for the last row of each of so many owners, given the
rows before it.
"""


@dataclass
class Runs:
    """Runs from some rows: the last row that each may reach, where it stands, and its outcome."""

    start: Ints
    limit: Ints
    row: Ints
    state: Ints
    decided_by: Ints
    status: Ints  # 0 while a run goes on
    had_choice: Mask  # whether another transition could have been taken
    _steps: list[tuple[Ints, Ints, Ints, Ints]] = field(
        default_factory=list
    )  # runs, states, first and last rows

    @staticmethod
    def begin(start: Ints, limit: Ints) -> Runs:
        count = len(start)
        return Runs(
            start=start,
            limit=limit,
            row=start.copy(),
            state=np.full(count, ACCEPT),
            decided_by=start.copy(),
            status=np.zeros(count, np.int64),
            had_choice=np.zeros(count, np.bool_),
        )

    def take_rows(self, which: Ints, state: int, first: Ints, last: Ints) -> None:
        """Let some runs take the rows from first to last, in a state."""
        self.state[which], self.row[which] = state, last
        self._steps.append((which, np.full(len(which), state), first, last))

    def note_decision(self, which: Ints, rows: Ints | int) -> None:
        """Note that the outcome of some runs is not certain before these rows."""
        self.decided_by[which] = np.maximum(self.decided_by[which], rows)

    def rows_of(self, which: Ints) -> MatchRows:
        """The rows that some runs, given in order, have taken so far; owners are indices in
        `which`.
        """
        if not self._steps:
            nothing = np.zeros(0, np.int64)
            return MatchRows(nothing, nothing, nothing)
        runs, states, first, last = (
            np.concatenate(column) for column in zip(*self._steps, strict=True)
        )
        owner = np.full(len(self.start), -1)
        owner[which] = np.arange(len(which))
        mine = np.flatnonzero(owner[runs] >= 0)
        mine = mine[np.argsort(owner[runs[mine]], kind="stable")]
        lengths = last[mine] - first[mine] + 1
        return MatchRows(
            np.repeat(owner[runs[mine]], lengths),
            expand_ranges(first[mine], lengths),
            np.repeat(states[mine], lengths),
        )


class Walker:
    """Runs the automaton over one look-ahead. `check` decides conditions that look at earlier rows
    of the match; `tracks_choices` makes every run record whether it had a choice.
    """

    def __init__(
        self, lookahead: Lookahead, check: CheckCondition, *, tracks_choices: bool = False
    ) -> None:
        self.lookahead, self.check = lookahead, check
        self._tracks_choices = tracks_choices or not lookahead.is_exact
        self.automaton, self.rows = lookahead.automaton, lookahead.rows
        # The states that take all rows of a run of rows that fit, without looking back.
        self._greedy_loops = frozenset(
            state
            for state in lookahead.exit_counts
            if self.automaton.transitions[state][0].target == state
            and self.automaton.symbols[state] not in lookahead.match_dependent
        )

    def walk(self, start: Ints, limit: Ints) -> Runs:
        """Run from these rows, each of which can begin a match, up to these limits."""
        runs = Runs.begin(start, limit)
        self._enter_start_states(runs)
        active = np.flatnonzero(runs.status == 0)
        while len(active):
            for state in np.unique(runs.state[active]).tolist():
                self._step(runs, active[runs.state[active] == state], state)
            active = active[runs.status[active] == 0]
        return runs

    def _enter_start_states(self, runs: Runs) -> None:
        entered: list[tuple[Ints, int]] = []
        is_placed = np.zeros(len(runs.start), np.bool_)
        for state in self.automaton.start_states:
            is_viable = self.lookahead.completion[state][runs.start] <= runs.limit
            runs.had_choice |= is_placed & is_viable
            which = np.flatnonzero(is_viable & ~is_placed)
            if self.automaton.symbols[state] in self.lookahead.match_dependent and len(which):
                which = which[self._check(runs, which, state, runs.start[which])]
            refused = ~is_placed
            refused[which] = False
            refused_runs = np.flatnonzero(refused)
            runs.note_decision(
                refused_runs, self.lookahead.exhausted[state][runs.start[refused_runs]]
            )
            is_placed[which] = True
            entered.append((which, state))
        for which, state in entered:
            runs.take_rows(which, state, runs.start[which], runs.start[which])
        runs.status[~is_placed] = FAILED

    def _step(self, runs: Runs, which: Ints, state: int) -> None:
        """One step of the runs that are in a state: along the first transition by which a match can
        be complete in time.
        """
        if state in self._greedy_loops:
            self._jump(runs, which, state)
        is_free, here = np.ones(len(which), np.bool_), runs.row[which]
        violation = self.lookahead.next_violation
        for row_transition in self.lookahead.transitions[state]:
            if not self._tracks_choices and not is_free.any():
                break
            completion, exhausted = self.lookahead.look(row_transition, here)
            is_viable = completion <= runs.limit[which]
            if row_transition.target == ACCEPT and violation is not None:
                is_viable &= violation[here] > runs.limit[which]
            runs.had_choice[which[~is_free & is_viable]] = True
            tried = np.flatnonzero(is_free & is_viable)
            gone = tried[self._follow(runs, which[tried], row_transition)]
            refused = is_free.copy()
            refused[gone] = False
            runs.note_decision(which[refused], exhausted[refused])
            is_free[gone] = False
        runs.status[which[is_free]] = FAILED

    def _jump(self, runs: Runs, which: Ints, state: int) -> None:
        """Take a run of rows that fit, up to the last from which a match can be complete in
        time.
        """
        here = runs.row[which]
        last = search_within(
            self.lookahead.completion[state],
            here + 1,
            self.lookahead.run_ends[state][here] + 1,
            runs.limit[which],
            right=True,
        )
        last = last - 1
        moves = last > here
        exit_counts = self.lookahead.exit_counts[state]
        passed_exit = exit_counts[last[moves]] > exit_counts[here[moves]]
        runs.had_choice[which[moves]] |= passed_exit
        runs.take_rows(which[moves], state, here[moves] + 1, last[moves])

    def _follow(self, runs: Runs, which: Ints, row_transition: RowTransition) -> Mask:
        """Let runs follow a transition; returns which of them could."""
        if not len(which):
            return np.zeros(0, np.bool_)
        if row_transition.target == ACCEPT:
            runs.status[which] = MATCHED
            waits = self.lookahead.next_violation is not None
            runs.note_decision(which, NEVER if waits else runs.row[which])
            return np.ones(len(which), np.bool_)
        # The row that each run takes: NEVER if it has to wait for one, -1 if no row will do.
        here = runs.row[which]
        if row_transition.mode == STRICT:
            rows = np.where(here + 1 < self.rows.end[here], here + 1, NEVER)
        else:
            assert row_transition.next_fit is not None
            rows = row_transition.next_fit[here].copy()
            runs.had_choice[which] |= row_transition.earliest_completion is not None
        unchecked = np.flatnonzero(rows < NEVER)
        while len(unchecked):
            unchecked = self._check_rows(runs, which, row_transition, rows, unchecked)
        is_waiting = rows == NEVER
        runs.status[which[is_waiting]] = WAITING
        runs.decided_by[which[is_waiting]] = NEVER
        has_row = (rows < NEVER) & (rows >= 0)
        runs.take_rows(which[has_row], row_transition.target, rows[has_row], rows[has_row])
        return rows >= 0

    def _check_rows(
        self,
        runs: Runs,
        which: Ints,
        row_transition: RowTransition,
        rows: Ints,
        unchecked: Ints,
    ) -> Ints:
        """Replace rows that will not do by the next candidate, in place; returns the runs whose row
        is new.
        """
        target, candidates = row_transition.target, rows[unchecked]
        mode = row_transition.transition.contiguity.mode
        is_fine = self.lookahead.completion[target][candidates] <= runs.limit[which[unchecked]]
        # Where the next row that fits leads nowhere, and may not be skipped.
        is_dead_end = np.zeros(len(unchecked), np.bool_)
        if self.automaton.symbols[target] in self.lookahead.match_dependent:
            tried = np.flatnonzero(is_fine) if mode == SKIP_TILL_ANY else np.arange(len(unchecked))
            holds = np.zeros(len(unchecked), np.bool_)
            if len(tried):
                holds[tried] = self._check(runs, which[unchecked[tried]], target, candidates[tried])
            is_dead_end = holds & ~is_fine & (mode == SKIP_TILL_NEXT)
            is_fine &= holds
        runs.note_decision(
            which[unchecked[~is_fine]], self.lookahead.exhausted[target][candidates[~is_fine]]
        )
        if row_transition.mode == STRICT:
            rows[unchecked[~is_fine]] = -1
            return unchecked[:0]
        rows[unchecked[is_dead_end]] = -1
        # The next rows that fit: NEVER where one has to be waited for, -1 where there is none.
        assert row_transition.next_fit is not None
        bad = unchecked[~is_fine & ~is_dead_end]
        following, here = row_transition.next_fit[rows[bad]], runs.row[which[bad]]
        next_absent = (
            np.full(len(bad), NEVER)
            if row_transition.next_absent is None
            else row_transition.next_absent[here]
        )
        is_open = (next_absent == NEVER) & (runs.limit[which[bad]] >= self.rows.end[here])
        has_next = (following < NEVER) & (following <= next_absent)
        waits = (following == NEVER) & is_open
        rows[bad] = np.where(waits, NEVER, np.where(has_next, following, -1))
        return bad[(rows[bad] >= 0) & (rows[bad] < NEVER)]

    def _check(self, runs: Runs, which: Ints, state: int, rows: Ints) -> Mask:
        """Whether the condition of a state holds on a row of each run, given the rows before."""
        before = runs.rows_of(which)
        owner = np.concatenate([before.owner, np.arange(len(which))])
        row = np.concatenate([before.row, rows])
        states = np.concatenate([before.state, np.full(len(rows), state)])
        order = np.argsort(owner, kind="stable")
        return self.check(
            self.automaton.symbols[state],
            MatchRows(owner[order], row[order], states[order]),
            len(which),
        )

    def partial_matches(self, start: Ints, limit: Ints) -> MatchRows:
        """How far runs came that could have gone on: along the first transitions that had not
        ended at the limit.
        """
        runs = Runs.begin(start, limit)
        for state in reversed(self.automaton.start_states):
            runs.state[self.lookahead.exhausted[state][start] > limit] = state
        for state in set(runs.state.tolist()) - {ACCEPT}:
            which = np.flatnonzero(runs.state == state)
            runs.take_rows(which, state, start[which], start[which])
        active = np.flatnonzero(runs.state != ACCEPT)
        while len(active):
            moved = [
                self._step_partial(runs, active[runs.state[active] == state], state)
                for state in np.unique(runs.state[active]).tolist()
            ]
            active = np.unique(np.concatenate(moved))
        return runs.rows_of(np.arange(len(start)))

    def _step_partial(self, runs: Runs, which: Ints, state: int) -> Ints:
        """One step along the first transitions that have not ended; returns the runs that took a
        row.
        """
        is_free, here = np.ones(len(which), np.bool_), runs.row[which]
        moved = [which[:0]]
        for row_transition in self.lookahead.transitions[state]:
            target, next_fit = row_transition.target, row_transition.next_fit
            if target == ACCEPT:
                continue
            _, exhausted = self.lookahead.look(row_transition, here)
            alive = np.flatnonzero(is_free & (exhausted > runs.limit[which]))
            is_free[alive] = False
            rows = here[alive] + 1 if next_fit is None else next_fit[here[alive]]
            goes = rows <= runs.limit[which[alive]]
            limit = runs.limit[which[alive[goes]]]
            goes[goes] = self.lookahead.exhausted[target][rows[goes]] > limit
            alive, rows = alive[goes], rows[goes]
            if self.automaton.symbols[target] in self.lookahead.match_dependent and len(alive):
                holds = self._check(runs, which[alive], target, rows)
                alive, rows = alive[holds], rows[holds]
            runs.take_rows(which[alive], target, rows, rows)
            moved.append(which[alive])
        return np.concatenate(moved)
