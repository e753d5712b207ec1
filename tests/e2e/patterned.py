"""A pipeline with patterns of every kind, declared ones and rules in a table, and rows for it: what
runs on Spark, is killed, and must give the same.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import headrace as hr
from headrace.testing.pipelines import PipelineTest

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
SCHEMA = "card BIGINT, amount DOUBLE, kind STRING, paid_at TIMESTAMP"
OUTPUTS = ("fraud", "steps", "silent", "rising", "almost", "late_payments", "alerts")
Row = dict[str, Any]


def patterned(name: str) -> hr.Pipeline:
    pipeline = hr.Pipeline(name)
    payments = pipeline.topic(
        "payments",
        schema=SCHEMA,
        key="card",
        event_time=hr.EventTime("paid_at", delay="5 seconds", idle="10 minutes"),
        partitions=2,
    )
    fraud = payments.match(
        "small{3,} big",
        define={"small": "amount < 10", "big": "amount > 1000 AND amount > 50 * avg(small.amount)"},
        measures={
            "first_at": "first(small.paid_at)",
            "total": "sum(amount)",
            "n": "count(small.*)",
        },
        within="10 minutes",
        timed_out="almost",
        late=hr.late.divert("late_payments"),
    )
    pipeline.write("fraud", fraud)
    pipeline.view(
        "frauds", fraud.group_by("card").aggregate(n=hr.agg.count(), total=hr.agg.sum("total"))
    )
    steps: dict[str, Any] = {
        "define": {each: f"kind = '{each}'" for each in "abc"},
        "within": "1 minute",
        "after_match": "skip to next row",
    }
    pipeline.write(
        "steps",
        payments.match(
            "a -> b -> c",
            measures={"total": "sum(amount)", "last_at": "last(paid_at)"},
            **steps,
        ),
    )
    pipeline.write(
        "silent",
        payments.match(
            "a !b",
            define={"a": "kind = 'a'", "b": "kind = 'b'"},
            within="20 seconds",
            measures={"since": "last(paid_at)"},
        ),
    )
    every = payments.match(
        "first more{2}",
        define={"more": "amount > prev(amount)"},
        rows="all",
        within="1 minute",
        measures={"so_far": "sum(amount)", "all": "final sum(amount)"},
    )
    pipeline.write("rising", every)
    rules = pipeline.table(
        "rules", schema="name STRING, pattern STRING, define STRING, within STRING", key="name"
    )
    pipeline.write(
        "alerts",
        payments.match(
            rules, measures={"total": "sum(amount)", "n": "count(*)"}, name="alerts.match"
        ),
    )
    return pipeline


def disordered(seed: int, ticks: int = 6, rows: int = 20, cards: int = 3) -> list[list[Row]]:
    """Forty seconds a tick; rows come up to four seconds late, one of twenty by a minute."""
    chance = Random(seed)
    found = []
    for tick in range(ticks):
        amounts = [chance.choice([1.0, 2.0, 5.0, 5.0, 50.0, 2000.0]) for _ in range(rows)]
        seconds = [
            tick * 40 + chance.randrange(-4, 40) - 60 * (chance.random() < 0.05)
            for _ in range(rows)
        ]
        found.append(
            [
                {
                    "card": chance.randrange(cards),
                    "amount": amount,
                    "kind": chance.choice("abcd"),
                    "paid_at": START + timedelta(seconds=second),
                }
                for amount, second in zip(amounts, seconds, strict=True)
            ]
        )
    return found


def rules_of(tick: int) -> list[Row]:
    """Rules that come, change and cannot be read."""
    define = json.dumps({"small": "amount < 10", "big": "amount > 100 * small.amount"})
    changes: dict[int, list[Row]] = {
        0: [{"name": "jump", "pattern": "small big", "define": define, "within": "1 minute"}],
        2: [
            {
                "name": "pair",
                "pattern": "x -> y",
                "define": json.dumps({"x": "kind = 'c'", "y": "kind LIKE 'd%'"}),
                "within": "20 seconds",
            }
        ],
        3: [
            {"name": "jump", "pattern": "small+ big", "define": define, "within": "2 minutes"},
            {"name": "wrong", "pattern": "small (", "define": None, "within": "1 minute"},
        ],
    }
    return changes.get(tick, [])


def feed_tick(test: PipelineTest, tick: int, rows: list[Row]) -> None:
    test.feed("rules", rules_of(tick))
    if tick == 5:
        with test.log.producer("rules") as producer:
            producer.delete(["pair"])
    test.feed("payments", rows)
    test.cut()


def outputs(test: PipelineTest) -> dict[str, list[Any]]:
    return {name: sorted(test.rows(name), key=str) for name in OUTPUTS}
