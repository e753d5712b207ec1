"""A pipeline's sinks follow its derived topics while it runs, and what fails for good ends the run.
Without Spark: the topics are written by hand.
"""

import sqlite3
import threading
import time
from pathlib import Path

import pytest

import headrace as hr
from headrace.errors import PlanError, TargetMismatch
from headrace.runtime.services import run_sinks
from tests.sinks.webhook_receiver import WebhookReceiver


@pytest.fixture
def address(tmp_path: Path) -> str:
    address = f"file:{tmp_path / 'log'}"
    with hr.open_log(address) as log:
        log.create_table("revenue.sqlite", "region STRING, revenue BIGINT", key="region")
    return address


def write(address: str, **revenue: int) -> None:
    with hr.open_log(address) as log, log.producer("revenue.sqlite") as producer:
        producer.upsert(
            [{"region": region, "revenue": amount} for region, amount in revenue.items()]
        )


def test_what_is_written_meanwhile_arrives(address: str, tmp_path: Path) -> None:
    sink = hr.sinks.sqlite(tmp_path / "reports.db", table="revenue")
    with run_sinks({"revenue.sqlite": sink}, address, threading.Event(), until_caught_up=False):
        write(address, eu=1)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                if sink.check("revenue.sqlite", log=address).rows == 1:
                    break
            except TargetMismatch:  # not made yet
                pass
            time.sleep(0.02)
    compared = sink.check("revenue.sqlite", log=address)
    assert (compared.rows, compared.is_equal) == (1, True)


def test_a_run_that_ends_by_itself_ends_when_the_sinks_have_caught_up(
    address: str, tmp_path: Path
) -> None:
    sink = hr.sinks.sqlite(tmp_path / "reports.db", table="revenue")
    with run_sinks({"revenue.sqlite": sink}, address, threading.Event(), until_caught_up=True):
        write(address, eu=1, us=2)
    assert sink.check("revenue.sqlite", log=address).rows == 2


def test_a_table_is_sent_to_a_webhook_and_one_that_is_away_holds_nobody_up(address: str) -> None:
    receiver = WebhookReceiver()
    sinks = {
        "revenue.sqlite": hr.sinks.webhook(receiver.url, table="revenue", internal="127.0.0.1")
    }
    with run_sinks(sinks, address, threading.Event(), until_caught_up=True):
        write(address, eu=1, us=2)
    assert [entry["row"] for entry in receiver.rows] == [
        {"region": "eu", "revenue": 1},
        {"region": "us", "revenue": 2},
    ]
    receiver.stop()
    write(address, asia=3)
    began_s = time.monotonic()
    with run_sinks(sinks, address, threading.Event(), until_caught_up=False):
        time.sleep(0.3)
    assert time.monotonic() - began_s < 10


def test_a_sink_that_fails_for_good_stops_the_run(address: str, tmp_path: Path) -> None:
    stop = threading.Event()
    sink = hr.sinks.sqlite(tmp_path / "reports.db", table="revenue", create=False)
    with (
        pytest.raises(TargetMismatch, match="no table 'revenue'"),
        run_sinks({"revenue.sqlite": sink}, address, stop, until_caught_up=False),
    ):
        assert stop.wait(20)


def test_what_is_no_sink() -> None:
    shop = hr.Pipeline("shop")
    orders = shop.topic("orders", schema="id BIGINT")
    with pytest.raises(PlanError, match=r"not a str[\s\S]*hr.sinks"):
        shop.sink("sqlite:x.db", orders)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="table=…"):
        shop.sink(hr.sinks.sqlite("x.db"), orders.where("id > 1"))
    shop.sink(hr.sinks.sqlite("x.db", table="large"), orders.where("id > 1"))
    assert [output.name for output in shop.plan().outputs] == ["large.sqlite"]


def test_a_sink_of_an_input_follows_its_topic_and_stores_no_copy(tmp_path: Path) -> None:
    """Its rows were written to a second topic, and read from there."""
    shop = hr.Pipeline("shop")
    orders = shop.topic("orders", schema="id BIGINT, city STRING", key="id")
    shop.sink(hr.sinks.sqlite(tmp_path / "a.db"), orders)
    shop.sink(hr.sinks.sqlite(tmp_path / "a.db", table="newest", key="id"), orders)
    shop.view("cities", orders.group_by("city").aggregate(n=hr.agg.count()))
    assert [output.name for output in shop.plan().outputs] == ["cities"]
    sinks = {name: sink.follows for name, sink in shop.sinks.items()}
    assert sinks == {"orders.sqlite": "orders", "newest.sqlite": "orders"}
    address = f"file:{tmp_path / 'log'}"
    with hr.open_log(address) as log:
        # The topic has a column more than the pipeline declares.
        log.create_topic("orders", "id BIGINT, city STRING, secret STRING", key="id")
        with log.producer("orders") as producer:
            producer.append(
                [
                    {"id": 1, "city": "Oslo", "secret": "x"},
                    {"id": 1, "city": "Rome", "secret": None},
                ]
            )
    with run_sinks(shop.sinks, address, threading.Event(), until_caught_up=True):
        pass
    with sqlite3.connect(tmp_path / "a.db") as db:
        rows = db.execute("SELECT * FROM orders ORDER BY _offset").fetchall()
        assert rows == [(1, "Oslo", 0, 0), (1, "Rome", 0, 1)]
        assert db.execute("SELECT * FROM newest").fetchall() == [(1, "Rome")]
    for sink in shop.sinks.values():
        assert sink.check("orders", log=address).is_equal


def test_a_sink_of_an_input_is_a_copy_only_when_asked_for() -> None:
    shop = hr.Pipeline("shop")
    orders = shop.topic("orders", schema="id BIGINT")
    stamped = shop.topic("stamped", schema="id BIGINT", event_time=hr.processing_time())
    with pytest.raises(PlanError, match="retention cannot be given here"):
        shop.sink(hr.sinks.sqlite("x.db"), orders, retention="1 day")
    shop.sink(hr.sinks.sqlite("x.db"), orders, topic="copy", retention="1 day")
    shop.sink(hr.sinks.sqlite("x.db", table="stamped"), stamped)  # a column is added when read
    large = orders.where("id > 5")
    shop.write("large", large)
    shop.sink(hr.sinks.sqlite("x.db", table="large"), large, topic="large")
    assert [output.name for output in shop.plan().outputs] == ["copy", "stamped.sqlite", "large"]
    assert {sink.follows for sink in shop.sinks.values()} == {None}
