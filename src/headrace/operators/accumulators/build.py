"""From an aggregate as the plan has it to the accumulator that carries it out."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from headrace.errors import InputError
from headrace.operators.accumulators.accumulator import Accumulator
from headrace.operators.accumulators.averages import DecimalAverage, IntegerAverage, IntervalAverage
from headrace.operators.accumulators.counts import CountRows, CountValues
from headrace.operators.accumulators.double_sums import DoubleAverage, DoubleSum
from headrace.operators.accumulators.extremes import Extreme
from headrace.operators.accumulators.ordered import has_order_in_64_bits
from headrace.operators.accumulators.spread import StandardDeviation
from headrace.operators.accumulators.sums import DecimalSum, IntegerSum
from headrace.operators.specs import AggregateSpec, result_type


def build(spec: AggregateSpec, schema: pa.Schema, *, over_table: bool) -> Accumulator:
    """The accumulator of one aggregate over columns of this schema."""
    if spec.column is None:
        return CountRows()
    kind = schema.field(spec.column).type
    return _BUILDERS[spec.kind](spec, spec.column, kind, over_table)


def _count(_: AggregateSpec, column: str, __: pa.DataType, ___: bool) -> Accumulator:
    return CountValues(column)


def _sum(spec: AggregateSpec, column: str, kind: pa.DataType, _: bool) -> Accumulator:
    if pa.types.is_floating(kind):
        return DoubleSum(column)
    return (DecimalSum if pa.types.is_decimal(kind) else IntegerSum)(column, result_type(spec, kind))


def _avg(spec: AggregateSpec, column: str, kind: pa.DataType, _: bool) -> Accumulator:
    if pa.types.is_floating(kind):
        return DoubleAverage(column)
    result = result_type(spec, kind)
    if pa.types.is_decimal(kind):
        return DecimalAverage(column, result, kind.scale)
    return (IntegerAverage if pa.types.is_integer(kind) else IntervalAverage)(column, result)


def _stddev(spec: AggregateSpec, column: str, _: pa.DataType, __: bool) -> Accumulator:
    return StandardDeviation(column, population=bool(spec.option("population")))


def _extreme(spec: AggregateSpec, column: str, kind: pa.DataType, over_table: bool) -> Accumulator:
    if has_order_in_64_bits(kind) and not over_table:
        return Extreme(column, kind, largest=spec.kind == "max")
    raise InputError("later")


_BUILDERS: dict[str, Callable[[AggregateSpec, str, pa.DataType, bool], Accumulator]] = {
    "count": _count,
    "sum": _sum,
    "avg": _avg,
    "stddev": _stddev,
    "min": _extreme,
    "max": _extreme,
}
