"""Why has this window not been published? What a step waits for: its open windows, its clocks, the
producers that hold them back, and what would release them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.columnar.keys import encode_keys, key_groups
from headrace.durations import format_us, from_us, to_time_us
from headrace.engine.ledger import LedgerEntry
from headrace.engine.state.files import GROUPS, StateFiles
from headrace.engine.ticks import TickJournal
from headrace.engine.watermarks import (
    InputWatermark,
    WatermarkState,
    batch_watermarks,
    read_watermarks,
)
from headrace.errors import InputError, PlanError, nearest
from headrace.log.api import Log
from headrace.operators.kernel import UNSTARTED
from headrace.operators.patterns.kernel import partial
from headrace.operators.patterns.rules import RULES, from_bytes, in_force
from headrace.operators.patterns.settings import MatchSettings
from headrace.operators.windows.specs import Sliding, WindowSpec
from headrace.operators.windows.state import TOLD, WAITING, bounds_of
from headrace.plan.event_time import EventTime
from headrace.plan.match_steps import MatchStep, RuledMatchStep
from headrace.plan.plan import PipelinePlan, Step, TopicStep, watermark_paths, watermark_spec
from headrace.plan.window_steps import WindowStep
from headrace.runtime.state_inspector import last_entry

MAX_PRODUCERS = 5
_SECOND_US = 1_000_000


@dataclass(frozen=True)
class Held:
    """A producer that keeps an input's clock from reaching `needed_us`."""

    input: str
    producer: str
    newest_us: int
    silent_us: int
    needed_us: int
    given_up_us: int
    """The time of the ticks at which it is no longer waited for, if it stays silent."""
    is_partition: bool = False


@dataclass(frozen=True)
class OpenWindow:
    """A window in the state: `waiting` to be told, or told and kept for corrections. `groups`: how
    many groups have it.

    Of sliding windows, of which there is one for each row, a group has the first that waits and the
    last that is kept.
    """

    start_us: int
    end_us: int
    waiting: bool
    groups: int


@dataclass(frozen=True)
class Explanation:
    """What there is to say about a step at the last tick that was committed."""

    step: str
    tick: int
    tick_us: int
    watermark_us: int
    horizon_us: int
    windows: list[OpenWindow] = field(default_factory=list)
    held_by: list[Held] = field(default_factory=list)
    not_begun: list[str] = field(default_factory=list)
    """Inputs that have not had a row yet: nothing that depends on them has a time."""
    next_us: int | None = None
    """The next time that something waits for."""
    sliding: bool = False


def explain(
    plan: PipelinePlan, log: Log, state: Path, step_name: str, window: datetime | str | None = None
) -> Explanation:
    """About a step that goes by time; with `window`, about the window that holds that time."""
    step = plan.step(step_name)
    if not step.keeps_state or not step.inputs:
        timed = (
            ", ".join(each.name for each in plan.steps() if isinstance(each, WindowStep))
            or "no windows"
        )
        raise PlanError(
            f"The step {step_name!r} ({step.operation}) waits for nothing.",
            fix=f"name a step that goes by time; the plan has {timed}.",
        )
    entry = last_entry(log, plan.name)
    watermarks = watermarks_at(plan, log, state, entry)
    tick_us = watermarks.time_us
    watermark_us, horizon_us = watermarks_of(plan, step, watermarks, entry.tick)
    sliding = isinstance(step, WindowStep) and isinstance(step.window, Sliding)
    windows = [
        each
        for each in _windows(step, state, entry)
        if window is None or _holds(each, window, sliding=sliding)
    ]
    waiting = [
        each.end_us + sliding for each in windows if each.waiting
    ]  # another row may come at the very end of a sliding one
    next_us = min(waiting, default=entry.due_us.get(step.name))
    held, not_begun = _held(plan, step, watermarks, next_us, tick_us)
    return Explanation(
        step.name,
        entry.tick,
        tick_us,
        watermark_us,
        horizon_us,
        windows,
        held,
        not_begun,
        next_us,
        sliding,
    )


def watermarks_at(plan: PipelinePlan, log: Log, state: Path, entry: LedgerEntry) -> WatermarkState:
    """The inputs' clocks as an entry of the ledger left them."""
    tick = TickJournal(log, plan.name).at(entry.tick)
    return WatermarkState(
        read_watermarks(state / "clocks", entry.watermarks).inputs, tick.time_us if tick else 0
    )


def watermarks_of(
    plan: PipelinePlan, step: Step, watermarks: WatermarkState, tick: int
) -> tuple[int, int]:
    """The step's input clocks as of the last tick."""
    found, _ = batch_watermarks(
        [watermark_spec(each) for each in plan.inputs], watermarks, {}, [tick], [watermarks.time_us]
    )
    paths = [path for given in step.inputs for path in watermark_paths(given)]
    of_step = found.of(paths)
    return of_step.watermark_at_start, of_step.horizon_at_start


def _windows(step: Step, state: Path, entry: LedgerEntry) -> list[OpenWindow]:
    if not isinstance(step, WindowStep):
        return []
    content = StateFiles(state / "steps" / step.name).load(
        range(GROUPS), dict(entry.states.get(step.name, {}))
    )
    names = [name for group in content.values() for name in group if name[:1] in (WAITING, TOLD)]
    found = Counter((*_bounds(step.window, name), name[:1] == WAITING) for name in names)
    return sorted(
        (OpenWindow(start, end, waiting, count) for (start, end, waiting), count in found.items()),
        key=lambda each: (each.end_us, each.start_us),
    )


def _bounds(window: WindowSpec, name: bytes) -> tuple[int, int]:
    """Of sliding windows entries are timers: of the moment behind the first that waits, and of when
    the last is not needed any more.
    """
    start_us, end_us = bounds_of(name)
    if not isinstance(window, Sliding):
        return start_us, end_us
    last_us = end_us - 1 if name[:1] == WAITING else end_us - window.size_us
    return last_us - window.size_us, last_us


def _holds(window: OpenWindow, at: datetime | str, *, sliding: bool) -> bool:
    """A sliding window has its end, and not its start."""
    at_us = to_time_us(at) - sliding
    return window.start_us <= at_us < window.end_us


def _held(
    plan: PipelinePlan, step: Step, watermarks: WatermarkState, next_us: int | None, tick_us: int
) -> tuple[list[Held], list[str]]:
    """Who keeps the clocks from reaching the next time that is waited for."""
    if next_us is None:
        return [], []
    inputs = {each.name: each for each in plan.inputs}
    held: list[Held] = []
    not_begun: list[str] = []
    for path in (path for given in step.inputs for path in watermark_paths(given)):
        topic, clock = inputs[path.name], watermarks.inputs.get(path.name, InputWatermark())
        if not isinstance(topic.event_time, EventTime) or watermark_spec(topic).follows_ticks:
            continue
        if not clock.begun:
            not_begun.append(path.name)
            continue
        held += _producers(topic, topic.event_time, clock, next_us + path.complete_back_us, tick_us)
    return held, not_begun


def _producers(
    topic: TopicStep, times: EventTime, clock: InputWatermark, needed_us: int, tick_us: int
) -> list[Held]:
    spec = watermark_spec(topic)
    behind = np.flatnonzero(clock.newest_us - times.delay_us < needed_us)
    slowest = behind[np.argsort(clock.newest_us[behind], kind="stable")][:MAX_PRODUCERS]
    return [
        Held(
            topic.name,
            spec.label(clock.producers[int(at)].as_py()),
            int(clock.newest_us[at]),
            tick_us - int(clock.active_us[at]),
            needed_us + times.delay_us,
            int(clock.active_us[at]) + times.idle_us,
            spec.producer is None,
        )
        for at in slowest
    ]


def explanation_text(explanation: Explanation) -> list[str]:
    """In sentences, for people."""
    watermarks = (
        f"complete up to {time_text(explanation.watermark_us)}, closed up to"
        f" {time_text(explanation.horizon_us)}"
    )
    lines = [
        f"{explanation.step} at tick {explanation.tick} ({time_text(explanation.tick_us)}):"  # noqa: ISC004
        f" {watermarks}."
    ]
    waiting, kept = (
        [each for each in explanation.windows if each.waiting is which] for which in (True, False)
    )
    if waiting:
        lines.append(
            f"{_many(waiting, explanation.sliding)} to be published, the first one ends at"
            f" {time_text(waiting[0].end_us)}."
        )
    if kept and explanation.sliding:
        lines.append(
            f"The rows of {sum(each.groups for each in kept):,} groups are kept for windows that"
            " are to come and for corrections."
        )
    elif kept:
        lines.append(
            "1 published window is kept for corrections."
            if len(kept) == 1
            else f"{len(kept):,} published windows are kept for corrections."
        )
    if explanation.next_us is None:
        return [*lines, "Nothing waits for time."]
    lines += [
        f"The input {name} has not had a row yet, and has no time until then."
        for name in explanation.not_begun
    ]
    lines += [_held_text(each) for each in explanation.held_by]
    if not explanation.held_by and not explanation.not_begun:
        lines.append("Nobody holds it back: it is told with the next tick.")
    return lines


def _many(waiting: list[OpenWindow], sliding: bool) -> str:
    if sliding:
        groups = sum(each.groups for each in waiting)
        return "Windows of 1 group wait" if groups == 1 else f"Windows of {groups:,} groups wait"
    return "1 window waits" if len(waiting) == 1 else f"{len(waiting):,} windows wait"


def _held_text(held: Held) -> str:
    who = held.producer if held.is_partition else f"the producer {held.producer}"
    return (
        f"{held.input} waits for {who}: its newest row is of {time_text(held.newest_us)}, it has"
        f" been silent for {format_us(max(0, held.silent_us) // _SECOND_US * _SECOND_US)}. A row of"
        f" {time_text(held.needed_us)} or later releases it, or silence until"
        f" {time_text(held.given_up_us)}."
    )


def time_text(time_us: int) -> str:
    return (
        "no time yet"
        if time_us == UNSTARTED
        else from_us(time_us).isoformat(sep=" ", timespec="milliseconds")
    )


def explanation_plain(explanation: Explanation) -> dict[str, Any]:
    """For programs."""
    about = {
        name: value
        for name, value in vars(explanation).items()
        if name not in {"windows", "held_by"}
    }
    about |= {
        name: None if about[name] == UNSTARTED else about[name]
        for name in ("watermark_us", "horizon_us")
    }
    return {
        **about,
        "windows": [vars(each) for each in explanation.windows],
        "held_by": [vars(each) for each in explanation.held_by],
    }


# The partial matches of a key as of the last tick that was committed: for `headrace explain`, which
# shows people what a pattern waits for.


@dataclass(frozen=True)
class PartialMatch:
    """A beginning whose fate is open: the rows taken so far along the first way that is open, what
    may come next, and until when. `pattern`: its name, of several.
    """

    pattern: str
    rows: list[dict[str, Any]]
    waits_for: list[str]
    until_us: int | None


@dataclass(frozen=True)
class KeyMatches:
    """What there is of a key: its partial matches, and how many rows wait until they are certain to
    be in order.
    """

    step: str
    tick: int
    key: dict[str, Any]
    partial: list[PartialMatch]
    waiting_rows: int


def partial_matches(
    plan: PipelinePlan, log: Log, state: Path, step_name: str, key: Mapping[str, str]
) -> KeyMatches:
    """Of a step with patterns; `key`: texts of the key's columns."""
    step = plan.step(step_name)
    if not isinstance(step, MatchStep):
        known = [each.name for each in plan.steps() if isinstance(each, MatchStep)]
        raise PlanError(
            f"The step {step_name!r} ({step.operation}) looks for no pattern:"
            f" {nearest(step_name, known)}"
        )
    values = _key_values(step, key)
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
        range(GROUPS), dict(entry.states.get(step.name, {}))
    )
    _, horizon_us = watermarks_of(plan, step, watermarks_at(plan, log, state, entry), entry.tick)
    stored = content.get(group, {}).get(b"r" + encoded.cast(pa.binary())[0].as_py())
    found, waiting = partial(
        _settings(step, content.get(group, {}), group), step.schema, stored, horizon_us
    )
    return KeyMatches(
        step.name, entry.tick, values, [PartialMatch(*each) for each in found], waiting
    )


def _settings(step: MatchStep, content: Mapping[bytes, bytes], group: int) -> MatchSettings:
    """What the kernel is told; the rules in force, if they come from a table."""
    if not isinstance(step, RuledMatchStep):
        return step.settings
    settings = step.rule_settings
    return in_force(
        settings, step.name.encode(), from_bytes(content.get(RULES + bytes([group])), settings)
    )


def _key_values(step: MatchStep, key: Mapping[str, str]) -> dict[str, Any]:
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


def partial_matches_text(found: KeyMatches) -> list[str]:
    """In sentences, for people."""
    key = ", ".join(f"{name}={value}" for name, value in found.key.items())
    lines = [
        f"{found.step} at tick {found.tick}, {key}: {len(found.partial):,} partial matches,"  # noqa: ISC004
        f" {found.waiting_rows:,} rows wait for the clock."
    ]
    for each in found.partial:
        taken = " ".join(str(row["classifier"]) for row in each.rows)
        name = f"{each.pattern}: " if each.pattern else ""
        until = (
            ""
            if each.until_us is None
            else f" until {from_us(each.until_us).isoformat(sep=' ', timespec='milliseconds')}"
        )
        lines.append(
            f"{name}has {taken} since"
            f" {from_us(each.rows[0]['time_us']).isoformat(sep=' ', timespec='milliseconds')},"
            f" waits for {' or '.join(each.waits_for)}{until}."
        )
    return lines


def partial_matches_plain(found: KeyMatches) -> dict[str, Any]:
    """For programs."""
    return {**vars(found), "partial": [vars(each) for each in found.partial]}
