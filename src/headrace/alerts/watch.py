"""The loop of `headrace watch`: look, decide, tell. What changes goes into the topic `alerts`, in
one transaction with what fires now, so a watch that starts again tells nothing twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event as Stop
from threading import Thread
from typing import Any

from headrace.alerts.alert import SCHEMA, TOPIC, Alert, Way, message_of
from headrace.alerts.delivery import Sending
from headrace.durations import format_us, to_us
from headrace.errors import BadDuration, ConfigurationError, InputError, RetryError, nearest
from headrace.gateways.metrics import Told
from headrace.log import dead_letters
from headrace.log.api import Log, Transaction
from headrace.serve.dashboard import read_run

# A rule in one line: `lag rows > 10000 of billing`, `watermark age > 5 minutes of orders for 30
# seconds`.


LAG_ROWS, LAG_SECONDS, BEHIND, WATERMARK, LATE, DROPPED, REFUSED, FAILED, DEAD, STATUS_AGE = (
    "lag rows",
    "lag seconds",
    "behind rows",
    "watermark age",
    "late rows",
    "dropped rows",
    "refused rows",
    "failed batches",
    "dead letters",
    "status age",
)
OF_THE_LOG = {
    LAG_ROWS: "a group",
    LAG_SECONDS: "a group",
    REFUSED: "a gateway",
    DEAD: "a topic, step or sink",
}
OF_PIPELINES = {
    BEHIND: "a pipeline",
    WATERMARK: "an input",
    LATE: "a step",
    DROPPED: "a topic, or a gateway",
    FAILED: "a pipeline",
    STATUS_AGE: "a pipeline",
}
IN_SECONDS = {LAG_SECONDS, WATERMARK, STATUS_AGE}
A_MINUTE = {LATE, DROPPED, REFUSED, FAILED}
"""What is counted over the last minute; all else is as it is now."""
KNOWN = (*OF_THE_LOG, *OF_PIPELINES)
DEFAULT_HOLD_US = 10_000_000
_RULE = re.compile(
    r"(?P<what>[a-z]+"
    r" [a-z]+)\s*>\s*(?P<limit>.+?)(?:\s+of\s+(?P<of>\S+))?(?:\s+for\s+(?P<hold>.+))?",
    re.IGNORECASE,
)
_FORM = "write it as `lag rows > 10000 of billing`, with `of NAME` and `for DURATION` if you like."


@dataclass(frozen=True)
class Rule:
    """It fires when a value has been above the limit for as long as `hold_us`, and is over when it
    has not been for as long.
    """

    text: str
    what: str
    limit: float
    of: str | None = None
    hold_us: int = DEFAULT_HOLD_US

    def shown(self, value: float) -> str:
        return (
            format_us(round(value) * 1_000_000)
            if self.what in IN_SECONDS
            else f"{value:,.0f}{' a minute' if self.what in A_MINUTE else ''}"
        )


def parse(text: str) -> Rule:
    line = " ".join(text.split())
    found = _RULE.fullmatch(line)
    if found is None:
        raise InputError(f"The rule {line!r} cannot be read.", fix=_FORM)
    what = found["what"].lower()
    if what not in KNOWN:
        raise InputError(
            f"The rule {line!r} is about {what!r}: {nearest(what, KNOWN)}",
            fix=f"there is {', '.join(KNOWN)}.",
        )
    hold_us = (
        DEFAULT_HOLD_US if found["hold"] is None else to_us(found["hold"], what="time of a rule")
    )
    return Rule(line, what, _limit(what, found["limit"], line), found["of"], hold_us)


def _limit(what: str, text: str, line: str) -> float:
    number = text.replace(",", "").replace("_", "")
    if re.fullmatch(r"\d+(\.\d+)?", number):
        return float(number)
    if what in IN_SECONDS:
        try:
            return to_us(text, what="limit") / 1e6
        except BadDuration as error:
            raise InputError(
                f"The rule {line!r} has a limit that is no time: {error.message}", fix=error.fix
            ) from None
    raise InputError(f"The rule {line!r} has the limit {text!r}, which is no number.", fix=_FORM)


def read(file: Path) -> list[Rule]:
    """One rule a line; what follows # is for people."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"The rules in {file} cannot be read: {error}.",
            fix="name a text file with one rule a line.",
        ) from None
    return [parse(line) for each in lines if (line := each.partition("#")[0].strip())]


# What rules look at, now: groups' lag, dead letters and what gateways tell, from the log, and what
# runners leave in their state directories. A value for each thing, by its name.


MINUTE_S = 60.0
MAX_LOOKS = 10_000
Values = Mapping[str, Mapping[str, float]]
"""What -> of what -> how much."""


class Facts:
    def __init__(self, log: Log, states: Sequence[Path]) -> None:
        self._log, self._states = log, states
        self._gateways = Told(log)
        self._has_looked = False
        self._before: dict[tuple[str, str], deque[tuple[float, float]]] = {}

    def look(self, now_s: float | None = None) -> Values:
        now = time.time() if now_s is None else now_s
        values: dict[str, dict[str, float]] = {}
        for what, of, value in self._found(now):
            values.setdefault(what, {})[of] = (
                self._in_a_minute(what, of, value, now) if what in A_MINUTE else value
            )
        self._has_looked = True
        return values

    def _found(self, now_s: float) -> Iterator[tuple[str, str, float]]:
        for lag in self._log.lag():
            place = f"{lag.group}/{lag.topic}/{lag.partition}"
            yield LAG_ROWS, place, lag.rows
            yield LAG_SECONDS, place, lag.seconds if lag.rows else 0.0
        for topic in dead_letters.topics(self._log):
            yield DEAD, topic.of, topic.rows
        for name, told in self._gateways.read().items():
            yield DROPPED, f"gateway/{name}", told["dropped"] + told["lost"]
            yield REFUSED, f"gateway/{name}", told["refused"]
        for state in self._states:
            if (run := read_run(state)) is not None:
                yield from _of_run(run, now_s)

    def _in_a_minute(self, what: str, of: str, total: float, now_s: float) -> float:
        """How much more than a minute ago, or than at the first look; a total that begins anew, or
        appears later, is all new.
        """
        if (looks := self._before.get((what, of))) is None:
            looks = self._before[what, of] = deque(
                [(now_s, 0.0)] if self._has_looked else [], maxlen=MAX_LOOKS
            )
        if looks and total < looks[-1][1]:
            looks.clear()
            looks.append((now_s, 0.0))
        looks.append((now_s, total))
        while len(looks) > 1 and looks[1][0] <= now_s - MINUTE_S:
            looks.popleft()
        return total - looks[0][1]


def _of_run(run: dict[str, Any], now_s: float) -> Iterator[tuple[str, str, float]]:
    name = str(run["pipeline"])
    yield BEHIND, name, float(run.get("rows_behind", 0))
    yield FAILED, name, float(run.get("failures", 0))
    yield STATUS_AGE, name, now_s - float(run["updated"])
    for what, clock in run.get("watermarks", {}).items():
        if clock.get("watermark_us") is not None:
            yield WATERMARK, f"{name}/{what}", now_s - clock["watermark_us"] / 1e6
    for counted, count in run.get("counts", {}).items():
        of, _, what = counted.rpartition(".")
        if what in {"late", "shed"}:
            yield LATE if what == "late" else DROPPED, f"{name}/{of}", float(count)


# Whether a rule fires for a thing. It does not flap: a change must hold for the rule's time before
# it counts, in both directions.


@dataclass(frozen=True)
class Event:
    """A rule that begins to fire for a thing, or has ceased to."""

    rule: Rule
    of: str
    is_firing: bool
    value: float

    @property
    def text(self) -> str:
        return (
            f"{'FIRING' if self.is_firing else 'resolved'}: {self.rule.text}: {self.of} has"
            f" {self.rule.shown(self.value)}"
        )


def is_meant(rule: Rule, of: str) -> bool:
    """`billing` means all of billing's partitions, `billing/orders` those of one topic; `orders`
    also the input of any pipeline.
    """
    return (
        rule.of is None
        or of == rule.of
        or of.startswith(f"{rule.of}/")
        or of.endswith(f"/{rule.of}")
    )


class Standings:
    """All rules and things; `firing` is what fires now. What is not there any more does not exceed
    anything.
    """

    def __init__(self, rules: Sequence[Rule], firing: Mapping[tuple[str, str], int] = {}) -> None:
        self.rules = rules
        self.firing: dict[tuple[str, str], int] = dict(firing)
        """By the rule's text and the thing: since when, in microseconds since 1970."""
        self._turning: dict[tuple[str, str], int] = {}

    def update(self, values: Values, now_us: int) -> list[Event]:
        events = []
        for rule in self.rules:
            found = {
                of: value for of, value in values.get(rule.what, {}).items() if is_meant(rule, of)
            }
            gone = {of: 0.0 for text, of in self.firing if text == rule.text and of not in found}
            events += [
                event
                for of, value in (found | gone).items()
                if (event := self._turned(rule, of, value, now_us)) is not None
            ]
        return events

    def _turned(self, rule: Rule, of: str, value: float, now_us: int) -> Event | None:
        key, exceeds = (rule.text, of), value > rule.limit
        if exceeds == (key in self.firing):
            self._turning.pop(key, None)
            return None
        if now_us - self._turning.setdefault(key, now_us) < rule.hold_us:
            return None
        del self._turning[key]
        if exceeds:
            self.firing[key] = now_us
        else:
            del self.firing[key]
        return Event(rule, of, exceeds, value)


logger = logging.getLogger("headrace.watching")
PIPELINE = "watch"
"""What stands for the pipeline in messages."""


class Watching:
    """`name` tells one watch from another: what fires is remembered under it."""

    def __init__(
        self,
        log: Log,
        facts: Facts,
        rules: Sequence[Rule],
        *,
        name: str = "watch",
        to: Sequence[Way] = (),
    ) -> None:
        self.log, self.facts, self.name = log, facts, name
        self._note = f"watching.{name}"
        log.create_topic(TOPIC, SCHEMA, exist_ok=True)
        texts = {rule.text for rule in rules}
        stored = json.loads(log.note(self._note) or "[]")
        self.standings = Standings(
            rules, {(text, of): since_us for text, of, since_us in stored if text in texts}
        )
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
        shown = [
            json.dumps(
                {
                    "rule": each.rule.text,
                    "of": each.of,
                    "value": each.value,
                    "limit": each.rule.limit,
                }
            )
            for each in events
        ]
        fired = [text for text, each in zip(shown, events, strict=True) if each.is_firing]
        resolved = [text for text, each in zip(shown, events, strict=True) if not each.is_firing]
        message = message_of(
            self._id(events, now_us),
            PIPELINE,
            self.name,
            now_us,
            fired,
            resolved,
            len(self.standings.firing),
            is_silenced=False,
        )
        self._transaction = (
            self._transaction.next()
            if self._transaction is not None
            else self.log.transaction(self._note)
        )
        with self._transaction as tx:
            tx.append(TOPIC, [message.row()])
            tx.set_note(
                self._note,
                json.dumps([[*key, since_us] for key, since_us in self.standings.firing.items()]),
            )

    def _id(self, events: Sequence[Event], now_us: int) -> str:
        named = json.dumps(
            [now_us, *([each.rule.text, each.of, each.is_firing] for each in events)]
        )
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
