"""A server in a thread: beside a pipeline that runs (`headrace run`), or on its own (`headrace
serve`).

    server = start(Path("shop.state"), log)
    print(server.address)
    server.stop()

It has its own event loop, and ends with its process.
"""

from __future__ import annotations

import socket
from pathlib import Path

from headrace.http_server import HttpServer, PortTaken, listen
from headrace.log import open_log
from headrace.log.api import Log
from headrace.serve.access import check_listening
from headrace.serve.app import Service, make_app
from headrace.serve.requests import Limits

LOOPBACK = "127.0.0.1"
PORT = 8765
_NEXT_PORTS = 10


class Server(HttpServer):
    """One that serves views. `stop` ends every answer that is under way, and everyone's stream."""

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
        self.service, self._own_log = service, own_log

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
) -> Server:
    """Serve the views of a state directory from now on. Port 0 is any that is free. Elsewhere than
    on this machine only with a token.
    """
    check_listening(host, token)
    chosen = limits or Limits()
    listening = listen(host, port, slow_s=chosen.slow_s)
    try:
        opened = _open(log) if isinstance(log, str) else log
        server = Server(
            Service(Path(state), opened, chosen),
            listening,
            host=host,
            token=token,
            own_log=opened if isinstance(log, str) else None,
        )
        server.begin()
    except BaseException:
        listening.close()
        raise
    return server


def start_at_usual_port(
    state: Path, log: Log | str | None, port: int | None, *, host: str = LOOPBACK, token: str | None
) -> Server:
    """At a port that was chosen; or, if none was, at the usual one, the next if that is taken, or
    any.
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
