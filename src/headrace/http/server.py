"""An HTTP server in a thread with its own event loop.

The server of views (`headrace.serve.server`) and the HTTP gateway
(`headrace.gateways.http_gateway`) use it. It ends with its process.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
import time
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

import uvicorn
from starlette.types import ASGIApp

from headrace.errors import ConfigurationError, RetryError
from headrace.http.connections import ConnectionGuard, ConnectionLimits, GuardedConnection

_START_S = 20.0
_BACKLOG = 1_024
GRACE_S = 5.0
"""How long running requests may take after `stop`."""


class PortTaken(ConfigurationError):
    """The port is in use. Choose another one, or 0 for any that is free."""


class _GuardedServer(uvicorn.Server):
    """Watches over the deadlines of its connections for as long as it runs."""

    def __init__(self, config: uvicorn.Config, guard: ConnectionGuard) -> None:
        super().__init__(config)
        self._guard = guard

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._sweeper = asyncio.get_running_loop().create_task(self._guard.run())
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self._sweeper.cancel()


class HttpServer:
    """Serves an ASGI application on a socket that listens.

    Args:
        app: The application.
        listening: The socket, from `listen`.
        host: The host in the server's address.
        name: The thread's name.
        limits: What connections may cost.
        grace_s: How long running requests may take after `stop`.
    """

    def __init__(
        self,
        app: ASGIApp,
        listening: socket.socket,
        *,
        host: str,
        name: str,
        limits: ConnectionLimits | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        limits = limits or ConnectionLimits()
        self.guard = ConnectionGuard(limits)
        protocol: Any = partial(GuardedConnection, guard=self.guard)
        config = uvicorn.Config(
            app,
            http=cast("type[asyncio.Protocol]", protocol),
            lifespan="on",
            log_config=None,
            access_log=False,
            ws="none",
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(limits.idle_s) + 1,  # the guard closes it before
            timeout_graceful_shutdown=int(grace_s),
            backlog=_BACKLOG,
        )
        self._listening = listening
        self._host = host
        self._grace_s = grace_s
        self._server = _GuardedServer(config, self.guard)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listening]}, name=name, daemon=True
        )

    @property
    def port(self) -> int:
        return int(self._listening.getsockname()[1]) if self._listening.fileno() >= 0 else 0

    @property
    def address(self) -> str:
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self.port}"

    def start(self) -> None:
        """Start the thread, and return when the server accepts connections."""
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise RetryError(
                    f"The server on {self._host} did not start.",
                    fix="see what it wrote to standard error.",
                )
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop accepting connections, and wait for running requests for `grace_s`."""
        self._server.should_exit = True
        self._thread.join(self._grace_s + _START_S)
        self._listening.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def listen(host: str, port: int, *, peer_timeout_s: float) -> socket.socket:
    """Return a socket that listens. A peer that accepts no data for `peer_timeout_s` is
    disconnected by the system, so that it cannot hold a connection for ever.

    Raises:
        PortTaken: The port is in use.
        ConfigurationError: The address cannot be listened on.
    """
    listening = None
    try:
        family, socket_kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, socket_kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listening.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(peer_timeout_s * 1_000)
            )
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        if listening is not None:
            listening.close()
        message = f"Cannot listen on {host}, port {port}: {error.strerror or error}."
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                message, fix="choose another with --port, or 0 for any that is free."
            ) from None
        raise ConfigurationError(message, fix="choose another --host or --port.") from None
    return listening
