"""Reverse proxies: whose forwarded addresses are believed, and under which URL a server is reached
through one.

    peer        X-Forwarded-For               trusted          client
    10.0.0.2    203.0.113.9, 10.0.0.7         10.0.0.0/24      203.0.113.9
    10.0.0.2    1.2.3.4, 203.0.113.9          10.0.0.0/24      203.0.113.9
    8.8.8.8     203.0.113.9                   10.0.0.0/24      8.8.8.8

A sender can write anything into the header, and each proxy appends the address that it sees. So the
entries are read from the right, for as long as they are of trusted proxies.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.errors import InputError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
MAX_FORWARDED = 32
"""How many entries of X-Forwarded-For are read."""


@dataclass(frozen=True)
class TrustedProxies:
    """The addresses of proxies whose forwarded addresses are believed."""

    networks: tuple[Network, ...] = ()

    @classmethod
    def parse(cls, texts: Sequence[str]) -> TrustedProxies:
        """Return the proxies that addresses or networks name, such as `10.0.0.2` or `10.0.0.0/24`.

        Raises:
            InputError: A text is neither.
        """
        networks = []
        for text in texts:
            try:
                networks.append(ipaddress.ip_network(text.strip()))
            except ValueError as error:
                raise InputError(
                    f"{text!r} is no address of a proxy: {error}.",
                    fix="give an address or a network, such as 10.0.0.2 or 10.0.0.0/24.",
                ) from None
        return cls(tuple(networks))

    def is_trusted(self, address: str) -> bool:
        if not self.networks:
            return False
        try:
            parsed = ipaddress.ip_address(address.strip().strip("[]"))
        except ValueError:
            return False
        if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        return any(parsed in network for network in self.networks)

    def client_address(self, peer: str, headers: Mapping[str, str]) -> str:
        """Return the address of the client of a request: the peer's, unless that is a trusted
        proxy; then the last forwarded one that is not.
        """
        client = peer
        forwarded = headers.get("x-forwarded-for", "").split(",")[-MAX_FORWARDED:]
        while forwarded and self.is_trusted(client):
            text = forwarded.pop().strip()
            try:
                client = str(ipaddress.ip_address(text.strip("[]")))
            except ValueError:
                return client
        return client


NO_PROXIES = TrustedProxies()


@dataclass(frozen=True)
class PublicUrl:
    """The URL under which senders reach a server through a proxy."""

    scheme: str
    host: str
    """With the port, in lower case, as in a `Host` header."""
    path: str
    """The prefix of all paths, without a slash at its end."""

    @classmethod
    def parse(cls, text: str) -> PublicUrl:
        """Return the parts of a URL such as `https://in.example.com/ingest`.

        Raises:
            InputError: It is no URL of HTTP, or has a query.
        """
        parts = urlsplit(text)
        is_url = parts.scheme in {"http", "https"} and parts.netloc and "@" not in parts.netloc
        if not is_url or parts.query or parts.fragment:
            raise InputError(
                f"{text!r} is no public URL of a server.",
                fix="give one such as https://in.example.com/ingest.",
            )
        return cls(parts.scheme, parts.netloc.lower(), parts.path.rstrip("/"))

    @property
    def origin(self) -> str:
        return f"{self.scheme}://{self.host}"


class PathPrefix:
    """ASGI middleware that removes the public URL's prefix from paths. Proxies that remove it
    themselves work too.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and self._prefix and path.startswith(self._prefix + "/"):
            scope["path"] = path[len(self._prefix) :]
        await self._app(scope, receive, send)
