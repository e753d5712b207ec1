"""Deciders: business rules as two plain functions, `decide(command, state) -> events` and
`evolve(state, event) -> state`, and what runs them on a store.

A state is never stored as truth: it is folded from events. It is kept in memory, and in snapshots
every so many events, only to fold less.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from headrace.errors import (
    BadEvent,
    CommandRefused,
    DeciderFailed,
    EventIdConflict,
    InputError,
    VersionConflict,
)
from headrace.events.codec import Codec, Upcaster, from_json, to_json
from headrace.events.event import Event, Recorded, check_entity, recorded
from headrace.events.store import EventStore
from headrace.log.values import AppendResult

if TYPE_CHECKING:
    from headrace.events.privacy.vault import Vault


S = TypeVar("S")
_MAX_STATES = 10_000
_LOCKS = 64
_MAX_ATTEMPTS = 100
_LONGEST_WAIT_S = 0.05


@dataclass(frozen=True)
class Decider(Generic[S]):
    """The rules. `initial` is the state of an entity without events; states must not be changed in
    place.

    Raise `CommandRefused` (or a subclass of yours) in `decide` to refuse a command. Increase
    `state_version` when `evolve` or the state's form changes: snapshots of others are not used.
    """

    name: str
    initial: S
    decide: Callable[[Any, S], Any]
    evolve: Callable[[S, Any], S]
    events: tuple[type, ...]
    state_version: int = 1
    snapshot_every: int | None = 100
    upcasters: Mapping[tuple[str, int], Upcaster] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name or len(self.name.encode()) > 90:
            raise InputError(f"{self.name!r} cannot name a decider.", fix="use 1 to 90 bytes.")
        if self.snapshot_every is not None and self.snapshot_every < 1:
            raise InputError(
                f"snapshot_every is {self.snapshot_every}.",
                fix="give 1 or more, or None for no snapshots.",
            )


@dataclass(frozen=True)
class Handled(Generic[S]):
    """What a command led to. `str(position)` can be given to a served view as `at_least`."""

    state: S
    version: int
    events: tuple[Any, ...]
    position: AppendResult
    duplicate: bool = False


class Handler(Generic[S]):
    """Runs one decider on a store. Safe for threads; any number of processes may have one."""

    def __init__(
        self, store: EventStore, decider: Decider[S], *, vault: Vault | None = None
    ) -> None:
        self.store, self.decider, self.vault = store, decider, vault
        self.codec = Codec(decider.events, upcasters=decider.upcasters, vault=vault)
        self._states: OrderedDict[str, tuple[int, S]] = OrderedDict()
        self._generation = store.by_entity.generation
        self._guard = threading.Lock()
        self._turns = [
            threading.Lock() for _ in range(_LOCKS)
        ]  # threads that want one entity wait here, and not for each other's conflicts

    def handle(self, entity: str, command: Any, *, id: str | None = None) -> Handled[S]:
        """Load, decide, append; again if another was quicker. With an `id`, a command that comes
        again is answered as before and changes nothing.
        """
        check_entity(entity)
        with self._turns[hash(entity) % _LOCKS]:
            for attempt in range(_MAX_ATTEMPTS):
                try:
                    return self._once(entity, command, id)
                except VersionConflict:
                    if attempt + 1 == _MAX_ATTEMPTS:
                        raise
                    time.sleep(
                        random.uniform(0, min(_LONGEST_WAIT_S, 0.001 * 2 ** min(attempt, 10)))  # noqa: S311
                    )
        raise AssertionError

    def _once(self, entity: str, command: Any, id: str | None) -> Handled[S]:
        known = None if id is None else self._answered(entity, id)
        if known is not None:
            return known
        version, state = self._load(entity)
        things = self._decide(entity, command, state)
        events = [
            self.codec.to_event(thing, id=None if id is None else f"{id}/{at}")
            for at, thing in enumerate(things)
        ]
        if not events:
            return Handled(state, version, (), self.store.position())
        after = self._fold(entity, state, list(map(self.codec.sealed, things, events)))
        try:
            appended = self.store.append(entity, events, expected=version)
        except EventIdConflict:  # the same command in another process, which decided otherwise
            known = self._answered(entity, id or "")
            if known is None:
                raise
            return known
        now = appended.versions[entity]
        if appended.duplicate:
            now, after = self._load(entity)
        self._keep(entity, now, after, since=version)
        return Handled(after, now, tuple(things), appended.position, appended.duplicate)

    def _answered(self, entity: str, id: str) -> Handled[S] | None:
        """The answer to a command that was handled before."""
        end = self.store.by_entity.refresh()
        with self.store.by_entity.look(end=end) as look:
            place = look.place_of(f"{id}/0")
        if place is None:
            return None
        if place[0] != entity:
            raise EventIdConflict(
                f"The command id {id!r} was used for {place[0]!r}.",
                fix="give each command an id of its own; nothing was stored.",
            )
        ours = [
            event
            for event in self.store.load(entity, after=place[1] - 1)
            if (event.id or "").rpartition("/")[0] == id
        ]
        version, state = self._load(entity)
        return Handled(
            state,
            version,
            tuple(map(self.codec.from_recorded, ours)),
            self.store.position(ours[-1].offset + 1),
            duplicate=True,
        )

    def _decide(self, entity: str, command: Any, state: S) -> list[Any]:
        try:
            decided = self.decider.decide(command, state)
            things = (
                list(decided)
                if isinstance(decided, Iterable)
                else []
                if decided is None
                else [decided]
            )
        except CommandRefused:
            raise
        except Exception as error:
            raise DeciderFailed(
                f"The decider {self.decider.name!r} failed at {type(command).__name__} for"
                f" {entity!r}: {error!r}; no event was stored.",
                fix="correct its decide function; raise CommandRefused to refuse a command.",
            ) from error
        for thing in things:
            if isinstance(thing, Event):
                raise BadEvent(
                    f"The decider {self.decider.name!r} gave a plain Event.",
                    fix="give instances of its event classes.",
                )
        return things

    def _fold(self, entity: str, state: S, things: Iterable[Any]) -> S:
        try:
            for thing in things:
                state = self.decider.evolve(state, thing)
        except Exception as error:
            raise DeciderFailed(
                f"evolve of the decider {self.decider.name!r} failed for {entity!r}: {error!r}.",
                fix="correct it: it must take every event that was stored.",
            ) from error
        return state

    # States

    def state(
        self, entity: str, *, version: int | None = None, at: datetime | str | float | None = None
    ) -> S:
        """The state now, or as of a version or a time."""
        return self.versioned_state(entity, version=version, at=at)[1]

    def versioned_state(
        self, entity: str, *, version: int | None = None, at: datetime | str | float | None = None
    ) -> tuple[int, S]:
        check_entity(entity)
        if version is not None and (at is not None or version < 0):
            raise InputError(
                "A state is asked for as of a version from 0 on, or as of a time.",
                fix="give one of them.",
            )
        if version is None and at is None:
            return self._load(entity)
        wanted = self.store.version_at(entity, at) if at is not None else version
        if version is not None and version > (newest := self.store.version(entity)):
            raise InputError(
                f"The entity {entity!r} is at version {newest}, and was asked for as of {version}.",
                fix=f"give 0 to {newest}.",
            )
        return self._folded(entity, wanted)

    def history(self, entity: str) -> list[tuple[Recorded, Any]]:
        """Each stored event with its instance."""
        return [(event, self.codec.from_recorded(event)) for event in self.store.load(entity)]

    def _load(self, entity: str) -> tuple[int, S]:
        """Version and state as of now: what is in memory, and what came since."""
        indexed = self.store.by_entity
        end = indexed.refresh()
        self._forget_if_excised()
        known = self._states.get(entity)
        if known is not None and (indexed.newest(entity, end=end) or 0) == known[0]:
            return known
        version, state = self._folded(entity, None, known)
        self._keep(entity, version, state, since=known[0] if known else version)
        return version, state

    def _folded(
        self, entity: str, upto: int | None, known: tuple[int, S] | None = None
    ) -> tuple[int, S]:
        indexed = self.store.by_entity
        end = indexed.refresh()
        with indexed.look(end=end) as look:
            version, state = (
                known
                or self._snapshot(look.snapshot(entity, self.decider.name), upto)
                or (0, self.decider.initial)
            )
            found = recorded(entity, look.texts(entity, version, upto))
            newest = (
                max(version, look.head(entity)) if upto is None else version
            )  # the newest events may have been excised
        state = self._fold(entity, state, [self.codec.from_recorded(event) for event in found])
        return (max(found[-1].version, newest) if found else newest), state

    def _snapshot(self, content: bytes | None, upto: int | None) -> tuple[int, S] | None:
        stored = None if content is None else json.loads(content)
        if (
            stored is None
            or stored["state_version"] != self.decider.state_version
            or (upto is not None and stored["version"] > upto)
        ):
            return None
        return stored["version"], from_json(type(self.decider.initial), stored["state"])

    def _keep(self, entity: str, version: int, state: S, *, since: int) -> None:
        """Remember a state; every so many events, on disk too."""
        with self._guard:
            known = self._states.get(entity)
            if known is None or known[0] <= version:
                self._states[entity] = version, state
                self._states.move_to_end(entity)
            if len(self._states) > _MAX_STATES:
                self._states.popitem(last=False)
        every = self.decider.snapshot_every
        if every is not None and version // every > since // every:
            content = {
                "state_version": self.decider.state_version,
                "version": version,
                "state": to_json(state),
            }
            self.store.by_entity.put_snapshot(
                entity, self.decider.name, json.dumps(content, separators=(",", ":")).encode()
            )

    def _forget_if_excised(self) -> None:
        if self.store.by_entity.generation != self._generation:
            with self._guard:
                self._states.clear()
                self._generation = self.store.by_entity.generation


# Hashes of ranges of entities, to compare two stores that should hold the same: a replica, a
# restored backup, a state folded by another process.


MAX_RANGES = 4096


@dataclass(frozen=True)
class RangeDigest:
    """One range: which, how many entities and events it has, and a hash of them."""

    number: int
    entities: int
    events: int
    digest: str


def digest(
    store: EventStore, *, ranges: int = 16, handler: Handler[Any] | None = None
) -> list[RangeDigest]:
    """A hash for each range of entities, of what happened to them (and, with a handler, of the
    states folded from it). Offsets and times do not count: a copy has its own.
    """
    if not 1 <= ranges <= MAX_RANGES:
        raise InputError(f"{ranges} ranges were asked for.", fix=f"give 1 to {MAX_RANGES}.")
    hashes = [sha256() for _ in range(ranges)]
    entities, events = [0] * ranges, [0] * ranges
    for entity, _ in store.entities():
        number = range_of(entity, ranges)
        found = store.load(entity)
        hashes[number].update(
            _line(
                [
                    entity,
                    [
                        [event.version, event.type, event.type_version, event.data, event.state]
                        for event in found
                    ],
                ]
            )
        )
        if handler is not None:
            hashes[number].update(state_bytes(handler, entity))
        entities[number] += 1
        events[number] += len(found)
    return [
        RangeDigest(number, entities[number], events[number], hashes[number].hexdigest())
        for number in range(ranges)
    ]


def range_of(entity: str, ranges: int) -> int:
    return int.from_bytes(sha256(entity.encode()).digest()[:4], "big") * ranges >> 32


def state_bytes(handler: Handler[Any], entity: str) -> bytes:
    """The state of an entity as bytes: the same in every process that folds the same events."""
    return _line(
        [handler.decider.name, handler.decider.state_version, to_json(handler.state(entity))]
    )


_line: Callable[[Any], bytes] = lambda value: (  # noqa: E731
    json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"
)
