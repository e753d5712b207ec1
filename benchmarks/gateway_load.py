"""Those who send to gateways in `bench_gateways`, each a process of its own: `python -m
benchmarks.gateway_load http PORT CONNECTIONS SECONDS` and `… statsd PORT PACKETS_A_SECOND SECONDS`.

Bare sockets, so that little is measured but the receiver. One figure is printed: rows a second that
were acknowledged, or packets that were sent.
"""

from __future__ import annotations

import random
import selectors
import socket
import subprocess
import sys
import time

from benchmarks.log_rows import batches
from headrace.types.json_codec import encode_rows

ROWS_A_REQUEST = 100
_BURST = 20


def bodies(count: int = 200) -> list[bytes]:
    return [
        b"\n".join(encode_rows(batch)) for batch in batches(count * ROWS_A_REQUEST, ROWS_A_REQUEST)
    ]


def post(port: int, connections: int, seconds: float) -> float:
    """Each connection sends its next request when the last one was answered."""
    head = (
        b"POST /topics/rows HTTP/1.1\r\nHost: localhost\r\nContent-Type:"
        b" application/x-ndjson\r\nContent-Length: %d\r\n\r\n"
    )
    requests = [head % len(body) + body for body in bodies()]
    waiting = selectors.DefaultSelector()
    for number in range(connections):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(requests[number])
        waiting.register(connection, selectors.EVENT_READ)
    answered, started = 0, time.perf_counter()
    while (now := time.perf_counter()) - started < seconds:
        for key, _ in waiting.select(1):
            connection = key.fileobj  # type: ignore[assignment]
            answer = connection.recv(65536)
            if not answer.endswith(b"}"):
                assert b" 200 " in answer, answer
                continue
            answered += 1
            connection.sendall(requests[answered % len(requests)])
    return answered * ROWS_A_REQUEST / (now - started)


def metrics(port: int, rate: float, seconds: float) -> int:
    """Packets at a pace; as fast as it can, if it falls behind."""
    rng = random.Random(1)
    kinds = [b"c", b"ms", b"ms", b"g"]
    packets = [
        b"api.%d.%d:%d|%s"
        % (rng.randrange(4), rng.randrange(50), rng.randrange(1000), rng.choice(kinds))
        for _ in range(10_000)
    ]
    sent, started = 0, time.perf_counter()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect(("127.0.0.1", port))
        while (now := time.perf_counter() - started) < seconds:
            if sent > rate * now:
                time.sleep(0.0005)
                continue
            at = sent % (len(packets) - _BURST)
            for packet in packets[at : at + _BURST]:
                sender.send(packet)
            sent += _BURST
    return sent


def in_a_process(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gateway_load", *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
    )


def figure(process: subprocess.Popen[str]) -> float:
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return float(printed)


if __name__ == "__main__":
    kind, port, first, seconds = sys.argv[1:]
    print(
        post(int(port), int(first), float(seconds))
        if kind == "http"
        else metrics(int(port), float(first), float(seconds))
    )
