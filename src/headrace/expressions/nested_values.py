"""Functions that make structs, maps and sequences. Their names, for `functions`, are in
`NESTED_FUNCTIONS`.

A null key and a key that comes twice are found before a map is made. An error of Spark's must not
be caught here: it keeps the entries of the map that failed, and adds them to the next row's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pyarrow as pa

from headrace.expressions import casts, literals, type_rules
from headrace.expressions.type_rules import DATE, INTERVAL, STRING
from headrace.expressions.typed_expression import (
    ExpressionRefused,
    TypedExpression,
    allowed,
    guarded,
    infallible,
)
from headrace.types.schema import type_name

# Structs


def _named_struct(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    if len(arguments) % 2:
        raise ExpressionRefused(
            f"{name} was given {len(arguments)} arguments.",
            "give names and values in turn: named_struct('a', 1, 'b', 2).",
        )
    for each in arguments[::2]:
        literals.check("literal", each, function=name)
    return struct_of(
        [
            (str(each.value), value)
            for each, value in zip(arguments[::2], arguments[1::2], strict=True)
        ]
    )


def struct_of(members: Sequence[tuple[str, TypedExpression]]) -> TypedExpression:
    """A struct of named values."""
    fields = [pa.field(name, operand.type) for name, operand in members]
    inner = ", ".join(
        f"{literals.quoted_text(name).replace('{', '{{').replace('}', '}}')}, {{{position}}}"
        for position, (name, _) in enumerate(members)
    )
    return infallible(
        pa.struct(fields), f"named_struct({inner})", *(operand for _, operand in members)
    )


# Maps


def distinct_keys(keys: str) -> str:
    """The condition that an array of keys, as text, can be the keys of a map."""
    return (
        f"(NOT exists({keys}, `__key` -> `__key` IS NULL)"
        f" AND size(array_distinct({keys})) = size({keys}))"
    )


def _map(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """`map(key, value, …)`."""
    if len(arguments) % 2:
        raise ExpressionRefused(
            f"{name} was given {len(arguments)} arguments.",
            "give keys and values in turn: map('a', 1, 'b', 2).",
        )
    keys, values = arguments[::2], arguments[1::2]
    kind = _map_type(
        casts.common_type(keys, what=f"{name}'s keys"),
        casts.common_type(values, what=f"{name}'s values"),
    )
    slots = ", ".join(f"{{{position}}}" for position in range(len(arguments)))
    known = [each.value for each in keys if each.is_literal and each.value is not None]
    if len(set(map(str, known))) == len(keys):
        return infallible(kind, f"map({slots})", *arguments)
    key_slots = ", ".join(f"{{{position}}}" for position in range(0, len(arguments), 2))
    condition = distinct_keys(f"array({key_slots})")
    return allowed(kind, f"map({slots})", *arguments, allowed_if=condition)


def _map_type(keys: pa.DataType, values: pa.DataType) -> pa.DataType:
    if keys == type_rules.VOID or not type_rules.is_comparable(keys):
        raise ExpressionRefused(f"A map has no keys of type {type_name(keys)}.")
    return pa.map_(keys, values)


def _map_from_arrays(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    keys, values = arguments
    if not (pa.types.is_list(keys.type) and pa.types.is_list(values.type)):
        raise ExpressionRefused(
            f"{name} takes two arrays, not {type_name(keys.type)} and {type_name(values.type)}."
        )
    condition = f"(size({{0}}) = size({{1}}) AND {distinct_keys('{0}')})"
    kind = _map_type(keys.type.value_type, values.type.value_type)
    return allowed(kind, f"{name}({{0}}, {{1}})", keys, values, allowed_if=condition)


def _map_from_entries(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """An array of structs of two members. A null among them makes the map null."""
    kind = arguments[0].type
    entry = kind.value_type if pa.types.is_list(kind) else None
    if entry is None or not pa.types.is_struct(entry) or entry.num_fields != 2:
        raise ExpressionRefused(
            f"{name} takes an array of structs of two members, not {type_name(kind)}.",
            "map_from_arrays takes keys and values apart.",
        )
    member = literals.quoted_name(entry[0].name).replace("{", "{{").replace("}", "}}")
    keys = (
        f"transform(filter({{0}}, `__entry` -> `__entry` IS NOT NULL), `__entry` ->"
        f" `__entry`.{member})"
    )
    return allowed(
        _map_type(entry[0].type, entry[1].type),
        f"{name}({{0}})",
        *arguments,
        allowed_if=distinct_keys(keys),
    )


def _map_concat(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    kinds = {each.type for each in arguments}
    kind = arguments[0].type
    if len(kinds) != 1 or not pa.types.is_map(kind):
        shown = ", ".join(dict.fromkeys(type_name(each.type) for each in arguments))
        raise ExpressionRefused(f"{name} takes maps of one type, not {shown}.")
    slots = ", ".join(f"{{{position}}}" for position in range(len(arguments)))
    keys = ", ".join(f"map_keys({{{position}}})" for position in range(len(arguments)))
    condition = distinct_keys(f"concat({keys})")
    return allowed(kind, f"{name}({slots})", *arguments, allowed_if=condition)


def _text_to_map(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """`str_to_map(text, between, after key)`, whose delimiters are patterns."""
    for each in arguments:
        if each.type != STRING:
            raise ExpressionRefused(f"{name} takes texts, not {type_name(each.type)}.")
    for each in arguments[1:]:
        literals.check("pattern", each, function=name)
    between, after = (
        literals.quoted_text(
            str(arguments[position].value) if len(arguments) > position else default
        )
        .replace("{", "{{")
        .replace("}", "}}")
        for position, default in ((1, ","), (2, ":"))
    )
    keys = f"transform(split({{0}}, {between}), `__pair` -> get(split(`__pair`, {after}, 2), 0))"
    return allowed(
        pa.map_(STRING, STRING),
        f"{name}({{0}}, {between}, {after})",
        arguments[0],
        allowed_if=distinct_keys(keys),
    )


# Arrays


def _arrays_zip(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """Members are called by their columns; Spark would find names for other arguments too, which
    `concat` hides.
    """
    fields = []
    for position, each in enumerate(arguments):
        if not pa.types.is_list(each.type):
            raise ExpressionRefused(f"{name} takes arrays, not {type_name(each.type)}.")
        fields.append(pa.field(each.column or str(position), each.type.value_type))
    slots = ", ".join(
        f"{{{position}}}" if each.column is not None else f"concat({{{position}}})"
        for position, each in enumerate(arguments)
    )
    return infallible(pa.list_(pa.struct(fields)), f"{name}({slots})", *arguments)


_STEP = re.compile(r"INTERVAL ([+-]?[\d.]+) (\w+)")
MAX_ELEMENTS = 100_000


def _sequence(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """`sequence(first, last, step)`, of at most `MAX_ELEMENTS` elements."""
    start, stop = arguments[:2]
    kind = casts.common_type([start, stop], what=name)
    slots = ", ".join(f"{{{position}}}" for position in range(len(arguments)))
    template = f"{name}({slots})"
    if type_rules.is_integer(kind):
        steps = arguments[2:]
        kind = casts.common_type([*arguments], what=name)
        if not all(type_rules.is_integer(each.type) for each in steps):
            raise ExpressionRefused(f"The step of {name} is {type_name(steps[0].type)}.")
        width = "abs(CAST({1} AS DECIMAL(20,0)) - CAST({0} AS DECIMAL(20,0)))"
        step = " * abs(CAST({2} AS DECIMAL(20,0)))" if steps else ""
        return guarded(
            pa.list_(kind), template, *arguments, allowed_if=f"{width} <= {MAX_ELEMENTS}{step}"
        )
    if not type_rules.is_time(kind):
        raise ExpressionRefused(
            f"{name} takes whole numbers, dates and timestamps, not {type_name(kind)}."
        )
    step_us = 86_400_000_000 if len(arguments) == 2 else _step_us(name, arguments[2])
    ends = [casts.cast(each, kind, explicit=False) for each in (start, stop)]
    if kind == DATE:
        limit = MAX_ELEMENTS * max(1, step_us // 86_400_000_000)
        width = "abs(CAST(unix_date({1}) AS BIGINT) - unix_date({0}))"
    else:
        width = "abs(CAST(unix_micros({1}) AS DECIMAL(20,0)) - unix_micros({0}))"
        limit = MAX_ELEMENTS * step_us
    return guarded(
        pa.list_(kind), template, *ends, *arguments[2:], allowed_if=f"{width} <= {limit}"
    )


def _step_us(name: str, step: TypedExpression) -> int:
    match = _STEP.fullmatch(step.sql)
    if match is None or step.type not in (INTERVAL, type_rules.MONTHS):
        raise ExpressionRefused(
            f"The step of {name} must be an interval, written out.",
            "write it as in INTERVAL 1 DAY.",
        )
    day = 86_400_000_000
    unit = {
        "YEAR": 365 * day,
        "MONTH": 28 * day,
        "WEEK": 7 * day,
        "DAY": day,
        "HOUR": day // 24,
        "MINUTE": 60_000_000,
        "SECOND": 1_000_000,
        "MILLISECOND": 1_000,
        "MICROSECOND": 1,
    }[match[2]]
    length = abs(round(float(match[1]) * unit))
    if length == 0:
        raise ExpressionRefused(f"The step of {name} is zero.")
    return length


_MANY = 1000
NESTED_FUNCTIONS: dict[
    str, tuple[Callable[[str, Sequence[TypedExpression]], TypedExpression], int, int]
] = {
    "named_struct": (_named_struct, 2, _MANY),
    "map": (_map, 2, _MANY),
    "map_concat": (_map_concat, 1, _MANY),
    "map_from_arrays": (_map_from_arrays, 2, 2),
    "map_from_entries": (_map_from_entries, 1, 1),
    "str_to_map": (_text_to_map, 1, 3),
    "arrays_zip": (_arrays_zip, 1, _MANY),
    "sequence": (_sequence, 2, 3),
}
"""The functions, with how many arguments each takes."""
