"""Task reports: how the tasks of a Spark job pass results to the driver.

A task writes its rows to files of its own in the job's directory (`write_rows`) and then one small
JSON file that names them (`write_report`). When the job has ended, the driver reads all reports
into one `BatchResult` (`read_reports`), which `runtime.query` commits. A second attempt of a task
replaces the report of the first; both describe the same rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from headrace.atomic_file import write_atomically
from headrace.engine.state.files import StateIds
from headrace.errors import BugError
from headrace.log.values import Staged

_NEEDS_SPARK = "needs-spark"


def write_rows(directory: Path, name: str, rows: pa.Table) -> str:
    """Write rows to a new Arrow file for the commit to read. Returns the file's name."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{os.urandom(4).hex()}.arrow"
    with pa.ipc.new_file(str(path), rows.schema) as writer:
        writer.write_table(rows)
    return path.name


def write_report(directory: Path, name: str, report: dict[str, Any]) -> None:
    """Write a task's report atomically; a report of the same name is replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / f"{name}.json", json.dumps(report).encode(), durable=False)


@dataclass
class BatchResult:
    """The result of a batch's job, merged from the reports of its tasks."""

    ids: dict[str, StateIds] = field(default_factory=dict)
    """Step -> key group -> id of the newest state file."""
    views: dict[str, list[Path]] = field(default_factory=dict)
    """View -> files with its changes."""
    topics: list[Staged] = field(default_factory=list)
    """Rows staged in the log for derived topics."""
    topic_ticks: dict[tuple[str, int], dict[int, int]] = field(default_factory=dict)
    """(derived topic, partition) -> tick -> number of rows."""
    dead_letters: dict[str, list[Path]] = field(default_factory=dict)
    """Step -> files with dead letters."""
    late_counts: list[tuple[str, int, str | None, int]] = field(default_factory=list)
    """Late rows as (step, minute in microseconds, producer, number of rows)."""
    side_outputs: dict[str, list[Path]] = field(default_factory=dict)
    """Topic -> files with late rows, or with partial matches that timed out, to append to it."""
    counts: dict[str, int] = field(default_factory=dict)
    """`<step>.<metric>` -> number."""
    due_us: dict[str, int] = field(default_factory=dict)
    """Step -> the earliest watermark that its state waits for."""
    how: list[str] = field(default_factory=list)
    """How each shard loaded its state: see `StoreTransaction.bring_to`."""


def read_reports(
    directory: Path,
    *,
    stages: Collection[str],
    shards: int,
    ids: Mapping[str, StateIds],
) -> BatchResult:
    """Merge the reports in a job's directory.

    `ids` are the state ids that the batch started from; a key group that no report names keeps its
    id. Every shard of every stage must have reported: a missing report would silently lose rows.
    """
    for stage in stages:
        for shard in range(shards):
            name = f"stage-{stage}-{shard}.json"
            if not (directory / name).exists():
                raise BugError(f"A Spark job ended without the report {name} in {directory}.")
    result = BatchResult(ids={step: dict(groups) for step, groups in ids.items()})
    for path in sorted(directory.glob("*.json")):
        report = json.loads(path.read_text())
        for step, groups in report.get("ids", {}).items():
            new_ids = {int(group): name for group, name in groups.items()}
            result.ids.setdefault(step, {}).update(new_ids)
        for view, file in report.get("views", {}).items():
            result.views.setdefault(view, []).append(directory / file)
        if "topic" in report:
            topic = report["topic"]
            staged = {int(p): (file, rows) for p, (file, rows) in report["partitions"].items()}
            result.topics.append(Staged(topic, staged, report["rows"]))
            for partition, tick_rows in report["ticks"].items():
                result.topic_ticks[topic, int(partition)] = dict(tick_rows)
        for step, file in report.get("diverted", {}).items():
            result.dead_letters.setdefault(step, []).append(directory / file)
        for step, late_counts in report.get("late", {}).items():
            result.late_counts += [
                (step, minute_us, producer, rows) for minute_us, producer, rows in late_counts
            ]
        for topic, file in report.get("late_rows", {}).items():
            result.side_outputs.setdefault(topic, []).append(directory / file)
        for step, due_us in report.get("due_us", {}).items():
            result.due_us[step] = min(due_us, result.due_us.get(step, due_us))
        if "how" in report:
            result.how.append(report["how"])
        for name, count in report.get("counts", {}).items():
            result.counts[name] = result.counts.get(name, 0) + count
    return result


def mark_needs_spark(directory: Path) -> None:
    """Record that a task of the job met rows that only Spark computes exactly."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _NEEDS_SPARK).touch()


def needs_spark(directory: Path) -> bool:
    """Whether a task of the job called `mark_needs_spark`: the job's result must be discarded."""
    return (directory / _NEEDS_SPARK).exists()
