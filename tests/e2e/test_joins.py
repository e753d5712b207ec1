"""Joins through the engine, against a reference computation; whatever the batches and shards."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import headrace as hr
from headrace.plan.join_steps import JoinStep
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
START = datetime(2026, 3, 1, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def both_ways(
    pipeline: Callable[[], hr.Pipeline],
    feed: Callable[[PipelineTest], None],
    topic: str,
    root: Path,
    spark: SparkSession,
) -> list[tuple[Any, ...]]:
    """A derived topic's rows, which must be equal in one batch with two shards on Spark and tick by
    tick with three shards without Spark.
    """
    answers = []
    plain: Any = PlainSpark()
    for number, (session, max_ticks, shards) in enumerate([(spark, 100, 2), (plain, 1, 3)]):
        with PipelineTest(pipeline(), root / str(number), session, shards=shards) as test:
            feed(test)
            while test.step(max_ticks):
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
        test.feed(
            "orders",
            [{"id": 2, "customer": 7}, {"id": 3, "customer": 8}, {"id": 4, "customer": None}],
        )
        test.cut()
        test.feed("customers", [{"customer": 7, "tier": "lead"}, {"customer": 8, "tier": "tin"}])
        test.cut()
        test.feed("orders", [{"id": 5, "customer": 7}, {"id": 6, "customer": 8}])
        test.cut()

    rows = both_ways(pipeline, feed, "enriched", tmp_path, spark)
    assert sorted(row[1:] for row in rows) == [
        (1, 7, "gold"),
        (2, 7, "gold"),
        (3, 8, None),
        (4, None, None),
        (5, 7, "lead"),
        (6, 8, "tin"),
    ]


def test_streams_join_within_a_time_bound_and_unmatched_rows_are_emitted_once(
    tmp_path: Path, spark: SparkSession
) -> None:
    rng = random.Random(8)
    searches: list[list[dict[str, Any]]] = [
        [
            {"id": tick * 10 + n, "who": rng.randrange(4), "at": at(tick * 30 + rng.randrange(30))}
            for n in range(4)
        ]
        for tick in range(4)
    ]
    clicks: list[list[dict[str, Any]]] = [
        [
            {
                "page": tick * 10 + n,
                "who": rng.randrange(4),
                "at": at(tick * 30 + rng.randrange(30)),
            }
            for n in range(3)
        ]
        for tick in range(4)
    ]

    def pipeline() -> hr.Pipeline:
        shop = hr.Pipeline("shop")
        time = hr.EventTime("at", delay="1 minute")
        left = shop.topic("searches", schema="id BIGINT, who BIGINT, at TIMESTAMP", event_time=time)
        right = shop.topic(
            "clicks", schema="page BIGINT, who BIGINT, at TIMESTAMP", event_time=time
        )
        shop.write(
            "found",
            left.join(
                right,
                on="who",
                before="0 seconds",
                after="20 seconds",
                how="left",
                suffix="_clicked",
            ).key_by("id"),
        )
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
            if c["who"] == search["who"]
            and timedelta(0) <= c["at"] - search["at"] <= timedelta(seconds=20)
        ]
        expected += [(search["id"], page) for page in met] or [(search["id"], None)]
    names = ["partition", "id", "who", "at", "page", "at_clicked"]
    found = [dict(zip(names, row, strict=True)) for row in rows]
    assert sorted(
        ((row["id"], row["page"]) for row in found if row["id"] != -1), key=str
    ) == sorted(expected, key=str)


def test_tables_meet_and_the_result_changes_with_both(tmp_path: Path, spark: SparkSession) -> None:
    def pipeline() -> hr.Pipeline:
        social = hr.Pipeline("social")
        tweets = social.table(
            "tweets", schema="tweet BIGINT, author BIGINT, text STRING", key="tweet"
        )
        follows = social.table(
            "follows", schema="follower BIGINT, author BIGINT", key=["follower", "author"]
        )
        timeline = tweets.join(follows, on="author")
        social.write("timeline", timeline)
        social.view("timelines", timeline)
        social.view("sizes", timeline.group_by("follower").aggregate(n=hr.agg.count()))
        return social

    def feed(test: PipelineTest) -> None:
        test.feed(
            "tweets",
            [{"tweet": 1, "author": 5, "text": "a"}, {"tweet": 2, "author": 6, "text": "b"}],
        )
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
        assert sorted(
            (row["follower"], row["tweet"], row["text"]) for row in test.view("timelines")
        ) == [(9, 1, "a2"), (9, 2, "moved")]
        assert [(row["follower"], row["n"]) for row in test.view("sizes")] == [(9, 2)]


def rates(pipeline: hr.Pipeline) -> hr.Table:
    schema = "region STRING, rate DOUBLE, valid_from TIMESTAMP"
    return pipeline.table(
        "rates",
        schema=schema,
        key="region",
        event_time=hr.EventTime("valid_from"),
        history="30 days",
    )


def orders_with_time(pipeline: hr.Pipeline) -> hr.Stream:
    schema = "id BIGINT, region STRING, placed_at TIMESTAMP"
    return pipeline.topic("orders", schema=schema, key="id", event_time=hr.EventTime("placed_at"))


def feed_rates(test: PipelineTest) -> None:
    """All in the first tick, with two versions of one region among them; one more comes late."""
    test.feed(
        "rates",
        [
            {"region": "a", "rate": 1.0, "valid_from": at(0)},
            {"region": "a", "rate": 2.0, "valid_from": at(100)},
        ],
    )
    test.feed(
        "orders",
        [
            {"id": n, "region": region, "placed_at": at(seconds)}
            for n, region, seconds in ((1, "a", 50), (2, "a", 150), (3, "b", 150))
        ],
    )
    test.cut()
    test.feed("rates", [{"region": "a", "rate": 1.5, "valid_from": at(40)}])
    test.cut()
    test.feed("orders", [{"id": 4, "region": "a", "placed_at": at(60)}])
    test.cut()


def test_a_row_meets_the_version_valid_at_its_time(tmp_path: Path, spark: SparkSession) -> None:
    def pipeline() -> hr.Pipeline:
        shop = hr.Pipeline("shop")
        shop.write(
            "taxed",
            orders_with_time(shop).join(rates(shop).as_of("placed_at"), on="region", how="left"),
        )
        return shop

    rows = both_ways(pipeline, feed_rates, "taxed", tmp_path, spark)
    assert sorted((row[1], row[4]) for row in rows) == [
        (1, 1.0),
        (2, 2.0),
        (3, None),
        (4, 1.5),
    ], "the past is let be, and what comes sees all that is known"


def test_late_versions_correct_emitted_rows(tmp_path: Path, spark: SparkSession) -> None:
    def pipeline() -> hr.Pipeline:
        shop = hr.Pipeline("shop")
        taxed = orders_with_time(shop).join(
            rates(shop).as_of("placed_at"), on="region", how="left", late_versions="correct"
        )
        shop.write("taxed", taxed)
        shop.view("versions", rates_history(shop))
        return shop

    def rates_history(shop: hr.Pipeline) -> hr.Table:
        table = shop.table(
            "other",
            schema="k BIGINT, v BIGINT, since TIMESTAMP",
            key="k",
            event_time=hr.EventTime("since"),
            history="30 days",
        )
        return table.history()

    def feed(test: PipelineTest) -> None:
        feed_rates(test)
        test.feed("other", [{"k": 1, "v": 1, "since": at(0)}, {"k": 1, "v": 2, "since": at(10)}])
        test.cut()

    rows = both_ways(pipeline, feed, "taxed", tmp_path, spark)
    assert [(row[-1], row[4]) for row in rows if row[1] == 1] == [
        ("insert", 1.0),
        ("update_preimage", 1.0),
        ("update_postimage", 1.5),
    ]
    with PipelineTest(pipeline(), tmp_path / "views", spark) as test:
        feed(test)
        test.settle()
        assert [(row["v"], row["since"], row["valid_to"]) for row in test.view("versions")] == [
            (1, at(0), at(10)),
            (2, at(10), None),
        ]


def test_invalid_joins_are_refused_with_advice() -> None:
    shop = hr.Pipeline("shop")
    orders, table = orders_with_time(shop), rates(shop)
    other = shop.topic(
        "other",
        schema="id BIGINT, region BIGINT, placed_at TIMESTAMP",
        event_time=hr.EventTime("placed_at"),
    )
    endless = shop.table(
        "endless",
        schema="region STRING, since TIMESTAMP",
        key="region",
        event_time=hr.EventTime("since"),
    )
    tall, wide = (
        shop.table("tall", schema="a BIGINT, k BIGINT, Name STRING", key="a"),
        shop.table("wide", schema="b BIGINT, k BIGINT, name STRING", key="b"),
    )
    timeless = shop.topic("timeless", schema="id BIGINT, region STRING", key="id")
    outer = tall.select("a", "k").join(wide.select("b", "k"), on="k", how="full")
    assert tall.join(wide, on="k", suffix="_wide").schema.names == [
        "a",
        "k",
        "Name",
        "b",
        "name_wide",
    ]
    assert outer.join(tall, on="a", how="full", suffix="_tall").key == (
        "a",
        "b",
    ), "a table without nulls in its key can be joined so"
    delayed = orders.join(
        other, on="id", before="-5 minutes", after=timedelta(hours=1), suffix="_2"
    ).step
    assert isinstance(delayed, JoinStep)
    assert (delayed.before_us, delayed.after_us) == (-300_000_000, 3_600_000_000)
    assert delayed.summary() == "inner on id, from -5 minutes before to 1 hour after"
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: orders.join(other, on="id"), 'within="1 hour"'),
        (lambda: orders.join(other, on="region", within="1 hour"), "CAST"),
        (lambda: orders.join(other, on="id", within="1 hour"), "suffix="),
        (lambda: orders.join(endless.as_of("placed_at"), on="region"), 'history="30 days"'),
        (lambda: orders.join(table.as_of("id"), on="region"), "event time"),
        (
            lambda: orders.join(
                table.select("region", "valid_from").as_of("placed_at", history="1 day"),
                on="region",
            ),
            "needs every version(.|\n)*behind this step",
        ),
        (
            lambda: orders.to_table("region").history(kept="1 day"),
            "orders.to_table has only the last version of",
        ),
        (lambda: table.join(orders, on="region"), "turn it round"),  # type: ignore[arg-type]
        (lambda: orders.join(table, on="regoin"), "region"),
        (lambda: orders.join(table), "on="),
        (lambda: orders.join(table, on="region", how="full"), "left"),
        (
            lambda: orders.join(table, on="region", within="1 hour"),  # type: ignore[call-overload]
            "leave out within=",
        ),
        (
            lambda: orders.join(table, on="region", late_versions="correct"),  # type: ignore[call-overload]
            "as_of",
        ),
        (
            lambda: orders.join(timeless, on="id", within="1 hour", suffix="_2"),
            "timeless has no event time",
        ),
        (
            lambda: orders.join(other, on="id", before="1 hour", after="-2 hours", suffix="_2"),
            "no two are",
        ),
        (lambda: orders.join(other, on="id", within="-1 hour", suffix="_2"), "is negative"),
        (
            lambda: tall.join(wide, on="k"),
            r"Both sides of the step tall.join have a column 'name'(.|\n)*suffix=",
        ),
        (lambda: tall.join(wide, on="k", suffix=""), "two columns 'name'(.|\n)*another suffix="),
        (lambda: tall.top(3, by=""), 'by="revenue"'),
        (lambda: tall.distinct("nme"), "did you mean 'Name'"),
    ]
    for declare, what in refused:
        with pytest.raises(hr.errors.HeadraceError, match=what):
            declare()


def test_rows_that_change_their_join_key_and_the_first_of_each_group(
    tmp_path: Path, spark: SparkSession
) -> None:
    """An update that moves a row to another customer comes from two shards, and is one change."""

    def pipeline() -> hr.Pipeline:
        shop = hr.Pipeline("shop")
        orders = shop.table("orders", schema="id BIGINT, customer BIGINT, amount BIGINT", key="id")
        customers = shop.table("customers", schema="customer BIGINT, city STRING", key="customer")
        joined = orders.join(customers, on="customer", how="left")
        shop.write("joined", joined)
        shop.view("best", joined.top(2, by="amount", per="city"))
        shop.view(
            "cities",
            joined.select("id", "city")
            .select("id", "city")
            .group_by("city")
            .aggregate(n=hr.agg.count()),
        )
        shop.view("leaders", joined.top(1, by=["amount DESC", "id ASC"]))
        return shop

    rng = random.Random(2)
    ticks = [
        [
            {"id": rng.randrange(12), "customer": rng.randrange(5), "amount": rng.randrange(50)}
            for _ in range(6)
        ]
        for _ in range(6)
    ]
    cities = {0: "a", 1: "b", 2: "a", 3: "b"}

    def feed(test: PipelineTest) -> None:
        test.feed(
            "customers", [{"customer": number, "city": city} for number, city in cities.items()]
        )
        for rows in ticks:
            test.feed("orders", rows)
            test.cut()

    both_ways(pipeline, feed, "joined", tmp_path, spark)
    newest = {row["id"]: row for rows in ticks for row in rows}
    with PipelineTest(pipeline(), tmp_path / "views", spark, shards=3) as test:
        feed(test)
        test.settle(2)
        assert {
            key: (row["customer"], row["city"]) for key, row in test.folded("joined", "id").items()
        } == {key: (row["customer"], cities.get(row["customer"])) for key, row in newest.items()}
        best: dict[Any, list[tuple[int, int]]] = {}
        for row in newest.values():
            best.setdefault(cities.get(row["customer"]), []).append((-row["amount"], row["id"]))
        expected = sorted(number for ranked in best.values() for _, number in sorted(ranked)[:2])
        assert sorted(row["id"] for row in test.view("best")) == expected
        assert [row["id"] for row in test.view("leaders")] == [
            min((-row["amount"], row["id"]) for row in newest.values())[1]
        ]
