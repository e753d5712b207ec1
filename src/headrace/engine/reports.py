"""Task reports: how the tasks of a Spark job pass results to the driver.

A task writes its rows under names of their own (`write_rows`) and then one small report that names
them (`write_report`). When the job has ended, the driver reads all reports into one `BatchResult`
(`read_reports`), which `runtime.query` commits. A second attempt of a task replaces the report of
the first; both describe the same rows.

Where they are written depends on how the job runs. The tasks of a wide job share the files of a
`JobDirectory`. A job that runs whole in one task keeps everything in a `JobMemory`, which the task
returns: no file is made.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from headrace.atomic_file import write_atomically
from headrace.engine.state.files import StateIds, from_ranges
from headrace.errors import BugError
from headrace.log.values import Staged

_NEEDS_SPARK = "needs-spark"


STATE_KEYS, STATE_BYTES = ".state_keys", ".state_bytes"
"""How the counts end whose sum over all batches is the size of a step's state.

The size at a tick is no result: it depends on how ticks were batched. Kernels drop rows that no
result needs any more many at a time, and the keys of a batch share entries for their timers.
"""


class JobFiles(Protocol):
    """Where the tasks of a job put what they produce, under names: rows, reports, and the newest
    event times that the shards behind a shuffle need.
    """

    def write(self, name: str, content: pa.Buffer) -> None:
        """Store a whole file; one of the same name is replaced at once."""

    def output(self, name: str) -> pa.NativeFile:
        """Open a new file for writing."""

    def names(self, prefix: str, suffix: str) -> list[str]:
        """The names of the files that begin and end so, in order."""

    def read(self, name: str) -> pa.Buffer:
        """The content of a file."""

    def exists(self, name: str) -> bool: ...

    def remove(self) -> None:
        """Remove all files: the job is over."""


@dataclass(frozen=True)
class JobDirectory:
    """Files in a directory that all machines share."""

    path: Path

    def write(self, name: str, content: pa.Buffer) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / name, content, durable=False)

    def output(self, name: str) -> pa.NativeFile:
        self.path.mkdir(parents=True, exist_ok=True)
        return pa.OSFile(str(self.path / name), "wb")

    def names(self, prefix: str, suffix: str) -> list[str]:
        if not self.path.exists():
            return []
        return sorted(
            name
            for name in (path.name for path in self.path.iterdir())
            if name.startswith(prefix) and name.endswith(suffix)
        )

    def read(self, name: str) -> pa.Buffer:
        return pa.memory_map(str(self.path / name)).read_buffer()

    def exists(self, name: str) -> bool:
        return (self.path / name).exists()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


@dataclass
class JobMemory:
    """Files in the memory of the one task that runs the whole job."""

    contents: dict[str, pa.Buffer | pa.BufferOutputStream] = field(default_factory=dict)

    def write(self, name: str, content: pa.Buffer) -> None:
        self.contents[name] = content

    def output(self, name: str) -> pa.NativeFile:
        self.contents[name] = stream = pa.BufferOutputStream()
        return stream

    def names(self, prefix: str, suffix: str) -> list[str]:
        return sorted(
            name for name in self.contents if name.startswith(prefix) and name.endswith(suffix)
        )

    def read(self, name: str) -> pa.Buffer:
        content = self.contents[name]
        if isinstance(content, pa.BufferOutputStream):
            content = self.contents[name] = content.getvalue()
        return content

    def exists(self, name: str) -> bool:
        return name in self.contents

    def remove(self) -> None:
        self.contents.clear()

    def to_bytes(self) -> dict[str, bytes]:
        """All files, to be sent to the driver."""
        return {name: self.read(name).to_pybytes() for name in self.contents}

    @classmethod
    def from_bytes(cls, contents: Mapping[str, bytes]) -> JobMemory:
        return cls({name: pa.py_buffer(content) for name, content in contents.items()})


@dataclass(frozen=True)
class JobRows:
    """Rows that a task has written, for the commit to read."""

    job: JobFiles
    name: str

    def read(self) -> pa.Table:
        return pa.ipc.open_file(self.job.read(self.name)).read_all()


def write_rows(job: JobFiles, name: str, rows: pa.Table) -> str:
    """Write rows for the commit to read. Returns the name of the new file."""
    name = f"{name}-{os.urandom(4).hex()}.arrow"
    with job.output(name) as file, pa.ipc.new_file(file, rows.schema) as writer:
        writer.write_table(rows)
    return name


def write_report(job: JobFiles, name: str, report: dict[str, Any]) -> None:
    """Write a task's report; one of the same name is replaced."""
    job.write(f"{name}.json", pa.py_buffer(json.dumps(report).encode()))


@dataclass
class BatchResult:
    """The result of a batch's job, merged from the reports of its tasks."""

    ids: dict[str, StateIds] = field(default_factory=dict)
    """Step -> key group -> id of the newest state file."""
    views: dict[str, list[JobRows]] = field(default_factory=dict)
    """View -> its changes."""
    topics: list[Staged] = field(default_factory=list)
    """Rows staged in the log for derived topics."""
    topic_ticks: dict[tuple[str, int], dict[int, int]] = field(default_factory=dict)
    """(derived topic, partition) -> tick -> number of rows."""
    dead_letters: dict[str, list[JobRows]] = field(default_factory=dict)
    """Step -> its dead letters."""
    late_counts: list[tuple[str, int, str | None, int]] = field(default_factory=list)
    """Late rows as (step, minute in microseconds, producer, number of rows)."""
    side_outputs: dict[str, list[JobRows]] = field(default_factory=dict)
    """Topic -> late rows, or with partial matches that timed out, to append to it."""
    counts: dict[str, int] = field(default_factory=dict)
    """`<step>.<metric>` -> number."""
    read_rows: int = 0
    read_bytes: int = 0
    """How much was read, about: the bytes depend on how it was cut into ranges."""
    due_us: dict[str, int] = field(default_factory=dict)
    """Step -> the earliest watermark that its state waits for."""
    how: list[str] = field(default_factory=list)
    """How each shard loaded its state: see `StoreTransaction.bring_to`."""


def read_reports(
    job: JobFiles,
    *,
    stages: Collection[str],
    shards: int,
    ids: Mapping[str, StateIds],
) -> BatchResult:
    """Merge the reports of a job's tasks.

    `ids` are the state ids that the batch started from; a key group that no report names keeps its
    id. Every shard of every stage must have reported: a missing report would silently lose rows.
    """
    for stage in stages:
        for shard in range(shards):
            name = f"stage-{stage}-{shard}.json"
            if not job.exists(name):
                raise BugError(f"A Spark job ended without the report {name}.")
    result = BatchResult(ids={step: dict(groups) for step, groups in ids.items()})
    for report_name in job.names("", ".json"):
        report = json.loads(job.read(report_name).to_pybytes())
        for step, groups in report.get("ids", {}).items():
            result.ids.setdefault(step, {}).update(from_ranges(groups))
        for view, file in report.get("views", {}).items():
            result.views.setdefault(view, []).append(JobRows(job, file))
        if "topic" in report:
            topic = report["topic"]
            staged = {int(p): (file, rows) for p, (file, rows) in report["partitions"].items()}
            result.topics.append(Staged(topic, staged, report["rows"]))
            for partition, tick_rows in report["ticks"].items():
                result.topic_ticks[topic, int(partition)] = dict(tick_rows)
        for step, file in report.get("dead_letters", {}).items():
            result.dead_letters.setdefault(step, []).append(JobRows(job, file))
        for step, late_counts in report.get("late_counts", {}).items():
            result.late_counts += [
                (step, minute_us, producer, rows) for minute_us, producer, rows in late_counts
            ]
        for topic, file in report.get("side_outputs", {}).items():
            result.side_outputs.setdefault(topic, []).append(JobRows(job, file))
        for step, due_us in report.get("due_us", {}).items():
            result.due_us[step] = min(due_us, result.due_us.get(step, due_us))
        read_rows, read_bytes = report.get("read", (0, 0))
        result.read_rows += read_rows
        result.read_bytes += read_bytes
        if "how" in report:
            result.how.append(report["how"])
        for name, count in report.get("counts", {}).items():
            result.counts[name] = result.counts.get(name, 0) + count
    return result


def mark_needs_spark(job: JobFiles) -> None:
    """Record that a task of the job met rows that only Spark computes exactly."""
    job.write(_NEEDS_SPARK, pa.py_buffer(b""))


def needs_spark(job: JobFiles) -> bool:
    """Whether a task of the job called `mark_needs_spark`: the job's result must be discarded."""
    return job.exists(_NEEDS_SPARK)
