"""Nexmark: each query over the same events, from an embedded topic to a topic, durable and exactly
once, beside Flink SQL from files to nowhere; with its state on the heap and no checkpoints, and
with RocksDB and exactly-once checkpoints.

`EVENTS=` says how many events, a million if left out; `QUERIES=q4,q9` which queries, q0 to q23 if
left out (`EVENTS=30_000 QUERIES=cep0,cep1,cep2,cep3` for patterns). All of it ends after about
`MINUTES=`, 20 if left out: each side has as many runs as fit, three at most, of which the best
counts. The first run of each side is not counted. Ours is timed from the tick to the last commit,
Flink from the start of its job to its end. With RocksDB, only those queries run that have a bar
there.

What is printed for people is a table. Its CPU seconds are those of all processes of a side, in the
run that took the fewest: they say what a query costs, also on a machine that is not quiet.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.nexmark import flink
from benchmarks.nexmark.events import SCHEMAS, events
from benchmarks.nexmark.flink import FlinkRun
from benchmarks.nexmark.pattern_queries import PATTERNS
from benchmarks.nexmark.queries import QUERIES, Query
from benchmarks.report import Result, Unavailable, judged, limited, note
from benchmarks.state_runs import append, directory, new_log, session
from headrace.log.file.log import FileLog
from headrace.runtime.runner import Runner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVENTS = int(os.environ.get("EVENTS", "1_000_000"))
MINUTES = float(os.environ.get("MINUTES", "20"))
RUNS = 3
BARS_ON_HEAP = dict.fromkeys(("q2", "q11", "q12", "q17"), 1.5)
DURABLE = ("q4", "q5", "q7", "q9", "q11", "q15", "q16", "q17", "q18", "q19", "q20")
IN_TICKS, TICK_ROWS = ("q0", "q4", "q11", "q17", "q19"), 50_000
GROWING, GROWTH, MAX_GROWTH = ("q9", "q18", "q20"), 4, 4.4
STATE_MB = {"q7": 100, "q9": 200, "q18": 100, "q19": 100, "q20": 100}
"""Of a million events."""
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Measured:
    """One run of ours."""

    seconds: float
    cpu_s: float
    state_mb: float


def cpu_seconds() -> float:
    """The CPU time of this process and its descendants, among them Spark's JVM and workers, and of
    those children that have ended.
    """
    parents: dict[int, int] = {}
    times: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        number = int(path.parent.name)
        parents[number], times[number] = int(fields[1]), sum(map(int, fields[11:15]))

    def is_ours(number: int) -> bool:
        while number not in (0, os.getpid()):
            number = parents.get(number, 0)
        return number != 0

    return sum(ticks for number, ticks in times.items() if is_ours(number)) / _CLOCK_TICKS


def filled_log(root: Path, count: int) -> FileLog:
    """A log with the events in their topics, in order of their times."""
    log = new_log(root)
    for name, schema in SCHEMAS.items():
        log.create_topic(name, schema, partitions=2)
    for first in range(0, count, TICK_ROWS):
        part = events(min(TICK_ROWS, count - first), first=first)
        for name, rows in part.tables().items():
            append(log, rows, name)
    return log


def run(
    query: Query, log: FileLog, root: Path, spark: SparkSession, number: int, tick_rows: int
) -> Measured:
    """Answer a query over everything in the log, in ticks of so many rows, a batch for each."""
    name = f"{query.name}-{number}"
    plan = query.pipeline(name=name).plan()
    state = root / name
    runner = Runner.start(plan, log, spark, state)
    try:
        started, cpu_before = time.perf_counter(), cpu_seconds()
        while runner.cut(max_rows=tick_rows):
            continue
        while runner.step_ahead(max_ticks=1):
            continue
        seconds, cpu_s = time.perf_counter() - started, cpu_seconds() - cpu_before
    finally:
        runner.close()
        log.delete_topic(f"{name}.answer")
    files = (state / "steps").glob("*/*.state")
    state_mb = sum(path.stat().st_size for path in files) / 1e6
    shutil.rmtree(state)
    return Measured(seconds, cpu_s, state_mb)


def our_runs(
    query: Query, log: FileLog, root: Path, spark: SparkSession, until_s: float, tick_rows: int
) -> list[Measured]:
    """A warm-up and up to three runs, as long as there is time."""
    runs = [run(query, log, root, spark, 0, tick_rows)]
    while len(runs) < 2 or (len(runs) <= RUNS and time.monotonic() < until_s):
        runs.append(run(query, log, root, spark, len(runs), tick_rows))
    return runs[1:]


def chosen() -> list[Query]:
    """The queries to run. Those of patterns are run when they are named, over fewer events: Flink's
    CEP takes half a minute for 30,000 in `cep3`.
    """
    names = os.environ.get("QUERIES")
    every = {**QUERIES, **PATTERNS}
    return [every[name] for name in (names.split(",") if names else QUERIES)]


def results() -> Iterator[Result]:
    """Ours first, then Flink's, so that neither runs beside the other."""
    queries, begun = chosen(), time.monotonic()
    side_s = MINUTES * 60 / 3
    theirs: dict[str, dict[str, list[FlinkRun]]] = {}
    with directory() as root:
        everything = 10 * EVENTS
        ours: dict[str, list[Measured]] = {}
        in_ticks: dict[str, float] = {}
        with session() as spark:
            with filled_log(root / "whole", EVENTS) as log:
                for number, query in enumerate(queries):
                    until_s = begun + side_s * (number + 1) / len(queries)
                    runs = our_runs(query, log, root / "state", spark, until_s, everything)
                    ours[query.name] = runs
                    note(f"{query.name}: {', '.join(f'{each.seconds:.2f} s' for each in runs)}")
                for query in queries:
                    if query.name in IN_TICKS:
                        ticked = run(query, log, root / "state", spark, 9, TICK_ROWS)
                        in_ticks[query.name] = ticked.seconds
            yield from growth(queries, ours, root, spark)
        try:
            flink.write_files(root / "files", events(EVENTS))
            theirs = their_runs(queries, root / "files", begun)
        except Unavailable as why:
            note(f"Flink SQL: {why}")
    yield from verdicts(queries, ours, theirs, in_ticks)
    for line in table(queries, ours, theirs, in_ticks):
        note(line)


def growth(
    queries: list[Query], ours: dict[str, list[Measured]], root: Path, spark: SparkSession
) -> Iterator[Result]:
    """How much longer four times the events take, in ticks of as many rows as there were."""
    growing = [query for query in queries if query.name in GROWING]
    if not growing:
        return
    with filled_log(root / "more", GROWTH * EVENTS) as log:
        for query in growing:
            more = run(query, log, root / "state", spark, 8, EVENTS)
            times = more.seconds / best(ours[query.name])
            note(f"{query.name}: {more.seconds:.2f} s for {GROWTH * EVENTS:,} events")
            what = f"{query.name}: time of {GROWTH} times the events"
            yield limited("nexmark", what, "times", times, limit=MAX_GROWTH)
    shutil.rmtree(root / "more")


def their_runs(
    queries: list[Query], files: Path, begun: float
) -> dict[str, dict[str, list[FlinkRun]]]:
    """Flink's runs by settings and query, one JVM for each of the settings."""
    found: dict[str, dict[str, list[FlinkRun]]] = {flink.HEAP: {}, flink.ROCKSDB: {}}
    for part, settings in enumerate(found):
        until_s = begun + MINUTES * 60 * (part + 2) / 3
        limit_s = max(until_s - time.monotonic(), 60)
        durable = settings == flink.ROCKSDB
        asked = [
            query
            for query in queries
            if query.flink is not None and (query.name in DURABLE or not durable)
        ]
        if asked:
            found[settings] = flink.measured(
                asked, files, durable=durable, runs=RUNS + 1, limit_s=limit_s
            )
    return found


def best(runs: Sequence[Measured | FlinkRun]) -> float:
    return min(each.seconds for each in runs)


def least_cpu(runs: Sequence[Measured | FlinkRun]) -> float:
    return min(each.cpu_s for each in runs)


def verdicts(
    queries: list[Query],
    ours: dict[str, list[Measured]],
    theirs: dict[str, dict[str, list[FlinkRun]]],
    in_ticks: dict[str, float],
) -> Iterator[Result]:
    for query in queries:
        name, rate = query.name, EVENTS / best(ours[query.name])
        for settings, bar in ((flink.HEAP, BARS_ON_HEAP.get(name, 1.0)), (flink.ROCKSDB, 2.0)):
            runs = theirs.get(settings, {}).get(name)
            if runs:
                yield judged(
                    "nexmark",
                    name,
                    "events/s",
                    rate,
                    f"Flink SQL, {settings}",
                    EVENTS / best(runs),
                    bar=bar,
                    better="higher",
                )
        if name in in_ticks:
            what = f"{name} in ticks of {TICK_ROWS:,} rows"
            ticked = EVENTS / in_ticks[name]
            yield judged(
                "nexmark", what, "events/s", ticked, "at once", rate, bar=0.6, better="higher"
            )
        if name in STATE_MB:
            limit = STATE_MB[name] * EVENTS / 1_000_000
            state_mb = ours[name][-1].state_mb
            yield limited("nexmark", f"{name}: size of state", "MB", state_mb, limit=limit)


def table(
    queries: list[Query],
    ours: dict[str, list[Measured]],
    theirs: dict[str, dict[str, list[FlinkRun]]],
    in_ticks: dict[str, float],
) -> Iterator[str]:
    """A table for people: thousands of events a second, and ours in times of Flink's."""
    yield (
        "query     ours    ticks |  heap  ratio | RocksDB ratio | state MB | CPU s   heap RocksDB"
        "   (1,000 events/s)"
    )
    for query in queries:
        name, rate = query.name, EVENTS / best(ours[query.name]) / 1000
        cells = [f"{name:5} {rate:8,.0f}"]
        ticked = EVENTS / in_ticks[name] / 1000 if name in in_ticks else None
        cells.append(f"{ticked:8,.0f} |" if ticked else "         |")
        cpu = [f"{least_cpu(ours[name]):5.1f}"]
        for settings in (flink.HEAP, flink.ROCKSDB):
            runs = theirs.get(settings, {}).get(name)
            their_rate = EVENTS / best(runs) / 1000 if runs else None
            cells.append(
                f"{their_rate:6,.0f} {rate / their_rate:6.2f} |" if their_rate else " " * 13 + " |"
            )
            cpu.append(f"{least_cpu(runs):6.1f}" if runs else " " * 6)
        yield " ".join([*cells, f"{ours[name][-1].state_mb:8.1f} |", *cpu]).rstrip()
