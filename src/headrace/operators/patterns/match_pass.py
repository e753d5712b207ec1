"""One call of the kernel at work: its certain rows, pattern after pattern; what each tells, and
what of the rows is still needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask, runs
from headrace.columnar.columns import TICK_FIELD
from headrace.columnar.lookup import sorting
from headrace.errors import InputError
from headrace.operators.kernel import Times, Watermarks
from headrace.operators.patterns.automaton import Automaton
from headrace.operators.patterns.compiled_pattern import CompiledPattern
from headrace.operators.patterns.conditions import Source
from headrace.operators.patterns.matcher import FOREVER, Matcher, Outcome
from headrace.operators.patterns.parser import ALL_ROWS, STOP, STRICT
from headrace.operators.patterns.row_buffer import WORD, Batch, Bits, Numbers, SortedRows
from headrace.operators.patterns.settings import (
    MatchSettings,
    all_rows,
    as_times,
    classifiers,
    one_row,
)
from headrace.operators.patterns.walker import Entries, Walker

# Which keys a pattern must look at, where there are many patterns: those in which a row of the
# symbol that is rarest could be part of a match, as far as it and the rows directly before it tell.
# It decides about speed alone: of keys that are not looked at, what may still be needed is kept.


MANY = 8
"""From so many patterns on it pays to find out first which keys each needs to look at."""
DEPTH = 4
"""How many rows before one are looked at, to tell whether it can be part of a match."""


class Candidates:
    """Of rows that are in order, `keys` of them different; `bits`: which conditions each meets."""

    def __init__(self, settings: MatchSettings, rows: SortedRows, bits: Bits, keys: int) -> None:
        self.settings, self.rows, self.bits = settings, rows, bits
        self.bounds = np.searchsorted(rows.keys, np.arange(keys + 1))
        self._shared_rows: dict[int, Ints] = {}
        self._shared_keys: dict[int, Mask] = {}
        self._rare_rows: dict[int, Ints] = {}

    def of(self, at: int) -> Ints | None:
        """The rows of those keys, if they are far fewer than all; None for all."""
        _, pattern = self.settings.patterns[at]
        bits = dict(self.settings.fits[at])
        needed = (
            {
                symbol: self._rows_with(bits[symbol])
                for symbol in pattern.automaton.required
                if symbol in bits
            }
            if self._is_fit(pattern)
            else {}
        )
        if not needed:
            return None
        rarest = min(needed, key=lambda symbol: len(needed[symbol]))
        found = needed[rarest][self._possible(pattern.automaton, rarest, needed[rarest], bits)]
        has = np.zeros(len(self.bounds) - 1, np.bool_)
        has[self.rows.keys[found]] = True
        for symbol in needed.keys() - {rarest}:
            has &= self._keys_with(bits[symbol])
        keys = np.flatnonzero(has)
        counts = self.bounds[keys + 1] - self.bounds[keys]
        return runs(self.bounds[keys], counts) if 2 * int(counts.sum()) < len(self.rows) else None

    def _is_fit(self, pattern: CompiledPattern) -> bool:
        settings, spec = self.settings, pattern.spec
        unfit = (
            spec.within_us is None
            or settings.timed_out
            or pattern.automaton.pattern.from_first
            or len(settings.patterns) < MANY
        )
        return not unfit and self._longest <= spec.max_rows

    @cached_property
    def _longest(self) -> int:
        return int(np.diff(self.bounds).max(initial=0))

    # Conditions

    def _rows_with(self, bit: int) -> Ints:
        if bit in self.settings.shared:
            if bit not in self._shared_rows:
                self._shared_rows[bit] = np.flatnonzero(self.bits.get(bit))
            return self._shared_rows[bit]
        some = self._rows_with_own(bit // WORD)
        return some[self.bits.get(bit, some)]

    def _rows_with_own(self, word: int) -> Ints:
        """The rows that meet any condition of a word that a single pattern has: there are few of
        those.
        """
        if word not in self._rare_rows:
            own = sum(
                1 << bit % WORD
                for bit in range(word * WORD, min((word + 1) * WORD, self.settings.conditions))
                if bit not in self.settings.shared
            )
            self._rare_rows[word] = np.flatnonzero(self.bits.words[word] & own)
        return self._rare_rows[word]

    def _keys_with(self, bit: int) -> Mask:
        if bit in self._shared_keys:
            return self._shared_keys[bit]
        has = np.zeros(len(self.bounds) - 1, np.bool_)
        has[self.rows.keys[self._rows_with(bit)]] = True
        if bit in self.settings.shared:
            self._shared_keys[bit] = has
        return has

    # Rows before

    def _possible(
        self, automaton: Automaton, symbol: str, rows: Ints, bits: dict[str, int]
    ) -> Mask:
        """Which of some rows of a symbol could be at one of its places."""
        found = np.zeros(len(rows), np.bool_)
        for place, each in enumerate(automaton.symbols):
            if each == symbol:
                found |= self._comes_to(automaton, place, rows, bits, DEPTH)
        return found

    def _comes_to(
        self, automaton: Automaton, place: int, rows: Ints, bits: dict[str, int], depth: int
    ) -> Mask:
        """Whether a match could come to a place with these rows, given that they fit it."""
        before = automaton.ways_to[place]
        if place in automaton.first or not depth or any(mode != STRICT for _, mode in before):
            return np.ones(len(rows), np.bool_)
        found = np.zeros(len(rows), np.bool_)
        inside = np.flatnonzero(rows > self.rows.start[rows])
        for other, _ in before:
            bit = bits.get(automaton.symbols[other])
            fits = inside if bit is None else inside[self.bits.get(bit, rows[inside] - 1)]
            found[fits] |= self._comes_to(automaton, other, rows[fits] - 1, bits, depth - 1)
        return found


@dataclass(frozen=True)
class View:
    """The rows that a pattern looks at: which of the certain ones (None: all), with what they fit,
    and what its conditions read. `fresh`: certain since this call.
    """

    which: Ints | None
    rows: SortedRows
    source: Source
    fresh: Mask


class Work:
    """One call at work: its certain rows, pattern after pattern. `needed`: which of them some
    pattern still needs; `wake`: by row, the deadline of a beginning that is open.
    """

    def __init__(
        self,
        settings: MatchSettings,
        output: pa.Schema,
        batch: Batch,
        clock: Watermarks,
        known: Mask,
        numbers: Numbers,
    ) -> None:
        self.settings, self.output, self.batch, self.clock = settings, output, batch, clock
        self.known, self.numbers = known, numbers
        self.counts: dict[str, int] = {}
        certain = batch.certain
        self.rows = SortedRows(batch.keys[certain], batch.times[certain], {})
        self.wake = np.full(len(self.rows), FOREVER)
        self.first = np.full(len(batch.by), FOREVER)  # of each key, the first row that is needed
        self.aside: list[pa.Table] = []
        self._known_in_time: dict[int, Ints] = {}

    @property
    def needed(self) -> Mask:
        return self.rows.at >= self.first[self.rows.keys]

    def accounted(self) -> Mask:
        """The keys of which something is to be remembered for good."""
        some: Mask = np.any(self.numbers > 0, axis=1)
        if self.settings.from_first:
            some[self.rows.keys] = True
        return some

    def matched(self, at: int) -> tuple[pa.Table, Ints] | None:
        """What a pattern tells now, and the number of each row's key; None if that is nothing."""
        _, pattern = self.settings.patterns[at]
        view = self.view(at)
        if view.which is not None and not len(view.which):
            self._note(at, view, view.which)
            return None
        matcher = self.matcher(at, view)
        outcome = matcher.run()
        self._note(at, view, np.flatnonzero(outcome.certain_us >= int(self.clock.closed[-1])))
        self._note_given_up(outcome)
        if self.settings.timed_out:
            self._time_out(at, pattern, view, matcher, outcome)
        matches = outcome.matches.take(self._now(outcome.matches.certain_us))
        return (
            self._told(at, pattern, view, matches.entries, matches.begin, matches.certain_us)
            if len(matches)
            else None
        )

    # Which rows to look at

    def view(self, at: int) -> View:
        """The rows that a pattern must look at: those of keys that have a row of every symbol that
        a match needs.
        """
        _, pattern = self.settings.patterns[at]
        which = self._since(at, self._candidates.of(at))
        rows = (
            self.rows
            if which is None
            else SortedRows(self.rows.keys[which], self.rows.times[which], {})
        )
        fits = {
            symbol: self._certain_bits.get(bit, which) for symbol, bit in self.settings.fits[at]
        }
        order = self._certain_order if which is None else self._certain_order[which]
        source = Source(
            self.batch.rows,
            order,
            rows.times,
            rows.start,
            pattern.automaton.symbols,
            pattern.spec.within_us,
        )
        fresh = rows.times >= self.clock.horizon_at_start
        return View(
            which, replace(rows, fits=self._fits(pattern, source, rows, fresh, fits)), source, fresh
        )

    def _since(self, at: int, which: Ints | None) -> Ints | None:
        """Of a pattern that came while others were there, the rows that are not from before."""
        since_us = None if self.settings.in_force is None else self.settings.in_force.since_us[at]
        if since_us is None or since_us <= self._oldest:
            return which
        mine = self.rows.at if which is None else which
        return mine[self.rows.times[mine] >= since_us]

    @cached_property
    def _oldest(self) -> int:
        return int(self.rows.times.min(initial=FOREVER))

    @cached_property
    def _certain_bits(self) -> Bits:
        return Bits([word[self.batch.certain] for word in self.batch.bits.words])

    @cached_property
    def _certain_order(self) -> Ints:
        return self.batch.order[self.batch.certain]

    @cached_property
    def _candidates(self) -> Candidates:
        return Candidates(self.settings, self.rows, self._certain_bits, len(self.batch.by))

    def matcher(self, at: int, view: View) -> Matcher:
        """A pattern's matcher over some rows."""
        _, pattern = self.settings.patterns[at]
        may_begin = self._certain_bits.get(self.settings.may_begin(at), view.which)
        if pattern.automaton.pattern.from_first:
            may_begin = may_begin & view.rows.begins & ~(self.known[view.rows.keys] & view.fresh)
        return Matcher(
            pattern.rules,
            view.rows,
            int(self.clock.closed[-1]),
            Holds(self, pattern, view),
            may_begin,
        )

    def _now(self, certain_us: Times) -> Mask:
        """What is certain since this call."""
        since: Mask = (certain_us >= self.clock.horizon_at_start) & (
            certain_us < int(self.clock.closed[-1])
        )
        return since

    def _fits(
        self,
        pattern: CompiledPattern,
        source: Source,
        rows: SortedRows,
        fresh: Mask,
        alone: dict[str, Mask],
    ) -> dict[str, Mask | None]:
        fits: dict[str, Mask | None] = {**dict.fromkeys(pattern.automaton.pattern.symbols), **alone}
        for definition in pattern.definitions:
            if definition.background is not None:
                count = len(rows)
                each = Entries(rows.at, rows.at, np.zeros(count, np.int64))
                holds, failed = definition.background.holds(
                    source.values(definition.background.terms, each, count), count
                )
                self.failed(failed & fresh)
                before = fits[definition.symbol]
                fits[definition.symbol] = holds if before is None else holds & before
        return fits

    def failed(self, rows: Mask) -> None:
        if rows.any():
            self.counts["errors"] = self.counts.get("errors", 0) + int(rows.sum())

    def _note(self, at: int, view: View, undecided: Ints) -> None:
        """From where on each key's rows are still needed, and until when. Of keys that were not
        looked at, what is in time is.
        """
        within = self.settings.patterns[at][1].spec.within_us
        first = (
            np.full(len(self.batch.by), FOREVER)
            if view.which is None
            else self._in_time(within or 0).copy()
        )
        first[view.rows.keys] = FOREVER
        rows = undecided if view.which is None else view.which[undecided]
        np.minimum.at(first, self.rows.keys[rows], rows)
        self.first = np.minimum(self.first, first)
        looked = self.rows.at if view.which is None else view.which
        self.batch.bits.clear(
            self.settings.may_begin(at), self.batch.certain[looked[looked < first[view.rows.keys]]]
        )
        if within is not None:
            self._wake(
                first if view.which is None else first[view.rows.keys[view.rows.begins]], within
            )

    def _wake(self, starts: Ints, within: int) -> None:
        known = starts[starts < FOREVER]
        self.wake[known] = np.minimum(self.wake[known], self.rows.times[known] + within)

    def _in_time(self, within: int) -> Ints:
        """The first row of each key that is not older than a match may be."""
        if within not in self._known_in_time:
            first = np.full(len(self.batch.by), FOREVER)
            young = np.flatnonzero(self.rows.times >= int(self.clock.closed[-1]) - within)
            np.minimum.at(first, self.rows.keys[young], young)
            self._wake(first, within)
            self._known_in_time[within] = first
        return self._known_in_time[within]

    def _note_given_up(self, outcome: Outcome) -> None:
        count = int(self._now(outcome.certain_us[outcome.given_up]).sum())
        if count and self.settings.when_full == STOP:
            raise InputError(
                f"The step {self.settings.name!r} has a match in the making that goes on for more"
                " rows, or in more ways, than it may.",
                fix=(
                    "allow more with max_rows= or max_matches=, say within=, or let such"
                    ' beginnings be given up and counted with when_full="drop".'
                ),
            )
        if count:
            self.counts["given_up"] = self.counts.get("given_up", 0) + count

    def _time_out(
        self, at: int, pattern: CompiledPattern, view: View, matcher: Matcher, outcome: Outcome
    ) -> None:
        begin = outcome.timed_out[self._now(outcome.certain_us[outcome.timed_out])]
        if not len(begin):
            return
        limit = matcher.last_in_time(begin)
        entries = Walker(matcher.look, matcher.holds).partly(begin, limit)
        some = np.bincount(entries.owner, minlength=len(begin)) > 0
        table, _ = self._told(
            at,
            pattern,
            view,
            entries.of(some),
            begin[some],
            outcome.certain_us[begin[some]],
            count=False,
        )
        self.aside.append(table)

    # Rows

    def _told(
        self,
        at: int,
        pattern: CompiledPattern,
        view: View,
        entries: Entries,
        begin: Ints,
        certain_us: Times,
        *,
        count: bool = True,
    ) -> tuple[pa.Table, Ints]:
        places = np.searchsorted(self.clock.closed, certain_us, side="right")
        source, keys = view.source, view.rows.keys[begin]
        numbers = (
            self._numbered(at, keys, places)
            if count and self.settings.has_accounts
            else np.zeros(len(begin), np.int64)
        )
        if self.settings.rows == ALL_ROWS:
            measures = all_rows(pattern, source, entries, numbers)
            columns = [source.column(name, entries.row) for name in self.settings.schema.names]
            columns += [classifiers(source, entries), pa.array(numbers[entries.owner])]
            which = entries.owner
        else:
            measures = one_row(pattern, source, entries, numbers)
            columns = [source.column(name, begin) for name in self.settings.by]
            which = np.arange(len(begin))
        if self.settings.several:
            columns.insert(
                self.settings.pattern_at,
                pa.repeat(pa.scalar(self.settings.patterns[at][0]), len(which)),
            )
        kind = self.settings.schema.field(self.settings.time).type
        columns += [
            *measures,
            as_times(certain_us[which], kind, 0),
            pa.array(self.clock.ticks[np.minimum(places, len(self.clock) - 1)[which]]),
        ]
        schema = self.output.append(TICK_FIELD)
        return (
            pa.Table.from_arrays(
                [
                    column if column.type == field.type else column.cast(field.type)
                    for column, field in zip(columns, schema, strict=True)
                ],
                schema=schema,
            ),
            keys[which],
        )

    def _numbered(self, at: int, keys: Ints, places: Ints) -> Ints:
        """Each match's number among those of its key, in the order in which they became certain."""
        order = sorting(keys, places)
        begins = np.ones(len(order), np.bool_)
        begins[1:] = keys[order][1:] != keys[order][:-1]
        turn = np.arange(len(order))
        turn -= np.maximum.accumulate(np.where(begins, turn, 0)) if len(turn) else turn
        numbers = np.empty(len(order), np.int64)
        numbers[order] = self.numbers[keys[order], at] + 1 + turn
        np.add.at(self.numbers[:, at], keys, 1)
        return numbers


class Holds:
    """Whether the condition of a symbol holds, given the match so far."""

    def __init__(self, work: Work, pattern: CompiledPattern, view: View) -> None:
        self._work, self._view, self._by_symbol = work, view, pattern.by_symbol

    def __call__(self, symbol: str, entries: Entries, count: int) -> Mask:
        condition = self._by_symbol[symbol].so_far
        assert condition is not None
        holds, failed = condition.holds(
            self._view.source.values(condition.terms, entries, count), count
        )
        if failed.any():
            last = entries.row[np.searchsorted(entries.owner, np.arange(count), side="right") - 1]
            self._work.failed(failed & self._view.fresh[last])
        return holds
