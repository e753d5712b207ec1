"""Stable names for steps: the one the user gave, or one derived from the output a step feeds and
its operation.

A name finds a step's state after an edit, so edits elsewhere must not change it. A derived name is
`OUTPUT.OPERATION`, where OUTPUT is the first declared output that the step feeds. Of several steps
with the same operation, the one nearest to the input has the plain name and the next ones are
`OUTPUT.OPERATION-2`, …. The branches of a union are named for themselves,
`OUTPUT.SOURCE.OPERATION`, all but the first: so a union that is added later, or gets another
branch, renames nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.errors import DuplicateStep
from headrace.plan.plan import Output, PipelinePlan, Step, TopicStep, digest, topological_order


def with_names(inputs: Sequence[TopicStep], outputs: Sequence[Output]) -> tuple[Output, ...]:
    """The same outputs over steps that all have names. DuplicateStep if two steps would have the
    same one.
    """
    names = {id(each): each.name for each in inputs}
    for output in outputs:
        _name_upstream(output.input, output.name, names)
    steps = topological_order([*inputs, *(output.input for output in outputs)])
    _refuse_duplicates(steps, names)
    named: dict[int, Step] = {}
    for step in steps:
        given = tuple(named[id(each)] for each in step.inputs)
        named[id(step)] = (
            step
            if isinstance(step, TopicStep)
            else replace(step, name=names[id(step)], inputs=given, name_is_derived=not step.name)
        )
    return tuple(replace(output, input=named[id(output.input)]) for output in outputs)


def _name_upstream(last: Step, prefix: str, names: dict[int, str]) -> None:
    """Name what has no name yet on the main line that ends in `last`, then the other branches of
    its unions, each under its own prefix.
    """
    branches = [(last, prefix)]
    taken: dict[str, int] = {}
    while branches:
        step, under = branches.pop(0)
        line = _main_line(step, names)
        for each in line:
            derived = _numbered(
                f"{under}.{each.operation}", taken
            )  # counted even if not needed: naming one step renames no other
            names[id(each)] = each.name or derived
        for each in reversed(line):
            others = [branch for branch in each.inputs[1:] if id(branch) not in names]
            branches += [
                (branch, _numbered(f"{prefix}.{_source(branch)}", taken)) for branch in others
            ]


def _main_line(last: Step, names: dict[int, str]) -> list[Step]:
    """From the first step that has no name yet down to `last`, by way of first inputs."""
    line = []
    step: Step | None = last
    while step is not None and id(step) not in names:
        line.append(step)
        step = step.inputs[0] if step.inputs else None
    return line[::-1]


def _source(step: Step) -> str:
    while step.inputs:
        step = step.inputs[0]
    return step.name


def _numbered(name: str, taken: dict[str, int]) -> str:
    taken[name] = taken.get(name, 0) + 1
    return name if taken[name] == 1 else f"{name}-{taken[name]}"


def _refuse_duplicates(steps: Iterable[Step], names: dict[int, str]) -> None:
    seen: dict[str, Step] = {}
    for step in steps:
        name = names[id(step)]
        if name in seen:
            raise DuplicateStep(
                f"Two steps have the name {name!r}: {_described(seen[name])} and"
                f" {_described(step)}.",
                fix="give one of them another name with name=….",
            )
        seen[name] = step


def _described(step: Step) -> str:
    summary = step.summary()
    return f"{step.operation}({summary})" if summary else step.operation


# What a step means, so that its state is found again after an edit, and is not gone on with where
# it no longer fits.
#
# A stream's rows are taken in once, so what is done to them on the way may change from one tick to
# the next. A table's changes take back what was told before: whatever lies between a table and a
# step that keeps state, or an output, must stay as it was.


@dataclass(frozen=True)
class StepFingerprint:
    """Digests: of what a step does itself, of how the tables that it is given come about, and of
    everything upstream of it.
    """

    signature: str
    tables: str
    lineage: str


def step_fingerprints(last: Iterable[Step]) -> dict[str, StepFingerprint]:
    """Of the steps that keep state, of these and all upstream of them."""
    return {
        step.name: StepFingerprint(step.signature, tables_fingerprint(step.inputs), step.lineage)
        for step in topological_order(last)
        if step.keeps_state
    }


def tables_fingerprint(inputs: Iterable[Step]) -> str:
    """A digest of how tables come about, by way of tables alone; empty if there is none among the
    inputs.
    """
    tables = [each for each in inputs if each.is_table]
    digests: dict[int, str] = {}
    for step in topological_order(tables):
        does = step.identity() if step.keeps_state else {**step.identity(), **step.details()}
        digests[id(step)] = digest(
            [does, [digests[id(each)] for each in step.inputs if each.is_table]]
        )
    return digest([digests[id(each)] for each in tables]) if tables else ""


def with_known_names(plan: PipelinePlan, known: Mapping[str, StepFingerprint]) -> PipelinePlan:
    """Steps whose name was derived have the one under which their state is known, whatever outputs
    were declared before theirs since.
    """
    steps = topological_order([*plan.inputs, *(output.input for output in plan.outputs)])
    names = _names(steps, known)
    if all(names[id(step)] == step.name for step in steps):
        return plan
    named: dict[int, Step] = {}
    for step in steps:
        inputs = tuple(named[id(each)] for each in step.inputs)
        named[id(step)] = (
            step
            if isinstance(step, TopicStep)
            else replace(step, name=names[id(step)], inputs=inputs)
        )
    return replace(
        plan,
        outputs=tuple(replace(output, input=named[id(output.input)]) for output in plan.outputs),
    )


def _names(steps: Iterable[Step], known: Mapping[str, StepFingerprint]) -> dict[int, str]:
    """First come those whose name is given, or that are what was known under theirs; then those
    that are what was known under another; then the rest.
    """
    free = {name: meaning.lineage for name, meaning in known.items()}
    names: dict[int, str] = {}
    waiting: list[Step] = []
    for step in steps:
        if step.name_is_derived and step.keeps_state and free.get(step.name) != step.lineage:
            waiting.append(step)
        else:
            names[id(step)] = step.name
            free.pop(step.name, None)
    found = {
        id(step): name
        for step in waiting
        if (name := _taken_by_lineage(free, step.lineage)) is not None
    }
    names |= found
    for step in waiting:
        if id(step) not in names:
            names[id(step)] = _unlike(step.name, set(names.values()))
    return names


def _taken_by_lineage(free: dict[str, str], lineage: str) -> str | None:
    name = next((name for name, each in free.items() if each == lineage), None)
    if name is not None:
        del free[name]
    return name


def _unlike(name: str, taken: set[str]) -> str:
    number, chosen = 1, name
    while chosen in taken:
        number += 1
        chosen = f"{name}-{number}"
    return chosen
