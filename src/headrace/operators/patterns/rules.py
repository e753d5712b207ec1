"""Patterns as rows of a table, which analysts add, change and remove while a pipeline runs: which
are in force, how they are kept, and what the kernel makes of them.

A rule looks at rows from the closed clock on that it found when it came: those that were certain to
be in order by then are history. A rule that is changed is a new one.

| entry | name | bytes |
|---|---|---|
| rules | `R`, key group | version 1, then all rules in force as compressed JSON; the same under
each key group, since every shard needs them, however many there will be |
"""

from __future__ import annotations

import json
import pickle
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from headrace.columnar.columns import CHANGE_TYPE, TICK_FIELD
from headrace.columnar.keys import encode_keys, key_groups
from headrace.durations import to_us
from headrace.errors import BadPattern, InputError, NewerFormat
from headrace.operators.changelog import DELETE, UPDATE_PREIMAGE
from headrace.operators.joins.sides import ticks_of
from headrace.operators.kernel import Diverted, KeyedState, Watermarks
from headrace.operators.patterns.compiled_pattern import (
    CompiledPattern,
    PatternSpec,
    Texts,
    compiled,
)
from headrace.operators.patterns.condition_parser import Names, condition
from headrace.operators.patterns.kernel import PatternKernel
from headrace.operators.patterns.settings import InForce, MatchSettings, match_schema
from headrace.operators.windows.specs import positive_us
from headrace.operators.windows.state import WAITING

RULES = b"R"
VERSION = b"\x01"
PATTERN, DEFINE, WITHIN, AFTER_MATCH, SUBSETS = (
    "pattern",
    "define",
    "within",
    "after_match",
    "subsets",
)
COLUMNS = (PATTERN, DEFINE, WITHIN, AFTER_MATCH, SUBSETS)
MAX_KEPT = 8
"""Sets of rules that a process keeps compiled: those of its shards now, and of a tick or two
before.
"""


@dataclass(frozen=True)
class RuleSettings:
    """What the kernel of rules is told. `matching`: everything but the patterns, of which it has
    one that stands for any. `key`: the column that names a rule.
    """

    matching: MatchSettings
    schema: pa.Schema
    key: str
    measures: Texts
    within_us: int | None
    after_match: str
    max_rules: int
    max_rows: int
    max_matches: int

    def spec(self, row: dict[str, Any]) -> PatternSpec:
        """A row of the table as a pattern. InputError if it is none."""
        text = row[PATTERN]
        if text is None:
            raise BadPattern("it has no pattern.", fix="give it one.")
        within = row.get(WITHIN)
        within_us = self.within_us if within is None else positive_us(within, WITHIN)
        if within_us is None:
            raise BadPattern(
                "it does not say how long a match may take.",
                fix='say within, as in "10 minutes": rows are kept for so long.',
            )
        subsets = tuple(
            (name, tuple(members)) for name, members in _pairs(row.get(SUBSETS), SUBSETS, list)
        )
        after = self.after_match if row.get(AFTER_MATCH) is None else row[AFTER_MATCH]
        return PatternSpec(
            text,
            tuple(_pairs(row.get(DEFINE), DEFINE, str)),
            self.measures,
            within_us,
            after,
            subsets,
            self.max_rows,
            self.max_matches,
        )

    def compiled(self, spec: PatternSpec) -> CompiledPattern:
        found = compiled(spec, self.matching.schema, where=self.matching.name, lenient=True)
        if found.automaton.pattern.from_first:
            raise BadPattern(
                f"{spec.pattern!r} begins with the first row of a key, which a rule that comes"
                " later cannot know.",
                fix="leave out ^.",
            )
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


def with_rule(
    rules: InForceRules, name: str, spec: PatternSpec, since_us: int, most: int
) -> InForceRules:
    """One more, or one in another's place. The same one again stays as it is. InputError if there
    are too many.
    """
    known = {rule.name: rule for rule in rules}
    if name in known and known[name].spec == spec:
        return rules
    others = without_rule(rules, name)
    taken = {rule.place for rule in others}
    place = next((place for place in range(most) if place not in taken), None)
    if place is None:
        raise InputError(
            f"{most:,} rules are in force already.",
            fix="remove some, or allow more with max_rules=.",
        )
    return tuple(sorted([*others, Rule(name, place, since_us, spec)], key=lambda rule: rule.name))


def without_rule(rules: InForceRules, name: str) -> InForceRules:
    return tuple(rule for rule in rules if rule.name != name)


# How they are kept


def to_bytes(rules: InForceRules) -> bytes:
    plain = [
        [
            rule.name,
            rule.place,
            rule.since_us,
            rule.spec.pattern,
            rule.spec.define,
            rule.spec.within_us,
            rule.spec.after_match,
            rule.spec.subsets,
        ]
        for rule in rules
    ]
    return VERSION + zlib.compress(json.dumps(plain, separators=(",", ":")).encode())


def from_bytes(stored: bytes | None, settings: RuleSettings) -> InForceRules:
    if stored is None:
        return ()
    if stored[:1] != VERSION:
        raise NewerFormat(
            f"The rules of step {settings.matching.name!r} were written by a newer Headrace.",
            fix="upgrade Headrace.",
        )
    return tuple(_rule(settings, *each) for each in json.loads(zlib.decompress(stored[1:])))


def _rule(
    settings: RuleSettings,
    name: str,
    place: int,
    since_us: int,
    pattern: str,
    define: Any,
    within_us: int,
    after: str,
    subsets: Any,
) -> Rule:
    texts = tuple((symbol, text) for symbol, text in define)
    members = tuple((subset, tuple(each)) for subset, each in subsets)
    return Rule(
        name,
        place,
        since_us,
        PatternSpec(
            pattern,
            texts,
            settings.measures,
            within_us,
            after,
            members,
            settings.max_rows,
            settings.max_matches,
        ),
    )


# What the kernel makes of them

_kept: OrderedDict[tuple[bytes, bytes], MatchSettings] = OrderedDict()


def in_force(settings: RuleSettings, fingerprint: bytes, rules: InForceRules) -> MatchSettings:
    """The settings of a kernel for these rules; kept, since compiling a thousand takes a while.
    `fingerprint`: of the settings.
    """
    name = fingerprint, to_bytes(rules)
    if name not in _kept:
        _kept[name] = _compiled(settings, rules)
        while len(_kept) > MAX_KEPT:
            _kept.popitem(last=False)
    _kept.move_to_end(name)
    return _kept[name]


def _compiled(settings: RuleSettings, rules: InForceRules) -> MatchSettings:
    found = [settings.compiled(rule.spec) for rule in rules]
    of_each = [conditions(each, settings.matching) for each in found]
    every = {text: expression for each in of_each for _, text, expression in each}
    places = {text: at for at, text in enumerate(every)}
    fits = tuple(tuple((symbol, places[text]) for symbol, text, _ in each) for each in of_each)
    force = InForce(
        tuple(every.values()),
        tuple(rule.place for rule in rules),
        tuple(rule.since_us for rule in rules),
        settings.max_rules,
    )
    patterns = tuple((rule.name, each) for rule, each in zip(rules, found, strict=True))
    return replace(settings.matching, patterns=patterns, fits=fits, in_force=force)


def conditions(found: CompiledPattern, matching: MatchSettings) -> list[tuple[str, str, Any]]:
    """Of each symbol what a row alone decides: its name, the text, and how it is computed."""
    names = Names(matching.schema, found.automaton.pattern.symbols, found.spec.subsets)
    return [
        (
            each.symbol,
            each.condition,
            condition(each.symbol, each.condition, names, where=matching.name),
        )
        for each in found.definitions
        if each.alone
    ]


def prototype(settings: MatchSettings, measures: Texts) -> MatchSettings:
    """Settings with a pattern that stands for any: it has the measures, and so the columns of the
    result.
    """
    any_row = compiled(
        PatternSpec("any_row", (), measures, to_us("1 second")),
        settings.schema,
        where=settings.name,
        lenient=True,
    )
    return replace(settings, patterns=(("", any_row),), several=True)


# The kernel of patterns that come and go: rows meet the rules in force at their tick. A call is cut
# where rules change, and each piece is a call of the kernel of patterns.
#
# Every shard hears of every rule and keeps all of them; of one that cannot be read, the shard that
# has its key tells.


class RuledKernel:
    """Inputs: the rows, the changes of the rules. As `PatternKernel`, and `diverted` has rules that
    cannot be read.
    """

    gauges: ClassVar[Mapping[str, bytes]] = {"keys_waiting": WAITING}

    def __init__(self, settings: RuleSettings) -> None:
        self.settings = settings
        self.output = match_schema(settings.matching)
        self.diverted = Diverted(settings.schema)
        self.counts: dict[str, int] = {}
        self._fingerprint = pickle.dumps(settings)
        self._any = PatternKernel(settings.matching)
        self.late = self._any.late
        self._aside: list[pa.Table] = []

    def due(self, state: KeyedState) -> int | None:
        return self._any.due(state)

    def take_aside(self) -> pa.Table:
        """Partial matches whose time ran out since the last time."""
        tables, self._aside = self._aside, []
        return pa.concat_tables(tables) if tables else self.output.append(TICK_FIELD).empty_table()

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """Piece by piece: what of the rules changes, then the rows of the ticks until they change
        again.
        """
        rows, changes = inputs
        self.counts, told = {}, [self.output.append(TICK_FIELD).empty_table()]
        if not state.at_hand:
            return told[0]
        before = rules = from_bytes(self._stored(state), self.settings)
        for clock, some_rows, some_changes in _pieces(rows, changes, watermarks[0]):
            if some_changes.num_rows:
                rules = self._changed(
                    rules, some_changes, int(clock.horizon_at_start), state.at_hand
                )
            told.append(self._matched(state, rules, some_rows, clock))
        if rules != before:
            names = [RULES + bytes([group]) for group in state.at_hand]
            state.put(names, [to_bytes(rules)] * len(names), np.array(state.at_hand, np.uint8))
        return pa.concat_tables(told)

    @staticmethod
    def _stored(state: KeyedState) -> bytes | None:
        first = state.at_hand[0]
        return state.get([RULES + bytes([first])], np.array([first], np.uint8))[0]

    def _matched(
        self, state: KeyedState, rules: InForceRules, rows: pa.Table, clock: Watermarks
    ) -> pa.Table:
        kernel = PatternKernel(in_force(self.settings, self._fingerprint, rules), self.output)
        kernel.late = self.late
        told = kernel.step_timed(state, [rows], [clock])
        self._aside.append(kernel.take_aside())
        for name, count in kernel.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        return told

    def _changed(
        self, rules: InForceRules, changes: pa.Table, since_us: int, at_hand: Sequence[int]
    ) -> InForceRules:
        """What a tick makes of the rules. One that cannot be read is not in force, nor is what it
        was before.
        """
        mine = np.isin(
            key_groups(encode_keys(changes, [self.settings.key])), np.array(at_hand, np.uint8)
        )
        wanted = [name for name in (self.settings.key, *COLUMNS) if name in changes.column_names]
        for at, (kind, row) in enumerate(
            zip(changes[CHANGE_TYPE].to_pylist(), changes.select(wanted).to_pylist(), strict=True)
        ):
            name = row[self.settings.key]
            if kind == UPDATE_PREIMAGE:
                continue
            if kind == DELETE:
                rules = without_rule(rules, name)
                continue
            try:
                spec = self.settings.spec(row)
                self.settings.compiled(spec)
                rules = with_rule(rules, name, spec, since_us, self.settings.max_rules)
            except InputError as bad:
                rules = without_rule(rules, name)
                if mine[at]:
                    self.diverted.add(changes, np.array([at]), PATTERN, str(bad))
        return rules


def _pieces(
    rows: pa.Table, changes: pa.Table, clock: Watermarks
) -> Iterator[tuple[Watermarks, pa.Table, pa.Table]]:
    """Clocks, rows and changes of the ticks up to the next with changes, which come at the
    beginning of a piece.
    """
    of_rows, of_changes = ticks_of(rows), ticks_of(changes)
    cuts = np.unique(np.concatenate([[0], clock.at(np.unique(of_changes)), [len(clock)]]))
    horizon_before, watermark_before = clock.horizon_before, clock.watermark_before
    for first, stop in pairwise(cuts.tolist()):
        some = slice(first, stop)
        ticks = clock.ticks[some]
        piece = Watermarks(
            ticks,
            clock.times_us[some],
            clock.complete[some],
            clock.closed[some],
            int(watermark_before[first]),
            int(horizon_before[first]),
        )
        bounds = np.searchsorted(of_rows, [ticks[0], ticks[-1] + 1])
        change_bounds = np.searchsorted(of_changes, [ticks[0], ticks[-1] + 1])
        yield (
            piece,
            rows.slice(bounds[0], bounds[1] - bounds[0]),
            changes.slice(change_bounds[0], change_bounds[1] - change_bounds[0]),
        )
