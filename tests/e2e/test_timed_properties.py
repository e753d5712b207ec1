"""Windows, joins and clocks of devices under faults, restarts and rescaling: the rows, their ticks,
the late ones and the counts are those of an undisturbed replay over the same ticks.

As in `test_engine_properties.py` the jobs run in this process, so that there can be many.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.columnar.keys import KEY_GROUPS
from headrace.engine.reports import STATE_BYTES, STATE_KEYS
from headrace.engine.state.files import row_bytes
from headrace.log.dead_letters import dead_topic_name
from headrace.plan.plan import PipelinePlan, TopicOutput, ViewOutput
from headrace.runtime.runner import Runner
from headrace.runtime.state_inspector import stored_states
from headrace.runtime.versions import start_version, version_state
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import Fault, PlainSpark
from headrace.views.reader import ViewReader
from tests.e2e.faults import Faults
from tests.e2e.pipeline_lives import UNDISTURBED as VERSION
from tests.e2e.pipeline_lives import Move, advance, emitted_changes, finish, moves
from tests.short_forms import examples

pytestmark = pytest.mark.usefixtures("no_syncs")
START = datetime(2026, 3, 1, 12, tzinfo=UTC)
Row = dict[str, Any]


def timed() -> hr.Pipeline:
    pipeline = hr.Pipeline("timed")
    times = hr.EventTime("at", delay="5 seconds", producer="device", idle="1 hour")
    orders = pipeline.topic(
        "orders",
        schema="id BIGINT, who BIGINT, amount BIGINT, device STRING, at TIMESTAMP",
        key="id",
        event_time=times,
        partitions=2,
    )
    payments = pipeline.topic(
        "payments",
        schema="id BIGINT, at TIMESTAMP",
        key="id",
        # Idle in nearly every tick, and often without any row: joins go on without it.
        event_time=hr.EventTime("at", idle="20 ms"),
    )
    people = pipeline.table("people", schema="who BIGINT, city STRING", key="who")
    minutes = (
        orders.window(hr.tumbling("1 minute"), late=hr.late.correct("10 minutes"))
        .group_by("who")
        .aggregate(n=hr.agg.count(), s=hr.agg.sum("amount"))
    )
    pipeline.view("minutes", minutes)
    pipeline.write("minutes_changes", minutes, partitions=2)
    devices = (
        orders.window(hr.tumbling("5 minutes"), late=hr.late.divert("late_orders"))
        .group_by("device")
        .aggregate(n=hr.agg.count())
    )
    pipeline.view("devices", devices)
    newest = orders.to_table("who").window(
        hr.tumbling("1 minute"), late=hr.late.correct("2 minutes"), emit="changes"
    )
    # Rows move from window to window, and out of closed ones.
    pipeline.view("moved", newest.group_by("device").aggregate(n=hr.agg.count()))
    pipeline.write("with_city", orders.join(people, on="who", how="left"), partitions=2)
    # At full length, devices are idle in nearly every tick.
    idle = "20 ms" if os.environ.get("HEADRACE_TESTS") == "full" else "1 hour"
    watermarks = hr.device_time(
        event="happened", sent="sent", received="received", device="device", idle=idle
    )
    readings = pipeline.topic(
        "readings",
        schema="device STRING, happened TIMESTAMP, sent TIMESTAMP, received TIMESTAMP",
        key="device",
        event_time=watermarks,
        partitions=2,
    )
    pipeline.write("corrected", readings)
    pipeline.view(
        "readings_a_minute",
        readings.window(hr.tumbling("1 minute"), late=hr.late.correct("10 minutes"))
        .group_by("device")
        .aggregate(n=hr.agg.count()),
    )
    pipeline.write(
        "paid", orders.join(payments, on="id", within="1 minute", how="left", suffix="_paid")
    )
    return pipeline


seconds = st.integers(-600, 900)
orders = st.lists(
    st.fixed_dictionaries(
        {
            "who": st.none() | st.integers(0, 3),
            "amount": st.integers(0, 9),
            "device": st.none() | st.sampled_from("xy"),
            "second": st.none() | seconds,
        }
    ),
    max_size=6,
)
ticks = st.lists(
    st.fixed_dictionaries(
        {
            "orders": orders,
            "payments": st.lists(seconds, max_size=3),
            "readings": st.lists(st.tuples(st.sampled_from("xy"), seconds, seconds), max_size=3),
            "people": st.lists(
                st.fixed_dictionaries(
                    {"who": st.integers(0, 3), "city": st.sampled_from(["Oslo", "Rome"])}
                ),
                max_size=2,
            ),
        }
    ),
    min_size=1,
    max_size=6,
)


def feed(test: PipelineTest, number: int, rows: dict[str, Any]) -> None:
    """Event times go on by two minutes a tick, more or less."""

    def at(second: int | None) -> datetime | None:
        return None if second is None else START + timedelta(seconds=120 * number + second)

    for index, order in enumerate(rows["orders"]):
        plain = {name: value for name, value in order.items() if name != "second"}
        test.feed("orders", [{"id": 10 * number + index, **plain, "at": at(order["second"])}])
    for index, second in enumerate(rows["payments"]):
        test.feed("payments", [{"id": 10 * number + index, "at": at(second)}])
    for device, second, wrong in rows["readings"]:
        test.feed(
            "readings",
            [
                {
                    "device": device,
                    "happened": at(second + wrong),
                    "sent": at(second + wrong),
                    "received": at(second),
                }
            ],
        )
    if rows["people"]:
        test.feed("people", rows["people"])


def live(
    root: Path,
    fed: list[dict[str, Any]],
    happening: list[Move],
    faults: Faults,
    repeats: float,
    pipeline: Callable[[], hr.Pipeline] = timed,
) -> None:
    spark: Any = PlainSpark(chance=Random(1), repeats=repeats)
    with PipelineTest(pipeline(), root, spark, shards=1) as test:
        for number, rows in enumerate(fed):
            feed(test, number, rows)
            faults.resting = False
            with suppress(Fault):
                test.cut(forced=True)
            faults.resting = True
            if number < len(happening):
                advance(test, happening[number], faults, spark)
        finish(test, faults)
        check_against_a_replay(test)


def check_against_a_replay(test: PipelineTest) -> None:
    """Run a life's ticks in one batch, on one shard, without a fault."""
    plan = start_version(test.log, test.pipeline.plan(), VERSION)
    state = version_state(test.root / "state", VERSION)
    session: Any = PlainSpark()
    calm = Runner.start(plan, test.log, session, state, shards=1)
    up_to = test.runner.tick
    while calm.tick < up_to:
        assert calm.step(up_to - calm.tick)
    compare(test, plan, state)
    mine, theirs = (_results(runner.leading.entry.counts) for runner in (test.runner, calm))
    assert mine == theirs
    check_sizes(test.runner)
    check_sizes(calm)
    calm.close()


def check_sizes(runner: Runner) -> None:
    """The shown size of each step's state, which is counted batch by batch, is that of the entries
    in its files: no retried batch counted twice, and none was left out.
    """
    stored = {}
    for step, state in stored_states(runner.log, runner.plan.name, runner.state).items():
        if not state.ids:
            continue  # the step has stored nothing yet
        contents = state.files.load(range(KEY_GROUPS), state.ids).values()
        entries = [entry for content in contents for entry in content.items()]
        names, values = (
            pa.array([entry[column] for entry in entries], pa.binary()) for column in (0, 1)
        )
        stored[step] = {"keys": len(entries), "bytes": int(row_bytes(names, values).sum())}
    assert runner.status().steps == stored


def compare(test: PipelineTest, plan: PipelinePlan, state: Path) -> None:
    with (
        ViewReader(test.root / "state" / "views.db") as mine,
        ViewReader(state / "views.db") as theirs,
    ):
        for output in plan.outputs:
            name = output.name.removesuffix(f".{VERSION}")
            if isinstance(output, ViewOutput):
                assert emitted_changes(mine, name) == emitted_changes(theirs, output.name), (
                    f"the view {name}"
                )
            elif isinstance(output, TopicOutput):
                assert test.rows(name) == test.rows(output.name), f"the topic {name}"
    for step in plan.steps():
        for side in step.side_outputs:
            mine_rows = test.rows(side.topic.removesuffix(f".{VERSION}"))
            assert mine_rows == test.rows(side.topic), f"the topic {side.topic}"
    known = set(test.log.topics())
    for step in plan.steps():
        dead_letters = [
            dead_topic_name(name) for name in (step.name.removesuffix(f".{VERSION}"), step.name)
        ]
        assert (dead_letters[0] in known) == (dead_letters[1] in known), dead_letters
        if dead_letters[0] in known:
            assert _dead_letters(test, dead_letters[0]) == _dead_letters(test, dead_letters[1])


def _dead_letters(test: PipelineTest, topic: str) -> list[str]:
    names = ["reason", "source_partition", "source_offset", "tick", "row"]
    rows = ([row[name] for name in names] for row in test.log.read(topic).to_pylist())
    return sorted(repr(row).replace(f".{VERSION}: ", ": ") for row in rows)


def _results(counts: Any) -> dict[str, int]:
    """The counts that are results. Sizes of states are not: rows that no result needs any more are
    forgotten many at a time, sooner or later by how ticks were batched.
    """
    return {
        name.replace(f".{VERSION}.", ".").removesuffix(f".{VERSION}"): count
        for name, count in counts.items()
        if count and not name.endswith((STATE_KEYS, STATE_BYTES))
    }


def lived(
    fed: list[dict[str, Any]],
    happening: list[Move],
    strikes: frozenset[int],
    repeats: float,
    faults: list[Faults],
) -> None:
    faults[0] = Faults(frozenset(strikes))
    with TemporaryDirectory() as root:
        live(Path(root), fed, happening, faults[0], repeats)


LIFE = {
    "fed": ticks,
    "happening": st.lists(moves, max_size=6),
    "strikes": st.frozensets(st.integers(1, 300), max_size=5),
    "repeats": st.sampled_from([0.0, 0.3]),
}
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@given(**LIFE)
@settings(max_examples=examples(8), suppress_health_check=QUIET)
def test_time_too_goes_the_same_way(
    fed: list[dict[str, Any]],
    happening: list[Move],
    strikes: frozenset[int],
    repeats: float,
    faults: list[Faults],
) -> None:
    lived(fed, happening, strikes, repeats, faults)


def test_a_row_of_no_more_use_that_small_batches_forget_later(faults: list[Faults]) -> None:
    """The payment can match no order from 12:09:09 on. Stored, it goes at 12:09:15 with others; a
    batch in which it both comes and is passed never stores it.
    """
    nothing: dict[str, Any] = {"orders": [], "readings": [], "payments": [], "people": []}
    passing = {"who": 0, "amount": 1, "device": "x", "second": 437}
    batches_of_one_tick = Move(max_ticks=1, restart=False, shards=1, lose_store=False, late_tasks=0)
    fed = [{**nothing, "payments": [489]}, {**nothing, "orders": [passing]}]
    lived(fed, [batches_of_one_tick], frozenset(), 0.0, faults)


@pytest.mark.slow
@given(**LIFE)
@settings(max_examples=examples(300), suppress_health_check=QUIET)
def test_three_hundred_times(
    fed: list[dict[str, Any]],
    happening: list[Move],
    strikes: frozenset[int],
    repeats: float,
    faults: list[Faults],
) -> None:
    lived(fed, happening, strikes, repeats, faults)
