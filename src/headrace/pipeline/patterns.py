"""Patterns in a plan: `stream.match(…)`, the steps it makes, and what is checked when it is
declared.

Conditions that a row alone decides become columns, `_fits0`, `_fits1`, …, which are computed before
rows are sent to shards; what no symbol can use is left out there, if no row must directly follow
another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import pyarrow as pa

from headrace.errors import PlanError, UnknownColumn, nearest
from headrace.log.topic_config import check_name
from headrace.operators.patterns.compiled_pattern import CompiledPattern, PatternSpec, compiled
from headrace.operators.patterns.parser import (
    ALL_ROWS,
    DROP,
    MAX_MATCHES,
    MAX_ROWS,
    ONE_ROW,
    PAST_LAST,
    STOP,
)
from headrace.operators.windows.late import Divert, Drop, LatePolicy, drop
from headrace.operators.windows.specs import positive_us
from headrace.pipeline.relation import Relation
from headrace.pipeline.windows import RESERVED, checked_time
from headrace.plan import columns as cols
from headrace.plan.expressions.literals import quoted_name
from headrace.plan.match_steps import MatchStep, RuledMatchStep
from headrace.plan.plan import SelectStep, Step, TimeColumn, WhereStep
from headrace.types.schema import type_name

Duration = str | timedelta
FITS = "_fits"


@dataclass(frozen=True)
class PatternText:
    """One of several patterns, as `hr.pattern` makes it."""

    pattern: str
    define: tuple[tuple[str, str], ...]
    measures: tuple[tuple[str, str], ...]
    within: Duration | None
    after_match: str
    subsets: tuple[tuple[str, tuple[str, ...]], ...]


def pattern(
    pattern: str,
    *,
    define: Mapping[str, str] | None = None,
    measures: Mapping[str, str] | None = None,
    within: Duration | None = None,
    after_match: str = PAST_LAST,
    subsets: Mapping[str, Sequence[str]] | None = None,
) -> PatternText:
    """A pattern for `stream.match({"name": hr.pattern(…), …})`, which looks for several at once."""
    members = tuple(
        (name, (each,) if isinstance(each, str) else tuple(each))
        for name, each in (subsets or {}).items()
    )
    return PatternText(
        pattern,
        tuple((define or {}).items()),
        tuple((measures or {}).items()),
        within,
        after_match,
        members,
    )


@dataclass(frozen=True)
class Asked:
    """What `match` was asked for, beside the patterns."""

    rows: str = ONE_ROW
    late: LatePolicy | None = None
    timed_out: str | None = None
    max_rows: int = MAX_ROWS
    max_matches: int = MAX_MATCHES
    when_full: str = DROP


def matched(
    stream: Relation,
    patterns: Mapping[str, PatternText],
    asked: Asked,
    name: str | None,
    *,
    several: bool,
) -> MatchStep:
    """`stream.match(…)`, checked."""
    where = stream.step_label("match", name)
    over = checked_time(stream.step, where=where)
    late = checked_late(asked, where)
    if not patterns:
        raise PlanError(f"The step {where} has no patterns.", fix="give at least one.")
    specs = tuple((each, _spec(each, text, asked, where)) for each, text in patterns.items())
    specs = _with_all_measures(specs) if several else specs
    found = [compiled(spec, stream.schema, where=where, lenient=several) for _, spec in specs]
    for each in found:
        for definition in each.definitions:
            if definition.alone:
                cols.condition(definition.condition, stream.schema, where=where)
    bits = _bits(stream.schema, found)
    before = _before(
        stream.step, found, bits, over, keeps_all=asked.rows == ALL_ROWS or isinstance(late, Divert)
    )
    step = MatchStep(
        name=where,
        inputs=(before,),
        schema=stream.schema,
        key=stream.key,
        by=stream.key,
        over=over,
        patterns=specs,
        bits=bits,
        rows=asked.rows,
        several=several,
        late=late,
        timed_out=asked.timed_out,
        when_full=asked.when_full,
    )
    return replace(step, name=name or "", schema=checked_result(step, where))


def checked_result(step: MatchStep, where: str) -> pa.Schema:
    """The columns of matches."""
    from headrace.operators.patterns.settings import match_schema

    schema = match_schema(step.settings)
    twice = sorted({each for each in schema.names if schema.names.count(each) > 1})
    if twice:
        raise PlanError(
            f"The result of the step {where} would have two columns named {twice[0]!r}.",
            fix="rename the measure, or the column, first.",
        )
    return cols.check_columns(schema, where=f"The step {where}")


def checked_late(asked: Asked, where: str) -> LatePolicy:
    """What becomes of late rows; and that the rest of what was asked for makes sense."""
    late = asked.late or drop()
    if not isinstance(late, Drop | Divert):
        raise PlanError(
            f"The step {where} has late={late!r}: what was told of a match cannot be corrected.",
            fix='use hr.late.drop() or hr.late.divert("late_rows"), and a longer delay= of the event time.',
        )
    for topic in [
        *([late.topic] if isinstance(late, Divert) else []),
        *([asked.timed_out] if asked.timed_out else []),
    ]:
        check_name(topic, what="topic", error=PlanError)
        if topic.startswith(RESERVED):
            raise PlanError(
                f"The step {where} sends rows to {topic!r}, a name that is Headrace's own.",
                fix="choose another name.",
            )
    for value, known, what in (
        (asked.rows, (ONE_ROW, ALL_ROWS), "rows"),
        (asked.when_full, (DROP, STOP), "when_full"),
    ):
        if value not in known:
            raise PlanError(
                f"The step {where} has {what}={value!r}: {nearest(str(value), known)}",
                fix=f"use {known[0]!r} or {known[1]!r}.",
            )
    for number, what in ((asked.max_rows, "max_rows"), (asked.max_matches, "max_matches")):
        if not 1 <= number <= 1_000_000:
            raise PlanError(
                f"The step {where} has {what}={number!r}.", fix="give from 1 to 1,000,000."
            )
    return late


def _spec(name: str, text: PatternText, asked: Asked, where: str) -> PatternSpec:
    if not isinstance(text, PatternText):
        raise PlanError(
            f"The step {where} has {text!r} as the pattern {name!r}.",
            fix='write {"name": hr.pattern("a b", define={…})}.',
        )
    within_us = (
        None if text.within is None else positive_us(text.within, f"within of the step {where}")
    )
    return PatternSpec(
        text.pattern,
        text.define,
        text.measures,
        within_us,
        text.after_match,
        text.subsets,
        asked.max_rows,
        asked.max_matches,
    )


def _with_all_measures(
    specs: tuple[tuple[str, PatternSpec], ...],
) -> tuple[tuple[str, PatternSpec], ...]:
    """All patterns give the same columns: what one does not measure is null."""
    names = dict.fromkeys(name for _, spec in specs for name, _ in spec.measures)
    return tuple(
        (
            name,
            replace(
                spec,
                measures=tuple((each, dict(spec.measures).get(each, "NULL")) for each in names),
            ),
        )
        for name, spec in specs
    )


def _bits(schema: pa.Schema, found: Sequence[CompiledPattern]) -> tuple[tuple[str, str], ...]:
    """Each different condition once."""
    texts = dict.fromkeys(
        each.condition for pattern in found for each in pattern.definitions if each.alone
    )
    prefix = FITS
    while any(name.startswith(prefix) for name in schema.names):
        prefix = f"_{prefix}"
    return tuple((f"{prefix}{at}", text) for at, text in enumerate(texts))


def _before(
    step: Step,
    found: Sequence[CompiledPattern],
    bits: tuple[tuple[str, str], ...],
    over: TimeColumn,
    *,
    keeps_all: bool,
) -> Step:
    """The input with the columns that are needed and the conditions, without the rows that nobody
    can use.
    """
    if not bits:
        return step
    needed = {
        *step.key,
        over.name,
        over.producer,
        *(name for each in found for name in each.columns),
    }
    kept = [field for field in step.schema if keeps_all or field.name in needed]
    schema = pa.schema([*kept, *(pa.field(name, pa.bool_()) for name, _ in bits)])
    columns = (*((field.name, field.name) for field in kept), *bits)
    before: Step = SelectStep(inputs=(step,), schema=schema, key=step.key, columns=columns)
    if not any(_sees_every_row(each) for each in found):
        condition = " OR ".join(quoted_name(name) for name, _ in bits)
        before = WhereStep(inputs=(before,), schema=schema, key=step.key, condition=condition)
    return before


def _sees_every_row(pattern: CompiledPattern) -> bool:
    defined = {each.symbol for each in pattern.definitions if each.alone}
    plain = pattern.automaton.pattern
    return (
        pattern.automaton.is_strict
        or bool(pattern.back)
        or plain.from_first
        or not set(plain.symbols) <= defined
    )


# Patterns that live in a table: `stream.match(rules, measures=…)`, whose rules come, change and go
# as rows of a topic, and what is checked when it is declared.


def ruled(
    stream: Relation,
    rules: Relation,
    asked: Asked,
    name: str | None,
    *,
    measures: Mapping[str, str] | None,
    within: Duration | None,
    after_match: str,
    max_rules: int,
) -> MatchStep:
    """`stream.match(rules, …)`, checked."""
    where = stream.step_label("match", name)
    over = checked_time(stream.step, where=where)
    late = checked_late(asked, where)
    _check_rules(stream, rules, where)
    if asked.rows == ALL_ROWS:
        raise PlanError(
            f"The step {where} has rules in a table and rows={ALL_ROWS!r}: how many matches each"
            " key had of rules that went would have to be kept for ever.",
            fix="take one row for each match, with measures.",
        )
    if not 1 <= max_rules <= 10_000:
        raise PlanError(
            f"The step {where} has max_rules={max_rules!r}.", fix="give from 1 to 10,000."
        )
    step = RuledMatchStep(
        name=where,
        inputs=(stream.step, rules.step),
        schema=stream.schema,
        key=stream.key,
        by=stream.key,
        over=over,
        patterns=(),
        bits=(),
        several=True,
        late=late,
        timed_out=asked.timed_out,
        when_full=asked.when_full,
        measures=tuple((measures or {}).items()),
        after_match=after_match,
        max_rules=max_rules,
        within_us=None if within is None else positive_us(within, f"within of the step {where}"),
        max_rows=asked.max_rows,
        max_matches=asked.max_matches,
    )
    if step.settings.counts_matches:
        raise PlanError(
            f"The step {where} has rules in a table, whose matches are not numbered.",
            fix="leave out match_number().",
        )
    return replace(step, name=name or "", schema=checked_result(step, where))


def _check_rules(stream: Relation, rules: Relation, where: str) -> None:
    from headrace.operators.patterns.rules import COLUMNS, DEFINE, PATTERN, SUBSETS

    if rules.pipeline is not stream.pipeline:
        raise PlanError(
            f"The step {where} has rules of another pipeline.",
            fix="write them to a topic, and read that topic here.",
        )
    kinds = {name: rules.schema.field(name).type for name in rules.schema.names}
    if len(rules.key) != 1 or not pa.types.is_string(kinds[rules.key[0]]):
        raise PlanError(
            f"The step {where} has rules with the key {', '.join(rules.key)}.",
            fix="let one STRING column name each rule, and be the table's key.",
        )
    if PATTERN not in kinds:
        raise UnknownColumn(PATTERN, rules.schema.names, where=f"The rules of the step {where}")
    maps = {
        DEFINE: pa.map_(pa.string(), pa.string()),
        SUBSETS: pa.map_(pa.string(), pa.list_(pa.string())),
    }
    for name in COLUMNS:
        kind = kinds.get(name, pa.string())
        if not (
            pa.types.is_string(kind) or (name in maps and type_name(kind) == type_name(maps[name]))
        ):
            choice = f"STRING with JSON, or {type_name(maps[name])}" if name in maps else "STRING"
            raise PlanError(
                f"The step {where} has rules whose {name!r} is {type_name(kind)}.",
                fix=f"let it be {choice}.",
            )
