"""Patterns that live in a table: `stream.match(rules, measures=…)`, whose rules come, change and go as rows of a topic, and what is checked when it is declared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from headrace.durations import format_us
from headrace.errors import PlanError, UnknownColumn
from headrace.log.schema import to_ddl, type_name
from headrace.operators.patterns.specs import ALL_ROWS
from headrace.operators.windows.specs import positive_us
from headrace.pipeline.patterns import Asked, Duration, MatchStep, checked_late, checked_result
from headrace.pipeline.plan import Step
from headrace.pipeline.windowing import checked_time

if TYPE_CHECKING:  # kernels are loaded where they are used
    from headrace.operators.patterns.ruled_kernel import RuledKernel
    from headrace.operators.patterns.rules import RuleSettings
    from headrace.operators.patterns.settings import MatchSettings
    from headrace.pipeline.stream import Stream, Table


@dataclass(frozen=True, kw_only=True, eq=False)
class RuledMatchStep(MatchStep):
    """Matches of the patterns that a table has, as a stream. Inputs: the rows, the rules."""

    stateful: ClassVar[bool] = True

    measures: tuple[tuple[str, str], ...]
    within_us: int | None
    after_match: str
    most_rules: int
    most_rows: int
    most_matches: int

    @property
    def timed_by(self) -> tuple[Step, ...]:
        """Rules have no time of their own."""
        return self.inputs[:1]

    @cached_property
    def settings(self) -> MatchSettings:
        from headrace.operators.patterns.rules import prototype

        return prototype(super().settings, self.measures)

    @property
    def rule_settings(self) -> RuleSettings:
        from headrace.operators.patterns.rules import RuleSettings

        rules = self.inputs[1]
        return RuleSettings(
            self.settings, rules.schema, rules.key[0], self.measures, self.within_us, self.after_match, self.most_rules, self.most_rows, self.most_matches
        )

    def kernel(self) -> RuledKernel:  # type: ignore[override]  # another kernel, with the same duties
        from headrace.operators.patterns.ruled_kernel import RuledKernel

        return RuledKernel(self.rule_settings)

    def details(self) -> dict[str, Any]:
        within = {} if self.within_us is None else {"within": format_us(self.within_us)}
        aside = {"timed_out": self.timed_out} if self.timed_out else {}
        more = {"after_match": self.after_match, "most_rules": self.most_rules, "most_rows": self.most_rows}
        return {"by": list(self.by), "rules": self.inputs[1].name, "measures": dict(self.measures), **within, **more, "late": str(self.late), **aside}

    def identity(self) -> dict[str, Any]:
        """What is kept are rows and rules."""
        kept = {name: value for name, value in super().identity().items() if name not in {"rules", "measures", "within", "after_match", "schema"}}
        return {**kept, "rules": to_ddl(self.inputs[1].schema)}

    def summary(self) -> str:
        by = f" by {', '.join(self.by)}" if self.by else ""
        return f"the patterns of {self.inputs[1].name}{by}"

    def drawn(self) -> list[str]:
        return []


def ruled(
    stream: Stream, rules: Table, asked: Asked, name: str | None, *, measures: Mapping[str, str] | None, within: Duration | None, after_match: str, most_rules: int
) -> MatchStep:  # fmt: skip
    """`stream.match(rules, …)`, checked."""
    where = stream._place("match", name)  # noqa: SLF001
    over = checked_time(stream.step, where=where)
    late = checked_late(asked, where)
    _check_rules(stream, rules, where)
    if asked.rows == ALL_ROWS:
        raise PlanError(
            f"The step {where} has rules in a table and rows={ALL_ROWS!r}: how many matches each key had of rules that went would have to be kept for ever.",
            fix="take one row for each match, with measures.",
        )
    if not 1 <= most_rules <= 10_000:
        raise PlanError(f"The step {where} has most_rules={most_rules!r}.", fix="give from 1 to 10,000.")
    step = RuledMatchStep(
        name=where, inputs=(stream.step, rules.step), schema=stream.schema, key=stream.key, by=stream.key, over=over, patterns=(), bits=(), several=True, late=late,
        timed_out=asked.timed_out, when_full=asked.when_full, measures=tuple((measures or {}).items()), after_match=after_match, most_rules=most_rules,
        within_us=None if within is None else positive_us(within, f"within of the step {where}"), most_rows=asked.most_rows, most_matches=asked.most_matches,
    )  # fmt: skip
    if step.settings.counts_matches:
        raise PlanError(f"The step {where} has rules in a table, whose matches are not numbered.", fix="leave out match_number().")
    return replace(step, name=name or "", schema=checked_result(step, where))


def _check_rules(stream: Stream, rules: Table, where: str) -> None:
    from headrace.operators.patterns.rules import COLUMNS, DEFINE, PATTERN, SUBSETS

    if rules.pipeline is not stream.pipeline:
        raise PlanError(f"The step {where} has rules of another pipeline.", fix="write them to a topic, and read that topic here.")
    kinds = {name: rules.schema.field(name).type for name in rules.schema.names}
    if len(rules.key) != 1 or not pa.types.is_string(kinds[rules.key[0]]):
        raise PlanError(f"The step {where} has rules with the key {', '.join(rules.key)}.", fix="let one STRING column name each rule, and be the table's key.")
    if PATTERN not in kinds:
        raise UnknownColumn(PATTERN, rules.schema.names, where=f"The rules of the step {where}")
    maps = {DEFINE: pa.map_(pa.string(), pa.string()), SUBSETS: pa.map_(pa.string(), pa.list_(pa.string()))}
    for name in COLUMNS:
        kind = kinds.get(name, pa.string())
        if not (pa.types.is_string(kind) or (name in maps and type_name(kind) == type_name(maps[name]))):
            choice = f"STRING with JSON, or {type_name(maps[name])}" if name in maps else "STRING"
            raise PlanError(f"The step {where} has rules whose {name!r} is {type_name(kind)}.", fix=f"let it be {choice}.")
