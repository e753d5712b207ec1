"""Fingerprints of steps: whether a step's state may be continued after an edit, and under which
name it is found.

A stream's rows are processed once, so what happens to them on the way may change from one tick to
the next. A table's changes retract rows that were emitted before, so everything between a table and
a step that keeps state, or an output, must stay as it was.

`headrace.runtime.query_assignment` stores fingerprints with a pipeline's state, and compares them
when the pipeline starts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from headrace.plan.plan import PipelinePlan, Step, TopicStep, digest, topological_order


@dataclass(frozen=True)
class StepFingerprint:
    """Digests of a step: of its own identity, of the tables among its inputs and how they are
    computed, and of everything upstream of it.
    """

    signature: str
    tables: str
    lineage: str
    parsed_tables: str = ""
    parsed_lineage: str = ""
    """The same with expressions as they are parsed; empty in what an older version has stored."""

    @classmethod
    def of(cls, step: Step) -> Self:
        return cls(
            signature=step.signature,
            tables=tables_fingerprint(step.inputs),
            lineage=step.lineage,
            parsed_tables=tables_fingerprint(step.inputs, parsed=True),
            parsed_lineage=step.parsed_lineage,
        )

    def has_same_tables(self, other: StepFingerprint) -> bool:
        """Whether the tables among the inputs are computed as those of the other one."""
        return self.tables == other.tables or _same(self.parsed_tables, other.parsed_tables)

    def has_same_lineage(self, other: StepFingerprint) -> bool:
        """Whether everything upstream is as that of the other one."""
        return self.lineage == other.lineage or _same(self.parsed_lineage, other.parsed_lineage)


def _same(mine: str, others: str) -> bool:
    return bool(mine) and mine == others


def step_fingerprints(last: Iterable[Step]) -> dict[str, StepFingerprint]:
    """The fingerprints of the steps that keep state, among these and all upstream of them."""
    return {
        step.name: StepFingerprint.of(step) for step in topological_order(last) if step.keeps_state
    }


def tables_fingerprint(inputs: Iterable[Step], *, parsed: bool = False) -> str:
    """A digest of how the tables among the inputs are computed, along tables only; empty if there
    are none. `parsed`: with expressions as they are parsed, not as they are written.
    """
    tables = [step for step in inputs if step.is_table]
    if not tables:
        return ""
    digests: dict[int, str] = {}
    for step in topological_order(tables):
        content = step.parsed_identity() if parsed else step.identity()
        if not step.keeps_state:
            content = {**step.details(), **content}
        upstream = [digests[id(source)] for source in step.inputs if source.is_table]
        digests[id(step)] = digest([content, upstream])
    return digest([digests[id(step)] for step in tables])


def with_stored_semantics(
    plan: PipelinePlan, known: Mapping[str, StepFingerprint], begun_before: Collection[str]
) -> PipelinePlan:
    """The plan in which each step whose state was begun by an earlier Headrace, with other results
    (`Step.former`), goes on as it began: results of both kinds are never mixed.

    Args:
        plan: The plan as it is declared.
        known: The fingerprints of the steps that have state.
        begun_before: The names of those that an earlier Headrace may have begun. State of others
            with the fingerprint of a former step was declared so: by="_arrival".

    """
    lineages = {known[name].lineage for name in begun_before}

    def is_stored(step: Step) -> bool:
        if (stored := known.get(step.name)) is not None:
            return (stored.signature, stored.tables) == (
                step.signature,
                tables_fingerprint(step.inputs),
            )
        return step.name_is_derived and step.lineage in lineages

    def may_be_former(step: Step) -> bool:
        is_known = step.name in known and step.name not in begun_before
        return not (is_known and step.former_can_be_declared)

    continued: dict[int, Step] = {}
    for step in topological_order([*plan.inputs, *(output.input for output in plan.outputs)]):
        current = step
        if any(continued[id(source)] is not source for source in step.inputs):
            current = replace(step, inputs=tuple(continued[id(each)] for each in step.inputs))
        former = current.former()
        if (
            former is not current
            and may_be_former(current)
            and is_stored(former)
            and not is_stored(current)
        ):
            current = replace(former, is_former=True)
        continued[id(step)] = current
    outputs = tuple(replace(output, input=continued[id(output.input)]) for output in plan.outputs)
    return replace(plan, outputs=outputs)


def with_known_names(plan: PipelinePlan, known: Mapping[str, StepFingerprint]) -> PipelinePlan:
    """The plan in which a step with a derived name has the one under which its state is known,
    whichever outputs have been declared before its output since.
    """
    steps = topological_order([*plan.inputs, *(output.input for output in plan.outputs)])
    names = _find_names(steps, known)
    if all(names[id(step)] == step.name for step in steps):
        return plan
    named: dict[int, Step] = {}
    for step in steps:
        if isinstance(step, TopicStep):
            named[id(step)] = step
        else:
            inputs = tuple(named[id(source)] for source in step.inputs)
            named[id(step)] = replace(step, name=names[id(step)], inputs=inputs)
    outputs = tuple(replace(output, input=named[id(output.input)]) for output in plan.outputs)
    return replace(plan, outputs=outputs)


def _is_known(step: Step, stored: StepFingerprint | None) -> bool:
    return stored is not None and (
        stored.lineage == step.lineage or _same(stored.parsed_lineage, step.parsed_lineage)
    )


def _find_names(steps: Iterable[Step], known: Mapping[str, StepFingerprint]) -> dict[int, str]:
    """The name of each step. First come steps that the user named, or that are known under their
    derived name; then those known under another name; then the rest.
    """
    free = dict(known)
    names: dict[int, str] = {}
    moved: list[Step] = []
    for step in steps:
        if step.name_is_derived and step.keeps_state and not _is_known(step, free.get(step.name)):
            moved.append(step)
        else:
            names[id(step)] = step.name
            free.pop(step.name, None)
    for step in moved:
        name = next((name for name, stored in free.items() if _is_known(step, stored)), None)
        if name is not None:
            names[id(step)] = name
            del free[name]
    for step in moved:
        if id(step) not in names:
            taken = set(names.values())
            unused = step.name
            number = 1
            while unused in taken:
                number += 1
                unused = f"{step.name}-{number}"
            names[id(step)] = unused
    return names
