"""Large rows: a batch is bounded in bytes as well as in rows."""

from __future__ import annotations

from pathlib import Path

import pytest

import headrace as hr
from headrace.engine import shard, ticks, whole_job
from headrace.runtime import query
from headrace.testing.pipelines import PipelineTest

ROWS = 4_000


def documents() -> hr.Pipeline:
    pipeline = hr.Pipeline("documents")
    rows = pipeline.topic("documents", schema="id BIGINT, text STRING", key="id", partitions=2)
    pipeline.view(
        "longest", rows.group_by("id").aggregate(text=hr.agg.max("text"), n=hr.agg.count())
    )
    return pipeline


def feed(test: PipelineTest) -> None:
    test.feed("documents", [{"id": n % 500, "text": f"{n:05d}" * 20} for n in range(ROWS)])


def test_a_backlog_of_large_rows_is_cut_into_ticks_by_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticks, "MAX_BYTES_A_TICK", 200_000)
    with PipelineTest(documents(), tmp_path) as test:
        for _ in range(5):
            feed(test)
        assert test.cut() > 1
        test.settle()
        assert sum(row["n"] for row in test.view("longest")) == 5 * ROWS


def test_a_batch_takes_fewer_ticks_if_their_rows_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "MAX_BATCH_BYTES", 100_000)
    with PipelineTest(documents(), tmp_path) as test:
        feed(test)
        test.settle()
        before = test.runner.batches
        for _ in range(3):
            feed(test)
            test.cut()
        test.settle()
        assert test.runner.batches - before == 3
        assert sum(row["n"] for row in test.view("longest")) == 4 * ROWS


@pytest.mark.parametrize("width", ["one", "wide"])
def test_a_shard_that_is_too_large_is_computed_with_more_shards(
    width: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard, "MAX_SHARD_BYTES", 100_000)
    with PipelineTest(documents(), tmp_path, width=width) as test:
        feed(test)
        test.settle()
        assert sum(row["n"] for row in test.view("longest")) == ROWS
        feed(test)
        test.settle()
        assert sum(row["n"] for row in test.view("longest")) == 2 * ROWS


def test_state_that_is_large_is_not_copied_into_the_store_of_one_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "MAX_BYTES_OF_WHOLE_STORE", -1)
    with PipelineTest(documents(), tmp_path, width="one", shards=3) as test:
        for _ in range(2):
            feed(test)
            test.settle()
        assert sum(row["n"] for row in test.view("longest")) == 2 * ROWS
        assert not (test.state / "local" / "main" / whole_job.STORE).exists()
        stores = (test.state / "local").glob("**/data.mdb")
        assert {path.parent.name for path in stores} == {"0-of-3", "1-of-3", "2-of-3"}


def test_a_job_in_one_task_that_writes_too_much_runs_wide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_job, "MAX_RESULT_BYTES", 10)
    with PipelineTest(documents(), tmp_path, width="one") as test:
        feed(test)
        test.settle()
        assert test.runner.leading.width.last == "wide"
        assert sum(row["n"] for row in test.view("longest")) == ROWS
