"""Partition, offset and append time of a row as columns: they tell equal rows apart, and can be the
event time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import PlanError, UnknownColumn
from headrace.testing.pipelines import PipelineTest

pytestmark = pytest.mark.usefixtures("no_syncs")
PLACE = {"part": "_partition", "number": "_offset"}


def shop() -> hr.Pipeline:
    pipeline = hr.Pipeline("shop")
    clicks = pipeline.topic(
        "clicks", schema="page STRING, n BIGINT", key="page", partitions=3, metadata=PLACE
    )
    pipeline.view("each", clicks.to_table(["part", "number"]))
    pipeline.view("pages", clicks.to_table("page"))
    pipeline.write("large", clicks.where("n > 1").select("page", "number"))
    timed = pipeline.topic(
        "timed", schema="page STRING", event_time="stored", metadata={"stored": "_timestamp"}
    )
    pipeline.view("timed_pages", timed.to_table("page"))
    pipeline.view("minutes", timed.window(hr.tumbling("1 minute")).aggregate(n=hr.agg.count()))
    both = pipeline.topic(
        "both",
        schema="page STRING",
        event_time=hr.processing_time(),
        metadata={"at": "_timestamp", "number": "_offset"},
    )
    pipeline.view("both_rows", both.to_table("number"))
    return pipeline


def test_equal_rows_stay_apart(tmp_path: Path) -> None:
    with PipelineTest(shop(), tmp_path) as test:
        rows = [{"page": page, "n": n} for page in "abc" for n in (1, 1, 2)]
        for _ in range(3):
            test.feed("clicks", rows)
            test.feed("timed", [{"page": "a"}, {"page": "b"}])
            test.feed("both", [{"page": "a"}])
            test.settle()
        test.restart(shards=3)
        test.feed("clicks", rows)
        test.settle(final=True)
        stored = test.log.read("clicks").to_pylist()
        names = ["page", "n", "_partition", "_offset"]
        assert shown(test.view("each"), ["page", "n", "part", "number"]) == shown(stored, names)
        assert len(test.view("each")) == 36
        large = [row for row in stored if row["n"] > 1]
        found = test.log.read("large").to_pylist()
        assert shown(found, ["page", "number"]) == shown(large, ["page", "_offset"])
        timed = test.log.read("timed").to_pylist()
        newest = {row["page"]: row["_timestamp"] for row in timed}
        assert {row["page"]: row["stored"] for row in test.view("timed_pages")} == newest
        assert sum(row["n"] for row in test.view("minutes")) == len(timed)
        both = test.log.read("both").to_pylist()
        assert shown(test.view("both_rows"), ["number", "at"]) == shown(
            both, ["_offset", "_timestamp"]
        )


def shown(rows: list[dict[str, Any]], names: list[str]) -> list[str]:
    return sorted(repr([row[name] for name in names]) for row in rows)


def test_metadata_that_does_not_exist_is_refused() -> None:
    pipeline = hr.Pipeline("shop")
    with pytest.raises(PlanError, match="'_partition', '_offset', '_timestamp'"):
        pipeline.topic("a", schema="k BIGINT", metadata={"tick": "_tick"})
    with pytest.raises(PlanError, match="'k' twice"):
        pipeline.topic("a", schema="k BIGINT", metadata={"k": "_offset"})
    with pytest.raises(PlanError, match="reserved"):
        pipeline.topic("a", schema="k BIGINT", metadata={"_offset": "_offset"})
    with pytest.raises(UnknownColumn, match="'at'"):
        pipeline.topic("a", schema="k BIGINT", event_time="at", metadata={"stored": "_timestamp"})
    devices = hr.device_time(event="t", sent="t", received="t", device="d")
    with pytest.raises(PlanError, match=r"metadata= and hr\.device_time"):
        schema = "d STRING, t TIMESTAMP"
        pipeline.topic("a", schema=schema, event_time=devices, metadata={"o": "_offset"})
