"""Around everything that is served beside a log with event stores: sealed values of people whose key was deleted leave as null (`events.veil`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.log.api import Log

if TYPE_CHECKING:
    from headrace.events.veil import Veil

_LENGTH = b"content-length"
_MASTER_KEYS = ("HEADRACE_MASTER_KEY", "HEADRACE_MASTER_KEY_FILE")


def veiled(app: ASGIApp, log: Log | None) -> ASGIApp:
    """The same, for a log that has no event stores; what is not there costs nothing."""
    root = Path(log.address.removeprefix("file:")) if log is not None and log.address.startswith("file:") else None
    if root is None or not (root / "events").is_dir():
        return app
    from headrace.events.vault import master_key_given
    from headrace.events.veil import Veil

    return Veiling(app, Veil(root, master_key_given() if any(name in os.environ for name in _MASTER_KEYS) else None))


class Veiling:
    """The head of an answer that tells its length waits for its body, which may become shorter or longer. Streams tell none."""

    def __init__(self, app: ASGIApp, veil: Veil) -> None:
        self._app, self._veil = app, veil

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        heads: list[Message] = []

        async def pass_on(message: Message) -> None:
            if message["type"] == "http.response.start" and any(name.lower() == _LENGTH for name, _ in message["headers"]):
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
    return [(name, b"%d" % len(message["body"]) if name.lower() == _LENGTH else value) for name, value in headers]
