"""The loop of `headrace watch`: look, decide, tell. What changes goes into the topic `alerts`, in one transaction with what fires now, so a watch that starts again tells nothing twice."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from threading import Event as Stop
from threading import Thread

from headrace.alerts.declared import Alert, Way
from headrace.alerts.messages import SCHEMA, TOPIC, message_of
from headrace.alerts.sending import Sending
from headrace.errors import RetryError
from headrace.log.api import Log, Transaction
from headrace.watching.facts import Facts
from headrace.watching.rules import Rule
from headrace.watching.standing import Event, Standings

logger = logging.getLogger("headrace.watching")
PIPELINE = "watch"
"""What stands for the pipeline in messages."""


class Watching:
    """`name` tells one watch from another: what fires is remembered under it."""

    def __init__(self, log: Log, facts: Facts, rules: Sequence[Rule], *, name: str = "watch", to: Sequence[Way] = ()) -> None:
        self.log, self.facts, self.name = log, facts, name
        self._note = f"watching.{name}"
        log.create_topic(TOPIC, SCHEMA, exist_ok=True)
        texts = {rule.text for rule in rules}
        stored = json.loads(log.note(self._note) or "[]")
        self.standings = Standings(rules, {(text, of): since_us for text, of, since_us in stored if text in texts})
        self._sendings = [Sending(log, PIPELINE, Alert(name, TOPIC, tuple(to)), way) for way in to]
        self._transaction: Transaction | None = None

    def look(self, now_us: int) -> list[Event]:
        """Once. Returns what has changed, when it is recorded."""
        values, before = self.facts.look(now_us / 1e6), dict(self.standings.firing)
        events = self.standings.update(values, now_us)
        if events:
            try:
                self._record(events, now_us)
            except BaseException:
                self.standings.firing = before  # it has not happened, and is decided again
                raise
        return events

    def _record(self, events: Sequence[Event], now_us: int) -> None:
        shown = [json.dumps({"rule": each.rule.text, "of": each.of, "value": each.value, "limit": each.rule.limit}) for each in events]
        fired = [text for text, each in zip(shown, events, strict=True) if each.is_firing]
        resolved = [text for text, each in zip(shown, events, strict=True) if not each.is_firing]
        message = message_of(self._id(events, now_us), PIPELINE, self.name, now_us, fired, resolved, len(self.standings.firing), is_silenced=False)
        self._transaction = self._transaction.next() if self._transaction is not None else self.log.transaction(self._note)
        with self._transaction as tx:
            tx.append(TOPIC, [message.row()])
            tx.set_note(self._note, json.dumps([[*key, since_us] for key, since_us in self.standings.firing.items()]))

    def _id(self, events: Sequence[Event], now_us: int) -> str:
        named = json.dumps([now_us, *([each.rule.text, each.of, each.is_firing] for each in events)])
        return f"{self.name}-{hashlib.sha256(named.encode()).hexdigest()[:24]}"

    def run(self, stop: Stop, every_s: float, on_event: Callable[[Event], None]) -> None:
        threads = [Thread(target=each.run, args=(stop,), daemon=True) for each in self._sendings]
        for thread in threads:
            thread.start()
        try:
            while not stop.is_set():
                self._look_and_tell(on_event)
                stop.wait(every_s)
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def _look_and_tell(self, on_event: Callable[[Event], None]) -> None:
        try:
            for event in self.look(time.time_ns() // 1_000):
                on_event(event)
        except RetryError as error:
            logger.warning("Nothing can be watched now: %s", error)
