"""`hr.agg`: the aggregates, to be given to `group_by(…).aggregate(…)`. Each takes a column or a
Spark SQL expression.

Exact ones can take rows back, and so work over tables too. Those that must keep values of a key to
do so have a bound, `most`. Past it, `min`, `max`, `first` and `last` keep what is nearest to the
answer and count the rest: they are never wrong, and null where they cannot tell. `collect` and
`count_distinct` leave the value out, and its row goes to dead letters. With `when_full="stop"` the
query stops instead. Sketches are small, approximate and for streams only; each states its error.
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
    "count",
    "count_distinct",
    "custom",
    "decayed_sum",
    "first",
    "heavy_hitters",
    "last",
    "max",
    "min",
    "quantiles",
    "rate",
    "stddev",
    "sum",
]

MAX_VALUES = 100_000
MAX_COLLECTED = 10_000
_WHEN_FULL = ("divert", "stop")


def count(column: str | None = None) -> AggregateSpec:
    """How many rows; of a column, how many that are not null. BIGINT."""
    return AggregateSpec("count", column)


def sum(column: str) -> AggregateSpec:  # noqa: A001
    """The sum of what is not null: BIGINT of integers, DECIMAL of decimals, DOUBLE of floating
    numbers. It does not depend on how rows were batched.
    """
    return AggregateSpec("sum", column)


def avg(column: str) -> AggregateSpec:
    """The mean of what is not null: DOUBLE, or DECIMAL of decimals."""
    return AggregateSpec("avg", column)


def stddev(column: str, *, population: bool = False) -> AggregateSpec:
    """The standard deviation, of a sample unless `population`. DOUBLE."""
    return AggregateSpec("stddev", column, (("population", population),))


def rate(column: str | None = None, *, per: str | timedelta = "1 second") -> AggregateSpec:
    """The sum of a column by the length of the window, as so much `per` time; without a column, the
    number of rows. DOUBLE. For windows only.
    """
    return AggregateSpec("rate", column, (("per_us", _duration("rate", "per", per)),))


def decayed_sum(
    column: str, *, half_life: str | timedelta, time: str | None = None
) -> AggregateSpec:
    """The sum as of the newest row's event time, in which a value counts half for every half-life
    that it is older. DOUBLE. Streams only.

    In a window, times are the windows' own; elsewhere `time` names their column. Values are put
    together tick by tick, so the last digits depend on ticks, but not on batches.
    """
    return AggregateSpec(
        "decayed_sum",
        column,
        (("half_life_us", _duration("decayed_sum", "half_life", half_life)), ("time", time)),
    )


def min(column: str, *, most: int = MAX_VALUES, when_full: str = "divert") -> AggregateSpec:  # noqa: A001
    """The least value. Over a table it keeps up to `most` distinct values a key."""
    return AggregateSpec("min", column, _bound("min", most, when_full))


def max(column: str, *, most: int = MAX_VALUES, when_full: str = "divert") -> AggregateSpec:  # noqa: A001
    """The greatest value. Over a table it keeps up to `most` distinct values a key."""
    return AggregateSpec("max", column, _bound("max", most, when_full))


def first(
    column: str, *, ignore_nulls: bool = False, most: int = MAX_VALUES, when_full: str = "divert"
) -> AggregateSpec:
    """The value of the first row, in the pipeline's order. Over a table it keeps up to `most`
    values a key.
    """
    return AggregateSpec(
        "first", column, (("ignore_nulls", ignore_nulls), *_bound("first", most, when_full))
    )


def last(
    column: str, *, ignore_nulls: bool = False, most: int = MAX_VALUES, when_full: str = "divert"
) -> AggregateSpec:
    """The value of the last row, in the pipeline's order. Over a table it keeps up to `most` values
    a key.
    """
    return AggregateSpec(
        "last", column, (("ignore_nulls", ignore_nulls), *_bound("last", most, when_full))
    )


def collect(column: str, *, most: int = MAX_COLLECTED, when_full: str = "divert") -> AggregateSpec:
    """All values that are not null, in the pipeline's order, as an ARRAY. It keeps up to `most`
    values a key.
    """
    return AggregateSpec("collect", column, _bound("collect", most, when_full))


def count_distinct(
    column: str, *, most: int = MAX_VALUES, when_full: str = "divert"
) -> AggregateSpec:
    """How many different values that are not null, exactly. BIGINT. It keeps up to `most` distinct
    values a key.
    """
    return AggregateSpec("count_distinct", column, _bound("count_distinct", most, when_full))


def approx_distinct(column: str, *, error: float = 0.02) -> AggregateSpec:
    """About how many different values (HyperLogLog): within `error`, relative, in two of three
    cases. BIGINT. Streams only.
    """
    return AggregateSpec(
        "approx_distinct",
        column,
        (("error", _fraction("approx_distinct", "error", error, least=0.001, most=0.5)),),
    )


def quantiles(
    column: str, at: float | Sequence[float] = 0.5, *, compression: int = 200
) -> AggregateSpec:
    """About the value below which a fraction `at` of the values lie (t-digest), most exact near 0
    and 1. DOUBLE, or an ARRAY of them. Streams only.
    """
    points: Any = tuple(at) if isinstance(at, Sequence) else at
    for point in points if isinstance(points, tuple) else (points,):
        _fraction("quantiles", "at", point, least=0.0, most=1.0)
    if points == ():
        raise PlanError(
            "quantiles was given no fraction.", fix="give at least one, as in at=[0.5, 0.99]."
        )
    return AggregateSpec(
        "quantiles",
        column,
        (
            ("at", points),
            ("compression", _whole("quantiles", "compression", compression, least=10, most=10_000)),
        ),
    )


def heavy_hitters(column: str, *, most: int = 10, size: int = 1024) -> AggregateSpec:
    """The `most` frequent values with their counts, an ARRAY of STRUCT<value, count, at_least,
    at_most>: no value that makes up more than 1/`size` of the rows is missed, by no count more than
    that is it wrong. Streams only.
    """
    size = _whole("heavy_hitters", "size", size, least=8, most=1 << 20)
    return AggregateSpec(
        "heavy_hitters",
        column,
        (("most", _whole("heavy_hitters", "most", most, least=1, most=size)), ("size", size)),
    )


def bloom(column: str, *, expected: int = 10_000, error: float = 0.01) -> AggregateSpec:
    """A Bloom filter of the values, BINARY: with up to `expected` different values it takes a wrong
    one for a member in `error` of the cases. Streams only.
    """
    return AggregateSpec(
        "bloom",
        column,
        (
            ("expected", _whole("bloom", "expected", expected, least=1, most=100_000_000)),
            ("error", _fraction("bloom", "error", error, least=1e-6, most=0.5)),
        ),
    )


def custom(aggregate: Any, column: str) -> AggregateSpec:
    """A user's own aggregate over a column (of several, over `"struct(a, b)"`)."""
    if not isinstance(aggregate, CustomAggregate):
        given = (
            f"the class {aggregate.__name__}, not an instance"
            if isinstance(aggregate, type)
            else f"a {type(aggregate).__name__}"
        )
        raise PlanError(
            f"hr.agg.custom was given {given}.",
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
            f"The setting {odd[1]!r} of the aggregate {type(aggregate).__name__} has no text of its"
            " own, so a restart could not tell whether it is the same.",
            fix=(
                "give its class a __repr__, or start the setting's name with an underscore if it"
                " changes nothing."
            ),
        )
    return AggregateSpec("custom", column, (("aggregate", aggregate),))


def _bound(kind: str, most: int, when_full: str) -> tuple[tuple[str, Any], ...]:
    if when_full not in _WHEN_FULL:
        raise PlanError(
            f"{kind} has when_full={when_full!r}: {nearest(str(when_full), _WHEN_FULL)}"
        )
    return (
        ("most", _whole(kind, "most", most, least=1, most=10_000_000)),
        ("when_full", when_full),
    )


def _duration(kind: str, option: str, value: str | timedelta) -> int:
    if not (us := to_us(value, what=f"{option} of {kind}")):
        raise PlanError(
            f"{kind} has {option}={value!r}, which is zero.", fix="give more than zero."
        )
    return us


def _whole(kind: str, option: str, value: Any, *, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise PlanError(
            f"{kind} has {option}={value!r}.",
            fix=f"give a whole number from {least:,} to {most:,}.",
        )
    return value


def _fraction(kind: str, option: str, value: Any, *, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise PlanError(
            f"{kind} has {option}={value!r}.", fix=f"give a number from {least:g} to {most:g}."
        )
    return float(value)
