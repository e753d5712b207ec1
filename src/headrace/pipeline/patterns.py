"""Patterns when they are declared: what `hr.pattern(…)` and `stream.match(…)` check, and the steps
they add to the plan.

A condition that reads only its own row is computed before rows are shuffled to shards, as a BOOLEAN
column (`_fits0`, `_fits1`, …). Rows that no symbol can match are dropped there, unless the pattern
needs to see every row.

The steps are in `headrace.plan.match_steps`, the kernels in `headrace.operators.patterns`. The same
patterns in SQL are in `sql`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pyarrow as pa

from headrace.error_policy import NULL
from headrace.errors import PlanError, UnknownColumn, nearest
from headrace.expressions.function_calls import CallExtractor, may_have_calls
from headrace.expressions.literals import quoted_name
from headrace.names import check_name
from headrace.operators.patterns.compiled_pattern import (
    CompiledPattern,
    PatternSpec,
    compile_pattern,
)
from headrace.operators.patterns.condition_parser import PatternNames, rewrite_calls
from headrace.operators.patterns.parser import (
    ALL_ROWS,
    DROP,
    MAX_MATCHES,
    MAX_ROWS,
    ONE_ROW,
    PAST_LAST,
    STOP,
    parse_pattern,
)
from headrace.operators.windows.late_policy import Divert, Drop, LatePolicy, drop
from headrace.operators.windows.specs import positive_us
from headrace.pipeline.functions import call_steps
from headrace.pipeline.relation import Relation
from headrace.pipeline.windows import RESERVED, require_event_time
from headrace.plan import columns as cols
from headrace.plan.match_steps import MatchStep, RuleMatchStep
from headrace.plan.plan import SelectStep, Step, TimeColumn, WhereStep
from headrace.types.schema import type_name

Duration = str | timedelta
FITS = "_fits"


@dataclass(frozen=True)
class PatternText:
    """One of several patterns, as `hr.pattern` returns it."""

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
    """Declare one of several patterns, for `stream.match({"name": hr.pattern(…), …})`.

    Args:
        pattern: The pattern, such as `"small{3,} big"`.
        define: A condition per symbol. A symbol without one matches any row.
        measures: The result's columns, by name. A column that another pattern measures and this
            one does not is null.
        within: The longest time from a match's first row to its last.
        after_match: Where to look next, as in `Stream.match`.
        subsets: Names for several symbols together, for measures.

    Returns:
        The pattern. It is checked when it is given to `match`, which raises PlanError if it cannot
        be used.

    Example:
        ```python
        found = orders.key_by("customer_id").match(
            {
                "burst": hr.pattern("small{3,}", define={"small": "amount < 10"}),
                "jump": hr.pattern("any large", define={"large": "amount > 1000"}),
            }
        )
        ```
    """
    members = tuple(
        (name, (symbols,) if isinstance(symbols, str) else tuple(symbols))
        for name, symbols in (subsets or {}).items()
    )
    return PatternText(
        pattern=pattern,
        define=tuple((define or {}).items()),
        measures=tuple((measures or {}).items()),
        within=within,
        after_match=after_match,
        subsets=members,
    )


@dataclass(frozen=True)
class MatchOptions:
    """The arguments of `match` other than the patterns."""

    rows: str = ONE_ROW
    late: LatePolicy | None = None
    timed_out: str | None = None
    max_rows: int = MAX_ROWS
    max_matches: int = MAX_MATCHES
    when_full: str = DROP
    order_by: str | Sequence[str] = ()


def match_step(
    stream: Relation,
    patterns: Mapping[str, PatternText],
    options: MatchOptions,
    name: str | None,
    *,
    several: bool,
) -> MatchStep:
    """Check `stream.match(…)` with patterns that are written out, and make its steps."""
    where = stream.step_label("match", name)
    over = require_event_time(stream.step, where=where)
    late = check_match_options(options, where)
    ties = tie_order(stream.schema, options.order_by, where)
    source, patterns = _with_calls(stream.step, patterns, where)
    stream = replace(stream, step=source)
    if not patterns:
        raise PlanError(f"The step {where} has no patterns.", fix="give at least one.")
    specs = tuple((key, _pattern_spec(key, text, options, where)) for key, text in patterns.items())
    if several:
        specs = _with_all_measures(specs)
    compiled_patterns = [
        compile_pattern(spec, stream.schema, where=where, lenient=several) for _, spec in specs
    ]
    for compiled_pattern in compiled_patterns:
        for definition in compiled_pattern.definitions:
            if definition.by_row:
                cols.parse_condition(definition.condition, stream.schema, where=where)
    bits = _condition_columns(stream.schema, compiled_patterns)
    before = _conditions_step(
        stream.step,
        compiled_patterns,
        bits,
        over,
        {name for name, _ in ties},
        keeps_all=options.rows == ALL_ROWS or isinstance(late, Divert),
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
        rows=options.rows,
        several=several,
        late=late,
        timed_out=options.timed_out,
        when_full=options.when_full,
        tie_order=ties,
    )
    return replace(step, name=name or "", schema=match_result_schema(step, where))


def _with_calls(
    step: Step, patterns: Mapping[str, Any], where: str
) -> tuple[Step, Mapping[str, PatternText]]:
    """A step with a column for each call of a user's function in conditions and measures, and the
    patterns over it. A call is about one row: `tax(b.amount)` becomes a column of the rows of `b`.
    """
    extractor = CallExtractor(step.schema.names, where=where)

    def rewritten(text: PatternText) -> PatternText:
        texts = [expression for _, expression in (*text.define, *text.measures)]
        if not any(may_have_calls(expression) for expression in texts):
            return text
        symbols = parse_pattern(text.pattern, where=where).symbols
        names = PatternNames(step.schema, symbols, text.subsets)

        def columns(expressions: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
            return tuple(
                (name, rewrite_calls(expression, extractor, names, where=where))
                for name, expression in expressions
            )

        return replace(text, define=columns(text.define), measures=columns(text.measures))

    patterns = {
        key: rewritten(text) if isinstance(text, PatternText) else text
        for key, text in patterns.items()
    }
    return call_steps(step, extractor, errors=NULL, where=where), patterns


def match_result_schema(step: MatchStep, where: str) -> pa.Schema:
    """The schema of a step's matches. Raises PlanError if two columns have one name."""
    from headrace.operators.patterns.settings import match_schema

    schema = match_schema(step.settings)
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise PlanError(
            f"The result of the step {where} would have two columns named {twice[0]!r}.",
            fix="rename the measure, or the column, first.",
        )
    return cols.check_columns(schema, where=f"The step {where}")


def check_match_options(options: MatchOptions, where: str) -> LatePolicy:
    """The policy for late rows. Raises PlanError if an option has no such value."""
    late = options.late or drop()
    if not isinstance(late, Drop | Divert):
        raise PlanError(
            f"The step {where} has late={late!r}: a match that was emitted cannot be corrected.",
            fix=(
                'use hr.late.drop() or hr.late.divert("late_rows"), and a longer delay= of the'
                " event time."
            ),
        )
    topics = [late.topic] if isinstance(late, Divert) else []
    if options.timed_out:
        topics.append(options.timed_out)
    for topic in topics:
        check_name(topic, what="topic", error=PlanError)
        if topic.startswith(RESERVED):
            raise PlanError(
                f"The step {where} sends rows to {topic!r}, a name that is Headrace's own.",
                fix="choose another name.",
            )
    for value, known, what in (
        (options.rows, (ONE_ROW, ALL_ROWS), "rows"),
        (options.when_full, (DROP, STOP), "when_full"),
    ):
        if value not in known:
            raise PlanError(
                f"The step {where} has {what}={value!r}: {nearest(str(value), known)}",
                fix=f"use {known[0]!r} or {known[1]!r}.",
            )
    for number, what in ((options.max_rows, "max_rows"), (options.max_matches, "max_matches")):
        if not 1 <= number <= 1_000_000:
            raise PlanError(
                f"The step {where} has {what}={number!r}.", fix="give from 1 to 1,000,000."
            )
    return late


def tie_order(
    schema: pa.Schema, order_by: str | Sequence[str], where: str
) -> tuple[tuple[str, bool], ...]:
    """By which columns rows of one time are ordered, and whether each descends."""
    found: list[tuple[str, bool]] = []
    for text in [order_by] if isinstance(order_by, str) else order_by:
        name, direction = text.strip(), ""
        if name not in schema.names:
            name, direction = [*name.rsplit(None, 1), ""][:2]
        if name not in schema.names:
            raise UnknownColumn(name, schema.names, where=f"The input of the step {where}")
        if direction.lower() not in {"", "asc", "desc"}:
            raise PlanError(
                f"The step {where} orders by {text!r}.", fix='write a column, or "column desc".'
            )
        kind = schema.field(name).type
        if pa.types.is_nested(kind) or pa.types.is_null(kind):
            raise PlanError(
                f"The step {where} orders by {name!r}, which is {type_name(kind)}.",
                fix="order by columns of plain types.",
            )
        found.append((name, direction.lower() == "desc"))
    return tuple(found)


def _pattern_spec(name: str, text: PatternText, options: MatchOptions, where: str) -> PatternSpec:
    if not isinstance(text, PatternText):
        raise PlanError(
            f"The step {where} has {text!r} as the pattern {name!r}.",
            fix='write {"name": hr.pattern("a b", define={…})}.',
        )
    within_us = (
        None if text.within is None else positive_us(text.within, f"within of the step {where}")
    )
    return PatternSpec(
        pattern=text.pattern,
        define=text.define,
        measures=text.measures,
        within_us=within_us,
        after_match=text.after_match,
        subsets=text.subsets,
        max_rows=options.max_rows,
        max_matches=options.max_matches,
    )


def _with_all_measures(
    specs: tuple[tuple[str, PatternSpec], ...],
) -> tuple[tuple[str, PatternSpec], ...]:
    """The patterns with the same columns: what one does not measure is null."""
    columns = dict.fromkeys(column for _, spec in specs for column, _ in spec.measures)

    def completed(spec: PatternSpec) -> PatternSpec:
        own = dict(spec.measures)
        return replace(spec, measures=tuple((each, own.get(each, "NULL")) for each in columns))

    return tuple((name, completed(spec)) for name, spec in specs)


def _condition_columns(
    schema: pa.Schema, patterns: Sequence[CompiledPattern]
) -> tuple[tuple[str, str], ...]:
    """A column's name for each different condition that reads only its own row."""
    conditions = dict.fromkeys(
        definition.condition
        for pattern in patterns
        for definition in pattern.definitions
        if definition.by_row
    )
    prefix = FITS
    while any(name.startswith(prefix) for name in schema.names):
        prefix = f"_{prefix}"
    return tuple((f"{prefix}{index}", text) for index, text in enumerate(conditions))


def _conditions_step(
    step: Step,
    patterns: Sequence[CompiledPattern],
    bits: tuple[tuple[str, str], ...],
    over: TimeColumn,
    ordered_by: set[str],
    *,
    keeps_all: bool,
) -> Step:
    """The input with the columns that are needed and those of the conditions, without the rows that
    no symbol can match.
    """
    if not bits:
        return step
    needed = {*step.key, over.name, over.producer, *ordered_by}
    needed |= {column for pattern in patterns for column in pattern.columns}
    kept = [field for field in step.schema if keeps_all or field.name in needed]
    schema = pa.schema([*kept, *(pa.field(name, pa.bool_()) for name, _ in bits)])
    columns = (*((field.name, field.name) for field in kept), *bits)
    before: Step = SelectStep(inputs=(step,), schema=schema, key=step.key, columns=columns)
    if not any(map(_needs_every_row, patterns)):
        condition = " OR ".join(quoted_name(name) for name, _ in bits)
        before = WhereStep(inputs=(before,), schema=schema, key=step.key, condition=condition)
    return before


def _needs_every_row(pattern: CompiledPattern) -> bool:
    """Whether a row that no condition fits matters to the pattern: rows must follow each other
    directly, it looks back at rows, a symbol matches any row, or no row at all is a match, too.
    """
    defined = {definition.symbol for definition in pattern.definitions if definition.by_row}
    text = pattern.automaton.pattern
    return (
        pattern.automaton.is_strict
        or bool(pattern.look_back_rows)
        or text.is_anchored
        or pattern.automaton.may_be_empty
        or not set(text.symbols) <= defined
    )


# Patterns in a table: rules that come, change and go as rows


def rule_match_step(
    stream: Relation,
    rules: Relation,
    options: MatchOptions,
    name: str | None,
    *,
    measures: Mapping[str, str] | None,
    within: Duration | None,
    after_match: str,
    max_rules: int,
) -> MatchStep:
    """Check `stream.match(rules, …)`, and make its step."""
    where = stream.step_label("match", name)
    over = require_event_time(stream.step, where=where)
    late = check_match_options(options, where)
    _check_rules(stream, rules, where)
    if options.rows == ALL_ROWS:
        raise PlanError(
            f"The step {where} has rules in a table and rows={ALL_ROWS!r}: the number of matches"
            " per key would have to be kept for ever, also of rules that are gone.",
            fix="take one row for each match, with measures.",
        )
    if not 1 <= max_rules <= 10_000:
        raise PlanError(
            f"The step {where} has max_rules={max_rules!r}.", fix="give from 1 to 10,000."
        )
    step = RuleMatchStep(
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
        timed_out=options.timed_out,
        when_full=options.when_full,
        tie_order=tie_order(stream.schema, options.order_by, where),
        measures=tuple((measures or {}).items()),
        after_match=after_match,
        max_rules=max_rules,
        within_us=None if within is None else positive_us(within, f"within of the step {where}"),
        max_rows=options.max_rows,
        max_matches=options.max_matches,
    )
    if step.settings.counts_matches:
        raise PlanError(
            f"The step {where} has rules in a table, whose matches are not numbered.",
            fix="leave out match_number().",
        )
    return replace(step, name=name or "", schema=match_result_schema(step, where))


def _check_rules(stream: Relation, rules: Relation, where: str) -> None:
    """Raise if a table does not have the columns of rules."""
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
