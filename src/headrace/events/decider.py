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
from dataclasses import dataclass, field, is_dataclass, replace
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
from headrace.events.codec import Codec, Upcaster, event_codec
from headrace.events.event import Event, RecordedEvent, check_entity, parse_events
from headrace.events.snapshot import SnapshotCodec
from headrace.events.store import EventStore, removed_before
from headrace.events.truncation import truncate
from headrace.log.values import AppendResult
from headrace.retry import Backoff

if TYPE_CHECKING:
    from headrace.events.index import IndexView
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
        state: The type of states, such as `Empty | Open | Closed`. By default, what `evolve` is
            annotated to return, or else the type of `initial`.
        state_upcasters: By state version, a function that returns a snapshot's JSON in the next
            one. Snapshots of earlier versions are then used, which entities need whose early
            events were truncated.

    Raises:
        ConfigurationError: An event class, or the type of states, has values that would not be
            read back as they were stored.

    """

    name: str
    initial: S
    decide: Callable[[Any, S], Any]
    evolve: Callable[[S, Any], S]
    events: tuple[type, ...]
    state_version: int = 1
    snapshot_every: int | None = 100
    upcasters: Mapping[tuple[str, int], Upcaster] = field(default_factory=dict)
    state: Any = None
    state_upcasters: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name or len(self.name.encode()) > 90:
            raise InputError(f"{self.name!r} cannot name a decider.", fix="use 1 to 90 bytes.")
        if self.snapshot_every is not None and self.snapshot_every < 1:
            raise InputError(
                f"snapshot_every is {self.snapshot_every}.",
                fix="give 1 or more, or None for no snapshots.",
            )
        for kind in self.events:
            if is_dataclass(kind):
                event_codec(kind)
        if self.snapshot_every is not None:
            self.snapshot_codec()

    def snapshot_codec(self) -> SnapshotCodec[S]:
        """How states are stored. ConfigurationError if they cannot be."""
        return SnapshotCodec(
            name=self.name,
            hint=self.state,
            initial=self.initial,
            evolve=self.evolve,
            state_version=self.state_version,
            upcasters=self.state_upcasters,
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
        self._snapshots = decider.snapshot_codec() if decider.snapshot_every is not None else None
        self._states: OrderedDict[str, tuple[int, S]] = OrderedDict()
        self._generation = store.by_entity.generation
        self._guard = threading.Lock()
        # Threads that handle commands of one entity take turns, which avoids conflicts.
        self._entity_locks = [threading.Lock() for _ in range(_LOCKS)]

    def handle(
        self,
        entity: str,
        command: Any,
        *,
        id: str | None = None,
        caused_by: RecordedEvent | None = None,
        correlation_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> CommandResult[S]:
        """Load the entity, decide, and append the events; once more if another process was faster.

        Args:
            entity: The entity's name.
            command: Passed to the decider.
            id: Identifies the command. A command that comes again gets the same result, and changes
                nothing. It is the causation id of its events.
            caused_by: The event that led to this command: its events have its correlation id, and
                its id as their causation id.
            correlation_id: What the events have in common with others; by default that of
                `caused_by`, or else the command's id.
            metadata: JSON that is stored with each event.

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
        context = _context(id, caused_by, correlation_id, metadata)
        with self._entity_locks[hash(entity) % _LOCKS]:
            for attempt in range(_MAX_ATTEMPTS):
                try:
                    return self._attempt(entity, command, id, context)
                except VersionConflict:
                    if attempt + 1 == _MAX_ATTEMPTS:
                        raise
                    time.sleep(_CONFLICT_BACKOFF.pause_s(attempt + 1))
        raise AssertionError

    def _attempt(
        self, entity: str, command: Any, id: str | None, context: dict[str, Any]
    ) -> CommandResult[S]:
        known = None if id is None else self._previous_result(entity, id)
        if known is not None:
            return known
        version, state = self._load(entity)
        things = self._decide(entity, command, state)
        events = [
            replace(self.codec.to_event(thing, id=None if id is None else f"{id}/{at}"), **context)
            for at, thing in enumerate(things)
        ]
        if not events:
            return CommandResult(state, version, (), self.store.position())
        after = self._fold(entity, state, list(map(self.codec.as_stored, events)))
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
            InputError: Both `version` and `at` are given, or `version` is negative; or the events
                of then were truncated.
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

    def take_snapshot(self, entity: str, *, version: int | None = None) -> int:
        """Store a snapshot of an entity now, whatever `snapshot_every` is.

        Args:
            entity: The entity's name.
            version: As of this version; by default the newest.

        Returns:
            The version of the snapshot.

        Raises:
            BadEvent: The state cannot be stored.
        """
        as_of, state = self.versioned_state(entity, version=version)
        codec = self._snapshots or self.decider.snapshot_codec()
        content = codec.encode(as_of, state)
        self.store.by_entity.put_snapshot(entity, self.decider.name, content)
        self.store.by_entity.flush()
        return as_of

    def truncate(self, entity: str, *, before: int) -> int:
        """Remove an entity's events before a version, for good, if its state does not need them:
        the events from that version on lead to the same state by themselves.

        Args:
            entity: The entity's name.
            before: The first version that stays: that of an event which says all that those before
                it said, such as a balance that is carried forward.

        Returns:
            How many events were removed; see `hr.events.truncate`.

        Raises:
            UnknownEntity: The entity has no events.
            InputError: `before` is not a version of the entity, or its state would be another one.
            DeciderFailed: `evolve` does not take the events that stay without those before them.

        Example:
            >>> accounts.truncate("account-17", before=901)
            900

        """
        check_entity(entity)
        first = self.store.load(entity, after=before - 1, limit=1)
        if first and first[0].version == before:
            newest, state = self._folded(entity, None)
            left = self.store.load(entity, after=before - 1, upto=newest)
            alone = self._fold(
                entity, self.decider.initial, [self.codec.from_recorded(event) for event in left]
            )
            if alone != state:
                raise InputError(
                    f"Without its events before version {before}, the state of {entity!r} would be"
                    f" {alone!r:.200} instead of {state!r:.200}.",
                    fix="append an event that says all that they said, and truncate before it.",
                )
        return truncate(self.store, entity, before=before)

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
                or self._snapshot(entity, look.snapshot(entity, self.decider.name), upto)
                or (0, self.decider.initial)
            )
            found = parse_events(entity, look.texts(entity, version, upto))
            if upto and not version and not found:
                self._check_not_removed(entity, look, upto)
            newest = (
                max(version, look.head(entity)) if upto is None else version
            )  # the newest events may have been excised
        state = self._fold(entity, state, [self.codec.from_recorded(event) for event in found])
        return (max(found[-1].version, newest) if found else newest), state

    @staticmethod
    def _check_not_removed(entity: str, look: IndexView, upto: int) -> None:
        later = parse_events(entity, look.texts(entity, upto, limit=1))
        if later:
            raise removed_before(entity, later[0].version, f"version {upto}")

    @property
    def snapshot_failures(self) -> int:
        """How many snapshots could not be stored or read; their states were folded from events."""
        return 0 if self._snapshots is None else self._snapshots.failures

    def _snapshot(
        self, entity: str, content: bytes | None, upto: int | None
    ) -> tuple[int, S] | None:
        stored = (
            None
            if content is None or self._snapshots is None
            else self._snapshots.decode(entity, content)
        )
        return None if stored is None or (upto is not None and stored[0] > upto) else stored

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
            self._store_snapshot(entity, version, state)

    def _store_snapshot(self, entity: str, version: int, state: S) -> None:
        """Store a snapshot, if that is possible: the events are stored in any case."""
        if self._snapshots is None:
            return
        content = self._snapshots.try_encode(entity, version, state)
        if content is not None:
            self.store.by_entity.put_snapshot(entity, self.decider.name, content)


def _context(
    id: str | None,
    caused_by: RecordedEvent | None,
    correlation_id: str | None,
    metadata: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What is stored with each event of a command, besides the event."""
    causation_id = id
    if caused_by is not None:
        cause = caused_by.id or f"{caused_by.entity}/{caused_by.version}"
        causation_id = cause
        correlation_id = correlation_id or caused_by.correlation_id or cause
    return {
        "correlation_id": correlation_id or id,
        "causation_id": causation_id,
        "metadata": metadata,
    }


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
    decider = handler.decider
    state = decider.snapshot_codec().to_json(handler.state(entity))
    return _line([decider.name, decider.state_version, state])


_line: Callable[[Any], bytes] = lambda value: (  # noqa: E731
    json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"
)
