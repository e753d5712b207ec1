"""A pipeline's throughput while its views are served: with a thousand subscribers who hear 100
changes a second, against none. The server is in the runner's process, as `headrace run` has it.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

import headrace as hr
from benchmarks.report import Result, judged, note
from benchmarks.state_runs import SCHEMA, Run, directory, random_rows, session
from headrace.log.file.log import FileLog
from headrace.serve.server import start

SUBSCRIBERS, CHANGES_A_SECOND, APPENDS_A_SECOND = 1_000, 100, 4
ROWS, KEYS, BATCHES, ROUNDS = 400_000, 100_000, 6, 3


def pipeline() -> hr.Pipeline:
    made = hr.Pipeline("bench")
    rows = made.topic("rows", schema=SCHEMA, key="k", partitions=2)
    made.write(
        "totals", rows.group_by("k").aggregate(n=hr.agg.count(), s=hr.agg.sum("v")), partitions=2
    )
    sales = made.topic("sales", schema="k BIGINT, name STRING, amount DOUBLE", key="k")
    made.view("sold", sales.to_table("k"))
    return made


class Feed(threading.Thread):
    """Appends sales at an even pace."""

    def __init__(self, log: FileLog) -> None:
        super().__init__(daemon=True)
        self._log, self.ended = log, threading.Event()

    def run(self) -> None:
        rows, number = CHANGES_A_SECOND // APPENDS_A_SECOND, 0
        with self._log.producer("sales") as producer:
            while not self.ended.wait(1 / APPENDS_A_SECOND):
                keys = np.arange(number, number + rows)
                number += rows
                producer.append(
                    pa.table(
                        {
                            "k": keys,
                            "name": [f"name of {key}" for key in keys.tolist()],
                            "amount": keys * 0.5,
                        }
                    )
                )


@contextmanager
def subscribed(port: int) -> Iterator[list[int]]:
    """While all of them follow; afterwards, how many events came."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.serve_load",
        str(port),
        "/views/sold/changes",
        str(SUBSCRIBERS),
    ]
    events: list[int] = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as clients:
        assert clients.stdin is not None
        assert clients.stdout is not None
        assert clients.stdout.readline() == "ready\n"
        yield events
        clients.stdin.close()
        events.append(int(clients.stdout.readline()))


def rows_a_second(run: Run, rng: np.random.Generator) -> float:
    return statistics.median(ROWS / run.batch(random_rows(rng, ROWS, KEYS)) for _ in range(BATCHES))


def results() -> Iterator[Result]:
    note(
        f"serve_pipeline: {ROUNDS} rounds of {BATCHES} batches of {ROWS:,} rows, without and with"
        f" {SUBSCRIBERS:,} subscribers"
    )
    rng = np.random.default_rng(1)
    alone, followed = list[float](), list[float]()
    with session() as spark, directory() as root, Run(pipeline().plan(), root, spark) as run:
        feed = Feed(run.log)
        feed.start()
        rows_a_second(run, rng)
        with start(root / "state", run.log) as server:
            for _ in range(ROUNDS):
                alone.append(rows_a_second(run, rng))
                with subscribed(server.port) as events:
                    followed.append(rows_a_second(run, rng))
                assert events[0] >= SUBSCRIBERS * (BATCHES - 1), (
                    f"{events[0]:,} events came to {SUBSCRIBERS:,} subscribers"
                )
        feed.ended.set()
        feed.join()
    note(f"alone {list(map(round, alone))}, followed {list(map(round, followed))}")
    what = f"pipeline with {SUBSCRIBERS:,} subscribers at {CHANGES_A_SECOND} changes/s"
    yield judged(
        "serve_pipeline",
        what,
        "rows/s",
        statistics.median(followed),
        "nobody follows",
        statistics.median(alone),
        bar=0.8,
        better="higher",
    )
