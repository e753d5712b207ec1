"""What is told of an alert, and when: rows of its topic become messages in the topic `alerts`, in one transaction with the place up to which rows were told.

So a message exists once, with one id, before anybody is told; whoever tells it again after a crash tells it under that id. A tick that is computed again writes no second rows, and so no second message.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa

from headrace.alerts.alert_state import STORED_NAMES_BYTES, WHOLE, AlertState, Group, Rows, stored_bytes
from headrace.alerts.declared import Alert
from headrace.alerts.messages import SCHEMA, TOPIC, AlertMessage, message_of
from headrace.alerts.silences import silenced_until_us
from headrace.log.api import CHANGE_TYPE, DELETE, INSERT, SYSTEM_FIELDS, UPDATE_BEFORE, Log, Transaction
from headrace.log.dead import letter_texts

MOST_ACTIVE = 1_000
"""Keys that fire and are remembered. Of more it is told that they fire, and that they are resolved, but they are not counted as active."""
ACTIVE_BYTES = 256 << 10
"""So large are their keys and rows together, as they are stored; more are treated likewise."""
MOST_WAITING = 10_000
"""Rows of a group that wait for its next message; then it is told early."""
MOST_MESSAGES = 100
"""At one time. When more groups have something to tell, the last message is of all the others together."""
_READ_ROWS = 10_000
_SYSTEM = {each.name for each in SYSTEM_FIELDS}
Active = Mapping[str, Sequence[str]]
"""Group -> its rows that fire."""


class Deciding:
    """One alert. It belongs to one thread; another process that takes over makes this one fail with TransactionFenced."""

    def __init__(self, log: Log, pipeline: str, alert: Alert, on_message: Callable[[AlertMessage], None] | None = None) -> None:
        self.log, self.pipeline, self.alert = log, pipeline, alert
        self._on_message = on_message or (lambda _message: None)
        self._note = f"alerting.{pipeline}.{alert.name}"
        log.create_topic(TOPIC, SCHEMA, exist_ok=True)
        self._info = log.topic(alert.topic)
        self._transaction: Transaction | None = None
        self.forget()

    def forget(self) -> None:
        """After a failure: what was told is what the log says, and everything else is read again."""
        self._known = self.log.note(self._note)
        self._state = AlertState.of(self._known)
        self._told_positions = dict(self._state.positions)
        self._active_bytes = sum(_size(key, text) for key, text in self._state.active.items())

    @property
    def is_waiting(self) -> bool:
        return self._state.waiting > 0

    def step(self, now_us: int, *, at_once: bool = False) -> bool:
        """Read on, and tell of the groups whose time it is; with `at_once` of whatever waits. Returns whether there was anything new."""
        found = self._read()
        if not any(group.waiting or group.is_muted for group in self._state.groups.values()):
            return found
        silenced = silenced_until_us(self.log, self.pipeline, self.alert.name) > now_us
        active = self._active()
        at_once = at_once or self._state.waiting_names_bytes > STORED_NAMES_BYTES
        due = [name for name, group in self._state.groups.items() if self._reminds(group, name in active, silenced) or (group.waiting and (at_once or self._is_time(group, now_us)))]
        if due:
            self._tell(due, active, now_us, is_silenced=silenced)
        return found

    def _is_time(self, group: Group, now_us: int) -> bool:
        return now_us - group.told_us >= self.alert.every_us or group.waiting >= MOST_WAITING

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
        ends, starts = self.log.end_offsets(self.alert.topic), self.log.start_offsets(self.alert.topic)
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
        for change, key, text in zip(batch.column(CHANGE_TYPE).to_pylist(), keys, texts, strict=True):
            self._take_change(change, key, text)

    def _take_change(self, change: str, key: str, text: str) -> None:
        before = self._state.active.get(key)
        if change == DELETE:
            self._forget_active(key)
            self._resolve(before or (text if self.alert.by else key))
        elif change == INSERT or (change != UPDATE_BEFORE and before is None and self._has_room(key, text)):
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
        return others < MOST_ACTIVE and self._active_bytes - self._remembered_bytes(key) + _size(key, text) <= ACTIVE_BYTES

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
        """1. a message a group, if they are not too many, what waits for others, and the place behind the rows that were read, in one transaction; 2. whoever listens in this process."""
        alone = len(names) if len(names) <= MOST_MESSAGES else MOST_MESSAGES - 1
        together = [*([name] for name in names[:alone]), *([names[alone:]] if names[alone:] else [])]
        messages = [self._message(each, active, now_us, is_silenced=is_silenced) for each in together]
        told = self._state.told({name: Group(now_us, is_silenced) for name in names}, active, since_us=now_us - max(1, self.alert.every_us))
        text = told.to_json()
        self._transaction = self._transaction.next() if self._transaction is not None else self.log.transaction(self._note)
        with self._transaction as tx:  # 1
            tx.append(TOPIC, [message.row() for message in messages])
            tx.set_note(self._note, text, expect=self._known)
        self._known, self._state, self._told_positions = text, told, dict(told.positions)
        for message in () if is_silenced else messages:
            self._on_message(message)  # 2

    def _message(self, names: list[str], active: Active, now_us: int, *, is_silenced: bool) -> AlertMessage:
        """Of one group, or of several."""
        fired, resolved, reminded_us = Rows(), Rows(), 0
        for name in names:
            group, fires = self._state.groups[name], active.get(name, ())
            reminds = self._reminds(group, bool(fires), is_silenced)
            fired.add_all([*dict.fromkeys([*fires, *group.fired.shown])] if reminds else group.fired.shown, group.fired.more)  # also what has gone meanwhile
            resolved.add_all(group.resolved.shown, group.resolved.more)
            reminded_us = max(reminded_us, group.told_us if reminds else 0)
        (one, *others) = names
        return message_of(
            self._id(json.dumps(names) if others else one, reminded_us), self.pipeline, self.alert.name, now_us, fired.shown, resolved.shown,
            sum(len(active.get(name, ())) for name in names), is_silenced=is_silenced, more=(fired.more, resolved.more),
            group=json.loads(one) if one and not others else None, groups=len(names) if others else 0,
        )  # fmt: skip

    def _id(self, group: str, reminded_us: int) -> str:
        """Of the rows it tells: from where the last message ended to where this one does."""
        place = [self._info.id or self._info.name, group, sorted(self._told_positions.items()), sorted(self._state.positions.items()), reminded_us]
        return f"{self.alert.name}-{hashlib.sha256(json.dumps(place).encode()).hexdigest()[:24]}"


def _size(key: str, text: str) -> int:
    return stored_bytes(key) + stored_bytes(text)
