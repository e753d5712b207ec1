"""`hr.agg`: the aggregate functions, for `group_by(...).aggregate(...)`.

Each takes a column or a Spark SQL expression. Exact aggregates can retract rows, so they work over
tables as well as streams. Those that must keep values of a group to do so have a limit,
`max_values`:

- `min`, `max`, `first`, `last`, `min_by` and `max_by` over a table then keep the values nearest to
  the answer and count the others. They are never wrong; the answer is null while it cannot be
  known.
- `count_distinct`, `median` and `collect_set` keep the first values and count the others; the
  answer is null from then on, over a table until the others are retracted.
- `collect` rejects the value, and its row goes to dead letters.
- With `when_full="stop"` the query stops instead.

Sketches (`approx_distinct`, `quantiles`, `heavy_hitters`, `bloom`) are small, approximate and for
streams only; each states its error. The functions only build an `AggregateSpec`; `factory` turns it
into the accumulator that computes it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pyarrow as pa

from headrace.durations import to_us
from headrace.errors import PlanError, nearest
from headrace.operators.aggregates.custom import CustomAggregate
from headrace.operators.aggregates.specs import AggregateSpec

__all__ = [
    "AggregateSpec",
    "CustomAggregate",
    "approx_distinct",
    "avg",
    "bloom",
    "collect",
    "collect_set",
    "count",
    "count_distinct",
    "count_if",
    "custom",
    "decayed_sum",
    "first",
    "heavy_hitters",
    "last",
    "max",
    "max_by",
    "median",
    "min",
    "min_by",
    "quantiles",
    "rate",
    "stddev",
    "sum",
    "variance",
]

MAX_VALUES = 100_000
MAX_COLLECTED = 10_000
_WHEN_FULL = ("divert", "stop")


def count(column: str | None = None, *, where: str | None = None) -> AggregateSpec:
    """The number of rows, or of values of a column that are not null. BIGINT.

    Args:
        column: A column or SQL expression; without one, rows are counted.
        where: Count only the rows for which this SQL condition is true.

    Returns:
        An aggregate for `aggregate(...)`.

    Example:
        ```python
        orders.group_by("region").aggregate(orders=hr.agg.count())
        ```
    """
    return AggregateSpec("count", column, where=where)


def count_if(condition: str, *, where: str | None = None) -> AggregateSpec:
    """The number of rows for which a condition is true. BIGINT; 0 if it is true for none.

    Args:
        condition: A BOOLEAN column or SQL expression.
        where: Only the rows for which this SQL condition is true count.

    Returns:
        An aggregate for `aggregate(...)`.

    Example:
        ```python
        orders.group_by("region").aggregate(large=hr.agg.count_if("amount >= 100"))
        ```
    """
    return AggregateSpec("count_if", condition, where=where)


def sum(column: str, *, where: str | None = None) -> AggregateSpec:  # noqa: A001
    """The sum of the values that are not null.

    BIGINT for integers, DECIMAL for decimals, DOUBLE for floating-point numbers. The sum is exact,
    so it does not depend on the order of rows or on batches. A sum that does not fit its type is
    null.

    Args:
        column: A column or SQL expression of numbers or day-time intervals.
        where: Only the rows for which this SQL condition is true count.

    Returns:
        An aggregate for `aggregate(...)`.

    Example:
        ```python
        orders.group_by("region").aggregate(revenue=hr.agg.sum("amount * 1.19"))
        ```
    """
    return AggregateSpec("sum", column, where=where)


def avg(column: str, *, where: str | None = None) -> AggregateSpec:
    """The mean of the values that are not null: DOUBLE, or DECIMAL for decimals.

    Args:
        column: A column or SQL expression of numbers or day-time intervals.
        where: Only the rows for which this SQL condition is true count.

    Returns:
        An aggregate for `aggregate(...)`.

    Example:
        ```python
        orders.group_by("region").aggregate(mean=hr.agg.avg("amount"))
        ```
    """
    return AggregateSpec("avg", column, where=where)


def stddev(column: str, *, population: bool = False, where: str | None = None) -> AggregateSpec:
    """The standard deviation of the values that are not null. DOUBLE.

    Args:
        column: A column or SQL expression of numbers.
        population: Whether the values are the whole population; a sample unless given.
        where: Only the rows for which this SQL condition is true count.

    Returns:
        An aggregate for `aggregate(...)`.

    Example:
        ```python
        orders.group_by("region").aggregate(spread=hr.agg.stddev("amount"))
        ```
    """
    return AggregateSpec("stddev", column, (("population", population),), where=where)


def variance(column: str, *, population: bool = False, where: str | None = None) -> AggregateSpec:
    """The variance of the values that are not null: the square of `stddev`. DOUBLE.

    Args:
        column: A column or SQL expression of numbers.
        population: Whether the values are the whole population; a sample unless given.
        where: Only the rows for which this SQL condition is true count.

    Returns:
        An aggregate for `aggregate(...)`.

    Example:
        ```python
        orders.group_by("region").aggregate(spread=hr.agg.variance("amount"))
        ```
    """
    return AggregateSpec("variance", column, (("population", population),), where=where)


def median(
    column: str,
    *,
    max_values: int = MAX_VALUES,
    when_full: str = "divert",
    where: str | None = None,
) -> AggregateSpec:
    """The exact median of the values that are not null: the mean of the two in the middle if there
    is an even number of them. DOUBLE.

    Args:
        column: A column or SQL expression of numbers.
        max_values: How many distinct values to keep per group. Of a group with more, the median is
            null.
        when_full: `"divert"`, or `"stop"` to stop the query at that limit.
        where: Only the rows for which this SQL condition is true count.

    Returns:
        An aggregate for `aggregate(...)`.

    Raises:
        PlanError: `max_values` or `when_full` is not valid.

    Example:
        ```python
        orders.group_by("region").aggregate(typical=hr.agg.median("amount"))
        ```
    """
    return AggregateSpec(
        "median", column, _limit_options("median", max_values, when_full), where=where
    )


def rate(
    column: str | None = None, *, per: str | timedelta = "1 second", where: str | None = None
) -> AggregateSpec:
    """The sum of a column, or the number of rows, per unit of the window's length. DOUBLE. Windows
    only.

    Args:
        column: A column or SQL expression of numbers; without one, rows are counted.
        per: The unit of time, as `"1 second"` or a timedelta.
        where: Only the rows for which this SQL condition is true count.

    Returns:
        An aggregate for `aggregate(...)`.

    Raises:
        PlanError: `per` is not a duration above zero.

    Example:
        ```python
        orders.window(hr.tumbling("1 minute")).group_by("region").aggregate(
            orders_per_second=hr.agg.rate(per="1 second")
        )
        ```
    """
    return AggregateSpec("rate", column, (("per_us", _duration("rate", "per", per)),), where=where)


def decayed_sum(
    column: str, *, half_life: str | timedelta, time: str | None = None, where: str | None = None
) -> AggregateSpec:
    """A sum in which a value counts half for every half-life of its age. DOUBLE. Streams only.

    Ages are relative to the event time of the newest row. Values are added tick by tick, so the
    last digits depend on the ticks, but not on batches.

    Args:
        column: A column or SQL expression of numbers.
        half_life: The half-life, as `"1 hour"` or a timedelta.
        time: The column with the event time; in a window, the window's own unless given.
        where: Only the rows for which this SQL condition is true count.

    Returns:
        An aggregate for `aggregate(...)`.

    Raises:
        PlanError: The half-life is not a duration above zero.

    Example:
        ```python
        orders.window(hr.tumbling("1 day")).group_by("region").aggregate(
            recent=hr.agg.decayed_sum("amount", half_life="1 hour")
        )
        ```
    """
    return AggregateSpec(
        "decayed_sum",
        column,
        (("half_life_us", _duration("decayed_sum", "half_life", half_life)), ("time", time)),
        where=where,
    )


def min(  # noqa: A001
    column: str,
    *,
    max_values: int = MAX_VALUES,
    when_full: str = "divert",
    where: str | None = None,
) -> AggregateSpec:
    """The smallest value that is not null. NaN is larger than every other number.

    Args:
        column: A column or SQL expression of a type with an order.
        max_values: Over a table, how many distinct values to keep per group.
        when_full: `"divert"` or `"stop"`: what to do with values above that limit.
        where: Only the rows for which this SQL condition is true count.

    Returns:
        An aggregate for `aggregate(...)`.

    Raises:
        PlanError: `max_values` or `when_full` is not valid.

    Example:
        ```python
        orders.group_by("region").aggregate(cheapest=hr.agg.min("amount"))
        ```
    """
    return AggregateSpec("min", column, _limit_options("min", max_values, when_full), where=where)


def max(  # noqa: A001
    column: str,
    *,
    max_values: int = MAX_VALUES,
    when_full: str = "divert",
    where: str | None = None,
) -> AggregateSpec:
    """The largest value that is not null. NaN is larger than every other number.

    Args:
        column: A column or SQL expression of a type with an order.
        max_values: Over a table, how many distinct values to keep per group.
        when_full: `"divert"` or `"stop"`: what to do with values above that limit.
        where: Only the rows for which this SQL condition is true count.

    Returns:
        An aggregate for `aggregate(...)`.

    Raises:
        PlanError: `max_values` or `when_full` is not valid.

    Example:
        ```python
        orders.group_by("region").aggregate(dearest=hr.agg.max("amount"))
        ```
    """
    return AggregateSpec("max", column, _limit_options("max", max_values, when_full), where=where)


def first(
    column: str,
    *,
    by: str | None = None,
    ignore_nulls: bool = False,
    max_values: int = MAX_VALUES,
    when_full: str = "divert",
    where: str | None = None,
) -> AggregateSpec:
    """The value of the first row: by event time if the rows have one, otherwise by arrival. Of rows
    with the same time, the first to arrive counts.

    Args:
        column: A column or SQL expression.
        by: The column or SQL expression that orders rows, instead of their event time; rows of
            which it is null do not count. `"_arrival"` orders rows as they arrived.
        ignore_nulls: Whether rows whose value is null are skipped.
        max_values: Over a table, how many values to keep per group.
        when_full: `"divert"` or `"stop"`: what to do with values above that limit.
        where: Only the rows for which this SQL condition is true count.

    Returns:
        An aggregate for `aggregate(...)`.

    Raises:
        PlanError: `max_values` or `when_full` is not valid.

    Example:
        ```python
        orders.group_by("customer_id").aggregate(
            first_region=hr.agg.first("region", ignore_nulls=True)
        )
        ```
    """
    return AggregateSpec(
        "first",
        column,
        (
            ("ignore_nulls", ignore_nulls),
            *_limit_options("first", max_values, when_full),
            *([] if by is None else [("by", by)]),
        ),
        where=where,
    )


def last(
    column: str,
    *,
    by: str | None = None,
    ignore_nulls: bool = False,
    max_values: int = MAX_VALUES,
    when_full: str = "divert",
    where: str | None = None,
) -> AggregateSpec:
    """The value of the last row: by event time if the rows have one, otherwise by arrival. Of rows
    with the same time, the last to arrive counts.

    Args:
        column: A column or SQL expression.
        by: The column or SQL expression that orders rows, instead of their event time; rows of
            which it is null do not count. `"_arrival"` orders rows as they arrived.
        ignore_nulls: Whether rows whose value is null are skipped.
        max_values: Over a table, how many values to keep per group.
        when_full: `"divert"` or `"stop"`: what to do with values above that limit.
        where: Only the rows for which this SQL condition is true count.

    Returns:
        An aggregate for `aggregate(...)`.

    Raises:
        PlanError: `max_values` or `when_full` is not valid.

    Example:
        ```python
        orders.group_by("customer_id").aggregate(
            last_region=hr.agg.last("region", ignore_nulls=True)
        )
        ```
    """
    return AggregateSpec(
        "last",
        column,
        (
            ("ignore_nulls", ignore_nulls),
            *_limit_options("last", max_values, when_full),
            *([] if by is None else [("by", by)]),
        ),
        where=where,
    )


def max_by(
    column: str,
    by: str,
    *,
    max_values: int = MAX_VALUES,
    when_full: str = "divert",
    where: str | None = None,
) -> AggregateSpec:
    """The value of the row with the largest `by`; null if that row's value is null. Rows of which
    `by` is null do not count. Of several such rows, the last to arrive counts.

    Args:
        column: A column or SQL expression: the value.
        by: A column or SQL expression of a type with an order: what is compared.
        max_values: Over a table, how many values to keep per group.
        when_full: `"divert"` or `"stop"`: what to do with values above that limit.
        where: Only the rows for which this SQL condition is true count.

    Returns:
        An aggregate for `aggregate(...)`.

    Raises:
        PlanError: `max_values` or `when_full` is not valid.

    Example:
        ```python
        orders.group_by("region").aggregate(dearest=hr.agg.max_by("order_id", by="amount"))
        ```
    """
    return AggregateSpec(
        "max_by",
        column,
        (*_limit_options("max_by", max_values, when_full), ("by", by)),
        where=where,
    )


def min_by(
    column: str,
    by: str,
    *,
    max_values: int = MAX_VALUES,
    when_full: str = "divert",
    where: str | None = None,
) -> AggregateSpec:
    """The value of the row with the smallest `by`; null if that row's value is null. Rows of which
    `by` is null do not count. Of several such rows, the last to arrive counts.

    Args:
        column: A column or SQL expression: the value.
        by: A column or SQL expression of a type with an order: what is compared.
        max_values: Over a table, how many values to keep per group.
        when_full: `"divert"` or `"stop"`: what to do with values above that limit.
        where: Only the rows for which this SQL condition is true count.

    Returns:
        An aggregate for `aggregate(...)`.

    Raises:
        PlanError: `max_values` or `when_full` is not valid.

    Example:
        ```python
        orders.group_by("region").aggregate(cheapest=hr.agg.min_by("order_id", by="amount"))
        ```
    """
    return AggregateSpec(
        "min_by",
        column,
        (*_limit_options("min_by", max_values, when_full), ("by", by)),
        where=where,
    )


def collect(
    column: str,
    *,
    max_values: int = MAX_COLLECTED,
    when_full: str = "divert",
    where: str | None = None,
) -> AggregateSpec:
    """All values that are not null, in the pipeline's order. ARRAY.

    Args:
        column: A column or SQL expression.
        max_values: How many values to keep per group.
        when_full: `"divert"` sends rows above that limit to dead letters, `"stop"` stops the query.
        where: Only the rows for which this SQL condition is true count.

    Returns:
        An aggregate for `aggregate(...)`.

    Raises:
        PlanError: `max_values` or `when_full` is not valid.

    Example:
        ```python
        orders.group_by("customer_id").aggregate(orders=hr.agg.collect("order_id"))
        ```
    """
    return AggregateSpec(
        "collect", column, _limit_options("collect", max_values, when_full), where=where
    )


def collect_set(
    column: str,
    *,
    max_values: int = MAX_COLLECTED,
    when_full: str = "divert",
    where: str | None = None,
) -> AggregateSpec:
    """The distinct values that are not null, in ascending order. ARRAY.

    Args:
        column: A column or SQL expression of a type with an order.
        max_values: How many distinct values to keep per group. Of a group with more, the result is
            null.
        when_full: `"divert"`, or `"stop"` to stop the query at that limit.
        where: Only the rows for which this SQL condition is true count.

    Returns:
        An aggregate for `aggregate(...)`.

    Raises:
        PlanError: `max_values` or `when_full` is not valid.

    Example:
        ```python
        orders.group_by("customer_id").aggregate(regions=hr.agg.collect_set("region"))
        ```
    """
    return AggregateSpec(
        "collect_set", column, _limit_options("collect_set", max_values, when_full), where=where
    )


def count_distinct(
    column: str,
    *more: str,
    max_values: int = MAX_VALUES,
    when_full: str = "divert",
    where: str | None = None,
) -> AggregateSpec:
    """The exact number of distinct values that are not null; of several columns, of distinct
    combinations of values none of which is null. BIGINT.

    Args:
        column: A column or SQL expression of a type with an order.
        *more: Further ones.
        max_values: How many distinct values to keep per group. Of a group with more, the number is
            not known: it is null.
        when_full: `"divert"`, or `"stop"` to stop the query at that limit.
        where: Only the rows for which this SQL condition is true count.

    Returns:
        An aggregate for `aggregate(...)`.

    Raises:
        PlanError: `max_values` or `when_full` is not valid.

    Example:
        ```python
        orders.group_by("region").aggregate(
            customers=hr.agg.count_distinct("customer_id"),
            visits=hr.agg.count_distinct("customer_id", "date(placed_at)"),
        )
        ```
    """
    return AggregateSpec(
        "count_distinct",
        column,
        (
            *_limit_options("count_distinct", max_values, when_full),
            ("or_null", True),
            *([("more", more)] if more else []),
        ),
        where=where,
    )


def approx_distinct(column: str, *, error: float = 0.02, where: str | None = None) -> AggregateSpec:
    """The approximate number of distinct values (HyperLogLog). BIGINT. Streams only.

    Args:
        column: A column or SQL expression of a type with an order.
        error: The relative standard error, from 0.001 to 0.5: two thirds of the answers are within
            it.
        where: Only the rows for which this SQL condition is true count.

    Returns:
        An aggregate for `aggregate(...)`.

    Raises:
        PlanError: `error` is out of range.

    Example:
        ```python
        orders.group_by("region").aggregate(
            customers=hr.agg.approx_distinct("customer_id", error=0.01)
        )
        ```
    """
    return AggregateSpec(
        "approx_distinct",
        column,
        (("error", _number("approx_distinct", "error", error, low=0.001, high=0.5)),),
        where=where,
    )


def quantiles(
    column: str,
    at: float | Sequence[float] = 0.5,
    *,
    compression: int = 200,
    where: str | None = None,
) -> AggregateSpec:
    """Approximate quantiles (t-digest), most accurate near 0 and 1. Streams only.

    Args:
        column: A column or SQL expression of numbers.
        at: A fraction from 0 to 1, or several.
        compression: The size of the digest, from 10 to 10,000: larger is more accurate.
        where: Only the rows for which this SQL condition is true count.

    Returns:
        An aggregate for `aggregate(...)`: DOUBLE, or an ARRAY of DOUBLE if several are given.

    Raises:
        PlanError: A fraction or the compression is out of range, or no fraction is given.

    Example:
        ```python
        orders.group_by("region").aggregate(amounts=hr.agg.quantiles("amount", at=[0.5, 0.99]))
        ```
    """
    points: Any = tuple(at) if isinstance(at, Sequence) else at
    for point in points if isinstance(points, tuple) else (points,):
        _number("quantiles", "at", point, low=0.0, high=1.0)
    if points == ():
        raise PlanError(
            "quantiles was given no fraction.", fix="give at least one, as in at=[0.5, 0.99]."
        )
    return AggregateSpec(
        "quantiles",
        column,
        (
            ("at", points),
            ("compression", _integer("quantiles", "compression", compression, low=10, high=10_000)),
        ),
        where=where,
    )


def heavy_hitters(
    column: str, *, max_values: int = 10, size: int = 1024, where: str | None = None
) -> AggregateSpec:
    """The most frequent values with their approximate counts. Streams only.

    An ARRAY of STRUCT<value, count, at_least, at_most>, most frequent first. No value that makes up
    more than 1/`size` of the rows is missed, and no count is off by more than that share.

    Args:
        column: A column or SQL expression of a type with an order.
        max_values: How many values to return; at most `size`.
        size: The size of the sketch, from 8 to 1,048,576: larger is more accurate.
        where: Only the rows for which this SQL condition is true count.

    Returns:
        An aggregate for `aggregate(...)`.

    Raises:
        PlanError: `max_values` or `size` is out of range.

    Example:
        ```python
        orders.group_by("region").aggregate(
            top_customers=hr.agg.heavy_hitters("customer_id", max_values=5)
        )
        ```
    """
    size = _integer("heavy_hitters", "size", size, low=8, high=1 << 20)
    return AggregateSpec(
        "heavy_hitters",
        column,
        (
            ("most", _integer("heavy_hitters", "max_values", max_values, low=1, high=size)),
            ("size", size),
        ),
        where=where,
    )


def bloom(
    column: str, *, expected: int = 10_000, error: float = 0.01, where: str | None = None
) -> AggregateSpec:
    """A Bloom filter of the values. BINARY. Streams only.

    Args:
        column: A column or SQL expression of a type with an order.
        expected: How many distinct values the filter is made for.
        error: The share of false positives with that many values, from 0.000001 to 0.5.
        where: Only the rows for which this SQL condition is true count.

    Returns:
        An aggregate for `aggregate(...)`. `BloomFilter.from_bytes` reads its result.

    Raises:
        PlanError: `expected` or `error` is out of range.

    Example:
        ```python
        orders.group_by("region").aggregate(
            customers=hr.agg.bloom("customer_id", expected=100_000)
        )
        ```
    """
    return AggregateSpec(
        "bloom",
        column,
        (
            ("expected", _integer("bloom", "expected", expected, low=1, high=100_000_000)),
            ("error", _number("bloom", "error", error, low=1e-6, high=0.5)),
        ),
        where=where,
    )


def custom(aggregate: Any, column: str) -> AggregateSpec:
    """A user's own aggregate.

    Args:
        aggregate: An instance of a subclass of `hr.agg.CustomAggregate`.
        column: A column or SQL expression; of several columns, `"struct(a, b)"`.

    Returns:
        An aggregate for `aggregate(...)`.

    Raises:
        PlanError: The aggregate is not such an instance, lacks a type, or has a setting whose text
            is different in each process.

    Example:
        ```python
        class Longest(hr.agg.CustomAggregate):
            state_type = result_type = pa.string()

            def add(self, states, groups, values):
                longest = states.to_pylist()
                for group, value in zip(groups.to_pylist(), values.to_pylist()):
                    longest[group] = max(longest[group] or "", value or "", key=len)
                return pa.array(longest, pa.string())

            def result(self, states):
                return states

        orders.group_by("customer_id").aggregate(region=hr.agg.custom(Longest(), "region"))
        ```
    """
    if not isinstance(aggregate, CustomAggregate):
        received = (
            f"the class {aggregate.__name__}, not an instance"
            if isinstance(aggregate, type)
            else f"a {type(aggregate).__name__}"
        )
        raise PlanError(
            f"hr.agg.custom was given {received}.",
            fix="give it an instance of a class that extends hr.agg.CustomAggregate.",
        )
    for name in ("state_type", "result_type"):
        if not isinstance(getattr(aggregate, name, None), pa.DataType):
            raise PlanError(
                f"The aggregate {aggregate!r} has no {name}.",
                fix=f"set it to an Arrow type, as in {name} = pa.float64().",
            )
    if odd := re.search(r"(\w+)=<[^>]* at 0x\w+>", repr(aggregate)):
        raise PlanError(
            f"The setting {odd[1]!r} of the aggregate {type(aggregate).__name__} has no stable"
            " repr, so a restart could not tell whether it is the same.",
            fix=(
                "give its class a __repr__, or start the setting's name with an underscore if it"
                " does not affect results."
            ),
        )
    return AggregateSpec("custom", column, (("aggregate", aggregate),))


def _limit_options(kind: str, max_values: int, when_full: str) -> tuple[tuple[str, Any], ...]:
    """The checked options of an aggregate that keeps a limited number of values."""
    if when_full not in _WHEN_FULL:
        raise PlanError(
            f"{kind} has when_full={when_full!r}: {nearest(str(when_full), _WHEN_FULL)}"
        )
    return (
        ("most", _integer(kind, "max_values", max_values, low=1, high=10_000_000)),
        ("when_full", when_full),
    )


def _duration(kind: str, option: str, value: str | timedelta) -> int:
    if not (us := to_us(value, what=f"{option} of {kind}")):
        raise PlanError(
            f"{kind} has {option}={value!r}, which is zero.", fix="give more than zero."
        )
    return us


def _integer(kind: str, option: str, value: Any, *, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise PlanError(
            f"{kind} has {option}={value!r}.",
            fix=f"give a whole number from {low:,} to {high:,}.",
        )
    return value


def _number(kind: str, option: str, value: Any, *, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise PlanError(
            f"{kind} has {option}={value!r}.", fix=f"give a number from {low:g} to {high:g}."
        )
    return float(value)
