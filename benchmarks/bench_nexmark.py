"""Nexmark: each query over the same events, from an embedded topic to a topic, durable and exactly
once, beside Flink SQL from files to nowhere; with its state on the heap and no checkpoints, and
with RocksDB and exactly-once checkpoints.

`EVENTS=` says how many events, a million if left out; `QUERIES=q4,q9` which queries, q0 to q23 if
left out (`EVENTS=30_000 QUERIES=cep0,cep1,cep2,cep3` for patterns). All of it ends after about
`MINUTES=`, 20 if left out: each side has as many runs as fit, three at most, of which the best
counts. The first run of each side is not counted. Ours is timed from the tick to the last commit,
Flink from the start of its job to its end. What is printed for people is a table.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.nexmark import flink
from benchmarks.nexmark.events import RATE, SCHEMAS, events
from benchmarks.nexmark.oracle import side_input
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
GROWING, MIN_GROWING_EVENTS = ("q9", "q18", "q20"), 400_000
STATE_MB = {"q7": 100, "q9": 200, "q18": 100, "q19": 100, "q20": 100}
"""Of a million events."""


@dataclass(frozen=True)
class Measured:
    """One run of ours."""

    seconds: float
    state_mb: float


def filled_log(root: Path, count: int) -> FileLog:
    """A log with the events in their topics, and the side input."""
    log = new_log(root)
    for name, schema in SCHEMAS.items():
        log.create_topic(name, schema, partitions=2)
    for name, rows in events(count).tables().items():
        append(log, rows, name)
    log.create_table("side_input", "key BIGINT, value STRING", key="key")
    with log.producer("side_input") as producer:
        producer.upsert(side_input())
    return log


def run(
    query: Query, log: FileLog, root: Path, spark: SparkSession, number: int, tick_rows: int
) -> Measured:
    """Answer a query over everything in the log, in ticks of so many rows."""
    name = f"{query.name}-{number}"
    plan = query.pipeline(RATE, name=name).plan()
    state = root / name
    runner = Runner.start(plan, log, spark, state)
    try:
        started = time.perf_counter()
        while runner.cut(max_rows=tick_rows):
            continue
        while runner.step_ahead(max_ticks=1):
            continue
        seconds = time.perf_counter() - started
    finally:
        runner.close()
        log.delete_topic(f"{name}.answer")
    files = (state / "steps").glob("*/*.state")
    state_mb = sum(path.stat().st_size for path in files) / 1e6
    shutil.rmtree(state)
    return Measured(seconds, state_mb)


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
    theirs: dict[str, dict[str, list[float]]] = {}
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
    """How much longer all events take than a quarter of them."""
    names = [query for query in queries if query.name in GROWING]
    if not names or EVENTS < MIN_GROWING_EVENTS:
        return
    with filled_log(root / "quarter", EVENTS // 4) as log:
        for query in names:
            runs = our_runs(query, log, root / "state", spark, time.monotonic(), 10 * EVENTS)
            times = best(ours[query.name]) / best(runs)
            what = f"{query.name}: time of {EVENTS:,} events in times of that of a quarter"
            yield limited("nexmark", what, "times", times, limit=4.4)


def their_runs(
    queries: list[Query], files: Path, begun: float
) -> dict[str, dict[str, list[float]]]:
    """Flink's seconds by settings and query, one JVM for each of the settings. Patterns are left
    out with RocksDB, with which its CEP takes a minute for 30,000 events.
    """
    found: dict[str, dict[str, list[float]]] = {flink.HEAP: {}, flink.ROCKSDB: {}}
    for part, settings in enumerate(found):
        until_s = begun + MINUTES * 60 * (part + 2) / 3
        limit_s = max(until_s - time.monotonic(), 60)
        durable = settings == flink.ROCKSDB
        asked = [
            query
            for query in queries
            if query.flink is not None and not (durable and query.name in PATTERNS)
        ]
        if asked:
            found[settings] = flink.seconds(
                asked, files, durable=durable, runs=RUNS + 1, limit_s=limit_s
            )
    return found


def best(runs: list[Measured]) -> float:
    return min(each.seconds for each in runs)


def verdicts(
    queries: list[Query],
    ours: dict[str, list[Measured]],
    theirs: dict[str, dict[str, list[float]]],
    in_ticks: dict[str, float],
) -> Iterator[Result]:
    for query in queries:
        name, rate = query.name, EVENTS / best(ours[query.name])
        for settings, bar in ((flink.HEAP, BARS_ON_HEAP.get(name, 1.0)), (flink.ROCKSDB, 2.0)):
            seconds = theirs.get(settings, {}).get(name)
            if seconds and (settings == flink.HEAP or name in DURABLE):
                yield judged(
                    "nexmark",
                    name,
                    "events/s",
                    rate,
                    f"Flink SQL, {settings}",
                    EVENTS / min(seconds),
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
    theirs: dict[str, dict[str, list[float]]],
    in_ticks: dict[str, float],
) -> Iterator[str]:
    """A table for people: thousands of events a second, and ours in times of Flink's."""
    yield "query     ours    ticks |  heap  ratio | RocksDB ratio | state MB   (1,000 events/s)"
    for query in queries:
        name, rate = query.name, EVENTS / best(ours[query.name]) / 1000
        cells = [f"{name:5} {rate:8,.0f}"]
        ticked = EVENTS / in_ticks[name] / 1000 if name in in_ticks else None
        cells.append(f"{ticked:8,.0f} |" if ticked else "         |")
        for settings in (flink.HEAP, flink.ROCKSDB):
            seconds = theirs.get(settings, {}).get(name)
            their_rate = EVENTS / min(seconds) / 1000 if seconds else None
            cells.append(
                f"{their_rate:6,.0f} {rate / their_rate:6.2f} |" if their_rate else " " * 13 + " |"
            )
        yield " ".join([*cells, f"{ours[name][-1].state_mb:8.1f}"])
