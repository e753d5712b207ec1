"""Streams and tables of a pipeline as streaming DataFrames: what they have, and what has to be
written to a topic first.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import headrace as hr
from headrace.testing.pipelines import PipelineTest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


class Shop:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.pipeline = hr.Pipeline("shop", log=f"file:{root / 'log'}")
        self.orders = self.pipeline.topic(
            "orders", schema="k BIGINT, v BIGINT", key="k", partitions=2
        )
        self.returns = self.pipeline.topic("returns", schema="v BIGINT, k BIGINT", key="k")
        self.people = self.pipeline.table("people", schema="k BIGINT, city STRING", key="k")
        self.totals = self.orders.group_by("k").aggregate(s=hr.agg.sum("v"))
        self.pipeline.view("totals", self.totals)

    def feed(self, topic: str, *rows: dict[str, Any]) -> None:
        with hr.open_log(f"file:{self.root / 'log'}") as log, log.producer(topic) as producer:
            (
                producer.upsert(list(rows))
                if log.topic(topic).is_table
                else producer.append(list(rows))
            )

    def collected(self, rows: DataFrame, name: str) -> list[dict[str, Any]]:
        """What a stream has now, by way of Spark's own memory sink."""
        assert rows.isStreaming
        query = rows.writeStream.format("memory").queryName(name).trigger(availableNow=True).start()
        query.awaitTermination(120)
        found = [row.asDict() for row in rows.sparkSession.table(name).collect()]
        return sorted(found, key=lambda row: sorted(map(str, row.values())))


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def test_a_topic_and_the_steps_on_it(shop: Shop, spark: SparkSession) -> None:
    large = (
        shop.orders.where("v > 1")
        .with_columns(half="v / 2", part="10 / (v - 2)")
        .select("k", "half", "part")
        .key_by("half")
    )
    both = shop.orders.union(shop.returns)
    frames = shop.orders.df(spark), large.df(spark), both.df(spark, startingOffsets="earliest")
    shop.feed("orders", {"k": 1, "v": 1}, {"k": 2, "v": 2}, {"k": 3, "v": 12})
    shop.feed("returns", {"k": 4, "v": 4})
    assert frames[0].columns == ["k", "v"]
    assert shop.collected(frames[0], "plain") == [
        {"k": 1, "v": 1},
        {"k": 3, "v": 12},
        {"k": 2, "v": 2},
    ]
    assert shop.collected(frames[1], "derived") == [
        {"k": 2, "half": 1.0, "part": None},
        {"k": 3, "half": 6.0, "part": 1.0},
    ]
    assert [row["k"] for row in shop.collected(frames[2], "united")] == [1, 3, 2, 4]


def test_a_table_comes_as_its_changes(shop: Shop, spark: SparkSession) -> None:
    frame = shop.people.select("k", town="upper(city)").df(spark)
    shop.feed("people", {"k": 1, "city": "Oslo"})
    with hr.open_log(f"file:{shop.root / 'log'}") as log, log.producer("people") as producer:
        producer.delete([1])
    found = shop.collected(frame, "changes")
    assert sorted(row["_change_type"] for row in found) == ["delete", "update_postimage"]
    assert [row["town"] for row in found if row["_change_type"] == "update_postimage"] == ["OSLO"]


def test_a_stateful_relation_is_read_from_its_derived_topic(
    shop: Shop, spark: SparkSession
) -> None:
    large = shop.totals.where("s > 1")
    for rows in (shop.totals, shop.totals.changes(), shop.people.where("k > 1"), large):
        with pytest.raises(hr.errors.NotSupported, match="keeps state") as refused:
            rows.df(spark)
        assert "shop.write('changes', …)" in refused.value.fix
    shop.pipeline.write("large", large)
    frame = large.with_columns(twice="2 * s").df(spark)
    with PipelineTest(
        shop.pipeline, shop.root / "run", spark, log=f"file:{shop.root / 'log'}"
    ) as test:
        test.feed("orders", [{"k": 1, "v": 5}, {"k": 2, "v": 1}])
        test.settle()
    assert shop.collected(frame, "from_topic") == [
        {"k": 1, "s": 5, "twice": 10, "_change_type": "insert"}
    ]


def test_a_dataframe_of_a_pipeline_can_be_brought_in_again(shop: Shop, spark: SparkSession) -> None:
    counts = shop.pipeline.topic("counts", schema="k BIGINT, n BIGINT", key="k")
    shop.pipeline.view("last", counts.to_table("k"))
    shop.pipeline.ingest(
        lambda session: shop.orders.df(session).selectExpr("k", "v * 100 AS n"), counts
    )
    shop.pipeline.run(state=shop.root / "state", until_caught_up=True, master="local[2]")
    shop.feed("orders", {"k": 1, "v": 5})
    shop.pipeline.run(state=shop.root / "state", until_caught_up=True, master="local[2]")
    with hr.open_log(f"file:{shop.root / 'log'}") as log:
        assert log.read("counts", columns=["k", "n"]).to_pylist() == [{"k": 1, "n": 500}]


def test_a_pipeline_without_a_log_says_so() -> None:
    orders = hr.Pipeline("shop").topic("orders", schema="k BIGINT")
    with pytest.raises(hr.errors.ConfigurationError, match="has no log"):
        orders.df()
