"""Aggregates, rankings and distinct rows when they are declared: what `aggregate(…)`,
`table.top(…)`, `table.distinct(…)` and a union of tables check, and the steps they add to the plan.

An aggregate is bound to the type of its column. Kernels see columns only, so an aggregate of an
expression gets a selection before it, which computes the expression.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.error_policy import DIVERT, NULL
from headrace.errors import PlanError, StreamOnly, UnfitColumn, UnknownColumn
from headrace.expressions.expression import parse_expression
from headrace.expressions.literals import quoted_name
from headrace.operators.aggregates.specs import AggregateSpec, UnfitType
from headrace.pipeline.relation import Relation
from headrace.plan import columns as cols
from headrace.plan.columns import Selection, check_columns, select_columns
from headrace.plan.join_steps import DistinctStep, SettleStep, TopStep
from headrace.plan.plan import SelectStep, Step, UnionStep, time_column
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
        (name, _bind(name, _with_time(name, spec, step, where=where), step, computed, where=where))
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
    """The aggregate bound to its column. An expression gets a column of its own, which is noted in
    `computed`.
    """
    if spec.column is None:
        return spec.bound(None, None)
    expression = parse_expression(spec.column, step.schema, where=f"{where}, aggregate {name!r}")
    if expression.type is None:
        raise UnfitColumn(
            f"The type of {expression.text!r} in {name!r} of the step {where} is not known.",
            fix=f"say it: CAST({expression.text} AS DOUBLE).",
        )
    column = expression.column
    if column is None:
        column = f"{name}_of"
        while (
            column in step.schema.names or computed.get(column, expression.text) != expression.text
        ):
            column += "_"
        computed[column] = expression.text
    try:
        return spec.bound(column, expression.type)
    except UnfitType as unfit:
        raise UnfitColumn(
            f"{name!r} of the step {where} is {spec}, but {spec.column!r} is"
            f" {type_name(expression.type)}.",
            fix=f"{spec.kind} takes {unfit.fits}.",
        ) from None


# Rankings, distinct rows and unions of tables


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
    if not 1 <= n <= MAX_TOP_ROWS:
        raise PlanError(
            f"The step {where} asks for the first {n!r} rows.",
            fix=f"ask for 1 to {MAX_TOP_ROWS:,}.",
        )
    orders = [by] if isinstance(by, str) else by
    order = tuple(_parse_order(text, table, where=where) for text in orders)
    if not order:
        raise PlanError(
            f"The step {where} names no order.",
            fix='say by what rows are ordered: by="revenue", or by="name ASC".',
        )
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


def _parse_order(text: str, table: Relation, *, where: str) -> Order:
    """A column, and whether the largest comes first, as it does unless the text says ASC."""
    match = _ORDER_TEXT.match(text)
    if match is None:
        raise PlanError(
            f"The step {where} is ordered by {text!r}.",
            fix='name a column: by="revenue", or by="name ASC".',
        )
    (column,) = cols.key_columns(match["column"], table.schema, where=where)
    return column, (match["way"] or "desc").lower() == "desc"


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
