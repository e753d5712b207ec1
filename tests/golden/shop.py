"""The shop of the golden directories: a pipeline with many kinds of state, its rows tick by tick,
and the plain form in which results are recorded and compared.

The script that makes a golden directory feeds `BEFORE`; the test opens what the script left, feeds
`AFTER`, and compares it with what was recorded and with a shop that got all rows from the start.
Nothing here may change as long as a golden directory was made with it: state belongs to the steps
declared here, and the recorded results to these rows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from datetime import time as clock_time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa

import headrace as hr
from headrace.log import dead_letters as dead
from headrace.testing.pipelines import PipelineTest
from tests.golden.clock import Clock

Row = dict[str, Any]
NOON = datetime(2026, 1, 5, 12, tzinfo=UTC)
"""When the pipeline's first tick is cut."""


# The pipeline


class Longest(hr.agg.CustomAggregate):
    """The longest text of a group, the first of several: a user's own aggregate with state."""

    state_type = pa.string()
    result_type = pa.string()

    def add(self, states: pa.Array, groups: pa.Array, values: pa.Array) -> pa.Array:
        found = states.to_pylist()
        for group, value in zip(groups.to_pylist(), values.to_pylist(), strict=True):
            if value is not None and (found[group] is None or len(value) > len(found[group])):
                found[group] = value
        return pa.array(found, self.state_type)

    def result(self, states: pa.Array) -> pa.Array:
        return states


ORDERS = """order_id BIGINT, customer_id BIGINT, region STRING, amount DOUBLE, price DECIMAL(10,2),
    device STRING, placed_at TIMESTAMP, tags ARRAY<STRING>, ship STRUCT<city: STRING, zip: INT>"""


@dataclass(frozen=True)
class Inputs:
    """The inputs of the shop."""

    orders: hr.Stream
    payments: hr.Stream
    readings: hr.Stream
    articles: hr.Stream
    customers: hr.Table
    rates: hr.Table
    wishes: hr.Table
    rules: hr.Table


def shop(root: Path) -> hr.Pipeline:
    """The pipeline `golden`. Its sinks write below `root`."""
    pipeline = hr.Pipeline("golden")
    inputs = _inputs(pipeline)
    _aggregates(pipeline, inputs)
    _windows(pipeline, inputs)
    _joins(pipeline, inputs)
    _tables(pipeline, inputs)
    _matches(pipeline, inputs)
    known = inputs.orders.join(inputs.customers, on="customer_id", how="left", name="known.join")
    totals = inputs.orders.group_by("device").aggregate(
        n=hr.agg.count(), price=hr.agg.sum("price"), last_at=hr.agg.last("placed_at")
    )
    pipeline.sink(hr.sinks.sqlite(root / "reports.db", table="devices"), totals)
    pipeline.sink(hr.sinks.parquet(root / "parquet", table="known", buckets=2), known)
    return pipeline


def _inputs(pipeline: hr.Pipeline) -> Inputs:
    """The inputs. A day was the default of `max_ahead` when the golden directories were made, and
    some of the rows are ahead of the clock.
    """
    return Inputs(
        orders=pipeline.topic(
            "orders",
            schema=ORDERS,
            key="customer_id",
            partitions=2,
            event_time=hr.EventTime(
                "placed_at",
                delay="10 seconds",
                producer="device",
                idle="1 hour",
                max_ahead="1 day",
            ),
        ),
        payments=pipeline.topic(
            "payments",
            schema="order_id BIGINT, paid DOUBLE, paid_at TIMESTAMP",
            key="order_id",
            event_time=hr.EventTime(
                "paid_at", delay="10 seconds", idle="1 hour", max_ahead="1 day"
            ),
        ),
        readings=pipeline.topic(
            "readings",
            schema="sensor STRING, value DOUBLE, at TIMESTAMP, sent TIMESTAMP, received TIMESTAMP",
            key="sensor",
            event_time=hr.device_time(
                event="at",
                sent="sent",
                received="received",
                device="sensor",
                delay="10 seconds",
                max_ahead="1 day",
            ),
        ),
        articles=pipeline.topic(
            "articles", schema="article BIGINT, title STRING, cost DOUBLE", key="article"
        ),
        customers=pipeline.table(
            "customers", schema="customer_id BIGINT, name STRING, tier STRING", key="customer_id"
        ),
        rates=pipeline.table(
            "rates",
            schema="region STRING, rate DOUBLE, valid_from TIMESTAMP",
            key="region",
            event_time=hr.EventTime("valid_from"),
            history="365 days",
        ),
        wishes=pipeline.table(
            "wishes", schema="wish BIGINT, query STRING, reader STRING", key="wish"
        ),
        rules=pipeline.table(
            "rules", schema="rule STRING, pattern STRING, define STRING, within STRING", key="rule"
        ),
    )


def _aggregates(pipeline: hr.Pipeline, inputs: Inputs) -> None:
    """A running aggregate with every kind of accumulator."""
    totals = inputs.orders.group_by("region").aggregate(
        n=hr.agg.count(),
        revenue=hr.agg.sum("amount"),
        price=hr.agg.sum("price"),
        mean=hr.agg.avg("price"),
        spread=hr.agg.stddev("amount"),
        least=hr.agg.min("price"),
        most=hr.agg.max("placed_at"),
        first=hr.agg.first("device"),
        last=hr.agg.last("ship"),
        ids=hr.agg.collect("order_id"),
        customers=hr.agg.count_distinct("customer_id"),
        about=hr.agg.approx_distinct("order_id"),
        middle=hr.agg.quantiles("amount", at=[0.5, 0.9]),
        often=hr.agg.heavy_hitters("customer_id", max_values=2, size=8),
        filter=hr.agg.bloom("order_id", expected=20),
        recent=hr.agg.decayed_sum("amount", half_life="1 minute", time="placed_at"),
        longest=hr.agg.custom(Longest(), "device"),
    )
    pipeline.view("totals", totals)
    pipeline.write("totals_topic", totals, partitions=2)
    spent = (
        inputs.orders.to_table("order_id")
        .group_by("customer_id")
        .aggregate(
            spent=hr.agg.sum("price"), least=hr.agg.min("amount"), ids=hr.agg.collect("order_id")
        )
    )
    ranked = spent.join(inputs.customers, on="customer_id")
    pipeline.view("best", ranked.top(2, by="spent"))
    pipeline.view("best_of_tier", ranked.top(1, by=["spent", "name ASC"], per="tier"))
    unique = inputs.orders.dedupe(on="order_id", within="10 minutes")
    pipeline.write("unique", unique)


def _windows(pipeline: hr.Pipeline, inputs: Inputs) -> None:
    corrected = hr.late.correct("10 minutes")
    minutes = (
        inputs.orders.window(hr.tumbling("1 minute"), late=corrected)
        .group_by("region")
        .aggregate(
            revenue=hr.agg.sum("amount"),
            price=hr.agg.sum("price"),
            per_minute=hr.agg.rate(per="1 minute"),
            middle=hr.agg.quantiles("amount", at=0.5),
            tags=hr.agg.last("tags"),
        )
    )
    pipeline.view("minutes", minutes)
    pipeline.write("minutes_topic", minutes)
    pipeline.view("compared", minutes.compare("1 minute"))
    hours = (
        minutes.window(hr.tumbling("1 hour"), late=hr.late.correct("1 day"), emit="changes")
        .group_by("region")
        .aggregate(revenue=hr.agg.sum("revenue"))
    )
    pipeline.view("hours", hours)
    sessions = inputs.orders.window(hr.session("90 seconds"), late=corrected)
    pipeline.view(
        "visits",
        sessions.group_by("device").aggregate(n=hr.agg.count(), ids=hr.agg.collect("order_id")),
    )
    pipeline.view("visit_counts", sessions.group_by("device").aggregate(n=hr.agg.count()))
    sliding = inputs.orders.window(hr.sliding("1 minute"), late=corrected)
    pipeline.view(
        "moving", sliding.group_by("region").aggregate(mean=hr.agg.avg("amount"), n=hr.agg.count())
    )
    hopping = inputs.orders.window(
        hr.hopping("2 minutes", every="1 minute"),
        late=hr.late.divert("late_orders"),
        emit="changes",
    )
    pipeline.view("hops", hopping.group_by("customer_id").aggregate(revenue=hr.agg.sum("amount")))
    heat = (
        inputs.readings.window(hr.tumbling("1 minute"))
        .group_by("sensor")
        .aggregate(mean=hr.agg.avg("value"))
    )
    pipeline.view("heat", heat)


def _joins(pipeline: hr.Pipeline, inputs: Inputs) -> None:
    paid = inputs.orders.join(
        inputs.payments, on="order_id", before="0 seconds", after="3 minutes", how="left"
    )
    pipeline.write("paid", paid, partitions=2)
    pipeline.write("enriched", inputs.orders.join(inputs.customers, on="customer_id", how="left"))
    pipeline.write("taxed", inputs.orders.join(inputs.rates.as_of("placed_at"), on="region"))
    corrected = inputs.orders.key_by("order_id").join(
        inputs.rates.as_of("placed_at"), on="region", late_versions="correct"
    )
    pipeline.view("taxed_now", corrected)
    placed = inputs.orders.to_table("order_id").join(inputs.customers, on="customer_id", how="full")
    pipeline.view("placed", placed)
    pipeline.write("placed_topic", placed)


def _tables(pipeline: hr.Pipeline, inputs: Inputs) -> None:
    pipeline.view("newest", inputs.orders.to_table("customer_id"), keep_changes=50)
    pipeline.view("tiers", inputs.customers.distinct("tier"))
    pipeline.view("versions", inputs.rates.history())
    pipeline.write("customer_changes", inputs.customers.changes())


def _matches(pipeline: hr.Pipeline, inputs: Inputs) -> None:
    matches = inputs.orders.key_by("customer_id").match(
        "small{2,} big",
        define={"small": "amount < 10", "big": "amount > 100 AND amount > 5 * avg(small.amount)"},
        measures={
            "n": "count(small.*)",
            "total": "sum(amount)",
            "first_at": "first(small.placed_at)",
        },
        within="5 minutes",
        timed_out="almost",
    )
    pipeline.write("suspicious", matches)
    rising = inputs.orders.key_by("customer_id").match(
        "first more+",
        define={"more": "amount > prev(amount)"},
        measures={"so_far": "sum(amount)", "whole": "final sum(amount)"},
        within="3 minutes",
        rows="all",
    )
    pipeline.write("rising", rising)
    ruled = inputs.orders.key_by("customer_id").match(
        inputs.rules, measures={"n": "count(*)", "total": "sum(amount)"}
    )
    pipeline.write("ruled", ruled)
    found = inputs.articles.search(
        inputs.wishes, query="query", text="title", filters=["cost"], explain=True
    )
    pipeline.write("found", found)


VIEWS = (
    "totals", "best", "best_of_tier", "minutes", "compared", "hours", "visits", "visit_counts",
    "moving", "hops", "heat", "taxed_now", "placed", "newest", "tiers", "versions",
)  # fmt: skip
DERIVED = (
    "totals_topic", "unique", "minutes_topic", "late_orders", "paid", "enriched", "taxed",
    "placed_topic", "customer_changes", "suspicious", "almost", "rising", "ruled", "found",
    "devices.sqlite", "known.parquet",
)  # fmt: skip
DEAD = ("orders", "found.search")
"""Topics and steps of the pipeline that have dead letters."""


# Its rows


def at(seconds: float) -> datetime:
    """So many seconds after noon."""
    return NOON + timedelta(seconds=seconds)


def order(
    number: int, customer: int, amount: float, seconds: float | None, device: str = ""
) -> Row:
    """An order; its other columns follow from these."""
    return {
        "order_id": number,
        "customer_id": customer,
        "region": ("north", "south", "east")[customer % 3],
        "amount": amount,
        "price": Decimal(number) + Decimal("0.25"),
        "device": device or f"till-{customer % 2}",
        "placed_at": None if seconds is None else at(seconds),
        "tags": None if number % 4 == 3 else [f"t{number}", None],
        "ship": {"city": "Oslo" if customer % 2 else None, "zip": 1000 + customer},
    }


def payment(number: int, seconds: float) -> Row:
    return {"order_id": number, "paid": number * 1.5, "paid_at": at(seconds)}


def customer(number: int, name: str, tier: str) -> Row:
    return {"customer_id": number, "name": name, "tier": tier}


def removed(row: Row) -> Row:
    return {**row, "_change_type": "delete"}


def rate(region: str, value: float, seconds: float) -> Row:
    return {"region": region, "rate": value, "valid_from": at(seconds)}


def reading(sensor: str, value: float, seconds: float, wrong_by: float) -> Row:
    """A reading of a sensor whose clock is wrong by so many seconds."""
    by_sensor = at(seconds + wrong_by)
    sent = by_sensor + timedelta(seconds=1)
    return {
        "sensor": sensor,
        "value": value,
        "at": by_sensor,
        "sent": sent,
        "received": at(seconds + 1),
    }


def article(number: int, title: str, cost: float) -> Row:
    return {"article": number, "title": title, "cost": cost}


def wish(number: int, query: str) -> Row:
    return {"wish": number, "query": query, "reader": f"reader-{number}"}


def rule(name: str, pattern: str, define: Mapping[str, str]) -> Row:
    return {"rule": name, "pattern": pattern, "define": json.dumps(define), "within": "4 minutes"}


ADA, BEN, CAT = customer(1, "Ada", "gold"), customer(2, "Ben", "lead"), customer(3, "Cat", "gold")
TWICE = rule("twice", "a -> b", {"a": "amount < 10", "b": "amount < 10"})
Tick = Sequence[tuple[str, list[Row]]]
BEFORE: Sequence[Tick] = (
    [
        ("customers", [ADA, BEN]),
        ("rates", [rate("north", 0.2, -3600), rate("south", 0.1, -3600), rate("east", 0.3, -3600)]),
        ("wishes", [wish(1, "storm AND sea"), wish(2, "cost:<5"), wish(3, "title:(storm")]),
        ("rules", [TWICE]),
        ("orders", [order(1, 1, 5.0, -20), order(2, 2, 7.5, -15), order(3, 3, 2.0, -10)]),
        ("articles", [article(1, "Storm at sea", 9.0), article(2, "Calm", 3.0)]),
        ("readings", [reading("s1", 20.0, -10, 300), reading("s2", 10.0, -8, -86_400 * 400)]),
    ],
    [
        ("orders", [order(4, 1, 6.0, 20), order(5, 2, 8.0, 25), order(6, 4, 50.0, 28)]),
        ("payments", [payment(1, 10), payment(4, 29)]),
        ("customers", [CAT, customer(2, "Ben", "gold")]),
        ("readings", [reading("s1", 21.0, 20, 300), reading("s2", 11.0, 22, -86_400 * 400)]),
    ],
    [
        ("orders", [order(7, 1, 700.0, 50), order(8, 2, 3.0, 55), order(2, 2, 7.5, -15)]),
        ("rates", [rate("north", 0.25, 40)]),
        ("wishes", [wish(4, "ca*"), removed(wish(2, "cost:<5"))]),
        ("articles", [article(3, "Calm seas", 2.0), article(4, "Storm over the sea", 4.0)]),
    ],
    [
        ("orders", [order(9, 3, 4.0, 80), order(10, 4, 9.0, 85), order(11, 5, 1.0, None)]),
        ("payments", [payment(5, 70), payment(7, 90)]),
        ("customers", [removed(BEN)]),
        ("readings", [reading("s1", 22.0, 85, 300), reading("s2", 13.0, 88, -86_400 * 400)]),
    ],
    [
        ("orders", [order(12, 3, 5.0, 150), order(13, 4, 6.0, 155), order(14, 2, 4.0, 30)]),
        ("payments", [payment(12, 160)]),
        ("rates", [rate("south", 0.15, 140)]),
    ],
)
"""The ticks whose results are in the golden directory, half a minute apart."""
AFTER: Sequence[Tick] = (
    [
        ("orders", [order(15, 3, 900.0, 170), order(12, 3, 5.0, 172), order(16, 4, 7.0, 175)]),
        ("orders", [order(4, 1, 6.0, 20)]),
        ("payments", [payment(9, 165), payment(13, 170)]),
        ("articles", [article(5, "A storm, the sea, a cat", 1.0)]),
        ("readings", [reading("s1", 23.0, 170, 300), reading("s2", 14.0, 172, -86_400 * 400)]),
    ],
    [
        ("orders", [order(17, 2, 2.0, 40), order(18, 1, 3.0, 205), order(19, 4, 800.0, 206)]),
        ("customers", [customer(4, "Dan", "lead"), customer(1, "Ada L.", "gold"), BEN]),
        ("rates", [rate("north", 0.22, 45)]),
        ("rules", [removed(TWICE), rule("rising", "a b", {"b": "amount > 2 * a.amount"})]),
    ],
    [
        ("wishes", [removed(wish(1, "storm AND sea")), wish(5, '"heavy rain"')]),
        ("articles", [article(6, "Heavy rain, no storm", 3.0), article(7, "Cats", 8.0)]),
        ("payments", [payment(17, 220), payment(18, 240)]),
    ],
    [
        ("orders", [order(20, 1, 4.0, 400, "till-0"), order(21, 2, 5.0, 405, "till-1")]),
        ("payments", [payment(20, 410)]),
        ("readings", [reading("s1", 24.0, 400, 300), reading("s2", 15.0, 402, -86_400 * 400)]),
    ],
    [
        ("orders", [order(22, 1, 40.0, 1000, "till-0"), order(23, 2, 50.0, 1005, "till-1")]),
        ("payments", [payment(22, 1010)]),
        ("customers", [removed(CAT)]),
    ],
)
"""The ticks that are fed to what the golden directory has; some of their rows belong to windows,
pairs, matches and versions that were open or already emitted there."""


def feed(test: PipelineTest, ticks: Sequence[Tick], clock: Clock, *, at_once: bool = False) -> None:
    """Feed ticks half a minute apart, and run a batch for each, or one for all of them."""
    for tick in ticks:
        clock.advance(30)
        for topic, rows in tick:
            test.feed(topic, rows if all(map(_is_upsert, rows)) else list(map(_as_change, rows)))
        test.cut()
        if not at_once:
            test.settle()
    test.settle()


def _is_upsert(row: Row) -> bool:
    return "_change_type" not in row


def _as_change(row: Row) -> Row:
    return {"_change_type": "update_postimage", **row}


def outcome(test: PipelineTest) -> Any:
    """All that the shop has emitted so far: views and their changes, topics, dead letters."""
    return plain({
        "views": {name: test.view(name) for name in VIEWS},
        "changes": {name: test.changes(name) for name in VIEWS},
        "topics": {name: test.rows(name) for name in DERIVED},
        "late": late_rows(test),
        "dead": {name: dead_letters(test.log, name) for name in DEAD},
    })  # fmt: skip


def late_rows(test: PipelineTest) -> list[list[Any]]:
    """How many late rows each step had, by minute and producer: a batch records its own counts."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for row in test.log.read("__late.golden").to_pylist():
        counts[row["step"], row["minute"], row["producer"]] += row["rows"]
    return sorted([*key, count] for key, count in counts.items())


def dead_letters(log: hr.Log, topic: str) -> list[Row]:
    """The dead letters of a topic, without the times at which they were written."""
    dead_letters = dead.read_dead_letters(log, topic)
    return [
        {name: value for name, value in dead_letter.items() if name not in {"at", "_timestamp"}}
        for dead_letter in dead_letters
    ]


# How results are recorded


def plain(value: Any) -> Any:
    """A value as JSON has it. What JSON has no word for is a text that begins with its type."""
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, bytes):
        return f"bytes {value.hex()}"
    if isinstance(value, datetime | date | clock_time):
        return f"{type(value).__name__} {value.isoformat()}"
    if isinstance(value, Decimal | timedelta):
        return f"{type(value).__name__} {value}"
    return value
