"""Patterns as rows of a table (rules), which analysts add, change and remove while a pipeline runs:
the rules that are active, how they are stored, and the kernel that applies them.

Example: rules by `name`, rows by `user`; the horizon is 10:00 in tick 1 and 10:05 in tick 2.

    tick 1   rules: insert (burst, "failed{3,}", within "5 minutes")    state: rule burst, active
                                                                        for rows from 10:00 on
    tick 2   rows of ann: failed, failed, failed at 10:01 to 10:03      emits a match of burst
    tick 3   rules: delete (burst)                                      state: no rules; later rows
                                                                        match nothing

A rule looks at rows from the horizon on that it met when it was added: rows before that are
history. A rule that is changed is a new one. The entries in the state:

    rules   `R`, key group   version 1, then all active rules as compressed JSON; the same under
                             each key group, since every shard needs them, however many there are
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

from headrace.columnar.columns import CHANGE_TYPE, DELETE, TICK_FIELD, UPDATE_PREIMAGE
from headrace.columnar.keys import encode_keys, key_groups
from headrace.durations import to_us
from headrace.errors import BadPattern, InputError, NewerFormat
from headrace.operators.joins.sides import ticks_of
from headrace.operators.kernel import DeadLetterBuffer, KeyedState, Watermarks
from headrace.operators.patterns.compiled_pattern import (
    CompiledPattern,
    PatternSpec,
    Texts,
    compile_pattern,
)
from headrace.operators.patterns.condition_parser import PatternNames, compile_row_condition
from headrace.operators.patterns.conditions import ConditionExpression
from headrace.operators.patterns.kernel import PatternKernel
from headrace.operators.patterns.settings import ActiveRules, MatchSettings, match_schema
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
MAX_CACHED_RULE_SETS = 8
"""Sets of rules that a process caches compiled: those of its shards now, and of a tick or two
before.
"""


@dataclass(frozen=True)
class RuleSettings:
    """The settings of the kernel of rules. `matching` has everything but the patterns, with one
    pattern that stands for any; `key` is the column that names a rule.
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
        """The pattern of a row of the table.

        Raises:
            InputError: the row is no pattern.
        """
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
        after_match = row.get(AFTER_MATCH)
        return PatternSpec(
            pattern=text,
            define=tuple(_named_values(row.get(DEFINE), DEFINE, str)),
            measures=self.measures,
            within_us=within_us,
            after_match=self.after_match if after_match is None else after_match,
            subsets=tuple(
                (name, tuple(members))
                for name, members in _named_values(row.get(SUBSETS), SUBSETS, list)
            ),
            max_rows=self.max_rows,
            max_matches=self.max_matches,
        )

    def compile(self, spec: PatternSpec) -> CompiledPattern:
        """Compile the pattern of a rule.

        Raises:
            InputError: the pattern is wrong, or cannot be a rule.
        """
        schema, where = self.matching.schema, self.matching.name
        pattern = compile_pattern(spec, schema, where=where, lenient=True)
        if pattern.automaton.pattern.is_anchored:
            raise BadPattern(
                f"{spec.pattern!r} begins with the first row of a key, which a rule that comes"
                " later cannot know.",
                fix="leave out ^.",
            )
        if pattern.automaton.may_be_empty:
            raise BadPattern(
                f"Every part of {spec.pattern!r} may be left out, so every row would match it.",
                fix="let at least one row be needed: a+ instead of a*.",
            )
        row_conditions(pattern, self.matching)
        return pattern


@dataclass(frozen=True)
class PatternRule:
    """An active rule: its slot among the rules that there can be, and the time from which on it
    looks at rows.
    """

    name: str
    slot: int
    since_us: int
    spec: PatternSpec


RuleSet = tuple[PatternRule, ...]
"""The active rules, in order of name."""


def _named_values(value: Any, column: str, kind: type[str | list[str]]) -> list[tuple[str, Any]]:
    """What a column has by name: a MAP, or a JSON object."""
    if value is None:
        return []
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
        value = list(value.items()) if isinstance(value, dict) else None
    # A text, or a list of texts.
    if value is None or not all(
        isinstance(each, kind) and all(isinstance(part, str) for part in each) for _, each in value
    ):
        example = '{"small": "amount < 10"}' if column == DEFINE else '{"both": ["a", "b"]}'
        raise InputError(f"its {column} is no JSON object as {example}.", fix="write it so.")
    return [(str(name), each) for name, each in value]


def add_rule(
    rules: RuleSet, name: str, spec: PatternSpec, since_us: int, max_rules: int
) -> RuleSet:
    """Add a rule, or replace the one of that name. A rule that is added again stays as it is.

    Raises:
        InputError: there are too many rules.
    """
    if any(rule.name == name and rule.spec == spec for rule in rules):
        return rules
    others = remove_rule(rules, name)
    used = {rule.slot for rule in others}
    slot = next((slot for slot in range(max_rules) if slot not in used), None)
    if slot is None:
        raise InputError(
            f"{max_rules:,} rules are in force already.",
            fix="remove some, or allow more with max_rules=.",
        )
    rule = PatternRule(name, slot, since_us, spec)
    return tuple(sorted([*others, rule], key=lambda rule: rule.name))


def remove_rule(rules: RuleSet, name: str) -> RuleSet:
    """Remove the rule of a name, if there is one."""
    return tuple(rule for rule in rules if rule.name != name)


# How rules are stored


def encode_rules(rules: RuleSet) -> bytes:
    """The stored form of rules."""
    plain = [
        [
            rule.name,
            rule.slot,
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


def decode_rules(stored: bytes | None, settings: RuleSettings) -> RuleSet:
    """Rules from their stored form; none if nothing is stored."""
    if stored is None:
        return ()
    if stored[:1] != VERSION:
        raise NewerFormat(
            f"The rules of step {settings.matching.name!r} were written by a newer Headrace.",
            fix="upgrade Headrace.",
        )
    rules = []
    for name, slot, since_us, pattern, define, within_us, after_match, subsets in json.loads(
        zlib.decompress(stored[1:])
    ):
        spec = PatternSpec(
            pattern=pattern,
            define=tuple((symbol, text) for symbol, text in define),
            measures=settings.measures,
            within_us=within_us,
            after_match=after_match,
            subsets=tuple((subset, tuple(members)) for subset, members in subsets),
            max_rows=settings.max_rows,
            max_matches=settings.max_matches,
        )
        rules.append(PatternRule(name, slot, since_us, spec))
    return tuple(rules)


# Compiled rules

_cache: OrderedDict[tuple[bytes, bytes], MatchSettings] = OrderedDict()


def rule_match_settings(
    settings: RuleSettings, fingerprint: bytes, rules: RuleSet
) -> MatchSettings:
    """The settings of a pattern kernel for some rules; cached, since compiling a thousand takes a
    while. `fingerprint` is that of the settings.
    """
    cache_key = fingerprint, encode_rules(rules)
    if cache_key not in _cache:
        _cache[cache_key] = _compile_rules(settings, rules)
        while len(_cache) > MAX_CACHED_RULE_SETS:
            _cache.popitem(last=False)
    _cache.move_to_end(cache_key)
    return _cache[cache_key]


def _compile_rules(settings: RuleSettings, rules: RuleSet) -> MatchSettings:
    patterns = [settings.compile(rule.spec) for rule in rules]
    conditions = [row_conditions(pattern, settings.matching) for pattern in patterns]
    by_text = {text: expression for parts in conditions for _, text, expression in parts}
    bits = {text: bit for bit, text in enumerate(by_text)}
    return replace(
        settings.matching,
        patterns=tuple((rule.name, pattern) for rule, pattern in zip(rules, patterns, strict=True)),
        fits=tuple(
            tuple((symbol, bits[text]) for symbol, text, _ in parts) for parts in conditions
        ),
        active_rules=ActiveRules(
            conditions=tuple(by_text.values()),
            slots=tuple(rule.slot for rule in rules),
            since_us=tuple(rule.since_us for rule in rules),
            max_rules=settings.max_rules,
        ),
    )


def row_conditions(
    pattern: CompiledPattern, matching: MatchSettings
) -> list[tuple[str, str, ConditionExpression]]:
    """What rows alone decide: of each symbol its name, the text of the condition, and the condition
    compiled.
    """
    symbols, subsets = pattern.automaton.pattern.symbols, pattern.spec.subsets
    names = PatternNames(matching.schema, symbols, subsets)
    return [
        (
            definition.symbol,
            definition.condition,
            compile_row_condition(
                definition.symbol, definition.condition, names, where=matching.name
            ),
        )
        for definition in pattern.definitions
        if definition.by_row
    ]


def prototype_settings(settings: MatchSettings, measures: Texts) -> MatchSettings:
    """Settings with a pattern that stands for any: it has the measures, and so the columns of the
    result.
    """
    any_row = compile_pattern(
        PatternSpec("any_row", (), measures, to_us("1 second")),
        settings.schema,
        where=settings.name,
        lenient=True,
    )
    return replace(settings, patterns=(("", any_row),), several=True)


# The kernel


class RuledKernel:
    """The kernel of rules: rows are matched by the rules that are active in their tick. A batch is
    cut where rules change, and each part is a batch of a `PatternKernel`.

    Its inputs are the rows and the changes of the rules. Every shard receives every rule and stores
    all of them; a rule that cannot be read goes to the dead letters of the shard that owns its key.
    """

    gauges: ClassVar[Mapping[str, bytes]] = {"keys_waiting": WAITING}

    def __init__(self, settings: RuleSettings) -> None:
        self.settings = settings
        self.output = match_schema(settings.matching)
        self.dead_letters = DeadLetterBuffer(settings.schema)
        self.counts: dict[str, int] = {}
        self._fingerprint = pickle.dumps(settings)
        self._prototype = PatternKernel(settings.matching)
        self.late_rows = self._prototype.late_rows
        self._timed_out: list[pa.Table] = []

    def due(self, state: KeyedState) -> int | None:
        """The earliest watermark at which something becomes certain."""
        return self._prototype.due(state)

    def take_side_output(self) -> pa.Table:
        """The partial matches whose time ran out since the last call."""
        tables, self._timed_out = self._timed_out, []
        return pa.concat_tables(tables) if tables else self.output.append(TICK_FIELD).empty_table()

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """Part by part: apply the changes of the rules, then match the rows of the ticks until they
        change again.
        """
        rows, changes = inputs
        self.counts, emitted = {}, [self.output.append(TICK_FIELD).empty_table()]
        if not state.owned_groups:
            return emitted[0]
        first_group = state.owned_groups[0]
        (stored,) = state.get([RULES + bytes([first_group])], np.array([first_group], np.uint8))
        before = rules = decode_rules(stored, self.settings)
        for clock, part_rows, part_changes in _split_at_changes(rows, changes, watermarks[0]):
            if part_changes.num_rows:
                rules = self._apply_changes(
                    rules, part_changes, int(clock.horizon_at_start), state.owned_groups
                )
            emitted.append(self._match(state, rules, part_rows, clock))
        if rules != before:
            names = [RULES + bytes([group]) for group in state.owned_groups]
            values = [encode_rules(rules)] * len(names)
            state.put(names, values, np.array(state.owned_groups, np.uint8))
        return pa.concat_tables(emitted)

    def _match(
        self, state: KeyedState, rules: RuleSet, rows: pa.Table, clock: Watermarks
    ) -> pa.Table:
        settings = rule_match_settings(self.settings, self._fingerprint, rules)
        kernel = PatternKernel(settings, self.output)
        kernel.late_rows = self.late_rows
        emitted = kernel.step_timed(state, [rows], [clock])
        self._timed_out.append(kernel.take_side_output())
        for name, count in kernel.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        return emitted

    def _apply_changes(
        self, rules: RuleSet, changes: pa.Table, since_us: int, owned_groups: Sequence[int]
    ) -> RuleSet:
        """The rules after the changes of a tick. A rule that cannot be read is not active, nor is
        what it was before.
        """
        groups = key_groups(encode_keys(changes, [self.settings.key]))
        is_owned = np.isin(groups, np.array(owned_groups, np.uint8))
        columns = [name for name in (self.settings.key, *COLUMNS) if name in changes.column_names]
        kinds, rows = changes[CHANGE_TYPE].to_pylist(), changes.select(columns).to_pylist()
        for index, (kind, row) in enumerate(zip(kinds, rows, strict=True)):
            name = row[self.settings.key]
            if kind == UPDATE_PREIMAGE:
                continue
            if kind == DELETE:
                rules = remove_rule(rules, name)
                continue
            try:
                spec = self.settings.spec(row)
                self.settings.compile(spec)
                rules = add_rule(rules, name, spec, since_us, self.settings.max_rules)
            except InputError as error:
                rules = remove_rule(rules, name)
                if is_owned[index]:
                    self.dead_letters.add(changes, np.array([index]), PATTERN, str(error))
        return rules


def _split_at_changes(
    rows: pa.Table, changes: pa.Table, clock: Watermarks
) -> Iterator[tuple[Watermarks, pa.Table, pa.Table]]:
    """The watermarks, rows and changes of each part of a batch: changes come in the first tick of a
    part.
    """
    row_ticks, change_ticks = ticks_of(rows), ticks_of(changes)
    changed = clock.tick_indices(np.unique(change_ticks))
    cuts = np.unique(np.concatenate([[0], changed, [len(clock)]]))
    horizon_before, watermark_before = clock.horizon_before, clock.watermark_before
    for first, stop in pairwise(cuts.tolist()):
        part = slice(first, stop)
        ticks = clock.ticks[part]
        part_clock = Watermarks(
            ticks,
            clock.times_us[part],
            clock.watermark[part],
            clock.horizon[part],
            int(watermark_before[first]),
            int(horizon_before[first]),
        )
        bounds = [ticks[0], ticks[-1] + 1]
        first_row, end_row = np.searchsorted(row_ticks, bounds)
        first_change, end_change = np.searchsorted(change_ticks, bounds)
        yield (
            part_clock,
            rows.slice(first_row, end_row - first_row),
            changes.slice(first_change, end_change - first_change),
        )
