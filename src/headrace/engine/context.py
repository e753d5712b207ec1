"""What a micro-batch's tasks need to know, as plain data that Spark sends to its workers.

`BatchContext` describes the batch; `StageSpec` describes one stage of its job: the kernels behind
one shuffle, and where their rows go next. `runtime.job_builder` builds both from the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from headrace.engine.reports import JobFiles
from headrace.engine.state.files import StateIds
from headrace.engine.watermarks import WatermarkInputs
from headrace.operators.kernel import BroadcastKernel, Kernel, TimedKernel
from headrace.operators.watermark_spec import WatermarkPath, WatermarkSpec


@dataclass(frozen=True)
class HostedInput:
    """One input of a step: the columns of its rows, order columns included, and the paths from the
    watermarks of the pipeline's inputs to its own watermark.
    """

    schema: pa.Schema
    watermarks: tuple[WatermarkPath, ...]


@dataclass(frozen=True)
class HostedStep:
    """A kernel with the name of its step, under which its state is stored."""

    name: str
    kernel: Kernel | TimedKernel
    inputs: tuple[HostedInput, ...] = ()
    late_topic: str | None = None
    """The topic that late rows are appended to, if any."""
    watermark: WatermarkSpec | None = None
    """Set for a step that computes event times itself (device time): the watermark to generate."""
    timeout_topic: str | None = None
    """The topic that partial matches are appended to when they time out, if any."""


@dataclass(frozen=True)
class TopicTarget:
    """A derived topic; the key of a row decides its partition."""

    name: str
    key: tuple[str, ...]
    partitions: int


@dataclass(frozen=True)
class StageTarget:
    """One input of the stage behind the next shuffle."""

    step: str
    """The first step of that stage."""
    key: tuple[str, ...] | None
    """The columns that decide a row's shard; None sends every row to every shard."""
    port: int
    """The index of this input among the inputs of `step`."""
    nulls: bool = False
    """Whether a key may be null. If not, rows with a null key become dead letters."""
    prepare: BroadcastKernel | None = None
    """What is computed for rows before they are sent to every shard."""
    unread: tuple[str, ...] = ()
    """The columns that the step does not read."""


@dataclass(frozen=True)
class StageSpec:
    """Kernels with one shard key behind one shuffle. Each reads the output of the one before."""

    name: str
    steps: tuple[HostedStep, ...]
    key: tuple[str, ...] | None
    """The columns that order the stage's rows within a tick; None keeps the order they have."""
    views: tuple[str, ...] = ()
    """The views that the last kernel's rows are written to."""
    next: str | StageTarget | TopicTarget | None = None
    """Where the last kernel's rows go besides views: nowhere, to Spark as rows ("rows"), packed to
    the next stage, or packed to the tasks that write a derived topic.
    """


@dataclass(frozen=True)
class BatchContext:
    """One batch: the ticks (after, up_to], its directories, and the state it starts from."""

    pipeline: str
    log: str
    """The address of the log."""
    state: Path
    """The pipeline's state directory, which all machines share."""
    local: Path
    """The directory for local stores on each machine."""
    job: str
    """A unique id; names the job's directory."""
    shards: int
    after: int
    up_to: int
    ids: Mapping[str, StateIds]
    """Step -> the state ids of its key groups as of the tick `after`."""
    files: JobFiles
    """Where tasks put what they produce for each other and for the driver."""
    watermarks: WatermarkInputs = field(default_factory=WatermarkInputs)

    @property
    def watermark_directory(self) -> Path:
        return self.state / "clocks"

    @property
    def job_directory(self) -> Path:
        """The directory of the job's files on disk, if it has any."""
        return self.state / "jobs" / self.job

    @property
    def steps_directory(self) -> Path:
        """Has a directory for the state files of each step."""
        return self.state / "steps"
