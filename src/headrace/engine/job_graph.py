"""The job graph: what one batch computes, as plain data, before it is decided how Spark runs it.

`runtime.job_builder` makes the graph from the plan. There are three ways to run it, with the same
functions in the same order, and so with the same results:

- `run_whole`: in the memory of one task, node after node; for small batches, which cost less than
  starting a second task
- as RDDs of packed rows (`runtime.spark_jobs`): tasks and shuffles, without Spark SQL's planning
- as DataFrames (`runtime.spark_jobs`): where Spark SQL computes some of the steps, or the session
  is one of Spark Connect, which has no RDDs

    Ranges ──> Map(read, pack) ──> Shuffle ──> Map(shard) ──> Shuffle ──> Map(write topic)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

import pyarrow as pa

from headrace.engine.shuffle import blobs_stay_here, heartbeat_of, shard_of

Batches = Iterable[pa.RecordBatch]
TaskFunction = Callable[[Batches], Iterator[pa.RecordBatch]]


@dataclass(eq=False)
class JobNode:
    """Rows of a job, as Arrow batches."""

    is_shared: bool = field(default=False, kw_only=True)
    """Whether several nodes read it, so that it is computed once and kept for the others."""

    @property
    def inputs(self) -> tuple[JobNode, ...]:
        return ()


@dataclass(eq=False)
class OneInputNode(JobNode):
    """Rows that are made of those of one other node."""

    input: JobNode

    @property
    def inputs(self) -> tuple[JobNode, ...]:
        return (self.input,)


@dataclass(eq=False)
class RangesNode(JobNode):
    """The numbers of the topic ranges that a reader reads, or of the partitions that are copied to,
    for some tasks: `id` from 0 on.
    """

    count: int
    tasks: int


@dataclass(eq=False)
class MapNode(OneInputNode):
    """The rows that a function makes of the rows of its input, task by task."""

    function: TaskFunction
    schema: str
    """The rows' columns, as Spark writes them."""


@dataclass(eq=False)
class UnionNode(JobNode):
    """The rows of all inputs."""

    sources: tuple[JobNode, ...]

    @property
    def inputs(self) -> tuple[JobNode, ...]:
        return self.sources


@dataclass(eq=False)
class ShuffleNode(OneInputNode):
    """Packed rows, brought to the shard of their label. Every shard runs, also one without rows."""

    shards: int


@dataclass(eq=False)
class HeartbeatNode(JobNode):
    """A packed row without a blob for each shard: through it, a DataFrame's shuffle runs shards
    that have no rows. Other shuffles run all their shards anyhow.
    """

    shards: int


@dataclass(eq=False)
class SqlNode(OneInputNode):
    """Rows that Spark SQL computes: the columns `select`, or the rows `where` a condition is true.
    `failed` is a condition whose rows are counted.
    """

    step: str
    select: tuple[str, ...] = ()
    where: str | None = None
    failed: str | None = None


def nodes(root: JobNode) -> Iterator[JobNode]:
    """All nodes of a graph, each once, inputs first."""
    seen: set[int] = set()

    def visit(node: JobNode) -> Iterator[JobNode]:
        if id(node) not in seen:
            seen.add(id(node))
            for source in node.inputs:
                yield from visit(source)
            yield node

    yield from visit(root)


def sql_steps(root: JobNode) -> list[str]:
    """The names of the steps that Spark SQL computes."""
    return sorted({node.step for node in nodes(root) if isinstance(node, SqlNode)})


# A whole job in one task


def run_whole(root: JobNode) -> None:
    """Run a graph in this process. Everything in front of a shuffle ends before anything behind it
    begins, as in Spark: shards need the event times that all readers have reported.
    """
    kept: dict[int, list[pa.RecordBatch]] = {}
    with blobs_stay_here():
        for _ in _rows(root, kept):
            pass


def _rows(node: JobNode, kept: dict[int, list[pa.RecordBatch]]) -> Batches:
    if not node.is_shared:
        return _compute(node, kept)
    if id(node) not in kept:
        kept[id(node)] = list(_compute(node, kept))
    return kept[id(node)]


def _compute(node: JobNode, kept: dict[int, list[pa.RecordBatch]]) -> Batches:
    match node:
        case RangesNode():
            return [pa.record_batch({"id": pa.array(range(node.count), pa.int64())})]
        case MapNode(input=ShuffleNode() as shuffle):
            by_shard = _shuffle(shuffle, kept)
            return chain.from_iterable(node.function(rows) for rows in by_shard)
        case MapNode():
            return node.function(_rows(node.input, kept))
        case HeartbeatNode():
            return ()
        case UnionNode():
            return chain.from_iterable(_rows(source, kept) for source in node.sources)
        case _:
            raise AssertionError(node)


def _shuffle(
    node: ShuffleNode, kept: dict[int, list[pa.RecordBatch]]
) -> Iterable[list[pa.RecordBatch]]:
    by_shard: list[list[pa.RecordBatch]] = [
        [heartbeat_of(shard, node.shards)] for shard in range(node.shards)
    ]
    for batch in _rows(node.input, kept):
        labels = batch.column("label").to_pylist()
        for row, label in enumerate(labels):
            by_shard[shard_of(label, node.shards)].append(batch.slice(row, 1))
    return by_shard
