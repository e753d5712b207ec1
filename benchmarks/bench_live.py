"""A live pipeline: what a small batch costs, how long rows take to be visible, how fast small ticks
are worked on beside one large one, how soon a run starts, and what an idle one costs.

Everything is measured beside Spark itself in the same session, or beside ourselves with one large
tick.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.bench_demo import ShopRun, seconds_to_move
from benchmarks.bench_joins import joined_streams, sides
from benchmarks.bench_latency import our_latencies, spark_batches
from benchmarks.report import Result, judged, limited, note
from benchmarks.state_runs import (
    Run,
    append,
    count_and_sum,
    directory,
    dropped,
    random_rows,
    session,
)
from headrace.runtime.query import MAX_TICKS_A_BATCH
from headrace.runtime.runner import Runner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SHOP_ROWS_A_SECOND, SHOP_BATCHES, SHOP_WARM_UP = 800, 30, 8
ROWS, ROWS_A_TICK, KEYS = 1_000_000, 50_000, 100_000
IDLE_SECONDS = 30.0
BARE_START = """
import sys, time
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark.range(0, 10, 1, 1).mapInArrow(lambda batches: batches, "id BIGINT").collect()
"""


def results() -> Iterator[Result]:
    with session() as spark, directory() as root:
        yield from shop_batch(root / "shop", spark)
        yield from visible(root / "visible", spark)
        yield from small_ticks_of_an_aggregate(root / "aggregate", spark)
        yield from small_ticks_of_a_join(root / "join", spark)
        yield from idle(root / "idle", spark)
    yield from start()


# The shop's batch


def shop_batch(root: Path, spark: SparkSession) -> Iterator[Result]:
    """A batch takes in what came while the one before it ran, at least half a second's worth."""
    note(f"live: {SHOP_BATCHES} batches of the shop at about {SHOP_ROWS_A_SECOND} rows/s")
    root.mkdir()
    run = ShopRun(root, spark, orders_a_second=SHOP_ROWS_A_SECOND // 2, width="auto")
    took_s: list[float] = []
    bare_s: list[float] = []
    for number in range(SHOP_WARM_UP + SHOP_BATCHES):
        run.pass_time(max(0.5, took_s[-1] if took_s else 0.5))
        began_s = time.perf_counter()
        run.test.settle()
        took_s.append(time.perf_counter() - began_s)
        if number >= SHOP_WARM_UP:
            bare_s.append(bare_job(spark))
    run.test.close()
    batch_s = took_s[SHOP_WARM_UP:]
    note(
        f"live: batches {[round(each, 2) for each in sorted(batch_s)]} s,"
        f" bare jobs {[round(each, 3) for each in sorted(bare_s)]} s"
    )
    yield judged(
        "live",
        "the shop's batch at 800 rows/s, median",
        "s",
        statistics.median(batch_s),
        "a bare Spark job of one Python task",
        statistics.median(bare_s),
        bar=1 / 4,
        better="lower",
        params={"batches": SHOP_BATCHES},
    )


def bare_job(spark: SparkSession) -> float:
    """Seconds of a Spark job with one task, whose Python function does nothing."""
    began_s = time.perf_counter()
    spark.range(0, 1, 1, 1).mapInArrow(lambda batches: batches, "id BIGINT").collect()
    return time.perf_counter() - began_s


# From append to visible


def visible(root: Path, spark: SparkSession) -> Iterator[Result]:
    theirs_ms = statistics.median(spark_batches(root, spark, python_operator=True))
    ours_ms = our_latencies(root, spark)
    p50_ms, p99_ms = statistics.median(ours_ms), float(np.percentile(ours_ms, 99))
    note(f"live: visible after {p50_ms:.0f} ms, p99 {p99_ms:.0f} ms; Spark {theirs_ms:.0f} ms")
    yield judged(
        "live",
        "append to visible in a view, 10,000 rows/s, p50",
        "ms",
        p50_ms,
        "micro-batch of a Spark query with a Python operator",
        theirs_ms,
        bar=1 / 1.5,
        better="lower",
    )
    yield limited(
        "live",
        "append to visible in a view, p99 over p50",
        "times",
        p99_ms / p50_ms,
        limit=2.0,
        params={"p99_ms": p99_ms},
    )


# Small ticks beside one large one

TickPolicy = tuple[int, int]
"""Rows a tick, and ticks a batch at most."""
AT_ONCE, ONE_BY_ONE, TOGETHER = (ROWS, 1), (ROWS_A_TICK, 1), (ROWS_A_TICK, MAX_TICKS_A_BATCH)
TICK_POLICIES: tuple[TickPolicy, ...] = (AT_ONCE, ONE_BY_ONE, TOGETHER)


def small_ticks_of_an_aggregate(root: Path, spark: SparkSession) -> Iterator[Result]:
    rng = np.random.default_rng(1)
    rates: dict[TickPolicy, list[float]] = {policy: [] for policy in TICK_POLICIES}
    with Run(dropped(count_and_sum().plan()), root, spark) as run:
        run.batch(random_rows(rng, ROWS, KEYS))
        for _ in range(3):
            for policy, figures in rates.items():
                rows = random_rows(rng, ROWS, KEYS)
                append(run.log, rows)
                figures.append(ROWS / seconds_of_ticks(run, policy))
    yield from small_ticks_results("a keyed aggregate", rates)


def small_ticks_of_a_join(root: Path, spark: SparkSession) -> Iterator[Result]:
    rates: dict[TickPolicy, list[float]] = {policy: [] for policy in TICK_POLICIES}
    with Run(dropped(joined_streams().plan()), root, spark) as run:
        batch = 0
        for round_number in range(4):
            for policy, figures in rates.items():
                for _ in range(2):
                    left, right = sides(batch)
                    batch += 1
                    append(run.log, left, "lefts")
                    append(run.log, right, "rights")
                rate = ROWS / seconds_of_ticks(run, policy)
                if round_number:
                    figures.append(rate)
    yield from small_ticks_results("a join of two streams", rates)


def seconds_of_ticks(run: Run, policy: TickPolicy) -> float:
    """Seconds until all rows are worked on."""
    rows_a_tick, max_ticks = policy
    began_s = time.perf_counter()
    run.runner.cut(max_rows=rows_a_tick)
    while run.runner.step_ahead(max_ticks=max_ticks):
        continue
    return time.perf_counter() - began_s


def small_ticks_results(what: str, rates: dict[TickPolicy, list[float]]) -> Iterator[Result]:
    note(f"live: {what}: {rates}")
    for policy, how in {
        ONE_BY_ONE: "ticks of 50,000 rows, each in a batch of its own",
        TOGETHER: "ticks of 50,000 rows, as many in a batch as a run takes",
    }.items():
        yield judged(
            "live",
            f"{what}, {how}",
            "rows/s",
            statistics.median(rates[policy]),
            "one tick of a million rows",
            statistics.median(rates[AT_ONCE]),
            bar=0.6,
            better="higher",
        )


# An idle run


def idle(root: Path, spark: SparkSession) -> Iterator[Result]:
    """The CPU that a run with the shop's plan takes without rows: of this process, which has the
    runner, and of its children, which are the JVM and the workers.
    """
    root.mkdir()
    run = ShopRun(root, spark, orders_a_second=SHOP_ROWS_A_SECOND // 2, width="auto")
    run.pass_time(1.0)
    run.test.settle()
    runner: Runner = run.test.runner
    stop = threading.Event()
    running = threading.Thread(target=runner.run, kwargs={"stop": stop}, daemon=True)
    running.start()
    time.sleep(5.0)
    before_s = cpu_seconds(os.getpid())
    time.sleep(IDLE_SECONDS)
    share = (cpu_seconds(os.getpid()) - before_s) / IDLE_SECONDS
    stop.set()
    running.join()
    run.test.close()
    yield limited(
        "live",
        "an idle run with the shop's plan",
        "% of a core",
        100 * share,
        limit=3.0,
        params={"seconds": IDLE_SECONDS},
    )


def cpu_seconds(process: int) -> float:
    """The CPU time of a process and of all its descendants."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
            ticks[int(path.parent.name)] = int(fields[11]) + int(fields[12])

    def total(number: int) -> int:
        return ticks.get(number, 0) + sum(total(child) for child in children.get(number, ()))

    return total(process) / os.sysconf("SC_CLK_TCK")


# Starting


def start() -> Iterator[Result]:
    ours_s: list[float] = []
    theirs_s: list[float] = []
    for _ in range(3):
        ours_s.append(seconds_to_move())
        began_s = time.perf_counter()
        subprocess.run([sys.executable, "-c", BARE_START], check=True, capture_output=True)
        theirs_s.append(time.perf_counter() - began_s)
    note(f"live: first order counted after {ours_s} s, bare Spark {theirs_s} s")
    yield judged(
        "live",
        "from `headrace demo` to the first order counted",
        "s",
        statistics.median(ours_s),
        "a bare script with one mapInArrow job",
        statistics.median(theirs_s),
        bar=1 / 1.25,
        better="lower",
    )
