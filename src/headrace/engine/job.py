"""The functions that a micro-batch's Spark job is made of, and the reading of its tasks' reports. `pipeline.builder` puts them together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from headrace.engine.diverting import Diverter
from headrace.engine.packing import hello, pack
from headrace.engine.shard import write_report
from headrace.engine.spec import BatchContext, BatchResult
from headrace.engine.tasks import TopicRange
from headrace.log.api import Staged


class Combining(Protocol):
    """A kernel that can do part of its work before the shuffle."""

    @property
    def combinable(self) -> bool: ...

    def combine(self, rows: pa.Table) -> pa.Table: ...


@dataclass(frozen=True)
class ReadRows:
    """Rows of the ranges whose numbers come in: what `mapInArrow` runs over `spark.range`."""

    ranges: tuple[TopicRange, ...]
    log: str

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self.ranges[number].read(self.log)


@dataclass(frozen=True)
class ReadAndPack:
    """The same where no row-local step stands between: rows never leave Python before the shuffle."""

    ranges: tuple[TopicRange, ...]
    step: str
    key: tuple[str, ...]
    log: str
    shards: int
    directory: Path
    combine: Combining | None = None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        diverter = Diverter(self.directory, self.step)
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self._packed(number, diverter)
        diverter.finish(self.ranges[0].topic)

    def _packed(self, number: int, diverter: Diverter) -> Iterator[pa.RecordBatch]:
        piece, counted = self.ranges[number], 0

        def keyed() -> Iterator[pa.RecordBatch]:
            nonlocal counted
            for rows in piece.read(self.log):
                kept = diverter.without_null_keys(rows, self.key)
                counted += kept.num_rows
                yield kept

        yield from pack(piece.port, keyed(), self.key, self.shards, self.combine.combine if self.combine else None)
        if self.combine is not None:  # the shard sees fewer rows than there were
            write_report(self.directory, f"packed-{self.step}-{piece.topic}-{number}", {"counts": {f"{self.step}.rows_in": counted}})


@dataclass(frozen=True)
class PackRows:
    """Rows that come from Spark, to their shards."""

    port: int
    step: str
    key: tuple[str, ...]
    shards: int
    directory: Path

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        diverter = Diverter(self.directory, self.step)
        yield from pack(self.port, (diverter.without_null_keys(rows, self.key) for rows in batches), self.key, self.shards)
        diverter.finish("rows")


@dataclass(frozen=True)
class Greet:
    """A row for every shard, so that each runs also when no row is for it."""

    shards: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                yield hello(self.shards)


def read_reports(context: BatchContext) -> BatchResult:
    """What the tasks of a job made, from the small files they left."""
    result = BatchResult(ids={step: dict(ids) for step, ids in context.ids.items()})
    for path in sorted(context.job_directory.glob("*.json")):
        report = json.loads(path.read_text())
        for step, ids in report.get("ids", {}).items():
            result.ids.setdefault(step, {}).update({int(group): name for group, name in ids.items()})
        for view, file in report.get("views", {}).items():
            result.views.setdefault(view, []).append(context.job_directory / file)
        if "topic" in report:
            places = {int(p): (file, rows) for p, (file, rows) in report["partitions"].items()}
            result.topics.append(Staged(report["topic"], places, report["rows"]))
        for step, found in report.get("letters", {}).items():
            result.diverted.setdefault(step, []).extend(found)
        for step, file in report.get("diverted", {}).items():
            letters = (context.job_directory / file).read_text().splitlines()
            result.diverted.setdefault(step, []).extend(map(json.loads, letters))
        if "how" in report:
            result.how.append(report["how"])
        for name, count in report.get("counts", {}).items():
            result.counts[name] = result.counts.get(name, 0) + count
    return result


def clean_up(context: BatchContext) -> None:
    shutil.rmtree(context.job_directory, ignore_errors=True)
