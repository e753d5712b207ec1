"""Which row-local steps need not go through Spark: those behind a topic whose expressions Python can compute with the same results."""

from __future__ import annotations

from functools import lru_cache

from headrace.engine.row_local import Compute, Keep, RowStep
from headrace.pipeline.expressions.in_arrow import in_arrow
from headrace.pipeline.plan import KeyByStep, SelectStep, Step, TopicStep, WhereStep

Behind = tuple[TopicStep, tuple[RowStep, ...]]
"""A stream's topic, and what is done to its rows where they are read."""


def local_steps(step: Step, *, hopeful: bool) -> Behind | None:
    """How a step's rows come from a topic without Spark; None if they do not. Where several steps use them, each reads for itself: that costs less than keeping them.

    `hopeful`: also where some rows may turn out to be Spark's (`json_fields.Inexact`); the batch is then done again without.
    """
    done: list[RowStep] = []
    while not isinstance(step, TopicStep):
        if not isinstance(step, KeyByStep):
            made = _row_step(step, hopeful)
            if made is None:
                return None
            done.insert(0, made)
        step = step.input
    return None if step.is_table or step.device_time is not None else (step, tuple(done))


@lru_cache(maxsize=1000)
def _row_step(step: Step, hopeful: bool) -> RowStep | None:
    """Steps are compared by identity, so each is looked at once."""
    if step.is_table:
        return None
    if isinstance(step, WhereStep):
        condition = in_arrow(step.expression, step.input.schema, hopeful=hopeful)
        return None if condition is None else Keep(condition)
    if isinstance(step, SelectStep):
        nodes = [in_arrow(each, step.input.schema, hopeful=hopeful) for each in step.expressions]
        columns = tuple((name, node) for (name, _), node in zip(step.columns, nodes, strict=True) if node is not None)
        return Compute(columns, step.schema) if len(columns) == len(nodes) else None
    return None
