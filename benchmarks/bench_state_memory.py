"""Memory does not grow: driver, JVM and workers over 300 batches with a bounded key set, the last
hundred against the hundred before.

What counts is memory of their own: pages of the local store that a worker has mapped belong to the
system's cache; and of the JVM what is left after it has collected its garbage. Spark remembers its
last thousand jobs; here its last fifty, so that it is done filling that memory in time. All this
runs in a process of its own: `python -m benchmarks.bench_state_memory` prints what was seen, batch
by batch.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import headrace as hr
from benchmarks.report import Result, judged, note
from benchmarks.state_runs import Run, count_and_sum, directory, random_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCHES, ROWS, KEYS = 300, 5_000, 20_000
SLACK = 1.1


def own_kib(process: int) -> int:
    """Anonymous memory of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def descendants(process: int) -> dict[int, str]:
    """All processes below one, with their commands."""
    parents, names = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            name, rest = (path / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
        except OSError:
            continue
        parents[int(path.name)], names[int(path.name)] = int(rest.split()[1]), name
    found: dict[int, str] = {}
    waiting = [process]
    while waiting:
        parent = waiting.pop()
        children = [child for child, its_parent in parents.items() if its_parent == parent]
        found |= {child: names[child] for child in children}
        waiting += children
    return found


def memory_mib(spark: SparkSession) -> dict[str, float]:
    """Of the driver's Python, the JVM's heap, and all workers."""
    below = descendants(os.getpid())
    workers = sum(own_kib(process) for process, name in below.items() if name.startswith("python"))
    jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - there is no other way to ask
    jvm.System.gc()
    runtime = jvm.Runtime.getRuntime()
    return {
        "driver": own_kib(os.getpid()) / 1024,
        "JVM": (runtime.totalMemory() - runtime.freeMemory()) / 2**20,
        "workers": workers / 1024,
    }


def main() -> None:
    """Run the batches; print the memory after every fifth as a line of JSON."""
    rng = np.random.default_rng(1)
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
    with directory() as root, Run(count_and_sum(view=True).plan(), root, spark) as run:
        for number in range(BATCHES):
            run.batch(random_rows(rng, ROWS, KEYS))
            if number % 5 == 4:
                print(json.dumps(memory_mib(spark)), flush=True)
    spark.stop()


def results() -> Iterator[Result]:
    note(
        f"state_memory: {BATCHES} batches of {ROWS:,} rows, {KEYS:,} keys, into a topic and a view"
    )
    output = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_state_memory"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    seen = [json.loads(line) for line in output.splitlines()]
    for who in ("driver", "JVM", "workers"):
        before, after = (
            statistics.median(each[who] for each in part) for part in (seen[-40:-20], seen[-20:])
        )
        yield judged(
            "state_memory",
            f"memory of the {who} after 300 batches",
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
