"""The state of a pipeline from outside, by the ledger: which keys a step has, what its state holds
for them, and whether the state files are intact. `headrace state` shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from headrace.columnar.keys import KEY_GROUPS, encode_keys, key_groups
from headrace.engine.ledger import MAIN_QUERY, Ledger, LedgerEntry, known_pipelines
from headrace.engine.state.files import StateFile, StateFiles, StateIds
from headrace.errors import ConfigurationError, CorruptionError, InputError, nearest
from headrace.log.api import Log
from headrace.operators.expiry import PREFIX as EXPIRY
from headrace.operators.kernel import InspectableKernel
from headrace.plan.plan import PipelinePlan
from headrace.runtime.query_assignment import stored_arrangement

_MAX_KEY_BYTES = 400


def newest_entries(log: Log, pipeline: str) -> list[LedgerEntry]:
    """The newest ledger entry of each query, the main one first. Raises ConfigurationError if the
    pipeline has committed nothing on this log.
    """
    pipelines = known_pipelines(log)
    if pipeline not in pipelines:
        raise ConfigurationError(
            f"No pipeline {pipeline!r} has run on this log: {nearest(pipeline, pipelines)}"
        )
    ledger = Ledger(log, pipeline)
    added = [name for name in stored_arrangement(log, pipeline).queries if name != MAIN_QUERY]
    entries = [entry for entry in map(ledger.last, [MAIN_QUERY, *added]) if entry is not None]
    if not entries:
        raise ConfigurationError(
            f"The pipeline {pipeline!r} has not finished a batch on this log yet.",
            fix="wait for its first batch, or start it with: headrace run.",
        )
    return entries


def last_entry(log: Log, pipeline: str) -> LedgerEntry:
    """The newest ledger entry of a pipeline's main query."""
    return newest_entries(log, pipeline)[0]


@dataclass(frozen=True)
class StoredStepState:
    """A step's state files as of the newest ledger entry that has them."""

    step: str
    tick: int
    ids: StateIds
    files: StateFiles

    def entries(self, group: int) -> tuple[list[bytes], list[bytes]]:
        """The keys and values of a key group."""
        content = self.files.load([group], self.ids)[group]
        return list(content), list(content.values())


def stored_states(log: Log, pipeline: str, state: Path) -> dict[str, StoredStepState]:
    """All steps that keep state, by name. A step of two queries is shown as the first has it."""
    states: dict[str, StoredStepState] = {}
    for entry in newest_entries(log, pipeline):
        for step, ids in entry.states.items():
            if step not in states:
                files = StateFiles(state / "steps" / step)
                states[step] = StoredStepState(
                    step=step, tick=entry.tick, ids=dict(ids), files=files
                )
    return dict(sorted(states.items()))


@dataclass(frozen=True)
class StepStateInfo:
    """The size of a step's state."""

    step: str
    tick: int
    keys: int
    files: int
    bytes: int
    """The size of the files. One that several steps share counts for each of them."""


def state_sizes(log: Log, pipeline: str, state: Path) -> list[StepStateInfo]:
    """The size of the state of each step."""
    infos = []
    for stored in stored_states(log, pipeline, state).values():
        names = set(stored.files.reach([stored.ids]))
        paths = map(stored.files.path, names)
        infos.append(
            StepStateInfo(
                step=stored.step,
                tick=stored.tick,
                keys=sum(len(stored.entries(group)[0]) for group in range(KEY_GROUPS)),
                files=len(names),
                bytes=sum(path.stat().st_size for path in paths),
            )
        )
    return infos


def damaged_files(log: Log, pipeline: str, state: Path) -> list[str]:
    """What is wrong with the state files that the newest ledger entries lead to, and which key
    groups are affected. Empty if all are intact.
    """
    damage: dict[tuple[str, str], list[int]] = {}
    for stored in stored_states(log, pipeline, state).values():
        intact: dict[str, StateFile] = {}
        for group, name in sorted(stored.ids.items()):
            try:
                for _ in stored.files.chain(group, name, cache=intact):
                    continue
            except CorruptionError as error:
                damage.setdefault((stored.step, error.message), []).append(group)
    return [
        f"step {step}, key groups {', '.join(map(str, groups))}: {message}"
        for (step, message), groups in damage.items()
    ]


class StateInspector:
    """The entries of one step's state. They are decoded if the plan has the step and its kernel can
    decode them; otherwise they are shown as bytes.
    """

    def __init__(self, state: StoredStepState, kernel: InspectableKernel | None) -> None:
        self.state = state
        self.kernel = kernel

    @classmethod
    def open(
        cls,
        log: Log,
        pipeline: str,
        state: Path,
        step: str,
        plan: PipelinePlan | None,
        *,
        version: str | None = None,
    ) -> Self:
        """Find the state of a step. In a version, the step may be named as its pipeline names it.
        Raises InputError if the pipeline has no state for the step.
        """
        states = stored_states(log, pipeline, state)
        if step not in states and f"{step}.{version}" in states:
            step = f"{step}.{version}"
        if step not in states:
            raise InputError(
                f"The pipeline {pipeline!r} keeps no state for a step {step!r}:"
                f" {nearest(step, states)}",
                fix="`headrace state list` names them.",
            )
        kernel: object = None
        if plan is not None and plan.step(step).keeps_state:
            kernel = plan.step(step).kernel()
        return cls(states[step], kernel if isinstance(kernel, InspectableKernel) else None)

    @property
    def key_fields(self) -> list[pa.Field]:
        """The columns of a key; none if keys cannot be decoded."""
        return self.kernel.key_fields if self.kernel is not None else []

    def rows(self, limit: int) -> tuple[list[dict[str, Any]], bool]:
        """At most `limit` entries, in order of key group and key; and whether there are more."""
        rows: list[dict[str, Any]] = []
        for group in range(KEY_GROUPS):
            keys, values = self._own_entries(group)
            left = limit + 1 - len(rows)
            rows += self._decode(keys[:left], values[:left])
            if len(rows) > limit:
                return rows[:limit], True
        return rows, False

    def _own_entries(self, group: int) -> tuple[list[bytes], list[bytes]]:
        """The entries of the kernel itself, without those by which its keys expire."""
        keys, values = self.state.entries(group)
        start = self._prefix
        own = [
            index
            for index, key in enumerate(keys)
            if key.startswith(start) and not key.startswith(EXPIRY)
        ]
        return [keys[index][len(start) :] for index in own], [values[index] for index in own]

    @property
    def _prefix(self) -> bytes:
        prefix: bytes = getattr(self.kernel, "inspected_prefix", b"")
        return prefix

    def row(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """The entry of a key, given by the values of its columns; None if there is none."""
        names = [field.name for field in self.key_fields]
        columns = [pa.array([key[field.name]], field.type) for field in self.key_fields]
        encoded = encode_keys(pa.table(columns, names=names), names)
        keys, values = self._own_entries(int(key_groups(encoded)[0]))
        wanted = encoded[0].as_py()
        if wanted not in keys:
            return None
        rows = self._decode([wanted], [values[keys.index(wanted)]])
        return rows[0] if rows else None

    def _decode(self, keys: list[bytes], values: list[bytes]) -> list[dict[str, Any]]:
        """Decode entries where that is possible. Of a long key, only the start and a digest are
        stored.
        """
        rows = [
            {"_key": key, "_bytes": len(value)} for key, value in zip(keys, values, strict=True)
        ]
        whole = [index for index, key in enumerate(keys) if len(key) < _MAX_KEY_BYTES]
        if self.kernel is not None and whole:
            decoded = self.kernel.describe(
                pa.array([keys[index] for index in whole], pa.binary()),
                pa.array([values[index] for index in whole], pa.binary()),
            )
            for index, row in zip(whole, decoded.to_pylist(), strict=True):
                rows[index] = row
        return rows
