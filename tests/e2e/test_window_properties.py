"""Windows through the engine against a reference computation over rows, ticks and clocks: each kind
of window, late policy and emit mode, rows in any disorder, producers that are given up, come back
or are never seen again; whatever the batches, shards and restarts. Rows in are rows counted,
dropped and diverted.

The jobs run in this process, so that there can be many.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.operators.kernel import UNSTARTED
from headrace.operators.windows.kernel import WindowSettings
from headrace.operators.windows.late_policy import Divert, LatePolicy
from headrace.operators.windows.specs import Session, Sliding, WindowSpec
from headrace.runtime.explain import explain
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark
from tests.engine.watermark_model import obvious as reference_watermarks
from tests.operators.histories import text
from tests.operators.windows.feeding import STREAM, in_order
from tests.operators.windows.oracle import (
    FixedOracle,
    Row,
    RowOracle,
    SessionOracle,
    SlidingOracle,
    TickWatermarks,
    moment,
    us,
)
from tests.short_forms import examples

pytestmark = pytest.mark.usefixtures("no_syncs")
BASE_US = 1_772_366_400_000_000  # 2026-03-01 12:00
SCHEMA = "k BIGINT, v DOUBLE, t TIMESTAMP, device STRING"
AGGREGATES = (("n", hr.agg.count()), ("s", hr.agg.sum("v")))
KINDS: dict[str, WindowSpec] = {
    "tumbling": hr.tumbling("20 us"),
    "hopping": hr.hopping("20 us", every="8 us"),
    "session": hr.session("9 us"),
    "sliding": hr.sliding("15 us"),
}


@dataclass(frozen=True)
class Asked:
    """How the windows of one kind are asked for."""

    late: str
    emit: str
    keyed: bool

    def policy(self, name: str) -> LatePolicy:
        policies: dict[str, LatePolicy] = {
            "drop": hr.late.drop(),
            "correct": hr.late.correct("12 us"),
            "divert": hr.late.divert(f"late_{name}"),
        }
        return policies[self.late]


@dataclass(frozen=True)
class TickRows:
    """What a tick brings, and how much later than the one before it is."""

    rows: list[Row]
    step_us: int


@dataclass(frozen=True)
class Life:
    ticks: list[TickRows]
    asked: dict[str, Asked]
    batches: list[int]
    shards: list[int]
    repeats: float


asked = st.builds(
    Asked,
    st.sampled_from(["drop", "correct", "divert"]),
    st.sampled_from(["final", "changes"]),
    st.booleans(),
)
rows = st.fixed_dictionaries(
    {
        "k": st.integers(0, 2),
        "v": st.sampled_from([0.5, 1.0, -2.0]),
        "t": st.integers(0, 100).map(lambda n: moment(BASE_US + n)),
        "device": st.sampled_from("abc"),
    }
)


def disordered(seed: int) -> list[TickRows]:
    """Many rows, whose times go on with the ticks, more or less; a producer may say nothing for
    some ticks, or never again.
    """
    chance = Random(seed)
    silent = {device: chance.choice([(9, 9), (2, 6), (3, 9)]) for device in "abc"}
    found = []
    for tick in range(8):
        live = [device for device, (first, last) in silent.items() if not first <= tick < last]
        times = [
            12 * tick + chance.randrange(-20, 15) for _ in range(chance.randrange(9) if live else 0)
        ]
        rows = [
            {
                "k": chance.randrange(3),
                "v": chance.choice([0.5, 1.0]),
                "t": moment(BASE_US + max(0, t)),
                "device": chance.choice(live),
            }
            for t in times
        ]
        found.append(TickRows(rows, chance.choice([5, 12, 25])))
    return found


drawn = st.lists(
    st.builds(TickRows, st.lists(rows, max_size=6), st.integers(0, 30)), min_size=1, max_size=8
)
ticks = drawn | st.integers(0, 10_000).map(disordered)
lives = st.builds(
    Life,
    ticks,
    st.fixed_dictionaries(dict.fromkeys(KINDS, asked)),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.sampled_from([0.0, 0.0, 0.3]),
)


def pipeline_of(life: Life) -> hr.Pipeline:
    pipeline = hr.Pipeline("p")
    times = hr.EventTime("t", delay="3 us", producer="device", idle="20 us")
    given_rows = pipeline.topic("rows", schema=SCHEMA, event_time=times)
    for name, spec in KINDS.items():
        asked = life.asked[name]
        windows = given_rows.window(spec, late=asked.policy(name), emit=asked.emit)
        pipeline.view(
            name,
            (windows.group_by("k") if asked.keyed else windows).aggregate(
                n=AGGREGATES[0][1], s=AGGREGATES[1][1]
            ),
        )
    return pipeline


def oracle_of(name: str, asked: Asked) -> FixedOracle | RowOracle:
    spec = KINDS[name]
    step = WindowSettings(
        name,
        STREAM,
        "t",
        spec,
        ("k",) if asked.keyed else (),
        AGGREGATES,
        asked.policy(name),
        asked.emit,
        producer="device",
    )
    kind: Any = (
        SessionOracle
        if isinstance(spec, Session)
        else SlidingOracle
        if isinstance(spec, Sliding)
        else FixedOracle
    )
    oracle: FixedOracle | RowOracle = kind(step)
    return oracle


def run(life: Life, root: Path) -> PipelineTest:
    """Feed all ticks, in batches of some sizes, with a restart between them."""
    spark: Any = PlainSpark(chance=Random(1), repeats=life.repeats)
    test = PipelineTest(pipeline_of(life), root, spark, shards=life.shards[0])
    now_us = BASE_US
    for number, tick in enumerate(life.ticks):
        now_us += tick.step_us
        test.runner.now_us = partial(int, now_us)
        if tick.rows:
            test.feed("rows", tick.rows)
        test.cut(forced=True)
        if number % 2:
            test.step(life.batches[number % len(life.batches)])
            test.restart(
                shards=life.shards[number % len(life.shards)], lose_local_store=number % 4 == 3
            )
    while test.step(life.batches[0]):
        continue
    return test


def lived(life: Life) -> None:
    with TemporaryDirectory() as root, run(life, Path(root)) as test:
        journal = test.runner.journal
        assert journal.first is not None
        cut = journal.between(journal.first.number, test.runner.tick)
        assert len(cut) == len(life.ticks)
        numbers = {tick.number: index for index, tick in enumerate(cut)}
        watermarks = reference_watermarks(
            [
                # A row ahead of the clock moves the watermark no further than the clock.
                [(row["device"], min(us(row["t"]), now.time_us)) for row in tick.rows]
                for tick, now in zip(life.ticks, cut, strict=True)
            ],
            [tick.time_us for tick in cut],
        )
        for name, asked in life.asked.items():
            check(test, name, asked, life, watermarks, numbers)


def check(
    test: PipelineTest,
    name: str,
    asked: Asked,
    life: Life,
    watermarks: list[int],
    numbers: dict[int, int],
) -> None:
    oracle = oracle_of(name, asked)
    wanted: list[Row] = []
    for index, tick in enumerate(life.ticks):
        before = watermarks[index - 1] if index else UNSTARTED
        wanted += oracle.tick(
            index, tick.rows, TickWatermarks(before, before, watermarks[index], watermarks[index])
        )
    emitted = [
        {**row, "_tick": numbers[tick]} for tick, changes in test.changes(name) for row in changes
    ]
    assert text(in_order(emitted)) == text(in_order(wanted)), f"{name}, {asked}"
    check_open(test, name)
    late = oracle.late
    assert test.runner.leading.entry.counts.get(f"{name}.window.late", 0) == len(late)
    counted = Counter(
        {each["producer"]: each["rows"] for each in late_counts(test, f"{name}.window")}
    )
    assert counted == Counter(row["device"] for row in late)
    if isinstance(asked.policy(name), Divert):
        diverted = [
            {column: row[column] for column in STREAM.names}
            for row in test.log.read(f"late_{name}").to_pylist()
        ]
        assert sorted(map(repr, diverted)) == sorted(
            repr({column: row[column] for column in STREAM.names}) for row in late
        )
    if name == "tumbling" and asked.emit == "changes":
        emitted_rows = sum(row["n"] for row in test.view(name))
        assert emitted_rows + len(late) == sum(len(tick.rows) for tick in life.ticks), (
            "rows in are rows counted, dropped and diverted"
        )


def check_open(test: PipelineTest, name: str) -> None:
    """The reported open windows, which are counted batch by batch, are those in the state."""
    found = explain(test.pipeline.plan(), test.log, test.state, f"{name}.window").windows
    counts = test.runner.leading.entry.counts
    for how, waiting in (("waiting", True), ("kept", False)):
        assert counts.get(f"{name}.window.windows_{how}", 0) == sum(
            each.groups for each in found if each.waiting == waiting
        )


def late_counts(test: PipelineTest, step: str) -> list[Row]:
    """By producer; what was counted for several minutes is added up."""
    if "__late.p" not in test.log.topics():
        return []
    found: Counter[str] = Counter()
    for row in test.log.read("__late.p").to_pylist():
        if row["step"] == step:
            found[row["producer"]] += row["rows"]
    return [{"producer": producer, "rows": count} for producer, count in found.items()]


QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@given(life=lives)
@settings(max_examples=examples(12), suppress_health_check=QUIET)
def test_windows_equal_the_reference_computation(life: Life) -> None:
    lived(life)


@pytest.mark.slow
@given(life=lives)
@settings(max_examples=examples(400), suppress_health_check=QUIET)
def test_four_hundred_times(life: Life) -> None:
    lived(life)


# One window on another


def chained() -> hr.Pipeline:
    """Minutes to hours to days, in little; all by group but the last."""
    pipeline = hr.Pipeline("p")
    # The clock of the ticks is behind the rows of the last tick, which close everything.
    times = hr.EventTime("t", delay="3 us", producer="device", idle="20 us", max_ahead="1 day")
    given_rows = pipeline.topic("rows", schema=SCHEMA, event_time=times, partitions=2, key="k")
    late = hr.late.correct("1 ms")
    minutes = (
        given_rows.window(hr.tumbling("5 us"), late=late)
        .group_by("k")
        .aggregate(n=hr.agg.count(), s=hr.agg.sum("v"))
    )
    hours = (
        minutes.window(hr.tumbling("20 us"), late=late)
        .group_by("k")
        .aggregate(n=hr.agg.sum("n"), s=hr.agg.sum("s"), highest=hr.agg.max("n"))
    )
    days = hours.window(hr.tumbling("60 us"), late=late).aggregate(
        n=hr.agg.sum("n"), s=hr.agg.sum("s"), highest=hr.agg.max("highest")
    )
    pipeline.view("hours", hours)
    pipeline.view("days", days)
    return pipeline


@given(given_ticks=ticks, batches=st.integers(1, 4), shards=st.integers(1, 3))
@settings(max_examples=examples(8), suppress_health_check=QUIET)
def test_corrections_at_the_bottom_end_as_the_batch_answer_at_the_top(
    given_ticks: list[TickRows], batches: int, shards: int
) -> None:
    spark: Any = PlainSpark()
    end = [
        {"k": k, "v": 0.0, "t": moment(BASE_US + 500), "device": device}
        for k in range(3)
        for device in "abc"
    ]
    with (
        TemporaryDirectory() as root,
        PipelineTest(chained(), Path(root), spark, shards=shards) as test,
    ):
        now_us = BASE_US
        for tick in [*given_ticks, TickRows(end, 0)]:
            now_us += tick.step_us
            test.runner.now_us = partial(int, now_us)
            test.feed("rows", tick.rows)
            test.cut(forced=True)
            test.step(batches)
        while test.step(batches):
            continue
        found = {
            us(row["window_start"]): (row["n"], row["s"], row["highest"])
            for row in test.view("days")
        }
    assert found == batch_answer([row for tick in given_ticks for row in tick.rows])


def batch_answer(given_rows: list[Row]) -> dict[int, tuple[int, float, int]]:
    days: dict[int, list[Row]] = {}
    for row in given_rows:
        days.setdefault(us(row["t"]) // 60 * 60, []).append(row)
    minutes = Counter((row["k"], us(row["t"]) // 5) for row in given_rows)
    return {
        day: (
            len(inside),
            sum(row["v"] for row in inside),
            max(minutes[row["k"], us(row["t"]) // 5] for row in inside),
        )
        for day, inside in days.items()
    }
