"""What an output means: a digest of everything upstream that decides which rows it has.

An edit that changes no meaning goes on with the rows that are there. One that does must not: rows
of the old definition would stay among those of the new one, and nobody would retract them.
`headrace.runtime.query_assignment` stores meanings with a pipeline's state, and decides what
becomes of an output whose meaning has changed.

    orders.where("amount>=100")           the meaning of the view `big`:
          .with_columns(tax="amount*0.2")
          .to_table("id")                 topic orders (id, amount) -> where -> to_table
    view "big": id, amount

Not part of a meaning: the names of steps, the spelling of an expression (`amount>=100` and
`(amount >= 100)` are the same tree), columns that the output does not use, and settings that bound
state or speed. A meaning has two digests, of expressions as they are written and as they are
parsed; it is the same if one of them is. So neither a formatter nor a new version of the parser
changes what an unchanged output means. `tests/plan/test_meanings.py` changes every field of every
step, and names those that are not part of a meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from headrace.plan.plan import Output, PipelinePlan, Step, digest, topological_order


@dataclass(frozen=True)
class Meaning:
    """What an output means."""

    kind: str
    """What it is: a view, a topic, or the side output of a step."""
    written: str
    """A digest in which expressions count as they are written."""
    parsed: str
    """A digest in which they count as they are parsed."""
    reads: tuple[str, ...]
    """The nearest steps with state upstream: those whose changes the output shows."""
    further: str = ""
    """A digest of the settings that meanings lacked at first (`Step.further_meaning`); empty in
    what was stored then, where they are taken to be as they were.
    """

    def is_same(self, other: Meaning) -> bool:
        """Whether the rows of an output of the other meaning are those of this one."""
        return (
            self.kind == other.kind
            and (self.written == other.written or self.parsed == other.parsed)
            and (self.further == other.further or "" in {self.further, other.further})
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        return cls(**{**stored, "reads": tuple(stored["reads"])})


SIDE_OUTPUT = "side output"


def output_meanings(plan: PipelinePlan) -> dict[str, Meaning]:
    """The meaning of each output of a plan, and of each topic that its steps write besides."""
    meanings = {output.name: output_meaning(output) for output in plan.outputs}
    for step in topological_order([output.input for output in plan.outputs]):
        for side_output in step.side_outputs:
            meanings[side_output.topic] = _meaning(SIDE_OUTPUT, step, frozenset(step.schema.names))
    return meanings


def output_meaning(output: Output) -> Meaning:
    """The meaning of an output: of all columns of its rows."""
    return _meaning(output.kind, output.input, frozenset(output.input.schema.names))


def output_steps(plan: PipelinePlan) -> dict[str, tuple[str, ...]]:
    """The names of the steps with state behind each output, and behind each topic that steps write
    besides. Of two plans in which an output means the same, they are in the same order.
    """
    lasts = [(output.name, output.input) for output in plan.outputs]
    for step in topological_order([output.input for output in plan.outputs]):
        lasts += [(side_output.topic, step) for side_output in step.side_outputs]
    return {
        name: tuple(step.name for step in topological_order([last]) if step.keeps_state)
        for name, last in lasts
    }


def _meaning(kind: str, last: Step, columns: frozenset[str]) -> Meaning:
    """1. Find which columns of each step are used downstream. 2. Digest each step behind its
    inputs. A step that only adds columns which nobody uses leaves its input's digest.
    """
    steps = topological_order([last])
    used: dict[int, frozenset[str]] = {id(last): columns}  # 1
    for step in reversed(steps):
        needs = step.column_needs(used[id(step)])
        for source, names in zip(step.inputs, needs, strict=True):
            used[id(source)] = used.get(id(source), frozenset()) | names
    digests: dict[bool, dict[int, str]] = {False: {}, True: {}}
    for step in steps:  # 2
        for parsed, known in digests.items():
            content = step.meaning(used[id(step)], parsed=parsed)
            upstream = [known[id(source)] for source in step.inputs]
            known[id(step)] = upstream[0] if content is None else digest([content, upstream])
    return Meaning(
        kind=kind,
        written=digests[False][id(last)],
        parsed=digests[True][id(last)],
        reads=_nearest_with_state(last),
        further=digest([more for step in steps if (more := step.further_meaning())]),
    )


def _nearest_with_state(last: Step) -> tuple[str, ...]:
    """The steps with state whose changes reach a step through steps without."""
    names: set[str] = set()
    pending = [last]
    while pending:
        step = pending.pop()
        if step.keeps_state and step.operation != "settle":
            names.add(step.name)
        else:
            pending += step.inputs
    return tuple(sorted(names))
