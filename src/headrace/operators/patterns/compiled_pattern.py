"""A pattern as a user gave it (`PatternSpec`), and compiled for the kernel (`CompiledPattern`): its
automaton, its conditions, its measures. Every mistake in a pattern is found here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from headrace.durations import format_us
from headrace.errors import BadPattern, nearest
from headrace.operators.patterns.automaton import Automaton, build_automaton
from headrace.operators.patterns.condition_parser import (
    Definition,
    PatternNames,
    compile_measure,
    parse_definition,
    parse_measure_sql,
)
from headrace.operators.patterns.conditions import (
    MATCH_NUMBER,
    ConditionExpression,
    RowExpression,
)
from headrace.operators.patterns.matcher import MatchRules
from headrace.operators.patterns.parser import (
    MAX_MATCHES,
    MAX_ROWS,
    NO_SKIP,
    PAST_LAST,
    TO_FIRST,
    SkipStrategy,
    parse_pattern,
    parse_skip_strategy,
)

Texts = tuple[tuple[str, str], ...]
"""Expressions by name."""


@dataclass(frozen=True)
class PatternSpec:
    """A pattern in plain values: its text, the conditions of its symbols, its measures, how long a
    match may take, and where the next one may begin.
    """

    pattern: str
    define: Texts = ()
    measures: Texts = ()
    within_us: int | None = None
    after_match: str = PAST_LAST
    subsets: tuple[tuple[str, tuple[str, ...]], ...] = ()
    max_rows: int = MAX_ROWS
    max_matches: int = MAX_MATCHES

    def __str__(self) -> str:
        within = "" if self.within_us is None else f" within {format_us(self.within_us)}"
        return f"{self.pattern}{within}, {self.after_match}"


@dataclass(frozen=True)
class CompiledPattern:
    """A pattern that is ready to run over rows of a schema."""

    spec: PatternSpec
    rules: MatchRules
    definitions: tuple[Definition, ...]
    measures: tuple[tuple[str, ConditionExpression], ...]

    @property
    def automaton(self) -> Automaton:
        return self.rules.automaton

    @cached_property
    def by_symbol(self) -> dict[str, Definition]:
        return {definition.symbol: definition for definition in self.definitions}

    @property
    def _expressions(self) -> list[ConditionExpression]:
        """The measures, and the conditions that are not decided by a row alone."""
        conditions = [
            expression
            for definition in self.definitions
            for expression in (definition.by_neighbors, definition.by_match)
            if expression is not None
        ]
        return conditions + [expression for _, expression in self.measures]

    @property
    def look_back_rows(self) -> int:
        """How many rows before a match conditions and measures look at."""
        return max(
            (term.look_back for expression in self._expressions for term in expression.terms),
            default=0,
        )

    @property
    def counts_matches(self) -> bool:
        return any(
            term.kind == MATCH_NUMBER
            for _, expression in self.measures
            for term in expression.terms
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of rows that must be stored."""
        terms = [term for expression in self._expressions for term in expression.terms]
        return tuple(dict.fromkeys(column for term in terms for column in term.columns))

    @cached_property
    def row_expressions(self) -> tuple[RowExpression, ...]:
        """The expressions over single rows that conditions and measures look at."""
        found = (term.expression for each in self._expressions for term in each.terms)
        return tuple(dict.fromkeys(each for each in found if each is not None))


def compile_pattern(
    spec: PatternSpec, schema: pa.Schema, *, where: str, lenient: bool = False
) -> CompiledPattern:
    """Compile a pattern over rows of a schema.

    Args:
        spec: the pattern.
        schema: the columns of the rows.
        where: the name of the step, for errors.
        lenient: whether a measure may use symbols that the pattern does not have: they have no
            rows.

    Raises:
        BadPattern: the pattern, or how its parts fit together, is wrong.
        BadExpression: a condition or a measure is wrong.
    """
    pattern = parse_pattern(spec.pattern, where=where)
    automaton = build_automaton(pattern, where=where)
    if pattern.waits_for_deadline and spec.within_us is None:
        absent = " or ".join(pattern.absent_symbols) or "every row"
        raise BadPattern(
            f"The step {where} has a pattern that ends with the absence of {absent}, and no time"
            " until which it must be absent.",
            fix='say within="2 days".',
        )
    _check_names(spec, pattern.symbols, schema, where)
    names = PatternNames(schema, pattern.symbols, spec.subsets)
    definitions = tuple(
        parse_definition(
            symbol,
            text,
            names,
            automaton.symbols_before.get(symbol, pattern.symbols),
            where=where,
        )
        for symbol, text in spec.define
    )
    skip_strategy = parse_skip_strategy(
        spec.after_match, (*pattern.match_symbols, *(name for name, _ in spec.subsets)), where=where
    )
    _check_absent(automaton, definitions, where)
    _check_empty(automaton, skip_strategy, where)
    _check_skip_target(automaton, skip_strategy, spec, where)
    rules = MatchRules(
        automaton=automaton,
        match_dependent=frozenset(
            definition.symbol for definition in definitions if definition.by_match is not None
        ),
        within_us=spec.within_us,
        skip_strategy=skip_strategy,
        subsets=spec.subsets,
        max_rows=spec.max_rows,
        max_matches=spec.max_matches,
    )
    if lenient:
        subsets = (*spec.subsets, *_unknown_symbols(spec, names))
        names = PatternNames(schema, pattern.symbols, subsets)
    measures = tuple(
        (name, compile_measure(text, names, where=where)) for name, text in spec.measures
    )
    return CompiledPattern(spec, rules, definitions, measures)


def _unknown_symbols(spec: PatternSpec, names: PatternNames) -> list[tuple[str, tuple[str, ...]]]:
    """The symbols that measures use and the pattern does not have, as subsets without members."""
    from sqlglot import exp

    used = {
        node.table
        for _, text in spec.measures
        for node in parse_measure_sql(text, where="measures").find_all(exp.Column)
        if node.table
    }
    return [(name, ()) for name in sorted(used) if names.members(name) is None]


def _check_names(
    spec: PatternSpec, symbols: tuple[str, ...], schema: pa.Schema, where: str
) -> None:
    for name, _ in spec.define:
        if name not in symbols:
            raise BadPattern(
                f"The step {where} defines {name!r}, which is no symbol of the pattern"
                f" {spec.pattern!r}: {nearest(name, symbols)}"
            )
    for name, members in spec.subsets:
        if name in symbols or not members or any(member not in symbols for member in members):
            wrong = next((member for member in members if member not in symbols), name)
            raise BadPattern(
                f"The step {where} has a subset {name!r} of {', '.join(members) or 'nothing'}, and"
                f" {wrong!r} is not right there: {nearest(wrong, symbols)}"
            )
    measure_names = [name for name, _ in spec.measures]
    duplicates = [name for name in measure_names if measure_names.count(name) > 1]
    if duplicates:
        raise BadPattern(
            f"The step {where} has two measures named {duplicates[0]!r}.", fix="rename one."
        )
    if not schema.names:
        raise BadPattern(f"The step {where} has rows without columns.")


def _check_absent(automaton: Automaton, definitions: tuple[Definition, ...], where: str) -> None:
    """Whether a symbol is absent must be decided by a row alone."""
    absent = set(automaton.pattern.absent_symbols)
    for transitions in automaton.transitions:
        for transition in transitions:
            absent.update(transition.contiguity.absent_symbols)
    for definition in definitions:
        if definition.symbol in absent and definition.by_match is not None:
            raise BadPattern(
                f"The step {where} says that {definition.symbol!r} must be absent, and its"
                f" condition looks at the rows of a match: {definition.by_match.text!r}.",
                fix="let it look at its own row alone, or at the rows before it with prev().",
            )


def _check_empty(automaton: Automaton, strategy: SkipStrategy, where: str) -> None:
    """Where a pattern may match no row, each row from which nothing else matches is such a match:
    it must be known when that is so, and that there is no other.
    """
    if not automaton.may_be_empty:
        return
    if automaton.pattern.waits_for_deadline:
        raise BadPattern(
            f"The step {where} has a pattern of which every part may be left out, and that ends"
            " with an absence.",
            fix="let at least one row be needed: a+ instead of a*.",
        )
    if strategy.kind == NO_SKIP:
        raise BadPattern(
            f"The step {where} has a pattern of which every part may be left out, and {NO_SKIP!r}:"
            " every row would match it.",
            fix=f"let at least one row be needed: a+ instead of a*; or use {PAST_LAST!r}.",
        )


def _check_skip_target(
    automaton: Automaton, strategy: SkipStrategy, spec: PatternSpec, where: str
) -> None:
    """A search that goes on with the first row of a match would find the match again."""
    if strategy.kind == TO_FIRST:
        members = dict(spec.subsets).get(strategy.symbol or "", (strategy.symbol,))
        if all(automaton.symbols[state] in members for state in automaton.start_states):
            raise BadPattern(
                f"The step {where} skips to the first {strategy.symbol!r} of a match, with which it"
                " begins: it would be found for ever.",
                fix=f"use {NO_SKIP!r} or 'skip to next row'.",
            )
