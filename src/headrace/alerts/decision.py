"""What is told of an alert, and when: rows of its topic become messages in the topic `alerts`, in
one transaction with the place up to which rows were told.

So a message exists once, with one id, before anybody is told; whoever tells it again after a crash
tells it under that id. A tick that is computed again writes no second rows, and so no second
message.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import pyarrow as pa

from headrace.alerts.alert import MAX_ROWS, SCHEMA, TOPIC, Alert, AlertMessage, message_of
from headrace.columnar.columns import CHANGE_TYPE, DELETE, INSERT, SYSTEM_FIELDS, UPDATE_BEFORE
from headrace.errors import ConfigurationError
from headrace.log.api import Log, Transaction
from headrace.log.dead_letters import letter_texts

# What an alert has told, what fires, and what waits for its next message: a note of the log, stored
# with each message (`deciding`).
#
# It is bounded in bytes, below what a record of Kafka may have: what is over a bound is still
# counted, and only not shown.


VERSION = 2
WHOLE = ""
"""The group of an alert that has none."""
MAX_GROUPS = 1_000
"""Groups of which it is remembered when they were told last; of more, those that were told longest
ago are forgotten, and may be told sooner.
"""
ROWS_BYTES = 64 << 10
"""So large are the rows of each kind that one message shows."""
STORED_ROWS_BYTES = 64 << 10
"""So large are the rows that wait, of all groups together, when they are stored; the others are
counted.
"""
STORED_NAMES_BYTES = 64 << 10
"""So large are the names of groups that are stored; when those that wait are larger, they are told
early.
"""


def stored_bytes(text: str) -> int:
    """In JSON."""
    return len(json.dumps(text, ensure_ascii=False).encode())


@dataclass
class Rows:
    """The first rows, which a message shows, and how many more there are."""

    shown: list[str] = field(default_factory=list)
    more: int = 0
    size: int = 0

    def add(self, text: str, max_bytes: int = ROWS_BYTES) -> None:
        size = self.size + stored_bytes(text) if len(self.shown) < MAX_ROWS else max_bytes + 1
        if size <= max_bytes:
            self.shown.append(text)
            self.size = size
        else:
            self.more += 1

    def add_all(self, texts: Iterable[str], more: int) -> None:
        for text in texts:
            self.add(text)
        self.more += more

    def within(self, max_bytes: int) -> Rows:
        """As many of them as fit."""
        if self.size <= max_bytes:
            return self
        fitting = Rows(more=self.more)
        for text in self.shown:
            fitting.add(text, max_bytes)
        return fitting

    @classmethod
    def of(cls, shown: list[str], more: int) -> Rows:
        return cls(shown, more, sum(map(stored_bytes, shown)))

    def __len__(self) -> int:
        return len(self.shown) + self.more


@dataclass
class Group:
    """Rows that were told together, and those that wait for the next message."""

    told_us: int = 0
    is_muted: bool = False
    """Whether the last message was silenced, and what fires has not been told."""
    fired: Rows = field(default_factory=Rows)
    resolved: Rows = field(default_factory=Rows)

    @property
    def waiting(self) -> int:
        return len(self.fired) + len(self.resolved)

    def to_json(self) -> list[Any]:
        return [
            self.told_us,
            self.is_muted,
            self.fired.shown,
            self.fired.more,
            self.resolved.shown,
            self.resolved.more,
        ]

    @classmethod
    def of(cls, stored: list[Any]) -> Group:
        told_us, is_muted, fired, more_fired, resolved, more_resolved = stored
        return cls(told_us, is_muted, Rows.of(fired, more_fired), Rows.of(resolved, more_resolved))

    def within(self, max_bytes: int) -> Group:
        fired = self.fired.within(max_bytes)
        return Group(
            self.told_us, self.is_muted, fired, self.resolved.within(max_bytes - fired.size)
        )


@dataclass
class AlertState:
    positions: dict[int, int] = field(default_factory=dict)
    """The place behind the rows that were read."""
    active: dict[str, str] = field(default_factory=dict)
    """Key -> the row that fired."""
    groups: dict[str, Group] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        return sum(group.waiting for group in self.groups.values())

    @property
    def waiting_names_bytes(self) -> int:
        return sum(stored_bytes(name) for name, group in self.groups.items() if group.waiting)

    def to_json(self) -> str:
        groups = {name: group.to_json() for name, group in self.groups.items()}
        return json.dumps(
            {
                "version": VERSION,
                "positions": sorted(self.positions.items()),
                "active": self.active,
                "groups": groups,
            },
            ensure_ascii=False,
        )

    @classmethod
    def of(cls, text: str | None) -> AlertState:
        if text is None:
            return cls()
        stored = json.loads(text)
        if stored["version"] > VERSION:
            raise ConfigurationError(
                "An alert was last told by a newer version of Headrace (its state has version"
                f" {stored['version']}).",
                fix="run that version, or a newer one.",
            )
        if stored["version"] == 1:
            return cls(
                dict(stored["positions"]),
                stored["active"],
                {WHOLE: Group(stored["told_us"], stored["is_muted"])},
            )
        return cls(
            dict(stored["positions"]),
            stored["active"],
            {name: Group.of(each) for name, each in stored["groups"].items()},
        )

    def told(
        self, groups: dict[str, Group], active: Collection[str], *, since_us: int
    ) -> AlertState:
        """The state with some groups as they now are; in `active` ones something fires. Groups that
        have nothing to remember are left out: nothing waits or is to be told after a silence, and
        the last message is older than `since_us`. Of too many, those go first that were told
        longest ago; what is owed to somebody stays.
        """
        now = {**self.groups, **groups}
        owed = {
            name
            for name, group in now.items()
            if group.waiting or (group.is_muted and name in active)
        }
        quiet = sorted(
            (name for name, group in now.items() if name not in owed and group.told_us > since_us),
            key=lambda name: (now[name].is_muted, -now[name].told_us),
        )
        kept = owed | set(
            _fitting(
                quiet, MAX_GROUPS - len(owed), STORED_NAMES_BYTES - sum(map(stored_bytes, owed))
            )
        )
        return AlertState(
            dict(self.positions),
            dict(self.active),
            _within({name: group for name, group in now.items() if name in kept}),
        )


def _fitting(names: list[str], most: int, max_bytes: int) -> list[str]:
    """The first ones."""
    sizes = accumulate(map(stored_bytes, names))
    return [
        name for name, size in zip(names[: max(0, most)], sizes, strict=False) if size <= max_bytes
    ]


def _within(groups: dict[str, Group]) -> dict[str, Group]:
    """The rows that they show, bounded together."""
    left, bounded = STORED_ROWS_BYTES, {}
    for name, group in groups.items():
        bounded[name] = group.within(left)
        left -= bounded[name].fired.size + bounded[name].resolved.size
    return bounded


# Silences: for some time an alert is decided and recorded, and nobody is told. What still fires
# when the silence ends is told then.


def _note(pipeline: str, alert: str) -> str:
    return f"silence.{pipeline}.{alert}"


def silence(log: Log, pipeline: str, alert: str, until_us: int) -> None:
    """Until a time; one that has passed ends it."""
    with log.transaction(_note(pipeline, alert)) as tx:
        tx.set_note(_note(pipeline, alert), str(until_us))


def silenced_until_us(log: Log, pipeline: str, alert: str) -> int:
    return int(log.note(_note(pipeline, alert)) or 0)


MAX_ACTIVE = 1_000
"""Keys that fire and are remembered. Of more it is told that they fire, and that they are resolved,
but they are not counted as active.
"""
ACTIVE_BYTES = 256 << 10
"""So large are their keys and rows together, as they are stored; more are treated likewise."""
MAX_WAITING = 10_000
"""Rows of a group that wait for its next message; then it is told early."""
MAX_MESSAGES = 100
"""At one time. When more groups have something to tell, the last message is of all the others
together.
"""
_READ_ROWS = 10_000
_SYSTEM = {each.name for each in SYSTEM_FIELDS}
Active = Mapping[str, Sequence[str]]
"""Group -> its rows that fire."""


class Deciding:
    """One alert. It belongs to one thread; another process that takes over makes this one fail with
    TransactionFenced.
    """

    def __init__(
        self,
        log: Log,
        pipeline: str,
        alert: Alert,
        on_message: Callable[[AlertMessage], None] | None = None,
    ) -> None:
        self.log, self.pipeline, self.alert = log, pipeline, alert
        self._on_message = on_message or (lambda _message: None)
        self._note = f"alerting.{pipeline}.{alert.name}"
        log.create_topic(TOPIC, SCHEMA, exist_ok=True)
        self._info = log.topic(alert.topic)
        self._transaction: Transaction | None = None
        self.forget()

    def forget(self) -> None:
        """After a failure: what was told is what the log says, and everything else is read
        again.
        """
        self._known = self.log.note(self._note)
        self._state = AlertState.of(self._known)
        self._told_positions = dict(self._state.positions)
        self._active_bytes = sum(_size(key, text) for key, text in self._state.active.items())

    @property
    def is_waiting(self) -> bool:
        return self._state.waiting > 0

    def step(self, now_us: int, *, at_once: bool = False) -> bool:
        """Read on, and tell of the groups whose time it is; with `at_once` of whatever waits.
        Returns whether there was anything new.
        """
        found = self._read()
        if not any(group.waiting or group.is_muted for group in self._state.groups.values()):
            return found
        silenced = silenced_until_us(self.log, self.pipeline, self.alert.name) > now_us
        active = self._active()
        at_once = at_once or self._state.waiting_names_bytes > STORED_NAMES_BYTES
        due = [
            name
            for name, group in self._state.groups.items()
            if self._reminds(group, name in active, silenced)
            or (group.waiting and (at_once or self._is_time(group, now_us)))
        ]
        if due:
            self._tell(due, active, now_us, is_silenced=silenced)
        return found

    def _is_time(self, group: Group, now_us: int) -> bool:
        return now_us - group.told_us >= self.alert.every_us or group.waiting >= MAX_WAITING

    @staticmethod
    def _reminds(group: Group, is_active: bool, is_silenced: bool) -> bool:
        """Whether a silence is over in which something began that still fires."""
        return group.is_muted and not is_silenced and is_active

    def _active(self) -> Active:
        found: dict[str, list[str]] = {}
        for text in self._state.active.values():
            found.setdefault(self._group_of(text), []).append(text)
        return found

    # Reading

    def _read(self) -> bool:
        ends, starts = (
            self.log.end_offsets(self.alert.topic),
            self.log.start_offsets(self.alert.topic),
        )
        found = False
        for partition, end in ends.items():
            start = max(self._state.positions.get(partition, 0), starts.get(partition, 0))
            if start < end:
                stop = min(end, start + _READ_ROWS)
                for batch in self.log.read(self.alert.topic, partition, start, stop):
                    self._take(batch)
                self._state.positions[partition] = stop
                found = True
        return found

    def _take(self, batch: pa.RecordBatch) -> None:
        """Alerts are few: whoever alerts of everything is told so by their receivers."""
        shown = [name for name in batch.schema.names if name not in _SYSTEM and name != CHANGE_TYPE]
        texts = letter_texts(batch.select(shown)).to_pylist()
        if not self._info.is_table:
            for text in texts:
                self._fire(text)
            return
        keys = letter_texts(batch.select(list(self._info.key))).to_pylist()
        for change, key, text in zip(
            batch.column(CHANGE_TYPE).to_pylist(), keys, texts, strict=True
        ):
            self._take_change(change, key, text)

    def _take_change(self, change: str, key: str, text: str) -> None:
        before = self._state.active.get(key)
        if change == DELETE:
            self._forget_active(key)
            self._resolve(before or (text if self.alert.by else key))
        elif change == INSERT or (
            change != UPDATE_BEFORE and before is None and self._has_room(key, text)
        ):
            self._fire(text)
            self._remember(key, text)
        elif change != UPDATE_BEFORE and before is not None:
            self._remember(key, text)
            if self._group_of(before) != self._group_of(text):
                self._resolve(before)
                self._fire(text)

    def _remember(self, key: str, text: str) -> None:
        """That it fires, and how it is now; or nothing of it, if there is no room."""
        if not self._has_room(key, text):
            self._forget_active(key)
            return
        self._active_bytes += _size(key, text) - self._remembered_bytes(key)
        self._state.active[key] = text

    def _forget_active(self, key: str) -> None:
        self._active_bytes -= self._remembered_bytes(key)
        self._state.active.pop(key, None)

    def _has_room(self, key: str, text: str) -> bool:
        others = len(self._state.active) - (key in self._state.active)
        return (
            others < MAX_ACTIVE
            and self._active_bytes - self._remembered_bytes(key) + _size(key, text) <= ACTIVE_BYTES
        )

    def _remembered_bytes(self, key: str) -> int:
        return _size(key, self._state.active[key]) if key in self._state.active else 0

    def _group_of(self, text: str) -> str:
        """The group's columns and their values, as JSON."""
        if not self.alert.by:
            return WHOLE
        row = json.loads(text)
        return json.dumps({name: row.get(name) for name in self.alert.by})

    def _fire(self, text: str) -> None:
        self._state.groups.setdefault(self._group_of(text), Group()).fired.add(text)

    def _resolve(self, text: str) -> None:
        self._state.groups.setdefault(self._group_of(text), Group()).resolved.add(text)

    # Telling

    def _tell(self, names: list[str], active: Active, now_us: int, *, is_silenced: bool) -> None:
        """1. a message a group, if they are not too many, what waits for others, and the place
        behind the rows that were read, in one transaction; 2. whoever listens in this process.
        """
        alone = len(names) if len(names) <= MAX_MESSAGES else MAX_MESSAGES - 1
        together = [
            *([name] for name in names[:alone]),
            *([names[alone:]] if names[alone:] else []),
        ]
        messages = [
            self._message(each, active, now_us, is_silenced=is_silenced) for each in together
        ]
        told = self._state.told(
            {name: Group(now_us, is_silenced) for name in names},
            active,
            since_us=now_us - max(1, self.alert.every_us),
        )
        text = told.to_json()
        self._transaction = (
            self._transaction.next()
            if self._transaction is not None
            else self.log.transaction(self._note)
        )
        with self._transaction as tx:  # 1
            tx.append(TOPIC, [message.row() for message in messages])
            tx.set_note(self._note, text, expect=self._known)
        self._known, self._state, self._told_positions = text, told, dict(told.positions)
        for message in () if is_silenced else messages:
            self._on_message(message)  # 2

    def _message(
        self, names: list[str], active: Active, now_us: int, *, is_silenced: bool
    ) -> AlertMessage:
        """Of one group, or of several."""
        fired, resolved, reminded_us = Rows(), Rows(), 0
        for name in names:
            group, fires = self._state.groups[name], active.get(name, ())
            reminds = self._reminds(group, bool(fires), is_silenced)
            fired.add_all(
                [*dict.fromkeys([*fires, *group.fired.shown])] if reminds else group.fired.shown,
                group.fired.more,
            )  # also what has gone meanwhile
            resolved.add_all(group.resolved.shown, group.resolved.more)
            reminded_us = max(reminded_us, group.told_us if reminds else 0)
        one, *others = names
        return message_of(
            self._id(json.dumps(names) if others else one, reminded_us),
            self.pipeline,
            self.alert.name,
            now_us,
            fired.shown,
            resolved.shown,
            sum(len(active.get(name, ())) for name in names),
            is_silenced=is_silenced,
            more=(fired.more, resolved.more),
            group=json.loads(one) if one and not others else None,
            groups=len(names) if others else 0,
        )

    def _id(self, group: str, reminded_us: int) -> str:
        """Of the rows it tells: from where the last message ended to where this one does."""
        place = [
            self._info.id or self._info.name,
            group,
            sorted(self._told_positions.items()),
            sorted(self._state.positions.items()),
            reminded_us,
        ]
        return f"{self.alert.name}-{hashlib.sha256(json.dumps(place).encode()).hexdigest()[:24]}"


def _size(key: str, text: str) -> int:
    return stored_bytes(key) + stored_bytes(text)
