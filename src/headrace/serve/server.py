"""The view server, in a thread of its own: next to a running pipeline (`headrace run`) or alone
(`headrace serve`).

    server = start(Path("shop.state"), log)
    print(server.address)
    server.stop()

The server has its own event loop, and ends with its process. `headrace.http.server` has the sockets
and threads.
"""

from __future__ import annotations

import socket
from pathlib import Path

from headrace.http.access import check_listening
from headrace.http.server import HttpServer, PortTaken, listen
from headrace.log import open_log
from headrace.log.api import Log
from headrace.serve.app import Service, make_app
from headrace.serve.postgres.listener import PostgresListener, PostgresOptions
from headrace.serve.requests import Limits

LOOPBACK = "127.0.0.1"
PORT = 8765
_NEXT_PORTS = 10


class Server(HttpServer):
    """A running view server. `stop` ends all open responses, streams included."""

    def __init__(
        self,
        service: Service,
        listening: socket.socket,
        *,
        host: str,
        token: str | None,
        own_log: Log | None,
    ) -> None:
        super().__init__(
            make_app(service, host=host, token=token), listening, host=host, name="headrace-serve"
        )
        self.service = service
        self._own_log = own_log

    @property
    def postgres_address(self) -> str | None:
        """Where Postgres's clients connect to, if they can."""
        listener = self.service.postgres
        return None if listener is None else listener.address

    def stop(self) -> None:
        self.service.end_streams()
        super().stop()
        if self._own_log is not None:
            self._own_log.close()


def start(
    state: Path,
    log: Log | str | None = None,
    port: int = 0,
    *,
    host: str = LOOPBACK,
    token: str | None = None,
    limits: Limits | None = None,
    postgres: PostgresOptions | None = None,
) -> Server:
    """Start a server for the views of a state directory.

    Args:
        state: The pipeline's state directory.
        log: The pipeline's log, or its address; without it, topics cannot be tailed and `at_least`
            is refused.
        port: The port; 0 is any free one.
        host: The address to listen on.
        token: The token that requests must send; required if `host` is not this machine.
        limits: The server's bounds, if not the defaults.
        postgres: How the views are served by Postgres's protocol too, if they are.

    Returns:
        The running server, with its `address`, and the `postgres_address` if there is one.

    Raises:
        ConfigurationError: The host needs a token, or the log cannot be opened.
        PortTaken: Another process listens on the port.

    Example:
        ``server = start(Path("shop.state"), "file:shop")``
    """
    check_listening(host, token)
    chosen = limits or Limits()
    listening = listen(host, port, peer_timeout_s=chosen.slow_s)
    listener = None
    try:
        if postgres is not None:
            listener = PostgresListener(postgres, token, slow_s=chosen.slow_s)
        opened = _open(log) if isinstance(log, str) else log
        server = Server(
            Service(Path(state), opened, chosen, listener),
            listening,
            host=host,
            token=token,
            own_log=opened if isinstance(log, str) else None,
        )
        server.start()
    except BaseException:
        listening.close()
        if listener is not None:
            listener.release()
        raise
    return server


def start_at_usual_port(
    state: Path, log: Log | str | None, port: int | None, *, host: str = LOOPBACK, token: str | None
) -> Server:
    """Start a server at a given port; without one, at the usual port, or if that is taken at one of
    the next ones, or at any free one.
    """
    if port is not None:
        return start(state, log, port, host=host, token=token)
    for usual in range(PORT, PORT + _NEXT_PORTS):
        try:
            return start(state, log, usual, host=host, token=token)
        except PortTaken:
            continue
    return start(state, log, 0, host=host, token=token)


def _open(address: str) -> Log:
    return open_log(address, create=False) if address.startswith("file:") else open_log(address)
