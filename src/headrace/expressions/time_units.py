"""Units of time in calls: parts of a time (`EXTRACT(HOUR FROM at)`, `date_part('hour', at)`) and
differences and sums in units (`timestampdiff(HOUR, a, b)`, `timestampadd(DAY, 3, at)`).
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from headrace.expressions import casts, type_rules
from headrace.expressions.type_rules import BIGINT, INT, INTERVAL, TIMESTAMP, is_time
from headrace.expressions.typed_expression import (
    ExpressionRefused,
    TypedExpression,
    guarded,
    infallible,
)
from headrace.types.schema import type_name

UNITS = (
    "YEAR",
    "QUARTER",
    "MONTH",
    "WEEK",
    "DAY",
    "HOUR",
    "MINUTE",
    "SECOND",
    "MILLISECOND",
    "MICROSECOND",
)
_DIFFERENCES = ("timestampdiff", "datediff", "date_diff")
_SUMS = ("timestampadd", "dateadd", "date_add")
_SECONDS = pa.decimal128(8, 6)
_OF_TIMES = {
    **dict.fromkeys(
        (
            "YEAR",
            "YEAROFWEEK",
            "QUARTER",
            "MONTH",
            "WEEK",
            "DAY",
            "DAYOFWEEK",
            "DOW",
            "DAYOFWEEK_ISO",
            "DOW_ISO",
            "DOY",
            "HOUR",
            "MINUTE",
        ),
        INT,
    ),
    "SECOND": _SECONDS,
}
_OF_INTERVALS = {
    "DAY": INT,
    "HOUR": pa.int8(),
    "MINUTE": pa.int8(),
    "SECOND": _SECONDS,
}
_OF_MONTHS = {"YEAR": INT, "MONTH": pa.int8()}


def part(unit: str, operand: TypedExpression, *, what: str) -> TypedExpression:
    """A part of a time or of an interval.

    Args:
        unit: The part, such as HOUR.
        operand: The time.
        what: How errors call the function.
    """
    unit, kind = unit.upper(), operand.type
    if is_time(kind):
        parts = _OF_TIMES
    elif kind == INTERVAL:
        parts = _OF_INTERVALS
    else:
        parts = _OF_MONTHS if kind == type_rules.MONTHS else {}
    if unit not in parts:
        known = ", ".join(parts or _OF_TIMES).lower()
        raise ExpressionRefused(
            f"{what}({unit} FROM {type_name(kind)}) is not allowed.",
            f"take one of {known} from a date, a timestamp or an interval.",
        )
    return infallible(parts[unit], f"extract({unit} FROM {{0}})", operand)


def is_call(name: str, arguments: int) -> bool:
    """Whether a call has a unit as its first argument."""
    return name in (*_DIFFERENCES, *_SUMS) and (arguments == 3 or name.startswith("timestamp"))


def call(name: str, unit: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """`timestampdiff`, `timestampadd` and their other names, with a unit."""
    unit = unit.upper()
    if unit not in UNITS:
        raise ExpressionRefused(
            f"{name} has no unit {unit!r}.", f"use one of {', '.join(UNITS).lower()}."
        )
    is_sum = name in _SUMS
    example = f"{name}({unit}, {'3, at' if is_sum else 'sent_at, arrived_at'})"
    times = arguments[1:] if is_sum else arguments
    fits = len(arguments) == 2 and all(is_time(each.type) for each in times)
    if not fits or (is_sum and not type_rules.is_integer(arguments[0].type)):
        shown = ", ".join(type_name(each.type) for each in arguments)
        raise ExpressionRefused(
            f"{name}({unit}, {shown}) does not fit.", f"write it as in {example}."
        )
    template = f"{name}({unit}, {{0}}, {{1}})"
    # Spark would cast by itself, and could fail doing so.
    stamps = [
        casts.cast(each, TIMESTAMP) if each.type == type_rules.DATE else each for each in times
    ]
    if not is_sum:
        return guarded(BIGINT, template, *stamps)
    count = arguments[0]
    if count.type == BIGINT:
        count = casts.cast(count, INT)
    return guarded(stamps[0].type, template, count, stamps[0])
