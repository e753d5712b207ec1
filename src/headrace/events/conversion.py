"""Values of dataclass fields as JSON, and back by their type hints: for events and for the states in snapshots."""

from __future__ import annotations

import base64
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from headrace.errors import BadEvent

_PLAIN = (str, int, float, bool, type(None))
_ENCODERS: dict[type, Callable[[Any], Any]] = {
    Decimal: str,
    datetime: datetime.isoformat,
    date: date.isoformat,
    time: time.isoformat,
    timedelta: lambda value: value // timedelta(microseconds=1),
    UUID: str,
    bytes: lambda value: base64.b64encode(value).decode(),
}
_DECODERS: dict[type, Callable[[Any], Any]] = {
    Decimal: Decimal,
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    time: time.fromisoformat,
    timedelta: lambda value: timedelta(microseconds=value),
    UUID: UUID,
    bytes: base64.b64decode,
}


def to_json(value: Any) -> Any:
    """What JSON can carry of a value. BadEvent if it cannot carry it."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in _ENCODERS:
        return _ENCODERS[kind](value)
    if isinstance(value, Enum):
        return to_json(value.value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted((to_json(each) for each in value), key=repr)  # the same bytes, whoever writes them
    if isinstance(value, dict):
        return {_dict_key(key): to_json(each) for key, each in value.items()}
    raise BadEvent(f"A {kind.__name__} cannot be written as JSON: {value!r:.80}.", fix="use plain values, dates, decimals, enums, lists, dicts and dataclasses.")


def _dict_key(key: Any) -> str:
    if isinstance(key, str) and not isinstance(key, Enum):
        return key
    raise BadEvent(f"A dict with the key {key!r} cannot be written as JSON.", fix="use texts as keys.")


def from_json(hint: Any, value: Any) -> Any:
    """A value by its type hint."""
    return reader(hint)(value)


@cache
def reader(hint: Any) -> Callable[[Any], Any]:
    """How values of a type are read."""
    if hint in _DECODERS:
        return _DECODERS[hint]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    if isinstance(hint, type) and is_dataclass(hint):
        return _dataclass_reader(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in {Union, types.UnionType}:
        return _optional_reader(arguments)
    if origin in {list, set, frozenset}:
        each = reader(arguments[0])
        return lambda value: origin(map(each, value))
    if origin is tuple:
        return _tuple_reader(arguments)
    if origin is dict:
        each = reader(arguments[1])
        return lambda value: {key: each(item) for key, item in value.items()}
    return _tuple_reader(()) if hint is tuple else hint if hint in {set, frozenset} else _same


def _same(value: Any) -> Any:
    return value


def _optional_reader(arguments: tuple[Any, ...]) -> Callable[[Any], Any]:
    """Of a union, `None` and one other type are told apart; with more, values stay as JSON has them."""
    others = [each for each in arguments if each is not type(None)]
    if len(others) != 1:
        return _same
    each = reader(others[0])
    return _same if each is _same else lambda value: None if value is None else each(value)


def _tuple_reader(arguments: tuple[Any, ...]) -> Callable[[Any], Any]:
    if not arguments:
        return tuple
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        each = reader(arguments[0])
        return lambda value: tuple(map(each, value))
    readers = [reader(argument) for argument in arguments]
    return lambda value: tuple(read(item) for read, item in zip(readers, value, strict=True))


def _dataclass_reader(kind: type) -> Callable[[Any], Any]:
    hints = get_type_hints(kind)
    special = {field.name: convert for field in fields(kind) if (convert := _later(hints[field.name], kind)) is not _same}

    def read(value: dict[str, Any]) -> Any:
        if not special:
            return kind(**value)
        return kind(**{name: special[name](item) if name in special else item for name, item in value.items()})

    return read


def _later(hint: Any, kind: type) -> Callable[[Any], Any]:
    """A class that has a field of its own type is looked at when it is needed."""
    return (lambda value: reader(hint)(value)) if hint in {kind, kind | None} else reader(hint)  # noqa: PLW0108 - by then it is known
