"""From an aggregate as the plan has it to the accumulator that carries it out."""

from __future__ import annotations

import pyarrow as pa

from headrace.errors import InputError
from headrace.operators.accumulators.accumulator import Accumulator
from headrace.operators.accumulators.counts import CountRows, CountValues
from headrace.operators.accumulators.sums import DecimalSum, IntegerSum
from headrace.operators.specs import AggregateSpec, result_type


def build(spec: AggregateSpec, schema: pa.Schema, *, over_table: bool) -> Accumulator:
    """The accumulator of one aggregate over columns of this schema."""
    if spec.column is None:
        return CountRows()
    column, kind = spec.column, schema.field(spec.column).type
    result = result_type(spec, kind)
    if spec.kind == "count":
        return CountValues(column)
    if spec.kind == "sum":
        return DecimalSum(column, result) if pa.types.is_decimal(kind) else IntegerSum(column, result)
    raise InputError(f"no {spec}")
