"""Devices whose clocks are wrong, through a pipeline: corrected times move the clock and fill the
windows, whatever the batches, shards and restarts.

The jobs run in this process, but for the one that says otherwise.
"""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace.errors import (
    BadDuration,
    NotSupported,
    PlanChanged,
    PlanError,
    StreamOnly,
    UnknownColumn,
)
from headrace.runtime.explain import explain
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark
from tests.operators.device_time_oracle import EPOCH, Row, at, corrected_times, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("no_syncs")
SCHEMA = "device STRING, happened TIMESTAMP, sent TIMESTAMP, received TIMESTAMP"
PLAIN: Any = PlainSpark()
YEARS = 10 * 365 * 86_400.0


def times(**more: Any) -> Any:
    return hr.device_time(
        **{
            "event": "happened",
            "sent": "sent",
            "received": "received",
            "device": "device",
            "idle": "1000 days",
            **more,
        }
    )


def readings(pipeline: hr.Pipeline, **more: Any) -> hr.Stream:
    return pipeline.topic(
        "readings", schema=SCHEMA, key="device", event_time=times(**more), partitions=2
    )


def plant() -> hr.Pipeline:
    """Minutes by device, which is the key that corrections go by too; and the rows themselves, as
    they were corrected.
    """
    pipeline = hr.Pipeline("plant")
    rows = readings(pipeline, delay="5 seconds")
    pipeline.write("corrected", rows)
    pipeline.view(
        "minutes",
        rows.window(hr.tumbling("1 minute"), late=hr.late.correct("1 hour"))
        .group_by("device")
        .aggregate(n=hr.agg.count()),
    )
    pipeline.view(
        "all_minutes",
        rows.window(
            hr.tumbling("1 minute"), late=hr.late.correct("1 hour"), emit="changes"
        ).aggregate(n=hr.agg.count()),
    )
    return pipeline


def disordered(seed: int, ticks: int = 8) -> list[list[Row]]:
    """Three devices, whose clocks are ten years slow, an hour fast and right, and now and then
    somewhere else.
    """
    chance = Random(seed)
    off = {"a": -YEARS, "b": 3600.0, "c": 0.0}
    found: list[list[Row]] = []
    for tick in range(ticks):
        found.append([])
        for device in chance.choices("abc", k=7):
            real = tick * 40 + chance.randrange(40)
            wrong = off[device] + (chance.choice([500, -900]) if chance.random() < 0.1 else 0)
            found[-1].append(
                row(real + wrong, real + wrong + 2, real + 2 + chance.random(), device)
            )
    return found


def feed(test: PipelineTest, ticks: list[list[Row]]) -> None:
    for rows in ticks:
        test.feed("readings", rows)
        test.cut(forced=True)


def corrected(test: PipelineTest) -> list[tuple[Any, ...]]:
    return [
        tuple(each[name] for name in ("device", "happened", "event_time", "time_flag"))
        for each in test.log.read("corrected").to_pylist()
    ]


def test_corrected_times_equal_the_reference_whatever_the_batches(
    tmp_path: Path,
) -> None:
    ticks = disordered(3)
    answers = []
    for max_ticks, shards in ((100, 2), (1, 3), (3, 1)):
        with PipelineTest(plant(), tmp_path / f"{shards}", PLAIN, shards=shards) as test:
            feed(test, ticks[:5])
            test.step(max_ticks)
            test.restart(shards=shards + 1, lose_local_store=True)
            feed(test, [*ticks[5:], [row(10_000, 10_000, 10_000, device) for device in "c"]])
            while test.step(max_ticks):
                continue
            answers.append(
                (
                    corrected(test),
                    test.view("minutes"),
                    test.changes("minutes"),
                    test.changes("all_minutes"),
                )
            )
            flagged = test.runner.leading.entry.counts["readings.flagged"]
    assert answers[0] == answers[1] == answers[2]
    rows, minutes, _, _ = answers[0]
    given = [each for tick in ticks for each in tick]
    wanted = Counter(
        (each["device"], each["happened"], time)
        for each, time in zip(given, corrected_times(ticks), strict=True)
    )
    assert Counter(each[:3] for each in rows if each[1] < at(10_000)) == wanted
    assert flagged == sum(1 for each in rows if each[3] is not None) > 0
    real = Counter(
        (device, minute(time)) for device, _, time in wanted.elements() if time is not None
    )
    assert {(each["device"], each["window_start"]): each["n"] for each in minutes} == {
        key: count for key, count in real.items() if key[1] < minute(slowest(rows))
    }


def minute(time: datetime) -> datetime:
    return time.replace(second=0, microsecond=0)


def slowest(rows: list[tuple[Any, ...]]) -> datetime:
    """How far the clock has come: devices a and b hold it back."""
    newest: list[datetime] = [
        max(each[2] for each in rows if each[0] == device) for device in "abc"
    ]
    return min(newest) - timedelta(seconds=5)


def test_rows_stay_in_the_order_of_their_topic(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("plant")
    pipeline.write("corrected", pipeline.topic("readings", schema=SCHEMA, event_time=times()))
    rows = [row(n, n, n + 1, "abc"[n % 3]) for n in range(30)]
    with PipelineTest(pipeline, tmp_path, PLAIN, shards=3) as test:
        feed(test, [rows[:20], rows[20:]])
        test.settle()
        found = test.log.read("corrected").to_pylist()
    assert [each["happened"] for each in found] == [each["happened"] for each in rows]


def test_a_device_that_is_years_off_holds_nothing_back_and_is_never_late(tmp_path: Path) -> None:
    with PipelineTest(plant(), tmp_path, PLAIN) as test:
        feed(
            test,
            [
                [
                    row(10, 10, 11, "right"),
                    row(-YEARS + 10, -YEARS + 10, 11, "slow"),
                    row(YEARS + 10, YEARS + 10, 11, "fast"),
                ]
            ],
        )
        feed(test, [[row(90, 90, 91, "right"), row(-YEARS + 90, -YEARS + 90, 91, "slow")]])
        test.settle()
        assert test.view("minutes") == []
        why = explain(test.pipeline.plan(), test.log, tmp_path / "state", "minutes.window")
        assert [each.producer for each in why.held_by] == ["fast"], (
            "who has said nothing of the second minute"
        )
        feed(test, [[row(YEARS + 80, YEARS + 80, 81, "fast")]])
        test.settle()
        assert {
            each["device"]: (each["window_start"], each["n"]) for each in test.view("minutes")
        } == dict.fromkeys(("right", "slow", "fast"), (EPOCH, 1))
        assert "readings.flagged" not in test.runner.leading.entry.counts
        assert "minutes.window.late" not in test.runner.leading.entry.counts


def test_rows_without_a_usable_time_are_dead_lettered_and_counted_once(tmp_path: Path) -> None:
    with PipelineTest(plant(), tmp_path, PLAIN) as test:
        ahead = {
            "device": "b",
            "happened": datetime(9950, 1, 1, tzinfo=EPOCH.tzinfo),
            "sent": None,
            "received": None,
        }
        feed(test, [[row(None, 1, 2, "a"), ahead, row(1, 1, 2, None), row(5, 5, 6, "a")]])
        test.settle()
        assert [each[0] for each in corrected(test)] == ["a"]
        dead_letters = {
            each["reason"]: (each["source_partition"], each["source_offset"])
            for each in test.log.read("readings.dead").to_pylist()
        }
        offsets = {
            each["happened"]: (each["_partition"], each["_offset"])
            for each in test.log.read("readings").to_pylist()
        }
        assert dead_letters == {
            "its event time is null": offsets[None],
            "its event time is after the year 9900": offsets[ahead["happened"]],
            "its key is null": offsets[at(1)],
        }
        assert test.runner.leading.entry.counts["readings.diverted"] == 3


def test_other_columns_for_the_offset_are_another_state(tmp_path: Path) -> None:
    with PipelineTest(plant(), tmp_path, PLAIN) as test:
        feed(test, [[row(1, 1, 2)]])
        test.settle()
        test.pipeline = hr.Pipeline("plant")
        rows = readings(test.pipeline, sent="happened", delay="5 seconds")
        test.pipeline.write("corrected", rows)
        with pytest.raises(PlanChanged, match="'readings' is not what it was"):
            test.restart()


@pytest.mark.spark
def test_on_spark_with_a_condition_between(tmp_path: Path, spark: SparkSession) -> None:
    pipeline = hr.Pipeline("plant")
    fine = (
        readings(pipeline, delay="5 seconds")
        .where("time_flag IS NULL")
        .with_columns(late_by="received - event_time")
    )
    pipeline.view(
        "minutes",
        fine.window(hr.tumbling("1 minute"))
        .group_by("device")
        .aggregate(n=hr.agg.count(), longest=hr.agg.max("late_by")),
    )
    with PipelineTest(pipeline, tmp_path, spark) as test:
        test.feed("readings", [row(-YEARS + n, -YEARS + n + 2, n + 3, "a") for n in range(5)])
        test.feed("readings", [row(None, 4, 5, "a"), row(7, None, None, "b")])
        test.settle()
        test.feed("readings", [row(-YEARS + 100, -YEARS + 100, 101, "a"), row(100, 100, 101, "b")])
        test.settle()
        assert [(each["device"], each["n"], each["longest"]) for each in test.view("minutes")] == [
            ("a", 5, timedelta(seconds=2))
        ]


def test_invalid_declarations_are_refused(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("plant")
    for more, error, why in (
        ({"sent": "sendt"}, UnknownColumn, "did you mean 'sent'"),
        ({"sent": "device"}, PlanError, "'device', which is STRING and no time"),
        ({"tolerance": "0 seconds"}, PlanError, "is zero"),
        ({"tolerance": "a bit"}, BadDuration, "tolerance"),
        ({"column": "device"}, PlanError, "a column 'device' already"),
        ({"flag": "EVENT_TIME"}, PlanError, "a column 'EVENT_TIME' already"),
    ):
        with pytest.raises(error, match=why):
            readings(pipeline, **more)
    with pytest.raises(StreamOnly, match="for streams"):
        pipeline.table("devices", schema=SCHEMA, key="device", event_time=times())
    rows = readings(pipeline)
    assert rows.schema.names[-2:] == ["event_time", "time_flag"]
    assert "from happened, sent and received" in rows.step.summary()
    with pytest.raises(NotSupported, match="keeps state"):
        rows.df(spark=PLAIN, log=f"file:{tmp_path}")


def test_clocks_that_are_thousands_of_years_apart_are_dead_letters(tmp_path: Path) -> None:
    first, last = (datetime(year, 1, 2, tzinfo=EPOCH.tzinfo) for year in (1, 9999))
    with PipelineTest(plant(), tmp_path, PLAIN) as test:
        feed(
            test,
            [
                [
                    {"device": "b", "happened": first, "sent": last, "received": at(2)},
                    row(5, 5, 6, "a"),
                ]
            ],
        )
        test.settle()
        assert [each[0] for each in corrected(test)] == ["a"]
        assert [each["reason"] for each in test.log.read("readings.dead").to_pylist()] == [
            "its event time is null"
        ]
        assert test.runner.leading.entry.counts["readings.flagged"] == 1
        assert sum(each["n"] for each in test.view("all_minutes")) == 1


FAR_US = 600_000_000_000_000_000
"""The year 20983, as of a device that counts in other units; as many years before 1970 there was no
year.
"""


@pytest.mark.parametrize(
    ("time_us", "reason"),
    [
        (FAR_US, "its event time is after the year 9900"),
        (-FAR_US, "its event time is before the year 1"),
    ],
)
def test_a_time_in_a_year_that_no_text_has_is_a_dead_letter_like_any_other(
    tmp_path: Path, time_us: int, reason: str
) -> None:
    shop = hr.Pipeline("shop")
    clicks = shop.topic("clicks", schema="k STRING, at TIMESTAMP", event_time=hr.EventTime("at"))
    shop.view(
        "minutes",
        clicks.window(hr.tumbling("1 minute"), emit="changes")
        .group_by("k")
        .aggregate(n=hr.agg.count()),
    )
    with PipelineTest(shop, tmp_path, PLAIN) as test:
        times_us = pa.array([time_us, 0])
        test.feed(
            "clicks",
            pa.table({"k": ["far", "near"], "at": times_us.cast(pa.timestamp("us", "UTC"))}),
        )
        test.settle()
        assert [each["k"] for each in test.view("minutes")] == ["near"]
        (dead_letter,) = test.log.read("clicks.dead").to_pylist()
        assert (dead_letter["reason"], dead_letter["source_offset"]) == (reason, 0)
        assert json.loads(dead_letter["row"]).get("at") is None
