"""CAST in Spark's ANSI mode: which types can be cast to which, and which casts can fail on a
row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal, InvalidOperation

import pyarrow as pa

from headrace.expressions import type_rules
from headrace.expressions.type_rules import (
    BINARY,
    BOOLEAN,
    DATE,
    DOUBLE,
    STRING,
    TIMESTAMP,
    TIMESTAMP_NTZ,
    VOID,
    is_number,
    is_time,
)
from headrace.expressions.typed_expression import (
    ExpressionRefused,
    TypedExpression,
    fallible,
    infallible,
    leaf,
)
from headrace.types.schema import type_name

_SURE_DIGITS = {
    pa.int8(): 2,
    pa.int16(): 4,
    type_rules.INT: 9,
    type_rules.BIGINT: 18,
}
"""How many digits a number may have to fit an integer type in any case."""
# Spark casts any bytes to text. Bytes that are no UTF-8 would break every reader downstream.
_TEXT_OF_BYTES = "CAST({0} AS STRING)"
_DATE_TEXT = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_TIME_TEXT = re.compile(
    r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:\d\d)?)?", re.ASCII
)


def cast(operand: TypedExpression, kind: pa.DataType, *, explicit: bool = True) -> TypedExpression:
    """A value cast to another type. `explicit` is false for a cast that the user did not write,
    which is left out if the type is right already.
    """
    if operand.type == kind and not explicit:
        return operand
    if not is_castable(operand.type, kind):
        raise ExpressionRefused(
            f"{type_name(operand.type)} cannot be cast to {type_name(kind)}.",
            _hint(operand.type, kind),
        )
    name = type_name(kind)
    if (operand.type, kind) == (BINARY, STRING):
        return fallible(
            kind,
            f"validate_utf8({_TEXT_OF_BYTES})",
            f"try_validate_utf8({_TEXT_OF_BYTES})",
            operand,
        )
    if not can_fail(operand.type, kind):
        return infallible(kind, f"CAST({{0}} AS {name})", operand)
    return fallible(kind, f"CAST({{0}} AS {name})", f"try_cast({{0}} AS {name})", operand)


def try_cast(operand: TypedExpression, kind: pa.DataType) -> TypedExpression:
    """TRY_CAST, whose null is no failure."""
    if not is_castable(operand.type, kind):
        raise ExpressionRefused(
            f"{type_name(operand.type)} cannot be cast to {type_name(kind)}.",
            _hint(operand.type, kind),
        )
    template = (
        f"try_validate_utf8({_TEXT_OF_BYTES})"
        if (operand.type, kind) == (BINARY, STRING)
        else f"try_cast({{0}} AS {type_name(kind)})"
    )
    return infallible(kind, template, operand)


def _hint(source: pa.DataType, target: pa.DataType) -> str:
    if pa.types.is_nested(source) and pa.types.is_nested(target):
        return (
            "nested values can be cast only where no element can fail; take the elements out first."
        )
    return "cast it to STRING first, if that is what you mean." if target != STRING else ""


def is_castable(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether Spark casts one type to another."""
    if source in (target, VOID):
        return True
    if pa.types.is_nested(source) or pa.types.is_nested(target):
        # Element by element. Failures inside would go unnoticed, so none may be possible.
        inner = _parts(source, target)
        return target == STRING or (
            bool(inner) and all(is_castable(*pair) and not can_fail(*pair) for pair in inner)
        )
    if target == STRING:
        return bool(source != type_rules.MONTHS)
    if source == STRING:
        return bool(target != type_rules.MONTHS)
    if is_number(source):
        return is_number(target) or target in (BOOLEAN, TIMESTAMP)
    if source in (BOOLEAN, TIMESTAMP) and is_number(target):
        return True
    return is_time(source) and is_time(target)


def _parts(source: pa.DataType, target: pa.DataType) -> list[tuple[pa.DataType, pa.DataType]]:
    if pa.types.is_map(source) and pa.types.is_map(target):
        return [(source.key_type, target.key_type), (source.item_type, target.item_type)]
    if pa.types.is_list(source) and pa.types.is_list(target):
        return [(source.value_type, target.value_type)]
    if (
        pa.types.is_struct(source)
        and pa.types.is_struct(target)
        and source.num_fields == target.num_fields
    ):
        return [(left.type, right.type) for left, right in zip(source, target, strict=True)]
    return []


def can_fail(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether there are values of one type that the other cannot hold."""
    if (source, target) == (BINARY, STRING):
        return True
    if source in (target, VOID) or target == STRING or (source == STRING and target == BINARY):
        return False
    if pa.types.is_nested(source):
        return False
    if target in (DOUBLE, type_rules.FLOAT) or target == BOOLEAN:
        return bool(source == STRING)
    if is_number(source) and is_number(target):
        return not _always_fits(source, target)
    if source == BOOLEAN:
        return bool(pa.types.is_decimal(target)) and target.precision == target.scale
    return not (source in (TIMESTAMP, TIMESTAMP_NTZ) and target in (DATE, type_rules.BIGINT))


def _always_fits(source: pa.DataType, target: pa.DataType) -> bool:
    if pa.types.is_floating(source):
        return False
    if type_rules.is_integer(source) and type_rules.is_integer(target):
        return bool(type_rules.wider_type(source, target) == target)
    decimal = type_rules.decimal_type(source)
    whole_digits = decimal.precision - decimal.scale
    if type_rules.is_integer(target):
        return bool(whole_digits <= _SURE_DIGITS[target])
    room = target.precision - target.scale
    return bool(room > whole_digits or (room == whole_digits and target.scale >= decimal.scale))


def literal_as(operand: TypedExpression, kind: pa.DataType) -> TypedExpression:
    """A text literal that is compared with a value of another type, converted to that type when
    declared, as in `placed_at > '2026-01-31'`.
    """
    text = str(operand.value).strip()
    if not _is_text_of(text, kind):
        examples = {
            DATE: "'2026-01-31'",
            TIMESTAMP: "'2026-01-31 12:00:00'",
            TIMESTAMP_NTZ: "'2026-01-31 12:00:00'",
            BOOLEAN: "true or false",
        }
        raise ExpressionRefused(
            f"The text {operand.value!r} is compared with {type_name(kind)}, and cannot be read as"
            " such.",
            f"write it as in {examples.get(kind, '12.5')}.",
        )
    return leaf(kind, f"CAST({operand.sql} AS {type_name(kind)})")


def _is_text_of(text: str, kind: pa.DataType) -> bool:
    try:
        if kind == DATE:
            return bool(_DATE_TEXT.fullmatch(text) and date.fromisoformat(text))
        if kind in (TIMESTAMP, TIMESTAMP_NTZ):
            return bool(_TIME_TEXT.fullmatch(text) and datetime.fromisoformat(text))
        if is_number(kind):
            value = Decimal(text)
            if not value.is_finite():
                return False
            if pa.types.is_floating(kind):
                return True
            if type_rules.is_integer(kind):
                bits = kind.bit_width - 1
                return value == value.to_integral_value() and -(2**bits) <= value < 2**bits
            return bool(abs(value) < Decimal(10) ** (kind.precision - kind.scale))
    except (ValueError, InvalidOperation):
        return False
    return kind == BOOLEAN and text.lower() in ("true", "false")


def typed_literal(operand: TypedExpression, kind: pa.DataType) -> TypedExpression:
    """A literal with its type before it, such as DATE '2026-01-31'."""
    if kind not in (DATE, TIMESTAMP, TIMESTAMP_NTZ):
        raise ExpressionRefused(
            f"A literal of type {type_name(kind)} cannot be written so.",
            f"use CAST({operand.sql} AS {type_name(kind)}).",
        )
    return replace(literal_as(operand, kind), value=operand.value)


def common_type(operands: Sequence[TypedExpression], *, what: str) -> pa.DataType:
    """The type that several values can be converted to. `what` has the values, for errors."""
    kind = type_rules.least_common_type(each.type for each in operands)
    if kind is None:
        shown = ", ".join(dict.fromkeys(type_name(each.type) for each in operands))
        raise ExpressionRefused(
            f"The values of {what} have no type in common: {shown}.",
            "cast them to the same type, as in CAST(… AS STRING).",
        )
    return kind
