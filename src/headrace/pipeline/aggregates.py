"""Aggregates, rankings and distinct rows when they are declared: what `aggregate(…)`,
`table.top(…)`, `table.distinct(…)` and a union of tables check, and the steps they add to the plan.

An aggregate is bound to the type of its column. Kernels see columns only, so an aggregate of an
expression gets a selection before it, which computes the expression.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.error_policy import DIVERT, NULL
from headrace.errors import PlanError, StreamOnly, UnfitColumn, UnknownColumn
from headrace.expressions.expression import parse_expression
from headrace.expressions.function_calls import is_call_column
from headrace.expressions.literals import quoted_name
from headrace.operators.aggregates.specs import (
    ARRIVAL,
    AggregateSpec,
    UnfitType,
    check_order,
)
from headrace.pipeline.relation import Relation
from headrace.plan import columns as cols
from headrace.plan.columns import Selection, check_columns, select_columns
from headrace.plan.join_steps import DistinctStep, RankStep, SettleStep, TopStep
from headrace.plan.plan import SelectStep, Step, UnionStep, aggregate_code, time_column
from headrace.types.schema import type_name

if TYPE_CHECKING:
    from headrace.operators.top_rows import Order


@dataclass(frozen=True)
class Aggregation:
    """Checked aggregates: the schema of their result, and the selection that must be computed
    before them, if any.
    """

    selection: Selection | None
    schema: pa.Schema
    aggregates: tuple[tuple[str, AggregateSpec], ...]


def bind_aggregates(
    step: Step,
    by: tuple[str, ...],
    aggregates: Mapping[str, Any],
    *,
    where: str,
    keep: tuple[str, ...] = (),
    in_windows: bool = False,
    errors: str = NULL,
) -> Aggregation:
    """Check aggregates over a step, and bind them to the types of its columns.

    Args:
        step: The step whose rows are aggregated.
        by: The columns that make a group.
        aggregates: What the user declared, by the name of the result's column.
        where: How errors call the step.
        keep: Further columns that a selection before the aggregates must keep.
        in_windows: Whether the rows are in windows.
        errors: The declared error policy.
    """
    if not aggregates:
        raise PlanError(
            f"The step {where} aggregates nothing.",
            fix="name a result, as in aggregate(orders=hr.agg.count()).",
        )
    for name, spec in aggregates.items():
        _check_aggregate(name, spec, step, in_windows=in_windows, errors=errors, where=where)
    computed: dict[str, str] = {}
    bound = tuple(
        (name, _bind(name, _complete(name, spec, step, where=where), step, computed, where=where))
        for name, spec in aggregates.items()
    )
    results = [pa.field(name, spec.type) for name, spec in bound]
    schema = check_columns(
        pa.schema([*(step.schema.field(name) for name in by), *results]), where=f"The step {where}"
    )
    selection = None
    if computed:
        key = step.key if step.is_table else ()
        read_as_is = [name for _, spec in bound for name in spec.reads if name not in computed]
        plain = dict.fromkeys([*key, *by, *keep, *read_as_is])
        selection = select_columns(step, list(plain), computed, where=where)
    return Aggregation(selection, schema, bound)


def _check_aggregate(
    name: str, spec: Any, step: Step, *, in_windows: bool, errors: str, where: str
) -> None:
    if not isinstance(spec, AggregateSpec):
        raise PlanError(
            f"{name!r} of the step {where} is {spec!r}, not an aggregate.",
            fix=f"use hr.agg, as in {name}=hr.agg.sum('amount').",
        )
    if step.is_table and not spec.takes_tables:
        raise StreamOnly(
            f"{name!r} of the step {where} is {spec}, which cannot retract rows, and {step.path} is"
            " a table, whose rows change.",
            fix=(
                "use an exact aggregate such as count_distinct, or aggregate the stream that the"
                " table is made of."
            ),
        )
    if spec.kind == "rate" and not in_windows:
        raise PlanError(
            f"{name!r} of the step {where} is {spec}, which goes by the length of a window, and"
            " there is none.",
            fix='use it behind window(…), as in window(hr.tumbling("1 minute")).aggregate(…).',
        )
    if spec.kind == "custom":
        aggregate_code(
            spec.option("aggregate"), where=f"the aggregate {name!r} of the step {where}"
        )
    # Which rows a custom aggregate refused is not remembered, so it could not be spared their
    # retraction.
    if step.is_table and spec.kind == "custom" and errors == DIVERT:
        raise StreamOnly(
            f"{name!r} of the step {where} is {spec}, and {step.path} is a table: a row that was"
            " diverted when it came would be retracted when it goes.",
            fix=(
                'leave out errors="divert", and leave out with where(…) the rows that the aggregate'
                " cannot take."
            ),
        )


def _complete(name: str, spec: AggregateSpec, step: Step, *, where: str) -> AggregateSpec:
    """An aggregate with the column of the time it goes by, and with its condition in its columns.
    The condition is checked by itself, so that an error shows what was written.
    """
    if spec.kind == "count" and spec.column is not None:
        _warn_of_counted_condition(name, spec.column, step, where=where)
    if spec.where is not None:
        cols.parse_condition(spec.where, step.schema, where=f"{where}, where= of {name!r}")
    return _with_times(name, spec, step, where=where).conditional()


def _warn_of_counted_condition(name: str, text: str, step: Step, *, where: str) -> None:
    """Warn that a condition is counted where it is false, too. Columns are counted as asked for."""
    expression = parse_expression(text, step.schema, where=f"{where}, aggregate {name!r}")
    is_condition = expression.type is not None and pa.types.is_boolean(expression.type)
    if is_condition and (expression.column is None or is_call_column(expression.column)):
        warnings.warn(
            f"{name!r} of the step {where} counts every row on which {text!r} is not null, whether"
            f" it is true or not. To count those for which it is true, write"
            f" hr.agg.count(where={text!r}).",
            stacklevel=2,
        )


def _with_times(name: str, spec: AggregateSpec, step: Step, *, where: str) -> AggregateSpec:
    """An aggregate that goes by event time, with the column that it names or else the step's.
    `first` and `last` go by arrival where there is none, or where they say so.
    """
    if spec.kind not in {"first", "last"}:
        return _with_time(name, spec, step, where=where)
    by = spec.option("by")
    if by is None and (event_time := time_column(step)) is not None:
        return replace(spec, options=(*spec.options, ("by", quoted_name(event_time.name))))
    return spec.former() if by == ARRIVAL else spec


def _with_time(name: str, spec: AggregateSpec, step: Step, *, where: str) -> AggregateSpec:
    """An aggregate that goes by event time, with the column that it names or else the step's."""
    if "time" not in dict(spec.options):
        return spec
    event_time = time_column(step)
    column = spec.option("time") or (event_time.name if event_time else None)
    if column is None:
        raise PlanError(
            f"{name!r} of the step {where} is {spec}, which goes by event time, and {step.path}"
            " has none.",
            fix=(
                'say which column has the time, as in time="placed_at", or declare it:'
                ' event_time=hr.EventTime("placed_at").'
            ),
        )
    if column not in step.schema.names:
        raise UnknownColumn(column, step.schema.names, where=f"{name!r} of the step {where}")
    if not pa.types.is_timestamp(kind := step.schema.field(column).type):
        raise UnfitColumn(
            f"{name!r} of the step {where} goes by the time in {column!r}, which is"
            f" {type_name(kind)}.",
            fix="name a TIMESTAMP.",
        )
    options = tuple(
        (option, column if option == "time" else value) for option, value in spec.options
    )
    return replace(spec, options=options)


def _bind(
    name: str, spec: AggregateSpec, step: Step, computed: dict[str, str], *, where: str
) -> AggregateSpec:
    """The aggregate bound to its column, and to those by which it compares rows. An expression gets
    a column of its own, which is noted in `computed`.
    """
    if spec.column is None:
        return spec.bound(None, None)
    column, kind = _column_of(spec.column, name, step, computed, where=where)
    compared = [
        (text, *_column_of(text, name, step, computed, where=where)) for text in spec.compared
    ]
    text = spec.column
    try:
        bound = spec.bound(column, kind)
        for text, _, kind in compared:  # noqa: B007 - the error names the one that does not fit
            check_order(kind)
    except UnfitType as unfit:
        raise UnfitColumn(
            f"{name!r} of the step {where} is {spec}, but {text!r} is {type_name(kind)}.",
            fix=f"{spec.kind} takes {unfit.fits}.",
        ) from None
    names = tuple(column for _, column, _ in compared)
    replaced: dict[str, Any] = {"by": names[0], "more": names} if names else {}
    options = tuple((option, replaced.get(option, value)) for option, value in bound.options)
    return replace(bound, options=options)


def _column_of(
    text: str, name: str, step: Step, computed: dict[str, str], *, where: str
) -> tuple[str, pa.DataType]:
    """The column with the value of an expression, and its type."""
    expression = parse_expression(text, step.schema, where=f"{where}, aggregate {name!r}")
    if expression.type is None:
        raise UnfitColumn(
            f"The type of {expression.text!r} in {name!r} of the step {where} is not known.",
            fix=f"say it: CAST({expression.text} AS DOUBLE).",
        )
    column = expression.column
    if column is None or is_call_column(column):
        column = f"{name}_of"
        while (
            column in step.schema.names or computed.get(column, expression.text) != expression.text
        ):
            column += "_"
        computed[column] = expression.text
    return column, expression.type


# Newest rows, rankings, distinct rows and unions of tables


def newest_by(step: Step, by: str | None, *, where: str) -> str | None:
    """The column by which `to_table` finds the newest row: the one that it names, or the event
    time; None for arrival.
    """
    if by is None:
        event_time = time_column(step)
        return None if event_time is None else event_time.name
    if by == ARRIVAL:
        return None
    (column,) = cols.key_columns(by, step.schema, where=where)
    return column


_TABLE_NUMBER = "_table"
_ORDER_TEXT = re.compile(r"^\s*(?P<column>.+?)(?:\s+(?P<way>asc|desc))?\s*$", re.IGNORECASE)


def top_step(
    table: Relation,
    n: int,
    by: str | Sequence[str],
    per: str | Sequence[str] | None,
    name: str | None,
) -> Step:
    """Check `table.top(…)`, and make its steps."""
    from headrace.operators.top_rows import MAX_TOP_ROWS

    where = table.step_label("top", name)
    _check_count(n, MAX_TOP_ROWS, where=where)
    order = _orders(by, table, where=where)
    groups = () if per is None else cols.key_columns(per, table.schema, where=where)
    step = TopStep(
        name=name or "",
        inputs=(table.step,),
        schema=table.schema,
        key=table.key,
        is_table=True,
        n=n,
        order=order,
        per=groups,
    )
    return step if set(groups) <= set(table.key) else settle_step(step)


def ranked_step(
    stream: Relation,
    n: int,
    by: str | Sequence[str],
    per: str | Sequence[str] | None,
    rank: str,
    name: str | None,
) -> Step:
    """Check `stream.top(…)`, and make its step."""
    from headrace.operators.ranked_rows import MAX_RANKED_ROWS, RANK_TYPE

    where = stream.step_label("top", name)
    _check_count(n, MAX_RANKED_ROWS, where=where)
    groups = () if per is None else cols.key_columns(per, stream.schema, where=where)
    ranked = pa.field(rank, RANK_TYPE, nullable=False)
    return RankStep(
        name=name or "",
        inputs=(stream.step,),
        schema=cols.with_column(stream.schema, ranked, where=where),
        key=(*groups, rank),
        is_table=True,
        n=n,
        order=_orders(by, stream, where=where),
        per=groups,
        rank=rank,
    )


def first_step(
    stream: Relation, per: str | Sequence[str], by: str | Sequence[str] | None, name: str | None
) -> Step:
    """Check `stream.first(…)`, and make its step."""
    where = stream.step_label("first", name)
    groups = cols.key_columns(per, stream.schema, where=where)
    order: tuple[Order, ...]
    if by is None or isinstance(by, str):
        column = newest_by(stream.step, by, where=where)
        order = () if column is None else ((column, False),)
    else:
        order = _orders(by, stream, where=where, default="asc")
    return RankStep(
        name=name or "",
        inputs=(stream.step,),
        schema=stream.schema,
        key=groups,
        is_table=True,
        n=1,
        order=order,
        per=groups,
        rank=None,
    )


def _check_count(n: Any, limit: int, *, where: str) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= limit:
        raise PlanError(
            f"The step {where} asks for the first {n!r} rows.", fix=f"ask for 1 to {limit:,}."
        )


def _orders(
    by: str | Sequence[str], rows: Relation, *, where: str, default: str = "desc"
) -> tuple[Order, ...]:
    """The columns that rows are ordered by, of which there is at least one."""
    order = tuple(
        _parse_order(text, rows, where=where, default=default)
        for text in ([by] if isinstance(by, str) else by)
    )
    if not order:
        raise PlanError(
            f"The step {where} names no order.",
            fix='say by what rows are ordered: by="revenue", or by="name ASC".',
        )
    return order


def _parse_order(text: str, table: Relation, *, where: str, default: str) -> Order:
    """A column, and whether the largest comes first. `default` is the way of a text without one."""
    match = _ORDER_TEXT.match(text)
    if match is None:
        raise PlanError(
            f"The step {where} is ordered by {text!r}.",
            fix='name a column: by="revenue", or by="name ASC".',
        )
    (column,) = cols.key_columns(match["column"], table.schema, where=where)
    return column, (match["way"] or default).lower() == "desc"


def distinct_step(table: Relation, columns: Sequence[str], name: str | None) -> Step:
    """Check `table.distinct(…)`, and make its step."""
    key = cols.key_columns(
        columns or table.schema.names, table.schema, where=table.step_label("distinct", name)
    )
    schema = pa.schema([table.schema.field(column) for column in key])
    return DistinctStep(
        name=name or "", inputs=(table.step,), schema=schema, key=key, is_table=True
    )


def first_of_each_key(union: Step, name: str | None) -> Step:
    """The steps of a union of tables that may share keys: of each key, the row of the first table
    that has it.

    Rows are numbered by their table. The lowest number per key wins, and its changes are settled.
    """
    schema = union.schema.append(pa.field(_TABLE_NUMBER, pa.int32(), nullable=False))
    key = union.key
    own = tuple((column, quoted_name(column)) for column in union.schema.names)
    numbered = [
        SelectStep(
            inputs=(table,),
            schema=schema,
            key=(*key, _TABLE_NUMBER),
            is_table=True,
            columns=(*own, (_TABLE_NUMBER, str(number))),
        )
        for number, table in enumerate(union.inputs)
    ]
    together = UnionStep(
        inputs=tuple(numbered), schema=schema, key=(*key, _TABLE_NUMBER), is_table=True
    )
    first = TopStep(
        name=name or "",
        inputs=(together,),
        schema=schema,
        key=together.key,
        is_table=True,
        n=1,
        order=((_TABLE_NUMBER, False),),
        per=key,
    )
    return settle_step(
        SelectStep(inputs=(first,), schema=union.schema, key=key, is_table=True, columns=own)
    )


def settle_step(step: Step) -> SettleStep:
    """A step that merges the changes of each key and tick, which may come from several shards."""
    return SettleStep(inputs=(step,), schema=step.schema, key=step.key, is_table=True)
