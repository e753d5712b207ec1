"""What `group_by(…).aggregate(…)` makes of a schema: each aggregate bound to the type of its column, and a selection before it where an aggregate reads an expression."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from headrace.errors import PlanError, StreamOnly, UnfitColumn
from headrace.log.schema import type_name
from headrace.operators.specs import AggregateSpec, UnfitType
from headrace.pipeline.columns import Selection, check_columns, selected
from headrace.pipeline.expressions import Expression, read
from headrace.pipeline.plan import Step


@dataclass(frozen=True)
class Aggregation:
    """Checked aggregates. `selection` is what must be computed before, if anything: kernels only see columns."""

    selection: Selection | None
    schema: pa.Schema
    aggregates: tuple[tuple[str, AggregateSpec], ...]


def aggregated(step: Step, by: tuple[str, ...], aggregates: Mapping[str, Any], *, where: str, keep: tuple[str, ...] = ()) -> Aggregation:
    """The aggregates over a step, grouped by columns it has. `keep`: other columns that a selection before it must leave."""
    if not aggregates:
        raise PlanError(f"The step {where} aggregates nothing.", fix="name a result, as in aggregate(orders=hr.agg.count()).")
    computed: dict[str, str] = {}
    bound = tuple((name, _bound(name, spec, step, computed, where=where)) for name, spec in aggregates.items())
    results = [pa.field(name, spec.type) for name, spec in bound]
    schema = check_columns(pa.schema([*(step.schema.field(name) for name in by), *results]), where=f"The step {where}")
    selection = _before(step, (*by, *keep), bound, computed, where=where) if computed else None
    return Aggregation(selection, schema, bound)


def _bound(name: str, spec: Any, step: Step, computed: dict[str, str], *, where: str) -> AggregateSpec:
    if not isinstance(spec, AggregateSpec):
        raise PlanError(f"{name!r} of the step {where} is {spec!r}, not an aggregate.", fix=f"use hr.agg, as in {name}=hr.agg.sum('amount').")
    if step.is_table and not spec.takes_tables:
        raise StreamOnly(
            f"{name!r} of the step {where} is {spec}, which cannot take rows back, and {step.place} is a table, whose rows change.",
            fix="use an exact aggregate such as count_distinct, or aggregate the stream that the table is made of.",
        )
    if spec.column is None:
        return spec.bound(None, None)
    expression = read(spec.column, step.schema, where=f"{where}, aggregate {name!r}")
    try:
        return spec.bound(_column_of(name, expression, step, computed), _known_type(expression, name, where=where))
    except UnfitType as unfit:
        raise UnfitColumn(
            f"{name!r} of the step {where} is {spec}, but {spec.column!r} is {type_name(_known_type(expression, name, where=where))}.",
            fix=f"{spec.kind} takes {unfit.fits}.",
        ) from None


def _known_type(expression: Expression, name: str, *, where: str) -> pa.DataType:
    if expression.type is None:
        raise UnfitColumn(
            f"The type of {expression.text!r} in {name!r} of the step {where} cannot be told.", fix=f"say it: CAST({expression.text} AS DOUBLE)."
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


def _before(step: Step, by: tuple[str, ...], bound: tuple[tuple[str, AggregateSpec], ...], computed: dict[str, str], *, where: str) -> Selection:
    """The group's columns, a table's key, the columns that are aggregated as they are, and those that are computed."""
    key = step.key if step.is_table else ()
    read_as_they_are = [spec.column for _, spec in bound if spec.column is not None and spec.column not in computed]
    plain = dict.fromkeys([*key, *by, *read_as_they_are])
    return selected(step, list(plain), computed, where=where)
