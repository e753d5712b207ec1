"""The HTTP gateway behind a reverse proxy, and in front of load balancers."""

import http.client
import json
import signal
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import ConfigurationError, InputError
from headrace.http.proxies import PublicUrl, TrustedProxies
from tests.gateways.conftest import Open, order_ids
from tests.gateways.half_open import POST, connect
from tests.gateways.processes import out, started
from tests.gateways.senders import JSON, post
from tests.servers.database_server import free_port
from tests.waits import wait_until

TOKEN = "a-token-of-some-length"


def get(address: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)
    try:
        connection.request("GET", path, headers=headers or {})
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text.startswith(b"{") else text
    finally:
        connection.close()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    return path


def test_only_health_needs_no_token(opened: Open, token_file: Path) -> None:
    """The paths of the dashboard's page, which this server does not have, passed without one."""
    running = opened(hr.gateways.http("orders", port=0, token_file=token_file))
    for path in ("/health", "/health/live", "/health/ready"):
        assert get(running.address, path) == (200, {"status": "ok"})
    for path in ("/", "/board.js", "/drawing.js", "/board.css", "/icon.svg", "/metrics"):
        assert get(running.address, path)[0] == 401, path
    authorization = {"Authorization": f"Bearer {TOKEN}"}
    assert get(running.address, "/metrics", authorization)[0] == 200
    assert get(running.address, "/", authorization)[0] == 404


def test_a_public_url_is_the_gateways_own(
    log: hr.Log, opened: Open, token_file: Path, tmp_path: Path
) -> None:
    url = "https://in.example.com/ingest"
    with pytest.raises(ConfigurationError, match="append to orders"):
        hr.gateways.http("orders", port=0, public_url=url).open(log)
    gateway = hr.gateways.http("orders", port=0, public_url=url, token_file=token_file)
    address = opened(gateway).address
    headers = {**JSON, "Authorization": f"Bearer {TOKEN}", "Host": "in.example.com"}
    browser = {**headers, "Origin": "https://in.example.com"}
    for number, path in enumerate(("/ingest/topics/orders", "/topics/orders")):
        assert post(address, path, b'{"order_id": %d}' % number, browser)[0] == 200
    for wrong in ({"Host": "elsewhere.example"}, {"Origin": "https://elsewhere.example"}):
        assert post(address, "/topics/orders", b"{}", {**headers, **wrong})[0] == 403
    assert get(address, "/ingest/health/ready", {"Host": "in.example.com"})[0] == 200
    assert order_ids(log) == [0, 1]


def test_forwarded_addresses_count_only_if_they_come_from_a_trusted_proxy(opened: Open) -> None:
    """Each client behind a proxy has limits of its own; who is no proxy cannot be another one."""
    settings: dict[str, Any] = {"port": 0, "client_connections": 3}
    head = POST + b"X-Forwarded-For: 203.0.113.%d\r\n"
    direct = opened(hr.gateways.http("orders", name="direct", **settings))
    through = opened(hr.gateways.http("orders", name="through", proxies="127.0.0.0/8", **settings))
    for running, expected in ((direct, 3), (through, 8)):
        port = int(running.address.rpartition(":")[2])
        held = [connect(port, head % i + b"Content-Length: 9\r\n\r\n") for i in range(8)]
        assert post(running.address, "/topics/orders", b'{"order_id": 1}')[0] == 200
        open_now = running.status().details["connections"]
        assert expected - 1 <= open_now <= expected + 1, running.gateway.name
        for connection in held:
            connection.close()


TRUSTED = TrustedProxies.parse(["10.0.0.0/24", "2001:db8::1"])


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("10.0.0.2", "203.0.113.9", "203.0.113.9"),
        ("10.0.0.2", "203.0.113.9, 10.0.0.7", "203.0.113.9"),
        ("10.0.0.2", "1.2.3.4, 203.0.113.9", "203.0.113.9"),
        ("8.8.8.8", "203.0.113.9", "8.8.8.8"),
        ("10.0.0.2", "", "10.0.0.2"),
        ("10.0.0.2", "nonsense", "10.0.0.2"),
        ("10.0.0.2", "203.0.113.9, nonsense", "10.0.0.2"),
        ("10.0.0.2", "10.0.0.3, 10.0.0.4", "10.0.0.3"),
        ("::ffff:10.0.0.2", "203.0.113.9", "203.0.113.9"),
        ("2001:db8::1", "[2001:db8::7]", "2001:db8::7"),
    ],
)
def test_forwarded_addresses_are_read_from_the_right(
    peer: str, forwarded: str, client: str
) -> None:
    assert TRUSTED.client_address(peer, {"x-forwarded-for": forwarded}) == client


@pytest.mark.parametrize("text", ["10.0.0.300", "proxy.local", "10.0.0.1/24"])
def test_a_proxy_is_named_by_its_address(text: str) -> None:
    with pytest.raises(InputError, match="address or a network"):
        hr.gateways.http("orders", proxies=text)


@pytest.mark.parametrize("text", ["in.example.com", "ftp://a/", "https://u@a/", "https://a/?b"])
def test_a_public_url_is_one_of_http(text: str) -> None:
    with pytest.raises(InputError, match="public URL"):
        PublicUrl.parse(text)


@pytest.mark.process
def test_a_gateway_that_drains_says_so_and_takes_what_comes(log: hr.Log) -> None:
    """A load balancer has time to notice: readiness ends with the signal, requests do not."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    process = started("http", "--topic", "orders", "--port", port, "--drain", "1 second", log=log)
    assert get(address, "/health/ready")[0] == 200
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: get(address, "/health/ready")[0] == 503)
    assert get(address, "/health/ready")[1] == {"status": "draining"}
    assert get(address, "/health/live")[0] == 200
    assert post(address, "/topics/orders", b'{"order_id": 1}')[0] == 200
    assert process.wait(30) == 0
    assert "ended cleanly" in out(process).read()
    out(process).close()
    assert order_ids(log) == [1]
