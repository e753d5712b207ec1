"""Who may ask. A server listens on this machine alone unless it has a token, and no page of another
origin can read from it, or make a browser ask.

- `Host` must be this machine's name for itself, as long as only this machine can connect: so a page
  whose name is made to resolve to it learns nothing.
- `Origin` and `Sec-Fetch-Site`, which browsers send and pages cannot forge, must be the server's
  own.
- with a token, every request but `/health` and the dashboard's page must have it in `Authorization:
  Bearer`.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import ConfigurationError
from headrace.log.api import Log
from headrace.serve.requests import Refused, error_response

if TYPE_CHECKING:
    from headrace.events.privacy.vault import Veil


TOKEN_VARIABLE = "HEADRACE_TOKEN"  # noqa: S105 - where it is, not what it is
SHORTEST_TOKEN = 16
_OPEN_TO_ALL = {
    "/health",
    "/",
    "/board.js",
    "/drawing.js",
    "/board.css",
    "/icon.svg",
}  # the dashboard's page has no data: it asks for that with the token
_HARMLESS_SITES = {None, "same-origin", "none"}


def is_loopback(host: str) -> bool:
    """Whether an address, or a name, can only mean this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def find_token(file: Path | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The token of a file, or of the environment; None if there is none. It is never in a
    pipeline's text, nor on a command line that others can list.
    """
    if file is not None:
        return _checked(_read(file), f"The token in {file}")
    given = environment.get(TOKEN_VARIABLE)
    return None if given is None else _checked(given, f"The token in {TOKEN_VARIABLE}")


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"The token file {file} cannot be read: {error}.",
            fix="name a file with one line of text.",
        ) from None


def _checked(token: str, what: str) -> str:
    if (
        len(token) < SHORTEST_TOKEN
        or not token.isascii()
        or not token.isprintable()
        or " " in token
    ):
        raise ConfigurationError(
            f"{what} is not one of {SHORTEST_TOKEN} or more letters, digits and signs.",
            fix="make one: python -c 'import secrets; print(secrets.token_urlsafe())'",
        )
    return token


def check_listening(host: str, token: str | None, *, what: str = "read the views") -> None:
    if token is None and not is_loopback(host):
        raise ConfigurationError(
            f"Listening on {host} would let everyone who can reach this machine {what}.",
            fix=f"give a token with --token-file or {TOKEN_VARIABLE}, or listen on 127.0.0.1.",
        )


class Access:
    """Turns requests away before anything else sees them. `signed` are paths whose requests prove
    by a signature who sent them; they may come under any name, through a proxy say.
    """

    def __init__(
        self, app: ASGIApp, *, host: str, token: str | None, signed: frozenset[str] = frozenset()
    ) -> None:
        self._app, self._token, self._signed = app, token, signed
        self._only_here = is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope["path"], Headers(scope=scope))
            except Refused as error:
                await error_response(error)(scope, receive, send)
                return
        elif scope["type"] != "lifespan":
            return  # a websocket, which nothing here speaks
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        if path in self._signed:
            return
        host = headers.get("host", "")
        if self._only_here and not is_loopback(host_name(host)):
            raise Refused(
                403, f"This server is not {host!r}.", fix="ask for it as localhost or 127.0.0.1."
            )
        self._check_origin(host, headers)
        if self._token is not None and path not in _OPEN_TO_ALL:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(
                given.strip().encode(), self._token.encode()
            ):
                raise Refused(
                    401,
                    "The token is missing or wrong.",
                    fix="send it as `Authorization: Bearer TOKEN`.",
                )

    def _check_origin(self, host: str, headers: Headers) -> None:
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if (
            origin is not None and origin.partition("://")[2].lower() != host.lower()
        ) or site not in _HARMLESS_SITES:
            raise Refused(
                403,
                f"A page of another origin ({origin or site}) may not ask.",
                fix="serve the page from this origin, or ask from a program.",
            )


def host_name(host: str) -> str:
    """Without the port."""
    if host.startswith("["):
        return host.partition("]")[0].removeprefix("[")
    return host.partition(":")[0]


# Around everything that is served beside a log with event stores: sealed values of people whose key
# was deleted leave as null (`events.veil`).


_LENGTH = b"content-length"
_MASTER_KEYS = ("HEADRACE_MASTER_KEY", "HEADRACE_MASTER_KEY_FILE")


def veiled(app: ASGIApp, log: Log | None) -> ASGIApp:
    """The same, for a log that has no event stores; what is not there costs nothing."""
    root = (
        Path(log.address.removeprefix("file:"))
        if log is not None and log.address.startswith("file:")
        else None
    )
    if root is None or not (root / "events").is_dir():
        return app
    from headrace.events.privacy.vault import Veil, master_key_given

    return Veiling(
        app,
        Veil(
            root, master_key_given() if any(name in os.environ for name in _MASTER_KEYS) else None
        ),
    )


class Veiling:
    """The head of an answer that tells its length waits for its body, which may become shorter or
    longer. Streams tell none.
    """

    def __init__(self, app: ASGIApp, veil: Veil) -> None:
        self._app, self._veil = app, veil

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        heads: list[Message] = []

        async def pass_on(message: Message) -> None:
            if message["type"] == "http.response.start" and any(
                name.lower() == _LENGTH for name, _ in message["headers"]
            ):
                heads.append(message)
                return
            if message["type"] == "http.response.body":
                message = {**message, "body": self._veil.shown(message.get("body", b""))}
            if heads:
                head = heads.pop()
                await send({**head, "headers": _with_length(head["headers"], message)})
            await send(message)

        await self._app(scope, receive, pass_on)


def _with_length(headers: Any, message: Message) -> list[tuple[bytes, bytes]]:
    """What tells its length comes in one piece."""
    return [
        (name, b"%d" % len(message["body"]) if name.lower() == _LENGTH else value)
        for name, value in headers
    ]
