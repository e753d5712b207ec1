"""Hashes of ranges of entities, to compare two stores that should hold the same: a replica, a restored backup, a state folded by another process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from headrace.errors import InputError
from headrace.events.conversion import to_json

if TYPE_CHECKING:
    from headrace.events.deciding import Handler
    from headrace.events.store import EventStore

MOST_RANGES = 4096


@dataclass(frozen=True)
class RangeDigest:
    """One range: which, how many entities and events it has, and a hash of them."""

    number: int
    entities: int
    events: int
    digest: str


def digest(store: EventStore, *, ranges: int = 16, handler: Handler[Any] | None = None) -> list[RangeDigest]:
    """A hash for each range of entities, of what happened to them (and, with a handler, of the states folded from it). Offsets and times do not count: a copy has its own."""
    if not 1 <= ranges <= MOST_RANGES:
        raise InputError(f"{ranges} ranges were asked for.", fix=f"give 1 to {MOST_RANGES}.")
    hashes = [sha256() for _ in range(ranges)]
    entities, events = [0] * ranges, [0] * ranges
    for entity, _ in store.entities():
        number = range_of(entity, ranges)
        found = store.load(entity)
        hashes[number].update(_line([entity, [[event.version, event.type, event.type_version, event.data, event.state] for event in found]]))
        if handler is not None:
            hashes[number].update(state_bytes(handler, entity))
        entities[number] += 1
        events[number] += len(found)
    return [RangeDigest(number, entities[number], events[number], hashes[number].hexdigest()) for number in range(ranges)]


def range_of(entity: str, ranges: int) -> int:
    return int.from_bytes(sha256(entity.encode()).digest()[:4], "big") * ranges >> 32


def state_bytes(handler: Handler[Any], entity: str) -> bytes:
    """The state of an entity as bytes: the same in every process that folds the same events."""
    return _line([handler.decider.name, handler.decider.state_version, to_json(handler.state(entity))])


_line: Callable[[Any], bytes] = lambda value: json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"  # noqa: E731
