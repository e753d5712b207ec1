"""Stable names for steps: the one the user gave, or one derived from the output a step feeds and
its operation.

A step's state is found by its name after an edit, so edits elsewhere must not change it. A derived
name is `OUTPUT.OPERATION`, where OUTPUT is the first declared output that the step feeds. Of
several steps with the same operation, the one nearest to the input has the plain name and the next
ones are `OUTPUT.OPERATION-2`, …. The branches of a union other than the first are named after their
source, `OUTPUT.SOURCE.OPERATION`, so a union that is added later, or gets another branch, renames
nothing.

`fingerprints` finds the name under which a step's state is known when an edit has changed the
derived one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from headrace.errors import DuplicateStep
from headrace.plan.plan import Output, Step, TopicStep, topological_order


def with_names(inputs: Sequence[TopicStep], outputs: Sequence[Output]) -> tuple[Output, ...]:
    """The outputs over steps that all have names. Raises DuplicateStep if two steps would have the
    same one.
    """
    names = {id(step): step.name for step in inputs}
    for output in outputs:
        _name_upstream(output.input, output.step_prefix, names)
    steps = topological_order([*inputs, *(output.input for output in outputs)])
    _refuse_duplicates(steps, names)
    named: dict[int, Step] = {}
    for step in steps:
        if isinstance(step, TopicStep):
            named[id(step)] = step
            continue
        named[id(step)] = replace(
            step,
            name=names[id(step)],
            inputs=tuple(named[id(source)] for source in step.inputs),
            name_is_derived=not step.name,
        )
    return tuple(replace(output, input=named[id(output.input)]) for output in outputs)


def _name_upstream(last: Step, prefix: str, names: dict[int, str]) -> None:
    """Name the steps without a name on the main line that ends in `last`, then those on other
    branches of its unions, each under a prefix of its own.
    """
    branches = [(last, prefix)]
    counts: dict[str, int] = {}
    while branches:
        branch, branch_prefix = branches.pop(0)
        line = _main_line(branch, names)
        for step in line:
            # Counted even if the step has a name, so that naming one step renames no other.
            derived = _numbered(f"{branch_prefix}.{step.operation}", counts)
            names[id(step)] = step.name or derived
        for step in reversed(line):
            others = [source for source in step.inputs[1:] if id(source) not in names]
            branches += [
                (source, _numbered(f"{prefix}.{_source_name(source)}", counts)) for source in others
            ]


def _main_line(last: Step, names: dict[int, str]) -> list[Step]:
    """The steps from the first without a name down to `last`, along first inputs."""
    line = []
    step: Step | None = last
    while step is not None and id(step) not in names:
        line.append(step)
        step = step.inputs[0] if step.inputs else None
    return line[::-1]


def _source_name(step: Step) -> str:
    while step.inputs:
        step = step.inputs[0]
    return step.name


def _numbered(name: str, counts: dict[str, int]) -> str:
    counts[name] = counts.get(name, 0) + 1
    return name if counts[name] == 1 else f"{name}-{counts[name]}"


def _refuse_duplicates(steps: Iterable[Step], names: dict[int, str]) -> None:
    by_name: dict[str, Step] = {}
    for step in steps:
        name = names[id(step)]
        if name in by_name:
            raise DuplicateStep(
                f"Two steps have the name {name!r}: {_call_text(by_name[name])} and"
                f" {_call_text(step)}.",
                fix="give one of them another name with name=….",
            )
        by_name[name] = step


def _call_text(step: Step) -> str:
    summary = step.summary()
    return f"{step.operation}({summary})" if summary else step.operation
