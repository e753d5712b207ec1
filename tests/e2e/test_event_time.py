"""Event time through the engine: clocks, unusable times, repeats."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import headrace as hr
from headrace.log.dead_letters import read_dead_letters
from headrace.testing.pipelines import PipelineTest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
START = datetime(2026, 3, 1, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def clicks() -> hr.Pipeline:
    pipeline = hr.Pipeline("clicks")
    rows = pipeline.topic(
        "clicks",
        schema="id BIGINT, device STRING, at TIMESTAMP",
        partitions=2,
        event_time=hr.EventTime(
            "at", delay="5 seconds", producer="device", idle="1 minute", max_ahead="1 day"
        ),
    )
    pipeline.write("once", rows.dedupe(on="id", within="1 minute").key_by("id"), partitions=2)
    return pipeline


def row(number: int, device: str, when: Any) -> dict[str, Any]:
    return {"id": number, "device": device, "at": when}


def test_repeats_are_left_out_whatever_the_batches(tmp_path: Path, spark: SparkSession) -> None:
    ticks = [
        [row(1, "a", at(0)), row(1, "b", at(3)), row(2, "b", at(10))],
        [row(1, "a", at(50)), row(2, "a", at(75)), row(3, "b", at(70))],
        [row(1, "a", at(110)), row(3, "a", at(0))],
    ]
    answers = []
    for number, max_ticks in enumerate((10, 1)):
        with PipelineTest(clicks(), tmp_path / str(number), spark, shards=number + 1) as test:
            for rows in ticks:
                test.feed("clicks", rows)
                test.cut()
            while test.step(max_ticks):
                continue
            answers.append(sorted(test.rows("once")))
            assert test.runner.watermark_state.inputs["clicks"].watermark_us == int(
                at(65).timestamp() * 1e6
            ), "held back by b"
            assert test.runner.watermark_state.inputs["clicks"].slowest_producers(1)[0][0] == "b"
    assert answers[0] == answers[1]
    assert sorted((found[1], found[3]) for found in answers[0]) == [
        (1, at(0)),
        (1, at(110)),
        (2, at(10)),
        (2, at(75)),
        (3, at(70)),
    ]


def test_times_that_cannot_be_are_dead_letters_and_do_not_move_the_clock(
    tmp_path: Path, spark: SparkSession
) -> None:
    with PipelineTest(clicks(), tmp_path, spark) as test:
        test.feed(
            "clicks",
            [row(1, "a", at(0)), row(2, "a", None), row(3, "b", datetime(9950, 1, 1, tzinfo=UTC))],
        )
        test.settle()
        assert [found[1] for found in test.rows("once")] == [1]
        assert {dead_letter["reason"] for dead_letter in read_dead_letters(test.log, "clicks")} == {
            "its event time is null",
            "its event time is after the year 9900",
        }
        assert test.runner.watermark_state.inputs["clicks"].watermark_us == int(
            at(-5).timestamp() * 1e6
        )
        assert test.runner.last_result is not None
        assert test.runner.last_result.counts["clicks.diverted"] == 2
