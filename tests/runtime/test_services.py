"""A pipeline's sinks follow its derived topics while it runs, and what fails for good ends the run.
Without Spark: the topics are written by hand.
"""

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
        shop.sink(hr.sinks.sqlite("x.db"), orders)
    shop.sink(hr.sinks.sqlite("x.db", table="orders"), orders)
    assert [output.name for output in shop.plan().outputs] == ["orders.sqlite"]
