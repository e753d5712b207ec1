"""What a run does besides its batches: unneeded state is swept, another number of shards is taken
on, and the rows stay what they are.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import headrace as hr
from headrace.runtime.query_assignment import remember_shards
from headrace.runtime.runner import RETAINED_ENTRIES, Maintenance
from headrace.testing.pipelines import PipelineTest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def counts() -> hr.Pipeline:
    pipeline = hr.Pipeline("counts")
    orders = pipeline.topic("orders", schema="k BIGINT", key="k")
    pipeline.view("by_key", orders.group_by("k").aggregate(n=hr.agg.count()))
    return pipeline


def age(state: Path) -> None:
    for path in state.rglob("*"):
        os.utime(path, (time.time() - 10_000,) * 2)


def fail(*_: object) -> None:
    raise OSError("died before the commit")


def test_files_of_failed_batches_are_swept_and_state_is_kept(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PipelineTest(counts(), tmp_path, spark) as test:
        for _ in range(3):
            test.feed("orders", [{"k": k} for k in range(10)])
            test.cut()
            with monkeypatch.context() as patched, pytest.raises(OSError, match="died before"):
                patched.setattr("headrace.runtime.query.commit_batch", fail)
                test.step()
            test.settle()
        files = test.state / "steps" / "by_key.aggregate"
        (test.state / "jobs" / "dead").mkdir(parents=True)
        before = len(list(files.iterdir()))
        upkeep = Maintenance(test.runner)
        assert upkeep.sweeper.finish() == 0
        age(test.state)
        assert (
            upkeep.sweeper.finish() == 1 + 6
        )  # the job, and what two shards wrote in three batches that failed
        assert len(list(files.iterdir())) == before - 6
        assert not (test.state / "jobs" / "dead").exists()
        test.restart(lose_local_store=True)
        test.feed("orders", [{"k": k} for k in range(10)])
        test.settle()
        assert {row["n"] for row in test.view("by_key")} == {4}
        assert test.runner.last_result is not None
        assert "rebuilt" in test.runner.last_result.how


def test_a_runner_that_was_replaced_sweeps_nothing(tmp_path: Path, spark: SparkSession) -> None:
    with PipelineTest(counts(), tmp_path, spark) as test:
        test.feed("orders", [{"k": 1}])
        test.settle()
        older = Maintenance(test.runner)
        test.restart()
        (test.state / "jobs" / "of-the-newer").mkdir(parents=True)
        age(test.state)
        older.step()
        assert (test.state / "jobs" / "of-the-newer").exists()
        Maintenance(test.runner).step()
        assert not (test.state / "jobs" / "of-the-newer").exists()


def test_a_new_number_of_shards_takes_effect_between_batches(
    tmp_path: Path, spark: SparkSession
) -> None:
    with PipelineTest(counts(), tmp_path, spark, shards=2, width="wide") as test:
        test.feed("orders", [{"k": k} for k in range(20)])
        test.settle()
        remember_shards(test.log, "counts", 3)
        Maintenance(test.runner, fixed_shards=True).step()
        assert test.runner.shards == 2
        Maintenance(test.runner).step()
        assert test.runner.shards == 3
        test.feed("orders", [{"k": k} for k in range(20)])
        test.settle()
        assert {row["n"] for row in test.view("by_key")} == {2}
        assert len(list((test.state / "local").glob("**/*-of-3"))) == 3
        remember_shards(test.log, "counts", None)
        Maintenance(test.runner).step()
        assert test.runner.shards == 3


def test_a_number_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with (
        hr.open_log(f"file:{tmp_path}") as log,
        pytest.raises(hr.errors.ConfigurationError, match="129 cannot be a number of shards"),
    ):
        remember_shards(log, "counts", 129)


def test_as_many_entries_are_kept_as_promised() -> None:
    assert RETAINED_ENTRIES == 10
