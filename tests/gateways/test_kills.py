"""Gateways killed under load: everything that was acknowledged is in the topic, once, for senders
that name what they send.
"""

import signal
import threading
import time
from pathlib import Path

import pytest

import headrace as hr
from tests.gateways.conftest import order_ids
from tests.gateways.processes import killed, out, started
from tests.gateways.senders import LINES, post
from tests.servers.database_server import free_port
from tests.servers.rabbitmq_server import RabbitmqServer
from tests.waits import wait_until

pytestmark = pytest.mark.process


class Sender(threading.Thread):
    """Sends requests of five rows under a key each, and repeats one until it is acknowledged."""

    def __init__(self, address: str, first: int, requests: int) -> None:
        super().__init__(daemon=True)
        self.address, self.first, self.requests = address, first, requests
        self.acknowledged: list[int] = []

    def run(self) -> None:
        for request in range(self.requests):
            numbers = [self.first + 5 * request + i for i in range(5)]
            body = "\n".join(f'{{"order_id": {number}}}' for number in numbers).encode()
            while not self._is_taken(body, f"{self.first}-{request}"):
                time.sleep(0.02)
            self.acknowledged += numbers

    def _is_taken(self, body: bytes, key: str) -> bool:
        try:
            return (
                post(self.address, "/topics/orders", body, {**LINES, "Idempotency-Key": key})[0]
                == 200
            )
        except (OSError, ValueError):
            return False
        except Exception as error:  # an answer that was cut off has many forms
            return not str(type(error).__module__).startswith("http")


def http_is_killed(log: hr.Log, *, kills: int, requests: int, pause_s: float) -> None:
    port = free_port()
    process = started("http", "--topic", "orders", "--port", port, log=log)
    senders = [Sender(f"http://127.0.0.1:{port}", 1_000_000 * i, requests) for i in range(4)]
    for sender in senders:
        sender.start()
    for _ in range(kills):
        time.sleep(pause_s)
        killed(process)
        process = started("http", "--topic", "orders", "--port", port, log=log)
    for sender in senders:
        sender.join(120)
        assert len(sender.acknowledged) == 5 * requests
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert "ended cleanly" in out(process).read()
    out(process).close()
    assert order_ids(log) == sorted(number for sender in senders for number in sender.acknowledged)


def test_http_killed_under_load(log: hr.Log) -> None:
    http_is_killed(log, kills=2, requests=100, pause_s=0.4)


@pytest.mark.slow
def test_http_killed_again_and_again(log: hr.Log) -> None:
    http_is_killed(log, kills=15, requests=1500, pause_s=1.5)


def test_amqp_killed_under_load(rabbitmq: RabbitmqServer, log: hr.Log, tmp_path: Path) -> None:
    """What was not acknowledged there is delivered again; what is in the topic already is known by
    its id.
    """
    pika = pytest.importorskip("pika")
    messages = 3_000
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
        channel = connection.channel()
        channel.queue_declare("killed", durable=True)
        for number in range(messages):
            channel.basic_publish(
                "",
                "killed",
                f'{{"order_id": {number}}}'.encode(),
                pika.BasicProperties(message_id=f"m{number}", delivery_mode=2),
            )
    (tmp_path / "url").write_text(rabbitmq.url)
    arguments = (
        "amqp",
        "--topic",
        "orders",
        "--url",
        f"file:{tmp_path / 'url'}",
        "--queue",
        "killed",
        "--prefetch",
        50,
    )
    for _ in range(3):
        process = started(*arguments, log=log)
        time.sleep(0.25)
        killed(process)
    process = started(*arguments, log=log)
    wait_until(lambda: len(order_ids(log)) >= messages, timeout_s=60)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    out(process).close()
    assert order_ids(log) == list(range(messages))
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
        assert connection.channel().queue_declare("killed", passive=True).method.message_count == 0


def test_a_second_gateway_of_the_same_name_takes_over(log: hr.Log) -> None:
    with hr.gateways.http("orders", port=0, name="door").open(log) as first:
        assert post(first.address, "/topics/orders", b'{"order_id": 1}', LINES)[0] == 200
        with hr.gateways.http("orders", port=0, name="door").open(log) as second:
            assert post(second.address, "/topics/orders", b'{"order_id": 2}', LINES)[0] == 200
            assert post(first.address, "/topics/orders", b'{"order_id": 3}', LINES)[0] == 503
            assert first.inbox.ended.wait(10)
            with pytest.raises(hr.errors.FencedError):
                first.check()
    assert order_ids(log) == [1, 2]
