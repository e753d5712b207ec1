"""The end of input: a final tick emits what still waits for event time, exactly once, in every
width and number of shards, through restarts and in a replay; rows that come later are late.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.log.dead_letters import read_dead_letters
from headrace.testing.pipelines import Died, PipelineTest

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
Row = dict[str, Any]
pytestmark = pytest.mark.usefixtures("no_syncs")


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


class Reminders(hr.Processor, each_key=True):
    """Emits the newest order of a customer of whom none has come for a minute."""

    output = "who STRING, id BIGINT, at TIMESTAMP"
    newest = hr.state("BIGINT")
    due = hr.timer()

    def on_row(self, row: Any, ctx: Any) -> None:
        ctx["newest"], ctx["due"] = row["id"], row["at"] + timedelta(minutes=1)

    def on_timer(self, key: Any, ctx: Any) -> None:
        ctx.emit(who=key["who"], id=ctx["newest"], at=ctx.fired_at)


def everything_timed() -> hr.Pipeline:
    """All kinds of steps that wait for a watermark."""
    pipeline = hr.Pipeline("timed")
    orders = pipeline.topic(
        "orders",
        schema="id BIGINT, who STRING, amount BIGINT, at TIMESTAMP",
        key="id",
        partitions=2,
        event_time=hr.EventTime("at", delay="10 seconds"),
    )
    payments = pipeline.topic(
        "payments", schema="id BIGINT, at TIMESTAMP", key="id", event_time=hr.EventTime("at")
    )
    rates = pipeline.table(
        "rates",
        schema="who STRING, rate BIGINT, valid_from TIMESTAMP",
        key="who",
        event_time=hr.EventTime("valid_from", delay="1 minute"),
    )
    windows: dict[str, Any] = {
        "tumbling": hr.tumbling("1 hour"),
        "hopping": hr.hopping("1 hour", every="30 minutes"),
        "session": hr.session("10 minutes"),
        "sliding": hr.sliding("5 minutes"),
    }
    for name, window in windows.items():
        counts = orders.window(window, late=hr.late.divert(f"late_{name}")).group_by("who")
        pipeline.view(name, counts.aggregate(n=hr.agg.count(), name=name))
    nested = orders.window(hr.tumbling("1 minute")).group_by("who").aggregate(n=hr.agg.count())
    pipeline.view(
        "nested", nested.window(hr.tumbling("1 hour")).aggregate(n=hr.agg.sum("n"), name="nested")
    )
    for how in ("left", "full"):
        pairs = orders.join(
            payments, on="id", within="1 hour", how=how, suffix="_paid", name=f"{how}.join"
        )
        pipeline.write(how, pairs)
    pipeline.write(
        "rated",
        orders.join(rates.as_of("at", history="30 days"), on="who", how="left", name="rated"),
    )
    growing = orders.key_by("who").match(
        "a b+ c",
        define={"b": "b.amount > a.amount", "c": "c.amount < a.amount"},
        within="1 hour",
        measures={"n": "count(b.amount)"},
        name="growing",
    )
    pipeline.write("growing", growing)
    frames = orders.over("who", order_by="id", rows=2)
    pipeline.write("frames", frames.aggregate(total=hr.agg.sum("amount"), name="frames"))
    pipeline.write("repeats", orders.dedupe(on="who", within="1 hour", keep="last", name="repeats"))
    pipeline.write(
        "since",
        orders.join(payments, on="id", since="at", after="1 hour", suffix="_p", name="since"),
    )
    pipeline.write("reminders", orders.process(Reminders, key="who", name="reminders"))
    minutes = orders.window(hr.tumbling("1 minute")).group_by("who").aggregate(n=hr.agg.count())
    pipeline.view("compared", minutes.compare("1 minute", name="compared"))
    pipeline.view("plain", orders.group_by("who").aggregate(n=hr.agg.count(), name="plain"))
    return pipeline


TICKS: list[dict[str, list[Row]]] = [
    {
        "rates": [{"who": "a", "rate": 2, "valid_from": at(-60)}],
        "orders": [{"id": n, "who": "ab"[n % 2], "amount": n, "at": at(10 * n)} for n in range(8)],
        "payments": [{"id": 1, "at": at(12)}, {"id": 99, "at": at(20)}],
    },
    {"orders": [{"id": n, "who": "a", "amount": n % 5, "at": at(7 * n)} for n in range(10, 20)]},
]
LATER: dict[str, list[Row]] = {
    "orders": [{"id": 50 + n, "who": "a", "amount": n, "at": at(4_000 * n)} for n in range(3)],
    "payments": [{"id": 50, "at": at(0)}],
}
VIEWS = ("tumbling", "hopping", "session", "sliding", "nested", "compared", "plain")
TOPICS = ("left", "full", "rated", "growing", "frames", "repeats", "since", "reminders")


def feed(test: PipelineTest, rows: dict[str, list[Row]]) -> None:
    for topic, of_topic in rows.items():
        test.feed(topic, of_topic)
    test.cut()


def outcome(test: PipelineTest, version: str = "") -> dict[str, Any]:
    views = {name: test.view(name + version) for name in VIEWS}
    return views | {name: sorted(map(repr, test.rows(name + version))) for name in TOPICS}


def settle(test: PipelineTest, max_ticks: int = 1_000) -> None:
    while test.step(max_ticks):
        continue


def test_what_was_open_at_the_end_of_input_was_never_emitted(tmp_path: Path) -> None:
    with PipelineTest(everything_timed(), tmp_path) as test:
        for rows in TICKS:
            feed(test, rows)
        test.settle()
        before = outcome(test)
        assert before["tumbling"] == before["session"] == before["nested"] == []
        test.settle(final=True)
        after = outcome(test)
        in_all = {"a": 14, "b": 4}
        assert {row["who"]: row["n"] for row in after["tumbling"]} == in_all
        assert {row["who"]: row["n"] for row in after["session"]} == in_all
        assert after["nested"] == [
            {"window_start": at(0), "window_end": at(3_600), "n": sum(in_all.values())}
        ]
        assert Counter(row["who"] for row in after["hopping"]) == {"a": 2, "b": 2}
        assert len(after["left"]) == 18, "one is paid"
        assert len(after["full"]) == 19, "and a payment has no order"
        assert len(after["rated"]) == 18
        assert set(before["growing"]) <= set(after["growing"])
        assert len(after["frames"]) == 18
        assert len(after["repeats"]) == 2, "the last order of a and of b"
        assert len(after["since"]) == 1, "the payment is a second later"
        assert len(after["reminders"]) == 2
        assert sum(row["n"] for row in after["compared"]) == 18
        assert test.runner.leading.entry.due_us == {}
        again = test.runner.tick
        assert test.runner.end_event_time() == again, "event time ends once"


@pytest.mark.parametrize(("width", "shards", "max_ticks"), [("one", 1, 100), ("wide", 3, 1)])
def test_the_end_is_the_same_whatever_the_batches_shards_and_crashes(
    tmp_path: Path, width: str, shards: int, max_ticks: int
) -> None:
    with PipelineTest(everything_timed(), tmp_path / "calm") as test:
        for rows in TICKS:
            feed(test, rows)
        test.settle(final=True)
        feed(test, LATER)
        test.settle()
        expected = outcome(test)
        late = {name: sorted(map(repr, test.rows(f"late_{name}"))) for name in VIEWS[:4]}
    with PipelineTest(
        everything_timed(), tmp_path / "disturbed", width=width, shards=shards
    ) as test:
        for rows in TICKS:
            feed(test, rows)
        settle(test, max_ticks)
        test.runner.end_event_time()
        with pytest.raises(Died):
            test.step(dies="between views and log")
        test.restart(shards=shards + 1, lose_local_store=True)
        settle(test, max_ticks)
        feed(test, LATER)
        settle(test, max_ticks)
        assert outcome(test) == expected
        assert {name: sorted(map(repr, test.rows(f"late_{name}"))) for name in late} == late
        replayed = test.replay("v2")
        settle(replayed, max_ticks)
        assert outcome(replayed, ".v2") == expected
        replayed.close()


def test_rows_behind_the_end_of_input_are_late_and_counted(tmp_path: Path) -> None:
    with PipelineTest(everything_timed(), tmp_path) as test:
        for rows in TICKS:
            feed(test, rows)
        test.settle(final=True)
        before = outcome(test)
        test.restart()
        feed(test, LATER)
        test.settle()
        after = outcome(test)
        counts = test.runner.leading.entry.counts
        timed = ("tumbling", "hopping", "session", "sliding", "growing", "frames")
        for name in (*timed, "repeats"):
            assert counts[f"{name}.late"] == 3, name
            assert after[name] == before[name], name
        assert len(test.rows("late_tumbling")) == 3
        assert (counts["left.join.late_left"], counts["left.join.late_right"]) == (3, 1)
        assert {row["who"]: row["n"] for row in after["plain"]} == {"a": 17, "b": 4}
        assert not test.cut(), "nothing waits for time any more"
        assert "orders.dead" not in test.log.topics() or not read_dead_letters(test.log, "orders")


def test_a_run_ends_event_time_when_it_has_caught_up(tmp_path: Path) -> None:
    with PipelineTest(everything_timed(), tmp_path) as test:
        for rows in TICKS:
            feed(test, rows)
        test.runner.run(until_caught_up=True)
        assert test.view("tumbling") == []
        assert test.runner.status().watermarks["orders"]["ended"] is False
        test.runner.run(until_caught_up=True, final=True)
        assert len(test.view("tumbling")) == 2
        assert test.runner.status().watermarks["orders"]["ended"] is True
        last = test.runner.tick
        test.runner.run(until_caught_up=True, final=True)
        assert test.runner.tick == last
