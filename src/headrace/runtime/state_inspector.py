"""Looking at a pipeline's state from outside, by the ledger: which keys a step has, what is kept
for them, and whether the files are sound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from headrace.columnar.keys import encode_keys, key_groups
from headrace.engine.ledger import MAIN_QUERY, Ledger, LedgerEntry
from headrace.engine.state.files import GROUPS, StateFile, StateFiles, StateIds
from headrace.errors import ConfigurationError, CorruptionError, InputError, nearest
from headrace.log.api import Log
from headrace.operators.kernel import Describing
from headrace.plan.plan import PipelinePlan
from headrace.runtime.arrangement import Arrangement, note_name

_LONGEST_KEY = 400


@dataclass(frozen=True)
class StepStateInfo:
    step: str
    tick: int
    keys: int
    files: int
    bytes: int


@dataclass(frozen=True)
class StepState:
    """A step's state files as of the newest ledger entry that speaks of it."""

    step: str
    tick: int
    ids: StateIds
    files: StateFiles

    def entries(self, group: int) -> tuple[list[bytes], list[bytes]]:
        found = self.files.load([group], self.ids)[group]
        return list(found), list(found.values())


def entries(log: Log, pipeline: str) -> list[LedgerEntry]:
    """The newest entry of each query, the main one first."""
    known = [
        topic.removeprefix("__ledger.") for topic in log.topics() if topic.startswith("__ledger.")
    ]
    ledger = Ledger(log, pipeline) if pipeline in known else None
    queries = [
        MAIN_QUERY,
        *(
            name
            for name in Arrangement.from_json(log.note(note_name(pipeline))).queries
            if name != MAIN_QUERY
        ),
    ]
    found = (
        []
        if ledger is None
        else [entry for entry in map(ledger.last, queries) if entry is not None]
    )
    if ledger is not None and not found:
        raise ConfigurationError(
            f"The pipeline {pipeline!r} has not finished a batch on this log yet.",
            fix="wait for its first batch, or start it with: headrace run.",
        )
    if not found:
        raise ConfigurationError(
            f"No pipeline {pipeline!r} has run on this log: {nearest(pipeline, known)}"
        )
    return found


def last_entry(log: Log, pipeline: str) -> LedgerEntry:
    return entries(log, pipeline)[0]


def states(log: Log, pipeline: str, state: Path) -> dict[str, StepState]:
    """All steps that keep state, by name. A step that two queries have is shown as the first of
    them has it.
    """
    found: dict[str, StepState] = {}
    for entry in entries(log, pipeline):
        for step, ids in entry.states.items():
            found.setdefault(
                step, StepState(step, entry.tick, dict(ids), StateFiles(state / "steps" / step))
            )
    return dict(sorted(found.items()))


def step_states(log: Log, pipeline: str, state: Path) -> list[StepStateInfo]:
    found = []
    for each in states(log, pipeline, state).values():
        keys = sum(len(each.entries(group)[0]) for group in range(GROUPS))
        reached = set(each.files.reach([each.ids]))
        size = sum((each.files.directory / f"{name}.state").stat().st_size for name in reached)
        found.append(StepStateInfo(each.step, each.tick, keys, len(reached), size))
    return found


def damaged_files(log: Log, pipeline: str, state: Path) -> list[str]:
    """What is wrong with the files that the newest ledger entries lead to, and which key groups it
    concerns.
    """
    damage: dict[tuple[str, str], list[int]] = {}
    for each in states(log, pipeline, state).values():
        sound: dict[str, StateFile] = {}
        for group, name in sorted(each.ids.items()):
            try:
                for _ in each.files.chain(group, name, cache=sound):
                    continue
            except CorruptionError as error:
                damage.setdefault((each.step, error.message), []).append(group)
    return [
        f"step {step}, key groups {', '.join(map(str, groups))}: {message}"
        for (step, message), groups in damage.items()
    ]


# What is kept


class Shown:
    """One step's state, decoded as far as its kernel can: with a plan that has the step, and a
    kernel that tells; otherwise as bytes.
    """

    def __init__(
        self,
        log: Log,
        pipeline: str,
        state: Path,
        step: str,
        plan: PipelinePlan | None,
        *,
        version: str | None = None,
    ) -> None:
        """Of a version, the step may be named as its pipeline names it."""
        known = states(log, pipeline, state)
        if step not in known and f"{step}.{version}" in known:
            step = f"{step}.{version}"
        if step not in known:
            raise InputError(
                f"The pipeline {pipeline!r} keeps no state for a step {step!r}:"
                f" {nearest(step, known)}",
                fix="`headrace state list` names them.",
            )
        self.state = known[step]
        kernel: object = (
            plan.step(step).kernel() if plan is not None and plan.step(step).keeps_state else None
        )
        self.kernel: Describing | None = kernel if isinstance(kernel, Describing) else None

    @property
    def key_fields(self) -> list[pa.Field]:
        """The columns of a key; none if keys cannot be decoded here."""
        return self.kernel.key_fields if self.kernel is not None else []

    def rows(self, most: int) -> tuple[list[dict[str, Any]], bool]:
        """So many rows, in order of key group and key; and whether there are more."""
        found: list[dict[str, Any]] = []
        for group in range(GROUPS):
            keys, values = self.state.entries(group)
            found += self._described(keys[: most + 1 - len(found)], values[: most + 1 - len(found)])
            if len(found) > most:
                return found[:most], True
        return found, False

    def row(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """What is kept for one key, by the values of its columns; None if nothing is."""
        columns = [pa.array([key[field.name]], field.type) for field in self.key_fields]
        encoded = encode_keys(
            pa.table(columns, names=[field.name for field in self.key_fields]),
            [field.name for field in self.key_fields],
        )
        keys, values = self.state.entries(int(key_groups(encoded)[0]))
        wanted = encoded[0].as_py()
        found = self._described([wanted], [values[keys.index(wanted)]]) if wanted in keys else []
        return found[0] if found else None

    def _described(self, keys: list[bytes], values: list[bytes]) -> list[dict[str, Any]]:
        """Decoded where that can be: of a long key only the beginning and a digest are stored."""
        rows = [
            {"_key": key, "_bytes": len(value)} for key, value in zip(keys, values, strict=True)
        ]
        whole = [at for at, key in enumerate(keys) if len(key) < _LONGEST_KEY]
        if self.kernel is not None and whole:
            found = self.kernel.describe(
                pa.array([keys[at] for at in whole], pa.binary()),
                pa.array([values[at] for at in whole], pa.binary()),
            )
            for at, row in zip(whole, found.to_pylist(), strict=True):
                rows[at] = row
        return rows
