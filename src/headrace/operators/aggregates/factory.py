"""From an aggregate as the plan has it to the accumulator that carries it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from headrace.errors import BugError
from headrace.operators.aggregates import append_only, retractable
from headrace.operators.aggregates.accumulator import Accumulator, has_order_in_64_bits
from headrace.operators.aggregates.append_only import Extreme
from headrace.operators.aggregates.custom import Custom
from headrace.operators.aggregates.float_sums import DoubleAverage, DoubleSum, StandardDeviation
from headrace.operators.aggregates.specs import AggregateSpec, result_type
from headrace.operators.aggregates.sums import (
    CountRows,
    CountValues,
    DecayedSum,
    DecimalAverage,
    DecimalSum,
    IntegerAverage,
    IntegerSum,
    IntervalAverage,
)

MAX_VALUES = 100_000


@dataclass(frozen=True)
class Order:
    """An aggregate to build: over which column of which type, and what the input is like."""

    spec: AggregateSpec
    column: str
    type: pa.DataType
    over_table: bool
    row_key: tuple[str, ...]
    divert: bool

    @property
    def most(self) -> int:
        return int(self.spec.option("most", MAX_VALUES))

    @property
    def stop(self) -> bool:
        return bool(self.spec.option("when_full", "divert") == "stop")

    @property
    def result(self) -> pa.DataType:
        return result_type(
            replace(self.spec, kind="sum") if self.spec.kind == "rate" else self.spec, self.type
        )


def build(
    spec: AggregateSpec,
    schema: pa.Schema,
    *,
    over_table: bool,
    row_key: Sequence[str] = (),
    divert: bool = False,
) -> Accumulator:
    """The accumulator of one aggregate over columns of this schema. `row_key` tells a table's rows
    apart.
    """
    if spec.column is None:
        return CountRows()
    order = Order(
        spec, spec.column, schema.field(spec.column).type, over_table, tuple(row_key), divert
    )
    if over_table and not spec.takes_tables:
        raise BugError(f"{spec} cannot take rows back, and was given a table.")
    return _BUILDERS[spec.kind](order)


def _sum(order: Order) -> Accumulator:
    if pa.types.is_floating(order.type):
        return DoubleSum(order.column)
    return (DecimalSum if pa.types.is_decimal(order.type) else IntegerSum)(
        order.column, order.result
    )


def _avg(order: Order) -> Accumulator:
    if pa.types.is_floating(order.type):
        return DoubleAverage(order.column)
    if pa.types.is_decimal(order.type):
        return DecimalAverage(order.column, order.result, order.type.scale)
    return (IntegerAverage if pa.types.is_integer(order.type) else IntervalAverage)(
        order.column, order.result
    )


def _decayed_sum(order: Order) -> Accumulator:
    time = order.spec.option("time")
    if time is None:
        raise BugError(f"{order.spec} needs the column of the event time.")
    return DecayedSum(order.column, time, half_life_us=order.spec.option("half_life_us"))


def _extreme(order: Order) -> Accumulator:
    largest = order.spec.kind == "max"
    if order.over_table:
        return retractable.TableExtreme(
            order.column, order.type, largest=largest, most=order.most, stop=order.stop
        )
    return (Extreme if has_order_in_64_bits(order.type) else append_only.RankedExtreme)(
        order.column, order.type, largest=largest
    )


def _first_or_last(order: Order) -> Accumulator:
    first, ignore_nulls = order.spec.kind == "first", bool(order.spec.option("ignore_nulls"))
    if not order.over_table:
        return (append_only.First if first else append_only.Last)(
            order.column, order.type, ignore_nulls=ignore_nulls
        )
    kind = retractable.TableFirst if first else retractable.TableLast
    return kind(
        order.column,
        order.type,
        _row_key(order),
        ignore_nulls=ignore_nulls,
        most=order.most,
        stop=order.stop,
    )


def _collect(order: Order) -> Accumulator:
    if order.over_table:
        return retractable.TableCollect(
            order.column, order.type, _row_key(order), most=order.most, stop=order.stop
        )
    return append_only.Collect(order.column, order.type, most=order.most, stop=order.stop)


def _row_key(order: Order) -> tuple[str, ...]:
    if not order.row_key:
        raise BugError(f"{order.spec} over a table needs the table's key, to tell its rows apart.")
    return order.row_key


def _approx_distinct(order: Order) -> Accumulator:
    from headrace.operators.aggregates.sketches import ApproxDistinct

    return ApproxDistinct(order.column, order.type, error=order.spec.option("error", 0.02))


def _quantiles(order: Order) -> Accumulator:
    from headrace.operators.aggregates.sketches import Quantiles

    return Quantiles(
        order.column,
        order.type,
        at=order.spec.option("at", 0.5),
        compression=order.spec.option("compression", 200),
    )


def _heavy_hitters(order: Order) -> Accumulator:
    from headrace.operators.aggregates.sketches import HeavyHitters

    return HeavyHitters(
        order.column,
        order.type,
        order.result,
        most=order.spec.option("most", 10),
        size=order.spec.option("size", 1024),
    )


def _bloom(order: Order) -> Accumulator:
    from headrace.operators.aggregates.sketches import Bloom

    return Bloom(
        order.column,
        order.type,
        expected=order.spec.option("expected", 10_000),
        error=order.spec.option("error", 0.01),
    )


_BUILDERS: dict[str, Callable[[Order], Accumulator]] = {
    "count": lambda order: CountValues(order.column),
    "sum": _sum,
    "rate": _sum,  # its window divides it by its length
    "decayed_sum": _decayed_sum,
    "avg": _avg,
    "stddev": lambda order: StandardDeviation(
        order.column, population=bool(order.spec.option("population"))
    ),
    "min": _extreme,
    "max": _extreme,
    "first": _first_or_last,
    "last": _first_or_last,
    "collect": _collect,
    "count_distinct": lambda order: retractable.CountDistinct(
        order.column, order.type, over_table=order.over_table, most=order.most, stop=order.stop
    ),
    "approx_distinct": _approx_distinct,
    "quantiles": _quantiles,
    "heavy_hitters": _heavy_hitters,
    "bloom": _bloom,
    "custom": lambda order: Custom(
        order.column, order.spec.option("aggregate"), divert=order.divert
    ),
}
