"""JSON values checked against a schema one by one: exact, slow, and able to say what is wrong. Used by `json_rows.py` for what the quick way refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from decimal import Decimal
from typing import Any, NoReturn

import pyarrow as pa

from headrace.log.json_wire import is_text

Shape = Callable[[Any], Any]
Parser = Callable[[bytes], Any]
_NOT_FINITE = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
_RANGES: dict[pa.DataType, int] = {pa.int8(): 7, pa.int16(): 15, pa.int32(): 31, pa.int64(): 63}

_FLOAT_BOUND = (1 << 128) - (1 << 103)  # halfway from the largest number to the next that there would be: from here on, infinity is nearer
_DOUBLE_BOUND = (1 << 1024) - (1 << 970)


class Misshapen(Exception):
    """A JSON value that is not of the column's type; the text says why."""


def parse_exactly(
    values: Sequence[bytes], schema: pa.Schema, ignored: Collection[str], parser: Parser
) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    """Rows of wire values by index, and the reasons of those that do not fit."""
    shapes = {column.name: shape(column) for column in schema}
    rows: dict[int, dict[str, Any]] = {}
    misfits: dict[int, str] = {}
    for index, value in enumerate(values):
        try:
            rows[index] = _row(parser(value), shapes, ignored)
        except Misshapen as error:
            misfits[index] = str(error)
    return rows, misfits


def parse(value: bytes) -> Any:
    """Strict JSON: UTF-8, no NaN; numbers with a point keep every digit."""
    try:
        return json.loads(value.decode(), parse_float=Decimal, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Misshapen(f"it is not JSON: {error}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _row(parsed: Any, shapes: dict[str, Shape], ignored: Collection[str]) -> dict[str, Any]:
    if not isinstance(parsed, dict):
        raise Misshapen(f"it is {_named(parsed)}, not an object")
    for name in parsed:
        if name not in shapes and name not in ignored:
            raise Misshapen(f"it has the unknown column {name!r}")
    return {name: _inside(f"column {name!r}", shaped, parsed.get(name)) for name, shaped in shapes.items()}


def shape(field: pa.Field) -> Shape:
    """A function that gives the wire value of one JSON value, or raises Misshapen."""
    shaped, nullable = _shape(field.type), field.nullable

    def checked(value: Any) -> Any:
        if value is not None:
            return shaped(value)
        if not nullable:
            raise Misshapen("it is null, but the schema says NOT NULL")
        return None

    return checked


def _shape(kind: pa.DataType) -> Shape:
    if pa.types.is_boolean(kind):
        return _boolean
    if pa.types.is_integer(kind) or pa.types.is_duration(kind):
        return _integer(int(_RANGES.get(kind, 63)))
    if pa.types.is_floating(kind):
        return _float(_FLOAT_BOUND if kind.bit_width == 32 else _DOUBLE_BOUND)
    if pa.types.is_decimal(kind):
        return _decimal
    if is_text(kind) or pa.types.is_string(kind):
        return _text
    if pa.types.is_map(kind):
        return _object_map(kind) if pa.types.is_string(kind.key_type) else _pairs_map(kind)
    return _list(kind) if pa.types.is_list(kind) else _struct(kind)


def _named(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "a number", Decimal: "a number", type(None): "null"}
    return names[type(value)]


def _refuse(value: Any, wanted: str) -> Misshapen:
    return Misshapen(f"it is {_named(value)}, not {wanted}")


def _inside(place: str, shaped: Shape, value: Any) -> Any:
    try:
        return shaped(value)
    except Misshapen as error:
        raise Misshapen(f"{place}: {error}") from None


def _boolean(value: Any) -> Any:
    if not isinstance(value, bool):
        raise _refuse(value, "a boolean")
    return value


def _integer(bits: int) -> Shape:
    def integer(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _refuse(value, "a whole number")
        if not -(1 << bits) <= value < 1 << bits:
            raise Misshapen(f"{value} is out of range")
        return value

    return integer


def _float(bound: int) -> Shape:
    """As text, which is parsed to the column's own precision once; a number that would become infinite is refused."""

    def floating(value: Any) -> Any:
        if isinstance(value, str) and value in _NOT_FINITE:
            return _NOT_FINITE[value]
        if isinstance(value, bool) or not isinstance(value, int | Decimal):
            raise _refuse(value, "a number")
        if not -bound < value < bound:
            raise Misshapen(f"{value:.6g} is beyond the column's range")
        return str(value)

    return floating


def _decimal(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | Decimal):
        raise _refuse(value, "a decimal in a string")
    return str(value)


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise _refuse(value, "a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Misshapen("it has half of a surrogate pair") from None
    return value


def _list(kind: pa.ListType) -> Shape:
    element = shape(kind.value_field)

    def listed(value: Any) -> Any:
        if not isinstance(value, list):
            raise _refuse(value, "an array")
        return [_inside(f"[{position}]", element, item) for position, item in enumerate(value)]

    return listed


def _struct(kind: pa.StructType) -> Shape:
    parts = {child.name: shape(child) for child in kind}

    def structured(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _refuse(value, "an object")
        for name in value:
            if name not in parts:
                raise Misshapen(f"it has the unknown field {name!r}")
        return {name: _inside(f".{name}", part, value.get(name)) for name, part in parts.items()}

    return structured


def _object_map(kind: pa.MapType) -> Shape:
    item = shape(kind.item_field)

    def mapped(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _refuse(value, "an object")
        return [{"key": _text(name), "value": _inside(f"[{name!r}]", item, content)} for name, content in value.items()]

    return mapped


def _pairs_map(kind: pa.MapType) -> Shape:
    key, item = shape(kind.key_field), shape(kind.item_field)

    def mapped(value: Any) -> Any:
        if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
            raise _refuse(value, "an array of pairs")
        return [{"key": _inside(" key", key, name), "value": _inside(f"[{name!r}]", item, content)} for name, content in value]

    return mapped
