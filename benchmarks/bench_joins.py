"""Joins of streams: two streams within a time bound against Spark's own join of streams, and rows
joined with versions of a table against the keyed aggregate.

Both sides of the first read the same topics through our source, with the same watermark and bounds;
rows are dropped behind both, as in `bench_state`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

import headrace as hr
from benchmarks.bench_state import ROWS as AGGREGATE_ROWS
from benchmarks.bench_state import our_rates as aggregate_rates
from benchmarks.report import Result, judged, note
from benchmarks.state_runs import Run, append, count_and_sum, directory, dropped, new_log, session
from headrace.log.file.log import FileLog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCHES, WARM_UP, ROWS_A_SIDE = 6, 2, 250_000
MINUTE_US = 60_000_000
BATCH_US = 10 * MINUTE_US
START_US = 1_767_225_600_000_000
LEFT, RIGHT = "id BIGINT, a BIGINT, at TIMESTAMP", "id BIGINT, b BIGINT, at TIMESTAMP"
KEYS, VERSIONS, VERSIONED_ROWS = 1_000, 100, 2_000_000


def times(us: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pa.Array:
    return pa.array(us, pa.timestamp("us", "UTC"))


def sides(batch: int) -> tuple[pa.Table, pa.Table]:
    """Distinct keys; half of the left rows have a partner, within four minutes."""
    rng, first = np.random.default_rng(batch), batch * 2 * ROWS_A_SIDE
    ids = first + rng.permutation(ROWS_A_SIDE)
    at = START_US + batch * BATCH_US + rng.integers(0, BATCH_US - 5 * MINUTE_US, ROWS_A_SIDE)
    other = np.where(np.arange(ROWS_A_SIDE) % 2 == 0, ids, ids + ROWS_A_SIDE)
    later = at + rng.integers(0, 4 * MINUTE_US, ROWS_A_SIDE)
    values = rng.integers(0, 1_000, ROWS_A_SIDE)
    return pa.table({"id": ids, "a": values, "at": times(at)}), pa.table(
        {"id": other, "b": values, "at": times(later)}
    )


def joined_streams() -> hr.Pipeline:
    made = hr.Pipeline("bench")
    time = hr.EventTime("at", delay="1 minute")
    left = made.topic("lefts", schema=LEFT, key="id", event_time=time, partitions=2)
    right = made.topic("rights", schema=RIGHT, key="id", event_time=time, partitions=2)
    made.write(
        "pairs",
        left.join(
            right, on="id", before="0 seconds", after="5 minutes", how="left", suffix="_right"
        ),
    )
    return made


def our_rates(root: Path, spark: SparkSession) -> list[float]:
    """Input rows a second of each batch, both sides together."""
    rates = []
    with Run(dropped(joined_streams().plan()), root, spark) as run:
        for batch in range(BATCHES):
            left, right = sides(batch)
            append(run.log, right, "rights")
            rates.append(2 * ROWS_A_SIDE / run.batch(left, "lefts"))
    return rates[WARM_UP:]


def spark_rates(root: Path, spark: SparkSession) -> list[float]:
    with new_log(root) as log:
        for topic, schema in (("lefts", LEFT), ("rights", RIGHT)):
            log.create_topic(topic, schema, key="id", partitions=2)
        for batch in range(BATCHES):
            for topic, rows in zip(("lefts", "rights"), sides(batch), strict=True):
                append(log, rows, topic)
        return _spark_join(log, root, spark)[WARM_UP:]


def _spark_join(log: FileLog, root: Path, spark: SparkSession) -> list[float]:
    def stream(topic: str, columns: str, name: str) -> object:
        source = (
            spark.readStream.format("headrace")
            .option("log", log.address)
            .option("topic", topic)
            .option("columns", columns)
        )
        return (
            source.option("maxRowsPerBatch", ROWS_A_SIDE)
            .load()
            .withWatermark("at", "1 minute")
            .alias(name)
        )

    from pyspark.sql.functions import expr

    left, right = stream("lefts", "id,a,at", "l"), stream("rights", "id,b,at", "r")
    met = left.join(  # type: ignore[attr-defined]
        right,
        expr("l.id = r.id AND r.at >= l.at AND r.at <= l.at + INTERVAL 5 MINUTES"),
        "leftOuter",
    )
    query = (
        met.writeStream.format("noop")
        .option("checkpointLocation", str(root / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    batches = [each for each in query.recentProgress if each.numInputRows]
    return [each.numInputRows / each.durationMs["triggerExecution"] * 1000 for each in batches]


def versioned() -> hr.Pipeline:
    made = hr.Pipeline("bench")
    orders = made.topic(
        "rows",
        schema="k BIGINT, v BIGINT, at TIMESTAMP",
        key="k",
        event_time=hr.EventTime("at"),
        partitions=2,
    )
    rates = made.table(
        "rates",
        schema="k BIGINT, rate DOUBLE, since TIMESTAMP",
        key="k",
        event_time=hr.EventTime("since"),
        history="3650 days",
    )
    made.write("taxed", orders.join(rates.as_of("at"), on="k"))
    return made


def versioned_rates(root: Path, spark: SparkSession) -> list[float]:
    """Rows a second of batches of a million, once the table is there."""
    rng, span_us = np.random.default_rng(1), VERSIONS * MINUTE_US
    with Run(dropped(versioned().plan()), root, spark) as run:
        keys, since = (
            np.tile(np.arange(KEYS), VERSIONS),
            START_US + np.repeat(np.arange(VERSIONS) * MINUTE_US, KEYS),
        )
        with run.log.producer("rates") as producer:
            producer.upsert(pa.table({"k": keys, "rate": keys * 0.001, "since": times(since)}))
        batches = []
        for _ in range(WARM_UP + VERSIONED_ROWS // AGGREGATE_ROWS):
            at = np.sort(START_US + rng.integers(0, span_us, AGGREGATE_ROWS))
            rows = {
                "k": rng.integers(0, KEYS, AGGREGATE_ROWS),
                "v": rng.integers(0, 1_000, AGGREGATE_ROWS),
                "at": times(at),
            }
            batches.append(AGGREGATE_ROWS / run.batch(pa.table(rows)))
    return batches[WARM_UP:]


def results() -> Iterator[Result]:
    with session() as spark, directory() as root:
        ours, theirs = our_rates(root / "ours", spark), spark_rates(root / "theirs", spark)
        note(f"ours {list(map(round, ours))}, Spark {list(map(round, theirs))}")
        what = (
            f"left join of two streams, distinct keys, half matched, {ROWS_A_SIDE:,} rows a side"
            " and batch"
        )
        peer = "Spark's join of streams, RocksDB"
        params = {"rows_a_side": ROWS_A_SIDE, "batches": BATCHES - WARM_UP}
        yield judged(
            "joins",
            what,
            "rows/s",
            statistics.median(ours),
            peer,
            statistics.median(theirs),
            bar=3.0,
            better="higher",
            params=params,
        )
    with session() as spark, directory() as root:
        ours = versioned_rates(root / "ours", spark)
        theirs = aggregate_rates(dropped(count_and_sum().plan()), root / "theirs", spark, 1_000_000)
        note(f"versioned join {list(map(round, ours))}, keyed aggregate {list(map(round, theirs))}")
        what = f"rows joined with {KEYS:,} keys × {VERSIONS} versions"
        peer = "running count and sum, 1 million keys"
        yield judged(
            "joins",
            what,
            "rows/s",
            statistics.median(ours),
            peer,
            statistics.median(theirs),
            bar=0.7,
            better="higher",
            params={"rows": VERSIONED_ROWS},
        )
