"""Which columns of a stream go through the shuffle to an aggregation: those that it reads, and all
of them where whole rows may come out.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace.engine import shuffle
from headrace.pipeline.stream import Stream, Table
from headrace.testing.pipelines import PipelineTest

SCHEMA = "region STRING, amount BIGINT, note STRING, url STRING, at TIMESTAMP, till STRING"
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
ALL = {"region", "amount", "note", "url", "at", "till"}
MINUTE = hr.tumbling("1 minute")
Build = Callable[[Stream], Table]

BUILDS: dict[str, tuple[Build, set[str]]] = {
    "groups": (
        lambda orders: orders.group_by("region").aggregate(n=hr.agg.count()),
        {"region"},
    ),
    "one row of all": (lambda orders: orders.aggregate(total=hr.agg.sum("amount")), {"amount"}),
    "windows": (
        lambda orders: orders.window(MINUTE).group_by("region").aggregate(n=hr.agg.count()),
        {"region", "at", "till"},
    ),
    "the row of the largest": (
        lambda orders: orders.group_by("region").aggregate(url=hr.agg.max_by("url", by="amount")),
        {"region", "url", "amount"},
    ),
    "sessions": (
        lambda orders: (
            orders.window(hr.session("10 seconds"))
            .group_by("region")
            .aggregate(most=hr.agg.max("amount"))
        ),
        {"region", "amount", "at", "till"},
    ),
    "late rows go on": (
        lambda orders: (
            orders.window(MINUTE, late=hr.late.divert("late_orders"))
            .group_by("region")
            .aggregate(n=hr.agg.count())
        ),
        ALL,
    ),
    "rows can be rejected": (
        lambda orders: orders.group_by("region").aggregate(
            amounts=hr.agg.collect("amount", max_values=3)
        ),
        ALL,
    ),
}


def rows() -> list[dict[str, Any]]:
    return [
        {
            "region": None if number == 7 else f"r{number % 3}",
            "amount": number,
            "note": "a note",
            "url": f"/{number}",
            "at": BEGIN + timedelta(seconds=number),
            "till": "t",
        }
        for number in range(100)
    ]


@pytest.mark.parametrize("name", BUILDS)
def test_an_aggregation_is_sent_the_columns_that_it_reads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, expected = BUILDS[name]
    sent: list[set[str]] = []
    to_blob = shuffle.to_blob

    def watched(batch: pa.RecordBatch) -> pa.Buffer:
        sent.append({name for name in batch.schema.names if name in ALL})
        return to_blob(batch)

    monkeypatch.setattr(shuffle, "to_blob", watched)
    pipeline = hr.Pipeline("shop")
    times = hr.EventTime("at", delay="1 second", producer="till")
    result = build(pipeline.topic("orders", schema=SCHEMA, event_time=times, partitions=2))
    pipeline.view("result", result)
    with PipelineTest(pipeline, tmp_path) as test:
        test.feed("orders", rows())
        test.settle(final=True)
        assert test.view("result")
    assert sent[0] == expected
