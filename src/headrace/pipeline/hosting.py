"""Which kernel carries out which step."""

from __future__ import annotations

from headrace.errors import BugError
from headrace.operators.aggregate import AggregateKernel
from headrace.operators.kernel import Kernel
from headrace.pipeline.plan import AggregateStep, Step


def kernel_of(step: Step) -> Kernel:
    if isinstance(step, AggregateStep):
        source = step.input
        row_key = source.key if source.is_table else ()
        return AggregateKernel(
            step.name, source.schema, step.by, step.aggregates, over_table=source.is_table, row_key=row_key, divert=step.errors == "divert"
        )
    raise BugError(f"No kernel carries out the step {step.name!r} ({step.operation}).")
