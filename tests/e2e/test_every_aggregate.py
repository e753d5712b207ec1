"""Every aggregate there is, in one pipeline through Spark: over a stream and, where it can take
rows back, over a table; across batches, shards and a restart.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace.operators.aggregates.sketches import BloomFilter
from headrace.testing.pipelines import PipelineTest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
TICKS, ROWS, KEYS, WORDS = 6, 3000, 3, 500


class Xor(hr.agg.CustomAggregate):
    """A user's own: all values, exclusive-or."""

    state_type = pa.int64()
    result_type = pa.int64()

    def add(self, states: pa.Array, groups: pa.Array, values: pa.Array) -> pa.Array:
        current = [state or 0 for state in states.to_pylist()]
        for group, value in zip(groups.to_pylist(), values.to_pylist(), strict=True):
            current[group] ^= value
        return pa.array(current, pa.int64())

    retract = add

    def result(self, states: pa.Array) -> pa.Array:
        return states


EXACT: dict[str, Any] = {
    "n": hr.agg.count(),
    "total": hr.agg.sum("v"),
    "mean": hr.agg.avg("v"),
    "low": hr.agg.min("v"),
    "high": hr.agg.max("v"),
    "kinds": hr.agg.count_distinct("word"),
    "spread": hr.agg.stddev("v"),
    "mixed": hr.agg.custom(Xor(), "v"),
}
IN_ORDER: dict[str, Any] = {
    "began": hr.agg.first("v"),
    "newest": hr.agg.last("v"),
    "all": hr.agg.collect("v", max_values=100_000),
}
SKETCHED: dict[str, Any] = {
    "about": hr.agg.approx_distinct("word"),
    "parts": hr.agg.quantiles("v", [0.1, 0.5, 0.9]),
    "often": hr.agg.heavy_hitters("word", max_values=1),
    "members": hr.agg.bloom("word", expected=WORDS),
}


def pipeline() -> hr.Pipeline:
    made = hr.Pipeline("everything")
    rows = made.topic(
        "rows", schema="id BIGINT, k BIGINT, v BIGINT, word STRING", key="k", partitions=1
    )
    made.view("of_rows", rows.group_by("k").aggregate(**EXACT, **IN_ORDER, **SKETCHED))
    made.view("of_newest", rows.to_table("id").group_by("k").aggregate(**EXACT))
    return made


def batches() -> list[list[dict[str, Any]]]:
    """Half of the rows of a tick have ids that were there before, most of them in another group
    then. One word is much more frequent than all others.
    """
    rng = random.Random(5)
    made = []
    for tick in range(TICKS):
        ids = [
            rng.randrange(max(1, tick * ROWS)) if rng.random() < 0.5 else tick * ROWS + at
            for at in range(ROWS)
        ]
        words = ["often" if rng.random() < 0.2 else f"word-{rng.randrange(WORDS)}" for _ in ids]
        made.append(
            [
                {"id": each, "k": rng.randrange(KEYS), "v": rng.randrange(-500, 1000), "word": word}
                for each, word in zip(ids, words, strict=True)
            ]
        )
    return made


def exact(rows: list[dict[str, Any]]) -> dict[str, Any]:
    values = [row["v"] for row in rows]
    mixed = 0
    for value in values:
        mixed ^= value
    known = {
        "n": len(values),
        "total": sum(values),
        "mean": statistics.fmean(values),
        "low": min(values),
        "high": max(values),
        "mixed": mixed,
    }
    return {
        **known,
        "kinds": len({row["word"] for row in rows}),
        "spread": pytest.approx(statistics.stdev(values), rel=1e-12),
    }


def check_sketches(answer: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    words, values = Counter(row["word"] for row in rows), sorted(row["v"] for row in rows)
    assert answer["about"] == pytest.approx(len(words), rel=0.1)
    for point, found in zip((0.1, 0.5, 0.9), answer["parts"], strict=True):
        assert (
            values[int((point - 0.02) * len(values))]
            <= found
            <= values[int((point + 0.02) * len(values))]
        )
    (frequent,) = answer["often"]
    assert frequent["value"] == "often"
    assert frequent["count"] == pytest.approx(words["often"], rel=0.05)
    members = BloomFilter.from_bytes(answer["members"])
    assert members.might_contain(pa.array(list(words))).all()
    assert members.might_contain(pa.array([f"absent-{each}" for each in range(1000)])).sum() < 50


def test_every_aggregate_through_spark(tmp_path: Path, spark: SparkSession) -> None:
    fed = batches()
    with PipelineTest(pipeline(), tmp_path, spark) as test:
        for number, rows in enumerate(fed):
            test.feed("rows", rows)
            test.cut()
            if number == TICKS // 2:
                test.step(2)
                test.restart(shards=3, lose_local_store=True)
        test.settle(2)
        of_rows, of_newest = (
            {row["k"]: row for row in test.view(view)} for view in ("of_rows", "of_newest")
        )
    flat = [row for rows in fed for row in rows]
    newest = list({row["id"]: row for row in flat}.values())
    for key in range(KEYS):
        mine = [row for row in flat if row["k"] == key]
        values = [row["v"] for row in mine]
        assert {name: of_rows[key][name] for name in EXACT} == exact(mine)
        assert {name: of_rows[key][name] for name in IN_ORDER} == {
            "began": values[0],
            "newest": values[-1],
            "all": values,
        }
        check_sketches(of_rows[key], mine)
        assert {name: of_newest[key][name] for name in EXACT} == exact(
            [row for row in newest if row["k"] == key]
        )
