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
from headrace.expressions.evaluator import Failures
from headrace.operators.kernel import PatternFull, Times, Watermarks
from headrace.operators.patterns.automaton import Automaton
from headrace.operators.patterns.compiled_pattern import CompiledPattern
from headrace.operators.patterns.conditions import MatchSource
from headrace.operators.patterns.matcher import FOREVER, Matcher, MatchOutcome
from headrace.operators.patterns.parser import ALL_ROWS, STOP, STRICT
from headrace.operators.patterns.path_memory import TermMemory
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
from headrace.operators.patterns.walker import MatchRows

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


@dataclass(frozen=True)
class MatchEmission:
    """Matches that are emitted: their rows, the row at which each begins, the time at which it was
    certain, its number, and its tick.
    """

    rows: MatchRows
    start: Ints
    decided_us: Times
    numbers: Ints
    ticks: Ints

    def take(self, is_wanted: Mask) -> MatchEmission:
        return MatchEmission(
            self.rows.of_owners(is_wanted),
            self.start[is_wanted],
            self.decided_us[is_wanted],
            self.numbers[is_wanted],
            self.ticks[is_wanted],
        )


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
            raise PatternFull(step=self.settings.name)
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
        source = replace(source, computed=self._computed(pattern, source, is_new))
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

    def _computed(
        self, pattern: CompiledPattern, source: MatchSource, is_new: Mask
    ) -> dict[str, pa.Array]:
        """The expressions of single rows that a pattern looks at."""
        computed = {}
        every_row = np.arange(len(is_new))
        for expression in pattern.row_expressions:
            columns = [source.column(name, every_row) for name in expression.columns]
            failures = Failures(np.zeros(len(is_new), np.bool_))
            values = expression.node.evaluate(columns, failures)
            self.count_failures(failures.rows & is_new)
            if isinstance(values, pa.Scalar):
                values = pa.repeat(values, len(is_new))
            computed[expression.name] = values.cast(expression.node.type)
        return computed

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
        conditions = {
            symbol: definition.by_match
            for symbol, definition in pattern.by_symbol.items()
            if definition.by_match is not None
        }
        return Matcher(
            rules=pattern.rules,
            rows=view.rows,
            now_us=int(self.clock.horizon[-1]),
            check=ConditionCheck(self, pattern, view),
            memory=TermMemory(
                conditions,
                view.source,
                len(view.rows),
                lambda rows: self.count_failures(view.is_new[rows]),
            ),
            may_begin=may_begin,
            in_order=self.settings.numbers_matches(pattern),
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
        match_rows = matcher.partial_matches(outcome, start, matcher.last_in_time(start))
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
        tick_index = np.searchsorted(self.clock.horizon, decided_us, side="right")
        keys = view.rows.keys[start]
        numbers = (
            self._number_matches(index, keys, tick_index)
            if is_match and self.settings.has_counters
            else np.zeros(len(start), np.int64)
        )
        ticks = self.clock.ticks[np.minimum(tick_index, len(self.clock) - 1)]
        emission = MatchEmission(match_rows, start, decided_us, numbers, ticks)
        if self.settings.rows != ALL_ROWS:
            return self._emit_per_match(index, view, emission), keys
        table, owner = self._emit_per_row(index, view, emission)
        return table, keys[owner]

    def _emit_per_match(self, index: int, view: PatternRows, emission: MatchEmission) -> pa.Table:
        """A row for each match."""
        _, pattern = self.settings.patterns[index]
        columns = [view.source.column(name, emission.start) for name in self.settings.by]
        measures = measures_per_match(pattern, view.source, emission.rows, emission.numbers)
        owner = np.arange(len(emission.start))
        return self._result(index, columns, measures, emission, owner)

    def _emit_per_row(
        self, index: int, view: PatternRows, emission: MatchEmission
    ) -> tuple[pa.Table, Ints]:
        """A row for each row of each match, and the match that it belongs to. An empty match has
        the row at which it begins, without a symbol.
        """
        _, pattern = self.settings.patterns[index]
        source, rows = view.source, emission.rows
        owner = rows.owner
        columns = [
            *(source.column(name, rows.row) for name in self.settings.row_schema.names),
            classifiers(source, rows),
            pa.array(emission.numbers[owner]),
        ]
        measures = measures_per_row(pattern, source, rows, emission.numbers)
        table = self._result(index, columns, measures, emission, owner)
        is_excluded = np.array(pattern.automaton.is_excluded)
        if is_excluded.any():
            shown = ~is_excluded[rows.state]
            table, owner = table.filter(pa.array(shown)), owner[shown]
        if not pattern.automaton.may_be_empty:
            return table, owner
        is_empty = np.bincount(rows.owner, minlength=len(emission.start)) == 0
        empty = emission.take(is_empty)
        columns = [
            *(source.column(name, empty.start) for name in self.settings.row_schema.names),
            pa.nulls(len(empty.start), pa.string()),
            pa.array(empty.numbers),
        ]
        measures = measures_per_match(pattern, source, empty.rows, empty.numbers)
        of_empty = self._result(index, columns, measures, empty, np.arange(len(empty.start)))
        owner = np.concatenate([owner, np.flatnonzero(is_empty)])
        order = np.argsort(owner, kind="stable")
        return pa.concat_tables([table, of_empty]).take(pa.array(order)), owner[order]

    def _result(
        self,
        index: int,
        columns: list[pa.Array],
        measures: list[pa.Array],
        emission: MatchEmission,
        owner: Ints,
    ) -> pa.Table:
        """Rows of matches in the columns of the result, given the match of each."""
        if self.settings.several:
            names = pa.repeat(pa.scalar(self.settings.patterns[index][0]), len(owner))
            columns.insert(self.settings.pattern_column_index, names)
        time_type = self.settings.schema.field(self.settings.time).type
        times = as_timestamps(emission.decided_us[owner], time_type)
        columns = [*columns, *measures, times, pa.array(emission.ticks[owner])]
        schema = self.output.append(TICK_FIELD)
        arrays = [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(columns, schema, strict=True)
        ]
        return pa.Table.from_arrays(arrays, schema=schema)

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
