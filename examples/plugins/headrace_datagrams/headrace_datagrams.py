"""A gateway that Headrace does not have: JSON in UDP datagrams, one row or several in each.

After `pip install ./examples/plugins/headrace_datagrams`, the command line knows its URLs:

    headrace gateway open datagrams://127.0.0.1:5140 --topic readings --log file:data
"""

import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from headrace.errors import ConfigurationError
from headrace.gateways import Gateway
from headrace.gateways.base import ThreadedGatewayServer

MAX_BYTES = 65_535


def gateway(
    url: str, *, topics: Sequence[str], name: str | None = None, **settings: Any
) -> Gateway:
    """Declare the gateway of a URL such as `datagrams://127.0.0.1:5140`."""
    parts = urlsplit(url)
    options = {"host": parts.hostname or "127.0.0.1", "port": parts.port or 0}
    name = name or f"datagrams.{options['port']}"
    given = {"kind": "datagrams", "name": name, "topics": tuple(topics), **settings}
    return Gateway(opener=DatagramServer, options=options, **given)


class DatagramServer(ThreadedGatewayServer):
    def start(self) -> None:
        host, port = self.gateway.options["host"], self.gateway.options["port"]
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.settimeout(0.1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise ConfigurationError(f"Cannot listen on {host}:{port}: {error}.") from error
        self.address = "datagrams://{}:{}".format(*self._socket.getsockname())
        super().start()

    def receive(self) -> None:
        while not self.stopped.is_set():
            try:
                self.accept(self._socket.recv(MAX_BYTES))
            except TimeoutError:
                continue

    def stop(self) -> None:
        super().stop()
        self._socket.close()
