"""Explanations: why has this window not been emitted, and what does this pattern wait for?

`explain` describes a step that goes by time: its open windows, its watermark and horizon, the
producers that hold the watermark back, and what would release it. `partial_matches` describes the
partial matches of one key of a pattern. Both read the ledger and the state files, and do not
disturb a runner. `headrace explain` shows them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.columnar.keys import KEY_GROUPS, encode_keys, key_groups
from headrace.durations import format_us, from_us, to_time_us
from headrace.engine.ledger import LedgerEntry
from headrace.engine.state.files import StateFiles
from headrace.engine.ticks import TickJournal
from headrace.engine.watermarks import (
    InputWatermark,
    WatermarkState,
    batch_watermarks,
    read_watermarks,
)
from headrace.errors import InputError, PlanError, nearest
from headrace.log.api import Log
from headrace.operators.kernel import ENDED, UNSTARTED
from headrace.operators.patterns.kernel import partial_matches_of_key
from headrace.operators.patterns.rules import RULES, decode_rules, rule_match_settings
from headrace.operators.patterns.settings import MatchSettings
from headrace.operators.windows.specs import Sliding, WindowSpec
from headrace.operators.windows.state import EMITTED, WAITING, bounds_of
from headrace.plan.event_time import EventTime
from headrace.plan.match_steps import MatchStep, RuleMatchStep
from headrace.plan.plan import PipelinePlan, Step, TopicStep, watermark_paths, watermark_spec
from headrace.plan.window_steps import WindowStep
from headrace.runtime.state_inspector import last_entry

MAX_PRODUCERS = 5
_SECOND_US = 1_000_000


# Windows and other timed steps


@dataclass(frozen=True)
class SlowProducer:
    """A producer that keeps an input's watermark from reaching `needed_us`."""

    input: str
    producer: str
    newest_us: int
    silent_us: int
    needed_us: int
    given_up_us: int
    """The tick time at which silence releases what waits: the producer is no longer waited for, and
    if all are silent, the watermark has moved on with tick time.
    """
    is_partition: bool = False
    partition: int = -1
    offset: int = -1
    """Where its newest row is; -1 if that is not known."""


@dataclass(frozen=True)
class RowAhead:
    """A row whose event time is ahead of its append time: the one that an input's watermark was
    last moved by (`moved`), or of those that `max_ahead` kept from moving it, the furthest.
    """

    input: str
    producer: str
    event_us: int
    appended_us: int
    partition: int
    offset: int
    moved: bool
    max_ahead_us: int
    rows: int = 0
    """How many rows were ahead by more than `max_ahead`, since the pipeline began."""
    is_partition: bool = False


@dataclass(frozen=True)
class OpenWindow:
    """A window in the state: `waiting` to be emitted, or emitted and retained for corrections, in
    so many `groups`.

    Of sliding windows, of which there is one per row, a group has the first that waits and the last
    that is retained.
    """

    start_us: int
    end_us: int
    waiting: bool
    groups: int


@dataclass(frozen=True)
class Explanation:
    """What a step waits for, as of the last tick that was committed."""

    step: str
    tick: int
    tick_us: int
    watermark_us: int
    horizon_us: int
    windows: list[OpenWindow] = field(default_factory=list)
    held_by: list[SlowProducer] = field(default_factory=list)
    not_begun: list[str] = field(default_factory=list)
    """Inputs that have not had a row yet: they have no watermark."""
    idle: list[str] = field(default_factory=list)
    """Inputs that are not waited for: all their producers are idle, or they have had no row for
    longer than `idle`.
    """
    ahead: list[RowAhead] = field(default_factory=list)
    """Rows that moved a watermark ahead of the time at which they were appended, or tried to."""
    ended: bool = False
    """Whether event time has ended: see `headrace run --final`."""
    next_us: int | None = None
    """The next time that something waits for."""
    sliding: bool = False


def explain(
    plan: PipelinePlan, log: Log, state: Path, step_name: str, window: datetime | str | None = None
) -> Explanation:
    """Explain what a step that goes by time waits for.

    Args:
        plan: The plan of the pipeline, with the names under which state is stored.
        log: The log that the pipeline runs on.
        state: The pipeline's state directory.
        step_name: The name of the step.
        window: A time; only windows that contain it are explained.

    Returns:
        The explanation; `explanation_text` puts it into sentences.

    Raises:
        PlanError: The plan has no such step, or the step waits for nothing.

    Example:
        for line in explanation_text(explain(plan, log, state, "revenue.window")):
            print(line)

    """
    step = plan.step(step_name)
    if not step.keeps_state or not step.inputs:
        windows = [each.name for each in plan.steps() if isinstance(each, WindowStep)]
        raise PlanError(
            f"The step {step_name!r} ({step.operation}) waits for nothing.",
            fix=(
                f"name a step that goes by time; the plan has {', '.join(windows) or 'no windows'}."
            ),
        )
    entry = last_entry(log, plan.name)
    state_watermarks = watermarks_at(plan, log, state, entry)
    tick_us = state_watermarks.time_us
    watermark_us, horizon_us = watermarks_of(plan, step, state_watermarks, entry.tick)
    sliding = isinstance(step, WindowStep) and isinstance(step.window, Sliding)
    open_windows = _open_windows(step, state, entry) if isinstance(step, WindowStep) else []
    if window is not None:
        at_us = to_time_us(window) - sliding  # a sliding window has its end, and not its start
        open_windows = [each for each in open_windows if each.start_us <= at_us < each.end_us]
    # Another row may come at the very end of a sliding window.
    due_us = [each.end_us + sliding for each in open_windows if each.waiting]
    next_us = min(due_us, default=entry.due_us.get(step.name))
    slow, not_begun, idle = _slow_producers(plan, step, state_watermarks, next_us, tick_us)
    return Explanation(
        step=step.name,
        tick=entry.tick,
        tick_us=tick_us,
        watermark_us=watermark_us,
        horizon_us=horizon_us,
        windows=open_windows,
        held_by=slow,
        not_begun=not_begun,
        idle=idle,
        ahead=_rows_ahead(plan, step, state_watermarks, entry),
        ended=state_watermarks.is_ended,
        next_us=next_us,
        sliding=sliding,
    )


def watermarks_at(plan: PipelinePlan, log: Log, state: Path, entry: LedgerEntry) -> WatermarkState:
    """The watermarks of the inputs as of a ledger entry."""
    tick = TickJournal.open(log, plan.name).at(entry.tick)
    return replace(
        read_watermarks(state / "clocks", entry.watermarks),
        time_us=tick.time_us if tick else 0,
        is_ended=tick is not None and tick.is_ended,
    )


def watermarks_of(
    plan: PipelinePlan, step: Step, state: WatermarkState, tick: int
) -> tuple[int, int]:
    """The watermark and the horizon of a step's input as of a tick."""
    specs = [watermark_spec(source) for source in plan.inputs]
    watermarks, _ = batch_watermarks(specs, state, {}, [tick], [state.time_us])
    ports = watermarks.of_ports([watermark_paths(source) for source in step.inputs])
    return min(port.watermark_at_start for port in ports), min(
        port.horizon_at_start for port in ports
    )


def _open_windows(step: WindowStep, state: Path, entry: LedgerEntry) -> list[OpenWindow]:
    content = StateFiles(state / "steps" / step.name).load(
        range(KEY_GROUPS), dict(entry.states.get(step.name, {}))
    )
    counts: Counter[tuple[int, int, bool]] = Counter()
    for entries in content.values():
        for key in entries:
            if key[:1] in (WAITING, EMITTED):
                start_us, end_us = _bounds(step.window, key)
                counts[start_us, end_us, key[:1] == WAITING] += 1
    windows = [
        OpenWindow(start_us=start_us, end_us=end_us, waiting=waiting, groups=count)
        for (start_us, end_us, waiting), count in counts.items()
    ]
    return sorted(windows, key=lambda window: (window.end_us, window.start_us))


def _bounds(window: WindowSpec, key: bytes) -> tuple[int, int]:
    """The bounds of the window of a key. The keys of sliding windows are timers: for the moment
    after the first window that waits, and for when the last one is not needed any more.
    """
    start_us, end_us = bounds_of(key)
    if not isinstance(window, Sliding):
        return start_us, end_us
    last_us = end_us - 1 if key[:1] == WAITING else end_us - window.size_us
    return last_us - window.size_us, last_us


def _slow_producers(
    plan: PipelinePlan, step: Step, state: WatermarkState, next_us: int | None, tick_us: int
) -> tuple[list[SlowProducer], list[str], list[str]]:
    """The producers that keep the watermark from reaching the time that is waited for next, the
    inputs that have not begun, and those that are not waited for.
    """
    if next_us is None or state.is_ended:
        return [], [], []
    inputs = {source.name: source for source in plan.inputs}
    slow: list[SlowProducer] = []
    not_begun: list[str] = []
    idle: list[str] = []
    for path in (path for source in step.inputs for path in watermark_paths(source)):
        topic, watermark = inputs[path.name], state.inputs.get(path.name, InputWatermark())
        times = topic.event_time
        if not isinstance(times, EventTime) or watermark_spec(topic).follows_ticks:
            continue
        if not watermark.is_waited_for(watermark_spec(topic), state.time_us):
            idle.append(path.name)
            continue
        if not watermark.begun:
            not_begun.append(path.name)
            continue
        slow += _slow_producers_of(
            topic, times, watermark, next_us + path.watermark_lag_us, tick_us
        )
    return slow, not_begun, idle


def _slow_producers_of(
    topic: TopicStep, times: EventTime, watermark: InputWatermark, needed_us: int, tick_us: int
) -> list[SlowProducer]:
    spec = watermark_spec(topic)
    behind = np.flatnonzero(watermark.newest_us - times.delay_us < needed_us)
    slowest = behind[np.argsort(watermark.newest_us[behind], kind="stable")][:MAX_PRODUCERS]
    released_us = 0
    if len(behind) == len(watermark.newest_us):
        # When the last one is idle, the watermark goes on from the newest event time.
        missing_us = needed_us + times.delay_us - watermark.newest_ever_us
        released_us = watermark.heard_us + times.idle_us + max(0, missing_us)
    return [
        SlowProducer(
            input=topic.name,
            producer=spec.label(watermark.producers[int(index)].as_py()),
            newest_us=int(watermark.newest_us[index]),
            silent_us=tick_us - int(watermark.active_us[index]),
            needed_us=needed_us + times.delay_us,
            given_up_us=max(released_us, int(watermark.active_us[index]) + times.idle_us),
            is_partition=spec.producer is None,
            partition=int(watermark.sources[index, 2]),
            offset=int(watermark.sources[index, 3]),
        )
        for index in slowest
    ]


def _rows_ahead(
    plan: PipelinePlan, step: Step, state: WatermarkState, entry: LedgerEntry
) -> list[RowAhead]:
    """The rows ahead of their append times that moved the watermarks of a step's inputs, and those
    that were kept from it by `max_ahead`.
    """
    inputs = {source.name: source for source in plan.inputs}
    names = dict.fromkeys(path.name for source in step.inputs for path in watermark_paths(source))
    ahead = []
    for name in names:
        spec, watermark = watermark_spec(inputs[name]), state.inputs.get(name, InputWatermark())
        for source, moved in ((watermark.moved_by, True), (watermark.furthest, False)):
            if source is None or source.ahead_us < _SECOND_US:
                continue
            if moved and source.ahead_us > spec.max_ahead_us:
                continue  # it moved the watermark no further than others may
            ahead.append(
                RowAhead(
                    input=name,
                    producer=spec.label(source.producer),
                    event_us=source.event_us,
                    appended_us=source.appended_us,
                    partition=source.partition,
                    offset=source.offset,
                    moved=moved,
                    max_ahead_us=spec.max_ahead_us,
                    rows=entry.counts.get(f"{name}.ahead", 0),
                    is_partition=spec.producer is None,
                )
            )
    return ahead


def explanation_text(explanation: Explanation) -> list[str]:
    """An explanation in sentences, for people.

    Args:
        explanation: What `explain` returned.

    Returns:
        The sentences, one a line.

    Example:
        for line in explanation_text(explanation):
            print(line)

    """
    lines = [
        (
            f"{explanation.step} at tick {explanation.tick} ({time_text(explanation.tick_us)}):"
            f" watermark {time_text(explanation.watermark_us)}, horizon"
            f" {time_text(explanation.horizon_us)}."
        )
    ]
    waiting = [window for window in explanation.windows if window.waiting]
    retained = [window for window in explanation.windows if not window.waiting]
    if waiting:
        lines.append(
            f"{_waiting_text(waiting, explanation.sliding)} to be published, the first one ends at"
            f" {time_text(waiting[0].end_us)}."
        )
    if retained and explanation.sliding:
        lines.append(
            f"The rows of {sum(window.groups for window in retained):,} groups are kept for windows"
            " that are to come and for corrections."
        )
    elif retained:
        lines.append(
            "1 published window is kept for corrections."
            if len(retained) == 1
            else f"{len(retained):,} published windows are kept for corrections."
        )
    lines += [_row_ahead_text(row) for row in explanation.ahead]
    if explanation.ended:
        return [*lines, "Event time has ended with a final run: rows that come now are late."]
    if explanation.next_us is None:
        return [*lines, "Nothing waits for time."]
    lines += [
        f"The input {name} has not had a row yet, and has no time until then."
        for name in explanation.not_begun
    ]
    lines += [f"The input {name} is idle, and nobody waits for it." for name in explanation.idle]
    lines += [_slow_producer_text(producer) for producer in explanation.held_by]
    if not explanation.held_by and not explanation.not_begun:
        if explanation.idle and UNSTARTED < explanation.watermark_us < explanation.next_us:
            missing_us = explanation.next_us - explanation.watermark_us
            lines.append(
                "The watermark moves on with tick time from the newest event time, and is at"
                f" {time_text(explanation.next_us)} in {format_us(missing_us)}."
            )
        else:
            lines.append("Nobody holds it back: it is published with the next tick.")
    return lines


def _row_ahead_text(row: RowAhead) -> str:
    place = "" if row.partition < 0 else f" at partition {row.partition}, offset {row.offset}"
    whose = "" if row.is_partition else f" of the producer {row.producer}"
    ahead_us = (row.event_us - row.appended_us) // _SECOND_US * _SECOND_US
    about = (
        f"{place}{whose}, appended at {time_text(row.appended_us)} with the event time"
        f" {time_text(row.event_us)}, {format_us(ahead_us)} ahead"
    )
    if row.moved:
        return f"The watermark of {row.input} was moved by the row{about}."
    rows = "1 row" if row.rows == 1 else f"{row.rows:,} rows"
    return (
        f"{rows} of {row.input} claimed to be further ahead than max_ahead"
        f" ({format_us(row.max_ahead_us)}), and moved the watermark no further than that; the"
        f" furthest is the row{about}."
    )


def _waiting_text(waiting: list[OpenWindow], sliding: bool) -> str:
    if sliding:
        groups = sum(window.groups for window in waiting)
        return "Windows of 1 group wait" if groups == 1 else f"Windows of {groups:,} groups wait"
    return "1 window waits" if len(waiting) == 1 else f"{len(waiting):,} windows wait"


def _slow_producer_text(slow: SlowProducer) -> str:
    name = slow.producer if slow.is_partition else f"the producer {slow.producer}"
    return (
        f"{slow.input} waits for {name}: its newest row is of {time_text(slow.newest_us)}, it has"
        f" been silent for {format_us(max(0, slow.silent_us) // _SECOND_US * _SECOND_US)}. A row of"
        f" {time_text(slow.needed_us)} or later releases it, or silence until"
        f" {time_text(slow.given_up_us)}."
    )


def time_text(time_us: int) -> str:
    """A time in ISO format, or that there is none yet."""
    return (
        "no time yet"
        if time_us == UNSTARTED
        else "the end of time"
        if time_us >= ENDED // 2
        else from_us(time_us).isoformat(sep=" ", timespec="milliseconds")
    )


def explanation_plain(explanation: Explanation) -> dict[str, Any]:
    """An explanation as plain values, for programs. A watermark that has not begun is None."""
    plain = dict(vars(explanation))
    for name in ("watermark_us", "horizon_us"):
        if plain[name] == UNSTARTED or plain[name] >= ENDED // 2:
            plain[name] = None
    plain["windows"] = [vars(window) for window in explanation.windows]
    plain["held_by"] = [vars(producer) for producer in explanation.held_by]
    plain["ahead"] = [vars(row) for row in explanation.ahead]
    return plain


# Partial matches of patterns


@dataclass(frozen=True)
class PartialMatch:
    """A match that has begun: the rows so far along the first open path, what may come next, and
    until when.
    """

    pattern: str
    """The name of the pattern, if there are several."""
    rows: list[dict[str, Any]]
    waits_for: list[str]
    until_us: int | None


@dataclass(frozen=True)
class KeyMatches:
    """The partial matches of a key, and how many of its rows wait for the watermark, which makes
    their order certain.
    """

    step: str
    tick: int
    key: dict[str, Any]
    partial: list[PartialMatch]
    waiting_rows: int


def partial_matches(
    plan: PipelinePlan, log: Log, state: Path, step_name: str, key: Mapping[str, str]
) -> KeyMatches:
    """The partial matches of one key of a pattern.

    Args:
        plan: The plan of the pipeline, with the names under which state is stored.
        log: The log that the pipeline runs on.
        state: The pipeline's state directory.
        step_name: The name of the step with the pattern.
        key: Column -> value as text, for every column of the step's key.

    Returns:
        The partial matches as of the last tick that was committed.

    Raises:
        PlanError: The plan has no such step, or the step has no pattern.
        InputError: The key does not fit the step.

    Example:
        partial_matches(plan, log, state, "fraud.match", {"card": "4711"})

    """
    step = plan.step(step_name)
    if not isinstance(step, MatchStep):
        names = [each.name for each in plan.steps() if isinstance(each, MatchStep)]
        raise PlanError(
            f"The step {step_name!r} ({step.operation}) looks for no pattern:"
            f" {nearest(step_name, names)}"
        )
    values = _parse_key(step, key)
    entry = last_entry(log, plan.name)
    encoded = encode_keys(
        pa.table(
            {
                name: pa.array([value], step.plain_schema.field(name).type)
                for name, value in values.items()
            }
        ),
        step.by,
    )
    group = int(key_groups(encoded)[0])
    content = StateFiles(state / "steps" / step.name).load(
        range(KEY_GROUPS), dict(entry.states.get(step.name, {}))
    )
    _, horizon_us = watermarks_of(plan, step, watermarks_at(plan, log, state, entry), entry.tick)
    stored = content.get(group, {}).get(b"r" + encoded.cast(pa.binary())[0].as_py())
    matches, waiting = partial_matches_of_key(
        _settings(step, content.get(group, {}), group), step.schema, stored, horizon_us
    )
    return KeyMatches(
        step=step.name,
        tick=entry.tick,
        key=values,
        partial=[PartialMatch(*match) for match in matches],
        waiting_rows=waiting,
    )


def _settings(step: MatchStep, content: Mapping[bytes, bytes], group: int) -> MatchSettings:
    """The settings of the kernel; with the rules in force, if they come from a table."""
    if not isinstance(step, RuleMatchStep):
        return step.settings
    settings = step.rule_settings
    return rule_match_settings(
        settings, step.name.encode(), decode_rules(content.get(RULES + bytes([group])), settings)
    )


def _parse_key(step: MatchStep, key: Mapping[str, str]) -> dict[str, Any]:
    """The values of a key, of the columns' types."""
    if set(key) != set(step.by):
        raise InputError(
            f"The step {step.name!r} goes by {', '.join(step.by)}, and {', '.join(key) or 'no key'}"
            " was given.",
            fix=f"give {' '.join(f'--key {name}=…' for name in step.by)}.",
        )
    values = {}
    for name in step.by:
        kind = step.plain_schema.field(name).type
        try:
            values[name] = pa.array([key[name]]).cast(kind)[0].as_py()
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise InputError(
                f"{key[name]!r} is no {kind}, which {name!r} is.",
                fix="write it as the column has it.",
            ) from None
    return values


def partial_matches_text(matches: KeyMatches) -> list[str]:
    """Partial matches in sentences, for people."""
    key = ", ".join(f"{name}={value}" for name, value in matches.key.items())
    lines = [
        (
            f"{matches.step} at tick {matches.tick}, {key}: {len(matches.partial):,} partial"
            f" matches, {matches.waiting_rows:,} rows wait for the watermark."
        )
    ]
    for match in matches.partial:
        symbols = " ".join(str(row["classifier"]) for row in match.rows)
        name = f"{match.pattern}: " if match.pattern else ""
        until = "" if match.until_us is None else f" until {time_text(match.until_us)}"
        lines.append(
            f"{name}has {symbols} since {time_text(match.rows[0]['time_us'])},"
            f" waits for {' or '.join(match.waits_for)}{until}."
        )
    return lines


def partial_matches_plain(matches: KeyMatches) -> dict[str, Any]:
    """Partial matches as plain values, for programs."""
    return {**vars(matches), "partial": [vars(match) for match in matches.partial]}
