"""Outputs that come, go, come back as something else, and are lost, while rows go on coming: each
shows what it would if it had always been there.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import PlanChanged, RetryError
from headrace.log.dead_letters import read_dead_letters
from headrace.retry import Backoff
from headrace.run_status import read_status
from headrace.runtime.runner import Runner
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark

pytestmark = pytest.mark.usefixtures("no_syncs")
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
LARGEST = hr.agg.max("v")


def shop(*outputs: str, totals: Any = None, retention_bytes: int | None = None) -> hr.Pipeline:
    pipeline = hr.Pipeline("shop")
    limits: dict[str, Any] = (
        {"retention_bytes": retention_bytes, "segment_bytes": retention_bytes // 4}
        if retention_bytes
        else {}
    )
    orders = pipeline.topic("orders", schema="k BIGINT, v BIGINT", **limits)
    clicks = pipeline.topic(
        "clicks", schema="k BIGINT, at TIMESTAMP", event_time=hr.EventTime("at")
    )
    counts = orders.group_by("k").aggregate(n=hr.agg.count(), name="counts")
    if "counts" in outputs:
        pipeline.view("counts", counts)
    if "newest" in outputs:
        pipeline.view("newest", orders.to_table("k", name="newest"))
    if "counted" in outputs:
        pipeline.write("counted", counts)
    if "totals" in outputs:
        pipeline.view(
            "totals",
            orders.group_by("k").aggregate(
                s=totals or hr.agg.sum("v"), name="totals" if totals is None else "others"
            ),
        )
    if "minutes" in outputs:
        pipeline.view(
            "minutes",
            clicks.window(hr.tumbling("1 minute"))
            .group_by("k")
            .aggregate(n=hr.agg.count(), name="minutes"),
        )
    return pipeline


def started(root: Path, pipeline: hr.Pipeline) -> PipelineTest:
    spark: Any = PlainSpark()
    return PipelineTest(pipeline, root, spark)


def edit(test: PipelineTest, pipeline: hr.Pipeline) -> None:
    test.pipeline = pipeline
    test.restart()


def feed(test: PipelineTest, times: int = 1, key: int = 0) -> None:
    for _ in range(times):
        test.feed("orders", [{"k": key, "v": 10}])
        test.settle()


def values(test: PipelineTest, view: str) -> dict[int, int]:
    return {row["k"]: row["n" if "n" in row else "s"] for row in test.view(view)}


def lose_views(test: PipelineTest) -> None:
    test.runner.close()
    for path in test.state.glob("views.db*"):
        path.unlink()
    test.restart()


def test_an_output_that_was_away_does_not_go_on_with_its_old_state(tmp_path: Path) -> None:
    with started(tmp_path, shop("counts", "totals")) as test:
        feed(test, 2)
        edit(test, shop("counts"))
        feed(test, 2)
        edit(test, shop("counts", "totals"))
        test.settle()
        assert [query.name for query in test.runner.queries] == ["main"]
        feed(test)
        test.restart(lose_local_store=True)
        feed(test)
        assert (values(test, "counts"), values(test, "totals")) == ({0: 6}, {0: 60})


def test_a_lost_view_is_built_again_while_rows_come(tmp_path: Path) -> None:
    with started(tmp_path, shop("counted", "totals")) as test:
        feed(test, 3)
        lose_views(test)
        for _ in range(3):
            test.feed("orders", [{"k": 0, "v": 10}])
            test.cut()
            test.step(1)
        feed(test)
        assert (test.folded("counted", "k")[0]["n"], values(test, "totals")) == (7, {0: 70})


def test_outputs_that_take_the_place_of_all_others_begin_at_the_beginning(tmp_path: Path) -> None:
    with started(tmp_path, shop("counts")) as test:
        feed(test, 3)
        edit(test, shop("totals"))
        test.restart()  # nothing was committed in between
        feed(test)
        assert values(test, "totals") == {0: 40}


def test_a_view_that_returns_with_another_fingerprint_is_rebuilt(tmp_path: Path) -> None:
    with started(tmp_path, shop("counts", "totals")) as test:
        feed(test, 2, key=0)
        edit(test, shop("counts"))
        feed(test, key=1)
        edit(test, shop("counts", "totals", totals=LARGEST))
        test.settle()
        feed(test, key=2)
        assert values(test, "totals") == {0: 10, 1: 10, 2: 10}


def clicked(test: PipelineTest, key: int, hours: float) -> None:
    test.feed("clicks", [{"k": key, "at": NOON + timedelta(hours=hours)}])
    test.settle()


@pytest.mark.parametrize("added_later", [False, True])
def test_time_does_not_go_back_when_an_output_joins(tmp_path: Path, added_later: bool) -> None:
    with started(tmp_path, shop("counts") if added_later else shop("counts", "minutes")) as test:
        feed(test)
        clicked(test, key=1, hours=5)
        if added_later:
            edit(test, shop("counts", "minutes"))
            test.settle()
        clicked(test, key=2, hours=0)  # far too late
        clicked(test, key=3, hours=9)
        assert [row["k"] for row in test.view("minutes")] == [1]
        assert test.runner.leading.entry.counts["minutes.late"] == 1


def test_dead_letters_are_written_once_whichever_query_meets_the_row(tmp_path: Path) -> None:
    with started(tmp_path, shop("counts", "newest")) as test:
        test.feed("orders", [{"k": None, "v": 1}, {"k": 1, "v": 1}])
        test.feed("clicks", [{"k": 1, "at": None}, {"k": 1, "at": NOON}])
        test.settle()
        assert len(read_dead_letters(test.log, "newest")) == 1
        lose_views(test)
        test.settle()
        assert values(test, "counts") == {None: 1, 1: 1}
        assert len(read_dead_letters(test.log, "newest")) == 1, "built again, but emitted before"
        edit(test, shop("counts", "newest", "minutes"))
        test.settle()
        assert len(read_dead_letters(test.log, "clicks")) == 1, (
            "the leading query did not read them"
        )


def test_a_plan_that_does_not_fit_leaves_the_runner_at_work_alone(tmp_path: Path) -> None:
    other = hr.Pipeline("shop")
    orders = other.topic("orders", schema="k BIGINT, v BIGINT")
    other.write("counted", orders.group_by("k").aggregate(n=hr.agg.count("v"), name="counts"))
    with started(tmp_path, shop("counts", "counted")) as test:
        feed(test)
        with pytest.raises(PlanChanged, match="counts"):
            Runner.start(other.plan(), test.log, test.spark, test.state)
        feed(test)
        assert values(test, "counts") == {0: 2}


def test_a_view_whose_aggregate_was_edited_is_rebuilt(tmp_path: Path) -> None:
    with started(tmp_path, shop("counts", "totals")) as test:
        feed(test, 2)
        other = hr.Pipeline("shop")
        orders = other.topic("orders", schema="k BIGINT, v BIGINT")
        other.view("counts", orders.group_by("k").aggregate(n=hr.agg.sum("v"), name="counts"))
        edit(test, other)
        feed(test)
        assert values(test, "counts") == {0: 30}


def test_an_output_that_cannot_be_built_from_the_beginning_is_refused_at_the_start(
    tmp_path: Path,
) -> None:
    with started(tmp_path, shop("counts", retention_bytes=4_000)) as test:
        for _ in range(20):
            test.feed("orders", [{"k": 0, "v": number} for number in range(50)])
        test.settle()
        test.log.maintain()
        assert test.log.start_offsets("orders")[0] > 0
        test.pipeline = shop("counts", "totals", retention_bytes=4_000)
        with pytest.raises(
            PlanChanged,
            match=r"totals must be built from the first tick(.|\n)*replay FILE --as v2 --retick",
        ):
            test.restart()
        edit(test, shop("counts", retention_bytes=4_000))
        feed(test)
        assert values(test, "counts") == {0: 1001}


def test_a_log_that_is_away_for_a_moment_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.runtime.runner.BACKOFF", Backoff(first_s=0.01, longest_s=0.01))
    with started(tmp_path, shop("counts")) as test:
        feed(test)
        test.feed("orders", [{"k": 0, "v": 1}])
        there, asked = test.log.snapshot, []

        def away(topics: Any) -> Any:
            asked.append(topics)
            if len(asked) <= 6:
                raise RetryError("the broker is away", fix="wait")
            return there(topics)

        monkeypatch.setattr(test.log, "snapshot", away)
        test.runner.run(until_caught_up=True)
        assert values(test, "counts") == {0: 2}


def test_a_run_writes_its_status_before_its_first_batch(tmp_path: Path) -> None:
    with started(tmp_path, shop("counts", "counted")) as test:
        test.runner.run(until_caught_up=True)
        status = read_status(test.state)
        assert (status.tick, status.batches, status.is_running) == (0, 0, True)
        feed(test)
        test.runner.write_status()
        query = read_status(test.state).queries["main"]
        assert (query["tick"], query["batch_rows"], query["rows_behind"]) == (1, 1, 0)
        assert query["batch_seconds"] > 0
