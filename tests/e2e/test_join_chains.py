"""Chains of joins, a table joined with itself, and different rows: at every tick the query over the
tables as they are then.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest

import headrace as hr
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark
from tests.e2e.joined import START, TABLES, Feed, Row, shown

pytestmark = pytest.mark.usefixtures("no_syncs")


def chained() -> hr.Pipeline:
    pipeline = hr.Pipeline("chained")
    posts = pipeline.table(
        "posts", schema="post BIGINT, author BIGINT, text STRING", key="post", partitions=2
    )
    follows = pipeline.table(
        "follows", schema="follower BIGINT, author BIGINT", key=["follower", "author"]
    )
    people = pipeline.table("people", schema="who BIGINT, city STRING", key="who")
    readers = posts.join(follows, on="author").join(
        people, left_on="follower", right_on="who", how="left"
    )
    pipeline.view("readers", readers)
    pipeline.view("cities_of_readers", readers.group_by("city").aggregate(n=hr.agg.count()))
    pipeline.view(
        "mutual",
        follows.join(
            follows, left_on=["follower", "author"], right_on=["author", "follower"], suffix="_back"
        ),
    )
    pipeline.view("all_people", people.distinct())
    pipeline.view("cities", people.distinct("city"))
    pipeline.view("authors", posts.distinct("author"))
    pipeline.view("cities_or_none", readers.distinct("city"))
    written, followed = (
        posts.group_by("author").aggregate(posts=hr.agg.count()),
        follows.group_by("author").aggregate(readers=hr.agg.count()),
    )
    fame = written.join(followed, on="author", how="full")
    pipeline.view("fame", fame)
    pipeline.view("famous", fame.top(2, by=["readers", "author ASC"]))
    either_way = follows.union(
        follows.select("author AS follower", "follower AS author").key_by("follower", "author")
    )
    pipeline.view(
        "neighbours", either_way.join(people, left_on="author", right_on="who", how="full")
    )
    return pipeline


def expected(tables: dict[str, dict[tuple[Any, ...], Row]]) -> dict[str, Counter[str]]:
    posts, follows, people = (
        list(tables[name].values()) for name in ("posts", "follows", "people")
    )
    city = {row["who"]: row["city"] for row in people}
    readers = [
        {
            **post,
            "follower": each["follower"],
            "who": each["follower"] if each["follower"] in city else None,
            "city": city.get(each["follower"]),
        }
        for post in posts
        for each in follows
        if each["author"] == post["author"]
    ]
    pairs = {(row["follower"], row["author"]) for row in follows}
    mutual = [
        {"follower": a, "author": b, "follower_back": b, "author_back": a}
        for a, b in pairs
        if (b, a) in pairs
    ]
    known = Counter(row["city"] for row in readers)  # a null city is a group, as in SQL
    return {
        "readers": shown(readers),
        "cities_of_readers": shown([{"city": each, "n": n} for each, n in known.items()]),
        "mutual": shown(mutual),
        "all_people": shown(people),
        "cities": shown([{"city": each} for each in {row["city"] for row in people}]),
        "cities_or_none": shown([{"city": each} for each in {row["city"] for row in readers}]),
        **fame_expected(posts, follows),
        "neighbours": neighbours_expected(pairs, city),
        "authors": shown([{"author": each} for each in {row["author"] for row in posts}]),
    }


def fame_expected(posts: list[Row], follows: list[Row]) -> dict[str, Counter[str]]:
    """Two counts, joined; and the two with the most readers, nobody counted as less than one. Posts
    without an author are a group, which matches nothing, and comes last among equals.
    """
    written, followed = (Counter(row["author"] for row in rows) for rows in (posts, follows))
    fame = [
        {"author": each, "posts": written.get(each), "readers": followed.get(each)}
        for each in {*written, *followed}
    ]
    famous = sorted(
        fame,
        key=lambda row: (-(row["readers"] or 0), row["author"] is None, row["author"] or 0),
    )[:2]
    return {"fame": shown(fame), "famous": shown(famous)}


def neighbours_expected(pairs: set[tuple[int, int]], city: dict[int, str]) -> Counter[str]:
    either_way = pairs | {(author, follower) for follower, author in pairs}
    found: list[Row] = [
        {"follower": a, "author": b, "who": b if b in city else None, "city": city.get(b)}
        for a, b in either_way
    ]
    alone: list[Row] = [
        {"follower": None, "author": who, "who": who, "city": city[who]}
        for who in city
        if who not in {b for _, b in either_way}
    ]
    return shown([*found, *alone])


def test_a_key_that_a_stream_brings_again_is_one_row_to_all_who_ask(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("again")
    orders = pipeline.topic(
        "orders",
        schema="who BIGINT, region STRING, amount BIGINT, at TIMESTAMP",
        key="who",
        event_time=hr.EventTime("at"),
    )
    rates = pipeline.table(
        "rates",
        schema="region STRING, rate BIGINT, since TIMESTAMP",
        key="region",
        history="30 days",
        event_time=hr.EventTime("since"),
    )
    taxed = orders.join(rates.as_of("at"), on="region", how="left", late_versions="correct")
    pipeline.view("taxed", taxed)
    pipeline.view(
        "regions",
        taxed.group_by("region").aggregate(
            n=hr.agg.count(), amount=hr.agg.sum("amount"), rate=hr.agg.max("rate")
        ),
    )
    with PipelineTest(pipeline, tmp_path) as test:
        first, second = (
            {"who": 1, "region": region, "amount": amount, "at": START + timedelta(minutes=amount)}
            for region, amount in (("a", 1), ("b", 2))
        )
        for rows in ([second], [first, first], [second]):
            test.feed("orders", rows)
            test.settle()
            test.restart()
            assert [(row["region"], row["n"], row["amount"]) for row in test.view("regions")] == [
                ("b", 1, 2)
            ]
        test.feed("rates", [{"region": region, "rate": 5, "since": START} for region in "ab"])
        test.settle()
        assert [(row["region"], row["rate"]) for row in test.view("taxed")] == [("b", 5)]
        assert test.view("regions") == [{"region": "b", "n": 1, "amount": 2, "rate": 5}]


@pytest.mark.parametrize(("seed", "shards", "max_ticks"), [(1, 1, 1), (2, 3, 1), (3, 2, 4)])
def test_views_show_the_queries_at_every_tick(
    seed: int, shards: int, max_ticks: int, tmp_path: Path
) -> None:
    session: Any = PlainSpark()
    feed = Feed(Random(seed))
    with PipelineTest(chained(), tmp_path, session, shards=shards) as test:
        for tick in range(1, 13):
            for _ in range(6):
                feed.change(test, feed.chance.choice(list(TABLES)))
            test.cut(forced=True)
            if tick % max_ticks == 0:
                test.settle(max_ticks)
                for view, rows in expected(feed.tables).items():
                    assert shown(test.view(view)) == rows, (view, tick)
