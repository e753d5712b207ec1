"""Access control. A server listens on this machine alone unless it has a token, and no page of
another origin can read from it, or make a browser send it requests.

- `Host` must be a loopback name as long as only this machine can connect. So a page whose name is
  made to resolve to this machine (DNS rebinding) learns nothing.
- `Origin` and `Sec-Fetch-Site`, which browsers send and pages cannot forge, must be the server's
  own.
- With a token, every request but those for health, and for what else the server holds no data in,
  must send it in `Authorization: Bearer`.

Behind a reverse proxy, the host and the origin of the public URL are the server's own too.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.errors import ConfigurationError
from headrace.http.proxies import PublicUrl
from headrace.http.responses import Refused, error_response

TOKEN_VARIABLE = "HEADRACE_TOKEN"  # noqa: S105 - where it is, not what it is
SHORTEST_TOKEN = 16
HEALTH_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
"""Paths that anybody may request: they say nothing of the data."""
_HARMLESS_SITES = {None, "same-origin", "none"}


def is_loopback(host: str) -> bool:
    """Whether an address or name can only be this machine's."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def find_token(file: Path | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The token from a file or from the environment; None if there is neither. A token is never
    given in a pipeline's text, nor on a command line that others can list.
    """
    token = environment.get(TOKEN_VARIABLE)
    source = TOKEN_VARIABLE if file is None else str(file)
    if file is not None:
        try:
            token = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"The token file {file} cannot be read: {error}.",
                fix="name a file with one line of text.",
            ) from None
    if token is None:
        return None
    is_printable = token.isascii() and token.isprintable() and " " not in token
    if len(token) < SHORTEST_TOKEN or not is_printable:
        raise ConfigurationError(
            f"The token in {source} does not have {SHORTEST_TOKEN} or more letters, digits and"
            " signs.",
            fix="create one: python -c 'import secrets; print(secrets.token_urlsafe())'",
        )
    return token


def check_listening(host: str, token: str | None, *, what: str = "read the views") -> None:
    if token is None and not is_loopback(host):
        raise ConfigurationError(
            f"Listening on {host} would let everyone who can reach this machine {what}.",
            fix=f"give a token with --token-file or {TOKEN_VARIABLE}, or listen on 127.0.0.1.",
        )


class AccessMiddleware:
    """ASGI middleware that refuses requests before anything else sees them.

    Args:
        app: The application.
        host: The address that the server listens on.
        token: What requests must send, if there is a token.
        signed: Paths whose requests carry a signature of the sender. They may come under any host
            name, such as that of a proxy.
        public: The URL under which a proxy makes the server public.
        open_paths: Paths that need no token.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        token: str | None,
        signed: frozenset[str] = frozenset(),
        public: PublicUrl | None = None,
        open_paths: frozenset[str] = HEALTH_PATHS,
    ) -> None:
        self._app = app
        self._open_paths = open_paths
        self._public = public
        self._token = token
        self._signed = signed
        self._is_loopback = is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope["path"], Headers(scope=scope))
            except Refused as error:
                await error_response(error)(scope, receive, send)
                return
        elif scope["type"] != "lifespan":
            return  # a websocket, which no route supports
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        if path in self._signed:
            return
        host = headers.get("host", "")
        is_public = self._public is not None and host.lower() == self._public.host
        if self._is_loopback and not is_public and not is_loopback(host_name(host)):
            raise Refused(
                403, f"This server is not {host!r}.", fix="address it as localhost or 127.0.0.1."
            )
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        own_origins = {host.lower()} | ({self._public.host} if self._public is not None else set())
        if (
            origin is not None and origin.partition("://")[2].lower() not in own_origins
        ) or site not in _HARMLESS_SITES:
            raise Refused(
                403,
                f"A page of another origin ({origin or site}) may not send requests.",
                fix="serve the page from this origin, or send the request from a program.",
            )
        if self._token is not None and path not in self._open_paths:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(
                token.strip().encode(), self._token.encode()
            ):
                raise Refused(
                    401,
                    "The token is missing or wrong.",
                    fix="send it as `Authorization: Bearer TOKEN`.",
                )


def host_name(host: str) -> str:
    """The name in a `Host` header, without the port."""
    if host.startswith("["):
        return host.partition("]")[0].removeprefix("[")
    return host.partition(":")[0]
