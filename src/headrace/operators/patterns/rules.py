"""Patterns as rows of a table, which analysts add, change and remove while a pipeline runs: which are in force, how they are kept, and what the kernel makes of them.

A rule looks at rows from the closed clock on that it found when it came: those that were certain to be in order by then are history. A rule that is changed is a new one.

| entry | name | bytes |
|---|---|---|
| rules | `R`, key group | version 1, then all rules in force as compressed JSON; the same under each key group, since every shard needs them, however many there will be |
"""

from __future__ import annotations

import json
import zlib
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from headrace.durations import to_us
from headrace.errors import BadPattern, InputError, NewerFormat
from headrace.operators.patterns.compiled import CompiledPattern, PatternSpec, Texts, compiled
from headrace.operators.patterns.reading import Names, condition
from headrace.operators.patterns.settings import InForce, MatchSettings
from headrace.operators.windows.specs import positive_us

RULES = b"R"
VERSION = b"\x01"
PATTERN, DEFINE, WITHIN, AFTER_MATCH, SUBSETS = "pattern", "define", "within", "after_match", "subsets"
COLUMNS = (PATTERN, DEFINE, WITHIN, AFTER_MATCH, SUBSETS)
MOST_KEPT = 8
"""Sets of rules that a process keeps compiled: those of its shards now, and of a tick or two before."""


@dataclass(frozen=True)
class RuleSettings:
    """What the kernel of rules is told. `matching`: everything but the patterns, of which it has one that stands for any. `key`: the column that names a rule."""

    matching: MatchSettings
    schema: pa.Schema
    key: str
    measures: Texts
    within_us: int | None
    after_match: str
    most_rules: int
    most_rows: int
    most_matches: int

    def spec(self, row: dict[str, Any]) -> PatternSpec:
        """A row of the table as a pattern. InputError if it is none."""
        text = row[PATTERN]
        if text is None:
            raise BadPattern("it has no pattern.", fix="give it one.")
        within = row.get(WITHIN)
        within_us = self.within_us if within is None else positive_us(within, WITHIN)
        if within_us is None:
            raise BadPattern("it does not say how long a match may take.", fix='say within, as in "10 minutes": rows are kept for so long.')
        subsets = tuple((name, tuple(members)) for name, members in _pairs(row.get(SUBSETS), SUBSETS, list))
        after = self.after_match if row.get(AFTER_MATCH) is None else row[AFTER_MATCH]
        return PatternSpec(text, tuple(_pairs(row.get(DEFINE), DEFINE, str)), self.measures, within_us, after, subsets, self.most_rows, self.most_matches)

    def compiled(self, spec: PatternSpec) -> CompiledPattern:
        found = compiled(spec, self.matching.schema, where=self.matching.name, lenient=True)
        if found.automaton.pattern.from_first:
            raise BadPattern(f"{spec.pattern!r} begins with the first row of a key, which a rule that comes later cannot know.", fix="leave out ^.")
        conditions(found, self.matching)
        return found


@dataclass(frozen=True)
class Rule:
    """A rule in force: its place among those that there can be, and since when it looks at rows."""

    name: str
    place: int
    since_us: int
    spec: PatternSpec


InForceRules = tuple[Rule, ...]
"""By name, in order."""


def _pairs(value: Any, column: str, kind: type) -> list[tuple[str, Any]]:
    """What a column has by name: a MAP, or a JSON object."""
    if value is None:
        return []
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
        value = list(value.items()) if isinstance(value, dict) else None
    if value is None or not all(isinstance(each, kind) and _is_text(each) for _, each in value):
        example = '{"small": "amount < 10"}' if column == DEFINE else '{"both": ["a", "b"]}'
        raise InputError(f"its {column} is no JSON object as {example}.", fix="write it so.")
    return [(str(name), each) for name, each in value]


def _is_text(value: Any) -> bool:
    """A text, or a list of texts."""
    return all(isinstance(each, str) for each in value)


# What changes


def with_rule(rules: InForceRules, name: str, spec: PatternSpec, since_us: int, most: int) -> InForceRules:
    """One more, or one in another's place. The same one again stays as it is. InputError if there are too many."""
    known = {rule.name: rule for rule in rules}
    if name in known and known[name].spec == spec:
        return rules
    others = without_rule(rules, name)
    taken = {rule.place for rule in others}
    place = next((place for place in range(most) if place not in taken), None)
    if place is None:
        raise InputError(f"{most:,} rules are in force already.", fix="remove some, or allow more with most_rules=.")
    return tuple(sorted([*others, Rule(name, place, since_us, spec)], key=lambda rule: rule.name))


def without_rule(rules: InForceRules, name: str) -> InForceRules:
    return tuple(rule for rule in rules if rule.name != name)


# How they are kept


def to_bytes(rules: InForceRules) -> bytes:
    plain = [[rule.name, rule.place, rule.since_us, rule.spec.pattern, rule.spec.define, rule.spec.within_us, rule.spec.after_match, rule.spec.subsets] for rule in rules]
    return VERSION + zlib.compress(json.dumps(plain, separators=(",", ":")).encode())


def from_bytes(stored: bytes | None, settings: RuleSettings) -> InForceRules:
    if stored is None:
        return ()
    if stored[:1] != VERSION:
        raise NewerFormat(f"The rules of step {settings.matching.name!r} were written by a newer Headrace.", fix="upgrade Headrace.")
    return tuple(_rule(settings, *each) for each in json.loads(zlib.decompress(stored[1:])))


def _rule(settings: RuleSettings, name: str, place: int, since_us: int, pattern: str, define: Any, within_us: int, after: str, subsets: Any) -> Rule:
    texts = tuple((symbol, text) for symbol, text in define)
    members = tuple((subset, tuple(each)) for subset, each in subsets)
    return Rule(name, place, since_us, PatternSpec(pattern, texts, settings.measures, within_us, after, members, settings.most_rows, settings.most_matches))


# What the kernel makes of them

_kept: OrderedDict[tuple[bytes, bytes], MatchSettings] = OrderedDict()


def in_force(settings: RuleSettings, fingerprint: bytes, rules: InForceRules) -> MatchSettings:
    """The settings of a kernel for these rules; kept, since compiling a thousand takes a while. `fingerprint`: of the settings."""
    name = fingerprint, to_bytes(rules)
    if name not in _kept:
        _kept[name] = _compiled(settings, rules)
        while len(_kept) > MOST_KEPT:
            _kept.popitem(last=False)
    _kept.move_to_end(name)
    return _kept[name]


def _compiled(settings: RuleSettings, rules: InForceRules) -> MatchSettings:
    found = [settings.compiled(rule.spec) for rule in rules]
    of_each = [conditions(each, settings.matching) for each in found]
    every = {text: expression for each in of_each for _, text, expression in each}
    places = {text: at for at, text in enumerate(every)}
    fits = tuple(tuple((symbol, places[text]) for symbol, text, _ in each) for each in of_each)
    force = InForce(tuple(every.values()), tuple(rule.place for rule in rules), tuple(rule.since_us for rule in rules), settings.most_rules)
    patterns = tuple((rule.name, each) for rule, each in zip(rules, found, strict=True))
    return replace(settings.matching, patterns=patterns, fits=fits, in_force=force)


def conditions(found: CompiledPattern, matching: MatchSettings) -> list[tuple[str, str, Any]]:
    """Of each symbol what a row alone decides: its name, the text, and how it is computed."""
    names = Names(matching.schema, found.automaton.pattern.symbols, found.spec.subsets)
    return [(each.symbol, each.condition, condition(each.symbol, each.condition, names, where=matching.name)) for each in found.definitions if each.alone]


def prototype(settings: MatchSettings, measures: Texts) -> MatchSettings:
    """Settings with a pattern that stands for any: it has the measures, and so the columns of the result."""
    any_row = compiled(PatternSpec("any_row", (), measures, to_us("1 second")), settings.schema, where=settings.name, lenient=True)
    return replace(settings, patterns=(("", any_row),), several=True)
