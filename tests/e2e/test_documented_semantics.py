"""Joins and windows give the rows that the documentation of Kafka Streams and Flink shows. Their
examples are data files in `documented`.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import headrace as hr
from headrace.testing.pipelines import PipelineTest

if TYPE_CHECKING:
    from headrace.pipeline.stream import Table

DOCUMENTED = Path(__file__).parent / "documented"
KAFKA = json.loads((DOCUMENTED / "kafka_streams_joins.json").read_text())
FLINK = json.loads((DOCUMENTED / "flink_windows.json").read_text())
START = datetime(2020, 4, 15, tzinfo=UTC)
MAX_TICKS = [1, 100]


def at(time: str) -> datetime:
    hours, minutes = time.split(":")
    return START + timedelta(hours=int(hours), minutes=int(minutes))


def pair(row: dict[str, Any]) -> str:
    """The values of both sides as text, such as `A-` for A without a partner."""
    return f"{row['v'] or '-'}{row['v_right'] or '-'}"


def feed(test: PipelineTest, side: str, second: int) -> bool:
    """Feed a side's change of a second, if it has one that its kind of input can have."""
    if str(second) not in KAFKA[side]:
        return False
    value = KAFKA[side][str(second)]
    if test.log.topic(side).is_table:
        change = "delete" if value is None else "update_postimage"
        test.feed(side, [{"k": 1, "v": value, "_change_type": change}])
    elif value is not None:
        test.feed(side, [{"k": 1, "v": value, "at": START + timedelta(seconds=second)}])
    return True


def feed_all(test: PipelineTest) -> None:
    """Feed both sides, a tick for each second."""
    for second in range(1, 16):
        for side in ("left", "right"):
            if feed(test, side, second):
                test.cut(forced=True)


def table(pipeline: hr.Pipeline, name: str) -> Table:
    return pipeline.table(name, schema="k BIGINT, v STRING", key="k")


def stream(pipeline: hr.Pipeline, name: str) -> hr.Stream:
    return pipeline.topic(
        name,
        schema="k BIGINT, v STRING, at TIMESTAMP",
        event_time=hr.EventTime("at", delay="1 minute"),
    )


@pytest.mark.parametrize("how", ["inner", "left", "full"])
def test_a_join_of_tables_holds_what_kafka_streams_documents(tmp_path: Path, how: str) -> None:
    pipeline = hr.Pipeline("documented")
    joined = table(pipeline, "left").join(
        table(pipeline, "right"), on="k", how=how, suffix="_right"
    )
    pipeline.view("joined", joined)
    with PipelineTest(pipeline, tmp_path) as test:
        held = []
        for second in range(1, 16):
            for side in ("left", "right"):
                if feed(test, side, second):
                    test.settle()
            held.append("".join(pair(row) for row in test.view("joined")))
    assert held == KAFKA["table_table"][how]


@pytest.mark.parametrize("max_ticks", MAX_TICKS)
@pytest.mark.parametrize("how", ["inner", "left"])
def test_a_stream_meets_a_table_as_kafka_streams_documents(
    tmp_path: Path, how: str, max_ticks: int
) -> None:
    pipeline = hr.Pipeline("documented")
    joined = stream(pipeline, "left").join(
        table(pipeline, "right"), on="k", how=how, suffix="_right"
    )
    pipeline.write("joined", joined)
    with PipelineTest(pipeline, tmp_path) as test:
        feed_all(test)
        test.settle(max_ticks)
        rows = test.log.read("joined").to_pylist()
    emitted = {str((row["at"] - START).seconds): pair(row) for row in rows}
    assert emitted == KAFKA["stream_table"][how]
    assert len(rows) == len(emitted)


@pytest.mark.parametrize("max_ticks", MAX_TICKS)
@pytest.mark.parametrize("how", ["inner", "left", "full"])
def test_streams_meet_as_kafka_streams_documents(tmp_path: Path, how: str, max_ticks: int) -> None:
    """Every row finds a partner, so outer joins emit what the inner one does."""
    pipeline = hr.Pipeline("documented")
    joined = stream(pipeline, "left").join(
        stream(pipeline, "right"), on="k", how=how, within="15 seconds", suffix="_right"
    )
    pipeline.write("joined", joined)
    with PipelineTest(pipeline, tmp_path) as test:
        feed_all(test)
        test.settle(max_ticks)
        test.pass_time("10 minutes")
        test.settle(max_ticks)
        rows = test.log.read("joined").to_pylist()
    emitted: dict[str, list[str]] = {}
    for row in rows:
        second = str((max(row["at"], row["at_right"]) - START).seconds)
        emitted.setdefault(second, []).append(pair(row))
    assert {second: sorted(pairs) for second, pairs in emitted.items()} == KAFKA["stream_stream"]


@pytest.mark.parametrize("max_ticks", MAX_TICKS)
@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("tumble_10", hr.tumbling("10 minutes")),
        ("hop_10_every_5", hr.hopping("10 minutes", every="5 minutes")),
    ],
)
def test_windows_hold_what_flink_documents(
    tmp_path: Path, name: str, window: Any, max_ticks: int
) -> None:
    pipeline = hr.Pipeline("documented")
    bids = pipeline.topic(
        "bids",
        schema="at TIMESTAMP, price DECIMAL(10, 2), item STRING",
        event_time=hr.EventTime("at", delay="1 second"),
    )
    totals = bids.window(window).aggregate(price=hr.agg.sum("price"))
    pipeline.view("totals", totals)
    with PipelineTest(pipeline, tmp_path) as test:
        for time, price, item in FLINK["bids"]:
            test.feed("bids", [{"at": at(time), "price": Decimal(price), "item": item}])
            test.cut()
        test.settle(max_ticks, final=True)
        rows = test.view("totals")
    assert sorted((row["window_start"], row["window_end"], row["price"]) for row in rows) == [
        (at(start), at(end), Decimal(price)) for start, end, price in FLINK[name]
    ]


def test_a_join_of_windows_holds_what_flink_documents(tmp_path: Path) -> None:
    """A window join is a join of two tables keyed by window: here of windows that collect ids."""
    pipeline = hr.Pipeline("documented")

    def windows(name: str) -> Table:
        rows = pipeline.topic(
            name,
            schema="at TIMESTAMP, num BIGINT, id STRING",
            event_time=hr.EventTime("at", delay="1 hour"),
        )
        late = hr.late.drop()
        windowed = rows.window(hr.tumbling("5 minutes"), late=late, emit="changes")
        return windowed.group_by("num").aggregate(id=hr.agg.max("id"))

    joined = windows("left").join(
        windows("right"), on=["num", "window_start", "window_end"], how="full", suffix="_right"
    )
    pipeline.view("joined", joined)
    with PipelineTest(pipeline, tmp_path) as test:
        for side in ("left", "right"):
            for time, num, name in FLINK[side]:
                test.feed(side, [{"at": at(time), "num": num, "id": name}])
                test.cut()
        test.settle(1)
        rows = test.view("joined")
    assert {
        (row["num"], row["id"], row["id_right"], row["window_start"], row["window_end"])
        for row in rows
    } == {
        (left if left is not None else right, left_id, right_id, at(start), at(end))
        for left, left_id, right, right_id, start, end in FLINK["full_join_of_tumble_5"]
    }
    assert len(rows) == len(FLINK["full_join_of_tumble_5"])
