"""Hides the values of people whose key was deleted (`events.privacy`) in every response."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.log.api import Log

if TYPE_CHECKING:
    from headrace.events.privacy.vault import Redaction

_LENGTH = b"content-length"
_MASTER_KEYS = ("HEADRACE_MASTER_KEY", "HEADRACE_MASTER_KEY_FILE")


def redact_responses(app: ASGIApp, log: Log | None) -> ASGIApp:
    """Wrap an application in `RedactionMiddleware` if its log has event stores."""
    root = (
        Path(log.address.removeprefix("file:"))
        if log is not None and log.address.startswith("file:")
        else None
    )
    if root is None or not (root / "events").is_dir():
        return app
    from headrace.events.privacy.vault import Redaction, read_master_key

    return RedactionMiddleware(
        app,
        Redaction(
            root, read_master_key() if any(name in os.environ for name in _MASTER_KEYS) else None
        ),
    )


class RedactionMiddleware:
    """ASGI middleware that replaces sealed values of people whose key was deleted by null.

    The head of a response with a Content-Length is held back until its body is known, which the
    redaction may lengthen or shorten. Streams have no Content-Length.
    """

    def __init__(self, app: ASGIApp, redaction: Redaction) -> None:
        self._app = app
        self._redaction = redaction

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
                message = {**message, "body": self._redaction.redact(message.get("body", b""))}
            if heads:
                head = heads.pop()
                await send({**head, "headers": _with_length(head["headers"], message)})
            await send(message)

        await self._app(scope, receive, pass_on)


def _with_length(headers: Any, message: Message) -> list[tuple[bytes, bytes]]:
    """The headers with the length of a body, which comes in one piece."""
    return [
        (name, b"%d" % len(message["body"]) if name.lower() == _LENGTH else value)
        for name, value in headers
    ]
