"""Arithmetic on numbers, dates, times and intervals: the type of the result, and the form that
gives null where an operation fails.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from headrace.expressions import type_rules
from headrace.expressions.casts import cast
from headrace.expressions.type_rules import (
    BIGINT,
    DATE,
    DOUBLE,
    INTERVAL,
    MONTHS,
    TIMESTAMP,
    is_integer,
    is_number,
    is_time,
)
from headrace.expressions.typed_expression import (
    ExpressionRefused,
    TypedExpression,
    fallible,
    guarded,
    infallible,
)
from headrace.types.schema import type_name

_TRY = {"+": "try_add", "-": "try_subtract", "*": "try_multiply", "/": "try_divide", "%": "try_mod"}
_DECIMALS: dict[str, Callable[[pa.DataType, pa.DataType], pa.DataType]] = {
    "+": type_rules.sum_type,
    "-": type_rules.sum_type,
    "*": type_rules.product_type,
    "/": type_rules.quotient_type,
    "%": type_rules.remainder_type,
}


def arithmetic(sign: str, left: TypedExpression, right: TypedExpression) -> TypedExpression:
    """`left sign right`, for + - * / and %."""
    if left.is_null or right.is_null:
        raise ExpressionRefused(
            f"NULL {sign} anything is null.", "leave it out, or cast it: CAST(NULL AS INT)."
        )
    if is_number(left.type) and is_number(right.type):
        kind = number_type(sign, left, right)
        exact = pa.types.is_decimal(kind)
        surely = (
            not exact and _not_zero(right) if sign in ("/", "%") else pa.types.is_floating(kind)
        )
        return (
            infallible(kind, f"({{0}} {sign} {{1}})", left, right)
            if surely
            else _try_operation(kind, sign, left, right)
        )
    if sign in ("+", "-") and (is_time(left.type) or is_time(right.type)):
        return _time_arithmetic(sign, left, right)
    if INTERVAL in (left.type, right.type):
        name = type_name(INTERVAL)
        both = left.type == right.type == INTERVAL
        scaled = (sign == "*" and (is_number(left.type) or is_number(right.type))) or (
            sign == "/" and is_number(right.type)
        )
        if not scaled and not (both and sign in ("+", "-")):
            raise _type_mismatch(sign, left, right)
        return fallible(
            INTERVAL,
            f"CAST(({{0}} {sign} {{1}}) AS {name})",
            f"CAST({_TRY[sign]}({{0}}, {{1}}) AS {name})",
            left,
            right,
        )
    raise _type_mismatch(sign, left, right)


def _not_zero(operand: TypedExpression) -> bool:
    return operand.is_literal and operand.value != 0


def number_type(sign: str, left: TypedExpression, right: TypedExpression) -> pa.DataType:
    """The type of an operation on numbers. Decimals with integers are exact, anything with floating
    numbers is floating, and the result of `/` is never an integer.
    """
    kinds = (left.type, right.type)
    floating = any(map(pa.types.is_floating, kinds))
    if not floating and any(map(pa.types.is_decimal, kinds)):
        return _DECIMALS[sign](_decimal(left), _decimal(right))
    return DOUBLE if sign == "/" else type_rules.wider_type(*kinds)


def _decimal(operand: TypedExpression) -> pa.DataType:
    return type_rules.decimal_type(
        operand.type,
        operand.value if operand.is_literal and isinstance(operand.value, int) else None,
    )


def _try_operation(
    kind: pa.DataType, sign: str, left: TypedExpression, right: TypedExpression
) -> TypedExpression:
    return fallible(kind, f"({{0}} {sign} {{1}})", f"{_TRY[sign]}({{0}}, {{1}})", left, right)


def _time_arithmetic(sign: str, left: TypedExpression, right: TypedExpression) -> TypedExpression:
    if is_time(left.type) and is_time(right.type) and sign == "-":
        return _difference(left, right)
    if sign == "+" and not is_time(left.type):
        left, right = right, left
    if not is_time(left.type) or is_time(right.type):
        raise _type_mismatch(sign, left, right)
    if left.type == DATE and is_integer(right.type) and right.type != BIGINT:
        return infallible(
            DATE, f"date_{'add' if sign == '+' else 'sub'}({{0}}, {{1}})", left, right
        )
    if right.type == MONTHS or (right.type == INTERVAL and (left.type != DATE or right.whole_days)):
        return _try_operation(left.type, sign, left, right)
    if right.type == INTERVAL:
        return _try_operation(TIMESTAMP, sign, cast(left, TIMESTAMP, explicit=False), right)
    raise _type_mismatch(sign, left, right)


def _difference(left: TypedExpression, right: TypedExpression) -> TypedExpression:
    """The difference of two times, always as INTERVAL DAY TO SECOND."""
    kind = type_rules.least_common_type([left.type, right.type])
    if kind is None:
        raise _type_mismatch("-", left, right)
    left, right = cast(left, kind, explicit=False), cast(right, kind, explicit=False)
    name = type_name(INTERVAL)
    return fallible(
        INTERVAL,
        f"CAST(({{0}} - {{1}}) AS {name})",
        f"CAST(try_subtract({{0}}, {{1}}) AS {name})",
        left,
        right,
    )


def whole_division(left: TypedExpression, right: TypedExpression) -> TypedExpression:
    """DIV. Spark has no try_ form of it, so operands that would fail are replaced by null."""
    if not (is_integer(left.type) and is_integer(right.type)):
        raise ExpressionRefused(
            f"DIV takes whole numbers, not {type_name(left.type)} and {type_name(right.type)}.",
            "use floor(a / b).",
        )
    if _not_zero(right) and right.value != -1:
        return infallible(BIGINT, "({0} DIV {1})", left, right)
    min_by_minus_one = (
        "(CASE WHEN {1} = -1 THEN try_subtract(0, {0}) ELSE {0} DIV nullif({1}, 0) END)"
    )
    return fallible(
        BIGINT,
        "({0} DIV {1})",
        min_by_minus_one if left.type == BIGINT else "({0} DIV nullif({1}, 0))",
        left,
        right,
    )


def positive_remainder(left: TypedExpression, right: TypedExpression) -> TypedExpression:
    if not all(
        is_number(each.type) and not pa.types.is_decimal(each.type) for each in (left, right)
    ):
        raise ExpressionRefused(
            f"pmod takes whole and floating numbers, not {type_name(left.type)} and"
            f" {type_name(right.type)}.",
            "cast them to DOUBLE.",
        )
    kind = number_type("%", left, right)
    return fallible(kind, "pmod({0}, {1})", "pmod({0}, nullif({1}, 0))", left, right)


def negate(operand: TypedExpression) -> TypedExpression:
    """Negation. It fails on the smallest integer of a type."""
    if is_integer(operand.type):
        return fallible(
            operand.type,
            "(- {0})",
            f"try_subtract(CAST(0 AS {type_name(operand.type)}), {{0}})",
            operand,
        )
    if operand.type == INTERVAL:
        return fallible(
            INTERVAL,
            "(- {0})",
            f"try_subtract(CAST(INTERVAL '0' SECOND AS {type_name(INTERVAL)}), {{0}})",
            operand,
        )
    if is_number(operand.type):
        return infallible(operand.type, "(- {0})", operand)
    raise ExpressionRefused(f"- takes numbers and intervals, not {type_name(operand.type)}.")


def absolute_value(operand: TypedExpression) -> TypedExpression:
    if is_integer(operand.type):
        wide_type = "DECIMAL(20,0)" if operand.type == BIGINT else "BIGINT"
        return fallible(
            operand.type,
            "abs({0})",
            f"try_cast(abs(CAST({{0}} AS {wide_type})) AS {type_name(operand.type)})",
            operand,
        )
    if is_number(operand.type):
        return infallible(operand.type, "abs({0})", operand)
    raise ExpressionRefused(f"abs takes numbers, not {type_name(operand.type)}.")


def round_number(
    name: str, operand: TypedExpression, digits: TypedExpression | None
) -> TypedExpression:
    """`round` and `bround`, to a literal number of digits."""
    if not is_number(operand.type):
        raise ExpressionRefused(f"{name} takes numbers, not {type_name(operand.type)}.")
    scale = 0 if digits is None else digits.value
    if digits is not None and not (
        digits.is_literal and isinstance(scale, int) and abs(scale) <= 30
    ):
        raise ExpressionRefused(
            f"The number of digits of {name} must be written out, from -30 to 30.",
            f"write it as in {name}(amount, 2).",
        )
    template = f"{name}({{0}}, {scale})"
    if is_integer(operand.type):
        kind, wide = type_name(operand.type), f"{name}(CAST({{0}} AS DECIMAL(38,0)), {scale})"
        return (
            infallible(operand.type, template, operand)
            if scale >= 0
            else fallible(
                operand.type, f"CAST({wide} AS {kind})", f"try_cast({wide} AS {kind})", operand
            )
        )
    rounded = operand.type
    if pa.types.is_decimal(rounded):
        kept = max(0, min(rounded.scale, scale))
        precision = max(rounded.precision - rounded.scale + 1 + kept, 1 - scale)
        if precision > type_rules.MAX_DECIMAL_DIGITS:
            raise ExpressionRefused(
                f"A rounded {type_name(rounded)} could need more than 38 digits.",
                "cast it to a DECIMAL with fewer digits first.",
            )
        rounded = pa.decimal128(precision, kept)
    return infallible(rounded, template, operand)


def floor_or_ceil(name: str, operand: TypedExpression) -> TypedExpression:
    """`floor` and `ceil`."""
    if pa.types.is_decimal(operand.type):
        digits = operand.type.precision - operand.type.scale + 1
        return infallible(
            pa.decimal128(min(digits, type_rules.MAX_DECIMAL_DIGITS)), f"{name}({{0}})", operand
        )
    if is_integer(operand.type):
        return infallible(BIGINT, f"{name}({{0}})", operand)
    if is_number(operand.type):
        return fallible(
            BIGINT,
            f"{name}({{0}})",
            f"(CASE WHEN try_cast(nanvl({{0}}, 0D) AS BIGINT) IS NOT NULL THEN {name}({{0}}) END)",
            operand,
        )
    raise ExpressionRefused(f"{name} takes numbers, not {type_name(operand.type)}.")


def floor_to_digits(
    name: str, operand: TypedExpression, digits: TypedExpression
) -> TypedExpression:
    """`floor` and `ceil` to a literal number of digits. Spark computes them as decimals."""
    scale = digits.value
    if not is_number(operand.type) or not (isinstance(scale, int) and abs(scale) <= 30):
        raise ExpressionRefused(
            f"{name} takes a number and a number of digits that is written out, from -30 to 30.",
            f"write it as in {name}(amount, 2).",
        )
    is_floating = pa.types.is_floating(operand.type)
    wide = pa.decimal128(*((30, 15) if operand.type == DOUBLE else (14, 7)))
    decimal = wide if is_floating else type_rules.decimal_type(operand.type)
    kept = max(0, min(decimal.scale, scale))
    precision = max(decimal.precision - decimal.scale + 1 + kept, 1 - scale)
    kind = pa.decimal128(min(precision, type_rules.MAX_DECIMAL_DIGITS), kept)
    return guarded(kind, f"{name}({{0}}, {scale})", operand)


def bitwise(sign: str, left: TypedExpression, right: TypedExpression) -> TypedExpression:
    if not (is_integer(left.type) and is_integer(right.type)):
        raise ExpressionRefused(
            f"{sign} takes whole numbers, not {type_name(left.type)} and {type_name(right.type)}."
        )
    return infallible(
        type_rules.wider_type(left.type, right.type), f"({{0}} {sign} {{1}})", left, right
    )


def shift(sign: str, left: TypedExpression, right: TypedExpression) -> TypedExpression:
    """A shift of an INT or BIGINT by an INT, as Spark has it."""
    if not is_integer(left.type) or not is_integer(right.type) or right.type == BIGINT:
        raise ExpressionRefused(
            f"{sign} takes whole numbers, not {type_name(left.type)} and {type_name(right.type)}.",
            "cast them: BIGINT on the left, INT on the right.",
        )
    return infallible(
        BIGINT if left.type == BIGINT else type_rules.INT, f"({{0}} {sign} {{1}})", left, right
    )


def _type_mismatch(sign: str, left: TypedExpression, right: TypedExpression) -> ExpressionRefused:
    operation = f"{type_name(left.type)} {sign} {type_name(right.type)}"
    return ExpressionRefused(
        f"{operation} has no meaning here.",
        "cast one side: CAST(… AS DOUBLE), CAST(… AS TIMESTAMP).",
    )
