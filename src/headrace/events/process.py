"""Process managers: work that goes on over many entities and over time, such as a transfer of money
or an order that must be paid within an hour.

A process is declared by one function, `react(state, happened)`, which returns the next state of an
instance, the commands to send and the deadlines to set. The manager stores that in one commit with
its position in the events, and sends commands only when they are stored:

    events          instance t-1                                              position
    Requested(t-1)  state Withdrawing, sends Withdraw, deadline at 12:05      1       one commit
                    (Withdraw is handled under the id transfer/t-1/0.0)
    Withdrawn(t-1)  state Depositing, sends Deposit                           2       one commit

A process that is killed reads its instances again and sends what is stored and not known to be
handled. The id of a command makes its repeat harmless, so each command has its effect once.

A deadline is reached once, in recorded time: after all events that were appended before it, and
before those that were appended after it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from headrace.durations import from_us, to_time_us
from headrace.errors import (
    CommandRefused,
    HeadraceError,
    NewerFormat,
    NoteConflict,
    ProcessFailed,
    RetryError,
    SubscriptionFenced,
    nearest,
)
from headrace.events.codec import Codec, Upcaster, event_type
from headrace.events.decider import Handler
from headrace.events.event import RecordedEvent
from headrace.events.store import EventStore
from headrace.events.value_codec import ValueCodec, json_text, module_names
from headrace.names import check_name
from headrace.retry import Backoff

if TYPE_CHECKING:
    from headrace.events.privacy.vault import Vault
    from headrace.log.file.commit_draft import CommitDraft

S = TypeVar("S")
logger = logging.getLogger("headrace.events")
FORMAT = 1
_SCHEMA = "key STRING, format INT, state STRING, deadlines STRING, outbox STRING"
_MAX_EVENTS = 200
"""How many events are reacted to in one commit."""
_IDLE_BACKOFF = Backoff(first_s=0.005, longest_s=0.1, jitter=0.0)
_RETRY_BACKOFF = Backoff(first_s=0.05, longest_s=5.0, jitter=0.5)


@dataclass(frozen=True)
class Send:
    """A command to send: to an entity, by the handler of that name."""

    entity: str
    command: Any
    to: str = ""


@dataclass(frozen=True)
class DeadlineReached:
    """A deadline of the instance has passed."""

    name: str
    at: datetime


@dataclass(frozen=True)
class RefusedCommand:
    """A command that the instance had sent was refused."""

    entity: str
    command: Any
    reason: str


@dataclass(frozen=True)
class Reaction(Generic[S]):
    """What a process does about something that happened.

    Attributes:
        state: The next state of the instance.
        send: Commands to send, in order.
        deadlines: By name, when to be told: a time, or how long after what happened; None takes a
            deadline back. One that was set before under the name is replaced.
        is_ended: Whether the instance is done: it is forgotten, with its deadlines, once its
            commands are handled.

    """

    state: S
    send: Iterable[Send] = ()
    deadlines: Mapping[str, datetime | timedelta | None] = field(default_factory=dict)
    is_ended: bool = False


@dataclass(frozen=True)
class Process(Generic[S]):
    """The rules of a process.

    Attributes:
        name: Names the process; its instances are stored under it.
        initial: The state of an instance to which nothing has happened.
        key: Takes an event (an instance of its class) and returns the name of the process instance
            that it belongs to; None if it concerns none.
        react: Takes the state and what happened: an event, `DeadlineReached` or `RefusedCommand`.
            It returns a `Reaction`, or None to do nothing. It must be a function of these alone.
        events: The classes of events that are read.
        commands: The classes of commands that are sent.
        state: The type of states; by default that of `initial`.
        upcasters: As those of a decider.

    """

    name: str
    initial: S
    key: Callable[[Any], str | None]
    react: Callable[[S, Any], Reaction[S] | None]
    events: tuple[type, ...]
    commands: tuple[type, ...]
    state: Any = None
    upcasters: Mapping[tuple[str, int], Upcaster] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name(self.name, what="process")
        self.state_codec().encode(self.initial)
        for kind in self.commands:
            ValueCodec(kind, exact=False, names=module_names(kind), what=kind.__name__)

    def state_codec(self) -> ValueCodec:
        """How states are stored. ConfigurationError if they cannot be."""
        hint = type(self.initial) if self.state is None else self.state
        names = getattr(self.react, "__globals__", {})
        what = f"the state of the process {self.name!r}"
        return ValueCodec(hint, exact=True, names=names, what=what)


@dataclass
class _Waiting:
    """A command that is stored, and not known to be handled."""

    id: str
    to: str
    entity: str
    kind: str
    data: Any
    correlation: str | None
    """The correlation id of the event that led to it."""


@dataclass
class _Instance:
    """What is stored of one instance."""

    state: Any
    deadlines: dict[str, int] = field(default_factory=dict)
    """By name, the time in microseconds."""
    outbox: list[_Waiting] = field(default_factory=list)
    is_ended: bool = False

    def copy(self) -> _Instance:
        return _Instance(self.state, dict(self.deadlines), list(self.outbox), self.is_ended)


class ProcessManager(Generic[S]):
    """Runs a process over the events of a store. One process of the operating system runs it at a
    time; another one that starts takes over, and the first is fenced off.

    Args:
        store: The event store.
        process: The rules.
        handlers: What handles commands, by the name in `Send.to`; one handler alone needs no name.
        vault: For events with personal fields.

    Example:
        >>> manager = ProcessManager(store, TRANSFERS, accounts)
        >>> manager.run(stop)
    """

    def __init__(
        self,
        store: EventStore,
        process: Process[S],
        handlers: Handler[Any] | Mapping[str, Handler[Any]],
        *,
        vault: Vault | None = None,
    ) -> None:
        self.store, self.process = store, process
        self._handlers = {"": handlers} if isinstance(handlers, Handler) else dict(handlers)
        self._codec = Codec(process.events, upcasters=process.upcasters, vault=vault)
        self._states = process.state_codec()
        self._commands = {
            event_type(kind): ValueCodec(kind, exact=False, names=module_names(kind))
            for kind in process.commands
        }
        self.topic = f"{store.topic}.process.{process.name}"
        self._instances: dict[str, _Instance] = {}
        self._changed: dict[str, _Instance] = {}
        self.reached = 0
        """How many deadlines this object has reached."""
        store.log.create_table(self.topic, _SCHEMA, key="key", partitions=1, exist_ok=True)
        self._transaction = store.log.transaction(f"process.{store.topic}.{process.name}"[:200])
        self._subscription = store.subscribe(
            f"process.{process.name}", types=[event_type(kind) for kind in process.events]
        )
        self._load()

    # Stored instances

    def _load(self) -> None:
        """Read the instances as they are stored."""
        self._changed = {}
        self._instances = {}
        for row in self.store.log.read(self.topic).to_pylist():
            key = row["key"]
            if row["_change_type"] == "delete":
                self._instances.pop(key, None)
            elif row["_change_type"] != "update_preimage":
                self._instances[key] = self._from_row(row)
        self._subscription.rewind()

    def _from_row(self, row: Mapping[str, Any]) -> _Instance:
        if row["format"] > FORMAT:
            raise NewerFormat(
                f"An instance of the process {self.process.name!r} has format {row['format']};"
                f" this Headrace knows {FORMAT}.",
                fix="upgrade Headrace.",
            )
        stored = json.loads(row["state"])
        try:
            state = self._states.decode(stored["state"])
        except Exception as error:
            raise ProcessFailed(
                f"The state of the instance {row['key']!r} of {self.process.name!r} does not fit"
                f" its class: {error!r}.",
                fix="give new fields a default, and keep the classes of states.",
            ) from error
        return _Instance(
            state=state,
            deadlines=json.loads(row["deadlines"]),
            outbox=[_Waiting(*item) for item in json.loads(row["outbox"])],
            is_ended=stored["is_ended"],
        )

    def _to_row(self, key: str, instance: _Instance) -> dict[str, Any]:
        try:
            state = self._states.encode(instance.state)
            again = self._states.encode(self._states.decode(state))
        except Exception as error:
            raise ProcessFailed(
                f"The state of the instance {key!r} of {self.process.name!r} cannot be stored:"
                f" {error}",
                fix="say the type of states with Process(state=…).",
            ) from error
        if json_text(again) != json_text(state):
            raise ProcessFailed(
                f"The state of the instance {key!r} of {self.process.name!r} is read back as"
                f" another one: {instance.state!r:.80}.",
                fix="say the type of states with Process(state=…).",
            )
        outbox = [
            [each.id, each.to, each.entity, each.kind, each.data, each.correlation]
            for each in instance.outbox
        ]
        return {
            "key": key,
            "format": FORMAT,
            "state": json.dumps({"state": state, "is_ended": instance.is_ended}),
            "deadlines": json.dumps(instance.deadlines),
            "outbox": json.dumps(outbox),
        }

    def _commit(self) -> None:
        """Store the changed instances and the position, in one commit."""
        if not self._changed and self._subscription.position == self._subscription.committed:
            return
        rows = []
        for key, instance in self._changed.items():
            is_over = instance.is_ended and not instance.outbox
            if is_over and key not in self._instances:
                continue
            change = "delete" if is_over else "update_postimage"
            rows.append({**self._to_row(key, instance), "_change_type": change})
        try:
            self._transaction = self._transaction.next()
            with self._transaction as tx:
                if rows:
                    tx.append(self.topic, rows)
                self._subscription.commit(tx)
        except NoteConflict as error:
            raise SubscriptionFenced(
                f"Another process runs {self.process.name!r}; nothing was stored.",
                fix="stop one of them.",
            ) from error
        for key, instance in self._changed.items():
            if instance.is_ended and not instance.outbox:
                self._instances.pop(key, None)
            else:
                self._instances[key] = instance
        self._changed = {}

    def instances(self) -> dict[str, S]:
        """The states of the instances that have not ended, by name."""
        return {
            key: instance.state
            for key, instance in self._instances.items()
            if not instance.is_ended
        }

    def deadlines(self) -> list[tuple[datetime, str, str]]:
        """The deadlines that are set, as (time, instance, name), in order."""
        return [(from_us(at), key, name) for at, key, name in self._due(None)]

    # Reacting

    def _instance(self, key: str) -> _Instance:
        if key not in self._changed:
            known = self._instances.get(key)
            self._changed[key] = _Instance(self.process.initial) if known is None else known.copy()
        return self._changed[key]

    def _react(
        self, key: str, happened: Any, *, at_us: int, name: str, correlation: str | None
    ) -> None:
        """Let an instance react to what happened at a time; `name` is unique among what happens."""
        is_new = key not in self._changed and key not in self._instances
        instance = self._instance(key)
        if instance.is_ended:
            return
        try:
            reaction = self.process.react(instance.state, happened)
        except Exception as error:
            raise ProcessFailed(
                f"The process {self.process.name!r} failed at {type(happened).__name__} of the"
                f" instance {key!r}: {error!r}.",
                fix="correct its react function; nothing of it was stored.",
            ) from error
        if reaction is None:
            if is_new:
                del self._changed[key]
            return
        instance.state = reaction.state
        for number, send in enumerate(reaction.send):
            instance.outbox.append(self._waiting(key, send, f"{name}.{number}", correlation))
        for deadline, when in reaction.deadlines.items():
            if when is None:
                instance.deadlines.pop(deadline, None)
            elif isinstance(when, timedelta):
                instance.deadlines[deadline] = at_us + when // timedelta(microseconds=1)
            else:
                instance.deadlines[deadline] = to_time_us(when)
        if reaction.is_ended:
            instance.is_ended = True
            instance.deadlines = {}

    def _waiting(self, key: str, send: Send, name: str, correlation: str | None) -> _Waiting:
        kind = event_type(type(send.command))
        if kind not in self._commands or send.to not in self._handlers:
            known = self._handlers if kind in self._commands else self._commands
            wrong = send.to if kind in self._commands else kind
            raise ProcessFailed(
                f"The process {self.process.name!r} sends a {kind!r} to the handler {send.to!r}:"
                f" {nearest(wrong, known)}",
                fix="list the command's class in commands=, and the handler in handlers=.",
            )
        return _Waiting(
            id=f"{self.process.name}/{key}/{name}",
            to=send.to,
            entity=send.entity,
            kind=kind,
            data=self._commands[kind].encode(send.command),
            correlation=correlation,
        )

    def _due(self, before_us: int | None) -> list[tuple[int, str, str]]:
        """Deadlines before or at a time, or all, in order."""
        merged = {**self._instances, **self._changed}
        return sorted(
            (at_us, key, name)
            for key, instance in merged.items()
            for name, at_us in instance.deadlines.items()
            if before_us is None or at_us <= before_us
        )

    def _reach_deadlines(self, before_us: int) -> int:
        """Reach the deadlines up to a time, in order, those that are set meanwhile too."""
        reached = 0
        while due := self._due(before_us):
            at_us, key, name = due[0]
            del self._instance(key).deadlines[name]
            happened = DeadlineReached(name, from_us(at_us))
            self._react(key, happened, at_us=at_us, name=f"{name}@{at_us}", correlation=key)
            reached += 1
        self.reached += reached
        return reached

    def _react_to(self, event: RecordedEvent) -> None:
        thing = self._codec.from_recorded(event)
        try:
            key = self.process.key(thing)
        except Exception as error:
            raise ProcessFailed(
                f"The key function of the process {self.process.name!r} failed at the event"
                f" {event.type!r} at offset {event.offset}: {error!r}.",
                fix="correct it; nothing of the event was stored.",
            ) from error
        if key is None:
            return
        cause = event.id or f"{event.entity}/{event.version}"
        self._react(
            key,
            thing,
            at_us=event.time_us,
            name=str(event.offset),
            correlation=event.correlation_id or cause,
        )

    # Steps

    def step(self) -> bool:
        """React to some events and to deadlines, store that, and send the commands that wait.
        Returns whether there was anything to do.

        1. Ask the log for its time, in the order of its commits: what is appended from here on is
           later.
        2. React to events, to each after the deadlines before it.
        3. If all events up to that time are read, reach the deadlines up to it.
        4. Store the changed instances and the position in one commit.
        5. Send the commands that are stored; then store that they are handled, and what the
           refused ones lead to.
        """
        try:
            return self._step()
        except (HeadraceError, OSError):
            self._load()
            raise

    def _step(self) -> bool:
        now_us, end = self._time()  # 1
        events = self._subscription.poll(_MAX_EVENTS)
        for event in events:  # 2
            self._reach_deadlines(event.time_us - 1)
            self._react_to(event)
        reached = 0
        if self._subscription.position >= end:
            reached = self._reach_deadlines(now_us) if not events else 0  # 3
        self._commit()  # 4
        return self._send() or bool(events) or reached > 0  # 5

    def _time(self) -> tuple[int, int]:
        """The log's time and the end of the events, under the log's lock."""

        def decide(draft: CommitDraft) -> tuple[int, int]:
            return draft.time_us, draft.state.topic(self.store.topic).partitions[0].end

        if not self._due(None):
            return 0, 0  # nobody waits for the time
        return self.store.log.committer.submit(decide)

    def _send(self) -> bool:
        """Send the commands that are stored."""
        waiting = [
            (key, command)
            for key, instance in self._instances.items()
            for command in instance.outbox
        ]
        for key, command in waiting:
            refusal = self._handle(command)
            instance = self._instance(key)
            instance.outbox = [each for each in instance.outbox if each.id != command.id]
            if refusal is not None:
                self._react(
                    key,
                    refusal,
                    at_us=self.store.log.store.clock.now_us(),
                    name=f"{command.id.removeprefix(f'{self.process.name}/{key}/')}/refused",
                    correlation=command.correlation,
                )
        self._commit()
        return bool(waiting)

    def _handle(self, waiting: _Waiting) -> RefusedCommand | None:
        command = self._commands[waiting.kind].decode(waiting.data)
        try:
            self._handlers[waiting.to].handle(
                waiting.entity,
                command,
                id=waiting.id,
                correlation_id=waiting.correlation,
            )
        except CommandRefused as refused:
            return RefusedCommand(waiting.entity, command, refused.reason)
        return None

    def settle(self) -> None:
        """Go on until there is nothing left to do: for tests, and for programs that end."""
        while self.step():
            pass

    def run(self, stop: threading.Event | None = None) -> None:
        """Go on until `stop` is set. What may work later is tried again; any other error ends it,
        and nothing is lost: the next run goes on where this one was.
        """
        idle = failures = 0
        while stop is None or not stop.is_set():
            try:
                idle = 0 if self.step() else idle + 1
                failures = 0
                pause_s = _IDLE_BACKOFF.pause_s(idle) if idle else 0.0
            except RetryError as error:
                failures += 1
                pause_s = _RETRY_BACKOFF.pause_s(failures)
                logger.warning("The process %r tries again: %s", self.process.name, error)
            if pause_s:
                if stop is None:
                    time.sleep(pause_s)
                else:
                    stop.wait(pause_s)
