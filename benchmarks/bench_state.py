"""Running count and sum per key: the engine beside Spark's own keyed state, from the same topic through our source on both sides."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

import headrace as hr
from benchmarks.report import Result, judged, note
from headrace.log.file.log import FileLog
from headrace.pipeline.runner import Runner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCHES, WARM_UP = 8, 2


def pipeline() -> hr.Pipeline:
    made = hr.Pipeline("bench")
    rows = made.topic("rows", schema="k BIGINT, v BIGINT", key="k", partitions=2)
    made.write("totals", rows.group_by("k").aggregate(n=hr.agg.count(), s=hr.agg.sum("v")), partitions=2)
    return made


def append_rows(log: FileLog, rng: np.random.Generator, rows: int, keys: int) -> None:
    with log.producer("rows") as producer:
        for first in range(0, rows, 100_000):
            count = min(100_000, rows - first)
            producer.append(pa.table({"k": rng.integers(0, keys, count), "v": rng.integers(0, 1000, count)}))


def our_rates(root: Path, spark: SparkSession, rows: int, keys: int, batches: int) -> list[float]:
    """Rows a second of each batch, from the tick to the commit."""
    log = FileLog(root / "log")
    runner = Runner(pipeline().plan(), log, spark, root / "state")
    rng = np.random.default_rng(1)
    rates = []
    for _ in range(batches):
        append_rows(log, rng, rows, keys)
        runner.cut(most_rows=rows)
        started = time.perf_counter()
        while runner.step():
            continue
        rates.append(rows / (time.perf_counter() - started))
    runner.close()
    log.close()
    return rates


def spark_rates(root: Path, spark: SparkSession, rows: int, keys: int, batches: int) -> list[float]:
    """The same by `groupBy().agg()` in update mode, RocksDB with changelog checkpointing."""
    log = FileLog(root / "spark-log")
    log.create_topic("rows", "k BIGINT, v BIGINT", key="k", partitions=2)
    rng = np.random.default_rng(1)
    for _ in range(batches):
        append_rows(log, rng, rows, keys)
    source = (
        spark.readStream.format("headrace")
        .option("log", log.address)
        .option("topic", "rows")
        .option("columns", "k,v")
        .option("maxRowsPerBatch", rows)
    )
    counted = source.load().groupBy("k").agg({"*": "count", "v": "sum"})
    query = (
        counted.writeStream.outputMode("update")
        .format("noop")
        .option("checkpointLocation", str(root / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    progress = [each for each in query.recentProgress if each.numInputRows]
    log.close()
    return [each.numInputRows / each.durationMs["triggerExecution"] * 1000 for each in progress]


def results() -> Iterator[Result]:
    spark = hr.spark("bench", master="local[2]", driver_memory="4g")
    for what, rows, keys, bar in (
        ("running count and sum, 1 million rows a batch, 1 million keys", 1_000_000, 1_000_000, 4.0),
        ("running count and sum, 1 million rows a batch, 10,000 keys", 1_000_000, 10_000, 0.7),
    ):
        root = Path(tempfile.mkdtemp(prefix="bench-state-"))
        try:
            note(f"state: {what}")
            ours = our_rates(root, spark, rows, keys, BATCHES)[WARM_UP:]
            theirs = spark_rates(root, spark, rows, keys, BATCHES)[WARM_UP:]
            note(f"ours {[round(rate) for rate in ours]}, Spark {[round(rate) for rate in theirs]}")
            yield judged(
                "state", what, "rows/s", statistics.median(ours), "Spark groupBy().agg(), RocksDB", statistics.median(theirs), bar=bar, better="higher",
                params={"rows": rows, "keys": keys, "batches": BATCHES - WARM_UP},
            )  # fmt: skip
        finally:
            shutil.rmtree(root, ignore_errors=True)
    spark.stop()
