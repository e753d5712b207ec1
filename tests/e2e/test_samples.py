"""Samples: the same rows whatever the batches, shards and restarts, and about as many as asked."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.testing.pipelines import PipelineTest

pytestmark = pytest.mark.usefixtures("no_syncs")
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
OUTPUTS = ("tenth", "smaller", "other", "of_users", "windows", "elements")


def sampled() -> hr.Pipeline:
    pipeline = hr.Pipeline("sampled")
    rows = pipeline.topic(
        "rows",
        schema="id BIGINT, u STRING, tags ARRAY<INT>, at TIMESTAMP",
        key="u",
        partitions=3,
        event_time="at",
    )
    pipeline.write("tenth", rows.sample(0.2))
    pipeline.write("smaller", rows.select("id").sample(0.1))
    pipeline.write("other", rows.sample(0.2, seed=-1))
    pipeline.write("of_users", rows.sample(0.5, by="u"))
    windows = rows.window(hr.tumbling("1 minute")).group_by("u").aggregate(n=hr.agg.count())
    pipeline.write("windows", windows.changes().sample(0.5))
    pipeline.write("elements", rows.explode("tags").sample(0.5))
    newest = rows.to_table("id")
    pipeline.view("newest", newest.sample(0.5))
    pipeline.view("all_newest", newest)
    return pipeline


def fed(tick: int) -> list[dict[str, Any]]:
    return [
        {
            "id": (number * 7 + tick) % 150,
            "u": f"u{number % 40}",
            "tags": [1, 1, 2],
            "at": NOON + timedelta(seconds=20 * tick),
        }
        for number in range(200)
    ]


def test_a_sample_is_the_same_whatever_the_batches(tmp_path: Path) -> None:
    results = []
    for number, max_ticks in enumerate((1, 4)):
        with PipelineTest(sampled(), tmp_path / f"{number}", shards=number + 1) as test:
            for tick in range(5):
                test.feed("rows", fed(tick))
                test.cut()
            test.step(max_ticks)
            test.restart(shards=3 - number, lose_local_store=True)
            test.settle(max_ticks, final=True)
            columns = {name: test.log.read(name).to_pylist() for name in OUTPUTS}
            assert test.view("newest")
            every = {row["id"]: row for row in test.view("all_newest")}
            assert all(every[row["id"]] == row for row in test.view("newest"))
            found = {
                name: sorted(
                    str([value for key, value in row.items() if key[0] != "_"]) for row in rows
                )
                for name, rows in columns.items()
            }
            found["newest"] = sorted(map(str, test.view("newest")))
            results.append(found)
    assert results[0] == results[1]
    sizes = {name: len(rows) for name, rows in results[0].items()}
    assert 150 < sizes["tenth"] < 250
    assert 60 < sizes["smaller"] < 140
    assert 150 < sizes["other"] < 250
    assert results[0]["tenth"] != results[0]["other"]
    assert 0 < sizes["windows"] < 200
    assert 1_000 < sizes["elements"] < 2_000
    assert sizes["elements"] % 3 == 0
    assert 45 < sizes["newest"] < 105
    users = {row.split("'")[1] for row in results[0]["of_users"]}
    assert len(results[0]["of_users"]) == 25 * len(users)
    smaller, larger = (
        {row.strip("[]").partition(",")[0] for row in results[0][name]}
        for name in ("smaller", "tenth")
    )
    assert smaller <= larger
