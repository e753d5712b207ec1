"""Gateways that append to Kafka: acknowledged is there, repeats are left out also by the next
gateway, and what they drop is what a watch hears of.
"""

import json
import queue
import socket
import threading
import uuid
from collections.abc import Iterator

import pytest

import headrace as hr
from headrace.alerts.alert import TOPIC
from headrace.alerts.watch import Measurements, RuleEvent, Watcher, parse_rule
from headrace.gateways.base import now_us
from tests.gateways.conftest import order_ids
from tests.gateways.senders import LINES, post
from tests.servers.kafka_broker import KafkaBroker
from tests.waits import wait_until

pytestmark = pytest.mark.kafka


@pytest.fixture
def log(kafka_broker: KafkaBroker) -> Iterator[hr.Log]:
    with hr.open_log(kafka_broker.address) as opened:
        yield opened


def fresh(stem: str) -> str:
    return f"{stem}-{uuid.uuid4().hex[:8]}"


def test_posted_rows_are_there_once(log: hr.Log) -> None:
    topic, name = (
        log.create_topic(
            fresh("orders"), "order_id BIGINT, received_at TIMESTAMP", partitions=2
        ).name,
        fresh("door"),
    )
    body = "\n".join(json.dumps({"order_id": number}) for number in range(50)).encode()
    for expected in ("position", "repeated"):
        with hr.gateways.http(topic, port=0, name=name).open(log) as running:
            code, answer = post(
                running.address, f"/topics/{topic}", body, {**LINES, "Idempotency-Key": "one"}
            )
            assert (code, expected in answer) == (200, True), answer
    assert order_ids(log, topic) == list(range(50))


def test_two_gateways_at_once_store_each_request_once(
    log: hr.Log, kafka_broker: KafkaBroker
) -> None:
    topic = log.create_topic(fresh("orders"), "order_id BIGINT", partitions=2).name
    answers: list[list[bool]] = [[], []]

    def send(address: str, found: list[bool], together: threading.Barrier) -> None:
        for number in range(10):
            together.wait(60)
            body, headers = b'{"order_id": %d}' % number, {**LINES, "Idempotency-Key": f"k{number}"}
            code, answer = post(address, f"/topics/{topic}", body, headers)
            assert code == 200, answer
            found.append("repeated" in answer)

    with (
        hr.open_log(kafka_broker.address) as other_log,
        hr.gateways.http(topic, port=0, name=fresh("one")).open(log) as one,
        hr.gateways.http(topic, port=0, name=fresh("other")).open(other_log) as other,
    ):
        together = threading.Barrier(2)
        senders = [
            threading.Thread(target=send, args=(each.address, found, together))
            for each, found in zip((one, other), answers, strict=True)
        ]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join(120)
    assert [sorted(pair) for pair in zip(*answers, strict=True)] == [[False, True]] * 10
    assert order_ids(log, topic) == list(range(10))
    with hr.gateways.http(topic, port=0, name=fresh("third")).open(log) as third:
        conflict = {**LINES, "Idempotency-Key": "k3"}
        assert post(third.address, f"/topics/{topic}", b'{"order_id": 4}', conflict)[0] == 409


def test_a_watch_sees_the_rows_that_a_gateway_refuses(log: hr.Log) -> None:
    name, stop, addresses = fresh("metrics"), threading.Event(), queue.Queue[str]()
    gateway = hr.gateways.statsd(fresh("values"), port=0, flush=None, name=name)
    running = threading.Thread(
        target=gateway.run, kwargs={"log": log.address, "stop": stop, "on_ready": addresses.put}
    )
    watcher = Watcher.open(
        log,
        Measurements(log, []),
        [parse_rule(f"refused rows > 2 of {name} for 0 seconds")],
        name=fresh("watch"),
    )
    assert watcher.check(now_us()) == []
    running.start()
    port = int(addresses.get(timeout=30).rpartition(":")[2])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"a:1|c\nbad\nbad\nbad", ("127.0.0.1", port))
    found: list[RuleEvent] = []

    def is_heard() -> bool:
        found.extend(watcher.check(now_us()))
        return bool(found)

    wait_until(is_heard, timeout_s=30)
    stop.set()
    running.join(30)
    assert [event.text for event in found] == [
        f"FIRING: refused rows > 2 of {name} for 0 seconds: gateway/{name} has 3 a minute"
    ]
    (message,) = [row for row in log.read(TOPIC).to_pylist() if row["alert"] == watcher.name]
    assert message["state"] == "firing"
