"""The first five minutes: how long `headrace demo` takes to its first moving number; what an open
dashboard costs the pipeline; whether the dashboard's memory stays flat.

`DEMO_BENCH_MINUTES` says for how long memory is watched: 10, unless it says otherwise.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

from shop_demo.showing import shop_file
from shop_demo.world import DATABASE, World, clock_us, make_database

from benchmarks.report import Result, judged, limited, note
from benchmarks.state_runs import directory, session
from headrace.pipeline.loader import run_file
from headrace.serve.server import start
from headrace.testing.pipelines import PipelineTest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HEADRACE = [sys.executable, "-m", "headrace.cli"]
MOVED_S, GROWTH, KEPT = 20.0, 1.1, 0.9
ORDERS_A_SECOND, SECONDS_A_BATCH, BATCHES, ROUNDS = 2_000, 20, 2, 5
MINUTES = float(os.environ.get("DEMO_BENCH_MINUTES", "10"))
SAMPLE_EVERY_S = 2.0


def results() -> Iterator[Result]:
    yield from soon("a number that moves on the dashboard", seconds_to_be_seen)
    yield from soon("the first order that is counted", seconds_to_move)
    yield from open_dashboard()
    yield from memory()


# From the command to the first moving number


def soon(what: str, seconds: Callable[[], float]) -> Iterator[Result]:
    figures = [seconds() for _ in range(3)]
    note(f"{what}: {[round(each, 1) for each in figures]} s")
    yield limited(
        "demo",
        f"from `headrace demo` to {what}",
        "s",
        statistics.median(figures),
        limit=MOVED_S,
        params={"runs": len(figures)},
    )


def seconds_to_be_seen() -> float:
    """As a browser sees it: the dashboard is there before Spark is, and shows how topics grow."""
    began_s = time.perf_counter()
    with running("demo", "--port", "0", "--no-open") as demo:
        address = said_by(demo, r"(http://127\.0\.0\.1:\d+)")
        first = seen = offsets_shown(address)
        while seen == first:
            time.sleep(0.1)
            seen = offsets_shown(address)
        return time.perf_counter() - began_s


def offsets_shown(address: str) -> dict[str, int]:
    with urlopen(f"{address}/dashboard/facts", timeout=30) as answer:
        return {topic["name"]: topic["end"] for topic in json.load(answer)["topics"]}


def seconds_to_move() -> float:
    """With the start of the process; the demo itself counts from a little later."""
    began_s = time.perf_counter()
    with subprocess.Popen(
        [*HEADRACE, "demo", "--for", "1s", "--port", "0"], stdout=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        moved_s = next(
            time.perf_counter() - began_s for line in demo.stdout if "numbers move" in line
        )
        note("".join(demo.stdout).strip().splitlines()[-1])
    assert demo.returncode == 0
    return moved_s


# The pipeline with the dashboard open, and without


@contextmanager
def watched(port: int) -> Iterator[list[int]]:
    """While somebody has the dashboard open; afterwards, how much came."""
    came: list[int] = []
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.dashboard_client", str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
        yield came
        client.stdin.close()
        came.append(int(client.stdout.readline()))


class ShopRun:
    """The shop's pipeline, batch by batch, with the demo's world in a time of its own."""

    def __init__(
        self,
        root: Path,
        spark: SparkSession,
        *,
        orders_a_second: float = ORDERS_A_SECOND,
        width: str = "auto",
    ) -> None:
        os.environ["SHOP_HOME"] = str(root)
        make_database(root / DATABASE)
        shop = run_file(shop_file())
        shop.database.run(log=f"file:{root / 'log'}", until_caught_up=True)
        self.test = PipelineTest(shop.shop, root, spark, width=width)
        self.world = World(self.test.log, shop, root, clock_us(), orders_a_second=orders_a_second)

    def rows_a_second(self) -> float:
        return statistics.median(self._batch() for _ in range(BATCHES))

    def _batch(self) -> float:
        before = self._rows()
        self.pass_time(SECONDS_A_BATCH)
        rows, began_s = self._rows() - before, time.perf_counter()
        self.test.settle()
        return rows / (time.perf_counter() - began_s)

    def pass_time(self, seconds: float) -> None:
        """Let the world do what it does in so many seconds."""
        self.test.pass_time(timedelta(seconds=seconds))
        self.world.step(clock_us() + self.test._passed_us)  # noqa: SLF001

    def _rows(self) -> int:
        return sum(
            outbox.sender.rows
            for outbox in (
                self.world.devices.orders,
                self.world.devices.searches,
                self.world.devices.clicks,
            )
        )


def open_dashboard() -> Iterator[Result]:
    note(
        f"demo: {ROUNDS} rounds of {BATCHES} batches of about {ORDERS_A_SECOND * SECONDS_A_BATCH:,}"
        " orders, and searches and clicks, with the dashboard open and closed"
    )
    closed, opened = list[float](), list[float]()
    with session() as spark, directory() as root:
        run = ShopRun(root, spark)
        run.rows_a_second()
        with start(run.test.state, run.test.log) as server:
            for number in range(ROUNDS):
                for is_open in (number % 2 == 0, number % 2 == 1):
                    with ExitStack() as stack:
                        came = stack.enter_context(watched(server.port)) if is_open else [1]
                        (opened if is_open else closed).append(run.rows_a_second())
                    assert came[0] > 0
        run.test.close()
    note(f"closed {list(map(round, closed))}, open {list(map(round, opened))}")
    yield judged(
        "demo",
        "the shop's pipeline with the dashboard open",
        "rows/s",
        statistics.median(opened),
        "dashboard closed",
        statistics.median(closed),
        bar=KEPT,
        better="higher",
    )


# Memory of a process that serves the dashboard


def memory() -> Iterator[Result]:
    note(f"demo: memory of a dashboard that is open for {MINUTES:g} minutes")
    with (
        directory() as root,
        running("demo", "--keep", str(root / "shop"), "--no-open", "--port", "0") as demo,
    ):
        said_by(demo, r"numbers move")
        with running(
            "dashboard", str(root / "shop" / "shop.state"), "--no-open", "--port", "0"
        ) as serving:
            port = int(said_by(serving, r"http://127\.0\.0\.1:(\d+)"))
            with watched(port) as came:
                samples = list(sampled(serving.pid))
            assert came[0] > 0
    third = len(samples) // 3
    middle, last = (
        statistics.median(samples[third : 2 * third]),
        statistics.median(samples[2 * third :]),
    )
    note(f"MiB, now and then: {[round(each) for each in samples[:: max(1, len(samples) // 12)]]}")
    yield judged(
        "demo",
        f"memory of the dashboard, the last third of {MINUTES:g} minutes",
        "MiB",
        last,
        "the middle third",
        middle,
        bar=1 / GROWTH,
        better="lower",
    )


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([*HEADRACE, *arguments], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.terminate()
        process.communicate(timeout=120)


def said_by(process: subprocess.Popen[str], pattern: str) -> str:
    """The first thing that a process says which fits, or its first group."""
    assert process.stdout is not None
    return next(
        found[found.lastindex or 0]
        for line in process.stdout
        if (found := re.search(pattern, line))
    )


def sampled(process: int) -> Iterator[float]:
    """The process's memory, in MiB."""
    until_s = time.monotonic() + MINUTES * 60
    while time.monotonic() < until_s:
        status = Path(f"/proc/{process}/status").read_text()
        yield int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024
        time.sleep(SAMPLE_EVERY_S)
