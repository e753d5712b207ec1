"""Joins through the engine, against the obvious computation; whatever the batches and shards."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import headrace as hr
from headrace.testing.pipelines import PipelineTest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
START = datetime(2026, 3, 1, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def both_ways(
    pipeline: Callable[[], hr.Pipeline], feed: Callable[[PipelineTest], None], topic: str, root: Path, spark: SparkSession
) -> list[tuple[Any, ...]]:
    """A derived topic's rows, which must be the same in one batch on two shards and tick by tick on three."""
    answers = []
    for number, (most_ticks, shards) in enumerate([(100, 2), (1, 3)]):
        with PipelineTest(pipeline(), root / str(number), spark, shards=shards) as test:
            feed(test)
            while test.step(most_ticks):
                continue
            answers.append(test.rows(topic))
    assert answers[0] == answers[1]
    return answers[0]


def test_a_stream_meets_a_table_as_of_its_tick(tmp_path: Path, spark: SparkSession) -> None:
    def pipeline() -> hr.Pipeline:
        shop = hr.Pipeline("shop")
        customers = shop.table("customers", schema="customer BIGINT, tier STRING", key="customer")
        orders = shop.topic("orders", schema="id BIGINT, customer BIGINT", key="id")
        shop.write("enriched", orders.join(customers, on="customer", how="left"))
        return shop

    def feed(test: PipelineTest) -> None:
        test.feed("orders", [{"id": 1, "customer": 7}])
        test.feed("customers", [{"customer": 7, "tier": "gold"}])
        test.cut()
        test.feed("orders", [{"id": 2, "customer": 7}, {"id": 3, "customer": 8}, {"id": 4, "customer": None}])
        test.cut()
        test.feed("customers", [{"customer": 7, "tier": "lead"}, {"customer": 8, "tier": "tin"}])
        test.cut()
        test.feed("orders", [{"id": 5, "customer": 7}, {"id": 6, "customer": 8}])
        test.cut()

    rows = both_ways(pipeline, feed, "enriched", tmp_path, spark)
    assert sorted(row[1:] for row in rows) == [
        (1, 7, "gold"), (2, 7, "gold"), (3, 8, None), (4, None, None), (5, 7, "lead"), (6, 8, "tin"),
    ]  # fmt: skip


def test_streams_meet_within_a_time_and_the_unmatched_are_told_once(tmp_path: Path, spark: SparkSession) -> None:
    rng = random.Random(8)
    searches: list[list[dict[str, Any]]] = [
        [{"id": tick * 10 + n, "who": rng.randrange(4), "at": at(tick * 30 + rng.randrange(30))} for n in range(4)] for tick in range(4)
    ]
    clicks: list[list[dict[str, Any]]] = [
        [{"page": tick * 10 + n, "who": rng.randrange(4), "at": at(tick * 30 + rng.randrange(30))} for n in range(3)] for tick in range(4)
    ]

    def pipeline() -> hr.Pipeline:
        shop = hr.Pipeline("shop")
        time = hr.EventTime("at", delay="1 minute")
        left = shop.topic("searches", schema="id BIGINT, who BIGINT, at TIMESTAMP", event_time=time)
        right = shop.topic("clicks", schema="page BIGINT, who BIGINT, at TIMESTAMP", event_time=time)
        shop.write("found", left.join(right, on="who", before="0 seconds", after="20 seconds", how="left", suffix="_clicked").key_by("id"))
        return shop

    def feed(test: PipelineTest) -> None:
        for left, right in zip(searches, clicks, strict=True):
            test.feed("searches", left)
            test.feed("clicks", right)
            test.cut()
        test.feed("searches", [{"id": -1, "who": -1, "at": at(9999)}])
        test.feed("clicks", [{"page": -1, "who": -1, "at": at(9999)}])
        test.cut()

    rows = both_ways(pipeline, feed, "found", tmp_path, spark)
    expected: list[tuple[Any, ...]] = []
    for search in (row for tick in searches for row in tick):
        met = [
            c["page"]
            for tick in clicks
            for c in tick
            if c["who"] == search["who"] and timedelta(0) <= c["at"] - search["at"] <= timedelta(seconds=20)
        ]
        expected += [(search["id"], page) for page in met] or [(search["id"], None)]
    names = ["partition", "id", "who", "at", "page", "at_clicked"]
    found = [dict(zip(names, row, strict=True)) for row in rows]
    assert sorted(((row["id"], row["page"]) for row in found if row["id"] != -1), key=str) == sorted(expected, key=str)


def test_tables_meet_and_the_result_changes_with_both(tmp_path: Path, spark: SparkSession) -> None:
    def pipeline() -> hr.Pipeline:
        social = hr.Pipeline("social")
        tweets = social.table("tweets", schema="tweet BIGINT, author BIGINT, text STRING", key="tweet")
        follows = social.table("follows", schema="follower BIGINT, author BIGINT", key=["follower", "author"])
        timeline = tweets.join(follows, on="author")
        social.write("timeline", timeline)
        social.view("timelines", timeline)
        social.view("sizes", timeline.group_by("follower").aggregate(n=hr.agg.count()))
        return social

    def feed(test: PipelineTest) -> None:
        test.feed("tweets", [{"tweet": 1, "author": 5, "text": "a"}, {"tweet": 2, "author": 6, "text": "b"}])
        test.feed("follows", [{"follower": 9, "author": 5}, {"follower": 8, "author": 5}])
        test.cut()
        test.feed("follows", [{"follower": 9, "author": 6}])
        test.feed("tweets", [{"tweet": 1, "author": 5, "text": "a2"}])
        test.cut()
        with test.log.producer("follows") as producer:
            producer.delete([{"follower": 8, "author": 5}])
        test.feed("tweets", [{"tweet": 2, "author": 5, "text": "moved"}])
        test.cut()

    both_ways(pipeline, feed, "timeline", tmp_path, spark)
    with PipelineTest(pipeline(), tmp_path / "views", spark) as test:
        feed(test)
        test.settle(2)
        assert sorted((row["follower"], row["tweet"], row["text"]) for row in test.view("timelines")) == [(9, 1, "a2"), (9, 2, "moved")]
        assert [(row["follower"], row["n"]) for row in test.view("sizes")] == [(9, 2)]
