"""Server-sent events: how one is written, and a response that sends them for as long as the client listens and keeps up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
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
        self._sending_since: float | None = None

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """A client that is stuck gets no last word: the connection is closed under it, and it resumes with the id of what it got."""
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        tasks = [asyncio.ensure_future(each) for each in (self._send_all(send), _gone(receive), self._stuck())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not tasks[0].cancelled() and (error := tasks[0].exception()):
            raise error

    async def _send_all(self, send: Send) -> None:
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
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        self._sending_since = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._sending_since = None

    async def _stuck(self) -> None:
        """Returns when one event has been on its way for too long. A look now and then costs less than a timer for each event."""
        while self._sending_since is None or time.monotonic() - self._sending_since < self._slow_s:  # noqa: ASYNC110 - nobody could set an event
            await asyncio.sleep(self._slow_s / 4)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
