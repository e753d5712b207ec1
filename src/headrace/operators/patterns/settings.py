"""What the kernel of patterns is told, and which columns its result has."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from headrace.errors import PlanError
from headrace.operators.patterns.compiled import CompiledPattern
from headrace.operators.patterns.conditions import Expression
from headrace.operators.patterns.row_buffer import WORD, words_of
from headrace.operators.patterns.specs import ALL_ROWS, DROP, ONE_ROW
from headrace.operators.patterns.telling import MATCHED_AT, PATTERN
from headrace.operators.patterns.terms import CLASSIFIER, MATCH_NUMBER
from headrace.operators.windows.specs import Divert, Drop, drop

DROPPED = drop()


@dataclass(frozen=True)
class InForce:
    """Of patterns that come and go: the conditions that rows alone decide, which the kernel computes; for each pattern its place among those that there can be, and since when it looks at rows."""

    conditions: tuple[Expression, ...]
    places: tuple[int, ...]
    since_us: tuple[int, ...]
    most: int


@dataclass(frozen=True)
class MatchSettings:
    """What the kernel is told. `bits`: columns of the input, each a condition that rows alone decide; `fits`: for each pattern, by symbol, which of them it is.

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
        return self.conditions + at if self.in_force is None else self.computed_words * WORD + self.in_force.places[at]

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
        """Whether something is kept of keys for good: how many matches they had, or that they had a row."""
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
    given = list(settings.schema) if settings.rows == ALL_ROWS else [settings.schema.field(name) for name in settings.by]
    if settings.rows == ALL_ROWS:
        given += [pa.field(CLASSIFIER, pa.string()), pa.field(MATCH_NUMBER, pa.int64())]
    if settings.several:
        given.insert(settings.pattern_at, pa.field(PATTERN, pa.string()))
    return pa.schema([*given, *_measures(settings), pa.field(MATCHED_AT, time)])


def _measures(settings: MatchSettings) -> list[pa.Field]:
    """All patterns have the same ones; one that does not measure something has null there."""
    fields = []
    for at, (name, _) in enumerate(settings.patterns[0][1].measures):
        kinds = {str(kind): kind for _, pattern in settings.patterns for kind in [pattern.measures[at][1].type(settings.schema)] if kind != pa.null()}
        if len(kinds) > 1:
            raise PlanError(f"The measure {name!r} is {' in one pattern and '.join(kinds)} in another.", fix="cast it, or give it another name.")
        fields.append(pa.field(name, next(iter(kinds.values()), pa.null())))
    return fields
