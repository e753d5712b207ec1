"""Functions over frames of rows when they are declared: what `stream.over(…).aggregate(…)` checks,
and the step it makes.

The step is in `headrace.plan.window_steps`, the kernel in `headrace.operators.row_frames`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pyarrow as pa

from headrace.durations import to_us
from headrace.errors import PlanError, UnfitColumn
from headrace.expressions.expression import parse_expression
from headrace.expressions.function_calls import is_call_column
from headrace.expressions.literals import quoted_name
from headrace.operators.aggregates.specs import ARRIVAL, ORDERED, AggregateSpec
from headrace.operators.row_functions import (
    DENSE_RANK,
    LEAD,
    MAX_OFFSET,
    RANK,
    RowFunction,
)
from headrace.operators.windows.late_policy import Divert, Drop, LatePolicy, drop
from headrace.operators.windows.specs import positive_us
from headrace.pipeline.aggregates import bind_aggregates
from headrace.pipeline.relation import Relation
from headrace.plan import columns as cols
from headrace.plan.columns import Selection
from headrace.plan.plan import Step, TimeColumn, time_column
from headrace.plan.window_steps import OverStep


@dataclass(frozen=True)
class RowFrame:
    """The arguments of `stream.over(…)`, checked. `over` is the event time, None for arrival."""

    by: tuple[str, ...]
    over: TimeColumn | None
    order: tuple[tuple[str, bool], ...]
    rows: int | None
    range_us: int | None
    gap_us: int | None
    late: LatePolicy


def check_frame(
    stream: Relation,
    partition_by: str | Sequence[str] | None,
    *,
    order_by: str | Sequence[str],
    rows: int | None,
    range_: str | timedelta | None,
    gap: str | timedelta | None,
    late: LatePolicy | None,
) -> RowFrame:
    """Check the arguments of `stream.over(…)`."""
    from headrace.pipeline.patterns import tie_order

    where = f"{stream.step.path}.over"
    by = () if partition_by is None else cols.key_columns(partition_by, stream.schema, where=where)
    if rows is not None and range_ is not None:
        raise PlanError(
            f"The step {where} has frames by rows= and by range=.",
            fix="give one of them; for the other use a second over(…) behind it.",
        )
    if rows is not None and (type(rows) is not int or not 1 <= rows <= MAX_OFFSET):
        raise PlanError(
            f"The step {where} has frames of rows={rows!r}.",
            fix=f"give 1 to {MAX_OFFSET:,} rows, the row itself included.",
        )
    if late is not None and not isinstance(late, Drop | Divert):
        raise PlanError(
            f"The step {where} has late={late!r}: a row that was emitted cannot be corrected.",
            fix=(
                'use hr.late.drop() or hr.late.divert("late_rows"), and a longer delay= of the'
                " event time."
            ),
        )
    by_arrival = order_by == ARRIVAL
    time = None if by_arrival else time_column(stream.step)
    if by_arrival and (range_ is not None or gap is not None or late is not None):
        raise PlanError(
            f'The step {where} goes by arrival (order_by="{ARRIVAL}"), and range=, gap= or late= by'
            " event time.",
            fix="leave out order_by, or use rows=.",
        )
    if time is None and not by_arrival:
        raise PlanError(
            f"The step {where} goes by event time, and {stream.step.path} has none.",
            fix=(
                'declare it: event_time=hr.EventTime("placed_at"), and keep that column; or go by'
                f' arrival: order_by="{ARRIVAL}".'
            ),
        )
    return RowFrame(
        by=by,
        over=time,
        order=() if by_arrival else tie_order(stream.schema, order_by, where),
        rows=rows,
        range_us=None if range_ is None else to_us(range_, what=f"range of the step {where}"),
        gap_us=None if gap is None else positive_us(gap, f"gap of the step {where}"),
        late=late or drop(),
    )


def frame_input(
    stream: Relation, frame: RowFrame, results: Mapping[str, Any], *, where: str, errors: str
) -> tuple[Selection | None, tuple[tuple[str, AggregateSpec | RowFunction], ...]]:
    """Check the functions of `over(…).aggregate(…)`, and bind them to columns. Returns the columns
    that must be computed before, if any, and the bound functions.
    """
    if not results:
        raise PlanError(
            f"The step {where} computes nothing.",
            fix="name a result, as in aggregate(mean=hr.agg.avg('price')).",
        )
    for name, spec in results.items():
        if not isinstance(spec, RowFunction | AggregateSpec):
            raise PlanError(
                f"{name!r} of the step {where} is {spec!r}, not a function over rows.",
                fix=f"use hr.agg or hr.over, as in {name}=hr.agg.sum('amount').",
            )
        if isinstance(spec, RowFunction):
            _check_function(name, spec, frame, where=where)
    aggregates = {
        name: _in_order(spec) for name, spec in results.items() if isinstance(spec, AggregateSpec)
    }
    bound: dict[str, AggregateSpec | RowFunction] = {}
    computed: dict[str, str] = {}
    if aggregates:
        aggregation = bind_aggregates(
            stream.step,
            frame.by,
            aggregates,
            where=where,
            keep=tuple(stream.schema.names),
            errors=errors,
        )
        bound |= aggregation.aggregates
        if aggregation.selection is not None:
            own = set(stream.schema.names)
            computed |= {
                name: text for name, text in aggregation.selection.columns if name not in own
            }
    taken = {*stream.schema.names, *computed, *results}
    for name, spec in results.items():
        if isinstance(spec, RowFunction):
            bound[name] = _bound(name, spec, stream.step, computed, taken, where=where)
    selection = None
    if computed:
        texts = [f"{text} AS {quoted_name(name)}" for name, text in computed.items()]
        selection = cols.add_columns(stream.step, texts, {}, where=where)
    return selection, tuple((name, bound[name]) for name in results)


def _check_function(name: str, function: RowFunction, frame: RowFrame, *, where: str) -> None:
    if frame.over is None and function.kind in {LEAD, RANK, DENSE_RANK}:
        raise PlanError(
            f"{name!r} of the step {where} is {function}, and the step goes by arrival"
            f' (order_by="{ARRIVAL}"): no row waits for another, and no two are equal.',
            fix="leave out order_by, so that the step goes by event time.",
        )


def _in_order(spec: AggregateSpec) -> AggregateSpec:
    """An aggregate over frames. `first` and `last` go by the order in which the kernel takes rows,
    which is the frame's. `collect` stops the run when it is full: a row that has part in many
    frames cannot be diverted from one.
    """
    options = dict(spec.options)
    if spec.kind in ORDERED:
        options.setdefault("by", ARRIVAL)
    if spec.kind == "collect":
        options["when_full"] = "stop"
    return replace(spec, options=tuple(options.items()))


def _bound(
    name: str,
    function: RowFunction,
    step: Step,
    computed: dict[str, str],
    taken: set[str],
    *,
    where: str,
) -> RowFunction:
    """The function over a column; an expression becomes a column, which is noted in `computed`."""
    if function.column is None:
        return function
    expression = parse_expression(function.column, step.schema, where=f"{where}, {name!r}")
    if expression.column is not None and not is_call_column(expression.column):
        return replace(function, column=expression.column)
    if expression.type is None:
        raise UnfitColumn(
            f"The type of {expression.text!r} in {name!r} of the step {where} is not known.",
            fix=f"say it: CAST({expression.text} AS DOUBLE).",
        )
    column = f"{name}_of"
    while column in taken:
        column += "_"
    taken.add(column)
    computed[column] = expression.text
    return replace(function, column=column)


def over_step(
    stream: Relation,
    source: Step,
    frame: RowFrame,
    results: tuple[tuple[str, AggregateSpec | RowFunction], ...],
    name: str | None,
    *,
    where: str,
) -> OverStep:
    """The step of `over(…).aggregate(…)`. `source` has the stream's columns and computed ones."""
    step = OverStep(
        name=where,
        inputs=(source,),
        schema=stream.schema,
        key=stream.key,
        columns=tuple(stream.schema.names),
        by=frame.by,
        over=frame.over,
        order=frame.order,
        rows=frame.rows,
        range_us=frame.range_us,
        gap_us=frame.gap_us,
        results=results,
        late=frame.late,
    )
    output = step.kernel().output
    added = [output.field(index) for index in range(len(stream.schema), len(output))]
    schema = cols.check_columns(pa.schema([*stream.schema, *added]), where=f"The step {where}")
    return replace(step, name=name or "", schema=schema)
