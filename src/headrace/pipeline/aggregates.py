"""What `group_by(…).aggregate(…)` makes of a schema: each aggregate bound to the type of its
column, and a selection before it where an aggregate reads an expression.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.errors import PlanError, StreamOnly, UnfitColumn, UnknownColumn
from headrace.operators.aggregates.specs import AggregateSpec, UnfitType
from headrace.pipeline.relation import Relation
from headrace.plan import columns as cols
from headrace.plan.columns import Selection, check_columns, selected
from headrace.plan.expressions import Expression, read
from headrace.plan.expressions.literals import quoted_name
from headrace.plan.join_steps import DistinctStep, SettleStep, TopStep
from headrace.plan.plan import DIVERT, NULL, SelectStep, Step, UnionStep, time_column
from headrace.types.schema import type_name

if TYPE_CHECKING:
    from headrace.operators.joins.top import Order


@dataclass(frozen=True)
class Aggregation:
    """Checked aggregates. `selection` is what must be computed before, if anything: kernels only
    see columns.
    """

    selection: Selection | None
    schema: pa.Schema
    aggregates: tuple[tuple[str, AggregateSpec], ...]


def aggregated(
    step: Step,
    by: tuple[str, ...],
    aggregates: Mapping[str, Any],
    *,
    where: str,
    keep: tuple[str, ...] = (),
    in_windows: bool = False,
    errors: str = NULL,
) -> Aggregation:
    """The aggregates over a step, grouped by columns it has, and maybe by windows. `keep`: other
    columns that a selection before it must leave.
    """
    if not aggregates:
        raise PlanError(
            f"The step {where} aggregates nothing.",
            fix="name a result, as in aggregate(orders=hr.agg.count()).",
        )
    computed: dict[str, str] = {}
    for name, spec in aggregates.items():
        _check(name, spec, step, in_windows=in_windows, where=where)
        _check_diverting(name, spec, step, errors, where=where)
    bound = tuple(
        (name, _bound(name, _timed(name, spec, step, where=where), step, computed, where=where))
        for name, spec in aggregates.items()
    )
    results = [pa.field(name, spec.type) for name, spec in bound]
    schema = check_columns(
        pa.schema([*(step.schema.field(name) for name in by), *results]), where=f"The step {where}"
    )
    selection = _before(step, (*by, *keep), bound, computed, where=where) if computed else None
    return Aggregation(selection, schema, bound)


def _check(name: str, spec: Any, step: Step, *, in_windows: bool, where: str) -> None:
    if not isinstance(spec, AggregateSpec):
        raise PlanError(
            f"{name!r} of the step {where} is {spec!r}, not an aggregate.",
            fix=f"use hr.agg, as in {name}=hr.agg.sum('amount').",
        )
    if step.is_table and not spec.takes_tables:
        raise StreamOnly(
            f"{name!r} of the step {where} is {spec}, which cannot take rows back, and {step.path}"
            " is a table, whose rows change.",
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


def _check_diverting(
    name: str, spec: AggregateSpec, step: Step, errors: str, *, where: str
) -> None:
    """A row that a user's aggregate refused must not be taken back from it later, and which rows
    those were is remembered nowhere.
    """
    if step.is_table and spec.kind == "custom" and errors == DIVERT:
        raise StreamOnly(
            f"{name!r} of the step {where} is {spec}, and {step.path} is a table: a row that was"
            " diverted when it came would be taken back when it goes.",
            fix=(
                'leave out errors="divert", and leave out with where(…) the rows that the aggregate'
                " cannot take."
            ),
        )


def _timed(name: str, spec: AggregateSpec, step: Step, *, where: str) -> AggregateSpec:
    """An aggregate that goes by event time: by the column that it names, or else by the step's
    own.
    """
    if "time" not in dict(spec.options):
        return spec
    named, own = spec.option("time"), time_column(step)
    if named is None and own is None:
        raise PlanError(
            f"{name!r} of the step {where} is {spec}, which goes by event time, and {step.path}"
            " has none.",
            fix=(
                'say which column has the time, as in time="placed_at", or declare it:'
                ' event_time=hr.EventTime("placed_at").'
            ),
        )
    column = named or (own.name if own else "")
    if column not in step.schema.names:
        raise UnknownColumn(column, step.schema.names, where=f"{name!r} of the step {where}")
    if not pa.types.is_timestamp(kind := step.schema.field(column).type):
        raise UnfitColumn(
            f"{name!r} of the step {where} goes by the time in {column!r}, which is"
            f" {type_name(kind)}.",
            fix="name a TIMESTAMP.",
        )
    return replace(
        spec,
        options=tuple(
            (option, column if option == "time" else value) for option, value in spec.options
        ),
    )


def _bound(
    name: str, spec: AggregateSpec, step: Step, computed: dict[str, str], *, where: str
) -> AggregateSpec:
    if spec.column is None:
        return spec.bound(None, None)
    expression = read(spec.column, step.schema, where=f"{where}, aggregate {name!r}")
    try:
        return spec.bound(
            _column_of(name, expression, step, computed), _known_type(expression, name, where=where)
        )
    except UnfitType as unfit:
        raise UnfitColumn(
            f"{name!r} of the step {where} is {spec}, but {spec.column!r} is"
            f" {type_name(_known_type(expression, name, where=where))}.",
            fix=f"{spec.kind} takes {unfit.fits}.",
        ) from None


def _known_type(expression: Expression, name: str, *, where: str) -> pa.DataType:
    if expression.type is None:
        raise UnfitColumn(
            f"The type of {expression.text!r} in {name!r} of the step {where} cannot be told.",
            fix=f"say it: CAST({expression.text} AS DOUBLE).",
        )
    return expression.type


def _column_of(name: str, expression: Expression, step: Step, computed: dict[str, str]) -> str:
    """The column an aggregate reads; an expression gets one, which is computed before."""
    if expression.column is not None:
        return expression.column
    column = f"{name}_of"
    while column in step.schema.names or computed.get(column, expression.text) != expression.text:
        column += "_"
    computed[column] = expression.text
    return column


def _before(
    step: Step,
    by: tuple[str, ...],
    bound: tuple[tuple[str, AggregateSpec], ...],
    computed: dict[str, str],
    *,
    where: str,
) -> Selection:
    """The group's columns, a table's key, the columns that are aggregated as they are, and those
    that are computed.
    """
    key = step.key if step.is_table else ()
    read_as_they_are = [name for _, spec in bound for name in spec.reads if name not in computed]
    plain = dict.fromkeys([*key, *by, *read_as_they_are])
    return selected(step, list(plain), computed, where=where)


# Operations on tables alone: the first rows of each group, the different rows, and settling what
# was told under two keys or more than once.


_NUMBER = "_table"
_ORDERED = re.compile(r"^\s*(?P<column>.+?)(?:\s+(?P<way>asc|desc))?\s*$", re.IGNORECASE)


def top(
    table: Relation,
    n: int,
    by: str | Sequence[str],
    per: str | Sequence[str] | None,
    name: str | None,
) -> Step:
    """`table.top(…)`, checked."""
    from headrace.operators.joins.top import MOST

    where = table.step_label("top", name)
    if not 1 <= n <= MOST:
        raise PlanError(
            f"The step {where} asks for the first {n!r} rows.", fix=f"ask for 1 to {MOST:,}."
        )
    order = tuple(
        _order(each, table, where=where) for each in ([by] if isinstance(by, str) else by)
    )
    if not order:
        raise PlanError(
            f"The step {where} names no order.",
            fix='say by what rows are ordered: by="revenue", or by="name ASC".',
        )
    groups = () if per is None else cols.key(per, table.schema, where=where)
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
    return step if set(groups) <= set(table.key) else settled(step)


def _order(text: str, table: Relation, *, where: str) -> Order:
    """A column, the largest first unless it says ASC."""
    found = _ORDERED.match(text)
    if found is None:
        raise PlanError(
            f"The step {where} is ordered by {text!r}.",
            fix='name a column: by="revenue", or by="name ASC".',
        )
    (column,) = cols.key(found["column"], table.schema, where=where)
    return column, (found["way"] or "desc").lower() == "desc"


def distinct(table: Relation, columns: Sequence[str], name: str | None) -> Step:
    """`table.distinct(…)`, checked."""
    key = cols.key(
        columns or table.schema.names, table.schema, where=table.step_label("distinct", name)
    )
    schema = pa.schema([table.schema.field(each) for each in key])
    return DistinctStep(
        name=name or "", inputs=(table.step,), schema=schema, key=key, is_table=True
    )


def first_of_each(union: Step, name: str | None) -> Step:
    """Of tables that are united, for each key the row of the first table that has one: rows are
    told apart by the number of their table until it is settled.
    """
    schema = union.schema.append(pa.field(_NUMBER, pa.int32(), nullable=False))
    own, key = tuple((column, quoted_name(column)) for column in union.schema.names), union.key
    numbered = [
        SelectStep(
            inputs=(table,),
            schema=schema,
            key=(*key, _NUMBER),
            is_table=True,
            columns=(*own, (_NUMBER, str(number))),
        )
        for number, table in enumerate(union.inputs)
    ]
    together = UnionStep(inputs=tuple(numbered), schema=schema, key=(*key, _NUMBER), is_table=True)
    first = TopStep(
        name=name or "",
        inputs=(together,),
        schema=schema,
        key=together.key,
        is_table=True,
        n=1,
        order=((_NUMBER, False),),
        per=key,
    )
    return settled(
        SelectStep(inputs=(first,), schema=union.schema, key=key, is_table=True, columns=own)
    )


def settled(step: Step) -> SettleStep:
    return SettleStep(inputs=(step,), schema=step.schema, key=step.key, is_table=True)
