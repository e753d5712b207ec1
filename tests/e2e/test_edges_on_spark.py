"""The edges of a pipeline on Spark: a row that is posted to its gateway raises an alert, which a
receiver hears of under the id that the topic has, and another row resolves it.
"""

from __future__ import annotations

import json
import queue
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import headrace as hr
from headrace.alerts.alert import TOPIC
from tests.gateways.senders import post
from tests.sinks.webhook_receiver import WebhookReceiver
from tests.waits import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def declared(log: str, receiver: WebhookReceiver) -> hr.Pipeline:
    shop = hr.Pipeline("shop", log=log)
    orders = shop.topic(
        "orders", schema="order_id BIGINT, region STRING, amount BIGINT, received_at TIMESTAMP"
    )
    revenue = orders.group_by("region").aggregate(revenue=hr.agg.sum("amount"))
    shop.view("revenue", revenue)
    shop.alert(
        "rich",
        revenue.where("revenue > 10"),
        to=hr.sinks.webhook(receiver.url, table="alerts", internal=["127.0.0.0/8"]),
        by="region",
    )
    shop.gateway(hr.gateways.http("orders", port=0))
    return shop


def test_a_posted_row_raises_an_alert_and_another_resolves_it(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receiver: WebhookReceiver
) -> None:
    monkeypatch.setattr("headrace.runtime.run._start_spark", lambda _options: spark)
    stop, addresses = threading.Event(), queue.Queue[str]()
    shop = declared(f"file:{tmp_path / 'log'}", receiver)
    options: dict[str, Any] = {
        "state": tmp_path / "state",
        "stop": stop,
        "on_gateway": lambda _gateway, address: addresses.put(address),
    }
    running = threading.Thread(target=shop.run, kwargs=options)
    running.start()
    try:
        address = addresses.get(timeout=180)
        assert (
            post(
                address,
                "/topics/orders",
                b'[{"order_id": 1, "region": "eu", "amount": 20}, {"order_id": 2, "region": "us",'
                b' "amount": 3}]',
            )[0]
            == 200
        )
        wait_until(lambda: len(receiver.requests) == 1, timeout_s=180)
        assert (
            post(address, "/topics/orders", b'{"order_id": 3, "region": "eu", "amount": -15}')[0]
            == 200
        )
        wait_until(lambda: len(receiver.requests) == 2, timeout_s=180)
    finally:
        stop.set()
        running.join(60)
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        alerts = log.read(TOPIC).to_pylist()
    assert [(each["state"], json.loads(each["content"])["group"]) for each in alerts] == [
        ("firing", {"region": "eu"}),
        ("resolved", {"region": "eu"}),
    ]
    assert [request["Idempotency-Key"] for request in receiver.requests] == [
        each["id"] for each in alerts
    ]
