"""What a micro-batch needs to know, as plain data that Spark can carry to its workers: stages, and
the context of one batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from headrace.engine.state.files import StateIds
from headrace.engine.watermarks import WatermarkInputs
from headrace.log.values import Staged
from headrace.operators.kernel import Kernel, Preparing, TimedKernel
from headrace.operators.watermark import WatermarkPath, WatermarkSpec


@dataclass(frozen=True)
class HostedInput:
    """One input of a step: the columns of its rows, the pipeline's order included, and the way from
    the inputs' clocks to its own.
    """

    schema: pa.Schema
    watermarks: tuple[WatermarkPath, ...]


@dataclass(frozen=True)
class HostedStep:
    """A kernel under its step's stable name, by which its state is found again."""

    name: str
    kernel: Kernel | TimedKernel
    inputs: tuple[HostedInput, ...] = ()
    late_topic: str | None = None  # where rows that came too late go, if not nowhere
    clock: WatermarkSpec | None = (
        # of a step that finds out when rows happened: how the clock goes that it is to tell of
        None
    )
    aside_topic: str | None = None  # where partial matches go whose time ran out, if not nowhere


@dataclass(frozen=True)
class TopicTarget:
    """A derived topic: rows go to its partitions by its key."""

    name: str
    key: tuple[str, ...]
    partitions: int


@dataclass(frozen=True)
class StageTarget:
    """The stage behind the next shuffle: its first step, the key by which it gets rows (None: every
    shard gets all), and which of its inputs these are.
    """

    step: str
    key: tuple[str, ...] | None
    port: int
    nulls: bool = False  # whether its keys may be null
    prepare: Preparing | None = None  # what is done to the rows before they go to every shard


@dataclass(frozen=True)
class StageSpec:
    """Kernels with one key behind one shuffle, and where the last one's rows go: into views, and on
    to what is next.

    `next`: nothing, rows for Spark ("rows"), blobs for a stage by another key, or blobs for the
    tasks that write a topic.
    """

    name: str
    steps: tuple[HostedStep, ...]
    key: (
        tuple[str, ...] | None
    )  # by which the rows that come out are put into order within a tick; None if they keep their places
    views: tuple[str, ...] = ()
    next: str | StageTarget | TopicTarget | None = None


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
    time: WatermarkInputs = field(default_factory=WatermarkInputs)

    @property
    def watermark_directory(self) -> Path:
        return self.state / "clocks"

    @property
    def job_directory(self) -> Path:
        return self.state / "jobs" / self.job

    def step_directory(self, step: str) -> Path:
        return self.state / "steps" / step


@dataclass
class BatchResult:
    """What a batch made, from its tasks' reports: new state ids, files with a view's changes, rows
    staged for topics, and counts.
    """

    ids: dict[str, StateIds] = field(default_factory=dict)
    views: dict[str, list[Path]] = field(default_factory=dict)
    topics: list[Staged] = field(default_factory=list)
    topic_ticks: dict[tuple[str, int], dict[int, int]] = field(
        default_factory=dict
    )  # (topic, partition) -> tick -> rows
    diverted: dict[str, list[Path]] = field(
        default_factory=dict
    )  # step -> files with rows that could not be used, with where and why
    late: list[tuple[str, int, str | None, int]] = field(
        default_factory=list
    )  # step, minute, producer, rows that came too late
    late_rows: dict[str, list[Path]] = field(default_factory=dict)  # topic -> files with such rows
    counts: dict[str, int] = field(default_factory=dict)
    due_us: dict[str, int] = field(
        default_factory=dict
    )  # step -> the earliest time that something in its state waits for
    how: list[str] = field(default_factory=list)
