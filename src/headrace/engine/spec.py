"""What a micro-batch needs to know, as plain data that Spark can carry to its workers: inputs, stages, and the context of one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from headrace.engine.state_files import StateIds
from headrace.operators.kernel import Kernel


@dataclass(frozen=True)
class RowStep:
    """A row-local step, in Spark SQL: columns to make (all of them), and a condition to keep rows by."""

    name: str
    columns: tuple[tuple[str, str], ...] | None = None
    condition: str | None = None
    failed: str | None = None  # true for a row on which an expression failed
    divert: bool = False


@dataclass(frozen=True)
class InputSpec:
    """A topic that a stage reads, what is done to each row on the way, and the key it is sent to shards by."""

    port: int
    topic: str
    rank: int
    is_table: bool
    columns: tuple[str, ...]
    schema: pa.Schema
    row_steps: tuple[RowStep, ...]
    key: tuple[str, ...]


@dataclass(frozen=True)
class HostedStep:
    """A kernel under its step's stable name, by which its state is found again."""

    name: str
    kernel: Kernel


@dataclass(frozen=True)
class ViewTarget:
    name: str


@dataclass(frozen=True)
class TopicTarget:
    name: str
    key: tuple[str, ...]
    partitions: int


@dataclass(frozen=True)
class StageSpec:
    """Kernels with one key, in one shuffle. What the last one gives goes to targets, or to the next stage by another key."""

    name: str
    steps: tuple[HostedStep, ...]
    views: tuple[ViewTarget, ...] = ()
    topics: tuple[TopicTarget, ...] = ()
    next_key: tuple[str, ...] | None = None


@dataclass(frozen=True)
class QuerySpec:
    """Everything that moves together: committed in one ledger entry."""

    name: str
    inputs: tuple[InputSpec, ...]
    stages: tuple[StageSpec, ...]

    @property
    def topics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.topic for each in self.inputs))

    @property
    def steps(self) -> tuple[str, ...]:
        return tuple(step.name for stage in self.stages for step in stage.steps)


@dataclass(frozen=True)
class BatchContext:
    """One batch: ticks (after, up_to], where it works, and the state ids it starts from."""

    pipeline: str
    log: str
    state: Path
    local: Path
    job: str
    shards: int
    after: int
    up_to: int
    ids: Mapping[str, StateIds]

    @property
    def job_directory(self) -> Path:
        return self.state / "jobs" / self.job

    def step_directory(self, step: str) -> Path:
        return self.state / "steps" / step


@dataclass
class BatchResult:
    """What a batch made, from its tasks' reports: new state ids, files with changes, rows staged for topics, and counts."""

    ids: dict[str, StateIds] = field(default_factory=dict)
    views: dict[str, list[Path]] = field(default_factory=dict)
    topics: dict[str, list[object]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    how: Sequence[str] = ()
