"""What failures cost with a million keys of state: a task that is retried, a restart without the
local store; and what an idle pipeline costs.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa

import headrace as hr
from benchmarks.report import Result, limited, note
from headrace.engine.shard import ShardFunction
from headrace.log.api import Log
from headrace.runtime.runner import Runner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KEYS, ROWS_A_BATCH = 1_000_000, 100_000
IDLE_SECONDS = 20.0


@dataclass(frozen=True)
class DyingShard(ShardFunction):
    """A shard whose worker is killed once, when its state is stored and its report is not: the
    worst moment, since the local store is then one batch ahead.
    """

    marker: str = ""

    def _report(self, shard: int, report: dict[str, Any]) -> None:
        try:
            Path(self.marker).touch(exist_ok=False)
        except FileExistsError:
            super()._report(shard, report)
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def pipeline() -> hr.Pipeline:
    made = hr.Pipeline("recovery")
    rows = made.topic("rows", schema="k BIGINT, v BIGINT", key="k", partitions=2)
    made.write(
        "totals", rows.group_by("k").aggregate(n=hr.agg.count(), s=hr.agg.sum("v")), partitions=2
    )
    return made


def feed(log: Log, keys: np.ndarray[Any, Any]) -> None:
    with log.producer("rows") as producer:
        for first in range(0, len(keys), 100_000):
            chosen = keys[first : first + 100_000]
            producer.append(pa.table({"k": chosen, "v": np.ones(len(chosen), np.int64)}))


def batch_seconds(runner: Runner, rng: np.random.Generator) -> float:
    feed(runner.log, rng.integers(0, KEYS, ROWS_A_BATCH))
    runner.cut()
    started = time.perf_counter()
    while runner.step():
        continue
    return time.perf_counter() - started


def with_a_retry(runner: Runner, rng: np.random.Generator, root: Path) -> float:
    """One batch in which a worker is killed behind the commit of its local store."""
    marker = root / f"died-{time.monotonic_ns()}"
    with patch(
        "headrace.runtime.job_builder.ShardFunction",
        lambda stage, context: DyingShard(stage, context, str(marker)),
    ):
        seconds = batch_seconds(runner, rng)
    assert marker.exists()
    return seconds


def cpu_seconds() -> float:
    """Processor time of this process and all its children, the JVM and Spark's workers included."""
    ticks = os.sysconf("SC_CLK_TCK")
    tree, found = {os.getpid()}, True
    stats = [
        path.read_text().rsplit(")", 1)
        for path in Path("/proc").glob("[0-9]*/stat")
        if _readable(path)
    ]
    parsed = [(int(head.split(" ", 1)[0]), tail.split()) for head, tail in stats]
    while found:
        more = {pid for pid, fields in parsed if int(fields[1]) in tree} - tree
        tree, found = tree | more, bool(more)
    return sum((int(fields[11]) + int(fields[12])) / ticks for pid, fields in parsed if pid in tree)


def _readable(path: Path) -> bool:
    try:
        path.read_text()
    except OSError:
        return False
    return True


def idle_share(runner: Runner) -> float:
    """The share of a core that a pipeline takes when nothing comes in, in percent."""
    stop = threading.Event()
    running = threading.Thread(target=runner.run, kwargs={"stop": stop}, daemon=True)
    running.start()
    time.sleep(5)
    before, started = cpu_seconds(), time.perf_counter()
    time.sleep(IDLE_SECONDS)
    share = 100 * (cpu_seconds() - before) / (time.perf_counter() - started)
    stop.set()
    running.join()
    return share


def results() -> Iterator[Result]:
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
    spark = hr.spark("bench", master="local[2,4]", driver_memory="4g")
    root = Path(tempfile.mkdtemp(prefix="bench-recovery-"))
    try:
        yield from _results(root, spark)
    finally:
        shutil.rmtree(root, ignore_errors=True)
        spark.stop()


def _results(root: Path, spark: SparkSession) -> Iterator[Result]:
    log, rng = hr.open_log(f"file:{root / 'log'}"), np.random.default_rng(5)
    runner = Runner.start(pipeline().plan(), log, spark, root / "state")
    feed(log, rng.permutation(KEYS))
    runner.cut()
    while runner.step():
        continue
    calm = statistics.median([batch_seconds(runner, rng) for _ in range(7)][2:])
    retried = statistics.median(with_a_retry(runner, rng, root) for _ in range(3))
    note(f"a batch takes {calm:.2f} s, one with a killed worker {retried:.2f} s")
    params = {"keys": KEYS, "rows": ROWS_A_BATCH}
    yield limited(
        "recovery",
        "a retried task with 1 million keys of state, more than undisturbed",
        "s",
        max(0.0, retried - calm),
        limit=2,
        params=params,
    )
    runner.close()
    shutil.rmtree(root / "state" / "local")
    runner = Runner.start(pipeline().plan(), log, spark, root / "state")
    rebuilt = batch_seconds(runner, rng)
    note(f"the first batch without the local store takes {rebuilt:.2f} s")
    yield limited(
        "recovery",
        "a restart without the local store, 1 million keys, more than undisturbed",
        "s",
        max(0.0, rebuilt - calm),
        limit=10,
        params=params,
    )
    yield limited(
        "recovery",
        "an idle pipeline",
        "% of a core",
        idle_share(runner),
        limit=5,
        params={"seconds": IDLE_SECONDS},
    )
    runner.close()
    log.close()
