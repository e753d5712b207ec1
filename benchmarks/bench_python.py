"""Python inside: a user's function against the same expression in Arrow and against Spark's pandas
UDF, a processor against a built-in aggregate and against Spark's `transformWithState`, and calls
that are recorded (`recorded_calls`).

Functions and processors run over the same topics, end to end: read from the log, computed, and the
rows dropped where they would be written (`state_runs`). PYTHON_ROWS=100000 is a short form.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

import headrace as hr
from benchmarks.recorded_calls import recorded_calls
from benchmarks.report import Result, Unavailable, judged, note
from benchmarks.state_runs import Run, append, directory, dropped, new_log, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = int(os.environ.get("PYTHON_ROWS", "1000000"))
"""Rows of a batch; of the processors, each of another key."""
ROUNDS = 5
SPARK_ROWS = ROWS // 5
"""Rows and keys of a batch of `transformWithState`, which takes most of a minute for them."""
WARM_UP_ROWS = (500, 500)
SCHEMA = "k BIGINT, v DOUBLE, at TIMESTAMP"
TIMER = timedelta(hours=1)


def rows_of_all_keys(rng: np.random.Generator, rows: int, batch: int) -> pa.Table:
    """A row of each key, in another order each time."""
    seconds = np.full(rows, 1_700_000_000 + batch) * 1_000_000
    return pa.table(
        {
            "k": rng.permutation(rows),
            "v": rng.random(rows),
            "at": pa.array(seconds, pa.timestamp("us", "UTC")),
        }
    )


# Functions


@hr.udf("DOUBLE", name="bench_gross")
def gross(amount: pa.Array) -> pa.Array:
    return pc.add(pc.multiply(amount, 1.2), 3.0)


def one_step(expression: str) -> hr.Pipeline:
    """All rows are computed, and none is left to be written."""
    pipeline = hr.Pipeline("bench")
    rows = pipeline.topic("rows", schema=SCHEMA, key="k", partitions=2)
    none = rows.with_columns(gross=expression).where("gross < 0")
    pipeline.write("none", none, partitions=2)
    return pipeline


def functions(root: Path, spark: SparkSession) -> Iterator[Result]:
    """A vectorised function in `with_columns`."""
    note(f"python: a vectorised function over {ROWS:,} rows a batch")
    rng = np.random.default_rng(1)
    sides = {"ours": "bench_gross(v)", "arrow": "v * 1.2 + 3.0"}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    runs = {name: Run(one_step(text).plan(), root / name, spark) for name, text in sides.items()}
    for batch in range(ROUNDS + 1):
        rows = rows_of_all_keys(rng, ROWS, batch)
        for name in sides if batch % 2 else reversed(sides):
            rates[name].append(ROWS / runs[name].batch(rows))
    for run in runs.values():
        run.__exit__()
    ours, arrow = (statistics.median(rates[name][1:]) for name in sides)
    params = {"rows": ROWS, "batches": ROUNDS}
    yield judged(
        "python",
        f"a vectorised function in with_columns, {ROWS:,} rows a batch",
        "rows/s",
        ours,
        "the same expression in Arrow",
        arrow,
        bar=0.8,
        better="higher",
        params=params,
    )
    yield judged(
        "python",
        f"a vectorised function in with_columns, {ROWS:,} rows a batch",
        "rows/s",
        ours,
        "Spark's pandas UDF in a streaming query over the topic",
        pandas_udf_rate(root / "spark", spark),
        bar=3.0,
        better="higher",
        params=params,
    )


def pandas_udf_rate(root: Path, spark: SparkSession) -> float:
    from pyspark.sql.pandas import functions as pandas_functions

    pandas_udf: Any = pandas_functions.pandas_udf

    def spark_gross(amount: pd.Series) -> pd.Series:
        return amount * 1.2 + 3.0

    function = pandas_udf(spark_gross, "double")
    rng = np.random.default_rng(1)
    rates = []
    with new_log(root) as log:
        log.create_topic("rows", SCHEMA, key="k", partitions=2)
        source = read_topic(spark, log.address)
        computed = source.withColumn("gross", function(source["v"])).where("gross < 0")
        for batch in range(ROUNDS + 1):
            append(log, rows_of_all_keys(rng, ROWS, batch))
            rates.append(ROWS / streamed_s(computed, root / "checkpoint"))
    return statistics.median(rates[1:])


def read_topic(spark: SparkSession, address: str) -> Any:
    return (
        spark.readStream.format("headrace")
        .option("log", address)
        .option("topic", "rows")
        .option("columns", "k,v,at")
        .load()
    )


def streamed_s(frame: Any, checkpoint: Path) -> float:
    """How long Spark's batches over the new rows take, without the start of the query."""
    query = (
        frame.writeStream.outputMode("update" if frame.isStreaming else "append")
        .format("noop")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    took_ms = sum(
        int(each.durationMs["triggerExecution"])
        for each in query.recentProgress
        if each.numInputRows
    )
    return took_ms / 1000


# Processors


class Counts(hr.Processor):
    """A count and a timer of each key, by columns."""

    output = "k BIGINT, n BIGINT"
    n = hr.state("BIGINT", default=0)
    quiet = hr.timer()

    def on_rows(self, rows: pa.Table, ctx: Any) -> pa.Table:
        ctx["n"] = pc.add(ctx["n"], ctx.per_key(rows["v"], "count"))
        ctx["quiet"] = pc.add(ctx.per_key(rows["at"], "last"), pa.scalar(TIMER))
        return pa.table({"k": ctx.keys["k"], "n": ctx["n"]})

    def on_timer(self, keys: pa.Table, ctx: Any) -> None:  # noqa: ARG002 - the timer's keys
        ctx.forget()


class EachCounts(hr.Processor, each_key=True):
    """The same, a row at a time."""

    output = "k BIGINT, n BIGINT"
    n = hr.state("BIGINT", default=0)
    quiet = hr.timer()

    def on_row(self, row: dict[str, Any], ctx: Any) -> None:
        ctx["n"] += 1
        ctx["quiet"] = row["at"] + TIMER
        ctx.emit(k=row["k"], n=ctx["n"])

    def on_timer(self, key: dict[str, Any], ctx: Any) -> None:  # noqa: ARG002 - the timer's key
        ctx.forget()


def counting(kind: str) -> hr.Pipeline:
    pipeline = hr.Pipeline("bench")
    rows = pipeline.topic("rows", schema=SCHEMA, key="k", partitions=2, event_time="at")
    counts: dict[str, Callable[[], Any]] = {
        "columns": lambda: rows.process(Counts, key="k"),
        "each": lambda: rows.process(EachCounts, key="k"),
        "aggregate": lambda: rows.group_by("k").aggregate(
            n=hr.agg.count(), newest=hr.agg.max("at")
        ),
    }
    pipeline.write("counts", counts[kind](), partitions=2)
    return pipeline


def our_rates(root: Path, spark: SparkSession, kinds: tuple[str, ...]) -> dict[str, float]:
    """Rows a second of each kind, batch by batch in turn."""
    rng = np.random.default_rng(1)
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    runs = {kind: Run(dropped(counting(kind).plan()), root / kind, spark) for kind in kinds}
    for batch in range(ROUNDS + 1):
        rows = rows_of_all_keys(rng, ROWS, batch)
        for kind in kinds if batch % 2 else reversed(kinds):
            rates[kind].append(ROWS / runs[kind].batch(rows))
    for run in runs.values():
        run.__exit__()
    return {kind: statistics.median(found[1:]) for kind, found in rates.items()}


def stateful_processor() -> Any:
    """A count and a timer of each key, as Spark has them."""
    from pyspark.sql import Row
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    class SparkCounts(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.handle = handle
            self.n = handle.getValueState("n", "n BIGINT")

        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:  # noqa: ARG002, N802, N803 - Spark's names
            (count,) = self.n.get() if self.n.exists() else (0,)
            at_ms = 0
            for row in rows:
                count, at_ms = count + 1, int(row["at"].timestamp() * 1000)
            for timer in self.handle.listTimers():
                self.handle.deleteTimer(timer)
            self.handle.registerTimer(at_ms + 3_600_000)
            self.n.update((count,))
            yield Row(k=key[0], n=count)

        def handleExpiredTimer(self, key: Any, timerValues: Any, info: Any) -> Iterator[Any]:  # noqa: ARG002, N802, N803 - Spark's names
            self.n.clear()
            return iter(())

        def close(self) -> None:
            pass

    return SparkCounts()


def spark_rate(root: Path, spark: SparkSession) -> float:
    """One batch of `transformWithState`, after small ones that warm it up."""
    rng = np.random.default_rng(1)
    took_s = 0.0
    with new_log(root) as log:
        log.create_topic("rows", SCHEMA, key="k", partitions=2)
        grouped: Any = read_topic(spark, log.address).withWatermark("at", "0 seconds").groupBy("k")
        counted = grouped.transformWithState(
            stateful_processor(), "k BIGINT, n BIGINT", "Update", "EventTime"
        )
        for batch, rows in enumerate((*WARM_UP_ROWS, SPARK_ROWS)):
            append(log, rows_of_all_keys(rng, rows, batch))
            took_s = streamed_s(counted, root / "checkpoint")
    return SPARK_ROWS / took_s


def processors(root: Path, spark: SparkSession) -> Iterator[Result]:
    """A count and a timer a key."""
    if missing := [
        name
        for name in ("grpc", "google.rpc", "zstandard")
        if find_spec(name.split(".")[0]) is None
    ]:
        raise Unavailable(
            f"transformWithState needs {', '.join(missing)}: pip install 'headrace[connect]'"
        )
    note(f"python: processors, {ROWS:,} rows of as many keys a batch")
    rates = our_rates(root, spark, ("columns", "aggregate", "each"))
    theirs = spark_rate(root / "spark", spark)
    peer = "Spark transformWithState in Python"
    for kind, against, figure, bar in (
        ("columns", "count() and max() of group_by", rates["aggregate"], 0.5),
        ("columns", peer, theirs, 30.0),
        ("each", peer, theirs, 5.0),
    ):
        form = "by columns" if kind == "columns" else "with each_key=True"
        yield judged(
            "python",
            f"a processor {form}: count and timer a key, {ROWS:,} keys",
            "rows/s",
            rates[kind],
            against,
            figure,
            bar=bar,
            better="higher",
            params={"rows": ROWS, "keys": ROWS, "batches": ROUNDS, "spark_rows": SPARK_ROWS},
        )


def results() -> Iterator[Result]:
    for part in (functions, processors):
        with session() as spark, directory() as root:
            yield from part(root, spark)
    yield from recorded_calls()
