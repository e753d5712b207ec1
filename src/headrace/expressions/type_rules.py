"""Spark's type rules in ANSI mode, over Arrow types: which types go together, and the type of the
result. The tests compare them with Spark.

No column has two of the types: `VOID`, of a bare NULL, and `MONTHS`, of an interval of months and
years.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from functools import reduce

import pyarrow as pa

from headrace.columnar.columns import TIMESTAMP_TYPE
from headrace.types.ddl import TIMESTAMP_NTZ_TYPE

VOID = pa.null()
MONTHS = pa.month_day_nano_interval()
INTERVAL = pa.duration("us")
TIMESTAMP, TIMESTAMP_NTZ, DATE = TIMESTAMP_TYPE, TIMESTAMP_NTZ_TYPE, pa.date32()
BOOLEAN, STRING, BINARY = pa.bool_(), pa.string(), pa.binary()
INT, BIGINT, FLOAT, DOUBLE = pa.int32(), pa.int64(), pa.float32(), pa.float64()
INTEGERS = (pa.int8(), pa.int16(), INT, BIGINT)
MAX_DECIMAL_DIGITS = 38
MINIMUM_KEPT_SCALE = 6
_DIGITS = {pa.int8(): 3, pa.int16(): 5, INT: 10, BIGINT: 20}


def is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    )


def is_integer(kind: pa.DataType) -> bool:
    return kind in INTEGERS


def is_time(kind: pa.DataType) -> bool:
    """Whether a type is a date or a timestamp."""
    return kind in (DATE, TIMESTAMP, TIMESTAMP_NTZ)


def decimal_type(kind: pa.DataType, literal: int | None = None) -> pa.DataType:
    """The decimal type that holds every value of an integer type, or just a literal's value."""
    if pa.types.is_decimal(kind):
        return kind
    return pa.decimal128(_DIGITS[kind] if literal is None else max(1, len(str(abs(literal)))))


def literal_decimal_type(value: Decimal) -> pa.DataType:
    """The type of a literal such as 12.50."""
    _, digits, exponent = value.as_tuple()
    scale = max(0, -int(exponent))
    precision = max(len(digits) + max(0, int(exponent)), scale)
    return pa.decimal128(precision, scale)


def wider_type(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    """The number type that holds both; None if there is none, since decimals have at most 38
    digits.
    """
    if left == right:
        return left
    if is_integer(left) and is_integer(right):
        return max(left, right, key=INTEGERS.index)
    if pa.types.is_floating(left) or pa.types.is_floating(right):
        return DOUBLE
    left, right = decimal_type(left), decimal_type(right)
    scale = max(left.scale, right.scale)
    precision = max(left.precision - left.scale, right.precision - right.scale) + scale
    return pa.decimal128(precision, scale) if precision <= MAX_DECIMAL_DIGITS else None


def least_common_type(kinds: Iterable[pa.DataType]) -> pa.DataType | None:
    """The type that several alternatives can be converted to without loss; None if there is none.
    VOID goes with every type.
    """
    different = list(dict.fromkeys(kind for kind in kinds if kind != VOID))
    if not different:
        return VOID
    if len(different) == 1:
        return different[0]
    if all(is_number(kind) for kind in different):
        return reduce(
            lambda left, right: None if left is None else wider_type(left, right), different
        )
    timestamps = [kind for kind in different if kind != DATE]
    return (
        timestamps[0] if all(is_time(kind) for kind in different) and len(timestamps) == 1 else None
    )


def sum_type(left: pa.DataType, right: pa.DataType) -> pa.DataType:
    """The type of a sum or difference of decimals."""
    scale = max(left.scale, right.scale)
    return adjust_precision(
        max(left.precision - left.scale, right.precision - right.scale) + scale + 1, scale
    )


def product_type(left: pa.DataType, right: pa.DataType) -> pa.DataType:
    """The type of a product of decimals."""
    return adjust_precision(left.precision + right.precision + 1, left.scale + right.scale)


def quotient_type(left: pa.DataType, right: pa.DataType) -> pa.DataType:
    """The type of a quotient of decimals."""
    scale = max(MINIMUM_KEPT_SCALE, left.scale + right.precision + 1)
    return adjust_precision(left.precision - left.scale + right.scale + scale, scale)


def remainder_type(left: pa.DataType, right: pa.DataType) -> pa.DataType:
    """The type of a remainder of decimals."""
    scale = max(left.scale, right.scale)
    return adjust_precision(
        min(left.precision - left.scale, right.precision - right.scale) + scale, scale
    )


def adjust_precision(precision: int, scale: int) -> pa.DataType:
    """A decimal type of at most 38 digits. Digits before the point are kept; those behind it are
    cut, down to six.
    """
    if precision <= MAX_DECIMAL_DIGITS:
        return pa.decimal128(precision, scale)
    whole_digits = precision - scale
    return pa.decimal128(
        MAX_DECIMAL_DIGITS, max(MAX_DECIMAL_DIGITS - whole_digits, min(scale, MINIMUM_KEPT_SCALE))
    )


def is_comparable(kind: pa.DataType) -> bool:
    """Whether values can be compared: all but maps, and types that contain maps."""
    if pa.types.is_map(kind):
        return False
    if pa.types.is_list(kind):
        return is_comparable(kind.value_type)
    return all(is_comparable(field.type) for field in kind) if pa.types.is_struct(kind) else True
