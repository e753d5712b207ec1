"""Gateways declared in a pipeline: a row that is posted is in the view that its sender asks for
next, and a metric that is sent is in a view soon.
"""

import json
import queue
import socket
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import ConfigurationError, DuplicateStep, PlanError
from headrace.testing.plain_spark import PlainSpark
from tests.gateways.senders import post

METRICS = "metric STRING, kind STRING, tags STRING, value DOUBLE, received_at TIMESTAMP"


def declared(log: str) -> hr.Pipeline:
    shop = hr.Pipeline("shop", log=log)
    orders = shop.topic(
        "orders", schema="order_id BIGINT, region STRING, amount BIGINT, received_at TIMESTAMP"
    )
    metrics = shop.topic("metrics", schema=METRICS)
    shop.view("revenue", orders.group_by("region").aggregate(revenue=hr.agg.sum("amount")))
    shop.view("totals", metrics.group_by("metric").aggregate(total=hr.agg.sum("value")))
    shop.gateway(hr.gateways.http("orders", port=0))
    shop.gateway(hr.gateways.statsd("metrics", port=0, flush="100 ms"))
    return shop


@contextmanager
def running(shop: hr.Pipeline, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Where everything listens."""
    stop, addresses = threading.Event(), queue.Queue[tuple[str, str]]()
    options: dict[str, Any] = {
        "state": tmp_path / "state",
        "stop": stop,
        "serve": True,
        "port": 0,
        "on_serving": lambda server: addresses.put(("serve", server.address)),
        "on_gateway": lambda gateway, address: addresses.put((gateway.kind, address)),
    }
    thread = threading.Thread(target=shop.run, kwargs=options)
    thread.start()
    try:
        yield dict(addresses.get(timeout=30) for _ in range(3))
    finally:
        stop.set()
        thread.join(60)


def asked(place: str, **parameters: str) -> Any:
    with urllib.request.urlopen(
        f"{place}?{urllib.parse.urlencode(parameters)}", timeout=30
    ) as answer:
        return json.loads(answer.read())


def test_senders_see_what_they_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.runtime.run._start_spark", lambda _options: PlainSpark())
    with running(declared(f"file:{tmp_path / 'log'}"), tmp_path) as addresses:
        for expected in (5, 10):
            _, answer = post(
                addresses["http"], "/topics/orders", b'{"order_id": 1, "region": "eu", "amount": 5}'
            )
            shown = asked(
                f"{addresses['serve']}/views/revenue", key="eu", at_least=answer["position"]
            )
            assert shown["row"]["revenue"] == expected
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(
                b"hits:3|c\nhits:4|c", ("127.0.0.1", int(addresses["statsd"].rpartition(":")[2]))
            )
        deadline = time.monotonic() + 20
        while (rows := asked(f"{addresses['serve']}/views/totals")["rows"]) != [
            {"metric": "hits", "total": 7.0}
        ]:
            assert time.monotonic() < deadline, rows
            time.sleep(0.05)


def test_a_gateway_that_cannot_listen_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.runtime.run._start_spark", lambda _options: PlainSpark())
    shop = hr.Pipeline("shop", log=f"file:{tmp_path / 'log'}")
    orders = shop.topic("orders", schema="order_id BIGINT")
    shop.view("seen", orders.to_table("order_id"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        shop.gateway(hr.gateways.http("orders", port=taken.getsockname()[1]))
        with pytest.raises(ConfigurationError, match="Cannot listen"):
            shop.run(state=tmp_path / "state")


def test_invalid_declarations_are_refused() -> None:
    shop = hr.Pipeline("shop")
    shop.topic("orders", schema="order_id BIGINT")
    with pytest.raises(PlanError, match="not an input topic"):
        shop.gateway(hr.gateways.http("ordres"))
    shop.gateway(hr.gateways.http("orders", name="door"))
    with pytest.raises(DuplicateStep, match="Two gateways have the name 'door'"):
        shop.gateway(hr.gateways.http("orders", name="door", port=1))
