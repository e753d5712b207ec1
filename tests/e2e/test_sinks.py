"""A pipeline with sinks: what it computes arrives in another system, and stays equal when it runs
again. On Spark, and without a JVM.
"""

import sqlite3
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import headrace as hr
from headrace.errors import TargetMismatch
from headrace.testing.plain_spark import PlainSpark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def declared(path: Path, log: str, **settings: object) -> hr.Pipeline:
    shop = hr.Pipeline("shop", log=log)
    orders = shop.topic("orders", schema="id BIGINT, region STRING, amount BIGINT")
    revenue = orders.group_by("region").aggregate(revenue=hr.agg.sum("amount"))
    shop.sink(hr.sinks.sqlite(path, table="revenue", **settings), revenue)
    shop.sink(hr.sinks.sqlite(path, table="large"), orders.where("amount > 5"))
    return shop


def asked(path: Path, query: str) -> list[tuple[object, ...]]:
    db = sqlite3.connect(path)
    found = db.execute(query).fetchall()
    db.close()
    return found


def test_a_pipeline_keeps_a_database_equal_to_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.runtime.run.RunSession._start", lambda _session: PlainSpark())
    keeps_a_database_equal(tmp_path)


@pytest.mark.slow
@pytest.mark.spark
def test_a_sink_of_a_pipeline_on_spark(spark: "SparkSession", tmp_path: Path) -> None:
    keeps_a_database_equal(tmp_path)


def keeps_a_database_equal(tmp_path: Path) -> None:
    address, path = f"file:{tmp_path / 'log'}", tmp_path / "reports.db"
    with hr.open_log(address) as log:
        log.create_topic("orders", "id BIGINT, region STRING, amount BIGINT")
        with log.producer("orders") as producer:
            producer.append(
                [
                    {"id": number, "region": "eu" if number % 2 else "us", "amount": number}
                    for number in range(8)
                ]
            )
    shop = declared(path, address)
    shop.run(state=tmp_path / "state", until_caught_up=True, master="local[2]")
    assert asked(path, "SELECT region, revenue FROM revenue ORDER BY 1") == [("eu", 16), ("us", 12)]
    assert asked(path, "SELECT id FROM large ORDER BY 1") == [(6,), (7,)]

    stop = threading.Event()
    thread = threading.Thread(
        target=shop.run, kwargs={"state": tmp_path / "state", "stop": stop, "master": "local[2]"}
    )
    thread.start()
    with hr.open_log(address) as log, log.producer("orders") as producer:
        producer.append([{"id": 9, "region": "eu", "amount": 100}])
    deadline = time.monotonic() + 60
    while ("eu", 116) not in asked(
        path, "SELECT region, revenue FROM revenue"
    ) and time.monotonic() < deadline:
        time.sleep(0.1)
    stop.set()
    thread.join(60)
    assert asked(path, "SELECT region, revenue FROM revenue ORDER BY 1") == [
        ("eu", 116),
        ("us", 12),
    ]
    assert shop.sinks["revenue.sqlite"].check("revenue.sqlite", log=address).is_equal

    with pytest.raises(TargetMismatch, match="no table 'revenue'"):
        declared(tmp_path / "other.db", address, create=False).run(
            state=tmp_path / "state", master="local[2]"
        )


def test_a_pipeline_that_only_has_a_sink_of_an_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes nothing, and keeps the target equal to the topic."""
    monkeypatch.setattr("headrace.runtime.run.RunSession._start", lambda _session: PlainSpark())
    address, path = f"file:{tmp_path / 'log'}", tmp_path / "reports.db"
    shop = hr.Pipeline("shop", log=address)
    orders = shop.topic("orders", schema="id BIGINT, region STRING", key="id")
    shop.sink(hr.sinks.sqlite(path), orders)
    with hr.open_log(address) as log:
        log.create_topic("orders", "id BIGINT, region STRING", key="id")
        with log.producer("orders") as producer:
            producer.append([{"id": 1, "region": "eu"}])
    shop.run(state=tmp_path / "state", until_caught_up=True, master="local[2]")
    assert asked(path, "SELECT id, region FROM orders") == [(1, "eu")]
