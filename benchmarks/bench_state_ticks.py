"""Catching up over many small ticks that were recorded and not worked on: a batch takes in many of
them, and still emits each tick's changes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from benchmarks.report import Result, judged, note
from benchmarks.state_runs import Run, count_and_sum, directory, dropped, random_rows, session

TICKS, ROWS_A_TICK, KEYS = 10_000, 10, 10_000
AT_LEAST = 300


def append_ticks(run: Run) -> None:
    """Rows that were appended one tick's worth after the other."""
    rng = np.random.default_rng(1)
    with run.log.producer("rows") as producer:
        for _ in range(TICKS):
            producer.append(random_rows(rng, ROWS_A_TICK, KEYS))


def results() -> Iterator[Result]:
    note(f"state_ticks: {TICKS:,} ticks of {ROWS_A_TICK} rows")
    with (
        session() as spark,
        directory() as root,
        Run(dropped(count_and_sum().plan()), root, spark) as run,
    ):
        run.batch(random_rows(np.random.default_rng(2), 1000, KEYS))
        append_ticks(run)
        cut = 0
        started = time.perf_counter()
        while more := run.runner.cut(max_rows=ROWS_A_TICK):
            cut += more
        note(f"{cut:,} ticks cut in {time.perf_counter() - started:.1f} s")
        assert cut == TICKS
        started = time.perf_counter()
        while run.runner.step():
            continue
        took_s = time.perf_counter() - started
    yield judged(
        "state_ticks",
        "catching up over 10,000 small ticks, one stage",
        "ticks/s",
        TICKS / took_s,
        "limit",
        AT_LEAST,
        bar=1.0,
        better="higher",
        params={"ticks": TICKS, "rows": ROWS_A_TICK, "keys": KEYS},
    )
