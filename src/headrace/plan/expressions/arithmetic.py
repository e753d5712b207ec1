"""Arithmetic on numbers, dates, times and intervals: the result's type, and the forms that give
null where a result cannot be had.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from headrace.operators.aggregates.specs import is_number
from headrace.plan.expressions import type_rules
from headrace.plan.expressions.casts import cast
from headrace.plan.expressions.type_rules import (
    BIGINT,
    DATE,
    DOUBLE,
    INTERVAL,
    MONTHS,
    TIMESTAMP,
    is_integer,
    is_time,
)
from headrace.plan.expressions.typed_expression import (
    ExpressionRefused,
    TypedExpression,
    partial,
    total,
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
        return _numbers(sign, left, right)
    if sign in ("+", "-") and (is_time(left.type) or is_time(right.type)):
        return _moments(sign, left, right)
    if INTERVAL in (left.type, right.type):
        return _intervals(sign, left, right)
    raise _misfit(sign, left, right)


def _numbers(sign: str, left: TypedExpression, right: TypedExpression) -> TypedExpression:
    kind = number_type(sign, left, right)
    exact = pa.types.is_decimal(kind)
    surely = not exact and _not_zero(right) if sign in ("/", "%") else pa.types.is_floating(kind)
    return (
        total(kind, f"({{0}} {sign} {{1}})", left, right)
        if surely
        else _tried(kind, sign, left, right)
    )


def _not_zero(piece: TypedExpression) -> bool:
    return piece.is_literal and piece.value != 0


def number_type(sign: str, left: TypedExpression, right: TypedExpression) -> pa.DataType:
    """Decimals with integers are exact, anything with floating numbers is floating, and `/` is
    never whole.
    """
    one, other = left.type, right.type
    if pa.types.is_floating(one) or pa.types.is_floating(other):
        return DOUBLE if sign == "/" else type_rules.wider(one, other)
    if pa.types.is_decimal(one) or pa.types.is_decimal(other):
        return _DECIMALS[sign](_decimal(left), _decimal(right))
    return DOUBLE if sign == "/" else type_rules.wider(one, other)


def _decimal(piece: TypedExpression) -> pa.DataType:
    return type_rules.decimal_of(
        piece.type, piece.value if piece.is_literal and isinstance(piece.value, int) else None
    )


def _tried(
    kind: pa.DataType, sign: str, left: TypedExpression, right: TypedExpression
) -> TypedExpression:
    return partial(kind, f"({{0}} {sign} {{1}})", f"{_TRY[sign]}({{0}}, {{1}})", left, right)


def _moments(sign: str, left: TypedExpression, right: TypedExpression) -> TypedExpression:
    if is_time(left.type) and is_time(right.type) and sign == "-":
        return _difference(left, right)
    if sign == "+" and not is_time(left.type):
        left, right = right, left
    if not is_time(left.type) or is_time(right.type):
        raise _misfit(sign, left, right)
    if left.type == DATE and is_integer(right.type) and right.type != BIGINT:
        return total(DATE, f"date_{'add' if sign == '+' else 'sub'}({{0}}, {{1}})", left, right)
    if right.type == MONTHS or (right.type == INTERVAL and (left.type != DATE or right.whole_days)):
        return _tried(left.type, sign, left, right)
    if right.type == INTERVAL:
        return _tried(TIMESTAMP, sign, cast(left, TIMESTAMP, written=False), right)
    raise _misfit(sign, left, right)


def _difference(left: TypedExpression, right: TypedExpression) -> TypedExpression:
    """The time between two moments; always as INTERVAL DAY TO SECOND."""
    kind = type_rules.common([left.type, right.type])
    if kind is None:
        raise _misfit("-", left, right)
    left, right = cast(left, kind, written=False), cast(right, kind, written=False)
    name = type_name(INTERVAL)
    return partial(
        INTERVAL,
        f"CAST(({{0}} - {{1}}) AS {name})",
        f"CAST(try_subtract({{0}}, {{1}}) AS {name})",
        left,
        right,
    )


def _intervals(sign: str, left: TypedExpression, right: TypedExpression) -> TypedExpression:
    name = type_name(INTERVAL)
    both = left.type == right.type == INTERVAL
    scaled = (sign == "*" and (is_number(left.type) or is_number(right.type))) or (
        sign == "/" and is_number(right.type)
    )
    if not scaled and not (both and sign in ("+", "-")):
        raise _misfit(sign, left, right)
    return partial(
        INTERVAL,
        f"CAST(({{0}} {sign} {{1}}) AS {name})",
        f"CAST({_TRY[sign]}({{0}}, {{1}}) AS {name})",
        left,
        right,
    )


def whole_division(left: TypedExpression, right: TypedExpression) -> TypedExpression:
    """DIV: there is no form of it that tries, so what would fail is left out beforehand."""
    if not (is_integer(left.type) and is_integer(right.type)):
        raise ExpressionRefused(
            f"DIV takes whole numbers, not {type_name(left.type)} and {type_name(right.type)}.",
            "use floor(a / b).",
        )
    if _not_zero(right) and right.value != -1:
        return total(BIGINT, "({0} DIV {1})", left, right)
    min_by_minus_one = (
        "(CASE WHEN {1} = -1 THEN try_subtract(0, {0}) ELSE {0} DIV nullif({1}, 0) END)"
    )
    return partial(
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
    return partial(kind, "pmod({0}, {1})", "pmod({0}, nullif({1}, 0))", left, right)


def negated(piece: TypedExpression) -> TypedExpression:
    """The least integer of a type has no negative."""
    if is_integer(piece.type):
        return partial(
            piece.type, "(- {0})", f"try_subtract(CAST(0 AS {type_name(piece.type)}), {{0}})", piece
        )
    if piece.type == INTERVAL:
        return partial(
            INTERVAL,
            "(- {0})",
            f"try_subtract(CAST(INTERVAL '0' SECOND AS {type_name(INTERVAL)}), {{0}})",
            piece,
        )
    if is_number(piece.type):
        return total(piece.type, "(- {0})", piece)
    raise ExpressionRefused(f"- takes numbers and intervals, not {type_name(piece.type)}.")


def absolute(piece: TypedExpression) -> TypedExpression:
    if is_integer(piece.type):
        wider = "DECIMAL(20,0)" if piece.type == BIGINT else "BIGINT"
        return partial(
            piece.type,
            "abs({0})",
            f"try_cast(abs(CAST({{0}} AS {wider})) AS {type_name(piece.type)})",
            piece,
        )
    if is_number(piece.type):
        return total(piece.type, "abs({0})", piece)
    raise ExpressionRefused(f"abs takes numbers, not {type_name(piece.type)}.")


def rounded(name: str, piece: TypedExpression, digits: TypedExpression | None) -> TypedExpression:
    """Round and bround, to a number of digits that is written out."""
    if not is_number(piece.type):
        raise ExpressionRefused(f"{name} takes numbers, not {type_name(piece.type)}.")
    scale = 0 if digits is None else digits.value
    if digits is not None and not (
        digits.is_literal and isinstance(scale, int) and abs(scale) <= 30
    ):
        raise ExpressionRefused(
            f"The number of digits of {name} must be written out, from -30 to 30.",
            f"write it as in {name}(amount, 2).",
        )
    template = f"{name}({{0}}, {scale})"
    if is_integer(piece.type):
        kind, wide = type_name(piece.type), f"{name}(CAST({{0}} AS DECIMAL(38,0)), {scale})"
        return (
            total(piece.type, template, piece)
            if scale >= 0
            else partial(
                piece.type, f"CAST({wide} AS {kind})", f"try_cast({wide} AS {kind})", piece
            )
        )
    return total(_rounded_type(piece.type, scale), template, piece)


def _rounded_type(kind: pa.DataType, scale: int) -> pa.DataType:
    if not pa.types.is_decimal(kind):
        return kind
    kept = max(0, min(kind.scale, scale))
    precision = max(kind.precision - kind.scale + 1 + kept, 1 - scale)
    if precision > type_rules.MAX_DECIMAL_DIGITS:
        raise ExpressionRefused(
            f"A rounded {type_name(kind)} could need more than 38 digits.",
            "cast it to a DECIMAL with fewer digits first.",
        )
    return pa.decimal128(precision, kept)


def whole(name: str, piece: TypedExpression) -> TypedExpression:
    """Floor and ceil."""
    if pa.types.is_decimal(piece.type):
        digits = piece.type.precision - piece.type.scale + 1
        return total(
            pa.decimal128(min(digits, type_rules.MAX_DECIMAL_DIGITS)), f"{name}({{0}})", piece
        )
    if is_integer(piece.type):
        return total(BIGINT, f"{name}({{0}})", piece)
    if is_number(piece.type):
        return partial(
            BIGINT,
            f"{name}({{0}})",
            f"(CASE WHEN try_cast(nanvl({{0}}, 0D) AS BIGINT) IS NOT NULL THEN {name}({{0}}) END)",
            piece,
        )
    raise ExpressionRefused(f"{name} takes numbers, not {type_name(piece.type)}.")


def bitwise(sign: str, left: TypedExpression, right: TypedExpression) -> TypedExpression:
    if not (is_integer(left.type) and is_integer(right.type)):
        raise ExpressionRefused(
            f"{sign} takes whole numbers, not {type_name(left.type)} and {type_name(right.type)}."
        )
    return total(type_rules.wider(left.type, right.type), f"({{0}} {sign} {{1}})", left, right)


def shifted(sign: str, left: TypedExpression, right: TypedExpression) -> TypedExpression:
    """Spark shifts INT and BIGINT, by an INT."""
    if not is_integer(left.type) or not is_integer(right.type) or right.type == BIGINT:
        raise ExpressionRefused(
            f"{sign} takes whole numbers, not {type_name(left.type)} and {type_name(right.type)}.",
            "cast them: BIGINT on the left, INT on the right.",
        )
    return total(
        BIGINT if left.type == BIGINT else type_rules.INT, f"({{0}} {sign} {{1}})", left, right
    )


def _misfit(sign: str, left: TypedExpression, right: TypedExpression) -> ExpressionRefused:
    shown = f"{type_name(left.type)} {sign} {type_name(right.type)}"
    return ExpressionRefused(
        f"{shown} has no meaning here.", "cast one side: CAST(… AS DOUBLE), CAST(… AS TIMESTAMP)."
    )
