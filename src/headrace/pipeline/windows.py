"""Windows when they are declared: what `rows.window(…)` and `table.compare(…)` check, and the
schema and steps they make. `check_side_outputs` checks the topics for late rows of a whole plan.

The steps are in `headrace.plan.window_steps`, the kernels in `headrace.operators.windows`.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pyarrow as pa

from headrace.columnar.columns import CHANGE_TYPE
from headrace.durations import format_us
from headrace.errors import PlanError
from headrace.names import check_name
from headrace.operators.windows.late_policy import Correct, Divert, Drop, LatePolicy
from headrace.operators.windows.specs import (
    Hopping,
    Session,
    Sliding,
    Tumbling,
    WindowSpec,
    check_emit,
    positive_us,
)
from headrace.pipeline.relation import Relation
from headrace.plan.columns import check_columns
from headrace.plan.plan import (
    KeyByStep,
    PipelinePlan,
    SelectStep,
    SideOutput,
    Step,
    TimeColumn,
    WhereStep,
    time_column,
    topological_order,
)
from headrace.plan.window_steps import (
    WINDOW_END,
    WINDOW_START,
    CompareStep,
    LateMoveStep,
    WindowStep,
)

RESERVED = "__"
"""The prefix of Headrace's own names."""


def without_late_moves(
    rows: Step, window: WindowSpec, late: LatePolicy, over: TimeColumn, by: tuple[str, ...]
) -> Step:
    """The rows of a window's input. Of a table whose rows can change their event time, those that
    would leave a closed window are held back.
    """
    if not rows.is_table or over.name in rows.key:
        return rows
    return LateMoveStep(
        inputs=(rows,),
        schema=rows.schema,
        key=rows.key,
        is_table=True,
        window=window,
        late=late,
        over=over,
        by=by,
    )


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
    time = require_event_time(rows.step, where=where)
    zone = getattr(window, "timezone", None)
    if zone is not None and rows.schema.field(time.name).type.tz is None:
        raise PlanError(
            f"The step {where} has windows in the time zone {zone}, and {time.name!r} is"
            " TIMESTAMP_NTZ, whose time zone is not known.",
            fix="leave the time zone out, or make a TIMESTAMP of it before it comes in.",
        )
    check_emit(emit)


def check_side_outputs(plan: PipelinePlan) -> None:
    """Raise PlanError if a side output goes to a topic that the pipeline reads or writes, or if two
    steps send different rows to one topic.
    """
    read = {step.topic for step in plan.inputs}
    written = {output.name for output in plan.outputs}
    by_topic: dict[str, tuple[Step, SideOutput]] = {}
    for step in plan.steps():
        for side in step.side_outputs:
            if side.topic in read | written:
                use = "reads, so that they would come again" if side.topic in read else "writes"
                raise PlanError(
                    f"The step {step.name!r} {side.what} to {side.topic!r}, which the pipeline"
                    f" {use}.",
                    fix="name a topic of its own.",
                )
            first, first_side = by_topic.setdefault(side.topic, (step, side))
            if (first_side.schema, first_side.key, first_side.what) != (
                side.schema,
                side.key,
                side.what,
            ):
                raise PlanError(
                    f"The steps {first.name!r} and {step.name!r} divert late rows to"
                    f" {side.topic!r}, and their rows have different columns or keys.",
                    fix="name a topic for each.",
                )


def require_event_time(step: Step, *, where: str) -> TimeColumn:
    """The event time of a step's rows. Raises PlanError, with where it was lost, if there is
    none.
    """
    time = time_column(step)
    if time is not None:
        return time
    upstream = [(each, time_column(each)) for each in topological_order([step])]
    timed = [(each, column) for each, column in upstream if column is not None]
    reason = (
        f"{timed[-1][0].path} has {timed[-1][1].name!r}, which is not kept."
        if timed
        else "no input declares one."
    )
    raise PlanError(
        f"The step {where} needs an event time, and {step.path} has none: {reason}",
        fix=(
            'declare the topic with event_time=hr.EventTime("…"), or hr.processing_time() for'
            " windows over the time of processing, and keep that column."
        ),
    )


def window_schema(
    aggregated: pa.Schema, by: tuple[str, ...], time: pa.DataType, *, where: str
) -> pa.Schema:
    """The schema of windows: the group's columns, the window's bounds, and the aggregates."""
    taken = {WINDOW_START, WINDOW_END} & set(aggregated.names)
    if taken:
        raise PlanError(
            f"The step {where} has a column named {min(taken)!r}, as the windows' own.",
            fix="rename the column, or the result, first.",
        )
    groups = [aggregated.field(name) for name in by]
    bounds = [pa.field(WINDOW_START, time), pa.field(WINDOW_END, time)]
    return pa.schema([*groups, *bounds, *(each for each in aggregated if each.name not in by)])


def compare_step(
    table: Relation, period: str | timedelta, prefix: str, name: str | None
) -> CompareStep:
    """Check `table.compare(…)`, and make its step."""
    where = table.step_label("compare", name)
    # The windows of a table's rows, which steps behind the windows must have kept.
    source = table.step
    while isinstance(source, SelectStep | WhereStep | KeyByStep | CompareStep):
        source = source.input
    time = time_column(table.step)
    if (
        not isinstance(source, WindowStep)
        or not {WINDOW_START, WINDOW_END} <= set(table.step.key)
        or time is None
        or time.name != WINDOW_END
    ):
        raise PlanError(
            f"The step {where} compares windows, and {table.step.path} is no table of windows.",
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
    window = source.window
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
    by = tuple(column for column in table.key if column not in {WINDOW_START, WINDOW_END})
    step = CompareStep(
        name=where,
        inputs=(table.step,),
        schema=table.schema,
        key=(*by, WINDOW_START, WINDOW_END),
        is_table=True,
        by=by,
        period_us=period_us,
        window=window,
        prefix=prefix,
    )
    schema = check_columns(
        pa.schema([field for field in step.kernel().output if field.name != CHANGE_TYPE]),
        where=f"The step {where}",
    )
    return replace(step, name=name or "", schema=schema)
