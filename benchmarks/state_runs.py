"""Pipelines with state, run batch by batch in a directory of their own: what the benchmarks of
state have in common.

Spark's side of these benchmarks ends in its no-op sink, which drops rows. So does ours: an output
that is neither topic nor view has its rows computed, as changes with what was and what is, and
dropped. State is durable and the ledger committed either way.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import pyarrow as pa

import headrace as hr
from headrace.log.file.log import FileLog
from headrace.plan.plan import Output, PipelinePlan
from headrace.runtime.runner import Runner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ROWS_AN_APPEND = 100_000
_MAX_ROWS_A_TICK = 10_000_000
SCHEMA = "k BIGINT, v BIGINT"


@contextmanager
def session() -> Iterator[SparkSession]:
    """Two cores, and as many shuffle partitions."""
    spark = hr.spark("bench", master="local[2]", driver_memory="4g", sql_shuffle_partitions=2)
    yield spark
    spark.stop()


@contextmanager
def directory() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="bench-state-"))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def count_and_sum(*, view: bool = False) -> hr.Pipeline:
    """The running count and sum of each key, as a topic, and as a view if asked for."""
    pipeline = hr.Pipeline("bench")
    rows = pipeline.topic("rows", schema=SCHEMA, key="k", partitions=2)
    totals = rows.group_by("k").aggregate(n=hr.agg.count(), s=hr.agg.sum("v"))
    pipeline.write("totals", totals, partitions=2)
    if view:
        pipeline.view("by_key", totals)
    return pipeline


def dropped(plan: PipelinePlan) -> PipelinePlan:
    """The plan with rows dropped where they would be written."""
    return replace(
        plan, outputs=tuple(Output(name=output.name, input=output.input) for output in plan.outputs)
    )


def random_rows(rng: np.random.Generator, rows: int, keys: int) -> pa.Table:
    return pa.table({"k": rng.integers(0, keys, rows), "v": rng.integers(0, 1000, rows)})


def append(log: FileLog, rows: pa.Table, topic: str = "rows") -> None:
    with log.producer(topic) as producer:
        for first in range(0, rows.num_rows, _ROWS_AN_APPEND):
            producer.append(rows.slice(first, _ROWS_AN_APPEND))


def new_log(root: Path) -> FileLog:
    root.mkdir(parents=True, exist_ok=True)
    return FileLog.open(root / "log")


class Run:
    """A pipeline on an embedded log."""

    def __init__(self, plan: PipelinePlan, root: Path, spark: SparkSession) -> None:
        self.log = new_log(root)
        self.runner = Runner.start(plan, self.log, spark, root / "state")

    def batch(self, rows: pa.Table, topic: str = "rows") -> float:
        """One tick with these rows, and what else has been appended. Returns the seconds from when
        they are in the topic to the commit.
        """
        append(self.log, rows, topic)
        started = time.perf_counter()
        self.runner.cut(max_rows=_MAX_ROWS_A_TICK)
        while self.runner.step():
            continue
        return time.perf_counter() - started

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.close()
        self.log.close()
