"""State of windows is freed: over 500 batches whose windows come and go, what is kept on disk and
in memory does not grow, the last hundred batches against the hundred before.

A run sweeps files that nobody needs any more only after some minutes; here that is done before each
look. All this runs in a process of its own: `python -m benchmarks.bench_windows_memory` prints what
was seen, every fifth batch.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

import headrace as hr
from benchmarks.bench_state_memory import memory_mib
from benchmarks.report import Result, judged, note
from benchmarks.state_runs import Run, directory
from headrace.runtime.runner import Maintenance

BATCHES, ROWS, KEYS = 500, 2_000, 500
SLACK = 1.1
START_US, MINUTE_US = 1_767_225_600_000_000, 60_000_000
WHAT = {
    "state": "size of the state's files",
    "driver": "memory of the driver",
    "JVM": "memory of the JVM",
    "workers": "memory of the workers",
}


def windows() -> hr.Pipeline:
    """Of each kind, keyed; a minute of event time a batch, corrections for ten."""
    pipeline = hr.Pipeline("bench")
    times = hr.EventTime("at", delay="10 seconds", idle="1 day")
    rows = pipeline.topic(
        "rows", schema="k BIGINT, v BIGINT, at TIMESTAMP", key="k", event_time=times, partitions=2
    )
    for name, window in (
        ("minutes", hr.tumbling("1 minute")),
        ("visits", hr.session("30 seconds")),
        ("moving", hr.sliding("2 minutes")),
    ):
        totals = (
            rows.window(window, late=hr.late.correct("10 minutes"))
            .group_by("k")
            .aggregate(n=hr.agg.count(), s=hr.agg.sum("v"))
        )
        pipeline.write(name, totals, partitions=2)
    return pipeline


def rows_of(batch: int) -> pa.Table:
    rng = np.random.default_rng(batch)
    us = START_US + batch * MINUTE_US + rng.integers(-2 * MINUTE_US, MINUTE_US, ROWS)
    return pa.table(
        {
            "k": rng.integers(0, KEYS, ROWS),
            "v": rng.integers(0, 1000, ROWS),
            "at": pa.array(us, pa.timestamp("us", "UTC")),
        }
    )


def state_mib(root: Path) -> float:
    return (
        sum(path.stat().st_size for path in (root / "state" / "steps").rglob("*") if path.is_file())
        / 2**20
    )


def main() -> None:
    remember = {
        f"spark.{of}": 50
        for of in (
            "ui.retainedJobs",
            "ui.retainedStages",
            "ui.retainedTasks",
            "sql.ui.retainedExecutions",
        )
    }
    spark = hr.spark(
        "bench",
        master="local[2]",
        driver_memory="1g",
        config={**remember, "spark.sql.shuffle.partitions": 2},
    )
    with directory() as root, Run(windows().plan(), root, spark) as run:
        sweeper = Maintenance(run.runner, fixed_shards=True).sweeper
        sweeper.older_than_s = 1.0
        for batch in range(BATCHES):
            run.batch(rows_of(batch))
            if batch % 5 == 4:
                sweeper.finish()
                print(json.dumps({**memory_mib(spark), "state": state_mib(root)}), flush=True)
    spark.stop()


def results() -> Iterator[Result]:
    note(
        f"windows_memory: {BATCHES} batches of {ROWS:,} rows, {KEYS:,} keys, a minute each;"
        " tumbling, session and sliding windows"
    )
    output = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_windows_memory"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    seen = [json.loads(line) for line in output.splitlines()]
    for who, what in WHAT.items():
        before, after = (
            statistics.median(each[who] for each in part) for part in (seen[-40:-20], seen[-20:])
        )
        yield judged(
            "windows_memory",
            f"{what} after {BATCHES} batches",
            "MiB",
            after,
            "100 batches before",
            before,
            bar=1 / SLACK,
            better="lower",
            params={"batches": BATCHES, "rows": ROWS, "keys": KEYS},
        )


if __name__ == "__main__":
    main()
