"""Deciders: business rules as two plain functions, `decide(command, state) -> events` and
`evolve(state, event) -> state`, and the handler that runs them on a store.

A state is always folded from events. It is cached in memory, and in snapshots every so many events,
only to fold less.
"""

from __future__ import annotations

import json
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
from headrace.events.event import Event, RecordedEvent, check_entity, parse_events
from headrace.events.store import EventStore
from headrace.log.values import AppendResult
from headrace.retry import Backoff

if TYPE_CHECKING:
    from headrace.events.privacy.vault import Vault


S = TypeVar("S")
_MAX_STATES = 10_000
_LOCKS = 64
_MAX_ATTEMPTS = 100
_CONFLICT_BACKOFF = Backoff(first_s=0.001, longest_s=0.05, jitter=1.0)


@dataclass(frozen=True)
class Decider(Generic[S]):
    """Business rules.

    Attributes:
        name: Names the decider; snapshots are stored under it.
        initial: The state of an entity without events. States must not be changed in place.
        decide: Takes a command and the state, and returns events. It raises `CommandRefused`, or a
            subclass, to refuse the command.
        evolve: Takes a state and an event, and returns the next state.
        events: The classes of events.
        state_version: Increase it when `evolve` or the form of the state changes: snapshots of
            other versions are not used.
        snapshot_every: After how many events a snapshot is stored; None for no snapshots.
        upcasters: By type and version of an event, a function that returns its data in the next
            version.

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
class CommandResult(Generic[S]):
    """The result of a command. `str(position)` can be given to a served view as `at_least`, which
    then shows the events.
    """

    state: S
    version: int
    events: tuple[Any, ...]
    position: AppendResult
    duplicate: bool = False


class Handler(Generic[S]):
    """Runs a decider on a store. It is safe for threads, and any number of processes may run
    one.
    """

    def __init__(
        self, store: EventStore, decider: Decider[S], *, vault: Vault | None = None
    ) -> None:
        self.store, self.decider, self.vault = store, decider, vault
        self.codec = Codec(decider.events, upcasters=decider.upcasters, vault=vault)
        self._states: OrderedDict[str, tuple[int, S]] = OrderedDict()
        self._generation = store.by_entity.generation
        self._guard = threading.Lock()
        # Threads that handle commands of one entity take turns, which avoids conflicts.
        self._entity_locks = [threading.Lock() for _ in range(_LOCKS)]

    def handle(self, entity: str, command: Any, *, id: str | None = None) -> CommandResult[S]:
        """Load the entity, decide, and append the events; once more if another process was faster.

        Args:
            entity: The entity's name.
            command: Passed to the decider.
            id: Identifies the command. A command that comes again gets the same result, and changes
                nothing.

        Returns:
            The new state, its version, and the events.

        Raises:
            CommandRefused: The decider refused the command.
            DeciderFailed: The decider raised another error.
            VersionConflict: Other processes were faster, many times in a row.

        Example:
            >>> handler.handle("account-17", Deposit(100), id="request-8").version
            2

        """
        check_entity(entity)
        with self._entity_locks[hash(entity) % _LOCKS]:
            for attempt in range(_MAX_ATTEMPTS):
                try:
                    return self._attempt(entity, command, id)
                except VersionConflict:
                    if attempt + 1 == _MAX_ATTEMPTS:
                        raise
                    time.sleep(_CONFLICT_BACKOFF.pause_s(attempt + 1))
        raise AssertionError

    def _attempt(self, entity: str, command: Any, id: str | None) -> CommandResult[S]:
        known = None if id is None else self._previous_result(entity, id)
        if known is not None:
            return known
        version, state = self._load(entity)
        things = self._decide(entity, command, state)
        events = [
            self.codec.to_event(thing, id=None if id is None else f"{id}/{at}")
            for at, thing in enumerate(things)
        ]
        if not events:
            return CommandResult(state, version, (), self.store.position())
        after = self._fold(entity, state, list(map(self.codec.sealed, things, events)))
        try:
            appended = self.store.append(entity, events, expected=version)
        except EventIdConflict:  # the same command in another process, which decided otherwise
            known = self._previous_result(entity, id or "")
            if known is None:
                raise
            return known
        now = appended.versions[entity]
        if appended.duplicate:
            now, after = self._load(entity)
        self._keep(entity, now, after, since=version)
        return CommandResult(after, now, tuple(things), appended.position, appended.duplicate)

    def _previous_result(self, entity: str, id: str) -> CommandResult[S] | None:
        """Return the result of a command that was handled before; None if it was not."""
        end = self.store.by_entity.refresh()
        with self.store.by_entity.look(end=end) as look:
            place = look.locate(f"{id}/0")
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
        return CommandResult(
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
        """Return the state of an entity now, or as of a version or a time."""
        return self.versioned_state(entity, version=version, at=at)[1]

    def versioned_state(
        self, entity: str, *, version: int | None = None, at: datetime | str | float | None = None
    ) -> tuple[int, S]:
        """An entity's version and its state as of that version, a time, or now.

        Args:
            entity: The entity's name.
            version: The state after this version, from 0 (before the first event) on.
            at: The state as of this time.

        Returns:
            The version and the state.

        Raises:
            InputError: Both `version` and `at` are given, or `version` is negative.
        """
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

    def history(self, entity: str) -> list[tuple[RecordedEvent, Any]]:
        """Return each stored event of an entity with its instance."""
        return [(event, self.codec.from_recorded(event)) for event in self.store.load(entity)]

    def _load(self, entity: str) -> tuple[int, S]:
        """Return the current version and state: the cached ones, and what came since."""
        event_index = self.store.by_entity
        end = event_index.refresh()
        if self.store.by_entity.generation != self._generation:
            with self._guard:
                self._states.clear()
                self._generation = self.store.by_entity.generation
        known = self._states.get(entity)
        if known is not None and (event_index.newest(entity, end=end) or 0) == known[0]:
            return known
        version, state = self._folded(entity, None, known)
        self._keep(entity, version, state, since=known[0] if known else version)
        return version, state

    def _folded(
        self, entity: str, upto: int | None, known: tuple[int, S] | None = None
    ) -> tuple[int, S]:
        event_index = self.store.by_entity
        end = event_index.refresh()
        with event_index.look(end=end) as look:
            version, state = (
                known
                or self._snapshot(look.snapshot(entity, self.decider.name), upto)
                or (0, self.decider.initial)
            )
            found = parse_events(entity, look.texts(entity, version, upto))
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
        """Cache a state; every so many events, on disk too."""
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


# Hashes of ranges of entities, to compare two stores that should hold the same: a replica, a
# restored backup, a state folded by another process.


MAX_RANGES = 4096


@dataclass(frozen=True)
class RangeDigest:
    """One range of entities: its number, how many entities and events it has, and their hash."""

    number: int
    entities: int
    events: int
    digest: str


def digest(
    store: EventStore, *, ranges: int = 16, handler: Handler[Any] | None = None
) -> list[RangeDigest]:
    """Return a hash of the events of each range of entities and, with a handler, of the states
    folded from them. Offsets and times do not count, since a copy has its own.
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
    """Return the state of an entity as bytes, which are the same in every process."""
    return _line(
        [handler.decider.name, handler.decider.state_version, to_json(handler.state(entity))]
    )


_line: Callable[[Any], bytes] = lambda value: (  # noqa: E731
    json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"
)
