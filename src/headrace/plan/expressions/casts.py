"""CAST, as Spark's ANSI mode has it: which types can become which, and which of these can fail on a
row.
"""

from __future__ import annotations

import re
from datetime import date, datetime
from decimal import Decimal, InvalidOperation

import pyarrow as pa

from headrace.operators.aggregates.specs import is_number
from headrace.plan.expressions import type_rules
from headrace.plan.expressions.type_rules import (
    BINARY,
    BOOLEAN,
    DATE,
    DOUBLE,
    STRING,
    TIMESTAMP,
    TIMESTAMP_NTZ,
    VOID,
    is_time,
)
from headrace.plan.expressions.typed_expression import (
    ExpressionRefused,
    TypedExpression,
    leaf,
    partial,
    total,
)
from headrace.types.schema import type_name

_SURE_DIGITS = {
    pa.int8(): 2,
    pa.int16(): 4,
    type_rules.INT: 9,
    type_rules.BIGINT: 18,
}  # every number with so many digits fits
# Spark takes any bytes for text; what is no UTF-8 would break every reader behind it
_TEXT_OF_BYTES = "CAST({0} AS STRING)"
_DATE_TEXT = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_TIME_TEXT = re.compile(
    r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:\d\d)?)?", re.ASCII
)


def cast(piece: TypedExpression, kind: pa.DataType, *, written: bool = True) -> TypedExpression:
    """`piece` as another type. `written` tells a user's CAST, which may be of any kind Spark has,
    from one that we add.
    """
    if piece.type == kind and not written:
        return piece
    if not possible(piece.type, kind):
        raise ExpressionRefused(
            f"{type_name(piece.type)} cannot be cast to {type_name(kind)}.", _hint(piece.type, kind)
        )
    name = type_name(kind)
    if (piece.type, kind) == (BINARY, STRING):
        return partial(
            kind, f"validate_utf8({_TEXT_OF_BYTES})", f"try_validate_utf8({_TEXT_OF_BYTES})", piece
        )
    if not can_fail(piece.type, kind):
        return total(kind, f"CAST({{0}} AS {name})", piece)
    return partial(kind, f"CAST({{0}} AS {name})", f"try_cast({{0}} AS {name})", piece)


def try_cast(piece: TypedExpression, kind: pa.DataType) -> TypedExpression:
    """A user's own TRY_CAST: null is what was asked for, and no failure."""
    if not possible(piece.type, kind):
        raise ExpressionRefused(
            f"{type_name(piece.type)} cannot be cast to {type_name(kind)}.", _hint(piece.type, kind)
        )
    template = (
        f"try_validate_utf8({_TEXT_OF_BYTES})"
        if (piece.type, kind) == (BINARY, STRING)
        else f"try_cast({{0}} AS {type_name(kind)})"
    )
    return total(kind, template, piece)


def _hint(source: pa.DataType, target: pa.DataType) -> str:
    if pa.types.is_nested(source) and pa.types.is_nested(target):
        return (
            "nested values can be cast only where no element can fail; take the elements out first."
        )
    return "cast it to STRING first, if that is what you mean." if target != STRING else ""


def possible(source: pa.DataType, target: pa.DataType) -> bool:
    if source in (target, VOID):
        return True
    if pa.types.is_nested(source) or pa.types.is_nested(target):
        return target == STRING or _nested_possible(source, target)
    if target == STRING:
        return bool(source != type_rules.MONTHS)
    if source == STRING:
        return bool(target != type_rules.MONTHS)
    if is_number(source):
        return is_number(target) or target in (BOOLEAN, TIMESTAMP)
    if source in (BOOLEAN, TIMESTAMP) and is_number(target):
        return True
    return is_time(source) and is_time(target)


def _nested_possible(source: pa.DataType, target: pa.DataType) -> bool:
    """Element by element; a failure inside would go unseen, so none may be possible."""
    inner = list(_parts(source, target))
    return bool(inner) and all(possible(*pair) and not can_fail(*pair) for pair in inner)


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
        return [(one.type, other.type) for one, other in zip(source, target, strict=True)]
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
        return not _fits(source, target)
    if source == BOOLEAN:
        return bool(pa.types.is_decimal(target)) and target.precision == target.scale
    return not (source in (TIMESTAMP, TIMESTAMP_NTZ) and target in (DATE, type_rules.BIGINT))


def _fits(source: pa.DataType, target: pa.DataType) -> bool:
    if pa.types.is_floating(source):
        return False
    if type_rules.is_integer(source) and type_rules.is_integer(target):
        return bool(type_rules.wider(source, target) == target)
    one = type_rules.decimal_of(source)
    if type_rules.is_integer(target):
        return bool(one.precision - one.scale <= _SURE_DIGITS[target])
    whole, room = one.precision - one.scale, target.precision - target.scale
    return bool(room > whole or (room == whole and target.scale >= one.scale))


def literal_as(piece: TypedExpression, kind: pa.DataType) -> TypedExpression:
    """A text that stands beside a date, a time, a number or a truth value, read as one now:
    'placed_at > "2026-01-31"'.
    """
    text = str(piece.value).strip()
    if not _reads_as(text, kind):
        raise ExpressionRefused(
            f"The text {piece.value!r} is compared with {type_name(kind)}, and cannot be read as"
            " such.",
            _example(kind),
        )
    return leaf(kind, f"CAST({piece.sql} AS {type_name(kind)})")


def _reads_as(text: str, kind: pa.DataType) -> bool:
    try:
        if kind == DATE:
            return bool(_DATE_TEXT.fullmatch(text) and date.fromisoformat(text))
        if kind in (TIMESTAMP, TIMESTAMP_NTZ):
            return bool(_TIME_TEXT.fullmatch(text) and datetime.fromisoformat(text))
        if is_number(kind):
            return _number_fits(Decimal(text), kind)
    except (ValueError, InvalidOperation):
        return False
    return kind == BOOLEAN and text.lower() in ("true", "false")


def _number_fits(value: Decimal, kind: pa.DataType) -> bool:
    if not value.is_finite():
        return False
    if pa.types.is_floating(kind):
        return True
    if type_rules.is_integer(kind):
        bits = kind.bit_width - 1
        return value == value.to_integral_value() and -(2**bits) <= value < 2**bits
    return bool(abs(value) < Decimal(10) ** (kind.precision - kind.scale))


def _example(kind: pa.DataType) -> str:
    examples = [
        (DATE, "'2026-01-31'"),
        (TIMESTAMP, "'2026-01-31 12:00:00'"),
        (TIMESTAMP_NTZ, "'2026-01-31 12:00:00'"),
        (BOOLEAN, "true or false"),
    ]
    return f"write it as in {dict(examples).get(kind, '12.5')}."


def typed_literal(piece: TypedExpression, kind: pa.DataType) -> TypedExpression:
    """DATE '2026-01-31' and its like."""
    if kind not in (DATE, TIMESTAMP, TIMESTAMP_NTZ):
        raise ExpressionRefused(
            f"A literal of type {type_name(kind)} cannot be written so.",
            f"use CAST({piece.sql} AS {type_name(kind)}).",
        )
    return literal_as(piece, kind)
