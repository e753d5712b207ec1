"""The suite that every gateway passes, for two of the package and for the example of one from
outside.
"""

import contextlib
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from plugins.headrace_datagrams import headrace_datagrams

import headrace as hr
from headrace.errors import ConfigurationError
from headrace.gateways import Gateway
from headrace.gateways.base import GatewayServer
from headrace.testing.gateway_contract import GatewayContract
from tests.gateways.senders import LINES, post


class TestHttp(GatewayContract):
    answers_senders = True

    @pytest.fixture
    def gateway(self) -> Gateway:
        return hr.gateways.http("rows", port=0, name="contract")

    def send(self, server: GatewayServer, payload: bytes) -> None:
        with contextlib.suppress(OSError):
            post(server.address, "/topics/rows", payload, LINES)


class TestZeromq(GatewayContract):
    @pytest.fixture
    def gateway(self) -> Iterator[Gateway]:
        zmq = pytest.importorskip("zmq")
        self.context = zmq.Context()
        self.sockets: dict[str, object] = {}
        yield hr.gateways.zeromq("rows", bind="tcp://127.0.0.1:*", name="contract")
        self.context.destroy(0)

    def send(self, server: GatewayServer, payload: bytes) -> None:
        if server.address not in self.sockets:
            self.sockets[server.address] = self.context.socket(8)  # PUSH
            self.sockets[server.address].connect(server.address)  # type: ignore[attr-defined]
        self.sockets[server.address].send(payload)  # type: ignore[attr-defined]


class TestDatagrams(GatewayContract):
    @pytest.fixture
    def gateway(self) -> Gateway:
        return headrace_datagrams.gateway("datagrams://127.0.0.1", topics=("rows",))

    def send(self, server: GatewayServer, payload: bytes) -> None:
        parts = urlsplit(server.address)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(payload, (parts.hostname, parts.port))


def test_a_port_that_is_taken_is_told(tmp_path: object, opened: object) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"datagrams://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match="Cannot listen"):
            opened(headrace_datagrams.gateway(url, topics=("orders",)))  # type: ignore[operator]
