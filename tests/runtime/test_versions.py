"""How a version begins: what it is called, which ticks it takes over, and from where it cannot be
replayed. Without Spark: a recorded past is made by hand.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import headrace as hr
from headrace.engine import ticks as ticks_module
from headrace.engine.ledger import Ledger
from headrace.engine.ticks import Tick, TickJournal
from headrace.errors import PlanError
from headrace.log.file.log import FileLog
from headrace.operators.windows.late_policy import Divert
from headrace.plan.window_steps import WindowStep
from headrace.runtime import versions
from headrace.runtime.versions import ReplayRefused, as_version, start_version


def shop(*, returns: bool = False) -> hr.Pipeline:
    pipeline = hr.Pipeline("shop")
    orders = pipeline.topic("orders", schema="k BIGINT, v BIGINT", key="k")
    both = (
        orders.union(pipeline.topic("returns", schema="k BIGINT, v BIGINT", key="k"))
        if returns
        else orders
    )
    totals = both.where("v > 0").group_by("k").aggregate(s=hr.agg.sum("v"))
    pipeline.write("totals", totals)
    pipeline.view("by_key", totals)
    return pipeline


@pytest.fixture
def log(tmp_path: Path) -> Iterator[FileLog]:
    with FileLog.open(tmp_path / "log") as opened:
        opened.create_topic("orders", "k BIGINT, v BIGINT", key="k", segment_bytes=512)
        yield opened


def feed(log: FileLog, topic: str, count: int = 1) -> None:
    with log.producer(topic) as producer:
        producer.append([{"k": n, "v": n} for n in range(count)])


def record(log: FileLog, ticks: int, *, topics: tuple[str, ...] = ("orders",)) -> list[Tick]:
    """A past of so many ticks behind tick 0, of one row each."""
    ledger, journal = Ledger.open(log, "shop"), TickJournal.open(log, "shop")
    ledger.take_over()
    past = [Tick(0, 0, {topic: {0: 0} for topic in topics})]
    for number in range(1, ticks + 1):
        for topic in topics:
            feed(log, topic)
        past.append(Tick(number, time.time_ns() // 1000, log.snapshot(topics)))
        time.sleep(0.002)
    tx = ledger.transaction()
    journal.record(tx, past)
    ledger.commit(tx)
    return past


def recorded(log: FileLog, name: str = "shop.v2") -> list[Tick]:
    journal = TickJournal.open(log, name)
    return [tick for number in range(1_000) if (tick := journal.at(number)) is not None]


def test_everything_of_a_version_carries_its_name() -> None:
    plan = shop().plan()
    version = as_version(plan, "v2")
    assert version.name == "shop.v2"
    assert [output.name for output in version.outputs] == ["totals.v2", "by_key.v2"]
    assert [step.name for step in version.steps()] == [f"{step.name}.v2" for step in plan.steps()]
    assert [step.topic for step in version.inputs] == ["orders"]
    assert [step.lineage for step in version.steps()] == [step.lineage for step in plan.steps()]


def test_late_rows_of_a_version_go_to_a_topic_of_its_own() -> None:
    pipeline = hr.Pipeline("shop")
    orders = pipeline.topic("orders", schema="k BIGINT, at TIMESTAMP", key="k", event_time="at")
    pipeline.view(
        "counts",
        orders.window(hr.tumbling("1 minute"), late=hr.late.divert("late"))
        .group_by("k")
        .aggregate(n=hr.agg.count()),
    )
    (window,) = [
        step for step in as_version(pipeline.plan(), "v2").steps() if isinstance(step, WindowStep)
    ]
    assert isinstance(window.late, Divert)
    assert window.late.topic == "late.v2"


def test_a_version_needs_a_name_that_is_free() -> None:
    pipeline = shop()
    pipeline.write("totals.v2", pipeline.topic("other", schema="k BIGINT"))
    with pytest.raises(PlanError, match=r"'totals\.v2' of its own"):
        as_version(pipeline.plan(), "v2")
    with pytest.raises(PlanError, match="cannot be a version"):
        as_version(pipeline.plan(), "the second")


def test_a_version_begins_with_the_recorded_ticks(
    log: FileLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "_TICKS_A_COMMIT", 3)
    past = record(log, 10)
    plan = start_version(log, shop().plan(), "v2")
    assert plan.name == "shop.v2"
    assert recorded(log) == past


def test_ticks_are_read_a_few_at_a_time_and_not_again(
    log: FileLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "_TICKS_A_COMMIT", 3)
    monkeypatch.setattr(versions, "_TICKS_A_READ", 4)
    monkeypatch.setattr(ticks_module, "MAX_CACHED_TICKS", 5)
    past = record(log, 30)
    read: list[int] = []

    def counted(journal: TickJournal, after: int, up_to: int) -> Sequence[Tick]:
        found = real(journal, after, up_to)
        read.append(len(found))
        return found

    real = TickJournal.between
    monkeypatch.setattr(TickJournal, "between", counted)
    start_version(log, shop().plan(), "v2")
    assert max(read) == 4
    read.clear()
    start_version(log, shop().plan(), "v2")
    assert sum(read) == 0, "what is recorded need not be read"
    monkeypatch.undo()
    assert recorded(log) == past


def test_beginning_again_changes_nothing(log: FileLog) -> None:
    past = record(log, 3)
    start_version(log, shop().plan(), "v2")
    feed(log, "orders")
    ledger = Ledger.open(
        log, "shop"
    )  # the pipeline goes on, and has ticks that the version does not share
    ledger.take_over()
    tx = ledger.transaction()
    TickJournal.open(log, "shop").record(
        tx, [Tick(4, past[-1].time_us + 5, log.snapshot(["orders"]))]
    )
    ledger.commit(tx)
    start_version(log, shop().plan(), "v2")
    assert recorded(log) == past


def test_a_version_that_was_interrupted_while_it_began_takes_the_rest_of_the_ticks(
    log: FileLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "_TICKS_A_COMMIT", 3)
    past = record(log, 10)
    commits = 0

    def die_in_the_middle(ledger: Ledger, tx: object) -> object:
        nonlocal commits
        commits += 1
        if commits == 4:
            raise OSError("died here")
        return real(ledger, tx)  # type: ignore[arg-type]

    real = Ledger.commit
    with monkeypatch.context() as patched, pytest.raises(OSError, match="died here"):
        patched.setattr(Ledger, "commit", die_in_the_middle)
        start_version(log, shop().plan(), "v2")
    assert recorded(log) == past[:6]
    start_version(log, shop().plan(), "v2")
    assert recorded(log) == past


def test_a_version_can_begin_at_a_tick_or_a_time(log: FileLog) -> None:
    past = record(log, 10)
    start_version(log, shop().plan(), "late", since=7)
    assert recorded(log, "shop.late") == past[6:]
    time_us = past[4].time_us - 1
    start_version(log, shop().plan(), "timed", since=_iso(time_us))
    assert recorded(log, "shop.timed") == past[3:]


def _iso(time_us: int) -> str:
    from headrace.durations import from_us

    return from_us(time_us).isoformat()


def test_a_tick_that_does_not_exist_is_refused(log: FileLog) -> None:
    record(log, 4)
    for since in (0, 5, -3, "2999-01-01T00:00:00Z"):
        with pytest.raises(ReplayRefused, match="has no tick") as refused:
            start_version(log, shop().plan(), "v2", since=since)
        assert "from 1 to 4" in refused.value.fix
    assert "__ticks.shop.v2" not in log.topics()


def test_a_version_cannot_begin_twice_at_different_ticks(log: FileLog) -> None:
    record(log, 4)
    start_version(log, shop().plan(), "v2", since=2)
    start_version(log, shop().plan(), "v2", since=2)
    start_version(log, shop().plan(), "v2")
    for since, retick in ((3, False), (2, True), (None, True)):
        with pytest.raises(ReplayRefused, match="was begun at tick 2, with the recorded ticks"):
            start_version(log, shop().plan(), "v2", since=since, retick=retick)


def test_with_new_ticks_nothing_is_taken_over(log: FileLog) -> None:
    past = record(log, 4)
    start_version(log, shop().plan(), "v2", retick=True)
    assert recorded(log) == []
    start_version(log, shop().plan(), "v3", since=3, retick=True)
    assert recorded(log, "shop.v3") == [past[2]]


def test_an_input_that_old_ticks_do_not_know_belongs_to_them_by_append_time(log: FileLog) -> None:
    log.create_topic("returns", "k BIGINT, v BIGINT", key="k")
    feed(log, "returns", 2)  # before all ticks
    past = record(log, 3)
    time.sleep(0.005)
    feed(log, "returns", 5)  # behind all ticks
    start_version(log, shop(returns=True).plan(), "v2")
    ticks = recorded(log)
    assert [(tick.number, tick.time_us, tick.ends["orders"]) for tick in ticks] == [
        (tick.number, tick.time_us, tick.ends["orders"]) for tick in past
    ]
    assert [tick.ends["returns"] for tick in ticks] == [{0: 0}, {0: 2}, {0: 2}, {0: 2}]


def test_an_input_that_is_not_there_yet_has_no_rows_in_old_ticks(log: FileLog) -> None:
    past = record(log, 3)
    start_version(log, shop(returns=True).plan(), "v2")
    assert recorded(log) == past


def test_an_input_that_is_no_longer_read_is_left_out(log: FileLog) -> None:
    log.create_topic("returns", "k BIGINT, v BIGINT", key="k")
    record(log, 3, topics=("orders", "returns"))
    start_version(log, shop().plan(), "v2")
    assert [dict(tick.ends) for tick in recorded(log)] == [{"orders": {0: n}} for n in range(4)]


def test_what_retention_took_away_cannot_be_replayed(log: FileLog) -> None:
    past = record(log, 12)
    log.alter_topic("orders", retention_bytes=1)
    log.maintain("orders")
    start = log.start_offsets("orders")[0]
    assert 0 < start < 12
    earliest = next(tick.number for tick in past if tick.end("orders", 0) >= start) + 1
    with pytest.raises(
        ReplayRefused, match=rf"orders\[0\].*whole from offset {start} on"
    ) as refused:
        start_version(log, shop().plan(), "v2")
    assert f"--from {earliest} " in refused.value.fix
    with pytest.raises(ReplayRefused):
        start_version(log, shop().plan(), "v2", since=earliest - 1)
    start_version(log, shop().plan(), "v2", since=earliest)
    assert [tick.number for tick in recorded(log)] == list(range(earliest - 1, 13))


def test_what_compaction_thinned_out_cannot_be_replayed(tmp_path: Path) -> None:
    with FileLog.open(tmp_path / "compacted") as log:
        log.create_table(
            "orders", "k BIGINT, v BIGINT", key="k", history="0 seconds", segment_bytes=512
        )
        pipeline = hr.Pipeline("shop")
        pipeline.view(
            "orders_now",
            pipeline.table(
                "orders",
                schema="k BIGINT, v BIGINT",
                key="k",
                history="0 seconds",
                segment_bytes=512,
            ),
        )
        ledger, journal = Ledger.open(log, "shop"), TickJournal.open(log, "shop")
        ledger.take_over()
        tx = ledger.transaction()
        ticks = [Tick(0, 0, {"orders": {0: 0}})]
        with log.producer("orders") as producer:
            for number in range(1, 30):
                producer.upsert([{"k": 1, "v": number}])
                ticks.append(Tick(number, time.time_ns() // 1000, log.snapshot(["orders"])))
        journal.record(tx, ticks)
        ledger.commit(tx)
        log.maintain("orders")
        whole = log.whole_from("orders")[0]
        assert log.start_offsets("orders") == {0: 0}
        with pytest.raises(ReplayRefused, match="compaction has taken away") as refused:
            start_version(log, pipeline.plan(), "v2")
        assert f"--from {whole + 1} " in refused.value.fix
        start_version(log, pipeline.plan(), "v2", since=whole + 1)


def test_a_topic_of_someone_elses_is_not_written_to(log: FileLog) -> None:
    record(log, 2)
    log.create_topic("totals.v2", "k BIGINT")
    with pytest.raises(ReplayRefused, match=r"topic 'totals\.v2' already"):
        start_version(log, shop().plan(), "v2")


def test_a_pipeline_that_never_ran_has_nothing_to_replay(log: FileLog) -> None:
    record(log, 1)
    pipeline = hr.Pipeline("shopp")
    pipeline.write("copy", pipeline.topic("orders", schema="k BIGINT, v BIGINT", key="k"))
    with pytest.raises(ReplayRefused, match="did you mean 'shop'"):
        start_version(log, pipeline.plan(), "v2")
