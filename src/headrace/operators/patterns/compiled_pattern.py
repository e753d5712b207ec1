"""A pattern as a user gave it, and as the kernel works with it: automaton, conditions taken apart,
measures. Everything that can be wrong with it is found here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from headrace.durations import format_us
from headrace.errors import BadPattern, nearest
from headrace.operators.patterns.automaton import Automaton, build
from headrace.operators.patterns.condition_parser import Definition, Names, definition, read
from headrace.operators.patterns.conditions import MATCH_NUMBER, Expression
from headrace.operators.patterns.matcher import Rules
from headrace.operators.patterns.parser import (
    MAX_MATCHES,
    MAX_ROWS,
    NO_SKIP,
    PAST_LAST,
    TO_FIRST,
    AfterMatch,
    after_match,
    parse_pattern,
)

Texts = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class PatternSpec:
    """A pattern, in plain values: its text, its symbols' conditions, its measures, how long it may
    take, where the next match may begin.
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
    """Ready to run over rows of a schema."""

    spec: PatternSpec
    rules: Rules
    definitions: tuple[Definition, ...]
    measures: tuple[tuple[str, Expression], ...]

    @property
    def automaton(self) -> Automaton:
        return self.rules.automaton

    @cached_property
    def by_symbol(self) -> dict[str, Definition]:
        return {each.symbol: each for each in self.definitions}

    @property
    def back(self) -> int:
        """How many rows before a match conditions and measures look at."""
        expressions = [
            each
            for found in self.definitions
            for each in (found.background, found.so_far)
            if each is not None
        ]
        expressions += [expression for _, expression in self.measures]
        return max(
            (term.back for expression in expressions for term in expression.terms), default=0
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
        """The columns that must be kept of rows."""
        expressions = [
            each
            for found in self.definitions
            for each in (found.background, found.so_far)
            if each is not None
        ]
        expressions += [expression for _, expression in self.measures]
        return tuple(
            dict.fromkeys(
                term.column
                for expression in expressions
                for term in expression.terms
                if term.column is not None
            )
        )


def compiled(
    spec: PatternSpec, schema: pa.Schema, *, where: str, lenient: bool = False
) -> CompiledPattern:
    """A pattern over rows of a schema. With `lenient`, a measure may look at symbols that this
    pattern does not have: they have no rows.
    """
    pattern = parse_pattern(spec.pattern, where=where)
    automaton = build(pattern, where=where)
    if pattern.waits and spec.within_us is None:
        absent = " or ".join(pattern.absent) or "every row"
        raise BadPattern(
            f"The step {where} has a pattern that ends with the absence of {absent}, and no time"
            " until which it must be absent.",
            fix='say within="2 days".',
        )
    _check_names(spec, pattern.symbols, schema, where)
    names = Names(schema, pattern.symbols, spec.subsets)
    definitions = tuple(
        definition(symbol, text, names, automaton.before.get(symbol, pattern.symbols), where=where)
        for symbol, text in spec.define
    )
    after = after_match(
        spec.after_match, (*pattern.taken, *(name for name, _ in spec.subsets)), where=where
    )
    _check_absent(automaton, definitions, where)
    _check_target(automaton, after, spec, where)
    doubtful = frozenset(each.symbol for each in definitions if each.so_far is not None)
    rules = Rules(
        automaton, doubtful, spec.within_us, after, spec.subsets, spec.max_rows, spec.max_matches
    )
    symbols = (
        names
        if not lenient
        else Names(schema, pattern.symbols, (*spec.subsets, *_unknown(spec, names)))
    )
    measures = tuple((name, _measure(text, symbols, where)) for name, text in spec.measures)
    return CompiledPattern(spec, rules, definitions, measures)


def _measure(text: str, names: Names, where: str) -> Expression:
    """`final sum(amount)` is of the whole match, also where its rows are told one by one; `running`
    is how it is anyway.
    """
    return read(text, names, where=where)


def _unknown(spec: PatternSpec, names: Names) -> list[tuple[str, tuple[str, ...]]]:
    """Names that measures use and the pattern does not have."""
    from sqlglot import exp

    from headrace.operators.patterns.condition_parser import parse_measure

    found = {
        node.table
        for _, text in spec.measures
        for node in parse_measure(text, where="measures").find_all(exp.Column)
        if node.table
    }
    return [(name, ()) for name in sorted(found) if names.members(name) is None]


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
        if name in symbols or not members or any(each not in symbols for each in members):
            wrong = next((each for each in members if each not in symbols), name)
            raise BadPattern(
                f"The step {where} has a subset {name!r} of {', '.join(members) or 'nothing'}, and"
                f" {wrong!r} is not right there: {nearest(wrong, symbols)}"
            )
    twice = [
        name for name, _ in spec.measures if [each for each, _ in spec.measures].count(name) > 1
    ]
    if twice:
        raise BadPattern(
            f"The step {where} has two measures named {twice[0]!r}.", fix="rename one."
        )
    if not schema.names:
        raise BadPattern(f"The step {where} has rows without columns.")


def _check_absent(automaton: Automaton, definitions: tuple[Definition, ...], where: str) -> None:
    """What must be absent is known of a row alone."""
    absent = {
        name for edges in automaton.edges for edge in edges for name in edge.link.absent
    } | set(automaton.pattern.absent)
    for each in definitions:
        if each.symbol in absent and each.so_far is not None:
            raise BadPattern(
                f"The step {where} says that {each.symbol!r} must be absent, and its condition"
                f" looks at the rows of a match: {each.so_far.text!r}.",
                fix="let it look at its own row alone, or at the rows before it with prev().",
            )


def _check_target(automaton: Automaton, after: AfterMatch, spec: PatternSpec, where: str) -> None:
    """Going on with the row with which the match began would find it again."""
    if after.kind == TO_FIRST:
        members = dict(spec.subsets).get(after.symbol or "", (after.symbol,))
        if all(automaton.symbols[place] in members for place in automaton.first):
            raise BadPattern(
                f"The step {where} skips to the first {after.symbol!r} of a match, with which it"
                " begins: it would be found for ever.",
                fix=f"use {NO_SKIP!r} or 'skip to next row'.",
            )
