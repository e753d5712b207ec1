"""A server in a thread: beside a pipeline that runs (`headrace run`), or on its own (`headrace serve`).

    server = start(Path("shop.state"), log)
    print(server.address)
    server.stop()

It has its own event loop, and ends with its process.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import uvicorn

from headrace.errors import ConfigurationError, RetryError
from headrace.log import open_log
from headrace.log.api import Log
from headrace.serve.access import check_listening
from headrace.serve.app import Service, make_app
from headrace.serve.limits import Limits

LOOPBACK = "127.0.0.1"
PORT = 8765
_START_S = 20.0
_NEXT_PORTS = 10
_BACKLOG = 2_048


class PortTaken(ConfigurationError):
    """Another listens there."""


class Server:
    """One that listens. `stop` ends every answer that is under way, and everyone's stream."""

    def __init__(self, service: Service, listening: socket.socket, *, host: str, token: str | None, own_log: Log | None) -> None:
        config = uvicorn.Config(
            make_app(service, host=host, token=token),
            lifespan="on",
            log_config=None,
            access_log=False,
            ws="none",
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=5,
            h11_max_incomplete_event_size=32 << 10,
        )
        self.service, self._listening, self._own_log, self._host = service, listening, own_log, host
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]}, name="headrace-serve", daemon=True)

    @property
    def port(self) -> int:
        return int(self._listening.getsockname()[1]) if self._listening.fileno() >= 0 else 0

    @property
    def address(self) -> str:
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self.port}"

    def begin(self) -> None:
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise RetryError(f"The server on {self._host} did not start.", fix="look at what it wrote to standard error.")
            time.sleep(0.01)

    def stop(self) -> None:
        self.service.end_streams()
        self._server.should_exit = True
        self._thread.join(_START_S)
        self._listening.close()
        if self._own_log is not None:
            self._own_log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop()


def start(
    state: Path, log: Log | str | None = None, port: int = 0, *, host: str = LOOPBACK, token: str | None = None, limits: Limits | None = None
) -> Server:
    """Serve the views of a state directory from now on. Port 0 is any that is free. Elsewhere than on this machine only with a token."""
    check_listening(host, token)
    chosen = limits or Limits()
    listening = _listen(host, port, chosen)
    try:
        opened = _open(log) if isinstance(log, str) else log
        server = Server(Service(Path(state), opened, chosen), listening, host=host, token=token, own_log=opened if isinstance(log, str) else None)
        server.begin()
    except BaseException:
        listening.close()
        raise
    return server


def start_at_usual_port(state: Path, log: Log | str | None, port: int | None, *, host: str = LOOPBACK, token: str | None) -> Server:
    """At a port that was chosen; or, if none was, at the usual one, the next if that is taken, or any."""
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


def _listen(host: str, port: int, limits: Limits) -> socket.socket:
    """A peer that takes nothing for too long is forgotten by the system itself, so that it cannot hold a connection for ever."""
    listening = None
    try:
        family, socket_kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, socket_kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.slow_s * 1_000))
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        if listening is not None:
            listening.close()
        taken = error.errno == errno.EADDRINUSE
        fix = "choose another with --port, or 0 for any that is free." if taken else "choose another --host or --port."
        kind = PortTaken if taken else ConfigurationError
        raise kind(f"Cannot listen on {host}, port {port}: {error.strerror or error}.", fix=fix) from None
    return listening
