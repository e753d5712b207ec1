"""Events as dataclasses: which class stands for which stored type and version, and how older
versions are brought up to date.

A class is stored under its name; class variables say more: `event_type` another name,
`event_version` the version of its form (1 unless given), `event_subject` the field that names the
person it is about. Fields made with `personal()` are encrypted with that person's key (`vault`).
"""

from __future__ import annotations

import base64
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields, is_dataclass, replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from headrace.errors import (
    BadEvent,
    BadMasterKey,
    ConfigurationError,
    HeadraceError,
    UnknownEvent,
    nearest,
)
from headrace.events.event import Event, RecordedEvent

if TYPE_CHECKING:
    from headrace.events.privacy.vault import Vault


# Values of dataclass fields as JSON, and back by their type hints: for events and for the states in
# snapshots.


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
        return sorted(
            (to_json(each) for each in value), key=repr
        )  # the same bytes, whoever writes them
    if isinstance(value, dict):
        return {_dict_key(key): to_json(each) for key, each in value.items()}
    raise BadEvent(
        f"A {kind.__name__} cannot be written as JSON: {value!r:.80}.",
        fix="use plain values, dates, decimals, enums, lists, dicts and dataclasses.",
    )


def _dict_key(key: Any) -> str:
    if isinstance(key, str) and not isinstance(key, Enum):
        return key
    raise BadEvent(
        f"A dict with the key {key!r} cannot be written as JSON.", fix="use texts as keys."
    )


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
    """Of a union, `None` and one other type are distinguished; with more, values stay as JSON has
    them.
    """
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
    special = {
        field.name: convert
        for field in fields(kind)
        if (convert := _later(hints[field.name], kind)) is not _same
    }

    def read(value: dict[str, Any]) -> Any:
        if not special:
            return kind(**value)
        return kind(
            **{
                name: special[name](item) if name in special else item
                for name, item in value.items()
            }
        )

    return read


def _later(hint: Any, kind: type) -> Callable[[Any], Any]:
    """A class that has a field of its own type is looked at when it is needed."""
    return (lambda value: reader(hint)(value)) if hint in {kind, kind | None} else reader(hint)  # noqa: PLW0108 - by then it is known


Upcaster = Callable[[dict[str, Any]], dict[str, Any]]
_PERSONAL = "headrace.personal"
_TEXTS = (str, str | None)


def personal(**options: Any) -> Any:
    """A dataclass field, a text, with something about a person. It is stored sealed, and stays so
    in states, snapshots and views: `vault.reveal` opens it, as long as there is a key.
    """
    return field(metadata={_PERSONAL: True}, **options)


def has_personal_fields(classes: Iterable[type]) -> bool:
    return any(
        _PERSONAL in each.metadata
        for kind in classes
        if is_dataclass(kind)
        for each in fields(kind)
    )


def event_type(kind: type) -> str:
    return str(getattr(kind, "event_type", kind.__name__))


def event_version(kind: type) -> int:
    return int(getattr(kind, "event_version", 1))


class Codec:
    """Turns dataclass instances into events, and stored events into instances of what their classes
    are now.
    """

    def __init__(
        self,
        classes: Iterable[type],
        *,
        upcasters: Mapping[tuple[str, int], Upcaster] | None = None,
        vault: Vault | None = None,
    ) -> None:
        self._classes: dict[str, type] = {}
        for kind in classes:
            if not is_dataclass(kind):
                raise ConfigurationError(
                    f"The event class {kind!r} is no dataclass.",
                    fix="decorate it with @dataclass(frozen=True).",
                )
            if self._classes.setdefault(event_type(kind), kind) is not kind:
                raise ConfigurationError(
                    f"Two event classes are called {event_type(kind)!r}.",
                    fix="give one of them another event_type.",
                )
        self._upcasters = dict(upcasters or {})
        self._vault = vault
        self._personal = {
            name: [each.name for each in fields(kind) if _PERSONAL in each.metadata]
            for name, kind in self._classes.items()
        }
        self._readers = {name: reader(kind) for name, kind in self._classes.items()}
        self._check_personal()

    def _check_personal(self) -> None:
        for name, hidden in self._personal.items():
            if hidden and not getattr(self._classes[name], "event_subject", None):
                raise ConfigurationError(
                    f"The event {name!r} has personal fields and does not say whose.",
                    fix='name the field with the subject: event_subject: ClassVar = "customer_id".',
                )
            hints = get_type_hints(self._classes[name])
            if odd := [each for each in hidden if hints[each] not in _TEXTS]:
                raise ConfigurationError(
                    f"The personal field {odd[0]!r} of the event {name!r} is no text.",
                    fix=(
                        "make it a str: what is stored, in states and views too, is its sealed"
                        " form."
                    ),
                )
            if hidden and self._vault is None:
                raise BadMasterKey(
                    f"The event {name!r} has personal fields ({', '.join(hidden)}), and there is no"
                    " vault to encrypt them.",
                    fix="give vault=events.open_vault(store).",
                )

    def to_event(self, thing: Any, *, id: str | None = None) -> Event:
        """An instance as an event. BadEvent if it is none of the classes, or cannot be written as
        JSON.
        """
        if isinstance(thing, Event):
            return (
                thing
                if id is None
                else Event(thing.type, thing.data, id, thing.subject, thing.type_version)
            )
        kind = type(thing)
        name = event_type(kind)
        if self._classes.get(name) is not kind:
            raise BadEvent(
                f"A {kind.__name__} is no event of this decider: {nearest(name, self._classes)}",
                fix="list its class in events=.",
            )
        subject = self._subject(thing)
        data = {each.name: to_json(getattr(thing, each.name)) for each in fields(thing)}
        for hidden in self._personal[name]:
            if data[hidden] is not None and self._vault is not None:
                data[hidden] = self._vault.seal(str(subject), data[hidden])
        return Event(name, data, id, subject, event_version(kind))

    def sealed(self, thing: Any, event: Event) -> Any:
        """An instance as it will be read again: with its personal fields sealed."""
        hidden = self._personal.get(event.type)
        return replace(thing, **{name: event.data[name] for name in hidden}) if hidden else thing

    @staticmethod
    def _subject(thing: Any) -> str | None:
        name = getattr(type(thing), "event_subject", None)
        if name is None:
            return None
        value = getattr(thing, name, None)
        if value in {None, ""}:
            raise BadEvent(
                f"The event {type(thing).__name__!r} does not say whom it is about: its field"
                f" {name!r} is empty.",
                fix="fill it in.",
            )
        return str(value)

    def from_recorded(self, event: RecordedEvent) -> Any:
        """The instance of a stored event, brought up to date."""
        kind = self._classes.get(event.type)
        where = f"event {event.version} of {event.entity!r}"
        if kind is None:
            raise UnknownEvent(
                f"The {where} is a {event.type!r}, which no class stands for:"
                f" {nearest(event.type, self._classes)}",
                fix="list its class in events=.",
            )
        data = (
            event.data
            if event.type_version == event_version(kind)
            else self._upcast(event, event_version(kind), where)
        )
        try:
            return self._readers[event.type](data)
        except HeadraceError:
            raise
        except Exception as error:
            raise UnknownEvent(
                f"The {where}, a {event.type!r} of version {event.type_version}, does not fit its"
                f" class: {error}",
                fix="give the class its new event_version, and an upcaster from the old one.",
            ) from error

    def _upcast(self, event: RecordedEvent, target: int, where: str) -> dict[str, Any]:
        if event.type_version > target:
            raise UnknownEvent(
                f"The {where} is a {event.type!r} of version {event.type_version}; this code knows"
                f" up to {target}.",
                fix="run the newer code, which wrote it.",
            )
        data = dict(event.data)
        for version in range(event.type_version, target):
            upcaster = self._upcasters.get((event.type, version))
            if upcaster is None:
                raise UnknownEvent(
                    f"The {where} is a {event.type!r} of version {event.type_version}, the class"
                    f" has {target}, and the upcaster from {version} is missing.",
                    fix=(
                        f"add upcasters={{({event.type!r}, {version}): function}}, which makes a"
                        f" dict of version {version + 1} from one of version {version}."
                    ),
                )
            try:
                data = upcaster(data)
            except Exception as error:
                raise UnknownEvent(
                    f"The upcaster of {event.type!r} from version {version} failed at the {where}:"
                    f" {error!r}",
                    fix="correct it.",
                ) from error
        return data
