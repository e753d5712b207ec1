"""Which kernel carries out which step."""

from __future__ import annotations

from headrace.errors import BugError
from headrace.operators.aggregate import AggregateKernel
from headrace.operators.kernel import Kernel
from headrace.pipeline.plan import AggregateStep, Step


def kernel_of(step: Step) -> Kernel:
    if isinstance(step, AggregateStep):
        return AggregateKernel(step.name, step.input.schema, step.by, step.aggregates, over_table=step.input.is_table)
    raise BugError(f"No kernel carries out the step {step.name!r} ({step.operation}).")
