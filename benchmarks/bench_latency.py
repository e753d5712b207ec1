"""From append to visible in a view, at 10,000 rows a second through one stage; against a plain
Spark query from the same source to nowhere.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

import headrace as hr
from benchmarks.report import Result, judged, limited, note
from headrace.log.api import Log
from headrace.runtime.runner import Runner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS_A_SECOND, APPENDS_A_SECOND = 10_000, 50
SECONDS, WARM_UP_SECONDS = 30.0, 10.0
KEYS = 1_000


def pipeline() -> hr.Pipeline:
    made = hr.Pipeline("latency")
    rows = made.topic("rows", schema="k BIGINT, number BIGINT", key="k", partitions=2)
    made.view(
        "newest", rows.group_by("k").aggregate(number=hr.agg.max("number"), rows=hr.agg.count())
    )
    return made


class Feed(threading.Thread):
    """Appends at an even pace, and remembers when each append began."""

    def __init__(self, log: Log, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.log, self.stop = log, stop
        self.begun: list[tuple[int, float]] = []  # last number of an append, when it began

    def run(self) -> None:
        count, number, started = ROWS_A_SECOND // APPENDS_A_SECOND, 0, time.perf_counter()
        with self.log.producer("rows") as producer:
            while not self.stop.is_set():
                numbers = np.arange(number, number + count)
                number += count
                self.begun.append((number - 1, time.perf_counter()))
                producer.append(pa.table({"k": numbers * 7919 % KEYS, "number": numbers}))
                time.sleep(
                    max(0.0, started + len(self.begun) / APPENDS_A_SECOND - time.perf_counter())
                )


def our_latencies(root: Path, spark: SparkSession) -> list[float]:
    """Milliseconds from the beginning of each append to the moment a reader of the view sees its
    last row.
    """
    log = hr.open_log(f"file:{root / 'log'}")
    runner = Runner.start(pipeline().plan(), log, spark, root / "state")
    stop = threading.Event()
    running = threading.Thread(target=runner.run, kwargs={"stop": stop}, daemon=True)
    feed = Feed(log, stop)
    seen: list[tuple[int, float]] = []
    running.start()
    feed.start()
    assert runner.views is not None
    deadline = time.perf_counter() + WARM_UP_SECONDS + SECONDS
    while time.perf_counter() < deadline:
        newest = max(runner.views.reader.table("newest")["number"].to_pylist(), default=None)
        if newest is not None and (not seen or newest > seen[-1][0]):
            seen.append((newest, time.perf_counter()))
        time.sleep(0.005)
    stop.set()
    running.join()
    feed.join()
    runner.close()
    log.close()
    return _latencies(feed.begun, seen, after=deadline - SECONDS)


def _latencies(
    begun: list[tuple[int, float]], seen: list[tuple[int, float]], *, after: float
) -> list[float]:
    numbers = np.array([number for number, _ in seen])
    found = [(np.searchsorted(numbers, number), when) for number, when in begun if when >= after]
    return [(seen[at][1] - when) * 1000 for at, when in found if at < len(seen)]


def spark_batches(root: Path, spark: SparkSession, *, python_operator: bool = False) -> list[float]:
    """Milliseconds of each micro-batch of a plain query over the same feed, from the source to
    nowhere; on request, through a Python operator that does nothing.
    """
    root.mkdir(parents=True, exist_ok=True)
    log = hr.open_log(f"file:{root / 'spark-log'}")
    log.create_topic("rows", "k BIGINT, number BIGINT", key="k", partitions=2)
    stop = threading.Event()
    feed = Feed(log, stop)
    feed.start()
    source = spark.readStream.format("headrace").option("log", log.address)
    rows = source.option("topic", "rows").option("columns", "k,number").load()
    if python_operator:
        rows = rows.mapInArrow(lambda batches: batches, "k BIGINT, number BIGINT")
    query = (
        rows.writeStream.format("noop")
        .option("checkpointLocation", str(root / "checkpoint"))
        .start()
    )
    time.sleep(WARM_UP_SECONDS)
    first = query.lastProgress.batchId if query.lastProgress else 0
    time.sleep(SECONDS / 2)
    progress = [each for each in query.recentProgress if each.batchId > first and each.numInputRows]
    query.stop()
    stop.set()
    feed.join()
    log.close()
    return [float(each.durationMs["triggerExecution"]) for each in progress]


def results() -> Iterator[Result]:
    spark = hr.spark("bench", master="local[2]")
    root = Path(tempfile.mkdtemp(prefix="bench-latency-"))
    try:
        theirs = statistics.median(spark_batches(root, spark))
        ours = our_latencies(root, spark)
        median, slow = statistics.median(ours), float(np.percentile(ours, 99))
        note(
            f"append to view: median {median:.0f} ms, p99 {slow:.0f} ms over {len(ours)} appends;"
            f" Spark's micro-batch {theirs:.0f} ms"
        )
        yield judged(
            "latency",
            "append to visible in a view, 10,000 rows/s, median",
            "ms",
            median,
            "median micro-batch of a plain Spark query",
            theirs,
            bar=1 / 6,
            better="lower",
            params={"rows_a_second": ROWS_A_SECOND, "seconds": SECONDS},
        )
        yield limited(
            "latency",
            "append to visible in a view, p99 over median",
            "times",
            slow / median,
            limit=2.5,
            params={"p99_ms": slow},
        )
    finally:
        shutil.rmtree(root, ignore_errors=True)
        spark.stop()
