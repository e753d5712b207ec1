"""Looking at a pipeline's state from outside, by the ledger: which keys a step has, and whether the files are sound."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.engine.state_files import GROUPS, StateFiles
from headrace.errors import ConfigurationError, CorruptionError, nearest
from headrace.log.api import Log
from headrace.sinks.ledger import MAIN_QUERY, Ledger, LedgerEntry


@dataclass(frozen=True)
class StepStateInfo:
    step: str
    tick: int
    keys: int
    files: int
    bytes: int


def last_entry(log: Log, pipeline: str) -> LedgerEntry:
    known = [topic.removeprefix("__ledger.") for topic in log.topics() if topic.startswith("__ledger.")]
    entry = Ledger(log, pipeline).last(MAIN_QUERY) if pipeline in known else None
    if entry is None:
        raise ConfigurationError(f"No pipeline {pipeline!r} has run on this log: {nearest(pipeline, known)}")
    return entry


def step_states(log: Log, pipeline: str, state: Path) -> list[StepStateInfo]:
    entry = last_entry(log, pipeline)
    found = []
    for step, ids in sorted(entry.states.items()):
        files = StateFiles(state / "steps" / step)
        content = files.load(range(GROUPS), dict(ids))
        reached = set(files.reach([dict(ids)]))
        size = sum((files.directory / f"{name}.state").stat().st_size for name in reached)
        found.append(StepStateInfo(step, entry.tick, sum(map(len, content.values())), len(reached), size))
    return found


def damaged_files(log: Log, pipeline: str, state: Path) -> list[str]:
    """What is wrong with the files that the newest ledger entry leads to."""
    damage = []
    entry = last_entry(log, pipeline)
    for step, ids in sorted(entry.states.items()):
        files = StateFiles(state / "steps" / step)
        for group, name in sorted(ids.items()):
            try:
                for _ in files.chain(group, name):
                    continue
            except CorruptionError as error:
                damage.append(f"step {step}, key group {group}: {error.message}")
    return damage
