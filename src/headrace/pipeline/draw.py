"""A plan for people: as a tree of text."""

from __future__ import annotations

from headrace.pipeline.plan import PipelinePlan, Step


def tree(plan: PipelinePlan) -> str:
    """Each output, and below it the steps that lead to it."""
    lines = [f"pipeline {plan.name}"]
    for output in plan.outputs:
        lines.append(f"  {output.kind} {output.name}")
        lines += _below(output.input, 2)
    return "\n".join(lines)


def _below(step: Step, depth: int) -> list[str]:
    lines = [f"{'  ' * depth}{step.operation} {step.name} {step.summary()}"]
    for each in step.inputs:
        lines += _below(each, depth + 1)
    return lines
