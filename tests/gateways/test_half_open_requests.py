"""Senders that never finish a request, at real sockets: they reserve nothing, they are bounded in
time, number and bytes, and honest senders do not notice them.
"""

import contextlib
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

import headrace as hr
from headrace.gateways.base import GatewayServer
from tests.gateways.conftest import Open, adds_up, order_ids
from tests.gateways.half_open import BEGINNINGS, POST, connect
from tests.gateways.paced_log import PacedLog
from tests.gateways.senders import post
from tests.waits import wait_until


def port_of(running: GatewayServer) -> int:
    return int(running.address.rpartition(":")[2])


def answer(connection: socket.socket) -> bytes:
    """What a server says until it closes the connection."""
    connection.settimeout(30)
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            parts.append(part)
    connection.close()
    return b"".join(parts)


def fastest_post(address: str, first: int, attempts: int = 5) -> float:
    """Seconds until 200, by the fastest of some attempts: the machine may be busy for one."""
    seconds = []
    for number in range(first, first + attempts):
        began_s = time.monotonic()
        assert post(address, "/topics/orders", b'{"order_id": %d}' % number)[0] == 200
        seconds.append(time.monotonic() - began_s)
    return min(seconds)


def guard(running: GatewayServer) -> Any:
    server: Any = running
    return server._server.guard


def test_eight_connections_that_announce_bodies_and_send_none_do_not_stop_the_gateway(
    opened: Open,
) -> None:
    """Each reserved its Content-Length in the inbox, for as long as it liked."""
    running = opened(hr.gateways.http("orders", port=0, patience="5 seconds"))
    idle = [connect(port_of(running), POST + b"Content-Length: 8388608\r\n\r\n") for _ in range(20)]
    assert post(running.address, "/topics/orders", b'{"order_id": 1}')[0] == 200
    assert running.status().waiting_bytes == 0
    for connection in idle:
        connection.close()
    wait_until(lambda: guard(running).open_connections == 0)
    assert guard(running).held_bytes == 0
    assert adds_up(running)


def test_five_hundred_half_open_requests_do_not_keep_an_honest_sender_waiting(
    log: hr.Log, opened: Open
) -> None:
    running = opened(hr.gateways.http("orders", port=0))
    kinds = list(BEGINNINGS.values())
    half_open = [connect(port_of(running), kinds[i % len(kinds)]) for i in range(500)]
    assert fastest_post(running.address, 1) < 1
    assert order_ids(log) == [1, 2, 3, 4, 5]
    for connection in half_open:
        connection.close()
    wait_until(lambda: guard(running).open_connections == 0)
    assert guard(running).held_bytes == 0
    assert guard(running)._clients == {}
    assert adds_up(running)


@contextlib.contextmanager
def gateway_process(log: hr.Log, *arguments: str, files: int = 0) -> Iterator[str]:
    """The command, perhaps with few open files; the address at which it listens."""
    command = [sys.executable, "-m", "headrace.cli", "gateway", "http", "--topic", "orders"]

    def limit() -> None:
        if files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files // 2, files))

    process = subprocess.Popen(
        [*command, "--port", "0", *arguments, "--log", log.address],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=limit,  # noqa: PLW1509 - nothing else runs in this process while it forks
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        yield next(word for word in line.split() if word.startswith("http://")).rstrip(".")
    finally:
        process.terminate()
        assert process.wait(60) == 0
        process.stdout.close()


@contextlib.contextmanager
def half_open(address: str, count: int) -> Iterator[None]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.gateways.half_open",
            address.rpartition(":")[2],
            str(count),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "open\n"
        yield
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("client_connections", [1_000, 20_000])
def test_ten_thousand_half_open_requests_that_come_again_do_not_keep_an_honest_sender_waiting(
    log: hr.Log, client_connections: int
) -> None:
    options = ("--client-connections", str(client_connections))
    with gateway_process(log, *options) as address, half_open(address, 10_000):
        assert fastest_post(address, 1, attempts=20) < 1
    assert order_ids(log) == list(range(1, 21))


@pytest.mark.process
def test_a_gateway_without_more_open_files_closes_idle_connections_and_not_itself(
    log: hr.Log,
) -> None:
    """The soft limit is raised to the hard one; then the oldest idle connections go first."""
    with gateway_process(log, files=400) as address, half_open(address, 600):
        assert fastest_post(address, 1) < 30
    assert order_ids(log) == [1, 2, 3, 4, 5]


def test_the_oldest_idle_connection_goes_first_and_none_that_waits_for_its_response(
    log: hr.Log,
) -> None:
    slow: Any = PacedLog(log, rows_a_second=0.001)
    with hr.gateways.http("orders", port=0, connections=10).open(slow) as running:
        waiting = connect(port_of(running), POST + b'Content-Length: 15\r\n\r\n{"order_id": 7}')
        wait_until(lambda: order_ids(log) == [7])
        idle = [connect(port_of(running), b"") for _ in range(30)]
        wait_until(lambda: guard(running).closed >= 21)
        assert guard(running).open_connections == 10
        assert [answer(connection) for connection in idle[:21]] == [b""] * 21
        slow.hurry()
        waiting.settimeout(30)
        assert waiting.recv(65536).startswith(b"HTTP/1.1 200")
        waiting.close()
        for connection in idle[21:]:
            connection.close()


def test_one_address_has_its_own_limit_of_connections(opened: Open) -> None:
    running = opened(hr.gateways.http("orders", port=0, client_connections=5))
    idle = [connect(port_of(running), b"") for _ in range(20)]
    wait_until(lambda: guard(running).closed >= 15)
    assert guard(running).open_connections == 5
    assert post(running.address, "/topics/orders", b'{"order_id": 1}')[0] == 200
    for connection in idle:
        connection.close()


# Slow senders


@pytest.mark.parametrize("kind", ["nothing", "half a head", "no body", "half a body", "a chunk"])
def test_an_unfinished_request_loses_its_connection(opened: Open, kind: str) -> None:
    running = opened(
        hr.gateways.http("orders", port=0, head_timeout="300 ms", body_timeout="300 ms")
    )
    said = answer(connect(port_of(running), BEGINNINGS[kind][:400]))
    assert said.startswith(b"HTTP/1.1 408") if kind != "nothing" else said == b""
    assert guard(running).held_bytes == 0
    assert running.status().waiting_bytes == 0


@pytest.mark.parametrize(
    ("beginning", "drip", "limit"),
    [
        (b"POST /topics/orders HTTP/1.1\r\n", b"X-A: b\r\n", "head_timeout"),
        (POST + b"Content-Length: 100000\r\n\r\n[", b" ", "body_timeout"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n", "body_timeout"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1;", b"name=value;", "body_timeout"),
    ],
)
def test_a_drip_fed_request_loses_its_connection(
    opened: Open, beginning: bytes, drip: bytes, limit: str
) -> None:
    limits: dict[str, Any] = {limit: "500 ms"}
    running = opened(hr.gateways.http("orders", port=0, **limits))
    connection = connect(port_of(running), beginning)
    began_s = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < began_s + 30 and not guard(running).closed:
            connection.sendall(drip)
            time.sleep(0.02)
    assert guard(running).closed == 1
    assert b" 408 " in answer(connection)
    wait_until(lambda: guard(running).open_connections == 0)


def test_a_slow_sender_with_a_fair_rate_is_not_cut_off(log: hr.Log, opened: Open) -> None:
    running = opened(hr.gateways.http("orders", port=0, body_timeout="500 ms"))
    connection = connect(port_of(running), POST + b"Content-Length: 12015\r\n\r\n")
    for _ in range(12):
        connection.sendall(b" " * 1000)
        time.sleep(0.1)
    connection.sendall(b'{"order_id": 1}')
    connection.settimeout(30)
    assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    connection.close()
    assert order_ids(log) == [1]


# Bodies and heads without an end


ENDLESS = {
    "headers": (b"POST /topics/orders HTTP/1.1\r\n", b"X-A: " + b"b" * 1000 + b"\r\n", b" 431 "),
    "a header": (b"POST /topics/orders HTTP/1.1\r\nX-A: ", b"b" * 1000, b" 431 "),
    "an address": (b"POST /topics/", b"o" * 1000, b" 431 "),
    "chunks": (
        POST + b"Transfer-Encoding: chunked\r\n\r\n",
        b"3e8\r\n" + b" " * 1000 + b"\r\n",
        b" 413 ",
    ),
    "a chunk's extension": (
        POST + b"Transfer-Encoding: chunked\r\n\r\n1;",
        b"name=value;" * 100,
        b" 413 ",
    ),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_request_without_an_end_is_refused(opened: Open, kind: str) -> None:
    running = opened(hr.gateways.http("orders", port=0, body_bytes=100_000))
    beginning, more, status = ENDLESS[kind]
    connection = connect(port_of(running), beginning)
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 20 << 20:
            connection.sendall(more)
            sent += len(more)
    assert sent < 20 << 20
    said = answer(connection)
    assert status in said or not said  # it was reset before the answer was read
    wait_until(lambda: guard(running).open_connections == 0)
    assert (guard(running).held_bytes, running.status().waiting_bytes) == (0, 0)


def test_a_length_that_is_a_lie_is_believed_and_harms_nobody(log: hr.Log, opened: Open) -> None:
    running = opened(hr.gateways.http("orders", port=0, body_timeout="300 ms"))
    port = port_of(running)
    too_long = connect(port, POST + b'Content-Length: 40\r\n\r\n{"order_id": 1}')
    too_short = connect(port, POST + b'Content-Length: 15\r\n\r\n{"order_id": 2}{"order_id": 3}')
    huge = connect(port, POST + b"Content-Length: 99999999999999999999\r\n\r\n")
    negative = connect(port, POST + b"Content-Length: -1\r\n\r\n")
    both = connect(
        port, POST + b'Content-Length: 15\r\nTransfer-Encoding: chunked\r\n\r\n{"order_id": 4}'
    )
    assert answer(too_long).startswith(b"HTTP/1.1 408")
    answer(too_short)
    assert answer(huge)[:12] in {b"HTTP/1.1 400", b"HTTP/1.1 413"}
    assert answer(negative).startswith(b"HTTP/1.1 400")
    assert answer(both).startswith(b"HTTP/1.1 400")
    assert set(order_ids(log)) <= {2}
    assert post(running.address, "/topics/orders", b'{"order_id": 5}')[0] == 200


def test_unfinished_bodies_of_one_sender_leave_room_for_others(opened: Open) -> None:
    running = opened(hr.gateways.http("orders", port=0, body_bytes=1000, max_bytes=1000))
    beginning = POST + b"Content-Length: 1000\r\n\r\n" + b" " * 900
    unfinished = [connect(port_of(running), beginning) for _ in range(40)]
    assert post(running.address, "/topics/orders", b" " * 900 + b'{"order_id": 1}')[0] == 200
    assert 0 < guard(running).held_bytes <= 2000  # half of 4,000 is for one address
    for connection in unfinished:
        connection.close()
    wait_until(lambda: guard(running).held_bytes == 0)
    assert adds_up(running)


def test_many_requests_in_one_packet_are_answered_in_order_or_refused(
    log: hr.Log, opened: Open
) -> None:
    running = opened(hr.gateways.http("orders", port=0))
    requests = [
        POST + b'Content-Length: 15\r\n\r\n{"order_id": %d}' % number for number in range(1, 6)
    ]
    connection = connect(port_of(running), b"".join(requests))
    wait_until(lambda: order_ids(log) == [1, 2, 3, 4, 5])
    connection.close()
    flood = connect(port_of(running), requests[0] * 2_000)
    assert answer(flood).count(b" 200 ") <= 20
    assert post(running.address, "/topics/orders", b'{"order_id": 6}')[0] == 200


def test_who_is_nobody_is_refused_before_the_body(
    log: hr.Log, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body was read, and had room, before its signature was looked for."""
    monkeypatch.setenv("HOOK", "secret")
    monkeypatch.setenv("HEADRACE_TOKEN", "a-token-of-some-length")
    hooks = [
        hr.gateways.hook("pushes", signature="github", secret="env:HOOK"),
        hr.gateways.hook("payments", signature="stripe", secret="env:HOOK"),
        hr.gateways.hook("events", signature="standard", secret="env:HOOK"),
    ]
    running = opened(hr.gateways.http("orders", port=0, hooks=hooks))
    for topic in ("orders", "pushes", "payments", "events"):
        head = POST.replace(b"orders", topic.encode()) + b"Content-Length: 1000\r\n\r\n"
        connection = connect(port_of(running), head)
        connection.settimeout(30)
        assert connection.recv(65536).startswith(b"HTTP/1.1 401")
        connection.close()
    old = b"Stripe-Signature: t=1000,v1=" + b"0" * 64 + b"\r\nContent-Length: 1000\r\n\r\n"
    connection = connect(port_of(running), POST.replace(b"orders", b"payments") + old)
    assert b" 401 " in connection.recv(65536)
    connection.close()
