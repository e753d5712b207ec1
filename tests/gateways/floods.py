"""Processes that send rows to a gateway at a pace of their own, whatever becomes of them, and say
what they have sent: `flood("http", address, rows_a_second, seconds)`.

A sender that is held up (HTTP that answers later, a PUSH socket that is full) sends less; one that
is not keeps its pace.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field

from tests.gateways.senders import in_another_process, printed

ROWS_A_REQUEST, CONNECTIONS = 100, 20

_PACE = """
import json, sys, threading, time
address, rate, seconds = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
def paced(rate, send):
    started, sent = time.monotonic(), 0
    while (now := time.monotonic() - started) < seconds:
        if sent >= rate * now:
            time.sleep(0.002)
            continue
        send(sent)
        sent += 1
    return sent
"""
_HTTP = """
import http.client
body = "\\n".join(json.dumps({"order_id": i, "region": "r" * 200}) for i in range(ROWS)).encode()
answers, lock = {}, threading.Lock()
def flood():
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=400)
    def send(_number):
        connection.request("POST", "/topics/orders", body, {"Content-Type": "application/x-ndjson"})
        answer = connection.getresponse()
        answer.read()
        with lock:
            answers[answer.status] = answers.get(answer.status, 0) + ROWS
    paced(rate / ROWS / CONNECTIONS, send)
threads = [threading.Thread(target=flood) for _ in range(CONNECTIONS)]
print("sending", flush=True)
for each in threads: each.start()
for each in threads: each.join()
print(json.dumps([sum(answers.values()), answers]))
""".replace("ROWS", str(ROWS_A_REQUEST)).replace("CONNECTIONS", str(CONNECTIONS))
_STATSD = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    sender.connect(("127.0.0.1", int(address.rpartition(":")[2])))
    print("sending", flush=True)
    print(json.dumps([paced(rate, lambda i: sender.send(b"flood.%d:%d|c" % (i % 50, i % 7))), {}]))
"""
_ZEROMQ = """
import zmq
with zmq.Context() as context, context.socket(zmq.PUSH) as push:
    push.set(zmq.SNDHWM, 100)
    push.connect(address)
    print("sending", flush=True)
    sent = paced(rate, lambda i: push.send(b'{"order_id": %d, "region": "%s"}' % (i, b"r" * 200)))
    push.close(-1)
print(json.dumps([sent, {}]))
"""
_AMQP = """
import pika
url, queue = address.split(" ")
with pika.BlockingConnection(pika.URLParameters(url)) as connection:
    channel = connection.channel()
    print("sending", flush=True)
    named = lambda i: pika.BasicProperties(message_id=f"{queue}-{i}", delivery_mode=1)
    body = lambda i: b'{"order_id": %d}' % i
    sent = paced(rate, lambda i: channel.basic_publish("", queue, body(i), named(i)))
print(json.dumps([sent, {}]))
"""
_KINDS = {"http": _HTTP, "statsd": _STATSD, "zeromq": _ZEROMQ, "amqp": _AMQP}


@dataclass
class Flood:
    """One sender's process, and what it says at its end."""

    process: subprocess.Popen[str]
    seconds: float
    sent: int = 0
    answers: dict[str, int] = field(default_factory=dict)
    """Rows by the status of the answer, of HTTP."""

    @property
    def is_on(self) -> bool:
        return self.process.poll() is None

    def start(self) -> None:
        """Wait until it sends: a busy machine takes a while to start a process."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "sending\n"

    def stop(self) -> None:
        self.sent, self.answers = json.loads(
            printed(self.process, timeout_s=self.seconds + 400).splitlines()[-1]
        )


def flood(kind: str, address: str, rows_a_second: float, seconds: float) -> Flood:
    return Flood(in_another_process(_PACE + _KINDS[kind], address, rows_a_second, seconds), seconds)
