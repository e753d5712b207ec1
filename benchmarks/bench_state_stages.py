"""What more stages and uneven keys cost: three chained aggregates by different keys against one,
and half of the rows on 1% of the keys against keys all alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

import headrace as hr
from benchmarks.report import Result, judged, note
from benchmarks.state_runs import Run, count_and_sum, directory, dropped, random_rows, session
from headrace.plan.plan import PipelinePlan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS, KEYS = 1_000_000, 1_000_000
BATCHES, WARM_UP = 7, 2
Rows = Callable[[np.random.Generator], pa.Table]


def chained(stages: int) -> PipelinePlan:
    """A million products, each of one of ten thousand shops, each in one of a hundred towns: sold
    in each product, shop and town.
    """
    pipeline = hr.Pipeline(f"chained{stages}")
    schema = "product BIGINT, shop BIGINT, town BIGINT, v BIGINT"
    rows = pipeline.topic("rows", schema=schema, key="product", partitions=2)
    table = rows.group_by("product", "shop", "town").aggregate(n=hr.agg.count(), s=hr.agg.sum("v"))
    for by in (("shop", "town"), ("town",))[: stages - 1]:
        table = table.group_by(*by).aggregate(n=hr.agg.sum("n"), s=hr.agg.sum("s"))
    pipeline.write("totals", table)
    return dropped(pipeline.plan())


def sales(rng: np.random.Generator) -> pa.Table:
    product = rng.integers(0, KEYS, ROWS)
    return pa.table(
        {
            "product": product,
            "shop": product % 10_000,
            "town": product % 100,
            "v": rng.integers(0, 1000, ROWS),
        }
    )


def uniform(rng: np.random.Generator) -> pa.Table:
    return random_rows(rng, ROWS, KEYS)


def skewed(rng: np.random.Generator) -> pa.Table:
    """Half of the rows have one of 1% of the keys."""
    keys = np.where(
        rng.random(ROWS) < 0.5, rng.integers(0, KEYS // 100, ROWS), rng.integers(0, KEYS, ROWS)
    )
    return pa.table({"k": keys, "v": rng.integers(0, 1000, ROWS)})


def rates(spark: SparkSession, sides: list[tuple[PipelinePlan, Rows]]) -> list[float]:
    """Rows a second of each side; they take turns, batch by batch."""
    rng = np.random.default_rng(1)
    with ExitStack() as stack:
        root = stack.enter_context(directory())
        runs = [
            stack.enter_context(Run(plan, root / str(number), spark))
            for number, (plan, _) in enumerate(sides)
        ]
        took = [
            [run.batch(rows(rng)) for run, (_, rows) in zip(runs, sides, strict=True)]
            for _ in range(BATCHES)
        ]
    note(f"seconds a batch: {[[round(each, 2) for each in batch] for batch in took]}")
    return [ROWS / statistics.median(side) for side in zip(*took[WARM_UP:], strict=True)]


def results() -> Iterator[Result]:
    params = {"rows": ROWS, "keys": KEYS, "batches": BATCHES - WARM_UP}
    with session() as spark:
        note("state_stages: three chained stages with different keys, and one")
        three, one = rates(spark, [(chained(3), sales), (chained(1), sales)])
        yield judged(
            "state_stages",
            "three chained stages, different keys",
            "rows/s",
            three,
            "one stage",
            one,
            bar=0.25,
            better="higher",
            params=params,
        )
        note("state_stages: uneven keys, and even ones")
        totals = dropped(count_and_sum().plan())
        uneven, even = rates(spark, [(totals, skewed), (totals, uniform)])
        yield judged(
            "state_stages",
            "1% of keys with half of the rows",
            "rows/s",
            uneven,
            "uniform keys",
            even,
            bar=0.5,
            better="higher",
            params=params,
        )
