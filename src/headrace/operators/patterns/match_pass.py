"""The match pass of a batch: its certain rows, pattern after pattern; the rows that each pattern
emits, and which rows are still needed afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask, expand_ranges
from headrace.columnar.columns import TICK_FIELD
from headrace.columnar.lookup import group_start_mask, sort_order
from headrace.errors import InputError
from headrace.operators.kernel import Times, Watermarks
from headrace.operators.patterns.automaton import Automaton
from headrace.operators.patterns.compiled_pattern import CompiledPattern
from headrace.operators.patterns.conditions import MatchSource
from headrace.operators.patterns.matcher import FOREVER, Matcher, MatchOutcome
from headrace.operators.patterns.parser import ALL_ROWS, STOP, STRICT
from headrace.operators.patterns.row_buffer import (
    WORD_BITS,
    BufferedBatch,
    MatchCounts,
    RowBits,
    SortedRows,
)
from headrace.operators.patterns.settings import (
    MatchSettings,
    as_timestamps,
    classifiers,
    measures_per_match,
    measures_per_row,
)
from headrace.operators.patterns.walker import MatchRows, Walker

MIN_PATTERNS_FOR_FILTER = 8
"""From so many patterns on it pays to find out first which keys each needs to look at."""
FILTER_DEPTH = 4
"""How many rows before a row are looked at, to decide whether it can be part of a match."""


# Which keys a pattern must look at


class CandidateFilter:
    """Finds the keys that a pattern must look at, where there are many patterns: those in which a
    row of the rarest required symbol could be part of a match, judged by it and the rows directly
    before it.

    This is for speed alone: of keys that are not looked at, the rows that may still be needed are
    retained.
    """

    def __init__(
        self, settings: MatchSettings, rows: SortedRows, bits: RowBits, key_count: int
    ) -> None:
        self.settings, self.rows, self.bits = settings, rows, bits
        self.key_bounds = np.searchsorted(rows.keys, np.arange(key_count + 1))
        self._max_rows_per_key = int(np.diff(self.key_bounds).max(initial=0))
        self._rows_of_shared: dict[int, Ints] = {}
        self._keys_of_shared: dict[int, Mask] = {}
        self._rows_of_word: dict[int, Ints] = {}

    def candidate_rows(self, index: int) -> Ints | None:
        """The rows of the candidate keys of a pattern, if they are less than half of all; None for
        all rows.
        """
        _, pattern = self.settings.patterns[index]
        if (
            pattern.spec.within_us is None
            or self.settings.timed_out
            or pattern.automaton.pattern.is_anchored
            or len(self.settings.patterns) < MIN_PATTERNS_FOR_FILTER
            or self._max_rows_per_key > pattern.spec.max_rows
        ):
            return None
        bits = dict(self.settings.fits[index])
        required = {
            symbol: self._rows_with(bits[symbol])
            for symbol in pattern.automaton.required_symbols
            if symbol in bits
        }
        if not required:
            return None
        rarest = min(required, key=lambda symbol: len(required[symbol]))
        rows = required[rarest]
        is_possible = np.zeros(len(rows), np.bool_)
        for state, symbol in enumerate(pattern.automaton.symbols):
            if symbol == rarest:
                is_possible |= self._reaches(pattern.automaton, state, rows, bits, FILTER_DEPTH)
        rows = rows[is_possible]
        is_candidate = np.zeros(len(self.key_bounds) - 1, np.bool_)
        is_candidate[self.rows.keys[rows]] = True
        for symbol in required.keys() - {rarest}:
            is_candidate &= self._keys_with(bits[symbol])
        keys = np.flatnonzero(is_candidate)
        counts = self.key_bounds[keys + 1] - self.key_bounds[keys]
        if 2 * int(counts.sum()) >= len(self.rows):
            return None
        return expand_ranges(self.key_bounds[keys], counts)

    def _rows_with(self, bit: int) -> Ints:
        """The rows that meet a condition."""
        if bit in self.settings.shared_bits:
            if bit not in self._rows_of_shared:
                self._rows_of_shared[bit] = np.flatnonzero(self.bits.get(bit))
            return self._rows_of_shared[bit]
        # Few rows meet any of the conditions of a word that a single pattern has: they are found
        # once for the whole word.
        word = bit // WORD_BITS
        if word not in self._rows_of_word:
            last = min((word + 1) * WORD_BITS, self.settings.conditions)
            unshared = sum(
                1 << each % WORD_BITS
                for each in range(word * WORD_BITS, last)
                if each not in self.settings.shared_bits
            )
            self._rows_of_word[word] = np.flatnonzero(self.bits.words[word] & unshared)
        rows = self._rows_of_word[word]
        return rows[self.bits.get(bit, rows)]

    def _keys_with(self, bit: int) -> Mask:
        """The keys that have a row that meets a condition."""
        if bit in self._keys_of_shared:
            return self._keys_of_shared[bit]
        mask = np.zeros(len(self.key_bounds) - 1, np.bool_)
        mask[self.rows.keys[self._rows_with(bit)]] = True
        if bit in self.settings.shared_bits:
            self._keys_of_shared[bit] = mask
        return mask

    def _reaches(
        self, automaton: Automaton, state: int, rows: Ints, bits: dict[str, int], depth: int
    ) -> Mask:
        """Whether a match could reach a state with these rows, given that they fit it."""
        predecessors = automaton.predecessors[state]
        is_strict = all(mode == STRICT for _, mode in predecessors)
        if state in automaton.start_states or not depth or not is_strict:
            return np.ones(len(rows), np.bool_)
        mask = np.zeros(len(rows), np.bool_)
        inside = np.flatnonzero(rows > self.rows.start[rows])
        for predecessor, _ in predecessors:
            bit = bits.get(automaton.symbols[predecessor])
            fitting = inside if bit is None else inside[self.bits.get(bit, rows[inside] - 1)]
            mask[fitting] |= self._reaches(
                automaton, predecessor, rows[fitting] - 1, bits, depth - 1
            )
        return mask


# The pass


@dataclass(frozen=True)
class PatternRows:
    """The rows that a pattern looks at: their indices among the certain ones (None: all), the rows
    with the symbols that they fit, the source of its conditions, and which rows are certain since
    this batch.
    """

    indices: Ints | None
    rows: SortedRows
    source: MatchSource
    is_new: Mask


class MatchPass:
    """The match pass of a batch.

    When all patterns have run: `first_needed` is the first row of each key that some pattern still
    needs, `deadlines` by row the deadline of an undecided start, `timed_out` the rows of partial
    matches whose time ran out, `counts` the failures and abandoned starts.
    """

    def __init__(
        self,
        settings: MatchSettings,
        output: pa.Schema,
        batch: BufferedBatch,
        clock: Watermarks,
        had_row: Mask,
        match_counts: MatchCounts,
    ) -> None:
        self.settings, self.output = settings, output
        self.batch, self.clock = batch, clock
        self.had_row, self.match_counts = had_row, match_counts
        self.counts: dict[str, int] = {}
        self.rows = SortedRows(batch.keys[batch.certain], batch.times[batch.certain], {})
        self._order = batch.order[batch.certain]
        self.deadlines = np.full(len(self.rows), FOREVER)
        self.first_needed = np.full(len(batch.by), FOREVER)
        self.timed_out: list[pa.Table] = []
        self._first_in_time_by_within: dict[int, Ints] = {}

    @property
    def is_needed(self) -> Mask:
        """The certain rows that some pattern still needs."""
        return self.rows.positions >= self.first_needed[self.rows.keys]

    def keys_with_counters(self) -> Mask:
        """The keys that keep an entry for good."""
        mask: Mask = np.any(self.match_counts > 0, axis=1)
        if self.settings.is_anchored:
            mask[self.rows.keys] = True
        return mask

    def run_pattern(self, index: int) -> tuple[pa.Table, Ints] | None:
        """Run a pattern: the rows that it emits now, and the key of each; None if there are
        none.
        """
        view = self.view(index)
        if view.indices is not None and not len(view.indices):
            self._note_needed(index, view, view.indices)
            return None
        matcher = self.matcher(index, view)
        outcome = matcher.run()
        horizon = int(self.clock.horizon[-1])
        self._note_needed(index, view, np.flatnonzero(outcome.decided_us >= horizon))
        abandoned = int(self._is_decided_now(outcome.decided_us[outcome.abandoned]).sum())
        if abandoned and self.settings.when_full == STOP:
            raise InputError(
                f"The step {self.settings.name!r} has a match in the making that goes on for more"
                " rows, or in more ways, than it may.",
                fix=(
                    "allow more with max_rows= or max_matches=, say within=, or let such"
                    ' beginnings be given up and counted with when_full="drop".'
                ),
            )
        if abandoned:
            self.counts["given_up"] = self.counts.get("given_up", 0) + abandoned
        if self.settings.timed_out:
            self._emit_timed_out(index, view, matcher, outcome)
        matches = outcome.matches.take(self._is_decided_now(outcome.matches.decided_us))
        if not len(matches):
            return None
        return self._emit(index, view, matches.rows, matches.start, matches.decided_us)

    # The rows of a pattern

    def view(self, index: int) -> PatternRows:
        """The rows that a pattern must look at, and what they fit."""
        _, pattern = self.settings.patterns[index]
        indices = self._candidates.candidate_rows(index)
        # A rule that was added while others were active looks at no row from before.
        rules = self.settings.active_rules
        if rules is not None and rules.since_us[index] > self._oldest_us:
            looked_at = self.rows.positions if indices is None else indices
            indices = looked_at[self.rows.times[looked_at] >= rules.since_us[index]]
        rows = (
            self.rows
            if indices is None
            else SortedRows(self.rows.keys[indices], self.rows.times[indices], {})
        )
        source = MatchSource(
            rows=self.batch.rows,
            order=self._order if indices is None else self._order[indices],
            times=rows.times,
            start=rows.start,
            symbols=pattern.automaton.symbols,
            within_us=pattern.spec.within_us,
        )
        is_new = rows.times >= self.clock.horizon_at_start
        fits: dict[str, Mask | None] = dict.fromkeys(pattern.automaton.pattern.symbols)
        for symbol, bit in self.settings.fits[index]:
            fits[symbol] = self._certain_bits.get(bit, indices)
        for definition in pattern.definitions:
            if definition.by_neighbors is not None:
                each_row = MatchRows(rows.positions, rows.positions, np.zeros(len(rows), np.int64))
                values = source.values(definition.by_neighbors.terms, each_row, len(rows))
                holds, failed = definition.by_neighbors.holds(values, len(rows))
                self.count_failures(failed & is_new)
                by_row = fits[definition.symbol]
                fits[definition.symbol] = holds if by_row is None else holds & by_row
        return PatternRows(indices, replace(rows, fits=fits), source, is_new)

    @cached_property
    def _oldest_us(self) -> int:
        return int(self.rows.times.min(initial=FOREVER))

    @cached_property
    def _certain_bits(self) -> RowBits:
        return RowBits([word[self.batch.certain] for word in self.batch.bits.words])

    @cached_property
    def _candidates(self) -> CandidateFilter:
        return CandidateFilter(self.settings, self.rows, self._certain_bits, len(self.batch.by))

    def matcher(self, index: int, view: PatternRows) -> Matcher:
        """The matcher of a pattern over some rows."""
        _, pattern = self.settings.patterns[index]
        may_begin = self._certain_bits.get(self.settings.may_begin_bit(index), view.indices)
        if pattern.automaton.pattern.is_anchored:
            is_later_row = self.had_row[view.rows.keys] & view.is_new
            may_begin = may_begin & view.rows.is_first & ~is_later_row
        return Matcher(
            rules=pattern.rules,
            rows=view.rows,
            now_us=int(self.clock.horizon[-1]),
            check=ConditionCheck(self, pattern, view),
            may_begin=may_begin,
        )

    def _is_decided_now(self, decided_us: Times) -> Mask:
        """What is certain since this batch."""
        mask: Mask = (decided_us >= self.clock.horizon_at_start) & (
            decided_us < int(self.clock.horizon[-1])
        )
        return mask

    def count_failures(self, failed: Mask) -> None:
        """Count the rows on which a condition failed."""
        if failed.any():
            self.counts["errors"] = self.counts.get("errors", 0) + int(failed.sum())

    # What is still needed

    def _note_needed(self, index: int, view: PatternRows, undecided: Ints) -> None:
        """Note from where on a pattern needs the rows of each key, and until when. Of keys that it
        did not look at it needs the rows that are not too old.
        """
        within = self.settings.patterns[index][1].spec.within_us
        if view.indices is None:
            first = np.full(len(self.batch.by), FOREVER)
            looked_at = self.rows.positions
        else:
            first = self._first_in_time(within or 0).copy()
            undecided = view.indices[undecided]
            looked_at = view.indices
        first[view.rows.keys] = FOREVER
        np.minimum.at(first, self.rows.keys[undecided], undecided)
        self.first_needed = np.minimum(self.first_needed, first)
        decided = looked_at[looked_at < first[view.rows.keys]]
        self.batch.bits.clear(self.settings.may_begin_bit(index), self.batch.certain[decided])
        if within is not None:
            is_all = view.indices is None
            self._note_deadlines(
                first if is_all else first[view.rows.keys[view.rows.is_first]], within
            )

    def _note_deadlines(self, starts: Ints, within: int) -> None:
        known = starts[starts < FOREVER]
        self.deadlines[known] = np.minimum(self.deadlines[known], self.rows.times[known] + within)

    def _first_in_time(self, within: int) -> Ints:
        """The first row of each key that is not older than a match may be long."""
        if within not in self._first_in_time_by_within:
            first = np.full(len(self.batch.by), FOREVER)
            recent = np.flatnonzero(self.rows.times >= int(self.clock.horizon[-1]) - within)
            np.minimum.at(first, self.rows.keys[recent], recent)
            self._note_deadlines(first, within)
            self._first_in_time_by_within[within] = first
        return self._first_in_time_by_within[within]

    # Emission

    def _emit_timed_out(
        self, index: int, view: PatternRows, matcher: Matcher, outcome: MatchOutcome
    ) -> None:
        start = outcome.timed_out[self._is_decided_now(outcome.decided_us[outcome.timed_out])]
        if not len(start):
            return
        walker = Walker(matcher.lookahead, matcher.check)
        match_rows = walker.partial_matches(start, matcher.last_in_time(start))
        has_rows = np.bincount(match_rows.owner, minlength=len(start)) > 0
        table, _ = self._emit(
            index,
            view,
            match_rows.of_owners(has_rows),
            start[has_rows],
            outcome.decided_us[start[has_rows]],
            is_match=False,
        )
        self.timed_out.append(table)

    def _emit(
        self,
        index: int,
        view: PatternRows,
        match_rows: MatchRows,
        start: Ints,
        decided_us: Times,
        *,
        is_match: bool = True,
    ) -> tuple[pa.Table, Ints]:
        """The rows of matches, in the columns of the result, and the key of each."""
        name, pattern = self.settings.patterns[index]
        tick_index = np.searchsorted(self.clock.horizon, decided_us, side="right")
        source, keys = view.source, view.rows.keys[start]
        numbers = (
            self._number_matches(index, keys, tick_index)
            if is_match and self.settings.has_counters
            else np.zeros(len(start), np.int64)
        )
        if self.settings.rows == ALL_ROWS:
            owner = match_rows.owner
            measures = measures_per_row(pattern, source, match_rows, numbers)
            columns = [
                *(source.column(name, match_rows.row) for name in self.settings.schema.names),
                classifiers(source, match_rows),
                pa.array(numbers[owner]),
            ]
        else:
            owner = np.arange(len(start))
            measures = measures_per_match(pattern, source, match_rows, numbers)
            columns = [source.column(name, start) for name in self.settings.by]
        if self.settings.several:
            names = pa.repeat(pa.scalar(name), len(owner))
            columns.insert(self.settings.pattern_column_index, names)
        time_type = self.settings.schema.field(self.settings.time).type
        ticks = self.clock.ticks[np.minimum(tick_index, len(self.clock) - 1)[owner]]
        columns += [*measures, as_timestamps(decided_us[owner], time_type), pa.array(ticks)]
        schema = self.output.append(TICK_FIELD)
        arrays = [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(columns, schema, strict=True)
        ]
        return pa.Table.from_arrays(arrays, schema=schema), keys[owner]

    def _number_matches(self, index: int, keys: Ints, tick_index: Ints) -> Ints:
        """The number of each match among those of its key, in the order in which they became
        certain.
        """
        order = sort_order(keys, tick_index)
        starts = group_start_mask(keys[order])
        turn = np.arange(len(order))
        turn -= np.maximum.accumulate(np.where(starts, turn, 0)) if len(turn) else turn
        numbers = np.empty(len(order), np.int64)
        numbers[order] = self.match_counts[keys[order], index] + 1 + turn
        np.add.at(self.match_counts[:, index], keys, 1)
        return numbers


class ConditionCheck:
    """Checks conditions that look at earlier rows of the match, for the walker."""

    def __init__(self, match_pass: MatchPass, pattern: CompiledPattern, view: PatternRows) -> None:
        self._pass, self._view, self._definitions = match_pass, view, pattern.by_symbol

    def __call__(self, symbol: str, match_rows: MatchRows, count: int) -> Mask:
        condition = self._definitions[symbol].by_match
        assert condition is not None
        values = self._view.source.values(condition.terms, match_rows, count)
        holds, failed = condition.holds(values, count)
        if failed.any():
            ends = np.searchsorted(match_rows.owner, np.arange(count), side="right") - 1
            self._pass.count_failures(failed & self._view.is_new[match_rows.row[ends]])
        return holds
