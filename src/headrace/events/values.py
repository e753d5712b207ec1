"""What an event store speaks in: events before and after they are stored, what an append expects, and what it answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from headrace.durations import from_us
from headrace.errors import BadEvent
from headrace.log.api import Position

NEW = 0
"""Expect that the entity has no events yet."""
ANY = -1
"""Expect nothing: append behind whatever there is."""
MOST_NAME_BYTES = 400
MOST_EVENTS_AN_APPEND = 100_000
_written = json.JSONEncoder(allow_nan=False, separators=(",", ":"), ensure_ascii=False).encode


@dataclass(frozen=True)
class Event:
    """Something that happened, to be appended. `data` is JSON: a dict with strings as keys. `type_version` is the version of its form.

    An `id` makes a repeated append harmless. The `subject` is the person whom it is about: what `excise` removes, and whose key its personal fields have.
    """

    type: str
    data: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None
    subject: str | None = None
    type_version: int = 1


class Recorded(NamedTuple):
    """An event as it is stored: of an entity, under a version from 1 on, at an offset that is its place in the global order."""

    entity: str
    offset: int
    time_us: int
    version: int
    type: str
    type_version: int
    id: str | None
    subject: str | None
    data: dict[str, Any]
    state: str | None = None  # the bytes of another library's event, as Latin-1

    @property
    def time(self) -> datetime:
        return from_us(self.time_us)


@dataclass(frozen=True)
class Change:
    """Events for one entity in an append over several, with the version it must have."""

    entity: str
    events: Sequence[Event]
    expected: int = ANY


@dataclass(frozen=True)
class Appended:
    """Where events went. `str(position)` can be given to a served view as `at_least`, which then shows them."""

    position: Position
    versions: Mapping[str, int]
    offsets: range
    duplicate: bool = False


class Draft(NamedTuple):
    """An event made ready to be stored: its data as text."""

    type: str
    type_version: int
    id: str | None
    subject: str | None
    data: str | None
    state: bytes | None = None


def check_entity(entity: Any) -> str:
    if not isinstance(entity, str) or not entity or not entity.isprintable() or len(entity.encode("utf-8", "replace")) > MOST_NAME_BYTES:
        raise BadEvent(f"{entity!r} cannot name an entity.", fix=f"use a text of 1 to {MOST_NAME_BYTES} bytes, such as 'account-17', without control characters.")
    return entity


def check_expected(expected: Any, entity: str) -> int:
    if not isinstance(expected, int) or isinstance(expected, bool) or expected < ANY:
        raise BadEvent(f"The expected version of {entity!r} is {expected!r}.", fix="give the version that you loaded, events.NEW or events.ANY.")
    return expected


def draft(event: Any, entity: str) -> Draft:
    """Make an event ready, or say what is wrong with it."""
    if not isinstance(event, Event):
        raise BadEvent(f"A {type(event).__name__} was given as an event of {entity!r}.", fix="give events.Event('Opened', {...}), or let a decider's codec make it.")
    for what, value in (("type", event.type), ("id", event.id), ("subject", event.subject)):
        optional = what != "type" and value is None
        if not optional and (not isinstance(value, str) or not value or not value.isprintable() or len(value.encode("utf-8", "replace")) > MOST_NAME_BYTES):
            raise BadEvent(f"The {what} of an event of {entity!r} is {value!r}.", fix=f"use a text of 1 to {MOST_NAME_BYTES} bytes without control characters.")
    number: object = event.type_version
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number < 1 << 31:
        raise BadEvent(f"The type_version of {event.type!r} is {event.type_version!r}.", fix="count from 1.")
    return Draft(event.type, event.type_version, event.id, event.subject, _text(event, entity))


def _text(event: Event, entity: str) -> str:
    try:
        text = _written(event.data)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadEvent(
            f"The event {event.type!r} of {entity!r} cannot be written as JSON: {error}.", fix="use texts, numbers, booleans, None, lists and dicts; or a dataclass with a codec."
        ) from error
    if not text.startswith("{"):
        raise BadEvent(f"The data of the event {event.type!r} of {entity!r} is a {type(event.data).__name__}.", fix="give a dict.")
    return text
