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
    monkeypatch.setattr("headrace.runtime.run._start_spark", lambda _options: PlainSpark())
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
