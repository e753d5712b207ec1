"""Stable names for steps: the one the user gave, or one derived from the output a step feeds and its operation.

A name finds a step's state after an edit, so edits elsewhere must not change it. A derived name is `OUTPUT.OPERATION`, where OUTPUT is the first
declared output that the step feeds. Of several steps with the same operation, the one nearest to the input has the plain name and the next ones are
`OUTPUT.OPERATION-2`, …. The branches of a union are named for themselves, `OUTPUT.SOURCE.OPERATION`, all but the first: so a union that is added later,
or gets another branch, renames nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from headrace.errors import DuplicateStep
from headrace.pipeline.plan import Output, Step, TopicStep, ordered


def with_names(inputs: Sequence[TopicStep], outputs: Sequence[Output]) -> tuple[Output, ...]:
    """The same outputs over steps that all have names. DuplicateStep if two steps would have the same one."""
    names = {id(each): each.name for each in inputs}
    for output in outputs:
        _name_upstream(output.input, output.name, names)
    steps = ordered([*inputs, *(output.input for output in outputs)])
    _refuse_duplicates(steps, names)
    named: dict[int, Step] = {}
    for step in steps:
        given = tuple(named[id(each)] for each in step.inputs)
        named[id(step)] = step if isinstance(step, TopicStep) else replace(step, name=names[id(step)], inputs=given, name_is_derived=not step.name)
    return tuple(replace(output, input=named[id(output.input)]) for output in outputs)


def _name_upstream(last: Step, prefix: str, names: dict[int, str]) -> None:
    """Name what has no name yet on the main line that ends in `last`, then the other branches of its unions, each under its own prefix."""
    branches = [(last, prefix)]
    taken: dict[str, int] = {}
    while branches:
        step, under = branches.pop(0)
        line = _main_line(step, names)
        for each in line:
            derived = _numbered(f"{under}.{each.operation}", taken)  # counted even if not needed: naming one step renames no other
            names[id(each)] = each.name or derived
        for each in reversed(line):
            others = [branch for branch in each.inputs[1:] if id(branch) not in names]
            branches += [(branch, _numbered(f"{prefix}.{_source(branch)}", taken)) for branch in others]


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
                f"Two steps have the name {name!r}: {_described(seen[name])} and {_described(step)}.",
                fix="give one of them another name with name=….",
            )
        seen[name] = step


def _described(step: Step) -> str:
    summary = step.summary()
    return f"{step.operation}({summary})" if summary else step.operation
