"""Captured tables in a pipeline: declared with some of their columns, captured while it runs,
joined and aggregated like any table.
"""

import sqlite3
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pytest

import headrace as hr
from headrace.cdc.declaration import Capture
from headrace.errors import ConfigurationError, DuplicateStep, HeadraceError, TopicExists
from headrace.runtime.inputs import create_topics
from headrace.testing.pipelines import PipelineTest
from headrace.views.reader import ViewReader
from tests.cdc.captures import do
from tests.waits import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def database(tmp_path: Path) -> Capture:
    path = tmp_path / "shop.db"
    do(
        path,
        "CREATE TABLE orders (id INTEGER PRIMARY KEY, region TEXT, amount REAL, note TEXT)",
        "INSERT INTO orders VALUES (1, 'n', 10, ''), (2, 's', 5, '')",
    )
    return hr.cdc.sqlite(path)


def pipeline_of(capture: Capture, log: str) -> hr.Pipeline:
    shop = hr.Pipeline("shop", log=log)
    orders = shop.capture(
        capture, "orders", schema="id BIGINT, region STRING, amount DOUBLE", key="id"
    )
    shop.view("revenue", orders.group_by("region").aggregate(revenue=hr.agg.sum("amount")))
    return shop


def test_a_table_may_have_more_columns_than_are_declared(database: Capture, address: str) -> None:
    shop = pipeline_of(database, address)
    with hr.open_log(address) as log:
        with pytest.raises(TopicExists, match="has not been captured yet by 'shop'"):
            create_topics(log, shop.plan())
        database.run(log=address, until_caught_up=True)
        create_topics(log, shop.plan())
        other = hr.Pipeline("other", log=address)
        wrong = other.capture(
            database, "orders", schema="id BIGINT, amount STRING, colour STRING", key="id"
        )
        other.view("all", wrong)
        with pytest.raises(
            TopicExists,
            match=r"'colour' is not in the topic; amount DOUBLE is declared as amount STRING",
        ):
            create_topics(log, other.plan())


def test_changes_of_a_database_flow_through_a_pipeline(
    database: Capture, tmp_path: Path, address: str
) -> None:
    database.run(log=address, until_caught_up=True)
    with PipelineTest(pipeline_of(database, address), tmp_path / "test", log=address) as test:
        test.settle()
        assert by_region(test) == {"n": 10.0, "s": 5.0}
        do(
            tmp_path / "shop.db",
            "UPDATE orders SET region = 's' WHERE id = 1",
            "INSERT INTO orders VALUES (3, 'w', 1, '')",
            "DELETE FROM orders WHERE id = 2",
            "ALTER TABLE orders ADD COLUMN colour TEXT DEFAULT 'red'",
        )
        database.run(log=address, until_caught_up=True)
        test.settle()
        assert by_region(test) == {"s": 10.0, "w": 1.0}
        test.restart()  # the topic has got a column meanwhile
        test.settle()
        assert by_region(test) == {"s": 10.0, "w": 1.0}


def test_a_pipeline_with_captures_is_tested_without_a_database(
    tmp_path: Path, address: str
) -> None:
    with PipelineTest(pipeline_of(hr.cdc.sqlite("no/such.db"), address), tmp_path / "test") as test:
        test.feed("orders", [{"id": 1, "region": "n", "amount": 2.0}])
        test.settle()
        assert by_region(test) == {"n": 2.0}


def test_large_values_that_did_not_change_are_kept_where_marks_are_declared(
    tmp_path: Path, address: str
) -> None:
    shop = hr.Pipeline("shop", log=address)
    documents = shop.capture(
        hr.cdc.postgres("postgresql://nobody@nowhere/shop"),
        "documents",
        schema="id BIGINT, title STRING, body STRING, _marks STRING",
        key="id",
    )
    shop.view("newest", documents)
    with PipelineTest(shop, tmp_path / "test") as test:
        test.feed("documents", [{"id": 1, "title": "a", "body": "long", "_marks": None}])
        test.settle()
        test.feed(
            "documents",
            [
                {
                    "id": number,
                    "title": "b",
                    "body": None,
                    "_marks": '{"body": {"unchanged": true}}',
                }
                for number in (1, 2)
            ],
        )
        test.settle()
        found = {
            row["id"]: (row["title"], row["body"], row["_marks"] is None)
            for row in test.view("newest")
        }
    assert found == {1: ("b", "long", True), 2: ("b", None, False)}


def by_region(test: PipelineTest) -> dict[str, float]:
    return {row["region"]: row["revenue"] for row in test.view("revenue")}


def test_two_captures_of_one_name_are_refused(database: Capture, address: str) -> None:
    shop = pipeline_of(database, address)
    with pytest.raises(DuplicateStep, match="Two captures"):
        shop.capture(hr.cdc.sqlite("elsewhere/shop.db"), "items", schema="id BIGINT", key="id")


def test_a_capture_that_cannot_work_ends_the_run(tmp_path: Path, address: str) -> None:
    shop = pipeline_of(hr.cdc.sqlite(tmp_path / "missing.db"), address)
    with pytest.raises(ConfigurationError, match="There is no SQLite database"):
        shop.run(state=tmp_path / "state")


@pytest.mark.spark
def test_changes_reach_the_view_while_it_runs(
    database: Capture, tmp_path: Path, address: str, spark: "SparkSession"
) -> None:
    shop, stop = pipeline_of(database, address), Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            shop.run(state=tmp_path / "state", stop=stop, master="local[2]")
        except BaseException as error:
            failures.append(error)

    def revenue() -> dict[str, Any]:
        path = tmp_path / "state" / "views.db"
        if not path.exists():
            return {}
        with (
            suppress(HeadraceError, sqlite3.Error),
            ViewReader(path) as views,
        ):  # it may be on the point of being made
            return {row["region"]: row["revenue"] for row in views.table("revenue").to_pylist()}
        return {}

    running = Thread(target=run)
    running.start()
    try:
        wait_until(lambda: bool(failures) or revenue() == {"n": 10.0, "s": 5.0}, 90)
        do(
            tmp_path / "shop.db",
            "UPDATE orders SET region = 's' WHERE id = 1",
            "INSERT INTO orders VALUES (3, 'w', 1, '')",
        )
        wait_until(lambda: bool(failures) or revenue() == {"s": 15.0, "w": 1.0}, 60)
    finally:
        stop.set()
        running.join(90)
    assert failures == []
