"""What many producers cost: the newest event time of each is known at every tick, and time goes by
the slowest. A hundred thousand of them against ten.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pyarrow as pa

import headrace as hr
from benchmarks.report import Result, judged, note
from benchmarks.state_runs import Run, directory, dropped, session
from headrace.plan.plan import PipelinePlan

ROWS, KEYS = 500_000, 10_000
BATCHES, WARM_UP = 8, 2
MANY, FEW = 100_000, 10
_MINUTE_US = 60_000_000
_START_US = 1_750_000_000_000_000


def by_minute() -> PipelinePlan:
    """Rows of each key and minute of event time, emitted when every producer has passed it."""
    pipeline = hr.Pipeline("producers")
    schema = "k BIGINT, v BIGINT, device STRING, at TIMESTAMP"
    rows = pipeline.topic(
        "rows",
        schema=schema,
        key="k",
        partitions=2,
        event_time=hr.EventTime("at", delay="10 seconds", producer="device"),
    )
    pipeline.write(
        "minutes",
        rows.window(hr.tumbling("1 minute"))
        .group_by("k")
        .aggregate(n=hr.agg.count(), s=hr.agg.sum("v")),
    )
    return dropped(pipeline.plan())


def readings(rng: np.random.Generator, batch: int, producers: int) -> pa.Table:
    """One minute's rows. Every producer has some in each batch, as long as there are fewer
    producers than rows.
    """
    devices = pa.array(np.char.add("device-", np.arange(producers).astype(str)))
    at = _START_US + batch * _MINUTE_US + rng.integers(0, _MINUTE_US, ROWS)
    columns = {
        "k": rng.integers(0, KEYS, ROWS),
        "v": rng.integers(0, 1000, ROWS),
        "device": devices.take(rng.permutation(ROWS) % producers),
    }
    return pa.table({**columns, "at": pa.array(at, pa.timestamp("us", "UTC"))})


def results() -> Iterator[Result]:
    rng = np.random.default_rng(1)
    with session() as spark, ExitStack() as stack:
        root = stack.enter_context(directory())
        runs = {
            count: stack.enter_context(Run(by_minute(), root / str(count), spark))
            for count in (MANY, FEW)
        }
        took = [
            [run.batch(readings(rng, batch, count)) for count, run in runs.items()]
            for batch in range(BATCHES)
        ]
    note(f"seconds a batch: {[[round(each, 2) for each in batch] for batch in took]}")
    many, few = (statistics.median(side) * 1000 for side in zip(*took[WARM_UP:], strict=True))
    params = {"rows": ROWS, "keys": KEYS, "batches": BATCHES - WARM_UP}
    yield judged(
        "state_producers",
        f"a batch with {MANY:,} producers",
        "ms",
        many,
        f"{FEW} producers",
        few,
        bar=1 / 1.5,
        better="lower",
        params=params,
    )
