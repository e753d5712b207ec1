"""The partial matches of a key as of the last tick that was committed: for `headrace explain`, which shows people what a pattern waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from headrace.durations import from_us
from headrace.engine.state_files import GROUPS, StateFiles
from headrace.errors import InputError, PlanError, nearest
from headrace.log.api import Log
from headrace.operators.keys import encode_keys, key_groups
from headrace.operators.patterns.inspecting import partial
from headrace.operators.patterns.rules import RULES, from_bytes, in_force
from headrace.operators.patterns.settings import MatchSettings
from headrace.pipeline.explain import clocks_at, clocks_of
from headrace.pipeline.inspect import last_entry
from headrace.pipeline.patterns import MatchStep
from headrace.pipeline.plan import PipelinePlan
from headrace.pipeline.rules import RuledMatchStep


@dataclass(frozen=True)
class PartialMatch:
    """A beginning whose fate is open: the rows taken so far along the first way that is open, what may come next, and until when. `pattern`: its name, of several."""

    pattern: str
    rows: list[dict[str, Any]]
    waits_for: list[str]
    until_us: int | None


@dataclass(frozen=True)
class KeyMatches:
    """What there is of a key: its partial matches, and how many rows wait until they are certain to be in order."""

    step: str
    tick: int
    key: dict[str, Any]
    partial: list[PartialMatch]
    waiting_rows: int


def partial_matches(plan: PipelinePlan, log: Log, state: Path, step_name: str, key: Mapping[str, str]) -> KeyMatches:
    """Of a step with patterns; `key`: texts of the key's columns."""
    step = plan.step(step_name)
    if not isinstance(step, MatchStep):
        known = [each.name for each in plan.steps() if isinstance(each, MatchStep)]
        raise PlanError(f"The step {step_name!r} ({step.operation}) looks for no pattern: {nearest(step_name, known)}")
    values = _key_values(step, key)
    entry = last_entry(log, plan.name)
    encoded = encode_keys(pa.table({name: pa.array([value], step.plain_schema.field(name).type) for name, value in values.items()}), step.by)
    group = int(key_groups(encoded)[0])
    content = StateFiles(state / "steps" / step.name).load(range(GROUPS), dict(entry.states.get(step.name, {})))
    _, closed_us = clocks_of(plan, step, clocks_at(plan, log, state, entry), entry.tick)
    stored = content.get(group, {}).get(b"r" + encoded.cast(pa.binary())[0].as_py())
    found, waiting = partial(_settings(step, content.get(group, {}), group), step.schema, stored, closed_us)
    return KeyMatches(step.name, entry.tick, values, [PartialMatch(*each) for each in found], waiting)


def _settings(step: MatchStep, content: Mapping[bytes, bytes], group: int) -> MatchSettings:
    """What the kernel is told; the rules in force, if they come from a table."""
    if not isinstance(step, RuledMatchStep):
        return step.settings
    settings = step.rule_settings
    return in_force(settings, step.name.encode(), from_bytes(content.get(RULES + bytes([group])), settings))


def _key_values(step: MatchStep, key: Mapping[str, str]) -> dict[str, Any]:
    if set(key) != set(step.by):
        raise InputError(f"The step {step.name!r} goes by {', '.join(step.by)}, and {', '.join(key) or 'no key'} was given.", fix=f"give {' '.join(f'--key {name}=…' for name in step.by)}.")
    values = {}
    for name in step.by:
        kind = step.plain_schema.field(name).type
        try:
            values[name] = pa.array([key[name]]).cast(kind)[0].as_py()
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise InputError(f"{key[name]!r} is no {kind}, which {name!r} is.", fix="write it as the column has it.") from None
    return values


def told(found: KeyMatches) -> list[str]:
    """In sentences, for people."""
    key = ", ".join(f"{name}={value}" for name, value in found.key.items())
    lines = [f"{found.step} at tick {found.tick}, {key}: {len(found.partial):,} partial matches, {found.waiting_rows:,} rows wait for the clock."]
    for each in found.partial:
        taken = " ".join(str(row["classifier"]) for row in each.rows)
        name = f"{each.pattern}: " if each.pattern else ""
        until = "" if each.until_us is None else f" until {from_us(each.until_us).isoformat(sep=' ', timespec='milliseconds')}"
        lines.append(f"{name}has {taken} since {from_us(each.rows[0]['time_us']).isoformat(sep=' ', timespec='milliseconds')}, waits for {' or '.join(each.waits_for)}{until}.")
    return lines


def plain(found: KeyMatches) -> dict[str, Any]:
    """For programs."""
    return {**vars(found), "partial": [vars(each) for each in found.partial]}
