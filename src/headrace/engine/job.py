"""One micro-batch: ticks (a, b] of a query as one Spark job and one action."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.engine.packing import PACKED, hello, pack
from headrace.engine.shard import ShardFunction
from headrace.engine.spec import BatchContext, BatchResult, InputSpec, QuerySpec
from headrace.engine.tasks import ORDER_FIELDS, TopicRange, ranges
from headrace.engine.ticks import Tick
from headrace.log.schema import to_spark_ddl

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class ReadFunction:
    """Rows of the ranges whose numbers come in: what `mapInArrow` runs over `spark.range`."""

    ranges: tuple[TopicRange, ...]
    log: str

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self.ranges[number].read(self.log)


@dataclass(frozen=True)
class ReadAndPack:
    """The same for inputs without row-local steps: rows never leave Python before the shuffle. The first task greets every shard."""

    ranges: tuple[TopicRange, ...]
    keys: tuple[tuple[str, ...], ...]  # by port
    log: str
    shards: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                if number == 0:
                    yield hello(self.shards)
                if number:
                    piece = self.ranges[number - 1]
                    yield from pack(piece.port, piece.read(self.log), self.keys[piece.port], self.shards)


@dataclass(frozen=True)
class PackFunction:
    port: int
    key: tuple[str, ...]
    shards: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return pack(self.port, batches, self.key, self.shards)


def run_batch(spark: SparkSession, query: QuerySpec, context: BatchContext, before: Tick, ticks: Sequence[Tick]) -> BatchResult:
    """Run the job and read its tasks' reports. Nothing is committed: that is the sinks' business."""
    cores = spark_parallelism(spark)
    packed = _packed_inputs(spark, query, context, before, ticks, cores)
    for number, stage in enumerate(query.stages):
        packed = packed.repartition(context.shards, "label").mapInArrow(ShardFunction(stage, context, number), PACKED)
    packed.collect()
    return read_reports(query, context)


def _packed_inputs(spark: SparkSession, query: QuerySpec, context: BatchContext, before: Tick, ticks: Sequence[Tick], cores: int) -> DataFrame:
    direct = [each for each in query.inputs if not each.row_steps]
    pieces = [piece for each in direct for piece in _ranges(each, before, ticks, cores)]
    keys = tuple(each.key for each in query.inputs)
    count = len(pieces) + 1
    packed = spark.range(0, count, 1, count).mapInArrow(ReadAndPack(tuple(pieces), keys, context.log, context.shards), PACKED)
    for each in query.inputs:
        if each.row_steps:
            found = _ranges(each, before, ticks, cores)
            if found:
                packed = packed.unionAll(_through_spark(spark, each, found, context))
    return packed


def _ranges(spec: InputSpec, before: Tick, ticks: Sequence[Tick], cores: int) -> list[TopicRange]:
    return ranges(spec.port, spec.topic, spec.rank, spec.columns, before, ticks, parts=cores)


def _through_spark(spark: SparkSession, spec: InputSpec, pieces: list[TopicRange], context: BatchContext) -> DataFrame:
    """Rows through Spark's own engine, for what is written in Spark SQL."""
    schema = to_spark_ddl(pa.schema([*spec.schema, *ORDER_FIELDS]))
    rows = spark.range(0, len(pieces), 1, len(pieces)).mapInArrow(ReadFunction(tuple(pieces), context.log), schema)
    order = [f"`{field.name}`" for field in ORDER_FIELDS]
    for step in spec.row_steps:
        if step.condition is not None:
            rows = rows.where(step.condition)
        if step.columns is not None:
            rows = rows.selectExpr(*(f"{expression} AS `{name}`" for name, expression in step.columns), *order)
    return rows.mapInArrow(PackFunction(spec.port, spec.key, context.shards), PACKED)


def spark_parallelism(spark: SparkSession) -> int:
    """How many tasks run at once, as far as a session without a JVM gateway can tell."""
    return int(spark.conf.get("spark.sql.shuffle.partitions", "2") or 2)


def read_reports(query: QuerySpec, context: BatchContext) -> BatchResult:
    result = BatchResult(ids={step: dict(context.ids.get(step, {})) for step in query.steps})
    how = []
    for number in range(len(query.stages)):
        for shard in range(context.shards):
            report = json.loads((context.job_directory / f"stage-{number}-{shard}.json").read_text())
            how.append(report["how"])
            for step, ids in report["ids"].items():
                result.ids[step].update({int(group): name for group, name in ids.items()})
            for view, file in report.get("views", {}).items():
                result.views.setdefault(view, []).append(context.job_directory / file)
            for name in ("rows_in", "rows_out"):
                key = f"{query.stages[number].name}.{name}"
                result.counts[key] = result.counts.get(key, 0) + report[name]
    result.how = how
    return result


def clean_up(context: BatchContext) -> None:
    shutil.rmtree(context.job_directory, ignore_errors=True)
