"""What a step means, so that its state is found again after an edit, and is not gone on with where it no longer fits.

A stream's rows are taken in once, so what is done to them on the way may change from one tick to the next. A table's changes take back what was told before: whatever
lies between a table and a step that keeps state, or an output, must stay as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from headrace.pipeline.hosting import keeps_state
from headrace.pipeline.plan import PipelinePlan, Step, TopicStep, digest, ordered


@dataclass(frozen=True)
class Meaning:
    """Digests: of what a step does itself, of how the tables that it is given come about, and of everything upstream of it."""

    signature: str
    tables: str
    lineage: str


def meanings(last: Iterable[Step]) -> dict[str, Meaning]:
    """Of the steps that keep state, of these and all upstream of them."""
    return {step.name: Meaning(step.signature, tables_of(step.inputs), step.lineage) for step in ordered(last) if keeps_state(step)}


def tables_of(inputs: Iterable[Step]) -> str:
    """A digest of how tables come about, by way of tables alone; empty if there is none among the inputs."""
    tables = [each for each in inputs if each.is_table]
    digests: dict[int, str] = {}
    for step in ordered(tables):
        does = step.identity() if keeps_state(step) else {**step.identity(), **step.details()}
        digests[id(step)] = digest([does, [digests[id(each)] for each in step.inputs if each.is_table]])
    return digest([digests[id(each)] for each in tables]) if tables else ""


def with_known_names(plan: PipelinePlan, known: Mapping[str, Meaning]) -> PipelinePlan:
    """Steps whose name was derived have the one under which their state is known, whatever outputs were declared before theirs since."""
    steps = ordered([*plan.inputs, *(output.input for output in plan.outputs)])
    names = _names(steps, known)
    if all(names[id(step)] == step.name for step in steps):
        return plan
    named: dict[int, Step] = {}
    for step in steps:
        inputs = tuple(named[id(each)] for each in step.inputs)
        named[id(step)] = step if isinstance(step, TopicStep) else replace(step, name=names[id(step)], inputs=inputs)
    return replace(plan, outputs=tuple(replace(output, input=named[id(output.input)]) for output in plan.outputs))


def _names(steps: Iterable[Step], known: Mapping[str, Meaning]) -> dict[int, str]:
    """First come those whose name is given, or that are what was known under theirs; then those that are what was known under another; then the rest."""
    free = {name: meaning.lineage for name, meaning in known.items()}
    names: dict[int, str] = {}
    waiting: list[Step] = []
    for step in steps:
        if step.name_is_derived and keeps_state(step) and free.get(step.name) != step.lineage:
            waiting.append(step)
        else:
            names[id(step)] = step.name
            free.pop(step.name, None)
    found = {id(step): name for step in waiting if (name := _taken_by_lineage(free, step.lineage)) is not None}
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
