"""Fingerprints of steps: whether a step's state may be continued after an edit, and under which
name it is found.

A stream's rows are processed once, so what happens to them on the way may change from one tick to
the next. A table's changes retract rows that were emitted before, so everything between a table and
a step that keeps state, or an output, must stay as it was.

`headrace.runtime.query_assignment` stores fingerprints with a pipeline's state, and compares them
when the pipeline starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from headrace.plan.plan import PipelinePlan, Step, TopicStep, digest, topological_order


@dataclass(frozen=True)
class StepFingerprint:
    """Digests of a step: of its own identity, of the tables among its inputs and how they are
    computed, and of everything upstream of it.
    """

    signature: str
    tables: str
    lineage: str


def step_fingerprints(last: Iterable[Step]) -> dict[str, StepFingerprint]:
    """The fingerprints of the steps that keep state, among these and all upstream of them."""
    return {
        step.name: StepFingerprint(step.signature, tables_fingerprint(step.inputs), step.lineage)
        for step in topological_order(last)
        if step.keeps_state
    }


def tables_fingerprint(inputs: Iterable[Step]) -> str:
    """A digest of how the tables among the inputs are computed, along tables only; empty if there
    are none.
    """
    tables = [step for step in inputs if step.is_table]
    if not tables:
        return ""
    digests: dict[int, str] = {}
    for step in topological_order(tables):
        content = step.identity() if step.keeps_state else {**step.identity(), **step.details()}
        upstream = [digests[id(source)] for source in step.inputs if source.is_table]
        digests[id(step)] = digest([content, upstream])
    return digest([digests[id(step)] for step in tables])


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


def _find_names(steps: Iterable[Step], known: Mapping[str, StepFingerprint]) -> dict[int, str]:
    """The name of each step. First come steps that the user named, or that are known under their
    derived name; then those known under another name; then the rest.
    """
    free = {name: fingerprint.lineage for name, fingerprint in known.items()}
    names: dict[int, str] = {}
    moved: list[Step] = []
    for step in steps:
        if step.name_is_derived and step.keeps_state and free.get(step.name) != step.lineage:
            moved.append(step)
        else:
            names[id(step)] = step.name
            free.pop(step.name, None)
    for step in moved:
        name = next((name for name, lineage in free.items() if lineage == step.lineage), None)
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
