"""Previews: what a stream or table gives on the newest rows, without a run."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import ConfigurationError, FunctionFailed, InputError, UnknownTopic
from headrace.log.api import Log
from headrace.pipeline.preview import Preview
from headrace.runtime.inputs import create_topics

pytestmark = pytest.mark.usefixtures("no_syncs")
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
SCHEMA = "id BIGINT, region STRING, amount DOUBLE, at TIMESTAMP"


@hr.udf("DOUBLE", name="preview_taxed", each_row=True)
def taxed(amount: float) -> float:
    if amount == 13:
        raise ValueError("unlucky")
    return amount * 2


class Totals(hr.Processor, each_key=True):
    output = "region STRING, total DOUBLE"
    total = hr.state("DOUBLE", default=0.0)
    quiet = hr.timer()

    def on_row(self, row: dict[str, Any], ctx: Any) -> None:
        ctx["total"] += row["amount"]
        ctx["quiet"] = row["at"] + timedelta(hours=1)

    def on_timer(self, key: dict[str, Any], ctx: Any) -> None:
        ctx.emit(key, total=ctx["total"])


class Shop:
    """A pipeline with a log of 30 orders in two partitions."""

    def __init__(self, root: Path) -> None:
        self.pipeline = hr.Pipeline("shop", log=f"file:{root / 'data'}")
        self.orders = self.pipeline.topic(
            "preview", schema=SCHEMA, key="id", event_time="at", partitions=2
        )
        self.regions = self.pipeline.table(
            "regions", schema="region STRING, name STRING", key="region"
        )
        self.pipeline.write("copy", self.orders)

    def fill(self) -> Log:
        log = hr.open_log(str(self.pipeline.log))
        create_topics(log, self.pipeline.plan())
        for number in range(30):
            with log.producer("preview") as producer:
                producer.append([order(number)])
        with log.producer("regions") as producer:
            producer.upsert([{"region": "a", "name": "?"}, {"region": "b", "name": "B"}])
            producer.upsert([{"region": "a", "name": "A"}])
            producer.append([{"region": "b", "name": None, "_change_type": "delete"}])
        return log


def order(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "region": "ab"[number % 2],
        "amount": float(number),
        "at": NOON + timedelta(minutes=number),
    }


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path)
    with shop.fill():
        yield shop


def test_the_newest_rows_are_shown_in_the_order_of_their_arrival(shop: Shop) -> None:
    found = shop.orders.select("id").preview(5)
    assert found.to_pylist() == [{"id": number} for number in range(25, 30)]
    assert len(shop.orders.preview(50)) == 30
    of_few = shop.orders.preview(of=10)
    assert [row["id"] for row in of_few.to_pylist()] == sorted(
        row["id"] for row in of_few.to_pylist()
    )
    assert "the newest 10 rows of preview" in str(of_few)
    with hr.open_log(str(shop.pipeline.log)) as log:
        assert set(log.topics()) == {"preview", "regions", "copy"}
        assert not log.end_offsets("copy")[0]


def test_steps_with_state_are_computed_as_if_time_had_ended(shop: Shop) -> None:
    windows = shop.orders.window(hr.tumbling("20 minutes")).group_by("region")
    counts = windows.aggregate(n=hr.agg.count()).preview().to_pylist()
    assert [(row["region"], row["n"]) for row in counts] == [
        ("a", 10), ("a", 5), ("b", 10), ("b", 5),
    ]  # fmt: skip
    totals = shop.orders.process(Totals, key="region").preview()
    assert sorted(row["total"] for row in totals.to_pylist()) == [210.0, 225.0]
    named = shop.orders.join(shop.regions, on="region", how="left").preview(2)
    assert [row["name"] for row in named.to_pylist()] == ["A", None]
    assert shop.regions.preview().to_pylist() == [{"region": "a", "name": "A"}]


def test_a_function_that_fails_names_the_row_and_its_offset_in_the_topic(shop: Shop) -> None:
    shown = shop.orders.with_columns(tax="preview_taxed(amount)").preview(30)
    assert [row["tax"] for row in shown.to_pylist()][12:15] == [24.0, None, 28.0]
    assert "1 row null where an expression failed" in str(shown)
    stopped = shop.orders.with_columns(tax="preview_taxed(amount)", errors="stop")
    with hr.open_log(str(shop.pipeline.log)) as log:
        (position,) = (
            (row["_partition"], row["_offset"])
            for row in log.read("preview").to_pylist()
            if row["id"] == 13
        )
    with pytest.raises(FunctionFailed) as caught:
        stopped.preview(of=25)
    assert caught.value.position == position
    assert f"(partition {position[0]}, offset {position[1]})" in str(caught.value)


def test_positions_are_those_of_the_topic(tmp_path: Path, shop: Shop) -> None:
    other = hr.Pipeline("other", log=shop.pipeline.log)
    placed = other.topic(
        "preview",
        schema=SCHEMA,
        key="id",
        partitions=2,
        metadata={"place": "_offset", "part": "_partition"},
    )
    with hr.open_log(str(shop.pipeline.log)) as log:
        expected = {
            row["id"]: (row["_partition"], row["_offset"])
            for row in log.read("preview").to_pylist()
        }
    shown = placed.preview(3, of=8).to_pylist()
    assert {row["id"]: (row["part"], row["place"]) for row in shown} == {
        number: expected[number] for number in (27, 28, 29)
    }


def test_rows_can_be_given_and_need_no_log() -> None:
    pipeline = hr.Pipeline("shop")
    orders = pipeline.topic("orders", schema=SCHEMA, key="id")
    items = pipeline.table("items", schema="id BIGINT, item STRING", key="id")
    rows = {"orders": [order(3)], "items": [{"id": 3, "item": "tea"}]}
    shown = (
        orders.join(items, on="id").with_columns(tax="preview_taxed(amount)").preview(given=rows)
    )
    assert shown.to_pylist() == [{**order(3), "item": "tea", "tax": 6.0}]
    assert "1 row of items" in str(shown)
    with pytest.raises(ConfigurationError, match="has no log"):
        orders.preview()
    with pytest.raises(InputError, match="'order', which orders does not read: did you mean"):
        orders.preview(given={"order": []})
    with pytest.raises(InputError, match="rows=0"):
        orders.preview(0)
    assert "no rows" in str(orders.preview(given={"orders": []}))


def test_a_topic_that_does_not_exist_is_said(shop: Shop) -> None:
    missing = shop.pipeline.topic("payments", schema="id BIGINT")
    with pytest.raises(UnknownTopic, match="payments"):
        missing.preview()


def test_a_notebook_shows_a_table(shop: Shop) -> None:
    shown = shop.orders.select("id", "upper(region) AS `<b>`").preview(1)
    assert isinstance(shown, Preview)
    html = shown._repr_html_()
    assert "<th>&lt;b&gt;</th>" in html
    assert "<td>29</td><td>B</td>" in html
    assert "the newest 30 rows of preview" in html
    assert list(shown.to_pandas()["id"]) == [29]
    assert shown.to_arrow().num_rows == 1


@pytest.mark.spark
def test_expressions_that_only_spark_computes_are_shown_too(shop: Shop, spark: Any) -> None:
    shown = shop.orders.select("id", sound="soundex(region)").preview(1, spark=spark)
    assert shown.to_pylist() == [{"id": 29, "sound": "B000"}]
