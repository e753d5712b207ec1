"""Patterns in a plan: `stream.match(…)`, the steps it makes, and what is checked when it is declared.

Conditions that a row alone decides become columns, `_fits0`, `_fits1`, …, which are computed before rows are sent to shards; what no symbol can use is left out there, if no
row must directly follow another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from headrace.durations import format_us
from headrace.errors import PlanError, nearest
from headrace.log.names import check_name
from headrace.log.schema import to_ddl
from headrace.operators.patterns.compiled import CompiledPattern, PatternSpec, compiled
from headrace.operators.patterns.specs import ALL_ROWS, DROP, MOST_MATCHES, MOST_ROWS, ONE_ROW, PAST_LAST, STOP
from headrace.operators.windows.specs import Divert, Drop, LatePolicy, drop, positive_us
from headrace.pipeline import columns as cols
from headrace.pipeline.expressions.literals import quoted_name
from headrace.pipeline.plan import Aside, SelectStep, Step, TimeColumn, Times, WhereStep
from headrace.pipeline.timing import clock_paths
from headrace.pipeline.windowing import RESERVED, checked_time

if TYPE_CHECKING:  # kernels are loaded where they are used
    from headrace.operators.patterns.kernel import PatternKernel
    from headrace.operators.patterns.settings import MatchSettings
    from headrace.pipeline.stream import Stream

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
    pattern: str, *, define: Mapping[str, str] | None = None, measures: Mapping[str, str] | None = None, within: Duration | None = None,
    after_match: str = PAST_LAST, subsets: Mapping[str, Sequence[str]] | None = None,
) -> PatternText:  # fmt: skip
    """A pattern for `stream.match({"name": hr.pattern(…), …})`, which looks for several at once."""
    members = tuple((name, (each,) if isinstance(each, str) else tuple(each)) for name, each in (subsets or {}).items())
    return PatternText(pattern, tuple((define or {}).items()), tuple((measures or {}).items()), within, after_match, members)


@dataclass(frozen=True, kw_only=True, eq=False)
class MatchStep(Step):
    """Matches of patterns, as a stream. `bits`: the columns of its input that say which conditions a row alone meets, and what they are."""

    operation: ClassVar[str] = "match"
    stateful: ClassVar[bool] = True

    by: tuple[str, ...]
    over: TimeColumn
    patterns: tuple[tuple[str, PatternSpec], ...]
    bits: tuple[tuple[str, str], ...]
    rows: str = ONE_ROW
    several: bool = False
    late: LatePolicy
    timed_out: str | None = None
    when_full: str = DROP

    @property
    def plain_schema(self) -> pa.Schema:
        """The user's columns of what comes in."""
        names = {name for name, _ in self.bits}
        return pa.schema([field for field in self.input.schema if field.name not in names])

    @cached_property
    def compiled(self) -> tuple[tuple[str, CompiledPattern], ...]:
        return tuple((name, compiled(spec, self.plain_schema, where=self.place, lenient=self.several)) for name, spec in self.patterns)

    @cached_property
    def settings(self) -> MatchSettings:
        from headrace.operators.patterns.settings import MatchSettings

        places = {text: at for at, (_, text) in enumerate(self.bits)}
        fits = tuple(tuple((each.symbol, places[each.condition]) for each in found.definitions if each.alone) for _, found in self.compiled)
        assert isinstance(self.late, Drop | Divert)
        return MatchSettings(
            self.name, self.plain_schema, self.by, self.over.name, self.compiled, tuple(name for name, _ in self.bits), fits, self.rows, self.several,
            self.timed_out is not None, self.late, self.over.producer, self.over.shift_us, self.when_full, self._closed_behind_us,
        )  # fmt: skip

    @property
    def _closed_behind_us(self) -> int:
        return max((path.closed_back_us - path.complete_back_us for path in clock_paths(self.input)), default=0)

    @property
    def holds_back_us(self) -> int:
        """Rows are taken in when the closed clock has passed them."""
        return self._closed_behind_us

    def kernel(self) -> PatternKernel:
        from headrace.operators.patterns.kernel import PatternKernel

        return PatternKernel(self.settings)

    def time(self, inputs: Times) -> TimeColumn | None:  # noqa: ARG002
        """A match happened when it was certain."""
        return TimeColumn("matched_at")

    @property
    def aside(self) -> tuple[Aside, ...]:
        late = [Aside(self.late.topic, self.plain_schema, self.input.key, "diverts late rows")] if isinstance(self.late, Divert) else []
        out = [Aside(self.timed_out, self.schema, self.key, "sends partial matches whose time ran out")] if self.timed_out else []
        return (*late, *out)

    def renamed(self, version: str) -> dict[str, Any]:
        late = {"late": replace(self.late, topic=f"{self.late.topic}.{version}")} if isinstance(self.late, Divert) else {}
        return {**late, **({"timed_out": f"{self.timed_out}.{version}"} if self.timed_out else {})}

    def details(self) -> dict[str, Any]:
        said = {name: _said(spec) for name, spec in self.patterns}
        more = {"timed_out": self.timed_out} if self.timed_out else {}
        patterns = said if self.several else next(iter(said.values()))
        return {"by": list(self.by), "rows": self.rows, "late": str(self.late), **({"patterns": patterns} if self.several else patterns), **more}

    def identity(self) -> dict[str, Any]:
        """What is kept are rows and which conditions they meet."""
        kept = {name: value for name, value in super().identity().items() if name not in {"late", "timed_out", "most_rows"}}
        return {**kept, "conditions": [text for _, text in self.bits], "given": to_ddl(self.input.schema), "time": self.over.name}

    def summary(self) -> str:
        by = f" by {', '.join(self.by)}" if self.by else ""
        if self.several:
            return f"{len(self.patterns)} patterns{by}: {', '.join(name for name, _ in self.patterns[:5])}"
        return f"{self.patterns[0][1]}{by}"

    def drawn(self) -> list[str]:
        """The automata, for people."""
        lines = []
        for name, found in self.compiled:
            lines += [f"{name}:"] if self.several else []
            lines += [f"{'  ' if self.several else ''}{line}" for line in found.automaton.drawn()]
        return lines


def _said(spec: PatternSpec) -> dict[str, Any]:
    within = {} if spec.within_us is None else {"within": format_us(spec.within_us)}
    subsets = {"subsets": {name: list(members) for name, members in spec.subsets}} if spec.subsets else {}
    return {
        "pattern": spec.pattern, "define": dict(spec.define), "measures": dict(spec.measures), **within, "after_match": spec.after_match, **subsets,
        "most_rows": spec.most_rows,
    }  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What `match` was asked for, beside the patterns."""

    rows: str = ONE_ROW
    late: LatePolicy | None = None
    timed_out: str | None = None
    most_rows: int = MOST_ROWS
    most_matches: int = MOST_MATCHES
    when_full: str = DROP


def matched(stream: Stream, patterns: Mapping[str, PatternText], asked: Asked, name: str | None, *, several: bool) -> MatchStep:
    """`stream.match(…)`, checked."""
    where = stream._place("match", name)  # noqa: SLF001
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
    before = _before(stream.step, found, bits, over, keeps_all=asked.rows == ALL_ROWS or isinstance(late, Divert))
    step = MatchStep(
        name=where, inputs=(before,), schema=stream.schema, key=stream.key, by=stream.key, over=over, patterns=specs, bits=bits, rows=asked.rows,
        several=several, late=late, timed_out=asked.timed_out, when_full=asked.when_full,
    )  # fmt: skip
    return replace(step, name=name or "", schema=checked_result(step, where))


def checked_result(step: MatchStep, where: str) -> pa.Schema:
    """The columns of matches."""
    from headrace.operators.patterns.settings import match_schema

    schema = match_schema(step.settings)
    twice = sorted({each for each in schema.names if schema.names.count(each) > 1})
    if twice:
        raise PlanError(f"The result of the step {where} would have two columns named {twice[0]!r}.", fix="rename the measure, or the column, first.")
    return cols.check_columns(schema, where=f"The step {where}")


def checked_late(asked: Asked, where: str) -> LatePolicy:
    """What becomes of late rows; and that the rest of what was asked for makes sense."""
    late = asked.late or drop()
    if not isinstance(late, Drop | Divert):
        raise PlanError(
            f"The step {where} has late={late!r}: what was told of a match cannot be corrected.", fix='use hr.drop() or hr.divert("late_rows"), and a longer delay= of the event time.'
        )
    for topic in [*([late.topic] if isinstance(late, Divert) else []), *([asked.timed_out] if asked.timed_out else [])]:
        check_name(topic, what="topic", error=PlanError)
        if topic.startswith(RESERVED):
            raise PlanError(f"The step {where} sends rows to {topic!r}, a name that is Headrace's own.", fix="choose another name.")
    for value, known, what in ((asked.rows, (ONE_ROW, ALL_ROWS), "rows"), (asked.when_full, (DROP, STOP), "when_full")):
        if value not in known:
            raise PlanError(f"The step {where} has {what}={value!r}: {nearest(str(value), known)}", fix=f"use {known[0]!r} or {known[1]!r}.")
    for number, what in ((asked.most_rows, "most_rows"), (asked.most_matches, "most_matches")):
        if not 1 <= number <= 1_000_000:
            raise PlanError(f"The step {where} has {what}={number!r}.", fix="give from 1 to 1,000,000.")
    return late


def _spec(name: str, text: PatternText, asked: Asked, where: str) -> PatternSpec:
    if not isinstance(text, PatternText):
        raise PlanError(f"The step {where} has {text!r} as the pattern {name!r}.", fix='write {"name": hr.pattern("a b", define={…})}.')
    within_us = None if text.within is None else positive_us(text.within, f"within of the step {where}")
    return PatternSpec(text.pattern, text.define, text.measures, within_us, text.after_match, text.subsets, asked.most_rows, asked.most_matches)


def _with_all_measures(specs: tuple[tuple[str, PatternSpec], ...]) -> tuple[tuple[str, PatternSpec], ...]:
    """All patterns give the same columns: what one does not measure is null."""
    names = dict.fromkeys(name for _, spec in specs for name, _ in spec.measures)
    return tuple((name, replace(spec, measures=tuple((each, dict(spec.measures).get(each, "NULL")) for each in names))) for name, spec in specs)


def _bits(schema: pa.Schema, found: Sequence[CompiledPattern]) -> tuple[tuple[str, str], ...]:
    """Each different condition once."""
    texts = dict.fromkeys(each.condition for pattern in found for each in pattern.definitions if each.alone)
    prefix = FITS
    while any(name.startswith(prefix) for name in schema.names):
        prefix = f"_{prefix}"
    return tuple((f"{prefix}{at}", text) for at, text in enumerate(texts))


def _before(step: Step, found: Sequence[CompiledPattern], bits: tuple[tuple[str, str], ...], over: TimeColumn, *, keeps_all: bool) -> Step:
    """The input with the columns that are needed and the conditions, without the rows that nobody can use."""
    if not bits:
        return step
    needed = {*step.key, over.name, over.producer, *(name for each in found for name in each.columns)}
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
    return pattern.automaton.is_strict or bool(pattern.back) or plain.from_first or not set(plain.symbols) <= defined
