"""`headrace watch`: rules over the log and the status of pipelines, which fire and resolve as
alerts.

A rule is one line, such as `lag rows > 10000 of billing` or `watermark age > 5 minutes of orders
for 30 seconds`. In the order in which data flows:

    WatchRule      a parsed rule
    Measurements   the current values: consumer lag, dead letters, gateways, captures, pipelines
    RuleStates     which rules fire for which subjects; a change must hold for a while
    Watcher        the loop: measure, update the states, record changes in the topic `alerts`

Changes are recorded in one transaction with what fires now, so a watcher that is restarted sends
nothing twice. Alerts of a pipeline's own rows are in `decision.py`.
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
from threading import Event, Thread
from typing import Any

from headrace.alerts.alert import SCHEMA, TOPIC, Alert, AlertReceiver, make_message
from headrace.alerts.delivery import AlertSender
from headrace.durations import format_us, to_us
from headrace.errors import BadDuration, ConfigurationError, InputError, RetryError, nearest
from headrace.gateways.metrics import GatewayReports
from headrace.log import dead_letters
from headrace.log.api import Log, Transaction
from headrace.log.capture_reports import read_capture_reports
from headrace.run_status import read_plan, read_status_fields

# Rules


LAG_ROWS = "lag rows"
LAG_SECONDS = "lag seconds"
BEHIND = "behind rows"
WATERMARK = "watermark age"
LATE = "late rows"
DROPPED = "dropped rows"
REFUSED = "refused rows"
FAILED = "failed batches"
DEAD = "dead letters"
CAPTURE_BYTES = "capture bytes"
CAPTURE_SECONDS = "capture seconds"
RETAINED_BYTES = "retained bytes"
STOPPED_TABLES = "stopped tables"
SNAPSHOT_ROWS = "snapshot rows"
CAPTURE_AGE = "capture age"
STATUS_AGE = "status age"
VIEW_AGE = "view age"
LOG_MEASURES = {
    LAG_ROWS: "a group",
    LAG_SECONDS: "a group",
    REFUSED: "a gateway",
    CAPTURE_BYTES: "a capture",
    CAPTURE_SECONDS: "a capture",
    RETAINED_BYTES: "a capture",
    STOPPED_TABLES: "a capture",
    SNAPSHOT_ROWS: "a capture",
    CAPTURE_AGE: "a capture",
    DEAD: "a topic, step or sink",
}
"""What is measured in the log, and the kind of its subjects."""
PIPELINE_MEASURES = {
    BEHIND: "a pipeline",
    WATERMARK: "an input",
    LATE: "a step",
    DROPPED: "a topic, or a gateway",
    FAILED: "a pipeline",
    STATUS_AGE: "a pipeline",
    VIEW_AGE: "a view",
}
"""What is measured in the state directories of pipelines, and the kind of its subjects."""
IN_SECONDS = {LAG_SECONDS, CAPTURE_SECONDS, CAPTURE_AGE, WATERMARK, STATUS_AGE, VIEW_AGE}
_OF_CAPTURES = {
    CAPTURE_BYTES,
    CAPTURE_SECONDS,
    RETAINED_BYTES,
    STOPPED_TABLES,
    SNAPSHOT_ROWS,
    CAPTURE_AGE,
}
PER_MINUTE = {LATE, DROPPED, REFUSED, FAILED}
"""What is counted over the last minute; everything else is the current value."""
MEASURES = (*LOG_MEASURES, *PIPELINE_MEASURES)
DEFAULT_HOLD_US = 10_000_000
_RULE = re.compile(
    r"(?P<what>[a-z]+"
    r" [a-z]+)\s*>\s*(?P<limit>.+?)(?:\s+of\s+(?P<of>\S+))?(?:\s+for\s+(?P<hold>.+))?",
    re.IGNORECASE,
)
_FORM = "write it as `lag rows > 10000 of billing`, with `of NAME` and `for DURATION` if you like."


@dataclass(frozen=True)
class WatchRule:
    """A rule fires once a measure of a subject has exceeded `limit` for `hold_us`, and resolves
    once it has not exceeded it for as long.
    """

    text: str
    measure: str
    limit: float
    subject: str | None = None
    hold_us: int = DEFAULT_HOLD_US

    def format_value(self, value: float) -> str:
        if self.measure in IN_SECONDS:
            return format_us(round(value) * 1_000_000)
        return f"{value:,.0f}{' a minute' if self.measure in PER_MINUTE else ''}"

    def applies_to(self, subject: str) -> bool:
        """Whether the rule covers a subject: `billing` covers all partitions of the group billing,
        `billing/orders` those of one topic, and `orders` also the input of any pipeline.
        """
        return (
            self.subject is None
            or subject == self.subject
            or subject.startswith(f"{self.subject}/")
            or subject.endswith(f"/{self.subject}")
        )


def parse_rule(text: str) -> WatchRule:
    """The rule that a line says. InputError if it cannot be read."""
    line = " ".join(text.split())
    match = _RULE.fullmatch(line)
    if match is None:
        raise InputError(f"The rule {line!r} cannot be read.", fix=_FORM)
    measure = match["what"].lower()
    if measure not in MEASURES:
        raise InputError(
            f"The rule {line!r} is about {measure!r}: {nearest(measure, MEASURES)}",
            fix=f"choose one of {', '.join(MEASURES)}.",
        )
    hold_us = DEFAULT_HOLD_US
    if match["hold"] is not None:
        hold_us = to_us(match["hold"], what="time of a rule")
    return WatchRule(
        text=line,
        measure=measure,
        limit=_parse_limit(measure, match["limit"], line),
        subject=match["of"],
        hold_us=hold_us,
    )


def _parse_limit(measure: str, text: str, line: str) -> float:
    number = text.replace(",", "").replace("_", "")
    if re.fullmatch(r"\d+(\.\d+)?", number):
        return float(number)
    if measure in IN_SECONDS:
        try:
            return to_us(text, what="limit") / 1e6
        except BadDuration as error:
            raise InputError(
                f"The rule {line!r} has a limit that is no time: {error.message}", fix=error.fix
            ) from None
    raise InputError(f"The rule {line!r} has the limit {text!r}, which is no number.", fix=_FORM)


def read_rules(file: Path) -> list[WatchRule]:
    """The rules of a text file: one a line, with comments after #."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"The rules in {file} cannot be read: {error}.",
            fix="name a text file with one rule a line.",
        ) from None
    rules = (line.partition("#")[0].strip() for line in lines)
    return [parse_rule(rule) for rule in rules if rule]


# Measurements


MINUTE_S = 60.0
MAX_SAMPLES = 10_000
Values = Mapping[str, Mapping[str, float]]
"""Measure -> subject -> value."""


class Measurements:
    """Measures the log and the pipelines of some state directories."""

    def __init__(self, log: Log, states: Sequence[Path]) -> None:
        self._log = log
        self._states = states
        self._gateways = GatewayReports(log)
        self._has_measured = False
        self._samples: dict[tuple[str, str], deque[tuple[float, float]]] = {}

    def measure(self, now_s: float | None = None) -> Values:
        """The current value of every measure, by subject."""
        now = time.time() if now_s is None else now_s
        values: dict[str, dict[str, float]] = {}
        for measure, subject, value in self._read(now):
            values.setdefault(measure, {})[subject] = (
                self._last_minute(measure, subject, value, now) if measure in PER_MINUTE else value
            )
        self._has_measured = True
        return values

    def check_subjects(self, rules: Sequence[WatchRule]) -> None:
        """Check that there is what each rule is about. Raises InputError: a rule about a misspelt
        name would never fire.
        """
        for rule in rules:
            if rule.subject is None:
                continue
            known = sorted(set(self._subjects(rule.measure)))
            if any(rule.applies_to(subject) for subject in known):
                continue
            needs_state = rule.measure in PIPELINE_MEASURES or rule.measure == DEAD
            fix = "correct the name, or leave out `of`."
            if needs_state and not self._states:
                fix = (
                    "correct the name; or name the state directory of the pipeline that has it:"
                    " --state shop.state."
                )
            kind = {**LOG_MEASURES, **PIPELINE_MEASURES}[rule.measure]
            names = dict.fromkeys(name for subject in known for name in subject.split("/"))
            raise InputError(
                f"The rule {rule.text!r} is about {rule.subject!r}, and {kind} of that name does"
                f" not exist: {nearest(rule.subject, names)}",
                fix=fix,
            )

    def _subjects(self, measure: str) -> Iterator[str]:
        """What a rule of a measure can be about, also if it has no value yet."""
        if measure in {LAG_ROWS, LAG_SECONDS}:
            yield from self._log.groups()
            for lag in self._log.lag():
                yield f"{lag.group}/{lag.topic}/{lag.partition}"
        if measure in {DROPPED, REFUSED}:
            yield from (f"gateway/{name}" for name in self._gateways.read())
        if measure in _OF_CAPTURES:
            yield from (f"capture/{name}" for name in read_capture_reports(self._log))
        if measure == DEAD:
            yield from self._log.topics()
            yield from (topic.of for topic in dead_letters.dead_topics(self._log))
        if measure in PIPELINE_MEASURES or measure == DEAD:
            for state in self._states:
                yield from _subjects_of_pipeline(state, measure)

    def _read(self, now_s: float) -> Iterator[tuple[str, str, float]]:
        for lag in self._log.lag():
            subject = f"{lag.group}/{lag.topic}/{lag.partition}"
            yield LAG_ROWS, subject, lag.rows
            yield LAG_SECONDS, subject, lag.seconds if lag.rows else 0.0
        for topic in dead_letters.dead_topics(self._log):
            yield DEAD, topic.of, topic.rows
        for name, counts in self._gateways.read().items():
            yield DROPPED, f"gateway/{name}", counts["dropped"] + counts["lost"]
            yield REFUSED, f"gateway/{name}", counts["refused"]
        for name, report in read_capture_reports(self._log).items():
            yield from _read_capture(f"capture/{name}", report, now_s)
        for state in self._states:
            if (status := read_status_fields(state)) is not None:
                yield from _read_pipeline(status, now_s)

    def _last_minute(self, measure: str, subject: str, total: float, now_s: float) -> float:
        """How much a total grew in the last minute, or since the first measurement. A total that
        restarts, or that appears after the first measurement, counts from zero.
        """
        if (samples := self._samples.get((measure, subject))) is None:
            start = [(now_s, 0.0)] if self._has_measured else []
            samples = self._samples[measure, subject] = deque(start, maxlen=MAX_SAMPLES)
        if samples and total < samples[-1][1]:
            samples.clear()
            samples.append((now_s, 0.0))
        samples.append((now_s, total))
        while len(samples) > 1 and samples[1][0] <= now_s - MINUTE_S:
            samples.popleft()
        return total - samples[0][1]


def _subjects_of_pipeline(state: Path, measure: str) -> Iterator[str]:
    """A pipeline, and its inputs, steps and sinks, or its views."""
    plan = read_plan(state) or {}
    pipeline = (read_status_fields(state) or plan).get("pipeline")
    if pipeline is None:
        return
    yield str(pipeline)
    if measure in {BEHIND, FAILED, STATUS_AGE}:
        return
    for node in plan.get("nodes", ()):
        if (node["kind"] == "view") == (measure == VIEW_AGE):
            name = str(node["id"]).rpartition(" ")[2]
            yield name if measure == DEAD else f"{pipeline}/{name}"


def _read_capture(
    subject: str, report: Mapping[str, Any], now_s: float
) -> Iterator[tuple[str, str, float]]:
    """What a capture last reported."""
    yield CAPTURE_BYTES, subject, float(report["behind_bytes"] or 0)
    yield CAPTURE_SECONDS, subject, float(report["lag_seconds"] or 0.0)
    yield RETAINED_BYTES, subject, float(report["retained_bytes"] or 0)
    yield STOPPED_TABLES, subject, float(len(report["stopped"]))
    yield SNAPSHOT_ROWS, subject, float(max(0, report["snapshot_about"] - report["snapshot_rows"]))
    yield CAPTURE_AGE, subject, now_s - report["at"]


def _read_pipeline(status: dict[str, Any], now_s: float) -> Iterator[tuple[str, str, float]]:
    pipeline = str(status["pipeline"])
    yield BEHIND, pipeline, float(status.get("rows_behind", 0))
    yield FAILED, pipeline, float(status.get("failures", 0))
    yield STATUS_AGE, pipeline, now_s - float(status["updated"])
    for name, watermark in status.get("watermarks", {}).items():
        if watermark.get("watermark_us") is not None and not watermark.get("ended"):
            yield WATERMARK, f"{pipeline}/{name}", now_s - watermark["watermark_us"] / 1e6
    for name, freshness in status.get("views", {}).items():
        if freshness.get("newest") is not None:
            yield VIEW_AGE, f"{pipeline}/{name}", now_s - freshness["newest"]
    for counter, count in status.get("counts", {}).items():
        name, _, kind = counter.rpartition(".")
        if kind in {"late", "shed"}:
            yield LATE if kind == "late" else DROPPED, f"{pipeline}/{name}", float(count)


# States of rules


@dataclass(frozen=True)
class RuleEvent:
    """A rule begins to fire for a subject, or resolves."""

    rule: WatchRule
    subject: str
    is_firing: bool
    value: float

    @property
    def text(self) -> str:
        return (
            f"{'FIRING' if self.is_firing else 'resolved'}: {self.rule.text}: {self.subject} has"
            f" {self.rule.format_value(self.value)}"
        )


class RuleStates:
    """Which rules fire for which subjects. States do not flap: a change counts only once it has
    held for the rule's time. A subject that has disappeared has the value 0.
    """

    def __init__(
        self, rules: Sequence[WatchRule], firing: Mapping[tuple[str, str], int] = {}
    ) -> None:
        self.rules = rules
        self.firing: dict[tuple[str, str], int] = dict(firing)
        """By the rule's text and the subject: since when, in microseconds since 1970."""
        self._pending: dict[tuple[str, str], int] = {}

    def update(self, values: Values, now_us: int) -> list[RuleEvent]:
        """Update all states, and return the changes."""
        events = []
        for rule in self.rules:
            measured = values.get(rule.measure, {})
            subjects = {name: value for name, value in measured.items() if rule.applies_to(name)}
            for text, subject in self.firing:
                if text == rule.text:
                    subjects.setdefault(subject, 0.0)  # it has disappeared
            for subject, value in subjects.items():
                event = self._update_subject(rule, subject, value, now_us)
                if event is not None:
                    events.append(event)
        return events

    def _update_subject(
        self, rule: WatchRule, subject: str, value: float, now_us: int
    ) -> RuleEvent | None:
        key, exceeds = (rule.text, subject), value > rule.limit
        if exceeds == (key in self.firing):
            self._pending.pop(key, None)
            return None
        if now_us - self._pending.setdefault(key, now_us) < rule.hold_us:
            return None
        del self._pending[key]
        if exceeds:
            self.firing[key] = now_us
        else:
            del self.firing[key]
        return RuleEvent(rule, subject, exceeds, value)


# The loop


logger = logging.getLogger("headrace.watching")
PIPELINE = "watch"
"""The name in place of a pipeline's in messages."""


def note_name(watcher: str) -> str:
    """The note in which a watcher stores which rules are firing."""
    return f"watching.{watcher}"


class Watcher:
    """Checks rules in a loop. What fires is stored in the log under `name`, which tells one watcher
    from another.
    """

    def __init__(
        self,
        log: Log,
        measurements: Measurements,
        states: RuleStates,
        *,
        name: str,
        senders: Sequence[AlertSender],
    ) -> None:
        self.log = log
        self.measurements = measurements
        self.states = states
        self.name = name
        self._note = note_name(name)
        self._senders = senders
        self._transaction: Transaction | None = None

    @classmethod
    def open(
        cls,
        log: Log,
        measurements: Measurements,
        rules: Sequence[WatchRule],
        *,
        name: str = "watch",
        to: Sequence[AlertReceiver] = (),
    ) -> Watcher:
        """Create the topic of alerts if it is missing, and read which rules were firing."""
        log.create_topic(TOPIC, SCHEMA, exist_ok=True)
        texts = {rule.text for rule in rules}
        stored = json.loads(log.note(note_name(name)) or "[]")
        firing = {(text, of): since_us for text, of, since_us in stored if text in texts}
        alert = Alert(name, TOPIC, tuple(to))
        senders = [AlertSender.open(log, PIPELINE, alert, receiver) for receiver in to]
        return cls(log, measurements, RuleStates(rules, firing), name=name, senders=senders)

    def check(self, now_us: int) -> list[RuleEvent]:
        """Measure once, record what has changed, and return it."""
        values = self.measurements.measure(now_us / 1e6)
        before = dict(self.states.firing)
        events = self.states.update(values, now_us)
        if events:
            try:
                self._record(events, now_us)
            except BaseException:
                self.states.firing = before  # nothing was recorded: the next check decides again
                raise
        return events

    def _record(self, events: Sequence[RuleEvent], now_us: int) -> None:
        fired: list[str] = []
        resolved: list[str] = []
        for event in events:
            row = {
                "rule": event.rule.text,
                "of": event.subject,
                "value": event.value,
                "limit": event.rule.limit,
            }
            (fired if event.is_firing else resolved).append(json.dumps(row))
        identity = [now_us, *([each.rule.text, each.subject, each.is_firing] for each in events)]
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]
        message = make_message(
            id=f"{self.name}-{digest}",
            pipeline=PIPELINE,
            alert=self.name,
            at_us=now_us,
            fired=fired,
            resolved=resolved,
            active=len(self.states.firing),
            is_silenced=False,
        )
        firing = [[*key, since_us] for key, since_us in self.states.firing.items()]
        self._transaction = (
            self._transaction.next()
            if self._transaction is not None
            else self.log.transaction(self._note)
        )
        with self._transaction as tx:
            tx.append(TOPIC, [message.row()])
            tx.set_note(self._note, json.dumps(firing))

    def run(self, stop: Event, every_s: float, on_event: Callable[[RuleEvent], None]) -> None:
        """Check every `every_s` seconds until `stop` is set, while a thread per receiver sends."""
        threads = [Thread(target=sender.run, args=(stop,), daemon=True) for sender in self._senders]
        for thread in threads:
            thread.start()
        try:
            while not stop.is_set():
                try:
                    for event in self.check(time.time_ns() // 1_000):
                        on_event(event)
                except RetryError as error:
                    logger.warning("The rules cannot be checked now: %s", error)
                stop.wait(every_s)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
