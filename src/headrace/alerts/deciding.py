"""What is told of an alert, and when: rows of its topic become messages in the topic `alerts`, in one transaction with the place up to which rows were told.

So a message exists once, with one id, before anybody is told; whoever tells it again after a crash tells it under that id. A tick that is computed again writes no second rows, and so no second message.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

from headrace.alerts.declared import Alert
from headrace.alerts.messages import SCHEMA, TOPIC, AlertMessage, message_of
from headrace.alerts.silences import silenced_until_us
from headrace.log.api import CHANGE_TYPE, DELETE, INSERT, SYSTEM_FIELDS, UPDATE, UPDATE_BEFORE, Log, Transaction
from headrace.log.dead import letter_texts

MOST_ACTIVE = 1_000
"""Keys that fire and are remembered. Of more it is told that they fire, and that they are resolved, but they are not counted as active."""
MOST_WAITING = 10_000
"""Rows that wait for the next message; then it is told early."""
_READ_ROWS = 10_000
_SYSTEM = {each.name for each in SYSTEM_FIELDS}


@dataclass
class _State:
    """What was told: stored with each message."""

    positions: dict[int, int] = field(default_factory=dict)
    active: dict[str, str] = field(default_factory=dict)
    """Key -> the row that fired."""
    told_us: int = 0
    is_muted: bool = False
    """Whether the last message was silenced, and what fires has not been told."""

    def to_json(self) -> str:
        return json.dumps({"version": 1, "positions": sorted(self.positions.items()), "active": self.active, "told_us": self.told_us, "is_muted": self.is_muted})

    @classmethod
    def of(cls, text: str | None) -> _State:
        if text is None:
            return cls()
        stored = json.loads(text)
        return cls(dict(stored["positions"]), stored["active"], stored["told_us"], stored["is_muted"])


@dataclass
class _Waiting:
    """Rows that were read since the last message, and what they change."""

    positions: dict[int, int]
    active: dict[str, str]
    fired: list[str] = field(default_factory=list)
    resolved: list[str] = field(default_factory=list)


class Deciding:
    """One alert. It belongs to one thread; another process that takes over makes this one fail with TransactionFenced."""

    def __init__(self, log: Log, pipeline: str, alert: Alert, on_message: Callable[[AlertMessage], None] | None = None) -> None:
        self.log, self.pipeline, self.alert = log, pipeline, alert
        self._on_message = on_message or (lambda _message: None)
        self._note = f"alerting.{pipeline}.{alert.name}"
        log.create_topic(TOPIC, SCHEMA, exist_ok=True)
        self._info = log.topic(alert.topic)
        self._transaction: Transaction | None = None
        self._state = _State.of(log.note(self._note))
        self._waiting = self._nothing()

    def forget(self) -> None:
        """After a failure: what was told is what the log says, and everything else is read again."""
        self._state = _State.of(self.log.note(self._note))
        self._waiting = self._nothing()

    def _nothing(self) -> _Waiting:
        return _Waiting(dict(self._state.positions), dict(self._state.active))

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting.fired or self._waiting.resolved)

    def step(self, now_us: int, *, at_once: bool = False) -> bool:
        """Read on, and tell if it is time; with `at_once` whatever waits. Returns whether there was anything new."""
        found = self._read()
        silenced = silenced_until_us(self.log, self.pipeline, self.alert.name) > now_us
        reminds = self._state.is_muted and not silenced and bool(self._waiting.active)
        is_due = at_once or now_us - self._state.told_us >= self.alert.every_us or len(self._waiting.fired) + len(self._waiting.resolved) >= MOST_WAITING
        if reminds or (self.is_waiting and is_due):
            self._tell(now_us, is_silenced=silenced, reminds=reminds)
        return found

    # Reading

    def _read(self) -> bool:
        ends, starts = self.log.end_offsets(self.alert.topic), self.log.start_offsets(self.alert.topic)
        found = False
        for partition, end in ends.items():
            start = max(self._waiting.positions.get(partition, 0), starts.get(partition, 0))
            if start < end:
                stop = min(end, start + _READ_ROWS)
                for batch in self.log.read(self.alert.topic, partition, start, stop):
                    self._take(batch)
                self._waiting.positions[partition] = stop
                found = True
        return found

    def _take(self, batch: pa.RecordBatch) -> None:
        """Alerts are few: whoever alerts of everything is told so by their receivers."""
        shown = [name for name in batch.schema.names if name not in _SYSTEM and name != CHANGE_TYPE]
        texts = letter_texts(batch.select(shown)).to_pylist()
        if not self._info.is_table:
            self._waiting.fired += texts
            return
        keys = letter_texts(batch.select(list(self._info.key))).to_pylist()
        for change, key, text in zip(batch.column(CHANGE_TYPE).to_pylist(), keys, texts, strict=True):
            self._take_change(change, key, text)

    def _take_change(self, change: str, key: str, text: str) -> None:
        waiting = self._waiting
        if change == DELETE:
            waiting.resolved.append(waiting.active.pop(key, key))
        elif change == INSERT or (change == UPDATE and key not in waiting.active and len(waiting.active) < MOST_ACTIVE):
            waiting.fired.append(text)
            if len(waiting.active) < MOST_ACTIVE:
                waiting.active[key] = text
        elif change != UPDATE_BEFORE and key in waiting.active:
            waiting.active[key] = text

    # Telling

    def _tell(self, now_us: int, *, is_silenced: bool, reminds: bool) -> None:
        """1. the message and the place behind its rows, in one transaction; 2. whoever listens in this process."""
        waiting = self._waiting
        fired = list(dict.fromkeys([*waiting.active.values(), *waiting.fired])) if reminds else waiting.fired
        identity = self._id(waiting.positions, reminds=reminds)
        message = message_of(identity, self.pipeline, self.alert.name, now_us, fired, waiting.resolved, len(waiting.active), is_silenced=is_silenced)
        known = self._state.to_json() if self._state.told_us else None
        told = _State(dict(waiting.positions), dict(waiting.active), now_us, is_silenced)
        self._transaction = self._transaction.next() if self._transaction is not None else self.log.transaction(self._note)
        with self._transaction as tx:  # 1
            tx.append(TOPIC, [message.row()])
            tx.set_note(self._note, told.to_json(), expect=known)
        self._state = told
        self._waiting = self._nothing()
        if not is_silenced:
            self._on_message(message)  # 2

    def _id(self, stop: dict[int, int], *, reminds: bool) -> str:
        """Of the rows it tells: from where the last message ended to where this one does."""
        place = [self._info.id or self._info.name, sorted(self._state.positions.items()), sorted(stop.items()), self._state.told_us if reminds else 0]
        return f"{self.alert.name}-{hashlib.sha256(json.dumps(place).encode()).hexdigest()[:24]}"
