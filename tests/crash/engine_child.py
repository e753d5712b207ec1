"""A runner of a pipeline in a process of its own, to be killed. Run as a program: it goes on where
the ledger says, one tick a batch, until all ticks are done. Batches run in one task or wide, at
random, and the next one is computed while the one before it commits.

The plan says for some ticks at which point (`headrace/testing/fault_points.py`) which process is to
be killed: the worker or driver that passes it ("self"), or while somebody passes it the driver
("driver"), its JVM ("jvm") or the executor of a cluster ("executor"). Each is done once, however
often the program is started. If its JVM dies, the program starts another, as a run does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import headrace as hr
from headrace.log.spark.session import forget_ended
from headrace.runtime.failures import SparkLost
from headrace.runtime.runner import Runner
from headrace.testing.fault_points import RUNNING_AHEAD
from tests.crash.inject.arming import armed
from tests.e2e.bank import bank
from tests.e2e.joined import joined
from tests.e2e.patterned import patterned
from tests.e2e.searched import searched

Plan = Mapping[int, tuple[str, str]]  # tick -> (point, whom)
GROUPS = 500


def numbers(name: str) -> hr.Pipeline:
    """Numbered rows: all of them again in a topic and in a view, and totals of them in both. `name`
    keeps runs on one broker apart.
    """
    pipeline = hr.Pipeline(name)
    rows = pipeline.topic(
        f"{name}.numbers", schema="n BIGINT, k BIGINT, v BIGINT", key="n", partitions=2
    )
    totals = rows.group_by("k").aggregate(n=hr.agg.count(), s=hr.agg.sum("v"), name="totals")
    pipeline.write(f"{name}.totals", totals, partitions=2)
    pipeline.view("totals", totals)
    pipeline.write(f"{name}.copy", rows.key_by("n"), partitions=2)
    pipeline.view("numbers", rows.to_table("n", name="newest"))
    return pipeline


def windows(name: str) -> hr.Pipeline:
    """Minutes that late rows correct, hours made of them, and rows that are too late for
    five-minute windows in a topic of their own.
    """
    pipeline = hr.Pipeline(name)
    times = hr.EventTime("at", delay="5 seconds", producer="device", idle="1 day")
    rows = pipeline.topic(
        f"{name}.rows",
        schema="n BIGINT, k BIGINT, device STRING, at TIMESTAMP",
        key="n",
        event_time=times,
        partitions=2,
    )
    minutes = (
        rows.window(hr.tumbling("1 minute"), late=hr.late.correct("1 hour"))
        .group_by("k")
        .aggregate(n=hr.agg.count(), s=hr.agg.sum("n"), name="minutes")
    )
    pipeline.view("minutes", minutes)
    pipeline.write(f"{name}.minutes", minutes, partitions=2)
    hours = minutes.window(
        hr.tumbling("1 hour"), late=hr.late.correct("1 day"), emit="changes"
    ).aggregate(n=hr.agg.sum("n"), s=hr.agg.sum("s"), name="hours")
    pipeline.view("hours", hours)
    visits = (
        rows.window(hr.session("2 seconds"), late=hr.late.divert(f"{name}.late"))
        .group_by("device")
        .aggregate(n=hr.agg.count(), name="visits")
    )
    pipeline.view("visits", visits)
    return pipeline


PIPELINES: dict[str, Callable[[str], hr.Pipeline]] = {
    "numbers": numbers,
    "bank": bank,
    "windows": windows,
    "joined": joined,
    "patterned": patterned,
    "searched": searched,
}


LOCAL = "local[2,4]"
"""Two cores; a task may fail three times."""


def run(
    kind: str, name: str, log: str, state: Path, plan: Plan, *, master: str, width: str
) -> None:
    with hr.open_log(log) as opened:
        while True:
            spark = hr.spark("crash", master=master, driver_memory="512m")
            runner = Runner.start(PIPELINES[kind](name).plan(), opened, spark, state, shards=2)
            try:
                run_batches(runner, plan, width)
            except SparkLost:
                print("Spark has ended. Starting it again.")
                forget_ended(spark)
            else:
                runner.close()
                return


def run_batches(runner: Runner, plan: Plan, width: str) -> None:
    chance = random.Random(os.getpid())
    worked = True
    while worked:
        runner.leading.width.pin(chance.choice(("one", "wide")) if width == "mixed" else width)
        point, _ = plan.get(runner.tick + 1, (None, None))
        try:
            if point is None or point in RUNNING_AHEAD:
                arm(plan, runner.tick + 1)
                worked = runner.step_ahead(1)
            else:
                runner.discard_ahead()
                arm(plan, runner.tick + 1)
                worked = runner.step(1)
        except Exception as error:
            runner.check_spark(error)
            raise


def arm(plan: Plan, tick: int) -> None:
    if tick in plan:
        point, whom = plan[tick]
        if not armed(point).with_suffix(".struck").exists():
            armed(point).write_text(whom)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=PIPELINES)
    parser.add_argument("name")
    parser.add_argument("log")
    parser.add_argument("state", type=Path)
    parser.add_argument("plan", type=json.loads)
    parser.add_argument("--master", default=LOCAL)
    parser.add_argument("--width", default="mixed")
    chosen = parser.parse_args()
    os.environ["HEADRACE_DRIVER"] = str(os.getpid())
    run(
        chosen.kind,
        chosen.name,
        chosen.log,
        chosen.state,
        {int(tick): tuple(each) for tick, each in chosen.plan.items()},
        master=chosen.master,
        width=chosen.width,
    )


if __name__ == "__main__":
    main()
