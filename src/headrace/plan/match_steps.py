"""The steps of patterns: `MatchStep` for patterns that are written out, `RuleMatchStep` for
patterns in a table.

`headrace.pipeline.patterns` checks and builds them; the kernels are in
`headrace.operators.patterns`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from headrace.durations import format_us
from headrace.operators.patterns.compiled_pattern import (
    CompiledPattern,
    PatternSpec,
    compile_pattern,
)
from headrace.operators.patterns.parser import DROP, ONE_ROW
from headrace.operators.windows.late_policy import Divert, Drop, LatePolicy
from headrace.plan.plan import (
    SideOutput,
    Step,
    TimeColumn,
    Times,
    null_groups_identity,
    watermark_paths,
)
from headrace.types.schema import to_ddl

if TYPE_CHECKING:
    from headrace.operators.patterns.kernel import PatternKernel
    from headrace.operators.patterns.rules import RuledKernel, RuleSettings
    from headrace.operators.patterns.settings import MatchSettings


@dataclass(frozen=True, kw_only=True, eq=False)
class MatchStep(Step):
    """Matches of patterns, as a stream. `bits` has the input's columns that say which conditions a
    row meets by itself, with the conditions' text.
    """

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
    tie_order: tuple[tuple[str, bool], ...] = ()
    null_groups: bool = True
    """Whether null is a key like others. If not, rows with a null key become dead letters."""

    @property
    def shard_key(self) -> tuple[str, ...]:
        return self.by

    @property
    def allows_null_keys(self) -> bool:
        return self.null_groups

    def former(self) -> Step:
        """Before, patterns had no rows with a null key."""
        return replace(self, null_groups=False)

    @property
    def former_can_be_declared(self) -> bool:
        return False

    @property
    def late_topic(self) -> str | None:
        return self.late.topic if isinstance(self.late, Divert) else None

    @property
    def timeout_topic(self) -> str | None:
        return self.timed_out

    @property
    def plain_schema(self) -> pa.Schema:
        """The input's columns without those of conditions."""
        names = {name for name, _ in self.bits}
        return pa.schema([field for field in self.input.schema if field.name not in names])

    @cached_property
    def compiled(self) -> tuple[tuple[str, CompiledPattern], ...]:
        return tuple(
            (name, compile_pattern(spec, self.plain_schema, where=self.path, lenient=self.several))
            for name, spec in self.patterns
        )

    @cached_property
    def settings(self) -> MatchSettings:
        from headrace.operators.patterns.settings import MatchSettings

        bit_index = {text: index for index, (_, text) in enumerate(self.bits)}
        fits = tuple(
            tuple(
                (definition.symbol, bit_index[definition.condition])
                for definition in pattern.definitions
                if definition.by_row
            )
            for _, pattern in self.compiled
        )
        assert isinstance(self.late, Drop | Divert)
        return MatchSettings(
            name=self.name,
            schema=self.plain_schema,
            by=self.by,
            time=self.over.name,
            patterns=self.compiled,
            bits=tuple(name for name, _ in self.bits),
            fits=fits,
            rows=self.rows,
            several=self.several,
            timed_out=self.timed_out is not None,
            late=self.late,
            producer=self.over.producer,
            time_shift_us=self.over.shift_us,
            when_full=self.when_full,
            tie_order=self.tie_order,
            horizon_lag_us=self._horizon_lag_us,
        )

    @property
    def _horizon_lag_us(self) -> int:
        """How far the horizon of the input is behind its watermark."""
        return max(
            (path.horizon_lag_us - path.watermark_lag_us for path in watermark_paths(self.input)),
            default=0,
        )

    @property
    def watermark_delay_us(self) -> int:
        """Rows are matched once the horizon has passed them."""
        return self._horizon_lag_us

    def kernel(self) -> PatternKernel:
        from headrace.operators.patterns.kernel import PatternKernel

        return PatternKernel(self.settings)

    def time(self, inputs: Times) -> TimeColumn | None:  # noqa: ARG002
        """A match's event time is when it was certain."""
        return TimeColumn("matched_at")

    @property
    def side_outputs(self) -> tuple[SideOutput, ...]:
        sides = []
        if isinstance(self.late, Divert):
            late_topic = self.late.topic
            sides.append(
                SideOutput(
                    late_topic, self.settings.row_schema, self.input.key, "diverts late rows"
                )
            )
        if self.timed_out:
            what = "sends partial matches whose time ran out"
            sides.append(SideOutput(self.timed_out, self.schema, self.key, what))
        return tuple(sides)

    def version_fields(self, version: str) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if isinstance(self.late, Divert):
            fields["late"] = replace(self.late, topic=f"{self.late.topic}.{version}")
        if self.timed_out:
            fields["timed_out"] = f"{self.timed_out}.{version}"
        return fields

    def details(self) -> dict[str, Any]:
        patterns = {name: _pattern_details(spec) for name, spec in self.patterns}
        more: dict[str, Any] = {"timed_out": self.timed_out} if self.timed_out else {}
        if self.tie_order:
            more["order_by"] = _order_details(self.tie_order)
        return {
            "by": list(self.by),
            "rows": self.rows,
            "late": str(self.late),
            **({"patterns": patterns} if self.several else next(iter(patterns.values()))),
            **more,
        }

    def identity(self) -> dict[str, Any]:
        """State has rows, and which conditions they meet."""
        kept = {
            name: value
            for name, value in super().identity().items()
            if name not in {"late", "timed_out", "most_rows"}
        }
        return {
            **kept,
            "conditions": [text for _, text in self.bits],
            "given": to_ddl(self.input.schema),
            "time": self.over.name,
            **null_groups_identity(self.input.schema, self.by, self.null_groups),
        }

    def summary(self) -> str:
        by = f" by {', '.join(self.by)}" if self.by else ""
        if self.several:
            return (
                f"{len(self.patterns)} patterns{by}:"
                f" {', '.join(name for name, _ in self.patterns[:5])}"
            )
        return f"{self.patterns[0][1]}{by}"

    def diagram(self) -> list[str]:
        """The patterns' automata."""
        lines = []
        for name, pattern in self.compiled:
            lines += [f"{name}:"] if self.several else []
            lines += [
                f"{'  ' if self.several else ''}{line}" for line in pattern.automaton.describe()
            ]
        return lines


def _order_details(tie_order: tuple[tuple[str, bool], ...]) -> list[str]:
    return [f"{name} desc" if descends else name for name, descends in tie_order]


def _pattern_details(spec: PatternSpec) -> dict[str, Any]:
    """A pattern in plain values. The keys are hashed into fingerprints."""
    within = {} if spec.within_us is None else {"within": format_us(spec.within_us)}
    subsets = (
        {"subsets": {name: list(members) for name, members in spec.subsets}} if spec.subsets else {}
    )
    return {
        "pattern": spec.pattern,
        "define": dict(spec.define),
        "measures": dict(spec.measures),
        **within,
        "after_match": spec.after_match,
        **subsets,
        "most_rows": spec.max_rows,
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class RuleMatchStep(MatchStep):
    """Matches of the patterns in a table, as a stream. Its inputs are the rows and the table."""

    stateful: ClassVar[bool] = True

    measures: tuple[tuple[str, str], ...]
    within_us: int | None
    after_match: str
    max_rules: int
    max_rows: int
    max_matches: int

    @property
    def input_keys(self) -> tuple[tuple[str, ...] | None, ...]:
        return self.by, None

    @property
    def watermark_inputs(self) -> tuple[Step, ...]:
        """The table of patterns does not hold the watermark back."""
        return self.inputs[:1]

    @cached_property
    def settings(self) -> MatchSettings:
        from headrace.operators.patterns.rules import prototype_settings

        return prototype_settings(super().settings, self.measures)

    @property
    def rule_settings(self) -> RuleSettings:
        from headrace.operators.patterns.rules import RuleSettings

        rules = self.inputs[1]
        return RuleSettings(
            matching=self.settings,
            schema=rules.schema,
            key=rules.key[0],
            measures=self.measures,
            within_us=self.within_us,
            after_match=self.after_match,
            max_rules=self.max_rules,
            max_rows=self.max_rows,
            max_matches=self.max_matches,
        )

    def kernel(self) -> RuledKernel:  # type: ignore[override]  # another kernel, with the same duties
        from headrace.operators.patterns.rules import RuledKernel

        return RuledKernel(self.rule_settings)

    def details(self) -> dict[str, Any]:
        within = {} if self.within_us is None else {"within": format_us(self.within_us)}
        timed_out: dict[str, Any] = {"timed_out": self.timed_out} if self.timed_out else {}
        bounds = {
            "after_match": self.after_match,
            "most_rules": self.max_rules,
            "most_rows": self.max_rows,
        }
        if self.tie_order:
            timed_out |= {"order_by": _order_details(self.tie_order)}
        return {
            "by": list(self.by),
            "rules": self.inputs[1].name,
            "measures": dict(self.measures),
            **within,
            **bounds,
            "late": str(self.late),
            **timed_out,
        }

    def identity(self) -> dict[str, Any]:
        """State has rows and rules."""
        kept = {
            name: value
            for name, value in super().identity().items()
            if name not in {"rules", "measures", "within", "after_match", "schema"}
        }
        return {**kept, "rules": to_ddl(self.inputs[1].schema)}

    def further_meaning(self) -> dict[str, Any]:
        """What all rules have in common: state fits any of it, but matches follow from it."""
        return {
            "measures": self.measures,
            "within_us": self.within_us,
            "after_match": self.after_match,
        }

    def summary(self) -> str:
        by = f" by {', '.join(self.by)}" if self.by else ""
        return f"the patterns of {self.inputs[1].name}{by}"

    def diagram(self) -> list[str]:
        return []
