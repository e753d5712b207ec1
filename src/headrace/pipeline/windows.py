"""Windows in a plan: `rows.window(…)`, the step that `aggregate` makes of it, and what is checked
when it is declared.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pyarrow as pa

from headrace.columnar.columns import CHANGE_TYPE
from headrace.durations import format_us
from headrace.errors import PlanError
from headrace.log.topic_config import check_name
from headrace.operators.windows.late import Correct, Divert, Drop
from headrace.operators.windows.specs import (
    Hopping,
    Session,
    Sliding,
    Tumbling,
    check_emit,
    positive_us,
)
from headrace.pipeline.relation import Relation
from headrace.plan.columns import check_columns
from headrace.plan.plan import (
    SideOutput,
    KeyByStep,
    PipelinePlan,
    SelectStep,
    Step,
    TimeColumn,
    WhereStep,
    topological_order,
    time_column,
)
from headrace.plan.window_steps import WINDOW_END, WINDOW_START, CompareStep, WindowStep

RESERVED = "__"
"""Names that begin so are Headrace's own."""


def check_window(rows: Relation, window: Any, *, late: Any, emit: str) -> None:
    """Raise PlanError if the arguments of `rows.window(…)` do not fit its rows."""
    where = f"{rows.step.path}.window"
    if not isinstance(window, Tumbling | Hopping | Sliding | Session):
        raise PlanError(
            f"The step {where} was given {window!r}, which is not a window.",
            fix='use hr.tumbling("1 minute"), hr.hopping, hr.sliding or hr.session.',
        )
    if not isinstance(late, Drop | Correct | Divert):
        raise PlanError(
            f"The step {where} has late={late!r}.",
            fix='use hr.late.drop(), hr.late.correct("1 hour") or hr.late.divert("late_rows").',
        )
    if isinstance(late, Divert):
        check_name(late.topic, what="topic for late rows", error=PlanError)
        if late.topic.startswith(RESERVED):
            raise PlanError(
                f"The step {where} diverts late rows to {late.topic!r}, a name that is Headrace's"
                " own.",
                fix="choose another name.",
            )
    time = checked_time(rows.step, where=where)
    zone = getattr(window, "timezone", None)
    if zone is not None and rows.schema.field(time.name).type.tz is None:
        raise PlanError(
            f"The step {where} has windows in the time zone {zone}, and {time.name!r} is"
            " TIMESTAMP_NTZ, of which nobody knows in which zone it is.",
            fix="leave the time zone out, or make a TIMESTAMP of it before it comes in.",
        )
    check_emit(emit)


def check_side_outputs(plan: PipelinePlan) -> None:
    """That late rows, and others that steps put aside, go to topics that are for them alone, and
    that steps which share one have the same rows.
    """
    read, written = {step.topic for step in plan.inputs}, {output.name for output in plan.outputs}
    known: dict[str, tuple[Step, SideOutput]] = {}
    for step, side_outputs in [(found, each) for found in plan.steps() for each in found.side_outputs]:
        if side_outputs.topic in read | written:
            what = "reads, so that they would come again" if side_outputs.topic in read else "writes"
            raise PlanError(
                f"The step {step.name!r} {side_outputs.what} to {side_outputs.topic!r}, which the pipeline"
                f" {what}.",
                fix="name a topic of its own.",
            )
        first, same = known.setdefault(side_outputs.topic, (step, side_outputs))
        if (same.schema, same.key, same.what) != (side_outputs.schema, side_outputs.key, side_outputs.what):
            raise PlanError(
                f"The steps {first.name!r} and {step.name!r} divert late rows to {side_outputs.topic!r},"
                " and their rows have different columns or keys.",
                fix="name a topic for each.",
            )


def checked_time(step: Step, *, where: str) -> TimeColumn:
    """The event time that windows and patterns go by."""
    found = time_column(step)
    if found is None:
        raise PlanError(
            f"The step {where} needs an event time, and {step.path} has none: {_why(step)}",
            fix=(
                'declare the topic with event_time=hr.EventTime("…"), or hr.processing_time() for'
                " windows over the time of processing, and keep that column."
            ),
        )
    return found


def _why(step: Step) -> str:
    """Where the event time was lost, or that there never was one."""
    before = [(each, time_column(each)) for each in topological_order([step])]
    known = [(each, time) for each, time in before if time is not None]
    if not known:
        return "no input declares one."
    each, time = known[-1]
    return f"{each.path} has {time.name!r}, which is not kept."


def window_schema(
    found: pa.Schema, by: tuple[str, ...], time: pa.DataType, *, where: str
) -> pa.Schema:
    """The group, the window, and the aggregates."""
    taken = {WINDOW_START, WINDOW_END} & set(found.names)
    if taken:
        raise PlanError(
            f"The step {where} has a column named {min(taken)!r}, as the windows' own.",
            fix="rename the column, or the result, first.",
        )
    bounds = [pa.field(WINDOW_START, time), pa.field(WINDOW_END, time)]
    return pa.schema(
        [
            *(found.field(name) for name in by),
            *bounds,
            *(field for field in found if field.name not in by),
        ]
    )


# `table.compare("7 days")` in a plan: each window beside the same window a period earlier, and what
# is checked when it is declared.


def compared(
    table: Relation, period: str | timedelta, prefix: str, name: str | None
) -> CompareStep:
    """`table.compare(…)`, checked."""
    where = table.step_label("compare", name)
    window = _window(table.step, where=where)
    period_us = positive_us(period, f"period of the step {where}")
    if period_us % window.every_us:
        raise PlanError(
            f"The step {where} compares windows with those {format_us(period_us)} earlier, and"
            f" there are none: one begins every {format_us(window.every_us)}.",
            fix=f"give a multiple of {format_us(window.every_us)}.",
        )
    if not prefix:
        raise PlanError(
            f"The step {where} has no prefix to tell the earlier window's columns by.",
            fix='give one, such as prefix="previous_".',
        )
    by = tuple(each for each in table.key if each not in {WINDOW_START, WINDOW_END})
    fields: dict[str, Any] = {
        "inputs": (table.step,),
        "key": (*by, WINDOW_START, WINDOW_END),
        "is_table": True,
        "by": by,
        "period_us": period_us,
        "window": window,
        "prefix": prefix,
    }
    kernel = CompareStep(name=where, schema=table.schema, **fields).kernel()
    schema = check_columns(
        pa.schema([field for field in kernel.output if field.name != CHANGE_TYPE]),
        where=f"The step {where}",
    )
    return CompareStep(name=name or "", schema=schema, **fields)


def _window(step: Step, *, where: str) -> Tumbling | Hopping:
    """The windows that a table is made of, behind steps that keep each of them."""
    source = step
    while isinstance(source, SelectStep | WhereStep | KeyByStep | CompareStep):
        source = source.input
    time = time_column(step)
    if (
        not isinstance(source, WindowStep)
        or not {WINDOW_START, WINDOW_END} <= set(step.key)
        or time is None
        or time.name != WINDOW_END
    ):
        raise PlanError(
            f"The step {where} compares windows, and {step.path} is no table of windows.",
            fix=(
                "use it on what window(…).aggregate(…) gives, and keep the columns window_start and"
                " window_end."
            ),
        )
    if not isinstance(source.window, Tumbling | Hopping):
        raise PlanError(
            f"The step {where} compares {source.window}, of which no two begin and end at the same"
            " time of different days.",
            fix="compare tumbling or hopping windows.",
        )
    return source.window
