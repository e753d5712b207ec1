"""`verify_determinism`: which functions are caught, and that the pipeline's log is only read."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import headrace as hr
from headrace.runtime.determinism import DeterminismReport, verify_determinism
from headrace.runtime.versions import ReplayRefused
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark

pytestmark = pytest.mark.usefixtures("no_syncs")
TICKS = 4


@hr.udf("DOUBLE", name="determined")
def determined(amount: Any) -> Any:
    return pc.multiply(amount, 2)


@hr.udf("DOUBLE", name="drawn", each_row=True)
def drawn(amount: float) -> float:
    return amount + random.random()


@hr.udf("DOUBLE", name="averaged")
def averaged(amount: Any) -> Any:
    """Depends on which rows come in one call."""
    mean = pc.mean(amount).as_py() or 0.0
    return pa.array([mean] * len(amount))


def shop(function: str) -> hr.Pipeline:
    pipeline = hr.Pipeline("shop")
    orders = pipeline.topic(
        "orders", schema="order_id BIGINT, region STRING, amount DOUBLE", key="order_id"
    )
    computed = orders.with_columns(computed=f"{function}(amount)")
    pipeline.write("computed", computed)
    totals = computed.group_by("region").aggregate(n=hr.agg.count(), low=hr.agg.min("computed"))
    pipeline.view("totals", totals)
    pipeline.write("plain", orders.where("amount > 1"))
    return pipeline


def report_of(
    function: str, directory: Path, check: Callable[[PipelineTest], DeterminismReport]
) -> DeterminismReport:
    with PipelineTest(shop(function), directory) as test:
        for tick in range(TICKS):
            rows = [
                {"order_id": number, "region": "ab"[number % 2], "amount": float(number * tick)}
                for number in range(5)
            ]
            test.feed("orders", rows)
            test.settle()
        return check(test)


def verify(test: PipelineTest, **options: Any) -> DeterminismReport:
    session: Any = PlainSpark()
    return verify_determinism(test.pipeline.plan(), test.log, session, **options)


def test_a_deterministic_function_passes(tmp_path: Path) -> None:
    report = report_of("determined", tmp_path, verify)
    assert report.is_deterministic
    assert (report.ticks, report.input_rows) == (TICKS, 5 * TICKS)
    assert report.output_rows > 30, "topics, views and the changes of views"


@pytest.mark.parametrize("function", ["drawn", "averaged"])
def test_a_function_that_is_not_deterministic_is_named_with_its_step_and_row(
    tmp_path: Path, function: str
) -> None:
    report = report_of(function, tmp_path, verify)
    assert not report.is_deterministic
    assert {each.output for each in report.differences} == {"computed", "totals"}
    first = next(each for each in report.differences if each.output == "computed")
    assert first.first is not None
    assert first.second is not None
    assert first.first["order_id"] == first.second["order_id"]
    assert first.first["computed"] != first.second["computed"]
    assert f"{function}()" in str(first)
    assert "'computed' differs at partition 0, row " in str(first)


def test_the_log_and_the_state_are_only_read(tmp_path: Path) -> None:
    def check(test: PipelineTest) -> DeterminismReport:
        def everything() -> tuple[Any, ...]:
            topics = test.log.topics()
            files = sorted(
                (str(path), path.stat().st_size)
                for path in test.state.rglob("*")
                if path.is_file() and not path.name.endswith(("-shm", "-wal"))
            )
            return topics, test.log.snapshot(topics), test.log.notes(""), files

        before = everything()
        report = verify(test)
        assert everything() == before
        return report

    report_of("drawn", tmp_path, check)


def test_ticks_are_chosen_by_number(tmp_path: Path) -> None:
    def check(test: PipelineTest) -> DeterminismReport:
        assert verify(test, ticks=2).ticks == 2
        assert verify(test, since=2, ticks=2).input_rows == 10
        with pytest.raises(ReplayRefused, match="has no tick 99"):
            verify(test, since=99)
        return verify(test, ticks=1)

    assert report_of("determined", tmp_path, check).input_rows == 5


def test_a_pipeline_that_never_ran_has_nothing_to_verify(tmp_path: Path) -> None:
    session: Any = PlainSpark()
    with hr.open_log(f"file:{tmp_path}") as log, pytest.raises(ReplayRefused, match="never run"):
        verify_determinism(shop("determined").plan(), log, session)
