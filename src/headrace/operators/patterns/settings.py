"""The settings of the pattern kernel, the columns of its result, and the rows of matches: one for
each match, or one for each row of it, with the measures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, expand_ranges
from headrace.errors import PlanError
from headrace.expressions.function_calls import is_call_column
from headrace.operators.kernel import Times
from headrace.operators.patterns.compiled_pattern import CompiledPattern
from headrace.operators.patterns.conditions import (
    CLASSIFIER,
    MATCH_NUMBER,
    ConditionExpression,
    MatchSource,
    Term,
)
from headrace.operators.patterns.parser import ALL_ROWS, DROP, ONE_ROW
from headrace.operators.patterns.row_buffer import WORD_BITS, word_count
from headrace.operators.patterns.walker import MatchRows
from headrace.operators.windows.late_policy import Divert, Drop, drop

PATTERN, MATCHED_AT = "pattern", "matched_at"
MAX_PREFIX_ROWS = 1_000_000
"""Rows of prefixes of matches that are looked at together, at about 24 bytes each."""
DROP_LATE = drop()


# Settings


@dataclass(frozen=True)
class ActiveRules:
    """The patterns of a table of rules: the conditions that rows alone decide, which the kernel
    computes; for each pattern its slot among the `max_rules` that there can be, and the time from
    which on it looks at rows.
    """

    conditions: tuple[ConditionExpression, ...]
    slots: tuple[int, ...]
    since_us: tuple[int, ...]
    max_rules: int


@dataclass(frozen=True)
class MatchSettings:
    """The settings of the kernel.

    `bits` are columns of the input, each a condition that rows alone decide; `fits` says for each
    pattern, by symbol, which of them it is. `active_rules` is for patterns in a table of rules,
    whose conditions are no columns of the input.
    """

    name: str
    schema: pa.Schema
    by: tuple[str, ...]
    time: str
    patterns: tuple[tuple[str, CompiledPattern], ...]
    bits: tuple[str, ...] = ()
    fits: tuple[tuple[tuple[str, int], ...], ...] = ((),)
    rows: str = ONE_ROW
    several: bool = False
    timed_out: bool = False
    late: Drop | Divert = DROP_LATE
    producer: str | None = None
    time_shift_us: int = 0
    when_full: str = DROP
    tie_order: tuple[tuple[str, bool], ...] = ()
    """By which columns rows of one time are ordered, and whether each descends; then by arrival."""
    horizon_lag_us: int = 0
    """How far the horizon is behind the watermark."""
    active_rules: ActiveRules | None = None

    @property
    def conditions(self) -> int:
        """The number of conditions that rows alone decide."""
        return len(self.bits) if self.active_rules is None else len(self.active_rules.conditions)

    @property
    def computed_words(self) -> int:
        """The number of words of a row's bits that are computed in each batch, and not stored."""
        return 0 if self.active_rules is None else word_count(self.conditions)

    @property
    def stored_bits(self) -> int:
        if self.active_rules is not None:
            return self.active_rules.max_rules
        return self.conditions + len(self.patterns)

    def may_begin_bit(self, index: int) -> int:
        """The bit that says whether a row may still begin a match of a pattern."""
        if self.active_rules is not None:
            return self.computed_words * WORD_BITS + self.active_rules.slots[index]
        return self.conditions + index

    @cached_property
    def shared_bits(self) -> frozenset[int]:
        """The conditions that several patterns have."""
        counts = Counter(bit for fits in self.fits for _, bit in fits)
        return frozenset(bit for bit, count in counts.items() if count > 1)

    @cached_property
    def counts_matches(self) -> bool:
        return self.rows == ALL_ROWS or any(pattern.counts_matches for _, pattern in self.patterns)

    def numbers_matches(self, pattern: CompiledPattern) -> bool:
        """Whether the matches of a pattern are numbered in the result."""
        return self.rows == ALL_ROWS or pattern.counts_matches

    @cached_property
    def is_anchored(self) -> bool:
        return any(pattern.automaton.pattern.is_anchored for _, pattern in self.patterns)

    @property
    def row_schema(self) -> pa.Schema:
        """The columns of the rows as users see them: without those of calls in conditions."""
        return pa.schema([field for field in self.schema if not is_call_column(field.name)])

    @property
    def has_counters(self) -> bool:
        """Whether keys keep an entry for good: the number of their matches, or that they had a
        row.
        """
        return self.counts_matches or self.is_anchored

    @property
    def pattern_column_index(self) -> int:
        """Where the column with the pattern's name stands: behind the key, or behind the row."""
        return len(self.row_schema) if self.rows == ALL_ROWS else len(self.by)


def match_schema(settings: MatchSettings) -> pa.Schema:
    """The columns of a match."""
    if settings.rows == ALL_ROWS:
        fields = [
            *settings.row_schema,
            pa.field(CLASSIFIER, pa.string()),
            pa.field(MATCH_NUMBER, pa.int64()),
        ]
    else:
        fields = [settings.schema.field(name) for name in settings.by]
    if settings.several:
        fields.insert(settings.pattern_column_index, pa.field(PATTERN, pa.string()))
    time_type = settings.schema.field(settings.time).type
    return pa.schema([*fields, *_measure_fields(settings), pa.field(MATCHED_AT, time_type)])


def _measure_fields(settings: MatchSettings) -> list[pa.Field]:
    """The columns of the measures. All patterns have the same ones; one that does not measure
    something has null there.
    """
    fields = []
    for index, (name, _) in enumerate(settings.patterns[0][1].measures):
        kinds = {
            str(kind): kind
            for _, pattern in settings.patterns
            for kind in [pattern.measures[index][1].type]
            if kind != pa.null()
        }
        if len(kinds) > 1:
            raise PlanError(
                f"The measure {name!r} is {' in one pattern and '.join(kinds)} in another.",
                fix="cast it, or give it another name.",
            )
        fields.append(pa.field(name, next(iter(kinds.values()), pa.null())))
    return fields


# Rows of matches


def measures_per_match(
    pattern: CompiledPattern, source: MatchSource, match_rows: MatchRows, numbers: Ints
) -> list[pa.Array]:
    """The measures of each match, given its number."""
    terms = _all_terms(pattern)
    values = dict(zip(terms, _term_values(terms, source, match_rows, numbers), strict=True))
    return _measure_arrays(pattern, values, len(numbers))


def measures_per_row(
    pattern: CompiledPattern, source: MatchSource, match_rows: MatchRows, numbers: Ints
) -> list[pa.Array]:
    """The measures of each row of each match: over the rows up to it, unless they are final."""
    terms = _all_terms(pattern)
    final_terms = [term for term in terms if term.final]
    running_terms = [term for term in terms if not term.final]
    owner = pa.array(match_rows.owner)
    final_values = _term_values(final_terms, source, match_rows, numbers)
    values = {
        term: array.take(owner) for term, array in zip(final_terms, final_values, strict=True)
    }
    if running_terms:
        parts = [
            _term_values(running_terms, source, prefixes, numbers[match_rows.owner[first:stop]])
            for first, stop, prefixes in _prefixes(match_rows)
        ]
        for term, arrays in zip(running_terms, zip(*parts, strict=True), strict=True):
            values[term] = pa.concat_arrays(arrays)
    return _measure_arrays(pattern, values, len(match_rows.row))


def classifiers(source: MatchSource, match_rows: MatchRows) -> pa.Array:
    """The symbol of each row of a match."""
    return pa.array(source.symbols, pa.string()).take(pa.array(match_rows.state))


def _all_terms(pattern: CompiledPattern) -> tuple[Term, ...]:
    return tuple(
        dict.fromkeys(term for _, expression in pattern.measures for term in expression.terms)
    )


def _prefixes(match_rows: MatchRows) -> Iterator[tuple[int, int, MatchRows]]:
    """For each row of a match the rows of the match up to it. A bounded number at a time, so that
    long matches need no more memory than short ones.
    """
    starts = np.searchsorted(match_rows.owner, match_rows.owner)
    lengths = np.arange(len(match_rows.owner)) - starts + 1
    part = np.cumsum(lengths) // MAX_PREFIX_ROWS
    cuts = np.flatnonzero(np.diff(part)) + 1
    for first, stop in pairwise([0, *cuts.tolist(), len(lengths)]):
        rows = expand_ranges(starts[first:stop], lengths[first:stop])
        owner = np.repeat(np.arange(stop - first), lengths[first:stop])
        yield first, stop, MatchRows(owner, match_rows.row[rows], match_rows.state[rows])


def _term_values(
    terms: Sequence[Term], source: MatchSource, match_rows: MatchRows, numbers: Ints
) -> list[pa.Array]:
    return [
        (
            pa.array(numbers)
            if term.kind == MATCH_NUMBER
            else source.values([term], match_rows, len(numbers))[0]
        )
        for term in terms
    ]


def _measure_arrays(
    pattern: CompiledPattern, values: dict[Term, pa.Array], count: int
) -> list[pa.Array]:
    arrays = []
    for _, expression in pattern.measures:
        result, _ = expression.evaluate([values[term] for term in expression.terms], count)
        arrays.append(result.cast(expression.type))
    return arrays


def as_timestamps(times_us: Times, kind: pa.DataType) -> pa.Array:
    """Microseconds as a timestamp type."""
    return pa.array(times_us).cast(pa.timestamp("us", kind.tz)).cast(kind)
