"""Decides which messages an alert sends, and when. Rows of the alert's topic become messages in the
topic `alerts`, in one transaction with the offsets up to which rows were read.

So a message exists once, with one id, before anybody is notified; `delivery.py` sends it, after a
crash again under the same id. A tick that is recomputed writes no second rows, and so causes no
second message.

    rows of a table's topic      state                  message
    insert  room=7, heat=90      active {7}             firing, 1 new, 1 active
    update  room=7, heat=95      active {7}
    insert  room=8, heat=91      active {7, 8}          firing, 1 new, 2 active (after `every`)
    delete  room=7               active {8}             firing, 1 resolved, 1 active
    delete  room=8               active {}              resolved, 1 resolved
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Self

import pyarrow as pa

from headrace.alerts.alert import MAX_ROWS, SCHEMA, TOPIC, Alert, AlertMessage, make_message
from headrace.columnar.columns import CHANGE_TYPE, DELETE, INSERT, SYSTEM_FIELDS, UPDATE_PREIMAGE
from headrace.errors import ConfigurationError
from headrace.log.api import Log, Transaction
from headrace.log.dead_letters import dead_letter_json
from headrace.log.values import TopicInfo

# The state of an alert: what it has emitted, what fires, and what waits for its next message. It is
# a note of the log, stored with each message, and bounded in bytes below the largest record that
# Kafka accepts. Rows beyond a bound are counted, but not shown.


VERSION = 2
UNGROUPED = ""
"""The only group of an alert without `by`."""
MAX_GROUPS = 1_000
"""How many groups are remembered with the time of their last message. Beyond them, the groups whose
last message is oldest are forgotten, and may have their next message sooner.
"""
ROWS_BYTES = 64 << 10
"""The size of the fired, and of the resolved, rows that one message shows."""
STORED_ROWS_BYTES = 64 << 10
"""The size of all stored rows that wait for a message, over all groups; others are counted."""
STORED_NAMES_BYTES = 64 << 10
"""The size of the stored names of groups. If those of waiting groups are larger, their messages are
emitted early.
"""


def stored_bytes(text: str) -> int:
    """The size of a text in JSON."""
    return len(json.dumps(text, ensure_ascii=False).encode())


@dataclass
class MessageRows:
    """The first rows, which a message shows, and the number of further ones."""

    shown: list[str] = field(default_factory=list)
    more: int = 0
    size_bytes: int = 0

    def add(self, text: str, max_bytes: int = ROWS_BYTES) -> None:
        size_bytes = self.size_bytes + stored_bytes(text)
        if len(self.shown) < MAX_ROWS and size_bytes <= max_bytes:
            self.shown.append(text)
            self.size_bytes = size_bytes
        else:
            self.more += 1

    def add_all(self, texts: Iterable[str], more: int) -> None:
        for text in texts:
            self.add(text)
        self.more += more

    def truncated(self, max_bytes: int) -> MessageRows:
        """These rows, of which only as many are shown as fit."""
        if self.size_bytes <= max_bytes:
            return self
        fitting = MessageRows(more=self.more)
        for text in self.shown:
            fitting.add(text, max_bytes)
        return fitting

    @classmethod
    def from_stored(cls, shown: list[str], more: int) -> MessageRows:
        return cls(shown, more, sum(map(stored_bytes, shown)))

    def __len__(self) -> int:
        return len(self.shown) + self.more


@dataclass
class AlertGroup:
    """The last message of a group, and the rows that wait for its next one."""

    notified_us: int = 0
    is_muted: bool = False
    """Whether the last message was silenced, so that nobody knows what fires."""
    fired: MessageRows = field(default_factory=MessageRows)
    resolved: MessageRows = field(default_factory=MessageRows)

    @property
    def waiting(self) -> int:
        return len(self.fired) + len(self.resolved)

    def to_json(self) -> list[Any]:
        return [
            self.notified_us,
            self.is_muted,
            self.fired.shown,
            self.fired.more,
            self.resolved.shown,
            self.resolved.more,
        ]

    @classmethod
    def from_json(cls, stored: list[Any]) -> AlertGroup:
        notified_us, is_muted, fired, more_fired, resolved, more_resolved = stored
        return cls(
            notified_us=notified_us,
            is_muted=is_muted,
            fired=MessageRows.from_stored(fired, more_fired),
            resolved=MessageRows.from_stored(resolved, more_resolved),
        )


@dataclass
class AlertState:
    """The state of one alert."""

    positions: dict[int, int] = field(default_factory=dict)
    """Partition -> the offset after the rows that were read."""
    active: dict[str, str] = field(default_factory=dict)
    """Key -> the row that fires."""
    groups: dict[str, AlertGroup] = field(default_factory=dict)

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
    def from_json(cls, text: str | None) -> AlertState:
        if text is None:
            return cls()
        stored = json.loads(text)
        if stored["version"] > VERSION:
            raise ConfigurationError(
                "The state of an alert was written by a newer version of Headrace (format"
                f" {stored['version']}).",
                fix="run that version, or a newer one.",
            )
        if stored["version"] == 1:
            groups = {UNGROUPED: AlertGroup(stored["told_us"], stored["is_muted"])}
        else:
            groups = {name: AlertGroup.from_json(group) for name, group in stored["groups"].items()}
        return cls(dict(stored["positions"]), stored["active"], groups)

    def after_emission(
        self, emitted: dict[str, AlertGroup], active: Collection[str], *, since_us: int
    ) -> AlertState:
        """The state after messages of the `emitted` groups. Rows fire in the `active` ones.

        Groups with nothing to remember are left out: no row waits, no silenced row still fires, and
        the last message is older than `since_us`. If there are too many, those are left out whose
        last message is oldest; groups that still owe a message stay.
        """
        groups = {**self.groups, **emitted}
        owing = {
            name
            for name, group in groups.items()
            if group.waiting or (group.is_muted and name in active)
        }
        quiet = sorted(
            (
                name
                for name, group in groups.items()
                if name not in owing and group.notified_us > since_us
            ),
            key=lambda name: (groups[name].is_muted, -groups[name].notified_us),
        )
        max_groups = max(0, MAX_GROUPS - len(owing))
        max_bytes = STORED_NAMES_BYTES - sum(map(stored_bytes, owing))
        sizes_bytes = accumulate(map(stored_bytes, quiet))
        retained = owing | {
            name
            for name, size_bytes in zip(quiet[:max_groups], sizes_bytes, strict=False)
            if size_bytes <= max_bytes
        }
        bounded = {}
        left_bytes = STORED_ROWS_BYTES
        for name, group in groups.items():
            if name in retained:
                fired = group.fired.truncated(left_bytes)
                resolved = group.resolved.truncated(left_bytes - fired.size_bytes)
                left_bytes -= fired.size_bytes + resolved.size_bytes
                bounded[name] = AlertGroup(
                    notified_us=group.notified_us,
                    is_muted=group.is_muted,
                    fired=fired,
                    resolved=resolved,
                )
        return AlertState(dict(self.positions), dict(self.active), bounded)


# Silences. During a silence, messages are recorded but not sent. What still fires when the silence
# ends is sent then.


def erase_rows(note: str, is_erased: Callable[[str], bool]) -> str:
    """The state of an alert without the rows, keys and groups that are erased. Positions stay, so
    no row is read again; what fires and was erased resolves without a word.
    """
    state = AlertState.from_json(note)
    before = state.to_json()
    state.active = {
        key: text for key, text in state.active.items() if not (is_erased(key) or is_erased(text))
    }
    state.groups = {name: group for name, group in state.groups.items() if not is_erased(name)}
    for group in state.groups.values():
        for rows in (group.fired, group.resolved):
            kept = MessageRows.from_stored(
                [text for text in rows.shown if not is_erased(text)], rows.more
            )
            rows.shown, rows.size_bytes = kept.shown, kept.size_bytes
    after = state.to_json()
    return note if after == before else after


def _silence_note(pipeline: str, alert: str) -> str:
    return f"silence.{pipeline}.{alert}"


def silence(log: Log, pipeline: str, alert: str, until_us: int) -> None:
    """Silence an alert until a time; a time that has passed ends the silence."""
    with log.transaction(_silence_note(pipeline, alert)) as tx:
        tx.set_note(_silence_note(pipeline, alert), str(until_us))


def silenced_until_us(log: Log, pipeline: str, alert: str) -> int:
    """The time until which an alert is silenced, or 0."""
    return int(log.note(_silence_note(pipeline, alert)) or 0)


# The decider


MAX_ACTIVE = 1_000
"""How many firing keys are remembered. Messages say that further ones fire and resolve, but do not
count them as active.
"""
ACTIVE_BYTES = 256 << 10
"""The stored size of these keys and their rows; further ones are treated in the same way."""
MAX_WAITING = 10_000
"""How many rows of a group may wait for its next message; then it is emitted early."""
MAX_MESSAGES = 100
"""How many messages are emitted at once. If more groups have one, the last message is about all
remaining groups together.
"""
_READ_ROWS = 10_000
_SYSTEM_COLUMNS = {system_field.name for system_field in SYSTEM_FIELDS}
Active = Mapping[str, Sequence[str]]
"""Group -> its rows that fire."""


class AlertDecider:
    """Emits the messages of one alert. It belongs to one thread; if another process takes over, it
    fails with TransactionFenced.
    """

    def __init__(
        self,
        log: Log,
        pipeline: str,
        alert: Alert,
        info: TopicInfo,
        on_message: Callable[[AlertMessage], None] | None,
    ) -> None:
        self.log = log
        self.pipeline = pipeline
        self.alert = alert
        self._info = info
        self._on_message = on_message or (lambda _message: None)
        self._note = f"alerting.{pipeline}.{alert.name}"
        self._transaction: Transaction | None = None
        self._stored_note: str | None = None
        self._state = AlertState()
        self._emitted_positions: dict[int, int] = {}
        self._active_bytes = 0

    @classmethod
    def open(
        cls,
        log: Log,
        pipeline: str,
        alert: Alert,
        on_message: Callable[[AlertMessage], None] | None = None,
    ) -> Self:
        """Create the topic of alerts if it is missing, and read the state of the alert."""
        log.create_topic(TOPIC, SCHEMA, exist_ok=True)
        decider = cls(log, pipeline, alert, log.topic(alert.topic), on_message)
        decider.reload()
        return decider

    def reload(self) -> None:
        """After a failure, go back to the state that the log has; rows after it are read again."""
        self._stored_note = self.log.note(self._note)
        self._state = AlertState.from_json(self._stored_note)
        self._emitted_positions = dict(self._state.positions)
        self._active_bytes = sum(
            _entry_bytes(key, text) for key, text in self._state.active.items()
        )

    @property
    def is_waiting(self) -> bool:
        return self._state.waiting > 0

    def step(self, now_us: int, *, at_once: bool = False) -> bool:
        """Read on, and emit the messages that are due, or with `at_once` all that wait. Returns
        whether there were new rows.
        """
        has_read = self._read()
        groups = self._state.groups
        if not any(group.waiting or group.is_muted for group in groups.values()):
            return has_read
        is_silenced = silenced_until_us(self.log, self.pipeline, self.alert.name) > now_us
        active: dict[str, list[str]] = {}
        for text in self._state.active.values():
            active.setdefault(self._group_of(text), []).append(text)
        at_once = at_once or self._state.waiting_names_bytes > STORED_NAMES_BYTES
        due = []
        for name, group in groups.items():
            is_due = (
                at_once
                or now_us - group.notified_us >= self.alert.every_us
                or group.waiting >= MAX_WAITING
            )
            if (group.waiting and is_due) or _is_reminder_due(
                group, is_active=name in active, is_silenced=is_silenced
            ):
                due.append(name)
        if due:
            self._emit(due, active, now_us, is_silenced=is_silenced)
        return has_read

    # Reading rows

    def _read(self) -> bool:
        """Read a bounded number of rows of each partition into the state."""
        ends = self.log.end_offsets(self.alert.topic)
        starts = self.log.start_offsets(self.alert.topic)
        has_read = False
        for partition, end in ends.items():
            start = max(self._state.positions.get(partition, 0), starts.get(partition, 0))
            if start < end:
                stop = min(end, start + _READ_ROWS)
                rows = self.log.read(self.alert.topic, partition, start, stop)
                for batch in rows.with_dead_letters():
                    self._apply_batch(batch)
                self._state.positions[partition] = stop
                has_read = True
        return has_read

    def _apply_batch(self, batch: pa.RecordBatch) -> None:
        """Apply rows one by one: alerts are few."""
        columns = [
            name
            for name in batch.schema.names
            if name not in _SYSTEM_COLUMNS and name != CHANGE_TYPE
        ]
        texts = dead_letter_json(batch.select(columns)).to_pylist()
        if not self._info.is_table:
            for text in texts:
                self._fire(text)
            return
        keys = dead_letter_json(batch.select(list(self._info.key))).to_pylist()
        for change, key, text in zip(
            batch.column(CHANGE_TYPE).to_pylist(), keys, texts, strict=True
        ):
            self._apply_change(change, key, text)

    def _apply_change(self, change: str, key: str, text: str) -> None:
        before = self._state.active.get(key)
        if change == DELETE:
            self._drop_active(key)
            self._resolve(before or (text if self.alert.by else key))
        elif change == INSERT or (
            change != UPDATE_PREIMAGE and before is None and self._has_room(key, text)
        ):
            self._fire(text)
            self._set_active(key, text)
        elif change != UPDATE_PREIMAGE and before is not None:
            self._set_active(key, text)
            if self._group_of(before) != self._group_of(text):
                self._resolve(before)
                self._fire(text)

    def _set_active(self, key: str, text: str) -> None:
        """Remember that a key fires, with its row; or forget it, if there is no room."""
        if not self._has_room(key, text):
            self._drop_active(key)
            return
        self._active_bytes += _entry_bytes(key, text) - self._active_entry_bytes(key)
        self._state.active[key] = text

    def _drop_active(self, key: str) -> None:
        self._active_bytes -= self._active_entry_bytes(key)
        self._state.active.pop(key, None)

    def _has_room(self, key: str, text: str) -> bool:
        others = len(self._state.active) - (key in self._state.active)
        other_bytes = self._active_bytes - self._active_entry_bytes(key)
        return others < MAX_ACTIVE and other_bytes + _entry_bytes(key, text) <= ACTIVE_BYTES

    def _active_entry_bytes(self, key: str) -> int:
        return _entry_bytes(key, self._state.active[key]) if key in self._state.active else 0

    def _group_of(self, text: str) -> str:
        """The group of a row: its columns and their values, as JSON."""
        if not self.alert.by:
            return UNGROUPED
        row = json.loads(text)
        return json.dumps({name: row.get(name) for name in self.alert.by})

    def _fire(self, text: str) -> None:
        self._state.groups.setdefault(self._group_of(text), AlertGroup()).fired.add(text)

    def _resolve(self, text: str) -> None:
        self._state.groups.setdefault(self._group_of(text), AlertGroup()).resolved.add(text)

    # Emitting messages

    def _emit(self, names: list[str], active: Active, now_us: int, *, is_silenced: bool) -> None:
        """Emit the messages of some groups:

        1. in one transaction, append one message per group, the last one about all remaining groups
           if there are too many, and store the state with the offsets that were read
        2. call the listener in this process
        """
        alone = len(names) if len(names) <= MAX_MESSAGES else MAX_MESSAGES - 1
        bundles = [[name] for name in names[:alone]]
        if names[alone:]:
            bundles.append(names[alone:])
        messages = [
            self._message(bundle, active, now_us, is_silenced=is_silenced) for bundle in bundles
        ]
        state = self._state.after_emission(
            {name: AlertGroup(now_us, is_silenced) for name in names},
            active,
            since_us=now_us - max(1, self.alert.every_us),
        )
        note = state.to_json()
        self._transaction = (
            self._transaction.next()
            if self._transaction is not None
            else self.log.transaction(self._note)
        )
        with self._transaction as tx:  # 1
            tx.append(TOPIC, [message.row() for message in messages])
            tx.set_note(self._note, note, expect=self._stored_note)
        self._stored_note = note
        self._state = state
        self._emitted_positions = dict(state.positions)
        for message in () if is_silenced else messages:
            self._on_message(message)  # 2

    def _message(
        self, names: list[str], active: Active, now_us: int, *, is_silenced: bool
    ) -> AlertMessage:
        """The message of one group, or of several together."""
        fired, resolved, reminded_us = MessageRows(), MessageRows(), 0
        for name in names:
            group, firing_rows = self._state.groups[name], active.get(name, ())
            shown = group.fired.shown
            if _is_reminder_due(group, is_active=bool(firing_rows), is_silenced=is_silenced):
                shown = list(dict.fromkeys([*firing_rows, *shown]))  # also those resolved meanwhile
                reminded_us = max(reminded_us, group.notified_us)
            fired.add_all(shown, group.fired.more)
            resolved.add_all(group.resolved.shown, group.resolved.more)
        first, *others = names
        return make_message(
            id=self._message_id(json.dumps(names) if others else first, reminded_us),
            pipeline=self.pipeline,
            alert=self.alert.name,
            at_us=now_us,
            fired=fired.shown,
            resolved=resolved.shown,
            active=sum(len(active.get(name, ())) for name in names),
            is_silenced=is_silenced,
            more_fired=fired.more,
            more_resolved=resolved.more,
            group=json.loads(first) if first and not others else None,
            groups=len(names) if others else 0,
        )

    def _message_id(self, group: str, reminded_us: int) -> str:
        """The id of a message: a digest of its rows' range, from the end of the last message to the
        end of this one.
        """
        identity = [
            self._info.id or self._info.name,
            group,
            sorted(self._emitted_positions.items()),
            sorted(self._state.positions.items()),
            reminded_us,
        ]
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        return f"{self.alert.name}-{digest[:24]}"


def _is_reminder_due(group: AlertGroup, *, is_active: bool, is_silenced: bool) -> bool:
    """Whether a silence has ended during which something began that still fires."""
    return group.is_muted and not is_silenced and is_active


def _entry_bytes(key: str, text: str) -> int:
    return stored_bytes(key) + stored_bytes(text)
