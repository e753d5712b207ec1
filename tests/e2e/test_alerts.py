"""An alert of a pipeline: sent when a row of a table comes and when it goes, once, also when the
runner starts again.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import headrace as hr
from headrace.alerts.alert import AlertMessage
from headrace.errors import PlanError
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark
from tests.sinks.webhook_receiver import WebhookReceiver
from tests.waits import wait_until


def declared(log: str, receiver: WebhookReceiver) -> hr.Pipeline:
    shop = hr.Pipeline("shop", log=log)
    orders = shop.topic("orders", schema="id BIGINT, region STRING, amount BIGINT")
    revenue = orders.group_by("region").aggregate(revenue=hr.agg.sum("amount"))
    shop.alert(
        "rich",
        revenue.where("revenue > 10"),
        to=hr.sinks.webhook(receiver.url, table="alerts", internal=["127.0.0.0/8"]),
    )
    return shop


@contextmanager
def running(shop: hr.Pipeline, tmp_path: Path) -> Iterator[list[AlertMessage]]:
    stop, heard = threading.Event(), list[AlertMessage]()
    thread = threading.Thread(
        target=shop.run,
        kwargs={"state": tmp_path / "state", "stop": stop, "on_alert": heard.append},
    )
    thread.start()
    try:
        yield heard
    finally:
        stop.set()
        thread.join(60)


def test_an_alert_fires_and_resolves_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receiver: WebhookReceiver
) -> None:
    monkeypatch.setattr("headrace.runtime.run.RunSession._start", lambda _session: PlainSpark())
    shop = declared(f"file:{tmp_path / 'log'}", receiver)

    def sell(amount: int) -> None:
        with hr.open_log(f"file:{tmp_path / 'log'}") as log, log.producer("orders") as producer:
            producer.append([{"id": 1, "region": "eu", "amount": amount}])

    status = tmp_path / "state" / "status.json"
    with running(shop, tmp_path) as heard:
        wait_until(status.exists)
        sell(20)
        wait_until(lambda: len(receiver.requests) == 1)
    before = status.read_text()
    with running(shop, tmp_path) as later:
        wait_until(lambda: status.read_text() != before)
        sell(-15)
        wait_until(lambda: len(receiver.requests) == 2)
    assert [(each.state, each.fired, each.resolved) for each in heard + later] == [
        ("firing", 1, 0),
        ("resolved", 0, 1),
    ]
    assert [request["Idempotency-Key"] for request in receiver.requests] == [
        each.id for each in heard + later
    ]


def held(log: str) -> hr.Pipeline:
    shop = hr.Pipeline("shop", log=log)
    orders = shop.topic("orders", schema="region STRING, amount BIGINT")
    revenue = orders.group_by("region").aggregate(revenue=hr.agg.sum("amount"))
    shop.alert("rich", revenue.where("revenue > 10"), by="region", for_="5 minutes")
    return shop


def changes(test: PipelineTest, topic: str) -> list[tuple[str, str, int]]:
    rows = test.log.read(topic).to_pylist()
    return [(row["_change_type"], row["region"], row["revenue"]) for row in rows]


def test_an_alert_with_for_fires_when_its_condition_has_held(tmp_path: Path) -> None:
    """Through restarts, with other shards, when only time passes, and in a replay."""
    with PipelineTest(held(f"file:{tmp_path / 'log'}"), tmp_path) as test:

        def sell(region: str, amount: int) -> None:
            test.feed("orders", [{"region": region, "amount": amount}])
            test.settle()

        sell("eu", 20)
        sell("us", 30)
        test.pass_time("3 minutes")
        sell("us", -25)  # it did not hold
        sell("eu", 5)
        assert test.cut() == 0, "nothing is due yet"
        test.restart(shards=3, lose_local_store=True)
        test.pass_time("2 minutes 1 second")
        assert test.cut() == 1, "a tick is cut because the time is up"
        test.settle()
        assert changes(test, "alert.rich") == [("insert", "eu", 25)]
        sell("us", 40)
        sell("eu", -20)
        test.pass_time("4 minutes")
        test.settle()
        expected = [("insert", "eu", 25), ("delete", "eu", 25)]
        assert changes(test, "alert.rich") == expected
        test.pass_time("2 minutes")
        test.settle()
        expected.append(("insert", "us", 45))
        assert changes(test, "alert.rich") == expected
        replayed = test.replay("v2")
        replayed.settle()
        assert changes(replayed, "alert.rich.v2") == expected
        replayed.close()


def test_for_is_refused_of_events_which_do_not_last() -> None:
    shop = hr.Pipeline("shop")
    orders = shop.topic("orders", schema="region STRING, amount BIGINT")
    with pytest.raises(PlanError, match="'rich' has for_, and its rows are a stream"):
        shop.alert("rich", orders, for_="1 minute")
