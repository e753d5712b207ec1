"""Server-sent events: how one is written, and a response that sends them for as long as the client listens and keeps up."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator

from starlette.types import Receive, Scope, Send

from headrace.errors import HeadraceError
from headrace.serve.channels import Closing, Dropped

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
DROPPED = b'event: dropped\ndata: {"why":"too slow: connect again with the Last-Event-ID of the last event"}\n\n'


def event(kind: str, data: str, id: str | None = None) -> bytes:
    """One event. JSON text has no line breaks, so its data is one line."""
    place = f"id: {id}\n" if id is not None else ""
    return f"event: {kind}\n{place}data: {data}\n\n".encode()


class EventStream:
    """Sends events until there are no more, the client goes, or it does not take one for `slow_s` seconds."""

    def __init__(self, events: AsyncGenerator[bytes, None], slow_s: float) -> None:
        self._events, self._slow_s = events, slow_s

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        sending = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
        if not sending.cancelled() and (error := sending.exception()):
            raise error

    async def _send_all(self, send: Send) -> None:
        """A client that is stuck gets no last word: the connection is closed under it, and it resumes with the id of what it got."""
        async with contextlib.aclosing(self._events) as events:
            try:
                await self._send(send, b": hello\n\n")
                async for data in events:
                    await self._send(send, data)
            except Dropped:
                await self._send(send, DROPPED)
            except Closing:
                pass
            except HeadraceError as error:
                await self._send(send, event("error", json.dumps({"error": type(error).__name__, "message": error.message, "fix": error.fix})))
            except TimeoutError:
                return
        with contextlib.suppress(TimeoutError):
            await self._send(send, b"", more=False)

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        async with asyncio.timeout(self._slow_s):
            await send({"type": "http.response.body", "body": data, "more_body": more})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
