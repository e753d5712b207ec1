"""Windows over event time, batch by batch: the engine against Spark's own window aggregation in
append mode, from the same topic through our source on both sides.

Both have the same delay, RocksDB keeps Spark's state with changelog checkpointing, and rows are
dropped behind both (`state_runs`). A batch has the rows of a minute, in disorder. Spark has no
windows that slide with each row: those are held against our own running aggregate without
combining; corrections against the same without late rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa

import headrace as hr
from benchmarks.report import Result, judged, note
from benchmarks.state_runs import Run, append, directory, dropped, new_log, session
from headrace.operators.windows.late_policy import LatePolicy
from headrace.operators.windows.specs import WindowSpec

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

BATCHES, WARM_UP = 8, 2
ROWS = 1_000_000
FEW_KEYS, MANY_KEYS = 10_000, 1_000_000
SCHEMA = "k BIGINT, v BIGINT, at TIMESTAMP"
START_US, MINUTE_US, SECOND_US = 1_767_225_600_000_000, 60_000_000, 1_000_000
DELAY = "10 seconds"
LATE_SHARE = 0.01
Rows = Callable[[int], pa.Table]
"""The rows of a batch."""


def _table(keys: Any, us: Any, rng: np.random.Generator) -> pa.Table:
    return pa.table(
        {
            "k": keys,
            "v": rng.integers(0, 1000, len(keys)),
            "at": pa.array(us, pa.timestamp("us", "UTC")),
        }
    )


def minutes(keys: int, late: float = 0.0) -> Rows:
    """Random keys and times within the batch's minute; a share of them up to half an hour late."""

    def rows(batch: int) -> pa.Table:
        rng = np.random.default_rng(batch)
        us = START_US + batch * MINUTE_US + rng.integers(0, MINUTE_US, ROWS)
        us -= np.where(rng.random(ROWS) < late, rng.integers(MINUTE_US, 30 * MINUTE_US, ROWS), 0)
        return _table(rng.integers(0, keys, ROWS), us, rng)

    return rows


def bursts(keys: int) -> Rows:
    """Each key has its rows within five seconds of the batch's minute, somewhere: visits that
    end.
    """

    def rows(batch: int) -> pa.Table:
        rng = np.random.default_rng(batch)
        key = rng.integers(0, keys, ROWS)
        begins = rng.integers(0, 50 * SECOND_US, keys)
        return _table(
            key,
            START_US + batch * MINUTE_US + begins[key] + rng.integers(0, 5 * SECOND_US, ROWS),
            rng,
        )

    return rows


# Ours


def windowed(window: WindowSpec | None, late: LatePolicy | None = None) -> hr.Pipeline:
    """Count and sum by key; without a window, running."""
    pipeline = hr.Pipeline("bench")
    times = hr.EventTime("at", delay=DELAY, idle="1 day")
    rows = pipeline.topic("rows", schema=SCHEMA, key="k", event_time=times, partitions=2)
    grouped: Any = (
        rows.group_by("k") if window is None else rows.window(window, late=late).group_by("k")
    )
    pipeline.write("totals", grouped.aggregate(n=hr.agg.count(), s=hr.agg.sum("v")))
    return pipeline


def our_rates(
    pipeline: hr.Pipeline, root: Path, spark: SparkSession, rows: Rows, *, first: int = 0
) -> list[float]:
    """Rows a second of each batch, from the tick to the commit."""
    with Run(dropped(pipeline.plan()), root, spark) as run:
        return [ROWS / run.batch(rows(batch)) for batch in range(first, first + BATCHES)][WARM_UP:]


# Spark's


def spark_rates(root: Path, spark: SparkSession, rows: Rows, window: Column) -> list[float]:
    from pyspark.sql import functions as f

    with new_log(root) as log:
        log.create_topic("rows", SCHEMA, key="k", partitions=2)
        for batch in range(BATCHES):
            append(log, rows(batch))
        source = (
            spark.readStream.format("headrace")
            .option("log", log.address)
            .option("topic", "rows")
            .option("columns", "k,v,at")
        )
        timed = source.option("maxRowsPerBatch", ROWS).load().withWatermark("at", DELAY)
        counted = timed.groupBy(window, "k").agg(f.count("*").alias("n"), f.sum("v").alias("s"))
        writer = (
            counted.writeStream.outputMode("append")
            .format("noop")
            .option("checkpointLocation", str(root / "checkpoint"))
        )
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        batches = [each for each in query.recentProgress if each.numInputRows]
    return [each.numInputRows / each.durationMs["triggerExecution"] * 1000 for each in batches][
        WARM_UP:
    ]


def against_spark(
    spark: SparkSession,
    what: str,
    window: WindowSpec,
    theirs: Column,
    rows: Rows,
    keys: int,
    bar: float,
) -> Result:
    with directory() as root:
        ours = our_rates(windowed(window), root / "ours", spark, rows)
        spark_s = spark_rates(root / "theirs", spark, rows, theirs)
    return _judged(what, ours, "Spark's own, append mode, RocksDB", spark_s, keys, bar)


def _judged(
    what: str, ours: list[float], peer: str, theirs: list[float], keys: int, bar: float
) -> Result:
    note(f"{what}: ours {list(map(round, ours))}, {peer} {list(map(round, theirs))}")
    params = {"rows": ROWS, "keys": keys, "batches": BATCHES - WARM_UP}
    return judged(
        "windows",
        what,
        "rows/s",
        statistics.median(ours),
        peer,
        statistics.median(theirs),
        bar=bar,
        better="higher",
        params=params,
    )


# Ours against ours


def sliding_against_running(spark: SparkSession) -> Result:
    """A result for each row, against a running total of each key, for which no row is combined
    before the shuffle.
    """
    rows = minutes(FEW_KEYS)
    with directory() as root:
        ours = our_rates(windowed(hr.sliding("10 minutes")), root / "sliding", spark, rows)
        with patch("headrace.runtime.query.ROWS_A_KEY_TO_COMBINE", ROWS):
            running = our_rates(windowed(None), root / "running", spark, rows)
    return _judged(
        "sliding windows", ours, "our running aggregate, not combined", running, FEW_KEYS, bar=0.5
    )


def corrected_against_in_time(spark: SparkSession) -> Result:
    """Windows that are kept for an hour, with one row of a hundred late and with none."""
    with directory() as root:
        pipeline = windowed(hr.tumbling("1 minute"), hr.late.correct("1 hour"))
        late = our_rates(pipeline, root / "late", spark, minutes(FEW_KEYS, LATE_SHARE))
        in_time = our_rates(pipeline, root / "in_time", spark, minutes(FEW_KEYS))
    return _judged(
        "tumbling windows with corrections, 1% of the rows late",
        late,
        "the same without late rows",
        in_time,
        FEW_KEYS,
        bar=1 / 1.5,
    )


def results() -> Iterator[Result]:
    from pyspark.sql import functions as f

    with session() as spark:
        minute, tumbling = f.window("at", "1 minute"), hr.tumbling("1 minute")
        yield against_spark(
            spark,
            "tumbling count and sum, 10,000 keys",
            tumbling,
            minute,
            minutes(FEW_KEYS),
            FEW_KEYS,
            bar=0.7,
        )
        yield against_spark(
            spark,
            "tumbling count and sum, 1 million keys",
            tumbling,
            minute,
            minutes(MANY_KEYS),
            MANY_KEYS,
            bar=2.0,
        )
        gap = f.session_window("at", DELAY)
        yield against_spark(
            spark,
            "session windows, 10,000 keys",
            hr.session(DELAY),
            gap,
            bursts(FEW_KEYS),
            FEW_KEYS,
            bar=2.0,
        )
        yield sliding_against_running(spark)
        yield corrected_against_in_time(spark)
