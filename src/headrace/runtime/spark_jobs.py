"""Running a job graph on Spark: whole in one task, as RDDs, or as DataFrames.

A stage of a Spark job costs 60 to 80 ms, whatever is in it, and building and planning DataFrames
costs more than that. So a small batch runs whole in one task (`run_in_one_task`): Spark places it,
retries it and kills it, and nothing else. A large one is spread over tasks and shuffles
(`run_wide`): as RDDs of packed rows, which Spark runs without planning anything; or as DataFrames,
where Spark SQL computes some steps, and on Spark Connect, which has no RDDs.

The results do not depend on the way: the functions are the same, and so is their order.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.engine.context import BatchContext
from headrace.engine.job_graph import (
    HeartbeatNode,
    JobNode,
    MapNode,
    RangesNode,
    ShuffleNode,
    SqlNode,
    TaskFunction,
    UnionNode,
    sql_steps,
)
from headrace.engine.map_tasks import ShardHeartbeat
from headrace.engine.reports import JobMemory
from headrace.engine.shuffle import PACKED, heartbeat_of
from headrace.engine.shuffle_items import from_items, to_pairs
from headrace.engine.whole_job import WholeJob
from headrace.engine.worker_daemon import settle_worker
from headrace.errors import NotSerializable

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext
    from pyspark.sql import DataFrame, Observation, SparkSession

    from headrace.plan.plan import PipelinePlan

Failures = dict[str, int]
"""Step -> the number of rows for which its expressions failed and gave null."""


def check_code_can_be_sent(plan: PipelinePlan) -> None:
    """Raise NotSerializable if code of users cannot be sent to Spark's workers."""
    from pyspark import cloudpickle

    for step in plan.steps():
        for name, subject in step.user_code:
            try:
                cloudpickle.dumps(subject)  # type: ignore[no-untyped-call]
            except Exception as error:
                held = ", ".join(_values_that_cannot_be_sent(subject))
                raise NotSerializable(
                    f"Spark's workers cannot be sent {name} of the step {step.name!r}"
                    f"{f', which uses {held}' if held else ''}: {error}.",
                    fix=(
                        "make it where it is used, in the function or method itself, for instance"
                        " behind functools.cache."
                    ),
                ) from None


def _values_that_cannot_be_sent(subject: Any) -> Iterator[str]:
    """The names of what a function or an object of a class uses and cannot be sent."""
    from pyspark import cloudpickle

    if inspect.isfunction(subject):
        used = inspect.getclosurevars(subject)
        values = {**used.globals, **used.nonlocals}
    else:
        values = {f"self.{name}": value for name, value in vars(subject).items()}
        for method in filter(inspect.isfunction, vars(type(subject)).values()):
            used = inspect.getclosurevars(method)
            values |= {**used.globals, **used.nonlocals}
    for name, value in values.items():
        try:
            cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
        except Exception:
            yield name


# Whole in one task


def run_in_one_task(spark: SparkSession, job: JobNode, batch: BatchContext) -> JobMemory:
    """Run a job whole in one Spark task. Returns the files that its functions have written."""
    whole = WholeJob(job, batch)
    context = classic_context(spark)
    if context is not None:
        _name_jobs(context)
        one = _one_item(context, _last_hosts.get(str(batch.local), ()))
        ((contents, hosts),) = one.mapPartitions(whole.in_rdd).collect()
        _last_hosts[str(batch.local)] = hosts
    else:
        (row,) = spark.range(0, 1, 1, 1).mapInArrow(whole.in_frame, "files BINARY").collect()
        contents = pickle.loads(row[0])  # noqa: S301 - what our own task has returned
    return JobMemory.from_bytes(contents)


_last_hosts: dict[str, tuple[str, ...]] = {}
"""Directory for local stores -> the names of the machine that ran the last whole job there."""


def _one_item(context: SparkContext, hosts: Sequence[str]) -> RDD[bytes]:
    """An RDD with one item. On a cluster, its task prefers the machine with such a name: the one
    that has the local store.
    """
    if not hosts or str(context.master).startswith("local["):
        return context.parallelize([b""], 1)
    from pyspark import RDD
    from pyspark.serializers import NoOpSerializer

    jvm: Any = context._jvm  # noqa: SLF001
    item = jvm.scala.Tuple2(bytearray(b"0"), jvm.PythonUtils.toSeq(list(hosts)))
    bytes_class = jvm.java.lang.Class.forName("[B")
    rdd = context._jsc.sc().makeRDD(  # noqa: SLF001
        jvm.PythonUtils.toSeq([item]), jvm.scala.reflect.ClassTag.apply(bytes_class)
    )
    return RDD(rdd.toJavaRDD(), context, NoOpSerializer())


def classic_context(spark: SparkSession) -> SparkContext | None:
    """The Spark context of a session whose driver is this process; None on Spark Connect."""
    from pyspark.sql import SparkSession

    return spark.sparkContext if type(spark) is SparkSession else None


_JOB_GROUP = "headrace"


def _name_jobs(context: SparkContext) -> None:
    """Let `cancel_jobs` find the jobs of this thread."""
    context.setJobGroup(_JOB_GROUP, "a batch", interruptOnCancel=True)


def cancel_jobs(spark: SparkSession) -> None:
    """Cancel the job that runs at present. That does no harm: what is not in the ledger never
    happened.
    """
    spark.interruptAll()
    context = classic_context(spark)
    if context is not None:
        context.cancelJobGroup(_JOB_GROUP)


# Wide


def run_wide(spark: SparkSession, job: JobNode, directory: Path) -> Failures:
    """Run a job in several tasks. `directory` is removed with the job's files: where all tasks are
    on this machine, the blobs of shuffles are there.
    """
    context = classic_context(spark)
    if context is not None:
        _name_jobs(context)
    if context is not None and not sql_steps(job):
        is_local = str(context.master) == "local" or str(context.master).startswith("local[")
        _RddJob(context, directory / "blobs" if is_local else None).run(job)
        return {}
    return _FrameJob(spark).run(job)


class _FrameJob:
    """A job as DataFrames."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._frames: dict[int, DataFrame] = {}
        self._persisted: list[DataFrame] = []
        self._observations: dict[str, Observation] = {}

    def run(self, job: JobNode) -> Failures:
        try:
            self._frame(job).collect()
            return {
                step: int(observation.get["rows"] or 0)
                for step, observation in self._observations.items()
            }
        finally:
            for frame in self._persisted:
                frame.unpersist()

    def _frame(self, node: JobNode) -> DataFrame:
        if id(node) not in self._frames:
            frame = self._make_frame(node)
            if node.is_shared:
                frame = frame.persist()
                self._persisted.append(frame)
            self._frames[id(node)] = frame
        return self._frames[id(node)]

    def _make_frame(self, node: JobNode) -> DataFrame:
        match node:
            case RangesNode():
                return self._spark.range(0, node.count, 1, node.tasks)
            case MapNode():
                # Functions that follow each other run in one task: rows pass without Spark between.
                functions, source = [node.function], node.input
                while isinstance(source, MapNode) and not source.is_shared:
                    functions.insert(0, source.function)
                    source = source.input
                function = functions[0] if len(functions) == 1 else ChainedTasks(tuple(functions))
                return self._frame(source).mapInArrow(function, node.schema)
            case UnionNode():
                frames = [self._frame(source) for source in node.sources]
                return reduce(lambda left, right: left.unionAll(right), frames)
            case ShuffleNode():
                return self._frame(node.input).repartition(node.shards, "label")
            case HeartbeatNode():
                one = self._spark.range(0, 1, 1, 1)
                return one.mapInArrow(ShardHeartbeat(node.shards), PACKED)
            case SqlNode(step=step, failed=str() as condition):
                from pyspark.sql import Observation
                from pyspark.sql.functions import expr

                observe = self._frame(node.input).observe  # before `expr`, which needs a JVM
                self._observations[step] = observation = Observation(f"failed.{step}")
                count = expr(f"count_if({condition})").alias("rows")
                return observe(observation, count)
            case SqlNode(where=str() as condition):
                return self._frame(node.input).where(condition)
            case SqlNode():
                return self._frame(node.input).selectExpr(*node.select)
            case _:
                raise AssertionError(node)


@dataclass(frozen=True)
class ChainedTasks:
    """Functions in one task: each reads the batches of the one before."""

    functions: tuple[TaskFunction, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for function in self.functions:
            batches = function(batches)
        yield from batches


class _RddJob:
    """A job as RDDs. Between functions of a task, items are Arrow batches; through a shuffle go
    `shuffle_items`, whose blobs are in the directory `blobs` if there is one.
    """

    def __init__(self, context: SparkContext, blobs: Path | None) -> None:
        self._context = context
        self._blobs = blobs
        self._rdds: dict[int, RDD[Any]] = {}
        self._persisted: list[RDD[Any]] = []

    def run(self, job: JobNode) -> None:
        try:
            self._rdd(job).foreachPartition(_drain)
        finally:
            for rdd in self._persisted:
                rdd.unpersist()

    def _rdd(self, node: JobNode) -> RDD[Any]:
        from pyspark import StorageLevel

        if id(node) not in self._rdds:
            rdd = self._make_rdd(node)
            if node.is_shared:
                rdd = rdd.persist(StorageLevel.MEMORY_AND_DISK)  # not computed twice if it is large
                self._persisted.append(rdd)
            self._rdds[id(node)] = rdd
        return self._rdds[id(node)]

    def _make_rdd(self, node: JobNode) -> RDD[Any]:
        match node:
            case RangesNode():
                numbers = self._context.parallelize(range(node.count), node.tasks)
                return numbers.mapPartitions(_numbers)
            case MapNode(input=ShuffleNode() as shuffle):
                read = partial(_read_shard, node.function, shuffle.shards, self._blobs)
                return self._shuffle(shuffle).mapPartitionsWithIndex(read)
            case MapNode():
                return self._rdd(node.input).mapPartitions(node.function)
            case UnionNode():
                rdds = [self._rdd(source) for source in _flat(node)]
                return self._union(rdds)
            case _:
                raise AssertionError(node)

    def _union(self, rdds: list[RDD[Any]]) -> RDD[Any]:
        if not rdds:
            return self._context.parallelize([], 1)
        return rdds[0] if len(rdds) == 1 else self._context.union(rdds)

    def _shuffle(self, node: ShuffleNode) -> RDD[bytes]:
        """Bring packed rows to their shards, by the means of `RDD.partitionBy`, which would pickle
        every row in a list and pass unions through another Python worker.
        """
        from pyspark import RDD
        from pyspark.serializers import NoOpSerializer

        pairs = []
        for source in _flat(node.input):
            keyed: Any = self._rdd(source).mapPartitions(
                partial(to_pairs, node.shards, self._blobs)
            )
            keyed._bypass_serializer = True  # noqa: SLF001 - items are bytes already
            _ = keyed._jrdd  # noqa: SLF001 - which sets its serializer
            pairs.append(keyed)
        if not pairs:
            return self._context.parallelize([], node.shards)
        union = self._union(pairs)
        jvm: Any = self._context._jvm  # noqa: SLF001
        java_pairs = jvm.PairwiseRDD(union._jrdd.rdd()).asJavaPairRDD()  # noqa: SLF001
        partitioner = jvm.PythonPartitioner(node.shards, id(node))
        values = jvm.PythonRDD.valueOfPair(java_pairs.partitionBy(partitioner))
        return RDD(values, self._context, NoOpSerializer())


def _flat(node: JobNode) -> list[JobNode]:
    """The inputs of nested unions; without heartbeats, since an RDD's shuffle runs every shard."""
    if isinstance(node, UnionNode) and not node.is_shared:
        return [leaf for source in node.sources for leaf in _flat(source)]
    return [] if isinstance(node, HeartbeatNode) else [node]


def _numbers(items: Iterable[int]) -> Iterator[pa.RecordBatch]:
    settle_worker()
    yield pa.record_batch({"id": pa.array(list(items), pa.int64())})


def _read_shard(
    function: TaskFunction,
    shards: int,
    directory: Path | None,
    shard: int,
    items: Iterable[bytes],
) -> Iterator[pa.RecordBatch]:
    settle_worker()
    rows = from_items(directory, items)
    return function(chain([heartbeat_of(shard, shards)], rows))


def _drain(items: Iterable[Any]) -> None:
    for _ in items:
        pass
