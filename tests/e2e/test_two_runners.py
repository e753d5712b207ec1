"""Two runners of one pipeline at once, and tasks that come too late: the newer runner goes on, the
older one is fenced, and outputs are as if there had been one.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest

import headrace as hr
from headrace.engine.context import BatchContext
from headrace.engine.job_graph import JobNode
from headrace.engine.ledger import Ledger, RunnerFenced
from headrace.errors import FencedError
from headrace.runtime.job_builder import JobBuilder
from headrace.runtime.runner import Runner
from headrace.runtime.spark_jobs import run_in_one_task, run_wide
from headrace.testing.fault_points import IN_TASKS, ON_THE_DRIVER, inject_faults
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark
from tests.e2e.everything import check, everything
from tests.e2e.local_stores import contents, feed_some

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("no_syncs")
ORDER = {"k": 1, "v": 1, "note": "a"}
IN_A_LOCK = ("in the views' commit", "in the log's commit")  # there nobody else can take over
TOO_LATE = ("the log was committed", "after the commit")


def begun(root: Path) -> PipelineTest:
    spark: Any = PlainSpark()
    test = PipelineTest(everything(), root, spark)
    feed_some(test, 1)
    test.settle(1)
    feed_some(test, 2)
    return test


def once(act: Callable[[], object]) -> Callable[[str], None]:
    """For `inject_faults`: does it at the first point that is passed, and leaves those be that are
    passed meanwhile.
    """
    done: list[str] = []

    def strike(point: str) -> None:
        if not done:
            done.append(point)
            act()

    return strike


@pytest.mark.parametrize(
    ("point", "goes_on"),
    [
        pytest.param(point, goes_on, marks=pytest.mark.slow if number % 2 == goes_on else ())
        for number, point in enumerate((IN_TASKS[0], *ON_THE_DRIVER))
        if point not in IN_A_LOCK
        for goes_on in (False, True)
    ],
)
def test_a_newer_runner_takes_over_in_the_middle_of_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, goes_on: bool
) -> None:
    """It may even have done the same batch, and the next, when the older one comes to its
    commit.
    """
    with begun(tmp_path) as test:
        older = test.runner

        def take_over() -> None:
            test.runner = Runner.start(older.plan, test.log, older.spark, older.state, shards=3)
            if goes_on:
                test.settle(2)

        with monkeypatch.context() as patch:
            inject_faults([point], once(take_over), patch.setattr)
            if point in TOO_LATE:
                assert older.step(1)
            else:
                with pytest.raises(
                    RunnerFenced, match="Another runner of the pipeline 'all' has taken over"
                ) as raised:
                    older.step(1)
                assert "the newer one goes on where it stopped" in str(raised.value)
        assert test.runner is not older
        with pytest.raises(RunnerFenced):
            older.cut(forced=True)
        test.settle()
        check(test)
        older.close()


def test_a_run_that_was_fenced_ends_at_once_and_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begun(tmp_path) as test:
        older = test.runner

        def take_over() -> None:
            test.runner = Runner.start(older.plan, test.log, older.spark, older.state)

        with monkeypatch.context() as patch, pytest.raises(RunnerFenced):
            inject_faults(["before the commit"], once(take_over), patch.setattr)
            older.run(stop=Event())
        assert older.failures == 0
        older.close()


def test_a_tick_that_the_older_runner_recorded_last_is_not_recorded_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older one cuts a tick while the newer one is starting, just before it takes over."""
    with begun(tmp_path) as test:
        older, real = test.runner, Ledger.take_over

        def late(ledger: Ledger) -> int:
            monkeypatch.setattr(Ledger, "take_over", real)
            test.feed("orders", [ORDER])
            assert older.cut() == 1
            return ledger.take_over()

        monkeypatch.setattr(Ledger, "take_over", late)
        test.runner = Runner.start(older.plan, test.log, older.spark, older.state)
        test.feed("orders", [ORDER])
        assert test.cut() == 1
        test.settle()
        numbers = [row["tick"] for row in test.log.read("__ticks.all").to_pylist()]
        assert numbers == list(range(len(numbers)))
        check(test)
        older.close()


def test_an_older_runner_that_has_not_heard_of_it_leaves_the_newer_ones_clocks_alone(
    tmp_path: Path,
) -> None:
    spark: Any = PlainSpark()
    pipeline = hr.Pipeline("timed")
    readings = pipeline.topic(
        "readings", schema="device STRING, at TIMESTAMP", event_time=hr.EventTime("at")
    )
    pipeline.view("devices", readings.group_by("device").aggregate(n=hr.agg.count()))
    with PipelineTest(pipeline, tmp_path, spark) as test:
        test.feed("readings", [{"device": "a", "at": datetime(2026, 1, 1, tzinfo=UTC)}])
        test.settle()
        older = test.runner
        test.runner = Runner.start(older.plan, test.log, older.spark, older.state)
        test.feed("readings", [{"device": "a", "at": datetime(2026, 1, 2, tzinfo=UTC)}])
        test.settle()
        assert not older.step()
        older.close()
        test.restart()
        test.feed("readings", [{"device": "a", "at": datetime(2026, 1, 3, tzinfo=UTC)}])
        test.settle()
        assert test.view("devices") == [{"device": "a", "n": 3}]


def test_two_that_start_at_the_same_moment_take_over_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begun(tmp_path) as test:
        real = Ledger._open_transaction
        other = Ledger.open(test.log, "all")

        def opened(ledger: Ledger) -> Any:
            monkeypatch.setattr(Ledger, "_open_transaction", real)
            tx = real(ledger)
            other.take_over()
            return tx

        monkeypatch.setattr(Ledger, "_open_transaction", opened)
        epoch = test.runner.ledger.epoch
        test.restart()
        assert (other.epoch, test.runner.ledger.epoch) == (epoch + 1, epoch + 2)
        with pytest.raises(FencedError):
            other.commit(other.transaction())
        test.settle()
        check(test)


# Tasks that come too late


@pytest.mark.parametrize("lost", [False, True])
def test_every_task_of_a_batch_again_when_later_ones_are_committed(
    tmp_path: Path, lost: bool
) -> None:
    """An executor that was cut off comes back: outputs do not change, and the local stores
    recover.
    """
    spark: Any = PlainSpark(repeats=1e-9)  # nothing is repeated, all is remembered
    with PipelineTest(everything(), tmp_path, spark) as test:
        feed_some(test, 1, ticks=3)
        test.step(1)
        late = list(spark.zombies)
        test.step(1)
        outputs = {topic: test.rows(topic) for topic in ("totals", "counted")}
        stored = contents(test)
        for task in late:
            task()
        assert {topic: test.rows(topic) for topic in outputs} == outputs
        assert contents(test) != stored, "the late tasks did something"
        if lost:
            test.restart(shards=3, lose_local_store=True)
        test.settle()
        check(test)


@pytest.mark.spark
@pytest.mark.parametrize("width", ["one", "wide"])
def test_a_whole_job_again_on_spark_when_the_next_one_is_committed(
    width: str, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[tuple[JobNode, BatchContext]] = []
    real = JobBuilder.job

    def remembered(builder: JobBuilder) -> JobNode:
        jobs.append((real(builder), builder.context))
        return jobs[-1][0]

    monkeypatch.setattr(JobBuilder, "job", remembered)
    with PipelineTest(everything(), tmp_path, spark, width=width) as test:
        feed_some(test, 1, ticks=3)
        test.step(1)
        first = jobs[-1]
        test.step(1)
        before = test.rows("totals")
        if width == "one":
            run_in_one_task(spark, *first)
        else:
            run_wide(spark, first[0], first[1].job_directory)
        assert test.rows("totals") == before
        test.settle()
        check(test)
