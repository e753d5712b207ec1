"""The functions that a micro-batch's Spark job is made of, and the reading of its tasks' reports.
`pipeline.builder` puts them together.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Protocol, runtime_checkable

import pyarrow as pa

from headrace.columnar.expressions import RowStep
from headrace.columnar.json_fields import NeedsSpark
from headrace.engine.context import BatchContext, BatchResult
from headrace.engine.dead_letters import Diverter, this_task
from headrace.engine.reader import TopicRange
from headrace.engine.shuffle import heartbeat, pack
from headrace.engine.state.files import write_report
from headrace.engine.watermarks import EventTimes, with_tick_times
from headrace.errors import BugError
from headrace.log.values import Staged
from headrace.operators.kernel import Preparing
from headrace.operators.load_shedding import Shedding
from headrace.operators.watermark import WatermarkSpec

_NEEDS_SPARK = "inexact"


@runtime_checkable
class Combining(Protocol):
    """A kernel that can do part of its work before the shuffle."""

    @property
    def combinable(self) -> bool: ...

    def combine(self, rows: pa.Table) -> pa.Table: ...


@dataclass(frozen=True)
class Reading:
    """Some ranges of an input, how its clock goes, and row-local steps that are done on the
    spot.
    """

    ranges: tuple[TopicRange, ...]
    clock: WatermarkSpec
    log: str
    directory: Path
    time_as: str | None = None  # the name of a column to add, with the time of each row's tick
    steps: tuple[RowStep, ...] = ()
    shedding: Shedding | None = None

    def rows(self, number: int) -> Iterator[pa.RecordBatch]:
        """The usable rows of a range; what was found out about time is left for the shards."""
        times, shed = EventTimes(self.clock, self.ranges[number], number, self.directory), 0
        for batch in self.ranges[number].read(self.log):
            rows = times.taken(
                batch
                if self.time_as is None
                else with_tick_times(batch, self.ranges[number], self.time_as)
            )
            if (
                self.shedding is not None
            ):  # when its time has been seen: a row that is left out happened nevertheless
                before, rows = rows.num_rows, self.shedding.kept(rows)
                shed += before - rows.num_rows
            try:
                yield reduce(lambda given, step: step(given), self.steps, rows)
            except NeedsSpark:
                self.directory.mkdir(parents=True, exist_ok=True)
                (self.directory / _NEEDS_SPARK).touch()
                break
        times.finish()
        if shed:  # whoever reads these rows leaves out the same, and says so in the same report
            write_report(
                self.directory,
                f"shed-{self.clock.name}-{number}",
                {"counts": {f"{self.clock.name}.shed": shed}},
            )


@dataclass(frozen=True)
class ReadRows:
    """Rows of the ranges whose numbers come in: what `mapInArrow` runs over `spark.range`."""

    reading: Reading

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self.reading.rows(number)


@dataclass(frozen=True)
class Chained:
    """Two functions in one task: what the first gives, the second takes, and nothing goes through
    Spark between them.
    """

    first: Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]]
    second: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return self.second(self.first(batches))


@dataclass(frozen=True)
class ReadAndPack:
    """The same where no step of Spark's stands between: rows never leave Python before the
    shuffle.
    """

    reading: Reading
    port: int
    step: str
    key: tuple[str, ...] | None
    shards: int
    combine: Combining | None = None
    nulls: bool = False  # whether keys may be null
    prepare: Preparing | None = None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self._packed(number)

    def _packed(self, number: int) -> Iterator[pa.RecordBatch]:
        diverter, counted = Diverter(self.reading.directory, self.step), 0

        def keyed() -> Iterator[pa.RecordBatch]:
            nonlocal counted
            for rows in self.reading.rows(number):
                kept = diverter.keyed(rows, self.key, nulls=self.nulls)
                counted += kept.num_rows
                yield kept

        work = (
            self.combine.combine if self.combine else self.prepare.prepare if self.prepare else None
        )
        yield from pack(self.port, keyed(), self.key, self.shards, work)
        part = f"{self.port}-{self.reading.clock.name}-{number}"
        diverter.finish(part)
        if self.combine is not None:  # the shard sees fewer rows than there were
            write_report(
                self.reading.directory,
                f"packed-{self.step}-{part}",
                {"counts": {f"{self.step}.rows_in": counted}},
            )


@dataclass(frozen=True)
class PackRows:
    """Rows that come from Spark, to their shards."""

    port: int
    step: str
    key: tuple[str, ...] | None
    shards: int
    directory: Path
    nulls: bool = False
    prepare: Preparing | None = None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        diverter = Diverter(self.directory, self.step)
        keyed = (diverter.keyed(rows, self.key, nulls=self.nulls) for rows in batches)
        yield from pack(
            self.port, keyed, self.key, self.shards, self.prepare.prepare if self.prepare else None
        )
        diverter.finish(f"{self.port}-{this_task()}")


@dataclass(frozen=True)
class Heartbeat:
    """A row for every shard, so that each runs also when no row is for it."""

    shards: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                yield heartbeat(self.shards)


def read_reports(context: BatchContext, stages: Collection[str] = ()) -> BatchResult:
    """What the tasks of a job made, from the small files they left. Every shard of every stage has
    left one, or its rows would be lost without a word.
    """
    for name in (
        f"stage-{stage}-{shard}.json" for stage in stages for shard in range(context.shards)
    ):
        if not (context.job_directory / name).exists():
            raise BugError(
                f"A job of the pipeline {context.pipeline!r} ended, and {name} is not in"
                f" {context.job_directory}."
            )
    result = BatchResult(ids={step: dict(ids) for step, ids in context.ids.items()})
    for path in sorted(context.job_directory.glob("*.json")):
        report = json.loads(path.read_text())
        for step, ids in report.get("ids", {}).items():
            result.ids.setdefault(step, {}).update(
                {int(group): name for group, name in ids.items()}
            )
        for view, file in report.get("views", {}).items():
            result.views.setdefault(view, []).append(context.job_directory / file)
        if "topic" in report:
            places = {int(p): (file, rows) for p, (file, rows) in report["partitions"].items()}
            result.topics.append(Staged(report["topic"], places, report["rows"]))
            result.topic_ticks |= {
                (report["topic"], int(p)): {tick: rows for tick, rows in found}  # noqa: C416
                for p, found in report["ticks"].items()
            }
        for step, file in report.get("diverted", {}).items():
            result.diverted.setdefault(step, []).append(context.job_directory / file)
        result.late += [
            (step, *found) for step, counted in report.get("late", {}).items() for found in counted
        ]
        for topic, file in report.get("late_rows", {}).items():
            result.late_rows.setdefault(topic, []).append(context.job_directory / file)
        for step, due_us in report.get("due_us", {}).items():
            result.due_us[step] = min(due_us, result.due_us.get(step, due_us))
        if "how" in report:
            result.how.append(report["how"])
        for name, count in report.get("counts", {}).items():
            result.counts[name] = result.counts.get(name, 0) + count
    return result


def needs_spark(context: BatchContext) -> bool:
    """Whether a task met rows that are Spark's: what the job made is of no use."""
    return (context.job_directory / _NEEDS_SPARK).exists()


def clean_up(context: BatchContext) -> None:
    shutil.rmtree(context.job_directory, ignore_errors=True)
