"""Running count and sum of each key, batch by batch: the engine against Spark's own keyed state,
from the same topic through our source on both sides.

Rows are dropped behind both (`state_runs`). Of Spark's 1 million rows a batch come as many updates
as there are keys in it; of ours, what each key was and what it is. A line without a bar shows what
it costs to have these changes in a derived topic as well, which is more than Spark's side does.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.report import Result, judged, note
from benchmarks.state_runs import (
    SCHEMA,
    Run,
    append,
    count_and_sum,
    directory,
    dropped,
    new_log,
    random_rows,
    session,
)
from headrace.plan.plan import PipelinePlan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCHES, WARM_UP = 8, 2
ROWS = 1_000_000
SPARK = "Spark groupBy().agg(), RocksDB"


def our_rates(
    plan: PipelinePlan, root: Path, spark: SparkSession, keys: int, batches: int = BATCHES
) -> list[float]:
    """Rows a second of each batch, from the tick to the commit."""
    rng = np.random.default_rng(1)
    with Run(plan, root, spark) as run:
        return [ROWS / run.batch(random_rows(rng, ROWS, keys)) for _ in range(batches)][WARM_UP:]


def spark_rates(root: Path, spark: SparkSession, keys: int, batches: int = BATCHES) -> list[float]:
    """The peer: count and sum by `groupBy().agg()` in update mode, RocksDB with changelog
    checkpointing.
    """
    rng = np.random.default_rng(1)
    with new_log(root) as log:
        log.create_topic("rows", SCHEMA, key="k", partitions=2)
        for _ in range(batches):
            append(log, random_rows(rng, ROWS, keys))
        source = (
            spark.readStream.format("headrace")
            .option("log", log.address)
            .option("topic", "rows")
            .option("columns", "k,v")
        )
        counted = (
            source.option("maxRowsPerBatch", ROWS)
            .load()
            .groupBy("k")
            .agg({"*": "count", "v": "sum"})
        )
        writer = (
            counted.writeStream.outputMode("update")
            .format("noop")
            .option("checkpointLocation", str(root / "checkpoint"))
        )
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        progress = [each for each in query.recentProgress if each.numInputRows]
    return [each.numInputRows / each.durationMs["triggerExecution"] * 1000 for each in progress][
        WARM_UP:
    ]


def warm_up(spark: SparkSession) -> None:
    """A JVM gets quicker for a minute, whatever it does first: so neither side is the first."""
    with directory() as root:
        our_rates(dropped(count_and_sum().plan()), root / "ours", spark, 100_000, batches=3)
        spark_rates(root / "theirs", spark, 100_000, batches=3)


def against_spark(spark: SparkSession, what: str, keys: int, bar: float) -> Iterator[Result]:
    with directory() as root:
        ours = our_rates(dropped(count_and_sum().plan()), root / "ours", spark, keys)
        theirs = spark_rates(root / "theirs", spark, keys)
        written = our_rates(count_and_sum().plan(), root / "written", spark, keys)
    note(
        f"ours {list(map(round, ours))}, Spark {list(map(round, theirs))}, ours with a topic"
        f" {list(map(round, written))}"
    )
    params = {"rows": ROWS, "keys": keys, "batches": BATCHES - WARM_UP}
    for name, rates, needed in (
        (what, ours, bar),
        (f"{what}, changes in a topic too", written, 0.0),
    ):
        yield judged(
            "state",
            name,
            "rows/s",
            statistics.median(rates),
            SPARK,
            statistics.median(theirs),
            bar=needed,
            better="higher",
            params=params,
        )


def results() -> Iterator[Result]:
    with session() as spark:
        warm_up(spark)
        yield from against_spark(
            spark,
            "running count and sum, 1 million rows a batch, 1 million keys",
            1_000_000,
            bar=4.0,
        )
        yield from against_spark(
            spark, "running count and sum, 1 million rows a batch, 10,000 keys", 10_000, bar=0.7
        )
