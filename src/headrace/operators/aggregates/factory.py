"""From an aggregate as the plan holds it to the accumulator that computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from headrace.errors import BugError
from headrace.operators.aggregates import append_only, extremes_by, retractable, value_bags
from headrace.operators.aggregates.accumulator import Accumulator, has_order_in_64_bits
from headrace.operators.aggregates.append_only import Extreme
from headrace.operators.aggregates.custom import Custom
from headrace.operators.aggregates.float_sums import (
    DoubleAverage,
    DoubleSum,
    StandardDeviation,
    Variance,
)
from headrace.operators.aggregates.specs import AggregateSpec, result_type
from headrace.operators.aggregates.sums import (
    CountRows,
    CountTrue,
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
class AccumulatorRequest:
    """What an accumulator is built from: the aggregate, its column and type, and the
    kind of input.
    """

    spec: AggregateSpec
    column: str
    type: pa.DataType
    by_type: pa.DataType | None
    """The type of the column by which rows are compared, if the aggregate compares them."""
    over_table: bool
    row_key: tuple[str, ...]
    divert: bool

    @property
    def max_values(self) -> int:
        """How many values a group may keep."""
        return int(self.spec.option("most", MAX_VALUES))

    @property
    def stop_when_full(self) -> bool:
        """Whether the query stops when a group is full."""
        return bool(self.spec.option("when_full", "divert") == "stop")

    @property
    def result(self) -> pa.DataType:
        """The type of the result; a rate is accumulated as a sum."""
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
    """The accumulator of one aggregate over columns of a schema.

    Args:
        spec: The aggregate.
        schema: The columns of the input.
        over_table: Whether the input is a table's changes, so that rows are retracted.
        row_key: The key of that table.
        divert: Whether rows that a user's own aggregate raises on are rejected.
    """
    if spec.column is None:
        return CountRows()
    request = AccumulatorRequest(
        spec=spec,
        column=spec.column,
        type=schema.field(spec.column).type,
        by_type=None if spec.option("by") is None else schema.field(spec.option("by")).type,
        over_table=over_table,
        row_key=tuple(row_key),
        divert=divert,
    )
    if over_table and not spec.takes_tables:
        raise BugError(f"{spec} cannot retract rows, and its input is a table.")
    return _BUILDERS[spec.kind](request)


def _sum(request: AccumulatorRequest) -> Accumulator:
    if pa.types.is_floating(request.type):
        return DoubleSum(request.column)
    return (DecimalSum if pa.types.is_decimal(request.type) else IntegerSum)(
        request.column, request.result
    )


def _avg(request: AccumulatorRequest) -> Accumulator:
    if pa.types.is_floating(request.type):
        return DoubleAverage(request.column)
    if pa.types.is_decimal(request.type):
        return DecimalAverage(request.column, request.result, request.type.scale)
    return (IntegerAverage if pa.types.is_integer(request.type) else IntervalAverage)(
        request.column, request.result
    )


def _decayed_sum(request: AccumulatorRequest) -> Accumulator:
    time = request.spec.option("time")
    if time is None:
        raise BugError(f"{request.spec} needs the column of the event time.")
    return DecayedSum(request.column, time, half_life_us=request.spec.option("half_life_us"))


def _extreme(request: AccumulatorRequest) -> Accumulator:
    largest = request.spec.kind == "max"
    if request.over_table:
        return retractable.TableExtreme(
            request.column,
            request.type,
            largest=largest,
            max_values=request.max_values,
            stop_when_full=request.stop_when_full,
        )
    return (Extreme if has_order_in_64_bits(request.type) else append_only.RankedExtreme)(
        request.column, request.type, largest=largest
    )


def _first_or_last(request: AccumulatorRequest) -> Accumulator:
    if request.by_type is not None:
        return _extreme_by(request)
    first, ignore_nulls = request.spec.kind == "first", bool(request.spec.option("ignore_nulls"))
    if not request.over_table:
        return (append_only.First if first else append_only.Last)(
            request.column, request.type, ignore_nulls=ignore_nulls
        )
    kind = retractable.TableFirst if first else retractable.TableLast
    return kind(
        request.column,
        request.type,
        _row_key(request),
        ignore_nulls=ignore_nulls,
        max_values=request.max_values,
        stop_when_full=request.stop_when_full,
    )


def _extreme_by(request: AccumulatorRequest) -> Accumulator:
    choice = extremes_by.Choice(
        column=request.column,
        type=request.type,
        by=request.spec.option("by"),
        by_type=request.by_type,
        largest=request.spec.kind in {"last", "max_by"},
        latest=request.spec.kind != "first",
        ignore_nulls=bool(request.spec.option("ignore_nulls")),
    )
    if not request.over_table:
        return extremes_by.ExtremeBy(choice)
    return extremes_by.TableExtremeBy(
        choice,
        _row_key(request),
        max_values=request.max_values,
        stop_when_full=request.stop_when_full,
    )


def _value_bag(kind: type[value_bags.ValueBag]) -> Callable[[AccumulatorRequest], Accumulator]:
    return lambda request: kind(
        request.column,
        request.type,
        max_values=request.max_values,
        stop_when_full=request.stop_when_full,
    )


def _count_distinct(request: AccumulatorRequest) -> Accumulator:
    if request.spec.option("or_null"):
        return value_bags.DistinctValues(
            request.column,
            request.type,
            request.spec.option("more", ()),
            max_values=request.max_values,
            stop_when_full=request.stop_when_full,
        )
    return retractable.CountDistinct(
        request.column,
        request.type,
        over_table=request.over_table,
        max_values=request.max_values,
        stop_when_full=request.stop_when_full,
    )


def _collect(request: AccumulatorRequest) -> Accumulator:
    if request.over_table:
        return retractable.TableCollect(
            request.column,
            request.type,
            _row_key(request),
            max_values=request.max_values,
            stop_when_full=request.stop_when_full,
        )
    return append_only.Collect(
        request.column,
        request.type,
        max_values=request.max_values,
        stop_when_full=request.stop_when_full,
    )


def _row_key(request: AccumulatorRequest) -> tuple[str, ...]:
    if not request.row_key:
        raise BugError(
            f"{request.spec} over a table needs the table's key, to tell its rows apart."
        )
    return request.row_key


def _approx_distinct(request: AccumulatorRequest) -> Accumulator:
    from headrace.operators.aggregates.sketches import ApproxDistinct

    return ApproxDistinct(request.column, request.type, error=request.spec.option("error", 0.02))


def _quantiles(request: AccumulatorRequest) -> Accumulator:
    from headrace.operators.aggregates.sketches import Quantiles

    return Quantiles(
        request.column,
        request.type,
        at=request.spec.option("at", 0.5),
        compression=request.spec.option("compression", 200),
    )


def _heavy_hitters(request: AccumulatorRequest) -> Accumulator:
    from headrace.operators.aggregates.sketches import HeavyHitters

    return HeavyHitters(
        request.column,
        request.type,
        request.result,
        limit=request.spec.option("most", 10),
        size=request.spec.option("size", 1024),
    )


def _bloom(request: AccumulatorRequest) -> Accumulator:
    from headrace.operators.aggregates.sketches import Bloom

    return Bloom(
        request.column,
        request.type,
        expected=request.spec.option("expected", 10_000),
        error=request.spec.option("error", 0.01),
    )


_BUILDERS: dict[str, Callable[[AccumulatorRequest], Accumulator]] = {
    "count": lambda request: CountValues(request.column),
    "count_if": lambda request: CountTrue(request.column),
    "sum": _sum,
    "rate": _sum,  # the window kernel divides it by the window's length
    "decayed_sum": _decayed_sum,
    "avg": _avg,
    "stddev": lambda request: StandardDeviation(
        request.column, population=bool(request.spec.option("population"))
    ),
    "variance": lambda request: Variance(
        request.column, population=bool(request.spec.option("population"))
    ),
    "min": _extreme,
    "max": _extreme,
    "first": _first_or_last,
    "last": _first_or_last,
    "min_by": _extreme_by,
    "max_by": _extreme_by,
    "collect": _collect,
    "collect_set": _value_bag(value_bags.CollectSet),
    "median": _value_bag(value_bags.Median),
    "count_distinct": _count_distinct,
    "approx_distinct": _approx_distinct,
    "quantiles": _quantiles,
    "heavy_hitters": _heavy_hitters,
    "bloom": _bloom,
    "custom": lambda request: Custom(
        request.column, request.spec.option("aggregate"), divert=request.divert
    ),
}
