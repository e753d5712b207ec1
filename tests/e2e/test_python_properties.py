"""Functions and processors under faults, restarts and rescaling: rows, ticks, dead letters and
counts are those of an undisturbed replay over the same ticks.

The lives, and what is compared, are those of `test_timed_properties.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings

import headrace as hr
from tests.e2e.faults import Faults
from tests.e2e.pipeline_lives import Move
from tests.e2e.test_timed_properties import LIFE, QUIET, live
from tests.short_forms import examples

pytestmark = pytest.mark.usefixtures("no_syncs")
ORDERS = "id BIGINT, who BIGINT, amount BIGINT, device STRING, at TIMESTAMP"
Row = dict[str, Any]


@hr.udf("BIGINT", name="lives_twice")
def twice(number: pa.Array) -> pa.Array:
    return pc.multiply(number, 2)


@hr.udf("BOOLEAN", name="lives_odd", each_row=True)
def odd(number: int | None) -> bool | None:
    if number == 7:
        raise ValueError("seven")
    return None if number is None else number % 2 == 1


def of_amount(row: Row) -> Iterator[Row]:
    made = {"id": row["id"], "part": 0, "at": row["at"]}
    for part in range((row["amount"] or 0) % 4):
        made["part"] = part
        yield made


def in_half(rows: pa.Table) -> pa.Table:
    even = pc.equal(pc.bit_wise_and(rows["amount"], 1), 0)
    chosen = pc.indices_nonzero(even)
    return pa.table({"id": rows["id"].take(chosen), "_row": chosen})


class Story(hr.Processor, each_key=True):
    """Lists, maps, timers, random numbers, side outputs and failures."""

    output = "who BIGINT, what STRING, seen ARRAY<BIGINT>, chance DOUBLE, at TIMESTAMP"
    told = hr.side_output("who BIGINT, devices MAP<STRING, INT>")
    seen = hr.state("ARRAY<BIGINT>", default=[])
    devices = hr.state("MAP<STRING, INT>", default={})
    quiet = hr.timer()
    again = hr.timer()

    def on_row(self, row: Row, ctx: Any) -> Row | None:
        if row["amount"] == 9:
            ctx["seen"].append(-1)
            raise ValueError("nine")
        ctx["seen"].append(row["id"])
        device = row["device"] or "none"
        ctx["devices"][device] = ctx["devices"].get(device, 0) + 1
        ctx.emit_to("told", who=row["who"], devices=ctx["devices"])
        if row["at"] is not None:
            ctx["quiet"] = row["at"] + timedelta(minutes=2)
            if row["amount"] < 3:
                ctx["again"] = row["at"] - timedelta(minutes=1)
        return {**ctx.key, "what": "row", "seen": ctx["seen"], "chance": ctx.random.random(),
                "at": row["at"]}  # fmt: skip

    def on_people(self, row: Row, ctx: Any) -> None:
        ctx["devices"][row["city"] or "gone"] = -1

    def on_timer(self, key: Row, ctx: Any) -> None:
        ctx.emit(key, what=ctx.timer, seen=ctx["seen"], chance=ctx.random.random(), at=ctx.fired_at)
        if ctx.timer == "quiet":
            ctx.forget()


class Open(hr.Processor):
    """A table of the orders that are not paid, by columns."""

    output = "id BIGINT, since TIMESTAMP, chance DOUBLE"
    table_key = "id"
    is_paid = hr.state("BOOLEAN", default=False)
    due = hr.timer(clock="processing")

    def on_rows(self, rows: pa.Table, ctx: Any) -> pa.Table:
        ctx["due"] = pa.repeat(pa.scalar(ctx.now + timedelta(milliseconds=5)), len(ctx))
        table = pa.table(
            {
                "id": ctx.keys["id"],
                "since": ctx.per_key(rows["at"], "last"),
                "chance": ctx.random(),
            }
        )
        return table.filter(pc.invert(ctx["is_paid"]))

    def on_payments(self, rows: pa.Table, ctx: Any) -> pa.Table:
        ctx["is_paid"] = True
        return self.without(ctx)

    def on_timer(self, keys: pa.Table, ctx: Any) -> pa.Table | None:
        return self.without(ctx) if ctx.tick % 2 else None

    def without(self, ctx: Any) -> pa.Table:
        return ctx.keys.append_column("_change_type", pa.repeat("delete", len(ctx)))


def inside() -> hr.Pipeline:
    pipeline = hr.Pipeline("inside")
    orders = pipeline.topic(
        "orders", schema=ORDERS, key="id", partitions=2,
        event_time=hr.EventTime("at", delay="5 seconds", producer="device", idle="1 hour"),
    )  # fmt: skip
    payments = pipeline.topic(
        "payments", schema="id BIGINT, at TIMESTAMP", key="id",
        event_time=hr.EventTime("at", idle="20 ms"),
    )  # fmt: skip
    people = pipeline.table("people", schema="who BIGINT, city STRING", key="who")
    pipeline.topic(
        "readings",
        schema="device STRING, happened TIMESTAMP, sent TIMESTAMP, received TIMESTAMP",
        key="device",
    )
    called = orders.with_columns(
        twice="lives_twice(amount)", odd="lives_odd(amount)", errors="divert", name="called"
    )
    pipeline.write("called", called, partitions=2)
    windows = orders.window(hr.tumbling("1 minute"), late=hr.late.divert("late_orders"))
    pipeline.view(
        "windows",
        windows.group_by("lives_odd(amount) AS odd").aggregate(
            s=hr.agg.sum("lives_twice(amount)"), n=hr.agg.count(where="lives_odd(who)")
        ),
    )
    pipeline.view("of_people", people.where("lives_odd(who)").sample(0.5, by="who"))
    pipeline.write("parts", orders.flat_map(of_amount, "id BIGINT, part BIGINT, at TIMESTAMP"))
    pipeline.write("halves", orders.map_batches(in_half, "id BIGINT"))
    pipeline.write("sampled", orders.sample(0.5))
    story = orders.process(
        Story, key="who", name="story", errors="divert", ttl="2 seconds", people=people
    )
    pipeline.write("story", story, partitions=2)
    pipeline.write("told", story.side("told").sample(0.7))
    unpaid = orders.process(Open, key="id", name="open", payments=payments)
    pipeline.view("unpaid", unpaid)
    pipeline.write("unpaid_changes", unpaid, partitions=2)
    return pipeline


def lived(
    fed: list[dict[str, Any]],
    happening: list[Move],
    strikes: frozenset[int],
    repeats: float,
    faults: list[Faults],
) -> None:
    faults[0] = Faults(frozenset(strikes))
    with TemporaryDirectory() as root:
        live(Path(root), fed, happening, faults[0], repeats, inside)


@given(**LIFE)
@settings(max_examples=examples(5), suppress_health_check=QUIET)
def test_python_inside_gives_the_same_whatever_happens(
    fed: list[dict[str, Any]],
    happening: list[Move],
    strikes: frozenset[int],
    repeats: float,
    faults: list[Faults],
) -> None:
    lived(fed, happening, strikes, repeats, faults)


@pytest.mark.slow
@given(**LIFE)
@settings(max_examples=examples(200), suppress_health_check=QUIET)
def test_python_inside_through_two_hundred_lives(
    fed: list[dict[str, Any]],
    happening: list[Move],
    strikes: frozenset[int],
    repeats: float,
    faults: list[Faults],
) -> None:
    lived(fed, happening, strikes, repeats, faults)
