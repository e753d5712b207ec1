"""Patterns: from an embedded topic through Spark against Flink CEP, and the kernel alone in one
thread against Esper; the same events, and the same matches, or it does not count.

A million payments of 10,000 cards in an hour, 1% of them up to two seconds late. `fraud`: three or
more small ones and a big one within 10 minutes. `steps`: a, b and c, skipping to the next of each,
within a minute. Ours runs the same hour again and again, two hours apart; what is compared is an
hour in the middle. Flink has its source and its sink in memory, and parallelism 2; Esper gets the
events in order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import headrace as hr
from benchmarks.pattern_peers import Match, run, write_events
from benchmarks.report import Result, judged, limited, note
from benchmarks.state_runs import Run, directory, session
from headrace.operators.kernel import UNSTARTED, Watermarks
from headrace.plan.match_steps import MatchStep
from headrace.testing.kernels import MemoryState

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVENTS, FEW_KEYS, MANY_KEYS, PATTERNS = 1_000_000, 10_000, 1_000_000, 1_000
BATCHES, WARM_UP = 5, 2
START_US, HOUR_US, DELAY_US = 1_767_225_600_000_000, 3_600_000_000, 2_000_000
SCHEMA = "card BIGINT, amount DOUBLE, kind STRING, paid_at TIMESTAMP"
CALLS, TICKS_A_CALL, ROUNDS = 4, 5, 5


def events(cards: int, rows: int = EVENTS, seed: int = 11) -> pa.Table:
    """In order of arrival; times in whole milliseconds, as the peers have them."""
    rng = np.random.default_rng(seed)
    times = np.sort(rng.integers(0, HOUR_US // 1000, rows)) * 1000
    share = rng.random(rows)
    small, middle, big = (
        rng.random(rows) * 9.9,
        10 + rng.random(rows) * 900,
        1001 + rng.random(rows) * 1000,
    )
    amounts = np.where(share < 0.4, small, np.where(share < 0.97, middle, big))
    arrival = times + np.where(rng.random(rows) < 0.01, rng.integers(0, DELAY_US, rows), 0)
    order = np.argsort(arrival, kind="stable")
    columns = {
        "card": rng.integers(0, cards, rows),
        "amount": amounts,
        "kind": rng.choice(np.array(list("abcde")), rows),
    }
    at = pa.array(START_US + times).cast(pa.timestamp("us", "UTC"))
    return pa.table({**columns, "paid_at": at}).take(pa.array(order))


def later(rows: pa.Table, hours: int) -> pa.Table:
    return rows.set_column(
        3, "paid_at", pc.add(rows["paid_at"], pa.scalar(hours * HOUR_US, pa.duration("us")))
    )


def asked(which: str) -> dict[str, Any]:
    """The patterns, as users write them."""
    measures = {"first_at": "first(paid_at)", "last_at": "last(paid_at)", "n": "count(*)"}
    if which == "fraud":
        define = {
            "small": "amount < 10",
            "big": "amount > 1000 AND amount > 50 * avg(small.amount)",
        }
        return {
            "pattern": "small{3,} big",
            "define": define,
            "measures": measures,
            "within": "10 minutes",
        }
    define = {letter: f"kind = '{letter}'" for letter in "abc"}
    return {
        "pattern": "a -> b -> c",
        "define": define,
        "measures": measures,
        "within": "1 minute",
        "after_match": "skip to next row",
    }


def pipeline(which: str) -> hr.Pipeline:
    made = hr.Pipeline("bench")
    times = hr.EventTime("paid_at", delay="2 seconds", idle="1 day")
    payments = made.topic("rows", schema=SCHEMA, key="card", event_time=times, partitions=2)
    made.write("matches", payments.match(**asked(which)), partitions=2)
    return made


def found(rows: pa.Table, hour: int) -> list[Match]:
    """The matches that begin in an hour, as the peers tell them: times in milliseconds of the hour
    that they were given.
    """
    first, last = (
        (rows[name].cast(pa.int64()).to_numpy() - hour * HOUR_US) // 1000
        for name in ("first_at", "last_at")
    )
    mine = (first * 1000 >= START_US) & (first * 1000 < START_US + HOUR_US)
    return sorted(
        zip(
            *(
                column[mine].tolist()
                for column in (rows["card"].to_numpy(), first, last, rows["n"].to_numpy())
            ),
            strict=True,
        )
    )


# Through Spark


def our_rates(
    which: str, rows: pa.Table, root: Path, spark: SparkSession
) -> tuple[list[float], list[Match]]:
    """Events a second of each batch, from the tick to the commit; and the matches of one hour."""
    with Run(pipeline(which).plan(), root, spark) as run_:
        seconds = [run_.batch(later(rows, 2 * batch)) for batch in range(BATCHES)]
        emitted = run_.log.read("matches").to_table()
    return [rows.num_rows / each for each in seconds[WARM_UP:]], found(emitted, 2 * (BATCHES - 2))


# The kernel alone


def kernel_seconds(step: MatchStep, rows: pa.Table) -> tuple[float, pa.Table]:
    """All events in a few calls, each of some ticks, conditions of single rows included; then the
    clock passes everything.
    """
    kernel, state = step.kernel(), MemoryState()
    conditions = [(name, _condition(text)) for name, text in step.bits]
    ticks = np.arange(rows.num_rows) * CALLS * TICKS_A_CALL // rows.num_rows
    newest = np.maximum.accumulate(rows["paid_at"].cast(pa.int64()).to_numpy())
    ticked, emitted, before, spent = (
        rows.append_column("_tick", pa.array(ticks)),
        [],
        UNSTARTED,
        0.0,
    )
    for call in range(CALLS + 1):
        mine = np.arange(call * TICKS_A_CALL, (call + 1) * TICKS_A_CALL)
        given = ticked.filter(pa.array(ticks // TICKS_A_CALL == call)).combine_chunks()
        ends = np.minimum(np.searchsorted(ticks, mine, side="right"), len(ticks)) - 1
        closed = (
            newest[ends] - DELAY_US if call < CALLS else np.full(len(mine), newest[-1] + HOUR_US)
        )
        started = time.perf_counter()
        for name, condition in conditions:
            given = given.append_column(name, condition(given))
        emitted.append(
            kernel.step_timed(
                state, [given], [Watermarks(mine, mine, closed, closed, before, before)]
            )
        )
        spent += time.perf_counter() - started
        before = int(closed[-1])
    return spent, pa.concat_tables(emitted)


def _condition(text: str) -> Any:
    """The conditions of these patterns, over columns."""
    column, sign, value = text.split(" ", 2)
    other: Any = value.strip("'") if "'" in value else float(value)
    return lambda rows: {"<": pc.less, ">": pc.greater, "=": pc.equal}[sign](rows[column], other)


def kernel_rate(which: str, rows: pa.Table) -> tuple[float, list[Match]]:
    step = pipeline(which).plan().step("matches.match")
    assert isinstance(step, MatchStep)
    runs = [kernel_seconds(step, rows) for _ in range(ROUNDS)]
    return rows.num_rows / statistics.median(seconds for seconds, _ in runs), found(runs[0][1], 0)


def many_patterns_cost() -> float:
    """How many times the time of one pattern a thousand take: rules about shops, of which each
    payment has one.
    """
    rows = events(FEW_KEYS)
    shops = np.random.default_rng(5).integers(0, PATTERNS, rows.num_rows).astype(np.float64)
    rows = rows.append_column("shop", pa.array(shops))

    def step(count: int) -> MatchStep:
        made = hr.Pipeline("bench")
        payments = made.topic(
            "rows",
            schema=f"{SCHEMA}, shop DOUBLE",
            key="card",
            event_time=hr.EventTime("paid_at", delay="2 seconds"),
        )
        measures = {"first_at": "first(paid_at)", "last_at": "last(paid_at)", "n": "count(*)"}
        rules = {
            f"shop{at}": hr.pattern(
                "small{3,} there",
                define={"small": "amount < 10", "there": f"shop = {at}"},
                measures=measures,
                within="10 minutes",
            )
            for at in range(count)
        }
        found_step = payments.match(rules, name="matches").step
        assert isinstance(found_step, MatchStep)
        return found_step

    one, all_of_them = (
        statistics.median(kernel_seconds(step(count), rows)[0] for _ in range(rounds))
        for count, rounds in ((1, 3), (PATTERNS, 1))
    )
    note(f"one pattern {one:.2f} s, {PATTERNS:,} patterns {all_of_them:.2f} s")
    return all_of_them / one


def results() -> Iterator[Result]:
    rows = events(FEW_KEYS)
    with directory() as root:
        path = root / "events"
        write_events(path, rows)
        for which in ("fraud", "steps"):
            with session() as spark:
                ours, matches = our_rates(which, rows, root / which, spark)
            theirs, expected = run("FlinkPeer", path, which)
            note(
                f"{which}: ours {list(map(round, ours))}, Flink CEP {theirs:.0f}; {len(matches):,}"
                " matches"
            )
            assert matches == expected, f"{len(matches):,} matches, Flink CEP has {len(expected):,}"
            what = f"{which}, {EVENTS:,} events, {FEW_KEYS:,} keys, from an embedded topic"
            yield judged(
                "patterns",
                what,
                "events/s",
                statistics.median(ours),
                "Flink CEP 2.1, in memory, parallelism 2",
                theirs,
                bar=1.5,
                better="higher",
            )
            alone, mine = kernel_rate(which, rows)
            esper, expected = run("EsperPeer", path, which)
            assert mine == expected, f"{len(mine):,} matches, Esper has {len(expected):,}"
            yield judged(
                "patterns",
                f"{which}, the kernel alone, one thread",
                "events/s",
                alone,
                "Esper 9",
                esper,
                bar=1.0,
                better="higher",
            )
    with directory() as root, session() as spark:
        few, many = (
            statistics.median(our_rates("fraud", events(cards), root / str(cards), spark)[0])
            for cards in (FEW_KEYS, MANY_KEYS)
        )
        yield judged(
            "patterns",
            f"fraud, {MANY_KEYS:,} keys",
            "events/s",
            many,
            f"the same with {FEW_KEYS:,} keys",
            few,
            bar=0.5,
            better="higher",
        )
    yield limited(
        "patterns",
        f"{PATTERNS:,} patterns at once, in times of one",
        "times",
        many_patterns_cost(),
        limit=50,
    )
