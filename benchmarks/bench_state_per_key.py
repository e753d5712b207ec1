"""Running count and sum of each key where Python keeps the state: the engine against Spark's
`transformWithState`, which calls Python once a key.

200,000 rows with as many keys a batch. A batch of Spark's takes most of a minute, so small ones
warm it up and one is measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from benchmarks.report import Result, Unavailable, judged, note
from benchmarks.state_runs import (
    SCHEMA,
    Run,
    append,
    count_and_sum,
    directory,
    dropped,
    new_log,
    session,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 200_000
WARM_UP_ROWS = (500, 500)
BATCHES, WARM_UP = 6, 2


def rows_of_all_keys(rng: np.random.Generator, rows: int) -> pa.Table:
    return pa.table({"k": rng.permutation(rows), "v": rng.integers(0, 1000, rows)})


def our_rates(root: Path, spark: SparkSession) -> list[float]:
    rng = np.random.default_rng(1)
    with Run(dropped(count_and_sum().plan()), root, spark) as run:
        return [ROWS / run.batch(rows_of_all_keys(rng, ROWS)) for _ in range(BATCHES)][WARM_UP:]


def processor() -> Any:
    """A count and a sum as a value of its own for each key."""
    from pyspark.sql import Row
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    class Totals(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.totals = handle.getValueState("totals", "n BIGINT, s BIGINT")

        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:  # noqa: ARG002, N802, N803 - Spark's names
            count, total = self.totals.get() if self.totals.exists() else (0, 0)
            for row in rows:
                count, total = count + 1, total + row.v
            self.totals.update((count, total))
            yield Row(k=key[0], n=count, s=total)

        def close(self) -> None:
            pass

    return Totals()


def spark_rate(root: Path, spark: SparkSession) -> float:
    rng = np.random.default_rng(1)
    with new_log(root) as log:
        log.create_topic("rows", SCHEMA, key="k", partitions=2)
        source = (
            spark.readStream.format("headrace")
            .option("log", log.address)
            .option("topic", "rows")
            .option("columns", "k,v")
            .load()
        )
        grouped: Any = source.groupBy("k")
        counted = grouped.transformWithState(
            processor(), "k BIGINT, n BIGINT, s BIGINT", "Update", "None"
        )
        writer = (
            counted.writeStream.outputMode("update")
            .format("noop")
            .option("checkpointLocation", str(root / "checkpoint"))
        )
        took_ms = 0
        for rows in (*WARM_UP_ROWS, ROWS):
            append(log, rows_of_all_keys(rng, rows))
            query = writer.trigger(availableNow=True).start()
            query.awaitTermination()
            took_ms = sum(
                each.durationMs["triggerExecution"]
                for each in query.recentProgress
                if each.numInputRows
            )
    return ROWS / took_ms * 1000


def results() -> Iterator[Result]:
    if missing := [
        name
        for name in ("grpc", "grpc_status", "google.rpc", "zstandard")
        if find_spec(name.split(".", maxsplit=1)[0]) is None
    ]:
        raise Unavailable(
            f"transformWithState needs {', '.join(missing)}: pip install 'headrace[connect]'"
        )
    note("state_per_key: running count and sum, 200,000 rows a batch, 200,000 keys")
    with session() as spark, directory() as root:
        ours = statistics.median(our_rates(root / "ours", spark))
        theirs = spark_rate(root / "theirs", spark)
    yield judged(
        "state_per_key",
        "running count and sum, 200,000 rows a batch, 200,000 keys",
        "rows/s",
        ours,
        "Spark transformWithState in Python",
        theirs,
        bar=50.0,
        better="higher",
        params={"rows": ROWS, "keys": ROWS, "batches": BATCHES - WARM_UP},
    )
