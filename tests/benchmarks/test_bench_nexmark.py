"""The bars of the benchmark of Nexmark: each is judged, and what is slower or larger misses it."""

from __future__ import annotations

import os
import time

from benchmarks import bench_nexmark
from benchmarks.bench_nexmark import Measured, cpu_seconds, table, verdicts
from benchmarks.nexmark import flink
from benchmarks.nexmark.flink import FlinkRun
from benchmarks.nexmark.queries import QUERIES
from benchmarks.report import Result

ALL = list(QUERIES.values())


def judged(ours_s: float, theirs_s: float, state_mb: float, ticks_s: float) -> list[Result]:
    ours = {name: [Measured(ours_s, 1.0, state_mb)] for name in QUERIES}
    heap = {query.name: [FlinkRun(theirs_s, 1.0)] for query in ALL if query.flink is not None}
    durable = {name: heap[name] for name in bench_nexmark.DURABLE}
    theirs = {flink.HEAP: heap, flink.ROCKSDB: durable}
    in_ticks = dict.fromkeys(bench_nexmark.IN_TICKS, ticks_s)
    assert len(list(table(ALL, ours, theirs, in_ticks))) == 1 + len(ALL)
    return list(verdicts(ALL, ours, theirs, in_ticks))


def bars(results: list[Result], peer: str) -> dict[str, float]:
    return {result.what: result.bar for result in results if result.peer.endswith(peer)}


def test_every_bar_is_judged() -> None:
    results = judged(1.0, 2.5, 1.0, 1.5)
    assert all(result.ok for result in results)
    on_heap = bars(results, flink.HEAP)
    assert on_heap.keys() == QUERIES.keys() - {"q6"}  # which Flink cannot answer
    assert {name for name, bar in on_heap.items() if bar == 1.5} == {"q2", "q11", "q12", "q17"}
    assert set(on_heap.values()) == {1.0, 1.5}
    durable = bars(results, flink.ROCKSDB)
    assert set(durable.values()) == {2.0}
    assert set(durable) == {"q4", "q5", "q7", "q9", "q11", *(f"q{n}" for n in range(15, 21))}
    ticks = bars(results, "at once")
    assert {what.split()[0] for what in ticks} == {"q0", "q4", "q11", "q17", "q19"}
    assert set(ticks.values()) == {0.6}
    sizes = {result.what.split(":")[0]: result.theirs for result in results if result.unit == "MB"}
    assert sizes == {"q7": 100, "q9": 200, "q18": 100, "q19": 100, "q20": 100}


def test_what_is_slower_or_larger_misses_its_bar() -> None:
    missed = [result for result in judged(1.0, 0.9, 500.0, 2.0) if not result.ok]
    assert len(missed) == 23 + 11 + 5 + 5


def test_cpu_time_is_that_of_this_process_and_its_children() -> None:
    before, begun = cpu_seconds(), time.process_time()
    while time.process_time() < begun + 0.2:
        os.getpid()
    assert 0.1 < cpu_seconds() - before < 5
