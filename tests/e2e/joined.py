"""A pipeline with every kind of join and functions over frames, rows for it, and what its views
must show: for the tests that disturb it and those that kill it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import headrace as hr
from headrace.testing.pipelines import PipelineTest

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
Row = dict[str, Any]
TABLES = {"posts": ("post",), "follows": ("follower", "author"), "people": ("who",)}


def joined(name: str = "joined") -> hr.Pipeline:
    pipeline = hr.Pipeline(name)
    times = hr.EventTime("at", delay="5 seconds", idle="1 hour")
    orders = pipeline.topic(
        "orders",
        schema="id BIGINT, who BIGINT, region STRING, at TIMESTAMP",
        key="id",
        event_time=times,
        partitions=2,
    )
    payments = pipeline.topic(
        "payments", schema="id BIGINT, at TIMESTAMP", key="id", event_time=times
    )
    people = pipeline.table("people", schema="who BIGINT, city STRING", key="who")
    rates = pipeline.table(
        "rates",
        schema="region STRING, rate BIGINT, since TIMESTAMP",
        key="region",
        history="10 minutes",
        event_time=hr.EventTime("since", delay="30 seconds", idle="1 hour"),
    )
    posts = pipeline.table(
        "posts", schema="post BIGINT, author BIGINT, text STRING", key="post", partitions=2
    )
    follows = pipeline.table(
        "follows", schema="follower BIGINT, author BIGINT", key=["follower", "author"]
    )
    pipeline.write(
        "paid",
        orders.join(payments, on="id", within="1 minute", how="full", suffix="_paid"),
        partitions=2,
    )
    pipeline.write("with_city", orders.join(people, on="who", how="left"), partitions=2)
    pipeline.write("taxed", orders.join(rates.as_of("at"), on="region", how="left"), partitions=2)
    pipeline.view(
        "corrected",
        orders.join(rates.as_of("at"), on="region", how="left", late_versions="correct"),
    )
    before = orders.join(payments, on="id", before="1 minute", until="at", suffix="_paid")
    pipeline.write("paid_before", before, partitions=2)
    frames = orders.over("who", rows=3, order_by=["region", "id desc"], gap="3 minutes")
    steps = frames.aggregate(
        number=hr.over.row_number(),
        regions=hr.agg.collect("region"),
        total=hr.agg.sum("id"),
        next=hr.over.lead("id", within="1 minute"),
    )
    pipeline.write("steps", steps, partitions=2)
    pipeline.view("rate_history", rates.history())
    timeline = posts.join(follows, on="author")
    pipeline.view("timeline", timeline)
    pipeline.view("readers", timeline.group_by("post").aggregate(n=hr.agg.count()))
    pipeline.view("cities", posts.join(people, left_on="author", right_on="who", how="full"))
    pipeline.view("newest", posts.top(2, by="post", per="author"))
    return pipeline


TOPICS, VIEWS = (
    ("paid", "with_city", "taxed", "paid_before", "steps"),
    (
        "corrected",
        "rate_history",
        "timeline",
        "readers",
        "cities",
        "newest",
    ),
)


@dataclass
class Feed:
    """Rows by chance, tick by tick: with late and repeated ones, null keys, updates that change
    what is joined on, deletes of what is not there.
    """

    chance: Random
    tables: dict[str, dict[tuple[Any, ...], Row]] = field(
        default_factory=lambda: {name: {} for name in TABLES}
    )
    number: int = 0

    def tick(self, test: PipelineTest) -> None:
        self.number += 1
        for topic in ("orders", "payments"):
            if rows := [self._timed(topic, index) for index in range(self.chance.randrange(5))]:
                test.feed(topic, rows)
        if self.chance.random() < 0.6:
            since = self._at(self.chance.randrange(-200, 60))
            test.feed(
                "rates",
                [
                    {
                        "region": self.chance.choice("ab"),
                        "rate": self.chance.randrange(9),
                        "since": since,
                    }
                ],
            )
        for _ in range(self.chance.randrange(5)):
            self.change(test, self.chance.choice(list(TABLES)))
        self._again(test)

    def _again(self, test: PipelineTest) -> None:
        """Now and then an order comes a second time, another has its number, and rates are taken
        away, also one that is not there.
        """
        if self.number % 3 == 2:
            order: Row = {"id": 1_000, "who": 1, "region": "a", "at": self._at(self.number % 7)}
            test.feed(
                "orders", [order, order, {**order, "region": "b", "at": self._at(-self.number % 5)}]
            )
        if self.number % 4 == 3:
            with test.log.producer("rates") as producer:
                producer.delete([{"region": "a"}, {"region": "nowhere"}])

    def _at(self, second: int) -> datetime:
        return START + timedelta(seconds=60 * self.number + second)

    def _timed(self, topic: str, index: int) -> Row:
        row: Row = {"id": 10 * self.number + index, "at": self._at(self.chance.randrange(-90, 60))}
        return (
            {**row, "who": self._who(), "region": self.chance.choice(["a", "b", None])}
            if topic == "orders"
            else row
        )

    def _who(self) -> int | None:
        return self.chance.choice([None, 1, 2, 3])

    def change(self, test: PipelineTest, name: str) -> None:
        made: dict[str, Row] = {
            "posts": {
                "post": self.chance.randrange(6),
                "author": self._who(),
                "text": self.chance.choice("xyz"),
            },
            "follows": {
                "follower": self.chance.randrange(3),
                "author": self.chance.randrange(1, 4),
            },
            "people": {
                "who": self.chance.randrange(1, 4),
                "city": self.chance.choice(["Oslo", "Rome"]),
            },
        }
        row, rows = made[name], self.tables[name]
        key = tuple(row[column] for column in TABLES[name])
        with test.log.producer(name) as producer:
            if self.chance.random() < 0.4:
                producer.delete([dict(zip(TABLES[name], key, strict=True))])
                rows.pop(key, None)
            else:
                producer.upsert([row])
                rows[key] = row

    def expected(self) -> dict[str, Counter[str]]:
        """What the queries over the tables as they are now would say."""
        posts, follows, people = (
            list(self.tables[name].values()) for name in ("posts", "follows", "people")
        )
        timeline = [
            {**post, "follower": each["follower"]}
            for post in posts
            for each in follows
            if each["author"] == post["author"]
        ]
        readers = Counter(row["post"] for row in timeline)
        cities = [{**post, **_of(post["author"], people)} for post in posts]
        alone = [
            {"post": None, "author": row["who"], "text": None, **row}
            for row in people
            if row["who"] not in {post["author"] for post in posts}
        ]
        newest = [
            post
            for post in posts
            if sum(
                other["author"] == post["author"] and other["post"] > post["post"]
                for other in posts
            )
            < 2
        ]
        return {
            "timeline": shown(timeline),
            "readers": shown([{"post": post, "n": n} for post, n in readers.items()]),
            "newest": shown(newest),
            "cities": shown([*cities, *alone]),
        }


def _of(who: int | None, people: list[Row]) -> Row:
    return next((row for row in people if row["who"] == who), {"who": None, "city": None})


def shown(rows: list[Row]) -> Counter[str]:
    return Counter(repr(sorted(row.items())) for row in rows)
