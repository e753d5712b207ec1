"""What the kernel of patterns is told, and which columns its result has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, runs
from headrace.errors import PlanError
from headrace.operators.kernel import Times
from headrace.operators.patterns.compiled_pattern import CompiledPattern
from headrace.operators.patterns.conditions import (
    CLASSIFIER,
    MATCH_NUMBER,
    Expression,
    Source,
    Term,
)
from headrace.operators.patterns.parser import ALL_ROWS, DROP, ONE_ROW
from headrace.operators.patterns.row_buffer import WORD, words_of
from headrace.operators.patterns.walker import Entries
from headrace.operators.windows.late import Divert, Drop, drop

# A pattern's matches as rows: one for each match, or one for each row of it; with the measures,
# which are computed over all matches at once.


PATTERN, MATCHED_AT = "pattern", "matched_at"
MAX_AT_ONCE = 1_000_000
"""Entries of prefixes that are looked at together, at about 24 bytes each."""


def one_row(
    pattern: CompiledPattern, source: Source, entries: Entries, numbers: Ints
) -> list[pa.Array]:
    """The measures of each match."""
    terms = tuple(
        dict.fromkeys(term for _, expression in pattern.measures for term in expression.terms)
    )
    values = dict(zip(terms, _values(terms, source, entries, numbers), strict=True))
    return [
        _measured(expression, values, len(numbers), source) for _, expression in pattern.measures
    ]


def all_rows(
    pattern: CompiledPattern, source: Source, entries: Entries, numbers: Ints
) -> list[pa.Array]:
    """The measures of each row of each match: over the rows up to it, unless they are final."""
    terms = tuple(
        dict.fromkeys(term for _, expression in pattern.measures for term in expression.terms)
    )
    final, running = (
        [term for term in terms if term.final],
        [term for term in terms if not term.final],
    )
    of_match = _values(final, source, entries, numbers)
    values = dict(
        zip(final, (each.take(pa.array(entries.owner)) for each in of_match), strict=True)
    )
    if running:
        pieces = [
            _values(running, source, so_far, numbers[entries.owner[first:stop]])
            for first, stop, so_far in _prefixes(entries)
        ]
        values |= {
            term: pa.concat_arrays(each)
            for term, each in zip(running, zip(*pieces, strict=True), strict=True)
        }
    return [
        _measured(expression, values, len(entries.row), source)
        for _, expression in pattern.measures
    ]


def classifiers(source: Source, entries: Entries) -> pa.Array:
    return pa.array(source.symbols, pa.string()).take(pa.array(entries.place))


def _prefixes(entries: Entries) -> Iterator[tuple[int, int, Entries]]:
    """For each entry those of its match up to it; so many at a time that long matches need no more
    memory than short ones.
    """
    begins = np.searchsorted(entries.owner, entries.owner)
    lengths = np.arange(len(entries.owner)) - begins + 1
    pieces = np.cumsum(lengths) // MAX_AT_ONCE
    cuts = np.flatnonzero(np.diff(pieces)) + 1
    for first, stop in pairwise([0, *cuts.tolist(), len(lengths)]):
        some = lengths[first:stop]
        which = runs(begins[first:stop], some)
        yield (
            first,
            stop,
            Entries(
                np.repeat(np.arange(stop - first), some), entries.row[which], entries.place[which]
            ),
        )


def _values(
    terms: Sequence[Term], source: Source, entries: Entries, numbers: Ints
) -> list[pa.Array]:
    return [
        (
            pa.array(numbers)
            if term.kind == MATCH_NUMBER
            else source.values([term], entries, len(numbers))[0]
        )
        for term in terms
    ]


def _measured(
    expression: Expression, values: dict[Term, pa.Array], count: int, source: Source
) -> pa.Array:
    found, _ = expression.over([values[term] for term in expression.terms], count)
    return found.cast(expression.type(source.rows.schema))


def as_times(times: Times, kind: pa.DataType, shift_us: int) -> pa.Array:
    """Event times as the column has them."""
    return pa.array(times - shift_us).cast(pa.timestamp("us", kind.tz)).cast(kind)


DROPPED = drop()


@dataclass(frozen=True)
class InForce:
    """Of patterns that come and go: the conditions that rows alone decide, which the kernel
    computes; for each pattern its place among those that there can be, and since when it looks at
    rows.
    """

    conditions: tuple[Expression, ...]
    places: tuple[int, ...]
    since_us: tuple[int, ...]
    most: int


@dataclass(frozen=True)
class MatchSettings:
    """What the kernel is told. `bits`: columns of the input, each a condition that rows alone
    decide; `fits`: for each pattern, by symbol, which of them it is.

    `in_force`: for patterns that come and go, whose conditions are no columns of the input.
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
    late: Drop | Divert = DROPPED
    producer: str | None = None
    time_shift_us: int = 0
    when_full: str = DROP
    closed_behind_us: int = 0
    """How far behind the complete clock the closed one is."""
    in_force: InForce | None = None

    @property
    def conditions(self) -> int:
        """How many conditions there are that rows alone decide."""
        return len(self.bits) if self.in_force is None else len(self.in_force.conditions)

    @property
    def computed_words(self) -> int:
        """How many words of a row's bits are computed each time, and not stored."""
        return 0 if self.in_force is None else words_of(self.conditions)

    @property
    def stored_bits(self) -> int:
        return self.conditions + len(self.patterns) if self.in_force is None else self.in_force.most

    def may_begin(self, at: int) -> int:
        """The bit that says whether a row may still begin a match of a pattern."""
        return (
            self.conditions + at
            if self.in_force is None
            else self.computed_words * WORD + self.in_force.places[at]
        )

    @cached_property
    def shared(self) -> frozenset[int]:
        """The conditions that several patterns have."""
        counts = Counter(bit for fits in self.fits for _, bit in fits)
        return frozenset(bit for bit, count in counts.items() if count > 1)

    @cached_property
    def counts_matches(self) -> bool:
        return self.rows == ALL_ROWS or any(each.counts_matches for _, each in self.patterns)

    @property
    def has_accounts(self) -> bool:
        """Whether something is kept of keys for good: how many matches they had, or that they had a
        row.
        """
        return self.counts_matches or self.from_first

    @property
    def pattern_at(self) -> int:
        """Where the pattern's name stands: behind the key, or behind the row."""
        return len(self.schema) if self.rows == ALL_ROWS else len(self.by)

    @cached_property
    def from_first(self) -> bool:
        return any(each.automaton.pattern.from_first for _, each in self.patterns)


def match_schema(settings: MatchSettings) -> pa.Schema:
    """The columns of a match."""
    time = settings.schema.field(settings.time).type
    given = (
        list(settings.schema)
        if settings.rows == ALL_ROWS
        else [settings.schema.field(name) for name in settings.by]
    )
    if settings.rows == ALL_ROWS:
        given += [pa.field(CLASSIFIER, pa.string()), pa.field(MATCH_NUMBER, pa.int64())]
    if settings.several:
        given.insert(settings.pattern_at, pa.field(PATTERN, pa.string()))
    return pa.schema([*given, *_measures(settings), pa.field(MATCHED_AT, time)])


def _measures(settings: MatchSettings) -> list[pa.Field]:
    """All patterns have the same ones; one that does not measure something has null there."""
    fields = []
    for at, (name, _) in enumerate(settings.patterns[0][1].measures):
        kinds = {
            str(kind): kind
            for _, pattern in settings.patterns
            for kind in [pattern.measures[at][1].type(settings.schema)]
            if kind != pa.null()
        }
        if len(kinds) > 1:
            raise PlanError(
                f"The measure {name!r} is {' in one pattern and '.join(kinds)} in another.",
                fix="cast it, or give it another name.",
            )
        fields.append(pa.field(name, next(iter(kinds.values()), pa.null())))
    return fields
