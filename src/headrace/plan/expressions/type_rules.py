"""Spark's rules for types, over Arrow's: which types go together and what comes out, under ANSI
rules. Verified against Spark in the tests.

Two types have no columns of their own: `VOID`, of a bare NULL, and `MONTHS`, of an interval of
months and years.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from functools import reduce

import pyarrow as pa

from headrace.columnar.columns import TIMESTAMP_TYPE
from headrace.operators.aggregates.specs import MAX_DECIMAL_DIGITS, is_number
from headrace.types.ddl import TIMESTAMP_NTZ_TYPE

__all__ = ["MAX_DECIMAL_DIGITS", "is_number"]

VOID = pa.null()
MONTHS = pa.month_day_nano_interval()
INTERVAL = pa.duration("us")
TIMESTAMP, TIMESTAMP_NTZ, DATE = TIMESTAMP_TYPE, TIMESTAMP_NTZ_TYPE, pa.date32()
BOOLEAN, STRING, BINARY = pa.bool_(), pa.string(), pa.binary()
INT, BIGINT, FLOAT, DOUBLE = pa.int32(), pa.int64(), pa.float32(), pa.float64()
INTEGERS = (pa.int8(), pa.int16(), INT, BIGINT)
MINIMUM_KEPT_SCALE = 6
_DIGITS = {pa.int8(): 3, pa.int16(): 5, INT: 10, BIGINT: 20}


def is_integer(kind: pa.DataType) -> bool:
    return kind in INTEGERS


def is_time(kind: pa.DataType) -> bool:
    """A date or a timestamp."""
    return kind in (DATE, TIMESTAMP, TIMESTAMP_NTZ)


def decimal_of(kind: pa.DataType, literal: int | None = None) -> pa.DataType:
    """The decimal that holds every value of an integer type; of a literal, just that one."""
    if pa.types.is_decimal(kind):
        return kind
    return pa.decimal128(_DIGITS[kind] if literal is None else max(1, len(str(abs(literal)))))


def literal_decimal(value: Decimal) -> pa.DataType:
    """The type of a literal such as 12.50."""
    _, digits, exponent = value.as_tuple()
    scale = max(0, -int(exponent))
    precision = max(len(digits) + max(0, int(exponent)), scale)
    return pa.decimal128(precision, scale)


def wider(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    """The number type that holds both; None if there is none, since a decimal has at most 38
    digits.
    """
    if left == right:
        return left
    if is_integer(left) and is_integer(right):
        return max(left, right, key=INTEGERS.index)
    if pa.types.is_floating(left) or pa.types.is_floating(right):
        return DOUBLE
    left, right = decimal_of(left), decimal_of(right)
    scale = max(left.scale, right.scale)
    precision = max(left.precision - left.scale, right.precision - right.scale) + scale
    return pa.decimal128(precision, scale) if precision <= MAX_DECIMAL_DIGITS else None


def common(kinds: Iterable[pa.DataType]) -> pa.DataType | None:
    """The type that several alternatives have together; None if they have none. VOID goes with
    everything.
    """
    given = list(dict.fromkeys(kind for kind in kinds if kind != VOID))
    if not given:
        return VOID
    if len(given) == 1:
        return given[0]
    if all(is_number(kind) for kind in given):
        return reduce(lambda left, right: None if left is None else wider(left, right), given)
    moments = [kind for kind in given if kind != DATE]
    return moments[0] if all(is_time(kind) for kind in given) and len(moments) == 1 else None


def sum_type(left: pa.DataType, right: pa.DataType) -> pa.DataType:
    scale = max(left.scale, right.scale)
    return adjusted(
        max(left.precision - left.scale, right.precision - right.scale) + scale + 1, scale
    )


def product_type(left: pa.DataType, right: pa.DataType) -> pa.DataType:
    return adjusted(left.precision + right.precision + 1, left.scale + right.scale)


def quotient_type(left: pa.DataType, right: pa.DataType) -> pa.DataType:
    scale = max(MINIMUM_KEPT_SCALE, left.scale + right.precision + 1)
    return adjusted(left.precision - left.scale + right.scale + scale, scale)


def remainder_type(left: pa.DataType, right: pa.DataType) -> pa.DataType:
    scale = max(left.scale, right.scale)
    return adjusted(min(left.precision - left.scale, right.precision - right.scale) + scale, scale)


def adjusted(precision: int, scale: int) -> pa.DataType:
    """Digits before the point are kept; those behind it give way, down to six."""
    if precision <= MAX_DECIMAL_DIGITS:
        return pa.decimal128(precision, scale)
    whole_digits = precision - scale
    return pa.decimal128(
        MAX_DECIMAL_DIGITS, max(MAX_DECIMAL_DIGITS - whole_digits, min(scale, MINIMUM_KEPT_SCALE))
    )


def comparable(kind: pa.DataType) -> bool:
    """Whether values can be equal or not: all but maps, and what holds them."""
    if pa.types.is_map(kind):
        return False
    if pa.types.is_list(kind):
        return comparable(kind.value_type)
    return all(comparable(field.type) for field in kind) if pa.types.is_struct(kind) else True
