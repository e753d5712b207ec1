"""The socket that clients of Postgres's protocol connect to, and its connections.

listener = PostgresListener(options, listening)
await listener.start(service)        # in the event loop of the server of views
await listener.close()
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.errors import ConfigurationError
from headrace.http.access import check_listening
from headrace.http.connections import allowed_connections
from headrace.http.server import listen
from headrace.serve.lookups import RowLookups
from headrace.serve.postgres.connection import ConnectionContext, PostgresConnection
from headrace.serve.postgres.key_lookup import KeyLookups
from headrace.serve.postgres.roles import Roles, read_roles
from headrace.serve.postgres.session import Backend, database_name

PORT = 5432
_CLOSE_S = 2.0


@dataclass(frozen=True)
class PostgresOptions:
    """How views are served by Postgres's protocol.

    Attributes:
        port: The port; 0 is any free one.
        host: The address to listen on.
        roles: The file of roles; see `headrace.serve.postgres.roles`.
        tls_certificate: The server's certificate, in PEM; clients may then encrypt.
        tls_key: Its key.
        requires_tls: Whether clients must encrypt.
        connections: The most connections.
    """

    port: int = PORT
    host: str = "127.0.0.1"
    roles: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    requires_tls: bool = False
    connections: int = 2_000


class ListenerBackend(Backend, Protocol):
    """What the listener needs of the server of views."""

    lookups: RowLookups


class PostgresListener:
    """Listens for clients of Postgres's protocol.

    Raises:
        ConfigurationError: The host needs a password, or a file cannot be read.
        PortTaken: Another process listens on the port.
    """

    def __init__(self, options: PostgresOptions, token: str | None, *, slow_s: float) -> None:
        roles = None if options.roles is None else read_roles(options.roles)
        if roles is None:
            check_listening(options.host, token)
        self._options = options
        self._roles = Roles(roles, token)
        self._tls = _tls_context(options)
        self._slow_s = slow_s
        self._max_connections = allowed_connections(options.connections)
        self._connections: set[PostgresConnection] = set()
        self._server: asyncio.Server | None = None
        self.listening = listen(options.host, options.port, peer_timeout_s=slow_s)

    @property
    def port(self) -> int:
        return int(self.listening.getsockname()[1])

    @property
    def address(self) -> str:
        host = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        return f"postgresql://{host}:{self.port}"

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    async def start(self, backend: ListenerBackend) -> None:
        """Accept connections, in the running event loop."""
        context = ConnectionContext(
            backend=backend,
            lookups=KeyLookups(backend.stores, backend.lookups),
            roles=self._roles,
            database=lambda: database_name(backend.stores),
            tls=self._tls,
            requires_tls=self._options.requires_tls,
            slow_s=self._slow_s,
            admit=self._admit,
            forget=self._connections.discard,
            cancel=self._cancel,
        )
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: PostgresConnection(context), sock=self.listening, backlog=1_024
        )

    async def close(self) -> None:
        """Stop accepting, and end all connections."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.shut_down()
        deadline = asyncio.get_running_loop().time() + _CLOSE_S
        while self._connections and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def release(self) -> None:
        """Close the socket of a listener that was not started."""
        self.listening.close()

    def _admit(self, connection: PostgresConnection) -> bool:
        if len(self._connections) >= self._max_connections:
            return False
        self._connections.add(connection)
        return True

    def _cancel(self, process: int, secret: int) -> None:
        """End what a session runs, for a client that knows its secret. There is no answer, so that
        nothing can be learned by trying.
        """
        for connection in self._connections:
            session = connection.session
            if (
                session is not None
                and session.process == process
                and secrets.compare_digest(str(connection.secret), str(secret))
            ):
                connection.cancel()


def _tls_context(options: PostgresOptions) -> ssl.SSLContext | None:
    if options.tls_certificate is None:
        if options.requires_tls or options.tls_key is not None:
            raise ConfigurationError(
                "TLS needs a certificate.", fix="give --tls-cert FILE and --tls-key FILE."
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(options.tls_certificate, options.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"The certificate {options.tls_certificate} cannot be used: {error}.",
            fix="give a certificate and its key, both in PEM, without a password.",
        ) from None
    return context
